//! The targets of `pagefold merge`, as data.
//!
//! They compare with whole-process KSM, flat out, at the same CPU bound. Pagefold's figures include its own CPU and its
//! census.

use crate::findings::{SampleSpread, ThresholdCheck};

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

/// The round that decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DecidingRound {
    /// The median of the rounds: a typical value.
    Median,
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

const fn median_threshold(
    workload: &'static str,
    measure: MergeMeasure,
    bound: f64,
    description: &'static str,
) -> MergeThreshold {
    MergeThreshold { workload, measure, deciding_round: DecidingRound::Median, bound, description }
}

const fn worst_round_threshold(
    workload: &'static str,
    measure: MergeMeasure,
    bound: f64,
    description: &'static str,
) -> MergeThreshold {
    MergeThreshold { deciding_round: DecidingRound::Worst, ..median_threshold(workload, measure, bound, description) }
}

/// 98 % of the reachable net savings in every round.
const fn net_savings_threshold(workload: &'static str, description: &'static str) -> MergeThreshold {
    worst_round_threshold(workload, MergeMeasure::NetSavingsShare, 0.98, description)
}

/// Each bound is a minimum, except for the huge pages that remain under whole-process KSM, where it is a maximum.
const MERGE_THRESHOLDS: &[MergeThreshold] = &[
    median_threshold("tenth", MergeMeasure::CpuRatio, 5.0, "a tenth is duplicate: 5 times less CPU to 90 %"),
    median_threshold("tenth", MergeMeasure::TimeRatio, 5.0, "a tenth is duplicate: 5 times sooner to 90 %"),
    median_threshold(
        "scattered",
        MergeMeasure::CpuRatio,
        5.0,
        "a tenth is duplicate, in single pages: 5 times less CPU to 90 %",
    ),
    median_threshold(
        "scattered",
        MergeMeasure::TimeRatio,
        5.0,
        "a tenth is duplicate, in single pages: 5 times sooner to 90 %",
    ),
    net_savings_threshold("tenth", "a tenth is duplicate: always 98 % of the reachable net savings"),
    median_threshold("third", MergeMeasure::CpuRatio, 2.5, "a third is duplicate: 2.5 times less CPU to 90 %"),
    median_threshold("third", MergeMeasure::TimeRatio, 2.5, "a third is duplicate: 2.5 times sooner to 90 %"),
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
    median_threshold("huge", MergeMeasure::HugePagesKept, 0.9, "huge pages, few duplicates: 90 % of them remain"),
    median_threshold("huge", MergeMeasure::HugePagesKeptByWhole, 0.5, "huge pages, few duplicates: KSM splits half"),
    net_savings_threshold("huge", "huge pages, few duplicates: always 98 % of the reachable net savings"),
    net_savings_threshold("fleet", "guests: always 98 % of the reachable net savings"),
    median_threshold(
        "big-fleet",
        MergeMeasure::LessCpuInAll,
        1.0 / 0.75,
        "big guests: 0.75 of the CPU for the same savings",
    ),
    net_savings_threshold("big-fleet", "big guests: always 98 % of the reachable net savings"),
    median_threshold(
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

/// The measured value as text.
fn format_measure(measure: MergeMeasure, spread: Option<SampleSpread>) -> String {
    match (spread, measure) {
        (None, _) => "not reached".to_owned(),
        (Some(spread), MergeMeasure::CpuRatio | MergeMeasure::LessCpuInAll | MergeMeasure::TimeRatio) => {
            spread.format_factor()
        }
        (Some(spread), _) => spread.format_percent(),
    }
}

fn spread_if_any(values: Vec<f64>) -> Option<SampleSpread> {
    (!values.is_empty()).then(|| SampleSpread::from_samples(values))
}

/// The checks of a workload, given the measures of its rounds.
pub fn evaluate(workload: &str, measured: impl Fn(MergeMeasure) -> Vec<f64>) -> Vec<ThresholdCheck> {
    let judge = |claim: &MergeThreshold| {
        let spread = spread_if_any(measured(claim.measure));
        let at_most = claim.measure == MergeMeasure::HugePagesKeptByWhole;
        let (name, value): (_, fn(SampleSpread, bool) -> f64) = match claim.deciding_round {
            DecidingRound::Median => ("median", |spread, _| spread.median),
            DecidingRound::Worst => ("worst round", |spread, at_most| if at_most { spread.max } else { spread.min }),
        };
        ThresholdCheck {
            claim: claim.description.to_owned(),
            measured: format!("{}; judged by the {name}", format_measure(claim.measure, spread)),
            met: spread
                .map(|spread| value(spread, at_most))
                .is_some_and(|value| if at_most { value <= claim.bound } else { value >= claim.bound }),
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
    fn factors_use_the_median_and_savings_the_worst_round() {
        assert_eq!(evaluate_workload("tenth", &[5.0, 9.0, 1.0]), [true, true, true]);
        assert_eq!(evaluate_workload("tenth", &[5.0, 9.0, 0.97]), [true, true, false]);
        assert_eq!(evaluate_workload("tenth", &[4.9, 4.9, 9.0]), [false, false, true]);
        assert_eq!(evaluate_workload("program", &[1.0, 1.0, 0.799]), [false]);
        let said = |claim: usize| evaluate("tenth", |_| vec![5.0, 9.0, 1.0])[claim].measured.clone();
        assert_eq!(said(0), "5.00 (1.00 to 9.00); judged by the median");
        assert!(said(2).ends_with("judged by the worst round"), "{}", said(2));
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
