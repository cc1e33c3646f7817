//! The kernel's merging thread.

use crate::{Host, ProcessHandle, parse};
use pagefold_base::process::USER_HZ;
use pagefold_base::{Absent, Pid, Reading};
use std::time::Duration;

/// A handle of the kernel's merging thread.
pub struct KsmdThread<'a> {
    /// Its process ID.
    pub pid: Pid,
    thread: Box<dyn ProcessHandle + 'a>,
}

impl<'a> KsmdThread<'a> {
    /// Find it among the processes. `NotOnThisKernel` if it is not visible, as in a container with its own PID
    /// namespace.
    pub fn find(host: &'a dyn Host) -> Reading<Self> {
        for pid in host.pids()? {
            // Kernel threads have no command line; that alone rules out most processes.
            let Ok(thread) = host.open(pid) else { continue };
            let Ok(stat) = thread.read("stat").and_then(|bytes| parse::stat(&bytes)) else { continue };
            if stat.comm == "ksmd" && stat.flags & parse::PF_KTHREAD != 0 {
                return Ok(Self { pid, thread });
            }
        }
        Err(Absent::NotOnThisKernel)
    }

    /// How often it has gone to sleep, if it sleeps now; `None` while it runs. Its `wchan` says no more: it is empty for a
    /// thread that sleeps and whose removal from the run queue the scheduler has delayed (`DELAY_DEQUEUE`, 6.12).
    pub fn sleep_count(&self) -> Reading<Option<u64>> {
        let status = self.thread.read("status")?;
        let value = |name: &str| {
            let text = String::from_utf8_lossy(&status);
            text.lines().find_map(|line| line.strip_prefix(name).map(|value| value.trim().to_owned()))
        };
        let count = value("voluntary_ctxt_switches:").and_then(|count| count.parse().ok());
        let is_asleep = value("State:").ok_or(Absent::NotOnThisKernel)?.starts_with('S');
        Ok(Some(count.ok_or(Absent::NotOnThisKernel)?).filter(|_| is_asleep))
    }

    /// Its CPU time: in nanoseconds where the kernel provides `schedstat`, else in ticks.
    pub fn cpu_time(&self) -> Reading<Duration> {
        let exact = self.thread.read("schedstat").and_then(|bytes| parse::schedstat(&bytes));
        exact.map(|stat| Duration::from_nanos(stat.run_ns)).or_else(|_| {
            let stat = parse::stat(&self.thread.read("stat")?)?;
            Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
        })
    }
}
