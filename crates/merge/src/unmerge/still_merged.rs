//! What remains of a process after unenrolling: its pages that are still merged, or that it has ended.

use super::plan::{RangePages, estimate_batch, is_mergeable, read_ksm_pages};
use super::{UnenrollBatch, UnenrollMethod, UnenrollTarget};
use pagefold_base::process::Process;
use pagefold_base::region::Region;
use pagefold_base::{Absent, Bytes, Pages, ProcessId, Reading};
use pagefold_host::{Host, hold, observe, parse};
use std::time::Duration;

/// How long to wait for the exit of a process whose main thread has ended, before it counts as running.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(2);

/// Pages that are still merged in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StillMerged {
    /// Pages on KSM frames.
    pub merged_pages: Pages,
    /// Zero pages that KSM placed.
    pub zero_pages: Pages,
    /// Merged and zero pages that the unenroll method does not reach. The other two counts exclude them.
    pub uncovered_pages: Pages,
}

/// All still marked regions of a guest as one batch, by the kernel's sums.
pub(super) fn guest_remainder_batch(host: &dyn Host, target: &UnenrollTarget) -> Reading<UnenrollBatch> {
    let handle = hold(host, target.process.id)?;
    let regions = observe::regions(&*handle)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let marked: Vec<&Region> =
        regions.iter().filter(|region| is_mergeable(region) && target.method.covers(region)).collect();
    let process = Process { ksm, ..target.process.clone() };
    estimate_batch(host, &process, &target.method, &marked, target.max_zero_pages)
}

/// Pages of a process that are merged now, by smaps: `ksm_merging_pages` is right only after ksmd visits again.
pub(super) fn read_still_merged(host: &dyn Host, target: &UnenrollTarget) -> Reading<StillMerged> {
    let handle = hold(host, target.process.id)?;
    let regions = observe::regions(&*handle)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let pages = |is_covered: bool| -> Reading<Pages> {
        let bytes: Reading<Bytes> = regions
            .iter()
            .filter(|region| (!is_mergeable(region) || target.method.covers(region)) == is_covered)
            .map(|region| region.ksm.clone())
            .sum();
        Ok(host.page_size().pages_in(bytes?))
    };
    let zeros = ksm.zero_pages.map_or(Pages::ZERO, |pages| Pages(u64::try_from(pages).unwrap_or(0)));
    let (Ok(merged), Ok(uncovered)) = (pages(true), pages(false)) else {
        // The count of the whole process is not the count of some ranges.
        if matches!(target.method, UnenrollMethod::Ranges(_)) {
            let marked = regions
                .iter()
                .filter(|region| is_mergeable(region))
                .flat_map(|region| target.method.covered_ranges(region));
            let range_pages =
                marked.map(|range| read_ksm_pages(host, &*handle, range)).collect::<Reading<Vec<RangePages>>>()?;
            let merged =
                range_pages.iter().flat_map(|range| &range.pages).filter(|(_, shared)| shared.is_some()).count();
            return Ok(StillMerged { merged_pages: Pages(merged as u64), ..StillMerged::default() });
        }
        return Ok(StillMerged {
            merged_pages: Pages(ksm.merging_pages?),
            zero_pages: zeros,
            uncovered_pages: Pages::ZERO,
        });
    };
    // The kernel does not show which regions the zero pages are in. Where no marked region is covered, no zero page is
    // in a covered region.
    let any_covered = regions.iter().any(|region| is_mergeable(region) && target.method.covers(region));
    let uncovered_zeros =
        if any_covered || matches!(target.method, UnenrollMethod::WholeProcess | UnenrollMethod::MarkedRegions) {
            Pages::ZERO
        } else {
            zeros
        };
    Ok(StillMerged {
        merged_pages: merged,
        zero_pages: zeros.saturating_sub(uncovered_zeros),
        uncovered_pages: uncovered + uncovered_zeros,
    })
}

/// Whether a process has ended. Its parent may not have read its exit status yet; its memory then reads as empty and
/// not as gone.
pub(super) fn has_ended(host: &dyn Host, id: ProcessId) -> bool {
    let deadline = host.now() + PROCESS_EXIT_TIMEOUT;
    loop {
        let state = hold(host, id).and_then(|handle| {
            let stat = parse::stat(&handle.read("stat")?)?;
            let main_thread = matches!(stat.state, 'Z' | 'X') || stat.flags & parse::PF_EXITING != 0;
            Ok((main_thread, handle.read("status").and_then(|bytes| parse::status(&bytes).threads)))
        });
        match state {
            Err(why) => return why == Absent::Vanished,
            Ok((false, _)) => return false,
            // Other threads are ending as well, or continue without the main thread.
            Ok((true, Ok(threads))) if threads > 1 && host.now() < deadline => {
                host.sleep(Duration::from_millis(10));
            }
            Ok((true, threads)) => return threads.is_ok_and(|threads| threads <= 1),
        }
    }
}
