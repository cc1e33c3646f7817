//! Simulated campaigns with known effects: they test whether the analysis of experiments finds what is there and nothing
//! else.
//!
//! A campaign follows a real schedule ([`pagefold_ab::decide::design`]) and is analyzed by the real analysis
//! ([`pagefold_ab::decide::analysis`]); only the times of the runs are drawn ([`run_times`]). The comparison blocks hold an
//! effect of one percent, so that one campaign tests the absence of an effect and effects of 1, 2 and 5 percent.
//! [`rivals`] judge the same runs by common rules.

pub mod rivals;
pub mod run_times;

use pagefold_ab::decide::analysis::{
    Analysis, AnalysisOptions, BlockSamples, Direction, EffectEstimate, EffectVerdict, Metric, RunSamples, analyze,
};
use pagefold_ab::decide::design::{Arm, BlockKind, DesignOptions, Level, Schedule};
use pagefold_ab::decide::statistics::interval::{Bootstrap, IntervalMethod};
use rand::SeedableRng as _;
use rand::rngs::ChaCha8Rng;
use rivals::{Conclusion, Rival};
use run_times::RunTimeModel;

/// The effect of the comparison blocks, in percent of a run's time. It is also the margin of equivalence.
pub const COMPARISON_PERCENT: u32 = 1;

/// The effects that a campaign holds, in percent: none, the comparison's, and the injected ones.
pub const EFFECT_PERCENTS: [u32; 4] = [0, COMPARISON_PERCENT, 2, 5];

/// Resamples of the analysis of a simulated campaign. They do not change a verdict, which rests on Student's t.
const ANALYSIS_RESAMPLES: usize = 100;

/// The methods whose coverage is compared.
pub const METHODS: [IntervalMethod; 6] = [
    IntervalMethod::Percentile,
    IntervalMethod::Bca,
    IntervalMethod::ExpandedBca,
    IntervalMethod::ExpandedPercentile,
    IntervalMethod::BootstrapT,
    IntervalMethod::StudentT,
];

/// Blocks of a campaign with known effects.
///
/// Time passes from run to run through the whole schedule, warm-up runs included.
#[must_use]
pub fn simulate(model: RunTimeModel, blocks: usize, seed: u64) -> Vec<BlockSamples> {
    let schedule = Schedule::generate(&DesignOptions::new(Level::Run, blocks, seed));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(1);
    let runs: Vec<_> = schedule.blocks.iter().map(|block| block.runs(&schedule.warm_up)).collect();
    let lengths: Vec<usize> = runs.iter().map(Vec::len).collect();
    let times = model.draw_blocks(&lengths, &mut random);
    let block = |((block, runs), times): ((_, &Vec<_>), Vec<[f64; 2]>)| {
        let block: &pagefold_ab::decide::design::ScheduledBlock = block;
        let run = |(run, times): (&pagefold_ab::decide::design::ScheduledRun, [f64; 2])| {
            let percent = match (block.kind, run.label) {
                (BlockKind::Comparison, Arm::B) => COMPARISON_PERCENT,
                _ => run.slowdown_percent,
            };
            let time = times[usize::from(run.label == Arm::B)] * (1.0 + f64::from(percent) / 100.0);
            (!run.is_warm_up).then(|| RunSamples { label: run.label, metrics: vec![vec![time]], counter_change: None })
        };
        BlockSamples {
            index: block.index,
            kind: block.kind,
            runs: runs.iter().zip(times).filter_map(run).collect(),
            is_noisy: false,
        }
    };
    schedule.blocks.iter().zip(&runs).zip(times).map(block).collect()
}

/// The options of the analysis of simulated campaigns.
fn analysis_options(seed: u64) -> AnalysisOptions {
    let metric = Metric { name: "time".to_owned(), direction: Direction::LowerIsBetter };
    let margin = f64::from(COMPARISON_PERCENT) / 100.0;
    AnalysisOptions { resamples: ANALYSIS_RESAMPLES, margin, ..AnalysisOptions::new(vec![metric], seed) }
}

/// What one campaign said about one effect.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EffectOutcome {
    /// Whether the analysis found a difference in the direction of the effect; without an effect, in any direction.
    pub is_found: bool,
    /// Whether the 95 % interval contained the true ratio.
    pub is_covered: bool,
    /// Whether the analysis says that no effect is larger than the margin of equivalence, [`COMPARISON_PERCENT`].
    pub is_equivalent: bool,
    /// The variance of the log ratios of the blocks.
    pub variance: f64,
    /// The same for each rival on the same runs, in the order of [`Rival::ALL`].
    pub found_by_rivals: [bool; 3],
    /// What the rivals found on as many runs in the order in which they are commonly made: all of A, then all of B.
    pub found_in_sequence: [bool; 3],
}

/// What one campaign said.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedCampaignOutcome {
    /// For each of [`EFFECT_PERCENTS`].
    pub effects: [EffectOutcome; 4],
    /// For each of [`METHODS`], whether its 95 % interval contained the true ratio of the comparison.
    pub covered_by_method: [bool; 6],
}

/// Simulate and analyze one campaign, and compute the intervals of [`METHODS`] with so many resamples.
///
/// # Panics
/// If the analysis refuses the samples, which are complete and positive.
#[must_use]
pub fn try_campaign(model: RunTimeModel, blocks: usize, resamples: usize, seed: u64) -> SimulatedCampaignOutcome {
    let samples = simulate(model, blocks, seed);
    let options = analysis_options(seed);
    let analysis = analyze(&samples, &options).expect("a simulated campaign is complete");
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(2);
    let effects = EFFECT_PERCENTS.map(|percent| {
        let (estimate, is_found) = result_of_effect(&analysis, percent);
        let kind = kind_of_effect(percent);
        let of_label = |label| -> Vec<f64> {
            let runs = samples.iter().filter(|block| block.kind == kind).flat_map(|block| &block.runs);
            runs.filter(|run| run.label == label).map(|run| run.metrics[0][0]).collect()
        };
        let (a, b) = (of_label(Arm::A), of_label(Arm::B));
        let effect = 1.0 + f64::from(percent) / 100.0;
        let (first, mut second) = model.draw_sequence(a.len(), &mut random);
        second.iter_mut().for_each(|time| *time *= effect);
        let found = |a: &[f64], b: &[f64]| {
            Rival::ALL.map(|rival| match rival.judge(a, b) {
                Conclusion::NoDifference => false,
                Conclusion::Slower => true,
                Conclusion::Faster => percent == 0,
            })
        };
        EffectOutcome {
            is_found,
            is_covered: estimate.interval.contains(effect),
            is_equivalent: estimate.is_within_margin,
            variance: estimate.standard_deviation.powi(2),
            found_by_rivals: found(&a, &b),
            found_in_sequence: found(&first, &second),
        }
    });
    let comparison = &analysis.metrics[0].comparison.log_ratios;
    let bootstrap = Bootstrap::with_studentized_means(comparison, resamples, seed);
    let truth = (f64::from(COMPARISON_PERCENT) / 100.0).ln_1p();
    SimulatedCampaignOutcome {
        effects,
        covered_by_method: METHODS.map(|method| bootstrap.interval(method, 0.95).contains(truth)),
    }
}

fn kind_of_effect(percent: u32) -> BlockKind {
    match percent {
        0 => BlockKind::SameArm,
        COMPARISON_PERCENT => BlockKind::Comparison,
        slowdown_percent => BlockKind::Injected { slowdown_percent },
    }
}

/// The estimate of an effect, and whether it was found.
fn result_of_effect(analysis: &Analysis, percent: u32) -> (&EffectEstimate, bool) {
    let metric = &analysis.metrics[0];
    match kind_of_effect(percent) {
        BlockKind::Comparison => (&metric.comparison, metric.verdict == EffectVerdict::Slower),
        BlockKind::SameArm => {
            let result = metric.same_arm.as_ref().expect("a campaign has same-arm blocks");
            (&result.estimate, result.is_difference_found)
        }
        BlockKind::Injected { slowdown_percent } => {
            let mut injected = metric.injected.iter();
            let result = injected.find(|result| result.slowdown_percent == slowdown_percent);
            let result = result.expect("a campaign has injected blocks");
            (&result.estimate, result.is_found)
        }
    }
}

/// How often something happened in campaigns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// How often it happened.
    pub hits: u64,
    /// In how many campaigns.
    pub trials: u64,
}

impl Rate {
    /// Count one campaign.
    pub fn count(&mut self, is_hit: bool) {
        self.hits += u64::from(is_hit);
        self.trials += 1;
    }

    /// Add the campaigns of another rate.
    pub fn add(&mut self, other: Self) {
        self.hits += other.hits;
        self.trials += other.trials;
    }

    /// The share, 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.hits as f64 / self.trials as f64
    }

    /// The 95 % interval of the probability by the score test.
    ///
    /// Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", Journal of the American
    /// Statistical Association 22(158), 1927.
    #[must_use]
    pub fn interval(&self) -> (f64, f64) {
        const Z: f64 = 1.959_963_984_540_054;
        let (count, share) = (self.trials as f64, self.share());
        let center = (share + Z * Z / (2.0 * count)) / (1.0 + Z * Z / count);
        let half = Z / (1.0 + Z * Z / count) * (share * (1.0 - share) / count + Z * Z / (4.0 * count * count)).sqrt();
        (center - half, center + half)
    }
}

/// The rates of one effect over many campaigns.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EffectRates {
    /// Differences found, see [`EffectOutcome::is_found`].
    pub found: Rate,
    /// Intervals that contained the true ratio.
    pub covered: Rate,
    /// Answers that no effect is larger than the margin of equivalence. An effect as large as the margin may have it at
    /// the level of the test, 5 %.
    pub equivalent: Rate,
    /// The sum of the variances of the log ratios.
    pub variance_sum: f64,
    /// Differences found by each rival on the same runs.
    pub rivals: [Rate; 3],
    /// Differences found by each rival on runs in sequence.
    pub rivals_in_sequence: [Rate; 3],
}

/// The rates of many campaigns of one model and size.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CampaignRates {
    /// For each of [`EFFECT_PERCENTS`].
    pub effects: [EffectRates; 4],
    /// For each of [`METHODS`], intervals that contained the true ratio.
    pub methods: [Rate; 6],
}

impl CampaignRates {
    /// Count one campaign.
    #[must_use]
    pub fn with(mut self, outcome: &SimulatedCampaignOutcome) -> Self {
        for (rates, outcome) in self.effects.iter_mut().zip(&outcome.effects) {
            rates.found.count(outcome.is_found);
            rates.covered.count(outcome.is_covered);
            rates.equivalent.count(outcome.is_equivalent);
            rates.variance_sum += outcome.variance;
            for (rate, &is_found) in rates.rivals.iter_mut().zip(&outcome.found_by_rivals) {
                rate.count(is_found);
            }
            for (rate, &is_found) in rates.rivals_in_sequence.iter_mut().zip(&outcome.found_in_sequence) {
                rate.count(is_found);
            }
        }
        for (rate, &is_covered) in self.methods.iter_mut().zip(&outcome.covered_by_method) {
            rate.count(is_covered);
        }
        self
    }

    /// Add the campaigns of other rates.
    #[must_use]
    pub fn merge(mut self, other: &Self) -> Self {
        for (rates, other) in self.effects.iter_mut().zip(&other.effects) {
            rates.found.add(other.found);
            rates.covered.add(other.covered);
            rates.equivalent.add(other.equivalent);
            rates.variance_sum += other.variance_sum;
            for (rate, &other) in rates.rivals.iter_mut().zip(&other.rivals) {
                rate.add(other);
            }
            for (rate, &other) in rates.rivals_in_sequence.iter_mut().zip(&other.rivals_in_sequence) {
                rate.add(other);
            }
        }
        for (rate, &other) in self.methods.iter_mut().zip(&other.methods) {
            rate.add(other);
        }
        self
    }

    /// The rate at which the 95 % intervals of all effects contained the true ratio.
    #[must_use]
    pub fn coverage(&self) -> Rate {
        self.effects.iter().fold(Rate::default(), |mut sum, rates| {
            sum.add(rates.covered);
            sum
        })
    }

    /// The root of the mean variance of the log ratios of blocks.
    #[must_use]
    pub fn standard_deviation(&self) -> f64 {
        let (sum, trials) = self
            .effects
            .iter()
            .fold((0.0, 0.0), |(sum, trials), rates| (sum + rates.variance_sum, trials + rates.found.trials as f64));
        (sum / trials).sqrt()
    }
}
