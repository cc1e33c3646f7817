//! Virtual time for several threads, independent of how fast they run.
//!
//! Threads that wait for messages are members of the clock until they end. One member works at a time: those that wait
//! check for their messages in turn, in the order in which they joined, and the first that finds one works on. If none
//! finds one, time advances to the earliest deadline. So messages between members arrive at the same virtual times in each
//! run, if the members themselves do the same. A member that works takes no time, except for what it charges itself by a
//! sleep. Messages of other threads, such as those of signals, arrive at some moment of virtual time.
//!
//! Limit: a member must not block elsewhere for a thread that waits or sleeps here, because that would last forever.

use std::cell::RefCell;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, ThreadId};
use std::time::Duration;

/// The clock of a simulated host, or of a fake one in tests.
#[derive(Debug, Default)]
pub struct VirtualClock {
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
    /// Members and sleeping threads, in the order in which they joined.
    threads: Vec<ClockThread>,
}

#[derive(Debug)]
struct ClockThread {
    id: ThreadId,
    /// `None` while it works.
    wait: Option<Wait>,
}

/// A thread that waits.
#[derive(Clone, Copy, Debug)]
struct Wait {
    deadline: Duration,
    /// Whether it checked for its message since the last thread worked, and found none.
    has_checked: bool,
}

impl ClockState {
    fn position(&self, thread: ThreadId) -> Option<usize> {
        self.threads.iter().position(|found| found.id == thread)
    }

    fn add(&mut self, id: ThreadId) -> usize {
        self.threads.push(ClockThread { id, wait: None });
        self.threads.len() - 1
    }

    fn is_anyone_working(&self) -> bool {
        self.threads.iter().any(|thread| thread.wait.is_none())
    }

    /// A thread stops working: those that wait may have messages of it.
    fn check_again(&mut self) {
        self.threads.iter_mut().filter_map(|thread| thread.wait.as_mut()).for_each(|wait| wait.has_checked = false);
    }

    /// Whose turn it is: a thread that checks for its message, or, after all have checked, that with the earliest deadline.
    fn turn(&self) -> Option<Turn> {
        if self.is_anyone_working() {
            return None;
        }
        let waits = || self.threads.iter().map(|thread| thread.wait).enumerate();
        let unseen = waits().find(|(_, wait)| wait.is_some_and(|wait| !wait.has_checked));
        match unseen {
            Some((position, _)) => Some(Turn::Checks(position)),
            None => waits()
                .filter_map(|(position, wait)| Some((wait?.deadline, position)))
                .min()
                .map(|(deadline, position)| Turn::Advances(position, deadline)),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// The thread at this position checks for its message.
    Checks(usize),
    /// Time passes to this deadline of the thread at this position.
    Advances(usize, Duration),
}

impl SharedClock {
    fn lock(&self) -> MutexGuard<'_, ClockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, thread: ThreadId) {
        let mut state = self.lock();
        state.threads.retain(|found| found.id != thread);
        state.check_again();
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
            clock.remove(self.thread);
        }
    }
}

thread_local! {
    /// The memberships of this thread.
    static MEMBERSHIPS: RefCell<Vec<Membership>> = const { RefCell::new(Vec::new()) };
}

impl VirtualClock {
    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.shared.lock().now
    }

    /// Whether this thread may let time pass: it is a member, or no member works, which might block for it.
    pub fn may_sleep(&self) -> bool {
        let state = self.shared.lock();
        state.position(thread::current().id()).is_some() || !state.is_anyone_working()
    }

    /// Makes this thread a member that works.
    pub fn join(&self) {
        MEMBERSHIPS.with_borrow_mut(|memberships| {
            memberships.retain(|membership| membership.clock.strong_count() > 0);
            if !memberships.iter().any(|membership| membership.clock.as_ptr() == Arc::as_ptr(&self.shared)) {
                let membership = Membership { clock: Arc::downgrade(&self.shared), thread: thread::current().id() };
                self.shared.lock().add(membership.thread);
                memberships.push(membership);
            }
        });
    }

    /// Let this thread sleep. Time does not wait for a thread that is no member and works.
    pub fn sleep(&self, duration: Duration) {
        let this = thread::current().id();
        let is_member = self.shared.lock().position(this).is_some();
        self.wait_for_turn(duration, &mut |_| false);
        if !is_member {
            self.shared.remove(this);
        }
    }

    /// Let this thread wait until `receive` succeeds or the time is over. It becomes a member. `receive` must not use this
    /// clock, which is locked meanwhile.
    pub fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        self.join();
        self.wait_for_turn(timeout, receive);
    }

    fn wait_for_turn(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        let (clock, this) = (&*self.shared, thread::current().id());
        let mut state = clock.lock();
        let position = state.position(this).unwrap_or_else(|| state.add(this));
        state.threads[position].wait = Some(Wait { deadline: state.now + timeout, has_checked: false });
        state.check_again();
        clock.changed.notify_all();
        loop {
            // Threads before this one may have ended.
            let position = state.position(this).expect("a thread that waits is in the list");
            match state.turn() {
                Some(Turn::Checks(turn)) if turn == position => {
                    if receive(Duration::ZERO) {
                        break state.threads[position].wait = None;
                    }
                    state.threads[position].wait.iter_mut().for_each(|wait| wait.has_checked = true);
                    clock.changed.notify_all();
                }
                Some(Turn::Advances(turn, deadline)) if turn == position => {
                    state.now = state.now.max(deadline);
                    break state.threads[position].wait = None;
                }
                _ => state = clock.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
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
        let has_joined = Barrier::new(2);
        thread::scope(|scope| {
            let (clock, has_joined) = (&clock, &has_joined);
            clock.join();
            scope.spawn(move || {
                clock.join();
                has_joined.wait();
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
            has_joined.wait();
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
            clock.sleep(Duration::ZERO);
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
            let clock = &clock;
            let waiting = scope.spawn(move || receive(clock, &messages, Duration::from_secs(5)));
            assert_eq!(waiting.join().unwrap(), None::<()>);
        });
        drop(sender);
        clock.sleep(Duration::from_secs(1));
        assert_eq!(clock.now(), Duration::from_secs(6));
    }
}
