//! Cutting a plan in two: a few pages of each region first, to see whether they stay merged, and then the rest.

use super::{Plan, PlannedRange, Predicted, Target};
use crate::savings::Reach;
use crate::units::{AddressRange, PageSize, Pages};
use std::time::Duration;

/// Pieces of which the probe of a region is made, if it is large enough, and pages of one at most: spread over the
/// region, and few enough that the cuts do not cost more than they tell.
const PIECES: u64 = 16;
const PIECE_PAGES: u64 = 64;

impl Plan {
    /// A first part of a plan and the rest. The first has `share` of the pages of each region, and at least
    /// `min_pages_per_region` of them if there are so many, in pieces spread over its ranges.
    ///
    /// What programs have enrolled already is in the first part as it is, since ksmd looks at it anyway, and so are the
    /// ranges to withdraw. A plan of whole processes has no first part. Cut ranges have of each count what their length
    /// makes likely; nothing is lost between the parts.
    pub fn probe(self, page_size: PageSize, share: f64, min_pages_per_region: Pages) -> (Self, Self) {
        if self.whole {
            return (Self { whole: true, ..Self::default() }, self);
        }
        let Self { whole, targets, predicted, left_alone } = self;
        let (mut firsts, mut rests) = (Vec::new(), Vec::new());
        for target in targets {
            let (mut first, mut rest) = (Vec::new(), Vec::new());
            for ranges in target.ranges.chunk_by(|a, b| a.region == b.region) {
                first.extend(ranges.iter().filter(|range| range.enrolled));
                let fresh: Vec<PlannedRange> = ranges.iter().filter(|range| !range.enrolled).copied().collect();
                split_region(&fresh, page_size, share, min_pages_per_region, &mut first, &mut rest);
            }
            first.sort_by_key(|range: &PlannedRange| range.range.start);
            let Target { process, domain, narrowed, .. } = target;
            if !rest.is_empty() {
                let (process, domain) = (process.clone(), domain.clone());
                rests.push(Target { process, domain, ranges: rest, narrowed: Vec::new() });
            }
            firsts.push(Target { process, domain, ranges: first, narrowed });
        }
        let sum = |targets: &[Target], of: fn(&PlannedRange) -> Pages| -> Pages {
            targets.iter().flat_map(|target| &target.ranges).map(of).sum()
        };
        let of_first = predicted.part(
            (sum(&firsts, |range| range.merging), sum(&rests, |range| range.merging)),
            (sum(&firsts, |range| range.pages), sum(&rests, |range| range.pages)),
        );
        let of_rest = predicted.less(of_first);
        let first = Self { whole, targets: firsts, predicted: of_first, left_alone };
        (first, Self { whole, targets: rests, predicted: of_rest, left_alone: Vec::new() })
    }
}

/// Put the pieces of a region's ranges into `first` and what lies between them into `rest`.
fn split_region(
    ranges: &[PlannedRange],
    page_size: PageSize,
    share: f64,
    at_least: Pages,
    first: &mut Vec<PlannedRange>,
    rest: &mut Vec<PlannedRange>,
) {
    let length = |range: &PlannedRange| page_size.pages_in(range.range.bytes()).0;
    let all: u64 = ranges.iter().map(length).sum();
    let wanted = ((all as f64 * share.clamp(0.0, 1.0)).ceil() as u64).max(at_least.0).min(all);
    let pieces = wanted.div_ceil(PIECE_PAGES).max(PIECES).min(wanted);
    let scale = |n: u64, i: u64| (u128::from(n) * u128::from(i) / u128::from(pieces)) as u64;
    // Pages are counted over all ranges one after another.
    let mut cuts: Vec<(u64, u64)> = Vec::new();
    for i in 0..pieces {
        let start = scale(all, i);
        let end = (start + scale(wanted, i + 1) - scale(wanted, i)).min(scale(all, i + 1));
        cuts.push((start, end));
    }
    let mut before = 0;
    let mut cuts = cuts.into_iter().peekable();
    for range in ranges {
        let end = before + length(range);
        let mut at = before;
        let mut left = *range;
        while let Some(&(from, to)) = cuts.peek().filter(|&&(from, _)| from < end) {
            let (from, to_here) = (from.max(at), to.min(end));
            for (part, into) in [(from - at, &mut *rest), (to_here - from, &mut *first)] {
                let (piece, after) = left.cut(part, page_size);
                into.extend(piece);
                left = after;
            }
            at = to_here;
            if to > end {
                break;
            }
            cuts.next();
        }
        rest.extend(left.cut(end - at, page_size).0);
        before = end;
    }
}

impl PlannedRange {
    /// The first `pages` of the range, if that is any, and what is left of it.
    fn cut(self, pages: u64, page_size: PageSize) -> (Option<Self>, Self) {
        let all = page_size.pages_in(self.range.bytes()).0;
        let share = |count: Pages| {
            Pages((u128::from(count.0) * u128::from(pages)).div_ceil(u128::from(all.max(1))).min(count.0.into()) as u64)
        };
        let middle = self.range.start + pages * page_size.bytes();
        let (merging, zero) = (share(self.merging), share(self.zero));
        let piece = Self {
            range: AddressRange { end: middle, ..self.range },
            pages: share(self.pages),
            merging,
            zero: zero.min(merging),
            ..self
        };
        let left = Self {
            range: AddressRange { start: middle, ..self.range },
            pages: self.pages.saturating_sub(piece.pages),
            merging: self.merging.saturating_sub(piece.merging),
            zero: self.zero.saturating_sub(piece.zero),
            ..self
        };
        ((pages > 0).then_some(piece), left)
    }
}

impl Predicted {
    /// The part of the first in two sums of merging pages, and in two of scanned ones. The regions are all counted
    /// here: that is where the cuts are made.
    fn part(self, merging: (Pages, Pages), scanned: (Pages, Pages)) -> Self {
        let share = |(part, rest): (Pages, Pages)| part.0 as f64 / (part + rest).0.max(1) as f64;
        let of = |pages: Pages, share: f64| Pages((pages.0 as f64 * share).floor() as u64);
        let reach = Reach {
            freed: of(self.reach.freed, share(merging)),
            scanned: scanned.0,
            huge_split: of(self.reach.huge_split, share(merging)),
        };
        let time = |time: Duration| time.mul_f64(share(scanned));
        Self { reach, merging: merging.0, ksmd: time(self.ksmd), wall: time(self.wall), ..self }
    }

    /// What is left of a prediction without a part of it.
    fn less(self, part: Self) -> Self {
        let reach = Reach {
            freed: self.reach.freed.saturating_sub(part.reach.freed),
            scanned: self.reach.scanned.saturating_sub(part.reach.scanned),
            huge_split: self.reach.huge_split.saturating_sub(part.reach.huge_split),
        };
        Self {
            reach,
            merging: self.merging.saturating_sub(part.merging),
            regions_added: 0,
            ksmd: self.ksmd.saturating_sub(part.ksmd),
            wall: self.wall.saturating_sub(part.wall),
        }
    }
}
