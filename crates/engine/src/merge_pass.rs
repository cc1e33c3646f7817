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

use crate::content_storing::ContentToStore;
use crate::decide::merge_turn::{MergeTurn, SafePoint};
use crate::decide::page_note::PageNote;
use crate::decide::time_budget::WorkRound;
use crate::domain::LOCK_TIMEOUT;
use crate::file_limits::is_out_of_space;
use crate::huge_page_split::{self, SplittableHugePages};
use crate::incarnation::is_files_removed;
use crate::memory;
use crate::parallel::parallel;
use crate::run_selection::{
    PartnerPages, ScannedPage, StoreRun, choose_runs, find_partners, huge_page_number, map_run, take_runs_that_fit,
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
use pagefold_sys::fingerprint::is_all_zeros;
use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pages that are stored and mapped before the next batch. The kernel serializes writes to a file (`inode_lock` in
/// mm/shmem.c, 6.18): meanwhile other members map stored contents.
pub const MAX_BATCH_PAGES: usize = 2048;

/// Runs with a mean length below this are mapped by one thread.
const SHORT_RUN_PAGES: usize = 16;

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
    pub threads: usize,
    /// When it began, by the clock that members share.
    pub started_at: Duration,
    pub exclusion: &'s WriteExclusion<'s>,
    /// Bound on the slowdown that the loss of huge pages must fit into, if there is one.
    pub huge_page_loss_bound: Option<f64>,
}

/// What the batches of a merge share.
#[derive(Debug)]
struct BatchProgress {
    /// Mappings that the process may still create.
    mapping_headroom: usize,
    /// Slot of each content to store, by its order, once it is stored.
    stored_slots: Vec<Option<u32>>,
    /// Huge pages whose split is recorded in the ledger.
    recorded_splits: HashSet<u64>,
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
        let split_loss = self.split_ledger.take_expected_loss(self.started.elapsed(), self.total_tally().pages);
        self.time_budget.spend(split_loss);
        let time_limit = self.available_time(Bytes::ZERO);
        let mut counters = MergeCounters::default();
        self.merge_count += 1;
        if !std::mem::take(&mut self.is_turn_granted) && !self.is_merge_due(now, exclusion, Bytes::ZERO) {
            counters.incomplete_merges = 1;
            self.totals += counters;
            return Ok(counters);
        }
        let lock_deadline = began + time_limit.map_or(LOCK_TIMEOUT, |limit| limit.min(LOCK_TIMEOUT));
        if !self.domain.is_intact()
            && unless_blocked(self.rejoin_domain(directory, lock_deadline), &mut counters)?.is_none()
            && counters.blocked_merges > 0
        {
            counters.program_time = began.elapsed();
            self.time_budget.spend(counters.program_time);
            self.totals += counters;
            return Ok(counters);
        }
        self.domain.set_lock_deadline(lock_deadline);
        let (old_promising_pages, cursor_before) = (std::mem::take(&mut self.promising_pages), self.resume_address);
        self.newly_adopted = Bytes::ZERO;
        let huge_page_loss_bound = options.max_slowdown.filter(|_| !options.split_huge_pages);
        let terms = MergeTerms {
            time_limit,
            threads: options.threads.max(1),
            started_at: now,
            exclusion,
            huge_page_loss_bound,
        };
        let result = self.merge_in_windows(terms, &mut counters);
        counters.program_time = began.elapsed();
        let fault_time = |pages: Pages, cost: Duration| cost.mul_f64(pages.0 as f64);
        let faults = fault_time(counters.cow_breaks, self.fault_costs.after_merge_write)
            + fault_time(counters.zeros_read, self.fault_costs.after_free_read);
        let cost = counters.program_time + faults;
        self.time_budget.spend(cost);
        let page_bytes = self.domain.page_bytes();
        let round = counters.to_work_round(page_bytes);
        let new_pages = result.as_ref().ok().copied().flatten();
        let is_complete = is_complete_merge(new_pages.is_some(), round.is_complete, cursor_before, self.resume_address);
        let promising_pages = old_promising_pages + new_pages.unwrap_or_default();
        self.round_backoff.record_round(
            WorkRound { time_spent: cost, is_complete, ..round },
            now,
            Bytes(promising_pages.0 * page_bytes),
        );
        self.totals += counters;
        self.last_merge = Some(status_file::time_since_boot());
        self.publish_status(options);
        result.map(|_| counters)
    }

    /// Whether to merge now. Without a bound: always. With a bound: if the time budget allows it and the merge may be
    /// profitable, or together with other members that may wait for this one. `to_be_adopted` bytes will be adopted
    /// before the merge.
    pub fn is_merge_due(&mut self, now: Duration, exclusion: &WriteExclusion<'_>, to_be_adopted: Bytes) -> bool {
        let Some(time) = self.available_time(to_be_adopted) else { return true };
        let (has_ample_time, can_merge) =
            (time > self.survey_time * MIN_TIME_IN_SURVEYS, time > self.survey_time * (MIN_TIME_IN_SURVEYS / 2));
        if exclusion.userfault().is_some() {
            return has_ample_time;
        }
        let can_merge_profitably =
            has_ample_time && self.round_backoff.is_expired(now, self.promising_bytes(to_be_adopted));
        let proposed_merge_time = self.domain.next_merge_time();
        let previous = self.last_safe_point.replace(now);
        let point = SafePoint {
            now,
            previous,
            proposed_merge_time,
            last_merge_time: self.last_merge_time,
            is_only_member: self.domain.is_only_member(),
            can_merge_profitably,
            can_merge,
        };
        if point.is_due() {
            self.last_merge_time = proposed_merge_time;
        }
        match point.decide() {
            MergeTurn::Merge => true,
            MergeTurn::ProposeTime(merge_time) => {
                self.domain.propose_merge_time(proposed_merge_time, merge_time);
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

    /// One merge of the candidates within the memory budget. Returns the number of pages without a note.
    pub fn merge_with_terms(&mut self, terms: MergeTerms<'_>, counters: &mut MergeCounters) -> io::Result<Pages> {
        let MergeTerms { time_limit, threads, started_at: now, exclusion, huge_page_loss_bound } = terms;
        let page_bytes = self.domain.page_bytes();
        let began = Instant::now();
        let migration_wait = time_limit.map_or(MIGRATION_WAIT, |limit| MIGRATION_WAIT.min(limit / MIN_TIME_IN_SURVEYS));
        let mut survey = MemorySurvey::take(&mut self.regions, &self.domain, (now, migration_wait), counters)?;
        self.survey_time = began.elapsed();
        // The other half of the remaining time is for storing and mapping.
        let deadline = time_limit.map(|limit| Instant::now() + limit.saturating_sub(self.survey_time) / 2);
        survey.exclude_unprotectable(exclusion, counters, page_bytes);
        let (healed, is_partial) = self.restore_in_batches(&survey, exclusion, deadline);
        fault::point("after restoring written pages");
        let new_pages = survey.count_new_pages(page_bytes);
        let (zeros, scanned) = self.scan_candidates(&survey.candidates, deadline, terms, counters);
        counters.incomplete_merges = counters.incomplete_merges.max(u64::from(is_partial));
        // New pages are scanned first.
        self.promising_pages += new_pages - new_pages.min(counters.pages_scanned);
        let pages = self.record_contents(&scanned, threads, counters)?;
        drop(scanned);

        let partners = find_partners(&self.domain, &pages);
        let other_pages = counters.backed_off + Pages(survey.store_pages);
        let resident = huge_page_split::count_resident(&survey.candidates, other_pages, page_bytes);
        let split_limit = huge_page_loss_bound.map(|bound| self.split_ledger.splittable_pages(bound, resident));
        let splittable = SplittableHugePages::choose(&zeros, &partners.pages, page_bytes, split_limit);
        let already_split = self.free_zeros(&zeros, &splittable, terms, counters);
        fault::point("after freeing zeros");
        let headroom = survey.mapping_headroom(healed.len());
        let chosen = partners.choose_runs(&splittable, &already_split, page_bytes, headroom);
        self.note_unpaired(&pages, chosen.iter().flat_map(|run| &partners.pages[run.clone()]), now);
        counters.unprofitable += Pages((partners.pages.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
        self.store_and_map(&partners, &chosen, headroom, terms, counters)?;
        fault::point("after mapping");
        let healed_pages: u64 = healed.iter().map(|range| range.bytes().0 / page_bytes).sum();
        // Some of the healed pages mapped a former store.
        let mapped_pages = (survey.store_pages + counters.pages_merged.0).saturating_sub(healed_pages);
        self.release_unneeded(mapped_pages, exclusion, counters)?;
        Ok(new_pages)
    }

    /// Free the zeros whose freeing is profitable. Returns the huge pages that this has split.
    fn free_zeros(
        &mut self,
        zeros: &[CandidatePages],
        splittable: &SplittableHugePages,
        MergeTerms { started_at: now, exclusion, .. }: MergeTerms<'_>,
        counters: &mut MergeCounters,
    ) -> HashSet<u64> {
        let page_bytes = self.domain.page_bytes();
        let mut split_huge_pages = HashSet::new();
        for group in zeros.chunk_by(|zeros, next| zeros.shares_huge_page_with(next, page_bytes)) {
            let zeros: Vec<ScannedPage> =
                group.iter().flat_map(|zeros| zeros.split_aligned(page_bytes)).map(|zero| zero.first_page()).collect();
            let net_gain = |index: usize| splittable.allows(&zeros[index], page_bytes).then_some(page_bytes as i64);
            let chosen = choose_runs(&zeros, |_| true, net_gain, &split_huge_pages, page_bytes, usize::MAX);
            self.note_unpaired(&zeros, chosen.iter().flat_map(|run| &zeros[run.clone()]), now);
            counters.unprofitable += Pages((zeros.len() - chosen.iter().map(Range::len).sum::<usize>()) as u64);
            let runs = chosen.into_iter().map(|run| StoreRun { pages: &zeros[run], first_slot: 0 }.range(page_bytes));
            for range in runs.flat_map(|run| exclusion.chunks(run, page_bytes)) {
                let pages = Pages(range.bytes().0 / page_bytes);
                if free_if_zeros(range, exclusion).is_ok_and(|is_freed| is_freed) {
                    counters.zeros_freed += pages;
                    split_huge_pages.extend(
                        huge_page_number(range.start, page_bytes)
                            ..=huge_page_number(range.end - page_bytes, page_bytes),
                    );
                    counters.unlikely_to_last += self.record_merge(range, now, |tally| &mut tally.zeros);
                } else {
                    counters.pages_failed += pages;
                }
            }
        }
        split_huge_pages
    }

    /// Store the contents of the chosen runs and map the runs, in batches. The kernel may create `mapping_headroom`
    /// further mappings.
    fn store_and_map(
        &mut self,
        partners: &PartnerPages,
        chosen: &[Range<usize>],
        mapping_headroom: usize,
        terms: MergeTerms<'_>,
        counters: &mut MergeCounters,
    ) -> io::Result<()> {
        // Members that merge together have the same contents to store: each begins at a different batch.
        let mut batches = split_into_batches(chosen, self.batch_pages());
        let first_batch = self.tag_number % batches.len().max(1) as u64;
        batches.rotate_left(first_batch as usize);
        // A run that is split between batches becomes one mapping again.
        let cuts = batches.iter().map(Vec::len).sum::<usize>() - chosen.len();
        let contents = self.reserve_slots(partners, &batches, counters)?;
        let mut progress = BatchProgress {
            mapping_headroom: mapping_headroom + cuts,
            stored_slots: vec![None; partners.content_count as usize],
            recorded_splits: HashSet::new(),
        };
        for (batch, contents) in batches.iter().zip(&contents) {
            let pages = Pages(batch.iter().map(Range::len).sum::<usize>() as u64);
            if progress.mapping_headroom == 0 {
                counters.unprofitable += pages;
            } else if !self.can_store(contents.len()) {
                counters.pages_failed += pages;
            } else {
                self.merge_batch(partners, batch, contents, &mut progress, terms, counters);
            }
        }
        Ok(())
    }

    /// Whether contents may be stored now. No member finds contents that are stored through a replaced index. If memory
    /// is short, other processes may have taken what was available.
    fn can_store(&mut self, contents: usize) -> bool {
        let needed = Bytes(contents as u64 * self.domain.page_bytes());
        let has_memory =
            self.batch_pages() == MAX_BATCH_PAGES || self.headroom.can_members_take(needed, self.domain.member_count());
        has_memory && self.domain.has_present_index()
    }

    /// Store the contents of one batch and map its runs.
    fn merge_batch(
        &mut self,
        partners: &PartnerPages,
        batch: &[Range<usize>],
        contents: &[ContentToStore],
        progress: &mut BatchProgress,
        MergeTerms { threads, started_at: now, exclusion, huge_page_loss_bound, .. }: MergeTerms<'_>,
        counters: &mut MergeCounters,
    ) {
        let page_bytes = self.domain.page_bytes();
        let is_loss_bounded = huge_page_loss_bound.is_some();
        if is_loss_bounded && exclusion.userfault().is_some() {
            // Write-protecting a part of a huge page splits it, whether or not that part is merged then.
            let pages = batch.iter().flat_map(|range| &partners.pages[range.clone()]);
            self.split_ledger.record_splits(pages, page_bytes, &mut progress.recorded_splits);
        }
        self.store_contents(contents, exclusion, &mut progress.stored_slots);
        let is_newly_stored =
            |content: &&ContentToStore| content.is_in_reserved_slot(progress.stored_slots[content.order as usize]);
        counters.contents_stored += Pages(contents.iter().filter(is_newly_stored).count() as u64);

        let max_run_pages = match exclusion.userfault() {
            None => MAX_BATCH_PAGES.div_ceil(threads).min(PROMISED_CHUNK_PAGES as usize),
            Some(_) => PROTECTED_CHUNK_PAGES as usize,
        };
        let runs = partners.build_runs(batch, &progress.stored_slots, max_run_pages);
        let (fitting_runs, mapping_count) = take_runs_that_fit(&runs, progress.mapping_headroom, page_bytes);
        progress.mapping_headroom -= mapping_count;
        let count_pages = |runs: &[StoreRun]| Pages(runs.iter().map(|run| run.pages.len() as u64).sum());
        let beyond_headroom = count_pages(&runs[fitting_runs.len()..]);
        counters.unprofitable += beyond_headroom;
        let merged_before = counters.pages_merged;
        let outcomes = parallel(mapping_threads(threads, fitting_runs), fitting_runs, |run| {
            map_run(&self.domain, run, exclusion).is_ok_and(|is_mapped| is_mapped)
        });
        for (run, _) in fitting_runs.iter().zip(outcomes).filter(|&(_, is_mapped)| is_mapped) {
            counters.pages_merged += Pages(run.pages.len() as u64);
            counters.runs_mapped += 1;
            if is_loss_bounded {
                self.split_ledger.record_splits(run.pages.iter(), page_bytes, &mut progress.recorded_splits);
            }
            counters.unlikely_to_last += self.record_merge(run.range(page_bytes), now, |tally| &mut tally.merged);
        }
        let pages = Pages(batch.iter().map(Range::len).sum::<usize>() as u64);
        counters.pages_failed += pages - beyond_headroom - (counters.pages_merged - merged_before);
    }

    /// Release unneeded references and slots. `mapped_pages` pages map the store now.
    fn release_unneeded(
        &mut self,
        mapped_pages: u64,
        exclusion: &WriteExclusion<'_>,
        counters: &mut MergeCounters,
    ) -> io::Result<()> {
        if self.domain.references.count() > mapped_pages + mapped_pages / 8 + MIN_UNNEEDED_REFERENCES {
            let mut slots = SlotSet::default();
            slots.extend(mapped_slots(&self.domain, ALL_ADDRESSES)?);
            let mut disowned = SlotSet::default();
            // While the program runs, disowned memory may move from a range not yet read to one already read.
            let may_be_mapped = |slot: &u32| slots.contains(*slot) || exclusion.userfault().is_some();
            disowned.extend(self.disowned_slots.iter().filter(may_be_mapped));
            slots.extend(disowned.iter());
            if unless_blocked(self.domain.replace_references(slots.iter()), counters)?.is_some() {
                self.disowned_slots = disowned;
            }
        }
        if self.domain.count_merge() {
            unless_blocked(self.domain.collect_unreferenced_slots(), counters)?;
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
        for page in pages {
            if chosen.next_if_eq(&page.address).is_none() {
                self.note_unpaired_scan(page.address, page.content_bits, now);
            }
        }
    }

    /// The note on a page of some region; the survey has sorted the regions.
    pub fn page_note(&mut self, address: u64) -> &mut PageNote {
        let index = self.regions.partition_point(|region| region.range().end <= address);
        self.regions[index].page_note(address)
    }

    /// Note that a page was scanned and found no partner.
    pub fn note_unpaired_scan(&mut self, address: u64, content: u16, now: Duration) {
        let note = self.page_note(address);
        note.record_unpaired_scan(now, content);
        let needs_rescan = note.needs_rescan();
        self.promising_pages += Pages(u64::from(needs_rescan));
    }

    /// Note that a range was merged, and add it to `counter`. Returns how many of its pages are not expected to last.
    fn record_merge(&mut self, range: AddressRange, now: Duration, counter: fn(&mut PageTally) -> &mut Pages) -> Pages {
        // The survey has sorted the regions.
        let first = self.regions.partition_point(|region| region.range().end <= range.start);
        let parts = self.regions[first..].iter_mut().map_while(|region| Some((region.range().overlap(range)?, region)));
        parts.map(|(part, region)| region.record_merge(part, now, counter)).sum()
    }
}

/// Split the chosen ranges into batches of at most `max_pages` pages.
fn split_into_batches(chosen: &[Range<usize>], max_pages: usize) -> Vec<Vec<Range<usize>>> {
    let split_range = |range: &Range<usize>| {
        let end = range.end;
        range.clone().step_by(max_pages).map(move |start| start..end.min(start + max_pages))
    };
    let mut batches: Vec<Vec<Range<usize>>> = Vec::new();
    let mut remaining_pages = 0;
    for part in chosen.iter().flat_map(split_range) {
        if part.len() > remaining_pages {
            batches.push(Vec::new());
            remaining_pages = max_pages;
        }
        remaining_pages -= part.len();
        batches.last_mut().expect("one was just made").push(part);
    }
    batches
}

/// Turn a failure into `None` if a later merge can retry the step: another member held the domain's lock for too long,
/// files of the domain were removed, or there is no space. The merge continues with steps that need none of these.
pub fn unless_blocked<T>(result: io::Result<T>, counters: &mut MergeCounters) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::TimedOut || is_files_removed(&error) => {
            counters.blocked_merges = 1;
            Ok(None)
        }
        Err(error) if is_out_of_space(&error) => Ok(None),
        result => result.map(Some),
    }
}

/// Number of threads for mapping runs: one for short runs. The kernel lets one thread at a time change the mappings of
/// a process, and a short run needs little other work: two threads mapped single pages at 0.10 GB/s, one at 0.21.
fn mapping_threads(threads: usize, runs: &[StoreRun<'_>]) -> usize {
    let pages: usize = runs.iter().map(|run| run.pages.len()).sum();
    if pages < runs.len() * SHORT_RUN_PAGES { 1 } else { threads }
}

/// Free zeros, if they are still zeros. Returns whether they are freed.
fn free_if_zeros(range: AddressRange, exclusion: &WriteExclusion<'_>) -> io::Result<bool> {
    let frozen = exclusion.freeze_to_replace(range)?;
    // SAFETY: these pages were scanned, so they are resident, and no thread writes to or unmaps them meanwhile.
    let is_zero = frozen.is_unchanged_since_scan() || is_all_zeros(unsafe { memory::range_bytes(range) });
    if is_zero {
        // SAFETY: it is ordinary memory, contains zeros, and no thread writes to it meanwhile.
        unsafe { memory::free_zero_pages(range) }?;
    }
    Ok(is_zero)
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

    #[test]
    fn short_runs_use_one_mapping_thread() {
        let pages: Vec<ScannedPage> = (0..64).map(|number| ScannedPage::unscanned(number * 4096, false)).collect();
        let threads = |run_pages: usize| {
            let runs: Vec<StoreRun<'_>> =
                pages.chunks(run_pages).map(|pages| StoreRun { pages, first_slot: 0 }).collect();
            mapping_threads(2, &runs)
        };
        assert_eq!([1, 4, 15, 16, 64].map(threads), [1, 1, 1, 2, 2]);
        assert_eq!(mapping_threads(1, &[StoreRun { pages: &pages, first_slot: 0 }]), 1);
    }
}
