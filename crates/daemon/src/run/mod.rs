//! The daemon's main loop, with clock and threads.
//!
//! The main thread collects events, passes them to [`crate::decide::step`] and dispatches the resulting effects. A
//! worker thread executes them, since a merge takes seconds during which an operator may ask for status or stop the
//! daemon. New processes are reported by the host or found by polling (`process_table`).
//!
//! While the daemon may act, it holds the host's only [`Session`](pagefold_host::transaction::Session) all the time,
//! and ksmd is idle between merges. While it is paused, or another program tunes KSM, it releases the session and
//! restores the settings. Waiting of programs is read at each tick while the daemon works, and now and then while it is
//! idle (`wait_reader`). A third thread measures fair shares, seldom (`fair_share`).

mod adoption;
mod cgroup_shortages;
mod clock;
mod fair_share;
mod operator_store;
mod part_counts;
mod process_table;
pub mod replay;
mod restart;
mod saved_file;
mod settings;
mod snapshot;
mod upkeep_pace;
mod wait_reader;
mod worker;

pub use clock::utc_offset;
pub use fair_share::FairShareReading;
pub use pagefold_sys::allocator::return_large_blocks_when_freed;
pub use restart::forget_schedule;
pub use settings::DaemonSettings;
pub use snapshot::{CpuUsage, LoggedDecision, PassSummary, SharingHistory, Snapshot, WorkResult};

use crate::decide::{DaemonState, DaemonStatus, Decision, Effect, Event, TickReadings, step};
use cgroup_shortages::CgroupShortageReader;
use fair_share::WalkRequest;
use jiff::tz::TimeZone;
use operator_store::OperatorStore;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, NetBytes, ProcessId};
use pagefold_census::tally::MatrixRowKind;
use pagefold_host::counting_host::CountingHost;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::transaction::session;
use pagefold_host::{Host, elapsed_since, observe, receive_timeout};
use pagefold_merge::split_zeros::Notes;
use process_table::ProcessTable;
use restart::{SCHEDULE_FILE, SavedSchedule};
use saved_file::SavedFile;
use snapshot::CpuMeter;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Barrier};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use upkeep_pace::UpkeepPace;
use wait_reader::WaitReader;
use worker::{WorkOrder, Worker};

/// Poll interval while a process is new or a task is running.
const BUSY_POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Poll intervals otherwise: where the host reports new programs, and where it does not.
const IDLE_POLL_INTERVALS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(1)];

/// How long a task may run without any answer from the host before it counts as hung. No healthy answer takes as long.
/// The longest answer is to `madvise` over much memory at once, of which each page is copied: some seconds per GiB if
/// it is swapped out meanwhile.
const HANG_TIMEOUT: Duration = Duration::from_secs(600);

/// Poll interval for the end of the threads.
const END_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Number of decisions kept.
const MAX_KEPT_DECISIONS: usize = 100;

/// Maximum number of processes named in a decision.
const MAX_NAMES_PER_DECISION: usize = 4;

/// A message to the daemon's main thread.
pub enum Message {
    /// An event, passed on as it is.
    Event(Event),
    /// New settings are in force.
    Settings(Box<DaemonSettings>),
    /// A request for the daemon's status.
    StatusRequest(Sender<Box<Snapshot>>),
    /// A report of the worker.
    #[doc(hidden)]
    WorkResult(WorkResult),
}

/// Why the daemon cannot run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The key for fingerprints is not available.
    #[error(transparent)]
    Census(#[from] pagefold_census::Error),
    /// The processes cannot be listed.
    #[error("cannot list the processes")]
    Processes(#[source] Absent),
}

/// Label of a process in decisions and in the sharing matrix.
pub fn process_label(process: &Process) -> String {
    MatrixRowKind::Process.row_name(process).unwrap_or_default()
}

/// The main loop. It runs until the daemon is told to stop and has restored everything.
pub struct Daemon<'h, 'a> {
    host: &'h dyn Host,
    started_at: Instant,
    /// Time since `started_at` of the current event.
    event_time: Duration,
    state: Option<DaemonState>,
    settings: Arc<DaemonSettings>,
    process_table: ProcessTable,
    wait_reader: WaitReader,
    cgroup_shortages: CgroupShortageReader,
    other_tuner: Option<String>,
    /// Saves operator commands, where that is possible.
    operator_store: Option<OperatorStore>,
    /// Passes the schedule on to the next daemon, where that is possible.
    schedule_file: Option<SavedFile>,
    schedule_save_pace: UpkeepPace,
    /// Whether the schedule has changed since it was saved.
    has_unsaved_schedule: bool,
    work_orders: Sender<WorkOrder>,
    /// Requests to the thread that walks page tables.
    walk_requests: Sender<WalkRequest>,
    walk_schedule: fair_share::WalkSchedule,
    /// Set to end the running task soon.
    cancel: Arc<AtomicBool>,
    watchdog: WorkWatchdog,
    ksmd_thread: Option<KsmdThread<'h>>,
    ksmd_meter: CpuMeter,
    own_meter: CpuMeter,
    snapshot: Snapshot,
    /// Zero pages noted by merges, also by those of other commands.
    split_zero_notes: Option<Notes>,
    /// Whether everything was restored, once the daemon has ended.
    restored_at_end: Option<bool>,
    /// Receives each decision and each failure.
    log: &'a mut dyn FnMut(&str),
}

/// Channels to the other threads, and their progress.
struct WorkerChannels {
    work_orders: Sender<WorkOrder>,
    walk_requests: Sender<WalkRequest>,
    /// Number of answers that the worker has received from the host.
    host_answer_count: Arc<AtomicU64>,
}

/// Detects tasks that hang.
struct WorkWatchdog {
    /// Number of answers that the worker has received from the host.
    host_answer_count: Arc<AtomicU64>,
    /// The answer count when it last changed, and the time of that.
    last_progress: (u64, Duration),
    is_hung: bool,
}

impl WorkWatchdog {
    /// Whether a running task has received answers lately. True if no task is running.
    fn is_progressing(&mut self, now: Duration, is_working: bool) -> bool {
        let answers = self.host_answer_count.load(Ordering::Relaxed);
        if !is_working || answers != self.last_progress.0 {
            self.last_progress = (answers, now);
        }
        now.saturating_sub(self.last_progress.1) < HANG_TIMEOUT
    }
}

/// Run the daemon over a host. `messages` receives messages to it, and `sender` is the other end of that channel.
/// `on_alive` is called about once a second unless the running task hangs. `log` receives lines for the operator.
/// Returns whether everything was restored and unenrolled at the end as requested; `log` receives what was not.
pub fn run(
    host: &dyn Host,
    directory: &Path,
    settings: DaemonSettings,
    seed: u64,
    (sender, messages): (Sender<Message>, Receiver<Message>),
    on_alive: &mut dyn FnMut(&DaemonState),
    log: &mut dyn FnMut(&str),
) -> Result<bool, Error> {
    let host_answer_count = Arc::default();
    let counting_host = CountingHost::new(host, Arc::clone(&host_answer_count));
    let worker = Worker::new(&counting_host, directory.to_owned(), sender.clone())?;
    // In this order, so that a simulated host lets the threads take turns alike in each run.
    host.join_clock();
    let has_joined = Barrier::new(2);
    let announce = || {
        host.join_clock();
        has_joined.wait();
    };
    std::thread::scope(|scope| {
        let (work_orders, work_receiver) = mpsc::channel();
        let worker_thread = scope.spawn(move || {
            announce();
            worker.run(&work_receiver);
        });
        has_joined.wait();
        let (walk_requests, walk_receiver) = mpsc::channel();
        let walker_thread = scope.spawn(move || {
            announce();
            fair_share::run_walker(host, &walk_receiver, &sender);
        });
        has_joined.wait();
        let threads = EndingThreads { host, threads: [worker_thread, walker_thread] };
        let mut daemon =
            Daemon::new(host, settings, seed, WorkerChannels { work_orders, walk_requests, host_answer_count }, log);
        daemon.load_saved_state(directory);
        // On return, also by a panic, the daemon closes the channels before the threads are awaited.
        daemon.run(&messages, on_alive, || threads.threads[0].is_finished())
    })
}

/// Threads that end once their channels are closed. They are awaited by the clock of the host: they notice closed
/// channels only while this thread waits by it.
struct EndingThreads<'h, 'scope> {
    host: &'h dyn Host,
    threads: [ScopedJoinHandle<'scope, ()>; 2],
}

impl Drop for EndingThreads<'_, '_> {
    fn drop(&mut self) {
        while !self.threads.iter().all(ScopedJoinHandle::is_finished) {
            self.host.sleep(END_POLL_INTERVAL);
        }
    }
}

impl<'h, 'a> Daemon<'h, 'a> {
    fn new(
        host: &'h dyn Host,
        settings: DaemonSettings,
        seed: u64,
        WorkerChannels { work_orders, walk_requests, host_answer_count }: WorkerChannels,
        log: &'a mut dyn FnMut(&str),
    ) -> Self {
        let started_at = host.now();
        let ksmd = KsmdThread::find(host).ok();
        let cpu_spent = host.own_cpu_time() + ksmd.as_ref().and_then(|ksmd| ksmd.cpu_time().ok()).unwrap_or_default();
        let state = DaemonState::new(settings.rules.clone(), seed, Duration::ZERO, cpu_spent);
        let settings = Arc::new(settings);
        let vmstat = observe::vmstat(host).unwrap_or_default();
        let snapshot = Snapshot {
            state: state.clone(),
            settings: Arc::clone(&settings),
            started_at: host.unix_time(),
            decisions: VecDeque::new(),
            reasons: BTreeMap::new(),
            tracked_processes: Vec::new(),
            page_counts: BTreeMap::new(),
            last_census: None,
            sharing: SharingHistory::default(),
            split_zero_pages: BTreeMap::new(),
            fair_shares: BTreeMap::new(),
            enrolled_ranges: BTreeMap::new(),
            pass_and_merge_counts: (0, 0),
            pass_wall_and_cpu_time: Default::default(),
            predicted_and_measured: (Bytes::ZERO, NetBytes(0)),
            last_pass: None,
            exec_events: Ok(()),
            ksmd_cpu: None,
            own_cpu: CpuUsage::default(),
            thp_splits_and_cow_breaks_at_start: (vmstat.get("thp_split_page").copied(), vmstat.get("cow_ksm").copied()),
            failed_undos: Vec::new(),
            is_hung: false,
        };
        Self {
            host,
            started_at,
            event_time: Duration::ZERO,
            state: Some(state),
            settings,
            process_table: ProcessTable::new(host),
            wait_reader: WaitReader::default(),
            cgroup_shortages: CgroupShortageReader::default(),
            other_tuner: None,
            operator_store: None,
            schedule_file: None,
            schedule_save_pace: UpkeepPace::default(),
            has_unsaved_schedule: false,
            work_orders,
            walk_requests,
            walk_schedule: fair_share::WalkSchedule::default(),
            cancel: Arc::default(),
            watchdog: WorkWatchdog { host_answer_count, last_progress: (0, Duration::ZERO), is_hung: false },
            ksmd_thread: ksmd,
            ksmd_meter: CpuMeter::default(),
            own_meter: CpuMeter::default(),
            snapshot,
            split_zero_notes: None,
            restored_at_end: None,
            log,
        }
    }

    fn run(
        &mut self,
        messages: &Receiver<Message>,
        on_alive: &mut dyn FnMut(&DaemonState),
        has_worker_ended: impl Fn() -> bool,
    ) -> Result<bool, Error> {
        if let Err(why) = self.process_table.check_exec_events() {
            (self.log)(&format!("new programs are found by polling, as the process connector is not available: {why}"));
        }
        let mut last_poll: Option<Instant> = None;
        loop {
            if let Some(complete) = self.restored_at_end {
                return Ok(complete);
            }
            let pause = match self.process_table.check_exec_events() {
                _ if self.is_busy() => BUSY_POLL_INTERVAL,
                Ok(()) => IDLE_POLL_INTERVALS[0],
                Err(_) => IDLE_POLL_INTERVALS[1],
            };
            let timeout = last_poll.map_or(Duration::ZERO, |at| pause.saturating_sub(elapsed_since(self.host, at)));
            match receive_timeout(self.host, messages, timeout) {
                Ok(message) => {
                    self.event_time = elapsed_since(self.host, self.started_at);
                    self.handle_message(message);
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.event_time = elapsed_since(self.host, self.started_at);
                    self.tick()?;
                    last_poll = Some(self.host.now());
                    if self.check_progress() {
                        on_alive(self.state());
                    }
                    if has_worker_ended() {
                        (self.log)("the worker thread has ended");
                        return Ok(false);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(false),
            }
        }
    }

    /// Apply the operator commands that were given to a killed daemon, continue the schedule of the previous daemon, and
    /// load the zero pages that merges noted.
    fn load_saved_state(&mut self, directory: &Path) {
        self.split_zero_notes = Some(Notes::new(directory));
        self.update_split_zeros();
        let boot_id = session::read_boot_id(self.host).map_err(std::io::Error::other);
        let is_alive = |process| worker::is_alive(self.host, process);
        match boot_id.and_then(|boot_id| OperatorStore::load(directory, boot_id, is_alive)) {
            Ok((store, events, why)) => {
                if let Some(why) = why {
                    (self.log)(&format!(
                        "saved operator commands are unreadable; the daemon is paused until `pagefold resume`: {why}"
                    ));
                } else if !events.is_empty() {
                    (self.log)("the operator commands given to an earlier daemon still apply");
                }
                events.into_iter().for_each(|event| self.apply_event(event));
                self.operator_store = Some(store);
            }
            Err(why) => {
                let path = directory.join(operator_store::OPERATOR_FILE);
                (self.log)(&format!("operator commands cannot be saved in {}: {why}", path.display()));
            }
        }
        if let Err(why) = self.load_schedule(directory) {
            let path = directory.join(SCHEDULE_FILE);
            (self.log)(&format!("all processes are scanned anew, since {} is unusable: {why}", path.display()));
        }
    }

    /// Continue the schedule of the previous daemon.
    fn load_schedule(&mut self, directory: &Path) -> std::io::Result<()> {
        let boot_id = session::read_boot_id(self.host).map_err(std::io::Error::other)?;
        let file = self.schedule_file.insert(SavedFile::new(directory, SCHEDULE_FILE, boot_id)?);
        if let Some((saved, elapsed)) = file.load::<SavedSchedule>(self.host.unix_time())? {
            let state = saved.into_state(|process| worker::is_alive(self.host, process));
            self.apply_event(Event::StateReceived(state, elapsed));
        }
        Ok(())
    }

    /// Save the schedule for the next daemon.
    fn save_schedule(&mut self) {
        let cpu_before = self.host.thread_cpu_time();
        let saved = SavedSchedule::new(&self.state().passed_state());
        let now = self.host.unix_time();
        if let Some(Err(why)) = self.schedule_file.as_ref().map(|file| file.save(&saved, now)) {
            (self.log)(&format!("the next daemon will scan all processes anew: the schedule cannot be saved: {why}"));
            self.schedule_file = None;
        }
        self.has_unsaved_schedule = false;
        self.schedule_save_pace.record(self.event_time, self.host.thread_cpu_time().saturating_sub(cpu_before));
    }

    /// Load the zero pages that merges have noted since.
    fn update_split_zeros(&mut self) {
        let Some(notes) = &mut self.split_zero_notes else { return };
        match notes.update(self.host, &mut self.snapshot.split_zero_pages) {
            Ok(changed) => changed.into_iter().for_each(|process| self.walk_schedule.mark_changed(process)),
            Err(why) => (self.log)(&format!("zero pages freed by splitting huge pages are not known: {why}")),
        }
    }

    /// Save an operator's command, if the event is one.
    fn save_operator_event(&mut self, event: &Event) {
        let saved = self.operator_store.as_mut().map_or(Ok(()), |store| store.record_event(event));
        if let Err(why) = saved {
            (self.log)(&format!("an operator command cannot be saved and ends with this daemon: {why}"));
        }
    }

    fn state(&self) -> &DaemonState {
        self.state.as_ref().expect("the state is returned after every step")
    }

    /// Whether the running task makes progress. Logs once if it does not.
    fn check_progress(&mut self) -> bool {
        let is_progressing = self.watchdog.is_progressing(self.event_time, self.state().is_task_pending());
        if !is_progressing && !self.watchdog.is_hung {
            let minutes = HANG_TIMEOUT.as_secs() / 60;
            (self.log)(&format!("the running task has had no answer from the host for {minutes} minutes"));
        }
        self.watchdog.is_hung = !is_progressing;
        is_progressing
    }

    fn is_busy(&self) -> bool {
        self.process_table.has_new_untracked()
            || self.process_table.has_growing_tracked()
            || self.state().status().0 == DaemonStatus::Working
            || self.is_check_due_soon()
    }

    /// Whether a scan is due before the next idle poll.
    fn is_check_due_soon(&self) -> bool {
        let now = elapsed_since(self.host, self.started_at);
        // Overdue scans do not count: they wait for something else.
        let soon = now.saturating_sub(IDLE_POLL_INTERVALS[1])..=now + IDLE_POLL_INTERVALS[1];
        self.state().tracked().values().any(|tracked| tracked.may_be_scanned() && soon.contains(&tracked.next_scan))
    }

    fn handle_message(&mut self, message: Message) {
        match message {
            Message::Event(event) => self.apply_event(event),
            Message::Settings(settings) => {
                let rules = settings.rules.clone();
                self.settings = Arc::from(settings);
                self.process_table.recheck_all();
                self.apply_event(Event::RulesChanged(rules));
            }
            Message::StatusRequest(answer) => {
                // The requester may be gone.
                let _ = answer.send(Box::new(self.take_snapshot()));
            }
            Message::WorkResult(result) => self.record_work_result(result),
        }
    }

    fn tick(&mut self) -> Result<(), Error> {
        let now = self.event_time;
        let polled = self.process_table.poll(self.host, now, &self.settings).map_err(Error::Processes)?;
        // Other tuners are handled before new processes.
        let tuner = self.process_table.tuner().map(|tuner| tuner.name().to_owned());
        if tuner != self.other_tuner {
            self.other_tuner.clone_from(&tuner);
            self.apply_event(Event::TunerChanged(tuner));
        }
        for event in polled.events {
            match &event {
                Event::ProcessExited(process) => {
                    self.snapshot.page_counts.remove(process);
                    self.snapshot.enrolled_ranges.remove(process);
                    self.snapshot.fair_shares.remove(process);
                }
                // The process may run another program now.
                Event::ProcessArrived(arrival) if self.snapshot.fair_shares.remove(&arrival.process).is_some() => {
                    self.walk_schedule.mark_changed(arrival.process);
                }
                _ => {}
            }
            self.apply_event(event);
        }
        let own_cpu_time = self.host.own_cpu_time();
        let ksmd = self.ksmd_thread.as_ref().and_then(|ksmd| ksmd.cpu_time().ok());
        self.own_meter.record(now, own_cpu_time);
        if let Some(ksmd) = ksmd {
            self.ksmd_meter.record(now, ksmd);
        }
        let is_working = self.state().status().0 == DaemonStatus::Working;
        let tracked_ids = self.process_table.tracked_processes().map(|process| process.id);
        let wait_times = self.wait_reader.read_wait_times(self.host, now, is_working, tracked_ids);
        let memory = observe::memory(self.host).ok();
        let cgroup_shortages =
            self.cgroup_shortages.read_shortages(self.host, now, self.process_table.tracked_processes());
        self.apply_event(Event::Tick(TickReadings {
            cpu_spent: own_cpu_time + ksmd.unwrap_or_default(),
            available: memory.as_ref().and_then(|memory| memory.available.clone().ok()),
            total: memory.and_then(|memory| memory.total.ok()),
            cgroup_shortages,
            pressure_percent: observe::pressure(self.host).ok().map(|pressure| pressure.some.avg10),
            wait_times,
            time_of_day: clock::time_of_day(self.host.unix_time(), &TimeZone::system()),
            resident: polled.resident,
            cpu_times: polled.cpu_times,
        }));
        self.update_split_zeros();
        self.request_walk();
        if self.has_unsaved_schedule && self.schedule_save_pace.is_due(now) {
            self.save_schedule();
        }
        Ok(())
    }

    /// Request the next walk of page tables, if one is due.
    fn request_walk(&mut self) {
        let split_zeros = &self.snapshot.split_zero_pages;
        let tracked = self.state.as_ref().into_iter().flat_map(|state| state.tracked().keys().copied());
        if let Some(process) = self.walk_schedule.next_walk(self.event_time, tracked) {
            let wants_zero_pages = split_zeros.contains_key(&process);
            let _ = self.walk_requests.send(WalkRequest { process, wants_zero_pages });
        }
    }

    fn apply_event(&mut self, event: Event) {
        if let Event::EnrollmentsAdopted(adopted) = &event {
            self.process_table.adopt(adopted.iter().map(|(process, _)| *process), self.event_time);
        }
        if let Event::UnenrollDone(summary) = &event {
            self.snapshot.enrolled_ranges.retain(|process, _| !summary.unenrolled.contains(process));
            summary.unenrolled.iter().for_each(|process| self.walk_schedule.mark_changed(*process));
        }
        if let Event::MergedCheckDone(summary) = &event {
            summary.unenrolled_from.iter().for_each(|process| self.walk_schedule.mark_changed(*process));
        }
        self.save_operator_event(&event);
        self.has_unsaved_schedule |=
            matches!(event, Event::CensusDone(_) | Event::MergeDone(_) | Event::UnenrollDone(_) | Event::TaskFailed(_));
        let state = self.state.take().expect("the state is returned after every step");
        let (state, effects) = step(state, self.event_time, event);
        self.state = Some(state);
        for effect in effects {
            match effect {
                Effect::Report(decision) => self.log_decision(decision),
                Effect::Halt => self.cancel.store(true, Ordering::Relaxed),
                Effect::End { complete } => {
                    self.restored_at_end = Some(complete);
                    self.save_schedule();
                    let ended_store = self.operator_store.take().filter(|_| !self.state().hands_over());
                    if let Some(Err(why)) = ended_store.map(|store| store.remove_file()) {
                        (self.log)(&format!("the saved operator commands cannot be removed: {why}"));
                    }
                }
                effect => {
                    self.cancel = Arc::default();
                    let (settings, cancel) = (Arc::clone(&self.settings), Arc::clone(&self.cancel));
                    let order = WorkOrder { effect, settings, cancel };
                    // If the worker has ended, the loop ends at its next tick.
                    let _ = self.work_orders.send(order);
                }
            }
        }
    }

    fn log_decision(&mut self, decision: Decision) {
        let mut names: Vec<String> =
            decision.processes.iter().take(MAX_NAMES_PER_DECISION).map(|process| self.label_by_id(*process)).collect();
        if decision.processes.len() > MAX_NAMES_PER_DECISION {
            names.push(format!("{} more", decision.processes.len() - MAX_NAMES_PER_DECISION));
        }
        let subject = if names.is_empty() { "this host".to_owned() } else { names.join(", ") };
        (self.log)(&format!("{} {subject}: {}", decision.kind.word(), decision.explanation));
        *self.snapshot.reasons.entry(decision.reason).or_default() += 1;
        self.snapshot.decisions.push_front(LoggedDecision { logged_at: self.host.unix_time(), subject, decision });
        self.snapshot.decisions.truncate(MAX_KEPT_DECISIONS);
    }

    fn label_by_id(&self, id: ProcessId) -> String {
        let process = self.process_table.tracked_processes().find(|process| process.id == id);
        process.map_or_else(|| format!("process {}", id.pid), process_label)
    }

    fn record_work_result(&mut self, result: WorkResult) {
        let snapshot = &mut self.snapshot;
        match result {
            WorkResult::Census { page_counts, unscanned_processes, matrix, wall_seconds, cpu_time } => {
                snapshot.pass_and_merge_counts.0 += 1;
                snapshot.pass_wall_and_cpu_time.0 += Duration::from_secs_f64(wall_seconds);
                snapshot.pass_wall_and_cpu_time.1 += cpu_time;
                snapshot.last_census = Some((self.host.unix_time(), unscanned_processes));
                let processes = page_counts.len() as u64;
                let (predicted, measured_net) = (Bytes::ZERO, None);
                snapshot.last_pass = Some(PassSummary {
                    ended_at: self.host.unix_time(),
                    wall_seconds,
                    cpu_time,
                    scanned_processes: processes,
                    predicted,
                    measured_net,
                });
                snapshot.page_counts.extend(page_counts);
                snapshot.sharing.add_census(&matrix);
            }
            WorkResult::Merge { enrolled_ranges, predicted, measured_net, wall_time, cpu_time } => {
                snapshot.pass_and_merge_counts.1 += 1;
                snapshot.pass_wall_and_cpu_time.0 += wall_time;
                snapshot.pass_wall_and_cpu_time.1 += cpu_time;
                snapshot.predicted_and_measured.0 += predicted;
                snapshot.predicted_and_measured.1.0 += measured_net.0;
                enrolled_ranges.keys().for_each(|process| self.walk_schedule.mark_changed(*process));
                snapshot.enrolled_ranges.extend(enrolled_ranges);
                if let Some(last) = &mut snapshot.last_pass {
                    last.ended_at = self.host.unix_time();
                    last.wall_seconds += wall_time.as_secs_f64();
                    last.cpu_time += cpu_time;
                    (last.predicted, last.measured_net) = (predicted, Some(measured_net));
                }
            }
            WorkResult::PageTableWalk { process, fair_share, uncounted_zero_pages, cpu_time } => {
                let mut has_changed = false;
                if let (Some(split_zeros), Some(uncounted)) =
                    (snapshot.split_zero_pages.get_mut(&process), uncounted_zero_pages)
                {
                    has_changed = uncounted < *split_zeros;
                    *split_zeros = (*split_zeros).min(uncounted);
                }
                if let Some(fair_share) = fair_share {
                    let before = snapshot.fair_shares.insert(process, fair_share);
                    has_changed |= !before.is_some_and(|before| before.is_close_to(&fair_share));
                }
                self.walk_schedule.record_walk(self.event_time, process, cpu_time, has_changed);
            }
            WorkResult::Adoption { enrolled_ranges, dropped } => {
                for why in dropped {
                    (self.log)(&format!("dropped from the record of enrollments: {why}"));
                }
                snapshot.enrolled_ranges.extend(enrolled_ranges);
            }
            WorkResult::StateNotPassedOn(why) => {
                (self.log)(&format!("observations of merged pages do not outlive a restart: {why}"))
            }
            WorkResult::Undone(description) => {
                (self.log)(&format!("restored what an earlier pagefold had changed: {description}"))
            }
            WorkResult::UndoFailed(failure) => {
                (self.log)(&format!("not done: {failure}"));
                snapshot.failed_undos.push(failure);
                let length = snapshot.failed_undos.len();
                snapshot.failed_undos.drain(..length.saturating_sub(MAX_KEPT_DECISIONS));
            }
        }
    }

    fn take_snapshot(&mut self) -> Snapshot {
        self.update_split_zeros();
        let tracked_processes: Vec<Process> = self.process_table.tracked_processes().cloned().collect();
        let labels: BTreeSet<String> = tracked_processes.iter().map(process_label).collect();
        self.snapshot.sharing.retain_parties(|label| labels.contains(label));
        // Processes of the last census or merge may have exited meanwhile.
        let tracked_ids: BTreeSet<ProcessId> =
            tracked_processes.iter().map(|process| process.id).chain(self.process_table.adopted_processes()).collect();
        self.snapshot.page_counts.retain(|process, _| tracked_ids.contains(process));
        self.snapshot.enrolled_ranges.retain(|process, _| tracked_ids.contains(process));
        self.snapshot.fair_shares.retain(|process, _| tracked_ids.contains(process));
        // Other entries are kept: an untracked process with noted zero pages may be tracked later.
        let mut split_zero_pages = self.snapshot.split_zero_pages.clone();
        split_zero_pages.retain(|process, _| tracked_ids.contains(process));
        Snapshot {
            split_zero_pages,
            state: self.state().clone(),
            settings: Arc::clone(&self.settings),
            tracked_processes,
            exec_events: self.process_table.check_exec_events(),
            is_hung: self.watchdog.is_hung,
            ksmd_cpu: self.ksmd_meter.usage(),
            own_cpu: self.own_meter.usage().unwrap_or_default(),
            ..self.snapshot.clone()
        }
    }
}

#[cfg(test)]
mod tests;
