//! Each program of the table of conflicts is found among the processes, named in a plan, and not fought.

#![forbid(unsafe_code)]

use pagefold_base::{Pid, ProcessId};
use pagefold_doctor::decide::change::{SettingChange, VmOption};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_host::fake_host::FakeHost;
use pagefold_tune::apply::{ApplyScope, apply};
use pagefold_tune::decide::conflict::{find_placement_rivals, known_names};
use pagefold_tune::decide::{Proposal, TunePlan, plan};
use pagefold_tune::facts::{read_state, running_tuners};
use pagefold_tune::kept::{self, KeptState};
use std::collections::BTreeSet;

const SYSCTL: &str = "proc/sys/vm/swappiness";
const BALANCING: &str = "proc/sys/kernel/numa_balancing";
const HUGE_PAGES: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const KHUGEPAGED: &str = "sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs";
const GOVERNOR: &str = "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor";
const SCHEDULER: &str = "sys/block/sda/queue/scheduler";
const KSM: &str = "sys/kernel/mm/ksm/sleep_millisecs";
const IRQ: &str = "proc/irq/33/smp_affinity_list";
const HALT_POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
/// A setting that no program of the table writes.
const CLOCK: &str = "sys/devices/system/clocksource/clocksource0/current_clocksource";

/// Settings with the value of the host and the value that is proposed.
const SETTINGS: &[(&str, &str, &str)] = &[
    (SYSCTL, "60\n", "10"),
    (BALANCING, "1\n", "0"),
    (HUGE_PAGES, "always madvise [never]\n", "madvise"),
    (KHUGEPAGED, "10000\n", "1000"),
    (GOVERNOR, "powersave\n", "performance"),
    (SCHEDULER, "none [mq-deadline]\n", "none"),
    (KSM, "20\n", "100"),
    (IRQ, "0-7\n", "0-1"),
    (HALT_POLL, "400000\n", "200000"),
    (CLOCK, "hpet\n", "tsc"),
];

/// A program of the table as it runs, and what it writes.
struct Tool {
    name: &'static str,
    comm: &'static str,
    command: &'static [&'static str],
    /// How reports name it.
    program: &'static str,
    /// The settings that it writes now and then: they are changed, and it is named.
    writes: &'static [&'static str],
    /// The settings that it writes again and again: they are refused.
    repeats: &'static [&'static str],
    defines_machines: bool,
}

const fn ksm_tool(
    name: &'static str,
    comm: &'static str,
    command: &'static [&'static str],
    program: &'static str,
) -> Tool {
    Tool { name, comm, command, program, writes: &[], repeats: &[KSM], defines_machines: false }
}

const fn machine_tool(name: &'static str, command: &'static [&'static str], program: &'static str) -> Tool {
    Tool { name, comm: name, command, program, writes: &[], repeats: &[], defines_machines: true }
}

const TOOLS: &[Tool] = &[
    Tool {
        name: "tuned",
        comm: "tuned",
        command: &["/usr/bin/python3", "-Es", "/usr/sbin/tuned", "-l", "-P"],
        program: "tuned",
        writes: &[SYSCTL, BALANCING, HUGE_PAGES, KHUGEPAGED, GOVERNOR, SCHEDULER, KSM, HALT_POLL],
        repeats: &[],
        defines_machines: false,
    },
    ksm_tool("ksmtuned", "ksmtuned", &["/bin/bash", "/usr/sbin/ksmtuned"], "ksmtuned"),
    ksm_tool("ksmctl", "ksmctl", &["/usr/sbin/ksmctl", "start"], "ksmtuned"),
    Tool {
        name: "numad",
        comm: "numad",
        command: &["/usr/bin/numad", "-i", "15"],
        program: "numad",
        writes: &[KHUGEPAGED],
        repeats: &[],
        defines_machines: false,
    },
    Tool {
        defines_machines: true,
        ..ksm_tool(
            "virt-handler",
            "virt-handler",
            &["/usr/bin/virt-handler", "--port", "8443", "--hostname-override", "node1"],
            "KubeVirt (virt-handler)",
        )
    },
    ksm_tool("momd", "momd", &["/usr/bin/python3", "/usr/sbin/momd", "-c", "/etc/vdsm/mom.conf"], "oVirt MOM"),
    ksm_tool(
        "harvester-node-manager",
        "harvester-node-",
        &["harvester-node-manager", "start"],
        "Harvester (node-manager)",
    ),
    ksm_tool("ksm-throttler", "ksm-throttler", &["/usr/libexec/ksm-throttler/ksm-throttler"], "Kata ksm-throttler"),
    ksm_tool("kata-ksm-throttler", "kata-ksm-thrott", &["/usr/libexec/kata-ksm-throttler"], "Kata ksm-throttler"),
    ksm_tool("vc-throttler", "vc-throttler", &["/usr/libexec/vc-throttler"], "Kata ksm-throttler"),
    // Daemons of Proxmox replace their arguments by a title.
    machine_tool("pve-firewall", &["pve-firewall"], "Proxmox VE"),
    machine_tool("pvestatd", &["pvestatd"], "Proxmox VE"),
    machine_tool("pvedaemon", &["pvedaemon"], "Proxmox VE"),
    machine_tool("libvirtd", &["/usr/sbin/libvirtd", "--timeout", "120"], "libvirt"),
    machine_tool("virtqemud", &["/usr/sbin/virtqemud", "--timeout", "120"], "libvirt"),
    Tool {
        name: "irqbalance",
        comm: "irqbalance",
        command: &["/usr/sbin/irqbalance", "--foreground"],
        program: "irqbalance",
        writes: &[],
        repeats: &[IRQ],
        defines_machines: false,
    },
    Tool {
        name: "power-profiles-daemon",
        comm: "power-profiles-",
        command: &["/usr/libexec/power-profiles-daemon"],
        program: "power-profiles-daemon",
        writes: &[GOVERNOR],
        repeats: &[],
        defines_machines: false,
    },
];

fn put_process(host: &FakeHost, pid: u32, comm: &str, arguments: &[&str], uid: u32) {
    let zeros = |count| "0 ".repeat(count);
    let stat = format!("{pid} ({comm}) S 1 1 1 0 -1 0 {}20 0 1 0 1 {}0 0 0 0\n", zeros(8), zeros(16));
    host.put_file(&format!("proc/{pid}/stat"), &stat);
    host.put_file(&format!("proc/{pid}/cmdline"), &(arguments.join("\0") + "\0"));
    host.put_file(&format!("proc/{pid}/status"), &format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n"));
}

const MACHINE: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

fn host() -> FakeHost {
    let host = FakeHost::booted();
    SETTINGS.iter().for_each(|(path, text, _)| host.put_file(path, text));
    put_process(&host, 7, "qemu-system-x86", &["qemu-system-x86_64", "-name", "web", "-cpu", "qemu64"], 0);
    host
}

fn plan_of(host: &FakeHost, changes: Vec<SettingChange>) -> TunePlan {
    let facts = gather_host_facts(host, &[], &TrustPolicy::default());
    let state = read_state(host, &facts, &changes.iter().collect::<Vec<_>>(), &[]);
    let proposal =
        Proposal { rule: "rule".to_owned(), title: String::new(), why: String::new(), details: None, changes };
    plan(&[proposal], None, &state)
}

fn write(path: &str, value: &str) -> SettingChange {
    SettingChange::Write { path: path.to_owned(), value: value.to_owned() }
}

fn programs(plan: &TunePlan) -> Vec<&str> {
    plan.conflicts.iter().map(|conflict| conflict.program).collect()
}

#[test]
fn each_program_of_the_table_is_tested() {
    let known: BTreeSet<&str> = known_names().collect();
    assert_eq!(known, TOOLS.iter().map(|tool| tool.name).collect());
}

#[test]
fn programs_that_write_a_setting_are_named_and_not_fought() {
    for tool in TOOLS {
        let host = host();
        put_process(&host, 50, tool.comm, tool.command, 0);
        for (path, _, value) in SETTINGS {
            let plan = plan_of(&host, vec![write(path, value)]);
            let context = format!("{}, {path}: {plan:?}", tool.name);
            if tool.repeats.contains(path) {
                let [refusal] = &plan.refusals[..] else { panic!("{context}") };
                assert!(refusal.why.starts_with(tool.program) && plan.steps.is_empty(), "{context}");
                continue;
            }
            assert_eq!((plan.steps.len(), plan.refusals.len()), (1, 0), "{context}");
            let expected: &[&str] = if tool.writes.contains(path) { &[tool.program] } else { &[] };
            assert_eq!(programs(&plan), expected, "{context}");
        }
        let option = SettingChange::VmDefinition { vm: MACHINE, option: VmOption::HostCpuModel };
        let plan = plan_of(&host, vec![option]);
        assert_eq!(plan.steps.len(), 1, "{}: {plan:?}", tool.name);
        let expected: &[&str] = if tool.defines_machines { &[tool.program] } else { &[] };
        assert_eq!(programs(&plan), expected, "{}", tool.name);
        assert!(plan.conflicts.iter().all(|conflict| !conflict.remedy.is_empty()), "{}", tool.name);
    }
}

#[test]
fn numad_alone_is_a_rival_of_placements() {
    for tool in TOOLS {
        let host = host();
        put_process(&host, 50, tool.comm, tool.command, 0);
        let running = running_tuners(&host);
        assert_eq!(running, [tool.name]);
        let rivals = find_placement_rivals(&running).len();
        assert_eq!(rivals, usize::from(tool.name == "numad"), "{}", tool.name);
        let host = self::host();
        put_process(&host, 50, tool.comm, tool.command, 1000);
        assert_eq!(running_tuners(&host), [""; 0], "a process of a user");
    }
}

/// Any user may give a program that name, or edit its source.
#[test]
fn programs_of_users_and_other_programs_of_that_name_are_no_conflict() {
    for tool in TOOLS {
        let host = host();
        put_process(&host, 50, tool.comm, tool.command, 1000);
        put_process(&host, 51, "vim", &["vim", tool.name], 0);
        let plan = plan_of(&host, SETTINGS.iter().map(|(path, _, value)| write(path, value)).collect());
        assert_eq!(
            (plan.steps.len(), plan.refusals.len(), programs(&plan)),
            (SETTINGS.len(), 0, vec![]),
            "{}",
            tool.name
        );
    }
}

/// A program that starts later changes a setting back: that is reported, and the undo leaves it.
#[test]
fn values_that_a_program_writes_after_apply_are_drift() {
    for tool in TOOLS {
        for path in tool.writes.iter().chain(tool.repeats) {
            let (host, directory) = (host(), tempfile::tempdir().unwrap());
            let (_, _, value) = SETTINGS.iter().find(|(known, ..)| known == path).unwrap();
            let plan = plan_of(&host, vec![write(path, value), write(CLOCK, "tsc")]);
            assert_eq!(apply(&host, directory.path(), &plan, ApplyScope::Live).unwrap().done.len(), 2);
            put_process(&host, 50, tool.comm, tool.command, 0);
            host.put_file(path, "7777\n");
            let kept = kept::load(&host, directory.path()).unwrap();
            let state = |path: &str| kept.iter().find(|kept| kept.setting.as_deref() == Some(path)).unwrap().state;
            assert_eq!((state(path), state(CLOCK)), (KeptState::ChangedByOthers, KeptState::InForce), "{path}");
            let undone = kept::undo(&host, directory.path());
            assert!(undone.failed.len() == 1 && undone.failed[0].why.contains("another program"), "{undone:?}");
            assert_eq!(host.state().0[*path], "7777\n", "{} keeps its value", tool.name);
            assert_eq!(host.state().0[CLOCK], "hpet\n");
        }
    }
}
