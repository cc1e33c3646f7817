//! Page counts of a process that is scanned in parts, whose boundaries differ from scan to scan.
//!
//! The counts of a scan replace those of earlier scans at the same addresses. Where only a piece of what was counted
//! before was scanned again, the other piece keeps a share of the counts by its addresses. Large regions are counted one
//! by one for this reason: their memory is about evenly resident, while a whole process has huge gaps.

use pagefold_base::{AddressRange, PageCounts};
use pagefold_census::results::SubjectCensus;

/// A region is counted by itself if it has at least this share (one over the constant) of the pages of its scan, which
/// bounds the memory of the counts.
const LARGE_REGION_DIVISOR: u64 = 16;

/// The page counts of a process by address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartCounts {
    /// Disjoint ranges in no order, with their counts.
    pieces: Vec<(AddressRange, PageCounts)>,
}

impl PartCounts {
    /// Record a scan of a process that covered one range of addresses.
    pub fn record(&mut self, scanned: AddressRange, subject: &SubjectCensus) {
        let regions =
            subject.regions.iter().filter_map(|found| Some((found.region.range.overlap(scanned)?, found.counts)));
        self.replace(scanned, joined_regions(regions, subject.counts.resident().0 / LARGE_REGION_DIVISOR));
    }

    fn replace(&mut self, scanned: AddressRange, pieces: Vec<(AddressRange, PageCounts)>) {
        let earlier = std::mem::take(&mut self.pieces).into_iter();
        self.pieces = earlier
            .flat_map(|(range, counts)| {
                let rest = range.subtract(&[scanned]).into_iter();
                rest.map(move |rest| (rest, counts.share(rest.bytes().0, range.bytes().0)))
            })
            .chain(pieces)
            .collect();
    }

    /// The counts of all that was scanned.
    pub fn sum(&self) -> PageCounts {
        let mut sum = PageCounts::default();
        self.pieces.iter().for_each(|(_, counts)| sum += *counts);
        sum
    }
}

/// Ascending regions, where successive ones with fewer pages than `min_pages` are one.
fn joined_regions(
    regions: impl Iterator<Item = (AddressRange, PageCounts)>,
    min_pages: u64,
) -> Vec<(AddressRange, PageCounts)> {
    let mut joined: Vec<(AddressRange, PageCounts)> = Vec::new();
    let mut follows_small = false;
    for (range, counts) in regions {
        let is_small = counts.resident().0 < min_pages;
        match joined.last_mut() {
            Some((last, sum)) if is_small && follows_small => {
                last.end = range.end;
                *sum += counts;
            }
            _ => joined.push((range, counts)),
        }
        follows_small = is_small;
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pages;
    use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

    fn range(start: u64, end: u64) -> AddressRange {
        AddressRange { start, end }
    }

    fn unique(pages: u64) -> PageCounts {
        PageCounts { unique: Pages(pages), ..PageCounts::default() }
    }

    /// A scan of regions with one page at each address.
    fn scan(counts: &mut PartCounts, regions: &[AddressRange], scanned: AddressRange) {
        let found: Vec<_> = regions.iter().filter_map(|region| region.overlap(scanned)).collect();
        let found: Vec<_> = found.into_iter().map(|range| (range, unique(range.bytes().0))).collect();
        let min_pages = found.iter().map(|(_, counts)| counts.resident().0).sum::<u64>() / LARGE_REGION_DIVISOR;
        counts.replace(scanned, joined_regions(found.into_iter(), min_pages));
    }

    #[test]
    fn small_regions_between_large_ones_are_counted_together() {
        let regions = [(0, 3), (10, 12), (1000, 1100), (2000, 2001), (3000, 3200), (5000, 5099)];
        let regions = regions.map(|(start, end)| (range(start, end), unique(end - start)));
        let expected = [(range(0, 12), 5), (range(1000, 1100), 100), (range(2000, 2001), 1), (range(3000, 3200), 200)];
        let mut expected = expected.map(|(range, pages)| (range, unique(pages))).to_vec();
        expected.push((range(5000, 5099), unique(99)));
        assert_eq!(joined_regions(regions.into_iter(), 100), expected);
    }

    #[test]
    fn memory_that_is_gone_is_not_counted_again() {
        let mut counts = PartCounts::default();
        scan(&mut counts, &[range(0, 100)], range(0, u64::MAX));
        scan(&mut counts, &[range(0, 40)], range(20, u64::MAX));
        assert_eq!(counts.sum(), unique(40));
        scan(&mut counts, &[], range(0, u64::MAX));
        assert_eq!(counts, PartCounts::default());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

        /// Once all memory was scanned, parts with other boundaries do not change the sum of regions that are evenly
        /// resident.
        #[test]
        fn parts_of_any_boundaries_count_all_pages(cuts in proptest::collection::vec(any::<(u16, u16)>(), 0..40)) {
            let regions = [range(100, 20_000), range(1 << 40, (1 << 40) + 30_000)];
            let mut counts = PartCounts::default();
            scan(&mut counts, &regions, range(0, u64::MAX));
            for (cut, other) in cuts {
                let address = |cut: u16| {
                    let cut = u64::from(cut);
                    if cut < 25_000 { cut } else { (1 << 40) + (cut - 25_000) }
                };
                let (start, end) = (address(cut).min(address(other)), address(cut).max(address(other)));
                if start < end {
                    scan(&mut counts, &regions, range(start, end));
                }
                prop_assert_eq!(counts.sum(), unique(49_900));
                let mut ranges: Vec<_> = counts.pieces.iter().map(|(range, _)| *range).collect();
                ranges.sort();
                prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            }
        }
    }
}
