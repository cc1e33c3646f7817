//! What `pagefold merge` is held to: all bars, as data.
//!
//! Against whole-process KSM flat out at the same bound on CPU; pagefold's own CPU and its census are in its figures.

use crate::report::{Bar, Spread};

/// What is compared in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// CPU of whole over that of guided, to 90 % of the savings.
    LessCpu,
    /// CPU of whole to 99 % of what both save in the end, over all CPU of guided.
    LessCpuInAll,
    /// Seconds of whole over those of guided, to 90 % of the savings.
    Sooner,
    /// Net savings of guided over what can be reached.
    Net,
    /// The share of huge pages that guided leaves.
    HugeKept,
    /// The share of huge pages that whole leaves.
    HugeKeptByWhole,
}

/// Which of the rounds decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Judge {
    /// Their median: so much more in general.
    Median,
    /// The worst: always so much, or never worse than that.
    Worst,
}

/// A bar.
#[derive(Clone, Copy, Debug)]
struct Claim {
    workload: &'static str,
    measure: Measure,
    judge: Judge,
    bound: f64,
    says: &'static str,
}

const fn claim(workload: &'static str, measure: Measure, bound: f64, says: &'static str) -> Claim {
    Claim { workload, measure, judge: Judge::Median, bound, says }
}

const fn always(workload: &'static str, measure: Measure, bound: f64, says: &'static str) -> Claim {
    Claim { judge: Judge::Worst, ..claim(workload, measure, bound, says) }
}

/// Each is a least value, but for what whole-process KSM leaves of huge pages.
const CLAIMS: &[Claim] = &[
    claim("tenth", Measure::LessCpu, 5.0, "a tenth is duplicate: 5 times less CPU to 90 %"),
    claim("tenth", Measure::Sooner, 5.0, "a tenth is duplicate: 5 times sooner to 90 %"),
    claim("scattered", Measure::LessCpu, 5.0, "a tenth is duplicate, in single pages: 5 times less CPU to 90 %"),
    claim("scattered", Measure::Sooner, 5.0, "a tenth is duplicate, in single pages: 5 times sooner to 90 %"),
    always("tenth", Measure::Net, 0.98, "a tenth is duplicate: always 98 % of the reachable net savings"),
    claim("third", Measure::LessCpu, 2.5, "a third is duplicate: 2.5 times less CPU to 90 %"),
    claim("third", Measure::Sooner, 2.5, "a third is duplicate: 2.5 times sooner to 90 %"),
    always("third", Measure::Net, 0.98, "a third is duplicate: always 98 % of the reachable net savings"),
    always("most", Measure::LessCpu, 1.0 / 1.15, "nearly all is duplicate: never more than 1.15 times the CPU to 90 %"),
    always("most", Measure::Sooner, 1.0 / 1.15, "nearly all is duplicate: never more than 1.15 times as long to 90 %"),
    always("most", Measure::Net, 0.98, "nearly all is duplicate: always 98 % of the reachable net savings"),
    always("scattered", Measure::Net, 0.98, "a tenth, in single pages: always 98 % of the reachable net savings"),
    claim("huge", Measure::HugeKept, 0.9, "huge pages, few duplicates: 90 % of them are left"),
    claim("huge", Measure::HugeKeptByWhole, 0.5, "where whole-process KSM loses half"),
    always("huge", Measure::Net, 0.98, "huge pages, few duplicates: always 98 % of the reachable net savings"),
    always("fleet", Measure::Net, 0.98, "guests: always 98 % of the reachable net savings"),
    claim("big-fleet", Measure::LessCpuInAll, 1.0 / 0.75, "big guests: 0.75 of the CPU for the same savings"),
    always("big-fleet", Measure::Net, 0.98, "big guests: always 98 % of the reachable net savings"),
    claim(
        "big-fleet-equal-start",
        Measure::LessCpuInAll,
        1.0 / 0.75,
        "big guests, pages with equal first bytes: 0.75 of the CPU for the same savings",
    ),
    always("big-fleet-equal-start", Measure::Net, 0.98, "the same: always 98 % of the reachable net savings"),
    always("program", Measure::Net, 0.98, "databases: always 98 % of the reachable net savings"),
];

/// What a hot program may lose in time beyond the bound on CPU, and what it must keep of the savings that last.
pub const HOT_SLOW_DOWN: f64 = 0.03;
/// See [`HOT_SLOW_DOWN`].
pub const HOT_SAVINGS: f64 = 0.7;

/// What a single stop of a target stays below in the median, in seconds.
pub const STOP: f64 = 0.001;

/// For people.
fn figure(measure: Measure, spread: Option<Spread>) -> String {
    match (spread, measure) {
        (None, _) => "not reached".to_owned(),
        (Some(spread), Measure::LessCpu | Measure::LessCpuInAll | Measure::Sooner) => spread.factor(),
        (Some(spread), _) => spread.percent(),
    }
}

fn spread(values: Vec<f64>) -> Option<Spread> {
    (!values.is_empty()).then(|| Spread::of(values))
}

/// The bars of a workload, by the measures in its rounds.
pub fn of(workload: &str, measured: impl Fn(Measure) -> Vec<f64>) -> Vec<Bar> {
    let judge = |claim: &Claim| {
        let spread = spread(measured(claim.measure));
        let at_most = claim.measure == Measure::HugeKeptByWhole;
        let (name, value): (_, fn(Spread, bool) -> f64) = match claim.judge {
            Judge::Median => ("median", |spread, _| spread.median),
            Judge::Worst => ("worst round", |spread, at_most| if at_most { spread.max } else { spread.min }),
        };
        Bar {
            claim: claim.says.to_owned(),
            measured: format!("{}; judged by the {name}", figure(claim.measure, spread)),
            met: spread
                .map(|spread| value(spread, at_most))
                .is_some_and(|value| if at_most { value <= claim.bound } else { value >= claim.bound }),
        }
    };
    CLAIMS.iter().filter(|claim| claim.workload == workload).map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn met(workload: &str, values: &[f64]) -> Vec<bool> {
        of(workload, |_| values.to_vec()).iter().map(|bar| bar.met).collect()
    }

    #[test]
    fn a_factor_is_judged_by_the_median_and_savings_by_the_worst_round() {
        assert_eq!(met("tenth", &[5.0, 9.0, 1.0]), [true, true, true]);
        assert_eq!(met("tenth", &[5.0, 9.0, 0.97]), [true, true, false]);
        assert_eq!(met("tenth", &[4.9, 4.9, 9.0]), [false, false, true]);
        assert_eq!(met("program", &[1.0, 1.0, 0.799]), [false]);
        let said = |claim: usize| of("tenth", |_| vec![5.0, 9.0, 1.0])[claim].measured.clone();
        assert_eq!(said(0), "5.00 (1.00 to 9.00); judged by the median");
        assert!(said(2).ends_with("judged by the worst round"), "{}", said(2));
    }

    #[test]
    fn never_is_judged_by_the_worst_round() {
        assert_eq!(met("most", &[1.0, 1.0, 1.0]), [true; 3]);
        assert_eq!(met("most", &[1.2, 1.2, 0.86]), [false; 3]);
    }

    #[test]
    fn what_was_not_reached_is_missed() {
        assert_eq!(met("tenth", &[]), [false; 3]);
        let left = of("huge", |measure| vec![if measure == Measure::HugeKept { 0.94 } else { 0.55 }]);
        assert_eq!(left.iter().map(|bar| bar.met).collect::<Vec<_>>(), [true, false, false]);
    }
}
