//! The analysis of experiments, tested by 1,080 simulated campaigns with known effects.
//!
//! The bounds are those of `docs/ab-harness.md`. A test with few campaigns fails only where the 99.9 % interval of a rate
//! lies outside of its bound; the benchmark `ab-harness` judges the rates themselves, over 10,000 campaigns each.

#![forbid(unsafe_code)]

use pagefold_ab::decide::statistics::interval::normal_quantile;
use pagefold_ab::decide::statistics::power::{PowerGoal, blocks_needed};
use pagefold_labs::campaigns::run_times::{MeasuredWorkload, RunTimeModel};
use pagefold_labs::campaigns::{CampaignRates, Rate, simulate, try_campaign};

const RESAMPLES: usize = 1_000;

/// The bounds of the probability behind a rate, by the score interval with a confidence of 99.9 %.
fn bounds(rate: Rate) -> (f64, f64) {
    let z = normal_quantile(0.9995);
    let (count, share) = (rate.trials as f64, rate.share());
    let center = share + z * z / (2.0 * count);
    let half = z * (share * (1.0 - share) / count + z * z / (4.0 * count * count)).sqrt();
    ((center - half) / (1.0 + z * z / count), (center + half) / (1.0 + z * z / count))
}

fn rates(model: RunTimeModel, blocks: usize, campaigns: u64) -> CampaignRates {
    (0..campaigns)
        .fold(CampaignRates::default(), |rates, seed| rates.with(&try_campaign(model, blocks, RESAMPLES, seed)))
}

#[test]
fn false_findings_and_coverage_are_within_their_bounds() {
    let (mut false_findings, mut false_equivalence) = (Rate::default(), Rate::default());
    for blocks in [10, 20, 40] {
        for model in RunTimeModel::ALL {
            let rates = rates(model, blocks, 40);
            false_findings.add(rates.effects[0].found);
            // The effect of the comparison is as large as the margin.
            false_equivalence.add(rates.effects[1].equivalent);
            let (low, high) = bounds(rates.coverage());
            assert!(low <= 0.97 && high >= 0.93, "{}, {blocks} blocks: coverage {low} to {high}", model.name());
            let (low, _) = bounds(rates.effects[0].found);
            assert!(low <= 0.05, "{}, {blocks} blocks: false findings at least {low}", model.name());
        }
    }
    assert_eq!(false_findings.trials, 1080);
    let (low, high) = bounds(false_findings);
    assert!(low <= 0.05 && high >= 0.02, "false findings {low} to {high}");
    let (low, _) = bounds(false_equivalence);
    assert!(false_equivalence.hits > 0 && low <= 0.05, "false equivalence {false_equivalence:?}");
}

#[test]
fn the_predicted_number_of_blocks_finds_the_effect() {
    // Each block's log ratio deviates by 1.5 %: the noise of four runs, two against two.
    let blocks = blocks_needed(0.01_f64.ln_1p(), 0.015, PowerGoal::default()).unwrap();
    assert_eq!(blocks, 20);
    let rates = rates(RunTimeModel::Normal, blocks, 200);
    let (low, high) = bounds(rates.effects[1].found);
    assert!(low <= 0.8 && high >= 0.75, "found {low} to {high}");
    let [none, one, two, five] = rates.effects.map(|effect| effect.found.share());
    assert!(none < one && one < two && two <= five && five == 1.0, "{none} {one} {two} {five}");
}

#[test]
fn common_rules_err_where_the_analysis_does_not() {
    let rates = rates(RunTimeModel::BlockEffects, 20, 100);
    let [mean_of_five, hyperfine, t_test] = rates.effects[0].rivals_in_sequence;
    let (_, analysis) = bounds(rates.effects[0].found);
    for (rule, rate) in [("mean of five", mean_of_five), ("hyperfine", hyperfine), ("t-test", t_test)] {
        assert!(bounds(rate).0 > analysis, "{rule}: {}", rate.share());
    }
    // On the same runs, which the schedule interleaves, pooled tests do not see the effect.
    let two_percent = rates.effects[2];
    assert!(bounds(two_percent.found).0 > bounds(two_percent.rivals[1]).1, "{two_percent:?}");
}

#[test]
fn campaigns_follow_the_schedule_and_the_seed() {
    let model = RunTimeModel::Measured(MeasuredWorkload::HashWall);
    let samples = simulate(model, 10, 3);
    assert_eq!(samples.len(), 40);
    assert!(samples.iter().all(|block| block.runs.len() == 4));
    assert_eq!(samples, simulate(model, 10, 3));
    assert_ne!(samples, simulate(model, 10, 4));
}
