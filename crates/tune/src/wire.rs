//! Plans and their results in JSON.

use crate::apply::Applied;
use crate::decide::counters::CounterEffect;
use crate::decide::import::IgnoredLine;
use crate::decide::profile::Profile;
use crate::decide::vcpus::VcpuVerdict;
use crate::decide::{Effect, OperatorFinding, Step, StepReason, TunePlan, vm};
use crate::kept::{KeptChange, KeptState};
use crate::vcpus::VcpuCheck;
use pagefold_doctor::decide::change::ApplyMethod;
use pagefold_doctor::wire::{FindingReport, VerdictName};
use pagefold_host::knob::Knob;
use pagefold_host::transaction::session::UndoDescription;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of `pagefold tune plan` and `pagefold tune import`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TunePlanReport {
    /// `pagefold.tune-plan/1`.
    pub schema: &'static str,
    /// The host: `this host` or a recording.
    pub host: String,
    /// The profile, if one was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<&'static str>,
    /// The steps in the order in which they are made.
    pub steps: Vec<StepReport>,
    /// Changes that are not made.
    pub refused: Vec<RefusalReport>,
    /// Findings that no step resolves: only an operator can.
    pub left_to_operator: Vec<OperatorFindingReport>,
    /// Running programs that write the same settings.
    pub conflicts: Vec<ConflictReport>,
    /// Lines of the imported file that are not carried out.
    pub ignored_lines: Vec<IgnoredLineReport>,
}

/// A finding that only an operator can resolve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OperatorFindingReport {
    /// The rule.
    pub rule: &'static str,
    /// `warn` or `fail`.
    pub verdict: VerdictName,
    /// Summary in one phrase.
    pub title: String,
    /// How many processes, guests or domains have it; 1 for the host.
    pub count: usize,
    /// What to do, for the first of them: commands, and instructions that begin with `#`.
    pub remedy: Vec<String>,
}

/// A step of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StepReport {
    /// The rules that ask for it, with commas between.
    pub rule: String,
    /// The summaries of the rules, with semicolons between.
    pub title: String,
    /// How it takes effect.
    pub method: MethodName,
    /// What each rule tells of it.
    pub reasons: Vec<StepReasonReport>,
    /// How it is undone.
    pub undo: String,
    /// What is changed.
    pub change: ChangeReport,
}

/// A rule that asks for a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct StepReasonReport {
    /// The rule, `profile-NAME` or `import`.
    pub rule: String,
    /// Summary in one phrase.
    pub title: String,
    /// Why it matters.
    pub why: String,
    /// What the change gains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub benefit: Option<&'static str>,
    /// What the change may break or cost.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub risk: Option<&'static str>,
    /// The counter or file that shows that it works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counter: Option<&'static str>,
    /// Where the facts come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub citation: Option<&'static str>,
}

/// How a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum MethodName {
    /// At once.
    Live,
    /// When the module is loaded again.
    ModuleReload,
    /// When the virtual machine starts again.
    VmRestart,
    /// When the host boots again.
    Reboot,
    /// By an operator.
    Manual,
}

impl From<ApplyMethod> for MethodName {
    fn from(method: ApplyMethod) -> Self {
        match method {
            ApplyMethod::Live => Self::Live,
            ApplyMethod::ModuleReload => Self::ModuleReload,
            ApplyMethod::VmRestart => Self::VmRestart,
            ApplyMethod::Reboot => Self::Reboot,
            ApplyMethod::Manual => Self::Manual,
        }
    }
}

/// What a step changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ChangeReport {
    /// A setting of the running kernel.
    Write {
        /// Its absolute path.
        path: String,
        /// The present value.
        from: String,
        /// The new value.
        to: String,
    },
    /// Parameters of a module.
    Module {
        /// The module.
        module: String,
        /// The present values of the parameters that change; none if the module is not loaded.
        from: BTreeMap<String, String>,
        /// Their new values.
        to: BTreeMap<String, String>,
        /// Whether the module is loaded again now.
        reload: bool,
        /// The file for later loads.
        file: String,
    },
    /// The kernel's command line, which the operator changes.
    Boot {
        /// The parameter that is removed.
        #[serde(skip_serializing_if = "Option::is_none")]
        remove: Option<String>,
        /// The parameter that is added.
        #[serde(skip_serializing_if = "Option::is_none")]
        add: Option<String>,
        /// The commands, for a shell of root.
        commands: Vec<String>,
        /// The commands that undo it, for a shell of root.
        undo_commands: Vec<String>,
        /// Shows the command line after the next boot, with a comment that says what to expect.
        check: String,
    },
    /// The definition of a virtual machine.
    Machine {
        /// The process of the machine.
        pid: u32,
        /// Its start time, in clock ticks since boot.
        start_time: u64,
        /// The name of the machine.
        name: String,
        /// Whether libvirt owns the machine; otherwise the diff is of QEMU's arguments.
        libvirt: bool,
        /// The change as a unified diff.
        diff: String,
    },
}

/// A change that is not made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct RefusalReport {
    /// The rule that asks for it.
    pub rule: String,
    /// The change.
    pub change: String,
    /// Why it is not made, and what to do instead.
    pub why: String,
}

/// A running program that writes the same settings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ConflictReport {
    /// The program.
    pub program: &'static str,
    /// What it writes.
    pub writes: &'static str,
    /// What to do.
    pub remedy: &'static str,
}

/// A line of an imported file that is not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct IgnoredLineReport {
    /// Its number, from 1.
    pub number: usize,
    /// The line.
    pub text: String,
    /// Why.
    pub why: String,
}

impl TunePlanReport {
    /// Creates the report of a plan.
    pub fn new(
        host: String,
        profile: Option<Profile>,
        plan: &TunePlan,
        left_to_operator: &[OperatorFinding],
        ignored: &[IgnoredLine],
    ) -> Self {
        let refused = plan.refusals.iter().map(|refusal| RefusalReport {
            rule: refusal.rule.clone(),
            change: refusal.change.clone(),
            why: refusal.why.clone(),
        });
        let conflicts = plan.conflicts.iter().map(|conflict| ConflictReport {
            program: conflict.program,
            writes: conflict.writes,
            remedy: conflict.remedy,
        });
        let ignored = ignored.iter().map(|line| IgnoredLineReport {
            number: line.number,
            text: line.text.clone(),
            why: line.why.clone(),
        });
        Self {
            schema: "pagefold.tune-plan/1",
            host,
            profile: profile.map(Profile::name),
            steps: plan.steps.iter().map(StepReport::new).collect(),
            refused: refused.collect(),
            left_to_operator: left_to_operator.iter().map(OperatorFindingReport::new).collect(),
            conflicts: conflicts.collect(),
            ignored_lines: ignored.collect(),
        }
    }
}

impl OperatorFindingReport {
    fn new(finding: &OperatorFinding) -> Self {
        Self {
            rule: finding.rule,
            verdict: if finding.fails { VerdictName::Fail } else { VerdictName::Warn },
            title: finding.title.clone(),
            count: finding.count,
            remedy: finding.remedy.clone(),
        }
    }
}

impl StepReport {
    fn new(step: &Step) -> Self {
        Self {
            rule: step.rules(),
            title: step.title(),
            method: step.effect.method().into(),
            reasons: step.reasons.iter().map(StepReasonReport::new).collect(),
            undo: describe_undo(&step.effect),
            change: ChangeReport::new(&step.effect),
        }
    }
}

impl StepReasonReport {
    fn new(reason: &StepReason) -> Self {
        let details = reason.details;
        Self {
            rule: reason.rule.clone(),
            title: reason.title.clone(),
            why: reason.why.clone(),
            benefit: details.map(|details| details.benefit),
            risk: details.map(|details| details.risk),
            counter: details.map(|details| details.counter),
            citation: details.map(|details| details.citation),
        }
    }
}

/// How a step is undone.
fn describe_undo(effect: &Effect) -> String {
    match effect {
        Effect::Write { path, from, .. } => {
            let undo = format!("`pagefold tune undo` writes {from} again, unless another program wrote it");
            match Knob::from_path(path).and_then(|knob| knob.busy_remedy()) {
                Some(remedy) => format!("{undo}; {remedy}"),
                None => undo,
            }
        }
        Effect::Module(change) if change.reload => {
            "`pagefold tune undo` restores the file and loads the module with the previous values".to_owned()
        }
        Effect::Module(_) => "`pagefold tune undo` restores the file".to_owned(),
        Effect::Boot { .. } => "run the commands marked as undo, and boot again".to_owned(),
        Effect::Machine { .. } => "reverse the diff, and start the machine again".to_owned(),
    }
}

impl ChangeReport {
    fn new(effect: &Effect) -> Self {
        match effect {
            Effect::Write { path, from, to } => {
                Self::Write { path: format!("/{path}"), from: from.clone(), to: to.clone() }
            }
            Effect::Module(change) => Self::Module {
                module: change.module.clone(),
                from: change.from.clone(),
                to: change.to.clone(),
                reload: change.reload,
                file: format!("/{}", crate::decide::modprobe::MODULE_FILE),
            },
            Effect::Boot { remove, add, commands } => Self::Boot {
                remove: remove.clone(),
                add: add.clone(),
                commands: commands.change.clone(),
                undo_commands: commands.undo.clone(),
                check: commands.check.clone(),
            },
            Effect::Machine { process, name, patch } => Self::Machine {
                pid: process.pid.0,
                start_time: process.start_time,
                name: name.clone(),
                libvirt: matches!(patch, vm::Patch::Libvirt { .. }),
                diff: patch.diff(name),
            },
        }
    }
}

/// The result of `pagefold tune apply`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TuneApplyReport {
    /// `pagefold.tune-apply/1`.
    pub schema: &'static str,
    /// The plan.
    pub plan: TunePlanReport,
    /// The positions of the steps that were made, from 0.
    pub done: Vec<usize>,
    /// The steps that failed.
    pub failed: Vec<FailedStepReport>,
    /// The positions of the steps that are left to the operator.
    pub manual: Vec<usize>,
    /// Changes that could not be undone, as the state before each change.
    pub failed_undos: Vec<String>,
}

/// How much of a plan was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuneApplyOutcome {
    /// All that can be.
    Complete,
    /// A step failed, or a change that the operator named was refused.
    Partial,
    /// Nothing, because all changes that the operator named were refused.
    Refused,
}

/// A step that failed. It changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FailedStepReport {
    /// Its position in the plan, from 0.
    pub step: usize,
    /// Why.
    pub why: String,
}

impl TuneApplyReport {
    /// Creates the report of an applied plan.
    pub fn new(plan: TunePlanReport, applied: &Applied) -> Self {
        let tried = |step: &usize| applied.done.contains(step) || applied.failed.iter().any(|(at, _)| at == step);
        let manual = (0..plan.steps.len()).filter(|step| !tried(step)).collect();
        let failed = applied.failed.iter().map(|(step, why)| FailedStepReport { step: *step, why: why.clone() });
        let mut done = applied.done.clone();
        done.sort_unstable();
        Self {
            schema: "pagefold.tune-apply/1",
            done,
            failed: failed.collect(),
            manual,
            failed_undos: applied.failed_undos.iter().map(ToString::to_string).collect(),
            plan,
        }
    }

    /// How much of it was carried out. Refusals count only if the operator named the changes by a rule or a file: other
    /// plans name what they leave.
    pub fn outcome(&self, is_named: bool) -> TuneApplyOutcome {
        let has_failure = !self.failed.is_empty() || !self.failed_undos.is_empty();
        let has_refusal = is_named && !self.plan.refused.is_empty();
        match (has_failure, has_refusal) {
            (false, false) => TuneApplyOutcome::Complete,
            (false, true) if self.done.is_empty() && self.manual.is_empty() => TuneApplyOutcome::Refused,
            _ => TuneApplyOutcome::Partial,
        }
    }

    /// Changes of an earlier, killed run that were undone first, as texts.
    pub fn recovered_texts(applied: &Applied) -> Vec<String> {
        applied.recovered.iter().map(|undo| UndoDescription(undo).to_string()).collect()
    }
}

/// The result of `pagefold tune verify`.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct TuneVerifyReport {
    /// `pagefold.tune-verify/1`.
    pub schema: &'static str,
    /// The host.
    pub host: String,
    /// The changes that `tune apply` left.
    pub changes: Vec<KeptChangeReport>,
    /// Counters that show the effect of the changes.
    pub counters: Vec<CounterReport>,
    /// The vCPUs of machines that run by KVM.
    pub machines: Vec<VcpuCheckReport>,
    /// What `pagefold doctor` finds about guests by their agents, such as CPUs that are not online; empty unless agents
    /// were asked.
    pub guests: Vec<FindingReport>,
}

/// A change that `tune apply` left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct KeptChangeReport {
    /// The setting, file or module.
    pub name: String,
    /// Whether it is in force.
    pub state: KeptStateName,
    /// The value before.
    pub before: String,
    /// The value that was written.
    pub written: String,
    /// The present value, or why it is absent.
    pub current: String,
    /// Why no counter shows the effect of the change, if none does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_counter: Option<&'static str>,
}

/// Whether a change is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KeptStateName {
    /// The value is the one that was written.
    InForce,
    /// Drift: the previous value is back.
    ChangedBack,
    /// Drift: another program wrote another value.
    ChangedByOthers,
    /// It cannot be read.
    Unknown,
}

/// A counter. That of several files is summed; amounts are their mean.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct CounterReport {
    /// Its name.
    pub name: String,
    /// Where it is read: `/proc/vmstat:numa_miss`; with `*` for several files.
    pub source: String,
    /// Its value.
    pub value: u64,
    /// How much it grew while `verify` waited; absent without `--wait`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub growth: Option<i64>,
    /// Its value before the changes; absent if it was not stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_before: Option<u64>,
    /// How much it grew in a second before the changes: since boot, or in the second before for counters of KVM.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_second_before: Option<f64>,
    /// How much it has grown in a second since the changes, on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_second_since: Option<f64>,
}

impl CounterReport {
    fn new(effect: &CounterEffect) -> Self {
        Self {
            name: effect.name.to_owned(),
            source: effect.source.clone(),
            value: effect.value,
            growth: effect.growth,
            value_before: effect.value_before,
            per_second_before: effect.rate_before,
            per_second_since: effect.rate_since,
        }
    }
}

/// The vCPUs of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct VcpuCheckReport {
    /// The name of the machine.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// The vCPUs on its command line, if they can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub declared: Option<u32>,
    /// Threads of vCPUs, if it is known which they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<usize>,
    /// vCPUs that have run guest code for at least one clock tick.
    pub ran: usize,
    /// `ok` if all have run, `fail` if some have not though the guest had the time, otherwise `unknown`.
    pub verdict: VerdictName,
    /// What is wrong, or why it is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

impl VcpuCheckReport {
    fn new(machine: &VcpuCheck) -> Self {
        let (verdict, why) = match &machine.verdict {
            VcpuVerdict::AllRan => (VerdictName::Ok, None),
            VcpuVerdict::NotAllRan(why) => (VerdictName::Fail, Some(why.clone())),
            VcpuVerdict::Unknown(why) => (VerdictName::Unknown, Some(why.clone())),
        };
        Self {
            name: machine.name.clone(),
            pid: machine.process.pid.0,
            declared: machine.readings.declared,
            threads: machine.readings.guest_ticks.as_ref().ok().map(Vec::len),
            ran: machine.readings.ran(),
            verdict,
            why,
        }
    }
}

impl TuneVerifyReport {
    /// Creates the report. `guests` are the findings about guests.
    pub fn new(
        host: String,
        kept: &[KeptChange],
        counters: &[CounterEffect],
        machines: &[VcpuCheck],
        guests: Vec<FindingReport>,
    ) -> Self {
        let changes = kept.iter().map(|kept| KeptChangeReport {
            name: kept.name.clone(),
            state: match kept.state {
                KeptState::InForce => KeptStateName::InForce,
                KeptState::ChangedBack => KeptStateName::ChangedBack,
                KeptState::ChangedByOthers => KeptStateName::ChangedByOthers,
                KeptState::Unknown => KeptStateName::Unknown,
            },
            before: kept.before.clone(),
            written: kept.written.clone(),
            current: kept.current.clone().unwrap_or_else(|why| why),
            no_counter: kept.reason_without_counter(),
        });
        Self {
            schema: "pagefold.tune-verify/1",
            host,
            changes: changes.collect(),
            counters: counters.iter().map(CounterReport::new).collect(),
            machines: machines.iter().map(VcpuCheckReport::new).collect(),
            guests,
        }
    }

    /// Whether a rule about a guest, or the check of a machine's vCPUs, has this verdict.
    fn has_verdict(&self, verdict: VerdictName) -> bool {
        self.guests.iter().any(|finding| finding.verdict == verdict)
            || self.machines.iter().any(|machine| machine.verdict == verdict)
    }

    /// The verdict on all: `fail` if another program has changed a setting, or a machine or guest fails; `unknown` if
    /// nothing fails and something cannot be read; otherwise `ok`.
    pub fn verdict(&self) -> VerdictName {
        let has_state = |states: &[KeptStateName]| self.changes.iter().any(|change| states.contains(&change.state));
        let has_drift = has_state(&[KeptStateName::ChangedBack, KeptStateName::ChangedByOthers]);
        if has_drift || self.has_verdict(VerdictName::Fail) {
            VerdictName::Fail
        } else if has_state(&[KeptStateName::Unknown]) || self.has_verdict(VerdictName::Unknown) {
            VerdictName::Unknown
        } else {
            VerdictName::Ok
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::Refusal;
    use crate::decide::vcpus::VcpuReadings;
    use pagefold_base::{Absent, Pid, ProcessId};

    fn verify(state: KeptState, verdict: VcpuVerdict) -> TuneVerifyReport {
        let kept = KeptChange {
            name: "/proc/sys/vm/swappiness".to_owned(),
            setting: Some("proc/sys/vm/swappiness".to_owned()),
            before: "60".to_owned(),
            written: "10".to_owned(),
            current: Err("permission denied".to_owned()),
            state,
            is_definition: false,
            changed_settings: Vec::new(),
            counters: Vec::new(),
        };
        let readings = VcpuReadings { declared: Some(2), guest_ticks: Err(Absent::Denied), age_seconds: Ok(9) };
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let machine = VcpuCheck { process, name: "web".to_owned(), readings, verdict };
        TuneVerifyReport::new("this host".to_owned(), &[kept], &[], &[machine], Vec::new())
    }

    #[test]
    fn verified_report_is_as_bad_as_its_worst_part() {
        let unknown = || VcpuVerdict::Unknown(String::new());
        let failed = || VcpuVerdict::NotAllRan(String::new());
        for (state, vcpus, expected) in [
            (KeptState::InForce, VcpuVerdict::AllRan, VerdictName::Ok),
            (KeptState::Unknown, VcpuVerdict::AllRan, VerdictName::Unknown),
            (KeptState::InForce, unknown(), VerdictName::Unknown),
            (KeptState::InForce, failed(), VerdictName::Fail),
            (KeptState::Unknown, failed(), VerdictName::Fail),
            (KeptState::ChangedBack, unknown(), VerdictName::Fail),
            (KeptState::ChangedByOthers, VcpuVerdict::AllRan, VerdictName::Fail),
        ] {
            assert_eq!(verify(state, vcpus).verdict(), expected, "{state:?}");
        }
    }

    #[test]
    fn refusals_count_where_the_operator_named_the_changes() {
        let refusal =
            Refusal { rule: "r".to_owned(), change: "c".to_owned(), why: String::new(), deferred: Vec::new() };
        let outcome = |refusals: Vec<Refusal>, done: &[usize], failed: &[usize], is_named: bool| {
            let effect = Effect::Write { path: "p".to_owned(), from: String::new(), to: String::new() };
            let step = Step { reasons: Vec::new(), effect };
            let steps = vec![step; done.len() + failed.len()];
            let plan = TunePlan { steps, refusals, conflicts: Vec::new() };
            let report = TunePlanReport::new(String::new(), None, &plan, &[], &[]);
            let failed = failed.iter().map(|&step| (step, String::new())).collect();
            let applied = Applied { done: done.to_vec(), failed, ..Applied::default() };
            TuneApplyReport::new(report, &applied).outcome(is_named)
        };
        let one = || vec![refusal.clone()];
        assert_eq!(outcome(one(), &[], &[], true), TuneApplyOutcome::Refused);
        assert_eq!(outcome(one(), &[], &[], false), TuneApplyOutcome::Complete);
        assert_eq!(outcome(one(), &[0], &[], true), TuneApplyOutcome::Partial);
        assert_eq!(outcome(Vec::new(), &[0], &[1], false), TuneApplyOutcome::Partial);
        assert_eq!(outcome(one(), &[], &[0], true), TuneApplyOutcome::Partial);
        assert_eq!(outcome(Vec::new(), &[0], &[], true), TuneApplyOutcome::Complete);
        assert_eq!(outcome(Vec::new(), &[], &[], true), TuneApplyOutcome::Complete, "it is in force already");
    }
}
