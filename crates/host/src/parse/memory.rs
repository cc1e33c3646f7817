//! `/proc/meminfo` (fs/proc/meminfo.c), `/proc/vmstat` (mm/vmstat.c) and `/proc/pressure/*` (kernel/sched/psi.c).

use super::text::{field, kib, lines, malformed, number};
use pagefold_model::Reading;
use pagefold_model::memory::{Memory, Pressure, PressureLine};
use std::collections::BTreeMap;

/// The host's memory from `/proc/meminfo`.
pub fn meminfo(bytes: &[u8]) -> Memory {
    let amount = |key| field(bytes, key).and_then(kib);
    Memory {
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

/// Both lines of a file under `/proc/pressure` (4.20). `cpu` has no `full` line before 5.13.
pub fn pressure(bytes: &[u8]) -> Reading<Pressure> {
    let line = |key| field(bytes, key).and_then(pressure_line);
    Ok(Pressure { some: line("some")?, full: line("full")? })
}

fn pressure_line(text: &[u8]) -> Reading<PressureLine> {
    let value = |key: &str| {
        text.split(|&byte| byte == b' ')
            .find_map(|part| part.strip_prefix(key.as_bytes())?.strip_prefix(b"="))
            .ok_or_else(|| malformed(&format!("no {key} in a line of pressure"), text))
    };
    let percent = |key| {
        let digits = value(key)?;
        // `nan`, `inf` and exponents are floating-point numbers too, and the kernel prints none of them.
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

/// The counters of `/proc/vmstat` by name. Lines that are not a name and a number are left out.
pub fn vmstat(bytes: &[u8]) -> BTreeMap<String, u64> {
    let counter = |line: Reading<&[u8]>| {
        let (name, value) = std::str::from_utf8(line.ok()?).ok()?.split_once(' ')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    lines(bytes).filter_map(counter).collect()
}
