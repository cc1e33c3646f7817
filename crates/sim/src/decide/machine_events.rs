//! The machines of a scenario in time: they arrive, write, grow and exit, and samples are due.

use super::content_pool::ContentsUsedUp;
use super::host_state::{HostState, MachineEnrollment, NS_PER_MS, ProcessIdentity};
use super::ksmd::Advice;
use super::scenario::Scenario;
use super::workload::{Machine, MachineArrival, MemoryChange, Workload};
use pagefold_base::Pid;
use std::collections::{BTreeMap, VecDeque};

/// Machines that run and machines that arrive later.
#[derive(Debug)]
pub(super) struct MachineEvents<'s> {
    scenario: &'s Scenario,
    enrollment: MachineEnrollment,
    workload: Workload<'s>,
    arrivals: VecDeque<MachineArrival>,
    /// By the time of their exit, which those that stay do not have, and by their turn.
    running: BTreeMap<(u64, u32), RunningMachine>,
    arrived: u32,
    /// The next round of writes and growth.
    next_round_ms: u64,
    /// `None` after the last one, at the end of the scenario.
    next_sample_ms: Option<u64>,
}

#[derive(Debug)]
struct RunningMachine {
    pid: Pid,
    machine: Machine,
    first_page: u64,
}

impl<'s> MachineEvents<'s> {
    pub(super) fn new(scenario: &'s Scenario, seed: u64, enrollment: MachineEnrollment) -> Self {
        let workload = Workload::new(scenario, seed);
        Self {
            scenario,
            enrollment,
            arrivals: workload.arrivals().into(),
            workload,
            running: BTreeMap::new(),
            arrived: 0,
            next_round_ms: scenario.tick_ms,
            next_sample_ms: Some(0),
        }
    }

    /// When something happens next.
    pub(super) fn next_ms(&self) -> Option<u64> {
        let arrival = self.arrivals.front().map(|arrival| arrival.arrives_ms);
        let exit = self.running.first_key_value().map(|(&(exits_ms, _), _)| exits_ms);
        let round = Some(self.next_round_ms).filter(|&round| round <= self.scenario.duration_ms);
        [arrival, exit, round, self.next_sample_ms].into_iter().flatten().min()
    }

    /// Carry out what happens at this time: exits, then arrivals, then writes, then a sample.
    ///
    /// # Errors
    /// If contents are used up. What needs no new content still happens.
    pub(super) fn carry_out(&mut self, host: &mut HostState<'_>, now_ms: u64) -> Result<(), ContentsUsedUp> {
        while let Some(first) = self.running.first_entry().filter(|first| first.key().0 <= now_ms) {
            let ended = first.remove();
            host.exit(ended.pid);
            self.workload.finish(ended.machine);
        }
        let mut result = Ok(());
        while self.arrivals.front().is_some_and(|arrival| arrival.arrives_ms <= now_ms) {
            let Some(arrival) = self.arrivals.pop_front() else { break };
            result = result.and(self.start(host, &arrival));
        }
        if self.next_round_ms <= now_ms {
            self.next_round_ms += self.scenario.tick_ms;
            for running in self.running.values_mut() {
                let cpu_use = self.scenario.templates[running.machine.template()].cpu_use;
                host.run_process(running.pid, (cpu_use * (self.scenario.tick_ms * NS_PER_MS) as f64) as u64);
                match self.workload.advance(&mut running.machine, self.scenario.tick_ms) {
                    Ok(change) => apply_change(host, running.pid, running.first_page, &change),
                    Err(error) => result = Err(error),
                }
            }
        }
        if let Some(due_ms) = self.next_sample_ms.filter(|&due_ms| due_ms <= now_ms) {
            host.take_sample();
            let (next_ms, end_ms) = (due_ms + self.scenario.sample_ms, self.scenario.duration_ms);
            self.next_sample_ms = (due_ms < end_ms).then_some(next_ms.min(end_ms));
            if self.next_sample_ms.is_none() {
                host.end_scenario();
            }
        }
        result
    }

    fn start(&mut self, host: &mut HostState<'_>, arrival: &MachineArrival) -> Result<(), ContentsUsedUp> {
        let (machine, change) = self.workload.start(arrival)?;
        let class = &self.scenario.classes[arrival.class];
        self.arrived += 1;
        let name = format!("{}-{}", class.name, arrival.number + 1);
        let vcpus = self.scenario.templates[class.template].vcpus;
        let identity = ProcessIdentity::machine(&name, self.arrived, &class.tenant, machine.pages(), vcpus);
        let pid = host.start_process(identity, class.vcpu_node.unwrap_or(arrival.node));
        let Some(first_page) = host.map(pid, machine.pages(), arrival.node) else { return Ok(()) };
        if self.enrollment == MachineEnrollment::AtArrival {
            host.advise_all(pid, Advice::Mergeable);
        }
        apply_change(host, pid, first_page, &change);
        let exits_ms = arrival.exits_ms.unwrap_or(u64::MAX);
        self.running.insert((exits_ms, self.arrived), RunningMachine { pid, machine, first_page });
        Ok(())
    }
}

/// Change the memory of a machine that begins at a page.
fn apply_change(host: &mut HostState<'_>, pid: Pid, first_page: u64, change: &MemoryChange) {
    change.huge_pages.iter().for_each(|page| host.fault_huge_page(pid, first_page + page));
    for run in &change.writes {
        let pages = run.range();
        host.write(pid, first_page + pages.start..first_page + pages.end, run.content, run.ascends());
    }
}
