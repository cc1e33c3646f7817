//! What keeps pages unchanged while a merge works on them: the program's promise, or write protection; and what tells a
//! merge to leave pages alone: the program has given them up, or memory of this process was pinned meanwhile.

use crate::claims::{Claim, Claims};
use crate::memory;
use pagefold_model::{AddressRange, Bytes};
use pagefold_sys::userfault::{Held, UserFault};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Pages that are worked on at a time, and that writers are held up from: at most as many as a huge page has on x86-64,
/// and none of two, so that this splits none.
pub const CHUNK: u64 = 512;

/// Pages that are copied or given back at a time where the program has promised not to write: as many as take no more
/// than about 2 ms, for which a thread that frees them waits.
pub const PROMISED_CHUNK: u64 = 1024;

/// How old the last look at `VmPin` may be while the program runs: reading it takes some 30 µs.
const PIN_CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Why nobody writes to pages that are in hand.
#[derive(Debug)]
pub struct Stillness<'e> {
    claims: &'e Claims,
    /// Holds up writers; `None` where the caller of `Engine::merge` has promised that there are none.
    userfault: Option<UserFault>,
    pins: Option<PinWatch>,
}

/// A range that does not change, until it is dropped.
#[derive(Debug)]
pub struct Still<'s> {
    held: Option<Held<'s>>,
    _claim: Claim<'s>,
}

impl Still<'_> {
    /// Whether it has not changed since it was looked at before, either: writers are not held up, there are none.
    pub fn is_promised(&self) -> bool {
        self.held.is_none()
    }
}

/// Watches for pins that are made while the program runs beside a merge.
#[derive(Debug)]
struct PinWatch {
    began: Instant,
    /// Nanoseconds after `began` at which `VmPin` was read last; `u64::MAX` once it was not zero.
    read: AtomicU64,
}

impl PinWatch {
    fn allows(&self) -> bool {
        let (now, read) = (self.began.elapsed().as_nanos() as u64, self.read.load(Ordering::Relaxed));
        if read == u64::MAX {
            return false;
        }
        if now < read.saturating_add(PIN_CHECK_INTERVAL.as_nanos() as u64) {
            return true;
        }
        let pinned = !memory::pinned().is_ok_and(|pinned| pinned == Bytes::ZERO);
        self.read.store(if pinned { u64::MAX } else { now }, Ordering::Relaxed);
        !pinned
    }
}

impl<'e> Stillness<'e> {
    /// The program has promised that nobody writes, and that nothing is being pinned.
    pub fn promised(claims: &'e Claims) -> Self {
        Self { claims, userfault: None, pins: None }
    }

    /// Writers are held up. Where `watch_pins` says so, `VmPin` was zero just now, and is watched.
    pub fn enforced(claims: &'e Claims, userfault: UserFault, watch_pins: bool) -> Self {
        let pins = watch_pins.then(|| PinWatch { began: Instant::now(), read: AtomicU64::new(0) });
        Self { claims, userfault: Some(userfault), pins }
    }

    /// What holds up writers, if they are held up.
    pub fn userfault(&self) -> Option<&UserFault> {
        self.userfault.as_ref()
    }

    /// Nobody writes to a range until what this gives is dropped.
    ///
    /// # Errors
    /// Those of holding up writers; `Interrupted` where the program has given up part of it, or has pinned memory since
    /// the merge began.
    pub fn of(&self, range: AddressRange) -> io::Result<Still<'_>> {
        let claim = self.claims.claim(range).ok_or(io::ErrorKind::Interrupted)?;
        let held = self.userfault.as_ref().map(|power| power.hold(range.start..range.end)).transpose()?;
        // After writers are held up: pinning for writing is held up, too.
        if !self.pins.as_ref().is_none_or(PinWatch::allows) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(Still { held, _claim: claim })
    }

    /// The parts of a range that are taken one after another: those who are held up do not wait for all of it.
    pub fn parts(&self, range: AddressRange, page: u64) -> impl Iterator<Item = AddressRange> + use<> {
        range.cut_at_multiples(page * if self.userfault.is_some() { CHUNK } else { PROMISED_CHUNK })
    }
}
