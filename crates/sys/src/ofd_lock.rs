//! Locks of open file descriptions (fcntl(2), `F_OFD_SETLK`; fs/locks.c, `fcntl_setlk`, 6.18).
//!
//! They belong to the inode, so all paths and mounts of one file system instance share them, including sysfs. A write
//! lock needs a file that is open for writing. A process that may only read the file can block the write lock with a
//! read lock, but can never appear to be its holder. A lock ends with the last descriptor of the open file, also after
//! `kill -9`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The result of a request for a write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteLockAttempt {
    /// The lock is acquired until the file is closed.
    Acquired,
    /// Another open file has a write lock.
    HeldForWriting,
    /// Other open files have read locks.
    HeldForReading,
}

/// Request the write lock of a whole file that is open for writing, without waiting.
///
/// # Errors
/// Those of fcntl(2) except `EAGAIN` and `EACCES`.
pub fn try_lock_for_writing(file: &File) -> io::Result<WriteLockAttempt> {
    try_lock(file, whole_file(libc::F_WRLCK))
}

/// Request the write lock of one byte, which need not exist, of a file that is open for writing, without waiting. It
/// conflicts with locks of this byte and of the whole file.
///
/// # Errors
/// As those of [`try_lock_for_writing`].
pub fn try_lock_byte_for_writing(file: &File, byte: u64) -> io::Result<WriteLockAttempt> {
    let l_start = byte.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
    try_lock(file, libc::flock { l_start, l_len: 1, ..whole_file(libc::F_WRLCK) })
}

fn try_lock(file: &File, range: libc::flock) -> io::Result<WriteLockAttempt> {
    if try_set_lock(file, range)? {
        return Ok(WriteLockAttempt::Acquired);
    }
    // `F_UNLCK`: the lock was released meanwhile. The lock existed a moment before, so that result is reported.
    let is_read_lock = conflicting_lock_kind(file, range)? == libc::F_RDLCK;
    Ok(if is_read_lock { WriteLockAttempt::HeldForReading } else { WriteLockAttempt::HeldForWriting })
}

/// Request a read lock of a whole file that is open for reading, without waiting. False if another open file has the
/// write lock.
///
/// # Errors
/// As those of [`try_lock_for_writing`].
pub fn lock_for_reading(file: &File) -> io::Result<bool> {
    try_set_lock(file, whole_file(libc::F_RDLCK))
}

/// Whether another open file has a read or write lock of this file.
///
/// # Errors
/// Those of fcntl(2).
pub fn is_locked_beside(file: &File) -> io::Result<bool> {
    Ok(conflicting_lock_kind(file, whole_file(libc::F_WRLCK))? != libc::F_UNLCK)
}

/// Set a lock, unless another lock conflicts.
fn try_set_lock(file: &File, mut lock: libc::flock) -> io::Result<bool> {
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `lock` is a valid `flock`.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        error => Err(error),
    }
}

/// The kind of another open file's lock that conflicts with a lock; `F_UNLCK` for none. It needs no write permission.
fn conflicting_lock_kind(file: &File, mut holder: libc::flock) -> io::Result<libc::c_int> {
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `holder` is a valid `flock`.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut holder) };
    if result == 0 { Ok(holder.l_type.into()) } else { Err(io::Error::last_os_error()) }
}

fn whole_file(kind: libc::c_int) -> libc::flock {
    let (kind, from_start) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock { l_type: kind, l_whence: from_start, l_start: 0, l_len: 0, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_lock_has_one_holder_at_a_time() {
        let path = std::env::temp_dir().join(format!("pagefold-lock-{}", std::process::id()));
        let open = || File::options().create(true).truncate(false).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        assert_eq!(try_lock_for_writing(&first).unwrap(), WriteLockAttempt::Acquired);
        assert_eq!(try_lock_for_writing(&first).unwrap(), WriteLockAttempt::Acquired, "it has it already");
        assert_eq!(try_lock_for_writing(&second).unwrap(), WriteLockAttempt::HeldForWriting);
        drop(first);
        assert_eq!(try_lock_for_writing(&second).unwrap(), WriteLockAttempt::Acquired);
        assert!(try_lock_for_writing(&File::open(&path).unwrap()).is_err(), "a reader cannot have it");
        drop(second);
        let (reader, another) = (File::open(&path).unwrap(), File::open(&path).unwrap());
        assert!(!is_locked_beside(&another).unwrap());
        assert!(lock_for_reading(&reader).unwrap());
        assert_eq!(try_lock_for_writing(&open()).unwrap(), WriteLockAttempt::HeldForReading);
        assert!(is_locked_beside(&another).unwrap() && !is_locked_beside(&reader).unwrap(), "its own is none");
        assert!(lock_for_reading(&another).unwrap(), "readers share it");
        drop((reader, another));
        let writer = open();
        assert_eq!(try_lock_for_writing(&writer).unwrap(), WriteLockAttempt::Acquired);
        let reader = File::open(&path).unwrap();
        assert!(!lock_for_reading(&reader).unwrap() && is_locked_beside(&reader).unwrap());
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn bytes_are_locked_independently() {
        let path = std::env::temp_dir().join(format!("pagefold-lock-bytes-{}", std::process::id()));
        let open = || File::options().create(true).truncate(false).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        assert_eq!(try_lock_byte_for_writing(&first, 0).unwrap(), WriteLockAttempt::Acquired);
        assert_eq!(try_lock_byte_for_writing(&second, 1).unwrap(), WriteLockAttempt::Acquired);
        assert_eq!(try_lock_byte_for_writing(&second, 0).unwrap(), WriteLockAttempt::HeldForWriting);
        assert_eq!(try_lock_for_writing(&open()).unwrap(), WriteLockAttempt::HeldForWriting);
        drop(first);
        assert_eq!(try_lock_byte_for_writing(&second, 0).unwrap(), WriteLockAttempt::Acquired);
        std::fs::remove_file(&path).unwrap();
    }
}
