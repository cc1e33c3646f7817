//! The stored rows of a host's history. Bytes, unless the name says otherwise; times are Unix times in seconds. Values
//! that could not be read are absent.

use pagefold_daemon::wire::{DecisionReport, StatusReport, WorkloadKind};

/// The state of a host at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistorySample {
    /// The time.
    pub time: f64,
    /// The run of the daemon that recorded it.
    pub run_id: i64,
    /// Gross savings by merging.
    pub saved_gross: Option<u64>,
    /// The same less metadata.
    pub saved_net: Option<i64>,
    /// `MemTotal`.
    pub total: Option<u64>,
    /// `MemAvailable`.
    pub available: Option<u64>,
    /// The goal for `MemAvailable`.
    pub keep_available: Option<u64>,
    /// CPU seconds of ksmd since the start of that run.
    pub ksmd_seconds: Option<f64>,
    /// CPU seconds of the daemon since its start.
    pub pagefold_seconds: Option<f64>,
    /// Mean CPU budget of both together, in percent of one CPU.
    pub bound_percent: f64,
    /// The number of tracked processes.
    pub tracked_processes: u64,
}

impl HistorySample {
    /// The sample of a status, in a run of the daemon.
    pub fn from_status(status: &StatusReport, run_id: i64) -> Self {
        Self {
            time: status.time,
            run_id,
            saved_gross: status.saved.gross,
            saved_net: status.saved.net,
            total: status.memory.total,
            available: status.memory.available,
            keep_available: status.goal.keep_available,
            ksmd_seconds: status.cpu.ksmd.map(|usage| usage.seconds),
            pagefold_seconds: status.cpu.pagefold.map(|usage| usage.seconds),
            bound_percent: status.bounds.cpu_percent,
            tracked_processes: status.tracked_processes.len() as u64 + status.tracked_processes_omitted,
        }
    }

    /// Memory in use: total less available.
    pub fn in_use(&self) -> Option<u64> {
        Some(self.total?.saturating_sub(self.available?))
    }
}

/// A pass of the daemon: a census, and a merge if it is profitable.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HistoryPass {
    /// The run of the daemon that recorded it.
    pub run_id: i64,
    /// Its number in that run, from 1.
    pub number: u64,
    /// When it ended.
    pub ended_at: f64,
    /// Its duration.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// The number of scanned processes.
    pub processes: u64,
    /// The predicted savings of its plan.
    pub predicted: u64,
    /// The measured savings; absent if nothing was merged.
    pub measured: Option<i64>,
    /// Seconds from the first arrival of a process since the previous merge, at most two minutes before the pass, to
    /// the start of the pass. Absent if no process arrived.
    pub arrival_wait_seconds: Option<f64>,
    /// Seconds from its start to 90 % of its final savings.
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

/// The footprint of a tracked process at one time.
#[derive(Clone, Debug, PartialEq)]
pub struct FootprintSample {
    /// The time.
    pub time: f64,
    /// The virtual machine's name, or the program's.
    pub label: String,
    /// Its kind.
    pub kind: WorkloadKind,
    /// Its trust domain.
    pub domain: String,
    /// Its PID.
    pub pid: u32,
    /// Resident memory; not affected by merging.
    pub resident: Option<u64>,
    /// Its footprint: its fair share, or an estimate if that is not read yet.
    pub footprint: Option<u64>,
    /// Estimated savings by merging, from its share.
    pub saved: Option<u64>,
}

/// The rows of a host within a span of time, in ascending order.
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
    /// Footprints of the largest tracked processes.
    pub footprints: Vec<FootprintSample>,
}
