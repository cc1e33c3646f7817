//! What QEMU's monitors and libvirt say about virtual machines, in the map.
//!
//! A machine whose monitor does not answer keeps what the command line, libvirt's state and the names of its threads say.

use crate::decide::machine::{self, MachineThread, SourceConflict, VcpuSource};
use crate::map::ProcessPlacement;
use crate::threads;
use pagefold_base::identity::Monitor;
use pagefold_base::identity::qemu_monitor::MonitorAnswers;
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::{Pid, ProcessId, Reading};
use pagefold_host::qemu_monitor::{MonitorAccess, ask_monitors};
use pagefold_host::{Host, ProcessHandle, hold, parse};
use std::collections::BTreeMap;

/// What is known about a virtual machine beyond its command line and the names of its threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineFacts {
    /// Where the threads of vCPUs are known from.
    pub vcpu_source: VcpuSource,
    /// The thread of each vCPU; empty if only names are known.
    pub vcpu_threads: BTreeMap<u32, Pid>,
    /// The answers of the monitor; `None` if it was not asked.
    pub monitor: Option<Reading<MonitorAnswers>>,
    /// Disagreements between sources.
    pub conflicts: Vec<SourceConflict>,
}

/// Add what monitors and libvirt say to the machines of a map. Without `access`, no monitor is asked.
pub(crate) fn add_machine_facts(
    host: &dyn Host,
    machines: &mut [&mut ProcessPlacement],
    access: Option<MonitorAccess>,
) {
    let has_monitor = |placement: &ProcessPlacement| {
        placement.process.identity.vm.as_ref().is_some_and(|vm| vm.monitor == Monitor::Qemu)
    };
    let asked: Vec<ProcessId> = access
        .iter()
        .flat_map(|_| machines.iter().filter(|placement| has_monitor(placement)))
        .map(|placement| placement.process.id)
        .collect();
    let answers = ask_monitors(host, &asked, access.unwrap_or_default());
    let mut answers: BTreeMap<ProcessId, Reading<MonitorAnswers>> = asked.into_iter().zip(answers).collect();
    for placement in machines.iter_mut().filter(|placement| placement.process.identity.vm.is_some()) {
        let monitor = answers.remove(&placement.process.id);
        // Without a handle the process has ended, and names are all that is known.
        if let Ok(handle) = hold(host, placement.process.id) {
            add_facts(host, &*handle, placement, monitor);
        }
    }
}

fn add_facts(
    host: &dyn Host,
    handle: &dyn ProcessHandle,
    placement: &mut ProcessPlacement,
    monitor: Option<Reading<MonitorAnswers>>,
) {
    let mut facts = MachineFacts { monitor, ..MachineFacts::default() };
    let answers = facts.monitor.as_ref().and_then(|monitor| monitor.as_ref().ok());
    let listed = answers.and_then(|answers| answers.vcpus.as_deref().ok());
    let in_libvirt = placement.libvirt.as_ref().map(|domain| &domain.vcpu_threads).filter(|vcpus| !vcpus.is_empty());
    if listed.is_some() {
        // vCPUs may have been plugged since the threads were read.
        placement.threads = threads::read_threads(host, handle, true);
    }
    let threads: Vec<MachineThread> = match (listed.is_some() || in_libvirt.is_some(), &placement.threads) {
        (true, Ok(threads)) => threads
            .iter()
            .map(|thread| MachineThread {
                tid: thread.tid,
                inner_tid: innermost_tid(handle, thread.tid),
                named_role: thread.role.clone(),
            })
            .collect(),
        _ => Vec::new(),
    };
    let known = (threads.as_slice(), placement.process.id.pid);
    let by_monitor = listed.map(|vcpus| {
        let pairs = vcpus.iter().map(|vcpu| (vcpu.number, vcpu.thread));
        machine::find_vcpu_threads(VcpuSource::Monitor, pairs, known, |thread| thread.inner_tid)
    });
    let by_libvirt = in_libvirt.map(|vcpus| {
        let pairs = vcpus.iter().map(|(&vcpu, thread)| (vcpu, thread.0));
        machine::find_vcpu_threads(VcpuSource::Libvirt, pairs, known, |thread| thread.tid)
    });
    if let (Some(Ok(monitor)), Some(Ok(libvirt))) = (&by_monitor, &by_libvirt) {
        machine::compare_with_libvirt(monitor, libvirt, &mut facts.conflicts);
    }
    for (source, found) in [(VcpuSource::Libvirt, by_libvirt), (VcpuSource::Monitor, by_monitor)] {
        match found {
            Some(Ok(vcpu_threads)) => (facts.vcpu_source, facts.vcpu_threads) = (source, vcpu_threads),
            Some(Err(conflict)) => facts.conflicts.push(conflict),
            None => {}
        }
    }
    if facts.vcpu_source != VcpuSource::ThreadNames {
        let (source, vcpu_threads) = (facts.vcpu_source, &facts.vcpu_threads);
        let mut roles = machine::thread_roles(source, vcpu_threads, &threads, &mut facts.conflicts);
        for thread in placement.threads.iter_mut().flatten() {
            thread.role = roles.remove(&thread.tid).unwrap_or_else(|| thread.role.clone());
        }
    }
    // A source that lists threads of other processes is not believed about nodes either.
    let mut nodes: Vec<&mut VirtualNode> =
        placement.virtual_nodes.iter_mut().map(|placement| &mut placement.node).collect();
    if facts.vcpu_source == VcpuSource::Monitor
        && let Some(vcpus) = listed
    {
        machine::assign_vcpus_to_nodes(vcpus, nodes.iter_mut().map(|node| &mut **node), &mut facts.conflicts);
    }
    if let Some(backends) = answers.and_then(|answers| answers.backends.as_deref().ok()) {
        machine::compare_backends(backends, nodes, &mut facts.conflicts);
        let nodes = placement.virtual_nodes.iter().map(|placement| &placement.node);
        placement.bound_nodes = machine::other_bound_nodes(placement.bound_nodes.take(), backends, nodes);
    }
    placement.machine = Some(facts);
}

/// The number of a thread in its own PID namespace, the last one of `NSpid:` (fs/proc/array.c, `task_state`). Kernels
/// without namespaces show none.
fn innermost_tid(handle: &dyn ProcessHandle, tid: Pid) -> Pid {
    let status = handle.read(&format!("task/{tid}/status")).unwrap_or_default();
    parse::innermost_pid(&status).unwrap_or(tid)
}

#[cfg(test)]
mod tests;
