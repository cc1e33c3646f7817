//! What this process has mapped, read from `/proc/thread-self/maps`: which parts of its regions are ordinary memory, which map
//! the store, and which have become something else.

use crate::store::Identity;
use pagefold_base::AddressRange;
use pagefold_base::engine::STORE;
use pagefold_sys::pagemap::Holds;
use std::io::{self, BufRead, BufReader};

/// What is mapped somewhere, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Private anonymous memory that may be read and written.
    Ordinary,
    /// A store from a slot on.
    Stored {
        /// The first, of the domain's store; none of a former one, which this process had before files of the domain
        /// were removed.
        slot: Option<u32>,
        /// Whether it is mapped as merging maps it: privately, to be read and written.
        plain: bool,
    },
}

impl Kind {
    /// Whether it maps slots of the domain's store.
    pub fn has_slots(self) -> bool {
        matches!(self, Self::Stored { slot: Some(_), .. })
    }

    /// What the kernel can find in such a part.
    pub fn holds(self) -> Holds {
        match self {
            Self::Ordinary => Holds::Anonymous,
            Self::Stored { .. } => Holds::Anything,
        }
    }
}

/// A part of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where.
    pub range: AddressRange,
    /// What.
    pub kind: Kind,
}

/// All parts of this process of either kind, ascending, and how many mappings it has in all.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps`, since `/proc/self` has none once the main thread has ended; `InvalidData`
/// for a line of another form, and where there is none.
pub fn own(store: Identity, page: u64) -> io::Result<(Vec<Part>, u64)> {
    let mut parts = Vec::new();
    let mut mappings = 0;
    let mut reader = BufReader::with_capacity(1 << 16, std::fs::File::open("/proc/thread-self/maps")?);
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line)? > 0 {
        mappings += 1;
        let text = String::from_utf8_lossy(&line);
        let part = part(&text, store, page).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, &*text))?;
        parts.extend(part);
        line.clear();
    }
    // This very code is mapped.
    if mappings == 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "/proc/thread-self/maps is empty"));
    }
    Ok((parts, mappings))
}

/// One line: `None` if it has another form, and within, if it is of neither kind.
fn part(line: &str, store: Identity, page: u64) -> Option<Option<Part>> {
    let hexadecimal = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let range = AddressRange { start: hexadecimal(start)?, end: hexadecimal(end)? };
    let permissions = words.next()?;
    let offset = hexadecimal(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let device = rustix::fs::makedev(hexadecimal(major)? as u32, hexadecimal(minor)? as u32);
    let inode: u64 = words.next()?.parse().ok()?;
    let kind = if (device, inode) == store {
        Some(Kind::Stored { slot: Some((offset / page) as u32), plain: permissions == "rw-p" })
    } else if words.clone().next().and_then(|path| path.strip_prefix("/memfd:")) == Some(STORE) {
        Some(Kind::Stored { slot: None, plain: permissions == "rw-p" })
    } else {
        // The main stack grows, and its pages are not where they seem to be.
        let ordinary = (device, inode) == (0, 0) && permissions == "rw-p" && words.next() != Some("[stack]");
        ordinary.then_some(Kind::Ordinary)
    };
    Some(kind.map(|kind| Part { range, kind }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<Kind>) {
        let found = part(line, (rustix::fs::makedev(0, 1), 77), 4096).expect("a line").map(|part| part.kind);
        assert_eq!(found, expected, "{line}");
    }

    #[test]
    fn lines_tell_what_is_mapped() {
        check("7f00-8000 rw-p 00000000 00:00 0 ", Some(Kind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [heap]", Some(Kind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [anon:x]", Some(Kind::Ordinary));
        check("7f00-8000 rw-p 00000000 00:00 0          [stack]", None);
        check("7f00-8000 r--p 00000000 00:00 0 ", None);
        check("7f00-8000 rw-s 00000000 00:01 9 /dev/zero (deleted)", None);
        check(
            "7f00-8000 rw-p 00005000 00:01 77 /memfd:pagefold-store (deleted)",
            Some(Kind::Stored { slot: Some(5), plain: true }),
        );
        let protected = Some(Kind::Stored { slot: Some(5), plain: false });
        check("7f00-8000 r--p 00005000 00:01 77 /memfd:pagefold-store (deleted)", protected);
        let former = Some(Kind::Stored { slot: None, plain: true });
        check("7f00-8000 rw-p 00005000 00:01 76 /memfd:pagefold-store (deleted)", former);
        check("7f00-8000 rw-p 00005000 00:01 76 /memfd:pagefold-storehouse (deleted)", None);
        check("7f00-8000 rw-p 00005000 fd:01 77 /a b", None);
        // Some file systems number from 0.
        check("7f00-8000 rw-p 00000000 fd:01 0 /a", None);
        assert_eq!(part("nonsense", (0, 0), 4096), None);
    }

    #[test]
    fn this_process_can_be_read() {
        let (parts, mappings) = own((0, 77), 4096).unwrap();
        assert!(!parts.is_empty() && mappings > parts.len() as u64);
        assert!(parts.is_sorted_by_key(|part| part.range.start));
    }
}
