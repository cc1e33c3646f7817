//! Pages of a whole process: its fair share, its huge pages and its zero pages.
//!
//! `smaps_rollup` has the first two. While the kernel walks a region for it, the process cannot map or unmap memory:
//! `show_smaps_rollup` (fs/proc/task_mmu.c, 6.18) drops `mmap_lock` between regions only, and the RAM of a virtual
//! machine is one region. So it is read up to [`MAX_ROLLUP_RSS`]. Of larger processes the page table entries are read,
//! for which the kernel holds the lock for a few MiB at a time (`pagemap_read`).

use crate::verify::{count_ksm_pages, ksm_zero_pages};
use pagefold_base::region::MapsEntry;
use pagefold_base::{Absent, AddressRange, Bytes, PageSize, Pages, Reading};
use pagefold_host::page_state::{EntryState, FrameLookup, PageState};
use pagefold_host::{Host, PagemapEntry, ProcessHandle, observe, parse};

/// Resident memory of the largest process whose `smaps_rollup` is read while it runs. Reading takes about a second of
/// CPU time; during most of it the process cannot map or unmap memory.
const MAX_ROLLUP_RSS: Bytes = Bytes(64 << 30);

/// Address space that is walked in any process. Reading it takes about a second of CPU time, even where nothing is
/// mapped.
const MIN_WALKED_ADDRESS_SPACE: Bytes = Bytes(256 << 30);

/// Address space that is walked in a large process, as a multiple of its resident memory.
const WALKED_SPACE_PER_RESIDENT: u64 = 2;

/// Page table entries that are read together: 256 MiB of base pages.
const PAGES_PER_READ: Pages = Pages(1 << 16);

/// Address space in which huge pages are sought together.
const HUGE_PAGE_SCAN_BYTES: u64 = 1 << 30;

/// Fair share of a process: each page divided by the number of processes that map it, without hugetlb pages. If the
/// process has more than 64 GiB, its files and shared memory count in full, and so do pages beyond the address space
/// that is walked: the fair share may then be too high.
pub fn fair_share(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Bytes> {
    let resident = parse::statm(&handle.read("statm")?)?.resident;
    if host.page_size().bytes_of(resident) <= MAX_ROLLUP_RSS {
        return observe::rollup(handle)?.pss;
    }
    let mut others_share = 0.0;
    for range in private_ranges(&observe::mapped_regions(handle)?, resident, host.page_size()) {
        for part in range.cut_at_multiples(host.page_size().bytes_of(PAGES_PER_READ).0) {
            others_share += pages_of_others(host, &handle.mappings(part)?)?;
        }
    }
    Ok(Bytes(((resident.0 as f64 - others_share).max(0.0) * host.page_size().bytes() as f64) as u64))
}

/// The shares of other mappings in some private pages, in pages of this process. The zero page is in no process's
/// resident memory.
fn pages_of_others(host: &dyn Host, entries: &[PagemapEntry]) -> Reading<f64> {
    let states = entries.iter().map(|entry| EntryState::from_entry(entry, FrameLookup::Shared));
    let mut frames = Vec::new();
    for state in states {
        match state {
            EntryState::InFrame(frame) => frames.push(frame),
            EntryState::Known(PageState::Hidden) => return Err(Absent::Denied),
            EntryState::Known(_) => {}
        }
    }
    frames.sort_unstable();
    let own_mappings: Vec<u64> = frames.chunk_by(|a, b| a == b).map(|same| same.len() as u64).collect();
    frames.dedup();
    if frames.is_empty() {
        return Ok(0.0);
    }
    let frames_read = host.frame_flags(&frames)?.into_iter().zip(host.frame_mappings(&frames)?);
    let counted = own_mappings.into_iter().zip(frames_read).filter(|(_, (flags, _))| !flags.is_zero_page());
    Ok(counted.map(|(own, (_, all))| own as f64 * (1.0 - 1.0 / all.max(1) as f64)).sum())
}

/// Memory of a process in huge pages.
pub(crate) fn huge_page_bytes(handle: &dyn ProcessHandle, page_size: PageSize) -> Reading<Bytes> {
    let resident = parse::statm(&handle.read("statm")?)?.resident;
    if page_size.bytes_of(resident) <= MAX_ROLLUP_RSS {
        return observe::rollup(handle)?.anon_huge;
    }
    let mut huge = Pages::ZERO;
    for range in private_ranges(&observe::mapped_regions(handle)?, resident, page_size) {
        for part in range.cut_at_multiples(HUGE_PAGE_SCAN_BYTES) {
            let runs = handle.resident(&[part])?;
            huge += runs.iter().filter(|run| run.huge).map(|run| Pages(run.pages.into())).sum::<Pages>();
        }
    }
    Ok(page_size.bytes_of(huge))
}

/// Pages of private memory mapped to the kernel's zero page that KSM does not count, whether enrolled or not. They
/// bound from above the zero pages that huge page splits freed; memory that was read but never written is among them.
/// The count may be too low for a process with more accessible memory than is walked.
pub fn uncounted_zero_pages(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Pages> {
    let ksm = parse::process_ksm(handle.read("ksm_stat"), Err(Absent::NotOnThisKernel));
    let resident =
        handle.read("statm").and_then(|text| parse::statm(&text)).map_or(Pages::ZERO, |statm| statm.resident);
    let mut zeros = Pages::ZERO;
    // `maps` and not `smaps`: for `smaps` the kernel walks all pages of a region under one lock.
    for range in private_ranges(&observe::mapped_regions(handle)?, resident, host.page_size()) {
        zeros += count_ksm_pages(host, handle, range, &mut Vec::new())?.zero;
    }
    Ok(zeros.saturating_sub(ksm_zero_pages(&ksm)))
}

/// The ranges that are walked in a process with so many resident pages: private regions with access rights, the
/// smallest first. They are limited because walking reserved address space takes time and finds nothing.
fn private_ranges(layout: &[MapsEntry], resident: Pages, page_size: PageSize) -> Vec<AddressRange> {
    // The kernel's half of the address space has `[vsyscall]` only.
    let is_private = |mapped: &&MapsEntry| {
        let [read, write, _, shared] = mapped.permissions;
        (read == b'r' || write == b'w') && shared == b'p' && mapped.range.end <= 1 << 63
    };
    let mut ranges: Vec<AddressRange> = layout.iter().filter(is_private).map(|mapped| mapped.range).collect();
    ranges.sort_unstable_by_key(|range| (range.bytes(), range.start));
    let mut remaining_pages =
        page_size.pages_in(MIN_WALKED_ADDRESS_SPACE).max(Pages(resident.0 * WALKED_SPACE_PER_RESIDENT));
    for range in &mut ranges {
        let pages = page_size.pages_in(range.bytes()).min(remaining_pages);
        range.end = range.start + page_size.bytes_of(pages).0;
        remaining_pages = remaining_pages.saturating_sub(pages);
    }
    ranges.retain(|range| range.start < range.end);
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_host::fake_host::{FakeHost, HUGE_PAGE_NAME, MERGED_PAGE_NAME};

    /// A process that is too large for `smaps_rollup`, with a few pages in its page tables.
    fn start_large_process(fake: &FakeHost, pid: u32) -> u64 {
        let resident = MAX_ROLLUP_RSS.0 / fake.page_size().bytes() + 1;
        fake.start_process(pid, resident);
        resident
    }

    /// A page that three mappings share costs each of them a third.
    #[test]
    fn fair_share_of_a_large_process_comes_from_its_page_tables() {
        let fake = FakeHost::booted();
        let resident = start_large_process(&fake, 1);
        fake.map_pages(1, (1 << 30, (1 << 30) + 8 * 4096), "heap", false);
        fake.map_pages(1, (2 << 30, (2 << 30) + 2 * 4096), MERGED_PAGE_NAME, true);
        fake.map_pages(2, (2 << 30, (2 << 30) + 4096), MERGED_PAGE_NAME, true);
        let share = || fair_share(&fake, &*fake.open(Pid(1)).unwrap()).map(|share| share.0);
        assert_eq!(share(), Ok((resident - 2) * 4096 + 2 * 4096 / 3));
        fake.unmap_pages(2, (2 << 30, (2 << 30) + 4096));
        assert_eq!(share(), Ok((resident - 1) * 4096), "its two pages share one frame");
        fake.put_file("proc/1/smaps_rollup", "0-1 ---p 0 00:00 0 [rollup]\nPss: 4 kB\n");
        fake.put_file("proc/1/statm", &format!("{0} {0} 0 0 0 0 0\n", resident - 1));
        assert_eq!(share(), Ok(4096), "the kernel's own figure is exact and cheap enough");
    }

    #[test]
    fn huge_pages_of_a_large_process_come_from_its_page_tables() {
        let fake = FakeHost::booted();
        start_large_process(&fake, 1);
        fake.map_pages(1, (1 << 30, (1 << 30) + (4 << 20)), HUGE_PAGE_NAME, false);
        fake.map_pages(1, (2 << 30, (2 << 30) + 4096), "heap", false);
        fake.put_file("proc/1/smaps_rollup", "0-1 ---p 0 00:00 0 [rollup]\nAnonHugePages: 8 kB\n");
        let huge = || huge_page_bytes(&*fake.open(Pid(1)).unwrap(), fake.page_size());
        assert_eq!(huge(), Ok(Bytes(4 << 20)));
        fake.start_process(1, 1);
        assert_eq!(huge(), Ok(Bytes(8192)));
    }

    /// Reserved address space has no pages, and walking a TiB of it takes seconds.
    #[test]
    fn walked_space_is_bounded() {
        const TIB: u64 = 1 << 40;
        let page_size = PageSize::new(4096).unwrap();
        let mapped = |start: u64, bytes: u64, permissions: &[u8; 4]| {
            let range = AddressRange { start, end: start + bytes };
            MapsEntry { range, permissions: *permissions, inode: 0, name: String::new() }
        };
        let walked = |regions: &[MapsEntry], resident: u64| -> Vec<(u64, u64)> {
            let ranges = private_ranges(regions, page_size.pages_in(Bytes(resident)), page_size);
            ranges.iter().map(|range| (range.start, range.bytes().0)).collect()
        };
        let many = |permissions| (1..=100).map(move |at| mapped(at * TIB, TIB, permissions));
        let small = || [mapped(200 * TIB, 8192, b"rw-p"), mapped(201 * TIB, 4096, b"r--p")].into_iter();
        let reserved: Vec<MapsEntry> = many(b"---p").chain(small()).collect();
        assert_eq!(walked(&reserved, 0), [(201 * TIB, 4096), (200 * TIB, 8192)]);
        let readable: Vec<MapsEntry> = many(b"rw-p").chain(small()).collect();
        for (resident, space) in [(0, MIN_WALKED_ADDRESS_SPACE.0), (3 * TIB, 6 * TIB)] {
            let limited = walked(&readable, resident);
            assert_eq!(limited[..2], [(201 * TIB, 4096), (200 * TIB, 8192)], "small regions first");
            assert_eq!(limited.iter().map(|(_, bytes)| bytes).sum::<u64>(), space);
        }
        assert_eq!(walked(&[mapped(TIB, 4096, b"rw-s"), mapped(0xffff_ffff_ff60_0000, 4096, b"r-xp")], 0), []);
    }

    /// None of the large reserved regions of a process is read.
    #[test]
    fn inaccessible_regions_are_not_read() {
        let fake = FakeHost::booted();
        fake.start_process(1, 1);
        let reserved = |at: u64| format!("{:x}-{:x} ---p 00000000 00:00 0 \n", at << 40, (at + 1) << 40);
        let maps: String = (1..=100).map(reserved).collect();
        fake.put_file("proc/1/maps", &maps);
        // It has no page tables: reading any page fails.
        assert_eq!(uncounted_zero_pages(&fake, &*fake.open(Pid(1)).unwrap()), Ok(Pages::ZERO));
    }
}
