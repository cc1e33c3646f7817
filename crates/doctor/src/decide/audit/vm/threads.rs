//! Whether the virtual CPUs of a machine get CPUs to run on.

use super::UNDO;
use crate::decide::audit::facts::{VmFacts, VmThread};
use crate::decide::audit::{Judge, SettingRule, online_cpus};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::reading::Absent;
use pagefold_base::{IdSet, count_text};
use std::collections::BTreeSet;

pub(super) const THROTTLED: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-cpu-throttled",
        source: "/sys/fs/cgroup/.../cpu.max, /sys/fs/cgroup/.../cpu.stat",
        why: "A cgroup that used up its quota stops all of its virtual CPUs until the period ends, also one that holds \
              a lock. In the guest that looks like steal time and hanging tasks.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
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
    },
    judge: Judge::Vm(judge_throttled),
};

pub(super) const STACKED: SettingRule = SettingRule {
    rule: RuleInfo {
        id: "vm-stacked-vcpus",
        source: "/proc/PID/task/TID/status",
        why: "Virtual CPUs that share a CPU never run at the same time: one that waits for a lock keeps the one that \
              holds it from running.",
        needs_ksm: false,
        verdicts: Verdict::ALL_BUT_FAIL,
        expected: "as many CPUs as virtual CPUs, also for those that are bound; no two bound to one CPU while others \
                   have none",
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
    },
    judge: Judge::Vm(judge_stacked),
};

const UNDO_AFFINITY: &str = "restore the affinity of the threads";

/// A smaller share of throttled periods is a short burst.
const MAX_THROTTLED_PERCENT: u64 = 5;

fn judge_throttled(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
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

/// More virtual CPUs than CPUs are allowed on one set of CPUs: Hall's condition, by the sets to which virtual CPUs are bound
/// and by all of them together. CPUs that are offline run nothing.
fn judge_stacked(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let vcpus = vm.vcpu_threads()?;
    if vcpus.is_empty() {
        return Ok(rule.not_applicable("its threads have no names", "0 threads"));
    }
    let online = online_cpus(&facts.settings)?;
    let allowed: Vec<IdSet> = vcpus.iter().map(|thread| thread.allowed_cpus.intersection(&online)).collect();
    let union: IdSet = allowed.iter().flat_map(IdSet::iter).collect();
    let count = union.iter().count();
    let value = format!("{} on {} ({union})", count_text(vcpus.len(), "virtual CPU"), count_text(count, "CPU"));
    // The smallest set first: what is bound together most tightly.
    let mut sets: Vec<&IdSet> = allowed.iter().collect::<BTreeSet<_>>().into_iter().collect();
    sets.sort_by_key(|set| set.iter().count());
    for set in sets.into_iter().filter(|set| !set.is_empty() && set.iter().count() < count) {
        let size = set.iter().count();
        let bound = allowed.iter().filter(|cpus| cpus.is_subset(set)).count();
        if bound > size {
            let title = match size {
                1 => "virtual CPUs are bound to one CPU together",
                _ => "virtual CPUs share fewer CPUs than there are",
            };
            let value = format!("{bound} of {value}: on {} only ({set})", count_text(size, "CPU"));
            return Ok(rule.warn(title, value).remedy(REMEDY).verify(VERIFY));
        }
    }
    if vcpus.len() > 1 && vcpus.len() > count && count < online.iter().count() {
        let title = match count {
            1 => "virtual CPUs are bound to one CPU together",
            _ => "virtual CPUs share fewer CPUs than there are",
        };
        return Ok(rule.warn(title, value).remedy(REMEDY).verify(VERIFY));
    }
    if let Some(shared) = find_shared_cpu(vm, &online, facts)? {
        let title = "virtual CPUs of two machines are bound to one CPU, and other CPUs have none";
        return Ok(rule.warn(title, shared).remedy(REMEDY).verify(VERIFY));
    }
    if vcpus.len() < 2 {
        return Ok(rule.not_applicable("the machine has one virtual CPU", value));
    }
    if vcpus.len() <= count {
        return Ok(rule.ok("each virtual CPU can have a CPU", value));
    }
    Ok(rule
        .warn("the machine has more virtual CPUs than the host has CPUs", value)
        .remedy([format!(
            "# give the machine at most {}, then start it again; undo: {UNDO}",
            count_text(count, "virtual CPU")
        )])
        .verify(VERIFY))
}

/// The CPU on which a thread must run; `None` if there are several.
fn only_cpu(thread: &VmThread) -> Option<u32> {
    let mut cpus = thread.allowed_cpus.iter();
    cpus.next().filter(|_| cpus.next().is_none())
}

/// A CPU to which a virtual CPU of this machine and one of another machine are bound, while no virtual CPU is bound to
/// some other CPU: the CPU and both machines.
fn find_shared_cpu(vm: &VmFacts, online: &IdSet, facts: &HostFacts) -> Result<Option<String>, MissingReading> {
    let own: IdSet = vm.vcpu_threads()?.into_iter().filter_map(only_cpu).collect();
    if own.is_empty() {
        return Ok(None);
    }
    let (mut used, mut shared) = (own.iter().collect::<BTreeSet<u32>>(), None);
    for other in facts.settings.vms.iter().filter(|other| other.process != vm.process) {
        // It has ended.
        if other.threads == Err(Absent::Vanished) {
            continue;
        }
        let bound: IdSet = other.vcpu_threads()?.into_iter().filter_map(only_cpu).collect();
        if let (None, Some(cpu)) = (&shared, bound.intersection(&own).iter().next()) {
            // The same text for both machines.
            let mut names = [vm, other].map(|vm| (vm.process, vm.name.escape_debug().to_string()));
            names.sort();
            shared = Some(format!("CPU {cpu}: {} and {}", names[0].1, names[1].1));
        }
        used.extend(bound.iter());
    }
    Ok(shared.filter(|_| online.iter().any(|cpu| !used.contains(&cpu))))
}

const REMEDY: [&str; 1] = ["# let each virtual CPU run on other CPUs too: taskset -pc CPUS TID, or virsh vcpupin"];
const VERIFY: &str = "pagefold doctor";
