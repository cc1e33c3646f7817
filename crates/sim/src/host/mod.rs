//! A simulated host behind the host port, in virtual time.
//!
//! [`SimulatedHost`] answers as a live host does: it prints the text of `/proc` and `/sys`, shows page tables and the
//! bytes of pages, and carries out writes of KSM's settings, advice, and placements on NUMA nodes. Memory and ksmd are those
//! of
//! [`KsmModel`](crate::decide::ksmd::KsmModel); the bytes of a page are made from the number of its content. Time passes
//! only where a program sleeps or waits, and for the pages that it reads: then ksmd works, and the machines of the
//! scenario arrive, write and exit.
//!
//! What is not simulated answers as a kernel without it: files are missing, and other actions are not supported.
//!
//! Limits: memory is private and anonymous. No task ever waits for memory or for a CPU, so pressure is zero. The vCPUs of
//! a machine write its pages, each as many. Of Pagefold's own CPU time, only that for reading pages and page tables counts.

mod actions;
mod contents;
mod host_text;
mod pages;
mod placement;
mod process_text;

use crate::decide::content_pool::ContentsUsedUp;
use crate::decide::cost::CostModel;
use crate::decide::counters::KsmdCounters;
use crate::decide::frame_numbers::FrameOrigin;
use crate::decide::host_state::{self, Exactness, HostSetup, HostState, KSMD_PID, PAGE_BYTES, ProcessIdentity};
use crate::decide::memory::Content;
use crate::decide::samples::SimulatedRun;
use crate::decide::scenario::{HostSpec, Scenario};
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{Absent, AddressRange, PageSize, Pfn, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::virtual_clock::VirtualClock;
use pagefold_host::{FrameFlags, Hasher, Host, ProcessHandle};
use pages::OpenProcess;
use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant, SystemTime};

/// The date at which virtual time starts, as time since 1970: 2026-01-01 00:00 UTC.
const START_DATE: Duration = Duration::from_secs(1_767_225_600);

/// CPU time to read a page and to fingerprint it, in nanoseconds: 1.3 us for a page of a scan, of which the walk of
/// the page table is a small part (`REGION_SCAN_COST_PAGES` of `pagefold-daemon`).
const PAGE_READ_NS: u64 = 1300;

/// CPU time of the kernel for a page table entry, in nanoseconds: 23 million a second (`doctor::doctor_facts`).
const PAGE_WALK_NS: u64 = 43;

/// A simulated host.
#[derive(Debug)]
pub struct SimulatedHost<'s> {
    description: String,
    clock: VirtualClock,
    started_at: Instant,
    /// Each simulated host has just booted: what was noted about another one does not apply to it.
    boot_id: String,
    seed: u64,
    state: Mutex<HostState<'s>>,
    own_cpu: Mutex<OwnCpuTime>,
}

/// The CPU time of Pagefold's threads.
#[derive(Debug, Default)]
struct OwnCpuTime {
    total_ns: u64,
    by_thread: HashMap<ThreadId, u64>,
    /// CPU time that has not become time of the clock yet.
    unspent_ns: u64,
}

impl SimulatedHost<'static> {
    /// A host without processes. `description` is for reports.
    #[must_use]
    pub fn new(description: &str, spec: HostSpec, costs: CostModel) -> Self {
        let setup = HostSetup::without_policy(&spec, Exactness::Exact);
        Self::with_state(description, 0, HostState::new(spec, costs, setup))
    }
}

impl<'s> SimulatedHost<'s> {
    /// A host on which the machines of a scenario run. Those that arrive at the start are there. Nothing is enrolled, and
    /// ksmd is stopped.
    #[must_use]
    pub fn with_scenario(description: &str, scenario: &'s Scenario, seed: u64, exactness: Exactness) -> Self {
        let setup = HostSetup::without_policy(&scenario.host, exactness);
        Self::with_state(description, seed, HostState::with_scenario(scenario, seed, setup))
    }

    fn with_state(description: &str, seed: u64, state: HostState<'s>) -> Self {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            description: description.to_owned(),
            clock: VirtualClock::default(),
            started_at: Instant::now(),
            boot_id: format!("simulated-{}-{}\n", std::process::id(), since_1970.as_nanos()),
            seed,
            state: Mutex::new(state),
            own_cpu: Mutex::default(),
        }
    }

    /// Start a process without memory, on CPUs of node 0.
    pub fn start_process(&self, identity: ProcessIdentity) -> Pid {
        self.lock().start_process(identity, 0)
    }

    /// Fork a process; `None` if it does not exist.
    pub fn fork(&self, parent: Pid) -> Option<Pid> {
        self.lock().fork(parent)
    }

    /// End a process.
    pub fn exit(&self, pid: Pid) {
        self.lock().exit(pid);
    }

    /// Map memory of a process on a node. Returns its range; `None` if the process does not exist.
    pub fn map(&self, pid: Pid, pages: u64, node: u8) -> Option<AddressRange> {
        let first = self.lock().map(pid, pages, node)?;
        Some(AddressRange { start: first * PAGE_BYTES, end: (first + pages) * PAGE_BYTES })
    }

    /// Write pages of a process: the same content, or ascending ones.
    pub fn write(&self, pid: Pid, range: AddressRange, content: Content, ascends: bool) {
        self.lock().write(pid, range.start / PAGE_BYTES..range.end / PAGE_BYTES, content, ascends);
    }

    /// Give a process a huge page of zeros, at an aligned address of untouched memory.
    pub fn fault_huge_page(&self, pid: Pid, address: u64) {
        self.lock().fault_huge_page(pid, address / PAGE_BYTES);
    }

    /// The counters of ksmd.
    #[must_use]
    pub fn ksmd_counters(&self) -> KsmdCounters {
        self.lock().model.counters()
    }

    /// What a run of a scenario has shown so far.
    #[must_use]
    pub fn simulated_run(&self) -> SimulatedRun {
        self.lock().finish()
    }

    /// Why machines are missing, or write no more: the scenario has more contents than the model.
    #[must_use]
    pub fn workload_failure(&self) -> Option<ContentsUsedUp> {
        self.lock().failure()
    }

    /// The state now.
    fn lock(&self) -> MutexGuard<'_, HostState<'s>> {
        let (now, own_ns) = (self.clock.now(), self.own_cpu().total_ns);
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.pagefold_cpu_ns = state.pagefold_cpu_ns.max(own_ns);
        state.advance(now.as_nanos() as u64);
        state
    }

    fn own_cpu(&self) -> MutexGuard<'_, OwnCpuTime> {
        self.own_cpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Count CPU time of this thread.
    fn spend_cpu_time(&self, ns: u64) {
        if ns > 0 {
            let mut own = self.own_cpu();
            own.total_ns += ns;
            let thread = thread::current().id();
            *own.by_thread.entry(thread).or_default() += ns;
            own.unspent_ns += ns;
        }
    }

    /// Let the CPU time that was used become time of the clock, as if one thread had used it. Threads that help a member
    /// of the clock do not wait for it.
    fn pass_own_time(&self) {
        if self.own_cpu().unspent_ns > 0 && self.clock.may_sleep() {
            let unspent_ns = std::mem::take(&mut self.own_cpu().unspent_ns);
            self.clock.sleep(Duration::from_nanos(unspent_ns));
        }
    }

    /// Wait until ksmd's batch in progress ends.
    fn wait_for_batch(&self) {
        let ends_ns = {
            let mut state = self.lock();
            let HostState { ksmd, model, .. } = &mut *state;
            ksmd.finish_batch(model)
        };
        self.clock.sleep(Duration::from_nanos(ends_ns).saturating_sub(self.clock.now()));
    }
}

impl Host for SimulatedHost<'_> {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE_BYTES).expect("a power of two")
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        if path == "proc/sys/kernel/random/boot_id" {
            return Ok(self.boot_id.clone().into_bytes());
        }
        let (text, walked_pages) = host_text::read(&self.lock(), path)?;
        self.spend_cpu_time(walked_pages * PAGE_WALK_NS);
        Ok(text)
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        host_text::list(&self.lock(), path)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        Ok([KSMD_PID].into_iter().chain(self.lock().processes.keys().copied()).collect())
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let start_time = match pid {
            KSMD_PID => host_state::KSMD_START_TICKS,
            _ => self.lock().processes.get(&pid).ok_or(Absent::Vanished)?.start_ticks,
        };
        Ok(Box::new(OpenProcess { host: self, id: ProcessId { pid, start_time } }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        let state = self.lock();
        frames.iter().map(|&frame| pages::flags_of_frame(&state, frame).ok_or(Absent::Vanished)).collect()
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        let state = self.lock();
        let mappings = |frame: &Pfn| match state.frames.origin(*frame).ok_or(Absent::Vanished)? {
            FrameOrigin::ZeroPage => Ok(0),
            FrameOrigin::Numbered(frame) => Ok(state.model.memory().frame(frame).mappings.into()),
            FrameOrigin::Page(..) => Ok(1),
        };
        frames.iter().map(mappings).collect()
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        self.pass_own_time();
        match action {
            Action::Write { knob, value } => {
                let setting = knob.ksm_setting().filter(|_| self.read(knob.path()).is_ok());
                let Some(setting) = setting else {
                    return Err(ActionError::Unsupported(format!("the simulated host has no setting {}", knob.path())));
                };
                if actions::waits_for_batch(setting) {
                    self.wait_for_batch();
                }
                self.lock().write_setting(setting, value)?;
                Ok(ActionOutcome::default())
            }
            Action::Advise { process, advice, ranges } => self.lock().advise(*process, *advice, ranges),
            Action::MergeAny { process, enable } => self.lock().merge_any(*process, *enable),
            Action::SetAffinity { thread, cpus, pin: None } => self.lock().set_affinity(*thread, cpus),
            Action::MovePages { process, ranges, node } => self.lock().move_pages(*process, ranges, *node),
            Action::SetMemoryPolicy { process, ranges, policy } => {
                self.lock().set_memory_policy(*process, ranges, policy)
            }
            _ => Err(ActionError::Unsupported(
                "a simulated host takes settings of KSM, advice about merging, and placements of threads and memory"
                    .to_owned(),
            )),
        }
    }

    fn now(&self) -> Instant {
        self.pass_own_time();
        self.started_at + self.clock.now()
    }

    fn sleep(&self, duration: Duration) {
        self.pass_own_time();
        self.clock.sleep(duration);
    }

    fn page_hasher(&self) -> io::Result<Hasher> {
        let words = (0..PAGE_BYTES / 8).map(|position| splitmix64(splitmix64(self.seed) ^ position));
        Ok(Hasher::with_key(&words.flat_map(u64::to_le_bytes).collect::<Vec<u8>>()))
    }

    fn simulation_failure(&self) -> Option<String> {
        self.workload_failure().map(|why| why.to_string())
    }

    fn join_clock(&self) {
        self.clock.join();
    }

    fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool) {
        self.pass_own_time();
        self.clock.wait(timeout, receive);
    }

    fn unix_time(&self) -> SystemTime {
        SystemTime::UNIX_EPOCH + START_DATE + self.clock.now()
    }

    fn own_cpu_time(&self) -> Duration {
        Duration::from_nanos(self.own_cpu().total_ns)
    }

    fn thread_cpu_time(&self) -> Duration {
        Duration::from_nanos(self.own_cpu().by_thread.get(&thread::current().id()).copied().unwrap_or(0))
    }
}
