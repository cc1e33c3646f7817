//! What the agent in a guest tells: its clock, its idle loop, stolen time, CPUs and timer.
//!
//! A guest writes its answers itself, so a finding about a guest is as true as the guest. Without an answer a rule is
//! `unknown`, with the reason. A guest that is not Linux has only the rule about CPUs.

use super::facts::{GuestFacts, VmFacts, malformed_in_guest};
use super::{Judge, SettingRule, is_overcommitted};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{Finding, HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::identity::vm_definition::VmDefinition;
use pagefold_base::reading::{Absent, Reading};

const CURRENT_CLOCK: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
const AVAILABLE_CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
const IDLE_DRIVER: &str = "/sys/devices/system/cpu/cpuidle/current_driver";
const CPUINFO: &str = "/proc/cpuinfo";
const VERIFY: &str = "pagefold doctor --guest-agent --topic guest";

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "guest-clocksource",
            source: "guest:/sys/devices/system/clocksource/clocksource0/current_clocksource, guest:/proc/cpuinfo",
            why: "With hpet or acpi_pm each reading of the time in the guest is an exit to QEMU; jiffies advance only \
                  with the timer. tsc and kvm-clock are read without an exit.",
            needs_ksm: false,
            verdicts: Verdict::ALL,
            expected: "tsc or kvm-clock; tsc where the guest's CPU has an invariant TSC",
            details: SettingDetails {
                benefit: "reading the time takes tens of nanoseconds instead of microseconds",
                risk: "with a TSC that is not stable, time may jump; a machine with an invariant TSC migrates only \
                       to hosts with the same frequency",
                method: ApplyMethod::Manual,
                undo: "write the clock that was there in the guest",
                counter: "time of clock_gettime in the guest; exits in /sys/kernel/debug/kvm/PID-FD",
                versions: "Linux guests on x86",
                citation: "kernel/time/clocksource.c; arch/x86/kernel/kvmclock.c (kvmclock_init); \
                           arch/x86/kernel/tsc.c",
            },
        },
        judge: Judge::Guest(judge_clocksource),
    },
    SettingRule {
        rule: RuleInfo {
            id: "guest-haltpoll",
            source: "guest:/sys/devices/system/cpu/cpuidle/current_driver, /sys/module/kvm/parameters/halt_poll_ns, \
                     /proc/PID/cmdline",
            why: "The driver haltpoll polls in the guest before a CPU halts. If the guest cannot turn off polling by \
                  KVM (kvm-poll-control), both poll, one after the other. On an over-committed host polling takes CPUs \
                  from other guests.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "not haltpoll on an over-committed host; with haltpoll, kvm-poll-control on or halt_poll_ns 0",
            details: SettingDetails {
                benefit: "idle virtual CPUs use less CPU time of the host",
                risk: "wake-ups of the guest take longer without polling",
                method: ApplyMethod::Manual,
                undo: "load cpuidle-haltpoll again in the guest, or restore the definition of the machine",
                counter: "halt_poll_success_ns and halt_poll_fail_ns in /sys/kernel/debug/kvm/PID-FD; CPU time of QEMU",
                versions: "Linux 5.4 and later in the guest, QEMU 4.2 and later",
                citation: "Documentation/virt/guest-halt-polling.rst; arch/x86/kernel/kvm.c (arch_haltpoll_enable)",
            },
        },
        judge: Judge::Guest(judge_haltpoll),
    },
    SettingRule {
        rule: RuleInfo {
            id: "guest-steal",
            source: "guest:/proc/stat",
            why: "Stolen time is time in which a virtual CPU had work and waited for a CPU of the host. Locks that it \
                  holds meanwhile delay the whole guest.",
            needs_ksm: false,
            verdicts: Verdict::ALL,
            expected: "at most 10 % of the CPU time since the guest's boot",
            details: SettingDetails {
                benefit: "work in the guest takes the time that its CPUs need, and little more",
                risk: "fewer virtual CPUs for each CPU of the host",
                method: ApplyMethod::Manual,
                undo: "give the machine the virtual CPUs, weights and CPUs of the host that it had",
                counter: "st in vmstat of the guest; run delay in /proc/PID/task/TID/schedstat",
                versions: "Linux guests with kvm-steal-time, which QEMU turns on by default",
                citation: "fs/proc/stat.c; arch/x86/kernel/kvm.c (kvm_steal_clock); \
                           Documentation/virt/kvm/x86/msr.rst (MSR_KVM_STEAL_TIME)",
            },
        },
        judge: Judge::Guest(judge_steal),
    },
    SettingRule {
        rule: RuleInfo {
            id: "guest-cpus-online",
            source: "guest:guest-get-vcpus, /proc/PID/task/TID/stat, /proc/PID/cmdline",
            why: "A guest that does not bring up a CPU is slower than it is defined, and nothing on the host shows it: \
                  guests have booted with one CPU after a change of EPT.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_WARN,
            expected: "each virtual CPU of the machine is online in the guest",
            details: SettingDetails {
                benefit: "the guest uses all CPUs that it is defined with",
                risk: "a guest may have taken a CPU offline on purpose",
                method: ApplyMethod::Manual,
                undo: "write 0 to /sys/devices/system/cpu/cpuN/online in the guest",
                counter: "nproc in the guest; guest time of each virtual CPU (pagefold tune verify)",
                versions: "all versions of QEMU's guest agent since 1.6",
                citation: "QEMU: qga/qapi-schema.json (guest-get-vcpus)",
            },
        },
        judge: Judge::Guest(judge_cpus),
    },
    SettingRule {
        rule: RuleInfo {
            id: "guest-timer-frequency",
            source: "guest:/boot/config-RELEASE",
            why: "Each tick of the timer is an exit. It is mostly moot: without a periodic timer, idle CPUs have no \
                  ticks, and those of a busy CPU take well below a percent of it. A periodic timer of 1000 Hz also \
                  wakes idle guests on an over-committed host.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no periodic timer of 1000 Hz on an over-committed host",
            details: SettingDetails {
                benefit: "idle guests do not wake up 1000 times a second for each virtual CPU",
                risk: "another kernel in the guest",
                method: ApplyMethod::Manual,
                undo: "boot the kernel that was there",
                counter: "LOC in /proc/interrupts of the guest; exits in /sys/kernel/debug/kvm/PID-FD",
                versions: "Linux guests whose distribution keeps the configuration in /boot",
                citation: "kernel/Kconfig.hz; kernel/time/Kconfig (HZ_PERIODIC, NO_HZ_IDLE)",
            },
        },
        judge: Judge::Guest(judge_timer_frequency),
    },
];

/// Judges a guest by its answers, or tells why there are none.
pub(super) fn judge(
    rule: &'static RuleInfo,
    judge: fn(&'static RuleInfo, &VmFacts, &GuestFacts, &HostFacts) -> RuleResult,
    vm: &VmFacts,
    guest: &Reading<GuestFacts>,
    facts: &HostFacts,
) -> RuleResult {
    let result = match guest {
        Ok(guest) => judge(rule, vm, guest, facts),
        Err(Absent::NotOnThisKernel) => Ok(rule.not_applicable(
            "the command line of QEMU has no channel of the guest agent, or it was not recorded",
            "absent",
        )),
        Err(absent) => Err(MissingReading { reading_name: "the guest agent".to_owned(), absent: absent.clone() }),
    };
    result.or_else(|missing| {
        let finding = rule.unknown(&missing, "pagefold doctor --guest-agent");
        Ok(match missing.absent {
            Absent::NoAnswer(_) => finding.remedy([REMEDY_WITHOUT_ANSWER]),
            Absent::NotAsked(_) => finding.remedy([remedy_for_libvirt(vm)]),
            _ => finding,
        })
    })
}

/// The command that asks this machine only, so it also helps if other machines of libvirt did not answer.
fn remedy_for_libvirt(vm: &VmFacts) -> String {
    let pid = vm.process.pid;
    format!(
        "pagefold doctor --libvirt-agent --topic guest --pid {pid} # libvirt marks the machine as tainted until it ends"
    )
}

const REMEDY_WITHOUT_ANSWER: &str =
    "# check in the guest that qemu-guest-agent runs and which commands it allows, and that no other program uses it";

/// The definition of a machine that uses KVM, or why the rule does not apply.
fn require_kvm<'a>(
    rule: &'static RuleInfo,
    vm: &'a VmFacts,
) -> Result<Result<&'a VmDefinition, Finding>, MissingReading> {
    let Some(definition) = &vm.definition else {
        return Ok(Err(rule.not_applicable("the monitor is not QEMU", "not QEMU")));
    };
    let definition = require("the definition of the machine", definition)?;
    if !definition.kvm {
        return Ok(Err(rule.not_applicable("the machine does not use KVM", "not KVM")));
    }
    Ok(Ok(definition))
}

/// The finding for a file that a guest does not have.
fn no_file(rule: &'static RuleInfo, guest: &GuestFacts, path: &str) -> Finding {
    match &guest.system {
        Ok(system) if !system.is_linux() => rule.not_applicable("the guest is not Linux", system.id.clone()),
        _ => rule.not_applicable(format!("the guest has no {path}"), "absent"),
    }
}

/// A CPU whose TSC has these flags keeps its rate in all states, and the guest's kernel prefers its TSC to kvm-clock
/// then (arch/x86/kernel/kvmclock.c, `kvmclock_init`).
const INVARIANT_TSC: [&str; 2] = ["constant_tsc", "nonstop_tsc"];

fn judge_clocksource(rule: &'static RuleInfo, vm: &VmFacts, guest: &GuestFacts, _: &HostFacts) -> RuleResult {
    if let Err(finding) = require_kvm(rule, vm)? {
        return Ok(finding);
    }
    let Some(clock) = guest.find_word(CURRENT_CLOCK)? else { return Ok(no_file(rule, guest, CURRENT_CLOCK)) };
    match clock {
        "hpet" | "acpi_pm" | "pit" | "jiffies" | "refined-jiffies" => Ok(rule
            .fail("each reading of the time in the guest is slow", clock)
            .remedy([
                "# in the guest, remove clocksource=, notsc and no-kvmclock from the kernel command line, then reboot it",
                "# if the machine has kvmclock=off or +invtsc, see the finding vm-clock",
            ])
            .verify(VERIFY)),
        "kvm-clock" => judge_kvm_clock(rule, guest),
        "tsc" | "hyperv_clocksource_tsc_page" | "arch_sys_counter" | "timebase" | "tod" | "riscv_clocksource" => {
            Ok(rule.ok("the guest reads the time without an exit", clock))
        }
        _ => Ok(rule.not_applicable("the clock of the guest is not known", clock)),
    }
}

fn judge_kvm_clock(rule: &'static RuleInfo, guest: &GuestFacts) -> RuleResult {
    let Some(cpuinfo) = guest.find_file(CPUINFO)? else { return Ok(no_file(rule, guest, CPUINFO)) };
    let cpuinfo = String::from_utf8_lossy(cpuinfo);
    let is_flags = |line: &&str| line.split_once(':').is_some_and(|(name, _)| name.trim() == "flags");
    let Some(flags) = cpuinfo.lines().find(is_flags) else { return Err(malformed_in_guest(CPUINFO, &cpuinfo)) };
    if !INVARIANT_TSC.iter().all(|flag| flags.split_whitespace().any(|known| known == *flag)) {
        return Ok(rule.ok("the guest reads the time without an exit", "kvm-clock"));
    }
    let Some(available) = guest.find_file(AVAILABLE_CLOCKS)? else {
        return Ok(no_file(rule, guest, AVAILABLE_CLOCKS));
    };
    let is_available = String::from_utf8_lossy(available).split_whitespace().any(|clock| clock == "tsc");
    let instruction = if is_available {
        "# in the guest: echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, and remove \
         clocksource=kvm-clock from its kernel command line"
    } else {
        "# in the guest: see why its kernel found the TSC to be unstable (dmesg | grep -i -e tsc -e clocksource)"
    };
    Ok(rule
        .warn("the guest has an invariant TSC and does not use it", "kvm-clock, with constant_tsc and nonstop_tsc")
        .remedy([instruction])
        .verify(VERIFY))
}

/// Whether the guest can turn off polling by KVM: QEMU offers it with the models `host` and `max`, and with other
/// models only if it is turned on.
fn has_poll_control(definition: &VmDefinition) -> bool {
    let is_host_model = matches!(definition.cpu_model.as_deref(), Some("host" | "max"));
    definition.cpu_features.get("kvm-poll-control").copied().unwrap_or(is_host_model)
}

fn judge_haltpoll(rule: &'static RuleInfo, vm: &VmFacts, guest: &GuestFacts, facts: &HostFacts) -> RuleResult {
    let definition = match require_kvm(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let Some(driver) = guest.find_word(IDLE_DRIVER)? else { return Ok(no_file(rule, guest, IDLE_DRIVER)) };
    if driver != "haltpoll" {
        return Ok(rule.ok("the guest does not poll before it halts", driver));
    }
    let settings = &facts.settings;
    let polled = settings.find_number("sys/module/kvm/parameters/halt_poll_ns")?.unwrap_or(0);
    let value = format!("haltpoll in the guest, halt_poll_ns = {polled} on the host");
    if is_overcommitted(facts)? {
        return Ok(rule
            .warn("the guest polls while virtual CPUs outnumber CPUs", value)
            .remedy(["# in the guest: rmmod cpuidle-haltpoll, and keep it from being loaded at boot"])
            .verify(VERIFY));
    }
    if polled == 0 || has_poll_control(definition) {
        return Ok(rule.ok("only the guest polls, and virtual CPUs do not outnumber CPUs", value));
    }
    Ok(rule
        .warn("the guest and KVM poll, one after the other", value)
        .remedy(["# add kvm-poll-control=on to -cpu, then start the machine again"])
        .verify(VERIFY))
}

/// Shares of all CPU time, idle time included: above the first a guest waits for more than a tenth of its time, above
/// the second for nearly a third.
const WARN_STEAL_PERCENT: f64 = 10.0;
const FAIL_STEAL_PERCENT: f64 = 30.0;

fn judge_steal(rule: &'static RuleInfo, vm: &VmFacts, guest: &GuestFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_kvm(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    if definition.cpu_features.get("kvm-steal-time") == Some(&false) {
        return Ok(rule.not_applicable("the guest is not told its stolen time", "kvm-steal-time=off"));
    }
    let percent = match &guest.steal_percent {
        Err(Absent::NotOnThisKernel) => return Ok(no_file(rule, guest, "/proc/stat")),
        percent => *require("/proc/stat in the guest", percent)?,
    };
    let value = format!("{percent:.1} % of the CPU time since the guest's boot");
    let finding = match percent {
        _ if percent > FAIL_STEAL_PERCENT => rule.fail("the guest's CPUs waited long for CPUs of the host", value),
        _ if percent > WARN_STEAL_PERCENT => rule.warn("the guest's CPUs waited for CPUs of the host", value),
        _ => return Ok(rule.ok("the guest's CPUs seldom waited for CPUs of the host", value)),
    };
    Ok(finding
        .remedy([
            "# see vm-cpu-throttled and vm-stacked-vcpus; move machines away, or give them fewer virtual CPUs",
            "# the share is since boot: see st in vmstat 1 of the guest for the present",
        ])
        .verify(VERIFY))
}

fn judge_cpus(rule: &'static RuleInfo, vm: &VmFacts, guest: &GuestFacts, _: &HostFacts) -> RuleResult {
    let known = require("guest-get-vcpus in the guest", &guest.vcpus)?;
    let defined = vm.vcpu_count()?;
    let (online, offline) = (u64::from(known.online), u64::from(known.offline));
    let value = format!("{online} online and {offline} offline in the guest, {defined} of the machine");
    if online >= defined {
        return Ok(rule.ok("all virtual CPUs of the machine are online in the guest", value));
    }
    let remedy = if online + offline >= defined {
        "# in the guest: echo 1 > /sys/devices/system/cpu/cpuN/online for each CPU that is offline"
    } else {
        "# in the guest: see why CPUs did not come up (dmesg | grep -i smp; maxcpus=, nr_cpus= and nosmp on its kernel \
         command line), then reboot it"
    };
    Ok(rule.fail("the guest uses fewer CPUs than the machine has", value).remedy([remedy]).verify(VERIFY))
}

fn judge_timer_frequency(rule: &'static RuleInfo, _: &VmFacts, guest: &GuestFacts, facts: &HostFacts) -> RuleResult {
    const NAME: &str = "/boot/config-RELEASE";
    let lines = match &guest.timer_configuration {
        Err(Absent::NotOnThisKernel) => return Ok(no_file(rule, guest, NAME)),
        lines => require("/boot/config-RELEASE in the guest", lines)?,
    };
    let text = String::from_utf8_lossy(lines);
    let frequency = text.lines().find_map(|line| line.strip_prefix("CONFIG_HZ=")?.parse::<u32>().ok());
    let frequency = frequency.ok_or_else(|| malformed_in_guest(NAME, &text))?;
    let is_on = |name: &str| text.lines().any(|line| line == name);
    let is_periodic = is_on("CONFIG_HZ_PERIODIC=y");
    if !is_periodic && !is_on("CONFIG_NO_HZ_IDLE=y") && !is_on("CONFIG_NO_HZ_FULL=y") {
        return Err(malformed_in_guest(NAME, &text));
    }
    let value = format!("{frequency} Hz, {}", if is_periodic { "periodic" } else { "no ticks while idle" });
    if !is_periodic || frequency < MAX_PERIODIC_HZ {
        return Ok(rule.ok("the guest's timer costs little", value));
    }
    if !is_overcommitted(facts)? {
        return Ok(rule.ok("virtual CPUs do not outnumber CPUs", value));
    }
    Ok(rule
        .warn("the guest's timer wakes idle virtual CPUs", value)
        .remedy(["# in the guest: boot a kernel with CONFIG_NO_HZ_IDLE=y"])
        .verify(VERIFY))
}

/// The highest frequency that kernel/Kconfig.hz offers.
const MAX_PERIODIC_HZ: u32 = 1000;
