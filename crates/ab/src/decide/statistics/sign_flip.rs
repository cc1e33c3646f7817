//! The sign-flip permutation test of paired values.
//!
//! Without an effect, swapping the arms of a block flips the sign of its value and changes nothing else: the order of the
//! arms was drawn. The p-value is the share of all sign patterns whose mean is at least as far from zero as the observed
//! one. It needs no assumption about the shape of the distribution, and is exact for any number of blocks.
//!
//! Source: E. J. G. Pitman, "Significance tests which may be applied to samples from any populations", Supplement to the
//! Journal of the Royal Statistical Society 4(1), 1937; for the correction of the Monte Carlo estimate B. Phipson and
//! G. K. Smyth, "Permutation p-values should never be zero", Statistical Applications in Genetics and Molecular Biology
//! 9(1), 2010.

use rand::rngs::ChaCha8Rng;
use rand::{RngExt as _, SeedableRng as _};

/// The largest number of values for which all sign patterns are counted: 65,536 patterns.
pub const MAX_EXACT_VALUES: usize = 16;

/// The number of drawn patterns where not all are counted.
pub const DRAWN_PATTERNS: u32 = 9_999;

/// The result of the test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SignFlipTest {
    /// The two-sided p-value.
    pub p_value: f64,
    /// Whether all sign patterns were counted.
    pub is_exact: bool,
}

/// The smallest p-value that so many values can have: all of one sign.
#[must_use]
pub fn smallest_p_value(values: usize) -> f64 {
    if values > MAX_EXACT_VALUES {
        return 1.0 / f64::from(DRAWN_PATTERNS + 1);
    }
    // The pattern and its inverse, of two to the power of the number.
    0.5_f64.powi(i32::try_from(values.saturating_sub(1)).unwrap_or(i32::MAX))
}

/// Test whether values are symmetric around zero. The seed matters for more than [`MAX_EXACT_VALUES`] values only.
#[must_use]
pub fn sign_flip_test(values: &[f64], seed: u64) -> SignFlipTest {
    let scale: f64 = values.iter().map(|value| value.abs()).sum();
    // Sums that differ by rounding only count as equal.
    let observed = values.iter().sum::<f64>().abs() - 1e-12 * scale;
    if values.len() <= MAX_EXACT_VALUES {
        // A pattern and its inverse have the same absolute sum: the sign of the first value is fixed.
        let free = values.get(1..).unwrap_or_default();
        let sums = FlippedSums::new(free);
        let first = values.first().copied().unwrap_or_default();
        let patterns = 1_u64 << free.len();
        let extreme = (0..patterns).filter(|&pattern| (first + sums.sum(pattern)).abs() >= observed).count();
        return SignFlipTest { p_value: extreme as f64 / patterns as f64, is_exact: true };
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let parts: Vec<FlippedSums> = values.chunks(64).map(FlippedSums::new).collect();
    let mut draw = || parts.iter().map(|sums| sums.sum(random.random())).sum::<f64>().abs();
    let extreme = (0..DRAWN_PATTERNS).filter(|_| draw() >= observed).count();
    SignFlipTest { p_value: (extreme + 1) as f64 / f64::from(DRAWN_PATTERNS + 1), is_exact: false }
}

/// The sums of up to 64 values for each pattern of signs, from tables for eight values each.
struct FlippedSums {
    tables: Vec<[f64; 256]>,
}

impl FlippedSums {
    fn new(values: &[f64]) -> Self {
        let table = |chunk: &[f64]| {
            std::array::from_fn(|pattern| {
                let flip = |(bit, &value): (usize, &f64)| if pattern >> bit & 1 == 1 { -value } else { value };
                chunk.iter().enumerate().map(flip).sum()
            })
        };
        Self { tables: values.chunks(8).map(table).collect() }
    }

    /// The sum with the values of the one-bits flipped.
    fn sum(&self, pattern: u64) -> f64 {
        self.tables.iter().enumerate().map(|(i, table)| table[(pattern >> (8 * i) & 0xff) as usize]).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_count_all_patterns() {
        // All of the same sign: only the observed pattern and its inverse are as extreme.
        assert_eq!(sign_flip_test(&[1.0, 2.0, 3.0, 4.0], 0), SignFlipTest { p_value: 2.0 / 16.0, is_exact: true });
        assert_eq!(sign_flip_test(&[1.0, -1.0], 0).p_value, 1.0);
        assert_eq!(sign_flip_test(&[0.0; 6], 0).p_value, 1.0);
        assert_eq!(sign_flip_test(&[], 0).p_value, 1.0);
        for count in [0, 1, 2, 5, 6, MAX_EXACT_VALUES] {
            let values = vec![1.0; count];
            assert_eq!(sign_flip_test(&values, 0).p_value, smallest_p_value(count));
        }
        assert_eq!(smallest_p_value(MAX_EXACT_VALUES + 1), 1e-4);
    }

    /// `scipy.stats.permutation_test((VALUES,), numpy.mean, permutation_type="samples", n_resamples=2**20)` of scipy 1.17.
    #[test]
    fn p_values_equal_those_of_scipy() {
        let values = [0.012, -0.004, 0.031, 0.008, 0.015, -0.011, 0.022, 0.067, 0.009, 0.003];
        assert_eq!(sign_flip_test(&values, 0), SignFlipTest { p_value: 0.033_203_125, is_exact: true });
        // Ten more: the same in reverse order, halved, minus 0.006.
        let more: Vec<f64> =
            values.iter().copied().chain(values.iter().rev().map(|value| value * 0.5 - 0.006)).collect();
        let drawn = sign_flip_test(&more, 3);
        assert!(!drawn.is_exact);
        // The exact value is 0.0374755859375; three standard errors of 9,999 patterns are 0.0057.
        assert!((drawn.p_value - 0.037_475_6).abs() < 0.0057, "{drawn:?}");
    }

    #[test]
    fn more_than_64_values_are_all_flipped() {
        let mut values = vec![0.0; 70];
        values.extend([1.0; 12]);
        let test = sign_flip_test(&values, 1);
        assert!(test.p_value < 0.002, "{test:?}");
        values.extend([-1.0; 12]);
        assert_eq!(sign_flip_test(&values, 1).p_value, 1.0);
    }
}
