//! Asks QEMU's monitors, for the rules of [`crate::decide::audit`] about virtual machines.
//!
//! A monitor knows what the command line does not: virtual CPUs and memory that were plugged later, and the threads of
//! virtual CPUs without names of their own. It is separate from the other facts because the daemon, which examines a
//! host often, asks no monitor.
//!
//! Limits: monitors that another client uses are left alone. Those of libvirt's domains are asked through libvirt, and only
//! at the operator's request, because libvirt marks the domain as tainted then.

use crate::decide::audit::facts::VmFacts;
use crate::setting_facts::read_threads;
use pagefold_base::ProcessId;
use pagefold_base::identity::qemu_monitor::{MonitorAnswers, MonitorVcpu};
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_host::Host;
use pagefold_host::qemu_monitor::{MonitorAccess, ask_monitors};

/// Asks the monitor of each machine that is QEMU's, and adds the answers to its facts.
pub fn gather_monitor_facts<'a>(host: &dyn Host, vms: impl Iterator<Item = &'a mut VmFacts>, access: MonitorAccess) {
    let mut vms: Vec<&mut VmFacts> = vms.filter(|vm| vm.definition.is_some()).collect();
    let processes: Vec<ProcessId> = vms.iter().map(|vm| vm.process).collect();
    let answers = ask_monitors(host, &processes, access);
    for (vm, answers) in vms.iter_mut().zip(answers) {
        if let Ok(MonitorAnswers { vcpus: Ok(vcpus), .. }) = &answers {
            add_vcpu_threads(host, vm, vcpus);
        }
        vm.monitor = Some(answers);
    }
}

/// Replaces the threads that are known by their names. A monitor that lists a thread which the machine does not have, or
/// its main thread, is not believed.
fn add_vcpu_threads(host: &dyn Host, vm: &mut VmFacts, vcpus: &[MonitorVcpu]) {
    let Ok(threads) = read_threads(host, vm.process, vcpus) else { return };
    let listed = threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
    let is_main = |tid| tid == vm.process.pid;
    if listed.clone().count() == vcpus.len() && listed.into_iter().all(|thread| !is_main(thread.tid)) {
        vm.threads = Ok(threads);
    }
}
