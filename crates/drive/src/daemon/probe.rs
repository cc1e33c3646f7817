//! What managed programs wait for: run-queue delay of their threads (`/proc/PID/task/TID/schedstat`), pressure on the
//! CPUs (`/proc/pressure/cpu`) and time stolen by a hypervisor (`/proc/stat`), each since the reading before.
//!
//! At rest this is read seldom, and of many threads only some are looked at: those of the programs that came first,
//! which are the same at work and at rest.

use pagefold_host::{Host, observe, parse};
use pagefold_model::ProcessId;
use pagefold_model::daemon::Waits;
use std::collections::BTreeMap;
use std::time::Duration;

/// Between two readings while the daemon rests, but for the one at which it begins to.
const CALM: Duration = Duration::from_secs(2);

/// Threads that are looked at, in all and of one process.
const THREADS: [usize; 2] = [64, 16];

/// Between two looks at which threads there are.
const LISTED: Duration = Duration::from_secs(60);

/// Readings that the next one is compared with.
#[derive(Default)]
pub(super) struct Probe {
    read: Option<Duration>,
    /// Whether the daemon worked then.
    worked: bool,
    listed: Option<Duration>,
    /// Who was there when threads were listed.
    members: Vec<ProcessId>,
    /// By its file: for how long it stood in run queues and ran.
    threads: BTreeMap<String, Option<parse::Schedstat>>,
    pressure: Option<u64>,
    stolen: Option<parse::Stolen>,
}

impl Probe {
    /// What was waited for since the last time, if it is time to read it.
    pub fn read(
        &mut self,
        host: &dyn Host,
        now: Duration,
        works: bool,
        members: impl Iterator<Item = ProcessId>,
    ) -> Option<Waits> {
        let before = self.read;
        let turned = std::mem::replace(&mut self.worked, works) != works;
        if !works && !turned && before.is_some_and(|at| now < at + CALM) {
            return None;
        }
        self.read = Some(now);
        self.list(host, now, members);
        let queued = self.queued(host);
        let micros = observe::cpu_pressure(host).ok().map(|pressure| pressure.total);
        let stolen = host.read("proc/stat").and_then(|bytes| parse::stolen(&bytes)).ok();
        let pressure = std::mem::replace(&mut self.pressure, micros).zip(micros);
        let times = std::mem::replace(&mut self.stolen, stolen).zip(stolen);
        Some(Waits {
            elapsed: now.saturating_sub(before?),
            queued,
            pressure: pressure.map(|(before, now)| now.saturating_sub(before) as f64 / 1e6),
            stolen: times.map(|(before, now)| before.share(now)),
        })
    }

    /// See which threads there are. Those that are known stay.
    fn list(&mut self, host: &dyn Host, now: Duration, members: impl Iterator<Item = ProcessId>) {
        let members: Vec<ProcessId> = members.collect();
        if members == self.members && self.listed.is_some_and(|listed| now < listed + LISTED) {
            return;
        }
        let mut threads = BTreeMap::new();
        for process in &members {
            let directory = format!("proc/{}/task", process.pid);
            for thread in host.list(&directory).unwrap_or_default().into_iter().take(THREADS[1]) {
                if threads.len() < THREADS[0] {
                    let file = format!("{directory}/{thread}/schedstat");
                    let known = self.threads.get(&file).copied().flatten();
                    threads.insert(file, known);
                }
            }
        }
        (self.threads, self.members, self.listed) = (threads, members, Some(now));
    }

    /// For how long threads stood in run queues and ran since they were read last; nothing where the kernel does not
    /// tell.
    fn queued(&mut self, host: &dyn Host) -> Option<(Duration, Duration)> {
        let mut sum = None;
        for (file, before) in &mut self.threads {
            let now = host.read(file).and_then(|bytes| parse::schedstat(&bytes)).ok();
            if let (Some(before), Some(now)) = (std::mem::replace(before, now), now) {
                let (queued, ran) = sum.get_or_insert((0, 0));
                *queued += now.queued.saturating_sub(before.queued);
                *ran += now.ran.saturating_sub(before.ran);
            }
        }
        sum.map(|(queued, ran): (u64, u64)| (Duration::from_nanos(queued), Duration::from_nanos(ran)))
    }
}
