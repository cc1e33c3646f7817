//! The virtual time of a fake host.

use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Real time in which the thread that is waited for may answer before virtual time passes.
pub(super) const ANSWER_REAL_TIME: Duration = Duration::from_millis(1);

/// The virtual time of a host.
pub(super) struct VirtualClock {
    /// The real time at its start.
    pub(super) start: Instant,
    /// Time since `start`: sleeps and waits.
    pub(super) elapsed: Duration,
    /// CPU time that Pagefold has used.
    pub(super) cpu_time: Duration,
    /// The deadlines of waiting threads. Time advances to the earliest.
    pub(super) waits: Vec<Duration>,
    /// The thread that read the host or its clock last, and when, in real time. While it works, no time passes for others.
    pub(super) last_user: (ThreadId, Instant),
}

impl VirtualClock {
    pub(super) fn note_user(&mut self) {
        self.last_user = (thread::current().id(), Instant::now());
    }

    /// Whether another thread works: it has used the host a moment ago.
    pub(super) fn is_other_thread_working(&self) -> bool {
        let (user, at) = self.last_user;
        user != thread::current().id() && at.elapsed() < ANSWER_REAL_TIME
    }

    pub(super) fn remove_wait(&mut self, deadline: Duration) {
        let position = self.waits.iter().position(|other| *other == deadline).unwrap();
        self.waits.swap_remove(position);
    }
}
