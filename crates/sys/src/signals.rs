//! Keeps signal handlers away from a thread while it must not be interrupted by them.
//!
//! A signal that is blocked stays pending, or goes to another thread of the process that takes it (signal(7)). The
//! mask is set by pthread_sigmask(3) of the C library, which leaves out the two real-time signals that it needs itself:
//! setuid(2) and its like signal every thread, and wait for all of them.
//!
//! Limits: signals that an instruction of the thread raises (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP) are not blocked,
//! since the kernel ends a process that blocks one of them. Their handlers still run in the thread.

use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr;

/// Signals that instructions raise.
const SYNCHRONOUS_SIGNALS: [libc::c_int; 5] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP];

/// The calling thread takes no signals until this is dropped, which sets the mask back. A thread that it makes
/// meanwhile inherits the mask, and keeps it.
#[derive(Debug)]
pub struct BlockedSignals {
    previous_mask: libc::sigset_t,
    /// The mask is the thread's own: it has to be set back by the same thread.
    not_send: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Block all signals but those that instructions raise.
    ///
    /// # Errors
    /// Those of pthread_sigmask(3).
    pub fn new() -> io::Result<Self> {
        let mut all = MaybeUninit::uninit();
        // SAFETY: `all` is there to be written.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        for signal in SYNCHRONOUS_SIGNALS {
            // SAFETY: `all` was filled.
            unsafe { libc::sigdelset(all.as_mut_ptr(), signal) };
        }
        let mut former = MaybeUninit::uninit();
        // SAFETY: `all` was filled; `former` is there to be written.
        let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), former.as_mut_ptr()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: the call succeeded, so it was written.
        Ok(Self { previous_mask: unsafe { former.assume_init() }, not_send: PhantomData })
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the mask is one that the thread had; where the former one is to go is null, for nowhere.
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
        // Signals 32 and 33 are the C library's: blocked, they would make setuid(2) wait forever.
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
