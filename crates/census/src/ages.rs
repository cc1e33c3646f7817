//! For how long pages have held what they hold, over several censuses under one key.
//!
//! Two looks within a census tell what changes all the time from what holds still. A work array that is filled anew
//! every few seconds holds still between them, and merging it is a loss. So who takes censuses again and again asks for
//! an age: [`ripe_after`] says which, and what is younger is left for a later census.
//!
//! Takes 24 bytes for each page that a plan covers and that has anything to gain. What is written with the bytes that
//! were there grows old like anything else: only the kernel's page tables tell, once it is merged
//! ([`pagefold_model::lasting`]).

use crate::Error;
use crate::choose::each_page;
use crate::index::Index;
use pagefold_model::census::Census;
use pagefold_model::lasting::ripe_after;
use pagefold_model::plan::{Plan, PlannedRange};
use pagefold_model::{AddressRange, Bytes, Fingerprint, PageClass, PageSize, ProcessId};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::time::Instant;

/// Pages of a piece at most: what is left out together.
const PIECE: u64 = 1024;

/// What was seen when.
pub struct Ages {
    hasher: Hasher,
    page_size: PageSize,
    began: Instant,
    /// Ascending by address.
    processes: BTreeMap<ProcessId, Vec<Aged>>,
}

/// A page of a content.
#[derive(Clone, Copy)]
struct Aged {
    address: u64,
    fingerprint: Fingerprint,
    /// Milliseconds from the beginning until it was first seen with this content.
    since: u64,
}

impl Ages {
    /// Nothing seen yet. The key is drawn here.
    pub fn new(page_size: PageSize) -> Result<Self, Error> {
        Self::since(page_size, Instant::now())
    }

    /// Nothing seen before a time.
    pub fn since(page_size: PageSize, began: Instant) -> Result<Self, Error> {
        let hasher = Hasher::random(page_size.as_len()).map_err(Error::Key)?;
        Ok(Self { hasher, page_size, began, processes: BTreeMap::new() })
    }

    /// The fingerprint of all censuses that are compared.
    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    /// Take note of what a census under this key found at `now`, and leave those pieces out of its plan of which most
    /// pages that should merge are not ripe. What a program enrolled itself of them is withdrawn while ksmd works,
    /// unless some of it is merged. Of processes that the census has not what is known stays. Tells how much of each
    /// was left out.
    pub fn sift(
        &mut self,
        plan: &mut Plan,
        census: &Census,
        index: &Index,
        now: Instant,
    ) -> BTreeMap<ProcessId, Bytes> {
        let now = now.saturating_duration_since(self.began).as_millis() as u64;
        self.note(census, index, now);
        let least = ripe_after(self.page_size.bytes()).as_millis() as u64;
        let young: Vec<(ProcessId, Vec<AddressRange>)> = plan
            .targets
            .iter()
            .filter_map(|target| {
                let pages = self.processes.get(&target.process.id)?;
                let ranges = target.ranges.iter();
                let young = ranges.flat_map(|range| young(pages, range, self.page_size.bytes(), now, least)).collect();
                Some((target.process.id, young))
            })
            .collect();
        let mut left_out = BTreeMap::new();
        for (process, ranges) in young {
            left_out.insert(process, Bytes(ranges.iter().map(|range| range.bytes().0).sum()));
            let own = self.unmerged(plan, census, index, process, &ranges);
            plan.leave_out(process, ranges);
            for target in plan.targets.iter_mut().filter(|target| target.process.id == process) {
                target.narrowed = AddressRange::union([&target.narrowed[..], &own[..]].concat());
            }
        }
        left_out
    }

    /// Which of some ranges a program has enrolled itself, and nothing is merged in: ksmd would take them all the same.
    fn unmerged(
        &self,
        plan: &Plan,
        census: &Census,
        index: &Index,
        process: ProcessId,
        ranges: &[AddressRange],
    ) -> Vec<AddressRange> {
        let Some(target) = plan.targets.iter().find(|target| target.process.id == process) else { return Vec::new() };
        let is_own = |range: &&AddressRange| {
            target.ranges.iter().any(|planned| planned.enrolled && planned.range.overlap(**range).is_some())
        };
        let own: Vec<AddressRange> = ranges.iter().filter(is_own).copied().collect();
        let subject = census.subjects.iter().position(|subject| subject.process.id == process);
        let Some(subject) = subject.filter(|_| !own.is_empty()) else { return Vec::new() };
        let is_merged = |ordinal: u32| index.mark(ordinal).class() == Some(PageClass::Merged);
        let merged: Vec<u64> = each_page(index, &index.pages_of(subject))
            .filter(|&(_, ordinal, _)| is_merged(ordinal))
            .map(|(.., address)| address)
            .collect();
        let has_none = |range: &AddressRange| {
            let first = merged.partition_point(|&address| address < range.start);
            merged.get(first).is_none_or(|&address| address >= range.end)
        };
        own.into_iter().filter(has_none).collect()
    }

    fn note(&mut self, census: &Census, index: &Index, now: u64) {
        let mut known: Vec<(u32, Fingerprint)> = index.entries[..index.paired]
            .par_iter()
            .filter(|entry| index.mark(entry.ordinal).is_covered())
            .map(|entry| (entry.ordinal, entry.fingerprint()))
            .collect();
        known.par_sort_unstable();
        let mut before = std::mem::take(&mut self.processes);
        for (subject, seen) in census.subjects.iter().enumerate() {
            let older = before.remove(&seen.process.id).unwrap_or_default();
            let mut older = older.iter().peekable();
            let ordinals = index.pages_of(subject);
            let mut known = known[known.partition_point(|&(page, _)| page < ordinals.start)..].iter().peekable();
            let mut pages = Vec::new();
            for (_, ordinal, address) in each_page(index, &ordinals) {
                let mark = index.mark(ordinal);
                let fingerprint = match mark.class() {
                    Some(PageClass::Zero) if mark.is_covered() => Fingerprint::ZERO_PAGE,
                    Some(class) if class.is_duplicate() && mark.is_covered() => {
                        while known.next_if(|&&(page, _)| page < ordinal).is_some() {}
                        let Some(&&(_, fingerprint)) = known.peek().filter(|&&&(page, _)| page == ordinal) else {
                            continue;
                        };
                        fingerprint
                    }
                    _ => continue,
                };
                while older.next_if(|page| page.address < address).is_some() {}
                let same = older.peek().filter(|page| (page.address, page.fingerprint) == (address, fingerprint));
                pages.push(Aged { address, fingerprint, since: same.map_or(now, |page| page.since) });
            }
            if !pages.is_empty() {
                self.processes.insert(seen.process.id, pages);
            }
        }
        self.processes.append(&mut before);
    }

    /// Forget the processes that do not fit.
    pub fn retain(&mut self, fits: impl Fn(ProcessId) -> bool) {
        self.processes.retain(|&process, _| fits(process));
    }
}

/// The pieces of a range of which most pages are not ripe.
fn young(pages: &[Aged], planned: &PlannedRange, page_bytes: u64, now: u64, least: u64) -> Vec<AddressRange> {
    planned
        .range
        .cut_at_multiples(PIECE * page_bytes)
        .filter(|piece| {
            let from = pages.partition_point(|page| page.address < piece.start);
            let to = pages.partition_point(|page| page.address < piece.end);
            let ripe = pages[from..to].iter().filter(|page| now.saturating_sub(page.since) >= least).count();
            ripe * 2 < to - from
        })
        .collect()
}
