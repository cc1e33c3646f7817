//! Places for answers: how many are under way at once, and which one makes room.
//!
//! A request that is whole is answered in milliseconds where its peer takes the answer. So where all places are taken
//! and another request waits, the oldest answer that is not a stream of events is cut off, if it has had its time.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer may take while other requests wait for a place.
pub const MAX_RESPONSE_TIME_UNDER_LOAD: Duration = Duration::from_millis(500);

/// Places, of which there are `most`, of them at most `streams` for streams of events.
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
    /// Whether it is a stream of events: those have a bound of their own.
    is_event_stream: bool,
    /// Whether it was cut off.
    is_cut_off: bool,
}

impl ResponseSlots {
    pub fn new(max_slots: usize, max_event_streams: usize) -> Self {
        Self { max_slots, max_event_streams, used: Mutex::default() }
    }

    /// Take a place for the answer to a peer. Where there is none, the oldest answer that has had its time is cut off,
    /// and its place is free soon.
    pub fn acquire(self: &Arc<Self>, peer: &Arc<TcpStream>) -> Option<ResponseSlot> {
        let mut taken = self.lock_used();
        if taken.len() < self.max_slots {
            let number = taken.last_key_value().map_or(0, |(last, _)| last + 1);
            taken.insert(
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
        let mut answers = taken.values_mut().filter(|answer| !answer.is_event_stream && !answer.is_cut_off);
        if let Some(oldest) = answers.next().filter(|answer| answer.taken_at.elapsed() >= MAX_RESPONSE_TIME_UNDER_LOAD)
        {
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

/// A place that was taken, until it is dropped.
#[derive(Debug)]
pub struct ResponseSlot {
    slots: Arc<ResponseSlots>,
    number: u64,
}

impl ResponseSlot {
    /// Use it for a stream of events from now on; `false` where there are as many as there may be.
    pub fn reserve_event_stream(&self) -> bool {
        let mut taken = self.slots.lock_used();
        let free = taken.values().filter(|answer| answer.is_event_stream).count() < self.slots.max_event_streams;
        match taken.get_mut(&self.number) {
            Some(own) if free && !own.is_cut_off => {
                own.is_event_stream = true;
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
