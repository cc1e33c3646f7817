//! The report of a variance study.

use crate::decide::design::Arm;
use crate::decide::study::{
    MetricStudy, PLANNED_EFFECT_PERCENTS, REFERENCE_BLOCKS, RepetitionPlan, StudyBlock, StudyCosts, analyze_study,
};
use crate::experiment::{Experiment, RepetitionLevel};
use crate::record::{LoadedRecord, RunRecord};
use crate::wire::unrestored::UnrestoredChanges;
use schemars::JsonSchema;
use serde::Serialize;

/// The report of a variance study.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct StudyReport {
    /// The experiment whose arm A was studied.
    pub experiment: Experiment,
    /// Whether all blocks have run.
    pub complete: bool,
    /// Completed blocks.
    pub blocks: usize,
    /// Measured runs.
    pub runs: usize,
    /// The median time of a run with all that is needed to start it, in seconds.
    pub run_seconds: f64,
    /// The median time of a restart before a block, in seconds; absent if the study has none.
    pub restart_seconds: Option<f64>,
    /// Blocks with readings beyond the limits of a quiet host.
    pub noisy_blocks: usize,
    /// The metrics with samples, in the order of the experiment.
    pub metrics: Vec<MetricStudyReport>,
    /// Changes of the host that are not undone.
    #[serde(flatten)]
    pub unrestored: UnrestoredChanges,
}

/// What a study found of one metric.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MetricStudyReport {
    /// Its name.
    pub name: String,
    /// The geometric mean of the samples that count.
    pub mean: f64,
    /// Runs at the start of a block that are warm-up.
    pub warm_up_runs: usize,
    /// Samples at the start of a run that are warm-up.
    pub warm_up_samples: usize,
    /// The standard deviation that blocks add, in percent: that of restarts if each block begins with one, otherwise of
    /// slow changes of the host.
    pub between_blocks_percent: f64,
    /// The standard deviation that runs of a block add, in percent.
    pub between_runs_percent: f64,
    /// The standard deviation of samples of a run, in percent; 0 if runs have one sample.
    pub between_samples_percent: f64,
    /// How to repeat a change that needs no restart, and one that does.
    pub plans: Vec<RepetitionPlanReport>,
}

/// How a campaign can repeat, and what it would see.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RepetitionPlanReport {
    /// Whether each run begins with a restart, for changes that need one. Otherwise both arms share it.
    pub restarts_each_run: bool,
    /// The pairs of runs in a block that give the narrowest interval in a given time.
    pub pairs_per_block: usize,
    /// The standard deviation of the ratio of a block, in percent.
    pub block_ratio_percent: f64,
    /// The number of blocks of `smallest_effect_percent`.
    pub reference_blocks: usize,
    /// The slow-down that so many blocks detect with 80 % probability, in percent. The level is that of the experiment
    /// divided by the number of its metrics.
    pub smallest_effect_percent: f64,
    /// The blocks and the time that detect an effect with 80 % probability at the same level.
    pub effects: Vec<PlannedEffectReport>,
}

/// What it takes to detect an effect.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PlannedEffectReport {
    /// The slow-down in percent.
    pub effect_percent: f64,
    /// Blocks of A against B; absent if there are more than a million.
    pub blocks: Option<usize>,
    /// The time of the campaign with as many blocks of each control, in seconds.
    pub campaign_seconds: Option<f64>,
}

impl StudyReport {
    /// The report of a record.
    #[must_use]
    pub fn from_record(record: &LoadedRecord) -> Self {
        let experiment = &record.start.experiment;
        let has_restart = experiment.restart.is_some() || experiment.level == RepetitionLevel::ModuleReload;
        let blocks: Vec<&[RunRecord]> = record.blocks.iter().map(|(_, runs)| runs.as_slice()).collect();
        let within =
            blocks.iter().flat_map(|runs| runs.windows(2).map(|pair| pair[1].unix_seconds - pair[0].unix_seconds));
        let between = blocks.windows(2).filter_map(|pair| {
            let (last, first) = (pair[0].last()?, pair[1].first()?);
            Some(first.unix_seconds - first.wall_seconds - last.unix_seconds)
        });
        let costs = StudyCosts {
            run_seconds: median(within.collect()).unwrap_or(0.0),
            restart_seconds: has_restart.then(|| median(between.collect()).unwrap_or(0.0)),
        };
        let samples_of = |position: usize| -> Vec<StudyBlock> {
            let run = |run: &RunRecord| {
                let arm = if run.label == 'A' { Arm::A } else { Arm::B };
                (arm, run.samples.get(position).cloned().unwrap_or_default())
            };
            blocks.iter().map(|runs| runs.iter().map(run).collect()).collect()
        };
        let goal = experiment.analysis(experiment.alpha).comparison_goal();
        let metrics = experiment.metric.iter().enumerate().filter_map(|(position, metric)| {
            let study = analyze_study(&samples_of(position), costs, goal)?;
            Some(MetricStudyReport::new(metric.name.clone(), &study))
        });
        Self {
            experiment: experiment.clone(),
            complete: record.end.is_some(),
            blocks: blocks.len(),
            runs: blocks.iter().map(|runs| runs.len()).sum(),
            run_seconds: costs.run_seconds,
            restart_seconds: costs.restart_seconds,
            noisy_blocks: record.blocks.iter().filter(|(block, _)| !block.flags.is_empty()).count(),
            metrics: metrics.collect(),
            unrestored: UnrestoredChanges::default(),
        }
    }

    /// Whether the study is not complete, or an undo failed.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        !self.complete || !self.unrestored.failed_undos.is_empty()
    }
}

impl MetricStudyReport {
    fn new(name: String, study: &MetricStudy) -> Self {
        Self {
            name,
            mean: study.mean,
            warm_up_runs: study.warm_up.runs_per_block,
            warm_up_samples: study.warm_up.samples_per_run,
            between_blocks_percent: to_percent(study.components.restarts.sqrt()),
            between_runs_percent: to_percent(study.components.runs.sqrt()),
            between_samples_percent: to_percent(study.components.samples.sqrt()),
            plans: study.plans.iter().map(RepetitionPlanReport::new).collect(),
        }
    }
}

impl RepetitionPlanReport {
    fn new(plan: &RepetitionPlan) -> Self {
        let effect = |(effect_percent, blocks): (f64, Option<usize>)| PlannedEffectReport {
            effect_percent,
            blocks,
            campaign_seconds: blocks.map(|blocks| blocks as f64 * plan.seconds_per_block),
        };
        Self {
            restarts_each_run: plan.restarts_each_run,
            pairs_per_block: plan.pairs_per_block,
            block_ratio_percent: to_percent(plan.block_deviation),
            reference_blocks: REFERENCE_BLOCKS,
            smallest_effect_percent: to_percent(plan.smallest_effect),
            effects: PLANNED_EFFECT_PERCENTS.into_iter().zip(plan.blocks_needed).map(effect).collect(),
        }
    }
}

/// A difference of logarithms as a change in percent.
fn to_percent(logarithm: f64) -> f64 {
    logarithm.exp_m1() * 100.0
}

/// The middle value, or the mean of the two middle ones.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    let upper = *values.get(half)?;
    Some(if values.len() % 2 == 1 { upper } else { f64::midpoint(values[half - 1], upper) })
}
