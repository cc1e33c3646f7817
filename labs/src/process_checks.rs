//! Checks of a process in a test, and waiting for a condition.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Root writes to this file to compact all memory.
pub const COMPACT_MEMORY_FILE: &str = "/proc/sys/vm/compact_memory";

/// The addresses of a process's enrolled pages, according to its `smaps`.
///
/// # Panics
/// If the process has ended, or belongs to another user.
#[must_use]
pub fn enrolled_page_addresses(pid: u32) -> BTreeSet<u64> {
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

/// Wait for a condition.
///
/// # Panics
/// If it is not met within five minutes.
pub fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_met() {
        assert!(began.elapsed() < Duration::from_secs(300), "not met within five minutes: {condition}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Run `work` while compaction moves all movable memory to other frames. If [`COMPACT_MEMORY_FILE`] cannot be written,
/// `work` runs without compaction.
pub fn during_compaction<T>(work: impl FnOnce() -> T) -> T {
    struct StopOnDrop<'a>(&'a AtomicBool);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut may = true;
            while may && !ended.load(Ordering::Relaxed) {
                may = fs::write(COMPACT_MEMORY_FILE, "1").is_ok();
            }
        });
        let _end = StopOnDrop(&ended);
        work()
    })
}
