//! What members hold that nobody else does, remembered from census to census, so that of whom is looked at again only
//! what is new or may have changed is read.
//!
//! Most of what a host holds has no partner, and reading that again is most of what a census costs. Nothing tells from
//! outside which pages a running process has written, but for marks in its page tables that are one tool's at a time.
//! So it is found out piece by piece, 256 KiB of 4 KiB pages each. Of a piece that was found unchanged in the look
//! before a few pages are read, and where these hold what they held the others are taken to do so, too; the more looks
//! it has been so, the more seldom a piece is read whole all the same, down to one look in 16. A page that changes alone
//! in its piece is so found late. A page that holds something else in each of some looks running is taken to change on,
//! and read in one look of two, then of eight. All others are read, as is what has just come, and what is like others.
//! A process that has neither run nor had a page fault since it was looked at has changed nothing; for an hour, after
//! which it is taken to have run, since others may write to its memory.
//!
//! What is remembered decides nothing by itself. Whatever may have a partner among those that are looked at is read
//! before it counts, with its piece. What is not read, or holds something else then and so comes too late to be compared
//! with everything, is not enrolled. What KSM is told of, or has merged, is read each time: it may be merged, or keeps
//! others from merging the same.
//!
//! Halves of fingerprints are alike by chance, and each such page has its piece read: of a census of 4 million pages one
//! piece in 16, of 50 million one in two.
//!
//! Takes 4 bytes for each page that is remembered, half of its fingerprint, and 40 for each piece, of which those are
//! left out that would remember less than 8 pages; and 16 for each piece during a census.

use crate::foreign_processes::{ActivityCounters, MAX_CACHE_AGE};
use crate::index::{IndexEntry, PageIndex, PageMark, RegionPages};
use crate::range_selection::each_page;
use crate::scan_scope::{ScanScope, Subject, read_method};
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{Fingerprint, PageClass, Pages, ProcessId};
use pagefold_host::ReadMethod;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages of a piece.
const PAGES_PER_BLOCK: u64 = 64;

/// Pages that are remembered of a piece, at least.
const MIN_CACHED_PAGES_PER_BLOCK: u32 = 8;

/// Pages of a piece that are read to see whether it has changed.
const PROBED_PAGES_PER_BLOCK: u64 = 4;

/// A piece is read whole in one of two to the power of so many looks at its process as it runs, at least.
const MAX_FULL_READ_INTERVAL_LOG2: u8 = 4;

/// A page is read in one of two to the power of so many looks after it has changed in two running, and in more.
const VOLATILE_READ_INTERVAL_LOG2: [u8; 2] = [1, 3];

/// What is remembered of all members, under one key of fingerprints.
pub(crate) struct FingerprintCache {
    census_time: Instant,
    processes: BTreeMap<ProcessId, CachedProcess>,
    /// How many pages of each process the last census has not read.
    reused_pages: BTreeMap<ProcessId, Pages>,
}

struct CachedProcess {
    /// How often it was looked at and did not rest.
    active_scans: u64,
    /// How much it had run before it was read.
    activity: Option<ActivityCounters>,
    /// When it was last looked at without being taken to rest.
    last_active_scan: Instant,
    /// Ascending.
    blocks: Vec<PageBlock>,
    /// Of the pages that are remembered, in their order: half of their fingerprints.
    half_fingerprints: Vec<u32>,
    /// What a look has found so far, for each piece.
    comparisons: OnceLock<Vec<BlockComparison>>,
}

/// Whether anything is recalled of a subject's pages that are read in this way: KSM was never told of them. What else is
/// there may be merged, or keeps another trust domain from merging the same. Nor of witnesses.
pub(crate) fn is_cacheable(subject: &Subject, method: ReadMethod) -> bool {
    !subject.is_foreign && method == ReadMethod::ProcessVmReadv
}

/// The place of the piece of an address.
pub(crate) fn block_number_at(index: &PageIndex, address: u64) -> u64 {
    address / index.page_bytes() / PAGES_PER_BLOCK
}

/// What is kept of a page of which nothing is remembered: half the fingerprint of the page of zeros, which is told apart.
const NO_FINGERPRINT: u32 = Fingerprint::ZERO_PAGE.to_half();

/// Some neighbouring pages, a bit for each.
#[derive(Clone, Copy, Debug, Default)]
struct PageBlock {
    /// Its place among all pieces of the address space.
    block_number: u64,
    /// Those that are remembered.
    cached_pages: u64,
    /// How many looks running they have changed in, up to three: the lower bits and the upper ones.
    change_counts: [u64; 2],
    /// Where their contents begin.
    first_fingerprint: u32,
    /// How many looks running the others were found unchanged, up to [`MAX_FULL_READ_INTERVAL_LOG2`].
    unchanged_scans: u8,
}

/// The pages of a piece that hold something else than they did, and those that hold the same.
#[derive(Debug, Default)]
struct BlockComparison {
    changed: AtomicU64,
    same: AtomicU64,
}

/// What is remembered of some consecutive pages of the index.
pub(crate) struct CachedPages<'a> {
    process: &'a CachedProcess,
    is_inactive: bool,
    /// Those that anything is remembered of, ascending.
    pages: Vec<CachedPage>,
    first_ordinal: u32,
    /// For each page from the first on its place among those, and one more; 0 for others.
    positions: Vec<u32>,
}

/// A page that is remembered.
#[derive(Clone, Copy)]
struct CachedPage {
    ordinal: u32,
    /// The position of its piece.
    block: u32,
    /// Its bit in its piece.
    bit: u64,
    half_fingerprint: u32,
}

impl FingerprintCache {
    /// Nothing remembered yet.
    pub fn new(now: Instant) -> Self {
        Self { census_time: now, processes: BTreeMap::new(), reused_pages: BTreeMap::new() }
    }

    /// A census begins at a time.
    pub fn begin_census(&mut self, now: Instant) {
        self.census_time = now;
        self.reused_pages.clear();
        // What a look has found that was halted.
        self.processes.values_mut().for_each(|known| known.comparisons = OnceLock::new());
    }

    /// How many pages of a process the last census has not read, but for few.
    pub fn reused_pages(&self, process: ProcessId) -> Pages {
        self.reused_pages.get(&process).copied().unwrap_or(Pages::ZERO)
    }

    /// Forget the processes that do not fit.
    pub fn retain_processes(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.processes.retain(|&process, _| keep(process));
    }

    /// What is remembered of some pages of a subject, if anything is.
    pub fn lookup(
        &self,
        scope: &ScanScope,
        index: &PageIndex,
        subject: usize,
        ordinals: Range<u32>,
    ) -> Option<CachedPages<'_>> {
        let process = scope.subjects[subject].process.id;
        let known = self.processes.get(&process)?;
        let rests = self.is_inactive(known, scope.activity.get(&process));
        let (first, mut places) = (ordinals.start, vec![0; ordinals.len()]);
        let pages = known.pages_within(index, ordinals);
        for (page, place) in pages.iter().zip(1..) {
            places[(page.ordinal - first) as usize] = place;
        }
        (!pages.is_empty()).then_some(CachedPages {
            process: known,
            is_inactive: rests,
            pages,
            first_ordinal: first,
            positions: places,
        })
    }

    /// Whether a process can have written nothing since it was looked at.
    fn is_inactive(&self, process: &CachedProcess, activity: Option<&ActivityCounters>) -> bool {
        let is_fresh = self.census_time.saturating_duration_since(process.last_active_scan) < MAX_CACHE_AGE;
        is_fresh && activity.is_some() && activity == process.activity.as_ref()
    }

    /// Take note of what was looked at and will be recalled, once the index is classified, which lets go of what no two
    /// pages hold; of whom not all could be read nothing is kept.
    pub fn record_census(&mut self, scope: &ScanScope, index: &mut PageIndex, unread: &BTreeSet<usize>) {
        let mut kept = CacheablePages::new(index.page_count());
        let mut noted: Vec<Option<CachedProcess>> = Vec::new();
        let is_recalled = |pages: &RegionPages| {
            let subject = &scope.subjects[pages.subject];
            is_cacheable(subject, read_method(&subject.regions[pages.region].0))
        };
        let regions: Vec<RegionPages> = index.regions().filter(is_recalled).collect();
        for (position, subject) in scope.subjects.iter().enumerate() {
            let process = subject.process.id;
            let before = if subject.is_foreign { None } else { self.processes.remove(&process) };
            let standing = scope.activity.get(&process);
            let rests = before.as_ref().is_some_and(|before| self.is_inactive(before, standing));
            let is_noted = !subject.is_foreign && !unread.contains(&position);
            noted.push(is_noted.then(|| {
                let first = regions.partition_point(|pages| pages.subject < position);
                let own = regions[first..].iter().take_while(|pages| pages.subject == position);
                let before = before.as_ref().map(|known| (known, rests));
                let (pieces, passed_by) = cacheable_blocks(index, own.map(|pages| &pages.ordinals), before, &mut kept);
                self.reused_pages.insert(process, passed_by);
                let (looks, seen) = before.map_or((0, self.census_time), |(known, _)| {
                    (known.active_scans + u64::from(!rests), known.last_active_scan)
                });
                let seen = if rests { seen } else { self.census_time };
                CachedProcess {
                    active_scans: looks,
                    activity: standing.copied(),
                    last_active_scan: seen,
                    blocks: pieces,
                    half_fingerprints: Vec::new(),
                    comparisons: OnceLock::new(),
                }
            }));
        }
        kept.compute_counts();
        let firsts: Vec<usize> =
            (0..noted.len()).map(|subject| kept.count_before(index.subject_ordinals(subject).start)).collect();
        for (subject, known) in noted.iter_mut().enumerate() {
            if let Some(known) = known {
                known.half_fingerprints =
                    vec![NO_FINGERPRINT; kept.count_before(index.subject_ordinals(subject).end) - firsts[subject]];
            }
        }
        let mut put = |index: &PageIndex, ordinal: u32, half: u32| {
            let subject = index.subject_of_page(ordinal);
            if let Some(known) = &mut noted[subject] {
                known.half_fingerprints[kept.count_before(ordinal) - firsts[subject]] = half;
            }
            if index.mark(ordinal) == PageMark::CACHED_UNIQUE {
                self.reused_pages.entry(scope.subjects[subject].process.id).or_default().0 += 1;
            }
        };
        let mut note = |index: &PageIndex, entry: IndexEntry| {
            if kept.contains(entry.ordinal) {
                put(index, entry.ordinal, entry.fingerprint().to_half());
            }
        };
        // Neighbours after neighbours, while the index lets go of them: only what is filled is in memory.
        index.drain_unique_entries(&mut note);
        index.entries.iter().for_each(|entry| note(index, *entry));
        for &(ordinal, half) in &kept.assumed_volatile {
            put(index, ordinal, half);
        }
        for (known, subject) in noted.into_iter().zip(&scope.subjects) {
            let some = known.filter(|known| !known.blocks.is_empty());
            self.processes.extend(some.map(|known| (subject.process.id, known)));
        }
    }
}

/// The pieces of some of a subject's pages of which enough can be remembered, whose pages are `kept`, and how many of
/// these were passed by. `before` is what was remembered of it, and whether it rested.
fn cacheable_blocks<'a>(
    index: &PageIndex,
    regions: impl Iterator<Item = &'a Range<u32>>,
    before: Option<(&CachedProcess, bool)>,
    cacheable: &mut CacheablePages,
) -> (Vec<PageBlock>, Pages) {
    let (mut pieces, mut first, mut passed_by) = (Vec::new(), 0, Pages::ZERO);
    let mut older = before.map_or(&[][..], |(known, _)| &known.blocks).iter().enumerate().peekable();
    let page_of = |(_, ordinal, address): (_, u32, u64)| (ordinal, address / index.page_bytes());
    let mut pages = regions.flat_map(|ordinals| each_page(index, ordinals)).map(page_of).peekable();
    while let Some(&(_, page)) = pages.peek() {
        let number = page / PAGES_PER_BLOCK;
        while older.next_if(|(_, older)| older.block_number < number).is_some() {}
        let old = older.next_if(|(_, older)| older.block_number == number).zip(before);
        let (mut there, mut bits, mut unread, mut volatile) = (Vec::new(), 0_u64, 0_u64, 0);
        while let Some((ordinal, page)) = pages.next_if(|(_, page)| page / PAGES_PER_BLOCK == number) {
            let bit = 1 << (page % PAGES_PER_BLOCK);
            let mark = index.mark(ordinal);
            match mark.class() {
                Some(PageClass::Volatile) if mark != PageMark::ASSUMED_VOLATILE => volatile |= bit,
                Some(PageClass::Volatile | PageClass::Unique) => {
                    there.push((ordinal, bit));
                    bits |= bit;
                    unread |= if mark == PageMark::ASSUMED_VOLATILE { bit } else { 0 };
                }
                _ => {}
            }
        }
        if bits.count_ones() < MIN_CACHED_PAGES_PER_BLOCK {
            continue;
        }
        let mut piece =
            PageBlock { block_number: number, cached_pages: bits, first_fingerprint: first, ..PageBlock::default() };
        first += bits.count_ones();
        for &(ordinal, _) in &there {
            cacheable.insert(ordinal);
        }
        if let Some(((position, old), (known, rests))) = old {
            piece.update(old, &known.comparisons()[position], volatile, rests);
            let unread = there.iter().filter(|(_, bit)| unread & old.cached_pages & bit != 0);
            cacheable
                .assumed_volatile
                .extend(unread.map(|&(ordinal, bit)| (ordinal, known.half_fingerprint(old, bit))));
        }
        passed_by.0 += u64::from(unread.count_ones());
        pieces.push(piece);
    }
    pieces.shrink_to_fit();
    (pieces, passed_by)
}

impl PageBlock {
    /// The pages that are taken to change on, and not to be read in this look at their process. What rests does not.
    fn assumed_volatile_pages(&self, active_scans: u64, is_inactive: bool) -> u64 {
        let [low, high] = self.change_counts;
        let unless_due =
            |pages: u64, times: u8| if is_inactive || self.is_read_due(active_scans, times) { 0 } else { pages };
        unless_due(high & !low, VOLATILE_READ_INTERVAL_LOG2[0]) | unless_due(high & low, VOLATILE_READ_INTERVAL_LOG2[1])
    }

    /// The pages that are not taken to change on.
    fn stable_pages(&self) -> u64 {
        self.cached_pages & !self.change_counts[1]
    }

    /// Whether it is this look's turn, of two to the power of so many. Not all pieces' turns come in the same look.
    fn is_read_due(&self, active_scans: u64, interval_log2: u8) -> bool {
        splitmix64(self.block_number).wrapping_add(active_scans).is_multiple_of(1 << interval_log2)
    }

    /// Take note of what a look has found of it, as it was remembered before, and of which of its pages changed within
    /// the look. Where nothing was compared nothing is known of it, unless its process `rests`.
    fn update(&mut self, before: &Self, comparison: &BlockComparison, volatile: u64, is_inactive: bool) {
        let [changed, same] = [&comparison.changed, &comparison.same].map(|pages| pages.load(Ordering::Relaxed));
        let [low, high] = before.change_counts;
        // One more, up to three; none for what has not changed.
        let more = changed & !(low & high);
        let counted = [low ^ more, high | low & more];
        self.change_counts = counted.map(|bits| bits & !same & self.cached_pages);
        self.unchanged_scans = match changed & before.stable_pages() | volatile {
            0 if same & before.stable_pages() != 0 => (before.unchanged_scans + 1).min(MAX_FULL_READ_INTERVAL_LOG2),
            0 if is_inactive => before.unchanged_scans,
            _ => 0,
        };
    }
}

impl CachedProcess {
    /// Half the fingerprint of a page that is remembered.
    fn half_fingerprint(&self, block: &PageBlock, bit: u64) -> u32 {
        self.half_fingerprints[(block.first_fingerprint + (block.cached_pages & (bit - 1)).count_ones()) as usize]
    }

    /// What this look has found, by piece.
    fn comparisons(&self) -> &[BlockComparison] {
        self.comparisons.get_or_init(|| self.blocks.iter().map(|_| BlockComparison::default()).collect())
    }

    /// Those of some consecutive pages that anything is remembered of.
    fn pages_within(&self, index: &PageIndex, ordinals: Range<u32>) -> Vec<CachedPage> {
        let mut within = Vec::new();
        let mut at = 0;
        for (run, first) in index.runs(ordinals) {
            let start = run.address / index.page_bytes();
            let end = start + u64::from(run.pages);
            at += self.blocks[at..].partition_point(|piece| (piece.block_number + 1) * PAGES_PER_BLOCK <= start);
            let pieces = self.blocks[at..].iter().zip(at as u32..);
            for (piece, position) in pieces.take_while(|(piece, _)| piece.block_number * PAGES_PER_BLOCK < end) {
                let base = piece.block_number * PAGES_PER_BLOCK;
                within.extend((start.max(base)..end.min(base + PAGES_PER_BLOCK)).filter_map(|page| {
                    let (bit, ordinal) = (1 << (page - base), first + (page - start) as u32);
                    let half =
                        if piece.cached_pages & bit != 0 { self.half_fingerprint(piece, bit) } else { NO_FINGERPRINT };
                    (half != NO_FINGERPRINT).then_some(CachedPage {
                        ordinal,
                        block: position,
                        bit,
                        half_fingerprint: half,
                    })
                }));
            }
        }
        within
    }
}

impl CachedPages<'_> {
    /// The pages that are taken to change on, and are not read.
    pub fn assumed_volatile(&self) -> impl Iterator<Item = u32> + '_ {
        self.pages
            .iter()
            .filter(|page| {
                self.block_of_page(page).assumed_volatile_pages(self.process.active_scans, self.is_inactive) & page.bit
                    != 0
            })
            .map(|page| page.ordinal)
    }

    /// The pages to read before others, one of each quarter of a piece: by them it is told whether the others may be taken
    /// to hold what they did.
    pub fn pages_to_probe(&self) -> impl Iterator<Item = u32> + '_ {
        let trusted = self.unchanged_blocks().filter(|_| !self.is_inactive);
        trusted.flat_map(|(piece, _, pages)| {
            let (draw, count) =
                (splitmix64(piece.block_number ^ splitmix64(self.process.active_scans)), pages.len() as u64);
            (0..PROBED_PAGES_PER_BLOCK.min(count)).map(move |turn| {
                pages[((turn * count + draw % count) / PROBED_PAGES_PER_BLOCK.min(count)) as usize].ordinal
            })
        })
    }

    /// The pages that are taken to hold what they did, with the fingerprints that stand for it, once those that were to
    /// be tried are compared.
    pub fn reusable_fingerprints(&self) -> impl Iterator<Item = (u32, Fingerprint)> + '_ {
        let holds = |found: &BlockComparison| self.is_inactive || found.same.load(Ordering::Relaxed) != 0;
        let told = self.unchanged_blocks().filter(move |(_, found, _)| holds(found)).flat_map(|(.., pages)| pages);
        told.map(|page| (page.ordinal, Fingerprint::from_half(page.half_fingerprint)))
    }

    /// Compare what was read of a page with what is remembered of it, if anything is.
    pub fn compare(&self, ordinal: u32, content: Option<Fingerprint>) {
        let place = self.positions[(ordinal - self.first_ordinal) as usize].checked_sub(1);
        let Some(page) = place.map(|place| self.pages[place as usize]) else { return };
        let found = &self.process.comparisons()[page.block as usize];
        let is_same = content.map(Fingerprint::to_half) == Some(page.half_fingerprint);
        (if is_same { &found.same } else { &found.changed }).fetch_or(page.bit, Ordering::Relaxed);
    }

    fn block_of_page(&self, page: &CachedPage) -> &PageBlock {
        &self.process.blocks[page.block as usize]
    }

    /// The pieces that need not be read whole, as far as it is known, with those pages that are not taken to change on.
    fn unchanged_blocks(&self) -> impl Iterator<Item = (&PageBlock, &BlockComparison, Vec<CachedPage>)> + '_ {
        self.pages.chunk_by(|a, b| a.block == b.block).filter_map(|pages| {
            let (piece, found) = (self.block_of_page(&pages[0]), &self.process.comparisons()[pages[0].block as usize]);
            let changed = found.changed.load(Ordering::Relaxed) & piece.stable_pages();
            let holds = changed == 0 && !piece.is_read_due(self.process.active_scans, piece.unchanged_scans);
            let still =
                || pages.iter().filter(|page| piece.stable_pages() & page.bit != 0).copied().collect::<Vec<_>>();
            (self.is_inactive || holds).then(|| (piece, found, still())).filter(|(.., pages)| !pages.is_empty())
        })
    }
}

/// Which pages of an index are remembered, a bit for each, and how many before each sixty-fourth.
struct CacheablePages {
    bits: Vec<u64>,
    counts_before: Vec<u32>,
    /// Those of them that were passed by, with what is remembered of them.
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

    /// All are known that are kept.
    fn compute_counts(&mut self) {
        let mut sum = 0;
        self.counts_before = Vec::with_capacity(self.bits.len());
        for bits in &self.bits {
            self.counts_before.push(sum);
            sum += bits.count_ones();
        }
    }

    /// How many are kept before a page.
    fn count_before(&self, ordinal: u32) -> usize {
        let (word, bit) = (ordinal as usize / 64, 1 << (ordinal % 64));
        (self.counts_before[word] + (self.bits[word] & (bit - 1)).count_ones()) as usize
    }
}
