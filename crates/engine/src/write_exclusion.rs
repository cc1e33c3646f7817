//! How pages stay unchanged while a merge works on them: the program's promise, or write protection. Also the reasons
//! to skip pages: the program has revoked them, or memory of this process was pinned meanwhile.

use crate::claims::{RangeClaim, RangeClaims};
use crate::memory;
use pagefold_base::{AddressRange, Bytes};
use pagefold_sys::userfault::{UserfaultFd, WriteProtectedRange};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Pages that a merge works on at a time while writers are blocked. This is at most one huge page on x86-64, and never
/// parts of two, so that write protection splits no huge page.
pub const PROTECTED_CHUNK_PAGES: u64 = 512;

/// Pages that are copied or freed at a time if the program has promised not to write. This takes at most about 2 ms,
/// for which a thread that frees these pages waits.
pub const PROMISED_CHUNK_PAGES: u64 = 1024;

/// Why no thread writes to pages that a merge is working on.
#[derive(Debug)]
pub struct WriteExclusion<'e> {
    claims: &'e RangeClaims,
    /// Blocks writers; `None` if the caller of `Engine::merge` has promised that there are none.
    userfault: Option<UserfaultFd>,
    pin_watch: Option<PinWatch>,
}

/// A range that does not change until this is dropped.
#[derive(Debug)]
pub struct FrozenRange<'s> {
    write_protection: Option<WriteProtectedRange<'s>>,
    _claim: RangeClaim<'s>,
}

impl FrozenRange<'_> {
    /// Whether the range is also unchanged since it was scanned: true if the caller promised that there are no writers.
    pub fn is_unchanged_since_scan(&self) -> bool {
        self.write_protection.is_none()
    }
}

/// Detects memory that is pinned while the program runs during a merge.
#[derive(Debug)]
struct PinWatch {
    /// Reads how much memory is pinned now.
    read_pinned: fn() -> io::Result<Bytes>,
    /// Memory was pinned, or that could not be read: this merge replaces no more pages.
    saw_pins: AtomicBool,
}

impl PinWatch {
    fn new(read: fn() -> io::Result<Bytes>) -> Self {
        Self { read_pinned: read, saw_pins: AtomicBool::new(false) }
    }

    /// Whether no memory is pinned now. Reads it each time, although that takes some 30 µs: a buffer pinned since the
    /// last read would lose data that a device writes to it.
    fn has_no_pins(&self) -> bool {
        if self.saw_pins.load(Ordering::Relaxed) {
            return false;
        }
        let is_unpinned = (self.read_pinned)().is_ok_and(|pinned| pinned == Bytes::ZERO);
        if !is_unpinned {
            self.saw_pins.store(true, Ordering::Relaxed);
        }
        is_unpinned
    }
}

impl<'e> WriteExclusion<'e> {
    /// The program has promised that no thread writes, and that no memory is being pinned.
    pub fn promised(claims: &'e RangeClaims) -> Self {
        Self { claims, userfault: None, pin_watch: None }
    }

    /// Block writers. With `watch_pins`, read `VmPin` before each replacement.
    pub fn enforced(claims: &'e RangeClaims, userfault: UserfaultFd, watch_pins: bool) -> Self {
        let pin_watch = watch_pins.then(|| PinWatch::new(memory::pinned_bytes));
        Self { claims, userfault: Some(userfault), pin_watch }
    }

    /// The descriptor that blocks writers, if they are blocked.
    pub fn userfault(&self) -> Option<&UserfaultFd> {
        self.userfault.as_ref()
    }

    /// Keep a range unchanged until the result is dropped; its pages may be replaced.
    ///
    /// # Errors
    /// Those of blocking writers; `Interrupted` if the program has revoked part of the range, or has pinned memory
    /// since the merge began.
    pub fn freeze_to_replace(&self, range: AddressRange) -> io::Result<FrozenRange<'_>> {
        let frozen = self.freeze_to_read(range)?;
        // After writers are blocked: that blocks pinning for writing, too. The kernel accounts a pin only after it is
        // made (`io_sqe_buffer_register`, 6.18), so this check misses a pin that is just being made.
        if !self.pin_watch.as_ref().is_none_or(PinWatch::has_no_pins) {
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok(frozen)
    }

    /// Keep a range unchanged until the result is dropped. Its pages are only read, so pins do not matter.
    ///
    /// # Errors
    /// Those of blocking writers; `Interrupted` if the program has revoked part of the range.
    pub fn freeze_to_read(&self, range: AddressRange) -> io::Result<FrozenRange<'_>> {
        let claim = self.claims.claim(range).ok_or(io::ErrorKind::Interrupted)?;
        let write_protection =
            self.userfault.as_ref().map(|userfault| userfault.write_protect(range.start..range.end)).transpose()?;
        Ok(FrozenRange { write_protection, _claim: claim })
    }

    /// Split a range into the chunks that a merge works on at a time, so that blocked writers do not wait for all of
    /// it.
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
        let refused = stillness.freeze_to_replace(range).expect_err("memory is pinned");
        assert_eq!(refused.kind(), io::ErrorKind::Interrupted);
        assert!(stillness.freeze_to_read(range).is_ok(), "reading is safe");
        PINNED_BYTES.store(0, Ordering::Relaxed);
        assert!(stillness.freeze_to_replace(range).is_err(), "refused for the rest of the merge");
    }
}
