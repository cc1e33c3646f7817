//! Estimates figures for the whole host from a sample of pages.
//!
//! A census of a big host may fingerprint only some of the resident pages, each drawn independently with one
//! probability. The number of zero, merged or volatile pages is then an ordinary proportion. The number of duplicates
//! is not: a page whose duplicate was not drawn looks unique. No estimator can derive the number of distinct contents
//! well from `f_j`, the number of contents seen exactly `j` times (Charikar, Chaudhuri, Motwani, Narasayya, "Towards
//! Estimation Error Guarantees for Distinct Values", PODS 2000). This module therefore computes which numbers are
//! possible. As Harnik, Khaitzin, Sotnikov ("Estimating Unseen Deduplication - from Theory to Practice", FAST 2016) do
//! after Valiant and Valiant ("Estimating the Unseen", STOC 2011), a linear program searches the histograms of group
//! sizes that would explain the sample. Here it finds the extremes among them, which form a confidence interval.
//!
//! The model, with `N` resident pages of which `m` were drawn:
//!
//! - Given `m`, every set of `m` pages is equally likely, so `m / N` stands for the probability of drawing. It is known
//!   exactly and already contains the randomness of the draw. A content with `n` copies is seen `Binomial(n, m / N)`
//!   times.
//! - Contents seen more than 16 times (`MAX_RARE_SIGHTINGS`) are set apart. Their number is known; only their pages
//!   are estimated. Given which contents these are, the others are independent and follow the binomial distribution
//!   truncated above 16.
//! - Each `f_j` is a sum of independent indicators, whose tails beyond its mean are thinner than Poisson's (Hoeffding
//!   1956; Anderson and Samuels 1967). A Poisson interval around `f_j` is therefore a valid band for its mean. All
//!   bands hold at once by Bonferroni.
//! - The interval of a figure covers every histogram of group sizes that keeps to all bands. It is therefore
//!   conservative: it covers the true value more often than its level says, for any population. It is wide where the
//!   sample gives little information. No prior shape of the group sizes narrows it.
//!
//! Limits: pages must be drawn independently of their content and of each other; drawing whole regions violates this.
//! Using the binomial instead of the hypergeometric distribution matters only for samples of a few dozen pages, where
//! the bands are wide anyway. Poisson's variance is too large when most pages are drawn. Above
//! `MAX_DENSE_GROUP_SIZE`, group sizes lie on a grid with steps of 5 %, for which the bands allow.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use microlp::{ComparisonOp, OptimizationDirection, Problem, Variable};

/// Contents seen at most this many times take part in the linear program. Each number of sightings has its own band.
const MAX_RARE_SIGHTINGS: u64 = 16;

/// Number of bands that must hold together: one for each number of sightings up to [`MAX_RARE_SIGHTINGS`], and four
/// more. These are the pages of contents seen more often, the pages of the other contents, both together, and the
/// largest group size.
const BAND_COUNT: f64 = MAX_RARE_SIGHTINGS as f64 + 4.0;

/// The grid has every group size up to this one.
const MAX_DENSE_GROUP_SIZE: u64 = 24;

/// The ratio of adjacent grid points above [`MAX_DENSE_GROUP_SIZE`], minus one.
const GRID_STEP: f64 = 0.05;

/// Coefficients below this share of the largest one in their row are left out: microlp needs rows that span at most six
/// orders of magnitude.
const MIN_RELATIVE_COEFFICIENT: f64 = 1e-6;

/// How often contradictory bands are doubled in width before the result falls back to the logical limits.
const MAX_BAND_WIDENINGS: u32 = 8;

/// Passes of expectation maximization. Stopping early keeps the result smooth.
const EM_PASSES: u32 = 200;

/// Counts of a sample of the resident pages of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSample {
    /// Resident pages of the host, drawn or not. Taken to be at least the number of pages drawn.
    pub population: u64,
    /// Pages drawn that hold only zero bytes.
    pub zero: u64,
    /// Pages drawn that KSM has merged already.
    pub merged: u64,
    /// Pages drawn whose content changed between the passes.
    pub volatile: u64,
    /// The other pages drawn: the number of contents (value) by their number of sightings (key).
    pub contents_by_sightings: BTreeMap<u64, u64>,
}

/// A figure with its confidence interval, in pages; `low <= estimate <= high`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    /// Lower end.
    pub low: f64,
    /// The likely value.
    pub estimate: f64,
    /// Upper end.
    pub high: f64,
}

/// Pages of the whole host by class, as in [`pagefold_base::PageCounts`]. Each interval holds at the requested level by
/// itself; together they may hold less often.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// Pages that hold only zero bytes.
    pub zero: Interval,
    /// Pages that KSM has merged already.
    pub merged: Interval,
    /// Pages that changed between the passes.
    pub volatile: Interval,
    /// Pages without a copy.
    pub unique: Interval,
    /// Pages in groups of two or more.
    pub duplicate: Interval,
    /// Duplicates other than the one copy that each group keeps.
    pub redundant: Interval,
}

impl PageSample {
    /// Pages drawn.
    fn drawn(&self) -> f64 {
        self.zero as f64 + self.merged as f64 + self.volatile as f64 + self.pages(0..=u64::MAX)
    }

    /// The number of contents whose number of sightings is in `sightings`.
    fn contents(&self, sightings: RangeInclusive<u64>) -> f64 {
        self.contents_by_sightings.range(sightings).map(|(_, &contents)| contents as f64).sum()
    }

    /// The number of pages drawn of contents whose number of sightings is in `sightings`.
    fn pages(&self, sightings: RangeInclusive<u64>) -> f64 {
        self.contents_by_sightings
            .range(sightings)
            .map(|(&sightings, &contents)| sightings as f64 * contents as f64)
            .sum()
    }
}

impl Interval {
    /// An interval around a value that may lie outside of it by rounding.
    fn new(low: f64, estimate: f64, high: f64) -> Self {
        let high = high.max(low);
        Self { low, estimate: estimate.clamp(low, high), high }
    }

    /// This interval with both ends clamped to `[low, high]`.
    fn within(self, low: f64, high: f64) -> Self {
        let high = high.max(low);
        Self::new(self.low.clamp(low, high), self.estimate.clamp(low, high), self.high.clamp(low, high))
    }

    /// This interval, `margin` wider at both ends and moved up by `shift`.
    fn shifted_and_widened(self, shift: f64, margin: f64) -> Self {
        Self::new(self.low + shift - margin, self.estimate + shift, self.high + shift + margin)
    }

    /// This interval, `1 + factor` times as wide.
    fn widened(self, factor: f64) -> Self {
        self.shifted_and_widened(0.0, factor * (self.high - self.low) / 2.0)
    }
}

/// Estimates the whole host from `sample`. Each interval holds with probability `confidence` (0.95 is usual; values are
/// clamped to 0 to 1 - 1e-9).
///
/// The likely values of `unique`, `duplicate` and `redundant` come from group sizes found by expectation maximization.
/// Its start favors small groups. The result is smooth, close to the most likely histogram, and promises less where the
/// sample leaves a choice. Where the interval is one-sided, for example without duplicates, the likely value is not its
/// middle. A likely value is only as reliable as its interval is narrow.
pub fn estimate(sample: &PageSample, confidence: f64) -> Estimate {
    let alpha = 1.0 - if confidence.is_nan() { 0.95 } else { confidence.clamp(0.0, 1.0 - 1e-9) };
    let drawn = sample.drawn();
    let population = (sample.population as f64).max(drawn);
    let share = |count: f64, alpha: f64| class_interval(count, drawn, population, alpha);

    let once = sample.pages(1..=1);
    let twice_or_more = sample.pages(2..=u64::MAX);
    let contents = sample.contents(1..=u64::MAX);
    let other_pages = once + twice_or_more;
    // Logical limits: a page not drawn may have any class, and a page seen once may have a duplicate.
    let unseen = population - drawn;
    let extra_pages = unseen + if unseen > 0.0 { once } else { 0.0 };
    let intervals = if unseen > 0.0 && drawn > 0.0 {
        group_size_intervals(sample, drawn, population, share(other_pages, alpha / BAND_COUNT), alpha)
    } else {
        // All pages or no pages were drawn.
        let centered = |known: f64| Interval::new(0.0, known + unseen / 2.0, population);
        GroupSizeIntervals {
            unique: centered(once),
            duplicate: centered(twice_or_more),
            redundant: centered(other_pages - contents),
        }
    };
    Estimate {
        zero: share(sample.zero as f64, alpha),
        merged: share(sample.merged as f64, alpha),
        volatile: share(sample.volatile as f64, alpha),
        unique: intervals.unique.within(if unseen > 0.0 { 0.0 } else { once }, once + unseen),
        duplicate: intervals.duplicate.within(twice_or_more, twice_or_more + extra_pages),
        redundant: intervals.redundant.within(other_pages - contents, other_pages - contents + unseen),
    }
}

/// The number of pages of a class on the whole host if `count` of `drawn` pages belong to it. This is Wilson's interval
/// with continuity correction (Newcombe, "Two-sided confidence intervals for the single proportion", Statistics in
/// Medicine 17, 1998, method 4), with its variance times the finite population correction `(N - m) / (N - 1)`.
fn class_interval(count: f64, drawn: f64, population: f64, alpha: f64) -> Interval {
    let unseen = population - drawn;
    if drawn <= 0.0 {
        return Interval::new(0.0, population / 2.0, population);
    }
    let p = count / drawn;
    let z = normal_quantile(alpha / 2.0);
    let v = z * z * unseen / (population - 1.0).max(1.0);
    let scale = population / (2.0 * (drawn + v));
    let center = 2.0 * count + v;
    let low = if count <= 0.0 {
        0.0
    } else {
        let root = v - 2.0 - 1.0 / drawn + 4.0 * p * (drawn - count + 1.0);
        scale * (center - 1.0 - (v * root.max(0.0)).sqrt())
    };
    let high = if count >= drawn {
        population
    } else {
        let root = v + 2.0 - 1.0 / drawn + 4.0 * p * (drawn - count - 1.0);
        scale * (center + 1.0 + (v * root.max(0.0)).sqrt())
    };
    Interval::new(low, p * population, high).within(count, count + unseen)
}

/// The intervals of the figures that depend on group sizes.
struct GroupSizeIntervals {
    unique: Interval,
    duplicate: Interval,
    redundant: Interval,
}

/// The bands that the sample allows for contents seen at most [`MAX_RARE_SIGHTINGS`] times, and for the pages of all
/// others.
struct SampleBands {
    /// All pages that are not zero, merged or volatile.
    other_pages: Interval,
    /// Pages whose content was seen more than [`MAX_RARE_SIGHTINGS`] times.
    frequent_pages: Interval,
    /// Pages whose content was seen at most [`MAX_RARE_SIGHTINGS`] times.
    rare_pages: Interval,
    /// At position `j`, the mean number of contents seen `j + 1` times.
    sightings: Vec<Interval>,
}

/// The group sizes, with the probabilities of seeing their contents.
struct GroupSizeGrid {
    /// Group sizes, ascending from 1.
    group_sizes: Vec<f64>,
    /// For each group size the probabilities of being seen 1, 2 ... [`MAX_RARE_SIGHTINGS`] times.
    sighting_probabilities: Vec<Vec<f64>>,
}

fn group_size_intervals(
    sample: &PageSample,
    drawn: f64,
    population: f64,
    other_pages: Interval,
    alpha: f64,
) -> GroupSizeIntervals {
    let p = drawn / population;
    let each = alpha / BAND_COUNT;
    let frequent_contents = sample.contents(MAX_RARE_SIGHTINGS + 1..=u64::MAX);
    let frequent_pages = sample.pages(MAX_RARE_SIGHTINGS + 1..=u64::MAX);
    let rare_pages = sample.pages(1..=MAX_RARE_SIGHTINGS);

    // Some contents are seen often by chance: over contents seen more than J times, the sum of X - n p has the mean (1
    // - p) (J + 1) E f_{J+1} (Stein's identity for the binomial).
    let edge = (MAX_RARE_SIGHTINGS + 1) as f64;
    let at_edge = sample.contents(MAX_RARE_SIGHTINGS + 1..=MAX_RARE_SIGHTINGS + 1);
    let shift = (1.0 - p) * edge * at_edge / p;
    let margin = normal_quantile(each / 2.0) * edge * at_edge.sqrt() / p;
    let share = |pages: f64| class_interval(pages, drawn, population, each);
    let frequent = if frequent_contents > 0.0 {
        share(frequent_pages).shifted_and_widened(-shift, margin).within(frequent_pages, population)
    } else {
        Interval::new(0.0, 0.0, 0.0)
    };
    let rare = if frequent_contents > 0.0 {
        share(rare_pages).shifted_and_widened(shift, margin).within(rare_pages, population)
    } else {
        other_pages
    };
    let sightings = (1..=MAX_RARE_SIGHTINGS).map(|j| {
        let mean = poisson_mean(sample.contents(j..=j), each);
        // A group size between two grid points is a mixture of both. Over a step of d in the logarithm of the size, the
        // error of the probability of j is about its second derivative times d^2 / 8, which is j near the peak.
        let grid_error = j as f64 * GRID_STEP * GRID_STEP / 8.0;
        Interval::new(mean.low * (1.0 - grid_error), mean.estimate, mean.high * (1.0 + grid_error))
    });
    let mut bands =
        SampleBands { other_pages, frequent_pages: frequent, rare_pages: rare, sightings: sightings.collect() };

    let max_sightings = sample
        .contents_by_sightings
        .range(1..=MAX_RARE_SIGHTINGS)
        .rev()
        .find(|(_, contents)| **contents > 0)
        .map_or(0, |(&sightings, _)| sightings);
    let grid = GroupSizeGrid::new(p, population, max_sightings, frequent_contents > 0.0, each);
    let likely = grid.likely_pages(sample, bands.rare_pages.estimate);
    let share_of_redundant = |n: f64| (n - 1.0) / n;
    let is_unique = |n: f64| f64::from(n < 2.0);
    let is_duplicate = |n: f64| f64::from(n >= 2.0);
    let total = |cost: &dyn Fn(f64) -> f64| -> f64 {
        grid.group_sizes.iter().zip(&likely).map(|(&n, &pages)| cost(n) * pages).sum()
    };
    let unique = total(&is_unique);
    let duplicate = total(&is_duplicate) + bands.frequent_pages.estimate;
    let redundant = total(&share_of_redundant) + bands.frequent_pages.estimate - frequent_contents;

    let extremes_within = |bands: &SampleBands| {
        let extremes = |frequent: f64, cost: &dyn Fn(f64) -> f64| {
            let end = |direction| grid.extreme_value(bands, direction, frequent, cost);
            Some((end(OptimizationDirection::Minimize)?, end(OptimizationDirection::Maximize)?))
        };
        Some([extremes(0.0, &is_unique)?, extremes(1.0, &is_duplicate)?, extremes(1.0, &share_of_redundant)?])
    };
    let mut extremes = extremes_within(&bands);
    for _ in 0..MAX_BAND_WIDENINGS {
        if extremes.is_some() {
            break;
        }
        bands.widen();
        // Bands that just meet give a very narrow interval, which would look precise. Therefore widen once more.
        extremes = extremes_within(&bands).and_then(|_| {
            bands.widen();
            extremes_within(&bands)
        });
    }
    let [of_unique, of_duplicate, of_redundant] =
        extremes.unwrap_or([(0.0, population), (0.0, population), (frequent_contents, population)]);
    GroupSizeIntervals {
        unique: Interval::new(of_unique.0, unique, of_unique.1),
        duplicate: Interval::new(of_duplicate.0, duplicate, of_duplicate.1),
        redundant: Interval::new(of_redundant.0 - frequent_contents, redundant, of_redundant.1 - frequent_contents),
    }
}

impl SampleBands {
    fn widen(&mut self) {
        let nonnegative = |band: Interval| band.widened(1.0).within(0.0, f64::MAX);
        self.other_pages = nonnegative(self.other_pages);
        self.rare_pages = nonnegative(self.rare_pages);
        self.frequent_pages = nonnegative(self.frequent_pages);
        for band in &mut self.sightings {
            *band = nonnegative(*band);
        }
    }
}

impl GroupSizeGrid {
    /// The group sizes that the sample does not exclude at level `alpha`. Contents were seen at most `max_sightings`
    /// times, except those set apart, if there were any (`has_frequent`).
    fn new(p: f64, population: f64, max_sightings: u64, has_frequent: bool, alpha: f64) -> Self {
        // Without contents set apart, the largest group too was seen at most `max_sightings` times. With them, a group
        // size is excluded if of its population / n possible groups probably none was seen at most MAX_RARE_SIGHTINGS
        // times.
        let is_possible = |n: f64| {
            let probability_up_to = |sightings: u64| (0..=sightings).map(|j| binomial(n, p, j)).sum::<f64>();
            if has_frequent {
                population / n * probability_up_to(MAX_RARE_SIGHTINGS) >= alpha
            } else {
                probability_up_to(max_sightings) >= alpha
            }
        };
        let mut sizes = vec![1.0];
        let mut n: f64 = 2.0;
        while n <= population && (n <= max_sightings as f64 || is_possible(n)) {
            sizes.push(n);
            n = if n < MAX_DENSE_GROUP_SIZE as f64 { n + 1.0 } else { (n * (1.0 + GRID_STEP)).ceil() };
        }
        // The last grid point may be one step below the largest possible size. One more point bounds it from above.
        if n <= population {
            sizes.push(n);
        }
        let probabilities = sizes.iter().map(|&n| {
            let mut probabilities: Vec<f64> = (1..=MAX_RARE_SIGHTINGS).map(|j| binomial(n, p, j)).collect();
            if has_frequent {
                let rare: f64 = binomial(n, p, 0) + probabilities.iter().sum::<f64>();
                probabilities.iter_mut().for_each(|probability| *probability /= rare);
            }
            probabilities
        });
        let probabilities = probabilities.collect();
        Self { group_sizes: sizes, sighting_probabilities: probabilities }
    }

    /// The pages, by group size, of contents seen at most [`MAX_RARE_SIGHTINGS`] times. Expectation maximization fits a
    /// mixture to the number of sightings of the content of each page drawn. It starts from shares proportional to 1 /
    /// n. The result adds up to `pages`.
    fn likely_pages(&self, sample: &PageSample, pages: f64) -> Vec<f64> {
        let counts: Vec<f64> = (1..=MAX_RARE_SIGHTINGS).map(|j| sample.pages(j..=j)).collect();
        let total: f64 = counts.iter().sum();
        // Probability that a page of a group is drawn and its content is seen j times; the sum is the probability of
        // being drawn.
        let probabilities =
            self.group_sizes.iter().zip(&self.sighting_probabilities).map(|(n, sighting_probabilities)| {
                let probabilities: Vec<f64> = sighting_probabilities
                    .iter()
                    .zip(1..)
                    .map(|(probability, j)| probability * f64::from(j) / n)
                    .collect();
                let drawn: f64 = probabilities.iter().sum();
                (probabilities.iter().map(|probability| probability / drawn.max(f64::MIN_POSITIVE)).collect(), drawn)
            });
        let probabilities: Vec<(Vec<f64>, f64)> = probabilities.collect();
        let mut weights: Vec<f64> = self.group_sizes.iter().map(|n| 1.0 / n).collect();
        for _ in 0..if total > 0.0 { EM_PASSES } else { 0 } {
            let mut expected = [0.0; MAX_RARE_SIGHTINGS as usize];
            for (weight, (probabilities, _)) in weights.iter().zip(&probabilities) {
                expected.iter_mut().zip(probabilities).for_each(|(sum, probability)| *sum += weight * probability);
            }
            let mut ratios = expected;
            for (ratio, count) in ratios.iter_mut().zip(&counts) {
                *ratio = if *ratio > 0.0 { count / total / *ratio } else { 0.0 };
            }
            for (weight, (probabilities, _)) in weights.iter_mut().zip(&probabilities) {
                *weight *=
                    probabilities.iter().zip(&ratios).map(|(probability, ratio)| probability * ratio).sum::<f64>();
            }
        }
        for (weight, (_, drawn)) in weights.iter_mut().zip(&probabilities) {
            *weight /= drawn.max(f64::MIN_POSITIVE);
        }
        let sum: f64 = weights.iter().sum();
        weights.iter().map(|weight| weight / sum * pages).collect()
    }

    /// The extreme cost over all histograms that keep to the bands: `cost(n)` for each page in groups of `n`, plus
    /// `frequent_cost` for each page of contents set apart. `None` if there is no such histogram or microlp fails.
    fn extreme_value(
        &self,
        bands: &SampleBands,
        direction: OptimizationDirection,
        frequent_cost: f64,
        cost: &dyn Fn(f64) -> f64,
    ) -> Option<f64> {
        // Variables are scaled by their maximum and rows by their upper ends. No number then grows with the host, and
        // small page counts beside very large ones are not lost in the tolerance of the solver.
        let (rare_scale, frequent_scale) = (bands.rare_pages.high.max(1.0), bands.frequent_pages.high.max(1.0));
        let scale = rare_scale.max(frequent_scale);
        let mut problem = Problem::new(direction);
        let costs = self.group_sizes.iter().map(|&n| cost(n) * rare_scale / scale);
        let sizes: Vec<Variable> = costs.map(|cost| problem.add_var(cost, (0.0, f64::INFINITY))).collect();
        let frequent = (bands.frequent_pages.low / frequent_scale, bands.frequent_pages.high / frequent_scale);
        let frequent = problem.add_var(frequent_cost * frequent_scale / scale, frequent);

        let mut constrain = |terms: Vec<(Variable, f64)>, band: Interval| {
            let unit = band.high.max(1.0);
            let largest = terms.iter().map(|term| term.1).fold(0.0, f64::max);
            let terms = terms.into_iter().filter(|term| term.1 > largest * MIN_RELATIVE_COEFFICIENT);
            let terms: Vec<_> = terms.map(|(variable, coefficient)| (variable, coefficient / unit)).collect();
            problem.add_constraint(terms.as_slice(), ComparisonOp::Le, band.high / unit);
            if band.low > 0.0 {
                problem.add_constraint(terms.as_slice(), ComparisonOp::Ge, band.low / unit);
            }
        };
        let mut pages: Vec<(Variable, f64)> = sizes.iter().map(|&size| (size, rare_scale)).collect();
        constrain(pages.clone(), bands.rare_pages);
        pages.push((frequent, frequent_scale));
        constrain(pages, bands.other_pages);
        for (j, &band) in bands.sightings.iter().enumerate() {
            let means =
                self.group_sizes.iter().zip(&self.sighting_probabilities).map(|(n, seen)| rare_scale / n * seen[j]);
            constrain(sizes.iter().copied().zip(means).collect(), band);
        }
        let solution = problem.solve().ok()?.into_solution().ok()?;
        Some(solution.objective() * scale)
    }
}

/// The probability that `j` of `n` pages are drawn, each with probability `0 < p < 1`; meant for small `j`.
fn binomial(n: f64, p: f64, j: u64) -> f64 {
    if j as f64 > n {
        return 0.0;
    }
    let choose: f64 = (0..j).map(|i| ((n - i as f64) / (i + 1) as f64 * p).ln()).sum();
    (choose + (n - j as f64) * (-p).ln_1p()).exp()
}

/// The interval at level `1 - alpha` for the mean of a Poisson variable that was observed as `count`. This is the exact
/// interval (Garwood 1936) by Wilson and Hilferty's approximation of the chi-squared quantiles (Breslow and Day 1987).
fn poisson_mean(count: f64, alpha: f64) -> Interval {
    let z = normal_quantile(alpha / 2.0);
    let cube = |count: f64, z: f64| count * (1.0 - 1.0 / (9.0 * count) + z / (3.0 * count.sqrt())).max(0.0).powi(3);
    let low = if count > 0.0 { cube(count, -z) } else { 0.0 };
    Interval::new(low, count, cube(count + 1.0, z))
}

/// The point that a standard normal variable exceeds with probability `tail` in (0, 0.5], accurate to 4.5e-4
/// (Abramowitz and Stegun, 26.2.23).
fn normal_quantile(tail: f64) -> f64 {
    let t = (-2.0 * tail.clamp(f64::MIN_POSITIVE, 0.5).ln()).sqrt();
    let above = 2.515517 + t * (0.802853 + t * 0.010328);
    let below = 1.0 + t * (1.432788 + t * (0.189269 + t * 0.001308));
    (t - above / below).max(0.0)
}

#[cfg(test)]
#[path = "estimate/tests.rs"]
mod tests;
