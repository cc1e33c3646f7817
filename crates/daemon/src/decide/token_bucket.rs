//! Token bucket for CPU time.
//!
//! Tokens are CPU seconds. Within any time `t`, at most `rate * t + burst` is spent, plus what is spent between two
//! readings before the daemon can halt its work.

use std::time::Duration;

/// CPU time that may be spent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CpuTokenBucket {
    rate: f64,
    burst_seconds: f64,
    available_seconds: f64,
    updated_at: Duration,
    total_spent: Duration,
}

impl CpuTokenBucket {
    /// A full bucket with this rate (share of one CPU) and burst. `spent` is the reading of the CPU time at `at`.
    pub fn new(rate: f64, burst: Duration, at: Duration, spent: Duration) -> Self {
        let burst = burst.as_secs_f64();
        Self { rate: rate.max(0.0), burst_seconds: burst, available_seconds: burst, updated_at: at, total_spent: spent }
    }

    /// Change the limits. Available tokens stay, up to the new burst.
    pub fn set_limits(&mut self, rate: f64, burst: Duration) {
        self.rate = rate.max(0.0);
        self.burst_seconds = burst.as_secs_f64();
        self.available_seconds = self.available_seconds.min(self.burst_seconds);
    }

    /// Continue with the tokens that another bucket had some time ago.
    pub fn continue_from(&mut self, available_seconds: f64, elapsed: Duration) {
        self.available_seconds = (available_seconds + self.rate * elapsed.as_secs_f64()).min(self.burst_seconds);
    }

    /// Update the bucket with the total CPU time spent at a time.
    pub fn update(&mut self, at: Duration, spent: Duration) {
        let elapsed = at.saturating_sub(self.updated_at).as_secs_f64();
        let cost = spent.saturating_sub(self.total_spent).as_secs_f64();
        self.available_seconds = (self.available_seconds + self.rate * elapsed - cost).min(self.burst_seconds);
        (self.updated_at, self.total_spent) = (self.updated_at.max(at), self.total_spent.max(spent));
    }

    /// Total CPU time at the last update.
    pub fn total_spent(&self) -> Duration {
        self.total_spent
    }

    /// CPU seconds available now; negative after overspending.
    pub fn available_seconds(&self) -> f64 {
        self.available_seconds
    }

    /// Burst in CPU seconds.
    pub fn burst_seconds(&self) -> f64 {
        self.burst_seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn burst_is_available_and_refills_at_the_rate() {
        let mut bucket = CpuTokenBucket::new(0.1, 10 * SECOND, Duration::ZERO, 3 * SECOND);
        assert_eq!(bucket.available_seconds(), 10.0);
        bucket.update(10 * SECOND, 13 * SECOND);
        assert!((bucket.available_seconds() - 1.0).abs() < 1e-9, "ten seconds were spent, and one was refilled");
        bucket.update(1000 * SECOND, 13 * SECOND);
        assert_eq!(bucket.available_seconds(), 10.0);
        bucket.set_limits(0.1, 2 * SECOND);
        assert_eq!((bucket.available_seconds(), bucket.burst_seconds()), (2.0, 2.0));
    }

    proptest! {
        /// A consumer that spends only available tokens stays within the bound in every window.
        #[test]
        fn spending_stays_within_rate_and_burst(
            steps in prop::collection::vec((1u64..5_000, 0.0f64..1.5), 1..100),
            average in 0.0f64..1.0,
            burst in 0u64..20,
        ) {
            let mut budget = CpuTokenBucket::new(average, Duration::from_secs(burst), Duration::ZERO, Duration::ZERO);
            let (mut at, mut spent) = (Duration::ZERO, 0.0);
            let mut samples = vec![(0.0, 0.0)];
            for (pause, request) in steps {
                at += Duration::from_millis(pause);
                budget.update(at, Duration::from_secs_f64(spent));
                samples.push((at.as_secs_f64(), spent));
                spent += request.min(budget.available_seconds().max(0.0));
                samples.push((at.as_secs_f64(), spent));
                budget.update(at, Duration::from_secs_f64(spent));
            }
            for (i, (from, before)) in samples.iter().enumerate() {
                for (to, after) in &samples[i..] {
                    prop_assert!(after - before <= average * (to - from) + burst as f64 + 1e-5);
                }
            }
        }
    }
}
