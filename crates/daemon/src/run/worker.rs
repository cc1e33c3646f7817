//! Executes the daemon's effects one after the other, on a thread of its own.
//!
//! The worker owns everything that changes the host: the session while it is held, the watched and unenrolled ranges,
//! the stable ages of contents, and the plan of the last census. It answers each order with one event. The cost of a
//! task is the CPU time that the process and ksmd used meanwhile.

use super::adoption::{describe_dropped, read_recorded_processes};
use super::part_counts::PartCounts;
use super::restart::{SavedWatch, WATCH_FILE};
use super::saved_file::SavedFile;
use super::upkeep_pace::UpkeepPace;
use super::{DaemonSettings, Message, WorkResult};
use crate::decide::{
    Adoption, CensusSummary, Effect, Event, MergeCandidate, MergeSummary, MergedCheckSummary, RemergeBackoff,
    SharingScope, UnenrollScope, UnenrollSummary, decide_adoption,
};
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::process::Process;
use pagefold_base::{Absent, AddressRange, Bytes, NetBytes, Pages, Pid, ProcessId};
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_census::{ProcessSelection, ScanPart};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::Session;
use pagefold_host::{Host, elapsed_since, observe, receive_timeout};
use pagefold_merge::StableAges;
use pagefold_merge::decide::outcome::{EnrollChange, MergeEnd, MergeOutcome};
use pagefold_merge::decide::plan::{MergePlan, PlanTarget};
use pagefold_merge::execute as merge;
use pagefold_merge::execute::{AfterMerge, PreparedMerge, execute_plan};
use pagefold_merge::ksmd;
use pagefold_merge::merge_monitor::MergeMonitor;
use pagefold_merge::prepare::{PlanRequest, PreparedPlan, prepare_plan};
use pagefold_merge::recheck::{CheckScope, UnenrollPhase};
use pagefold_merge::unmerge;
use pagefold_sys::allocator::trim_free_memory;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Interval between two checks whether another program wrote KSM's settings.
const OVERWRITE_CHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Rows of the sharing matrix.
const MAX_MATRIX_ROWS: usize = 20;

/// Scan cost of a region, in pages read: 10 us against 1.3 us, measured on a program with 60,000 pages in one region
/// and in 60,000 regions, on a 2-core virtual machine.
const REGION_SCAN_COST_PAGES: u64 = 8;

/// Reused fingerprints that cost as much as one page read, for listing and lookup; measured by `make bench ARGS=again`.
const REMEMBERED_PAGES_PER_READ_PAGE: u64 = 5;

/// A task with the settings in force.
pub(super) struct WorkOrder {
    pub effect: Effect,
    pub settings: Arc<DaemonSettings>,
    /// Set to end the task soon.
    pub cancel: Arc<AtomicBool>,
}

pub(super) struct Worker<'h> {
    host: &'h dyn Host,
    directory: PathBuf,
    /// Set to end the running task soon.
    cancel: Arc<AtomicBool>,
    messages: Sender<Message>,
    session: Option<Session<'h>>,
    settings_overwritten: bool,
    /// Whether processes that exited before the host was acquired may still need a sweep by ksmd.
    needs_sweep: bool,
    merge_monitor: MergeMonitor<'h>,
    stable_ages: StableAges,
    remerge_backoff: RemergeBackoff,
    /// Ranges of each process that the daemon has tried to enroll, accepted or not.
    enrolled_ranges: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Passes observations of merged pages on to the next daemon, once the host was acquired and where that is possible.
    watch_file: Option<SavedFile>,
    /// Whether the observations of the previous daemon were taken over, if there are any.
    watch_restored: bool,
    watch_save_pace: UpkeepPace,
    /// Whether merged pages were observed since observations were saved.
    has_unsaved_watch: bool,
    forget_pace: UpkeepPace,
    started_at: Instant,
    prepared: Option<PreparedPlan>,
    /// Page counts of what was scanned of each process.
    part_counts: BTreeMap<ProcessId, PartCounts>,
}

/// Why a task failed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Session(#[from] session::Error),
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    #[error("no session on the host is open")]
    HostNotAcquired,
}

impl<'h> Worker<'h> {
    pub fn new(
        host: &'h dyn Host,
        directory: PathBuf,
        messages: Sender<Message>,
    ) -> Result<Self, pagefold_census::Error> {
        let stable_ages = StableAges::new(pagefold_census::page_hasher(host)?, host.now());
        let merge_monitor = MergeMonitor::new(host);
        Ok(Self {
            host,
            directory,
            cancel: Arc::default(),
            messages,
            session: None,
            settings_overwritten: false,
            needs_sweep: true,
            merge_monitor,
            stable_ages,
            remerge_backoff: RemergeBackoff::default(),
            enrolled_ranges: BTreeMap::new(),
            watch_file: None,
            watch_restored: false,
            watch_save_pace: UpkeepPace::default(),
            has_unsaved_watch: false,
            forget_pace: UpkeepPace::default(),
            started_at: host.now(),
            prepared: None,
            part_counts: BTreeMap::new(),
        })
    }

    /// Execute orders until there are no more, then restore the settings.
    pub fn run(mut self, orders: &Receiver<WorkOrder>) {
        loop {
            match receive_timeout(self.host, orders, OVERWRITE_CHECK_INTERVAL) {
                Ok(order) => {
                    let uses_much_memory = matches!(order.effect, Effect::Census(_) | Effect::Merge { .. });
                    let event = self.execute(order);
                    self.send(Message::Event(event));
                    if uses_much_memory {
                        trim_free_memory();
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.check_overwritten();
                    self.save_watch_if_due();
                }
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Time since the worker started.
    fn time_since_start(&self) -> Duration {
        elapsed_since(self.host, self.started_at)
    }

    fn send(&self, message: Message) {
        // During shutdown the receiver may be gone.
        let _ = self.messages.send(message);
    }

    /// Check whether another program has written a setting. Reported once.
    fn check_overwritten(&mut self) {
        let Some(session) = self.session.as_ref().filter(|_| !self.settings_overwritten) else { return };
        if let Err(error @ session::Error::SettingOverwritten { .. }) = session.check_not_overwritten() {
            self.settings_overwritten = true;
            self.send(Message::Event(Event::SettingsOverwritten(error.to_string())));
        }
    }

    fn execute(&mut self, WorkOrder { effect, settings, cancel }: WorkOrder) -> Event {
        self.cancel = cancel;
        self.merge_monitor.set_max_pressure(settings.rules.pressure_percent);
        self.merge_monitor.set_cpu_rate(settings.rules.cpu_rate);
        let changes_watch = !matches!(effect, Effect::Census(_));
        let result = match effect {
            Effect::AcquireHost => Ok(Event::HostAcquired(self.acquire_host().map_err(|error| error.to_string()))),
            Effect::Census(parts) => self.take_census(&parts, &settings).map(Event::CensusDone),
            Effect::Merge { processes, cpu_share } => {
                self.merge(&processes, cpu_share, &settings).map(Event::MergeDone)
            }
            Effect::CheckMerged { unenroll } => {
                self.check_merged_pages(unenroll, self.time_since_start()).map(Event::MergedCheckDone)
            }
            Effect::Sweep => self.sweep().map(|complete| Event::SweepDone { complete }),
            Effect::Unenroll(processes) => {
                self.unenroll(&processes, settings.rules.pressure_percent).map(Event::UnenrollDone)
            }
            Effect::RestoreSettings => self.restore_settings().map(|complete| Event::SettingsRestored { complete }),
            Effect::Halt | Effect::Report(_) | Effect::End { .. } => return Event::TaskFailed("not a task".to_owned()),
        };
        if let Some(Err(error)) = self.session.as_mut().map(Session::store_recorded_enrollments) {
            self.send(Message::WorkResult(WorkResult::UndoFailed(session::chain(&error))));
        }
        self.has_unsaved_watch |= changes_watch;
        self.save_watch_if_due();
        result.unwrap_or_else(|error| match error {
            Error::Session(error @ session::Error::SettingOverwritten { .. }) => {
                self.settings_overwritten = true;
                self.send(Message::Event(Event::SettingsOverwritten(error.to_string())));
                Event::TaskFailed(error.to_string())
            }
            error => Event::TaskFailed(session::chain(&error)),
        })
    }

    /// Acquire the host, undo what a killed run left, stop ksmd with all merged pages kept, and take over what the
    /// previous daemon enrolled.
    fn acquire_host(&mut self) -> Result<(), session::Error> {
        let (mut session, undone, failed_undos) = Session::begin(self.host, &self.directory, ResourceClass::Ksm)?;
        ksmd::check_writable(&session)?;
        pagefold_host::check_frame_access(self.host).map_err(session::Error::HostStateUnreadable)?;
        for description in undone.iter().map(|undo| session::UndoDescription(undo).to_string()) {
            self.send(Message::WorkResult(WorkResult::Undone(description)));
        }
        self.report_failed_undos(failed_undos);
        ksmd::pause(&mut session)?;
        self.restore_watch();
        self.adopt_enrollments(&mut session)?;
        (self.session, self.settings_overwritten, self.needs_sweep) = (Some(session), false, true);
        Ok(())
    }

    /// Take over what the previous daemon has observed of merged pages, once.
    fn restore_watch(&mut self) {
        if !std::mem::replace(&mut self.watch_restored, true)
            && let Err(why) = self.load_watch()
        {
            self.send(Message::WorkResult(WorkResult::StateNotPassedOn(why.to_string())));
        }
    }

    fn load_watch(&mut self) -> io::Result<()> {
        let boot_id = session::read_boot_id(self.host).map_err(io::Error::other)?;
        let file = self.watch_file.insert(SavedFile::new(&self.directory, WATCH_FILE, boot_id)?);
        if let Some((saved, elapsed)) = file.load::<SavedWatch>(self.host.unix_time())? {
            let (monitor, backoff) = saved.into_records(elapsed, |process| is_alive(self.host, process));
            self.merge_monitor.restore(monitor);
            self.remerge_backoff.restore(backoff, self.time_since_start());
        }
        Ok(())
    }

    /// Save what was observed of merged pages since the last time, if that is due.
    fn save_watch_if_due(&mut self) {
        if self.session.is_some() && self.has_unsaved_watch && self.watch_save_pace.is_due(self.time_since_start()) {
            self.save_watch();
        }
    }

    /// Save what was observed of merged pages for the next daemon.
    fn save_watch(&mut self) {
        self.has_unsaved_watch = false;
        let (cpu_before, now) = (self.host.thread_cpu_time(), self.time_since_start());
        let saved = SavedWatch::new(&self.merge_monitor.record(), self.remerge_backoff.records(now));
        let saved = self.watch_file.as_ref().map(|file| file.save(&saved, self.host.unix_time()));
        if let Some(Err(why)) = saved {
            self.send(Message::WorkResult(WorkResult::StateNotPassedOn(why.to_string())));
            self.watch_file = None;
        }
        self.watch_save_pace.record(now, self.host.thread_cpu_time().saturating_sub(cpu_before));
    }

    /// Watch the recorded ranges that are still enrolled, and drop the others from the record. Ranges that this daemon
    /// enrolled itself are in the record, too.
    fn adopt_enrollments(&mut self, session: &mut Session<'h>) -> Result<(), session::Error> {
        let adoption = decide_adoption(read_recorded_processes(self.host, session.recorded_enrollments()));
        session.retain_recorded_enrollments(&adoption.kept_ranges())?;
        if adoption == Adoption::default() {
            return Ok(());
        }
        let dropped = describe_dropped(&adoption.stale);
        let (mut adopted, mut enrolled_ranges) = (Vec::new(), BTreeMap::new());
        for process in adoption.adopted {
            let known = self.enrolled_ranges.get(&process.process).map(Vec::as_slice).unwrap_or_default();
            let new_ranges: Vec<AddressRange> = process.ranges.iter().flat_map(|range| range.subtract(known)).collect();
            let facts = pagefold_host::hold(self.host, process.process)
                .and_then(|handle| observe::process(self.host, &*handle));
            let (false, Ok(facts)) = (new_ranges.is_empty(), facts) else { continue };
            self.merge_monitor.add_enrolled(&facts, &new_ranges);
            let all_ranges = unmerge::joined([known, &new_ranges].concat());
            enrolled_ranges.insert(process.process, all_ranges.len() as u64);
            self.enrolled_ranges.insert(process.process, all_ranges);
            adopted.push((process.process, process.scopes));
        }
        self.send(Message::WorkResult(WorkResult::Adoption { enrolled_ranges, dropped }));
        if !adopted.is_empty() {
            self.merge_monitor.check_pages(CheckScope::All);
            self.send(Message::Event(Event::EnrollmentsAdopted(adopted)));
        }
        Ok(())
    }

    /// Restore KSM's settings. Returns whether all are restored.
    fn restore_settings(&mut self) -> Result<bool, Error> {
        self.save_watch();
        let Some(mut session) = self.session.take() else { return Ok(true) };
        let failed_undos = session.undo_all()?;
        let complete = failed_undos.is_empty();
        self.report_failed_undos(failed_undos);
        Ok(complete)
    }

    fn report_failed_undos(&self, failed_undos: Vec<session::FailedUndo>) {
        for failed in failed_undos {
            self.send(Message::WorkResult(WorkResult::UndoFailed(failed.to_string())));
        }
    }

    fn take_census(
        &mut self,
        parts: &BTreeMap<ProcessId, Vec<ScanPart>>,
        settings: &DaemonSettings,
    ) -> Result<CensusSummary, Error> {
        self.prepared = None;
        let cpu_before = self.host.own_cpu_time();
        let (max_added_metadata, excluded_ranges) =
            (self.remaining_metadata(settings)?, self.excluded_ranges(self.time_since_start()));
        let request = PlanRequest { max_added_metadata, excluded_ranges, ..census_plan_request(parts, settings) };
        let excluded = exclusion_reason(parts, settings);
        let progress = pagefold_census::ScanProgress::default();
        self.forget_ended_processes();
        let ages = Some((&mut self.stable_ages, self.host.now()));
        let mut prepared = prepare_plan(self.host, &request, &excluded, ages, &progress, &self.cancel)?;
        let census = &prepared.census;
        // The cost of foreign processes is part of the cost of the processes that need them.
        let selected = || census.subjects.iter().filter(|subject| !subject.is_foreign);
        let read_pages: Pages = selected().map(|subject| pages_read(subject, &self.stable_ages)).sum();
        let is_representative = read_pages.0 * 2 >= selected().map(|subject| subject.counts.resident().0).sum();
        let summary = CensusSummary {
            cpu_time: self.host.own_cpu_time().saturating_sub(cpu_before),
            bytes_scanned: if is_representative { self.host.page_size().bytes_of(read_pages) } else { Bytes::ZERO },
            cost_in_pages: scan_costs_in_pages(census, &self.stable_ages),
            candidates: merge_candidates(&prepared.plan),
            not_yet_stable: unstable_processes(&prepared, settings),
            scanned_ranges: scanned_ranges(census),
            left_out: left_out(parts.keys(), census),
            sketches: std::mem::take(&mut prepared.sketches),
            partial: census.partial,
        };
        let mut page_counts = BTreeMap::new();
        for subject in census.subjects.iter().filter(|subject| !subject.is_foreign) {
            let parts = self.part_counts.entry(subject.process.id).or_default();
            // Of two parts of one process, the counts are known from their own scans.
            if let [range] = subject.scanned_ranges[..] {
                parts.record(range, subject);
            }
            page_counts.insert(subject.process.id, parts.sum());
        }
        let unscanned_processes = census.unscanned.len() as u64;
        let matrix = census.matrix.clone();
        self.send(Message::WorkResult(WorkResult::Census {
            page_counts,
            unscanned_processes,
            matrix,
            wall_seconds: census.wall_seconds,
            cpu_time: summary.cpu_time,
        }));
        prepared.census = Census::default();
        self.prepared = Some(prepared).filter(|_| !summary.partial);
        Ok(summary)
    }

    /// Drop what is known of processes that have ended, if that is due.
    fn forget_ended_processes(&mut self) {
        let (host, now, cpu_before) = (self.host, self.time_since_start(), self.host.thread_cpu_time());
        if !self.forget_pace.is_due(now) {
            return;
        }
        // Each process is looked up once.
        let known = RefCell::new(BTreeMap::new());
        let is_alive =
            |process: ProcessId| *known.borrow_mut().entry(process).or_insert_with(|| is_alive(host, process));
        self.stable_ages.retain_processes(is_alive);
        self.merge_monitor.retain_processes(is_alive);
        self.remerge_backoff.retain(is_alive);
        self.enrolled_ranges.retain(|process, _| is_alive(*process));
        self.part_counts.retain(|process, _| is_alive(*process));
        self.forget_pace.record(now, host.thread_cpu_time().saturating_sub(cpu_before));
    }

    /// Metadata that KSM may still allocate, if it is limited. Metadata of processes that exited before the host was
    /// acquired stays until ksmd visits them.
    fn remaining_metadata(&mut self, settings: &DaemonSettings) -> Result<Option<Bytes>, Error> {
        let Some(limit) = settings.max_metadata else { return Ok(None) };
        if self.session.is_some() && self.needs_sweep && read_ksm_metadata(self.host).0 * 2 > limit.0 {
            self.needs_sweep = false;
            self.sweep()?;
        }
        Ok(Some(limit.saturating_sub(read_ksm_metadata(self.host))))
    }

    fn merge(
        &mut self,
        processes: &[ProcessId],
        cpu_share: f64,
        settings: &DaemonSettings,
    ) -> Result<MergeSummary, Error> {
        let session = self.session.as_mut().ok_or(Error::HostNotAcquired)?;
        let Some(mut prepared) = self.prepared.take() else { return Ok(MergeSummary::default()) };
        prepared.retain_processes(|process| processes.contains(&process));
        let PreparedPlan { plan, probes, .. } = prepared;
        let page_size = self.host.page_size();
        let predicted = Bytes(plan.predicted.effect.net(page_size).0.max(0).unsigned_abs());
        let ranges_to_enroll =
            |target: &PlanTarget| [target.ranges_to_enroll(false), target.ranges_to_enroll(true)].concat();
        let new_ranges = plan.targets.iter().map(|target| (target.process.id, ranges_to_enroll(target)));
        let new_ranges: BTreeMap<_, _> = new_ranges.filter(|(_, ranges)| !ranges.is_empty()).collect();
        let enrolled: Vec<ProcessId> = new_ranges.keys().copied().collect();
        // Recorded in any case: later unenrolling covers all ranges that may have been enrolled.
        for (process, ranges) in new_ranges {
            let known = self.enrolled_ranges.entry(process).or_default();
            *known = unmerge::joined([std::mem::take(known), ranges].concat());
        }
        let range_count = |process: &ProcessId| Some((*process, self.enrolled_ranges.get(process)?.len() as u64));
        let enrolled_ranges = enrolled.iter().filter_map(range_count).collect();
        let pids: BTreeMap<_, _> =
            plan.targets.iter().map(|target| (target.process.id.pid, target.process.id)).collect();
        let options = merge::MergeOptions {
            ksmd_cpu_share: cpu_share,
            deadline: None,
            watch_time: settings.watch_time,
            after_merge: AfterMerge::KeepKsmdPaused,
        };
        let (cpu_before, started) = (self.host.own_cpu_time(), self.host.now());
        let prepared = PreparedMerge { plan, probes, started_at: started };
        let progress = merge::MergeProgress::default();
        let scope = |target: &PlanTarget| SharingScope::of_merge(&target.domain, settings.rules.across_domains);
        let labels = prepared.plan.targets.iter().map(|target| (target.process.id, scope(target).to_string()));
        session.record_enrollments(labels.collect());
        let outcome = execute_plan(session, prepared, &options, &mut self.merge_monitor, &progress, &self.cancel)?;
        if let MergeEnd::SettingsOverwritten(_) = outcome.end {
            self.settings_overwritten = true;
        }
        session.drop_ended_processes()?;
        self.record_cow_breaks(self.time_since_start());
        let cpu_time =
            self.host.own_cpu_time().saturating_sub(cpu_before) + outcome.ksmd_time.clone().unwrap_or_default();
        for failed in outcome.not_restored.clone() {
            self.send(Message::WorkResult(WorkResult::UndoFailed(failed)));
        }
        let net = outcome.net(page_size);
        let seconds = elapsed_since(self.host, started);
        self.send(Message::WorkResult(WorkResult::Merge {
            enrolled_ranges,
            predicted,
            measured_net: net,
            wall_time: seconds,
            cpu_time,
        }));
        Ok(MergeSummary {
            enrolled,
            predicted,
            net,
            nets: outcome.nets.clone(),
            cpu_time,
            unenrolled_bytes: page_size.bytes_of(outcome.merged_watch.unenrolled_pages),
            unenrolled_from: outcome.merged_watch.unenrolled_from.iter().copied().collect(),
            refused: refused_processes(&outcome, EnrollChange::Enroll, &pids),
            failed_unenrolls: [
                self.merge_monitor.failed_unenrolls(),
                refused_processes(&outcome, EnrollChange::Unenroll, &pids),
            ]
            .concat(),
            settings_overwritten: match outcome.end {
                MergeEnd::SettingsOverwritten(why) => Some(why),
                _ => None,
            },
        })
    }

    /// Ranges that no plan may contain because of COW breaks, without those that may be merged again now.
    fn excluded_ranges(&mut self, now: Duration) -> BTreeMap<ProcessId, Vec<AddressRange>> {
        for (process, range) in self.remerge_backoff.take_expired(now) {
            self.merge_monitor.allow_again(process, range);
        }
        self.merge_monitor
            .unenrolled()
            .iter()
            .map(|(&process, unenrolled)| (process, unenrolled.all_ranges()))
            .collect()
    }

    /// Count the ranges that were unenrolled because of COW breaks.
    fn record_cow_breaks(&mut self, now: Duration) {
        for (&process, unenrolled) in self.merge_monitor.unenrolled() {
            for range in unenrolled.all_ranges() {
                self.remerge_backoff.record_break(process, range, self.merge_monitor.break_count(process, range), now);
            }
        }
    }

    /// Check whether merged pages are still merged, and unenroll those with COW breaks.
    fn check_merged_pages(&mut self, unenroll: bool, now: Duration) -> Result<MergedCheckSummary, Error> {
        let cpu_before = self.host.own_cpu_time();
        let session = self.session.as_mut().ok_or(Error::HostNotAcquired)?;
        let mut summary = MergedCheckSummary::default();
        if self.merge_monitor.check_pages(CheckScope::FaultedSinceCheck) && unenroll {
            let unenrolled = self.merge_monitor.unenroll_unprofitable(session, UnenrollPhase::BetweenRounds)?;
            summary.unenrolled_bytes = self.host.page_size().bytes_of(unenrolled.values().copied().sum());
            summary.unenrolled_from = unenrolled.into_keys().collect();
            summary.failed_unenrolls = Some(self.merge_monitor.failed_unenrolls());
            self.record_cow_breaks(now);
        }
        summary.cpu_time = self.host.own_cpu_time().saturating_sub(cpu_before);
        Ok(summary)
    }

    /// Run ksmd until it has visited exited processes. COW breaks are recorded first, because ksmd would merge those
    /// pages again.
    fn sweep(&mut self) -> Result<bool, Error> {
        let session = self.session.as_mut().ok_or(Error::HostNotAcquired)?;
        self.merge_monitor.check_pages(CheckScope::FaultedSinceCheck);
        Ok(ksmd::sweep_ended_processes(session, &self.cancel)?)
    }

    /// Unenroll some processes, each in its scope, as far as memory allows. Nothing is unenrolled while tasks wait for
    /// memory for more than `pressure` percent of the time.
    fn unenroll(
        &mut self,
        processes: &BTreeMap<ProcessId, UnenrollScope>,
        pressure: f64,
    ) -> Result<UnenrollSummary, Error> {
        let cpu_before = self.host.own_cpu_time();
        let session = self.session.as_mut().ok_or(Error::HostNotAcquired)?;
        let is_running = |process: &ProcessId| is_alive(self.host, *process);
        let (running, mut unenrolled): (Vec<ProcessId>, Vec<ProcessId>) =
            processes.keys().copied().partition(is_running);
        let limits = unmerge::UnenrollLimits {
            staged: true,
            max_pressure_percent: Some(pressure),
            ..unmerge::UnenrollLimits::default()
        };
        let mut failures = Vec::new();
        // One process at a time: a lack of memory in one cgroup does not affect processes in others.
        for process in running {
            if self.cancel.load(Ordering::Relaxed) {
                failures.push((process, NO_TIME_REASON.to_owned()));
                continue;
            }
            let selection = ProcessSelection { pids: [process.pid].into(), ..ProcessSelection::default() };
            let daemon_ranges = (processes[&process] == UnenrollScope::DaemonEnrolled).then(|| {
                unmerge::UnenrollMethod::Ranges(self.enrolled_ranges.get(&process).cloned().unwrap_or_default())
            });
            let plan = unmerge::make_plan(self.host, &selection, &|_, _| daemon_ranges.clone())?;
            let outcome = unmerge::execute_plan(session, &plan, limits, &self.cancel)?;
            match failure_reason(&plan, outcome) {
                Some(why) => failures.push((process, why)),
                None => unenrolled.push(process),
            }
        }
        // Unenrolled pages are not COW breaks.
        for process in &unenrolled {
            self.merge_monitor.forget_process(*process);
            self.enrolled_ranges.remove(process);
        }
        Ok(UnenrollSummary {
            unenrolled,
            failed_unenrolls: failures,
            cpu_time: self.host.own_cpu_time().saturating_sub(cpu_before),
        })
    }
}

/// Reason for a process that was not unenrolled before the shutdown.
const NO_TIME_REASON: &str = "there was no time for it";

/// Why pages of the process in a plan are still merged, if any are.
fn failure_reason(plan: &unmerge::UnenrollPlan, outcome: unmerge::UnenrollOutcome) -> Option<String> {
    if let Some(unscanned) = plan.unscanned.iter().find(|unscanned| unscanned.why != Absent::Vanished) {
        return Some(unscanned.why.to_string());
    }
    let interrupted = outcome.interrupted;
    let mut target = outcome.targets.into_iter().next()?;
    // Ranges that the program has unmapped need no unenrolling.
    target.missed_ranges.retain(|(_, why)| !why.is_not_mapped());
    if target.is_complete() {
        return None;
    }
    let first_missed = target.missed_ranges.first().map(|(_, why)| why.to_string());
    let default_reason = match target.all_unenrolled {
        true => "it still has merged pages",
        false if interrupted => NO_TIME_REASON,
        false => "not enough memory to unmerge its pages",
    };
    Some(target.error.or(first_missed).unwrap_or_else(|| default_reason.to_owned()))
}

/// Scan cost of each process, in pages read. The cost of foreign processes is part of the cost of the processes that
/// need them.
pub(super) fn scan_costs_in_pages(census: &Census, ages: &StableAges) -> BTreeMap<ProcessId, u64> {
    let selected = census.subjects.iter().filter(|subject| !subject.is_foreign);
    let cost =
        |subject: &SubjectCensus| pages_read(subject, ages).0 + REGION_SCAN_COST_PAGES * subject.regions.len() as u64;
    selected.map(|subject| (subject.process.id, cost(subject))).collect()
}

/// Scan cost of a process without its regions, in pages read.
pub(super) fn pages_read(subject: &SubjectCensus, ages: &StableAges) -> Pages {
    let reused = ages.reused_pages(subject.process.id).0;
    Pages(subject.counts.resident().0.saturating_sub(reused) + reused / REMEMBERED_PAGES_PER_READ_PAGE)
}

/// Threads of a census: the CPUs of the rate, as far as there are some. A scan on more threads would use up the burst
/// faster, and wait longer afterwards.
fn census_threads(cpu_rate: f64, max_threads: usize) -> usize {
    // The cast rounds down and saturates.
    (cpu_rate as usize).min(max_threads).max(1)
}

/// The addresses that were scanned of each process.
pub(super) fn scanned_ranges(census: &Census) -> BTreeMap<ProcessId, Vec<AddressRange>> {
    let selected = census.subjects.iter().filter(|subject| !subject.is_foreign);
    selected.map(|subject| (subject.process.id, subject.scanned_ranges.clone())).collect()
}

/// The processes to scan that are no subject of a census, although they could be scanned.
pub(super) fn left_out<'p>(processes: impl Iterator<Item = &'p ProcessId>, census: &Census) -> BTreeSet<ProcessId> {
    let subjects = census.subjects.iter().map(|subject| subject.process.id.pid);
    let known: BTreeSet<Pid> = subjects.chain(census.unscanned.iter().map(|process| process.pid)).collect();
    processes.copied().filter(|process| !known.contains(&process.pid)).collect()
}

/// The plan request of a census of parts of some processes.
pub(super) fn census_plan_request(
    parts: &BTreeMap<ProcessId, Vec<ScanPart>>,
    settings: &DaemonSettings,
) -> PlanRequest {
    let pids = parts.keys().map(|process| process.pid).collect();
    let parts = parts.iter().map(|(process, parts)| (process.pid, parts.clone())).collect();
    PlanRequest {
        selection: ProcessSelection { pids, parts, ..ProcessSelection::default() },
        domains: settings.domains.clone(),
        across_domains: settings.rules.across_domains,
        pass_interval: settings.pass_interval,
        threads: census_threads(settings.rules.cpu_rate, settings.max_census_threads),
        whole_processes: false,
        min_profit: settings.min_profit,
        ksmd_cpu_share: 1.0,
        max_regions: settings.max_regions,
        max_added_metadata: settings.max_metadata,
        split_huge_pages: settings.split_huge_pages,
        excluded_ranges: BTreeMap::new(),
        max_matrix_rows: MAX_MATRIX_ROWS,
        explain_differences: false,
    }
}

/// Returns why a process must not be enrolled, or nothing: it is excluded, or it is none of the census's processes and
/// has the PID of one that ended.
pub(super) fn exclusion_reason(
    parts: &BTreeMap<ProcessId, Vec<ScanPart>>,
    settings: &DaemonSettings,
) -> impl Fn(&Process) -> Option<String> + use<> {
    let (selected, exclusions): (BTreeSet<ProcessId>, _) =
        (parts.keys().copied().collect(), settings.exclusions.clone());
    move |process| {
        exclusions.reason(process).or_else(|| (!selected.contains(&process.id)).then(|| "not selected".to_owned()))
    }
}

/// Processes with enough savings in ranges that are not stable yet.
pub(super) fn unstable_processes(prepared: &PreparedPlan, settings: &DaemonSettings) -> Vec<ProcessId> {
    let profitable = prepared.unstable_bytes.iter().filter(|(_, bytes)| **bytes >= settings.min_profit);
    profitable.map(|(process, _)| *process).collect()
}

/// Predicted result for each target of a plan.
pub(super) fn merge_candidates(plan: &MergePlan) -> Vec<MergeCandidate> {
    let pages = |target: &PlanTarget| -> Pages { target.ranges.iter().map(|range| range.pages).sum() };
    let total_pages = plan.targets.iter().map(pages).sum::<Pages>().0.max(1) as f64;
    let candidate = |target: &PlanTarget| {
        let freed: u64 = target.ranges.iter().map(|range| range.freed_bytes.0).sum();
        let metadata = pages(target).0 * RMAP_ITEM_BYTES;
        MergeCandidate {
            process: target.process.id,
            net_savings: NetBytes(freed.cast_signed() - metadata.cast_signed()),
            ksmd_time: plan.predicted.ksmd_time.mul_f64(pages(target).0 as f64 / total_pages),
        }
    };
    plan.targets.iter().map(candidate).collect()
}

/// Processes in which no range could be enrolled, with the first reason of each.
fn refused_processes(
    outcome: &MergeOutcome,
    change: EnrollChange,
    pids: &BTreeMap<pagefold_base::Pid, ProcessId>,
) -> Vec<(ProcessId, String)> {
    let mut refused = BTreeMap::new();
    for failed in outcome.failed_changes.iter().filter(|failed| failed.change == change && failed.range.is_none()) {
        if let Some(&process) = pids.get(&failed.pid) {
            refused.entry(process).or_insert_with(|| failed.why.clone());
        }
    }
    refused.into_iter().collect()
}

/// Bytes of KSM's metadata: the gross savings less KSM's profit. Zero if the kernel does not report them.
fn read_ksm_metadata(host: &dyn Host) -> Bytes {
    let Ok(ksm) = observe::ksm(host) else { return Bytes::ZERO };
    let zeros = ksm.ksm_zero_pages.unwrap_or(0).max(0).unsigned_abs();
    let saved = (ksm.pages_sharing.unwrap_or(0) + zeros) * host.page_size().bytes();
    Bytes(ksm.general_profit.map_or(0, |profit| (saved.cast_signed() - profit).max(0).unsigned_abs()))
}

pub(super) fn is_alive(host: &dyn Host, process: ProcessId) -> bool {
    pagefold_host::hold(host, process).is_ok()
}

#[cfg(test)]
mod tests;
