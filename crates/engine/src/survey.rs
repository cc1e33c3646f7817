//! The survey, first step of a merge, which reads only page tables; and healing, which restores COW-broken pages.

use crate::adopted_region::AdoptedRegion;
use crate::decide::page_note::PageNote;
use crate::domain::JoinedDomain;
use crate::memory::ReplacementMemory;
use crate::own_mappings::{self, OwnMappingKind};
use crate::run_selection::{ScannedPage, huge_page_number};
use crate::statistics::MergeCounters;
use crate::write_exclusion::WriteExclusion;
use pagefold_base::merge_lifetime::min_profitable_lifetime;
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::pagemap;
use std::io;
use std::time::{Duration, Instant};

/// A merge may use this many eighths of the mappings that a process may have (`vm.max_map_count`).
const MAX_USED_MAPPING_EIGHTHS: u64 = 6;

/// `vm.max_map_count` if it cannot be read (include/linux/mm.h, DEFAULT_MAX_MAP_COUNT).
const DEFAULT_MAX_MAP_COUNT: u64 = 65_530;

/// Maximum number of merges for copying a former store, if memory and time are plenty.
const MAX_MERGES_TO_DRAIN_STORE: u64 = 16;

/// Result of a survey.
#[derive(Debug, Default)]
pub struct MemorySurvey {
    /// Ranges of regions, each within one mapping, that may contain any of the following.
    pub mapped_ranges: Vec<AddressRange>,
    /// Resident ordinary memory that may be scanned, ascending.
    pub candidates: Vec<CandidatePages>,
    /// Pages that were merged and written since, in mappings made by a merge.
    pub cow_broken: Vec<AddressRange>,
    /// Resident pages of a former store, in mappings made by a merge.
    pub in_former_store: Vec<AddressRange>,
    /// Pages of this process that map the store, inside and outside of regions.
    pub store_pages: u64,
    /// Number of mappings of this process.
    pub mapping_count: u64,
}

/// Pages that may be scanned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CandidatePages {
    pub range: AddressRange,
    /// Whether they are part of huge pages.
    pub is_huge: bool,
    /// Whether the engine has no note on them.
    pub is_new: bool,
}

impl CandidatePages {
    /// Whether `other` follows directly and is of the same kind.
    fn is_directly_before(&self, other: &Self) -> bool {
        self.range.end == other.range.start && (self.is_huge, self.is_new) == (other.is_huge, other.is_new)
    }

    /// Whether `next` must be decided together with these pages: it follows directly, or is in the same huge page,
    /// which is split only once.
    pub fn shares_huge_page_with(&self, next: &Self, page_bytes: u64) -> bool {
        let is_same_huge_page = || {
            huge_page_number(self.range.end - page_bytes, page_bytes) == huge_page_number(next.range.start, page_bytes)
        };
        self.range.end == next.range.start || self.is_huge && next.is_huge && is_same_huge_page()
    }

    /// The first of these pages.
    pub fn first_page(&self) -> ScannedPage {
        ScannedPage::unscanned(self.range.start, self.is_huge)
    }

    /// Split at the multiples of `bytes`.
    pub fn split_aligned(self, bytes: u64) -> impl Iterator<Item = Self> {
        self.range.cut_at_multiples(bytes).map(move |range| Self { range, ..self })
    }

    /// Append to `candidates`, joining the last one if possible.
    pub fn append_to(self, candidates: &mut Vec<Self>) {
        match candidates.last_mut() {
            Some(last) if last.is_directly_before(&self) => last.range.end = self.range.end,
            _ => candidates.push(self),
        }
    }
}

impl MemorySurvey {
    /// Number of pages without a note.
    pub fn count_new_pages(&self, page_bytes: u64) -> Pages {
        Pages(
            self.candidates
                .iter()
                .filter(|candidate| candidate.is_new)
                .map(|candidate| candidate.range.bytes().0 / page_bytes)
                .sum(),
        )
    }

    /// Survey all regions, and sort them by address. Waits at most `migration_wait` in total for pages that the kernel
    /// is migrating.
    ///
    /// # Errors
    /// Those of reading `/proc/thread-self/maps` and `pagemap`.
    pub fn take(
        regions: &mut [AdoptedRegion],
        domain: &JoinedDomain,
        (now, migration_wait): (Duration, Duration),
        counters: &mut MergeCounters,
    ) -> io::Result<Self> {
        let page_bytes = domain.page_bytes();
        let (mappings, mapping_count) = own_mappings::read_own_mappings(domain.store.identity(), page_bytes)?;
        let mut pagemap = pagemap::OwnPagemap::open(migration_wait)?;
        let min_lifetime = min_profitable_lifetime(page_bytes);
        let store_pages = mappings
            .iter()
            .filter(|mapping| mapping.kind.has_slots())
            .map(|mapping| mapping.range.bytes().0 / page_bytes)
            .sum();
        let mut survey = Self { mapping_count, store_pages, ..Self::default() };
        regions.sort_by_key(|region| region.range().start);
        for region in regions {
            let times = SurveyTimes { now, previous_survey: region.record_survey(now).unwrap_or(now), min_lifetime };
            region.reset_tally();
            let first = mappings.partition_point(|mapping| mapping.range.end <= region.range().start);
            for mapping in &mappings[first..] {
                let Some(overlap) = mapping.range.overlap(region.range()) else { break };
                survey.mapped_ranges.push(overlap);
                let mapped_ranges = pagemap.scan_mapped(overlap.start..overlap.end, mapping.kind.range_contents())?;
                for mapped in &mapped_ranges {
                    let range = AddressRange { start: mapped.start, end: mapped.end };
                    let addresses = (range.start..range.end).step_by(page_bytes as usize);
                    match mapping.kind {
                        // Swapped pages are not brought back for this; guard regions look the same.
                        OwnMappingKind::Stored { .. } if mapped.swapped => {}
                        OwnMappingKind::Stored { first_slot: None, is_as_merged: true } if mapped.file => {
                            survey.in_former_store.push(range)
                        }
                        OwnMappingKind::Stored { .. } if mapped.file => {}
                        OwnMappingKind::Stored { is_as_merged, .. } => {
                            for address in addresses {
                                // A page that cannot be healed is found at each survey, but counts as broken once.
                                record_written_page(region.page_note(address), times, counters);
                            }
                            if is_as_merged {
                                survey.cow_broken.push(range);
                            }
                        }
                        OwnMappingKind::Ordinary if mapped.file || mapped.swapped => {}
                        OwnMappingKind::Ordinary if mapped.zero_page => {
                            // One fault for each huge page of zeros.
                            let fault_address =
                                |address| if mapped.huge { huge_page_number(address, page_bytes) } else { address };
                            let faults =
                                addresses.filter(|&address| region.page_note(address).read()).map(fault_address);
                            let mut faults: Vec<u64> = faults.collect();
                            faults.dedup();
                            counters.zeros_read += Pages(faults.len() as u64);
                        }
                        OwnMappingKind::Ordinary => {
                            for address in addresses {
                                let note = region.page_note(address);
                                // If it was freed as zeros.
                                record_written_page(note, times, counters);
                                if !note.may_merge(now) {
                                    counters.backed_off += Pages(1);
                                    continue;
                                }
                                let range = AddressRange { start: address, end: address + page_bytes };
                                let candidate =
                                    CandidatePages { range, is_huge: mapped.huge, is_new: note.is_unscanned() };
                                candidate.append_to(&mut survey.candidates);
                            }
                        }
                    }
                }
                region.tally_range(overlap, mapping.kind, &mapped_ranges, now);
            }
            let allowed_parts = |&candidate: &CandidatePages| {
                candidate
                    .range
                    .subtract(region.unmergeable())
                    .into_iter()
                    .map(move |range| CandidatePages { range, ..candidate })
            };
            if !region.unmergeable().is_empty() {
                survey.candidates = survey.candidates.iter().flat_map(allowed_parts).collect();
            }
        }
        Ok(survey)
    }

    /// Leave out memory that cannot be write-protected. Whole ranges are registered, so that no mapping is split at
    /// more places than the regions' ends.
    pub fn exclude_unprotectable(
        &mut self,
        exclusion: &WriteExclusion<'_>,
        counters: &mut MergeCounters,
        page_bytes: u64,
    ) {
        let Some(userfault) = exclusion.userfault() else { return };
        let refused: Vec<AddressRange> = self
            .mapped_ranges
            .iter()
            .copied()
            .filter(|part| userfault.register(part.start..part.end).is_err())
            .collect();
        let mut is_protectable = |range: AddressRange| {
            let is_protectable = !refused.iter().any(|part| part.overlap(range).is_some());
            counters.pages_failed += Pages(if is_protectable { 0 } else { range.bytes().0 / page_bytes });
            is_protectable
        };
        self.cow_broken.retain(|&range| is_protectable(range));
        self.in_former_store.retain(|&range| is_protectable(range));
        self.candidates.retain(|candidate| is_protectable(candidate.range));
    }

    /// Copy pages that were written since they were merged into ordinary memory, at most `max_pages` at a time: the
    /// copy and the original both use memory until one replaces the other. Each `max_pages` of them need the permission
    /// of `may_use_memory`. The first refusal ends the copying, and so does the deadline, except before the first
    /// chunk. Returns the copied ranges, and whether the copying ended early. Pages that would need too many mappings
    /// stay as they are, too.
    pub fn restore_cow_broken(
        &self,
        exclusion: &WriteExclusion<'_>,
        (page_bytes, max_pages): (u64, u64),
        deadline: Option<Instant>,
        may_use_memory: impl FnMut(Bytes) -> bool,
    ) -> (Vec<AddressRange>, bool) {
        let total_pages = self.cow_broken.iter().map(|range| range.bytes().0 / page_bytes).sum();
        let mut permission =
            CopyPermission { page_bytes, max_pages, remaining_pages: total_pages, granted_pages: 0, may_use_memory };
        let (mut is_first, mut ended_early) = (true, false);
        let mut may_copy = |chunk: &AddressRange| {
            let is_expired = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            ended_early = !std::mem::take(&mut is_first) && is_expired || !permission.covers(chunk);
            !ended_early
        };
        let chunks = self.cow_broken.iter().flat_map(|&range| copy_chunks(range, exclusion, page_bytes, max_pages));
        let permitted = chunks.take(self.mapping_headroom(0)).take_while(|chunk| may_copy(chunk));
        let healed = permitted.filter(|chunk| copy_to_ordinary(*chunk, exclusion)).collect();
        (healed, ended_early)
    }

    /// Copy pages of a former store into ordinary memory, which frees that store. Each merge copies a part of them, so
    /// that they can merge again meanwhile. Each `max_pages` of them need the permission of `may_use_memory`. Returns
    /// the copied ranges. `added_mappings` is the number of mappings added before.
    pub fn drain_former_store(
        &self,
        exclusion: &WriteExclusion<'_>,
        (page_bytes, max_pages): (u64, u64),
        added_mappings: usize,
        may_use_memory: impl FnMut(Bytes) -> bool,
    ) -> Vec<AddressRange> {
        let total_pages: u64 = self.in_former_store.iter().map(|range| range.bytes().0 / page_bytes).sum();
        let remaining_pages = max_pages.max(total_pages / MAX_MERGES_TO_DRAIN_STORE);
        let mut permission =
            CopyPermission { page_bytes, max_pages, remaining_pages, granted_pages: 0, may_use_memory };
        let chunks =
            self.in_former_store.iter().flat_map(|&range| copy_chunks(range, exclusion, page_bytes, max_pages));
        let permitted = chunks.take(self.mapping_headroom(added_mappings)).take_while(|chunk| permission.covers(chunk));
        permitted.filter(|chunk| copy_to_ordinary(*chunk, exclusion)).collect()
    }

    /// Number of mappings that may still be created inside others, after `added_mappings` were.
    pub fn mapping_headroom(&self, added_mappings: usize) -> usize {
        let max_mappings = max_map_count() / 8 * MAX_USED_MAPPING_EIGHTHS;
        (max_mappings.saturating_sub(self.mapping_count + 2 * added_mappings as u64) / 2) as usize
    }
}

/// Permission to copy pages, requested for as many pages as may be copied at once: checking for free memory takes
/// longer than copying a page.
struct CopyPermission<F> {
    page_bytes: u64,
    max_pages: u64,
    /// Pages that may still be copied, and how many of them have permission.
    remaining_pages: u64,
    granted_pages: u64,
    may_use_memory: F,
}

impl<F: FnMut(Bytes) -> bool> CopyPermission<F> {
    /// Whether the permission covers a chunk, too.
    fn covers(&mut self, chunk: &AddressRange) -> bool {
        let pages = chunk.bytes().0 / self.page_bytes;
        if pages > self.remaining_pages {
            return false;
        }
        if pages > self.granted_pages {
            self.granted_pages = self.max_pages.min(self.remaining_pages);
            if !(self.may_use_memory)(Bytes(self.granted_pages * self.page_bytes)) {
                return false;
            }
        }
        (self.remaining_pages, self.granted_pages) = (self.remaining_pages - pages, self.granted_pages - pages);
        true
    }
}

/// Split a range into chunks of at most `max_pages` pages, each of which is copied at once.
fn copy_chunks(
    range: AddressRange,
    exclusion: &WriteExclusion<'_>,
    page_bytes: u64,
    max_pages: u64,
) -> impl Iterator<Item = AddressRange> + use<> {
    let bytes = page_bytes.saturating_mul(max_pages.max(1));
    exclusion.chunks(range, page_bytes).flat_map(move |part| part.cut_at_multiples(bytes))
}

/// Replace a range that maps a store by a copy in ordinary memory. Returns whether that succeeded.
fn copy_to_ordinary(range: AddressRange, exclusion: &WriteExclusion<'_>) -> bool {
    let Ok(_still) = exclusion.freeze_to_replace(range) else { return false };
    // SAFETY: the survey found it mapped readable and writable, and no thread writes to or unmaps it meanwhile.
    let copy = unsafe { ReplacementMemory::copy_range(range) };
    // SAFETY: the replacement is private memory with the same content.
    copy.and_then(|copy| unsafe { copy.replace_at(range.start) }).is_ok()
}

/// Times of this survey and of the previous one, and the minimum lifetime of a profitable merge.
#[derive(Clone, Copy)]
struct SurveyTimes {
    now: Duration,
    previous_survey: Duration,
    min_lifetime: Duration,
}

/// Note and count a page that was found written, if it was merged.
fn record_written_page(
    note: &mut PageNote,
    SurveyTimes { now, previous_survey, min_lifetime }: SurveyTimes,
    counters: &mut MergeCounters,
) {
    if note.is_merged() {
        let was_unlikely = note.is_unlikely_to_last();
        let short_lived = note.record_cow_break(now, previous_survey, min_lifetime);
        counters.cow_breaks += Pages(1);
        counters.early_cow_breaks += Pages(u64::from(short_lived && !was_unlikely));
    }
}

/// All addresses.
pub const ALL_ADDRESSES: AddressRange = AddressRange { start: 0, end: u64::MAX };

/// All slots that this process maps within a range, including mappings made by other code. Mappings that move meanwhile
/// may be missed.
///
/// # Errors
/// Those of reading `/proc/thread-self/maps`.
pub fn mapped_slots(domain: &JoinedDomain, within: AddressRange) -> io::Result<impl Iterator<Item = u32> + use<>> {
    let page_bytes = domain.page_bytes();
    let (mappings, _) = own_mappings::read_own_mappings(domain.store.identity(), page_bytes)?;
    Ok(mappings.into_iter().flat_map(move |mapping| match (mapping.kind, mapping.range.overlap(within)) {
        (OwnMappingKind::Stored { first_slot: Some(slot), .. }, Some(range)) => {
            let first = slot + ((range.start - mapping.range.start) / page_bytes) as u32;
            first..first + (range.bytes().0 / page_bytes) as u32
        }
        _ => 0..0,
    }))
}

/// `vm.max_map_count`.
fn max_map_count() -> u64 {
    let content = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    content.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_MAX_MAP_COUNT)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 4096;

    /// Pages from number `start` up to `end`, in a huge page or not.
    fn candidates(start: u64, end: u64, huge: bool) -> CandidatePages {
        CandidatePages {
            range: AddressRange { start: start * PAGE_BYTES, end: end * PAGE_BYTES },
            is_huge: huge,
            is_new: false,
        }
    }

    /// Heal every second one of `count` pages, with the given answers to permission requests. Returns the number of
    /// copied pages, whether it ended early, and the requested page counts.
    fn heal(count: u64, max_pages: u64, deadline: Option<Instant>, answers: &[bool]) -> (usize, bool, Vec<u64>) {
        let page_bytes = rustix::param::page_size() as u64;
        let memory = crate::memory::map_ordinary(count * page_bytes).expect("memory");
        let broken = memory.cut_at_multiples(page_bytes).step_by(2).collect();
        let survey = MemorySurvey { cow_broken: broken, ..MemorySurvey::default() };
        let claims = crate::claims::RangeClaims::default();
        let mut requests = Vec::new();
        let (healed, ended_early) = survey.restore_cow_broken(
            &WriteExclusion::promised(&claims),
            (page_bytes, max_pages),
            deadline,
            |needed| {
                requests.push(needed.0 / page_bytes);
                answers[requests.len() - 1]
            },
        );
        // SAFETY: it was mapped above, and no borrow of it exists.
        unsafe { crate::memory::unmap_range(memory) }.expect("its own");
        (healed.len(), ended_early, requests)
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
    fn split_and_appended_candidates_round_trip() {
        let original = [candidates(3, 9, false), candidates(9, 10, true), candidates(11, 12, true)];
        for bytes in [PAGE_BYTES, 4 * PAGE_BYTES, u64::MAX] {
            let mut joined = Vec::new();
            original
                .iter()
                .flat_map(|candidate| candidate.split_aligned(bytes))
                .for_each(|part| part.append_to(&mut joined));
            assert_eq!(joined, original, "ranges of different kinds, or with gaps, are not joined");
        }
        assert_eq!(
            candidates(3, 9, false).split_aligned(4 * PAGE_BYTES).collect::<Vec<_>>(),
            [candidates(3, 4, false), candidates(4, 8, false), candidates(8, 9, false)]
        );
    }

    #[test]
    fn candidates_in_one_huge_page_stay_together() {
        let shares = |first: CandidatePages, next: CandidatePages| first.shares_huge_page_with(&next, PAGE_BYTES);
        assert!(shares(candidates(0, 4, false), candidates(4, 5, true)), "it follows directly");
        assert!(shares(candidates(0, 4, true), candidates(511, 512, true)));
        assert!(!shares(candidates(0, 4, true), candidates(512, 513, true)), "it is in the next huge page");
        assert!(shares(candidates(0, 513, true), candidates(600, 601, true)), "it is in the last of two huge pages");
        assert!(!shares(candidates(0, 4, false), candidates(8, 9, false)), "it is in no huge page");
    }
}
