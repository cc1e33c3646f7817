//! When machines of a running host are placed: new ones once they have settled, all of them from time to time.
//!
//! A machine that was moved stays for a while before it is moved again, twice as long each time (exponential backoff), so
//! that no machine goes back and forth. While memory is short nothing is planned. What a move gains is decided by the plan
//! ([`super::pricing`]).

use pagefold_base::{Pages, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A machine has settled if its resident memory changes by at most this share between two checks.
const SETTLED_CHANGE: f64 = 0.05;

/// A machine counts as settled after this time, however its memory changes.
const MAX_SETTLE_TIME: Duration = Duration::from_secs(120);

/// A machine that was moved stays for at least this time. It doubles with each move.
const FIRST_MOVE_BACKOFF: Duration = Duration::from_secs(600);

/// The longest of these times.
const MAX_MOVE_BACKOFF: Duration = Duration::from_secs(24 * 3600);

/// A machine that runs now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunningMachine {
    /// Its process.
    pub process: ProcessId,
    /// Its resident memory.
    pub resident: Pages,
    /// Whether it is known which pages it shares with other machines, as far as it ever will be.
    pub has_known_contents: bool,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeeperStep {
    /// Nothing, for this reason.
    Wait(WaitReason),
    /// Plan all machines. These stay, because they were moved recently.
    Plan {
        /// The machines that stay.
        resting: BTreeSet<ProcessId>,
    },
}

/// Why nothing is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// No machine runs.
    NoMachine,
    /// Tasks of the host wait for memory.
    MemoryPressure,
    /// A new machine still fills its memory, or its contents are not known yet.
    Settling,
    /// Nothing has changed since the last plan, which is recent.
    RecentPlan,
    /// The last plan was not completed, and the next check makes it again.
    Retry,
}

impl WaitReason {
    /// For status and log.
    pub fn describe(self) -> &'static str {
        match self {
            Self::NoMachine => "no virtual machine runs",
            Self::MemoryPressure => "tasks of the host wait for memory",
            Self::Settling => "a new virtual machine still fills its memory",
            Self::RecentPlan => "no new virtual machine since the last plan",
            Self::Retry => "the last plan was not completed, and is made again",
        }
    }
}

/// What is known of the machines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeeperState {
    machines: BTreeMap<ProcessId, KnownMachine>,
    last_plan: Option<Duration>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct KnownMachine {
    first_seen: Duration,
    resident: Pages,
    has_settled: bool,
    is_planned: bool,
    has_known_contents: bool,
    is_planned_with_contents: bool,
    rests_until: Duration,
    moves: u32,
}

impl KeeperState {
    /// Decide what to do at `now`, a time since the start. `replan_interval` is the time after which all machines are
    /// planned again.
    pub fn step(
        &mut self,
        machines: &[RunningMachine],
        is_memory_short: bool,
        replan_interval: Duration,
        now: Duration,
    ) -> KeeperStep {
        self.observe(machines, now);
        if machines.is_empty() {
            return KeeperStep::Wait(WaitReason::NoMachine);
        }
        if is_memory_short {
            return KeeperStep::Wait(WaitReason::MemoryPressure);
        }
        let is_due = self.last_plan.is_none_or(|last| now.saturating_sub(last) >= replan_interval);
        let is_new = |machine: &KnownMachine| {
            !machine.is_planned || machine.has_known_contents && !machine.is_planned_with_contents
        };
        let has_new = self.machines.values().any(|machine| machine.has_settled && is_new(machine));
        if !has_new && (!is_due || self.machines.values().all(|machine| !machine.has_settled)) {
            return KeeperStep::Wait(self.wait_reason());
        }
        self.last_plan = Some(now);
        let mut resting = BTreeSet::new();
        for (process, machine) in &mut self.machines {
            if !machine.has_settled || machine.rests_until > now {
                resting.insert(*process);
            }
            machine.is_planned |= machine.has_settled;
            machine.is_planned_with_contents |= machine.has_settled && machine.has_known_contents;
        }
        KeeperStep::Plan { resting }
    }

    /// What the next plan waits for if memory is not short.
    pub fn wait_reason(&self) -> WaitReason {
        match self.last_plan {
            _ if self.machines.values().any(|machine| !machine.has_settled) => WaitReason::Settling,
            Some(_) => WaitReason::RecentPlan,
            None => WaitReason::Retry,
        }
    }

    /// Plans again at the next step, because the last plan could not be made or carried out.
    pub fn retry_plan(&mut self) {
        self.last_plan = None;
        self.machines.values_mut().for_each(|machine| {
            (machine.is_planned, machine.is_planned_with_contents) = (false, false);
        });
    }

    /// Notes that machines were moved at `now`, or could not be.
    pub fn note_moves(&mut self, moved: &[ProcessId], now: Duration) {
        for process in moved {
            let Some(machine) = self.machines.get_mut(process) else { continue };
            let backoff = FIRST_MOVE_BACKOFF.saturating_mul(1 << machine.moves.min(16)).min(MAX_MOVE_BACKOFF);
            machine.rests_until = now + backoff;
            machine.moves += 1;
        }
    }

    fn observe(&mut self, machines: &[RunningMachine], now: Duration) {
        let running: BTreeSet<ProcessId> = machines.iter().map(|machine| machine.process).collect();
        self.machines.retain(|process, _| running.contains(process));
        for machine in machines {
            let is_new = !self.machines.contains_key(&machine.process);
            let known = self.machines.entry(machine.process).or_default();
            if is_new {
                known.first_seen = now;
            } else {
                let change = known.resident.0.abs_diff(machine.resident.0) as f64;
                let is_stable = change <= SETTLED_CHANGE * machine.resident.0 as f64;
                let is_ready = is_stable && machine.has_known_contents;
                known.has_settled |= is_ready || now.saturating_sub(known.first_seen) >= MAX_SETTLE_TIME;
            }
            known.resident = machine.resident;
            known.has_known_contents = machine.has_known_contents;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use proptest::prelude::*;

    const REPLAN: Duration = Duration::from_secs(3600);

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time: 1 }
    }

    fn machine(pid: u32, pages: u64) -> RunningMachine {
        RunningMachine { process: process(pid), resident: Pages(pages), has_known_contents: true }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn plan(resting: &[u32]) -> KeeperStep {
        KeeperStep::Plan { resting: resting.iter().map(|&pid| process(pid)).collect() }
    }

    #[test]
    fn new_machine_is_planned_once_it_has_settled() {
        let mut state = KeeperState::default();
        let mut step = |machines: &[RunningMachine], seconds| state.step(machines, false, REPLAN, at(seconds));
        assert_eq!(step(&[], 0), KeeperStep::Wait(WaitReason::NoMachine));
        assert_eq!(step(&[machine(1, 100)], 10), KeeperStep::Wait(WaitReason::Settling));
        assert_eq!(step(&[machine(1, 5000)], 20), KeeperStep::Wait(WaitReason::Settling));
        assert_eq!(step(&[machine(1, 5100)], 30), plan(&[]));
        assert_eq!(step(&[machine(1, 5100)], 40), KeeperStep::Wait(WaitReason::RecentPlan));
        assert_eq!(step(&[machine(1, 5100), machine(2, 10)], 50), KeeperStep::Wait(WaitReason::Settling));
        // A machine that never settles is planned after two minutes.
        assert_eq!(step(&[machine(1, 5100), machine(2, 1000)], 100), KeeperStep::Wait(WaitReason::Settling));
        assert_eq!(step(&[machine(1, 5100), machine(2, 9000)], 170), plan(&[]));
        assert_eq!(step(&[machine(1, 5100), machine(2, 9000)], 3700), KeeperStep::Wait(WaitReason::RecentPlan));
        assert_eq!(step(&[machine(1, 5100), machine(2, 9000)], 3770), plan(&[]), "from time to time");
    }

    #[test]
    fn new_machine_waits_for_its_contents_and_is_planned_again_with_them() {
        let mut state = KeeperState::default();
        let mut step = |has_known_contents, seconds| {
            state.step(&[RunningMachine { has_known_contents, ..machine(1, 100) }], false, REPLAN, at(seconds))
        };
        assert_eq!(step(false, 0), KeeperStep::Wait(WaitReason::Settling));
        assert_eq!(step(false, 60), KeeperStep::Wait(WaitReason::Settling));
        assert_eq!(step(false, 120), plan(&[]), "it waits no longer");
        assert_eq!(step(false, 150), KeeperStep::Wait(WaitReason::RecentPlan));
        assert_eq!(step(true, 180), plan(&[]));
        assert_eq!(step(true, 210), KeeperStep::Wait(WaitReason::RecentPlan));
    }

    #[test]
    fn failed_plan_is_made_again_at_the_next_step() {
        let mut state = KeeperState::default();
        let machines = [machine(1, 100)];
        state.step(&machines, false, REPLAN, at(0));
        assert_eq!(state.step(&machines, false, REPLAN, at(10)), plan(&[]));
        state.retry_plan();
        assert_eq!(state.step(&machines, false, REPLAN, at(20)), plan(&[]));
        assert_eq!(state.step(&machines, false, REPLAN, at(30)), KeeperStep::Wait(WaitReason::RecentPlan));
    }

    #[test]
    fn nothing_is_planned_under_pressure() {
        let mut state = KeeperState::default();
        let machines = [machine(1, 100)];
        state.step(&machines, true, REPLAN, at(0));
        assert_eq!(state.step(&machines, true, REPLAN, at(200)), KeeperStep::Wait(WaitReason::MemoryPressure));
        assert_eq!(state.step(&machines, false, REPLAN, at(210)), plan(&[]), "as soon as it is over");
    }

    #[test]
    fn moved_machine_rests_twice_as_long_each_time() {
        let mut state = KeeperState::default();
        let machines = [machine(1, 100), machine(2, 100)];
        state.step(&machines, false, REPLAN, at(0));
        assert_eq!(state.step(&machines, false, at(0), at(1)), plan(&[]));
        state.note_moves(&[process(1)], at(1));
        assert_eq!(state.step(&machines, false, at(0), at(600)), plan(&[1]));
        assert_eq!(state.step(&machines, false, at(0), at(601)), plan(&[]));
        state.note_moves(&[process(1)], at(601));
        assert_eq!(state.step(&machines, false, at(0), at(1800)), plan(&[1]));
        assert_eq!(state.step(&machines, false, at(0), at(1801)), plan(&[]));
        // Another process with the same number is another machine.
        let other = RunningMachine { process: ProcessId { pid: Pid(1), start_time: 9 }, ..machine(1, 100) };
        assert_eq!(state.step(&[other], false, at(0), at(1802)), KeeperStep::Wait(WaitReason::Settling));
    }

    proptest! {
        #[test]
        fn machine_is_not_moved_while_it_rests(steps in prop::collection::vec((1_u64..4000, any::<bool>()), 1..40)) {
            let (mut state, mut now, mut rests_until, mut backoff) = (KeeperState::default(), 0, 0, 600);
            for (seconds, moves) in steps {
                now += seconds;
                if let KeeperStep::Plan { resting } = state.step(&[machine(1, 100)], false, at(1), at(now)) {
                    prop_assert_eq!(resting.contains(&process(1)), rests_until > now);
                    if moves && !resting.contains(&process(1)) {
                        state.note_moves(&[process(1)], at(now));
                        rests_until = now + backoff;
                        backoff = (2 * backoff).min(24 * 3600);
                    }
                }
            }
        }
    }
}
