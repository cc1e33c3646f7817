//! Which memory a merge works on at this moment, so that memory can be freed without waiting for the whole merge.
//!
//! A merge claims each range before it reads or replaces pages, and holds the claim for as long as it takes to compare,
//! copy or map them. Memory that the program frees is **given up** first: no later claim succeeds in it, and the call
//! returns once the claims there are dropped. The regions forget it at the next call that has the engine's lock.
//!
//! In a child of fork(2) the threads that held claims do not exist: their claims are dropped at the first call.
//!
//! Limits: a claim holder must not take a lock that a thread which gives memory up holds.

use pagefold_model::AddressRange;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// How long to try for the lock: longer than any thread holds it, but one that was lost in a fork.
const LOCK_ATTEMPTS: u32 = 2000;
const LOCK_RETRY: Duration = Duration::from_millis(1);

/// The claims of one engine.
#[derive(Debug, Default)]
pub struct Claims {
    ranges: Mutex<Ranges>,
    dropped: Condvar,
}

#[derive(Debug, Default)]
struct Ranges {
    /// The process that the claims are of.
    process: u32,
    claimed: Vec<AddressRange>,
    given_up: Vec<AddressRange>,
    /// Threads that wait for claims to be dropped.
    waiting: usize,
}

/// A range that a merge works on, until it is dropped.
#[derive(Debug)]
pub struct Claim<'c> {
    claims: &'c Claims,
    range: AddressRange,
}

fn overlaps(ranges: &[AddressRange], range: AddressRange) -> bool {
    ranges.iter().any(|other| other.overlap(range).is_some())
}

impl Claims {
    /// `None` if the lock was held by another thread when this process was forked.
    fn lock(&self) -> Option<MutexGuard<'_, Ranges>> {
        let mut attempts = 0;
        let mut ranges = loop {
            match self.ranges.try_lock() {
                Ok(ranges) => break ranges,
                Err(TryLockError::Poisoned(poisoned)) => break poisoned.into_inner(),
                Err(TryLockError::WouldBlock) if attempts >= LOCK_ATTEMPTS => return None,
                Err(TryLockError::WouldBlock) => {}
            }
            // Held for less than a microsecond, unless its thread was preempted.
            if attempts < 8 {
                std::thread::yield_now()
            } else {
                std::thread::sleep(LOCK_RETRY)
            }
            attempts += 1;
        };
        let process = std::process::id();
        if ranges.process != process {
            (ranges.process, ranges.waiting) = (process, 0);
            ranges.claimed.clear();
        }
        Some(ranges)
    }

    /// Claim a range to work on. `None` if the program has given up part of it.
    pub fn claim(&self, range: AddressRange) -> Option<Claim<'_>> {
        let mut ranges = self.lock()?;
        if overlaps(&ranges.given_up, range) {
            return None;
        }
        ranges.claimed.push(range);
        Some(Claim { claims: self, range })
    }

    /// Let no merge touch a range from now on, and wait until the work in hand on it is done. Whether that was possible:
    /// `false` in a child that was forked at a moment at which another thread had the lock.
    pub fn give_up(&self, range: AddressRange) -> bool {
        let Some(mut ranges) = self.lock() else { return false };
        ranges.given_up.push(range);
        ranges.waiting += 1;
        let claimed = |ranges: &mut Ranges| overlaps(&ranges.claimed, range);
        let mut ranges = self.dropped.wait_while(ranges, claimed).unwrap_or_else(PoisonError::into_inner);
        ranges.waiting -= 1;
        true
    }

    /// What was given up since the last call. For the holder of the engine's lock, outside of a merge.
    pub fn take_given_up(&self) -> Vec<AddressRange> {
        self.lock().map_or_else(Vec::new, |mut ranges| std::mem::take(&mut ranges.given_up))
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        let Some(mut ranges) = self.claims.lock() else { return };
        if let Some(at) = ranges.claimed.iter().position(|range| *range == self.range) {
            ranges.claimed.swap_remove(at);
        }
        if ranges.waiting > 0 {
            self.claims.dropped.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    #[test]
    fn giving_up_waits_for_claims_in_the_range_and_for_no_others() {
        let claims = Claims::default();
        let claim = claims.claim(range(0x1000, 0x3000)).expect("nothing is given up");
        let dropped = AtomicBool::new(false);
        assert!(claims.give_up(range(0x3000, 0x4000)), "it is not claimed, so this does not wait");
        thread::scope(|scope| {
            let giver = scope.spawn(|| {
                assert!(claims.give_up(range(0x2000, 0x3000)));
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
        assert_eq!(claims.take_given_up(), [range(0x3000, 0x4000), range(0x2000, 0x3000)]);
        assert!(claims.claim(range(0x0, 0x4000)).is_some(), "it may be used for other memory now");
    }
}
