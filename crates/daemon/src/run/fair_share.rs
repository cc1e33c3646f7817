//! Fair shares of tracked processes: each page divided by the number of processes that map it, from page tables
//! (`Pss`).
//!
//! Walking page tables takes 10 to 20 ms of CPU per GiB, measured on a 2-core virtual machine. A thread of its own
//! walks one process at a time, so seldom that it uses a fixed small part of one CPU however much memory there is. The
//! more memory there is, the older the readings are; reports correct them with cheaper counters. If a walk finds no
//! change, the interval grows, until a process is merged, unenrolled or exits: then the fair shares of other processes
//! change, too.
//!
//! A walk never keeps a process from mapping memory for long: see [`process_pages`].
//!
//! Limits: if a target hangs, for example in a page fault on a dead file server, the walk hangs as well. That delays
//! other walks and the daemon's exit; by then the daemon has restored everything.

use super::{Message, WorkResult};
use pagefold_base::{Bytes, Pages, ProcessId, Reading};
use pagefold_host::{Host, parse, receive_timeout};
use pagefold_merge::process_pages;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, SystemTime};

/// Average rate of walks, in CPUs.
const WALK_CPU_RATE: f64 = 0.0003;

/// Burst of walks in CPU seconds, for when many processes have just changed.
const WALK_CPU_BURST_SECONDS: f64 = 1.0;

/// Interval between two checks of the schedule.
const SCHEDULE_INTERVAL: Duration = Duration::from_secs(1);

/// Minimum interval between two walks of one process, unless it was merged meanwhile, and delay of the first walk of a
/// new process.
const MIN_WALK_INTERVAL: Duration = Duration::from_secs(60);

/// Growth of that interval while nothing changes, and its maximum.
const WALK_BACKOFF_FACTOR: u32 = 4;
const MAX_WALK_INTERVAL: Duration = Duration::from_secs(3600);

/// A fair share counts as unchanged if it moved by at most this part of it (divisor).
const UNCHANGED_PSS_DIVISOR: u64 = 64;

/// Fair share of a process when its page tables were walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairShareReading {
    /// Time of the walk.
    pub measured_at: SystemTime,
    /// `Pss`: each page divided by the number of processes that map it, without hugetlb pages.
    pub pss: Bytes,
    /// Resident memory at that time that is neither file pages nor shared memory, from `statm`.
    pub anonymous_resident: Bytes,
    /// Merged pages at that time, by the counter that is also read between walks; `None` where the kernel lacks it.
    pub merged_pages: Option<Pages>,
}

impl FairShareReading {
    /// Whether the fair share has hardly changed.
    pub(super) fn is_close_to(&self, later: &Self) -> bool {
        self.pss.0.abs_diff(later.pss.0) <= self.pss.0 / UNCHANGED_PSS_DIVISOR
    }
}

/// A request to walk the page tables of a process.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkRequest {
    /// The process.
    pub process: ProcessId,
    /// Whether to count zero pages that KSM does not count.
    pub wants_zero_pages: bool,
}

/// The next walk of a process.
#[derive(Clone, Copy, Debug)]
struct ScheduledWalk {
    due_at: Duration,
    /// Interval before this walk.
    interval: Duration,
}

impl ScheduledWalk {
    fn due_after(pause: Duration, now: Duration) -> Self {
        Self { due_at: now + pause, interval: pause }
    }
}

/// When each process is walked next.
#[derive(Debug)]
pub(super) struct WalkSchedule {
    /// The scheduled walks.
    walks: BTreeMap<ProcessId, ScheduledWalk>,
    /// Processes that have just changed much.
    changed_processes: BTreeSet<ProcessId>,
    /// Whether the last walk was of a changed process: these alternate with the other processes.
    last_was_changed: bool,
    /// Whether a walk is running.
    is_walking: bool,
    /// CPU seconds left; negative after a long walk.
    tokens_left_seconds: f64,
    /// Time of the last update.
    updated_at: Duration,
}

impl Default for WalkSchedule {
    fn default() -> Self {
        Self {
            walks: BTreeMap::new(),
            changed_processes: BTreeSet::new(),
            last_was_changed: false,
            is_walking: false,
            tokens_left_seconds: WALK_CPU_BURST_SECONDS,
            updated_at: Duration::ZERO,
        }
    }
}

impl WalkSchedule {
    /// The process to walk now, if the CPU budget allows it and no walk is running. Changed processes alternate with
    /// the process that has waited longest.
    pub fn next_walk(&mut self, now: Duration, tracked: impl Iterator<Item = ProcessId>) -> Option<ProcessId> {
        let elapsed = now.saturating_sub(self.updated_at);
        if self.is_walking || elapsed < SCHEDULE_INTERVAL {
            return None;
        }
        self.tokens_left_seconds =
            (self.tokens_left_seconds + elapsed.as_secs_f64() * WALK_CPU_RATE).min(WALK_CPU_BURST_SECONDS);
        self.updated_at = now;
        if self.tokens_left_seconds <= 0.0 {
            return None;
        }
        let mut previous = std::mem::take(&mut self.walks);
        let reschedule =
            |process| (process, previous.remove(&process).unwrap_or(ScheduledWalk::due_after(MIN_WALK_INTERVAL, now)));
        self.walks = tracked.map(reschedule).collect();
        if !self.changed_processes.is_empty() || !previous.is_empty() {
            let earliest = ScheduledWalk::due_after(MIN_WALK_INTERVAL, now);
            self.walks.values_mut().filter(|walk| walk.due_at > earliest.due_at).for_each(|walk| *walk = earliest);
        }
        self.changed_processes.retain(|process| self.walks.contains_key(process));
        let longest_due = self.walks.iter().filter(|(_, walk)| walk.due_at <= now).min_by_key(|(_, walk)| walk.due_at);
        let longest_due = longest_due.map(|(process, _)| *process);
        let changed =
            self.changed_processes.first().copied().filter(|_| !self.last_was_changed || longest_due.is_none());
        let process = changed.or(longest_due)?;
        self.changed_processes.remove(&process);
        (self.is_walking, self.last_was_changed) = (true, changed.is_some());
        Some(process)
    }

    /// Record the end of a walk: its CPU time, and whether it found a change.
    pub fn record_walk(&mut self, now: Duration, process: ProcessId, cpu_time: Duration, has_changed: bool) {
        (self.is_walking, self.tokens_left_seconds) = (false, self.tokens_left_seconds - cpu_time.as_secs_f64());
        if let Some(walk) = self.walks.get_mut(&process) {
            let pause = if has_changed {
                MIN_WALK_INTERVAL
            } else {
                (walk.interval * WALK_BACKOFF_FACTOR).min(MAX_WALK_INTERVAL)
            };
            *walk = ScheduledWalk::due_after(pause, now);
        }
    }

    /// Mark a process that has just changed much.
    pub fn mark_changed(&mut self, process: ProcessId) {
        self.changed_processes.insert(process);
    }
}

/// Time after which the walker waits for a request anew. It is short, because a host in virtual time may let it pass at
/// once where the other threads have not begun to wait.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Walk one process after the other, until the requests end.
pub(super) fn run_walker(host: &dyn Host, requests: &Receiver<WalkRequest>, messages: &Sender<Message>) {
    loop {
        let WalkRequest { process, wants_zero_pages } = match receive_timeout(host, requests, REQUEST_TIMEOUT) {
            Ok(request) => request,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let cpu_before = host.thread_cpu_time();
        let fair_share = measure_fair_share(host, process).ok();
        let count_zero_pages = || process_pages::uncounted_zero_pages(host, &*pagefold_host::hold(host, process)?);
        let uncounted_zero_pages = wants_zero_pages.then(count_zero_pages).and_then(Reading::ok);
        let cpu_time = host.thread_cpu_time().saturating_sub(cpu_before);
        // During shutdown the receiver may be gone.
        let _ = messages.send(Message::WorkResult(WorkResult::PageTableWalk {
            process,
            fair_share,
            uncounted_zero_pages,
            cpu_time,
        }));
    }
}

fn measure_fair_share(host: &dyn Host, process: ProcessId) -> Reading<FairShareReading> {
    let handle = pagefold_host::hold(host, process)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let anonymous_resident = parse::statm(&handle.read("statm")?)?.anonymous_bytes(host.page_size());
    let pss = process_pages::fair_share(host, &*handle)?;
    Ok(FairShareReading {
        measured_at: host.unix_time(),
        pss,
        anonymous_resident,
        merged_pages: ksm.merging_pages.ok().map(Pages),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_host::fake_host::FakeHost;
    use std::sync::mpsc;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time: 1 }
    }

    /// The walks within some seconds, as (second, pid), for a given CPU time per walk.
    fn run_changing_walks(
        schedule: &mut WalkSchedule,
        from: u64,
        seconds: u64,
        processes: u32,
        cost: Duration,
    ) -> Vec<(u64, u32)> {
        run_walks(schedule, (from, seconds), processes, cost, true)
    }

    /// The same, where walks find a change or none.
    fn run_walks(
        schedule: &mut WalkSchedule,
        (from, seconds): (u64, u64),
        processes: u32,
        cost: Duration,
        has_changed: bool,
    ) -> Vec<(u64, u32)> {
        let second = |second| {
            let now = Duration::from_secs(second);
            let next = schedule.next_walk(now, (1..=processes).map(process))?;
            schedule.record_walk(now, next, cost, has_changed);
            Some((second, next.pid.0))
        };
        (from..from + seconds).filter_map(second).collect()
    }

    #[test]
    fn walks_take_turns_within_the_cpu_rate() {
        let mut schedule = WalkSchedule::default();
        // Cheap processes are walked once a minute.
        let found = run_changing_walks(&mut schedule, 0, 200, 2, Duration::from_micros(10));
        assert_eq!(found, [(61, 1), (62, 2), (121, 1), (122, 2), (181, 1), (182, 2)]);
        // A day with 200 processes of about 30 GiB each.
        let (mut schedule, cost) = (WalkSchedule::default(), Duration::from_millis(400));
        let found = run_changing_walks(&mut schedule, 0, 86_400, 200, cost);
        let used = found.len() as f64 * cost.as_secs_f64();
        assert!((25.0..=27.4).contains(&used), "{used} s of 0.0003 x 86,400 s and 1 s");
        assert!(found.iter().zip(1..).all(|((_, pid), index)| *pid == index), "each process is walked once per round");
        // A process whose walk takes longer than the whole burst is still walked, and the rate makes up for it.
        let mut schedule = WalkSchedule::default();
        let found = run_changing_walks(&mut schedule, 0, 86_400, 1, Duration::from_secs(10));
        assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<u64>>(), [61, 30_061, 63_395], "9 s, then 10 s");
    }

    #[test]
    fn walks_back_off_until_something_changes() {
        let mut schedule = WalkSchedule::default();
        let at = |found: &[(u64, u32)], pid| -> Vec<u64> {
            found.iter().filter(|(_, walked)| *walked == pid).map(|(at, _)| *at).collect()
        };
        let first = run_walks(&mut schedule, (0, 10_000), 2, Duration::ZERO, false);
        assert_eq!(at(&first, 1), [61, 301, 1261, 4861, 8461]);
        schedule.mark_changed(process(2));
        let soon = run_walks(&mut schedule, (10_000, 100), 2, Duration::ZERO, false);
        assert_eq!((at(&soon, 1), at(&soon, 2)), (vec![10_060], vec![10_000]));
        run_walks(&mut schedule, (10_100, 20_000), 2, Duration::ZERO, false);
        // The process that shared with it has exited.
        let single_process = run_walks(&mut schedule, (30_100, 200), 1, Duration::ZERO, false);
        assert_eq!(at(&single_process, 1), [30_160]);
        let fair = |mib: u64| FairShareReading {
            measured_at: SystemTime::UNIX_EPOCH,
            pss: Bytes(mib << 20),
            anonymous_resident: Bytes::ZERO,
            merged_pages: None,
        };
        assert!(fair(640).is_close_to(&fair(650)) && fair(640).is_close_to(&fair(630)));
        assert!(
            !fair(640).is_close_to(&fair(651)) && !fair(640).is_close_to(&fair(629)) && !fair(0).is_close_to(&fair(1))
        );
    }

    #[test]
    fn merged_process_is_walked_next() {
        let mut schedule = WalkSchedule::default();
        run_changing_walks(&mut schedule, 0, 70, 3, Duration::ZERO);
        schedule.mark_changed(process(3));
        schedule.mark_changed(process(9));
        assert_eq!(run_changing_walks(&mut schedule, 70, 40, 3, Duration::ZERO), [(70, 3)]);
        let busy = schedule.next_walk(Duration::from_secs(150), [process(1), process(2)].into_iter());
        assert_eq!(busy, Some(process(1)));
        let two = schedule.next_walk(Duration::from_secs(160), [process(1), process(2)].into_iter());
        assert_eq!(two, None, "one walk at a time");
        schedule.record_walk(Duration::from_secs(161), process(1), Duration::ZERO, true);
        assert_eq!(
            schedule.next_walk(Duration::from_secs(162), [process(7)].into_iter()),
            None,
            "an exited process is not walked"
        );
    }

    #[test]
    fn changed_and_other_processes_alternate() {
        // More processes than CPU time: each waits its turn.
        let (mut schedule, cost) = (WalkSchedule::default(), Duration::from_millis(300));
        let found = run_changing_walks(&mut schedule, 0, 40_000, 100, cost);
        let (last, _) = found[found.len() - 1];
        [50, 51, 52].into_iter().for_each(|pid| schedule.mark_changed(process(pid)));
        let found: Vec<u32> =
            run_changing_walks(&mut schedule, last + 1, 7000, 100, cost).into_iter().map(|(_, pid)| pid).collect();
        let others: Vec<u32> = found.iter().copied().filter(|pid| !(50..53).contains(pid)).collect();
        assert_eq!((found[0], found[2], found[4]), (50, 51, 52), "{found:?}");
        assert!(others.windows(2).all(|pair| pair[1] == pair[0] + 1), "other processes keep their order: {others:?}");
        // A process that changes during its walk is walked again.
        let mut schedule = WalkSchedule::default();
        run_changing_walks(&mut schedule, 0, 61, 1, Duration::ZERO);
        assert_eq!(schedule.next_walk(Duration::from_secs(61), [process(1)].into_iter()), Some(process(1)));
        schedule.mark_changed(process(1));
        schedule.record_walk(Duration::from_secs(62), process(1), Duration::ZERO, true);
        assert_eq!(schedule.next_walk(Duration::from_secs(63), [process(1)].into_iter()), Some(process(1)));
    }

    #[test]
    fn walk_reports_the_readable_fair_share() {
        let host = FakeHost::booted();
        host.start_process(5, 1000);
        host.put_file("proc/5/statm", "2000 1000 80 1 0 900 0\n");
        host.put_file("proc/5/smaps_rollup", "0-1 ---p 0 00:00 0 [rollup]\nRss: 4000 kB\nPss: 1300 kB\n");
        host.put_file("proc/5/ksm_stat", "ksm_rmap_items 900\nksm_zero_pages 0\nksm_merging_pages 700\n");
        let (requests, request_receiver) = mpsc::channel();
        let (messages, message_receiver) = mpsc::channel();
        let reused_pid = ProcessId { start_time: 2, ..process(5) };
        let walk_of = |process| WalkRequest { process, wants_zero_pages: false };
        [process(5), reused_pid, process(6)].into_iter().for_each(|process| requests.send(walk_of(process)).unwrap());
        drop(requests);
        run_walker(&host, &request_receiver, &messages);
        let fair_share = message_receiver.try_iter().map(|message| match message {
            Message::WorkResult(WorkResult::PageTableWalk { process, fair_share, .. }) => (process, fair_share),
            _ => panic!("only walks are sent"),
        });
        let fair_share: Vec<(ProcessId, Option<FairShareReading>)> = fair_share.collect();
        let found = fair_share[0].1.unwrap();
        assert_eq!((found.pss, found.merged_pages), (Bytes::from_kib(1300), Some(Pages(700))));
        assert_eq!(found.anonymous_resident, Bytes((1000 - 80) * 4096));
        assert!(fair_share[1].0 == reused_pid && fair_share[1].1.is_none() && fair_share[2].1.is_none());
    }
}
