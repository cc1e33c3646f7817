//! The index: every resident page with its fingerprint and class, in 13 bytes and a share of its run's 8. A page that
//! is the frame of an earlier one takes 8 more.

use crate::Error;
use crate::scan_scope::{ScanScope, Subject, read_method};
use pagefold_base::{Absent, Fingerprint, PageClass, Pfn, Reading};
use pagefold_host::{Host, PageRun, ReadMethod};
use pagefold_sys::advise::prefer_huge_pages;
use rayon::prelude::*;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};

/// A fingerprint and the ordinal of its page, packed to 12 bytes. Sorts by fingerprint, then by ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    high: u32,
    low: u32,
    /// Which page.
    pub ordinal: u32,
}

impl IndexEntry {
    /// The slot of a page that was not read. No page has its ordinal.
    pub const EMPTY: Self = Self { high: 0, low: 0, ordinal: u32::MAX };

    /// Pack.
    pub fn new(fingerprint: Fingerprint, ordinal: u32) -> Self {
        Self { high: (fingerprint.0 >> 32) as u32, low: fingerprint.0 as u32, ordinal }
    }

    /// Unpack.
    pub fn fingerprint(self) -> Fingerprint {
        Fingerprint(u64::from(self.high) << 32 | u64::from(self.low))
    }

    /// One number that sorts alike: sorting is much quicker where comparing does not branch.
    fn sort_key(self) -> u128 {
        u128::from(self.fingerprint().0) << 32 | u128::from(self.ordinal)
    }
}

impl Ord for IndexEntry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.sort_key().cmp(&other.sort_key())
    }
}

impl PartialOrd for IndexEntry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What is known of a page, in a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageMark(u8);

impl PageMark {
    /// Not looked at yet, or not before the census was stopped.
    pub const NOT_READ: Self = Self(0);
    /// No longer resident when it was to be read.
    pub const NOT_RESIDENT: Self = Self(1);
    /// Left out of the sample.
    pub const NOT_SAMPLED: Self = Self(2);

    const CLASS_BASE: u8 = 3;
    /// Added to the state of a page that must not be covered. Zeros and duplicates are the only ones of which there is
    /// anything to forbid: their states come again after that of unique pages.
    const FORBIDDEN_OFFSET: u8 = PageClass::Unique as u8 + 1 - PageClass::Zero as u8;
    const FORBIDDEN_BASE: u8 = Self::CLASS_BASE + PageClass::Zero as u8 + Self::FORBIDDEN_OFFSET;
    const STATE_MASK: u8 = 0x0f;
    const REDUNDANT_BIT: u8 = 0x10;
    const SHARE_SHIFT: u8 = 5;
    const COVERED_BIT: u8 = 0x80;

    /// A classified page.
    pub fn from_class(class: PageClass) -> Self {
        Self(Self::CLASS_BASE + class as u8)
    }

    /// A duplicate in a group of `copies`; `redundant` unless it is the copy that the group keeps.
    pub fn duplicate(class: PageClass, copies: usize, redundant: bool) -> Self {
        let share = match copies {
            ..=2 => 0,
            3 => 1,
            4..=7 => 2,
            _ => 3,
        };
        Self(Self::from_class(class).0 | if redundant { Self::REDUNDANT_BIT } else { 0 } | share << Self::SHARE_SHIFT)
    }

    /// A page that held something of its own as far as is remembered, or came to be read too late to be compared with
    /// all others. Where it was not read its entry has half of the fingerprint ([`Fingerprint::from_half`]).
    pub const CACHED_UNIQUE: Self = Self(Self::CLASS_BASE + PageClass::Unique as u8 + Self::UNCERTAIN_BIT);
    /// A page that was not read because it has changed each time.
    pub const ASSUMED_VOLATILE: Self = Self(Self::CLASS_BASE + PageClass::Volatile as u8 + Self::UNCERTAIN_BIT);
    /// Only duplicates have a share.
    const UNCERTAIN_BIT: u8 = 1 << Self::SHARE_SHIFT;

    /// Whether it is not known what the page holds now, or whether somebody else holds the same: it is one of the two
    /// above.
    pub fn is_uncertain(self) -> bool {
        [Self::CACHED_UNIQUE.0, Self::ASSUMED_VOLATILE.0].contains(&(self.0 & !Self::COVERED_BIT))
    }

    /// Every mark that there could be, in the order of their bits.
    pub(crate) fn all_values() -> impl Iterator<Item = Self> {
        (0..=u8::MAX).map(Self)
    }

    /// The byte.
    pub(crate) fn bits(self) -> usize {
        usize::from(self.0)
    }

    /// The class, if the page was read.
    pub fn class(self) -> Option<PageClass> {
        let state = self.0 & Self::STATE_MASK;
        let state = if self.is_forbidden() { state - Self::FORBIDDEN_OFFSET } else { state };
        PageClass::ALL.get(usize::from(state.checked_sub(Self::CLASS_BASE)?)).copied()
    }

    /// Whether the page was read.
    pub fn was_read(self) -> bool {
        self.0 & Self::STATE_MASK >= Self::CLASS_BASE
    }

    /// Whether a guided enrolment must not cover the page, because its content is to be merged in another trust domain.
    pub fn is_forbidden(self) -> bool {
        self.0 & Self::STATE_MASK >= Self::FORBIDDEN_BASE
    }

    /// The same, forbidden, for zeros and duplicates. Others stay as they are.
    pub fn with_forbidden(self) -> Self {
        let forbids = !self.is_forbidden() && self.class().is_some_and(PageClass::is_mergeable);
        Self(if forbids { self.0 + Self::FORBIDDEN_OFFSET } else { self.0 })
    }

    /// Whether it is a duplicate beyond the copy its group keeps.
    pub fn is_redundant(self) -> bool {
        self.0 & Self::REDUNDANT_BIT != 0
    }

    /// Whether a guided enrolment would cover the page.
    pub fn is_covered(self) -> bool {
        self.0 & Self::COVERED_BIT != 0
    }

    /// The same, covered.
    pub fn with_covered(self) -> Self {
        Self(self.0 | Self::COVERED_BIT)
    }

    /// The part of the page that comes back when its whole group is merged, in 64ths: all of a page of zeros, `1 - 1/n`
    /// of one in a group of n, with n rounded down to 2, 3, 4 or 8.
    pub fn freed_64ths(self) -> i64 {
        match self.class() {
            Some(PageClass::Zero) => 64,
            Some(class) if class.is_duplicate() => [32, 42, 48, 56][usize::from(self.0 >> Self::SHARE_SHIFT & 3)],
            _ => 0,
        }
    }
}

/// A run of pages behind one another: the page within its area, with a bit for huge pages, and its first ordinal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedRun {
    page_and_huge_bit: u32,
    first_ordinal: u32,
}

const HUGE_PAGE_BIT: u32 = 1 << 31;

/// A part of a region, short enough for page numbers of 31 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionArea {
    subject: u32,
    region: u32,
    base_address: u64,
    first_run: u32,
}

/// Every resident page that KSM could take. Pages are numbered in the order of subjects, then of addresses.
#[derive(Debug)]
pub struct PageIndex {
    page_bytes: u64,
    areas: Vec<RegionArea>,
    runs: Vec<PackedRun>,
    /// Ordinal of the first page of each subject, and the number of all pages.
    first_ordinals: Vec<u32>,
    /// In the order of ordinals while reading. Afterwards those that may have a partner, sorted by fingerprint, and
    /// then the others, still in the order of ordinals, until they are let go of.
    pub(crate) entries: Vec<IndexEntry>,
    /// How many may have a partner.
    pub(crate) candidate_count: usize,
    marks: Vec<AtomicU8>,
    /// The NUMA node of each page, if pages of different nodes are kept apart.
    nodes: Vec<AtomicU8>,
    /// Pages that others map too, with their frames, until they are told apart.
    shared_mappings: Vec<(Pfn, u32)>,
    /// Pages that are the frame of an earlier page, mapped once more, with that page; sorted.
    repeated_frames: Vec<(u32, u32)>,
    /// Pages that others map too, and whose frames may not be known.
    pub(crate) unknown_shared_frames: u64,
    unlisted_subjects: Vec<(usize, Absent)>,
}

/// Some consecutive pages of one subject, read in one way.
#[derive(Clone, Debug)]
pub struct ScanUnit {
    /// Whose.
    pub subject: usize,
    /// How to read them.
    pub method: ReadMethod,
    /// Which.
    pub ordinals: Range<u32>,
}

/// The pages of a region.
#[derive(Clone, Debug)]
pub struct RegionPages {
    /// Position of the subject in the survey.
    pub subject: usize,
    /// Position of the region in the subject.
    pub region: usize,
    /// Which.
    pub ordinals: Range<u32>,
}

/// Pages of a unit: 64 MiB of base pages, some milliseconds of reading.
const PAGES_PER_UNIT: u32 = 1 << 14;

/// Contents that are let go of at once: 1.5 MiB.
const ENTRIES_PER_RELEASE: usize = 1 << 17;

impl PageIndex {
    /// Of no pages.
    fn empty(page_len: u64) -> Self {
        Self {
            page_bytes: page_len,
            areas: Vec::new(),
            runs: Vec::new(),
            first_ordinals: vec![0],
            entries: Vec::new(),
            candidate_count: 0,
            marks: Vec::new(),
            nodes: Vec::new(),
            shared_mappings: Vec::new(),
            repeated_frames: Vec::new(),
            unknown_shared_frames: 0,
            unlisted_subjects: Vec::new(),
        }
    }

    /// List the resident pages of the survey.
    pub fn build(host: &dyn Host, scope: &ScanScope, separate_nodes: bool) -> Result<Self, Error> {
        let mut index = Self::empty(host.page_size().bytes());
        let mut pages = 0;
        // A few subjects at a time, so that their unpacked runs do not all lie in memory at once.
        for (chunk, subjects) in scope.subjects.chunks(64).enumerate() {
            let listed: Vec<_> = subjects.par_iter().map(|subject| list_resident_runs(host, subject)).collect();
            for (i, (subject, runs)) in subjects.iter().zip(listed).enumerate() {
                let position = chunk * 64 + i;
                match runs {
                    Ok(runs) => pages = index.add_runs(position, subject, &runs, pages),
                    Err(why) => index.unlisted_subjects.push((position, why)),
                }
                if pages > u64::from(u32::MAX) {
                    return Err(Error::TooManyPages(pages));
                }
                index.first_ordinals.push(pages as u32);
            }
        }
        index.areas.shrink_to_fit();
        index.runs.shrink_to_fit();
        let pages = pages as usize;
        let no_memory = |_| Error::NoMemory(pages);
        index.entries.try_reserve_exact(pages).map_err(no_memory)?;
        index.marks.try_reserve_exact(pages).map_err(no_memory)?;
        // Best effort, like all such advice.
        let _ = prefer_huge_pages(index.entries.spare_capacity_mut());
        let _ = prefer_huge_pages(index.marks.spare_capacity_mut());
        // In parallel, because writing to new memory is what costs.
        index.entries.par_extend((0..pages).into_par_iter().map(|_| IndexEntry::EMPTY));
        let zeroed = || AtomicU8::new(PageMark::NOT_READ.0);
        index.marks.par_extend((0..pages).into_par_iter().map(|_| zeroed()));
        index.nodes.par_extend((0..if separate_nodes { pages } else { 0 }).into_par_iter().map(|_| zeroed()));
        Ok(index)
    }

    /// Number the runs of a subject, beginning with `pages`. Returns the next number.
    fn add_runs(&mut self, position: usize, subject: &Subject, runs: &[PageRun], mut pages: u64) -> u64 {
        let mut regions = subject.regions.iter().enumerate().peekable();
        for run in runs {
            while regions.next_if(|(_, (region, _))| region.range.end <= run.address).is_some() {}
            let Some((region, _)) = regions.peek() else { break };
            let fits = |area: &RegionArea| {
                area.subject == position as u32
                    && area.region == *region as u32
                    && (run.address - area.base_address) / self.page_bytes < u64::from(HUGE_PAGE_BIT)
            };
            if !self.areas.last().is_some_and(fits) {
                let runs = self.runs.len() as u32;
                self.areas.push(RegionArea {
                    subject: position as u32,
                    region: *region as u32,
                    base_address: run.address,
                    first_run: runs,
                });
            }
            let base = self.areas.last().map_or(0, |area| area.base_address);
            let page = ((run.address - base) / self.page_bytes) as u32 | if run.huge { HUGE_PAGE_BIT } else { 0 };
            self.runs.push(PackedRun { page_and_huge_bit: page, first_ordinal: pages as u32 });
            pages += u64::from(run.pages);
        }
        pages
    }

    /// How many pages.
    pub fn page_count(&self) -> usize {
        self.marks.len()
    }

    /// The size of a page in bytes.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Bytes of memory that the index takes.
    pub fn memory_bytes(&self) -> usize {
        self.areas.capacity() * size_of::<RegionArea>()
            + self.runs.capacity() * size_of::<PackedRun>()
            + self.entries.capacity() * size_of::<IndexEntry>()
            + self.marks.capacity()
            + self.nodes.capacity()
            + self.repeated_frames.capacity() * size_of::<(u32, u32)>()
    }

    /// Subjects whose pages could not be listed, and why.
    pub fn unlisted_subjects(&self) -> &[(usize, Absent)] {
        &self.unlisted_subjects
    }

    /// The subject a page belongs to.
    pub fn subject_of_page(&self, ordinal: u32) -> usize {
        self.first_ordinals.partition_point(|&first| first <= ordinal) - 1
    }

    /// What is known of a page.
    pub fn mark(&self, ordinal: u32) -> PageMark {
        PageMark(self.marks[ordinal as usize].load(Ordering::Relaxed))
    }

    /// Note what is known of a page. Each page is marked by one thread at a time; nobody orders anything by it.
    pub fn set_mark(&self, ordinal: u32, mark: PageMark) {
        self.marks[ordinal as usize].store(mark.0, Ordering::Relaxed);
    }

    /// The node of a page; 0 where pages of different nodes are not kept apart.
    pub fn node(&self, ordinal: u32) -> u8 {
        self.nodes.get(ordinal as usize).map_or(0, |node| node.load(Ordering::Relaxed))
    }

    /// Note the node of a page.
    pub fn set_node(&self, ordinal: u32, node: u8) {
        if let Some(noted) = self.nodes.get(ordinal as usize) {
            noted.store(node, Ordering::Relaxed);
        }
    }

    /// All entries, until those without a partner are let go of.
    pub fn entries(&self) -> &[IndexEntry] {
        &self.entries
    }

    /// The entries of pages that may have a partner, sorted by fingerprint once all are read.
    pub fn paired(&self) -> &[IndexEntry] {
        &self.entries[..self.candidate_count]
    }

    /// Take note of the frames of pages that others map too.
    pub(crate) fn add_shared_mappings(&mut self, shared: Vec<(Pfn, u32)>) {
        self.shared_mappings.extend(shared);
    }

    /// Have each of these frames count once.
    pub(crate) fn resolve_repeated_frames(&mut self) {
        let mut shared = std::mem::take(&mut self.shared_mappings);
        shared.par_sort_unstable();
        let frames = shared.chunk_by(|a, b| a.0 == b.0);
        self.repeated_frames = frames.flat_map(|same| same[1..].iter().map(|&(_, page)| (page, same[0].1))).collect();
        self.repeated_frames.shrink_to_fit();
        self.repeated_frames.par_sort_unstable();
    }

    /// Let go of the contents that no two pages have: a plan and all that follows from it asks for none.
    pub fn drop_unique_entries(&mut self) {
        self.drain_unique_entries(|_, _| {});
    }

    /// Tell the contents that no two pages have, from the last page to the first, and let go of them portion by portion,
    /// so that something else can be filled meanwhile.
    pub(crate) fn drain_unique_entries(&mut self, mut visit: impl FnMut(&Self, IndexEntry)) {
        loop {
            self.entries.shrink_to_fit();
            let left = self.candidate_count.max(self.entries.len().saturating_sub(ENTRIES_PER_RELEASE));
            if left == self.entries.len() {
                return;
            }
            self.entries[left..].iter().rev().for_each(|entry| visit(self, *entry));
            self.entries.truncate(left);
        }
    }

    /// The first page that has the frame of this one: the page itself, unless processes share it since a fork.
    pub fn first_page_of_frame(&self, ordinal: u32) -> u32 {
        let again = self.repeated_frames.binary_search_by_key(&ordinal, |&(page, _)| page);
        again.map_or(ordinal, |position| self.repeated_frames[position].1)
    }

    /// The regions with pages, in the order of their ordinals.
    pub fn regions(&self) -> impl Iterator<Item = RegionPages> + '_ {
        let region = |area: &RegionArea| (area.subject as usize, area.region as usize);
        let mut areas = self.areas.iter().peekable();
        std::iter::from_fn(move || {
            let first = areas.next()?;
            let (subject, position) = region(first);
            while areas.next_if(|area| region(area) == (subject, position)).is_some() {}
            let end =
                areas.peek().map_or(self.page_count() as u32, |next| self.runs[next.first_run as usize].first_ordinal);
            let start = self.runs[first.first_run as usize].first_ordinal;
            Some(RegionPages { subject, region: position, ordinals: start..end })
        })
    }

    /// The ordinals of a subject's pages.
    pub fn subject_ordinals(&self, subject: usize) -> Range<u32> {
        self.first_ordinals[subject]..self.first_ordinals[subject + 1]
    }

    /// The runs of some consecutive pages, cut to them, each with its first ordinal.
    pub fn runs(&self, ordinals: Range<u32>) -> impl Iterator<Item = (PageRun, u32)> + '_ {
        let start = self.runs.partition_point(|run| run.first_ordinal <= ordinals.start).saturating_sub(1);
        let end = self.runs.partition_point(|run| run.first_ordinal < ordinals.end);
        let mut area = self.areas.partition_point(|area| area.first_run as usize <= start).saturating_sub(1);
        (start..end.max(start)).filter_map(move |position| {
            while self.areas.get(area + 1).is_some_and(|next| next.first_run as usize <= position) {
                area += 1;
            }
            let packed = self.runs[position];
            let after = self.runs.get(position + 1).map_or(self.page_count() as u32, |next| next.first_ordinal);
            let (first, end) = (packed.first_ordinal.max(ordinals.start), after.min(ordinals.end));
            let page = u64::from(packed.page_and_huge_bit & !HUGE_PAGE_BIT) + u64::from(first - packed.first_ordinal);
            let address = self.areas[area].base_address + page * self.page_bytes;
            let pages = end.checked_sub(first).filter(|&pages| pages > 0)?;
            Some((PageRun { address, pages, huge: packed.page_and_huge_bit & HUGE_PAGE_BIT != 0 }, first))
        })
    }

    /// Where a page is: the positions of its subject and region in the survey, and its address.
    pub fn locate(&self, ordinal: u32) -> Option<(usize, usize, u64)> {
        let position = self.runs.partition_point(|run| run.first_ordinal <= ordinal).checked_sub(1)?;
        let area =
            &self.areas[self.areas.partition_point(|area| area.first_run as usize <= position).checked_sub(1)?];
        let run = self.runs[position];
        let page = u64::from(run.page_and_huge_bit & !HUGE_PAGE_BIT) + u64::from(ordinal - run.first_ordinal);
        Some((area.subject as usize, area.region as usize, area.base_address + page * self.page_bytes))
    }

    /// The pages in portions for the reading threads.
    pub fn scan_units(&self, scope: &ScanScope) -> Vec<ScanUnit> {
        let mut units: Vec<ScanUnit> = Vec::new();
        for RegionPages { subject, region, mut ordinals } in self.regions() {
            let way = read_method(&scope.subjects[subject].regions[region].0);
            while !ordinals.is_empty() {
                let room = match units.last() {
                    Some(unit) if unit.subject == subject && unit.method == way => {
                        PAGES_PER_UNIT - unit.ordinals.len() as u32
                    }
                    _ => 0,
                };
                if room == 0 {
                    units.push(ScanUnit { subject, method: way, ordinals: ordinals.start..ordinals.start });
                    continue;
                }
                let unit = units.last_mut().expect("one was just seen or pushed");
                ordinals.start += room.min(ordinals.len() as u32);
                unit.ordinals.end = ordinals.start;
            }
        }
        units
    }
}

/// The resident pages of a subject's regions that KSM could take.
fn list_resident_runs(host: &dyn Host, subject: &Subject) -> Reading<Vec<PageRun>> {
    let ranges: Vec<_> = subject
        .regions
        .iter()
        .filter(|(region, reason)| reason.is_none() && region.anonymous.0 > 0)
        .map(|(region, _)| region.range)
        .collect();
    if ranges.is_empty() {
        return Ok(Vec::new());
    }
    let handle = host.open(subject.process.id.pid)?;
    if handle.id() != subject.process.id {
        return Err(Absent::Vanished);
    }
    handle.resident(&ranges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unique_entries_are_drained_once_and_freed() {
        let entry = |page: u32| IndexEntry::new(Fingerprint(u64::from(page)), page);
        for (paired, alone) in
            [(0, 0), (3, 0), (0, 5), (7, ENTRIES_PER_RELEASE as u32), (2, 2 * ENTRIES_PER_RELEASE as u32 + 9)]
        {
            let mut index = PageIndex::empty(4096);
            index.candidate_count = paired as usize;
            index.entries.reserve(4 * ENTRIES_PER_RELEASE);
            index.entries.extend((0..paired + alone).map(entry));
            let mut told = Vec::new();
            index.drain_unique_entries(|_, entry| told.push(entry.ordinal));
            assert!(told.iter().copied().eq((paired..paired + alone).rev()), "{paired} and {alone}");
            assert!(index.entries.iter().copied().eq((0..paired).map(entry)));
            assert!(index.entries.capacity() < ENTRIES_PER_RELEASE, "{}", index.entries.capacity());
            index.drain_unique_entries(|_, _| panic!("there is nothing left"));
        }
    }

    #[test]
    fn page_marks_keep_class_when_forbidden_or_covered() {
        for class in PageClass::ALL {
            let mark = PageMark::from_class(class);
            assert_eq!((mark.class(), mark.is_forbidden()), (Some(class), false));
            let forbidden = mark.with_forbidden();
            assert_eq!((forbidden.class(), forbidden.is_forbidden()), (Some(class), class.is_mergeable()));
            assert_eq!(forbidden.with_forbidden(), forbidden);
        }
        let mark = PageMark::duplicate(PageClass::DuplicateForeign, 9, true).with_forbidden();
        assert!(mark.is_redundant() && mark.was_read() && !mark.is_covered() && mark.with_covered().is_covered());
        assert_eq!(mark.with_covered().class(), Some(PageClass::DuplicateForeign));
        assert_eq!(PageMark::NOT_SAMPLED.with_forbidden(), PageMark::NOT_SAMPLED);
        for (mark, class) in
            [(PageMark::CACHED_UNIQUE, PageClass::Unique), (PageMark::ASSUMED_VOLATILE, PageClass::Volatile)]
        {
            assert_eq!((mark.class(), mark.is_redundant(), mark.is_forbidden()), (Some(class), false, false));
        }
        let unsure =
            [PageMark::CACHED_UNIQUE, PageMark::ASSUMED_VOLATILE].map(|mark| [mark, mark.with_covered()]).concat();
        assert!(PageMark::all_values().all(|mark| mark.is_uncertain() == unsure.contains(&mark)));
    }
}
