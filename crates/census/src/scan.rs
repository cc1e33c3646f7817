//! Reading the pages: two passes in parallel over portions of the index.
//!
//! While ksmd rests, what KSM has merged is read once for all pages that are mapped to the same frame: on a host that
//! is merged, that is most of what its processes hold.

use crate::index::{Entry, Index, Mark, Unit};
use crate::pairs::Pairs;
use crate::survey::Survey;
use pagefold_host::observe::Nodes;
use pagefold_host::{Host, Mapping, PageContent, PageView, Process, Run, Way};
use pagefold_model::{Absent, AddressRange, Fingerprint, PageClass, Pages, Pfn, Reading};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How far a census is, for whoever watches it from another thread.
#[derive(Debug, Default)]
pub struct Progress {
    expected: AtomicU64,
    done: AtomicU64,
    bytes: AtomicU64,
}

impl Progress {
    /// Pages to look at in all passes; 0 until they are listed.
    pub fn expected(&self) -> u64 {
        self.expected.load(Ordering::Relaxed)
    }

    /// Pages looked at so far.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes of page contents read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn expect(&self, pages: u64) {
        self.expected.store(pages, Ordering::Relaxed);
    }

    fn advance(&self, pages: u64, bytes: u64) {
        self.done.fetch_add(pages, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
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
    pub fn takes(self, ordinal: u32) -> bool {
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
    pub survey: &'a Survey,
    /// The fingerprint of this census.
    pub hasher: &'a Hasher,
    /// Where the nodes' frames are, if pages of different nodes are kept apart.
    pub nodes: Option<Nodes>,
    /// To be told how far it is.
    pub progress: &'a Progress,
    /// Set to end early.
    pub stop: &'a AtomicBool,
    /// Which pages to look at; all if `None`.
    pub sample: Option<SampleRule>,
}

/// What the second pass did.
#[derive(Debug)]
pub struct Again {
    /// Pages that it looked at.
    pub pages: Pages,
    /// The subjects that could not be read, and why.
    pub failures: Vec<(usize, Absent)>,
}

/// Whether to read a page.
type Takes<'a> = &'a dyn Fn(u32) -> bool;

/// A page that was read: its fingerprint, or `None` if it is known to change.
struct Seen {
    fingerprint: Option<Fingerprint>,
    merged: bool,
    /// Whether nobody else maps it.
    exclusive: bool,
    frame: Option<Pfn>,
}

/// Consecutive pages that are known are passed by if they are at least so many: a call for what lies on either side of
/// them costs as much as reading some pages more.
const STRETCH: usize = 8;

/// The stretches of a unit's pages that are known to be merged and worth passing by.
fn merged_stretches(index: &Index, unit: &Unit) -> Vec<Range<u32>> {
    let is_merged = |page: &u32| index.mark(*page).class() == Some(PageClass::Merged);
    let pages: Vec<u32> = unit.ordinals.clone().filter(is_merged).collect();
    let stretches = pages.chunk_by(|a, b| a + 1 == *b).filter(|stretch| stretch.len() >= STRETCH);
    stretches.map(|stretch| stretch[0]..stretch[0] + stretch.len() as u32).collect()
}

/// A page that was read while it was mapped to a frame of KSM.
struct Merged {
    ordinal: u32,
    frame: Pfn,
    content: Fingerprint,
}

/// What the frames hold that KSM has merged pages to, as far as it is known: nobody writes to one while anybody is
/// mapped to it, and while ksmd rests none becomes another's. (The kernel may move them; for one to be told with what
/// it held before, another merged page has to come to its place within the pass.)
struct MergedFrames {
    parts: [Mutex<HashMap<Pfn, Fingerprint>>; 16],
    /// Whether there are any. None while ksmd works.
    any: AtomicBool,
    works: bool,
}

impl MergedFrames {
    fn new(host: &dyn Host) -> Self {
        let works = host.read("sys/kernel/mm/ksm/run").is_ok_and(|run| run.trim_ascii() == b"1");
        Self { parts: Default::default(), any: AtomicBool::new(false), works }
    }

    fn part(&self, frame: Pfn) -> MutexGuard<'_, HashMap<Pfn, Fingerprint>> {
        let part = &self.parts[frame.0 as usize % self.parts.len()];
        part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, frame: Pfn, content: Fingerprint) {
        self.part(frame).insert(frame, content);
        self.any.store(true, Ordering::Relaxed);
    }

    fn content(&self, frame: Pfn) -> Option<Fingerprint> {
        self.part(frame).get(&frame).copied()
    }
}

impl Scan<'_> {
    /// Fill the index with fingerprints. Returns the subjects that could not be read, and why.
    pub fn first_pass(&self, index: &mut Index) -> Vec<(usize, Absent)> {
        let mut entries = std::mem::take(&mut index.entries);
        let mut work = Vec::new();
        let mut rest = entries.as_mut_slice();
        for unit in index.units(self.survey) {
            let (slots, after) = rest.split_at_mut(unit.ordinals.len());
            work.push((unit, slots));
            rest = after;
        }
        let shared = &*index;
        let merged = MergedFrames::new(self.host);
        let results: Vec<_> = work
            .into_par_iter()
            // One by one: what a thread has begun as one piece cannot be taken from it by an idle one.
            .with_max_len(1)
            .map(|(unit, slots)| {
                self.skip_unsampled(shared, &unit);
                let (mut frames, mut indistinct, mut fresh) = (Vec::new(), 0, Vec::new());
                let mut note = |ordinal, seen: Option<Seen>| {
                    let Some(seen) = seen else { return shared.set_mark(ordinal, Mark::GONE) };
                    let class = match seen.fingerprint {
                        _ if seen.merged => PageClass::Merged,
                        None => PageClass::Volatile,
                        Some(Fingerprint::ZERO_PAGE) => PageClass::Zero,
                        // Until groups are known.
                        Some(_) => PageClass::Unique,
                    };
                    slots[(ordinal - unit.ordinals.start) as usize] =
                        Entry::new(seen.fingerprint.unwrap_or(Fingerprint::ZERO_PAGE), ordinal);
                    match (seen.frame, seen.fingerprint) {
                        _ if seen.exclusive => {}
                        (Some(frame), Some(content)) if seen.merged => fresh.push(Merged { ordinal, frame, content }),
                        _ if seen.merged => {}
                        (Some(frame), _) => frames.push((frame, ordinal)),
                        (None, _) => indistinct += 1,
                    }
                    let node = self.nodes.as_ref().zip(seen.frame).map_or(0, |(nodes, frame)| nodes.of(frame) as u8);
                    shared.set_node(ordinal, node);
                    shared.set_mark(ordinal, Mark::of(class));
                };
                // What cannot be told is read.
                let told = self.tell(shared, &unit, &merged, &mut note).unwrap_or(0);
                let takes = |ordinal| shared.mark(ordinal) == Mark::UNREAD;
                let takes: Option<Takes<'_>> = (told > 0 || self.sample.is_some()).then_some(&takes);
                let outcome = self.read(shared, &unit, takes, &mut note);
                // Nothing is remembered of what cannot be confirmed.
                let _ = self.confirm(shared, &unit, &fresh[told..], &merged);
                if outcome == Err(Absent::Vanished) {
                    unit.ordinals.clone().filter(|&page| shared.mark(page) == Mark::UNREAD).for_each(|page| {
                        shared.set_mark(page, Mark::GONE);
                    });
                }
                (unit.subject, outcome, frames, indistinct)
            })
            .collect();
        index.entries = entries;
        index.indistinct = results.iter().map(|(.., indistinct)| indistinct).sum();
        index.note_frames(results.iter().flat_map(|(_, _, frames, _)| frames).copied().collect());
        results.into_iter().filter_map(|(subject, outcome, ..)| Some((subject, outcome.err()?))).collect()
    }

    /// Read again and mark what changed: everything that is not merged, or with `pairs` only what has anything to gain.
    /// Nothing is read of subjects that `rested`.
    pub fn second_pass(&self, index: &Index, pairs: Option<&Pairs>, rested: &(dyn Fn(usize) -> bool + Sync)) -> Again {
        let mut units = index.units(self.survey);
        units.retain(|unit| !rested(unit.subject));
        let results: Vec<_> = units
            .into_par_iter()
            .with_max_len(1)
            .map(|unit| {
                let merged = if pairs.is_none() { merged_stretches(index, &unit) } else { Vec::new() };
                let again = |ordinal| match pairs {
                    Some(pairs) => pairs.is_candidate(index, ordinal),
                    None => {
                        let passed_by = merged.partition_point(|stretch| stretch.end <= ordinal);
                        let is_merged = merged.get(passed_by).is_some_and(|stretch| stretch.contains(&ordinal));
                        !is_merged && index.mark(ordinal) != Mark::SKIPPED
                    }
                };
                let all = pairs.is_none() && self.sample.is_none() && merged.is_empty();
                let takes: Option<Takes<'_>> = (!all).then_some(&again);
                let mut pages = 0;
                let outcome = self.read(index, &unit, takes, &mut |ordinal, seen| {
                    pages += 1;
                    let mark = index.mark(ordinal);
                    match (mark.class(), seen) {
                        // What was not read in the first pass stays so; what changes, or is merged, is known already.
                        (None | Some(PageClass::Volatile | PageClass::Merged), _) => {}
                        (Some(_), None) => index.set_mark(ordinal, Mark::GONE),
                        (Some(_), Some(Seen { merged: true, .. })) => {
                            index.set_mark(ordinal, Mark::of(PageClass::Merged));
                        }
                        (Some(_), Some(Seen { fingerprint, .. })) => {
                            if fingerprint != Some(index.entries[ordinal as usize].fingerprint()) {
                                index.set_mark(ordinal, Mark::of(PageClass::Volatile));
                            }
                        }
                    }
                });
                if outcome == Err(Absent::Vanished) {
                    unit.ordinals.clone().for_each(|page| index.set_mark(page, Mark::GONE));
                }
                (unit.subject, outcome, pages)
            })
            .collect();
        Again {
            pages: Pages(results.iter().map(|&(.., pages)| pages).sum()),
            failures: results.into_iter().filter_map(|(subject, outcome, _)| Some((subject, outcome.err()?))).collect(),
        }
    }

    /// Mark the pages of a unit that are not in the sample.
    fn skip_unsampled(&self, index: &Index, unit: &Unit) {
        if let Some(rule) = self.sample {
            unit.ordinals.clone().filter(|&page| !rule.takes(page)).for_each(|page| {
                index.set_mark(page, Mark::SKIPPED);
            });
        }
    }

    /// The process of a unit.
    fn open(&self, unit: &Unit) -> Reading<Box<dyn Process + '_>> {
        let id = self.survey.subjects[unit.subject].process.id;
        let handle = self.host.open(id.pid)?;
        if handle.id() == id { Ok(handle) } else { Err(Absent::Vanished) }
    }

    /// What some of a unit's pages are mapped to now: of the runs that have any that is `wanted`.
    fn mapped(
        &self,
        index: &Index,
        unit: &Unit,
        wanted: &dyn Fn(u32) -> bool,
        each: &mut dyn FnMut(u32, &Mapping),
    ) -> Reading<()> {
        let handle = self.open(unit)?;
        let page_len = self.host.page_size().bytes();
        for (run, first) in index.runs(unit.ordinals.clone()) {
            if (first..first + run.pages).any(wanted) {
                let range = AddressRange { start: run.address, end: run.address + u64::from(run.pages) * page_len };
                handle.mappings(range)?.iter().zip(first..).for_each(|(mapping, ordinal)| each(ordinal, mapping));
            }
        }
        Ok(())
    }

    /// Tell `note` of those of a unit's pages that are merged to frames of which it is known what they hold, where that
    /// is less work than to read them. Returns how many those are.
    fn tell(
        &self,
        index: &Index,
        unit: &Unit,
        merged: &MergedFrames,
        note: &mut dyn FnMut(u32, Option<Seen>),
    ) -> Reading<usize> {
        let any = unit.way == (Way::Memory { merged: true }) && merged.any.load(Ordering::Relaxed);
        if !any || self.stop.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut known: Vec<(u32, Pfn, Fingerprint)> = Vec::new();
        let wanted = |ordinal| index.mark(ordinal) == Mark::UNREAD;
        self.mapped(index, unit, &wanted, &mut |ordinal, mapping| {
            let shared = mapping.present && !mapping.file && !mapping.exclusive;
            let frame = mapping.frame.filter(|_| shared && wanted(ordinal));
            known.extend(frame.and_then(|frame| Some((ordinal, frame, merged.content(frame)?))));
        })?;
        let stretches = known.chunk_by(|a, b| a.0 + 1 == b.0).filter(|stretch| stretch.len() >= STRETCH);
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
                note(ordinal, Some(Seen { fingerprint, merged: true, exclusive: false, frame }));
            }
        }
        Ok(told)
    }

    /// Remember what frames hold whose pages were read, as far as these are still mapped to them: what was read is
    /// theirs, then, and not what somebody wrote to a copy of his own meanwhile. `read` is ascending.
    fn confirm(&self, index: &Index, unit: &Unit, read: &[Merged], merged: &MergedFrames) -> Reading<()> {
        if read.is_empty() || merged.works {
            return Ok(());
        }
        let position = |ordinal| read.binary_search_by_key(&ordinal, |page: &Merged| page.ordinal).ok();
        self.mapped(index, unit, &|ordinal| position(ordinal).is_some(), &mut |ordinal, mapping| {
            let page = position(ordinal).map(|position| &read[position]);
            if let Some(page) = page.filter(|page| mapping.present && mapping.frame == Some(page.frame)) {
                merged.note(page.frame, page.content);
            }
        })
    }

    /// Read a unit's pages. `note` gets each page that was looked at, `None` for one that is gone. An error says why
    /// the rest was not.
    fn read(
        &self,
        index: &Index,
        unit: &Unit,
        takes: Option<Takes<'_>>,
        note: &mut dyn FnMut(u32, Option<Seen>),
    ) -> Reading<()> {
        if self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (runs, ordinals) = self.taken(index, unit, takes);
        if runs.is_empty() {
            self.progress.advance(unit.ordinals.len() as u64, 0);
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
                PageContent::Gone => return note(ordinal, None),
            };
            let PageView { merged, exclusive, frame, .. } = page;
            note(ordinal, Some(Seen { fingerprint, merged, exclusive, frame }));
        };
        let outcome = self.open(unit).and_then(|handle| handle.contents(unit.way, &runs, &mut see));
        self.progress.advance(unit.ordinals.len() as u64, bytes);
        outcome
    }

    /// The runs of a unit that are taken, and the ordinals of their pages; all of it where nothing is left out.
    fn taken(&self, index: &Index, unit: &Unit, takes: Option<Takes<'_>>) -> (Vec<Run>, Option<Vec<u32>>) {
        let all = index.runs(unit.ordinals.clone());
        let Some(takes) = takes else {
            return (all.map(|(run, _)| run).collect(), None);
        };
        let page_len = self.host.page_size().bytes();
        let mut ordinals = Vec::new();
        let mut runs: Vec<Run> = Vec::new();
        for (run, first) in all {
            let mut end = None;
            for page in (0..run.pages).filter(|page| takes(first + page)) {
                ordinals.push(first + page);
                match runs.last_mut() {
                    Some(last) if end == Some(page) => last.pages += 1,
                    _ => runs.push(Run { address: run.address + u64::from(page) * page_len, pages: 1, ..run }),
                }
                end = Some(page + 1);
            }
        }
        (runs, Some(ordinals))
    }
}
