//! Ranges that a merge is working on, so that memory can be freed without waiting for the whole merge.
//!
//! A merge claims each range before it reads or replaces pages, and keeps the claim while it compares, copies or maps
//! them. Memory that the program frees is **revoked** first: later claims in it are refused, and the program waits
//! until the existing claims there are dropped. The next call that holds the engine's lock removes it from the regions.
//!
//! In a child of fork(2) the threads that made claims do not exist: the first call drops their claims. If one of those
//! threads held the lock at the fork, the child does not know which ranges were revoked, and every call fails there at
//! once. So does a call in a signal handler that has interrupted its own thread while that held the lock.
//!
//! Limits: the owner of a claim must not take a lock that a thread holds while it frees memory. The first process of a
//! PID namespace may be a child with the same PID as its parent. Such a child waits once for some seconds before it
//! considers the lock lost.

use pagefold_base::AddressRange;
use rustix::thread::gettid;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often a thread yields before it sleeps: the lock is held for less than a microsecond, and claims for as long as
/// it takes to compare, copy or map some pages.
const MAX_YIELDS: u32 = 8;
/// How long it sleeps then.
const RETRY_INTERVAL: Duration = Duration::from_micros(100);
/// After this many attempts to lock, some seconds, a thread considers the lock lost: the thread that it names is not in
/// this process.
const MAX_LOCK_ATTEMPTS: u32 = 20_000;
/// Marks a lost lock in place of the holder: no process has this PID.
const LOST_LOCK_HOLDER: u64 = u64::MAX;

/// The claims of one engine.
#[derive(Debug, Default)]
pub struct RangeClaims {
    /// The thread that holds the lock ([`holder`]), or 0. In a child that lost the lock it names a thread of another
    /// process.
    holder: AtomicU64,
    /// Locked only by the holder, so no thread waits for it.
    ranges: Mutex<ClaimedRanges>,
}

#[derive(Debug, Default)]
struct ClaimedRanges {
    /// The process that owns the claims.
    owner_pid: u32,
    claimed: Vec<AddressRange>,
    revoked: Vec<AddressRange>,
}

/// The locked ranges. Unlocks when dropped.
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

/// A range that a merge is working on, until this is dropped.
#[derive(Debug)]
pub struct RangeClaim<'c> {
    claims: &'c RangeClaims,
    /// The process that made the claim.
    owner_pid: u32,
    range: AddressRange,
}

fn overlaps_any(ranges: &[AddressRange], range: AddressRange) -> bool {
    ranges.iter().any(|other| other.overlap(range).is_some())
}

/// Yield on the first attempts, then sleep.
fn wait_between_tries(attempts: u32) {
    if attempts < MAX_YIELDS { std::thread::yield_now() } else { std::thread::sleep(RETRY_INTERVAL) }
}

/// A thread of a process, encoded as the holder of the lock.
fn holder(pid: u32, tid: u32) -> u64 {
    u64::from(pid) << 32 | u64::from(tid)
}

impl RangeClaims {
    /// Run `work` on the ranges. `None` if another thread held the lock when this process was forked, or if this thread
    /// holds it and a signal handler has interrupted it. Otherwise waits for the holder, which is another thread of
    /// this process.
    fn with_ranges<T>(&self, work: impl FnOnce(&mut ClaimedRanges) -> T) -> Option<T> {
        let pid = std::process::id();
        let this_thread = holder(pid, gettid().as_raw_pid().cast_unsigned());
        let mut attempts = 0;
        while let Err(current_holder) =
            self.holder.compare_exchange(0, this_thread, Ordering::Acquire, Ordering::Relaxed)
        {
            if current_holder == this_thread || current_holder >> 32 != u64::from(pid) {
                return None;
            }
            if attempts >= MAX_LOCK_ATTEMPTS {
                // Later calls fail at once. If the holder exists after all, it unlocks, and calls succeed again.
                let _ = self.holder.compare_exchange(
                    current_holder,
                    LOST_LOCK_HOLDER,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                return None;
            }
            wait_between_tries(attempts);
            attempts = attempts.saturating_add(1);
        }
        let ranges = self.ranges.lock().unwrap_or_else(PoisonError::into_inner);
        let mut locked = LockedClaims { ranges: Some(ranges), holder: &self.holder };
        let ranges = locked.ranges.as_deref_mut()?;
        if ranges.owner_pid != pid {
            ranges.owner_pid = pid;
            ranges.claimed.clear();
        }
        Some(work(ranges))
    }

    /// Claim a range to work on. `None` if the program has revoked part of it.
    pub fn claim(&self, range: AddressRange) -> Option<RangeClaim<'_>> {
        let is_granted = self.with_ranges(|ranges| {
            let is_unrevoked = !overlaps_any(&ranges.revoked, range);
            ranges.claimed.extend(is_unrevoked.then_some(range));
            is_unrevoked
        })?;
        is_granted.then(|| RangeClaim { claims: self, owner_pid: std::process::id(), range })
    }

    /// Let no merge claim any part of a range from now on. Returns whether that was possible: `false` in a child that
    /// was forked while another thread held the lock, and in a signal handler that has interrupted the holder.
    pub fn refuse(&self, range: AddressRange) -> bool {
        self.with_ranges(|ranges| ranges.revoked.push(range)).is_some()
    }

    /// Wait until the current work on a refused range is done. Holds the guard from `lock` during each check, and not
    /// between checks.
    pub fn wait<L>(&self, range: AddressRange, lock: impl Fn() -> L) {
        let is_claimed = || {
            let _guard = lock();
            // A child of vfork(2) shares the memory and may hold the lock briefly.
            self.with_ranges(|ranges| overlaps_any(&ranges.claimed, range)).unwrap_or(true)
        };
        let mut attempts = 0;
        while is_claimed() {
            wait_between_tries(attempts);
            attempts = attempts.saturating_add(1);
        }
    }

    /// Ranges revoked since the last call. For the holder of the engine's lock, outside of a merge. `None` in a child
    /// that was forked while another thread held the lock: the ranges are unknown there.
    pub fn take_revoked(&self) -> Option<Vec<AddressRange>> {
        self.with_ranges(|ranges| std::mem::take(&mut ranges.revoked))
    }
}

impl Drop for RangeClaim<'_> {
    fn drop(&mut self) {
        let remove = |ranges: &mut ClaimedRanges| {
            if let Some(index) = ranges.claimed.iter().position(|range| *range == self.range) {
                ranges.claimed.swap_remove(index);
            }
        };
        // A claim that stayed would be waited for forever. In a child, the first call drops all claims of the parent.
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

    /// Refuse a range and wait for the claims in it. Returns whether refusing was possible.
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
        let claim = claims.claim(range(0x1000, 0x3000)).expect("nothing is revoked");
        let dropped = AtomicBool::new(false);
        assert!(give_up(&claims, range(0x3000, 0x4000)), "the range is not claimed, so this does not wait");
        thread::scope(|scope| {
            let giver = scope.spawn(|| {
                assert!(give_up(&claims, range(0x2000, 0x3000)));
                assert!(dropped.load(Ordering::SeqCst), "the revoking thread waited for the claim");
            });
            // Claims fail as soon as the range is revoked; how long that takes does not matter.
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
        assert!(claims.claim(range(0x0, 0x4000)).is_some(), "the range may contain other memory now");
    }

    #[test]
    fn wait_holds_the_given_lock_only_during_checks() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is revoked");
        assert!(claims.refuse(range(0x1000, 0x2000)));
        let (lock, looks) = (Mutex::new(()), AtomicU32::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                claims.wait(range(0x1000, 0x2000), || {
                    looks.fetch_add(1, Ordering::SeqCst);
                    lock.lock()
                });
            });
            // The lock is free between two checks.
            while looks.load(Ordering::SeqCst) < 3 {
                drop(lock.lock().expect("nothing panics with it"));
                thread::yield_now();
            }
            // The checking thread waits here, and holds the guard.
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
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is revoked");
        thread::scope(|scope| {
            claims.with_ranges(|_| {
                let dropper = scope.spawn(|| drop(claim));
                // Longer than the time after which a thread considers the lock lost.
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
        // A call that waits before it fails takes two seconds, so 100 of them take more than three minutes.
        assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    }

    #[test]
    fn thread_that_holds_the_lock_does_not_wait_for_itself() {
        let (done, is_done) = std::sync::mpsc::channel();
        // Not joined: on failure it would never return.
        thread::spawn(move || {
            let claims = RangeClaims::default();
            // As in a signal handler that interrupts the thread here.
            let within = claims.with_ranges(|_| {
                let failed = claims.claim(range(0x1000, 0x2000)).is_none() && !claims.refuse(range(0, 0x1000));
                (failed, claims.holder.load(Ordering::Relaxed) == LOST_LOCK_HOLDER)
            });
            done.send((within, claims.refuse(range(0, 0x1000)))).expect("the test waits for it");
        });
        let answers = is_done.recv_timeout(Duration::from_secs(60)).expect("it does not wait without end");
        assert_eq!(answers, (Some((true, false)), true), "it does not wait until the lock counts as lost");
    }

    #[test]
    fn lock_lost_in_child_with_parents_pid_is_waited_for_once() {
        let claims = Arc::new(RangeClaims::default());
        // As in the child, which has its parent's PID but not the thread.
        claims.holder.store(holder(std::process::id(), u32::MAX), Ordering::Relaxed);
        let (done, is_done) = std::sync::mpsc::channel();
        let child_claims = Arc::clone(&claims);
        // Not joined: on failure it would never return.
        thread::spawn(move || done.send((0..100).any(|_| child_claims.refuse(range(0x1000, 0x2000)))));
        assert_eq!(is_done.recv_timeout(Duration::from_secs(100)), Ok(false), "100 waits take five minutes");
        // As by a thread that was only stopped.
        claims.holder.store(0, Ordering::Release);
        assert!(claims.refuse(range(0x1000, 0x2000)));
    }

    #[test]
    fn child_drops_parent_claims_and_keeps_revoked_ranges() {
        let claims = RangeClaims::default();
        let claim = claims.claim(range(0x1000, 0x2000)).expect("nothing is revoked");
        assert!(give_up(&claims, range(0x3000, 0x4000)));
        // As in the child, which has another PID.
        claims.with_ranges(|ranges| ranges.owner_pid += 1);
        assert!(give_up(&claims, range(0x1000, 0x2000)), "this does not wait");
        assert_eq!(claims.take_revoked(), Some(vec![range(0x3000, 0x4000), range(0x1000, 0x2000)]));
        drop(claim);
    }
}
