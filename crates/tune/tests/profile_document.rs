//! The table of profiles in docs/settings.md is that of the program. `UPDATE_GOLDEN=1` rewrites it.

#![forbid(unsafe_code)]

use pagefold_base::{Pid, ProcessId};
use pagefold_doctor::decide::change::{SettingChange, VmOption};
use pagefold_tune::decide::profile::{Profile, ProfileDecision, judge, settings};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const HEADER: &str = "| profile | sets | replaces, where a finding asks for another value | leaves out, though a finding asks for it |\n";

const MACHINE: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

/// How the document names a change of a machine's definition.
fn option_name(option: &VmOption) -> &'static str {
    match option {
        VmOption::HostCpuModel => "the CPU model of the host",
        VmOption::CpuFeature { .. } => "CPU features",
        VmOption::HyperVSpinlocks { .. } => "`hv-spinlocks`",
        VmOption::CpuPowerManagement { enable: true } => "`cpu-pm=on`",
        VmOption::CpuPowerManagement { enable: false } => "`cpu-pm=off`",
        VmOption::VirtualNodes { .. } => "virtual nodes",
        VmOption::MergeableMemory => "mergeable memory in place of huge pages of the pool or shared memory",
        VmOption::DiskCacheNone { .. } => "`cache=none`",
        VmOption::DiskAio { .. } => "`aio=`",
        VmOption::DiskIoThreads { .. } => "iothreads",
        VmOption::VhostNet { .. } => "`vhost=on`",
        VmOption::NetworkQueues { .. } => "`queues=`",
    }
}

/// A change of each kind that rules ask for, with its name in the document.
fn asked_changes() -> Vec<(String, SettingChange)> {
    let id = || "id".to_owned();
    let options = [
        VmOption::HostCpuModel,
        VmOption::CpuFeature { name: id(), enable: true },
        VmOption::HyperVSpinlocks { retries: 8191 },
        VmOption::CpuPowerManagement { enable: true },
        VmOption::CpuPowerManagement { enable: false },
        VmOption::VirtualNodes { host_nodes: Vec::new() },
        VmOption::MergeableMemory,
        VmOption::DiskCacheNone { disk: id() },
        VmOption::DiskAio { disk: id(), interface: "native".to_owned() },
        VmOption::DiskIoThreads { disk: id(), count: 1 },
        VmOption::VhostNet { network: id() },
        VmOption::NetworkQueues { network: id(), count: 2 },
    ];
    let options =
        options.map(|option| (option_name(&option).to_owned(), SettingChange::VmDefinition { vm: MACHINE, option }));
    let writes = [
        ("sys/kernel/mm/ksm/merge_across_nodes", "0"),
        ("sys/kernel/mm/ksm/merge_across_nodes", "1"),
        ("proc/sys/kernel/numa_balancing", "1"),
        ("proc/sys/vm/zone_reclaim_mode", "0"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
    ];
    let writes = writes.map(|(path, value)| {
        let change = SettingChange::Write { path: path.to_owned(), value: value.to_owned() };
        (format!("`/{path}` {value}"), change)
    });
    let parameters = [
        ("kvm_intel", "ept", "1"),
        ("kvm_intel", "ple_gap", "0"),
        ("kvm_intel", "ple_window", "0"),
        ("kvm_amd", "npt", "1"),
        ("kvm_amd", "pause_filter_thresh", "0"),
        ("kvm_amd", "pause_filter_count", "0"),
    ];
    let parameters = parameters.map(|(module, parameter, value)| {
        let (module, parameter, value) = (module.to_owned(), parameter.to_owned(), value.to_owned());
        (format!("`{parameter}` of `{module}`"), SettingChange::ModuleParameter { module, parameter, value })
    });
    options.into_iter().chain(writes).chain(parameters).collect()
}

fn join(parts: &[String]) -> String {
    if parts.is_empty() { "nothing".to_owned() } else { parts.join("; ") }
}

fn render_row(profile: Profile) -> String {
    let sets: Vec<String> = settings(profile).iter().map(|(path, value, _)| format!("`/{path}` {value}")).collect();
    let (mut replaced, mut left_out) = (BTreeMap::<String, Vec<String>>::new(), Vec::new());
    for (name, change) in asked_changes() {
        match judge(Some(profile), "rule", &change) {
            ProfileDecision::Keep => {}
            ProfileDecision::Drop(_) => left_out.push(name),
            ProfileDecision::Replace(SettingChange::ModuleParameter { module, parameter, value }, _) => {
                replaced.entry(module).or_default().push(format!("`{parameter}` {value}"));
            }
            ProfileDecision::Replace(change, _) => panic!("{profile}: no finding asks for another value of {change:?}"),
        }
    }
    let replaced: Vec<String> =
        replaced.iter().map(|(module, values)| format!("{} of `{module}`", values.join(" and "))).collect();
    format!("| `{profile}` | {} | {} | {} |\n", join(&sets), join(&replaced), join(&left_out))
}

#[test]
fn document_lists_what_each_profile_does() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/settings.md");
    let document = fs::read_to_string(&path).unwrap();
    let (start, rest) = document.split_once(HEADER).expect("the table of profiles");
    let end = &rest[rest.find("\n\n").expect("text after the table") + 1..];
    let rows: String = Profile::ALL.into_iter().map(render_row).collect();
    let expected = format!("{start}{HEADER}|---|---|---|---|\n{rows}{end}");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    assert!(document == expected, "docs/settings.md is out of date: run this test with UPDATE_GOLDEN=1");
}
