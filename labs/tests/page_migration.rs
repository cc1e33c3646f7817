//! Readers of page tables, of other processes and of their own, while the kernel moves pages to other frames. Such
//! pages look swapped out for a moment, and readers wait for them.

#![forbid(unsafe_code)]

use pagefold_base::{AddressRange, Pid};
use pagefold_host::{Host, PageContent, PageView, ReadMethod};
use pagefold_labs::process_checks::{COMPACT_MEMORY_FILE, during_compaction};
use pagefold_linux::LiveHost;
use pagefold_sys::pagemap::{OwnPagemap, RangeContents};
use std::fs;
use std::sync::Mutex;
use std::time::Duration;

const BLOCK_PAGES: usize = 4096;

/// One test at a time: two tests that compact memory leave each other fewer pages to move.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Pages of fully written memory that `count_missing` does not find, over many readings. `None` if that cannot be
/// measured.
fn count_missed_during_compaction(count_missing: impl Fn(AddressRange) -> usize) -> Option<usize> {
    if let Err(error) = fs::write(COMPACT_MEMORY_FILE, "1") {
        println!("skipped: {COMPACT_MEMORY_FILE}: {error}");
        return None;
    }
    let _one = ONE_AT_A_TIME.lock();
    let page = rustix::param::page_size();
    let missed = during_compaction(|| {
        let mut blocks: Vec<Vec<u8>> = Vec::new();
        let mut missed = 0;
        for round in 1..=150_u8 {
            blocks.push(vec![round; BLOCK_PAGES * page]);
            // Compaction fills the frames that are given back.
            match round % 12 {
                0 => blocks.truncate(4),
                3 | 6 | 9 => drop(blocks.remove(0)),
                _ => {}
            }
            for block in &blocks {
                let start = block.as_ptr().addr().next_multiple_of(page) as u64;
                missed += count_missing(AddressRange { start, end: start + ((BLOCK_PAGES - 1) * page) as u64 });
            }
        }
        missed
    });
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let whole = status.lines().any(|line| line.starts_with("VmSwap:") && line.ends_with(" 0 kB"));
    if !whole {
        println!("skipped: a part of this process is swapped out");
    }
    whole.then_some(missed)
}

/// Each reading has the full wait time. Only root can see that private memory is being moved.
#[test]
fn pages_of_live_process_stay_present() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root");
    }
    let host = LiveHost::new();
    let absent = |range| {
        let process = host.open(Pid(std::process::id())).unwrap();
        process.mappings(range).unwrap().iter().filter(|mapping| !mapping.present).count()
    };
    if let Some(missed) = count_missed_during_compaction(absent) {
        assert_eq!(missed, 0);
    }
}

#[test]
fn pages_of_live_process_stay_resident_and_readable() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root");
    }
    let host = LiveHost::new();
    let missing = |range: AddressRange| {
        let process = host.open(Pid(std::process::id())).unwrap();
        let runs = process.resident(&[range]).unwrap();
        let resident: usize = runs.iter().map(|run| run.pages as usize).sum();
        let mut gone = 0;
        let mut each = |_, page: PageView<'_>| gone += usize::from(matches!(page.content, PageContent::NotResident));
        process.contents(ReadMethod::ProcessVmReadv, &runs, &mut each).unwrap();
        BLOCK_PAGES - 1 - resident + gone
    };
    if let Some(missed) = count_missed_during_compaction(missing) {
        assert_eq!(missed, 0);
    }
}

#[test]
fn own_migrating_pages_are_not_reported_swapped() {
    let swapped = |range: AddressRange| {
        let mut own = OwnPagemap::open(Duration::from_secs(1)).unwrap();
        let found = own.scan_mapped(range.start..range.end, RangeContents::OnlyAnonymous).unwrap();
        found.iter().filter(|found| found.swapped).count()
    };
    if let Some(missed) = count_missed_during_compaction(swapped) {
        assert_eq!(missed, 0);
    }
}
