//! `/proc/PID/smaps` and `/proc/PID/smaps_rollup` (fs/proc/task_mmu.c, `show_smap` and `show_smaps_rollup`).
//!
//! An entry of smaps is a line as in `/proc/PID/maps`, lines of `Key:  N kB`, and `VmFlags:`, which has been the last
//! line since 3.8. Keys came and went (`KSM:` in 6.6, `Pss_Dirty:` in 6.0, `FilePmdMapped:` in 5.4), so the unknown are
//! passed over. The kernel writes a line feed in a file's name as `\012`, so a line is never part of a name.
//!
//! A process of 100,000 regions has some 70 MB of this text. It is gone through once, and nothing is allocated but the
//! regions and their names.

use super::text::{field, kib, lines, malformed};
use pagefold_model::process::Rollup;
use pagefold_model::region::{Region, VmFlags};
use pagefold_model::{Absent, AddressRange, Bytes, Reading};

/// Bytes of text of a typical entry, to size the result by.
const TYPICAL_ENTRY: usize = 640;

/// The regions of `/proc/PID/smaps`, in the order given; none for a process without memory.
///
/// A file that was cut off gives the entries that are whole, that is up to the last complete `VmFlags:`. `Rss:`,
/// `Anonymous:` and `VmFlags:` are required. A kernel that does not print `AnonHugePages:`, `Swap:` or
/// `Shared_Hugetlb:` and `Private_Hugetlb:` (before 4.4) has none of those pages.
pub fn smaps(bytes: &[u8]) -> Reading<Vec<Region>> {
    let mut regions = Vec::with_capacity(bytes.len() / TYPICAL_ENTRY);
    let mut open: Option<Entry> = None;
    for line in lines(bytes) {
        let Ok(line) = line else { break };
        if line.first().is_some_and(u8::is_ascii_uppercase) {
            open.as_mut().ok_or_else(|| malformed("a field of smaps before any region", line))?.take(line)?;
        } else if let Some(whole) = open.replace(Entry::begin(line)?) {
            regions.push(whole.finish()?);
        }
    }
    if let Some(last) = open.filter(|entry| entry.has_flags) {
        regions.push(last.finish()?);
    }
    Ok(regions)
}

/// An entry that is being read.
struct Entry {
    region: Region,
    has_rss: bool,
    has_anonymous: bool,
    has_flags: bool,
}

impl Entry {
    /// From the line of addresses, permissions, offset, device, inode and name.
    fn begin(line: &[u8]) -> Reading<Self> {
        let header = || -> Option<Region> {
            let (start, rest) = split(line, b'-')?;
            let (end, rest) = split(rest, b' ')?;
            let (permissions, rest) = split(rest, b' ')?;
            let (_offset, rest) = split(rest, b' ')?;
            let (_device, rest) = split(rest, b' ')?;
            let (inode, name) = split(rest, b' ').unwrap_or((rest, b""));
            let range = AddressRange { start: hexadecimal(start)?, end: hexadecimal(end)? };
            let name = &name[name.iter().take_while(|&&byte| byte == b' ').count()..];
            (range.start < range.end).then_some(Region {
                permissions: permissions.try_into().ok()?,
                inode: decimal(inode)?,
                name: String::from_utf8_lossy(name).into_owned(),
                ..Region::empty(range)
            })
        };
        let region = header().ok_or_else(|| malformed("not a line of smaps", line))?;
        Ok(Self { region, has_rss: false, has_anonymous: false, has_flags: false })
    }

    /// Take in a line `Key: value`.
    fn take(&mut self, line: &[u8]) -> Reading<()> {
        let (key, value) = split(line, b':').ok_or_else(|| malformed("not a field of smaps", line))?;
        let amount = || amount(value).ok_or_else(|| malformed("not an amount in kB", line));
        let region = &mut self.region;
        match key {
            b"Rss" => (region.rss, self.has_rss) = (amount()?, true),
            b"Anonymous" => (region.anonymous, self.has_anonymous) = (amount()?, true),
            b"AnonHugePages" => region.anon_huge = amount()?,
            b"KSM" => region.ksm = Ok(amount()?),
            b"Swap" => region.swap = amount()?,
            b"Shared_Hugetlb" | b"Private_Hugetlb" => {
                region.hugetlb = Bytes(region.hugetlb.0.saturating_add(amount()?.0));
            }
            b"VmFlags" => (region.flags, self.has_flags) = (flags(value), true),
            _ => {}
        }
        Ok(())
    }

    fn finish(self) -> Reading<Region> {
        let missing = [(self.has_rss, "Rss:"), (self.has_anonymous, "Anonymous:"), (self.has_flags, "VmFlags:")];
        match missing.iter().find(|(has, _)| !has) {
            Some((_, key)) => Err(Absent::Malformed(format!("region {} of smaps has no {key}", self.region.range))),
            None => Ok(self.region),
        }
    }
}

/// What stands before and after the first `at`.
fn split(bytes: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let position = bytes.iter().position(|&byte| byte == at)?;
    Some((&bytes[..position], &bytes[position + 1..]))
}

fn hexadecimal(digits: &[u8]) -> Option<u64> {
    // from_str_radix would take a sign.
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0, |value, &digit| Some(value << 4 | u64::from((digit as char).to_digit(16)?)))
}

fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// As `text::kib`, without the cost of its messages.
fn amount(value: &[u8]) -> Option<Bytes> {
    decimal(value.trim_ascii_start().strip_suffix(b" kB")?)?.checked_mul(1024).map(Bytes)
}

fn flags(value: &[u8]) -> VmFlags {
    value
        .split(|&byte| byte == b' ')
        .filter_map(|mnemonic| std::str::from_utf8(mnemonic).ok())
        .fold(VmFlags::default(), |flags, mnemonic| flags.with(VmFlags::from_mnemonic(mnemonic)))
}

/// The sums of `/proc/PID/smaps_rollup` (4.14).
///
/// The file of a process without memory cannot be read; should it be empty, its memory has vanished.
pub fn rollup(bytes: &[u8]) -> Rollup {
    let amount = |key| match bytes.is_empty() {
        true => Err(Absent::Vanished),
        false => field(bytes, key).and_then(kib),
    };
    Rollup {
        rss: amount("Rss"),
        pss: amount("Pss"),
        private_clean: amount("Private_Clean"),
        private_dirty: amount("Private_Dirty"),
        anonymous: amount("Anonymous"),
        anon_huge: amount("AnonHugePages"),
        ksm: amount("KSM"),
        swap: amount("Swap"),
    }
}
