//! From proposals to steps.

use super::conflict::{COMMAND_LINE, ChangedThings, find_conflicts, find_repeating_writer};
use super::modprobe::{normal_name, set_parameters};
use super::profile::{Profile, ProfileDecision, judge};
use super::{
    Effect, ModuleChange, ModuleState, Proposal, Refusal, Step, StepReason, TunePlan, TuneState, boot, describe_change,
    vm,
};
use pagefold_base::ksm::Setting;
use pagefold_base::{IdSet, ProcessId};
use pagefold_doctor::decide::change::{SettingChange, VmOption};
use pagefold_doctor::decide::ksm_start_details;
use std::collections::{BTreeMap, BTreeSet};

/// Modules that Pagefold loads again: no other module depends on them.
const RELOADABLE_MODULES: [&str; 2] = ["kvm_amd", "kvm_intel"];

/// Directories whose numbers are decimal. Elsewhere, as in `/proc/irq`, there are masks of CPUs in hexadecimal.
const DECIMAL_SETTINGS: [&str; 3] = ["proc/sys/", "sys/kernel/mm/", "sys/module/"];

/// The setting that stops and starts ksmd.
pub const KSM_RUN_PATH: &str = "sys/kernel/mm/ksm/run";

/// Settings that the kernel takes only while no page is merged (mm/ksm.c, `merge_across_nodes_store` and
/// `max_page_sharing_store`).
const UNMERGED_ONLY: [&str; 2] = ["sys/kernel/mm/ksm/merge_across_nodes", "sys/kernel/mm/ksm/max_page_sharing"];

/// Why `run` is not set to 2.
const UNMERGE_REFUSAL: &str =
    "it unmerges all pages at once and may trigger the OOM killer: use `pagefold unmerge --all`";

/// Plans the proposals for a host, in their order; the first proposal for a setting wins. A profile changes or drops
/// some of them.
pub fn plan(proposals: &[Proposal], profile: Option<Profile>, state: &TuneState) -> TunePlan {
    let mut planner = Planner {
        state,
        plan: TunePlan::default(),
        decided: BTreeSet::new(),
        machines: BTreeMap::new(),
        places_machines: false,
    };
    for proposal in proposals {
        let mut module_parameters: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
        for change in &proposal.changes {
            let (change, title) = match judge(profile, &proposal.rule, change) {
                ProfileDecision::Keep => (change.clone(), proposal.title.clone()),
                ProfileDecision::Replace(change, reason) => (change, format!("{}: {reason}", proposal.title)),
                ProfileDecision::Drop(reason) => {
                    planner.refuse(proposal, change, reason.to_owned());
                    continue;
                }
            };
            let proposal = Proposal { title, ..proposal.clone() };
            match &change {
                SettingChange::Write { path, value } => planner.plan_write(&proposal, &change, path, value),
                SettingChange::ModuleParameter { module, parameter, value } => {
                    let parameters = module_parameters.entry(normal_name(module)).or_default();
                    parameters.insert(parameter.clone(), value.clone());
                }
                SettingChange::BootParameter { remove, add } => {
                    planner.plan_boot(&proposal, &change, remove.as_deref(), add.as_deref());
                }
                SettingChange::VmDefinition { vm, option } => planner.plan_machine(&proposal, &change, *vm, option),
            }
        }
        for (module, parameters) in module_parameters {
            planner.plan_module(proposal, &module, parameters);
        }
    }
    planner.finish()
}

struct Planner<'a> {
    state: &'a TuneState,
    plan: TunePlan,
    /// Settings, parameters and options that a proposal has decided.
    decided: BTreeSet<String>,
    /// The step of each machine.
    machines: BTreeMap<ProcessId, usize>,
    /// Whether a step binds memory and CPUs of a machine to nodes.
    places_machines: bool,
}

impl Planner<'_> {
    fn refuse(&mut self, proposal: &Proposal, change: &SettingChange, why: String) {
        self.refuse_for_now(proposal, change, why, Vec::new());
    }

    /// Refuses a change that other programs can prepare for later.
    fn refuse_for_now(
        &mut self,
        proposal: &Proposal,
        change: &SettingChange,
        why: String,
        deferred: Vec<SettingChange>,
    ) {
        let (rule, change) = (proposal.rule.clone(), describe_change(change));
        self.plan.refusals.push(Refusal { rule, change, why, deferred });
    }

    fn push(&mut self, proposal: &Proposal, effect: Effect) {
        self.plan.steps.push(Step { reasons: vec![reason_of(proposal)], effect });
    }

    fn plan_write(&mut self, proposal: &Proposal, change: &SettingChange, path: &str, value: &str) {
        if !self.decided.insert(path.to_owned()) {
            return;
        }
        let from = match self.state.settings.get(path) {
            Some(Ok(from)) => from,
            Some(Err(why)) => return self.refuse(proposal, change, why.clone()),
            None => return self.refuse(proposal, change, "its present value was not read".to_owned()),
        };
        let to = value_as_read(value, from);
        if *from == to {
            return;
        }
        let is_decimal = DECIMAL_SETTINGS.iter().any(|directory| path.starts_with(directory));
        if is_decimal && is_numeric(from) && !is_numeric(&to) {
            return self.refuse(proposal, change, format!("its value is a number ({from}), and {to:?} is none"));
        }
        if let Some(writer) = find_repeating_writer(&self.state.tuners, path) {
            let why = format!("{} writes {}; {}", writer.program, writer.writes, writer.remedy);
            return self.refuse(proposal, change, why);
        }
        if let Some(why) = self.find_ksm_refusal(path, &to) {
            return self.refuse(proposal, change, why);
        }
        let details = proposal.details.or_else(|| starts_ksm(path, &to).then(ksm_start_details));
        let proposal = Proposal { details, ..proposal.clone() };
        self.push(&proposal, Effect::Write { path: path.to_owned(), from: from.clone(), to });
    }

    /// Why a setting of KSM must not have this value, whatever asks for it.
    fn find_ksm_refusal(&self, path: &str, value: &str) -> Option<String> {
        if UNMERGED_ONLY.contains(&path) {
            return self.state.merged_pages_refusal.clone();
        }
        match ksm_run(path, value)? {
            0 => self.state.ksm_stop_refusal.clone(),
            1 => self.state.ksm_start_refusal.clone(),
            _ => Some(UNMERGE_REFUSAL.to_owned()),
        }
    }

    fn plan_module(&mut self, proposal: &Proposal, module: &str, mut parameters: BTreeMap<String, String>) {
        parameters.retain(|name, _| self.decided.insert(format!("{module}.{name}")));
        let Some((name, value)) = parameters.iter().next().map(|(name, value)| (name.clone(), value.clone())) else {
            return;
        };
        let change = SettingChange::ModuleParameter { module: module.to_owned(), parameter: name, value };
        let Some(state) = self.state.modules.get(module) else {
            return self.refuse(proposal, &change, "its state was not read".to_owned());
        };
        if let Some((why, deferred)) = find_module_refusal(module, state, &parameters, &self.state.kvm_users) {
            let deferred = deferred.changes(module, parameters);
            return self.refuse_for_now(proposal, &change, why, deferred);
        }
        parameters.retain(|name, value| {
            *value = normal_value(value);
            state.parameters.get(name) != Some(value)
        });
        let before = self.module_file();
        let after = set_parameters(before.as_deref(), module, &parameters);
        // A module that is not loaded has no present value: what the file says decides.
        if parameters.is_empty() || !state.is_loaded && before.as_ref() == Some(&after) {
            return;
        }
        let from = parameters.keys().filter_map(|name| Some((name.clone(), state.parameters.get(name)?.clone())));
        let change = ModuleChange {
            module: module.to_owned(),
            from: from.collect(),
            to: parameters,
            reload: state.is_loaded,
            file_after: after,
        };
        self.push(proposal, Effect::Module(change));
    }

    /// The text of the modprobe.d file after the steps so far.
    fn module_file(&self) -> Option<String> {
        let last = self.plan.steps.iter().rev().find_map(|step| match &step.effect {
            Effect::Module(change) => Some(change.file_after.clone()),
            _ => None,
        });
        last.or_else(|| self.state.module_file.clone())
    }

    fn plan_boot(&mut self, proposal: &Proposal, change: &SettingChange, remove: Option<&str>, add: Option<&str>) {
        if boot::is_in_force(&self.state.boot, remove, add) || !self.decided.insert(describe_change(change)) {
            return;
        }
        match boot::commands(&self.state.boot, remove, add) {
            Ok(commands) => {
                let effect = Effect::Boot { remove: remove.map(str::to_owned), add: add.map(str::to_owned), commands };
                self.push(proposal, effect);
            }
            Err(why) => {
                let is_plain = remove.iter().chain(&add).all(|parameter| boot::is_plain(parameter));
                let deferred = if is_plain { vec![change.clone()] } else { Vec::new() };
                self.refuse_for_now(proposal, change, why, deferred);
            }
        }
    }

    /// All options of a machine become one patch, in the first step of the machine.
    fn plan_machine(&mut self, proposal: &Proposal, change: &SettingChange, process: ProcessId, option: &VmOption) {
        let Some(machine) = self.state.machines.get(&process) else {
            return self.refuse(proposal, change, "the machine has ended, or its definition cannot be read".to_owned());
        };
        if !self.decided.insert(format!("{process:?} {option:?}")) {
            return;
        }
        let step = self.machines.get(&process).copied();
        let patch = step.map(|step| match &self.plan.steps[step].effect {
            Effect::Machine { patch, .. } => patch.clone(),
            _ => vm::Patch::begin(machine),
        });
        let mut patch = patch.unwrap_or_else(|| vm::Patch::begin(machine));
        match patch.add(option) {
            Err(why) => self.refuse(proposal, change, why),
            Ok(false) => {}
            Ok(true) => {
                self.places_machines |= matches!(option, VmOption::VirtualNodes { .. });
                let effect = Effect::Machine { process, name: machine.name.clone(), patch };
                match step {
                    Some(step) => {
                        let existing = &mut self.plan.steps[step];
                        existing.effect = effect;
                        if existing.reasons.iter().all(|reason| reason.rule != proposal.rule) {
                            existing.reasons.push(reason_of(proposal));
                        }
                    }
                    None => {
                        self.machines.insert(process, self.plan.steps.len());
                        self.push(proposal, effect);
                    }
                }
            }
        }
    }

    fn finish(mut self) -> TunePlan {
        // Live settings first: they are the ones that cannot lose anything.
        self.plan.steps.sort_by_key(|step| {
            let position = match &step.effect {
                Effect::Write { path, .. } => ksm_position(path),
                _ => usize::MAX,
            };
            (step.effect.method(), position)
        });
        self.plan.conflicts = find_conflicts(&self.state.tuners, &self.changed_things());
        self.plan
    }

    fn changed_things(&self) -> ChangedThings {
        let mut changed = ChangedThings { places_machines: self.places_machines, ..ChangedThings::default() };
        for step in &self.plan.steps {
            match &step.effect {
                Effect::Write { path, .. } => changed.paths.push(path.clone()),
                Effect::Module(ModuleChange { module, to, .. }) => {
                    changed.paths.extend(to.keys().map(|name| format!("sys/module/{module}/parameters/{name}")));
                }
                Effect::Boot { .. } => changed.paths.push(COMMAND_LINE.to_owned()),
                Effect::Machine { .. } => changed.defines_machines = true,
            }
        }
        changed
    }
}

fn reason_of(proposal: &Proposal) -> StepReason {
    let Proposal { rule, title, why, details, .. } = proposal.clone();
    StepReason { rule, title, why, details }
}

/// The value of `run`, if the path is that setting. The kernel takes it as a decimal number, with zeros or a plus sign
/// before it (mm/ksm.c, `run_store`; lib/kstrtox.c).
fn ksm_run(path: &str, value: &str) -> Option<u32> {
    value.parse().ok().filter(|_| path == KSM_RUN_PATH)
}

/// The position of a setting of KSM among those in the order in which the kernel accepts them; all others come later.
fn ksm_position(path: &str) -> usize {
    let name = path.strip_prefix("sys/kernel/mm/ksm/");
    Setting::ALL.iter().position(|setting| Some(setting.file_name()) == name).unwrap_or(usize::MAX)
}

fn starts_ksm(path: &str, value: &str) -> bool {
    ksm_run(path, value) == Some(1)
}

/// How parameters of a module can take effect later.
enum DeferredParameters {
    /// Not at all.
    Never,
    /// At the next load of the module.
    AtLoad,
    /// By the kernel's command line.
    AtBoot,
}

impl DeferredParameters {
    fn changes(self, module: &str, parameters: BTreeMap<String, String>) -> Vec<SettingChange> {
        let change = |(parameter, value): (String, String)| match self {
            Self::Never => None,
            Self::AtLoad => Some(SettingChange::ModuleParameter { module: module.to_owned(), parameter, value }),
            Self::AtBoot => {
                let add = Some(format!("{module}.{parameter}={value}")).filter(|add| boot::is_plain(add))?;
                Some(SettingChange::BootParameter { remove: None, add: Some(add) })
            }
        };
        parameters.into_iter().filter_map(change).collect()
    }
}

/// Why a module cannot be given these parameters now, and how they can take effect later.
fn find_module_refusal(
    module: &str,
    state: &ModuleState,
    parameters: &BTreeMap<String, String>,
    kvm_users: &[String],
) -> Option<(String, DeferredParameters)> {
    if state.is_built_in {
        let why = format!("{module} is part of the kernel image: boot with {module}.NAME=VALUE instead");
        return Some((why, DeferredParameters::AtBoot));
    }
    let missing = parameters.keys().find(|name| state.is_loaded && !state.parameters.contains_key(*name));
    if let Some(name) = missing {
        return Some((format!("this kernel's {module} has no parameter {name}"), DeferredParameters::Never));
    }
    let is_in_force = parameters.iter().all(|(name, value)| state.parameters.get(name) == Some(&normal_value(value)));
    if !state.is_loaded || is_in_force {
        return None;
    }
    if !RELOADABLE_MODULES.contains(&module) {
        let why = format!("Pagefold does not load {module} again: put it into /etc/modprobe.d and boot again");
        return Some((why, DeferredParameters::AtLoad));
    }
    let why = match (state.references, kvm_users) {
        (Some(0), []) => return None,
        (_, []) => format!("{module} is in use by programs that cannot be seen: a virtual machine would be lost"),
        (_, users) => format!(
            "{module} is in use by {}: shut these virtual machines down or migrate them first. `pagefold tune export \
             --format modprobe` sets it for the next load",
            users.join(", ")
        ),
    };
    Some((why, DeferredParameters::AtLoad))
}

/// Whether a value consists of numbers, which the kernel also takes in hexadecimal, or of lists of CPUs such as 0-3,8.
fn is_numeric(value: &str) -> bool {
    let is_hexadecimal =
        |word: &str| word.strip_prefix("0x").is_some_and(|digits| u64::from_str_radix(digits, 16).is_ok());
    let is_list = |word: &str| word.parse::<IdSet>().is_ok_and(|set| !set.is_empty());
    let is_number = |word: &str| word.parse::<i128>().is_ok() || is_hexadecimal(word) || is_list(word);
    !value.is_empty() && value.split_ascii_whitespace().all(is_number)
}

/// A value in the form in which the kernel reports it, where the present one shows that form: truth values of modules
/// are `Y` and `N`, and are written as `1` and `0` as well (kernel/params.c, `param_get_bool`).
pub fn value_as_read(value: &str, current: &str) -> String {
    let value = value.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
    match (current, value.to_ascii_lowercase().as_str()) {
        ("Y" | "N", "1" | "y" | "on") => "Y".to_owned(),
        ("Y" | "N", "0" | "n" | "off") => "N".to_owned(),
        _ if current.split_ascii_whitespace().eq(value.split_ascii_whitespace()) => current.to_owned(),
        _ => value,
    }
}

/// A parameter's value in the form of modprobe(8).
fn normal_value(value: &str) -> String {
    match value {
        "Y" | "y" | "on" => "1".to_owned(),
        "N" | "n" | "off" => "0".to_owned(),
        value => value.to_owned(),
    }
}

#[cfg(test)]
mod tests;
