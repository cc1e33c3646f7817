//! A sample of the pages of a plan, with their contents.

use crate::decide::plan::{MergePlan, PlannedRange};
use pagefold_base::{AddressRange, Reading};
use pagefold_host::{Host, PageContent, PageRun, ProcessHandle, ReadMethod};

/// Maximum pages of a sample: 2 MiB with pages of 4 KiB, which take a millisecond to read.
const MAX_SAMPLE_PAGES: u64 = 512;

/// Contents of up to `MAX_SAMPLE_PAGES` pages, evenly spread over the ranges of a plan. Pages that cannot be read or
/// are not resident are left out, as are processes that have ended.
pub fn sample_pages(host: &dyn Host, plan: &MergePlan) -> Vec<Vec<u8>> {
    let page_bytes = host.page_size().bytes();
    let pages: u64 = plan.targets.iter().flat_map(|target| &target.ranges).map(|planned| planned.pages.0).sum();
    let step = pages.div_ceil(MAX_SAMPLE_PAGES).max(1);
    let mut sample = Vec::new();
    let mut position = 0;
    for target in &plan.targets {
        let addresses = spread_addresses(&target.ranges, page_bytes, step, &mut position);
        let handle = pagefold_host::hold(host, target.process.id);
        // A smaller sample is less exact, but not wrong.
        let _ = handle.map(|handle| read_pages(&*handle, &addresses, page_bytes, &mut sample));
    }
    sample
}

/// Every `step`th page of a process's ranges; `position` continues from one process to the next.
fn spread_addresses(ranges: &[PlannedRange], page_bytes: u64, step: u64, position: &mut u64) -> Vec<AddressRange> {
    let mut addresses = Vec::new();
    for planned in ranges {
        let end = *position + planned.pages.0;
        let first = position.next_multiple_of(step);
        for chosen in (first..end).step_by(step as usize) {
            let start = planned.range.start + (chosen - *position) * page_bytes;
            addresses.push(AddressRange { start, end: start + page_bytes });
        }
        *position = end;
    }
    addresses
}

fn read_pages(
    handle: &dyn ProcessHandle,
    pages: &[AddressRange],
    page_bytes: u64,
    sample: &mut Vec<Vec<u8>>,
) -> Reading<()> {
    let resident = handle.resident(pages)?;
    let runs: Vec<PageRun> = resident.iter().flat_map(|run| single_pages(*run, page_bytes)).collect();
    handle.contents(ReadMethod::ProcMem { detect_merged: false }, &runs, &mut |_, view| {
        if let PageContent::Bytes(bytes) = view.content {
            sample.push(bytes.to_vec());
        }
    })
}

/// The pages of a run, one by one.
fn single_pages(run: PageRun, page_bytes: u64) -> impl Iterator<Item = PageRun> {
    (0..run.pages).map(move |page| PageRun {
        address: run.address + u64::from(page) * page_bytes,
        pages: 1,
        huge: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::{Bytes, Pages};

    fn planned(start: u64, pages: u64) -> PlannedRange {
        let range = AddressRange { start, end: start + pages * 4096 };
        PlannedRange {
            range,
            region: range,
            pages: Pages(pages),
            merging: Pages(pages),
            zero: Pages(0),
            freed_bytes: Bytes(0),
            split_huge_pages: Pages(0),
            enrolled: false,
            late: false,
        }
    }

    #[test]
    fn sample_covers_ranges_and_processes_evenly() {
        let mut position = 0;
        let mut starts = |ranges: &[PlannedRange]| -> Vec<u64> {
            spread_addresses(ranges, 4096, 4, &mut position).iter().map(|page| page.start / 4096).collect()
        };
        assert_eq!(starts(&[planned(0x1000, 3), planned(0x100_000, 6)]), [1, 257, 261]);
        assert_eq!(starts(&[planned(0x1000, 1)]), [0; 0], "the next one is the twelfth");
        assert_eq!(starts(&[planned(0x1000, 5)]), [3]);
    }

    #[test]
    fn runs_are_split_into_single_pages() {
        let pages = single_pages(PageRun { address: 0x1000, pages: 2, huge: true }, 4096);
        let addresses: Vec<_> = pages.map(|run| (run.address, run.pages, run.huge)).collect();
        assert_eq!(addresses, [(0x1000, 1, false), (0x2000, 1, false)]);
    }
}
