//! By how much an engine may slow down the program that it works in.
//!
//! What it spends of the program's time (its own work at safe points, and the faults that writes to merged pages cost)
//! is held against a share of the time that has passed. Work that does not fit now waits until time has passed.

use std::time::Duration;

/// What may be spent, and what was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// Of the time that has passed, from 0 to 1; `None` for no bound.
    share: Option<f64>,
    spent: Duration,
}

impl Allowance {
    /// Nothing spent yet.
    pub fn new(share: Option<f64>) -> Self {
        let share = share.map(|share| if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) });
        Self { share, spent: Duration::ZERO }
    }

    /// What was spent so far.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// So much was spent.
    pub fn spend(&mut self, time: Duration) {
        self.spent += time;
    }

    /// How much may be spent now, so long after the beginning; `None` if there is no bound.
    ///
    /// The bound holds against the time that the program would have taken by itself: with `s` spent of `t`, it was
    /// slowed by `s / (t - s)`.
    pub fn room(&self, elapsed: Duration) -> Option<Duration> {
        let share = self.share?;
        let allowed = elapsed.mul_f64(share / (1.0 + share));
        Some(allowed.saturating_sub(self.spent))
    }
}

/// The shortest and the longest rest between two rounds of work in the background.
const SHORTEST: Duration = Duration::from_millis(200);
const LONGEST: Duration = Duration::from_secs(60);

/// How long to rest after a round of work, so that all rounds together take at most a share of one CPU; longer, twice
/// for each round in a row that found nothing to do.
pub fn pause(took: Duration, share: f64, idle: u32) -> Duration {
    let share = if share.is_nan() { 0.001 } else { share.clamp(0.001, 1.0) };
    let rest = took.mul_f64(1.0 / share - 1.0).max(SHORTEST);
    let longer = (SHORTEST * 2u32.saturating_pow(idle.min(16))).min(LONGEST);
    rest.max(longer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_stays_within_the_share() {
        let second = Duration::from_secs(1);
        assert_eq!(Allowance::new(None).room(second), None);
        let mut allowance = Allowance::new(Some(0.25));
        assert_eq!(allowance.room(Duration::ZERO), Some(Duration::ZERO));
        assert_eq!(
            allowance.room(10 * second),
            Some(2 * second),
            "eight seconds of its own and a quarter of them more"
        );
        allowance.spend(3 * second / 2);
        assert_eq!(allowance.room(10 * second), Some(second / 2));
        allowance.spend(second);
        assert_eq!(allowance.room(10 * second), Some(Duration::ZERO), "never less than nothing");
        assert_eq!(allowance.spent(), 5 * second / 2);
    }

    #[test]
    fn rests_keep_the_share_and_grow_while_there_is_nothing_to_do() {
        let second = Duration::from_secs(1);
        assert_eq!(pause(second, 0.1, 0), 9 * second);
        assert_eq!(pause(second, 1.0, 0), SHORTEST);
        assert_eq!(pause(second, 1.0, 3), 8 * SHORTEST);
        assert_eq!(pause(second, 1.0, u32::MAX), LONGEST);
        assert_eq!(pause(100 * second, 0.5, 9), 100 * second, "the share holds whatever else");
        assert_eq!(pause(second, 0.0, 0), 999 * second);
    }
}
