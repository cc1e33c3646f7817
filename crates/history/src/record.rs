//! What is kept of a host over time, as it comes from a database. Bytes, unless the name says otherwise; times are Unix
//! times in seconds. What could not be read is absent.

use pagefold_daemon::wire::{DecisionReport, StatusReport, WorkloadKind};

/// How a host stood at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistorySample {
    /// When.
    pub time: f64,
    /// Which life of the daemon it belongs to.
    pub run_id: i64,
    /// What merging saved, gross.
    pub saved_gross: Option<u64>,
    /// The same less metadata.
    pub saved_net: Option<i64>,
    /// `MemTotal`.
    pub total: Option<u64>,
    /// `MemAvailable`.
    pub available: Option<u64>,
    /// `MemAvailable` that was to be kept.
    pub keep_available: Option<u64>,
    /// CPU seconds of ksmd since that daemon started.
    pub ksmd_seconds: Option<f64>,
    /// CPU seconds of the daemon since it started.
    pub pagefold_seconds: Option<f64>,
    /// Percent of one CPU that both may use together on average.
    pub bound_percent: f64,
    /// Processes that were managed.
    pub tracked_processes: u64,
}

impl HistorySample {
    /// Of a status, in a life of the daemon.
    pub fn from_status(status: &StatusReport, run_id: i64) -> Self {
        Self {
            time: status.time,
            run_id,
            saved_gross: status.saved.gross,
            saved_net: status.saved.net,
            total: status.memory.total,
            available: status.memory.available,
            keep_available: status.goal.keep_available,
            ksmd_seconds: status.cpu.ksmd.map(|used| used.seconds),
            pagefold_seconds: status.cpu.pagefold.map(|used| used.seconds),
            bound_percent: status.bounds.cpu_percent,
            tracked_processes: status.members.len() as u64 + status.members_left_out,
        }
    }

    /// Memory in use: what is not available.
    pub fn in_use(&self) -> Option<u64> {
        Some(self.total?.saturating_sub(self.available?))
    }
}

/// A pass of the daemon: a census, and the merge where anything paid.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistoryPass {
    /// Which life of the daemon it belongs to.
    pub run_id: i64,
    /// Its number there, from 1.
    pub number: u64,
    /// When it ended.
    pub ended_at: f64,
    /// How long it took.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// Processes that were looked at.
    pub processes: u64,
    /// What its plan should save.
    pub predicted: u64,
    /// What it saved; absent where nothing was merged.
    pub measured: Option<i64>,
    /// Seconds before its start at which the first of those was seen who came since the merge before, two minutes
    /// before it at most. Absent where nobody came.
    pub arrival_wait_seconds: Option<f64>,
    /// Seconds from its start until 90 % of what was saved in the end was saved.
    pub seconds_to_90: Option<f64>,
    /// Seconds from its start to 99 %.
    pub seconds_to_99: Option<f64>,
}

impl HistoryPass {
    /// When it began.
    pub fn started_at(&self) -> f64 {
        self.ended_at - self.seconds
    }
}

/// What a member took at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct FootprintSample {
    /// When.
    pub time: f64,
    /// The virtual machine's name, or the program's.
    pub label: String,
    /// What it is.
    pub kind: WorkloadKind,
    /// Its trust domain.
    pub domain: String,
    /// Its number.
    pub pid: u32,
    /// Resident memory, blind to merging.
    pub resident: Option<u64>,
    /// What it took: its fair share, or an estimate while that was not read.
    pub footprint: Option<u64>,
    /// An estimate of what merging saved for it, by its share.
    pub saved: Option<u64>,
}

/// What was kept of a host within a span of time, the oldest first.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistorySpan {
    /// The host's name.
    pub host: String,
    /// Samples.
    pub samples: Vec<HistorySample>,
    /// Passes that ended in it.
    pub passes: Vec<HistoryPass>,
    /// Decisions.
    pub decisions: Vec<DecisionReport>,
    /// Footprints of the largest members.
    pub footprints: Vec<FootprintSample>,
}
