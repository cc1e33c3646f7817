//! Questions to the agent within a guest (QEMU's qemu-ga, qga/qapi-schema.json). None of them changes the guest.

/// Where recordings keep the answers, below the directory of the process.
pub const RECORD_FOLDER: &str = "guest_agent";

/// A question, and the form of its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestQuestion {
    /// `guest-get-osinfo`, as JSON.
    OperatingSystem,
    /// `guest-get-vcpus`, as JSON.
    Vcpus,
    /// The first bytes of a file of the guest.
    File {
        /// Its path, with a leading slash.
        path: &'static str,
        /// How many bytes at most.
        max_bytes: usize,
    },
    /// The lines about the timer (`CONFIG_HZ`, `CONFIG_NO_HZ`) of `/boot/config-RELEASE`, for the kernel that runs.
    TimerConfiguration,
}

/// Which ways to an agent may be used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AgentAccess {
    /// A socket on which QEMU listens.
    #[default]
    Socket,
    /// Also libvirt, for its own domains. libvirt marks a domain as tainted when its agent is asked (`custom-ga-command`
    /// in its log and state), until the domain ends.
    SocketOrLibvirt,
}

impl GuestQuestion {
    /// The file that holds the answer in a recording, below the directory of the process.
    pub fn record_path(&self) -> String {
        let name = match self {
            Self::OperatingSystem => "osinfo.json",
            Self::Vcpus => "vcpus.json",
            Self::File { path, .. } => path.trim_start_matches('/'),
            Self::TimerConfiguration => "boot/config",
        };
        format!("{RECORD_FOLDER}/{name}")
    }
}
