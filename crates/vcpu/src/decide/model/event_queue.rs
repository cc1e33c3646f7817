//! The next event of a simulation: a tournament tree over a fixed set of event sources.
//!
//! Each CPU, each sleeping vCPU and the gang clock is a source with at most one pending event, so that changing the
//! time of a source costs one comparison for each level of the tree and nothing is allocated.

/// The time of a source that has no pending event, in nanoseconds.
pub(crate) const NO_EVENT_TIME: u64 = u64::MAX;

/// Bits of a key that hold the source.
const SOURCE_BITS: u32 = 13;

/// Nodes of the largest tree. The size is fixed, so that an index needs no check.
const MAX_NODES: usize = 2 << SOURCE_BITS;

/// Pending times of all sources, with the earliest on top. Ties go to the source with the smaller index.
#[derive(Debug)]
pub(crate) struct EventQueue {
    /// Leaves of the tree: a power of two.
    width: usize,
    /// The earliest event below each node; node 1 is the root. An event is its time in nanoseconds above its source.
    keys: Box<[u64; MAX_NODES]>,
}

impl EventQueue {
    /// Sources that a queue can have.
    pub(crate) const MAX_SOURCES: usize = 1 << SOURCE_BITS;

    /// A queue of sources without pending events.
    pub(crate) fn new(sources: usize) -> Self {
        debug_assert!(sources <= Self::MAX_SOURCES, "sources fit into a key");
        let width = sources.next_power_of_two().max(2);
        let keys = vec![NO_EVENT_TIME; MAX_NODES].into_boxed_slice();
        Self { width, keys: keys.try_into().unwrap_or_else(|_| unreachable!("the length is fixed")) }
    }

    /// Set the time of the pending event of `source`, in nanoseconds: less than 2^51, which is 26 days, or [`NO_EVENT_TIME`].
    #[inline]
    pub(crate) fn set(&mut self, source: usize, time: u64) {
        let mut node = (self.width + source) % MAX_NODES;
        let mut key = if time == NO_EVENT_TIME { NO_EVENT_TIME } else { (time << SOURCE_BITS) | source as u64 };
        let keys = &mut *self.keys;
        keys[node] = key;
        while node > 1 {
            key = key.min(keys[node ^ 1]);
            node /= 2;
            keys[node] = key;
        }
    }

    /// The earliest pending event: its time in nanoseconds and its source. The time is [`NO_EVENT_TIME`] if there is none.
    #[inline]
    pub(crate) fn earliest(&self) -> (u64, usize) {
        let key = self.keys[1];
        if key == NO_EVENT_TIME {
            return (NO_EVENT_TIME, 0);
        }
        (key >> SOURCE_BITS, (key & (Self::MAX_SOURCES as u64 - 1)) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn earliest_event_is_the_minimum_of_all_sources(changes in prop::collection::vec((0usize..11, 0u64..50), 1..80)) {
            let mut queue = EventQueue::new(11);
            let mut times = [NO_EVENT_TIME; 11];
            for (source, time) in changes {
                queue.set(source, time);
                times[source] = time;
                let expected = times.iter().enumerate().map(|(source, &time)| (time, source)).min();
                let expected = expected.filter(|&(time, _)| time != NO_EVENT_TIME).unwrap_or((NO_EVENT_TIME, 0));
                prop_assert_eq!(queue.earliest(), expected);
            }
        }
    }
}
