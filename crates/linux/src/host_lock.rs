//! The locks that all Pagefold processes on a host share: write locks of the open file `/sys/kernel/mm/ksm/run`, of one
//! byte for each class of resources. The file is only the meeting point; the bytes have no other meaning.
//!
//! The lock belongs to the inode. Each instance of sysfs has its own inode, and each network namespace has its own
//! instance. So the file is opened through the root of PID 1, if that is permitted. A container that sees the host's
//! processes then locks the host's file, even if it has its own `/sys`. The lock needs a file that is open for writing,
//! so no unprivileged user can take it. Without KSM there is no such file and no such lock.
//!
//! Limits: the lock does not exclude a container that may write its own `/sys/kernel/mm/ksm`, but neither sees the
//! host's processes nor has the host's directory mounted.

use pagefold_host::resource::ResourceClass;
use pagefold_host::{HostLock, LockHolder};
use pagefold_sys::ofd_lock::{WriteLockAttempt, try_lock_byte_for_writing};
use std::fs::{self, File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const LOCK_FILE_PATHS: [&str; 2] = ["/proc/1/root/sys/kernel/mm/ksm/run", "/sys/kernel/mm/ksm/run"];

/// Take the lock of a class of resources.
pub fn acquire_host_lock(class: ResourceClass) -> Result<HostLock, LockHolder> {
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(rustix::fs::OFlags::CLOEXEC.bits().cast_signed());
    let Some(file) = LOCK_FILE_PATHS.iter().find_map(|path| options.open(path).ok()) else {
        return Ok(HostLock::Unavailable);
    };
    let byte = class as u64;
    match try_lock_byte_for_writing(&file, byte) {
        Ok(WriteLockAttempt::Acquired) => Ok(HostLock::Acquired(OwnedFd::from(file))),
        Ok(WriteLockAttempt::HeldForReading) => Ok(HostLock::Obstructed),
        Ok(WriteLockAttempt::HeldForWriting) => Err(find_lock_holder(&file, class)),
        Err(_) => Ok(HostLock::Unavailable),
    }
}

/// The Pagefold process that has the lock of a class, if visible, found by the locks of its open files
/// (`/proc/PID/fdinfo`).
fn find_lock_holder(file: &File, class: ResourceClass) -> LockHolder {
    let Ok(metadata) = file.metadata() else { return LockHolder::default() };
    let device = metadata.dev();
    let (major, minor, byte) = (rustix::fs::major(device), rustix::fs::minor(device), class as u64);
    // The file and the range, as in /proc/locks (fs/locks.c, `lock_get_status`).
    let key = format!("{major:02x}:{minor:02x}:{} {byte} {byte}", metadata.ino());
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.starts_with(b"pagefold")))
        .find_map(|pid| {
            let locks = locked_files(pid);
            let is_this_lock = |(_, lock): &&(PathBuf, String)| lock.contains("OFDLCK") && lock.ends_with(&key);
            locks.iter().find(is_this_lock)?;
            Some(LockHolder { pid: Some(pid), state_directory: state_directory(&locks, class) })
        })
        .unwrap_or_default()
}

/// The state directory of a session of a class, from its lock file there.
fn state_directory(locks: &[(PathBuf, String)], class: ResourceClass) -> Option<PathBuf> {
    let is_session = |path: &Path, lock: &str| {
        lock.contains("FLOCK") && path.file_name().is_some_and(|name| name == class.lock_file())
    };
    let (path, _) = locks.iter().find(|(path, lock)| is_session(path, lock))?;
    path.parent().map(Path::to_owned)
}

/// The locked open files of a process, with the lock lines of each.
fn locked_files(pid: u32) -> Vec<(PathBuf, String)> {
    let files = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten();
    files
        .filter_map(|entry| {
            let info = fs::read_to_string(entry.path()).ok()?;
            let lock = info.lines().find_map(|line| line.strip_prefix("lock:"))?.to_owned();
            let path = fs::read_link(format!("/proc/{pid}/fd/{}", entry.file_name().to_str()?)).ok()?;
            Some((path, lock))
        })
        .collect()
}
