//! Executes a plan: enroll, let ksmd work within its CPU limit, unenroll ranges that do not stay merged, verify.
//!
//! 1. Unprofitable ranges that programs enrolled themselves are unenrolled temporarily, also in processes without other
//!    targets, so that ksmd does not scan them.
//! 2. The ranges of the plan are enrolled, and ksmd runs as fast as its limit allows until no more pages merge. On
//!    kernels before 6.11, third and further copies are enrolled once the first two of each have merged. If that falls
//!    short and ksmd has skipped pages, it continues without skipping ([`SettleDetector::may_be_skipped`]). If all
//!    enrolled processes have ended, the merge does not wait ([`StallDetector`]).
//! 3. Meanwhile the merged pages of running targets are watched, and ranges that do not stay merged for long enough are
//!    unenrolled: see [`merge_monitor`].
//! 4. ksmd is stopped, page tables are read, and its settings are restored. Merged pages stay merged: their ranges stay
//!    enrolled, because unenrolling would unmerge them. If the merge is cut short, ranges without merged pages are
//!    unenrolled, unless ksmd is to continue with them.
//!
//! KSM has one tree and one ksmd: ksmd also scans memory that other programs enrolled. The timeline therefore uses the
//! targets' own counters, and the verdict uses their page tables.

use crate::MergeProbes;
use crate::decide::outcome::{
    EnrollChange, FailedChange, FrameFates, MergeEnd, MergeOutcome, MergedPagesWatch, PageFate, RegionCounts, Resident,
    TimelinePoint,
};
use crate::decide::pace::{KsmdPace, SettleDetector};
use crate::decide::plan::{EnrollMethod, MergePlan, PlanTarget, TemporaryUnenroll};
use crate::decide::policy::GUIDED_SLEEP_MILLISECS;
use crate::ksmd::{self, KsmdThread, MergedPageCounter, StallDetector, read_full_scans, read_pages_scanned};
use crate::merge_monitor::{self, MergeMonitor, UnenrolledRanges};
use crate::recheck::{CheckScope, UnenrollPhase};
use crate::{split_zeros, verify};
use pagefold_base::ksm::DEFAULT_PAGES_TO_SCAN;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, ProcessId, Reading};
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_host::knob::Knob;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{ChangeLifetime, Session};
use pagefold_host::{elapsed_since, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often the counters are read when settling is near and ksmd has no limit: until it is noticed, ksmd scans in
/// vain. With a limit the interval is longer, as ksmd is slower.
const NEAR_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How often the counters are read before that.
const FAR_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The pause between reads, as a multiple of a read's duration: reading stays below a twentieth of one CPU.
const POLL_PAUSE_FACTOR: u32 = 20;

/// How often the pace is adapted and other writers are detected.
const PACE_UPDATE_INTERVAL: Duration = Duration::from_millis(50);

/// How often merged pages are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The pause between such checks, as a multiple of a check's duration.
const CHECK_PAUSE_FACTOR: u32 = 50;

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
    /// The same, adjusted to the end: after a stop ksmd does not continue, and after yielding no change stays.
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
    let PreparedMerge { plan, probes, started_at: started } = prepared;
    let host = session.host();
    let unknown = session::Error::HostStateUnreadable;
    let available = observe::memory(host).and_then(|memory| memory.available);
    let resident = verify::resident_anonymous(host, &plan);
    let huge: Bytes = plan.targets.iter().map(|target| target.huge_page_bytes).sum();
    // Without readable frame numbers the result could not be measured.
    pagefold_host::check_frame_access(host).map_err(unknown)?;
    let before = verify::measure_targets(host, &plan).map_err(unknown)?;
    let (regions, looked) = (verify::region_starts(host, &plan), read_pages_scanned(host));
    let mut work = MergeRun {
        plan: &plan,
        monitor,
        unenrolled_pages: Pages::ZERO,
        unenrolled_processes: BTreeSet::new(),
        volatile_found_at: started,
        any_enrolled: false,
        smart_scan_disabled: false,
        ksmd: KsmdThread::find(host),
        page_counter: MergedPageCounter::new(host, &plan),
        ksmd_cpu_before: Err(Absent::NotOnThisKernel),
        pace: KsmdPace::new(options.ksmd_cpu_share),
        session,
        options,
        started_at: started,
        progress,
        stop,
        timeline: Vec::new(),
        failed_changes: Vec::new(),
    };
    work.ksmd_cpu_before = work.ksmd_cpu();
    let census = elapsed_since(host, started);
    progress.expected.store(plan.predicted.merging.0, Ordering::Relaxed);

    let mut end = match work.merge() {
        Ok(end) => end,
        Err(error @ session::Error::SettingOverwritten { .. }) => MergeEnd::SettingsOverwritten(error.to_string()),
        Err(error) => return Err(error),
    };
    progress.enter(MergeStage::Verifying);
    if !matches!(end, MergeEnd::SettingsOverwritten(_)) {
        match work.pause_ksmd() {
            Err(error @ session::Error::SettingOverwritten { .. }) => {
                end = MergeEnd::SettingsOverwritten(error.to_string())
            }
            rested => rested?,
        }
    }
    let after = verify::measure_targets(host, &plan).map_err(unknown)?;
    let nets = verify::net_savings(host, &plan, &before, &after);
    let zeros_by_splitting = verify::split_zero_pages(&plan, host.page_size(), &before, &after);
    // Earlier savings of ended processes are no loss.
    let lives = |position: &usize| after[*position].is_some();
    let ended: Vec<usize> = (0..plan.targets.len()).filter(|position| !lives(position)).collect();
    let before = verify::sum_targets((0..before.len()).filter(lives).filter_map(|position| before[position].as_ref()));
    let after = verify::sum_targets(after.iter().flatten());
    let bystanders = verify::count_unplanned_enrolled(host, &plan);
    let ksmd = work.ksmd_cpu_used();
    let looks = looked.and_then(|before| Ok(read_pages_scanned(host)?.saturating_sub(before)));
    let now = verify::region_starts(host, &plan);
    let MergeRun {
        timeline,
        failed_changes: mut missed,
        unenrolled_pages: withdrawn,
        unenrolled_processes: from,
        monitor: trial,
        ..
    } = work;
    for refused in trial.failed_changes() {
        merge_monitor::push_failed_change(&mut missed, refused.clone());
    }
    let (watched, withdrawn) = (
        MergedPagesWatch { lifetime_stats: trial.lifetime_stats(), unenrolled_pages: withdrawn, unenrolled_from: from },
        unenrolled_by_target(&plan, trial),
    );
    let parts = |process| {
        let lost = trial.unenrolled().get(&process).map(UnenrolledRanges::all_ranges).unwrap_or_default();
        [&lost[..], trial.unmerged(process)].concat()
    };
    let regions = RegionCounts::compare(&plan, &regions, &now, parts);
    let given_up = |process: ProcessId| -> Vec<(AddressRange, PageFate)> {
        let target = plan.targets.iter().filter(|target| target.process.id == process);
        let beside =
            target.flat_map(|target| target.ranges_outside_guest(plan.whole_processes)).map(|range| range.range);
        let missed = missed.iter().filter(|missed| missed.pid == process.pid && missed.change == EnrollChange::Enroll);
        let everything = AddressRange { start: 0, end: u64::MAX };
        let missed = missed.map(|missed| missed.range.unwrap_or(everything));
        let withdrawn = trial.unenrolled().get(&process).map(UnenrolledRanges::all_ranges).unwrap_or_default();
        let named = |fate| move |range| (range, fate);
        let given_up = beside.map(named(PageFate::OutsideGuestMemory)).chain(missed.map(named(PageFate::NotEnrolled)));
        let given_up = given_up.chain(withdrawn.into_iter().map(named(PageFate::Unenrolled)));
        given_up.chain(trial.unmerged(process).iter().copied().map(named(PageFate::UnenrolledUnmerged))).collect()
    };
    let fates =
        probes.map_or(Ok(FrameFates::default()), |probes| probes.determine_fates(host, given_up)).map_err(unknown)?;
    session.commit()?;
    // Without the record later commands miss this part, and report that.
    let unnoted = split_zeros::note(host, session.directory(), &zeros_by_splitting).err();
    let unnoted = unnoted
        .map(|error| format!("cannot record the freed zero pages in {}: {error}", split_zeros::SPLIT_ZEROS_FILE));
    if options.after_merge.for_end(&end) == AfterMerge::KeepKsmdRunning {
        let slowly = session.write_settings(&Settings::from([
            (Setting::PagesToScan, DEFAULT_PAGES_TO_SCAN.to_string()),
            (Setting::SleepMillisecs, GUIDED_SLEEP_MILLISECS.to_string()),
            (Setting::Run, "1".to_owned()),
        ]));
        match slowly {
            Err(error @ session::Error::SettingOverwritten { .. }) => {
                end = MergeEnd::SettingsOverwritten(error.to_string())
            }
            set => set?,
        }
    }
    let remains = match options.after_merge.for_end(&end) {
        AfterMerge::UndoChanges => session.undo_all()?,
        AfterMerge::KeepKsmdRunning => session.keep_as_policy("guided")?,
        AfterMerge::KeepKsmdPaused => Vec::new(),
    };
    let outcome = MergeOutcome {
        end,
        before,
        after,
        nets,
        zeros_by_splitting,
        timeline,
        census_time: census,
        ksmd_time: ksmd,
        pages_scanned: looks,
        regions,
        fates,
        own_cpu_time: host.own_cpu_time(),
        available: (available, observe::memory(host).and_then(|memory| memory.available)),
        resident: resident.and_then(|before| {
            let after = verify::resident_anonymous(host, &plan)?;
            Ok(Resident { targets: (before.0, after.0), own: (before.1, after.1) })
        }),
        huge_page_bytes: (huge, if huge.0 > 0 { verify::targets_huge_bytes(host, &plan) } else { Ok(huge) }),
        stops: session.stop_durations().to_vec(),
        merged_watch: watched,
        unenrolled: withdrawn,
        ended_targets: ended,
        bystanders,
        failed_changes: missed,
        not_restored: remains.into_iter().map(|remains| remains.to_string()).chain(unnoted).collect(),
        plan,
    };
    Ok(outcome)
}

/// The ranges that a monitor unenrolled from the targets of a plan, by the targets' positions.
fn unenrolled_by_target(plan: &MergePlan, trial: &MergeMonitor<'_>) -> BTreeMap<usize, Vec<AddressRange>> {
    let of = |target: &PlanTarget| Some(trial.unenrolled().get(&target.process.id)?.all_ranges());
    plan.targets.iter().enumerate().filter_map(|(position, target)| Some((position, of(target)?))).collect()
}

struct MergeRun<'w, 'h> {
    plan: &'w MergePlan,
    monitor: &'w mut MergeMonitor<'h>,
    unenrolled_pages: Pages,
    unenrolled_processes: BTreeSet<ProcessId>,
    volatile_found_at: Instant,
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

impl MergeRun<'_, '_> {
    fn merge(&mut self) -> Result<MergeEnd, session::Error> {
        self.progress.enter(MergeStage::Enrolling);
        // Pages with COW breaks while ksmd was idle would be merged again.
        self.check_and_unenroll(UnenrollPhase::DuringMerge)?;
        self.failed_changes.extend(self.monitor.repeat_temporary_unenroll(self.session)?);
        self.unenroll_unprofitable()?;
        self.enroll_targets(false)?;
        let mut early = self.plan.merging_early();
        let refused = |missed: &FailedChange| missed.change == EnrollChange::Enroll && missed.range.is_none();
        if early.is_some() && self.failed_changes.iter().any(refused) {
            // With a refused process the first copies may never merge, so the late ranges are enrolled at once.
            self.enroll_targets(true)?;
            early = None;
        }
        // Without enrolled memory ksmd sleeps, and the merge would never settle.
        let before = self.plan.targets.iter().flat_map(|target| &target.ranges).any(|range| range.enrolled);
        if !self.any_enrolled && (self.plan.whole_processes || !before) {
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
        let ran = Knob::from(Setting::Run).read(host).is_ok_and(|run| run == "1");
        self.pause_ksmd()?;
        for TemporaryUnenroll { process, comm, ranges, .. } in &self.plan.temporary_unenrolls {
            let merged =
                |range: &AddressRange| verify::count_range_pages(host, *process, *range).map(|found| found.merged);
            let untouched = |range: &AddressRange| !ran || merged(range) == Ok(Pages::ZERO);
            let ranges: Vec<AddressRange> = ranges.iter().copied().filter(untouched).collect();
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
                    let missed =
                        FailedChange { change: EnrollChange::Enroll, pid, comm, range: None, why: why.clone() };
                    merge_monitor::push_failed_change(&mut self.failed_changes, missed);
                    continue;
                }
                // It may be enrolled already.
                (EnrollMethod::GuestControl(guest), true) if guest.backends.is_empty() => {
                    self.any_enrolled = true;
                    continue;
                }
                (EnrollMethod::GuestControl(guest), true) => guest
                    .backends
                    .iter()
                    .map(|backend| Action::GuestMerge {
                        process,
                        socket: guest.socket.clone(),
                        backend: backend.clone(),
                        enable: true,
                    })
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
        stays: ChangeLifetime,
    ) -> Result<bool, session::Error> {
        let merge_monitor::Acted { missed, is_busy } =
            merge_monitor::apply_to_process(self.session, process, comm, action, stays, self.stop)?;
        self.any_enrolled |=
            stays == ChangeLifetime::PermanentOnCommit && missed.iter().all(|missed| missed.range.is_some());
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
        let late = self.options.deadline.is_some_and(|deadline| self.time_since_start() >= deadline);
        let stopped = self.stop.load(Ordering::Relaxed).then_some(MergeEnd::Stopped);
        stopped.or(late.then_some(MergeEnd::Deadline))
    }

    /// Let ksmd work until no more pages merge: if some ranges are late, first until the `early` pages are merged, then
    /// until all expected pages are.
    fn wait_until_settled(&mut self, early: Option<Pages>, expected: Pages) -> Result<MergeEnd, session::Error> {
        let unknown = session::Error::HostStateUnreadable;
        let host = self.session.host();
        self.run_ksmd()?;
        // Late pages merge at the first visit if the first two copies of each are in the stable tree by then.
        let early = early.map(|pages| Pages(pages.0 - pages.0 / 32));
        let mut late = early.is_some();
        let mut settle = SettleDetector::new(read_full_scans(host).map_err(unknown)?, Some(early.unwrap_or(expected)));
        let mut adapted = (host.now(), self.ksmd_cpu());
        let (began, mut looked) = (host.now(), host.now());
        let mut settled: Option<Instant> = None;
        let (mut pause, mut again) = (NEAR_POLL_INTERVAL, CHECK_INTERVAL);
        let (skipped, mut walk) = (ksmd::read_pages_skipped(host), StallDetector::new(host));
        loop {
            host.sleep(pause);
            let began_to_look = host.now();
            let scans = read_full_scans(host).map_err(unknown)?;
            let merged = self.page_counter.count_new();
            let ksmd = self.ksmd_cpu_used().unwrap_or_default();
            self.timeline.push(TimelinePoint { at: self.time_since_start(), merged, ksmd_time: ksmd });
            self.progress.merged.store(merged.0, Ordering::Relaxed);
            let looking = elapsed_since(host, began_to_look);
            if settled.is_none() && (settle.update(scans, merged) || walk.has_nothing_to_scan(host, &self.page_counter))
            {
                if late {
                    late = false;
                    // A new address space is enrolled behind ksmd's cursor, and waits for the next scan (mm/ksm.c,
                    // `__ksm_enter`). While ksmd is stopped, all of them wait for the same scan.
                    self.pause_ksmd()?;
                    self.enroll_targets(true)?;
                    self.run_ksmd()?;
                    adapted = (host.now(), self.ksmd_cpu());
                    settle = SettleDetector::new(read_full_scans(host).map_err(unknown)?, Some(expected));
                    continue;
                }
                let skips =
                    !self.smart_scan_disabled && Knob::from(Setting::SmartScan).read(host).is_ok_and(|on| on == "1");
                let passed_over = skipped.as_ref().is_ok_and(|before| {
                    let now = ksmd::read_pages_skipped(host).unwrap_or(*before);
                    settle.may_be_skipped(merged, now.saturating_sub(*before))
                });
                if skips && passed_over {
                    self.smart_scan_disabled = true;
                    ksmd::set_smart_scan(self.session, false)?;
                    settle = SettleDetector::new(scans, Some(expected));
                    continue;
                }
                // ksmd would merge pages with COW breaks again and hide the breaks, so it stays stopped while pages are
                // watched. From here on each check sees every break, in this round or the next.
                self.pause_ksmd()?;
                self.monitor.check_pages(CheckScope::All);
                looked = host.now();
                settled = Some(looked);
            }
            let near = settle.expected().is_none_or(|expected| merged.0 >= expected.0 / 8 * 7);
            // Many targets take longer to count.
            let wanted = if near { NEAR_POLL_INTERVAL } else { FAR_POLL_INTERVAL }
                .div_f64(self.options.ksmd_cpu_share.clamp(0.05, 1.0))
                .min(PACE_UPDATE_INTERVAL);
            pause = wanted.max(looking * POLL_PAUSE_FACTOR);
            // Pages that merged last are watched, too. While checks still find unstable ranges, more may follow.
            let rested = settled
                .is_some_and(|rested| elapsed_since(host, rested) >= self.options.watch_time.min(3 * CHECK_INTERVAL));
            let watched = elapsed_since(host, began) >= self.options.watch_time
                && elapsed_since(host, self.volatile_found_at) >= 3 * CHECK_INTERVAL;
            if rested && watched || settled.is_some() && !self.monitor.check_any_ran() {
                return self.finish(MergeEnd::Settled);
            }
            if let Some(end) = self.early_end() {
                return self.finish(end);
            }
            if elapsed_since(host, looked) >= again {
                let began = host.now();
                self.check_and_unenroll(UnenrollPhase::DuringMerge)?;
                looked = host.now();
                again = CHECK_INTERVAL.max((looked - began) * CHECK_PAUSE_FACTOR);
            }
            let elapsed = elapsed_since(host, adapted.0);
            if elapsed >= PACE_UPDATE_INTERVAL {
                self.session.check_not_overwritten()?;
                let cpu = self.ksmd_cpu();
                if let (None, Ok(then), Ok(now)) = (settled, &adapted.1, &cpu) {
                    self.pace.adapt(now.saturating_sub(*then), elapsed);
                    self.run_ksmd()?;
                }
                adapted = (host.now(), cpu);
            }
        }
    }

    /// Unenroll ranges without merged pages; after an interrupted round only if ksmd is not to continue with them.
    fn finish(&mut self, end: MergeEnd) -> Result<MergeEnd, session::Error> {
        if end == MergeEnd::Settled {
            self.check_and_unenroll(UnenrollPhase::AfterSettled)?;
        } else if self.options.after_merge.for_end(&end) == AfterMerge::UndoChanges && !self.plan.whole_processes {
            self.pause_ksmd()?;
            let page_size = self.session.host().page_size();
            // The plan may not be watched yet.
            self.monitor.add_plan(self.plan);
            self.monitor.check_pages(CheckScope::All);
            for (process, pages) in
                self.monitor.unenroll_unprofitable(self.session, UnenrollPhase::AfterInterruption)?
            {
                // Ranges that had only not merged yet are no loss.
                let idle = self.monitor.unmerged(process).iter().map(|range| page_size.pages_in(range.bytes())).sum();
                let lost = pages.saturating_sub(idle);
                if lost > Pages::ZERO {
                    self.unenrolled_pages += lost;
                    self.unenrolled_processes.insert(process);
                }
            }
        }
        Ok(end)
    }

    /// Unenroll ranges that do not stay merged.
    fn check_and_unenroll(&mut self, moment: UnenrollPhase) -> Result<(), session::Error> {
        self.monitor.check_pages(if moment == UnenrollPhase::DuringMerge {
            CheckScope::RanSinceCheck
        } else {
            CheckScope::All
        });
        let gone = self.monitor.unenroll_unprofitable(self.session, moment)?;
        if !gone.is_empty() {
            self.volatile_found_at = self.session.host().now();
        }
        self.unenrolled_pages += gone.values().copied().sum::<Pages>();
        self.unenrolled_processes.extend(gone.into_keys());
        Ok(())
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
