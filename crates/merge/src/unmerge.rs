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

mod still_merged;

pub use still_merged::StillMerged;

use pagefold_base::guard;
use pagefold_base::guard::{FrameNeed, MemoryCheck, MemoryVerdict};
use pagefold_base::process::Process;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{ProcessSelection, scan_scope};
use pagefold_host::action::{Action, MergeAdvice, MissedReason};
use pagefold_host::hold as held;
use pagefold_host::page_state::{FrameLookup, PageState, walk_page_states};
use pagefold_host::transaction::session::{ChangeLifetime, Error as SessionError, Session};
use pagefold_host::{Host, ProcessHandle as Handle, elapsed_since, memory_headroom, observe, parse};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum merged pages of one batch: 32 MiB of 4 KiB pages, some tens of milliseconds of copying.
pub const MAX_PAGES_PER_BATCH: usize = 8192;

/// Interval between checks while waiting for memory.
const MEMORY_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time limit for the memory backends of a guest together, and its increase per merged GiB, which takes about 0.2 s.
const GUEST_TIMEOUT_BASE_AND_PER_GIB: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(2));

/// Huge pages collapsed between two memory checks.
const HUGE_PAGES_PER_COLLAPSE: usize = 64;

/// How a process is unenrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnenrollMethod {
    /// Enrolled whole: `PR_SET_MEMORY_MERGE`.
    WholeProcess,
    /// Its regions are marked: `MADV_UNMERGEABLE`. Also a process that may be enrolled whole, where the kernel does not
    /// show it.
    MarkedRegions,
    /// Unenroll only these ranges, as far as they are marked; ascending.
    Ranges(Vec<AddressRange>),
    /// A guest whose control socket is known.
    Guest {
        /// The socket.
        socket: PathBuf,
        /// The marked backends, with their sizes.
        backends: Vec<(String, Bytes)>,
    },
    /// A guest whose control socket is known but unusable, for this reason.
    UnreachableGuest(String),
}

/// Ranges of a process that are unenrolled together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnenrollBatch {
    /// The ranges, ascending.
    pub ranges: Vec<AddressRange>,
    /// Pages on KSM frames.
    pub merged_pages: Pages,
    /// Zero pages that KSM may have placed.
    pub zero_pages: Pages,
    /// Frames that unenrolling this batch frees after all batches before it.
    pub freed_frames: Pages,
}

/// An enrolled process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnenrollTarget {
    /// The process.
    pub process: Process,
    /// How it is unenrolled.
    pub method: UnenrollMethod,
    /// The batches, in the order of unenrolling.
    pub batches: Vec<UnenrollBatch>,
    /// Maximum number of zero pages in them that KSM placed.
    pub max_zero_pages: Pages,
    /// Anonymous memory in huge pages.
    pub anon_huge: Bytes,
    /// Whether frame numbers could be read. Otherwise the page counts are upper bounds, and no frame counts as freed.
    pub frames_readable: Reading<()>,
}

impl UnenrollMethod {
    /// Whether this method reaches a region. The reached regions of a guest are at least as large as a backend; other
    /// regions that QEMU marks, its firmware and video memory, are smaller.
    fn covers(&self, region: &Region) -> bool {
        match self {
            Self::Guest { backends, .. } => backends.iter().any(|&(_, size)| region.range.bytes() >= size),
            _ => !self.covered_ranges(region).is_empty(),
        }
    }

    /// The ranges of a region that this method unenrolls.
    fn covered_ranges(&self, region: &Region) -> Vec<AddressRange> {
        match self {
            Self::Ranges(ranges) => {
                let first = ranges.partition_point(|range| range.end <= region.range.start);
                ranges[first..].iter().map_while(|range| region.range.overlap(*range)).collect()
            }
            _ => vec![region.range],
        }
    }
}

impl UnenrollTarget {
    /// Pages on KSM frames.
    pub fn merged_pages(&self) -> Pages {
        self.batches.iter().map(|part| part.merged_pages).sum()
    }

    /// Pages that get their own frame.
    pub fn copied_pages(&self) -> Pages {
        self.merged_pages() + self.max_zero_pages
    }

    /// Frames that are freed.
    pub fn freed_frames(&self) -> Pages {
        self.batches.iter().map(|part| part.freed_frames).sum()
    }

    /// The frames that unenrolling it takes, after all targets before it.
    pub fn frame_need(&self) -> FrameNeed {
        FrameNeed::for_cgroup(self.cgroup(), self.copied_pages(), self.freed_frames())
    }

    fn batch_frame_need(&self, part: &UnenrollBatch) -> FrameNeed {
        FrameNeed::for_cgroup(
            self.cgroup(),
            part.merged_pages + part.zero_pages.min(self.max_zero_pages),
            part.freed_frames,
        )
    }

    /// All marked ranges, ascending.
    fn marked_ranges(&self) -> Vec<AddressRange> {
        joined(self.batches.iter().flat_map(|part| part.ranges.clone()).collect())
    }

    fn cgroup(&self) -> Option<&str> {
        self.process.cgroup.as_deref().ok()
    }
}

/// The processes to unenroll.
#[derive(Clone, Debug, Default)]
pub struct UnenrollPlan {
    /// The enrolled processes, the one that needs the fewest frames first.
    pub targets: Vec<UnenrollTarget>,
    /// Number of selected processes that are not enrolled.
    pub not_enrolled: usize,
    /// Selected processes that were not scanned.
    pub unscanned: Vec<UnscannedProcess>,
}

impl UnenrollTarget {
    /// The frames that its first batches take.
    fn frames_for_batches(&self, parts: usize) -> Pages {
        if parts == self.batches.len() {
            return self.frame_need().host;
        }
        self.batches.iter().take(parts).map(|part| self.batch_frame_need(part).host).sum()
    }
}

impl UnenrollPlan {
    /// The frames that the whole plan takes.
    pub fn frame_need(&self) -> FrameNeed {
        let mut sum = FrameNeed::default();
        self.targets.iter().for_each(|target| sum += &target.frame_need());
        sum
    }

    /// The cgroups of the processes.
    fn cgroups(&self) -> BTreeSet<String> {
        self.targets.iter().filter_map(|target| target.cgroup().map(str::to_owned)).collect()
    }

    /// The available memory, and whether a need fits.
    pub fn check_memory(&self, host: &dyn Host, need: &FrameNeed) -> MemoryCheck {
        guard::check_memory(need, &self.measure_headroom(host), host.page_size())
    }

    /// How many batches fit now, one after the other, and how many there are.
    pub fn count_batches_that_fit(&self, host: &dyn Host) -> (usize, usize) {
        let needs: Vec<FrameNeed> = self
            .targets
            .iter()
            .flat_map(|target| target.batches.iter().map(move |part| target.batch_frame_need(part)))
            .collect();
        (guard::count_needs_that_fit(&needs, &self.measure_headroom(host), host.page_size()), needs.len())
    }

    fn measure_headroom(&self, host: &dyn Host) -> guard::MemoryHeadroom {
        let mut room = memory_headroom::measure_headroom(host, &self.cgroups());
        for UnenrollTarget { process, .. } in &self.targets {
            if let Err(why) = &process.cgroup
                && *why != Absent::NotOnThisKernel
            {
                let place = guard::LimitScope::Cgroup(format!("of process {}", process.id.pid));
                room.unreadable.push((place, why.clone()));
            }
        }
        room
    }
}

/// Find out which ranges of the selected processes are enrolled, and how many frames unenrolling them takes.
/// `method_for` returns the method for guests; where it returns nothing, the kind of enrollment decides.
pub fn make_plan(
    host: &dyn Host,
    selection: &ProcessSelection,
    method_for: &(dyn Fn(&dyn Handle, &Process) -> Option<UnenrollMethod> + Sync),
) -> Result<UnenrollPlan, pagefold_census::Error> {
    let (found, unseen) = scan_scope::inspect_selected(host, selection, |handle, process| {
        let regions: Vec<Region> = observe::regions(handle)?;
        let whole = process.ksm.merge_any == Ok(true);
        let merged: u64 = regions.iter().filter_map(|region| region.ksm.as_ref().ok()).map(|ksm| ksm.0).sum();
        if !whole && merged == 0 && !regions.iter().any(is_mergeable) {
            return Ok(None);
        }
        let way = method_for(handle, &process).unwrap_or(if whole {
            UnenrollMethod::WholeProcess
        } else {
            UnenrollMethod::MarkedRegions
        });
        plan_process(host, handle, process, &regions, way).map(Some)
    })?;
    let idle = found.iter().filter(|found| found.is_none()).count();
    let mut found: Vec<(UnenrollTarget, Vec<Vec<KsmPageMappings>>)> = found.into_iter().flatten().collect();
    found.sort_by_key(|(target, _)| (target.copied_pages(), target.process.id));
    let mut left: HashMap<Pfn, u64> = HashMap::new();
    for (target, frames) in &mut found {
        for (part, frames) in target.batches.iter_mut().zip(frames) {
            part.freed_frames = remove_mappings(&mut left, frames);
        }
    }
    Ok(UnenrollPlan {
        targets: found.into_iter().map(|(target, _)| target).collect(),
        not_enrolled: idle,
        unscanned: unseen,
    })
}

/// A merged page: its frame, with all mappings of it.
type KsmPageMappings = (Pfn, u64);

/// Remove mappings from frames; returns how many frames have no mapping left.
fn remove_mappings(left: &mut HashMap<Pfn, u64>, pages: &[KsmPageMappings]) -> Pages {
    let mut returned = 0;
    for &(frame, mappings) in pages {
        let left = left.entry(frame).or_insert(mappings);
        *left = left.saturating_sub(1);
        returned += u64::from(*left == 0);
    }
    Pages(returned)
}

fn is_mergeable(region: &Region) -> bool {
    region.flags.has(VmFlags::MERGEABLE)
}

/// A process with its batches, and the merged pages of each batch.
fn plan_process(
    host: &dyn Host,
    handle: &dyn Handle,
    process: Process,
    regions: &[Region],
    way: UnenrollMethod,
) -> Reading<(UnenrollTarget, Vec<Vec<KsmPageMappings>>)> {
    // Before 6.6 the kernel has no such counter and unmerging does not copy zero pages.
    let zeros = match &process.ksm.zero_pages {
        Ok(pages) => Pages(u64::try_from(*pages).unwrap_or(0)),
        Err(_) => Pages::ZERO,
    };
    let marked: Vec<&Region> = regions.iter().filter(|region| is_mergeable(region) && way.covers(region)).collect();
    let anon_huge = regions.iter().map(|region| region.anon_huge).sum();
    let at_most = if matches!(way, UnenrollMethod::Guest { .. }) { usize::MAX } else { MAX_PAGES_PER_BATCH };
    let mut parts = BatchBuilder { max_pages: at_most, batches: Vec::new(), frames: Vec::new() };
    let exact = marked.iter().try_for_each(|region| {
        way.covered_ranges(region).into_iter().try_for_each(|range| {
            let found = if may_have_ksm_pages(region, zeros) {
                read_ksm_pages(host, handle, range)?
            } else {
                RangePages::default()
            };
            parts.add_range(range, &found);
            Ok(())
        })
    });
    if exact == Err(Absent::Vanished) {
        return Err(Absent::Vanished);
    }
    if exact.is_err() {
        parts = BatchBuilder {
            max_pages: at_most,
            batches: vec![estimate_batch(host, &process, &way, &marked, zeros)?],
            frames: vec![Vec::new()],
        };
    }
    let zeros = zeros.min(parts.batches.iter().map(|part| part.zero_pages).sum());
    Ok((
        UnenrollTarget {
            process,
            method: way,
            batches: parts.batches,
            max_zero_pages: zeros,
            anon_huge,
            frames_readable: exact,
        },
        parts.frames,
    ))
}

/// A whole process as one batch, by the kernel's sums.
fn estimate_batch(
    host: &dyn Host,
    process: &Process,
    way: &UnenrollMethod,
    marked: &[&Region],
    zeros: Pages,
) -> Reading<UnenrollBatch> {
    let by_smaps: Reading<Bytes> = marked.iter().map(|region| region.ksm.clone()).sum();
    let merged = match by_smaps {
        Ok(bytes) => host.page_size().pages_in(bytes),
        Err(_) => Pages(process.ksm.merging_pages.clone()?),
    };
    let ranges = marked.iter().flat_map(|region| way.covered_ranges(region)).collect();
    Ok(UnenrollBatch { ranges, merged_pages: merged, zero_pages: zeros, freed_frames: Pages::ZERO })
}

fn may_have_ksm_pages(region: &Region, zeros: Pages) -> bool {
    zeros > Pages::ZERO || region.ksm.as_ref().is_ok_and(|ksm| *ksm > Bytes::ZERO) || region.ksm.is_err()
}

/// Collects ranges into batches.
struct BatchBuilder {
    max_pages: usize,
    batches: Vec<UnenrollBatch>,
    frames: Vec<Vec<KsmPageMappings>>,
}

impl BatchBuilder {
    fn add_range(&mut self, range: AddressRange, found: &RangePages) {
        let addresses: Vec<u64> = found.pages.iter().map(|page| page.0).collect();
        let mut pages = found.pages.iter();
        for (range, count) in guard::split_by_page_count(range, &addresses, self.max_pages) {
            let full = self
                .batches
                .last()
                .is_none_or(|part| part.merged_pages.0 + part.zero_pages.0 + count as u64 > self.max_pages as u64);
            if full {
                self.batches.push(UnenrollBatch::default());
                self.frames.push(Vec::new());
            }
            let (Some(part), Some(frames)) = (self.batches.last_mut(), self.frames.last_mut()) else { return };
            part.ranges.push(range);
            for &(_, shared) in pages.by_ref().take(count) {
                match shared {
                    Some(shared) => {
                        part.merged_pages += Pages(1);
                        frames.push(shared);
                    }
                    None => part.zero_pages += Pages(1),
                }
            }
        }
    }
}

/// The pages of a range by address, each on a KSM frame or on the kernel's zero page.
#[derive(Default)]
struct RangePages {
    pages: Vec<(u64, Option<KsmPageMappings>)>,
}

/// Read the frames of a range.
fn read_ksm_pages(host: &dyn Host, handle: &dyn Handle, range: AddressRange) -> Reading<RangePages> {
    let mut pages: Vec<(u64, PageState)> = Vec::new();
    let mut is_hidden = false;
    walk_page_states(host, handle, range, FrameLookup::All, |address, state| match state {
        PageState::Ksm(_) | PageState::ZeroPage { huge: false } => pages.push((address, state)),
        PageState::Hidden => is_hidden = true,
        _ => {}
    })?;
    if is_hidden {
        return Err(Absent::Denied);
    }
    pages.sort_unstable_by_key(|&(address, _)| address);
    let frame = |&(_, state): &(u64, PageState)| match state {
        PageState::Ksm(frame) => Some(frame),
        _ => None,
    };
    let mut frames: Vec<Pfn> = pages.iter().filter_map(frame).collect();
    frames.sort_unstable();
    frames.dedup();
    let mappings = if frames.is_empty() { Vec::new() } else { host.frame_mappings(&frames)? };
    let of = |page: &(u64, PageState)| match frame(page) {
        Some(frame) => Some((page.0, Some((frame, *mappings.get(frames.binary_search(&frame).ok()?)?)))),
        None => Some((page.0, None)),
    };
    Ok(RangePages { pages: pages.iter().filter_map(of).collect() })
}

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
        let clean = self.error.is_none() && self.missed_ranges.is_empty();
        let none = |remains: &StillMerged| remains.merged_pages == Pages::ZERO && remains.zero_pages == Pages::ZERO;
        self.ended
            || (self.all_unenrolled && clean && self.still_merged.as_ref().is_some_and(|r| r.as_ref().is_ok_and(none)))
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
        plan.targets.iter().zip(&self.targets).map(|(target, done)| target.frames_for_batches(done.batches_done)).sum()
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
    let mut work =
        UnenrollRun { session, plan, limits, stop, deadline: host.now() + limits.max_wait, stopped_by_guard: None };
    let before = HostCounters::observe(host);
    let mut targets = vec![UnenrollResult::default(); plan.targets.len()];
    for (target, done) in plan.targets.iter().zip(&mut targets) {
        if work.should_stop() {
            break;
        }
        work.unenroll_target(target, done)?;
    }
    for (target, done) in plan.targets.iter().zip(&mut targets) {
        if !done.ended {
            let remains = still_merged::read_still_merged(host, target);
            done.ended = remains == Err(Absent::Vanished) || still_merged::has_ended(host, target.process.id);
            done.still_merged = (!done.ended).then_some(remains);
        }
    }
    let after = HostCounters::observe(host);
    if limits.collapse_huge_pages && work.stopped_by_guard.is_none() {
        for (target, done) in plan.targets.iter().zip(&mut targets) {
            if done.is_complete() && !done.ended && !stop.load(Ordering::Relaxed) {
                work.collapse_huge_pages(target, done)?;
            }
        }
    }
    let (stopped, interrupted) = (work.stopped_by_guard, stop.load(Ordering::Relaxed));
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

    fn unenroll_target(&mut self, target: &UnenrollTarget, done: &mut UnenrollResult) -> Result<(), SessionError> {
        let process = target.process.id;
        if let UnenrollMethod::UnreachableGuest(why) = &target.method {
            done.error = Some(why.clone());
            return Ok(());
        }
        match &target.method {
            UnenrollMethod::Guest { socket, backends } if !self.unenroll_guest(target, socket, backends, done)? => {
                return Ok(());
            }
            UnenrollMethod::Guest { .. } => {}
            _ if !self.unenroll_batches(target, done)? => return Ok(()),
            UnenrollMethod::WholeProcess => self.apply(&Action::MergeAny { process, enable: false }, done)?,
            UnenrollMethod::MarkedRegions | UnenrollMethod::Ranges(_) | UnenrollMethod::UnreachableGuest(_) => {}
        }
        if target.method == UnenrollMethod::MarkedRegions && target.process.ksm.merge_any.is_err() {
            self.apply(&Action::MergeAny { process, enable: false }, done)?;
        }
        if done.error.is_none() && !done.ended {
            done.batches_done = target.batches.len();
            done.all_unenrolled = true;
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
        done: &mut UnenrollResult,
    ) -> Result<bool, SessionError> {
        let host = self.session.host();
        let gib = u32::try_from(host.page_size().bytes_of(target.merged_pages()).0 >> 30).unwrap_or(u32::MAX);
        let (limit, mut spent) =
            (GUEST_TIMEOUT_BASE_AND_PER_GIB.0 + GUEST_TIMEOUT_BASE_AND_PER_GIB.1 * gib, Duration::ZERO);
        for (backend, _) in backends {
            if spent >= limit {
                done.error = Some(format!("{} answers too slowly; `--inject` unenrolls from within", socket.display()));
            }
            if done.ended || done.error.is_some() || self.should_stop() || self.is_memory_short(target, done) {
                return Ok(false);
            }
            // Where frames are readable, the guard counts them; otherwise the kernel's sums give the rest.
            let left = match &target.frames_readable {
                Ok(()) => Err(Absent::NotOnThisKernel),
                Err(_) => still_merged::guest_remainder_batch(host, target),
            };
            let parts = left.map_or_else(|_| target.batches.clone(), |part| vec![part]);
            if !self.wait_for_memory(target, &parts, &[])? {
                return Ok(false);
            }
            let (socket, backend) = (socket.to_owned(), backend.clone());
            let action = Action::GuestMerge { process: target.process.id, socket, backend, enable: false };
            let started = host.now();
            self.apply(&action, done)?;
            spent += elapsed_since(host, started);
        }
        Ok(true)
    }

    /// Unenroll the batches of a process one after the other, each once the guard allows it. Returns whether all of
    /// them were tried.
    fn unenroll_batches(&mut self, target: &UnenrollTarget, done: &mut UnenrollResult) -> Result<bool, SessionError> {
        for (position, part) in target.batches.iter().enumerate() {
            let rest = if self.limits.staged { &[] } else { &target.batches[position + 1..] };
            if done.ended
                || done.error.is_some()
                || self.should_stop()
                || self.is_memory_short(target, done)
                || !self.wait_for_memory(target, std::slice::from_ref(part), rest)?
            {
                return Ok(false);
            }
            let (process, ranges) = (target.process.id, part.ranges.clone());
            self.apply(&Action::Advise { process, advice: MergeAdvice::Unmergeable, ranges }, done)?;
            done.batches_done += usize::from(done.error.is_none() && !done.ended);
        }
        Ok(true)
    }

    fn apply(&mut self, action: &Action, done: &mut UnenrollResult) -> Result<(), SessionError> {
        if done.ended || done.error.is_some() {
            return Ok(());
        }
        match self.session.apply_until_stopped(action, ChangeLifetime::Permanent, self.stop) {
            Ok(effect) => {
                done.stop_durations.extend(effect.stop_durations);
                done.missed_ranges.extend(effect.missed_ranges);
            }
            Err(SessionError::Refused(pagefold_host::action::ActionError::Vanished)) => done.ended = true,
            Err(SessionError::Refused(why)) => done.error = Some(why.to_string()),
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Whether memory is short for a process and the limits heed that. Records it as the process's error.
    fn is_memory_short(&self, target: &UnenrollTarget, done: &mut UnenrollResult) -> bool {
        let short = |percent| memory_headroom::is_memory_short(self.session.host(), target.cgroup(), percent);
        let pressed = self.limits.max_pressure_percent.is_some_and(short);
        if pressed {
            done.error = Some("memory is short".to_owned());
        }
        pressed
    }

    /// Whether batches of a process, counted now, fit together with the rest as planned. Waits up to the deadline and
    /// records the verdict if they do not fit.
    fn wait_for_memory(
        &mut self,
        target: &UnenrollTarget,
        parts: &[UnenrollBatch],
        rest: &[UnenrollBatch],
    ) -> Result<bool, SessionError> {
        if self.limits.force {
            return Ok(true);
        }
        loop {
            let need = self.current_need(target, parts, rest);
            let judgement = self.plan.check_memory(self.session.host(), &need);
            if judgement.verdict == MemoryVerdict::Fits {
                return Ok(true);
            }
            if self.stop.load(Ordering::Relaxed) {
                return Ok(false);
            }
            if self.session.host().now() >= self.deadline {
                self.stopped_by_guard = Some(judgement);
                return Ok(false);
            }
            self.session.host().sleep(MEMORY_POLL_INTERVAL);
        }
    }

    /// The frames that batches of a process take now, with the rest as planned: since the plan, pages were merged,
    /// written and unmapped. Where the pages cannot be counted, the plan's figures stand.
    fn current_need(&self, target: &UnenrollTarget, parts: &[UnenrollBatch], rest: &[UnenrollBatch]) -> FrameNeed {
        let host = self.session.host();
        let look = || -> Reading<FrameNeed> {
            target.frames_readable.clone()?;
            let handle = held(host, target.process.id)?;
            let ksm = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel));
            let cap = ksm.zero_pages.map_or(0, |pages| u64::try_from(pages).unwrap_or(0));
            let mut merged = rest.iter().map(|part| part.merged_pages).sum::<Pages>().0;
            let mut zeros = rest.iter().map(|part| part.zero_pages).sum::<Pages>().0;
            let mut returned: Pages = rest.iter().map(|part| part.freed_frames).sum();
            let mut left = HashMap::new();
            for part in parts {
                for range in &part.ranges {
                    let found = read_ksm_pages(host, &*handle, *range)?;
                    let shared: Vec<KsmPageMappings> = found.pages.iter().filter_map(|page| page.1).collect();
                    returned += remove_mappings(&mut left, &shared);
                    merged += shared.len() as u64;
                    zeros += (found.pages.len() - shared.len()) as u64;
                }
            }
            Ok(FrameNeed::for_cgroup(target.cgroup(), Pages(merged + zeros.min(cap)), returned))
        };
        match look() {
            Ok(need) => need,
            Err(Absent::Vanished) => FrameNeed::default(),
            Err(_) => {
                let mut sum = FrameNeed::default();
                parts.iter().chain(rest).for_each(|part| sum += &target.batch_frame_need(part));
                sum
            }
        }
    }

    /// Collapse huge pages where all pages of one are resident and the host allows it. Each collapse takes one free
    /// huge page; the replaced frames are then freed. Collapsing ranges that are not resident would take memory for
    /// good.
    fn collapse_huge_pages(&mut self, target: &UnenrollTarget, done: &mut UnenrollResult) -> Result<(), SessionError> {
        let host = self.session.host();
        let Ok((before, ranges)) = find_collapsible(host, target) else { return Ok(()) };
        let huge = observe::huge_page_bytes(host).unwrap_or(0);
        // Two, since the kernel frees the replaced pages in batches.
        let pages = host.page_size().pages_in(Bytes(2 * huge));
        let need = FrameNeed::for_cgroup(target.cgroup(), pages, Pages::ZERO);
        for ranges in ranges.chunks(HUGE_PAGES_PER_COLLAPSE) {
            if self.stop.load(Ordering::Relaxed) || self.plan.check_memory(host, &need).verdict != MemoryVerdict::Fits {
                break;
            }
            let action = Action::Collapse { process: target.process.id, ranges: ranges.to_vec() };
            match self.session.apply(&action, ChangeLifetime::Permanent) {
                // The huge pages after the collapse show which ranges failed.
                Ok(effect) => done.stop_durations.extend(effect.stop_durations),
                Err(SessionError::Refused(why)) => {
                    done.error = Some(format!("cannot collapse huge pages: {why}"));
                    break;
                }
                Err(other) => return Err(other),
            }
        }
        let handle = held(host, target.process.id);
        let after = handle.and_then(|handle| observe::rollup(&*handle)).and_then(|rollup| rollup.anon_huge);
        done.huge_before_and_after_collapse = after.ok().map(|after| (before, after));
        Ok(())
    }
}

/// Ranges in address order; adjacent and overlapping ranges become one.
pub fn joined(mut ranges: Vec<AddressRange>) -> Vec<AddressRange> {
    ranges.sort_unstable();
    let mut all: Vec<AddressRange> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => all.push(range),
        }
    }
    all
}

/// Memory of a process in huge pages now, and the ranges that could be huge pages but are not: aligned, wholly
/// resident, unenrolled, where huge pages are allowed.
fn find_collapsible(host: &dyn Host, target: &UnenrollTarget) -> Reading<(Bytes, Vec<AddressRange>)> {
    let huge = observe::huge_page_bytes(host)?;
    let mode = observe::thp_mode(host)?;
    let handle = held(host, target.process.id)?;
    let withdrawn = target.marked_ranges();
    let regions = observe::regions(&*handle)?;
    let before = regions.iter().map(|region| region.anon_huge).sum();
    let allowed = |region: &&Region| mode == "always" || (mode == "madvise" && region.flags.has(VmFlags::HUGE_PAGE));
    let mut ranges = Vec::new();
    for region in regions.iter().filter(allowed) {
        for part in withdrawn.iter().filter_map(|range| range.overlap(region.range)) {
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
