//! One merge: survey, heal, look, decide, store, map, tidy.
//!
//! | step | what |
//! |---|---|
//! | survey | page tables: what is ordinary memory and resident, what is merged, what was written since |
//! | heal | what was written since becomes ordinary memory again, so that its slots can be freed |
//! | look | candidates that are zeros, then fingerprints of others that seem to stay, on all threads; those are noted |
//! | decide | runs of pages with a partner that pay, by the prices and the code of guided planning |
//! | store | contents that were seen twice and lie nowhere yet, in the order in which they lie in memory |
//! | map | each run: refer, check, compare, exchange |
//! | tidy | references that are no longer needed; slots that nobody refers to |
//!
//! A run is mapped as one if its pages lie one behind another in the store, too. Since contents are stored in the order
//! of their pages, memory that is equal over many pages is one mapping in all members but for where it differs, and
//! where members that merged at the same time have shared out what was to be stored. Storing and mapping go by batches.

use crate::choose::{Page, Place, Run, choose, huge_page, map, places, runs, within};
use crate::decide::allowance::Round;
use crate::decide::hot::Note;
use crate::decide::turn::{SafePoint, Turn};
use crate::domain::PATIENCE;
use crate::fits::is_full;
use crate::huge::{self, Splits};
use crate::incarnation::is_lost;
use crate::index::{Index, Tag};
use crate::memory;
use crate::references::Bits;
use crate::statistics::Merged;
use crate::stillness::{CHUNK, PROMISED_CHUNK, Stillness};
use crate::survey::{Candidates, EVERYWHERE, Survey, slots_mapped};
use crate::windows::is_whole;
use crate::{Options, State, clock, record};
use pagefold_base::engine::Tally;
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::fault;
use pagefold_sys::fingerprint::{Hasher, is_zeros};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pages that are stored and mapped before the next ones are. The kernel has one process at a time write to a file
/// (`inode_lock` in mm/shmem.c, 6.18): meanwhile other members map what is stored already.
pub const BATCH: usize = 2048;

/// Runs that are shorter than so many pages in the mean are mapped by one thread.
const SHORT_RUN_PAGES: usize = 16;

/// Contents that are stored at a time: what another member stores at the same time is stored in vain.
const PIECE: usize = 64;

/// A merge does not begin before there is room for so many times what finding out took the last time: small merges that
/// only find out what there is would use up what there is room for. With others, it takes half as much.
const SURVEYS: u32 = 4;

/// How long at most pages that the kernel is moving are waited for.
const STILL: Duration = Duration::from_millis(50);

/// References are made anew once an eighth of them, and so many, are not needed.
const SPARE: u64 = 64;

/// How a merge is made.
#[derive(Clone, Copy, Debug)]
pub struct Terms<'s> {
    /// How much time there is for it, if that is bounded.
    pub room: Option<Duration>,
    threads: usize,
    /// When it began, of the clock that members share.
    now: Duration,
    stillness: &'s Stillness<'s>,
    /// The bound that the loss of huge pages has to fit into, if there is one.
    huge_bound: Option<f64>,
}

/// How pages are looked at.
#[derive(Clone, Copy, Debug)]
struct Looks<'s> {
    page: u64,
    stillness: &'s Stillness<'s>,
    /// Whether it matters what pages held at the last look, as far as samples tell.
    sparing: bool,
}

/// Candidates that a thread has gone through, as many as it takes at a time.
#[derive(Debug)]
struct Sifted {
    /// Where all of them lie.
    range: AddressRange,
    zeros: Vec<Candidates>,
    others: Vec<Candidates>,
    /// Of all pages of the others in turn, if it matters what they held at the last look.
    samples: Vec<u16>,
}

impl Sifted {
    /// What cannot be held up is left for another time.
    fn of(chunk: Candidates, hasher: &Hasher, Looks { page, stillness, sparing }: Looks<'_>) -> Self {
        let mut sifted = Self { range: chunk.range, zeros: Vec::new(), others: Vec::new(), samples: Vec::new() };
        let Ok(_still) = stillness.to_read(chunk.range) else { return sifted };
        // SAFETY: the survey found it resident ordinary memory, and nobody writes to or unmaps it meanwhile.
        let bytes = unsafe { memory::bytes(chunk.range) };
        for (found, bytes) in chunk.pieces(page).zip(bytes.chunks_exact(page as usize)) {
            if is_zeros(bytes) {
                found.join(&mut sifted.zeros);
            } else {
                found.join(&mut sifted.others);
                sifted.samples.extend(sparing.then(|| hasher.sample(bytes)));
            }
        }
        sifted
    }
}

/// Candidates that were looked at, as many as a thread takes at a time. Of each page no more is kept than its
/// fingerprint and what is noted of its content: what a merge takes of its program's heap may stay with that.
#[derive(Debug, Default)]
struct Looked {
    found: Vec<Candidates>,
    /// Of all their pages in turn, 0 of zeros.
    fingerprints: Vec<u64>,
    contents: Vec<u16>,
}

impl Looked {
    /// Look at what lies in a range, from all of which writers are held up: what lies between is no reason to split a
    /// huge page.
    fn at(
        found: &[Candidates],
        range: AddressRange,
        hasher: &Hasher,
        Looks { page, stillness, sparing }: Looks<'_>,
    ) -> Self {
        let mut looked = Self::default();
        let Ok(_still) = stillness.to_read(range) else { return looked };
        for &found in found {
            // SAFETY: the survey found it resident ordinary memory, and nobody writes to or unmaps it meanwhile.
            let bytes = unsafe { memory::bytes(found.range) };
            for bytes in bytes.chunks_exact(page as usize) {
                let fingerprint = hasher.fingerprint(bytes);
                looked.contents.push(if sparing { hasher.sample(bytes) } else { fingerprint as u16 });
                looked.fingerprints.push(fingerprint);
            }
            looked.found.push(found);
        }
        looked
    }

    fn pages(&self, page: u64) -> impl Iterator<Item = (Candidates, u64)> + '_ {
        self.found.iter().flat_map(move |found| found.pieces(page)).zip(self.fingerprints.iter().copied())
    }

    fn zeros(&self, page: u64) -> impl Iterator<Item = Candidates> + '_ {
        self.pages(page).filter(|&(_, fingerprint)| fingerprint == 0).map(|(found, _)| found)
    }

    fn others(&self, page: u64) -> impl Iterator<Item = (Page, u64)> + '_ {
        let pages = self.pages(page).zip(&self.contents).filter(|&((_, fingerprint), _)| fingerprint != 0);
        pages.map(|((found, fingerprint), &content)| (Page { content, ..found.first() }, fingerprint))
    }
}

/// A content that is to be stored: which one, a page that holds it, and where it is to lie.
#[derive(Clone, Copy, Debug)]
struct Content {
    order: u32,
    from: Page,
    slot: u32,
}

impl Content {
    /// Whether it lies where it was to.
    fn is_own(&self, slot: Option<u32>) -> bool {
        slot == Some(self.slot)
    }
}

impl State {
    /// Merge what is identical now.
    pub fn merge(&mut self, options: &Options, directory: &Path, stillness: &Stillness<'_>) -> io::Result<Merged> {
        let (began, now) = (Instant::now(), clock());
        let lost = self.split.charge(self.started.elapsed(), self.tally().pages);
        self.allowance.spend(lost);
        let room = self.room(Bytes::ZERO);
        let mut merged = Merged::default();
        self.merges += 1;
        if !std::mem::take(&mut self.granted) && !self.has_its_turn(now, stillness, Bytes::ZERO) {
            merged.cut_short = 1;
            self.so_far += merged;
            return Ok(merged);
        }
        let patience = began + room.map_or(PATIENCE, |room| room.min(PATIENCE));
        if !self.domain.is_whole()
            && unless_held_up(self.rejoin(directory, patience), &mut merged)?.is_none()
            && merged.held_up > 0
        {
            merged.time = began.elapsed();
            self.allowance.spend(merged.time);
            self.so_far += merged;
            return Ok(merged);
        }
        self.domain.wait_until(patience);
        let (known, cursor) = (std::mem::take(&mut self.promising), self.cursor);
        self.adopted = Bytes::ZERO;
        let huge_bound = options.max_slowdown.filter(|_| !options.split_huge_pages);
        let terms = Terms { room, threads: options.threads.max(1), now, stillness, huge_bound };
        let done = self.merge_in_windows(terms, &mut merged);
        merged.time = began.elapsed();
        let faults = |pages: Pages, each: Duration| each.mul_f64(pages.0 as f64);
        let faults = faults(merged.broken, self.faults.write) + faults(merged.read, self.faults.read);
        let cost = merged.time + faults;
        self.allowance.spend(cost);
        let page = self.domain.page();
        let round = merged.round(page);
        let found = done.as_ref().ok().copied().flatten();
        let whole = is_whole(found.is_some(), round.whole, cursor, self.cursor);
        let promising = known + found.unwrap_or_default();
        self.rest.note(Round { cost, whole, ..round }, now, Bytes(promising.0 * page));
        self.so_far += merged;
        self.last_merge = Some(record::now());
        self.tell(options);
        done.map(|_| merged)
    }

    /// Whether to merge now: at once without a bound; else if there is room for it and it may pay, and together with
    /// others where those may wait for this member. So much memory is to be adopted before.
    pub fn has_its_turn(&mut self, now: Duration, stillness: &Stillness<'_>, to_come: Bytes) -> bool {
        let Some(room) = self.room(to_come) else { return true };
        let (roomy, able) = (room > self.surveying * SURVEYS, room > self.surveying * (SURVEYS / 2));
        if stillness.userfault().is_some() {
            return roomy;
        }
        let ready = roomy && self.rest.is_over(now, self.promised(to_come));
        let named = self.domain.moment();
        let before = self.before.replace(now);
        let point = SafePoint { now, before, named, served: self.served, alone: self.domain.is_alone(), ready, able };
        if point.is_due() {
            self.served = named;
        }
        match point.turn() {
            Turn::Merge => true,
            Turn::Name(moment) => {
                self.domain.name_moment(named, moment);
                false
            }
            Turn::Pass => false,
        }
    }

    /// How much time there is for a merge now, if that is bounded.
    fn room(&self, to_come: Bytes) -> Option<Duration> {
        self.allowance.room(self.started.elapsed(), self.rest.expects(self.promised(to_come)))
    }

    /// Memory that the next merge may win something of that the last one could not, with so much more to be adopted.
    fn promised(&self, to_come: Bytes) -> Bytes {
        Bytes(self.promising.0 * self.domain.page()) + self.adopted + to_come
    }

    /// How many pages were there of which nothing was known.
    pub fn merge_within(&mut self, terms: Terms<'_>, merged: &mut Merged) -> io::Result<Pages> {
        let Terms { room, threads, now, stillness, huge_bound } = terms;
        let page = self.domain.page();
        let began = Instant::now();
        let patience = room.map_or(STILL, |room| STILL.min(room / SURVEYS));
        let mut survey = Survey::of(&mut self.regions, &self.domain, (now, patience), merged)?;
        self.surveying = began.elapsed();
        // The other half of what is left is for what is found.
        let deadline = room.map(|room| Instant::now() + room.saturating_sub(self.surveying) / 2);
        survey.enforce(stillness, merged, page);
        let (healed, is_partial) = self.heal(&survey, stillness, deadline);
        fault::point("after healing");
        let new = survey.new_pages(page);
        let (zeros, looked) = self.look(&survey.candidates, deadline, terms, merged);
        merged.cut_short = merged.cut_short.max(u64::from(is_partial));
        // New ones are first.
        self.promising += new - new.min(merged.looked_at);
        let pages = self.sight(&looked, threads, merged)?;
        drop(looked);

        let (partners, places, wanted) = places(&self.domain, &pages);
        let others = merged.left_alone + Pages(survey.stored);
        let resident = huge::resident(&survey.candidates, others, page);
        let limit = huge_bound.map(|bound| self.split.limit(bound, resident));
        let splits = Splits::among(&zeros, &partners, page, limit);
        let mut split = HashSet::new();
        for together in zeros.chunk_by(|found, next| found.is_bound_to(next, page)) {
            let zeros: Vec<Page> =
                together.iter().flat_map(|found| found.pieces(page)).map(|one| one.first()).collect();
            let worth = |at: usize| splits.allow(&zeros[at], page).then_some(page as i64);
            let chosen = choose(&zeros, |_| true, worth, &split, page, usize::MAX);
            self.note_alone(&zeros, chosen.iter().flat_map(|run| &zeros[run.clone()]), now);
            merged.not_worth += Pages((zeros.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
            let runs = chosen.into_iter().map(|run| Run { pages: &zeros[run], slot: 0 }.range(page));
            for range in runs.flat_map(|run| stillness.parts(run, page)) {
                let pages = Pages(range.bytes().0 / page);
                if give_back(range, stillness).is_ok_and(|done| done) {
                    merged.zeros += pages;
                    split.extend(huge_page(range.start, page)..=huge_page(range.end - page, page));
                    merged.retried += self.note_merged(range, now, |tally| &mut tally.zeros);
                } else {
                    merged.failed += pages;
                }
            }
        }
        fault::point("after giving zeros back");

        let follows = |at: usize| places[at].follows(places[at - 1]);
        // Each of two that share a content that is to be stored gives back half of it.
        let gives_back = |at: usize| if matches!(places[at], Place::Slot(_)) { page as i64 } else { page as i64 / 2 };
        let worth = |at: usize| splits.allow(&partners[at], page).then(|| gives_back(at));
        let chosen = choose(&partners, follows, worth, &split, page, survey.room(healed.len()));
        self.note_alone(&pages, chosen.iter().flat_map(|range| &partners[range.clone()]), now);
        merged.not_worth += Pages((partners.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
        let at_once = match stillness.userfault() {
            None => BATCH.div_ceil(threads).min(PROMISED_CHUNK as usize),
            Some(_) => CHUNK as usize,
        };
        // Members that merge together have the same to store: each begins elsewhere.
        let most = self.batch_pages();
        let mut batches = batches(&chosen, most);
        let elsewhere = self.random % batches.len().max(1) as u64;
        batches.rotate_left(elsewhere as usize);
        // What a batch ends in the midst of becomes one mapping again.
        let cuts = batches.iter().map(Vec::len).sum::<usize>() - chosen.len();
        let mut room = survey.room(healed.len()) + cuts;
        let contents = self.reserve(&partners, &places, &batches, wanted, merged)?;
        let mut stored = vec![None; wanted as usize];
        let mut counted = HashSet::new();
        for (batch, contents) in batches.iter().zip(&contents) {
            let all: usize = batch.iter().map(Range::len).sum();
            if room == 0 {
                merged.not_worth += Pages(all as u64);
                continue;
            }
            // What is stored by an index that another member has replaced is found by nobody. Where memory is short,
            // others may have taken what there was.
            let needed = Bytes(contents.len() as u64 * page);
            let fits = most == BATCH || self.headroom.has_room_for(needed, self.domain.members());
            if !self.domain.is_present() || !fits {
                merged.failed += Pages(all as u64);
                continue;
            }
            if limit.is_some() && stillness.userfault().is_some() {
                // Holding writers up from a part of a huge page splits it, whether or not that part is merged then.
                self.split.note(batch.iter().flat_map(|range| &partners[range.clone()]), page, &mut counted);
            }
            self.store(contents, stillness, &mut stored);
            let own = contents.iter().filter(|content| content.is_own(stored[content.order as usize]));
            merged.stored += Pages(own.count() as u64);
            let runs = runs(&partners, &places, batch, &stored, at_once);
            let (taken, mappings) = within(&runs, room, page);
            room -= mappings;
            let pages = |runs: &[Run]| Pages(runs.iter().map(|run| run.pages.len() as u64).sum());
            let too_many = pages(&runs[taken.len()..]);
            merged.not_worth += too_many;
            let before = merged.merged;
            let outcomes = parallel(mapping_threads(threads, taken), taken, |run| {
                map(&self.domain, run, stillness).is_ok_and(|done| done)
            });
            for (run, _) in taken.iter().zip(outcomes).filter(|&(_, done)| done) {
                merged.merged += Pages(run.pages.len() as u64);
                merged.runs += 1;
                if limit.is_some() {
                    self.split.note(run.pages.iter(), page, &mut counted);
                }
                merged.retried += self.note_merged(run.range(page), now, |tally| &mut tally.merged);
            }
            merged.failed += Pages(all as u64) - too_many - (merged.merged - before);
        }
        fault::point("after mapping");
        let healed: u64 = healed.iter().map(|range| range.bytes().0 / page).sum();
        // Some of what was healed was of a former store.
        self.tidy((survey.stored + merged.merged.0).saturating_sub(healed), stillness, merged)?;
        Ok(new)
    }

    /// Look at candidates until the deadline, the new ones first: pages of zeros, and others with their fingerprints,
    /// both by address. Zeros are found before any fingerprint is made: they are known by few lines of each other page,
    /// and most worth.
    ///
    /// Where there is a bound on what may be spent, no fingerprint is made of pages that are found to have changed since
    /// the last look: whatever is merged while it changes costs its program a fault and the engine the work once more.
    /// That is told by a sample: what changes elsewhere in a page is taken to stay until it is merged and written.
    fn look(
        &mut self,
        candidates: &[Candidates],
        deadline: Option<Instant>,
        Terms { room, threads, now, stillness, .. }: Terms<'_>,
        merged: &mut Merged,
    ) -> (Vec<Candidates>, Vec<Looked>) {
        let (page, sparing) = (self.domain.page(), room.is_some());
        let mut chunks = in_turn(candidates, self.cursor, CHUNK * page);
        let sizes = chunks.iter().map(|chunk| chunk.range.bytes().0 / page);
        let beyond = chunks.split_off(self.headroom.budget.holds(sizes).min(chunks.len()));
        let (looks, hasher) = (Looks { page, stillness, sparing }, &self.hasher);
        let sifted = parallel_until(deadline, threads, &chunks, |&chunk| Sifted::of(chunk, hasher, looks));
        let unsifted = sifted.iter().position(Option::is_none).map(|at| chunks[at].range.start);
        let unsifted = unsifted.or(beyond.first().map(|chunk| chunk.range.start));
        let mut zeros: Vec<Candidates> = sifted.iter().flatten().flat_map(|sifted| &sifted.zeros).copied().collect();
        merged.looked_at += Pages(zeros.iter().map(|found| found.range.bytes().0 / page).sum());

        let others = sifted.into_iter().flatten().map(|Sifted { range, others, samples, .. }| {
            (range, if sparing { self.settled(others, &samples, now, merged) } else { others })
        });
        let others: Vec<(AddressRange, Vec<Candidates>)> = others.filter(|(_, found)| !found.is_empty()).collect();
        let hasher = &self.hasher;
        let looked =
            parallel_until(deadline, threads, &others, |(range, found)| Looked::at(found, *range, hasher, looks));
        let unseen = looked.iter().position(Option::is_none).map(|at| others[at].0.start);
        let unreached = unseen.or(unsifted);
        merged.cut_short += u64::from(unreached.is_some());
        self.cursor = unreached.unwrap_or(0);
        let mut looked: Vec<Looked> = looked.into_iter().flatten().collect();
        // Written between.
        zeros.extend(looked.iter().flat_map(|looked| looked.zeros(page)));
        let seen: usize = looked.iter().map(|looked| looked.fingerprints.len()).sum();
        merged.looked_at += Pages(seen as u64);
        zeros.sort_unstable_by_key(|found| found.range.start);
        looked.sort_unstable_by_key(|looked| looked.found.first().map(|found| found.range.start));
        (zeros, looked)
    }

    /// Those of some pages that hold what they did at the last look, by their samples; with the others nothing more is
    /// done.
    fn settled(
        &mut self,
        found: Vec<Candidates>,
        samples: &[u16],
        now: Duration,
        merged: &mut Merged,
    ) -> Vec<Candidates> {
        let page = self.domain.page();
        let mut settled = Vec::new();
        for (found, &sample) in found.into_iter().flat_map(|found| found.pieces(page)).zip(samples) {
            if self.note(found.range.start).is_settled(sample) {
                found.join(&mut settled);
            } else {
                merged.looked_at += Pages(1);
                self.note_looked(found.range.start, sample, now);
            }
        }
        settled
    }

    /// Note each content in the index. Pages for which there is no room are left out.
    fn sight(&mut self, looked: &[Looked], threads: usize, merged: &mut Merged) -> io::Result<Vec<Page>> {
        let page = self.domain.page();
        let missing = |index: &Index| {
            let others = looked.iter().flat_map(|looked| looked.others(page));
            others.filter(|&(_, fingerprint)| index.find(fingerprint).is_none()).count()
        };
        let room = unless_held_up(self.domain.make_room(missing, self.headroom.budget.index_bytes), merged)?;
        let room = AtomicUsize::new(room.unwrap_or_else(|| self.domain.index.room(self.domain.index.used())));
        let (index, random, epoch) = (&self.domain.index, self.random, self.domain.epoch());
        let sight = |(found, fingerprint): (Page, u64)| {
            let has_room =
                || room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            let entry = index.find(fingerprint).or_else(|| has_room().then(|| index.entry(fingerprint)).flatten())?;
            index.see(entry, Tag::of(random, found.address), epoch);
            Some(Page { entry, ..found })
        };
        let sighted = parallel(threads, looked, |looked| looked.others(page).map(sight).collect::<Vec<_>>());
        merged.failed += Pages(sighted.iter().flatten().filter(|page| page.is_none()).count() as u64);
        Ok(sighted.into_iter().flatten().flatten().collect())
    }

    /// The contents of each batch that are to be stored, with slots for them that lie one behind another as the
    /// contents do. Where there are not as many, the last are left out.
    fn reserve(
        &self,
        partners: &[Page],
        places: &[Place],
        batches: &[Vec<Range<usize>>],
        wanted: u32,
        merged: &mut Merged,
    ) -> io::Result<Vec<Vec<Content>>> {
        // The first page of each content: later ones of the same order hold the same.
        let mut seen = vec![false; wanted as usize];
        let mut first = |at: usize| match places[at] {
            Place::Next(order) if !std::mem::replace(&mut seen[order as usize], true) => Some((order, partners[at])),
            _ => None,
        };
        let first = |batch: &Vec<Range<usize>>| batch.iter().cloned().flatten().filter_map(&mut first).collect();
        let contents: Vec<Vec<(u32, Page)>> = batches.iter().map(first).collect();
        let count = seen.iter().filter(|&&seen| seen).count() as u32;
        let reserved = match count {
            0 => Vec::new(),
            count => unless_held_up(self.domain.reserve(count), merged)?.unwrap_or_default(),
        };
        let mut reserved = reserved.into_iter().flatten();
        let slots: Vec<Option<u32>> = seen.into_iter().map(|seen| seen.then(|| reserved.next()).flatten()).collect();
        let with_slot = |(order, from): (u32, Page)| Some(Content { order, from, slot: slots[order as usize]? });
        Ok(contents.into_iter().map(|batch| batch.into_iter().filter_map(with_slot).collect()).collect())
    }

    /// Store some contents, and say in which slot each of them lies, by their orders. One piece after another, so that
    /// they lie together; where another member has stored one meanwhile, this one goes on somewhere in what is left.
    fn store(&self, contents: &[Content], stillness: &Stillness<'_>, stored: &mut [Option<u32>]) {
        let page = self.domain.page();
        let behind = |a: &Content, b: &Content| a.from.address + page == b.from.address && a.slot + 1 == b.slot;
        let pieces: Vec<&[Content]> = contents.chunk_by(behind).flat_map(|piece| piece.chunks(PIECE)).collect();
        // Numbers of this member's own (D. Knuth's MMIX generator, TAOCP 3.3.4), or all would go on at the same place.
        let mut draw = self.random;
        let mut elsewhere = |among: usize| {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draw >> 33) as usize % among.max(1)
        };
        let mut left = vec![&pieces[..]];
        while let Some(pieces) = left.pop() {
            let Some((piece, rest)) = pieces.split_first() else { continue };
            let slots = self.store_piece(piece, stillness);
            let alone = piece.iter().zip(&slots).all(|(content, &slot)| slot.is_none() || content.is_own(slot));
            for (content, slot) in piece.iter().zip(slots) {
                stored[content.order as usize] = slot;
            }
            let (later, next) = rest.split_at(if alone { 0 } else { elsewhere(rest.len()) });
            left.extend([later, next]);
        }
    }

    /// Store contents that lie one behind another, unless all of them lie somewhere already; where each of them lies.
    fn store_piece(&self, piece: &[Content], stillness: &Stillness<'_>) -> Vec<Option<u32>> {
        let (page, index) = (self.domain.page(), &self.domain.index);
        let lies = |content: &Content| index.state(content.from.entry).slot().map(Some);
        if let Some(slots) = piece.iter().map(lies).collect() {
            return slots;
        }
        let start = piece[0].from.address;
        let range = AddressRange { start, end: start + piece.len() as u64 * page };
        let Ok(still) = stillness.to_read(range) else { return vec![None; piece.len()] };
        // SAFETY: these pages were looked at, so they are resident, and nobody writes to or unmaps them meanwhile.
        let bytes = unsafe { memory::bytes(range) };
        // Between then and now they may have been written, unless that was promised.
        let same = |(content, bytes): (&Content, &[u8])| {
            self.hasher.fingerprint(bytes) == index.fingerprint(content.from.entry)
        };
        let unchanged = still.is_promised() || piece.iter().zip(bytes.chunks_exact(page as usize)).all(same);
        if !unchanged || self.domain.store.write(piece[0].slot, bytes).is_err() {
            return vec![None; piece.len()];
        }
        drop(still);
        fault::point("between storing and publishing");
        let slots: Vec<_> = piece.iter().map(|content| index.publish(content.from.entry, content.slot).ok()).collect();
        // What another member has stored meanwhile was stored in vain, where nobody else looks. Its memory goes at once
        // if it can, and its slots once references are made anew.
        let told: Vec<(u32, bool)> =
            piece.iter().zip(&slots).map(|(content, &slot)| (content.slot, content.is_own(slot))).collect();
        for vain in told.chunk_by(|a, b| a.1 == b.1).filter(|same| !same[0].1) {
            let first = vain[0].0;
            let _ = self.domain.store.punch(first..first + vain.len() as u32);
        }
        slots
    }

    /// Give up what is not needed. So many pages map the store now.
    fn tidy(&mut self, mapped: u64, stillness: &Stillness<'_>, merged: &mut Merged) -> io::Result<()> {
        if self.domain.references.count() > mapped + mapped / 8 + SPARE {
            let mut slots = Bits::default();
            slots.extend(slots_mapped(&self.domain, EVERYWHERE)?);
            let mut strays = Bits::default();
            // While the program runs, what was forsaken may be moved from where nobody has looked yet to where
            // somebody has.
            let stay = |slot: &u32| slots.has(*slot) || stillness.userfault().is_some();
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
                self.note_looked(found.address, found.content, now);
            }
        }
    }

    /// What is known of a page of some region; the survey has put those in order.
    fn note(&mut self, address: u64) -> &mut Note {
        let at = self.regions.partition_point(|region| region.range().end <= address);
        self.regions[at].note(address)
    }

    /// Note that a page was looked at in vain.
    fn note_looked(&mut self, address: u64, content: u16, now: Duration) {
        let note = self.note(address);
        note.looked(now, content);
        let promising = note.is_promising();
        self.promising += Pages(u64::from(promising));
    }

    /// Note that a range was merged, and count it where `of` says. How many of its pages are not expected to last.
    fn note_merged(&mut self, range: AddressRange, now: Duration, of: fn(&mut Tally) -> &mut Pages) -> Pages {
        // The survey has put them in order.
        let first = self.regions.partition_point(|region| region.range().end <= range.start);
        let parts = self.regions[first..].iter_mut().map_while(|region| Some((region.range().overlap(range)?, region)));
        parts.map(|(part, region)| region.merged(part, now, of)).sum()
    }
}

/// Candidates in pieces of so many bytes, none of which lies across a multiple of that: the new ones first, and of either
/// kind those first which lie behind the cursor, where the last merge was cut short.
fn in_turn(candidates: &[Candidates], cursor: u64, bytes: u64) -> Vec<Candidates> {
    let mut chunks: Vec<Candidates> = candidates.iter().flat_map(|found| found.pieces(bytes)).collect();
    let reached = chunks.partition_point(|chunk| chunk.range.end <= cursor);
    chunks.rotate_left(reached);
    chunks.sort_by_key(|chunk| !chunk.new);
    chunks
}

/// What was chosen, in batches of so many pages at most.
fn batches(chosen: &[Range<usize>], most: usize) -> Vec<Vec<Range<usize>>> {
    let parts = |range: &Range<usize>| {
        let end = range.end;
        range.clone().step_by(most).map(move |start| start..end.min(start + most))
    };
    let mut batches: Vec<Vec<Range<usize>>> = Vec::new();
    let mut room = 0;
    for part in chosen.iter().flat_map(parts) {
        if part.len() > room {
            batches.push(Vec::new());
            room = most;
        }
        room -= part.len();
        batches.last_mut().expect("one was just made").push(part);
    }
    batches
}

/// What cannot be done because another member has had the domain's lock for too long, or because files of the domain
/// were removed meanwhile, is left for a later merge. So is what there is no room for; what needs none is still done.
fn unless_held_up<T>(done: io::Result<T>, merged: &mut Merged) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::TimedOut || is_lost(&error) => {
            merged.held_up = 1;
            Ok(None)
        }
        Err(error) if is_full(&error) => Ok(None),
        done => done.map(Some),
    }
}

/// On how many threads to map some runs: short ones on one. The kernel has one thread at a time change the mappings of a
/// process, and there is little else to do for a short run: two threads mapped single pages at 0.10 GB/s, one at 0.21.
fn mapping_threads(threads: usize, runs: &[Run<'_>]) -> usize {
    let pages: usize = runs.iter().map(|run| run.pages.len()).sum();
    if pages < runs.len() * SHORT_RUN_PAGES { 1 } else { threads }
}

/// Give zeros back, if they still are.
fn give_back(range: AddressRange, stillness: &Stillness<'_>) -> io::Result<bool> {
    let still = stillness.of(range)?;
    // SAFETY: these pages were looked at, so they are resident, and nobody writes to or unmaps them meanwhile.
    let zeros = still.is_promised() || is_zeros(unsafe { memory::bytes(range) });
    if zeros {
        // SAFETY: it is ordinary memory, holds zeros, and nobody writes to it meanwhile.
        unsafe { memory::give_back_zeros(range) }?;
    }
    Ok(zeros)
}

/// As [`parallel`], but once a deadline is over no item is begun other than the first: however little time there is,
/// each merge comes a bit further.
fn parallel_until<T: Sync, R: Send>(
    deadline: Option<Instant>,
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<Option<R>> {
    let over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let is_first = |item: &T| items.first().is_some_and(|first| std::ptr::eq(first, item));
    parallel(threads, items, |item| (is_first(item) || !over()).then(|| work(item)))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_hold_all_that_was_chosen_in_its_order_and_no_more_than_fits() {
        let chosen = [0..10, 20..20 + BATCH - 10, 5000..5001, 6000..6000 + 2 * BATCH + 7];
        let batches = batches(&chosen, BATCH);
        let pages = |batch: &Vec<Range<usize>>| batch.iter().map(Range::len).sum::<usize>();
        assert_eq!(batches.iter().map(pages).collect::<Vec<_>>(), [BATCH, 1, BATCH, BATCH, 7]);
        let small = super::batches(&chosen, 8);
        assert_eq!(small.iter().map(pages).max(), Some(8));
        for batches in [batches, small] {
            let flat: Vec<usize> = batches.concat().into_iter().flatten().collect();
            assert_eq!(flat, chosen.iter().cloned().flatten().collect::<Vec<_>>());
        }
        assert!(super::batches(&[], BATCH).is_empty());
    }

    fn candidates(start: u64, end: u64, new: bool) -> Candidates {
        Candidates { range: AddressRange { start, end }, huge: false, new }
    }

    #[test]
    fn new_ones_are_first_and_none_lies_across_a_multiple() {
        let found = [candidates(0x1000, 0x5000, false), candidates(0x5000, 0x9000, true)];
        let ranges: Vec<(u64, u64)> =
            in_turn(&found, 0, 0x4000).iter().map(|chunk| (chunk.range.start, chunk.range.end)).collect();
        assert_eq!(ranges, [(0x5000, 0x8000), (0x8000, 0x9000), (0x1000, 0x4000), (0x4000, 0x5000)]);
    }

    #[test]
    fn merges_that_are_cut_short_come_to_all_equally_often() {
        for each in 1..4 {
            let mut seen = [0; 6];
            let mut cursor = 0;
            for merge in 0..60 {
                // What is known of pages changes from merge to merge, and with that where chunks begin.
                let found: Vec<Candidates> =
                    (0..6).map(|at| candidates(at * 0x4000 + merge % 2 * 0x1000, (at + 1) * 0x4000, false)).collect();
                let chunks = in_turn(&found, cursor, 0x4000);
                chunks[..each].iter().for_each(|chunk| seen[chunk.range.start as usize / 0x4000] += 1);
                cursor = chunks[each].range.start;
            }
            assert_eq!(seen, [10 * each; 6]);
        }
    }

    #[test]
    fn short_runs_are_mapped_by_one_thread() {
        let pages: Vec<Page> = (0..64).map(|at| Page::new(at * 4096, false)).collect();
        let threads = |each: usize| {
            let runs: Vec<Run<'_>> = pages.chunks(each).map(|pages| Run { pages, slot: 0 }).collect();
            mapping_threads(2, &runs)
        };
        assert_eq!([1, 4, 15, 16, 64].map(threads), [1, 1, 1, 2, 2]);
        assert_eq!(mapping_threads(1, &[Run { pages: &pages, slot: 0 }]), 1);
    }

    #[test]
    fn the_first_is_done_when_there_is_no_time_at_all() {
        let over = Some(Instant::now());
        for threads in [1, 2] {
            assert_eq!(parallel_until(over, threads, &[3, 4, 5], |&item| item), [Some(3), None, None]);
            assert_eq!(parallel_until(None, threads, &[3, 4], |&item| item), [Some(3), Some(4)]);
        }
    }
}
