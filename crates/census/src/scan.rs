//! Reading the pages: two passes in parallel over portions of the index.

use crate::index::{Entry, Index, Mark, Unit};
use crate::pairs::Pairs;
use crate::survey::Survey;
use pagefold_host::observe::Nodes;
use pagefold_host::{Host, PageContent, PageView, Run};
use pagefold_model::{Absent, Fingerprint, PageClass, Pages, Pfn, Reading};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
    node: u8,
    shared: Shared,
}

/// Whether others map a page too, KSM apart.
enum Shared {
    No,
    Frame(Pfn),
    UnknownFrame,
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
        let results: Vec<_> = work
            .into_par_iter()
            // One by one: what a thread has begun as one piece cannot be taken from it by an idle one.
            .with_max_len(1)
            .map(|(unit, slots)| {
                self.skip_unsampled(shared, &unit);
                let (mut frames, mut indistinct) = (Vec::new(), 0);
                let takes = |ordinal| self.sample.is_none_or(|rule| rule.takes(ordinal));
                let takes: Option<Takes<'_>> = self.sample.is_some().then_some(&takes);
                let outcome = self.read(shared, &unit, takes, &mut |ordinal, seen| {
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
                    match seen.shared {
                        Shared::No => {}
                        Shared::Frame(frame) => frames.push((frame, ordinal)),
                        Shared::UnknownFrame => indistinct += 1,
                    }
                    shared.set_node(ordinal, seen.node);
                    shared.set_mark(ordinal, Mark::of(class));
                });
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

    /// Read again and mark what changed: everything, or with `pairs` only what has anything to gain. Nothing is read of
    /// subjects that `rested`.
    pub fn second_pass(&self, index: &Index, pairs: Option<&Pairs>, rested: &(dyn Fn(usize) -> bool + Sync)) -> Again {
        let mut units = index.units(self.survey);
        units.retain(|unit| !rested(unit.subject));
        let results: Vec<_> = units
            .into_par_iter()
            .with_max_len(1)
            .map(|unit| {
                let again = |ordinal| match pairs {
                    Some(pairs) => pairs.is_candidate(index, ordinal),
                    None => index.mark(ordinal) != Mark::SKIPPED,
                };
                let takes: Option<Takes<'_>> = (pairs.is_some() || self.sample.is_some()).then_some(&again);
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
        let id = self.survey.subjects[unit.subject].process.id;
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
            let node = self.nodes.as_ref().zip(page.frame).map_or(0, |(nodes, frame)| nodes.of(frame) as u8);
            let shared = match page.frame {
                _ if page.exclusive || page.merged => Shared::No,
                Some(frame) => Shared::Frame(frame),
                None => Shared::UnknownFrame,
            };
            note(ordinal, Some(Seen { fingerprint, merged: page.merged, node, shared }));
        };
        let outcome = self.host.open(id.pid).and_then(|handle| {
            if handle.id() != id {
                return Err(Absent::Vanished);
            }
            handle.contents(unit.way, &runs, &mut see)
        });
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
