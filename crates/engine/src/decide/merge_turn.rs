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
const MIN_LEAD_TIME: Duration = Duration::from_millis(50);

/// A moment that is longer ago than this, and for which a member has not merged, is none for it any more. Safe points
/// that lie farther apart are nothing to wait for.
const MERGE_TIME_EXPIRY: Duration = Duration::from_secs(1);

/// How long at most an answer that it is not a member's turn holds, where safe points come more often than that: asking
/// costs microseconds. A moment is named [`MIN_LEAD_TIME`] before it comes at the latest, so each member learns of it in time.
const RECHECK_INTERVAL: Duration = Duration::from_millis(5);

/// What a member knows as it comes to a safe point. Times are of a clock that all members share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafePoint {
    /// When it is.
    pub now: Duration,
    /// When the one before was.
    pub previous: Option<Duration>,
    /// The moment that was named last, by anybody.
    pub proposed_merge_time: Duration,
    /// The moment for which this member merged last, or had no room to.
    pub last_merge_time: Duration,
    /// Whether there are no other members.
    pub is_only_member: bool,
    /// Whether there is room for a merge that is worth it.
    pub can_merge_profitably: bool,
    /// Whether there is room for one that does anything.
    pub can_merge: bool,
}

/// What a member does at a safe point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeTurn {
    /// Merge.
    Merge,
    /// Go on, and have all merge after this moment.
    ProposeTime(Duration),
    /// Go on.
    Continue,
}

impl SafePoint {
    /// Whose turn it is.
    pub fn decide(self) -> MergeTurn {
        let seldom = self.previous.is_none_or(|before| self.now.saturating_sub(before) > MERGE_TIME_EXPIRY);
        if self.is_only_member || seldom {
            return if self.can_merge_profitably { MergeTurn::Merge } else { MergeTurn::Continue };
        }
        if self.is_due() {
            return if self.can_merge { MergeTurn::Merge } else { MergeTurn::Continue };
        }
        // One that is farther away than anybody names it is of another clock.
        let to_come =
            self.proposed_merge_time > self.now && self.proposed_merge_time <= self.now + 2 * MERGE_TIME_EXPIRY;
        if self.can_merge_profitably && !to_come {
            MergeTurn::ProposeTime(self.propose_merge_time())
        } else {
            MergeTurn::Continue
        }
    }

    /// When to ask again after the answer was no: at the first safe point after the moment that was named, or after
    /// [`RECHECK_INTERVAL`], by which there may be another one.
    pub fn next_check(now: Duration, proposed_merge_time: Duration) -> Duration {
        let recheck = now + RECHECK_INTERVAL;
        if proposed_merge_time > now { proposed_merge_time.min(recheck) } else { recheck }
    }

    /// In the middle between two safe points that are to come, if they come as the last two did.
    fn propose_merge_time(self) -> Duration {
        let step =
            self.previous.map_or(MIN_LEAD_TIME, |before| self.now.saturating_sub(before)).max(Duration::from_nanos(1));
        let steps = (MIN_LEAD_TIME.as_secs_f64() / step.as_secs_f64() - 0.5).ceil().max(0.0);
        self.now + step.mul_f64(steps + 0.5)
    }

    /// Whether it is the first after a moment that was named.
    pub fn is_due(self) -> bool {
        self.proposed_merge_time > self.last_merge_time
            && self.proposed_merge_time <= self.now
            && self.now - self.proposed_merge_time <= MERGE_TIME_EXPIRY
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ms(time: u64) -> Duration {
        Duration::from_millis(time)
    }

    const SAFE_POINT: SafePoint = SafePoint {
        now: Duration::from_millis(10_000),
        previous: Some(Duration::from_millis(9_900)),
        proposed_merge_time: Duration::ZERO,
        last_merge_time: Duration::ZERO,
        is_only_member: false,
        can_merge_profitably: true,
        can_merge: true,
    };

    #[test]
    fn member_without_peers_merges_at_once() {
        assert_eq!(SafePoint { is_only_member: true, ..SAFE_POINT }.decide(), MergeTurn::Merge);
        assert_eq!(SafePoint { previous: None, ..SAFE_POINT }.decide(), MergeTurn::Merge);
        assert_eq!(
            SafePoint { previous: Some(ms(8_000)), ..SAFE_POINT }.decide(),
            MergeTurn::Merge,
            "safe points are rare"
        );
        assert_eq!(
            SafePoint { is_only_member: true, can_merge_profitably: false, ..SAFE_POINT }.decide(),
            MergeTurn::Continue
        );
    }

    #[test]
    fn next_check_is_not_after_the_proposed_time() {
        let now = ms(10_000);
        assert_eq!(SafePoint::next_check(now, ms(9_990)), ms(10_005), "none is to come");
        assert_eq!(SafePoint::next_check(now, ms(10_003)), ms(10_003), "it comes first");
        assert_eq!(SafePoint::next_check(now, ms(10_050)), ms(10_005), "another member may name an earlier one");
        assert!(RECHECK_INTERVAL < MIN_LEAD_TIME, "a moment is known before it comes");
    }

    #[test]
    fn merge_time_is_proposed_and_used_once() {
        assert_eq!(SAFE_POINT.decide(), MergeTurn::ProposeTime(ms(10_050)), "half a step of 100 ms later");
        assert_eq!(
            SafePoint { previous: Some(ms(9_980)), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "two steps and a half"
        );
        assert_eq!(SafePoint { previous: Some(ms(9_400)), ..SAFE_POINT }.decide(), MergeTurn::ProposeTime(ms(10_300)));
        assert_eq!(
            SafePoint { proposed_merge_time: ms(10_050), ..SAFE_POINT }.decide(),
            MergeTurn::Continue,
            "it is still to come"
        );
        let due = SafePoint { proposed_merge_time: ms(9_990), can_merge_profitably: false, ..SAFE_POINT };
        assert_eq!(due.decide(), MergeTurn::Merge, "for the sake of the others");
        assert_eq!(SafePoint { can_merge: false, ..due }.decide(), MergeTurn::Continue);
        assert_eq!(SafePoint { last_merge_time: ms(9_990), ..due }.decide(), MergeTurn::Continue);
        assert_eq!(
            SafePoint { proposed_merge_time: ms(8_000), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "it is long ago"
        );
        assert_eq!(
            SafePoint { proposed_merge_time: ms(99_000), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "of another clock"
        );
        assert_eq!(SafePoint { can_merge_profitably: false, ..SAFE_POINT }.decide(), MergeTurn::Continue);
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
                        now, previous: before[rank], proposed_merge_time: named, last_merge_time: served[rank], is_only_member: false, can_merge_profitably: ready, can_merge: true,
                    };
                    rests[rank] = rests[rank].saturating_sub(1);
                    match point.decide() {
                        MergeTurn::Merge => {
                            merged += 1;
                            rests[rank] = costs * (rank + 3);
                        }
                        MergeTurn::ProposeTime(moment) => named = moment,
                        MergeTurn::Continue => {}
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
