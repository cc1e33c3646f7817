//! Memory that the engine lends, and freeing adopted memory, which waits for the pages that a merge has in hand, and not for the whole merge.

use crate::{AllocatedRegion, Engine, EngineState, Error, check_page_aligned, memory};
use pagefold_base::AddressRange;
use std::sync::{PoisonError, TryLockError};

impl Engine {
    /// As [`Engine::disown`], for memory that stays where it is until it is unmapped or replaced: what it maps of the
    /// store leaves that once it is no longer mapped, whichever way is merged. While a merge runs in another thread
    /// this waits for the pages that it has in hand, 4 MiB at most, and not for its end. The regions and figures of
    /// this member have the memory until the engine is called again.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if it is not of whole pages; [`Error::Forked`], also in a signal handler that has interrupted another
    /// call in this thread. Then nothing has changed.
    ///
    /// # Safety
    /// Until it is unmapped or replaced it is not moved while [`Engine::merge_while_running`] runs.
    pub unsafe fn disown_in_place(&self, range: AddressRange) -> Result<(), Error> {
        // SAFETY: the caller's promise, and the wait is next.
        unsafe { self.refuse(range) }?;
        self.wait_for_claims(range, || ());
        Ok(())
    }

    /// The first part of [`Engine::disown_in_place`], which does not wait: a merge takes no more pages of the range in
    /// hand. For a program that forks beside other threads: with a lock that it also holds over fork(2), a child knows
    /// what was refused.
    ///
    /// # Errors
    /// As for [`Engine::disown_in_place`].
    ///
    /// # Safety
    /// As for [`Engine::disown_in_place`]; and until [`Engine::wait_for_claims`] has returned, the range is not unmapped
    /// or replaced.
    pub unsafe fn refuse(&self, range: AddressRange) -> Result<(), Error> {
        check_page_aligned(range, rustix::param::page_size() as u64)?;
        if self.claims.refuse(range) { Ok(()) } else { Err(Error::Forked) }
    }

    /// The second part of [`Engine::disown_in_place`]: wait for the pages of a refused range that a merge has in hand.
    /// Each time that this thread looks it has what `lock` gives, and not while it waits: a lock that is also held over
    /// fork(2), since a child that is forked while a thread looks cannot use the engine.
    pub fn wait_for_claims<L>(&self, range: AddressRange, lock: impl Fn() -> L) {
        self.claims.wait(range, lock);
    }

    /// Forsake memory and unmap it. Waits as [`Engine::disown_in_place`] does.
    ///
    /// # Safety
    /// Nobody needs what is there, and no borrow of it lives.
    ///
    /// # Errors
    /// [`Error::InvalidRange`], [`Error::Forked`], [`Error::OutOfMemory`].
    pub(crate) unsafe fn disown_and_unmap(&self, range: AddressRange) -> Result<(), Error> {
        // SAFETY: it is unmapped next, where it is.
        unsafe { self.disown_in_place(range) }?;
        // A thread that has the lock forgets the range before it gives that up, or the next one that takes it does.
        let state = match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut state) = state.filter(|state| state.owner_pid == std::process::id()) {
            self.remove_revoked_regions(&mut state);
        }
        // SAFETY: the caller lets the range go.
        unsafe { memory::unmap_range(range) }.map_err(|source| Error::OutOfMemory(range.bytes(), source))
    }

    /// Have no regions any more where memory was given up; whether that is known. Not during a merge, which may have found
    /// it before.
    pub(crate) fn remove_revoked_regions(&self, state: &mut EngineState) -> bool {
        let Some(given_up) = self.claims.take_revoked() else { return false };
        if !given_up.is_empty() {
            given_up.into_iter().for_each(|range| state.disown_range(range));
            state.publish_status(&self.options);
        }
        true
    }
}

impl AllocatedRegion<'_> {
    /// Where it is.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: it is mapped until drop; merging, whose caller promises that nobody writes meanwhile, does not change
        // what it reads as.
        unsafe { memory::range_bytes(self.range) }
    }

    /// Its bytes, to write. Not while [`Engine::merge`] runs, as its caller promises.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; `&mut self` makes it the only borrow.
        unsafe { memory::range_bytes_mut(self.range) }
    }
}

impl Drop for AllocatedRegion<'_> {
    fn drop(&mut self) {
        // A child that cannot use the engine keeps the memory until it ends.
        // SAFETY: the region is its own, and no borrow of it outlives it.
        let _ = unsafe { self.engine.disown_and_unmap(self.range) };
    }
}
