//! The measures of a recorded schedule in JSON.

use crate::decide::measures::{DelayMeasures, ScheduleMeasures, VmMeasures, measure};
use crate::sources::RecordedSchedule;
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold vcpu map`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuMapReport {
    /// `pagefold.vcpu-map/1`.
    pub schema: &'static str,
    /// The file.
    pub source: String,
    /// Time from the first to the last event, in seconds.
    pub seconds: f64,
    /// CPUs with events.
    pub cpus: Vec<u32>,
    /// Online CPUs of the recorded host, if the file says it. CPUs without events are in no figure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub online_cpus: Option<u32>,
    /// Events of the scheduler.
    pub events: u64,
    /// Events that the recorder lost.
    pub lost_events: u64,
    /// Whether wake-ups were recorded. Without them, a woken vCPU is not seen to wait.
    pub has_wakeups: bool,
    /// Share of the CPUs' time in which they ran a task.
    pub busy_percent: f64,
    /// The machines or groups, by name.
    pub machines: Vec<MachineMapReport>,
}

/// The measures of a machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineMapReport {
    /// Its name.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: usize,
    /// Share of the vCPUs' time in which they ran.
    pub run_percent: f64,
    /// Share of the vCPUs' time in which they waited in a run queue.
    pub ready_percent: f64,
    /// Share of the observed time in which at least one vCPU was runnable.
    pub runnable_percent: f64,
    /// Share of the time with a runnable vCPU in which all runnable vCPUs ran, or all CPUs ran vCPUs of the machine.
    /// Absent if there is no such time, as in the following shares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub co_run_percent: Option<f64>,
    /// Share of the time with two runnable vCPUs or more in which all of them ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub siblings_co_run_percent: Option<f64>,
    /// Share of the time with two runnable vCPUs or more in which a run queue had two of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stacked_percent: Option<f64>,
    /// The same, as far as another CPU had no runnable task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stacked_beside_free_cpu_percent: Option<f64>,
    /// Time in which vCPUs were preempted, added up over vCPUs, in milliseconds.
    pub preempted_ms: f64,
    /// The part of it in which a sibling ran.
    pub preempted_while_sibling_runs_ms: f64,
    /// The part of it in which a sibling ran and spun, if the source tells of spins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preempted_while_sibling_spins_ms: Option<f64>,
    /// Time from a wake-up until the vCPU runs; absent without recorded wake-ups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wake_to_run: Option<WakeToRunReport>,
    /// Ends of runs of its vCPUs in a second.
    pub switches_per_second: f64,
    /// Runs that ended because another task was chosen.
    pub preemptions: u64,
    /// Runs that ended because the vCPU had to wait for an event.
    pub sleeps: u64,
    /// Runs that began on another CPU than the vCPU's previous run.
    pub migrations: u64,
}

/// Time from a wake-up until the vCPU runs.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct WakeToRunReport {
    /// Number of wake-ups.
    pub count: u64,
    /// Median in microseconds.
    pub median_us: f64,
    /// 95th percentile in microseconds.
    pub p95_us: f64,
    /// 99th percentile in microseconds.
    pub p99_us: f64,
    /// Longest in microseconds.
    pub max_us: f64,
    /// Wake-ups whose vCPU did not run before the end.
    pub unfinished: u64,
}

impl VcpuMapReport {
    /// The report of a file.
    pub fn new(source: String, recorded: &RecordedSchedule) -> Self {
        let schedule = &recorded.schedule;
        let measures = measure(schedule);
        let vms = schedule.vms.iter().zip(&measures.vms);
        Self {
            schema: "pagefold.vcpu-map/1",
            source,
            seconds: schedule.duration() as f64 / 1e9,
            cpus: schedule.cpus.clone(),
            online_cpus: recorded.online_cpus,
            events: recorded.events,
            lost_events: schedule.lost_events,
            has_wakeups: schedule.has_wakeups,
            busy_percent: percent(measures.busy_ns, measures.busy_ns + measures.idle_ns).unwrap_or(0.0),
            machines: vms.map(|(vm, figures)| MachineMapReport::new(vm.name.clone(), figures, &measures)).collect(),
        }
    }

    /// Online CPUs without an event; none if they are not known.
    pub fn cpus_without_events(&self) -> Option<usize> {
        let online = usize::try_from(self.online_cpus?).ok()?;
        online.checked_sub(self.cpus.len()).filter(|&missing| missing > 0)
    }
}

impl MachineMapReport {
    fn new(name: String, vm: &VmMeasures, measures: &ScheduleMeasures) -> Self {
        let vcpu_time = vm.vcpus as u64 * measures.duration_ns;
        let seconds = measures.duration_ns as f64 / 1e9;
        let to_percent = |fraction: f64| 100.0 * fraction;
        Self {
            name,
            vcpus: vm.vcpus,
            run_percent: percent(vm.run_ns, vcpu_time).unwrap_or(0.0),
            ready_percent: percent(vm.ready_ns, vcpu_time).unwrap_or(0.0),
            runnable_percent: percent(vm.runnable_ns, measures.duration_ns).unwrap_or(0.0),
            co_run_percent: vm.co_run_fraction().map(to_percent),
            siblings_co_run_percent: vm.siblings_co_run_fraction().map(to_percent),
            stacked_percent: vm.stacked_fraction().map(to_percent),
            stacked_beside_free_cpu_percent: vm.stacked_beside_free_cpu_fraction().map(to_percent),
            preempted_ms: milliseconds(vm.preempted_ns),
            preempted_while_sibling_runs_ms: milliseconds(vm.preempted_while_sibling_runs_ns),
            preempted_while_sibling_spins_ms: vm.preempted_while_sibling_spins_ns.map(milliseconds),
            wake_to_run: vm.wake_to_run.map(WakeToRunReport::new),
            switches_per_second: if seconds > 0.0 { vm.switches() as f64 / seconds } else { 0.0 },
            preemptions: vm.preemptions,
            sleeps: vm.sleeps,
            migrations: vm.migrations,
        }
    }
}

impl WakeToRunReport {
    fn new(delays: DelayMeasures) -> Self {
        let microseconds = |nanoseconds: u64| nanoseconds as f64 / 1e3;
        Self {
            count: delays.count,
            median_us: microseconds(delays.median_ns),
            p95_us: microseconds(delays.p95_ns),
            p99_us: microseconds(delays.p99_ns),
            max_us: microseconds(delays.max_ns),
            unfinished: delays.unfinished,
        }
    }
}

fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}

fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| 100.0 * part as f64 / whole as f64)
}
