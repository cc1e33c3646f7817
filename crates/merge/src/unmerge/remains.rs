//! What is left of a process once it was withdrawn: what is merged still, or that it has ended.

use super::{Found, Part, Target, Way, count, is_marked};
use pagefold_base::process::Process;
use pagefold_base::region::Region;
use pagefold_base::{Absent, Bytes, Pages, ProcessId, Reading};
use pagefold_host::hold as held;
use pagefold_host::{Host, observe, parse};
use std::time::{Duration, Instant};

/// How long the end of a process is waited for whose main thread has ended, until it counts as one that goes on.
const ENDING: Duration = Duration::from_secs(2);

/// What is still merged in a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remains {
    /// Pages on KSM frames.
    pub merged: Pages,
    /// Pages of zeros that KSM placed.
    pub zeros: Pages,
    /// Pages of either that the way in which it is withdrawn does not reach; in none of the others.
    pub beside: Pages,
}

/// All that is still marked of a guest as one part, by the kernel's sums.
pub(super) fn left_of_guest(host: &dyn Host, target: &Target) -> Reading<Part> {
    let handle = held(host, target.process.id)?;
    let regions = observe::regions(&*handle)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let marked: Vec<&Region> =
        regions.iter().filter(|region| is_marked(region) && target.way.reaches(region)).collect();
    let process = Process { ksm, ..target.process.clone() };
    super::bound(host, &process, &target.way, &marked, target.zeros)
}

/// What is merged in a process now, by smaps: `ksm_merging_pages` is only right once ksmd comes by again.
pub(super) fn remains(host: &dyn Host, target: &Target) -> Reading<Remains> {
    let handle = held(host, target.process.id)?;
    let regions = observe::regions(&*handle)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let pages = |reached: bool| -> Reading<Pages> {
        let bytes: Reading<Bytes> = regions
            .iter()
            .filter(|region| (!is_marked(region) || target.way.reaches(region)) == reached)
            .map(|region| region.ksm.clone())
            .sum();
        Ok(host.page_size().pages_in(bytes?))
    };
    let zeros = ksm.zero_pages.map_or(Pages::ZERO, |pages| Pages(u64::try_from(pages).unwrap_or(0)));
    let (Ok(merged), Ok(beside)) = (pages(true), pages(false)) else {
        // The count of the whole process is not that of some ranges.
        if matches!(target.way, Way::Ranges(_)) {
            let marked = regions.iter().filter(|region| is_marked(region)).flat_map(|region| target.way.within(region));
            let found = marked.map(|range| count(host, &*handle, range)).collect::<Reading<Vec<Found>>>()?;
            let merged = found.iter().flat_map(|found| &found.pages).filter(|(_, shared)| shared.is_some()).count();
            return Ok(Remains { merged: Pages(merged as u64), ..Remains::default() });
        }
        return Ok(Remains { merged: Pages(ksm.merging_pages?), zeros, beside: Pages::ZERO });
    };
    // Which zero pages are whose cannot be seen. While nothing that is reached is marked, they are not there.
    let reached = regions.iter().any(|region| is_marked(region) && target.way.reaches(region));
    let elsewhere = if reached || matches!(target.way, Way::Whole | Way::Regions) { Pages::ZERO } else { zeros };
    Ok(Remains { merged, zeros: zeros.saturating_sub(elsewhere), beside: beside + elsewhere })
}

/// Whether a process has ended, though its parent may not have asked for its status yet: its memory reads as empty
/// then, and not as gone.
pub(super) fn has_ended(host: &dyn Host, id: ProcessId) -> bool {
    let until = Instant::now() + ENDING;
    loop {
        let end = held(host, id).and_then(|handle| {
            let stat = parse::stat(&handle.read("stat")?)?;
            let main_thread = matches!(stat.state, 'Z' | 'X') || stat.flags & parse::PF_EXITING != 0;
            Ok((main_thread, handle.read("status").and_then(|bytes| parse::status(&bytes).threads)))
        });
        match end {
            Err(why) => return why == Absent::Vanished,
            Ok((false, _)) => return false,
            // Other threads are ending as well, or go on without the first one.
            Ok((true, Ok(threads))) if threads > 1 && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Ok((true, threads)) => return threads.is_ok_and(|threads| threads <= 1),
        }
    }
}
