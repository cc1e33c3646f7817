//! The cost of ksmd's searches where pages have equal beginnings.
//!
//! ksmd keeps contents in two trees that are ordered by memcmp(3) (mm/ksm.c, `stable_tree_search`,
//! `unstable_tree_search_insert`, 6.18). A search compares a page with one page of each level, and a comparison reads
//! both as far as they are equal. [`KsmdPageTimes`](super::KsmdPageTimes) was measured on pages that differ in their
//! first bytes. Pages that share a long beginning, such as formatted records, take up to twice as long.

use super::Prediction;
use pagefold_base::units::Pages;
use std::time::Duration;

/// Bytes of a comparison that [`KsmdPageTimes`](super::KsmdPageTimes) includes: a cache line.
const INCLUDED_COMPARISON_BYTES: usize = 64;

/// Further bytes that ksmd compares in a nanosecond. Measured on four guests that share 700 MiB, on an AMD EPYC with
/// Linux 6.18: 10.1 s of ksmd where pages have their first 4,086 bytes in common and 6.1 s where they differ at once,
/// for 1.17 M searches over 16 levels.
const COMPARED_BYTES_PER_NANOSECOND: f64 = 19.0;

/// What ksmd's searches compare beyond `INCLUDED_COMPARISON_BYTES` of each page, estimated from a sample of pages.
///
/// The sample stands for the upper levels of a balanced tree. Further down a page meets its neighbors; there the longer
/// beginning that it shares with a neighbor in the sample counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ComparisonCost {
    /// Mean number of levels of the sample that a search passes.
    sampled_levels: f64,
    /// Mean bytes that a search compares on these levels together.
    bytes_in_sample: f64,
    /// Mean bytes that a search compares on each further level.
    bytes_per_further_level: f64,
}

impl ComparisonCost {
    /// Estimate the cost from the contents of some pages.
    pub fn from_sample(mut sample: Vec<Vec<u8>>) -> Self {
        sample.sort_unstable();
        sample.dedup();
        if sample.len() < 2 {
            return Self::default();
        }
        let shared_bytes = |a: usize, b: usize| {
            let equal = sample[a].iter().zip(&sample[b]).take_while(|(a, b)| a == b).count();
            equal.saturating_sub(INCLUDED_COMPARISON_BYTES) as f64
        };
        let (mut levels, mut sampled_bytes, mut neighbor_bytes) = (0_u32, 0.0, 0.0);
        for page in 0..sample.len() {
            let (mut low, mut high) = (0_usize, sample.len());
            loop {
                let middle = low.midpoint(high);
                if middle == page {
                    break;
                }
                sampled_bytes += shared_bytes(page, middle);
                levels += 1;
                (low, high) = if page < middle { (low, middle) } else { (middle + 1, high) };
            }
            let neighbors = [page.checked_sub(1), Some(page + 1).filter(|&next| next < sample.len())];
            neighbor_bytes +=
                neighbors.into_iter().flatten().map(|neighbor| shared_bytes(page, neighbor)).fold(0.0, f64::max);
        }
        let pages = sample.len() as f64;
        Self {
            sampled_levels: f64::from(levels) / pages,
            bytes_in_sample: sampled_bytes / pages,
            bytes_per_further_level: neighbor_bytes / pages,
        }
    }

    /// Bytes that one search compares in a tree of so many contents.
    fn bytes_per_search(self, contents: u64) -> f64 {
        let further_levels = ((contents.max(1) as f64).log2() - self.sampled_levels).max(0.0);
        self.bytes_in_sample + further_levels * self.bytes_per_further_level
    }
}

impl Prediction {
    /// Searches through a tree: two for each page that finds no copy. The first two pages of a content take four
    /// together: both go through the unstable tree, one of them through the stable tree too, and both are inserted
    /// there. Each further copy takes one. Zero pages are not searched for.
    fn searches(&self, zero: Pages) -> u64 {
        self.merging.saturating_sub(zero).0 + 2 * self.merged_contents() + 2 * self.unique_pages().0
    }

    /// Contents that remain as one copy.
    fn merged_contents(&self) -> u64 {
        self.merging.saturating_sub(self.effect.freed_frames).0
    }

    /// Scanned pages that do not merge.
    fn unique_pages(&self) -> Pages {
        self.effect.scanned_pages.saturating_sub(self.merging)
    }

    /// ksmd's time for the bytes that its searches compare.
    pub(super) fn comparison_time(&self, zero: Pages, cost: ComparisonCost) -> Duration {
        // Contents that ksmd's trees contain in the end.
        let contents = self.merged_contents() + self.unique_pages().0;
        let bytes = self.searches(zero) as f64 * cost.bytes_per_search(contents);
        Duration::from_secs_f64(bytes / COMPARED_BYTES_PER_NANOSECOND / 1e9)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::savings::MergeEffect;

    /// Pages that share `shared_bytes` leading bytes, followed by a number.
    fn pages(shared_bytes: usize, count: u32) -> Vec<Vec<u8>> {
        let page = |number: u32| {
            let mut page = vec![7; 4096];
            page[shared_bytes..shared_bytes + 4].copy_from_slice(&number.wrapping_mul(2_654_435_761).to_be_bytes());
            page
        };
        (0..count).map(page).collect()
    }

    fn bytes_per_search(sample: Vec<Vec<u8>>, contents: u64) -> f64 {
        ComparisonCost::from_sample(sample).bytes_per_search(contents)
    }

    #[test]
    fn pages_that_differ_at_once_cost_nothing_more() {
        assert_eq!(bytes_per_search(pages(0, 100), 1 << 20), 0.0);
        assert_eq!(bytes_per_search(pages(60, 100), 1 << 20), 0.0);
        assert_eq!(bytes_per_search(Vec::new(), 1 << 20), 0.0);
        assert_eq!(bytes_per_search(pages(4000, 1), 1 << 20), 0.0, "one page is not enough");
        assert_eq!(bytes_per_search(vec![vec![1; 4096]; 9], 1 << 20), 0.0, "nor do copies of one");
    }

    #[test]
    fn each_level_compares_the_common_beginning() {
        let bytes = bytes_per_search(pages(4064, 512), 1 << 17);
        assert!((bytes / (17.0 * 4000.0) - 1.0).abs() < 0.01, "{bytes}");
        let [few, many] = [1 << 10, 1 << 20].map(|contents| bytes_per_search(pages(1000, 512), contents));
        assert!((many / few - 2.0).abs() < 0.01, "{few} and {many}");
        let mut mixed = pages(4064, 256);
        mixed.extend(pages(0, 256));
        let part = bytes_per_search(mixed, 1 << 17);
        assert!(part > 0.2 * bytes && part < 0.8 * bytes, "{part} of {bytes}");
    }

    #[test]
    fn searches_are_counted_by_copies() {
        let searches = |scanned: u64, merging: u64, zero: u64, freed: u64| {
            let effect =
                MergeEffect { scanned_pages: Pages(scanned), freed_frames: Pages(freed), ..MergeEffect::default() };
            Prediction { effect, merging: Pages(merging), ..Prediction::default() }.searches(Pages(zero))
        };
        assert_eq!(searches(2, 2, 0, 1), 4, "two copies");
        assert_eq!(searches(4, 4, 0, 3), 6, "four copies");
        assert_eq!(searches(5, 0, 0, 0), 10, "no copies");
        assert_eq!(searches(5, 5, 5, 5), 0, "zeros");
        assert_eq!(searches(12, 7, 5, 6), 14);
    }

    #[test]
    fn compared_bytes_take_time() {
        let effect = MergeEffect { scanned_pages: Pages(4), freed_frames: Pages(3), ..MergeEffect::default() };
        let predicted = Prediction { effect, merging: Pages(4), ..Prediction::default() };
        let cost = ComparisonCost { bytes_in_sample: 19.0 * 500.0, ..ComparisonCost::default() };
        assert_eq!(predicted.comparison_time(Pages::ZERO, cost), Duration::from_nanos(3000), "six searches");
        assert_eq!(Prediction::default().comparison_time(Pages::ZERO, cost), Duration::ZERO, "nothing is planned");
    }
}
