//! Whether QEMU's monitor answers.

use crate::decide::audit::facts::VmFacts;
use crate::decide::audit::{Judge, SettingRule};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, MissingReading, RuleInfo, RuleResult, Verdict};
use pagefold_base::identity::qemu_monitor::MonitorAnswers;
use pagefold_base::reading::Absent;
use pagefold_base::{Bytes, count_text};

pub(super) const MONITOR: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-monitor",
        source: "monitor:query-cpus-fast, monitor:query-memdev, monitor:query-hotpluggable-cpus",
        why: "The main loop of QEMU serves the monitor and emulated devices. If it does not answer within a second, it \
              is blocked, often by storage, and the guest's devices wait, too.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "answers within a second",
        details: SettingDetails {
            benefit: "virtual CPUs and memory that were plugged later are known, and threads without names",
            risk: "none: the questions change nothing",
            method: ApplyMethod::Manual,
            undo: "nothing was changed",
            counter: "time of the main loop in poll(2): /proc/PID/stack",
            versions: "QEMU 2.12 and later",
            citation: "QEMU: qapi/machine.json; docs/interop/qmp-spec.rst",
        },
    },
    judge: Judge::Vm(judge_monitor),
};

fn judge_monitor(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let answers = match &vm.monitor {
        _ if vm.definition.is_none() => return Ok(rule.not_applicable("the machine is not run by QEMU", "not QEMU")),
        None => return Ok(rule.not_applicable("the monitor was not asked", "not asked")),
        Some(Err(Absent::NotOnThisKernel)) => {
            return Ok(rule.not_applicable("the machine has no control monitor (-qmp)", "none"));
        }
        Some(Err(Absent::NotAsked(why))) => return Ok(rule.not_applicable("the monitor is left alone", why)),
        Some(answers) => answers.as_ref().and_then(|answers| {
            let MonitorAnswers { vcpus, backends, slots } = answers;
            Ok((vcpus.as_ref()?, backends.as_ref()?, slots.as_ref()?))
        }),
    };
    match answers {
        Ok((vcpus, backends, slots)) => {
            let bytes = backends.iter().fold(0, |sum: u64, backend| sum.saturating_add(backend.bytes));
            let plugged = count_text(vcpus.len(), "virtual CPU");
            let value = format!("{plugged}, {} more can be plugged; {}", slots.free, Bytes(bytes));
            Ok(rule.ok("the monitor answers", value))
        }
        Err(Absent::NoAnswer(why)) => Ok(rule
            .warn("the monitor does not answer", why)
            .remedy(["# see what the main thread of QEMU waits for, in its stack (as root):", &stack_command(vm)])
            .verify("pagefold doctor")),
        Err(why) => Err(MissingReading { reading_name: "QEMU's monitor".to_owned(), absent: why.clone() }),
    }
}

fn stack_command(vm: &VmFacts) -> String {
    format!("cat /proc/{}/stack", vm.process.pid)
}
