//! The port: everything that Pagefold reads from a host and changes on it, and the adapters that need no privilege.
//!
//! The rest of Pagefold accesses a machine only through [`Host`] and [`ProcessHandle`]. The adapters are the live host
//! (`pagefold-linux`), a recording read from a directory, and two wrappers. [`faulty_host`] makes another host fail as
//! a test requires; [`counting_host`] counts the answers of another host. Files are named by their path below the root.
//! [`parse`] parses them with functions that take bytes and never access a system; [`observe`] combines both. Page
//! contents cross the port as bytes (live) or as the fingerprint stored in a recording: see [`PageContent`].

#![forbid(unsafe_code)]

pub mod access_monitor;
pub mod action;
pub mod activity;
pub mod config_file;
pub mod counting_host;
#[cfg(any(test, feature = "fake"))]
pub mod fake_host;
pub mod faulty_host;
pub mod guest_agent;
pub mod kernel_module;
pub mod knob;
pub mod ksmd_thread;
pub mod machine_questions;
pub mod memory_headroom;
pub mod observe;
pub mod page_state;
pub mod parse;
pub mod qemu_monitor;
pub mod resource;
pub mod scheduler_trace;
pub mod transaction;
pub mod virtual_clock;

use action::{Action, ActionError, ActionOutcome};
use guest_agent::{AgentAccess, GuestQuestion};
use pagefold_base::content::ContentKind;
use pagefold_base::{Absent, AddressRange, Fingerprint, IdSet, PageSize, Pfn, Pid, ProcessId, Reading};
pub use pagefold_sys::fingerprint::Hasher;
use qemu_monitor::{MonitorAccess, MonitorQuestion};
use resource::ResourceClass;
use rustix::time::{ClockId, clock_gettime};
use scheduler_trace::{SchedulerTrace, SchedulerTraceError};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// A host: live, recorded or faulty.
pub trait Host: Sync {
    /// A short description for reports: `this host`, `recording DIR`.
    fn describe(&self) -> String;

    /// The size of its base pages.
    fn page_size(&self) -> PageSize;

    /// The bytes of a file, by its path below the root without a leading slash: `sys/kernel/mm/ksm/run`.
    fn read(&self, path: &str) -> Reading<Vec<u8>>;

    /// The names in a directory, by its path below the root, sorted.
    fn list(&self, path: &str) -> Reading<Vec<String>>;

    /// The permission bits of a file, by its path below the root: `0o444` for a module parameter that can only be set
    /// when the module is loaded. By default they are not known.
    fn file_mode(&self, _path: &str) -> Reading<u32> {
        Err(Absent::NotOnThisKernel)
    }

    /// The process numbers of the host, ascending.
    fn pids(&self) -> Reading<Vec<Pid>>;

    /// Opens a process. The handle reads this process only; it returns `Vanished` once the process has exited, even if
    /// its number is reused.
    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>>;

    /// The flags of frames (`/proc/kpageflags`), in the order of `frames`, which must be ascending. Needs root.
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>>;

    /// How many times each frame is mapped (`/proc/kpagecount`), in the order of `frames`, which must be ascending.
    /// Needs root.
    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>>;

    /// Starts to report the programs that begin. Absent if the host cannot report them or the privilege is missing.
    fn follow_programs(&self) -> Reading<Box<dyn ExecEvents>> {
        Err(Absent::NotOnThisKernel)
    }

    /// Starts to record the events of the scheduler on all CPUs. `buffer_bytes` are kept for each event and CPU until they
    /// are taken; further events are lost, and counted. By default they cannot be recorded.
    ///
    /// # Errors
    /// What the host lacks.
    fn trace_scheduler(&self, _buffer_bytes: usize) -> Result<Box<dyn SchedulerTrace>, SchedulerTraceError> {
        Err(SchedulerTraceError::NotLive)
    }

    /// Takes the lock of a class of resources, which all Pagefold processes on this host share, whatever their state
    /// directories. By default there is none.
    ///
    /// # Errors
    /// The Pagefold process that holds the lock.
    fn acquire_lock(&self, _class: ResourceClass) -> Result<HostLock, LockHolder> {
        Ok(HostLock::Unavailable)
    }

    /// Performs an action. This is the only way to change the host.
    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError>;

    /// Performs an action, and stops waiting for an unresponsive process once `stop` is set. By default an action waits
    /// for no process.
    ///
    /// # Errors
    /// As for [`Self::apply`]. A stopped action may have been performed or may still be.
    fn apply_until_stopped(&self, action: &Action, _stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        self.apply(action)
    }

    /// The monotonic clock of the host. A simulated host returns instants of its virtual time, so do not compare them
    /// with instants of another host or of [`Instant::now`].
    fn now(&self) -> Instant {
        Instant::now()
    }

    /// Blocks the calling thread for `duration`. A simulated host advances its clock instead.
    fn sleep(&self, duration: Duration) {
        thread::sleep(duration);
    }

    /// Waits until `receive` succeeds or `timeout` has passed. `receive` blocks for at most the given real time, and
    /// returns whether it received what is waited for. A simulated host lets its clock advance instead of blocking. See
    /// [`receive_timeout`].
    fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        receive(timeout);
    }

    /// Announces that the calling thread will wait for messages of other threads. On a simulated host, no time passes
    /// until it waits, and from then on it takes turns with the other threads that were announced. Announce a thread
    /// before another one waits for its messages.
    fn join_clock(&self) {}

    /// A hasher for fingerprints of pages, under a new random key, so that no program can prepare pages with equal
    /// fingerprints. The key of a simulated host follows from its seed.
    ///
    /// # Errors
    /// If the kernel's random generator fails.
    fn page_hasher(&self) -> io::Result<Hasher> {
        Hasher::with_random_key(self.page_size().as_len())
    }

    /// Why a simulated host no longer follows its scenario.
    fn simulation_failure(&self) -> Option<String> {
        None
    }

    /// The date and time of the host. Unlike [`Self::now`], it may jump.
    fn unix_time(&self) -> SystemTime {
        SystemTime::now()
    }

    /// The user and system CPU time of this Pagefold process so far: all of its threads, and its tracer processes that
    /// have ended.
    fn own_cpu_time(&self) -> Duration {
        own_cpu_time()
    }

    /// The user and system CPU time of the calling thread so far.
    fn thread_cpu_time(&self) -> Duration {
        thread_cpu_time()
    }
}

/// The real CPU time of this process, see [`Host::own_cpu_time`].
fn own_cpu_time() -> Duration {
    let process_time: Duration = clock_gettime(ClockId::ProcessCPUTime).try_into().unwrap_or_default();
    process_time + pagefold_sys::inject::tracer_cpu_time()
}

/// The real CPU time of the calling thread.
fn thread_cpu_time() -> Duration {
    clock_gettime(ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

/// The time since `start`, by the clock of `host`. Zero if `start` is in the future.
pub fn elapsed_since(host: &dyn Host, start: Instant) -> Duration {
    host.now().saturating_duration_since(start)
}

/// Receives a message, and waits for it at most `timeout` by the clock of `host`.
///
/// # Errors
/// The errors of [`Receiver::recv_timeout`].
pub fn receive_timeout<T>(host: &dyn Host, messages: &Receiver<T>, timeout: Duration) -> Result<T, RecvTimeoutError> {
    let mut received = Err(RecvTimeoutError::Timeout);
    host.wait(timeout, &mut |real_timeout| {
        received = messages.recv_timeout(real_timeout);
        !matches!(received, Err(RecvTimeoutError::Timeout))
    });
    received
}

/// Tests whether frames can be read (`/proc/kpageflags`), as measuring savings needs.
///
/// # Errors
/// `Denied` without CAP_SYS_ADMIN, or why the file cannot be read.
pub fn check_frame_access(host: &dyn Host) -> Reading<()> {
    host.frame_flags(&[]).map(drop)
}

/// Opens exactly this process, even if its number has been reused.
///
/// # Errors
/// `Vanished` if the process has exited.
pub fn hold(host: &dyn Host, process: ProcessId) -> Reading<Box<dyn ProcessHandle + '_>> {
    let handle = host.open(process.pid)?;
    if handle.id() == process { Ok(handle) } else { Err(Absent::Vanished) }
}

/// The lock that all Pagefold processes on a host share.
#[derive(Debug)]
pub enum HostLock {
    /// The lock is held until this value is dropped.
    Acquired(OwnedFd),
    /// There is no lock, or it needs more privilege than this process has. Such a process cannot change KSM's settings
    /// either, but it may place its own user's processes: only the lock in the state directory excludes others then.
    Unavailable,
    /// Another program than Pagefold prevents taking the lock.
    Obstructed,
}

/// The Pagefold process that holds the lock, as far as known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LockHolder {
    /// Its process number.
    pub pid: Option<u32>,
    /// Its state directory, by the path in its own mount namespace.
    pub state_directory: Option<PathBuf>,
}

/// A source of the programs that begin.
pub trait ExecEvents {
    /// The programs that have begun since the last call, without waiting. An error means that no more events will come.
    fn take_started(&mut self) -> Reading<StartedPrograms>;
}

/// Programs that have begun.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StartedPrograms {
    /// The processes that execute the programs.
    pub pids: BTreeSet<Pid>,
    /// Whether some programs were not reported because there were too many.
    pub overflowed: bool,
}

/// An open process. Dropping the handle closes it.
pub trait ProcessHandle: Send + Sync {
    /// The process.
    fn id(&self) -> ProcessId;

    /// The bytes of a file below `/proc/PID`: `smaps`.
    fn read(&self, file: &str) -> Reading<Vec<u8>>;

    /// The targets of the links in a directory below `/proc/PID`: `fd`.
    fn links(&self, directory: &str) -> Reading<Vec<String>>;

    /// The resident anonymous pages of disjoint ascending ranges in address order, as runs that end where their range
    /// ends. The kernel's shared zero page, file pages and swapped-out pages are not included. Unmapped memory costs
    /// nothing.
    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>>;

    /// The mapping of each page of a range, in address order (`/proc/PID/pagemap`).
    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>>;

    /// The CPUs on which a thread may run now (sched_getaffinity(2)): those that are online and permitted. By default
    /// they are not known.
    fn thread_cpus(&self, _tid: Pid) -> Reading<IdSet> {
        Err(Absent::NotOnThisKernel)
    }

    /// The NUMA node of each page of a range, in address order (move_pages(2)); `None` for pages that are not in memory
    /// and for the shared zero page. Each page costs, mapped or not. By default the nodes are not known.
    fn page_nodes(&self, _range: AddressRange) -> Reading<Vec<Option<u32>>> {
        Err(Absent::NotOnThisKernel)
    }

    /// Reads pages in the order of `runs`, each at most once. `sink` gets the position of each page in that order and
    /// the result. Pages that are no longer resident are [`PageContent::NotResident`] and are never faulted in. After
    /// an error, the pages for which `sink` was not called were not read.
    fn contents(&self, method: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()>;

    /// Asks the agent in the guest of this virtual machine, with one answer for each question, in the order of the
    /// questions. The agent serves one client at a time, so ask only at the operator's request. `NotOnThisKernel` if
    /// the machine has no channel for an agent, `NotAsked` if `access` does not permit the way to it. By default there
    /// are no answers.
    fn ask_guest_agent(&self, _questions: &[GuestQuestion], _access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        Err(Absent::NotOnThisKernel)
    }

    /// Asks QEMU's control monitor of this virtual machine, with one answer for each question, in the order of the
    /// questions. A monitor serves one client at a time, so it is released at once, and one that another client holds is
    /// left alone. `NotOnThisKernel` if the machine has no monitor. By default there are no answers.
    fn ask_monitor(&self, _questions: &[MonitorQuestion], _access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>> {
        Err(Absent::NotOnThisKernel)
    }

    /// Lets the process itself read whether it is enrolled whole (`PR_GET_MEMORY_MERGE`). This stops one of its
    /// threads, so use it only right before changing the process: see [`action::query_merge_any`].
    fn ask_merge_any(&self) -> Result<bool, ActionError> {
        Err(ActionError::Unsupported("only a process of the live host can execute PR_GET_MEMORY_MERGE".to_owned()))
    }
}

/// A run of resident pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRun {
    /// Address of the first page.
    pub address: u64,
    /// Number of pages.
    pub pages: u32,
    /// Whether the run is mapped by huge pages (of the PMD level).
    pub huge: bool,
}

/// How to read the pages of a region. See `docs/decisions/0031-read-pages-without-side-effects.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadMethod {
    /// `process_vm_readv`: the fastest method, only for pages that no other process maps. It pins the page, and pinning
    /// breaks any sharing of it (mm/gup.c, `gup_must_unshare`). Pages that turn out to be shared are read as with
    /// [`Self::ProcMem`].
    ProcessVmReadv,
    /// `/proc/PID/mem`: takes a reference without pinning and leaves sharing as it is.
    ProcMem {
        /// Whether to detect KSM pages.
        detect_merged: bool,
    },
}

/// The result of reading a page.
#[derive(Clone, Copy, Debug)]
pub struct PageView<'a> {
    /// Its content.
    pub content: PageContent<'a>,
    /// Whether it is a KSM page.
    pub merged: bool,
    /// Whether no other process maps it.
    pub exclusive: bool,
    /// Its frame, if the privilege allows reading it.
    pub frame: Option<Pfn>,
}

/// The content of a page.
#[derive(Clone, Copy, Debug)]
pub enum PageContent<'a> {
    /// Its bytes, a page long.
    Bytes(&'a [u8]),
    /// Its fingerprint, from a recording, with the kind of its content if the recording has it.
    Fingerprint(Fingerprint, Option<ContentKind>),
    /// It changed while it was being recorded.
    Volatile,
    /// It is no longer resident.
    NotResident,
}

/// An entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PagemapEntry {
    /// Bit 63: the page is in memory.
    pub present: bool,
    /// Bit 62: the page is swapped out.
    pub swapped: bool,
    /// Bit 61: the page is of a file or of shared memory.
    pub file: bool,
    /// Bit 56: no other process maps the page.
    pub exclusive: bool,
    /// Bits 0-54: the frame; 0, here `None`, without CAP_SYS_ADMIN.
    pub frame: Option<Pfn>,
}

impl PagemapEntry {
    /// Decodes the raw entry.
    pub fn from_raw(entry: u64) -> Self {
        let present = entry >> 63 & 1 == 1;
        let frame = entry & ((1 << 55) - 1);
        Self {
            present,
            swapped: entry >> 62 & 1 == 1,
            file: entry >> 61 & 1 == 1,
            exclusive: entry >> 56 & 1 == 1,
            frame: (present && frame != 0).then_some(Pfn(frame)),
        }
    }

    /// Whether the raw entry is of a page that the kernel is migrating to another frame, for example for compaction.
    /// Such a page is neither present nor swapped out, but is present again within milliseconds.
    ///
    /// The entry is marked as swapped out, with a special swap type in bits 0-4 (`pte_to_pagemap_entry` in
    /// fs/proc/task_mmu.c, `SWP_MIGRATION_READ` in include/linux/swap.h). The type is one of 23 to 30 in nearly all
    /// configurations since 5.19; some of these may be poisoned pages or device memory instead. Without CAP_SYS_ADMIN
    /// these bits are 0. Only pages of files and of shared memory are then recognized, because these are never swapped
    /// out in this form.
    pub fn is_migrating(entry: u64) -> bool {
        let seems = Self::from_raw(entry);
        seems.swapped && (seems.file || (23..=30).contains(&(entry & 31)))
    }
}

/// Flags of a frame from `/proc/kpageflags` (include/uapi/linux/kernel-page-flags.h).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FrameFlags(pub u64);

impl FrameFlags {
    /// KPF_KSM: a KSM page.
    pub fn is_ksm(self) -> bool {
        self.0 >> 21 & 1 == 1
    }

    /// KPF_ANON: anonymous.
    pub fn is_anonymous(self) -> bool {
        self.0 >> 12 & 1 == 1
    }

    /// KPF_ZERO_PAGE: the kernel's shared zero page, small or huge.
    pub fn is_zero_page(self) -> bool {
        self.0 >> 24 & 1 == 1
    }

    /// KPF_THP: part of a transparent huge page.
    pub fn is_thp(self) -> bool {
        self.0 >> 22 & 1 == 1
    }

    /// KPF_HUGE: part of a hugetlb page.
    pub fn is_hugetlb(self) -> bool {
        self.0 >> 17 & 1 == 1
    }
}
