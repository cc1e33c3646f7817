//! Spreads the vCPUs of machines over CPUs by their affinity, and undoes that.
//!
//! Each vCPU stays within the CPUs that it may use: those of its cgroup, those that its owner set, and those of a
//! placement on NUMA nodes in force. What an earlier spread has set does not limit a new one.

use crate::decide::ready_time::{self, HostSample};
use crate::decide::spread::{self, CpuPosition, SpreadPlan, SpreadProblem, VcpuToSpread, are_disjoint};
use crate::machines::Machine;
use pagefold_base::{Absent, IdSet, Pid, ProcessId, Reading};
use pagefold_host::action::{Action, ActionError, Exchange, LibvirtPin, ThreadId};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::journal::{self, Journal, StateDirectory};
use pagefold_host::transaction::session::{self, ChangeLifetime, Error};
use pagefold_host::{Host, parse};
use pagefold_numa::topology::Topology;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// The purpose under which the changes are kept.
pub const PURPOSE: &str = "vcpu spread";

/// The unit of load: tenths of a CPU, so that small changes between two observations do not change a plan.
const LOAD_UNITS_PER_CPU: f64 = 10.0;

/// CPUs that earlier spreads took from threads: number and start time of the thread, the CPUs that a spread has set, and
/// those from before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EarlierSpread {
    /// Newest first, until a change for another purpose.
    changes: BTreeMap<(Pid, u64), Vec<(IdSet, IdSet)>>,
}

impl EarlierSpread {
    /// Reads what earlier commands of this boot kept.
    ///
    /// # Errors
    /// If the journal of kept changes cannot be read.
    pub fn read(host: &dyn Host, directory: &Path) -> Result<Self, journal::Error> {
        let Ok(directory) = StateDirectory::open(directory) else { return Ok(Self::default()) };
        let boot = session::read_boot_id(host).ok();
        let kept = Journal::load(&directory, ResourceClass::CpuPlacement.kept_changes_file())?;
        let kept = kept.filter(|journal| boot.as_ref() == Some(&journal.boot));
        let (mut changes, mut ended) = (BTreeMap::new(), BTreeSet::new());
        for entry in kept.into_iter().flat_map(|journal| journal.entries).rev() {
            let Action::SetAffinity { thread, cpus, .. } = entry.undo else { continue };
            let thread = (thread.tid, thread.start_time);
            if entry.purpose.as_deref() != Some(PURPOSE) {
                ended.insert(thread);
            } else if !ended.contains(&thread) {
                changes.entry(thread).or_insert_with(Vec::new).push((cpus.from, cpus.to));
            }
        }
        Ok(Self { changes })
    }

    /// The CPUs that a thread could use before it was spread, if it now has those that the spread set.
    fn permitted_cpus(&self, tid: Pid, start_time: u64, allowed: &IdSet) -> Option<IdSet> {
        let mut permitted: Option<&IdSet> = None;
        for (given, before) in self.changes.get(&(tid, start_time))? {
            if given != permitted.unwrap_or(allowed) {
                break;
            }
            permitted = Some(before);
        }
        permitted.cloned()
    }
}

/// A vCPU that gets other CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpreadStep {
    /// The position of its machine.
    pub machine: usize,
    /// Its number.
    pub vcpu: u32,
    /// Its thread.
    pub thread: ThreadId,
    /// The CPUs on which it may run.
    pub from: IdSet,
    /// The CPUs on which it will.
    pub to: IdSet,
    /// What libvirt calls it, if it pins it.
    pub pin: Option<LibvirtPin>,
}

/// What is to be done with the machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PreparedSpread {
    /// The changes.
    pub steps: Vec<SpreadStep>,
    /// For each machine, why it stays or keeps siblings on one run queue.
    pub conflicts: Vec<Option<String>>,
    /// For each machine, whether an earlier spread keeps its vCPUs apart already.
    pub is_spread: Vec<bool>,
}

/// The CPUs of a host with their cores and nodes.
///
/// # Errors
/// If the CPUs cannot be read.
pub fn read_cpus(host: &dyn Host) -> Reading<BTreeMap<u32, CpuPosition>> {
    let topology = Topology::read(host)?;
    let online: IdSet = parse::number_list(&host.read("sys/devices/system/cpu/online")?)?.into_iter().collect();
    let position = |cpu: u32| {
        // SMT threads of one core name the same threads (drivers/base/topology.c); without the file, each CPU is a core.
        let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
        let siblings = host.read(&path).and_then(|bytes| parse::number_list(&bytes)).unwrap_or_default();
        CpuPosition {
            core: siblings.into_iter().min().unwrap_or(cpu),
            node: topology.node_of_cpu(cpu).unwrap_or_default(),
        }
    };
    Ok(online.iter().map(|cpu| (cpu, position(cpu))).collect())
}

/// Plans the steps for the selected machines, by what all machines of the host did between the samples. `is_selected`
/// is in the order of the machines.
pub fn prepare(
    cpus: &BTreeMap<u32, CpuPosition>,
    machines: &[Machine],
    is_selected: &[bool],
    samples: &[HostSample],
    earlier: &EarlierSpread,
) -> PreparedSpread {
    let online: IdSet = cpus.keys().copied().collect();
    let mut problem = SpreadProblem { cpus: cpus.clone(), ..SpreadProblem::default() };
    let mut prepared = PreparedSpread {
        steps: Vec::new(),
        conflicts: vec![None; machines.len()],
        is_spread: vec![false; machines.len()],
    };
    let mut placed: Vec<(usize, u32, IdSet)> = Vec::new();
    for (position, machine) in machines.iter().enumerate() {
        let permitted = |tid: Pid, start_time: u64, allowed: &IdSet| {
            earlier.permitted_cpus(tid, start_time, allowed).unwrap_or_else(|| allowed.clone())
        };
        let is_restricted = |thread: &&pagefold_numa::threads::ThreadPlacement| {
            earlier.permitted_cpus(thread.tid, thread.start_time, &thread.allowed_cpus).is_some()
        };
        let sets: Vec<IdSet> = machine.vcpus.values().map(|thread| thread.allowed_cpus.intersection(&online)).collect();
        prepared.is_spread[position] =
            machine.vcpus.values().any(|thread| is_restricted(&thread)) && are_disjoint(&sets);
        let stays = !is_selected[position] || prepared.is_spread[position];
        for (&vcpu, thread) in &machine.vcpus {
            let load = load(samples, thread.tid);
            let allowed = thread.allowed_cpus.intersection(&online);
            let usable = permitted(thread.tid, thread.start_time, &thread.allowed_cpus).intersection(&online);
            if stays || usable.is_empty() {
                add_base_load(&mut problem.base_load, &allowed, load);
                continue;
            }
            problem.vcpus.push(VcpuToSpread {
                machine: position,
                permitted: usable,
                present_cpu: thread.last_cpu,
                load,
            });
            placed.push((position, vcpu, allowed));
        }
    }
    let SpreadPlan { homes, cpus: sets } = spread::plan(&problem);
    for (((position, vcpu, allowed), to), _) in placed.iter().zip(sets).zip(&homes) {
        let machine = &machines[*position];
        let thread = &machine.vcpus[vcpu];
        if *allowed != to {
            prepared.steps.push(SpreadStep {
                machine: *position,
                vcpu: *vcpu,
                thread: ThreadId { process: machine.process.id, tid: thread.tid, start_time: thread.start_time },
                from: thread.allowed_cpus.clone(),
                to,
                pin: machine.libvirt_pins.get(&thread.tid).cloned(),
            });
        }
    }
    for (position, conflict) in prepared.conflicts.iter_mut().enumerate() {
        let of_machine = || problem.vcpus.iter().zip(&homes).filter(|(vcpu, _)| vcpu.machine == position);
        let pairs = spread::stacked_pairs(of_machine().map(|(vcpu, &home)| (vcpu.machine, home)));
        let count = of_machine().count();
        if pairs > 0 && count <= online.iter().count() {
            let usable: IdSet = of_machine().flat_map(|(vcpu, _)| vcpu.permitted.iter()).collect();
            *conflict = Some(format!(
                "its {count} vCPUs may use CPUs {usable} only, by their affinity, cpuset or placement on NUMA nodes: \
                 {pairs} pair{} of them must share a CPU",
                if pairs == 1 { "" } else { "s" }
            ));
        }
    }
    prepared
}

/// How much a vCPU ran and waited to run, in tenths of a CPU, at least 1.
fn load(samples: &[HostSample], tid: Pid) -> u64 {
    let usage = ready_time::usage(samples, tid).unwrap_or_default();
    (((usage.run_share() + usage.ready_share()).min(1.0) * LOAD_UNITS_PER_CPU).round() as u64).max(1)
}

fn add_base_load(base_load: &mut BTreeMap<u32, u64>, allowed: &IdSet, load: u64) {
    let count = allowed.iter().count() as u64;
    for cpu in allowed.iter() {
        *base_load.entry(cpu).or_default() += load / count.max(1);
    }
}

/// What was done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpreadOutcome {
    /// vCPUs with new CPUs, as process and thread.
    pub changed: Vec<(ProcessId, Pid)>,
    /// vCPUs that keep their CPUs, with the reason.
    pub refused: Vec<(ProcessId, Pid, String)>,
    /// Whether it was interrupted. All changes are to be undone then.
    pub interrupted: bool,
}

/// Carries the steps out. Stops between two changes once `stop` is set.
///
/// # Errors
/// If a journal or the state of the host cannot be used. The caller undoes the changes then.
pub fn carry_out(session: &mut Session<'_>, steps: &[SpreadStep], stop: &AtomicBool) -> Result<SpreadOutcome, Error> {
    let mut outcome = SpreadOutcome::default();
    let mut silent_libvirt: Option<String> = None;
    for step in steps {
        if stop.load(Ordering::Relaxed) {
            outcome.interrupted = true;
            break;
        }
        let (process, tid) = (step.thread.process, step.thread.tid);
        if let (Some(why), Some(_)) = (&silent_libvirt, &step.pin) {
            outcome.refused.push((process, tid, why.clone()));
            continue;
        }
        let cpus = Exchange { from: step.from.clone(), to: step.to.clone() };
        let action = Action::SetAffinity { thread: step.thread, cpus, pin: step.pin.clone() };
        match session.apply(&action, ChangeLifetime::Temporary) {
            Ok(_) => outcome.changed.push((process, tid)),
            // A vCPU that was unplugged needs no CPU.
            Err(Error::Refused(ActionError::Vanished) | Error::HostStateUnreadable(Absent::Vanished)) => {}
            Err(Error::Refused(why)) => {
                if step.pin.is_some() && matches!(why, ActionError::Busy(_)) {
                    silent_libvirt = Some(why.to_string());
                }
                outcome.refused.push((process, tid, why.to_string()));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(outcome)
}
