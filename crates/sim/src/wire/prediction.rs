//! The result of a prediction in JSON.

use super::comparison::SampleReport;
use super::kernel_name;
use crate::decide::counters::PAGE_BYTES;
use crate::decide::estimate::ScenarioEstimate;
use crate::decide::host_state::Exactness;
use crate::decide::measures::{RunMeasures, TIMED_SHARES};
use crate::decide::samples::SimulatedRun;
use crate::prediction::PredictedRuns;
use schemars::JsonSchema;
use serde::Serialize;

/// Bytes in a GiB.
const GIB: f64 = (1_u64 << 30) as f64;
/// Points in time for which savings are reported.
pub const REPORTED_TIMES: u64 = 24;

/// The result of `pagefold sim predict`. All figures of policies are those of a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SimPredictReport {
    /// `pagefold.sim-predict/1`.
    pub schema: &'static str,
    /// The host.
    pub host: String,
    /// Its kernel.
    pub kernel: String,
    /// Its memory, after `--what-if`.
    pub memory_bytes: u64,
    /// Its CPUs.
    pub cpus: u32,
    /// Changes of the host, as given.
    pub what_if: Option<String>,
    /// Virtual time of each run.
    pub seconds: f64,
    /// Whether pages that change during a scan acted as in the kernel.
    pub exact: bool,
    /// Seeds; each policy runs once with each, and once more if any page may be written.
    pub seeds: Vec<u64>,
    /// Processes that were scanned.
    pub processes: u64,
    /// Pages of zeros and pages whose contents other pages have, when the host was scanned.
    pub mergeable_pages: u64,
    /// Bytes that merging them all would have freed.
    pub redundant_bytes: u64,
    /// Pages that changed between the two passes of the scan.
    pub volatile_pages: u64,
    /// Seconds between these, if there were two.
    pub pass_seconds: Option<f64>,
    /// The policies, in the order of the command line.
    pub policies: Vec<PredictedPolicyReport>,
    /// What the scan does not know, and what is assumed instead.
    pub assumptions: Vec<String>,
}

/// An expected value with its range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct PredictionReport {
    /// The mean over the seeds, if the pages that changed during the scan are written again and again, and no others.
    pub expected: f64,
    /// The smallest value of all runs, also of those in which any page is written.
    pub least: f64,
    /// The largest value of all runs.
    pub most: f64,
}

/// What a policy saves and costs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PredictedPolicyReport {
    /// Its name.
    pub policy: String,
    /// Savings less ksmd's metadata over time.
    pub saved: Vec<PredictedSavingsReport>,
    /// The same over time, in GiB times hours.
    pub saved_gib_hours: PredictionReport,
    /// ksmd's CPU time as a share of one CPU.
    pub ksmd_cores: PredictionReport,
    /// CPU time of Pagefold's daemon as a share of one CPU.
    pub pagefold_cores: PredictionReport,
    /// CPU time of ksmd and of Pagefold's daemon as a share of one CPU.
    pub cores: PredictionReport,
    /// How fast it saves.
    pub times: Vec<PredictedTimeReport>,
    /// Merged pages that processes write.
    pub cow_breaks: PredictionReport,
    /// Huge pages that ksmd splits.
    pub huge_pages_split: PredictionReport,
    /// Memory that the host lacks at worst.
    pub missing_bytes: PredictionReport,
    /// The run with the first seed, if the pages that changed during the scan are written, over time.
    pub samples: Vec<SampleReport>,
}

/// Savings at a time.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct PredictedSavingsReport {
    /// Seconds from now.
    pub seconds: f64,
    /// Savings less ksmd's metadata.
    pub saved_bytes: PredictionReport,
}

/// When a share of the duplicates is saved.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct PredictedTimeReport {
    /// The share.
    pub share: f64,
    /// Runs in which it is reached.
    pub reached_runs: usize,
    /// All runs.
    pub runs: usize,
    /// Seconds from now, over the runs in which it is reached. None if it is in no run with the expected writes.
    pub seconds: Option<PredictionReport>,
}

/// What a report says beside the figures of policies.
#[derive(Clone, Debug)]
pub struct PredictionContext {
    /// The host.
    pub host: String,
    /// Changes of the host, as given.
    pub what_if: Option<String>,
    /// Seeds of the runs.
    pub seeds: Vec<u64>,
    /// What ksmd does with pages that change during a scan.
    pub exactness: Exactness,
    /// Seconds between the two passes of the scan.
    pub pass_seconds: Option<f64>,
    /// What the scan does not know.
    pub assumptions: Vec<String>,
}

impl SimPredictReport {
    /// The report of a prediction. `estimate` has the changes of `--what-if`.
    #[must_use]
    pub fn new(estimate: &ScenarioEstimate, context: PredictionContext, runs: &[PredictedRuns]) -> Self {
        let scenario = &estimate.scenario;
        let page_bytes = PAGE_BYTES.cast_unsigned();
        Self {
            schema: "pagefold.sim-predict/1",
            host: context.host,
            kernel: kernel_name(scenario.host.kernel),
            memory_bytes: scenario.host.memory_pages * page_bytes,
            cpus: scenario.host.cpus,
            what_if: context.what_if,
            seconds: scenario.duration_ms as f64 / 1e3,
            exact: context.exactness == Exactness::Exact,
            seeds: context.seeds,
            processes: estimate.templates.iter().map(|template| template.machines).sum(),
            mergeable_pages: estimate.mergeable_pages,
            redundant_bytes: estimate.redundant_pages * page_bytes,
            volatile_pages: estimate.templates.iter().map(|template| template.volatile_pages).sum(),
            pass_seconds: context.pass_seconds,
            policies: runs.iter().map(|runs| PredictedPolicyReport::new(runs, scenario.duration_ms)).collect(),
            assumptions: context.assumptions,
        }
    }
}

impl PredictionReport {
    /// The mean of the expected values, and the range of all.
    fn over(expected: &[f64], further: &[f64]) -> Option<Self> {
        let mean = expected.iter().sum::<f64>() / expected.len() as f64;
        let all = || expected.iter().chain(further).copied();
        (!expected.is_empty()).then(|| Self {
            expected: mean,
            least: all().fold(f64::INFINITY, f64::min),
            most: all().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}

impl PredictedPolicyReport {
    fn new(runs: &PredictedRuns, duration_ms: u64) -> Self {
        let measures = |runs: &[SimulatedRun]| runs.iter().map(RunMeasures::new).collect::<Vec<_>>();
        let (expected, further) = (measures(&runs.expected), measures(&runs.any_pages));
        let over = |figure: &dyn Fn(&RunMeasures) -> f64| {
            let [expected, further] = [&expected, &further].map(|runs| runs.iter().map(figure).collect::<Vec<_>>());
            PredictionReport::over(&expected, &further).expect("a policy runs at least once")
        };
        let saved = |time_ms: u64| {
            let at = |runs: &[SimulatedRun]| runs.iter().map(|run| saved_at(run, time_ms)).collect::<Vec<_>>();
            PredictionReport::over(&at(&runs.expected), &at(&runs.any_pages)).expect("a policy runs at least once")
        };
        let times = TIMED_SHARES.iter().enumerate().map(|(number, &share)| {
            let reached =
                |runs: &[RunMeasures]| runs.iter().filter_map(|run| run.seconds_to_share[number]).collect::<Vec<f64>>();
            let (in_expected, in_further) = (reached(&expected), reached(&further));
            PredictedTimeReport {
                share,
                reached_runs: in_expected.len() + in_further.len(),
                runs: expected.len() + further.len(),
                seconds: PredictionReport::over(&in_expected, &in_further),
            }
        });
        Self {
            policy: runs.policy.to_string(),
            saved: (1..=REPORTED_TIMES)
                .map(|step| duration_ms * step / REPORTED_TIMES)
                .map(|time| PredictedSavingsReport { seconds: time as f64 / 1e3, saved_bytes: saved(time) })
                .collect(),
            saved_gib_hours: over(&|run| run.saved_byte_seconds / GIB / 3600.0),
            ksmd_cores: over(&|run| run.ksmd_cores),
            pagefold_cores: over(&|run| run.pagefold_cores),
            cores: over(&RunMeasures::cores),
            times: times.collect(),
            cow_breaks: over(&|run| run.cow_breaks),
            huge_pages_split: over(&|run| run.huge_pages_split),
            missing_bytes: over(&|run| run.missing_bytes),
            samples: runs.expected.iter().take(1).flat_map(|run| &run.samples).map(SampleReport::from).collect(),
        }
    }
}

/// Savings of the sample at or before a time.
fn saved_at(run: &SimulatedRun, time_ms: u64) -> f64 {
    let before = run.samples.iter().take_while(|sample| sample.time_ms <= time_ms);
    before.last().map_or(0.0, |sample| sample.net_saved_bytes() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policies::ComparedPolicy;
    use crate::decide::samples::Sample;

    fn run(saved: &[u64]) -> SimulatedRun {
        let sample = |(hour, &saved_pages): (u64, &u64)| Sample {
            time_ms: hour * 3_600_000,
            saved_pages,
            ksmd_cpu_ns: hour * 36_000_000_000,
            ..Sample::default()
        };
        SimulatedRun {
            samples: (0_u64..).zip(saved).map(sample).collect(),
            duplicates: 1000,
            huge_pages: 0,
            scan_wait: None,
        }
    }

    #[test]
    fn range_has_all_runs_and_the_mean_only_the_expected_ones() {
        let runs = PredictedRuns {
            policy: ComparedPolicy::Default,
            expected: vec![run(&[0, 800, 1000]), run(&[0, 900, 1000])],
            any_pages: vec![run(&[0, 700, 600])],
        };
        let report = PredictedPolicyReport::new(&runs, 7_200_000);
        let last = report.saved.last().unwrap();
        assert_eq!(last.seconds, 7200.0);
        let pages = |range: PredictionReport| [range.expected, range.least, range.most].map(|bytes| bytes / 4096.0);
        assert_eq!(pages(last.saved_bytes), [1000.0, 600.0, 1000.0]);
        // The sample of the first hour.
        assert_eq!(pages(report.saved[11].saved_bytes), [850.0, 700.0, 900.0]);
        assert_eq!(report.ksmd_cores, PredictionReport { expected: 0.01, least: 0.01, most: 0.01 });
        let [half, most, _] = &report.times[..] else { panic!("{:?}", report.times) };
        assert_eq!((half.reached_runs, half.runs, most.reached_runs), (3, 3, 2));
        assert_eq!(most.seconds.unwrap().least, 3600.0);
    }
}
