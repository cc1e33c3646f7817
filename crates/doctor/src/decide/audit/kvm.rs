//! Parameters of the modules kvm, kvm_intel and kvm_amd (arch/x86/kvm, virt/kvm/kvm_main.c, 6.18). Most have mode 0444:
//! they change only when the module is loaded again. Other backends, and a host without KVM, have none of them.

use super::facts::SettingFacts;
use super::{Judge, SettingRule, has_cpu_flag, if_machines_are_known, is_overcommitted, with_parameter};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{Finding, HostFacts, MissingReading, RuleInfo, RuleResult, Verdict};
use pagefold_base::reading::Absent;

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "kvm-ept",
            source: "/sys/module/kvm_intel/parameters/ept, /sys/module/kvm_amd/parameters/npt",
            why: "Without nested page tables (EPT, NPT) each change of a guest's page tables traps into KVM. Faults \
                  and context switches in the guest become several times slower.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_WARN,
            expected: "on",
            details: SettingDetails {
                benefit: "no trap for page tables of the guest; exits fall by orders of magnitude where processes \
                          start and fault",
                risk: "a TLB miss walks two tables: a pointer chase over much memory may lose some percent; give such \
                       guests huge pages",
                method: ApplyMethod::ModuleReload,
                undo: "restore the file in modprobe.d and load the module again",
                counter: "exits in /sys/kernel/debug/kvm",
                versions: "Linux 2.6.26 and later",
                citation: "arch/x86/kvm/vmx/vmx.c; CERN, \"EPT and KSM for High Throughput Computing\", 2 August 2015 (+6 % \
                           in a benchmark with EPT off), \
                           openstack-in-production.blogspot.com/2015/08/ept-and-ksm-for-high-throughput.html; withdrawn \
                           by \"EPT, Huge Pages and Benchmarking\", September 2015 (jobs up to several times slower), \
                           openstack-in-production.blogspot.com/2015/09/ept-huge-pages-and-benchmarking.html",
            },
        },
        judge: Judge::Host(judge_nested_pages),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-ple",
            source: "/sys/module/kvm_intel/parameters/ple_*, /sys/module/kvm_amd/parameters/pause_filter_*",
            why: "Pause-loop exiting stops a virtual CPU that spins on a lock, and runs the one that may hold it. On \
                  an over-committed host a guest without it spins for whole time slices.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "the kernel's defaults; off only without over-commit",
            details: SettingDetails {
                benefit: "less spinning when virtual CPUs outnumber CPUs; off, a wide guest alone on its CPUs avoids \
                          useless exits",
                risk: "a short window causes many exits in wide guests",
                method: ApplyMethod::ModuleReload,
                undo: "restore the file in modprobe.d and load the module again",
                counter: "exits in /sys/kernel/debug/kvm; of them PAUSE by the event kvm:kvm_exit",
                versions: "Linux 2.6.33 and later; the window adapts since 3.18",
                citation: "arch/x86/kvm/vmx/vmx.c, arch/x86/kvm/x86.h (KVM_DEFAULT_PLE_*)",
            },
        },
        judge: Judge::Host(judge_pause_loops),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-halt-poll",
            source: "/sys/module/kvm/parameters/halt_poll_ns",
            why: "A virtual CPU that halts is polled for this long before its CPU is released. That shortens \
                  wake-ups, and takes CPU time and power from other guests.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "at most 200000 ns; at most 50000 ns when virtual CPUs outnumber CPUs",
            details: SettingDetails {
                benefit: "CPU time of idle guests goes to busy ones",
                risk: "wake-ups of a guest that waits for short events take longer",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "halt_attempted_poll, halt_successful_poll, halt_poll_success_ns and halt_poll_fail_ns in \
                          /sys/kernel/debug/kvm",
                versions: "Linux 4.0 and later",
                citation: "Documentation/virt/kvm/halt-polling.rst; defaults: arch/x86/include/asm/kvm_host.h \
                           (200000), arch/s390/include/asm/kvm_host.h (50000)",
            },
        },
        judge: Judge::Host(judge_halt_poll),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-nx-huge-pages",
            source: "/sys/module/kvm/parameters/nx_huge_pages, /sys/devices/system/cpu/vulnerabilities/itlb_multihit",
            why: "KVM splits huge pages that a guest executes, against a machine check in the instruction TLB of \
                  some CPUs. On other CPUs that only costs TLB misses.",
            needs_ksm: false,
            verdicts: Verdict::ALL,
            expected: "off where the CPU is not affected, else on",
            details: SettingDetails {
                benefit: "guest code stays in huge pages where that is safe; where it is not, a guest cannot stop \
                          the host",
                risk: "off on an affected CPU, a guest can stop the host",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "nx_lpage_splits in /sys/kernel/debug/kvm",
                versions: "Linux 5.4 and later",
                citation: "Documentation/admin-guide/hw-vuln/multihit.rst; arch/x86/kvm/mmu/mmu.c (set_nx_huge_pages)",
            },
        },
        judge: Judge::Host(judge_nx_huge_pages),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-apicv",
            source: "/sys/module/kvm_intel/parameters/enable_apicv, /sys/module/kvm_amd/parameters/avic",
            why: "With a virtual APIC in the CPU, most interrupts reach a guest without an exit.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "on where the CPU has it",
            details: SettingDetails {
                benefit: "fewer exits of guests with much I/O or many interrupts between their CPUs",
                risk: "AVIC has errata on AMD CPUs before Zen 4, for which the kernel leaves it off",
                method: ApplyMethod::ModuleReload,
                undo: "restore the file in modprobe.d and load the module again",
                counter: "irq_window_exits and exits in /sys/kernel/debug/kvm",
                versions: "Linux 3.9 (Intel), 4.7 (AMD) and later",
                citation: "arch/x86/kvm/vmx/vmx.c (enable_apicv), arch/x86/kvm/svm/avic.c",
            },
        },
        judge: Judge::Host(judge_virtual_apic),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-tdp-mmu",
            source: "/sys/module/kvm/parameters/tdp_mmu",
            why: "The TDP MMU handles page faults of several virtual CPUs at once; the older code takes one lock for \
                  the whole guest.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "on",
            details: SettingDetails {
                benefit: "wide guests start and migrate faster: their page faults no longer wait for each other",
                risk: "none known since it became the default",
                method: ApplyMethod::ModuleReload,
                undo: "restore the file in modprobe.d and load the module again",
                counter: "pf_fixed in /sys/kernel/debug/kvm during a start",
                versions: "Linux 5.10 and later, the default since 5.15",
                citation: "arch/x86/kvm/mmu/tdp_mmu.c, arch/x86/kvm/mmu/mmu.c (tdp_mmu_enabled)",
            },
        },
        judge: Judge::Host(judge_tdp_mmu),
    },
    SettingRule {
        rule: RuleInfo {
            id: "kvm-nested",
            source: "/sys/module/kvm_intel/parameters/nested, /sys/module/kvm_amd/parameters/nested, \
                     /sys/kernel/debug/kvm/nested_run",
            why: "Nested virtualization is a large interface between a guest and the host's kernel. A host whose \
                  guests run no virtual machines does not need it.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "off, unless a guest runs virtual machines",
            details: SettingDetails {
                benefit: "less code of the kernel that a guest can reach",
                risk: "guests that need virtualization, as Windows with VBS, no longer start; a live migration from \
                       another host may fail",
                method: ApplyMethod::ModuleReload,
                undo: "restore the file in modprobe.d and load the module again",
                counter: "nested_run in /sys/kernel/debug/kvm",
                versions: "on by default since Linux 4.20; the counter exists since 5.10",
                citation: "Documentation/virt/kvm/x86/running-nested-guests.rst",
            },
        },
        judge: Judge::Host(judge_nested),
    },
];

/// A backend of KVM whose parameters the rules know.
#[derive(Clone, Copy, PartialEq)]
enum Vendor {
    Intel,
    Amd,
}

impl Vendor {
    fn module(self) -> &'static str {
        match self {
            Self::Intel => "kvm_intel",
            Self::Amd => "kvm_amd",
        }
    }

    /// The parameter for nested page tables, and the flag of a CPU that has them.
    fn nested_pages(self) -> (&'static str, &'static str) {
        match self {
            Self::Intel => ("ept", "ept"),
            Self::Amd => ("npt", "npt"),
        }
    }

    /// The flag of a CPU that stops pause loops.
    fn pause_flag(self) -> &'static str {
        match self {
            Self::Intel => "ple",
            Self::Amd => "pausefilter",
        }
    }

    /// The parameters of pause loops with their defaults (arch/x86/kvm/x86.h, `KVM_DEFAULT_PLE_*`, `KVM_SVM_DEFAULT_*`).
    /// The first turns it off at 0.
    fn pause_parameters(self) -> &'static [(&'static str, u64)] {
        match self {
            Self::Intel => &[("ple_gap", 128), ("ple_window", 4096), ("ple_window_grow", 2), ("ple_window_shrink", 0)],
            Self::Amd => &[
                ("pause_filter_count", 3000),
                ("pause_filter_thresh", 128),
                ("pause_filter_count_grow", 2),
                ("pause_filter_count_shrink", 0),
            ],
        }
    }
}

/// The loaded backend that the rules know; else the reason why they do not apply.
fn find_vendor(settings: &SettingFacts) -> Result<Result<Vendor, String>, MissingReading> {
    let modules = settings.find_names("sys/module")?;
    let is_loaded = |name: &str| modules.iter().any(|module| module == name);
    Ok(if is_loaded("kvm_intel") {
        Ok(Vendor::Intel)
    } else if is_loaded("kvm_amd") {
        Ok(Vendor::Amd)
    } else if let Some(other) = modules.iter().find(|module| module.starts_with("kvm_")) {
        Err(format!("KVM uses the backend {other}, which has no such parameter"))
    } else {
        Err("KVM is not loaded".to_owned())
    })
}

fn no_vendor(rule: &'static RuleInfo, reason: String) -> RuleResult {
    Ok(rule.not_applicable(reason, "absent"))
}

fn parameter_path(module: &str, parameter: &str) -> String {
    format!("sys/module/{module}/parameters/{parameter}")
}

/// Nested page tables that the CPU offers and KVM does not use are a failure. In a virtual machine, the hypervisor may
/// not offer them.
fn judge_nested_pages(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let vendor = match find_vendor(settings)? {
        Ok(vendor) => vendor,
        Err(reason) => return no_vendor(rule, reason),
    };
    let (parameter, flag) = vendor.nested_pages();
    let path = parameter_path(vendor.module(), parameter);
    let Some(is_on) = settings.find_flag(&path)? else {
        return no_vendor(rule, format!("the kernel has no parameter {parameter}"));
    };
    let value = format!("{parameter} = {}", on_off(is_on));
    if is_on {
        return Ok(rule.ok("nested page tables are on", value));
    }
    if !has_cpu_flag(settings, flag)? {
        return Ok(
            rule.not_applicable("neither the CPU nor a hypervisor below this host offers nested page tables", value)
        );
    }
    let finding = rule.fail("nested page tables are off", value);
    Ok(with_parameter(finding, settings, vendor.module(), parameter, "1"))
}

/// Off is a warning when virtual CPUs outnumber CPUs; values other than the defaults are a warning at any time.
fn judge_pause_loops(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let vendor = match find_vendor(settings)? {
        Ok(vendor) => vendor,
        Err(reason) => return no_vendor(rule, reason),
    };
    let mut values = Vec::new();
    for &(parameter, default) in vendor.pause_parameters() {
        if let Some(value) = settings.find_number(&parameter_path(vendor.module(), parameter))? {
            values.push((parameter, value, default));
        }
    }
    let Some(&(switch, switch_value, switch_default)) = values.first() else {
        return no_vendor(rule, "the kernel has no parameters for pause loops".to_owned());
    };
    let shown = values.iter().map(|(name, value, _)| format!("{name} = {value}")).collect::<Vec<_>>().join(", ");
    if switch_value == 0 {
        if !has_cpu_flag(settings, vendor.pause_flag())? {
            return Ok(rule.not_applicable("this CPU does not report pause loops", shown));
        }
        if !is_overcommitted(facts)? {
            return Ok(rule.ok("pause-loop exiting is off, and no virtual CPU waits for a CPU", shown));
        }
        let finding = rule.warn("pause-loop exiting is off although virtual CPUs outnumber CPUs", shown);
        return Ok(with_parameter(finding, settings, vendor.module(), switch, &switch_default.to_string()));
    }
    let changed: Vec<_> = values.iter().filter(|(_, value, default)| value != default).collect();
    if changed.is_empty() {
        return Ok(rule.ok("pause-loop exiting has its defaults", shown));
    }
    let finding = rule.warn("pause-loop exiting has other values than the kernel's", shown);
    let mut lines = Vec::new();
    let finding = changed.into_iter().fold(finding, |finding, (parameter, _, default)| {
        let finding = with_parameter(finding, settings, vendor.module(), parameter, &default.to_string());
        lines.push(format!("{parameter}={default}"));
        finding
    });
    let module = vendor.module();
    Ok(finding.remedy([
        format!("# remove these from /etc/modprobe.d, or set them to {}", lines.join(" ")),
        "# stop all virtual machines first: a module in use cannot be unloaded".to_owned(),
        format!("modprobe -r {module} && modprobe {module}"),
    ]))
}

/// The default on x86 (arch/x86/include/asm/kvm_host.h).
const DEFAULT_HALT_POLL_NS: u64 = 200_000;
/// The default on s390 (arch/s390/include/asm/kvm_host.h), whose hosts are over-committed as a rule.
const OVERCOMMITTED_HALT_POLL_NS: u64 = 50_000;

fn judge_halt_poll(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    if let Err(reason) = find_vendor(settings)? {
        return no_vendor(rule, reason);
    }
    let Some(nanoseconds) = settings.find_number("sys/module/kvm/parameters/halt_poll_ns")? else {
        return no_vendor(rule, "the kernel has no parameter halt_poll_ns".to_owned());
    };
    let overcommitted = match is_overcommitted(facts) {
        // Too long in any case, or short enough in any case.
        Err(_) if nanoseconds > DEFAULT_HALT_POLL_NS => false,
        Err(_) if nanoseconds <= OVERCOMMITTED_HALT_POLL_NS => true,
        answer => answer?,
    };
    let limit = if overcommitted { OVERCOMMITTED_HALT_POLL_NS } else { DEFAULT_HALT_POLL_NS };
    let value = format!("halt_poll_ns = {nanoseconds}");
    if nanoseconds <= limit {
        return Ok(rule.ok("halted virtual CPUs are polled for a short time", value));
    }
    let reason = if overcommitted { " while virtual CPUs outnumber CPUs" } else { "" };
    let finding = rule.warn(format!("halted virtual CPUs are polled for long{reason}"), value);
    Ok(with_parameter(finding, settings, "kvm", "halt_poll_ns", &limit.to_string()))
}

/// Off on an affected CPU is a failure: a guest can stop the host.
fn judge_nx_huge_pages(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    if let Err(reason) = find_vendor(settings)? {
        return no_vendor(rule, reason);
    }
    let Some(text) = settings.find_text("sys/module/kvm/parameters/nx_huge_pages")? else {
        return no_vendor(rule, "the kernel has no parameter nx_huge_pages".to_owned());
    };
    let path = "sys/devices/system/cpu/vulnerabilities/itlb_multihit";
    let Some(vulnerability) = settings.find_text(path)? else {
        return no_vendor(rule, "the kernel does not tell whether the CPU is affected".to_owned());
    };
    let is_on = matches!(text, "Y" | "1" | "auto" | "force");
    let is_affected = vulnerability != "Not affected";
    let value = format!("nx_huge_pages = {text}; CPU: {vulnerability}");
    let change = |finding, value| Ok(with_parameter(finding, settings, "kvm", "nx_huge_pages", value));
    match (is_on, is_affected) {
        (true, false) if text != "auto" => {
            change(rule.warn("KVM splits huge pages of guests without need", value), "N")
        }
        (false, true) if vulnerability.contains("Vulnerable") => {
            let finding = rule.fail("a guest can stop this host: the CPU needs nx_huge_pages", value);
            // Once `never` is set, the kernel refuses every other value until kvm is loaded again.
            if text == "never" {
                return Ok(finding.remedy([
                    "# remove nx_huge_pages=never from /etc/modprobe.d and kvm.nx_huge_pages=never from the kernel's command",
                    "# line; it is in force until kvm is loaded again without it, which needs all machines to be stopped",
                ]));
            }
            change(finding, "Y")
        }
        _ => Ok(rule.ok("nx_huge_pages suits the CPU", value)),
    }
}

fn judge_virtual_apic(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let vendor = match find_vendor(settings)? {
        Ok(vendor) => vendor,
        Err(reason) => return no_vendor(rule, reason),
    };
    // Before Zen 4, which has x2AVIC, the kernel leaves AVIC off for its errata.
    let (parameter, flag) = match vendor {
        Vendor::Intel => ("enable_apicv", "apicv"),
        Vendor::Amd => ("avic", "x2avic"),
    };
    let Some(is_on) = settings.find_flag(&parameter_path(vendor.module(), parameter))? else {
        return no_vendor(rule, format!("the kernel has no parameter {parameter}"));
    };
    let value = format!("{parameter} = {}", on_off(is_on));
    if is_on {
        return Ok(rule.ok("interrupts reach guests without an exit", value));
    }
    if !has_cpu_flag(settings, flag)? {
        return Ok(rule.not_applicable("the CPU has no virtual APIC that works without errata", value));
    }
    let finding = rule.warn("the virtual APIC of the CPU is not used", value);
    Ok(with_parameter(finding, settings, vendor.module(), parameter, "1"))
}

fn judge_tdp_mmu(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let vendor = match find_vendor(settings)? {
        Ok(vendor) => vendor,
        Err(reason) => return no_vendor(rule, reason),
    };
    let Some(is_on) = settings.find_flag("sys/module/kvm/parameters/tdp_mmu")? else {
        return no_vendor(rule, "the kernel has no parameter tdp_mmu".to_owned());
    };
    let value = format!("tdp_mmu = {}", on_off(is_on));
    if is_on {
        return Ok(rule.ok("page faults of virtual CPUs are handled in parallel", value));
    }
    let nested_pages = parameter_path(vendor.module(), vendor.nested_pages().0);
    if settings.find_flag(&nested_pages)? == Some(false) {
        return Ok(rule.not_applicable("the TDP MMU needs nested page tables, which are off", value));
    }
    let finding = rule.warn("page faults of a guest's virtual CPUs wait for each other", value);
    Ok(with_parameter(finding, settings, "kvm", "tdp_mmu", "1"))
}

/// The counter covers the machines that run now.
fn judge_nested(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let vendor = match find_vendor(settings)? {
        Ok(vendor) => vendor,
        Err(reason) => return no_vendor(rule, reason),
    };
    let Some(is_on) = settings.find_flag(&parameter_path(vendor.module(), "nested"))? else {
        return no_vendor(rule, "the kernel has no parameter nested".to_owned());
    };
    if !is_on {
        return Ok(rule.ok("guests cannot run virtual machines", "nested = off"));
    }
    if settings.vms.is_empty() {
        return if_machines_are_known(rule.not_applicable("no virtual machine runs", "nested = on"), facts);
    }
    let path = "sys/kernel/debug/kvm/nested_run";
    let count = settings
        .find_number(path)?
        .ok_or_else(|| MissingReading { reading_name: format!("/{path}"), absent: Absent::NotOnThisKernel })?;
    let value = format!("nested = on, nested_run = {count}");
    if count > 0 {
        return Ok(rule.ok("guests run virtual machines", value));
    }
    let finding: Finding = rule.warn("guests may run virtual machines, and none does", value);
    Ok(with_parameter(finding, settings, vendor.module(), "nested", "0"))
}

fn on_off(is_on: bool) -> &'static str {
    if is_on { "on" } else { "off" }
}
