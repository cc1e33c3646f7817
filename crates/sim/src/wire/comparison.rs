//! The result of a comparison of policies in JSON.

use super::kernel_name;
use crate::comparison::{PolicyRuns, SimulationPlan};
use crate::decide::counters::PAGE_BYTES;
use crate::decide::host_state::Exactness;
use crate::decide::measures::{RunMeasures, Spread, TIMED_SHARES};
use crate::decide::samples::{Sample, ScanWait};
use crate::decide::scenario::Scenario;
use schemars::JsonSchema;
use serde::Serialize;

/// Bytes in a GiB.
const GIB: f64 = (1_u64 << 30) as f64;

/// The result of `pagefold sim compare`. All figures are those of a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SimCompareReport {
    /// `pagefold.sim-compare/1`.
    pub schema: &'static str,
    /// The scenario: its name or file.
    pub scenario: String,
    /// What it is.
    pub description: String,
    /// The modeled kernel.
    pub kernel: String,
    /// The host's memory.
    pub memory_bytes: u64,
    /// The host's CPUs.
    pub cpus: u32,
    /// Virtual time of each run.
    pub seconds: f64,
    /// Whether pages that change during a scan acted as in the kernel.
    pub exact: bool,
    /// Seeds; each policy runs once with each.
    pub seeds: Vec<u64>,
    /// Duplicates of the host at the end: what merging could save, as bytes.
    pub duplicate_bytes: SpreadReport,
    /// Huge pages that the machines had.
    pub huge_pages: SpreadReport,
    /// The policies, in the order of the command line.
    pub policies: Vec<ComparedPolicyReport>,
}

/// Mean and range over the seeds.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct SpreadReport {
    /// The mean.
    pub mean: f64,
    /// The smallest value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

/// What a policy saved and cost.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ComparedPolicyReport {
    /// Its name.
    pub policy: String,
    /// Savings less ksmd's metadata at the end.
    pub saved_bytes: SpreadReport,
    /// The same over time, in GiB times hours.
    pub saved_gib_hours: SpreadReport,
    /// ksmd's CPU time as a share of one CPU.
    pub ksmd_cores: SpreadReport,
    /// CPU time of Pagefold's daemon as a share of one CPU.
    pub pagefold_cores: SpreadReport,
    /// CPU time of ksmd and of Pagefold's daemon as a share of one CPU.
    pub cores: SpreadReport,
    /// How fast it saves.
    pub times: Vec<TimeToShareReport>,
    /// Merged pages that machines wrote.
    pub cow_breaks: SpreadReport,
    /// Huge pages that ksmd split.
    pub huge_pages_split: SpreadReport,
    /// Duplicates at the end that are not merged, in pages.
    pub unmerged_duplicate_pages: SpreadReport,
    /// Completed scans.
    pub full_scans: SpreadReport,
    /// Memory that the host lacked at worst.
    pub missing_bytes: SpreadReport,
    /// How long processes waited for scans of Pagefold's daemon, with the seed where that was worst.
    pub scan_wait: Option<ScanWaitReport>,
    /// Samples of the run with the first seed.
    pub samples: Vec<SampleReport>,
}

/// How long processes were due for a scan of Pagefold's daemon, at the worst moment.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct ScanWaitReport {
    /// The longest time at that moment.
    pub longest_seconds: f64,
    /// The time after which a process precedes all others then: the other time is worst relative to this one.
    pub priority_seconds: f64,
}

/// When a share of the duplicates was saved.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct TimeToShareReport {
    /// The share.
    pub share: f64,
    /// Runs in which it was reached.
    pub runs: usize,
    /// Seconds from the start, over these runs.
    pub seconds: Option<SpreadReport>,
}

/// The host at one moment.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct SampleReport {
    /// Virtual time.
    pub seconds: f64,
    /// Machines that run.
    pub machines: u64,
    /// What their memory would take without merging.
    pub resident_bytes: u64,
    /// Savings less ksmd's metadata.
    pub saved_bytes: i64,
    /// Pages saved.
    pub saved_pages: u64,
    /// Free memory of the host; negative if memory is missing.
    pub available_bytes: i64,
    /// Completed scans.
    pub full_scans: u64,
    /// Pages that ksmd visited.
    pub pages_scanned: u64,
    /// Visits that smart scan left out.
    pub pages_skipped: u64,
    /// ksmd's CPU time.
    pub ksmd_cpu_seconds: f64,
    /// CPU time of Pagefold's daemon.
    pub pagefold_cpu_seconds: f64,
    /// Merged pages that machines wrote.
    pub cow_breaks: u64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: u64,
    /// `pages_to_scan`; 0 while ksmd is stopped.
    pub pages_to_scan: u64,
}

impl From<&Sample> for SampleReport {
    fn from(sample: &Sample) -> Self {
        Self {
            seconds: sample.time_ms as f64 / 1e3,
            machines: sample.machines,
            resident_bytes: sample.resident_pages * PAGE_BYTES.cast_unsigned(),
            saved_bytes: sample.net_saved_bytes(),
            saved_pages: sample.saved_pages,
            available_bytes: sample.available_bytes,
            full_scans: sample.full_scans,
            pages_scanned: sample.pages_scanned,
            pages_skipped: sample.pages_skipped,
            ksmd_cpu_seconds: sample.ksmd_cpu_ns as f64 / 1e9,
            pagefold_cpu_seconds: sample.pagefold_cpu_ns as f64 / 1e9,
            cow_breaks: sample.cow_breaks,
            huge_pages_split: sample.huge_pages_split,
            pages_to_scan: sample.pages_to_scan,
        }
    }
}

impl From<ScanWait> for ScanWaitReport {
    fn from(wait: ScanWait) -> Self {
        let [longest_seconds, priority_seconds] = [wait.longest_ms, wait.priority_ms].map(|ms| ms as f64 / 1e3);
        Self { longest_seconds, priority_seconds }
    }
}

impl From<Spread> for SpreadReport {
    fn from(Spread { mean, least, most }: Spread) -> Self {
        Self { mean, least, most }
    }
}

/// The spread of values; zeros without any.
fn spread(values: impl Iterator<Item = f64>) -> SpreadReport {
    let values: Vec<f64> = values.collect();
    Spread::over(&values).unwrap_or(Spread { mean: 0.0, least: 0.0, most: 0.0 }).into()
}

impl ComparedPolicyReport {
    fn new(runs: &PolicyRuns) -> Self {
        let measures: Vec<RunMeasures> = runs.runs.iter().map(RunMeasures::new).collect();
        let over = |figure: fn(&RunMeasures) -> f64| spread(measures.iter().map(figure));
        let time_to = |(number, share): (usize, f64)| {
            let reached: Vec<f64> = measures.iter().filter_map(|run| run.seconds_to_share[number]).collect();
            TimeToShareReport { share, runs: reached.len(), seconds: Spread::over(&reached).map(Into::into) }
        };
        Self {
            policy: runs.policy.to_string(),
            saved_bytes: over(|run| run.saved_bytes),
            saved_gib_hours: over(|run| run.saved_byte_seconds / GIB / 3600.0),
            ksmd_cores: over(|run| run.ksmd_cores),
            pagefold_cores: over(|run| run.pagefold_cores),
            cores: over(RunMeasures::cores),
            times: TIMED_SHARES.into_iter().enumerate().map(time_to).collect(),
            cow_breaks: over(|run| run.cow_breaks),
            huge_pages_split: over(|run| run.huge_pages_split),
            unmerged_duplicate_pages: over(|run| run.unmerged_duplicates),
            full_scans: over(|run| run.full_scans),
            missing_bytes: over(|run| run.missing_bytes),
            scan_wait: runs.runs.iter().filter_map(|run| run.scan_wait).reduce(ScanWait::worse).map(Into::into),
            samples: runs.runs.first().map_or_else(Vec::new, |run| run.samples.iter().map(Into::into).collect()),
        }
    }
}

impl SimCompareReport {
    /// The report of a comparison.
    #[must_use]
    pub fn new(name: &str, scenario: &Scenario, plan: &SimulationPlan, policies: &[PolicyRuns]) -> Self {
        let all = || policies.iter().flat_map(|policy| &policy.runs);
        Self {
            schema: "pagefold.sim-compare/1",
            scenario: name.to_owned(),
            description: scenario.description.clone(),
            kernel: kernel_name(scenario.host.kernel),
            memory_bytes: scenario.host.memory_pages * PAGE_BYTES.cast_unsigned(),
            cpus: scenario.host.cpus,
            seconds: scenario.duration_ms as f64 / 1e3,
            exact: plan.exactness == Exactness::Exact,
            seeds: plan.seeds.clone(),
            duplicate_bytes: spread(all().map(|run| run.duplicates as f64 * PAGE_BYTES as f64)),
            huge_pages: spread(all().map(|run| run.huge_pages as f64)),
            policies: policies.iter().map(ComparedPolicyReport::new).collect(),
        }
    }
}
