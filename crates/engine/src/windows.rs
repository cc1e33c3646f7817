//! Merging in windows that fit into the available memory ([`crate::headroom`]).

use crate::EngineState;
use crate::headroom::MergeMemoryBudget;
use crate::merge_pass::{MAX_BATCH_PAGES, MergeTerms};
use crate::statistics::MergeCounters;
use crate::survey::MemorySurvey;
use crate::write_exclusion::WriteExclusion;
use pagefold_base::{AddressRange, Pages};
use std::io;
use std::time::Instant;

/// Maximum windows per merge if memory is short: each begins with a full survey.
const MAX_WINDOWS_PER_MERGE: usize = 64;

impl EngineState {
    /// Merge in windows that fit into the available memory. With a time limit this merges one window, and the next
    /// merge continues behind it. Returns the number of pages without a note; `None` if there was no memory for any
    /// window.
    pub fn merge_in_windows(
        &mut self,
        terms: MergeTerms<'_>,
        counters: &mut MergeCounters,
    ) -> io::Result<Option<Pages>> {
        let (first_cursor, mut new_pages, mut has_wrapped) = (self.resume_address, None, false);
        for _ in 0..MAX_WINDOWS_PER_MERGE {
            let (page_bytes, members) = (self.domain.page_bytes(), self.domain.member_count());
            let region_pages = self.regions.iter().map(|region| region.range().bytes().0 / page_bytes).sum();
            let ample = MergeMemoryBudget::ample_headroom(members, region_pages, MAX_BATCH_PAGES as u64 * page_bytes);
            let Some(budget) =
                MergeMemoryBudget::new(self.headroom.available(ample), members, region_pages, page_bytes)
            else {
                counters.incomplete_merges = 1;
                break;
            };
            self.headroom.budget = budget;
            let cursor = self.resume_address;
            counters.incomplete_merges = 0;
            let window_pages = self.merge_with_terms(terms, counters)?;
            new_pages.get_or_insert(window_pages);
            let wraps = self.resume_address <= cursor;
            let is_lap_complete = has_wrapped && wraps || (has_wrapped || wraps) && self.resume_address >= first_cursor;
            has_wrapped |= wraps;
            if counters.incomplete_merges == 0
                || counters.blocked_merges > 0
                || terms.time_limit.is_some()
                || is_lap_complete
            {
                break;
            }
        }
        Ok(new_pages)
    }

    /// Maximum number of pages that are copied before memory is freed.
    pub fn batch_pages(&self) -> usize {
        (self.headroom.budget.batch_pages as usize).clamp(1, MAX_BATCH_PAGES)
    }

    /// Copy pages into ordinary memory, until the deadline: COW-broken pages while memory is left, and part of a former
    /// store if memory is plenty. Returns the copied ranges, and whether COW-broken pages were left for lack of memory
    /// or time.
    pub fn restore_in_batches(
        &mut self,
        survey: &MemorySurvey,
        exclusion: &WriteExclusion<'_>,
        deadline: Option<Instant>,
    ) -> (Vec<AddressRange>, bool) {
        let (page_bytes, max_pages, members) =
            (self.domain.page_bytes(), self.batch_pages(), self.domain.member_count());
        let (mut healed, is_partial) =
            survey.restore_cow_broken(exclusion, (page_bytes, max_pages as u64), deadline, |needed| {
                // If memory is short, other processes may have taken what was available.
                max_pages == MAX_BATCH_PAGES || self.headroom.can_members_take(needed, members)
            });
        let region_pages = self.regions.iter().map(|region| region.range().bytes().0 / page_bytes).sum();
        let mut is_first = true;
        let drained = survey.drain_former_store(exclusion, (page_bytes, max_pages as u64), healed.len(), |needed| {
            let is_expired = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            (std::mem::take(&mut is_first) || !is_expired)
                && max_pages == MAX_BATCH_PAGES
                && self.headroom.leaves_memory_for_batches(
                    needed,
                    members,
                    region_pages,
                    (page_bytes, max_pages as u64),
                )
        });
        // They were not written, but are new to the present store.
        for &range in &drained {
            self.regions.iter_mut().for_each(|region| region.forget_pages(range));
        }
        healed.extend(drained);
        (healed, is_partial)
    }
}

/// Whether a merge counts as having scanned everything: it did, or it is one of several incomplete merges and its
/// cursor has wrapped around. A merge in which no window ran has scanned nothing.
pub fn is_complete_merge(has_run: bool, saw_all: bool, cursor_before: u64, cursor: u64) -> bool {
    has_run && (saw_all || cursor_before > 0 && cursor <= cursor_before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_refused_for_memory_is_incomplete() {
        let refused = |cursor| is_complete_merge(false, false, cursor, cursor);
        assert_eq!([refused(0), refused(0x5000)], [false, false]);
        assert!(is_complete_merge(true, true, 0, 0), "it scanned everything");
        assert!(!is_complete_merge(true, false, 0, 0x5000), "it is incomplete");
        assert!(!is_complete_merge(true, false, 0x5000, 0x6000), "it continues later");
        assert!(is_complete_merge(true, false, 0x5000, 0x3000), "its cursor has wrapped around");
    }
}
