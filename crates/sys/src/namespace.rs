//! Enters a cgroup namespace (setns(2)).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Move this thread, and threads that it starts later, into a cgroup namespace, given as an open `/proc/PID/ns/cgroup`.
///
/// # Errors
/// Those of setns(2): `EPERM` without CAP_SYS_ADMIN.
pub fn enter_cgroup_namespace(namespace: &File) -> io::Result<()> {
    // SAFETY: the descriptor is open while `namespace` is borrowed. The kernel only changes this thread's view of
    // cgroups.
    let result = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWCGROUP) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
