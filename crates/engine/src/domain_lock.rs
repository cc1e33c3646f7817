//! The lock of a domain: one process at a time changes the shared state.
//!
//! It is a record lock of fcntl(2), because that ends with its process in all cases, and because a forked child does
//! not inherit it. Record locks do not distinguish threads, and closing any descriptor of the file releases the lock.
//! So `HOLDER_PID` shows whether a thread of this process holds the lock. In a child of a process that held the lock
//! at the fork, it is the parent's PID and blocks no thread.
//!
//! A stopped process keeps its lock while it is stopped. So each caller waits only until its deadline. Callers poll,
//! because fcntl(2) has no timeout.

use crate::incarnation::absent_to_files_removed;
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::getpid;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// The process in which a thread holds any such lock, or 0.
static HOLDER_PID: AtomicI32 = AtomicI32::new(0);

/// First and maximum interval between attempts.
const FIRST_POLL_INTERVAL: Duration = Duration::from_micros(50);
const MAX_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The held lock. Released when dropped.
#[derive(Debug)]
pub struct DomainLock {
    file: File,
}

impl DomainLock {
    /// Acquire the lock file at a path, waiting until the deadline. Creates the file if it does not exist.
    ///
    /// # Errors
    /// `TimedOut` if another process or thread held it all the time; those of open(2) and fcntl(2); `Interrupted` if
    /// the file was removed meanwhile.
    pub fn acquire(path: &Path, deadline: Instant) -> io::Result<Self> {
        let this_pid = getpid().as_raw_pid();
        let claim_for_thread = || {
            let holder = HOLDER_PID.load(Ordering::Relaxed);
            let is_taken = holder == this_pid
                || HOLDER_PID.compare_exchange(holder, this_pid, Ordering::Acquire, Ordering::Relaxed).is_err();
            (!is_taken).then_some(())
        };
        poll_until(deadline, || Ok(claim_for_thread()))?;
        Self::acquire_for_process(path, deadline).inspect_err(|_| HOLDER_PID.store(0, Ordering::Release))
    }

    fn acquire_for_process(path: &Path, deadline: Instant) -> io::Result<Self> {
        let file = crate::domain_directory::open_file(path, true).map_err(absent_to_files_removed)?;
        poll_until(deadline, || match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(())),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::ACCESS | rustix::io::Errno::INTR) => Ok(None),
            Err(error) => Err(error.into()),
        })?;
        // The last member may have removed it meanwhile, with all files that it guards.
        if is_file_at(&file, path) { Ok(Self { file }) } else { Err(io::ErrorKind::Interrupted.into()) }
    }
}

impl DomainLock {
    /// Inode of the locked file, which identifies it if another file has taken its name.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn inode(&self) -> io::Result<u64> {
        self.file.metadata().map(|file| file.ino())
    }
}

/// Call `attempt` at least once, and again until it succeeds or the deadline passes.
fn poll_until(deadline: Instant, mut attempt: impl FnMut() -> io::Result<Option<()>>) -> io::Result<()> {
    let mut pause = FIRST_POLL_INTERVAL;
    while attempt()?.is_none() {
        if Instant::now() >= deadline {
            let message = "another member has held the domain's lock for too long: is one stopped?";
            return Err(io::Error::new(io::ErrorKind::TimedOut, message));
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(MAX_POLL_INTERVAL);
    }
    Ok(())
}

/// Whether a path leads to this open file.
fn is_file_at(file: &File, path: &Path) -> bool {
    let metadata = path.metadata().and_then(|path| Ok((path, file.metadata()?)));
    metadata.is_ok_and(|(path, file)| (path.dev(), path.ino()) == (file.dev(), file.ino()))
}

impl Drop for DomainLock {
    fn drop(&mut self) {
        // Closing the file releases the lock, too. Errors are ignored: nothing can be done about them.
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
        // A separate read and write: only the lock keeps the threads from losing counts.
        struct UnsynchronizedCounter(Cell<u32>);
        // SAFETY: the lock under test allows one thread at a time.
        unsafe impl Sync for UnsynchronizedCounter {}
        let count = UnsynchronizedCounter(Cell::new(0));
        let count = &count;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = DomainLock::acquire(&path, Instant::now() + Duration::from_secs(300)).unwrap();
                        let value = count.0.get();
                        thread::yield_now();
                        count.0.set(value + 1);
                    }
                });
            }
        });
        assert_eq!(count.0.get(), 200);
        let _lock = DomainLock::acquire(&path, Instant::now() + Duration::from_secs(300)).unwrap();
        let refused = thread::scope(|scope| scope.spawn(|| DomainLock::acquire(&path, Instant::now())).join().unwrap());
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }
}
