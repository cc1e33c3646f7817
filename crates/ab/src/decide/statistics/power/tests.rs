//! Power against the noncentral t distribution of scipy 1.17.

use super::*;

/// `nct.sf(c, n - 1, d * sqrt(n)) + nct.cdf(-c, n - 1, d * sqrt(n))` with `c = t.ppf(.975, n - 1)`.
#[test]
fn power_equals_that_of_scipy() {
    let cases = [
        (2, 3.0, 0.260_770_714),
        (5, 1.0, 0.401_389_917),
        (10, 1.0, 0.803_096_857),
        (20, 0.5, 0.564_504_418),
        (40, 0.5, 0.869_398_135),
        (200, 0.2, 0.803_666_661),
    ];
    for (blocks, effect, expected) in cases {
        let found = power(effect, 1.0, blocks, 0.05);
        assert!((found - expected).abs() < 1e-4, "{blocks} blocks, {effect}: {found} instead of {expected}");
    }
}

/// The root of the power minus 0.8 by `scipy.optimize.brentq`, and the first count whose power is at least 0.8.
#[test]
fn smallest_effects_and_numbers_of_blocks_equal_those_of_scipy() {
    let goal = PowerGoal::default();
    for (blocks, expected) in [(3, 3.264_043_5), (10, 0.996_001_4), (20, 0.660_441_7), (40, 0.454_256_9)] {
        let found = smallest_detectable_effect(2.0, blocks, goal) / 2.0;
        assert!((found - expected).abs() < 1e-3 * expected, "{blocks} blocks: {found} instead of {expected}");
    }
    for (effect, expected) in [(2.0, 5), (0.5, 34), (0.1, 787)] {
        assert_eq!(blocks_needed(effect, 1.0, goal), Some(expected));
    }
}

#[test]
fn impossible_goals_have_no_answer() {
    let goal = PowerGoal::default();
    assert_eq!(blocks_needed(0.0, 1.0, goal), None);
    assert_eq!(smallest_detectable_effect(1.0, 1, goal), f64::INFINITY);
    assert_eq!(smallest_detectable_effect(0.0, 10, goal), 0.0);
}

#[test]
fn without_an_effect_the_power_is_the_level() {
    for blocks in [2, 3, 10, 100] {
        let found = power(0.0, 1.0, blocks, 0.05);
        assert!((found - 0.05).abs() < 1e-4, "{blocks} blocks: {found}");
    }
}
