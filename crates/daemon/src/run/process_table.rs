//! All processes on the host: which are new and big enough to track, which have exited, which have grown.
//!
//! If the host reports new programs, these are checked at once. All processes are listed now and then, to find those
//! that forked without an exec, and those that exited. Without such reports, each poll lists all processes.
//!
//! Only due processes are checked. A new process is checked at every poll for a few seconds, since a virtual machine is
//! small when it starts; later the intervals grow. Checking an untracked process takes one read of its size, so
//! thousands of short-lived programs cost little. A reused pid is noticed at the next check.
//!
//! Any user can start processes that exec again and again, so the cost of all of this is bounded. Intervals grow with
//! the number of new processes, and a token bucket limits polling to a part of the daemon's CPU rate. While it is
//! empty, due processes wait, the longest due first.

use super::DaemonSettings;
use crate::decide::{CpuTokenBucket, Event, ProcessArrival};
use pagefold_base::process::Process;
use pagefold_base::process::USER_HZ;
use pagefold_base::tuner::{Tuner, identify_tuner};
use pagefold_base::{Absent, Bytes, Pid, ProcessId, Reading};
use pagefold_host::{ExecEvents, Host, ProcessHandle as Handle, StartedPrograms, observe, parse};
use std::collections::BTreeMap;
use std::time::Duration;

/// Longest check interval of an untracked process.
const MAX_UNTRACKED_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Longest check interval of a program that writes KSM's settings.
const MAX_TUNER_CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// Longest interval between two memory readings of a tracked process that is not new.
const MAX_TRACKED_CHECK_INTERVAL: Duration = Duration::from_secs(16);

/// Growth between two checks from which a process counts as growing.
const GROWTH_THRESHOLD: Bytes = Bytes(1 << 20);

/// Interval between two checks of a process's identity: it may run another program.
const IDENTITY_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// How long a process counts as new after it was seen first.
const NEW_PROCESS_TIME: Duration = Duration::from_secs(60);

/// The first check interval.
const FIRST_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// Interval after which a process's program is identified. Most short-lived processes have exited before.
const PROGRAM_CHECK_DELAY: Duration = Duration::from_millis(800);

/// Interval between two lists of all processes, where the host reports new programs.
const PROCESS_LIST_INTERVAL: Duration = Duration::from_secs(30);

/// The same after reports were lost.
const LIST_INTERVAL_AFTER_OVERFLOW: Duration = Duration::from_secs(1);

/// Number of new processes up to which the first interval is [`FIRST_CHECK_INTERVAL`]. Above it, the interval grows in
/// proportion, so that the number of checks per second does not.
const MAX_NEW_AT_FIRST_INTERVAL: usize = 64;

/// Share of the daemon's CPU rate that polling may use on average, and its burst.
const POLL_CPU_SHARE: f64 = 0.25;
const POLL_CPU_BURST: Duration = Duration::from_secs(1);

struct KnownProcess {
    /// Its pid and start time, once it was opened.
    id: Option<ProcessId>,
    seen_at: Duration,
    check_interval: Duration,
    next_check_at: Duration,
    resident: Bytes,
    /// The process and the time of its next identity check, if it is tracked.
    tracked: Option<(Process, Duration)>,
    /// Until when it counts as untracked, whatever its size.
    untracked_until: Duration,
    /// The process with ranges that the previous daemon enrolled, if it is one. It is tracked whatever its size or
    /// group.
    adopted: Option<ProcessId>,
    /// Whether its program was identified.
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
            adopted: None,
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
    /// Time of the last list of all processes.
    listed_at: Option<Duration>,
    /// Whether reports of new programs were lost.
    events_overflowed: bool,
    /// Total CPU time of polls, and its budget.
    cpu_time_used: Duration,
    token_bucket: CpuTokenBucket,
}

/// Result of a poll.
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
            cpu_time_used: Duration::ZERO,
            token_bucket: CpuTokenBucket::new(0.0, POLL_CPU_BURST, Duration::ZERO, Duration::ZERO),
        }
    }

    /// Whether the host reports new programs, or why not.
    pub fn check_exec_events(&self) -> Reading<()> {
        self.exec_events.as_ref().map(drop).map_err(Absent::clone)
    }

    /// The tracked processes.
    pub fn tracked_processes(&self) -> impl Iterator<Item = &Process> {
        self.entries.values().filter_map(|entry| Some(&entry.tracked.as_ref()?.0))
    }

    /// The processes with ranges that the previous daemon enrolled.
    pub fn adopted_processes(&self) -> impl Iterator<Item = ProcessId> {
        self.entries.values().filter_map(|entry| entry.adopted)
    }

    /// Track processes with ranges that the previous daemon enrolled, whatever their size or group.
    pub fn adopt(&mut self, processes: impl IntoIterator<Item = ProcessId>, now: Duration) {
        for process in processes {
            let entry = self.entries.entry(process.pid).or_insert_with(|| KnownProcess::new(now));
            (entry.adopted, entry.next_check_at) = (Some(process), now);
        }
    }

    /// A program that rewrites KSM's settings periodically.
    pub fn tuner(&self) -> Option<Tuner> {
        self.entries.values().find_map(|entry| entry.tuner)
    }

    /// Whether an untracked process is so new that it may still fill its memory.
    pub fn has_new_untracked(&self) -> bool {
        self.entries.values().any(|entry| entry.tracked.is_none() && entry.check_interval < FIRST_CHECK_INTERVAL * 16)
    }

    /// Whether a tracked process has grown so lately that it may still fill its memory.
    pub fn has_growing_tracked(&self) -> bool {
        self.entries.values().any(|entry| entry.tracked.is_some() && entry.check_interval < MAX_TUNER_CHECK_INTERVAL)
    }

    /// Check the identity of all processes again.
    pub fn recheck_all(&mut self) {
        for entry in self.entries.values_mut() {
            (entry.check_interval, entry.next_check_at, entry.untracked_until) =
                (FIRST_CHECK_INTERVAL, Duration::ZERO, Duration::ZERO);
            if let Some((_, next_check)) = &mut entry.tracked {
                *next_check = Duration::ZERO;
            }
        }
    }

    /// Find processes that have arrived, exited or grown.
    pub fn poll(&mut self, host: &dyn Host, now: Duration, settings: &DaemonSettings) -> Reading<PollResult> {
        let mut polled = PollResult::default();
        let (thread_time_before, used_before) = (host.thread_cpu_time(), self.cpu_time_used);
        let update_budget = |table: &mut Self| {
            table.cpu_time_used = used_before + host.thread_cpu_time().saturating_sub(thread_time_before);
            table.token_bucket.update(now, table.cpu_time_used);
            table.token_bucket.available_seconds() > 0.0
        };
        self.token_bucket.set_limits(settings.rules.cpu_rate * POLL_CPU_SHARE, POLL_CPU_BURST);
        // The first poll checks all processes at any cost: a program that writes KSM's settings may be among them.
        let is_first = self.listed_at.is_none();
        let affordable = update_budget(self);
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
        let due = self.entries.iter().filter(|(_, entry)| entry.next_check_at <= now);
        let mut due: Vec<(Duration, Pid)> = due.map(|(pid, entry)| (entry.next_check_at, *pid)).collect();
        due.sort_unstable();
        for (_, pid) in due {
            if !update_budget(self) && !is_first {
                break;
            }
            self.check_process(host, pid, now, pause, settings, &mut polled);
        }
        update_budget(self);
        Ok(polled)
    }

    /// The first check interval, by the number of new processes.
    fn first_check_interval(&self, now: Duration) -> Duration {
        let new_count = self.entries.values().filter(|entry| entry.is_new(now)).count();
        FIRST_CHECK_INTERVAL * u32::try_from(new_count.div_ceil(MAX_NEW_AT_FIRST_INTERVAL).max(1)).unwrap_or(u32::MAX)
    }

    /// Read the reports of new programs.
    fn read_exec_events(&mut self, now: Duration) {
        let Ok(programs) = &mut self.exec_events else { return };
        let StartedPrograms { mut pids, overflowed } = match programs.take_started() {
            Ok(started) => started,
            Err(why) => return self.exec_events = Err(why),
        };
        self.events_overflowed |= overflowed;
        pids.remove(&self.own_pid);
        for pid in pids {
            let entry = self.entries.entry(pid).or_insert_with(|| KnownProcess::new(now));
            (entry.seen_at, entry.check_interval, entry.next_check_at) = (now, FIRST_CHECK_INTERVAL, now);
            (entry.untracked_until, entry.program_checked) = (Duration::ZERO, false);
            if let Some((_, next_check)) = &mut entry.tracked {
                *next_check = now;
            }
        }
    }

    /// List all processes.
    fn list_processes(&mut self, host: &dyn Host, now: Duration, polled: &mut PollResult) -> Reading<()> {
        let pids = host.pids()?;
        self.entries.retain(|pid, entry| {
            let exists = pids.binary_search(pid).is_ok();
            if !exists {
                polled.untrack(entry);
            }
            exists
        });
        // Processes of the first list are identified at once: the daemon must know a program that writes KSM's settings
        // before it acts.
        let pause = if self.listed_at.is_none() { PROGRAM_CHECK_DELAY } else { FIRST_CHECK_INTERVAL };
        for pid in pids.into_iter().filter(|pid| *pid != self.own_pid) {
            self.entries.entry(pid).or_insert_with(|| KnownProcess { check_interval: pause, ..KnownProcess::new(now) });
        }
        (self.listed_at, self.events_overflowed) = (Some(now), false);
        Ok(())
    }

    /// Check a due process.
    fn check_process(
        &mut self,
        host: &dyn Host,
        pid: Pid,
        now: Duration,
        first_pause: Duration,
        settings: &DaemonSettings,
        polled: &mut PollResult,
    ) {
        let Some(entry) = self.entries.get_mut(&pid) else { return };
        if entry.tracked.is_none()
            && entry.adopted.is_none()
            && entry.tuner.is_none()
            && let Ok(resident) = resident_from_statm(host, host.read(&format!("proc/{pid}/statm")))
            && (resident < settings.min_resident || now < entry.untracked_until)
            && (entry.program_checked || entry.check_interval < PROGRAM_CHECK_DELAY)
        {
            // Kernel threads and zombies have no memory.
            let pause = (entry.check_interval * 2).max(first_pause);
            entry.check_interval = if resident == Bytes::ZERO {
                MAX_UNTRACKED_CHECK_INTERVAL
            } else {
                pause.min(MAX_UNTRACKED_CHECK_INTERVAL)
            };
            entry.next_check_at = now + entry.check_interval;
            return;
        }
        match host.open(pid) {
            Ok(handle) => entry.check(host, &*handle, now, first_pause, settings, polled),
            Err(Absent::Vanished) => {
                polled.untrack(entry);
                self.entries.remove(&pid);
            }
            Err(_) => entry.next_check_at = now + entry.check_interval,
        }
    }
}

impl KnownProcess {
    /// Whether its check interval is short: it is new, or it is tracked and arrived lately.
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
        let id = handle.id();
        if self.id.is_some_and(|previous| previous != id) || self.adopted.is_some_and(|adopted| adopted != id) {
            polled.untrack(self);
            *self = Self::new(now);
        }
        self.id = Some(id);
        if !self.program_checked {
            self.tuner = detect_tuner(host, handle);
            self.program_checked = true;
        }
        let Ok(resident) = read_resident(host, handle) else {
            self.next_check_at = now + self.check_interval;
            return;
        };
        let is_growing = resident.saturating_sub(self.resident) >= GROWTH_THRESHOLD;
        self.resident = resident;
        let is_tracked = self.tracked.is_some();
        if is_tracked {
            polled.resident.push((id, resident));
        }
        let is_recent = is_tracked && now < self.seen_at + NEW_PROCESS_TIME;
        if is_tracked && let Ok(cpu_time) = process_cpu_time(handle) {
            polled.cpu_times.push((id, cpu_time));
        }
        self.check_interval = match (is_tracked, self.tuner) {
            (true, _) if is_growing || is_recent => first_pause.min(MAX_TRACKED_CHECK_INTERVAL),
            (true, _) => (self.check_interval * 2).min(MAX_TRACKED_CHECK_INTERVAL),
            (false, Some(_)) => (self.check_interval * 2).min(MAX_TUNER_CHECK_INTERVAL),
            (false, None) => (self.check_interval * 2).min(MAX_UNTRACKED_CHECK_INTERVAL),
        };
        self.next_check_at = now + self.check_interval;
        let is_due = self.tracked.as_ref().is_none_or(|(_, next_check)| now >= *next_check);
        let must_track = is_tracked || self.adopted.is_some();
        if !is_due || !must_track && resident < settings.min_resident {
            return;
        }
        let Ok(mut process) = observe::process(host, handle) else { return };
        if let Some((previous, _)) = &self.tracked {
            // A failed read does not count as a change of user or cgroup.
            if previous.uid.is_ok() && process.uid.is_err() || previous.cgroup.is_ok() && process.cgroup.is_err() {
                return;
            }
            // A container process keeps its labels, even after the runtime has deleted them at the container's end.
            if previous.cgroup == process.cgroup && !previous.identity.labels.is_empty() {
                process.identity.labels.clone_from(&previous.identity.labels);
            }
        }
        let is_outside_group = settings.tracked_group.as_ref().is_some_and(|only| !only.has(&process));
        if is_outside_group && !must_track {
            self.untracked_until = now + IDENTITY_CHECK_INTERVAL;
            return;
        }
        if let Some(arrival) = self.find_arrival(&process, is_outside_group, settings) {
            polled.events.push(Event::ProcessArrived(arrival));
        }
        self.tracked = Some((process, now + IDENTITY_CHECK_INTERVAL));
    }

    /// The arrival to report for a process: it is new, runs another program, or what decides with which processes it
    /// may share pages has changed.
    fn find_arrival(
        &self,
        process: &Process,
        is_outside_group: bool,
        settings: &DaemonSettings,
    ) -> Option<ProcessArrival> {
        let sharing_rules = |process: &Process| {
            let is_selected = settings.tracked_group.as_ref().is_none_or(|only| only.has(process));
            (settings.domains.domain(process), is_selected, settings.exclusions.reason(process))
        };
        let is_unchanged = |(previous, next_check): &(Process, Duration)| {
            let program = (&previous.comm, &previous.arguments) == (&process.comm, &process.arguments);
            program && sharing_rules(previous) == sharing_rules(process) && !next_check.is_zero()
        };
        if self.tracked.as_ref().is_some_and(is_unchanged) {
            return None;
        }
        // A process that was tracked or adopted before may have merged pages, so it stays known.
        let exclusion_reason =
            is_outside_group.then(|| "it is not in the group of managed processes ([daemon.tracked])".to_owned());
        let arrival = build_arrival(process, self.resident, settings);
        Some(ProcessArrival { exclusion_reason: exclusion_reason.or(arrival.exclusion_reason), ..arrival })
    }
}

impl PollResult {
    /// Report the exit of a tracked or adopted process.
    fn untrack(&mut self, entry: &mut KnownProcess) {
        let (tracked, adopted) = (entry.tracked.take(), entry.adopted.take());
        let process = tracked.map(|(process, _)| process.id).or(adopted);
        self.events.extend(process.map(Event::ProcessExited));
    }
}

/// Whether a process is a program of root that rewrites KSM's settings periodically. Its user is read only if the name
/// matches.
fn detect_tuner(host: &dyn Host, handle: &dyn Handle) -> Option<Tuner> {
    let stat = handle.read("stat").and_then(|bytes| parse::stat(&bytes)).ok()?;
    let arguments = handle.read("cmdline").map(|bytes| parse::arguments(&bytes)).unwrap_or_default();
    identify_tuner(&stat.comm, &arguments).filter(|tuner| tuner.writes_rate())?;
    observe::identify_tuner(host, &observe::process(host, handle).ok()?)
}

fn build_arrival(process: &Process, resident: Bytes, settings: &DaemonSettings) -> ProcessArrival {
    let memory = process.identity.vm.as_ref().and_then(|vm| vm.memory_bytes);
    let size = memory.map(|bytes| format!(" {bytes}")).unwrap_or_default();
    ProcessArrival {
        process: process.id,
        domain: settings.domains.domain(process),
        similarity_key: format!("{}{size}", process.comm),
        exclusion_reason: settings.exclusions.reason(process),
        resident,
    }
}

/// CPU time of all threads, in the resolution of ticks.
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
