//! What happens, what is done about it, and what is said of it.

use super::{DaemonRules, ProcessArrival, ScanCause, TimeOfDay, WaitTimes};
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use pagefold_census::decide::sketch::ContentSketches;
use std::collections::BTreeMap;
use std::time::Duration;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed.
    Tick(TickReadings),
    /// A process has come that is worth managing, or is known and has become another program.
    ProcessArrived(ProcessArrival),
    /// A process has ended.
    ProcessExited(ProcessId),
    /// Answers [`Action::AcquireHost`]: whether the host can be changed, or why not.
    HostAcquired(Result<(), String>),
    /// Answers [`Action::Census`].
    CensusDone(CensusSummary),
    /// Answers [`Action::Merge`].
    MergeDone(MergeSummary),
    /// Answers [`Action::CheckMerged`].
    MergedCheckDone(MergedCheckSummary),
    /// Answers [`Action::Sweep`].
    SweepDone {
        /// Whether ksmd has passed by all who had ended.
        complete: bool,
    },
    /// Answers [`Action::Unenroll`].
    UnenrollDone(UnenrollSummary),
    /// Answers [`Action::RestoreSettings`].
    SettingsRestored {
        /// Whether everything is as it was before.
        complete: bool,
    },
    /// Answers anything: it could not be done.
    TaskFailed(String),
    /// Somebody else wrote KSM's settings.
    SettingsOverwritten(String),
    /// A program that writes KSM's settings again and again runs, or no longer.
    TunerChanged(Option<String>),
    /// The configuration has changed.
    RulesChanged(DaemonRules),
    /// An operator wants nothing to be done.
    Pause,
    /// An operator wants work to go on, also where somebody else wrote.
    Resume,
    /// An operator wants a process to be looked at now.
    Enroll(ProcessId),
    /// An operator wants a process to be left alone, and what is merged of it withdrawn; once it has come, if it is not
    /// known yet.
    Unenroll(ProcessId),
    /// The daemon ends; whether what it enrolled is withdrawn first.
    Stop {
        /// Withdraw it.
        unmerge: bool,
    },
}

/// What is read at every tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TickReadings {
    /// CPU time of ksmd and pagefold together so far.
    pub cpu_spent: Duration,
    /// `MemAvailable`.
    pub available: Option<Bytes>,
    /// `MemTotal`.
    pub total: Option<Bytes>,
    /// Percent of the last ten seconds in which some task waited for memory.
    pub pressure_percent: Option<f64>,
    /// How short memory is in the cgroups of those of whom it was read.
    pub cgroup_shortages: Vec<(ProcessId, Shortage)>,
    /// What programs waited for, where it was read.
    pub wait_times: Option<WaitTimes>,
    /// What clocks show.
    pub time_of_day: TimeOfDay,
    /// Resident memory of those of which it was read.
    pub resident: Vec<(ProcessId, Bytes)>,
    /// CPU time so far of those of whom it was read.
    pub cpu_times: Vec<(ProcessId, Duration)>,
}

/// What a census found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CensusSummary {
    /// CPU time that it took.
    pub cpu_time: Duration,
    /// How much memory was read of those who were looked at, with what is remembered as a part of that; nothing where most
    /// of it is remembered, which tells little of what reading takes.
    pub bytes_scanned: Bytes,
    /// What looking at each of them took, in pages that are read: regions take time, too.
    pub cost_in_pages: BTreeMap<ProcessId, u64>,
    /// Who has something to merge that pays.
    pub candidates: Vec<MergeCandidate>,
    /// Who has something that would pay, but is not old enough to be merged.
    pub not_yet_stable: Vec<ProcessId>,
    /// A sample of what each of them holds.
    pub sketches: BTreeMap<ProcessId, ContentSketches>,
    /// Whether it was halted.
    pub partial: bool,
}

/// What merging would do for somebody.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeCandidate {
    /// Who.
    pub process: ProcessId,
    /// What it would give back.
    pub net_savings: NetBytes,
    /// CPU time of ksmd.
    pub ksmd_time: Duration,
}

/// What a merge came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergeSummary {
    /// In whom something was enrolled.
    pub enrolled: Vec<ProcessId>,
    /// What should have come back.
    pub predicted: Bytes,
    /// What came back.
    pub net: NetBytes,
    /// What of that came back by each, where it is known: a frame that several map is a part of each.
    pub nets: BTreeMap<ProcessId, NetBytes>,
    /// CPU time of ksmd and pagefold.
    pub cpu_time: Duration,
    /// What was withdrawn because it did not last.
    pub unenrolled_bytes: Bytes,
    /// From whom that was.
    pub unenrolled_from: Vec<ProcessId>,
    /// Who refused, and why.
    pub refused: Vec<(ProcessId, String)>,
    /// In whom something should have been withdrawn and could not be, and why.
    pub failed_unenrolls: Vec<(ProcessId, String)>,
    /// What somebody else wrote, if that ended it.
    pub settings_overwritten: Option<String>,
}

/// What came of a look at what is merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergedCheckSummary {
    /// What was withdrawn because it did not last.
    pub unenrolled_bytes: Bytes,
    /// From whom that was.
    pub unenrolled_from: Vec<ProcessId>,
    /// CPU time that it took.
    pub cpu_time: Duration,
    /// In whom something should have been withdrawn and could not be, and why, where that was tried.
    pub failed_unenrolls: Option<Vec<(ProcessId, String)>>,
}

/// What came of withdrawing some processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnenrollSummary {
    /// Of whom nothing is merged any more.
    pub unenrolled: Vec<ProcessId>,
    /// Of whom something stays merged, and why.
    pub failed_unenrolls: Vec<(ProcessId, String)>,
    /// CPU time that it took.
    pub cpu_time: Duration,
}

/// What of somebody is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnenrollScope {
    /// What the daemon has enrolled. What the program had, or others, stays.
    DaemonEnrolled,
    /// All that is merged, whoever enrolled it.
    AllMerged,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Take the right to change the host, and stop ksmd with all merges kept.
    AcquireHost,
    /// Take a census of these, and keep the plan.
    Census(Vec<ProcessId>),
    /// Carry out the plan for these, and stop ksmd again.
    Merge {
        /// Whom.
        processes: Vec<ProcessId>,
        /// ksmd's share of one CPU.
        cpu_share: f64,
    },
    /// Look at what is merged.
    CheckMerged {
        /// Whether to withdraw what does not last.
        unenroll: bool,
    },
    /// Have ksmd pass by who has ended, and stop it again.
    Sweep,
    /// Withdraw these, each to its extent, as far as there is memory for it.
    Unenroll(BTreeMap<ProcessId, UnenrollScope>),
    /// Put KSM's settings back, with all merges kept, and let others change the host.
    RestoreSettings,
    /// End the census or merge under way soon.
    Halt,
    /// Tell what was decided.
    Report(Decision),
    /// Nothing more is to be done.
    End {
        /// Whether KSM's settings are back, and nobody stays merged who was to be withdrawn.
        complete: bool,
    },
}

/// Something that was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What.
    pub kind: DecisionKind,
    /// About whom; nobody: the host.
    pub processes: Vec<ProcessId>,
    /// The word of the reason.
    pub reason: DecisionReason,
    /// The reason in words.
    pub explanation: String,
    /// What it should save.
    pub predicted: Option<Bytes>,
    /// Whether it is carried out.
    pub carried_out: bool,
}

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[allow(missing_docs, reason = "each is its word")]
        pub enum $name { $($variant,)* }

        impl $name {
            /// The word for it.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }
    };
}

words! {
    /// What is decided.
    DecisionKind {
        Census = "census",
        Merge = "merge",
        Unenroll = "withdraw",
        Skip = "leave",
        Pause = "rest",
        Yield = "yield",
        Refuse = "refuse",
        Restore = "restore",
    }
}

words! {
    /// Why.
    DecisionReason {
        Arrived = "arrived",
        Grown = "filled",
        Due = "due",
        Profitable = "profitable",
        Unprofitable = "unprofitable",
        CowBreaks = "broken",
        NetLoss = "loses",
        Budget = "budget",
        MemoryGoal = "goal",
        QuietHours = "quiet_hours",
        Pressure = "pressure",
        Slowdown = "slow_down",
        Excluded = "excluded",
        DomainChanged = "domain",
        Refused = "refused",
        Operator = "operator",
        OtherWriter = "other_writer",
        HostBusy = "busy",
        Failed = "failed",
        Stopped = "stopped",
    }
}

impl DecisionReason {
    /// Why somebody is to be withdrawn, in words.
    pub fn unenroll_explanation(self) -> &'static str {
        match self {
            Self::Operator => "an operator withdraws it",
            Self::Excluded => "it must not be merged any more",
            Self::DomainChanged => "its trust domain has changed, and it may share pages with another",
            Self::Stopped => "the daemon ends",
            Self::Failed => "a merge of it failed half-way",
            _ => "what was enrolled costs more than it gives back",
        }
    }

    /// What of somebody is withdrawn for this reason.
    pub fn unenroll_scope(self) -> UnenrollScope {
        match self {
            Self::Operator | Self::Excluded | Self::DomainChanged => UnenrollScope::AllMerged,
            _ => UnenrollScope::DaemonEnrolled,
        }
    }
}

impl From<ScanCause> for DecisionReason {
    fn from(cause: ScanCause) -> Self {
        match cause {
            ScanCause::Arrived => Self::Arrived,
            ScanCause::Grown => Self::Grown,
            ScanCause::Due => Self::Due,
        }
    }
}
