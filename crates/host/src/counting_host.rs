//! A wrapper that counts the answers of a host, so that another thread can see whether its user makes progress.

use crate::action::{Action, ActionError, ActionOutcome};
use crate::guest_agent::{AgentAccess, GuestQuestion};
use crate::qemu_monitor::{MonitorAccess, MonitorQuestion};
use crate::resource::ResourceClass;
use crate::scheduler_trace::{SchedulerTrace, SchedulerTraceError};
use crate::{
    ExecEvents, FrameFlags, Host, HostLock, LockHolder, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod,
};
use delegate::delegate;
use pagefold_base::{AddressRange, IdSet, PageSize, Pfn, Pid, ProcessId, Reading};
use pagefold_sys::fingerprint::Hasher;
use std::io;
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
    delegate! {
        to self.host {
            fn describe(&self) -> String;
            fn page_size(&self) -> PageSize;
            fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>>;
            fn trace_scheduler(&self, buffer_bytes: usize) -> Result<Box<dyn SchedulerTrace>, SchedulerTraceError>;
            fn acquire_lock(&self, class: ResourceClass) -> Result<HostLock, LockHolder>;
            // Clock reads and sleeps are no progress of the caller, so they are not counted.
            fn now(&self) -> Instant;
            fn sleep(&self, duration: Duration);
            fn join_clock(&self);
            fn page_hasher(&self) -> io::Result<Hasher>;
            fn simulation_failure(&self) -> Option<String>;
            fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool);
            fn unix_time(&self) -> SystemTime;
            fn own_cpu_time(&self) -> Duration;
            fn thread_cpu_time(&self) -> Duration;
        }

        #[expr(self.count_answer($))]
        to self.host {
            fn read(&self, path: &str) -> Reading<Vec<u8>>;
            fn list(&self, path: &str) -> Reading<Vec<String>>;
            fn file_mode(&self, path: &str) -> Reading<u32>;
            fn pids(&self) -> Reading<Vec<Pid>>;
            fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>>;
            fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>>;
            fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError>;
            fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError>;
        }
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let process = self.count_answer(self.host.open(pid))?;
        Ok(Box::new(CountingProcess { host: self, process }))
    }
}

struct CountingProcess<'a> {
    host: &'a CountingHost<'a>,
    process: Box<dyn ProcessHandle + 'a>,
}

impl ProcessHandle for CountingProcess<'_> {
    delegate! {
        to self.process {
            fn id(&self) -> ProcessId;
        }

        #[expr(self.host.count_answer($))]
        to self.process {
            fn read(&self, file: &str) -> Reading<Vec<u8>>;
            fn links(&self, directory: &str) -> Reading<Vec<String>>;
            fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>>;
            fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>>;
            fn thread_cpus(&self, tid: Pid) -> Reading<IdSet>;
            fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>>;
            fn contents(
                &self,
                method: ReadMethod,
                runs: &[PageRun],
                sink: &mut dyn FnMut(usize, PageView<'_>),
            ) -> Reading<()>;
            fn ask_guest_agent(&self, questions: &[GuestQuestion], access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>>;
            fn ask_monitor(&self, questions: &[MonitorQuestion], access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>>;
            fn ask_merge_any(&self) -> Result<bool, ActionError>;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;

    #[test]
    fn answers_are_counted_and_clock_reads_are_not() {
        let (host, answers) = (FakeHost::booted(), Arc::new(AtomicU64::new(0)));
        host.start_process(7, 3);
        let counted = CountingHost::new(&host, Arc::clone(&answers));
        let process = counted.open(Pid(7)).unwrap();
        let _ = (counted.describe(), counted.now(), counted.own_cpu_time(), process.id());
        assert_eq!(answers.load(Ordering::Relaxed), 1, "only the process was opened");
        let _ = (counted.read("proc/meminfo"), counted.pids(), process.read("stat"), process.resident(&[]));
        assert_eq!(answers.load(Ordering::Relaxed), 5);
    }
}
