//! The decisions of `pagefold tune`: which changes a host needs, which of them can be made, and how.
//!
//! [`plan()`] takes the changes that findings, a profile or an imported file ask for ([`Proposal`]) and the present
//! state ([`TuneState`]), and returns the steps. A step is a change of the running kernel, of a module, or a text for
//! the operator. A proposal that is in force already gives no step, so the plan of a host that is right is empty.
//! [`vm`] changes definitions of virtual machines, [`import`] and [`export`] convert other programs' files.

pub mod boot;
pub mod conflict;
pub mod counters;
pub mod export;
pub mod import;
pub mod modprobe;
pub mod plan;
pub mod profile;
pub mod vcpus;
pub mod vm;

use pagefold_base::ProcessId;
use pagefold_doctor::decide::change::{ApplyMethod, SettingChange, SettingDetails};
use pagefold_doctor::decide::{Finding, Scope, Verdict};
pub use plan::{KSM_RUN_PATH, plan};
use std::collections::BTreeMap;

/// A set of changes with one reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal {
    /// The rule of the finding, `profile` or `import`.
    pub rule: String,
    /// The summary.
    pub title: String,
    /// Why it matters.
    pub why: String,
    /// Benefit, risk and sources, if the rule has them.
    pub details: Option<&'static SettingDetails>,
    /// The changes.
    pub changes: Vec<SettingChange>,
}

impl Proposal {
    /// The proposals of findings that ask for a change. Some ask for it only if the operator names their rule.
    pub fn from_findings(findings: &[Finding], named_rules: &[String]) -> Vec<Self> {
        wrong(findings).filter(|finding| is_proposed(finding, named_rules)).map(Self::from_finding).collect()
    }

    fn from_finding(finding: &Finding) -> Self {
        let process = match finding.scope {
            // Findings about domains that do not run have no changes.
            Scope::Host | Scope::IdleDomain(_) => String::new(),
            Scope::Process(id) | Scope::Guest(id) => format!(" (process {})", id.pid),
        };
        Self {
            rule: finding.rule.to_owned(),
            title: format!("{}{process}", finding.title),
            why: finding.why.to_owned(),
            details: Some(finding.details),
            changes: finding.changes.clone(),
        }
    }
}

/// The warnings and failures.
fn wrong(findings: &[Finding]) -> impl Iterator<Item = &Finding> {
    findings.iter().filter(|finding| matches!(finding.verdict, Verdict::Warn | Verdict::Fail))
}

/// Whether the changes of a finding are planned; otherwise it is left to the operator.
fn is_proposed(finding: &Finding, named_rules: &[String]) -> bool {
    !finding.changes.is_empty() && (!finding.on_request || named_rules.iter().any(|rule| rule == finding.rule))
}

/// A finding that no step of a plan resolves: only an operator can.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorFinding {
    /// The rule.
    pub rule: &'static str,
    /// Whether the rule fails, rather than warns.
    pub fails: bool,
    /// The summary of the rule.
    pub title: String,
    /// How many processes, guests or domains have it; 1 for the host.
    pub count: usize,
    /// What the operator can do, for the first of them: commands, and instructions that begin with `#`.
    pub remedy: Vec<String>,
}

/// The warnings and failures that [`Proposal::from_findings`] does not propose, those of one rule and title together. The
/// worst come first.
pub fn operator_findings(findings: &[Finding], named_rules: &[String]) -> Vec<OperatorFinding> {
    let mut found: Vec<OperatorFinding> = Vec::new();
    for finding in wrong(findings).filter(|finding| !is_proposed(finding, named_rules)) {
        let request = (!finding.changes.is_empty()).then(|| format!("pagefold tune apply --rule {}", finding.rule));
        match found.iter_mut().find(|known| known.rule == finding.rule && known.title == finding.title) {
            Some(known) => known.count += 1,
            None => found.push(OperatorFinding {
                rule: finding.rule,
                fails: finding.verdict == Verdict::Fail,
                title: finding.title.clone(),
                count: 1,
                remedy: finding.remedy.iter().cloned().chain(request).collect(),
            }),
        }
    }
    found.sort_by_key(|finding| !finding.fails);
    found
}

/// The state of the host that a plan depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TuneState {
    /// The present value of each setting that a proposal names, by its path below the root, or why it is absent.
    pub settings: BTreeMap<String, Result<String, String>>,
    /// The modules that a proposal names.
    pub modules: BTreeMap<String, ModuleState>,
    /// The processes that have `/dev/kvm`, a virtual machine or a vCPU open, as a phrase each.
    pub kvm_users: Vec<String>,
    /// The configuration file of modprobe(8) that Pagefold writes, if it exists.
    pub module_file: Option<String>,
    /// Other programs that write settings, by the name of the program.
    pub tuners: Vec<String>,
    /// The virtual machines that a proposal names.
    pub machines: BTreeMap<ProcessId, MachineState>,
    /// How the kernel's command line is changed.
    pub boot: boot::BootState,
    /// Why ksmd must not be started: it would merge pages across trust domains, or it is not known whether it would.
    pub ksm_start_refusal: Option<String>,
    /// Why KSM must not be stopped, if memory does not suffice for copies of the merged pages.
    pub ksm_stop_refusal: Option<String>,
    /// Why the kernel refuses settings that it takes only while no page is merged, if pages are merged.
    pub merged_pages_refusal: Option<String>,
}

/// The state of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleState {
    /// Whether it is loaded and can be unloaded.
    pub is_loaded: bool,
    /// Whether it is part of the kernel image.
    pub is_built_in: bool,
    /// Its references: `None` if unknown.
    pub references: Option<u64>,
    /// The parameters that it has, with their present values in the form of modprobe(8).
    pub parameters: BTreeMap<String, String>,
}

/// The definition of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineState {
    /// Its name.
    pub name: String,
    /// Its persistent definition, if libvirt owns it.
    pub libvirt_xml: Option<String>,
    /// The arguments of its process.
    pub arguments: Vec<String>,
}

/// What can be done, what cannot, and which programs may interfere.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TunePlan {
    /// The steps in the order in which they are made.
    pub steps: Vec<Step>,
    /// The changes that are not made.
    pub refusals: Vec<Refusal>,
    /// Programs that may change settings back.
    pub conflicts: Vec<conflict::Conflict>,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Why it is made: one reason, or several for the definition of a machine.
    pub reasons: Vec<StepReason>,
    /// What is done.
    pub effect: Effect,
}

/// A rule that asks for a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepReason {
    /// The rule of the finding, `profile-NAME` or `import`.
    pub rule: String,
    /// The summary of the rule.
    pub title: String,
    /// Why it matters.
    pub why: String,
    /// Benefit, risk and sources, if the rule has them.
    pub details: Option<&'static SettingDetails>,
}

impl Step {
    /// The rules that ask for it, with commas between.
    pub fn rules(&self) -> String {
        self.reasons.iter().map(|reason| reason.rule.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// The summaries of its rules, with semicolons between.
    pub fn title(&self) -> String {
        self.reasons.iter().map(|reason| reason.title.as_str()).collect::<Vec<_>>().join("; ")
    }
}

/// What a step does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Writes a setting of the running kernel.
    Write {
        /// The path below the root.
        path: String,
        /// The present value.
        from: String,
        /// The new value.
        to: String,
    },
    /// Sets parameters of a module, in a file for all later loads, and by a reload if the module is loaded.
    Module(ModuleChange),
    /// Asks the operator to change the kernel's command line.
    Boot {
        /// The parameter that is removed.
        remove: Option<String>,
        /// The parameter that is added.
        add: Option<String>,
        /// The commands that do it and undo it, as root.
        commands: boot::BootCommands,
    },
    /// Changes the definition of a virtual machine.
    Machine {
        /// The process of the machine.
        process: ProcessId,
        /// The name of the machine.
        name: String,
        /// The changed definition.
        patch: vm::Patch,
    },
}

/// New parameters of a module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleChange {
    /// The module.
    pub module: String,
    /// The parameters that change, with their present values; empty if the module is not loaded.
    pub from: BTreeMap<String, String>,
    /// The parameters with their new values.
    pub to: BTreeMap<String, String>,
    /// Whether the module is loaded again now.
    pub reload: bool,
    /// The configuration file after all steps so far.
    pub file_after: String,
}

impl Effect {
    /// How the change takes effect.
    pub fn method(&self) -> ApplyMethod {
        match self {
            Self::Write { .. } => ApplyMethod::Live,
            Self::Module(_) => ApplyMethod::ModuleReload,
            Self::Boot { .. } => ApplyMethod::Reboot,
            Self::Machine { .. } => ApplyMethod::VmRestart,
        }
    }
}

/// A change that is not made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The rule that asks for it.
    pub rule: String,
    /// The change.
    pub change: String,
    /// Why it is not made, and what to do instead.
    pub why: String,
    /// Changes with the same meaning that another program can make now, for the next load of a module or the next boot.
    pub deferred: Vec<SettingChange>,
}

/// A change as a phrase: `set /proc/sys/vm/swappiness to 10`.
pub fn describe_change(change: &SettingChange) -> String {
    match change {
        SettingChange::Write { path, value } => format!("set /{path} to {value}"),
        SettingChange::ModuleParameter { module, parameter, value } => {
            format!("load module {module} with {parameter}={value}")
        }
        SettingChange::BootParameter { remove, add } => match (remove, add) {
            (Some(remove), Some(add)) => format!("boot with {add} instead of {remove}"),
            (None, Some(add)) => format!("boot with {add}"),
            (Some(remove), None) => format!("boot without {remove}"),
            (None, None) => "boot again".to_owned(),
        },
        SettingChange::VmDefinition { vm, option } => format!("{} of process {}", vm::describe_option(option), vm.pid),
    }
}
