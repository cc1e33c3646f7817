//! Random numbers of a simulation: deterministic by seed.

use pagefold_base::splitmix::splitmix64;

/// Steps of the table of exponential quantiles.
const QUANTILES: usize = 1024;

/// A generator of uniform and exponential numbers.
#[derive(Debug)]
pub(crate) struct RandomSource {
    state: u64,
    /// Quantiles of the exponential distribution with mean 1, at the middle of each step.
    exponential: Vec<f32>,
}

impl RandomSource {
    /// A generator for `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        let quantile = |step: usize| (-(1.0 - (step as f64 + 0.5) / QUANTILES as f64).ln()) as f32;
        Self { state: splitmix64(seed), exponential: (0..QUANTILES).map(quantile).collect() }
    }

    /// A uniform number of 64 bits.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        splitmix64(self.state)
    }

    /// A uniform number below `bound`, which is not zero.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Whether an event of this probability, in parts of 2^32, happens.
    #[inline]
    pub(crate) fn happens(&mut self, probability: u64) -> bool {
        probability > 0 && (self.next() >> 32) < probability
    }

    /// An exponential number with this mean, at least 1.
    #[inline]
    pub(crate) fn exponential(&mut self, mean: u64) -> u64 {
        let step = (self.next() >> 54) as usize;
        ((mean as f32 * self.exponential[step]) as u64).max(1)
    }
}
