//! Asks the agents within guests, for the rules of [`crate::decide::audit`] about guests.
//!
//! It is separate from the other facts because an agent serves one client at a time: only an operator can know that no
//! other program needs it now.
//!
//! Limits: the answers are the guest's word, and not from one instant.

use crate::decide::audit::facts::{GuestFacts, VmFacts};
use pagefold_base::identity::guest_agent::{AgentChannel, agent_channel};
use pagefold_base::{ProcessId, Reading};
use pagefold_host::guest_agent::{AgentAccess, GuestQuestion};
use pagefold_host::machine_questions::ask_machines;
use pagefold_host::{Host, hold, parse};

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

/// Asks the agent of each of these machines that is QEMU's, and adds the answers to its facts.
pub fn gather_guest_facts<'a>(host: &dyn Host, vms: impl Iterator<Item = &'a mut VmFacts>, access: AgentAccess) {
    let mut vms: Vec<&mut VmFacts> = vms.filter(|vm| vm.definition.is_some()).collect();
    let processes: Vec<ProcessId> = vms.iter().map(|vm| vm.process).collect();
    let is_managed = |arguments: &[String]| agent_channel(arguments) == Some(AgentChannel::Managed);
    let is_libvirt_permitted = access == AgentAccess::SocketOrLibvirt;
    let answers =
        ask_machines(host, &processes, is_libvirt_permitted, is_managed, |process| ask_guest(host, process, access));
    for (vm, answer) in vms.iter_mut().zip(answers) {
        vm.guest = Some(answer);
    }
}

fn ask_guest(host: &dyn Host, process: ProcessId, access: AgentAccess) -> Reading<GuestFacts> {
    let files = FILES.iter().map(|&(path, max_bytes)| GuestQuestion::File { path, max_bytes });
    let first = [GuestQuestion::OperatingSystem, GuestQuestion::Vcpus];
    // The configuration is the longest file, so it comes last.
    let questions: Vec<GuestQuestion> =
        first.into_iter().chain(files).chain([GuestQuestion::TimerConfiguration]).collect();
    let answers = hold(host, process)?.ask_guest_agent(&questions, access)?;
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
