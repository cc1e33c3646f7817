//! Which ranges of a region are worth enrolling: the best set of disjoint segments, in linear time.

use std::ops::Range;

/// The disjoint segments of `gains` with the largest sum of gains less `boundary` for each segment.
///
/// Gains are per page in address order: what merging it would save less what scanning it costs, in bytes. `boundary` is
/// the price of one more segment: splitting a region makes up to two more regions, each with kernel structures of its
/// own. Exact: the prefix sums are followed as a share's price by a trader who pays `boundary` for each buy and sale, who
/// buys at the last low once the price has risen by more than the fee, and sells at the last high once it has fallen by
/// more than the fee. O(n) time and constant memory.
pub fn best_segments(gains: impl IntoIterator<Item = i64>, boundary: i64) -> Vec<Range<usize>> {
    let mut segments: Vec<Range<usize>> = Vec::new();
    let mut inside = false;
    let mut sum = 0i64;
    // While outside the lowest prefix sum since the last segment ended, while inside the highest since this one began.
    let (mut turn, mut at) = (0i64, 0usize);
    let mut opened = 0;
    for (i, gain) in gains.into_iter().enumerate() {
        sum += gain;
        let here = i + 1;
        if inside {
            if sum >= turn {
                (turn, at) = (sum, here);
            } else if turn - sum > boundary {
                segments.push(opened..at);
                inside = false;
                (turn, at) = (sum, here);
            }
        } else if sum <= turn {
            (turn, at) = (sum, here);
        } else if sum - turn > boundary {
            opened = at;
            inside = true;
            (turn, at) = (sum, here);
        }
    }
    if inside {
        segments.push(opened..at);
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(gains: &[i64], boundary: i64, segments: &[Range<usize>]) -> i64 {
        segments.iter().map(|segment| gains[segment.clone()].iter().sum::<i64>() - boundary).sum()
    }

    /// The best value over every subset of pages, a segment being a maximal run of chosen pages.
    fn brute_force(gains: &[i64], boundary: i64) -> i64 {
        (0u32..1 << gains.len())
            .map(|chosen| {
                let picked = |i: usize| chosen >> i & 1 == 1;
                (0..gains.len())
                    .filter(|&i| picked(i))
                    .map(|i| gains[i] - if i == 0 || !picked(i - 1) { boundary } else { 0 })
                    .sum()
            })
            .max()
            .unwrap_or(0)
    }

    #[test]
    fn small_gaps_are_bridged_and_large_ones_are_not() {
        let check = |gains: &[i64], expected: &[Range<usize>]| {
            assert_eq!(best_segments(gains.iter().copied(), 10), expected, "{gains:?}");
        };
        check(&[], &[]);
        check(&[-1, -1], &[]);
        check(&[10], &[]);
        check(&[11], std::slice::from_ref(&(0..1)));
        check(&[-5, 20, -5, 20, -5], std::slice::from_ref(&(1..4)));
        check(&[20, -30, 20], &[0..1, 2..3]);
    }

    proptest! {
        #[test]
        fn no_other_choice_is_better(gains in prop::collection::vec(-50i64..50, 0..12), boundary in 0i64..40) {
            let segments = best_segments(gains.iter().copied(), boundary);
            prop_assert!(segments.windows(2).all(|pair| pair[0].end < pair[1].start));
            prop_assert_eq!(value(&gains, boundary, &segments), brute_force(&gains, boundary));
        }
    }
}
