//! Memory that may be merged, and the notes on its pages.

use crate::PageAdvice;
use crate::decide::page_note::PageNote;
use crate::domain::JoinedDomain;
use crate::own_mappings::{self, OwnMappingKind};
use pagefold_base::engine::{PageTally, RegionTally};
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::pagemap;
use std::fs::File;
use std::io;
use std::time::Duration;

/// Memory that may be merged.
#[derive(Debug)]
pub struct AdoptedRegion {
    range: AddressRange,
    page_bytes: u64,
    notes: Vec<PageNote>,
    unmergeable: Vec<AddressRange>,
    /// Time of the last survey of this region.
    last_survey: Option<Duration>,
    /// Page counts as of the last survey or status query.
    last_tally: PageTally,
}

impl AdoptedRegion {
    /// Create a region for a page-aligned range.
    pub fn new(range: AddressRange, page_bytes: u64) -> Self {
        let pages = range.bytes().0 / page_bytes;
        let tally = PageTally { pages: Pages(pages), ..PageTally::default() };
        let notes = vec![PageNote::default(); pages as usize];
        Self { range, page_bytes, notes, unmergeable: Vec::new(), last_survey: None, last_tally: tally }
    }

    /// Its address range.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// The region without a range: up to two regions remain.
    pub fn subtract(&self, range: AddressRange) -> Vec<Self> {
        let build_subregion = |remaining: AddressRange| {
            let notes = self.range_notes(remaining.start, remaining.end).to_vec();
            let unmergeable = self.unmergeable.iter().filter_map(|range| range.overlap(remaining)).collect();
            Self { notes, unmergeable, last_survey: self.last_survey, ..Self::new(remaining, self.page_bytes) }
        };
        self.range.subtract(&[range]).into_iter().map(build_subregion).collect()
    }

    /// Apply new advice to a range.
    pub fn advise(&mut self, range: AddressRange, advice: PageAdvice, now: Duration) {
        let Some(range) = self.range.overlap(range) else { return };
        let mut unmergeable: Vec<AddressRange> =
            self.unmergeable.iter().flat_map(|previous| previous.subtract(&[range])).collect();
        if advice == PageAdvice::Unmergeable {
            unmergeable.push(range);
        }
        self.unmergeable = AddressRange::union(unmergeable);
        let notes = self.range_notes_mut(range).iter_mut();
        match advice {
            PageAdvice::Mergeable => notes.for_each(PageNote::advise_mergeable),
            PageAdvice::Rewritten => notes.for_each(|note| note.advise_rewritten(now)),
            PageAdvice::Unmergeable => {}
        }
    }

    /// Discard the notes on pages whose content was dropped.
    pub fn forget_pages(&mut self, range: AddressRange) {
        let Some(range) = self.range.overlap(range) else { return };
        self.range_notes_mut(range).fill(PageNote::default());
    }

    /// Record a survey at `now`. Returns the time of the previous one.
    pub fn record_survey(&mut self, now: Duration) -> Option<Duration> {
        self.last_survey.replace(now)
    }

    /// Bytes in a range that no merge has surveyed yet.
    pub fn unsurveyed_bytes(&self, range: AddressRange) -> Bytes {
        let part = self.range.overlap(range).filter(|_| self.last_survey.is_none());
        part.map_or(Bytes::ZERO, |part| part.bytes())
    }

    /// Ranges with the advice [`PageAdvice::Unmergeable`].
    pub fn unmergeable(&self) -> &[AddressRange] {
        &self.unmergeable
    }

    /// Page counts as of the last merge or status query.
    pub fn region_tally(&self) -> RegionTally {
        RegionTally { range: self.range, tally: self.last_tally }
    }

    /// Memory used for the notes on its pages.
    pub fn note_bytes(&self) -> Bytes {
        Bytes(size_of_val(&self.notes[..]) as u64)
    }

    /// The note on a page.
    pub fn page_note(&mut self, address: u64) -> &mut PageNote {
        let index = self.note_index(address);
        &mut self.notes[index]
    }

    fn note_index(&self, address: u64) -> usize {
        ((address - self.range.start) / self.page_bytes) as usize
    }

    fn range_notes(&self, start: u64, end: u64) -> &[PageNote] {
        &self.notes[self.note_index(start)..self.note_index(end)]
    }

    fn range_notes_mut(&mut self, range: AddressRange) -> &mut [PageNote] {
        let pages = self.note_index(range.start)..self.note_index(range.end);
        &mut self.notes[pages]
    }

    /// Record that a range was merged now, and add it to `counter`. Returns how many of its pages are not expected to
    /// last.
    pub fn record_merge(
        &mut self,
        range: AddressRange,
        now: Duration,
        counter: fn(&mut PageTally) -> &mut Pages,
    ) -> Pages {
        *counter(&mut self.last_tally) += Pages(range.bytes().0 / self.page_bytes);
        let notes = self.range_notes_mut(range);
        notes.iter_mut().for_each(|note| note.record_merge(now));
        Pages(notes.iter().filter(|note| note.is_unlikely_to_last()).count() as u64)
    }

    /// Reset the page counts before a survey.
    pub fn reset_tally(&mut self) {
        self.last_tally = PageTally { pages: self.last_tally.pages, ..PageTally::default() };
    }

    /// Count the pages of a range; `mapped` lists its mapped pages.
    pub fn tally_range(
        &mut self,
        range: AddressRange,
        kind: OwnMappingKind,
        mapped: &[pagemap::MappedRange],
        now: Duration,
    ) {
        let count_merged = |notes: &[PageNote]| Pages(notes.iter().filter(|note| note.is_merged()).count() as u64);
        let count_rewritten =
            |notes: &[PageNote]| Pages(notes.iter().filter(|note| note.is_rewritten(now)).count() as u64);
        // Private pages of the program in the range, with their notes.
        let private_ranges = || {
            let private_ranges = mapped.iter().filter(|mapped| !mapped.file && !mapped.zero_page);
            private_ranges.map(|mapped| (mapped, self.range_notes(mapped.start, mapped.end)))
        };
        let rewritten_pages: Pages = private_ranges().map(|(_, notes)| count_rewritten(notes)).sum();
        match kind {
            OwnMappingKind::Stored { .. } => {
                let private_bytes: u64 = private_ranges().map(|(mapped, _)| mapped.end - mapped.start).sum();
                self.last_tally.merged += Pages((range.bytes().0 - private_bytes) / self.page_bytes);
            }
            OwnMappingKind::Ordinary => {
                let private_pages: Pages = private_ranges().map(|(_, notes)| count_merged(notes)).sum();
                self.last_tally.zeros += count_merged(self.range_notes(range.start, range.end)) - private_pages;
            }
        }
        self.last_tally.rewritten_pages += rewritten_pages;
    }
}

/// Tally all regions. Returns the number of mappings of this process.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps` and `pagemap`.
pub fn tally_regions(domain: &JoinedDomain, regions: &mut [AdoptedRegion], now: Duration) -> io::Result<u64> {
    let (mappings, mapping_count) = own_mappings::read_own_mappings(domain.store.identity(), domain.page_bytes())?;
    let pagemap = File::open("/proc/thread-self/pagemap")?;
    for region in regions {
        region.reset_tally();
        let first = mappings.partition_point(|mapping| mapping.range.end <= region.range.start);
        for mapping in &mappings[first..] {
            let Some(range) = mapping.range.overlap(region.range) else { break };
            let mut mapped_ranges = Vec::new();
            pagemap::scan_mapped(&pagemap, range.start..range.end, mapping.kind.range_contents(), |page_range| {
                mapped_ranges.push(page_range)
            })?;
            region.tally_range(range, mapping.kind, &mapped_ranges, now);
        }
    }
    Ok(mapping_count)
}
