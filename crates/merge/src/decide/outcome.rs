//! What a merge came to, beside what was planned.

use crate::decide::plan::Plan;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::lasting::Seen;
use pagefold_base::reading::Reading;
use pagefold_base::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pid, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The share of what is merged in the end at which a merge counts as done. The last pages may take a scan more.
pub const NEARLY_ALL: f64 = 0.99;

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
    /// What came back by each target that lives on, less ksmd's metadata for it: a frame that several of them map is a
    /// part of each.
    pub nets: BTreeMap<ProcessId, NetBytes>,
    /// Pages of zeros that were freed when huge pages were split, by each target that lives on. They are part of what
    /// came back, and in no counter of KSM: the kernel maps them to its zero page as it splits a huge page for ksmd
    /// (mm/migrate.c, `try_to_map_unused_to_zeropage`, since 6.12).
    pub zeros_by_splitting: BTreeMap<ProcessId, Pages>,
    /// What is merged, over time from the start of the command.
    pub timeline: Vec<Sample>,
    /// From the start of the command to the first enrolment: the census and the plan.
    pub census: Duration,
    /// CPU time of ksmd since the start of the command.
    pub ksmd: Reading<Duration>,
    /// Looks of ksmd at pages meanwhile, those of others included (`pages_scanned`).
    pub looks: Reading<Pages>,
    /// Regions of those that live on, before and while the ranges are enrolled.
    pub regions: Regions,
    /// What became of the contents that should merge.
    pub fates: Fates,
    /// CPU time of this process since it started.
    pub own: Duration,
    /// `MemAvailable` before and after; others use and free memory too.
    pub available: (Reading<Bytes>, Reading<Bytes>),
    /// Memory of the targets and of this process, each before and after.
    pub resident: Reading<Resident>,
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
    /// Processes outside the plan that were enrolled meanwhile: KSM's one tree may have merged theirs with the
    /// targets'.
    pub bystanders: Reading<u64>,
}

/// Anonymous memory before and after, in which merged pages count once for each mapping, and pages of zeros do not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Of the targets: of those that ended, none after.
    pub targets: (Bytes, Bytes),
    /// Of this process.
    pub own: (Bytes, Bytes),
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
    /// Anonymous pages in memory, merged or not.
    pub present: Pages,
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

/// What became of a page that should merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// It is merged.
    Merged,
    /// Its process has ended.
    Ended,
    /// It lies beside the guest's memory, where the control socket does not reach.
    Beside,
    /// It could not be enrolled.
    Missed,
    /// It was withdrawn, because it did not stay merged.
    Withdrawn,
    /// It was written since the census, or given back.
    Written,
    /// It is swapped out.
    Swapped,
    /// It is as it was, and not merged.
    Alone,
    /// It is as it was, and was withdrawn because nothing around it was merged in the end.
    Idle,
}

/// What became of some contents, in frames: all contents of a small plan, a sample of those of a large one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fates {
    /// What they should give back.
    pub frees: f64,
    /// What of that did not come back, by what became of the pages.
    pub lost: BTreeMap<Fate, f64>,
}

impl Fates {
    /// Add a content: the frames that merging its pages should give back, and what became of each page.
    ///
    /// Of `n` pages that should give back `f` frames, `n - f` are the copies that stay, and of `m` that are merged as
    /// large a part stays. A page that is not merged for a reason of its own loses one frame, and what is lost beyond
    /// that is lost by those that are as they were. Where less is lost than pages are, each stands for its share: of
    /// two equal pages that were both written, one frame is lost, by the writing.
    pub fn count(&mut self, frees: f64, pages: &[Fate]) {
        self.frees += frees;
        let merged = pages.iter().filter(|&&fate| fate == Fate::Merged).count();
        if merged == pages.len() {
            return;
        }
        let all = pages.len() as f64;
        let stay = ((all - frees) * merged as f64 / all).ceil();
        let lost = (frees - (merged as f64 - stay)).clamp(0.0, frees);
        let mut causes: BTreeMap<Fate, f64> = BTreeMap::new();
        for &fate in pages.iter().filter(|fate| !matches!(fate, Fate::Merged | Fate::Alone | Fate::Idle)) {
            *causes.entry(fate).or_default() += 1.0;
        }
        let by_cause: f64 = causes.values().sum();
        for (fate, pages) in causes {
            *self.lost.entry(fate).or_default() += pages * (lost / by_cause).min(1.0);
        }
        if lost > by_cause {
            let as_they_were = pages.iter().filter(|fate| matches!(fate, Fate::Alone | Fate::Idle));
            for &fate in as_they_were.clone() {
                *self.lost.entry(fate).or_default() += (lost - by_cause) / as_they_were.clone().count() as f64;
            }
        }
    }
}

/// Merged pages that were watched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Watched {
    /// What was seen of a sample of them.
    pub seen: Seen,
    /// Pages of the plan that were withdrawn because they did not stay merged for long enough to pay.
    pub withdrawn: Pages,
    /// From whom that was.
    pub from: BTreeSet<ProcessId>,
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

    /// The part of [`Self::saved`] that KSM does not count.
    pub fn saved_by_splitting(&self) -> Pages {
        self.zeros_by_splitting.values().copied().sum::<Pages>().min(self.saved())
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
        let beside = self.plan.targets.iter().flat_map(|target| target.beside_its_guest(self.plan.whole));
        beside.map(|range| range.freed.0).sum::<u64>() / page_size.bytes()
    }

    /// When a share of what is merged in the end was reached, by the timeline; `None` if nothing was merged.
    pub fn time_to(&self, share: f64) -> Option<Duration> {
        self.reached(share).map(|sample| sample.at)
    }

    /// From the first enrolment until nearly all is merged ([`NEARLY_ALL`]); `None` if nothing was merged.
    pub fn wall(&self) -> Option<Duration> {
        Some(self.time_to(NEARLY_ALL)?.saturating_sub(self.census))
    }

    /// The first sample at which a share of what is merged in the end was.
    pub(crate) fn reached(&self, share: f64) -> Option<&Sample> {
        let last = self.timeline.last()?.merged.0 as f64;
        self.timeline.iter().find(|sample| last > 0.0 && sample.merged.0 as f64 >= last * share)
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

/// Regions of the processes of a plan, and how many of them are there for what was enrolled or withdrawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Regions {
    /// How many there were.
    pub before: u64,
    /// How many there are.
    pub now: u64,
    /// How many more of them than before begin where a range of the plan begins or ends.
    pub planned: i64,
    /// The same where anything else begins or ends that was withdrawn.
    pub withdrawn: i64,
}

impl Regions {
    /// Compare where regions began and begin, ascending, by process; those are left out that have ended. `withdrawn` tells
    /// what was withdrawn of a process.
    pub fn compare(
        plan: &Plan,
        before: &BTreeMap<ProcessId, Vec<u64>>,
        now: &BTreeMap<ProcessId, Vec<u64>>,
        withdrawn: impl Fn(ProcessId) -> Vec<AddressRange>,
    ) -> Self {
        let mut regions = Self::default();
        for (&process, now) in now {
            let Some(before) = before.get(&process) else { continue };
            let planned = plan.boundaries(process);
            let ends = withdrawn(process).into_iter().flat_map(|range| [range.start, range.end]);
            let ends: BTreeSet<u64> = ends.filter(|end| planned.binary_search(end).is_err()).collect();
            let begins = |starts: &[u64], at: &u64| i64::from(starts.binary_search(at).is_ok());
            let more = |at: &u64| begins(now, at) - begins(before, at);
            regions.before += before.len() as u64;
            regions.now += now.len() as u64;
            regions.planned += planned.iter().map(more).sum::<i64>();
            regions.withdrawn += ends.iter().map(more).sum::<i64>();
        }
        regions
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::decide::plan::{PlannedRange, Predicted, Target, Way};
    use pagefold_base::domain::Domain;
    use pagefold_base::process::Process;
    use pagefold_base::reading::Absent;
    use pagefold_base::savings::Reach;
    use proptest::prelude::*;

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
                way: Way::Within,
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
            nets: BTreeMap::new(),
            zeros_by_splitting: BTreeMap::new(),
            timeline: vec![sample(10, 0), sample(20, 60), sample(30, 180), sample(40, 200)],
            census: Duration::ZERO,
            ksmd: Err(Absent::Denied),
            looks: Err(Absent::Denied),
            regions: Regions::default(),
            fates: Fates::default(),
            own: Duration::ZERO,
            available: (Err(Absent::Denied), Err(Absent::Denied)),
            resident: Err(Absent::Denied),
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

    proptest! {
        #[test]
        fn what_was_lost_of_a_content_is_what_did_not_come_back(
            pages in prop::collection::vec(0usize..6, 1..12),
            kept in 1usize..3,
        ) {
            let fates = [Fate::Merged, Fate::Ended, Fate::Written, Fate::Alone, Fate::Withdrawn, Fate::Idle];
            let pages: Vec<Fate> = pages.into_iter().map(|number| fates[number]).collect();
            let kept = kept.min(pages.len());
            let frees = (pages.len() - kept) as f64;
            let mut sum = Fates::default();
            sum.count(frees, &pages);
            let of = |fate| pages.iter().filter(|&&other| other == fate).count() as f64;
            let lost: f64 = sum.lost.values().sum();
            prop_assert!(sum.lost.values().all(|&lost| lost >= 0.0) && lost <= frees + 1e-9);
            // Each copy that is kept is of at most as many pages as before.
            let merged = of(Fate::Merged);
            let stay = (kept as f64 * merged / pages.len() as f64).ceil();
            prop_assert!((frees - lost - (merged - stay).max(0.0)).abs() < 1e-9, "{:?}", sum);
            prop_assert!(sum.lost.iter().all(|(&fate, &lost)| lost <= of(fate) + 1e-9), "{:?}", sum);
            let others = [Fate::Ended, Fate::Written, Fate::Withdrawn].into_iter().map(of).sum::<f64>();
            let rest = [Fate::Alone, Fate::Idle].into_iter().any(|fate| sum.lost.contains_key(&fate));
            prop_assert_eq!(rest, lost > others);
        }
    }

    #[test]
    fn a_page_of_many_stands_for_its_share() {
        let mut sum = Fates::default();
        let mut count = |fate| sum.count(0.75, &[fate]);
        count(Fate::Merged);
        count(Fate::Written);
        count(Fate::Alone);
        assert_eq!(sum.frees, 2.25);
        assert_eq!(sum.lost, BTreeMap::from([(Fate::Written, 0.75), (Fate::Alone, 0.75)]));
    }
}
