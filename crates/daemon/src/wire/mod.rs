//! The daemon's status in JSON: the document that the control socket returns, and that every view is drawn from.
//!
//! Its size is bounded on any host: lists name the biggest or latest entries, and say how many they leave out. Values
//! that could not be read are absent, never 0. Sizes are bytes unless the name says otherwise; times are Unix times in
//! seconds.

pub mod group_footprints;

use pagefold_doctor::wire::{FindingReport, VerdictName};
use pagefold_output::wire::{GainReport, PageClasses};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Name of this schema.
pub const STATUS_SCHEMA: &str = "pagefold.status/1";

/// Maximum number of listed processes.
pub const MAX_LISTED_PROCESSES: usize = 200;

/// Maximum number of listed workloads, and of cgroups.
pub const MAX_LISTED_GROUPS: usize = 100;

/// Maximum number of parties in the sharing matrix, without the row for all others.
pub const MAX_MATRIX_PARTIES: usize = 20;

/// Maximum number of listed decisions.
pub const MAX_LISTED_DECISIONS: usize = 100;

/// Maximum number of listed virtual machines.
pub const MAX_LISTED_VMS: usize = 50;

/// Maximum number of listed trust domains.
pub const MAX_LISTED_DOMAINS: usize = 50;

/// Status of the daemon: `pagefold status --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StatusReport {
    /// `pagefold.status/1`.
    pub schema: String,
    /// The version of pagefold.
    pub version: String,
    /// The observed host: `this host` or a recording.
    pub host: String,
    /// The daemon's process.
    pub pid: u32,
    /// Time of this report.
    pub time: f64,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    /// What it may do.
    pub mode: DaemonModeName,
    /// Its current state.
    pub state: DaemonStateName,
    /// Reason of the state, as text.
    pub why: String,
    /// The host's memory.
    pub memory: HostMemoryReport,
    /// The goal of merging.
    pub goal: GoalReport,
    /// Limits of the daemon.
    pub bounds: BoundsReport,
    /// KSM's settings and counters; absent where the kernel has no KSM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm: Option<KsmReport>,
    /// Savings on this host, by the kernel's counters and by measurements of merges that these counters lack.
    pub saved: HostSavingsReport,
    /// CPU time of merging.
    pub cpu: CpuReport,
    /// Resident memory of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// How it learns of new programs.
    pub process_discovery: ProcessDiscovery,
    /// Totals of all passes.
    pub passes: PassTotalsReport,
    /// Number of decisions since the daemon started, by reason.
    pub decisions_by_reason: BTreeMap<String, u64>,
    /// Huge pages that the kernel has split since the daemon started (`thp_split_page`), for any reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_pages_split: Option<u64>,
    /// COW breaks since the daemon started (`cow_ksm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cow_breaks: Option<u64>,
    /// Totals of the last census of each process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub census: Option<CensusTotalsReport>,
    /// Trust domains, largest savings first. The last one, `others`, sums up the rest.
    pub domains: Vec<DomainSavingsReport>,
    /// Tracked processes, the largest resident memory first.
    pub tracked_processes: Vec<TrackedProcessReport>,
    /// Number of tracked processes that are not listed.
    pub tracked_processes_omitted: u64,
    /// All tracked processes by virtual machine, container or job, the largest footprint first.
    pub workloads: Vec<WorkloadReport>,
    /// Number of workloads that are not listed.
    pub workloads_omitted: u64,
    /// All tracked processes by cgroup, the largest footprint first.
    pub cgroups: Vec<CgroupReport>,
    /// Number of cgroups that are not listed.
    pub cgroups_omitted: u64,
    /// Which parties share pages; for each pair from the last census with both.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<SharingReport>,
    /// The placement of virtual machines on NUMA nodes; absent if it is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementReport>,
    /// How virtual machines wait for CPUs, the one that waits most first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vm_cpus: Vec<VmCpuReport>,
    /// Number of virtual machines that are not listed.
    #[serde(default)]
    pub vm_cpus_omitted: u64,
    /// The latest decisions, the latest first.
    pub decisions: Vec<DecisionReport>,
    /// Findings of the doctor, worst first.
    pub findings: Vec<FindingReport>,
    /// Number of all findings, by verdict; empty if the doctor was not run.
    pub findings_by_verdict: BTreeMap<VerdictName, u64>,
}

/// How a virtual machine runs and waits for CPUs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmCpuReport {
    /// Its process number.
    pub pid: u32,
    /// Its name, or that of its program.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u64,
    /// Seconds for which its present vCPUs have run since they began, summed up.
    pub run_seconds: f64,
    /// Seconds for which they were runnable and waited for a CPU since they began ("CPU ready"), summed up.
    pub ready_seconds: f64,
    /// Running, in percent of the time since the last reading, as the mean of its vCPUs. Absent at the first reading.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_percent: Option<f64>,
    /// Waiting for a CPU, likewise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_percent: Option<f64>,
}

/// The placement of virtual machines on NUMA nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlacementReport {
    /// What it may do.
    pub mode: PlacementModeName,
    /// Its current state.
    pub state: PlacementStateName,
    /// What it waits for, or how far it is, as text.
    pub why: String,
    /// The last plan; absent before the first one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_plan: Option<LastPlanReport>,
    /// Placements of machines since the daemon started.
    pub placed_machines: u64,
    /// Placements that were given up since then: the machine ended, a node had no room, the kernel refused, or tasks
    /// waited for memory.
    pub failed_machines: u64,
    /// Bytes that were moved since then.
    pub moved_bytes: u64,
    /// Changes that should have been undone since then, and were not.
    pub failed_undos: u64,
    /// What the last plan gains against leaving everything.
    #[serde(default)]
    pub planned_gain: GainReport,
    /// What the placements since the start gain, as planned.
    #[serde(default)]
    pub placed_gain: GainReport,
}

/// The last plan of a placement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LastPlanReport {
    /// When it was carried out or given up.
    pub time: f64,
    /// What was done, or why nothing, as text.
    pub result: String,
}

/// What a placement may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlacementModeName {
    /// Report which virtual machines it would place.
    #[default]
    Advise,
    /// Place virtual machines.
    Act,
}

/// The current state of a placement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PlacementStateName {
    /// It waits.
    #[default]
    Idle,
    /// An operator paused it.
    Paused,
    /// It reads where virtual machines are, and plans.
    Planning,
    /// It places virtual machines.
    Placing,
}

/// What the daemon may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DaemonModeName {
    /// Track processes and report them; take no census.
    Observe,
    /// Take censuses and report profitable merges; change nothing.
    #[default]
    Advise,
    /// Execute profitable merges.
    Act,
}

/// How the daemon finds new programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessDiscovery {
    /// The kernel's process connector reports them.
    ProcConnector,
    /// The daemon lists all processes at each poll.
    Polling,
}

/// Current state of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DaemonStateName {
    /// It has not scanned all processes yet.
    Starting,
    /// A census or a merge is under way.
    Working,
    /// There is nothing to do, or not now: ksmd is idle, and merged pages stay merged.
    Idle,
    /// An operator paused it.
    Paused,
    /// Another program tunes KSM.
    Yielding,
}

/// The host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostMemoryReport {
    /// `MemTotal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<u64>,
    /// `MemFree`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// `AnonHugePages`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub anon_huge: Option<u64>,
    /// Percent of the last ten seconds in which some task waited for memory (`/proc/pressure/memory`, `some avg10`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pressure_percent: Option<f64>,
}

/// The goal of merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GoalReport {
    /// `MemAvailable` to keep; above it merging pauses. Absent: all profitable merges are executed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
}

/// Limits of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BoundsReport {
    /// Percent of one CPU that ksmd and pagefold may use together on average.
    pub cpu_percent: f64,
    /// CPU seconds that may accumulate for a burst.
    pub burst_seconds: f64,
    /// CPU seconds of the burst that are available now; negative after overspending.
    pub burst_available_seconds: f64,
    /// Limit of ksmd's metadata. Absent: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// Limit of a process's number of regions when enrolling splits regions. Absent: only the kernel's limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions_per_process: Option<u64>,
    /// Whether huge pages may be split to merge parts of them.
    pub split_huge_pages: bool,
}

/// `/sys/kernel/mm/ksm`. Names are the kernel's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KsmReport {
    /// 0 stopped with merges kept, 1 running, 2 stopped and everything unmerged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<u64>,
    /// Pages per batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_to_scan: Option<u64>,
    /// Milliseconds between batches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sleep_millisecs: Option<u64>,
    /// Pages: frames that are shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_shared: Option<u64>,
    /// Pages: further mappings of those frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_sharing: Option<u64>,
    /// Pages: scanned, no duplicate found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_unshared: Option<u64>,
    /// Pages: changed between scans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_volatile: Option<u64>,
    /// Pages: scanned since boot, each scan counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_scanned: Option<u64>,
    /// Pages: skipped by smart scan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_skipped: Option<u64>,
    /// Pages: mapped to the kernel's zero page by KSM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_zero_pages: Option<i64>,
    /// Complete scans since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_scans: Option<u64>,
    /// Bytes saved less metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub general_profit: Option<i64>,
    /// Pages: COW breaks since boot (`/proc/vmstat`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cow_ksm: Option<u64>,
}

/// Savings of merging. `net = gross - metadata` and `gross = duplicate + zero + split_zero`. The sum of
/// `duplicate_net`, `zero` and `split_zero` exceeds `net` by the metadata of unmerged pages. ksmd drops the metadata of
/// zero pages in the next pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostSavingsReport {
    /// Freed frames.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gross: Option<u64>,
    /// The part of `gross` from pages merged with equal ones (`pages_sharing`). Includes zero pages where KSM does not
    /// map them to the kernel's zero page (`use_zero_pages`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicate: Option<u64>,
    /// The part of `gross` from pages that KSM mapped to the kernel's zero page (`ksm_zero_pages`); absent before 6.6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero: Option<u64>,
    /// The part of `gross` from zero pages that the kernel freed when it split huge pages for ksmd. No KSM counter has
    /// it: merges measure it, and the last walk of page tables limits it. Merges by other programs are not included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_zero: Option<u64>,
    /// `duplicate` less the metadata of merged pages, kept copies included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicate_net: Option<i64>,
    /// The kernel's metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// `gross` less `metadata`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net: Option<i64>,
}

/// CPU time of merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CpuReport {
    /// Of ksmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd: Option<CpuUsageReport>,
    /// Of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold: Option<CpuUsageReport>,
}

/// CPU time of ksmd or of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CpuUsageReport {
    /// Seconds since the daemon started.
    pub seconds: f64,
    /// Percent of one CPU over the last minute.
    pub percent: f64,
}

/// Totals of all passes. A pass is a census and, if anything is profitable, the merge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassTotalsReport {
    /// Passes since the daemon started.
    pub passes: u64,
    /// Passes that merged anything.
    pub merges: u64,
    /// Duration of all passes.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold in all passes.
    pub cpu_seconds: f64,
    /// Predicted savings of all executed plans.
    pub predicted: u64,
    /// Measured net savings of all executed plans.
    pub measured: i64,
    /// The last pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<PassReport>,
}

/// A pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassReport {
    /// Time of its end.
    pub time: f64,
    /// Its duration.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// Number of scanned processes.
    pub processes: u64,
    /// Predicted savings of its plan.
    pub predicted: u64,
    /// Measured net savings; absent if nothing was merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured: Option<i64>,
}

/// Totals of censuses over all tracked processes, each by its last census.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CensusTotalsReport {
    /// Time of the latest census.
    pub time: f64,
    /// Number of scanned processes.
    pub processes: u64,
    /// Number of processes selected for the latest census that were not scanned.
    pub unscanned_processes: u64,
    /// Classes of their pages.
    pub classes: PageClasses,
}

/// Savings in a trust domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DomainSavingsReport {
    /// The domain.
    pub name: String,
    /// Number of its tracked processes.
    pub tracked_processes: u64,
    /// Their resident memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Their merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// Estimated savings of its processes, by their share of merged pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Metadata of their pages, merged or not. Net savings are lower by this amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
}

/// Kind of a workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WorkloadKind {
    /// A virtual machine.
    Vm,
    /// A process in a container.
    Container,
    /// A process of a job.
    Job,
    /// Any other process.
    Process,
}

/// State of a tracked process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrackingState {
    /// It is new, and waits for its first census.
    Arriving,
    /// It was scanned, and will be scanned again.
    Tracked,
    /// Some of its pages are merged.
    Merged,
    /// Nothing of it is profitable, or its merged pages had COW breaks: it is scanned less and less often.
    BackedOff,
    /// It is excluded from merging.
    Excluded,
    /// An operator unenrolled it.
    Unenrolled,
}

/// A tracked process or virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackedProcessReport {
    /// Its pid.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// Name of the virtual machine, or of the program.
    pub label: String,
    /// Kind of its workload.
    pub kind: WorkloadKind,
    /// Its virtual machine, container or job, otherwise the program name and pid.
    pub workload: String,
    /// Its effective user id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Its trust domain.
    pub domain: String,
    /// Resident memory, not reduced by merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// The part of `resident` in files and shared memory, which other processes may map too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_and_shmem: Option<u64>,
    /// Merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// Its fair share, each page divided by the number of processes that map it (`Pss` of `smaps_rollup`), corrected by
    /// later changes of its resident and merged memory. Before the first reading an estimate: `resident` less what
    /// merging saves for it. Pages shared by fork or as files count in full in the estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint: Option<u64>,
    /// Seconds since its fair share was read. Absent if `footprint` is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_age_seconds: Option<u64>,
    /// Estimated savings of merging it: its merged pages times `pages_sharing / (pages_shared + pages_sharing)`, the
    /// saved part of all merged pages on this host, plus its zero pages in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Metadata of its pages, merged or not (`ksm_rmap_items`). Net savings are lower by this amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// Number of its ranges that the daemon has enrolled.
    pub enrolled_ranges: u64,
    /// Its state.
    pub state: TrackingState,
    /// Reason of the state, as text.
    pub why: String,
}

/// A virtual machine, container or job, or a single process outside of these, with all of its tracked processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkloadReport {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: WorkloadKind,
    /// Trust domain of its processes.
    pub domain: String,
    /// Their footprint.
    #[serde(flatten)]
    pub sum: GroupFootprint,
}

/// A cgroup with the tracked processes directly in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CgroupReport {
    /// Its path.
    pub path: String,
    /// Their footprint.
    #[serde(flatten)]
    pub sum: GroupFootprint,
}

/// Footprint of several processes. A value is absent if it is unknown for any of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupFootprint {
    /// Number of processes.
    pub processes: u64,
    /// Their merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// Sum of their footprints. For estimates, files and shared memory count only once: as much as the process with the
    /// most of them maps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint: Option<u64>,
    /// Age in seconds of the oldest fair share. Absent if any footprint is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_age_seconds: Option<u64>,
    /// Estimated savings of merging them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// Metadata of their pages, merged or not. Net savings are lower by this amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
}

/// Which parties share how many bytes, without zero pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharingReport {
    /// Labels of the parties, most duplicates first; the last one may be `others`.
    pub parties: Vec<String>,
    /// `shared_bytes[a][b]`: bytes of `a` whose content `b` has too; for `a == b`, bytes with another copy in `a`.
    pub shared_bytes: Vec<Vec<u64>>,
}

/// A decision of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DecisionReport {
    /// Time of the decision, in milliseconds of Unix time.
    pub time_ms: u64,
    /// Kind of the decision: `census`, `merge`, `unenroll`, `skip`, `idle`, `yield`, `refuse`, `restore`, `adopt`.
    pub kind: String,
    /// Labels of the processes it is about, or `this host`.
    pub subject: String,
    /// Reason, one of a small fixed set: `arrived`, `grown`, `due`, `budget`, ...
    pub reason: String,
    /// Reason, as text.
    pub explanation: String,
    /// Predicted savings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<u64>,
    /// Whether it was carried out; always false in the modes `observe` and `advise`.
    pub carried_out: bool,
}

/// Answer of the control socket, in one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    /// Answer to `status`.
    Status(Box<StatusReport>),
    /// The command was accepted; what happens now.
    Done(String),
    /// The command was refused; why.
    Refused(String),
}

#[cfg(test)]
mod tests;
