//! A scenario in virtual time: machines arrive, write and exit, a policy sets ksmd's pace, and ksmd scans.
//!
//! ksmd's time is its CPU time by the cost model, and its pauses. Long batches are run in parts, between which memory
//! changes. Machines change memory once a tick.
//!
//! Limits: ksmd has a CPU for itself, and pauses end on time. A host whose memory is used up goes on: there is no swap,
//! and samples show how much memory is missing. Pages that change during a scan are [approximated] on request. A machine's
//! page tables, and programs other than the machines, are a fixed part of memory.
//!
//! [approximated]: KsmModel::seeing_changes_at_once

use super::cost::OperationCounts;
use super::counters::{PAGE_BYTES, RMAP_ITEM_BYTES};
use super::entry_runs::EntryRun;
use super::ksmd::{Advice, KsmModel, RunState};
use super::memory::{Content, Memory, PageEntry, SimulatedProcessId, ZERO_CONTENT};
use super::policies::{ComparedPolicy, PolicySteps};
use super::rules::KsmRules;
use super::scenario::Scenario;
use super::workload::{ContentsUsedUp, Machine, MachineArrival, MemoryChange, Workload};
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::units::Bytes;
use std::collections::BTreeMap;

/// Visits in a part of a batch at most. At a few microseconds each, a part takes less time than a tick of a second.
const PART_VISITS: u64 = 50_000;
/// A batch without any visit takes this time at least, so that virtual time goes on.
const EMPTY_BATCH_NS: u64 = 1_000_000;

const NS_PER_MS: u64 = 1_000_000;

/// The host at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Virtual time, in milliseconds.
    pub time_ms: u64,
    /// Machines that run.
    pub machines: u64,
    /// What their memory would take without merging, in pages.
    pub resident_pages: u64,
    /// Pages saved: mappings of merged frames beyond the first of each, and zero pages that ksmd mapped, also by splits.
    pub saved_pages: u64,
    /// Pages with metadata.
    pub rmap_items: u64,
    /// Free memory of the host; negative if memory is missing.
    pub available_bytes: i64,
    /// Completed scans.
    pub full_scans: u64,
    /// ksmd's visits.
    pub pages_scanned: u64,
    /// Visits that smart scan left out.
    pub pages_skipped: u64,
    /// ksmd's CPU time, in nanoseconds.
    pub cpu_ns: u64,
    /// Merged pages that machines wrote.
    pub cow_breaks: u64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: u64,
    /// `pages_to_scan`; 0 while ksmd is stopped.
    pub pages_to_scan: u64,
}

impl Sample {
    /// Savings less ksmd's metadata.
    #[must_use]
    pub fn net_saved_bytes(&self) -> i64 {
        self.saved_pages.cast_signed() * PAGE_BYTES - self.rmap_items.cast_signed() * RMAP_ITEM_BYTES
    }
}

/// A simulated run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimulatedRun {
    /// Samples from the start to the end.
    pub samples: Vec<Sample>,
    /// Pages at the end whose contents occur before in the host's memory: what merging could save.
    pub duplicates: u64,
    /// Huge pages that the machines had.
    pub huge_pages: u64,
}

/// What ksmd does with pages that change during a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exactness {
    /// What the kernel does: slow on hosts with writers.
    Exact,
    /// An [approximation](KsmModel::seeing_changes_at_once).
    Approximate,
}

/// Simulates a scenario. `note_progress` gets the virtual time in milliseconds, from time to time.
///
/// # Errors
/// If the scenario has more contents than the model.
pub fn simulate(
    scenario: &Scenario,
    policy: &ComparedPolicy,
    seed: u64,
    exactness: Exactness,
    note_progress: &mut dyn FnMut(u64),
) -> Result<SimulatedRun, ContentsUsedUp> {
    let mut simulation = Simulation::new(scenario, policy, seed, exactness);
    let end = scenario.duration_ms * NS_PER_MS;
    loop {
        let now = simulation.next_event().min(end);
        simulation.run_ksmd_until(now);
        simulation.now_ns = now;
        simulation.exits();
        simulation.arrive()?;
        simulation.tick()?;
        simulation.step_policy();
        simulation.sample(now == end);
        note_progress(now / NS_PER_MS);
        if now == end {
            break;
        }
    }
    Ok(SimulatedRun {
        duplicates: count_duplicates(simulation.model.memory()),
        samples: simulation.samples,
        huge_pages: simulation.huge_pages,
    })
}

/// A machine and its process.
struct RunningMachine {
    machine: Machine,
    process: SimulatedProcessId,
}

struct Simulation<'s> {
    scenario: &'s Scenario,
    workload: Workload<'s>,
    model: KsmModel,
    now_ns: u64,
    /// Machines still to come, the next one last.
    arrivals: Vec<MachineArrival>,
    /// By their exit and their turn.
    machines: BTreeMap<(u64, usize), RunningMachine>,
    /// The number of machines that arrived.
    arrived: usize,
    next_tick_ns: u64,
    next_sample_ns: u64,
    steps: Option<PolicySteps>,
    next_step_ns: u64,
    ksmd: Ksmd,
    samples: Vec<Sample>,
    cow_breaks: u64,
    huge_pages: u64,
    /// Pages that splits mapped to the zero page, and that were written or unmapped since.
    replaced_zero_pages: u64,
}

/// When ksmd goes on, and with what.
#[derive(Default)]
struct Ksmd {
    next_ns: u64,
    visits_left: u64,
    cpu_ns: u64,
}

impl<'s> Simulation<'s> {
    fn new(scenario: &'s Scenario, policy: &ComparedPolicy, seed: u64, exactness: Exactness) -> Self {
        let workload = Workload::new(scenario, seed);
        let mut arrivals = workload.arrivals();
        arrivals.reverse();
        let (settings, runs) = policy.start(&scenario.host.ksm);
        let rules = KsmRules::for_version(scenario.host.kernel);
        let mut model = KsmModel::new(rules, settings);
        if exactness == Exactness::Approximate {
            model = model.seeing_changes_at_once();
        }
        if runs {
            model.write_run(RunState::Merging);
        }
        let steps = match policy {
            ComparedPolicy::Ksmtuned(rule) => {
                let total = Bytes(scenario.host.memory_pages * PAGE_BYTES.cast_unsigned());
                Some(PolicySteps { state: rule.start(total), rule: rule.clone() })
            }
            _ => None,
        };
        let first_step = steps.as_ref().map_or(u64::MAX, |steps| steps.rule.interval.as_nanos() as u64);
        Self {
            scenario,
            workload,
            model,
            now_ns: 0,
            arrivals,
            machines: BTreeMap::new(),
            arrived: 0,
            next_tick_ns: scenario.tick_ms * NS_PER_MS,
            next_sample_ns: 0,
            steps,
            next_step_ns: first_step,
            ksmd: Ksmd::default(),
            samples: Vec::new(),
            cow_breaks: 0,
            huge_pages: 0,
            replaced_zero_pages: 0,
        }
    }

    fn next_event(&self) -> u64 {
        let arrival = self.arrivals.last().map_or(u64::MAX, |arrival| arrival.arrives_ms * NS_PER_MS);
        let exit = self.machines.first_key_value().map_or(u64::MAX, |(&(exit, _), _)| exit);
        arrival.min(exit).min(self.next_tick_ns).min(self.next_sample_ns).min(self.next_step_ns)
    }

    /// ksmd scans and pauses until a time, which its last part may pass.
    fn run_ksmd_until(&mut self, end: u64) {
        while self.ksmd.next_ns < end {
            if !self.model.ksmd_should_run() {
                (self.ksmd.next_ns, self.ksmd.visits_left) = (end, 0);
                return;
            }
            if self.ksmd.visits_left == 0 {
                self.ksmd.visits_left = self.model.settings().pages_to_scan;
            }
            self.model.set_time(self.ksmd.next_ns / NS_PER_MS, self.ksmd.cpu_ns);
            let before = OperationCounts::new(&self.model.counters(), self.model.work());
            let limit = self.ksmd.visits_left.min(PART_VISITS);
            let visits = self.model.run_visits(limit);
            let done = OperationCounts::new(&self.model.counters(), self.model.work()).since(&before);
            let cpu_ns =
                (self.scenario.costs.cpu_ns(&done).round() as u64).max(u64::from(visits == 0) * EMPTY_BATCH_NS);
            self.ksmd.cpu_ns += cpu_ns;
            self.ksmd.next_ns += cpu_ns;
            self.ksmd.visits_left = if visits < limit { 0 } else { self.ksmd.visits_left - visits };
            if self.ksmd.visits_left == 0 {
                self.ksmd.next_ns += self.model.settings().sleep_millisecs * NS_PER_MS;
            }
        }
    }

    fn exits(&mut self) {
        while let Some(first) = self.machines.first_entry().filter(|first| first.key().0 <= self.now_ns) {
            let gone = first.remove();
            self.replaced_zero_pages += self.count_entries(gone.process, 0..gone.machine.pages()).1;
            self.model.exit(gone.process);
            self.workload.finish(gone.machine);
        }
    }

    fn arrive(&mut self) -> Result<(), ContentsUsedUp> {
        while self.arrivals.last().is_some_and(|next| next.arrives_ms * NS_PER_MS <= self.now_ns) {
            let Some(arrival) = self.arrivals.pop() else { break };
            let (machine, change) = self.workload.start(&arrival)?;
            let process = self.model.spawn();
            self.model.map(process, 0, machine.pages(), arrival.node);
            self.model.advise(process, 0, machine.pages(), Advice::Mergeable);
            self.apply(process, &change);
            let exit = arrival.exits_ms.map_or(u64::MAX, |exit| exit * NS_PER_MS);
            self.machines.insert((exit, self.arrived), RunningMachine { machine, process });
            self.arrived += 1;
        }
        Ok(())
    }

    /// Machines grow and write.
    fn tick(&mut self) -> Result<(), ContentsUsedUp> {
        if self.now_ns < self.next_tick_ns {
            return Ok(());
        }
        self.next_tick_ns += self.scenario.tick_ms * NS_PER_MS;
        let mut machines = std::mem::take(&mut self.machines);
        for running in machines.values_mut() {
            let change = self.workload.advance(&mut running.machine, self.scenario.tick_ms)?;
            self.apply(running.process, &change);
        }
        self.machines = machines;
        Ok(())
    }

    fn apply(&mut self, process: SimulatedProcessId, change: &MemoryChange) {
        self.huge_pages += change.huge_pages.len() as u64;
        change.huge_pages.iter().for_each(|&page| self.model.fault_huge_page(process, page));
        for run in &change.writes {
            let (merged, zero) = self.count_entries(process, run.range());
            self.cow_breaks += merged;
            self.replaced_zero_pages += zero;
            self.model.write_pages(process, run.range(), run.content, run.ascends());
        }
    }

    /// Pages of a range that ksmd merged, and pages that a split mapped to the zero page.
    fn count_entries(&self, process: SimulatedProcessId, range: std::ops::Range<u64>) -> (u64, u64) {
        let memory = self.model.memory();
        let (mut merged, mut zero) = (0, 0);
        for (_, run) in memory.runs(process, range) {
            match run.entry() {
                PageEntry::Frame(first) => {
                    let frame = |page: u64| if run.ascends { first + page as u32 } else { first };
                    merged += (0..run.pages).filter(|&page| memory.frame(frame(page)).is_merged).count() as u64;
                }
                PageEntry::KsmZeroPage => merged += run.pages,
                PageEntry::ZeroPage => zero += run.pages,
                _ => {}
            }
        }
        (merged, zero)
    }

    fn step_policy(&mut self) {
        if self.now_ns < self.next_step_ns {
            return;
        }
        let now = self.observe();
        let Some(steps) = &mut self.steps else { return };
        self.next_step_ns += steps.rule.interval.as_nanos() as u64;
        let free = Bytes(now.available_bytes.max(0).cast_unsigned());
        let counters = self.model.counters();
        // Pages that are mapped to the zero page are not resident; merged ones are.
        let zero_pages = now.saved_pages - counters.pages_sharing;
        let committed = Bytes((now.resident_pages - zero_pages) * PAGE_BYTES.cast_unsigned());
        let (state, settings) = steps.rule.step(steps.state, free, committed);
        steps.state = state;
        self.write_settings(&settings);
    }

    fn write_settings(&mut self, written: &Settings) {
        let mut settings = *self.model.settings();
        for (setting, value) in written {
            let value = value.parse().expect("policies write numbers");
            match setting {
                Setting::PagesToScan => settings.pages_to_scan = value,
                Setting::SleepMillisecs => settings.sleep_millisecs = value,
                Setting::Run => {
                    self.model.write_run(if value == 0 { RunState::Stopped } else { RunState::Merging });
                }
                _ => unreachable!("ksmtuned writes no {setting:?}"),
            }
        }
        self.model.write_settings(settings);
    }

    fn observe(&self) -> Sample {
        let (counters, work) = (self.model.counters(), self.model.work());
        let resident_pages: u64 = self.machines.values().map(|running| running.machine.resident_pages()).sum();
        let zero_pages = counters.ksm_zero_pages.max(0).cast_unsigned();
        let zero_pages_of_splits = work.zero_pages_of_splits - self.replaced_zero_pages;
        let saved_pages = counters.pages_sharing + zero_pages + zero_pages_of_splits;
        let rmap_items =
            counters.pages_shared + counters.pages_sharing + counters.pages_unshared + counters.pages_volatile;
        let host = &self.scenario.host;
        let free_pages = host.memory_pages.cast_signed() - host.used_pages.cast_signed() - resident_pages.cast_signed()
            + saved_pages.cast_signed();
        Sample {
            time_ms: self.now_ns / NS_PER_MS,
            machines: self.machines.len() as u64,
            resident_pages,
            saved_pages,
            rmap_items,
            available_bytes: free_pages * PAGE_BYTES - rmap_items.cast_signed() * RMAP_ITEM_BYTES,
            full_scans: counters.full_scans,
            pages_scanned: counters.pages_scanned,
            pages_skipped: counters.pages_skipped,
            cpu_ns: self.ksmd.cpu_ns,
            cow_breaks: self.cow_breaks,
            huge_pages_split: work.splits,
            pages_to_scan: u64::from(self.model.ksmd_should_run()) * self.model.settings().pages_to_scan,
        }
    }

    fn sample(&mut self, is_end: bool) {
        if self.now_ns >= self.next_sample_ns || is_end {
            self.next_sample_ns += self.scenario.sample_ms * NS_PER_MS;
            self.samples.push(self.observe());
        }
    }
}

/// Pages whose contents occur before.
fn count_duplicates(memory: &Memory) -> u64 {
    let (mut zeros, mut pages) = (0_u64, 0_u64);
    let mut ranges: Vec<(Content, u64)> = Vec::new();
    for process in memory.process_ids() {
        for vma in memory.process(process).vmas.values() {
            for (_, run) in vma.entries.runs() {
                add_contents(memory, run, &mut zeros, &mut ranges);
            }
        }
    }
    ranges.sort_unstable();
    let (mut distinct, mut end) = (0, 0_u64);
    for (first, length) in ranges {
        let (first, last) = (u64::from(first), u64::from(first) + length);
        pages += length;
        distinct += last.saturating_sub(end.max(first));
        end = end.max(last);
    }
    pages - distinct + zeros.saturating_sub(1)
}

fn add_contents(memory: &Memory, run: EntryRun, zeros: &mut u64, ranges: &mut Vec<(Content, u64)>) {
    match run.entry() {
        PageEntry::Absent => {}
        PageEntry::Frame(first) => {
            for page in 0..run.pages {
                let content = memory.frame(if run.ascends { first + page as u32 } else { first }).content;
                match ranges.last_mut() {
                    _ if content == ZERO_CONTENT => *zeros += 1,
                    Some((start, length)) if u64::from(*start) + *length == u64::from(content) => *length += 1,
                    _ => ranges.push((content, 1)),
                }
            }
        }
        entry => match memory.content(entry).unwrap_or(ZERO_CONTENT) {
            ZERO_CONTENT if !run.ascends => *zeros += run.pages,
            content if run.ascends => ranges.push((content, run.pages)),
            content => ranges.extend((0..run.pages).map(|_| (content, 1))),
        },
    }
}
