//! What keeps pages unchanged while a merge works on them: the program's promise, or write protection; and what tells a
//! merge to leave pages alone: the program has given them up, or memory of this process was pinned meanwhile.

use crate::claims::{RangeClaim, RangeClaims};
use crate::memory;
use pagefold_base::{AddressRange, Bytes};
use pagefold_sys::userfault::{UserfaultFd, WriteProtectedRange};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages that are worked on at a time, and that writers are held up from: at most as many as a huge page has on x86-64,
/// and none of two, so that this splits none.
pub const PROTECTED_CHUNK_PAGES: u64 = 512;

/// Pages that are copied or given back at a time where the program has promised not to write: as many as take no more
/// than about 2 ms, for which a thread that frees them waits.
pub const PROMISED_CHUNK_PAGES: u64 = 1024;

/// Why nobody writes to pages that are in hand.
#[derive(Debug)]
pub struct WriteExclusion<'e> {
    claims: &'e RangeClaims,
    /// Holds up writers; `None` where the caller of `Engine::merge` has promised that there are none.
    userfault: Option<UserfaultFd>,
    pin_watch: Option<PinWatch>,
}

/// A range that does not change, until it is dropped.
#[derive(Debug)]
pub struct FrozenRange<'s> {
    write_protection: Option<WriteProtectedRange<'s>>,
    _claim: RangeClaim<'s>,
}

impl FrozenRange<'_> {
    /// Whether it has not changed since it was looked at before, either: writers are not held up, there are none.
    pub fn is_unchanged_since_scan(&self) -> bool {
        self.write_protection.is_none()
    }
}

/// Watches for pins that are made while the program runs beside a merge.
#[derive(Debug)]
struct PinWatch {
    /// How much is pinned now.
    read_pinned: fn() -> io::Result<Bytes>,
    /// Memory was pinned, or that could not be read: this merge replaces no more pages.
    saw_pins: AtomicBool,
}

impl PinWatch {
    fn new(read: fn() -> io::Result<Bytes>) -> Self {
        Self { read_pinned: read, saw_pins: AtomicBool::new(false) }
    }

    /// Whether nothing is pinned at this moment. No former answer is used again, though reading takes some 30 µs: a
    /// buffer that was pinned since would lose what is written to it.
    fn has_no_pins(&self) -> bool {
        if self.saw_pins.load(Ordering::Relaxed) {
            return false;
        }
        let is_free = (self.read_pinned)().is_ok_and(|pinned| pinned == Bytes::ZERO);
        if !is_free {
            self.saw_pins.store(true, Ordering::Relaxed);
        }
        is_free
    }
}

impl<'e> WriteExclusion<'e> {
    /// The program has promised that nobody writes, and that nothing is being pinned.
    pub fn promised(claims: &'e RangeClaims) -> Self {
        Self { claims, userfault: None, pin_watch: None }
    }

    /// Writers are held up. Where `watch_pins` says so, `VmPin` is read before each replacement.
    pub fn enforced(claims: &'e RangeClaims, userfault: UserfaultFd, watch_pins: bool) -> Self {
        let pins = watch_pins.then(|| PinWatch::new(memory::pinned_bytes));
        Self { claims, userfault: Some(userfault), pin_watch: pins }
    }

    /// What holds up writers, if they are held up.
    pub fn userfault(&self) -> Option<&UserfaultFd> {
        self.userfault.as_ref()
    }

    /// Nobody writes to a range until what this gives is dropped, and its pages may be replaced.
    ///
    /// # Errors
    /// Those of holding up writers; `Interrupted` where the program has given up part of it, or has pinned memory since
    /// the merge began.
    pub fn freeze_to_replace(&self, range: AddressRange) -> io::Result<FrozenRange<'_>> {
        let still = self.freeze_to_read(range)?;
        // After writers are held up: pinning for writing is held up, too. The kernel accounts a pin only after it is made
        // (`io_sqe_buffer_register`, 6.18), so that one in the making is not seen.
        if !self.pin_watch.as_ref().is_none_or(PinWatch::has_no_pins) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(still)
    }

    /// Nobody writes to a range until what this gives is dropped. Its pages are read and not replaced, so it does not
    /// matter whether they are pinned.
    ///
    /// # Errors
    /// Those of holding up writers; `Interrupted` where the program has given up part of it.
    pub fn freeze_to_read(&self, range: AddressRange) -> io::Result<FrozenRange<'_>> {
        let claim = self.claims.claim(range).ok_or(io::ErrorKind::Interrupted)?;
        let held = self.userfault.as_ref().map(|power| power.write_protect(range.start..range.end)).transpose()?;
        Ok(FrozenRange { write_protection: held, _claim: claim })
    }

    /// The parts of a range that are taken one after another: those who are held up do not wait for all of it.
    pub fn chunks(&self, range: AddressRange, page_bytes: u64) -> impl Iterator<Item = AddressRange> + use<> {
        range.cut_at_multiples(
            page_bytes * if self.userfault.is_some() { PROTECTED_CHUNK_PAGES } else { PROMISED_CHUNK_PAGES },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn recently_pinned_memory_is_not_replaced() {
        static PINNED_BYTES: AtomicU64 = AtomicU64::new(0);
        let read = || Ok(Bytes(PINNED_BYTES.load(Ordering::Relaxed)));
        let claims = RangeClaims::default();
        let pins = Some(PinWatch::new(read));
        let stillness = WriteExclusion { claims: &claims, userfault: None, pin_watch: pins };
        let range = AddressRange { start: 0x1000, end: 0x2000 };
        assert!(stillness.freeze_to_replace(range).is_ok());
        PINNED_BYTES.store(4096, Ordering::Relaxed);
        let refused = stillness.freeze_to_replace(range).expect_err("it is pinned");
        assert_eq!(refused.kind(), io::ErrorKind::Interrupted);
        assert!(stillness.freeze_to_read(range).is_ok(), "reading loses nothing");
        PINNED_BYTES.store(0, Ordering::Relaxed);
        assert!(stillness.freeze_to_replace(range).is_err(), "for the rest of the merge");
    }
}
