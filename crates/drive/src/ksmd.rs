//! ksmd and its counters, as seen from outside.

use crate::verify;
use pagefold_host::{Host, Process, observe, parse};
use pagefold_model::doctor::{Tuner, USER_HZ, tuner};
use pagefold_model::plan::Plan;
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
        let exact = self.thread.read("schedstat").and_then(|bytes| parse::schedstat(&bytes));
        exact.map(|stat| Duration::from_nanos(stat.ran)).or_else(|_| {
            let stat = parse::stat(&self.thread.read("stat")?)?;
            Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
        })
    }
}

/// `full_scans`: complete passes over all that is enrolled on the host.
pub fn full_scans(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("sys/kernel/mm/ksm/full_scans")?)
}

/// `pages_scanned`: looks at pages since the host booted, a page that is looked at again counted again.
pub fn looks(host: &dyn Host) -> Reading<Pages> {
    Ok(Pages(parse::number(&host.read("sys/kernel/mm/ksm/pages_scanned")?)?))
}

/// The targets of a plan, held to be counted again and again.
///
/// The host's own counters would not do: they hold everybody's pages, and those of processes that ended until ksmd
/// comes by (mm/ksm.c, `__ksm_exit`).
pub struct Gauge<'a> {
    handles: Vec<Box<dyn Process + 'a>>,
    before: Pages,
}

impl<'a> Gauge<'a> {
    /// Take hold of the targets and count what is merged of them already.
    pub fn new(host: &'a dyn Host, plan: &Plan) -> Self {
        let handles = plan.targets.iter().filter_map(|target| verify::open(host, target.process.id).ok()).collect();
        let mut gauge = Self { handles, before: Pages::ZERO };
        gauge.before = gauge.all();
        gauge
    }

    /// Pages of the targets that were merged since: mapped to a KSM frame, the kept copy included, or to the page of
    /// zeros. As of ksmd's last look at each. Kernels before 5.19 do not tell, and it stays at nothing.
    pub fn merged(&self) -> Pages {
        self.all().saturating_sub(self.before)
    }

    fn all(&self) -> Pages {
        let pages = |handle: &dyn Process| {
            let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
            ksm.merging_pages.unwrap_or(0) + ksm.zero_pages.unwrap_or(0).max(0) as u64
        };
        Pages(self.handles.iter().map(|handle| pages(&**handle)).sum())
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
