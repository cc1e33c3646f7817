//! A snapshot of the daemon's state for status requests.

use super::{DaemonSettings, FairShareReading};
use crate::decide::{DaemonState, Decision, DecisionReason};
use pagefold_base::process::Process;
use pagefold_base::{Bytes, NetBytes, PageCounts, Pages, ProcessId, Reading};
use pagefold_census::results::Matrix;
use pagefold_merge::split_zeros::FreedZeroPages;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Interval between two CPU time samples that are kept.
const CPU_SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// Window of the CPU usage over the last minute.
const CPU_USAGE_WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of parties in the sharing history: a few times those of one census.
const MAX_SHARING_PARTIES: usize = 60;

/// A report of the worker for the status.
#[derive(Debug)]
pub enum WorkResult {
    /// A census was taken.
    Census {
        /// Page counts of each process.
        page_counts: BTreeMap<ProcessId, PageCounts>,
        /// Number of selected processes that were not scanned.
        unscanned_processes: u64,
        /// The sharing matrix.
        matrix: Matrix,
        /// Wall time.
        wall_seconds: f64,
        /// CPU time.
        cpu_time: Duration,
    },
    /// A merge has ended.
    Merge {
        /// Enrolled ranges of each process with any.
        enrolled_ranges: BTreeMap<ProcessId, u64>,
        /// Predicted savings.
        predicted: Bytes,
        /// Measured net savings.
        measured_net: NetBytes,
        /// Wall time.
        wall_time: Duration,
        /// CPU time of ksmd and pagefold.
        cpu_time: Duration,
    },
    /// The page tables of a process were walked.
    PageTableWalk {
        /// The process.
        process: ProcessId,
        /// Its fair share, if it was requested and could be read.
        fair_share: Option<FairShareReading>,
        /// Zero pages that it maps and KSM does not count, if they were requested.
        uncounted_zero_pages: Option<Pages>,
        /// CPU time of the walk.
        cpu_time: Duration,
    },
    /// The record of enrollments was compared with the host.
    Adoption {
        /// Enrolled ranges of each process that is taken over.
        enrolled_ranges: BTreeMap<ProcessId, u64>,
        /// What is no longer enrolled, with reasons.
        dropped: Vec<String>,
    },
    /// What the daemon has observed cannot be passed on to the next one, or could not be taken over; with the reason.
    StateNotPassedOn(String),
    /// A change that a killed run had left was undone.
    Undone(String),
    /// A change could not be undone.
    UndoFailed(String),
}

/// A pass: a census and, if anything was profitable, the merge.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSummary {
    /// Time of its end.
    pub ended_at: SystemTime,
    /// Wall time.
    pub wall_seconds: f64,
    /// CPU time of ksmd and pagefold.
    pub cpu_time: Duration,
    /// Number of scanned processes.
    pub scanned_processes: u64,
    /// Predicted savings of its plan.
    pub predicted: Bytes,
    /// Measured net savings, if anything was merged.
    pub measured_net: Option<NetBytes>,
}

/// CPU usage of ksmd or of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuUsage {
    /// Since the daemon started.
    pub total: Duration,
    /// Share of one CPU over the last minute.
    pub last_minute_share: f64,
}

/// A reported decision.
#[derive(Clone, Debug)]
pub struct LoggedDecision {
    /// Time of the report.
    pub logged_at: SystemTime,
    /// The labels of the processes it is about, or `this host`.
    pub subject: String,
    /// The decision.
    pub decision: Decision,
}

/// Which parties share pages, for the parties of the latest censuses.
#[derive(Clone, Debug, Default)]
pub struct SharingHistory {
    /// Labels of the parties; those of the latest census come last.
    parties: Vec<String>,
    shared_pages: BTreeMap<(String, String), Pages>,
}

impl SharingHistory {
    /// Add the sharing matrix of a census.
    pub(super) fn add_census(&mut self, matrix: &Matrix) {
        self.parties.retain(|label| !matrix.parties.contains(label));
        self.parties.extend(matrix.parties.iter().cloned());
        let excess = self.parties.len().saturating_sub(MAX_SHARING_PARTIES);
        let removed: BTreeSet<String> = self.parties.drain(..excess).collect();
        self.retain_parties(|label| !removed.contains(label));
        for (one, row) in matrix.parties.iter().zip(&matrix.shared) {
            for (other, pages) in matrix.parties.iter().zip(row) {
                self.shared_pages.insert((one.clone(), other.clone()), *pages);
            }
        }
    }

    /// Forget parties that do not satisfy `keep`.
    pub(super) fn retain_parties(&mut self, keep: impl Fn(&str) -> bool) {
        self.parties.retain(|label| keep(label));
        self.shared_pages.retain(|(one, other), _| keep(one) && keep(other));
    }

    /// Pages of the first party whose content the second party has too, by label, from the last census with both.
    pub fn shared_pages(&self) -> &BTreeMap<(String, String), Pages> {
        &self.shared_pages
    }
}

/// State of the daemon at one time.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The state of its decisions.
    pub state: DaemonState,
    /// The settings in force.
    pub settings: Arc<DaemonSettings>,
    /// When the daemon started.
    pub started_at: SystemTime,
    /// The latest decisions, the latest first.
    pub decisions: VecDeque<LoggedDecision>,
    /// All decisions, by reason.
    pub reasons: BTreeMap<DecisionReason, u64>,
    /// The tracked processes.
    pub tracked_processes: Vec<Process>,
    /// Page counts of each process from its last census.
    pub page_counts: BTreeMap<ProcessId, PageCounts>,
    /// Time of the last census, and the number of selected processes that were not scanned.
    pub last_census: Option<(SystemTime, u64)>,
    /// Which parties share pages.
    pub sharing: SharingHistory,
    /// Zero pages freed when huge pages of each process were split, which KSM does not count. As noted by merges,
    /// limited to the zero pages found in the last walk of its page tables.
    pub split_zero_pages: FreedZeroPages,
    /// Fair shares of the processes whose page tables were walked.
    pub fair_shares: BTreeMap<ProcessId, FairShareReading>,
    /// Enrolled ranges of each process, with adjacent ranges counted as one.
    pub enrolled_ranges: BTreeMap<ProcessId, u64>,
    /// Number of passes, and of those that merged.
    pub pass_and_merge_counts: (u64, u64),
    /// Wall time and CPU time of all passes.
    pub pass_wall_and_cpu_time: (Duration, Duration),
    /// Predicted and measured net savings of all merges.
    pub predicted_and_measured: (Bytes, NetBytes),
    /// The last pass.
    pub last_pass: Option<PassSummary>,
    /// Whether the host reports new programs, or why they are found by polling.
    pub exec_events: Reading<()>,
    /// CPU time of ksmd, where it can be read.
    pub ksmd_cpu: Option<CpuUsage>,
    /// CPU time of the daemon.
    pub own_cpu: CpuUsage,
    /// `thp_split_page` and `cow_ksm` when the daemon started.
    pub thp_splits_and_cow_breaks_at_start: (Option<u64>, Option<u64>),
    /// Changes that could not be undone.
    pub failed_undos: Vec<String>,
    /// Whether the running task counts as hung, because the host has not answered for too long.
    pub is_hung: bool,
}

/// CPU time samples over the last minute.
#[derive(Default)]
pub(super) struct CpuMeter {
    first_reading: Option<Duration>,
    readings: VecDeque<(Duration, Duration)>,
}

impl CpuMeter {
    pub fn record(&mut self, now: Duration, cpu_time: Duration) {
        self.first_reading.get_or_insert(cpu_time);
        if self.readings.back().is_none_or(|(at, _)| now >= *at + CPU_SAMPLE_INTERVAL) {
            self.readings.push_back((now, cpu_time));
        }
        while self.readings.front().is_some_and(|(at, _)| now > *at + CPU_USAGE_WINDOW) {
            self.readings.pop_front();
        }
    }

    pub fn usage(&self) -> Option<CpuUsage> {
        let (first, (from, before), (to, after)) =
            (self.first_reading?, *self.readings.front()?, *self.readings.back()?);
        let elapsed = (to - from).as_secs_f64();
        let share = if elapsed > 0.0 { after.saturating_sub(before).as_secs_f64() / elapsed } else { 0.0 };
        Some(CpuUsage { total: after.saturating_sub(first), last_minute_share: share })
    }
}
