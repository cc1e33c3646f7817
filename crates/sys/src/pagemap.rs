//! `PAGEMAP_SCAN`: finds the resident pages of a range by walking page tables instead of addresses.
//!
//! The ioctl on `/proc/PID/pagemap` came with Linux 6.7 (fs/proc/task_mmu.c; layout in include/uapi/linux/fs.h). Older
//! headers lack it, so its structures are defined here. It skips unmapped memory at the highest page table level, so 20
//! TiB of unmapped space cost nothing.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
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

/// The maximum number of ranges that one call returns; larger results take several calls.
const RANGES_PER_SCAN_CALL: usize = 4096;

/// A range of pages that are mapped in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRange {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Whether they are pages of a file or of shared memory, not written since a private mapping. Not requested from
    /// the kernel for ranges without such pages.
    pub file: bool,
    /// Whether they map the kernel's zero page.
    pub zero_page: bool,
    /// Whether huge pages of the PMD level map them.
    pub huge: bool,
    /// Whether they are swapped out.
    pub swapped: bool,
}

/// What is known about the contents of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeContents {
    /// No pages of a file or of shared memory. Then the kernel need not read the frame of each page, which is the
    /// largest cost of a scan (`pagemap_page_category` in fs/proc/task_mmu.c, 6.18).
    OnlyAnonymous,
    /// Any pages.
    Anything,
}

/// Which pages a scan finds and which categories it returns, in the ioctl's terms.
struct ScanFilter {
    inverted: u64,
    all_of: u64,
    any_of: u64,
    returned: u64,
}

/// Pass the anonymous pages of `range` that are resident or swapped out to `visit`, in address order. File pages,
/// shared memory and mappings of the kernel's zero page are left out. A page that the kernel is migrating to another
/// frame is reported as swapped out.
///
/// `pagemap` is an open `/proc/PID/pagemap`. Errors are the ioctl's: `ENOTTY` before 6.7, `ESRCH` when the process's
/// memory is gone.
pub fn scan_anonymous(pagemap: &File, range: Range<u64>, visit: impl FnMut(MappedRange)) -> io::Result<()> {
    let filter = ScanFilter {
        inverted: PAGE_IS_FILE | PAGE_IS_PFNZERO,
        all_of: PAGE_IS_FILE | PAGE_IS_PFNZERO,
        any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        returned: PAGE_IS_HUGE | PAGE_IS_SWAPPED,
    };
    run_pagemap_scan(pagemap, range, &filter, visit)
}

/// Pass all pages of `range` that are resident or swapped out to `visit`, in address order. `contents` says what the
/// range may contain.
///
/// Before 6.7 the entries of `pagemap` are read, which have less information. No page is reported as part of a huge
/// page. A page that other processes also map, after a fork or a KSM merge, cannot be distinguished from the kernel's
/// zero page and is reported as that.
///
/// `pagemap` is an open `/proc/PID/pagemap`. Errors are those of the ioctl or of reading it: `ESRCH` when the process's
/// memory is gone.
pub fn scan_mapped(
    pagemap: &File,
    range: Range<u64>,
    contents: RangeContents,
    mut visit: impl FnMut(MappedRange),
) -> io::Result<()> {
    match scan_mapped_by_ioctl(pagemap, range.clone(), contents, &mut visit) {
        // The first call failed, so no page has been reported yet.
        Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => scan_mapped_by_entries(pagemap, range, visit),
        result => result,
    }
}

/// The calling process's own pages. It waits for pages that the kernel is migrating to other frames.
///
/// Compaction migrates memory of any process, up to 512 pages at once, in one or two milliseconds if it has a CPU.
/// Meanwhile these pages appear as swapped out. `VmSwap` of `/proc/thread-self/status` shows that nothing is swapped
/// out. mincore(2), which treats migrating pages as present (mm/mincore.c, `mincore_pte_range`), distinguishes them
/// from guard regions.
pub struct OwnPagemap {
    pagemap: File,
    /// The remaining time to wait.
    migration_wait_left: Duration,
    /// Whether memory of this process is swapped out, once known. If so, it does not wait.
    is_swapped: Option<bool>,
}

/// How long [`OwnPagemap`] waits before it scans again.
const MIGRATION_RETRY_DELAY: Duration = Duration::from_micros(200);

impl OwnPagemap {
    /// With the maximum time to wait in total. Errors are those of opening `/proc/thread-self/pagemap`.
    pub fn open(max_migration_wait: Duration) -> io::Result<Self> {
        Ok(Self {
            pagemap: File::open("/proc/thread-self/pagemap")?,
            migration_wait_left: max_migration_wait,
            is_swapped: None,
        })
    }

    /// As [`scan_mapped`].
    pub fn scan_mapped(&mut self, range: Range<u64>, contents: RangeContents) -> io::Result<Vec<MappedRange>> {
        let (began, mut waited) = (Instant::now(), Duration::ZERO);
        loop {
            let mut mapped_ranges = Vec::new();
            scan_mapped(&self.pagemap, range.clone(), contents, |mapped| mapped_ranges.push(mapped))?;
            let is_migrating = |range: &MappedRange| range.swapped && is_any_page_in_memory(range.start..range.end);
            let any_migrating = mapped_ranges.iter().any(is_migrating);
            if !any_migrating
                || began.elapsed() + MIGRATION_RETRY_DELAY > self.migration_wait_left
                || self.has_swapped_pages()
            {
                self.migration_wait_left = self.migration_wait_left.saturating_sub(waited);
                return Ok(mapped_ranges);
            }
            std::thread::sleep(MIGRATION_RETRY_DELAY);
            waited = began.elapsed();
        }
    }

    fn has_swapped_pages(&mut self) -> bool {
        *self.is_swapped.get_or_insert_with(|| {
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
            status.lines().find_map(|line| line.strip_prefix("VmSwap:")).map(str::trim) != Some("0 kB")
        })
    }
}

/// Whether any of these pages of this process is in memory.
fn is_any_page_in_memory(range: Range<u64>) -> bool {
    let page = crate::mapping::page_size() as u64;
    let mut states = [0_u8; 512];
    (range.start..range.end).step_by(512 * page as usize).any(|start| {
        let end = range.end.min(start + 512 * page);
        let states = &mut states[..((end - start) / page) as usize];
        let first = std::ptr::with_exposed_provenance_mut(start as usize);
        // SAFETY: the kernel writes one byte for each page of the range to `states`, which has that many, and nothing
        // else. It fails if a page is not mapped.
        let result = unsafe { libc::mincore(first, (end - start) as usize, states.as_mut_ptr()) };
        result == 0 && states.iter().any(|state| state & 1 != 0)
    })
}

/// As [`scan_mapped`], by the ioctl only: `ENOTTY` before 6.7.
pub fn scan_mapped_by_ioctl(
    pagemap: &File,
    range: Range<u64>,
    contents: RangeContents,
    visit: impl FnMut(MappedRange),
) -> io::Result<()> {
    let file_flag = if contents == RangeContents::OnlyAnonymous { 0 } else { PAGE_IS_FILE };
    let filter = ScanFilter {
        inverted: 0,
        all_of: 0,
        any_of: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
        returned: file_flag | PAGE_IS_PFNZERO | PAGE_IS_HUGE | PAGE_IS_SWAPPED,
    };
    run_pagemap_scan(pagemap, range, &filter, visit)
}

/// As [`scan_mapped`], from the entries of eight bytes each (Documentation/admin-guide/mm/pagemap.rst, 4.2 and later).
fn scan_mapped_by_entries(pagemap: &File, range: Range<u64>, mut visit: impl FnMut(MappedRange)) -> io::Result<()> {
    const EXCLUSIVE: u64 = 1 << 56;
    const FILE: u64 = 1 << 61;
    const SWAPPED: u64 = 1 << 62;
    const PRESENT: u64 = 1 << 63;
    let page = crate::mapping::page_size() as u64;
    let mut buffer = vec![0; RANGES_PER_SCAN_CALL.min(((range.end - range.start) / page) as usize) * size_of::<u64>()];
    let mut last: Option<MappedRange> = None;
    let mut start = range.start;
    while start < range.end {
        let len = buffer.len().min(((range.end - start) / page) as usize * size_of::<u64>());
        let read = pagemap.read_exact_at(&mut buffer[..len], start / page * size_of::<u64>() as u64);
        read.map_err(|error| match error.kind() {
            // The file has no entries after the memory is gone (fs/proc/task_mmu.c, `pagemap_read`).
            io::ErrorKind::UnexpectedEof => io::Error::from_raw_os_error(libc::ESRCH),
            _ => error,
        })?;
        for entry in buffer[..len].as_chunks::<8>().0.iter().copied().map(u64::from_ne_bytes) {
            let has = |flag| entry & flag != 0;
            let next = MappedRange {
                start,
                end: start + page,
                file: has(FILE),
                zero_page: has(PRESENT) && !has(FILE) && !has(EXCLUSIVE),
                huge: false,
                swapped: has(SWAPPED),
            };
            start = next.end;
            let kind = |range: &MappedRange| (range.file, range.zero_page, range.swapped);
            match &mut last {
                _ if !has(PRESENT) && !has(SWAPPED) => {}
                Some(last) if last.end == next.start && kind(last) == kind(&next) => last.end = next.end,
                _ => last.replace(next).into_iter().for_each(&mut visit),
            }
        }
    }
    last.into_iter().for_each(visit);
    Ok(())
}

fn run_pagemap_scan(
    pagemap: &File,
    range: Range<u64>,
    filter: &ScanFilter,
    mut visit: impl FnMut(MappedRange),
) -> io::Result<()> {
    let pages = (range.end.saturating_sub(range.start)).div_ceil(crate::mapping::page_size() as u64);
    let mut batch = vec![PageRegion::default(); RANGES_PER_SCAN_CALL.min(pages as usize)];
    // When the kernel empties its own buffer of 512 ranges during a walk, the end that it returns may lie before ranges
    // that it has returned already (`walk_end` in do_pagemap_scan, 6.18).
    let (mut start, mut reported_end) = (range.start, range.start);
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
            category_inverted: filter.inverted,
            category_mask: filter.all_of,
            category_anyof_mask: filter.any_of,
            return_mask: filter.returned,
        };
        // SAFETY: `request` is a valid `pm_scan_arg` of the size it states, and `vec` points to `vec_len` writable
        // `page_region`s that outlive the call. Without PM_SCAN_WP_MATCHING the kernel changes nothing else.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &mut request) }?;
        for region in &batch[..count as usize] {
            let (start, end) = (region.start.max(reported_end), region.end);
            let has = |category| region.categories & category != 0;
            if start < end {
                let (file, zero_page) = (has(PAGE_IS_FILE), has(PAGE_IS_PFNZERO));
                visit(MappedRange {
                    start,
                    end,
                    file,
                    zero_page,
                    huge: has(PAGE_IS_HUGE),
                    swapped: has(PAGE_IS_SWAPPED),
                });
                reported_end = end;
            }
        }
        if request.walk_end <= start {
            return Err(io::Error::other("PAGEMAP_SCAN made no progress"));
        }
        start = request.walk_end;
    }
    // Some kernels find nothing in memory that is gone, and report no error.
    if reported_end == range.start && range.start < range.end {
        check_memory_exists(pagemap, range.start)
    } else {
        Ok(())
    }
}

/// Fails with `ESRCH` if the memory that a pagemap describes is gone: it then has no entries (fs/proc/task_mmu.c,
/// `pagemap_read`).
fn check_memory_exists(pagemap: &File, address: u64) -> io::Result<()> {
    let offset = address / crate::mapping::page_size() as u64 * size_of::<u64>() as u64;
    match pagemap.read_at(&mut [0; size_of::<u64>()], offset)? {
        0 => Err(io::Error::from_raw_os_error(libc::ESRCH)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both methods return the same for memory that no other process shares.
    #[test]
    fn pagemap_entries_match_pagemap_scan() {
        let page = crate::mapping::page_size();
        let mut memory = vec![0_u8; 9000 * page];
        // Exclude huge pages and forks of other tests.
        for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTFORK] {
            let (first, whole) = (memory.as_mut_ptr().addr().next_multiple_of(page), 8999 * page);
            // SAFETY: the range is this test's own, and the advice changes no content.
            unsafe { libc::madvise(std::ptr::with_exposed_provenance_mut(first), whole, advice) };
        }
        let start = (memory.as_ptr().expose_provenance() as u64).next_multiple_of(page as u64);
        let end = start + 8999 * page as u64;
        // Written, only read, or not touched.
        for (at, page) in memory.chunks_mut(page).enumerate() {
            match at % 7 {
                0..3 => page[0] = 1,
                3 => drop(std::hint::black_box(page[0])),
                _ => {}
            }
        }
        let pagemap = File::open("/proc/self/pagemap").expect("our own pagemap opens");
        let mut read = Vec::new();
        scan_mapped_by_entries(&pagemap, start..end, |found| read.push(found)).expect("our own pagemap is readable");
        assert!(
            read.len() > 1000 && read.iter().any(|found| found.zero_page) && read.iter().any(|found| !found.zero_page)
        );
        for holds in [RangeContents::Anything, RangeContents::OnlyAnonymous] {
            let mut scanned = Vec::new();
            match scan_mapped_by_ioctl(&pagemap, start..end, holds, |found| scanned.push(found)) {
                Ok(()) if scanned.iter().all(|found| !found.huge) => assert_eq!(read, scanned, "{holds:?}"),
                Ok(()) => println!("skipped: this kernel gives memory in huge pages"),
                Err(error) => println!("skipped: PAGEMAP_SCAN: {error}"),
            }
        }
    }

    /// The same as the scan, on kernels that have it.
    #[test]
    fn entries_of_memory_that_was_left_by_exec_are_gone() {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let mut command = Command::new("sh");
        command.args(["-c", "read line; exec cat"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().expect("a shell");
        let pid = child.id();
        let proc_path = |file: &str| format!("/proc/{pid}/{file}");
        let pagemap = File::open(proc_path("pagemap")).expect("it is our child's");
        let maps = std::fs::read_to_string(proc_path("maps")).expect("it is our child's");
        let (start, end) = maps.split(' ').next().and_then(|range| range.split_once('-')).expect("a range");
        let address = |text| u64::from_str_radix(text, 16).expect("an address");
        let range = address(start)..address(end);
        scan_mapped_by_entries(&pagemap, range.clone(), |_| {}).expect("its memory is there");
        let mut input = child.stdin.take().expect("piped");
        input.write_all(b"go on\n").expect("it reads");
        let deadline = Instant::now() + Duration::from_secs(20);
        // Another program that reads about the process at the moment keeps its former memory for that long.
        while let Ok(()) = scan_mapped_by_entries(&pagemap, range.clone(), |_| {}) {
            assert!(Instant::now() < deadline, "its former memory stays");
            std::thread::sleep(Duration::from_millis(1));
        }
        let entries = scan_mapped_by_entries(&pagemap, range.clone(), |_| {});
        assert_eq!(entries.map_err(|error| error.raw_os_error()), Err(Some(libc::ESRCH)));
        match scan_mapped_by_ioctl(&pagemap, range, RangeContents::Anything, |_| {})
            .map_err(|error| error.raw_os_error())
        {
            Err(Some(libc::ENOTTY)) => println!("skipped: this kernel has no PAGEMAP_SCAN"),
            scanned => assert_eq!(scanned, Err(Some(libc::ESRCH))),
        }
        drop(input);
        assert!(child.wait().expect("its end").success());
    }

    #[test]
    fn each_page_is_reported_once() {
        let page = crate::mapping::page_size();
        // Every other page is written. This makes several buffers of ranges, the last one not full.
        for pages in [2 * 1024, 2 * 5000] {
            let mut memory = vec![0_u8; pages * page];
            memory.iter_mut().step_by(2 * page).for_each(|byte| *byte = 1);
            let start = memory.as_ptr().expose_provenance() as u64;
            let (first, end) = (start.next_multiple_of(page as u64), start + memory.len() as u64);
            let pagemap = File::open("/proc/self/pagemap").expect("our own pagemap opens");
            let (mut reported_end, mut count) = (first, 0);
            let check_range = |range: MappedRange| {
                assert!(range.start >= reported_end, "{range:?} after {reported_end:#x}");
                (reported_end, count) = (range.end, count + (range.end - range.start) / page as u64);
            };
            if let Err(error) = scan_anonymous(&pagemap, first..end / page as u64 * page as u64, check_range) {
                println!("skipped: PAGEMAP_SCAN: {error}");
                return;
            }
            assert!((pages as u64 / 2 - 2..=pages as u64).contains(&count), "{count}");
        }
    }
}
