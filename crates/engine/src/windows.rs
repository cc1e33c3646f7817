//! Merging in windows that fit into the memory which is left ([`crate::headroom`]).

use crate::State;
use crate::headroom::Budget;
use crate::pass::{BATCH, Terms};
use crate::statistics::Merged;
use crate::stillness::Stillness;
use crate::survey::Survey;
use pagefold_base::{AddressRange, Pages};
use std::io;
use std::time::Instant;

/// Windows of one merge, where memory is short: each begins with a survey of everything.
const WINDOWS: usize = 64;

impl State {
    /// Merge by windows that fit into the memory which there is. Where time is bounded the next merge goes on behind the
    /// first of them. How many pages were there of which nothing was known; `None` if there was no memory for any window.
    pub fn merge_in_windows(&mut self, terms: Terms<'_>, merged: &mut Merged) -> io::Result<Option<Pages>> {
        let (first, mut new, mut has_wrapped) = (self.cursor, None, false);
        for _ in 0..WINDOWS {
            let (page, members) = (self.domain.page(), self.domain.members());
            let pages = self.regions.iter().map(|region| region.range().bytes().0 / page).sum();
            let plenty = Budget::plenty(members, pages, BATCH as u64 * page);
            let Some(budget) = Budget::new(self.headroom.left(plenty), members, pages, page) else {
                merged.cut_short = 1;
                break;
            };
            self.headroom.budget = budget;
            let cursor = self.cursor;
            merged.cut_short = 0;
            let found = self.merge_within(terms, merged)?;
            new.get_or_insert(found);
            let wraps = self.cursor <= cursor;
            let all = has_wrapped && wraps || (has_wrapped || wraps) && self.cursor >= first;
            has_wrapped |= wraps;
            if merged.cut_short == 0 || merged.held_up > 0 || terms.room.is_some() || all {
                break;
            }
        }
        Ok(new)
    }

    /// How many pages are copied before anything is given back.
    pub fn batch_pages(&self) -> usize {
        (self.headroom.budget.batch_pages as usize).clamp(1, BATCH)
    }

    /// Copy pages into ordinary memory: those that were written since they were merged, as far as memory is left, and
    /// some of a former store, where memory is plenty; both until the deadline. Which were copied, and whether written
    /// ones were not for want of memory or time.
    pub fn heal(
        &mut self,
        survey: &Survey,
        stillness: &Stillness<'_>,
        deadline: Option<Instant>,
    ) -> (Vec<AddressRange>, bool) {
        let (page, most, members) = (self.domain.page(), self.batch_pages(), self.domain.members());
        let (mut healed, is_partial) = survey.heal(stillness, (page, most as u64), deadline, |needed| {
            // Where memory is short, other processes may have taken what there was.
            most == BATCH || self.headroom.has_room_for(needed, members)
        });
        let region_pages = self.regions.iter().map(|region| region.range().bytes().0 / page).sum();
        let mut is_first = true;
        let drained = survey.drain(stillness, (page, most as u64), healed.len(), |needed| {
            let is_over = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            (std::mem::take(&mut is_first) || !is_over)
                && most == BATCH
                && self.headroom.leaves_batches(needed, members, region_pages, (page, most as u64))
        });
        // They were not written, and are new to the present store.
        for &range in &drained {
            self.regions.iter_mut().for_each(|region| region.forget(range));
        }
        healed.extend(drained);
        (healed, is_partial)
    }
}

/// Whether a merge counts as one that looked at everything: it did, or it is one of those that are cut short again and
/// again, and its cursor has come around. A merge in which no window ran looked at nothing.
pub fn is_whole(has_run: bool, saw_all: bool, cursor_before: u64, cursor: u64) -> bool {
    has_run && (saw_all || cursor_before > 0 && cursor <= cursor_before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_merge_that_was_refused_for_want_of_memory_is_not_whole() {
        let refused = |cursor| is_whole(false, false, cursor, cursor);
        assert_eq!([refused(0), refused(0x5000)], [false, false]);
        assert!(is_whole(true, true, 0, 0), "it saw everything");
        assert!(!is_whole(true, false, 0, 0x5000), "it was cut short");
        assert!(!is_whole(true, false, 0x5000, 0x6000), "it goes on later");
        assert!(is_whole(true, false, 0x5000, 0x3000), "it has come around");
    }
}
