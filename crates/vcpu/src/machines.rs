//! The virtual machines of a host and the threads that run their vCPUs.

use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::process::Process;
use pagefold_base::{Pid, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{Error, ProcessSelection, scan_scope};
use pagefold_host::action::LibvirtPin;
use pagefold_host::{Host, ProcessHandle, observe};
use pagefold_numa::threads::{self, ThreadPlacement, ThreadRole};
use std::collections::BTreeMap;

/// A virtual machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Its process.
    pub process: Process,
    /// Its vCPUs by their numbers. Empty if its monitor does not name its threads and libvirt does not know it.
    pub vcpus: BTreeMap<u32, ThreadPlacement>,
    /// What libvirt calls the threads, if it pins them.
    pub libvirt_pins: BTreeMap<Pid, LibvirtPin>,
    /// Whether the kernel tells the guest how long its vCPUs waited; `None` if that is not known.
    pub shows_steal: Option<bool>,
}

impl Machine {
    /// Its name, or else that of its program.
    pub fn name(&self) -> String {
        let name = self.process.identity.vm.as_ref().and_then(|vm| vm.name.clone());
        name.unwrap_or_else(|| self.process.comm.clone())
    }

    /// The threads of its vCPUs.
    pub fn tids(&self) -> Vec<Pid> {
        self.vcpus.values().map(|thread| thread.tid).collect()
    }
}

/// The machines that are selected, and processes that could not be read. A process that is selected by number needs to
/// be no virtual machine if its threads are named as those of one.
///
/// # Errors
/// If processes cannot be listed or selected.
pub fn find_machines(
    host: &dyn Host,
    selection: &ProcessSelection,
) -> Result<(Vec<Machine>, Vec<UnscannedProcess>), Error> {
    let domains = observe::libvirt_domains(host).unwrap_or_default();
    let (found, unscanned) = scan_scope::inspect_selected(host, selection, |handle, process| {
        let is_selected_by_number = selection.pids.contains(&process.id.pid);
        if process.identity.vm.is_none() && !is_selected_by_number {
            return Ok(None);
        }
        let domain = domains.iter().find(|domain| domain.pid == process.id.pid && process.identity.vm.is_some());
        let machine = read_machine(host, handle, process, domain)?;
        Ok(Some(machine).filter(|machine| !machine.vcpus.is_empty() || machine.process.identity.vm.is_some()))
    })?;
    Ok((found.into_iter().flatten().collect(), unscanned))
}

fn read_machine(
    host: &dyn Host,
    handle: &dyn ProcessHandle,
    process: Process,
    domain: Option<&LibvirtDomain>,
) -> Reading<Machine> {
    let names = |thread: &ThreadPlacement| match thread.role {
        ThreadRole::Vcpu(number) => Some(number),
        _ => None,
    };
    let threads = threads::read_threads(host, handle, true)?;
    let number = |thread: &ThreadPlacement| {
        let by_libvirt = domain.and_then(|domain| domain.vcpu_threads.iter().find(|(_, tid)| **tid == thread.tid));
        by_libvirt.map(|(&number, _)| number).or_else(|| names(thread))
    };
    let libvirt_pins = match domain {
        Some(domain) => threads.iter().filter_map(|thread| Some((thread.tid, thread.libvirt_pin(domain)?))).collect(),
        None => BTreeMap::new(),
    };
    let shows_steal = shows_steal(handle, &threads, process.arguments.as_deref().unwrap_or_default());
    let vcpus = threads.into_iter().filter_map(|thread| Some((number(&thread)?, thread))).collect();
    Ok(Machine { process, vcpus, libvirt_pins, shows_steal })
}

/// Whether the kernel tells the guest its steal time: KVM does (`record_steal_time`, arch/x86/kvm/x86.c), unless
/// QEMU's `-cpu` turns the feature or all of KVM's features off; an emulator does not.
fn shows_steal(handle: &dyn ProcessHandle, threads: &[ThreadPlacement], arguments: &[String]) -> Option<bool> {
    let is_off = arguments.iter().any(|argument| {
        argument.split(',').any(|option| matches!(option, "kvm=off" | "kvm-steal-time=off" | "-kvm-steal-time"))
    });
    let vcpu = threads.iter().find(|thread| matches!(thread.role, ThreadRole::Vcpu(_)))?;
    let stat = handle.read(&format!("task/{}/stat", vcpu.tid)).ok()?;
    let name = pagefold_host::parse::stat(&stat).ok()?.comm;
    match name.rsplit_once('/') {
        Some((_, "KVM")) => Some(!is_off),
        Some((_, "TCG")) => Some(false),
        // Firecracker and cloud-hypervisor run on KVM only.
        None if name.starts_with("fc_vcpu") || name.starts_with("vcpu") => Some(true),
        _ => None,
    }
}
