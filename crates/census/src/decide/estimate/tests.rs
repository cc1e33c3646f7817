use super::*;
use proptest::collection::btree_map;
use proptest::prelude::*;

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// How many of `n` pages are drawn, each with probability `p`.
    fn draw(&mut self, n: u64, p: f64) -> u64 {
        let limit = (p * 2f64.powi(64)) as u64;
        (0..n).map(|_| u64::from(self.next() < limit)).sum()
    }
}

/// A host of which every page is known.
struct Population {
    name: &'static str,
    zero: u64,
    merged: u64,
    volatile: u64,
    /// Number of copies, and number of contents that have so many copies.
    groups: Vec<(u64, u64)>,
}

impl Population {
    fn new(name: &'static str, groups: &[(u64, u64)]) -> Self {
        Self { name, zero: 0, merged: 0, volatile: 0, groups: groups.to_vec() }
    }

    fn total(&self, pages: impl Fn(u64) -> u64) -> f64 {
        self.groups.iter().map(|&(copies, groups)| (groups * pages(copies)) as f64).sum()
    }

    fn truth(&self) -> [f64; 6] {
        [
            self.zero as f64,
            self.merged as f64,
            self.volatile as f64,
            self.total(|n| u64::from(n == 1)),
            self.total(|n| if n > 1 { n } else { 0 }),
            self.total(|n| n - 1),
        ]
    }

    fn sample(&self, p: f64, random: &mut Random) -> PageSample {
        let mut seen = BTreeMap::new();
        for &(copies, groups) in &self.groups {
            for _ in 0..groups {
                let times = random.draw(copies, p);
                if times > 0 {
                    *seen.entry(times).or_insert(0) += 1;
                }
            }
        }
        let [zero, merged, volatile] = [self.zero, self.merged, self.volatile].map(|n| random.draw(n, p));
        let population = self.zero + self.merged + self.volatile + self.total(|n| n) as u64;
        PageSample { population, zero, merged, volatile, contents_by_sightings: seen }
    }
}

/// Whether the true value is inside the interval, except for rounding.
fn contains(interval: &Interval, truth: f64) -> bool {
    interval.low <= truth * (1.0 + 1e-9) + 1e-6 && truth <= interval.high * (1.0 + 1e-9) + 1e-6
}

const FIGURES: [&str; 6] = ["zero", "merged", "volatile", "unique", "duplicate", "redundant"];

fn intervals(estimate: &Estimate) -> [Interval; 6] {
    [estimate.zero, estimate.merged, estimate.volatile, estimate.unique, estimate.duplicate, estimate.redundant]
}

/// Eight similar VMs: zero pages, pages that occur twice or more in one VM, pages that occur in several, a few
/// patterns.
fn fleet(shrink: u64) -> Population {
    let groups = [(1, 72_000), (2, 3_500), (4, 3_750), (5, 1_000), (8, 7_875), (1_000, 3)];
    Population {
        name: "fleet",
        zero: 38_000 / shrink,
        merged: 500 / shrink,
        volatile: 1_500 / shrink,
        groups: groups.iter().map(|&(n, k)| (n, if n < 1_000 { k / shrink } else { k })).collect(),
    }
}

fn unique() -> Population {
    Population::new("unique", &[(1, 20_000)])
}

fn pattern() -> Population {
    Population::new("pattern", &[(1, 5_000), (15_000, 1)])
}

/// Draws pages of `population` repeatedly and counts how often the intervals contain the true values.
fn check_coverage(population: &Population) {
    const TRIALS: u64 = 100;
    const LEVEL: f64 = 0.95;
    // The lowest acceptable share of trials: the level minus four standard deviations, because a hundred shares are
    // tested.
    let least = |trials: f64| LEVEL - 4.0 * (LEVEL * (1.0 - LEVEL) / trials).sqrt();
    let shares = [0.02, 0.1, 0.5];
    let truth = population.truth();
    let mut random = Random(20);
    let mut in_all = [0.0; 6];
    let mut last_width = [f64::INFINITY; 6];
    for p in shares {
        let mut covered = [0.0; 6];
        let mut width = [0.0; 6];
        for _ in 0..TRIALS {
            let estimate = estimate(&population.sample(p, &mut random), LEVEL);
            for (figure, interval) in intervals(&estimate).iter().enumerate() {
                covered[figure] += f64::from(contains(interval, truth[figure]));
                width[figure] += interval.high - interval.low;
            }
        }
        for figure in 0..6 {
            let what = format!("{} of {} at p = {p}", FIGURES[figure], population.name);
            let share = covered[figure] / TRIALS as f64;
            assert!(share >= least(TRIALS as f64), "{what}: covered in {share}");
            assert!(width[figure] < last_width[figure], "{what}: interval is not narrower than with fewer pages");
            in_all[figure] += covered[figure];
        }
        last_width = width;
    }
    let trials = (TRIALS * shares.len() as u64) as f64;
    for (figure, covered) in FIGURES.iter().zip(in_all) {
        let share = covered / trials;
        assert!(share >= least(trials), "{figure} of {}: covered in {share}", population.name);
    }
}

#[test]
fn covers_unique_pages() {
    check_coverage(&unique());
}

#[test]
fn covers_pairs() {
    check_coverage(&Population::new("pairs", &[(2, 10_000)]));
}

#[test]
fn covers_eight_copies_of_everything() {
    check_coverage(&Population::new("eights", &[(8, 2_500)]));
}

#[test]
fn covers_groups_of_all_sizes() {
    let zipf: Vec<_> = (1..=4_000).map(|rank| (4_000 / rank, 1)).collect();
    check_coverage(&Population::new("zipf", &zipf));
}

#[test]
fn covers_groups_near_the_rare_sightings_limit() {
    // Seen 17 times on average at each of the three probabilities: some are set apart and some are not.
    check_coverage(&Population::new("edge", &[(1, 3_000), (34, 60), (170, 30), (850, 10)]));
}

#[test]
fn covers_a_fleet_of_vms() {
    check_coverage(&fleet(8));
}

#[test]
fn covers_one_huge_group() {
    check_coverage(&pattern());
}

#[test]
fn covers_a_small_host() {
    check_coverage(&Population {
        name: "small",
        zero: 200,
        merged: 30,
        volatile: 20,
        groups: vec![(1, 400), (2, 75), (4, 25), (100, 1)],
    });
}

/// The sample in which every count is its rounded expectation, for hosts too big to simulate.
fn expected(population: &Population, p: f64) -> PageSample {
    let mut means = BTreeMap::new();
    for &(copies, groups) in &population.groups {
        // Contents with many copies are drawn exactly as often as expected, the others by their distribution.
        if copies as f64 * p > 100.0 {
            *means.entry((copies as f64 * p) as u64).or_insert(0.0) += groups as f64;
        } else {
            for times in 1..=copies.min(200) {
                *means.entry(times).or_insert(0.0) += groups as f64 * binomial(copies as f64, p, times);
            }
        }
    }
    let seen = means.into_iter().map(|(times, mean)| (times, mean.round() as u64)).filter(|seen| seen.1 > 0);
    let [zero, merged, volatile] = [population.zero, population.merged, population.volatile];
    let part = |pages: u64| (pages as f64 * p) as u64;
    PageSample {
        population: zero + merged + volatile + population.total(|n| n) as u64,
        zero: part(zero),
        merged: part(merged),
        volatile: part(volatile),
        contents_by_sightings: seen.collect(),
    }
}

#[test]
fn intervals_hold_for_hosts_of_any_size() {
    // Group sizes between those of the grid; 10^6 to 10^10 pages.
    for size in [1_000, 100_000, 10_000_000] {
        for p in [0.001, 0.02, 0.1, 0.5] {
            let groups = [(1, 300 * size), (2, 50 * size), (7, 20 * size), (57, 4 * size), (157, size)];
            let host =
                Population { name: "host", zero: 75 * size, merged: size, volatile: size, groups: groups.into() };
            let sample = expected(&host, p);
            let found = intervals(&estimate(&sample, 0.95));
            let pages = sample.population as f64;
            for ((figure, interval), truth) in FIGURES.iter().zip(found).zip(host.truth()) {
                assert!(contains(&interval, truth), "{figure}: {interval:?} excludes {truth}, {pages} pages, p = {p}");
            }
            // The logical limits cover nearly the whole range; falling back to them after a solver failure would show
            // here.
            let redundant = found[5].high - found[5].low;
            if pages * p * p > 2e4 {
                assert!(redundant < 0.4 * pages, "{found:?} of {pages} pages, p = {p}");
            }
        }
    }
}

#[test]
fn all_pages_drawn_is_exact() {
    for population in [unique(), fleet(8), pattern()] {
        let estimate = estimate(&population.sample(1.0, &mut Random(1)), 0.95);
        for (interval, truth) in intervals(&estimate).iter().zip(population.truth()) {
            assert_eq!(*interval, Interval { low: truth, estimate: truth, high: truth }, "{}", population.name);
        }
    }
}

#[test]
fn nothing_drawn_allows_everything() {
    let estimate = estimate(&PageSample { population: 1_000, ..PageSample::default() }, 0.95);
    for interval in intervals(&estimate) {
        assert_eq!((interval.low, interval.high), (0.0, 1_000.0));
    }
}

#[test]
fn a_higher_level_is_wider() {
    let sample = fleet(8).sample(0.1, &mut Random(3));
    let levels = [0.5, 0.8, 0.95, 0.999].map(|level| intervals(&estimate(&sample, level)));
    for (narrow, wide) in levels.iter().zip(&levels[1..]) {
        for (narrow, wide) in narrow.iter().zip(wide) {
            assert!(wide.low <= narrow.low && narrow.high <= wide.high, "{narrow:?} {wide:?}");
        }
        assert!(wide[5].high - wide[5].low > narrow[5].high - narrow[5].low);
    }
}

#[test]
fn contradictions_widen_the_bands() {
    // Contents seen three and nine times but never twice: no host is likely to show that.
    let sample = PageSample {
        population: 10_000,
        contents_by_sightings: [(1, 10), (3, 900), (9, 200)].into(),
        ..PageSample::default()
    };
    let estimate = estimate(&sample, 0.5);
    assert!(estimate.redundant.low >= 3_400.0 && estimate.redundant.high <= 8_890.0, "{estimate:?}");
}

/// The interval of a class matches Newcombe's table I, method 4, to its four decimals.
#[test]
fn class_interval_matches_published_table() {
    let check = |count, drawn, low, high| {
        let interval = class_interval(count, drawn, 1e12, 0.05);
        let near = |found: f64, expected: f64| (found / 1e12 - expected).abs() < 1e-4;
        assert!(near(interval.low, low) && near(interval.high, high), "{count} of {drawn}: {interval:?}");
    };
    check(81.0, 263.0, 0.2535, 0.3682);
    check(15.0, 148.0, 0.0598, 0.1644);
    check(0.0, 20.0, 0.0, 0.2005);
    check(1.0, 29.0, 0.0018, 0.1963);
    check(20.0, 20.0, 1.0 - 0.2005, 1.0);
}

/// Garwood's table: exact limits of a Poisson mean at 95 %.
#[test]
fn poisson_limits_match_published_table() {
    for (count, low, high) in [(0.0, 0.0, 3.689), (1.0, 0.0253, 5.572), (10.0, 4.795, 18.390), (100.0, 81.36, 121.63)] {
        let interval = poisson_mean(count, 0.05);
        assert!((interval.low - low).abs() < 0.02 && (interval.high - high).abs() < 0.03, "{count}: {interval:?}");
    }
}

#[test]
fn binomial_probabilities_match_formula() {
    let check = |n, p, j, expected: f64| assert!((binomial(n, p, j) / expected - 1.0).abs() < 1e-12);
    check(1.0, 0.25, 1, 0.25);
    check(4.0, 0.5, 2, 0.375);
    check(5.0, 0.1, 0, 0.59049);
    assert_eq!(binomial(3.0, 0.5, 4), 0.0);
    let sum: f64 = (0..=30).map(|j| binomial(30.0, 0.3, j)).sum();
    assert!((sum - 1.0).abs() < 1e-12);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60.min(ProptestConfig::default().cases)))]

    /// For any sample: no panic, ordered ends, and no values outside the logical limits.
    #[test]
    fn intervals_stay_within_possible_values(
        undrawn in prop_oneof![Just(0u64), 0u64..1_000, 0..=1u64 << 34, Just(u64::MAX)],
        (zero, merged, volatile) in (0u64..5_000, 0u64..100, 0..=1u64 << 20),
        seen in btree_map(prop_oneof![1u64..4, 1u64..40, 1u64..1 << 20], prop_oneof![0u64..5, 0u64..100_000], 0..12),
        confidence in prop_oneof![4 => 0.5..1.0f64, 1 => any::<f64>()],
    ) {
        let mut sample = PageSample { population: 0, zero, merged, volatile, contents_by_sightings: seen };
        let drawn = sample.drawn();
        sample.population = (drawn as u64).saturating_add(undrawn);
        let population = sample.population as f64;
        let unseen = population - drawn;
        let once = sample.pages(1..=1);
        let twice_or_more = sample.pages(2..=u64::MAX);
        let contents = sample.contents(1..=u64::MAX);
        let estimate = estimate(&sample, confidence);
        let bounds = [
            (zero as f64, zero as f64 + unseen),
            (merged as f64, merged as f64 + unseen),
            (volatile as f64, volatile as f64 + unseen),
            (0.0, once + unseen),
            (twice_or_more, twice_or_more + once + unseen),
            (once + twice_or_more - contents, once + twice_or_more - contents + unseen),
        ];
        for ((figure, interval), (least, most)) in FIGURES.iter().zip(intervals(&estimate)).zip(bounds) {
            prop_assert!(interval.low <= interval.estimate && interval.estimate <= interval.high, "{figure} {interval:?}");
            let rounding = 4.0 * f64::EPSILON * population;
            let inside = least - rounding <= interval.low && interval.high <= most + rounding;
            prop_assert!(inside, "{figure} {interval:?} [{least}, {most}]");
        }
    }
}

/// More pages drawn than the population has, and invalid keys.
#[test]
fn inconsistent_counts_do_not_panic() {
    let sample = PageSample {
        population: 3,
        zero: 5,
        contents_by_sightings: [(0, 9), (1, u64::MAX), (u64::MAX, 7)].into(),
        ..PageSample::default()
    };
    for interval in intervals(&estimate(&sample, f64::NAN)) {
        assert!(interval.low <= interval.estimate && interval.estimate <= interval.high, "{interval:?}");
    }
}
