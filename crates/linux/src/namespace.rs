//! Cgroups as the host names them.
//!
//! `/proc/PID/cgroup` is told relative to the cgroup namespace of the process that reads it (kernel/cgroup/cgroup.c,
//! `proc_cgroup_show`, 6.18). In a container with a namespace of its own all else lies outside: `/../../other`, which is
//! no path below `/sys/fs/cgroup`. Process 1 is in the host's namespace, if the host's processes are seen at all.

use pagefold_sys::namespace;
use std::fs::{self, File};
use std::io;

/// Have this thread, and those that it starts from now on, see cgroups as process 1 does. Nothing is done where it does
/// already. Programs that are started afterwards see them so, too.
///
/// # Errors
/// Without CAP_SYS_ADMIN, or CAP_SYS_PTRACE where process 1 has other privileges.
pub fn enter_cgroup_namespace_of_init() -> io::Result<()> {
    const OF_INIT: &str = "/proc/1/ns/cgroup";
    if fs::read_link(OF_INIT)? == fs::read_link("/proc/self/ns/cgroup")? {
        return Ok(());
    }
    namespace::enter_cgroup_namespace(&File::open(OF_INIT)?)
}
