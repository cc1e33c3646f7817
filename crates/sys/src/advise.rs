//! Kernel advice about another process's memory, and about memory of this process.
//!
//! Mirrors `process_madvise(2)` (mm/madvise.c, 6.18). For another process it accepts `MADV_COLLAPSE` since 6.1. The
//! caller needs the right to read the target and CAP_SYS_NICE.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};

const MADV_COLLAPSE: i32 = 25;

/// Collapse a range into huge pages. `pidfd` names the process; the range is aligned to huge pages.
///
/// # Errors
/// The kernel's: `ENOMEM` if the range is not mapped, `EBUSY` if pages are in use, `EINVAL` if huge pages are not
/// allowed.
pub fn collapse(pidfd: impl AsFd, start: u64, bytes: u64) -> io::Result<()> {
    let range = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: bytes as usize };
    // SAFETY: the vector of one element is valid for the call. The address belongs to the target; collapsing does not
    // change its contents.
    let result = unsafe {
        libc::syscall(libc::SYS_process_madvise, pidfd.as_fd().as_raw_fd(), &raw const range, 1_usize, MADV_COLLAPSE, 0)
    };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Back memory that will soon be filled with huge pages. This costs one fault for each huge page instead of one for
/// each base page, and fewer TLB misses later. The advice stays on the memory after the allocator reuses it for
/// something else.
///
/// # Errors
/// The kernel's: `EINVAL` on a kernel without transparent huge pages.
pub fn prefer_huge_pages<T>(memory: &mut [MaybeUninit<T>]) -> io::Result<()> {
    let page_bytes = crate::mapping::page_size();
    let addresses = memory.as_mut_ptr_range();
    let start = addresses.start.addr().next_multiple_of(page_bytes);
    let len = (addresses.end.addr() / page_bytes * page_bytes).saturating_sub(start);
    if len == 0 {
        return Ok(());
    }
    let start = memory.as_mut_ptr().with_addr(start).cast::<c_void>();
    // SAFETY: the range lies within `memory`, which is borrowed mutably. This advice does not change contents.
    unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_size_takes_huge_page_advice() {
        for len in [0, 1, 5000, 3 << 20] {
            let mut bytes: Vec<u8> = Vec::with_capacity(len);
            let refused = prefer_huge_pages(bytes.spare_capacity_mut()).err().map(|why| why.raw_os_error());
            assert!(refused.is_none_or(|why| why == Some(libc::EINVAL)), "{refused:?}");
            bytes.resize(len, 7);
            assert!(bytes.iter().all(|&byte| byte == 7));
            // The flag of the mapping shows that the kernel took the advice.
            if refused.is_none() && len >= 1 << 20 {
                let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
                let middle = bytes.as_ptr().addr() + len / 2;
                let mut inside = false;
                let flags = smaps.lines().find(|line| {
                    let range = line.split(' ').next().and_then(|range| range.split_once('-'));
                    let address = |text| usize::from_str_radix(text, 16).ok();
                    if let Some((Some(start), Some(end))) = range.map(|(start, end)| (address(start), address(end))) {
                        inside = (start..end).contains(&middle);
                    }
                    inside && line.starts_with("VmFlags:")
                });
                assert!(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "hg")), "{flags:?}");
            }
        }
    }
}
