//! Carries a placement out: first the CPUs of threads, then memory in batches.
//!
//! Every change is journaled with its undo before it is made, in the sessions of [`PlacementSessions`]. A change that the
//! kernel refuses is reported with its reason, and all others are made. Memory moves only to nodes with room, within a
//! bandwidth, and never while tasks of the host wait for memory.
//!
//! Pages of files stay, because other programs use them, too. Pages that several processes map, such as those merged by
//! KSM, also stay (`MPOL_MF_MOVE`, mm/migrate.c): moving them would move memory of the other processes.

use crate::decide::plan::{Pattern, PlacementProblem};
use crate::decide::schedule::{self, WaitingBatch};
use crate::decide::steps::{self, MachineSteps, MoveStep, PartToPlace, ThreadToPlace};
use crate::map::{self, NumaMap, ProcessPlacement};
use crate::placement_record::PlacedMachine;
use crate::threads::{ThreadPlacement, ThreadRole};
use crate::topology::Topology;
use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, AddressRange, Bytes, IdSet, Pages, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, ActionOutcome, Exchange, LibvirtPin, LibvirtPinTarget, ThreadId};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::journal::{self, Journal, StateDirectory};
use pagefold_host::transaction::session::{self, ChangeLifetime, Error, FailedUndo};
use pagefold_host::{Host, PageRun, ProcessHandle, elapsed_since, memory_headroom, observe};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The first pause when tasks of the host wait for memory. It doubles up to [`MAX_PRESSURE_PAUSE`].
const FIRST_PRESSURE_PAUSE: Duration = Duration::from_millis(500);
const MAX_PRESSURE_PAUSE: Duration = Duration::from_secs(8);

/// After this time of pauses, no more memory is moved.
const MAX_PRESSURE_WAIT: Duration = Duration::from_secs(60);

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

    /// Keeps the changes until [`Self::undo_kept`].
    ///
    /// # Errors
    /// If they cannot be stored; then they are undone when the sessions end.
    pub fn keep(&mut self) -> Result<Vec<FailedUndo>, Error> {
        let mut failed = self.cpus.keep_changes(PURPOSE)?;
        failed.extend(self.memory.keep_changes(PURPOSE)?);
        Ok(failed)
    }

    /// Undoes the kept changes: memory first, so that new pages of the threads come to where the memory is.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_kept(&mut self) -> Result<UndoneChanges, Error> {
        let (mut undone, mut failed) = self.memory.undo_kept_changes()?;
        let (undone_cpus, failed_cpus) = self.cpus.undo_kept_changes()?;
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
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ApplyLimits {
    /// Bytes that may be moved in a second, on average.
    pub bandwidth: Option<Bytes>,
    /// The share of each node's memory that stays free.
    pub headroom_share: f64,
}

/// How far a placement is.
#[derive(Debug, Default)]
pub struct ApplyProgress {
    /// Bytes that have been moved.
    pub moved_bytes: AtomicU64,
}

/// What was done with a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineOutcome {
    /// Threads with new CPUs.
    pub placed_threads: usize,
    /// Threads that stay, with the reason.
    pub kept_threads: Vec<(Pid, String)>,
    /// Pages that were moved.
    pub moved_pages: Pages,
    /// Pages that stay on another node, by reason.
    pub kept_pages: BTreeMap<String, Pages>,
    /// Why the machine was given up, if it was: it has ended, or the kernel refused.
    pub failure: Option<String>,
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
}

impl ApplyOutcome {
    /// Notes in the records of the machines how many pages could not be moved.
    pub fn note_kept_pages(&self, placed: &mut [PlacedMachine]) {
        for (placed, done) in placed.iter_mut().zip(&self.machines) {
            placed.kept_pages = done.kept_pages.values().map(|pages| pages.0).sum();
        }
    }

    /// Whether all that was planned was done, except for pages that cannot be moved.
    pub fn is_complete(&self) -> bool {
        let is_whole = |machine: &MachineOutcome| machine.failure.is_none() && machine.kept_threads.is_empty();
        !self.interrupted && !self.stopped_by_pressure && self.machines.iter().all(is_whole)
    }
}

/// The steps of a machine, and the machine that they are for.
#[derive(Clone, Debug)]
pub struct PreparedMachine {
    process: ProcessId,
    steps: MachineSteps,
    libvirt: Option<LibvirtDomain>,
}

impl PreparedMachine {
    /// Its steps.
    pub fn steps(&self) -> &MachineSteps {
        &self.steps
    }
}

/// Read the present regions and threads of the machines, and compute their steps. A machine that has ended has no steps.
///
/// # Errors
/// If a machine cannot be read for another reason than that it has ended.
pub fn prepare(host: &dyn Host, map: &NumaMap, targets: &[MachineTarget]) -> Reading<Vec<PreparedMachine>> {
    targets.iter().map(|target| prepare_machine(host, &map.topology, &map.processes[target.position], target)).collect()
}

fn prepare_machine(
    host: &dyn Host,
    topology: &Topology,
    placement: &ProcessPlacement,
    target: &MachineTarget,
) -> Reading<PreparedMachine> {
    let process = placement.process.id;
    let libvirt = placement.libvirt.clone();
    let ended = PreparedMachine { process, steps: MachineSteps::default(), libvirt: None };
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
    let is_device = |region: &&Region| region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO));
    for region in regions.iter().filter(|region| !is_device(region)) {
        let part = node_of_region.get(&region.range.start);
        let part = part.and_then(|id| nodes.iter().position(|node| node.id == *id)).unwrap_or(0);
        let part = if part < parts.len() { part } else { 0 };
        parts[part].regions.extend(movable_ranges(host, &*handle, region)?);
    }
    let threads: Vec<ThreadToPlace> = placement
        .threads
        .iter()
        .flatten()
        .map(|thread| thread_to_place(thread, part_of_thread(thread, placement, target.parts.len())))
        .collect();
    let cpus_of_node: BTreeMap<u32, IdSet> = topology.nodes.iter().map(|(&id, node)| (id, node.cpus.clone())).collect();
    Ok(PreparedMachine { process, steps: steps::machine_steps(&parts, &threads, &cpus_of_node), libvirt })
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

/// Carry the steps out. Sets the CPUs of all machines first, then moves memory. Stops between two batches once `stop` is
/// set.
///
/// # Errors
/// If a journal or the state of the host cannot be used. The caller undoes the changes then.
pub fn carry_out(
    sessions: &mut PlacementSessions<'_>,
    machines: &[PreparedMachine],
    limits: ApplyLimits,
    progress: &ApplyProgress,
    stop: &AtomicBool,
) -> Result<ApplyOutcome, Error> {
    let mut outcome = ApplyOutcome {
        machines: machines.iter().map(|_| MachineOutcome::default()).collect(),
        ..ApplyOutcome::default()
    };
    for (machine, result) in machines.iter().zip(&mut outcome.machines) {
        if !stop.load(Ordering::Relaxed) {
            place_threads(&mut sessions.cpus, machine, result)?;
        }
    }
    let mut mover = MemoryMover { session: &mut sessions.memory, limits, progress, stop, moved: Bytes::ZERO };
    mover.move_all(machines, &mut outcome)?;
    outcome.interrupted = stop.load(Ordering::Relaxed);
    Ok(outcome)
}

fn place_threads(
    session: &mut Session<'_>,
    machine: &PreparedMachine,
    result: &mut MachineOutcome,
) -> Result<(), Error> {
    const RESTRICTED: &str = "its owner restricts it to CPUs of other nodes";
    result.kept_threads.extend(machine.steps.restricted_threads.iter().map(|&tid| (tid, RESTRICTED.to_owned())));
    for step in &machine.steps.threads {
        let thread = ThreadId { process: machine.process, tid: step.tid, start_time: step.start_time };
        let cpus = Exchange { from: step.from.clone(), to: step.to.clone() };
        let pin = machine.libvirt.as_ref().and_then(|domain| libvirt_pin(domain, step.tid));
        match try_apply(session, &Action::SetAffinity { thread, cpus, pin })? {
            Ok(_) => result.placed_threads += 1,
            // A thread that has ended needs no CPUs; whether its process lives shows when its memory is moved.
            Err(ActionError::Vanished) => {}
            Err(why) => result.kept_threads.push((step.tid, why.to_string())),
        }
    }
    Ok(())
}

/// What libvirt calls a thread of a domain, if it pins it.
fn libvirt_pin(domain: &LibvirtDomain, tid: Pid) -> Option<LibvirtPin> {
    let vcpu = domain.vcpu_threads.iter().find(|(_, thread)| **thread == tid);
    let target = match vcpu {
        Some((&number, _)) => LibvirtPinTarget::Vcpu(number),
        None if tid == domain.pid => LibvirtPinTarget::Emulator,
        None => return None,
    };
    Some(LibvirtPin { domain: domain.uuid.clone(), target })
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

struct MemoryMover<'s, 'h> {
    session: &'s mut Session<'h>,
    limits: ApplyLimits,
    progress: &'s ApplyProgress,
    stop: &'s AtomicBool,
    moved: Bytes,
}

impl MemoryMover<'_, '_> {
    fn move_all(&mut self, machines: &[PreparedMachine], outcome: &mut ApplyOutcome) -> Result<(), Error> {
        let host = self.session.host();
        let started = host.now();
        let mut queues: Vec<VecDeque<&MoveStep>> =
            machines.iter().map(|machine| machine.steps.moves.iter().collect()).collect();
        while queues.iter().any(|queue| !queue.is_empty()) && !self.stop.load(Ordering::Relaxed) {
            if !self.wait_for_memory(outcome) {
                outcome.stopped_by_pressure = true;
                break;
            }
            let waiting: Vec<WaitingBatch> = queues
                .iter()
                .enumerate()
                .filter_map(|(machine, queue)| {
                    let step = queue.front()?;
                    Some(WaitingBatch { machine, bytes: step.bytes(), node: step.node })
                })
                .collect();
            let room = self.read_room().map_err(Error::HostStateUnreadable)?;
            let Some(batch) = schedule::next_batch(&waiting, &room) else {
                for batch in waiting {
                    let why = format!("node {} has no room for it", batch.node);
                    outcome.machines[batch.machine].failure.get_or_insert(why);
                }
                break;
            };
            let Some(step) = queues[batch.machine].pop_front() else { break };
            if !self.move_batch(machines[batch.machine].process, step, &mut outcome.machines[batch.machine])? {
                queues[batch.machine].clear();
            }
            if let Some(bandwidth) = self.limits.bandwidth {
                let pause = schedule::pause_for_bandwidth(self.moved, elapsed_since(host, started), bandwidth);
                self.pause(pause, outcome);
            }
        }
        outcome.moving_time = elapsed_since(host, started);
        Ok(())
    }

    /// Returns whether to go on with the machine.
    fn move_batch(&mut self, process: ProcessId, step: &MoveStep, result: &mut MachineOutcome) -> Result<bool, Error> {
        let page = self.session.host().page_size();
        let action = Action::MovePages { process, ranges: step.ranges.clone(), node: step.node };
        match try_apply(self.session, &action)? {
            Ok(moved) => {
                result.moved_pages += moved.moved_pages;
                for (range, why) in &moved.missed_ranges {
                    *result.kept_pages.entry(why.to_string()).or_default() += page.pages_in(range.bytes());
                }
                self.moved += page.bytes_of(moved.moved_pages);
                self.progress.moved_bytes.store(self.moved.0, Ordering::Relaxed);
                Ok(true)
            }
            Err(why) => {
                result.failure = Some(why.to_string());
                Ok(false)
            }
        }
    }

    /// The memory that may be moved to each node: what is free or holds pages of files, less the headroom.
    fn read_room(&self) -> Reading<BTreeMap<u32, Bytes>> {
        let topology = Topology::read(self.session.host())?;
        let room = |memory: crate::topology::NodeMemory| memory.room(self.limits.headroom_share);
        Ok(topology.nodes.into_iter().filter_map(|(id, node)| Some((id, room(node.memory.ok()?)))).collect())
    }

    /// Pauses while memory is short. Returns false if it stays short.
    fn wait_for_memory(&self, outcome: &mut ApplyOutcome) -> bool {
        let host = self.session.host();
        let (mut pause, mut waited) = (FIRST_PRESSURE_PAUSE, Duration::ZERO);
        while memory_headroom::is_memory_short(host, None, DEFAULT_PRESSURE_PERCENT) {
            if waited >= MAX_PRESSURE_WAIT || self.stop.load(Ordering::Relaxed) {
                return self.stop.load(Ordering::Relaxed);
            }
            self.pause(pause, outcome);
            waited += pause;
            pause = MAX_PRESSURE_PAUSE.min(2 * pause);
        }
        true
    }

    fn pause(&self, pause: Duration, outcome: &mut ApplyOutcome) {
        if !pause.is_zero() {
            self.session.host().sleep(pause);
            outcome.pause_time += pause;
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
    // The oldest change of a thread comes last: its undo has the CPUs that the owner permits.
    for action in kept.iter().rev() {
        let Action::SetAffinity { thread, cpus, .. } = action else { continue };
        let threads = map
            .processes
            .iter_mut()
            .filter(|placement| placement.process.id == thread.process)
            .flat_map(|placement| placement.threads.iter_mut().flatten());
        for found in threads.filter(|found| (found.tid, found.start_time) == (thread.tid, thread.start_time)) {
            // If the thread may run elsewhere than Pagefold let it, its owner has changed that since.
            if found.permitted_cpus.is_subset(&cpus.from) {
                found.permitted_cpus = cpus.to.clone();
            }
        }
    }
}

#[cfg(test)]
mod tests;
