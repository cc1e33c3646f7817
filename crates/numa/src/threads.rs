//! Where the threads of a process run and may run.

use crate::decide::{self, NodeShares};
use crate::topology::Topology;
pub use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::{IdSet, Pid, Reading};
use pagefold_host::action::{LibvirtPin, LibvirtPinTarget};
use pagefold_host::{Host, ProcessHandle, parse};

/// A thread of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadPlacement {
    /// Its number.
    pub tid: Pid,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
    /// What it does.
    pub role: ThreadRole,
    /// The CPU on which it ran last.
    pub last_cpu: u32,
    /// The CPUs on which it may run.
    pub allowed_cpus: IdSet,
    /// The CPUs that its owner permits: those above, unless Pagefold has restricted it further.
    pub permitted_cpus: IdSet,
    /// The CPU time that it has used, in ticks of 10 ms.
    pub cpu_ticks: u64,
}

impl ThreadPlacement {
    /// A CPU on which it will run: the last one, unless it may no longer run there.
    pub fn next_cpu(&self) -> u32 {
        let is_allowed = self.allowed_cpus.is_empty() || self.allowed_cpus.contains(self.last_cpu);
        if is_allowed { self.last_cpu } else { self.allowed_cpus.iter().next().unwrap_or(self.last_cpu) }
    }

    /// What libvirt calls it, if it is a thread of this domain that libvirt pins. libvirt's state names the threads of
    /// virtual CPUs and the main thread; an iothread is known by its name. A process that gives itself false names
    /// changes only its own pins.
    pub fn libvirt_pin(&self, domain: &LibvirtDomain) -> Option<LibvirtPin> {
        let vcpu = domain.vcpu_threads.iter().find(|(_, thread)| **thread == self.tid);
        let target = match (vcpu, self.role.libvirt_iothread()) {
            (Some((&number, _)), _) => LibvirtPinTarget::Vcpu(number),
            (None, _) if self.tid == domain.pid => LibvirtPinTarget::Emulator,
            (None, Some(number)) => LibvirtPinTarget::Iothread(number),
            (None, None) => return None,
        };
        Some(LibvirtPin { domain: domain.uuid.clone(), target })
    }
}

/// The threads that run the virtual CPUs of a virtual node.
pub fn vcpu_threads<'t>(
    threads: &'t [ThreadPlacement],
    node: &'t VirtualNode,
) -> impl Iterator<Item = &'t ThreadPlacement> {
    threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(number) if node.vcpus.contains(number)))
}

/// The threads that access the memory of a virtual machine most: its virtual CPUs; else all threads.
pub fn working_threads(threads: &[ThreadPlacement]) -> impl Iterator<Item = &ThreadPlacement> {
    let is_vcpu = |thread: &ThreadPlacement| matches!(thread.role, ThreadRole::Vcpu(_));
    let has_vcpus = threads.iter().any(is_vcpu);
    threads.iter().filter(move |thread| !has_vcpus || is_vcpu(thread))
}

/// The shares of nodes in the CPU time of threads, each at the node where it runs next. A thread counts one tick at
/// least.
pub fn cpu_shares<'t>(topology: &Topology, threads: impl IntoIterator<Item = &'t ThreadPlacement>) -> NodeShares {
    let node_ticks =
        |thread: &ThreadPlacement| Some((topology.node_of_cpu(thread.next_cpu())?, thread.cpu_ticks.max(1)));
    decide::shares(threads.into_iter().filter_map(node_ticks))
}

/// Reads the threads of a process, ascending by number. Only those of a virtual machine have roles. Threads that end meanwhile are left out.
///
/// # Errors
/// If the threads cannot be listed: `Vanished` if the process has ended.
pub fn read_threads(host: &dyn Host, handle: &dyn ProcessHandle, is_vm: bool) -> Reading<Vec<ThreadPlacement>> {
    let names = host.list(&format!("proc/{}/task", handle.id().pid))?;
    let mut tids: Vec<Pid> = names.iter().filter_map(|name| name.parse().ok().map(Pid)).collect();
    tids.sort_unstable();
    Ok(tids.into_iter().filter_map(|tid| read_thread(handle, tid, is_vm).ok()).collect())
}

/// Reads a thread. Only those of a virtual machine have roles.
pub(crate) fn read_thread(handle: &dyn ProcessHandle, tid: Pid, is_vm: bool) -> Reading<ThreadPlacement> {
    let stat = parse::stat(&handle.read(&format!("task/{tid}/stat"))?)?;
    let status = parse::status(&handle.read(&format!("task/{tid}/status"))?);
    let allowed_cpus = status.allowed_cpus?;
    Ok(ThreadPlacement {
        tid,
        start_time: stat.start_time,
        role: if is_vm { ThreadRole::from_thread_name(&stat.comm) } else { ThreadRole::Other },
        last_cpu: stat.last_cpu?,
        permitted_cpus: allowed_cpus.clone(),
        allowed_cpus,
        cpu_ticks: stat.utime.saturating_add(stat.stime),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: u32, name: &str, allowed: &str) -> ThreadPlacement {
        ThreadPlacement {
            tid: Pid(tid),
            start_time: 1,
            role: ThreadRole::from_thread_name(name),
            last_cpu: 3,
            allowed_cpus: allowed.parse().unwrap(),
            permitted_cpus: IdSet::default(),
            cpu_ticks: 0,
        }
    }

    #[test]
    fn thread_that_was_moved_runs_on_a_permitted_cpu() {
        assert_eq!(["0-7", "4-5", ""].map(|allowed| thread(1, "", allowed).next_cpu()), [3, 4, 3]);
    }

    #[test]
    fn libvirt_pins_main_thread_vcpus_and_iothreads() {
        let domain = LibvirtDomain {
            name: "db".to_owned(),
            uuid: "uuid".to_owned(),
            pid: Pid(7),
            vcpu_threads: [(0, Pid(8)), (1, Pid(9))].into(),
            strict_nodes: None,
        };
        let target = |tid, name| thread(tid, name, "0").libvirt_pin(&domain).map(|pin| pin.target);
        assert_eq!(target(7, "qemu-system-x86"), Some(LibvirtPinTarget::Emulator));
        // Its state counts, whatever the thread's name is.
        assert_eq!(target(9, "IO iothread1"), Some(LibvirtPinTarget::Vcpu(1)));
        assert_eq!(target(10, "IO iothread2"), Some(LibvirtPinTarget::Iothread(2)));
        for name in ["IO disk", "CPU 0/KVM", "vhost-7", "worker"] {
            assert_eq!(target(10, name), None, "{name}");
        }
    }
}
