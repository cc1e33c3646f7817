//! A host read back from a folder.

use crate::{FrameFlags, Host, Process};
use pagefold_model::{Absent, PageSize, Pfn, Pid, Reading};
use std::path::Path;

/// A recorded host.
pub struct Recording;

impl Recording {
    /// Open.
    pub fn open(_path: &Path) -> Result<Self, std::io::Error> {
        Err(std::io::ErrorKind::NotFound.into())
    }
}

impl Host for Recording {
    fn describe(&self) -> String {
        String::new()
    }
    fn page_size(&self) -> PageSize {
        PageSize::new(4096).unwrap()
    }
    fn read(&self, _path: &str) -> Reading<Vec<u8>> {
        Err(Absent::Vanished)
    }
    fn list(&self, _path: &str) -> Reading<Vec<String>> {
        Err(Absent::Vanished)
    }
    fn pids(&self) -> Reading<Vec<Pid>> {
        Err(Absent::Vanished)
    }
    fn open(&self, _pid: Pid) -> Reading<Box<dyn Process + '_>> {
        Err(Absent::Vanished)
    }
    fn frame_flags(&self, _frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        Err(Absent::Vanished)
    }
    fn frame_mappings(&self, _frames: &[Pfn]) -> Reading<Vec<u64>> {
        Err(Absent::Vanished)
    }
}
