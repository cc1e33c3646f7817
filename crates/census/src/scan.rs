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
        let Some(page) = page else { return self.index.set_mark(ordinal, PageMark::NOT_RESIDENT) };
        let class = match page.fingerprint {
            _ if page.merged => PageClass::Merged,
            None => PageClass::Volatile,
            Some(Fingerprint::ZERO_PAGE) => PageClass::Zero,
            // Until the groups are known.
            Some(_) => PageClass::Unique,
        };
        self.entries[(ordinal - self.unit.ordinals.start) as usize] =
            IndexEntry::new(page.fingerprint.unwrap_or(Fingerprint::ZERO_PAGE), ordinal);
        match (page.frame, page.fingerprint) {
            _ if page.exclusive => {}
            (Some(frame), Some(content)) if page.merged => {
                self.merged_pages.push(MergedPage { ordinal, frame, content })
            }
            _ if page.merged => {}
            (Some(frame), _) => self.shared_mappings.push((frame, ordinal)),
            (None, _) => self.unknown_shared_frames += 1,
        }
        let node = self.nodes.zip(page.frame).map_or(0, |(nodes, frame)| nodes.node_of_frame(frame) as u8);
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
    let runs = pages.chunk_by(|a, b| a + 1 == *b).filter(|run| run.len() >= MIN_SKIPPED_PAGES);
    runs.map(|run| run[0]..run[0] + run.len() as u32).collect()
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
        let is_ksmd_running = host.read("sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim_ascii() == b"1");
        Self { shards: Default::default(), has_any: AtomicBool::new(false), is_ksmd_running }
    }

    fn lock_shard(&self, frame: Pfn) -> MutexGuard<'_, HashMap<Pfn, Fingerprint>> {
        let shard = &self.shards[frame.0 as usize % self.shards.len()];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
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
        self.scan_units(index, |unit_scan| {
            self.skip_unsampled(unit_scan.index, &unit_scan.unit);
            // Pages without a known content are read below. Pages with a known content need no confirmation.
            let reused = self.reuse_merged_contents(unit_scan, &merged).unwrap_or(0);
            unit_scan.merged_pages.clear();
            let cached = self.cached_pages(unit_scan);
            if let Some(cached) = &cached {
                let _ = self.reuse_cached_fingerprints(unit_scan, cached);
            }
            let outcome = if reused == 0 && cached.is_none() && self.sample.is_none() {
                self.read_filtered(unit_scan, None, None)
            } else {
                self.read_unread(unit_scan, cached.as_ref())
            };
            self.progress.add_scanned(unit_scan.unit.ordinals.len() as u64, 0);
            // Contents that cannot be confirmed are not kept.
            let _ = self.confirm_merged_frames(unit_scan, &merged);
            outcome
        })
    }

    /// Finds the pages that may have a duplicate, and reads those of them whose content is only cached. Call this once,
    /// after the first pass.
    pub fn build_duplicate_filter(&self, index: &mut PageIndex) -> (DuplicateFilter, Vec<(usize, Absent)>) {
        let duplicates = DuplicateFilter::build(index);
        let verify = |unit_scan: &mut UnitScan<'_>| self.verify_cached_duplicates(unit_scan, &duplicates);
        let failures = if self.cache.is_some() { self.scan_units(index, verify) } else { Vec::new() };
        index.resolve_repeated_frames();
        (duplicates, failures)
    }

    /// Scans all units in parallel. Returns the subjects that could not be read, with the reason.
    fn scan_units(
        &self,
        index: &mut PageIndex,
        scan: impl Fn(&mut UnitScan<'_>) -> Reading<()> + Sync,
    ) -> Vec<(usize, Absent)> {
        let mut entries = std::mem::take(&mut index.entries);
        let mut work = Vec::new();
        let mut rest = entries.as_mut_slice();
        for unit in index.scan_units(self.scope) {
            let (unit_entries, after) = rest.split_at_mut(unit.ordinals.len());
            work.push((unit, unit_entries));
            rest = after;
        }
        let (shared_index, nodes) = (&*index, self.nodes.as_ref());
        let results: Vec<_> = work
            .into_par_iter()
            // One unit at a time: an idle thread cannot steal part of a batch that another thread has begun.
            .with_max_len(1)
            .map(|(unit, entries)| {
                let (shared_mappings, merged_pages) = Default::default();
                let mut unit_scan = UnitScan {
                    index: shared_index,
                    unit,
                    entries,
                    nodes,
                    shared_mappings,
                    unknown_shared_frames: 0,
                    merged_pages,
                };
                let outcome = scan(&mut unit_scan);
                if outcome == Err(Absent::Vanished) {
                    unit_scan.unit.ordinals.clone().filter(|&page| unit_scan.is_unread(page)).for_each(|page| {
                        shared_index.set_mark(page, PageMark::NOT_RESIDENT);
                    });
                }
                (unit_scan.unit.subject, outcome, unit_scan.shared_mappings, unit_scan.unknown_shared_frames)
            })
            .collect();
        index.entries = entries;
        let mut failures = Vec::new();
        for (subject, outcome, shared_mappings, unknown_shared_frames) in results {
            index.unknown_shared_frames += unknown_shared_frames;
            index.add_shared_mappings(shared_mappings);
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
                let is_reread = |ordinal| match duplicates {
                    Some(duplicates) => duplicates.is_candidate(index, ordinal),
                    None => {
                        let position = merged.partition_point(|run| run.end <= ordinal);
                        let is_merged = merged.get(position).is_some_and(|run| run.contains(&ordinal));
                        !is_merged
                            && index.mark(ordinal) != PageMark::NOT_SAMPLED
                            && !index.mark(ordinal).is_uncertain()
                    }
                };
                let reads_all = duplicates.is_none() && self.sample.is_none() && merged.is_empty();
                let filter: Option<PageFilter<'_>> = (!reads_all).then_some(&is_reread);
                let mut pages = 0;
                let outcome = self.read_pages(index, &unit, filter, &mut |ordinal, page| {
                    pages += 1;
                    let mark = index.mark(ordinal);
                    match (mark.class(), page) {
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

    /// Visits the current mappings of a unit's pages, for the runs with a page that `is_wanted` selects.
    fn for_each_mapping(
        &self,
        index: &PageIndex,
        unit: &ScanUnit,
        is_wanted: &dyn Fn(u32) -> bool,
        visit: &mut dyn FnMut(u32, &PagemapEntry),
    ) -> Reading<()> {
        let handle = self.open(unit)?;
        let page_len = self.host.page_size().bytes();
        for (run, first) in index.runs(unit.ordinals.clone()) {
            if (first..first + run.pages).any(is_wanted) {
                let range = AddressRange { start: run.address, end: run.address + u64::from(run.pages) * page_len };
                handle.mappings(range)?.iter().zip(first..).for_each(|(mapping, ordinal)| visit(ordinal, mapping));
            }
        }
        Ok(())
    }

    /// Records the merged pages of a unit that are mapped to frames with known contents, where that is cheaper than
    /// reading them. Returns the number of these pages.
    fn reuse_merged_contents(&self, unit_scan: &mut UnitScan<'_>, merged: &MergedFrameContents) -> Reading<usize> {
        let is_usable = unit_scan.unit.method == (ReadMethod::ProcMem { detect_merged: true })
            && merged.has_any.load(Ordering::Relaxed);
        if !is_usable || self.stop.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut known_pages: Vec<(u32, Pfn, Fingerprint)> = Vec::new();
        let is_unread = |ordinal| unit_scan.is_unread(ordinal);
        self.for_each_mapping(unit_scan.index, &unit_scan.unit, &is_unread, &mut |ordinal, mapping| {
            let frame = EntryState::from_entry(mapping, FrameLookup::Shared).frame().filter(|_| is_unread(ordinal));
            known_pages.extend(frame.and_then(|frame| Some((ordinal, frame, merged.content(frame)?))));
        })?;
        let runs = known_pages.chunk_by(|a, b| a.0 + 1 == b.0).filter(|run| run.len() >= MIN_SKIPPED_PAGES);
        let mut states = PageStates::default();
        runs.flatten().for_each(|&(ordinal, frame, content)| states.push(frame, (ordinal, content)));
        let mut reused = 0;
        states.resolve(self.host, |(ordinal, content), state| {
            if let PageState::Ksm(frame) = state {
                reused += 1;
                let (fingerprint, frame) = (Some(content), Some(frame));
                unit_scan.record_page(ordinal, Some(ReadPage { fingerprint, merged: true, exclusive: false, frame }));
            }
        })?;
        Ok(reused)
    }

    /// The cached pages of a unit.
    fn cached_pages(&self, unit_scan: &UnitScan<'_>) -> Option<CachedPages<'_>> {
        let ScanUnit { subject, method, ordinals } = &unit_scan.unit;
        let cache = self.cache.filter(|_| is_cacheable(&self.scope.subjects[*subject], *method))?;
        cache.fingerprints.lookup(self.scope, unit_scan.index, *subject, ordinals.clone())
    }

    /// Reads a few pages to probe the cache, then records the pages that are assumed to be unchanged or volatile.
    fn reuse_cached_fingerprints(&self, unit_scan: &mut UnitScan<'_>, cached: &CachedPages<'_>) -> Reading<()> {
        let first = unit_scan.unit.ordinals.start;
        let (mut probed, mut has_probes) = (vec![false; unit_scan.unit.ordinals.len()], false);
        for page in cached.pages_to_probe() {
            (probed[(page - first) as usize], has_probes) = (true, true);
        }
        if has_probes {
            self.read_filtered(unit_scan, Some(&|page| probed[(page - first) as usize]), Some(cached))?;
        }
        let unchanged = cached
            .reusable_fingerprints()
            .map(|(page, content)| (page, IndexEntry::new(content, page), PageMark::CACHED_UNIQUE));
        let to_volatile = |page| (page, IndexEntry::new(Fingerprint::ZERO_PAGE, page), PageMark::ASSUMED_VOLATILE);
        for (page, entry, mark) in unchanged.chain(cached.assumed_volatile().map(to_volatile)) {
            if unit_scan.is_unread(page) && !self.stop.load(Ordering::Relaxed) {
                unit_scan.entries[(page - first) as usize] = entry;
                unit_scan.index.set_mark(page, mark);
            }
        }
        Ok(())
    }

    /// Reads the pages of a unit that are not recorded yet.
    fn read_unread(&self, unit_scan: &mut UnitScan<'_>, cached: Option<&CachedPages<'_>>) -> Reading<()> {
        let first = unit_scan.unit.ordinals.start;
        let unread: Vec<bool> = unit_scan.unit.ordinals.clone().map(|page| unit_scan.is_unread(page)).collect();
        self.read_filtered(unit_scan, Some(&|page| unread[(page - first) as usize]), cached)
    }

    /// Reads pages of a unit whose content is only cached: those that may have a duplicate, and those in a block with
    /// other mergeable pages, because a range may cover them too. If the content has changed, the page was not compared
    /// with all others and stays uncertain, unless the new content may have a duplicate.
    fn verify_cached_duplicates(&self, unit_scan: &mut UnitScan<'_>, duplicates: &DuplicateFilter) -> Reading<()> {
        let (index, ordinals) = (unit_scan.index, unit_scan.unit.ordinals.clone());
        let is_cached_unique = |page: u32| index.mark(page) == PageMark::CACHED_UNIQUE;
        if !ordinals.clone().any(is_cached_unique) {
            return Ok(());
        }
        let position = |page: u32| (page - ordinals.start) as usize;
        let content = |unit_scan: &UnitScan<'_>, page: u32| unit_scan.entries[position(page)].fingerprint();
        let is_mergeable = |page: u32| match index.mark(page).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => duplicates.may_have_duplicate(content(unit_scan, page)),
            _ => false,
        };
        let pages: Vec<(u32, u64)> =
            each_page(index, &ordinals).map(|(_, page, address)| (page, block_number_at(index, address))).collect();
        let mut is_reread = vec![false; ordinals.len()];
        for block in pages.chunk_by(|a, b| a.1 == b.1).filter(|block| block.iter().any(|&(page, _)| is_mergeable(page)))
        {
            block
                .iter()
                .filter(|(page, _)| is_cached_unique(*page))
                .for_each(|&(page, _)| is_reread[position(page)] = true);
        }
        let cached_halves: Vec<(u32, u32)> = ordinals
            .clone()
            .filter(|&page| is_reread[position(page)])
            .map(|page| (page, content(unit_scan, page).to_half()))
            .collect();
        if cached_halves.is_empty() {
            return Ok(());
        }
        // A page that cannot be read keeps this mark.
        cached_halves.iter().for_each(|&(page, _)| index.set_mark(page, PageMark::ASSUMED_VOLATILE));
        let cached = self.cached_pages(unit_scan);
        let outcome = self.read_filtered(unit_scan, Some(&|page| is_reread[position(page)]), cached.as_ref());
        for (page, half) in cached_halves {
            let current = content(unit_scan, page);
            if index.mark(page).class() == Some(PageClass::Unique)
                && current.to_half() != half
                && !duplicates.may_have_duplicate(current)
            {
                index.set_mark(page, PageMark::CACHED_UNIQUE);
            }
        }
        outcome
    }

    /// Reads and records some of a unit's pages, and compares them with the cache.
    fn read_filtered(
        &self,
        unit_scan: &mut UnitScan<'_>,
        filter: Option<PageFilter<'_>>,
        cached: Option<&CachedPages<'_>>,
    ) -> Reading<()> {
        let (index, unit) = (unit_scan.index, unit_scan.unit.clone());
        self.read_pages(index, &unit, filter, &mut |page, read_page| {
            if let (Some(cached), Some(ReadPage { merged: false, fingerprint, .. })) = (cached, &read_page) {
                cached.compare(page, *fingerprint);
            }
            unit_scan.record_page(page, read_page);
        })
    }

    /// Keeps the contents of merged frames whose pages are still mapped to them after reading. This ensures that the
    /// content came from the frame and not from a copy that was written meanwhile.
    fn confirm_merged_frames(&self, unit_scan: &mut UnitScan<'_>, merged: &MergedFrameContents) -> Reading<()> {
        let UnitScan { index, unit, merged_pages: pages, .. } = unit_scan;
        if pages.is_empty() || merged.is_ksmd_running {
            return Ok(());
        }
        pages.sort_unstable_by_key(|page| page.ordinal);
        let position = |ordinal| pages.binary_search_by_key(&ordinal, |page: &MergedPage| page.ordinal).ok();
        self.for_each_mapping(index, unit, &|ordinal| position(ordinal).is_some(), &mut |ordinal, mapping| {
            let page = position(ordinal).map(|position| &pages[position]);
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
        let mut record = |position: usize, page: PageView<'_>| {
            let ordinal = ordinals.as_ref().map_or(unit.ordinals.start + position as u32, |list| list[position]);
            let fingerprint = match page.content {
                PageContent::Bytes(content) => {
                    bytes += content.len() as u64;
                    index.set_order_key(ordinal, content);
                    Some(Fingerprint(self.hasher.fingerprint(content)))
                }
                PageContent::Fingerprint(fingerprint, _) => Some(fingerprint),
                PageContent::Volatile => None,
                PageContent::NotResident => return visit(ordinal, None),
            };
            let PageView { merged, exclusive, frame, .. } = page;
            visit(ordinal, Some(ReadPage { fingerprint, merged, exclusive, frame }));
        };
        let outcome = self.open(unit).and_then(|handle| handle.contents(unit.method, &runs, &mut record));
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
        let unit_runs = index.runs(unit.ordinals.clone());
        let Some(filter) = filter else {
            return (unit_runs.map(|(run, _)| run).collect(), None);
        };
        let page_len = self.host.page_size().bytes();
        let mut ordinals = Vec::new();
        let mut runs: Vec<PageRun> = Vec::new();
        for (run, first) in unit_runs {
            let mut end = None;
            for page in (0..run.pages).filter(|page| filter(first + page)) {
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
