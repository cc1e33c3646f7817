//! The lock of a domain: one process at a time changes what all members share.
//!
//! It is a record lock of fcntl(2), because that ends with the process that has it, however that ends, and because a
//! forked child does not inherit it. Record locks do not tell threads apart, and closing any descriptor of the file
//! gives the lock up; so within a process a number says who has it. That number is the process's own, so that what a
//! child inherits of a parent that held the lock while it forked holds nobody up.
//!
//! A process that is stopped keeps what it has, for as long as it is stopped. So nobody waits longer than it says, and
//! the lock is asked for again and again, because fcntl(2) knows no time to wait at most.

use crate::incarnation::absent_to_files_removed;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::getpid;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// The process in which a thread has any such lock, or 0.
static HOLDER_PID: AtomicI32 = AtomicI32::new(0);

/// How long to sleep before asking again: the first time, and at most.
const FIRST_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The lock, held. Given back when dropped.
#[derive(Debug)]
pub struct DomainLock {
    file: File,
}

impl DomainLock {
    /// Wait for the lock whose file has a path, until some time; the file is made if it is not there.
    ///
    /// # Errors
    /// `TimedOut` if somebody else had it all the time; those of open(2) and fcntl(2); `Interrupted` if the file was
    /// removed meanwhile.
    pub fn acquire(path: &Path, deadline: Instant) -> io::Result<Self> {
        let this = getpid().as_raw_pid();
        let of_this_process = || {
            let holder = HOLDER_PID.load(Ordering::Relaxed);
            let taken = holder == this
                || HOLDER_PID.compare_exchange(holder, this, Ordering::Acquire, Ordering::Relaxed).is_err();
            (!taken).then_some(())
        };
        poll_until(deadline, || Ok(of_this_process()))?;
        Self::acquire_for_process(path, deadline).inspect_err(|_| HOLDER_PID.store(0, Ordering::Release))
    }

    fn acquire_for_process(path: &Path, deadline: Instant) -> io::Result<Self> {
        let file = crate::domain_directory::open_file(path, true).map_err(absent_to_files_removed)?;
        poll_until(deadline, || match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(())),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        })?;
        // The last member may have removed it between, with all that it guards.
        if is_file_at(&file, path) { Ok(Self { file }) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

impl DomainLock {
    /// What tells the file that is locked apart from one that has taken its name.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn inode(&self) -> io::Result<u64> {
        self.file.metadata().map(|file| file.ino())
    }
}

/// Ask once at least, and again until there is an answer or the time is over.
fn poll_until(deadline: Instant, mut ask: impl FnMut() -> io::Result<Option<()>>) -> io::Result<()> {
    let mut pause = FIRST_POLL_INTERVAL;
    while ask()?.is_none() {
        if Instant::now() >= deadline {
            let why = "another member has had the domain's lock for too long: is one stopped?";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(MAX_POLL_INTERVAL);
    }
    Ok(())
}

/// Whether a file is what a path leads to.
fn is_file_at(file: &File, path: &Path) -> bool {
    let found = path.metadata().and_then(|path| Ok((path, file.metadata()?)));
    found.is_ok_and(|(path, file)| (path.dev(), path.ino()) == (file.dev(), file.ino()))
}

impl Drop for DomainLock {
    fn drop(&mut self) {
        // Closing the file gives it up, too. Nothing can be done about an error.
        let _ = fcntl_lock(&self.file, FlockOperation::Unlock);
        HOLDER_PID.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::thread;

    #[test]
    fn one_thread_at_a_time_holds_the_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        // Read, then written apart: only the lock keeps the threads from losing counts.
        struct UnsynchronizedCounter(Cell<u32>);
        // SAFETY: the lock under test keeps all but one thread away.
        unsafe impl Sync for UnsynchronizedCounter {}
        let count = UnsynchronizedCounter(Cell::new(0));
        let count = &count;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = DomainLock::acquire(&path, Instant::now() + Duration::from_secs(300)).unwrap();
                        let before = count.0.get();
                        thread::yield_now();
                        count.0.set(before + 1);
                    }
                });
            }
        });
        assert_eq!(count.0.get(), 200);
        let _held = DomainLock::acquire(&path, Instant::now() + Duration::from_secs(300)).unwrap();
        let refused = thread::scope(|scope| scope.spawn(|| DomainLock::acquire(&path, Instant::now())).join().unwrap());
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
