//! Finding out what there is: the first step of a merge, from page tables alone; and healing, which follows from it.

use crate::choose::{Page, huge_page};
use crate::decide::hot::Note;
use crate::domain::Domain;
use crate::layout::{self, Kind};
use crate::memory::Incoming;
use crate::region::Region;
use crate::statistics::Merged;
use crate::stillness::Stillness;
use pagefold_base::lasting::must_last;
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::pagemap;
use std::io;
use std::time::{Duration, Instant};

/// Of the mappings that a process may have (`vm.max_map_count`), so many of 8 may be there after a merge.
const MAPPINGS: u64 = 6;

/// `vm.max_map_count` where it cannot be read (include/linux/mm.h, DEFAULT_MAX_MAP_COUNT).
const MAX_MAP_COUNT: u64 = 65_530;

/// The most merges that copying a former store is spread over, where memory and time are plenty.
const MERGES_TO_DRAIN: u64 = 16;

/// What a survey found.
#[derive(Debug, Default)]
pub struct Survey {
    /// Parts of regions, each within one mapping, that may hold anything of the following.
    pub parts: Vec<AddressRange>,
    /// Resident ordinary memory that may be looked at, ascending.
    pub candidates: Vec<Candidates>,
    /// What was merged and written since, mapped as merging maps it.
    pub broken: Vec<AddressRange>,
    /// Resident pages of a former store, mapped as merging maps it.
    pub former: Vec<AddressRange>,
    /// Pages of this process that map the store, of regions or not.
    pub stored: u64,
    /// Mappings of this process.
    pub mappings: u64,
}

/// Pages that may be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidates {
    pub range: AddressRange,
    /// Whether they are a part of huge pages.
    pub huge: bool,
    /// Whether nothing is known of them.
    pub new: bool,
}

impl Candidates {
    /// Whether others of the same kind lie right behind.
    fn precedes(&self, other: &Self) -> bool {
        self.range.end == other.range.start && (self.huge, self.new) == (other.huge, other.new)
    }

    /// Whether what lies behind is worth something only together with these: right behind, or in the same huge page,
    /// which is split once.
    pub fn is_bound_to(&self, next: &Self, page: u64) -> bool {
        let same = || huge_page(self.range.end - page, page) == huge_page(next.range.start, page);
        self.range.end == next.range.start || self.huge && next.huge && same()
    }

    /// The first page of these.
    pub fn first(&self) -> Page {
        Page::new(self.range.start, self.huge)
    }

    /// The same, cut at the multiples of so many bytes.
    pub fn pieces(self, bytes: u64) -> impl Iterator<Item = Self> {
        self.range.cut_at_multiples(bytes).map(move |range| Self { range, ..self })
    }

    /// Put them behind others, with which they may be one.
    pub fn join(self, others: &mut Vec<Self>) {
        match others.last_mut() {
            Some(last) if last.precedes(&self) => last.range.end = self.range.end,
            _ => others.push(self),
        }
    }
}

impl Survey {
    /// Pages of which nothing is known yet.
    pub fn new_pages(&self, page: u64) -> Pages {
        Pages(self.candidates.iter().filter(|found| found.new).map(|found| found.range.bytes().0 / page).sum())
    }

    /// Find out what there is; regions are put in the order of their addresses. Pages that the kernel is moving are
    /// waited for, so long in all.
    ///
    /// # Errors
    /// Those of reading `/proc/thread-self/maps` and `pagemap`.
    pub fn of(
        regions: &mut [Region],
        domain: &Domain,
        (now, patience): (Duration, Duration),
        merged: &mut Merged,
    ) -> io::Result<Self> {
        let page = domain.page();
        let (parts, mappings) = layout::own(domain.store.identity(), page)?;
        let mut pagemap = pagemap::Own::open(patience)?;
        let must_last = must_last(page);
        let stored = parts.iter().filter(|part| part.kind.has_slots()).map(|part| part.range.bytes().0 / page).sum();
        let mut survey = Self { mappings, stored, ..Self::default() };
        regions.sort_by_key(|region| region.range().start);
        for region in regions {
            let look = Look { now, before: region.surveyed(now).unwrap_or(now), must_last };
            region.tally_anew();
            let first = parts.partition_point(|part| part.range.end <= region.range().start);
            for part in &parts[first..] {
                let Some(whole) = part.range.overlap(region.range()) else { break };
                survey.parts.push(whole);
                let found = pagemap.mapped(whole.start..whole.end, part.kind.holds())?;
                for mapped in &found {
                    let range = AddressRange { start: mapped.start, end: mapped.end };
                    let addresses = (range.start..range.end).step_by(page as usize);
                    match part.kind {
                        // What was swapped out is not brought back for this; guard regions look like it.
                        Kind::Stored { .. } if mapped.swapped => {}
                        Kind::Stored { slot: None, plain: true } if mapped.file => survey.former.push(range),
                        Kind::Stored { .. } if mapped.file => {}
                        Kind::Stored { plain, .. } => {
                            for address in addresses {
                                // What cannot be healed is found each time, and was broken once.
                                note_written(region.note(address), look, merged);
                            }
                            if plain {
                                survey.broken.push(range);
                            }
                        }
                        Kind::Ordinary if mapped.file || mapped.swapped => {}
                        Kind::Ordinary if mapped.zero => {
                            // One fault for each huge page of zeros.
                            let fault = |address| if mapped.huge { huge_page(address, page) } else { address };
                            let read = addresses.filter(|&address| region.note(address).read()).map(fault);
                            let mut read: Vec<u64> = read.collect();
                            read.dedup();
                            merged.read += Pages(read.len() as u64);
                        }
                        Kind::Ordinary => {
                            for address in addresses {
                                let note = region.note(address);
                                // If it was given back as zeros.
                                note_written(note, look, merged);
                                if !note.may_merge(now) {
                                    merged.left_alone += Pages(1);
                                    continue;
                                }
                                let range = AddressRange { start: address, end: address + page };
                                let found = Candidates { range, huge: mapped.huge, new: note.is_new() };
                                found.join(&mut survey.candidates);
                            }
                        }
                    }
                }
                region.tally(whole, part.kind, &found, now);
            }
            let allowed = |&found: &Candidates| {
                found.range.outside(region.unmergeable()).into_iter().map(move |range| Candidates { range, ..found })
            };
            if !region.unmergeable().is_empty() {
                survey.candidates = survey.candidates.iter().flat_map(allowed).collect();
            }
        }
        Ok(survey)
    }

    /// Leave out what writers cannot be kept from. Whole parts are registered, so that no mapping is split more than
    /// regions split it.
    pub fn enforce(&mut self, stillness: &Stillness<'_>, merged: &mut Merged, page: u64) {
        let Some(power) = stillness.userfault() else { return };
        let refused: Vec<AddressRange> =
            self.parts.iter().copied().filter(|part| power.register(part.start..part.end).is_err()).collect();
        let mut can = |range: AddressRange| {
            let can = !refused.iter().any(|part| part.overlap(range).is_some());
            merged.failed += Pages(if can { 0 } else { range.bytes().0 / page });
            can
        };
        self.broken.retain(|&range| can(range));
        self.former.retain(|&range| can(range));
        self.candidates.retain(|found| can(found.range));
    }

    /// Copy pages that were written since they were merged into ordinary memory, at most `most_pages` of them at a time:
    /// the copy and the original both take memory until one replaces the other. Each `most_pages` of them need leave of
    /// `may_take`. The first one that is refused ends it, and so does the deadline, but for the first piece. Returns what
    /// was copied, and whether that ended it; what there are too many mappings for stays as it is, too.
    pub fn heal(
        &self,
        stillness: &Stillness<'_>,
        (page, most_pages): (u64, u64),
        deadline: Option<Instant>,
        may_take: impl FnMut(Bytes) -> bool,
    ) -> (Vec<AddressRange>, bool) {
        let all = self.broken.iter().map(|range| range.bytes().0 / page).sum();
        let mut leave = Leave { page, most_pages, left: all, granted: 0, may_take };
        let (mut is_first, mut is_ended) = (true, false);
        let mut goes_on = |piece: &AddressRange| {
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            is_ended = !std::mem::take(&mut is_first) && is_over || !leave.covers(piece);
            !is_ended
        };
        let pieces = self.broken.iter().flat_map(|&range| pieces(range, stillness, page, most_pages));
        let taken = pieces.take(self.room(0)).take_while(|piece| goes_on(piece));
        let healed = taken.filter(|piece| make_ordinary(*piece, stillness)).collect();
        (healed, is_ended)
    }

    /// Copy pages of a former store into ordinary memory, which is what frees that store: a part of them at each merge, so
    /// that they merge anew meanwhile. Each `most_pages` of them need leave of `may_take`. Returns what was copied; there
    /// were so many mappings more before.
    pub fn drain(
        &self,
        stillness: &Stillness<'_>,
        (page, most_pages): (u64, u64),
        made: usize,
        may_take: impl FnMut(Bytes) -> bool,
    ) -> Vec<AddressRange> {
        let all: u64 = self.former.iter().map(|range| range.bytes().0 / page).sum();
        let left = most_pages.max(all / MERGES_TO_DRAIN);
        let mut leave = Leave { page, most_pages, left, granted: 0, may_take };
        let pieces = self.former.iter().flat_map(|&range| pieces(range, stillness, page, most_pages));
        let taken = pieces.take(self.room(made)).take_while(|piece| leave.covers(piece));
        taken.filter(|piece| make_ordinary(*piece, stillness)).collect()
    }

    /// For how many mappings in the midst of others there is room, once so many were.
    pub fn room(&self, made: usize) -> usize {
        let most = max_map_count() / 8 * MAPPINGS;
        (most.saturating_sub(self.mappings + 2 * made as u64) / 2) as usize
    }
}

/// Leave to copy pages, which is asked for as many of them as may be copied at once: finding out whether there is memory
/// takes longer than copying a page.
struct Leave<F> {
    page: u64,
    most_pages: u64,
    /// Pages that may be copied yet, and those of them for which there is leave.
    left: u64,
    granted: u64,
    may_take: F,
}

impl<F: FnMut(Bytes) -> bool> Leave<F> {
    /// Whether it is for a piece, too.
    fn covers(&mut self, piece: &AddressRange) -> bool {
        let pages = piece.bytes().0 / self.page;
        if pages > self.left {
            return false;
        }
        if pages > self.granted {
            self.granted = self.most_pages.min(self.left);
            if !(self.may_take)(Bytes(self.granted * self.page)) {
                return false;
            }
        }
        (self.left, self.granted) = (self.left - pages, self.granted - pages);
        true
    }
}

/// A range in pieces of at most so many pages, each of which is copied at once.
fn pieces(
    range: AddressRange,
    stillness: &Stillness<'_>,
    page: u64,
    most_pages: u64,
) -> impl Iterator<Item = AddressRange> + use<> {
    let bytes = page.saturating_mul(most_pages.max(1));
    stillness.parts(range, page).flat_map(move |part| part.cut_at_multiples(bytes))
}

/// Put a copy in ordinary memory in the place of a range that maps a store; whether that was done.
fn make_ordinary(range: AddressRange, stillness: &Stillness<'_>) -> bool {
    let Ok(_still) = stillness.of(range) else { return false };
    // SAFETY: the survey found it mapped, to be read and written, and nothing writes to or unmaps it meanwhile.
    let copy = unsafe { Incoming::copy_of(range) };
    // SAFETY: what takes its place is private memory with the same content.
    copy.and_then(|copy| unsafe { copy.take_place_at(range.start) }).is_ok()
}

/// When a region is looked at, and was before, and for how long what is merged must last.
#[derive(Clone, Copy)]
struct Look {
    now: Duration,
    before: Duration,
    must_last: Duration,
}

/// Note and count a page that was found written, if it was merged.
fn note_written(note: &mut Note, Look { now, before, must_last }: Look, merged: &mut Merged) {
    if note.is_merged() {
        let doubtful = note.is_doubtful();
        let short_lived = note.broken(now, before, must_last);
        merged.broken += Pages(1);
        merged.short_lived += Pages(u64::from(short_lived && !doubtful));
    }
}

/// All addresses.
pub const EVERYWHERE: AddressRange = AddressRange { start: 0, end: u64::MAX };

/// All slots that this process maps within a range, whoever mapped them. What is moved meanwhile may be missed.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps`.
pub fn slots_mapped(domain: &Domain, within: AddressRange) -> io::Result<impl Iterator<Item = u32> + use<>> {
    let page = domain.page();
    let (parts, _) = layout::own(domain.store.identity(), page)?;
    Ok(parts.into_iter().flat_map(move |part| match (part.kind, part.range.overlap(within)) {
        (Kind::Stored { slot: Some(slot), .. }, Some(range)) => {
            let first = slot + ((range.start - part.range.start) / page) as u32;
            first..first + (range.bytes().0 / page) as u32
        }
        _ => 0..0,
    }))
}

/// `vm.max_map_count`.
fn max_map_count() -> u64 {
    let read = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    read.and_then(|text| text.trim().parse().ok()).unwrap_or(MAX_MAP_COUNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Pages of this number and up to that, of a huge page or not.
    fn pages(start: u64, end: u64, huge: bool) -> Candidates {
        Candidates { range: AddressRange { start: start * PAGE, end: end * PAGE }, huge, new: false }
    }

    /// Heal every second one of so many pages, with leave for so many bytes of memory once for each answer; the pages that
    /// were copied, whether it was ended, and what was asked for.
    fn heal(count: u64, most_pages: u64, deadline: Option<Instant>, answers: &[bool]) -> (usize, bool, Vec<u64>) {
        let page = rustix::param::page_size() as u64;
        let memory = crate::memory::reserve(count * page).expect("memory");
        let broken = memory.cut_at_multiples(page).step_by(2).collect();
        let survey = Survey { broken, ..Survey::default() };
        let claims = crate::claims::Claims::default();
        let mut asked = Vec::new();
        let (healed, is_ended) = survey.heal(&Stillness::promised(&claims), (page, most_pages), deadline, |needed| {
            asked.push(needed.0 / page);
            answers[asked.len() - 1]
        });
        // SAFETY: it was made above, and nothing borrows it.
        unsafe { crate::memory::release(memory) }.expect("its own");
        (healed.len(), is_ended, asked)
    }

    #[test]
    fn healing_asks_for_the_memory_of_many_pages_at_a_time() {
        assert_eq!(heal(80, 16, None, &[true; 3]), (40, false, vec![16, 16, 8]));
    }

    #[test]
    fn healing_ends_at_the_first_refusal() {
        assert_eq!(heal(80, 16, None, &[true, false]), (16, true, vec![16, 16]));
        assert_eq!(heal(80, 16, None, &[false]), (0, true, vec![16]));
    }

    #[test]
    fn healing_ends_at_the_deadline_but_for_the_first_piece() {
        assert_eq!(heal(80, 16, Some(Instant::now()), &[true]), (1, true, vec![16]));
        let later = Instant::now() + Duration::from_secs(3600);
        assert_eq!(heal(80, 40, Some(later), &[true]), (40, false, vec![40]));
    }

    #[test]
    fn what_is_cut_and_joined_is_the_same_again() {
        let all = [pages(3, 9, false), pages(9, 10, true), pages(11, 12, true)];
        for bytes in [PAGE, 4 * PAGE, u64::MAX] {
            let mut joined = Vec::new();
            all.iter().flat_map(|found| found.pieces(bytes)).for_each(|piece| piece.join(&mut joined));
            assert_eq!(joined, all, "those of another kind, or apart, stay so");
        }
        assert_eq!(
            pages(3, 9, false).pieces(4 * PAGE).collect::<Vec<_>>(),
            [pages(3, 4, false), pages(4, 8, false), pages(8, 9, false)]
        );
    }

    #[test]
    fn what_shares_a_huge_page_is_bound_together() {
        let bound = |one: Candidates, next: Candidates| one.is_bound_to(&next, PAGE);
        assert!(bound(pages(0, 4, false), pages(4, 5, true)), "right behind");
        assert!(bound(pages(0, 4, true), pages(511, 512, true)));
        assert!(!bound(pages(0, 4, true), pages(512, 513, true)), "of the next one");
        assert!(bound(pages(0, 513, true), pages(600, 601, true)), "of the last of two");
        assert!(!bound(pages(0, 4, false), pages(8, 9, false)), "of none");
    }
}
