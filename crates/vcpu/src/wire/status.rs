//! How vCPUs ran and waited, in JSON.

use crate::decide::ready_time::{self, HostSample, VcpuUsage};
use crate::decide::spread::semi_matching;
use crate::machines::Machine;
use pagefold_base::IdSet;
use pagefold_census::results::UnscannedProcess;
use pagefold_output::wire::UnscannedProcessReport;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeSet;

/// The result of `pagefold vcpu status`. Figures that are not known are absent, never 0.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuStatusReport {
    /// `pagefold.vcpu-status/1`.
    pub schema: &'static str,
    /// What was read: `this host` or a recording.
    pub host: String,
    /// Online CPUs, and the vCPUs of all machines of the host.
    #[serde(flatten)]
    pub overcommit: OvercommitReport,
    /// What the machines did.
    #[serde(flatten)]
    pub observation: ObservationReport,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// How many vCPUs share the CPUs of a host.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct OvercommitReport {
    /// Online CPUs, with SMT threads.
    pub online_cpus: u64,
    /// vCPUs of all machines of the host.
    pub host_vcpus: u64,
    /// vCPUs for each online CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpus_per_cpu: Option<f64>,
}

/// What machines did in an interval.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ObservationReport {
    /// Length of the interval in seconds.
    pub interval_seconds: f64,
    /// Readings of the counters, the first and the last one included.
    pub samples: u64,
    /// Time that a hypervisor below this host gave to others, in percent of the time of all CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_steal_percent: Option<f64>,
    /// The machines, the one with most ready time first.
    pub machines: Vec<MachineStatusReport>,
}

/// What a machine did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineStatusReport {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// The name of the machine or program.
    pub name: String,
    /// Sums and means of its vCPUs; absent if none could be observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<VcpuUsageReport>,
    /// The share of the time with a runnable vCPU in which all runnable vCPUs ran; absent if none was runnable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub co_run: Option<CoRunReport>,
    /// vCPUs on one run queue.
    pub stacking: StackingReport,
    /// Why there are no figures of vCPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<String>,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuThreadReport>,
}

/// Times in an interval. Of a machine, times are sums and percentages are means of its vCPUs.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct VcpuUsageReport {
    /// Milliseconds of running.
    pub run_ms: f64,
    /// Milliseconds of waiting for a CPU (run delay): "CPU ready".
    pub ready_ms: f64,
    /// Running, in percent of the interval.
    pub run_percent: f64,
    /// Waiting for a CPU, in percent of the interval.
    pub ready_percent: f64,
    /// Neither, in percent of the interval: the guest was idle (halted), or its monitor waited.
    pub idle_percent: f64,
    /// Steal time that the guest is shown, in percent of the interval: the waiting time under KVM, none under an
    /// emulator. Absent if it is not known whether the guest is shown any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_steal_percent: Option<f64>,
    /// Switches away because it waited for something.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub voluntary_switches: Option<u64>,
    /// Switches away because another thread got its CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub involuntary_switches: Option<u64>,
}

/// The co-run share, estimated from run and ready shares.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct CoRunReport {
    /// At least so many percent, however waits overlapped.
    pub lowest_percent: f64,
    /// At most so many percent.
    pub highest_percent: f64,
    /// The share on the assumption that the vCPUs ran and waited independently of each other.
    pub if_independent_percent: f64,
}

/// vCPUs of one machine on one run queue.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct StackingReport {
    /// Samples with all vCPUs.
    pub samples: u64,
    /// Those in which two runnable vCPUs were on one run queue.
    pub stacked_samples: u64,
    /// Those of them before which another CPU was idle for at least half of the time.
    pub stacked_beside_free_cpu: u64,
    /// vCPUs that must share a CPU with a sibling because of their permitted CPUs.
    pub stacked_by_affinity: u64,
}

/// What a vCPU did.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuThreadReport {
    /// Its number.
    pub vcpu: u32,
    /// Its thread.
    pub tid: u32,
    /// The CPU on whose run queue it was last.
    pub cpu: u32,
    /// The CPUs on which it may run, as a list.
    pub allowed_cpus: String,
    /// Its times; absent if it ended meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<VcpuUsageReport>,
}

impl VcpuStatusReport {
    /// Makes the report of the machines that are observed, out of all machines of the host.
    pub fn new(
        host: String,
        all_machines: &[Machine],
        observation: ObservationReport,
        unscanned: &[UnscannedProcess],
        online_cpus: &IdSet,
    ) -> Self {
        let unscanned = unscanned.iter();
        Self {
            schema: "pagefold.vcpu-status/1",
            host,
            overcommit: OvercommitReport::new(all_machines, online_cpus),
            observation,
            unscanned_processes: unscanned
                .map(|process| UnscannedProcessReport::new(process.pid.0, process.comm.clone(), &process.why))
                .collect(),
        }
    }

    /// Whether something could not be read.
    pub fn is_incomplete(&self) -> bool {
        !self.unscanned_processes.is_empty()
            || self.observation.machines.iter().any(|machine| machine.missing.is_some())
    }
}

impl OvercommitReport {
    /// Counts vCPUs and CPUs.
    pub fn new(all_machines: &[Machine], online_cpus: &IdSet) -> Self {
        let online_cpus = online_cpus.iter().count() as u64;
        let host_vcpus = all_machines.iter().map(|machine| machine.vcpus.len() as u64).sum();
        let vcpus_per_cpu = (online_cpus > 0).then(|| host_vcpus as f64 / online_cpus as f64);
        Self { online_cpus, host_vcpus, vcpus_per_cpu }
    }
}

impl ObservationReport {
    /// Computes what the machines did between the samples. `why_missing` is asked about machines without any figure.
    pub fn new(
        machines: &[Machine],
        samples: &[HostSample],
        online_cpus: &IdSet,
        why_missing: impl Fn(&Machine) -> String,
    ) -> Self {
        let interval = samples.first().zip(samples.last()).map(|(first, last)| last.at.saturating_sub(first.at));
        let mut machines: Vec<MachineStatusReport> = machines
            .iter()
            .map(|machine| {
                let report = MachineStatusReport::new(machine, samples, online_cpus);
                let missing = report.usage.is_none().then(|| why_missing(machine));
                MachineStatusReport { missing, ..report }
            })
            .collect();
        let ready = |machine: &MachineStatusReport| machine.usage.map_or(-1.0, |usage| usage.ready_ms);
        machines.sort_by(|left, right| ready(right).total_cmp(&ready(left)).then(left.pid.cmp(&right.pid)));
        Self {
            interval_seconds: interval.unwrap_or_default().as_secs_f64(),
            samples: samples.len() as u64,
            host_steal_percent: ready_time::host_steal_share(samples).map(percent),
            machines,
        }
    }
}

/// A share in percent, to a hundredth, which is more than the counters provide.
fn percent(share: f64) -> f64 {
    (share * 1e4).round() / 100.0
}

fn milliseconds(time: std::time::Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

impl MachineStatusReport {
    fn new(machine: &Machine, samples: &[HostSample], online_cpus: &IdSet) -> Self {
        let tids = machine.tids();
        let last = samples.last();
        let vcpus: Vec<(VcpuThreadReport, Option<VcpuUsage>)> = machine
            .vcpus
            .iter()
            .map(|(&vcpu, thread)| {
                let usage = ready_time::usage(samples, thread.tid);
                let now = last.and_then(|sample| sample.threads.get(&thread.tid));
                let report = VcpuThreadReport {
                    vcpu,
                    tid: thread.tid.0,
                    cpu: now.map_or(thread.last_cpu, |now| now.cpu),
                    allowed_cpus: now.map_or(&thread.allowed_cpus, |now| &now.allowed_cpus).to_string(),
                    usage: usage.map(|usage| VcpuUsageReport::new(&[usage], machine.shows_steal)),
                };
                (report, usage)
            })
            .collect();
        let usages: Vec<VcpuUsage> = vcpus.iter().filter_map(|(_, usage)| *usage).collect();
        let stacking = ready_time::stacking(samples, &tids);
        Self {
            pid: machine.process.id.pid.0,
            start_time: machine.process.id.start_time,
            name: machine.name(),
            usage: (!usages.is_empty()).then(|| VcpuUsageReport::new(&usages, machine.shows_steal)),
            co_run: ready_time::co_run_share(samples, &tids).map(|share| CoRunReport {
                lowest_percent: percent(share.lowest),
                highest_percent: percent(share.highest),
                if_independent_percent: percent(share.if_independent),
            }),
            stacking: StackingReport {
                samples: stacking.samples,
                stacked_samples: stacking.stacked,
                stacked_beside_free_cpu: stacking.stacked_beside_free_cpu,
                stacked_by_affinity: stacked_by_affinity(machine, last, online_cpus),
            },
            missing: None,
            vcpus: vcpus.into_iter().map(|(report, _)| report).collect(),
        }
    }
}

/// The vCPUs that have no CPU of their own in any assignment, though the host has enough CPUs.
fn stacked_by_affinity(machine: &Machine, last: Option<&HostSample>, online_cpus: &IdSet) -> u64 {
    if machine.vcpus.len() > online_cpus.iter().count() {
        return 0;
    }
    let sets: Vec<IdSet> = machine
        .vcpus
        .values()
        .map(|thread| {
            let now = last.and_then(|sample| sample.threads.get(&thread.tid));
            now.map_or(&thread.allowed_cpus, |now| &now.allowed_cpus).intersection(online_cpus)
        })
        .collect();
    let homes: BTreeSet<u32> = semi_matching(&sets).into_iter().flatten().collect();
    (sets.iter().filter(|set| !set.is_empty()).count() - homes.len()) as u64
}

impl VcpuUsageReport {
    fn new(usages: &[VcpuUsage], shows_steal: Option<bool>) -> Self {
        let mean =
            |share: fn(&VcpuUsage) -> f64| percent(usages.iter().map(share).sum::<f64>() / usages.len().max(1) as f64);
        let ready_percent = mean(VcpuUsage::ready_share);
        let switches: Option<Vec<(u64, u64)>> = usages.iter().map(|usage| usage.switches).collect();
        let sum = |count: fn(&(u64, u64)) -> u64| switches.as_ref().map(|switches| switches.iter().map(count).sum());
        Self {
            run_ms: milliseconds(usages.iter().map(|usage| usage.run).sum()),
            ready_ms: milliseconds(usages.iter().map(|usage| usage.ready).sum()),
            run_percent: mean(VcpuUsage::run_share),
            ready_percent,
            idle_percent: mean(VcpuUsage::idle_share),
            guest_steal_percent: shows_steal.map(|is_shown| if is_shown { ready_percent } else { 0.0 }),
            voluntary_switches: sum(|switches| switches.0),
            involuntary_switches: sum(|switches| switches.1),
        }
    }
}
