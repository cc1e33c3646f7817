//! By how much an engine may slow down the program that it works in.
//!
//! What it spends of the program's time (its own work at safe points, and the faults that merging costs the program) is
//! held against a share of the time that has passed. Work that does not fit now waits until time has passed, and work
//! that does not pay is done less and less often.

use pagefold_base::savings::BYTES_PER_CPU_SECOND;
use pagefold_base::units::{Bytes, NetBytes};
use std::time::Duration;

/// What may be spent, and what was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeBudget {
    /// Of the time that has passed, from 0 to 1; `None` for no bound.
    max_slowdown: Option<f64>,
    /// For how long the program runs at least.
    min_runtime: Duration,
    spent: Duration,
}

impl TimeBudget {
    /// Nothing spent yet, by a program that runs for some time at least: what may be spent of that is there from the
    /// beginning.
    pub fn new(max_slowdown: Option<f64>, lifetime: Duration) -> Self {
        let share = max_slowdown.map(|share| if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) });
        Self { max_slowdown: share, min_runtime: lifetime, spent: Duration::ZERO }
    }

    /// What was spent so far.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// So much was spent.
    pub fn spend(&mut self, time: Duration) {
        self.spent += time;
    }

    /// How much may be spent now, so long after the beginning; `None` if there is no bound. What is not earned yet is
    /// there only for what is expected to pay: whoever spent it in vain would have nothing left for that.
    ///
    /// The bound holds against the time that the program would have taken by itself: with `s` spent of `t`, it was
    /// slowed by `s / (t - s)`.
    pub fn available(&self, elapsed: Duration, is_profitable: bool) -> Option<Duration> {
        let share = self.max_slowdown?;
        let counted = if is_profitable { elapsed.max(self.min_runtime) } else { elapsed };
        let allowed = counted.mul_f64(share / (1.0 + share));
        Some(allowed.saturating_sub(self.spent))
    }
}

/// The shortest and the longest rest between two rounds of work in the background.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// How long to rest after a round of work, so that all rounds together take at most a share of one CPU; longer, twice
/// for each round in a row that found nothing to do.
pub fn pause_after_round(took: Duration, cpu_share: f64, idle_rounds: u32) -> Duration {
    let share = if cpu_share.is_nan() { 0.001 } else { cpu_share.clamp(0.001, 1.0) };
    let rest = took.mul_f64(1.0 / share - 1.0).max(MIN_PAUSE);
    let longer = (MIN_PAUSE * 2u32.saturating_pow(idle_rounds.min(16))).min(MAX_PAUSE);
    rest.max(longer)
}

/// A round of work: what it took of the program, and what it won.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRound {
    /// The time that it took.
    pub time_spent: Duration,
    /// Memory that it won, less what of former rounds did not last.
    pub net_gained: NetBytes,
    /// Whether it, or those before since the last such one, looked at everything that could be.
    pub is_complete: bool,
}

impl WorkRound {
    /// Whether it won anything, and no less than its time is worth ([`BYTES_PER_CPU_SECOND`]).
    pub fn is_profitable(&self) -> bool {
        self.net_gained.0 > 0 && self.net_gained.0 >= bytes_for_cpu_time(self.time_spent).0.cast_signed()
    }
}

/// What some CPU time is worth.
fn bytes_for_cpu_time(time: Duration) -> Bytes {
    Bytes((time.as_secs_f64() * BYTES_PER_CPU_SECOND as f64) as u64)
}

/// When there is to be another round, after some that did not pay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundBackoff {
    /// How many in a row did not.
    unprofitable_rounds: u32,
    /// When it is over.
    paused_until: Duration,
    /// What they took more than they won.
    net_debt: NetBytes,
    /// What another round has to win: as much as the dearest of late, of which each counts half of the next.
    min_gain: Bytes,
}

/// So many rounds' worth is owed at most: a program that fills its memory once is not held to that for ever.
const MAX_DEBT_ROUNDS: i64 = 4;

impl RoundBackoff {
    /// A round was made at a time, of which so much memory was promising: new, or not looked at often enough to tell.
    ///
    /// It makes up for those before, too: what is merged and written by turns is won in every second one. Rounds that
    /// were cut short say nothing of what they did not come to, and one that was made during the rest, for the sake of
    /// others, does not prolong it. What is promising says that everything may be different.
    pub fn record_round(&mut self, round: WorkRound, now: Duration, promising_bytes: Bytes) {
        if promising_bytes >= self.min_gain {
            *self = Self { min_gain: self.min_gain, ..Self::default() };
        }
        let worth = bytes_for_cpu_time(round.time_spent);
        self.min_gain = worth.max(Bytes(self.min_gain.0 / 2));
        let owed = self.net_debt.0.saturating_add(worth.0.cast_signed()).saturating_sub(round.net_gained.0);
        self.net_debt = NetBytes(owed.clamp(0, MAX_DEBT_ROUNDS * self.min_gain.0.cast_signed()));
        if owed <= 0 {
            (self.unprofitable_rounds, self.paused_until) = (0, now);
        } else if now >= self.paused_until {
            self.unprofitable_rounds = self.unprofitable_rounds.saturating_add(u32::from(round.is_complete));
            self.paused_until = if self.unprofitable_rounds == 0 {
                now
            } else {
                now + pause_after_round(Duration::ZERO, 1.0, self.unprofitable_rounds)
            };
        }
    }

    /// Whether it is over at a time: at once if what is promising could pay for a round by itself.
    pub fn is_expired(&self, now: Duration, promising_bytes: Bytes) -> bool {
        now >= self.paused_until || self.expects_profit(promising_bytes)
    }

    /// Whether another round is likely to pay: the last one did, or what is promising could.
    pub fn expects_profit(&self, promising_bytes: Bytes) -> bool {
        self.net_debt.0 == 0 || promising_bytes >= self.min_gain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spent_time_stays_within_max_slowdown() {
        let second = Duration::from_secs(1);
        assert_eq!(TimeBudget::new(None, Duration::ZERO).available(second, true), None);
        let mut allowance = TimeBudget::new(Some(0.25), Duration::ZERO);
        assert_eq!(allowance.available(Duration::ZERO, true), Some(Duration::ZERO));
        assert_eq!(
            allowance.available(10 * second, true),
            Some(2 * second),
            "eight seconds of its own and a quarter of them more"
        );
        allowance.spend(3 * second / 2);
        assert_eq!(allowance.available(10 * second, true), Some(second / 2));
        allowance.spend(second);
        assert_eq!(allowance.available(10 * second, true), Some(Duration::ZERO), "never less than nothing");
        assert_eq!(allowance.spent(), 5 * second / 2);
    }

    #[test]
    fn pauses_keep_the_cpu_share_and_grow_while_idle() {
        let second = Duration::from_secs(1);
        assert_eq!(pause_after_round(second, 0.1, 0), 9 * second);
        assert_eq!(pause_after_round(second, 1.0, 0), MIN_PAUSE);
        assert_eq!(pause_after_round(second, 1.0, 3), 8 * MIN_PAUSE);
        assert_eq!(pause_after_round(second, 1.0, u32::MAX), MAX_PAUSE);
        assert_eq!(pause_after_round(100 * second, 0.5, 9), 100 * second, "the share holds whatever else");
        assert_eq!(pause_after_round(second, 0.0, 0), 999 * second);
    }

    #[test]
    fn min_runtime_is_available_from_the_start() {
        let second = Duration::from_secs(1);
        let mut allowance = TimeBudget::new(Some(0.25), 10 * second);
        assert_eq!(allowance.available(5 * second, false), Some(second), "by what does not pay, as it is earned");
        assert_eq!(allowance.available(Duration::ZERO, true), Some(2 * second));
        allowance.spend(2 * second);
        assert_eq!(allowance.available(10 * second, true), Some(Duration::ZERO), "and not once more");
        assert_eq!(allowance.available(15 * second, false), Some(second));
    }

    const PROFITABLE_ROUND: WorkRound =
        WorkRound { time_spent: Duration::from_millis(10), net_gained: NetBytes(1 << 20), is_complete: true };

    #[test]
    fn round_of_10_ms_is_profitable_from_1_mib() {
        assert!(
            PROFITABLE_ROUND.is_profitable()
                && !WorkRound { net_gained: NetBytes((1 << 20) - 4096), ..PROFITABLE_ROUND }.is_profitable()
        );
        assert!(
            !WorkRound { net_gained: NetBytes(-4096), ..PROFITABLE_ROUND }.is_profitable(),
            "more was written than merged"
        );
    }

    const NO_BYTES: Bytes = Bytes(0);
    const MIB: Bytes = Bytes(1 << 20);

    #[test]
    fn round_without_gain_is_not_profitable() {
        assert!(!WorkRound { time_spent: Duration::ZERO, net_gained: NetBytes(0), is_complete: false }.is_profitable());
    }

    #[test]
    fn unprofitable_rounds_back_off_exponentially() {
        let ms = Duration::from_millis;
        let (vain, mut rest, mut now) =
            (WorkRound { net_gained: NetBytes(0), ..PROFITABLE_ROUND }, RoundBackoff::default(), ms(1000));
        assert!(rest.is_expired(Duration::ZERO, NO_BYTES) && rest.expects_profit(NO_BYTES), "before the first");
        rest.record_round(PROFITABLE_ROUND, now, NO_BYTES);
        assert!(rest.is_expired(now, NO_BYTES) && rest.expects_profit(NO_BYTES));
        rest.record_round(WorkRound { is_complete: false, ..vain }, now, NO_BYTES);
        assert!(rest.is_expired(now, NO_BYTES), "what it did not come to may pay");
        let waits = [400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000];
        for wait in waits {
            rest.record_round(vain, now, NO_BYTES);
            rest.record_round(vain, now + ms(wait / 2), NO_BYTES);
            assert!(!rest.is_expired(now + ms(wait - 1), Bytes(MIB.0 - 1)), "it was not one of its own");
            assert!(!rest.expects_profit(NO_BYTES) && rest.expects_profit(MIB) && rest.is_expired(now, MIB));
            now += ms(wait);
            assert!(rest.is_expired(now, NO_BYTES));
        }
        rest.record_round(WorkRound { is_complete: false, ..vain }, now, NO_BYTES);
        assert!(!rest.is_expired(now + ms(59_999), NO_BYTES), "as long as before");
        rest.record_round(PROFITABLE_ROUND, now, MIB);
        assert!(rest.is_expired(now, NO_BYTES), "what was owed is forgotten for what is new");
        rest.record_round(vain, now, MIB);
        assert!(
            !rest.is_expired(now + ms(399), NO_BYTES) && rest.is_expired(now + ms(400), NO_BYTES),
            "as if for the first time"
        );
    }

    #[test]
    fn cheap_round_only_halves_min_gain() {
        let mut rest = RoundBackoff::default();
        let vain =
            |cost| WorkRound { time_spent: Duration::from_millis(cost), net_gained: NetBytes(0), is_complete: true };
        rest.record_round(vain(40), Duration::ZERO, NO_BYTES);
        assert!(rest.expects_profit(Bytes(4 << 20)) && !rest.expects_profit(Bytes(4 << 19)));
        rest.record_round(vain(0), Duration::from_secs(1), NO_BYTES);
        assert!(rest.expects_profit(Bytes(4 << 19)) && !rest.expects_profit(Bytes(4 << 18)));
    }

    #[test]
    fn alternating_gain_and_loss_is_not_profitable() {
        let mut rest = RoundBackoff::default();
        let at = |round: u64| Duration::from_secs(100 * round);
        let rests: Vec<bool> = (0..8)
            .map(|round| {
                let won = NetBytes(if round % 2 == 0 { 3 << 20 } else { -3 << 20 });
                rest.record_round(WorkRound { net_gained: won, ..PROFITABLE_ROUND }, at(round), NO_BYTES);
                !rest.is_expired(at(round), NO_BYTES)
            })
            .collect();
        assert_eq!(rests, [false, true, true, true, true, true, true, true]);
        rest.record_round(WorkRound { net_gained: NetBytes(5 << 20), ..PROFITABLE_ROUND }, at(8), NO_BYTES);
        assert!(rest.is_expired(at(8), NO_BYTES), "no more is owed than four rounds' worth");
    }
}
