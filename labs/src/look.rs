//! Looking at a process from a test, and waiting for what is to be seen of it.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

/// The addresses of a process's enrolled pages, by its `smaps`.
///
/// # Panics
/// If it has ended, or is another user's.
#[must_use]
pub fn enrolled(pid: u32) -> BTreeSet<u64> {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps"));
    let address = |text| u64::from_str_radix(text, 16).ok();
    let mut pages = BTreeSet::new();
    let mut region = 0..0;
    for line in smaps.unwrap_or_else(|error| panic!("/proc/{pid}/smaps: {error}")).lines() {
        let bounds = line.split(' ').next().and_then(|word| word.split_once('-'));
        if let Some((Some(start), Some(end))) = bounds.map(|(start, end)| (address(start), address(end))) {
            region = start..end;
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|flag| flag == "mg")) {
            pages.extend(region.clone().step_by(rustix::param::page_size()));
        }
    }
    pages
}

/// Wait for something that is bound to come.
///
/// # Panics
/// If it does not within five minutes.
pub fn until(what: &str, mut there: impl FnMut() -> bool) {
    let began = Instant::now();
    while !there() {
        assert!(began.elapsed() < Duration::from_secs(300), "{what} did not come within five minutes");
        std::thread::sleep(Duration::from_millis(10));
    }
}
