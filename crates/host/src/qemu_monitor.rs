//! Questions to QEMU's control monitor (QMP, qapi/machine.json). None of them changes the machine.
//!
//! Each monitor is asked within a second, and several at once.

use crate::machine_questions::ask_machines;
use crate::{Host, ProcessHandle, hold, parse};
use pagefold_base::identity::qemu_monitor::{MonitorAnswers, MonitorChannel, monitor_channels};
use pagefold_base::{Absent, ProcessId, Reading};

/// Where recordings keep the answers, below the directory of the process.
pub const RECORD_FOLDER: &str = "qemu_monitor";

/// A question; its answer is JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MonitorQuestion {
    /// `query-cpus-fast`: the vCPUs with their threads.
    Vcpus,
    /// `query-memdev`: the memory backends.
    MemoryBackends,
    /// `query-hotpluggable-cpus`: vCPUs that are plugged, and that can be.
    VcpuSlots,
}

impl MonitorQuestion {
    /// All questions.
    pub const ALL: [Self; 3] = [Self::Vcpus, Self::MemoryBackends, Self::VcpuSlots];

    /// The command of QMP.
    pub fn command(self) -> &'static str {
        match self {
            Self::Vcpus => "query-cpus-fast",
            Self::MemoryBackends => "query-memdev",
            Self::VcpuSlots => "query-hotpluggable-cpus",
        }
    }

    /// The file that holds the answer in a recording, below the directory of the process.
    pub fn record_path(self) -> String {
        format!("{RECORD_FOLDER}/{}.json", self.command())
    }
}

/// Which ways to a monitor may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MonitorAccess {
    /// A socket on which QEMU listens.
    #[default]
    Socket,
    /// Also libvirt, for its own domains. libvirt marks a domain as tainted when its monitor is asked (`custom-monitor`
    /// in its log and state), until the domain ends.
    SocketOrLibvirt,
}

/// Asks the monitor of a machine.
///
/// # Errors
/// `NotOnThisKernel` if it has none; `NotAsked` if it is left alone; `NoAnswer` if there is no session with it.
pub fn ask_monitor(process: &dyn ProcessHandle, access: MonitorAccess) -> Reading<MonitorAnswers> {
    let mut answers = process.ask_monitor(&MonitorQuestion::ALL, access)?.into_iter();
    let mut next = || answers.next().unwrap_or(Err(Absent::NotOnThisKernel));
    Ok(MonitorAnswers {
        vcpus: next().and_then(|bytes| parse::monitor_vcpus(&bytes)),
        backends: next().and_then(|bytes| parse::monitor_backends(&bytes)),
        slots: next().and_then(|bytes| parse::vcpu_slots(&bytes)),
    })
}

/// Asks the monitors of these processes of QEMU, in their order, as [`ask_machines`].
pub fn ask_monitors(host: &dyn Host, processes: &[ProcessId], access: MonitorAccess) -> Vec<Reading<MonitorAnswers>> {
    let is_managed = |arguments: &[String]| monitor_channels(arguments).contains(&MonitorChannel::Managed);
    let is_libvirt_permitted = access == MonitorAccess::SocketOrLibvirt;
    ask_machines(host, processes, is_libvirt_permitted, is_managed, |process| {
        ask_monitor(&*hold(host, process)?, access)
    })
}
