//! The live host: `/proc` and `/sys` of the machine this runs on.

#![forbid(unsafe_code)]

mod apply;
mod claim;
mod contents;
mod frames;
pub mod launch;
mod namespace;
mod process;
mod programs;
pub mod qmp;

pub use contents::BATCH_BYTES;
pub use namespace::enter_initial_cgroup_namespace;

use pagefold_base::{Absent, PageSize, Pfn, Pid, Reading};
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_host::{Claim, FrameFlags, Holder, Host, Process, Programs};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// The machine this runs on.
#[derive(Debug)]
pub struct LiveHost {
    page_size: PageSize,
    frames: frames::FrameFiles,
}

impl LiveHost {
    /// Look at this machine. Opens nothing that needs privilege; what does is found absent when it is asked for.
    ///
    /// # Panics
    /// If the C library reports a page size that is no power of two.
    pub fn new() -> Self {
        let page_size = PageSize::new(rustix::param::page_size() as u64).expect("the kernel's page size");
        Self { page_size, frames: frames::FrameFiles::open() }
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
        File::open(Path::new("/").join(path)).and_then(whole).map_err(|error| absent(&error))
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        let directory = fs::read_dir(Path::new("/").join(path)).map_err(|error| absent(&error))?;
        let mut names = Vec::new();
        for entry in directory {
            names.push(entry.map_err(|error| absent(&error))?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        let mut pids = Vec::new();
        for entry in fs::read_dir("/proc").map_err(|error| absent(&error))? {
            let name = entry.map_err(|error| absent(&error))?.file_name();
            pids.extend(name.to_str().and_then(|name| name.parse().ok()).map(Pid));
        }
        pids.sort();
        Ok(pids)
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn Process + '_>> {
        Ok(Box::new(process::LiveProcess::open(self, pid)?))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        Ok(self.frames.flags(frames)?.into_iter().map(FrameFlags).collect())
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.frames.mappings(frames)
    }

    fn follow_programs(&self) -> Reading<Box<dyn Programs>> {
        Ok(Box::new(programs::Connector::open()?))
    }

    fn claim(&self) -> Result<Claim, Holder> {
        claim::claim()
    }

    fn apply(&self, action: &Action) -> Result<Effect, Refusal> {
        apply::apply(self, action, &AtomicBool::new(false))
    }

    fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<Effect, Refusal> {
        apply::apply(self, action, stop)
    }
}

/// Bytes that are asked for at once: more than most files of the kernel have. Each read costs, and some of these files
/// are made anew for each.
const CHUNK: usize = 4096;

/// All of a file of the kernel, whose size is not known before.
fn whole(file: File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(CHUNK);
    // Without the limit the standard library would ask for the size first.
    file.take(u64::MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Why a file of the host could not be read.
fn absent(error: &io::Error) -> Absent {
    match error.kind() {
        io::ErrorKind::NotFound => Absent::NotOnThisKernel,
        io::ErrorKind::PermissionDenied => Absent::Denied,
        _ if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Absent::Vanished,
        _ => Absent::Malformed(error.to_string()),
    }
}
