//! Write locks of open file descriptions (fcntl(2), `F_OFD_SETLK`; fs/locks.c, `fcntl_setlk`, 6.18).
//!
//! They belong to the inode, so that all paths and mounts of one file system instance share them, sysfs included. A
//! write lock takes a file that is open for writing: whoever may only read the file can put a read lock in its way, and
//! can never be mistaken for a holder. They end with the last descriptor of the open file, also after `kill -9`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// What came of asking for a write lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// It is held until the file is closed.
    Taken,
    /// Another open file holds it for writing.
    HeldForWriting,
    /// Read locks of other open files are in its way.
    HeldForReading,
}

/// Ask for the write lock of all of a file that is open for writing, without waiting.
///
/// # Errors
/// Those of fcntl(2) but for `EAGAIN` and `EACCES`.
pub fn lock_for_writing(file: &File) -> io::Result<Lock> {
    let fd = file.as_raw_fd();
    let mut lock = whole_file();
    // SAFETY: the descriptor is open as long as `file` is borrowed, and `lock` is a valid `flock`.
    let taken = unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw mut lock) };
    if taken == 0 {
        return Ok(Lock::Taken);
    }
    let error = io::Error::last_os_error();
    if !matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) {
        return Err(error);
    }
    let mut holder = whole_file();
    // SAFETY: as above.
    let told = unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut holder) };
    if told != 0 {
        return Err(io::Error::last_os_error());
    }
    // `F_UNLCK`: it was let go meanwhile. To say that it is held is true of the moment before.
    let reading = i32::from(holder.l_type) == libc::F_RDLCK;
    Ok(if reading { Lock::HeldForReading } else { Lock::HeldForWriting })
}

fn whole_file() -> libc::flock {
    let (kind, from_start) = (libc::F_WRLCK as libc::c_short, libc::SEEK_SET as libc::c_short);
    libc::flock { l_type: kind, l_whence: from_start, l_start: 0, l_len: 0, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_open_file_at_a_time_has_the_lock() {
        let path = std::env::temp_dir().join(format!("pagefold-lock-{}", std::process::id()));
        let open = || File::options().create(true).truncate(false).write(true).open(&path).unwrap();
        let (first, second) = (open(), open());
        assert_eq!(lock_for_writing(&first).unwrap(), Lock::Taken);
        assert_eq!(lock_for_writing(&first).unwrap(), Lock::Taken, "it has it already");
        assert_eq!(lock_for_writing(&second).unwrap(), Lock::HeldForWriting);
        drop(first);
        assert_eq!(lock_for_writing(&second).unwrap(), Lock::Taken);
        assert!(lock_for_writing(&File::open(&path).unwrap()).is_err(), "a reader cannot have it");
        drop(second);
        let reader = File::open(&path).unwrap();
        let mut read = libc::flock { l_type: libc::F_RDLCK as libc::c_short, ..whole_file() };
        // SAFETY: the descriptor is open, and `read` is a valid `flock`.
        let taken = unsafe { libc::fcntl(reader.as_raw_fd(), libc::F_OFD_SETLK, &raw mut read) };
        assert_eq!(taken, 0);
        assert_eq!(lock_for_writing(&open()).unwrap(), Lock::HeldForReading);
        std::fs::remove_file(&path).unwrap();
    }
}
