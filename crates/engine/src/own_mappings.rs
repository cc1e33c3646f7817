//! Mappings of this process, read from `/proc/thread-self/maps`: which ranges are ordinary memory, which map the store,
//! and which are neither.

use crate::store::FileIdentity;
use pagefold_base::AddressRange;
use pagefold_base::engine::STORE_MEMFD_NAME;
use pagefold_sys::pagemap::RangeContents;
use std::io::{self, BufRead, BufReader};

/// Kind of a mapping, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnMappingKind {
    /// Private anonymous memory that is readable and writable.
    Ordinary,
    /// Slots of a store.
    Stored {
        /// The first slot, for the domain's store. `None` for a former store, which this process used before files of
        /// the domain were removed.
        first_slot: Option<u32>,
        /// Whether it is mapped as a merge maps it: private, readable and writable.
        is_as_merged: bool,
    },
}

impl OwnMappingKind {
    /// Whether it maps slots of the domain's store.
    pub fn has_slots(self) -> bool {
        matches!(self, Self::Stored { first_slot: Some(_), .. })
    }

    /// Kinds of pages that the kernel can find in such a mapping.
    pub fn range_contents(self) -> RangeContents {
        match self {
            Self::Ordinary => RangeContents::OnlyAnonymous,
            Self::Stored { .. } => RangeContents::Anything,
        }
    }
}

/// A mapping of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnMapping {
    /// Its address range.
    pub range: AddressRange,
    /// Its kind.
    pub kind: OwnMappingKind,
}

/// All mappings of either kind, ascending, and the number of all mappings of this process.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps`, since `/proc/self/maps` is empty once the main thread has ended;
/// `InvalidData` for a malformed line, and for an empty file.
pub fn read_own_mappings(store: FileIdentity, page_bytes: u64) -> io::Result<(Vec<OwnMapping>, u64)> {
    let mut mappings = Vec::new();
    let mut mapping_count = 0;
    let mut reader = BufReader::with_capacity(1 << 16, std::fs::File::open("/proc/thread-self/maps")?);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        mapping_count += 1;
        let text = String::from_utf8_lossy(&line);
        let mapping = parse_maps_line(&text, store, page_bytes)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, &*text))?;
        mappings.extend(mapping);
        line.clear();
    }
    // This code itself is mapped, so the file cannot be empty.
    if mapping_count == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "/proc/thread-self/maps is empty"));
    }
    Ok((mappings, mapping_count))
}

/// Parse one line: outer `None` if it is malformed, inner `None` if it is of neither kind.
fn parse_maps_line(line: &str, store: FileIdentity, page_bytes: u64) -> Option<Option<OwnMapping>> {
    let parse_hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = AddressRange { start: parse_hex(start)?, end: parse_hex(end)? };
    let permissions = words.next()?;
    let offset = parse_hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = rustix::fs::makedev(parse_hex(major)? as u32, parse_hex(minor)? as u32);
    let inode: u64 = words.next()?.parse().ok()?;
    let kind = if (device, inode) == store {
        Some(OwnMappingKind::Stored {
            first_slot: Some((offset / page_bytes) as u32),
            is_as_merged: permissions == "rw-p",
        })
    } else if words.clone().next().and_then(|path| path.strip_prefix("/memfd:")) == Some(STORE_MEMFD_NAME) {
        Some(OwnMappingKind::Stored { first_slot: None, is_as_merged: permissions == "rw-p" })
    } else {
        // The main stack grows, and its pages are not at the offsets that they seem to have.
        let is_ordinary = (device, inode) == (0, 0) && permissions == "rw-p" && words.next() != Some("[stack]");
        is_ordinary.then_some(OwnMappingKind::Ordinary)
    };
    Some(kind.map(|kind| OwnMapping { range, kind }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<OwnMappingKind>) {
        let kind = parse_maps_line(line, (rustix::fs::makedev(0, 1), 77), 4096).expect("a line").map(|part| part.kind);
        assert_eq!(kind, expected, "{line}");
    }

    #[test]
    fn maps_lines_give_the_mapping_kind() {
        check("7f00-8000 rw-p 00000000 00:00 0 ", Some(OwnMappingKind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [heap]", Some(OwnMappingKind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [anon:x]", Some(OwnMappingKind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [stack]", None);
        check("7f00-8000 r--p 00000000 00:00 0 ", None);
        check("7f00-8000 rw-s 00000000 00:01 9 /dev/zero (deleted)", None);
        check(
            "7f00-8000 rw-p 00005000 00:01 77 /memfd:pagefold-store (deleted)",
            Some(OwnMappingKind::Stored { first_slot: Some(5), is_as_merged: true }),
        );
        let protected = Some(OwnMappingKind::Stored { first_slot: Some(5), is_as_merged: false });
        check("7f00-8000 r--p 00005000 00:01 77 /memfd:pagefold-store (deleted)", protected);
        let former = Some(OwnMappingKind::Stored { first_slot: None, is_as_merged: true });
        check("7f00-8000 rw-p 00005000 00:01 76 /memfd:pagefold-store (deleted)", former);
        check("7f00-8000 rw-p 00005000 00:01 76 /memfd:pagefold-storehouse (deleted)", None);
        check("7f00-8000 rw-p 00005000 fd:01 77 /a b", None);
        // Some file systems number inodes from 0.
        check("7f00-8000 rw-p 00000000 fd:01 0 /a", None);
        assert_eq!(parse_maps_line("nonsense", (0, 0), 4096), None);
    }

    #[test]
    fn own_mappings_are_readable() {
        let (mappings, mapping_count) = read_own_mappings((0, 77), 4096).unwrap();
        assert!(!mappings.is_empty() && mapping_count > mappings.len() as u64);
        assert!(mappings.is_sorted_by_key(|part| part.range.start));
    }
}
