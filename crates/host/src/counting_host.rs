//! A wrapper that counts the answers of a host, so that another thread can see whether its user makes progress.

use crate::action::{Action, ActionError, ActionOutcome};
use crate::resource::ResourceClass;
use crate::{
    ExecEvents, FrameFlags, Host, HostLock, LockHolder, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod,
};
use pagefold_base::{AddressRange, PageSize, Pfn, Pid, ProcessId, Reading};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Wraps a host and counts its answers, including errors.
pub struct CountingHost<'a> {
    host: &'a dyn Host,
    answer_count: Arc<AtomicU64>,
}

impl<'a> CountingHost<'a> {
    /// Wraps a host.
    pub fn new(host: &'a dyn Host, answers: Arc<AtomicU64>) -> Self {
        Self { host, answer_count: answers }
    }

    fn count_answer<T>(&self, answer: T) -> T {
        self.answer_count.fetch_add(1, Ordering::Relaxed);
        answer
    }
}

impl Host for CountingHost<'_> {
    fn describe(&self) -> String {
        self.host.describe()
    }

    fn page_size(&self) -> PageSize {
        self.host.page_size()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.count_answer(self.host.read(path))
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.count_answer(self.host.list(path))
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        self.count_answer(self.host.pids())
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let process = self.count_answer(self.host.open(pid))?;
        Ok(Box::new(CountingProcess { host: self, process }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.count_answer(self.host.frame_flags(frames))
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.count_answer(self.host.frame_mappings(frames))
    }

    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        self.host.follow_programs()
    }

    fn acquire_lock(&self, class: ResourceClass) -> Result<HostLock, LockHolder> {
        self.host.acquire_lock(class)
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        self.count_answer(self.host.apply(action))
    }

    fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        self.count_answer(self.host.apply_until_stopped(action, stop))
    }

    // Clock reads and sleeps are no progress of the caller, so they are not counted.
    fn now(&self) -> Instant {
        self.host.now()
    }

    fn sleep(&self, duration: Duration) {
        self.host.sleep(duration);
    }

    fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        self.host.wait(timeout, receive);
    }

    fn unix_time(&self) -> SystemTime {
        self.host.unix_time()
    }

    fn own_cpu_time(&self) -> Duration {
        self.host.own_cpu_time()
    }

    fn thread_cpu_time(&self) -> Duration {
        self.host.thread_cpu_time()
    }
}

struct CountingProcess<'a> {
    host: &'a CountingHost<'a>,
    process: Box<dyn ProcessHandle + 'a>,
}

impl ProcessHandle for CountingProcess<'_> {
    fn id(&self) -> ProcessId {
        self.process.id()
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.host.count_answer(self.process.read(file))
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        self.host.count_answer(self.process.links(directory))
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        self.host.count_answer(self.process.resident(ranges))
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        self.host.count_answer(self.process.mappings(range))
    }

    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        self.host.count_answer(self.process.page_nodes(range))
    }

    fn contents(&self, way: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        self.host.count_answer(self.process.contents(way, runs, sink))
    }

    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        self.host.count_answer(self.process.ask_merge_any())
    }
}
