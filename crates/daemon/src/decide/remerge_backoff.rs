//! What was merged and written too soon is left alone: for a while, then for longer, and after the third time for good.
//! What was merged and written twice before it was withdrawn has two of the three behind it.
//!
//! Memory that is filled when a guest boots is written, and then stays; memory that a program computes in is written
//! again and again.

use pagefold_base::units::{AddressRange, ProcessId};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long it is left alone the first times.
const REMERGE_PAUSES: [Duration; 2] = [Duration::from_secs(30), Duration::from_secs(600)];

/// Bytes whose strikes are counted together: what is withdrawn together is no larger where huge pages are of 2 MiB.
const BLOCK_BYTES: u64 = 4 << 20;

/// What was written too soon, how often, and what of it is left alone.
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
    /// A range was withdrawn because it was written too soon, so many times. One that is left alone already counts once.
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

    /// What may be tried again now. Told once.
    pub fn take_expired(&mut self, now: Duration) -> Vec<(ProcessId, AddressRange)> {
        let mut over = Vec::new();
        for (&(process, _), piece) in &mut self.blocks {
            if piece.retry_at.is_some_and(|until| until <= now) {
                over.extend(piece.paused_ranges.drain(..).map(|range| (process, range)));
            }
        }
        over
    }

    /// Forget the processes that do not fit.
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
            assert_eq!(strikes.take_expired(now), [], "told once");
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
