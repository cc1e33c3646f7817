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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::find_machines;
    use crate::sample::observe;
    use pagefold_census::ProcessSelection;
    use pagefold_host::fake_host::FakeHost;
    use std::time::Duration;

    /// A host of four CPUs on two nodes, with machines of named threads from number `10 * pid` on.
    fn host(machines: &[(u32, &str, usize)]) -> FakeHost {
        let host = FakeHost::booted();
        host.enable_virtual_time();
        host.put_file("sys/devices/system/cpu/online", "0-3\n");
        host.put_node(0, "0-1", 1000);
        host.put_node(1, "2-3", 1000);
        for &(pid, cpus, vcpus) in machines {
            host.map_pages(pid, (0x1000, 0x2000), "heap", false);
            host.put_file(&format!("proc/{pid}/cmdline"), &format!("qemu-system-x86_64\0-name\0vm{pid}\0"));
            for vcpu in 0..vcpus {
                let tid = 10 * pid + vcpu as u32;
                let directory = format!("proc/{pid}/task/{tid}");
                let zeros = "0 ".repeat(16);
                let stat = format!("{tid} (CPU {vcpu}/KVM) R 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 {zeros}0 0\n");
                host.put_file(&format!("{directory}/stat"), &stat);
                host.put_file(&format!("{directory}/schedstat"), "0 0 0\n");
                host.put_file(&format!("{directory}/cpus"), cpus);
            }
        }
        host
    }

    fn prepare_all(host: &FakeHost, directory: &Path) -> PreparedSpread {
        let (machines, _) = find_machines(host, &ProcessSelection::default()).unwrap();
        let samples = observe(host, &machines, Duration::from_millis(200), &AtomicBool::new(false));
        let earlier = EarlierSpread::read(host, directory).unwrap();
        prepare(&read_cpus(host).unwrap(), &machines, &vec![true; machines.len()], &samples, &earlier)
    }

    fn spread(host: &FakeHost, directory: &Path) -> (PreparedSpread, SpreadOutcome) {
        let (mut session, undone, failed) = Session::begin(host, directory, ResourceClass::CpuPlacement).unwrap();
        assert_eq!((undone, failed), (Vec::new(), Vec::new()));
        let prepared = prepare_all(host, directory);
        let outcome = carry_out(&mut session, &prepared.steps, &AtomicBool::new(false)).unwrap();
        assert_eq!(session.keep_changes(PURPOSE).unwrap(), []);
        (prepared, outcome)
    }

    fn undo(host: &FakeHost, directory: &Path) {
        let (mut session, ..) = Session::begin(host, directory, ResourceClass::CpuPlacement).unwrap();
        assert_eq!(session.undo_kept_changes_for(PURPOSE).unwrap().1, []);
    }

    fn cpus(host: &FakeHost, tids: &[u32]) -> Vec<IdSet> {
        let read = |tid: &u32| host.read(&format!("proc/{}/task/{tid}/cpus", tid / 10)).unwrap();
        tids.iter().map(|tid| String::from_utf8(read(tid)).unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn spread_stays_within_a_placement_and_is_undone_to_it() {
        // A placement on NUMA nodes has restricted machine 7 to node 1.
        let (host, directory) = (host(&[(7, "2-3", 2), (8, "0-3", 2)]), tempfile::tempdir().unwrap());
        let before = cpus(&host, &[70, 71, 80, 81]);
        let (prepared, outcome) = spread(&host, directory.path());
        assert_eq!((outcome.changed.len(), &outcome.refused), (4, &Vec::new()));
        assert_eq!(prepared.conflicts, [None, None]);
        let after = cpus(&host, &[70, 71, 80, 81]);
        let node: IdSet = [2, 3].into_iter().collect();
        assert!(after[..2].iter().all(|cpus| cpus.is_subset(&node)), "{after:?}");
        assert!(are_disjoint(&after[..2]) && are_disjoint(&after[2..]), "{after:?}");
        // A second one leaves them, and the undo restores them.
        let (again, outcome) = spread(&host, directory.path());
        assert_eq!((again.is_spread, outcome), (vec![true, true], SpreadOutcome::default()));
        undo(&host, directory.path());
        assert_eq!(cpus(&host, &[70, 71, 80, 81]), before);
    }

    #[test]
    fn earlier_spread_does_not_limit_a_new_one() {
        let (host, directory) = (host(&[(7, "0-3", 2)]), tempfile::tempdir().unwrap());
        spread(&host, directory.path());
        // A third vCPU is plugged in, which may run anywhere.
        let stat = String::from_utf8(host.read("proc/7/task/70/stat").unwrap()).unwrap();
        host.put_file("proc/7/task/72/stat", &stat.replace("70 (CPU 0", "72 (CPU 2"));
        host.put_file("proc/7/task/72/schedstat", "0 0 0\n");
        host.put_file("proc/7/task/72/cpus", "0-3");
        spread(&host, directory.path());
        assert!(are_disjoint(&cpus(&host, &[70, 71, 72])), "{:?}", cpus(&host, &[70, 71, 72]));
        undo(&host, directory.path());
        assert!(cpus(&host, &[70, 71, 72]).iter().all(|cpus| cpus.to_string() == "0-3"));
    }

    #[test]
    fn too_few_permitted_cpus_are_a_conflict() {
        let (host, directory) = (host(&[(7, "3", 2)]), tempfile::tempdir().unwrap());
        let prepared = prepare_all(&host, directory.path());
        assert_eq!(prepared.steps, []);
        let conflict = prepared.conflicts[0].as_deref().unwrap();
        assert!(conflict.contains("may use CPUs 3 only") && conflict.contains("1 pair of them"), "{conflict}");
    }

    #[test]
    fn stopped_spread_reports_the_interruption() {
        let (host, directory) = (host(&[(7, "0-3", 2)]), tempfile::tempdir().unwrap());
        let before = cpus(&host, &[70, 71]);
        let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::CpuPlacement).unwrap();
        let steps = prepare_all(&host, directory.path()).steps;
        assert!(carry_out(&mut session, &steps, &AtomicBool::new(true)).unwrap().interrupted);
        assert_eq!(cpus(&host, &[70, 71]), before);
    }
}
