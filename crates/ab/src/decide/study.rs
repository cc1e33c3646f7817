//! A variance study: how much a workload varies at each level without any change, how long it warms up, and so how a
//! campaign should repeat it.
//!
//! All computations are on logarithms, so that a standard deviation of 0.01 is about 1 %.

use super::design::{Arm, WarmUpRule};
use super::statistics::components::{BlockComponents, VarianceComponents, variance_components};
use super::statistics::interval::t_quantile;
use super::statistics::power::{PowerGoal, blocks_needed, smallest_detectable_effect};
use super::statistics::sign_flip::{MAX_EXACT_VALUES, smallest_p_value};
use super::statistics::{mean, standard_deviation};

/// The slow-downs in percent for which the number of blocks is computed.
pub const PLANNED_EFFECT_PERCENTS: [f64; 3] = [5.0, 2.0, 1.0];

/// The number of blocks for which the smallest detectable effect is computed; the default of a campaign.
pub const REFERENCE_BLOCKS: usize = 20;

/// Kinds of blocks in a campaign: A against B, A against A, and two injected slow-downs.
const KINDS_OF_BLOCKS: f64 = 4.0;

/// The fewest pairs of a block in which a linear drift cancels: ABBA.
const MIN_PAIRS_PER_BLOCK: usize = 2;

/// The most pairs of a block. A longer block takes too long to be interleaved with others.
const MAX_PAIRS_PER_BLOCK: usize = 16;

/// The level of the test for warm-up.
const WARM_UP_LEVEL: f64 = 0.01;

/// The runs of a block in order: the label of each, and its samples, which are positive. A block begins with a restart
/// if the study has a command for that.
pub type StudyBlock = Vec<(Arm, Vec<f64>)>;

/// What repetition costs, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StudyCosts {
    /// A restart; `None` if the study has none.
    pub restart_seconds: Option<f64>,
    /// A run with all that is needed to start it.
    pub run_seconds: f64,
}

/// What is known of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricStudy {
    /// The geometric mean of the samples that count.
    pub mean: f64,
    /// What a campaign should discard.
    pub warm_up: WarmUpRule,
    /// The variances of logarithms that each level adds.
    pub components: VarianceComponents,
    /// How to repeat within a restart, and with a restart before each run if the study has restarts.
    pub plans: Vec<RepetitionPlan>,
}

/// How a campaign can repeat, and what it would see.
#[derive(Clone, Debug, PartialEq)]
pub struct RepetitionPlan {
    /// Whether each run begins with a restart, for changes that need one. Otherwise both arms share it.
    pub restarts_each_run: bool,
    /// The pairs of a block that give the narrowest interval in a given time.
    pub pairs_per_block: usize,
    /// The standard deviation of the log ratio of a block.
    pub block_deviation: f64,
    /// The log ratio that [`REFERENCE_BLOCKS`] blocks detect with the level and the probability of the goal.
    pub smallest_effect: f64,
    /// For each of [`PLANNED_EFFECT_PERCENTS`], the blocks that detect it likewise; `None` above a million.
    pub blocks_needed: [Option<usize>; 3],
    /// The time of one block of each kind of a campaign, in seconds.
    pub seconds_per_block: f64,
}

/// Analyzes a study. The goal is what a campaign is to detect in this metric. `None` without samples, or with fewer than
/// two blocks.
#[must_use]
pub fn analyze_study(blocks: &[StudyBlock], costs: StudyCosts, goal: PowerGoal) -> Option<MetricStudy> {
    if blocks.len() < 2 || blocks.iter().any(|runs| runs.iter().all(|(_, samples)| samples.is_empty())) {
        return None;
    }
    let logarithms: Vec<StudyBlock> = blocks
        .iter()
        .map(|runs| {
            runs.iter().map(|(arm, samples)| (*arm, samples.iter().map(|value| value.ln()).collect())).collect()
        })
        .collect();
    let warm_up = find_warm_up(&logarithms);
    let measured: Vec<StudyBlock> = logarithms
        .iter()
        .map(|runs| {
            let kept = runs.iter().skip(warm_up.runs_per_block);
            kept.map(|(arm, samples)| (*arm, warm_up.measured_samples(samples).to_vec())).collect()
        })
        .collect();
    let restarts: Vec<Vec<Vec<f64>>> =
        measured.iter().map(|runs| runs.iter().map(|(_, samples)| samples.clone()).collect()).collect();
    let components = variance_components(&restarts)?;
    let run_means = |runs: &StudyBlock, label: Arm| -> Vec<f64> {
        runs.iter().filter(|(arm, _)| *arm == label).map(|(_, samples)| mean(samples)).collect()
    };
    let pairs: Vec<(Vec<f64>, Vec<f64>)> = measured
        .iter()
        .map(|runs| (run_means(runs, Arm::A), run_means(runs, Arm::B)))
        .filter(|(a, b)| !a.is_empty() && !b.is_empty())
        .collect();
    let within = BlockComponents::from_blocks(&pairs);
    let warm_up_seconds = warm_up.runs_per_block as f64 * costs.run_seconds;
    let mut plans = vec![plan(within, warm_up_seconds, 2.0 * costs.run_seconds, false, goal)];
    if let Some(restart_seconds) = costs.restart_seconds {
        let each_run = BlockComponents { runs: within.runs + components.restarts, blocks: 0.0 };
        let pair_seconds = 2.0 * (restart_seconds + warm_up_seconds + costs.run_seconds);
        plans.push(plan(each_run, 0.0, pair_seconds, true, goal));
    }
    let all: Vec<f64> = restarts.concat().concat();
    Some(MetricStudy { mean: mean(&all).exp(), warm_up, components, plans })
}

fn plan(
    components: BlockComponents,
    block_seconds: f64,
    pair_seconds: f64,
    restarts_each_run: bool,
    goal: PowerGoal,
) -> RepetitionPlan {
    let pairs_per_block =
        components.best_pairs_per_block(block_seconds, pair_seconds, MAX_PAIRS_PER_BLOCK).max(MIN_PAIRS_PER_BLOCK);
    let block_deviation = components.variance_of_block(pairs_per_block).sqrt();
    // The permutation test of a campaign cannot reach its level with fewer blocks.
    let fewest = (2..MAX_EXACT_VALUES).find(|&blocks| smallest_p_value(blocks) <= goal.alpha).unwrap_or(2);
    let needed = |percent: f64| {
        let blocks = blocks_needed((1.0 + percent / 100.0).ln(), block_deviation, goal);
        blocks.map(|blocks| blocks.max(fewest))
    };
    RepetitionPlan {
        restarts_each_run,
        pairs_per_block,
        block_deviation,
        smallest_effect: smallest_detectable_effect(block_deviation, REFERENCE_BLOCKS, goal),
        blocks_needed: PLANNED_EFFECT_PERCENTS.map(needed),
        seconds_per_block: KINDS_OF_BLOCKS * (block_seconds + pairs_per_block as f64 * pair_seconds),
    }
}

/// The warm-up of a study: the first runs of its blocks, and the first samples of the runs after these.
fn find_warm_up(blocks: &[StudyBlock]) -> WarmUpRule {
    let run_means = |runs: &StudyBlock| -> Vec<f64> {
        runs.iter().filter(|(_, samples)| !samples.is_empty()).map(|(_, samples)| mean(samples)).collect()
    };
    let runs_per_block = warm_up_of_series(&blocks.iter().map(run_means).collect::<Vec<_>>());
    let later: Vec<Vec<f64>> = blocks
        .iter()
        .flat_map(|runs| runs.iter().skip(runs_per_block).map(|(_, samples)| samples.clone()))
        .filter(|samples| !samples.is_empty())
        .collect();
    WarmUpRule { runs_per_block, samples_per_run: warm_up_of_series(&later) }
}

/// The warm-up that several series share: the positions of the first half up to the last one whose value differs from the
/// mean of the second half of its series, by a t test over the series with Bonferroni's correction for the positions.
/// Positions end with the shortest series.
///
/// Source: comparing replications position by position is P. D. Welch's procedure, "The statistical analysis of simulation
/// results", in: Computer Performance Modeling Handbook, 1983; the test replaces his plot.
fn warm_up_of_series(series: &[Vec<f64>]) -> usize {
    let half = series.iter().map(Vec::len).min().unwrap_or(0) / 2;
    if half == 0 || series.len() < 2 {
        return 0;
    }
    let replications = series.len() as f64;
    let critical = t_quantile(1.0 - WARM_UP_LEVEL / (2.0 * half as f64), replications - 1.0);
    let differs = |position: usize| {
        let difference = |values: &Vec<f64>| values[position] - mean(&values[half..]);
        let differences: Vec<f64> = series.iter().map(difference).collect();
        mean(&differences).abs() > critical * standard_deviation(&differences) / replications.sqrt()
    };
    (0..half).rev().find(|&position| differs(position)).map_or(0, |last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt as _, SeedableRng as _};

    /// Blocks of six runs of one sample, whose logarithms have uniform noise of these standard deviations.
    fn draw(blocks: usize, of_restarts: f64, of_runs: f64, first_run: f64) -> Vec<StudyBlock> {
        let mut random = ChaCha8Rng::seed_from_u64(3);
        let mut noise = |deviation: f64| (random.random::<f64>() - 0.5) * 12.0_f64.sqrt() * deviation;
        (0..blocks)
            .map(|_| {
                let restart = noise(of_restarts);
                let run = |position: usize, noise: f64| {
                    let arm = if matches!(position % 4, 0 | 3) { Arm::A } else { Arm::B };
                    let warm_up = if position == 0 { first_run } else { 0.0 };
                    (arm, vec![(restart + noise + warm_up).exp() * 10.0])
                };
                (0..6).map(|position| run(position, noise(of_runs))).collect()
            })
            .collect()
    }

    #[test]
    fn samples_that_differ_in_all_runs_are_warm_up() {
        let series = |offset: f64| vec![9.0 + offset, 5.0 - offset, 1.0, 1.1 + offset, 0.9, 1.0 - offset, 1.1, 0.9];
        assert_eq!(warm_up_of_series(&[series(0.0), series(0.1), series(-0.2)]), 2);
        assert_eq!(warm_up_of_series(&[vec![1.0; 10], vec![1.0; 7]]), 0);
        assert_eq!(warm_up_of_series(&[vec![9.0, 1.0, 1.0]]), 0, "one series may be an exception");
        assert_eq!(warm_up_of_series(&[]), 0);
    }

    #[test]
    fn slow_first_runs_are_warm_up_and_noise_is_none() {
        let costs = StudyCosts { restart_seconds: None, run_seconds: 1.0 };
        let warm = analyze_study(&draw(10, 0.0, 0.01, 0.2), costs, PowerGoal::default()).unwrap();
        assert_eq!(warm.warm_up, WarmUpRule { runs_per_block: 1, samples_per_run: 0 });
        let steady = analyze_study(&draw(10, 0.0, 0.01, 0.0), costs, PowerGoal::default()).unwrap();
        assert_eq!(steady.warm_up, WarmUpRule::default());
        assert!((steady.mean / 10.0 - 1.0).abs() < 0.01, "{steady:?}");
    }

    #[test]
    fn restarts_matter_only_if_each_run_has_one() {
        let costs = StudyCosts { restart_seconds: Some(30.0), run_seconds: 2.0 };
        let study = analyze_study(&draw(400, 0.03, 0.01, 0.0), costs, PowerGoal::default()).unwrap();
        let [within, each_run] = &study.plans[..] else { panic!("{study:?}") };
        assert!((study.components.restarts.sqrt() / 0.03 - 1.0).abs() < 0.1, "{study:?}");
        assert!((study.components.runs.sqrt() / 0.01 - 1.0).abs() < 0.1, "{study:?}");
        // Two pairs: the variance of a block's ratio is that of a run, and with restarts also that of a restart.
        assert!((within.block_deviation / 0.01 - 1.0).abs() < 0.1, "{study:?}");
        assert!((each_run.block_deviation / 0.001_f64.sqrt() - 1.0).abs() < 0.1, "{study:?}");
        assert_eq!((within.pairs_per_block, within.seconds_per_block), (2, 4.0 * 2.0 * 4.0));
        assert_eq!((each_run.pairs_per_block, each_run.seconds_per_block), (2, 4.0 * 2.0 * 64.0));
        assert!(within.smallest_effect < each_run.smallest_effect);
        // A two-sided t test finds an effect of one standard deviation with 80 % probability in about ten blocks.
        assert!((9..=12).contains(&within.blocks_needed[2].unwrap()), "{study:?}");
        assert_eq!(within.blocks_needed[0], Some(6), "fewer cannot reach the level");
    }

    /// Two metrics halve the level. By scipy's noncentral t distribution, 20 blocks detect 0.7391 instead of 0.6604
    /// standard deviations.
    #[test]
    fn stricter_goal_needs_more_blocks() {
        let costs = StudyCosts { restart_seconds: None, run_seconds: 1.0 };
        let blocks = draw(400, 0.0, 0.01, 0.0);
        let plan = |alpha: f64| {
            let goal = PowerGoal { alpha, ..PowerGoal::default() };
            analyze_study(&blocks, costs, goal).unwrap().plans.remove(0)
        };
        let (one, two) = (plan(0.05), plan(0.025));
        let growth = two.smallest_effect / one.smallest_effect;
        assert!((growth - 0.739_070_5 / 0.660_441_7).abs() < 2e-3, "{growth}");
        assert!(two.blocks_needed[2] > one.blocks_needed[2], "{one:?} {two:?}");
        // The smallest p-values of 6 and 7 blocks are 2 to the power of -5 and of -6.
        assert_eq!((one.blocks_needed[0], two.blocks_needed[0]), (Some(6), Some(7)));
    }

    #[test]
    fn study_without_two_blocks_says_nothing() {
        let costs = StudyCosts { restart_seconds: None, run_seconds: 1.0 };
        assert_eq!(analyze_study(&draw(1, 0.0, 0.01, 0.0), costs, PowerGoal::default()), None);
        assert_eq!(analyze_study(&[], costs, PowerGoal::default()), None);
        assert_eq!(analyze_study(&[vec![(Arm::A, vec![])], vec![(Arm::A, vec![])]], costs, PowerGoal::default()), None);
    }
}
