//! The record of what `numa apply` did, which `numa verify` compares with the host.
//!
//! It is a file in the state directory, next to the journals, and as them it is void after a reboot: the processes are
//! gone then.

use crate::apply::{MachineTarget, PartNodes, PreparedMachine};
use crate::decide::{self, AccessCost, NodeShares};
use crate::map::{NumaMap, ProcessPlacement};
use crate::page_nodes::{PageKinds, PageNodes};
use crate::topology::{LOCAL_DISTANCE, Topology};
use pagefold_base::{Absent, IdSet, Pages, Pid, ProcessId};
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session::{self, FailedUndo};
use pagefold_host::{Host, hold, observe};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// The file of the record.
const RECORD_FILE: &str = "numa-placement.json";

/// Counters of NUMA balancing and migration in `/proc/vmstat` (mm/vmstat.c). `numa_hint_faults_local` counts the faults
/// on pages that were on the node of the CPU.
pub const COUNTERS: [&str; 5] =
    ["numa_hint_faults", "numa_hint_faults_local", "numa_pages_migrated", "pgmigrate_success", "pgmigrate_fail"];

/// What was placed in this boot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PlacementRecord {
    /// `/proc/sys/kernel/random/boot_id`.
    pub boot: String,
    /// The machines.
    pub machines: Vec<PlacedMachine>,
    /// [`COUNTERS`] before the last placement.
    pub counters: BTreeMap<String, u64>,
}

/// A machine that was placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlacedMachine {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// Its name.
    pub name: String,
    /// The nodes of each part, with their shares of its memory.
    pub parts: Vec<PartNodes>,
    /// The CPUs of its threads: number, start time and CPU list.
    pub threads: Vec<(u32, u64, String)>,
    /// Pages that could not be moved.
    pub kept_pages: u64,
    /// The part of them that is mapped once. Pages that are mapped several times, such as those merged by KSM, stay by
    /// intention.
    #[serde(default)]
    pub staying_pages: u64,
    /// Its base pages in transparent huge pages before.
    #[serde(default)]
    pub huge_pages: u64,
    /// The expected share of remote accesses before.
    pub remote_share_before: Option<f64>,
    /// The share that was predicted.
    pub predicted_remote_share: Option<f64>,
}

impl PlacedMachine {
    /// The record of a machine about to be placed.
    pub fn new(map: &NumaMap, target: &MachineTarget, prepared: &PreparedMachine) -> Self {
        let placement = &map.processes[target.position];
        let id = placement.process.id;
        let steps = prepared.steps().threads.iter();
        Self {
            pid: id.pid.0,
            start_time: id.start_time,
            name: machine_name(placement),
            parts: target.parts.clone(),
            threads: steps.map(|step| (step.tid.0, step.start_time, step.to.to_string())).collect(),
            kept_pages: 0,
            staying_pages: 0,
            huge_pages: placement.pages.huge().0,
            remote_share_before: placement.cost.map(|cost| cost.remote_share),
            predicted_remote_share: predicted_cost(&map.topology, placement, &target.parts)
                .map(|cost| cost.remote_share),
        }
    }

    /// Its process.
    pub fn process(&self) -> ProcessId {
        ProcessId { pid: Pid(self.pid), start_time: self.start_time }
    }
}

/// The name of a virtual machine, or else of the program.
pub fn machine_name(placement: &ProcessPlacement) -> String {
    let vm = placement.process.identity.vm.as_ref().and_then(|vm| vm.name.clone());
    vm.unwrap_or_else(|| placement.process.comm.clone())
}

impl PlacementRecord {
    /// Loads the record; an empty one if there is none of this boot.
    ///
    /// # Errors
    /// If the file exists and cannot be read.
    pub fn load(directory: &StateDirectory, boot: &str) -> io::Result<Self> {
        let none = || Self { boot: boot.to_owned(), ..Self::default() };
        match directory.read(RECORD_FILE) {
            Ok(bytes) => {
                let record: Self = serde_json::from_slice(&bytes)?;
                Ok(if record.boot == boot { record } else { none() })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(none()),
            Err(error) => Err(error),
        }
    }

    /// Stores the record in place of an earlier one.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn store(&self, directory: &StateDirectory) -> io::Result<()> {
        directory.replace(RECORD_FILE, &serde_json::to_vec(self)?)
    }

    /// Drops the machines that have ended.
    pub fn forget_ended(&mut self, host: &dyn Host) {
        let has_ended = |machine: &PlacedMachine| matches!(hold(host, machine.process()), Err(Absent::Vanished));
        self.machines.retain(|machine| !has_ended(machine));
    }

    /// Drops the machines whose placement was undone, of all machines, or only of the given processes, after an undo
    /// in which some changes failed. A change that another program has overwritten is none of the placement any more.
    pub fn forget_undone(&mut self, only: Option<&BTreeSet<ProcessId>>, failed: &[FailedUndo]) {
        let remaining = failed.iter().filter(|failed| !failed.is_overwritten);
        let remaining: BTreeSet<ProcessId> = remaining.filter_map(|failed| failed.undo.process()).collect();
        let was_undone = |process| only.is_none_or(|only| only.contains(&process)) && !remaining.contains(&process);
        self.machines.retain(|machine| !was_undone(machine.process()));
    }

    /// Adds machines, in place of their earlier records.
    pub fn add(&mut self, machines: Vec<PlacedMachine>) {
        for mut machine in machines {
            let earlier = self.machines.iter().position(|placed| placed.process() == machine.process());
            if let Some(position) = earlier {
                let earlier = self.machines.remove(position);
                let known: BTreeSet<u32> = machine.threads.iter().map(|thread| thread.0).collect();
                // Threads that had the right CPUs already.
                machine.threads.extend(earlier.threads.into_iter().filter(|thread| !known.contains(&thread.0)));
            }
            self.machines.push(machine);
        }
    }
}

/// Mark the processes of a map that were placed in this boot, by the record in a state directory.
///
/// # Errors
/// If the record exists and cannot be read.
pub fn mark_placed(host: &dyn Host, directory: &Path, map: &mut NumaMap) -> io::Result<()> {
    let (Ok(directory), Ok(boot)) = (StateDirectory::open(directory), session::read_boot_id(host)) else {
        return Ok(());
    };
    let record = PlacementRecord::load(&directory, &boot)?;
    let placed: BTreeSet<ProcessId> = record.machines.iter().map(PlacedMachine::process).collect();
    for placement in &mut map.processes {
        placement.is_placed = placed.contains(&placement.process.id);
    }
    Ok(())
}

/// The present values of [`COUNTERS`] that the kernel has.
pub fn read_counters(host: &dyn Host) -> BTreeMap<String, u64> {
    let vmstat = observe::vmstat(host).unwrap_or_default();
    COUNTERS.iter().filter_map(|&name| Some((name.to_owned(), *vmstat.get(name)?))).collect()
}

/// The accesses of a machine that is placed so: its movable memory and its virtual CPUs on the nodes of their parts, and
/// pages that stay where they are.
pub fn predicted_cost(topology: &Topology, placement: &ProcessPlacement, parts: &[PartNodes]) -> Option<AccessCost> {
    let cost = |pages: &PageNodes, nodes: &PartNodes| {
        let cpu_count = |node: u32| topology.nodes.get(&node).map_or(0, |node| node.cpus.iter().count() as u64);
        let cpus = decide::shares(nodes.iter().map(|&(node, _)| (node, cpu_count(node))));
        let movable: Pages = pages.by_node.values().map(|kinds| kinds.movable()).sum();
        let mut memory: BTreeMap<u32, u64> =
            nodes.iter().map(|&(node, share)| (node, (movable.0 as f64 * share).round() as u64)).collect();
        for (&node, kinds) in &pages.by_node {
            *memory.entry(node).or_default() += (kinds.merged + kinds.file).0;
        }
        access_cost(topology, &cpus, &decide::shares(memory))
    };
    match parts {
        [nodes] => cost(&placement.pages, nodes),
        parts => decide::mean_cost(placement.virtual_nodes.iter().zip(parts).filter_map(|(node, nodes)| {
            let pages = node.pages.as_ref()?;
            Some((pages.resident(), cost(pages, nodes)?))
        })),
    }
}

fn access_cost(topology: &Topology, cpus: &NodeShares, memory: &NodeShares) -> Option<AccessCost> {
    decide::access_cost(cpus, memory, |from, to| topology.distance(from, to), LOCAL_DISTANCE)
}

/// A machine that was placed, as it is now.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifiedMachine {
    /// What was recorded.
    pub placed: PlacedMachine,
    /// Its present state; `None` if it has ended or cannot be read.
    pub now: Option<PresentPlacement>,
}

/// The present placement of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct PresentPlacement {
    /// The expected share of remote accesses.
    pub remote_share: Option<f64>,
    /// Movable pages.
    pub movable_pages: Pages,
    /// The part of them on other nodes than planned.
    pub misplaced_pages: Pages,
    /// Pages that could not be moved in the first place.
    pub kept_pages: Pages,
    /// The part of them that is mapped once.
    pub staying_pages: Pages,
    /// Base pages that are no longer in transparent huge pages.
    pub split_pages: Pages,
    /// Threads whose CPUs are not those that were set.
    pub changed_threads: Vec<Pid>,
}

/// How a machine that was placed is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlacementState {
    /// As planned.
    AsPlanned,
    /// Much of its memory could not be moved, and is still elsewhere.
    Incomplete,
    /// Memory has moved since, or another program has changed the CPUs of threads.
    Changed,
}

/// If more pages than one in so many are misplaced, the machine is not as planned.
const MISPLACED_PAGES_RATIO: u64 = 50;

impl PresentPlacement {
    fn new(placed: &PlacedMachine, placement: &ProcessPlacement) -> Self {
        let movable = |kinds: &PageKinds| kinds.movable().0;
        let all: u64 = placement.pages.by_node.values().map(movable).sum();
        let planned = |part: &PartNodes, pages: &PageNodes| -> u64 {
            let on_plan = pages.by_node.iter().filter(|(node, _)| part.iter().any(|(planned, _)| planned == *node));
            pages.by_node.values().map(movable).sum::<u64>() - on_plan.map(|(_, kinds)| movable(kinds)).sum::<u64>()
        };
        let misplaced = match &placed.parts[..] {
            [part] => planned(part, &placement.pages),
            parts => {
                let nodes = placement.virtual_nodes.iter().zip(parts);
                nodes.filter_map(|(node, part)| Some(planned(part, node.pages.as_ref()?))).sum()
            }
        };
        let has_changed = |(tid, start_time, cpus): &&(u32, u64, String)| {
            let thread = placement
                .threads
                .iter()
                .flatten()
                .find(|thread| (thread.tid.0, thread.start_time) == (*tid, *start_time));
            let cpus: Option<IdSet> = cpus.parse().ok();
            thread.is_some_and(|thread| cpus.as_ref() != Some(&thread.allowed_cpus))
        };
        Self {
            remote_share: placement.cost.map(|cost| cost.remote_share),
            movable_pages: Pages(all),
            misplaced_pages: Pages(misplaced),
            kept_pages: Pages(placed.kept_pages),
            staying_pages: Pages(placed.staying_pages),
            split_pages: Pages(placed.huge_pages).saturating_sub(placement.pages.huge()),
            changed_threads: placed.threads.iter().filter(has_changed).map(|thread| Pid(thread.0)).collect(),
        }
    }

    /// Whether it is as planned.
    pub fn state(&self) -> PlacementState {
        let is_much = |pages: Pages| pages.0.saturating_mul(MISPLACED_PAGES_RATIO) > self.movable_pages.0;
        let moved_since = self.misplaced_pages.saturating_sub(self.kept_pages);
        if !self.changed_threads.is_empty() || is_much(moved_since) {
            PlacementState::Changed
        } else if is_much(self.misplaced_pages.min(self.staying_pages)) {
            PlacementState::Incomplete
        } else {
            PlacementState::AsPlanned
        }
    }
}

/// Compare recorded machines with the present map.
pub fn verify_machines(map: &NumaMap, machines: Vec<PlacedMachine>) -> Vec<VerifiedMachine> {
    let present = |placed: &PlacedMachine| {
        let placement = map.processes.iter().find(|placement| placement.process.id == placed.process())?;
        Some(PresentPlacement::new(placed, placement))
    };
    machines.into_iter().map(|placed| VerifiedMachine { now: present(&placed), placed }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::working_set::HotnessSource;
    use crate::text::apply::render_apply;
    use crate::wire::apply::NumaApplyReport;
    use crate::{apply, map};
    use pagefold_base::{AddressRange, PageSize};
    use pagefold_census::ProcessSelection;
    use pagefold_host::action::Action;
    use pagefold_host::fake_host::FakeHost;
    use pagefold_output::text::TextStyle;
    use std::sync::atomic::AtomicBool;

    fn machine(pid: u32, threads: &[(u32, u64, &str)]) -> PlacedMachine {
        PlacedMachine {
            pid,
            start_time: 1,
            name: "web".to_owned(),
            parts: vec![vec![(1, 1.0)]],
            threads: threads.iter().map(|&(tid, start, cpus)| (tid, start, cpus.to_owned())).collect(),
            kept_pages: 0,
            staying_pages: 0,
            huge_pages: 0,
            remote_share_before: Some(1.0),
            predicted_remote_share: Some(0.0),
        }
    }

    #[test]
    fn memory_that_stays_is_told_from_memory_that_has_moved_since() {
        let state = |misplaced, kept, staying, changed_threads: &[u32]| {
            let now = PresentPlacement {
                remote_share: None,
                movable_pages: Pages(1000),
                misplaced_pages: Pages(misplaced),
                kept_pages: Pages(kept),
                staying_pages: Pages(staying),
                split_pages: Pages::ZERO,
                changed_threads: changed_threads.iter().copied().map(Pid).collect(),
            };
            now.state()
        };
        assert_eq!([state(0, 0, 0, &[]), state(20, 0, 0, &[])], [PlacementState::AsPlanned; 2]);
        assert_eq!(
            [state(21, 0, 0, &[]), state(521, 500, 500, &[]), state(0, 0, 0, &[8])],
            [PlacementState::Changed; 3]
        );
        assert_eq!([state(1000, 1000, 1000, &[]), state(21, 21, 21, &[])], [PlacementState::Incomplete; 2]);
        assert_eq!(state(500, 500, 20, &[]), PlacementState::AsPlanned, "the rest is mapped several times");
        assert_eq!(state(20, 500, 500, &[]), PlacementState::AsPlanned, "it has moved there since");
    }

    #[test]
    fn pages_that_are_no_longer_in_huge_pages_are_counted() {
        let host = FakeHost::booted();
        let range = AddressRange { start: 1 << 20, end: (1 << 20) + 8 * 4096 };
        for node in 0..2 {
            host.put_node(node, &format!("{node}"), 900_000);
        }
        host.map_pages(7, (range.start, range.end), "heap", false);
        host.put_file("proc/7/numa_maps", &format!("{:x} default\n", range.start));
        let selection = ProcessSelection { pids: vec![Pid(7)], ..ProcessSelection::default() };
        let mut map = map::read_map(&host, &selection).unwrap();
        let kinds = |small, huge| PageKinds { small: Pages(small), huge: Pages(huge), ..PageKinds::default() };
        map.processes[0].pages.by_node = [(0, kinds(100, 1024))].into();
        let targets = [MachineTarget { position: 0, parts: vec![vec![(1, 1.0)]] }];
        let prepared = apply::prepare(&host, &map, &targets, &AtomicBool::new(false)).unwrap();
        let placed = PlacedMachine::new(&map, &targets[0], &prepared[0]);

        let machines = [(placed.clone(), prepared[0].clone(), 0)];
        let planned = NumaApplyReport::planned(
            "this host".to_owned(),
            PageSize::new(4096).unwrap(),
            &map,
            &machines,
            Vec::new(),
            &HotnessSource::RunTime,
        );
        for (now, split_pages) in [([(1, kinds(612, 512))], 512), ([(1, kinds(100, 1536))], 0)] {
            map.processes[0].pages.by_node = now.into();
            let verified = verify_machines(&map, vec![placed.clone()]);
            let report = planned.clone().with_measured(&verified);
            assert_eq!(report.machines[0].split_pages, Some(split_pages));
            let text = render_apply(&report, ("", ""), TextStyle { width: 200, color: false });
            assert_eq!(text.contains("2.00 MiB is no longer in huge pages"), split_pages > 0, "{text}");
        }
        let ended = [VerifiedMachine { placed, now: None }];
        assert_eq!(planned.with_measured(&ended).machines[0].split_pages, None);
    }

    #[test]
    fn machines_with_failed_undos_stay_in_the_record() {
        let failed = |pid, is_overwritten| FailedUndo {
            undo: Action::MovePages {
                process: ProcessId { pid: Pid(pid), start_time: 1 },
                ranges: Vec::new(),
                node: 0,
            },
            why: "node 0 has no room for it".to_owned(),
            will_retry: true,
            is_overwritten,
        };
        let mut record = PlacementRecord {
            boot: "boot".to_owned(),
            machines: vec![machine(7, &[]), machine(17, &[]), machine(27, &[])],
            counters: BTreeMap::new(),
        };
        record.forget_undone(None, &[failed(17, false), failed(27, true)]);
        assert_eq!(record.machines, [machine(17, &[])], "what another program has changed is not Pagefold's");
        record.machines.push(machine(7, &[]));
        let only = [7, 27].map(|pid| ProcessId { pid: Pid(pid), start_time: 1 }).into();
        record.forget_undone(Some(&only), &[]);
        assert_eq!(record.machines, [machine(17, &[])], "the placements of other machines stay");
        record.forget_undone(None, &[]);
        assert!(record.machines.is_empty());
    }

    #[test]
    fn record_of_a_machine_replaces_the_earlier_one() {
        let folder = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(folder.path()).unwrap();
        let mut record = PlacementRecord::load(&directory, "boot").unwrap();
        assert_eq!(record, PlacementRecord { boot: "boot".to_owned(), ..PlacementRecord::default() });
        record.add(vec![machine(7, &[(8, 1, "0-1"), (9, 1, "0-1")]), machine(17, &[])]);
        record.add(vec![machine(7, &[(8, 1, "2-3")])]);
        assert_eq!(record.machines, [machine(17, &[]), machine(7, &[(8, 1, "2-3"), (9, 1, "0-1")])]);
        record.store(&directory).unwrap();
        assert_eq!(PlacementRecord::load(&directory, "boot").unwrap(), record);
        assert!(PlacementRecord::load(&directory, "later boot").unwrap().machines.is_empty());
    }
}
