//! The index: every resident page with its fingerprint and class. A page takes 13 bytes plus a share of the 8 bytes of
//! its run. A page that shares the frame of an earlier page takes 8 more, and so does an order key.

use crate::Error;
use crate::scan_scope::{ScanPart, ScanScope, Subject, read_method};
use pagefold_base::{Absent, AddressRange, Fingerprint, OrderKey, PageClass, Pfn, Reading};
use pagefold_host::{Host, PageRun, ReadMethod};
use pagefold_sys::advise::prefer_huge_pages;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// A fingerprint and the ordinal of its page, packed into 12 bytes. Sorts by fingerprint, then by ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    high: u32,
    low: u32,
    /// The ordinal of the page.
    pub ordinal: u32,
}

impl IndexEntry {
    /// The slot of a page that was not read. No page has this ordinal.
    pub const EMPTY: Self = Self { high: 0, low: 0, ordinal: u32::MAX };

    /// Packs a fingerprint and an ordinal.
    pub fn new(fingerprint: Fingerprint, ordinal: u32) -> Self {
        Self { high: (fingerprint.0 >> 32) as u32, low: fingerprint.0 as u32, ordinal }
    }

    /// Unpacks the fingerprint.
    pub fn fingerprint(self) -> Fingerprint {
        Fingerprint(u64::from(self.high) << 32 | u64::from(self.low))
    }

    /// One number with the same order: sorting is much faster if the comparison does not branch.
    fn sort_key(self) -> u128 {
        u128::from(self.fingerprint().0) << 32 | u128::from(self.ordinal)
    }
}

impl Ord for IndexEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.sort_key().cmp(&other.sort_key())
    }
}

impl PartialOrd for IndexEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// The state of a page in the census, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageMark(u8);

impl PageMark {
    /// Not read, or not read before the census was stopped.
    pub const NOT_READ: Self = Self(0);
    /// No longer resident when the scan came to it.
    pub const NOT_RESIDENT: Self = Self(1);
    /// Left out of the sample.
    pub const NOT_SAMPLED: Self = Self(2);

    const CLASS_BASE: u8 = 3;
    /// Added to the state of a page that must not be covered. Only zero pages and duplicates can be forbidden. Their
    /// forbidden states follow the state of unique pages.
    const FORBIDDEN_OFFSET: u8 = PageClass::Unique as u8 + 1 - PageClass::Zero as u8;
    const FORBIDDEN_BASE: u8 = Self::CLASS_BASE + PageClass::Zero as u8 + Self::FORBIDDEN_OFFSET;
    const STATE_MASK: u8 = 0x0f;
    const REDUNDANT_BIT: u8 = 0x10;
    const SHARE_SHIFT: u8 = 5;
    const COVERED_BIT: u8 = 0x80;

    /// The mark of a classified page.
    pub fn from_class(class: PageClass) -> Self {
        Self(Self::CLASS_BASE + class as u8)
    }

    /// A duplicate in a group of `copies`. `redundant` is false for the copy that the group keeps.
    pub fn duplicate(class: PageClass, copies: usize, redundant: bool) -> Self {
        let share = match copies {
            ..=2 => 0,
            3 => 1,
            4..=7 => 2,
            _ => 3,
        };
        Self(Self::from_class(class).0 | if redundant { Self::REDUNDANT_BIT } else { 0 } | share << Self::SHARE_SHIFT)
    }

    /// A page whose cached content is unique, or that was read too late to be compared with all other pages. If it was
    /// not read, its entry holds half of the fingerprint ([`Fingerprint::from_half`]).
    pub const CACHED_UNIQUE: Self = Self(Self::CLASS_BASE + PageClass::Unique as u8 + Self::UNCERTAIN_BIT);
    /// A page that was not read because it changed in each recent scan.
    pub const ASSUMED_VOLATILE: Self = Self(Self::CLASS_BASE + PageClass::Volatile as u8 + Self::UNCERTAIN_BIT);
    /// Reuses the share bits: only duplicates have a share.
    const UNCERTAIN_BIT: u8 = 1 << Self::SHARE_SHIFT;

    /// Whether the current content of the page is unknown or was not compared with all pages: the mark is
    /// [`Self::CACHED_UNIQUE`] or [`Self::ASSUMED_VOLATILE`].
    pub fn is_uncertain(self) -> bool {
        [Self::CACHED_UNIQUE.0, Self::ASSUMED_VOLATILE.0].contains(&(self.0 & !Self::COVERED_BIT))
    }

    /// Every possible mark, in the order of its bits.
    pub(crate) fn all_values() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self)
    }

    /// The byte of the mark, as an array position.
    pub(crate) fn bits(self) -> usize {
        usize::from(self.0)
    }

    /// The class, if the page was read.
    pub fn class(self) -> Option<PageClass> {
        let state = self.0 & Self::STATE_MASK;
        let state = if self.is_forbidden() { state - Self::FORBIDDEN_OFFSET } else { state };
        PageClass::ALL.get(usize::from(state.checked_sub(Self::CLASS_BASE)?)).copied()
    }

    /// Whether the page was read.
    pub fn was_read(self) -> bool {
        self.0 & Self::STATE_MASK >= Self::CLASS_BASE
    }

    /// Whether guided enrollment must not cover the page because another trust domain may merge its content.
    pub fn is_forbidden(self) -> bool {
        self.0 & Self::STATE_MASK >= Self::FORBIDDEN_BASE
    }

    /// The mark with the forbidden state, for zero pages and duplicates. Other marks stay unchanged.
    pub fn with_forbidden(self) -> Self {
        let forbids = !self.is_forbidden() && self.class().is_some_and(PageClass::is_mergeable);
        Self(if forbids { self.0 + Self::FORBIDDEN_OFFSET } else { self.0 })
    }

    /// Whether the page is a duplicate other than the copy that its group keeps.
    pub fn is_redundant(self) -> bool {
        self.0 & Self::REDUNDANT_BIT != 0
    }

    /// Whether a guided enrollment would cover the page.
    pub fn is_covered(self) -> bool {
        self.0 & Self::COVERED_BIT != 0
    }

    /// The mark with the covered bit set.
    pub fn with_covered(self) -> Self {
        Self(self.0 | Self::COVERED_BIT)
    }

    /// The share of the page, in 64ths, that is freed when its whole group is merged. It is 64 for a zero page and `1 -
    /// 1/n` for a page in a group of `n`, with `n` rounded down to 2, 3, 4 or 8.
    pub fn freed_64ths(self) -> i64 {
        match self.class() {
            Some(PageClass::Zero) => 64,
            Some(class) if class.is_duplicate() => [32, 42, 48, 56][usize::from(self.0 >> Self::SHARE_SHIFT & 3)],
            _ => 0,
        }
    }
}

/// A run of consecutive pages: its first page within the area, with a bit for huge pages, and its first ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedRun {
    page_and_huge_bit: u32,
    first_ordinal: u32,
}

const HUGE_PAGE_BIT: u32 = 1 << 31;

/// A part of a region, small enough for 31-bit page numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionArea {
    subject: u32,
    region: u32,
    base_address: u64,
    first_run: u32,
}

/// Every resident page that KSM can take. Pages are numbered by subject, then by address.
#[derive(Debug)]
pub struct PageIndex {
    page_bytes: u64,
    areas: Vec<RegionArea>,
    runs: Vec<PackedRun>,
    /// Ordinal of the first page of each subject, then the number of all pages.
    first_ordinals: Vec<u32>,
    /// While pages are read, in the order of ordinals. Afterwards the entries that may have a duplicate come first,
    /// sorted by fingerprint. The others follow in the order of ordinals until they are dropped.
    pub(crate) entries: Vec<IndexEntry>,
    /// Number of entries that may have a duplicate.
    pub(crate) candidate_count: usize,
    marks: Vec<AtomicU8>,
    /// The NUMA node of each page, if pages of different nodes are kept apart.
    nodes: Vec<AtomicU8>,
    /// The order key of each page, 0 for none, if these are kept.
    order_keys: Vec<AtomicU64>,
    /// Pages that other processes map too, with their frames, until [`Self::resolve_repeated_frames`].
    shared_mappings: Vec<(Pfn, u32)>,
    /// Pages that share the frame of an earlier page, with that page; sorted.
    repeated_frames: Vec<(u32, u32)>,
    /// Pages that other processes map too, but whose frames cannot be read.
    pub(crate) unknown_shared_frames: u64,
    unlisted_subjects: Vec<(usize, Absent)>,
    /// The addresses of each subject that were listed, ascending and disjoint.
    scanned_ranges: Vec<Vec<AddressRange>>,
}

/// Consecutive pages of one subject that are read by one method.
#[derive(Clone, Debug)]
pub struct ScanUnit {
    /// Position of the subject in the scan scope.
    pub subject: usize,
    /// How to read the pages.
    pub method: ReadMethod,
    /// Ordinals of the pages.
    pub ordinals: Range<u32>,
}

/// The pages of a region.
#[derive(Clone, Debug)]
pub struct RegionPages {
    /// Position of the subject in the scan scope.
    pub subject: usize,
    /// Position of the region in the subject.
    pub region: usize,
    /// Ordinals of the pages.
    pub ordinals: Range<u32>,
}

/// Pages of a unit: 64 MiB of base pages, which takes some milliseconds to read.
const PAGES_PER_UNIT: u32 = 1 << 14;

/// Parts end at multiples of this many pages: 2 MiB of pages of 4 KiB. It is a multiple of what the fingerprint cache
/// and huge pages of x86-64 divide memory into.
pub const PART_STEP_PAGES: u64 = 512;

/// Steps that are listed at a time: 1 GiB of pages of 4 KiB.
const STEPS_PER_LISTING: u64 = 512;

/// Entries dropped at a time: 1.5 MiB.
const ENTRIES_PER_RELEASE: usize = 1 << 17;

impl PageIndex {
    /// An index without pages.
    fn empty(page_len: u64) -> Self {
        Self {
            page_bytes: page_len,
            areas: Vec::new(),
            runs: Vec::new(),
            first_ordinals: vec![0],
            entries: Vec::new(),
            candidate_count: 0,
            marks: Vec::new(),
            nodes: Vec::new(),
            order_keys: Vec::new(),
            shared_mappings: Vec::new(),
            repeated_frames: Vec::new(),
            unknown_shared_frames: 0,
            unlisted_subjects: Vec::new(),
            scanned_ranges: Vec::new(),
        }
    }

    /// Lists the resident pages of the scan scope.
    pub fn build(host: &dyn Host, scope: &ScanScope, separate_nodes: bool) -> Result<Self, Error> {
        let mut index = Self::empty(host.page_size().bytes());
        let mut pages = 0;
        // Subjects are processed in small batches, so that only a batch of unpacked runs is in memory.
        for (chunk, subjects) in scope.subjects.chunks(64).enumerate() {
            let runs_by_subject: Vec<_> =
                subjects.par_iter().map(|subject| list_resident_runs(host, subject)).collect();
            for (i, (subject, runs)) in subjects.iter().zip(runs_by_subject).enumerate() {
                let position = chunk * 64 + i;
                match runs {
                    Ok((runs, scanned)) => {
                        pages = index.add_runs(position, subject, &runs, pages);
                        index.scanned_ranges.push(scanned);
                    }
                    Err(why) => {
                        index.unlisted_subjects.push((position, why));
                        index.scanned_ranges.push(subject.parts.iter().map(|part| part.range).collect());
                    }
                }
                if pages > u64::from(u32::MAX) {
                    return Err(Error::TooManyPages(pages));
                }
                index.first_ordinals.push(pages as u32);
            }
        }
        index.areas.shrink_to_fit();
        index.runs.shrink_to_fit();
        let pages = pages as usize;
        let no_memory = |_| Error::NoMemory(pages);
        index.entries.try_reserve_exact(pages).map_err(no_memory)?;
        index.marks.try_reserve_exact(pages).map_err(no_memory)?;
        // The advice is best effort.
        let _ = prefer_huge_pages(index.entries.spare_capacity_mut());
        let _ = prefer_huge_pages(index.marks.spare_capacity_mut());
        // In parallel, because the page faults of new memory dominate the cost.
        index.entries.par_extend((0..pages).into_par_iter().map(|_| IndexEntry::EMPTY));
        let zeroed = || AtomicU8::new(PageMark::NOT_READ.0);
        index.marks.par_extend((0..pages).into_par_iter().map(|_| zeroed()));
        index.nodes.par_extend((0..if separate_nodes { pages } else { 0 }).into_par_iter().map(|_| zeroed()));
        Ok(index)
    }

    /// Make room for the order keys of all pages.
    pub(crate) fn keep_order_keys(&mut self) -> Result<(), Error> {
        let pages = self.page_count();
        self.order_keys.try_reserve_exact(pages).map_err(|_| Error::NoMemory(pages))?;
        self.order_keys.par_extend((0..pages).into_par_iter().map(|_| AtomicU64::new(0)));
        Ok(())
    }

    /// Numbers the pages of a subject's runs, starting at `pages`. Returns the next number.
    fn add_runs(&mut self, position: usize, subject: &Subject, runs: &[PageRun], mut pages: u64) -> u64 {
        let mut regions = subject.regions.iter().enumerate().peekable();
        for run in runs {
            while regions.next_if(|(_, (region, _))| region.range.end <= run.address).is_some() {}
            let Some((region, _)) = regions.peek() else { break };
            let fits = |area: &RegionArea| {
                area.subject == position as u32
                    && area.region == *region as u32
                    && (run.address - area.base_address) / self.page_bytes < u64::from(HUGE_PAGE_BIT)
            };
            if !self.areas.last().is_some_and(fits) {
                let runs = self.runs.len() as u32;
                self.areas.push(RegionArea {
                    subject: position as u32,
                    region: *region as u32,
                    base_address: run.address,
                    first_run: runs,
                });
            }
            let base = self.areas.last().map_or(0, |area| area.base_address);
            let page = ((run.address - base) / self.page_bytes) as u32 | if run.huge { HUGE_PAGE_BIT } else { 0 };
            self.runs.push(PackedRun { page_and_huge_bit: page, first_ordinal: pages as u32 });
            pages += u64::from(run.pages);
        }
        pages
    }

    /// The number of pages.
    pub fn page_count(&self) -> usize {
        self.marks.len()
    }

    /// The size of a page in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> usize {
        self.areas.capacity() * size_of::<RegionArea>()
            + self.runs.capacity() * size_of::<PackedRun>()
            + self.entries.capacity() * size_of::<IndexEntry>()
            + self.marks.capacity()
            + self.nodes.capacity()
            + self.order_keys.capacity() * size_of::<AtomicU64>()
            + self.repeated_frames.capacity() * size_of::<(u32, u32)>()
    }

    /// Subjects whose pages could not be listed, with the reason.
    pub fn unlisted_subjects(&self) -> &[(usize, Absent)] {
        &self.unlisted_subjects
    }

    /// The addresses of a subject that were listed, ascending and disjoint. They are all addresses of a process that is
    /// scanned whole; a part ends where the next one begins.
    pub fn scanned_ranges(&self, subject: usize) -> &[AddressRange] {
        &self.scanned_ranges[subject]
    }

    /// The position of the subject that a page belongs to.
    pub fn subject_of_page(&self, ordinal: u32) -> usize {
        self.first_ordinals.partition_point(|&first| first <= ordinal) - 1
    }

    /// The mark of a page.
    pub fn mark(&self, ordinal: u32) -> PageMark {
        PageMark(self.marks[ordinal as usize].load(Ordering::Relaxed))
    }

    /// Sets the mark of a page. Only one thread at a time marks a page, and no other memory access depends on the
    /// order.
    pub fn set_mark(&self, ordinal: u32, mark: PageMark) {
        self.marks[ordinal as usize].store(mark.0, Ordering::Relaxed);
    }

    /// The NUMA node of a page; 0 where pages of different nodes are not kept apart.
    pub fn node(&self, ordinal: u32) -> u8 {
        self.nodes.get(ordinal as usize).map_or(0, |node| node.load(Ordering::Relaxed))
    }

    /// Sets the NUMA node of a page.
    pub fn set_node(&self, ordinal: u32, node: u8) {
        if let Some(stored) = self.nodes.get(ordinal as usize) {
            stored.store(node, Ordering::Relaxed);
        }
    }

    /// Whether order keys are kept.
    pub fn has_order_keys(&self) -> bool {
        !self.order_keys.is_empty()
    }

    /// The order key of a page whose bytes were read, if keys are kept and it is not a page of zeros.
    pub fn order_key(&self, ordinal: u32) -> Option<OrderKey> {
        OrderKey::from_bits(self.order_keys.get(ordinal as usize)?.load(Ordering::Relaxed))
    }

    /// Record the order key of a page, if keys are kept.
    pub(crate) fn set_order_key(&self, ordinal: u32, page: &[u8]) {
        if let Some(stored) = self.order_keys.get(ordinal as usize) {
            stored.store(OrderKey::to_bits(OrderKey::of_page(page)), Ordering::Relaxed);
        }
    }

    /// All entries, until those without a duplicate are dropped.
    pub fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }

    /// The entries that may have a duplicate, sorted by fingerprint once all pages are read.
    pub fn paired(&self) -> &[IndexEntry] {
        &self.entries[..self.candidate_count]
    }

    /// Adds the frames of pages that other processes map too.
    pub(crate) fn add_shared_mappings(&mut self, shared: Vec<(Pfn, u32)>) {
        self.shared_mappings.extend(shared);
    }

    /// Finds the pages that share a frame, so that each frame counts once.
    pub(crate) fn resolve_repeated_frames(&mut self) {
        let mut shared = std::mem::take(&mut self.shared_mappings);
        shared.par_sort_unstable();
        let frames = shared.chunk_by(|a, b| a.0 == b.0);
        self.repeated_frames =
            frames.flat_map(|pages| pages[1..].iter().map(|&(_, page)| (page, pages[0].1))).collect();
        self.repeated_frames.shrink_to_fit();
        self.repeated_frames.par_sort_unstable();
    }

    /// Drops the contents that only one page has. Plans do not need them.
    pub fn drop_unique_entries(&mut self) {
        self.drain_unique_entries(|_, _| {});
    }

    /// Visits the contents that only one page has, from the last page to the first, and drops them in portions. The
    /// caller can fill other memory meanwhile.
    pub(crate) fn drain_unique_entries(&mut self, mut visit: impl FnMut(&Self, IndexEntry)) {
        loop {
            self.entries.shrink_to_fit();
            let new_len = self.candidate_count.max(self.entries.len().saturating_sub(ENTRIES_PER_RELEASE));
            if new_len == self.entries.len() {
                return;
            }
            self.entries[new_len..].iter().rev().for_each(|entry| visit(self, *entry));
            self.entries.truncate(new_len);
        }
    }

    /// Pages that share the frame of an earlier page since a fork, with that page; sorted.
    pub fn repeated_frames(&self) -> &[(u32, u32)] {
        &self.repeated_frames
    }

    /// The first page with the same frame: the page itself, unless processes share the frame since a fork.
    pub fn first_page_of_frame(&self, ordinal: u32) -> u32 {
        let position = self.repeated_frames.binary_search_by_key(&ordinal, |&(page, _)| page);
        position.map_or(ordinal, |position| self.repeated_frames[position].1)
    }

    /// The regions with pages, in the order of their ordinals.
    pub fn regions(&self) -> impl Iterator<Item = RegionPages> + '_ {
        let region = |area: &RegionArea| (area.subject as usize, area.region as usize);
        let mut areas = self.areas.iter().peekable();
        std::iter::from_fn(move || {
            let first = areas.next()?;
            let (subject, position) = region(first);
            while areas.next_if(|area| region(area) == (subject, position)).is_some() {}
            let end =
                areas.peek().map_or(self.page_count() as u32, |next| self.runs[next.first_run as usize].first_ordinal);
            let start = self.runs[first.first_run as usize].first_ordinal;
            Some(RegionPages { subject, region: position, ordinals: start..end })
        })
    }

    /// The ordinals of a subject's pages.
    pub fn subject_ordinals(&self, subject: usize) -> Range<u32> {
        self.first_ordinals[subject]..self.first_ordinals[subject + 1]
    }

    /// The runs of the given consecutive pages, clipped to them, each with its first ordinal.
    pub fn runs(&self, ordinals: Range<u32>) -> impl Iterator<Item = (PageRun, u32)> + '_ {
        let start = self.runs.partition_point(|run| run.first_ordinal <= ordinals.start).saturating_sub(1);
        let end = self.runs.partition_point(|run| run.first_ordinal < ordinals.end);
        let mut area = self.areas.partition_point(|area| area.first_run as usize <= start).saturating_sub(1);
        (start..end.max(start)).filter_map(move |position| {
            while self.areas.get(area + 1).is_some_and(|next| next.first_run as usize <= position) {
                area += 1;
            }
            let packed = self.runs[position];
            let next_ordinal = self.runs.get(position + 1).map_or(self.page_count() as u32, |next| next.first_ordinal);
            let (first, end) = (packed.first_ordinal.max(ordinals.start), next_ordinal.min(ordinals.end));
            let page = u64::from(packed.page_and_huge_bit & !HUGE_PAGE_BIT) + u64::from(first - packed.first_ordinal);
            let address = self.areas[area].base_address + page * self.page_bytes;
            let pages = end.checked_sub(first).filter(|&pages| pages > 0)?;
            Some((PageRun { address, pages, huge: packed.page_and_huge_bit & HUGE_PAGE_BIT != 0 }, first))
        })
    }

    /// The position of a page: its subject and region in the scan scope, and its address.
    pub fn locate(&self, ordinal: u32) -> Option<(usize, usize, u64)> {
        let position = self.runs.partition_point(|run| run.first_ordinal <= ordinal).checked_sub(1)?;
        let area =
            &self.areas[self.areas.partition_point(|area| area.first_run as usize <= position).checked_sub(1)?];
        let run = self.runs[position];
        let page = u64::from(run.page_and_huge_bit & !HUGE_PAGE_BIT) + u64::from(ordinal - run.first_ordinal);
        Some((area.subject as usize, area.region as usize, area.base_address + page * self.page_bytes))
    }

    /// Divides the pages into units for the scan threads.
    pub fn scan_units(&self, scope: &ScanScope) -> Vec<ScanUnit> {
        let mut units: Vec<ScanUnit> = Vec::new();
        for RegionPages { subject, region, mut ordinals } in self.regions() {
            let method = read_method(&scope.subjects[subject].regions[region].0);
            while !ordinals.is_empty() {
                let room = match units.last() {
                    Some(unit) if unit.subject == subject && unit.method == method => {
                        PAGES_PER_UNIT - unit.ordinals.len() as u32
                    }
                    _ => 0,
                };
                if room == 0 {
                    units.push(ScanUnit { subject, method, ordinals: ordinals.start..ordinals.start });
                    continue;
                }
                let unit = units.last_mut().expect("a unit exists or was just pushed");
                ordinals.start += room.min(ordinals.len() as u32);
                unit.ordinals.end = ordinals.start;
            }
        }
        units
    }
}

/// The resident pages of the parts of a subject, in regions that KSM can take, and the addresses that they cover.
fn list_resident_runs(host: &dyn Host, subject: &Subject) -> Reading<(Vec<PageRun>, Vec<AddressRange>)> {
    let (mut runs, mut scanned) = (Vec::new(), Vec::<AddressRange>::new());
    for part in &subject.parts {
        let start = scanned.last().map_or(part.range.start, |last| last.end.max(part.range.start));
        let range = AddressRange { start, end: part.range.end };
        let (part_runs, end) = list_part(host, subject, ScanPart { range, ..*part })?;
        runs.extend(part_runs);
        scanned.extend(Some(AddressRange { start, end }).filter(|range| range.start < range.end));
    }
    Ok((runs, scanned))
}

/// The resident pages of a part, and the address at which it ends.
fn list_part(host: &dyn Host, subject: &Subject, part: ScanPart) -> Reading<(Vec<PageRun>, u64)> {
    let eligible = subject.regions.iter().filter(|(region, reason)| reason.is_none() && region.anonymous.0 > 0);
    let ranges: Vec<_> = eligible.filter_map(|(region, _)| region.range.overlap(part.range)).collect();
    if ranges.is_empty() {
        return Ok((Vec::new(), part.range.end));
    }
    let handle = pagefold_host::hold(host, subject.process.id)?;
    if part.max_bytes == ScanPart::WHOLE.max_bytes {
        return Ok((handle.resident(&ranges)?, part.range.end));
    }
    let page_bytes = host.page_size().bytes();
    let (step_bytes, max_pages) = (PART_STEP_PAGES * page_bytes, part.max_bytes.0 / page_bytes);
    let (mut runs, mut pages) = (Vec::new(), 0);
    // The page tables of the rest of the process are not walked.
    for range in ranges.iter().flat_map(|range| range.cut_at_multiples(STEPS_PER_LISTING * step_bytes)) {
        for run in handle.resident(&[range])? {
            let end = run.address + u64::from(run.pages) * page_bytes;
            for step in (AddressRange { start: run.address, end }).cut_at_multiples(step_bytes) {
                let is_new_step = step.start.is_multiple_of(step_bytes)
                    || runs.last().is_none_or(|last: &PageRun| last.address / step_bytes != step.start / step_bytes);
                if is_new_step && pages >= max_pages && pages > 0 {
                    return Ok((runs, step.start / step_bytes * step_bytes));
                }
                let step_pages = step.bytes().0 / page_bytes;
                runs.push(PageRun { address: step.start, pages: step_pages as u32, ..run });
                pages += step_pages;
            }
        }
    }
    Ok((runs, part.range.end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_entries_are_drained_once_and_freed() {
        let entry = |page: u32| IndexEntry::new(Fingerprint(u64::from(page)), page);
        for (paired, alone) in
            [(0, 0), (3, 0), (0, 5), (7, ENTRIES_PER_RELEASE as u32), (2, 2 * ENTRIES_PER_RELEASE as u32 + 9)]
        {
            let mut index = PageIndex::empty(4096);
            index.candidate_count = paired as usize;
            index.entries.reserve(4 * ENTRIES_PER_RELEASE);
            index.entries.extend((0..paired + alone).map(entry));
            let mut drained = Vec::new();
            index.drain_unique_entries(|_, entry| drained.push(entry.ordinal));
            assert!(drained.iter().copied().eq((paired..paired + alone).rev()), "{paired} and {alone}");
            assert!(index.entries.iter().copied().eq((0..paired).map(entry)));
            assert!(index.entries.capacity() < ENTRIES_PER_RELEASE, "{}", index.entries.capacity());
            index.drain_unique_entries(|_, _| panic!("all unique entries were drained before"));
        }
    }

    #[test]
    fn page_marks_keep_class_when_forbidden_or_covered() {
        for class in PageClass::ALL {
            let mark = PageMark::from_class(class);
            assert_eq!((mark.class(), mark.is_forbidden()), (Some(class), false));
            let forbidden = mark.with_forbidden();
            assert_eq!((forbidden.class(), forbidden.is_forbidden()), (Some(class), class.is_mergeable()));
            assert_eq!(forbidden.with_forbidden(), forbidden);
        }
        let mark = PageMark::duplicate(PageClass::DuplicateAcrossDomains, 9, true).with_forbidden();
        assert!(mark.is_redundant() && mark.was_read() && !mark.is_covered() && mark.with_covered().is_covered());
        assert_eq!(mark.with_covered().class(), Some(PageClass::DuplicateAcrossDomains));
        assert_eq!(PageMark::NOT_SAMPLED.with_forbidden(), PageMark::NOT_SAMPLED);
        for (mark, class) in
            [(PageMark::CACHED_UNIQUE, PageClass::Unique), (PageMark::ASSUMED_VOLATILE, PageClass::Volatile)]
        {
            assert_eq!((mark.class(), mark.is_redundant(), mark.is_forbidden()), (Some(class), false, false));
        }
        let uncertain =
            [PageMark::CACHED_UNIQUE, PageMark::ASSUMED_VOLATILE].map(|mark| [mark, mark.with_covered()]).concat();
        assert!(PageMark::all_values().all(|mark| mark.is_uncertain() == uncertain.contains(&mark)));
    }
}
