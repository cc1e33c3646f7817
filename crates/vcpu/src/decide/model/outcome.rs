//! What a simulation measures.

use super::{Scenario, VmSpec};
use crate::schedule::{CpuSchedule, RunEnd, RunInterval, ScheduledVm, Task};

/// Jain's fairness index of `shares`: 1 if all are equal, 1/n if one has everything (Jain, Chiu, Hawe 1984).
pub fn jain_index(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

/// A time in which a vCPU ran on a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimulatedRun {
    /// The CPU.
    pub cpu: u32,
    /// The VM, by its position in the scenario.
    pub vm: u32,
    /// The vCPU within its VM.
    pub vcpu: u32,
    /// Start and end since the begin of the simulation, in nanoseconds.
    pub start_ns: u64,
    /// End, in nanoseconds.
    pub end_ns: u64,
}

/// Measures of one VM.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct VmOutcome {
    /// Completed operations.
    pub operations: u64,
    /// CPU time of its vCPUs, in nanoseconds.
    pub cpu_time_ns: u64,
    /// Time in which its vCPUs were runnable and did not run, in nanoseconds.
    pub ready_time_ns: u64,
    /// Time in which at least one of its vCPUs ran, in nanoseconds.
    pub active_ns: u64,
    /// Time in which all runnable vCPUs ran (or all CPUs ran them), in nanoseconds.
    pub co_run_ns: u64,
    /// Time from asking for a lock until it is held, of all vCPUs, in nanoseconds.
    pub lock_wait_ns: u64,
    /// Acquisitions of locks that had to wait.
    pub lock_waits: u64,
}

impl VmOutcome {
    /// Share of the VM's active time in which all its runnable vCPUs ran.
    pub fn co_run_fraction(&self) -> f64 {
        if self.active_ns == 0 { 0.0 } else { self.co_run_ns as f64 / self.active_ns as f64 }
    }
}

/// Measures of one simulation.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// Simulated time, in nanoseconds, without the warm-up.
    pub simulated_ns: u64,
    /// One entry for each VM, in the order of the scenario.
    pub vms: Vec<VmOutcome>,
    /// Switches between vCPUs.
    pub switches: u64,
    /// Exits because of spinning.
    pub spin_exits: u64,
    /// Directed yields that a sibling profited from.
    pub directed_yields: u64,
    /// Locks of two run queues that were taken for nothing.
    pub failed_yields: u64,
    /// Plain yields.
    pub plain_yields: u64,
    /// Time in which CPUs waited for or held locks of run queues for directed yields, in nanoseconds.
    pub double_lock_ns: u64,
    /// Migrations between run queues.
    pub migrations: u64,
    /// CPU time of all CPUs that was idle, in nanoseconds.
    pub idle_ns: u64,
    /// Events that the simulation processed.
    pub events: u64,
    /// The schedule, if it was asked for.
    pub schedule: Vec<SimulatedRun>,
}

impl Outcome {
    /// Operations of all VMs in a second.
    pub fn operations_per_second(&self) -> f64 {
        let operations: u64 = self.vms.iter().map(|vm| vm.operations).sum();
        operations as f64 * 1e9 / self.simulated_ns.max(1) as f64
    }

    /// Mean of the VMs' co-run fractions, weighted by active time.
    pub fn co_run_fraction(&self) -> f64 {
        let active: u64 = self.vms.iter().map(|vm| vm.active_ns).sum();
        let co_run: u64 = self.vms.iter().map(|vm| vm.co_run_ns).sum();
        if active == 0 { 0.0 } else { co_run as f64 / active as f64 }
    }

    /// Jain's index of the CPU time of the VMs of `scenario`, by vCPU and weight.
    pub fn fairness(&self, scenario: &Scenario) -> f64 {
        let share =
            |(vm, spec): (&VmOutcome, &VmSpec)| vm.cpu_time_ns as f64 / (f64::from(spec.vcpus) * spec.weight as f64);
        jain_index(&self.vms.iter().zip(&scenario.vms).map(share).collect::<Vec<_>>())
    }

    /// Mean time from asking for a contended lock until it is held, in nanoseconds.
    pub fn mean_lock_wait_ns(&self) -> f64 {
        let waits: u64 = self.vms.iter().map(|vm| vm.lock_waits).sum();
        let time: u64 = self.vms.iter().map(|vm| vm.lock_wait_ns).sum();
        if waits == 0 { 0.0 } else { time as f64 / waits as f64 }
    }

    /// The kept schedule of `duration_ns` nanoseconds, with times from zero on. It has runs only. The model has no
    /// threads; their numbers count all vCPUs from 1 on.
    pub fn to_schedule(&self, scenario: &Scenario, duration_ns: u64) -> CpuSchedule {
        let mut tasks: Vec<Task> = Vec::new();
        let mut first_tasks = Vec::new();
        for (vm, spec) in scenario.vms.iter().enumerate() {
            first_tasks.push(tasks.len());
            for vcpu in 0..spec.vcpus {
                let tid = tasks.len() as u32 + 1;
                let name = format!("{} {vcpu}", spec.name);
                tasks.push(Task { tid, process: None, name, vm: Some(vm), vcpu: Some(vcpu) });
            }
        }
        let mut runs: Vec<RunInterval> = self
            .schedule
            .iter()
            .map(|run| RunInterval {
                task: first_tasks[run.vm as usize] + run.vcpu as usize,
                cpu: run.cpu,
                from: run.start_ns,
                to: run.end_ns,
                end: RunEnd::Unknown,
            })
            .collect();
        runs.sort_by_key(|run| (run.from, run.cpu));
        CpuSchedule {
            end: duration_ns,
            cpus: (0..scenario.cpus).collect(),
            vms: scenario.vms.iter().map(|vm| ScheduledVm { name: vm.name.clone() }).collect(),
            tasks,
            runs,
            ..CpuSchedule::default()
        }
    }
}
