//! `/proc/PID/smaps` and `/proc/PID/smaps_rollup` (fs/proc/task_mmu.c, `show_smap` and `show_smaps_rollup`).
//!
//! An entry of smaps is a line as in `/proc/PID/maps`, lines of `Key:  N kB`, and `VmFlags:`, which has been the last
//! line since 3.8. Keys differ between versions (`KSM:` in 6.6, `Pss_Dirty:` in 6.0, `FilePmdMapped:` in 5.4), so
//! unknown keys are skipped. The kernel writes a newline in a file's name as `\012`, so a name never spans lines.
//!
//! A process with 100,000 regions has about 70 MB of this text. The parser reads it once and allocates only the regions
//! and their names.

use super::text::{field, kib, lines, malformed};
use pagefold_base::process::SmapsRollup;
use pagefold_base::region::{MapsEntry, Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Reading};

/// Bytes of a typical entry, to estimate the capacity of the result.
const TYPICAL_ENTRY_BYTES: usize = 640;

/// The regions of `/proc/PID/smaps`, in file order; none for a process without memory.
///
/// A truncated file yields its complete entries, up to the last complete `VmFlags:`. `Rss:`, `Anonymous:` and
/// `VmFlags:` are required. If a kernel does not print `AnonHugePages:`, `Swap:`, or `Shared_Hugetlb:` and
/// `Private_Hugetlb:` (before 4.4), these amounts count as zero.
pub fn smaps(bytes: &[u8]) -> Reading<Vec<Region>> {
    let mut regions = Vec::with_capacity(bytes.len() / TYPICAL_ENTRY_BYTES);
    let mut entry: Option<SmapsEntry> = None;
    for line in lines(bytes) {
        let Ok(line) = line else { break };
        if line.first().is_some_and(u8::is_ascii_uppercase) {
            entry.as_mut().ok_or_else(|| malformed("a field of smaps before any region", line))?.parse_field(line)?;
        } else if let Some(complete) = entry.replace(SmapsEntry::from_header(line)?) {
            regions.push(complete.finish()?);
        }
    }
    if let Some(last) = entry.filter(|entry| entry.has_flags) {
        regions.push(last.finish()?);
    }
    Ok(regions)
}

/// The lines of `/proc/PID/maps`, in file order; a truncated last line is left out.
pub fn maps(bytes: &[u8]) -> Reading<Vec<MapsEntry>> {
    lines(bytes).map_while(Result::ok).map(parse_header).collect()
}

/// An entry that is being parsed.
struct SmapsEntry {
    region: Region,
    has_rss: bool,
    has_anonymous: bool,
    has_flags: bool,
}

impl SmapsEntry {
    fn from_header(line: &[u8]) -> Reading<Self> {
        let MapsEntry { range, permissions, inode, name } = parse_header(line)?;
        let region = Region { permissions, inode, name, ..Region::empty(range) };
        Ok(Self { region, has_rss: false, has_anonymous: false, has_flags: false })
    }

    /// Parses a line `Key: value`.
    fn parse_field(&mut self, line: &[u8]) -> Reading<()> {
        let (key, value) = split_at_byte(line, b':').ok_or_else(|| malformed("not a field of smaps", line))?;
        let amount = || parse_kib(value).ok_or_else(|| malformed("not an amount in kB", line));
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
            b"VmFlags" => (region.flags, self.has_flags) = (parse_vm_flags(value), true),
            _ => {}
        }
        Ok(())
    }

    fn finish(self) -> Reading<Region> {
        let required = [(self.has_rss, "Rss:"), (self.has_anonymous, "Anonymous:"), (self.has_flags, "VmFlags:")];
        match required.iter().find(|(is_present, _)| !is_present) {
            Some((_, key)) => Err(Absent::Malformed(format!("region {} of smaps has no {key}", self.region.range))),
            None => Ok(self.region),
        }
    }
}

/// Parses the line of addresses, permissions, offset, device, inode and name.
fn parse_header(line: &[u8]) -> Reading<MapsEntry> {
    let parse = || -> Option<MapsEntry> {
        let (start, rest) = split_at_byte(line, b'-')?;
        let (end, rest) = split_at_byte(rest, b' ')?;
        let (permissions, rest) = split_at_byte(rest, b' ')?;
        let (_offset, rest) = split_at_byte(rest, b' ')?;
        let (_device, rest) = split_at_byte(rest, b' ')?;
        let (inode, name) = split_at_byte(rest, b' ').unwrap_or((rest, b""));
        let range = AddressRange { start: parse_hexadecimal(start)?, end: parse_hexadecimal(end)? };
        let name = &name[name.iter().take_while(|&&byte| byte == b' ').count()..];
        (range.start < range.end).then_some(MapsEntry {
            range,
            permissions: permissions.try_into().ok()?,
            inode: parse_decimal(inode)?,
            name: String::from_utf8_lossy(name).into_owned(),
        })
    };
    parse().ok_or_else(|| malformed("not a line of smaps", line))
}

/// The parts before and after the first `separator`.
fn split_at_byte(bytes: &[u8], separator: u8) -> Option<(&[u8], &[u8])> {
    let position = bytes.iter().position(|&byte| byte == separator)?;
    Some((&bytes[..position], &bytes[position + 1..]))
}

fn parse_hexadecimal(digits: &[u8]) -> Option<u64> {
    // from_str_radix would accept a sign.
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0, |value, &digit| Some(value << 4 | u64::from((digit as char).to_digit(16)?)))
}

fn parse_decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &digit| {
        let digit = digit.is_ascii_digit().then(|| u64::from(digit - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    })
}

/// Like `text::kib`, without the cost of error messages.
fn parse_kib(value: &[u8]) -> Option<Bytes> {
    parse_decimal(value.trim_ascii_start().strip_suffix(b" kB")?)?.checked_mul(1024).map(Bytes)
}

fn parse_vm_flags(value: &[u8]) -> VmFlags {
    value
        .split(|&byte| byte == b' ')
        .filter_map(|mnemonic| std::str::from_utf8(mnemonic).ok())
        .fold(VmFlags::default(), |flags, mnemonic| flags.with(VmFlags::from_mnemonic(mnemonic)))
}

/// The totals of `/proc/PID/smaps_rollup` (4.14).
///
/// The file of a process without memory cannot be read. If it is empty, the memory counts as vanished.
pub fn rollup(bytes: &[u8]) -> SmapsRollup {
    let amount = |key| match bytes.is_empty() {
        true => Err(Absent::Vanished),
        false => field(bytes, key).and_then(kib),
    };
    SmapsRollup {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMAPS_SAMPLE: &[u8] = include_bytes!("samples/smaps");

    /// Linux 4.18, hand-written after fs/proc/task_mmu.c: no `Pss_Dirty:`, `KSM:`, `FilePmdMapped:`, `THPeligible:`.
    const SMAPS_OF_LINUX_4_18: &str = "\
00400000-0040c000 r-xp 00000000 fd:00 1234 /opt/a program/bin
Size:                 48 kB
KernelPageSize:        4 kB
MMUPageSize:           4 kB
Rss:                  44 kB
Pss:                  44 kB
Shared_Clean:          0 kB
Shared_Dirty:          0 kB
Private_Clean:        40 kB
Private_Dirty:         4 kB
Referenced:           44 kB
Anonymous:             4 kB
LazyFree:              0 kB
AnonHugePages:         0 kB
ShmemPmdMapped:        0 kB
Shared_Hugetlb:     2048 kB
Private_Hugetlb:    4096 kB
Swap:                  8 kB
SwapPss:               8 kB
Locked:                0 kB
ProtectionKey:         0
VmFlags: rd ex mr mw me dw sd ?? \n";

    fn expect_malformed(reading: Reading<Vec<Region>>) -> String {
        match reading {
            Err(Absent::Malformed(text)) => text,
            other => panic!("expected a malformed reading, got {other:?}"),
        }
    }

    #[test]
    fn maps_lines_are_parsed() {
        let text = b"1000-3000 rw-p 00000000 00:00 0 [heap]\n\
            7f0000000000-7f0000001000 r--s 00002000 08:01 77                     /lib/a b\nffff";
        let regions = maps(text).unwrap();
        let ranges: Vec<_> = regions.iter().map(|region| (region.range.start, region.range.end)).collect();
        assert_eq!(ranges, [(0x1000, 0x3000), (0x7f00_0000_0000, 0x7f00_0000_1000)], "the last line is truncated");
        assert_eq!((regions[0].name.as_str(), regions[1].name.as_str(), regions[1].inode), ("[heap]", "/lib/a b", 77));
        assert_eq!(regions[1].permissions, *b"r--s");
        assert!(matches!(maps(b"Rss: 4 kB\n"), Err(Absent::Malformed(_))));
    }

    #[test]
    fn smaps_of_a_real_process_is_parsed() {
        let regions = smaps(SMAPS_SAMPLE).unwrap();
        assert_eq!(regions.len(), 30);
        let named = |name: &str| regions.iter().find(|region| region.name == name).expect(name);

        let heap = named("[heap]");
        assert_eq!(heap.range, AddressRange { start: 0x55c6_96eb_e000, end: 0x55c6_9706_e000 });
        assert_eq!((heap.permissions, heap.inode), (*b"rw-p", 0));
        assert_eq!((heap.rss, heap.anonymous), (Bytes::from_kib(1696), Bytes::from_kib(1696)));
        assert!(heap.flags.has(VmFlags::MERGEABLE) && !heap.flags.has(VmFlags::SHARED));

        let memfd = named("/memfd:guest ram (deleted)");
        assert_eq!((memfd.permissions, memfd.inode), (*b"rw-s", 1025));
        assert!(memfd.flags.has(VmFlags::SHARED) && memfd.flags.has(VmFlags::MAY_SHARE));

        let huge = named("/anon_hugepage (deleted)");
        assert_eq!((huge.rss, huge.hugetlb), (Bytes::ZERO, Bytes::from_kib(2048)));
        assert!(huge.flags.has(VmFlags::HUGETLB));

        assert_eq!(named("/tmp/a dir/na\u{fffd}me: (x)\\0127f00-7f01 (deleted)").inode, 9_995_051);
        assert!(named("[vvar]").flags.has(VmFlags::PFN_MAP));
        assert!(named("/dev/zero (deleted)").flags.has(VmFlags::LOCKED));
        assert_eq!(named("[vsyscall]").range.end, 0xffff_ffff_ff60_1000);
        assert_eq!(named("[vsyscall]").permissions, *b"--xp");

        let sum = |figure: fn(&Region) -> Bytes| regions.iter().map(figure).sum::<Bytes>();
        assert_eq!(sum(|region| region.ksm.clone().unwrap()), Bytes::from_kib(3156), "as smaps_rollup says");
    }

    #[test]
    fn smaps_rollup_is_parsed() {
        let sums = rollup(include_bytes!("samples/smaps_rollup"));
        let kib = |amount| Ok(Bytes::from_kib(amount));
        let expected = SmapsRollup {
            rss: kib(17132),
            pss: kib(12203),
            private_clean: kib(4668),
            private_dirty: kib(7188),
            anonymous: kib(10324),
            anon_huge: kib(0),
            ksm: kib(3156),
            swap: kib(0),
        };
        assert_eq!(sums, expected);
    }

    #[test]
    fn rollup_tells_absent_cut_and_empty_apart() {
        let header = "55c6-7ffd ---p 00000000 00:00 0 [rollup]\n";
        let older = rollup(format!("{header}Rss: 8 kB\nPss: 4 kB\n").as_bytes());
        assert_eq!((older.rss, older.ksm), (Ok(Bytes(8192)), Err(Absent::NotOnThisKernel)));
        let cut = rollup(format!("{header}Rss: 8 kB\nPss: 4").as_bytes());
        assert_eq!(cut.rss, Ok(Bytes(8192)));
        assert!(matches!(cut.pss, Err(Absent::Malformed(_))));
        assert!(matches!(cut.ksm, Err(Absent::Malformed(_))));
        assert_eq!(rollup(b"").rss, Err(Absent::Vanished));
    }

    #[test]
    fn smaps_of_linux_4_18_is_parsed() {
        let region = Region {
            permissions: *b"r-xp",
            inode: 1234,
            name: "/opt/a program/bin".into(),
            rss: Bytes::from_kib(44),
            anonymous: Bytes::from_kib(4),
            swap: Bytes::from_kib(8),
            hugetlb: Bytes::from_kib(6144),
            ..Region::empty(AddressRange { start: 0x40_0000, end: 0x40_c000 })
        };
        assert_eq!(region.ksm, Err(Absent::NotOnThisKernel));
        assert_eq!(smaps(SMAPS_OF_LINUX_4_18.as_bytes()), Ok(vec![region]));
    }

    #[test]
    fn empty_smaps_has_no_regions() {
        assert_eq!(smaps(b""), Ok(vec![]));
    }

    #[test]
    fn malformed_smaps_is_shown_in_the_error() {
        let check = |text: &str, shown: &str| {
            let message = expect_malformed(smaps(text.as_bytes()));
            assert!(message.contains(shown), "{message:?} of {text:?}");
        };
        check("Rss: 4 kB\n", "before any region: \"Rss: 4 kB\"");
        check("\n", "not a line of smaps");
        check("a\0b\n", "a\\0b");
        check("2000-1000 rw-p 0 0:0 0\n", "2000-1000");
        check("1000-1000 rw-p 0 0:0 0\n", "1000-1000");
        check("1000-12345678901234567 rw-p 0 0:0 0\n", "12345678901234567");
        check("1000-2000 rw- 0 0:0 0\n", "rw- ");
        check("1000-2000 rw-p 0 0:0 18446744073709551616\n", "18446744073709551616");
        check("1000-2000 rw-p 0 0:0 0\nRss: x kB\n", "Rss: x kB");
        check("1000-2000 rw-p 0 0:0 0\nRss: -1 kB\n", "Rss: -1 kB");
        check("1000-2000 rw-p 0 0:0 0\nRss: 18014398509481984 kB\n", "Rss: 18014398509481984 kB");
        check("1000-2000 rw-p 0 0:0 0\nRss: 18446744073709551616 kB\n", "18446744073709551616");
        check("1000-2000 rw-p 0 0:0 0\nRss\n", "Rss");
        check("1000-2000 rw-p 0 0:0 0\nRss: 1 kB\nVmFlags: rd \n", "00001000-00002000 of smaps has no Anonymous:");
        check("1000-2000 rw-p 0 0:0 0\n2000-3000 rw-p 0 0:0 0\n", "has no Rss:");
    }

    #[test]
    fn truncated_smaps_yields_complete_entries() {
        let whole = smaps(SMAPS_SAMPLE).unwrap();
        let ends = entry_end_offsets(SMAPS_SAMPLE);
        assert_eq!(ends.len(), whole.len());
        for length in 0..=SMAPS_SAMPLE.len() {
            let complete = ends.iter().filter(|&&end| end <= length).count();
            assert_eq!(smaps(&SMAPS_SAMPLE[..length]).as_deref(), Ok(&whole[..complete]), "cut at {length}");
        }
    }

    /// The offsets where the `VmFlags:` lines end.
    fn entry_end_offsets(text: &[u8]) -> Vec<usize> {
        let mut at = 0;
        let mut ends = Vec::new();
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            at += line.len();
            if line.starts_with(b"VmFlags:") {
                ends.push(at);
            }
        }
        ends
    }

    fn any_region() -> impl Strategy<Value = Region> {
        let amounts = prop::array::uniform6(0u64..1 << 54);
        let flags = prop::sample::subsequence(MNEMONICS.to_vec(), 0..=MNEMONICS.len());
        let permissions = ("[r-][w-][x-][sp]").prop_map(|text| text.into_bytes().try_into().unwrap());
        let name = prop_oneof![Just(String::new()), "[/\\[][^\n]{0,40}"];
        (any::<(u64, u64)>(), permissions, any::<u64>(), name, amounts, any::<bool>(), flags)
            .prop_filter("addresses ascend", |((start, end), ..)| start < end)
            .prop_map(|((start, end), permissions, inode, name, amounts, has_ksm, flags)| {
                let [rss, anonymous, anon_huge, ksm, swap, hugetlb] = amounts.map(|kib| Bytes(kib << 10));
                let ksm = if has_ksm { Ok(ksm) } else { Err(Absent::NotOnThisKernel) };
                let flags = flags.iter().fold(VmFlags::default(), |all, one| all.with(VmFlags::from_mnemonic(one)));
                let range = AddressRange { start, end };
                Region { range, permissions, inode, name, rss, anonymous, anon_huge, ksm, swap, hugetlb, flags }
            })
    }

    const MNEMONICS: [&str; 12] = ["sh", "ms", "pf", "io", "de", "ht", "mm", "dp", "mg", "hg", "lo", "uw"];

    /// An entry in the kernel's format, with the hugetlb pages split in halves.
    fn format_smaps_entry(region: &Region) -> String {
        let permissions = std::str::from_utf8(&region.permissions).unwrap();
        let mut text = format!("{} {permissions} 00000000 fe:00 {:<26} {}\n", region.range, region.inode, region.name);
        let half = region.hugetlb.0 / 2048 * 1024;
        let lines = [
            ("Size", region.range.bytes().0),
            ("Rss", region.rss.0),
            ("Pss", 0),
            ("Anonymous", region.anonymous.0),
            ("AnonHugePages", region.anon_huge.0),
            ("Shared_Hugetlb", half),
            ("Private_Hugetlb", region.hugetlb.0 - half),
            ("Swap", region.swap.0),
        ];
        for (key, bytes) in lines.into_iter().chain(region.ksm.iter().map(|ksm| ("KSM", ksm.0))) {
            text += &format!("{:<16}{:>8} kB\n", format!("{key}:"), bytes / 1024);
        }
        let set = MNEMONICS.into_iter().filter(|mnemonic| region.flags.has(VmFlags::from_mnemonic(mnemonic)));
        text + "THPeligible:           0\nVmFlags: "
            + &set.map(|mnemonic| format!("{mnemonic} ")).collect::<String>()
            + "\n"
    }

    proptest! {
        #[test]
        fn smaps_round_trips(regions in prop::collection::vec(any_region(), 0..6)) {
            let text: String = regions.iter().map(format_smaps_entry).collect();
            prop_assert_eq!(smaps(text.as_bytes()), Ok(regions));
        }

        #[test]
        fn arbitrary_input_does_not_panic(bytes: Vec<u8>) {
            let _ = (smaps(&bytes), rollup(&bytes));
        }

        #[test]
        fn damaged_smaps_does_not_panic(at in 0..SMAPS_SAMPLE.len(), byte: u8, length in 0..SMAPS_SAMPLE.len()) {
            let mut damaged = SMAPS_SAMPLE.to_vec();
            damaged[at] = byte;
            let _ = (smaps(&damaged[..length]), rollup(&damaged));
        }
    }
}
