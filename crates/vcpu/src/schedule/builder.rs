//! Builds a schedule from the events of a scheduler.

use super::{
    CpuSchedule, IDLE, RunEnd, RunInterval, ScheduledVm, SchedulerEvent, SchedulerEventKind, SpinInterval, Task,
    TaskIndex, Tid, VmIndex, WaitCause, WaitInterval, Yield,
};
use std::collections::{BTreeSet, HashMap};

/// Collects events and makes a [`CpuSchedule`] of them.
///
/// Events may come in any order, because sources record each CPU on its own. Events with equal times keep the order in
/// which they were added.
#[derive(Clone, Debug, Default)]
pub struct ScheduleBuilder {
    events: Vec<SchedulerEvent>,
    cpus: BTreeSet<u32>,
    vms: Vec<ScheduledVm>,
    tasks: Vec<Task>,
    index_of_tid: HashMap<Tid, TaskIndex>,
    span: Option<(u64, u64)>,
    without_wakeups: bool,
    has_spins: bool,
    lost_events: u64,
}

/// What a task does at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskState {
    /// No event so far.
    Unseen,
    /// Not known, because an event was lost.
    Unknown,
    Sleeping,
    Running {
        cpu: u32,
    },
    Waiting {
        cpu: u32,
        from: u64,
        cause: WaitCause,
    },
}

impl ScheduleBuilder {
    /// A builder without events.
    pub fn new() -> Self {
        Self::default()
    }

    /// Names the CPUs of the host. CPUs of events are added by themselves.
    pub fn add_cpus(&mut self, cpus: impl IntoIterator<Item = u32>) {
        self.cpus.extend(cpus);
    }

    /// Adds a machine or group.
    pub fn add_vm(&mut self, name: impl Into<String>) -> VmIndex {
        self.vms.push(ScheduledVm { name: name.into() });
        self.vms.len() - 1
    }

    /// Describes a task. A later description of the same task replaces an earlier one. A task of an event that is never
    /// described has its number as name. The idle task is not described.
    pub fn set_task(&mut self, task: Task) {
        if task.tid != IDLE {
            let index = self.task(task.tid);
            self.tasks[index] = task;
        }
    }

    /// The description of a task so far.
    pub fn described_task(&self, tid: Tid) -> Option<&Task> {
        self.index_of_tid.get(&tid).map(|&index| &self.tasks[index])
    }

    /// Sets the observed time, in nanoseconds. By default it reaches from the first to the last event. Events outside
    /// are ignored.
    pub fn set_span(&mut self, start: u64, end: u64) {
        self.span = Some((start, end.max(start)));
    }

    /// States that the source does not record wake-ups.
    pub fn set_without_wakeups(&mut self) {
        self.without_wakeups = true;
    }

    /// States that the source records spinning, even if none occurs.
    pub fn set_has_spins(&mut self) {
        self.has_spins = true;
    }

    /// Adds to the count of events that the source lost.
    pub fn add_lost_events(&mut self, count: u64) {
        self.lost_events = self.lost_events.saturating_add(count);
    }

    /// Adds an event.
    pub fn add_event(&mut self, event: SchedulerEvent) {
        self.events.push(event);
    }

    /// Number of events so far.
    pub fn event_count(&self) -> usize {
        self.events.len()
    }

    fn task(&mut self, tid: Tid) -> TaskIndex {
        *self.index_of_tid.entry(tid).or_insert_with(|| {
            self.tasks.push(Task { tid, process: None, name: tid.to_string(), vm: None, vcpu: None });
            self.tasks.len() - 1
        })
    }

    /// The schedule of all events.
    pub fn finish(mut self) -> CpuSchedule {
        let mut events = std::mem::take(&mut self.events);
        events.sort_by_key(|event| event.time);
        let (start, end) = self.span.unwrap_or_else(|| match (events.first(), events.last()) {
            (Some(first), Some(last)) => (first.time, last.time),
            _ => (0, 0),
        });
        events.retain(|event| (start..=end).contains(&event.time));
        for event in &events {
            self.register(event.kind);
        }
        let mut replay = Replay::new(start, end, self.tasks.len());
        for event in &events {
            replay.advance(event.time, event.kind, &self.index_of_tid);
        }
        replay.close();
        CpuSchedule {
            start,
            end,
            cpus: self.cpus.into_iter().collect(),
            vms: self.vms,
            tasks: self.tasks,
            runs: sorted_by_start(replay.runs, |run| (run.from, run.cpu)),
            waits: sorted_by_start(replay.waits, |wait| (wait.from, wait.task)),
            spins: sorted_by_start(replay.spins, |spin| (spin.from, spin.task)),
            yields: replay.yields,
            has_wakeups: !self.without_wakeups,
            has_spins: self.has_spins,
            lost_events: self.lost_events,
        }
    }

    /// Gives each task and CPU of an event its place.
    fn register(&mut self, kind: SchedulerEventKind) {
        let (tids, cpu) = match kind {
            SchedulerEventKind::Switch { cpu, previous, next, .. } => ([previous, next], Some(cpu)),
            SchedulerEventKind::Wakeup { task, cpu } | SchedulerEventKind::Migrate { task, cpu } => {
                ([task, IDLE], Some(cpu))
            }
            SchedulerEventKind::SpinBegin { task } | SchedulerEventKind::SpinEnd { task } => {
                self.has_spins = true;
                ([task, IDLE], None)
            }
            SchedulerEventKind::Yield { task, to } => ([task, to.unwrap_or(IDLE)], None),
        };
        self.cpus.extend(cpu);
        for tid in tids.into_iter().filter(|&tid| tid != IDLE) {
            self.task(tid);
        }
    }
}

fn sorted_by_start<T, K: Ord>(mut items: Vec<T>, key: impl Fn(&T) -> K) -> Vec<T> {
    items.sort_by_key(key);
    items
}

/// The state of all tasks while events are replayed.
struct Replay {
    start: u64,
    end: u64,
    states: Vec<TaskState>,
    /// For each CPU, the task that runs and since when. A CPU without a switch so far is absent.
    current: HashMap<u32, (Option<TaskIndex>, u64)>,
    spinning: HashMap<TaskIndex, u64>,
    runs: Vec<RunInterval>,
    waits: Vec<WaitInterval>,
    spins: Vec<SpinInterval>,
    yields: Vec<Yield>,
}

impl Replay {
    fn new(start: u64, end: u64, task_count: usize) -> Self {
        Self {
            start,
            end,
            states: vec![TaskState::Unseen; task_count],
            current: HashMap::new(),
            spinning: HashMap::new(),
            runs: Vec::new(),
            waits: Vec::new(),
            spins: Vec::new(),
            yields: Vec::new(),
        }
    }

    fn advance(&mut self, time: u64, kind: SchedulerEventKind, index_of_tid: &HashMap<Tid, TaskIndex>) {
        let index = |tid: Tid| index_of_tid.get(&tid).copied();
        match kind {
            SchedulerEventKind::Switch { cpu, previous, previous_runnable, next } => {
                self.switch_out(time, cpu, index(previous), previous_runnable);
                self.switch_in(time, cpu, index(next));
            }
            SchedulerEventKind::Wakeup { task, cpu } => {
                if let Some(task) = index(task)
                    && matches!(self.states[task], TaskState::Unseen | TaskState::Unknown | TaskState::Sleeping)
                {
                    self.states[task] = TaskState::Waiting { cpu, from: time, cause: WaitCause::Woken };
                }
            }
            SchedulerEventKind::Migrate { task, cpu } => {
                if let Some(task) = index(task)
                    && let TaskState::Waiting { cpu: old_cpu, from, cause } = self.states[task]
                    && old_cpu != cpu
                {
                    // A move at the moment at which the wait began leaves no interval behind.
                    let cause = if from == time { cause } else { WaitCause::Moved };
                    self.end_wait(time, task);
                    self.states[task] = TaskState::Waiting { cpu, from: time, cause };
                }
            }
            SchedulerEventKind::SpinBegin { task } => {
                if let Some(task) = index(task) {
                    self.spinning.entry(task).or_insert(time);
                }
            }
            SchedulerEventKind::SpinEnd { task } => {
                if let Some(task) = index(task)
                    && let Some(from) = self.spinning.remove(&task)
                {
                    self.push_spin(task, from, time);
                }
            }
            SchedulerEventKind::Yield { task, to } => {
                if let Some(task) = index(task) {
                    self.yields.push(Yield { time, task, to: to.and_then(index) });
                }
            }
        }
    }

    /// The task that the trace says ran until now stops. If another one was thought to run, its end was not recorded.
    fn switch_out(&mut self, time: u64, cpu: u32, previous: Option<TaskIndex>, runnable: bool) {
        let end = if runnable { RunEnd::Preempted } else { RunEnd::Slept };
        let known = self.current.remove(&cpu);
        match (known, previous) {
            (Some((Some(task), from)), previous) => {
                let end = if previous == Some(task) { end } else { RunEnd::Unknown };
                self.push_run(task, cpu, from, time, end);
                self.states[task] = TaskState::Unknown;
            }
            (None, Some(task)) if self.states[task] == TaskState::Unseen => {
                self.push_run(task, cpu, self.start, time, end);
            }
            _ => {}
        }
        if let Some(task) = previous {
            self.leave_other_cpu(time, task);
            self.end_wait(time, task);
            self.states[task] = if runnable {
                TaskState::Waiting { cpu, from: time, cause: WaitCause::Preempted }
            } else {
                TaskState::Sleeping
            };
        }
    }

    fn switch_in(&mut self, time: u64, cpu: u32, next: Option<TaskIndex>) {
        if let Some(task) = next {
            self.leave_other_cpu(time, task);
            // The kernel reports a task that waited elsewhere and was moved without an event by its switch alone.
            self.end_wait(time, task);
            self.states[task] = TaskState::Running { cpu };
        }
        self.current.insert(cpu, (next, time));
    }

    /// Ends the run of a task on a CPU whose switch event was lost.
    fn leave_other_cpu(&mut self, time: u64, task: TaskIndex) {
        if let TaskState::Running { cpu } = self.states[task]
            && let Some((Some(running), from)) = self.current.get(&cpu).copied()
            && running == task
        {
            self.push_run(task, cpu, from, time, RunEnd::Unknown);
            // Which task runs there now is not known. The entry stays: the CPU did have a switch, so its next task did
            // not run since the start.
            self.current.insert(cpu, (None, time));
            self.states[task] = TaskState::Unknown;
        }
    }

    fn end_wait(&mut self, time: u64, task: TaskIndex) {
        if let TaskState::Waiting { cpu, from, cause } = self.states[task]
            && from < time
        {
            self.waits.push(WaitInterval { task, cpu, from, to: time, cause });
        }
    }

    fn push_run(&mut self, task: TaskIndex, cpu: u32, from: u64, to: u64, end: RunEnd) {
        if from < to {
            self.runs.push(RunInterval { task, cpu, from, to, end });
        }
    }

    fn push_spin(&mut self, task: TaskIndex, from: u64, to: u64) {
        if from < to {
            self.spins.push(SpinInterval { task, from, to });
        }
    }

    /// Ends all that goes on at the end of the observed time.
    fn close(&mut self) {
        let end = self.end;
        let current: Vec<_> = self.current.drain().collect();
        for (cpu, (task, from)) in current {
            if let Some(task) = task {
                self.push_run(task, cpu, from, end, RunEnd::Unknown);
            }
        }
        for task in 0..self.states.len() {
            self.end_wait(end, task);
        }
        let spinning: Vec<_> = self.spinning.drain().collect();
        for (task, from) in spinning {
            self.push_spin(task, from, end);
        }
    }
}

#[cfg(test)]
#[path = "builder_tests.rs"]
mod tests;
