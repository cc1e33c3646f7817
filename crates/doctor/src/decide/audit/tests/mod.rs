//! Table tests: the settings of a host in good order, a few changes, and the verdict of one rule.

mod guest;
mod host;
mod kvm;
mod properties;
pub(in crate::decide) mod tuned;
mod vm;

use super::facts::{SettingFacts, SettingFile, VmFacts, VmThread};
use super::*;
use crate::decide::tests::healthy;
use crate::decide::{Verdict, examine_host};
use crate::test_support::note_tested;
use Verdict::{Fail, NotApplicable, Ok as Fine, Unknown, Warn};
use pagefold_base::Bytes;
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::identity::vm_definition::parse_vm_definition;
use pagefold_base::reading::Reading;
use pagefold_base::units::{Pid, ProcessId};
use std::collections::{BTreeMap, BTreeSet};

const KVM: &str = "sys/module/kvm/parameters";
const INTEL: &str = "sys/module/kvm_intel/parameters";
const AMD: &str = "sys/module/kvm_amd/parameters";

/// A value that stands for a file that does not exist.
const ABSENT: &str = "(absent)";
/// A value that stands for a file that cannot be read.
const DENIED: &str = "(denied)";

/// An Intel host with two nodes of four CPUs, with all settings in good order and no virtual machine.
const GOOD: &[(&str, &str)] = &[
    ("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet"),
    ("proc/cpuinfo", "flags\t\t: fpu tsc ept constant_tsc nonstop_tsc\nvmx flags\t: ept ple apicv"),
    ("proc/sys/kernel/io_uring_disabled", "0"),
    ("proc/sys/kernel/numa_balancing", "1"),
    ("proc/sys/kernel/sched_autogroup_enabled", "0"),
    ("proc/sys/vm/zone_reclaim_mode", "0"),
    ("sys/block/nvme0n1/device/device/numa_node", "0"),
    ("sys/block/nvme0n1/queue/scheduler", "[none] mq-deadline kyber"),
    ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/disable", "0"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "0"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state0/name", "POLL"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/disable", "0"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2"),
    ("sys/devices/system/cpu/cpu0/cpuidle/state1/name", "C1"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_available_governors", "performance powersave"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "performance"),
    ("sys/devices/system/cpu/isolated", ""),
    ("sys/devices/system/cpu/nohz_full", ""),
    ("sys/devices/system/cpu/online", "0-7"),
    ("sys/devices/system/cpu/smt/active", "0"),
    ("sys/devices/system/cpu/smt/control", "off"),
    ("sys/devices/system/cpu/vulnerabilities/itlb_multihit", "Not affected"),
    ("sys/devices/system/cpu/vulnerabilities/l1tf", "Not affected"),
    ("sys/devices/system/cpu/vulnerabilities/mds", "Not affected"),
    ("sys/devices/system/node/node0/cpulist", "0-3"),
    ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "0"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       67108864 kB"),
    ("sys/devices/system/node/node1/cpulist", "4-7"),
    ("sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages", "0"),
    ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:       67108864 kB"),
    ("sys/kernel/debug/kvm/nested_run", "0"),
    ("sys/kernel/debug/sched/base_slice_ns", "2800000"),
    ("sys/kernel/debug/sched/preempt", "none (voluntary) full lazy"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
    ("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force"),
    ("sys/module/kvm/parameters/halt_poll_ns", "200000"),
    ("sys/module/kvm/parameters/nx_huge_pages", "N"),
    ("sys/module/kvm/parameters/tdp_mmu", "Y"),
    ("sys/module/kvm_intel/parameters/enable_apicv", "Y"),
    ("sys/module/kvm_intel/parameters/ept", "Y"),
    ("sys/module/kvm_intel/parameters/nested", "N"),
    ("sys/module/kvm_intel/parameters/ple_gap", "128"),
    ("sys/module/kvm_intel/parameters/ple_window", "4096"),
    ("sys/module/kvm_intel/parameters/ple_window_grow", "2"),
    ("sys/module/kvm_intel/parameters/ple_window_shrink", "0"),
];

/// Files of [`GOOD`] that can only be set when a module is loaded.
fn mode(path: &str) -> u32 {
    let is_live = !path.starts_with("sys/module") || path.ends_with("halt_poll_ns") || path.ends_with("nx_huge_pages");
    if is_live { 0o644 } else { 0o444 }
}

/// The directories that contain these files, with their names.
fn directories(settings: &SettingFacts, modules: &[&str]) -> BTreeMap<String, Reading<Vec<String>>> {
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for path in settings.files.keys() {
        let mut path = path.as_str();
        while let Some((directory, name)) = path.rsplit_once('/') {
            names.entry(directory.to_owned()).or_default().insert(name.to_owned());
            path = directory;
        }
    }
    names.entry("sys/module".to_owned()).or_default().extend(modules.iter().map(|&module| module.to_owned()));
    names.into_iter().map(|(directory, names)| (directory, Ok(names.into_iter().collect()))).collect()
}

fn put(settings: &mut SettingFacts, path: &str, value: &str) {
    let text = match value {
        ABSENT => {
            settings.files.remove(path);
            return;
        }
        DENIED => Err(Absent::Denied),
        value => Ok(value.to_owned()),
    };
    settings.files.insert(path.to_owned(), SettingFile { text, mode: Ok(mode(path)) });
}

/// The host in good order with these changes.
fn host_with(changes: &[(&str, &str)], vms: Vec<VmFacts>) -> HostFacts {
    let mut facts = healthy();
    for (path, value) in GOOD.iter().chain(changes) {
        put(&mut facts.settings, path, value);
    }
    facts.settings.directories = directories(&facts.settings, &[]);
    facts.settings.vms = vms;
    facts
}

/// Memory on these nodes, in MiB.
fn memory_on(nodes: &[(u32, u64)]) -> Option<Reading<BTreeMap<u32, Bytes>>> {
    Some(Ok(nodes.iter().map(|&(node, mebibytes)| (node, Bytes(mebibytes << 20))).collect()))
}

/// A machine of this command line whose virtual CPUs may run on these CPUs each, and run on the first of them. Its memory
/// is on node 0.
fn vm(pid: u32, command: &str, vcpus: &[&str]) -> VmFacts {
    let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let thread = |(number, cpus): (usize, &&str)| {
        let allowed_cpus: pagefold_base::IdSet = cpus.parse().unwrap();
        let last_cpu = allowed_cpus.iter().next().unwrap();
        VmThread { tid: Pid(pid + number as u32 + 1), role: ThreadRole::Vcpu(number as u32), last_cpu, allowed_cpus }
    };
    VmFacts {
        process: ProcessId { pid: Pid(pid), start_time: u64::from(pid) },
        name: format!("vm{pid}"),
        passed_through: pagefold_base::identity::virtual_nodes::passed_through_devices(&arguments),
        definition: Some(parse_vm_definition(&arguments)),
        threads: Ok(vcpus.iter().enumerate().map(thread).collect()),
        node_memory: memory_on(&[(0, 1024)]),
        merged_pages: Ok(0),
        iothread_loads: Ok(Vec::new()),
        throttling: Ok(None),
        next_definition: None,
        monitor: None,
        guest: None,
    }
}

/// A vhost worker that may run on these CPUs, and ran last on CPU 0.
fn vhost_worker(cpus: &str) -> VmThread {
    VmThread { tid: Pid(510), role: ThreadRole::Vhost, last_cpu: 0, allowed_cpus: cpus.parse().unwrap() }
}

/// The finding of a rule, which must be exactly one.
fn finding(facts: &HostFacts, rule: &str) -> Finding {
    let mut found: Vec<Finding> = examine_host(facts).into_iter().filter(|finding| finding.rule == rule).collect();
    assert_eq!(found.len(), 1, "{rule}: {found:?}");
    found.remove(0)
}

/// Checks the verdict of a rule.
fn assert_verdict(facts: &HostFacts, rule: &str, expected: Verdict) {
    let found = finding(facts, rule);
    assert_eq!(found.verdict, expected, "{found:?}");
    note_tested(rule, expected);
}

/// A case: a rule, files that differ from [`GOOD`], and the verdict.
type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], Verdict);

/// Checks the verdict of each case, and that a warning never becomes `ok` if one of the changed files is unreadable.
fn check_cases(cases: &[Case], vms: &[VmFacts]) {
    for (rule, changes, verdict) in cases {
        let found = finding(&host_with(changes, vms.to_vec()), rule);
        assert_eq!(found.verdict, *verdict, "{rule} with {changes:?}: {found:?}");
        note_tested(rule, *verdict);
        if *verdict < Warn {
            continue;
        }
        assert!(!found.remedy.is_empty(), "{found:?}");
        let readable: Vec<_> = changes.iter().filter(|(_, value)| ![ABSENT, DENIED].contains(value)).collect();
        let denied: Vec<_> = readable.iter().map(|(path, _)| (*path, DENIED)).collect();
        if denied.is_empty() {
            continue;
        }
        let found = finding(&host_with(&denied, vms.to_vec()), rule);
        assert!(found.verdict != Fine, "{rule} with unreadable {denied:?}: {found:?}");
    }
}

/// Checks all tables of cases.
pub(in crate::decide) fn check_all_tables() {
    kvm::parameters_of_kvm_have_their_verdicts();
    host::settings_of_the_host_have_their_verdicts();
    vm::machines_have_their_verdicts();
    guest::guests_have_their_verdicts();
    guest::guests_without_an_answer_are_unknown_with_the_reason();
    properties::recording_without_settings_is_not_judged();
}
