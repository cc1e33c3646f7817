//! The live host: `/proc` and `/sys` of this machine.

#![forbid(unsafe_code)]

mod apply;
mod cgroup_namespace;
mod frame_files;
mod guest_agent;
mod host_lock;
pub mod launch;
pub mod libvirt;
mod page_nodes;
mod page_reader;
mod proc_connector;
mod process;
pub mod qmp;
mod scheduler_trace;
mod unix_socket;

pub use cgroup_namespace::enter_initial_cgroup_namespace;
pub use page_reader::BATCH_BYTES;

use pagefold_base::{Absent, PageSize, Pfn, Pid, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::resource::ResourceClass;
use pagefold_host::scheduler_trace::{SchedulerTrace, SchedulerTraceError};
use pagefold_host::{ExecEvents, FrameFlags, Host, HostLock, LockHolder, ProcessHandle};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// This machine.
#[derive(Debug)]
pub struct LiveHost {
    page_size: PageSize,
    frames: frame_files::FrameFiles,
}

impl LiveHost {
    /// A handle to this machine. It opens no privileged files; readings that need privilege are absent when requested.
    ///
    /// # Panics
    /// If the C library reports a page size that is no power of two.
    pub fn new() -> Self {
        let page_size = PageSize::new(rustix::param::page_size() as u64).expect("the kernel's page size");
        Self { page_size, frames: frame_files::FrameFiles::open() }
    }
}

impl Default for LiveHost {
    fn default() -> Self {
        Self::new()
    }
}

impl Host for LiveHost {
    fn describe(&self) -> String {
        "this host".to_owned()
    }

    fn page_size(&self) -> PageSize {
        self.page_size
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        File::open(Path::new("/").join(path)).and_then(read_whole_file).map_err(|error| absence_reason(&error))
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        let directory = fs::read_dir(Path::new("/").join(path)).map_err(|error| absence_reason(&error))?;
        let mut names = Vec::new();
        for entry in directory {
            names.push(entry.map_err(|error| absence_reason(&error))?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn file_mode(&self, path: &str) -> Reading<u32> {
        let metadata = fs::metadata(Path::new("/").join(path)).map_err(|error| absence_reason(&error))?;
        Ok(metadata.permissions().mode() & 0o777)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").map_err(|error| absence_reason(&error))? {
            let name = entry.map_err(|error| absence_reason(&error))?.file_name();
            pids.extend(name.to_str().and_then(|name| name.parse().ok()).map(Pid));
        }
        pids.sort();
        Ok(pids)
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        Ok(Box::new(process::LiveProcess::open(self, pid)?))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        Ok(self.frames.flags(frames)?.into_iter().map(FrameFlags).collect())
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.frames.mappings(frames)
    }

    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        Ok(Box::new(proc_connector::ProcConnector::open()?))
    }

    fn trace_scheduler(&self, buffer_bytes: usize) -> Result<Box<dyn SchedulerTrace>, SchedulerTraceError> {
        Ok(Box::new(scheduler_trace::PerfTrace::open(self, buffer_bytes)?))
    }

    fn acquire_lock(&self, class: ResourceClass) -> Result<HostLock, LockHolder> {
        host_lock::acquire_host_lock(class)
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        apply::apply(self, action, &AtomicBool::new(false))
    }

    fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        apply::apply(self, action, stop)
    }
}

/// Bytes of the first read: more than most kernel files have. Each read costs, and the kernel generates some of these
/// files anew for each read.
const INITIAL_READ_BYTES: usize = 4096;

/// Read a whole kernel file, whose size is not known in advance.
fn read_whole_file(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(INITIAL_READ_BYTES);
    // Without the limit the standard library would query the size first.
    file.take(u64::MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why a file of the host could not be read, or a system call gave no answer.
fn absence_reason(error: &io::Error) -> Absent {
    let is = |errno: rustix::io::Errno| error.raw_os_error() == Some(errno.raw_os_error());
    match error.kind() {
        io::ErrorKind::NotFound => Absent::NotOnThisKernel,
        io::ErrorKind::PermissionDenied => Absent::Denied,
        _ if is(rustix::io::Errno::NOSYS) => Absent::NotOnThisKernel,
        _ if is(rustix::io::Errno::SRCH) => Absent::Vanished,
        _ => Absent::Malformed(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn errors_of_the_kernel_have_their_reason() {
        let reason = |errno: Errno| absence_reason(&errno.into());
        assert_eq!([Errno::NOENT, Errno::NOSYS].map(reason), [Absent::NotOnThisKernel, Absent::NotOnThisKernel]);
        assert_eq!([Errno::ACCESS, Errno::PERM].map(reason), [Absent::Denied, Absent::Denied]);
        assert_eq!(reason(Errno::SRCH), Absent::Vanished);
        assert!(matches!(reason(Errno::IO), Absent::Malformed(_)));
    }
}
