//! What members take by fair share: each page divided by those who map it, as page tables tell (`Pss`).
//!
//! A walk through them takes 10 to 20 ms of CPU for a GiB, measured on a 2-core virtual machine: it is done on a thread
//! of its own, of one process at a time, and so seldom that it takes a fixed small part of one CPU however much memory
//! there is. The more there is, the older is what is known; what has changed since is added from cheaper counters by
//! whoever shows it. Where a walk finds what the one before did, the next comes later, until somebody is merged,
//! withdrawn or gone: the others then take more or less, too.
//!
//! While one region is walked its process can map and unmap nothing (fs/proc/task_mmu.c, `show_smaps_rollup` lets go of
//! `mmap_lock` between regions only), and a virtual machine is one region: those beyond [`LARGEST`] are not walked so.
//! Their zero pages are counted all the same, where a merge noted any: by `pagemap`, for which the kernel locks a few MiB
//! at a time (`pagemap_read`), and in a bounded part of the address space ([`verify::uncounted_zero_pages`]).
//! Limits: a walk that hangs because its target does, in a page fault of a dead file server, holds up the others and the
//! end of the daemon, which by then has put everything back.

use super::{Message, WorkResult};
use pagefold_base::{Bytes, Pages, ProcessId, Reading};
use pagefold_host::{Host, observe, parse};
use pagefold_merge::verify;
pub(super) use pagefold_merge::verify::LARGEST;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, SystemTime};

/// Of one CPU, what walks may take on average.
const WALK_CPU_RATE: f64 = 0.0003;

/// What may be saved up for when much has just changed.
const WALK_CPU_BURST_SECONDS: f64 = 1.0;

/// Between two looks at whose turn it is.
const SCHEDULE_INTERVAL: Duration = Duration::from_secs(1);

/// Between two walks of one process at least, unless it was merged meanwhile, and before the first of one that has just
/// come.
const MIN_WALK_INTERVAL: Duration = Duration::from_secs(60);

/// By how much that is longer each time that nothing has changed, and how long it is at most.
const WALK_BACKOFF_FACTOR: u32 = 4;
const MAX_WALK_INTERVAL: Duration = Duration::from_secs(3600);

/// The part of it by which what a process takes may have moved when nothing has changed.
const UNCHANGED_PSS_DIVISOR: u64 = 64;

/// What a process took when its page tables were walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FairShareReading {
    /// When.
    pub measured_at: SystemTime,
    /// Each of its pages divided by those who map it, huge pages of hugetlb apart.
    pub pss: Bytes,
    /// What of it was resident then that is neither a file nor shared memory, by `statm`.
    pub anonymous_resident: Bytes,
    /// Pages that were merged then by the counter that is read all the time, where the kernel has it.
    pub merged_pages: Option<Pages>,
}

impl FairShareReading {
    /// Whether hardly anything has changed since.
    pub(super) fn is_close_to(&self, later: &Self) -> bool {
        self.pss.0.abs_diff(later.pss.0) <= self.pss.0 / UNCHANGED_PSS_DIVISOR
    }
}

/// A walk that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct WalkRequest {
    /// Through the page tables of which process.
    pub process: ProcessId,
    /// Whether to find out what it takes by fair share.
    pub wants_fair_share: bool,
    /// Whether to count the zero pages that KSM does not count.
    pub wants_zero_pages: bool,
}

/// When it is somebody's turn.
#[derive(Clone, Copy, Debug)]
struct ScheduledWalk {
    due_at: Duration,
    /// The pause before that.
    interval: Duration,
}

impl ScheduledWalk {
    fn due_after(pause: Duration, now: Duration) -> Self {
        Self { due_at: now + pause, interval: pause }
    }
}

/// Whose turn it is.
#[derive(Debug)]
pub(super) struct WalkSchedule {
    /// From when on it is whose turn.
    walks: BTreeMap<ProcessId, ScheduledWalk>,
    /// Of whom much has just changed.
    changed_processes: BTreeSet<ProcessId>,
    /// Whether the last walk was of one of them: others have every second one.
    last_was_changed: bool,
    /// Whether a walk is under way.
    is_walking: bool,
    /// CPU seconds that are left; less than none after a long walk.
    tokens_left_seconds: f64,
    /// When it was looked at last.
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
    /// Of these, who is to be walked now, if there is CPU time for it and no other walk is under way: of whom much has
    /// changed, and in turn with those who has waited longest.
    pub fn next_walk(&mut self, now: Duration, tracked: impl Iterator<Item = ProcessId>) -> Option<ProcessId> {
        let since = now.saturating_sub(self.updated_at);
        if self.is_walking || since < SCHEDULE_INTERVAL {
            return None;
        }
        self.tokens_left_seconds =
            (self.tokens_left_seconds + since.as_secs_f64() * WALK_CPU_RATE).min(WALK_CPU_BURST_SECONDS);
        self.updated_at = now;
        if self.tokens_left_seconds <= 0.0 {
            return None;
        }
        let mut before = std::mem::take(&mut self.walks);
        let turn =
            |process| (process, before.remove(&process).unwrap_or(ScheduledWalk::due_after(MIN_WALK_INTERVAL, now)));
        self.walks = tracked.map(turn).collect();
        if !self.changed_processes.is_empty() || !before.is_empty() {
            let soon = ScheduledWalk::due_after(MIN_WALK_INTERVAL, now);
            self.walks.values_mut().filter(|turn| turn.due_at > soon.due_at).for_each(|turn| *turn = soon);
        }
        self.changed_processes.retain(|process| self.walks.contains_key(process));
        let longest = self.walks.iter().filter(|(_, turn)| turn.due_at <= now).min_by_key(|(_, turn)| turn.due_at);
        let longest = longest.map(|(process, _)| *process);
        let changed = self.changed_processes.first().copied().filter(|_| !self.last_was_changed || longest.is_none());
        let process = changed.or(longest)?;
        self.changed_processes.remove(&process);
        (self.is_walking, self.last_was_changed) = (true, changed.is_some());
        Some(process)
    }

    /// The walk of a process has ended, and taken so much; whether it found anything new.
    pub fn record_walk(&mut self, now: Duration, process: ProcessId, cpu_time: Duration, has_changed: bool) {
        (self.is_walking, self.tokens_left_seconds) = (false, self.tokens_left_seconds - cpu_time.as_secs_f64());
        if let Some(turn) = self.walks.get_mut(&process) {
            let pause = if has_changed {
                MIN_WALK_INTERVAL
            } else {
                (turn.interval * WALK_BACKOFF_FACTOR).min(MAX_WALK_INTERVAL)
            };
            *turn = ScheduledWalk::due_after(pause, now);
        }
    }

    /// Much of a process has just changed.
    pub fn mark_changed(&mut self, process: ProcessId) {
        self.changed_processes.insert(process);
    }
}

/// Walk one process after the other, until nobody asks any more.
pub(super) fn run_walker(host: &dyn Host, requests: &Receiver<WalkRequest>, messages: &Sender<Message>) {
    for WalkRequest { process, wants_fair_share: counts_share, wants_zero_pages: counts_zeros } in requests {
        let before = thread_cpu_time();
        let fair = counts_share.then(|| measure_fair_share(host, process)).and_then(Reading::ok);
        let count = || verify::uncounted_zero_pages(host, &*pagefold_host::hold(host, process)?);
        let uncounted_zeros = counts_zeros.then(count).and_then(Reading::ok);
        let cost = thread_cpu_time().saturating_sub(before);
        // Nobody listens once the daemon ends.
        let _ = messages.send(Message::WorkResult(WorkResult::PageTableWalk {
            process,
            fair_share: fair,
            uncounted_zero_pages: uncounted_zeros,
            cpu_time: cost,
        }));
    }
}

/// The CPU time of this thread so far.
fn thread_cpu_time() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

fn measure_fair_share(host: &dyn Host, process: ProcessId) -> Reading<FairShareReading> {
    let handle = pagefold_host::hold(host, process)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let own = parse::statm(&handle.read("statm")?)?.anonymous_bytes(host.page_size());
    let pss = observe::rollup(&*handle)?.pss?;
    Ok(FairShareReading {
        measured_at: SystemTime::now(),
        pss,
        anonymous_resident: own,
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

    /// Who is walked in so many seconds, when, and at what cost each.
    fn run_changing_walks(
        turns: &mut WalkSchedule,
        from: u64,
        seconds: u64,
        members: u32,
        cost: Duration,
    ) -> Vec<(u64, u32)> {
        run_walks(turns, (from, seconds), members, cost, true)
    }

    /// The same, of walks that find something new or nothing.
    fn run_walks(
        turns: &mut WalkSchedule,
        (from, seconds): (u64, u64),
        members: u32,
        cost: Duration,
        news: bool,
    ) -> Vec<(u64, u32)> {
        let second = |second| {
            let now = Duration::from_secs(second);
            let next = turns.next_walk(now, (1..=members).map(process))?;
            turns.record_walk(now, next, cost, news);
            Some((second, next.pid.0))
        };
        (from..from + seconds).filter_map(second).collect()
    }

    #[test]
    fn walks_take_turns_within_the_cpu_rate() {
        let mut turns = WalkSchedule::default();
        // What is cheap is walked once a minute.
        let found = run_changing_walks(&mut turns, 0, 200, 2, Duration::from_micros(10));
        assert_eq!(found, [(61, 1), (62, 2), (121, 1), (122, 2), (181, 1), (182, 2)]);
        // A day with 200 members of some 30 GiB each.
        let (mut turns, cost) = (WalkSchedule::default(), Duration::from_millis(400));
        let found = run_changing_walks(&mut turns, 0, 86_400, 200, cost);
        let used = found.len() as f64 * cost.as_secs_f64();
        assert!((25.0..=27.4).contains(&used), "{used} s of 0.0003 x 86,400 s and 1 s");
        assert!(found.iter().zip(1..).all(|((_, pid), turn)| *pid == turn), "nobody is left out, nobody comes twice");
        // One whose walk takes longer than all that is saved up is walked all the same, and paid for.
        let mut turns = WalkSchedule::default();
        let found = run_changing_walks(&mut turns, 0, 86_400, 1, Duration::from_secs(10));
        assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<u64>>(), [61, 30_061, 63_395], "9 s, then 10 s");
    }

    #[test]
    fn walks_back_off_until_something_changes() {
        let mut turns = WalkSchedule::default();
        let at = |found: &[(u64, u32)], pid| -> Vec<u64> {
            found.iter().filter(|(_, whose)| *whose == pid).map(|(at, _)| *at).collect()
        };
        let first = run_walks(&mut turns, (0, 10_000), 2, Duration::ZERO, false);
        assert_eq!(at(&first, 1), [61, 301, 1261, 4861, 8461]);
        turns.mark_changed(process(2));
        let soon = run_walks(&mut turns, (10_000, 100), 2, Duration::ZERO, false);
        assert_eq!((at(&soon, 1), at(&soon, 2)), (vec![10_060], vec![10_000]));
        run_walks(&mut turns, (10_100, 20_000), 2, Duration::ZERO, false);
        // One has gone, with whom the other shared.
        let alone = run_walks(&mut turns, (30_100, 200), 1, Duration::ZERO, false);
        assert_eq!(at(&alone, 1), [30_160]);
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
        let mut turns = WalkSchedule::default();
        run_changing_walks(&mut turns, 0, 70, 3, Duration::ZERO);
        turns.mark_changed(process(3));
        turns.mark_changed(process(9));
        assert_eq!(run_changing_walks(&mut turns, 70, 40, 3, Duration::ZERO), [(70, 3)]);
        let busy = turns.next_walk(Duration::from_secs(150), [process(1), process(2)].into_iter());
        assert_eq!(busy, Some(process(1)));
        let two = turns.next_walk(Duration::from_secs(160), [process(1), process(2)].into_iter());
        assert_eq!(two, None, "one walk at a time");
        turns.record_walk(Duration::from_secs(161), process(1), Duration::ZERO, true);
        assert_eq!(
            turns.next_walk(Duration::from_secs(162), [process(7)].into_iter()),
            None,
            "who has gone has no turn"
        );
    }

    #[test]
    fn changed_and_other_processes_alternate() {
        // More than there is time for: each waits longer than since it was walked last.
        let (mut turns, cost) = (WalkSchedule::default(), Duration::from_millis(300));
        let found = run_changing_walks(&mut turns, 0, 40_000, 100, cost);
        let (last, _) = found[found.len() - 1];
        [50, 51, 52].into_iter().for_each(|pid| turns.mark_changed(process(pid)));
        let found: Vec<u32> =
            run_changing_walks(&mut turns, last + 1, 7000, 100, cost).into_iter().map(|(_, pid)| pid).collect();
        let others: Vec<u32> = found.iter().copied().filter(|pid| !(50..53).contains(pid)).collect();
        assert_eq!((found[0], found[2], found[4]), (50, 51, 52), "{found:?}");
        assert!(others.windows(2).all(|pair| pair[1] == pair[0] + 1), "the others go on in turn: {others:?}");
        // What changes during its walk is walked again.
        let mut turns = WalkSchedule::default();
        run_changing_walks(&mut turns, 0, 61, 1, Duration::ZERO);
        assert_eq!(turns.next_walk(Duration::from_secs(61), [process(1)].into_iter()), Some(process(1)));
        turns.mark_changed(process(1));
        turns.record_walk(Duration::from_secs(62), process(1), Duration::ZERO, true);
        assert_eq!(turns.next_walk(Duration::from_secs(63), [process(1)].into_iter()), Some(process(1)));
    }

    #[test]
    fn walk_reports_the_readable_fair_share() {
        let host = FakeHost::booted();
        host.start_process(5, 1000);
        host.put_file("proc/5/statm", "2000 1000 80 1 0 900 0\n");
        host.put_file("proc/5/smaps_rollup", "0-1 ---p 0 00:00 0 [rollup]\nRss: 4000 kB\nPss: 1300 kB\n");
        host.put_file("proc/5/ksm_stat", "ksm_rmap_items 900\nksm_zero_pages 0\nksm_merging_pages 700\n");
        let (ask, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let reborn = ProcessId { start_time: 2, ..process(5) };
        let walk_of = |process| WalkRequest { process, wants_fair_share: true, wants_zero_pages: false };
        [process(5), reborn, process(6)].into_iter().for_each(|process| ask.send(walk_of(process)).unwrap());
        drop(ask);
        run_walker(&host, &asked, &tell);
        let fair = told.try_iter().map(|message| match message {
            Message::WorkResult(WorkResult::PageTableWalk { process, fair_share: fair, .. }) => (process, fair),
            _ => panic!("only walks"),
        });
        let fair: Vec<(ProcessId, Option<FairShareReading>)> = fair.collect();
        let found = fair[0].1.unwrap();
        assert_eq!((found.pss, found.merged_pages), (Bytes::from_kib(1300), Some(Pages(700))));
        assert_eq!(found.anonymous_resident, Bytes((1000 - 80) * 4096));
        assert!(fair[1].0 == reborn && fair[1].1.is_none() && fair[2].1.is_none());
    }
}
