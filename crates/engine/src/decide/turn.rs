//! When the members of a domain merge: together.
//!
//! Ranks of a parallel program wait at each barrier for the slowest of them. If each of them merges as soon as it has
//! room for that, they do so one after another, and the program waits for each: n ranks slow it down n times as much as
//! any of them thinks. So a member that could merge names a moment that is not far, and all merge at their first safe
//! points after it. Ranks that come to safe points at about the same times pass the moment between the same two of
//! them: it lies in the middle between two, as far as the member that names it can tell from its last ones.

use std::time::Duration;

/// How far away the moment at least is that a member names: more than lies between the first and the last rank at a
/// barrier, where ranks share CPUs, too.
const LEAD: Duration = Duration::from_millis(50);

/// A moment that is longer ago than this, and for which a member has not merged, is none for it any more. Safe points
/// that lie farther apart are nothing to wait for.
const LATE: Duration = Duration::from_secs(1);

/// How long at most an answer that it is not a member's turn holds, where safe points come more often than that: asking
/// costs microseconds. A moment is named [`LEAD`] before it comes at the latest, so each member learns of it in time.
const RECHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What a member knows as it comes to a safe point. Times are of a clock that all members share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafePoint {
    /// When it is.
    pub now: Duration,
    /// When the one before was.
    pub before: Option<Duration>,
    /// The moment that was named last, by anybody.
    pub named: Duration,
    /// The moment for which this member merged last, or had no room to.
    pub served: Duration,
    /// Whether there are no other members.
    pub alone: bool,
    /// Whether there is room for a merge that is worth it.
    pub ready: bool,
    /// Whether there is room for one that does anything.
    pub able: bool,
}

/// What a member does at a safe point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Merge.
    Merge,
    /// Go on, and have all merge after this moment.
    Name(Duration),
    /// Go on.
    Pass,
}

impl SafePoint {
    /// Whose turn it is.
    pub fn turn(self) -> Turn {
        let seldom = self.before.is_none_or(|before| self.now.saturating_sub(before) > LATE);
        if self.alone || seldom {
            return if self.ready { Turn::Merge } else { Turn::Pass };
        }
        if self.is_due() {
            return if self.able { Turn::Merge } else { Turn::Pass };
        }
        // One that is farther away than anybody names it is of another clock.
        let to_come = self.named > self.now && self.named <= self.now + 2 * LATE;
        if self.ready && !to_come { Turn::Name(self.between()) } else { Turn::Pass }
    }

    /// When to ask again after the answer was no: at the first safe point after the moment that was named, or after
    /// [`RECHECK_INTERVAL`], by which there may be another one.
    pub fn next_check(now: Duration, named: Duration) -> Duration {
        let recheck = now + RECHECK_INTERVAL;
        if named > now { named.min(recheck) } else { recheck }
    }

    /// In the middle between two safe points that are to come, if they come as the last two did.
    fn between(self) -> Duration {
        let step = self.before.map_or(LEAD, |before| self.now.saturating_sub(before)).max(Duration::from_nanos(1));
        let steps = (LEAD.as_secs_f64() / step.as_secs_f64() - 0.5).ceil().max(0.0);
        self.now + step.mul_f64(steps + 0.5)
    }

    /// Whether it is the first after a moment that was named.
    pub fn is_due(self) -> bool {
        self.named > self.served && self.named <= self.now && self.now - self.named <= LATE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    const POINT: SafePoint = SafePoint {
        now: Duration::from_millis(10_000),
        before: Some(Duration::from_millis(9_900)),
        named: Duration::ZERO,
        served: Duration::ZERO,
        alone: false,
        ready: true,
        able: true,
    };

    #[test]
    fn who_waits_for_nobody_merges_at_once() {
        assert_eq!(SafePoint { alone: true, ..POINT }.turn(), Turn::Merge);
        assert_eq!(SafePoint { before: None, ..POINT }.turn(), Turn::Merge);
        assert_eq!(SafePoint { before: Some(ms(8_000)), ..POINT }.turn(), Turn::Merge, "safe points are rare");
        assert_eq!(SafePoint { alone: true, ready: false, ..POINT }.turn(), Turn::Pass);
    }

    #[test]
    fn the_next_check_comes_no_later_than_the_named_moment() {
        let now = ms(10_000);
        assert_eq!(SafePoint::next_check(now, ms(9_990)), ms(10_005), "none is to come");
        assert_eq!(SafePoint::next_check(now, ms(10_003)), ms(10_003), "it comes first");
        assert_eq!(SafePoint::next_check(now, ms(10_050)), ms(10_005), "another member may name an earlier one");
        assert!(RECHECK_INTERVAL < LEAD, "a moment is known before it comes");
    }

    #[test]
    fn a_moment_is_named_and_served_once() {
        assert_eq!(POINT.turn(), Turn::Name(ms(10_050)), "half a step of 100 ms later");
        assert_eq!(
            SafePoint { before: Some(ms(9_980)), ..POINT }.turn(),
            Turn::Name(ms(10_050)),
            "two steps and a half"
        );
        assert_eq!(SafePoint { before: Some(ms(9_400)), ..POINT }.turn(), Turn::Name(ms(10_300)));
        assert_eq!(SafePoint { named: ms(10_050), ..POINT }.turn(), Turn::Pass, "it is still to come");
        let due = SafePoint { named: ms(9_990), ready: false, ..POINT };
        assert_eq!(due.turn(), Turn::Merge, "for the sake of the others");
        assert_eq!(SafePoint { able: false, ..due }.turn(), Turn::Pass);
        assert_eq!(SafePoint { served: ms(9_990), ..due }.turn(), Turn::Pass);
        assert_eq!(SafePoint { named: ms(8_000), ..POINT }.turn(), Turn::Name(ms(10_050)), "it is long ago");
        assert_eq!(SafePoint { named: ms(99_000), ..POINT }.turn(), Turn::Name(ms(10_050)), "of another clock");
        assert_eq!(SafePoint { ready: false, ..POINT }.turn(), Turn::Pass);
    }

    proptest! {
        /// Ranks with a barrier at each step merge in the same steps, though each has room again at another time.
        #[test]
        fn ranks_merge_in_the_same_steps(
            step in 20u64..900,
            apart in prop::collection::vec(0u64..10, 2..6),
            costs in 1usize..5,
        ) {
            let (mut named, ranks) = (Duration::ZERO, apart.len());
            let (mut served, mut before) = (vec![Duration::ZERO; ranks], vec![None; ranks]);
            let mut rests = vec![0_usize; ranks];
            let (mut torn, mut joint) = (0, 0);
            for at in 1..200 {
                let mut merged = 0;
                for rank in 0..ranks {
                    let now = ms(at * step + apart[rank]);
                    let ready = rests[rank] == 0;
                    let point = SafePoint {
                        now, before: before[rank], named, served: served[rank], alone: false, ready, able: true,
                    };
                    rests[rank] = rests[rank].saturating_sub(1);
                    match point.turn() {
                        Turn::Merge => {
                            merged += 1;
                            rests[rank] = costs * (rank + 3);
                        }
                        Turn::Name(moment) => named = moment,
                        Turn::Pass => {}
                    }
                    if point.is_due() {
                        served[rank] = named;
                    }
                    before[rank] = Some(now);
                }
                joint += usize::from(merged == ranks);
                torn += usize::from(at > 1 && merged != 0 && merged != ranks);
            }
            prop_assert_eq!(torn, 0);
            prop_assert!(joint > 4, "{joint} of 200");
        }
    }
}
