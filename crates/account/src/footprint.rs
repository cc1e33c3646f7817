//! Reads the frames that processes map. These figures are the exact part of an account.
//!
//! A [`FrameLedger`] takes one process after the other. For each it walks the page tables of all regions with resident
//! memory, reads the number of mappings of each frame, and returns the process's [`MappedPages`]. When it is finished,
//! it returns the [`Frames`] that all processes map, each counted once.
//!
//! # Kernel sources
//! `/proc/PID/pagemap` gives the frame of each page (fs/proc/task_mmu.c, `pagemap_read`), `/proc/kpagecount` the
//! mappings of each frame and `/proc/kpageflags` its kind (fs/proc/page.c, `kpagecount_read`, `stable_page_flags`).
//! Observed on Linux 6.18 with CONFIG_PAGE_MAPCOUNT:
//!
//! - A transparent huge page has a frame number, flags and a count for each base page, including tail pages. If one
//!   process maps it as a whole, each count is 1; after a fork it is 2. If the child maps a part of it by base pages,
//!   the count is 2 for that part and 1 for the rest. If a process dropped base pages, their count is 1.
//! - hugetlb pages behave the same. Private ones are KPF_ANON, although `AnonPages` leaves them out.
//! - The count of shared memory is the number of page tables that map it, not of processes that opened it. A frame
//!   mapped twice by one process counts 2. A fault also maps neighboring pages of a file or of shared memory.
//! - A KSM frame counts at most `max_page_sharing` mappings through merging, and more after forks (512 was observed).
//! - The kernel's zero page and huge zero page count 0 and are KPF_ZERO_PAGE; the huge one is KPF_THP as well. They
//!   belong to no process and are counted separately.
//! - `[vdso]` is a frame of the kernel image whose count covers all processes. `[vvar]` has no page to count.
//!
//! With CONFIG_NO_PAGE_MAPCOUNT (6.15), the count of a page of a partly shared huge page is the rounded mean of its
//! folio. The shares of such pages do not add up; the difference appears as `unseen` and `excess`.
//!
//! # Changes during the reading
//! Processes are not stopped. Counts are read right after the page table, in batches of 65,536 pages, so the shares of
//! a process are as accurate as its `Pss:`. The kernel also moves pages between frames, for compaction and between NUMA
//! nodes. A page whose frame has no mapping left is looked up again. If its frame still has no mapping, the page counts
//! as `gone` and in nothing else.
//!
//! Across processes, three differences appear:
//!
//! - A frame whose count has changed since it was read through another process counts in `changed_mappings`.
//! - A process that exits while it is read is in `unread`, and its pages counted so far are in `partially_read`.
//! - Processes that share one address space (CLONE_VM, or a vfork child before its exec) map each frame once together
//!   but are counted twice: `excess`.
//!
//! # Cost
//! The ledger takes two bytes for each base page of every 128 MiB block of physical memory that holds a counted frame
//! (4 KiB pages): 512 MiB for 1 TiB. Frames with 255 or more mappings take about 50 bytes instead, less than a byte for
//! each mapping. Batches take about 6 MiB. Regions without resident pages are skipped. In sparse private anonymous
//! regions only the pages that [`ProcessHandle::resident`] lists are read, so that 20 TiB with few pages do not cost 5
//! billion page table entries. Zero pages in these regions are not counted. A sparse mapping of a file is read in full;
//! the kernel reads 300 million entries a second.

use crate::decide::{Frames, MappedPages};
use pagefold_base::engine::is_store_mapping;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_host::page_state::PageState;
use pagefold_host::{FrameFlags, Host, PagemapEntry, ProcessHandle};
use std::collections::BTreeMap;
use std::num::NonZeroU64;

/// Page table entries and frames read at once.
const BATCH_PAGES: u64 = 64 * 1024;

/// How often a page is looked up whose frame has no mapping left.
const MAX_PAGEMAP_READS: usize = 4;

/// A region is sparse if less than one page in this many is resident.
const SPARSE_RATIO: u64 = 8;

/// Collects the frames of one process after the other.
pub struct FrameLedger<'h> {
    host: &'h dyn Host,
    table: FrameTable,
    frames: Frames,
}

impl<'h> FrameLedger<'h> {
    /// An empty ledger.
    pub fn new(host: &'h dyn Host) -> Self {
        Self { host, table: FrameTable::default(), frames: Frames::default() }
    }

    /// Adds all resident pages of a process. Its regions must have been read just before.
    ///
    /// `Denied` without the privilege to read frame numbers: only an estimate is possible then. `Vanished` if the
    /// process exited meanwhile. In both cases the process is in [`Frames::unread`].
    pub fn add_process(&mut self, process: &dyn ProcessHandle, regions: &[Region]) -> Reading<MappedPages> {
        let mut entry = LedgerEntry { ledger: self, process, mapped: MappedPages::default(), pending: Vec::new() };
        let outcome =
            regions.iter().try_for_each(|region| entry.add_region(region)).and_then(|()| entry.count_pending());
        let mapped = entry.mapped;
        self.frames.zero += mapped.zero;
        self.frames.huge_zero += mapped.huge_zero;
        match outcome {
            Ok(()) => Ok(mapped),
            Err(why) => {
                self.frames.partially_read += &mapped.shares;
                self.frames.unread.push((process.id(), why.clone()));
                Err(why)
            }
        }
    }

    /// The frames that all added processes map.
    pub fn finish(mut self) -> Frames {
        for count in self.table.counts() {
            if let Some(mappings) = NonZeroU64::new(count.kernel_mappings) {
                self.frames.unseen.add(mappings, count.kernel_mappings.saturating_sub(count.seen_mappings));
            }
        }
        self.frames
    }

    /// Counts a frame that a process maps at `page_count` addresses.
    fn count_frame(&mut self, pfn: Pfn, mappings: NonZeroU64, flags: FrameFlags, page_count: u64) {
        let is_ksm = matches!(PageState::of_frame(pfn, flags), PageState::Ksm(_));
        let frames = &mut self.frames;
        self.table.update(pfn, |before| {
            if before.kernel_mappings == 0 {
                frames.distinct += Pages(1);
                frames.anonymous += Pages(u64::from(flags.is_anonymous() && !flags.is_hugetlb()));
                frames.hugetlb += Pages(u64::from(flags.is_hugetlb()));
                frames.ksm += Pages(u64::from(is_ksm));
            } else if before.kernel_mappings != mappings.get() {
                frames.changed_mappings += Pages(page_count);
            }
            if is_ksm {
                // The latest count is valid.
                frames.ksm_mappings =
                    frames.ksm_mappings.saturating_sub(Pages(before.kernel_mappings)) + Pages(mappings.get());
            }
            let seen_mappings = before.seen_mappings + page_count;
            // Mappings that an older, larger count allowed are changes and not excess.
            frames.excess.add(mappings, page_count.min(seen_mappings.saturating_sub(mappings.get())));
            FrameCount { kernel_mappings: mappings.get(), seen_mappings: seen_mappings.min(mappings.get()) }
        });
    }
}

/// A process that is being added.
struct LedgerEntry<'l, 'h, 'p> {
    ledger: &'l mut FrameLedger<'h>,
    process: &'p dyn ProcessHandle,
    mapped: MappedPages,
    pending: Vec<PendingPage>,
}

/// A page whose frame's count is still to be read.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PendingPage {
    frame: Pfn,
    address: u64,
    /// Whether it is in a mapping of the engine's store and was not written since it was merged.
    in_engine_store: bool,
}

impl LedgerEntry<'_, '_, '_> {
    fn add_region(&mut self, region: &Region) -> Reading<()> {
        let empty = region.rss == Bytes::ZERO && region.hugetlb == Bytes::ZERO;
        if empty || region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO)) {
            return Ok(());
        }
        if !is_sparse(region, self.batch_bytes()) {
            return self.add_range(region.range, is_store_mapping(&region.name));
        }
        let page = self.ledger.host.page_size();
        let mut window: Option<AddressRange> = None;
        for run in self.process.resident(&[region.range])? {
            let run = AddressRange { start: run.address, end: run.address + page.bytes_of(Pages(run.pages.into())).0 };
            window = match window {
                Some(window) if run.end.saturating_sub(window.start) <= self.batch_bytes() => {
                    Some(AddressRange { start: window.start, end: run.end })
                }
                full_window => {
                    full_window.map_or(Ok(()), |range| self.add_range(range, false))?;
                    Some(run)
                }
            };
        }
        window.map_or(Ok(()), |range| self.add_range(range, false))
    }

    fn batch_bytes(&self) -> u64 {
        self.ledger.host.page_size().bytes_of(Pages(BATCH_PAGES)).0
    }

    fn add_range(&mut self, range: AddressRange, in_engine_store: bool) -> Reading<()> {
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min(start.saturating_add(self.batch_bytes()));
            self.read_frames(AddressRange { start, end }, in_engine_store)?;
            if self.pending.len() as u64 >= BATCH_PAGES {
                self.count_pending()?;
            }
            start = end;
        }
        Ok(())
    }

    /// Reads the frames of the pages of a range.
    fn read_frames(&mut self, range: AddressRange, in_engine_store: bool) -> Reading<()> {
        let addresses = (range.start..).step_by(self.ledger.host.page_size().bytes() as usize);
        for (address, PagemapEntry { present, frame, file, .. }) in addresses.zip(self.process.mappings(range)?) {
            if present {
                // The kernel hides frame numbers from processes without CAP_SYS_ADMIN.
                let frame = frame.ok_or(Absent::Denied)?;
                self.pending.push(PendingPage { frame, address, in_engine_store: in_engine_store && file });
            }
        }
        Ok(())
    }

    /// Counts the pending pages. If it fails, pages whose counts could not be read are not counted.
    fn count_pending(&mut self) -> Reading<()> {
        let page_bytes = self.ledger.host.page_size().bytes();
        let mut stale = self.count_pending_once()?;
        for _ in 1..MAX_PAGEMAP_READS {
            stale.sort_unstable_by_key(|page| page.address);
            for run in
                stale.chunk_by(|a, b| a.address + page_bytes == b.address && a.in_engine_store == b.in_engine_store)
            {
                let (first, last, before) = (run[0], run[run.len() - 1], self.pending.len());
                self.read_frames(
                    AddressRange { start: first.address, end: last.address + page_bytes },
                    first.in_engine_store,
                )?;
                self.mapped.gone += Pages((run.len() + before - self.pending.len()) as u64);
            }
            stale = self.count_pending_once()?;
        }
        self.mapped.gone += Pages(stale.len() as u64);
        Ok(())
    }

    /// Reads the counts and flags of the pending frames and counts their pages. Returns the pages whose frame has no
    /// mapping left. On an error no page is counted.
    fn count_pending_once(&mut self) -> Reading<Vec<PendingPage>> {
        self.pending.sort_unstable();
        let is_same_frame = |a: &PendingPage, b: &PendingPage| a.frame == b.frame;
        let frames: Vec<Pfn> = self.pending.chunk_by(is_same_frame).map(|pages| pages[0].frame).collect();
        let mut stale = Vec::new();
        if frames.is_empty() {
            return Ok(stale);
        }
        let mappings = vanished_to_malformed(self.ledger.host.frame_mappings(&frames))?;
        let flags = vanished_to_malformed(self.ledger.host.frame_flags(&frames))?;
        for ((pages, mappings), flags) in self.pending.chunk_by(is_same_frame).zip(mappings).zip(flags) {
            let (pfn, page_count) = (pages[0].frame, pages.len() as u64);
            let state = PageState::of_frame(pfn, flags);
            if let PageState::ZeroPage { huge } = state {
                let zeros = if huge { &mut self.mapped.huge_zero } else { &mut self.mapped.zero };
                *zeros += Pages(page_count);
                continue;
            }
            let Some(mappings) = NonZeroU64::new(mappings) else {
                stale.extend_from_slice(pages);
                continue;
            };
            self.mapped.shares.add(mappings, page_count);
            self.mapped.engine.add(mappings, pages.iter().filter(|page| page.in_engine_store).count() as u64);
            if matches!(state, PageState::Ksm(_)) {
                self.mapped.ksm.add(mappings, page_count);
            }
            if flags.is_hugetlb() {
                self.mapped.hugetlb += Pages(page_count);
            }
            self.ledger.count_frame(pfn, mappings, flags, page_count);
        }
        self.pending.clear();
        Ok(stale)
    }
}

/// Whether this process may read the counts and flags of frames.
pub fn check_frames_readable(host: &dyn Host) -> Reading<()> {
    vanished_to_malformed(host.frame_mappings(&[]))
        .and_then(|_| vanished_to_malformed(pagefold_host::check_frame_access(host)))
        .map(|_| ())
}

/// A frame cannot exit: if the kernel does not know it, `Vanished` would wrongly mean the process that maps it.
fn vanished_to_malformed<T>(reading: Reading<T>) -> Reading<T> {
    reading.map_err(|why| match why {
        Absent::Vanished => Absent::Malformed("the kernel does not know the frame".to_owned()),
        why => why,
    })
}

/// Whether a region is anonymous, mostly empty, and larger than a batch.
fn is_sparse(region: &Region, batch: u64) -> bool {
    let size = region.range.bytes().0;
    let anonymous = region.inode == 0 && region.permissions[3] == b'p' && region.hugetlb == Bytes::ZERO;
    anonymous && size > batch && region.rss.0 < size / SPARSE_RATIO
}

/// The counts of a frame.
#[derive(Clone, Copy, Default)]
struct FrameCount {
    /// Its mappings by the kernel's latest count; 0 if the frame was not read.
    kernel_mappings: u64,
    /// Number of its mappings found in processes; at most `kernel_mappings`.
    seen_mappings: u64,
}

/// Counts by frame number: two bytes each, in blocks of adjacent frames.
#[derive(Default)]
struct FrameTable {
    blocks: BTreeMap<u64, Box<[[u8; 2]]>>,
    /// Counts that do not fit into two bytes.
    large_counts: BTreeMap<Pfn, FrameCount>,
}

/// Frames of a block.
const FRAMES_PER_BLOCK: u64 = 1 << 15;

/// In place of the number of mappings: the count is in `large_counts`.
const LARGE_COUNT_MARKER: u8 = u8::MAX;

impl FrameTable {
    fn update(&mut self, pfn: Pfn, change: impl FnOnce(FrameCount) -> FrameCount) {
        let block = self
            .blocks
            .entry(pfn.0 / FRAMES_PER_BLOCK)
            .or_insert_with(|| vec![[0, 0]; FRAMES_PER_BLOCK as usize].into());
        let small = &mut block[(pfn.0 % FRAMES_PER_BLOCK) as usize];
        let before = match *small {
            [LARGE_COUNT_MARKER, _] => self.large_counts.remove(&pfn).unwrap_or_default(),
            [mappings, seen] => FrameCount { kernel_mappings: mappings.into(), seen_mappings: seen.into() },
        };
        let after = change(before);
        *small = match (u8::try_from(after.kernel_mappings), u8::try_from(after.seen_mappings)) {
            (Ok(mappings), Ok(seen)) if mappings != LARGE_COUNT_MARKER => [mappings, seen],
            _ => {
                self.large_counts.insert(pfn, after);
                [LARGE_COUNT_MARKER, 0]
            }
        };
    }

    fn counts(&self) -> impl Iterator<Item = FrameCount> {
        let small = self.blocks.values().flatten().filter(|[mappings, _]| *mappings != LARGE_COUNT_MARKER);
        small
            .map(|&[mappings, seen]| FrameCount { kernel_mappings: mappings.into(), seen_mappings: seen.into() })
            .chain(self.large_counts.values().copied())
    }
}

#[cfg(test)]
mod tests;
