//! A lock that a thread may find it has already, and that is free in both processes after a fork.

use crate::next::this_thread;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value for one thread at a time.
pub struct ForkSafeLock<T> {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    /// The thread that has it, or 0.
    owner_thread: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached with the mutex locked only.
unsafe impl<T: Send> Sync for ForkSafeLock<T> {}

/// The value, until it is dropped.
pub struct ForkSafeGuard<'l, T>(&'l ForkSafeLock<T>);

impl<T> ForkSafeLock<T> {
    /// Nobody has it.
    pub const fn new(value: T) -> Self {
        let mutex = UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER);
        Self { mutex, owner_thread: AtomicUsize::new(0), value: UnsafeCell::new(value) }
    }

    /// Wait for it. `None` if this thread has it: it was called by what it does with the value.
    pub fn lock(&self) -> Option<ForkSafeGuard<'_, T>> {
        if self.is_held_by_this_thread() {
            return None;
        }
        self.hold_until_release();
        Some(ForkSafeGuard(self))
    }

    /// Whether this thread has it.
    pub fn is_held_by_this_thread(&self) -> bool {
        self.owner_thread.load(Ordering::Relaxed) == this_thread()
    }

    /// Have it until [`ForkSafeLock::release_fork_locks`], as over a fork.
    pub fn hold_until_release(&self) {
        // SAFETY: it was initialized as static ones are, and never moves.
        unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
        self.owner_thread.store(this_thread(), Ordering::Relaxed);
    }

    /// Give it up, if this thread has it.
    pub fn release(&self) {
        if self.is_held_by_this_thread() {
            self.owner_thread.store(0, Ordering::Relaxed);
            // SAFETY: this thread has locked it.
            unsafe { libc::pthread_mutex_unlock(self.mutex.get()) };
        }
    }
}

impl<T> Deref for ForkSafeGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread has the lock, and gave it out once.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for ForkSafeGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has the lock, and gave it out once.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for ForkSafeGuard<'_, T> {
    fn drop(&mut self) {
        self.0.release();
    }
}
