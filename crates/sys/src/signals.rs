//! Blocks signal handlers in a thread while it must not be interrupted.
//!
//! A blocked signal stays pending, or goes to another thread of the process that accepts it (signal(7)). The mask is
//! set with pthread_sigmask(3) of the C library. It leaves out the two real-time signals that the C library needs:
//! setuid(2) and similar functions signal every thread and wait for all of them.
//!
//! Limits: signals that an instruction of the thread raises (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP) are not blocked,
//! because the kernel ends a process that blocks one of them. Their handlers still run in the thread.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

/// Signals that instructions raise.
const SYNCHRONOUS_SIGNALS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// Blocks the signals of the calling thread until dropped, which restores the mask. A thread that it starts meanwhile
/// inherits the mask and keeps it.
#[derive(Debug)]
pub struct BlockedSignals {
    previous_mask: libc::sigset_t,
    /// The mask belongs to the thread, so the same thread must restore it.
    not_send: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Block all signals except those that instructions raise.
    ///
    /// # Errors
    /// Those of pthread_sigmask(3).
    pub fn new() -> io::Result<Self> {
        let mut blocked = MaybeUninit::uninit();
        // SAFETY: `blocked` is writable.
        unsafe { libc::sigfillset(blocked.as_mut_ptr()) };
        for signal in SYNCHRONOUS_SIGNALS {
            // SAFETY: `blocked` was filled.
            unsafe { libc::sigdelset(blocked.as_mut_ptr(), signal) };
        }
        let mut previous_mask = MaybeUninit::uninit();
        // SAFETY: `blocked` was filled; `previous_mask` is writable.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), previous_mask.as_mut_ptr()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: the call succeeded, so it was written.
        Ok(Self { previous_mask: unsafe { previous_mask.assume_init() }, not_send: PhantomData })
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the mask is a former mask of this thread; null means that the old mask is not requested.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous_mask, ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// The signals that the calling thread blocks, as a mask (`SigBlk`, proc_pid_status(5)).
    fn blocked_signal_mask() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:")).unwrap();
        u64::from_str_radix(mask.trim(), 16).unwrap()
    }

    fn signal_bit(signal: libc::c_int) -> u64 {
        1 << (signal - 1)
    }

    #[test]
    fn signals_are_blocked_until_drop() {
        let before = blocked_signal_mask();
        let guard = BlockedSignals::new().unwrap();
        let within = blocked_signal_mask();
        for signal in [libc::SIGPROF, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGTERM, libc::SIGRTMIN()] {
            assert_ne!(within & signal_bit(signal), 0, "signal {signal}");
        }
        assert!(SYNCHRONOUS_SIGNALS.iter().all(|&signal| within & signal_bit(signal) == 0));
        // Signals 32 and 33 belong to the C library. If they were blocked, setuid(2) would wait forever.
        assert_eq!(within >> 31 & 0b11, 0);
        drop(guard);
        assert_eq!(blocked_signal_mask(), before);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _guard = BlockedSignals::new().unwrap();
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(blocked_signal_mask(), before);
    }

    #[test]
    fn new_threads_inherit_blocked_signals() {
        let guard = BlockedSignals::new().unwrap();
        let thread = std::thread::spawn(blocked_signal_mask);
        drop(guard);
        assert_ne!(thread.join().unwrap() & signal_bit(libc::SIGPROF), 0);
    }
}
