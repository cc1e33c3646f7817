//! Measures of a schedule, for each virtual machine or group of threads.
//!
//! At each moment a vCPU runs, waits in a run queue, or does neither. From these states follow how often siblings run
//! together, whether they share a run queue, and how long they wait. All sums are exact, in nanoseconds.
//!
//! Limits: the states are as known as in the [`CpuSchedule`]; a vCPU without an event counts as neither running nor
//! waiting. A free CPU may be forbidden to a vCPU by its affinity, which a trace does not tell.

use crate::schedule::{CpuSchedule, RunEnd, SpinInterval, TaskIndex, VmIndex, WaitCause, WaitInterval};
use std::collections::{HashMap, HashSet};

/// Measures of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduleMeasures {
    /// The observed time in nanoseconds.
    pub duration_ns: u64,
    /// Time of all CPUs in which they ran a task, in nanoseconds.
    pub busy_ns: u64,
    /// Time of all CPUs in which they ran none, in nanoseconds.
    pub idle_ns: u64,
    /// One entry for each machine, in the order of the schedule.
    pub vms: Vec<VmMeasures>,
}

/// Measures of one machine. Times of single vCPUs are added up; the other times are at most the observed time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmMeasures {
    /// vCPUs that the schedule has.
    pub vcpus: usize,
    /// Time in which vCPUs ran, added up over vCPUs.
    pub run_ns: u64,
    /// Time in which vCPUs waited in a run queue, added up over vCPUs.
    pub ready_ns: u64,
    /// The part of the waiting time that began with a preemption, added up over vCPUs.
    pub preempted_ns: u64,
    /// Time in which at least one vCPU was runnable: it ran or waited in a run queue.
    pub runnable_ns: u64,
    /// The part of [`Self::runnable_ns`] in which all runnable vCPUs ran, or all CPUs ran vCPUs of the machine.
    pub co_run_ns: u64,
    /// Time in which at least two vCPUs were runnable.
    pub siblings_runnable_ns: u64,
    /// The part of [`Self::siblings_runnable_ns`] in which all runnable vCPUs ran, or all CPUs ran vCPUs of the machine.
    pub siblings_co_run_ns: u64,
    /// Time in which a run queue had at least two of the runnable vCPUs.
    pub stacked_ns: u64,
    /// The part of [`Self::stacked_ns`] in which another CPU had no runnable task.
    pub stacked_beside_free_cpu_ns: u64,
    /// Time in which vCPUs were preempted while a sibling ran, added up over preempted vCPUs.
    pub preempted_while_sibling_runs_ns: u64,
    /// Time in which vCPUs were preempted while a running sibling spun, added up over preempted vCPUs. None if the
    /// source does not tell of spins.
    pub preempted_while_sibling_spins_ns: Option<u64>,
    /// Time from a wake-up of a vCPU until it runs. None if the source does not tell of wake-ups.
    pub wake_to_run: Option<DelayMeasures>,
    /// Runs of vCPUs that ended because another task was chosen.
    pub preemptions: u64,
    /// Runs of vCPUs that ended because the vCPU had to wait for an event.
    pub sleeps: u64,
    /// Runs of vCPUs that began on another CPU than the vCPU's previous run.
    pub migrations: u64,
}

/// Distribution of delays. Quantiles are observed values, by the nearest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayMeasures {
    /// Number of delays. The other figures are zero if there is none.
    pub count: u64,
    /// Median in nanoseconds.
    pub median_ns: u64,
    /// 95th percentile in nanoseconds.
    pub p95_ns: u64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: u64,
    /// Longest delay in nanoseconds.
    pub max_ns: u64,
    /// Waits after a wake-up whose end is not known, because the schedule ends first. They are not among the delays.
    pub unfinished: u64,
}

impl DelayMeasures {
    fn new(mut delays: Vec<u64>, unfinished: u64) -> Self {
        delays.sort_unstable();
        let rank = |percent: usize| match (delays.len() * percent).div_ceil(100) {
            0 => 0,
            rank => delays[rank - 1],
        };
        Self {
            count: delays.len() as u64,
            median_ns: rank(50),
            p95_ns: rank(95),
            p99_ns: rank(99),
            max_ns: rank(100),
            unfinished,
        }
    }
}

impl VmMeasures {
    /// Share of the time with a runnable vCPU in which all runnable vCPUs ran; none without such a time.
    pub fn co_run_fraction(&self) -> Option<f64> {
        share(self.co_run_ns, self.runnable_ns)
    }

    /// Share of the time with two runnable vCPUs or more in which all runnable vCPUs ran; none without such a time.
    pub fn siblings_co_run_fraction(&self) -> Option<f64> {
        share(self.siblings_co_run_ns, self.siblings_runnable_ns)
    }

    /// Share of the time with two runnable vCPUs or more in which a run queue had two of them; none without such a time.
    pub fn stacked_fraction(&self) -> Option<f64> {
        share(self.stacked_ns, self.siblings_runnable_ns)
    }

    /// Like [`Self::stacked_fraction`], as far as another CPU was free.
    pub fn stacked_beside_free_cpu_fraction(&self) -> Option<f64> {
        share(self.stacked_beside_free_cpu_ns, self.siblings_runnable_ns)
    }

    /// Ends of runs.
    pub fn switches(&self) -> u64 {
        self.preemptions + self.sleeps
    }
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// The measures of a schedule.
pub fn measure(schedule: &CpuSchedule) -> ScheduleMeasures {
    let duration_ns = schedule.duration();
    let busy_ns = schedule.runs.iter().map(|run| run.to - run.from).sum();
    let causes = first_causes(&schedule.waits);
    let mut sweep = Sweep::new(schedule);
    for (time, change) in state_changes(schedule, &causes) {
        sweep.apply(time, change);
    }
    sweep.settle_all(schedule.end);
    let mut vms = sweep.into_measures();
    count_runs(schedule, &mut vms);
    add_wake_delays(schedule, &causes, &mut vms);
    ScheduleMeasures {
        duration_ns,
        busy_ns,
        idle_ns: duration_ns.saturating_mul(schedule.cpus.len() as u64).saturating_sub(busy_ns),
        vms,
    }
}

/// How each wait began, with waits that follow a move traced back to the first one.
fn first_causes(waits: &[WaitInterval]) -> Vec<WaitCause> {
    let mut last: HashMap<TaskIndex, (u64, WaitCause)> = HashMap::new();
    waits
        .iter()
        .map(|wait| {
            let cause = match (wait.cause, last.get(&wait.task)) {
                (WaitCause::Moved, Some(&(to, cause))) if to == wait.from => cause,
                (cause, _) => cause,
            };
            last.insert(wait.task, (wait.to, cause));
            cause
        })
        .collect()
}

/// A change of the state of a task.
#[derive(Clone, Copy, Debug)]
struct StateChange {
    task: TaskIndex,
    /// Whether the state begins or ends.
    begins: bool,
    state: ObservedState,
}

#[derive(Clone, Copy, Debug)]
enum ObservedState {
    Runs { cpu: u32 },
    Waits { cpu: u32, is_preempted: bool },
    Spins,
}

/// All changes, ordered by time. Times between changes with equal times are zero, so their order has no effect.
fn state_changes(schedule: &CpuSchedule, causes: &[WaitCause]) -> Vec<(u64, StateChange)> {
    let mut changes = Vec::with_capacity(2 * (schedule.runs.len() + schedule.waits.len() + schedule.spins.len()));
    let mut add = |task, from, to, state| {
        changes.push((from, StateChange { task, begins: true, state }));
        changes.push((to, StateChange { task, begins: false, state }));
    };
    for run in &schedule.runs {
        add(run.task, run.from, run.to, ObservedState::Runs { cpu: run.cpu });
    }
    for (wait, cause) in schedule.waits.iter().zip(causes) {
        let is_preempted = *cause == WaitCause::Preempted;
        add(wait.task, wait.from, wait.to, ObservedState::Waits { cpu: wait.cpu, is_preempted });
    }
    for &SpinInterval { task, from, to } in &schedule.spins {
        add(task, from, to, ObservedState::Spins);
    }
    changes.sort_by_key(|(time, _)| *time);
    changes
}

/// The state of one machine at a time.
#[derive(Clone, Debug, Default)]
struct VmState {
    /// Until when the measures are complete.
    settled: u64,
    running: i64,
    waiting: i64,
    preempted: i64,
    /// vCPUs that run and spin.
    spinning: i64,
    /// Runnable vCPUs in each run queue.
    queued: HashMap<u32, i64>,
    /// Run queues with at least two of them.
    stacked_queues: i64,
    measures: VmMeasures,
}

/// Adds up the measures while time advances.
struct Sweep<'a> {
    schedule: &'a CpuSchedule,
    vms: Vec<VmState>,
    /// Runnable tasks of each CPU.
    queued: HashMap<u32, i64>,
    /// CPUs without a runnable task.
    free_cpus: i64,
    /// For each task, whether it runs, and whether it spins.
    running_and_spinning: Vec<(bool, bool)>,
}

impl<'a> Sweep<'a> {
    fn new(schedule: &'a CpuSchedule) -> Self {
        let vms = (0..schedule.vms.len()).map(|vm| VmState {
            settled: schedule.start,
            measures: VmMeasures {
                vcpus: schedule.vcpus(vm).len(),
                preempted_while_sibling_spins_ns: schedule.has_spins.then_some(0),
                ..VmMeasures::default()
            },
            ..VmState::default()
        });
        Self {
            schedule,
            vms: vms.collect(),
            queued: HashMap::new(),
            free_cpus: schedule.cpus.len() as i64,
            running_and_spinning: vec![(false, false); schedule.tasks.len()],
        }
    }

    fn apply(&mut self, time: u64, change: StateChange) {
        let step = if change.begins { 1 } else { -1 };
        let task = &self.schedule.tasks[change.task];
        let vm = task.vm.filter(|_| task.vcpu.is_some());
        if let ObservedState::Runs { cpu } | ObservedState::Waits { cpu, .. } = change.state {
            let queued = self.queued.entry(cpu).or_default();
            let was_free = *queued == 0;
            *queued += step;
            let is_free = *queued == 0;
            if was_free != is_free {
                self.change_free_cpus(time, if is_free { 1 } else { -1 });
            }
        }
        if let Some(vm) = vm {
            self.settle(vm, time);
            self.change_vm(vm, change, step);
        }
    }

    /// Counts a CPU that becomes free or busy. Only whether there is a free CPU has an effect, on machines with stacked
    /// vCPUs.
    fn change_free_cpus(&mut self, time: u64, step: i64) {
        let after = self.free_cpus + step;
        if (self.free_cpus > 0) != (after > 0) {
            for vm in 0..self.vms.len() {
                if self.vms[vm].stacked_queues > 0 {
                    self.settle(vm, time);
                }
            }
        }
        self.free_cpus = after;
    }

    fn change_vm(&mut self, vm: VmIndex, change: StateChange, step: i64) {
        let state = &mut self.vms[vm];
        let (runs, spins) = &mut self.running_and_spinning[change.task];
        let spun = *runs && *spins;
        match change.state {
            ObservedState::Runs { .. } => {
                *runs = change.begins;
                state.running += step;
            }
            ObservedState::Waits { is_preempted, .. } => {
                state.waiting += step;
                state.preempted += if is_preempted { step } else { 0 };
            }
            ObservedState::Spins => *spins = change.begins,
        }
        state.spinning += i64::from(*runs && *spins) - i64::from(spun);
        if let ObservedState::Runs { cpu } | ObservedState::Waits { cpu, .. } = change.state {
            let queued = state.queued.entry(cpu).or_default();
            let was_stacked = *queued >= 2;
            *queued += step;
            state.stacked_queues += i64::from(*queued >= 2) - i64::from(was_stacked);
        }
    }

    /// Adds the time since the last change of a machine to its measures.
    fn settle(&mut self, vm: VmIndex, time: u64) {
        let cpus = self.schedule.cpus.len() as i64;
        let has_free_cpu = self.free_cpus > 0;
        let state = &mut self.vms[vm];
        let elapsed = time - state.settled;
        state.settled = time;
        let measures = &mut state.measures;
        let runnable = state.running + state.waiting;
        let co_runs = state.waiting == 0 || state.running >= cpus;
        measures.run_ns += elapsed * state.running as u64;
        measures.ready_ns += elapsed * state.waiting as u64;
        measures.preempted_ns += elapsed * state.preempted as u64;
        let add_if = |sum: &mut u64, condition: bool| *sum += if condition { elapsed } else { 0 };
        add_if(&mut measures.runnable_ns, runnable >= 1);
        add_if(&mut measures.co_run_ns, runnable >= 1 && co_runs);
        add_if(&mut measures.siblings_runnable_ns, runnable >= 2);
        add_if(&mut measures.siblings_co_run_ns, runnable >= 2 && co_runs);
        add_if(&mut measures.stacked_ns, state.stacked_queues > 0);
        add_if(&mut measures.stacked_beside_free_cpu_ns, state.stacked_queues > 0 && has_free_cpu);
        let preempted = elapsed * state.preempted as u64;
        measures.preempted_while_sibling_runs_ns += if state.running > 0 { preempted } else { 0 };
        if let Some(sum) = &mut measures.preempted_while_sibling_spins_ns {
            *sum += if state.spinning > 0 { preempted } else { 0 };
        }
    }

    fn settle_all(&mut self, end: u64) {
        for vm in 0..self.vms.len() {
            self.settle(vm, end);
        }
    }

    fn into_measures(self) -> Vec<VmMeasures> {
        self.vms.into_iter().map(|vm| vm.measures).collect()
    }
}

/// The machine of a task that is a vCPU.
fn vm_of_vcpu(schedule: &CpuSchedule, task: TaskIndex) -> Option<VmIndex> {
    let task = &schedule.tasks[task];
    task.vcpu.and(task.vm)
}

fn count_runs(schedule: &CpuSchedule, vms: &mut [VmMeasures]) {
    let mut last_cpu: HashMap<TaskIndex, u32> = HashMap::new();
    for run in &schedule.runs {
        let Some(vm) = vm_of_vcpu(schedule, run.task) else { continue };
        match run.end {
            RunEnd::Preempted => vms[vm].preemptions += 1,
            RunEnd::Slept => vms[vm].sleeps += 1,
            RunEnd::Unknown => {}
        }
        let previous = last_cpu.insert(run.task, run.cpu);
        vms[vm].migrations += u64::from(previous.is_some_and(|cpu| cpu != run.cpu));
    }
}

/// The delay of a wake-up is the wait after it, with the waits that follow moves, until a run begins.
fn add_wake_delays(schedule: &CpuSchedule, causes: &[WaitCause], vms: &mut [VmMeasures]) {
    if !schedule.has_wakeups {
        return;
    }
    let mut wakes: Vec<WakeWait> = Vec::new();
    let mut last_wake: HashMap<TaskIndex, usize> = HashMap::new();
    for (wait, _) in schedule.waits.iter().zip(causes).filter(|(_, cause)| **cause == WaitCause::Woken) {
        let known = last_wake.get(&wait.task).copied();
        match known {
            Some(index) if wait.cause == WaitCause::Moved => wakes[index].to = wait.to,
            _ => {
                last_wake.insert(wait.task, wakes.len());
                wakes.push(WakeWait { task: wait.task, from: wait.from, to: wait.to });
            }
        }
    }
    let run_starts: HashSet<(TaskIndex, u64)> = schedule.runs.iter().map(|run| (run.task, run.from)).collect();
    let mut delays: Vec<(Vec<u64>, u64)> = vec![Default::default(); vms.len()];
    for wake in wakes {
        let Some(vm) = vm_of_vcpu(schedule, wake.task) else { continue };
        if run_starts.contains(&(wake.task, wake.to)) {
            delays[vm].0.push(wake.to - wake.from);
        } else {
            delays[vm].1 += 1;
        }
    }
    for (vm, (delays, unfinished)) in vms.iter_mut().zip(delays) {
        vm.wake_to_run = Some(DelayMeasures::new(delays, unfinished));
    }
}

/// The time from a wake-up until the end of the wait.
struct WakeWait {
    task: TaskIndex,
    from: u64,
    to: u64,
}

#[cfg(test)]
#[path = "measures_tests.rs"]
mod tests;
