//! By how much an engine may slow down the program that it works in.
//!
//! What it spends of the program's time (its own work at safe points, and the faults that writes to merged pages cost)
//! is held against a share of the time that has passed. Work that does not fit now waits until time has passed, and work
//! that does not pay is done less and less often.

use crate::savings::CPU_SECOND_BYTES;
use crate::units::{Bytes, NetBytes};
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

    /// The share that may be spent; `None` if there is no bound.
    pub fn share(&self) -> Option<f64> {
        self.share
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
    /// there only for what is likely to pay: whoever spent it in vain would have nothing left for that.
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
    /// The time of the program, and the faults of what was written since.
    pub cost: Duration,
    /// Memory that was merged or given back, less what was written since it had been.
    pub won: NetBytes,
    /// Whether everything was looked at that could be.
    pub whole: bool,
}

impl Round {
    /// Whether it won what its time is worth ([`CPU_SECOND_BYTES`]).
    pub fn pays(&self) -> bool {
        self.won.0 >= worth(self.cost).0.cast_signed()
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
    until: Duration,
    /// What they took more than they won.
    debt: NetBytes,
    /// What a round as dear as the last one has to win.
    price: Bytes,
}

/// So many rounds' worth is owed at most: a program that fills its memory once is not held to that for ever.
const OWED: i64 = 4;

impl Rest {
    /// A round ended at a time, before which there was so much new memory. It pays if it makes up for those before,
    /// too: what is merged and written by turns is won in every second one. One that was cut short says nothing of what
    /// it did not come to, and what is new says that everything may be different.
    pub fn note(&mut self, round: Round, share: f64, now: Duration, new: Bytes) {
        if new >= self.price {
            *self = Self::default();
        }
        self.price = worth(round.cost);
        let price = self.price.0.cast_signed();
        let owed = self.debt.0.saturating_add(price).saturating_sub(round.won.0);
        self.debt = NetBytes(owed.clamp(0, OWED * price));
        self.idle = match (owed <= 0, round.whole) {
            (true, _) => 0,
            (false, true) => self.idle.saturating_add(1),
            (false, false) => self.idle,
        };
        self.until = if self.idle == 0 { now } else { now + pause(round.cost, share, self.idle) };
    }

    /// Whether it is over at a time, with so much new memory since: at once if that alone could pay for a round.
    pub fn is_over(&self, now: Duration, new: Bytes) -> bool {
        now >= self.until || new >= self.price
    }

    /// Whether another round is likely to pay, with so much new memory since the last one: that one did, or what is new
    /// could.
    pub fn promises(&self, new: Bytes) -> bool {
        self.debt.0 == 0 || new >= self.price
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

    #[test]
    fn rounds_that_do_not_pay_come_less_and_less_often() {
        let (share, ms) = (0.02, Duration::from_millis);
        let (vain, mut rest, mut now) = (Round { won: NetBytes(0), ..PAYS }, Rest::default(), ms(1000));
        assert!(rest.is_over(Duration::ZERO, NONE) && rest.promises(NONE), "before the first");
        rest.note(PAYS, share, now, NONE);
        assert!(rest.is_over(now, NONE));
        rest.note(Round { whole: false, ..vain }, share, now, NONE);
        assert!(rest.is_over(now, NONE), "what it did not come to may pay");
        for waits in [490, 800, 1600, 3200, 6400] {
            rest.note(vain, share, now, NONE);
            assert!(!rest.promises(NONE) && rest.promises(Bytes(1 << 20)));
            assert!(!rest.is_over(now + ms(waits - 1), Bytes((1 << 20) - 4096)));
            assert!(rest.is_over(now, Bytes(1 << 20)), "so much that is new could pay");
            now += ms(waits);
            assert!(rest.is_over(now, NONE));
        }
        rest.note(Round { whole: false, ..vain }, share, now, NONE);
        assert!(!rest.is_over(now + ms(6399), NONE), "as long as before");
        rest.note(PAYS, share, now, Bytes(1 << 20));
        assert!(rest.is_over(now, NONE), "what was owed is forgotten for what is new");
    }

    #[test]
    fn what_is_won_and_lost_by_turns_does_not_pay() {
        let (mut rest, now) = (Rest::default(), Duration::ZERO);
        let rests: Vec<bool> = (0..8)
            .map(|round| {
                let won = NetBytes(if round % 2 == 0 { 3 << 20 } else { -3 << 20 });
                rest.note(Round { won, ..PAYS }, 0.02, now, NONE);
                !rest.is_over(now, NONE)
            })
            .collect();
        assert_eq!(rests, [false, true, true, true, true, true, true, true]);
        rest.note(Round { won: NetBytes(5 << 20), ..PAYS }, 0.02, now, NONE);
        assert!(rest.is_over(now, NONE), "no more is owed than four rounds' worth");
    }
}
