//! How far the simulator is from the real ksmd, on programs that it was not calibrated with.
//!
//! A trial starts a program and has Pagefold make a forecast for it under a policy (`pagefold sim predict`), while ksmd is
//! stopped. Then ksmd merges the program under the same policy for the same time. So a forecast has nothing from the merge
//! that it is compared with. The costs of ksmd's operations are measured on this machine before the first trial, on other
//! processes (`pagefold sim calibrate`).
//!
//! Three figures are compared: the pages saved and ksmd's CPU time at the end, and the time until nine tenths of the
//! pages that were really saved at the end are saved.

pub mod plot;

use super::policies::{PagefoldProgram, PolicySchedule};
use super::readings::{KsmSample, ksmd_pid};
use super::trial::{TrialMeter, wait_until_ksmd_forgets, write_due_settings};
use super::workloads::MergeWorkload;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::ksm::{Setting, Settings};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use pagefold_merge::decide::policy::Policy;
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The policies, and for how long each is watched: until nothing more merges on an idle program.
const POLICIES: [(&str, Duration); 4] = [
    ("default", Duration::from_secs(170)),
    ("advisor:20", Duration::from_secs(90)),
    ("whole:2000/20", Duration::from_secs(30)),
    ("flat-out", Duration::from_secs(20)),
];
/// For how long a policy of a quick run is watched.
const QUICK_DURATION: Duration = Duration::from_secs(5);
/// The policies of a quick run.
const QUICK_POLICIES: [&str; 2] = ["whole:2000/20", "flat-out"];

/// The share of the savings whose time is compared.
const TIMED_SHARE: f64 = 0.9;
/// Error of the saved pages that no trial may exceed.
const MAX_SAVED_ERROR: f64 = 0.01;
/// Error of times that half of the trials may not exceed.
const MAX_MEDIAN_ERROR: f64 = 0.1;
/// Error of times that no trial may exceed.
const MAX_WORST_ERROR: f64 = 0.2;
/// Pairs of policies whose order must be right.
const MIN_ORDERED_PAIRS: f64 = 0.95;

/// Makes forecasts, and measures what they forecast.
pub struct Forecaster<'a> {
    pagefold: &'a PagefoldProgram,
    /// The report of the calibration.
    costs: PathBuf,
    quick: bool,
}

/// Savings and costs at a moment of a trial or of a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
pub struct CurvePoint {
    /// Seconds since the policy began.
    pub seconds: f64,
    /// Pages saved.
    pub saved_pages: f64,
    /// CPU seconds of ksmd.
    #[serde(rename = "ksmd_cpu_seconds")]
    pub ksmd_seconds: f64,
    /// Pages that ksmd visited.
    pub pages_scanned: f64,
    /// Completed scans.
    pub full_scans: f64,
}

/// A policy on a program: what happened, and the forecast.
#[derive(Clone, Debug)]
pub struct PredictionTrial {
    /// The program.
    pub workload: &'static str,
    /// The policy.
    pub policy: &'static str,
    /// The round, from 1.
    pub round: usize,
    /// Of the real ksmd.
    pub measured: Vec<CurvePoint>,
    /// Of the model.
    pub modeled: Vec<CurvePoint>,
}

/// The relevant parts of a forecast.
#[derive(Deserialize)]
struct PredictionReport {
    policies: Vec<PredictedPolicy>,
}

#[derive(Deserialize)]
struct PredictedPolicy {
    samples: Vec<CurvePoint>,
}

impl<'a> Forecaster<'a> {
    /// Calibrate the simulator on this machine. The costs are kept in the folder.
    pub fn calibrate(pagefold: &'a PagefoldProgram, folder: &'a Path, quick: bool) -> Result<Self> {
        let _held = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        let state = tempfile::tempdir()?;
        let report = output_of(&mut pagefold.calibrate_command(state.path(), quick))?;
        let costs = folder.join("costs.json");
        fs::write(&costs, report).with_context(|| format!("cannot write {}", costs.display()))?;
        Ok(Self { pagefold, costs, quick })
    }

    /// All policies on a program, in rounds whose order is drawn.
    pub fn measure_all(&self, workload: &MergeWorkload, rounds: usize) -> Result<Vec<PredictionTrial>> {
        let policies: Vec<(&'static str, Duration)> = match self.quick {
            false => POLICIES.to_vec(),
            true => QUICK_POLICIES.map(|policy| (policy, QUICK_DURATION)).to_vec(),
        };
        let mut trials = Vec::new();
        for (round, order) in (1..).zip(draw_orders(&policies, rounds)) {
            for (policy, duration) in order {
                eprint!("{} round {round}: {policy} ... ", workload.name);
                let trial = self.run_trial(workload, policy, duration, round)?;
                let errors = trial.errors();
                eprintln!(
                    "saved {:+.1} %, time {:+.1} %, CPU {:+.1} %",
                    errors.saved * 100.0,
                    errors.time * 100.0,
                    errors.cpu * 100.0
                );
                trials.push(trial);
            }
        }
        Ok(trials)
    }

    fn run_trial(
        &self,
        workload: &MergeWorkload,
        policy: &'static str,
        duration: Duration,
        round: usize,
    ) -> Result<PredictionTrial> {
        let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
        let ksmd = ksmd_pid()?;
        wait_until_ksmd_forgets(&ksm, ksmd)?;
        let running = workload.start(true)?;
        let report = output_of(&mut self.pagefold.predict_command(&running.pids, &self.costs, policy, duration))?;
        let report: PredictionReport = serde_json::from_str(&report).context("the report of a forecast")?;
        let forecast = report.policies.into_iter().next().context("a report without a policy")?;
        let host = pagefold_merge::policy::observe_host(&LiveHost::new());
        let schedule = PolicySchedule::start(policy_rule(policy)?, host);
        let mut schedule = schedule.map_err(|why| anyhow!("settings of {policy}: {why}"))?;
        write_due_settings(&mut schedule, &ksm, 0.0)?;
        let meter = TrialMeter::start(&ksm, ksmd, &running, workload.gauge())?;
        let samples = meter.watch_for(duration, &mut schedule)?;
        let measured = samples.iter().map(CurvePoint::from_sample).collect();
        Ok(PredictionTrial { workload: workload.name, policy, round, measured, modeled: forecast.samples })
    }
}

/// The rule that sets KSM under the policy of a name.
fn policy_rule(name: &str) -> Result<Policy> {
    let Some((pages, sleep)) = name.strip_prefix("whole:").and_then(|pace| pace.split_once('/')) else {
        let rule = Policy::from_name(name).with_context(|| format!("{name}: no such policy"))?;
        return rule.map_err(anyhow::Error::msg);
    };
    let pace = [(Setting::PagesToScan, pages.to_owned()), (Setting::SleepMillisecs, sleep.to_owned())];
    Ok(Policy::Fixed(Settings::from(pace)))
}

/// The standard output of a command that must succeed, or see a part only.
fn output_of(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(matches!(output.status.code(), Some(0 | 3)), "{command:?}: {}: {errors}", output.status);
    String::from_utf8(output.stdout).map_err(|_| anyhow!("{command:?} printed no text"))
}

impl CurvePoint {
    fn from_sample(sample: &KsmSample) -> Self {
        Self {
            seconds: sample.seconds,
            saved_pages: sample.saved_pages as f64,
            ksmd_seconds: sample.ksmd_seconds,
            pages_scanned: sample.scanned_pages as f64,
            full_scans: sample.full_scans as f64,
        }
    }
}

/// Relative errors of a forecast: modeled over measured, minus 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictionErrors {
    /// Of the pages saved at the end.
    pub saved: f64,
    /// Of the time to nine tenths of the pages saved at the end; infinite if the model never saves as many.
    pub time: f64,
    /// Of ksmd's CPU time at the end.
    pub cpu: f64,
}

/// A figure of a curve at a time, on the line between two points.
fn value_at(curve: &[CurvePoint], seconds: f64, figure: impl Fn(&CurvePoint) -> f64) -> f64 {
    let after = curve.partition_point(|point| point.seconds < seconds);
    let (Some(next), Some(before)) = (curve.get(after), curve.get(after.wrapping_sub(1))) else {
        return curve.get(after).or(curve.last()).map_or(0.0, figure);
    };
    let part = (seconds - before.seconds) / (next.seconds - before.seconds);
    figure(before) + part * (figure(next) - figure(before))
}

/// When a curve has this many pages for the first time, on the line between two points.
fn seconds_to(curve: &[CurvePoint], pages: f64) -> Option<f64> {
    let reached = curve.iter().position(|point| point.saved_pages >= pages)?;
    let (before, now) = (curve[reached.saturating_sub(1)], curve[reached]);
    let grown = now.saved_pages - before.saved_pages;
    let part = if grown > 0.0 { (pages - before.saved_pages) / grown } else { 1.0 };
    Some(before.seconds + part * (now.seconds - before.seconds))
}

impl PredictionTrial {
    fn end(&self) -> CurvePoint {
        self.measured.last().copied().unwrap_or_default()
    }

    fn modeled_end(&self) -> CurvePoint {
        let at_end = |figure: fn(&CurvePoint) -> f64| value_at(&self.modeled, self.end().seconds, figure);
        CurvePoint {
            seconds: self.end().seconds,
            saved_pages: at_end(|point| point.saved_pages),
            ksmd_seconds: at_end(|point| point.ksmd_seconds),
            pages_scanned: at_end(|point| point.pages_scanned),
            full_scans: at_end(|point| point.full_scans),
        }
    }

    /// When nine tenths of the pages that were saved at the end are saved, measured and by the model.
    fn timed_share(&self) -> (f64, Option<f64>) {
        let pages = TIMED_SHARE * self.end().saved_pages;
        (seconds_to(&self.measured, pages).unwrap_or(f64::NAN), seconds_to(&self.modeled, pages))
    }

    /// The errors of the forecast.
    pub fn errors(&self) -> PredictionErrors {
        let (measured, modeled) = (self.end(), self.modeled_end());
        let (real_time, model_time) = self.timed_share();
        PredictionErrors {
            saved: modeled.saved_pages / measured.saved_pages - 1.0,
            time: model_time.map_or(f64::INFINITY, |seconds| seconds / real_time - 1.0),
            cpu: modeled.ksmd_seconds / measured.ksmd_seconds - 1.0,
        }
    }
}

/// The table and the samples of a program.
pub fn describe_trials(workload: &MergeWorkload, trials: &[PredictionTrial]) -> Findings {
    let mut findings =
        Findings::new("workload,round,policy,source,seconds,saved_pages,ksmd_cpu_seconds,pages_scanned,full_scans");
    for trial in trials {
        for (source, curve) in [("ksmd", &trial.measured), ("model", &trial.modeled)] {
            findings.samples.extend(curve.iter().map(|point| {
                format!(
                    "{},{},{},{source},{:.3},{:.0},{:.6},{:.0},{:.0}",
                    trial.workload,
                    trial.round,
                    trial.policy,
                    point.seconds,
                    point.saved_pages,
                    point.ksmd_seconds,
                    point.pages_scanned,
                    point.full_scans
                )
            }));
        }
    }
    let columns = [
        "policy",
        "round",
        "saved MiB",
        "model",
        "error",
        "90 % s",
        "model",
        "error",
        "CPU s",
        "model",
        "error",
        "scans",
        "model",
    ];
    let mut table = MarkdownTable::new(workload.title.clone(), &columns);
    let mib = pagefold_sys::mapping::page_size() as f64 / f64::from(1 << 20);
    for (policy, _) in POLICIES {
        for trial in trials.iter().filter(|trial| trial.policy == policy) {
            let (measured, modeled, errors) = (trial.end(), trial.modeled_end(), trial.errors());
            let (real_time, model_time) = trial.timed_share();
            table.rows.push(vec![
                policy.to_owned(),
                trial.round.to_string(),
                format!("{:.1}", measured.saved_pages * mib),
                format!("{:.1}", modeled.saved_pages * mib),
                format_error(errors.saved),
                format!("{real_time:.1}"),
                model_time.map_or("never".to_owned(), |seconds| format!("{seconds:.1}")),
                format_error(errors.time),
                format!("{:.2}", measured.ksmd_seconds),
                format!("{:.2}", modeled.ksmd_seconds),
                format_error(errors.cpu),
                format!("{:.0}", measured.full_scans),
                format!("{:.0}", modeled.full_scans),
            ]);
        }
    }
    table.notes.push(
        "Saved and CPU: at the end of the trial. 90 %: nine tenths of what was really saved at the end; \"never\": the \
         model saves less than that."
            .to_owned(),
    );
    findings.tables.push(table);
    findings
}

fn format_error(error: f64) -> String {
    if error.is_finite() { format!("{:+.1} %", error * 100.0) } else { "-".to_owned() }
}

/// Pairs of policies on one program in one round: those whose order in time the forecast has right, and all.
fn count_ordered_pairs(trials: &[PredictionTrial]) -> (usize, usize) {
    let (mut right, mut all) = (0, 0);
    for (number, one) in trials.iter().enumerate() {
        let is_pair = |other: &&PredictionTrial| (other.workload, other.round) == (one.workload, one.round);
        for other in trials[number + 1..].iter().filter(is_pair) {
            let ((one_real, one_model), (other_real, other_model)) = (one.timed_share(), other.timed_share());
            let [one_model, other_model] = [one_model, other_model].map(|seconds| seconds.unwrap_or(f64::INFINITY));
            all += 1;
            right += usize::from(one_real.total_cmp(&other_real) == one_model.total_cmp(&other_model));
        }
    }
    (right, all)
}

/// The targets over all programs.
pub fn judge_trials(trials: &[PredictionTrial]) -> Findings {
    let mut findings = Findings::default();
    let spread = |error: fn(PredictionErrors) -> f64| {
        SampleSpread::from_samples(trials.iter().map(|trial| error(trial.errors()).abs()))
    };
    let measured = |spread: SampleSpread| {
        format!("median {:.1} %, worst {:.1} %, {} trials", spread.median * 100.0, spread.max * 100.0, trials.len())
    };
    let saved = spread(|errors| errors.saved);
    findings.checks.push(ThresholdCheck {
        claim: format!("pages saved within {:.0} % in all trials", MAX_SAVED_ERROR * 100.0),
        measured: measured(saved),
        met: saved.max <= MAX_SAVED_ERROR,
    });
    let times = spread(|errors| errors.time);
    for (name, errors) in [("time to 90 % of the savings", times), ("CPU time of ksmd", spread(|errors| errors.cpu))] {
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{name} within {:.0} % at the median and {:.0} % at worst",
                MAX_MEDIAN_ERROR * 100.0,
                MAX_WORST_ERROR * 100.0
            ),
            measured: measured(errors),
            met: errors.median <= MAX_MEDIAN_ERROR && errors.max <= MAX_WORST_ERROR,
        });
    }
    let (right, all) = count_ordered_pairs(trials);
    findings.checks.push(ThresholdCheck {
        claim: format!("order of two policies right in {:.0} % of the pairs", MIN_ORDERED_PAIRS * 100.0),
        measured: format!("{right} of {all}"),
        met: right as f64 >= MIN_ORDERED_PAIRS * all as f64,
    });
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(points: &[(f64, f64)]) -> Vec<CurvePoint> {
        let point = |&(seconds, saved_pages): &(f64, f64)| CurvePoint {
            seconds,
            saved_pages,
            ksmd_seconds: seconds / 10.0,
            ..CurvePoint::default()
        };
        points.iter().map(point).collect()
    }

    fn trial(policy: &'static str, measured: &[(f64, f64)], modeled: &[(f64, f64)]) -> PredictionTrial {
        PredictionTrial { workload: "w", policy, round: 1, measured: curve(measured), modeled: curve(modeled) }
    }

    #[test]
    fn errors_compare_at_the_measured_end() {
        let trial = trial("a", &[(0.0, 0.0), (10.0, 1000.0)], &[(0.0, 0.0), (8.0, 1000.0), (16.0, 1200.0)]);
        let errors = trial.errors();
        // The model has 1050 pages after 10 s, and 900 after 7.2 s instead of 9.
        assert!((errors.saved - 0.05).abs() < 1e-9 && (errors.time + 0.2).abs() < 1e-9, "{errors:?}");
        assert!(errors.cpu.abs() < 1e-9);
    }

    #[test]
    fn unreached_savings_miss_the_target_of_time() {
        let never = trial("a", &[(0.0, 0.0), (10.0, 1000.0)], &[(0.0, 0.0), (10.0, 899.0)]);
        assert_eq!(never.errors().time, f64::INFINITY);
        let met: Vec<bool> = judge_trials(&[never]).checks.iter().map(|check| check.met).collect();
        assert_eq!(met, [false, false, true, true]);
    }

    #[test]
    fn order_is_judged_within_a_program_and_round() {
        let reaches = |policy, real: f64, model: f64| {
            trial(policy, &[(0.0, 0.0), (real, 100.0)], &[(0.0, 0.0), (model, 100.0), (99.0, 100.0)])
        };
        let other_round = PredictionTrial { round: 2, ..reaches("d", 1.0, 50.0) };
        let trials = [reaches("a", 10.0, 12.0), reaches("b", 20.0, 18.0), reaches("c", 30.0, 15.0), other_round];
        assert_eq!(count_ordered_pairs(&trials), (2, 3));
    }
}
