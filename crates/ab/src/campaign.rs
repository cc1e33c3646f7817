//! Carries out a campaign: block by block, with its record.

use crate::arms::{self, ArmError, ArmSwitch, SettingsOutcome};
use crate::decide::analysis::{AnalysisError, EffectVerdict, analyze};
use crate::decide::design::{Arm, Schedule, ScheduledRun};
use crate::decide::injection::EarlierRuns;
use crate::decide::noise::{EnvironmentReadings, NoiseLimits, judge_block};
use crate::decide::stopping::StoppingPlan;
use crate::environment::{BlockEnvironment, EnvironmentCounters, HostDescription, describe_busy_host, describe_flag};
use crate::experiment::{Experiment, ExperimentError, MetricDefinition, MetricSource};
use crate::metric::{self, MetricError};
use crate::record::{
    BlockPlan, BlockRecord, CampaignStart, LoadedRecord, PlannedKind, RECORD_VERSION, Record, RecordError, RecordLine,
    RunRecord, SessionStart, SpawnedProcess, arm_letter,
};
use crate::samples::collect_samples;
use crate::workload::{RunError, SampledMetric, Side, SideResult, observe, read_once, run_sides};
use pagefold_base::Pid;
use pagefold_host::Host;
use pagefold_host::transaction::session::read_boot_id;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};
use thiserror::Error;

/// How long the host is observed before the first block.
const BASELINE_DURATION: Duration = Duration::from_secs(2);

/// Why a campaign could not be carried out.
#[derive(Debug, Error)]
pub enum CampaignError {
    /// The experiment.
    #[error(transparent)]
    Experiment(#[from] ExperimentError),
    /// Settings or commands of an arm.
    #[error("arm {arm}")]
    Arm {
        /// The arm.
        arm: char,
        /// The reason.
        source: ArmError,
    },
    /// Before the first arm.
    #[error(transparent)]
    Settings(#[from] ArmError),
    /// A run.
    #[error("run {position} of block {block}")]
    Run {
        /// The block.
        block: usize,
        /// The position in the block.
        position: usize,
        /// The reason.
        source: RunError,
    },
    /// The record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The samples.
    #[error(transparent)]
    Analysis(#[from] AnalysisError),
    /// The proof counter.
    #[error("the proof counter: {0}")]
    Counter(MetricError),
    /// The boot cannot be read.
    #[error("cannot read the identifier of the boot: {0}")]
    Boot(pagefold_base::Absent),
}

impl CampaignError {
    /// Whether a signal asked to stop.
    #[must_use]
    pub fn is_stop(&self) -> bool {
        matches!(self, Self::Run { source: RunError::Stopped, .. })
    }
}

/// How far a campaign is.
#[derive(Clone, Debug, PartialEq)]
pub enum CampaignProgress {
    /// Before the first block of a session the host is busy: readings with their limits.
    BusyHost(Vec<String>),
    /// Completed blocks.
    Blocks(usize),
}

/// How a campaign ended.
#[derive(Debug)]
pub struct CampaignOutcome {
    /// The first failure, or the stop. The record keeps all completed blocks.
    pub result: Result<(), CampaignError>,
    /// What happened to the host's settings.
    pub settings: SettingsOutcome,
}

/// The first line of a new campaign's record.
///
/// # Errors
/// An experiment that cannot be carried out, or settings that cannot be read.
pub fn define(host: &dyn Host, mut experiment: Experiment) -> Result<CampaignStart, CampaignError> {
    experiment.check()?;
    let schedule = Schedule::generate(&experiment.design());
    let plan = experiment.stopping_plan().map_err(ExperimentError::from)?;
    Ok(CampaignStart {
        version: RECORD_VERSION,
        pagefold: env!("CARGO_PKG_VERSION").to_owned(),
        settings: arms::resolve_settings(host, &experiment)?,
        modules: arms::resolve_modules(host, &experiment)?,
        looks: plan.looks().iter().map(|look| (look.blocks, look.nominal_alpha)).collect(),
        schedule: schedule.blocks.iter().map(BlockPlan::from).collect(),
        experiment,
    })
}

/// Carries out the rest of a campaign. The settings are restored whether it succeeds or not.
pub fn run(
    host: &dyn Host,
    state_directory: &Path,
    record: &mut Record,
    loaded: &LoadedRecord,
    stop: &AtomicBool,
    note_progress: &mut dyn FnMut(CampaignProgress),
) -> CampaignOutcome {
    let mut settings = SettingsOutcome::default();
    let (boot, switch) = match begin(host, state_directory, loaded, &mut settings) {
        Ok(begun) => begun,
        Err(error) => return CampaignOutcome { result: Err(error), settings },
    };
    let baseline = BlockEnvironment::default();
    let mut earlier = EarlierRuns::default();
    loaded.blocks.iter().flat_map(|(_, runs)| runs).for_each(|run| add_earlier_run(&mut earlier, run));
    let mut campaign = Campaign { host, record, start: &loaded.start, boot, baseline, stop, switch, earlier };
    let result = campaign.run_session(loaded, note_progress);
    // The arm is left even if a run failed.
    let left = match campaign.leave() {
        Err(CampaignError::Arm { arm, source }) => {
            settings.failed_after = Some((arm, source));
            Ok(())
        }
        left => left,
    };
    let (failed_undos, restored) = campaign.switch.restore();
    settings.failed_undos = failed_undos;
    CampaignOutcome { result: result.and(left).and(restored.map_err(CampaignError::Settings)), settings }
}

/// Ends what an earlier run had left, before anything is measured. Returns the boot and the switch between the arms.
fn begin<'a>(
    host: &'a dyn Host,
    state_directory: &Path,
    loaded: &'a LoadedRecord,
    settings: &mut SettingsOutcome,
) -> Result<(String, ArmSwitch<'a>), CampaignError> {
    let boot = read_boot_id(host).map_err(CampaignError::Boot)?;
    end_leftover(host, &loaded.leftover, &boot);
    Ok((boot, ArmSwitch::begin(host, state_directory, &loaded.start, settings)?))
}

fn unix_seconds(host: &dyn Host) -> f64 {
    host.unix_time().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Ends processes of a run that was interrupted, with their groups, if they still are what the record names.
fn end_leftover(host: &dyn Host, leftover: &[SpawnedProcess], boot: &str) {
    for process in leftover.iter().filter(|process| process.boot == boot) {
        let is_same = host.open(Pid(process.pid)).is_ok_and(|handle| handle.id().start_time == process.start_time);
        if is_same && let Some(group) = rustix::process::Pid::from_raw(process.pid.cast_signed()) {
            // It may have ended since.
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
    }
}

struct Campaign<'a, 'r> {
    host: &'a dyn Host,
    record: &'r mut Record,
    start: &'a CampaignStart,
    boot: String,
    baseline: BlockEnvironment,
    stop: &'a AtomicBool,
    switch: ArmSwitch<'a>,
    earlier: EarlierRuns,
}

/// Adds a run of a record to what is known for the injection.
fn add_earlier_run(earlier: &mut EarlierRuns, run: &RunRecord) {
    let (wall, stopped) = (run.wall_seconds.clamp(0.0, 1e9), run.stopped_seconds.clamp(0.0, 1e9));
    // A record of an earlier version does not have the time of the run.
    if run.applied == 'A' && !run.warm_up && wall > stopped {
        let [running, stopped] = [wall - stopped, stopped].map(Duration::from_secs_f64);
        earlier.add(run.slowdown_percent, running, stopped);
    }
}

impl Campaign<'_, '_> {
    /// Runs the blocks that are missing, after the start of this session was recorded.
    fn run_session(
        &mut self,
        loaded: &LoadedRecord,
        note_progress: &mut dyn FnMut(CampaignProgress),
    ) -> Result<(), CampaignError> {
        let (host, experiment) = (self.host, &self.start.experiment);
        let after = match loaded.entered_arm {
            Some('A') => experiment.a.after.as_deref(),
            Some(_) => experiment.b.after.as_deref(),
            None => None,
        };
        after.map_or(Ok(()), arms::run_shell)?;
        if loaded.entered_arm.is_some() {
            self.record.append(&RecordLine::ArmLeft)?;
        }
        let last = loaded.sessions.last().filter(|session| session.boot == self.boot);
        self.baseline = last.map(|session| session.baseline.clone()).unwrap_or_else(|| {
            let before = EnvironmentCounters::read(host);
            host.sleep(BASELINE_DURATION);
            before.readings_since(host, 0.0)
        });
        let description = HostDescription::read(host, experiment.program().as_deref());
        let busy = describe_busy_host(&self.baseline, description.cpus);
        if !busy.is_empty() && loaded.end.is_none() {
            note_progress(CampaignProgress::BusyHost(busy));
        }
        self.record.append(&RecordLine::Session(Box::new(SessionStart {
            boot: self.boot.clone(),
            unix_seconds: unix_seconds(host),
            host: description,
            baseline: self.baseline.clone(),
        })))?;
        self.run_blocks(loaded, note_progress)
    }

    fn run_blocks(
        &mut self,
        loaded: &LoadedRecord,
        note_progress: &mut dyn FnMut(CampaignProgress),
    ) -> Result<(), CampaignError> {
        if loaded.end.is_some() {
            return Ok(());
        }
        let schedule = self.start.schedule();
        let mut blocks = loaded.blocks.clone();
        let plan = self.start.experiment.stopping_plan().map_err(ExperimentError::from)?;
        loop {
            note_progress(CampaignProgress::Blocks(blocks.len()));
            if let Some(compared) = find_difference_at_look(self.start, &plan, &blocks)? {
                let why = format!("the look at {compared} blocks found a difference");
                self.record.append(&RecordLine::End { why })?;
                return Ok(());
            }
            let Some(block) = schedule.blocks.get(blocks.len()) else {
                self.record.append(&RecordLine::End { why: "all blocks have run".to_owned() })?;
                return Ok(());
            };
            let before = EnvironmentCounters::read(self.host);
            let own_before = self.host.own_cpu_time();
            let (mut runs, mut cpu_seconds) = (Vec::new(), 0.0);
            let scheduled = block.runs(&schedule.warm_up);
            let mut position = 0;
            while position < scheduled.len() {
                let group = next_group(&self.start.experiment, &scheduled, position);
                let (records, cpu) = self.run_group(block.index, position, group)?;
                cpu_seconds += cpu;
                for run in records {
                    self.record.append(&RecordLine::Run(run.clone()))?;
                    add_earlier_run(&mut self.earlier, &run);
                    runs.push(run);
                }
                position += group.len();
            }
            let own = self.host.own_cpu_time().saturating_sub(own_before).as_secs_f64();
            let environment = before.readings_since(self.host, cpu_seconds + own);
            let noise = judge_block(
                &EnvironmentReadings::from(&environment),
                &EnvironmentReadings::from(&self.baseline),
                &noise_limits(&self.start.experiment),
            );
            let flags = noise.flags.iter().map(describe_flag).collect();
            let done = BlockRecord { block: block.index, environment, flags };
            self.record.append(&RecordLine::Block(done.clone()))?;
            blocks.push((done, runs));
        }
    }

    /// Runs one run, or the two runs of a pair at the same time.
    fn run_group(
        &mut self,
        block: usize,
        position: usize,
        group: &[ScheduledRun],
    ) -> Result<(Vec<RunRecord>, f64), CampaignError> {
        let failed = |source: RunError| CampaignError::Run { block, position, source };
        if self.stop.load(Ordering::Relaxed) {
            return Err(failed(RunError::Stopped));
        }
        let (host, experiment) = (self.host, &self.start.experiment);
        let arm = group[0].applied;
        self.enter(arm)?;
        // The runs of a block of a study share a restart, so that their variance is that of runs alone.
        if !experiment.study || position == 0 {
            self.switch.restart(arm).map_err(|source| CampaignError::Arm { arm: arm_letter(arm), source })?;
        }
        let sides = self.sides(block, position, group);
        let read_counter = || {
            let counter = experiment.proof.as_ref().map(|proof| &proof.counter);
            counter.map(|path| metric::read_counter(host, path)).transpose().map_err(CampaignError::Counter)
        };
        let sampled: Vec<(usize, SampledMetric<'_>)> = experiment
            .metric
            .iter()
            .enumerate()
            .filter_map(|(position, metric)| {
                let interval = Duration::from_secs_f64(metric.every_seconds?);
                Some((position, SampledMetric { interval, read: Box::new(move || read_once(host, &metric.source)) }))
            })
            .collect();
        let (positions, sampled): (Vec<usize>, Vec<SampledMetric<'_>>) = sampled.into_iter().unzip();
        let before = read_counter()?;
        let (results, readings) = self.run_or_observe(&sides, &sampled).map_err(failed)?;
        let counter_change = before.zip(read_counter()?).map(|(before, after)| after - before);
        let (now_unix, now) = (unix_seconds(host), Instant::now());
        let mut records = Vec::new();
        for (number, (run, result)) in group.iter().zip(&results).enumerate() {
            let failed = |source: RunError| CampaignError::Run { block, position: position + number, source };
            let over_time = |index| positions.iter().position(|&position| position == index).map(|at| &*readings[at]);
            let samples = self.read_samples(result, over_time).map_err(failed)?;
            records.push(RunRecord {
                block,
                position: position + number,
                label: arm_letter(run.label),
                applied: arm_letter(run.applied),
                slowdown_percent: run.slowdown_percent,
                warm_up: run.is_warm_up,
                // The side of a pair that ends first has ended before now.
                unix_seconds: now_unix - now.saturating_duration_since(result.ended).as_secs_f64(),
                stopped_seconds: result.stopped.as_secs_f64(),
                wall_seconds: result.wall().as_secs_f64(),
                samples,
                counter_change,
            });
        }
        Ok((records, results.iter().map(|result| result.cpu.as_secs_f64()).sum()))
    }

    /// The commands of the runs of a group.
    fn sides(&self, block: usize, position: usize, group: &[ScheduledRun]) -> Vec<Side> {
        let experiment = &self.start.experiment;
        let side = |(number, run): (usize, &ScheduledRun)| {
            let definition = self.switch.definition(run.applied);
            let mut environment = definition.environment.clone();
            environment.insert("PAGEFOLD_AB_BLOCK".to_owned(), block.to_string());
            environment.insert("PAGEFOLD_AB_RUN".to_owned(), (position + number).to_string());
            environment.insert("PAGEFOLD_AB_ARM".to_owned(), arm_letter(run.applied).to_string());
            let command = |words: &Vec<String>| definition.prefix.iter().chain(words).cloned().collect();
            Side {
                commands: experiment.workload.iter().map(command).collect(),
                environment,
                injection: (run.slowdown_percent > 0).then(|| self.earlier.plan_injection(run.slowdown_percent)),
                cpus: duet_cpus(experiment, number),
            }
        };
        group.iter().enumerate().map(side).collect()
    }

    /// Runs the workload of each side, or observes the host. Returns also the readings of each sampled metric.
    fn run_or_observe(
        &mut self,
        sides: &[Side],
        sampled: &[SampledMetric<'_>],
    ) -> Result<(Vec<SideResult>, Vec<Vec<f64>>), RunError> {
        let experiment = &self.start.experiment;
        if experiment.workload.is_empty() {
            let duration = Duration::from_secs_f64(experiment.observe_seconds.unwrap_or_default());
            let began = Instant::now();
            let readings = observe(self.host, duration, self.stop, sampled)?;
            let (ended, zero) = (Instant::now(), Duration::ZERO);
            let nothing = SideResult { began, ended, cpu: zero, stopped: zero, output: String::new() };
            return Ok((vec![nothing], readings));
        }
        let (host, boot, record) = (self.host, &self.boot, &mut *self.record);
        let output = record.directory().join("output");
        fs::create_dir_all(&output)
            .map_err(|source| RunError::System { what: "cannot create the directory of outputs", source })?;
        let mut note_started = |pids: &[u32]| -> io::Result<()> {
            let describe = |&pid: &u32| {
                let start_time = host.open(Pid(pid)).ok()?.id().start_time;
                Some(SpawnedProcess { pid, start_time, boot: boot.clone() })
            };
            let processes = pids.iter().filter_map(describe).collect();
            record.append(&RecordLine::Spawned { processes }).map_err(io::Error::other)
        };
        let timeout = Duration::from_secs_f64(experiment.timeout_seconds.clamp(0.0, 1e9));
        run_sides(sides, &output, timeout, self.stop, sampled, &mut note_started)
    }

    /// The samples of each metric of a run. `over_time` has the readings during the run of the metric with this number.
    fn read_samples<'r>(
        &self,
        result: &SideResult,
        over_time: impl Fn(usize) -> Option<&'r [f64]>,
    ) -> Result<Vec<Vec<f64>>, RunError> {
        let read = |(index, metric): (usize, &MetricDefinition)| {
            let values = match (&metric.source, over_time(index)) {
                (_, Some(readings)) if !readings.is_empty() => Ok(readings.to_vec()),
                (MetricSource::WallTime, _) => Ok(vec![result.wall().as_secs_f64()]),
                (MetricSource::CpuTime, _) => Ok(vec![result.cpu.as_secs_f64()]),
                (MetricSource::Pattern { pattern }, _) => {
                    metric::match_number(pattern, &result.output).map(|value| vec![value])
                }
                (source, _) => read_once(self.host, source).map(|value| vec![value]),
            }?;
            // The record and the analysis need positive numbers; JSON has no form of NaN.
            metric::check_samples(&metric.name, &values)?;
            Ok(values)
        };
        self.start.experiment.metric.iter().enumerate().map(read).collect()
    }

    fn enter(&mut self, arm: Arm) -> Result<(), CampaignError> {
        if self.start.experiment.duet || self.switch.current() == Some(arm) {
            return Ok(());
        }
        self.leave()?;
        self.record.append(&RecordLine::ArmEntered { arm: arm_letter(arm) })?;
        self.switch.enter(arm).map_err(|source| CampaignError::Arm { arm: arm_letter(arm), source })
    }

    fn leave(&mut self) -> Result<(), CampaignError> {
        let Some(arm) = self.switch.current() else { return Ok(()) };
        self.switch.leave().map_err(|source| CampaignError::Arm { arm: arm_letter(arm), source })?;
        Ok(self.record.append(&RecordLine::ArmLeft)?)
    }
}

/// The number of comparison blocks, if the campaign is at a look before the last and finds a difference in the first
/// metric. Noisy blocks are left out if they are left out of the verdict; too few other blocks find none.
fn find_difference_at_look(
    start: &CampaignStart,
    plan: &StoppingPlan,
    blocks: &[(BlockRecord, Vec<RunRecord>)],
) -> Result<Option<usize>, AnalysisError> {
    let is_comparison = |(block, _): &&(BlockRecord, Vec<RunRecord>)| {
        start.schedule.get(block.block).is_some_and(|block| block.kind == PlannedKind::Comparison)
    };
    let compared = blocks.iter().filter(is_comparison).count();
    if !blocks.last().as_ref().is_some_and(is_comparison) || compared >= plan.max_blocks() {
        return Ok(None);
    }
    let Some(look) = plan.look_at(compared) else { return Ok(None) };
    let experiment = &start.experiment;
    let samples = collect_samples(start, blocks, experiment.exclude_noisy_blocks);
    let analysis = match analyze(&samples, &experiment.analysis(look.nominal_alpha)) {
        Err(AnalysisError::TooFewBlocks { .. }) => return Ok(None),
        analysis => analysis?,
    };
    let is_difference = |verdict| matches!(verdict, EffectVerdict::Faster | EffectVerdict::Slower);
    Ok(analysis.metrics.first().is_some_and(|metric| is_difference(metric.verdict)).then_some(compared))
}

/// The CPUs of the first or second run of a pair. The order ABBA itself exchanges the arms between the two, so that no
/// arm keeps a CPU.
fn duet_cpus(experiment: &Experiment, number: usize) -> Option<Vec<usize>> {
    experiment.duet_cpus.as_ref().map(|cpus| cpus[number].clone())
}

/// The runs that begin together: both of a pair in a duet, otherwise one.
fn next_group<'a>(experiment: &Experiment, scheduled: &'a [ScheduledRun], position: usize) -> &'a [ScheduledRun] {
    let is_pair = experiment.duet && !scheduled[position].is_warm_up && position + 1 < scheduled.len();
    &scheduled[position..position + if is_pair { 2 } else { 1 }]
}

/// The limits of a quiet block. The workload itself loads the host, so pressure is judged only where the host is
/// observed.
fn noise_limits(experiment: &Experiment) -> NoiseLimits {
    if experiment.workload.is_empty() {
        return NoiseLimits::default();
    }
    NoiseLimits {
        cpu_pressure: f64::INFINITY,
        memory_pressure: f64::INFINITY,
        io_pressure: f64::INFINITY,
        ..NoiseLimits::default()
    }
}

#[cfg(test)]
mod tests;
