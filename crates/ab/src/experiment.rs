//! What an experiment compares, and how: the file of `pagefold ab run`, and the first line of a campaign's record.
//!
//! An experiment is fixed before the first sample: arms, workload, metrics, design, stopping rule, analysis. A record
//! holds it with all names resolved, so that a resumed campaign does not depend on the present state of the host.

use crate::decide::analysis::{AnalysisOptions, CounterExpectation, Direction, Metric, NoisyBlocks};
use crate::decide::design::{DesignOptions, InjectedBlocks, Level, WarmUpRule};
use crate::decide::statistics::sign_flip::{MAX_EXACT_VALUES, smallest_p_value};
use crate::decide::stopping::{Spending, StoppingPlan, StoppingPlanError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use thiserror::Error;

/// One experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Experiment {
    /// A title for reports.
    pub name: String,
    /// The baseline.
    pub a: ArmDefinition,
    /// The change.
    pub b: ArmDefinition,
    /// The commands of a run, each as a list of words. Several run at the same time; a run ends with the last one.
    pub workload: Vec<Vec<String>>,
    /// Without commands, how long a run observes the host.
    pub observe_seconds: Option<f64>,
    /// What is measured; the wall time by default.
    pub metric: Vec<MetricDefinition>,
    /// The counter that the setting should move. If it does not move, the verdict is `not applied`.
    pub proof: Option<ProofCounter>,
    /// What is done anew before each run.
    pub level: RepetitionLevel,
    /// A command before each run that restarts what the level names: a machine, a guest.
    pub restart: Option<String>,
    /// Blocks of A against B; the largest number with several looks.
    pub blocks: usize,
    /// Blocks of A against A, and of each injected slow-down; as many as `blocks` by default.
    pub control_blocks: Option<usize>,
    /// The slow-downs in percent that are injected, with blocks of their own; 2 and 5 by default.
    pub injected_percents: Vec<u32>,
    /// Pairs of runs in a block; two are ABBA or BAAB.
    pub pairs_per_block: usize,
    /// Runs at the start of each block that are not measured.
    pub warm_up_runs: usize,
    /// Samples at the start of each run that are not measured, for metrics that are read over time.
    pub warm_up_samples: usize,
    /// Study the variance of A instead of comparing: `blocks` blocks of twice `pairs_per_block` runs of A. The command
    /// `restart` runs before each block.
    pub study: bool,
    /// Numbers of blocks at which the campaign may stop early; none for a fixed number of blocks.
    pub looks: Vec<usize>,
    /// How looks spend the level.
    pub spending: SpendingRule,
    /// The two-sided level of tests.
    pub alpha: f64,
    /// The margin of equivalence in percent.
    pub equivalence_percent: f64,
    /// Leave blocks that were flagged as noisy out of the verdict.
    pub exclude_noisy_blocks: bool,
    /// Run both arms of a pair at the same time. Only for what belongs to a process: `prefix` and `environment`.
    pub duet: bool,
    /// The CPUs of the first and of the second run of each pair of a duet.
    pub duet_cpus: Option<[Vec<usize>; 2]>,
    /// Seconds after which a run is ended as failed.
    pub timeout_seconds: f64,
    /// The seed of the order and of the analysis.
    pub seed: u64,
}

impl Default for Experiment {
    fn default() -> Self {
        Self {
            name: String::new(),
            a: ArmDefinition::default(),
            b: ArmDefinition::default(),
            workload: Vec::new(),
            observe_seconds: None,
            metric: Vec::new(),
            proof: None,
            level: RepetitionLevel::Run,
            restart: None,
            blocks: 20,
            control_blocks: None,
            injected_percents: DesignOptions::INJECTED_SLOWDOWN_PERCENTS.to_vec(),
            pairs_per_block: 2,
            warm_up_runs: 1,
            warm_up_samples: 0,
            study: false,
            looks: Vec::new(),
            spending: SpendingRule::OBrienFleming,
            alpha: 0.05,
            equivalence_percent: 1.0,
            exclude_noisy_blocks: false,
            duet: false,
            duet_cpus: None,
            timeout_seconds: 3600.0,
            seed: 1,
        }
    }
}

/// What holds while runs of one arm are measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ArmDefinition {
    /// Settings of the kernel with their values. A setting that only one arm names has the value as found in the other.
    pub settings: BTreeMap<String, String>,
    /// Parameters of modules that are loaded again to change them.
    pub modules: BTreeMap<String, BTreeMap<String, String>>,
    /// Rules of `pagefold tune` whose changes are made.
    pub rules: Vec<String>,
    /// A policy of `pagefold policy` whose settings are made.
    pub policy: Option<String>,
    /// A shell command after the settings were made.
    pub before: Option<String>,
    /// A shell command before the settings are changed to those of the other arm.
    pub after: Option<String>,
    /// Words before each command of the workload: `numactl --cpunodebind 0`.
    pub prefix: Vec<String>,
    /// Environment variables of the workload.
    pub environment: BTreeMap<String, String>,
}

/// One metric.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MetricDefinition {
    /// Its name.
    pub name: String,
    /// Where its value comes from.
    #[serde(flatten)]
    pub source: MetricSource,
    /// Whether a higher value is better.
    #[serde(default)]
    pub higher_is_better: bool,
    /// For a file and a query: seconds between two readings during the run, of which the sample is the mean. Without it
    /// there is one reading after the run.
    #[serde(default)]
    pub every_seconds: Option<f64>,
}

/// Where a metric's value comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "source", rename_all = "kebab-case")]
pub enum MetricSource {
    /// Seconds from the start of the first command to the end of the last.
    WallTime,
    /// Seconds of CPU time of the commands and the descendants that they waited for.
    CpuTime,
    /// A number in the output of the commands.
    Pattern {
        /// A regular expression; its first group, or else its match, is the number. Of several matches the last counts.
        pattern: String,
    },
    /// A file with a number, or `FILE:NAME` for the number after a name in it.
    File {
        /// The file.
        path: String,
    },
    /// An instant query of a Prometheus server with one result.
    Prometheus {
        /// The server: `http://localhost:9090`.
        url: String,
        /// The query.
        query: String,
    },
}

impl MetricDefinition {
    /// The wall time.
    #[must_use]
    pub fn wall_time() -> Self {
        Self { name: "wall".to_owned(), source: MetricSource::WallTime, higher_is_better: false, every_seconds: None }
    }
}

/// A counter that shows that the setting is in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProofCounter {
    /// A file with a number, or `FILE:NAME`: `/proc/vmstat:thp_fault_alloc`.
    pub counter: String,
    /// How its change during a run differs under B.
    #[serde(default)]
    pub expect: ExpectedMove,
}

/// How a counter's change during a run differs under B.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ExpectedMove {
    /// It is another one.
    #[default]
    Differ,
    /// It is larger.
    Increase,
    /// It is smaller.
    Decrease,
}

/// What is done anew before each run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RepetitionLevel {
    /// The workload starts again.
    #[default]
    Run,
    /// The virtual machine restarts, by the command `restart`.
    VmRestart,
    /// The kernel modules of the arms are loaded again.
    ModuleReload,
    /// The guest boots again, by the command `restart`.
    GuestReboot,
}

/// How looks spend the level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SpendingRule {
    /// Little at first.
    #[default]
    OBrienFleming,
    /// Nearly evenly.
    Pocock,
}

/// Why an experiment is refused.
#[derive(Debug, Error)]
pub enum ExperimentError {
    /// Nothing is measured.
    #[error("the experiment has no workload: give a command after `--`, or observe_seconds with a metric to read")]
    NoWorkload,
    /// A metric needs a command.
    #[error("metric {0} needs a command, and the experiment only observes the host; measure a file or a query")]
    MetricNeedsCommand(String),
    /// The arms do not differ.
    #[error("arms A and B are the same; give --b a setting that differs")]
    ArmsEqual,
    /// A host-wide change in a duet.
    #[error(
        "a duet runs both arms at the same time, so they may differ only in what belongs to a process; arm {0} changes the host: leave --duet out"
    )]
    DuetOnHost(char),
    /// A reading of the host in a duet.
    #[error("{0} reads the whole host, and a duet runs both arms at the same time: leave it or --duet out")]
    DuetReadsHost(String),
    /// A look that cannot stop the campaign.
    #[error(
        "the look at {blocks} blocks has the level {level:.2e} and the smallest p-value of the permutation test there is {smallest:.2e}, so it can find no difference; give later looks, or spending = \"pocock\" in a file"
    )]
    LookWithoutEffect {
        /// Comparison blocks.
        blocks: usize,
        /// The level at the look.
        level: f64,
        /// The smallest p-value.
        smallest: f64,
    },
    /// A level without its command.
    #[error("this level of repetition needs a command that restarts the machine: add --restart COMMAND")]
    NoRestartCommand,
    /// A level without modules.
    #[error("the level module-reload needs parameters of a module in an arm")]
    NoModule,
    /// The stopping rule.
    #[error(transparent)]
    Stopping(#[from] StoppingPlanError),
    /// A study of both arms at the same time.
    #[error("a study runs arm A alone: leave --duet out")]
    DuetInStudy,
    /// A number.
    #[error("{0} must be {1}")]
    OutOfRange(&'static str, &'static str),
    /// A regular expression.
    #[error("the pattern of metric {name} is no regular expression")]
    Pattern {
        /// The metric.
        name: String,
        /// The reason.
        source: Box<regex::Error>,
    },
}

impl Experiment {
    /// Checks the experiment, and completes it: without metrics, the wall time is measured.
    ///
    /// # Errors
    /// What the operator must change.
    pub fn check(&mut self) -> Result<(), ExperimentError> {
        let observes = self.workload.is_empty();
        if (observes && self.observe_seconds.is_none_or(|seconds| seconds.is_nan() || seconds <= 0.0))
            || self.workload.iter().any(Vec::is_empty)
        {
            return Err(ExperimentError::NoWorkload);
        }
        if self.metric.is_empty() {
            self.metric.push(MetricDefinition::wall_time());
        }
        self.check_metrics()?;
        self.check_arms()?;
        match self.level {
            RepetitionLevel::VmRestart | RepetitionLevel::GuestReboot if self.restart.is_none() => {
                return Err(ExperimentError::NoRestartCommand);
            }
            RepetitionLevel::ModuleReload if self.a.modules.is_empty() && self.b.modules.is_empty() => {
                return Err(ExperimentError::NoModule);
            }
            _ => {}
        }
        if !(1..=64).contains(&self.pairs_per_block) {
            return Err(ExperimentError::OutOfRange("pairs_per_block", "from 1 to 64"));
        }
        if !(self.equivalence_percent > 0.0 && self.equivalence_percent < 100.0) {
            return Err(ExperimentError::OutOfRange("equivalence_percent", "above 0 and below 100"));
        }
        if self.control_blocks.is_some_and(|blocks| blocks < 2) {
            return Err(ExperimentError::OutOfRange(
                "control_blocks",
                "at least 2, so that the controls can be judged",
            ));
        }
        self.injected_percents.sort_unstable();
        self.injected_percents.dedup();
        if self.injected_percents.is_empty()
            || self.injected_percents.iter().any(|percent| !(1..=100).contains(percent))
        {
            return Err(ExperimentError::OutOfRange("injected_percents", "at least one number, each from 1 to 100"));
        }
        if self.study && self.blocks < 2 {
            return Err(ExperimentError::OutOfRange("the number of blocks of a study", "at least 2"));
        }
        let plan = self.stopping_plan()?;
        for look in plan.looks().iter().filter(|look| look.blocks < plan.max_blocks()) {
            // The correction for several metrics multiplies the smallest p-value by their number.
            let smallest = smallest_p_value(look.blocks) * self.metric.len() as f64;
            if smallest > look.nominal_alpha {
                let (blocks, level) = (look.blocks, look.nominal_alpha);
                return Err(ExperimentError::LookWithoutEffect { blocks, level, smallest });
            }
        }
        Ok(())
    }

    fn check_metrics(&self) -> Result<(), ExperimentError> {
        for metric in &self.metric {
            let is_read = matches!(metric.source, MetricSource::File { .. } | MetricSource::Prometheus { .. });
            if self.workload.is_empty() && !is_read {
                return Err(ExperimentError::MetricNeedsCommand(metric.name.clone()));
            }
            if self.duet && is_read {
                return Err(ExperimentError::DuetReadsHost(format!("metric {}", metric.name)));
            }
            if metric.every_seconds.is_some_and(|seconds| seconds.is_nan() || seconds < 0.001) {
                return Err(ExperimentError::OutOfRange("every_seconds", "at least 0.001"));
            }
            if let MetricSource::Pattern { pattern } = &metric.source {
                regex::Regex::new(pattern)
                    .map_err(|source| ExperimentError::Pattern { name: metric.name.clone(), source: source.into() })?;
            }
        }
        Ok(())
    }

    fn check_arms(&self) -> Result<(), ExperimentError> {
        if self.study && self.duet {
            return Err(ExperimentError::DuetInStudy);
        }
        if self.a == self.b && !self.study {
            return Err(ExperimentError::ArmsEqual);
        }
        for (name, arm) in [('A', &self.a), ('B', &self.b)] {
            let of_process = ArmDefinition {
                prefix: arm.prefix.clone(),
                environment: arm.environment.clone(),
                ..ArmDefinition::default()
            };
            if self.duet && *arm != of_process {
                return Err(ExperimentError::DuetOnHost(name));
            }
        }
        if self.duet
            && let Some(proof) = &self.proof
        {
            return Err(ExperimentError::DuetReadsHost(format!("the proof counter {}", proof.counter)));
        }
        Ok(())
    }

    /// A warning before the start, if so few blocks of the comparison or of the controls cannot show a difference of any
    /// size. The controls are not corrected for several metrics.
    #[must_use]
    pub fn warn_of_few_blocks(&self) -> Option<String> {
        let controls = self.control_blocks.unwrap_or(self.blocks);
        let describe = |blocks: usize, metrics: usize, what: &str, option: &str| {
            let is_enough = |blocks: usize| smallest_p_value(blocks) * metrics as f64 <= self.alpha;
            if is_enough(blocks) {
                return None;
            }
            let needed = (blocks..=MAX_EXACT_VALUES).find(|&blocks| is_enough(blocks));
            let remedy =
                needed.map_or("measure fewer metrics".to_owned(), |blocks| format!("give at least {option} {blocks}"));
            Some(format!("{blocks} blocks{what} are too few to show a difference of any size: {remedy}"))
        };
        describe(self.blocks, self.metric.len(), "", "--blocks")
            .or_else(|| describe(controls, 1, " of each control", "--control-blocks"))
    }

    /// The stopping rule.
    ///
    /// # Errors
    /// Looks or a level that cannot be carried out.
    pub fn stopping_plan(&self) -> Result<StoppingPlan, StoppingPlanError> {
        let mut looks: Vec<usize> = self.looks.iter().copied().filter(|&look| look < self.blocks).collect();
        looks.push(self.blocks);
        let spending = match self.spending {
            SpendingRule::OBrienFleming => Spending::OBrienFleming,
            SpendingRule::Pocock => Spending::Pocock,
        };
        StoppingPlan::group_sequential(&looks, spending, self.alpha)
    }

    /// What to draw the schedule from.
    #[must_use]
    pub fn design(&self) -> DesignOptions {
        let level = match self.level {
            RepetitionLevel::Run => Level::Run,
            RepetitionLevel::VmRestart => Level::VmRestart,
            RepetitionLevel::ModuleReload => Level::ModuleReload,
            RepetitionLevel::GuestReboot => Level::GuestReboot,
        };
        let control_blocks = self.control_blocks.unwrap_or(self.blocks);
        // A study finds the warm-up.
        let warm_up = if self.study {
            WarmUpRule::default()
        } else {
            WarmUpRule { runs_per_block: self.warm_up_runs, samples_per_run: self.warm_up_samples }
        };
        let mut design = DesignOptions {
            pairs_per_block: self.pairs_per_block,
            warm_up,
            ..DesignOptions::with_control_blocks(level, self.blocks, control_blocks, self.seed)
        };
        let injected = |&slowdown_percent| InjectedBlocks { slowdown_percent, blocks: control_blocks };
        design.injected_blocks = self.injected_percents.iter().map(injected).collect();
        // Only a workload can be slowed.
        if self.workload.is_empty() {
            design.injected_blocks.clear();
        }
        if self.study {
            design.injected_blocks.clear();
            (design.comparison_blocks, design.same_arm_blocks) = (0, self.blocks);
        }
        design
    }

    /// How samples are analyzed at a nominal level.
    #[must_use]
    pub fn analysis(&self, nominal_alpha: f64) -> AnalysisOptions {
        let metrics = self.metric.iter().map(|metric| Metric {
            name: metric.name.clone(),
            direction: if metric.higher_is_better { Direction::HigherIsBetter } else { Direction::LowerIsBetter },
        });
        AnalysisOptions {
            alpha: nominal_alpha,
            margin: self.equivalence_percent / 100.0,
            noisy_blocks: if self.exclude_noisy_blocks { NoisyBlocks::Exclude } else { NoisyBlocks::Keep },
            counter: self.proof.as_ref().map(|proof| match proof.expect {
                ExpectedMove::Differ => CounterExpectation::Differ,
                ExpectedMove::Increase => CounterExpectation::Increase,
                ExpectedMove::Decrease => CounterExpectation::Decrease,
            }),
            ..AnalysisOptions::new(metrics.collect(), self.seed)
        }
    }

    /// The program of the first command, if it is a path.
    #[must_use]
    pub fn program(&self) -> Option<PathBuf> {
        self.workload.first()?.first().map(PathBuf::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experiment() -> Experiment {
        let b = ArmDefinition { environment: BTreeMap::from([("X".into(), "1".into())]), ..ArmDefinition::default() };
        Experiment { b, workload: vec![vec!["true".to_owned()]], ..Experiment::default() }
    }

    fn file_metric(name: &str) -> MetricDefinition {
        let source = MetricSource::File { path: "/tmp/n".to_owned() };
        MetricDefinition { name: name.to_owned(), source, higher_is_better: false, every_seconds: None }
    }

    #[test]
    fn too_few_blocks_for_any_difference_give_a_warning() {
        let warning = |blocks: usize, metrics: usize| {
            let metric = vec![file_metric("depth"); metrics];
            Experiment { blocks, metric, ..experiment() }.warn_of_few_blocks()
        };
        assert_eq!((warning(6, 1), warning(7, 2)), (None, None));
        assert!(warning(5, 1).is_some_and(|text| text.contains("--blocks 6")));
        assert!(warning(6, 2).is_some_and(|text| text.contains("--blocks 7")));
        let controls = |blocks| Experiment { control_blocks: Some(blocks), blocks: 10, ..experiment() };
        assert!(controls(5).warn_of_few_blocks().is_some_and(|text| text.contains("--control-blocks 6")));
        assert_eq!(controls(6).warn_of_few_blocks(), None);
    }

    #[test]
    fn looks_that_can_find_a_difference_are_taken() {
        for (spending, looks) in [(SpendingRule::OBrienFleming, vec![12, 16]), (SpendingRule::Pocock, vec![8, 12])] {
            let mut experiment = Experiment { spending, looks, ..experiment() };
            experiment.check().unwrap();
        }
    }

    #[test]
    fn observation_has_no_blocks_with_slowdowns() {
        let has_slowdowns = |experiment: &Experiment| !experiment.design().injected_blocks.is_empty();
        assert!(has_slowdowns(&experiment()));
        assert!(!has_slowdowns(&Experiment { workload: Vec::new(), ..experiment() }));
    }

    #[test]
    fn wall_time_is_measured_by_default() {
        let mut experiment = experiment();
        experiment.check().unwrap();
        assert_eq!(experiment.metric, [MetricDefinition::wall_time()]);
    }

    #[test]
    fn experiments_that_cannot_answer_are_refused() {
        type Change = fn(&mut Experiment);
        let cases: [(Change, &str); 12] = [
            (|e| e.b = e.a.clone(), "the same"),
            (|e| e.workload.clear(), "no workload"),
            (
                |e| {
                    e.duet = true;
                    e.b.before = Some("true".into())
                },
                "changes the host",
            ),
            (|e| e.level = RepetitionLevel::VmRestart, "--restart"),
            (|e| e.level = RepetitionLevel::ModuleReload, "module"),
            (|e| e.blocks = 1, "at least 2"),
            (|e| e.control_blocks = Some(1), "at least 2"),
            (
                |e| {
                    e.workload.clear();
                    e.observe_seconds = Some(1.0)
                },
                "needs a command",
            ),
            (
                |e| {
                    e.duet = true;
                    e.metric = vec![file_metric("depth")]
                },
                "metric depth reads the whole host",
            ),
            (
                |e| {
                    e.duet = true;
                    let counter = "/proc/vmstat:thp_fault_alloc".to_owned();
                    e.proof = Some(ProofCounter { counter, expect: ExpectedMove::Differ })
                },
                "thp_fault_alloc reads the whole host",
            ),
            (|e| e.looks = vec![8, 16], "the look at 8 blocks"),
            // Twelve blocks are enough for one metric, and too few for thirty.
            (
                |e| {
                    e.looks = vec![12];
                    e.metric = vec![file_metric("depth"); 30]
                },
                "the look at 12 blocks",
            ),
        ];
        for (change, message) in cases {
            let mut experiment = experiment();
            change(&mut experiment);
            let error = experiment.check().unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
