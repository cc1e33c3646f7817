//! Waiting of tracked programs since the last reading: run-queue delay of their threads
//! (`/proc/PID/task/TID/schedstat`), CPU pressure (`/proc/pressure/cpu`) and time stolen by a hypervisor
//! (`/proc/stat`).
//!
//! While the daemon is idle, readings are rare. If there are many threads, only those of the oldest programs are read:
//! they are the same during work and idle time.

use crate::decide::WaitTimes;
use pagefold_base::ProcessId;
use pagefold_host::{Host, observe, parse};
use std::collections::BTreeMap;
use std::time::Duration;

/// Intervals between readings while the daemon is idle: at first, and after [`LONG_IDLE_TIME`]. Changes between work
/// and idle time are always read.
const IDLE_READ_INTERVALS: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(8)];
const LONG_IDLE_TIME: Duration = Duration::from_secs(30);

/// Number of threads that are read, in total and per process.
const MAX_THREADS_TOTAL_AND_PER_PROCESS: [usize; 2] = [64, 16];

/// Interval between two lists of threads.
const THREAD_LIST_INTERVAL: Duration = Duration::from_secs(60);

/// The last reading.
#[derive(Default)]
pub(super) struct WaitReader {
    last_read_at: Option<Duration>,
    /// Whether the daemon worked at that time, and since when that was so.
    was_working: bool,
    state_changed_at: Duration,
    threads_listed_at: Option<Duration>,
    /// Processes whose threads were listed.
    listed_processes: Vec<ProcessId>,
    /// Run-queue and run time of each thread, by its file.
    thread_schedstats: BTreeMap<String, Option<parse::Schedstat>>,
    cpu_pressure_micros: Option<u64>,
    stolen_time: Option<parse::CpuTicks>,
}

impl WaitReader {
    /// Waiting since the last reading, if a reading is due.
    pub fn read_wait_times(
        &mut self,
        host: &dyn Host,
        now: Duration,
        is_working: bool,
        tracked: impl Iterator<Item = ProcessId>,
    ) -> Option<WaitTimes> {
        let last_read = self.last_read_at;
        let state_changed = std::mem::replace(&mut self.was_working, is_working) != is_working;
        if state_changed {
            self.state_changed_at = now;
        }
        let idle_interval = IDLE_READ_INTERVALS[usize::from(now >= self.state_changed_at + LONG_IDLE_TIME)];
        if !is_working && !state_changed && last_read.is_some_and(|at| now < at + idle_interval) {
            return None;
        }
        self.last_read_at = Some(now);
        self.list_threads(host, now, tracked);
        let queue_and_run_time = self.read_queue_times(host);
        let micros = observe::cpu_pressure(host).ok().map(|pressure| pressure.total);
        let stolen = host.read("proc/stat").and_then(|bytes| parse::cpu_ticks(&bytes)).ok();
        let pressure = std::mem::replace(&mut self.cpu_pressure_micros, micros).zip(micros);
        let cpu_ticks = std::mem::replace(&mut self.stolen_time, stolen).zip(stolen);
        Some(WaitTimes {
            elapsed: now.saturating_sub(last_read?),
            queue_and_run_time,
            cpu_pressure_seconds: pressure.map(|(before, now)| now.saturating_sub(before) as f64 / 1e6),
            stolen_share: cpu_ticks.map(|(before, now)| before.steal_share(now)),
        })
    }

    /// List the threads. Readings of known threads stay.
    fn list_threads(&mut self, host: &dyn Host, now: Duration, tracked: impl Iterator<Item = ProcessId>) {
        let tracked: Vec<ProcessId> = tracked.collect();
        if tracked == self.listed_processes
            && self.threads_listed_at.is_some_and(|listed| now < listed + THREAD_LIST_INTERVAL)
        {
            return;
        }
        let mut threads = BTreeMap::new();
        for process in &tracked {
            let directory = format!("proc/{}/task", process.pid);
            for thread in
                host.list(&directory).unwrap_or_default().into_iter().take(MAX_THREADS_TOTAL_AND_PER_PROCESS[1])
            {
                if threads.len() < MAX_THREADS_TOTAL_AND_PER_PROCESS[0] {
                    let file = format!("{directory}/{thread}/schedstat");
                    let last_reading = self.thread_schedstats.get(&file).copied().flatten();
                    threads.insert(file, last_reading);
                }
            }
        }
        (self.thread_schedstats, self.listed_processes, self.threads_listed_at) = (threads, tracked, Some(now));
    }

    /// Time that threads spent in run queues and running since they were read last; `None` if the kernel does not
    /// report it.
    fn read_queue_times(&mut self, host: &dyn Host) -> Option<(Duration, Duration)> {
        let mut sum = None;
        for (file, before) in &mut self.thread_schedstats {
            let now = host.read(file).and_then(|bytes| parse::schedstat(&bytes)).ok();
            if let (Some(before), Some(now)) = (std::mem::replace(before, now), now) {
                let (queued, ran) = sum.get_or_insert((0, 0));
                *queued += now.wait_ns.saturating_sub(before.wait_ns);
                *ran += now.run_ns.saturating_sub(before.run_ns);
            }
        }
        sum.map(|(queued, ran): (u64, u64)| (Duration::from_nanos(queued), Duration::from_nanos(ran)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    #[test]
    fn waits_are_read_seldom_while_idle() {
        let host = FakeHost::booted();
        let mut reader = WaitReader::default();
        let mut read = |seconds: std::ops::Range<u64>, is_working: bool| -> Vec<u64> {
            let read = |second: &u64| {
                reader.read_wait_times(&host, Duration::from_secs(*second), is_working, [].into_iter()).is_some()
            };
            seconds.filter(read).collect()
        };
        let idle_seconds: Vec<u64> = (2..30).step_by(2).chain([36, 44, 52]).collect();
        assert_eq!(read(0..60, false), idle_seconds);
        assert_eq!(read(60..63, true), [60, 61, 62]);
        assert_eq!(read(63..70, false), [63, 65, 67, 69], "the first interval is short again");
    }
}
