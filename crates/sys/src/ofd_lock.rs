//! Locks of open file descriptions (fcntl(2), `F_OFD_SETLK`; fs/locks.c, `fcntl_setlk`, 6.18).
//!
//! They belong to the inode, so that all paths and mounts of one file system instance share them, sysfs included. A
//! write lock takes a file that is open for writing: whoever may only read the file can put a read lock in its way, and
//! can never be mistaken for a holder. They end with the last descriptor of the open file, also after `kill -9`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What came of asking for a write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteLockAttempt {
    /// It is held until the file is closed.
    Acquired,
    /// Another open file holds it for writing.
    HeldForWriting,
    /// Read locks of other open files are in its way.
    HeldForReading,
}

/// Ask for the write lock of all of a file that is open for writing, without waiting.
///
/// # Errors
/// Those of fcntl(2) but for `EAGAIN` and `EACCES`.
pub fn try_lock_for_writing(file: &File) -> io::Result<WriteLockAttempt> {
    if set(file, libc::F_WRLCK)? {
        return Ok(WriteLockAttempt::Acquired);
    }
    // `F_UNLCK`: it was let go meanwhile. To say that it is held is true of the moment before.
    let reading = in_the_way(file)? == libc::F_RDLCK;
    Ok(if reading { WriteLockAttempt::HeldForReading } else { WriteLockAttempt::HeldForWriting })
}

/// Ask for a read lock of all of a file that is open for reading, without waiting: false where another open file holds
/// the write lock.
///
/// # Errors
/// As those of [`try_lock_for_writing`].
pub fn lock_for_reading(file: &File) -> io::Result<bool> {
    set(file, libc::F_RDLCK)
}

/// Whether another open file holds a lock of this file, for reading or for writing.
///
/// # Errors
/// Those of fcntl(2).
pub fn is_locked_beside(file: &File) -> io::Result<bool> {
    Ok(in_the_way(file)? != libc::F_UNLCK)
}

/// Set a lock, unless another one is in its way.
fn set(file: &File, kind: libc::c_int) -> io::Result<bool> {
    let mut lock = whole_file(kind);
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `lock` is a valid `flock`.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw mut lock) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        error => Err(error),
    }
}

/// The kind of a lock of another open file that a write lock would meet; `F_UNLCK` for none. It takes no right to write.
fn in_the_way(file: &File) -> io::Result<libc::c_int> {
    let mut holder = whole_file(libc::F_WRLCK);
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `holder` is a valid `flock`.
    let told = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut holder) };
    if told == 0 { Ok(holder.l_type.into()) } else { Err(io::Error::last_os_error()) }
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
}
