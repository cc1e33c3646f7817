//! `/proc/meminfo` (fs/proc/meminfo.c), `/proc/vmstat` (mm/vmstat.c) and `/proc/pressure/*` (kernel/sched/psi.c).

use super::text::{field, kib, lines, malformed, number};
use pagefold_base::memory::{MemInfo, Pressure, PressureLine};
use pagefold_base::{Bytes, Reading};
use std::collections::BTreeMap;

/// The host's memory from `/proc/meminfo`.
pub fn meminfo(bytes: &[u8]) -> MemInfo {
    let amount = |key| field(bytes, key).and_then(kib);
    MemInfo {
        total: amount("MemTotal"),
        free: amount("MemFree"),
        available: amount("MemAvailable"),
        anon: amount("AnonPages"),
        anon_huge: amount("AnonHugePages"),
        swap_total: amount("SwapTotal"),
        swap_free: amount("SwapFree"),
        hugetlb: amount("Hugetlb"),
    }
}

/// The sum of `Buffers` and `Cached` of `/proc/meminfo`.
pub fn buffers_and_cached(bytes: &[u8]) -> Reading<Bytes> {
    let amount = |key| field(bytes, key).and_then(kib);
    Ok(amount("Buffers")? + amount("Cached")?)
}

/// Both lines of a file under `/proc/pressure` (4.20). `cpu` has no `full` line before 5.13.
pub fn pressure(bytes: &[u8]) -> Reading<Pressure> {
    let line = |key| field(bytes, key).and_then(pressure_line);
    Ok(Pressure { some: line("some")?, full: line("full")? })
}

/// The `some` line of a file under `/proc/pressure`, which `cpu` has on all kernels.
pub fn pressure_some(bytes: &[u8]) -> Reading<PressureLine> {
    field(bytes, "some").and_then(pressure_line)
}

fn pressure_line(text: &[u8]) -> Reading<PressureLine> {
    let value = |key: &str| {
        text.split(|&byte| byte == b' ')
            .find_map(|part| part.strip_prefix(key.as_bytes())?.strip_prefix(b"="))
            .ok_or_else(|| malformed(&format!("no {key} in a line of pressure"), text))
    };
    let percent = |key| {
        let digits = value(key)?;
        // `nan`, `inf` and exponents are floating-point numbers too, but the kernel never prints them.
        match digits.iter().all(|byte| byte.is_ascii_digit() || *byte == b'.') {
            true => number::<f64>(digits),
            false => Err(malformed("not a percentage", digits)),
        }
    };
    Ok(PressureLine {
        avg10: percent("avg10")?,
        avg60: percent("avg60")?,
        avg300: percent("avg300")?,
        total: value("total").and_then(number)?,
    })
}

/// The counters of `/proc/vmstat` by name. Lines without a name and a number are skipped.
pub fn vmstat(bytes: &[u8]) -> BTreeMap<String, u64> {
    let counter = |line: Reading<&[u8]>| {
        let (name, value) = std::str::from_utf8(line.ok()?).ok()?.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines(bytes).filter_map(counter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Absent;
    use proptest::prelude::*;

    #[test]
    fn memory_files_of_a_real_host_are_parsed() {
        let kib = |amount| Ok(Bytes::from_kib(amount));
        let memory = meminfo(include_bytes!("samples/meminfo"));
        assert_eq!(memory.total, kib(24_684_092));
        assert!(buffers_and_cached(include_bytes!("samples/meminfo")).unwrap() > Bytes::ZERO);
        assert_eq!((memory.swap_total, memory.swap_free, memory.hugetlb), (kib(0), kib(0), kib(4096)));
        assert!(memory.anon.unwrap() > Bytes::ZERO && memory.available.unwrap() < memory.total.unwrap());
        assert!(memory.free.is_ok() && memory.anon_huge.is_ok());

        let counters = vmstat(include_bytes!("samples/vmstat"));
        assert_eq!(counters.len(), include_str!("samples/vmstat").lines().count());
        assert_eq!(counters["nr_anon_transparent_hugepages"], 0);
        assert!(counters.contains_key("cow_ksm"));

        let pressure = pressure(include_bytes!("samples/pressure")).unwrap();
        assert_eq!(pressure.some, PressureLine { avg10: 0.0, avg60: 0.0, avg300: 0.0, total: 0 });
    }

    #[test]
    fn absent_malformed_and_cut_fields_are_told_apart() {
        let memory =
            meminfo(b"MemTotal:       18446744073709551616 kB\nMemFree: 1 kB\nMemAvailable: a\nSwapTotal: 9\n");
        assert!(matches!(memory.total, Err(Absent::Malformed(_))));
        assert_eq!(memory.free, Ok(Bytes(1024)));
        assert_eq!(memory.available, Err(Absent::Malformed("not an amount in kB: \"a\"".into())));
        assert!(matches!(memory.swap_total, Err(Absent::Malformed(_))));
        assert_eq!(memory.hugetlb, Err(Absent::NotOnThisKernel));
        assert!(matches!(meminfo(b"MemTotal: 1 kB\nMemFr").free, Err(Absent::Malformed(_))));
    }

    #[test]
    fn both_pressure_lines_are_parsed() {
        let some = PressureLine { avg10: 1.5, avg60: 0.25, avg300: 100.0, total: 42 };
        let full = PressureLine { avg10: 0.0, avg60: 0.1, avg300: 0.02, total: 7 };
        let text =
            "some avg10=1.50 avg60=0.25 avg300=100.00 total=42\nfull avg10=0.00 avg60=0.10 avg300=0.02 total=7\n";
        assert_eq!(pressure(text.as_bytes()), Ok(Pressure { some, full }));
    }

    #[test]
    fn malformed_pressure_is_rejected() {
        let some = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(pressure(some.as_bytes()), Err(Absent::NotOnThisKernel), "cpu before 5.13");
        assert_eq!(pressure_some(some.as_bytes()).map(|line| line.total), Ok(0));
        for full in [
            "full avg10=nan avg60=0.00 avg300=0.00 total=0\n",
            "full avg10=1e9 avg60=0.00 avg300=0.00 total=0\n",
            "full avg10=-1.0 avg60=0.00 avg300=0.00 total=0\n",
            "full avg10=. avg60=0.00 avg300=0.00 total=0\n",
            "full avg60=0.00 avg300=0.00 total=0\n",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=18446744073709551616\n",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=1",
        ] {
            let reading = pressure(format!("{some}{full}").as_bytes());
            assert!(matches!(reading, Err(Absent::Malformed(_))), "{reading:?} of {full:?}");
        }
    }

    #[test]
    fn malformed_vmstat_lines_are_skipped() {
        let counters = vmstat(b"a 1\nb\nc x\nd -1\n\xff 2\ne 18446744073709551616\nf 18446744073709551615\ng 12");
        assert_eq!(counters.into_iter().collect::<Vec<_>>(), [("a".into(), 1), ("f".into(), u64::MAX)]);
    }

    fn format_meminfo(memory: &MemInfo) -> String {
        let lines = [
            ("MemTotal", &memory.total),
            ("MemFree", &memory.free),
            ("MemAvailable", &memory.available),
            ("AnonPages", &memory.anon),
            ("AnonHugePages", &memory.anon_huge),
            ("SwapTotal", &memory.swap_total),
            ("SwapFree", &memory.swap_free),
            ("Hugetlb", &memory.hugetlb),
        ];
        let present = lines.iter().filter_map(|(key, amount)| Some((key, amount.as_ref().ok()?)));
        present.map(|(key, bytes)| format!("{:<16}{:>8} kB\n", format!("{key}:"), bytes.0 / 1024)).collect()
    }

    proptest! {
        #[test]
        fn meminfo_round_trips(amounts in prop::array::uniform8(prop::option::of(0u64..1 << 54))) {
            let [total, free, available, anon, anon_huge, swap_total, swap_free, hugetlb] =
                amounts.map(|kib| kib.map(|kib| Bytes(kib << 10)).ok_or(Absent::NotOnThisKernel));
            let memory = MemInfo { total, free, available, anon, anon_huge, swap_total, swap_free, hugetlb };
            prop_assert_eq!(meminfo(format_meminfo(&memory).as_bytes()), memory);
        }

        #[test]
        fn arbitrary_input_does_not_panic(bytes: Vec<u8>) {
            let _ = (meminfo(&bytes), pressure(&bytes), pressure_some(&bytes), vmstat(&bytes));
            let _ = pressure(&[b"some ".as_slice(), &bytes, b"\nfull ", &bytes, b"\n"].concat());
        }
    }
}
