//! `PAGEMAP_SCAN`: which pages of a range are resident, found by walking page tables and not addresses.
//!
//! The ioctl on `/proc/PID/pagemap` came with Linux 6.7 (fs/proc/task_mmu.c; layout in include/uapi/linux/fs.h), and
//! older headers lack it, so its structures stand here. It skips what is not mapped at the highest table level, which
//! makes 20 TiB of emptiness free.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`.
#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

nix::ioctl_readwrite!(
    /// `PAGEMAP_SCAN`.
    pagemap_scan, b'f', 16, PmScanArg
);

/// A range of resident anonymous pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResidentRange {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Whether huge pages of the PMD level map it.
    pub huge: bool,
}

/// How many ranges one call returns at most; larger results are fetched in several.
const BATCH: usize = 4096;

/// Hand the resident anonymous pages of `range` to `found`, in address order. Left out: file pages, shared memory,
/// swapped-out pages and mappings of the kernel's zero page.
///
/// `pagemap` is an open `/proc/PID/pagemap`. Errors are the ioctl's: `ENOTTY` before 6.7, `ESRCH` when the process's
/// memory is gone.
pub fn resident(pagemap: &File, range: Range<u64>, mut found: impl FnMut(ResidentRange)) -> io::Result<()> {
    let mut batch = vec![PageRegion::default(); BATCH];
    let mut start = range.start;
    while start < range.end {
        let mut request = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags: 0,
            start,
            end: range.end,
            walk_end: 0,
            vec: batch.as_mut_ptr() as u64,
            vec_len: batch.len() as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_PRESENT | PAGE_IS_FILE | PAGE_IS_PFNZERO,
            category_anyof_mask: 0,
            return_mask: PAGE_IS_HUGE,
        };
        // SAFETY: `request` is a valid `pm_scan_arg` of the size it states, and `vec` points to `vec_len` writable
        // `page_region`s that outlive the call. Without PM_SCAN_WP_MATCHING the kernel changes nothing else.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut request) }?;
        for region in batch.iter().take(count as usize) {
            let huge = region.categories & PAGE_IS_HUGE != 0;
            found(ResidentRange { start: region.start, end: region.end, huge });
        }
        if request.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        start = request.walk_end;
    }
    Ok(())
}
