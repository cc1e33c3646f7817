//! How the daemon stands, for whoever asks.

use super::{Fair, Settings};
use crate::decide::{Decision, Reason, State};
use pagefold_base::process::Process;
use pagefold_base::{Bytes, Counts, NetBytes, Pages, ProcessId, Reading};
use pagefold_census::results::Matrix;
use pagefold_merge::splitting::Freed;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// Between two readings of CPU time that are kept.
const SECOND: Duration = Duration::from_secs(1);

/// What what is used in a minute is measured over.
const MINUTE: Duration = Duration::from_secs(60);

/// Of how many it is kept who shares with whom: some times those of one census.
const KEPT: usize = 60;

/// What came of a piece of work, for whoever asks.
#[derive(Debug)]
pub enum Told {
    /// A census was taken.
    Census {
        /// What each process holds.
        counts: BTreeMap<ProcessId, Counts>,
        /// Processes that were chosen and not seen.
        unseen: u64,
        /// Who shares with whom.
        matrix: Matrix,
        /// Wall time.
        seconds: f64,
        /// CPU time.
        cost: Duration,
    },
    /// A merge has ended.
    Merge {
        /// Ranges that are enrolled by now of those of whom any was.
        ranges: BTreeMap<ProcessId, u64>,
        /// What should have come back.
        predicted: Bytes,
        /// What came back.
        net: NetBytes,
        /// Wall time.
        seconds: Duration,
        /// CPU time of ksmd and pagefold.
        cost: Duration,
    },
    /// The page tables of a process were walked.
    Walked {
        /// Whose.
        process: ProcessId,
        /// What it takes by fair share, where that was asked for and can be read.
        fair: Option<Fair>,
        /// Zero pages that it maps and KSM does not count, where they were asked for.
        uncounted_zeros: Option<Pages>,
        /// CPU time of it.
        cost: Duration,
    },
    /// Something that a killed run had left was put back.
    PutBack(String),
    /// Something could not be put back.
    Remains(String),
}

/// A pass: a census, and the merge where there was one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pass {
    /// When it ended.
    pub at: SystemTime,
    /// Wall time.
    pub seconds: f64,
    /// CPU time of ksmd and pagefold.
    pub cost: Duration,
    /// Who was looked at.
    pub processes: u64,
    /// What its plan should give back.
    pub predicted: Bytes,
    /// What came back, if anything was merged.
    pub net: Option<NetBytes>,
}

/// CPU time of somebody.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Used {
    /// Since the daemon started.
    pub all: Duration,
    /// Its share of one CPU over the last minute.
    pub share: f64,
}

/// A decision that was said.
#[derive(Clone, Debug)]
pub struct Said {
    /// When.
    pub at: SystemTime,
    /// About whom: names, or `this host`.
    pub whom: String,
    /// What.
    pub decision: Decision,
}

/// Who shares with whom: of those who were in the latest censuses.
#[derive(Clone, Debug, Default)]
pub struct Shared {
    /// By label, who was in a census last at the end.
    parties: Vec<String>,
    pages: BTreeMap<(String, String), Pages>,
}

impl Shared {
    /// Take note of a census.
    pub(super) fn add(&mut self, matrix: &Matrix) {
        self.parties.retain(|label| !matrix.parties.contains(label));
        self.parties.extend(matrix.parties.iter().cloned());
        let more = self.parties.len().saturating_sub(KEPT);
        let gone: BTreeSet<String> = self.parties.drain(..more).collect();
        self.retain(|label| !gone.contains(label));
        for (one, row) in matrix.parties.iter().zip(&matrix.shared) {
            for (other, pages) in matrix.parties.iter().zip(row) {
                self.pages.insert((one.clone(), other.clone()), *pages);
            }
        }
    }

    /// Forget who does not fit.
    pub(super) fn retain(&mut self, fits: impl Fn(&str) -> bool) {
        self.parties.retain(|label| fits(label));
        self.pages.retain(|(one, other), _| fits(one) && fits(other));
    }

    /// Pages of the first whose content the second has, by label, from the last census in which both were.
    pub fn pages(&self) -> &BTreeMap<(String, String), Pages> {
        &self.pages
    }
}

/// How the daemon stands.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// What was decided and is remembered.
    pub state: State,
    /// What is in force.
    pub settings: Arc<Settings>,
    /// When the daemon started.
    pub started: SystemTime,
    /// The latest decisions, the latest first.
    pub decisions: VecDeque<Said>,
    /// All decisions, by reason.
    pub reasons: BTreeMap<Reason, u64>,
    /// Who is known.
    pub who: Vec<Process>,
    /// What the last census of each found.
    pub counts: BTreeMap<ProcessId, Counts>,
    /// When the last census was taken, and who was not seen in it.
    pub census: Option<(SystemTime, u64)>,
    /// Who shares with whom.
    pub shared: Shared,
    /// Pages of zeros that came back as huge pages of each were split, which KSM does not count: as merges noted them,
    /// and no more than its page tables had when they were walked last.
    pub by_splitting: Freed,
    /// What each takes by fair share, of those whose page tables were walked.
    pub fair: BTreeMap<ProcessId, Fair>,
    /// Ranges that are enrolled of each, neighbours as one.
    pub ranges: BTreeMap<ProcessId, u64>,
    /// Passes so far, and those that merged.
    pub passes: (u64, u64),
    /// Wall time and CPU time of all passes.
    pub took: (Duration, Duration),
    /// What all merges should have given back, and did.
    pub reached: (Bytes, NetBytes),
    /// The last pass.
    pub last: Option<Pass>,
    /// Whether the host tells of programs as they begin, or why they are found by polling.
    pub programs: Reading<()>,
    /// CPU time of ksmd, where it can be read.
    pub ksmd: Option<Used>,
    /// CPU time of the daemon.
    pub own: Used,
    /// `thp_split_page` and `cow_ksm` when the daemon started.
    pub before: (Option<u64>, Option<u64>),
    /// What could not be put back.
    pub remains: Vec<String>,
    /// Whether the work under way has had no answer for so long that it counts as hung.
    pub hung: bool,
}

/// Readings of CPU time over the last minute.
#[derive(Default)]
pub(super) struct Meter {
    first: Option<Duration>,
    last: VecDeque<(Duration, Duration)>,
}

impl Meter {
    pub fn read(&mut self, now: Duration, used: Duration) {
        self.first.get_or_insert(used);
        if self.last.back().is_none_or(|(at, _)| now >= *at + SECOND) {
            self.last.push_back((now, used));
        }
        while self.last.front().is_some_and(|(at, _)| now > *at + MINUTE) {
            self.last.pop_front();
        }
    }

    pub fn used(&self) -> Option<Used> {
        let (first, (from, before), (to, after)) = (self.first?, *self.last.front()?, *self.last.back()?);
        let elapsed = (to - from).as_secs_f64();
        let share = if elapsed > 0.0 { after.saturating_sub(before).as_secs_f64() / elapsed } else { 0.0 };
        Some(Used { all: after.saturating_sub(first), share })
    }
}
