//! The prediction of a plan: what merging its ranges frees, and what that costs.

use super::contents::PlanContents;
use super::search::ComparisonCost;
use super::{MergePlan, SkippedProcess};
use pagefold_base::savings::MergeEffect;
use pagefold_base::units::{Bytes, NetBytes, Pages};
use std::time::Duration;

/// ksmd's CPU time for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KsmdPageTimes {
    /// The first scan: a checksum, and before 6.11 a search in the stable tree.
    pub first: Duration,
    /// The second scan of a page without a copy: into the unstable tree.
    pub unique: Duration,
    /// The second scan of a page that merges.
    pub merge: Duration,
    /// The second scan of a zero page; all zero pages join one content.
    pub zero: Duration,
}

impl Default for KsmdPageTimes {
    /// Measured on a virtual machine of two shared CPUs (Intel Xeon) with Linux 6.18, by the run time of ksmd in its
    /// `schedstat` over 512 MiB of each kind. Other machines differ; the ratios hold.
    fn default() -> Self {
        let [first, unique, merge, zero] = [900, 5900, 6700, 2400].map(Duration::from_nanos);
        Self { first, unique, merge, zero }
    }
}

impl KsmdPageTimes {
    /// CPU time for so many pages, of which `merging` merge and `zero` are zero pages.
    pub fn time(self, pages: Pages, merging: Pages, zero: Pages) -> Duration {
        let time_for =
            |each: Duration, pages: Pages| Duration::from_nanos((each.as_nanos() as u64).saturating_mul(pages.0));
        time_for(self.first, pages)
            + time_for(self.unique, pages.saturating_sub(merging))
            + time_for(self.merge, merging.saturating_sub(zero))
            + time_for(self.zero, zero)
    }
}

/// How ksmd merges the pages of a plan.
#[derive(Clone, Copy, Debug)]
pub struct KsmdModel {
    /// The share of one CPU that ksmd may take, above 0.
    pub cpu_share: f64,
    /// ksmd's times per page.
    pub page_times: KsmdPageTimes,
    /// ksmd's further time for pages with equal beginnings.
    pub comparison_cost: ComparisonCost,
    /// Whether ksmd merges a page at its first visit
    /// ([`merges_at_first_scan`](pagefold_base::ksm::merges_at_first_scan)).
    pub merges_at_first_scan: bool,
}

/// The prediction of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prediction {
    /// Frames freed, pages scanned, huge pages split.
    pub effect: MergeEffect,
    /// Pages that should merge, kept copies included.
    pub merging: Pages,
    /// Regions that the ranges' boundaries add to the processes, at most.
    pub regions_added: u64,
    /// CPU time of ksmd.
    pub ksmd_time: Duration,
    /// Wall time from enrolling until merged, at ksmd's CPU limit.
    pub wall_time: Duration,
}

/// The smallest share of a CPU in predictions; it keeps the predicted time finite.
const MIN_KSMD_CPU_SHARE: f64 = 0.001;

impl MergePlan {
    /// Skip the targets whose ranges save less than `min_profit` beside the other targets, net of metadata, until each
    /// remaining target saves as much. Dropping a target lowers the savings of those that share contents with it.
    pub fn skip_unprofitable_targets(&mut self, contents: &PlanContents, min_profit: Bytes) {
        loop {
            let positions = contents.positions(self);
            let mut is_kept = vec![false; contents.ranges.len()];
            positions.iter().flatten().for_each(|&position| is_kept[position] = true);
            let counts = contents.count(|position| is_kept[position as usize]);
            let mut positions = positions.into_iter();
            let mut skipped = Vec::new();
            self.targets.retain(|target| {
                let target_positions = positions.by_ref().take(target.ranges.len()).flatten();
                let freed: Bytes = target_positions.map(|position| counts.ranges[position].freed_bytes).sum();
                let scanned_pages = target.ranges.iter().map(|range| range.pages).sum();
                let effect = MergeEffect { scanned_pages, ..MergeEffect::default() };
                let net = NetBytes(effect.net(contents.page_size).0 + freed.0.cast_signed());
                let is_profitable = net.0 >= min_profit.0.cast_signed();
                if !is_profitable {
                    skipped.push(SkippedProcess::unprofitable(&target.process, net));
                }
                is_profitable
            });
            if skipped.is_empty() {
                break;
            }
            self.skipped.append(&mut skipped);
        }
        self.drop_empty_targets();
    }

    /// Predict the plan as it is now, from the contents of its ranges, and count what each of them merges. Call it when
    /// nothing is dropped from the plan any more, and again after dropping further ranges. A range that was cut since
    /// its contents were counted is scanned and merges nothing. Ranges that the targets' methods of enrollment do not
    /// reach are not scanned either.
    pub fn predict(&mut self, contents: &PlanContents, ksmd: &KsmdModel) {
        let positions = contents.positions(self);
        let mut is_kept = vec![false; contents.ranges.len()];
        let is_whole = self.whole_processes;
        let ranges = self.targets.iter().flat_map(|target| target.ranges.iter().map(move |range| (target, range)));
        for (position, (target, range)) in positions.iter().zip(ranges) {
            position.iter().for_each(|&position| is_kept[position] = target.can_merge(range, is_whole));
        }
        let counts = contents.count(|position| is_kept[position as usize]);
        let ranges = self.targets.iter_mut().flat_map(|target| &mut target.ranges);
        for (range, position) in ranges.zip(positions) {
            let Some(position) = position.filter(|&position| is_kept[position]) else {
                (range.merging, range.zero, range.freed_bytes) = (Pages::ZERO, Pages::ZERO, Bytes::ZERO);
                range.late = false;
                continue;
            };
            let counts = counts.ranges[position];
            range.merging = counts.merging + range.zero;
            range.freed_bytes = counts.freed_bytes;
            let is_late = ksmd.merges_at_first_scan && !self.whole_processes && !range.enrolled;
            range.late = is_late && counts.further_copies.0 * 2 > range.merging.0;
        }
        let ranges = || self.reachable_ranges();
        let (scanned, merging): (Pages, Pages) =
            (ranges().map(|range| range.pages).sum(), ranges().map(|range| range.merging).sum());
        let zero: Pages = ranges().map(|range| range.zero).sum();
        let splits: Pages = ranges().map(|range| range.split_huge_pages).sum();
        let mut predicted = Prediction {
            effect: MergeEffect {
                freed_frames: counts.freed_frames,
                scanned_pages: scanned,
                split_huge_pages: splits.saturating_sub(counts.repeated_splits),
            },
            merging,
            regions_added: self.added_regions(),
            ksmd_time: ksmd.page_times.time(scanned, merging, zero),
            wall_time: Duration::ZERO,
        };
        if !predicted.ksmd_time.is_zero() {
            predicted.ksmd_time += predicted.comparison_time(zero, ksmd.comparison_cost);
        }
        predicted.wall_time = predicted.ksmd_time.div_f64(ksmd.cpu_share.max(MIN_KSMD_CPU_SHARE));
        self.predicted = predicted;
    }
}
