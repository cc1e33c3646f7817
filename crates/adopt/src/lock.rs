//! A lock that detects if its own thread already holds it, and that is free in both processes after a fork.

use crate::next::this_thread;
use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A value for one thread at a time.
pub struct ForkSafeLock<T> {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    /// The thread that holds the lock, or 0.
    owner_thread: AtomicUsize,
    value: UnsafeCell<T>,
}

// SAFETY: the value is accessed only with the mutex locked.
unsafe impl<T: Send> Sync for ForkSafeLock<T> {}

/// Access to the value, until it is dropped.
pub struct ForkSafeGuard<'l, T>(&'l ForkSafeLock<T>);

impl<T> ForkSafeLock<T> {
    /// An unlocked value.
    pub const fn new(value: T) -> Self {
        let mutex = UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER);
        Self { mutex, owner_thread: AtomicUsize::new(0), value: UnsafeCell::new(value) }
    }

    /// Wait for the lock. `None` if this thread holds it already: then a function that uses the value has called this
    /// one.
    pub fn lock(&self) -> Option<ForkSafeGuard<'_, T>> {
        if self.is_held_by_this_thread() {
            return None;
        }
        self.hold_until_release();
        Some(ForkSafeGuard(self))
    }

    /// Whether this thread holds the lock.
    pub fn is_held_by_this_thread(&self) -> bool {
        self.owner_thread.load(Ordering::Relaxed) == this_thread()
    }

    /// Lock until [`ForkSafeLock::release`], as during a fork.
    pub fn hold_until_release(&self) {
        // SAFETY: the mutex has a static initializer, and never moves.
        unsafe { libc::pthread_mutex_lock(self.mutex.get()) };
        self.owner_thread.store(this_thread(), Ordering::Relaxed);
    }

    /// Unlock, if this thread holds the lock.
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
        // SAFETY: this thread holds the lock, and has this guard only.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for ForkSafeGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread holds the lock, and has this guard only.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for ForkSafeGuard<'_, T> {
    fn drop(&mut self) {
        self.0.release();
    }
}
