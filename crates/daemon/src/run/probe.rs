//! What managed programs wait for: run-queue delay of their threads (`/proc/PID/task/TID/schedstat`), pressure on the
//! CPUs (`/proc/pressure/cpu`) and time stolen by a hypervisor (`/proc/stat`), each since the reading before.
//!
//! At rest this is read seldom, and of many threads only some are looked at: those of the programs that came first,
//! which are the same at work and at rest.

use crate::decide::Waits;
use pagefold_base::ProcessId;
use pagefold_host::{Host, observe, parse};
use std::collections::BTreeMap;
use std::time::Duration;

/// Between two readings while the daemon rests, but for those at which it begins to and ends: at first, and once it has
/// rested for [`LONG`].
const CALM: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(8)];
const LONG: Duration = Duration::from_secs(30);

/// Threads that are looked at, in all and of one process.
const THREADS: [usize; 2] = [64, 16];

/// Between two looks at which threads there are.
const LISTED: Duration = Duration::from_secs(60);

/// Readings that the next one is compared with.
#[derive(Default)]
pub(super) struct Probe {
    read: Option<Duration>,
    /// Whether the daemon worked then, and since when that was so.
    worked: bool,
    turned: Duration,
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
        if turned {
            self.turned = now;
        }
        let calm = CALM[usize::from(now >= self.turned + LONG)];
        if !works && !turned && before.is_some_and(|at| now < at + calm) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake::Fake;

    #[test]
    fn at_rest_it_is_read_seldom_and_all_the_time_at_work() {
        let host = Fake::booted();
        let mut probe = Probe::default();
        let mut read = |seconds: std::ops::Range<u64>, works: bool| -> Vec<u64> {
            let read = |second: &u64| probe.read(&host, Duration::from_secs(*second), works, [].into_iter()).is_some();
            seconds.filter(read).collect()
        };
        let rest: Vec<u64> = (2..30).step_by(2).chain([36, 44, 52]).collect();
        assert_eq!(read(0..60, false), rest);
        assert_eq!(read(60..63, true), [60, 61, 62]);
        assert_eq!(read(63..70, false), [63, 65, 67, 69], "there is something to compare with soon again");
    }
}
