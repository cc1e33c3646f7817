//! Asks the agents within guests, for the rules of [`crate::decide::audit`] about guests.
//!
//! It is separate from the other facts because an agent serves one client at a time: only an operator can know that no
//! other program needs it now.
//!
//! Limits: the answers are the guest's word, and not from one instant.

use crate::decide::audit::facts::{GuestFacts, VmFacts};
use pagefold_base::Reading;
use pagefold_host::guest_agent::{AgentAccess, GuestQuestion};
use pagefold_host::{Host, hold, parse};
use std::thread;

const STAT: &str = "/proc/stat";

/// The files that the rules read of a guest, with a limit of their length. Of `/proc/cpuinfo` the first CPU suffices,
/// and of `/proc/stat` the first line.
const FILES: &[(&str, usize)] = &[
    ("/sys/devices/system/clocksource/clocksource0/current_clocksource", 4096),
    ("/sys/devices/system/clocksource/clocksource0/available_clocksource", 4096),
    ("/sys/devices/system/cpu/cpuidle/current_driver", 4096),
    (STAT, 4096),
    ("/proc/cpuinfo", 16 << 10),
];

/// The maximum number of guests that are asked at once. Each may take until its time limit without using a CPU.
const MAX_CONCURRENT_GUESTS: usize = 256;

/// The same if libvirt is asked, too. Each agent that hangs takes one of libvirt's threads for some seconds, of which there
/// are 20 by default (`max_workers` of libvirtd.conf).
const MAX_CONCURRENT_GUESTS_OF_LIBVIRT: usize = 4;

/// Asks the agent of each of these machines that is QEMU's, and adds the answers to its facts.
pub fn gather_guest_facts<'a>(host: &dyn Host, vms: impl Iterator<Item = &'a mut VmFacts>, access: AgentAccess) {
    let mut vms: Vec<&mut VmFacts> = vms.filter(|vm| vm.definition.is_some()).collect();
    let max_concurrent = match access {
        AgentAccess::Socket => MAX_CONCURRENT_GUESTS,
        AgentAccess::SocketOrLibvirt => MAX_CONCURRENT_GUESTS_OF_LIBVIRT,
    };
    for concurrent in vms.chunks_mut(max_concurrent) {
        thread::scope(|scope| {
            for vm in concurrent {
                scope.spawn(|| vm.guest = Some(ask_guest(host, vm, access)));
            }
        });
    }
}

fn ask_guest(host: &dyn Host, vm: &VmFacts, access: AgentAccess) -> Reading<GuestFacts> {
    let files = FILES.iter().map(|&(path, max_bytes)| GuestQuestion::File { path, max_bytes });
    let first = [GuestQuestion::OperatingSystem, GuestQuestion::Vcpus];
    // The configuration is the longest file, so it comes last.
    let questions: Vec<GuestQuestion> =
        first.into_iter().chain(files).chain([GuestQuestion::TimerConfiguration]).collect();
    let answers = hold(host, vm.process)?.ask_guest_agent(&questions, access)?;
    let mut facts = GuestFacts::default();
    for (question, answer) in questions.into_iter().zip(answers) {
        match question {
            GuestQuestion::OperatingSystem => facts.system = answer.and_then(|bytes| parse::guest_system(&bytes)),
            GuestQuestion::Vcpus => facts.vcpus = answer.and_then(|bytes| parse::guest_vcpus(&bytes)),
            GuestQuestion::File { path: STAT, .. } => {
                facts.steal_percent = answer.and_then(|bytes| parse::steal_percent(&bytes));
            }
            GuestQuestion::File { path, .. } => {
                facts.files.insert(path, answer);
            }
            GuestQuestion::TimerConfiguration => facts.timer_configuration = answer,
        }
    }
    Ok(facts)
}
