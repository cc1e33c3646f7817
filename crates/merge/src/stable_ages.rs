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
use pagefold_base::{AddressRange, Bytes, Fingerprint, PageClass, PageSize, Pages, ProcessId};
use pagefold_census::Error;
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
    page_size: PageSize,
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
        let each = move |stretch: &StableRange| {
            let (range, since) = (stretch.range, stretch.since_ms);
            (range.start..range.end).step_by(page_bytes as usize).map(move |address| (address, since))
        };
        self.ranges
            .iter()
            .flat_map(each)
            .zip(&self.half_fingerprints)
            .map(|((address, since), &content)| (address, content, since))
    }

    /// The recorded subranges of a range, each with the time since when it has kept its content.
    fn ranges_within(&self, range: AddressRange) -> impl Iterator<Item = (u64, AddressRange)> {
        let first = self.ranges.partition_point(|stretch| stretch.range.end <= range.start);
        let within = self.ranges[first..].iter().take_while(move |stretch| stretch.range.start < range.end);
        within.filter_map(move |stretch| Some((stretch.since_ms, stretch.range.overlap(range)?)))
    }

    /// The chunks of a range in which most recorded pages are not stable yet.
    fn unstable_chunks(&self, range: AddressRange, page_bytes: u64, now_ms: u64, min_age_ms: u64) -> Vec<AddressRange> {
        let is_young = |piece: &AddressRange| {
            let (mut all, mut ripe) = (0, 0);
            for (since, range) in self.ranges_within(*piece) {
                all += range.bytes().0;
                ripe += if now_ms.saturating_sub(since) >= min_age_ms { range.bytes().0 } else { 0 };
            }
            ripe * 2 < all
        };
        range.cut_at_multiples(PAGES_PER_CHUNK * page_bytes).filter(is_young).collect()
    }
}

impl StableAges {
    /// An empty record that starts at a given time. Draws the key.
    pub fn new(page_size: PageSize, started: Instant) -> Result<Self, Error> {
        let hasher = Hasher::with_random_key(page_size.as_len()).map_err(Error::RandomKey)?;
        Ok(Self { hasher, page_size, started, ages_by_process: BTreeMap::new(), cache: ScanCache::new(started) })
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
        let now = now.saturating_duration_since(self.started).as_millis() as u64;
        self.record_census(census, index, now);
        let least = stable_age(self.page_size.bytes()).as_millis() as u64;
        let (page_bytes, nothing) = (self.page_size.bytes(), ProcessAges::default());
        let (mut young, mut ripe) = (BTreeMap::new(), BTreeMap::new());
        for target in &plan.targets {
            let seen = self.ages_by_process.get(&target.process.id).unwrap_or(&nothing);
            let (mut not, mut old) = (Vec::new(), Vec::new());
            for range in &target.ranges {
                let pieces = seen.unstable_chunks(range.range, page_bytes, now, least);
                old.extend(
                    range
                        .range
                        .subtract(&pieces)
                        .into_iter()
                        .flat_map(|rest| rest.cut_at_multiples(PAGES_PER_CHUNK * page_bytes)),
                );
                not.extend(pieces);
            }
            young.insert(target.process.id, not);
            ripe.insert(target.process.id, old);
        }
        // Each chunk may hold the only partners of another chunk.
        for _ in 0..MAX_PARTNER_ROUNDS {
            if young.values().all(Vec::is_empty) {
                break;
            }
            let alone = chunks_without_partners(census, index, &ripe);
            if alone.is_empty() {
                break;
            }
            for (process, pieces) in alone {
                ripe.entry(process).or_default().retain(|piece| pieces.binary_search(piece).is_err());
                young.entry(process).or_default().extend(pieces);
            }
        }
        let mut left_out = BTreeMap::new();
        for (process, ranges) in young {
            left_out.insert(process, Bytes(ranges.iter().map(|range| range.bytes().0).sum()));
            let target = plan.targets.iter().find(|target| target.process.id == process);
            let subject = census.subjects.iter().position(|subject| subject.process.id == process);
            if let Some((target, subject)) = target.zip(subject) {
                let own = enrolled_without_merges(target, subject, index, &ranges);
                plan.add_temporary_unenroll(&census.subjects[subject], &own);
            }
            plan.exclude_ranges(process, ranges);
        }
        left_out
    }

    fn record_census(&mut self, census: &Census, index: &PageIndex, now_ms: u64) {
        let content = |fingerprint: Fingerprint| fingerprint.0 as u32;
        let mut known: Vec<(u32, u32)> = index
            .paired()
            .par_iter()
            .filter(|entry| index.mark(entry.ordinal).is_covered())
            .map(|entry| (entry.ordinal, content(entry.fingerprint())))
            .collect();
        known.par_sort_unstable();
        let page_bytes = self.page_size.bytes();
        for (subject, seen) in census.subjects.iter().enumerate() {
            let older = self.ages_by_process.remove(&seen.process.id).unwrap_or_default();
            let mut older = older.pages(page_bytes).peekable();
            let ordinals = index.subject_ordinals(subject);
            let mut known = known[known.partition_point(|&(page, _)| page < ordinals.start)..].iter().peekable();
            let mut pages = ProcessAges::default();
            for (_, ordinal, address) in each_page(index, &ordinals) {
                let mark = index.mark(ordinal);
                while older.next_if(|&(before, ..)| before < address).is_some() {}
                let before = older.next_if(|&(before, ..)| before == address);
                let content = match mark.class() {
                    Some(PageClass::Zero) if mark.is_covered() => content(Fingerprint::ZERO_PAGE),
                    Some(class) if class.is_duplicate() && mark.is_covered() => {
                        while known.next_if(|&&(page, _)| page < ordinal).is_some() {}
                        let Some(&&(_, content)) = known.peek().filter(|&&&(page, _)| page == ordinal) else {
                            continue;
                        };
                        content
                    }
                    Some(PageClass::Unique) => {
                        let Some((_, held, _)) = before else { continue };
                        held
                    }
                    _ => continue,
                };
                let since = before.filter(|&(_, held, _)| held == content).map_or(now_ms, |(.., since)| since);
                pages.push_page(AddressRange { start: address, end: address + page_bytes }, content, since);
            }
            if !pages.half_fingerprints.is_empty() {
                pages.half_fingerprints.shrink_to_fit();
                pages.ranges.shrink_to_fit();
                self.ages_by_process.insert(seen.process.id, pages);
            }
        }
    }

    /// Drop the records of all processes that `keep` rejects.
    pub fn retain_processes(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.ages_by_process.retain(|&process, _| keep(process));
        self.cache.retain_processes(keep);
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
    let own: Vec<AddressRange> = ranges.iter().filter(is_own).copied().collect();
    if own.is_empty() {
        return own;
    }
    let is_merged = |ordinal: u32| index.mark(ordinal).class() == Some(PageClass::Merged);
    let merged: Vec<u64> = each_page(index, &index.subject_ordinals(subject))
        .filter(|&(_, ordinal, _)| is_merged(ordinal))
        .map(|(.., address)| address)
        .collect();
    let has_none = |range: &AddressRange| {
        let first = merged.partition_point(|&address| address < range.start);
        merged.get(first).is_none_or(|&address| address >= range.end)
    };
    own.into_iter().filter(has_none).collect()
}

/// The chunks in which most pages that should merge have no partner: no other page of their group is in any chunk, or
/// merged. `chunks` are ascending for each process.
fn chunks_without_partners(
    census: &Census,
    index: &PageIndex,
    chunks: &BTreeMap<ProcessId, Vec<AddressRange>>,
) -> Vec<(ProcessId, Vec<AddressRange>)> {
    let of = |subject: &SubjectCensus| chunks.get(&subject.process.id).map_or(&[][..], Vec::as_slice);
    let pieces: Vec<&[AddressRange]> = census.subjects.iter().map(of).collect();
    let none = || pieces.iter().map(|pieces| pieces.iter().map(|_| AtomicU32::new(0)).collect()).collect();
    let (alone, others): (Vec<Vec<AtomicU32>>, Vec<Vec<AtomicU32>>) = (none(), none());
    let piece_at = |subject: usize, address: u64| {
        let at = pieces[subject].partition_point(|piece| piece.end <= address);
        pieces[subject].get(at).is_some_and(|piece| piece.start <= address).then_some((subject, at))
    };
    let domains = content_groups::domain_numbers(census.subjects.iter().map(|subject| &subject.domain));
    content_groups::fold_groups(index, &domains, |there: &mut Vec<(u32, (usize, usize))>, _, members| {
        there.clear();
        there.extend(members.iter().filter(|member| index.mark(member.ordinal).is_covered()).filter_map(|member| {
            let (.., address) = index.locate(member.ordinal)?;
            Some((member.first_page_of_frame, piece_at(member.subject, address)?))
        }));
        // Pages that share one frame since a fork count as one.
        let is_one = there.iter().all(|(frame, _)| *frame == there[0].0);
        let counts = if is_one && !members.iter().any(|member| member.merged) { &alone } else { &others };
        for &(_, (subject, at)) in there.iter() {
            counts[subject][at].fetch_add(1, Ordering::Relaxed);
        }
    });
    let count = |counts: &[Vec<AtomicU32>], (subject, at): (usize, usize)| counts[subject][at].load(Ordering::Relaxed);
    let most = |subject: usize| {
        let is_alone = |at: &usize| count(&alone, (subject, *at)) > count(&others, (subject, *at));
        if (0..pieces[subject].len()).any(|at| is_alone(&at)) {
            let is_zero = |ordinal: u32| {
                let mark = index.mark(ordinal);
                mark.is_covered() && mark.class() == Some(PageClass::Zero)
            };
            for (_, _, address) in each_page(index, &index.subject_ordinals(subject)).filter(|page| is_zero(page.1)) {
                if let Some((_, at)) = piece_at(subject, address) {
                    others[subject][at].fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        let pieces: Vec<AddressRange> =
            (0..pieces[subject].len()).filter(is_alone).map(|at| pieces[subject][at]).collect();
        (!pieces.is_empty()).then_some((census.subjects[subject].process.id, pieces))
    };
    (0..pieces.len()).filter_map(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE_BYTES: u64 = 4096;

    proptest! {
        /// Ranges return the recorded time of each page, and chunks agree with their pages one by one.
        #[test]
        fn stable_ranges_match_their_pages(
            pages in prop::collection::btree_map(0u64..4096, (0u32..3, 0u64..3), 0..300),
            planned in (0u64..2048, 1u64..2048),
            now in 2u64..6,
        ) {
            let page = |at: u64| AddressRange { start: at * PAGE_BYTES, end: (at + 1) * PAGE_BYTES };
            let mut seen = ProcessAges::default();
            for (&at, &(content, since)) in &pages {
                seen.push_page(page(at), content, since);
            }
            let told: Vec<_> = seen.pages(PAGE_BYTES).map(|(address, content, since)| (address / PAGE_BYTES, (content, since))).collect();
            prop_assert_eq!(told, pages.clone().into_iter().collect::<Vec<_>>());

            let range = AddressRange { start: planned.0 * PAGE_BYTES, end: (planned.0 + planned.1) * PAGE_BYTES };
            let young: Vec<AddressRange> = range
                .cut_at_multiples(PAGES_PER_CHUNK * PAGE_BYTES)
                .filter(|piece| {
                    let within = pages.range(piece.start / PAGE_BYTES..piece.end / PAGE_BYTES);
                    let ripe: Vec<bool> = within.map(|(_, &(_, since))| now - since >= 3).collect();
                    ripe.iter().filter(|ripe| **ripe).count() * 2 < ripe.len()
                })
                .collect();
            prop_assert_eq!(seen.unstable_chunks(range, PAGE_BYTES, now, 3), young);
        }
    }
}
