//! The daemon's decisions: from what happens on a host to what is done about it.
//!
//! [`step`] takes the state, a time and an event, and gives the state after it with the actions to carry out. There is
//! no clock and no host in it, so a recorded day is gone through in no time, and the same seed and events give the same
//! actions.
//!
//! At most one piece of work is under way: every action but [`Action::Report`], [`Action::Halt`] and [`Action::End`] is
//! answered by one event before the next one is asked for.
//!
//! # Who is looked at when
//! Who has come is looked at after a short debounce, which only takes note of what there is; again once that is old
//! enough to be merged, and whenever it has grown. Everybody else waits longer and longer as long as nothing is found,
//! and who has hardly run since the longest ([`tracked`]). With those whose turn it is a few of their domain are looked
//! at that are known already: a guest that equals its siblings is found out by two of them, since what all have merged
//! lies in each.
//!
//! # What it may cost
//! CPU time of ksmd and pagefold comes out of one [`cpu_budget`]. Nothing is begun that does not fit, and what takes longer
//! than expected is halted. Each member has a `price`: who would be merged for more CPU time than [`DaemonRules::max_cpu_seconds_per_mib`]
//! allows is left out, the others are merged, and who took more of ksmd in the end waits for twice as long.
//!
//! # What is taken back
//! Whoever loses by its first merge, was in one that failed, must not be merged any more, came into another trust
//! domain or is withdrawn by an operator is withdrawn once there is memory for it. Who had something merged before
//! keeps it: what of that does not last is seen by the looks. Where it is refused it is tried again, later each time,
//! and until then it is in no plan.
//!
//! # When nothing is done
//! While programs wait longer for a CPU than they do without it (`slowdown`), unless memory is short. Above the goal,
//! in quiet hours, while paused, while somebody else writes KSM's settings. Nothing is withdrawn while memory is short:
//! unmerging takes memory.
//!
//! Memory may be short on the host or in somebody's cgroup ([`pagefold_base::memory::Shortage`]). Then it comes first, nothing
//! of it is withdrawn, and neither the goal, the slow-down nor the price counts for it; all else goes on. Quiet hours
//! are an operator's word, and hold all the same.

mod event;
mod event_handling;
mod merge_estimate;
mod remerge_backoff;
mod rules;
mod schedule;
mod slowdown;
#[cfg(test)]
mod tests;
pub mod token_bucket;
pub mod tracked;

pub use event::{
    Action, CensusSummary, Decision, DecisionKind, DecisionReason, Event, MergeCandidate, MergeSummary,
    MergedCheckSummary, TickReadings, UnenrollScope, UnenrollSummary,
};
pub use remerge_backoff::RemergeBackoff;
pub use rules::{DaemonMode, DaemonRules, DailyHours, TimeOfDay};
pub use slowdown::{SlowdownMonitor, WaitTimes};
pub use token_bucket::CpuTokenBucket;
pub use tracked::{PendingUnenroll, ProcessArrival, ScanCause, TrackedProcess};

use pagefold_base::memory::Shortage;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::units::{Bytes, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// CPU seconds for a MiB of a census, before any was measured: two looks at 4 GiB a second.
pub const INITIAL_CENSUS_SECONDS_PER_MIB: f64 = 0.5 / 1024.0;

/// Pauses between looks in vain, in times of what looking at everybody costs.
const SCAN_INTERVAL_COST_FACTOR: f64 = 2000.0;

/// What the daemon does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DaemonStatus {
    /// Nobody was looked at yet.
    Starting,
    /// A census or a merge is under way.
    Working,
    /// Nothing is to be done, or not now.
    Idle,
    /// An operator paused it.
    Paused,
    /// Somebody else drives KSM.
    Yielding,
}

#[derive(Clone, Debug, PartialEq)]
enum DaemonTask {
    AcquireHost,
    /// Whose turn it was, and everybody who is looked at.
    Census(Vec<ProcessId>, Vec<ProcessId>),
    Merge(Vec<ProcessId>),
    CheckMerged,
    Sweep,
    Unenroll(BTreeMap<ProcessId, UnenrollScope>),
    RestoreSettings,
}

impl DaemonTask {
    /// Whether it may have somebody share pages with others.
    fn involves(&self, process: ProcessId) -> bool {
        match self {
            Self::Census(_, processes) | Self::Merge(processes) => processes.contains(&process),
            Self::AcquireHost | Self::CheckMerged | Self::Sweep | Self::Unenroll(_) | Self::RestoreSettings => false,
        }
    }
}

/// How far it has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShutdownStage {
    /// What is merged stays merged.
    KeepMerged,
    /// What is enrolled is withdrawn first.
    UnmergePending,
    /// That was tried.
    UnmergeTried,
}

/// All that is remembered from event to event.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonState {
    rules: DaemonRules,
    seed: u64,
    now: Duration,
    cpu_budget: CpuTokenBucket,
    available: Option<Bytes>,
    shortage: Shortage,
    slowdown: SlowdownMonitor,
    /// What clocks show, once they were read.
    time_of_day: Option<TimeOfDay>,
    tracked: BTreeMap<ProcessId, TrackedProcess>,
    /// Who is to be left alone once it is known.
    unenroll_on_arrival: BTreeSet<ProcessId>,
    task: Option<DaemonTask>,
    task_halted: bool,
    /// The CPU time that had been read when it began.
    task_start_cpu_time: Duration,
    /// Whether trust domains have changed since it began, so that it heeds others than there are.
    domains_changed: bool,
    host_acquired: bool,
    acquire_host_after: Duration,
    host_busy_reason: Option<String>,
    paused: bool,
    settings_overwritten: Option<String>,
    tuner: Option<String>,
    shutdown_stage: Option<ShutdownStage>,
    ended: bool,
    /// Whether KSM's settings came back the last time that they were to.
    settings_restored: bool,
    /// What could not be withdrawn the last time that it was tried, and why.
    failed_unenrolls: BTreeMap<ProcessId, String>,
    /// When what is merged is looked at next, and the pause before that.
    merged_check: (Duration, Duration),
    /// When ksmd is to pass by those who were merged and have ended.
    sweep_at: Option<Duration>,
    census_seconds_per_mib: f64,
    census_count: u64,
    reported_pause: Option<DecisionReason>,
}

/// The state after an event, and what is to be done.
pub fn step(mut state: DaemonState, at: Duration, event: Event) -> (DaemonState, Vec<Action>) {
    let mut actions = Vec::new();
    if !state.ended {
        state.now = state.now.max(at);
        state.handle_event(event, &mut actions);
        state.halt_if_unwanted(&mut actions);
        state.begin(&mut actions);
    }
    (state, actions)
}

impl DaemonState {
    /// At the beginning, with the CPU time that ksmd and pagefold have used so far.
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
            unenroll_on_arrival: BTreeSet::new(),
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

    /// What it keeps to.
    pub fn rules(&self) -> &DaemonRules {
        &self.rules
    }

    /// Who is known.
    pub fn tracked(&self) -> &BTreeMap<ProcessId, TrackedProcess> {
        &self.tracked
    }

    /// The CPU time that may be spent.
    pub fn cpu_budget(&self) -> &CpuTokenBucket {
        &self.cpu_budget
    }

    /// Whether a piece of work is under way, so that an answer is waited for.
    pub fn is_task_pending(&self) -> bool {
        self.task.is_some()
    }

    /// What it does, and why.
    pub fn status(&self) -> (DaemonStatus, String) {
        let of = |processes: usize| match processes {
            1 => "one process".to_owned(),
            many => format!("{many} processes"),
        };
        if let Some(why) = self.yield_reason() {
            return (DaemonStatus::Yielding, why);
        }
        match &self.task {
            _ if self.paused => (DaemonStatus::Paused, "an operator paused it".to_owned()),
            Some(DaemonTask::Census(_, processes)) => {
                (DaemonStatus::Working, format!("a census of {}", of(processes.len())))
            }
            Some(DaemonTask::Merge(processes)) => (DaemonStatus::Working, format!("merging {}", of(processes.len()))),
            Some(DaemonTask::Unenroll(extents)) => {
                (DaemonStatus::Working, format!("withdrawing {}", of(extents.len())))
            }
            _ if self.rules.mode == DaemonMode::Observe => (DaemonStatus::Idle, "it only observes".to_owned()),
            _ if self.census_count == 0 => (DaemonStatus::Starting, "nobody was looked at yet".to_owned()),
            _ => (DaemonStatus::Idle, self.pause_reason().unwrap_or("nobody's turn has come").to_owned()),
        }
    }

    /// Why nobody's turn comes for now.
    fn pause_reason(&self) -> Option<&'static str> {
        match self.reported_pause? {
            DecisionReason::Budget => Some("its CPU time is used up for now"),
            DecisionReason::MemoryGoal => Some("there is as much memory as it is to keep"),
            DecisionReason::Slowdown => Some("programs waited longer while it worked"),
            DecisionReason::QuietHours => Some("these are quiet hours"),
            _ => None,
        }
    }

    /// Why nobody is looked at now, whoever asks for it; `None` where that is done. Who only observes never does.
    pub fn scan_block_reason(&self) -> Option<String> {
        let paused = self.paused.then(|| "an operator paused it".to_owned());
        paused.or_else(|| self.yield_reason()).or_else(|| self.pause_reason().map(str::to_owned))
    }

    /// Why nothing is merged or withdrawn now, whoever asks for it; `None` where that is done.
    pub fn inaction_reason(&self) -> Option<String> {
        match self.rules.mode {
            DaemonMode::Observe => Some("it only observes".to_owned()),
            DaemonMode::Advise => Some("it only advises".to_owned()),
            DaemonMode::Act if self.paused => Some("an operator paused it".to_owned()),
            DaemonMode::Act => self.yield_reason(),
        }
    }

    /// Why others are left to drive KSM.
    fn yield_reason(&self) -> Option<String> {
        let tuner = self.tuner.as_ref().filter(|_| !self.rules.ignore_tuners);
        let tuner = tuner.map(|name| format!("{name} tunes KSM, and each would undo the other"));
        let acts = |_: &String| self.rules.mode == DaemonMode::Act;
        self.settings_overwritten.clone().or(tuner).or_else(|| self.host_busy_reason.clone()).filter(acts)
    }

    /// The longest pause between two looks at somebody: looking at everybody in vain takes a two-thousandth of one CPU
    /// at most, however much memory there is.
    fn max_scan_interval(&self) -> Duration {
        let open = self.tracked.values().filter(|member| member.may_be_scanned());
        let mib = open.map(|member| member.resident.0).sum::<u64>() as f64 / 1048576.0;
        self.rules
            .max_scan_interval
            .max(Duration::from_secs_f64(mib * self.census_seconds_per_mib * SCAN_INTERVAL_COST_FACTOR))
    }

    /// Whether memory is short on the host.
    fn is_host_memory_short(&self) -> bool {
        self.shortage.is_short(self.rules.pressure_percent)
    }

    /// Whether memory is short on the host, or in the cgroup of any of these.
    fn is_memory_short_for(&self, processes: &[ProcessId]) -> bool {
        let squeezed = |process| {
            self.tracked.get(process).is_some_and(|member: &TrackedProcess| member.is_cgroup_memory_short(&self.rules))
        };
        self.is_host_memory_short() || processes.iter().any(squeezed)
    }

    fn may_act(&self) -> bool {
        self.may_acquire_host() && !self.paused
    }

    fn may_acquire_host(&self) -> bool {
        let yields = self.settings_overwritten.is_some() || self.tuner.is_some() && !self.rules.ignore_tuners;
        self.rules.mode == DaemonMode::Act && !yields
    }

    /// Between 0 and 1, by [`DaemonState::random_u64`].
    fn random_fraction(&self, process: ProcessId) -> f64 {
        self.random_u64(process) as f64 / u64::MAX as f64
    }

    /// Any number, by the seed, a process and how much was done so far.
    fn random_u64(&self, process: ProcessId) -> u64 {
        splitmix64(self.seed ^ u64::from(process.pid.0) << 32 ^ process.start_time ^ self.census_count << 48)
    }

    fn report_decision(
        &mut self,
        what: DecisionKind,
        whom: &[ProcessId],
        reason: DecisionReason,
        why: impl Into<String>,
    ) -> Action {
        let acted =
            !matches!(what, DecisionKind::Skip | DecisionKind::Refuse | DecisionKind::Pause | DecisionKind::Yield);
        Action::Report(Decision {
            kind: what,
            processes: whom.to_vec(),
            reason,
            explanation: why.into(),
            predicted: None,
            carried_out: acted,
        })
    }

    fn back_off(&mut self, processes: &[ProcessId]) {
        for process in processes {
            if let Some(member) = self.tracked.get_mut(process) {
                member.back_off(self.now, &self.rules);
            }
        }
    }

    /// What is merged of these is to be withdrawn.
    fn request_unenroll(&mut self, processes: &[ProcessId], reason: DecisionReason) {
        for process in processes {
            if let Some(member) = self.tracked.get_mut(process) {
                member.request_unenroll(reason, self.now);
            }
        }
    }

    /// End what is under way where it costs too much, or is no longer wanted.
    fn halt_if_unwanted(&mut self, actions: &mut Vec<Action>) {
        let wanted = match &self.task {
            Some(DaemonTask::Census(..) | DaemonTask::Merge(_)) if self.domains_changed => false,
            Some(DaemonTask::Census(..)) => {
                self.rules.mode != DaemonMode::Observe && !self.paused && self.shutdown_stage.is_none()
            }
            Some(DaemonTask::Merge(_)) => self.may_act() && self.shutdown_stage.is_none(),
            // What must be withdrawn is, whatever it costs, but does not keep the daemon from its end.
            Some(DaemonTask::Unenroll(_)) if self.shutdown_stage == Some(ShutdownStage::KeepMerged) => false,
            _ => return,
        };
        if (!wanted || self.cpu_budget.available_seconds() <= 0.0) && !self.task_halted {
            self.task_halted = true;
            actions.push(Action::Halt);
        }
    }

    fn start_task(&mut self, work: DaemonTask, action: Action, actions: &mut Vec<Action>) {
        (self.task, self.task_halted, self.domains_changed) = (Some(work), false, false);
        self.task_start_cpu_time = self.cpu_budget.total_spent();
        actions.push(action);
    }
}
