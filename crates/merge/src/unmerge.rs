//! Unenrolls processes from KSM after it has checked that memory suffices.
//!
//! [`make_plan`] counts the merged pages of each process and the frames that unmerging them takes. The counts are exact
//! where frame numbers are readable. [`execute_plan`] unenrolls batch by batch and asks [`pagefold_base::guard`] before
//! each batch, since other processes take memory meanwhile. The process that needs the fewest frames comes first. If
//! memory runs out, most processes are then done, and at most one of the rest is partly unenrolled. Within a process,
//! batches go by address, so at most one region at a time is partly unenrolled. A batch has at most
//! [`MAX_PAGES_PER_BATCH`] pages. A guest that is reached by its control socket is one batch: its backends are
//! unenrolled one by one, and the guard checks the rest of the guest before each.
//!
//! Unless the run is staged, a process continues only while all of its remaining batches fit. A growing neighbor then
//! still finds free memory instead of a limit that is filled to the last page.
//!
//! # Methods
//! A process that is enrolled whole (`ksm_merge_any`) is unenrolled whole; regions marked by madvise, region by region;
//! a guest whose control socket is known, by its memory backends. A caller that knows which ranges it enrolled
//! unenrolls only those. Each method unmerges merged pages (mm/ksm.c, `ksm_disable_merge_any`, `ksm_madvise`).
//!
//! Before 6.14 the kernel does not show from outside which process is enrolled whole. There, a process that is
//! unenrolled region by region is unenrolled whole as well; this has no effect on a process that was not enrolled
//! whole.
//!
//! # Limits
//! Before 6.14 a process that is enrolled whole and has no marked region now counts as not enrolled. The page table of
//! a marked region is read whole, also where little is resident. The plan keeps 8 bytes for each merged page. Zero
//! pages that KSM placed look like other zero pages from outside: each zero page of a batch could be one, up
//! to `ksm_zero_pages` of the process. Reading frame numbers takes root; without it, a process is one batch.

mod plan;
mod still_merged;

use plan::{KsmPageMappings, read_ksm_pages, remove_mappings};
pub use plan::{MAX_PAGES_PER_BATCH, UnenrollBatch, UnenrollMethod, UnenrollPlan, UnenrollTarget, make_plan};
pub use still_merged::StillMerged;

use pagefold_base::guard::{FrameNeed, MemoryCheck, MemoryVerdict};
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Reading};
use pagefold_host::action::{Action, MergeAdvice, MissedReason};
use pagefold_host::transaction::session::{ChangeLifetime, Error as SessionError, Session};
use pagefold_host::{Host, elapsed_since, hold, memory_headroom, observe, parse};
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval between checks while waiting for memory.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time limit for the memory backends of a guest together, and its increase per merged GiB, which takes about 0.2 s.
const GUEST_TIMEOUT_BASE_AND_PER_GIB: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(2));

/// Huge pages collapsed between two memory checks.
const HUGE_PAGES_PER_COLLAPSE: usize = 64;

/// Limits of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnenrollLimits {
    /// Unenroll each batch as soon as it fits, whether the rest fits or not.
    pub staged: bool,
    /// Ignore the guard.
    pub force: bool,
    /// Maximum time to wait for memory.
    pub max_wait: Duration,
    /// Whether huge pages are collapsed afterwards.
    pub collapse_huge_pages: bool,
    /// Percent of the last ten seconds in which a task stalled on memory. Above it memory counts as short, and no
    /// further batch of a process that is short of memory is unenrolled, whatever the guard says.
    pub max_pressure_percent: Option<f64>,
}

/// The result for one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnenrollResult {
    /// Unenrolled batches.
    pub batches_done: usize,
    /// Whether all of it was unenrolled, except the missed ranges.
    pub all_unenrolled: bool,
    /// How long a thread of it was stopped, for each stop.
    pub stop_durations: Vec<Duration>,
    /// Ranges that could not be unenrolled, and why.
    pub missed_ranges: Vec<(AddressRange, MissedReason)>,
    /// The error that ended the work on it.
    pub error: Option<String>,
    /// Whether it ended meanwhile.
    pub ended: bool,
    /// Pages that are still merged.
    pub still_merged: Option<Reading<StillMerged>>,
    /// Its memory in huge pages after unmerging, and after the collapse.
    pub huge_before_and_after_collapse: Option<(Bytes, Bytes)>,
}

impl UnenrollResult {
    /// Whether none of it is enrolled or merged any more; also true if it has ended.
    pub fn is_complete(&self) -> bool {
        let no_failure = self.error.is_none() && self.missed_ranges.is_empty();
        let nothing_merged = |still_merged: &StillMerged| {
            still_merged.merged_pages == Pages::ZERO && still_merged.zero_pages == Pages::ZERO
        };
        self.ended
            || (self.all_unenrolled
                && no_failure
                && self.still_merged.as_ref().is_some_and(|reading| reading.as_ref().is_ok_and(nothing_merged)))
    }
}

/// The outcome of a run.
#[derive(Clone, Debug)]
pub struct UnenrollOutcome {
    /// In the order of the plan's targets.
    pub targets: Vec<UnenrollResult>,
    /// The guard's verdict on the step that did not fit and stopped the run.
    pub stopped_by_guard: Option<MemoryCheck>,
    /// Whether the operator interrupted the run.
    pub interrupted: bool,
    /// The kernel's counters before.
    pub before: HostCounters,
    /// The kernel's counters after.
    pub after: HostCounters,
}

impl UnenrollOutcome {
    /// The frames planned for the batches that were unenrolled.
    pub fn planned_frames(&self, plan: &UnenrollPlan) -> Pages {
        plan.targets
            .iter()
            .zip(&self.targets)
            .map(|(target, result)| target.frames_for_batches(result.batches_done))
            .sum()
    }
}

/// Host counters that show how much memory unmerging took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCounters {
    /// `MemAvailable`.
    pub available: Reading<Bytes>,
    /// `AnonPages`.
    pub anon: Reading<Bytes>,
    /// `cow_ksm`: copies of KSM pages since boot.
    pub cow_ksm: Reading<u64>,
    /// `oom_kill`: processes that the OOM killer ended since boot, on the host or in a cgroup.
    pub oom_kills: Reading<u64>,
}

impl HostCounters {
    /// The current counters.
    pub fn observe(host: &dyn Host) -> Self {
        let memory = observe::memory(host);
        let vmstat = observe::vmstat(host);
        let counter = |name: &str| vmstat.clone().and_then(|all| all.get(name).copied().ok_or(Absent::NotOnThisKernel));
        Self {
            available: memory.clone().and_then(|memory| memory.available),
            anon: memory.and_then(|memory| memory.anon),
            cow_ksm: counter("cow_ksm"),
            oom_kills: counter("oom_kill"),
        }
    }
}

/// Unenroll. Batches that do not fit are skipped unless forced; errors of single processes are in the outcome.
///
/// # Errors
/// If the journal fails.
pub fn execute_plan(
    session: &mut Session<'_>,
    plan: &UnenrollPlan,
    limits: UnenrollLimits,
    stop: &AtomicBool,
) -> Result<UnenrollOutcome, SessionError> {
    let host = session.host();
    let mut run =
        UnenrollRun { session, plan, limits, stop, deadline: host.now() + limits.max_wait, stopped_by_guard: None };
    let before = HostCounters::observe(host);
    let mut targets = vec![UnenrollResult::default(); plan.targets.len()];
    for (target, result) in plan.targets.iter().zip(&mut targets) {
        if run.should_stop() {
            break;
        }
        run.unenroll_target(target, result)?;
    }
    for (target, result) in plan.targets.iter().zip(&mut targets) {
        if !result.ended {
            let still_merged = still_merged::read_still_merged(host, target);
            result.ended = still_merged == Err(Absent::Vanished) || still_merged::has_ended(host, target.process.id);
            result.still_merged = (!result.ended).then_some(still_merged);
        }
    }
    let after = HostCounters::observe(host);
    if limits.collapse_huge_pages && run.stopped_by_guard.is_none() {
        for (target, result) in plan.targets.iter().zip(&mut targets) {
            if result.is_complete() && !result.ended && !stop.load(Ordering::Relaxed) {
                run.collapse_huge_pages(target, result)?;
            }
        }
    }
    let (stopped, interrupted) = (run.stopped_by_guard, stop.load(Ordering::Relaxed));
    Ok(UnenrollOutcome { targets, stopped_by_guard: stopped, interrupted, before, after })
}

struct UnenrollRun<'w, 'h> {
    session: &'w mut Session<'h>,
    plan: &'w UnenrollPlan,
    limits: UnenrollLimits,
    stop: &'w AtomicBool,
    deadline: Instant,
    stopped_by_guard: Option<MemoryCheck>,
}

impl UnenrollRun<'_, '_> {
    fn should_stop(&self) -> bool {
        self.stopped_by_guard.is_some() || self.stop.load(Ordering::Relaxed)
    }

    fn unenroll_target(&mut self, target: &UnenrollTarget, result: &mut UnenrollResult) -> Result<(), SessionError> {
        let process = target.process.id;
        if let UnenrollMethod::UnreachableGuest(why) = &target.method {
            result.error = Some(why.clone());
            return Ok(());
        }
        match &target.method {
            UnenrollMethod::Guest { socket, backends } if !self.unenroll_guest(target, socket, backends, result)? => {
                return Ok(());
            }
            UnenrollMethod::Guest { .. } => {}
            _ if !self.unenroll_batches(target, result)? => return Ok(()),
            UnenrollMethod::WholeProcess => self.apply(&Action::MergeAny { process, enable: false }, result)?,
            UnenrollMethod::MarkedRegions | UnenrollMethod::Ranges(_) | UnenrollMethod::UnreachableGuest(_) => {}
        }
        if target.method == UnenrollMethod::MarkedRegions && target.process.ksm.merge_any.is_err() {
            self.apply(&Action::MergeAny { process, enable: false }, result)?;
        }
        if result.error.is_none() && !result.ended {
            result.batches_done = target.batches.len();
            result.all_unenrolled = true;
        }
        Ok(())
    }

    /// Unenroll the backends of a guest one after the other, each once the guard allows the rest of the guest. Returns
    /// whether all of them were tried.
    fn unenroll_guest(
        &mut self,
        target: &UnenrollTarget,
        socket: &Path,
        backends: &[(String, Bytes)],
        result: &mut UnenrollResult,
    ) -> Result<bool, SessionError> {
        let host = self.session.host();
        let gib = u32::try_from(host.page_size().bytes_of(target.merged_pages()).0 >> 30).unwrap_or(u32::MAX);
        let (limit, mut elapsed) =
            (GUEST_TIMEOUT_BASE_AND_PER_GIB.0 + GUEST_TIMEOUT_BASE_AND_PER_GIB.1 * gib, Duration::ZERO);
        for (backend, _) in backends {
            if elapsed >= limit {
                result.error =
                    Some(format!("{} answers too slowly; `--inject` unenrolls from within", socket.display()));
            }
            if result.ended || result.error.is_some() || self.should_stop() || self.is_memory_short(target, result) {
                return Ok(false);
            }
            // Where frames are readable, the guard counts them; otherwise the kernel's sums give the rest.
            let remainder = match &target.frames_readable {
                Ok(()) => Err(Absent::NotOnThisKernel),
                Err(_) => still_merged::guest_remainder_batch(host, target),
            };
            let batches = remainder.map_or_else(|_| target.batches.clone(), |batch| vec![batch]);
            if !self.wait_for_memory(target, &batches, &[])? {
                return Ok(false);
            }
            let (socket, backend) = (socket.to_owned(), backend.clone());
            let action = Action::set_backend_merge(target.process.id, socket, backend, false);
            let started = host.now();
            self.apply(&action, result)?;
            elapsed += elapsed_since(host, started);
        }
        Ok(true)
    }

    /// Unenroll the batches of a process one after the other, each once the guard allows it. Returns whether all of
    /// them were tried.
    fn unenroll_batches(&mut self, target: &UnenrollTarget, result: &mut UnenrollResult) -> Result<bool, SessionError> {
        for (position, batch) in target.batches.iter().enumerate() {
            let rest = if self.limits.staged { &[] } else { &target.batches[position + 1..] };
            if result.ended
                || result.error.is_some()
                || self.should_stop()
                || self.is_memory_short(target, result)
                || !self.wait_for_memory(target, std::slice::from_ref(batch), rest)?
            {
                return Ok(false);
            }
            let (process, ranges) = (target.process.id, batch.ranges.clone());
            self.apply(&Action::Advise { process, advice: MergeAdvice::Unmergeable, ranges }, result)?;
            result.batches_done += usize::from(result.error.is_none() && !result.ended);
        }
        Ok(true)
    }

    fn apply(&mut self, action: &Action, result: &mut UnenrollResult) -> Result<(), SessionError> {
        if result.ended || result.error.is_some() {
            return Ok(());
        }
        match self.session.apply_until_stopped(action, ChangeLifetime::Permanent, self.stop) {
            Ok(effect) => {
                result.stop_durations.extend(effect.stop_durations);
                result.missed_ranges.extend(effect.missed_ranges);
            }
            Err(SessionError::Refused(pagefold_host::action::ActionError::Vanished)) => result.ended = true,
            Err(SessionError::Refused(why)) => result.error = Some(why.to_string()),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether memory is short for a process and the limits heed that. Records it as the process's error.
    fn is_memory_short(&self, target: &UnenrollTarget, result: &mut UnenrollResult) -> bool {
        let exceeds = |percent| memory_headroom::is_memory_short(self.session.host(), target.cgroup(), percent);
        let is_short = self.limits.max_pressure_percent.is_some_and(exceeds);
        if is_short {
            result.error = Some("memory is short".to_owned());
        }
        is_short
    }

    /// Whether batches of a process, counted now, fit together with the rest as planned. Waits up to the deadline and
    /// records the verdict if they do not fit.
    fn wait_for_memory(
        &mut self,
        target: &UnenrollTarget,
        batches: &[UnenrollBatch],
        rest: &[UnenrollBatch],
    ) -> Result<bool, SessionError> {
        if self.limits.force {
            return Ok(true);
        }
        loop {
            let need = self.current_need(target, batches, rest);
            let check = self.plan.check_memory(self.session.host(), &need);
            if check.verdict == MemoryVerdict::Fits {
                return Ok(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if self.session.host().now() >= self.deadline {
                self.stopped_by_guard = Some(check);
                return Ok(false);
            }
            self.session.host().sleep(MEMORY_POLL_INTERVAL);
        }
    }

    /// The frames that batches of a process take now, with the rest as planned: since the plan was made, pages were
    /// merged, written and unmapped. Where the pages cannot be counted, the plan's figures stand.
    fn current_need(&self, target: &UnenrollTarget, batches: &[UnenrollBatch], rest: &[UnenrollBatch]) -> FrameNeed {
        let host = self.session.host();
        let count_now = || -> Reading<FrameNeed> {
            target.frames_readable.clone()?;
            let handle = hold(host, target.process.id)?;
            let ksm = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel));
            let max_zeros = ksm.zero_pages.map_or(0, |count| u64::try_from(count).unwrap_or(0));
            let mut merged = rest.iter().map(|batch| batch.merged_pages).sum::<Pages>().0;
            let mut zeros = rest.iter().map(|batch| batch.zero_pages).sum::<Pages>().0;
            let mut freed: Pages = rest.iter().map(|batch| batch.freed_frames).sum();
            let mut remaining_mappings = HashMap::new();
            for batch in batches {
                for range in &batch.ranges {
                    let range_pages = read_ksm_pages(host, &*handle, *range)?;
                    let mappings: Vec<KsmPageMappings> = range_pages.pages.iter().filter_map(|page| page.1).collect();
                    freed += remove_mappings(&mut remaining_mappings, &mappings);
                    merged += mappings.len() as u64;
                    zeros += (range_pages.pages.len() - mappings.len()) as u64;
                }
            }
            Ok(FrameNeed::for_cgroup(target.cgroup(), Pages(merged + zeros.min(max_zeros)), freed))
        };
        match count_now() {
            Ok(need) => need,
            Err(Absent::Vanished) => FrameNeed::default(),
            Err(_) => {
                let mut sum = FrameNeed::default();
                batches.iter().chain(rest).for_each(|batch| sum += &target.batch_frame_need(batch));
                sum
            }
        }
    }

    /// Collapse huge pages where all pages of one are resident and the host allows it. Each collapse takes one free
    /// huge page; the replaced frames are then freed. Collapsing ranges that are not resident would take memory for
    /// good.
    fn collapse_huge_pages(
        &mut self,
        target: &UnenrollTarget,
        result: &mut UnenrollResult,
    ) -> Result<(), SessionError> {
        let host = self.session.host();
        let Ok((before, ranges)) = find_collapsible(host, target) else { return Ok(()) };
        let huge = observe::huge_page_bytes(host).unwrap_or(0);
        // Memory for two huge pages, since the kernel frees the replaced pages in batches.
        let pages = host.page_size().pages_in(Bytes(2 * huge));
        let need = FrameNeed::for_cgroup(target.cgroup(), pages, Pages::ZERO);
        for ranges in ranges.chunks(HUGE_PAGES_PER_COLLAPSE) {
            if self.stop.load(Ordering::Relaxed) || self.plan.check_memory(host, &need).verdict != MemoryVerdict::Fits {
                break;
            }
            let action = Action::Collapse { process: target.process.id, ranges: ranges.to_vec() };
            match self.session.apply(&action, ChangeLifetime::Permanent) {
                // The huge pages after the collapse show which ranges failed.
                Ok(effect) => result.stop_durations.extend(effect.stop_durations),
                Err(SessionError::Refused(why)) => {
                    result.error = Some(format!("cannot collapse huge pages: {why}"));
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        let handle = hold(host, target.process.id);
        let after = handle.and_then(|handle| observe::rollup(&*handle)).and_then(|rollup| rollup.anon_huge);
        result.huge_before_and_after_collapse = after.ok().map(|after| (before, after));
        Ok(())
    }
}

/// Ranges in address order; adjacent and overlapping ranges become one.
pub fn joined(mut ranges: Vec<AddressRange>) -> Vec<AddressRange> {
    ranges.sort_unstable();
    let mut joined_ranges: Vec<AddressRange> = Vec::new();
    for range in ranges {
        match joined_ranges.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined_ranges.push(range),
        }
    }
    joined_ranges
}

/// Memory of a process in huge pages now, and the ranges that could be huge pages but are not: aligned, wholly
/// resident, unenrolled, where huge pages are allowed.
fn find_collapsible(host: &dyn Host, target: &UnenrollTarget) -> Reading<(Bytes, Vec<AddressRange>)> {
    let huge = observe::huge_page_bytes(host)?;
    let mode = observe::thp_mode(host)?;
    let handle = hold(host, target.process.id)?;
    let unenrolled_ranges = target.marked_ranges();
    let regions = observe::regions(&*handle)?;
    let before = regions.iter().map(|region| region.anon_huge).sum();
    let may_be_huge =
        |region: &&Region| mode == "always" || (mode == "madvise" && region.flags.has(VmFlags::HUGE_PAGE));
    let mut ranges = Vec::new();
    for region in regions.iter().filter(may_be_huge) {
        for part in unenrolled_ranges.iter().filter_map(|range| range.overlap(region.range)) {
            for run in handle.resident(&[part])?.into_iter().filter(|run| !run.huge) {
                let end = run.address + host.page_size().bytes_of(Pages(run.pages.into())).0;
                let (mut start, end) = (run.address.next_multiple_of(huge), end - end % huge);
                while start < end {
                    ranges.push(AddressRange { start, end: start + huge });
                    start += huge;
                }
            }
        }
    }
    Ok((before, ranges))
}

#[cfg(test)]
mod tests;
