//! The lock of a domain: one process at a time changes what all members share.
//!
//! It is a record lock of fcntl(2), because that ends with the process that has it, however that ends, and because a
//! forked child does not inherit it. Record locks do not tell threads apart, and closing any descriptor of the file
//! gives the lock up; so within a process a number says who has it. That number is the process's own, so that what a
//! child inherits of a parent that held the lock while it forked holds nobody up.

use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::getpid;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// The process in which a thread has any such lock, or 0.
static HOLDER: AtomicI32 = AtomicI32::new(0);

/// How long to sleep before looking again whether another thread of this process still has it.
const PAUSE: Duration = Duration::from_micros(50);

/// The lock, held. Given back when dropped.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Wait for the lock whose file has a path; the file is made if it is not there.
    ///
    /// # Errors
    /// Those of open(2) and fcntl(2); `Interrupted` if the file was removed meanwhile.
    pub fn wait(path: &Path) -> io::Result<Self> {
        let this = getpid().as_raw_pid();
        loop {
            let holder = HOLDER.load(Ordering::Relaxed);
            let free =
                holder != this && HOLDER.compare_exchange(holder, this, Ordering::Acquire, Ordering::Relaxed).is_ok();
            if free {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Self::of_process(path).inspect_err(|_| HOLDER.store(0, Ordering::Release))
    }

    fn of_process(path: &Path) -> io::Result<Self> {
        let file = crate::directory::open(path, true)?;
        loop {
            match fcntl_lock(&file, FlockOperation::LockExclusive) {
                // The last member may have removed it between, with all that it guards.
                Ok(()) if is_at(&file, path) => return Ok(Self { file }),
                Ok(()) => return Err(io::ErrorKind::Interrupted.into()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Whether a file is what a path leads to.
fn is_at(file: &File, path: &Path) -> bool {
    let found = path.metadata().and_then(|path| Ok((path, file.metadata()?)));
    found.is_ok_and(|(path, file)| (path.dev(), path.ino()) == (file.dev(), file.ino()))
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file gives it up, too. Nothing can be done about an error.
        let _ = fcntl_lock(&self.file, FlockOperation::Unlock);
        HOLDER.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::thread;

    #[test]
    fn one_thread_at_a_time_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        // Read, then written apart: only the lock keeps the threads from losing counts.
        struct Racy(Cell<u32>);
        // SAFETY: the lock under test keeps all but one thread away.
        unsafe impl Sync for Racy {}
        let count = Racy(Cell::new(0));
        let count = &count;
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = Lock::wait(&path).unwrap();
                        let before = count.0.get();
                        thread::yield_now();
                        count.0.set(before + 1);
                    }
                });
            }
        });
        assert_eq!(count.0.get(), 200);
    }
}
