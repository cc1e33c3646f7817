//! Reading the pages: two passes in parallel over portions of the index.
//!
//! While ksmd rests, what KSM has merged is read once for all pages that are mapped to the same frame: on a host that
//! is merged, that is most of what its processes hold.

use crate::ScanCache;
use crate::duplicate_filter::DuplicateFilter;
use crate::fingerprint_cache::{CachedPages, block_number_at, is_cacheable};
use crate::index::{IndexEntry, PageIndex, PageMark, ScanUnit};
use crate::range_selection::each_page;
use crate::scan_scope::ScanScope;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pages, Pfn, Reading};
use pagefold_host::observe::NumaNodes;
use pagefold_host::{Host, PageContent, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How far a census is, for whoever watches it from another thread.
#[derive(Debug, Default)]
pub struct ScanProgress {
    expected_pages: AtomicU64,
    scanned_pages: AtomicU64,
    bytes_read: AtomicU64,
}

impl ScanProgress {
    /// Pages to look at in all passes; 0 until they are listed.
    pub fn expected_pages(&self) -> u64 {
        self.expected_pages.load(Ordering::Relaxed)
    }

    /// Pages looked at so far.
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

/// Which pages are in a sample: each by itself, with one probability, by a hash of its ordinal.
#[derive(Clone, Copy, Debug)]
pub struct SampleRule {
    threshold: u64,
    seed: u64,
}

impl SampleRule {
    /// Pages are taken with `probability`, from 0 to 1.
    pub fn new(probability: f64, seed: u64) -> Self {
        // The cast saturates: 1 takes all but one in 2^64.
        Self { threshold: (probability * 2f64.powi(64)) as u64, seed }
    }

    /// Whether a page is taken.
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
    /// Where the pages are.
    pub host: &'a dyn Host,
    /// Whose they are.
    pub scope: &'a ScanScope,
    /// The fingerprint of this census.
    pub hasher: &'a Hasher,
    /// Where the nodes' frames are, if pages of different nodes are kept apart.
    pub nodes: Option<NumaNodes>,
    /// To be told how far it is.
    pub progress: &'a ScanProgress,
    /// Set to end early.
    pub stop: &'a AtomicBool,
    /// Which pages to look at; all if `None`.
    pub sample: Option<SampleRule>,
    /// What is remembered of earlier censuses under the same key. Not for a sample, nor where nodes are kept apart.
    pub cache: Option<&'a ScanCache>,
}

/// What the second pass did.
#[derive(Debug)]
pub struct SecondPassResult {
    /// Pages that it looked at.
    pub pages_read: Pages,
    /// The subjects that could not be read, and why.
    pub failures: Vec<(usize, Absent)>,
}

/// Whether to read a page.
type PageFilter<'a> = &'a dyn Fn(u32) -> bool;

/// A page that was read: its fingerprint, or `None` if it is known to change.
struct ReadPage {
    fingerprint: Option<Fingerprint>,
    merged: bool,
    /// Whether nobody else maps it.
    exclusive: bool,
    frame: Option<Pfn>,
}

/// A unit in hand, with what is found of it.
struct UnitScan<'a> {
    index: &'a PageIndex,
    unit: ScanUnit,
    entries: &'a mut [IndexEntry],
    nodes: Option<&'a NumaNodes>,
    /// Pages that others map too, with their frames.
    shared_mappings: Vec<(Pfn, u32)>,
    /// How many others map too whose frames are not known.
    unknown_shared_frames: u64,
    merged_pages: Vec<MergedPage>,
}

impl UnitScan<'_> {
    /// Put what was seen of a page into the index; `None` for one that is gone.
    fn record_page(&mut self, ordinal: u32, page: Option<ReadPage>) {
        let Some(seen) = page else { return self.index.set_mark(ordinal, PageMark::NOT_RESIDENT) };
        let class = match seen.fingerprint {
            _ if seen.merged => PageClass::Merged,
            None => PageClass::Volatile,
            Some(Fingerprint::ZERO_PAGE) => PageClass::Zero,
            // Until groups are known.
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

/// Consecutive pages that are known are passed by if they are at least so many: a call for what lies on either side of
/// them costs as much as reading some pages more.
const MIN_SKIPPED_PAGES: usize = 8;

/// The stretches of a unit's pages that are known to be merged and worth passing by.
fn merged_runs(index: &PageIndex, unit: &ScanUnit) -> Vec<Range<u32>> {
    let is_merged = |page: &u32| index.mark(*page).class() == Some(PageClass::Merged);
    let pages: Vec<u32> = unit.ordinals.clone().filter(is_merged).collect();
    let stretches = pages.chunk_by(|a, b| a + 1 == *b).filter(|stretch| stretch.len() >= MIN_SKIPPED_PAGES);
    stretches.map(|stretch| stretch[0]..stretch[0] + stretch.len() as u32).collect()
}

/// A page that was read while it was mapped to a frame of KSM.
struct MergedPage {
    ordinal: u32,
    frame: Pfn,
    content: Fingerprint,
}

/// What the frames hold that KSM has merged pages to, as far as it is known: nobody writes to one while anybody is
/// mapped to it, and while ksmd rests none becomes another's. (The kernel may move them; for one to be told with what
/// it held before, another merged page has to come to its place within the pass.)
struct MergedFrameContents {
    shards: [Mutex<HashMap<Pfn, Fingerprint>>; 16],
    /// Whether there are any. None while ksmd works.
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
    /// Fill the index with fingerprints. Returns the subjects that could not be read, and why.
    pub fn first_pass(&self, index: &mut PageIndex) -> Vec<(usize, Absent)> {
        let merged = MergedFrameContents::new(self.host);
        self.scan_units(index, |portion| {
            self.skip_unsampled(portion.index, &portion.unit);
            // What cannot be told is read, and what was told need not be confirmed.
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
            // Nothing is remembered of what cannot be confirmed.
            let _ = self.confirm_merged_frames(portion, &merged);
            outcome
        })
    }

    /// Tell which pages may have a partner, and read those of them of which it is only remembered what they held. To be
    /// called once, after the first pass.
    pub fn build_duplicate_filter(&self, index: &mut PageIndex) -> (DuplicateFilter, Vec<(usize, Absent)>) {
        let pairs = DuplicateFilter::build(index);
        let again = |portion: &mut UnitScan<'_>| self.verify_cached_duplicates(portion, &pairs);
        let failures = if self.cache.is_some() { self.scan_units(index, again) } else { Vec::new() };
        index.resolve_repeated_frames();
        (pairs, failures)
    }

    /// Go through all units in parallel. Returns the subjects that could not be read, and why.
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
            // One by one: what a thread has begun as one piece cannot be taken from it by an idle one.
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

    /// Read again and mark what changed: everything that is not merged, or with `pairs` only what has anything to gain.
    /// Nothing is read of subjects that `rested`.
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
                        // What was not read in the first pass stays so; what changes, or is merged, is known already.
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

    /// Mark the pages of a unit that are not in the sample.
    fn skip_unsampled(&self, index: &PageIndex, unit: &ScanUnit) {
        if let Some(rule) = self.sample {
            unit.ordinals.clone().filter(|&page| !rule.includes(page)).for_each(|page| {
                index.set_mark(page, PageMark::NOT_SAMPLED);
            });
        }
    }

    /// The process of a unit.
    fn open(&self, unit: &ScanUnit) -> Reading<Box<dyn ProcessHandle + '_>> {
        let id = self.scope.subjects[unit.subject].process.id;
        let handle = self.host.open(id.pid)?;
        if handle.id() == id { Ok(handle) } else { Err(Absent::Vanished) }
    }

    /// What some of a unit's pages are mapped to now: of the runs that have any that is `wanted`.
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

    /// Note those of a unit's pages that are merged to frames of which it is known what they hold, where that is less
    /// work than to read them. Returns how many those are.
    fn reuse_merged_contents(&self, portion: &mut UnitScan<'_>, merged: &MergedFrameContents) -> Reading<usize> {
        let any = portion.unit.method == (ReadMethod::ProcMem { detect_merged: true })
            && merged.has_any.load(Ordering::Relaxed);
        if !any || self.stop.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut known: Vec<(u32, Pfn, Fingerprint)> = Vec::new();
        let wanted = |ordinal| portion.is_unread(ordinal);
        self.for_each_mapping(portion.index, &portion.unit, &wanted, &mut |ordinal, mapping| {
            let shared = mapping.present && !mapping.file && !mapping.exclusive;
            let frame = mapping.frame.filter(|_| shared && wanted(ordinal));
            known.extend(frame.and_then(|frame| Some((ordinal, frame, merged.content(frame)?))));
        })?;
        let stretches = known.chunk_by(|a, b| a.0 + 1 == b.0).filter(|stretch| stretch.len() >= MIN_SKIPPED_PAGES);
        let mut known: Vec<(Pfn, u32, Fingerprint)> =
            stretches.flatten().map(|&(ordinal, frame, content)| (frame, ordinal, content)).collect();
        known.sort_unstable();
        let mut frames: Vec<Pfn> = known.iter().map(|(frame, ..)| *frame).collect();
        frames.dedup();
        let flags = if frames.is_empty() { Vec::new() } else { self.host.frame_flags(&frames)? };
        let mut told = 0;
        for (same, _) in known.chunk_by(|a, b| a.0 == b.0).zip(flags).filter(|(_, flags)| flags.is_ksm()) {
            told += same.len();
            for &(frame, ordinal, content) in same {
                let (fingerprint, frame) = (Some(content), Some(frame));
                portion.record_page(ordinal, Some(ReadPage { fingerprint, merged: true, exclusive: false, frame }));
            }
        }
        Ok(told)
    }

    /// What is remembered of a unit's pages.
    fn cached_pages(&self, portion: &UnitScan<'_>) -> Option<CachedPages<'_>> {
        let ScanUnit { subject, method: way, ordinals } = &portion.unit;
        let remembered = self.cache.filter(|_| is_cacheable(&self.scope.subjects[*subject], *way))?;
        remembered.fingerprints.lookup(self.scope, portion.index, *subject, ordinals.clone())
    }

    /// Note those of a unit's pages that may be taken to hold what they did, after some were read, and those that are
    /// taken to change on.
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

    /// Read what is not known of a unit.
    fn read_unread(&self, portion: &mut UnitScan<'_>, cached: Option<&CachedPages<'_>>) -> Reading<()> {
        let first = portion.unit.ordinals.start;
        let unread: Vec<bool> = portion.unit.ordinals.clone().map(|page| portion.is_unread(page)).collect();
        self.read_filtered(portion, Some(&|page| unread[(page - first) as usize]), cached)
    }

    /// Read those of a unit's pages that may have a partner by what they are remembered to have held, and those in the
    /// same pieces as any others that have something to gain: they may be covered with these. What is found to hold
    /// something else now was not compared with the others, unless that may have a partner, too.
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
        // What cannot be read stays so.
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

    /// Read and note some of a unit's pages, and compare them with what is remembered.
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

    /// Remember what frames hold whose pages were read, as far as these are still mapped to them: what was read is
    /// theirs, then, and not what somebody wrote to a copy of his own meanwhile.
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

    /// Read a unit's pages. `note` gets each page that was looked at, `None` for one that is gone. An error says why
    /// the rest was not.
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

    /// The runs of a unit that are taken, and the ordinals of their pages; all of it where nothing is left out.
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
