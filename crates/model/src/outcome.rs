//! What a merge came to, beside what was planned.

use crate::ksm::RMAP_ITEM_BYTES;
use crate::lasting::Seen;
use crate::plan::{Plan, PlannedRange, Target};
use crate::reading::Reading;
use crate::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pid};
use std::collections::BTreeMap;
use std::ops::AddAssign;
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
    /// Looks of ksmd at pages meanwhile, those of others included (`pages_scanned`).
    pub looks: Reading<Pages>,
    /// Regions of the targets that live on, before and while the ranges are enrolled.
    pub regions: (u64, u64),
    /// What became of a few of the pages that should merge.
    pub fates: Fates,
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
    /// Positions in the plan of targets that ended meanwhile.
    pub ended: Vec<usize>,
    /// What could not be enrolled or withdrawn.
    pub missed: Vec<Missed>,
    /// What was changed for the time being and could not be put back, in words.
    pub remains: Vec<String>,
    /// Processes outside the plan that were enrolled meanwhile: KSM's one tree may have merged theirs with the targets'.
    pub bystanders: Reading<u64>,
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
    /// Pages that are mapped to the kernel's page of zeros.
    pub zero: Pages,
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

/// What became of a few of the pages that should merge, evenly spread. Those that are known not to merge are not among
/// them: of processes that ended, withdrawn, not enrolled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fates {
    /// Merged.
    pub merged: Pages,
    /// Written since the census, or given back.
    pub written: Pages,
    /// As they were, and not merged.
    pub alone: Pages,
}

impl AddAssign for Fates {
    fn add_assign(&mut self, other: Self) {
        self.merged += other.merged;
        self.written += other.written;
        self.alone += other.alone;
    }
}

/// Merged pages that were watched.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Watched {
    /// What was seen of a sample of them.
    pub seen: Seen,
    /// Pages of the plan that were withdrawn because they did not stay merged for long enough to pay.
    pub withdrawn: Pages,
}

/// What was to be done to a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// To enrol it.
    Enrol,
    /// To withdraw it.
    Withdraw,
}

/// Something that could not be enrolled or withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missed {
    /// What could not be done.
    pub change: Change,
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
    pub fn met(&self, page_size: PageSize) -> bool {
        let reachable = self.plan.predicted.reach.freed.0.saturating_sub(self.out_of_reach(page_size));
        self.saved().0 * 10 >= reachable * 9
    }

    /// Frames of the prediction that lie in a monitor's memory beside its guest's, where the control socket was used.
    pub(crate) fn out_of_reach(&self, page_size: PageSize) -> u64 {
        let beside = |target: &Target| {
            let guest = target.guest.as_ref().filter(|_| self.plan.whole);
            let outside = |range: &&PlannedRange| guest.is_some_and(|guest| !guest.memory.contains(&range.region));
            target.ranges.iter().filter(outside).map(|range| range.freed.0).sum::<u64>()
        };
        self.plan.targets.iter().map(beside).sum::<u64>() / page_size.bytes()
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
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::domain::Domain;
    use crate::plan::Predicted;
    use crate::process::Process;
    use crate::reading::Absent;
    use crate::savings::Reach;
    use crate::units::ProcessId;

    pub(crate) fn page_size() -> PageSize {
        PageSize::new(4096).unwrap()
    }

    /// Two processes, each with one planned range of 100 pages that stands for 50 frames.
    pub(crate) fn outcome(end: End, saved: u64) -> Outcome {
        let target = |pid| {
            let range = AddressRange { start: 0, end: 100 * 4096 };
            let planned = PlannedRange {
                range,
                region: range,
                pages: Pages(100),
                merging: Pages(100),
                zero: Pages::ZERO,
                freed: Bytes(50 * 4096),
                huge_split: Pages(1),
                enrolled: false,
                late: false,
            };
            Target {
                process: Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied),
                domain: Domain::Host,
                ranges: vec![planned],
                huge: Bytes::ZERO,
                guest: None,
                narrowed: Vec::new(),
            }
        };
        let reach = Reach { freed: Pages(100), scanned: Pages(200), huge_split: Pages(0) };
        let sample = |ms, merged| Sample { at: Duration::from_millis(ms), merged: Pages(merged), ksmd: Duration::ZERO };
        Outcome {
            plan: Plan {
                targets: vec![target(1), target(2)],
                predicted: Predicted { reach, ..Predicted::default() },
                ..Plan::default()
            },
            end,
            before: Found::default(),
            after: Found { merged: Pages(2 * saved), frames: Pages(saved), rmap_items: Pages(200), ..Found::default() },
            timeline: vec![sample(10, 0), sample(20, 60), sample(30, 180), sample(40, 200)],
            census: Duration::ZERO,
            ksmd: Err(Absent::Denied),
            looks: Err(Absent::Denied),
            regions: (0, 0),
            fates: Fates::default(),
            own: Duration::ZERO,
            available: (Err(Absent::Denied), Err(Absent::Denied)),
            huge: (Bytes::ZERO, Ok(Bytes::ZERO)),
            stops: Vec::new(),
            watched: Watched::default(),
            withdrawn: BTreeMap::new(),
            ended: Vec::new(),
            missed: Vec::new(),
            remains: Vec::new(),
            bystanders: Ok(0),
        }
    }

    #[test]
    fn net_pays_for_metadata_and_times_are_of_the_end() {
        let outcome = outcome(End::Settled, 100);
        assert_eq!(outcome.net(page_size()), NetBytes(100 * 4096 - 200 * 64));
        assert_eq!(outcome.time_to(0.5), Some(Duration::from_millis(30)));
        assert_eq!(outcome.time_to(0.9), Some(Duration::from_millis(30)));
        assert_eq!(outcome.time_to(0.99), Some(Duration::from_millis(40)));
        assert_eq!(outcome.saved_at(&outcome.timeline[1]), Pages(30), "60 of 200 merged pages stand for 30 of 100");
        assert!(outcome.met(page_size()));
        let less = Outcome { before: Found { zero: Pages(11), ..Found::default() }, ..outcome };
        assert!(!less.met(page_size()));
    }
}
