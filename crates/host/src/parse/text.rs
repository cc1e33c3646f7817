//! Common elements of the kernel's text files: lines, `key value` fields, numbers and lists of numbers.

use pagefold_base::{Absent, Bytes, Reading};
use std::collections::BTreeMap;
use std::str::FromStr;

/// Maximum number of offending bytes in a message.
const MAX_SHOWN_BYTES: usize = 60;

/// Maximum count of numbers in a list. The kernel's own limits, `NR_CPUS` and `MAX_NUMNODES`, are below it; garbage
/// such as `0-4294967295` is above it.
const MAX_LIST_NUMBERS: usize = 1 << 16;

/// The error that `bytes` are malformed, with the message `what`.
pub(super) fn malformed(what: &str, bytes: &[u8]) -> Absent {
    let excerpt = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_SHOWN_BYTES)]);
    let ellipsis = if bytes.len() > MAX_SHOWN_BYTES { "..." } else { "" };
    Absent::Malformed(format!("{what}: {excerpt:?}{ellipsis}"))
}

/// The lines of a file without their newlines; an error in place of a last line without one.
pub(super) fn lines(bytes: &[u8]) -> impl Iterator<Item = Reading<&[u8]>> {
    bytes
        .split_inclusive(|&byte| byte == b'\n')
        .map(|line| line.strip_suffix(b"\n").ok_or_else(|| malformed("truncated line", line)))
}

/// The trimmed value of the first line that begins with `key` and a colon or a blank.
pub(super) fn field<'a>(bytes: &'a [u8], key: &str) -> Reading<&'a [u8]> {
    for line in lines(bytes) {
        if let Some((b':' | b' ' | b'\t', value)) = line?.strip_prefix(key.as_bytes()).and_then(<[u8]>::split_first) {
            return Ok(value.trim_ascii());
        }
    }
    Err(Absent::NotOnThisKernel)
}

/// One number with blanks around it, in decimal.
pub fn number<T: FromStr>(bytes: &[u8]) -> Reading<T> {
    std::str::from_utf8(bytes.trim_ascii())
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| malformed("not a number in range", bytes))
}

/// Permission bits in octal, as a recording has them: `644`.
pub fn file_mode(bytes: &[u8]) -> Reading<u32> {
    let text = std::str::from_utf8(bytes.trim_ascii()).ok();
    let mode = text.and_then(|text| u32::from_str_radix(text, 8).ok()).filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| malformed("not permission bits in octal", bytes))
}

/// `/proc/PID/schedstat`: the scheduling times of a thread, in nanoseconds (fs/proc/base.c, `proc_pid_schedstat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedstat {
    /// Time spent running.
    pub run_ns: u64,
    /// Time spent waiting in a run queue.
    pub wait_ns: u64,
}

/// Parses `/proc/PID/schedstat`.
pub fn schedstat(bytes: &[u8]) -> Reading<Schedstat> {
    let mut words = bytes.split(|&byte| byte == b' ');
    let mut word = || words.next().ok_or_else(|| malformed("not a line of schedstat", bytes)).and_then(number);
    Ok(Schedstat { run_ns: word()?, wait_ns: word()? })
}

/// The first line of `/proc/stat`: the ticks of all CPUs together (fs/proc/stat.c, `show_stat`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTicks {
    /// Fields 1 to 8, without the guest fields, whose ticks these include.
    pub total: u64,
    /// Field 8: the time that a hypervisor gave to other guests.
    pub steal: u64,
}

impl CpuTicks {
    /// The share of stolen time between this reading and a later one.
    pub fn steal_share(self, later: Self) -> f64 {
        let elapsed_ticks = later.total.saturating_sub(self.total).max(1);
        (later.steal.saturating_sub(self.steal) as f64 / elapsed_ticks as f64).min(1.0)
    }
}

/// Parses the first line of `/proc/stat`.
pub fn cpu_ticks(bytes: &[u8]) -> Reading<CpuTicks> {
    let no_line = || malformed("no line for all CPUs", bytes);
    let line =
        bytes.strip_prefix(b"cpu ").and_then(|rest| rest.split(|&byte| byte == b'\n').next()).ok_or_else(no_line)?;
    let words = line.split(|&byte| byte == b' ').filter(|word| !word.is_empty()).take(8);
    let ticks = words.map(number::<u64>).collect::<Reading<Vec<u64>>>()?;
    let stolen = *ticks.get(7).ok_or_else(no_line)?;
    Ok(CpuTicks { total: ticks.iter().fold(0, |sum: u64, ticks| sum.saturating_add(*ticks)), steal: stolen })
}

/// The ticks of one CPU in `/proc/stat`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleTicks {
    /// Fields 1 to 8.
    pub total: u64,
    /// Fields 4 and 5: idle, also with outstanding I/O.
    pub idle: u64,
}

/// Parses the lines of single CPUs of `/proc/stat`, by their numbers. The file has online CPUs only.
pub fn idle_ticks(bytes: &[u8]) -> Reading<BTreeMap<u32, IdleTicks>> {
    let mut cpus = BTreeMap::new();
    for line in lines(bytes) {
        let line = line?;
        let Some(rest) = line.strip_prefix(b"cpu").filter(|rest| rest.first().is_some_and(u8::is_ascii_digit)) else {
            continue;
        };
        let mut words = rest.split(|&byte| byte == b' ');
        let cpu = number(words.next().unwrap_or_default())?;
        let ticks = words.take(8).map(number::<u64>).collect::<Reading<Vec<u64>>>()?;
        let [_, _, _, idle, io_wait, ..] = ticks[..] else { return Err(malformed("no line of a CPU", line)) };
        let total = ticks.iter().fold(0, |sum: u64, ticks| sum.saturating_add(*ticks));
        cpus.insert(cpu, IdleTicks { total, idle: idle.saturating_add(io_wait) });
    }
    Ok(cpus)
}

/// A signed count, also if an older kernel printed a negative one as unsigned.
pub(super) fn signed(bytes: &[u8]) -> Reading<i64> {
    number::<i64>(bytes).or_else(|_| number::<u64>(bytes).map(u64::cast_signed))
}

/// An amount as `/proc` prints it: `1764 kB`.
pub(super) fn kib(bytes: &[u8]) -> Reading<Bytes> {
    let digits = bytes.trim_ascii().strip_suffix(b" kB").ok_or_else(|| malformed("not an amount in kB", bytes))?;
    number::<u64>(digits)?
        .checked_mul(1024)
        .map(Bytes)
        .ok_or_else(|| malformed("an amount beyond 64 bits of bytes", bytes))
}

/// The selected word of a setting that lists its choices: `madvise` of `always [madvise] never`.
pub fn bracketed_word(bytes: &[u8]) -> Reading<String> {
    enclosed_word(bytes, b'[', b']').ok_or_else(|| malformed("no word in brackets", bytes))
}

/// The word in parentheses, such as `full` of `none voluntary (full) lazy` (kernel/sched/debug.c,
/// `sched_dynamic_show`).
pub fn parenthesized_word(bytes: &[u8]) -> Reading<String> {
    enclosed_word(bytes, b'(', b')').ok_or_else(|| malformed("no word in parentheses", bytes))
}

fn enclosed_word(bytes: &[u8], open: u8, close: u8) -> Option<String> {
    let word = &bytes[bytes.iter().position(|&byte| byte == open)? + 1..];
    let end = word.iter().position(|&byte| byte == close)?;
    Some(String::from_utf8_lossy(&word[..end]).into_owned())
}

/// A list of processors or nodes, `0-3,8`, in file order; empty for empty text (lib/vsprintf.c, `%*pbl`). A list of
/// more than 65,536 numbers is malformed.
pub fn number_list(bytes: &[u8]) -> Reading<Vec<u32>> {
    let text = bytes.trim_ascii();
    let mut list = Vec::new();
    if text.is_empty() {
        return Ok(list);
    }
    for part in text.split(|&byte| byte == b',') {
        let (first, last) = match part.iter().position(|&byte| byte == b'-') {
            Some(dash) => (number::<u32>(&part[..dash])?, number::<u32>(&part[dash + 1..])?),
            None => number(part).map(|only| (only, only))?,
        };
        if first > last || (last - first) as usize >= MAX_LIST_NUMBERS - list.len() {
            return Err(malformed("not a list of processors or nodes", bytes));
        }
        list.extend(first..=last);
    }
    Ok(list)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn is_malformed<T>(reading: Reading<T>) -> bool {
        matches!(reading, Err(Absent::Malformed(_)))
    }

    #[test]
    fn number_rejects_other_text() {
        assert_eq!(number::<u64>(b"100\n"), Ok(100));
        assert_eq!(number::<u64>(b" 18446744073709551615"), Ok(u64::MAX));
        assert_eq!(number::<i64>(b"-4096\n"), Ok(-4096));
        for text in ["", "\n", "18446744073709551616", "-1", "1 2", "0x10", "1\u{a0}"] {
            assert!(is_malformed(number::<u64>(text.as_bytes())), "{text:?}");
        }
        assert_eq!(number::<u64>(b"\xff7"), Err(Absent::Malformed("not a number in range: \"\u{fffd}7\"".into())));
    }

    #[test]
    fn idle_ticks_are_parsed_for_each_cpu() {
        let text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 1 2 3 40 5 6 7 8 1 0\ncpu12 1 0 0 2 3 0 0 0 0 0\nintr 5\n";
        let expected = [(0, IdleTicks { total: 72, idle: 45 }), (12, IdleTicks { total: 6, idle: 5 })];
        assert_eq!(idle_ticks(text.as_bytes()), Ok(expected.into()));
        assert_eq!(idle_ticks(b"intr 5\n"), Ok(BTreeMap::new()));
        for bad in ["cpu0 1 2 3\n", "cpu0 1 2 x 4 5 6 7 8\n", "cpu0 1 2 3 4 5 6"] {
            assert!(is_malformed(idle_ticks(bad.as_bytes())), "{bad:?}");
        }
    }

    #[test]
    fn wrapped_unsigned_counter_is_negative() {
        assert_eq!(signed(b"18446744073709551615\n"), Ok(-1));
        assert_eq!(signed(b"-1\n"), Ok(-1));
        assert!(is_malformed(signed(b"18446744073709551616")));
    }

    #[test]
    fn bracketed_word_is_parsed() {
        assert_eq!(bracketed_word(b"always [madvise] never\n").as_deref(), Ok("madvise"));
        assert_eq!(bracketed_word(b"[none] scan-time\n").as_deref(), Ok("none"));
        for text in ["", "always", "[always", "]a[", "0"] {
            assert!(is_malformed(bracketed_word(text.as_bytes())), "{text:?}");
        }
    }

    #[test]
    fn parenthesized_word_is_parsed() {
        assert_eq!(parenthesized_word(b"none voluntary (full) lazy\n").as_deref(), Ok("full"));
        for text in ["", "full", "(full", ")full(", "[full]"] {
            assert!(is_malformed(parenthesized_word(text.as_bytes())), "{text:?}");
        }
    }

    #[test]
    fn number_lists_with_ranges_are_parsed() {
        assert_eq!(number_list(b"0-3,8\n"), Ok(vec![0, 1, 2, 3, 8]));
        assert_eq!(number_list(b"0\n"), Ok(vec![0]));
        assert_eq!(number_list(b"\n"), Ok(vec![]));
        assert_eq!(number_list(b"0-65535").map(|list| list.len()), Ok(65536));
        for text in ["3-0", "0-4294967295", "0-65536", "0-65535,1", "a", "0,", "0-", "-1", "0-1-2"] {
            assert!(is_malformed(number_list(text.as_bytes())), "{text:?}");
        }
    }

    #[test]
    fn kib_amount_overflow_is_malformed() {
        assert_eq!(kib(b"1764 kB"), Ok(Bytes(1764 * 1024)));
        assert!(is_malformed(kib(b"18014398509481984 kB")));
        assert!(is_malformed(kib(b"5")));
        assert!(is_malformed(kib(b"kB")));
    }

    #[test]
    fn cut_last_line_is_malformed() {
        assert_eq!(field(b"a: 1\nbc: 2\n", "bc"), Ok(&b"2"[..]));
        assert_eq!(field(b"bcd: 1\nbc 2\n", "bc"), Ok(&b"2"[..]));
        assert_eq!(field(b"a: 1\n", "bc"), Err(Absent::NotOnThisKernel));
        assert_eq!(field(b"", "bc"), Err(Absent::NotOnThisKernel));
        assert!(is_malformed(field(b"a: 1\nbc: 2", "bc")));
        assert!(is_malformed(field(b"a: 1\nd: 2", "bc")));
    }

    #[test]
    fn malformed_message_truncates_long_input() {
        let Absent::Malformed(text) = malformed("garbage", &[b'x'; 1000]) else { panic!("not malformed") };
        assert_eq!(text, format!("garbage: \"{}\"...", "x".repeat(60)));
    }

    proptest! {
        #[test]
        fn arbitrary_input_does_not_panic(bytes: Vec<u8>) {
            let _ = (number::<u64>(&bytes), signed(&bytes), kib(&bytes), bracketed_word(&bytes), number_list(&bytes));
            let _ = (field(&bytes, "Pss"), file_mode(&bytes));
        }

        #[test]
        fn permission_bits_round_trip(mode in 0u32..=0o777) {
            prop_assert_eq!(file_mode(format!("{mode:o}\n").as_bytes()), Ok(mode));
        }

        #[test]
        fn number_list_round_trips(ranges in prop::collection::vec((0u32..5000, 0u32..50), 1..20)) {
            let text: Vec<String> = ranges.iter().map(|(first, more)| format!("{first}-{}", first + more)).collect();
            let numbers: Vec<u32> = ranges.iter().flat_map(|&(first, more)| first..=first + more).collect();
            prop_assert_eq!(number_list(text.join(",").as_bytes()), Ok(numbers));
        }
    }
}
