//! From the samples of a campaign to its verdicts.
//!
//! For each metric, [`analyze`] estimates the ratio of B to A over the comparison blocks, with an interval, the
//! permutation test and the smallest detectable effect. It estimates the same over the same-arm blocks, where it must find
//! nothing, and over the blocks with injected slow-downs, where it says whether it found them. A verdict of a difference
//! needs both the interval and the permutation test, and a host that does not differ from itself by as much.

use super::design::{Arm, BlockKind};
use super::statistics::components::BlockComponents;
use super::statistics::correction::{Correction, correct_p_values};
use super::statistics::interval::{Bootstrap, ConfidenceInterval, IntervalMethod};
use super::statistics::power::{PowerGoal, smallest_detectable_effect};
use super::statistics::sign_flip::{sign_flip_test, smallest_p_value};
use super::statistics::{is_within_margin, log_ratio, mean, standard_deviation};
use thiserror::Error;

/// The samples of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSamples {
    /// Under which arm the run is counted.
    pub label: Arm,
    /// For each metric, in the order of [`AnalysisOptions::metrics`], the samples after the warm-up.
    pub metrics: Vec<Vec<f64>>,
    /// By how much the counter that the setting should move has moved, if it was read.
    pub counter_change: Option<f64>,
}

/// The samples of one block, warm-up runs left out.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockSamples {
    /// The position in the schedule.
    pub index: usize,
    /// What the labels stand for.
    pub kind: BlockKind,
    /// The runs in order.
    pub runs: Vec<RunSamples>,
    /// Whether the environment was flagged as noisy, before the samples were looked at.
    pub is_noisy: bool,
}

/// Which change of a metric is an improvement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Such as a time.
    LowerIsBetter,
    /// Such as a throughput.
    HigherIsBetter,
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The name in messages.
    pub name: String,
    /// Which change is an improvement.
    pub direction: Direction,
}

/// What becomes of blocks that were flagged as noisy. The choice is made before the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NoisyBlocks {
    /// They are analyzed like the others, and the estimate without them is reported too.
    #[default]
    Keep,
    /// They are left out, and the estimate with them is reported too.
    Exclude,
}

/// How the counter that the setting should move is expected to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterExpectation {
    /// It changes more under B than under A.
    Increase,
    /// It changes less under B than under A.
    Decrease,
    /// It changes differently.
    Differ,
}

/// How a campaign is analyzed.
#[derive(Clone, Debug, PartialEq)]
pub struct AnalysisOptions {
    /// The metrics.
    pub metrics: Vec<Metric>,
    /// The two-sided level of tests; intervals have the confidence `1 - alpha`. At a look of a group sequential plan this is
    /// the nominal level of the look.
    pub alpha: f64,
    /// The margin of equivalence: 0.01 for "no effect larger than one percent".
    pub margin: f64,
    /// The probability with which the smallest detectable effect is found.
    pub power: f64,
    /// The method of the intervals that verdicts rest on.
    pub method: IntervalMethod,
    /// The number of bootstrap resamples.
    pub resamples: usize,
    /// The correction for several metrics.
    pub correction: Correction,
    /// What becomes of noisy blocks.
    pub noisy_blocks: NoisyBlocks,
    /// How the proof counter should move; absent if the campaign has none.
    pub counter: Option<CounterExpectation>,
    /// The seed of resamples and sign patterns.
    pub seed: u64,
}

impl AnalysisOptions {
    /// The default number of bootstrap resamples.
    pub const RESAMPLES: usize = 10_000;

    /// A level of 5 percent, a margin of 1 percent, a power of 80 percent, Student's t intervals of the log ratios, and
    /// Holm's correction.
    ///
    /// Of the methods in [`IntervalMethod`], Student's t has the smallest error of coverage in the worst case of the
    /// simulated campaigns (`docs/ab-harness.md`): the randomized order makes the log ratios nearly symmetric, and the mean
    /// of symmetric values needs no correction of skewness.
    #[must_use]
    pub fn new(metrics: Vec<Metric>, seed: u64) -> Self {
        Self {
            metrics,
            alpha: 0.05,
            margin: 0.01,
            power: 0.8,
            method: IntervalMethod::StudentT,
            resamples: Self::RESAMPLES,
            correction: Correction::default(),
            noisy_blocks: NoisyBlocks::default(),
            counter: None,
            seed,
        }
    }

    /// What the comparison of a metric detects whatever the other metrics show. Its level is corrected for several metrics.
    #[must_use]
    pub fn comparison_goal(&self) -> PowerGoal {
        let alpha = self.correction.individual_alpha(self.alpha, self.metrics.len());
        PowerGoal { alpha, power: self.power }
    }

    /// What a control of a metric detects. Findings of controls are not corrected.
    #[must_use]
    pub fn control_goal(&self) -> PowerGoal {
        PowerGoal { alpha: self.alpha, power: self.power }
    }
}

/// An estimated effect. Ratios are B to A.
#[derive(Clone, Debug, PartialEq)]
pub struct EffectEstimate {
    /// Number of blocks.
    pub blocks: usize,
    /// The log ratio of each block, in order.
    pub log_ratios: Vec<f64>,
    /// The geometric mean of the ratios.
    pub ratio: f64,
    /// The interval of the ratio with confidence `1 - alpha`.
    pub interval: ConfidenceInterval,
    /// The expanded BCa interval of the ratio with confidence `1 - alpha`. It is reported and decides nothing: for values
    /// with heavy tails it is too narrow.
    pub bca_interval: ConfidenceInterval,
    /// The interval of the ratio with confidence `1 - 2 * alpha`, for the equivalence.
    pub equivalence_interval: ConfidenceInterval,
    /// The two-sided p-value of the sign-flip test.
    pub p_value: f64,
    /// Whether the test counted all sign patterns.
    pub is_p_value_exact: bool,
    /// The standard deviation of the log ratios.
    pub standard_deviation: f64,
    /// The smallest effect that so many blocks find with the level and the power of the goal, as a share: 0.01 is one
    /// percent. Infinite if the sign-flip test of so many blocks cannot reach the level.
    pub smallest_detectable_effect: f64,
    /// Whether no effect is larger than the margin. An interval of one point shows nothing: blocks that all have the same
    /// ratio do not show the noise.
    pub is_within_margin: bool,
}

/// What a campaign says about a metric.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EffectVerdict {
    /// B is better.
    Faster,
    /// B is worse.
    Slower,
    /// No effect is larger than the margin.
    Equivalent,
    /// The campaign cannot tell.
    Inconclusive {
        /// The smallest effect that it would have found, as a share.
        smallest_detectable_effect: f64,
    },
    /// The counter that the setting should move did not move: nothing was compared.
    NotApplied,
}

/// The same-arm blocks of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct SameArmResult {
    /// The estimate; its true ratio is 1.
    pub estimate: EffectEstimate,
    /// Whether the campaign sees a difference, which is false.
    pub is_difference_found: bool,
    /// Whether the interval contains 1.
    pub is_ratio_in_interval: bool,
}

impl SameArmResult {
    /// Whether the host differs from itself, by the interval, by an effect as large as this ratio: the limit of the interval
    /// that is farther from 1 is as far as the ratio, in either direction. The number of blocks does not matter.
    #[must_use]
    pub fn reaches(&self, ratio: f64) -> bool {
        let interval = &self.estimate.interval;
        let farthest = interval.low.ln().abs().max(interval.high.ln().abs());
        !self.is_ratio_in_interval && farthest >= ratio.ln().abs()
    }
}

/// The blocks of one injected slow-down.
#[derive(Clone, Debug, PartialEq)]
pub struct InjectedResult {
    /// The slow-down in percent of the run's time.
    pub slowdown_percent: u32,
    /// The estimate.
    pub estimate: EffectEstimate,
    /// The ratio that the slow-down gives to the metric.
    pub true_ratio: f64,
    /// Whether the campaign sees that B is worse.
    pub is_found: bool,
    /// Whether the interval contains the true ratio.
    pub is_ratio_in_interval: bool,
    /// Whether the interval reaches the slow-down or one that differs from it by up to [`INJECTION_TOLERANCE`].
    pub acted_as_intended: bool,
}

/// By which share of itself an injected slow-down may be larger or smaller. A stop has errors of its own, which a quiet host
/// measures exactly; a slow-down of 1.5 % instead of 2 % still says which effects are found.
const INJECTION_TOLERANCE: f64 = 0.25;

/// One metric of a campaign.
#[derive(Clone, Debug, PartialEq)]
pub struct MetricAnalysis {
    /// The metric.
    pub metric: Metric,
    /// The verdict.
    pub verdict: EffectVerdict,
    /// The estimate over the comparison blocks that count.
    pub comparison: EffectEstimate,
    /// The p-value of the comparison after the correction for several metrics.
    pub corrected_p_value: f64,
    /// With noisy blocks, the estimate of the other choice of [`NoisyBlocks`], if that leaves two blocks.
    pub other_noisy_choice: Option<EffectEstimate>,
    /// The same-arm blocks; absent with fewer than two.
    pub same_arm: Option<SameArmResult>,
    /// Whether a difference of the comparison is no verdict, because the same-arm blocks reach it.
    pub is_difference_reached_by_same_arm: bool,
    /// The injected slow-downs with at least two blocks, ascending.
    pub injected: Vec<InjectedResult>,
    /// The variance between runs and between blocks of the comparison.
    pub components: BlockComponents,
}

/// The counter that the setting should move.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CounterResult {
    /// The mean change in a run under A.
    pub change_in_a: f64,
    /// The mean change in a run under B.
    pub change_in_b: f64,
    /// The p-value of the sign-flip test of the differences of the blocks.
    pub p_value: f64,
    /// Whether the counter moved as expected.
    pub has_moved: bool,
}

/// The result of a campaign.
#[derive(Clone, Debug, PartialEq)]
pub struct Analysis {
    /// The metrics in the order of the options.
    pub metrics: Vec<MetricAnalysis>,
    /// The proof counter; absent if the campaign has none.
    pub counter: Option<CounterResult>,
    /// Comparison blocks that were flagged as noisy.
    pub noisy_blocks: usize,
}

/// Why samples cannot be analyzed.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum AnalysisError {
    /// Fewer than two comparison blocks count.
    #[error("{blocks} comparison blocks are too few for an analysis; run at least 2, and 10 for an answer")]
    TooFewBlocks {
        /// Blocks that count.
        blocks: usize,
    },
    /// A block lacks an arm.
    #[error("block {block} has no run of arm {arm:?}; run the block again")]
    ArmWithoutRun {
        /// The block.
        block: usize,
        /// The arm.
        arm: Arm,
    },
    /// A run lacks samples of a metric.
    #[error("a run of block {block} has no samples of metric {metric}; check how the metric is read")]
    RunWithoutSamples {
        /// The block.
        block: usize,
        /// The metric.
        metric: String,
    },
    /// A ratio needs positive samples.
    #[error("metric {metric} is {value} in block {block}; ratios need positive, finite samples")]
    SampleNotPositive {
        /// The block.
        block: usize,
        /// The metric.
        metric: String,
        /// The sample.
        value: f64,
    },
    /// A run lacks the proof counter.
    #[error("the counter that the setting should move was not read in block {block}; check that it can be read")]
    CounterNotRead {
        /// The block.
        block: usize,
    },
}

/// Analyze the blocks of a campaign.
///
/// # Errors
/// Blocks or runs without samples, samples that are not positive, or fewer than two comparison blocks that count.
pub fn analyze(blocks: &[BlockSamples], options: &AnalysisOptions) -> Result<Analysis, AnalysisError> {
    let comparison_blocks: Vec<&BlockSamples> =
        blocks.iter().filter(|block| block.kind == BlockKind::Comparison).collect();
    let counter = match options.counter {
        Some(expectation) => Some(analyze_counter(&comparison_blocks, expectation, options)?),
        None => None,
    };
    let mut metrics = Vec::new();
    for index in 0..options.metrics.len() {
        metrics.push(analyze_metric(blocks, index, options)?);
    }
    let p_values: Vec<f64> = metrics.iter().map(|metric| metric.comparison.p_value).collect();
    for (metric, p_value) in metrics.iter_mut().zip(correct_p_values(&p_values, options.correction)) {
        metric.corrected_p_value = p_value;
        let comparison = &metric.comparison;
        metric.verdict = match counter {
            Some(CounterResult { has_moved: false, .. }) => EffectVerdict::NotApplied,
            _ => verdict(comparison, metric.metric.direction, p_value, options.alpha),
        };
        let is_difference = matches!(metric.verdict, EffectVerdict::Faster | EffectVerdict::Slower);
        if is_difference && metric.same_arm.as_ref().is_some_and(|control| control.reaches(comparison.ratio)) {
            let smallest_detectable_effect = comparison.smallest_detectable_effect;
            metric.is_difference_reached_by_same_arm = true;
            metric.verdict = EffectVerdict::Inconclusive { smallest_detectable_effect };
        }
    }
    let noisy_blocks = comparison_blocks.iter().filter(|block| block.is_noisy).count();
    Ok(Analysis { metrics, counter, noisy_blocks })
}

fn verdict(estimate: &EffectEstimate, direction: Direction, p_value: f64, alpha: f64) -> EffectVerdict {
    match difference(estimate, p_value, alpha) {
        Some(change) if change == direction => EffectVerdict::Slower,
        Some(_) => EffectVerdict::Faster,
        None if estimate.is_within_margin => EffectVerdict::Equivalent,
        None => EffectVerdict::Inconclusive { smallest_detectable_effect: estimate.smallest_detectable_effect },
    }
}

/// For which direction a found difference is a worsening: a higher ratio is worse where lower is better. `None` if the
/// interval contains 1 or the p-value is above the level.
fn difference(estimate: &EffectEstimate, p_value: f64, alpha: f64) -> Option<Direction> {
    if estimate.interval.contains(1.0) || p_value > alpha {
        return None;
    }
    Some(if estimate.ratio > 1.0 { Direction::LowerIsBetter } else { Direction::HigherIsBetter })
}

fn analyze_metric(
    blocks: &[BlockSamples],
    index: usize,
    options: &AnalysisOptions,
) -> Result<MetricAnalysis, AnalysisError> {
    let metric = &options.metrics[index];
    let means = |keep: &dyn Fn(&BlockSamples) -> bool| {
        let kept = blocks.iter().filter(|block| keep(block));
        kept.map(|block| run_means(block, index, &metric.name)).collect::<Result<Vec<_>, _>>()
    };
    let all = means(&|block| block.kind == BlockKind::Comparison)?;
    let quiet = means(&|block| block.kind == BlockKind::Comparison && !block.is_noisy)?;
    let has_noise = all.len() != quiet.len();
    let (counted, other) = match options.noisy_blocks {
        NoisyBlocks::Keep => (all, quiet),
        NoisyBlocks::Exclude => (quiet, all),
    };
    if counted.len() < 2 {
        return Err(AnalysisError::TooFewBlocks { blocks: counted.len() });
    }
    let comparison_goal = options.comparison_goal();
    let estimate = |means: &[RunMeans], goal: PowerGoal| {
        let log_ratios = means.iter().map(|means| log_ratio(&means.a, &means.b)).collect();
        estimate_effect(log_ratios, options, goal)
    };
    let is_counted = |block: &BlockSamples| options.noisy_blocks == NoisyBlocks::Keep || !block.is_noisy;
    let control = |kind: BlockKind| -> Result<Option<EffectEstimate>, AnalysisError> {
        let means = means(&|block| block.kind == kind && is_counted(block))?;
        Ok((means.len() >= 2).then(|| estimate(&means, options.control_goal())))
    };
    let same_arm = control(BlockKind::SameArm)?.map(|estimate| {
        let is_difference_found = difference(&estimate, estimate.p_value, options.alpha).is_some();
        let is_ratio_in_interval = estimate.interval.contains(1.0);
        SameArmResult { estimate, is_difference_found, is_ratio_in_interval }
    });
    let mut injected = Vec::new();
    for slowdown_percent in list_slowdowns(blocks) {
        let Some(estimate) = control(BlockKind::Injected { slowdown_percent })? else { continue };
        injected.push(judge_injection(slowdown_percent, estimate, metric.direction, options.alpha));
    }
    let comparison = estimate(&counted, comparison_goal);
    let logarithms = |means: &[f64]| means.iter().map(|mean| mean.ln()).collect::<Vec<f64>>();
    let pairs: Vec<_> = counted.iter().map(|means| (logarithms(&means.a), logarithms(&means.b))).collect();
    Ok(MetricAnalysis {
        metric: metric.clone(),
        // These are set after the correction for all metrics.
        verdict: EffectVerdict::NotApplied,
        corrected_p_value: comparison.p_value,
        other_noisy_choice: (has_noise && other.len() >= 2).then(|| estimate(&other, comparison_goal)),
        comparison,
        same_arm,
        is_difference_reached_by_same_arm: false,
        injected,
        components: BlockComponents::from_blocks(&pairs),
    })
}

/// The injected slow-downs of blocks in percent, ascending.
fn list_slowdowns(blocks: &[BlockSamples]) -> Vec<u32> {
    let mut percents: Vec<u32> = blocks
        .iter()
        .filter_map(|block| match block.kind {
            BlockKind::Injected { slowdown_percent } => Some(slowdown_percent),
            BlockKind::Comparison | BlockKind::SameArm => None,
        })
        .collect();
    percents.sort_unstable();
    percents.dedup();
    percents
}

/// Whether an injected slow-down acted, and whether it was found.
fn judge_injection(
    slowdown_percent: u32,
    estimate: EffectEstimate,
    direction: Direction,
    alpha: f64,
) -> InjectedResult {
    let ratio = |factor: f64| {
        let slowdown = 1.0 + f64::from(slowdown_percent) / 100.0 * factor;
        match direction {
            Direction::LowerIsBetter => slowdown,
            Direction::HigherIsBetter => slowdown.recip(),
        }
    };
    let (one, other) = (ratio(1.0 - INJECTION_TOLERANCE), ratio(1.0 + INJECTION_TOLERANCE));
    InjectedResult {
        slowdown_percent,
        true_ratio: ratio(1.0),
        is_found: difference(&estimate, estimate.p_value, alpha) == Some(direction),
        is_ratio_in_interval: estimate.interval.contains(ratio(1.0)),
        acted_as_intended: estimate.interval.low <= one.max(other) && estimate.interval.high >= one.min(other),
        estimate,
    }
}

/// The means of the runs of a block.
struct RunMeans {
    a: Vec<f64>,
    b: Vec<f64>,
}

fn run_means(block: &BlockSamples, index: usize, metric: &str) -> Result<RunMeans, AnalysisError> {
    let mut means = RunMeans { a: Vec::new(), b: Vec::new() };
    for run in &block.runs {
        let samples = run.metrics.get(index).map(Vec::as_slice).unwrap_or_default();
        if samples.is_empty() {
            return Err(AnalysisError::RunWithoutSamples { block: block.index, metric: metric.to_owned() });
        }
        if let Some(&value) = samples.iter().find(|&&value| !(value > 0.0 && value.is_finite())) {
            return Err(AnalysisError::SampleNotPositive { block: block.index, metric: metric.to_owned(), value });
        }
        match run.label {
            Arm::A => means.a.push(mean(samples)),
            Arm::B => means.b.push(mean(samples)),
        }
    }
    for (arm, means) in [(Arm::A, &means.a), (Arm::B, &means.b)] {
        if means.is_empty() {
            return Err(AnalysisError::ArmWithoutRun { block: block.index, arm });
        }
    }
    Ok(means)
}

/// The width of an interval of log ratios that has only rounding errors.
const DEGENERATE_INTERVAL_WIDTH: f64 = 1e-12;

/// The estimate from the log ratios of at least one block. The goal is that of the smallest detectable effect.
///
/// # Panics
/// Without log ratios.
#[must_use]
pub fn estimate_effect(log_ratios: Vec<f64>, options: &AnalysisOptions, goal: PowerGoal) -> EffectEstimate {
    let bootstrap = match options.method {
        IntervalMethod::BootstrapT => Bootstrap::with_studentized_means(&log_ratios, options.resamples, options.seed),
        _ => Bootstrap::new(&log_ratios, options.resamples, options.seed),
    };
    let interval = bootstrap.interval(options.method, 1.0 - options.alpha);
    let inner = bootstrap.interval(options.method, 1.0 - 2.0 * options.alpha);
    let test = sign_flip_test(&log_ratios, options.seed);
    let deviation = standard_deviation(&log_ratios);
    let smallest_effect = if smallest_p_value(log_ratios.len()) > goal.alpha {
        f64::INFINITY
    } else {
        smallest_detectable_effect(deviation, log_ratios.len(), goal).exp_m1()
    };
    let as_ratio = |interval: ConfidenceInterval| ConfidenceInterval {
        low: interval.low.exp(),
        high: interval.high.exp(),
        ..interval
    };
    EffectEstimate {
        blocks: log_ratios.len(),
        ratio: mean(&log_ratios).exp(),
        interval: as_ratio(interval),
        bca_interval: as_ratio(bootstrap.interval(IntervalMethod::ExpandedBca, 1.0 - options.alpha)),
        equivalence_interval: as_ratio(inner),
        p_value: test.p_value,
        is_p_value_exact: test.is_exact,
        standard_deviation: deviation,
        smallest_detectable_effect: smallest_effect,
        is_within_margin: is_within_margin(inner.low, inner.high, options.margin)
            && inner.high - inner.low > DEGENERATE_INTERVAL_WIDTH,
        log_ratios,
    }
}

/// Whether the proof counter moved as expected.
///
/// It moved if the sign-flip test of the differences of the blocks, B minus A, is at most the level. Fewer than six blocks
/// cannot reach a level of 0.05; there all differences must have the same sign.
fn analyze_counter(
    blocks: &[&BlockSamples],
    expectation: CounterExpectation,
    options: &AnalysisOptions,
) -> Result<CounterResult, AnalysisError> {
    let mut changes: (Vec<f64>, Vec<f64>) = (Vec::new(), Vec::new());
    for block in blocks {
        for (arm, changes) in [(Arm::A, &mut changes.0), (Arm::B, &mut changes.1)] {
            let runs = block.runs.iter().filter(|run| run.label == arm).map(|run| run.counter_change);
            let runs: Option<Vec<f64>> = runs.collect();
            let runs = runs.ok_or(AnalysisError::CounterNotRead { block: block.index })?;
            if runs.is_empty() {
                return Err(AnalysisError::ArmWithoutRun { block: block.index, arm });
            }
            changes.push(mean(&runs));
        }
    }
    let (a, b) = changes;
    if a.is_empty() {
        return Err(AnalysisError::TooFewBlocks { blocks: 0 });
    }
    let differences: Vec<f64> = a.iter().zip(&b).map(|(a, b)| b - a).collect();
    let p_value = sign_flip_test(&differences, options.seed).p_value;
    let smallest_p_value = smallest_p_value(differences.len());
    let increases = |difference: &f64| *difference > 0.0;
    let decreases = |difference: &f64| *difference < 0.0;
    let differs = p_value <= options.alpha.max(smallest_p_value)
        && (p_value <= options.alpha || differences.iter().all(increases) || differences.iter().all(decreases));
    let has_moved = differs
        && match expectation {
            CounterExpectation::Increase => mean(&differences) > 0.0,
            CounterExpectation::Decrease => mean(&differences) < 0.0,
            CounterExpectation::Differ => true,
        };
    Ok(CounterResult { change_in_a: mean(&a), change_in_b: mean(&b), p_value, has_moved })
}

#[cfg(test)]
mod tests;
