//! Exponential backoff for ranges whose merged pages had COW breaks. After the first break a range is not merged for a
//! while, after the second for longer, and after the third never again. If a range was merged twice before it was
//! unenrolled, and both merges broke, that counts as two breaks.
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

/// What the next daemon needs of a block. Times count from when it is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackoffRecord {
    /// The process.
    pub process: ProcessId,
    /// Number of the block in its address space.
    pub block: u64,
    /// Number of breaks.
    pub breaks: usize,
    /// Time until its ranges may be merged again; `None` for never.
    pub retry_in: Option<Duration>,
    /// The ranges that are not merged until then.
    pub paused_ranges: Vec<AddressRange>,
}

/// Ranges with COW breaks, the number of breaks, and until when each is not merged.
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
    /// Record that a range was unenrolled after this many COW breaks. Breaks during a pause are not counted.
    pub fn record_break(&mut self, process: ProcessId, range: AddressRange, breaks: usize, now: Duration) {
        let block = self.blocks.entry((process, range.start / BLOCK_BYTES)).or_default();
        if block.paused_ranges.is_empty() {
            block.breaks += breaks;
            block.retry_at = REMERGE_PAUSES.get(block.breaks.saturating_sub(1)).map(|pause| now + *pause);
        }
        if !block.paused_ranges.contains(&range) {
            block.paused_ranges.push(range);
        }
    }

    /// Ranges that may be merged again now. Each is returned once.
    pub fn take_expired(&mut self, now: Duration) -> Vec<(ProcessId, AddressRange)> {
        let mut expired = Vec::new();
        for (&(process, _), block) in &mut self.blocks {
            if block.retry_at.is_some_and(|retry_at| retry_at <= now) {
                expired.extend(block.paused_ranges.drain(..).map(|range| (process, range)));
            }
        }
        expired
    }

    /// What the next daemon needs.
    pub fn records(&self, now: Duration) -> Vec<BackoffRecord> {
        let record = |(&(process, block), state): (&(ProcessId, u64), &BackoffBlock)| BackoffRecord {
            process,
            block,
            breaks: state.breaks,
            retry_in: state.retry_at.map(|retry_at| retry_at.saturating_sub(now)),
            paused_ranges: state.paused_ranges.clone(),
        };
        self.blocks.iter().map(record).collect()
    }

    /// Continue with what the previous daemon passed on.
    pub fn restore(&mut self, records: Vec<BackoffRecord>, now: Duration) {
        for BackoffRecord { process, block, breaks, retry_in, paused_ranges } in records {
            let retry_at = retry_in.map(|pause| now + pause);
            self.blocks.insert((process, block), BackoffBlock { breaks, retry_at, paused_ranges });
        }
    }

    /// Forget processes that do not satisfy `is_kept`.
    pub fn retain(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.blocks.retain(|&(process, _), _| is_kept(process));
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
        let (mut backoff, mut now) = (RemergeBackoff::default(), Duration::ZERO);
        for pause in REMERGE_PAUSES {
            backoff.record_break(process, range, 1, now);
            backoff.record_break(process, range, 1, now);
            assert_eq!(backoff.take_expired(now + pause - Duration::from_secs(1)), []);
            now += pause;
            assert_eq!(backoff.take_expired(now), [(process, range)]);
            assert_eq!(backoff.take_expired(now), [], "each range is returned once");
        }
        backoff.record_break(process, range, 1, now);
        assert_eq!(backoff.take_expired(now + Duration::from_secs(1 << 30)), []);
        backoff.retain(|_| false);
        assert_eq!(backoff, RemergeBackoff::default());
    }

    #[test]
    fn pauses_continue_after_a_restart() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let [range, other] =
            [1, 2].map(|block| AddressRange { start: block * BLOCK_BYTES, end: block * BLOCK_BYTES + 4096 });
        let mut before = RemergeBackoff::default();
        before.record_break(process, range, 1, Duration::ZERO);
        before.record_break(process, other, 3, Duration::ZERO);
        let records = before.records(Duration::from_secs(10));
        let mut after = RemergeBackoff::default();
        after.restore(records.clone(), Duration::ZERO);
        assert_eq!(after.records(Duration::ZERO), records);
        let remaining = REMERGE_PAUSES[0] - Duration::from_secs(10);
        assert_eq!(after.take_expired(remaining - Duration::from_secs(1)), []);
        assert_eq!(after.take_expired(remaining), [(process, range)]);
        after.record_break(process, range, 1, remaining);
        assert_eq!(after.take_expired(remaining + REMERGE_PAUSES[1] - Duration::from_secs(1)), [], "its second pause");
        assert_eq!(after.take_expired(Duration::from_secs(1 << 30)), [(process, range)], "three breaks pause forever");
    }

    #[test]
    fn two_breaks_start_with_the_long_pause() {
        let process = ProcessId { pid: Pid(1), start_time: 1 };
        let range = AddressRange { start: BLOCK_BYTES, end: BLOCK_BYTES + 4096 };
        let mut backoff = RemergeBackoff::default();
        backoff.record_break(process, range, 2, Duration::ZERO);
        assert_eq!(backoff.take_expired(REMERGE_PAUSES[1] - Duration::from_secs(1)), []);
        assert_eq!(backoff.take_expired(REMERGE_PAUSES[1]), [(process, range)]);
        backoff.record_break(process, range, 2, REMERGE_PAUSES[1]);
        assert_eq!(backoff.take_expired(Duration::from_secs(1 << 30)), []);
    }
}
