//! One merge: survey, heal, scan, decide, store, map, tidy.
//!
//! | step | work |
//! |---|---|
//! | survey | from page tables: resident ordinary memory, merged pages, pages written since |
//! | heal | COW-broken pages become ordinary memory again, so that their slots can be freed |
//! | scan | find zeros, then fingerprint candidates that seem stable, on all threads; record the fingerprints |
//! | decide | choose profitable runs of pages with a partner, by the costs and the code of guided planning |
//! | store | write contents that were seen twice and are not stored yet, in memory order |
//! | map | for each run: refer, check, compare, exchange |
//! | tidy | drop references that are no longer needed; free slots that no process refers to |
//!
//! A run becomes one mapping if its pages are also adjacent in the store. Contents are stored in the order of their
//! pages, so memory that is equal over many pages is one mapping in all members. Exceptions are pages that differ, and
//! contents that members divided among themselves because they merged at the same time. Storing and mapping work in
//! batches.

use crate::content_index::{ContentIndex, SightingTag};
use crate::decide::merge_turn::{MergeTurn, SafePoint};
use crate::decide::page_note::PageNote;
use crate::decide::time_budget::WorkRound;
use crate::domain::LOCK_TIMEOUT;
use crate::file_limits::is_out_of_space;
use crate::huge_page_split::{self, SplittableHugePages};
use crate::incarnation::is_files_removed;
use crate::memory;
use crate::run_selection::{
    ScannedPage, SlotPlacement, StoreRun, build_runs, choose_runs, find_partners, huge_page_number, map_run,
    take_runs_that_fit,
};
use crate::slot_references::SlotSet;
use crate::statistics::MergeCounters;
use crate::survey::{ALL_ADDRESSES, CandidatePages, MemorySurvey, mapped_slots};
use crate::windows::is_complete_merge;
use crate::write_exclusion::{PROMISED_CHUNK_PAGES, PROTECTED_CHUNK_PAGES, WriteExclusion};
use crate::{EngineOptions, EngineState, merge_clock, status_file};
use pagefold_base::engine::PageTally;
use pagefold_base::{AddressRange, Bytes, Pages};
use pagefold_sys::fault;
use pagefold_sys::fingerprint::{Hasher, is_all_zeros};
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pages that are stored and mapped before the next batch. The kernel serializes writes to a file (`inode_lock` in
/// mm/shmem.c, 6.18): meanwhile other members map stored contents.
pub const MAX_BATCH_PAGES: usize = 2048;

/// Runs with a mean length below this are mapped by one thread.
const SHORT_RUN_PAGES: usize = 16;

/// Contents that are stored at a time. Contents that another member stores at the same time are stored for nothing.
const CONTENTS_PER_STORE_CHUNK: usize = 64;

/// A merge begins only if the available time is this many times the duration of the last survey. Otherwise small merges
/// would spend the time budget on surveys alone. For a merge together with other members, half as much is enough.
const MIN_TIME_IN_SURVEYS: u32 = 4;

/// Maximum time to wait for pages that the kernel is migrating.
const MIGRATION_WAIT: Duration = Duration::from_millis(50);

/// References are rebuilt once an eighth of them, and at least this many, are not needed.
const MIN_UNNEEDED_REFERENCES: u64 = 64;

/// Parameters of one merge.
#[derive(Clone, Copy, Debug)]
pub struct MergeTerms<'s> {
    /// Time limit of this merge, if there is one.
    pub time_limit: Option<Duration>,
    threads: usize,
    /// When it began, by the clock that members share.
    started_at: Duration,
    exclusion: &'s WriteExclusion<'s>,
    /// Bound on the slowdown that the loss of huge pages must fit into, if there is one.
    huge_page_loss_bound: Option<f64>,
}

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
        PageScanTerms { page, exclusion: stillness, compares_samples: sparing }: PageScanTerms<'_>,
    ) -> Self {
        let mut sifted = Self { range: chunk.range, zeros: Vec::new(), others: Vec::new(), samples: Vec::new() };
        let Ok(_still) = stillness.freeze_to_read(chunk.range) else { return sifted };
        // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it meanwhile.
        let bytes = unsafe { memory::range_bytes(chunk.range) };
        for (found, bytes) in chunk.split_aligned(page).zip(bytes.chunks_exact(page as usize)) {
            if is_all_zeros(bytes) {
                found.append_to(&mut sifted.zeros);
            } else {
                found.append_to(&mut sifted.others);
                sifted.samples.extend(sparing.then(|| hasher.fingerprint_sample(bytes)));
            }
        }
        sifted
    }
}

/// Candidates that were scanned, one chunk per thread at a time. Only the fingerprint and the note bits of each page
/// are kept, because heap memory that a merge allocates may stay with the program.
#[derive(Debug, Default)]
struct ScannedChunk {
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
        PageScanTerms { page, exclusion: stillness, compares_samples: sparing }: PageScanTerms<'_>,
    ) -> Self {
        let mut looked = Self::default();
        let Ok(_still) = stillness.freeze_to_read(range) else { return looked };
        for &found in found {
            // SAFETY: the survey found it to be resident ordinary memory, and no thread writes to or unmaps it
            // meanwhile.
            let bytes = unsafe { memory::range_bytes(found.range) };
            for bytes in bytes.chunks_exact(page as usize) {
                let fingerprint = hasher.fingerprint(bytes);
                looked.content_bits.push(if sparing { hasher.fingerprint_sample(bytes) } else { fingerprint as u16 });
                looked.fingerprints.push(fingerprint);
            }
            looked.candidates.push(found);
        }
        looked
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

/// A content to store: its order, a page that contains it, and the slot reserved for it.
#[derive(Clone, Copy, Debug)]
struct ContentToStore {
    order: u32,
    source_page: ScannedPage,
    reserved_slot: u32,
}

impl ContentToStore {
    /// Whether the content is stored in its reserved slot.
    fn is_in_reserved_slot(&self, slot: Option<u32>) -> bool {
        slot == Some(self.reserved_slot)
    }
}

impl EngineState {
    /// Merge identical pages now.
    pub fn merge_now(
        &mut self,
        options: &EngineOptions,
        directory: &Path,
        exclusion: &WriteExclusion<'_>,
    ) -> io::Result<MergeCounters> {
        let (began, now) = (Instant::now(), merge_clock());
        let lost = self.split_ledger.take_expected_loss(self.started.elapsed(), self.total_tally().pages);
        self.time_budget.spend(lost);
        let room = self.available_time(Bytes::ZERO);
        let mut merged = MergeCounters::default();
        self.merge_count += 1;
        if !std::mem::take(&mut self.is_turn_granted) && !self.is_merge_due(now, exclusion, Bytes::ZERO) {
            merged.incomplete_merges = 1;
            self.totals += merged;
            return Ok(merged);
        }
        let patience = began + room.map_or(LOCK_TIMEOUT, |room| room.min(LOCK_TIMEOUT));
        if !self.domain.is_intact()
            && unless_blocked(self.rejoin_domain(directory, patience), &mut merged)?.is_none()
            && merged.blocked_merges > 0
        {
            merged.program_time = began.elapsed();
            self.time_budget.spend(merged.program_time);
            self.totals += merged;
            return Ok(merged);
        }
        self.domain.set_lock_deadline(patience);
        let (known, cursor) = (std::mem::take(&mut self.promising_pages), self.resume_address);
        self.newly_adopted = Bytes::ZERO;
        let huge_bound = options.max_slowdown.filter(|_| !options.split_huge_pages);
        let terms = MergeTerms {
            time_limit: room,
            threads: options.threads.max(1),
            started_at: now,
            exclusion,
            huge_page_loss_bound: huge_bound,
        };
        let done = self.merge_in_windows(terms, &mut merged);
        merged.program_time = began.elapsed();
        let faults = |pages: Pages, each: Duration| each.mul_f64(pages.0 as f64);
        let faults = faults(merged.cow_breaks, self.fault_costs.after_merge_write)
            + faults(merged.zeros_read, self.fault_costs.after_free_read);
        let cost = merged.program_time + faults;
        self.time_budget.spend(cost);
        let page = self.domain.page_bytes();
        let round = merged.to_work_round(page);
        let found = done.as_ref().ok().copied().flatten();
        let whole = is_complete_merge(found.is_some(), round.is_complete, cursor, self.resume_address);
        let promising = known + found.unwrap_or_default();
        self.round_backoff.record_round(
            WorkRound { time_spent: cost, is_complete: whole, ..round },
            now,
            Bytes(promising.0 * page),
        );
        self.totals += merged;
        self.last_merge = Some(status_file::time_since_boot());
        self.publish_status(options);
        done.map(|_| merged)
    }

    /// Whether to merge now. Without a bound: always. With a bound: if the time budget allows it and the merge may be
    /// profitable, or together with other members that may wait for this one. `to_be_adopted` bytes will be adopted
    /// before the merge.
    pub fn is_merge_due(&mut self, now: Duration, exclusion: &WriteExclusion<'_>, to_be_adopted: Bytes) -> bool {
        let Some(room) = self.available_time(to_be_adopted) else { return true };
        let (roomy, able) =
            (room > self.survey_time * MIN_TIME_IN_SURVEYS, room > self.survey_time * (MIN_TIME_IN_SURVEYS / 2));
        if exclusion.userfault().is_some() {
            return roomy;
        }
        let ready = roomy && self.round_backoff.is_expired(now, self.promising_bytes(to_be_adopted));
        let named = self.domain.next_merge_time();
        let before = self.last_safe_point.replace(now);
        let point = SafePoint {
            now,
            previous: before,
            proposed_merge_time: named,
            last_merge_time: self.last_merge_time,
            is_only_member: self.domain.is_only_member(),
            can_merge_profitably: ready,
            can_merge: able,
        };
        if point.is_due() {
            self.last_merge_time = named;
        }
        match point.decide() {
            MergeTurn::Merge => true,
            MergeTurn::ProposeTime(moment) => {
                self.domain.propose_merge_time(named, moment);
                false
            }
            MergeTurn::Continue => false,
        }
    }

    /// Time available for a merge now, if it is bounded.
    fn available_time(&self, to_be_adopted: Bytes) -> Option<Duration> {
        self.time_budget
            .available(self.started.elapsed(), self.round_backoff.expects_profit(self.promising_bytes(to_be_adopted)))
    }

    /// Memory that may make the next merge profitable although the last one could not merge it, including
    /// `to_be_adopted`.
    fn promising_bytes(&self, to_be_adopted: Bytes) -> Bytes {
        Bytes(self.promising_pages.0 * self.domain.page_bytes()) + self.newly_adopted + to_be_adopted
    }

    /// Returns the number of pages without a note.
    pub fn merge_with_terms(&mut self, terms: MergeTerms<'_>, merged: &mut MergeCounters) -> io::Result<Pages> {
        let MergeTerms {
            time_limit: room,
            threads,
            started_at: now,
            exclusion: stillness,
            huge_page_loss_bound: huge_bound,
        } = terms;
        let page = self.domain.page_bytes();
        let began = Instant::now();
        let patience = room.map_or(MIGRATION_WAIT, |room| MIGRATION_WAIT.min(room / MIN_TIME_IN_SURVEYS));
        let mut survey = MemorySurvey::take(&mut self.regions, &self.domain, (now, patience), merged)?;
        self.survey_time = began.elapsed();
        // The other half of the remaining time is for storing and mapping.
        let deadline = room.map(|room| Instant::now() + room.saturating_sub(self.survey_time) / 2);
        survey.exclude_unprotectable(stillness, merged, page);
        let (healed, is_partial) = self.restore_in_batches(&survey, stillness, deadline);
        fault::point("after healing");
        let new = survey.count_new_pages(page);
        let (zeros, looked) = self.scan_candidates(&survey.candidates, deadline, terms, merged);
        merged.incomplete_merges = merged.incomplete_merges.max(u64::from(is_partial));
        // New pages are scanned first.
        self.promising_pages += new - new.min(merged.pages_scanned);
        let pages = self.record_contents(&looked, threads, merged)?;
        drop(looked);

        let (partners, places, wanted) = find_partners(&self.domain, &pages);
        let others = merged.backed_off + Pages(survey.store_pages);
        let resident = huge_page_split::count_resident(&survey.candidates, others, page);
        let limit = huge_bound.map(|bound| self.split_ledger.splittable_pages(bound, resident));
        let splits = SplittableHugePages::choose(&zeros, &partners, page, limit);
        let mut split = HashSet::new();
        for together in zeros.chunk_by(|found, next| found.shares_huge_page_with(next, page)) {
            let zeros: Vec<ScannedPage> =
                together.iter().flat_map(|found| found.split_aligned(page)).map(|one| one.first_page()).collect();
            let worth = |at: usize| splits.allows(&zeros[at], page).then_some(page as i64);
            let chosen = choose_runs(&zeros, |_| true, worth, &split, page, usize::MAX);
            self.note_unpaired(&zeros, chosen.iter().flat_map(|run| &zeros[run.clone()]), now);
            merged.unprofitable += Pages((zeros.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
            let runs = chosen.into_iter().map(|run| StoreRun { pages: &zeros[run], first_slot: 0 }.range(page));
            for range in runs.flat_map(|run| stillness.chunks(run, page)) {
                let pages = Pages(range.bytes().0 / page);
                if free_zeros(range, stillness).is_ok_and(|done| done) {
                    merged.zeros_freed += pages;
                    split.extend(huge_page_number(range.start, page)..=huge_page_number(range.end - page, page));
                    merged.unlikely_to_last += self.record_merge(range, now, |tally| &mut tally.zeros);
                } else {
                    merged.pages_failed += pages;
                }
            }
        }
        fault::point("after giving zeros back");

        let follows = |at: usize| places[at].is_adjacent_after(places[at - 1]);
        // Each of two pages that share a content to be stored saves half of it.
        let gives_back =
            |at: usize| if matches!(places[at], SlotPlacement::Stored(_)) { page as i64 } else { page as i64 / 2 };
        let worth = |at: usize| splits.allows(&partners[at], page).then(|| gives_back(at));
        let chosen = choose_runs(&partners, follows, worth, &split, page, survey.mapping_headroom(healed.len()));
        self.note_unpaired(&pages, chosen.iter().flat_map(|range| &partners[range.clone()]), now);
        merged.unprofitable += Pages((partners.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
        let at_once = match stillness.userfault() {
            None => MAX_BATCH_PAGES.div_ceil(threads).min(PROMISED_CHUNK_PAGES as usize),
            Some(_) => PROTECTED_CHUNK_PAGES as usize,
        };
        // Members that merge together have the same contents to store: each begins at a different batch.
        let most = self.batch_pages();
        let mut batches = split_into_batches(&chosen, most);
        let elsewhere = self.tag_number % batches.len().max(1) as u64;
        batches.rotate_left(elsewhere as usize);
        // A run that is split between batches becomes one mapping again.
        let cuts = batches.iter().map(Vec::len).sum::<usize>() - chosen.len();
        let mut room = survey.mapping_headroom(healed.len()) + cuts;
        let contents = self.reserve_slots(&partners, &places, &batches, wanted, merged)?;
        let mut stored = vec![None; wanted as usize];
        let mut counted = HashSet::new();
        for (batch, contents) in batches.iter().zip(&contents) {
            let all: usize = batch.iter().map(Range::len).sum();
            if room == 0 {
                merged.unprofitable += Pages(all as u64);
                continue;
            }
            // No member finds contents that are stored through a replaced index. If memory is short, other processes
            // may have taken what was available.
            let needed = Bytes(contents.len() as u64 * page);
            let fits = most == MAX_BATCH_PAGES || self.headroom.can_members_take(needed, self.domain.member_count());
            if !self.domain.has_present_index() || !fits {
                merged.pages_failed += Pages(all as u64);
                continue;
            }
            if limit.is_some() && stillness.userfault().is_some() {
                // Write-protecting a part of a huge page splits it, whether or not that part is merged then.
                self.split_ledger.record_splits(
                    batch.iter().flat_map(|range| &partners[range.clone()]),
                    page,
                    &mut counted,
                );
            }
            self.store_contents(contents, stillness, &mut stored);
            let own = contents.iter().filter(|content| content.is_in_reserved_slot(stored[content.order as usize]));
            merged.contents_stored += Pages(own.count() as u64);
            let runs = build_runs(&partners, &places, batch, &stored, at_once);
            let (taken, mappings) = take_runs_that_fit(&runs, room, page);
            room -= mappings;
            let pages = |runs: &[StoreRun]| Pages(runs.iter().map(|run| run.pages.len() as u64).sum());
            let too_many = pages(&runs[taken.len()..]);
            merged.unprofitable += too_many;
            let before = merged.pages_merged;
            let outcomes = parallel(mapping_threads(threads, taken), taken, |run| {
                map_run(&self.domain, run, stillness).is_ok_and(|done| done)
            });
            for (run, _) in taken.iter().zip(outcomes).filter(|&(_, done)| done) {
                merged.pages_merged += Pages(run.pages.len() as u64);
                merged.runs_mapped += 1;
                if limit.is_some() {
                    self.split_ledger.record_splits(run.pages.iter(), page, &mut counted);
                }
                merged.unlikely_to_last += self.record_merge(run.range(page), now, |tally| &mut tally.merged);
            }
            merged.pages_failed += Pages(all as u64) - too_many - (merged.pages_merged - before);
        }
        fault::point("after mapping");
        let healed: u64 = healed.iter().map(|range| range.bytes().0 / page).sum();
        // Some of the healed pages mapped a former store.
        self.release_unneeded((survey.store_pages + merged.pages_merged.0).saturating_sub(healed), stillness, merged)?;
        Ok(new)
    }

    /// Scan candidates until the deadline, new ones first. Returns pages of zeros, and other pages with their
    /// fingerprints, both by address. Zeros are found before any fingerprint is computed: ruling a page out takes only
    /// a few cache lines, and zeros save most.
    ///
    /// With a time limit, pages that have changed since the last scan are not fingerprinted: a page that is merged
    /// while it changes costs the program a fault and the engine repeated work. A sample tells whether a page changed:
    /// changes outside the sample go unnoticed until the page is merged and written.
    fn scan_candidates(
        &mut self,
        candidates: &[CandidatePages],
        deadline: Option<Instant>,
        MergeTerms { time_limit: room, threads, started_at: now, exclusion: stillness, .. }: MergeTerms<'_>,
        merged: &mut MergeCounters,
    ) -> (Vec<CandidatePages>, Vec<ScannedChunk>) {
        let (page, sparing) = (self.domain.page_bytes(), room.is_some());
        let mut chunks = chunks_from_cursor(candidates, self.resume_address, PROTECTED_CHUNK_PAGES * page);
        let sizes = chunks.iter().map(|chunk| chunk.range.bytes().0 / page);
        let beyond = chunks.split_off(self.headroom.budget.count_chunks_that_fit(sizes).min(chunks.len()));
        let (looks, hasher) = (PageScanTerms { page, exclusion: stillness, compares_samples: sparing }, &self.hasher);
        let sifted = parallel_until(deadline, threads, &chunks, |&chunk| SiftedChunk::sift(chunk, hasher, looks));
        let unsifted = sifted.iter().position(Option::is_none).map(|at| chunks[at].range.start);
        let unsifted = unsifted.or(beyond.first().map(|chunk| chunk.range.start));
        let mut zeros: Vec<CandidatePages> =
            sifted.iter().flatten().flat_map(|sifted| &sifted.zeros).copied().collect();
        merged.pages_scanned += Pages(zeros.iter().map(|found| found.range.bytes().0 / page).sum());

        let others = sifted.into_iter().flatten().map(|SiftedChunk { range, others, samples, .. }| {
            (range, if sparing { self.keep_unchanged(others, &samples, now, merged) } else { others })
        });
        let others: Vec<(AddressRange, Vec<CandidatePages>)> = others.filter(|(_, found)| !found.is_empty()).collect();
        let hasher = &self.hasher;
        let looked = parallel_until(deadline, threads, &others, |(range, found)| {
            ScannedChunk::scan(found, *range, hasher, looks)
        });
        let unseen = looked.iter().position(Option::is_none).map(|at| others[at].0.start);
        let unreached = unseen.or(unsifted);
        merged.incomplete_merges += u64::from(unreached.is_some());
        self.resume_address = unreached.unwrap_or(0);
        let mut looked: Vec<ScannedChunk> = looked.into_iter().flatten().collect();
        // Pages that became zeros between the two scans.
        zeros.extend(looked.iter().flat_map(|looked| looked.zero_pages(page)));
        let seen: usize = looked.iter().map(|looked| looked.fingerprints.len()).sum();
        merged.pages_scanned += Pages(seen as u64);
        zeros.sort_unstable_by_key(|found| found.range.start);
        looked.sort_unstable_by_key(|looked| looked.candidates.first().map(|found| found.range.start));
        (zeros, looked)
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
        let mut settled = Vec::new();
        for (found, &sample) in found.into_iter().flat_map(|found| found.split_aligned(page)).zip(samples) {
            if self.page_note(found.range.start).is_unchanged(sample) {
                found.append_to(&mut settled);
            } else {
                merged.pages_scanned += Pages(1);
                self.note_unpaired_scan(found.range.start, sample, now);
            }
        }
        settled
    }

    /// Record each content in the index. Pages for which there is no room are left out.
    fn record_contents(
        &mut self,
        looked: &[ScannedChunk],
        threads: usize,
        merged: &mut MergeCounters,
    ) -> io::Result<Vec<ScannedPage>> {
        let page = self.domain.page_bytes();
        let missing = |index: &ContentIndex| {
            let others = looked.iter().flat_map(|looked| looked.nonzero_pages(page));
            others.filter(|&(_, fingerprint)| index.find(fingerprint).is_none()).count()
        };
        let room = unless_blocked(self.domain.grow_index(missing, self.headroom.budget.index_bytes), merged)?;
        let room =
            AtomicUsize::new(room.unwrap_or_else(|| self.domain.index.free_capacity(self.domain.index.count_used())));
        let (index, random, epoch) = (&self.domain.index, self.tag_number, self.domain.sighting_epoch());
        let sight = |(found, fingerprint): (ScannedPage, u64)| {
            let has_room =
                || room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
            let entry =
                index.find(fingerprint).or_else(|| has_room().then(|| index.find_or_insert(fingerprint)).flatten())?;
            index.record_sighting(entry, SightingTag::new(random, found.address), epoch);
            Some(ScannedPage { index_entry: entry, ..found })
        };
        let sighted = parallel(threads, looked, |looked| looked.nonzero_pages(page).map(sight).collect::<Vec<_>>());
        merged.pages_failed += Pages(sighted.iter().flatten().filter(|page| page.is_none()).count() as u64);
        Ok(sighted.into_iter().flatten().flatten().collect())
    }

    /// The contents to store of each batch, with slots in the same order, contiguous like the contents. If there are
    /// too few slots, the last contents are left out.
    fn reserve_slots(
        &self,
        partners: &[ScannedPage],
        placements: &[SlotPlacement],
        batches: &[Vec<Range<usize>>],
        slot_count: u32,
        merged: &mut MergeCounters,
    ) -> io::Result<Vec<Vec<ContentToStore>>> {
        // The first page of each content: later pages with the same order number have the same content.
        let mut seen = vec![false; slot_count as usize];
        let mut first = |at: usize| match placements[at] {
            SlotPlacement::ToStore(order) if !std::mem::replace(&mut seen[order as usize], true) => {
                Some((order, partners[at]))
            }
            _ => None,
        };
        let first = |batch: &Vec<Range<usize>>| batch.iter().cloned().flatten().filter_map(&mut first).collect();
        let contents: Vec<Vec<(u32, ScannedPage)>> = batches.iter().map(first).collect();
        let count = seen.iter().filter(|&&seen| seen).count() as u32;
        let reserved = match count {
            0 => Vec::new(),
            count => unless_blocked(self.domain.reserve_slots(count), merged)?.unwrap_or_default(),
        };
        let mut reserved = reserved.into_iter().flatten();
        let slots: Vec<Option<u32>> = seen.into_iter().map(|seen| seen.then(|| reserved.next()).flatten()).collect();
        let with_slot = |(order, from): (u32, ScannedPage)| {
            Some(ContentToStore { order, source_page: from, reserved_slot: slots[order as usize]? })
        };
        Ok(contents.into_iter().map(|batch| batch.into_iter().filter_map(with_slot).collect()).collect())
    }

    /// Store contents, and record the slot of each, by its order number. Chunks are stored in order, so that contents
    /// stay adjacent. If another member has stored a chunk meanwhile, this member continues at a random position in the
    /// rest.
    fn store_contents(&self, contents: &[ContentToStore], exclusion: &WriteExclusion<'_>, stored: &mut [Option<u32>]) {
        let page = self.domain.page_bytes();
        let behind = |a: &ContentToStore, b: &ContentToStore| {
            a.source_page.address + page == b.source_page.address && a.reserved_slot + 1 == b.reserved_slot
        };
        let pieces: Vec<&[ContentToStore]> =
            contents.chunk_by(behind).flat_map(|piece| piece.chunks(CONTENTS_PER_STORE_CHUNK)).collect();
        // Random numbers of this member (D. Knuth's MMIX generator, TAOCP 3.3.4); otherwise all members would continue
        // at the same chunk.
        let mut draw = self.tag_number;
        let mut elsewhere = |among: usize| {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (draw >> 33) as usize % among.max(1)
        };
        let mut left = vec![&pieces[..]];
        while let Some(pieces) = left.pop() {
            let Some((piece, rest)) = pieces.split_first() else { continue };
            let slots = self.store_chunk(piece, exclusion);
            let alone =
                piece.iter().zip(&slots).all(|(content, &slot)| slot.is_none() || content.is_in_reserved_slot(slot));
            for (content, slot) in piece.iter().zip(slots) {
                stored[content.order as usize] = slot;
            }
            let (later, next) = rest.split_at(if alone { 0 } else { elsewhere(rest.len()) });
            left.extend([later, next]);
        }
    }

    /// Store adjacent contents, unless all of them are stored already. Returns the slot of each content.
    fn store_chunk(&self, chunk: &[ContentToStore], exclusion: &WriteExclusion<'_>) -> Vec<Option<u32>> {
        let (page, index) = (self.domain.page_bytes(), &self.domain.index);
        let lies = |content: &ContentToStore| index.state(content.source_page.index_entry).mappable_slot().map(Some);
        if let Some(slots) = chunk.iter().map(lies).collect() {
            return slots;
        }
        let start = chunk[0].source_page.address;
        let range = AddressRange { start, end: start + chunk.len() as u64 * page };
        let Ok(still) = exclusion.freeze_to_read(range) else { return vec![None; chunk.len()] };
        // SAFETY: these pages were scanned, so they are resident, and no thread writes to or unmaps them meanwhile.
        let bytes = unsafe { memory::range_bytes(range) };
        // They may have been written since the scan, unless the caller promised otherwise.
        let same = |(content, bytes): (&ContentToStore, &[u8])| {
            self.hasher.fingerprint(bytes) == index.fingerprint(content.source_page.index_entry)
        };
        let unchanged =
            still.is_unchanged_since_scan() || chunk.iter().zip(bytes.chunks_exact(page as usize)).all(same);
        if !unchanged || self.domain.store.write_slots(chunk[0].reserved_slot, bytes).is_err() {
            return vec![None; chunk.len()];
        }
        drop(still);
        fault::point("between storing and publishing");
        let slots: Vec<_> = chunk
            .iter()
            .map(|content| index.publish(content.source_page.index_entry, content.reserved_slot).ok())
            .collect();
        // If another member stored a content meanwhile, the copy in this member's slot is useless, and no index entry
        // names it. Free its memory now if possible; its slot becomes free when the references are rebuilt.
        let told: Vec<(u32, bool)> = chunk
            .iter()
            .zip(&slots)
            .map(|(content, &slot)| (content.reserved_slot, content.is_in_reserved_slot(slot)))
            .collect();
        for vain in told.chunk_by(|a, b| a.1 == b.1).filter(|same| !same[0].1) {
            let first = vain[0].0;
            let _ = self.domain.store.punch_slots(first..first + vain.len() as u32);
        }
        slots
    }

    /// Release unneeded references and slots. `mapped` pages map the store now.
    fn release_unneeded(
        &mut self,
        mapped: u64,
        exclusion: &WriteExclusion<'_>,
        merged: &mut MergeCounters,
    ) -> io::Result<()> {
        if self.domain.references.count() > mapped + mapped / 8 + MIN_UNNEEDED_REFERENCES {
            let mut slots = SlotSet::default();
            slots.extend(mapped_slots(&self.domain, ALL_ADDRESSES)?);
            let mut strays = SlotSet::default();
            // While the program runs, disowned memory may move from a range not yet read to one already read.
            let stay = |slot: &u32| slots.contains(*slot) || exclusion.userfault().is_some();
            strays.extend(self.disowned_slots.iter().filter(stay));
            slots.extend(strays.iter());
            if unless_blocked(self.domain.replace_references(slots.iter()), merged)?.is_some() {
                self.disowned_slots = strays;
            }
        }
        if self.domain.count_merge() {
            unless_blocked(self.domain.collect_unreferenced_slots(), merged)?;
        }
        Ok(())
    }

    /// Note the pages without a partner, or without a profitable one.
    fn note_unpaired<'p>(
        &mut self,
        pages: &[ScannedPage],
        chosen: impl Iterator<Item = &'p ScannedPage>,
        now: Duration,
    ) {
        let mut chosen = chosen.map(|page| page.address).peekable();
        for found in pages {
            if chosen.next_if_eq(&found.address).is_none() {
                self.note_unpaired_scan(found.address, found.content_bits, now);
            }
        }
    }

    /// The note on a page of some region; the survey has sorted the regions.
    fn page_note(&mut self, address: u64) -> &mut PageNote {
        let at = self.regions.partition_point(|region| region.range().end <= address);
        self.regions[at].page_note(address)
    }

    /// Note that a page was scanned and found no partner.
    fn note_unpaired_scan(&mut self, address: u64, content: u16, now: Duration) {
        let note = self.page_note(address);
        note.record_unpaired_scan(now, content);
        let promising = note.needs_rescan();
        self.promising_pages += Pages(u64::from(promising));
    }

    /// Note that a range was merged, and add it to `counter`. Returns how many of its pages are not expected to last.
    fn record_merge(&mut self, range: AddressRange, now: Duration, counter: fn(&mut PageTally) -> &mut Pages) -> Pages {
        // The survey has sorted the regions.
        let first = self.regions.partition_point(|region| region.range().end <= range.start);
        let parts = self.regions[first..].iter_mut().map_while(|region| Some((region.range().overlap(range)?, region)));
        parts.map(|(part, region)| region.record_merge(part, now, counter)).sum()
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

/// Split the chosen ranges into batches of at most `max_pages` pages.
fn split_into_batches(chosen: &[Range<usize>], max_pages: usize) -> Vec<Vec<Range<usize>>> {
    let parts = |range: &Range<usize>| {
        let end = range.end;
        range.clone().step_by(max_pages).map(move |start| start..end.min(start + max_pages))
    };
    let mut batches: Vec<Vec<Range<usize>>> = Vec::new();
    let mut room = 0;
    for part in chosen.iter().flat_map(parts) {
        if part.len() > room {
            batches.push(Vec::new());
            room = max_pages;
        }
        room -= part.len();
        batches.last_mut().expect("one was just made").push(part);
    }
    batches
}

/// Turn a failure into `None` if a later merge can retry the step: another member held the domain's lock for too long,
/// files of the domain were removed, or there is no space. The merge continues with steps that need none of these.
fn unless_blocked<T>(done: io::Result<T>, merged: &mut MergeCounters) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::TimedOut || is_files_removed(&error) => {
            merged.blocked_merges = 1;
            Ok(None)
        }
        Err(error) if is_out_of_space(&error) => Ok(None),
        done => done.map(Some),
    }
}

/// Number of threads for mapping runs: one for short runs. The kernel lets one thread at a time change the mappings of
/// a process, and a short run needs little other work: two threads mapped single pages at 0.10 GB/s, one at 0.21.
fn mapping_threads(threads: usize, runs: &[StoreRun<'_>]) -> usize {
    let pages: usize = runs.iter().map(|run| run.pages.len()).sum();
    if pages < runs.len() * SHORT_RUN_PAGES { 1 } else { threads }
}

/// Free zeros, if they are still zeros.
fn free_zeros(range: AddressRange, exclusion: &WriteExclusion<'_>) -> io::Result<bool> {
    let still = exclusion.freeze_to_replace(range)?;
    // SAFETY: these pages were scanned, so they are resident, and no thread writes to or unmaps them meanwhile.
    let zeros = still.is_unchanged_since_scan() || is_all_zeros(unsafe { memory::range_bytes(range) });
    if zeros {
        // SAFETY: it is ordinary memory, contains zeros, and no thread writes to it meanwhile.
        unsafe { memory::free_zero_pages(range) }?;
    }
    Ok(zeros)
}

/// Like [`parallel`], but after the deadline only the first item is begun: so each merge makes some progress, however
/// little time there is.
fn parallel_until<T: Sync, R: Send>(
    deadline: Option<Instant>,
    threads: usize,
    items: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<Option<R>> {
    let over = || deadline.is_some_and(|deadline| Instant::now() >= deadline);
    let is_first = |item: &T| items.first().is_some_and(|first| std::ptr::eq(first, item));
    parallel(threads, items, |item| (is_first(item) || !over()).then(|| work(item)))
}

/// Apply `work` to each item on `threads` threads. The results are in the order of the items.
fn parallel<T: Sync, R: Send>(threads: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    if threads <= 1 || items.len() <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { return done };
            done.push((at, work(item)));
        }
    };
    let mut done: Vec<(usize, R)> = std::thread::scope(|scope| {
        // If no more threads can be created, fewer do the work.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, worker).ok();
        let workers: Vec<_> = (1..threads.min(items.len())).map_while(spawn).collect();
        let mut done = worker();
        for worker in workers {
            match worker.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|&(at, _)| at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_keep_order_and_size_limit() {
        let chosen = [0..10, 20..20 + MAX_BATCH_PAGES - 10, 5000..5001, 6000..6000 + 2 * MAX_BATCH_PAGES + 7];
        let batches = split_into_batches(&chosen, MAX_BATCH_PAGES);
        let pages = |batch: &Vec<Range<usize>>| batch.iter().map(Range::len).sum::<usize>();
        assert_eq!(
            batches.iter().map(pages).collect::<Vec<_>>(),
            [MAX_BATCH_PAGES, 1, MAX_BATCH_PAGES, MAX_BATCH_PAGES, 7]
        );
        let small = super::split_into_batches(&chosen, 8);
        assert_eq!(small.iter().map(pages).max(), Some(8));
        for batches in [batches, small] {
            let flat: Vec<usize> = batches.concat().into_iter().flatten().collect();
            assert_eq!(flat, chosen.iter().cloned().flatten().collect::<Vec<_>>());
        }
        assert!(split_into_batches(&[], MAX_BATCH_PAGES).is_empty());
    }

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

    #[test]
    fn short_runs_use_one_mapping_thread() {
        let pages: Vec<ScannedPage> = (0..64).map(|at| ScannedPage::unscanned(at * 4096, false)).collect();
        let threads = |each: usize| {
            let runs: Vec<StoreRun<'_>> = pages.chunks(each).map(|pages| StoreRun { pages, first_slot: 0 }).collect();
            mapping_threads(2, &runs)
        };
        assert_eq!([1, 4, 15, 16, 64].map(threads), [1, 1, 1, 2, 2]);
        assert_eq!(mapping_threads(1, &[StoreRun { pages: &pages, first_slot: 0 }]), 1);
    }

    #[test]
    fn first_item_is_done_even_without_time() {
        let over = Some(Instant::now());
        for threads in [1, 2] {
            assert_eq!(parallel_until(over, threads, &[3, 4, 5], |&item| item), [Some(3), None, None]);
            assert_eq!(parallel_until(None, threads, &[3, 4], |&item| item), [Some(3), Some(4)]);
        }
    }
}
