//! The daemon's decisions: from events on a host to effects.
//!
//! [`step`] takes the state, a time and an event, and returns the next state and the effects to execute. It uses no
//! clock and no host. So a recorded day is replayed in no time, and the same seed and events give the same effects.
//!
//! At most one task runs at a time: every effect except [`Effect::Report`], [`Effect::Halt`] and [`Effect::End`] is
//! answered by one event before the next one is ordered.
//!
//! # Scan schedule
//! The first scan of a process follows its arrival after a short debounce and only records its pages. The next one
//! comes when these pages are stable enough to merge, and further ones whenever the process has grown. Other processes
//! are scanned with exponential backoff while scans find nothing; processes that hardly ran since the last scan wait
//! longest ([`tracked`]). Each census also includes a few known processes of the same trust domains: two guests are
//! enough to find that a new guest equals its siblings, since each of them holds what all have merged.
//!
//! # Restart
//! What the previous daemon enrolled is recorded. The worker compares the record with the host when it acquires it
//! ([`decide_adoption`]), and these processes are then watched and unenrolled as if this daemon had merged them
//! ([`adoption`]). The previous daemon also passes on its schedule and the outcome of its merges ([`restart`]).
//!
//! # Cost
//! CPU time of ksmd and pagefold comes out of one token bucket ([`CpuTokenBucket`]). A task that does not fit is not
//! started, and a task that takes longer than predicted is halted. Each process has a cost in CPU seconds per MiB
//! saved. Processes above [`DaemonRules::max_cpu_seconds_per_mib`] are left out of the merge. A process for which ksmd
//! needed more than that waits twice as long for its next scan.
//!
//! # Unenrolling
//! A process is unenrolled, once there is memory for it, in these cases: its first merge was a net loss or failed, it
//! is excluded, its trust domain has changed, or an operator asks for it. A process that had merged pages before keeps
//! them after a loss; checks of merged pages find those with COW breaks. A failed attempt is repeated with exponential
//! backoff, and until it succeeds the process is in no plan.
//!
//! # When the daemon does nothing
//! While programs wait longer for a CPU than they do without the daemon (`slowdown`), unless memory is short. While
//! available memory is above the goal, in quiet hours, while paused, and while another program writes KSM's settings.
//! Nothing is unenrolled while memory is short: unmerging takes memory.
//!
//! Memory may be short on the host or in a process's cgroup ([`pagefold_base::memory::Shortage`]). Such processes come
//! first, are not unenrolled, and ignore the goal, the slowdown and the cost limit; all other processes are treated as
//! usual. Quiet hours apply nevertheless, because the operator has set them.

mod adoption;
mod cpu_bound;
mod event;
mod event_handling;
mod merge_estimate;
pub mod part_progress;
mod portion;
mod remerge_backoff;
mod restart;
mod rules;
mod schedule;
mod slowdown;
#[cfg(test)]
mod tests;
pub mod token_bucket;
pub mod tracked;

pub use adoption::{
    AdoptedProcess, Adoption, ProcessMemory, RecordedProcess, SharingScope, StaleReason, decide_adoption,
};
pub use cpu_bound::{CpuBound, CpuRate, UnknownCpuCount};
pub use event::{
    CensusSummary, Decision, DecisionKind, DecisionReason, Effect, Event, MergeCandidate, MergeSummary,
    MergedCheckSummary, TickReadings, UnenrollScope, UnenrollSummary,
};
pub use part_progress::{NextStep, PartProgress, PartResult};
pub use remerge_backoff::{BackoffRecord, RemergeBackoff};
pub use restart::{PassedProcess, PassedState};
pub use rules::{DaemonMode, DaemonRules, DailyHours, TimeOfDay};
pub use slowdown::{SlowdownMonitor, WaitTimes};
pub use token_bucket::CpuTokenBucket;
pub use tracked::{PendingUnenroll, ProcessArrival, ScanCause, TrackedProcess};

use pagefold_base::memory::Shortage;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::units::{Bytes, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// CPU seconds per MiB of a census before any is measured: two scans at 4 GiB/s.
pub const INITIAL_CENSUS_SECONDS_PER_MIB: f64 = 0.5 / 1024.0;

/// Current status of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaemonStatus {
    /// No process has been scanned yet.
    Starting,
    /// A census or a merge runs.
    Working,
    /// There is nothing to do, or not now.
    Idle,
    /// An operator paused it.
    Paused,
    /// Another program tunes KSM.
    Yielding,
}

#[derive(Clone, Debug, PartialEq)]
enum DaemonTask {
    AcquireHost,
    Census(CensusTask),
    Merge(Vec<ProcessId>),
    CheckMerged,
    Sweep,
    Unenroll(BTreeMap<ProcessId, UnenrollScope>),
    RestoreSettings,
}

/// A census of some processes.
#[derive(Clone, Debug, PartialEq)]
struct CensusTask {
    /// Processes that were due.
    due: Vec<ProcessId>,
    /// All processes of the census.
    processes: Vec<ProcessId>,
    /// The process of which one part is compared with the due processes, if any.
    partner: Option<ProcessId>,
}

impl DaemonTask {
    /// Whether the task may make this process share pages with other processes.
    fn involves(&self, process: ProcessId) -> bool {
        match self {
            Self::Census(CensusTask { processes, .. }) | Self::Merge(processes) => processes.contains(&process),
            Self::AcquireHost | Self::CheckMerged | Self::Sweep | Self::Unenroll(_) | Self::RestoreSettings => false,
        }
    }
}

/// Progress of the shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownStage {
    /// Merged pages stay merged.
    KeepMerged,
    /// Enrolled ranges are to be unenrolled first.
    UnmergePending,
    /// Unenrolling was tried.
    UnmergeTried,
}

/// The daemon's state between events.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonState {
    rules: DaemonRules,
    seed: u64,
    now: Duration,
    cpu_budget: CpuTokenBucket,
    available: Option<Bytes>,
    shortage: Shortage,
    slowdown: SlowdownMonitor,
    /// Time of day, once read.
    time_of_day: Option<TimeOfDay>,
    tracked: BTreeMap<ProcessId, TrackedProcess>,
    /// Resident memory of all tracked processes at the start of this step.
    tracked_bytes: u64,
    /// Processes to leave alone once they arrive.
    unenroll_on_arrival: BTreeSet<ProcessId>,
    /// Processes of the previous daemon that have not arrived yet, with the scopes of their merges.
    adopt_on_arrival: BTreeMap<ProcessId, BTreeSet<SharingScope>>,
    /// What the previous daemon passed on of processes that have not arrived yet, and when it was received.
    passed_processes: BTreeMap<ProcessId, (PassedProcess, Duration)>,
    /// Whether it is known what the previous daemon enrolled: the host was acquired once.
    adoption_known: bool,
    /// Whether another daemon follows this one, for which operator commands are kept.
    hands_over: bool,
    task: Option<DaemonTask>,
    task_halted: bool,
    /// Total CPU time at the start of the task.
    task_start_cpu_time: Duration,
    /// Whether trust domains have changed since the task started, so that its plan uses outdated ones.
    domains_changed: bool,
    host_acquired: bool,
    acquire_host_after: Duration,
    host_busy_reason: Option<String>,
    paused: bool,
    settings_overwritten: Option<String>,
    tuner: Option<String>,
    shutdown_stage: Option<ShutdownStage>,
    ended: bool,
    /// Whether the last attempt to restore KSM's settings was complete.
    settings_restored: bool,
    /// Processes with ranges that the last attempt could not unenroll, and why.
    failed_unenrolls: BTreeMap<ProcessId, String>,
    /// Time of the next check of merged pages, and the interval before it.
    merged_check: (Duration, Duration),
    /// Time at which ksmd is to visit merged processes that have exited.
    sweep_at: Option<Duration>,
    census_seconds_per_mib: f64,
    census_count: u64,
    reported_pause: Option<DecisionReason>,
}

/// The state after an event, and the effects to execute.
pub fn step(mut state: DaemonState, at: Duration, event: Event) -> (DaemonState, Vec<Effect>) {
    let mut effects = Vec::new();
    if !state.ended {
        state.now = state.now.max(at);
        state.tracked_bytes = state.tracked.values().map(|tracked| tracked.resident.0).sum();
        state.handle_event(event, &mut effects);
        state.halt_if_unwanted(&mut effects);
        state.begin(&mut effects);
    }
    (state, effects)
}

impl DaemonState {
    /// The initial state. `cpu_spent` is the CPU time that ksmd and pagefold have used so far.
    pub fn new(rules: DaemonRules, seed: u64, at: Duration, cpu_spent: Duration) -> Self {
        Self {
            cpu_budget: CpuTokenBucket::new(rules.cpu_rate, rules.burst, at, cpu_spent),
            merged_check: (Duration::MAX, rules.min_scan_interval),
            sweep_at: None,
            rules,
            seed,
            now: at,
            available: None,
            shortage: Shortage::default(),
            slowdown: SlowdownMonitor::default(),
            time_of_day: None,
            tracked: BTreeMap::new(),
            tracked_bytes: 0,
            unenroll_on_arrival: BTreeSet::new(),
            adopt_on_arrival: BTreeMap::new(),
            passed_processes: BTreeMap::new(),
            adoption_known: false,
            hands_over: false,
            task: None,
            task_halted: false,
            task_start_cpu_time: cpu_spent,
            domains_changed: false,
            host_acquired: false,
            acquire_host_after: Duration::ZERO,
            host_busy_reason: None,
            paused: false,
            settings_overwritten: None,
            tuner: None,
            shutdown_stage: None,
            ended: false,
            settings_restored: true,
            failed_unenrolls: BTreeMap::new(),
            census_seconds_per_mib: INITIAL_CENSUS_SECONDS_PER_MIB,
            census_count: 0,
            reported_pause: None,
        }
    }

    /// The rules in force.
    pub fn rules(&self) -> &DaemonRules {
        &self.rules
    }

    /// The tracked processes.
    pub fn tracked(&self) -> &BTreeMap<ProcessId, TrackedProcess> {
        &self.tracked
    }

    /// The CPU budget.
    pub fn cpu_budget(&self) -> &CpuTokenBucket {
        &self.cpu_budget
    }

    /// Whether a task runs, so that an answer is expected.
    pub fn is_task_pending(&self) -> bool {
        self.task.is_some()
    }

    /// Whether another daemon follows this one, for which operator commands are kept.
    pub fn hands_over(&self) -> bool {
        self.hands_over
    }

    /// Whether an operator has paused it.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Current status, with the reason.
    pub fn status(&self) -> (DaemonStatus, String) {
        let count_label = |processes: usize| match processes {
            1 => "one process".to_owned(),
            count => format!("{count} processes"),
        };
        if let Some(why) = self.yield_reason() {
            return (DaemonStatus::Yielding, why);
        }
        match &self.task {
            _ if self.paused => (DaemonStatus::Paused, "an operator paused it".to_owned()),
            Some(DaemonTask::Census(CensusTask { processes, .. })) => {
                (DaemonStatus::Working, format!("a census of {}", count_label(processes.len())))
            }
            Some(DaemonTask::Merge(processes)) => {
                (DaemonStatus::Working, format!("merging {}", count_label(processes.len())))
            }
            Some(DaemonTask::Unenroll(scopes)) => {
                (DaemonStatus::Working, format!("unenrolling {}", count_label(scopes.len())))
            }
            _ if self.rules.mode == DaemonMode::Observe => (DaemonStatus::Idle, "it only observes".to_owned()),
            _ if self.census_count == 0 => (DaemonStatus::Starting, "no process has been scanned yet".to_owned()),
            _ => (DaemonStatus::Idle, self.pause_reason().unwrap_or("no scan is due").to_owned()),
        }
    }

    /// Why no scan starts for now.
    fn pause_reason(&self) -> Option<&'static str> {
        match self.reported_pause? {
            DecisionReason::Budget => Some("the CPU budget does not suffice for now"),
            DecisionReason::MemoryGoal => Some("available memory is above the goal"),
            DecisionReason::Slowdown => Some("programs waited longer while it worked"),
            DecisionReason::QuietHours => Some("these are quiet hours"),
            _ => None,
        }
    }

    /// Why no process is scanned now, even if an operator asks for it; `None` if scans run. In observe mode none do.
    pub fn scan_block_reason(&self) -> Option<String> {
        let paused = self.paused.then(|| "an operator paused it".to_owned());
        paused.or_else(|| self.yield_reason()).or_else(|| self.pause_reason().map(str::to_owned))
    }

    /// Why nothing is merged or unenrolled now, even if an operator asks for it; `None` if it is.
    pub fn inaction_reason(&self) -> Option<String> {
        match self.rules.mode {
            DaemonMode::Observe => Some("it only observes".to_owned()),
            DaemonMode::Advise => Some("it only advises".to_owned()),
            DaemonMode::Act if self.paused => Some("an operator paused it".to_owned()),
            DaemonMode::Act => self.yield_reason(),
        }
    }

    /// Why the daemon leaves KSM to another program.
    fn yield_reason(&self) -> Option<String> {
        let tuner = self.tuner.as_ref().filter(|_| !self.rules.ignore_tuners);
        let tuner = tuner.map(|name| format!("{name} tunes KSM, and each program would undo the other's settings"));
        let in_act_mode = |_: &String| self.rules.mode == DaemonMode::Act;
        self.settings_overwritten.clone().or(tuner).or_else(|| self.host_busy_reason.clone()).filter(in_act_mode)
    }

    /// Longest scan interval of a process: fruitless scans of all processes keep to their share of one CPU, however much
    /// memory there is. Comparisons of the parts of a large process come on top.
    fn max_scan_interval(&self) -> Duration {
        let scannable = self.tracked.values().filter(|tracked| tracked.may_be_scanned());
        let mib = scannable.map(|tracked| tracked.resident.0).sum::<u64>() as f64 / 1048576.0;
        let seconds = mib * self.census_seconds_per_mib / self.rules.max_fruitless_scan_share;
        self.rules.max_scan_interval.max(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Whether memory is short on the host.
    fn is_host_memory_short(&self) -> bool {
        self.shortage.is_short(self.rules.pressure_percent)
    }

    /// Whether memory is short on the host, or in the cgroup of any of these processes.
    fn is_memory_short_for(&self, processes: &[ProcessId]) -> bool {
        let is_cgroup_short = |process| {
            self.tracked
                .get(process)
                .is_some_and(|tracked: &TrackedProcess| tracked.is_cgroup_memory_short(&self.rules))
        };
        self.is_host_memory_short() || processes.iter().any(is_cgroup_short)
    }

    fn may_act(&self) -> bool {
        self.may_acquire_host() && !self.paused
    }

    fn may_acquire_host(&self) -> bool {
        let must_yield = self.settings_overwritten.is_some() || self.tuner.is_some() && !self.rules.ignore_tuners;
        self.rules.mode == DaemonMode::Act && !must_yield
    }

    /// Pseudo-random number between 0 and 1, from [`DaemonState::random_u64`].
    fn random_fraction(&self, process: ProcessId) -> f64 {
        self.random_u64(process) as f64 / u64::MAX as f64
    }

    /// Pseudo-random number, from the seed, the process and the number of censuses.
    fn random_u64(&self, process: ProcessId) -> u64 {
        splitmix64(self.seed ^ u64::from(process.pid.0) << 32 ^ process.start_time ^ self.census_count << 48)
    }

    fn report_decision(
        &mut self,
        kind: DecisionKind,
        processes: &[ProcessId],
        reason: DecisionReason,
        why: impl Into<String>,
    ) -> Effect {
        let carried_out =
            !matches!(kind, DecisionKind::Skip | DecisionKind::Refuse | DecisionKind::Idle | DecisionKind::Yield);
        Effect::Report(Decision {
            kind,
            processes: processes.to_vec(),
            reason,
            explanation: why.into(),
            predicted: None,
            carried_out,
        })
    }

    fn back_off(&mut self, processes: &[ProcessId]) {
        for process in processes {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.back_off(self.now, &self.rules);
            }
        }
    }

    /// Mark these processes to be unenrolled.
    fn request_unenroll(&mut self, processes: &[ProcessId], reason: DecisionReason) {
        for process in processes {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.request_unenroll(reason, self.now);
            }
        }
    }

    /// Halt the current task if it exceeds the CPU budget or is no longer wanted.
    fn halt_if_unwanted(&mut self, effects: &mut Vec<Effect>) {
        let is_wanted = match &self.task {
            Some(DaemonTask::Census(..) | DaemonTask::Merge(_)) if self.domains_changed => false,
            Some(DaemonTask::Census(..)) => {
                self.rules.mode != DaemonMode::Observe && !self.paused && self.shutdown_stage.is_none()
            }
            Some(DaemonTask::Merge(_)) => self.may_act() && self.shutdown_stage.is_none(),
            // Required unenrolling runs at any cost, but does not delay the shutdown.
            Some(DaemonTask::Unenroll(_)) if self.shutdown_stage == Some(ShutdownStage::KeepMerged) => false,
            _ => return,
        };
        if (!is_wanted || self.cpu_budget.available_seconds() <= 0.0) && !self.task_halted {
            self.task_halted = true;
            effects.push(Effect::Halt);
        }
    }

    fn start_task(&mut self, task: DaemonTask, effect: Effect, effects: &mut Vec<Effect>) {
        (self.task, self.task_halted, self.domains_changed) = (Some(task), false, false);
        self.task_start_cpu_time = self.cpu_budget.total_spent();
        effects.push(effect);
    }
}
