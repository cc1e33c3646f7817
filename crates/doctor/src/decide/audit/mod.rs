//! The rules about settings of the host and of its virtual machines.
//!
//! Each rule judges the values that are in force, by facts that were read before. A setting that this kernel, this CPU
//! or this monitor does not have is `n/a`; a value that could not be read is `unknown`. No rule reports `ok` for what it
//! has not read. A rule that finds a better value also has the change as data, for `pagefold tune`.
//!
//! The rules are grouped by topic: KVM, CPUs, memory, scheduling, devices, the definition and threads of each
//! virtual machine, and what the agent in a guest tells.

mod cpu;
mod devices;
pub mod facts;
mod guest;
mod kvm;
mod memory;
mod scheduling;
#[cfg(test)]
pub(in crate::decide) mod tests;
pub(crate) mod tuned;
mod vm;

use super::change::SettingChange;
use super::{Finding, HostFacts, MissingReading, RuleInfo, RuleResult, RuleSummary, Scope, require};
use facts::{GuestFacts, SettingFacts, VmFacts};
use pagefold_base::reading::Absent;

/// The groups of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// KSM.
    Ksm,
    /// Parameters of the KVM modules.
    Kvm,
    /// Clock, frequency, idle states and threads of CPUs.
    Cpu,
    /// Huge pages and NUMA.
    Memory,
    /// The scheduler, isolated CPUs and interrupts.
    Scheduling,
    /// Disks and network devices of the host.
    Devices,
    /// The definition and threads of each virtual machine.
    Vm,
    /// What guests tell of themselves.
    Guest,
}

impl Topic {
    /// All topics.
    pub const ALL: [Self; 8] =
        [Self::Ksm, Self::Kvm, Self::Cpu, Self::Memory, Self::Scheduling, Self::Devices, Self::Vm, Self::Guest];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ksm => "ksm",
            Self::Kvm => "kvm",
            Self::Cpu => "cpu",
            Self::Memory => "memory",
            Self::Scheduling => "scheduling",
            Self::Devices => "devices",
            Self::Vm => "vm",
            Self::Guest => "guest",
        }
    }
}

/// What a rule about settings judges.
enum Judge {
    /// The host.
    Host(fn(&'static RuleInfo, &HostFacts) -> RuleResult),
    /// Each virtual machine.
    Vm(fn(&'static RuleInfo, &VmFacts, &HostFacts) -> RuleResult),
    /// Each virtual machine and each domain of libvirt that does not run: the rule reads the definition only.
    Definition(fn(&'static RuleInfo, &VmFacts, &HostFacts) -> RuleResult),
    /// The guest in each virtual machine whose agent was asked.
    Guest(fn(&'static RuleInfo, &VmFacts, &GuestFacts, &HostFacts) -> RuleResult),
}

/// A rule about settings.
struct SettingRule {
    rule: RuleInfo,
    judge: Judge,
}

static GROUPS: [(Topic, &[SettingRule]); 7] = [
    (Topic::Kvm, kvm::RULES),
    (Topic::Cpu, cpu::RULES),
    (Topic::Memory, memory::RULES),
    (Topic::Scheduling, scheduling::RULES),
    (Topic::Devices, devices::RULES),
    (Topic::Vm, vm::RULES),
    (Topic::Guest, guest::RULES),
];

/// All rules about settings, by topic.
pub fn rule_summaries() -> Vec<RuleSummary> {
    GROUPS.iter().flat_map(|(topic, rules)| rules.iter().map(|rule| rule.rule.summary(*topic))).collect()
}

/// All rules about settings.
#[cfg(test)]
pub(super) fn rules() -> impl Iterator<Item = &'static RuleInfo> {
    GROUPS.iter().flat_map(|(_, rules)| rules.iter().map(|rule| &rule.rule))
}

/// The topic of a rule; rules of no other topic are about KSM.
pub fn topic_of_rule(id: &str) -> Topic {
    let group = GROUPS.iter().find(|(_, rules)| rules.iter().any(|rule| rule.rule.id == id));
    group.map_or(Topic::Ksm, |(topic, _)| *topic)
}

/// Judges the settings of the host and of each virtual machine.
pub(super) fn examine(facts: &HostFacts) -> Vec<Finding> {
    let rules = || GROUPS.iter().flat_map(|(_, rules)| rules.iter());
    let mut findings = Vec::new();
    for rule in rules() {
        match rule.judge {
            Judge::Host(judge) => findings.push(rule.complete(judge_host(rule, judge, facts), Scope::Host)),
            Judge::Vm(judge) => findings.extend(facts.settings.vms.iter().map(|vm| judge_vm(rule, judge, vm, facts))),
            Judge::Definition(judge) => {
                findings.extend(facts.settings.vms.iter().map(|vm| judge_vm(rule, judge, vm, facts)));
                let domains = facts.settings.idle_domains.iter().enumerate();
                findings.extend(domains.map(|(position, domain)| {
                    let mut finding = rule.complete(judge(&rule.rule, domain, facts), Scope::IdleDomain(position));
                    finding.source = definition_sources(&finding.source, &domain.name);
                    // No process stands for it in a plan.
                    finding.changes.clear();
                    finding
                }));
            }
            Judge::Guest(judge) => findings.extend(facts.settings.vms.iter().filter_map(|vm| {
                let result = guest::judge(&rule.rule, judge, vm, vm.guest.as_ref()?, facts);
                let mut finding = rule.complete(result, Scope::Guest(vm.process));
                finding.source = finding.source.replace("PID", &vm.process.pid.to_string());
                Some(finding)
            })),
        }
    }
    findings
}

fn judge_vm(
    rule: &'static SettingRule,
    judge: fn(&'static RuleInfo, &VmFacts, &HostFacts) -> RuleResult,
    vm: &VmFacts,
    facts: &HostFacts,
) -> Finding {
    let mut finding = rule.complete(judge(&rule.rule, vm, facts), Scope::Process(vm.process));
    finding.source = finding.source.replace("PID", &vm.process.pid.to_string());
    finding
}

/// The sources of a finding about a domain that does not run: its definition, and files of the host.
fn definition_sources(sources: &str, name: &str) -> String {
    let definition = format!("/etc/libvirt/qemu/{}.xml", name.escape_debug());
    let sources = sources.split(", ").map(|source| if source == vm::COMMAND_LINE { &definition } else { source });
    let is_of_process = |source: &&str| source.contains("/PID/") || source.starts_with("monitor:");
    sources.filter(|source| !is_of_process(source)).collect::<Vec<_>>().join(", ")
}

/// Without the list of modules, which each Linux has, no setting of the host was read at all.
fn judge_host(
    rule: &'static SettingRule,
    judge: fn(&'static RuleInfo, &HostFacts) -> RuleResult,
    facts: &HostFacts,
) -> RuleResult {
    match facts.settings.names("sys/module") {
        Err(Absent::NotOnThisKernel) => {
            Ok(rule.rule.not_applicable("the settings of the host were not recorded", "not recorded"))
        }
        _ => judge(&rule.rule, facts),
    }
}

impl SettingRule {
    fn complete(&'static self, result: RuleResult, scope: Scope) -> Finding {
        let mut finding = result.unwrap_or_else(|missing| self.rule.unknown(&missing, "pagefold doctor"));
        finding.scope = scope;
        finding
    }
}

/// The change of a file, with the command that does the same and the command that verifies it.
fn with_write(finding: Finding, path: &str, value: &str) -> Finding {
    finding
        .remedy([format!("echo {value} > /{path}")])
        .verify(format!("grep -qw -- {value} /{path}"))
        .change(SettingChange::Write { path: path.to_owned(), value: value.to_owned() })
}

/// The change of a parameter of the kernel command line.
fn with_boot_parameter(finding: Finding, remove: Option<&str>, add: Option<&str>) -> Finding {
    let mut lines = Vec::new();
    lines.extend(remove.map(|parameter| format!("# remove {parameter} from the kernel command line, then reboot")));
    lines.extend(add.map(|parameter| format!("# add {parameter} to the kernel command line, then reboot")));
    finding
        .remedy(lines)
        .change(SettingChange::BootParameter { remove: remove.map(str::to_owned), add: add.map(str::to_owned) })
}

/// The change of a parameter of a module: live if its file can be written, else by loading the module again.
fn with_parameter(finding: Finding, settings: &SettingFacts, module: &str, parameter: &str, value: &str) -> Finding {
    let path = format!("sys/module/{module}/parameters/{parameter}");
    if settings.is_writable(&path) {
        return with_write(finding, &path, value);
    }
    finding
        .remedy([
            format!("echo 'options {module} {parameter}={value}' >> /etc/modprobe.d/zz-pagefold.conf"),
            "# stop all virtual machines first: a module in use cannot be unloaded".to_owned(),
            format!("modprobe -r {module} && modprobe {module}"),
        ])
        .verify(format!("grep -qw {} /{path}", shown_value(value)))
        .change(SettingChange::ModuleParameter {
            module: module.to_owned(),
            parameter: parameter.to_owned(),
            value: value.to_owned(),
        })
}

/// How the kernel shows a truth value (kernel/params.c, `param_get_bool`).
fn shown_value(value: &str) -> &str {
    match value {
        "1" => "-e 1 -e Y",
        "0" => "-e 0 -e N",
        value => value,
    }
}

/// Whether the first CPU of `/proc/cpuinfo` has a feature, among its flags or those of VMX.
fn has_cpu_flag(settings: &SettingFacts, flag: &str) -> Result<bool, MissingReading> {
    let text = settings.find_text("proc/cpuinfo")?.unwrap_or_default();
    Ok(text.lines().any(|line| {
        line.split_once(':').is_some_and(|(name, flags)| {
            matches!(name.trim(), "flags" | "vmx flags" | "Features")
                && flags.split_whitespace().any(|known| known == flag)
        })
    }))
}

/// Whether the host is a virtual machine itself: a hypervisor controls its clock and power then.
fn is_virtual(settings: &SettingFacts) -> Result<bool, MissingReading> {
    has_cpu_flag(settings, "hypervisor")
}

/// The CPUs that are online. Ascending.
fn online_cpus(settings: &SettingFacts) -> Result<pagefold_base::IdSet, MissingReading> {
    let path = "sys/devices/system/cpu/online";
    let text = settings.find_text(path)?.ok_or_else(|| facts::malformed(path, "absent"))?;
    text.parse().map_err(|_| facts::malformed(path, text))
}

/// The command lines of all processes, by which virtual machines are known. Without them there may be more machines.
fn require_command_lines(facts: &HostFacts) -> Result<(), MissingReading> {
    let mut lines = facts.processes.iter().map(|process| &process.process.arguments);
    match lines.find(|arguments| matches!(arguments, Err(absent) if *absent != Absent::Vanished)) {
        Some(unreadable) => require("the command lines of all processes", unreadable).map(drop),
        None => Ok(()),
    }
}

/// A finding that a further machine may change, if all machines are known.
fn if_machines_are_known(finding: Finding, facts: &HostFacts) -> RuleResult {
    require_command_lines(facts)?;
    Ok(finding)
}

/// The number of virtual CPUs of all machines.
fn total_vcpus(settings: &SettingFacts) -> Result<u64, MissingReading> {
    settings.vms.iter().try_fold(0u64, |sum, vm| Ok(sum.saturating_add(vm.vcpu_count()?)))
}

/// Whether there are more virtual CPUs than CPUs. A machine that is not known may have some, too.
fn is_overcommitted(facts: &HostFacts) -> Result<bool, MissingReading> {
    let settings = &facts.settings;
    if total_vcpus(settings)? > online_cpus(settings)?.iter().count() as u64 {
        return Ok(true);
    }
    require_command_lines(facts)?;
    Ok(false)
}
