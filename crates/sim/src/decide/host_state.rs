//! What is on a simulated host at a moment: its processes with their memory, ksmd, and what happens next.

use super::content_pool::ContentsUsedUp;
use super::cost::CostModel;
use super::frame_numbers::{FrameNumbers, ZERO_PAGE_FRAME};
use super::ksmd::{Advice, KsmModel, KsmSettings, RunState};
use super::ksmd_time::KsmdTime;
use super::machine_events::MachineEvents;
use super::memory::{Content, PAGES_IN_HUGE_PAGE, PageEntry, SimulatedProcess, SimulatedProcessId, Vma};
use super::rules::KsmRules;
use super::samples::{Sample, SimulatedRun, count_duplicates};
use super::scenario::{HostSpec, Scenario};
use pagefold_base::{AddressRange, IdSet, Pfn, Pid};
use pagefold_merge::decide::policy::Advisor;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a page.
pub(crate) const PAGE_BYTES: u64 = 4096;
pub(crate) const NS_PER_MS: u64 = 1_000_000;

/// No real process has this number or a larger one (`PID_MAX_LIMIT` in include/linux/threads.h), so that no simulated
/// process is taken for this program.
const FIRST_UNUSED_PID: u32 = 1 << 22;

/// ksmd's process number.
pub(crate) const KSMD_PID: Pid = Pid(FIRST_UNUSED_PID + 50);
/// When ksmd began, in clock ticks since boot.
pub(crate) const KSMD_START_TICKS: u64 = 50;
/// The process number of the first process.
const FIRST_PID: u32 = FIRST_UNUSED_PID + 1000;

/// The page from which on the memory of a process is mapped: where the kernel puts large mappings on x86-64.
const FIRST_MAPPED_PAGE: u64 = 0x7_f000_0000;

/// CPU time that a process uses to write a page, in nanoseconds: to fill it at 4 GB a second.
const WRITE_NS: u64 = 1000;

/// The host booted so long before the start of virtual time: 1,000 s.
pub(crate) const BOOT_TICKS: u64 = 100_000;
/// A clock tick of `/proc/PID/stat`, in nanoseconds.
pub(crate) const NS_PER_TICK: u64 = 10 * NS_PER_MS;
/// CPU time that a process has used when it appears.
const START_CPU_NS: u64 = 100 * NS_PER_MS;

/// What ksmd does with pages that change during a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// What the kernel does: slow on hosts with writers.
    Exact,
    /// An [approximation](KsmModel::seeing_changes_at_once).
    Approximate,
}

/// What becomes of a machine's memory when it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MachineEnrollment {
    /// All of it is mergeable, as with QEMU's `mem-merge=on`.
    AtArrival,
    /// Programs enroll it later, if at all.
    ByPrograms,
}

/// How a host begins.
#[derive(Clone, Copy, Debug)]
pub struct HostSetup {
    /// KSM's settings.
    pub ksm: KsmSettings,
    /// Whether ksmd runs.
    pub run: RunState,
    /// What ksmd does with pages that change.
    pub exactness: Exactness,
    /// What becomes of machines' memory.
    pub enrollment: MachineEnrollment,
}

impl HostSetup {
    /// The settings of a scenario, with ksmd stopped and nothing enrolled.
    #[must_use]
    pub fn without_policy(spec: &HostSpec, exactness: Exactness) -> Self {
        Self { ksm: spec.ksm, run: RunState::Stopped, exactness, enrollment: MachineEnrollment::ByPrograms }
    }
}

/// What a process is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// The kernel's name of its program.
    pub comm: String,
    /// Its command line.
    pub arguments: Vec<String>,
    /// Its user.
    pub uid: u32,
    /// Its cgroup.
    pub cgroup: String,
    /// Its vCPUs, if it is a virtual machine. Each has a thread.
    pub vcpus: u32,
}

impl ProcessIdentity {
    /// A virtual machine of QEMU.
    #[must_use]
    pub fn machine(name: &str, number: u32, tenant: &str, memory_pages: u64, vcpus: u32) -> Self {
        let mebibytes = (memory_pages * PAGE_BYTES) >> 20;
        let uuid = format!("00000000-0000-4000-8000-{number:012x}");
        let arguments = [
            "/usr/bin/qemu-system-x86_64",
            "-name",
            // QEMU reads two commas as one of a value.
            &format!("guest={},debug-threads=on", name.replace(',', ",,")),
            "-machine",
            "q35,mem-merge=on",
            "-m",
            &format!("size={mebibytes}M"),
            "-smp",
            &vcpus.to_string(),
            "-uuid",
            &uuid,
        ];
        Self {
            comm: "qemu-system-x86".to_owned(),
            arguments: arguments.map(str::to_owned).to_vec(),
            uid: 107,
            cgroup: format!("/machine.slice/machine-{tenant}.slice/machine-qemu-{number}-{name}.scope"),
            vcpus,
        }
    }
}

/// A thread of a process. It began with its process.
#[derive(Clone, Debug)]
pub(crate) struct HostThread {
    /// The kernel's name of it.
    pub(crate) comm: String,
    /// The CPUs on which it may run; `None` for all.
    pub(crate) allowed_cpus: Option<IdSet>,
    /// The CPU on which it ran last.
    pub(crate) last_cpu: u32,
    pub(crate) cpu_ns: u64,
}

impl HostThread {
    fn new(comm: String, last_cpu: u32, cpu_ns: u64) -> Self {
        Self { comm, allowed_cpus: None, last_cpu, cpu_ns }
    }
}

/// A process.
#[derive(Clone, Debug)]
pub(crate) struct HostProcess {
    pub(crate) identity: ProcessIdentity,
    pub(crate) model_id: SimulatedProcessId,
    /// Clock ticks from boot to its start.
    pub(crate) start_ticks: u64,
    /// Whether `PR_SET_MEMORY_MERGE` is on.
    pub(crate) merges_any: bool,
    /// The main thread, which has the number of the process, and behind it those of vCPUs.
    pub(crate) threads: BTreeMap<Pid, HostThread>,
    pub(crate) page_faults: u64,
}

impl HostProcess {
    /// The CPU time of all threads.
    pub(crate) fn cpu_ns(&self) -> u64 {
        self.threads.values().map(|thread| thread.cpu_ns).sum()
    }

    /// The vCPUs use CPU time, each the same; without any, the main thread does.
    fn spend_cpu_time(&mut self, ns: u64) {
        let vcpus = self.threads.len() as u64 - 1;
        let mut remainder = ns.checked_rem(vcpus).unwrap_or(ns);
        for thread in self.threads.values_mut().skip(usize::from(vcpus > 0)) {
            thread.cpu_ns += ns.checked_div(vcpus).unwrap_or(0) + std::mem::take(&mut remainder);
        }
    }
}

/// The state of a host.
#[derive(Debug)]
pub(crate) struct HostState<'s> {
    pub(crate) spec: HostSpec,
    pub(crate) model: KsmModel,
    pub(crate) ksmd: KsmdTime,
    /// The advisor's settings, which are kept while it is off.
    pub(crate) advisor: Advisor,
    pub(crate) processes: BTreeMap<Pid, HostProcess>,
    pub(crate) frames: FrameNumbers,
    pub(crate) now_ns: u64,
    /// Merged pages that processes wrote.
    pub(crate) cow_breaks: u64,
    /// CPU time of Pagefold, in nanoseconds.
    pub(crate) pagefold_cpu_ns: u64,
    /// Huge pages that processes got.
    huge_pages: u64,
    next_pid: u32,
    /// What is yet to come.
    events: Option<MachineEvents<'s>>,
    samples: Vec<Sample>,
    /// Duplicates at the end of the scenario.
    duplicates_at_end: Option<u64>,
    failure: Option<ContentsUsedUp>,
}

/// Neighboring regions of a process that the kernel shows as one.
#[derive(Debug)]
pub(crate) struct ShownRegion<'m> {
    pub(crate) parts: Vec<&'m Vma>,
}

impl ShownRegion<'_> {
    pub(crate) fn range(&self) -> AddressRange {
        let (first, last) = (self.parts[0], self.parts[self.parts.len() - 1]);
        AddressRange { start: first.start * PAGE_BYTES, end: last.end() * PAGE_BYTES }
    }

    pub(crate) fn is_mergeable(&self) -> bool {
        self.parts[0].is_mergeable
    }
}

/// Neighboring pages that are mapped in one way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedRun {
    pub(crate) page: u64,
    pub(crate) pages: u64,
    pub(crate) entry: PageEntry,
    /// Whether contents and frames have ascending numbers.
    pub(crate) ascends: bool,
}

impl MappedRun {
    /// What a page of the run is mapped to.
    pub(crate) fn entry_at(&self, offset: u64) -> PageEntry {
        let plus = if self.ascends { offset as u32 } else { 0 };
        match self.entry {
            PageEntry::Private(content) => PageEntry::Private(content + plus),
            PageEntry::HugePart(content) => PageEntry::HugePart(content + plus),
            PageEntry::Frame(frame) => PageEntry::Frame(frame + plus),
            other => other,
        }
    }
}

impl<'s> HostState<'s> {
    /// A host without processes.
    pub(crate) fn new(spec: HostSpec, costs: CostModel, setup: HostSetup) -> Self {
        let mut model = KsmModel::new(KsmRules::for_version(spec.kernel), setup.ksm);
        if setup.exactness == Exactness::Approximate {
            model = model.seeing_changes_at_once();
        }
        model.write_run(setup.run);
        Self {
            model,
            ksmd: KsmdTime::new(costs, &spec),
            advisor: setup.ksm.advisor.unwrap_or_default(),
            processes: BTreeMap::new(),
            frames: FrameNumbers::new(spec.nodes),
            now_ns: 0,
            cow_breaks: 0,
            pagefold_cpu_ns: 0,
            huge_pages: 0,
            next_pid: FIRST_PID,
            events: None,
            samples: Vec::new(),
            duplicates_at_end: None,
            failure: None,
            spec,
        }
    }

    /// A host on which the machines of a scenario arrive. Those that arrive at the start are there.
    pub(crate) fn with_scenario(scenario: &'s Scenario, seed: u64, setup: HostSetup) -> Self {
        let events = Some(MachineEvents::new(scenario, seed, setup.enrollment));
        let mut state = Self { events, ..Self::new(scenario.host.clone(), scenario.costs, setup) };
        state.advance(0);
        state
    }

    /// Why the workload ended early, if it did.
    pub(crate) fn failure(&self) -> Option<ContentsUsedUp> {
        self.failure
    }

    /// Let the host run until a time. Samples are taken at the scenario's intervals and at its end.
    pub(crate) fn advance(&mut self, now_ns: u64) {
        if let Some(mut events) = self.events.take() {
            while let Some(at_ms) = events.next_ms().filter(|&at_ms| at_ms <= now_ns / NS_PER_MS) {
                self.advance_ksmd(at_ms * NS_PER_MS);
                if let Err(failure) = events.carry_out(self, at_ms) {
                    self.failure.get_or_insert(failure);
                }
            }
            self.events = Some(events);
        }
        self.advance_ksmd(now_ns);
    }

    /// Keep a sample of this moment.
    pub(super) fn take_sample(&mut self) {
        self.samples.push(Sample::observe(self));
    }

    /// The scenario is over: what happens from now on is no part of its run.
    pub(super) fn end_scenario(&mut self) {
        self.duplicates_at_end = Some(count_duplicates(self.model.memory()));
    }

    /// What the run has shown so far.
    pub(crate) fn finish(&self) -> SimulatedRun {
        SimulatedRun {
            samples: self.samples.clone(),
            duplicates: self.duplicates_at_end.unwrap_or_else(|| count_duplicates(self.model.memory())),
            huge_pages: self.huge_pages,
            scan_wait: None,
        }
    }

    fn advance_ksmd(&mut self, now_ns: u64) {
        self.ksmd.advance(&mut self.model, now_ns);
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Start a process without memory. Its threads run on the CPUs of a node, and may run on all.
    pub(crate) fn start_process(&mut self, identity: ProcessIdentity, cpu_node: u8) -> Pid {
        let names: Vec<String> = (0..identity.vcpus).map(|vcpu| format!("CPU {vcpu}/KVM")).collect();
        let node_cpus = Some(self.cpus_of_node(cpu_node)).filter(|cpus| !cpus.is_empty());
        let cpus = node_cpus.unwrap_or(0..self.spec.cpus);
        let mut cpus = cpus.clone().cycle().skip(self.next_pid as usize % cpus.len());
        let model_id = self.model.spawn();
        let comm = identity.comm.clone();
        let pid = self.add_process(identity, model_id, HostThread::new(comm, cpus.next().unwrap_or(0), START_CPU_NS));
        for name in names {
            let tid = self.take_pid();
            let thread = HostThread::new(name, cpus.next().unwrap_or(0), 0);
            self.processes.entry(pid).and_modify(|process| _ = process.threads.insert(tid, thread));
        }
        pid
    }

    fn take_pid(&mut self) -> Pid {
        self.next_pid += 1;
        Pid(self.next_pid - 1)
    }

    fn add_process(&mut self, identity: ProcessIdentity, model_id: SimulatedProcessId, main: HostThread) -> Pid {
        let pid = self.take_pid();
        let start_ticks = BOOT_TICKS + self.now_ns / NS_PER_TICK;
        let threads = BTreeMap::from([(pid, main)]);
        let process = HostProcess { identity, model_id, start_ticks, merges_any: false, threads, page_faults: 0 };
        self.processes.insert(pid, process);
        pid
    }

    /// Fork a process. The child has one thread.
    pub(crate) fn fork(&mut self, parent: Pid) -> Option<Pid> {
        let HostProcess { identity, model_id, merges_any, mut threads, .. } = self.processes.get(&parent)?.clone();
        let main = HostThread { cpu_ns: START_CPU_NS, ..threads.remove(&parent)? };
        let child = self.model.fork(model_id);
        self.frames.add_child(model_id, child);
        let pid = self.add_process(identity, child, main);
        self.processes.get_mut(&pid)?.merges_any = merges_any;
        Some(pid)
    }

    /// The CPUs of a node: each node has an equal part.
    pub(crate) fn cpus_of_node(&self, node: u8) -> Range<u32> {
        let (cpus, nodes, node) = (self.spec.cpus, u32::from(self.spec.nodes), u32::from(node));
        node * cpus / nodes..(node + 1) * cpus / nodes
    }

    /// End a process.
    pub(crate) fn exit(&mut self, pid: Pid) {
        if let Some(process) = self.processes.remove(&pid) {
            self.model.exit(process.model_id);
            self.frames.remove_process(process.model_id);
        }
    }

    /// Map memory behind what the process has mapped. Returns the first page.
    pub(crate) fn map(&mut self, pid: Pid, pages: u64, node: u8) -> Option<u64> {
        let HostProcess { model_id, merges_any, .. } = *self.processes.get(&pid)?;
        let last = self.model.memory().process(model_id).vmas.values().next_back();
        // A gap of a huge page keeps regions apart.
        let page =
            last.map_or(FIRST_MAPPED_PAGE, |vma| vma.end().next_multiple_of(PAGES_IN_HUGE_PAGE) + PAGES_IN_HUGE_PAGE);
        self.model.map(model_id, page, pages, node);
        self.frames.add_region(model_id, page, pages, node);
        if merges_any {
            self.model.advise(model_id, page, pages, Advice::Mergeable);
        }
        Some(page)
    }

    /// Give advice about all memory of a process.
    pub(crate) fn advise_all(&mut self, pid: Pid, advice: Advice) {
        let Some(process) = self.processes.get(&pid) else { return };
        let (model_id, vmas) = (process.model_id, self.memory_of(process).vmas.values());
        let ranges: Vec<(u64, u64)> = vmas.map(|vma| (vma.start, vma.end() - vma.start)).collect();
        ranges.into_iter().for_each(|(start, pages)| self.model.advise(model_id, start, pages, advice));
    }

    /// Write pages of a process.
    pub(crate) fn write(&mut self, pid: Pid, pages: Range<u64>, content: Content, ascends: bool) {
        let Some(model_id) = self.processes.get(&pid).map(|process| process.model_id) else { return };
        self.place_new_pages(model_id, pages.clone());
        let Some(process) = self.processes.get_mut(&pid) else { return };
        let count = pages.end - pages.start;
        let memory = self.model.memory();
        let (mut own, mut merged) = (0, 0);
        for (_, run) in memory.runs(process.model_id, pages.clone()) {
            match run.entry() {
                // Pages of the process alone are written without a fault.
                PageEntry::Private(_) | PageEntry::HugePart(_) => own += run.pages,
                PageEntry::KsmZeroPage => merged += run.pages,
                PageEntry::Frame(first) => {
                    let frame = |page: u64| if run.ascends { first + page as u32 } else { first };
                    merged += (0..run.pages).filter(|&page| memory.frame(frame(page)).is_merged).count() as u64;
                }
                PageEntry::Absent | PageEntry::ZeroPage => {}
            }
        }
        process.spend_cpu_time(count * WRITE_NS);
        process.page_faults += count - own;
        self.cow_breaks += merged;
        self.model.write_pages(process.model_id, pages, content, ascends);
    }

    /// Let a process run without a change of its memory.
    pub(crate) fn run_process(&mut self, pid: Pid, ns: u64) {
        if let Some(process) = self.processes.get_mut(&pid) {
            process.spend_cpu_time(ns);
        }
    }

    /// Give a process a huge page of zeros.
    pub(crate) fn fault_huge_page(&mut self, pid: Pid, page: u64) {
        let Some(process) = self.processes.get_mut(&pid) else { return };
        process.page_faults += 1;
        self.huge_pages += 1;
        let model_id = process.model_id;
        self.place_new_pages(model_id, page..page + PAGES_IN_HUGE_PAGE);
        self.model.fault_huge_page(model_id, page);
    }

    /// The memory of a process.
    pub(crate) fn memory_of(&self, process: &HostProcess) -> &SimulatedProcess {
        self.model.memory().process(process.model_id)
    }

    /// Put the pages of a range on a node, but for frames that cannot migrate.
    pub(crate) fn place_pages(&mut self, process: SimulatedProcessId, pages: Range<u64>, node: u8) {
        for moved in self.model.place_pages(process, pages, node) {
            self.frames.move_range(process, moved, node);
        }
    }

    /// Where memory policies ask for it, let pages that a write is about to allocate come from another node than their
    /// neighbors.
    fn place_new_pages(&mut self, process: SimulatedProcessId, pages: Range<u64>) {
        let memory = self.model.memory();
        let record = memory.process(process);
        if record.vmas.values().all(|vma| vma.node == vma.node_of_new_pages()) {
            return;
        }
        let is_new = |entry: PageEntry| match entry {
            PageEntry::Private(_) | PageEntry::HugePart(_) => false,
            PageEntry::Frame(frame) => !memory.is_frame_movable(frame),
            PageEntry::Absent | PageEntry::ZeroPage | PageEntry::KsmZeroPage => true,
        };
        let mut new: Vec<(Range<u64>, u8)> = Vec::new();
        for (first, run) in memory.runs(process, pages) {
            let run = MappedRun { page: first, pages: run.pages, entry: run.entry(), ascends: run.ascends };
            let node = record.vma_of(first).map_or(0, Vma::node_of_new_pages);
            let single = matches!(run.entry, PageEntry::Frame(_)) && run.ascends;
            let pages_each = if single { 1 } else { run.pages };
            for offset in (0..run.pages).step_by(pages_each as usize).filter(|&offset| is_new(run.entry_at(offset))) {
                new.push((first + offset..first + offset + pages_each, node));
            }
        }
        new.into_iter().for_each(|(pages, node)| self.place_pages(process, pages, node));
    }

    /// The regions of a process as the kernel shows them: neighbors with the same advice and memory policy are one.
    pub(crate) fn shown_regions(&self, process: &HostProcess) -> Vec<ShownRegion<'_>> {
        let mut shown: Vec<ShownRegion<'_>> = Vec::new();
        for vma in self.memory_of(process).vmas.values() {
            match shown.last_mut().map(|region| &mut region.parts) {
                Some(parts)
                    if parts.last().is_some_and(|last| {
                        (last.end(), last.is_mergeable, last.policy) == (vma.start, vma.is_mergeable, vma.policy)
                    }) =>
                {
                    parts.push(vma);
                }
                _ => shown.push(ShownRegion { parts: vec![vma] }),
            }
        }
        shown
    }

    /// What the pages of a range are mapped to, in address order, without what is not mapped.
    pub(crate) fn mapped_runs(&self, process: &HostProcess, range: AddressRange) -> Vec<MappedRun> {
        let pages = range.start / PAGE_BYTES..range.end.div_ceil(PAGE_BYTES);
        let runs = self.model.memory().runs(process.model_id, pages).into_iter();
        runs.map(|(page, run)| MappedRun { page, pages: run.pages, entry: run.entry(), ascends: run.ascends })
            .filter(|run| run.entry != PageEntry::Absent)
            .collect()
    }

    /// The frame of a page; `None` if nothing is mapped.
    pub(crate) fn frame_of(&self, process: SimulatedProcessId, page: u64, entry: PageEntry) -> Option<Pfn> {
        match entry {
            PageEntry::Absent => None,
            PageEntry::ZeroPage | PageEntry::KsmZeroPage => Some(ZERO_PAGE_FRAME),
            PageEntry::Private(_) | PageEntry::HugePart(_) => Some(self.frames.own_frame(process, page)),
            PageEntry::Frame(frame) => Some(FrameNumbers::numbered_frame(frame, self.model.memory().frame(frame).node)),
        }
    }

    /// How many pages are mapped to the frame of a page; 0 for the zero page, as in `/proc/kpagecount`.
    pub(crate) fn mappings_of(&self, entry: PageEntry) -> u64 {
        match entry {
            PageEntry::Absent | PageEntry::ZeroPage | PageEntry::KsmZeroPage => 0,
            PageEntry::Private(_) | PageEntry::HugePart(_) => 1,
            PageEntry::Frame(frame) => self.model.memory().frame(frame).mappings.into(),
        }
    }

    /// Memory in use by processes and by ksmd's metadata, in pages.
    pub(crate) fn used_pages(&self) -> u64 {
        let memory = self.model.memory();
        let own: u64 = self
            .processes
            .values()
            .map(|process| {
                let totals = self.memory_of(process).totals;
                totals.private + totals.huge
            })
            .sum();
        let counters = self.model.counters();
        let saved = counters.pages_sharing.cast_signed() + counters.ksm_zero_pages;
        let metadata = (saved * PAGE_BYTES.cast_signed() - counters.general_profit).unsigned_abs().div_ceil(PAGE_BYTES);
        self.spec.used_pages + own + memory.used_numbered_frames() + metadata
    }

    /// The memory of a node, in pages: each node has an equal part.
    pub(crate) fn memory_pages_of_node(&self) -> u64 {
        self.spec.memory_pages / u64::from(self.spec.nodes)
    }

    /// Free memory of a node, in pages.
    pub(crate) fn free_pages_of_node(&self, node: u8) -> u64 {
        self.memory_pages_of_node().saturating_sub(self.used_pages_of_node(node))
    }

    /// Memory in use on a node, in pages. The host's own use is spread over all nodes.
    pub(crate) fn used_pages_of_node(&self, node: u8) -> u64 {
        let own = |process: &HostProcess| -> u64 {
            let SimulatedProcess { vmas, totals, .. } = self.memory_of(process);
            match vmas.values().filter(|vma| vma.node == node).count() {
                0 => 0,
                count if count == vmas.len() => totals.private + totals.huge,
                _ => vmas.values().filter(|vma| vma.node == node).map(Vma::own_pages).sum(),
            }
        };
        let shared = self.model.memory().used_numbered_frames() / u64::from(self.spec.nodes);
        self.spec.used_pages / u64::from(self.spec.nodes) + self.processes.values().map(own).sum::<u64>() + shared
    }
}
