//! Finds the ranges of a region that should be enrolled: the best set of disjoint ranges, exactly and in linear time.
//!
//! A covered page gains bytes and costs its scan. A range costs its boundaries. A hole inside a range costs the pages
//! that may fill it. A huge page loses its value once, when it is split: when a covered page of it merges, or when a
//! range begins or ends inside it, where the kernel splits the region (mm/huge_memory.c, `vma_adjust_trans_huge`). A
//! fully covered huge page with nothing to merge stays whole: ksmd scans its pages one by one and splits it only for a
//! merge (mm/ksm.c, `try_to_merge_one_page`).
//!
//! The algorithm walks over the pages with four states: outside or inside of a range, with the current huge page whole
//! or split. Adjacent pages of the same kind form one segment. The best choice takes all or none of a segment, because
//! a range that ends inside could be made longer or shorter without another boundary. Time is linear in the number of
//! segments, and it keeps five bytes for each.

use std::ops::Range;

/// Adjacent pages of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageSegment {
    /// The number of pages, at least one.
    pub pages: u32,
    /// The net gain of covering one of them, in bytes; `None` if it must not be covered.
    pub net_gain: Option<i64>,
    /// Whether they merge when covered, and so split their huge page.
    pub merges: bool,
    /// The number of the huge page that contains them. A segment lies within one huge page.
    pub huge_page: Option<u64>,
    /// The cost of bridging the hole before the segment, in bytes, if it does not follow the previous segment directly.
    /// A segment has no holes inside.
    pub hole_cost: i64,
}

/// Costs that do not depend on the page, in bytes, none of them negative.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeCosts {
    /// A range.
    pub per_range: i64,
    /// A huge page that is split.
    pub per_split_huge_page: i64,
}

const STATE_OUTSIDE: usize = 0;
const STATE_INSIDE: usize = 1;
/// Added to a state if the current huge page is split.
const STATE_SPLIT_FLAG: usize = 2;
/// Less than the value of any choice, and far enough from the smallest number that costs can be subtracted.
const UNREACHABLE_VALUE: i64 = i64::MIN / 2;

/// The disjoint ranges with the largest sum of net gains less all costs, as page numbers counted from the first
/// segment.
///
/// If two choices have the same value, pages stay outside.
pub fn best_ranges(segments: impl IntoIterator<Item = PageSegment>, costs: RangeCosts) -> Vec<Range<u32>> {
    // The best value of each state, and for each segment the previous state on the best path: two bits for each state.
    let mut values = [0, UNREACHABLE_VALUE, UNREACHABLE_VALUE, UNREACHABLE_VALUE];
    let mut previous_states: Vec<u8> = Vec::new();
    let mut ends: Vec<u32> = Vec::new();
    let mut breaks: Vec<u32> = Vec::new();
    let mut last_huge_page = None;
    for segment in segments {
        if segment.hole_cost > costs.per_range {
            breaks.push(ends.len() as u32);
        }
        ends.push(ends.last().copied().unwrap_or(0) + segment.pages);
        let same_huge_page = last_huge_page.is_some() && last_huge_page == segment.huge_page;
        last_huge_page = segment.huge_page;
        // The best of the possible previous states, the first one if equal.
        let best = |candidates: [(usize, i64); 4]| {
            candidates.into_iter().fold((0, UNREACHABLE_VALUE), |best, next| if next.1 > best.1 { next } else { best })
        };
        let mut next = [UNREACHABLE_VALUE; 4];
        let mut previous = 0u8;
        for (state, value) in next.iter_mut().enumerate() {
            let inside = state & STATE_INSIDE != 0;
            let split = state & STATE_SPLIT_FLAG != 0;
            let Some(gain) = (if inside { segment.net_gain } else { Some(0) }) else { continue };
            let value_from = |previous_state: usize| {
                let was_split = same_huge_page && previous_state & STATE_SPLIT_FLAG != 0;
                let crosses_boundary = same_huge_page && (previous_state & STATE_INSIDE != 0) != inside;
                let splits = crosses_boundary || inside && segment.merges && segment.huge_page.is_some();
                if split != (was_split || splits) {
                    return (previous_state, UNREACHABLE_VALUE);
                }
                let mut cost = if splits && !was_split { costs.per_split_huge_page } else { 0 };
                if inside {
                    cost += if previous_state & STATE_INSIDE == 0 {
                        costs.per_range
                    } else {
                        segment.hole_cost.min(costs.per_range)
                    };
                }
                (previous_state, values[previous_state] - cost)
            };
            let (previous_state, best_value) =
                best([STATE_OUTSIDE, STATE_INSIDE, STATE_SPLIT_FLAG, STATE_SPLIT_FLAG | STATE_INSIDE].map(value_from));
            if best_value > UNREACHABLE_VALUE {
                *value = best_value.saturating_add(gain * i64::from(segment.pages)).max(UNREACHABLE_VALUE);
                previous |= (previous_state as u8) << (2 * state);
            }
        }
        values = next;
        previous_states.push(previous);
    }
    let mut state = (0..4).rev().max_by_key(|&state| values[state]).unwrap_or(STATE_OUTSIDE);
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for (i, previous) in previous_states.iter().enumerate().rev() {
        let start = if i == 0 { 0 } else { ends[i - 1] };
        let after_break = breaks.last().is_some_and(|&position| position as usize == i + 1);
        if after_break {
            breaks.pop();
        }
        if state & STATE_INSIDE != 0 {
            match ranges.last_mut() {
                Some(range) if range.start == ends[i] && !after_break => range.start = start,
                _ => ranges.push(start..ends[i]),
            }
        }
        state = usize::from(previous >> (2 * state) & 3);
    }
    ranges.reverse();
    ranges
}

/// The best ranges of several regions that are at most `max_ranges` in total. `segments` returns the segments of a
/// region.
///
/// If the best ranges are too many, the cost of a range is raised until they fit (`raise_range_cost_to_fit`). That may
/// leave out ranges with the same value as included ones: just below that cost too many are chosen, with the same
/// value. So the exceeding choice is taken up to some position, and the fitting choice behind it. The position is the
/// one with the most ranges that fit. If splitting huge pages costs nothing, this is the optimal choice.
///
/// If it has a cost, several ranges may have a gain only together, so that one range less gains no more than none of
/// them. Then the result is at least as good as the best choice with as few ranges as are left at the raised cost. No
/// choice of `max_ranges` ranges is better by more than the raise for each range that could still be added.
pub fn best_ranges_within<I>(
    regions: usize,
    segments: impl Fn(usize) -> I,
    costs: RangeCosts,
    max_ranges: usize,
) -> Vec<Vec<Range<u32>>>
where
    I: IntoIterator<Item = PageSegment>,
{
    let RangeChoices { fitting: mut chosen, exceeding } =
        raise_range_cost_to_fit(regions, &segments, costs, max_ranges);
    let mut remaining_ranges = max_ranges - chosen.iter().map(Vec::len).sum::<usize>();
    for (region, (fitting, exceeding)) in chosen.iter_mut().zip(exceeding).enumerate() {
        let spliced = splice_choices(fitting, &exceeding, remaining_ranges);
        if total_net_gain(segments(region), &spliced, costs) >= total_net_gain(segments(region), fitting, costs) {
            remaining_ranges -= spliced.len() - fitting.len();
            *fitting = spliced;
        }
    }
    chosen
}

/// The best ranges of some regions at one cost.
struct RangeChoices {
    /// The choice that fits.
    fitting: Vec<Vec<Range<u32>>>,
    /// Another choice with the same value and just too many ranges. It equals the fitting choice if that is the best at
    /// the given cost.
    exceeding: Vec<Vec<Range<u32>>>,
}

/// The best ranges at the lowest cost of a range, not below the given one, at which there are at most
/// `max_ranges` of them.
///
/// The cost is searched in fractions of a byte. They are so small that one fraction for each of `max_ranges` ranges
/// adds up to less than one byte. So the ranges that fit at a cost are also optimal one fraction below, where the other
/// choice is made.
fn raise_range_cost_to_fit<I>(
    regions: usize,
    segments: impl Fn(usize) -> I,
    costs: RangeCosts,
    max_ranges: usize,
) -> RangeChoices
where
    I: IntoIterator<Item = PageSegment>,
{
    let positive_gains = |region| {
        segments(region).into_iter().filter_map(|segment| Some(segment.net_gain?.max(0) * i64::from(segment.pages)))
    };
    let total = (0..regions).flat_map(positive_gains).sum::<i64>().max(costs.per_range) + 1;
    let fractions =
        (max_ranges as i64).saturating_add(1).min(i64::MAX / 8 / total.max(costs.per_split_huge_page + 1)).max(1);
    let scaled = |segment: PageSegment| PageSegment {
        net_gain: segment.net_gain.map(|gain| gain.saturating_mul(fractions)),
        hole_cost: segment.hole_cost.saturating_mul(fractions),
        ..segment
    };
    let ranges_at = |range: i64| -> Vec<Vec<Range<u32>>> {
        let costs = RangeCosts { per_range: range, per_split_huge_page: costs.per_split_huge_page * fractions };
        (0..regions).map(|region| best_ranges(segments(region).into_iter().map(scaled), costs)).collect()
    };
    let fits = |chosen: &[Vec<Range<u32>>]| chosen.iter().map(Vec::len).sum::<usize>() <= max_ranges;
    let mut exceeding = ranges_at(costs.per_range * fractions);
    if fits(&exceeding) {
        return RangeChoices { fitting: exceeding.clone(), exceeding };
    }
    // At a cost of the total gain, no range is chosen.
    let (mut too_low, mut high_enough) = (costs.per_range * fractions, total * fractions);
    let mut fitting = vec![Vec::new(); regions];
    while high_enough - too_low > 1 {
        let middle = too_low + (high_enough - too_low) / 2;
        let candidate = ranges_at(middle);
        if fits(&candidate) {
            (high_enough, fitting) = (middle, candidate);
        } else {
            (too_low, exceeding) = (middle, candidate);
        }
    }
    RangeChoices { fitting, exceeding }
}

/// Combine `exceeding` up to a position and `fitting` behind it. The position gives the most ranges, at most
/// `remaining_ranges` more than `fitting` has. The page before the position is in both choices or in neither, or no
/// range continues over the position.
fn splice_choices(fitting: &[Range<u32>], exceeding: &[Range<u32>], remaining_ranges: usize) -> Vec<Range<u32>> {
    let starts = |ranges: &[Range<u32>], position: u32| ranges.partition_point(|range| range.start < position);
    // The end of the last range that starts before the position.
    let end = |ranges: &[Range<u32>], position: u32| {
        starts(ranges, position).checked_sub(1).map_or(0, |last| ranges[last].end)
    };
    let mut best = (0, 0);
    for position in fitting.iter().chain(exceeding).flat_map(|range| [range.start + 1, range.end]) {
        let (fitting_end, exceeding_end) = (end(fitting, position), end(exceeding, position));
        let is_seam = (fitting_end >= position) == (exceeding_end >= position)
            || fitting_end <= position && exceeding_end <= position;
        let added = starts(exceeding, position)
            .checked_sub(starts(fitting, position))
            .filter(|&added| is_seam && added <= remaining_ranges);
        best = best.max((added.unwrap_or(0), position));
    }
    let (added, position) = best;
    if added == 0 {
        return fitting.to_vec();
    }
    let mut ranges = exceeding[..starts(exceeding, position)].to_vec();
    if let Some(last) = ranges.last_mut() {
        let continues = end(fitting, position) > position;
        last.end = if continues { end(fitting, position) } else { last.end.min(position) };
    }
    ranges.extend_from_slice(&fitting[starts(fitting, position)..]);
    ranges
}

/// The value of ranges, with all costs.
fn total_net_gain(segments: impl IntoIterator<Item = PageSegment>, ranges: &[Range<u32>], costs: RangeCosts) -> i64 {
    let mut sum = -(ranges.len() as i64) * costs.per_range;
    let (mut start, mut next, mut last_huge_page, mut last_split) = (0, 0, None, None);
    for segment in segments {
        let end = start + segment.pages;
        while ranges.get(next).is_some_and(|range| range.end < start) {
            next += 1;
        }
        let within = |page: u32| page > start && page < end || page == start && last_huge_page == segment.huge_page;
        for range in ranges[next..].iter().take_while(|range| range.start < end) {
            let covered = range.end > start;
            if covered {
                let pages = range.end.min(end) - range.start.max(start);
                sum += segment.net_gain.unwrap_or(0) * i64::from(pages);
                sum -= if range.start < start { segment.hole_cost } else { 0 };
            }
            let splits = covered && segment.merges || within(range.start) || within(range.end);
            if splits && segment.huge_page.is_some() && last_split != segment.huge_page {
                last_split = segment.huge_page;
                sum -= costs.per_split_huge_page;
            }
        }
        (start, last_huge_page) = (end, segment.huge_page);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const NO_COSTS: RangeCosts = RangeCosts { per_range: 0, per_split_huge_page: 0 };

    fn page(gain: i64) -> PageSegment {
        PageSegment { pages: 1, net_gain: Some(gain), merges: gain > 0, huge_page: None, hole_cost: 0 }
    }

    #[test]
    fn small_gaps_are_bridged_and_large_ones_are_not() {
        let check = |gains: &[i64], expected: &[Range<u32>]| {
            let segments = gains.iter().map(|&gain| page(gain));
            assert_eq!(best_ranges(segments, RangeCosts { per_range: 10, ..NO_COSTS }), expected, "{gains:?}");
        };
        check(&[], &[]);
        check(&[-1, -1], &[]);
        check(&[10], &[]);
        check(&[11], std::slice::from_ref(&(0..1)));
        check(&[-5, 20, -5, 20, -5], std::slice::from_ref(&(1..4)));
        check(&[20, -30, 20], &[0..1, 2..3]);
    }

    #[test]
    fn holes_are_bridged_if_that_is_cheaper_than_another_range() {
        let check = |hole, expected: &[Range<u32>]| {
            let segments = [page(20), PageSegment { hole_cost: hole, ..page(20) }];
            assert_eq!(best_ranges(segments, RangeCosts { per_range: 10, ..NO_COSTS }), expected, "{hole}");
        };
        check(10, std::slice::from_ref(&(0..2)));
        check(11, &[0..1, 1..2]);
    }

    #[test]
    fn ranges_profitable_only_together_are_all_or_none() {
        let prices = RangeCosts { per_range: 0, per_split_huge_page: 25 };
        let of = |gain: i64| PageSegment { huge_page: Some(1), ..page(gain) };
        let pair = [of(20), of(-50), of(20)];
        let other = [page(3)];
        let chosen = |at_most| {
            let regions: [&[PageSegment]; 2] = [&pair, &other];
            let chosen = best_ranges_within(2, |region| regions[region].iter().copied(), prices, at_most);
            chosen.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(chosen(3), [2, 1]);
        assert_eq!(chosen(2), [2, 0]);
        // The other would still fit. It gains 3, and each of the pair gains 7.5, which is the raise.
        assert_eq!(chosen(1), [0, 0]);
    }

    #[test]
    fn a_huge_page_is_split_once_by_what_merges_or_by_a_boundary() {
        let prices = RangeCosts { per_range: 5, per_split_huge_page: 25 };
        let of = |huge, gain: i64| PageSegment { huge_page: Some(huge), ..page(gain) };
        let check = |segments: &[PageSegment], expected: &[Range<u32>]| {
            assert_eq!(best_ranges(segments.iter().copied(), prices), expected, "{segments:?}");
        };
        check(&[of(1, 20)], &[]);
        check(&[of(1, 20), of(2, 20)], &[]);
        check(&[of(1, 20), of(1, -50), of(1, 20)], &[0..1, 2..3]);
        let covered = [page(50), of(1, -2), page(50)];
        check(&covered, std::slice::from_ref(&(0..3)));
        let idle = |huge, gain: i64| PageSegment { merges: false, ..of(huge, gain) };
        check(&[idle(1, 20), idle(1, -50)], &[]);
        check(&[idle(1, 20), idle(2, -50)], std::slice::from_ref(&(0..1)));
        check(&[idle(1, 40), idle(1, -50), idle(1, 40)], &[0..1, 2..3]);
    }

    /// The value of a choice and the number of its ranges; `None` if it covers a forbidden page. A bit of `broken`
    /// begins a new range behind a hole.
    fn value(pages: &[PageSegment], chosen: u32, broken: u32, prices: RangeCosts) -> Option<(i64, usize)> {
        let (mut sum, mut ranges) = (0, 0);
        let mut split = std::collections::BTreeSet::new();
        for (i, page) in pages.iter().enumerate().filter(|(i, _)| chosen >> i & 1 == 1) {
            sum += page.net_gain?;
            let continues = i > 0 && chosen >> (i - 1) & 1 == 1 && broken >> i & 1 == 0;
            if continues {
                sum -= page.hole_cost;
            } else {
                ranges += 1;
            }
            split.extend(page.huge_page.filter(|_| page.merges));
        }
        for (i, pair) in pages.windows(2).enumerate().filter(|(_, pair)| pair[0].huge_page == pair[1].huge_page) {
            split.extend(pair[0].huge_page.filter(|_| (chosen >> i ^ chosen >> (i + 1)) & 1 == 1));
        }
        Some((sum - ranges as i64 * prices.per_range - split.len() as i64 * prices.per_split_huge_page, ranges))
    }

    /// All choices of some pages: the value and the number of ranges of each.
    fn every_choice(pages: &[PageSegment], prices: RangeCosts) -> Vec<(i64, usize)> {
        let holes: u32 = pages.iter().enumerate().filter(|(_, page)| page.hole_cost > 0).map(|(i, _)| 1 << i).sum();
        (0u32..1 << pages.len())
            .flat_map(|chosen| {
                let may_break = holes & chosen & chosen << 1;
                let mut broken = Some(may_break);
                std::iter::from_fn(move || {
                    let now = broken?;
                    broken = if now == 0 { None } else { Some((now - 1) & may_break) };
                    Some((chosen, now))
                })
            })
            .filter_map(|(chosen, broken)| value(pages, chosen, broken, prices))
            .collect()
    }

    fn value_of(pages: &[PageSegment], ranges: &[Range<u32>], prices: RangeCosts) -> Option<(i64, usize)> {
        let chosen = ranges.iter().cloned().flatten().fold(0u32, |bits, i| bits | 1 << i);
        let broken = ranges.iter().fold(0u32, |bits, range| bits | 1 << range.start);
        value(pages, chosen, broken, prices)
    }

    /// Pages of all kinds: with a gain, forbidden, in huge pages, behind holes.
    fn pages() -> impl Strategy<Value = Vec<PageSegment>> {
        let page =
            (prop::option::weighted(0.9, -50i64..50), any::<bool>(), 0..4u8, prop_oneof![3 => Just(0), 1 => 1i64..40]);
        prop::collection::vec(page, 0..9).prop_map(|pages| {
            let mut huge_page = 0;
            pages
                .into_iter()
                .map(|(gain, merges, kind, hole)| {
                    // A hole ends a huge page, which is resident as a whole.
                    huge_page += u64::from(kind == 0 || kind == 3 || hole > 0);
                    let huge = (kind < 3).then_some(huge_page);
                    PageSegment { pages: 1, net_gain: gain, merges, huge_page: huge, hole_cost: hole }
                })
                .collect()
        })
    }

    fn any_costs() -> impl Strategy<Value = RangeCosts> {
        (0i64..40, 0i64..60)
            .prop_map(|(range, huge_page)| RangeCosts { per_range: range, per_split_huge_page: huge_page })
    }

    proptest! {
        #[test]
        fn no_other_choice_is_better(pages in pages(), prices in any_costs()) {
            let ranges = best_ranges(pages.iter().copied(), prices);
            prop_assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
            prop_assert!(ranges.iter().all(|range| !range.is_empty()));
            let (value, count) = value_of(&pages, &ranges, prices).expect("no forbidden page is covered");
            prop_assert_eq!(count, ranges.len());
            prop_assert_eq!(Some(value), every_choice(&pages, prices).into_iter().map(|(value, _)| value).max());
        }

        #[test]
        fn no_choice_with_as_few_ranges_is_better(
            first in pages(),
            second in prop::collection::vec(-50i64..50, 0..4),
            prices in any_costs(),
            at_most in 0usize..5,
        ) {
            let second: Vec<PageSegment> = second.into_iter().map(page).collect();
            let regions = [first, second];
            let sum = |chosen: &[Vec<Range<u32>>]| {
                let of = |(pages, ranges): (&Vec<PageSegment>, &Vec<Range<u32>>)| {
                    let value = value_of(pages, ranges, prices).expect("no forbidden page is covered");
                    assert_eq!(value.0, total_net_gain(pages.iter().copied(), ranges, prices));
                    value
                };
                regions.iter().zip(chosen).map(of).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
            };
            let RangeChoices { fitting: few, .. } = raise_range_cost_to_fit(2, |region| regions[region].iter().copied(), prices, at_most);
            let (value, count) = sum(&few);
            let filled = best_ranges_within(2, |region| regions[region].iter().copied(), prices, at_most);
            let (more, more_ranges) = sum(&filled);
            prop_assert!(count <= more_ranges && more_ranges <= at_most && more >= value);
            let [first, second] = regions.map(|pages| every_choice(&pages, prices));
            for (a, in_first) in &first {
                for (b, in_second) in second.iter().filter(|(_, ranges)| in_first + ranges <= count) {
                    prop_assert!(a + b <= value, "{in_first} and {in_second} ranges have values {a} and {b}");
                }
            }
        }

        #[test]
        fn choice_is_within_the_cost_raise_of_the_optimum(
            first in pages(),
            second in pages(),
            prices in any_costs(),
            at_most in 0usize..5,
        ) {
            let regions = [first, second];
            let of = |region: usize| regions[region].iter().copied();
            let sum = |chosen: &[Vec<Range<u32>>]| {
                let one = |(pages, ranges): (&Vec<PageSegment>, &Vec<Range<u32>>)| total_net_gain(pages.iter().copied(), ranges, prices);
                (regions.iter().zip(chosen).map(one).sum::<i64>(), chosen.iter().map(Vec::len).sum::<usize>())
            };
            // The best choice of each number of ranges.
            let best = regions.each_ref().map(|pages| {
                let mut best = BTreeMap::new();
                for (value, ranges) in every_choice(pages, prices) {
                    best.entry(ranges).and_modify(|most: &mut i64| *most = value.max(*most)).or_insert(value);
                }
                best
            });
            let mut by_count: BTreeMap<usize, i64> = BTreeMap::new();
            for (a, first) in &best[0] {
                for (b, second) in &best[1] {
                    let value = first + second;
                    by_count.entry(a + b).and_modify(|most| *most = value.max(*most)).or_insert(value);
                }
            }
            let optimum = by_count.range(..=at_most).map(|(_, value)| *value).max().expect("the empty choice exists");
            let (least, few) = sum(&raise_range_cost_to_fit(2, of, prices, at_most).fitting);
            let (value, _) = sum(&best_ranges_within(2, of, prices, at_most));
            // The raise: the gain of each additional range, with the number of additional ranges that gains most for
            // each.
            let more = by_count.range(at_most + 1..).map(|(count, value)| (value - least) as f64 / (count - few) as f64);
            let raise = more.fold(0.0, f64::max);
            prop_assert!(least <= value && value <= optimum);
            let slack = raise * (at_most - few) as f64;
            prop_assert!((optimum - least) as f64 <= slack + 1e-6, "{least} of {optimum}, {slack} at most");
        }

        #[test]
        fn no_choice_that_fits_is_better(
            regions in prop::collection::vec(prop::collection::vec((-8i64..8, 0..3u8), 0..7), 2..3),
            range in 0i64..6,
            at_most in 0usize..6,
        ) {
            // Small numbers, so that many choices have the same value.
            let pages = |region: &Vec<(i64, u8)>| {
                region.iter().map(|&(gain, hole)| PageSegment { hole_cost: i64::from(hole == 2) * 3, ..page(gain) }).collect()
            };
            let regions: Vec<Vec<PageSegment>> = regions.iter().map(pages).collect();
            let prices = RangeCosts { per_range: range, per_split_huge_page: 0 };
            let chosen = best_ranges_within(2, |region| regions[region].iter().copied(), prices, at_most);
            let of = |(pages, ranges): (&Vec<PageSegment>, &Vec<Range<u32>>)| value_of(pages, ranges, prices).expect("no page is forbidden");
            let (value, count) = regions.iter().zip(&chosen).map(of).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
            prop_assert!(count <= at_most);
            let every: Vec<_> = regions.iter().map(|pages| every_choice(pages, prices)).collect();
            for (a, in_first) in &every[0] {
                for (b, in_second) in every[1].iter().filter(|(_, ranges)| in_first + ranges <= at_most) {
                    prop_assert!(a + b <= value, "{in_first} and {in_second} ranges have values {a} and {b}, not {value}");
                }
            }
        }

        #[test]
        fn segments_score_the_same_as_their_pages(
            segments in prop::collection::vec((1u32..4, -30i64..30, any::<bool>(), 0..3u8), 0..8),
            prices in any_costs(),
        ) {
            let segments: Vec<PageSegment> = segments
                .into_iter()
                .enumerate()
                .map(|(i, (pages, gain, merges, huge))| {
                    PageSegment { pages, net_gain: Some(gain), merges, huge_page: (huge > 0).then_some(i as u64 / 2), hole_cost: 0 }
                })
                .collect();
            let pages: Vec<PageSegment> = segments
                .iter()
                .flat_map(|&segment| (0..segment.pages).map(move |_| PageSegment { pages: 1, ..segment }))
                .collect();
            let one = best_ranges(segments.iter().copied(), prices);
            let other = best_ranges(pages.iter().copied(), prices);
            prop_assert_eq!(value_of(&pages, &one, prices), value_of(&pages, &other, prices).map(|(value, _)| (value, one.len())));
        }
    }
}
