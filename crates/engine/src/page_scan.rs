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
    page: u64,
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
    others: Vec<CandidatePages>,
    /// Samples of all pages of `others`, in order, if samples are compared.
    samples: Vec<u16>,
}

impl SiftedChunk {
    /// Separate zeros from other pages. A chunk that cannot be frozen is left to a later merge.
    fn sift(
        chunk: CandidatePages,
        hasher: &Hasher,
        PageScanTerms { page, exclusion, compares_samples }: PageScanTerms<'_>,
    ) -> Self {
        let mut sifted = Self { range: chunk.range, zeros: Vec::new(), others: Vec::new(), samples: Vec::new() };
        let Ok(_still) = exclusion.freeze_to_read(chunk.range) else { return sifted };
        // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it meanwhile.
        let bytes = unsafe { memory::range_bytes(chunk.range) };
        for (found, bytes) in chunk.split_aligned(page).zip(bytes.chunks_exact(page as usize)) {
            if is_all_zeros(bytes) {
                found.append_to(&mut sifted.zeros);
            } else {
                found.append_to(&mut sifted.others);
                sifted.samples.extend(compares_samples.then(|| hasher.fingerprint_sample(bytes)));
            }
        }
        sifted
    }
}

/// Candidates that were scanned, one chunk per thread at a time. Only the fingerprint and the note bits of each page
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
        found: &[CandidatePages],
        range: AddressRange,
        hasher: &Hasher,
        PageScanTerms { page, exclusion, compares_samples }: PageScanTerms<'_>,
    ) -> Self {
        let mut scanned = Self::default();
        let Ok(_still) = exclusion.freeze_to_read(range) else { return scanned };
        for &found in found {
            // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it
            // meanwhile.
            let bytes = unsafe { memory::range_bytes(found.range) };
            for bytes in bytes.chunks_exact(page as usize) {
                let fingerprint = hasher.fingerprint(bytes);
                scanned.content_bits.push(if compares_samples {
                    hasher.fingerprint_sample(bytes)
                } else {
                    fingerprint as u16
                });
                scanned.fingerprints.push(fingerprint);
            }
            scanned.candidates.push(found);
        }
        scanned
    }

    fn all_pages(&self, page: u64) -> impl Iterator<Item = (CandidatePages, u64)> + '_ {
        self.candidates.iter().flat_map(move |found| found.split_aligned(page)).zip(self.fingerprints.iter().copied())
    }

    fn zero_pages(&self, page: u64) -> impl Iterator<Item = CandidatePages> + '_ {
        self.all_pages(page).filter(|&(_, fingerprint)| fingerprint == 0).map(|(found, _)| found)
    }

    fn nonzero_pages(&self, page: u64) -> impl Iterator<Item = (ScannedPage, u64)> + '_ {
        let pages = self.all_pages(page).zip(&self.content_bits).filter(|&((_, fingerprint), _)| fingerprint != 0);
        pages.map(|((found, fingerprint), &content)| {
            (ScannedPage { content_bits: content, ..found.first_page() }, fingerprint)
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
        merged: &mut MergeCounters,
    ) -> (Vec<CandidatePages>, Vec<ScannedChunk>) {
        let (page, compares_samples) = (self.domain.page_bytes(), time_limit.is_some());
        let mut chunks = chunks_from_cursor(candidates, self.resume_address, PROTECTED_CHUNK_PAGES * page);
        let sizes = chunks.iter().map(|chunk| chunk.range.bytes().0 / page);
        let beyond = chunks.split_off(self.headroom.budget.count_chunks_that_fit(sizes).min(chunks.len()));
        let (scan_terms, hasher) = (PageScanTerms { page, exclusion, compares_samples }, &self.hasher);
        let sifted = parallel_until(deadline, threads, &chunks, |&chunk| SiftedChunk::sift(chunk, hasher, scan_terms));
        let unsifted = sifted.iter().position(Option::is_none).map(|at| chunks[at].range.start);
        let unsifted = unsifted.or(beyond.first().map(|chunk| chunk.range.start));
        let mut zeros: Vec<CandidatePages> =
            sifted.iter().flatten().flat_map(|sifted| &sifted.zeros).copied().collect();
        merged.pages_scanned += Pages(zeros.iter().map(|found| found.range.bytes().0 / page).sum());

        let others = sifted.into_iter().flatten().map(|SiftedChunk { range, others, samples, .. }| {
            (range, if compares_samples { self.keep_unchanged(others, &samples, now, merged) } else { others })
        });
        let others: Vec<(AddressRange, Vec<CandidatePages>)> = others.filter(|(_, found)| !found.is_empty()).collect();
        let hasher = &self.hasher;
        let scanned = parallel_until(deadline, threads, &others, |(range, found)| {
            ScannedChunk::scan(found, *range, hasher, scan_terms)
        });
        let unscanned = scanned.iter().position(Option::is_none).map(|at| others[at].0.start);
        let unreached = unscanned.or(unsifted);
        merged.incomplete_merges += u64::from(unreached.is_some());
        self.resume_address = unreached.unwrap_or(0);
        let mut scanned: Vec<ScannedChunk> = scanned.into_iter().flatten().collect();
        // Pages that became zeros between the two scans.
        zeros.extend(scanned.iter().flat_map(|scanned| scanned.zero_pages(page)));
        let fingerprinted: usize = scanned.iter().map(|scanned| scanned.fingerprints.len()).sum();
        merged.pages_scanned += Pages(fingerprinted as u64);
        zeros.sort_unstable_by_key(|found| found.range.start);
        scanned.sort_unstable_by_key(|scanned| scanned.candidates.first().map(|found| found.range.start));
        (zeros, scanned)
    }

    /// Keep the pages whose sample is the same as at the last scan. The other pages get no further work.
    fn keep_unchanged(
        &mut self,
        found: Vec<CandidatePages>,
        samples: &[u16],
        now: Duration,
        merged: &mut MergeCounters,
    ) -> Vec<CandidatePages> {
        let page = self.domain.page_bytes();
        let mut unchanged = Vec::new();
        for (found, &sample) in found.into_iter().flat_map(|found| found.split_aligned(page)).zip(samples) {
            if self.page_note(found.range.start).is_unchanged(sample) {
                found.append_to(&mut unchanged);
            } else {
                merged.pages_scanned += Pages(1);
                self.note_unpaired_scan(found.range.start, sample, now);
            }
        }
        unchanged
    }

    /// Record each content in the index. Pages for which there is no room are left out.
    pub fn record_contents(
        &mut self,
        scanned: &[ScannedChunk],
        threads: usize,
        merged: &mut MergeCounters,
    ) -> io::Result<Vec<ScannedPage>> {
        let page = self.domain.page_bytes();
        let missing = |index: &ContentIndex| {
            let others = scanned.iter().flat_map(|scanned| scanned.nonzero_pages(page));
            others.filter(|&(_, fingerprint)| index.find(fingerprint).is_none()).count()
        };
        let capacity = unless_blocked(self.domain.grow_index(missing, self.headroom.budget.index_bytes), merged)?;
        let capacity = capacity.unwrap_or_else(|| self.domain.index.free_capacity(self.domain.index.count_used()));
        let free_entries = AtomicUsize::new(capacity);
        let (index, tag, epoch) = (&self.domain.index, self.tag_number, self.domain.sighting_epoch());
        let record = |(found, fingerprint): (ScannedPage, u64)| {
            let has_room =
                || free_entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            let entry =
                index.find(fingerprint).or_else(|| has_room().then(|| index.find_or_insert(fingerprint)).flatten())?;
            index.record_sighting(entry, SightingTag::new(tag, found.address), epoch);
            Some(ScannedPage { index_entry: entry, ..found })
        };
        let recorded =
            parallel(threads, scanned, |scanned| scanned.nonzero_pages(page).map(record).collect::<Vec<_>>());
        merged.pages_failed += Pages(recorded.iter().flatten().filter(|page| page.is_none()).count() as u64);
        Ok(recorded.into_iter().flatten().flatten().collect())
    }
}

/// Split candidates into chunks at multiples of `bytes`. New candidates come first. Within each kind, chunks behind the
/// cursor come first, where the last incomplete merge stopped.
fn chunks_from_cursor(candidates: &[CandidatePages], cursor: u64, bytes: u64) -> Vec<CandidatePages> {
    let mut chunks: Vec<CandidatePages> = candidates.iter().flat_map(|found| found.split_aligned(bytes)).collect();
    let reached = chunks.partition_point(|chunk| chunk.range.end <= cursor);
    chunks.rotate_left(reached);
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
        let found = [candidates(0x1000, 0x5000, false), candidates(0x5000, 0x9000, true)];
        let ranges: Vec<(u64, u64)> =
            chunks_from_cursor(&found, 0, 0x4000).iter().map(|chunk| (chunk.range.start, chunk.range.end)).collect();
        assert_eq!(ranges, [(0x5000, 0x8000), (0x8000, 0x9000), (0x1000, 0x4000), (0x4000, 0x5000)]);
    }

    #[test]
    fn incomplete_merges_visit_all_equally_often() {
        for each in 1..4 {
            let mut seen = [0; 6];
            let mut cursor = 0;
            for merge in 0..60 {
                // The known state of pages changes between merges, and with it the starts of chunks.
                let found: Vec<CandidatePages> =
                    (0..6).map(|at| candidates(at * 0x4000 + merge % 2 * 0x1000, (at + 1) * 0x4000, false)).collect();
                let chunks = chunks_from_cursor(&found, cursor, 0x4000);
                chunks[..each].iter().for_each(|chunk| seen[chunk.range.start as usize / 0x4000] += 1);
                cursor = chunks[each].range.start;
            }
            assert_eq!(seen, [10 * each; 6]);
        }
    }
}
