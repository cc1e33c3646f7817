//! Reading the pages: two passes in parallel over portions of the index.
//!
//! While ksmd rests, what KSM has merged is read once for all pages that are mapped to the same frame: on a host that
//! is merged, that is most of what its processes hold.

use crate::Remembered;
use crate::choose::each_page;
use crate::index::{Entry, Index, Mark, Unit};
use crate::pairs::Pairs;
use crate::recall::{Recalled, is_recalled, piece_at};
use crate::survey::Survey;
use pagefold_base::{Absent, AddressRange, Fingerprint, PageClass, Pages, Pfn, Reading};
use pagefold_host::observe::Nodes;
use pagefold_host::{Host, Mapping, PageContent, PageView, Process, Run, Way};
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
    /// What is remembered of earlier censuses under the same key. Not for a sample, nor where nodes are kept apart.
    pub remembered: Option<&'a Remembered>,
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

/// A unit in hand, with what is found of it.
struct Portion<'a> {
    index: &'a Index,
    unit: Unit,
    entries: &'a mut [Entry],
    nodes: Option<&'a Nodes>,
    /// Pages that others map too, with their frames.
    shared: Vec<(Pfn, u32)>,
    /// How many others map too whose frames are not known.
    indistinct: u64,
    merged: Vec<Merged>,
}

impl Portion<'_> {
    /// Put what was seen of a page into the index; `None` for one that is gone.
    fn note(&mut self, ordinal: u32, seen: Option<Seen>) {
        let Some(seen) = seen else { return self.index.set_mark(ordinal, Mark::GONE) };
        let class = match seen.fingerprint {
            _ if seen.merged => PageClass::Merged,
            None => PageClass::Volatile,
            Some(Fingerprint::ZERO_PAGE) => PageClass::Zero,
            // Until groups are known.
            Some(_) => PageClass::Unique,
        };
        self.entries[(ordinal - self.unit.ordinals.start) as usize] =
            Entry::new(seen.fingerprint.unwrap_or(Fingerprint::ZERO_PAGE), ordinal);
        match (seen.frame, seen.fingerprint) {
            _ if seen.exclusive => {}
            (Some(frame), Some(content)) if seen.merged => self.merged.push(Merged { ordinal, frame, content }),
            _ if seen.merged => {}
            (Some(frame), _) => self.shared.push((frame, ordinal)),
            (None, _) => self.indistinct += 1,
        }
        let node = self.nodes.zip(seen.frame).map_or(0, |(nodes, frame)| nodes.of(frame) as u8);
        self.index.set_node(ordinal, node);
        self.index.set_mark(ordinal, Mark::of(class));
    }

    fn is_unread(&self, ordinal: u32) -> bool {
        self.index.mark(ordinal) == Mark::UNREAD
    }
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
        let merged = MergedFrames::new(self.host);
        self.fill(index, |portion| {
            self.skip_unsampled(portion.index, &portion.unit);
            // What cannot be told is read, and what was told need not be confirmed.
            let told = self.tell(portion, &merged).unwrap_or(0);
            portion.merged.clear();
            let recalled = self.recalled(portion);
            if let Some(recalled) = &recalled {
                let _ = self.recall(portion, recalled);
            }
            let outcome = if told == 0 && recalled.is_none() && self.sample.is_none() {
                self.read_some(portion, None, None)
            } else {
                self.read_unread(portion, recalled.as_ref())
            };
            self.progress.advance(portion.unit.ordinals.len() as u64, 0);
            // Nothing is remembered of what cannot be confirmed.
            let _ = self.confirm(portion, &merged);
            outcome
        })
    }

    /// Tell which pages may have a partner, and read those of them of which it is only remembered what they held. To be
    /// called once, after the first pass.
    pub fn pairs(&self, index: &mut Index) -> (Pairs, Vec<(usize, Absent)>) {
        let pairs = Pairs::of(index);
        let again = |portion: &mut Portion<'_>| self.read_recalled(portion, &pairs);
        let failures = if self.remembered.is_some() { self.fill(index, again) } else { Vec::new() };
        index.tell_frames_apart();
        (pairs, failures)
    }

    /// Go through all units in parallel. Returns the subjects that could not be read, and why.
    fn fill(&self, index: &mut Index, look: impl Fn(&mut Portion<'_>) -> Reading<()> + Sync) -> Vec<(usize, Absent)> {
        let mut entries = std::mem::take(&mut index.entries);
        let mut work = Vec::new();
        let mut rest = entries.as_mut_slice();
        for unit in index.units(self.survey) {
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
                let mut portion = Portion { index: filled, unit, entries, nodes, shared, indistinct: 0, merged };
                let outcome = look(&mut portion);
                if outcome == Err(Absent::Vanished) {
                    portion.unit.ordinals.clone().filter(|&page| portion.is_unread(page)).for_each(|page| {
                        filled.set_mark(page, Mark::GONE);
                    });
                }
                (portion.unit.subject, outcome, portion.shared, portion.indistinct)
            })
            .collect();
        index.entries = entries;
        let mut failures = Vec::new();
        for (subject, outcome, shared, indistinct) in results {
            index.indistinct += indistinct;
            index.note_frames(shared);
            failures.extend(outcome.err().map(|why| (subject, why)));
        }
        failures
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
                        !is_merged && index.mark(ordinal) != Mark::SKIPPED && !index.mark(ordinal).is_unsure()
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
                self.progress.advance(unit.ordinals.len() as u64, 0);
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

    /// Note those of a unit's pages that are merged to frames of which it is known what they hold, where that is less
    /// work than to read them. Returns how many those are.
    fn tell(&self, portion: &mut Portion<'_>, merged: &MergedFrames) -> Reading<usize> {
        let any = portion.unit.way == (Way::Memory { merged: true }) && merged.any.load(Ordering::Relaxed);
        if !any || self.stop.load(Ordering::Relaxed) {
            return Ok(0);
        }
        let mut known: Vec<(u32, Pfn, Fingerprint)> = Vec::new();
        let wanted = |ordinal| portion.is_unread(ordinal);
        self.mapped(portion.index, &portion.unit, &wanted, &mut |ordinal, mapping| {
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
                portion.note(ordinal, Some(Seen { fingerprint, merged: true, exclusive: false, frame }));
            }
        }
        Ok(told)
    }

    /// What is remembered of a unit's pages.
    fn recalled(&self, portion: &Portion<'_>) -> Option<Recalled<'_>> {
        let Unit { subject, way, ordinals } = &portion.unit;
        let remembered = self.remembered.filter(|_| is_recalled(&self.survey.subjects[*subject], *way))?;
        remembered.recall.of(self.survey, portion.index, *subject, ordinals.clone())
    }

    /// Note those of a unit's pages that may be taken to hold what they did, after some were read, and those that are
    /// taken to change on.
    fn recall(&self, portion: &mut Portion<'_>, recalled: &Recalled<'_>) -> Reading<()> {
        let first = portion.unit.ordinals.start;
        let (mut tried, mut any) = (vec![false; portion.unit.ordinals.len()], false);
        for page in recalled.tried() {
            (tried[(page - first) as usize], any) = (true, true);
        }
        if any {
            self.read_some(portion, Some(&|page| tried[(page - first) as usize]), Some(recalled))?;
        }
        let told = recalled.told().map(|(page, content)| (page, Entry::new(content, page), Mark::RECALLED));
        let changes = |page| (page, Entry::new(Fingerprint::ZERO_PAGE, page), Mark::PASSED_BY);
        for (page, entry, mark) in told.chain(recalled.skipped().map(changes)) {
            if portion.is_unread(page) && !self.stop.load(Ordering::Relaxed) {
                portion.entries[(page - first) as usize] = entry;
                portion.index.set_mark(page, mark);
            }
        }
        Ok(())
    }

    /// Read what is not known of a unit.
    fn read_unread(&self, portion: &mut Portion<'_>, recalled: Option<&Recalled<'_>>) -> Reading<()> {
        let first = portion.unit.ordinals.start;
        let unread: Vec<bool> = portion.unit.ordinals.clone().map(|page| portion.is_unread(page)).collect();
        self.read_some(portion, Some(&|page| unread[(page - first) as usize]), recalled)
    }

    /// Read those of a unit's pages that may have a partner by what they are remembered to have held, and those in the
    /// same pieces as any others that have something to gain: they may be covered with these. What is found to hold
    /// something else now was not compared with the others, unless that may have a partner, too.
    fn read_recalled(&self, portion: &mut Portion<'_>, pairs: &Pairs) -> Reading<()> {
        let (index, ordinals) = (portion.index, portion.unit.ordinals.clone());
        let is_recalled = |page: u32| index.mark(page) == Mark::RECALLED;
        if !ordinals.clone().any(is_recalled) {
            return Ok(());
        }
        let at = |page: u32| (page - ordinals.start) as usize;
        let content = |portion: &Portion<'_>, page: u32| portion.entries[at(page)].fingerprint();
        let gains = |page: u32| match index.mark(page).class() {
            Some(PageClass::Zero) => true,
            Some(PageClass::Unique) => pairs.may_pair(content(portion, page)),
            _ => false,
        };
        let pages: Vec<(u32, u64)> =
            each_page(index, &ordinals).map(|(_, page, address)| (page, piece_at(index, address))).collect();
        let mut again = vec![false; ordinals.len()];
        for piece in pages.chunk_by(|a, b| a.1 == b.1).filter(|piece| piece.iter().any(|&(page, _)| gains(page))) {
            piece.iter().filter(|(page, _)| is_recalled(*page)).for_each(|&(page, _)| again[at(page)] = true);
        }
        let held: Vec<(u32, u32)> = ordinals
            .clone()
            .filter(|&page| again[at(page)])
            .map(|page| (page, content(portion, page).half()))
            .collect();
        if held.is_empty() {
            return Ok(());
        }
        // What cannot be read stays so.
        held.iter().for_each(|&(page, _)| index.set_mark(page, Mark::PASSED_BY));
        let recalled = self.recalled(portion);
        let outcome = self.read_some(portion, Some(&|page| again[at(page)]), recalled.as_ref());
        for (page, half) in held {
            let now = content(portion, page);
            if index.mark(page).class() == Some(PageClass::Unique) && now.half() != half && !pairs.may_pair(now) {
                index.set_mark(page, Mark::RECALLED);
            }
        }
        outcome
    }

    /// Read and note some of a unit's pages, and compare them with what is remembered.
    fn read_some(
        &self,
        portion: &mut Portion<'_>,
        takes: Option<Takes<'_>>,
        recalled: Option<&Recalled<'_>>,
    ) -> Reading<()> {
        let (index, unit) = (portion.index, portion.unit.clone());
        self.read(index, &unit, takes, &mut |page, seen| {
            if let (Some(recalled), Some(Seen { merged: false, fingerprint, .. })) = (recalled, &seen) {
                recalled.compare(page, *fingerprint);
            }
            portion.note(page, seen);
        })
    }

    /// Remember what frames hold whose pages were read, as far as these are still mapped to them: what was read is
    /// theirs, then, and not what somebody wrote to a copy of his own meanwhile.
    fn confirm(&self, portion: &mut Portion<'_>, merged: &MergedFrames) -> Reading<()> {
        let Portion { index, unit, merged: read, .. } = portion;
        if read.is_empty() || merged.works {
            return Ok(());
        }
        read.sort_unstable_by_key(|page| page.ordinal);
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
        self.progress.advance(0, bytes);
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
