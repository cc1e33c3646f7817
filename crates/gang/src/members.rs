//! The threads of the selected processes, read from the host.

use crate::decide::gangs::{Candidate, WEIGHT_RANGE};
use crate::decide::nodes::find_home_node;
use pagefold_base::process::Process;
use pagefold_base::{IdSet, Pid, Reading};
use pagefold_host::{Host, ProcessHandle, parse};
use std::collections::{BTreeMap, BTreeSet};

/// The NUMA nodes.
const NODE_DIRECTORY: &str = "sys/devices/system/node";
/// The hierarchy of cgroups.
const CGROUP_ROOT: &str = "sys/fs/cgroup";

/// Reads a process with its threads. Threads that end meanwhile are left out.
///
/// # Errors
/// If the threads cannot be listed.
pub fn read_candidate(host: &dyn Host, handle: &dyn ProcessHandle, process: &Process) -> Reading<Candidate> {
    let vm_name = process.identity.vm.as_ref().and_then(|vm| vm.name.clone());
    Ok(Candidate {
        pid: process.id.pid,
        name: vm_name.unwrap_or_else(|| process.comm.clone()),
        threads: read_threads(host, handle)?,
        cgroup_weight: process.cgroup.as_ref().ok().and_then(|path| read_weight(host, path)),
    })
}

/// The numbers and names of the threads of a process.
///
/// # Errors
/// If they cannot be listed: `Vanished` if the process has ended.
pub fn read_threads(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<Vec<(Pid, String)>> {
    let names = host.list(&format!("proc/{}/task", handle.id().pid))?;
    let tids = names.iter().filter_map(|name| name.parse().ok().map(Pid));
    let read = |tid: Pid| -> Reading<(Pid, String)> {
        let stat = parse::stat(&handle.read(&format!("task/{tid}/stat"))?)?;
        Ok((tid, stat.comm))
    };
    Ok(tids.filter_map(|tid| read(tid).ok()).collect())
}

/// The time that each of these threads of a process has run or waited for a CPU, in nanoseconds. Threads that have ended
/// are left out. It counts with `CONFIG_SCHED_INFO`, which is part of all common kernels.
pub fn read_thread_times(handle: &dyn ProcessHandle, tids: &[Pid]) -> BTreeMap<Pid, u64> {
    let read = |tid: &Pid| -> Reading<(Pid, u64)> {
        let times = parse::schedstat(&handle.read(&format!("task/{tid}/schedstat"))?)?;
        Ok((*tid, times.run_ns.saturating_add(times.wait_ns)))
    };
    tids.iter().filter_map(|tid| read(tid).ok()).collect()
}

/// The number of CPUs that are online and permitted by the affinity of any of these threads.
///
/// # Errors
/// If the CPUs that are online cannot be read.
pub fn count_usable_cpus(host: &dyn Host, handle: &dyn ProcessHandle, tids: &[Pid]) -> Reading<u32> {
    let online: IdSet = parse::number_list(&host.read("sys/devices/system/cpu/online")?)?.into_iter().collect();
    let mut usable = BTreeSet::new();
    for tid in tids {
        let Ok(status) = handle.read(&format!("task/{tid}/status")) else { continue };
        usable.extend(parse::status(&status).allowed_cpus?.intersection(&online).iter());
        if usable.len() == online.iter().count() {
            break;
        }
    }
    Ok(u32::try_from(usable.len()).unwrap_or(u32::MAX))
}

/// The CPUs of each NUMA node that are online. Empty if the nodes cannot be read, such as on a kernel without NUMA.
pub fn read_node_cpus(host: &dyn Host) -> BTreeMap<u32, IdSet> {
    let names = host.list(NODE_DIRECTORY).unwrap_or_default();
    let nodes = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok());
    let read = |node: u32| -> Reading<(u32, IdSet)> {
        let cpus = host.read(&format!("{NODE_DIRECTORY}/node{node}/cpulist"))?;
        Ok((node, parse::number_list(&cpus)?.into_iter().collect()))
    };
    nodes.filter_map(|node| read(node).ok()).collect()
}

/// The home of a gang with this number of vCPUs, by where the memory of its process is now. `None` on a host with one node.
pub fn read_home_node(handle: &dyn ProcessHandle, vcpus: usize, node_cpus: &BTreeMap<u32, IdSet>) -> Option<u32> {
    if node_cpus.len() < 2 {
        return None;
    }
    let memory = handle.read("numa_maps").and_then(|text| parse::node_memory(&text)).ok()?;
    find_home_node(&memory, vcpus, node_cpus)
}

/// The weight of a VM's scope (cgroup v2), which libvirt creates for each VM: `machine-qemu...scope`, with the processes
/// in a child. Other cgroups are not of a VM, and their weight is shared by all processes in them.
fn read_weight(host: &dyn Host, cgroup: &str) -> Option<u32> {
    let end = cgroup.find(".scope").map(|position| position + ".scope".len())?;
    let scope = cgroup.get(..end)?;
    if !scope.rsplit('/').next()?.starts_with("machine-") {
        return None;
    }
    let text = host.read(&format!("{CGROUP_ROOT}{scope}/cpu.weight")).ok()?;
    let weight: u32 = String::from_utf8_lossy(&text).trim().parse().ok()?;
    Some(weight.clamp(*WEIGHT_RANGE.start(), *WEIGHT_RANGE.end()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn usable_cpus_are_online_and_permitted_for_any_thread() {
        let host = FakeHost::booted();
        host.put_file("sys/devices/system/cpu/online", "0-3,6\n");
        host.start_process(7, 1);
        for (tid, allowed) in [(8, "0-1,5"), (9, "1-2")] {
            host.put_file(&format!("proc/7/task/{tid}/status"), &format!("Cpus_allowed_list:\t{allowed}\n"));
            host.put_file(&format!("proc/7/task/{tid}/schedstat"), "300 40 2\n");
        }
        let handle = host.open(Pid(7)).unwrap();
        let count = |tids: &[u32]| {
            count_usable_cpus(&host, &*handle, &tids.iter().map(|tid| Pid(*tid)).collect::<Vec<_>>()).unwrap()
        };
        // The thread 10 has ended.
        assert_eq!((count(&[8]), count(&[8, 9, 10]), count(&[])), (2, 3, 0));
        assert_eq!(read_thread_times(&*handle, &[Pid(8), Pid(10)]), BTreeMap::from([(Pid(8), 340)]));
    }

    #[test]
    fn home_is_where_the_memory_is() {
        let host = FakeHost::booted();
        for (node, cpus) in [(0, "0-1\n"), (1, "2-3\n")] {
            host.put_file(&format!("sys/devices/system/node/node{node}/cpulist"), cpus);
        }
        host.start_process(7, 1);
        host.put_file("proc/7/numa_maps", "7f0000000000 default anon=9 N0=2 N1=7 kernelpagesize_kB=4\n");
        let (handle, nodes) = (host.open(Pid(7)).unwrap(), read_node_cpus(&host));
        assert_eq!(nodes[&1].iter().collect::<Vec<_>>(), [2, 3]);
        assert_eq!(read_home_node(&*handle, 2, &nodes), Some(1));
        assert_eq!(read_home_node(&*handle, 3, &nodes), None);
        assert_eq!(read_home_node(&*handle, 2, &[nodes.into_iter().next().unwrap()].into()), None);
    }

    #[test]
    fn weight_is_that_of_the_scope_of_a_machine() {
        let host = FakeHost::booted();
        host.put_file("sys/fs/cgroup/machine.slice/machine-qemu-1-a.scope/cpu.weight", "250\n");
        host.put_file("sys/fs/cgroup/user.slice/session.scope/cpu.weight", "300\n");
        let read = |path| read_weight(&host, path);
        assert_eq!(read("/machine.slice/machine-qemu-1-a.scope/libvirt/emulator"), Some(250));
        assert_eq!((read("/user.slice/session.scope"), read("/system.slice/a.service")), (None, None));
    }
}
