//! Limits that an operation may hit: the file size limit, and full memory or file systems.
//!
//! A process that makes a file larger than RLIMIT_FSIZE allows, or writes beyond that limit, gets SIGXFSZ, which kills
//! it (`inode_newsize_ok` in fs/attr.c and `generic_write_check_limits` in fs/read_write.c, 6.18). So the engine checks
//! the limit first. The limit may be lowered at any time, so each write checks it.

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use std::io;

/// Check that this process may have a file of this size.
///
/// # Errors
/// `FileTooLarge`, with the limit.
pub fn check_file_size(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => {
            let message = format!(
                "the limit on file sizes is {limit} bytes, and the domain needs a file of {bytes}: raise it \
                 (ulimit -f, RLIMIT_FSIZE)"
            );
            Err(io::Error::new(io::ErrorKind::FileTooLarge, message))
        }
        _ => Ok(()),
    }
}

/// Whether an operation failed for lack of space: other parts of the same work may still succeed.
pub fn is_out_of_space(error: &io::Error) -> bool {
    let full_errors = [Errno::NOSPC, Errno::DQUOT, Errno::NOMEM, Errno::FBIG].map(Errno::raw_os_error);
    error.kind() == io::ErrorKind::FileTooLarge
        || error.raw_os_error().is_some_and(|errno| full_errors.contains(&errno))
}
