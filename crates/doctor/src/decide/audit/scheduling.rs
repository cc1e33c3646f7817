//! The scheduler, isolated CPUs and interrupts of the host.

use super::facts::{SettingFacts, malformed};
use super::tuned::{self, EffectiveOption};
use super::{
    Judge, SettingRule, if_machines_are_known, is_overcommitted, online_cpus, require_command_lines, with_write,
};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::{IdSet, count_text};
use std::collections::BTreeSet;

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "dead-scheduler-knobs",
            source: "/etc/sysctl.conf, /etc/sysctl.d, /run/sysctl.d, /usr/lib/sysctl.d, /etc/tuned/active_profile, \
                     /etc/tuned/*/tuned.conf, /usr/lib/tuned/*/tuned.conf, /proc/sys/kernel, /sys/kernel/debug/sched",
            why: "Settings of the scheduler that newer kernels no longer have are ignored with a message at boot. \
                  What they were meant to tune is not tuned.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no setting of the scheduler that this kernel does not have",
            details: SettingDetails {
                benefit: "the configuration says what is in force",
                risk: "none: the lines have no effect",
                method: ApplyMethod::Manual,
                undo: "restore the lines",
                counter: "no such file below /proc/sys/kernel and /sys/kernel/debug/sched",
                versions: "most moved to debugfs in Linux 5.13; latency, min_granularity and wakeup_granularity went \
                           in 6.6",
                citation: "kernel/sched/debug.c; kernel/sched/fair.c (sysctl_sched_base_slice)",
            },
        },
        judge: Judge::Host(judge_dead_knobs),
    },
    SettingRule {
        rule: RuleInfo {
            id: "sched-autogroup",
            source: "/proc/sys/kernel/sched_autogroup_enabled, /proc/PID/cgroup",
            why: "Autogroup shares CPU time among sessions. A machine of many virtual CPUs in a session of its own \
                  gets no more than one shell. It affects processes in the root cgroup only.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "0 while machines run in the root cgroup",
            details: SettingDetails {
                benefit: "CPU time by the weights of threads and cgroups",
                risk: "interactive programs on the same host may wait longer",
                method: ApplyMethod::Live,
                undo: "write 1",
                counter: "none: autogroup shifts waiting from one session to another, and the host's sum stays; compare run \
                          delay in /proc/PID/task/TID/schedstat",
                versions: "Linux 2.6.38 and later, with CONFIG_SCHED_AUTOGROUP",
                citation: "kernel/sched/autogroup.c (task_wants_autogroup); sched(7)",
            },
        },
        judge: Judge::Host(judge_autogroup),
    },
    SettingRule {
        rule: RuleInfo {
            id: "sched-base-slice",
            source: "/sys/kernel/debug/sched/base_slice_ns, /sys/devices/system/cpu/online",
            why: "EEVDF lets a thread run for a slice before another one of equal weight takes its CPU. With short \
                  slices virtual CPUs are preempted more often, also while their guests hold a lock.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "while virtual CPUs outnumber CPUs, at least the kernel's default: 0.7 ms times 1 + log2 of \
                       the CPUs, of which at most 8 count",
            details: SettingDetails {
                benefit: "fewer switches between virtual CPUs, and fewer that spin for a lock whose holder does not \
                          run",
                risk: "a thread that wakes up waits longer for a busy CPU",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "ctxt in /proc/stat; run_delay in /proc/schedstat, and in /proc/PID/task/TID/schedstat",
                versions: "Linux 6.6 and later, with a mounted debugfs",
                citation: "kernel/sched/fair.c (sysctl_sched_base_slice, get_update_sysctl_factor)",
            },
        },
        judge: Judge::Host(judge_base_slice),
    },
    SettingRule {
        rule: RuleInfo {
            id: "preemption-model",
            source: "/sys/kernel/debug/sched/preempt, /sys/devices/system/cpu/online",
            why: "Under the model full, a thread that wakes up preempts kernel code at once, such as the exit of a \
                  virtual CPU or a vhost worker. The other models let it end first, with fewer switches.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "none, voluntary or lazy while virtual CPUs outnumber CPUs",
            details: SettingDetails {
                benefit: "fewer switches in the middle of exits, and more throughput of an over-committed host",
                risk: "longer wake-ups of threads that need a prompt answer",
                method: ApplyMethod::Live,
                undo: "write the name that was in parentheses",
                counter: "ctxt in /proc/stat; run_delay in /proc/schedstat, and in /proc/PID/task/TID/schedstat",
                versions: "Linux 5.12 and later with CONFIG_PREEMPT_DYNAMIC; lazy since 6.13",
                citation: "kernel/Kconfig.preempt; kernel/sched/debug.c (sched_dynamic_show)",
            },
        },
        judge: Judge::Host(judge_preemption),
    },
    SettingRule {
        rule: RuleInfo {
            id: "isolated-cpus",
            source: "/sys/devices/system/cpu/isolated, /sys/devices/system/cpu/nohz_full, /proc/PID/task/TID/status",
            why: "The scheduler puts nothing on isolated CPUs by itself, and does not balance between them. Isolated \
                  CPUs without a bound virtual CPU stay idle; several threads bound to several of them pile up on one.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "each isolated CPU has a virtual CPU bound to it alone",
            details: SettingDetails {
                benefit: "no CPU is lost, and bound virtual CPUs run undisturbed",
                risk: "CPUs that are no longer isolated run other work",
                method: ApplyMethod::Reboot,
                undo: "restore the boot parameters",
                counter: "LOC in /proc/interrupts; run delay of the threads",
                versions: "all kernels; nohz_full since 3.10",
                citation: "Documentation/admin-guide/kernel-parameters.txt (isolcpus=, nohz_full=)",
            },
        },
        judge: Judge::Host(judge_isolated),
    },
    SettingRule {
        rule: RuleInfo {
            id: "irq-affinity",
            source: "/proc/irq/*/effective_affinity_list, /proc/PID/task/TID/status",
            why: "An interrupt on a CPU that one virtual CPU has for itself makes the guest exit and wait.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no interrupt on CPUs to which single virtual CPUs are bound",
            details: SettingDetails {
                benefit: "steady latency in guests with CPUs of their own",
                risk: "interrupts meet on the remaining CPUs",
                method: ApplyMethod::Manual,
                undo: "write the old list to smp_affinity_list",
                counter: "/proc/interrupts",
                versions: "effective_affinity_list since Linux 4.13; isolcpus=managed_irq since 5.6",
                citation: "Documentation/core-api/irq/irq-affinity.rst; kernel/irq/proc.c",
            },
        },
        judge: Judge::Host(judge_interrupts),
    },
];

/// The directories of sysctl.d(5) that are read. One that cannot be listed may have files.
const SYSCTL_DIRECTORIES: [&str; 3] = ["etc/sysctl.d", "run/sysctl.d", "usr/lib/sysctl.d"];

/// The settings of the scheduler that files of sysctl.d set, with their files. `/` and `.` separate names (sysctl.d(5)).
fn configured_knobs(settings: &SettingFacts) -> Result<BTreeSet<(String, String)>, MissingReading> {
    let mut found = BTreeSet::new();
    for directory in SYSCTL_DIRECTORIES {
        settings.find_names(directory)?;
    }
    let is_configuration = |path: &&String| path.contains("sysctl.d/") || *path == "etc/sysctl.conf";
    for path in settings.files.keys().filter(is_configuration) {
        let text = settings.find_text(path)?.unwrap_or_default();
        for line in text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';'])) {
            let Some((name, _)) = line.split_once('=') else { continue };
            let name = name.trim().trim_start_matches('-').replace('/', ".");
            if let Some(knob) = name.strip_prefix("kernel.").filter(|knob| knob.starts_with("sched_")) {
                found.insert((knob.to_owned(), path.clone()));
            }
        }
    }
    Ok(found)
}

fn judge_dead_knobs(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let known = settings.find_names("proc/sys/kernel")?;
    let configured = configured_knobs(settings)?;
    let is_dead = |(knob, _): &&(String, String)| !known.contains(knob);
    let mut dead: Vec<String> =
        configured.iter().filter(is_dead).map(|(knob, path)| format!("kernel.{knob} in /{path}")).collect();
    let mut count = configured.len();
    // The plugin scheduler of tuned writes files of procfs, or of debugfs where procfs has none (`_get_sched_knob_path`).
    let options = tuned::active_profiles(settings)?.map(|profiles| profiles.options()).unwrap_or_default();
    for EffectiveOption { plugin, name, path, .. } in &options {
        let sysctl = name.replace('/', ".");
        let sysctl = sysctl.strip_prefix("kernel.").filter(|_| plugin == "sysctl").unwrap_or_default();
        if sysctl.starts_with("sched_") {
            count += 1;
            dead.extend((!known.iter().any(|known| known == sysctl)).then(|| format!("{name} in /{path}")));
        }
        if let Some(knob) = name.strip_prefix("sched_").filter(|_| plugin == "scheduler") {
            count += 1;
            let is_known = known.contains(name)
                || settings.find_names("sys/kernel/debug/sched")?.iter().any(|known| known == knob);
            dead.extend((!is_known).then(|| format!("{name} in /{path}")));
        }
    }
    if count == 0 {
        return Ok(rule.ok("no file configures the scheduler", "no kernel.sched_* in sysctl.d or a profile of tuned"));
    }
    if dead.is_empty() {
        return Ok(rule.ok("the kernel has each configured setting", format!("{count} settings")));
    }
    Ok(rule
        .warn("configured settings of the scheduler have no effect on this kernel", dead.join(", "))
        .remedy([
            "# remove the lines; see sched(7) and base_slice_ns in /sys/kernel/debug/sched for what replaced them",
            "# those of a profile in /usr/lib/tuned: in a copy of the profile below /etc/tuned",
        ])
        .verify("pagefold doctor"))
}

/// The default of a host with one CPU (`sysctl_sched_base_slice`, kernel/sched/fair.c): 0.7 ms since 6.15, 0.75 ms before.
const DEFAULT_SLICE_NS: u64 = 700_000;

/// CPUs at most by which the default grows (`get_update_sysctl_factor`).
const MAX_SCALING_CPUS: u32 = 8;

fn judge_base_slice(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = "sys/kernel/debug/sched/base_slice_ns";
    let Some(slice) = settings.find_number(path)? else {
        return Ok(rule.not_applicable("the kernel has no base slice, or debugfs is not mounted", "absent"));
    };
    let value = format!("base_slice_ns = {slice}");
    let cpus = online_cpus(settings)?.iter().count() as u32;
    let default = DEFAULT_SLICE_NS * u64::from(1 + cpus.clamp(1, MAX_SCALING_CPUS).ilog2());
    if slice >= default {
        return Ok(rule.ok("slices are not shorter than by default", value));
    }
    if !is_overcommitted(facts)? {
        return Ok(rule.ok("slices are short, and virtual CPUs do not outnumber CPUs", value));
    }
    Ok(with_write(rule.warn("short slices preempt virtual CPUs often", value), path, &default.to_string()))
}

/// The file lists the models that can be chosen, with the present one in parentheses.
fn judge_preemption(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = "sys/kernel/debug/sched/preempt";
    let Some(text) = settings.find_text(path)? else {
        return Ok(rule.not_applicable("the model cannot be chosen, or debugfs is not mounted", "absent"));
    };
    let mut models = text.split_whitespace();
    let present = models.clone().find_map(|model| model.strip_prefix('(')?.strip_suffix(')'));
    let present = present.ok_or_else(|| malformed(path, text))?;
    if present != "full" {
        return Ok(rule.ok("kernel code is not preempted at once", present));
    }
    if !is_overcommitted(facts)? {
        return Ok(rule.ok("the model is full, and virtual CPUs do not outnumber CPUs", present));
    }
    let Some(other) = models.find(|model| ["voluntary", "lazy"].contains(model)) else {
        return Ok(rule.not_applicable("the kernel has no other model for virtual machines", present));
    };
    let finding = rule.warn("threads that wake up preempt kernel code at once", present);
    Ok(with_write(finding, path, other)
        .remedy([format!("echo {other} > /{path}"), format!("# at each boot: the parameter preempt={other}")])
        .verify(format!("grep -q '({other})' /{path}")))
}

/// Only processes in the root group of the CPU controller are grouped by session.
fn judge_autogroup(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = "proc/sys/kernel/sched_autogroup_enabled";
    let Some(is_on) = settings.find_flag(path)? else {
        return Ok(rule.not_applicable("the kernel has no autogroups", "absent"));
    };
    let value = format!("sched_autogroup_enabled = {}", u8::from(is_on));
    if !is_on {
        return Ok(rule.ok("CPU time is not shared by session", value));
    }
    if settings.vms.is_empty() {
        return if_machines_are_known(rule.not_applicable("no virtual machine runs", value), facts);
    }
    let mut affected = 0;
    for process in facts.processes.iter().map(|facts| &facts.process) {
        if settings.vms.iter().any(|vm| vm.process == process.id) {
            let cgroup = require(&format!("/proc/{}/cgroup", process.id.pid), &process.cgroup)?;
            affected += usize::from(cgroup == "/");
        }
    }
    if affected == 0 {
        let title = "virtual machines have cgroups, so autogroups do not affect them";
        return if_machines_are_known(rule.ok(title, value), facts);
    }
    let title = format!("CPU time of {} is shared by session", count_text(affected, "virtual machine"));
    Ok(with_write(rule.warn(title, value), path, "0"))
}

/// A list of CPUs; the kernel shows an empty `nohz_full` as `(null)` (drivers/base/cpu.c).
fn find_cpus(settings: &SettingFacts, path: &str) -> Result<Option<IdSet>, MissingReading> {
    match settings.find_text(path)? {
        None => Ok(None),
        Some("" | "(null)") => Ok(Some(IdSet::default())),
        Some(text) => text.parse().map(Some).map_err(|_| malformed(path, text)),
    }
}

/// The allowed CPUs of each virtual CPU that may not run everywhere.
fn bound_vcpus(settings: &SettingFacts) -> Result<Vec<&IdSet>, MissingReading> {
    let online = online_cpus(settings)?;
    let mut bound = Vec::new();
    for vm in &settings.vms {
        let threads = vm.vcpu_threads()?.into_iter().map(|thread| &thread.allowed_cpus);
        bound.extend(threads.filter(|cpus| !online.is_subset(cpus)));
    }
    Ok(bound)
}

fn judge_isolated(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let isolated = find_cpus(settings, "sys/devices/system/cpu/isolated")?.unwrap_or_default();
    let tickless = find_cpus(settings, "sys/devices/system/cpu/nohz_full")?.unwrap_or_default();
    let reserved: IdSet = isolated.iter().chain(tickless.iter()).collect();
    if reserved.is_empty() {
        return Ok(rule.not_applicable("no CPU is isolated", "none"));
    }
    let value = format!("isolated {isolated}, nohz_full {tickless}");
    require_command_lines(facts)?;
    if settings.vms.is_empty() {
        return Ok(rule.not_applicable("no virtual machine runs", value));
    }
    let bound = bound_vcpus(settings)?;
    let unused: IdSet = reserved.iter().filter(|cpu| !bound.iter().any(|cpus| cpus.contains(*cpu))).collect();
    let spread = bound.iter().filter(|cpus| cpus.iter().filter(|cpu| isolated.contains(*cpu)).count() > 1).count();
    let title = if !unused.is_empty() {
        format!("no virtual CPU is bound to the isolated CPUs {unused}")
    } else if spread > 0 {
        format!("{} bound to several isolated CPUs, between which nothing balances", count_text(spread, "virtual CPU"))
    } else {
        return Ok(rule.ok("each isolated CPU has a virtual CPU", value));
    };
    Ok(rule
        .warn(title, value)
        .remedy([
            "# bind each virtual CPU to one isolated CPU (taskset -pc, virsh vcpupin),",
            "# or remove the CPUs from isolcpus= and nohz_full= and reboot",
        ])
        .verify("pagefold doctor"))
}

/// Interrupts that a driver manages stay where they are, but fire only for I/O of their CPU. They cannot be told from
/// the others, so the rule only informs.
fn judge_interrupts(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    const MAX_SHOWN: usize = 8;
    let settings = &facts.settings;
    if settings.vms.is_empty() {
        return if_machines_are_known(rule.not_applicable("no virtual machine runs", "none"), facts);
    }
    let single: IdSet =
        bound_vcpus(settings)?.into_iter().filter(|cpus| cpus.iter().count() == 1).flat_map(IdSet::iter).collect();
    if single.is_empty() {
        return if_machines_are_known(rule.not_applicable("no virtual CPU has a CPU for itself", "none"), facts);
    }
    let mut disturbing = Vec::new();
    for irq in settings.numbered("proc/irq", "")? {
        let path = format!("proc/irq/{irq}/effective_affinity_list");
        let cpus = find_cpus(settings, &path)?.unwrap_or_default();
        if cpus.iter().any(|cpu| single.contains(cpu)) {
            disturbing.push(irq.to_string());
        }
    }
    let value = format!("{} on the CPUs {single}", count_text(disturbing.len(), "interrupt"));
    if disturbing.is_empty() {
        return if_machines_are_known(rule.ok("interrupts are off the CPUs of bound virtual CPUs", value), facts);
    }
    let others: IdSet = online_cpus(settings)?.iter().filter(|cpu| !single.contains(*cpu)).collect();
    if others.is_empty() {
        return Ok(rule
            .warn("interrupts disturb bound virtual CPUs, and no other CPU is left for them", value)
            .remedy([
                "# leave one CPU to interrupts: let the virtual CPUs of one machine run on several CPUs (virsh vcpupin),",
                "# or start the machine with one virtual CPU less",
            ])
            .verify("pagefold doctor"));
    }
    let shown = disturbing[..disturbing.len().min(MAX_SHOWN)].join(", ");
    Ok(rule
        .warn("interrupts disturb bound virtual CPUs", value)
        .remedy([
            format!(
                "# write {others} to /proc/irq/NUMBER/smp_affinity_list: {shown}{}",
                if disturbing.len() > MAX_SHOWN { ", ..." } else { "" }
            ),
            "# interrupts that a driver manages (EIO) stay: they serve I/O of that CPU only; see isolcpus=managed_irq"
                .to_owned(),
            "# and let irqbalance spare the CPUs (IRQBALANCE_BANNED_CPULIST)".to_owned(),
        ])
        .verify("pagefold doctor"))
}
