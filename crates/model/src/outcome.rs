//! What a merge came to, beside what was planned.

use crate::ksm::RMAP_ITEM_BYTES;
use crate::lasting::Seen;
use crate::plan::Plan;
use crate::reading::Reading;
use crate::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pid};
use std::collections::BTreeMap;
use std::time::Duration;

/// The result of a merge.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was planned.
    pub plan: Plan,
    /// How it ended.
    pub end: End,
    /// What KSM held of the planned ranges before.
    pub before: Found,
    /// What it holds of them now, read with ksmd stopped.
    pub after: Found,
    /// What is merged, over time from the start of the command.
    pub timeline: Vec<Sample>,
    /// From the start of the command to the first enrolment: the census and the plan.
    pub census: Duration,
    /// CPU time of ksmd since the start of the command.
    pub ksmd: Reading<Duration>,
    /// CPU time of this process since it started.
    pub own: Duration,
    /// `MemAvailable` before and after; others use and free memory too.
    pub available: (Reading<Bytes>, Reading<Bytes>),
    /// Huge pages of the targets before and after, in bytes.
    pub huge: (Bytes, Reading<Bytes>),
    /// For how long a thread of a target was stopped, each time.
    pub stops: Vec<Duration>,
    /// What was seen of merged pages while they were watched.
    pub watched: Watched,
    /// What was withdrawn because it did not stay merged: by position of the target in the plan.
    pub withdrawn: BTreeMap<usize, Vec<AddressRange>>,
    /// What could not be enrolled.
    pub missed: Vec<Missed>,
    /// What was changed for the time being and could not be put back, in words.
    pub remains: Vec<String>,
}

/// How a merge ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing more was to come.
    Settled,
    /// The deadline was reached first.
    Deadline,
    /// It was told to stop.
    Stopped,
    /// Somebody else writes KSM's settings; this is what they did.
    Yielded(String),
}

/// What KSM holds of some ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Pages that are mapped to a KSM frame.
    pub merged: Pages,
    /// Those frames.
    pub frames: Pages,
    /// Pages of zeros that KSM mapped to the kernel's zero page, in the whole of the processes.
    pub zero: Pages,
    /// Resident pages that are not merged.
    pub apart: Pages,
    /// Pages ksmd keeps metadata for, in the whole of the processes.
    pub rmap_items: Pages,
}

impl Found {
    /// Frames that are saved.
    pub fn saved(&self) -> Pages {
        self.merged.saturating_sub(self.frames) + self.zero
    }
}

/// What was merged at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Since the start of the command.
    pub at: Duration,
    /// Pages of the targets that were merged since, kept copies included, by the kernel's counters.
    pub merged: Pages,
    /// CPU time of ksmd since the start of the command.
    pub ksmd: Duration,
}

/// Merged pages that were watched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Watched {
    /// What was seen of a sample of them.
    pub seen: Seen,
    /// Pages of the plan that were withdrawn because they did not stay merged for long enough to pay.
    pub withdrawn: Pages,
}

/// Something that could not be enrolled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// Of which process.
    pub pid: Pid,
    /// Its name.
    pub comm: String,
    /// Where; `None` for all of it.
    pub range: Option<AddressRange>,
    /// Why.
    pub why: String,
}

impl Outcome {
    /// Frames that came back.
    pub fn saved(&self) -> Pages {
        self.after.saved().saturating_sub(self.before.saved())
    }

    /// Bytes that came back less ksmd's metadata for the targets.
    pub fn net(&self, page_size: PageSize) -> NetBytes {
        let metadata = self.after.rmap_items.saturating_sub(self.before.rmap_items).0 * RMAP_ITEM_BYTES;
        NetBytes(page_size.of(self.saved()).0 as i64 - metadata as i64)
    }

    /// Whether at least nine tenths of what was predicted came back.
    pub fn met(&self) -> bool {
        self.saved().0 * 10 >= self.plan.predicted.reach.freed.0 * 9
    }

    /// When a share of what is merged in the end was reached, by the timeline; `None` if nothing was merged.
    pub fn time_to(&self, share: f64) -> Option<Duration> {
        let last = self.timeline.last()?.merged.0 as f64;
        if last == 0.0 {
            return None;
        }
        self.timeline.iter().find(|sample| sample.merged.0 as f64 >= last * share).map(|sample| sample.at)
    }

    /// What was saved at a time, as far as it can be told: each merged page stands for what one does in the end.
    pub fn saved_at(&self, sample: &Sample) -> Pages {
        match self.timeline.last() {
            Some(last) if last.merged.0 > 0 => {
                let share = u128::from(self.saved().0) * u128::from(sample.merged.0) / u128::from(last.merged.0);
                Pages(share as u64)
            }
            _ => Pages::ZERO,
        }
    }

    /// Why what was reached is not what was predicted: pages by reason, as far as they can be told apart.
    ///
    /// `predicted - reached` is the sum of the savings that the reasons account for; where a partner went away, one
    /// page that changed takes a second one's saving with it, which is why the last line is a rest.
    pub fn differences(&self) -> Vec<(&'static str, i64)> {
        let predicted = self.plan.predicted.reach.freed.0 as i64;
        let reached = self.saved().0 as i64;
        let planned: u64 = self.plan.targets.iter().flat_map(|target| &target.ranges).map(|range| range.pages.0).sum();
        let resident = self.after.merged + self.after.apart;
        let zero = self.after.zero.saturating_sub(self.before.zero);
        let left = planned as i64 - (resident.0.saturating_sub(self.before.merged.0) + zero.0) as i64;
        let withdrawn = self.watched.withdrawn.0 as i64;
        let mut reasons = Vec::new();
        let mut rest = predicted - reached;
        for (why, pages) in [
            ("did not stay merged, and were withdrawn", withdrawn),
            ("left memory, or came to it, since the census", left),
        ] {
            if pages != 0 {
                reasons.push((why, pages));
                rest -= pages;
            }
        }
        if rest != 0 {
            let why = if rest > 0 {
                "were written since the census, or lost their partner, or were not reached in time"
            } else {
                "were merged beyond the prediction: with pages outside of the plan, or with contents that came since"
            };
            reasons.push((why, rest));
        }
        reasons
    }
}
