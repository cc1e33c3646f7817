//! Scenarios of the over-commit model: TOML files, and those that ship with the program.

use crate::decide::model::{HostCosts, LockKind, Scenario, VmSpec, Workload};
use serde::Deserialize;
use thiserror::Error;

/// Most CPUs of a scenario.
pub const MAX_CPUS: u32 = 1_024;
/// Most vCPUs of a scenario.
pub const MAX_VCPUS: u32 = 4_096;

/// The scenarios that ship with the program: name and text.
const SHIPPED: [(&str, &str); 8] = [
    ("dbench-8x20", include_str!("../scenarios/dbench-8x20.toml")),
    ("dbench-16x10", include_str!("../scenarios/dbench-16x10.toml")),
    ("boot-80", include_str!("../scenarios/boot-80.toml")),
    ("ebizzy-2x80", include_str!("../scenarios/ebizzy-2x80.toml")),
    ("shootdown-4x16", include_str!("../scenarios/shootdown-4x16.toml")),
    ("para-virtual-locks", include_str!("../scenarios/para-virtual-locks.toml")),
    ("mixed", include_str!("../scenarios/mixed.toml")),
    ("compute", include_str!("../scenarios/compute.toml")),
];

/// Why there is no scenario.
#[derive(Debug, Error)]
pub enum ScenarioError {
    /// The text is not a scenario.
    #[error("not a scenario: {0}")]
    Syntax(#[from] toml::de::Error),
    /// A value is out of range.
    #[error("{field} is {value}: give {expected}")]
    Range {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is permitted.
        expected: String,
    },
}

/// A scenario as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ScenarioText {
    description: String,
    cpus: u32,
    vm: Vec<VmText>,
    #[serde(default)]
    costs: CostsText,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct VmText {
    name: String,
    #[serde(default = "one")]
    count: u32,
    vcpus: u32,
    #[serde(default = "default_weight")]
    weight: u64,
    workload: WorkloadText,
}

fn one() -> u32 {
    1
}

fn default_weight() -> u64 {
    1024
}

/// A workload as it is written: a preset, or a preset with changes.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum WorkloadText {
    Preset(WorkloadPreset),
    Changed(WorkloadChanges),
}

/// A workload with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WorkloadPreset {
    /// It computes.
    Compute,
    /// It contends for locks of its kernel, as dbench in memory does.
    KernelLocks,
    /// It changes mappings: each of its operations interrupts all siblings with some probability.
    Shootdown,
    /// It serves requests: it halts between them.
    Server,
}

impl WorkloadPreset {
    /// All presets with their names.
    pub const ALL: [(&'static str, Self); 4] = [
        ("compute", Self::Compute),
        ("kernel-locks", Self::KernelLocks),
        ("shootdown", Self::Shootdown),
        ("server", Self::Server),
    ];

    /// The workload.
    pub fn workload(self) -> Workload {
        match self {
            Self::Compute => Workload::compute(),
            Self::KernelLocks => Workload::kernel_locks(),
            Self::Shootdown => Workload {
                think_ns: 50_000,
                critical_section_ns: 2_000,
                locks: 1,
                shootdown_probability: 0.1,
                ..Workload::kernel_locks()
            },
            Self::Server => {
                Workload { think_ns: 150_000, critical_section_ns: 2_000, halt_ns: 150_000, ..Workload::kernel_locks() }
            }
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkloadChanges {
    preset: WorkloadPreset,
    think_ns: Option<u64>,
    think_in_kernel: Option<bool>,
    critical_section_ns: Option<u64>,
    locks: Option<u32>,
    lock: Option<LockText>,
    shootdown_probability: Option<f64>,
    halt_ns: Option<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum LockText {
    Ticket,
    Queued,
    TestAndSet,
    ParaVirtual,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CostsText {
    exit_ns: Option<u64>,
    spin_window_ns: Option<u64>,
    switch_ns: Option<u64>,
    double_lock_ns: Option<u64>,
    double_lock_per_waiter_ns: Option<u64>,
    tick_ns: Option<u64>,
    gang_slice_ns: Option<u64>,
}

/// Longest time that a scenario may give, in nanoseconds: a second.
const MAX_TIME_NS: u64 = 1_000_000_000;

/// A scenario with its description.
#[derive(Debug, Clone, PartialEq)]
pub struct DescribedScenario {
    /// What it is, in a sentence.
    pub description: String,
    /// The scenario.
    pub scenario: Scenario,
}

/// Changes of a scenario from the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScenarioChanges {
    /// CPUs of the host.
    pub cpus: Option<u32>,
    /// VMs of the first kind; the other kinds are left out.
    pub vms: Option<u32>,
    /// vCPUs of each VM.
    pub vcpus: Option<u32>,
}

/// Names and descriptions of the shipped scenarios.
///
/// # Errors
/// None for the shipped ones, which a test parses.
pub fn shipped_scenarios() -> Result<Vec<(&'static str, DescribedScenario)>, ScenarioError> {
    let parse = |&(name, text)| Ok((name, parse_scenario(text, ScenarioChanges::default())?));
    SHIPPED.iter().map(parse).collect()
}

/// The text of the shipped scenario of this name.
pub fn shipped_text(name: &str) -> Option<&'static str> {
    SHIPPED.iter().find(|(shipped, _)| *shipped == name).map(|(_, text)| *text)
}

/// Parse a scenario and change it.
///
/// # Errors
/// Unknown or missing fields, and values out of range.
pub fn parse_scenario(text: &str, changes: ScenarioChanges) -> Result<DescribedScenario, ScenarioError> {
    let mut written: ScenarioText = toml::from_str(text)?;
    written.cpus = changes.cpus.unwrap_or(written.cpus);
    if let Some(vms) = changes.vms {
        written.vm.truncate(1);
        written.vm.iter_mut().for_each(|vm| vm.count = vms);
    }
    if let Some(vcpus) = changes.vcpus {
        written.vm.iter_mut().for_each(|vm| vm.vcpus = vcpus);
    }
    check_range("cpus", u64::from(written.cpus), 1, u64::from(MAX_CPUS))?;
    let mut vms = Vec::new();
    let mut vcpu_count: u64 = 0;
    for vm in &written.vm {
        check_range(&format!("count of {}", vm.name), u64::from(vm.count), 1, u64::from(MAX_VCPUS))?;
        check_range(&format!("vcpus of {}", vm.name), u64::from(vm.vcpus), 1, u64::from(MAX_VCPUS))?;
        check_range(&format!("weight of {}", vm.name), vm.weight, 1, 1 << 20)?;
        vcpu_count += u64::from(vm.count) * u64::from(vm.vcpus);
        check_range("the number of all vCPUs", vcpu_count, 1, u64::from(MAX_VCPUS))?;
        let workload = workload(&vm.name, &vm.workload)?;
        for number in 1..=vm.count {
            let name = if vm.count == 1 { vm.name.clone() } else { format!("{}{number}", vm.name) };
            vms.push(VmSpec { name, vcpus: vm.vcpus, weight: vm.weight, workload });
        }
    }
    check_range("the number of all vCPUs", vcpu_count, 1, u64::from(MAX_VCPUS))?;
    let scenario = Scenario { cpus: written.cpus, vms, costs: costs(&written.costs)? };
    Ok(DescribedScenario { description: written.description, scenario })
}

fn check_range(field: &str, value: u64, least: u64, most: u64) -> Result<(), ScenarioError> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    let expected = format!("{least} to {most}");
    Err(ScenarioError::Range { field: field.to_owned(), value: value.to_string(), expected })
}

fn workload(vm: &str, text: &WorkloadText) -> Result<Workload, ScenarioError> {
    let changes = match text {
        WorkloadText::Preset(preset) => return Ok(preset.workload()),
        WorkloadText::Changed(changes) => changes,
    };
    let mut workload = changes.preset.workload();
    let time = |field: &str, value: Option<u64>, least: u64, target: &mut u64| {
        if let Some(value) = value {
            check_range(&format!("{field} of {vm}"), value, least, MAX_TIME_NS)?;
            *target = value;
        }
        Ok::<(), ScenarioError>(())
    };
    // An operation takes time, so that the simulation ends.
    time("think_ns", changes.think_ns, 100, &mut workload.think_ns)?;
    time("critical_section_ns", changes.critical_section_ns, 0, &mut workload.critical_section_ns)?;
    time("halt_ns", changes.halt_ns, 0, &mut workload.halt_ns)?;
    workload.think_in_kernel = changes.think_in_kernel.unwrap_or(workload.think_in_kernel);
    if let Some(locks) = changes.locks {
        check_range(&format!("locks of {vm}"), u64::from(locks), 0, 65_536)?;
        workload.locks = locks;
    }
    if let Some(kind) = changes.lock {
        workload.lock_kind = match kind {
            LockText::Ticket | LockText::Queued => LockKind::Fifo,
            LockText::TestAndSet => LockKind::TestAndSet,
            LockText::ParaVirtual => LockKind::ParaVirtual,
        };
    }
    if let Some(probability) = changes.shootdown_probability {
        if !(0.0..=1.0).contains(&probability) {
            return Err(ScenarioError::Range {
                field: format!("shootdown_probability of {vm}"),
                value: probability.to_string(),
                expected: "0 to 1".to_owned(),
            });
        }
        workload.shootdown_probability = probability;
    }
    Ok(workload)
}

fn costs(text: &CostsText) -> Result<HostCosts, ScenarioError> {
    let mut costs = HostCosts::default();
    let fields = [
        ("exit_ns", text.exit_ns, 1, &mut costs.exit_ns),
        ("spin_window_ns", text.spin_window_ns, 1, &mut costs.spin_window_ns),
        ("switch_ns", text.switch_ns, 0, &mut costs.switch_ns),
        ("double_lock_ns", text.double_lock_ns, 1, &mut costs.double_lock_ns),
        ("double_lock_per_waiter_ns", text.double_lock_per_waiter_ns, 0, &mut costs.double_lock_per_waiter_ns),
        ("tick_ns", text.tick_ns, 100_000, &mut costs.tick_ns),
        ("gang_slice_ns", text.gang_slice_ns, 500_000, &mut costs.gang_slice_ns),
    ];
    for (field, value, least, target) in fields {
        if let Some(value) = value {
            check_range(field, value, least, MAX_TIME_NS)?;
            *target = value;
        }
    }
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_scenarios_are_valid() {
        let scenarios = shipped_scenarios().unwrap();
        assert_eq!(scenarios.len(), SHIPPED.len());
        // The names differ, the set-up does not.
        let published = crate::decide::model::calibration::published_host(8, 20);
        let shape = |scenario: &Scenario| -> Vec<_> { scenario.vms.iter().map(|vm| (vm.vcpus, vm.workload)).collect() };
        assert_eq!(shape(&scenarios[0].1.scenario), shape(&published));
        assert_eq!(scenarios[0].1.scenario.cpus, published.cpus);
    }

    #[test]
    fn changes_replace_values_of_the_file() {
        let changes = ScenarioChanges { cpus: Some(4), vms: Some(3), vcpus: Some(2) };
        let scenario = parse_scenario(shipped_text("mixed").unwrap(), changes).unwrap().scenario;
        assert_eq!((scenario.cpus, scenario.vms.len(), scenario.vcpu_count()), (4, 3, 6));
    }

    #[test]
    fn values_out_of_range_are_named() {
        let text = |vm: &str| format!("description = ''\ncpus = 4\n[[vm]]\nname = 'a'\n{vm}");
        let error = |vm: &str| parse_scenario(&text(vm), ScenarioChanges::default()).unwrap_err().to_string();
        assert_eq!(error("vcpus = 0\nworkload = 'compute'"), "vcpus of a is 0: give 1 to 4096");
        assert_eq!(
            error("vcpus = 1\nworkload = { preset = 'compute', think_ns = 0 }"),
            "think_ns of a is 0: give 100 to 1000000000"
        );
        assert_eq!(
            error("vcpus = 1\nworkload = { preset = 'compute', shootdown_probability = 2 }"),
            "shootdown_probability of a is 2: give 0 to 1"
        );
        assert!(error("vcpus = 1\nworkload = 'unheard-of'").starts_with("not a scenario: "));
        assert_eq!(
            error("vcpus = 4096\ncount = 2\nworkload = 'compute'"),
            "the number of all vCPUs is 8192: give 1 to 4096"
        );
    }
}
