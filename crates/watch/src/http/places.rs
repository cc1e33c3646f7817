//! Places for answers: how many are under way at once, and which one makes room.
//!
//! A request that is whole is answered in milliseconds where its peer takes the answer. So where all places are taken
//! and another request waits, the oldest answer that is not a stream of events is cut off, if it has had its time.

use std::collections::BTreeMap;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long an answer may take while other requests wait for a place.
pub const PRESSED: Duration = Duration::from_millis(500);

/// Places, of which there are `most`, of them at most `streams` for streams of events.
#[derive(Debug)]
pub struct Places {
    most: usize,
    streams: usize,
    taken: Mutex<BTreeMap<u64, Taken>>,
}

#[derive(Debug)]
struct Taken {
    since: Instant,
    peer: Arc<TcpStream>,
    /// Whether it is a stream of events: those have a bound of their own.
    stream: bool,
    /// Whether it was cut off.
    cut: bool,
}

impl Places {
    pub fn new(most: usize, streams: usize) -> Self {
        Self { most, streams, taken: Mutex::default() }
    }

    /// Take a place for the answer to a peer. Where there is none, the oldest answer that has had its time is cut off,
    /// and its place is free soon.
    pub fn take(self: &Arc<Self>, peer: &Arc<TcpStream>) -> Option<Place> {
        let mut taken = self.taken();
        if taken.len() < self.most {
            let number = taken.last_key_value().map_or(0, |(last, _)| last + 1);
            taken.insert(number, Taken { since: Instant::now(), peer: Arc::clone(peer), stream: false, cut: false });
            return Some(Place { places: Arc::clone(self), number });
        }
        let mut answers = taken.values_mut().filter(|answer| !answer.stream && !answer.cut);
        if let Some(oldest) = answers.next().filter(|answer| answer.since.elapsed() >= PRESSED) {
            oldest.cut = true;
            // A peer that has gone has no connection to shut down.
            let _ = oldest.peer.shutdown(Shutdown::Both);
        }
        None
    }

    fn taken(&self) -> MutexGuard<'_, BTreeMap<u64, Taken>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A place that was taken, until it is dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    number: u64,
}

impl Place {
    /// Use it for a stream of events from now on; `false` where there are as many as there may be.
    pub fn stream(&self) -> bool {
        let mut taken = self.places.taken();
        let free = taken.values().filter(|answer| answer.stream).count() < self.places.streams;
        match taken.get_mut(&self.number) {
            Some(own) if free && !own.cut => {
                own.stream = true;
                true
            }
            _ => false,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.taken().remove(&self.number);
    }
}
