//! The machines of a scenario in time: they arrive, write, grow and exit.

use super::state::{HostState, ProcessIdentity};
use crate::decide::scenario::Scenario;
use crate::decide::workload::{ContentsUsedUp, Machine, MachineArrival, MemoryChange, Workload};
use pagefold_base::Pid;
use std::collections::VecDeque;

/// Machines that run and machines that arrive later.
#[derive(Debug)]
pub(super) struct MachineEvents<'s> {
    scenario: &'s Scenario,
    workload: Workload<'s>,
    arrivals: VecDeque<MachineArrival>,
    running: Vec<RunningMachine>,
    /// The next round of writes and growth.
    next_round_ms: u64,
    arrived: u32,
}

#[derive(Debug)]
struct RunningMachine {
    pid: Pid,
    machine: Machine,
    first_page: u64,
    exits_ms: Option<u64>,
    /// Until when it has written and grown.
    worked_until_ms: u64,
}

impl<'s> MachineEvents<'s> {
    pub(super) fn new(scenario: &'s Scenario, seed: u64) -> Self {
        let workload = Workload::new(scenario, seed);
        let arrivals = workload.arrivals().into();
        Self { scenario, workload, arrivals, running: Vec::new(), next_round_ms: scenario.tick_ms, arrived: 0 }
    }

    /// When something happens next.
    pub(super) fn next_ms(&self) -> Option<u64> {
        let arrival = self.arrivals.front().map(|arrival| arrival.arrives_ms);
        let exit = self.running.iter().filter_map(|running| running.exits_ms).min();
        let round =
            (!self.running.is_empty() && self.next_round_ms <= self.scenario.duration_ms).then_some(self.next_round_ms);
        arrival.into_iter().chain(exit).chain(round).min()
    }

    /// Carry out what happens at this time: exits, then writes, then arrivals.
    ///
    /// # Errors
    /// If contents are used up. What needs no new content still happens.
    pub(super) fn carry_out(&mut self, host: &mut HostState<'_>, now_ms: u64) -> Result<(), ContentsUsedUp> {
        let has_ended = |running: &mut RunningMachine| running.exits_ms.is_some_and(|at| at <= now_ms);
        let ended: Vec<RunningMachine> = self.running.extract_if(.., has_ended).collect();
        for ended in ended {
            host.exit(ended.pid);
            self.workload.finish(ended.machine);
        }
        let mut result = Ok(());
        if self.next_round_ms <= now_ms {
            self.next_round_ms = now_ms + self.scenario.tick_ms;
            for running in &mut self.running {
                let elapsed_ms = now_ms - running.worked_until_ms;
                running.worked_until_ms = now_ms;
                match self.workload.advance(&mut running.machine, elapsed_ms) {
                    Ok(change) => apply_change(host, running.pid, running.first_page, &change),
                    Err(error) => result = Err(error),
                }
            }
        }
        while self.arrivals.front().is_some_and(|arrival| arrival.arrives_ms <= now_ms) {
            let Some(arrival) = self.arrivals.pop_front() else { break };
            if let Err(error) = self.start(host, &arrival, now_ms) {
                result = Err(error);
            }
        }
        result
    }

    fn start(&mut self, host: &mut HostState<'_>, arrival: &MachineArrival, now_ms: u64) -> Result<(), ContentsUsedUp> {
        let (machine, change) = self.workload.start(arrival)?;
        let class = &self.scenario.classes[arrival.class];
        self.arrived += 1;
        if self.running.is_empty() {
            self.next_round_ms = now_ms + self.scenario.tick_ms;
        }
        let name = format!("{}-{}", class.name, arrival.number + 1);
        let pid = host.start_process(ProcessIdentity::machine(&name, self.arrived, &class.tenant, machine.pages()));
        if let Some(first_page) = host.map(pid, machine.pages(), arrival.node) {
            apply_change(host, pid, first_page, &change);
            let exits_ms = arrival.exits_ms;
            self.running.push(RunningMachine { pid, machine, first_page, exits_ms, worked_until_ms: now_ms });
        }
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
