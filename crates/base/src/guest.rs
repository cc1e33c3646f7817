//! What a guest says of itself, as QEMU's guest agent tells it.

/// The operating system of a guest (`guest-get-osinfo`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestSystem {
    /// The id of os-release: `debian`; `mswindows` for Windows.
    pub id: String,
}

impl GuestSystem {
    /// Whether the files of Linux are to be expected.
    pub fn is_linux(&self) -> bool {
        !matches!(self.id.as_str(), "mswindows" | "freebsd" | "netbsd" | "openbsd")
    }
}

/// The virtual CPUs that a guest knows (`guest-get-vcpus`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestVcpus {
    /// CPUs in use.
    pub online: u32,
    /// CPUs that are present and not in use.
    pub offline: u32,
}
