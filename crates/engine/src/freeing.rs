//! Allocated memory, and freeing of adopted memory. Freeing waits only for the pages that a merge is working on, and
//! not for the whole merge.

use crate::{AllocatedRegion, Engine, EngineState, Error, check_page_aligned, memory};
use pagefold_base::AddressRange;
use std::sync::{PoisonError, TryLockError};

impl Engine {
    /// Like [`Engine::disown`], for memory that stays at its address until it is unmapped or replaced. Its contents
    /// leave the store once they are no longer mapped, by either way of merging. While a merge runs in another thread
    /// this waits for the pages that the merge is working on, at most 4 MiB, and not for its end. The regions and
    /// counters of this member include the memory until the next call of the engine.
    ///
    /// # Errors
    /// [`Error::InvalidRange`] if the range is not page-aligned; [`Error::Forked`], also in a signal handler that has
    /// interrupted another call in this thread. After an error nothing has changed.
    ///
    /// # Safety
    /// Until it is unmapped or replaced, it is not moved while [`Engine::merge_while_running`] runs.
    pub unsafe fn disown_in_place(&self, range: AddressRange) -> Result<(), Error> {
        // SAFETY: the caller's promise; the wait follows.
        unsafe { self.refuse(range) }?;
        self.wait_for_claims(range, || ());
        Ok(())
    }

    /// The first half of [`Engine::disown_in_place`], without the wait: a merge starts no more work on pages of the
    /// range. For a program that forks beside other threads: if it calls this under a lock that it also holds over
    /// fork(2), the child knows which ranges were refused.
    ///
    /// # Errors
    /// As for [`Engine::disown_in_place`].
    ///
    /// # Safety
    /// As for [`Engine::disown_in_place`]; and until [`Engine::wait_for_claims`] has returned, the range is not
    /// unmapped or replaced.
    pub unsafe fn refuse(&self, range: AddressRange) -> Result<(), Error> {
        check_page_aligned(range, rustix::param::page_size() as u64)?;
        if self.claims.refuse(range) { Ok(()) } else { Err(Error::Forked) }
    }

    /// The second half of [`Engine::disown_in_place`]: wait for the pages of a refused range that a merge is working
    /// on. This thread holds the guard from `lock` during each check, and not between checks. Use a lock that is also
    /// held over fork(2), since a child that is forked during a check cannot use the engine.
    pub fn wait_for_claims<L>(&self, range: AddressRange, lock: impl Fn() -> L) {
        self.claims.wait(range, lock);
    }

    /// Disown memory and unmap it. Waits as [`Engine::disown_in_place`] does.
    ///
    /// # Safety
    /// Its content is no longer needed, and no borrow of it lives.
    ///
    /// # Errors
    /// [`Error::InvalidRange`], [`Error::Forked`], [`Error::OutOfMemory`].
    pub(crate) unsafe fn disown_and_unmap(&self, range: AddressRange) -> Result<(), Error> {
        // SAFETY: it is unmapped next, at the same address.
        unsafe { self.disown_in_place(range) }?;
        // A thread that holds the lock removes the range before it unlocks, or else the next holder does.
        let state = match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) => None,
        };
        if let Some(mut state) = state.filter(|state| state.owner_pid == std::process::id()) {
            self.remove_revoked_regions(&mut state);
        }
        // SAFETY: the caller permits unmapping the range.
        unsafe { memory::unmap_range(range) }.map_err(|source| Error::OutOfMemory(range.bytes(), source))
    }

    /// Remove the regions of memory that was given up. Returns whether those ranges are known. Do not call this during
    /// a merge, which may already have found the memory.
    pub(crate) fn remove_revoked_regions(&self, state: &mut EngineState) -> bool {
        let Some(revoked) = self.claims.take_revoked() else { return false };
        if !revoked.is_empty() {
            revoked.into_iter().for_each(|range| state.disown_range(range));
            state.publish_status(&self.options);
        }
        true
    }
}

impl AllocatedRegion<'_> {
    /// Its address range.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// Its bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: it is mapped until drop. A merge, whose caller promises that no thread writes meanwhile, does not
        // change what it reads as.
        unsafe { memory::range_bytes(self.range) }
    }

    /// Its bytes, to write. Not while [`Engine::merge`] runs, as the caller of that promises.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as for `as_slice`; `&mut self` makes it the only borrow.
        unsafe { memory::range_bytes_mut(self.range) }
    }
}

impl Drop for AllocatedRegion<'_> {
    fn drop(&mut self) {
        // A child that cannot use the engine keeps the memory until it ends.
        // SAFETY: the region owns the memory, and no borrow of it outlives the region.
        let _ = unsafe { self.engine.disown_and_unmap(self.range) };
    }
}
