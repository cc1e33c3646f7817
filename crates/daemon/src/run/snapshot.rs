//! How the daemon stands, for whoever asks.

use super::{DaemonSettings, FairShareReading};
use crate::decide::{DaemonState, Decision, DecisionReason};
use pagefold_base::process::Process;
use pagefold_base::{Bytes, NetBytes, PageCounts, Pages, ProcessId, Reading};
use pagefold_census::results::Matrix;
use pagefold_merge::split_zeros::FreedZeroPages;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Between two readings of CPU time that are kept.
const CPU_SAMPLE_INTERVAL: Duration = Duration::from_secs(1);

/// What what is used in a minute is measured over.
const CPU_USAGE_WINDOW: Duration = Duration::from_secs(60);

/// Of how many it is kept who shares with whom: some times those of one census.
const MAX_SHARING_PARTIES: usize = 60;

/// What came of a piece of work, for whoever asks.
#[derive(Debug)]
pub enum WorkResult {
    /// A census was taken.
    Census {
        /// What each process holds.
        page_counts: BTreeMap<ProcessId, PageCounts>,
        /// Processes that were chosen and not seen.
        unscanned_processes: u64,
        /// Who shares with whom.
        matrix: Matrix,
        /// Wall time.
        wall_seconds: f64,
        /// CPU time.
        cpu_time: Duration,
    },
    /// A merge has ended.
    Merge {
        /// Ranges that are enrolled by now of those of whom any was.
        enrolled_ranges: BTreeMap<ProcessId, u64>,
        /// What should have come back.
        predicted: Bytes,
        /// What came back.
        measured_net: NetBytes,
        /// Wall time.
        wall_time: Duration,
        /// CPU time of ksmd and pagefold.
        cpu_time: Duration,
    },
    /// The page tables of a process were walked.
    PageTableWalk {
        /// Whose.
        process: ProcessId,
        /// What it takes by fair share, where that was asked for and can be read.
        fair_share: Option<FairShareReading>,
        /// Zero pages that it maps and KSM does not count, where they were asked for.
        uncounted_zero_pages: Option<Pages>,
        /// CPU time of it.
        cpu_time: Duration,
    },
    /// Something that a killed run had left was put back.
    Undone(String),
    /// Something could not be put back.
    UndoFailed(String),
}

/// A pass: a census, and the merge where there was one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassSummary {
    /// When it ended.
    pub ended_at: SystemTime,
    /// Wall time.
    pub wall_seconds: f64,
    /// CPU time of ksmd and pagefold.
    pub cpu_time: Duration,
    /// Who was looked at.
    pub scanned_processes: u64,
    /// What its plan should give back.
    pub predicted: Bytes,
    /// What came back, if anything was merged.
    pub measured_net: Option<NetBytes>,
}

/// CPU time of somebody.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuUsage {
    /// Since the daemon started.
    pub total: Duration,
    /// Its share of one CPU over the last minute.
    pub last_minute_share: f64,
}

/// A decision that was said.
#[derive(Clone, Debug)]
pub struct LoggedDecision {
    /// When.
    pub logged_at: SystemTime,
    /// About whom: names, or `this host`.
    pub subject: String,
    /// What.
    pub decision: Decision,
}

/// Who shares with whom: of those who were in the latest censuses.
#[derive(Clone, Debug, Default)]
pub struct SharingHistory {
    /// By label, who was in a census last at the end.
    parties: Vec<String>,
    shared_pages: BTreeMap<(String, String), Pages>,
}

impl SharingHistory {
    /// Take note of a census.
    pub(super) fn add_census(&mut self, matrix: &Matrix) {
        self.parties.retain(|label| !matrix.parties.contains(label));
        self.parties.extend(matrix.parties.iter().cloned());
        let more = self.parties.len().saturating_sub(MAX_SHARING_PARTIES);
        let gone: BTreeSet<String> = self.parties.drain(..more).collect();
        self.retain_parties(|label| !gone.contains(label));
        for (one, row) in matrix.parties.iter().zip(&matrix.shared) {
            for (other, pages) in matrix.parties.iter().zip(row) {
                self.shared_pages.insert((one.clone(), other.clone()), *pages);
            }
        }
    }

    /// Forget who does not fit.
    pub(super) fn retain_parties(&mut self, keep: impl Fn(&str) -> bool) {
        self.parties.retain(|label| keep(label));
        self.shared_pages.retain(|(one, other), _| keep(one) && keep(other));
    }

    /// Pages of the first whose content the second has, by label, from the last census in which both were.
    pub fn shared_pages(&self) -> &BTreeMap<(String, String), Pages> {
        &self.shared_pages
    }
}

/// How the daemon stands.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// What was decided and is remembered.
    pub state: DaemonState,
    /// What is in force.
    pub settings: Arc<DaemonSettings>,
    /// When the daemon started.
    pub started_at: SystemTime,
    /// The latest decisions, the latest first.
    pub decisions: VecDeque<LoggedDecision>,
    /// All decisions, by reason.
    pub reasons: BTreeMap<DecisionReason, u64>,
    /// Who is known.
    pub tracked_processes: Vec<Process>,
    /// What the last census of each found.
    pub page_counts: BTreeMap<ProcessId, PageCounts>,
    /// When the last census was taken, and who was not seen in it.
    pub last_census: Option<(SystemTime, u64)>,
    /// Who shares with whom.
    pub sharing: SharingHistory,
    /// Pages of zeros that came back as huge pages of each were split, which KSM does not count: as merges noted them,
    /// and no more than its page tables had when they were walked last.
    pub split_zero_pages: FreedZeroPages,
    /// What each takes by fair share, of those whose page tables were walked.
    pub fair_shares: BTreeMap<ProcessId, FairShareReading>,
    /// Ranges that are enrolled of each, neighbours as one.
    pub enrolled_ranges: BTreeMap<ProcessId, u64>,
    /// Passes so far, and those that merged.
    pub pass_and_merge_counts: (u64, u64),
    /// Wall time and CPU time of all passes.
    pub pass_wall_and_cpu_time: (Duration, Duration),
    /// What all merges should have given back, and did.
    pub predicted_and_measured: (Bytes, NetBytes),
    /// The last pass.
    pub last_pass: Option<PassSummary>,
    /// Whether the host tells of programs as they begin, or why they are found by polling.
    pub exec_events: Reading<()>,
    /// CPU time of ksmd, where it can be read.
    pub ksmd_cpu: Option<CpuUsage>,
    /// CPU time of the daemon.
    pub own_cpu: CpuUsage,
    /// `thp_split_page` and `cow_ksm` when the daemon started.
    pub thp_splits_and_cow_breaks_at_start: (Option<u64>, Option<u64>),
    /// What could not be put back.
    pub failed_undos: Vec<String>,
    /// Whether the work under way has had no answer for so long that it counts as hung.
    pub is_hung: bool,
}

/// Readings of CPU time over the last minute.
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
