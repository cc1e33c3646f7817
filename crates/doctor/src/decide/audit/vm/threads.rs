//! Whether the virtual CPUs of a machine get CPUs to run on.

use super::UNDO;
use crate::decide::audit::facts::VmFacts;
use crate::decide::audit::{Judge, SettingRule, online_cpus};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::reading::Absent;
use pagefold_base::{IdSet, count_text};

pub(super) const THROTTLED: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-cpu-throttled",
        source: "/sys/fs/cgroup/.../cpu.max, /sys/fs/cgroup/.../cpu.stat",
        why: "A cgroup that used up its quota stops all of its virtual CPUs until the period ends, also one that holds \
              a lock. In the guest that looks like steal time and hanging tasks.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
    },
    expected: "no limit, or throttled in at most 5 % of the periods",
    details: SettingDetails {
        benefit: "no pauses of tens of milliseconds in the guest",
        risk: "the machine may use more CPU time than its owner paid for; use cpu.weight",
        method: ApplyMethod::Live,
        undo: "write the limit that was there",
        counter: "nr_throttled in cpu.stat",
        versions: "cgroup v2",
        citation: "Documentation/admin-guide/cgroup-v2.rst (cpu.max); Documentation/scheduler/sched-bwc.rst",
    },
    judge: Judge::Vm(judge_throttled),
};

pub(super) const STACKED: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-stacked-vcpus",
        source: "/proc/PID/task/TID/status",
        why: "Virtual CPUs of one machine that share a CPU never run at the same time: one that waits for a lock keeps \
              the one that holds it from running.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
    },
    expected: "as many CPUs as virtual CPUs, and no two bound to one CPU",
    details: SettingDetails {
        benefit: "locks in the guest are held for microseconds instead of time slices",
        risk: "the machine takes CPU time from others",
        method: ApplyMethod::Live,
        undo: UNDO_AFFINITY,
        counter: "run delay in /proc/PID/task/TID/schedstat",
        versions: "all kernels",
        citation: "kernel/sched/core.c (yield_to); Sukwong and Kim, Is co-scheduling too expensive for SMP VMs?, \
                   EuroSys 2011",
    },
    judge: Judge::Vm(judge_stacked),
};

const UNDO_AFFINITY: &str = "restore the affinity of the threads";

/// A smaller share of throttled periods is a short burst.
const MAX_THROTTLED_PERCENT: u64 = 5;

fn judge_throttled(rule: &RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    if vm.throttling == Err(Absent::NotOnThisKernel) {
        return Ok(rule.not_applicable("the host has no cpu.max: limits of cgroup v1 are not read", "absent"));
    }
    let Some(limit) = require("cpu.max of its cgroup", &vm.throttling)? else {
        return Ok(rule.ok("no cgroup limits the CPU time of the machine", "max"));
    };
    // In steps of ten, so that machines with nearly equal shares are shown together.
    let tenths = limit.throttled_periods.saturating_mul(10).checked_div(limit.periods).unwrap_or(0).min(9);
    let value = format!(
        "cpu.max {} {}, throttled in {}-{} % of the periods",
        limit.quota,
        limit.period,
        tenths * 10,
        tenths * 10 + 10
    );
    if limit.throttled_periods.saturating_mul(100) <= limit.periods.saturating_mul(MAX_THROTTLED_PERCENT) {
        return Ok(rule.ok("the limit of its cgroup does not stop the machine", value));
    }
    Ok(rule
        .warn("the limit of its cgroup stops the machine", value)
        .remedy([
            "# raise the limit, or use cpu.weight instead (virsh schedinfo NAME --set vcpu_quota=-1):".to_owned(),
            format!("# write max to cpu.max of the cgroup {}", limit.cgroup.escape_debug()),
        ])
        .verify("pagefold doctor"))
}

fn judge_stacked(rule: &RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let vcpus = vm.vcpu_threads()?;
    if vcpus.len() < 2 {
        return Ok(rule.not_applicable("one virtual CPU, or threads without names", count_text(vcpus.len(), "thread")));
    }
    let allowed: IdSet = vcpus.iter().flat_map(|thread| thread.allowed_cpus.iter()).collect();
    let count = allowed.iter().count();
    let value = format!("{} on {} ({allowed})", count_text(vcpus.len(), "virtual CPU"), count_text(count, "CPU"));
    let single: Vec<u32> = vcpus
        .iter()
        .filter_map(|thread| {
            let mut cpus = thread.allowed_cpus.iter();
            cpus.next().filter(|_| cpus.next().is_none())
        })
        .collect();
    let bound: IdSet = single.iter().copied().collect();
    if single.len() > bound.iter().count() {
        return Ok(rule.warn("virtual CPUs are bound to one CPU together", value).remedy(REMEDY).verify(VERIFY));
    }
    if vcpus.len() <= count {
        return Ok(rule.ok("each virtual CPU can have a CPU", value));
    }
    if count < online_cpus(&facts.settings)?.iter().count() {
        return Ok(rule.warn("virtual CPUs share fewer CPUs than there are", value).remedy(REMEDY).verify(VERIFY));
    }
    Ok(rule
        .warn("the machine has more virtual CPUs than the host has CPUs", value)
        .remedy([format!(
            "# give the machine at most {}, then start it again; undo: {UNDO}",
            count_text(count, "virtual CPU")
        )])
        .verify(VERIFY))
}

const REMEDY: [&str; 1] = ["# let each virtual CPU run on other CPUs too: taskset -pc CPUS TID, or virsh vcpupin"];
const VERIFY: &str = "pagefold doctor";
