//! Scheduling of merges: all members of a domain merge together.
//!
//! Ranks of a parallel program wait at each barrier for the slowest rank. If each rank merged as soon as its time
//! budget allowed, they would merge one after another, and the program would wait for each: n ranks would slow it down
//! n times as much as each rank accounts for. So a member that could merge proposes a time in the near future, and all
//! members merge at their first safe points after it. Ranks that reach safe points at about the same times should pass
//! the proposed time between the same two safe points. So the proposer puts it in the middle between two, as far as it
//! can tell from its last ones.

use std::time::Duration;

/// Minimum lead time of a proposed merge time: more than the time between the first and the last rank at a barrier,
/// even if ranks share CPUs.
const MIN_LEAD_TIME: Duration = Duration::from_millis(50);

/// A proposed time that is older than this has expired for a member that has not merged for it. Safe points with longer
/// intervals are not waited for.
const MERGE_TIME_EXPIRY: Duration = Duration::from_secs(1);

/// How long a negative answer stays valid if safe points are more frequent than that: a check costs microseconds. A
/// merge time is proposed at least [`MIN_LEAD_TIME`] ahead, so each member learns of it in time.
const RECHECK_INTERVAL: Duration = Duration::from_millis(5);

/// State of a member at a safe point. Times are of a clock that all members share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SafePoint {
    /// Time of this safe point.
    pub now: Duration,
    /// Time of the previous safe point.
    pub previous: Option<Duration>,
    /// Merge time that was proposed last, by any member.
    pub proposed_merge_time: Duration,
    /// Last proposed time for which this member merged, or lacked the time budget.
    pub last_merge_time: Duration,
    /// Whether there are no other members.
    pub is_only_member: bool,
    /// Whether the time budget allows a profitable merge.
    pub can_merge_profitably: bool,
    /// Whether the time budget allows any merge.
    pub can_merge: bool,
}

/// Decision of a member at a safe point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MergeTurn {
    /// Merge.
    Merge,
    /// Continue, and propose that all merge after this time.
    ProposeTime(Duration),
    /// Continue.
    Continue,
}

impl SafePoint {
    /// Decide whether to merge, to propose a time, or to continue.
    pub fn decide(self) -> MergeTurn {
        let is_rare = self.previous.is_none_or(|previous| self.now.saturating_sub(previous) > MERGE_TIME_EXPIRY);
        if self.is_only_member || is_rare {
            return if self.can_merge_profitably { MergeTurn::Merge } else { MergeTurn::Continue };
        }
        if self.is_due() {
            return if self.can_merge { MergeTurn::Merge } else { MergeTurn::Continue };
        }
        // A time farther ahead than any member proposes comes from another clock.
        let is_time_pending =
            self.proposed_merge_time > self.now && self.proposed_merge_time <= self.now + 2 * MERGE_TIME_EXPIRY;
        if self.can_merge_profitably && !is_time_pending {
            MergeTurn::ProposeTime(self.propose_merge_time())
        } else {
            MergeTurn::Continue
        }
    }

    /// Time of the next check after a negative answer: the proposed time, or after `RECHECK_INTERVAL`, since another
    /// time may be proposed by then.
    pub fn next_check(now: Duration, proposed_merge_time: Duration) -> Duration {
        let recheck = now + RECHECK_INTERVAL;
        if proposed_merge_time > now { proposed_merge_time.min(recheck) } else { recheck }
    }

    /// The middle between two future safe points, if their interval stays that of the last two.
    fn propose_merge_time(self) -> Duration {
        let interval = self
            .previous
            .map_or(MIN_LEAD_TIME, |previous| self.now.saturating_sub(previous))
            .max(Duration::from_nanos(1));
        let interval_count = (MIN_LEAD_TIME.as_secs_f64() / interval.as_secs_f64() - 0.5).ceil().max(0.0);
        self.now + interval.mul_f64(interval_count + 0.5)
    }

    /// Whether this is the first safe point after a proposed time.
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
        assert_eq!(SafePoint::next_check(now, ms(9_990)), ms(10_005), "no merge time is proposed");
        assert_eq!(SafePoint::next_check(now, ms(10_003)), ms(10_003), "the proposed time comes first");
        assert_eq!(SafePoint::next_check(now, ms(10_050)), ms(10_005), "another member may propose an earlier time");
        assert!(RECHECK_INTERVAL < MIN_LEAD_TIME, "a merge time is known before it comes");
    }

    #[test]
    fn merge_time_is_proposed_and_used_once() {
        assert_eq!(SAFE_POINT.decide(), MergeTurn::ProposeTime(ms(10_050)), "half a step of 100 ms later");
        assert_eq!(
            SafePoint { previous: Some(ms(9_980)), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "two and a half steps later"
        );
        assert_eq!(SafePoint { previous: Some(ms(9_400)), ..SAFE_POINT }.decide(), MergeTurn::ProposeTime(ms(10_300)));
        assert_eq!(
            SafePoint { proposed_merge_time: ms(10_050), ..SAFE_POINT }.decide(),
            MergeTurn::Continue,
            "it is in the future"
        );
        let due = SafePoint { proposed_merge_time: ms(9_990), can_merge_profitably: false, ..SAFE_POINT };
        assert_eq!(due.decide(), MergeTurn::Merge, "because the other members merge");
        assert_eq!(SafePoint { can_merge: false, ..due }.decide(), MergeTurn::Continue);
        assert_eq!(SafePoint { last_merge_time: ms(9_990), ..due }.decide(), MergeTurn::Continue);
        assert_eq!(
            SafePoint { proposed_merge_time: ms(8_000), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "it has expired"
        );
        assert_eq!(
            SafePoint { proposed_merge_time: ms(99_000), ..SAFE_POINT }.decide(),
            MergeTurn::ProposeTime(ms(10_050)),
            "of another clock"
        );
        assert_eq!(SafePoint { can_merge_profitably: false, ..SAFE_POINT }.decide(), MergeTurn::Continue);
    }

    proptest! {
        /// Ranks with a barrier at each step merge in the same steps, although their time budgets recover at different
        /// times.
        #[test]
        fn ranks_merge_in_the_same_steps(
            step in 20u64..900,
            delays in prop::collection::vec(0u64..10, 2..6),
            costs in 1usize..5,
        ) {
            let (mut proposed_merge_time, ranks) = (Duration::ZERO, delays.len());
            let (mut last_merge_time, mut previous) = (vec![Duration::ZERO; ranks], vec![None; ranks]);
            let mut pauses = vec![0_usize; ranks];
            let (mut partial_merges, mut common_merges) = (0, 0);
            for round in 1..200 {
                let mut merged = 0;
                for rank in 0..ranks {
                    let now = ms(round * step + delays[rank]);
                    let can_merge_profitably = pauses[rank] == 0;
                    let point = SafePoint {
                        now,
                        previous: previous[rank],
                        proposed_merge_time,
                        last_merge_time: last_merge_time[rank],
                        is_only_member: false,
                        can_merge_profitably,
                        can_merge: true,
                    };
                    pauses[rank] = pauses[rank].saturating_sub(1);
                    match point.decide() {
                        MergeTurn::Merge => {
                            merged += 1;
                            pauses[rank] = costs * (rank + 3);
                        }
                        MergeTurn::ProposeTime(time) => proposed_merge_time = time,
                        MergeTurn::Continue => {}
                    }
                    if point.is_due() {
                        last_merge_time[rank] = proposed_merge_time;
                    }
                    previous[rank] = Some(now);
                }
                common_merges += usize::from(merged == ranks);
                partial_merges += usize::from(round > 1 && merged != 0 && merged != ranks);
            }
            prop_assert_eq!(partial_merges, 0);
            prop_assert!(common_merges > 4, "{common_merges} of 200");
        }
    }
}
