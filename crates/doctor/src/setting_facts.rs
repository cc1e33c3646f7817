//! Reads the settings of a host and of its virtual machines, for the rules of [`crate::decide::audit`].
//!
//! Each file is read once. Readings that fail stay as absent, with the reason. A file that does not exist is left out.
//!
//! libvirt's persistent definitions are read from its files, which only root can read; without them the rules about a
//! running machine judge its command line alone.
//!
//! Limits: the values are not from one instant.

use crate::decide::ProcessFacts;
use crate::decide::audit::facts::{CpuThrottling, SettingFacts, SettingFile, VmFacts, VmThread};
use crate::decide::audit::tuned::read_profiles;
use crate::doctor_facts::read_uptime;
use pagefold_base::identity::Monitor;
use pagefold_base::identity::qemu_monitor::MonitorVcpu;
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::identity::vm_definition::parse_vm_definition;
use pagefold_base::process::{Process, USER_HZ};
use pagefold_base::{Absent, Bytes, Pid, ProcessId, Reading};
use pagefold_host::action::domain_definition_path;
use pagefold_host::{Host, observe, parse};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// Files that the rules read. A `*` stands for any characters of one name.
const FILES: &[&str] = &[
    "etc/sysctl.conf",
    "etc/sysctl.d/*.conf",
    "proc/cmdline",
    "proc/irq/*/effective_affinity_list",
    "proc/sys/kernel/io_uring_disabled",
    "proc/sys/kernel/numa_balancing",
    "proc/sys/kernel/sched_autogroup_enabled",
    "proc/sys/vm/zone_reclaim_mode",
    "run/sysctl.d/*.conf",
    "sys/block/*/device/numa_node",
    "sys/block/*/device/device/numa_node",
    "sys/block/*/queue/scheduler",
    "sys/devices/system/clocksource/clocksource0/available_clocksource",
    "sys/devices/system/clocksource/clocksource0/current_clocksource",
    "sys/devices/system/cpu/cpu*/cpuidle/state*/disable",
    "sys/devices/system/cpu/cpu*/cpuidle/state*/latency",
    "sys/devices/system/cpu/cpu*/cpuidle/state*/name",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_available_governors",
    "sys/devices/system/cpu/cpufreq/policy*/scaling_governor",
    "sys/devices/system/cpu/isolated",
    "sys/devices/system/cpu/nohz_full",
    "sys/devices/system/cpu/online",
    "sys/devices/system/cpu/smt/active",
    "sys/devices/system/cpu/smt/control",
    "sys/devices/system/cpu/vulnerabilities/itlb_multihit",
    "sys/devices/system/cpu/vulnerabilities/l1tf",
    "sys/devices/system/cpu/vulnerabilities/mds",
    "sys/devices/system/node/node*/cpulist",
    "sys/devices/system/node/node*/hugepages/hugepages-*/nr_hugepages",
    "sys/devices/system/node/node*/meminfo",
    "sys/kernel/debug/kvm/nested_run",
    "sys/kernel/debug/sched/base_slice_ns",
    "sys/kernel/debug/sched/preempt",
    "sys/kernel/mm/transparent_hugepage/enabled",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled",
    "sys/module/kvm/parameters/halt_poll_ns",
    "sys/module/kvm/parameters/nx_huge_pages",
    "sys/module/kvm/parameters/tdp_mmu",
    "sys/module/kvm_amd/parameters/avic",
    "sys/module/kvm_amd/parameters/nested",
    "sys/module/kvm_amd/parameters/npt",
    "sys/module/kvm_amd/parameters/pause_filter_count",
    "sys/module/kvm_amd/parameters/pause_filter_count_grow",
    "sys/module/kvm_amd/parameters/pause_filter_count_shrink",
    "sys/module/kvm_amd/parameters/pause_filter_thresh",
    "sys/module/kvm_intel/parameters/enable_apicv",
    "sys/module/kvm_intel/parameters/ept",
    "sys/module/kvm_intel/parameters/nested",
    "sys/module/kvm_intel/parameters/ple_gap",
    "sys/module/kvm_intel/parameters/ple_window",
    "sys/module/kvm_intel/parameters/ple_window_grow",
    "sys/module/kvm_intel/parameters/ple_window_shrink",
    "usr/lib/sysctl.d/*.conf",
];

/// Directories whose names the rules read, besides those of [`FILES`].
const DIRECTORIES: &[&str] = &["proc/sys/kernel", "sys/kernel/debug/sched", "sys/module"];

/// Reads all settings of the host and of the virtual machines among its processes.
pub fn gather_setting_facts(host: &dyn Host, processes: &[ProcessFacts]) -> SettingFacts {
    let mut reader = SettingReader { host, facts: SettingFacts::default() };
    for directory in DIRECTORIES {
        reader.list(directory);
    }
    // The list of modules is on each Linux: without it, this is a recording from before these rules.
    if reader.facts.directories.get("sys/module") != Some(&Err(Absent::NotOnThisKernel)) {
        FILES.iter().for_each(|pattern| reader.read_matching(pattern));
        reader.read_first_cpu();
        read_profiles(|path| {
            reader.read(path);
            reader.facts.text(path).ok().map(str::to_owned)
        });
    }
    let vms: Vec<&Process> =
        processes.iter().map(|facts| &facts.process).filter(|process| process.identity.vm.is_some()).collect();
    read_passed_through_nodes(&mut reader, &vms);
    let mut facts = reader.facts;
    let cgroups: BTreeSet<String> = vms.iter().flat_map(|vm| cpu_cgroups(host, vm)).collect();
    let limits: BTreeMap<String, Reading<Option<CpuThrottling>>> =
        cgroups.into_iter().map(|cgroup| (cgroup.clone(), read_throttling(host, &cgroup))).collect();
    let has_several_nodes = count_nodes(&facts) > 1;
    facts.vms = vms.into_par_iter().filter_map(|process| read_vm(host, process, &limits, has_several_nodes)).collect();
    read_libvirt_definitions(host, &mut facts);
    facts
}

/// The directory with the nodes of the host.
const NODE_DIRECTORY: &str = "sys/devices/system/node";

/// The directory of libvirt's persistent definitions.
const DEFINITION_DIRECTORY: &str = "etc/libvirt/qemu";

/// Reads libvirt's persistent definitions of the machines that run, and of the domains that do not.
fn read_libvirt_definitions(host: &dyn Host, facts: &mut SettingFacts) {
    let running = match observe::libvirt_domains(host) {
        Ok(running) => running,
        Err(why) => {
            // Which definition belongs to a machine is not known, nor which domains do not run.
            let machines = facts.vms.iter_mut().filter(|vm| vm.definition.is_some());
            machines.for_each(|vm| vm.next_definition = Some(Err(why.clone())));
            return;
        }
    };
    let read =
        |name: &str| host.read(&domain_definition_path(name)).and_then(|bytes| parse::libvirt_definition(&bytes));
    // libvirt refuses a slash in the name of a domain (`src/conf/domain_conf.c`, `virDomainDefPostParseCommon`).
    let is_file_name = |name: &str| !name.contains('/') && !name.starts_with('.');
    for vm in &mut facts.vms {
        let domain = running.iter().find(|domain| domain.pid == vm.process.pid && is_file_name(&domain.name));
        vm.next_definition = match domain.map(|domain| read(&domain.name)) {
            // The domain exists until it ends.
            None | Some(Err(Absent::NotOnThisKernel)) => None,
            Some(definition) => Some(definition),
        };
    }
    let names = host.list(DEFINITION_DIRECTORY).unwrap_or_default();
    let idle = names.iter().filter_map(|name| name.strip_suffix(".xml")).filter(|name| is_file_name(name));
    for name in idle.filter(|name| running.iter().all(|domain| domain.name != *name)) {
        let definition = match read(name) {
            Err(Absent::NotOnThisKernel | Absent::Vanished) => continue,
            definition => definition.map(|definition| definition.vm),
        };
        facts.idle_domains.push(VmFacts {
            process: ProcessId { pid: Pid(0), start_time: 0 },
            name: name.to_owned(),
            definition: Some(definition),
            passed_through: Vec::new(),
            threads: Ok(Vec::new()),
            node_memory: None,
            merged_pages: Err(Absent::NotOnThisKernel),
            iothread_loads: Ok(Vec::new()),
            throttling: Ok(None),
            next_definition: None,
            monitor: None,
            guest: None,
        });
    }
}

struct SettingReader<'h> {
    host: &'h dyn Host,
    facts: SettingFacts,
}

impl SettingReader<'_> {
    fn list(&mut self, directory: &str) -> Vec<String> {
        let host = self.host;
        let names = self.facts.directories.entry(directory.to_owned()).or_insert_with(|| host.list(directory));
        names.clone().unwrap_or_default()
    }

    fn read_matching(&mut self, pattern: &str) {
        let mut paths = vec![String::new()];
        for component in pattern.split('/') {
            let mut longer = Vec::new();
            for folder in paths {
                let join = |name: &str| if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") };
                match component.split_once('*') {
                    None => longer.push(join(component)),
                    Some((start, end)) => {
                        let names = self.list(&folder);
                        let is_match = |name: &&String| {
                            name.len() > start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
                        };
                        // `/proc/irq` and the directory of CPUs have other entries beside those with numbers.
                        let is_numbered = folder == "proc/irq" || component == "cpu*";
                        let is_number = |name: &&String| !is_numbered || name[start.len()..].parse::<u32>().is_ok();
                        longer.extend(names.iter().filter(is_match).filter(is_number).map(|name| join(name)));
                    }
                }
            }
            paths = longer;
        }
        paths.iter().for_each(|path| self.read(path));
    }

    fn read(&mut self, path: &str) {
        let text = match self.host.read(path) {
            Err(Absent::NotOnThisKernel) => return,
            answer => answer.map(|bytes| String::from_utf8_lossy(&bytes).trim_end().to_owned()),
        };
        let mode = self.host.file_mode(path);
        self.facts.files.insert(path.to_owned(), SettingFile { text, mode });
    }

    /// The first processor of `/proc/cpuinfo`: the others have the same features.
    fn read_first_cpu(&mut self) {
        let text = match self.host.read("proc/cpuinfo") {
            Err(Absent::NotOnThisKernel) => return,
            answer => answer.map(|bytes| {
                let text = String::from_utf8_lossy(&bytes);
                text.split("\n\n").next().unwrap_or_default().trim_end().to_owned()
            }),
        };
        let file = SettingFile { text, mode: Err(Absent::NotOnThisKernel) };
        self.facts.files.insert("proc/cpuinfo".to_owned(), file);
    }
}

/// The nodes of devices that are passed through to machines.
fn read_passed_through_nodes(reader: &mut SettingReader<'_>, vms: &[&Process]) {
    let addresses: BTreeSet<String> = vms
        .iter()
        .filter_map(|vm| vm.arguments.as_ref().ok())
        .flat_map(|arguments| pagefold_base::identity::virtual_nodes::passed_through_devices(arguments))
        .collect();
    for address in addresses {
        reader.read(&format!("sys/bus/pci/devices/{address}/class"));
        reader.read(&format!("sys/bus/pci/devices/{address}/numa_node"));
    }
}

/// The cgroup of a process and those that contain it, as `cpu.max` of each limits it. libvirt keeps the threads of
/// virtual CPUs in siblings of the cgroup of the main thread (src/hypervisor/domain_cgroup.c).
fn cpu_cgroups(host: &dyn Host, process: &Process) -> Vec<String> {
    let Ok(cgroup) = &process.cgroup else { return Vec::new() };
    let mut cgroups = Vec::new();
    if let Some(machine) = cgroup.strip_suffix("/emulator") {
        let names = host.list(&format!("sys/fs/cgroup{machine}")).unwrap_or_default();
        cgroups.extend(names.iter().filter(|name| name.starts_with("vcpu")).map(|name| format!("{machine}/{name}")));
    }
    let mut path = cgroup.as_str();
    while path.len() > 1 {
        cgroups.push(path.to_owned());
        path = path.rsplit_once('/').map_or("", |(parent, _)| parent);
    }
    cgroups
}

/// The limit of one cgroup. The root and cgroups without the CPU controller have none.
fn read_throttling(host: &dyn Host, cgroup: &str) -> Reading<Option<CpuThrottling>> {
    let limit = match host.read(&format!("sys/fs/cgroup{cgroup}/cpu.max")) {
        Err(Absent::NotOnThisKernel) => None,
        bytes => parse::cpu_max(&bytes?)?,
    };
    let Some(parse::CpuMax { quota, period }) = limit else { return Ok(None) };
    let (periods, throttled_periods) =
        parse::throttled_periods(&host.read(&format!("sys/fs/cgroup{cgroup}/cpu.stat"))?)?;
    Ok(Some(CpuThrottling { cgroup: cgroup.to_owned(), quota, period, periods, throttled_periods }))
}

/// The facts of a machine; `None` if it has ended.
fn read_vm(
    host: &dyn Host,
    process: &Process,
    limits: &BTreeMap<String, Reading<Option<CpuThrottling>>>,
    has_several_nodes: bool,
) -> Option<VmFacts> {
    let vm = process.identity.vm.as_ref()?;
    let is_qemu = vm.monitor == Monitor::Qemu;
    let definition = || process.arguments.clone().and_then(|arguments| parse_vm_definition(&arguments));
    Some(VmFacts {
        process: process.id,
        name: vm.name.clone().unwrap_or_else(|| process.comm.clone()),
        definition: is_qemu.then(definition),
        passed_through: process
            .arguments
            .as_deref()
            .map(pagefold_base::identity::virtual_nodes::passed_through_devices)
            .unwrap_or_default(),
        threads: read_threads(host, process.id, &[]),
        node_memory: has_several_nodes.then(|| read_node_memory(host, process.id)),
        merged_pages: process.ksm.merging_pages.clone(),
        iothread_loads: read_iothread_loads(host, process.id),
        throttling: find_throttling(host, process, limits),
        next_definition: None,
        monitor: None,
        guest: None,
    })
}

fn count_nodes(facts: &SettingFacts) -> usize {
    let names = facts.names(NODE_DIRECTORY).unwrap_or_default();
    names.iter().filter(|name| name.strip_prefix("node").is_some_and(|number| number.parse::<u32>().is_ok())).count()
}

/// The memory of a machine on each node. The kernel walks all of its pages for that.
fn read_node_memory(host: &dyn Host, process: ProcessId) -> Reading<BTreeMap<u32, Bytes>> {
    let memory = parse::node_memory(&pagefold_host::hold(host, process)?.read("numa_maps")?)?;
    // A process without memory has ended.
    if memory.is_empty() { Err(Absent::Vanished) } else { Ok(memory) }
}

/// The limit under which the machine was throttled most often. cgroup v1 has no `cgroup.controllers`; its limits are
/// not read.
fn find_throttling(
    host: &dyn Host,
    process: &Process,
    limits: &BTreeMap<String, Reading<Option<CpuThrottling>>>,
) -> Reading<Option<CpuThrottling>> {
    process.cgroup.as_ref().map_err(Clone::clone)?;
    host.read("sys/fs/cgroup/cgroup.controllers")?;
    let mut worst: Option<CpuThrottling> = None;
    for cgroup in cpu_cgroups(host, process) {
        if let Some(limit) = limits.get(&cgroup).cloned().unwrap_or(Ok(None))?
            && worst.as_ref().is_none_or(|worst| limit.throttled_periods > worst.throttled_periods)
        {
            worst = Some(limit);
        }
    }
    Ok(worst)
}

/// The iothreads of a machine with the CPUs that each took on average since its start. The first minute does not show
/// what is usual.
fn read_iothread_loads(host: &dyn Host, process: ProcessId) -> Reading<Vec<(ThreadRole, f64)>> {
    const MIN_SECONDS: f64 = 60.0;
    let handle = pagefold_host::hold(host, process)?;
    let uptime = read_uptime(host)?;
    let mut loads = Vec::new();
    for tid in host.list(&format!("proc/{}/task", process.pid))? {
        let stat = match handle.read(&format!("task/{tid}/stat")) {
            // It has ended.
            Err(Absent::Vanished | Absent::NotOnThisKernel) => continue,
            bytes => parse::stat(&bytes?)?,
        };
        let role = ThreadRole::from_thread_name(&stat.comm);
        let seconds = uptime - stat.start_time as f64 / USER_HZ;
        if matches!(role, ThreadRole::Iothread(_)) && seconds >= MIN_SECONDS {
            loads.push((role, stat.utime.saturating_add(stat.stime) as f64 / USER_HZ / seconds));
        }
    }
    Ok(loads)
}

/// The threads that run virtual CPUs or serve vhost devices, ascending. Virtual CPUs are those of the list, or without
/// one the threads with their names.
pub(crate) fn read_threads(
    host: &dyn Host,
    process: ProcessId,
    listed_vcpus: &[MonitorVcpu],
) -> Reading<Vec<VmThread>> {
    let handle = pagefold_host::hold(host, process)?;
    let names = host.list(&format!("proc/{}/task", process.pid))?;
    let mut tids: Vec<Pid> = names.iter().filter_map(|name| name.parse().ok().map(Pid)).collect();
    tids.sort_unstable();
    let mut threads = Vec::new();
    for tid in tids {
        let stat = match handle.read(&format!("task/{tid}/stat")) {
            // It has ended.
            Err(Absent::Vanished | Absent::NotOnThisKernel) => continue,
            bytes => parse::stat(&bytes?)?,
        };
        let named = ThreadRole::from_thread_name(&stat.comm);
        // Only where these threads run matters to a rule.
        if listed_vcpus.is_empty() && !matches!(named, ThreadRole::Vcpu(_) | ThreadRole::Vhost) {
            continue;
        }
        let status = match handle.read(&format!("task/{tid}/status")) {
            Err(Absent::Vanished | Absent::NotOnThisKernel) => continue,
            bytes => bytes?,
        };
        // QEMU numbers threads as its own PID namespace does.
        let inner_tid = parse::innermost_pid(&status).unwrap_or(tid);
        let listed = listed_vcpus.iter().find(|vcpu| vcpu.thread == inner_tid.0);
        let role = match (listed, named) {
            (Some(vcpu), _) => ThreadRole::Vcpu(vcpu.number),
            (None, named @ ThreadRole::Vhost) => named,
            (None, named @ ThreadRole::Vcpu(_)) if listed_vcpus.is_empty() => named,
            _ => continue,
        };
        let status = parse::status(&status);
        threads.push(VmThread { tid, role, last_cpu: stat.last_cpu?, allowed_cpus: status.allowed_cpus? });
    }
    Ok(threads)
}
