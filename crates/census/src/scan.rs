//! Reads the pages: two passes in parallel over units of the index.
//!
//! While ksmd is idle, a frame that KSM has merged is read once for all pages that are mapped to it. On a host with
//! many merged pages these are most of the memory of its processes.

use crate::ScanCache;
use crate::duplicate_filter::DuplicateFilter;
use crate::fingerprint_cache::{CachedPages, block_number_at, is_cacheable};
use crate::index::{IndexEntry, PageIndex, PageMark, ScanUnit};
use crate::range_selection::each_page;
use crate::scan_scope::ScanScope;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pages, Pfn, Reading};
use pagefold_host::observe::NumaNodes;
use pagefold_host::page_state::{EntryState, FrameLookup, PageState, PageStates};
use pagefold_host::{Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The progress of a census, to be read from another thread.
#[derive(Debug, Default)]
pub struct ScanProgress {
    expected_pages: AtomicU64,
    scanned_pages: AtomicU64,
    bytes_read: AtomicU64,
}

impl ScanProgress {
    /// Pages to scan in all passes; 0 until they are listed.
    pub fn expected_pages(&self) -> u64 {
        self.expected_pages.load(Ordering::Relaxed)
    }

    /// Pages scanned so far.
    pub fn scanned_pages(&self) -> u64 {
        self.scanned_pages.load(Ordering::Relaxed)
    }

    /// Bytes of page contents read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    pub(crate) fn set_expected_pages(&self, pages: u64) {
        self.expected_pages.store(pages, Ordering::Relaxed);
    }

    fn add_scanned(&self, pages: u64, bytes: u64) {
        self.scanned_pages.fetch_add(pages, Ordering::Relaxed);
        self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Which pages are in a sample: each page independently, with one probability, by a hash of its ordinal.
#[derive(Clone, Copy, Debug)]
pub struct SampleRule {
    threshold: u64,
    seed: u64,
}

impl SampleRule {
    /// Pages are sampled with `probability`, from 0 to 1.
    pub fn new(probability: f64, seed: u64) -> Self {
        // The cast saturates: a probability of 1 excludes one page in 2^64.
        Self { threshold: (probability * 2f64.powi(64)) as u64, seed }
    }

    /// Whether a page is sampled.
    pub fn includes(self, ordinal: u32) -> bool {
        // The finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014).
        let mut z = self.seed.wrapping_add((u64::from(ordinal) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) <= self.threshold
    }
}

/// What both passes need.
pub struct Scan<'a> {
    /// The host with the pages.
    pub host: &'a dyn Host,
    /// The processes to scan.
    pub scope: &'a ScanScope,
    /// Computes the fingerprints of this census.
    pub hasher: &'a Hasher,
    /// The frame ranges of the NUMA nodes, if pages of different nodes are kept apart.
    pub nodes: Option<NumaNodes>,
    /// Receives the progress.
    pub progress: &'a ScanProgress,
    /// Ends the scan early when set.
    pub stop: &'a AtomicBool,
    /// Which pages to scan; `None` for all.
    pub sample: Option<SampleRule>,
    /// The cache of earlier censuses under the same key. Not used for a sample, nor where nodes are kept apart.
    pub cache: Option<&'a ScanCache>,
}

/// The result of the second pass.
#[derive(Debug)]
pub struct SecondPassResult {
    /// Pages that the second pass read.
    pub pages_read: Pages,
    /// The subjects that could not be read, with the reason.
    pub failures: Vec<(usize, Absent)>,
}

/// Whether to read a page, by its ordinal.
type PageFilter<'a> = &'a dyn Fn(u32) -> bool;

/// A page that was read: its fingerprint, or `None` if the page is known to be volatile.
struct ReadPage {
    fingerprint: Option<Fingerprint>,
    merged: bool,
    /// Whether no other process maps the page.
    exclusive: bool,
    frame: Option<Pfn>,
}

/// A unit that is being scanned, with its results.
struct UnitScan<'a> {
    index: &'a PageIndex,
    unit: ScanUnit,
    entries: &'a mut [IndexEntry],
    nodes: Option<&'a NumaNodes>,
    /// Pages that other processes map too, with their frames.
    shared_mappings: Vec<(Pfn, u32)>,
    /// Number of pages that other processes map too and whose frames are unknown.
    unknown_shared_frames: u64,
    merged_pages: Vec<MergedPage>,
}

impl UnitScan<'_> {
    /// Records a page in the index; `None` for a page that is no longer resident.
    fn record_page(&mut self, ordinal: u32, page: Option<ReadPage>) {
        let Some(seen) = page else { return self.index.set_mark(ordinal, PageMark::NOT_RESIDENT) };
        let class = match seen.fingerprint {
            _ if seen.merged => PageClass::Merged,
            None => PageClass::Volatile,
            Some(Fingerprint::ZERO_PAGE) => PageClass::Zero,
            // Until the groups are known.
            Some(_) => PageClass::Unique,
        };
        self.entries[(ordinal - self.unit.ordinals.start) as usize] =
            IndexEntry::new(seen.fingerprint.unwrap_or(Fingerprint::ZERO_PAGE), ordinal);
        match (seen.frame, seen.fingerprint) {
            _ if seen.exclusive => {}
            (Some(frame), Some(content)) if seen.merged => {
                self.merged_pages.push(MergedPage { ordinal, frame, content })
            }
            _ if seen.merged => {}
            (Some(frame), _) => self.shared_mappings.push((frame, ordinal)),
            (None, _) => self.unknown_shared_frames += 1,
        }
        let node = self.nodes.zip(seen.frame).map_or(0, |(nodes, frame)| nodes.node_of_frame(frame) as u8);
        self.index.set_node(ordinal, node);
        self.index.set_mark(ordinal, PageMark::from_class(class));
    }

    fn is_unread(&self, ordinal: u32) -> bool {
        self.index.mark(ordinal) == PageMark::NOT_READ
    }
}

/// Shorter runs of known pages are read anyway: the additional system call to skip them costs as much as reading a few
/// pages.
const MIN_SKIPPED_PAGES: usize = 8;

/// The runs of a unit's merged pages that are long enough to skip.
fn merged_runs(index: &PageIndex, unit: &ScanUnit) -> Vec<Range<u32>> {
    let is_merged = |page: &u32| index.mark(*page).class() == Some(PageClass::Merged);
    let pages: Vec<u32> = unit.ordinals.clone().filter(is_merged).collect();
    let stretches = pages.chunk_by(|a, b| a + 1 == *b).filter(|stretch| stretch.len() >= MIN_SKIPPED_PAGES);
    stretches.map(|stretch| stretch[0]..stretch[0] + stretch.len() as u32).collect()
}

/// A page that was read while it was mapped to a merged frame.
struct MergedPage {
    ordinal: u32,
    frame: Pfn,
    content: Fingerprint,
}

/// The contents of merged frames, as far as they are known. A frame's content cannot change while a page is mapped to
/// it, and while ksmd is idle no frame is reused for another content. The kernel may migrate frames. An old content
/// would then be used only if another merged page moved into the same frame during the pass.
struct MergedFrameContents {
    shards: [Mutex<HashMap<Pfn, Fingerprint>>; 16],
    /// Whether any content is known. Always false while ksmd runs.
    has_any: AtomicBool,
    is_ksmd_running: bool,
}

impl MergedFrameContents {
    fn new(host: &dyn Host) -> Self {
        let works = host.read("sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim_ascii() == b"1");
        Self { shards: Default::default(), has_any: AtomicBool::new(false), is_ksmd_running: works }
    }

    fn lock_shard(&self, frame: Pfn) -> MutexGuard<'_, HashMap<Pfn, Fingerprint>> {
        let part = &self.shards[frame.0 as usize % self.shards.len()];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, frame: Pfn, content: Fingerprint) {
        self.lock_shard(frame).insert(frame, content);
        self.has_any.store(true, Ordering::Relaxed);
    }

    fn content(&self, frame: Pfn) -> Option<Fingerprint> {
        self.lock_shard(frame).get(&frame).copied()
    }
}

impl Scan<'_> {
    /// Fills the index with fingerprints. Returns the subjects that could not be read, with the reason.
    pub fn first_pass(&self, index: &mut PageIndex) -> Vec<(usize, Absent)> {
        let merged = MergedFrameContents::new(self.host);
        self.scan_units(index, |portion| {
            self.skip_unsampled(portion.index, &portion.unit);
            // Pages without a known content are read below. Pages with a known content need no confirmation.
            let told = self.reuse_merged_contents(portion, &merged).unwrap_or(0);
            portion.merged_pages.clear();
            let recalled = self.cached_pages(portion);
            if let Some(recalled) = &recalled {
                let _ = self.reuse_cached_fingerprints(portion, recalled);
            }
            let outcome = if told == 0 && recalled.is_none() && self.sample.is_none() {
                self.read_filtered(portion, None, None)
            } else {
                self.read_unread(portion, recalled.as_ref())
            };
            self.progress.add_scanned(portion.unit.ordinals.len() as u64, 0);
            // Contents that cannot be confirmed are not kept.
            let _ = self.confirm_merged_frames(portion, &merged);
            outcome
        })
    }

    /// Finds the pages that may have a duplicate, and reads those of them whose content is only cached. Call this once,
    /// after the first pass.
    pub fn build_duplicate_filter(&self, index: &mut PageIndex) -> (DuplicateFilter, Vec<(usize, Absent)>) {
        let pairs = DuplicateFilter::build(index);
        let again = |portion: &mut UnitScan<'_>| self.verify_cached_duplicates(portion, &pairs);
        let failures = if self.cache.is_some() { self.scan_units(index, again) } else { Vec::new() };
        index.resolve_repeated_frames();
        (pairs, failures)
    }

    /// Scans all units in parallel. Returns the subjects that could not be read, with the reason.
    fn scan_units(
        &self,
        index: &mut PageIndex,
        scan_unit: impl Fn(&mut UnitScan<'_>) -> Reading<()> + Sync,
    ) -> Vec<(usize, Absent)> {
        let mut entries = std::mem::take(&mut index.entries);
        let mut work = Vec::new();
        let mut rest = entries.as_mut_slice();
        for unit in index.scan_units(self.scope) {
            let (own, after) = rest.split_at_mut(unit.ordinals.len());
            work.push((unit, own));
            rest = after;
        }
        let (filled, nodes) = (&*index, self.nodes.as_ref());
        let results: Vec<_> = work
            .into_par_iter()
            // One unit at a time: an idle thread cannot steal part of a batch that another thread has begun.
            .with_max_len(1)
            .map(|(unit, entries)| {
                let (shared, merged) = Default::default();
                let mut portion = UnitScan {
                    index: filled,
                    unit,
                    entries,
                    nodes,
                    shared_mappings: shared,
                    unknown_shared_frames: 0,
                    merged_pages: merged,
                };
                let outcome = scan_unit(&mut portion);
                if outcome == Err(Absent::Vanished) {
                    portion.unit.ordinals.clone().filter(|&page| portion.is_unread(page)).for_each(|page| {
                        filled.set_mark(page, PageMark::NOT_RESIDENT);
                    });
                }
                (portion.unit.subject, outcome, portion.shared_mappings, portion.unknown_shared_frames)
            })
            .collect();
        index.entries = entries;
        let mut failures = Vec::new();
        for (subject, outcome, shared, indistinct) in results {
            index.unknown_shared_frames += indistinct;
            index.add_shared_mappings(shared);
            failures.extend(outcome.err().map(|why| (subject, why)));
        }
        failures
    }

    /// Reads pages again and marks the ones that changed: all pages that are not merged, or with `duplicates` only
    /// candidates for merging. Subjects that are `is_inactive` are not read.
    pub fn second_pass(
        &self,
        index: &PageIndex,
        duplicates: Option<&DuplicateFilter>,
        is_inactive: &(dyn Fn(usize) -> bool + Sync),
    ) -> SecondPassResult {
        let mut units = index.scan_units(self.scope);
        units.retain(|unit| !is_inactive(unit.subject));
        let results: Vec<_> = units
            .into_par_iter()
            .with_max_len(1)
            .map(|unit| {
                let merged = if duplicates.is_none() { merged_runs(index, &unit) } else { Vec::new() };
                let again = |ordinal| match duplicates {
                    Some(pairs) => pairs.is_candidate(index, ordinal),
                    None => {
                        let passed_by = merged.partition_point(|stretch| stretch.end <= ordinal);
                        let is_merged = merged.get(passed_by).is_some_and(|stretch| stretch.contains(&ordinal));
                        !is_merged
                            && index.mark(ordinal) != PageMark::NOT_SAMPLED
                            && !index.mark(ordinal).is_uncertain()
                    }
                };
                let all = duplicates.is_none() && self.sample.is_none() && merged.is_empty();
                let takes: Option<PageFilter<'_>> = (!all).then_some(&again);
                let mut pages = 0;
                let outcome = self.read_pages(index, &unit, takes, &mut |ordinal, seen| {
                    pages += 1;
                    let mark = index.mark(ordinal);
                    match (mark.class(), seen) {
                        // Pages that were not read in the first pass stay so; volatile and merged pages are known
                        // already.
                        (None | Some(PageClass::Volatile | PageClass::Merged), _) => {}
                        (Some(_), None) => index.set_mark(ordinal, PageMark::NOT_RESIDENT),
                        (Some(_), Some(ReadPage { merged: true, .. })) => {
                            index.set_mark(ordinal, PageMark::from_class(PageClass::Merged));
                        }
                        (Some(_), Some(ReadPage { fingerprint, .. })) => {
                            if fingerprint != Some(index.entries[ordinal as usize].fingerprint()) {
                                index.set_mark(ordinal, PageMark::from_class(PageClass::Volatile));
                            }
                        }
                    }
                });
                self.progress.add_scanned(unit.ordinals.len() as u64, 0);
                if outcome == Err(Absent::Vanished) {
                    unit.ordinals.clone().for_each(|page| index.set_mark(page, PageMark::NOT_RESIDENT));
                }
                (unit.subject, outcome, pages)
            })
            .collect();
        SecondPassResult {
            pages_read: Pages(results.iter().map(|&(.., pages)| pages).sum()),
            failures: results.into_iter().filter_map(|(subject, outcome, _)| Some((subject, outcome.err()?))).collect(),
        }
    }

    /// Marks the pages of a unit that are not in the sample.
    fn skip_unsampled(&self, index: &PageIndex, unit: &ScanUnit) {
        if let Some(rule) = self.sample {
            unit.ordinals.clone().filter(|&page| !rule.includes(page)).for_each(|page| {
                index.set_mark(page, PageMark::NOT_SAMPLED);
            });
        }
    }

    /// Opens the process of a unit.
    fn open(&self, unit: &ScanUnit) -> Reading<Box<dyn ProcessHandle + '_>> {
        pagefold_host::hold(self.host, self.scope.subjects[unit.subject].process.id)
    }

    /// Visits the current mappings of a unit's pages, for the runs with any `wanted` page.
    fn for_each_mapping(
        &self,
        index: &PageIndex,
        unit: &ScanUnit,
        wanted: &dyn Fn(u32) -> bool,
        visit: &mut dyn FnMut(u32, &PagemapEntry),
    ) -> Reading<()> {
        let handle = self.open(unit)?;
        let page_len = self.host.page_size().bytes();
        for (run, first) in index.runs(unit.ordinals.clone()) {
            if (first..first + run.pages).any(wanted) {
                let range = AddressRange { start: run.address, end: run.address + u64::from(run.pages) * page_len };
                handle.mappings(range)?.iter().zip(first..).for_each(|(mapping, ordinal)| visit(ordinal, mapping));
            }
        }
        Ok(())
    }

    /// Records the merged pages of a unit that are mapped to frames with known contents, where that is cheaper than
    /// reading them. Returns the number of these pages.
    fn reuse_merged_contents(&self, portion: &mut UnitScan<'_>, merged: &MergedFrameContents) -> Reading<usize> {
        let any = portion.unit.method == (ReadMethod::ProcMem { detect_merged: true })
            && merged.has_any.load(Ordering::Relaxed);
        if !any || self.stop.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut known: Vec<(u32, Pfn, Fingerprint)> = Vec::new();
        let wanted = |ordinal| portion.is_unread(ordinal);
        self.for_each_mapping(portion.index, &portion.unit, &wanted, &mut |ordinal, mapping| {
            let frame = EntryState::from_entry(mapping, FrameLookup::Shared).frame().filter(|_| wanted(ordinal));
            known.extend(frame.and_then(|frame| Some((ordinal, frame, merged.content(frame)?))));
        })?;
        let stretches = known.chunk_by(|a, b| a.0 + 1 == b.0).filter(|stretch| stretch.len() >= MIN_SKIPPED_PAGES);
        let mut states = PageStates::default();
        stretches.flatten().for_each(|&(ordinal, frame, content)| states.push(frame, (ordinal, content)));
        let mut reused = 0;
        states.resolve(self.host, |(ordinal, content), state| {
            if let PageState::Ksm(frame) = state {
                reused += 1;
                let (fingerprint, frame) = (Some(content), Some(frame));
                portion.record_page(ordinal, Some(ReadPage { fingerprint, merged: true, exclusive: false, frame }));
            }
        })?;
        Ok(reused)
    }

    /// The cached pages of a unit.
    fn cached_pages(&self, portion: &UnitScan<'_>) -> Option<CachedPages<'_>> {
        let ScanUnit { subject, method: way, ordinals } = &portion.unit;
        let remembered = self.cache.filter(|_| is_cacheable(&self.scope.subjects[*subject], *way))?;
        remembered.fingerprints.lookup(self.scope, portion.index, *subject, ordinals.clone())
    }

    /// Reads a few pages to probe the cache, then records the pages that are assumed to be unchanged or volatile.
    fn reuse_cached_fingerprints(&self, portion: &mut UnitScan<'_>, cached: &CachedPages<'_>) -> Reading<()> {
        let first = portion.unit.ordinals.start;
        let (mut tried, mut any) = (vec![false; portion.unit.ordinals.len()], false);
        for page in cached.pages_to_probe() {
            (tried[(page - first) as usize], any) = (true, true);
        }
        if any {
            self.read_filtered(portion, Some(&|page| tried[(page - first) as usize]), Some(cached))?;
        }
        let told = cached
            .reusable_fingerprints()
            .map(|(page, content)| (page, IndexEntry::new(content, page), PageMark::CACHED_UNIQUE));
        let changes = |page| (page, IndexEntry::new(Fingerprint::ZERO_PAGE, page), PageMark::ASSUMED_VOLATILE);
        for (page, entry, mark) in told.chain(cached.assumed_volatile().map(changes)) {
            if portion.is_unread(page) && !self.stop.load(Ordering::Relaxed) {
                portion.entries[(page - first) as usize] = entry;
                portion.index.set_mark(page, mark);
            }
        }
        Ok(())
    }

    /// Reads the pages of a unit that are not recorded yet.
    fn read_unread(&self, portion: &mut UnitScan<'_>, cached: Option<&CachedPages<'_>>) -> Reading<()> {
        let first = portion.unit.ordinals.start;
        let unread: Vec<bool> = portion.unit.ordinals.clone().map(|page| portion.is_unread(page)).collect();
        self.read_filtered(portion, Some(&|page| unread[(page - first) as usize]), cached)
    }

    /// Reads pages of a unit whose content is only cached: those that may have a duplicate, and those in a block with
    /// other mergeable pages, because a range may cover them too. If the content has changed, the page was not compared
    /// with all others and stays uncertain, unless the new content may have a duplicate.
    fn verify_cached_duplicates(&self, portion: &mut UnitScan<'_>, duplicates: &DuplicateFilter) -> Reading<()> {
        let (index, ordinals) = (portion.index, portion.unit.ordinals.clone());
        let is_recalled = |page: u32| index.mark(page) == PageMark::CACHED_UNIQUE;
        if !ordinals.clone().any(is_recalled) {
            return Ok(());
        }
        let at = |page: u32| (page - ordinals.start) as usize;
        let content = |portion: &UnitScan<'_>, page: u32| portion.entries[at(page)].fingerprint();
        let gains = |page: u32| match index.mark(page).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => duplicates.may_have_duplicate(content(portion, page)),
            _ => false,
        };
        let pages: Vec<(u32, u64)> =
            each_page(index, &ordinals).map(|(_, page, address)| (page, block_number_at(index, address))).collect();
        let mut again = vec![false; ordinals.len()];
        for piece in pages.chunk_by(|a, b| a.1 == b.1).filter(|piece| piece.iter().any(|&(page, _)| gains(page))) {
            piece.iter().filter(|(page, _)| is_recalled(*page)).for_each(|&(page, _)| again[at(page)] = true);
        }
        let held: Vec<(u32, u32)> = ordinals
            .clone()
            .filter(|&page| again[at(page)])
            .map(|page| (page, content(portion, page).to_half()))
            .collect();
        if held.is_empty() {
            return Ok(());
        }
        // A page that cannot be read keeps this mark.
        held.iter().for_each(|&(page, _)| index.set_mark(page, PageMark::ASSUMED_VOLATILE));
        let recalled = self.cached_pages(portion);
        let outcome = self.read_filtered(portion, Some(&|page| again[at(page)]), recalled.as_ref());
        for (page, half) in held {
            let now = content(portion, page);
            if index.mark(page).class() == Some(PageClass::Unique)
                && now.to_half() != half
                && !duplicates.may_have_duplicate(now)
            {
                index.set_mark(page, PageMark::CACHED_UNIQUE);
            }
        }
        outcome
    }

    /// Reads and records some of a unit's pages, and compares them with the cache.
    fn read_filtered(
        &self,
        portion: &mut UnitScan<'_>,
        filter: Option<PageFilter<'_>>,
        cached: Option<&CachedPages<'_>>,
    ) -> Reading<()> {
        let (index, unit) = (portion.index, portion.unit.clone());
        self.read_pages(index, &unit, filter, &mut |page, seen| {
            if let (Some(recalled), Some(ReadPage { merged: false, fingerprint, .. })) = (cached, &seen) {
                recalled.compare(page, *fingerprint);
            }
            portion.record_page(page, seen);
        })
    }

    /// Keeps the contents of merged frames whose pages are still mapped to them after reading. This ensures that the
    /// content came from the frame and not from a copy that was written meanwhile.
    fn confirm_merged_frames(&self, portion: &mut UnitScan<'_>, merged: &MergedFrameContents) -> Reading<()> {
        let UnitScan { index, unit, merged_pages: read, .. } = portion;
        if read.is_empty() || merged.is_ksmd_running {
            return Ok(());
        }
        read.sort_unstable_by_key(|page| page.ordinal);
        let position = |ordinal| read.binary_search_by_key(&ordinal, |page: &MergedPage| page.ordinal).ok();
        self.for_each_mapping(index, unit, &|ordinal| position(ordinal).is_some(), &mut |ordinal, mapping| {
            let page = position(ordinal).map(|position| &read[position]);
            if let Some(page) = page.filter(|page| mapping.present && mapping.frame == Some(page.frame)) {
                merged.insert(page.frame, page.content);
            }
        })
    }

    /// Reads pages of a unit. `visit` gets each page, with `None` for a page that is no longer resident. An error says
    /// why the remaining pages were not read.
    fn read_pages(
        &self,
        index: &PageIndex,
        unit: &ScanUnit,
        filter: Option<PageFilter<'_>>,
        visit: &mut dyn FnMut(u32, Option<ReadPage>),
    ) -> Reading<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (runs, ordinals) = self.filtered_runs(index, unit, filter);
        if runs.is_empty() {
            return Ok(());
        }
        let mut bytes = 0;
        let mut see = |position: usize, page: PageView<'_>| {
            let ordinal = ordinals.as_ref().map_or(unit.ordinals.start + position as u32, |list| list[position]);
            let fingerprint = match page.content {
                PageContent::Bytes(content) => {
                    bytes += content.len() as u64;
                    Some(Fingerprint(self.hasher.fingerprint(content)))
                }
                PageContent::Fingerprint(fingerprint, _) => Some(fingerprint),
                PageContent::Volatile => None,
                PageContent::NotResident => return visit(ordinal, None),
            };
            let PageView { merged, exclusive, frame, .. } = page;
            visit(ordinal, Some(ReadPage { fingerprint, merged, exclusive, frame }));
        };
        let outcome = self.open(unit).and_then(|handle| handle.contents(unit.method, &runs, &mut see));
        self.progress.add_scanned(0, bytes);
        outcome
    }

    /// The runs of the pages of a unit that pass the filter, and their ordinals. Without a filter: all runs and `None`.
    fn filtered_runs(
        &self,
        index: &PageIndex,
        unit: &ScanUnit,
        filter: Option<PageFilter<'_>>,
    ) -> (Vec<PageRun>, Option<Vec<u32>>) {
        let all = index.runs(unit.ordinals.clone());
        let Some(takes) = filter else {
            return (all.map(|(run, _)| run).collect(), None);
        };
        let page_len = self.host.page_size().bytes();
        let mut ordinals = Vec::new();
        let mut runs: Vec<PageRun> = Vec::new();
        for (run, first) in all {
            let mut end = None;
            for page in (0..run.pages).filter(|page| takes(first + page)) {
                ordinals.push(first + page);
                match runs.last_mut() {
                    Some(last) if end == Some(page) => last.pages += 1,
                    _ => runs.push(PageRun { address: run.address + u64::from(page) * page_len, pages: 1, ..run }),
                }
                end = Some(page + 1);
            }
        }
        (runs, Some(ordinals))
    }
}
