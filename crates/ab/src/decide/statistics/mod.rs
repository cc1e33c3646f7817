//! Statistics of paired blocks.
//!
//! One block gives one value: the logarithm of the ratio of its means, B to A ([`log_ratio`]). Samples of a run are
//! averaged first, because samples of one run are not independent, and pooling them would make any difference
//! significant. The mean of the logarithms is the logarithm of the geometric mean of the ratios. No value is removed.
//!
//! - [`interval`]: intervals for the mean, by bootstrap and by Student's t.
//! - [`sign_flip`]: the permutation test of no effect.
//! - [`power`]: the smallest effect that a number of blocks detects, and the number of blocks for an effect.
//! - [`correction`]: p-values of several metrics.
//! - [`components`]: how much of the variance lies between samples, runs and restarts.

pub mod components;
pub mod correction;
pub mod interval;
pub mod power;
pub mod sign_flip;

/// The mean of values.
///
/// # Panics
/// Without values.
#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    assert!(!values.is_empty(), "the mean of no values");
    values.iter().sum::<f64>() / values.len() as f64
}

/// The sample variance, with divisor `n - 1`; 0 for fewer than two values.
#[must_use]
pub fn variance(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64
}

/// The sample standard deviation; 0 for fewer than two values.
#[must_use]
pub fn standard_deviation(values: &[f64]) -> f64 {
    variance(values).sqrt()
}

/// The logarithm of the ratio of the means of a block, B to A. All values must be positive.
#[must_use]
pub fn log_ratio(a: &[f64], b: &[f64]) -> f64 {
    (mean(b) / mean(a)).ln()
}

/// The geometric mean of ratios whose logarithms are given.
#[must_use]
pub fn geometric_mean(log_ratios: &[f64]) -> f64 {
    mean(log_ratios).exp()
}

/// Whether an interval for a logarithm of a ratio lies within the margin: no effect is larger than `margin`, such as 0.01
/// for one percent, in either direction.
///
/// With an interval of confidence `1 - 2 * alpha` this is the rule of two one-sided tests at level `alpha`. The limits are
/// `1 / (1 + margin)` and `1 + margin`, so that swapping the arms does not change the answer.
///
/// Source: D. J. Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
/// equivalence of average bioavailability", Journal of Pharmacokinetics and Biopharmaceutics 15(6), 1987.
#[must_use]
pub fn is_within_margin(low: f64, high: f64, margin: f64) -> bool {
    let limit = margin.ln_1p();
    -limit < low && high < limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_geometric_mean_is_that_of_the_ratios_of_means() {
        let ratios = [log_ratio(&[1.0, 3.0], &[4.0]), log_ratio(&[2.0], &[1.0])];
        assert!((geometric_mean(&ratios) - 1.0).abs() < 1e-12);
        assert!((variance(&[1.0, 2.0, 4.0]) - 7.0 / 3.0).abs() < 1e-12);
        assert_eq!(standard_deviation(&[5.0]), 0.0);
    }

    #[test]
    fn equivalence_needs_both_limits_within_the_margin() {
        assert!(is_within_margin(-0.009, 0.0099, 0.01));
        assert!(!is_within_margin(-0.009, 0.01, 0.01));
        assert!(!is_within_margin(-0.00996, 0.0, 0.01));
        assert!(!is_within_margin(0.02, 0.03, 0.01));
    }
}
