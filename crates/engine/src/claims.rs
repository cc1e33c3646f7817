//! Which memory a merge works on at this moment, so that memory can be freed without waiting for the whole merge.
//!
//! A merge claims each range before it reads or replaces pages, and holds the claim for as long as it takes to compare,
//! copy or map them. Memory that the program frees is **given up** first: later claims in it are refused, and the program
//! waits until the claims there are dropped. The regions forget it at the next call that has the engine's lock.
//!
//! In a child of fork(2) the threads that held claims do not exist: their claims are dropped at the first call. If one of
//! them held the lock at that moment, what was given up is not known in the child: every call fails there, at once. So
//! does a call in a signal handler that has interrupted its own thread while that had the lock.
//!
//! Limits: a claim holder must not take a lock that a thread which gives memory up holds. A child that has the number of
//! its parent, as the first process of a PID namespace may, waits for some seconds once until it takes the lock for lost.

use pagefold_base::AddressRange;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a thread only lets others run before it sleeps: the lock is held for less than a microsecond, and claims
/// for as long as it takes to compare, copy or map some pages.
const MAX_YIELDS: u32 = 8;
/// How long it sleeps then.
const RETRY_INTERVAL: Duration = Duration::from_micros(100);
/// So often a thread asks for the lock, for some seconds, until it takes that for lost: the thread that it names is not in
/// this process.
const LOST_ATTEMPTS: u32 = 20_000;
/// In place of the holder of a lock that is lost: no process has this number.
const LOST: u64 = u64::MAX;

/// The claims of one engine.
#[derive(Debug, Default)]
pub struct RangeClaims {
    /// The thread that has the lock ([`holder`]), or 0. In a child one of another process is named, if the lock was lost.
    holder: AtomicU64,
    /// Locked by the holder only, so nobody waits for it.
    ranges: Mutex<ClaimedRanges>,
}

#[derive(Debug, Default)]
struct ClaimedRanges {
    /// The process that the claims are of.
    owner_pid: u32,
    claimed: Vec<AddressRange>,
    revoked: Vec<AddressRange>,
}

/// The lock of the ranges, until it is dropped.
#[derive(Debug)]
struct LockedClaims<'c> {
    /// `None` once it is unlocked.
    ranges: Option<MutexGuard<'c, ClaimedRanges>>,
    holder: &'c AtomicU64,
}

impl Drop for LockedClaims<'_> {
    fn drop(&mut self) {
        drop(self.ranges.take());
        self.holder.store(0, Ordering::Release);
    }
}

/// A range that a merge works on, until it is dropped.
#[derive(Debug)]
pub struct RangeClaim<'c> {
    claims: &'c RangeClaims,
    /// The process that has made it.
    owner_pid: u32,
    range: AddressRange,
}

fn overlaps_any(ranges: &[AddressRange], range: AddressRange) -> bool {
    ranges.iter().any(|other| other.overlap(range).is_some())
}

/// Wait for a moment, the longer the more often this was done before.
fn wait_between_tries(attempts: u32) {
    if attempts < MAX_YIELDS { std::thread::yield_now() } else { std::thread::sleep(RETRY_INTERVAL) }
}

/// A thread of a process, as the holder of the lock.
fn holder(process: u32, thread: u32) -> u64 {
    u64::from(process) << 32 | u64::from(thread)
}

impl RangeClaims {
    /// Do something with the ranges. `None` if the lock was held by another thread when this process was forked, or if
    /// this thread has it, which a signal handler has interrupted; otherwise its holder is another thread of this process,
    /// and gives it back.
    fn with_ranges<T>(&self, work: impl FnOnce(&mut ClaimedRanges) -> T) -> Option<T> {
        let process = std::process::id();
        let this = holder(process, gettid().as_raw_pid().cast_unsigned());
        let mut attempts = 0;
        while let Err(other) = self.holder.compare_exchange(0, this, Ordering::Acquire, Ordering::Relaxed) {
            if other == this || other >> 32 != u64::from(process) {
                return None;
            }
            if attempts >= LOST_ATTEMPTS {
                // Later calls fail at once. A holder that is there after all gives it back, and all is as before.
                let _ = self.holder.compare_exchange(other, LOST, Ordering::Relaxed, Ordering::Relaxed);
                return None;
            }
            wait_between_tries(attempts);
            attempts = attempts.saturating_add(1);
        }
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locked = LockedClaims { ranges: Some(ranges), holder: &self.holder };
        let ranges = locked.ranges.as_deref_mut()?;
        if ranges.owner_pid != process {
            ranges.owner_pid = process;
            ranges.claimed.clear();
        }
        Some(work(ranges))
    }

    /// Claim a range to work on. `None` if the program has given up part of it.
    pub fn claim(&self, range: AddressRange) -> Option<RangeClaim<'_>> {
        let is_claimed = self.with_ranges(|ranges| {
            let is_free = !overlaps_any(&ranges.revoked, range);
            ranges.claimed.extend(is_free.then_some(range));
            is_free
        })?;
        is_claimed.then(|| RangeClaim { claims: self, owner_pid: std::process::id(), range })
    }

    /// Let no merge claim part of a range from now on. Whether that was possible: `false` in a child that was forked at a
    /// moment at which another thread had the lock, and in a signal handler that has interrupted a thread which has it.
    pub fn refuse(&self, range: AddressRange) -> bool {
        self.with_ranges(|ranges| ranges.revoked.push(range)).is_some()
    }

    /// Wait until the work in hand on a refused range is done. What `lock` gives is held each time that this looks, and
    /// not while it waits.
    pub fn wait<L>(&self, range: AddressRange, lock: impl Fn() -> L) {
        let is_claimed = || {
            let _held = lock();
            // A child of vfork(2), which has the same memory, may have the lock for a moment.
            self.with_ranges(|ranges| overlaps_any(&ranges.claimed, range)).unwrap_or(true)
        };
        let mut attempts = 0;
        while is_claimed() {
            wait_between_tries(attempts);
            attempts = attempts.saturating_add(1);
        }
    }

    /// What was given up since the last call. For the holder of the engine's lock, outside of a merge. `None` in a child
    /// that was forked at a moment at which another thread had the lock: that is not known there.
    pub fn take_revoked(&self) -> Option<Vec<AddressRange>> {
        self.with_ranges(|ranges| std::mem::take(&mut ranges.revoked))
    }
}

impl Drop for RangeClaim<'_> {
    fn drop(&mut self) {
        let remove = |ranges: &mut ClaimedRanges| {
            if let Some(at) = ranges.claimed.iter().position(|range| *range == self.range) {
                ranges.claimed.swap_remove(at);
            }
        };
        // A claim that stayed would be waited for without end. In a child, all of its parent's are dropped by the first
        // call.
        let mut attempts = 0;
        while self.owner_pid == std::process::id() && self.claims.with_ranges(remove).is_none() {
            wait_between_tries(attempts);
            attempts = attempts.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use std::thread;

    fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    /// Refuse a range and wait for what is claimed in it; whether the first was possible.
    fn give_up(claims: &RangeClaims, range: AddressRange) -> bool {
        let refused = claims.refuse(range);
        if refused {
            claims.wait(range, || ());
        }
        refused
    }

    #[test]
    fn revoke_waits_only_for_claims_in_the_range() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x3000)).expect("nothing is given up");
        let dropped = AtomicBool::new(false);
        assert!(give_up(&claims, range(0x3000, 0x4000)), "it is not claimed, so this does not wait");
        thread::scope(|scope| {
            let giver = scope.spawn(|| {
                assert!(give_up(&claims, range(0x2000, 0x3000)));
                assert!(dropped.load(Ordering::SeqCst), "it has waited for the claim");
            });
            // Claims fail as soon as the range is given up, which may take as long as it likes.
            while claims.claim(range(0x2000, 0x3000)).is_some() {
                thread::yield_now();
            }
            assert!(!giver.is_finished());
            dropped.store(true, Ordering::SeqCst);
            drop(claim);
        });
        assert!(claims.claim(range(0x0, 0x1000)).is_some());
        assert!(claims.claim(range(0x0, 0x4000)).is_none());
        assert_eq!(claims.take_revoked(), Some(vec![range(0x3000, 0x4000), range(0x2000, 0x3000)]));
        assert!(claims.claim(range(0x0, 0x4000)).is_some(), "it may be used for other memory now");
    }

    #[test]
    fn who_waits_has_the_given_lock_when_it_looks_and_not_while_it_waits() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is given up");
        assert!(claims.refuse(range(0x1000, 0x2000)));
        let (lock, looks) = (Mutex::new(()), AtomicU32::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                claims.wait(range(0x1000, 0x2000), || {
                    looks.fetch_add(1, Ordering::SeqCst);
                    lock.lock()
                });
            });
            // It is to be had between two looks.
            while looks.load(Ordering::SeqCst) < 3 {
                drop(lock.lock().expect("nothing panics with it"));
                thread::yield_now();
            }
            // Whoever looks waits here, and has it.
            claims.with_ranges(|_| {
                while lock.try_lock().is_ok() {
                    thread::yield_now();
                }
                (0..100).for_each(|_| {
                    thread::sleep(RETRY_INTERVAL);
                    assert!(lock.try_lock().is_err());
                });
            });
            drop(claim);
        });
    }

    #[test]
    fn claim_is_dropped_while_another_thread_holds_lock() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is given up");
        thread::scope(|scope| {
            claims.with_ranges(|_| {
                let dropper = scope.spawn(|| drop(claim));
                // Longer than a thread tries for the lock which would give up.
                thread::sleep(Duration::from_secs(3));
                assert!(!dropper.is_finished());
            });
        });
        assert_eq!(claims.with_ranges(|ranges| ranges.claimed.len()), Some(0));
    }

    #[test]
    fn lock_lost_in_fork_fails_every_call_at_once() {
        let claims = RangeClaims::default();
        // As in the child, where the lock names a thread of the parent.
        claims.holder.store(holder(std::process::id() + 1, 1), Ordering::Relaxed);
        let began = std::time::Instant::now();
        (0..100).for_each(|_| assert!(claims.claim(range(0x1000, 0x2000)).is_none()));
        assert!(!give_up(&claims, range(0x1000, 0x2000)));
        assert_eq!(claims.take_revoked(), None);
        // A call that waits to find that out takes two seconds, and 100 of them more than three minutes.
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    }

    #[test]
    fn a_thread_that_has_the_lock_does_not_wait_for_itself() {
        let (done, is_done) = std::sync::mpsc::channel();
        // Not joined: it would never return.
        thread::spawn(move || {
            let claims = RangeClaims::default();
            // As in a signal handler that interrupts the thread here.
            let within = claims.with_ranges(|_| {
                let failed = claims.claim(range(0x1000, 0x2000)).is_none() && !claims.refuse(range(0, 0x1000));
                (failed, claims.holder.load(Ordering::Relaxed) == LOST)
            });
            done.send((within, claims.refuse(range(0, 0x1000)))).expect("the test waits for it");
        });
        let answers = is_done.recv_timeout(Duration::from_secs(60)).expect("it does not wait without end");
        assert_eq!(answers, (Some((true, false)), true), "nor until it takes the lock for lost");
    }

    #[test]
    fn a_lock_that_was_lost_in_a_child_of_the_same_number_is_waited_for_once() {
        let claims = Arc::new(RangeClaims::default());
        // As in the child, which has its parent's number, and not the thread.
        claims.holder.store(holder(std::process::id(), u32::MAX), Ordering::Relaxed);
        let (done, is_done) = std::sync::mpsc::channel();
        let of_child = Arc::clone(&claims);
        // Not joined: it would never return.
        thread::spawn(move || done.send((0..100).any(|_| of_child.refuse(range(0x1000, 0x2000)))));
        assert_eq!(is_done.recv_timeout(Duration::from_secs(100)), Ok(false), "100 waits take five minutes");
        // As by a thread that had only been stopped.
        claims.holder.store(0, Ordering::Release);
        assert!(claims.refuse(range(0x1000, 0x2000)));
    }

    #[test]
    fn child_drops_parent_claims_and_keeps_revoked_ranges() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is given up");
        assert!(give_up(&claims, range(0x3000, 0x4000)));
        // As in the child, which has another number.
        claims.with_ranges(|ranges| ranges.owner_pid += 1);
        assert!(give_up(&claims, range(0x1000, 0x2000)), "this does not wait");
        assert_eq!(claims.take_revoked(), Some(vec![range(0x3000, 0x4000), range(0x1000, 0x2000)]));
        drop(claim);
    }
}
