//! Exponential backoff for ranges whose merged pages had COW breaks: a range is left alone for a while, then for
//! longer, and after the third break for good. If both of two merges broke before the range was unenrolled, two of the
//! three are used up.
//!
//! A guest writes memory once while it boots and then keeps it. Memory that a program computes in is written again and
//! again.

use pagefold_base::units::{AddressRange, ProcessId};
use std::collections::BTreeMap;
use std::time::Duration;

/// Pauses after the first and second break.
const REMERGE_PAUSES: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];

/// Bytes whose breaks are counted together: with huge pages of 2 MiB, ranges unenrolled together are no larger.
const BLOCK_BYTES: u64 = 4 << 20;

/// Ranges with COW breaks, the number of breaks, and until when each is left alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemergeBackoff {
    blocks: BTreeMap<(ProcessId, u64), BackoffBlock>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct BackoffBlock {
    breaks: usize,
    retry_at: Option<Duration>,
    paused_ranges: Vec<AddressRange>,
}

impl RemergeBackoff {
    /// Record that a range was unenrolled after this many COW breaks. If it is already left alone, this counts as one
    /// break.
    pub fn record_break(&mut self, process: ProcessId, range: AddressRange, breaks: usize, now: Duration) {
        let piece = self.blocks.entry((process, range.start / BLOCK_BYTES)).or_default();
        if piece.paused_ranges.is_empty() {
            piece.breaks += breaks;
            piece.retry_at = REMERGE_PAUSES.get(piece.breaks.saturating_sub(1)).map(|pause| now + *pause);
        }
        if !piece.paused_ranges.contains(&range) {
            piece.paused_ranges.push(range);
        }
    }

    /// Ranges that may be merged again now. Each is returned once.
    pub fn take_expired(&mut self, now: Duration) -> Vec<(ProcessId, AddressRange)> {
        let mut over = Vec::new();
        for (&(process, _), piece) in &mut self.blocks {
            if piece.retry_at.is_some_and(|until| until <= now) {
                over.extend(piece.paused_ranges.drain(..).map(|range| (process, range)));
            }
        }
        over
    }

    /// Forget processes that do not satisfy `fits`.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.blocks.retain(|&(process, _), _| fits(process));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;

    #[test]
    fn third_break_pauses_forever() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let range = AddressRange { start: BLOCK_BYTES, end: BLOCK_BYTES + 4096 };
        let (mut strikes, mut now) = (RemergeBackoff::default(), Duration::ZERO);
        for pause in REMERGE_PAUSES {
            strikes.record_break(process, range, 1, now);
            strikes.record_break(process, range, 1, now);
            assert_eq!(strikes.take_expired(now + pause - Duration::from_secs(1)), []);
            now += pause;
            assert_eq!(strikes.take_expired(now), [(process, range)]);
            assert_eq!(strikes.take_expired(now), [], "each range is returned once");
        }
        strikes.record_break(process, range, 1, now);
        assert_eq!(strikes.take_expired(now + Duration::from_secs(1 << 30)), []);
        strikes.retain(|_| false);
        assert_eq!(strikes, RemergeBackoff::default());
    }

    #[test]
    fn two_breaks_start_with_the_long_pause() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let range = AddressRange { start: BLOCK_BYTES, end: BLOCK_BYTES + 4096 };
        let mut strikes = RemergeBackoff::default();
        strikes.record_break(process, range, 2, Duration::ZERO);
        assert_eq!(strikes.take_expired(REMERGE_PAUSES[1] - Duration::from_secs(1)), []);
        assert_eq!(strikes.take_expired(REMERGE_PAUSES[1]), [(process, range)]);
        strikes.record_break(process, range, 2, REMERGE_PAUSES[1]);
        assert_eq!(strikes.take_expired(Duration::from_secs(1 << 30)), []);
    }
}
