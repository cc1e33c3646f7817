//! How the machines of a host run and wait for CPUs, read again and again.

use crate::decide::ready_time::{self, HostSample, ThreadSample, VcpuUsage};
use crate::machines::{Machine, find_machines};
use crate::sample::read_sample;
use pagefold_base::ProcessId;
use pagefold_census::ProcessSelection;
use pagefold_host::{Host, elapsed_since};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// How long the list of machines is used. Looking for them reads the command line of every process.
const MACHINES_CACHE_TIME: Duration = Duration::from_secs(10);

/// The least time between two readings: over less, a share is mostly chance.
const MIN_READING_INTERVAL: Duration = Duration::from_secs(1);

/// How a machine runs and waits for CPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineFigures {
    /// Its process number.
    pub pid: u32,
    /// Its name, or that of its program.
    pub name: String,
    /// Its vCPUs.
    pub vcpus: u64,
    /// Time for which its vCPUs have run, summed up. It never falls, also if a vCPU is unplugged.
    pub run: Duration,
    /// Time for which they have waited for a CPU, summed up. It never falls either.
    pub ready: Duration,
    /// The mean share of the time since the last reading in which they ran; `None` at the first reading.
    pub run_share: Option<f64>,
    /// The mean share in which they waited.
    pub ready_share: Option<f64>,
}

/// Reads the counters of vCPUs, and remembers the last reading.
#[derive(Default)]
pub struct MachineMonitor {
    machines: Vec<Machine>,
    /// When the machines were looked for last; also the start of the times of samples.
    found_at: Option<Instant>,
    last: Option<Reading>,
    /// How long the vCPUs of each machine have run and waited: at the first reading since they began, then what each
    /// interval added.
    totals: BTreeMap<ProcessId, (Duration, Duration)>,
}

/// A reading, with its report.
struct Reading {
    at: Instant,
    sample: HostSample,
    report: Vec<MachineFigures>,
}

impl MachineMonitor {
    /// The machines, the one that waits most first. At most once a second the counters are read anew.
    pub fn read(&mut self, host: &dyn Host) -> Vec<MachineFigures> {
        if let Some(last) = &self.last
            && elapsed_since(host, last.at) < MIN_READING_INTERVAL
        {
            return last.report.clone();
        }
        if self.found_at.is_none_or(|found_at| elapsed_since(host, found_at) >= MACHINES_CACHE_TIME) {
            // Without permission there are no machines to show.
            self.machines =
                find_machines(host, &ProcessSelection::default()).map(|(machines, _)| machines).unwrap_or_default();
            self.found_at = Some(host.now());
            self.totals.retain(|id, _| self.machines.iter().any(|machine| machine.process.id == *id));
        }
        let now = host.now();
        let interval = self.last.as_ref().map(|last| now.saturating_duration_since(last.at)).unwrap_or_default();
        let sample = read_sample(host, &self.machines, interval);
        let report = report(&self.machines, self.last.as_ref().map(|last| &last.sample), &sample, &mut self.totals);
        // The times of samples count from the last one.
        let sample = HostSample { at: Duration::ZERO, ..sample };
        self.last = Some(Reading { at: now, sample, report: report.clone() });
        report
    }
}

fn report(
    machines: &[Machine],
    last: Option<&HostSample>,
    sample: &HostSample,
    totals: &mut BTreeMap<ProcessId, (Duration, Duration)>,
) -> Vec<MachineFigures> {
    let mut reports: Vec<MachineFigures> = machines
        .iter()
        .filter_map(|machine| {
            let threads: Vec<_> =
                machine.tids().into_iter().filter_map(|tid| Some((tid, sample.threads.get(&tid)?))).collect();
            let usages: Vec<VcpuUsage> = last
                .iter()
                .flat_map(|last| threads.iter().filter_map(|(tid, _)| ready_time::usage_between(last, sample, *tid)))
                .collect();
            let mean = |share: fn(&VcpuUsage) -> f64| {
                let sum: f64 = usages.iter().map(share).sum();
                (!usages.is_empty()).then(|| sum / usages.len() as f64)
            };
            let (run, ready) = totals
                .entry(machine.process.id)
                .and_modify(|(run, ready)| {
                    *run += usages.iter().map(|usage| usage.run).sum::<Duration>();
                    *ready += usages.iter().map(|usage| usage.ready).sum::<Duration>();
                })
                .or_insert_with(|| {
                    let sum =
                        |time: fn(&ThreadSample) -> Duration| threads.iter().map(|(_, thread)| time(thread)).sum();
                    (sum(|thread| thread.run), sum(|thread| thread.ready))
                });
            Some(MachineFigures {
                pid: machine.process.id.pid.0,
                name: machine.name(),
                vcpus: threads.len() as u64,
                run: *run,
                ready: *ready,
                run_share: mean(VcpuUsage::run_share),
                ready_share: mean(VcpuUsage::ready_share),
            })
            .filter(|figures| figures.vcpus > 0)
        })
        .collect();
    let ready = |report: &MachineFigures| report.ready_share.unwrap_or(-1.0);
    reports.sort_by(|left, right| ready(right).total_cmp(&ready(left)).then(left.pid.cmp(&right.pid)));
    reports
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn ready_time_is_a_share_of_the_time_between_readings() {
        let host = FakeHost::booted();
        host.enable_virtual_time();
        let put_process = || {
            host.map_pages(7, (0x1000, 0x2000), "heap", false);
            host.put_file("proc/7/cmdline", "qemu-system-x86_64\0-name\0web\0");
        };
        put_process();
        let put_thread = |tid: u32, name: &str, run_ms: u64, ready_ms: u64| {
            let directory = format!("proc/7/task/{tid}");
            let zeros = "0 ".repeat(16);
            let stat = format!("{tid} ({name}) R 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 {zeros}0 0\n");
            host.put_file(&format!("{directory}/stat"), &stat);
            host.put_file(&format!("{directory}/status"), "Cpus_allowed_list:\t0-1\n");
            host.put_file(&format!("{directory}/schedstat"), &format!("{}000000 {}000000 9\n", run_ms, ready_ms));
        };
        put_thread(8, "CPU 0/KVM", 1000, 500);
        put_thread(9, "CPU 1/KVM", 0, 0);
        put_thread(10, "worker", 7000, 7000);
        let mut reader = MachineMonitor::default();
        let first = reader.read(&host);
        let expected = MachineFigures {
            pid: 7,
            name: "web".to_owned(),
            vcpus: 2,
            run: Duration::from_secs(1),
            ready: Duration::from_millis(500),
            run_share: None,
            ready_share: None,
        };
        assert_eq!(first, std::slice::from_ref(&expected));
        host.sleep(Duration::from_secs(2));
        put_thread(8, "CPU 0/KVM", 1500, 1500);
        let expected = MachineFigures {
            run: Duration::from_millis(1500),
            ready: Duration::from_millis(1500),
            run_share: Some(0.125),
            ready_share: Some(0.25),
            ..expected
        };
        assert_eq!(reader.read(&host), std::slice::from_ref(&expected));
        // Soon after, the last reading is shown.
        put_thread(8, "CPU 0/KVM", 9000, 9000);
        assert_eq!(reader.read(&host), [expected]);
        // A vCPU that is unplugged takes nothing back.
        host.remove_process(7);
        put_process();
        put_thread(9, "CPU 1/KVM", 0, 0);
        host.sleep(Duration::from_secs(20));
        let [unplugged] = &reader.read(&host)[..] else { panic!("one machine") };
        assert_eq!((unplugged.vcpus, unplugged.ready), (1, Duration::from_millis(1500)));
    }
}
