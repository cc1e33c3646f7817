//! Places the virtual machines of a running host, in a thread of the daemon. When and what is decided in
//! [`crate::decide::keeper`].
//!
//! It takes the locks of placement only while it places, so `numa apply` and `numa undo` work beside it, and its changes
//! are kept and recorded as theirs. It places after it has read which CPUs the owners of threads permit. If something
//! cannot be read or is refused, the check ends with that reason, and the next one comes after the interval.

use crate::apply::{self, ApplyLimits, ApplyOutcome, ApplyProgress, MachineTarget, PlacementSessions};
use crate::decide::keeper::{self, KeeperState, KeeperStep, RunningMachine};
use crate::decide::plan::{self, Pattern, PlacementPlan};
use crate::map::{self, NumaMap};
use crate::placement_record::{self, PlacedMachine, PlacementRecord};
use crate::problem::{PlanLimits, placement_problem};
use crate::topology::Topology;
use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::{Bytes, Pages, ProcessId, Reading};
use pagefold_census::ProcessSelection;
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session;
use pagefold_host::{Host, elapsed_since, memory_headroom, observe, parse};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How often the stop flag is looked at between two checks.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Time limit of the planner.
const PLAN_DEADLINE: Duration = Duration::from_secs(5);

/// What the keeper may do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KeeperSettings {
    /// Whether it places machines; otherwise it only says what it would do.
    pub acts: bool,
    /// The time between two checks.
    pub interval: Duration,
    /// The time after which all machines are planned again.
    pub replan_interval: Duration,
    /// What a plan may use.
    pub limits: PlanLimits,
    /// Bytes that may be moved in a second, on average.
    pub bandwidth: Option<Bytes>,
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeeperReport {
    /// What was done, or why nothing.
    pub outcome: String,
    /// Machines that were placed since the start.
    pub placed_machines: u64,
    /// Bytes that were moved since the start.
    pub moved_bytes: u64,
}

/// Places machines of a host.
pub struct PlacementKeeper<'h> {
    host: &'h dyn Host,
    directory: PathBuf,
    settings: KeeperSettings,
    state: KeeperState,
    started: Instant,
    report: KeeperReport,
}

/// A plan with the map that it is for, and the machines to move.
struct PlannedMoves {
    map: NumaMap,
    targets: Vec<MachineTarget>,
}

impl<'h> PlacementKeeper<'h> {
    /// A keeper with the directory of its journals.
    pub fn new(host: &'h dyn Host, directory: PathBuf, settings: KeeperSettings) -> Self {
        let started = host.now();
        Self { host, directory, settings, state: KeeperState::default(), started, report: KeeperReport::default() }
    }

    /// Checks until `stop` is set, and passes each report to `observe`. Returns at once on a host with one node.
    pub fn run(&mut self, stop: &AtomicBool, observe: &mut dyn FnMut(&KeeperReport)) {
        while !stop.load(Ordering::Relaxed) {
            let has_choice = self.check(stop);
            observe(&self.report);
            if !has_choice {
                return;
            }
            let checked = self.host.now();
            while !stop.load(Ordering::Relaxed) && elapsed_since(self.host, checked) < self.settings.interval {
                self.host.sleep(STOP_POLL_INTERVAL.min(self.settings.interval));
            }
        }
    }

    /// Checks once. Returns whether the host has several nodes.
    pub fn check(&mut self, stop: &AtomicBool) -> bool {
        let is_node_of_cpus = |node: &&crate::topology::NumaNode| node.cpus.iter().next().is_some();
        match Topology::read(self.host) {
            Ok(topology) if topology.nodes.values().filter(is_node_of_cpus).count() < 2 => {
                self.report.outcome = "the host has one node".to_owned();
                return false;
            }
            Ok(_) => {}
            Err(why) => {
                self.report.outcome = format!("the nodes cannot be read: {why}");
                return true;
            }
        }
        self.report.outcome = match self.check_machines(stop) {
            Ok(outcome) => outcome,
            Err(error) => {
                self.state.retry_plan();
                format!("nothing was placed: {error}")
            }
        };
        true
    }

    fn check_machines(&mut self, stop: &AtomicBool) -> Result<String, Box<dyn std::error::Error>> {
        let machines = running_machines(self.host).map_err(|why| format!("the processes cannot be listed: {why}"))?;
        let is_memory_short = memory_headroom::is_memory_short(self.host, None, DEFAULT_PRESSURE_PERCENT);
        let now = elapsed_since(self.host, self.started);
        let resting = match self.state.step(&machines, is_memory_short, self.settings.replan_interval, now) {
            KeeperStep::Wait(why) => return Ok(why.describe().to_owned()),
            KeeperStep::Plan { resting } => resting,
        };
        let pids = machines.iter().map(|machine| machine.process.pid).collect();
        let planned = self.plan(ProcessSelection { pids, ..ProcessSelection::default() }, &resting)?;
        if planned.targets.is_empty() {
            return Ok(format!("all {} virtual machines are well placed", machines.len()));
        }
        if !self.settings.acts {
            return Ok(format!("would place {} of {} virtual machines", planned.targets.len(), machines.len()));
        }
        self.place(&planned, stop)
    }

    fn plan(
        &self,
        selection: ProcessSelection,
        resting: &BTreeSet<ProcessId>,
    ) -> Result<PlannedMoves, Box<dyn std::error::Error>> {
        let mut map = map::read_map(self.host, &selection)?;
        let kept = apply::read_kept_cpus(self.host, &self.directory)?;
        apply::restore_permitted_cpus(&mut map, &kept);
        let mut problem = placement_problem(&map, self.host.page_size(), self.settings.limits);
        for (vm, placement) in problem.vms.iter_mut().zip(&map.processes) {
            vm.fixed |= resting.contains(&placement.process.id);
        }
        let plan: PlacementPlan = plan::plan(&problem, PLAN_DEADLINE);
        let target = |(position, planned): (usize, &plan::PlannedMove)| {
            let target = MachineTarget::new(position, problem.vms[position].parts.len(), &planned.pattern, &problem)?;
            is_worth_moving(&map, &target, planned).then_some(target)
        };
        let targets = plan.moves.iter().enumerate().filter_map(target).collect();
        Ok(PlannedMoves { map, targets })
    }

    fn place(&mut self, planned: &PlannedMoves, stop: &AtomicBool) -> Result<String, Box<dyn std::error::Error>> {
        let (mut sessions, _) = PlacementSessions::begin(self.host, &self.directory)?;
        let prepared = apply::prepare(self.host, &planned.map, &planned.targets)?;
        let placed: Vec<PlacedMachine> = planned
            .targets
            .iter()
            .zip(&prepared)
            .map(|(target, prepared)| PlacedMachine::new(&planned.map, target, prepared))
            .collect();
        let counters = placement_record::read_counters(self.host);
        let limits =
            ApplyLimits { bandwidth: self.settings.bandwidth, headroom_share: self.settings.limits.headroom_share };
        let outcome = apply::carry_out(&mut sessions, &prepared, limits, &ApplyProgress::default(), stop)?;
        if outcome.interrupted {
            sessions.undo_all()?;
            return Ok("interrupted, and undone".to_owned());
        }
        sessions.keep()?;
        let processes: Vec<ProcessId> = placed.iter().map(PlacedMachine::process).collect();
        self.state.note_moves(&processes, elapsed_since(self.host, self.started));
        self.record(placed, &outcome, counters)?;
        let moved: Pages = outcome.machines.iter().map(|machine| machine.moved_pages).sum();
        let moved = self.host.page_size().bytes_of(moved);
        self.report.placed_machines += processes.len() as u64;
        self.report.moved_bytes += moved.0;
        if outcome.stopped_by_pressure {
            return Ok(format!("stopped, because tasks of the host wait for memory: {moved} moved"));
        }
        let failures = outcome.machines.iter().filter(|machine| machine.failure.is_some()).count();
        let partly = if failures > 0 { format!(", {failures} of them in part") } else { String::new() };
        Ok(format!("placed {} virtual machines{partly}: {moved} moved", processes.len()))
    }

    fn record(
        &self,
        mut placed: Vec<PlacedMachine>,
        outcome: &ApplyOutcome,
        counters: std::collections::BTreeMap<String, u64>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let directory = StateDirectory::open(&self.directory)?;
        let boot = session::read_boot_id(self.host)?;
        let mut record = PlacementRecord::load(&directory, &boot)?;
        record.counters = counters;
        outcome.note_kept_pages(&mut placed);
        record.add(placed);
        Ok(record.store(&directory)?)
    }
}

fn is_worth_moving(map: &NumaMap, target: &MachineTarget, planned: &plan::PlannedMove) -> bool {
    let placement = &map.processes[target.position];
    let after = placement_record::predicted_cost(&map.topology, placement, &target.parts);
    let (Some(before), Some(after), false) = (placement.cost, after, planned.pattern == Pattern::Leave) else {
        return false;
    };
    keeper::is_worth_moving(before, after, placement.pages.resident(), Pages(planned.moved_pages as u64))
}

/// The virtual machines that run now. Processes that end meanwhile are left out.
fn running_machines(host: &dyn Host) -> Reading<Vec<RunningMachine>> {
    let machine = |pid| {
        let handle = host.open(pid).ok()?;
        let process = observe::process(host, &*handle).ok()?;
        process.identity.vm.as_ref()?;
        let resident = parse::statm(&handle.read("statm").ok()?).ok()?.resident;
        Some(RunningMachine { process: process.id, resident })
    };
    Ok(host.pids()?.into_iter().filter_map(machine).collect())
}

#[cfg(test)]
mod tests;
