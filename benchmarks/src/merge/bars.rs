//! What `pagefold merge` is held to: all bars, as data.
//!
//! Against whole-process KSM flat out at the same bound on CPU; pagefold's own CPU and its census are in its figures.

use crate::report::{Bar, Spread};

/// What is compared in each round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// CPU of whole over that of guided, to 90 % of the savings.
    LessCpu,
    /// Seconds of whole over those of guided, to 90 % of the savings.
    Sooner,
    /// Net savings of guided over what can be reached.
    Net,
    /// The share of huge pages that guided leaves.
    HugeKept,
    /// The share of huge pages that whole leaves.
    HugeKeptByWhole,
}

/// A bar.
#[derive(Clone, Copy, Debug)]
struct Claim {
    workload: &'static str,
    measure: Measure,
    bound: f64,
    says: &'static str,
}

const fn claim(workload: &'static str, measure: Measure, bound: f64, says: &'static str) -> Claim {
    Claim { workload, measure, bound, says }
}

/// Each is a least value, but for what whole-process KSM leaves of huge pages.
const CLAIMS: &[Claim] = &[
    claim("tenth", Measure::LessCpu, 5.0, "a tenth is duplicate: 5 times less CPU to 90 %"),
    claim("tenth", Measure::Sooner, 5.0, "a tenth is duplicate: 5 times sooner to 90 %"),
    claim("tenth", Measure::Net, 0.98, "a tenth is duplicate: 98 % of the reachable net savings"),
    claim("third", Measure::LessCpu, 2.5, "a third is duplicate: 2.5 times less CPU to 90 %"),
    claim("third", Measure::Sooner, 2.5, "a third is duplicate: 2.5 times sooner to 90 %"),
    claim("third", Measure::Net, 0.98, "a third is duplicate: 98 % of the reachable net savings"),
    claim("most", Measure::LessCpu, 1.0 / 1.15, "nearly all is duplicate: at most 1.15 times the CPU to 90 %"),
    claim("most", Measure::Sooner, 1.0 / 1.15, "nearly all is duplicate: at most 1.15 times as long to 90 %"),
    claim("most", Measure::Net, 0.98, "nearly all is duplicate: 98 % of the reachable net savings"),
    claim("scattered", Measure::Net, 0.98, "single pages: 98 % of the net savings of the best policy"),
    claim("huge", Measure::HugeKept, 0.9, "huge pages, few duplicates: 90 % of them are left"),
    claim("huge", Measure::HugeKeptByWhole, 0.5, "where whole-process KSM loses half"),
    claim("huge", Measure::Net, 0.98, "huge pages, few duplicates: 98 % of the reachable net savings"),
    claim("fleet", Measure::Net, 0.98, "guests: 98 % of the net savings of the best policy"),
    claim("program", Measure::Net, 0.98, "databases: 98 % of the net savings of the best policy"),
];

/// What a hot program may lose in time beyond the bound on CPU, and what it must keep of the savings that last.
pub const HOT_SLOW_DOWN: f64 = 0.03;
/// See [`HOT_SLOW_DOWN`].
pub const HOT_SAVINGS: f64 = 0.7;

/// What a single stop of a target stays below in the median, in seconds.
pub const STOP: f64 = 0.001;

/// The bars of a workload, by the measures in its rounds. The median counts.
pub fn of(workload: &str, measured: impl Fn(Measure) -> Vec<f64>) -> Vec<Bar> {
    let judge = |claim: &Claim| {
        let values = measured(claim.measure);
        let at_most = claim.measure == Measure::HugeKeptByWhole;
        let shares = !matches!(claim.measure, Measure::LessCpu | Measure::Sooner);
        let spread = (!values.is_empty()).then(|| Spread::of(values));
        Bar {
            claim: claim.says.to_owned(),
            measured: match spread {
                None => "not reached".to_owned(),
                Some(spread) if shares => spread.percent(),
                Some(spread) => spread.factor(),
            },
            met: spread.is_some_and(
                |spread| if at_most { spread.median <= claim.bound } else { spread.median >= claim.bound },
            ),
        }
    };
    CLAIMS.iter().filter(|claim| claim.workload == workload).map(judge).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_met_by_the_median_and_missed_by_what_was_not_reached() {
        let met = |values: &[f64]| of("tenth", |_| values.to_vec()).iter().map(|bar| bar.met).collect::<Vec<_>>();
        assert_eq!(met(&[5.0, 9.0, 1.0]), [true, true, true]);
        assert_eq!(met(&[4.9, 4.9, 9.0]), [false, false, true]);
        assert_eq!(met(&[]), [false; 3]);
        let left = of("huge", |measure| vec![if measure == Measure::HugeKept { 0.94 } else { 0.55 }]);
        assert_eq!(left.iter().map(|bar| bar.met).collect::<Vec<_>>(), [true, false, false]);
    }
}
