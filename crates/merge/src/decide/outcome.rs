//! The outcome of a merge, beside its plan.

use crate::decide::plan::MergePlan;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::merge_lifetime::LifetimeStats;
use pagefold_base::reading::Reading;
use pagefold_base::units::{AddressRange, Bytes, NetBytes, PageSize, Pages, Pid, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The result of a merge.
#[derive(Clone, Debug)]
pub struct MergeOutcome {
    /// The plan.
    pub plan: MergePlan,
    /// How it ended.
    pub end: MergeEnd,
    /// KSM's pages in the planned ranges before.
    pub before: KsmPageCounts,
    /// KSM's pages in them now, read with ksmd stopped.
    pub after: KsmPageCounts,
    /// Net savings of each target that still runs, less ksmd's metadata for it. A frame that several targets map is
    /// divided among them.
    pub nets: BTreeMap<ProcessId, NetBytes>,
    /// Zero pages that were freed when huge pages were split, by each target that still runs. They are part of the
    /// savings, and in no counter of KSM: the kernel maps them to its zero page as it splits a huge page for ksmd
    /// (mm/migrate.c, `try_to_map_unused_to_zeropage`, since 6.12).
    pub zeros_by_splitting: BTreeMap<ProcessId, Pages>,
    /// Merged pages over time from the start of the command.
    pub timeline: Vec<TimelinePoint>,
    /// From the start of the command to the first enrollment: the census and the plan.
    pub census_time: Duration,
    /// CPU time of ksmd since the start of the command.
    pub ksmd_time: Reading<Duration>,
    /// ksmd's page visits meanwhile, those of other processes included (`pages_scanned`).
    pub pages_scanned: Reading<Pages>,
    /// Regions that the targets that still run have more than before, while the ranges are enrolled.
    pub regions_added: i64,
    /// The fates of the contents that should merge.
    pub fates: FrameFates,
    /// CPU time of this process since it started.
    pub own_cpu_time: Duration,
    /// `MemAvailable` before and after; other processes use and free memory too.
    pub available: (Reading<Bytes>, Reading<Bytes>),
    /// Memory of the targets and of this process, each before and after.
    pub resident: Reading<Resident>,
    /// Huge pages of the targets before and after, in bytes.
    pub huge_page_bytes: (Bytes, Reading<Bytes>),
    /// How long a thread of a target was stopped, for each stop.
    pub stops: Vec<Duration>,
    /// Observations of merged pages while they were watched.
    pub merged_watch: MergedPagesWatch,
    /// Ranges that were unenrolled because they did not stay merged, by position of the target in the plan.
    pub unenrolled: BTreeMap<usize, Vec<AddressRange>>,
    /// Positions in the plan of targets that ended meanwhile.
    pub ended_targets: Vec<usize>,
    /// Ranges that could not be enrolled or unenrolled.
    pub failed_changes: Vec<FailedChange>,
    /// Temporary changes that could not be undone, as messages.
    pub not_restored: Vec<String>,
    /// Processes outside the plan that were enrolled meanwhile: KSM's one tree may have merged their pages with the
    /// targets'.
    pub bystanders: Reading<u64>,
}

/// Anonymous memory before and after. Merged pages count once for each mapping; zero pages do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Of the targets: before, of all; after, of those that still run.
    pub targets: (Bytes, Bytes),
    /// Of this process.
    pub own: (Bytes, Bytes),
}

/// How a merge ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergeEnd {
    /// No more pages were expected to merge.
    Settled,
    /// The deadline was reached first.
    Deadline,
    /// The operator stopped it.
    Stopped,
    /// Another program writes KSM's settings; the text says which.
    SettingsOverwritten(String),
}

/// KSM's pages in some ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KsmPageCounts {
    /// Pages that are mapped to a KSM frame.
    pub merged: Pages,
    /// The KSM frames of these pages.
    pub frames: Pages,
    /// Pages that are mapped to the kernel's zero page.
    pub zero: Pages,
    /// Pages with ksmd metadata, in the whole processes.
    pub rmap_items: Pages,
    /// Anonymous pages in memory, merged or not.
    pub present: Pages,
}

impl KsmPageCounts {
    /// Frames that are saved.
    pub fn saved(&self) -> Pages {
        self.merged.saturating_sub(self.frames) + self.zero
    }
}

/// The merged pages at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimelinePoint {
    /// Since the start of the command.
    pub at: Duration,
    /// Pages of the targets merged since the start, kept copies included, by the kernel's counters.
    pub merged: Pages,
    /// CPU time of ksmd since the start of the command.
    pub ksmd_time: Duration,
}

/// The fate of a page that should merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageFate {
    /// It is merged.
    Merged,
    /// Its process has ended.
    ProcessEnded,
    /// It could not be enrolled.
    NotEnrolled,
    /// It was unenrolled because it did not stay merged.
    Unenrolled,
    /// It was written or freed since the census.
    Written,
    /// It is swapped out.
    Swapped,
    /// It is unchanged, and not merged.
    UnchangedUnmerged,
    /// It is unchanged, and was unenrolled because no page around it merged in the end.
    UnenrolledUnmerged,
}

/// The fates of some contents, in frames: all contents of a small plan, a sample of those of a large one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FrameFates {
    /// The frames that they should free.
    pub predicted_frames: f64,
    /// The frames that were not freed, by the fate of the pages.
    pub missing_frames: BTreeMap<PageFate, f64>,
}

impl FrameFates {
    /// Add a content: the frames that merging its pages should free, and the fate of each page.
    ///
    /// If `n` pages should free `f` frames, `n - f` copies stay; of `m` merged pages the same share stays. A page that
    /// is not merged for a known cause loses one frame. Losses beyond that are assigned to the unchanged pages. If
    /// fewer frames are lost than pages have causes, each page counts for its share: of two equal pages that were both
    /// written, one frame is lost, by the writing.
    pub fn add_content(&mut self, predicted_frames: f64, pages: &[PageFate]) {
        self.predicted_frames += predicted_frames;
        let merged = pages.iter().filter(|&&fate| fate == PageFate::Merged).count();
        if merged == pages.len() {
            return;
        }
        let page_count = pages.len() as f64;
        let kept_copies = ((page_count - predicted_frames) * merged as f64 / page_count).ceil();
        let lost_frames = (predicted_frames - (merged as f64 - kept_copies)).clamp(0.0, predicted_frames);
        let mut causes: BTreeMap<PageFate, f64> = BTreeMap::new();
        for &fate in pages.iter().filter(|fate| {
            !matches!(fate, PageFate::Merged | PageFate::UnchangedUnmerged | PageFate::UnenrolledUnmerged)
        }) {
            *causes.entry(fate).or_default() += 1.0;
        }
        let explained_frames: f64 = causes.values().sum();
        for (fate, count) in causes {
            *self.missing_frames.entry(fate).or_default() += count * (lost_frames / explained_frames).min(1.0);
        }
        if lost_frames > explained_frames {
            let unchanged_pages =
                pages.iter().filter(|fate| matches!(fate, PageFate::UnchangedUnmerged | PageFate::UnenrolledUnmerged));
            for &fate in unchanged_pages.clone() {
                *self.missing_frames.entry(fate).or_default() +=
                    (lost_frames - explained_frames) / unchanged_pages.clone().count() as f64;
            }
        }
    }
}

/// Merged pages that were watched.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MergedPagesWatch {
    /// Observations of a sample of them.
    pub lifetime_stats: LifetimeStats,
    /// Pages of the plan that were unenrolled because they did not stay merged for long enough.
    pub unenrolled_pages: Pages,
    /// The processes that they belong to.
    pub unenrolled_from: BTreeSet<ProcessId>,
}

/// An attempted change of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnrollChange {
    /// Enroll it.
    Enroll,
    /// Unenroll it.
    Unenroll,
}

/// A change that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedChange {
    /// The change that failed.
    pub change: EnrollChange,
    /// The process.
    pub pid: Pid,
    /// Its name.
    pub comm: String,
    /// The range; `None` for the whole process.
    pub range: Option<AddressRange>,
    /// The reason.
    pub why: String,
}

impl MergeOutcome {
    /// Frames that were freed.
    pub fn saved(&self) -> Pages {
        self.after.saved().saturating_sub(self.before.saved())
    }

    /// The part of [`Self::saved`] that KSM does not count.
    pub fn saved_by_splitting(&self) -> Pages {
        self.zeros_by_splitting.values().copied().sum::<Pages>().min(self.saved())
    }

    /// Freed bytes less ksmd's metadata for the targets.
    pub fn net(&self, page_size: PageSize) -> NetBytes {
        let metadata = self.after.rmap_items.saturating_sub(self.before.rmap_items).0 * RMAP_ITEM_BYTES;
        NetBytes(page_size.bytes_of(self.saved()).0 as i64 - metadata as i64)
    }

    /// Whether at least nine tenths of the predicted savings were reached.
    pub fn met_prediction(&self) -> bool {
        self.saved().0 * 10 >= self.plan.predicted.effect.freed_frames.0 * 9
    }

    /// When a share of the final merged pages was reached, by the timeline; `None` if no page was merged.
    pub fn time_to(&self, share: f64) -> Option<Duration> {
        let final_pages = self.timeline.last()?.merged.0 as f64;
        let is_reached = |sample: &&TimelinePoint| final_pages > 0.0 && sample.merged.0 as f64 >= final_pages * share;
        Some(self.timeline.iter().find(is_reached)?.at)
    }

    /// The estimated savings at a time: each merged page counts for its share of the final savings.
    pub fn saved_at(&self, sample: &TimelinePoint) -> Pages {
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
    use crate::decide::plan::{EnrollMethod, PlanTarget, PlannedRange, Prediction};
    use pagefold_base::domain::TrustDomain;
    use pagefold_base::process::Process;
    use pagefold_base::reading::Absent;
    use pagefold_base::savings::MergeEffect;
    use proptest::prelude::*;

    pub(crate) fn page_size() -> PageSize {
        PageSize::new(4096).unwrap()
    }

    /// Two processes, each with one planned range of 100 pages that should free 50 frames.
    pub(crate) fn outcome(end: MergeEnd, saved: u64) -> MergeOutcome {
        let target = |pid| {
            let range = AddressRange { start: 0, end: 100 * 4096 };
            let planned = PlannedRange {
                range,
                region: range,
                pages: Pages(100),
                merging: Pages(100),
                zero: Pages::ZERO,
                freed_bytes: Bytes(50 * 4096),
                split_huge_pages: Pages(1),
                enrolled: false,
                late: false,
            };
            PlanTarget {
                process: Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied),
                domain: TrustDomain::Host,
                ranges: vec![planned],
                huge_page_bytes: Bytes::ZERO,
                enroll_method: EnrollMethod::InProcess,
            }
        };
        let effect = MergeEffect { freed_frames: Pages(100), scanned_pages: Pages(200), split_huge_pages: Pages(0) };
        let sample = |ms, merged| TimelinePoint {
            at: Duration::from_millis(ms),
            merged: Pages(merged),
            ksmd_time: Duration::ZERO,
        };
        MergeOutcome {
            plan: MergePlan {
                targets: vec![target(1), target(2)],
                predicted: Prediction { effect, ..Prediction::default() },
                ..MergePlan::default()
            },
            end,
            before: KsmPageCounts::default(),
            after: KsmPageCounts {
                merged: Pages(2 * saved),
                frames: Pages(saved),
                rmap_items: Pages(200),
                ..KsmPageCounts::default()
            },
            nets: BTreeMap::new(),
            zeros_by_splitting: BTreeMap::new(),
            timeline: vec![sample(10, 0), sample(20, 60), sample(30, 180), sample(40, 200)],
            census_time: Duration::ZERO,
            ksmd_time: Err(Absent::Denied),
            pages_scanned: Err(Absent::Denied),
            regions_added: 0,
            fates: FrameFates::default(),
            own_cpu_time: Duration::ZERO,
            available: (Err(Absent::Denied), Err(Absent::Denied)),
            resident: Err(Absent::Denied),
            huge_page_bytes: (Bytes::ZERO, Ok(Bytes::ZERO)),
            stops: Vec::new(),
            merged_watch: MergedPagesWatch::default(),
            unenrolled: BTreeMap::new(),
            ended_targets: Vec::new(),
            failed_changes: Vec::new(),
            not_restored: Vec::new(),
            bystanders: Ok(0),
        }
    }

    #[test]
    fn net_subtracts_metadata_and_times_follow_the_timeline() {
        let outcome = outcome(MergeEnd::Settled, 100);
        assert_eq!(outcome.net(page_size()), NetBytes(100 * 4096 - 200 * 64));
        assert_eq!(outcome.time_to(0.5), Some(Duration::from_millis(30)));
        assert_eq!(outcome.time_to(0.9), Some(Duration::from_millis(30)));
        assert_eq!(outcome.time_to(0.99), Some(Duration::from_millis(40)));
        assert_eq!(outcome.saved_at(&outcome.timeline[1]), Pages(30), "60 of 200 merged pages stand for 30 of 100");
        assert!(outcome.met_prediction());
        let less = MergeOutcome { before: KsmPageCounts { zero: Pages(11), ..KsmPageCounts::default() }, ..outcome };
        assert!(!less.met_prediction());
    }

    proptest! {
        #[test]
        fn missing_frames_are_the_frames_not_freed(
            pages in prop::collection::vec(0usize..6, 1..12),
            kept in 1usize..3,
        ) {
            let fates = [PageFate::Merged, PageFate::ProcessEnded, PageFate::Written, PageFate::UnchangedUnmerged, PageFate::Unenrolled, PageFate::UnenrolledUnmerged];
            let pages: Vec<PageFate> = pages.into_iter().map(|number| fates[number]).collect();
            let kept = kept.min(pages.len());
            let predicted_frames = (pages.len() - kept) as f64;
            let mut sum = FrameFates::default();
            sum.add_content(predicted_frames, &pages);
            let count_of = |fate| pages.iter().filter(|&&other| other == fate).count() as f64;
            let lost: f64 = sum.missing_frames.values().sum();
            prop_assert!(sum.missing_frames.values().all(|&lost| lost >= 0.0) && lost <= predicted_frames + 1e-9);
            // Each copy that stays has at most as many pages as before.
            let merged = count_of(PageFate::Merged);
            let stay = (kept as f64 * merged / pages.len() as f64).ceil();
            prop_assert!((predicted_frames - lost - (merged - stay).max(0.0)).abs() < 1e-9, "{:?}", sum);
            prop_assert!(sum.missing_frames.iter().all(|(&fate, &lost)| lost <= count_of(fate) + 1e-9), "{:?}", sum);
            let causes = [PageFate::ProcessEnded, PageFate::Written, PageFate::Unenrolled];
            let count_with_cause = causes.into_iter().map(count_of).sum::<f64>();
            let unchanged = [PageFate::UnchangedUnmerged, PageFate::UnenrolledUnmerged];
            let has_unchanged = unchanged.into_iter().any(|fate| sum.missing_frames.contains_key(&fate));
            prop_assert_eq!(has_unchanged, lost > count_with_cause);
        }
    }

    #[test]
    fn one_page_of_a_content_counts_its_share() {
        let mut sum = FrameFates::default();
        let mut count = |fate| sum.add_content(0.75, &[fate]);
        count(PageFate::Merged);
        count(PageFate::Written);
        count(PageFate::UnchangedUnmerged);
        assert_eq!(sum.predicted_frames, 2.25);
        assert_eq!(
            sum.missing_frames,
            BTreeMap::from([(PageFate::Written, 0.75), (PageFate::UnchangedUnmerged, 0.75)])
        );
    }
}
