//! The results of the over-commit model in JSON.

use crate::decide::model::calibration::{self, FigureUse, PublishedValue, Residual};
use crate::decide::model::capacity::{CapacityCurve, CapacityPoint, UnsharedThroughput};
use crate::decide::model::costs::{ConstantOrigin, ModelConstant};
use crate::decide::model::{Kernel, Outcome, Scenario, SchedulingPolicy};
use schemars::JsonSchema;
use serde::Serialize;

/// What every result of the model says of itself.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelNote {
    /// Always `model`: no figure was measured on this host.
    pub kind: &'static str,
    /// The smallest ratio of the model to a published figure.
    pub least_ratio: f64,
    /// The largest ratio of the model to a published figure.
    pub greatest_ratio: f64,
}

impl ModelNote {
    /// The note for these residuals.
    pub fn new(residuals: &[Residual]) -> Self {
        let (least_ratio, greatest_ratio) = calibration::residual_range(residuals);
        Self { kind: "model", least_ratio, greatest_ratio }
    }
}

/// The result of `pagefold vcpu sim SCENARIO`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuSimReport {
    /// `pagefold.vcpu-sim/1`.
    pub schema: &'static str,
    /// What the figures are.
    pub model: ModelNote,
    /// The scenario's name or file.
    pub scenario: String,
    /// Its description.
    pub description: String,
    /// CPUs of the host.
    pub cpus: u32,
    /// VMs.
    pub vms: u32,
    /// vCPUs of all VMs.
    pub vcpus: u32,
    /// Simulated seconds of each policy, without the warm-up.
    pub seconds: f64,
    /// Seed of the random numbers.
    pub seed: u64,
    /// Operations in a second if sharing the CPUs cost nothing.
    pub ideal_operations_per_second: f64,
    /// The policies, in the order of the arguments.
    pub policies: Vec<PolicyReport>,
}

/// The result of one policy.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PolicyReport {
    /// `3.6` or `today`.
    pub kernel: &'static str,
    /// `plain`, `ple`, `spread`, `throttled` or `gang`.
    pub policy: &'static str,
    /// Operations in a second, of all VMs.
    pub operations_per_second: f64,
    /// That relative to the best policy of this report.
    pub of_best: f64,
    /// That relative to the ideal.
    pub of_ideal: f64,
    /// Share of the VMs' active time in which all their runnable vCPUs ran.
    pub co_run_fraction: f64,
    /// Jain's index of the VMs' CPU time by vCPU and weight.
    pub fairness: f64,
    /// Mean time from asking for a contended lock until it is held, in microseconds.
    pub lock_wait_us: f64,
    /// Switches between vCPUs in a second, on each CPU.
    pub switches_per_cpu_second: f64,
    /// Exits because of spinning, in a second, on each CPU.
    pub spin_exits_per_cpu_second: f64,
    /// Directed yields that let a sibling run, in a second, on each CPU.
    pub directed_yields_per_cpu_second: f64,
    /// Attempts that found the sibling running, in a second, on each CPU.
    pub failed_yields_per_cpu_second: f64,
    /// Plain yields in a second, on each CPU.
    pub plain_yields_per_cpu_second: f64,
    /// Share of the CPUs' time spent on the locks of two run queues.
    pub run_queue_lock_share: f64,
    /// Share of the CPUs' time that was idle.
    pub idle_share: f64,
    /// Events that were simulated.
    pub events: u64,
    /// The VMs.
    pub vms: Vec<SimulatedVmReport>,
}

/// One VM under a policy.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SimulatedVmReport {
    /// Its name.
    pub name: String,
    /// Operations in a second.
    pub operations_per_second: f64,
    /// CPUs that it used, on the mean.
    pub used_cpus: f64,
    /// vCPUs that were runnable and did not run, on the mean.
    pub waiting_vcpus: f64,
    /// Share of its active time in which all its runnable vCPUs ran.
    pub co_run_fraction: f64,
}

/// A scenario as it was named.
#[derive(Clone, Copy, Debug)]
pub struct NamedScenario<'a> {
    /// Its name or file.
    pub name: &'a str,
    /// Its description.
    pub description: &'a str,
    /// The scenario.
    pub scenario: &'a Scenario,
}

impl VcpuSimReport {
    /// The report of simulations of `seconds` each.
    pub fn new(
        named: NamedScenario<'_>,
        (seconds, seed): (f64, u64),
        alone: &UnsharedThroughput,
        outcomes: &[(Kernel, SchedulingPolicy, Outcome)],
        residuals: &[Residual],
    ) -> Self {
        let scenario = named.scenario;
        let ideal = alone.ideal_on(scenario.cpus);
        let best = outcomes.iter().map(|(_, _, outcome)| outcome.operations_per_second()).fold(0.0, f64::max);
        let report = |(kernel, policy, outcome): &(Kernel, SchedulingPolicy, Outcome)| {
            policy_report((*kernel, *policy), scenario, outcome, ideal, best)
        };
        Self {
            schema: "pagefold.vcpu-sim/1",
            model: ModelNote::new(residuals),
            scenario: named.name.to_owned(),
            description: named.description.to_owned(),
            cpus: scenario.cpus,
            vms: scenario.vms.len() as u32,
            vcpus: scenario.vcpu_count(),
            seconds,
            seed,
            ideal_operations_per_second: ideal,
            policies: outcomes.iter().map(report).collect(),
        }
    }
}

fn policy_report(
    (kernel, policy): (Kernel, SchedulingPolicy),
    scenario: &Scenario,
    outcome: &Outcome,
    ideal: f64,
    best: f64,
) -> PolicyReport {
    let seconds = outcome.simulated_ns as f64 / 1e9;
    let cpu_seconds = seconds * f64::from(scenario.cpus);
    let rate = outcome.operations_per_second();
    let vms = outcome.vms.iter().zip(&scenario.vms).map(|(vm, spec)| SimulatedVmReport {
        name: spec.name.clone(),
        operations_per_second: vm.operations as f64 / seconds,
        used_cpus: vm.cpu_time_ns as f64 / 1e9 / seconds,
        waiting_vcpus: vm.ready_time_ns as f64 / 1e9 / seconds,
        co_run_fraction: vm.co_run_fraction(),
    });
    PolicyReport {
        kernel: kernel.name(),
        policy: policy.name(),
        operations_per_second: rate,
        of_best: if best > 0.0 { rate / best } else { 0.0 },
        of_ideal: rate / ideal,
        co_run_fraction: outcome.co_run_fraction(),
        fairness: outcome.fairness(scenario),
        lock_wait_us: outcome.mean_lock_wait_ns() / 1e3,
        switches_per_cpu_second: outcome.switches as f64 / cpu_seconds,
        spin_exits_per_cpu_second: outcome.spin_exits as f64 / cpu_seconds,
        directed_yields_per_cpu_second: outcome.directed_yields as f64 / cpu_seconds,
        failed_yields_per_cpu_second: outcome.failed_yields as f64 / cpu_seconds,
        plain_yields_per_cpu_second: outcome.plain_yields as f64 / cpu_seconds,
        run_queue_lock_share: outcome.double_lock_ns as f64 / 1e9 / cpu_seconds,
        idle_share: outcome.idle_ns as f64 / 1e9 / cpu_seconds,
        events: outcome.events,
        vms: vms.collect(),
    }
}

/// The result of `pagefold vcpu sim capacity`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuCapacityReport {
    /// `pagefold.vcpu-capacity/1`.
    pub schema: &'static str,
    /// What the figures are.
    pub model: ModelNote,
    /// The scenario's name or file, or the host whose VMs were read.
    pub source: String,
    /// CPUs of the host.
    pub cpus: u32,
    /// vCPUs of one set of VMs.
    pub vcpus: u32,
    /// CPUs that one set keeps busy if it has a CPU for each vCPU.
    pub busy_cpus: f64,
    /// The modeled kernel.
    pub kernel: &'static str,
    /// Simulated seconds of each point.
    pub seconds: f64,
    /// Seed of the random numbers.
    pub seed: u64,
    /// The part of the ideal that may be lost up to the knee.
    pub knee_loss: f64,
    /// The VMs of one set.
    pub vms: Vec<CapacityVmReport>,
    /// The policies.
    pub curves: Vec<CapacityCurveReport>,
}

/// A VM of the set that is multiplied.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CapacityVmReport {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u32,
    /// The share of the time in which its vCPUs ran, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_share: Option<f64>,
}

/// The sweep of one policy.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct CapacityCurveReport {
    /// `plain`, `ple`, `spread`, `throttled` or `gang`.
    pub policy: &'static str,
    /// Most copies before which no number of copies loses more than `knee_loss`; absent if one copy does already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub knee_copies: Option<u32>,
    /// The points by number of copies.
    pub points: Vec<CapacityPointReport>,
}

/// One number of copies.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct CapacityPointReport {
    /// How often the set of VMs is there.
    pub copies: u32,
    /// vCPUs for each CPU.
    pub overcommit: f64,
    /// Total throughput relative to one set with a CPU for each vCPU.
    pub total: f64,
    /// Throughput of each set, in the same unit.
    pub per_copy: f64,
    /// Total throughput relative to sharing the CPUs without any cost.
    pub of_ideal: f64,
    /// Share of the VMs' active time in which all their runnable vCPUs ran.
    pub co_run_fraction: f64,
    /// Jain's index of the VMs' CPU time, by vCPU and weight.
    pub fairness: f64,
}

impl From<&CapacityPoint> for CapacityPointReport {
    fn from(point: &CapacityPoint) -> Self {
        let &CapacityPoint { copies, overcommit, total, per_copy, of_ideal, co_run_fraction, fairness } = point;
        Self { copies, overcommit, total, per_copy, of_ideal, co_run_fraction, fairness }
    }
}

impl From<&CapacityCurve> for CapacityCurveReport {
    fn from(curve: &CapacityCurve) -> Self {
        Self {
            policy: curve.policy.name(),
            knee_copies: curve.knee().map(|point| point.copies),
            points: curve.points.iter().map(CapacityPointReport::from).collect(),
        }
    }
}

/// The result of `pagefold vcpu sim residuals`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuResidualsReport {
    /// `pagefold.vcpu-residuals/1`.
    pub schema: &'static str,
    /// The bound of the residuals, relative to the published figure.
    pub tolerance: f64,
    /// The figures.
    pub figures: Vec<ResidualReport>,
    /// The constants of the model.
    pub constants: Vec<ConstantReport>,
}

/// A published figure and the model's.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ResidualReport {
    /// What was measured.
    pub figure: &'static str,
    /// Its unit, or what it is relative to.
    pub unit: &'static str,
    /// The published value.
    pub published: f64,
    /// Whether the publication says only that the figure is good: `published` is then what counts as good.
    pub is_lower_bound: bool,
    /// The model's value.
    pub modeled: f64,
    /// The model's value relative to the published one, minus 1.
    pub relative_error: f64,
    /// Whether constants were fitted to the figure.
    pub fitted: bool,
    /// Whether the model is within the tolerance.
    pub met: bool,
}

/// A constant of the model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ConstantReport {
    /// What it is, with its unit.
    pub quantity: &'static str,
    /// Its value.
    pub value: f64,
    /// `fitted`, `derived` or `assumed`.
    pub origin: &'static str,
    /// From what.
    pub basis: &'static str,
}

impl VcpuResidualsReport {
    /// The report.
    pub fn new(residuals: &[Residual], constants: &[ModelConstant]) -> Self {
        let figure = |residual: &Residual| {
            let (published, is_lower_bound) = match residual.published {
                PublishedValue::Value(value) => (value, false),
                PublishedValue::AtLeast(value) => (value, true),
            };
            ResidualReport {
                figure: residual.figure,
                unit: residual.unit,
                published,
                is_lower_bound,
                modeled: residual.modeled,
                relative_error: residual.relative_error(),
                fitted: residual.figure_use == FigureUse::Fitted,
                met: residual.is_met(),
            }
        };
        let constant = |constant: &ModelConstant| ConstantReport {
            quantity: constant.quantity,
            value: constant.value,
            origin: match constant.origin {
                ConstantOrigin::Fitted => "fitted",
                ConstantOrigin::Derived => "derived",
                ConstantOrigin::Assumed => "assumed",
            },
            basis: constant.basis,
        };
        Self {
            schema: "pagefold.vcpu-residuals/1",
            tolerance: calibration::FIT_TOLERANCE,
            figures: residuals.iter().map(figure).collect(),
            constants: constants.iter().map(constant).collect(),
        }
    }
}
