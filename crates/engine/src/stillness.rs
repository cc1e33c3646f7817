//! What keeps pages unchanged while a merge works on them: the program's promise, or write protection; and what tells a
//! merge to leave pages alone: the program has given them up, or memory of this process was pinned meanwhile.

use crate::claims::{Claim, Claims};
use crate::memory;
use pagefold_base::{AddressRange, Bytes};
use pagefold_sys::userfault::{Held, UserFault};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages that are worked on at a time, and that writers are held up from: at most as many as a huge page has on x86-64,
/// and none of two, so that this splits none.
pub const CHUNK: u64 = 512;

/// Pages that are copied or given back at a time where the program has promised not to write: as many as take no more
/// than about 2 ms, for which a thread that frees them waits.
pub const PROMISED_CHUNK: u64 = 1024;

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
    /// How much is pinned now.
    read: fn() -> io::Result<Bytes>,
    /// Memory was pinned, or that could not be read: this merge replaces no more pages.
    was_pinned: AtomicBool,
}

impl PinWatch {
    fn new(read: fn() -> io::Result<Bytes>) -> Self {
        Self { read, was_pinned: AtomicBool::new(false) }
    }

    /// Whether nothing is pinned at this moment. No former answer is used again, though reading takes some 30 µs: a
    /// buffer that was pinned since would lose what is written to it.
    fn allows(&self) -> bool {
        if self.was_pinned.load(Ordering::Relaxed) {
            return false;
        }
        let is_free = (self.read)().is_ok_and(|pinned| pinned == Bytes::ZERO);
        if !is_free {
            self.was_pinned.store(true, Ordering::Relaxed);
        }
        is_free
    }
}

impl<'e> Stillness<'e> {
    /// The program has promised that nobody writes, and that nothing is being pinned.
    pub fn promised(claims: &'e Claims) -> Self {
        Self { claims, userfault: None, pins: None }
    }

    /// Writers are held up. Where `watch_pins` says so, `VmPin` is read before each replacement.
    pub fn enforced(claims: &'e Claims, userfault: UserFault, watch_pins: bool) -> Self {
        let pins = watch_pins.then(|| PinWatch::new(memory::pinned));
        Self { claims, userfault: Some(userfault), pins }
    }

    /// What holds up writers, if they are held up.
    pub fn userfault(&self) -> Option<&UserFault> {
        self.userfault.as_ref()
    }

    /// Nobody writes to a range until what this gives is dropped, and its pages may be replaced.
    ///
    /// # Errors
    /// Those of holding up writers; `Interrupted` where the program has given up part of it, or has pinned memory since
    /// the merge began.
    pub fn of(&self, range: AddressRange) -> io::Result<Still<'_>> {
        let still = self.to_read(range)?;
        // After writers are held up: pinning for writing is held up, too. The kernel accounts a pin only after it is made
        // (`io_sqe_buffer_register`, 6.18), so that one in the making is not seen.
        if !self.pins.as_ref().is_none_or(PinWatch::allows) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(still)
    }

    /// Nobody writes to a range until what this gives is dropped. Its pages are read and not replaced, so it does not
    /// matter whether they are pinned.
    ///
    /// # Errors
    /// Those of holding up writers; `Interrupted` where the program has given up part of it.
    pub fn to_read(&self, range: AddressRange) -> io::Result<Still<'_>> {
        let claim = self.claims.claim(range).ok_or(io::ErrorKind::Interrupted)?;
        let held = self.userfault.as_ref().map(|power| power.hold(range.start..range.end)).transpose()?;
        Ok(Still { held, _claim: claim })
    }

    /// The parts of a range that are taken one after another: those who are held up do not wait for all of it.
    pub fn parts(&self, range: AddressRange, page: u64) -> impl Iterator<Item = AddressRange> + use<> {
        range.cut_at_multiples(page * if self.userfault.is_some() { CHUNK } else { PROMISED_CHUNK })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn memory_that_was_pinned_a_moment_ago_is_not_replaced() {
        static PINNED: AtomicU64 = AtomicU64::new(0);
        let read = || Ok(Bytes(PINNED.load(Ordering::Relaxed)));
        let claims = Claims::default();
        let pins = Some(PinWatch::new(read));
        let stillness = Stillness { claims: &claims, userfault: None, pins };
        let range = AddressRange { start: 0x1000, end: 0x2000 };
        assert!(stillness.of(range).is_ok());
        PINNED.store(4096, Ordering::Relaxed);
        let refused = stillness.of(range).expect_err("it is pinned");
        assert_eq!(refused.kind(), io::ErrorKind::Interrupted);
        assert!(stillness.to_read(range).is_ok(), "reading loses nothing");
        PINNED.store(0, Ordering::Relaxed);
        assert!(stillness.of(range).is_err(), "for the rest of the merge");
    }
}
