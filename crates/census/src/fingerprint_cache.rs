//! Fingerprints of unique pages of the selected processes, cached between censuses. A repeated census reads only pages
//! that are new or may have changed.
//!
//! Most pages of a host have no duplicate, and reading them again is most of the cost of a census. The kernel does not
//! report which pages a running process has written, except through page table marks that only one tool at a time can
//! use. The cache therefore works in blocks of 64 pages (256 KiB of 4 KiB pages):
//!
//! - If a block was unchanged in the previous scan, a few of its pages are read. If these are unchanged, the other
//!   pages are assumed to be unchanged too.
//! - The more scans in a row a block was unchanged, the less often it is read in full, down to one scan in 16. A page
//!   that changes alone in its block is therefore detected late.
//! - A page that changed in several scans in a row is assumed to be volatile. It is read in one scan of two, later in
//!   one of eight.
//! - All other pages are read, as are new pages and pages that have a duplicate.
//! - A process that has neither run nor had a page fault since its last scan has changed nothing. This is assumed for
//!   at most one hour, because other processes may write to its memory. It is not assumed of a process that is scanned
//!   in parts, because these were read at different times.
//!
//! A scan of a part of a process leaves the cached pages of its other parts as they are.
//!
//! A cached fingerprint alone decides nothing. A page that may have a duplicate among the scanned pages is read before
//! it counts, together with its block. A page that was not read is not enrolled. A page with a changed content is not
//! enrolled either if it was read too late to be compared with all pages. Enrolled and merged pages are read in each
//! census: they may be merged, or may keep other domains from merging the same content.
//!
//! The cache stores half fingerprints, which collide by chance, and each collision causes a block to be read. In a
//! census of 4 million pages this concerns one block in 16, in a census of 50 million pages one block in two.
//!
//! The cache takes 4 bytes for each cached page (half of its fingerprint) and 40 for each block. Blocks with fewer than
//! 8 cacheable pages are left out. During a census each block takes 16 bytes more.

use crate::foreign_processes::MAX_CACHE_AGE;
use crate::index::{IndexEntry, PageIndex, PageMark, RegionPages};
use crate::range_selection::each_page;
use crate::scan_scope::{ScanPart, ScanScope, Subject, read_method};
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{AddressRange, Fingerprint, PageClass, Pages, ProcessId};
use pagefold_host::ReadMethod;
use pagefold_host::activity::ActivityCounters;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages of a block.
const PAGES_PER_BLOCK: u64 = 64;

/// A block with fewer cacheable pages is not cached.
const MIN_CACHED_PAGES_PER_BLOCK: u32 = 8;

/// Pages read from a block to test whether it has changed.
const PROBED_PAGES_PER_BLOCK: u64 = 4;

/// Log2 of the longest interval, in scans of a running process, at which an unchanged block is read in full.
const MAX_FULL_READ_INTERVAL_LOG2: u8 = 4;

/// Log2 of the intervals, in scans, at which a page is read that changed in two scans in a row, and in three or more.
const VOLATILE_READ_INTERVAL_LOG2: [u8; 2] = [1, 3];

/// The cached fingerprints of all selected processes, under one key.
pub(crate) struct FingerprintCache {
    census_time: Instant,
    processes: BTreeMap<ProcessId, CachedProcess>,
    /// How many pages of each process the last census did not read.
    reused_pages: BTreeMap<ProcessId, Pages>,
}

struct CachedProcess {
    /// Its activity before it was read, if it was scanned whole.
    activity: Option<ActivityCounters>,
    /// Time of the last scan in which it was not taken to be inactive.
    last_active_scan: Instant,
    /// In ascending order of block numbers.
    blocks: Vec<PageBlock>,
    /// Half fingerprints of the cached pages, in their order.
    half_fingerprints: Vec<u32>,
    /// The comparisons of the current scan, one for each block.
    comparisons: OnceLock<Vec<BlockComparison>>,
}

/// Whether pages of a subject that are read by this method are cached. Only pages of regions that were never enrolled
/// are: other pages may be merged, or may keep another domain from merging the same content. Pages of foreign processes
/// are not cached.
pub(crate) fn is_cacheable(subject: &Subject, method: ReadMethod) -> bool {
    !subject.is_foreign && method == ReadMethod::ProcessVmReadv
}

/// The number of the block at an address.
pub(crate) fn block_number_at(index: &PageIndex, address: u64) -> u64 {
    address / index.page_bytes() / PAGES_PER_BLOCK
}

/// Marks a page without a cached fingerprint: half of the zero page's fingerprint, since zero pages are not cached.
const NO_FINGERPRINT: u32 = Fingerprint::ZERO_PAGE.to_half();

/// Consecutive pages, one bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct PageBlock {
    /// The position of the block in the address space, counted in blocks.
    block_number: u64,
    /// The cached pages.
    cached_pages: u64,
    /// For each page, in how many scans in a row it changed, up to three: the low bits and the high bits.
    change_counts: [u64; 2],
    /// Position of the block's first half fingerprint.
    first_fingerprint: u32,
    /// In how many scans in a row the block was unchanged, without volatile pages; at most
    /// [`MAX_FULL_READ_INTERVAL_LOG2`].
    unchanged_scans: u8,
    /// Number of scans in which the process was not inactive, modulo 256.
    active_scans: u8,
}

/// The pages of a block whose content differs from the cached one, and those with the same content.
#[derive(Debug, Default)]
struct BlockComparison {
    changed: AtomicU64,
    same: AtomicU64,
}

/// The cached pages among consecutive pages of the index.
pub(crate) struct CachedPages<'a> {
    process: &'a CachedProcess,
    is_inactive: bool,
    /// The cached pages, in ascending order.
    pages: Vec<CachedPage>,
    first_ordinal: u32,
    /// For each page from the first on, its position in `pages` plus one; 0 for pages that are not cached.
    positions: Vec<u32>,
}

/// A cached page.
#[derive(Clone, Copy)]
struct CachedPage {
    ordinal: u32,
    /// The position of its block.
    block: u32,
    /// Its bit in the block.
    bit: u64,
    half_fingerprint: u32,
}

impl FingerprintCache {
    /// An empty cache.
    pub fn new(now: Instant) -> Self {
        Self { census_time: now, processes: BTreeMap::new(), reused_pages: BTreeMap::new() }
    }

    /// Starts a census at the time `now`.
    pub fn begin_census(&mut self, now: Instant) {
        self.census_time = now;
        self.reused_pages.clear();
        // Drops the comparisons of a scan that was stopped.
        self.processes.values_mut().for_each(|process| process.comparisons = OnceLock::new());
    }

    /// How many pages of a process the last census did not read, except for a few.
    pub fn reused_pages(&self, process: ProcessId) -> Pages {
        self.reused_pages.get(&process).copied().unwrap_or(Pages::ZERO)
    }

    /// Drops the processes for which `keep` is false.
    pub fn retain_processes(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.processes.retain(|&process, _| keep(process));
    }

    /// The cached pages among the given pages of a subject, if there are any.
    pub fn lookup(
        &self,
        scope: &ScanScope,
        index: &PageIndex,
        subject: usize,
        ordinals: Range<u32>,
    ) -> Option<CachedPages<'_>> {
        let process = scope.subjects[subject].process.id;
        let cached = self.processes.get(&process)?;
        let is_inactive = self.is_inactive(cached, scope.activity.get(&process));
        let (first_ordinal, mut positions) = (ordinals.start, vec![0; ordinals.len()]);
        let pages = cached.pages_within(index, ordinals);
        for (page, position) in pages.iter().zip(1..) {
            positions[(page.ordinal - first_ordinal) as usize] = position;
        }
        (!pages.is_empty()).then_some(CachedPages { process: cached, is_inactive, pages, first_ordinal, positions })
    }

    /// Whether a process cannot have written anything since its last scan.
    fn is_inactive(&self, process: &CachedProcess, activity: Option<&ActivityCounters>) -> bool {
        let is_fresh = self.census_time.saturating_duration_since(process.last_active_scan) < MAX_CACHE_AGE;
        is_fresh && activity.is_some() && activity == process.activity.as_ref()
    }

    /// Caches what the census has read. The index must be classified; its unique entries are dropped. Subjects that
    /// could not be read in full are not cached.
    pub fn record_census(&mut self, scope: &ScanScope, index: &mut PageIndex, unread: &BTreeSet<usize>) {
        let mut cacheable = CacheablePages::new(index.page_count());
        let mut new_processes: Vec<Option<CachedProcess>> = Vec::new();
        let has_cacheable_pages = |pages: &RegionPages| {
            let subject = &scope.subjects[pages.subject];
            is_cacheable(subject, read_method(&subject.regions[pages.region].0))
        };
        let regions: Vec<RegionPages> = index.regions().filter(has_cacheable_pages).collect();
        let mut other_parts: Vec<Option<CachedProcess>> = Vec::new();
        for (position, subject) in scope.subjects.iter().enumerate() {
            let process = subject.process.id;
            let scanned = index.scanned_ranges(position);
            let is_whole = *scanned == [ScanPart::WHOLE.range];
            let mut previous = if subject.is_foreign { None } else { self.processes.remove(&process) };
            let activity = scope.activity.get(&process);
            let is_inactive = previous.as_ref().is_some_and(|cached| self.is_inactive(cached, activity));
            let is_recorded = !subject.is_foreign && !unread.contains(&position);
            new_processes.push(is_recorded.then(|| {
                let first = regions.partition_point(|pages| pages.subject < position);
                let subject_regions = regions[first..].iter().take_while(|pages| pages.subject == position);
                let previous = previous.as_ref().map(|cached| (cached, is_inactive));
                let (blocks, unread_pages) =
                    cacheable_blocks(index, subject_regions.map(|pages| &pages.ordinals), previous, &mut cacheable);
                self.reused_pages.insert(process, unread_pages);
                let last_active_scan = previous.map_or(self.census_time, |(cached, _)| cached.last_active_scan);
                let last_active_scan = if is_inactive { last_active_scan } else { self.census_time };
                CachedProcess {
                    activity: activity.copied().filter(|_| is_whole || is_inactive),
                    last_active_scan,
                    blocks,
                    half_fingerprints: Vec::new(),
                    comparisons: OnceLock::new(),
                }
            }));
            if let Some(cached) = &mut previous {
                for range in scanned.iter().rev() {
                    cached.remove_range(*range, index.page_bytes());
                }
            }
            other_parts.push(previous.filter(|cached| !cached.blocks.is_empty()));
        }
        cacheable.compute_counts();
        self.store_fingerprints(scope, index, &cacheable, &mut new_processes);
        for ((cached, others), subject) in new_processes.into_iter().zip(other_parts).zip(&scope.subjects) {
            let joined = match (others, cached) {
                (Some(others), Some(cached)) => Some(others.with_scanned(cached)),
                (others, cached) => others.or(cached),
            };
            let nonempty = joined.filter(|cached| !cached.blocks.is_empty());
            self.processes.extend(nonempty.map(|cached| (subject.process.id, cached)));
        }
    }

    /// Store the fingerprints of cacheable pages. The index drops its unique entries.
    fn store_fingerprints(
        &mut self,
        scope: &ScanScope,
        index: &mut PageIndex,
        cacheable: &CacheablePages,
        new_processes: &mut [Option<CachedProcess>],
    ) {
        let first_positions: Vec<usize> = (0..new_processes.len())
            .map(|subject| cacheable.count_before(index.subject_ordinals(subject).start))
            .collect();
        for (subject, cached) in new_processes.iter_mut().enumerate() {
            if let Some(cached) = cached {
                cached.half_fingerprints = vec![
                    NO_FINGERPRINT;
                    cacheable.count_before(index.subject_ordinals(subject).end)
                        - first_positions[subject]
                ];
            }
        }
        let mut store_half = |index: &PageIndex, ordinal: u32, half: u32| {
            let subject = index.subject_of_page(ordinal);
            if let Some(cached) = &mut new_processes[subject] {
                cached.half_fingerprints[cacheable.count_before(ordinal) - first_positions[subject]] = half;
            }
            if index.mark(ordinal) == PageMark::CACHED_UNIQUE {
                self.reused_pages.entry(scope.subjects[subject].process.id).or_default().0 += 1;
            }
        };
        let mut store_entry = |index: &PageIndex, entry: IndexEntry| {
            if cacheable.contains(entry.ordinal) {
                store_half(index, entry.ordinal, entry.fingerprint().to_half());
            }
        };
        // In page order, while the index drops its entries: only the filled part takes memory.
        index.drain_unique_entries(&mut store_entry);
        index.entries.iter().for_each(|entry| store_entry(index, *entry));
        for &(ordinal, half) in &cacheable.assumed_volatile {
            store_half(index, ordinal, half);
        }
    }
}

/// The blocks of the given regions that have enough cacheable pages, and how many of their pages were not read. The
/// pages are added to `cacheable`. `previous` is the cached state of the process, and whether it was inactive.
fn cacheable_blocks<'a>(
    index: &PageIndex,
    regions: impl Iterator<Item = &'a Range<u32>>,
    previous: Option<(&CachedProcess, bool)>,
    cacheable: &mut CacheablePages,
) -> (Vec<PageBlock>, Pages) {
    let (mut blocks, mut first_fingerprint, mut unread_pages) = (Vec::new(), 0, Pages::ZERO);
    let mut previous_blocks = previous.map_or(&[][..], |(process, _)| &process.blocks).iter().enumerate().peekable();
    let with_page_number = |(_, ordinal, address): (_, u32, u64)| (ordinal, address / index.page_bytes());
    let mut pages = regions.flat_map(|ordinals| each_page(index, ordinals)).map(with_page_number).peekable();
    while let Some(&(_, page)) = pages.peek() {
        let block_number = page / PAGES_PER_BLOCK;
        while previous_blocks.next_if(|(_, block)| block.block_number < block_number).is_some() {}
        let previous_block = previous_blocks.next_if(|(_, block)| block.block_number == block_number).zip(previous);
        let (mut cached_pages, mut bits, mut unread, mut volatile) = (Vec::new(), 0_u64, 0_u64, 0);
        while let Some((ordinal, page)) = pages.next_if(|(_, page)| page / PAGES_PER_BLOCK == block_number) {
            let bit = 1 << (page % PAGES_PER_BLOCK);
            let mark = index.mark(ordinal);
            match mark.class() {
                Some(PageClass::Volatile) if mark != PageMark::ASSUMED_VOLATILE => volatile |= bit,
                Some(PageClass::Volatile | PageClass::Unique) => {
                    cached_pages.push((ordinal, bit));
                    bits |= bit;
                    unread |= if mark == PageMark::ASSUMED_VOLATILE { bit } else { 0 };
                }
                _ => {}
            }
        }
        if bits.count_ones() < MIN_CACHED_PAGES_PER_BLOCK {
            continue;
        }
        let mut block = PageBlock { block_number, cached_pages: bits, first_fingerprint, ..PageBlock::default() };
        first_fingerprint += bits.count_ones();
        for &(ordinal, _) in &cached_pages {
            cacheable.insert(ordinal);
        }
        if let Some(((position, previous_block), (process, was_inactive))) = previous_block {
            block.update(previous_block, &process.comparisons()[position], volatile, was_inactive);
            let unread = cached_pages.iter().filter(|(_, bit)| unread & previous_block.cached_pages & bit != 0);
            cacheable
                .assumed_volatile
                .extend(unread.map(|&(ordinal, bit)| (ordinal, process.half_fingerprint(previous_block, bit))));
        }
        unread_pages.0 += u64::from(unread.count_ones());
        blocks.push(block);
    }
    blocks.shrink_to_fit();
    (blocks, unread_pages)
}

impl PageBlock {
    /// The pages that are assumed to be volatile and are not read in this scan; none if the process is inactive.
    fn assumed_volatile_pages(&self, is_inactive: bool) -> u64 {
        let [low, high] = self.change_counts;
        let unless_due = |pages: u64, interval_log2: u8| {
            if is_inactive || self.is_read_due(interval_log2) { 0 } else { pages }
        };
        unless_due(high & !low, VOLATILE_READ_INTERVAL_LOG2[0]) | unless_due(high & low, VOLATILE_READ_INTERVAL_LOG2[1])
    }

    /// The pages that are not assumed to be volatile.
    fn stable_pages(&self) -> u64 {
        self.cached_pages & !self.change_counts[1]
    }

    /// Whether a read with an interval of `2^interval_log2` scans is due. The due scans of different blocks are spread
    /// out.
    fn is_read_due(&self, interval_log2: u8) -> bool {
        splitmix64(self.block_number).wrapping_add(self.active_scans.into()).is_multiple_of(1 << interval_log2)
    }

    /// Updates the counters from the previous state of the block, the comparison of this scan and the pages that
    /// changed within it (`volatile`). If no page was compared, the block counts as changed unless the process
    /// `is_inactive`.
    fn update(&mut self, previous: &Self, comparison: &BlockComparison, volatile: u64, is_inactive: bool) {
        let [changed, same] = [&comparison.changed, &comparison.same].map(|pages| pages.load(Ordering::Relaxed));
        let [low, high] = previous.change_counts;
        // Adds one, up to three, for changed pages.
        let incremented = changed & !(low & high);
        let counts = [low ^ incremented, high | low & incremented];
        self.change_counts = counts.map(|bits| bits & !same & self.cached_pages);
        self.active_scans = previous.active_scans.wrapping_add(u8::from(!is_inactive));
        self.unchanged_scans = match changed & previous.stable_pages() | volatile {
            0 if same & previous.stable_pages() != 0 => (previous.unchanged_scans + 1).min(MAX_FULL_READ_INTERVAL_LOG2),
            0 if is_inactive => previous.unchanged_scans,
            _ => 0,
        };
    }
}

impl CachedProcess {
    /// Removes the blocks within a range that begins and ends between two blocks.
    fn remove_range(&mut self, range: AddressRange, page_bytes: u64) {
        let block_bytes = page_bytes * PAGES_PER_BLOCK;
        let first = self.blocks.partition_point(|block| block.block_number < range.start / block_bytes);
        let end = self.blocks.partition_point(|block| block.block_number < range.end.div_ceil(block_bytes));
        let (first_fingerprint, end_fingerprint) = (self.first_fingerprint(first), self.first_fingerprint(end));
        self.half_fingerprints.drain(first_fingerprint..end_fingerprint);
        self.blocks.drain(first..end);
        self.blocks[first..]
            .iter_mut()
            .for_each(|block| block.first_fingerprint -= (end_fingerprint - first_fingerprint) as u32);
        self.half_fingerprints.shrink_to_fit();
    }

    /// Adds the blocks of `scanned`, between which there are none of these, and takes its activity.
    fn with_scanned(mut self, scanned: Self) -> Self {
        let mut rest = &scanned.blocks[..];
        while let Some(first) = rest.first() {
            let position = self.blocks.partition_point(|block| block.block_number < first.block_number);
            let next = self.blocks.get(position).map_or(u64::MAX, |block| block.block_number);
            let (added, after) = rest.split_at(rest.partition_point(|block| block.block_number < next));
            let start = first.first_fingerprint;
            let end = after.first().map_or(scanned.half_fingerprints.len() as u32, |block| block.first_fingerprint);
            let offset = self.first_fingerprint(position) as u32;
            let halves = scanned.half_fingerprints[start as usize..end as usize].iter().copied();
            self.half_fingerprints.splice(offset as usize..offset as usize, halves);
            self.blocks[position..].iter_mut().for_each(|block| block.first_fingerprint += end - start);
            let moved =
                |block: &PageBlock| PageBlock { first_fingerprint: block.first_fingerprint - start + offset, ..*block };
            self.blocks.splice(position..position, added.iter().map(moved));
            rest = after;
        }
        Self { blocks: self.blocks, half_fingerprints: self.half_fingerprints, ..scanned }
    }

    /// Position of the first half fingerprint of a block, or the number of all of them.
    fn first_fingerprint(&self, block: usize) -> usize {
        self.blocks.get(block).map_or(self.half_fingerprints.len(), |block| block.first_fingerprint as usize)
    }

    /// Half the fingerprint of a cached page.
    fn half_fingerprint(&self, block: &PageBlock, bit: u64) -> u32 {
        self.half_fingerprints[(block.first_fingerprint + (block.cached_pages & (bit - 1)).count_ones()) as usize]
    }

    /// The comparisons of this scan, one for each block.
    fn comparisons(&self) -> &[BlockComparison] {
        self.comparisons.get_or_init(|| self.blocks.iter().map(|_| BlockComparison::default()).collect())
    }

    /// The cached pages among the given pages.
    fn pages_within(&self, index: &PageIndex, ordinals: Range<u32>) -> Vec<CachedPage> {
        let mut cached_pages = Vec::new();
        let mut first_block = 0;
        for (run, first) in index.runs(ordinals) {
            let start = run.address / index.page_bytes();
            let end = start + u64::from(run.pages);
            first_block +=
                self.blocks[first_block..].partition_point(|block| (block.block_number + 1) * PAGES_PER_BLOCK <= start);
            let blocks = self.blocks[first_block..].iter().zip(first_block as u32..);
            for (block, position) in blocks.take_while(|(block, _)| block.block_number * PAGES_PER_BLOCK < end) {
                let base = block.block_number * PAGES_PER_BLOCK;
                cached_pages.extend((start.max(base)..end.min(base + PAGES_PER_BLOCK)).filter_map(|page| {
                    let (bit, ordinal) = (1 << (page - base), first + (page - start) as u32);
                    let half_fingerprint =
                        if block.cached_pages & bit != 0 { self.half_fingerprint(block, bit) } else { NO_FINGERPRINT };
                    (half_fingerprint != NO_FINGERPRINT).then_some(CachedPage {
                        ordinal,
                        block: position,
                        bit,
                        half_fingerprint,
                    })
                }));
            }
        }
        cached_pages
    }
}

impl CachedPages<'_> {
    /// The pages that are assumed to be volatile and are not read.
    pub fn assumed_volatile(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages
            .iter()
            .filter(|page| self.block_of_page(page).assumed_volatile_pages(self.is_inactive) & page.bit != 0)
            .map(|page| page.ordinal)
    }

    /// The pages to read first, one from each quarter of a block. They decide whether the other pages are assumed to be
    /// unchanged.
    pub fn pages_to_probe(&self) -> impl Iterator<Item = u32> + '_ {
        let blocks = self.unchanged_blocks().filter(|_| !self.is_inactive);
        blocks.flat_map(|(block, _, pages)| {
            let (random, count) =
                (splitmix64(block.block_number ^ splitmix64(block.active_scans.into())), pages.len() as u64);
            (0..PROBED_PAGES_PER_BLOCK.min(count)).map(move |i| {
                pages[((i * count + random % count) / PROBED_PAGES_PER_BLOCK.min(count)) as usize].ordinal
            })
        })
    }

    /// The pages that are assumed to be unchanged, with fingerprints made from the cached halves. Call this after the
    /// pages from [`Self::pages_to_probe`] were compared.
    pub fn reusable_fingerprints(&self) -> impl Iterator<Item = (u32, Fingerprint)> + '_ {
        let is_reusable =
            |comparison: &BlockComparison| self.is_inactive || comparison.same.load(Ordering::Relaxed) != 0;
        let pages = self
            .unchanged_blocks()
            .filter(move |(_, comparison, _)| is_reusable(comparison))
            .flat_map(|(.., pages)| pages);
        pages.map(|page| (page.ordinal, Fingerprint::from_half(page.half_fingerprint)))
    }

    /// Compares the content that was read from a page with the cached one, if there is one.
    pub fn compare(&self, ordinal: u32, content: Option<Fingerprint>) {
        let position = self.positions[(ordinal - self.first_ordinal) as usize].checked_sub(1);
        let Some(page) = position.map(|position| self.pages[position as usize]) else { return };
        let comparison = &self.process.comparisons()[page.block as usize];
        let is_same = content.map(Fingerprint::to_half) == Some(page.half_fingerprint);
        (if is_same { &comparison.same } else { &comparison.changed }).fetch_or(page.bit, Ordering::Relaxed);
    }

    fn block_of_page(&self, page: &CachedPage) -> &PageBlock {
        &self.process.blocks[page.block as usize]
    }

    /// The blocks that need not be read in full as far as is known, with their pages that are not assumed to be
    /// volatile.
    fn unchanged_blocks(&self) -> impl Iterator<Item = (&PageBlock, &BlockComparison, Vec<CachedPage>)> + '_ {
        self.pages.chunk_by(|a, b| a.block == b.block).filter_map(|pages| {
            let (block, comparison) =
                (self.block_of_page(&pages[0]), &self.process.comparisons()[pages[0].block as usize]);
            let changed = comparison.changed.load(Ordering::Relaxed) & block.stable_pages();
            let is_unchanged = changed == 0 && !block.is_read_due(block.unchanged_scans);
            let stable_pages =
                || pages.iter().filter(|page| block.stable_pages() & page.bit != 0).copied().collect::<Vec<_>>();
            (self.is_inactive || is_unchanged)
                .then(|| (block, comparison, stable_pages()))
                .filter(|(.., pages)| !pages.is_empty())
        })
    }
}

/// A set of pages of an index, one bit for each, with the count of members before each word of 64.
struct CacheablePages {
    bits: Vec<u64>,
    counts_before: Vec<u32>,
    /// Pages that were not read because they are assumed to be volatile, with their cached half fingerprints.
    assumed_volatile: Vec<(u32, u32)>,
}

impl CacheablePages {
    fn new(pages: usize) -> Self {
        Self { bits: vec![0; pages / 64 + 1], counts_before: Vec::new(), assumed_volatile: Vec::new() }
    }

    fn insert(&mut self, ordinal: u32) {
        self.bits[ordinal as usize / 64] |= 1 << (ordinal % 64);
    }

    fn contains(&self, ordinal: u32) -> bool {
        self.bits[ordinal as usize / 64] >> (ordinal % 64) & 1 == 1
    }

    /// Computes the counts; call it after the last insertion.
    fn compute_counts(&mut self) {
        let mut sum = 0;
        self.counts_before = Vec::with_capacity(self.bits.len());
        for bits in &self.bits {
            self.counts_before.push(sum);
            sum += bits.count_ones();
        }
    }

    /// How many pages of the set come before a page.
    fn count_before(&self, ordinal: u32) -> usize {
        let (word, bit) = (ordinal as usize / 64, 1 << (ordinal % 64));
        (self.counts_before[word] + (self.bits[word] & (bit - 1)).count_ones()) as usize
    }
}
