//! How much an engine may slow down its program.
//!
//! The engine compares the program's time that it spends (its own work at safe points, and the faults that merging
//! causes) with a share of the elapsed time. Work that does not fit waits until more time has passed, and unprofitable
//! work is done with exponential backoff.

use pagefold_base::savings::BYTES_PER_CPU_SECOND;
use pagefold_base::units::{Bytes, NetBytes};
use std::time::Duration;

/// Time that may be spent, and time that was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TimeBudget {
    /// Share of the elapsed time, from 0 to 1; `None` for no bound.
    max_slowdown: Option<f64>,
    /// Minimum run time of the program.
    min_runtime: Duration,
    spent: Duration,
}

impl TimeBudget {
    /// Budget with nothing spent yet, for a program that runs at least for `min_runtime`: the share of that time is
    /// available from the beginning.
    pub fn new(max_slowdown: Option<f64>, min_runtime: Duration) -> Self {
        let share = max_slowdown.map(|share| if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) });
        Self { max_slowdown: share, min_runtime, spent: Duration::ZERO }
    }

    /// Time spent so far.
    pub fn spent(&self) -> Duration {
        self.spent
    }

    /// Record spent time.
    pub fn spend(&mut self, time: Duration) {
        self.spent += time;
    }

    /// Time that may be spent now, `elapsed` after the beginning; `None` if there is no bound. Time that is not earned
    /// yet is available only for work that is expected to be profitable: otherwise unprofitable work could use it up.
    ///
    /// The bound is relative to the time that the program would have taken by itself: with `s` spent of `t`, it was
    /// slowed by `s / (t - s)`.
    pub fn available(&self, elapsed: Duration, is_profitable: bool) -> Option<Duration> {
        let share = self.max_slowdown?;
        let run_time = if is_profitable { elapsed.max(self.min_runtime) } else { elapsed };
        let allowed = run_time.mul_f64(share / (1.0 + share));
        Some(allowed.saturating_sub(self.spent))
    }
}

/// Minimum and maximum pause between two rounds of background work.
const MIN_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Pause after a round of work, so that all rounds together use at most a share of one CPU. It doubles with each round
/// in a row that found nothing to do.
pub fn pause_after_round(time_spent: Duration, cpu_share: f64, idle_rounds: u32) -> Duration {
    let share = if cpu_share.is_nan() { 0.001 } else { cpu_share.clamp(0.001, 1.0) };
    let share_pause = time_spent.mul_f64(1.0 / share - 1.0).max(MIN_PAUSE);
    let backoff_pause = (MIN_PAUSE * 2u32.saturating_pow(idle_rounds.min(16))).min(MAX_PAUSE);
    share_pause.max(backoff_pause)
}

/// A round of work: its cost to the program, and its net savings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkRound {
    /// Time that it took.
    pub time_spent: Duration,
    /// Memory saved, minus savings of former rounds that did not last.
    pub net_gained: NetBytes,
    /// Whether this round, or the rounds since the last complete one, scanned all that could be scanned.
    pub is_complete: bool,
}

impl WorkRound {
    /// Whether its net savings are positive, and at least as high as the cost of its time ([`BYTES_PER_CPU_SECOND`]).
    pub fn is_profitable(&self) -> bool {
        self.net_gained.0 > 0 && self.net_gained.0 >= bytes_for_cpu_time(self.time_spent).0.cast_signed()
    }
}

/// Cost of CPU time, in bytes.
fn bytes_for_cpu_time(time: Duration) -> Bytes {
    Bytes((time.as_secs_f64() * BYTES_PER_CPU_SECOND as f64) as u64)
}

/// Backoff after unprofitable rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoundBackoff {
    /// Number of unprofitable rounds in a row.
    unprofitable_rounds: u32,
    /// End of the pause.
    paused_until: Duration,
    /// Excess of the costs of these rounds over their savings.
    net_debt: NetBytes,
    /// Minimum savings of the next round: the cost of the most expensive recent round, where each round halves the
    /// former value.
    min_gain: Bytes,
}

/// Maximum debt, in rounds: a program that fills its memory once is not held to that forever.
const MAX_DEBT_ROUNDS: i64 = 4;

impl RoundBackoff {
    /// Record a round that ended at `now`. `promising_bytes` is memory that is new, or was scanned too few times to
    /// decide.
    ///
    /// A round also has to repay former ones: memory that is alternately merged and written is gained in every second
    /// round. Incomplete rounds give no information on memory that they did not reach. A round during the pause, made
    /// because other members merge, does not prolong the pause. Enough promising memory resets the backoff.
    pub fn record_round(&mut self, round: WorkRound, now: Duration, promising_bytes: Bytes) {
        if promising_bytes >= self.min_gain {
            *self = Self { min_gain: self.min_gain, ..Self::default() };
        }
        let cost = bytes_for_cpu_time(round.time_spent);
        self.min_gain = cost.max(Bytes(self.min_gain.0 / 2));
        let debt = self.net_debt.0.saturating_add(cost.0.cast_signed()).saturating_sub(round.net_gained.0);
        self.net_debt = NetBytes(debt.clamp(0, MAX_DEBT_ROUNDS * self.min_gain.0.cast_signed()));
        if debt <= 0 {
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

    /// Whether the pause is over: at once if the promising memory alone could make a round profitable.
    pub fn is_expired(&self, now: Duration, promising_bytes: Bytes) -> bool {
        now >= self.paused_until || self.expects_profit(promising_bytes)
    }

    /// Whether another round is likely to be profitable: the last ones were, or the promising memory could make it so.
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
        assert_eq!(allowance.available(10 * second, true), Some(Duration::ZERO), "never below zero");
        assert_eq!(allowance.spent(), 5 * second / 2);
    }

    #[test]
    fn pauses_keep_the_cpu_share_and_grow_while_idle() {
        let second = Duration::from_secs(1);
        assert_eq!(pause_after_round(second, 0.1, 0), 9 * second);
        assert_eq!(pause_after_round(second, 1.0, 0), MIN_PAUSE);
        assert_eq!(pause_after_round(second, 1.0, 3), 8 * MIN_PAUSE);
        assert_eq!(pause_after_round(second, 1.0, u32::MAX), MAX_PAUSE);
        assert_eq!(pause_after_round(100 * second, 0.5, 9), 100 * second, "the CPU share always holds");
        assert_eq!(pause_after_round(second, 0.0, 0), 999 * second);
    }

    #[test]
    fn min_runtime_is_available_from_the_start() {
        let second = Duration::from_secs(1);
        let mut allowance = TimeBudget::new(Some(0.25), 10 * second);
        assert_eq!(allowance.available(5 * second, false), Some(second), "unprofitable work gets only earned time");
        assert_eq!(allowance.available(Duration::ZERO, true), Some(2 * second));
        allowance.spend(2 * second);
        assert_eq!(allowance.available(10 * second, true), Some(Duration::ZERO), "and it is available only once");
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
            "more pages were written than merged"
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
        let (unprofitable, mut backoff, mut now) =
            (WorkRound { net_gained: NetBytes(0), ..PROFITABLE_ROUND }, RoundBackoff::default(), ms(1000));
        assert!(
            backoff.is_expired(Duration::ZERO, NO_BYTES) && backoff.expects_profit(NO_BYTES),
            "before the first round"
        );
        backoff.record_round(PROFITABLE_ROUND, now, NO_BYTES);
        assert!(backoff.is_expired(now, NO_BYTES) && backoff.expects_profit(NO_BYTES));
        backoff.record_round(WorkRound { is_complete: false, ..unprofitable }, now, NO_BYTES);
        assert!(backoff.is_expired(now, NO_BYTES), "memory that it did not reach may be profitable");
        let pauses = [400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000];
        for pause in pauses {
            backoff.record_round(unprofitable, now, NO_BYTES);
            backoff.record_round(unprofitable, now + ms(pause / 2), NO_BYTES);
            assert!(
                !backoff.is_expired(now + ms(pause - 1), Bytes(MIB.0 - 1)),
                "a round in the pause does not extend it"
            );
            assert!(!backoff.expects_profit(NO_BYTES) && backoff.expects_profit(MIB) && backoff.is_expired(now, MIB));
            now += ms(pause);
            assert!(backoff.is_expired(now, NO_BYTES));
        }
        backoff.record_round(WorkRound { is_complete: false, ..unprofitable }, now, NO_BYTES);
        assert!(!backoff.is_expired(now + ms(59_999), NO_BYTES), "the pause is as long as before");
        backoff.record_round(PROFITABLE_ROUND, now, MIB);
        assert!(backoff.is_expired(now, NO_BYTES), "new memory cancels the debt");
        backoff.record_round(unprofitable, now, MIB);
        assert!(
            !backoff.is_expired(now + ms(399), NO_BYTES) && backoff.is_expired(now + ms(400), NO_BYTES),
            "as after the first unprofitable round"
        );
    }

    #[test]
    fn cheap_round_only_halves_min_gain() {
        let mut backoff = RoundBackoff::default();
        let unprofitable =
            |cost| WorkRound { time_spent: Duration::from_millis(cost), net_gained: NetBytes(0), is_complete: true };
        backoff.record_round(unprofitable(40), Duration::ZERO, NO_BYTES);
        assert!(backoff.expects_profit(Bytes(4 << 20)) && !backoff.expects_profit(Bytes(4 << 19)));
        backoff.record_round(unprofitable(0), Duration::from_secs(1), NO_BYTES);
        assert!(backoff.expects_profit(Bytes(4 << 19)) && !backoff.expects_profit(Bytes(4 << 18)));
    }

    #[test]
    fn alternating_gain_and_loss_is_not_profitable() {
        let mut backoff = RoundBackoff::default();
        let time_of = |round: u64| Duration::from_secs(100 * round);
        let is_paused: Vec<bool> = (0..8)
            .map(|round| {
                let net_gained = NetBytes(if round % 2 == 0 { 3 << 20 } else { -3 << 20 });
                backoff.record_round(WorkRound { net_gained, ..PROFITABLE_ROUND }, time_of(round), NO_BYTES);
                !backoff.is_expired(time_of(round), NO_BYTES)
            })
            .collect();
        assert_eq!(is_paused, [false, true, true, true, true, true, true, true]);
        backoff.record_round(WorkRound { net_gained: NetBytes(5 << 20), ..PROFITABLE_ROUND }, time_of(8), NO_BYTES);
        assert!(backoff.is_expired(time_of(8), NO_BYTES), "the debt is at most four rounds");
    }
}
