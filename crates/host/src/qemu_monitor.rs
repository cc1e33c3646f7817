//! Questions to QEMU's control monitor (QMP, qapi/machine.json). None of them changes the machine.

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
