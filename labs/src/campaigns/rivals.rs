//! Common rules that judge two sets of runs. They are compared with the analysis of blocks on the same runs.

use pagefold_ab::decide::statistics::{mean, standard_deviation, variance};
use statrs::distribution::{ContinuousCDF, StudentsT};

/// A common rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// The means of the first five runs of each arm; a difference of at least half a percent, which rounds to one percent,
    /// is believed.
    MeanOfFive,
    /// hyperfine's summary of all runs, "r ± s times faster": `r` is the ratio of the larger mean to the smaller and
    /// `s = r * sqrt((sd1 / mean1)^2 + (sd2 / mean2)^2)` with the standard deviations of single runs. A difference is
    /// believed if `r - s` is above 1. hyperfine itself draws no conclusion.
    ///
    /// Source: hyperfine, `relative_speed.rs` (the ratio and its error).
    Hyperfine,
    /// Welch's t-test of all runs, pooled over the blocks, at the level 0.05.
    PooledTTest,
}

/// What a rule concludes about B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conclusion {
    /// B takes less time.
    Faster,
    /// B takes more time.
    Slower,
    /// Neither.
    NoDifference,
}

impl Rival {
    /// All rules.
    pub const ALL: [Self; 3] = [Self::MeanOfFive, Self::Hyperfine, Self::PooledTTest];

    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::MeanOfFive => "mean of five",
            Self::Hyperfine => "hyperfine",
            Self::PooledTTest => "pooled t-test",
        }
    }

    /// What the rule concludes from the times of at least two runs of each arm.
    #[must_use]
    pub fn judge(self, a: &[f64], b: &[f64]) -> Conclusion {
        let (is_different, ratio) = match self {
            Self::MeanOfFive => {
                let ratio = mean(&b[..b.len().min(5)]) / mean(&a[..a.len().min(5)]);
                (ratio.max(ratio.recip()) >= 1.005, ratio)
            }
            Self::Hyperfine => {
                let ratio = mean(b) / mean(a);
                let spread = (standard_deviation(a) / mean(a)).hypot(standard_deviation(b) / mean(b));
                let larger = ratio.max(ratio.recip());
                (larger - larger * spread > 1.0, ratio)
            }
            Self::PooledTTest => (welch_p_value(a, b) <= 0.05, mean(b) / mean(a)),
        };
        match (is_different, ratio > 1.0) {
            (false, _) => Conclusion::NoDifference,
            (true, true) => Conclusion::Slower,
            (true, false) => Conclusion::Faster,
        }
    }
}

/// The two-sided p-value of Welch's t-test.
fn welch_p_value(a: &[f64], b: &[f64]) -> f64 {
    let (error_a, error_b) = (variance(a) / a.len() as f64, variance(b) / b.len() as f64);
    let error = error_a + error_b;
    let freedom = error * error / (error_a * error_a / (a.len() - 1) as f64 + error_b * error_b / (b.len() - 1) as f64);
    let t = (mean(b) - mean(a)).abs() / error.sqrt();
    match StudentsT::new(0.0, 1.0, freedom) {
        Ok(distribution) => 2.0 * distribution.sf(t),
        // Both arms are constant.
        Err(_) => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: [f64; 6] = [10.1, 9.8, 10.3, 10.0, 9.9, 10.2];
    const B: [f64; 6] = [10.6, 10.2, 10.9, 10.3, 10.4, 10.5];

    #[test]
    fn the_t_test_equals_that_of_scipy() {
        // scipy.stats.ttest_ind(A, B, equal_var=False).pvalue
        let expected = 0.007350031920329175;
        assert!((welch_p_value(&A, &B) - expected).abs() < 1e-9, "{}", welch_p_value(&A, &B));
        assert_eq!(Rival::PooledTTest.judge(&A, &B), Conclusion::Slower);
        assert_eq!(Rival::PooledTTest.judge(&B, &A), Conclusion::Faster);
    }

    #[test]
    fn hyperfine_believes_differences_beyond_the_spread_of_single_runs() {
        // The means are 10.05 and 10.483: a ratio of 1.043, whose spread is 0.032.
        assert_eq!(Rival::Hyperfine.judge(&A, &B), Conclusion::Slower);
        let nearer = B.map(|time| time - 0.2);
        assert_eq!(Rival::Hyperfine.judge(&A, &nearer), Conclusion::NoDifference);
    }

    #[test]
    fn a_mean_of_five_believes_half_a_percent() {
        assert_eq!(Rival::MeanOfFive.judge(&[1.0; 5], &[1.006; 5]), Conclusion::Slower);
        assert_eq!(Rival::MeanOfFive.judge(&[1.0; 5], &[1.004; 5]), Conclusion::NoDifference);
        assert_eq!(Rival::MeanOfFive.judge(&[1.0; 6], &[1.0, 1.0, 1.0, 1.0, 1.0, 9.0]), Conclusion::NoDifference);
    }
}
