//! The lock that all Pagefolds on a host share: a write lock of the open file `/sys/kernel/mm/ksm/run`.
//!
//! The lock belongs to the inode, which is one for each instance of sysfs; and there is an instance for each network
//! namespace. So the file is opened as process 1 has it, where that is permitted: a container that sees the host's
//! processes then locks the host's file, though a `/sys` of its own may be mounted there. It takes a file that is open
//! for writing, so that no unprivileged user can hold it.
//!
//! Limits: a container that neither sees the host's processes nor has the host's `/sys/kernel/mm/ksm` mounted, and may
//! write its own, is not kept out.

use pagefold_host::{HostLock, LockHolder};
use pagefold_sys::ofd_lock::{WriteLockAttempt, try_lock_for_writing};
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const LOCK_FILE_PATHS: [&str; 2] = ["/proc/1/root/sys/kernel/mm/ksm/run", "/sys/kernel/mm/ksm/run"];

/// Take the lock.
pub fn acquire_host_lock() -> Result<HostLock, LockHolder> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(rustix::fs::OFlags::CLOEXEC.bits().cast_signed());
    let Some(file) = LOCK_FILE_PATHS.iter().find_map(|path| options.open(path).ok()) else {
        return Ok(HostLock::Unavailable);
    };
    match try_lock_for_writing(&file) {
        Ok(WriteLockAttempt::Acquired) => Ok(HostLock::Acquired(OwnedFd::from(file))),
        Ok(WriteLockAttempt::HeldForReading) => Ok(HostLock::Obstructed),
        Ok(WriteLockAttempt::HeldForWriting) => Err(find_lock_holder(&file)),
        Err(_) => Ok(HostLock::Unavailable),
    }
}

/// The Pagefold that has the lock, if it can be seen: by the locks of its open files (`/proc/PID/fdinfo`).
fn find_lock_holder(file: &File) -> LockHolder {
    let Ok(about) = file.metadata() else { return LockHolder::default() };
    let device = about.dev();
    let key = format!("{:02x}:{:02x}:{} ", rustix::fs::major(device), rustix::fs::minor(device), about.ino());
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(b"pagefold")))
        .find_map(|pid| {
            let locks = locked_files(pid);
            let ours = |(_, lock): &&(PathBuf, String)| lock.contains("OFDLCK") && lock.contains(&key);
            locks.iter().find(ours)?;
            Some(LockHolder { pid: Some(pid), state_directory: state_directory(&locks) })
        })
        .unwrap_or_default()
}

/// The directory of the lock that a session has in its state directory.
fn state_directory(locks: &[(PathBuf, String)]) -> Option<PathBuf> {
    let is_session = |path: &Path, lock: &str| lock.contains("FLOCK") && path.file_name().is_some_and(|n| n == "lock");
    let (path, _) = locks.iter().find(|(path, lock)| is_session(path, lock))?;
    path.parent().map(Path::to_owned)
}

/// The open files of a process that are locked, with what is told of their locks.
fn locked_files(pid: u32) -> Vec<(PathBuf, String)> {
    let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    files
        .filter_map(|entry| {
            let told = fs::read_to_string(entry.path()).ok()?;
            let lock = told.lines().find_map(|line| line.strip_prefix("lock:"))?.to_owned();
            let path = fs::read_link(format!("/proc/{pid}/fd/{}", entry.file_name().to_str()?)).ok()?;
            Some((path, lock))
        })
        .collect()
}
