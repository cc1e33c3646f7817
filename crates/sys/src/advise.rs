//! Advice that the kernel takes about another process's memory from outside.
//!
//! Mirrors `process_madvise(2)` (mm/madvise.c, 6.18): from outside it takes `MADV_COLLAPSE`, since 6.1, with the right to
//! read the target and CAP_SYS_NICE.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

const MADV_COLLAPSE: i32 = 25;

/// Put a range back into huge pages. `process` is a pidfd; the range is aligned to huge pages.
///
/// # Errors
/// The kernel's: `ENOMEM` where it is not mapped, `EBUSY` where pages are in use, `EINVAL` where no huge page may be.
pub fn collapse(process: impl AsFd, start: u64, bytes: u64) -> io::Result<()> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: bytes as usize };
    // SAFETY: the vector of one element is valid for the call. The address is one of the target, whose contents
    // collapsing leaves as they are.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_fd().as_raw_fd(),
            &raw const range,
            1_usize,
            MADV_COLLAPSE,
            0,
        )
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
