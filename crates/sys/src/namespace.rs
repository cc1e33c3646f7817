//! Entering a namespace (setns(2)).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Have this thread, and those that it starts from now on, see cgroups as the processes of a cgroup namespace do: an
/// open `/proc/PID/ns/cgroup`.
///
/// # Errors
/// Those of setns(2): `EPERM` without CAP_SYS_ADMIN.
pub fn enter_cgroup_namespace(namespace: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `namespace` is borrowed; the kernel changes nothing but what this thread
    // sees of cgroups.
    let entered = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWCGROUP) };
    if entered == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
