//! The power of a paired comparison: the smallest effect that can be seen.
//!
//! The power is that of the two-sided t test of the block values, by the noncentral t distribution. Values with heavy
//! tails have the power of normal values of the same variance for many blocks only.
//!
//! Source: J. Cohen, "Statistical Power Analysis for the Behavioral Sciences", 1988, chapter 2; the density of the sample
//! standard deviation is that of a scaled chi distribution.

use super::interval::{normal_probability, t_quantile};
use statrs::distribution::{ChiSquared, Continuous};

/// Intervals of the numerical integration over the sample standard deviation; even, for Simpson's rule.
const INTEGRATION_INTERVALS: usize = 200;

/// The relative error of a smallest detectable effect.
const DETECTABLE_EFFECT_TOLERANCE: f64 = 0.0005;

/// The largest number of blocks that [`blocks_needed`] answers.
pub const MAX_BLOCKS: usize = 1_000_000;

/// What a test detects.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PowerGoal {
    /// The level of the two-sided test, such as 0.05.
    pub alpha: f64,
    /// The probability that an effect is found, such as 0.8.
    pub power: f64,
}

impl Default for PowerGoal {
    fn default() -> Self {
        Self { alpha: 0.05, power: 0.8 }
    }
}

/// The distribution of the ratio of the sample's to the true standard deviation, as nodes and weights.
struct SpreadDistribution {
    nodes: Vec<(f64, f64)>,
    critical: f64,
}

impl SpreadDistribution {
    fn new(blocks: usize, alpha: f64) -> Self {
        let freedom = (blocks - 1) as f64;
        let chi_squared = ChiSquared::new(freedom).expect("there are at least two blocks");
        let width = 7.0 / (2.0 * freedom).sqrt();
        let low = (1.0 - width).max(1e-9);
        let step = (1.0 + width - low) / INTEGRATION_INTERVALS as f64;
        let node = |i: usize| {
            let ratio = low + step * i as f64;
            let simpson = match i {
                0 | INTEGRATION_INTERVALS => 1.0,
                odd if odd % 2 == 1 => 4.0,
                _ => 2.0,
            };
            // By its logarithm: the factors of the density overflow for hundreds of blocks.
            let density = 2.0 * freedom * ratio * chi_squared.ln_pdf(freedom * ratio * ratio).exp();
            (ratio, simpson * step / 3.0 * density)
        };
        Self {
            nodes: (0..=INTEGRATION_INTERVALS).map(node).collect(),
            critical: t_quantile(1.0 - alpha / 2.0, freedom),
        }
    }

    /// The power for a mean of so many standard errors.
    fn power(&self, errors: f64) -> f64 {
        let found = |ratio: f64| {
            normal_probability(errors - self.critical * ratio) + normal_probability(-errors - self.critical * ratio)
        };
        self.nodes.iter().map(|&(ratio, weight)| weight * found(ratio)).sum()
    }
}

/// The probability that the two-sided t test at level `alpha` finds a mean of `effect`, for values with this standard
/// deviation.
///
/// # Panics
/// With fewer than two blocks.
#[must_use]
pub fn power(effect: f64, standard_deviation: f64, blocks: usize, alpha: f64) -> f64 {
    assert!(blocks >= 2, "a test needs two blocks");
    SpreadDistribution::new(blocks, alpha).power(effect.abs() * (blocks as f64).sqrt() / standard_deviation)
}

/// The smallest mean that is found with the power of the goal, in the unit of the standard deviation. Infinite for fewer
/// than two blocks.
#[must_use]
pub fn smallest_detectable_effect(standard_deviation: f64, blocks: usize, goal: PowerGoal) -> f64 {
    if blocks < 2 {
        return f64::INFINITY;
    }
    let spread = SpreadDistribution::new(blocks, goal.alpha);
    let (mut low, mut high) = (0.0, spread.critical);
    while spread.power(high) < goal.power {
        low = high;
        high *= 2.0;
    }
    while high - low > DETECTABLE_EFFECT_TOLERANCE * high {
        let middle = f64::midpoint(low, high);
        if spread.power(middle) < goal.power { low = middle } else { high = middle }
    }
    high * standard_deviation / (blocks as f64).sqrt()
}

/// The number of blocks that find a mean of `effect` with the power of the goal. `None` if it is more than
/// [`MAX_BLOCKS`].
#[must_use]
pub fn blocks_needed(effect: f64, standard_deviation: f64, goal: PowerGoal) -> Option<usize> {
    let is_enough = |blocks| power(effect, standard_deviation, blocks, goal.alpha) >= goal.power;
    let mut high = 2;
    while !is_enough(high) {
        if high >= MAX_BLOCKS {
            return None;
        }
        high = (high * 2).min(MAX_BLOCKS);
    }
    let mut low = 2;
    while low < high {
        let middle = usize::midpoint(low, high);
        if is_enough(middle) { high = middle } else { low = middle + 1 }
    }
    Some(high)
}

#[cfg(test)]
mod tests;
