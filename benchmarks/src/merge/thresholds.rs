//! The targets of `pagefold merge`, as data.
//!
//! They compare with whole-process KSM, flat out, at the same CPU bound. Pagefold's figures include its own CPU and its
//! census.

use crate::findings::{PairedRatio, SampleSpread, ThresholdCheck};

/// The measures that are compared in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeMeasure {
    /// CPU of whole divided by that of guided, to 90 % of the savings.
    CpuRatio,
    /// CPU of whole, to 99 % of the savings that both reach, divided by all CPU of guided.
    LessCpuInAll,
    /// Seconds of whole divided by those of guided, to 90 % of the savings.
    TimeRatio,
    /// Net savings of guided divided by the reachable net savings.
    NetSavingsShare,
    /// The share of huge pages that remain under guided.
    HugePagesKept,
    /// The share of huge pages that remain under whole.
    HugePagesKeptByWhole,
}

impl MergeMeasure {
    /// Whether it is the ratio of two policies, and not a share of what is possible.
    fn is_ratio(self) -> bool {
        matches!(self, Self::CpuRatio | Self::LessCpuInAll | Self::TimeRatio)
    }
}

/// What decides about a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecidingRound {
    /// A typical value: the geometric mean of ratios, the median of shares.
    Typical,
    /// The worst round: a guarantee.
    Worst,
}

/// A target.
#[derive(Clone, Copy, Debug)]
struct MergeThreshold {
    workload: &'static str,
    measure: MergeMeasure,
    deciding_round: DecidingRound,
    bound: f64,
    description: &'static str,
}

impl MergeThreshold {
    /// Whether the bound is a maximum. Others are minimums.
    fn is_maximum(&self) -> bool {
        self.measure == MergeMeasure::HugePagesKeptByWhole
    }
}

const fn typical_threshold(
    workload: &'static str,
    measure: MergeMeasure,
    bound: f64,
    description: &'static str,
) -> MergeThreshold {
    MergeThreshold { workload, measure, deciding_round: DecidingRound::Typical, bound, description }
}

const fn worst_round_threshold(
    workload: &'static str,
    measure: MergeMeasure,
    bound: f64,
    description: &'static str,
) -> MergeThreshold {
    MergeThreshold { deciding_round: DecidingRound::Worst, ..typical_threshold(workload, measure, bound, description) }
}

/// 98 % of the reachable net savings in every round.
const fn net_savings_threshold(workload: &'static str, description: &'static str) -> MergeThreshold {
    worst_round_threshold(workload, MergeMeasure::NetSavingsShare, 0.98, description)
}

/// Each bound is a minimum, except for the huge pages that remain under whole-process KSM, where it is a maximum.
const MERGE_THRESHOLDS: &[MergeThreshold] = &[
    typical_threshold("tenth", MergeMeasure::CpuRatio, 5.0, "a tenth is duplicate: 5 times less CPU to 90 %"),
    typical_threshold("tenth", MergeMeasure::TimeRatio, 5.0, "a tenth is duplicate: 5 times sooner to 90 %"),
    typical_threshold(
        "scattered",
        MergeMeasure::CpuRatio,
        5.0,
        "a tenth is duplicate, in single pages: 5 times less CPU to 90 %",
    ),
    typical_threshold(
        "scattered",
        MergeMeasure::TimeRatio,
        5.0,
        "a tenth is duplicate, in single pages: 5 times sooner to 90 %",
    ),
    net_savings_threshold("tenth", "a tenth is duplicate: always 98 % of the reachable net savings"),
    typical_threshold("third", MergeMeasure::CpuRatio, 2.5, "a third is duplicate: 2.5 times less CPU to 90 %"),
    typical_threshold("third", MergeMeasure::TimeRatio, 2.5, "a third is duplicate: 2.5 times sooner to 90 %"),
    net_savings_threshold("third", "a third is duplicate: always 98 % of the reachable net savings"),
    worst_round_threshold(
        "most",
        MergeMeasure::CpuRatio,
        1.0 / 1.15,
        "nearly all is duplicate: never more than 1.15 times the CPU to 90 %",
    ),
    worst_round_threshold(
        "most",
        MergeMeasure::TimeRatio,
        1.0 / 1.15,
        "nearly all is duplicate: never more than 1.15 times as long to 90 %",
    ),
    net_savings_threshold("most", "nearly all is duplicate: always 98 % of the reachable net savings"),
    net_savings_threshold("scattered", "a tenth, in single pages: always 98 % of the reachable net savings"),
    typical_threshold("huge", MergeMeasure::HugePagesKept, 0.9, "huge pages, few duplicates: 90 % of them remain"),
    typical_threshold("huge", MergeMeasure::HugePagesKeptByWhole, 0.5, "huge pages, few duplicates: KSM splits half"),
    net_savings_threshold("huge", "huge pages, few duplicates: always 98 % of the reachable net savings"),
    net_savings_threshold("fleet", "guests: always 98 % of the reachable net savings"),
    typical_threshold(
        "big-fleet",
        MergeMeasure::LessCpuInAll,
        1.0 / 0.75,
        "big guests: 0.75 of the CPU for the same savings",
    ),
    net_savings_threshold("big-fleet", "big guests: always 98 % of the reachable net savings"),
    typical_threshold(
        "big-fleet-equal-start",
        MergeMeasure::LessCpuInAll,
        1.0 / 0.75,
        "big guests, pages with equal first bytes: 0.75 of the CPU for the same savings",
    ),
    net_savings_threshold(
        "big-fleet-equal-start",
        "big guests, equal first bytes: always 98 % of the reachable net savings",
    ),
    net_savings_threshold("program", "databases: always 98 % of the reachable net savings"),
];

/// The maximum slowdown of a hot program beyond the CPU bound. [`MIN_SIMULATION_SAVINGS_SHARE`] is the share of
/// lasting savings that it must keep.
pub const MAX_SIMULATION_SLOWDOWN: f64 = 0.03;
/// See [`MAX_SIMULATION_SLOWDOWN`].
pub const MIN_SIMULATION_SAVINGS_SHARE: f64 = 0.7;

/// The limit of the median stop of a target, in seconds.
pub const MAX_MEDIAN_STOP_SECONDS: f64 = 0.001;

/// The value that decides, and the measured values as text. `None` without rounds.
fn summarize(claim: &MergeThreshold, values: Vec<f64>) -> Option<(f64, String)> {
    let ratio = PairedRatio::from_rounds(values.iter().copied())?;
    let spread = SampleSpread::from_samples(values);
    let text = if claim.measure.is_ratio() { ratio.format_factor() } else { spread.format_percent() };
    let (value, name) = match claim.deciding_round {
        DecidingRound::Typical if claim.measure.is_ratio() => (ratio.ratio, "geometric mean"),
        DecidingRound::Typical => (spread.median, "median"),
        DecidingRound::Worst if claim.is_maximum() => (spread.max, "worst round"),
        DecidingRound::Worst => (spread.min, "worst round"),
    };
    let worst = match claim.deciding_round {
        DecidingRound::Worst if claim.measure.is_ratio() => format!(", {value:.2}"),
        _ => String::new(),
    };
    Some((value, format!("{text}; judged by the {name}{worst}")))
}

/// The checks of a workload, given the measures of its rounds.
pub fn evaluate(workload: &str, measured: impl Fn(MergeMeasure) -> Vec<f64>) -> Vec<ThresholdCheck> {
    let judge = |claim: &MergeThreshold| {
        let summary = summarize(claim, measured(claim.measure));
        let is_met = |value: f64| if claim.is_maximum() { value <= claim.bound } else { value >= claim.bound };
        ThresholdCheck {
            claim: claim.description.to_owned(),
            met: summary.as_ref().is_some_and(|&(value, _)| is_met(value)),
            measured: summary.map_or("not reached".to_owned(), |(_, text)| text),
        }
    };
    MERGE_THRESHOLDS.iter().filter(|claim| claim.workload == workload).map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluate_workload(workload: &str, values: &[f64]) -> Vec<bool> {
        evaluate(workload, |_| values.to_vec()).iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn factors_use_the_geometric_mean_and_savings_the_worst_round() {
        // The geometric means are 5.01, 5.01, 4.96 and 0: a share that is never reached.
        assert_eq!(evaluate_workload("tenth", &[14.0, 9.0, 1.0]), [true, true, true]);
        assert_eq!(evaluate_workload("tenth", &[14.5, 9.0, 0.97]), [true, true, false]);
        assert_eq!(evaluate_workload("tenth", &[4.0, 4.0, 7.6]), [false, false, true]);
        assert_eq!(evaluate_workload("tenth", &[9.0, 9.0, 0.0]), [false, false, false]);
        assert_eq!(evaluate_workload("program", &[1.0, 1.0, 0.799]), [false]);
        let said = |claim: usize| evaluate("tenth", |_| vec![5.0, 5.0])[claim].measured.clone();
        assert_eq!(said(0), "5.00 (5.00 to 5.00); judged by the geometric mean");
        assert!(said(2).ends_with("judged by the worst round"), "{}", said(2));
        let most = evaluate("most", |_| vec![1.0, 1.0]);
        assert_eq!(most[0].measured, "1.00 (1.00 to 1.00); judged by the worst round, 1.00");
    }

    #[test]
    fn lower_limits_use_the_worst_round() {
        assert_eq!(evaluate_workload("most", &[1.0, 1.0, 1.0]), [true; 3]);
        assert_eq!(evaluate_workload("most", &[1.2, 1.2, 0.86]), [false; 3]);
    }

    #[test]
    fn unreached_measure_fails_the_threshold() {
        assert_eq!(evaluate_workload("tenth", &[]), [false; 3]);
        let left = evaluate("huge", |measure| vec![if measure == MergeMeasure::HugePagesKept { 0.94 } else { 0.55 }]);
        assert_eq!(left.iter().map(|bar| bar.met).collect::<Vec<_>>(), [true, false, false]);
    }
}
