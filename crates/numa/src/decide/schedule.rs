//! In which order memory is moved, and how fast.

use pagefold_base::Bytes;
use std::collections::BTreeMap;
use std::time::Duration;

/// Memory that waits to be moved: the next batch of a machine for a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitingBatch {
    /// Its machine.
    pub machine: usize,
    /// Its size.
    pub bytes: Bytes,
    /// Its new node.
    pub node: u32,
}

/// The first batch whose node has room for it. Machines that exchange nodes take turns, because each batch frees memory
/// on its former node. `None` if no node has room.
pub fn next_batch(waiting: &[WaitingBatch], room: &BTreeMap<u32, Bytes>) -> Option<WaitingBatch> {
    waiting.iter().copied().find(|batch| room.get(&batch.node).is_some_and(|room| *room >= batch.bytes))
}

/// Whether a part is more than half of the whole.
pub fn is_majority(part: Bytes, whole: Bytes) -> bool {
    part.0 > whole.0 / 2
}

/// Paces batches, so that they stay within a bandwidth. Time in which nothing moves, such as a pause while memory is
/// short, is a credit for one batch at most: the memory of a longer pause does not follow at full speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BandwidthPacer {
    bandwidth: Bytes,
    /// The time since the start at which the next batch may begin.
    next_batch: Duration,
}

impl BandwidthPacer {
    /// A pacer for a bandwidth in bytes per second.
    pub fn new(bandwidth: Bytes) -> Self {
        Self { bandwidth, next_batch: Duration::ZERO }
    }

    /// How long to pause after a batch of so many bytes that has ended at `now` since the start.
    pub fn pause_after(&mut self, batch: Bytes, now: Duration) -> Duration {
        let seconds = batch.0 as f64 / self.bandwidth.0.max(1) as f64;
        let due = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        self.next_batch = self.next_batch.saturating_add(due).max(now);
        self.next_batch - now
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_exchange_nodes_take_turns() {
        let batch = |machine, node| WaitingBatch { machine, bytes: Bytes(10), node };
        let waiting = [batch(0, 1), batch(1, 0)];
        let next =
            |zero, one| next_batch(&waiting, &[(0, Bytes(zero)), (1, Bytes(one))].into()).map(|batch| batch.machine);
        assert_eq!([next(0, 10), next(10, 9), next(10, 10), next(9, 9)], [Some(0), Some(1), Some(0), None]);
        assert_eq!(next_batch(&[batch(0, 7)], &BTreeMap::new()), None, "a node without memory");
    }

    /// The pauses in milliseconds after batches of so many bytes that end at these milliseconds, at 100 bytes per second.
    fn pauses(batches: &[(u64, u64)]) -> Vec<u128> {
        let mut pacer = BandwidthPacer::new(Bytes(100));
        let pause =
            |&(bytes, now): &(u64, u64)| pacer.pause_after(Bytes(bytes), Duration::from_millis(now)).as_millis();
        batches.iter().map(pause).collect()
    }

    #[test]
    fn batches_wait_until_the_bandwidth_permits_the_next_one() {
        assert_eq!(pauses(&[(100, 0), (100, 1000), (50, 2000)]), [1000, 1000, 500]);
        // The time of a batch itself counts, and that of a slow one is no credit.
        assert_eq!(pauses(&[(100, 400), (100, 3000), (100, 3000)]), [600, 0, 1000]);
        assert_eq!(BandwidthPacer::new(Bytes(0)).pause_after(Bytes(u64::MAX), Duration::ZERO), Duration::MAX);
    }

    #[test]
    fn long_pause_is_a_credit_for_one_batch() {
        assert_eq!(pauses(&[(100, 0), (100, 60_000), (100, 60_000), (100, 61_000)]), [1000, 0, 1000, 1000]);
    }
}
