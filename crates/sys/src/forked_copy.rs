//! A forked copy of this process that does nothing but hold its memory: the pages of both are shared copy-on-write, as
//! those of a pre-forking server are.
//!
//! Mirrors `fork(2)` and `PR_SET_PDEATHSIG` (`kernel/sys.c`, Linux 6.18). Limits: the copy holds the memory that was
//! not excluded with [`crate::mapping::MadviseAdvice::DontFork`]; it ends with the thread that made it.

use std::io;
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitOptions};

/// A sleeping child that holds a copy of this process's memory. Killed and reaped when dropped.
#[derive(Debug)]
pub struct ForkedCopy {
    child: Pid,
}

impl ForkedCopy {
    /// Fork. The child is killed also when the calling thread ends, however it ends.
    ///
    /// # Errors
    /// That of `fork(2)`.
    pub fn new() -> io::Result<Self> {
        let parent = rustix::process::getpid();
        // SAFETY: the child makes system calls only (no allocation, no lock, no unwinding) and never returns from
        // `hold`, so it does not matter what other threads were doing.
        match unsafe { libc::fork() } {
            0 => sleep_until_killed(parent),
            -1 => Err(io::Error::last_os_error()),
            child => Ok(Self { child: Pid::from_raw(child).expect("a parent is told its child's number") }),
        }
    }

    /// The child's process number.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_raw_nonzero().get().unsigned_abs()
    }
}

fn sleep_until_killed(parent: Pid) -> ! {
    let bound = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    // A parent that ended before the signal was asked for sends none.
    if bound.is_ok() && rustix::process::getppid() == Some(parent) {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
    // SAFETY: ends the child without running what the parent registered for its own exit.
    unsafe { libc::_exit(1) }
}

impl Drop for ForkedCopy {
    fn drop(&mut self) {
        // The child is ours until it is waited for, so the number cannot have gone to another process.
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
