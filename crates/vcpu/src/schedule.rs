//! A schedule: which task ran on which CPU, and which tasks waited for one, over a span of time.
//!
//! Every source gives the same type: recorded trace events, a live recording, and the model of a host. A source feeds
//! [`ScheduleBuilder`] with [`SchedulerEvent`]s, in any order. The events are those of the kernel's tracepoints
//! `sched_switch`, `sched_wakeup` and `sched_migrate_task` (include/trace/events/sched.h).
//!
//! Limits: a trace does not say in which state a task was before its first event. Such a task counts as neither
//! running nor waiting until then. A task that runs when its CPU's first event is recorded counts as running since the
//! start of the schedule.

mod builder;

pub use builder::ScheduleBuilder;

/// The kernel's identifier of a thread. [`IDLE`] is the idle task of each CPU.
pub type Tid = u32;

/// The thread number of the idle tasks.
pub const IDLE: Tid = 0;

/// A position in [`CpuSchedule::tasks`].
pub type TaskIndex = usize;

/// A position in [`CpuSchedule::vms`].
pub type VmIndex = usize;

/// Which task ran where and when. All times are nanoseconds of one clock, the trace's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuSchedule {
    /// Start of the observed time.
    pub start: u64,
    /// End of the observed time; not before the start.
    pub end: u64,
    /// The CPUs, ascending. A CPU without any interval was idle all the time.
    pub cpus: Vec<u32>,
    /// The virtual machines, or other groups of threads that should run together.
    pub vms: Vec<ScheduledVm>,
    /// The tasks, without the idle tasks.
    pub tasks: Vec<Task>,
    /// When tasks ran, ordered by start. Intervals of one CPU do not overlap, nor do those of one task.
    pub runs: Vec<RunInterval>,
    /// When tasks waited in the run queue of a CPU, ordered by start. Intervals of one task do not overlap.
    pub waits: Vec<WaitInterval>,
    /// When vCPUs spun for a lock, ordered by start; empty if the source does not tell.
    pub spins: Vec<SpinInterval>,
    /// When tasks gave their CPU up by a yield, ordered by time; empty if the source does not tell.
    pub yields: Vec<Yield>,
    /// Whether the source tells when tasks wake up. Without it, a task that was woken is not seen to wait.
    pub has_wakeups: bool,
    /// Whether the source tells when vCPUs spin.
    pub has_spins: bool,
    /// Events that the source lost, as far as it counts them.
    pub lost_events: u64,
}

/// A virtual machine or another group of threads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledVm {
    /// Its name for people.
    pub name: String,
}

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    /// Its number.
    pub tid: Tid,
    /// Its process, if the source tells.
    pub process: Option<u32>,
    /// Its name.
    pub name: String,
    /// The machine or group to which it belongs.
    pub vm: Option<VmIndex>,
    /// Its number among the machine's vCPUs, unless it does other work, such as I/O.
    pub vcpu: Option<u32>,
}

/// A time for which a task ran on a CPU without interruption by another task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunInterval {
    /// The task.
    pub task: TaskIndex,
    /// The CPU.
    pub cpu: u32,
    /// Start in nanoseconds.
    pub from: u64,
    /// End in nanoseconds.
    pub to: u64,
    /// Why it ended.
    pub end: RunEnd,
}

/// Why a task stopped running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEnd {
    /// It could have run on: another task was chosen, possibly because it yielded.
    Preempted,
    /// It waits for an event.
    Slept,
    /// The observed time ends, or the end was not recorded.
    Unknown,
}

/// A time for which a task was in a CPU's run queue and did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitInterval {
    /// The task.
    pub task: TaskIndex,
    /// The CPU in whose run queue it waited.
    pub cpu: u32,
    /// Start in nanoseconds.
    pub from: u64,
    /// End in nanoseconds.
    pub to: u64,
    /// How it came to wait.
    pub cause: WaitCause,
}

/// How a task came to wait in a run queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitCause {
    /// It was woken.
    Woken,
    /// Another task took its CPU.
    Preempted,
    /// It waited in another run queue and was moved; the interval before has the first cause.
    Moved,
}

/// A time for which a vCPU spun for a lock while it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinInterval {
    /// The vCPU's task.
    pub task: TaskIndex,
    /// Start in nanoseconds.
    pub from: u64,
    /// End in nanoseconds.
    pub to: u64,
}

/// A task gave its CPU up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Yield {
    /// When, in nanoseconds.
    pub time: u64,
    /// The task that yielded.
    pub task: TaskIndex,
    /// The task that should run instead, for a directed yield.
    pub to: Option<TaskIndex>,
}

/// A change of the schedule, as a trace or a model records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerEvent {
    /// When, in nanoseconds.
    pub time: u64,
    /// What happened.
    pub kind: SchedulerEventKind,
}

/// What happened. [`IDLE`] stands for the idle task of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SchedulerEventKind {
    /// A CPU changes its task (`sched_switch`).
    Switch {
        /// The CPU.
        cpu: u32,
        /// The task that ran.
        previous: Tid,
        /// Whether that task could have run on.
        previous_runnable: bool,
        /// The task that runs now.
        next: Tid,
    },
    /// A task becomes runnable (`sched_wakeup`, `sched_wakeup_new`).
    Wakeup {
        /// The task.
        task: Tid,
        /// The CPU in whose run queue it is put.
        cpu: u32,
    },
    /// A task is moved to the run queue of another CPU (`sched_migrate_task`). A sleeping task is moved, too, when it
    /// is about to wake up elsewhere.
    Migrate {
        /// The task.
        task: Tid,
        /// The CPU to which it is moved.
        cpu: u32,
    },
    /// A vCPU begins to spin for a lock.
    SpinBegin {
        /// Its task.
        task: Tid,
    },
    /// A vCPU stops spinning. Being switched out does not end the spin.
    SpinEnd {
        /// Its task.
        task: Tid,
    },
    /// A task yields.
    Yield {
        /// The task.
        task: Tid,
        /// The task that should run instead.
        to: Option<Tid>,
    },
}

impl CpuSchedule {
    /// The observed time in nanoseconds.
    pub fn duration(&self) -> u64 {
        self.end - self.start
    }

    /// The tasks of a machine that are vCPUs, ascending by vCPU.
    pub fn vcpus(&self, vm: VmIndex) -> Vec<TaskIndex> {
        let mut vcpus: Vec<TaskIndex> = (0..self.tasks.len())
            .filter(|&task| self.tasks[task].vm == Some(vm) && self.tasks[task].vcpu.is_some())
            .collect();
        vcpus.sort_by_key(|&task| (self.tasks[task].vcpu, self.tasks[task].tid));
        vcpus
    }
}
