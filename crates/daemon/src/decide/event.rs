//! Events that the daemon reacts to, effects that it orders, and decisions that it reports.

use super::{DaemonRules, PassedState, ProcessArrival, ScanCause, SharingScope, TimeOfDay, WaitTimes};
use pagefold_base::memory::Shortage;
use pagefold_base::units::{AddressRange, Bytes, NetBytes, ProcessId};
use pagefold_census::ScanPart;
use pagefold_census::decide::sketch::ContentSketches;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// An event on the host, from a worker or from an operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed.
    Tick(TickReadings),
    /// A process that is big enough to track has started, or a known process now runs another program.
    ProcessArrived(ProcessArrival),
    /// A process has exited.
    ProcessExited(ProcessId),
    /// These processes have ranges that the previous daemon enrolled, with the scopes of their merges. It comes before
    /// [`Event::HostAcquired`].
    EnrollmentsAdopted(Vec<(ProcessId, BTreeSet<SharingScope>)>),
    /// The previous daemon passed this on, so long ago. It comes before processes arrive.
    StateReceived(PassedState, Duration),
    /// Answer to [`Effect::AcquireHost`]: the daemon may change the host, or the reason why not.
    HostAcquired(Result<(), String>),
    /// Answer to [`Effect::Census`].
    CensusDone(CensusSummary),
    /// Answer to [`Effect::Merge`].
    MergeDone(MergeSummary),
    /// Answer to [`Effect::CheckMerged`].
    MergedCheckDone(MergedCheckSummary),
    /// Answer to [`Effect::Sweep`].
    SweepDone {
        /// Whether ksmd has visited all exited processes.
        complete: bool,
    },
    /// Answer to [`Effect::Unenroll`].
    UnenrollDone(UnenrollSummary),
    /// Answer to [`Effect::RestoreSettings`].
    SettingsRestored {
        /// Whether all settings have their earlier values again.
        complete: bool,
    },
    /// Answer to any effect: it failed.
    TaskFailed(String),
    /// Another program wrote KSM's settings.
    SettingsOverwritten(String),
    /// A program that rewrites KSM's settings periodically has started (its name) or ended (`None`).
    TunerChanged(Option<String>),
    /// The configuration has changed.
    RulesChanged(DaemonRules),
    /// An operator pauses the daemon.
    Pause,
    /// An operator resumes the daemon, even after another program wrote KSM's settings.
    Resume,
    /// An operator wants a process to be scanned now.
    Enroll(ProcessId),
    /// An operator excludes a process and wants its merged pages unenrolled. If the process is not known yet, this
    /// applies once it arrives.
    Unenroll(ProcessId),
    /// The daemon stops.
    Stop {
        /// Whether to unenroll what the daemon enrolled first.
        unmerge: bool,
    },
    /// The daemon stops, and another one follows it: merged pages stay merged, and operator commands stay in force.
    HandOver,
}

/// Readings taken at every tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TickReadings {
    /// Total CPU time of ksmd and pagefold so far.
    pub cpu_spent: Duration,
    /// `MemAvailable`.
    pub available: Option<Bytes>,
    /// `MemTotal`.
    pub total: Option<Bytes>,
    /// Percent of the last ten seconds in which some task waited for memory.
    pub pressure_percent: Option<f64>,
    /// Memory shortage in the cgroups of processes, where it was read at this tick.
    pub cgroup_shortages: Vec<(ProcessId, Shortage)>,
    /// Time that programs waited for CPUs, where it was read.
    pub wait_times: Option<WaitTimes>,
    /// Time of day.
    pub time_of_day: TimeOfDay,
    /// Resident memory of processes, where it was read at this tick.
    pub resident: Vec<(ProcessId, Bytes)>,
    /// Total CPU time of processes, where it was read at this tick.
    pub cpu_times: Vec<(ProcessId, Duration)>,
}

/// Result of a census.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CensusSummary {
    /// CPU time of the census.
    pub cpu_time: Duration,
    /// Memory scanned, with reused fingerprints counted as a fraction. Zero where most fingerprints were reused: such a
    /// census tells little of what reading costs.
    pub bytes_scanned: Bytes,
    /// Scan cost of each process, in pages read. Regions add to it.
    pub cost_in_pages: BTreeMap<ProcessId, u64>,
    /// Processes with a merge plan.
    pub candidates: Vec<MergeCandidate>,
    /// Processes whose duplicates are profitable but not stable yet.
    pub not_yet_stable: Vec<ProcessId>,
    /// The addresses that were scanned of each process. They begin where its parts begin and end where the next parts
    /// begin.
    pub scanned_ranges: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Processes that were not scanned: a part of another process was, and the census found the two in different trust
    /// domains.
    pub left_out: BTreeSet<ProcessId>,
    /// Content sketches of each process, or of its parts.
    pub sketches: BTreeMap<ProcessId, ContentSketches>,
    /// Whether the census was halted.
    pub partial: bool,
}

/// Predicted result of merging one process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MergeCandidate {
    /// The process.
    pub process: ProcessId,
    /// Predicted net savings.
    pub net_savings: NetBytes,
    /// Predicted CPU time of ksmd.
    pub ksmd_time: Duration,
}

/// Result of a merge.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergeSummary {
    /// Processes in which ranges were enrolled.
    pub enrolled: Vec<ProcessId>,
    /// Predicted savings.
    pub predicted: Bytes,
    /// Measured net savings.
    pub net: NetBytes,
    /// Measured net savings of each process, where known. A frame that several processes map is divided among them.
    pub nets: BTreeMap<ProcessId, NetBytes>,
    /// CPU time of ksmd and pagefold.
    pub cpu_time: Duration,
    /// Bytes unenrolled because of COW breaks.
    pub unenrolled_bytes: Bytes,
    /// Processes in which they were unenrolled.
    pub unenrolled_from: Vec<ProcessId>,
    /// Processes that refused to be enrolled, with reasons.
    pub refused: Vec<(ProcessId, String)>,
    /// Processes in which ranges could not be unenrolled, with reasons.
    pub failed_unenrolls: Vec<(ProcessId, String)>,
    /// The setting that another program wrote, if that ended the merge.
    pub settings_overwritten: Option<String>,
}

/// Result of a check of merged pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergedCheckSummary {
    /// Bytes unenrolled because of COW breaks.
    pub unenrolled_bytes: Bytes,
    /// Processes in which they were unenrolled.
    pub unenrolled_from: Vec<ProcessId>,
    /// CPU time of the check.
    pub cpu_time: Duration,
    /// Processes in which ranges could not be unenrolled, with reasons; `None` if unenrolling was not tried.
    pub failed_unenrolls: Option<Vec<(ProcessId, String)>>,
}

/// Result of unenrolling some processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UnenrollSummary {
    /// Processes without merged pages now.
    pub unenrolled: Vec<ProcessId>,
    /// Processes with pages that stay merged, with reasons.
    pub failed_unenrolls: Vec<(ProcessId, String)>,
    /// CPU time of the task.
    pub cpu_time: Duration,
}

/// Which ranges of a process are unenrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnenrollScope {
    /// Ranges that the daemon enrolled. Ranges that other programs enrolled stay.
    DaemonEnrolled,
    /// All merged and enrolled ranges, whatever program enrolled them.
    AllMerged,
}

/// What a decision has the daemon do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Acquire the right to change the host, and stop ksmd with all merged pages kept.
    AcquireHost,
    /// Take a census of these parts of processes, and keep the plan.
    Census(BTreeMap<ProcessId, Vec<ScanPart>>),
    /// Execute the plan for some processes, then stop ksmd again.
    Merge {
        /// The processes.
        processes: Vec<ProcessId>,
        /// ksmd's share of one CPU.
        cpu_share: f64,
    },
    /// Check whether merged pages are still merged.
    CheckMerged {
        /// Whether to unenroll pages with COW breaks.
        unenroll: bool,
    },
    /// Run ksmd until it has visited exited processes, then stop it again.
    Sweep,
    /// Unenroll these processes, each in its scope, as far as memory allows.
    Unenroll(BTreeMap<ProcessId, UnenrollScope>),
    /// Restore KSM's settings with all merged pages kept, and release the host to other programs.
    RestoreSettings,
    /// Halt the running census or merge soon.
    Halt,
    /// Report a decision.
    Report(Decision),
    /// The daemon has finished.
    End {
        /// Whether KSM's settings are restored, and no process that was to be unenrolled stays merged.
        complete: bool,
    },
}

/// A decision of the daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What was decided.
    pub kind: DecisionKind,
    /// The processes it is about; empty for the host.
    pub processes: Vec<ProcessId>,
    /// The reason as one word.
    pub reason: DecisionReason,
    /// The reason as a sentence.
    pub explanation: String,
    /// Predicted savings.
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
            /// The word in reports and JSON.
            pub fn word(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }
    };
}

words! {
    /// Kind of a decision.
    DecisionKind {
        Census = "census",
        Merge = "merge",
        Unenroll = "unenroll",
        Skip = "skip",
        Idle = "idle",
        Yield = "yield",
        Refuse = "refuse",
        Restore = "restore",
        Adopt = "adopt",
    }
}

words! {
    /// Reason of a decision.
    DecisionReason {
        Arrived = "arrived",
        Grown = "grown",
        Due = "due",
        Profitable = "profitable",
        Unprofitable = "unprofitable",
        CowBreaks = "cow_breaks",
        NetLoss = "net_loss",
        Budget = "budget",
        MemoryGoal = "memory_goal",
        QuietHours = "quiet_hours",
        Slowdown = "slowdown",
        Excluded = "excluded",
        DomainChanged = "domain_changed",
        Refused = "refused",
        Operator = "operator",
        OtherWriter = "other_writer",
        HostBusy = "host_busy",
        Failed = "failed",
        Stopped = "stopped",
        Restarted = "restarted",
    }
}

impl DecisionReason {
    /// Why a process is to be unenrolled, as a sentence.
    pub fn unenroll_explanation(self) -> &'static str {
        match self {
            Self::Operator => "an operator unenrolled it",
            Self::Excluded => "it is excluded from merging now",
            Self::DomainChanged => "its trust domain has changed, and it may share pages with another domain",
            Self::Stopped => "the daemon stops",
            Self::Failed => "a merge of it failed partway",
            _ => "the enrolled ranges cost more than they save",
        }
    }

    /// Which ranges of the process are unenrolled for this reason.
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
            ScanCause::Operator => Self::Operator,
            ScanCause::Arrived => Self::Arrived,
            ScanCause::Grown => Self::Grown,
            ScanCause::Due => Self::Due,
        }
    }
}
