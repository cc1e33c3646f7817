//! Memory that may be merged, and what is known of its pages.

use crate::Advice;
use crate::decide::hot::Note;
use crate::domain::Domain;
use crate::layout::{self, Kind};
use pagefold_base::engine::{RegionTally, Tally};
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::pagemap;
use std::fs::File;
use std::io;
use std::time::Duration;

/// Memory that may be merged.
#[derive(Debug)]
pub struct Region {
    range: AddressRange,
    page: u64,
    notes: Vec<Note>,
    unmergeable: Vec<AddressRange>,
    /// When a merge found out what there is.
    surveyed: Option<Duration>,
    /// How it stood when that was found out last.
    tally: Tally,
}

impl Region {
    /// Of whole pages.
    pub fn new(range: AddressRange, page: u64) -> Self {
        let pages = range.bytes().0 / page;
        let tally = Tally { pages: Pages(pages), ..Tally::default() };
        let notes = vec![Note::default(); pages as usize];
        Self { range, page, notes, unmergeable: Vec::new(), surveyed: None, tally }
    }

    /// Where it is.
    pub fn range(&self) -> AddressRange {
        self.range
    }

    /// What is left of it without a range: up to two of them.
    pub fn without(&self, range: AddressRange) -> Vec<Self> {
        let part = |left: AddressRange| {
            let notes = self.noted(left.start, left.end).to_vec();
            let unmergeable = self.unmergeable.iter().filter_map(|known| known.overlap(left)).collect();
            Self { notes, unmergeable, surveyed: self.surveyed, ..Self::new(left, self.page) }
        };
        self.range.outside(&[range]).into_iter().map(part).collect()
    }

    /// Take a range for something else from now on.
    pub fn advise(&mut self, range: AddressRange, advice: Advice, now: Duration) {
        let Some(range) = self.range.overlap(range) else { return };
        let mut kept: Vec<AddressRange> = self.unmergeable.iter().flat_map(|known| known.outside(&[range])).collect();
        if advice == Advice::Unmergeable {
            kept.push(range);
        }
        self.unmergeable = AddressRange::union(kept);
        let notes = self.noted_mut(range).iter_mut();
        match advice {
            Advice::Mergeable => notes.for_each(Note::forgiven),
            Advice::Hot => notes.for_each(|note| note.advised_hot(now)),
            Advice::Unmergeable => {}
        }
    }

    /// Forget what is known of pages: what was in them is no more.
    pub fn forget(&mut self, range: AddressRange) {
        let Some(range) = self.range.overlap(range) else { return };
        self.noted_mut(range).fill(Note::default());
    }

    /// A merge finds out what there is. When one did before.
    pub fn surveyed(&mut self, now: Duration) -> Option<Duration> {
        self.surveyed.replace(now)
    }

    /// How much of a range no merge has looked for yet.
    pub fn unsurveyed(&self, range: AddressRange) -> Bytes {
        let part = self.range.overlap(range).filter(|_| self.surveyed.is_none());
        part.map_or(Bytes::ZERO, |part| part.bytes())
    }

    /// The parts of it that were advised against.
    pub fn unmergeable(&self) -> &[AddressRange] {
        &self.unmergeable
    }

    /// How it stood when that was found out last: by a merge, or when somebody asked.
    pub fn told(&self) -> RegionTally {
        RegionTally { range: self.range, tally: self.tally }
    }

    /// The memory in which its pages are remembered.
    pub fn notes(&self) -> Bytes {
        Bytes(size_of_val(&self.notes[..]) as u64)
    }

    /// What is known of a page.
    pub fn note(&mut self, address: u64) -> &mut Note {
        let at = self.at(address);
        &mut self.notes[at]
    }

    fn at(&self, address: u64) -> usize {
        ((address - self.range.start) / self.page) as usize
    }

    fn noted(&self, start: u64, end: u64) -> &[Note] {
        &self.notes[self.at(start)..self.at(end)]
    }

    fn noted_mut(&mut self, part: AddressRange) -> &mut [Note] {
        let pages = self.at(part.start)..self.at(part.end);
        &mut self.notes[pages]
    }

    /// A part of it was merged now, and is counted where `of` says. How many of its pages are not expected to last.
    pub fn merged(&mut self, part: AddressRange, now: Duration, of: fn(&mut Tally) -> &mut Pages) -> Pages {
        *of(&mut self.tally) += Pages(part.bytes().0 / self.page);
        let notes = self.noted_mut(part);
        notes.iter_mut().for_each(|note| note.merged(now));
        Pages(notes.iter().filter(|note| note.is_doubtful()).count() as u64)
    }

    /// Begin to find out how it stands.
    pub fn tally_anew(&mut self) {
        self.tally = Tally { pages: self.tally.pages, ..Tally::default() };
    }

    /// Count a part of it, of which `found` is mapped.
    pub fn tally(&mut self, part: AddressRange, kind: Kind, found: &[pagemap::MappedRange], now: Duration) {
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

/// Find out how regions stand, and count all mappings of this process.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps` and `pagemap`.
pub fn tally_now(domain: &Domain, regions: &mut [Region], now: Duration) -> io::Result<u64> {
    let (parts, mappings) = layout::own(domain.store.identity(), domain.page())?;
    let pagemap = File::open("/proc/thread-self/pagemap")?;
    for region in regions {
        region.tally_anew();
        let first = parts.partition_point(|part| part.range.end <= region.range.start);
        for part in &parts[first..] {
            let Some(range) = part.range.overlap(region.range) else { break };
            let mut found = Vec::new();
            pagemap::mapped(&pagemap, range.start..range.end, part.kind.holds(), |mapped| found.push(mapped))?;
            region.tally(range, part.kind, &found, now);
        }
    }
    Ok(mappings)
}
