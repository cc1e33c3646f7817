//! Why the measured figures of a merge differ from the predicted ones, figure by figure.

use crate::decide::outcome::{EnrollChange, FailedChange, MergeEnd, MergeOutcome, PageFate};
use crate::decide::plan::PlannedRange;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::units::{AddressRange, Bytes, PageSize};
use std::time::Duration;

/// A figure of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlanFigure {
    /// Bytes saved, gross.
    Saved,
    /// Bytes of ksmd's metadata.
    Metadata,
    /// Seconds of ksmd's CPU time.
    KsmdCpu,
    /// Bytes of `MemAvailable`, which the net savings should increase.
    Available,
}

/// A part of the difference between the measured and the predicted figure.
#[derive(Clone, Debug, PartialEq)]
pub struct FigureDifference {
    /// The figure.
    pub figure: PlanFigure,
    /// How much more than predicted, in the figure's unit; negative if less.
    pub amount: f64,
    /// The reason, as a phrase.
    pub reason: &'static str,
}

/// The reasons for one figure's difference; together they are the whole difference.
struct DifferenceReasons {
    figure: PlanFigure,
    unexplained: f64,
    reasons: Vec<FigureDifference>,
}

impl DifferenceReasons {
    fn new(figure: PlanFigure, measured: f64, predicted: f64) -> Self {
        Self { figure, unexplained: measured - predicted, reasons: Vec::new() }
    }

    /// Add a possible reason: at most the difference that is still unexplained.
    fn add_at_most(&mut self, amount: f64, reason: &'static str) {
        self.add_exactly(
            if amount < 0.0 { amount.max(self.unexplained.min(0.0)) } else { amount.min(self.unexplained.max(0.0)) },
            reason,
        );
    }

    /// Add a known reason, also if it exceeds the difference.
    fn add_exactly(&mut self, amount: f64, reason: &'static str) {
        if amount.abs() > 1e-9 {
            self.unexplained -= amount;
            self.reasons.push(FigureDifference { figure: self.figure, amount, reason });
        }
    }

    /// Assign the rest, by its sign.
    fn finish(mut self, reason_if_less: &'static str, reason_if_more: &'static str) -> Vec<FigureDifference> {
        let rest = self.unexplained;
        self.add_exactly(rest, if rest < 0.0 { reason_if_less } else { reason_if_more });
        self.reasons
    }
}

/// Seconds for ksmd to revisit a page that is merged already: 0.31 s for 0.79 M visits of four guests' pages, on an AMD
/// EPYC with Linux 6.18.
const REVISIT_SECONDS: f64 = 0.4e-6;

const PROCESS_ENDED_REASON: &str = "in processes that ended";
const NOT_ENROLLED_REASON: &str = "could not be enrolled";
const UNENROLLED_REASON: &str = "unenrolled: unstable";

impl MergeOutcome {
    /// The reasons why measured and predicted figures differ; the differences of a figure add up to the whole.
    ///
    /// Opposite effects are listed side by side. Savings are followed content by content ([`FrameFates`]): exactly in a
    /// plan of few pages, otherwise from a sample, whose error is in the last reason. For the other figures, a part of
    /// the plan counts for its share of the prediction. A part without a measurement is labeled `not explained`.
    ///
    /// [`FrameFates`]: crate::decide::outcome::FrameFates
    pub fn differences(&self, page_size: PageSize) -> Vec<FigureDifference> {
        let mut all = self.saved_differences(page_size);
        all.extend(self.metadata_differences());
        all.extend(self.ksmd_time_differences());
        all.extend(self.available_memory_differences(page_size));
        all
    }

    fn saved_differences(&self, page_size: PageSize) -> Vec<FigureDifference> {
        let bytes = |frames: f64| frames * page_size.bytes() as f64;
        let predicted = self.plan.predicted.effect.freed_frames.0 as f64;
        let mut saved = DifferenceReasons::new(PlanFigure::Saved, bytes(self.saved().0 as f64), bytes(predicted));
        let sample_scale =
            if self.fates.predicted_frames > 0.0 { predicted / self.fates.predicted_frames } else { 0.0 };
        for (&fate, lost_frames) in &self.fates.missing_frames {
            let reason = match fate {
                PageFate::ProcessEnded => PROCESS_ENDED_REASON,
                PageFate::NotEnrolled => NOT_ENROLLED_REASON,
                PageFate::Unenrolled => UNENROLLED_REASON,
                PageFate::Written => "pages rewritten or freed since the census",
                PageFate::Swapped => "pages swapped out since the census",
                PageFate::UnenrolledUnmerged if self.end == MergeEnd::Settled => "unenrolled: no page of it merged",
                PageFate::UnenrolledUnmerged => "unenrolled: not merged before the end",
                PageFate::Merged | PageFate::UnchangedUnmerged if self.end == MergeEnd::Settled => {
                    "unchanged pages without a partner that ksmd found"
                }
                PageFate::Merged | PageFate::UnchangedUnmerged => "not merged before the end",
            };
            saved.add_exactly(-bytes((lost_frames * sample_scale).round()), reason);
        }
        saved.finish("not explained by the followed contents", "new duplicates, or partners outside of the plan")
    }

    fn metadata_differences(&self) -> Vec<FigureDifference> {
        let bytes = |pages: u64| (pages * RMAP_ITEM_BYTES) as f64;
        let items = self.after.rmap_items.saturating_sub(self.before.rmap_items).0;
        let predicted = self.plan.predicted.effect.metadata().0 as f64;
        let mut metadata = DifferenceReasons::new(PlanFigure::Metadata, bytes(items), predicted);
        let pages = |range: &PlannedRange| range.pages.0 * RMAP_ITEM_BYTES;
        metadata.add_exactly(-self.sum_over_ended(pages), PROCESS_ENDED_REASON);
        metadata.add_exactly(-self.sum_over_not_enrolled(pages), NOT_ENROLLED_REASON);
        metadata.add_at_most(-self.sum_over_unenrolled(pages), UNENROLLED_REASON);
        // Merged zero pages have no page that ksmd would visit again (mm/ksm.c, `get_next_rmap_item`).
        let zeros = self.after.zero.saturating_sub(self.before.zero);
        metadata.add_at_most(-bytes(zeros.0), "zero pages: ksmd frees their metadata at its next visit");
        let ranges = self.plan.targets.iter().flat_map(|target| &target.ranges);
        let enrolled: u64 = ranges.filter(|range| range.enrolled).map(|range| range.pages.0).sum();
        metadata.add_at_most(-bytes(enrolled.min(self.before.rmap_items.0)), "metadata that ksmd had before");
        let growth = bytes(self.after.present.0) - bytes(self.before.present.0);
        metadata.add_at_most(
            growth,
            if growth < 0.0 { "pages freed since the census" } else { "pages allocated since the census" },
        );
        let settled = self.end == MergeEnd::Settled;
        let not_visited = "pages that ksmd had not visited before the end";
        let reason_if_less = if settled { "not explained: pages that ksmd did not visit?" } else { not_visited };
        metadata.finish(reason_if_less, "not explained: other ranges enrolled?")
    }

    /// ksmd's time is its page visits times the time of one visit. Visits beyond two per page are mostly of merged
    /// pages, and count as such. The number of visits is the host's and includes pages of other processes. Before 6.10
    /// the kernel omits the batch in which a scan ends (mm/ksm.c, `ksm_do_scan`), and before 6.6 it does not count
    /// visits.
    fn ksmd_time_differences(&self) -> Vec<FigureDifference> {
        let Ok(measured) = self.ksmd_time.as_ref().map(Duration::as_secs_f64) else { return Vec::new() };
        let predicted = self.plan.predicted.ksmd_time.as_secs_f64();
        let mut cpu = DifferenceReasons::new(PlanFigure::KsmdCpu, measured, predicted);
        // The prediction assumes two visits per page (`decide::plan::KsmdPageTimes`).
        let predicted_visits = 2.0 * self.plan.predicted.effect.scanned_pages.0 as f64;
        match &self.pages_scanned {
            Ok(visits) if predicted_visits > 0.0 => {
                let extra_visits = visits.0 as f64 - predicted_visits;
                let extra_seconds =
                    extra_visits * if extra_visits < 0.0 { predicted / predicted_visits } else { REVISIT_SECONDS };
                let fewer_visits = "fewer than two visits per page";
                cpu.add_exactly(
                    extra_seconds,
                    if extra_seconds < 0.0 { fewer_visits } else { "further visits, or pages of other processes" },
                );
                cpu.finish("less time per visit than predicted", "more time per visit than predicted")
            }
            _ => cpu.finish("not explained: fewer or faster visits", "not explained: more or slower visits"),
        }
    }

    fn available_memory_differences(&self, page_size: PageSize) -> Vec<FigureDifference> {
        let bytes = |bytes: Bytes| bytes.0 as f64;
        let (Ok(before), Ok(after)) = self.available else { return Vec::new() };
        let (net, predicted) = (self.net(page_size).0 as f64, self.plan.predicted.effect.net(page_size).0 as f64);
        let mut available = DifferenceReasons::new(PlanFigure::Available, bytes(after) - bytes(before), predicted);
        available.add_exactly(net - predicted, "difference of the net savings: see above");
        if let Ok(resident) = &self.resident {
            // Zero pages that were merged are in the savings already.
            let zeros = bytes(page_size.bytes_of(self.after.zero.saturating_sub(self.before.zero)));
            let growth = bytes(resident.targets.1) + zeros - bytes(resident.targets.0);
            available.add_exactly(
                -growth,
                if growth > 0.0 { "allocated by the targets" } else { "freed by targets, or targets ended" },
            );
            let own_growth = bytes(resident.own.1) - bytes(resident.own.0);
            available.add_exactly(
                -own_growth,
                if own_growth > 0.0 { "allocated by pagefold itself" } else { "freed by pagefold itself" },
            );
        }
        let (reason_if_less, reason_if_more) =
            ("allocated by other processes and the kernel", "freed by other processes");
        available.finish(reason_if_less, reason_if_more)
    }

    /// The sum of a figure over ended targets.
    fn sum_over_ended(&self, count: impl Fn(&PlannedRange) -> u64) -> f64 {
        self.ended_targets.iter().map(|&target| self.sum_over_target(target, None, &count)).sum()
    }

    /// The sum of a figure over ranges that could not be enrolled.
    fn sum_over_not_enrolled(&self, count: impl Fn(&PlannedRange) -> u64) -> f64 {
        let sum_range = |failed: &FailedChange| {
            let target = self.plan.targets.iter().position(|target| target.process.id.pid == failed.pid)?;
            (!self.ended_targets.contains(&target)).then(|| self.sum_over_target(target, failed.range, &count))
        };
        self.failed_changes.iter().filter(|failed| failed.change == EnrollChange::Enroll).filter_map(sum_range).sum()
    }

    /// The sum of a figure over unenrolled ranges.
    fn sum_over_unenrolled(&self, count: impl Fn(&PlannedRange) -> u64) -> f64 {
        let running = self.unenrolled.iter().filter(|(target, _)| !self.ended_targets.contains(target));
        let ranges = running.flat_map(|(&target, ranges)| ranges.iter().map(move |&range| (target, range)));
        ranges.map(|(target, range)| self.sum_over_target(target, Some(range), &count)).sum()
    }

    /// The share of a figure that belongs to a target, or to a part of it.
    fn sum_over_target(
        &self,
        target: usize,
        subrange: Option<AddressRange>,
        count: impl Fn(&PlannedRange) -> u64,
    ) -> f64 {
        let count_share = |planned: &PlannedRange| match subrange {
            None => count(planned) as f64,
            Some(subrange) => {
                let overlap = planned.range.overlap(subrange).map_or(0, |overlap| overlap.bytes().0);
                count(planned) as f64 * overlap as f64 / planned.range.bytes().0.max(1) as f64
            }
        };
        self.plan.targets[target].reachable_ranges(self.plan.whole_processes).map(count_share).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::outcome::tests::{outcome, page_size};
    use crate::decide::outcome::{FrameFates, KsmPageCounts, PageFate, Resident};
    use pagefold_base::units::Pages;

    /// The reasons for one figure; savings in frames.
    fn figure_reasons(outcome: &MergeOutcome, figure: PlanFigure) -> Vec<(f64, &'static str)> {
        let unit = if figure == PlanFigure::Saved { page_size().bytes() as f64 } else { 1.0 };
        let differences = outcome.differences(page_size()).into_iter().filter(|difference| difference.figure == figure);
        differences.map(|difference| (difference.amount / unit, difference.reason)).collect()
    }

    fn saved_reasons(outcome: &MergeOutcome) -> Vec<(f64, &'static str)> {
        let reasons = figure_reasons(outcome, PlanFigure::Saved);
        let sum: f64 = reasons.iter().map(|(frames, _)| frames).sum();
        assert_eq!(sum, outcome.saved().0 as f64 - 100.0, "they are the difference");
        reasons
    }

    #[test]
    fn met_prediction_has_no_differences() {
        let mut outcome = outcome(MergeEnd::Settled, 100);
        assert!(saved_reasons(&outcome).is_empty());
        assert!(figure_reasons(&outcome, PlanFigure::Metadata).is_empty());
        outcome.ksmd_time = Ok(Duration::from_millis(4));
        outcome.pages_scanned = Ok(Pages(400));
        outcome.plan.predicted.ksmd_time = Duration::from_millis(4);
        outcome.timeline[3].ksmd_time = Duration::from_millis(4);
        assert!(outcome.differences(page_size()).is_empty(), "{:?}", outcome.differences(page_size()));
    }

    /// The fates of so many pairs of pages, one frame each.
    fn pairs(counts: &[(u64, [PageFate; 2])]) -> FrameFates {
        let mut fates = FrameFates::default();
        counts.iter().for_each(|(count, pair)| (0..*count).for_each(|_| fates.add_content(1.0, pair)));
        fates
    }

    #[test]
    fn missing_savings_are_explained_by_page_fate() {
        use PageFate::{Merged, NotEnrolled, ProcessEnded, UnchangedUnmerged, Unenrolled, UnenrolledUnmerged, Written};
        let check = |end: MergeEnd, saved: u64, fates: &[(u64, [PageFate; 2])], expected: &[(f64, &'static str)]| {
            let outcome = MergeOutcome { fates: pairs(fates), ..outcome(end, saved) };
            assert_eq!(saved_reasons(&outcome), expected, "{fates:?}");
        };
        let whole = (50, [Merged, Merged]);
        check(
            MergeEnd::Settled,
            50,
            &[whole, (50, [UnchangedUnmerged, ProcessEnded])],
            &[(-50.0, PROCESS_ENDED_REASON)],
        );
        check(
            MergeEnd::Settled,
            50,
            &[whole, (40, [Unenrolled; 2]), (10, [NotEnrolled, UnchangedUnmerged])],
            &[(-10.0, NOT_ENROLLED_REASON), (-40.0, UNENROLLED_REASON)],
        );
        let written = "pages rewritten or freed since the census";
        let no_partner = "unchanged pages without a partner that ksmd found";
        check(
            MergeEnd::Settled,
            50,
            &[whole, (30, [Merged, Written]), (20, [UnchangedUnmerged; 2])],
            &[(-30.0, written), (-20.0, no_partner)],
        );
        let never_merged = "unenrolled: no page of it merged";
        check(
            MergeEnd::Settled,
            50,
            &[
                whole,
                (30, [Written, UnenrolledUnmerged]),
                (10, [UnchangedUnmerged, UnenrolledUnmerged]),
                (10, [UnenrolledUnmerged; 2]),
            ],
            &[(-30.0, written), (-5.0, no_partner), (-15.0, never_merged)],
        );
        let late = [(-20.0, "not merged before the end"), (-30.0, "unenrolled: not merged before the end")];
        check(MergeEnd::Deadline, 50, &[whole, (20, [UnchangedUnmerged; 2]), (30, [UnenrolledUnmerged; 2])], &late);
        // A sample of a tenth.
        check(MergeEnd::Settled, 80, &[(8, [Merged; 2]), (2, [Written, UnchangedUnmerged])], &[(-20.0, written)]);
        check(
            MergeEnd::Settled,
            70,
            &[(8, [Merged; 2]), (2, [Written, UnchangedUnmerged])],
            &[(-20.0, written), (-10.0, "not explained by the followed contents")],
        );
    }

    #[test]
    fn opposite_effects_do_not_hide_each_other() {
        let fates = pairs(&[(70, [PageFate::Merged; 2]), (30, [PageFate::ProcessEnded; 2])]);
        let more = "new duplicates, or partners outside of the plan";
        assert_eq!(
            saved_reasons(&MergeOutcome { fates, ..outcome(MergeEnd::Settled, 100) }),
            [(-30.0, PROCESS_ENDED_REASON), (30.0, more)]
        );
        assert_eq!(saved_reasons(&outcome(MergeEnd::Settled, 130)), [(30.0, more)]);
    }

    #[test]
    fn page_count_change_explains_at_most_the_difference() {
        let metadata = |items: u64, present: (u64, u64)| {
            let mut outcome = outcome(MergeEnd::Settled, 100);
            (outcome.before.present, outcome.after.present) = (Pages(present.0), Pages(present.1));
            outcome.after.rmap_items = Pages(items);
            figure_reasons(&outcome, PlanFigure::Metadata)
                .into_iter()
                .map(|(by, why)| (by / 64.0, why))
                .collect::<Vec<_>>()
        };
        assert!(metadata(200, (200, 230)).is_empty());
        assert_eq!(metadata(220, (200, 230)), [(20.0, "pages allocated since the census")]);
        let [allocated, (rest, _)] = metadata(250, (200, 230))[..] else { panic!("two reasons") };
        assert_eq!((allocated, rest), ((30.0, "pages allocated since the census"), 20.0));
        assert_eq!(metadata(190, (200, 190)), [(-10.0, "pages freed since the census")]);
    }

    #[test]
    fn zero_pages_need_no_metadata() {
        let mut outcome = outcome(MergeEnd::Settled, 100);
        outcome.after = KsmPageCounts { zero: Pages(60), rmap_items: Pages(130), ..outcome.after };
        let [zeros, (rest, _)] = figure_reasons(&outcome, PlanFigure::Metadata)[..] else { panic!("two reasons") };
        assert_eq!((zeros.0, rest), (-60.0 * 64.0, -10.0 * 64.0));
    }

    #[test]
    fn ksmd_time_is_explained_by_scan_count_and_page_time() {
        let mut outcome = outcome(MergeEnd::Settled, 100);
        outcome.plan.predicted.ksmd_time = Duration::from_millis(4);
        outcome.pages_scanned = Ok(Pages(500));
        outcome.ksmd_time = Ok(Duration::from_millis(10));
        let [visits, page_time] = figure_reasons(&outcome, PlanFigure::KsmdCpu)[..] else { panic!("two reasons") };
        assert!((visits.0 - 0.00004).abs() < 1e-9 && visits.1 == "further visits, or pages of other processes");
        assert!((page_time.0 - 0.00596).abs() < 1e-9 && page_time.1 == "more time per visit than predicted");
        outcome.pages_scanned = Err(pagefold_base::reading::Absent::NotOnThisKernel);
        assert_eq!(figure_reasons(&outcome, PlanFigure::KsmdCpu).len(), 1);
    }

    #[test]
    fn available_memory_is_explained_by_consumer() {
        let mut outcome = outcome(MergeEnd::Settled, 100);
        let net = outcome.net(page_size()).0 as u64;
        outcome.plan.predicted.effect.scanned_pages = Pages(100);
        outcome.available = (Ok(Bytes(1 << 30)), Ok(Bytes((1 << 30) + net - 70 * 4096)));
        outcome.after.zero = Pages(10);
        outcome.resident =
            Ok(Resident { targets: (Bytes(500 * 4096), Bytes(530 * 4096)), own: (Bytes(0), Bytes(20 * 4096)) });
        let zeros = 10.0 * 4096.0;
        let expected = [
            (zeros - 100.0 * 64.0, "difference of the net savings: see above"),
            (-40.0 * 4096.0, "allocated by the targets"),
            (-20.0 * 4096.0, "allocated by pagefold itself"),
            (-20.0 * 4096.0, "allocated by other processes and the kernel"),
        ];
        assert_eq!(figure_reasons(&outcome, PlanFigure::Available), expected);
    }
}
