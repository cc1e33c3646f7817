//! The analysis of small campaigns made by hand.

use super::*;
use crate::decide::statistics::interval::normal_quantile;
use rand::rngs::ChaCha8Rng;
use rand::{RngExt as _, SeedableRng as _};

fn run(label: Arm, time: f64, counter_change: Option<f64>) -> RunSamples {
    RunSamples { label, metrics: vec![vec![time]], counter_change }
}

/// A block ABBA whose ratio is exactly `ratio`; the level of the machine differs between blocks.
fn block(index: usize, kind: BlockKind, ratio: f64) -> BlockSamples {
    let level = 10.0 + index as f64;
    let a = |drift: f64| run(Arm::A, level * (1.0 + drift), Some(5.0));
    let b = |drift: f64| run(Arm::B, level * ratio * (1.0 + drift), Some(7.0));
    BlockSamples { index, kind, runs: vec![a(-0.01), b(0.01), b(-0.01), a(0.01)], is_noisy: false }
}

/// Ten blocks with ratios around `ratio`, at most 1.4 per mille away.
fn blocks(kind: BlockKind, ratio: f64) -> Vec<BlockSamples> {
    let jitter = [-14, 9, -3, 12, -8, 5, -11, 2, 7, 1];
    jitter.iter().enumerate().map(|(i, &jitter)| block(i, kind, ratio * (1.0 + f64::from(jitter) * 1e-4))).collect()
}

fn options() -> AnalysisOptions {
    AnalysisOptions::new(vec![Metric { name: "time".to_owned(), direction: Direction::LowerIsBetter }], 1)
}

fn analyzed(blocks: &[BlockSamples], options: &AnalysisOptions) -> MetricAnalysis {
    analyze(blocks, options).unwrap().metrics.remove(0)
}

#[test]
fn a_higher_time_is_slower_and_a_higher_throughput_faster() {
    let slower = blocks(BlockKind::Comparison, 1.02);
    let result = analyzed(&slower, &options());
    assert_eq!(result.verdict, EffectVerdict::Slower);
    assert!((result.comparison.ratio - 1.02).abs() < 1e-4, "{result:?}");
    assert!(result.comparison.interval.contains(1.02), "{result:?}");
    assert_eq!(result.comparison.p_value, 2.0 / 1024.0);
    let mut throughput = options();
    throughput.metrics[0].direction = Direction::HigherIsBetter;
    assert_eq!(analyzed(&slower, &throughput).verdict, EffectVerdict::Faster);
    assert_eq!(analyzed(&blocks(BlockKind::Comparison, 0.98), &options()).verdict, EffectVerdict::Faster);
}

#[test]
fn no_difference_within_the_margin_is_equivalent_and_outside_inconclusive() {
    let same = blocks(BlockKind::Comparison, 1.0);
    assert_eq!(analyzed(&same, &options()).verdict, EffectVerdict::Equivalent);
    let strict = AnalysisOptions { margin: 0.0001, ..options() };
    let result = analyzed(&same, &strict);
    let expected = result.comparison.smallest_detectable_effect;
    assert_eq!(result.verdict, EffectVerdict::Inconclusive { smallest_detectable_effect: expected });
    // The noncentral t distribution: 0.996 standard deviations for ten blocks.
    assert!((expected / result.comparison.standard_deviation - 0.996).abs() < 0.002, "{result:?}");
}

#[test]
fn few_blocks_find_no_effect_of_any_size() {
    let smallest = |count: usize| {
        analyzed(&blocks(BlockKind::Comparison, 1.5)[..count], &options()).comparison.smallest_detectable_effect
    };
    assert_eq!(smallest(5), f64::INFINITY);
    assert!(smallest(6) < 0.01, "{}", smallest(6));
    let strict = AnalysisOptions { alpha: 0.001, ..options() };
    let all = blocks(BlockKind::Comparison, 1.5);
    assert_eq!(analyzed(&all, &strict).comparison.smallest_detectable_effect, f64::INFINITY);
}

#[test]
fn blocks_of_the_same_ratio_are_not_equivalent() {
    let same: Vec<BlockSamples> = (0..10).map(|index| block(index, BlockKind::Comparison, 1.0)).collect();
    let result = analyzed(&same, &options());
    assert!(matches!(result.verdict, EffectVerdict::Inconclusive { .. }), "{result:?}");
    // Rounding makes a width that is no noise.
    let rounded: Vec<BlockSamples> = (0..10).map(|index| block(index, BlockKind::Comparison, 1.001)).collect();
    let result = analyzed(&rounded, &AnalysisOptions { alpha: 0.001, ..options() });
    assert!(matches!(result.verdict, EffectVerdict::Inconclusive { .. }), "{result:?}");
}

#[test]
fn controls_say_whether_the_campaign_finds_what_is_there() {
    let mut all = blocks(BlockKind::Comparison, 1.0);
    all.extend(blocks(BlockKind::SameArm, 1.0));
    all.extend(blocks(BlockKind::Injected { slowdown_percent: 5 }, 1.05));
    all.extend(blocks(BlockKind::Injected { slowdown_percent: 2 }, 1.0));
    let result = analyzed(&all, &options());
    assert!(!result.same_arm.as_ref().unwrap().is_difference_found);
    let found: Vec<_> = result
        .injected
        .iter()
        .map(|injected| (injected.slowdown_percent, injected.is_found, injected.is_ratio_in_interval))
        .collect();
    assert_eq!(found, [(2, false, false), (5, true, true)]);
}

#[test]
fn an_injected_slowdown_lowers_a_throughput() {
    let mut all = blocks(BlockKind::Comparison, 1.0);
    all.extend(blocks(BlockKind::Injected { slowdown_percent: 5 }, 1.0 / 1.05));
    let mut throughput = options();
    throughput.metrics[0].direction = Direction::HigherIsBetter;
    let result = analyzed(&all, &throughput);
    assert!(result.injected[0].is_found && result.injected[0].is_ratio_in_interval, "{result:?}");
}

#[test]
fn a_counter_that_does_not_move_means_not_applied() {
    let mut all = blocks(BlockKind::Comparison, 1.05);
    let verdict =
        |all: &[BlockSamples], counter| analyze(all, &AnalysisOptions { counter: Some(counter), ..options() });
    let moved = verdict(&all, CounterExpectation::Increase).unwrap();
    assert_eq!(moved.metrics[0].verdict, EffectVerdict::Slower);
    assert!(moved.counter.unwrap().has_moved);
    let wrong_direction = verdict(&all, CounterExpectation::Decrease).unwrap();
    assert_eq!(wrong_direction.metrics[0].verdict, EffectVerdict::NotApplied);
    for run in all.iter_mut().flat_map(|block| &mut block.runs) {
        run.counter_change = Some(5.0);
    }
    let unmoved = verdict(&all, CounterExpectation::Differ).unwrap();
    assert_eq!(unmoved.metrics[0].verdict, EffectVerdict::NotApplied);
    // Few blocks cannot reach the level; all differences in one direction are enough.
    let few = verdict(&blocks(BlockKind::Comparison, 1.05)[..3], CounterExpectation::Increase).unwrap();
    assert!(few.counter.unwrap().has_moved);
    all[3].runs[0].counter_change = None;
    assert_eq!(verdict(&all, CounterExpectation::Differ), Err(AnalysisError::CounterNotRead { block: 3 }));
}

#[test]
fn samples_of_a_run_are_averaged_and_not_pooled() {
    let mut all = blocks(BlockKind::Comparison, 1.02);
    let single = analyzed(&all, &options());
    for run in all.iter_mut().flat_map(|block| &mut block.runs) {
        let mean = run.metrics[0][0];
        run.metrics[0] = vec![mean * 0.9, mean * 1.1, mean];
    }
    let several = analyzed(&all, &options());
    assert_eq!(several.comparison.blocks, 10);
    assert!((several.comparison.standard_deviation - single.comparison.standard_deviation).abs() < 1e-12);
}

#[test]
fn noisy_blocks_are_kept_or_excluded_by_the_option_and_reported_both_ways() {
    let mut all = blocks(BlockKind::Comparison, 1.0);
    all[2] = BlockSamples { is_noisy: true, ..block(2, BlockKind::Comparison, 1.5) };
    let kept = analyze(&all, &options()).unwrap();
    assert_eq!(kept.noisy_blocks, 1);
    let kept = &kept.metrics[0];
    let excluded = analyzed(&all, &AnalysisOptions { noisy_blocks: NoisyBlocks::Exclude, ..options() });
    assert_eq!((kept.comparison.blocks, excluded.comparison.blocks), (10, 9));
    assert_eq!(kept.other_noisy_choice.as_ref(), Some(&excluded.comparison));
    assert_eq!(excluded.other_noisy_choice.as_ref(), Some(&kept.comparison));
    assert_eq!(excluded.verdict, EffectVerdict::Equivalent);
}

#[test]
fn several_metrics_are_corrected() {
    let mut all = blocks(BlockKind::Comparison, 1.02);
    for run in all.iter_mut().flat_map(|block| &mut block.runs) {
        let time = run.metrics[0][0];
        run.metrics = vec![vec![time]; 30];
    }
    let metric = options().metrics.remove(0);
    let many = AnalysisOptions { metrics: vec![metric; 30], ..options() };
    // The smallest p-value of ten blocks is 2 / 1024; thirty times that is above the level.
    let holm = analyze(&all, &many).unwrap();
    assert!((holm.metrics[0].corrected_p_value - 60.0 / 1024.0).abs() < 1e-12);
    assert!(!matches!(holm.metrics[0].verdict, EffectVerdict::Slower));
    let none = analyze(&all, &AnalysisOptions { correction: Correction::None, ..many }).unwrap();
    assert_eq!(none.metrics[29].verdict, EffectVerdict::Slower);
}

/// Blocks of ABBA with the same samples in each of so many metrics.
fn with_metrics(mut blocks: Vec<BlockSamples>, count: usize) -> (Vec<BlockSamples>, AnalysisOptions) {
    for run in blocks.iter_mut().flat_map(|block| &mut block.runs) {
        run.metrics = vec![run.metrics[0].clone(); count];
    }
    let metrics = vec![options().metrics.remove(0); count];
    (blocks, AnalysisOptions { metrics, ..options() })
}

/// The roots of the power of scipy's noncentral t distribution minus 0.8, in standard deviations, for ten blocks and the
/// levels 0.05 / 2 and 0.05. Controls are not corrected.
#[test]
fn smallest_effect_of_a_comparison_is_corrected_for_several_metrics() {
    let mut all = blocks(BlockKind::Comparison, 1.02);
    all.extend(blocks(BlockKind::SameArm, 1.0));
    all.extend(blocks(BlockKind::Injected { slowdown_percent: 2 }, 1.02));
    let (all, two) = with_metrics(all, 2);
    let in_deviations =
        |estimate: &EffectEstimate| estimate.smallest_detectable_effect.ln_1p() / estimate.standard_deviation;
    for metric in analyze(&all, &two).unwrap().metrics {
        assert!((in_deviations(&metric.comparison) - 1.138_854_1).abs() < 1e-3, "{metric:?}");
        for control in [&metric.same_arm.unwrap().estimate, &metric.injected[0].estimate] {
            assert!((in_deviations(control) - 0.996_001_4).abs() < 1e-3, "{control:?}");
        }
    }
    let uncorrected = AnalysisOptions { correction: Correction::None, ..two.clone() };
    let comparison = analyze(&all, &uncorrected).unwrap().metrics.remove(0).comparison;
    assert!((in_deviations(&comparison) - 0.996_001_4).abs() < 1e-3, "{comparison:?}");
    // The smallest p-value of six blocks is 2 / 64 = 0.03125: no finding in two metrics, whatever the effect is.
    let few = analyze(&all[..6], &two).unwrap().metrics.remove(0);
    assert_eq!(few.comparison.smallest_detectable_effect, f64::INFINITY);
    assert_eq!(few.verdict, EffectVerdict::Inconclusive { smallest_detectable_effect: f64::INFINITY });
}

/// Of 2,000 campaigns of ten blocks and two metrics, of which the second has no effect, the verdict finds an effect of the
/// smallest detectable size in 80 %. It finds that of the uncorrected level in 68 %, by scipy's noncentral t distribution.
#[test]
fn effect_of_the_corrected_size_is_found_with_the_stated_probability() {
    const CAMPAIGNS: usize = 2_000;
    let deviation = 0.01;
    let options = AnalysisOptions { resamples: 2, ..with_metrics(Vec::new(), 2).1 };
    let share_found = |goal: PowerGoal| {
        let effect = smallest_detectable_effect(deviation, 10, goal);
        let mut random = ChaCha8Rng::seed_from_u64(5);
        let mut draw = |mean: f64| mean + deviation * normal_quantile(random.random_range(1e-9..1.0));
        let found = (0..CAMPAIGNS).filter(|_| {
            let block = |index: usize| {
                let mut block = block(index, BlockKind::Comparison, 1.0);
                let ratios = [draw(effect).exp(), draw(0.0).exp()];
                for run in &mut block.runs {
                    let is_b = run.label == Arm::B;
                    run.metrics = ratios.map(|ratio| vec![if is_b { ratio } else { 1.0 }]).to_vec();
                }
                block
            };
            let campaign: Vec<BlockSamples> = (0..10).map(block).collect();
            analyze(&campaign, &options).unwrap().metrics[0].verdict == EffectVerdict::Slower
        });
        found.count() as f64 / CAMPAIGNS as f64
    };
    // Three standard errors of 2,000 campaigns are 2.7 and 3.1 %.
    let corrected = share_found(options.comparison_goal());
    assert!((corrected - 0.8).abs() < 0.03, "{corrected}");
    let uncorrected = share_found(options.control_goal());
    assert!((uncorrected - 0.678).abs() < 0.035, "{uncorrected}");
}

#[test]
fn samples_that_cannot_be_analyzed_are_named() {
    let all = blocks(BlockKind::Comparison, 1.0);
    let refused = |change: &dyn Fn(&mut Vec<BlockSamples>)| {
        let mut all = all.clone();
        change(&mut all);
        analyze(&all, &options()).unwrap_err()
    };
    assert_eq!(refused(&|all| all.truncate(1)), AnalysisError::TooFewBlocks { blocks: 1 });
    assert_eq!(
        refused(&|all| all[4].runs.retain(|run| run.label == Arm::A)),
        AnalysisError::ArmWithoutRun { block: 4, arm: Arm::B }
    );
    assert_eq!(
        refused(&|all| all[4].runs[1].metrics.clear()),
        AnalysisError::RunWithoutSamples { block: 4, metric: "time".to_owned() }
    );
    assert_eq!(
        refused(&|all| all[4].runs[1].metrics[0][0] = 0.0),
        AnalysisError::SampleNotPositive { block: 4, metric: "time".to_owned(), value: 0.0 }
    );
}
