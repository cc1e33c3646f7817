//! Cgroups as the host names them.
//!
//! `/proc/PID/cgroup` is told relative to the cgroup namespace of the process that reads it (kernel/cgroup/cgroup.c,
//! `proc_cgroup_show`, 6.18). In a container with a namespace of its own all else lies outside: `/../../other`, which is
//! no path below `/sys/fs/cgroup`. Where the host's processes are seen, one of them is in the initial namespace, whose
//! number is always the same (include/linux/proc_ns.h, `PROC_CGROUP_INIT_INO`).

use pagefold_sys::namespace;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// What the link of a process in the initial cgroup namespace says.
const INITIAL_CGROUP_NAMESPACE: &str = "cgroup:[4026531835]";

/// Have this thread, and those that it starts from now on, see cgroups as the host does. Nothing is done where it does
/// already. Programs that are started afterwards see them so, too.
///
/// # Errors
/// `NotFound` where no process in that namespace is seen, which takes the host's PID namespace and CAP_SYS_PTRACE; those
/// of setns(2), which takes CAP_SYS_ADMIN.
pub fn enter_initial_cgroup_namespace() -> io::Result<()> {
    if is_initial_namespace("/proc/self/ns/cgroup".as_ref()) {
        return Ok(());
    }
    let of = |entry: fs::DirEntry| -> Option<PathBuf> {
        entry.file_name().to_str()?.parse::<u32>().ok()?;
        Some(entry.path().join("ns/cgroup")).filter(|link| is_initial_namespace(link))
    };
    let link = fs::read_dir("/proc")?.flatten().find_map(of).ok_or(io::ErrorKind::NotFound)?;
    let namespace = File::open(&link)?;
    // Its process may have ended, and another one may have its number.
    if !is_initial_namespace(&link) {
        return Err(io::ErrorKind::NotFound.into());
    }
    namespace::enter_cgroup_namespace(&namespace)
}

fn is_initial_namespace(link: &Path) -> bool {
    fs::read_link(link).is_ok_and(|target| target == Path::new(INITIAL_CGROUP_NAMESPACE))
}
