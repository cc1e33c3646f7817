//! Memory as the kernel maps it: processes, VMAs, page table entries and frames.
//!
//! A page's content is a number whose order is the order of the contents by memcmp; 0 is a page of zeros. A page that
//! one process maps and ksmd did not merge takes four bytes at most, and its frame is implied. Frames with several
//! mappings and merged frames are numbered. Neighboring pages share a record where they can ([`EntryRuns`]).
//!
//! Limits: private anonymous memory only; frames are never swapped out, and merged ones never migrate; a fork turns the
//! parent's huge pages into base pages.

use std::collections::BTreeMap;
use std::ops::Range;

use super::entry_runs::{EntryRun, EntryRuns};
use pagefold_base::memory::MemoryPolicy;

/// A page's content. Its order is that of memcmp.
pub type Content = u32;

/// The content of a page of zeros.
pub const ZERO_CONTENT: Content = 0;

/// A frame with several mappings, or a merged one.
pub type FrameId = u32;

/// A process of the model. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimulatedProcessId(pub u32);

/// Numbers of pages are below this number.
pub const PAGE_LIMIT: u64 = 1 << PageKey::PAGE_BITS;

/// A page of a process in one number; pages of one process have ascending numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageKey(u64);

impl PageKey {
    const PAGE_BITS: u32 = 40;
    pub(crate) const FIRST_KEY: Self = Self(0);
    pub(crate) const LAST_KEY: Self = Self(u64::MAX);

    /// The number of a page.
    #[must_use]
    pub fn new(process: SimulatedProcessId, page: u64) -> Self {
        Self(u64::from(process.0) << Self::PAGE_BITS | page)
    }

    /// The process.
    #[must_use]
    pub fn process(self) -> SimulatedProcessId {
        SimulatedProcessId((self.0 >> Self::PAGE_BITS) as u32)
    }

    /// The page in the process.
    #[must_use]
    pub fn page(self) -> u64 {
        self.0 % PAGE_LIMIT
    }

    /// A later page of the process.
    #[must_use]
    pub fn plus(self, pages: u64) -> Self {
        Self(self.0 + pages)
    }
}

/// Base pages in a huge page of x86-64.
pub const PAGES_IN_HUGE_PAGE: u64 = 512;

const FRAME_TAG: u32 = 1 << 31;
const HUGE_TAG: u32 = 1 << 30;
/// Codes below are no content.
const FIRST_CONTENT_CODE: u32 = 3;
/// Contents are below this number.
pub const CONTENT_LIMIT: Content = HUGE_TAG - FIRST_CONTENT_CODE;

/// A page table entry in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedEntry(u32);

/// What a page table entry maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageEntry {
    /// Nothing.
    Absent,
    /// The zero page, after a read.
    ZeroPage,
    /// The zero page, mapped by ksmd in place of a page of zeros.
    KsmZeroPage,
    /// A base page that no other process maps.
    Private(Content),
    /// A part of a huge page.
    HugePart(Content),
    /// A numbered frame.
    Frame(FrameId),
}

impl PackedEntry {
    /// Pack an entry.
    ///
    /// # Panics
    /// If a content is not below [`CONTENT_LIMIT`].
    #[must_use]
    pub fn pack(entry: PageEntry) -> Self {
        let code = |content: Content| {
            assert!(content < CONTENT_LIMIT, "content {content} is too large");
            content + FIRST_CONTENT_CODE
        };
        Self(match entry {
            PageEntry::Absent => 0,
            PageEntry::ZeroPage => 1,
            PageEntry::KsmZeroPage => 2,
            PageEntry::Private(content) => code(content),
            PageEntry::HugePart(content) => code(content) | HUGE_TAG,
            PageEntry::Frame(frame) => frame | FRAME_TAG,
        })
    }

    /// What it maps.
    #[must_use]
    pub fn unpack(self) -> PageEntry {
        match self.0 {
            0 => PageEntry::Absent,
            1 => PageEntry::ZeroPage,
            2 => PageEntry::KsmZeroPage,
            code if code & FRAME_TAG != 0 => PageEntry::Frame(code & !FRAME_TAG),
            code if code & HUGE_TAG != 0 => PageEntry::HugePart((code & !HUGE_TAG) - FIRST_CONTENT_CODE),
            code => PageEntry::Private(code - FIRST_CONTENT_CODE),
        }
    }

    /// The entry with the content or frame that many numbers later.
    #[must_use]
    pub(crate) fn plus(self, numbers: u64) -> Self {
        Self(self.0.wrapping_add(numbers as u32))
    }

    /// Whether both map numbered contents or frames, and of the same kind, or the same thing without a number.
    #[must_use]
    pub(crate) fn is_kind_of(self, other: Self) -> bool {
        let kind = |entry: Self| if entry.is_anonymous() { 3 + (entry.0 >> 30) } else { entry.0 };
        kind(self) == kind(other)
    }

    /// Whether ksmd visits the page: a present anonymous page (`ksm_next_page_pmd_entry`, 6.12).
    #[must_use]
    pub fn is_anonymous(self) -> bool {
        self.0 >= FIRST_CONTENT_CODE
    }
}

/// A numbered frame.
#[derive(Clone, Copy, Debug)]
pub struct Frame {
    /// Its content.
    pub content: Content,
    /// Page table entries that map it. 0 means that it is freed.
    pub mappings: u32,
    /// Whether it is merged, and so has a stable node.
    pub is_merged: bool,
    /// Its NUMA node.
    pub node: u8,
}

/// A region of a process.
#[derive(Clone, Debug)]
pub struct Vma {
    /// The number of the first page.
    pub start: u64,
    /// One entry for each page.
    pub entries: EntryRuns,
    /// `VM_MERGEABLE`.
    pub is_mergeable: bool,
    /// Whether it ever had an anonymous page (`vma->anon_vma`).
    pub has_anonymous: bool,
    /// The NUMA node of its pages whose frames are not numbered.
    pub node: u8,
    /// The NUMA node from which new pages come by the default policy.
    pub default_node: u8,
    /// From which NUMA node new pages come.
    pub policy: MemoryPolicy,
}

impl Vma {
    /// The NUMA node from which new pages come.
    #[must_use]
    pub fn node_of_new_pages(&self) -> u8 {
        match self.policy {
            MemoryPolicy::Default => self.default_node,
            MemoryPolicy::Prefer(node) => u8::try_from(node).unwrap_or(self.default_node),
        }
    }

    /// Pages whose frames are not numbered: those of the process alone.
    #[must_use]
    pub fn own_pages(&self) -> u64 {
        let is_own = |entry: PageEntry| matches!(entry, PageEntry::Private(_) | PageEntry::HugePart(_));
        self.entries.runs().filter(|(_, run)| is_own(run.entry())).map(|(_, run)| run.pages).sum()
    }

    /// What a page of the region is mapped to.
    #[must_use]
    pub fn entry(&self, page: u64) -> PageEntry {
        self.entries.entry(page - self.start)
    }

    /// The run of entries that a page of the region begins.
    #[must_use]
    pub fn run_from(&self, page: u64) -> EntryRun {
        self.entries.run_from(page - self.start)
    }

    /// The number of the page after the last.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.start + self.entries.pages()
    }
}

/// Pages by what they are mapped to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageTotals {
    /// Base pages that no other process maps.
    pub private: u64,
    /// Parts of huge pages.
    pub huge: u64,
    /// Pages with a numbered frame: merged, or shared by a fork.
    pub numbered: u64,
    /// Pages that are mapped to the zero page because they were read, or by a split of a huge page.
    pub zero: u64,
    /// Pages that ksmd mapped to the zero page.
    pub ksm_zero: u64,
}

impl PageTotals {
    /// All resident anonymous pages.
    #[must_use]
    pub fn anonymous(&self) -> u64 {
        self.private + self.huge + self.numbered
    }

    /// All pages that are mapped.
    #[must_use]
    pub fn mapped(&self) -> u64 {
        self.anonymous() + self.zero + self.ksm_zero
    }

    fn of_kind(&mut self, entry: PageEntry) -> Option<&mut u64> {
        match entry {
            PageEntry::Private(_) => Some(&mut self.private),
            PageEntry::HugePart(_) => Some(&mut self.huge),
            PageEntry::Frame(_) => Some(&mut self.numbered),
            PageEntry::ZeroPage => Some(&mut self.zero),
            PageEntry::KsmZeroPage => Some(&mut self.ksm_zero),
            PageEntry::Absent => None,
        }
    }
}

/// A process, or what remains of it until ksmd has forgotten it.
#[derive(Clone, Debug, Default)]
pub struct SimulatedProcess {
    /// Regions by their first page.
    pub vmas: BTreeMap<u64, Vma>,
    /// Its pages, by what they are mapped to.
    pub totals: PageTotals,
    /// False after the exit (`mm_users` is 0).
    pub is_alive: bool,
    /// `MMF_VM_MERGEABLE`: ksmd has it on its list.
    pub is_registered: bool,
    /// `ksm_rmap_items`.
    pub rmap_items: i64,
    /// `ksm_merging_pages`.
    pub merging_pages: i64,
    /// `ksm_zero_pages`.
    pub zero_pages: i64,
}

impl SimulatedProcess {
    /// The region of a page.
    #[must_use]
    pub fn vma_of(&self, page: u64) -> Option<&Vma> {
        self.vmas.range(..=page).next_back().map(|(_, vma)| vma).filter(|vma| page < vma.end())
    }

    fn vma_of_mut(&mut self, page: u64) -> Option<&mut Vma> {
        self.vmas.range_mut(..=page).next_back().map(|(_, vma)| vma).filter(|vma| page < vma.end())
    }

    /// Split the region of `page` before it, unless a region begins there.
    pub(crate) fn split_vma(&mut self, page: u64) {
        let Some(vma) = self.vma_of_mut(page).filter(|vma| vma.start < page) else { return };
        let entries = vma.entries.split_off(page - vma.start);
        let upper = Vma { start: page, entries, ..*vma };
        self.vmas.insert(page, upper);
    }
}

/// All memory.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(crate) processes: Vec<SimulatedProcess>,
    frames: Vec<Frame>,
    unused_frames: Vec<FrameId>,
    stale_frames: u64,
}

impl Memory {
    /// All processes, also those that ended.
    pub fn process_ids(&self) -> impl Iterator<Item = SimulatedProcessId> + '_ {
        (0..self.processes.len() as u32).map(SimulatedProcessId)
    }

    /// A process.
    #[must_use]
    pub fn process(&self, process: SimulatedProcessId) -> &SimulatedProcess {
        &self.processes[process.0 as usize]
    }

    pub(crate) fn process_mut(&mut self, process: SimulatedProcessId) -> &mut SimulatedProcess {
        &mut self.processes[process.0 as usize]
    }

    pub(crate) fn add_process(&mut self, process: SimulatedProcess) -> SimulatedProcessId {
        let id = self.processes.len() as u64;
        assert!(id < 1 << (u64::BITS - PageKey::PAGE_BITS), "fewer than 2^24 processes");
        self.processes.push(process);
        SimulatedProcessId(id as u32)
    }

    /// A numbered frame.
    #[must_use]
    pub fn frame(&self, frame: FrameId) -> &Frame {
        &self.frames[frame as usize]
    }

    pub(crate) fn frame_mut(&mut self, frame: FrameId) -> &mut Frame {
        &mut self.frames[frame as usize]
    }

    pub(crate) fn add_frame(&mut self, frame: Frame) -> FrameId {
        if let Some(id) = self.unused_frames.pop() {
            self.frames[id as usize] = frame;
            return id;
        }
        self.frames.push(frame);
        let id = u32::try_from(self.frames.len() - 1).expect("fewer than 2^31 frames");
        assert!(id < FRAME_TAG, "fewer than 2^31 frames");
        id
    }

    /// Add frames with consecutive numbers. Returns the first.
    pub(crate) fn add_frames(&mut self, frames: impl Iterator<Item = Frame>) -> FrameId {
        let first = self.frames.len() as u64;
        self.frames.extend(frames);
        assert!(self.frames.len() as u64 <= u64::from(FRAME_TAG), "fewer than 2^31 frames");
        first as FrameId
    }

    /// What a page is mapped to; `Absent` outside all regions.
    #[must_use]
    pub fn entry(&self, process: SimulatedProcessId, page: u64) -> PageEntry {
        self.process(process).vma_of(page).map_or(PageEntry::Absent, |vma| vma.entry(page))
    }

    /// The runs of entries of a range, without what is outside all regions.
    pub(crate) fn runs(&self, process: SimulatedProcessId, range: Range<u64>) -> Vec<(u64, EntryRun)> {
        let mut runs = Vec::new();
        let process = self.process(process);
        let mut page = range.start;
        while page < range.end {
            let Some(vma) = process.vma_of(page) else {
                let Some((&start, _)) = process.vmas.range(page..range.end).next() else { break };
                page = start;
                continue;
            };
            let mut run = vma.run_from(page);
            run.pages = run.pages.min(range.end - page);
            runs.push((page, run));
            page += run.pages;
        }
        runs
    }

    /// Change an entry, without any accounting.
    ///
    /// # Panics
    /// If the page is in no region.
    pub(crate) fn set_entry(&mut self, process: SimulatedProcessId, page: u64, entry: PageEntry) {
        self.set_run(process, page, EntryRun::single(entry));
    }

    /// Change the entries of pages of one region, without any accounting.
    ///
    /// # Panics
    /// If a page is not in the region of the first.
    pub(crate) fn set_run(&mut self, process: SimulatedProcessId, page: u64, run: EntryRun) {
        let record = self.process_mut(process);
        let vma = record.vma_of(page).expect("the page is in a region");
        let mut totals = record.totals;
        let (mut offset, end) = (page - vma.start, page - vma.start + run.pages);
        while offset < end {
            let former = vma.entries.run_from(offset);
            let pages = former.pages.min(end - offset);
            totals.of_kind(former.entry()).into_iter().for_each(|total| *total -= pages);
            offset += pages;
        }
        totals.of_kind(run.entry()).into_iter().for_each(|total| *total += run.pages);
        record.totals = totals;
        let vma = record.vma_of_mut(page).expect("the page is in a region");
        vma.entries.fill(page - vma.start, run);
        vma.has_anonymous |= run.first.is_anonymous();
    }

    /// Numbered frames that pages are mapped to.
    #[must_use]
    pub fn used_numbered_frames(&self) -> u64 {
        (self.frames.len() - self.unused_frames.len()) as u64 - self.stale_frames
    }

    /// Whether a numbered frame can migrate to another NUMA node: it is not merged, and one page maps it.
    #[must_use]
    pub fn is_frame_movable(&self, frame: FrameId) -> bool {
        let record = self.frame(frame);
        record.mappings == 1 && !record.is_merged
    }

    /// Put the pages of a range on a NUMA node, but for frames that cannot migrate. Returns the ranges that were elsewhere.
    pub(crate) fn place_pages(&mut self, process: SimulatedProcessId, range: Range<u64>, node: u8) -> Vec<Range<u64>> {
        for (_, run) in self.runs(process, range.clone()) {
            if let PageEntry::Frame(first) = run.entry() {
                let frames = (first..).take(if run.ascends { run.pages as usize } else { 1 });
                for frame in frames.filter(|&frame| self.is_frame_movable(frame)).collect::<Vec<_>>() {
                    self.frame_mut(frame).node = node;
                }
            }
        }
        let record = self.process_mut(process);
        let elsewhere: Vec<Range<u64>> = record
            .vmas
            .values()
            .filter(|vma| vma.node != node)
            .map(|vma| vma.start.max(range.start)..vma.end().min(range.end))
            .filter(|range| !range.is_empty())
            .collect();
        for range in &elsewhere {
            record.split_vma(range.start);
            record.split_vma(range.end);
            record.vma_of_mut(range.start).expect("the page is in a region").node = node;
        }
        elsewhere
    }

    /// The content of an entry.
    #[must_use]
    pub fn content(&self, entry: PageEntry) -> Option<Content> {
        match entry {
            PageEntry::Absent => None,
            PageEntry::ZeroPage | PageEntry::KsmZeroPage => Some(ZERO_CONTENT),
            PageEntry::Private(content) | PageEntry::HugePart(content) => Some(content),
            PageEntry::Frame(frame) => Some(self.frame(frame).content),
        }
    }

    /// The frame of a merged page.
    #[must_use]
    pub fn merged_frame(&self, entry: PageEntry) -> Option<FrameId> {
        if let PageEntry::Frame(frame) = entry {
            Some(frame).filter(|&frame| self.frame(frame).is_merged)
        } else {
            None
        }
    }

    /// One mapping of a frame is gone. A merged frame keeps its number until its stable node is removed.
    pub(crate) fn drop_mapping(&mut self, frame: FrameId) {
        let record = self.frame_mut(frame);
        record.mappings -= 1;
        if record.mappings > 0 {
            return;
        }
        if record.is_merged {
            self.stale_frames += 1;
        } else {
            self.unused_frames.push(frame);
        }
    }

    /// The stable node of a freed frame is removed.
    pub(crate) fn forget_frame(&mut self, frame: FrameId) {
        let record = self.frame_mut(frame);
        record.is_merged = false;
        if record.mappings == 0 {
            self.stale_frames -= 1;
            self.unused_frames.push(frame);
        }
    }

    /// Whether this frame is a merged one that is freed and whose stable node is not yet removed.
    pub(crate) fn is_stale(&self, frame: FrameId) -> bool {
        let record = self.frame(frame);
        record.is_merged && record.mappings == 0
    }

    /// Whether a merged frame is freed and its stable node is not yet removed.
    pub(crate) fn has_stale_frames(&self) -> bool {
        self.stale_frames > 0
    }

    /// Give a private page a numbered frame; a page with one keeps it.
    pub(crate) fn number_frame(&mut self, process: SimulatedProcessId, page: u64) -> FrameId {
        match self.entry(process, page) {
            PageEntry::Frame(frame) => frame,
            PageEntry::Private(content) | PageEntry::HugePart(content) => {
                let node = self.process(process).vma_of(page).map_or(0, |vma| vma.node);
                let frame = self.add_frame(Frame { content, mappings: 1, is_merged: false, node });
                self.set_entry(process, page, PageEntry::Frame(frame));
                frame
            }
            other => unreachable!("{other:?} is not an anonymous page"),
        }
    }

    /// The NUMA node of a page.
    #[must_use]
    pub fn node_of(&self, process: SimulatedProcessId, page: u64) -> u8 {
        match self.entry(process, page) {
            PageEntry::Frame(frame) => self.frame(frame).node,
            _ => self.process(process).vma_of(page).map_or(0, |vma| vma.node),
        }
    }

    /// The first run at or after `from` in a region that ksmd would visit.
    pub(crate) fn next_anonymous(vma: &Vma, mut from: u64) -> Option<(u64, EntryRun)> {
        while from < vma.end() {
            let run = vma.run_from(from);
            if run.first.is_anonymous() {
                return Some((from, run));
            }
            from += run.pages;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_packing() {
        assert_eq!(size_of::<PackedEntry>(), 4);
        let entries = [
            PageEntry::Absent,
            PageEntry::ZeroPage,
            PageEntry::KsmZeroPage,
            PageEntry::Private(0),
            PageEntry::Private(CONTENT_LIMIT - 1),
            PageEntry::HugePart(0),
            PageEntry::HugePart(CONTENT_LIMIT - 1),
            PageEntry::Frame(0),
            PageEntry::Frame(FRAME_TAG - 1),
        ];
        for entry in entries {
            assert_eq!(PackedEntry::pack(entry).unpack(), entry);
        }
    }

    #[test]
    fn splitting_a_region_keeps_its_pages() {
        let mut entries = EntryRuns::absent(4);
        entries.fill(0, EntryRun { pages: 4, ascends: true, ..EntryRun::single(PageEntry::Private(0)) });
        let policy = MemoryPolicy::Prefer(2);
        let vma = Vma { start: 10, entries, is_mergeable: true, has_anonymous: true, node: 1, default_node: 0, policy };
        let mut process = SimulatedProcess { vmas: BTreeMap::from([(10, vma)]), ..SimulatedProcess::default() };
        process.split_vma(10);
        process.split_vma(14);
        assert_eq!(process.vmas.len(), 1);
        process.split_vma(13);
        let bounds: Vec<_> =
            process.vmas.values().map(|vma| (vma.start, vma.end(), vma.is_mergeable, vma.node)).collect();
        assert_eq!(bounds, [(10, 13, true, 1), (13, 14, true, 1)]);
        assert_eq!(process.vmas[&13].node_of_new_pages(), 2, "by the policy");
        assert_eq!(process.vma_of(13).unwrap().entry(13), PageEntry::Private(3));
    }
}
