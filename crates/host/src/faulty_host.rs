//! A host with injected faults, to test the code that reads hosts.

use crate::access_monitor::KDAMONDS_DIRECTORY;
use crate::action::{Action, ActionError, ActionOutcome};
use crate::guest_agent::{AgentAccess, GuestQuestion};
use crate::qemu_monitor::{MonitorAccess, MonitorQuestion};
use crate::{ExecEvents, FrameFlags, Host, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use delegate::delegate;
use pagefold_base::{Absent, AddressRange, IdSet, PageSize, Pfn, Pid, ProcessId, Reading};
use pagefold_sys::fingerprint::Hasher;
use std::io;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

/// A fault of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// The answer is absent, for this reason.
    Absent(Absent),
    /// The file is truncated to this many bytes.
    Truncated(usize),
    /// The file holds these bytes, the process answers `yes` or `no`, or the action counts as performed.
    Replaced(Vec<u8>),
    /// Half of the pages are not resident.
    HalfNotResident,
}

/// Wraps a host. `faults` is called before every answer with a path. For a file this is its path. For other answers it
/// is the path of the process followed by `#resident`, `#mappings`, `#contents` or `#ask_merge_any`; or `#frame_flags`,
/// `#frame_mappings` or `#follow_programs`. Before an action it is `#write NAME`, or the path of the process followed
/// by `#advise`, `#merge_any`, `#set_qom_property`, `#set_affinity`, `#move_pages`, `#collapse`.
pub struct FaultyHost<'a, F> {
    host: &'a dyn Host,
    faults: F,
}

impl<'a, F: Fn(&str) -> Option<InjectedFault> + Sync> FaultyHost<'a, F> {
    /// Wraps a host.
    pub fn new(host: &'a dyn Host, faults: F) -> Self {
        Self { host, faults }
    }

    fn bytes_or_fault(&self, path: &str, answer: impl FnOnce() -> Reading<Vec<u8>>) -> Reading<Vec<u8>> {
        match (self.faults)(path) {
            Some(InjectedFault::Absent(why)) => Err(why),
            Some(InjectedFault::Truncated(length)) => answer().map(|mut bytes| {
                bytes.truncate(length);
                bytes
            }),
            Some(InjectedFault::Replaced(bytes)) => Ok(bytes),
            Some(InjectedFault::HalfNotResident) | None => answer(),
        }
    }

    fn check_for_fault(&self, path: &str) -> Reading<()> {
        match (self.faults)(path) {
            Some(InjectedFault::Absent(why)) => Err(why),
            _ => Ok(()),
        }
    }
}

impl<F: Fn(&str) -> Option<InjectedFault> + Sync> Host for FaultyHost<'_, F> {
    delegate! {
        to self.host {
            fn page_size(&self) -> PageSize;
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
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.host.describe())
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.bytes_or_fault(path, || self.host.read(path))
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.check_for_fault(path)?;
        self.host.list(path)
    }

    fn file_mode(&self, path: &str) -> Reading<u32> {
        self.check_for_fault(path)?;
        self.host.file_mode(path)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        self.check_for_fault("proc")?;
        self.host.pids()
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let directory = format!("proc/{pid}");
        self.check_for_fault(&directory)?;
        Ok(Box::new(FaultyProcess { host: self, process: self.host.open(pid)?, directory }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.check_for_fault("#frame_flags")?;
        self.host.frame_flags(frames)
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.check_for_fault("#frame_mappings")?;
        self.host.frame_mappings(frames)
    }

    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        self.check_for_fault("#follow_programs")?;
        self.host.follow_programs()
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        self.apply_until_stopped(action, &AtomicBool::new(false))
    }

    fn apply_until_stopped(&self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        let path = match action {
            Action::Write { knob, .. } => format!("#write {}", knob.name()),
            Action::Advise { process, .. } => format!("proc/{}#advise", process.pid),
            Action::MergeAny { process, .. } => format!("proc/{}#merge_any", process.pid),
            Action::SetQomProperty { process, .. } => format!("proc/{}#set_qom_property", process.pid),
            Action::SetAffinity { thread, .. } => format!("proc/{}#set_affinity", thread.process.pid),
            Action::MovePages { process, .. } => format!("proc/{}#move_pages", process.pid),
            Action::SetMemoryPolicy { process, .. } => format!("proc/{}#set_memory_policy", process.pid),
            Action::Collapse { process, .. } => format!("proc/{}#collapse", process.pid),
            Action::ReplaceFile { file, .. } => format!("{}#replace", file.path()),
            Action::DefineDomain { name, .. } => format!("{}#define", crate::action::domain_definition_path(name)),
            Action::ReloadModule { module, .. } => format!("sys/module/{module}#reload"),
            Action::MonitorAccesses(_) => format!("{KDAMONDS_DIRECTORY}#monitor"),
        };
        match (self.faults)(&path) {
            Some(InjectedFault::Absent(why)) => Err(why.into()),
            Some(InjectedFault::Replaced(_)) => Ok(ActionOutcome::default()),
            _ => self.host.apply_until_stopped(action, stop),
        }
    }
}

struct FaultyProcess<'a, F> {
    host: &'a FaultyHost<'a, F>,
    process: Box<dyn ProcessHandle + 'a>,
    directory: String,
}

impl<F: Fn(&str) -> Option<InjectedFault> + Sync> FaultyProcess<'_, F> {
    fn path(&self, file: &str) -> String {
        format!("{}{file}", self.directory)
    }
}

impl<F: Fn(&str) -> Option<InjectedFault> + Sync> ProcessHandle for FaultyProcess<'_, F> {
    fn id(&self) -> ProcessId {
        self.process.id()
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.host.bytes_or_fault(&self.path(&format!("/{file}")), || self.process.read(file))
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        self.host.check_for_fault(&self.path(&format!("/{directory}")))?;
        self.process.links(directory)
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        self.host.check_for_fault(&self.path("#resident"))?;
        self.process.resident(ranges)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        self.host.check_for_fault(&self.path("#mappings"))?;
        self.process.mappings(range)
    }

    fn thread_cpus(&self, tid: Pid) -> Reading<IdSet> {
        self.host.check_for_fault(&self.path("#thread_cpus"))?;
        self.process.thread_cpus(tid)
    }

    fn page_nodes(&self, range: AddressRange) -> Reading<Vec<Option<u32>>> {
        self.host.check_for_fault(&self.path("#page_nodes"))?;
        self.process.page_nodes(range)
    }

    fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        match (self.host.faults)(&self.path("#contents")) {
            Some(InjectedFault::Absent(why)) => Err(why),
            Some(InjectedFault::HalfNotResident) => self.process.contents(method, runs, &mut |position, page| {
                let content = if position % 2 == 0 { crate::PageContent::NotResident } else { page.content };
                sink(position, PageView { content, ..page });
            }),
            _ => self.process.contents(method, runs, sink),
        }
    }

    fn ask_guest_agent(&self, questions: &[GuestQuestion], access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        self.host.check_for_fault(&self.path("#guest_agent"))?;
        let answers = self.process.ask_guest_agent(questions, access)?;
        let path = |question: &GuestQuestion| self.path(&format!("/{}", question.record_path()));
        let changed = |(answer, question)| self.host.bytes_or_fault(&path(question), || answer);
        Ok(answers.into_iter().zip(questions).map(changed).collect())
    }

    fn ask_monitor(&self, questions: &[MonitorQuestion], access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        self.host.check_for_fault(&self.path("#qemu_monitor"))?;
        let answers = self.process.ask_monitor(questions, access)?;
        let path = |question: &MonitorQuestion| self.path(&format!("/{}", question.record_path()));
        let changed = |(answer, question)| self.host.bytes_or_fault(&path(question), || answer);
        Ok(answers.into_iter().zip(questions).map(changed).collect())
    }

    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        match (self.host.faults)(&self.path("#ask_merge_any")) {
            Some(InjectedFault::Absent(why)) => Err(why.into()),
            Some(InjectedFault::Replaced(said)) => Ok(said == b"yes"),
            _ => self.process.ask_merge_any(),
        }
    }
}
