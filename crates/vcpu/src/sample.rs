//! Samples of the counters of vCPU threads over an interval, without tracing.
//!
//! Run time and run delay are in `/proc/PID/task/TID/schedstat` (`CONFIG_SCHED_INFO`, part of all common kernels).

use crate::decide::ready_time::{HostSample, ThreadSample};
use crate::machines::Machine;
use pagefold_base::{Absent, Pid, Reading};
use pagefold_host::{Host, ProcessHandle, elapsed_since, hold, parse};
use pagefold_numa::map::read_uptime_ticks;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time between two samples. Waits for a CPU are much shorter, and reading a thousand threads takes about 20 ms.
pub const SAMPLING_INTERVAL: Duration = Duration::from_millis(100);

/// The least time of an observation.
pub const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// Reads the counters of the machines' vCPUs now, at the time `at`. A thread that has ended is left out.
pub fn read_sample(host: &dyn Host, machines: &[Machine], at: Duration) -> HostSample {
    let stat = host.read("proc/stat");
    let cpus = stat.as_ref().ok().and_then(|stat| parse::idle_ticks(stat).ok()).unwrap_or_default();
    let steal = stat.ok().and_then(|stat| parse::cpu_ticks(&stat).ok());
    let mut sample = HostSample {
        at,
        cpus: cpus.into_iter().map(|(cpu, ticks)| (cpu, (ticks.total, ticks.idle))).collect(),
        steal: steal.map(|ticks| (ticks.total, ticks.steal)),
        ..HostSample::default()
    };
    for machine in machines {
        let Ok(handle) = hold(host, machine.process.id) else { continue };
        let read = |tid: Pid| Some((tid, read_thread(&*handle, tid).ok()?));
        sample.threads.extend(machine.tids().into_iter().filter_map(read));
    }
    sample
}

fn read_thread(handle: &dyn ProcessHandle, tid: Pid) -> Reading<ThreadSample> {
    let times = parse::schedstat(&handle.read(&format!("task/{tid}/schedstat"))?)?;
    let stat = parse::stat(&handle.read(&format!("task/{tid}/stat"))?)?;
    let status = handle.read(&format!("task/{tid}/status"))?;
    Ok(ThreadSample {
        start_time: stat.start_time,
        run: Duration::from_nanos(times.run_ns),
        ready: Duration::from_nanos(times.wait_ns),
        switches: parse::context_switches(&status).ok(),
        is_runnable: stat.state == 'R',
        cpu: stat.last_cpu?,
        allowed_cpus: parse::status(&status).allowed_cpus?,
    })
}

/// Reads samples over an interval, at its start, its end and every [`SAMPLING_INTERVAL`]. Ends early once `stop` is set.
pub fn observe(host: &dyn Host, machines: &[Machine], interval: Duration, stop: &AtomicBool) -> Vec<HostSample> {
    let start = host.now();
    let mut samples = vec![read_sample(host, machines, Duration::ZERO)];
    loop {
        let elapsed = elapsed_since(host, start);
        if elapsed >= interval || stop.load(Ordering::Relaxed) {
            return samples;
        }
        host.sleep(SAMPLING_INTERVAL.min(interval - elapsed));
        samples.push(read_sample(host, machines, elapsed_since(host, start)));
    }
}

/// Reads the sample of a recorded host, at its time since boot.
///
/// # Errors
/// If the recording does not say how long its host had been up.
pub fn read_recorded_sample(host: &dyn Host, machines: &[Machine]) -> Reading<HostSample> {
    let ticks = read_uptime_ticks(host)?;
    Ok(read_sample(host, machines, Duration::from_millis(ticks.saturating_mul(10))))
}

/// Why counters of vCPUs are missing, for a machine none of whose threads is in a sample.
pub fn missing_reason(host: &dyn Host, machine: &Machine) -> Option<Absent> {
    let handle = match hold(host, machine.process.id) {
        Ok(handle) => handle,
        Err(why) => return Some(why),
    };
    machine.tids().into_iter().find_map(|tid| read_thread(&*handle, tid).err())
}
