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
//! at a time (`pagemap_read`), and in a bounded part of the address space ([`verify::uncounted_zeros`]).
//! Limits: a walk that hangs because its target does, in a page fault of a dead file server, holds up the others and the
//! end of the daemon, which by then has put everything back.

use super::{Message, Told};
use pagefold_base::{Bytes, Pages, ProcessId, Reading};
use pagefold_host::{Host, observe, parse};
use pagefold_merge::verify;
pub(super) use pagefold_merge::verify::LARGEST;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, SystemTime};

/// Of one CPU, what walks may take on average.
const PART: f64 = 0.0003;

/// What may be saved up for when much has just changed.
const SAVED_UP: f64 = 1.0;

/// Between two looks at whose turn it is.
const SECOND: Duration = Duration::from_secs(1);

/// Between two walks of one process at least, unless it was merged meanwhile, and before the first of one that has just
/// come.
const PAUSE: Duration = Duration::from_secs(60);

/// By how much that is longer each time that nothing has changed, and how long it is at most.
const LONGER: u32 = 4;
const LONGEST: Duration = Duration::from_secs(3600);

/// The part of it by which what a process takes may have moved when nothing has changed.
const MOVED: u64 = 64;

/// What a process took when its page tables were walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fair {
    /// When.
    pub at: SystemTime,
    /// Each of its pages divided by those who map it, huge pages of hugetlb apart.
    pub pss: Bytes,
    /// What of it was resident then that is neither a file nor shared memory, by `statm`.
    pub own: Bytes,
    /// Pages that were merged then by the counter that is read all the time, where the kernel has it.
    pub merging: Option<Pages>,
}

impl Fair {
    /// Whether hardly anything has changed since.
    pub(super) fn is_like(&self, later: &Self) -> bool {
        self.pss.0.abs_diff(later.pss.0) <= self.pss.0 / MOVED
    }
}

/// A walk that is to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Walk {
    /// Through the page tables of which process.
    pub process: ProcessId,
    /// Whether to find out what it takes by fair share.
    pub counts_share: bool,
    /// Whether to count the zero pages that KSM does not count.
    pub counts_zeros: bool,
}

/// When it is somebody's turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    at: Duration,
    /// The pause before that.
    pause: Duration,
}

impl Turn {
    fn after(pause: Duration, now: Duration) -> Self {
        Self { at: now + pause, pause }
    }
}

/// Whose turn it is.
#[derive(Debug)]
pub(super) struct Turns {
    /// From when on it is whose turn.
    next: BTreeMap<ProcessId, Turn>,
    /// Of whom much has just changed.
    changed: BTreeSet<ProcessId>,
    /// Whether the last walk was of one of them: others have every second one.
    was_changed: bool,
    /// Whether a walk is under way.
    walks: bool,
    /// CPU seconds that are left; less than none after a long walk.
    left: f64,
    /// When it was looked at last.
    at: Duration,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            next: BTreeMap::new(),
            changed: BTreeSet::new(),
            was_changed: false,
            walks: false,
            left: SAVED_UP,
            at: Duration::ZERO,
        }
    }
}

impl Turns {
    /// Of these, who is to be walked now, if there is CPU time for it and no other walk is under way: of whom much has
    /// changed, and in turn with those who has waited longest.
    pub fn next(&mut self, now: Duration, members: impl Iterator<Item = ProcessId>) -> Option<ProcessId> {
        let since = now.saturating_sub(self.at);
        if self.walks || since < SECOND {
            return None;
        }
        self.left = (self.left + since.as_secs_f64() * PART).min(SAVED_UP);
        self.at = now;
        if self.left <= 0.0 {
            return None;
        }
        let mut before = std::mem::take(&mut self.next);
        let turn = |process| (process, before.remove(&process).unwrap_or(Turn::after(PAUSE, now)));
        self.next = members.map(turn).collect();
        if !self.changed.is_empty() || !before.is_empty() {
            let soon = Turn::after(PAUSE, now);
            self.next.values_mut().filter(|turn| turn.at > soon.at).for_each(|turn| *turn = soon);
        }
        self.changed.retain(|process| self.next.contains_key(process));
        let longest = self.next.iter().filter(|(_, turn)| turn.at <= now).min_by_key(|(_, turn)| turn.at);
        let longest = longest.map(|(process, _)| *process);
        let changed = self.changed.first().copied().filter(|_| !self.was_changed || longest.is_none());
        let process = changed.or(longest)?;
        self.changed.remove(&process);
        (self.walks, self.was_changed) = (true, changed.is_some());
        Some(process)
    }

    /// The walk of a process has ended, and taken so much; whether it found anything new.
    pub fn walked(&mut self, now: Duration, process: ProcessId, cost: Duration, news: bool) {
        (self.walks, self.left) = (false, self.left - cost.as_secs_f64());
        if let Some(turn) = self.next.get_mut(&process) {
            let pause = if news { PAUSE } else { (turn.pause * LONGER).min(LONGEST) };
            *turn = Turn::after(pause, now);
        }
    }

    /// Much of a process has just changed.
    pub fn changed(&mut self, process: ProcessId) {
        self.changed.insert(process);
    }
}

/// Walk one process after the other, until nobody asks any more.
pub(super) fn walk(host: &dyn Host, walks: &Receiver<Walk>, tell: &Sender<Message>) {
    for Walk { process, counts_share, counts_zeros } in walks {
        let before = thread_cpu();
        let fair = counts_share.then(|| read(host, process)).and_then(Reading::ok);
        let count = || verify::uncounted_zeros(host, &*pagefold_host::hold(host, process)?);
        let uncounted_zeros = counts_zeros.then(count).and_then(Reading::ok);
        let cost = thread_cpu().saturating_sub(before);
        // Nobody listens once the daemon ends.
        let _ = tell.send(Message::Told(Told::Walked { process, fair, uncounted_zeros, cost }));
    }
}

/// The CPU time of this thread so far.
fn thread_cpu() -> Duration {
    rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime).try_into().unwrap_or_default()
}

fn read(host: &dyn Host, process: ProcessId) -> Reading<Fair> {
    let handle = pagefold_host::hold(host, process)?;
    let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
    let own = parse::statm(&handle.read("statm")?)?.own(host.page_size());
    let pss = observe::rollup(&*handle)?.pss?;
    Ok(Fair { at: SystemTime::now(), pss, own, merging: ksm.merging_pages.ok().map(Pages) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::Pid;
    use pagefold_host::fake::Fake;
    use std::sync::mpsc;

    fn process(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_time: 1 }
    }

    /// Who is walked in so many seconds, when, and at what cost each.
    fn walks(turns: &mut Turns, from: u64, seconds: u64, members: u32, cost: Duration) -> Vec<(u64, u32)> {
        found(turns, (from, seconds), members, cost, true)
    }

    /// The same, of walks that find something new or nothing.
    fn found(
        turns: &mut Turns,
        (from, seconds): (u64, u64),
        members: u32,
        cost: Duration,
        news: bool,
    ) -> Vec<(u64, u32)> {
        let second = |second| {
            let now = Duration::from_secs(second);
            let next = turns.next(now, (1..=members).map(process))?;
            turns.walked(now, next, cost, news);
            Some((second, next.pid.0))
        };
        (from..from + seconds).filter_map(second).collect()
    }

    #[test]
    fn each_has_its_turn_within_what_may_be_taken() {
        let mut turns = Turns::default();
        // What is cheap is walked once a minute.
        let found = walks(&mut turns, 0, 200, 2, Duration::from_micros(10));
        assert_eq!(found, [(61, 1), (62, 2), (121, 1), (122, 2), (181, 1), (182, 2)]);
        // A day with 200 members of some 30 GiB each.
        let (mut turns, cost) = (Turns::default(), Duration::from_millis(400));
        let found = walks(&mut turns, 0, 86_400, 200, cost);
        let used = found.len() as f64 * cost.as_secs_f64();
        assert!((25.0..=27.4).contains(&used), "{used} s of 0.0003 x 86,400 s and 1 s");
        assert!(found.iter().zip(1..).all(|((_, pid), turn)| *pid == turn), "nobody is left out, nobody comes twice");
        // One whose walk takes longer than all that is saved up is walked all the same, and paid for.
        let mut turns = Turns::default();
        let found = walks(&mut turns, 0, 86_400, 1, Duration::from_secs(10));
        assert_eq!(found.iter().map(|(at, _)| *at).collect::<Vec<u64>>(), [61, 30_061, 63_395], "9 s, then 10 s");
    }

    #[test]
    fn where_nothing_changes_walks_come_later_each_time_and_all_of_them_soon_when_anything_does() {
        let mut turns = Turns::default();
        let at = |found: &[(u64, u32)], pid| -> Vec<u64> {
            found.iter().filter(|(_, whose)| *whose == pid).map(|(at, _)| *at).collect()
        };
        let first = found(&mut turns, (0, 10_000), 2, Duration::ZERO, false);
        assert_eq!(at(&first, 1), [61, 301, 1261, 4861, 8461]);
        turns.changed(process(2));
        let soon = found(&mut turns, (10_000, 100), 2, Duration::ZERO, false);
        assert_eq!((at(&soon, 1), at(&soon, 2)), (vec![10_060], vec![10_000]));
        found(&mut turns, (10_100, 20_000), 2, Duration::ZERO, false);
        // One has gone, with whom the other shared.
        let alone = found(&mut turns, (30_100, 200), 1, Duration::ZERO, false);
        assert_eq!(at(&alone, 1), [30_160]);
        let fair =
            |mib: u64| Fair { at: SystemTime::UNIX_EPOCH, pss: Bytes(mib << 20), own: Bytes::ZERO, merging: None };
        assert!(fair(640).is_like(&fair(650)) && fair(640).is_like(&fair(630)));
        assert!(!fair(640).is_like(&fair(651)) && !fair(640).is_like(&fair(629)) && !fair(0).is_like(&fair(1)));
    }

    #[test]
    fn who_was_merged_is_walked_next() {
        let mut turns = Turns::default();
        walks(&mut turns, 0, 70, 3, Duration::ZERO);
        turns.changed(process(3));
        turns.changed(process(9));
        assert_eq!(walks(&mut turns, 70, 40, 3, Duration::ZERO), [(70, 3)]);
        let busy = turns.next(Duration::from_secs(150), [process(1), process(2)].into_iter());
        assert_eq!(busy, Some(process(1)));
        let two = turns.next(Duration::from_secs(160), [process(1), process(2)].into_iter());
        assert_eq!(two, None, "one walk at a time");
        turns.walked(Duration::from_secs(161), process(1), Duration::ZERO, true);
        assert_eq!(turns.next(Duration::from_secs(162), [process(7)].into_iter()), None, "who has gone has no turn");
    }

    #[test]
    fn who_was_merged_does_not_wait_for_all_others_nor_they_for_it() {
        // More than there is time for: each waits longer than since it was walked last.
        let (mut turns, cost) = (Turns::default(), Duration::from_millis(300));
        let found = walks(&mut turns, 0, 40_000, 100, cost);
        let (last, _) = found[found.len() - 1];
        [50, 51, 52].into_iter().for_each(|pid| turns.changed(process(pid)));
        let found: Vec<u32> = walks(&mut turns, last + 1, 7000, 100, cost).into_iter().map(|(_, pid)| pid).collect();
        let others: Vec<u32> = found.iter().copied().filter(|pid| !(50..53).contains(pid)).collect();
        assert_eq!((found[0], found[2], found[4]), (50, 51, 52), "{found:?}");
        assert!(others.windows(2).all(|pair| pair[1] == pair[0] + 1), "the others go on in turn: {others:?}");
        // What changes during its walk is walked again.
        let mut turns = Turns::default();
        walks(&mut turns, 0, 61, 1, Duration::ZERO);
        assert_eq!(turns.next(Duration::from_secs(61), [process(1)].into_iter()), Some(process(1)));
        turns.changed(process(1));
        turns.walked(Duration::from_secs(62), process(1), Duration::ZERO, true);
        assert_eq!(turns.next(Duration::from_secs(63), [process(1)].into_iter()), Some(process(1)));
    }

    #[test]
    fn a_walk_tells_the_fair_share_where_it_can_be_read() {
        let host = Fake::booted();
        host.start(5, 1000);
        host.file("proc/5/statm", "2000 1000 80 1 0 900 0\n");
        host.file("proc/5/smaps_rollup", "0-1 ---p 0 00:00 0 [rollup]\nRss: 4000 kB\nPss: 1300 kB\n");
        host.file("proc/5/ksm_stat", "ksm_rmap_items 900\nksm_zero_pages 0\nksm_merging_pages 700\n");
        let (ask, asked) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let reborn = ProcessId { start_time: 2, ..process(5) };
        let walk_of = |process| Walk { process, counts_share: true, counts_zeros: false };
        [process(5), reborn, process(6)].into_iter().for_each(|process| ask.send(walk_of(process)).unwrap());
        drop(ask);
        walk(&host, &asked, &tell);
        let fair = told.try_iter().map(|message| match message {
            Message::Told(Told::Walked { process, fair, .. }) => (process, fair),
            _ => panic!("only walks"),
        });
        let fair: Vec<(ProcessId, Option<Fair>)> = fair.collect();
        let found = fair[0].1.unwrap();
        assert_eq!((found.pss, found.merging), (Bytes::from_kib(1300), Some(Pages(700))));
        assert_eq!(found.own, Bytes((1000 - 80) * 4096));
        assert!(fair[1].0 == reborn && fair[1].1.is_none() && fair[2].1.is_none());
    }
}
