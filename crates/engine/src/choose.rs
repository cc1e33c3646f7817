//! Deciding: which runs of pages that have a partner are worth a mapping of their own, and mapping them.

use crate::domain::Domain;
use crate::memory::{self, Incoming};
use crate::stillness::Stillness;
use pagefold_base::savings::Costs;
use pagefold_base::segment::{Prices, Stretch, best_ranges_within};
use pagefold_base::{AddressRange, PageSize};
use pagefold_sys::fault;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

/// A hole that no range bridges.
const APART: i64 = i64::MAX;

/// A page that was looked at.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub address: u64,
    /// Whether it is a part of a huge page.
    pub huge: bool,
    /// What is noted of its content, unless that is zeros.
    pub content: u16,
    /// Its content in the index, unless that is zeros.
    pub entry: usize,
}

impl Page {
    /// One of which nothing else is known yet.
    pub fn new(address: u64, huge: bool) -> Self {
        Self { address, huge, content: 0, entry: 0 }
    }
}

/// Where a content lies, or is to lie: one behind another if the numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Slot(u32),
    /// In the order in which contents are to be stored.
    Next(u32),
}

impl Place {
    /// Whether it lies right behind another.
    pub fn follows(self, other: Self) -> bool {
        match (other, self) {
            (Self::Slot(before), Self::Slot(slot)) => before + 1 == slot,
            (Self::Next(before), Self::Next(order)) => before + 1 == order,
            _ => false,
        }
    }
}

/// Pages one behind another, to be mapped as one.
#[derive(Clone, Copy, Debug)]
pub struct Run<'p> {
    pub pages: &'p [Page],
    pub slot: u32,
}

impl Run<'_> {
    /// Where it is.
    pub fn range(&self, page: u64) -> AddressRange {
        let start = self.pages[0].address;
        AddressRange { start, end: start + self.pages.len() as u64 * page }
    }

    /// Whether another lies right behind it, in memory and in the store: the kernel makes one mapping of both.
    pub fn adjoins(&self, next: &Self, page: u64) -> bool {
        self.range(page).end == next.range(page).start && self.slot + self.pages.len() as u32 == next.slot
    }
}

/// The number of the huge page that an address lies in: one entry of a page directory, which maps as many pages as a
/// page holds entries of eight bytes.
pub fn huge_page(address: u64, page: u64) -> u64 {
    address / (page * page / 8)
}

/// The runs that are worth it, at most so many, as ranges of positions among some pages. `follows` says whether one of
/// them can be mapped as one with the one before, which lies right before it; `worth` what a page gives back, `None` if it
/// is not to be merged. Huge pages that are split already have nothing to lose.
pub fn choose(
    pages: &[Page],
    follows: impl Fn(usize) -> bool,
    worth: impl Fn(usize) -> Option<i64>,
    split: &HashSet<u64>,
    page: u64,
    at_most: usize,
) -> Vec<Range<usize>> {
    let Some(size) = PageSize::new(page) else { return Vec::new() };
    let costs = Costs::of(size);
    let mut stretches: Vec<Stretch> = Vec::new();
    for (at, found) in pages.iter().enumerate() {
        let huge = found.huge.then(|| huge_page(found.address, page)).filter(|huge| !split.contains(huge));
        let worth = worth(at);
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
pub fn places(domain: &Domain, pages: &[Page]) -> (Vec<Page>, Vec<Place>, u32) {
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

/// What was chosen, as runs of so many pages at most that lie one behind another in the store, too.
pub fn runs<'p>(
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

/// The first of some runs, as many as the kernel makes so many mappings of; how many those are.
pub fn within<'r, 'p>(runs: &'r [Run<'p>], room: usize, page: u64) -> (&'r [Run<'p>], usize) {
    let as_one = || runs.chunk_by(|run, next| run.adjoins(next, page)).take(room);
    (&runs[..as_one().map(<[Run]>::len).sum()], as_one().count())
}

/// Map a run from the store, if that holds what the run does.
pub fn map(domain: &Domain, run: &Run<'_>, stillness: &Stillness<'_>) -> io::Result<bool> {
    let range = run.range(domain.page());
    let slots = run.slot..run.slot + run.pages.len() as u32;
    // In this order: see `domain`.
    domain.references.add(slots.clone())?;
    let lies = |(page, slot): (&Page, u32)| domain.index.state(page.entry).slot() == Some(slot);
    if !domain.is_present() || !domain.store.is_open() || !run.pages.iter().zip(slots).all(lies) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_become_one_mapping_take_the_room_of_one() {
        const PAGE: u64 = 4096;
        let pages = [0, 1, 2, 3, 4, 6].map(|at| Page::new(at * PAGE, false));
        // The second lies behind the first in memory and in the store, the third in memory alone, the last in neither.
        let parts = [(0..2, 10), (2..3, 12), (3..5, 20), (5..6, 22)];
        let runs = parts.map(|(part, slot)| Run { pages: &pages[part], slot });
        let taken = |room: usize| {
            let (taken, mappings) = within(&runs, room, PAGE);
            (taken.len(), mappings)
        };
        assert_eq!([0, 1, 2, 3, 9].map(taken), [(0, 0), (2, 1), (3, 2), (4, 3), (4, 3)]);
    }
}
