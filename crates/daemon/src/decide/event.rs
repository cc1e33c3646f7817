//! What happens, what is done about it, and what is said of it.

use super::{Arrival, Cause, Rules, TimeOfDay, Waits};
use pagefold_base::memory::Shortage;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use pagefold_census::decide::sketch::Held;
use std::collections::BTreeMap;
use std::time::Duration;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Time has passed.
    Tick(Readings),
    /// A process has come that is worth managing, or is known and has become another program.
    Came(Arrival),
    /// A process has ended.
    Went(ProcessId),
    /// Answers [`Action::Hold`]: whether the host can be changed, or why not.
    Held(Result<(), String>),
    /// Answers [`Action::Census`].
    Censused(Censused),
    /// Answers [`Action::Merge`].
    Merged(Merged),
    /// Answers [`Action::Look`].
    Looked(Looked),
    /// Answers [`Action::Sweep`].
    Swept {
        /// Whether ksmd has passed by all who had ended.
        whole: bool,
    },
    /// Answers [`Action::Withdraw`].
    Withdrawn(Withdrawn),
    /// Answers [`Action::Restore`].
    Restored {
        /// Whether everything is as it was before.
        whole: bool,
    },
    /// Answers anything: it could not be done.
    Failed(String),
    /// Somebody else wrote KSM's settings.
    Contested(String),
    /// A program that writes KSM's settings again and again runs, or no longer.
    Tuner(Option<String>),
    /// The configuration has changed.
    Configured(Rules),
    /// An operator wants nothing to be done.
    Pause,
    /// An operator wants work to go on, also where somebody else wrote.
    Resume,
    /// An operator wants a process to be looked at now.
    Enrol(ProcessId),
    /// An operator wants a process to be left alone, and what is merged of it withdrawn; once it has come, if it is not
    /// known yet.
    Withdraw(ProcessId),
    /// The daemon ends; whether what it enrolled is withdrawn first.
    Stop {
        /// Withdraw it.
        unmerge: bool,
    },
}

/// What is read at every tick.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Readings {
    /// CPU time of ksmd and pagefold together so far.
    pub spent: Duration,
    /// `MemAvailable`.
    pub available: Option<Bytes>,
    /// `MemTotal`.
    pub total: Option<Bytes>,
    /// Percent of the last ten seconds in which some task waited for memory.
    pub pressure: Option<f64>,
    /// How short memory is in the cgroups of those of whom it was read.
    pub cgroups: Vec<(ProcessId, Shortage)>,
    /// What programs waited for, where it was read.
    pub waits: Option<Waits>,
    /// What clocks show.
    pub time: TimeOfDay,
    /// Resident memory of those of which it was read.
    pub resident: Vec<(ProcessId, Bytes)>,
    /// CPU time so far of those of whom it was read.
    pub ran: Vec<(ProcessId, Duration)>,
}

/// What a census found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Censused {
    /// CPU time that it took.
    pub cost: Duration,
    /// How much memory was read of those who were looked at, with what is remembered as a part of that; nothing where most
    /// of it is remembered, which tells little of what reading takes.
    pub looked: Bytes,
    /// What looking at each of them took, in pages that are read: regions take time, too.
    pub efforts: BTreeMap<ProcessId, u64>,
    /// Who has something to merge that pays.
    pub planned: Vec<Planned>,
    /// Who has something that would pay, but is not old enough to be merged.
    pub young: Vec<ProcessId>,
    /// A sample of what each of them holds.
    pub held: BTreeMap<ProcessId, Held>,
    /// Whether it was halted.
    pub partial: bool,
}

/// What merging would do for somebody.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Who.
    pub process: ProcessId,
    /// What it would give back.
    pub net: NetBytes,
    /// CPU time of ksmd.
    pub ksmd: Duration,
}

/// What a merge came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Merged {
    /// In whom something was enrolled.
    pub enrolled: Vec<ProcessId>,
    /// What should have come back.
    pub predicted: Bytes,
    /// What came back.
    pub net: NetBytes,
    /// What of that came back by each, where it is known: a frame that several map is a part of each.
    pub nets: BTreeMap<ProcessId, NetBytes>,
    /// CPU time of ksmd and pagefold.
    pub cost: Duration,
    /// What was withdrawn because it did not last.
    pub withdrawn: Bytes,
    /// From whom that was.
    pub from: Vec<ProcessId>,
    /// Who refused, and why.
    pub refused: Vec<(ProcessId, String)>,
    /// In whom something should have been withdrawn and could not be, and why.
    pub stuck: Vec<(ProcessId, String)>,
    /// What somebody else wrote, if that ended it.
    pub yielded: Option<String>,
}

/// What came of a look at what is merged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Looked {
    /// What was withdrawn because it did not last.
    pub withdrawn: Bytes,
    /// From whom that was.
    pub from: Vec<ProcessId>,
    /// CPU time that it took.
    pub cost: Duration,
    /// In whom something should have been withdrawn and could not be, and why, where that was tried.
    pub stuck: Option<Vec<(ProcessId, String)>>,
}

/// What came of withdrawing some processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Withdrawn {
    /// Of whom nothing is merged any more.
    pub gone: Vec<ProcessId>,
    /// Of whom something stays merged, and why.
    pub refused: Vec<(ProcessId, String)>,
    /// CPU time that it took.
    pub cost: Duration,
}

/// What of somebody is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Extent {
    /// What the daemon has enrolled. What the program had, or others, stays.
    Ours,
    /// All that is merged, whoever enrolled it.
    All,
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Take the right to change the host, and stop ksmd with all merges kept.
    Hold,
    /// Take a census of these, and keep the plan.
    Census(Vec<ProcessId>),
    /// Carry out the plan for these, and stop ksmd again.
    Merge {
        /// Whom.
        processes: Vec<ProcessId>,
        /// ksmd's share of one CPU.
        share: f64,
    },
    /// Look at what is merged.
    Look {
        /// Whether to withdraw what does not last.
        withdraw: bool,
    },
    /// Have ksmd pass by who has ended, and stop it again.
    Sweep,
    /// Withdraw these, each to its extent, as far as there is memory for it.
    Withdraw(BTreeMap<ProcessId, Extent>),
    /// Put KSM's settings back, with all merges kept, and let others change the host.
    Restore,
    /// End the census or merge under way soon.
    Halt,
    /// Tell what was decided.
    Say(Decision),
    /// Nothing more is to be done.
    End {
        /// Whether KSM's settings are back, and nobody stays merged who was to be withdrawn.
        whole: bool,
    },
}

/// Something that was decided.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What.
    pub what: What,
    /// About whom; nobody: the host.
    pub whom: Vec<ProcessId>,
    /// The word of the reason.
    pub reason: Reason,
    /// The reason in words.
    pub why: String,
    /// What it should save.
    pub predicted: Option<Bytes>,
    /// Whether it is carried out.
    pub acted: bool,
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
    What {
        Census = "census",
        Merge = "merge",
        Withdraw = "withdraw",
        Leave = "leave",
        Rest = "rest",
        Yield = "yield",
        Refuse = "refuse",
        Restore = "restore",
    }
}

words! {
    /// Why.
    Reason {
        Arrived = "arrived",
        Filled = "filled",
        Due = "due",
        Profitable = "profitable",
        Unprofitable = "unprofitable",
        Broken = "broken",
        Loses = "loses",
        Budget = "budget",
        Goal = "goal",
        QuietHours = "quiet_hours",
        Pressure = "pressure",
        SlowDown = "slow_down",
        Excluded = "excluded",
        Domain = "domain",
        Refused = "refused",
        Operator = "operator",
        OtherWriter = "other_writer",
        Busy = "busy",
        Failed = "failed",
        Stopped = "stopped",
    }
}

impl Reason {
    /// Why somebody is to be withdrawn, in words.
    pub fn of_leaving(self) -> &'static str {
        match self {
            Self::Operator => "an operator withdraws it",
            Self::Excluded => "it must not be merged any more",
            Self::Domain => "its trust domain has changed, and it may share pages with another",
            Self::Stopped => "the daemon ends",
            Self::Failed => "a merge of it failed half-way",
            _ => "what was enrolled costs more than it gives back",
        }
    }

    /// What of somebody is withdrawn for this reason.
    pub fn extent(self) -> Extent {
        match self {
            Self::Operator | Self::Excluded | Self::Domain => Extent::All,
            _ => Extent::Ours,
        }
    }
}

impl From<Cause> for Reason {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Arrived => Self::Arrived,
            Cause::Filled => Self::Filled,
            Cause::Due => Self::Due,
        }
    }
}
