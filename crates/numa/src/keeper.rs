//! Places the virtual machines of a running host, in a thread of the daemon. When and what is decided in
//! [`crate::decide::keeper`].
//!
//! It takes the locks of placement only while it plans and places, so `numa apply` and `numa undo` work beside it, and
//! its changes are kept and recorded as theirs. If something cannot be read or is refused, the check ends with that
//! reason, and the next one comes after the interval. A placement that is interrupted, by a pause or the end of the
//! daemon, is undone.

use crate::apply::{
    self, ApplyLimits, ApplyOutcome, MachineOutcome, MachineTarget, PlacementSessions, PreparedMachine,
    STOP_POLL_INTERVAL,
};
use crate::decide::keeper::{KeeperState, KeeperStep, RunningMachine};
use crate::decide::plan::{self, Pattern, PlannedMove};
use crate::decide::pricing::PricedGain;
use crate::map::{self, NumaMap};
use crate::placement_record::{self, PlacedMachine, PlacementRecord};
use crate::problem::{KnownContents, PlanLimits, add_equal_pages, placement_problem, plan_within};
use crate::topology::Topology;
use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::{Bytes, ProcessId, Reading, count_text};
use pagefold_census::ProcessSelection;
use pagefold_host::action::Action;
use pagefold_host::qemu_monitor::MonitorAccess;
use pagefold_host::transaction::journal::StateDirectory;
use pagefold_host::transaction::session::{self, FailedUndo};
use pagefold_host::{Host, elapsed_since, memory_headroom, observe, parse};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The bandwidth of placements that no operator asked for: that at which plans price the time of moving.
pub const DEFAULT_BANDWIDTH: Bytes = Bytes(1 << 30);

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
    pub bandwidth: Bytes,
}

/// What the keeper does.
#[derive(Clone, Debug, PartialEq)]
pub enum KeeperActivity {
    /// Nothing, for this reason.
    Idle(String),
    /// Nothing, because an operator paused it.
    Paused,
    /// It reads where the machines are, and plans.
    Planning,
    /// It carries a plan out.
    Placing {
        /// The name of the machine that is being moved.
        machine: String,
        /// Bytes of all machines that have been moved.
        moved: Bytes,
        /// Bytes of all machines that are to be moved.
        planned: Bytes,
    },
}

impl Default for KeeperActivity {
    fn default() -> Self {
        Self::Idle("it has not checked the host yet".to_owned())
    }
}

impl KeeperActivity {
    /// The reason or the progress, for status and log.
    pub fn describe(&self) -> String {
        match self {
            Self::Idle(why) => why.clone(),
            Self::Paused => "paused by an operator".to_owned(),
            Self::Planning => "it reads where memory and threads are, and plans all virtual machines".to_owned(),
            Self::Placing { machine, moved, planned } => format!("{moved} of {planned} moved, now {machine}"),
        }
    }
}

/// What became of a plan.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanResult {
    /// When it was carried out or given up.
    pub time: SystemTime,
    /// What was done, or why nothing.
    pub result: String,
}

/// The state of the keeper.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KeeperReport {
    /// What it does now.
    pub activity: KeeperActivity,
    /// The last plan.
    pub last_plan: Option<PlanResult>,
    /// Placements of machines since the start.
    pub placed_machines: u64,
    /// Placements that were given up since the start: the machine ended, a node had no room, the kernel refused, or tasks
    /// waited for memory.
    pub failed_machines: u64,
    /// Bytes that were moved since the start.
    pub moved_bytes: u64,
    /// Changes that should have been undone since the start, and were not, also those of earlier commands.
    pub failed_undos: u64,
    /// What the last plan gains against leaving everything.
    pub planned_gain: PricedGain,
    /// What the placements since the start gain by their plans. Placements that stopped early count as planned.
    pub placed_gain: PricedGain,
}

/// Ends and pauses a keeper from another thread.
#[derive(Debug, Default)]
pub struct KeeperControl {
    has_ended: AtomicBool,
    /// Set while no placement may run: after the end and during a pause.
    interrupts: AtomicBool,
    /// The contents of processes; `None` if nothing finds them out.
    contents: Mutex<Option<KnownContents>>,
}

impl KeeperControl {
    /// Ends the keeper. A placement that is under way is undone.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
        self.interrupts.store(true, Ordering::Relaxed);
    }

    /// Tells the keeper the contents of processes. From then on it expects to be told those of each machine.
    pub fn set_contents(&self, contents: KnownContents) {
        *self.contents.lock().unwrap_or_else(PoisonError::into_inner) = Some(contents);
    }

    fn contents(&self) -> Option<KnownContents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Pauses the keeper or lets it go on. A placement that is under way is undone.
    pub fn set_paused(&self, paused: bool) {
        if !self.has_ended.load(Ordering::Relaxed) {
            self.interrupts.store(paused, Ordering::Relaxed);
            // The end may have come in between.
            self.interrupts.fetch_or(self.has_ended.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }
}

/// Names a running program that moves virtual machines between nodes, too, and says what to do about it.
pub type RivalFinder = fn(&dyn Host) -> Option<String>;

/// Receives each new state of the keeper.
type ReportObserver<'o> = dyn FnMut(&KeeperReport) + 'o;

/// Places machines of a host.
pub struct PlacementKeeper<'h> {
    host: &'h dyn Host,
    directory: PathBuf,
    settings: KeeperSettings,
    find_rival: RivalFinder,
    state: KeeperState,
    started: Instant,
    /// Changes that were not undone.
    failed_undos: Vec<Action>,
    report: KeeperReport,
}

/// A plan with the map that it is for, and the machines to move.
struct PlannedMoves {
    map: NumaMap,
    targets: Vec<MachineTarget>,
    /// What moving each of them gains.
    gains: Vec<PricedGain>,
    /// Machines that stay, whose merged pages on other nodes lose more by remote reads than they save, with the net gain.
    losing_merges: Vec<(ProcessId, PricedGain)>,
}

impl PlannedMoves {
    fn gain(&self) -> PricedGain {
        self.gains.iter().fold(PricedGain::default(), |sum, gain| sum.plus(*gain))
    }
}

impl<'h> PlacementKeeper<'h> {
    /// A keeper with the directory of its journals. It begins no placement while there is a rival.
    pub fn new(host: &'h dyn Host, directory: PathBuf, settings: KeeperSettings, find_rival: RivalFinder) -> Self {
        let started = host.now();
        Self {
            host,
            directory,
            settings,
            find_rival,
            state: KeeperState::default(),
            started,
            failed_undos: Vec::new(),
            report: KeeperReport::default(),
        }
    }

    /// Checks until `control` ends it, and passes each new state to `observe`. A pause and its end lead to a check at
    /// once. Returns at once on a host with one node.
    pub fn run(&mut self, control: &KeeperControl, observe: &mut ReportObserver<'_>) {
        let has_ended = || control.has_ended.load(Ordering::Relaxed);
        while !has_ended() {
            let was_paused = control.interrupts.load(Ordering::Relaxed);
            let has_choice = self.check(control, observe);
            observe(&self.report);
            if !has_choice {
                return;
            }
            let checked = self.host.now();
            let is_unchanged = || control.interrupts.load(Ordering::Relaxed) == was_paused && !has_ended();
            while is_unchanged() && elapsed_since(self.host, checked) < self.settings.interval {
                self.host.sleep(STOP_POLL_INTERVAL.min(self.settings.interval));
            }
        }
    }

    /// Checks once, unless `control` interrupts it. Returns whether the host has several nodes.
    fn check(&mut self, control: &KeeperControl, observe: &mut ReportObserver<'_>) -> bool {
        let is_node_of_cpus = |node: &&crate::topology::NumaNode| node.cpus.iter().next().is_some();
        match Topology::read(self.host) {
            Ok(topology) if topology.nodes.values().filter(is_node_of_cpus).count() < 2 => {
                self.report.activity = KeeperActivity::Idle("the host has one node".to_owned());
                return false;
            }
            Ok(_) => {}
            Err(why) => {
                self.report.activity = KeeperActivity::Idle(format!("the nodes cannot be read: {why}"));
                return true;
            }
        }
        self.report.activity = match control.interrupts.load(Ordering::Relaxed) {
            true => KeeperActivity::Paused,
            false => KeeperActivity::Idle(self.check_machines(control, observe)),
        };
        true
    }

    /// Places machines if it is time for it. Returns what the next plan waits for.
    fn check_machines(&mut self, control: &KeeperControl, observe: &mut ReportObserver<'_>) -> String {
        if self.settings.acts
            && let Some(rival) = (self.find_rival)(self.host)
        {
            return rival;
        }
        let contents = control.contents();
        let machines = match running_machines(self.host, contents.as_ref()) {
            Ok(machines) => machines,
            Err(why) => return format!("the processes cannot be listed: {why}"),
        };
        let is_memory_short = memory_headroom::is_memory_short(self.host, None, DEFAULT_PRESSURE_PERCENT);
        let now = elapsed_since(self.host, self.started);
        let resting = match self.state.step(&machines, is_memory_short, self.settings.replan_interval, now) {
            KeeperStep::Wait(why) => return why.describe().to_owned(),
            KeeperStep::Plan { resting } => resting,
        };
        self.report.activity = KeeperActivity::Planning;
        observe(&self.report);
        let contents = contents.unwrap_or_default();
        let placed = self.plan_and_place((&machines, &contents), &resting, &control.interrupts, observe);
        let result = placed.unwrap_or_else(|error| {
            self.state.retry_plan();
            format!("not finished: {}", session::chain(&*error))
        });
        self.report.last_plan = Some(PlanResult { time: self.host.unix_time(), result });
        self.state.wait_reason().describe().to_owned()
    }

    fn plan_and_place(
        &mut self,
        (machines, contents): (&[RunningMachine], &KnownContents),
        resting: &BTreeSet<ProcessId>,
        interrupts: &AtomicBool,
        observe: &mut ReportObserver<'_>,
    ) -> Result<String, Box<dyn std::error::Error>> {
        // The locks are taken before the map is read, so that no other pagefold moves memory in between.
        let sessions = match self.settings.acts {
            true => {
                let (sessions, (_, failed)) = PlacementSessions::begin(self.host, &self.directory)?;
                self.count_failed_undos(&failed);
                Some(sessions)
            }
            false => None,
        };
        let pids = machines.iter().map(|machine| machine.process.pid).collect();
        let selection = ProcessSelection { pids, ..ProcessSelection::default() };
        let planned = self.plan(&selection, contents, resting)?;
        if interrupts.load(Ordering::Relaxed) {
            return Err("interrupted".into());
        }
        self.report.planned_gain = planned.gain();
        let losses = describe_losing_merges(&planned.losing_merges);
        if planned.targets.is_empty() {
            let text = match machines.len() {
                1 => "the virtual machine is well placed".to_owned(),
                count => format!("all {count} virtual machines are well placed"),
            };
            return Ok(text + &losses);
        }
        match sessions {
            Some(sessions) => Ok(self.place(sessions, &planned, interrupts, observe)? + &losses),
            None => {
                let machines = count_text(machines.len(), "virtual machine");
                let gain = describe_gain(planned.gain());
                Ok(format!("would place {} of {machines}, for a gain of {gain}{losses}", planned.targets.len()))
            }
        }
    }

    /// Counts changes that were not undone, each once: those that are tried again may fail again with each plan.
    fn count_failed_undos(&mut self, failed: &[FailedUndo]) {
        for failed in failed {
            if !self.failed_undos.contains(&failed.undo) {
                self.failed_undos.push(failed.undo.clone());
            }
        }
        self.report.failed_undos = self.failed_undos.len() as u64;
    }

    fn plan(
        &self,
        selection: &ProcessSelection,
        contents: &KnownContents,
        resting: &BTreeSet<ProcessId>,
    ) -> Result<PlannedMoves, Box<dyn std::error::Error>> {
        let monitors = Some(MonitorAccess::Socket);
        let (mut map, _) = map::read_map_and_frames(self.host, selection, monitors)?;
        map::add_other_machines(self.host, &mut map, monitors)?;
        let kept = apply::read_kept_cpus(self.host, &self.directory)?;
        apply::restore_permitted_cpus(&mut map, &kept);
        placement_record::mark_placed(self.host, &self.directory, &mut map)?;
        let mut problem = placement_problem(&map, self.host.page_size(), self.settings.limits);
        for (vm, placement) in problem.vms.iter_mut().zip(&map.processes) {
            vm.fixed |= resting.contains(&placement.process.id);
        }
        add_equal_pages(self.host, &map, contents, &mut problem);
        let plan = plan_within(self.host, &problem, PLAN_DEADLINE);
        let target = |(position, planned): (usize, &PlannedMove)| {
            let part_count = problem.vms[position].parts.len();
            Some((MachineTarget::planned(position, part_count, planned, &problem)?, planned.gain))
        };
        let machines = map.processes.iter().zip(&problem.vms).zip(&plan.moves);
        let losing_merges = machines
            .filter(|(_, planned)| planned.pattern == Pattern::Leave)
            .filter_map(|((placement, vm), _)| {
                let gain = plan::gain_of_remote_merges(&problem, vm)?;
                (gain.net() < 0.0).then_some((placement.process.id, gain))
            })
            .collect();
        let (targets, gains) = plan.moves.iter().enumerate().filter_map(target).unzip();
        Ok(PlannedMoves { map, targets, gains, losing_merges })
    }

    fn place(
        &mut self,
        mut sessions: PlacementSessions<'_>,
        planned: &PlannedMoves,
        interrupts: &AtomicBool,
        observe: &mut ReportObserver<'_>,
    ) -> Result<String, Box<dyn std::error::Error>> {
        let prepared = apply::prepare(self.host, &planned.map, &planned.targets, interrupts)?;
        let placed: Vec<PlacedMachine> = planned
            .targets
            .iter()
            .zip(&prepared)
            .map(|(target, prepared)| PlacedMachine::new(&planned.map, target, prepared))
            .collect();
        let counters = placement_record::read_counters(self.host);
        let limits = ApplyLimits {
            bandwidth: Some(self.settings.bandwidth),
            headroom_share: self.settings.limits.headroom_share,
            reserved: planned.map.topology.reserved(),
        };
        let planned_bytes = prepared.iter().map(PreparedMachine::planned_bytes).sum();
        let mut report_progress = |machine: usize, moved: Bytes| {
            let machine = placed[machine].name.clone();
            self.report.activity = KeeperActivity::Placing { machine, moved, planned: planned_bytes };
            observe(&self.report);
        };
        report_progress(0, Bytes::ZERO);
        let outcome = apply::carry_out(&mut sessions, &prepared, limits, &mut report_progress, interrupts)?;
        self.count_failed_undos(&outcome.failed_undos);
        if outcome.interrupted {
            let failed = sessions.undo_all()?;
            self.count_failed_undos(&failed);
            self.state.retry_plan();
            return Ok(match failed.len() {
                0 => "interrupted, and undone".to_owned(),
                count => format!("interrupted; {count} changes could not be undone, the first: {}", failed[0]),
            });
        }
        let failed = sessions.keep()?;
        self.count_failed_undos(&failed);
        // A machine that could not be placed rests, too. After memory pressure it is planned again as soon as that ends.
        let rests = |done: &MachineOutcome| done.has_changes() || !outcome.stopped_by_pressure;
        let tried = placed.iter().zip(&outcome.machines).filter(|(_, done)| rests(done));
        let tried: Vec<ProcessId> = tried.map(|(placed, _)| placed.process()).collect();
        self.state.note_moves(&tried, elapsed_since(self.host, self.started));
        if outcome.stopped_by_pressure {
            self.state.retry_plan();
        }
        let bytes = self.host.page_size().bytes_of(outcome.machines.iter().map(|machine| machine.moved_pages).sum());
        self.report.placed_machines += outcome.machines.iter().filter(|machine| machine.has_changes()).count() as u64;
        self.report.failed_machines +=
            outcome.machines.iter().filter(|machine| machine.failure.is_some()).count() as u64;
        self.report.moved_bytes += bytes.0;
        let placed_gains = planned
            .gains
            .iter()
            .zip(&outcome.machines)
            .filter(|(_, machine)| machine.has_changes())
            .map(|(gain, _)| gain);
        let gain = placed_gains.fold(PricedGain::default(), |sum, gain| sum.plus(*gain));
        self.report.placed_gain = self.report.placed_gain.plus(gain);
        let text = describe_placement(&outcome, bytes, gain);
        Ok(match self.record(&placed, &outcome, counters) {
            Ok(()) => text,
            Err(error) => format!("{text}; `pagefold numa verify` does not know it: {error}"),
        })
    }

    fn record(
        &self,
        planned: &[PlacedMachine],
        outcome: &ApplyOutcome,
        counters: std::collections::BTreeMap<String, u64>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let directory = StateDirectory::open(&self.directory)?;
        let boot = session::read_boot_id(self.host)?;
        let mut record = PlacementRecord::load(&directory, &boot)?;
        record.forget_ended(self.host);
        record.counters = counters;
        record.add(outcome.records(planned));
        Ok(record.store(&directory)?)
    }
}

/// What a placement did, and what not.
fn describe_placement(outcome: &ApplyOutcome, moved: Bytes, gain: PricedGain) -> String {
    let placed = outcome.machines.iter().filter(|machine| machine.has_changes()).count();
    let machines = count_text(outcome.machines.len(), "virtual machine");
    let mut text = format!("placed {placed} of {machines}: {moved} moved, for a gain of {}", describe_gain(gain));
    if outcome.stopped_by_pressure {
        text.push_str(", then stopped, because tasks of the host wait for memory");
    } else if let Some(why) = outcome.machines.iter().find_map(|machine| machine.failure.as_deref()) {
        text.push_str(&format!("; not all, because {why}"));
    }
    text
}

/// `120 CPU s/h (memory 0, remote reads +130, CPU -10, huge pages 0, crowding 0)`.
fn describe_gain(gain: PricedGain) -> String {
    let signed = |value: f64| if value.round() == 0.0 { "0".to_owned() } else { format!("{value:+.0}") };
    format!(
        "{:.0} CPU s/h (memory {}, remote reads {}, CPU {}, huge pages {}, crowding {})",
        gain.net(),
        signed(gain.memory),
        signed(gain.remote_reads),
        signed(gain.cpu),
        signed(gain.huge_pages),
        signed(gain.crowding)
    )
}

/// Names the machine whose merged pages lose most, with the remedies; empty if there is none.
fn describe_losing_merges(losing: &[(ProcessId, PricedGain)]) -> String {
    let most = losing.iter().min_by(|left, right| left.1.net().total_cmp(&right.1.net()));
    most.map_or_else(String::new, |(process, gain)| {
        format!(
            "; merged pages of {} on other nodes cost more remote reads than they save memory, most those of process {}, by \
             {:.0} CPU s/h: unmerge it, or set merge_across_nodes=0",
            count_text(losing.len(), "virtual machine"),
            process.pid,
            -gain.net()
        )
    })
}

/// The virtual machines that run now. Processes that end meanwhile are left out.
fn running_machines(host: &dyn Host, contents: Option<&KnownContents>) -> Reading<Vec<RunningMachine>> {
    let machine = |pid| {
        let handle = host.open(pid).ok()?;
        let process = observe::process(host, &*handle).ok()?;
        process.identity.vm.as_ref()?;
        let resident = parse::statm(&handle.read("statm").ok()?).ok()?.resident;
        let has_known_contents = contents.is_none_or(|contents| contents.contains_key(&process.id));
        Some(RunningMachine { process: process.id, resident, has_known_contents })
    };
    Ok(host.pids()?.into_iter().filter_map(machine).collect())
}

#[cfg(test)]
mod tests;
