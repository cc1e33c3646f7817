//! The frames that processes map, read through the port: the exact side of an account.
//!
//! A [`FrameLedger`] is given one process after the other. For each it walks the page tables of all regions that hold
//! anything, asks how many mappings each frame has, and returns the process's [`MappedPages`]; when it is closed it returns
//! the [`Frames`] that all of them map, each once.
//!
//! # What the kernel tells
//! `/proc/PID/pagemap` gives the frame of each page (fs/proc/task_mmu.c, `pagemap_read`), `/proc/kpagecount` the
//! mappings of each frame and `/proc/kpageflags` its kind (fs/proc/page.c, `kpagecount_read`, `stable_page_flags`).
//! Found by experiment on 6.18 with CONFIG_PAGE_MAPCOUNT:
//!
//! - A transparent huge page has a frame number, flags and a count for each base page, tail pages too. Mapped as a
//!   whole by one process each counts 1; after a fork 2; where the child maps a part of it by base pages, 2 for that
//!   part and 1 for the rest, and after one dropped base pages, 1 for those.
//! - hugetlb pages do the same, and are KPF_ANON where they are private, though `AnonPages` leaves them out.
//! - Shared memory counts the page tables that map it, not the processes that opened it. A frame mapped twice by one
//!   process counts 2. A fault maps neighbouring pages of a file or of shared memory too.
//! - A KSM frame counts at most `max_page_sharing` mappings by merging, and more after forks (512 was seen).
//! - The kernel's zero page and huge zero page count 0 and are KPF_ZERO_PAGE; the huge one is KPF_THP as well. They
//!   are no memory of anybody and are counted apart.
//! - `[vdso]` is a frame of the kernel's image with a count of all processes, `[vvar]` has no page to count.
//!
//! With CONFIG_NO_PAGE_MAPCOUNT (6.15) the count of a page of a partly shared huge page is its folio's mean, rounded.
//! Shares of such pages then do not add up; what is missing or too much shows as `unseen` and `excess`.
//!
//! # What moves
//! Processes are not stopped. A count is read right after the page table it belongs to, in batches of 65,536 pages, so
//! a process's own shares are as good as its `Pss:`. The kernel moves pages between frames, too, for compaction and
//! between NUMA nodes: a page whose frame has no mapping left is looked for again; if that stays so it is `gone`, and
//! in nothing else. Across processes: a frame whose count was another one when it was read before is `moved`; a process
//! that vanished midway is `unread`, and what was counted of it is `lost`. Processes that share one address space
//! (CLONE_VM, a child of vfork before its exec) map each frame once between them and are seen to map it twice:
//! `excess`.
//!
//! # Cost
//! Two bytes for each base page of the 128 MiB blocks of physical memory that hold any frame seen (4 KiB pages): 512
//! MiB for 1 TiB. Frames of 255 and more mappings take about 50 bytes instead, less than a byte for each mapping.
//! Batches take about 6 MiB. Regions without resident pages are not looked at, so emptiness costs nothing; in sparse
//! private anonymous regions only what [`ProcessHandle::resident_bytes`] lists is read, so that 20 TiB with little in them do not
//! cost 5 billion page table entries. Zero pages in those are not counted. A sparse mapping of a file is read in full,
//! which the kernel does at 300 million entries a second.

use crate::decide::{Frames, MappedPages};
use pagefold_base::engine::is_store_mapping;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, Pages, Pfn, Reading};
use pagefold_host::{FrameFlags, Host, PagemapEntry, ProcessHandle};
use std::collections::BTreeMap;
use std::num::NonZeroU64;

/// Page table entries read at once, and frames asked for at once.
const BATCH_PAGES: u64 = 64 * 1024;

/// How often a page is looked for whose frame has no mapping left.
const MAX_PAGEMAP_READS: usize = 4;

/// A region is sparse if less than one page in so many is resident.
const SPARSE_RATIO: u64 = 8;

/// Collects the frames of one process after the other.
pub struct FrameLedger<'h> {
    host: &'h dyn Host,
    table: FrameTable,
    frames: Frames,
}

impl<'h> FrameLedger<'h> {
    /// A ledger without entries.
    pub fn new(host: &'h dyn Host) -> Self {
        Self { host, table: FrameTable::default(), frames: Frames::default() }
    }

    /// Enter all resident pages of a process, whose regions were read just before.
    ///
    /// `Denied` without the privilege to see frame numbers: an estimate is then all there is. `Vanished` if it ended
    /// meanwhile. Either way the process is in [`Frames::unread`].
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

    /// What all the processes map.
    pub fn finish(mut self) -> Frames {
        for cell in self.table.counts() {
            if let Some(mappings) = NonZeroU64::new(cell.kernel_mappings) {
                self.frames.unseen.add(mappings, cell.kernel_mappings.saturating_sub(cell.seen_mappings));
            }
        }
        self.frames
    }

    /// Count a frame that a process maps in so many places.
    fn count_frame(&mut self, pfn: Pfn, mappings: NonZeroU64, flags: FrameFlags, page_count: u64) {
        let frames = &mut self.frames;
        self.table.update(pfn, |before| {
            if before.kernel_mappings == 0 {
                frames.distinct += Pages(1);
                frames.anonymous += Pages(u64::from(flags.is_anonymous() && !flags.is_hugetlb()));
                frames.hugetlb += Pages(u64::from(flags.is_hugetlb()));
                frames.ksm += Pages(u64::from(flags.is_ksm()));
            } else if before.kernel_mappings != mappings.get() {
                frames.changed_mappings += Pages(page_count);
            }
            if flags.is_ksm() {
                // The newest count holds.
                frames.ksm_mappings =
                    frames.ksm_mappings.saturating_sub(Pages(before.kernel_mappings)) + Pages(mappings.get());
            }
            let seen = before.seen_mappings + page_count;
            // What an older, larger count allowed is no excess but has moved.
            frames.excess.add(mappings, page_count.min(seen.saturating_sub(mappings.get())));
            FrameCount { kernel_mappings: mappings.get(), seen_mappings: seen.min(mappings.get()) }
        });
    }
}

/// One process being entered.
struct LedgerEntry<'l, 'h, 'p> {
    ledger: &'l mut FrameLedger<'h>,
    process: &'p dyn ProcessHandle,
    mapped: MappedPages,
    pending: Vec<PendingPage>,
}

/// A page whose frame's count is still to be asked for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PendingPage {
    frame: Pfn,
    address: u64,
    /// Whether it is in a mapping of the engine's store, and was not written since.
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
                Some(open) if run.end.saturating_sub(open.start) <= self.batch_bytes() => {
                    Some(AddressRange { start: open.start, end: run.end })
                }
                full => {
                    full.map_or(Ok(()), |full| self.add_range(full, false))?;
                    Some(run)
                }
            };
        }
        window.map_or(Ok(()), |last| self.add_range(last, false))
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

    /// Which frames the pages of a range are in.
    fn read_frames(&mut self, range: AddressRange, in_engine_store: bool) -> Reading<()> {
        let addresses = (range.start..).step_by(self.ledger.host.page_size().bytes() as usize);
        for (address, PagemapEntry { present, frame, file, .. }) in addresses.zip(self.process.mappings(range)?) {
            if present {
                // The kernel hides frame numbers from those without CAP_SYS_ADMIN.
                let frame = frame.ok_or(Absent::Denied)?;
                self.pending.push(PendingPage { frame, address, in_engine_store: in_engine_store && file });
            }
        }
        Ok(())
    }

    /// Enter the pending frames. On an error none of those is entered whose counts were not read before.
    fn count_pending(&mut self) -> Reading<()> {
        let page = self.ledger.host.page_size().bytes();
        let mut lost = self.count_pending_once()?;
        for _ in 1..MAX_PAGEMAP_READS {
            lost.sort_unstable_by_key(|lost| lost.address);
            for run in lost.chunk_by(|a, b| a.address + page == b.address && a.in_engine_store == b.in_engine_store) {
                let (first, last, before) = (run[0], run[run.len() - 1], self.pending.len());
                self.read_frames(
                    AddressRange { start: first.address, end: last.address + page },
                    first.in_engine_store,
                )?;
                self.mapped.gone += Pages((run.len() + before - self.pending.len()) as u64);
            }
            lost = self.count_pending_once()?;
        }
        self.mapped.gone += Pages(lost.len() as u64);
        Ok(())
    }

    /// Ask for the counts and flags of the pending frames and enter them, but for those that have no mapping left:
    /// these are returned. On an error none of them is entered.
    fn count_pending_once(&mut self) -> Reading<Vec<PendingPage>> {
        self.pending.sort_unstable();
        let of_one = |a: &PendingPage, b: &PendingPage| a.frame == b.frame;
        let frames: Vec<Pfn> = self.pending.chunk_by(of_one).map(|same| same[0].frame).collect();
        let mut lost = Vec::new();
        if frames.is_empty() {
            return Ok(lost);
        }
        let mappings = vanished_to_malformed(self.ledger.host.frame_mappings(&frames))?;
        let flags = vanished_to_malformed(self.ledger.host.frame_flags(&frames))?;
        for ((same, mappings), flags) in self.pending.chunk_by(of_one).zip(mappings).zip(flags) {
            let (pfn, places) = (same[0].frame, same.len() as u64);
            if flags.is_zero_page() {
                let zeros = if flags.is_thp() { &mut self.mapped.huge_zero } else { &mut self.mapped.zero };
                *zeros += Pages(places);
                continue;
            }
            let Some(mappings) = NonZeroU64::new(mappings) else {
                lost.extend_from_slice(same);
                continue;
            };
            self.mapped.shares.add(mappings, places);
            self.mapped.engine.add(mappings, same.iter().filter(|page| page.in_engine_store).count() as u64);
            if flags.is_ksm() {
                self.mapped.ksm.add(mappings, places);
            }
            if flags.is_hugetlb() {
                self.mapped.hugetlb += Pages(places);
            }
            self.ledger.count_frame(pfn, mappings, flags, places);
        }
        self.pending.clear();
        Ok(lost)
    }
}

/// Whether frames may be looked at.
pub fn check_frames_readable(host: &dyn Host) -> Reading<()> {
    vanished_to_malformed(host.frame_mappings(&[]))
        .and_then(|_| vanished_to_malformed(host.frame_flags(&[])))
        .map(|_| ())
}

/// A frame does not go away: where it cannot be found, the process that maps it has not vanished.
fn vanished_to_malformed<T>(reading: Reading<T>) -> Reading<T> {
    reading.map_err(|why| match why {
        Absent::Vanished => Absent::Malformed("no such frame".to_owned()),
        why => why,
    })
}

/// Whether most of a region is empty, all that is in it is anonymous, and it is large enough for that to matter.
fn is_sparse(region: &Region, batch: u64) -> bool {
    let size = region.range.bytes().0;
    let anonymous = region.inode == 0 && region.permissions[3] == b'p' && region.hugetlb == Bytes::ZERO;
    anonymous && size > batch && region.rss.0 < size / SPARSE_RATIO
}

/// What is known of a frame.
#[derive(Clone, Copy, Default)]
struct FrameCount {
    /// Its mappings by the kernel's latest count; 0 if it was not seen.
    kernel_mappings: u64,
    /// How many of them were seen; never more.
    seen_mappings: u64,
}

/// Cells by frame number: two bytes each, in blocks of neighbouring frames.
#[derive(Default)]
struct FrameTable {
    blocks: BTreeMap<u64, Box<[[u8; 2]]>>,
    /// Cells that do not fit two bytes.
    large_counts: BTreeMap<Pfn, FrameCount>,
}

/// The frames of a block.
const FRAMES_PER_BLOCK: u64 = 1 << 15;

/// In place of the number of mappings: look in `large`.
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
