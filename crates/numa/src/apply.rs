//! Carries a placement out: for each machine first the CPUs of its threads, then its memory in batches.
//!
//! Every change is journaled with its undo before it is made, in the sessions of [`PlacementSessions`]. A change that the
//! kernel refuses is reported with its reason, and all others are made. Memory moves only to nodes with room, within a
//! bandwidth, and never while tasks of the host wait for memory. Threads are where most of the memory of their machine
//! is: they get new CPUs at once if it is in place already, else right before the first batch moves, and get the previous
//! ones back if most of it stays elsewhere.
//!
//! Pages of files stay, because other programs use them, too. Pages that are mapped several times, such as those merged by
//! KSM, also stay (`MPOL_MF_MOVE`, mm/migrate.c): moving them would move what is at the other addresses, mostly of other
//! processes. The kernel does not tell whether all mappings are of one process.

use crate::decide::plan::{Pattern, PlacementProblem, PlannedMove};
use crate::decide::schedule::{self, BandwidthPacer, WaitingBatch};
use crate::decide::steps::{self, MachineSteps, MoveStep, PartToPlace, PolicyStep, ThreadToPlace};
use crate::map::{self, NumaMap, ProcessPlacement};
use crate::placement_record::{self, PlacedMachine};
use crate::threads::{self, ThreadPlacement, ThreadRole};
use crate::topology::Topology;
use pagefold_base::memory::{DEFAULT_PRESSURE_PERCENT, MemoryPolicy};
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, IdSet, Pages, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome, Exchange, LibvirtPin, MissedReason, ThreadId};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::journal::{self, Journal, StateDirectory};
use pagefold_host::transaction::session::{self, ChangeLifetime, Error, FailedUndo};
use pagefold_host::{Host, PageRun, ProcessHandle, elapsed_since, memory_headroom, observe, parse};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The first pause when tasks of the host wait for memory. It doubles up to [`MAX_PRESSURE_PAUSE`].
const FIRST_PRESSURE_PAUSE: Duration = Duration::from_millis(500);
const MAX_PRESSURE_PAUSE: Duration = Duration::from_secs(8);

/// After this time of pauses, no more memory is moved.
const MAX_PRESSURE_WAIT: Duration = Duration::from_secs(60);

/// How often a stop flag is looked at during a pause.
pub(crate) const STOP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The purpose under which the changes are kept.
pub const PURPOSE: &str = "numa apply";

/// The sessions in which threads and memory are placed.
pub struct PlacementSessions<'h> {
    /// For memory.
    pub memory: Session<'h>,
    /// For threads.
    pub cpus: Session<'h>,
}

/// Changes of an earlier session that were undone, and those that could not be.
pub type UndoneChanges = (Vec<Action>, Vec<FailedUndo>);

impl<'h> PlacementSessions<'h> {
    /// Takes the locks, in the order of [`ResourceClass::ALL`], and undoes the changes of a killed command.
    ///
    /// # Errors
    /// If another command places memory or threads, or a journal cannot be used.
    pub fn begin(host: &'h dyn Host, directory: &Path) -> Result<(Self, UndoneChanges), Error> {
        let (memory, mut undone, mut failed) = Session::begin(host, directory, ResourceClass::MemoryPlacement)?;
        let (cpus, undone_cpus, failed_cpus) = Session::begin(host, directory, ResourceClass::CpuPlacement)?;
        undone.extend(undone_cpus);
        failed.extend(failed_cpus);
        Ok((Self { memory, cpus }, (undone, failed)))
    }

    /// Keeps the changes until [`Self::undo_kept`]: memory first, so that a process that is killed in between leaves
    /// threads with their previous CPUs, which may run where the memory is, and not threads that are away from it.
    ///
    /// # Errors
    /// If they cannot be stored. The changes that are not stored are undone when the sessions end.
    pub fn keep(&mut self) -> Result<Vec<FailedUndo>, Error> {
        let mut failed = self.memory.keep_changes(PURPOSE)?;
        failed.extend(self.cpus.keep_changes(PURPOSE)?);
        Ok(failed)
    }

    /// Undoes the kept changes, of all machines, or only of the given processes: memory first, so that new pages of
    /// the threads come to where the memory is.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_kept(&mut self, only: Option<&BTreeSet<ProcessId>>) -> Result<UndoneChanges, Error> {
        let undo = |session: &mut Session<'h>| match only {
            Some(processes) => session.undo_kept_changes_of(processes),
            None => session.undo_kept_changes(),
        };
        let (mut undone, mut failed) = undo(&mut self.memory)?;
        let (undone_cpus, failed_cpus) = undo(&mut self.cpus)?;
        undone.extend(undone_cpus);
        failed.extend(failed_cpus);
        Ok((undone, failed))
    }

    /// Undoes all changes that are not kept, because of an error or a signal.
    pub fn undo_all(&mut self) -> Result<Vec<FailedUndo>, Error> {
        let mut failed = self.memory.undo_all()?;
        failed.extend(self.cpus.undo_all()?);
        Ok(failed)
    }
}

/// The nodes of a part of a machine, each with its share of the memory.
pub type PartNodes = Vec<(u32, f64)>;

/// A machine to place.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineTarget {
    /// The position of the machine among the processes of the map.
    pub position: usize,
    /// The nodes of each part: of each virtual node, or of the whole machine.
    pub parts: Vec<PartNodes>,
}

impl MachineTarget {
    /// The target of a machine of a plan; `None` if it stays as it is, and is not bound either.
    pub fn planned(
        position: usize,
        part_count: usize,
        planned: &PlannedMove,
        problem: &PlacementProblem,
    ) -> Option<Self> {
        let bound = || planned.binds_to.clone().map(Pattern::Nodes);
        let pattern = if planned.pattern == Pattern::Leave { bound()? } else { planned.pattern.clone() };
        Self::new(position, part_count, &pattern, problem)
    }

    /// The target of a machine with `part_count` parts under a pattern; `None` if it stays as it is.
    pub fn new(position: usize, part_count: usize, pattern: &Pattern, problem: &PlacementProblem) -> Option<Self> {
        let pages = |id: u32| problem.nodes.iter().find(|node| node.id == id).map_or(0.0, |node| node.pages);
        let parts = match pattern {
            Pattern::Leave => return None,
            Pattern::Nodes(nodes) => nodes.iter().map(|&node| vec![(node, 1.0)]).collect(),
            Pattern::Spread(nodes) => {
                let total: f64 = nodes.iter().map(|&node| pages(node)).sum();
                let shares = nodes.iter().map(|&node| (node, pages(node) / total.max(1.0))).collect();
                vec![shares; part_count]
            }
        };
        Some(Self { position, parts })
    }
}

/// Limits of a placement.
#[derive(Clone, Debug, PartialEq)]
pub struct ApplyLimits {
    /// Bytes that may be moved in a second, on average, with a credit of one batch at most.
    pub bandwidth: Option<Bytes>,
    /// The share of each node's memory that stays free.
    pub headroom_share: f64,
    /// Memory of each node that stays free besides, for machines that are bound there.
    pub reserved: BTreeMap<u32, Bytes>,
}

/// Receives how far a placement is after each batch: the machine of the batch, and the bytes of all machines that have
/// been moved.
pub type ProgressObserver<'o> = dyn FnMut(usize, Bytes) + 'o;

/// What was done with a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineOutcome {
    /// Threads with new CPUs.
    pub placed_threads: Vec<Pid>,
    /// Threads that have CPUs of their nodes without a change of their own: another program gave them these, or libvirt did
    /// by the cpuset of the main thread.
    pub following_threads: Vec<Pid>,
    /// Threads that stay, with the reason.
    pub kept_threads: Vec<(Pid, String)>,
    /// Pages that were moved.
    pub moved_pages: Pages,
    /// Pages that stay on another node, by reason.
    pub kept_pages: BTreeMap<MissedReason, Pages>,
    /// Memory that will come from the machine's node if it is touched later.
    pub preferring_bytes: Bytes,
    /// Memory whose policy could not be changed, with the reason.
    pub refused_policies: BTreeMap<String, Bytes>,
    /// Why the machine was given up, if it was: it has ended, its nodes have no room, or the kernel refused.
    pub failure: Option<String>,
}

impl MachineOutcome {
    /// Pages that stay, without those that are mapped several times.
    fn staying_pages(&self) -> Pages {
        let is_own = |why: &MissedReason| *why != MissedReason::MappedSeveralTimes;
        self.kept_pages.iter().filter(|(why, _)| is_own(why)).map(|(_, pages)| *pages).sum()
    }

    /// Whether threads or memory were placed.
    pub fn has_changes(&self) -> bool {
        !self.placed_threads.is_empty() || self.moved_pages > Pages::ZERO || self.preferring_bytes > Bytes::ZERO
    }

    /// Whether all was done, except that memory that is mapped several times stays.
    pub fn is_complete(&self) -> bool {
        let is_placed = self.kept_threads.is_empty() && self.staying_pages() == Pages::ZERO;
        self.failure.is_none() && is_placed && self.refused_policies.is_empty()
    }
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ApplyOutcome {
    /// For each target.
    pub machines: Vec<MachineOutcome>,
    /// Time in which memory was moved, with pauses.
    pub moving_time: Duration,
    /// The part of it that was spent in pauses for the bandwidth and for memory pressure.
    pub pause_time: Duration,
    /// Whether it ended because tasks of the host waited for memory.
    pub stopped_by_pressure: bool,
    /// Whether it was interrupted. All changes are to be undone then.
    pub interrupted: bool,
    /// Threads that should have got their previous CPUs back, and did not.
    pub failed_undos: Vec<FailedUndo>,
}

impl ApplyOutcome {
    /// The records of those machines that were placed, at least in part, with their placed threads and the pages that stay.
    /// `planned` are the records of all machines as they were to be placed. Where something was to be done and nothing
    /// changed, an earlier placement stays in force.
    pub fn records(&self, planned: &[PlacedMachine]) -> Vec<PlacedMachine> {
        let machines = planned.iter().zip(&self.machines);
        let placed = machines.filter(|(_, done)| done.has_changes() || done.is_complete());
        let record = |(planned, done): (&PlacedMachine, &MachineOutcome)| {
            let is_placed = |tid: u32| done.placed_threads.contains(&Pid(tid));
            PlacedMachine {
                kept_pages: done.kept_pages.values().map(|pages| pages.0).sum(),
                staying_pages: done.staying_pages().0,
                threads: planned.threads.iter().filter(|(tid, ..)| is_placed(*tid)).cloned().collect(),
                ..planned.clone()
            }
        };
        placed.map(record).collect()
    }

    /// Whether all that was planned was done, except for memory that is mapped several times.
    pub fn is_complete(&self) -> bool {
        let is_whole = self.machines.iter().all(MachineOutcome::is_complete);
        !self.interrupted && !self.stopped_by_pressure && self.failed_undos.is_empty() && is_whole
    }
}

/// The steps of a machine, and the machine that they are for.
#[derive(Clone, Debug)]
pub struct PreparedMachine {
    process: ProcessId,
    steps: MachineSteps,
    /// The memory in the ranges of all steps that is on its node already.
    in_place: Bytes,
    /// The threads that libvirt pins.
    libvirt_pins: BTreeMap<Pid, LibvirtPin>,
}

impl PreparedMachine {
    /// Its steps.
    pub fn steps(&self) -> &MachineSteps {
        &self.steps
    }

    /// The memory that is to be moved.
    pub fn planned_bytes(&self) -> Bytes {
        self.steps.moves.iter().map(|step| step.bytes).sum()
    }

    /// Whether most of its memory is on another node if so much of it stays.
    fn is_mostly_elsewhere(&self, staying: Bytes) -> bool {
        schedule::is_majority(staying, self.in_place + self.planned_bytes())
    }
}

/// The memory of a machine cannot be read, so its steps are not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the memory of {machine} (process {pid})")]
pub struct UnreadableMachine {
    /// The name of the machine or program.
    pub machine: String,
    /// Its process number.
    pub pid: Pid,
    /// The reason.
    pub source: Absent,
}

/// Read the present regions and threads of the machines, and compute their steps. A machine that has ended has no steps.
/// Once `stop` is set, the nodes of pages are not read any more, and all memory counts as elsewhere.
///
/// # Errors
/// If a machine cannot be read for another reason than that it has ended.
pub fn prepare(
    host: &dyn Host,
    map: &NumaMap,
    targets: &[MachineTarget],
    stop: &AtomicBool,
) -> Result<Vec<PreparedMachine>, UnreadableMachine> {
    let machine = |target: &MachineTarget| {
        let placement = &map.processes[target.position];
        prepare_machine(host, &map.topology, placement, target, stop).map_err(|source| UnreadableMachine {
            machine: placement_record::machine_name(placement),
            pid: placement.process.id.pid,
            source,
        })
    };
    targets.iter().map(machine).collect()
}

fn prepare_machine(
    host: &dyn Host,
    topology: &Topology,
    placement: &ProcessPlacement,
    target: &MachineTarget,
    stop: &AtomicBool,
) -> Reading<PreparedMachine> {
    let process = placement.process.id;
    let ended = PreparedMachine {
        process,
        steps: MachineSteps::default(),
        in_place: Bytes::ZERO,
        libvirt_pins: BTreeMap::new(),
    };
    let handle = match pagefold_host::hold(host, process) {
        Err(Absent::Vanished) => return Ok(ended),
        handle => handle?,
    };
    let regions = match observe::regions(&*handle) {
        Err(Absent::Vanished) => return Ok(ended),
        regions => regions?,
    };
    let nodes: Vec<_> = placement.virtual_nodes.iter().map(|node| node.node.clone()).collect();
    let node_of_region = map::assign_regions(&nodes, &regions);
    let mut parts: Vec<PartToPlace> =
        target.parts.iter().map(|nodes| PartToPlace { nodes: nodes.clone(), regions: Vec::new() }).collect();
    let mut regions_of_part: Vec<Vec<&Region>> = vec![Vec::new(); parts.len()];
    let is_device = |region: &&Region| region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO));
    for region in regions.iter().filter(|region| !is_device(region)) {
        let part = node_of_region.get(&region.range.start);
        let part = part.and_then(|id| nodes.iter().position(|node| node.id == *id)).unwrap_or(0);
        let part = if part < parts.len() { part } else { 0 };
        parts[part].regions.extend(movable_ranges(host, &*handle, region)?);
        if region.is_memory() && !has_lasting_file(region) {
            regions_of_part[part].push(region);
        }
    }
    let threads: Vec<ThreadToPlace> = placement
        .threads
        .iter()
        .flatten()
        .map(|thread| thread_to_place(thread, part_of_thread(thread, placement, target.parts.len())))
        .collect();
    let cpus_of_node: BTreeMap<u32, IdSet> = topology.nodes.iter().map(|(&id, node)| (id, node.cpus.clone())).collect();
    let mut steps = steps::machine_steps(&parts, &threads, &cpus_of_node);
    // Where policies cannot be read, none is changed.
    let policies = parse::memory_policies(&handle.read("numa_maps").unwrap_or_default());
    for (part, regions) in parts.iter().zip(&regions_of_part) {
        steps::add_policies(&mut steps, &part.nodes, regions, &policies);
    }
    let lasting = regions.iter().filter(|region| region.is_memory() && has_lasting_file(region));
    let lasting_bytes: Bytes = lasting.map(|region| region.range.bytes()).sum();
    if lasting_bytes > Bytes::ZERO {
        steps.kept_policies.insert("it is of a file, which would keep the policy".to_owned(), lasting_bytes);
    }
    let mut in_place = Bytes::ZERO;
    for step in steps.moves.iter_mut().take_while(|_| !stop.load(Ordering::Relaxed)) {
        let (there, elsewhere) = match locate_bytes(host, &*handle, step) {
            Err(Absent::Vanished) => return Ok(ended),
            bytes => bytes?,
        };
        in_place += there;
        step.bytes = elsewhere;
    }
    steps.moves.retain(|step| step.bytes > Bytes::ZERO);
    let pin = |thread: &ThreadPlacement| Some((thread.tid, thread.libvirt_pin(placement.libvirt.as_ref()?)?));
    let libvirt_pins = placement.threads.iter().flatten().filter_map(pin).collect();
    Ok(PreparedMachine { process, steps, in_place, libvirt_pins })
}

/// The memory in the ranges of a step that is on its node already, and that is on other nodes.
fn locate_bytes(host: &dyn Host, handle: &dyn ProcessHandle, step: &MoveStep) -> Reading<(Bytes, Bytes)> {
    let (mut there, mut elsewhere) = (0, 0);
    for &range in &step.ranges {
        let nodes = handle.page_nodes(range)?;
        let present = nodes.iter().flatten().count();
        let on_node = nodes.iter().filter(|node| **node == Some(step.node)).count();
        there += on_node;
        elsewhere += present - on_node;
    }
    let bytes = |pages: usize| host.page_size().bytes_of(Pages(pages as u64));
    Ok((bytes(there), bytes(elsewhere)))
}

/// The ranges of a region that are moved: all of it, or the pages that the process has written in a mapping of a file.
fn movable_ranges(host: &dyn Host, handle: &dyn ProcessHandle, region: &Region) -> Reading<Vec<AddressRange>> {
    if region.is_memory() {
        let is_resident = region.rss > Bytes::ZERO || region.hugetlb > Bytes::ZERO;
        return Ok(if is_resident { vec![region.range] } else { Vec::new() });
    }
    if region.anonymous == Bytes::ZERO {
        return Ok(Vec::new());
    }
    let end = |run: &PageRun| run.address + host.page_size().bytes_of(Pages(run.pages.into())).0;
    let runs = handle.resident(&[region.range])?;
    Ok(runs.iter().map(|run| AddressRange { start: run.address, end: end(run) }).collect())
}

/// Whether memory is of a file that other processes may open, now or later. Its policy is the file's (mm/shmem.c,
/// `shmem_set_policy`) and would outlive the process.
fn has_lasting_file(region: &Region) -> bool {
    region.inode != 0 && !region.name.ends_with(" (deleted)")
}

fn thread_to_place(thread: &ThreadPlacement, part: Option<usize>) -> ThreadToPlace {
    ThreadToPlace {
        tid: thread.tid,
        start_time: thread.start_time,
        part,
        allowed_cpus: thread.allowed_cpus.clone(),
        permitted_cpus: thread.permitted_cpus.clone(),
    }
}

/// The part whose virtual CPU a thread runs.
fn part_of_thread(thread: &ThreadPlacement, placement: &ProcessPlacement, part_count: usize) -> Option<usize> {
    let ThreadRole::Vcpu(vcpu) = thread.role else { return None };
    if part_count == 1 {
        return Some(0);
    }
    placement.virtual_nodes.iter().position(|node| node.node.vcpus.contains(vcpu))
}

/// Carry the steps out. Stops between two changes once `stop` is set.
///
/// # Errors
/// If a journal or the state of the host cannot be used. The caller undoes the changes then.
pub fn carry_out(
    sessions: &mut PlacementSessions<'_>,
    machines: &[PreparedMachine],
    limits: ApplyLimits,
    progress: &mut ProgressObserver<'_>,
    stop: &AtomicBool,
) -> Result<ApplyOutcome, Error> {
    let outcome = ApplyOutcome {
        machines: machines.iter().map(|_| MachineOutcome::default()).collect(),
        ..ApplyOutcome::default()
    };
    let mut placer = Placer {
        sessions,
        machines,
        limits,
        progress,
        stop,
        moved: Bytes::ZERO,
        has_placed_threads: vec![false; machines.len()],
        silent_libvirt: None,
        outcome,
    };
    placer.place_all()?;
    placer.is_stopped();
    Ok(placer.outcome)
}

/// Apply an action until it is undone; what the host refuses is an answer and no error.
fn try_apply(session: &mut Session<'_>, action: &Action) -> Result<Result<ActionOutcome, ActionError>, Error> {
    match session.apply(action, ChangeLifetime::Temporary) {
        Ok(outcome) => Ok(Ok(outcome)),
        Err(Error::Refused(why)) => Ok(Err(why)),
        Err(Error::HostStateUnreadable(Absent::Vanished)) => Ok(Err(ActionError::Vanished)),
        Err(error) => Err(error),
    }
}

struct Placer<'s, 'h> {
    sessions: &'s mut PlacementSessions<'h>,
    machines: &'s [PreparedMachine],
    limits: ApplyLimits,
    progress: &'s mut ProgressObserver<'s>,
    stop: &'s AtomicBool,
    moved: Bytes,
    /// For each machine.
    has_placed_threads: Vec<bool>,
    /// Why libvirt was given up: it did not answer in time.
    silent_libvirt: Option<String>,
    outcome: ApplyOutcome,
}

/// The batches of a machine for one node that wait to be moved.
struct MoveQueue<'s> {
    machine: usize,
    steps: VecDeque<&'s MoveStep>,
}

impl MoveQueue<'_> {
    fn next_batch(&self) -> Option<WaitingBatch> {
        let step = self.steps.front()?;
        Some(WaitingBatch { machine: self.machine, bytes: step.bytes, node: step.node })
    }

    fn bytes(&self) -> Bytes {
        self.steps.iter().map(|step| step.bytes).sum()
    }
}

impl Placer<'_, '_> {
    fn place_all(&mut self) -> Result<(), Error> {
        let machines = self.machines;
        let mut queues: Vec<MoveQueue<'_>> = Vec::new();
        for (machine, prepared) in machines.iter().enumerate() {
            let mut steps_by_node: BTreeMap<u32, VecDeque<&MoveStep>> = BTreeMap::new();
            prepared.steps.moves.iter().for_each(|step| steps_by_node.entry(step.node).or_default().push_back(step));
            queues.extend(steps_by_node.into_values().map(|steps| MoveQueue { machine, steps }));
            if !prepared.is_mostly_elsewhere(prepared.planned_bytes()) {
                self.place_threads(machine)?;
            }
        }
        self.move_memory(&mut queues)?;
        if self.is_stopped() {
            return Ok(());
        }
        let page = self.sessions.memory.host().page_size();
        for queue in &queues {
            let result = &mut self.outcome.machines[queue.machine];
            let why = MissedReason::Refused(result.failure.clone().unwrap_or_default());
            let staying = page.pages_in(queue.bytes());
            if staying > Pages::ZERO {
                *result.kept_pages.entry(why).or_default() += staying;
            }
        }
        for (machine, prepared) in machines.iter().enumerate() {
            if prepared.is_mostly_elsewhere(page.bytes_of(self.outcome.machines[machine].staying_pages())) {
                self.restore_threads(machine)?;
            } else {
                self.set_policies(machine)?;
            }
        }
        Ok(())
    }

    /// Moves memory until the queues are empty. Those of machines that were given up are not.
    fn move_memory(&mut self, queues: &mut Vec<MoveQueue<'_>>) -> Result<(), Error> {
        const PRESSURE: &str = "tasks of the host wait for memory";
        let host = self.sessions.memory.host();
        let started = host.now();
        let mut pacer = self.limits.bandwidth.map(BandwidthPacer::new);
        while !self.is_stopped() {
            let is_open = |queue: &&MoveQueue<'_>| self.outcome.machines[queue.machine].failure.is_none();
            let waiting: Vec<WaitingBatch> = queues.iter().filter(is_open).filter_map(MoveQueue::next_batch).collect();
            if waiting.is_empty() {
                break;
            }
            if !self.wait_for_memory() {
                self.outcome.stopped_by_pressure = true;
                self.give_up(&waiting, |_| PRESSURE.to_owned());
                break;
            }
            let room = self.read_room().map_err(Error::HostStateUnreadable)?;
            let Some(batch) = schedule::next_batch(&waiting, &room) else {
                self.give_up(&waiting, |batch| format!("node {} has no room for it", batch.node));
                break;
            };
            self.place_threads(batch.machine)?;
            let is_its_queue = |queue: &&mut MoveQueue<'_>| queue.next_batch() == Some(batch);
            let Some(queue) = queues.iter_mut().find(is_its_queue) else { break };
            let Some(step) = queue.steps.front() else { break };
            let moved_before = self.moved;
            match self.move_batch(batch.machine, step)? {
                Ok(()) => drop(queue.steps.pop_front()),
                // Nothing of it stays.
                Err(ActionError::Vanished) => queues.retain(|queue| queue.machine != batch.machine),
                Err(_) => {}
            }
            if let Some(pacer) = &mut pacer {
                let pause = pacer.pause_after(self.moved.saturating_sub(moved_before), elapsed_since(host, started));
                self.pause(pause);
            }
        }
        self.outcome.moving_time = elapsed_since(host, started);
        Ok(())
    }

    /// Whether the placement was interrupted. It stays so, even if `stop` is reset.
    fn is_stopped(&mut self) -> bool {
        self.outcome.interrupted |= self.stop.load(Ordering::Relaxed);
        self.outcome.interrupted
    }

    fn give_up(&mut self, waiting: &[WaitingBatch], why: impl Fn(&WaitingBatch) -> String) {
        for batch in waiting {
            self.outcome.machines[batch.machine].failure.get_or_insert_with(|| why(batch));
        }
    }

    /// Gives the threads of a machine their new CPUs, once.
    fn place_threads(&mut self, machine: usize) -> Result<(), Error> {
        if std::mem::replace(&mut self.has_placed_threads[machine], true) {
            return Ok(());
        }
        let prepared = &self.machines[machine];
        for step in &prepared.steps.threads {
            if self.is_stopped() {
                break;
            }
            let pin = prepared.libvirt_pins.get(&step.tid).cloned();
            let result = &mut self.outcome.machines[machine];
            if let (Some(why), Some(_)) = (&self.silent_libvirt, &pin) {
                result.kept_threads.push((step.tid, why.clone()));
                continue;
            }
            let thread = ThreadId { process: prepared.process, tid: step.tid, start_time: step.start_time };
            let cpus = Exchange { from: step.from.clone(), to: step.to.clone() };
            let is_libvirts = pin.is_some();
            match try_apply(&mut self.sessions.cpus, &Action::SetAffinity { thread, cpus, pin })? {
                Ok(done) if done.unchanged => result.following_threads.push(step.tid),
                Ok(_) => result.placed_threads.push(step.tid),
                // A thread that has ended needs no CPUs; whether its process lives shows when its memory is moved.
                Err(ActionError::Vanished) => {}
                Err(why) => {
                    if is_libvirts && matches!(why, ActionError::Busy(_)) {
                        self.silent_libvirt = Some(why.to_string());
                    }
                    result.kept_threads.push((step.tid, why.to_string()));
                }
            }
        }
        self.look_at_restricted_threads(machine);
        Ok(())
    }

    /// Notes which threads that their owner restricts are on their nodes now, and which stay. Those that have ended, so that
    /// their files are missing, need no CPUs.
    fn look_at_restricted_threads(&mut self, machine: usize) {
        const RESTRICTED: &str = "its owner restricts it to CPUs of other nodes";
        let prepared = &self.machines[machine];
        let handle = pagefold_host::hold(self.sessions.cpus.host(), prepared.process);
        let result = &mut self.outcome.machines[machine];
        for restricted in &prepared.steps.restricted_threads {
            let handle = handle.as_deref().map_err(Clone::clone);
            match handle.and_then(|handle| threads::read_thread(handle, restricted.tid, false)) {
                Err(Absent::Vanished | Absent::NotOnThisKernel) => {}
                Ok(now) if now.start_time != restricted.start_time => {}
                Ok(now) if restricted.is_on_its_nodes(&now.allowed_cpus) => {
                    result.following_threads.push(restricted.tid);
                }
                Ok(_) | Err(_) => result.kept_threads.push((restricted.tid, RESTRICTED.to_owned())),
            }
        }
    }

    /// Gives the threads of a machine their previous CPUs back, because most of its memory stays.
    fn restore_threads(&mut self, machine: usize) -> Result<(), Error> {
        let failed = self.sessions.cpus.undo_process(self.machines[machine].process)?;
        let result = &mut self.outcome.machines[machine];
        let is_restored = |tid: &Pid| {
            !failed
                .iter()
                .any(|failed| matches!(&failed.undo, Action::SetAffinity { thread, .. } if thread.tid == *tid))
        };
        let why = "most of the machine's memory stays".to_owned();
        let restored = result.placed_threads.extract_if(.., |tid| is_restored(tid));
        // Threads that follow others follow them back, too.
        let restored = restored.chain(result.following_threads.drain(..));
        result.kept_threads.extend(restored.map(|tid| (tid, why.clone())));
        self.outcome.failed_undos.extend(failed);
        Ok(())
    }

    /// Lets memory that the machine touches later come from its node. Only once its memory is there: before, new memory
    /// comes from the node of the thread that touches it.
    fn set_policies(&mut self, machine: usize) -> Result<(), Error> {
        let prepared = &self.machines[machine];
        for step in &prepared.steps.policies {
            if self.is_stopped() {
                break;
            }
            let PolicyStep { ranges, from, to } = step.clone();
            let policy = Exchange { from, to };
            let bytes: Bytes = ranges.iter().map(|range| range.bytes()).sum();
            let action = Action::SetMemoryPolicy { process: prepared.process, ranges, policy };
            let missed = match try_apply(&mut self.sessions.memory, &action)? {
                Ok(outcome) => outcome.missed_ranges.into_iter().map(|(range, why)| (range.bytes(), why)).collect(),
                Err(ActionError::Vanished) => vec![(bytes, MissedReason::NotMapped)],
                Err(why) => vec![(bytes, MissedReason::Refused(why.to_string()))],
            };
            let result = &mut self.outcome.machines[machine];
            if let MemoryPolicy::Prefer(_) = to {
                let missed_bytes: Bytes = missed.iter().map(|(bytes, _)| *bytes).sum();
                result.preferring_bytes += bytes.saturating_sub(missed_bytes);
            }
            for (bytes, why) in missed.into_iter().filter(|(_, why)| !why.is_not_mapped()) {
                *result.refused_policies.entry(why.to_string()).or_default() += bytes;
            }
        }
        Ok(())
    }

    /// Moves a batch, and notes the result. If it is refused, the machine is given up.
    fn move_batch(&mut self, machine: usize, step: &MoveStep) -> Result<Result<(), ActionError>, Error> {
        let page = self.sessions.memory.host().page_size();
        let process = self.machines[machine].process;
        let action = Action::MovePages { process, ranges: step.ranges.clone(), node: step.node };
        let result = &mut self.outcome.machines[machine];
        match try_apply(&mut self.sessions.memory, &action)? {
            Ok(moved) => {
                result.moved_pages += moved.moved_pages;
                for (range, why) in moved.missed_ranges {
                    *result.kept_pages.entry(why).or_default() += page.pages_in(range.bytes());
                }
                self.moved += page.bytes_of(moved.moved_pages);
                (self.progress)(machine, self.moved);
                Ok(Ok(()))
            }
            Err(why) => {
                result.failure = Some(why.to_string());
                Ok(Err(why))
            }
        }
    }

    /// The memory that may be moved to each node: what is free or holds pages of files, less the headroom and what is
    /// reserved.
    fn read_room(&self) -> Reading<BTreeMap<u32, Bytes>> {
        let mut topology = Topology::read(self.sessions.memory.host())?;
        topology.reserve(&self.limits.reserved);
        let room = |memory: crate::topology::NodeMemory| memory.room(self.limits.headroom_share);
        Ok(topology.nodes.into_iter().filter_map(|(id, node)| Some((id, room(node.memory.ok()?)))).collect())
    }

    /// Pauses while memory is short. Returns false if it stays short.
    fn wait_for_memory(&mut self) -> bool {
        let host = self.sessions.memory.host();
        let (mut pause, mut waited) = (FIRST_PRESSURE_PAUSE, Duration::ZERO);
        while memory_headroom::is_memory_short(host, None, DEFAULT_PRESSURE_PERCENT) {
            if waited >= MAX_PRESSURE_WAIT || self.is_stopped() {
                return self.is_stopped();
            }
            self.pause(pause);
            waited += pause;
            pause = MAX_PRESSURE_PAUSE.min(2 * pause);
        }
        true
    }

    fn pause(&mut self, mut pause: Duration) {
        while !pause.is_zero() && !self.is_stopped() {
            let part = pause.min(STOP_POLL_INTERVAL);
            self.sessions.memory.host().sleep(part);
            self.outcome.pause_time += part;
            pause -= part;
        }
    }
}

/// The changes of threads that earlier commands kept, oldest first, as the actions that undo them.
///
/// # Errors
/// If their journal cannot be read.
pub fn read_kept_cpus(host: &dyn Host, directory: &Path) -> Result<Vec<Action>, journal::Error> {
    let Ok(directory) = StateDirectory::open(directory) else { return Ok(Vec::new()) };
    let boot = session::read_boot_id(host).ok();
    let kept = Journal::load(&directory, ResourceClass::CpuPlacement.kept_changes_file())?;
    let kept = kept.filter(|journal| boot.as_ref() == Some(&journal.boot));
    Ok(kept.into_iter().flat_map(|journal| journal.entries).map(|entry| entry.undo).collect())
}

/// Set the CPUs that the owners of threads permit, where earlier commands have restricted the threads further. `kept`
/// undoes the changes of these commands, oldest first.
pub fn restore_permitted_cpus(map: &mut NumaMap, kept: &[Action]) {
    let online: IdSet = map.topology.nodes.values().flat_map(|node| node.cpus.iter()).collect();
    // The oldest change of a thread comes last: its undo has the CPUs that the owner permits.
    for action in kept.iter().rev() {
        let Action::SetAffinity { thread, cpus, .. } = action else { continue };
        let threads = map
            .processes
            .iter_mut()
            .filter(|placement| placement.process.id == thread.process)
            .flat_map(|placement| placement.threads.iter_mut().flatten());
        for found in threads.filter(|found| (found.tid, found.start_time) == (thread.tid, thread.start_time)) {
            // If the thread has other CPUs than Pagefold gave it, its owner has changed them since.
            let given: IdSet = cpus.from.iter().filter(|&cpu| online.contains(cpu)).collect();
            if found.permitted_cpus == given {
                found.permitted_cpus = cpus.to.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests;
