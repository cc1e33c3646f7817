//! Executes a plan: enroll, let ksmd work within its CPU limit, unenroll ranges that do not stay merged, verify.
//!
//! 1. Unprofitable ranges that programs enrolled themselves are unenrolled temporarily, also in processes without other
//!    targets, so that ksmd does not scan them.
//! 2. The ranges of the plan are enrolled, and ksmd runs as fast as its limit allows until no more pages merge. On
//!    kernels before 6.11, third and further copies are enrolled once the first two of each have merged. If that falls
//!    short and ksmd has skipped pages, it continues without skipping
//!    ([`SettleDetector::may_be_skipped`](crate::decide::pace::SettleDetector::may_be_skipped)). If all enrolled
//!    processes have ended, the merge does not wait ([`StallDetector`](crate::ksmd::StallDetector)).
//! 3. Meanwhile the merged pages of running targets are watched, and ranges that do not stay merged for long enough are
//!    unenrolled: see [`merge_monitor`].
//! 4. ksmd is stopped, page tables are read, and its settings are restored. Merged pages stay merged: their ranges stay
//!    enrolled, because unenrolling would unmerge them. If the merge is cut short, ranges without merged pages are
//!    unenrolled, unless ksmd is to continue with them.
//!
//! KSM has one tree and one ksmd: ksmd also scans memory that other programs enrolled. The timeline therefore uses the
//! targets' own counters, and the verdict uses their page tables.

mod settle;

use crate::MergeProbes;
use crate::decide::outcome::{
    EnrollChange, FailedChange, FrameFates, KsmPageCounts, MergeEnd, MergeOutcome, MergedPagesWatch, PageFate,
    Resident, TimelinePoint,
};
use crate::decide::pace::KsmdPace;
use crate::decide::plan::{EnrollMethod, MergePlan, PlanTarget, TemporaryUnenroll};
use crate::decide::policy::GUIDED_SLEEP_MILLISECS;
use crate::ksmd::{self, MergedPageCounter, read_pages_scanned};
use crate::merge_monitor::{self, MergeMonitor, UnenrolledRanges};
use crate::recheck::{CheckScope, UnenrollPhase};
use crate::verify::MergedTarget;
use crate::{split_zeros, verify};
use pagefold_base::ksm::DEFAULT_PAGES_TO_SCAN;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, ProcessId, Reading};
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_host::knob::Knob;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{ChangeLifetime, FailedUndo, Session};
use pagefold_host::{Host, elapsed_since, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How a plan is executed.
#[derive(Clone, Debug)]
pub struct MergeOptions {
    /// ksmd's maximum share of one CPU; 1 is no limit.
    pub ksmd_cpu_share: f64,
    /// The deadline, from the start of the command, whether settled or not.
    pub deadline: Option<Duration>,
    /// The minimum time for which merged pages of running targets are watched; zero for none.
    pub watch_time: Duration,
    /// The fate of temporary changes.
    pub after_merge: AfterMerge,
}

/// The fate of temporary changes once a plan is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterMerge {
    /// They are undone.
    UndoChanges,
    /// They are undone, except that ksmd stays running slowly.
    KeepKsmdRunning,
    /// They stay until the session ends: ksmd is idle, and unprofitable ranges stay unenrolled.
    KeepKsmdPaused,
}

impl AfterMerge {
    /// This choice, adjusted to how the merge ended: after a stop ksmd does not continue, and once another program has
    /// overwritten a setting, no change stays.
    fn for_end(self, end: &MergeEnd) -> Self {
        match (end, self) {
            (MergeEnd::SettingsOverwritten(_), _) | (MergeEnd::Stopped, Self::KeepKsmdRunning) => Self::UndoChanges,
            _ => self,
        }
    }
}

/// Progress of a running merge.
#[derive(Debug, Default)]
pub struct MergeProgress {
    stage: AtomicU64,
    merged: AtomicU64,
    expected: AtomicU64,
}

/// The current stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum MergeStage {
    /// Not started.
    Waiting,
    /// Ranges are being enrolled.
    Enrolling,
    /// ksmd works.
    Merging,
    /// Page tables are being read.
    Verifying,
}

impl MergeProgress {
    /// The current stage.
    pub fn stage(&self) -> MergeStage {
        const STAGES: [MergeStage; 4] =
            [MergeStage::Waiting, MergeStage::Enrolling, MergeStage::Merging, MergeStage::Verifying];
        STAGES[self.stage.load(Ordering::Relaxed) as usize % STAGES.len()]
    }

    /// Pages merged so far, kept copies included, and pages expected.
    pub fn merged(&self) -> (Pages, Pages) {
        (Pages(self.merged.load(Ordering::Relaxed)), Pages(self.expected.load(Ordering::Relaxed)))
    }

    fn enter(&self, stage: MergeStage) {
        self.stage.store(stage as u64, Ordering::Relaxed);
    }
}

/// A plan to execute.
pub struct PreparedMerge {
    /// The plan.
    pub plan: MergePlan,
    /// Probes that show afterwards why the savings differ from the prediction, if that is to be explained.
    pub probes: Option<MergeProbes>,
    /// The start of the command, by the clock of the host.
    pub started_at: Instant,
}

/// Execute a plan and undo temporary changes. `monitor` unenrolls ranges that do not stay merged; pass a new one unless
/// pages of an earlier merge are to be watched too.
///
/// Targets that end meanwhile or refuse are listed in the outcome and do not stop the others.
pub fn execute_plan<'h>(
    session: &mut Session<'h>,
    prepared: PreparedMerge,
    options: &MergeOptions,
    monitor: &mut MergeMonitor<'h>,
    progress: &MergeProgress,
    stop: &AtomicBool,
) -> Result<MergeOutcome, session::Error> {
    let PreparedMerge { plan, probes, started_at } = prepared;
    let host = session.host();
    let memory_before = MemoryReadings::take(host, &plan);
    // Without readable frame numbers the result could not be measured.
    pagefold_host::check_frame_access(host).map_err(session::Error::HostStateUnreadable)?;
    let before = PlanMeasurement::take(host, &plan)?;
    let mut run = MergeRun::new(session, &plan, options, monitor, (progress, stop), started_at);
    let census_time = elapsed_since(host, started_at);
    progress.expected.store(plan.predicted.merging.0, Ordering::Relaxed);
    let mut end = run.merge_and_pause()?;
    let after = PlanMeasurement::take(host, &plan)?;
    let bystanders = verify::count_unplanned_enrolled(host, &plan);
    let ksmd_time = run.ksmd_cpu_used();
    let MergeRun { timeline, mut failed_changes, unenrolled_pages, unenrolled_processes, .. } = run;
    for failed in monitor.failed_changes() {
        merge_monitor::push_failed_change(&mut failed_changes, failed.clone());
    }
    let nets = verify::net_savings(host, &plan, &before.targets, &after.targets);
    let zeros_by_splitting = verify::split_zero_pages(&plan, host.page_size(), &before.targets, &after.targets);
    let regions_added = count_added_regions(&before, &after);
    let fates = probes
        .map_or(Ok(FrameFates::default()), |probes| {
            probes.determine_fates(host, |process| ranges_given_up(&failed_changes, monitor, process))
        })
        .map_err(session::Error::HostStateUnreadable)?;
    session.commit()?;
    // Without the record later commands miss this part, and report that.
    let not_recorded = split_zeros::note(host, session.directory(), &zeros_by_splitting)
        .err()
        .map(|error| format!("cannot record the freed zero pages in {}: {error}", split_zeros::SPLIT_ZEROS_FILE));
    let not_restored = end_session(session, options.after_merge, &mut end)?;
    let memory_after = MemoryReadings::take(host, &plan);
    let (before_sum, after_sum) = sum_living_targets(&before, &after);
    let is_ended = |position: &usize| after.targets[*position].is_none();
    let huge_before: Bytes = plan.targets.iter().map(|target| target.huge_page_bytes).sum();
    let huge_after = if huge_before > Bytes::ZERO { verify::targets_huge_bytes(host, &plan) } else { Ok(huge_before) };
    Ok(MergeOutcome {
        end,
        before: before_sum,
        after: after_sum,
        nets,
        zeros_by_splitting,
        timeline,
        census_time,
        ksmd_time,
        pages_scanned: before.pages_scanned.and_then(|before| Ok(after.pages_scanned?.saturating_sub(before))),
        regions_added,
        fates,
        own_cpu_time: host.own_cpu_time(),
        available: (memory_before.available, memory_after.available),
        resident: memory_before.resident.and_then(|(targets, own)| {
            let after = memory_after.resident?;
            Ok(Resident { targets: (targets, after.0), own: (own, after.1) })
        }),
        huge_page_bytes: (huge_before, huge_after),
        stops: session.stop_durations().to_vec(),
        merged_watch: MergedPagesWatch {
            lifetime_stats: monitor.lifetime_stats(),
            unenrolled_pages,
            unenrolled_from: unenrolled_processes,
        },
        unenrolled: unenrolled_by_target(&plan, monitor),
        ended_targets: (0..plan.targets.len()).filter(is_ended).collect(),
        bystanders,
        failed_changes,
        not_restored: not_restored.into_iter().map(|failed| failed.to_string()).chain(not_recorded).collect(),
        plan,
    })
}

/// What is measured before ksmd works and after it.
struct PlanMeasurement {
    /// The merged pages of each target; `None` for ended ones.
    targets: Vec<Option<MergedTarget>>,
    /// The number of regions of each process.
    region_counts: BTreeMap<ProcessId, u64>,
    /// ksmd's page visits.
    pages_scanned: Reading<Pages>,
}

impl PlanMeasurement {
    fn take(host: &dyn Host, plan: &MergePlan) -> Result<Self, session::Error> {
        Ok(Self {
            targets: verify::measure_targets(host, plan).map_err(session::Error::HostStateUnreadable)?,
            region_counts: verify::region_counts(host, plan),
            pages_scanned: read_pages_scanned(host),
        })
    }
}

/// Memory before the first change and after the last one.
struct MemoryReadings {
    /// `MemAvailable`.
    available: Reading<Bytes>,
    /// Anonymous memory of the targets, and of this process.
    resident: Reading<(Bytes, Bytes)>,
}

impl MemoryReadings {
    fn take(host: &dyn Host, plan: &MergePlan) -> Self {
        Self {
            available: observe::memory(host).and_then(|memory| memory.available),
            resident: verify::resident_anonymous(host, plan),
        }
    }
}

/// KSM's pages before and after, of the targets that still run: earlier savings of ended processes are no loss.
fn sum_living_targets(before: &PlanMeasurement, after: &PlanMeasurement) -> (KsmPageCounts, KsmPageCounts) {
    let running = before.targets.iter().zip(&after.targets).filter(|(_, after)| after.is_some());
    (
        verify::sum_targets(running.filter_map(|(before, _)| before.as_ref())),
        verify::sum_targets(after.targets.iter().flatten()),
    )
}

/// Regions that the processes that still run have more than before.
fn count_added_regions(before: &PlanMeasurement, after: &PlanMeasurement) -> i64 {
    let added = |(process, after): (&ProcessId, &u64)| {
        Some(after.cast_signed() - before.region_counts.get(process)?.cast_signed())
    };
    after.region_counts.iter().filter_map(added).sum()
}

/// The ranges of a process that a monitor unenrolled because they did not stay merged.
fn all_unenrolled(monitor: &MergeMonitor<'_>, process: ProcessId) -> Vec<AddressRange> {
    monitor.unenrolled().get(&process).map(UnenrolledRanges::all_ranges).unwrap_or_default()
}

/// The ranges of a process that are not enrolled in the end, each with the fate of its pages.
fn ranges_given_up(
    failed_changes: &[FailedChange],
    monitor: &MergeMonitor<'_>,
    process: ProcessId,
) -> Vec<(AddressRange, PageFate)> {
    let is_of_process = |failed: &&FailedChange| failed.pid == process.pid && failed.change == EnrollChange::Enroll;
    let all_addresses = AddressRange { start: 0, end: u64::MAX };
    let failed = failed_changes.iter().filter(is_of_process).map(|failed| failed.range.unwrap_or(all_addresses));
    let with_fate = |fate| move |range| (range, fate);
    failed
        .map(with_fate(PageFate::NotEnrolled))
        .chain(all_unenrolled(monitor, process).into_iter().map(with_fate(PageFate::Unenrolled)))
        .chain(monitor.unmerged(process).iter().copied().map(with_fate(PageFate::UnenrolledUnmerged)))
        .collect()
}

/// Undo temporary changes, or keep them, as the options say. Returns what could not be undone.
fn end_session(
    session: &mut Session<'_>,
    after_merge: AfterMerge,
    end: &mut MergeEnd,
) -> Result<Vec<FailedUndo>, session::Error> {
    if after_merge.for_end(end) == AfterMerge::KeepKsmdRunning {
        let result = session.write_settings(&Settings::from([
            (Setting::PagesToScan, DEFAULT_PAGES_TO_SCAN.to_string()),
            (Setting::SleepMillisecs, GUIDED_SLEEP_MILLISECS.to_string()),
            (Setting::Run, "1".to_owned()),
        ]));
        match result {
            Err(error @ session::Error::SettingOverwritten { .. }) => {
                *end = MergeEnd::SettingsOverwritten(error.to_string())
            }
            result => result?,
        }
    }
    match after_merge.for_end(end) {
        AfterMerge::UndoChanges => session.undo_all(),
        AfterMerge::KeepKsmdRunning => session.keep_policy("guided"),
        AfterMerge::KeepKsmdPaused => Ok(Vec::new()),
    }
}

/// The ranges that a monitor unenrolled from the targets of a plan, by the targets' positions.
fn unenrolled_by_target(plan: &MergePlan, monitor: &MergeMonitor<'_>) -> BTreeMap<usize, Vec<AddressRange>> {
    let unenrolled_ranges = |target: &PlanTarget| Some(monitor.unenrolled().get(&target.process.id)?.all_ranges());
    plan.targets
        .iter()
        .enumerate()
        .filter_map(|(position, target)| Some((position, unenrolled_ranges(target)?)))
        .collect()
}

struct MergeRun<'w, 'h> {
    plan: &'w MergePlan,
    monitor: &'w mut MergeMonitor<'h>,
    unenrolled_pages: Pages,
    unenrolled_processes: BTreeSet<ProcessId>,
    unstable_found_at: Instant,
    /// Whether any of the ranges was enrolled.
    any_enrolled: bool,
    /// Whether `smart_scan` is off for this merge.
    smart_scan_disabled: bool,
    session: &'w mut Session<'h>,
    options: &'w MergeOptions,
    started_at: Instant,
    progress: &'w MergeProgress,
    stop: &'w AtomicBool,
    ksmd: Reading<KsmdThread<'h>>,
    ksmd_cpu_before: Reading<Duration>,
    page_counter: MergedPageCounter<'h>,
    pace: KsmdPace,
    timeline: Vec<TimelinePoint>,
    failed_changes: Vec<FailedChange>,
}

impl<'w, 'h> MergeRun<'w, 'h> {
    fn new(
        session: &'w mut Session<'h>,
        plan: &'w MergePlan,
        options: &'w MergeOptions,
        monitor: &'w mut MergeMonitor<'h>,
        (progress, stop): (&'w MergeProgress, &'w AtomicBool),
        started_at: Instant,
    ) -> Self {
        let host = session.host();
        let mut run = Self {
            plan,
            monitor,
            unenrolled_pages: Pages::ZERO,
            unenrolled_processes: BTreeSet::new(),
            unstable_found_at: started_at,
            any_enrolled: false,
            smart_scan_disabled: false,
            ksmd: KsmdThread::find(host),
            page_counter: MergedPageCounter::new(host, plan),
            ksmd_cpu_before: Err(Absent::NotOnThisKernel),
            pace: KsmdPace::new(options.ksmd_cpu_share),
            session,
            options,
            started_at,
            progress,
            stop,
            timeline: Vec::new(),
            failed_changes: Vec::new(),
        };
        run.ksmd_cpu_before = run.ksmd_cpu();
        run
    }

    /// Merge, then stop ksmd unless another program drives it.
    fn merge_and_pause(&mut self) -> Result<MergeEnd, session::Error> {
        let end = match self.merge() {
            Err(error @ session::Error::SettingOverwritten { .. }) => MergeEnd::SettingsOverwritten(error.to_string()),
            end => end?,
        };
        self.progress.enter(MergeStage::Verifying);
        if let MergeEnd::SettingsOverwritten(_) = end {
            return Ok(end);
        }
        match self.pause_ksmd() {
            Err(error @ session::Error::SettingOverwritten { .. }) => {
                Ok(MergeEnd::SettingsOverwritten(error.to_string()))
            }
            paused => paused.map(|()| end),
        }
    }
}

impl MergeRun<'_, '_> {
    fn merge(&mut self) -> Result<MergeEnd, session::Error> {
        self.progress.enter(MergeStage::Enrolling);
        self.monitor.begin_plan(self.plan);
        // Pages with COW breaks while ksmd was idle would be merged again.
        self.check_and_unenroll(CheckScope::AllIfDue, UnenrollPhase::DuringMerge)?;
        self.failed_changes.extend(self.monitor.repeat_temporary_unenroll(self.session)?);
        self.unenroll_unprofitable()?;
        self.enroll_targets(false)?;
        let mut early = self.plan.merging_early();
        let is_refused = |failed: &FailedChange| failed.change == EnrollChange::Enroll && failed.range.is_none();
        if early.is_some() && self.failed_changes.iter().any(is_refused) {
            // With a refused process the first copies may never merge, so the late ranges are enrolled at once.
            self.enroll_targets(true)?;
            early = None;
        }
        // Without enrolled memory ksmd sleeps, and the merge would never settle.
        let already_enrolled = self.plan.targets.iter().flat_map(|target| &target.ranges).any(|range| range.enrolled);
        if !self.any_enrolled && (self.plan.whole_processes || !already_enrolled) {
            return Ok(self.early_end().unwrap_or(MergeEnd::Settled));
        }
        // A merge of whole processes unenrolls no part of them.
        if !self.options.watch_time.is_zero() && !self.plan.whole_processes {
            self.monitor.add_plan(self.plan);
        }
        self.progress.enter(MergeStage::Merging);
        self.wait_until_settled(early, self.plan.predicted.merging)
    }

    /// Temporarily unenroll unprofitable ranges that programs enrolled themselves.
    fn unenroll_unprofitable(&mut self) -> Result<(), session::Error> {
        if self.plan.temporary_unenrolls.is_empty() {
            return Ok(());
        }
        // Pages merged since the census would be unmerged: ksmd is stopped, and ranges with such pages are left
        // unchanged.
        let host = self.session.host();
        let was_running = Knob::from(Setting::Run).read(host).is_ok_and(|run| run == "1");
        self.pause_ksmd()?;
        for TemporaryUnenroll { process, comm, ranges, .. } in &self.plan.temporary_unenrolls {
            let merged_pages =
                |range: &AddressRange| verify::count_range_pages(host, *process, *range).map(|counts| counts.merged);
            let has_no_merged_pages = |range: &AddressRange| !was_running || merged_pages(range) == Ok(Pages::ZERO);
            let ranges: Vec<AddressRange> = ranges.iter().copied().filter(has_no_merged_pages).collect();
            if ranges.is_empty() || self.early_end().is_some() {
                continue;
            }
            let action = Action::Advise { process: *process, advice: MergeAdvice::Unmergeable, ranges };
            self.act(*process, comm, &action, ChangeLifetime::Temporary)?;
        }
        Ok(())
    }

    /// Enroll the early ranges, or the late ones.
    fn enroll_targets(&mut self, late: bool) -> Result<(), session::Error> {
        for target in &self.plan.targets {
            if self.early_end().is_some() {
                break;
            }
            let process = target.process.id;
            let ranges = target.ranges_to_enroll(late);
            let actions: Vec<Action> = match (&target.enroll_method, self.plan.whole_processes) {
                (EnrollMethod::Unreachable(why), _) => {
                    let (pid, comm) = (process.pid, target.process.comm.clone());
                    let failed =
                        FailedChange { change: EnrollChange::Enroll, pid, comm, range: None, why: why.clone() };
                    merge_monitor::push_failed_change(&mut self.failed_changes, failed);
                    continue;
                }
                // The guest may be enrolled already.
                (EnrollMethod::GuestControl(guest), true) if guest.backends.is_empty() => {
                    self.any_enrolled = true;
                    continue;
                }
                (EnrollMethod::GuestControl(guest), true) => guest
                    .backends
                    .iter()
                    .map(|backend| Action::set_backend_merge(process, guest.socket.clone(), backend.clone(), true))
                    .collect(),
                (EnrollMethod::InProcess, true) => vec![Action::MergeAny { process, enable: true }],
                (_, false) if ranges.is_empty() => continue,
                (_, false) => vec![Action::Advise { process, advice: MergeAdvice::Mergeable, ranges }],
            };
            for action in actions {
                if self.early_end().is_some() {
                    break;
                }
                let is_busy = self.act(process, &target.process.comm, &action, ChangeLifetime::PermanentOnCommit)?;
                // Each backend of a guest that hangs would take the whole time limit of its control socket.
                if is_busy {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Apply an action to a process and record failures. Returns whether the process was busy.
    fn act(
        &mut self,
        process: ProcessId,
        comm: &str,
        action: &Action,
        lifetime: ChangeLifetime,
    ) -> Result<bool, session::Error> {
        let merge_monitor::ApplyResult { missed, is_busy } =
            merge_monitor::apply_to_process(self.session, process, comm, action, lifetime, self.stop)?;
        self.any_enrolled |=
            lifetime == ChangeLifetime::PermanentOnCommit && missed.iter().all(|missed| missed.range.is_some());
        for missed in missed {
            merge_monitor::push_failed_change(&mut self.failed_changes, missed);
        }
        Ok(is_busy)
    }

    /// The time since the start of the command.
    fn time_since_start(&self) -> Duration {
        elapsed_since(self.session.host(), self.started_at)
    }

    /// How the merge ends now, if it was stopped or reached its deadline.
    fn early_end(&self) -> Option<MergeEnd> {
        let deadline_reached = self.options.deadline.is_some_and(|deadline| self.time_since_start() >= deadline);
        let stopped = self.stop.load(Ordering::Relaxed).then_some(MergeEnd::Stopped);
        stopped.or(deadline_reached.then_some(MergeEnd::Deadline))
    }

    /// Unenroll ranges that do not stay merged. Returns how long the check took.
    fn check_and_unenroll(&mut self, scope: CheckScope, phase: UnenrollPhase) -> Result<Duration, session::Error> {
        let began = self.session.host().now();
        self.monitor.check_pages(scope);
        let duration = elapsed_since(self.session.host(), began);
        let unenrolled = self.monitor.unenroll_unprofitable(self.session, phase)?;
        if !unenrolled.is_empty() {
            self.unstable_found_at = self.session.host().now();
        }
        self.unenrolled_pages += unenrolled.values().copied().sum::<Pages>();
        self.unenrolled_processes.extend(unenrolled.into_keys());
        Ok(duration)
    }

    /// Run ksmd at the current pace.
    fn run_ksmd(&mut self) -> Result<(), session::Error> {
        ksmd::run_at_pace(self.session, self.pace)
    }

    /// Stop ksmd and keep merged pages.
    fn pause_ksmd(&mut self) -> Result<(), session::Error> {
        ksmd::pause(self.session)?;
        if std::mem::take(&mut self.smart_scan_disabled) { ksmd::set_smart_scan(self.session, true) } else { Ok(()) }
    }

    fn ksmd_cpu(&self) -> Reading<Duration> {
        self.ksmd.as_ref().map_err(Absent::clone)?.cpu_time()
    }

    /// The CPU time that ksmd used since the start.
    fn ksmd_cpu_used(&self) -> Reading<Duration> {
        Ok(self.ksmd_cpu()?.saturating_sub(self.ksmd_cpu_before.clone()?))
    }
}

#[cfg(test)]
mod tests;
