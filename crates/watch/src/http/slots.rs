//! Slots for answers: how many are sent at once, and which one is cut off for another.
//!
//! A complete request is answered in milliseconds if its peer reads. So if all slots are in use and another request
//! waits, the oldest answer that is not an event stream is cut off, if it has had its minimum time.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer may take while other requests wait for a slot.
pub const MAX_RESPONSE_TIME_UNDER_LOAD: Duration = Duration::from_millis(500);

/// A number of slots, some of which may be event streams.
#[derive(Debug)]
pub struct ResponseSlots {
    max_slots: usize,
    max_event_streams: usize,
    used: Mutex<BTreeMap<u64, UsedSlot>>,
}

#[derive(Debug)]
struct UsedSlot {
    taken_at: Instant,
    peer: Arc<TcpStream>,
    /// Whether it is an event stream; these have a separate limit.
    is_event_stream: bool,
    /// Whether it was cut off.
    is_cut_off: bool,
}

impl ResponseSlots {
    pub fn new(max_slots: usize, max_event_streams: usize) -> Self {
        Self { max_slots, max_event_streams, used: Mutex::default() }
    }

    /// Take a slot for the answer to a peer. If there is none, the oldest answer that has had its minimum time is cut
    /// off, and its slot becomes free soon.
    pub fn acquire(self: &Arc<Self>, peer: &Arc<TcpStream>) -> Option<ResponseSlot> {
        let mut used = self.lock_used();
        if used.len() < self.max_slots {
            let number = used.last_key_value().map_or(0, |(last, _)| last + 1);
            used.insert(
                number,
                UsedSlot {
                    taken_at: Instant::now(),
                    peer: Arc::clone(peer),
                    is_event_stream: false,
                    is_cut_off: false,
                },
            );
            return Some(ResponseSlot { slots: Arc::clone(self), number });
        }
        let mut cuttable = used.values_mut().filter(|slot| !slot.is_event_stream && !slot.is_cut_off);
        if let Some(oldest) = cuttable.next().filter(|slot| slot.taken_at.elapsed() >= MAX_RESPONSE_TIME_UNDER_LOAD) {
            oldest.is_cut_off = true;
            // A peer that has gone has no connection to shut down.
            let _ = oldest.peer.shutdown(Shutdown::Both);
        }
        None
    }

    fn lock_used(&self) -> MutexGuard<'_, BTreeMap<u64, UsedSlot>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An acquired slot, released when dropped.
#[derive(Debug)]
pub struct ResponseSlot {
    slots: Arc<ResponseSlots>,
    number: u64,
}

impl ResponseSlot {
    /// Use it for an event stream from now on; `false` if the maximum number of streams is reached.
    pub fn reserve_event_stream(&self) -> bool {
        let mut used = self.slots.lock_used();
        let free = used.values().filter(|slot| slot.is_event_stream).count() < self.slots.max_event_streams;
        match used.get_mut(&self.number) {
            Some(slot) if free && !slot.is_cut_off => {
                slot.is_event_stream = true;
                true
            }
            _ => false,
        }
    }
}

impl Drop for ResponseSlot {
    fn drop(&mut self) {
        self.slots.lock_used().remove(&self.number);
    }
}
