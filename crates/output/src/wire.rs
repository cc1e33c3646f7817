//! Types common to several JSON reports.

use pagefold_base::domain::TrustDomain;
use pagefold_base::identity::Monitor;
use pagefold_base::process::Process;
use pagefold_base::{Absent, PageCounts, PageSize};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Resident private anonymous pages, each in exactly one of `zero`, `duplicate`, `unique`, `merged` and `volatile`.
/// The unit is pages in `pages` objects and bytes in `bytes` objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PageClasses {
    /// All pages: the sum of the next five fields.
    pub resident: u64,
    /// Zero pages.
    pub zero: u64,
    /// Pages of a content that two or more frames hold, without zero pages. A frame that several processes share since
    /// a fork is one frame: it is `unique` in each of them unless another frame has its content.
    pub duplicate: u64,
    /// Pages whose content no other page has.
    pub unique: u64,
    /// Pages that KSM has merged already.
    pub merged: u64,
    /// Pages that changed between the two passes.
    pub volatile: u64,
    /// The part of `duplicate` beyond one copy of each content. If KSM holds the content already, all its duplicates
    /// count.
    pub redundant: u64,
    /// The part of `duplicate` with another copy in the same process.
    pub duplicate_within_process: u64,
    /// The part of `duplicate` whose nearest copy is in another process of the same trust domain.
    pub duplicate_within_domain: u64,
    /// The part of `duplicate` whose nearest copy is in another trust domain.
    pub duplicate_across_domains: u64,
}

impl PageClasses {
    /// The counts in pages.
    pub fn from_counts_in_pages(counts: &PageCounts) -> Self {
        Self::from_counts_scaled(counts, 1)
    }

    /// The counts in bytes.
    pub fn from_counts_in_bytes(counts: &PageCounts, page_size: PageSize) -> Self {
        Self::from_counts_scaled(counts, page_size.bytes())
    }

    fn from_counts_scaled(counts: &PageCounts, unit: u64) -> Self {
        Self {
            resident: counts.resident().0 * unit,
            zero: counts.zero.0 * unit,
            duplicate: counts.duplicate().0 * unit,
            unique: counts.unique.0 * unit,
            merged: counts.merged.0 * unit,
            volatile: counts.volatile.0 * unit,
            redundant: counts.redundant.0 * unit,
            duplicate_within_process: counts.within_process.0 * unit,
            duplicate_within_domain: counts.within_domain.0 * unit,
            duplicate_across_domains: counts.across_domains.0 * unit,
        }
    }
}

/// Identifies a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ProcessInfo {
    /// Its process number.
    pub pid: u32,
    /// Its start time in clock ticks since boot. Together with `pid` it identifies the process uniquely.
    pub start_time: u64,
    /// The kernel's name of the program (`comm`).
    pub comm: String,
    /// Its effective user ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Its trust domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Its cgroup.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The virtual machine that it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmInfo>,
    /// The container it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The job it belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    /// Its rank in the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct VmInfo {
    /// `qemu`, `firecracker` or `cloud-hypervisor`.
    pub monitor: &'static str,
    /// Its name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Bytes of guest RAM according to the command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

impl ProcessInfo {
    /// Makes the record from the observed process.
    pub fn from_process(process: &Process, domain: Option<&TrustDomain>) -> Self {
        let identity = &process.identity;
        Self {
            pid: process.id.pid.0,
            start_time: process.id.start_time,
            comm: process.comm.clone(),
            uid: process.uid.clone().ok(),
            domain: domain.map(ToString::to_string),
            cgroup: process.cgroup.clone().ok(),
            vm: identity.vm.as_ref().map(|vm| VmInfo {
                monitor: match vm.monitor {
                    Monitor::Qemu => "qemu",
                    Monitor::Firecracker => "firecracker",
                    Monitor::CloudHypervisor => "cloud-hypervisor",
                },
                name: vm.name.clone(),
                memory_bytes: vm.memory_bytes,
            }),
            container: identity.container.clone(),
            job: identity.job.as_ref().map(|job| job.name.clone()),
            rank: identity.job.as_ref().and_then(|job| job.rank),
        }
    }

    /// A short label: the virtual machine's name, or the program's with the rank.
    pub fn label(&self) -> String {
        match (self.vm.as_ref().and_then(|vm| vm.name.as_ref()), self.rank) {
            (Some(name), _) => name.clone(),
            (None, Some(rank)) => format!("{} #{rank}", self.comm),
            (None, None) => self.comm.clone(),
        }
    }
}

/// A process that could not be scanned, or not in full.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct UnscannedProcessReport {
    /// Its process number.
    pub pid: u32,
    /// Its name, if it could be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// `denied`, `vanished`, `not_on_this_kernel`, `malformed`, `no_answer` or `not_asked`.
    pub reason: &'static str,
    /// The reason as text.
    pub detail: String,
}

impl UnscannedProcessReport {
    /// Makes the report from the process number, name and reason.
    pub fn new(pid: u32, comm: Option<String>, why: &Absent) -> Self {
        let reason = match why {
            Absent::Denied => "denied",
            Absent::Vanished => "vanished",
            Absent::NotOnThisKernel => "not_on_this_kernel",
            Absent::Malformed(_) => "malformed",
            Absent::NoAnswer(_) => "no_answer",
            Absent::NotAsked(_) => "not_asked",
        };
        Self { pid, comm, reason, detail: why.to_string() }
    }
}

/// A gain in CPU seconds an hour; a loss is negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GainReport {
    /// By memory that merging saves.
    pub memory_saved: f64,
    /// By remote reads.
    pub remote_reads: f64,
    /// By CPU time of moving memory and of ksmd.
    pub cpu: f64,
    /// By huge pages.
    pub huge_pages: f64,
    /// By virtual CPUs above the even shares of nodes.
    #[serde(default)]
    pub crowding: f64,
    /// The sum.
    pub net: f64,
}

/// A report as one JSON document that ends with a newline.
///
/// # Panics
/// Never: the wire types have string keys and finite numbers only.
pub fn to_json<T: Serialize>(report: &T) -> String {
    let mut text = serde_json::to_string_pretty(report).expect("wire types are serializable");
    text.push('\n');
    text
}

/// A report as JSON in one line without a newline.
///
/// # Panics
/// Never, for the same reason as [`to_json`].
pub fn to_json_line<T: Serialize>(report: &T) -> String {
    serde_json::to_string(report).expect("wire types are serializable")
}

/// The JSON schema of a report.
///
/// # Panics
/// Never: schemas have string keys.
pub fn json_schema<T: JsonSchema>() -> String {
    let mut text = serde_json::to_string_pretty(&schemars::schema_for!(T)).expect("schemas are serializable");
    text.push('\n');
    text
}
