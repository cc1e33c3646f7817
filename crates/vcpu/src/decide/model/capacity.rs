//! How far a host can be over-committed with VMs like those it has: a sweep over their number.

use super::{HostCosts, Kernel, Scenario, SchedulingPolicy, SimulationSettings, VmSpec, Workload, simulate};

/// Largest loss against the ideal at which a number of VMs is still within the knee.
pub const KNEE_LOSS: f64 = 0.2;

/// The throughput with a number of VMs under a policy.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CapacityPoint {
    /// How often the VMs of the host are there.
    pub copies: u32,
    /// vCPUs for each CPU.
    pub overcommit: f64,
    /// Operations of all VMs in a second, relative to those of one set of VMs that has the host alone.
    pub total: f64,
    /// The part of each set, in the same unit.
    pub per_copy: f64,
    /// Total throughput relative to the ideal: CPU time shared without any loss.
    pub of_ideal: f64,
    /// The co-run fraction.
    pub co_run_fraction: f64,
    /// Jain's index of the VMs' CPU time, by vCPU and weight.
    pub fairness: f64,
}

/// The sweep of one policy.
#[derive(Debug, Clone, PartialEq)]
pub struct CapacityCurve {
    /// The policy.
    pub policy: SchedulingPolicy,
    /// One point for each number of copies, ascending.
    pub points: Vec<CapacityPoint>,
}

impl CapacityCurve {
    /// The knee: the last point before which, at each, at most [`KNEE_LOSS`] of the ideal throughput is lost.
    pub fn knee(&self) -> Option<&CapacityPoint> {
        self.points.iter().take_while(|point| point.of_ideal >= 1.0 - KNEE_LOSS).last()
    }

    /// The point of the largest total throughput.
    pub fn peak(&self) -> Option<&CapacityPoint> {
        self.points.iter().max_by(|a, b| a.total.total_cmp(&b.total))
    }
}

/// What is swept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CapacitySettings {
    /// The modeled kernel.
    pub kernel: Kernel,
    /// Largest number of copies.
    pub max_copies: u32,
    /// Simulated time of each point, in nanoseconds.
    pub duration_ns: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// `copies` times the VMs of a scenario.
pub fn multiply(scenario: &Scenario, copies: u32) -> Scenario {
    let vms = (0..copies).flat_map(|copy| {
        scenario.vms.iter().map(move |vm| {
            let mut vm = vm.clone();
            if copy > 0 {
                vm.name = format!("{}-{}", vm.name, copy + 1);
            }
            vm
        })
    });
    Scenario { vms: vms.collect(), ..scenario.clone() }
}

/// What the VMs do with a CPU for each vCPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnsharedThroughput {
    /// Operations of all VMs in a second.
    pub operations_per_second: f64,
    /// CPUs that they keep busy.
    pub busy_cpus: f64,
}

impl UnsharedThroughput {
    /// Operations in a second on `cpus` CPUs if sharing them cost nothing.
    pub fn ideal_on(&self, cpus: u32) -> f64 {
        self.operations_per_second * (f64::from(cpus) / self.busy_cpus).min(1.0)
    }
}

/// Simulate the VMs of a scenario with a CPU for each vCPU.
pub fn measure_alone(scenario: &Scenario, settings: &CapacitySettings) -> UnsharedThroughput {
    let roomy = Scenario { cpus: scenario.vcpu_count(), ..scenario.clone() };
    let run = SimulationSettings::new(settings.kernel, SchedulingPolicy::Plain, settings.duration_ns, settings.seed);
    let outcome = simulate(&roomy, &run);
    let cpu_time: u64 = outcome.vms.iter().map(|vm| vm.cpu_time_ns).sum();
    UnsharedThroughput {
        operations_per_second: outcome.operations_per_second().max(f64::MIN_POSITIVE),
        busy_cpus: (cpu_time as f64 / outcome.simulated_ns.max(1) as f64).max(f64::MIN_POSITIVE),
    }
}

/// A VM of a host, as it is measured.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredVm {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u32,
    /// The share of the time in which its vCPUs ran, on the mean.
    pub run_share: f64,
}

/// Shares below this count as this: a VM that sleeps still wakes for its timers.
const MIN_RUN_SHARE: f64 = 0.005;

/// Operations of a few microseconds between two halts: guests halt about every millisecond.
const OPERATIONS_PER_HALT: u32 = 50;

/// The scenario of a host whose VMs do `workload`, and halt in between as often as measured.
pub fn host_scenario(cpus: u32, vms: &[MeasuredVm], workload: Workload) -> Scenario {
    let vms = vms.iter().map(|vm| {
        let share = vm.run_share.clamp(MIN_RUN_SHARE, 1.0);
        let busy = (workload.think_ns + workload.critical_section_ns) as f64;
        let halt_ns = busy * f64::from(OPERATIONS_PER_HALT) * (1.0 - share) / share;
        let halts = Workload { halt_ns: halt_ns.round() as u64, operations_per_halt: OPERATIONS_PER_HALT, ..workload };
        VmSpec::new(&vm.name, vm.vcpus, halts)
    });
    Scenario { cpus, vms: vms.collect(), costs: HostCosts::default() }
}

/// Sweep the number of copies under a policy. `progress` is told each finished point.
pub fn sweep(
    scenario: &Scenario,
    policy: SchedulingPolicy,
    settings: &CapacitySettings,
    mut progress: impl FnMut(u32),
) -> CapacityCurve {
    let run = |scenario: &Scenario, policy| {
        let run = SimulationSettings::new(settings.kernel, policy, settings.duration_ns, settings.seed);
        simulate(scenario, &run)
    };
    let alone = measure_alone(scenario, settings);
    let points = (1..=settings.max_copies).map(|copies| {
        let copied = multiply(scenario, copies);
        let outcome = run(&copied, policy);
        let total = outcome.operations_per_second() / alone.operations_per_second;
        let ideal = f64::from(copies).min(f64::from(scenario.cpus) / alone.busy_cpus);
        progress(copies);
        CapacityPoint {
            copies,
            overcommit: f64::from(copies * scenario.vcpu_count()) / f64::from(scenario.cpus),
            total,
            per_copy: total / f64::from(copies),
            of_ideal: total / ideal,
            co_run_fraction: outcome.co_run_fraction(),
            fairness: outcome.fairness(&copied),
        }
    });
    CapacityCurve { policy, points: points.collect() }
}
