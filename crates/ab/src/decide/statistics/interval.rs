//! Confidence intervals for the mean of block values.

use super::{mean, standard_deviation};
use rand::rngs::ChaCha8Rng;
use rand::{RngExt as _, SeedableRng as _};
use statrs::distribution::{ContinuousCDF, Normal, StudentsT};

/// How an interval is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum IntervalMethod {
    /// Quantiles of the bootstrap distribution.
    ///
    /// Source: B. Efron, R. J. Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.
    Percentile,
    /// Bias-corrected and accelerated bootstrap. Too narrow for few values.
    ///
    /// Source: B. Efron, "Better bootstrap confidence intervals", Journal of the American Statistical Association 82(397),
    /// 1987.
    Bca,
    /// [`Self::Bca`] with the quantiles of the normal distribution widened by `sqrt(n / (n - 1))` and replaced by those of
    /// Student's t with `n - 1` degrees of freedom. The bootstrap distribution of a mean is too narrow by the first factor,
    /// and ignores the error of the estimated variance, which is the second.
    ///
    /// Source: T. Hesterberg, "What teachers should know about the bootstrap", The American Statistician 69(4), 2015,
    /// "expanded percentile interval".
    ExpandedBca,
    /// [`Self::Percentile`] with the same wider quantiles as [`Self::ExpandedBca`].
    ///
    /// Source: as for [`Self::ExpandedBca`].
    ExpandedPercentile,
    /// The bootstrap distribution of the studentized mean.
    ///
    /// Source: Efron and Tibshirani, chapter 12.
    BootstrapT,
    /// Student's t interval of the logarithms.
    StudentT,
    /// All values are equal: the interval is one point, and says nothing about its error.
    Degenerate,
}

/// An interval for the mean, in the unit of the values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConfidenceInterval {
    /// The lower limit.
    pub low: f64,
    /// The upper limit.
    pub high: f64,
    /// The nominal probability that the interval contains the true mean, 0 to 1.
    pub confidence: f64,
    /// How it was computed; this can differ from the requested method, see [`Bootstrap::interval`].
    pub method: IntervalMethod,
}

impl ConfidenceInterval {
    /// Whether the interval contains a value.
    #[must_use]
    pub fn contains(&self, value: f64) -> bool {
        self.low <= value && value <= self.high
    }
}

/// The fewest resampled means beyond each limit. A limit further out is not resolved by the bootstrap, and Student's t is
/// used instead.
const MIN_RESAMPLES_BEYOND_LIMIT: f64 = 5.0;

/// Values with the means of their resamples.
#[derive(Clone, Debug)]
pub struct Bootstrap {
    values: Vec<f64>,
    /// Means of the resamples, ascending.
    means: Vec<f64>,
    /// Studentized means of the resamples, ascending; empty if not asked for.
    studentized: Vec<f64>,
}

impl Bootstrap {
    /// Resample values with replacement. The seed determines the resamples.
    ///
    /// # Panics
    /// Without values or resamples.
    #[must_use]
    pub fn new(values: &[f64], resamples: usize, seed: u64) -> Self {
        Self::resample(values, resamples, seed, false)
    }

    /// Like [`Self::new`], and also computes what [`IntervalMethod::BootstrapT`] needs.
    ///
    /// # Panics
    /// Without values or resamples.
    #[must_use]
    pub fn with_studentized_means(values: &[f64], resamples: usize, seed: u64) -> Self {
        Self::resample(values, resamples, seed, true)
    }

    fn resample(values: &[f64], resamples: usize, seed: u64, studentize: bool) -> Self {
        assert!(!values.is_empty() && resamples > 0, "a bootstrap needs values and resamples");
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let count = u32::try_from(values.len()).expect("a campaign has fewer than four billion blocks");
        let center = mean(values);
        let mut means = Vec::with_capacity(resamples);
        let mut studentized = Vec::new();
        for _ in 0..resamples {
            let (mut sum, mut squares) = (0.0, 0.0);
            for _ in 0..count {
                let deviation = values[random.random_range(0..count) as usize] - center;
                sum += deviation;
                squares += deviation * deviation;
            }
            let shift = sum / f64::from(count);
            means.push(center + shift);
            if studentize {
                // A resample of equal values has no standard error and is left out.
                let error = ((squares / f64::from(count) - shift * shift).max(0.0) / (f64::from(count) - 1.0)).sqrt();
                if error > f64::EPSILON * center.abs().max(squares.sqrt()) {
                    studentized.push(shift / error);
                }
            }
        }
        means.sort_unstable_by(f64::total_cmp);
        studentized.sort_unstable_by(f64::total_cmp);
        Self { values: values.to_vec(), means, studentized }
    }

    /// The interval of a method, with two exceptions.
    ///
    /// Where all values are equal, it is a point ([`IntervalMethod::Degenerate`]). Where the method has no answer or its
    /// limits are too far out for the number of resamples, it is the next simpler method: Student's t for the resampled
    /// methods, and the percentile interval where all resampled means are on one side of the mean.
    ///
    /// # Panics
    /// If `confidence` is not between 0 and 1.
    #[must_use]
    pub fn interval(&self, method: IntervalMethod, confidence: f64) -> ConfidenceInterval {
        assert!(0.0 < confidence && confidence < 1.0, "a confidence of {confidence}");
        let center = mean(&self.values);
        let tail = (1.0 - confidence) / 2.0;
        let spread = standard_deviation(&self.values);
        if spread <= 1e-14 * center.abs().max(f64::MIN_POSITIVE) {
            return ConfidenceInterval { low: center, high: center, confidence, method: IntervalMethod::Degenerate };
        }
        let quantiles = match method {
            IntervalMethod::Percentile => Some((tail, 1.0 - tail)),
            IntervalMethod::Bca => self.bca_quantiles(normal_quantile(1.0 - tail)),
            IntervalMethod::ExpandedBca => {
                let count = self.values.len() as f64;
                self.bca_quantiles((count / (count - 1.0)).sqrt() * t_quantile(1.0 - tail, count - 1.0))
            }
            IntervalMethod::ExpandedPercentile => {
                let count = self.values.len() as f64;
                let z = (count / (count - 1.0)).sqrt() * t_quantile(1.0 - tail, count - 1.0);
                Some((normal_probability(-z), normal_probability(z)))
            }
            IntervalMethod::BootstrapT if self.is_resolved(tail) && self.studentized.len() * 2 > self.means.len() => {
                let error = spread / (self.values.len() as f64).sqrt();
                return ConfidenceInterval {
                    low: center - error * quantile(&self.studentized, 1.0 - tail),
                    high: center - error * quantile(&self.studentized, tail),
                    confidence,
                    method,
                };
            }
            IntervalMethod::BootstrapT | IntervalMethod::StudentT | IntervalMethod::Degenerate => {
                return student_t_interval(&self.values, confidence);
            }
        };
        let (method, (low, high)) = match quantiles {
            Some(quantiles) => (method, quantiles),
            None => (IntervalMethod::Percentile, (tail, 1.0 - tail)),
        };
        if !self.is_resolved(low.min(1.0 - high)) {
            return student_t_interval(&self.values, confidence);
        }
        ConfidenceInterval { low: quantile(&self.means, low), high: quantile(&self.means, high), confidence, method }
    }

    fn is_resolved(&self, tail: f64) -> bool {
        tail * self.means.len() as f64 >= MIN_RESAMPLES_BEYOND_LIMIT
    }

    /// The bootstrap quantiles of the BCa interval whose normal quantile would be `z`. `None` if the bias correction is
    /// infinite.
    fn bca_quantiles(&self, z: f64) -> Option<(f64, f64)> {
        let center = mean(&self.values);
        let tolerance = 1e-12 * standard_deviation(&self.values);
        let below = self.means.partition_point(|&mean| mean < center - tolerance);
        let not_above = self.means.partition_point(|&mean| mean <= center + tolerance);
        let share = (below + not_above) as f64 / (2 * self.means.len()) as f64;
        if share <= 0.0 || share >= 1.0 {
            return None;
        }
        let bias = normal_quantile(share);
        let acceleration = acceleration_of_mean(&self.values);
        let level = |z: f64| normal_probability(bias + (bias + z) / (1.0 - acceleration * (bias + z)));
        // Beyond this the formula turns back.
        (acceleration.abs() * (bias.abs() + z) < 1.0).then(|| (level(-z), level(z)))
    }
}

/// The acceleration of BCa by the jackknife. For a mean, leaving out value `i` moves the mean by a multiple of its
/// deviation.
fn acceleration_of_mean(values: &[f64]) -> f64 {
    let center = mean(values);
    let (squares, cubes) = values.iter().fold((0.0, 0.0), |(squares, cubes), value| {
        let deviation = value - center;
        (squares + deviation * deviation, cubes + deviation.powi(3))
    });
    cubes / (6.0 * f64::powf(squares, 1.5))
}

/// Student's t interval for the mean. Infinite for one value.
///
/// # Panics
/// Without values, or if `confidence` is not between 0 and 1.
#[must_use]
pub fn student_t_interval(values: &[f64], confidence: f64) -> ConfidenceInterval {
    let center = mean(values);
    let half = if values.len() < 2 {
        f64::INFINITY
    } else {
        let count = values.len() as f64;
        t_quantile(0.5 + confidence / 2.0, count - 1.0) * standard_deviation(values) / count.sqrt()
    };
    ConfidenceInterval { low: center - half, high: center + half, confidence, method: IntervalMethod::StudentT }
}

/// The quantile of sorted values, interpolated linearly between order statistics.
fn quantile(sorted: &[f64], probability: f64) -> f64 {
    let position = probability.clamp(0.0, 1.0) * (sorted.len() - 1) as f64;
    let below = position.floor() as usize;
    let above = (below + 1).min(sorted.len() - 1);
    sorted[below] + (position - below as f64) * (sorted[above] - sorted[below])
}

/// The quantile of the standard normal distribution.
#[must_use]
pub fn normal_quantile(probability: f64) -> f64 {
    Normal::standard().inverse_cdf(probability)
}

/// The probability that a standard normal variable is at most `z`.
#[must_use]
pub fn normal_probability(z: f64) -> f64 {
    Normal::standard().cdf(z)
}

/// The quantile of Student's t.
///
/// # Panics
/// If the degrees of freedom are not positive.
#[must_use]
pub fn t_quantile(probability: f64, degrees_of_freedom: f64) -> f64 {
    let distribution = StudentsT::new(0.0, 1.0, degrees_of_freedom).expect("degrees of freedom are positive");
    distribution.inverse_cdf(probability)
}

#[cfg(test)]
mod tests;
