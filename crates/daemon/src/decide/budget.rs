//! CPU time as a budget: so much on average, and so much saved up for a burst.
//!
//! A token bucket in CPU seconds. Over any time `t` no more than `average * t + burst` is spent, but for what is spent
//! between two readings before anybody can tell it to stop.

use std::time::Duration;

/// CPU time that may be spent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    average: f64,
    burst: f64,
    left: f64,
    at: Duration,
    spent: Duration,
}

impl Budget {
    /// A share of one CPU on average, and CPU time that may be saved up; all of that is there. `spent` is the reading
    /// of the CPU time at `at`.
    pub fn new(average: f64, burst: Duration, at: Duration, spent: Duration) -> Self {
        let burst = burst.as_secs_f64();
        Self { average: average.max(0.0), burst, left: burst, at, spent }
    }

    /// Other bounds from now on. What was saved up stays, as far as the new ones let it.
    pub fn rebound(&mut self, average: f64, burst: Duration) {
        self.average = average.max(0.0);
        self.burst = burst.as_secs_f64();
        self.left = self.left.min(self.burst);
    }

    /// Take note of how much was spent in all by a time.
    pub fn read(&mut self, at: Duration, spent: Duration) {
        let elapsed = at.saturating_sub(self.at).as_secs_f64();
        let cost = spent.saturating_sub(self.spent).as_secs_f64();
        self.left = (self.left + self.average * elapsed - cost).min(self.burst);
        (self.at, self.spent) = (self.at.max(at), self.spent.max(spent));
    }

    /// The CPU time at the last reading.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// CPU seconds that may be spent at once; negative while too much was.
    pub fn left(&self) -> f64 {
        self.left
    }

    /// CPU seconds that can be saved up.
    pub fn burst(&self) -> f64 {
        self.burst
    }

    /// How long until so much may be spent at once; `None` if never, or not within the range of [`Duration`].
    pub fn until(&self, cost: f64) -> Option<Duration> {
        let missing = (cost - self.left).max(0.0);
        if cost > self.burst || (missing > 0.0 && self.average <= 0.0) {
            return None;
        }
        if missing > 0.0 { Duration::try_from_secs_f64(missing / self.average).ok() } else { Some(Duration::ZERO) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_burst_is_there_and_comes_back() {
        let mut budget = Budget::new(0.1, 10 * SECOND, Duration::ZERO, 3 * SECOND);
        assert_eq!(budget.left(), 10.0);
        budget.read(10 * SECOND, 13 * SECOND);
        assert!((budget.left() - 1.0).abs() < 1e-9, "ten seconds were spent, and one came back");
        assert_eq!(budget.until(2.0), Some(10 * SECOND));
        assert_eq!(budget.until(11.0), None, "more than can be saved up");
        budget.read(1000 * SECOND, 13 * SECOND);
        assert_eq!(budget.left(), 10.0);
        budget.rebound(0.1, 2 * SECOND);
        assert_eq!((budget.left(), budget.burst()), (2.0, 2.0));
    }

    #[test]
    fn until_is_none_where_the_average_is_too_small_for_a_duration() {
        for average in [0.0, f64::MIN_POSITIVE, 1e-302, 1e-21] {
            let mut budget = Budget::new(average, Duration::from_millis(150), Duration::ZERO, Duration::ZERO);
            budget.read(SECOND, Duration::from_millis(100));
            assert_eq!(budget.until(0.1), None, "{average:e}");
            assert_eq!(budget.until(0.01), Some(Duration::ZERO), "{average:e}");
        }
    }

    proptest! {
        /// Whoever spends only what is left keeps to the bound in every window.
        #[test]
        fn no_window_holds_more_than_the_bound(
            steps in prop::collection::vec((1u64..5_000, 0.0f64..1.5), 1..100),
            average in 0.0f64..1.0,
            burst in 0u64..20,
        ) {
            let mut budget = Budget::new(average, Duration::from_secs(burst), Duration::ZERO, Duration::ZERO);
            let (mut at, mut spent) = (Duration::ZERO, 0.0);
            let mut seen = vec![(0.0, 0.0)];
            for (pause, wish) in steps {
                at += Duration::from_millis(pause);
                budget.read(at, Duration::from_secs_f64(spent));
                seen.push((at.as_secs_f64(), spent));
                spent += wish.min(budget.left().max(0.0));
                seen.push((at.as_secs_f64(), spent));
                budget.read(at, Duration::from_secs_f64(spent));
            }
            for (i, (from, before)) in seen.iter().enumerate() {
                for (to, after) in &seen[i..] {
                    prop_assert!(after - before <= average * (to - from) + burst as f64 + 1e-5);
                }
            }
        }
    }
}
