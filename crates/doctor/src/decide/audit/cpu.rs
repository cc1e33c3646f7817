//! Clock, frequency, idle states and hardware threads of the host's CPUs.

use super::facts::SettingFacts;
use super::{Judge, SettingRule, has_cpu_flag, if_machines_are_known, is_virtual, with_boot_parameter, with_write};
use crate::decide::change::{ApplyMethod, SettingChange, SettingDetails};
use crate::decide::{HostFacts, RuleInfo, RuleResult, Verdict};
use std::collections::{BTreeMap, BTreeSet};

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "host-clocksource",
            source: "/sys/devices/system/clocksource/clocksource0/current_clocksource",
            why: "Guests get the fast clock kvmclock only while the host uses the TSC. With hpet or acpi_pm each \
                  reading of the time in the host is a slow access to a device, and in a guest a system call.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "tsc",
            details: SettingDetails {
                benefit: "reading the time takes tens of nanoseconds instead of microseconds, in the host and in \
                          guests",
                risk: "on a host whose TSC the kernel found to be unstable, time may jump",
                method: ApplyMethod::Live,
                undo: "write the clock that was there",
                counter: "none: the kernel does not count how often the clock is read; measure clock_gettime",
                versions: "all kernels on x86",
                citation: "kernel/time/clocksource.c; arch/x86/kvm/x86.c (pvclock_update_vm_gtod_copy)",
            },
        },
        judge: Judge::Host(judge_clocksource),
    },
    SettingRule {
        rule: RuleInfo {
            id: "cpu-governor",
            source: "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
            why: "A guest's load does not show in its short runs, so governors that follow load clock a busy guest \
                  down.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "performance, or powersave of a driver that has no others than these two",
            details: SettingDetails {
                benefit: "steady speed of guests and shorter wake-ups",
                risk: "more power; less boost for single CPUs where the power budget is shared",
                method: ApplyMethod::Live,
                undo: "write the governor that was there",
                counter: "scaling_cur_freq of each policy, or turbostat",
                versions: "kernels with CONFIG_CPU_FREQ",
                citation: "Documentation/admin-guide/pm/cpufreq.rst, intel_pstate.rst",
            },
        },
        judge: Judge::Host(judge_governor),
    },
    SettingRule {
        rule: RuleInfo {
            id: "cpu-idle-states",
            source: "/sys/devices/system/cpu/cpu*/cpuidle/state*",
            why: "A CPU in a deep idle state takes its exit latency to run a virtual CPU that was woken.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "no enabled state with an exit latency above 200 us",
            details: SettingDetails {
                benefit: "shorter wake-ups of guests that wait for packets and disks",
                risk: "more power and heat when idle, and less boost for busy CPUs",
                method: ApplyMethod::Live,
                undo: "write 0 to the file disable of the state",
                counter: "usage and time of each state; run delay of virtual CPUs",
                versions: "kernels with CONFIG_CPU_IDLE",
                citation: "Documentation/admin-guide/pm/cpuidle.rst",
            },
        },
        judge: Judge::Host(judge_idle_states),
    },
    SettingRule {
        rule: RuleInfo {
            id: "smt-control",
            source: "/sys/devices/system/cpu/smt/control, /sys/devices/system/cpu/vulnerabilities/l1tf, \
                     /sys/devices/system/cpu/vulnerabilities/mds",
            why: "Hardware threads of one core share buffers and caches. On affected CPUs a guest on one thread can \
                  read data of a guest on the other.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "off on affected CPUs whose guests do not trust each other",
            details: SettingDetails {
                benefit: "guests of different owners cannot read each other's data over shared cores",
                risk: "up to a third less throughput; more guests wait for a CPU",
                method: ApplyMethod::Live,
                undo: "write on, or remove the boot parameter",
                counter: "smt/active; the vulnerability files",
                versions: "Linux 4.19 and later",
                citation: "Documentation/admin-guide/hw-vuln/l1tf.rst, mds.rst",
            },
        },
        judge: Judge::Host(judge_smt),
    },
    SettingRule {
        rule: RuleInfo {
            id: "cpu-mitigations",
            source: "/proc/cmdline",
            why: "On affected CPUs the kernel puts barriers between guests, and between a guest and the host. \
                  mitigations=off removes both; no_guest_guest and no_guest_host remove one of them each.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "mitigations= without off, no_guest_host and no_guest_guest",
            details: SettingDetails {
                benefit: "guests cannot read memory of the host or of other guests by known side channels",
                risk: "exits and system calls take longer on affected CPUs",
                method: ApplyMethod::Reboot,
                undo: "add the boot parameter again",
                counter: "/sys/devices/system/cpu/vulnerabilities",
                versions: "Linux 5.2 and later",
                citation: "Documentation/admin-guide/kernel-parameters.txt (mitigations=)",
            },
        },
        judge: Judge::Host(judge_mitigations),
    },
];

const CLOCKSOURCE: &str = "sys/devices/system/clocksource/clocksource0";

fn judge_clocksource(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let Some(current) = settings.find_text(&format!("{CLOCKSOURCE}/current_clocksource"))? else {
        return Ok(rule.not_applicable("the kernel has no choice of clocks", "absent"));
    };
    if current == "tsc" {
        return Ok(rule.ok("the clock is the TSC", current));
    }
    if !has_cpu_flag(settings, "tsc")? {
        return Ok(rule.not_applicable("the CPU has no TSC", current));
    }
    if is_virtual(settings)? {
        return Ok(rule.not_applicable("this host is a virtual machine: its hypervisor decides", current));
    }
    let available = settings.find_text(&format!("{CLOCKSOURCE}/available_clocksource"))?.unwrap_or_default();
    let finding = rule.warn("the clock of the host is slow", format!("{current}, of {available}"));
    if !available.split_whitespace().any(|clock| clock == "tsc") {
        return Ok(finding
            .remedy([
                "# the kernel found the TSC to be unstable: see why, update the firmware, then reboot",
                "dmesg | grep -i -e tsc -e clocksource",
            ])
            .verify(format!("grep -x tsc /{CLOCKSOURCE}/current_clocksource")));
    }
    Ok(with_write(finding, &format!("{CLOCKSOURCE}/current_clocksource"), "tsc"))
}

const CPUFREQ: &str = "sys/devices/system/cpu/cpufreq";

/// intel_pstate and amd_pstate in active mode have only `performance` and `powersave`; there `powersave` follows load by
/// itself and reaches full speed.
fn judge_governor(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let mut policies = BTreeMap::<&str, Vec<u32>>::new();
    for policy in settings.numbered(CPUFREQ, "policy")? {
        if let Some(governor) = settings.find_text(&format!("{CPUFREQ}/policy{policy}/scaling_governor"))? {
            policies.entry(governor).or_default().push(policy);
        }
    }
    if policies.is_empty() {
        return Ok(rule.not_applicable("the kernel does not control the frequency of CPUs", "absent"));
    }
    let value = policies
        .iter()
        .map(|(governor, policies)| format!("{governor} of {} policies", policies.len()))
        .collect::<Vec<_>>()
        .join(", ");
    let mut slow = Vec::new();
    for policy in policies.iter().filter(|(governor, _)| **governor != "performance").flat_map(|(_, policies)| policies)
    {
        let path = format!("{CPUFREQ}/policy{policy}/scaling_available_governors");
        let available = settings.find_text(&path)?.unwrap_or_default();
        let is_active_mode = available.split_whitespace().all(|name| matches!(name, "performance" | "powersave"));
        if !is_active_mode || available.is_empty() {
            slow.push(*policy);
        }
    }
    if slow.is_empty() {
        return Ok(rule.ok("CPUs reach their full frequency", value));
    }
    let mut finding = rule
        .warn("the governor of CPUs follows load", value)
        .remedy([format!("echo performance | tee /{CPUFREQ}/policy*/scaling_governor")])
        .verify(format!("! grep -Lx performance /{CPUFREQ}/policy*/scaling_governor | grep ."));
    finding.changes = slow
        .into_iter()
        .map(|policy| SettingChange::Write {
            path: format!("{CPUFREQ}/policy{policy}/scaling_governor"),
            value: "performance".to_owned(),
        })
        .collect();
    Ok(finding)
}

/// Longer exits than this delay a wake-up by more than a context switch and an interrupt do together; tuned's profile
/// `throughput-performance` keeps the states below it.
const MAX_EXIT_LATENCY_US: u64 = 200;

fn judge_idle_states(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    // By number, name and exit latency: on how many CPUs the state exists, and on how many it is disabled.
    let mut states = BTreeMap::<(u32, &str, u64), (u32, u32)>::new();
    // By number: the CPUs that may enter the state and leave it late. A number is another state on other cores of a hybrid
    // CPU.
    let mut deep = BTreeMap::<u32, BTreeSet<u32>>::new();
    // Without the names of CPUs no state was found.
    settings.find_names("sys/devices/system/cpu")?;
    for cpu in super::online_cpus(settings)?.iter() {
        let folder = format!("sys/devices/system/cpu/cpu{cpu}/cpuidle");
        for state in settings.numbered(&folder, "state")? {
            let path = format!("{folder}/state{state}");
            let name = settings.find_text(&format!("{path}/name"))?.unwrap_or("?");
            let latency = settings.find_number(&format!("{path}/latency"))?.unwrap_or(0);
            let is_disabled = settings.find_flag(&format!("{path}/disable"))? == Some(true);
            let (cpus, disabled) = states.entry((state, name, latency)).or_default();
            *cpus += 1;
            *disabled += u32::from(is_disabled);
            if latency > MAX_EXIT_LATENCY_US && !is_disabled {
                deep.entry(state).or_default().insert(cpu);
            }
        }
    }
    if states.is_empty() || is_virtual(settings)? {
        return Ok(rule.not_applicable("the kernel does not control idle states of a physical CPU", "absent"));
    }
    let shown = states.into_iter().map(|((_, name, latency), (cpus, disabled))| match disabled {
        0 => format!("{name} {latency} us"),
        disabled if disabled == cpus => format!("{name} {latency} us (disabled)"),
        disabled => format!("{name} {latency} us (disabled on {disabled} of {cpus} CPUs)"),
    });
    let value = shown.collect::<Vec<_>>().join(", ");
    if deep.is_empty() {
        return Ok(rule.ok("CPUs leave each idle state soon", value));
    }
    let loops = |command: &str| -> Vec<String> {
        let line = |(state, cpus): (&u32, &BTreeSet<u32>)| {
            let file = disable_file("$cpu", *state);
            format!("for cpu in {}; do {command} /{file}; done", shell_words(cpus))
        };
        deep.iter().map(line).collect()
    };
    let mut finding = rule
        .warn("CPUs enter idle states that they leave late", value)
        .remedy(loops("echo 1 >"))
        .verify(format!("! {{ {}; }} | grep .", loops("grep -Lx 1").join("; ")));
    finding.changes = deep
        .iter()
        .flat_map(|(state, cpus)| cpus.iter().map(|cpu| disable_file(&cpu.to_string(), *state)))
        .map(|path| SettingChange::Write { path, value: "1".to_owned() })
        .collect();
    Ok(finding)
}

fn disable_file(cpu: &str, state: u32) -> String {
    format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state{state}/disable")
}

/// Numbers as words of a shell, a run of more than three as `$(seq FIRST LAST)`: hosts have hundreds of CPUs.
fn shell_words(numbers: &BTreeSet<u32>) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let words = runs.into_iter().map(|(first, last)| match last - first {
        0..3 => (first..=last).map(|number| number.to_string()).collect::<Vec<_>>().join(" "),
        _ => format!("$(seq {first} {last})"),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Whether a file of the vulnerabilities says that hardware threads expose data. `None` if this kernel lacks it. Without
/// flushes of the L1 cache and with hardware threads, `l1tf` ends with `VMX: vulnerable` and does not name the threads
/// (arch/x86/kernel/cpu/bugs.c, `l1tf_show_state`).
fn is_exposed_by_smt(settings: &SettingFacts, name: &str) -> Result<Option<bool>, crate::decide::MissingReading> {
    let text = settings.find_text(&format!("sys/devices/system/cpu/vulnerabilities/{name}"))?;
    Ok(text.map(|text| {
        let text = text.to_ascii_lowercase();
        text.contains("smt vulnerable") || text.ends_with("vmx: vulnerable")
    }))
}

/// Which guests trust each other is not known, so more than one guest on an affected CPU is a warning, and only an
/// operator can decide.
fn judge_smt(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let Some(control) = settings.find_text("sys/devices/system/cpu/smt/control")? else {
        return Ok(rule.not_applicable("the kernel does not control hardware threads", "absent"));
    };
    if control != "on" {
        return Ok(rule.ok("one hardware thread of each core runs", control));
    }
    let exposures = [is_exposed_by_smt(settings, "l1tf")?, is_exposed_by_smt(settings, "mds")?];
    let value = "smt/control = on".to_owned();
    if exposures.iter().all(Option::is_none) {
        return Ok(rule.not_applicable("the kernel does not tell whether the CPU is affected", value));
    }
    if !exposures.contains(&Some(true)) {
        return Ok(rule.ok("the CPU does not expose data between hardware threads by l1tf or mds", value));
    }
    if settings.vms.len() < 2 {
        let title = "the CPU is affected, and fewer than two virtual machines run";
        return if_machines_are_known(rule.ok(title, value), facts);
    }
    Ok(rule
        .warn("guests on two hardware threads of a core can read each other's data", value)
        .remedy([
            "# if the guests do not trust each other, turn it off, or give each owner whole cores:",
            "echo off > /sys/devices/system/cpu/smt/control",
        ])
        .verify("grep -x off /sys/devices/system/cpu/smt/control"))
}

fn judge_mitigations(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let Some(line) = facts.settings.find_text("proc/cmdline")? else {
        return Ok(rule.not_applicable("there is no kernel command line", "absent"));
    };
    let parameters = || line.split_whitespace().filter(|word| word.starts_with("mitigations="));
    let value = parameters().collect::<Vec<_>>().join(" ");
    let Some(last) = parameters().next_back() else {
        return Ok(rule.ok("the kernel protects guests from each other", "default"));
    };
    // Documentation/admin-guide/hw-vuln/attack_vector_controls.rst: options after the mode turn off single vectors.
    let unprotected = |option: &str| matches!(option, "off" | "no_guest_host" | "no_guest_guest");
    if last.trim_start_matches("mitigations=").split([',', ';']).any(unprotected) {
        let finding = rule.warn("guests are not protected from side channels", value);
        let finding = with_boot_parameter(finding, Some(last), None);
        return Ok(finding.verify("! grep -qE 'mitigations=[^ ]*(off|no_guest_)' /proc/cmdline"));
    }
    Ok(rule.ok("the kernel protects guests from each other", value))
}
