//! Disks and network devices of the host, and where the devices of a machine are.

use super::facts::{VmFacts, VmThread};
use super::memory::{bound_nodes, node_cpus};
use super::{Judge, SettingRule, if_machines_are_known, with_write};
use crate::decide::change::{ApplyMethod, SettingChange, SettingDetails};
use crate::decide::{HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::{Absent, IdSet};

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "nvme-scheduler",
            source: "/sys/block/nvme*/queue/scheduler",
            why: "An NVMe disk orders its requests itself, in many queues. A scheduler of the host only adds locks \
                  and CPU time.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "none",
            details: SettingDetails {
                benefit: "less CPU time for each request, and more requests per second",
                risk: "no fairness between processes; kyber or bfq give it where it is needed",
                method: ApplyMethod::Live,
                undo: "write the scheduler that was there",
                counter: "read I/Os, read ticks, write I/Os and write ticks in /sys/block/nvme*/stat; CPU time of the \
                          machines' iothreads",
                versions: "Linux 4.12 and later",
                citation: "Documentation/block/switching-sched.rst; block/elevator.c (elevator_get_default)",
            },
        },
        judge: Judge::Host(judge_schedulers),
    },
    SettingRule {
        rule: RuleInfo {
            id: "io-uring",
            source: "/proc/sys/kernel/io_uring_disabled",
            why: "A machine with aio=io_uring runs on, but does not start again once io_uring is disabled.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "0 while a machine uses io_uring, or 1 with the group of QEMU in io_uring_group",
            details: SettingDetails {
                benefit: "machines with io_uring start",
                risk: "io_uring is a large interface of the kernel; some hosts disable it on purpose",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "none: the kernel does not count refused calls of io_uring; the machine starts",
                versions: "Linux 6.6 and later; QEMU 5.0 and later",
                citation: "Documentation/admin-guide/sysctl/kernel.rst (io_uring_disabled)",
            },
        },
        judge: Judge::Host(judge_io_uring),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vhost-worker-node",
            source: "/proc/PID/task/TID/status, /proc/PID/task/TID/stat, /proc/PID/numa_maps, /proc/PID/ksm_stat",
            why: "A vhost worker copies packets between guest RAM and the host's. On another node than its machine, \
                  each packet crosses the link between nodes.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "vhost workers may run only on the nodes of the machine; if it is not bound, they run where \
                       its memory is",
            details: SettingDetails {
                benefit: "more packets per second, steadier latency",
                risk: "workers compete with the virtual CPUs of their node",
                method: ApplyMethod::Manual,
                undo: "restore the affinity of the threads",
                counter: "run delay of the workers; numa_miss",
                versions: "workers are threads of the machine since Linux 6.4",
                citation: "kernel/vhost_task.c; drivers/vhost/vhost.c",
            },
        },
        judge: Judge::Vm(judge_vhost_workers),
    },
    SettingRule {
        rule: RuleInfo {
            id: "device-node",
            source: "/sys/bus/pci/devices/*/class, /sys/bus/pci/devices/*/numa_node, /proc/PID/task/TID/status, \
                     /proc/PID/numa_maps, /proc/PID/ksm_stat",
            why: "A device that is passed through writes to guest RAM. If it is attached to another node, all of its \
                  data crosses the link between nodes.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "passed-through devices are on a node of the machine",
            details: SettingDetails {
                benefit: "more throughput and less latency of the device",
                risk: "the node of the device may be full",
                method: ApplyMethod::Manual,
                undo: "bind the machine as before",
                counter: "numa_maps of the machine",
                versions: "all kernels",
                citation: "Documentation/ABI/testing/sysfs-bus-pci (numa_node)",
            },
        },
        judge: Judge::Vm(judge_device_node),
    },
];

fn judge_schedulers(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let (mut shown, mut slow) = (Vec::new(), Vec::new());
    for disk in settings.find_names("sys/block")?.iter().filter(|disk| disk.starts_with("nvme")) {
        let path = format!("sys/block/{disk}/queue/scheduler");
        let Some(text) = settings.find_text(&path)? else { continue };
        // A disk without a choice shows `none` without brackets (block/elevator.c, `elv_iosched_show`).
        let scheduler = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or(text, |(name, _)| name);
        shown.push(format!("{disk} {scheduler}"));
        if scheduler != "none" {
            slow.push((disk, path));
        }
    }
    if shown.is_empty() {
        return Ok(rule.not_applicable("the host has no NVMe disk", "none"));
    }
    let value = shown.join(", ");
    if slow.is_empty() {
        return Ok(rule.ok("NVMe disks order their requests themselves", value));
    }
    let mut finding = rule
        .warn("requests to NVMe disks pass a scheduler of the host", value)
        .remedy(slow.iter().map(|(_, path)| format!("echo none > /{path}")))
        .verify(format!("grep -F '[none]' /{}", slow[0].1));
    finding.changes =
        slow.into_iter().map(|(_, path)| SettingChange::Write { path, value: "none".to_owned() }).collect();
    Ok(finding)
}

fn judge_io_uring(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = "proc/sys/kernel/io_uring_disabled";
    let Some(mode) = settings.find_number(path)? else {
        return Ok(rule.not_applicable("the kernel cannot disable io_uring", "absent"));
    };
    let mut users = 0;
    for vm in &settings.vms {
        match &vm.definition {
            None => {}
            Some(Ok(definition)) => users += usize::from(definition.disks.iter().any(|disk| disk.aio == "io_uring")),
            Some(Err(absent)) => {
                let reading_name = format!("/proc/{}/cmdline", vm.process.pid);
                return Err(MissingReading { reading_name, absent: absent.clone() });
            }
        }
    }
    let value = format!("io_uring_disabled = {mode}, virtual machines that use io_uring: {users}");
    match (mode, users) {
        (0, _) => Ok(rule.ok("io_uring is allowed", value)),
        (_, 0) => if_machines_are_known(rule.ok("io_uring is disabled, and no virtual machine uses it", value), facts),
        _ => {
            let title = match mode {
                1 => "virtual machines that use io_uring start again only if QEMU is root or in io_uring_group",
                _ => "virtual machines that use io_uring will not start again",
            };
            let finding = with_write(rule.warn(title, value), path, "0").on_request();
            let commands = finding.remedy.clone();
            let alternatives = [
                "# io_uring may be disabled on purpose: then use aio=native or aio=threads for these machines, or allow",
                "# it for one group: 1 in io_uring_disabled, and the group of QEMU's user in /proc/sys/kernel/io_uring_group",
                "# to allow it for all processes:",
            ];
            Ok(finding.remedy(alternatives.map(str::to_owned).into_iter().chain(commands)))
        }
    }
}

/// Where a machine is.
struct MachineNodes {
    nodes: IdSet,
    /// The CPUs of the nodes.
    cpus: IdSet,
    /// Whether its virtual CPUs are bound to the nodes; otherwise its memory is there.
    is_bound: bool,
}

/// The nodes to which a machine is bound, else those of its memory; or why the rule does not apply.
fn machine_nodes(vm: &VmFacts, facts: &HostFacts) -> Result<Result<MachineNodes, &'static str>, MissingReading> {
    let nodes = node_cpus(&facts.settings)?;
    if nodes.len() < 2 {
        return Ok(Err("the host has one node"));
    }
    let bound = bound_nodes(vm, &nodes)?;
    let is_bound = bound.is_some();
    let own = match bound {
        Some(bound) => bound,
        None => vm.require_node_memory(facts)?.nodes()?,
    };
    let cpus = nodes.iter().filter(|(node, _)| own.contains(**node)).flat_map(|(_, cpus)| cpus.iter()).collect();
    Ok(Ok(MachineNodes { nodes: own, cpus, is_bound }))
}

/// The result for a machine of which no thread is a vhost worker. Before Linux 6.4 workers are kernel threads, which
/// the threads of the machine do not include.
fn no_vhost_worker(rule: &'static RuleInfo, vm: &VmFacts) -> RuleResult {
    let networks = vm.definition.iter().flatten().flat_map(|definition| &definition.networks);
    let with_vhost: Vec<&str> = networks.filter(|network| network.vhost).map(|network| &*network.id).collect();
    if with_vhost.is_empty() {
        return Ok(rule.not_applicable("it has no vhost worker", "none"));
    }
    let why = format!(
        "{} uses vhost, but no thread of the machine is a vhost worker: before Linux 6.4 it is a kernel thread vhost-{}",
        with_vhost.join(", "),
        vm.process.pid
    );
    Err(MissingReading { reading_name: "the vhost workers".to_owned(), absent: Absent::NotAsked(why) })
}

fn judge_vhost_workers(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let threads = require("the threads of the machine", &vm.threads)?;
    let workers: Vec<_> = threads.iter().filter(|thread| thread.role == ThreadRole::Vhost).collect();
    if workers.is_empty() {
        return no_vhost_worker(rule, vm);
    }
    let MachineNodes { nodes, cpus, is_bound } = match machine_nodes(vm, facts)? {
        Ok(bound) => bound,
        Err(reason) => return Ok(rule.not_applicable(reason, format!("{} workers", workers.len()))),
    };
    let taskset = |worker: &&&VmThread| format!("taskset -pc {cpus} {}", worker.tid);
    if is_bound {
        let astray: Vec<_> = workers.iter().filter(|worker| !worker.allowed_cpus.is_subset(&cpus)).collect();
        let value = format!("{} of {} workers may leave the nodes {nodes}", astray.len(), workers.len());
        if astray.is_empty() {
            return Ok(rule.ok("vhost workers stay on the nodes of the machine", value));
        }
        return Ok(rule
            .warn("vhost workers may run on other nodes than the machine", value)
            .remedy(astray.iter().map(taskset))
            .verify(format!("taskset -pc {}", astray[0].tid)));
    }
    // The virtual CPUs may leave the nodes of the memory as well, so only workers that do count.
    let remote: Vec<_> = workers.iter().filter(|worker| !cpus.contains(worker.last_cpu)).collect();
    let value = format!("{} of {} workers ran last off the memory on the nodes {nodes}", remote.len(), workers.len());
    if remote.is_empty() {
        return Ok(rule.ok("vhost workers run where the memory of the machine is", value));
    }
    let place =
        "# bind the machine to the node of its memory, and its workers with it: pagefold numa plan; or the workers:";
    Ok(rule
        .warn("vhost workers run on other nodes than the memory of the machine", value)
        .remedy([place.to_owned()].into_iter().chain(remote.iter().map(taskset)))
        .verify(format!("taskset -pc {}", remote[0].tid)))
}

/// The kind of a PCI device by its class, as a prefix (include/linux/pci_ids.h).
fn device_kind(class: &str) -> &'static str {
    match class.get(..6) {
        Some("0x0108") => "NVMe ",
        Some("0x0200") => "NIC ",
        Some("0x0300" | "0x0302") => "GPU ",
        _ => "",
    }
}

fn judge_device_node(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    if let Some(Err(absent)) = &vm.definition {
        let reading_name = format!("/proc/{}/cmdline", vm.process.pid);
        return Err(MissingReading { reading_name, absent: absent.clone() });
    }
    if vm.passed_through.is_empty() {
        return Ok(rule.not_applicable("no device is passed through", "none"));
    }
    let nodes = match machine_nodes(vm, facts)? {
        Ok(machine) => machine.nodes,
        Err(reason) => return Ok(rule.not_applicable(reason, vm.passed_through.join(", "))),
    };
    let (mut shown, mut is_remote) = (Vec::new(), false);
    for address in &vm.passed_through {
        let text = facts.settings.find_text(&format!("sys/bus/pci/devices/{address}/numa_node"))?;
        // -1: the firmware does not tell.
        let Some(node) = text.and_then(|text| text.parse::<u32>().ok()) else { continue };
        let class = facts.settings.find_text(&format!("sys/bus/pci/devices/{address}/class"))?;
        shown.push(format!("{}{address} on node {node}", class.map_or("", device_kind)));
        is_remote |= !nodes.contains(node);
    }
    if shown.is_empty() {
        return Ok(rule.not_applicable("the firmware does not tell the nodes of devices", vm.passed_through.join(", ")));
    }
    let value = format!("{}, machine on {nodes}", shown.join(", "));
    if !is_remote {
        return Ok(rule.ok("passed-through devices are on a node of the machine", value));
    }
    Ok(rule
        .warn("a passed-through device is on another node than the machine", value)
        .remedy(["# bind the machine to the node of the device, or pass a device of its node through"])
        .verify("pagefold doctor"))
}
