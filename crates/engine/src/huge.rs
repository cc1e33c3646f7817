//! Huge pages: which of them a merge may split into base pages, and what that is expected to cost the program.
//!
//! Contents of the store are mapped by base pages, so a program that reads merged memory at random takes more TLB misses
//! than by huge pages. Where its slow-down is bounded, a huge page is split only if all of its pages are zeros, which the
//! huge page of zeros maps, or if all of them have a partner, and then only as far as the expected loss fits into the
//! bound ([`crate::decide::huge`]). One that holds both is left whole: the two are merged one after another, and if the
//! second failed, it would be split for a part of its pages.

use crate::choose::{Page, huge_page};
use crate::decide::huge::{expected_loss, may_split};
use crate::survey::Candidates;
use pagefold_base::{AddressRange, Pages};
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

/// Huge pages that a merge may split.
#[derive(Debug, PartialEq, Eq)]
pub enum Splits {
    Any,
    /// By their numbers.
    These(HashSet<u64>),
}

impl Splits {
    /// Those that may be split, of pages of zeros and pages with a partner: without a limit all; otherwise those of zeros
    /// alone, and by their addresses so many pages of those of which all pages have a partner.
    pub fn among(zeros: &[Candidates], partners: &[Page], page: u64, limit: Option<Pages>) -> Self {
        let Some(Pages(mut left)) = limit else { return Self::Any };
        let pages_each = page / 8;
        // Pages of zeros, and pages with a partner.
        let mut counts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for part in zeros.iter().filter(|found| found.huge).flat_map(|found| found.pieces(pages_each * page)) {
            counts.entry(huge_page(part.range.start, page)).or_default().0 += part.range.bytes().0 / page;
        }
        for partner in partners.iter().filter(|partner| partner.huge) {
            counts.entry(huge_page(partner.address, page)).or_default().1 += 1;
        }
        let mut fits = |&(_, (zeros, partners)): &(u64, (u64, u64))| {
            let has_partners = partners == pages_each && left >= pages_each;
            left -= if has_partners { pages_each } else { 0 };
            has_partners || zeros == pages_each
        };
        Self::These(counts.into_iter().filter(|count| fits(count)).map(|(number, _)| number).collect())
    }

    /// Whether a page may be merged: it is of no huge page, or of one that may be split.
    pub fn allow(&self, found: &Page, page: u64) -> bool {
        match self {
            Self::Any => true,
            Self::These(numbers) => !found.huge || numbers.contains(&huge_page(found.address, page)),
        }
    }
}

/// What a member has split under a bound.
#[derive(Debug, Default)]
pub struct SplitLedger {
    /// Pages of all huge pages that were split to merge pages with a partner.
    split: Pages,
    /// Resident pages of this member, as the last survey found.
    resident: Pages,
    /// How long after the beginning the loss was charged last.
    charged: Duration,
}

impl SplitLedger {
    /// How many more pages may be split under a bound.
    pub fn limit(&mut self, bound: f64, resident: Pages) -> Pages {
        self.resident = resident;
        may_split(bound, resident, self.split)
    }

    /// The loss that is expected since the last call. So many pages are adopted now.
    pub fn charge(&mut self, elapsed: Duration, adopted: Pages) -> Duration {
        let period = elapsed.saturating_sub(self.charged);
        (self.charged, self.split) = (elapsed, self.split.min(adopted));
        expected_loss(period, self.resident, self.split)
    }

    /// Some pages were merged, or may have been split for that. Each huge page counts whole, and once for each set of
    /// numbers of those that are counted.
    pub fn note<'p>(&mut self, pages: impl Iterator<Item = &'p Page>, page: u64, counted: &mut HashSet<u64>) {
        let huge = pages.filter(|found| found.huge).map(|found| huge_page(found.address, page));
        let new = huge.filter(|&number| counted.insert(number)).count() as u64;
        self.split += Pages(new * (page / 8));
    }
}

/// Resident pages of a survey: those that may be looked at, and so many that were left alone or are merged.
pub fn resident(candidates: &[Candidates], others: Pages, page: u64) -> Pages {
    let bytes: u64 = candidates.iter().map(|found| found.range).map(|AddressRange { start, end }| end - start).sum();
    Pages(bytes / page) + others
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn zeros(start: u64, end: u64) -> Candidates {
        let range = AddressRange { start: start * PAGE, end: end * PAGE };
        Candidates { range, huge: true, new: false }
    }

    fn partners(numbers: std::ops::Range<u64>) -> Vec<Page> {
        numbers.map(|number| Page::new(number * PAGE, true)).collect()
    }

    fn these(numbers: &[u64]) -> Splits {
        Splits::These(numbers.iter().copied().collect())
    }

    #[test]
    fn huge_pages_are_split_if_all_of_their_pages_merge_alike_and_as_far_as_the_limit_goes() {
        // Of zeros but for one page, of zeros, of partners twice, of both, and of partners but for one.
        let zeros = [zeros(0, 511), zeros(512, 1024), zeros(2048, 2060)];
        let partners = [partners(1024..2048), partners(2060..2560), partners(2561..3072)].concat();
        let among = |limit| Splits::among(&zeros, &partners, PAGE, limit);
        assert_eq!(among(None), Splits::Any);
        assert_eq!(among(Some(Pages(1 << 20))), these(&[1, 2, 3]));
        assert_eq!(among(Some(Pages(512 + 511))), these(&[1, 2]));
        assert_eq!(among(Some(Pages(0))), these(&[1]), "zeros cost nothing");
        let found = |number: u64, huge| Page::new(number * PAGE, huge);
        let splits = these(&[1]);
        assert!(splits.allow(&found(600, true), PAGE) && splits.allow(&found(7, false), PAGE));
        assert!(!splits.allow(&found(7, true), PAGE) && Splits::Any.allow(&found(7, true), PAGE));
    }

    #[test]
    fn what_was_split_is_charged_while_it_is_adopted() {
        let mut ledger = SplitLedger::default();
        assert_eq!(ledger.limit(0.5, Pages(4096)), Pages(2048));
        // Of two huge pages, one of which comes in two parts, and of no huge page.
        let mut counted = HashSet::new();
        ledger.note(partners(0..30).iter(), PAGE, &mut counted);
        ledger.note(partners(40..513).iter(), PAGE, &mut counted);
        ledger.note([Page::new(2048 * PAGE, false)].iter(), PAGE, &mut counted);
        assert_eq!(ledger.limit(0.5, Pages(4096)), Pages(1024));
        let second = Duration::from_secs(1);
        assert_eq!(ledger.charge(8 * second, Pages(4096)), second, "a quarter of the memory is half as slow again");
        assert_eq!(ledger.charge(8 * second, Pages(4096)), Duration::ZERO, "once");
        assert_eq!(ledger.charge(16 * second, Pages(0)), Duration::ZERO, "it was freed");
    }
}
