//! The reports of campaigns for `--json` and for the file `result.json`.
//!
//! [`CampaignResult`] depends on the experiment and its samples only: a campaign that was interrupted and resumed has the
//! same result as an uninterrupted one if its workload reports the same samples. What differs from run to run is in
//! [`AbReport`]: times, readings of the host, flags.

pub mod study;
pub mod unrestored;

use self::unrestored::UnrestoredChanges;
use crate::decide::analysis::{AnalysisError, EffectEstimate, EffectVerdict, MetricAnalysis, analyze};
use crate::environment::{BlockEnvironment, HostDescription, describe_busy_host};
use crate::experiment::Experiment;
use crate::record::{LoadedRecord, PlannedKind, RunRecord};
use crate::samples::collect_samples;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The report of a campaign.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct AbReport {
    /// What follows from the experiment and its samples.
    pub result: CampaignResult,
    /// The host at the start and at each resumption.
    pub hosts: Vec<HostDescription>,
    /// Starts and resumptions.
    pub sessions: usize,
    /// Runs of interrupted blocks, which are not analyzed.
    pub abandoned_runs: usize,
    /// What made the host busy when the campaign began or was resumed, beyond the limits of a quiet host. Blocks are judged
    /// against the same readings, so a load that stays is not flagged as noise.
    pub busy_at_start: Vec<String>,
    /// The environment of each block.
    pub environment: Vec<BlockNoiseReport>,
    /// For each metric with noisy blocks, the estimate of the other choice: without them, or with them.
    pub other_choice_of_noisy_blocks: BTreeMap<String, EffectEstimateReport>,
    /// What the injection achieved, for each slow-down; empty if the host is observed without a workload.
    pub injections: Vec<InjectionReport>,
    /// For each completed run, when it ended and how long the injection stopped it.
    pub run_times: Vec<RunTimeReport>,
    /// Changes of the host that are not undone.
    #[serde(flatten)]
    pub unrestored: UnrestoredChanges,
}

/// What the injection of a slow-down achieved.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct InjectionReport {
    /// The slow-down in percent.
    pub slowdown_percent: u32,
    /// Measured runs that were slowed.
    pub runs: usize,
    /// How long the process groups of the commands were stopped, in percent of their running time. Processes outside of
    /// the groups were not stopped.
    pub stopped_percent: f64,
}

impl InjectionReport {
    /// The injections of measured runs, by their slow-down.
    fn from_runs<'r>(runs: impl Iterator<Item = &'r RunRecord>) -> Vec<Self> {
        let mut sums: BTreeMap<u32, (usize, f64, f64)> = BTreeMap::new();
        for run in runs.filter(|run| !run.warm_up && run.slowdown_percent > 0) {
            let (runs, stopped, ran) = sums.entry(run.slowdown_percent).or_default();
            *runs += 1;
            *stopped += run.stopped_seconds;
            *ran += run.wall_seconds - run.stopped_seconds;
        }
        let report = |(slowdown_percent, (runs, stopped, ran)): (u32, (usize, f64, f64))| {
            // A record of an earlier version does not have the running time.
            (ran > 0.0).then(|| Self { slowdown_percent, runs, stopped_percent: stopped / ran * 100.0 })
        };
        sums.into_iter().filter_map(report).collect()
    }
}

/// When a run ended.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct RunTimeReport {
    /// The block.
    pub block: usize,
    /// The position in the block.
    pub position: usize,
    /// Seconds since 1970 at its end.
    pub unix_seconds: f64,
    /// How long the injection stopped the commands, in seconds.
    pub stopped_seconds: f64,
}

/// The environment of a block.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct BlockNoiseReport {
    /// The block.
    pub block: usize,
    /// The readings while it ran.
    pub readings: BlockEnvironment,
    /// Readings beyond their limits.
    pub flags: Vec<String>,
}

/// What follows from an experiment and its samples.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CampaignResult {
    /// The version of Pagefold that defined the campaign.
    pub pagefold: String,
    /// The experiment.
    pub experiment: Experiment,
    /// Each setting with its values under A and B.
    pub settings: BTreeMap<String, [String; 2]>,
    /// Whether the campaign is complete.
    pub complete: bool,
    /// The stopping rule: numbers of comparison blocks with the two-sided level at each.
    pub looks: Vec<LookReport>,
    /// Completed comparison blocks.
    pub comparison_blocks: usize,
    /// The metrics; empty if too few blocks have run.
    pub metrics: Vec<MetricReport>,
    /// The proof counter, if the experiment names one.
    pub counter: Option<ProofCounterReport>,
    /// Why there are no metrics.
    pub why_not_analyzed: Option<String>,
    /// The samples of the measured runs.
    pub samples: Vec<SampleReport>,
}

/// A look of the stopping rule.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LookReport {
    /// Comparison blocks.
    pub blocks: usize,
    /// The two-sided level.
    pub nominal_alpha: f64,
}

/// The samples of a run.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct SampleReport {
    /// The block.
    pub block: usize,
    /// What the block compares.
    pub kind: PlannedKind,
    /// The position within the block.
    pub position: usize,
    /// Under which arm the run is counted.
    pub label: char,
    /// For each metric, the samples.
    pub samples: Vec<Vec<f64>>,
}

/// The verdict on a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EffectVerdictName {
    /// B is better.
    Better,
    /// B is worse.
    Worse,
    /// No effect is larger than the margin.
    Equivalent,
    /// The campaign cannot tell.
    Inconclusive,
    /// The proof counter did not move.
    NotApplied,
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MetricReport {
    /// Its name.
    pub name: String,
    /// The verdict.
    pub verdict: EffectVerdictName,
    /// A against B.
    pub comparison: EffectEstimateReport,
    /// The p-value after the correction for several metrics.
    pub corrected_p_value: f64,
    /// A against A: the true ratio is 1.
    pub same_arm: Option<ControlReport>,
    /// The verdict is inconclusive although a difference was found, because the interval of A against A excludes 1 and
    /// reaches a ratio as far from 1 as that of the comparison.
    pub is_difference_reached_by_same_arm: bool,
    /// A against A with injected slow-downs.
    pub injected: Vec<ControlReport>,
}

/// A control of a campaign.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ControlReport {
    /// The injected slow-down in percent; 0 for A against A.
    pub slowdown_percent: u32,
    /// The ratio that the control has.
    pub true_ratio: f64,
    /// The estimate.
    pub estimate: EffectEstimateReport,
    /// Whether the campaign sees a difference: for A against A a false one.
    pub is_found: bool,
    /// Whether the interval contains the true ratio. One in twenty does not by chance at a level of 5 %.
    pub is_ratio_in_interval: bool,
    /// Whether the slow-down acted on this metric: the interval reaches three quarters to five quarters of it. If not,
    /// `is_found` says nothing about what the campaign can find. For A against A, the interval contains 1.
    pub acted_as_intended: bool,
}

/// An estimated ratio of B to A.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EffectEstimateReport {
    /// Number of blocks.
    pub blocks: usize,
    /// The geometric mean of the ratios of the blocks.
    pub ratio: f64,
    /// The interval of the ratio; a limit that is not known is absent.
    pub interval: [Option<f64>; 2],
    /// The expanded BCa interval of the ratio, which decides nothing; a limit that is not known is absent.
    pub bca_interval: [Option<f64>; 2],
    /// The p-value of the sign-flip permutation test.
    pub p_value: f64,
    /// The smallest effect that so many blocks detect with 80 % probability, in percent; absent if the blocks are too few
    /// to show any. In comparisons its level is divided by the number of metrics: an upper bound, because Holm's correction
    /// compares only the smallest p-value with this level. Controls are not corrected.
    pub smallest_detectable_percent: Option<f64>,
    /// The ratio of each block.
    pub block_ratios: Vec<f64>,
}

/// The proof counter.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct ProofCounterReport {
    /// The counter.
    pub counter: String,
    /// Its mean change in a run under A.
    pub change_in_a: f64,
    /// Its mean change in a run under B.
    pub change_in_b: f64,
    /// Whether it moved as expected.
    pub has_moved: bool,
}

impl EffectEstimateReport {
    fn new(estimate: &EffectEstimate) -> Self {
        let finite = |value: f64| value.is_finite().then_some(value);
        Self {
            blocks: estimate.blocks,
            ratio: estimate.ratio,
            interval: [finite(estimate.interval.low), finite(estimate.interval.high)],
            bca_interval: [finite(estimate.bca_interval.low), finite(estimate.bca_interval.high)],
            p_value: estimate.p_value,
            smallest_detectable_percent: finite(estimate.smallest_detectable_effect * 100.0),
            block_ratios: estimate.log_ratios.iter().map(|ratio| ratio.exp()).collect(),
        }
    }
}

impl MetricReport {
    fn new(metric: &MetricAnalysis) -> Self {
        let same_arm = metric.same_arm.as_ref().map(|control| ControlReport {
            slowdown_percent: 0,
            true_ratio: 1.0,
            estimate: EffectEstimateReport::new(&control.estimate),
            is_found: control.is_difference_found,
            is_ratio_in_interval: control.is_ratio_in_interval,
            acted_as_intended: control.is_ratio_in_interval,
        });
        let injected = metric.injected.iter().map(|control| ControlReport {
            slowdown_percent: control.slowdown_percent,
            true_ratio: control.true_ratio,
            estimate: EffectEstimateReport::new(&control.estimate),
            is_found: control.is_found,
            is_ratio_in_interval: control.is_ratio_in_interval,
            acted_as_intended: control.acted_as_intended,
        });
        Self {
            name: metric.metric.name.clone(),
            verdict: match metric.verdict {
                EffectVerdict::Faster => EffectVerdictName::Better,
                EffectVerdict::Slower => EffectVerdictName::Worse,
                EffectVerdict::Equivalent => EffectVerdictName::Equivalent,
                EffectVerdict::Inconclusive { .. } => EffectVerdictName::Inconclusive,
                EffectVerdict::NotApplied => EffectVerdictName::NotApplied,
            },
            comparison: EffectEstimateReport::new(&metric.comparison),
            corrected_p_value: metric.corrected_p_value,
            same_arm,
            is_difference_reached_by_same_arm: metric.is_difference_reached_by_same_arm,
            injected: injected.collect(),
        }
    }
}

impl AbReport {
    /// Analyzes a record.
    #[must_use]
    pub fn from_record(record: &LoadedRecord) -> Self {
        let start = &record.start;
        let kind = |block: usize| start.schedule.get(block).map_or(PlannedKind::Comparison, |plan| plan.kind);
        let comparison_blocks =
            record.blocks.iter().filter(|(block, _)| kind(block.block) == PlannedKind::Comparison).count();
        // A campaign that has not reached a look yet is shown at the level of the next one.
        let look = start.looks.iter().find(|(blocks, _)| comparison_blocks <= *blocks).or(start.looks.last());
        let options = start.experiment.analysis(look.map_or(start.experiment.alpha, |&(_, alpha)| alpha));
        // Flags depend on the host's load. They decide only if the experiment leaves noisy blocks out.
        let decides_by_flags = start.experiment.exclude_noisy_blocks;
        let analysis = analyze(&collect_samples(start, &record.blocks, decides_by_flags), &options);
        let marked = analyze(&collect_samples(start, &record.blocks, true), &options);
        let (metrics, counter, why) = match &analysis {
            Ok(analysis) => (
                analysis.metrics.iter().map(MetricReport::new).collect(),
                analysis.counter.zip(start.experiment.proof.as_ref()).map(|(counter, proof)| ProofCounterReport {
                    counter: proof.counter.clone(),
                    change_in_a: counter.change_in_a,
                    change_in_b: counter.change_in_b,
                    has_moved: counter.has_moved,
                }),
                None,
            ),
            Err(why) => (Vec::new(), None, Some(AnalysisError::to_string(why))),
        };
        let runs = || record.blocks.iter().flat_map(|(_, runs)| runs);
        let sample = |run: &RunRecord| SampleReport {
            block: run.block,
            kind: kind(run.block),
            position: run.position,
            label: run.label,
            samples: run.samples.clone(),
        };
        let other = marked.iter().flat_map(|analysis| &analysis.metrics).filter_map(|metric| {
            Some((metric.metric.name.clone(), EffectEstimateReport::new(metric.other_noisy_choice.as_ref()?)))
        });
        Self {
            result: CampaignResult {
                pagefold: start.pagefold.clone(),
                experiment: start.experiment.clone(),
                settings: start.settings.clone(),
                complete: record.end.is_some(),
                looks: start
                    .looks
                    .iter()
                    .map(|&(blocks, nominal_alpha)| LookReport { blocks, nominal_alpha })
                    .collect(),
                comparison_blocks,
                metrics,
                counter,
                why_not_analyzed: why,
                samples: runs().filter(|run| !run.warm_up).map(sample).collect(),
            },
            hosts: record.sessions.iter().map(|session| session.host.clone()).collect(),
            sessions: record.sessions.len(),
            abandoned_runs: record.abandoned_runs,
            busy_at_start: describe_busy_starts(record),
            environment: record
                .blocks
                .iter()
                .map(|(block, _)| BlockNoiseReport {
                    block: block.block,
                    readings: block.environment.clone(),
                    flags: block.flags.clone(),
                })
                .collect(),
            other_choice_of_noisy_blocks: other.collect(),
            injections: InjectionReport::from_runs(runs()),
            run_times: runs()
                .map(|run| RunTimeReport {
                    block: run.block,
                    position: run.position,
                    unix_seconds: run.unix_seconds,
                    stopped_seconds: run.stopped_seconds,
                })
                .collect(),
            unrestored: UnrestoredChanges::default(),
        }
    }

    /// Whether part was not seen or not undone: the campaign is not complete, the setting was not applied, or an undo
    /// failed.
    #[must_use]
    pub fn is_partial(&self) -> bool {
        let metrics = &self.result.metrics;
        !self.result.complete
            || !self.unrestored.failed_undos.is_empty()
            || metrics.is_empty()
            || metrics.iter().any(|metric| metric.verdict == EffectVerdictName::NotApplied)
    }

    /// Whether the first metric has an answer: a difference, or equivalence.
    #[must_use]
    pub fn has_answer(&self) -> bool {
        let verdict = self.result.metrics.first().map(|metric| metric.verdict);
        matches!(verdict, Some(EffectVerdictName::Better | EffectVerdictName::Worse | EffectVerdictName::Equivalent))
    }
}

/// The readings at the start of each session that a quiet host does not have, without repetitions.
fn describe_busy_starts(record: &LoadedRecord) -> Vec<String> {
    let mut described = Vec::new();
    for session in &record.sessions {
        let busy = describe_busy_host(&session.baseline, session.host.cpus);
        described.extend(busy.into_iter().filter(|line| !described.contains(line)).collect::<Vec<_>>());
    }
    described
}

/// All raw samples as CSV: one line for each sample of each run, warm-up included.
#[must_use]
pub fn samples_csv(record: &LoadedRecord) -> String {
    let mut text = "block,kind,position,label,applied,slowdown_percent,warm_up,noisy,metric,sample,value,unix_seconds,stopped_seconds\n".to_owned();
    for (block, runs) in &record.blocks {
        let kind = match record.start.schedule.get(block.block).map(|plan| plan.kind) {
            Some(PlannedKind::SameArm) => "same-arm",
            Some(PlannedKind::Injected(_)) => "injected",
            _ => "comparison",
        };
        for run in runs {
            for (metric, samples) in record.start.experiment.metric.iter().zip(&run.samples) {
                for (number, value) in samples.iter().enumerate() {
                    let name = metric.name.replace(['"', ',', '\n'], "_");
                    text.push_str(&format!(
                        "{},{kind},{},{},{},{},{},{},{name},{number},{value},{},{}\n",
                        run.block,
                        run.position,
                        run.label,
                        run.applied,
                        run.slowdown_percent,
                        run.warm_up,
                        !block.flags.is_empty(),
                        run.unix_seconds,
                        run.stopped_seconds
                    ));
                }
            }
        }
    }
    text
}

#[cfg(test)]
mod tests;
