//! The report of `pagefold vcpu gang --json`.

use schemars::JsonSchema;
use serde::Serialize;
use std::fmt;

/// How vCPUs are scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VcpuPolicy {
    /// Siblings wait on different CPUs.
    Spread,
    /// As spread; and a vCPU that spins yields to a sibling at most once an interval, else to another VM.
    ThrottledYield,
    /// The runnable vCPUs of a VM run in one slot.
    Gang,
}

impl fmt::Display for VcpuPolicy {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Spread => "spread",
            Self::ThrottledYield => "throttled-yield",
            Self::Gang => "gang",
        })
    }
}

/// Why the scheduler ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EndReason {
    /// The time was over, or a signal ended it.
    Requested,
    /// No selected process runs any more.
    NoVms,
    /// The measurement showed that it does not help.
    DoesNotHelp,
    /// The kernel removed it: a stalled task, an error, or an operator (SysRq-S).
    Ejected,
}

/// What the scheduler did.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GangRunReport {
    /// The policy.
    pub policy: VcpuPolicy,
    /// Why it ended.
    pub end: EndReason,
    /// What the kernel said, if it removed the scheduler.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ejection: Option<String>,
    /// How long it scheduled, in milliseconds.
    pub scheduled_ms: u64,
    /// How long the kernel's own scheduler had the virtual machines, in milliseconds, because a single one had several
    /// runnable vCPUs, and more of them than CPUs (policy gang).
    pub handed_over_ms: u64,
    /// Times at which owners of CPUs were chosen (policy gang).
    pub rotations: u64,
    /// Slots of ordinary tasks (policy gang).
    pub ordinary_slots: u64,
    /// The virtual machines.
    pub gangs: Vec<GangReport>,
    /// The measurement that decided whether it stays, if one was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trial: Option<TrialReport>,
}

/// A virtual machine as a gang.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct GangReport {
    /// The process.
    pub pid: u32,
    /// The name of the VM, or of the program.
    pub name: String,
    /// Its vCPUs at last.
    pub vcpus: u32,
    /// Its weight.
    pub weight: u32,
    /// The NUMA node on which it gets CPUs if that has room (policy gang): the one with most of its memory at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub home_node: Option<u32>,
    /// CPU time of its vCPUs and I/O threads, in milliseconds.
    pub cpu_ms: u64,
    /// Slots that it was given (policy gang).
    pub slots: u64,
    /// Yields of its vCPUs.
    pub yields: u64,
    /// Yields that moved a sibling to the CPU.
    pub directed_yields: u64,
}

/// A comparison with the kernel's own scheduler.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TrialReport {
    /// The command that counts the work done.
    pub metric: String,
    /// Work done in a second with this scheduler, one for each pair of windows.
    pub with_scheduler: Vec<f64>,
    /// Work done in a second with the kernel's own scheduler.
    pub without_scheduler: Vec<f64>,
    /// Geometric mean of the benefits of the pairs: above 1, the scheduler helps.
    pub benefit: f64,
    /// Whether it helps.
    pub helps: bool,
}
