//! How the daemon stands, on the wire: the one document that the control socket answers with, and that every face is
//! drawn from.
//!
//! It is bounded whatever the host holds: the lists name the biggest or the latest and say how many they leave out.
//! What could not be read is absent, never 0. Bytes, unless the name says otherwise; times are Unix times in seconds.

pub mod group_footprints;

use pagefold_doctor::wire::{FindingReport, VerdictName};
use pagefold_output::wire::PageClasses;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of this document's form.
pub const STATUS_SCHEMA: &str = "pagefold.status/1";

/// Members that are named at most.
pub const MAX_LISTED_PROCESSES: usize = 200;

/// Workloads that are named at most, and cgroups.
pub const MAX_LISTED_GROUPS: usize = 100;

/// Members in the sharing matrix at most, the row of all others not counted.
pub const MAX_MATRIX_PARTIES: usize = 20;

/// Decisions that are kept at most.
pub const MAX_LISTED_DECISIONS: usize = 100;

/// Trust domains that are named at most.
pub const MAX_LISTED_DOMAINS: usize = 50;

/// How the daemon stands: `pagefold status --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StatusReport {
    /// `pagefold.status/1`.
    pub schema: String,
    /// The version of pagefold.
    pub version: String,
    /// What is looked at: `this host` or a recording.
    pub host: String,
    /// The daemon's process.
    pub pid: u32,
    /// When this was written.
    pub time: f64,
    /// Seconds since the daemon started.
    pub uptime_seconds: f64,
    /// What it may do.
    pub mode: DaemonModeName,
    /// What it does.
    pub state: DaemonStateName,
    /// Why, in words.
    pub why: String,
    /// The host's memory.
    pub memory: HostMemoryReport,
    /// What it works for.
    pub goal: GoalReport,
    /// What it keeps to.
    pub bounds: BoundsReport,
    /// KSM's settings and counters; absent where the kernel has no KSM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm: Option<KsmReport>,
    /// What merging saves on this host, by the kernel's counters and what merges measured that these do not have.
    pub saved: HostSavingsReport,
    /// What it costs.
    pub cpu: CpuReport,
    /// Resident memory of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// How it learns of new programs.
    pub arrivals: ProcessDiscovery,
    /// What the passes came to.
    pub passes: PassTotalsReport,
    /// Decisions since the daemon started, by the word of their reason.
    pub decisions_by_reason: BTreeMap<String, u64>,
    /// Since the daemon started: huge pages that the kernel split (`thp_split_page`), for any reason.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub huge_pages_split: Option<u64>,
    /// Since the daemon started: merged pages that were written and copied (`cow_ksm`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cow_breaks: Option<u64>,
    /// What the last census of each process found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub census: Option<CensusTotalsReport>,
    /// By trust domain, the most saved first; the rest is summed up as the last one, `others`.
    pub domains: Vec<DomainSavingsReport>,
    /// Who is known, the largest resident memory first.
    pub members: Vec<TrackedProcessReport>,
    /// Members that are not named.
    pub members_left_out: u64,
    /// All members by the virtual machine, container or job that they belong to, the largest footprint first.
    pub workloads: Vec<WorkloadReport>,
    /// Workloads that are not named.
    pub workloads_left_out: u64,
    /// All members by their cgroup, the largest footprint first.
    pub cgroups: Vec<CgroupReport>,
    /// Cgroups that are not named.
    pub cgroups_left_out: u64,
    /// Who shares with whom, of each two by the last census in which both were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<SharingReport>,
    /// The latest decisions, the latest first.
    pub decisions: Vec<DecisionReport>,
    /// What the doctor finds wrong with the host, worst first.
    pub findings: Vec<FindingReport>,
    /// All that it judged, by verdict; empty where it was not asked.
    pub findings_by_verdict: BTreeMap<VerdictName, u64>,
}

/// What the daemon may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DaemonModeName {
    /// Look and tell; take no census.
    Observe,
    /// Take censuses and say what would pay; change nothing.
    #[default]
    Advise,
    /// Merge what pays.
    Act,
}

/// How the daemon learns of new programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProcessDiscovery {
    /// The kernel's process connector tells of them.
    ProcConnector,
    /// It lists all processes again and again.
    Polling,
}

/// What the daemon does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DaemonStateName {
    /// It has not looked at everybody yet.
    Starting,
    /// A census or a merge is under way.
    Working,
    /// Nothing is to be done, or not now: ksmd rests, what is merged stays merged.
    Resting,
    /// Somebody paused it.
    Paused,
    /// Somebody else drives KSM.
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

/// What the daemon works for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GoalReport {
    /// `MemAvailable` to keep; merging rests above it. Absent: all that pays is merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
}

/// What the daemon keeps to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BoundsReport {
    /// Percent of one CPU that ksmd and pagefold use together on average.
    pub cpu_percent: f64,
    /// CPU seconds that may have been saved up for a burst.
    pub burst_seconds: f64,
    /// CPU seconds of that which are there now; negative while a burst is being made up for.
    pub burst_left_seconds: f64,
    /// ksmd's metadata at most. Absent: no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// Memory regions that enrolling may bring a process to. Absent: the kernel's bound alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub regions_per_process: Option<u64>,
    /// Whether huge pages may be split for what is in them.
    pub split_huge_pages: bool,
}

/// `/sys/kernel/mm/ksm`. Names are the kernel's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct KsmReport {
    /// 0 stopped with merges kept, 1 running, 2 stopped and everything unmerged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<u64>,
    /// Pages of a batch.
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
    /// Pages: looked at, no copy found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_unshared: Option<u64>,
    /// Pages: changed between scans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_volatile: Option<u64>,
    /// Pages: looked at since boot, each time counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_scanned: Option<u64>,
    /// Pages: passed over by smart scan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pages_skipped: Option<u64>,
    /// Pages: mapped to the kernel's page of zeros by KSM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksm_zero_pages: Option<i64>,
    /// Complete scans since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_scans: Option<u64>,
    /// Bytes saved less metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub general_profit: Option<i64>,
    /// Pages: merged ones that were written and copied, since boot (`/proc/vmstat`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cow_ksm: Option<u64>,
}

/// What merging saves. `net = gross - metadata` and `gross = duplicate + zero + split_zero`. What `net` is less than
/// `duplicate_net`, `zero` and `split_zero` together is the metadata of pages that were not merged. For pages of zeros
/// ksmd keeps none beyond the pass after.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostSavingsReport {
    /// Frames that came back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gross: Option<u64>,
    /// Of them, those of pages that were merged with equal ones (`pages_sharing`); where KSM does not map pages of
    /// zeros to the kernel's (`use_zero_pages`), these are among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicate: Option<u64>,
    /// Of them, those of pages that KSM mapped to the kernel's page of zeros (`ksm_zero_pages`); absent before 6.6.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero: Option<u64>,
    /// Of them, those of pages of zeros that the kernel freed when it split huge pages for ksmd: in no counter of KSM, but
    /// measured by merges, and no more than page tables had when they were walked last. What other programs had ksmd
    /// merge is not among it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split_zero: Option<u64>,
    /// `duplicate` less the metadata of the pages that were merged, the kept copies among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duplicate_net: Option<i64>,
    /// The kernel's metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// What is left.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub net: Option<i64>,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CpuReport {
    /// Of ksmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd: Option<CpuUsageReport>,
    /// Of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold: Option<CpuUsageReport>,
}

/// The CPU time of somebody.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CpuUsageReport {
    /// Seconds since the daemon started.
    pub seconds: f64,
    /// Percent of one CPU over the last minute.
    pub percent: f64,
}

/// What the passes came to. A pass is a census, and the merge where anything pays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassTotalsReport {
    /// Passes since the daemon started.
    pub passes: u64,
    /// Those that merged anything.
    pub merges: u64,
    /// How long all of them took.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold in them.
    pub cpu_seconds: f64,
    /// What all plans that were carried out should have saved.
    pub predicted: u64,
    /// What they saved.
    pub reached: i64,
    /// The last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<PassReport>,
}

/// A pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PassReport {
    /// When it ended.
    pub time: f64,
    /// How long it took.
    pub seconds: f64,
    /// CPU seconds of ksmd and pagefold together.
    pub cpu_seconds: f64,
    /// Processes that were looked at.
    pub processes: u64,
    /// What its plan should save.
    pub predicted: u64,
    /// What it saved; absent where nothing was merged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reached: Option<i64>,
}

/// What censuses found of those who may be managed: of each process the last one in which it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CensusTotalsReport {
    /// When the latest was taken, whoever it was of.
    pub time: f64,
    /// Processes that were looked at.
    pub processes: u64,
    /// Processes that were chosen for the latest and not seen.
    pub not_seen: u64,
    /// What their pages are.
    pub classes: PageClasses,
}

/// What merging saves in a trust domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DomainSavingsReport {
    /// The domain.
    pub name: String,
    /// Its members.
    pub members: u64,
    /// Their resident memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Their merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// An estimate of what merging saves for its members, by their shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// The metadata of their pages, merged or not: what is saved net is so much less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
}

/// What a member is.
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

/// What is done with a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TrackingState {
    /// It has just come, and waits for its first census.
    Arriving,
    /// It was looked at, and is looked at again.
    Followed,
    /// Parts of it are merged.
    Merged,
    /// Nothing of it pays, or it does not last: it is looked at less and less often.
    BackedOff,
    /// It must not be merged.
    Excluded,
    /// Somebody withdrew it.
    Withdrawn,
}

/// A process or virtual machine that the daemon knows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TrackedProcessReport {
    /// Its number.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// The virtual machine's name, or the program's.
    pub label: String,
    /// What it is.
    pub kind: WorkloadKind,
    /// The virtual machine, container or job that it belongs to, else the program and its number.
    pub workload: String,
    /// Its effective user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Its trust domain.
    pub domain: String,
    /// Resident memory, blind to merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Of that, files and shared memory, which others may map too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<u64>,
    /// Merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// What it takes: its fair share, each page divided by those who map it (`Pss` of `smaps_rollup`), with what its
    /// resident and merged memory has changed since that was read. Before that an estimate: `resident` less what
    /// merging saves of it, where what is shared otherwise, by fork or as files, counts in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint: Option<u64>,
    /// Seconds since its fair share was read. Absent where `footprint` is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_age_seconds: Option<u64>,
    /// An estimate of what merging saves for it: of its merged pages the part that is saved of all on this host,
    /// `pages_sharing / (pages_shared + pages_sharing)`, and pages of zeros in full.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// The metadata of its pages, merged or not (`ksm_rmap_items`): what is saved net is so much less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
    /// Ranges that the daemon has enrolled in it.
    pub ranges: u64,
    /// What is done with it.
    pub state: TrackingState,
    /// Why, in words.
    pub why: String,
}

/// A virtual machine, a container, a job, or a process that belongs to none, with all of its members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct WorkloadReport {
    /// Its name.
    pub name: String,
    /// What it is.
    pub kind: WorkloadKind,
    /// The trust domain of those members.
    pub domain: String,
    /// What they take.
    #[serde(flatten)]
    pub sum: GroupFootprint,
}

/// A cgroup with the members that are in it itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CgroupReport {
    /// Where it is.
    pub path: String,
    /// What they take.
    #[serde(flatten)]
    pub sum: GroupFootprint,
}

/// What several processes take together. A figure is absent where it is not known of one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupFootprint {
    /// How many they are.
    pub processes: u64,
    /// Their merged memory, kept copies and pages of zeros included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub merged: Option<u64>,
    /// What they take, as of one. Of estimates among them files and shared memory are in it only once: as much as the
    /// one of them that maps the most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint: Option<u64>,
    /// Seconds since the fair share of each was read, at most. Absent where any of it is an estimate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub footprint_age_seconds: Option<u64>,
    /// An estimate of what merging saves for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved: Option<u64>,
    /// The metadata of their pages, merged or not: what is saved net is so much less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<u64>,
}

/// Who shares how much with whom, pages of zeros apart.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SharingReport {
    /// The members with the most duplicates first; the last may be `others`.
    pub parties: Vec<String>,
    /// `shared[a][b]`: bytes of `a` whose content `b` has too; for `a == b`, bytes with another copy in `a`.
    pub shared: Vec<Vec<u64>>,
}

/// Something that the daemon decided.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DecisionReport {
    /// When, in milliseconds of Unix time.
    pub time_ms: u64,
    /// What: `census`, `merge`, `withdraw`, `pace`, `rest`, `yield`, `restore`, `leave`, `refuse`.
    pub what: String,
    /// Whom it is about: labels, or `this host`.
    pub whom: String,
    /// The word of the reason, of a small fixed set: `arrived`, `filled`, `due`, `budget`, `pressure`, ...
    pub reason: String,
    /// Why, in words.
    pub why: String,
    /// What it should save.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted: Option<u64>,
    /// Whether it was carried out; not in the modes `observe` and `advise`.
    pub acted: bool,
}

/// What the control socket answers, in one line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    /// To `status`.
    Status(Box<StatusReport>),
    /// What is done now.
    Done(String),
    /// Why it is not.
    Refused(String),
}

#[cfg(test)]
mod tests;
