//! Cgroup paths as the host shows them.
//!
//! `/proc/PID/cgroup` is relative to the cgroup namespace of the reader (kernel/cgroup/cgroup.c, `proc_cgroup_show`,
//! 6.18). In a container with its own namespace all other cgroups lie outside: `/../../other`, which is no path below
//! `/sys/fs/cgroup`. If the host's processes are visible, one of them is in the initial namespace, which always has the
//! same inode number (include/linux/proc_ns.h, `PROC_CGROUP_INIT_INO`).

use pagefold_sys::namespace;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The link target of a process in the initial cgroup namespace.
const INITIAL_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// Move this thread, and threads that it starts later, into the host's cgroup namespace. Does nothing if it is there
/// already. Programs started later are in that namespace, too.
///
/// # Errors
/// `NotFound` if no process in that namespace is visible, which needs the host's PID namespace and CAP_SYS_PTRACE.
/// Otherwise the errors of setns(2), which needs CAP_SYS_ADMIN.
pub fn enter_initial_cgroup_namespace() -> io::Result<()> {
    if is_initial_namespace("/proc/self/ns/cgroup".as_ref()) {
        return Ok(());
    }
    let namespace_link = |entry: fs::DirEntry| -> Option<PathBuf> {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        Some(entry.path().join("ns/cgroup")).filter(|link| is_initial_namespace(link))
    };
    let link = fs::read_dir("/proc")?.flatten().find_map(namespace_link).ok_or(io::ErrorKind::NotFound)?;
    let namespace = File::open(&link)?;
    // The process may have ended, and another one may have its PID.
    if !is_initial_namespace(&link) {
        return Err(io::ErrorKind::NotFound.into());
    }
    namespace::enter_cgroup_namespace(&namespace)
}

fn is_initial_namespace(link: &Path) -> bool {
    fs::read_link(link).is_ok_and(|target| target == Path::new(INITIAL_CGROUP_NAMESPACE))
}
