//! Who runs: who has come and is big enough to be managed, who went, who grew.
//!
//! Where the host tells of programs as they begin, those are looked at, and all processes are listed now and then: for
//! those that forked and did not become another program, and to see who went. Elsewhere they are listed at every poll.
//!
//! Only those are looked at whose turn it is: a process that has just come at every poll for a few seconds, since a
//! virtual machine is small when it starts, and longer and longer ones afterwards. A look at who is not managed is one
//! read of its size, so that thousands of short-lived programs cost little. A number that was given to another process
//! is noticed when its turn comes.
//!
//! Any user can start processes that become other programs again and again, so what all of this costs is bounded: the
//! pauses grow with the number of new processes, and a token bucket holds a part of the daemon's CPU bound. Where that
//! is empty, the processes that are due wait, the longest due first.

use super::DaemonSettings;
use crate::decide::{CpuTokenBucket, Event, ProcessArrival};
use pagefold_base::process::Process;
use pagefold_base::process::USER_HZ;
use pagefold_base::tuner::{Tuner, identify_tuner};
use pagefold_base::{Absent, Bytes, Pid, ProcessId, Reading};
use pagefold_host::{ExecEvents, Host, ProcessHandle as Handle, StartedPrograms, observe, parse};
use rustix::time::{ClockId, clock_gettime};
use std::collections::BTreeMap;
use std::time::Duration;

/// The longest pause between two looks at a process that is not managed.
const MAX_UNTRACKED_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// The longest pause between two looks at a program that writes KSM's settings.
const MAX_TUNER_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The longest pause between two looks at the memory of one that is managed and has been there for long.
const MAX_TRACKED_CHECK_INTERVAL: Duration = Duration::from_secs(16);

/// Growth between two looks with which it fills.
const GROWTH_THRESHOLD: Bytes = Bytes(1 << 20);

/// Between two looks at who it is: it may have become another program.
const IDENTITY_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// How long somebody has not been there for long: what it does is followed.
const NEW_PROCESS_TIME: Duration = Duration::from_secs(60);

/// The first pause.
const FIRST_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The pause after which a process is asked what program it is. Most have ended before.
const PROGRAM_CHECK_DELAY: Duration = Duration::from_millis(800);

/// Between two lists of all processes where the host tells of programs as they begin.
const PROCESS_LIST_INTERVAL: Duration = Duration::from_secs(30);

/// The same after some were lost.
const LIST_INTERVAL_AFTER_OVERFLOW: Duration = Duration::from_secs(1);

/// New processes up to which the first pause is [`FIRST_CHECK_INTERVAL`]. With more of them it grows in proportion, so that the looks
/// at new processes within a second do not.
const MAX_NEW_AT_FIRST_INTERVAL: usize = 64;

/// The part of the daemon's CPU bound that observing processes may take on average, and the burst.
const POLL_CPU_SHARE: f64 = 0.25;
const POLL_CPU_BURST: Duration = Duration::from_secs(1);

struct KnownProcess {
    /// Which it was when it was taken hold of.
    id: Option<ProcessId>,
    seen_at: Duration,
    check_interval: Duration,
    next_check_at: Duration,
    resident: Bytes,
    /// Who it is, and when that is looked at again, if it is managed.
    tracked: Option<(Process, Duration)>,
    /// Until when it is taken to be nobody who is managed, whatever its size.
    untracked_until: Duration,
    /// Whether it was asked what program it is.
    program_checked: bool,
    tuner: Option<Tuner>,
}

impl KnownProcess {
    fn new(now: Duration) -> Self {
        Self {
            id: None,
            seen_at: now,
            check_interval: FIRST_CHECK_INTERVAL,
            next_check_at: now,
            resident: Bytes::ZERO,
            tracked: None,
            untracked_until: Duration::ZERO,
            program_checked: false,
            tuner: None,
        }
    }
}

/// The processes of a host.
pub(super) struct ProcessTable {
    entries: BTreeMap<Pid, KnownProcess>,
    own_pid: Pid,
    exec_events: Reading<Box<dyn ExecEvents>>,
    /// When all processes were listed last.
    listed_at: Option<Duration>,
    /// Whether programs have begun that are not known.
    events_overflowed: bool,
    /// The CPU time of the polling thread.
    cpu_clock: fn() -> Duration,
    /// CPU time that polls have taken in all, and what they may take.
    cpu_time_used: Duration,
    token_bucket: CpuTokenBucket,
}

/// What a poll found.
#[derive(Default)]
pub(super) struct PollResult {
    pub events: Vec<Event>,
    pub resident: Vec<(ProcessId, Bytes)>,
    pub cpu_times: Vec<(ProcessId, Duration)>,
}

impl ProcessTable {
    pub fn new(host: &dyn Host) -> Self {
        Self {
            entries: BTreeMap::new(),
            own_pid: Pid(std::process::id()),
            exec_events: host.follow_programs(),
            listed_at: None,
            events_overflowed: false,
            cpu_clock: thread_cpu_time,
            cpu_time_used: Duration::ZERO,
            token_bucket: CpuTokenBucket::new(0.0, POLL_CPU_BURST, Duration::ZERO, Duration::ZERO),
        }
    }

    /// With another clock of CPU time.
    #[cfg(test)]
    pub fn with_cpu_clock(self, cpu_clock: fn() -> Duration) -> Self {
        Self { cpu_clock, ..self }
    }

    /// Whether the host tells of programs as they begin, or why not.
    pub fn check_exec_events(&self) -> Reading<()> {
        self.exec_events.as_ref().map(drop).map_err(Absent::clone)
    }

    /// Who is managed.
    pub fn tracked_processes(&self) -> impl Iterator<Item = &Process> {
        self.entries.values().filter_map(|known| Some(&known.tracked.as_ref()?.0))
    }

    /// A program that writes KSM's settings again and again.
    pub fn tuner(&self) -> Option<Tuner> {
        self.entries.values().find_map(|known| known.tuner)
    }

    /// Whether anybody has come so lately that it may still fill.
    pub fn has_new_untracked(&self) -> bool {
        self.entries.values().any(|known| known.tracked.is_none() && known.check_interval < FIRST_CHECK_INTERVAL * 16)
    }

    /// Whether anybody who is managed has grown so lately that it may still fill.
    pub fn has_growing_tracked(&self) -> bool {
        self.entries.values().any(|known| known.tracked.is_some() && known.check_interval < MAX_TUNER_CHECK_INTERVAL)
    }

    /// Everybody is to be judged anew.
    pub fn recheck_all(&mut self) {
        for known in self.entries.values_mut() {
            (known.check_interval, known.next_check_at, known.untracked_until) =
                (FIRST_CHECK_INTERVAL, Duration::ZERO, Duration::ZERO);
            if let Some((_, again)) = &mut known.tracked {
                *again = Duration::ZERO;
            }
        }
    }

    /// See who came, went and grew.
    pub fn poll(&mut self, host: &dyn Host, now: Duration, settings: &DaemonSettings) -> Reading<PollResult> {
        let mut polled = PollResult::default();
        let (began, before) = ((self.cpu_clock)(), self.cpu_time_used);
        let read = |roster: &mut Self| {
            roster.cpu_time_used = before + (roster.cpu_clock)().saturating_sub(began);
            roster.token_bucket.update(now, roster.cpu_time_used);
            roster.token_bucket.available_seconds() > 0.0
        };
        self.token_bucket.set_limits(settings.rules.cpu_rate * POLL_CPU_SHARE, POLL_CPU_BURST);
        // At first all are looked at, whatever it costs: a program that writes KSM's settings may be among them.
        let first = self.listed_at.is_none();
        let affordable = read(self);
        self.read_exec_events(now);
        let pause = match (&self.exec_events, self.events_overflowed) {
            _ if !affordable => PROCESS_LIST_INTERVAL,
            (Err(_), _) => Duration::ZERO,
            (Ok(_), true) => LIST_INTERVAL_AFTER_OVERFLOW,
            (Ok(_), false) => PROCESS_LIST_INTERVAL,
        };
        if self.listed_at.is_none_or(|listed| now >= listed + pause) {
            self.list_processes(host, now, &mut polled)?;
        }
        let pause = self.first_check_interval(now);
        let due = self.entries.iter().filter(|(_, known)| known.next_check_at <= now);
        let mut due: Vec<(Duration, Pid)> = due.map(|(pid, known)| (known.next_check_at, *pid)).collect();
        due.sort_unstable();
        for (_, pid) in due {
            if !read(self) && !first {
                break;
            }
            self.check_process(host, pid, now, pause, settings, &mut polled);
        }
        read(self);
        Ok(polled)
    }

    /// The first pause between two looks at a process, by the number of those that are new.
    fn first_check_interval(&self, now: Duration) -> Duration {
        let new = self.entries.values().filter(|known| known.is_new(now)).count();
        FIRST_CHECK_INTERVAL * u32::try_from(new.div_ceil(MAX_NEW_AT_FIRST_INTERVAL).max(1)).unwrap_or(u32::MAX)
    }

    /// Take in which programs have begun.
    fn read_exec_events(&mut self, now: Duration) {
        let Ok(programs) = &mut self.exec_events else { return };
        let StartedPrograms { mut pids, overflowed: lost } = match programs.take_started() {
            Ok(begun) => begun,
            Err(why) => return self.exec_events = Err(why),
        };
        self.events_overflowed |= lost;
        pids.remove(&self.own_pid);
        for pid in pids {
            let known = self.entries.entry(pid).or_insert_with(|| KnownProcess::new(now));
            (known.seen_at, known.check_interval, known.next_check_at) = (now, FIRST_CHECK_INTERVAL, now);
            (known.untracked_until, known.program_checked) = (Duration::ZERO, false);
            if let Some((_, again)) = &mut known.tracked {
                *again = now;
            }
        }
    }

    /// List all processes.
    fn list_processes(&mut self, host: &dyn Host, now: Duration, polled: &mut PollResult) -> Reading<()> {
        let pids = host.pids()?;
        self.entries.retain(|pid, known| {
            let there = pids.binary_search(pid).is_ok();
            if !there {
                polled.untrack(known);
            }
            there
        });
        // Who was there before is asked at once: a program that writes KSM's settings is heeded before anything is
        // done.
        let pause = if self.listed_at.is_none() { PROGRAM_CHECK_DELAY } else { FIRST_CHECK_INTERVAL };
        for pid in pids.into_iter().filter(|pid| *pid != self.own_pid) {
            self.entries.entry(pid).or_insert_with(|| KnownProcess { check_interval: pause, ..KnownProcess::new(now) });
        }
        (self.listed_at, self.events_overflowed) = (Some(now), false);
        Ok(())
    }

    /// Look at somebody whose turn it is.
    fn check_process(
        &mut self,
        host: &dyn Host,
        pid: Pid,
        now: Duration,
        first_pause: Duration,
        settings: &DaemonSettings,
        polled: &mut PollResult,
    ) {
        let Some(known) = self.entries.get_mut(&pid) else { return };
        if known.tracked.is_none()
            && known.tuner.is_none()
            && let Ok(resident) = resident_from_statm(host, host.read(&format!("proc/{pid}/statm")))
            && (resident < settings.min_resident || now < known.untracked_until)
            && (known.program_checked || known.check_interval < PROGRAM_CHECK_DELAY)
        {
            // Kernel threads have no memory, nor has who has ended and was not waited for.
            let pause = (known.check_interval * 2).max(first_pause);
            known.check_interval = if resident == Bytes::ZERO {
                MAX_UNTRACKED_CHECK_INTERVAL
            } else {
                pause.min(MAX_UNTRACKED_CHECK_INTERVAL)
            };
            known.next_check_at = now + known.check_interval;
            return;
        }
        match host.open(pid) {
            Ok(handle) => known.check(host, &*handle, now, first_pause, settings, polled),
            Err(Absent::Vanished) => {
                polled.untrack(known);
                self.entries.remove(&pid);
            }
            Err(_) => known.next_check_at = now + known.check_interval,
        }
    }
}

impl KnownProcess {
    /// Whether it is looked at often: it has just come, or it is managed and has come lately.
    fn is_new(&self, now: Duration) -> bool {
        self.check_interval < FIRST_CHECK_INTERVAL * 16
            || self.tracked.is_some() && now < self.seen_at + NEW_PROCESS_TIME
    }

    fn check(
        &mut self,
        host: &dyn Host,
        handle: &dyn Handle,
        now: Duration,
        first_pause: Duration,
        settings: &DaemonSettings,
        polled: &mut PollResult,
    ) {
        let process = handle.id();
        if self.id.is_some_and(|known| known != process) {
            polled.untrack(self);
            *self = Self::new(now);
        }
        self.id = Some(process);
        if !self.program_checked {
            self.tuner = detect_tuner(host, handle);
            self.program_checked = true;
        }
        let Ok(resident) = read_resident(host, handle) else {
            self.next_check_at = now + self.check_interval;
            return;
        };
        let grows = resident.saturating_sub(self.resident) >= GROWTH_THRESHOLD;
        self.resident = resident;
        let managed = self.tracked.is_some();
        if managed {
            polled.resident.push((process, resident));
        }
        let young = managed && now < self.seen_at + NEW_PROCESS_TIME;
        if managed && let Ok(ran) = process_cpu_time(handle) {
            polled.cpu_times.push((process, ran));
        }
        self.check_interval = match (managed, self.tuner) {
            (true, _) if grows || young => first_pause.min(MAX_TRACKED_CHECK_INTERVAL),
            (true, _) => (self.check_interval * 2).min(MAX_TRACKED_CHECK_INTERVAL),
            (false, Some(_)) => (self.check_interval * 2).min(MAX_TUNER_CHECK_INTERVAL),
            (false, None) => (self.check_interval * 2).min(MAX_UNTRACKED_CHECK_INTERVAL),
        };
        self.next_check_at = now + self.check_interval;
        let due = self.tracked.as_ref().is_none_or(|(_, again)| now >= *again);
        if !due || !managed && resident < settings.min_resident {
            return;
        }
        let Ok(mut who) = observe::process(host, handle) else { return };
        if let Some((before, _)) = &self.tracked {
            // Where nothing can be read for once it has not moved.
            if before.uid.is_ok() && who.uid.is_err() || before.cgroup.is_ok() && who.cgroup.is_err() {
                return;
            }
            // A container keeps its labels, also when it ends and its runtime has thrown them away.
            if before.cgroup == who.cgroup && !before.identity.labels.is_empty() {
                who.identity.labels.clone_from(&before.identity.labels);
            }
        }
        let foreign = settings.tracked_group.as_ref().is_some_and(|only| !only.has(&who));
        if foreign && !managed {
            self.untracked_until = now + IDENTITY_CHECK_INTERVAL;
            return;
        }
        // What decides with whom it may share: where that changes it is told of again.
        let standing = |who: &Process| {
            let chosen = settings.tracked_group.as_ref().is_none_or(|only| only.has(who));
            (settings.domains.domain(who), chosen, settings.exclusions.reason(who))
        };
        let same = |(before, again): &(Process, Duration)| {
            let program = (&before.comm, &before.arguments) == (&who.comm, &who.arguments);
            program && standing(before) == standing(&who) && !again.is_zero()
        };
        if !self.tracked.as_ref().is_some_and(same) {
            // Who was managed before, and may be merged, is not forgotten for that.
            let not_chosen = foreign.then(|| "it is not among those that are managed ([daemon.only])".to_owned());
            let arrival = build_arrival(&who, resident, settings);
            polled.events.push(Event::ProcessArrived(ProcessArrival {
                exclusion_reason: not_chosen.or(arrival.exclusion_reason),
                ..arrival
            }));
        }
        self.tracked = Some((who, now + IDENTITY_CHECK_INTERVAL));
    }
}

impl PollResult {
    /// Somebody is managed no more.
    fn untrack(&mut self, known: &mut KnownProcess) {
        self.events.extend(known.tracked.take().map(|(who, _)| Event::ProcessExited(who.id)));
    }
}

/// Whether a process is a program of root that writes KSM's settings again and again. Whose it is is asked only of one
/// that has the name.
fn detect_tuner(host: &dyn Host, handle: &dyn Handle) -> Option<Tuner> {
    let stat = handle.read("stat").and_then(|bytes| parse::stat(&bytes)).ok()?;
    let arguments = handle.read("cmdline").map(|bytes| parse::arguments(&bytes)).unwrap_or_default();
    identify_tuner(&stat.comm, &arguments).filter(|tuner| tuner.writes_rate())?;
    observe::identify_tuner(host, &observe::process(host, handle).ok()?)
}

fn build_arrival(who: &Process, resident: Bytes, settings: &DaemonSettings) -> ProcessArrival {
    let memory = who.identity.vm.as_ref().and_then(|vm| vm.memory_bytes);
    let size = memory.map(|bytes| format!(" {bytes}")).unwrap_or_default();
    ProcessArrival {
        process: who.id,
        domain: settings.domains.domain(who),
        similarity_key: format!("{}{size}", who.comm),
        exclusion_reason: settings.exclusions.reason(who),
        resident,
    }
}

/// The CPU time of this thread.
fn thread_cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.max(0) as u64, time.tv_nsec as u32)
}

/// CPU time of all threads, in ticks.
fn process_cpu_time(handle: &dyn Handle) -> Reading<Duration> {
    let stat = parse::stat(&handle.read("stat")?)?;
    Ok(Duration::from_secs_f64(stat.utime.saturating_add(stat.stime) as f64 / USER_HZ))
}

/// Resident memory by `statm`.
fn resident_from_statm(host: &dyn Host, statm: Reading<Vec<u8>>) -> Reading<Bytes> {
    Ok(host.page_size().bytes_of(parse::statm(&statm?)?.resident))
}

/// Resident memory by `statm`, else the sum over the regions.
pub(super) fn read_resident(host: &dyn Host, handle: &dyn Handle) -> Reading<Bytes> {
    resident_from_statm(host, handle.read("statm"))
        .or_else(|_| Ok(observe::regions(handle)?.iter().map(|region| region.rss).sum()))
}
