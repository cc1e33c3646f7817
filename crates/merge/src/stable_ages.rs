//! How long pages have kept their content, over several censuses under one key.
//!
//! Two reads within a census separate volatile pages from stable ones. A work array that is refilled every few seconds
//! looks stable between the two reads, and merging it is a loss. Repeated censuses therefore require a stable age,
//! [`stable_age`]; younger pages are left for a later census.
//!
//! A census that finds no partner of a page only shows that the page is stable, or assumes it: the earlier record of
//! the page stays.
//!
//! Takes 4 bytes for each page that a plan covers and that can gain anything, and 24 for each range of neighboring
//! pages that were first seen together. A page that is rewritten with the same bytes ages like any other: only the
//! kernel's page tables show that write, once the page is merged ([`pagefold_base::merge_lifetime`]).

use crate::decide::plan::{MergePlan, PlanTarget};
use pagefold_base::merge_lifetime::stable_age;
use pagefold_base::{AddressRange, Bytes, Fingerprint, PageClass, Pages, ProcessId};
use pagefold_census::ScanCache;
use pagefold_census::content_groups;
use pagefold_census::index::PageIndex;
use pagefold_census::range_selection::each_page;
use pagefold_census::results::{Census, SubjectCensus};
use pagefold_sys::fingerprint::Hasher;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Maximum pages of a chunk, the unit that is left out of a plan.
const PAGES_PER_CHUNK: u64 = 1024;

/// Maximum rounds of searching for pages that lost their partners to the chunks just left out.
const MAX_PARTNER_ROUNDS: u32 = 8;

/// Page contents and when they were first seen.
pub struct StableAges {
    hasher: Hasher,
    started: Instant,
    ages_by_process: BTreeMap<ProcessId, ProcessAges>,
    cache: ScanCache,
}

/// Pages of a process, ascending by address.
#[derive(Default)]
struct ProcessAges {
    ranges: Vec<StableRange>,
    /// Half of the fingerprint of each page: it misses one change in four billion.
    half_fingerprints: Vec<u32>,
}

/// Neighboring pages that have kept their content since the same time.
struct StableRange {
    range: AddressRange,
    /// Milliseconds from the start until they were first seen with this content.
    since_ms: u64,
}

impl ProcessAges {
    /// Replace the pages of a range.
    fn replace_range(&mut self, range: AddressRange, pages: Self, page_bytes: u64) {
        let (first, first_page) = self.cut_at(range.start, page_bytes);
        let (end, end_page) = self.cut_at(range.end, page_bytes);
        self.ranges.splice(first..end, pages.ranges);
        self.half_fingerprints.splice(first_page..end_page, pages.half_fingerprints);
        self.ranges.shrink_to_fit();
        self.half_fingerprints.shrink_to_fit();
    }

    /// Remove and return the pages of a range.
    fn take_range(&mut self, range: AddressRange, page_bytes: u64) -> Self {
        let (first, first_page) = self.cut_at(range.start, page_bytes);
        let (end, end_page) = self.cut_at(range.end, page_bytes);
        Self {
            ranges: self.ranges.drain(first..end).collect(),
            half_fingerprints: self.half_fingerprints.drain(first_page..end_page).collect(),
        }
    }

    /// Cut the recorded range that contains an address. Returns the number of ranges and of pages before the address.
    fn cut_at(&mut self, address: u64, page_bytes: u64) -> (usize, usize) {
        let position = self.ranges.partition_point(|stable| stable.range.end <= address);
        let bytes = self.ranges[..position].iter().map(|stable| stable.range.bytes().0).sum::<u64>();
        let Some(stable) = self.ranges.get_mut(position).filter(|stable| stable.range.start < address) else {
            return (position, (bytes / page_bytes) as usize);
        };
        let (start, since_ms) = (stable.range.start, stable.since_ms);
        stable.range.start = address;
        self.ranges.insert(position, StableRange { range: AddressRange { start, end: address }, since_ms });
        (position + 1, ((bytes + address - start) / page_bytes) as usize)
    }

    /// Record the next page.
    fn push_page(&mut self, page: AddressRange, content: u32, since_ms: u64) {
        self.half_fingerprints.push(content);
        match self.ranges.last_mut().filter(|last| last.range.end == page.start && last.since_ms == since_ms) {
            Some(last) => last.range.end = page.end,
            None => self.ranges.push(StableRange { range: page, since_ms }),
        }
    }

    /// The address of each page, its content, and since when it has kept it.
    fn pages(&self, page_bytes: u64) -> impl Iterator<Item = (u64, u32, u64)> {
        let page_starts = move |stable: &StableRange| {
            let (range, since) = (stable.range, stable.since_ms);
            (range.start..range.end).step_by(page_bytes as usize).map(move |address| (address, since))
        };
        self.ranges
            .iter()
            .flat_map(page_starts)
            .zip(&self.half_fingerprints)
            .map(|((address, since), &content)| (address, content, since))
    }

    /// The recorded subranges of a range, each with the time since when it has kept its content.
    fn ranges_within(&self, range: AddressRange) -> impl Iterator<Item = (u64, AddressRange)> {
        let first = self.ranges.partition_point(|stable| stable.range.end <= range.start);
        let within = self.ranges[first..].iter().take_while(move |stable| stable.range.start < range.end);
        within.filter_map(move |stable| Some((stable.since_ms, stable.range.overlap(range)?)))
    }

    /// The chunks of a range in which most recorded pages are not stable yet.
    fn unstable_chunks(&self, range: AddressRange, page_bytes: u64, now_ms: u64, min_age_ms: u64) -> Vec<AddressRange> {
        let is_unstable = |chunk: &AddressRange| {
            let (mut recorded_bytes, mut stable_bytes) = (0, 0);
            for (since, range) in self.ranges_within(*chunk) {
                recorded_bytes += range.bytes().0;
                stable_bytes += if now_ms.saturating_sub(since) >= min_age_ms { range.bytes().0 } else { 0 };
            }
            stable_bytes * 2 < recorded_bytes
        };
        range.cut_at_multiples(PAGES_PER_CHUNK * page_bytes).filter(is_unstable).collect()
    }
}

impl StableAges {
    /// An empty record that starts at a given time, with this key.
    pub fn new(hasher: Hasher, started: Instant) -> Self {
        let cache = ScanCache::new(started);
        Self { hasher, started, ages_by_process: BTreeMap::new(), cache }
    }

    /// The cache between the censuses, with the key of all of them.
    pub fn cache_and_hasher(&mut self) -> (&mut ScanCache, &Hasher) {
        (&mut self.cache, &self.hasher)
    }

    /// Pages of a process that the last census took from the cache instead of reading them.
    pub fn reused_pages(&self, process: ProcessId) -> Pages {
        self.cache.reused_pages(process)
    }

    /// The hasher of all compared censuses.
    pub fn hasher(&self) -> &Hasher {
        &self.hasher
    }

    /// Record the findings of a census under this key at `now`. Drop from its plan the chunks in which most pages that
    /// should merge are not stable yet, or have no partner left. If the program itself enrolled such a chunk, it is
    /// unenrolled while ksmd works, unless a page of it is merged. The records of processes outside the census stay.
    /// Returns how many bytes of each process were dropped.
    pub fn drop_unstable_ranges(
        &mut self,
        plan: &mut MergePlan,
        census: &Census,
        index: &PageIndex,
        now: Instant,
    ) -> BTreeMap<ProcessId, Bytes> {
        let now_ms = now.saturating_duration_since(self.started).as_millis() as u64;
        self.record_census(census, index, now_ms);
        let min_age_ms = stable_age(self.hasher.page_len() as u64).as_millis() as u64;
        let (page_bytes, no_ages) = (self.hasher.page_len() as u64, ProcessAges::default());
        let (mut unstable, mut stable) = (BTreeMap::new(), BTreeMap::new());
        for target in &plan.targets {
            let ages = self.ages_by_process.get(&target.process.id).unwrap_or(&no_ages);
            let (mut unstable_chunks, mut stable_chunks) = (Vec::new(), Vec::new());
            for range in &target.ranges {
                let chunks = ages.unstable_chunks(range.range, page_bytes, now_ms, min_age_ms);
                stable_chunks.extend(
                    range
                        .range
                        .subtract(&chunks)
                        .into_iter()
                        .flat_map(|part| part.cut_at_multiples(PAGES_PER_CHUNK * page_bytes)),
                );
                unstable_chunks.extend(chunks);
            }
            unstable.insert(target.process.id, unstable_chunks);
            stable.insert(target.process.id, stable_chunks);
        }
        // Each chunk may hold the only partners of another chunk.
        for _ in 0..MAX_PARTNER_ROUNDS {
            if unstable.values().all(Vec::is_empty) {
                break;
            }
            let without_partners = chunks_without_partners(census, index, &stable);
            if without_partners.is_empty() {
                break;
            }
            for (process, chunks) in without_partners {
                stable.entry(process).or_default().retain(|chunk| chunks.binary_search(chunk).is_err());
                unstable.entry(process).or_default().extend(chunks);
            }
        }
        let mut dropped_bytes = BTreeMap::new();
        for (process, ranges) in unstable {
            dropped_bytes.insert(process, Bytes(ranges.iter().map(|range| range.bytes().0).sum()));
            let target = plan.targets.iter().find(|target| target.process.id == process);
            let subject = census.subjects.iter().position(|subject| subject.process.id == process);
            if let Some((target, subject)) = target.zip(subject) {
                let own_ranges = enrolled_without_merges(target, subject, index, &ranges);
                plan.add_temporary_unenroll(&census.subjects[subject], &own_ranges);
            }
            plan.exclude_ranges(process, ranges);
        }
        dropped_bytes
    }

    fn record_census(&mut self, census: &Census, index: &PageIndex, now_ms: u64) {
        let half_fingerprint = |fingerprint: Fingerprint| fingerprint.0 as u32;
        let mut fingerprints: Vec<(u32, u32)> = index
            .paired()
            .par_iter()
            .filter(|entry| index.mark(entry.ordinal).is_covered())
            .map(|entry| (entry.ordinal, half_fingerprint(entry.fingerprint())))
            .collect();
        fingerprints.par_sort_unstable();
        let page_bytes = self.hasher.page_len() as u64;
        for (position, subject) in census.subjects.iter().enumerate() {
            let mut recorded = self.ages_by_process.remove(&subject.process.id).unwrap_or_default();
            let mut previous_pages = recorded.pages(page_bytes).peekable();
            let ordinals = index.subject_ordinals(position);
            let mut fingerprints =
                fingerprints[fingerprints.partition_point(|&(page, _)| page < ordinals.start)..].iter().peekable();
            let mut pages = ProcessAges::default();
            for (_, ordinal, address) in each_page(index, &ordinals) {
                let mark = index.mark(ordinal);
                while previous_pages.next_if(|&(old, ..)| old < address).is_some() {}
                let previous = previous_pages.next_if(|&(old, ..)| old == address);
                let content = match mark.class() {
                    Some(PageClass::Zero) if mark.is_covered() => half_fingerprint(Fingerprint::ZERO_PAGE),
                    Some(class) if class.is_duplicate() && mark.is_covered() => {
                        while fingerprints.next_if(|&&(page, _)| page < ordinal).is_some() {}
                        let Some(&&(_, content)) = fingerprints.peek().filter(|&&&(page, _)| page == ordinal) else {
                            continue;
                        };
                        content
                    }
                    Some(PageClass::Unique) => {
                        let Some((_, old_half, _)) = previous else { continue };
                        old_half
                    }
                    _ => continue,
                };
                let since_ms =
                    previous.filter(|&(_, old_half, _)| old_half == content).map_or(now_ms, |(.., since_ms)| since_ms);
                pages.push_page(AddressRange { start: address, end: address + page_bytes }, content, since_ms);
            }
            drop(previous_pages);
            // The records of other parts of the process stay.
            for range in &subject.scanned_ranges {
                recorded.replace_range(*range, pages.take_range(*range, page_bytes), page_bytes);
            }
            if !recorded.half_fingerprints.is_empty() {
                self.ages_by_process.insert(subject.process.id, recorded);
            }
        }
    }

    /// Drop the records of all processes that `is_kept` rejects.
    pub fn retain_processes(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.ages_by_process.retain(|&process, _| is_kept(process));
        self.cache.retain_processes(is_kept);
    }
}

/// The ranges that the target's program enrolled itself and in which no page is merged: ksmd would scan them anyway.
/// `subject` is the target's position among the subjects of the census.
fn enrolled_without_merges(
    target: &PlanTarget,
    subject: usize,
    index: &PageIndex,
    ranges: &[AddressRange],
) -> Vec<AddressRange> {
    let is_own = |range: &&AddressRange| {
        target.ranges.iter().any(|planned| planned.enrolled && planned.range.overlap(**range).is_some())
    };
    let own_ranges: Vec<AddressRange> = ranges.iter().filter(is_own).copied().collect();
    if own_ranges.is_empty() {
        return own_ranges;
    }
    let is_merged = |ordinal: u32| index.mark(ordinal).class() == Some(PageClass::Merged);
    let merged: Vec<u64> = each_page(index, &index.subject_ordinals(subject))
        .filter(|&(_, ordinal, _)| is_merged(ordinal))
        .map(|(.., address)| address)
        .collect();
    let has_no_merged_page = |range: &AddressRange| {
        let first = merged.partition_point(|&address| address < range.start);
        merged.get(first).is_none_or(|&address| address >= range.end)
    };
    own_ranges.into_iter().filter(has_no_merged_page).collect()
}

/// The chunks in which most pages that should merge have no partner: no other page of their group is in any chunk, or
/// merged. `chunks_by_process` are ascending for each process.
fn chunks_without_partners(
    census: &Census,
    index: &PageIndex,
    chunks_by_process: &BTreeMap<ProcessId, Vec<AddressRange>>,
) -> Vec<(ProcessId, Vec<AddressRange>)> {
    let process_chunks =
        |subject: &SubjectCensus| chunks_by_process.get(&subject.process.id).map_or(&[][..], Vec::as_slice);
    let chunks: Vec<&[AddressRange]> = census.subjects.iter().map(process_chunks).collect();
    let zero_counts = || chunks.iter().map(|chunks| chunks.iter().map(|_| AtomicU32::new(0)).collect()).collect();
    let (pages_without_partner, pages_with_partner): (Vec<Vec<AtomicU32>>, Vec<Vec<AtomicU32>>) =
        (zero_counts(), zero_counts());
    let chunk_at = |subject: usize, address: u64| {
        let position = chunks[subject].partition_point(|chunk| chunk.end <= address);
        chunks[subject].get(position).is_some_and(|chunk| chunk.start <= address).then_some((subject, position))
    };
    let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
    content_groups::fold_groups(index, &domains, |planned_pages: &mut Vec<(u32, (usize, usize))>, _, members| {
        planned_pages.clear();
        planned_pages.extend(members.iter().filter(|member| index.mark(member.ordinal).is_covered()).filter_map(
            |member| {
                let (.., address) = index.locate(member.ordinal)?;
                Some((member.first_page_of_frame, chunk_at(member.subject, address)?))
            },
        ));
        // Pages that share one frame since a fork count as one.
        let is_one_frame = planned_pages.iter().all(|(frame, _)| *frame == planned_pages[0].0);
        let counts = if is_one_frame && !members.iter().any(|member| member.merged) {
            &pages_without_partner
        } else {
            &pages_with_partner
        };
        for &(_, (subject, position)) in planned_pages.iter() {
            counts[subject][position].fetch_add(1, Ordering::Relaxed);
        }
    });
    let count = |counts: &[Vec<AtomicU32>], (subject, position): (usize, usize)| {
        counts[subject][position].load(Ordering::Relaxed)
    };
    let mostly_without_partner = |subject: usize| {
        let lacks_partners = |position: &usize| {
            count(&pages_without_partner, (subject, *position)) > count(&pages_with_partner, (subject, *position))
        };
        if (0..chunks[subject].len()).any(|position| lacks_partners(&position)) {
            let is_zero = |ordinal: u32| {
                let mark = index.mark(ordinal);
                mark.is_covered() && mark.class() == Some(PageClass::Zero)
            };
            for (_, _, address) in each_page(index, &index.subject_ordinals(subject)).filter(|page| is_zero(page.1)) {
                if let Some((_, position)) = chunk_at(subject, address) {
                    pages_with_partner[subject][position].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let found: Vec<AddressRange> =
            (0..chunks[subject].len()).filter(lacks_partners).map(|position| chunks[subject][position]).collect();
        (!found.is_empty()).then_some((census.subjects[subject].process.id, found))
    };
    (0..chunks.len()).filter_map(mostly_without_partner).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE_BYTES: u64 = 4096;

    proptest! {
        /// Pages of a part are replaced, and all others stay as they are.
        #[test]
        fn replaced_range_keeps_other_pages(
            pages in prop::collection::btree_map(0u64..256, (0u32..3, 0u64..3), 0..100),
            newer in prop::collection::btree_map(0u64..256, (3u32..6, 3u64..6), 0..100),
            (start, length) in (0u64..256, 0u64..128),
        ) {
            let ages = |pages: &BTreeMap<u64, (u32, u64)>| {
                let mut ages = ProcessAges::default();
                for (&at, &(content, since)) in pages {
                    ages.push_page(AddressRange { start: at * PAGE_BYTES, end: (at + 1) * PAGE_BYTES }, content, since);
                }
                ages
            };
            let range = AddressRange { start: start * PAGE_BYTES, end: (start + length) * PAGE_BYTES };
            let within = |at: &u64| (start..start + length).contains(at);
            let mut replaced = ages(&pages);
            replaced.replace_range(range, ages(&newer).take_range(range, PAGE_BYTES), PAGE_BYTES);
            let mut expected: BTreeMap<u64, (u32, u64)> = pages.into_iter().filter(|(at, _)| !within(at)).collect();
            expected.extend(newer.into_iter().filter(|(at, _)| within(at)));
            let listed = replaced.pages(PAGE_BYTES).map(|(address, content, since)| (address / PAGE_BYTES, (content, since)));
            prop_assert_eq!(listed.collect::<Vec<_>>(), expected.into_iter().collect::<Vec<_>>());
        }

        /// Ranges return the recorded time of each page, and chunks agree with their pages one by one.
        #[test]
        fn stable_ranges_match_their_pages(
            pages in prop::collection::btree_map(0u64..4096, (0u32..3, 0u64..3), 0..300),
            planned in (0u64..2048, 1u64..2048),
            now in 2u64..6,
        ) {
            let page = |at: u64| AddressRange { start: at * PAGE_BYTES, end: (at + 1) * PAGE_BYTES };
            let mut ages = ProcessAges::default();
            for (&at, &(content, since)) in &pages {
                ages.push_page(page(at), content, since);
            }
            let number = |(address, content, since)| (address / PAGE_BYTES, (content, since));
            let listed = ages.pages(PAGE_BYTES).map(number);
            prop_assert_eq!(listed.collect::<Vec<_>>(), pages.clone().into_iter().collect::<Vec<_>>());

            let range = AddressRange { start: planned.0 * PAGE_BYTES, end: (planned.0 + planned.1) * PAGE_BYTES };
            let unstable: Vec<AddressRange> = range
                .cut_at_multiples(PAGES_PER_CHUNK * PAGE_BYTES)
                .filter(|chunk| {
                    let within = pages.range(chunk.start / PAGE_BYTES..chunk.end / PAGE_BYTES);
                    let are_stable: Vec<bool> = within.map(|(_, &(_, since))| now - since >= 3).collect();
                    are_stable.iter().filter(|is_stable| **is_stable).count() * 2 < are_stable.len()
                })
                .collect();
            prop_assert_eq!(ages.unstable_chunks(range, PAGE_BYTES, now, 3), unstable);
        }
    }
}
