//! A forked copy of this process that only keeps its memory. Both share their pages copy-on-write, like the processes
//! of a pre-forking server.
//!
//! Mirrors `fork(2)` and `PR_SET_PDEATHSIG` (`kernel/sys.c`, Linux 6.18). Limits: the copy has all memory that is not
//! excluded with [`crate::mapping::MadviseAdvice::DontFork`]. It ends with the thread that forked it.

use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

/// A sleeping child with a copy of this process's memory. Killed and reaped when dropped.
#[derive(Debug)]
pub struct ForkedCopy {
    child: Pid,
}

impl ForkedCopy {
    /// Fork. The kernel also kills the child when the calling thread ends for any reason.
    ///
    /// # Errors
    /// The error of `fork(2)`.
    pub fn new() -> io::Result<Self> {
        let parent = rustix::process::getpid();
        // SAFETY: the child only makes system calls (no allocation, no lock, no unwinding) and never returns from
        // `sleep_until_killed`. So the state of other threads does not matter.
        match unsafe { libc::fork() } {
            0 => sleep_until_killed(parent),
            -1 => Err(io::Error::last_os_error()),
            child => Ok(Self { child: Pid::from_raw(child).expect("fork returns the child's PID to the parent") }),
        }
    }

    /// The child's PID.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_raw_nonzero().get().unsigned_abs()
    }
}

fn sleep_until_killed(parent: Pid) -> ! {
    let request = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // If the parent ended before this request, the kernel sends no signal.
    if request.is_ok() && rustix::process::getppid() == Some(parent) {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
    // SAFETY: ends the child without the exit functions that the parent registered.
    unsafe { libc::_exit(1) }
}

impl Drop for ForkedCopy {
    fn drop(&mut self) {
        // The child is not reaped yet, so no other process can have its PID.
        let _ = rustix::process::kill_process(self.child, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.child), WaitOptions::empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forked_copy_holds_memory_until_dropped() {
        let copy = ForkedCopy::new().unwrap();
        let directory = format!("/proc/{}", copy.pid());
        let status = std::fs::read_to_string(format!("{directory}/status")).unwrap();
        assert!(status.contains(&format!("PPid:\t{}\n", std::process::id())), "{status}");
        assert!(!status.contains("VmRSS:\t       0 kB"), "{status}");
        drop(copy);
        assert!(!std::fs::exists(directory).unwrap());
    }
}
