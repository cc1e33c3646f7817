//! Intervals against scipy 1.17, and their behavior for few and equal values.

use super::*;

/// Ten log ratios with one large value.
const VALUES: [f64; 10] = [0.012, -0.004, 0.031, 0.008, 0.015, -0.011, 0.022, 0.067, 0.009, 0.003];

fn check(method: IntervalMethod, (low, high): (f64, f64), tolerance: f64) {
    let interval = Bootstrap::new(&VALUES, 100_000, 5).interval(method, 0.95);
    assert_eq!(interval.method, method);
    let distance = (interval.low - low).abs().max((interval.high - high).abs());
    assert!(distance < tolerance, "{interval:?} instead of {low} to {high}");
}

/// `scipy.stats.bootstrap((VALUES,), numpy.mean, method=METHOD, confidence_level=LEVEL, n_resamples=400000,
/// random_state=1)`. The level of the expanded interval is `1 - 2 * norm.sf(sqrt(10 / 9) * t.ppf(.975, 9))`.
#[test]
fn bootstrap_intervals_equal_those_of_scipy() {
    check(IntervalMethod::Percentile, (0.0039, 0.0293), 0.0003);
    check(IntervalMethod::Bca, (0.0056, 0.0332), 0.0003);
    check(IntervalMethod::ExpandedBca, (0.0041, 0.0381), 0.0006);
}

/// `scipy.stats.t.interval(.95, 9, loc=mean, scale=sem)` and `scipy.stats.t.ppf(.975, [1, 9, 39])`.
#[test]
fn student_t_equals_that_of_scipy() {
    check(IntervalMethod::StudentT, (-0.000_406_516_446_3, 0.030_806_516_446_3), 1e-9);
    for (freedom, quantile) in [(1.0, 12.706_204_74), (9.0, 2.262_157_16), (39.0, 2.022_690_92)] {
        assert!((t_quantile(0.975, freedom) - quantile).abs() < 1e-6, "{freedom}: {}", t_quantile(0.975, freedom));
    }
}

#[test]
fn the_studentized_interval_is_skewed_like_the_values() {
    let interval = Bootstrap::with_studentized_means(&VALUES, 20_000, 5).interval(IntervalMethod::BootstrapT, 0.95);
    let center = mean(&VALUES);
    assert_eq!(interval.method, IntervalMethod::BootstrapT);
    assert!(interval.high - center > 1.5 * (center - interval.low), "{interval:?}");
}

#[test]
fn equal_values_give_a_point() {
    let interval = Bootstrap::new(&[0.25; 8], 1000, 1).interval(IntervalMethod::ExpandedBca, 0.95);
    assert_eq!((interval.low, interval.high, interval.method), (0.25, 0.25, IntervalMethod::Degenerate));
    let one = Bootstrap::new(&[0.25], 1000, 1).interval(IntervalMethod::ExpandedBca, 0.95);
    assert_eq!(one.method, IntervalMethod::Degenerate);
}

#[test]
fn limits_that_resamples_do_not_resolve_are_those_of_student() {
    let interval = Bootstrap::new(&VALUES, 1000, 1).interval(IntervalMethod::ExpandedBca, 0.999_99);
    assert_eq!(interval, student_t_interval(&VALUES, 0.999_99));
}

#[test]
fn an_infinite_bias_correction_gives_the_percentile_interval() {
    // Both resampled values are above the mean of the values: their bias correction would be infinite.
    let bootstrap = Bootstrap { values: vec![0.0, 1.0], means: vec![0.9; 1000], studentized: Vec::new() };
    assert_eq!(bootstrap.interval(IntervalMethod::Bca, 0.95).method, IntervalMethod::Percentile);
}

#[test]
fn the_seed_determines_the_resamples() {
    let interval = |seed| Bootstrap::new(&VALUES, 1000, seed).interval(IntervalMethod::Bca, 0.95);
    assert_eq!(interval(1), interval(1));
    assert_ne!(interval(1), interval(2));
}
