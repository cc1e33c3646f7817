//! Virtual time for several threads, independent of how fast they run.
//!
//! Threads that wait for messages are members of the clock until they end. Time passes only while all members wait: then
//! it advances to the earliest deadline of all waiting threads. A member that works takes no time, except for the time
//! that it charges itself by a sleep. Before time passes, each waiting thread has looked for its message after the last
//! one began to wait, so that no message of a member is overlooked. Messages of other threads, such as those of signals,
//! arrive at some moment of virtual time.
//!
//! Limit: a member must not block elsewhere for a thread that sleeps here, because time stands still then.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// How often a waiting thread looks for messages of threads that are no members.
const FOREIGN_MESSAGE_DELAY: Duration = Duration::from_millis(1);

/// The clock of a host.
#[derive(Debug, Default)]
pub(super) struct VirtualClock {
    shared: Arc<SharedClock>,
}

#[derive(Debug, Default)]
struct SharedClock {
    state: Mutex<ClockState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ClockState {
    now: Duration,
    /// Members and sleeping threads; `None` while they work.
    threads: HashMap<ThreadId, Option<Wait>>,
    /// How many waits have begun.
    waits_begun: u64,
    /// Increases whenever a wait begins or ends.
    epoch: u64,
}

/// A thread that waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    deadline: Duration,
    /// The earlier of two waits with one deadline ends first.
    number: u64,
    /// The last epoch in which the thread looked for its message and found none.
    looked_in: Option<u64>,
}

impl ClockState {
    /// Whether time may pass until the deadline of this thread: all members wait in vain, and none for a shorter time.
    fn may_pass(&self, thread: ThreadId) -> bool {
        let order = |wait: &Wait| (wait.deadline, wait.number);
        let Some(Some(own)) = self.threads.get(&thread) else { return false };
        let waits_in_vain = |wait: &Option<Wait>| {
            wait.is_some_and(|wait| wait.looked_in == Some(self.epoch) && order(&wait) >= order(own))
        };
        self.threads.values().all(waits_in_vain)
    }
}

impl SharedClock {
    fn lock(&self) -> MutexGuard<'_, ClockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, state: &mut ClockState, thread: ThreadId, wait: Option<Option<Wait>>) {
        match wait {
            Some(wait) => drop(state.threads.insert(thread, wait)),
            None => drop(state.threads.remove(&thread)),
        }
        state.epoch += 1;
        self.changed.notify_all();
    }
}

/// A thread's membership in a clock, which ends with the thread.
struct Membership {
    clock: Weak<SharedClock>,
    thread: ThreadId,
}

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some(clock) = self.clock.upgrade() {
            clock.change(&mut clock.lock(), self.thread, None);
        }
    }
}

thread_local! {
    /// The memberships of this thread.
    static MEMBERSHIPS: RefCell<Vec<Membership>> = const { RefCell::new(Vec::new()) };
}

impl VirtualClock {
    /// Time since the start.
    pub(super) fn now(&self) -> Duration {
        self.shared.lock().now
    }

    /// Whether this thread works, and no other member does.
    pub(super) fn is_alone_at_work(&self) -> bool {
        let own = thread::current().id();
        self.shared.lock().threads.iter().all(|(thread, wait)| *thread == own || wait.is_some())
    }

    /// Let this thread sleep.
    pub(super) fn sleep(&self, duration: Duration) {
        let is_member = self.shared.lock().threads.contains_key(&thread::current().id());
        self.pass(duration, &mut |_| false);
        if !is_member {
            self.shared.change(&mut self.shared.lock(), thread::current().id(), None);
        }
    }

    /// Let this thread wait until `receive` succeeds or the time is over. It becomes a member.
    pub(super) fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        MEMBERSHIPS.with_borrow_mut(|memberships| {
            memberships.retain(|membership| membership.clock.strong_count() > 0);
            if !memberships.iter().any(|membership| membership.clock.as_ptr() == Arc::as_ptr(&self.shared)) {
                let clock = Arc::downgrade(&self.shared);
                memberships.push(Membership { clock, thread: thread::current().id() });
            }
        });
        self.pass(timeout, receive);
    }

    fn pass(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        let (clock, thread) = (&*self.shared, thread::current().id());
        let mut state = clock.lock();
        state.waits_begun += 1;
        let mut wait = Wait { deadline: state.now + timeout, number: state.waits_begun, looked_in: None };
        clock.change(&mut state, thread, Some(Some(wait)));
        loop {
            let epoch = state.epoch;
            drop(state);
            let has_received = receive(Duration::ZERO);
            state = clock.lock();
            if has_received {
                break;
            }
            if state.epoch != epoch {
                continue;
            }
            if wait.looked_in != Some(epoch) {
                wait.looked_in = Some(epoch);
                state.threads.insert(thread, Some(wait));
                clock.changed.notify_all();
            }
            if state.may_pass(thread) {
                state.now = state.now.max(wait.deadline);
                break;
            }
            let waited = clock.changed.wait_timeout(state, FOREIGN_MESSAGE_DELAY);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        clock.change(&mut state, thread, Some(None));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{self, Receiver, Sender};

    fn receive<T>(clock: &VirtualClock, messages: &Receiver<T>, timeout: Duration) -> Option<T> {
        let mut message = None;
        clock.wait(timeout, &mut |real_timeout| {
            message = messages.recv_timeout(real_timeout).ok();
            message.is_some()
        });
        message
    }

    /// A thread answers orders after some time, and the other one ticks meanwhile. Returns what happened, and when.
    fn play(orders: &[(u64, u64)]) -> Vec<(u64, String)> {
        let clock = VirtualClock::default();
        let (order, orders_received): (Sender<u64>, _) = mpsc::channel();
        let (answer, answers) = mpsc::channel();
        let mut log = Vec::new();
        thread::scope(|scope| {
            let clock = &clock;
            scope.spawn(move || {
                // Without a limit this thread ends when the channel is closed.
                while let Some(work) = receive(clock, &orders_received, Duration::from_secs(3600)) {
                    if work == 0 {
                        return;
                    }
                    // Work takes real time, which does not matter.
                    thread::sleep(Duration::from_millis(3));
                    clock.sleep(Duration::from_millis(work));
                    answer.send(work).unwrap();
                }
            });
            // The other thread is a member from its first wait on.
            thread::sleep(Duration::from_millis(20));
            for &(pause, work) in orders {
                let _ = receive(clock, &answers, Duration::from_millis(pause));
                order.send(work).unwrap();
                for _ in 0..4 {
                    let received = receive(clock, &answers, Duration::from_millis(10));
                    let what = received.map_or_else(|| "tick".to_owned(), |work| format!("answer {work}"));
                    log.push((clock.now().as_millis() as u64, what));
                }
            }
            order.send(0).unwrap();
        });
        log
    }

    #[test]
    fn messages_arrive_at_exact_times() {
        let expected = [(15, "tick"), (25, "tick"), (30, "answer 25"), (40, "tick")];
        let expected = expected.map(|(at, what)| (at, what.to_owned()));
        for _ in 0..20 {
            assert_eq!(play(&[(5, 25)]), expected);
        }
    }

    #[test]
    fn ended_threads_do_not_hold_time() {
        let clock = VirtualClock::default();
        let (sender, messages) = mpsc::channel();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| receive(&clock, &messages, Duration::from_secs(5)));
            assert_eq!(waiting.join().unwrap(), None::<()>);
        });
        drop(sender);
        clock.sleep(Duration::from_secs(1));
        assert_eq!(clock.now(), Duration::from_secs(6));
    }
}
