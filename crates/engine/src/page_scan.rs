//! Scan, the step of a merge that reads pages: finds zeros, fingerprints the other candidates that seem stable, and
//! records their contents in the index of the domain.

use crate::EngineState;
use crate::content_index::{ContentIndex, SightingTag};
use crate::memory;
use crate::merge_pass::{MergeTerms, unless_blocked};
use crate::parallel::{parallel, parallel_until};
use crate::run_selection::ScannedPage;
use crate::statistics::MergeCounters;
use crate::survey::CandidatePages;
use crate::write_exclusion::{PROTECTED_CHUNK_PAGES, WriteExclusion};
use pagefold_base::{AddressRange, Pages};
use pagefold_sys::fingerprint::{Hasher, is_all_zeros};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Parameters of a scan.
#[derive(Clone, Copy, Debug)]
struct PageScanTerms<'s> {
    page_bytes: u64,
    exclusion: &'s WriteExclusion<'s>,
    /// Whether to compare samples of pages with those of the last scan.
    compares_samples: bool,
}

/// Candidates that a thread has sifted, one chunk at a time.
#[derive(Debug)]
struct SiftedChunk {
    /// Range of the whole chunk.
    range: AddressRange,
    zeros: Vec<CandidatePages>,
    nonzero: Vec<CandidatePages>,
    /// Samples of all pages of `nonzero`, in order, if samples are compared.
    samples: Vec<u16>,
}

impl SiftedChunk {
    /// Separate zeros from other pages. A chunk that cannot be frozen is left to a later merge.
    fn sift(
        chunk: CandidatePages,
        hasher: &Hasher,
        PageScanTerms { page_bytes, exclusion, compares_samples }: PageScanTerms<'_>,
    ) -> Self {
        let mut sifted = Self { range: chunk.range, zeros: Vec::new(), nonzero: Vec::new(), samples: Vec::new() };
        let Ok(_frozen) = exclusion.freeze_to_read(chunk.range) else { return sifted };
        // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it meanwhile.
        let bytes = unsafe { memory::range_bytes(chunk.range) };
        for (candidate, bytes) in chunk.split_aligned(page_bytes).zip(bytes.chunks_exact(page_bytes as usize)) {
            if is_all_zeros(bytes) {
                candidate.append_to(&mut sifted.zeros);
            } else {
                candidate.append_to(&mut sifted.nonzero);
                sifted.samples.extend(compares_samples.then(|| hasher.fingerprint_sample(bytes)));
            }
        }
        sifted
    }
}

/// Candidates that were scanned, one chunk per thread at a time. Only the fingerprint and the content bits of each page
/// are kept, because heap memory that a merge allocates may stay with the program.
#[derive(Debug, Default)]
pub struct ScannedChunk {
    candidates: Vec<CandidatePages>,
    /// Of all their pages in order, 0 for zeros.
    fingerprints: Vec<u64>,
    content_bits: Vec<u16>,
}

impl ScannedChunk {
    /// Fingerprint the candidates in a range. All of the range is write-protected, since gaps between candidates are no
    /// reason to split a huge page.
    fn scan(
        candidates: &[CandidatePages],
        range: AddressRange,
        hasher: &Hasher,
        PageScanTerms { page_bytes, exclusion, compares_samples }: PageScanTerms<'_>,
    ) -> Self {
        let mut scanned = Self::default();
        let Ok(_frozen) = exclusion.freeze_to_read(range) else { return scanned };
        for &candidate in candidates {
            // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it
            // meanwhile.
            let bytes = unsafe { memory::range_bytes(candidate.range) };
            for bytes in bytes.chunks_exact(page_bytes as usize) {
                let fingerprint = hasher.fingerprint(bytes);
                scanned.content_bits.push(if compares_samples {
                    hasher.fingerprint_sample(bytes)
                } else {
                    fingerprint as u16
                });
                scanned.fingerprints.push(fingerprint);
            }
            scanned.candidates.push(candidate);
        }
        scanned
    }

    fn all_pages(&self, page_bytes: u64) -> impl Iterator<Item = (CandidatePages, u64)> + '_ {
        self.candidates
            .iter()
            .flat_map(move |candidate| candidate.split_aligned(page_bytes))
            .zip(self.fingerprints.iter().copied())
    }

    fn zero_pages(&self, page_bytes: u64) -> impl Iterator<Item = CandidatePages> + '_ {
        self.all_pages(page_bytes).filter(|&(_, fingerprint)| fingerprint == 0).map(|(page, _)| page)
    }

    fn nonzero_pages(&self, page_bytes: u64) -> impl Iterator<Item = (ScannedPage, u64)> + '_ {
        let pages =
            self.all_pages(page_bytes).zip(&self.content_bits).filter(|&((_, fingerprint), _)| fingerprint != 0);
        pages.map(|((page, fingerprint), &content)| {
            (ScannedPage { content_bits: content, ..page.first_page() }, fingerprint)
        })
    }
}

impl EngineState {
    /// Scan candidates until the deadline, new ones first. Returns pages of zeros, and other pages with their
    /// fingerprints, both by address. Zeros are found before any fingerprint is computed: ruling a page out takes only
    /// a few cache lines, and zeros save most.
    ///
    /// With a time limit, pages that have changed since the last scan are not fingerprinted: a page that is merged
    /// while it changes costs the program a fault and the engine repeated work. A sample tells whether a page changed:
    /// changes outside the sample go unnoticed until the page is merged and written.
    pub fn scan_candidates(
        &mut self,
        candidates: &[CandidatePages],
        deadline: Option<Instant>,
        MergeTerms { time_limit, threads, started_at: now, exclusion, .. }: MergeTerms<'_>,
        counters: &mut MergeCounters,
    ) -> (Vec<CandidatePages>, Vec<ScannedChunk>) {
        let (page_bytes, compares_samples) = (self.domain.page_bytes(), time_limit.is_some());
        let mut chunks = chunks_from_cursor(candidates, self.resume_address, PROTECTED_CHUNK_PAGES * page_bytes);
        let sizes = chunks.iter().map(|chunk| chunk.range.bytes().0 / page_bytes);
        let later_chunks = chunks.split_off(self.headroom.budget.count_chunks_that_fit(sizes).min(chunks.len()));
        let (scan_terms, hasher) = (PageScanTerms { page_bytes, exclusion, compares_samples }, &self.hasher);
        let sifted = parallel_until(deadline, threads, &chunks, |&chunk| SiftedChunk::sift(chunk, hasher, scan_terms));
        let unsifted = sifted.iter().position(Option::is_none).map(|index| chunks[index].range.start);
        let unsifted = unsifted.or(later_chunks.first().map(|chunk| chunk.range.start));
        let mut zeros: Vec<CandidatePages> =
            sifted.iter().flatten().flat_map(|sifted| &sifted.zeros).copied().collect();
        counters.pages_scanned += Pages(zeros.iter().map(|found| found.range.bytes().0 / page_bytes).sum());

        let nonzero = sifted.into_iter().flatten().map(|SiftedChunk { range, nonzero, samples, .. }| {
            (range, if compares_samples { self.keep_unchanged(nonzero, &samples, now, counters) } else { nonzero })
        });
        let nonzero: Vec<(AddressRange, Vec<CandidatePages>)> =
            nonzero.filter(|(_, candidates)| !candidates.is_empty()).collect();
        let hasher = &self.hasher;
        let scanned = parallel_until(deadline, threads, &nonzero, |(range, candidates)| {
            ScannedChunk::scan(candidates, *range, hasher, scan_terms)
        });
        let unscanned = scanned.iter().position(Option::is_none).map(|index| nonzero[index].0.start);
        let first_unreached = unscanned.or(unsifted);
        counters.incomplete_merges += u64::from(first_unreached.is_some());
        self.resume_address = first_unreached.unwrap_or(0);
        let mut scanned: Vec<ScannedChunk> = scanned.into_iter().flatten().collect();
        // Pages that became zeros between the two scans.
        zeros.extend(scanned.iter().flat_map(|scanned| scanned.zero_pages(page_bytes)));
        let fingerprinted: usize = scanned.iter().map(|scanned| scanned.fingerprints.len()).sum();
        counters.pages_scanned += Pages(fingerprinted as u64);
        zeros.sort_unstable_by_key(|found| found.range.start);
        scanned.sort_unstable_by_key(|scanned| scanned.candidates.first().map(|found| found.range.start));
        (zeros, scanned)
    }

    /// Keep the pages whose sample is the same as at the last scan. The other pages get no further work.
    fn keep_unchanged(
        &mut self,
        candidates: Vec<CandidatePages>,
        samples: &[u16],
        now: Duration,
        counters: &mut MergeCounters,
    ) -> Vec<CandidatePages> {
        let page_bytes = self.domain.page_bytes();
        let mut unchanged = Vec::new();
        for (candidate, &sample) in
            candidates.into_iter().flat_map(|pages| pages.split_aligned(page_bytes)).zip(samples)
        {
            if self.page_note(candidate.range.start).is_unchanged(sample) {
                candidate.append_to(&mut unchanged);
            } else {
                counters.pages_scanned += Pages(1);
                self.note_unpaired_scan(candidate.range.start, sample, now);
            }
        }
        unchanged
    }

    /// Record each content in the index. Pages for which there is no room are left out.
    pub fn record_contents(
        &mut self,
        scanned: &[ScannedChunk],
        threads: usize,
        counters: &mut MergeCounters,
    ) -> io::Result<Vec<ScannedPage>> {
        let page_bytes = self.domain.page_bytes();
        let count_missing = |index: &ContentIndex| {
            let pages = scanned.iter().flat_map(|scanned| scanned.nonzero_pages(page_bytes));
            pages.filter(|&(_, fingerprint)| index.find(fingerprint).is_none()).count()
        };
        let capacity =
            unless_blocked(self.domain.grow_index(count_missing, self.headroom.budget.index_bytes), counters)?;
        let capacity = capacity.unwrap_or_else(|| self.domain.index.free_capacity(self.domain.index.count_used()));
        let free_entries = AtomicUsize::new(capacity);
        let (index, tag, epoch) = (&self.domain.index, self.tag_number, self.domain.sighting_epoch());
        let record_page = |(page, fingerprint): (ScannedPage, u64)| {
            let reserve_entry =
                || free_entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| free.checked_sub(1)).is_ok();
            let entry = index
                .find(fingerprint)
                .or_else(|| reserve_entry().then(|| index.find_or_insert(fingerprint)).flatten())?;
            index.record_sighting(entry, SightingTag::new(tag, page.address), epoch);
            Some(ScannedPage { index_entry: entry, ..page })
        };
        let recorded = parallel(threads, scanned, |scanned| {
            scanned.nonzero_pages(page_bytes).map(record_page).collect::<Vec<_>>()
        });
        counters.pages_failed += Pages(recorded.iter().flatten().filter(|recorded| recorded.is_none()).count() as u64);
        Ok(recorded.into_iter().flatten().flatten().collect())
    }
}

/// Split candidates into chunks at multiples of `bytes`. New candidates come first. Within each kind, chunks behind the
/// cursor come first, where the last incomplete merge stopped.
fn chunks_from_cursor(candidates: &[CandidatePages], cursor: u64, bytes: u64) -> Vec<CandidatePages> {
    let mut chunks: Vec<CandidatePages> =
        candidates.iter().flat_map(|candidate| candidate.split_aligned(bytes)).collect();
    let reached_count = chunks.partition_point(|chunk| chunk.range.end <= cursor);
    chunks.rotate_left(reached_count);
    chunks.sort_by_key(|chunk| !chunk.is_new);
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(start: u64, end: u64, new: bool) -> CandidatePages {
        CandidatePages { range: AddressRange { start, end }, is_huge: false, is_new: new }
    }

    #[test]
    fn new_candidates_are_first_and_chunks_are_aligned() {
        let pages = [candidates(0x1000, 0x5000, false), candidates(0x5000, 0x9000, true)];
        let ranges: Vec<(u64, u64)> =
            chunks_from_cursor(&pages, 0, 0x4000).iter().map(|chunk| (chunk.range.start, chunk.range.end)).collect();
        assert_eq!(ranges, [(0x5000, 0x8000), (0x8000, 0x9000), (0x1000, 0x4000), (0x4000, 0x5000)]);
    }

    #[test]
    fn incomplete_merges_visit_all_equally_often() {
        for chunks_per_merge in 1..4 {
            let mut visits = [0; 6];
            let mut cursor = 0;
            for merge in 0..60 {
                // The known state of pages changes between merges, and with it the starts of chunks.
                let pages: Vec<CandidatePages> = (0..6)
                    .map(|number| candidates(number * 0x4000 + merge % 2 * 0x1000, (number + 1) * 0x4000, false))
                    .collect();
                let chunks = chunks_from_cursor(&pages, cursor, 0x4000);
                chunks[..chunks_per_merge].iter().for_each(|chunk| visits[chunk.range.start as usize / 0x4000] += 1);
                cursor = chunks[chunks_per_merge].range.start;
            }
            assert_eq!(visits, [10 * chunks_per_merge; 6]);
        }
    }
}
