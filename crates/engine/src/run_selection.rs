//! Selection of the runs of pages with a partner whose mapping is profitable, and mapping of these runs.

use crate::domain::JoinedDomain;
use crate::huge_page_split::SplittableHugePages;
use crate::memory::{self, ReplacementMemory};
use crate::write_exclusion::WriteExclusion;
use pagefold_base::range_optimizer::{PageSegment, RangeCosts, best_ranges_within};
use pagefold_base::savings::EnrollCostBytes;
use pagefold_base::{AddressRange, PageSize};
use pagefold_sys::fault;
use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;

/// A hole that no range bridges.
const UNBRIDGEABLE_HOLE: i64 = i64::MAX;

/// A page that was scanned.
#[derive(Clone, Copy, Debug)]
pub struct ScannedPage {
    pub address: u64,
    /// Whether it is part of a huge page.
    pub huge: bool,
    /// Bits noted of its content, unless that is zeros.
    pub content_bits: u16,
    /// Entry of its content in the index, unless that is zeros.
    pub index_entry: usize,
}

impl ScannedPage {
    /// A page that was not scanned yet.
    pub fn unscanned(address: u64, huge: bool) -> Self {
        Self { address, huge, content_bits: 0, index_entry: 0 }
    }
}

/// Slot of a content, or its position in the order of contents to store. Consecutive numbers are adjacent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotPlacement {
    Stored(u32),
    /// Position in the order in which contents are to be stored.
    ToStore(u32),
}

impl SlotPlacement {
    /// Whether it directly follows another placement.
    pub fn is_adjacent_after(self, other: Self) -> bool {
        match (other, self) {
            (Self::Stored(previous), Self::Stored(slot)) => previous + 1 == slot,
            (Self::ToStore(previous), Self::ToStore(order)) => previous + 1 == order,
            _ => false,
        }
    }
}

/// Adjacent pages, to be mapped as one.
#[derive(Clone, Copy, Debug)]
pub struct StoreRun<'p> {
    pub pages: &'p [ScannedPage],
    pub first_slot: u32,
}

impl StoreRun<'_> {
    /// Its address range.
    pub fn range(&self, page_bytes: u64) -> AddressRange {
        let start = self.pages[0].address;
        AddressRange { start, end: start + self.pages.len() as u64 * page_bytes }
    }

    /// Whether `next` directly follows in memory and in the store: the kernel joins the mappings of both.
    pub fn adjoins(&self, next: &Self, page_bytes: u64) -> bool {
        self.range(page_bytes).end == next.range(page_bytes).start
            && self.first_slot + self.pages.len() as u32 == next.first_slot
    }
}

/// Number of the huge page that contains an address. A huge page is one entry of a page directory, and has as many
/// pages as a page has entries of eight bytes.
pub fn huge_page_number(address: u64, page_bytes: u64) -> u64 {
    address / (page_bytes * page_bytes / 8)
}

/// Choose at most `max_runs` profitable runs, as ranges of indexes into `pages`. `joins_previous` returns whether a
/// page can be in one mapping with the page directly before it. `net_gain` is the memory saved by merging a page, or
/// `None` if it must not be merged. Huge pages in `already_split` are split already, so splitting costs nothing.
pub fn choose_runs(
    pages: &[ScannedPage],
    joins_previous: impl Fn(usize) -> bool,
    net_gain: impl Fn(usize) -> Option<i64>,
    already_split: &HashSet<u64>,
    page_bytes: u64,
    max_runs: usize,
) -> Vec<Range<usize>> {
    let Some(page_size) = PageSize::new(page_bytes) else { return Vec::new() };
    let costs = EnrollCostBytes::for_page_size(page_size);
    let mut segments: Vec<PageSegment> = Vec::new();
    for (index, page) in pages.iter().enumerate() {
        let huge_page = page
            .huge
            .then(|| huge_page_number(page.address, page_bytes))
            .filter(|huge_page| !already_split.contains(huge_page));
        let gain = net_gain(index);
        let is_adjacent = index > 0 && pages[index - 1].address + page_bytes == page.address && joins_previous(index);
        match segments.last_mut() {
            Some(last) if is_adjacent && last.huge_page == huge_page && last.net_gain == gain => last.pages += 1,
            _ => {
                let hole_cost = if is_adjacent { 0 } else { UNBRIDGEABLE_HOLE };
                segments.push(PageSegment { pages: 1, net_gain: gain, merges: true, huge_page, hole_cost });
            }
        }
    }
    let range_costs = RangeCosts { per_range: costs.per_range, per_split_huge_page: costs.per_split_huge_page };
    let chosen = best_ranges_within(1, |_| segments.iter().copied(), range_costs, max_runs);
    chosen.into_iter().flatten().map(|range| range.start as usize..range.end as usize).collect()
}

/// Pages that have a partner.
#[derive(Debug, Default)]
pub struct PartnerPages {
    pub pages: Vec<ScannedPage>,
    /// The placement of each page.
    pub placements: Vec<SlotPlacement>,
    /// Number of contents to store.
    pub content_count: u32,
}

/// The pages that have a partner.
pub fn find_partners(domain: &JoinedDomain, pages: &[ScannedPage]) -> PartnerPages {
    let mut orders: HashMap<usize, u32> = HashMap::new();
    let mut partners = PartnerPages::default();
    for &page in pages {
        let state = domain.index.state(page.index_entry);
        let placement = match state.mappable_slot() {
            Some(slot) => SlotPlacement::Stored(slot),
            None if state.is_condemned() || !state.is_paired() => continue,
            None => {
                let order = orders.len() as u32;
                SlotPlacement::ToStore(*orders.entry(page.index_entry).or_insert(order))
            }
        };
        partners.pages.push(page);
        partners.placements.push(placement);
    }
    partners.content_count = orders.len() as u32;
    partners
}

impl PartnerPages {
    /// Choose the profitable runs, as ranges of indexes, within `mapping_headroom` mappings. Huge pages in
    /// `already_split` are split already.
    pub fn choose_runs(
        &self,
        splittable: &SplittableHugePages,
        already_split: &HashSet<u64>,
        page_bytes: u64,
        mapping_headroom: usize,
    ) -> Vec<Range<usize>> {
        let joins_previous = |index: usize| self.placements[index].is_adjacent_after(self.placements[index - 1]);
        // Each of two pages that share a content to be stored saves half of it.
        let savings = |index: usize| match self.placements[index] {
            SlotPlacement::Stored(_) => page_bytes as i64,
            SlotPlacement::ToStore(_) => page_bytes as i64 / 2,
        };
        let net_gain = |index: usize| splittable.allows(&self.pages[index], page_bytes).then(|| savings(index));
        choose_runs(&self.pages, joins_previous, net_gain, already_split, page_bytes, mapping_headroom)
    }

    /// Split the chosen ranges into runs of at most `max_pages` pages that are adjacent in the store, too.
    pub fn build_runs(
        &self,
        chosen: &[Range<usize>],
        stored_slots: &[Option<u32>],
        max_pages: usize,
    ) -> Vec<StoreRun<'_>> {
        let slot_at = |index: usize| match self.placements[index] {
            SlotPlacement::Stored(slot) => Some(slot),
            SlotPlacement::ToStore(order) => stored_slots[order as usize],
        };
        let mut runs = Vec::new();
        for range in chosen {
            let mut start = range.start;
            for index in range.clone() {
                let is_run_end = index + 1 == range.end
                    || slot_at(index + 1) != slot_at(index).map(|slot| slot + 1)
                    || index - start + 1 >= max_pages;
                if is_run_end {
                    runs.extend(
                        slot_at(start).map(|slot| StoreRun { pages: &self.pages[start..=index], first_slot: slot }),
                    );
                    start = index + 1;
                }
            }
        }
        runs
    }
}

/// The longest prefix of runs for which the kernel creates at most `max_mappings` mappings. Also returns the number of
/// mappings.
pub fn take_runs_that_fit<'r, 'p>(
    runs: &'r [StoreRun<'p>],
    max_mappings: usize,
    page_bytes: u64,
) -> (&'r [StoreRun<'p>], usize) {
    let mappings = || runs.chunk_by(|run, next| run.adjoins(next, page_bytes)).take(max_mappings);
    (&runs[..mappings().map(<[StoreRun]>::len).sum()], mappings().count())
}

/// Map a run from the store, if the store has the same content.
pub fn map_run(domain: &JoinedDomain, run: &StoreRun<'_>, exclusion: &WriteExclusion<'_>) -> io::Result<bool> {
    let range = run.range(domain.page_bytes());
    let slots = run.first_slot..run.first_slot + run.pages.len() as u32;
    // The order matters: see `domain`.
    domain.references.add(slots.clone())?;
    let is_stored =
        |(page, slot): (&ScannedPage, u32)| domain.index.state(page.index_entry).mappable_slot() == Some(slot);
    if !domain.has_present_index() || !domain.store.is_descriptor_valid() || !run.pages.iter().zip(slots).all(is_stored)
    {
        return Ok(false);
    }
    fault::point("between referring and mapping");
    let replacement = ReplacementMemory::map_store(&domain.store, run.first_slot, range.bytes().0)?;
    let _frozen = exclusion.freeze_to_replace(range)?;
    // SAFETY: the run was scanned, so it is resident, and no thread writes to or unmaps it meanwhile.
    if replacement.as_slice() != unsafe { memory::range_bytes(range) } {
        return Ok(false);
    }
    // SAFETY: both have the same content, and no thread writes to the run until this returns.
    unsafe { replacement.replace_at(range.start) }?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjoining_runs_count_as_one_mapping() {
        const PAGE_BYTES: u64 = 4096;
        let pages = [0, 1, 2, 3, 4, 6].map(|number| ScannedPage::unscanned(number * PAGE_BYTES, false));
        // The second run follows the first in memory and in the store, the third only in memory, the last in neither.
        let parts = [(0..2, 10), (2..3, 12), (3..5, 20), (5..6, 22)];
        let runs = parts.map(|(part, slot)| StoreRun { pages: &pages[part], first_slot: slot });
        let take_counts = |max_mappings: usize| {
            let (taken_runs, mappings) = take_runs_that_fit(&runs, max_mappings, PAGE_BYTES);
            (taken_runs.len(), mappings)
        };
        assert_eq!([0, 1, 2, 3, 9].map(take_counts), [(0, 0), (2, 1), (3, 2), (4, 3), (4, 3)]);
    }
}
