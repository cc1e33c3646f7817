//! The doctor's findings in JSON.

use crate::decide::audit::{Topic, topic_of_rule};
use crate::decide::change::{ApplyMethod, SettingChange, SettingDetails, VmOption, node_list};
use crate::decide::{Finding, HostFacts, ProcessFacts, Scope, Verdict, examine_host, examine_process};
use pagefold_base::units::ProcessId;
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// The result of `pagefold doctor`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DoctorReport {
    /// `pagefold.doctor/1`.
    pub schema: &'static str,
    /// The examined host: `this host` or a recording.
    pub host: String,
    /// The worst verdict of all findings.
    pub verdict: VerdictName,
    /// Number of findings with each verdict.
    pub counts: VerdictCounts,
    /// The requested processes. If empty, the findings are about the host.
    pub processes: Vec<ProcessInfo>,
    /// The findings, worst first.
    pub findings: Vec<FindingReport>,
    /// Processes whose memory could not be read; pid 0 stands for processes that are not listed. Findings that need
    /// them are `unknown`.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// Verdict of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum VerdictName {
    /// There is nothing that the rule could judge.
    NotApplicable,
    /// No problem found.
    Ok,
    /// A required reading is missing.
    Unknown,
    /// The operator should decide: it has a cost or a risk, or does not work as probably intended.
    Warn,
    /// It defeats merging that is asked for, or harms the host now.
    Fail,
}

impl From<Verdict> for VerdictName {
    fn from(verdict: Verdict) -> Self {
        match verdict {
            Verdict::NotApplicable => Self::NotApplicable,
            Verdict::Ok => Self::Ok,
            Verdict::Unknown => Self::Unknown,
            Verdict::Warn => Self::Warn,
            Verdict::Fail => Self::Fail,
        }
    }
}

/// Kind of the subject of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScopeName {
    /// The host.
    Host,
    /// One process, for rules about KSM.
    Process,
    /// A virtual machine that runs.
    VirtualMachine,
    /// The guest in a virtual machine.
    Guest,
    /// A domain of libvirt that does not run.
    IdleDomain,
}

impl ScopeName {
    /// The kind of a scope. Rules about settings judge a process only as that of a virtual machine.
    fn new(scope: Scope, topic: Topic) -> Self {
        match scope {
            Scope::Host => Self::Host,
            Scope::Process(_) if topic == Topic::Ksm => Self::Process,
            Scope::Process(_) => Self::VirtualMachine,
            Scope::Guest(_) => Self::Guest,
            Scope::IdleDomain(_) => Self::IdleDomain,
        }
    }
}

/// Number of findings with each verdict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct VerdictCounts {
    /// `fail`.
    pub fail: usize,
    /// `warn`.
    pub warn: usize,
    /// `unknown`.
    pub unknown: usize,
    /// `ok`.
    pub ok: usize,
    /// `not_applicable`.
    pub not_applicable: usize,
}

/// Result of a rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FindingReport {
    /// The rule's id, stable over versions.
    pub rule: Cow<'static, str>,
    /// The verdict.
    pub verdict: VerdictName,
    /// The kind of its subject.
    pub scope: ScopeName,
    /// The process it is about; absent for the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// When that process started, in clock ticks since boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<u64>,
    /// The virtual machine it is about; absent for other processes and for the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// The topic of the rule: `ksm`, `kvm`, `cpu`, `memory`, `scheduling`, `devices`, `vm` or `guest`.
    #[serde(default)]
    pub topic: Cow<'static, str>,
    /// Summary in one phrase.
    pub title: String,
    /// The file that was read.
    pub source: String,
    /// The value that was read.
    pub value: String,
    /// The recommended value.
    pub expected: Cow<'static, str>,
    /// Why it matters.
    pub why: Cow<'static, str>,
    /// Shell commands to run as root, one per line; lines that start with `#` are instructions that no command can
    /// replace. Empty if there is nothing to do.
    pub remedy: Vec<String>,
    /// A shell command that succeeds once the remedy has worked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verify: Option<String>,
    /// What to know before a change.
    pub details: SettingDetailsReport,
    /// Changes that resolve the finding. Nothing carries them out here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<ProposedChangeReport>,
    /// Whether `pagefold tune` makes the changes only if an operator names the rule.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_request: bool,
}

/// What to know before a change that resolves a finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SettingDetailsReport {
    /// What the recommended value gains.
    pub benefit: Cow<'static, str>,
    /// What a change may break or cost.
    pub risk: Cow<'static, str>,
    /// How a change takes effect: `live`, `module_reload`, `vm_restart`, `reboot` or `manual`.
    pub method: Cow<'static, str>,
    /// How a change is undone.
    pub undo: Cow<'static, str>,
    /// The counter or file that proves that a change works.
    pub counter: Cow<'static, str>,
    /// The kernels, or versions of QEMU, for which the rule holds.
    pub versions: Cow<'static, str>,
    /// Where the facts come from.
    pub citation: Cow<'static, str>,
}

/// The name of a method.
pub fn method_name(method: ApplyMethod) -> &'static str {
    match method {
        ApplyMethod::Live => "live",
        ApplyMethod::ModuleReload => "module_reload",
        ApplyMethod::VmRestart => "vm_restart",
        ApplyMethod::Reboot => "reboot",
        ApplyMethod::Manual => "manual",
    }
}

impl From<&'static SettingDetails> for SettingDetailsReport {
    fn from(details: &'static SettingDetails) -> Self {
        Self {
            benefit: details.benefit.into(),
            risk: details.risk.into(),
            method: method_name(details.method).into(),
            undo: details.undo.into(),
            counter: details.counter.into(),
            versions: details.versions.into(),
            citation: details.citation.into(),
        }
    }
}

/// A change of a setting that a finding proposes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProposedChangeReport {
    /// `write`, `module_parameter`, `boot_parameter` or `vm_definition`.
    pub kind: Cow<'static, str>,
    /// What is changed: a path, `MODULE.PARAMETER`, the boot parameter to remove, or the option of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The new value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
}

impl From<SettingChange> for ProposedChangeReport {
    fn from(change: SettingChange) -> Self {
        let (kind, target, value) = match change {
            SettingChange::Write { path, value } => ("write", Some(format!("/{path}")), Some(value)),
            SettingChange::ModuleParameter { module, parameter, value } => {
                ("module_parameter", Some(format!("{module}.{parameter}")), Some(value))
            }
            SettingChange::BootParameter { remove, add } => ("boot_parameter", remove, add),
            SettingChange::VmDefinition { option, .. } => {
                let (target, value) = describe_option(option);
                ("vm_definition", Some(target), Some(value))
            }
        };
        Self { kind: kind.into(), target, value }
    }
}

/// An option of a machine and its new value.
fn describe_option(option: VmOption) -> (String, String) {
    let on_off = |enable| if enable { "on" } else { "off" }.to_owned();
    match option {
        VmOption::HostCpuModel => ("cpu model".into(), "host".into()),
        VmOption::CpuFeature { name, enable } => (format!("cpu feature {name}"), on_off(enable)),
        VmOption::HyperVSpinlocks { retries } => ("cpu feature hv-spinlocks".into(), format!("{retries:#x}")),
        VmOption::CpuPowerManagement { enable } => ("cpu-pm".into(), on_off(enable)),
        VmOption::VirtualNodes { host_nodes } => {
            ("virtual nodes".into(), format!("{} on the host nodes {}", host_nodes.len(), node_list(&host_nodes)))
        }
        VmOption::MergeableMemory => ("memory".into(), "private".into()),
        VmOption::DiskCacheNone { disk } => (format!("cache of disk {disk}"), "none".into()),
        VmOption::DiskAio { disk, interface } => (format!("aio of disk {disk}"), interface),
        VmOption::DiskIoThreads { disk, count } => (format!("iothreads of disk {disk}"), count.to_string()),
        VmOption::VhostNet { network } => (format!("vhost of network {network}"), "on".into()),
        VmOption::NetworkQueues { network, count } => (format!("queues of network {network}"), count.to_string()),
    }
}

impl From<Finding> for FindingReport {
    fn from(finding: Finding) -> Self {
        let process = match finding.scope {
            Scope::Host | Scope::IdleDomain(_) => None,
            Scope::Process(id) | Scope::Guest(id) => Some(id),
        };
        let topic = topic_of_rule(finding.rule);
        Self {
            rule: finding.rule.into(),
            verdict: finding.verdict.into(),
            scope: ScopeName::new(finding.scope, topic),
            pid: process.map(|id| id.pid.0),
            start_time: process.map(|id| id.start_time),
            machine: None,
            topic: topic.name().into(),
            title: finding.title,
            source: finding.source,
            value: finding.value,
            expected: finding.expected.into(),
            why: finding.why.into(),
            remedy: finding.remedy,
            verify: finding.verify,
            details: finding.details.into(),
            changes: finding.changes.into_iter().map(Into::into).collect(),
            on_request: finding.on_request,
        }
    }
}

impl DoctorReport {
    /// Examine the host.
    pub fn from_host(host: String, facts: &HostFacts) -> Self {
        let findings = report_findings(examine_host(facts), facts);
        Self::new(host, Vec::new(), findings, unscanned_processes(facts.processes.iter()))
    }

    /// Examine some of its processes.
    pub fn from_processes(host: String, facts: &HostFacts, processes: &[&ProcessFacts]) -> Self {
        let infos = processes
            .iter()
            .map(|process| ProcessInfo::from_process(&process.process, Some(&process.domain)))
            .collect();
        let is_requested = |scope| {
            let subjects = |process: &&ProcessFacts| [Scope::Process, Scope::Guest].map(|of| of(process.process.id));
            processes.iter().any(|process| subjects(process).contains(&scope))
        };
        let settings = examine_host(facts).into_iter().filter(|finding| is_requested(finding.scope));
        let findings = processes.iter().flat_map(|process| examine_process(facts, process)).chain(settings).collect();
        let findings = report_findings(findings, facts);
        Self::new(host, infos, findings, unscanned_processes(processes.iter().copied()))
    }

    /// Keep only the findings of these topics, named as by [`Topic::name`](crate::decide::audit::Topic::name).
    #[must_use]
    pub fn retain_topics(mut self, topics: &[&str]) -> Self {
        self.findings.retain(|finding| topics.contains(&&*finding.topic));
        self.count_verdicts();
        self
    }

    fn count_verdicts(&mut self) {
        self.counts = VerdictCounts::default();
        for finding in &self.findings {
            *match finding.verdict {
                VerdictName::Fail => &mut self.counts.fail,
                VerdictName::Warn => &mut self.counts.warn,
                VerdictName::Unknown => &mut self.counts.unknown,
                VerdictName::Ok => &mut self.counts.ok,
                VerdictName::NotApplicable => &mut self.counts.not_applicable,
            } += 1;
        }
        self.verdict = self.findings.first().map_or(VerdictName::NotApplicable, |finding| finding.verdict);
    }

    /// Replace `sudo` remedies by `remedy` where more privilege does not help.
    #[must_use]
    pub fn replace_privilege_remedies(mut self, remedy: &str) -> Self {
        for finding in &mut self.findings {
            if finding.verdict == VerdictName::Unknown && finding.remedy.iter().all(|line| line.starts_with("sudo ")) {
                finding.remedy = finding.remedy.iter().map(|_| remedy.to_owned()).collect();
            }
        }
        self
    }

    fn new(
        host: String,
        processes: Vec<ProcessInfo>,
        mut findings: Vec<FindingReport>,
        unscanned_processes: Vec<UnscannedProcessReport>,
    ) -> Self {
        findings.sort_by_key(|finding| Reverse(finding.verdict));
        let mut report = Self {
            schema: "pagefold.doctor/1",
            host,
            verdict: VerdictName::NotApplicable,
            counts: VerdictCounts::default(),
            processes,
            findings,
            unscanned_processes,
        };
        report.count_verdicts();
        report
    }
}

/// The findings with the names of the machines that they are about.
fn report_findings(findings: Vec<Finding>, facts: &HostFacts) -> Vec<FindingReport> {
    let names: BTreeMap<ProcessId, &str> = facts.settings.vms.iter().map(|vm| (vm.process, &*vm.name)).collect();
    let name_of = |scope| match scope {
        Scope::Host => None,
        Scope::Process(id) | Scope::Guest(id) => names.get(&id).copied(),
        Scope::IdleDomain(position) => facts.settings.idle_domains.get(position).map(|domain| &*domain.name),
    };
    let report = |finding: Finding| {
        let machine = name_of(finding.scope).map(str::to_owned);
        FindingReport { machine, ..finding.into() }
    };
    findings.into_iter().map(report).collect()
}

fn unscanned_processes<'a>(processes: impl Iterator<Item = &'a ProcessFacts>) -> Vec<UnscannedProcessReport> {
    processes
        .filter_map(|facts| {
            let why = facts.regions.as_ref().err()?;
            let comm = Some(&facts.process.comm).filter(|_| facts.process.uid.is_ok());
            Some(UnscannedProcessReport::new(facts.process.id.pid.0, comm.cloned(), why))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;

    #[test]
    fn scopes_are_named_by_what_the_rule_judges() {
        let id = ProcessId { pid: Pid(7), start_time: 1 };
        let names = [
            (Scope::Host, Topic::Ksm, ScopeName::Host),
            (Scope::Host, Topic::Memory, ScopeName::Host),
            (Scope::Process(id), Topic::Ksm, ScopeName::Process),
            (Scope::Process(id), Topic::Vm, ScopeName::VirtualMachine),
            (Scope::Process(id), Topic::Devices, ScopeName::VirtualMachine),
            (Scope::Guest(id), Topic::Guest, ScopeName::Guest),
            (Scope::IdleDomain(0), Topic::Vm, ScopeName::IdleDomain),
        ];
        for (scope, topic, name) in names {
            assert_eq!(ScopeName::new(scope, topic), name, "{scope:?} and {topic:?}");
        }
    }
}
