//! ksmd and its counters, as seen from outside.

use pagefold_host::{Host, Process, observe, parse};
use pagefold_model::doctor::{Tuner, USER_HZ, tuner};
use pagefold_model::{Absent, Pages, Reading};
use std::time::Duration;

/// The kernel's merging thread, held.
pub struct Ksmd<'a> {
    thread: Box<dyn Process + 'a>,
}

impl<'a> Ksmd<'a> {
    /// Find it among the processes. `NotOnThisKernel` if it is not there, as in a container of its own pid namespace.
    pub fn find(host: &'a dyn Host) -> Reading<Self> {
        for pid in host.pids()? {
            // Kernel threads have no command line, and most processes are told apart by that much alone.
            let Ok(thread) = host.open(pid) else { continue };
            let Ok(stat) = thread.read("stat").and_then(|bytes| parse::stat(&bytes)) else { continue };
            if stat.comm == "ksmd" && stat.flags & parse::PF_KTHREAD != 0 {
                return Ok(Self { thread });
            }
        }
        Err(Absent::NotOnThisKernel)
    }

    /// The CPU time that it has used: to the nanosecond where the kernel keeps `schedstat`, else in ticks.
    pub fn cpu(&self) -> Reading<Duration> {
        let exact = self.thread.read("schedstat").and_then(|bytes| {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let first = text.split_whitespace().next().and_then(|word| word.parse().ok());
            first.map(Duration::from_nanos).ok_or(Absent::Malformed(format!("schedstat: {text:?}")))
        });
        exact.or_else(|_| {
            let stat = parse::stat(&self.thread.read("stat")?)?;
            Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
        })
    }
}

/// What the counters say of how far ksmd is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// `pages_sharing` and `ksm_zero_pages`.
    pub saved: Pages,
    /// `full_scans`.
    pub full_scans: u64,
}

impl Counters {
    /// Read them.
    pub fn read(host: &dyn Host) -> Reading<Self> {
        let counter = |file: &str| parse::number::<i64>(&host.read(&format!("sys/kernel/mm/ksm/{file}"))?);
        let zero = match counter("ksm_zero_pages") {
            Err(Absent::NotOnThisKernel) => 0,
            zero => zero?,
        };
        let saved = counter("pages_sharing")?.saturating_add(zero).max(0);
        Ok(Self { saved: Pages(saved as u64), full_scans: counter("full_scans")?.max(0) as u64 })
    }
}

/// A program that writes KSM's settings again and again, if one runs.
pub fn other_tuner(host: &dyn Host) -> Reading<Option<Tuner>> {
    let processes = observe::processes(host)?;
    Ok(processes.into_iter().find_map(|(_, process)| {
        let process = process.ok().filter(|process| !process.kernel_thread)?;
        tuner(&process.comm, process.arguments.as_deref().unwrap_or_default()).filter(|tuner| tuner.writes_rate())
    }))
}
