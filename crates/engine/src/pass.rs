//! One merge: survey, heal, look, decide, store, map, tidy.
//!
//! | step | what |
//! |---|---|
//! | survey | page tables: what is ordinary memory and resident, what is merged, what was written since |
//! | heal | what was written since becomes ordinary memory again, so that its slots can be freed |
//! | look | candidates that are zeros, then fingerprints of the others, on all threads; those are noted in the index |
//! | decide | runs of pages with a partner that pay, by the prices and the code of guided planning |
//! | store | contents that were seen twice and lie nowhere yet, in the order in which they lie in memory |
//! | map | each run: refer, check, compare, exchange |
//! | tidy | references that are no longer needed; slots that nobody refers to |
//!
//! A run is mapped as one if its pages lie one behind another in the store, too. Since contents are stored in the order
//! of their pages, memory that is equal over many pages is one mapping in all members but for where it differs.

use crate::domain::{Domain, PATIENCE};
use crate::index::Tag;
use crate::layout::{self, Kind};
use crate::memory::{self, Incoming};
use crate::references::Bits;
use crate::statistics::Merged;
use crate::{Advice, Options, State, clock, record};
use pagefold_model::engine::{RegionTally, Tally};
use pagefold_model::hot::Note;
use pagefold_model::lasting::{self, must_last};
use pagefold_model::savings::Costs;
use pagefold_model::segment::{Prices, Stretch, best_ranges_within};
use pagefold_model::{AddressRange, Bytes, PageSize, Pages};
use pagefold_sys::fingerprint::is_zeros;
use pagefold_sys::userfault::{Held, UserFault};
use pagefold_sys::{fault, pagemap};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pages that a thread takes at a time: as many as a huge page has on x86-64, so that holding writers up splits none.
const CHUNK: u64 = 512;

/// Of the mappings that a process may have (`vm.max_map_count`), so many of 8 may be there after a merge.
const MAPPINGS: u64 = 6;

/// `vm.max_map_count` where it cannot be read (include/linux/mm.h, DEFAULT_MAX_MAP_COUNT).
const MAX_MAP_COUNT: u64 = 65_530;

/// A merge does not begin before there is room for so many times what finding out took the last time.
const SURVEYS: u32 = 4;

/// References are made anew once an eighth of them, and so many, are not needed.
const SPARE: u64 = 64;

/// A hole that no range bridges.
const APART: i64 = i64::MAX;

/// Memory that may be merged.
#[derive(Debug)]
pub struct Region {
    range: AddressRange,
    page: u64,
    notes: Vec<Note>,
    unmergeable: Vec<AddressRange>,
    /// How it stood when that was found out last.
    tally: Tally,
}

impl Region {
    /// Of whole pages.
    pub fn new(range: AddressRange, page: u64) -> Self {
        let pages = range.bytes().0 / page;
        let tally = Tally { pages: Pages(pages), ..Tally::default() };
        Self { range, page, notes: vec![Note::default(); pages as usize], unmergeable: Vec::new(), tally }
    }

    /// Where it is.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// What is left of it without a range: up to two of them.
    pub fn without(self, range: AddressRange) -> Vec<Self> {
        let part = |left: AddressRange| {
            let at = |address: u64| ((address - self.range.start) / self.page) as usize;
            let notes = self.notes[at(left.start)..at(left.end)].to_vec();
            let unmergeable = self.unmergeable.iter().filter_map(|known| known.overlap(left)).collect();
            Self { notes, unmergeable, ..Self::new(left, self.page) }
        };
        match self.range.outside(&[range])[..] {
            [all] if all == self.range => vec![self],
            ref left => left.iter().copied().map(part).collect(),
        }
    }

    /// Take a range for something else.
    pub fn advise(&mut self, range: AddressRange, advice: Advice) {
        let Some(range) = self.range.overlap(range) else { return };
        let mut kept: Vec<AddressRange> = self.unmergeable.iter().flat_map(|known| known.outside(&[range])).collect();
        if advice == Advice::Unmergeable {
            kept.push(range);
        }
        self.unmergeable = AddressRange::union(kept);
    }

    /// Forget what is known of pages: what was in them is no more.
    pub fn forget(&mut self, range: AddressRange) {
        let Some(range) = self.range.overlap(range) else { return };
        for address in (range.start..range.end).step_by(self.page as usize) {
            *self.note(address) = Note::default();
        }
    }

    /// How it stood when that was found out last: by a merge, or when somebody asked.
    pub fn told(&self) -> RegionTally {
        RegionTally { range: self.range, tally: self.tally }
    }

    /// The memory in which its pages are remembered.
    pub fn notes(&self) -> Bytes {
        Bytes(size_of_val(&self.notes[..]) as u64)
    }

    fn note(&mut self, address: u64) -> &mut Note {
        let at = self.at(address);
        &mut self.notes[at]
    }

    fn at(&self, address: u64) -> usize {
        ((address - self.range.start) / self.page) as usize
    }

    fn noted(&self, start: u64, end: u64) -> &[Note] {
        &self.notes[self.at(start)..self.at(end)]
    }

    /// Begin to find out how it stands.
    fn tally_anew(&mut self) {
        self.tally = Tally { pages: self.tally.pages, ..Tally::default() };
    }

    /// Count a part of it, of which `found` is mapped.
    fn tally(&mut self, part: AddressRange, kind: Kind, found: &[pagemap::MappedRange], now: Duration) {
        let held = |notes: &[Note]| Pages(notes.iter().filter(|note| note.is_merged()).count() as u64);
        let hot = |notes: &[Note]| Pages(notes.iter().filter(|note| note.is_hot(now)).count() as u64);
        // What the program has of its own there.
        let own = || {
            let own = found.iter().filter(|found| !found.file && !found.zero);
            own.map(|found| (found, self.noted(found.start, found.end)))
        };
        let left_alone: Pages = own().map(|(_, notes)| hot(notes)).sum();
        match kind {
            Kind::Stored { .. } => {
                let written: u64 = own().map(|(found, _)| found.end - found.start).sum();
                self.tally.merged += Pages((part.bytes().0 - written) / self.page);
            }
            Kind::Ordinary => {
                let written: Pages = own().map(|(_, notes)| held(notes)).sum();
                self.tally.zeros += held(self.noted(part.start, part.end)) - written;
            }
        }
        self.tally.hot += left_alone;
    }
}

/// What a survey found.
#[derive(Debug, Default)]
struct Survey {
    /// Parts of regions, each within one mapping, that may hold anything of the following.
    parts: Vec<AddressRange>,
    /// Resident ordinary memory that may be looked at, ascending.
    candidates: Vec<Candidates>,
    /// What was merged and written since, mapped as merging maps it.
    broken: Vec<AddressRange>,
    /// Pages of this process that map the store, of regions or not.
    stored: u64,
    /// Mappings of this process.
    mappings: u64,
}

/// Pages that may be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Candidates {
    range: AddressRange,
    /// Whether they are a part of huge pages.
    huge: bool,
    /// Whether nothing is known of them.
    new: bool,
}

/// A page that was looked at.
#[derive(Clone, Copy, Debug)]
struct Page {
    address: u64,
    /// Whether it is a part of a huge page.
    huge: bool,
    /// Its content in the index, unless that is zeros.
    entry: usize,
}

/// Where a content lies, or is to lie: one behind another if the numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Slot(u32),
    /// In the order in which contents are to be stored.
    Next(u32),
}

impl Place {
    fn follows(self, other: Self) -> bool {
        match (other, self) {
            (Self::Slot(before), Self::Slot(slot)) => before + 1 == slot,
            (Self::Next(before), Self::Next(order)) => before + 1 == order,
            _ => false,
        }
    }
}

/// Pages one behind another, to be mapped as one.
#[derive(Clone, Copy, Debug)]
struct Run<'p> {
    pages: &'p [Page],
    slot: u32,
}

impl Run<'_> {
    fn range(&self, page: u64) -> AddressRange {
        let start = self.pages[0].address;
        AddressRange { start, end: start + self.pages.len() as u64 * page }
    }
}

/// Why nobody writes to pages that are in hand.
#[derive(Debug)]
pub enum Stillness {
    /// The caller of `Engine::merge` has promised it.
    Promised,
    /// Writers are held up.
    Enforced(UserFault),
}

impl Stillness {
    /// Nobody writes to a range until what this gives is dropped.
    fn of(&self, range: AddressRange) -> io::Result<Option<Held<'_>>> {
        match self {
            Self::Promised => Ok(None),
            Self::Enforced(power) => power.hold(range.start..range.end).map(Some),
        }
    }
}

impl State {
    /// Merge what is identical now.
    pub fn merge(&mut self, options: &Options, directory: &Path, stillness: &Stillness) -> io::Result<Merged> {
        let (began, now) = (Instant::now(), clock());
        let room = self.allowance.room(self.started.elapsed());
        let mut merged = Merged::default();
        self.merges += 1;
        // Small merges that only find out what there is would use up what there is room for.
        if room.is_some_and(|room| room <= self.surveying * SURVEYS) {
            merged.cut_short = 1;
            self.so_far += merged;
            self.tell(options);
            return Ok(merged);
        }
        let patience = began + room.map_or(PATIENCE, |room| room.min(PATIENCE));
        if !self.domain.is_whole() && unless_held_up(self.rejoin(directory, patience), &mut merged)?.is_none() {
            merged.time = began.elapsed();
            self.allowance.spend(merged.time);
            self.so_far += merged;
            return Ok(merged);
        }
        self.domain.wait_until(patience);
        // The other half is for what is found.
        let deadline = room.map(|room| began + room / 2);
        let done = self.merge_until(deadline, options.threads.max(1), now, stillness, &mut merged);
        merged.time = began.elapsed();
        self.allowance.spend(merged.time + Duration::from_secs_f64(lasting::BREAK * merged.broken.0 as f64));
        self.so_far += merged;
        self.last_merge = Some(record::now());
        self.tell(options);
        done.map(|()| merged)
    }

    fn merge_until(
        &mut self,
        deadline: Option<Instant>,
        threads: usize,
        now: Duration,
        stillness: &Stillness,
        merged: &mut Merged,
    ) -> io::Result<()> {
        let page = self.domain.page();
        let began = Instant::now();
        let mut survey = self.survey(now, merged)?;
        self.surveying = began.elapsed();
        survey.enforce(stillness, merged, page);
        let healed = heal(&survey, stillness);
        fault::point("after healing");
        let (zeros, looked) = self.look(&survey, deadline, threads, stillness, merged);
        let pages = self.sight(looked, threads, merged)?;
        let most = max_map_count() / 8 * MAPPINGS;
        let mappings = survey.mappings + 2 * healed.len() as u64;
        let at_most = (most.saturating_sub(mappings) / 2) as usize;

        let mut split = HashSet::new();
        for run in choose(&zeros, |_| true, |_| page as i64, &split, page, usize::MAX) {
            let run = &zeros[run];
            let range = Run { pages: run, slot: 0 }.range(page);
            if give_back(range, stillness).is_ok_and(|done| done) {
                merged.zeros += Pages(run.len() as u64);
                split.extend(run.iter().filter(|found| found.huge).map(|found| huge_page(found.address, page)));
                self.noted(range, |note| note.merged(now), |tally, pages| tally.zeros += pages);
            } else {
                merged.failed += Pages(run.len() as u64);
            }
        }
        fault::point("after giving zeros back");

        let (partners, places, wanted) = places(&self.domain, &pages);
        let follows = |at: usize| places[at].follows(places[at - 1]);
        // Each of two that share a content that is to be stored gives back half of it.
        let worth = |at: usize| if matches!(places[at], Place::Slot(_)) { page as i64 } else { page as i64 / 2 };
        let chosen = choose(&partners, follows, worth, &split, page, at_most);
        self.note_alone(&pages, chosen.iter().flat_map(|range| &partners[range.clone()]), now);
        let taken: usize = chosen.iter().map(Range::len).sum();
        merged.not_worth += Pages((partners.len() - taken) as u64);
        let stored = self.store(&partners, &places, &chosen, wanted, threads, stillness, merged)?;
        let at_once = if matches!(stillness, Stillness::Enforced(_)) { CHUNK as usize } else { usize::MAX };
        let runs = runs(&partners, &places, &chosen, &stored, at_once);
        let run: usize = runs.iter().map(|run| run.pages.len()).sum();
        merged.failed += Pages((taken - run) as u64);
        let outcomes = parallel(threads, &runs, |run| map(&self.domain, run, stillness).is_ok_and(|done| done));
        let mut mapped = 0;
        for (run, done) in runs.iter().zip(outcomes) {
            let pages = Pages(run.pages.len() as u64);
            if done {
                merged.merged += pages;
                merged.runs += 1;
                mapped += pages.0;
                self.noted(run.range(page), |note| note.merged(now), |tally, pages| tally.merged += pages);
            } else {
                merged.failed += pages;
            }
        }
        fault::point("after mapping");
        let healed: u64 = healed.iter().map(|range| range.bytes().0 / page).sum();
        self.tidy(survey.stored - healed + mapped, stillness, merged)
    }

    /// Find out what there is.
    fn survey(&mut self, now: Duration, merged: &mut Merged) -> io::Result<Survey> {
        let page = self.domain.page();
        let (parts, mappings) = layout::own(self.domain.store.identity(), page)?;
        let pagemap = File::open("/proc/self/pagemap")?;
        let must_last = must_last(page);
        let stored =
            parts.iter().filter(|part| part.kind != Kind::Ordinary).map(|part| part.range.bytes().0 / page).sum();
        let mut survey = Survey { mappings, stored, ..Survey::default() };
        self.regions.sort_by_key(|region| region.range.start);
        for region in &mut self.regions {
            region.tally_anew();
            let first = parts.partition_point(|part| part.range.end <= region.range.start);
            for part in &parts[first..] {
                let Some(whole) = part.range.overlap(region.range) else { break };
                survey.parts.push(whole);
                let mut found = Vec::new();
                pagemap::mapped(&pagemap, whole.start..whole.end, |mapped| found.push(mapped))?;
                for mapped in &found {
                    let range = AddressRange { start: mapped.start, end: mapped.end };
                    let addresses = (range.start..range.end).step_by(page as usize);
                    match part.kind {
                        // What was swapped out is not brought back for this; guard regions look like it.
                        Kind::Stored { .. } if mapped.file || mapped.swapped => {}
                        Kind::Stored { plain, .. } => {
                            for address in addresses {
                                let note = region.note(address);
                                // What cannot be healed is found each time, and was broken once.
                                if note.is_merged() {
                                    note.broken(now, must_last);
                                    merged.broken += Pages(1);
                                }
                            }
                            if plain {
                                survey.broken.push(range);
                            }
                        }
                        Kind::Ordinary if mapped.file || mapped.zero || mapped.swapped => {}
                        Kind::Ordinary => {
                            for address in addresses {
                                let note = region.note(address);
                                if note.is_merged() {
                                    // Given back as zeros, and written since.
                                    note.broken(now, must_last);
                                    merged.broken += Pages(1);
                                }
                                if !note.may_merge(now) {
                                    merged.left_alone += Pages(1);
                                    continue;
                                }
                                let range = AddressRange { start: address, end: address + page };
                                let found = Candidates { range, huge: mapped.huge, new: note.is_new() };
                                match survey.candidates.last_mut() {
                                    Some(last) if last.precedes(&found) => last.range.end += page,
                                    _ => survey.candidates.push(found),
                                }
                            }
                        }
                    }
                }
                region.tally(whole, part.kind, &found, now);
            }
            let allowed = |&found: &Candidates| {
                found.range.outside(&region.unmergeable).into_iter().map(move |range| Candidates { range, ..found })
            };
            if !region.unmergeable.is_empty() {
                survey.candidates = survey.candidates.iter().flat_map(allowed).collect();
            }
        }
        Ok(survey)
    }

    /// Look at candidates until the deadline, the new ones first: pages of zeros, and others with their fingerprints, by
    /// address. Zeros are found before any fingerprint is made: they are known by a line of each other page, and most
    /// worth.
    fn look(
        &mut self,
        survey: &Survey,
        deadline: Option<Instant>,
        threads: usize,
        stillness: &Stillness,
        merged: &mut Merged,
    ) -> (Vec<Page>, Vec<(Page, u64)>) {
        let page = self.domain.page();
        let addresses = |range: AddressRange| (range.start..range.end).step_by(page as usize);
        let pieces = |all: &[Candidates]| -> Vec<Candidates> {
            let piece = |found: &Candidates| {
                let (found, bytes) = (*found, CHUNK * page);
                (found.range.start..found.range.end).step_by(bytes as usize).map(move |start| {
                    let range = AddressRange { start, end: found.range.end.min(start + bytes) };
                    Candidates { range, ..found }
                })
            };
            all.iter().flat_map(piece).collect()
        };
        let mut chunks = pieces(&survey.candidates);
        // What the last merge did not come to is first.
        let first = chunks.partition_point(|chunk| chunk.range.start < self.cursor);
        chunks.rotate_left(first);
        chunks.sort_by_key(|chunk| !chunk.new);
        let over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);

        // What cannot be held up is left for another time.
        let sifted = parallel(threads, &chunks, |&chunk| {
            if over() {
                return None;
            }
            let Ok(_still) = stillness.of(chunk.range) else { return Some((Vec::new(), Vec::new())) };
            // SAFETY: the survey found it resident ordinary memory, and nobody writes to or unmaps it meanwhile.
            let bytes = unsafe { memory::bytes(chunk.range) };
            let (mut zeros, mut others): (Vec<Page>, Vec<Candidates>) = Default::default();
            for (address, bytes) in addresses(chunk.range).zip(bytes.chunks_exact(page as usize)) {
                let found = Candidates { range: AddressRange { start: address, end: address + page }, ..chunk };
                match others.last_mut() {
                    _ if is_zeros(bytes) => zeros.push(Page { address, huge: chunk.huge, entry: 0 }),
                    Some(last) if last.precedes(&found) => last.range.end += page,
                    _ => others.push(found),
                }
            }
            Some((zeros, others))
        });
        let unsifted = sifted.iter().position(Option::is_none).map(|at| chunks[at].range.start);
        let (zeros, others): (Vec<Vec<Page>>, Vec<Vec<Candidates>>) = sifted.into_iter().flatten().unzip();
        let (mut zeros, chunks) = (zeros.concat(), pieces(&others.concat()));

        let hasher = &self.hasher;
        let looked = parallel(threads, &chunks, |&chunk| {
            if over() {
                return None;
            }
            let Ok(_still) = stillness.of(chunk.range) else { return Some(Vec::new()) };
            // SAFETY: as above.
            let bytes = unsafe { memory::bytes(chunk.range) };
            let look = |(address, bytes)| (Page { address, huge: chunk.huge, entry: 0 }, hasher.fingerprint(bytes));
            Some(addresses(chunk.range).zip(bytes.chunks_exact(page as usize)).map(look).collect::<Vec<_>>())
        });
        let unseen = looked.iter().position(Option::is_none).map(|at| chunks[at].range.start);
        let unreached = unseen.or(unsifted);
        merged.cut_short += u64::from(unreached.is_some());
        self.cursor = unreached.unwrap_or(0);
        let mut others: Vec<(Page, u64)> = Vec::new();
        for (page, fingerprint) in looked.into_iter().flatten().flatten() {
            match fingerprint {
                // Written between.
                0 => zeros.push(page),
                _ => others.push((page, fingerprint)),
            }
        }
        merged.looked_at += Pages((zeros.len() + others.len()) as u64);
        zeros.sort_unstable_by_key(|page| page.address);
        others.sort_unstable_by_key(|(page, _)| page.address);
        (zeros, others)
    }

    /// Note each content in the index. Pages for which there is no room are left out.
    fn sight(&mut self, looked: Vec<(Page, u64)>, threads: usize, merged: &mut Merged) -> io::Result<Vec<Page>> {
        // What the last merge looked at is there already.
        let room = self.domain.make_room(looked.len().saturating_sub(self.sighted));
        if unless_held_up(room, merged)?.is_some() {
            self.sighted = looked.len();
        }
        let (domain, random, epoch) = (&self.domain, self.random, self.domain.epoch());
        let chunks: Vec<&[(Page, u64)]> = looked.chunks(CHUNK as usize).collect();
        let sighted = parallel(threads, &chunks, |chunk| {
            let sight = |&(page, fingerprint): &(Page, u64)| {
                let entry = domain.index.entry(fingerprint)?;
                domain.index.see(entry, Tag::of(random, page.address), epoch);
                Some(Page { entry, ..page })
            };
            chunk.iter().filter_map(sight).collect::<Vec<Page>>()
        });
        let pages: Vec<Page> = sighted.into_iter().flatten().collect();
        merged.failed += Pages((looked.len() - pages.len()) as u64);
        Ok(pages)
    }

    /// Store the contents that were chosen and lie nowhere yet: their slots, in the order in which they were to be
    /// stored.
    #[expect(clippy::too_many_arguments, reason = "it is one step of one function")]
    fn store(
        &self,
        partners: &[Page],
        places: &[Place],
        chosen: &[Range<usize>],
        wanted: u32,
        threads: usize,
        stillness: &Stillness,
        merged: &mut Merged,
    ) -> io::Result<Vec<Option<u32>>> {
        let page = self.domain.page();
        // The first page of each content: later ones of the same order hold the same.
        let mut seen = vec![false; wanted as usize];
        let mut first = Vec::new();
        for at in chosen.iter().flat_map(Range::clone) {
            if let Place::Next(order) = places[at]
                && !std::mem::replace(&mut seen[order as usize], true)
            {
                first.push((order, partners[at]));
            }
        }
        if first.is_empty() {
            return Ok(vec![None; wanted as usize]);
        }
        let reserved = unless_held_up(self.domain.reserve(first.len() as u32), merged)?.unwrap_or_default();
        let contents: Vec<(u32, Page, u32)> = first
            .into_iter()
            .zip(reserved.into_iter().flatten())
            .map(|((order, page), slot)| (order, page, slot))
            .collect();
        let behind = |a: &(u32, Page, u32), b: &(u32, Page, u32)| a.1.address + page == b.1.address && a.2 + 1 == b.2;
        let pieces: Vec<&[(u32, Page, u32)]> =
            contents.chunk_by(behind).flat_map(|piece| piece.chunks(CHUNK as usize)).collect();
        let stored = parallel(threads, &pieces, |piece| {
            let start = piece[0].1.address;
            let range = AddressRange { start, end: start + piece.len() as u64 * page };
            let Ok(still) = stillness.of(range) else { return Vec::new() };
            // SAFETY: these pages were looked at, so they are resident, and nobody writes to or unmaps them meanwhile.
            let bytes = unsafe { memory::bytes(range) };
            // Between then and now they may have been written, unless that was promised.
            let same = |((_, page, _), bytes): (&(u32, Page, u32), &[u8])| {
                self.hasher.fingerprint(bytes) == self.domain.index.fingerprint(page.entry)
            };
            let unchanged = still.is_none() || piece.iter().zip(bytes.chunks_exact(page as usize)).all(same);
            if !unchanged || self.domain.store.write(piece[0].2, bytes).is_err() {
                return Vec::new();
            }
            drop(still);
            fault::point("between storing and publishing");
            let publish = |&(order, page, slot): &(u32, Page, u32)| {
                Some((order, self.domain.index.publish(page.entry, slot).ok()?))
            };
            piece.iter().filter_map(publish).collect::<Vec<(u32, u32)>>()
        });
        let mut slots = vec![None; wanted as usize];
        stored.into_iter().flatten().for_each(|(order, slot)| slots[order as usize] = Some(slot));
        let own = contents.iter().filter(|(order, _, slot)| slots[*order as usize] == Some(*slot)).count();
        merged.stored += Pages(own as u64);
        Ok(slots)
    }

    /// Give up what is not needed. So many pages map the store now.
    fn tidy(&mut self, mapped: u64, stillness: &Stillness, merged: &mut Merged) -> io::Result<()> {
        if self.domain.references.count() > mapped + mapped / 8 + SPARE {
            let mut slots = Bits::default();
            slots.extend(slots_mapped(&self.domain, EVERYWHERE)?);
            let mut strays = Bits::default();
            // While the program runs, what was forsaken may be moved from where nobody has looked yet to where
            // somebody has.
            let stay = |slot: &u32| slots.has(*slot) || matches!(stillness, Stillness::Enforced(_));
            strays.extend(self.strays.iter().filter(stay));
            slots.extend(strays.iter());
            if unless_held_up(self.domain.refer_only(slots.iter()), merged)?.is_some() {
                self.strays = strays;
            }
        }
        if self.domain.passed() {
            unless_held_up(self.domain.collect(), merged)?;
        }
        Ok(())
    }

    /// Note the pages that have no partner, or not one that it would pay to merge them with.
    fn note_alone<'p>(&mut self, pages: &[Page], chosen: impl Iterator<Item = &'p Page>, now: Duration) {
        let mut chosen = chosen.map(|page| page.address).peekable();
        for found in pages {
            if chosen.next_if_eq(&found.address).is_none() {
                let fingerprint = self.domain.index.fingerprint(found.entry);
                let at = self.regions.partition_point(|region| region.range.end <= found.address);
                self.regions[at].note(found.address).looked(now, fingerprint);
            }
        }
    }

    fn noted(&mut self, range: AddressRange, mut note: impl FnMut(&mut Note), tally: impl Fn(&mut Tally, Pages)) {
        // The survey has put them in order.
        let first = self.regions.partition_point(|region| region.range.end <= range.start);
        for region in &mut self.regions[first..] {
            let Some(range) = region.range.overlap(range) else { break };
            tally(&mut region.tally, Pages(range.bytes().0 / region.page));
            for address in (range.start..range.end).step_by(region.page as usize) {
                note(region.note(address));
            }
        }
    }
}

impl Candidates {
    /// Whether others of the same kind lie right behind.
    fn precedes(&self, other: &Self) -> bool {
        self.range.end == other.range.start && (self.huge, self.new) == (other.huge, other.new)
    }
}

impl Survey {
    /// Leave out what writers cannot be kept from. Whole parts are registered, so that no mapping is split more than
    /// regions split it.
    fn enforce(&mut self, stillness: &Stillness, merged: &mut Merged, page: u64) {
        let Stillness::Enforced(power) = stillness else { return };
        let refused: Vec<AddressRange> =
            self.parts.iter().copied().filter(|part| power.register(part.start..part.end).is_err()).collect();
        let mut can = |range: AddressRange| {
            let can = !refused.iter().any(|part| part.overlap(range).is_some());
            merged.failed += Pages(if can { 0 } else { range.bytes().0 / page });
            can
        };
        self.broken.retain(|&range| can(range));
        self.candidates.retain(|found| can(found.range));
    }
}

/// What cannot be done because another member has had the domain's lock for too long is left for a later merge.
fn unless_held_up<T>(done: io::Result<T>, merged: &mut Merged) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            merged.held_up = 1;
            Ok(None)
        }
        done => done.map(Some),
    }
}

/// Make ordinary memory of what was written since it was merged. What cannot be for want of mappings stays as it is.
fn heal(survey: &Survey, stillness: &Stillness) -> Vec<AddressRange> {
    let heal = |&range: &AddressRange| {
        let Ok(_still) = stillness.of(range) else { return false };
        // SAFETY: the survey found it mapped, to be read and written, and nobody writes to or unmaps it meanwhile.
        let copy = unsafe { Incoming::copy_of(range) };
        // SAFETY: what takes its place is private memory with the same content.
        copy.and_then(|copy| unsafe { copy.take_place_at(range.start) }).is_ok()
    };
    let most = max_map_count() / 8 * MAPPINGS;
    let fit = (most.saturating_sub(survey.mappings) / 2) as usize;
    survey.broken.iter().take(fit).copied().filter(heal).collect()
}

/// Give zeros back, if they still are.
fn give_back(range: AddressRange, stillness: &Stillness) -> io::Result<bool> {
    let still = stillness.of(range)?;
    // SAFETY: these pages were looked at, so they are resident, and nobody writes to or unmaps them meanwhile.
    let zeros = still.is_none() || unsafe { memory::bytes(range) }.iter().all(|&byte| byte == 0);
    if zeros {
        // SAFETY: it is ordinary memory, holds zeros, and nobody writes to it meanwhile.
        unsafe { memory::give_back_zeros(range) }?;
    }
    Ok(zeros)
}

/// The number of the huge page that an address lies in: one entry of a page directory, which maps as many pages as a
/// page holds entries of eight bytes.
fn huge_page(address: u64, page: u64) -> u64 {
    address / (page * page / 8)
}

/// The runs that are worth it, at most so many, as ranges of positions among some pages. `follows` says whether one of
/// them can be mapped as one with the one before, which lies right before it; `worth` what a page gives back. Huge
/// pages that are split already have nothing to lose.
fn choose(
    pages: &[Page],
    follows: impl Fn(usize) -> bool,
    worth: impl Fn(usize) -> i64,
    split: &HashSet<u64>,
    page: u64,
    at_most: usize,
) -> Vec<Range<usize>> {
    let Some(size) = PageSize::new(page) else { return Vec::new() };
    let costs = Costs::of(size);
    let mut stretches: Vec<Stretch> = Vec::new();
    for (at, found) in pages.iter().enumerate() {
        let huge = found.huge.then(|| huge_page(found.address, page)).filter(|huge| !split.contains(huge));
        let worth = Some(worth(at));
        let behind = at > 0 && pages[at - 1].address + page == found.address && follows(at);
        match stretches.last_mut() {
            Some(last) if behind && last.huge == huge && last.worth == worth => last.pages += 1,
            _ => {
                let hole = if behind { 0 } else { APART };
                stretches.push(Stretch { pages: 1, worth, merges: true, huge, hole });
            }
        }
    }
    let prices = Prices { range: costs.range, huge_page: costs.huge_page };
    let chosen = best_ranges_within(1, |_| stretches.iter().copied(), prices, at_most);
    chosen.into_iter().flatten().map(|range| range.start as usize..range.end as usize).collect()
}

/// The pages that have a partner, where each content lies or in which order it is to be stored, and how many are to be.
fn places(domain: &Domain, pages: &[Page]) -> (Vec<Page>, Vec<Place>, u32) {
    let mut orders: HashMap<usize, u32> = HashMap::new();
    let (mut partners, mut places) = (Vec::new(), Vec::new());
    for &page in pages {
        let state = domain.index.state(page.entry);
        let place = match state.slot() {
            Some(slot) => Place::Slot(slot),
            None if state.is_condemned() || !state.is_paired() => continue,
            None => {
                let next = orders.len() as u32;
                Place::Next(*orders.entry(page.entry).or_insert(next))
            }
        };
        partners.push(page);
        places.push(place);
    }
    (partners, places, orders.len() as u32)
}

/// What was chosen, as runs of so many pages at most that lie one behind another in the store, too. The kernel makes
/// one mapping of those that adjoin.
fn runs<'p>(
    partners: &'p [Page],
    places: &[Place],
    chosen: &[Range<usize>],
    stored: &[Option<u32>],
    at_once: usize,
) -> Vec<Run<'p>> {
    let slot = |at: usize| match places[at] {
        Place::Slot(slot) => Some(slot),
        Place::Next(order) => stored[order as usize],
    };
    let mut runs: Vec<Run<'p>> = Vec::new();
    for range in chosen {
        let mut start = range.start;
        for at in range.clone() {
            let ends =
                at + 1 == range.end || slot(at + 1) != slot(at).map(|slot| slot + 1) || at - start + 1 >= at_once;
            if ends {
                runs.extend(slot(start).map(|slot| Run { pages: &partners[start..=at], slot }));
                start = at + 1;
            }
        }
    }
    runs
}

/// Map a run from the store, if that holds what the run does.
fn map(domain: &Domain, run: &Run<'_>, stillness: &Stillness) -> io::Result<bool> {
    let range = run.range(domain.page());
    let slots = run.slot..run.slot + run.pages.len() as u32;
    // In this order: see `domain`.
    domain.references.add(slots.clone())?;
    let lies = |(page, slot): (&Page, u32)| domain.index.state(page.entry).slot() == Some(slot);
    if !domain.is_present() || !run.pages.iter().zip(slots).all(lies) {
        return Ok(false);
    }
    fault::point("between referring and mapping");
    let incoming = Incoming::of_store(&domain.store, run.slot, range.bytes().0)?;
    let _still = stillness.of(range)?;
    // SAFETY: the run was looked at, so it is resident, and nobody writes to or unmaps it meanwhile.
    if incoming.as_slice() != unsafe { memory::bytes(range) } {
        return Ok(false);
    }
    // SAFETY: both hold the same, and nobody writes to the run until it is done.
    unsafe { incoming.take_place_at(range.start) }?;
    Ok(true)
}

/// All addresses.
pub const EVERYWHERE: AddressRange = AddressRange { start: 0, end: u64::MAX };

/// All slots that this process maps within a range, whoever mapped them. What is moved meanwhile may be missed.
///
/// # Errors
/// Those of reading `/proc/self/maps`.
pub fn slots_mapped(domain: &Domain, within: AddressRange) -> io::Result<impl Iterator<Item = u32> + use<>> {
    let page = domain.page();
    let (parts, _) = layout::own(domain.store.identity(), page)?;
    Ok(parts.into_iter().flat_map(move |part| match (part.kind, part.range.overlap(within)) {
        (Kind::Stored { slot, .. }, Some(range)) => {
            let first = slot + ((range.start - part.range.start) / page) as u32;
            first..first + (range.bytes().0 / page) as u32
        }
        _ => 0..0,
    }))
}

/// Find out how regions stand, and count all mappings of this process.
///
/// # Errors
/// Those of reading `/proc/self/maps` and `pagemap`.
pub fn tally_now(domain: &Domain, regions: &mut [Region], now: Duration) -> io::Result<u64> {
    let (parts, mappings) = layout::own(domain.store.identity(), domain.page())?;
    let pagemap = File::open("/proc/self/pagemap")?;
    for region in regions {
        region.tally_anew();
        let first = parts.partition_point(|part| part.range.end <= region.range.start);
        for part in &parts[first..] {
            let Some(range) = part.range.overlap(region.range) else { break };
            let mut found = Vec::new();
            pagemap::mapped(&pagemap, range.start..range.end, |mapped| found.push(mapped))?;
            region.tally(range, part.kind, &found, now);
        }
    }
    Ok(mappings)
}

/// `vm.max_map_count`.
fn max_map_count() -> u64 {
    let read = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    read.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT)
}

/// Do the same with each of some items, on so many threads. The results are in the order of the items.
fn parallel<T: Sync, R: Send>(threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if threads <= 1 || items.len() <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        // Where there can be no more threads, fewer do it.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, worker).ok();
        let workers: Vec<_> = (1..threads.min(items.len())).map_while(spawn).collect();
        let mut done = worker();
        for worker in workers {
            match worker.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}
