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

/// How long to pause, so that moving so many bytes within `elapsed` stays within a bandwidth in bytes per second.
pub fn pause_for_bandwidth(moved: Bytes, elapsed: Duration, bandwidth: Bytes) -> Duration {
    let due = Duration::try_from_secs_f64(moved.0 as f64 / bandwidth.0.max(1) as f64).unwrap_or(Duration::MAX);
    due.saturating_sub(elapsed)
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

    #[test]
    fn bandwidth_is_an_average() {
        let pause = |moved, millis, bandwidth| {
            pause_for_bandwidth(Bytes(moved), Duration::from_millis(millis), Bytes(bandwidth)).as_millis()
        };
        assert_eq!([pause(100, 0, 100), pause(100, 400, 100), pause(100, 1200, 100)], [1000, 600, 0]);
        assert_eq!(pause_for_bandwidth(Bytes(u64::MAX), Duration::ZERO, Bytes(0)), Duration::MAX);
    }
}
