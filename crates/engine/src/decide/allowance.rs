//! By how much an engine may slow down the program that it works in.
//!
//! What it spends of the program's time (its own work at safe points, and the faults that merging costs the program) is
//! held against a share of the time that has passed. Work that does not fit now waits until time has passed, and work
//! that does not pay is done less and less often.

use pagefold_base::savings::CPU_SECOND_BYTES;
use pagefold_base::units::{Bytes, NetBytes};
use std::time::Duration;

/// What may be spent, and what was.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Allowance {
    /// Of the time that has passed, from 0 to 1; `None` for no bound.
    share: Option<f64>,
    /// For how long the program runs at least.
    lifetime: Duration,
    spent: Duration,
}

impl Allowance {
    /// Nothing spent yet, by a program that runs for some time at least: what may be spent of that is there from the
    /// beginning.
    pub fn new(share: Option<f64>, lifetime: Duration) -> Self {
        let share = share.map(|share| if share.is_nan() { 0.0 } else { share.clamp(0.0, 1.0) });
        Self { share, lifetime, spent: Duration::ZERO }
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
    pub fn room(&self, elapsed: Duration, pays: bool) -> Option<Duration> {
        let share = self.share?;
        let counted = if pays { elapsed.max(self.lifetime) } else { elapsed };
        let allowed = counted.mul_f64(share / (1.0 + share));
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

/// A round of work: what it took of the program, and what it won.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// The time that it took.
    pub cost: Duration,
    /// Memory that it won, less what of former rounds did not last.
    pub won: NetBytes,
    /// Whether it, or those before since the last such one, looked at everything that could be.
    pub whole: bool,
}

impl Round {
    /// Whether it won anything, and no less than its time is worth ([`CPU_SECOND_BYTES`]).
    pub fn pays(&self) -> bool {
        self.won.0 > 0 && self.won.0 >= worth(self.cost).0.cast_signed()
    }
}

/// What some CPU time is worth.
fn worth(time: Duration) -> Bytes {
    Bytes((time.as_secs_f64() * CPU_SECOND_BYTES as f64) as u64)
}

/// When there is to be another round, after some that did not pay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rest {
    /// How many in a row did not.
    idle: u32,
    /// When it is over.
    until: Duration,
    /// What they took more than they won.
    debt: NetBytes,
    /// What another round has to win: as much as the dearest of late, of which each counts half of the next.
    price: Bytes,
}

/// So many rounds' worth is owed at most: a program that fills its memory once is not held to that for ever.
const OWED: i64 = 4;

impl Rest {
    /// A round was made at a time, of which so much memory was promising: new, or not looked at often enough to tell.
    ///
    /// It makes up for those before, too: what is merged and written by turns is won in every second one. Rounds that
    /// were cut short say nothing of what they did not come to, and one that was made during the rest, for the sake of
    /// others, does not prolong it. What is promising says that everything may be different.
    pub fn note(&mut self, round: Round, now: Duration, promising: Bytes) {
        if promising >= self.price {
            *self = Self { price: self.price, ..Self::default() };
        }
        let worth = worth(round.cost);
        self.price = worth.max(Bytes(self.price.0 / 2));
        let owed = self.debt.0.saturating_add(worth.0.cast_signed()).saturating_sub(round.won.0);
        self.debt = NetBytes(owed.clamp(0, OWED * self.price.0.cast_signed()));
        if owed <= 0 {
            (self.idle, self.until) = (0, now);
        } else if now >= self.until {
            self.idle = self.idle.saturating_add(u32::from(round.whole));
            self.until = if self.idle == 0 { now } else { now + pause(Duration::ZERO, 1.0, self.idle) };
        }
    }

    /// Whether it is over at a time: at once if what is promising could pay for a round by itself.
    pub fn is_over(&self, now: Duration, promising: Bytes) -> bool {
        now >= self.until || self.expects(promising)
    }

    /// Whether another round is likely to pay: the last one did, or what is promising could.
    pub fn expects(&self, promising: Bytes) -> bool {
        self.debt.0 == 0 || promising >= self.price
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_spent_stays_within_the_share() {
        let second = Duration::from_secs(1);
        assert_eq!(Allowance::new(None, Duration::ZERO).room(second, true), None);
        let mut allowance = Allowance::new(Some(0.25), Duration::ZERO);
        assert_eq!(allowance.room(Duration::ZERO, true), Some(Duration::ZERO));
        assert_eq!(
            allowance.room(10 * second, true),
            Some(2 * second),
            "eight seconds of its own and a quarter of them more"
        );
        allowance.spend(3 * second / 2);
        assert_eq!(allowance.room(10 * second, true), Some(second / 2));
        allowance.spend(second);
        assert_eq!(allowance.room(10 * second, true), Some(Duration::ZERO), "never less than nothing");
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

    #[test]
    fn what_a_program_runs_for_may_be_spent_of_from_the_beginning() {
        let second = Duration::from_secs(1);
        let mut allowance = Allowance::new(Some(0.25), 10 * second);
        assert_eq!(allowance.room(5 * second, false), Some(second), "by what does not pay, as it is earned");
        assert_eq!(allowance.room(Duration::ZERO, true), Some(2 * second));
        allowance.spend(2 * second);
        assert_eq!(allowance.room(10 * second, true), Some(Duration::ZERO), "and not once more");
        assert_eq!(allowance.room(15 * second, false), Some(second));
    }

    const PAYS: Round = Round { cost: Duration::from_millis(10), won: NetBytes(1 << 20), whole: true };

    #[test]
    fn a_round_pays_with_a_mebibyte_for_ten_milliseconds() {
        assert!(PAYS.pays() && !Round { won: NetBytes((1 << 20) - 4096), ..PAYS }.pays());
        assert!(!Round { won: NetBytes(-4096), ..PAYS }.pays(), "more was written than merged");
    }

    const NONE: Bytes = Bytes(0);
    const MIB: Bytes = Bytes(1 << 20);

    #[test]
    fn nothing_won_for_nothing_does_not_pay() {
        assert!(!Round { cost: Duration::ZERO, won: NetBytes(0), whole: false }.pays());
    }

    #[test]
    fn rounds_that_do_not_pay_come_less_and_less_often() {
        let ms = Duration::from_millis;
        let (vain, mut rest, mut now) = (Round { won: NetBytes(0), ..PAYS }, Rest::default(), ms(1000));
        assert!(rest.is_over(Duration::ZERO, NONE) && rest.expects(NONE), "before the first");
        rest.note(PAYS, now, NONE);
        assert!(rest.is_over(now, NONE) && rest.expects(NONE));
        rest.note(Round { whole: false, ..vain }, now, NONE);
        assert!(rest.is_over(now, NONE), "what it did not come to may pay");
        let waits = [400, 800, 1600, 3200, 6400, 12_800, 25_600, 51_200, 60_000, 60_000];
        for wait in waits {
            rest.note(vain, now, NONE);
            rest.note(vain, now + ms(wait / 2), NONE);
            assert!(!rest.is_over(now + ms(wait - 1), Bytes(MIB.0 - 1)), "it was not one of its own");
            assert!(!rest.expects(NONE) && rest.expects(MIB) && rest.is_over(now, MIB));
            now += ms(wait);
            assert!(rest.is_over(now, NONE));
        }
        rest.note(Round { whole: false, ..vain }, now, NONE);
        assert!(!rest.is_over(now + ms(59_999), NONE), "as long as before");
        rest.note(PAYS, now, MIB);
        assert!(rest.is_over(now, NONE), "what was owed is forgotten for what is new");
        rest.note(vain, now, MIB);
        assert!(!rest.is_over(now + ms(399), NONE) && rest.is_over(now + ms(400), NONE), "as if for the first time");
    }

    #[test]
    fn what_a_round_has_to_win_is_not_forgotten_for_a_cheap_one() {
        let mut rest = Rest::default();
        let vain = |cost| Round { cost: Duration::from_millis(cost), won: NetBytes(0), whole: true };
        rest.note(vain(40), Duration::ZERO, NONE);
        assert!(rest.expects(Bytes(4 << 20)) && !rest.expects(Bytes(4 << 19)));
        rest.note(vain(0), Duration::from_secs(1), NONE);
        assert!(rest.expects(Bytes(4 << 19)) && !rest.expects(Bytes(4 << 18)));
    }

    #[test]
    fn what_is_won_and_lost_by_turns_does_not_pay() {
        let mut rest = Rest::default();
        let at = |round: u64| Duration::from_secs(100 * round);
        let rests: Vec<bool> = (0..8)
            .map(|round| {
                let won = NetBytes(if round % 2 == 0 { 3 << 20 } else { -3 << 20 });
                rest.note(Round { won, ..PAYS }, at(round), NONE);
                !rest.is_over(at(round), NONE)
            })
            .collect();
        assert_eq!(rests, [false, true, true, true, true, true, true, true]);
        rest.note(Round { won: NetBytes(5 << 20), ..PAYS }, at(8), NONE);
        assert!(rest.is_over(at(8), NONE), "no more is owed than four rounds' worth");
    }
}
