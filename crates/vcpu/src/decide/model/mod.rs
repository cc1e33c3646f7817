//! A model of a host whose vCPUs outnumber its CPUs: run queues, spin locks of guests, pause-loop exits, directed
//! yields and gangs, simulated event by event.
//!
//! The model explains why a policy is slow and by which factor; it does not predict the throughput of a program.
//! [`calibration`] has published measurements, what was fitted to them, and the residuals. [`simulate`] is deterministic:
//! the same scenario, policy and seed give the same outcome.
//!
//! Left out: caches and memory, NUMA, frequency and hyper-threads of CPUs, devices and I/O threads, and other programs
//! of the host.

pub mod calibration;
pub mod capacity;
pub mod costs;
mod engine;
mod event_queue;
mod gang;
mod outcome;
mod random;
mod run_queue;
mod workload;
mod yielding;

#[cfg(test)]
mod tests;

pub use costs::HostCosts;
pub use engine::{SimulationSettings, simulate};
pub use outcome::{Outcome, SimulatedRun, VmOutcome, jain_index};
pub use workload::{LockKind, VmSpec, Workload};

/// The scheduler of the host's run queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduler {
    /// The Completely Fair Scheduler of Linux 3.6.
    Cfs36,
    /// Earliest eligible virtual deadline first, of Linux 6.18.
    Eevdf,
}

/// The kernel whose scheduler and directed yield are modeled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Linux 3.6: any sibling that is not in guest mode is a candidate, and failed attempts do not end the search.
    Linux36,
    /// Linux 6.18: only preempted siblings in kernel mode are candidates, at most three attempts, and `ple_window`
    /// grows.
    Today,
}

impl Kernel {
    /// The scheduler of this kernel.
    pub fn scheduler(self) -> Scheduler {
        match self {
            Self::Linux36 => Scheduler::Cfs36,
            Self::Today => Scheduler::Eevdf,
        }
    }

    /// The name in tables and arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Linux36 => "3.6",
            Self::Today => "today",
        }
    }
}

/// What the host does about vCPUs that spin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SchedulingPolicy {
    /// The scheduler alone, without pause-loop exits.
    Plain,
    /// Pause-loop exits with a directed yield each.
    PauseLoopExit,
    /// Pause-loop exits, and no two siblings on one run queue.
    Spread,
    /// At most one directed yield a tick and VM, else a plain yield; no two siblings on one run queue.
    ThrottledYield,
    /// All runnable vCPUs of a VM in one time slice, without pause-loop exits.
    Gang,
}

impl SchedulingPolicy {
    /// All policies, in the order of tables.
    pub const ALL: [Self; 5] = [Self::Plain, Self::PauseLoopExit, Self::Spread, Self::ThrottledYield, Self::Gang];

    /// The name in tables and arguments.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::PauseLoopExit => "ple",
            Self::Spread => "spread",
            Self::ThrottledYield => "throttled",
            Self::Gang => "gang",
        }
    }

    /// Whether spinning vCPUs exit.
    pub(crate) fn exits_on_spin(self) -> bool {
        matches!(self, Self::PauseLoopExit | Self::Spread | Self::ThrottledYield)
    }

    /// Whether siblings stay on different run queues.
    pub(crate) fn spreads_siblings(self) -> bool {
        matches!(self, Self::Spread | Self::ThrottledYield)
    }
}

/// A host and its VMs.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// CPUs that run vCPUs.
    pub cpus: u32,
    /// The VMs, all started at time zero.
    pub vms: Vec<VmSpec>,
    /// Costs of the host.
    pub costs: HostCosts,
}

impl Scenario {
    /// vCPUs of all VMs.
    pub fn vcpu_count(&self) -> u32 {
        self.vms.iter().map(|vm| vm.vcpus).sum()
    }
}
