//! A host whose answers are counted, so that somebody else can see whether who asks it gets on.

use crate::act::{Action, Effect, Refusal};
use crate::{Claim, FrameFlags, Holder, Host, Mapping, PageView, Process, Programs, Run, Way};
use pagefold_base::{AddressRange, PageSize, Pfn, Pid, ProcessId, Reading};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Wraps a host, and counts what was answered, well or not.
pub struct Counted<'a> {
    host: &'a dyn Host,
    answers: Arc<AtomicU64>,
}

impl<'a> Counted<'a> {
    /// Wrap.
    pub fn new(host: &'a dyn Host, answers: Arc<AtomicU64>) -> Self {
        Self { host, answers }
    }

    fn count<T>(&self, answer: T) -> T {
        self.answers.fetch_add(1, Ordering::Relaxed);
        answer
    }
}

impl Host for Counted<'_> {
    fn describe(&self) -> String {
        self.host.describe()
    }

    fn page_size(&self) -> PageSize {
        self.host.page_size()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.count(self.host.read(path))
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.count(self.host.list(path))
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        self.count(self.host.pids())
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn Process + '_>> {
        let process = self.count(self.host.open(pid))?;
        Ok(Box::new(CountedProcess { host: self, process }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.count(self.host.frame_flags(frames))
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.count(self.host.frame_mappings(frames))
    }

    fn follow_programs(&self) -> Reading<Box<dyn Programs>> {
        self.host.follow_programs()
    }

    fn claim(&self) -> Result<Claim, Holder> {
        self.host.claim()
    }

    fn apply(&self, action: &Action) -> Result<Effect, Refusal> {
        self.count(self.host.apply(action))
    }

    fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<Effect, Refusal> {
        self.count(self.host.apply_until_stopped(action, stop))
    }
}

struct CountedProcess<'a> {
    host: &'a Counted<'a>,
    process: Box<dyn Process + 'a>,
}

impl Process for CountedProcess<'_> {
    fn id(&self) -> ProcessId {
        self.process.id()
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.host.count(self.process.read(file))
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        self.host.count(self.process.links(directory))
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<Run>> {
        self.host.count(self.process.resident(ranges))
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<Mapping>> {
        self.host.count(self.process.mappings(range))
    }

    fn contents(&self, way: Way, runs: &[Run], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        self.host.count(self.process.contents(way, runs, sink))
    }

    fn ask_merge_any(&self) -> Result<bool, Refusal> {
        self.host.count(self.process.ask_merge_any())
    }
}
