//! What may not fit: files beyond the limit on their size, and memory or a file system that is full.
//!
//! A process that makes a file larger than RLIMIT_FSIZE allows, or writes behind that, gets SIGXFSZ, which ends it
//! (`inode_newsize_ok` in fs/attr.c and `generic_write_check_limits` in fs/read_write.c, 6.18). So the limit is asked
//! for first. It may be lowered at any time: each write asks.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Whether this process may have a file of so many bytes.
///
/// # Errors
/// `FileTooLarge`, with the limit.
pub fn check_file_size(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => {
            let why = format!(
                "the limit on file sizes is {limit} bytes, and the domain needs a file of {bytes}: raise it \
                 (ulimit -f, RLIMIT_FSIZE)"
            );
            Err(io::Error::new(io::ErrorKind::FileTooLarge, why))
        }
        _ => Ok(()),
    }
}

/// Whether something failed because there is no room for it: other parts of the same work may still be done.
pub fn is_out_of_space(error: &io::Error) -> bool {
    let full = [Errno::NOSPC, Errno::DQUOT, Errno::NOMEM, Errno::FBIG].map(Errno::raw_os_error);
    error.kind() == io::ErrorKind::FileTooLarge || error.raw_os_error().is_some_and(|number| full.contains(&number))
}
