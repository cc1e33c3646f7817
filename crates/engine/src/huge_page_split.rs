//! Huge pages: which of them a merge may split into base pages, and the expected cost for the program.
//!
//! Merged memory is mapped by base pages, so a program that reads it at random takes more TLB misses than with huge
//! pages. With a bound on the slowdown, a huge page is split in two cases only. Either all of its pages are zeros,
//! which the huge zero page maps, or all of them have a partner. In the second case the expected loss must also fit
//! into the bound ([`crate::decide::huge_page_loss`]). A huge page that contains both kinds stays whole: the two kinds
//! are merged one after the other, and if the second merge failed, the split would gain only a part of its pages.

use crate::decide::huge_page_loss::{expected_time_loss, splittable_pages};
use crate::run_selection::{ScannedPage, huge_page_number};
use crate::survey::CandidatePages;
use pagefold_base::{AddressRange, Pages};
use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

/// Huge pages that a merge may split.
#[derive(Debug, PartialEq, Eq)]
pub enum SplittableHugePages {
    Any,
    /// By number.
    Listed(HashSet<u64>),
}

impl SplittableHugePages {
    /// Choose the huge pages that may be split, given pages of zeros and pages with a partner. Without a limit: all.
    /// With a limit: all huge pages of zeros, and, in address order, huge pages whose pages all have a partner, up to
    /// `max_pages` pages.
    pub fn choose(
        zeros: &[CandidatePages],
        partners: &[ScannedPage],
        page_bytes: u64,
        max_pages: Option<Pages>,
    ) -> Self {
        let Some(Pages(mut remaining_pages)) = max_pages else { return Self::Any };
        let pages_per_huge_page = page_bytes / 8;
        // Number of pages of zeros, and of pages with a partner.
        let mut counts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for part in zeros
            .iter()
            .filter(|candidate| candidate.is_huge)
            .flat_map(|candidate| candidate.split_aligned(pages_per_huge_page * page_bytes))
        {
            counts.entry(huge_page_number(part.range.start, page_bytes)).or_default().0 +=
                part.range.bytes().0 / page_bytes;
        }
        for partner in partners.iter().filter(|partner| partner.huge) {
            counts.entry(huge_page_number(partner.address, page_bytes)).or_default().1 += 1;
        }
        let mut fits = |&(_, (zeros, partners)): &(u64, (u64, u64))| {
            let has_partners = partners == pages_per_huge_page && remaining_pages >= pages_per_huge_page;
            remaining_pages -= if has_partners { pages_per_huge_page } else { 0 };
            has_partners || zeros == pages_per_huge_page
        };
        Self::Listed(counts.into_iter().filter(|count| fits(count)).map(|(number, _)| number).collect())
    }

    /// Whether a page may be merged: it is in no huge page, or in one that may be split.
    pub fn allows(&self, page: &ScannedPage, page_bytes: u64) -> bool {
        match self {
            Self::Any => true,
            Self::Listed(numbers) => !page.huge || numbers.contains(&huge_page_number(page.address, page_bytes)),
        }
    }
}

/// Huge pages that a member has split under a bound.
#[derive(Debug, Default)]
pub struct HugePageSplitLedger {
    /// Pages of all huge pages that were split to merge pages with a partner.
    split_pages: Pages,
    /// Resident pages of this member, as of the last survey.
    resident_pages: Pages,
    /// Time, from the start, up to which the loss has been charged.
    charged_until: Duration,
}

impl HugePageSplitLedger {
    /// Number of further pages that may be split under a bound.
    pub fn splittable_pages(&mut self, max_slowdown: f64, resident: Pages) -> Pages {
        self.resident_pages = resident;
        splittable_pages(max_slowdown, resident, self.split_pages)
    }

    /// The expected loss since the last call. `adopted` is the number of pages adopted now.
    pub fn take_expected_loss(&mut self, elapsed: Duration, adopted: Pages) -> Duration {
        let period = elapsed.saturating_sub(self.charged_until);
        (self.charged_until, self.split_pages) = (elapsed, self.split_pages.min(adopted));
        expected_time_loss(period, self.resident_pages, self.split_pages)
    }

    /// Record pages that were merged, or whose huge pages may have been split for a merge. Each huge page counts in
    /// full, and once per `counted` set.
    pub fn record_splits<'p>(
        &mut self,
        pages: impl Iterator<Item = &'p ScannedPage>,
        page_bytes: u64,
        counted: &mut HashSet<u64>,
    ) {
        let huge = pages.filter(|page| page.huge).map(|page| huge_page_number(page.address, page_bytes));
        let newly_split = huge.filter(|&number| counted.insert(number)).count() as u64;
        self.split_pages += Pages(newly_split * (page_bytes / 8));
    }
}

/// Resident pages of a survey: the candidates, plus `other_pages` (backed-off and merged pages).
pub fn count_resident(candidates: &[CandidatePages], other_pages: Pages, page_bytes: u64) -> Pages {
    let bytes: u64 =
        candidates.iter().map(|candidate| candidate.range).map(|AddressRange { start, end }| end - start).sum();
    Pages(bytes / page_bytes) + other_pages
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 4096;

    fn zero_candidates(start: u64, end: u64) -> CandidatePages {
        let range = AddressRange { start: start * PAGE_BYTES, end: end * PAGE_BYTES };
        CandidatePages { range, is_huge: true, is_new: false }
    }

    fn paired_pages(numbers: std::ops::Range<u64>) -> Vec<ScannedPage> {
        numbers.map(|number| ScannedPage::unscanned(number * PAGE_BYTES, true)).collect()
    }

    fn listed(numbers: &[u64]) -> SplittableHugePages {
        SplittableHugePages::Listed(numbers.iter().copied().collect())
    }

    #[test]
    fn fully_mergeable_huge_pages_are_split_up_to_the_limit() {
        // All zeros but one page; all zeros; two with all partners; one with both; one with all partners but one.
        let zeros = [zero_candidates(0, 511), zero_candidates(512, 1024), zero_candidates(2048, 2060)];
        let partners = [paired_pages(1024..2048), paired_pages(2060..2560), paired_pages(2561..3072)].concat();
        let choose = |limit| SplittableHugePages::choose(&zeros, &partners, PAGE_BYTES, limit);
        assert_eq!(choose(None), SplittableHugePages::Any);
        assert_eq!(choose(Some(Pages(1 << 20))), listed(&[1, 2, 3]));
        assert_eq!(choose(Some(Pages(512 + 511))), listed(&[1, 2]));
        assert_eq!(choose(Some(Pages(0))), listed(&[1]), "zeros cost nothing");
        let page = |number: u64, huge| ScannedPage::unscanned(number * PAGE_BYTES, huge);
        let splittable = listed(&[1]);
        assert!(splittable.allows(&page(600, true), PAGE_BYTES) && splittable.allows(&page(7, false), PAGE_BYTES));
        assert!(
            !splittable.allows(&page(7, true), PAGE_BYTES)
                && SplittableHugePages::Any.allows(&page(7, true), PAGE_BYTES)
        );
    }

    #[test]
    fn split_pages_are_charged_while_adopted() {
        let mut ledger = HugePageSplitLedger::default();
        assert_eq!(ledger.splittable_pages(0.5, Pages(4096)), Pages(2048));
        // Two huge pages, one of them in two ranges, and a base page.
        let mut counted = HashSet::new();
        ledger.record_splits(paired_pages(0..30).iter(), PAGE_BYTES, &mut counted);
        ledger.record_splits(paired_pages(40..513).iter(), PAGE_BYTES, &mut counted);
        ledger.record_splits([ScannedPage::unscanned(2048 * PAGE_BYTES, false)].iter(), PAGE_BYTES, &mut counted);
        assert_eq!(ledger.splittable_pages(0.5, Pages(4096)), Pages(1024));
        let second = Duration::from_secs(1);
        assert_eq!(
            ledger.take_expected_loss(8 * second, Pages(4096)),
            second,
            "a quarter of the memory is 50 % slower"
        );
        assert_eq!(ledger.take_expected_loss(8 * second, Pages(4096)), Duration::ZERO, "charged once");
        assert_eq!(ledger.take_expected_loss(16 * second, Pages(0)), Duration::ZERO, "the memory was freed");
    }
}
