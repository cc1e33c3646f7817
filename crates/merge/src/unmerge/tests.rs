//! Tests over a host of a few pages with known frames: unmerging takes exactly the planned frames, and a failure leaves
//! all other pages unchanged.

use super::plan::{BatchBuilder, RangePages};
use super::*;
use pagefold_base::Pfn;
use pagefold_base::{PageSize, Pid, ProcessId};
use pagefold_census::ProcessSelection;
use pagefold_host::ProcessHandle as Handle;
use pagefold_host::action::{ActionError, ActionOutcome};
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::resource::ResourceClass;
use pagefold_host::{FrameFlags, PageRun, PageView, PagemapEntry, ReadMethod as Reader};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

const PAGE_BYTES: u64 = 4096;
const BASE_ADDRESS: u64 = 0x10_0000;

/// A page of the fake host.
#[derive(Clone, Copy, PartialEq)]
enum FakeUnmergePage {
    Own,
    /// On this KSM frame.
    Merged(u64),
    /// On the kernel's zero page, by KSM.
    Zero,
}

struct FakeUnmergeHost {
    state: Mutex<FakeUnmergeState>,
    /// Called before each action; an error refuses it.
    refuse_action: fn(&Action) -> Option<ActionError>,
    /// Whether its kernel shows which process is enrolled whole (6.14).
    reports_merge_any: bool,
    /// Called after each executed action.
    after_action: fn(&mut FakeUnmergeState),
    start: Instant,
    /// The virtual time since `start`.
    slept: Mutex<Duration>,
    /// The virtual time at which frames become free, and their number.
    freed_after: Option<(Duration, u64)>,
    /// The most frames whose mappings were read at a time.
    most_frames_read: AtomicUsize,
}

struct FakeUnmergeState {
    /// By PID: the pages from `BASE_ADDRESS` on, whether each is marked, and whether the process is enrolled whole.
    processes: BTreeMap<u32, (Vec<(FakeUnmergePage, bool)>, bool)>,
    /// Free frames.
    free_frames: u64,
    actions: Vec<Action>,
    /// Killed processes whose parent has not read their exit status.
    zombies: BTreeSet<u32>,
}

impl FakeUnmergeState {
    fn mappings(&self, frame: u64) -> u64 {
        let pages = self.processes.values().flat_map(|(pages, _)| pages);
        pages.filter(|(page, _)| *page == FakeUnmergePage::Merged(frame)).count() as u64
    }

    fn break_pages(&mut self, pid: u32, range: AddressRange) {
        let index = |address: u64| ((address - BASE_ADDRESS) / PAGE_BYTES) as usize;
        let mut mappings: BTreeMap<u64, u64> = BTreeMap::new();
        for (page, _) in self.processes.values().flat_map(|(pages, _)| pages) {
            if let FakeUnmergePage::Merged(frame) = page {
                *mappings.entry(*frame).or_default() += 1;
            }
        }
        let (pages, _) = self.processes.get_mut(&pid).unwrap();
        for page in &mut pages[index(range.start)..index(range.end)] {
            if page.0 != FakeUnmergePage::Own {
                assert!(self.free_frames > 0, "the OOM killer was woken");
                self.free_frames -= 1;
            }
            if let FakeUnmergePage::Merged(frame) = page.0 {
                let remaining = mappings.get_mut(&frame).unwrap();
                *remaining -= 1;
                self.free_frames += u64::from(*remaining == 0);
            }
            *page = (FakeUnmergePage::Own, false);
        }
    }
}

/// Frame numbers of the fake: of the zero page, of merged pages, and of a process's own pages.
const ZERO_FRAME: u64 = 1;
const FIRST_MERGED_FRAME: u64 = 100;
const FIRST_OWN_FRAME: u64 = 10_000;

impl Host for FakeUnmergeHost {
    fn describe(&self) -> String {
        "fake".to_owned()
    }

    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE_BYTES).unwrap()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        match path {
            // No reserve: the fake's total is 0.
            "proc/meminfo" => {
                let kib = self.state.lock().unwrap().free_frames * PAGE_BYTES / 1024;
                Ok(format!("MemTotal: 0 kB\nMemAvailable: {kib} kB\nAnonPages: 0 kB\nSwapFree: 0 kB\n").into_bytes())
            }
            "proc/sys/vm/min_free_kbytes" => Ok(b"0\n".to_vec()),
            "proc/sys/kernel/random/boot_id" => Ok(b"boot\n".to_vec()),
            _ => Err(Absent::NotOnThisKernel),
        }
    }

    fn list(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        Ok(self.state.lock().unwrap().processes.keys().copied().map(Pid).collect())
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn Handle + '_>> {
        let is_running = self.state.lock().unwrap().processes.contains_key(&pid.0);
        if is_running { Ok(Box::new(FakeUnmergeProcess { host: self, pid: pid.0 })) } else { Err(Absent::Vanished) }
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        let flags = |frame: &Pfn| match frame.0 {
            ZERO_FRAME => 1 << 24,
            FIRST_MERGED_FRAME..FIRST_OWN_FRAME => 1 << 21 | 1 << 12,
            _ => 1 << 12,
        };
        Ok(frames.iter().map(flags).map(FrameFlags).collect())
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.most_frames_read.fetch_max(frames.len(), Ordering::Relaxed);
        let state = self.state.lock().unwrap();
        Ok(frames.iter().map(|frame| state.mappings(frame.0 - FIRST_MERGED_FRAME)).collect())
    }

    fn apply(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        if let Some(refusal) = (self.refuse_action)(action) {
            return Err(refusal);
        }
        let mut state = self.state.lock().unwrap();
        state.actions.push(action.clone());
        match action {
            Action::Advise { process, advice: MergeAdvice::Unmergeable, ranges } => {
                ranges.iter().for_each(|range| state.break_pages(process.pid.0, *range));
            }
            Action::MergeAny { process, enable: false } => {
                let end = BASE_ADDRESS + state.processes[&process.pid.0].0.len() as u64 * PAGE_BYTES;
                state.break_pages(process.pid.0, AddressRange { start: BASE_ADDRESS, end });
                state.processes.get_mut(&process.pid.0).unwrap().1 = false;
            }
            Action::SetQomProperty { process, object, .. } if action.unmerges() => {
                let (start, end) = object.split_once('-').unwrap();
                let at = |page: &str| BASE_ADDRESS + page.parse::<u64>().unwrap() * PAGE_BYTES;
                state.break_pages(process.pid.0, AddressRange { start: at(start), end: at(end) });
            }
            other => panic!("{other:?}"),
        }
        (self.after_action)(&mut state);
        Ok(ActionOutcome::default())
    }

    fn now(&self) -> Instant {
        self.start + *self.slept.lock().unwrap()
    }

    fn sleep(&self, duration: Duration) {
        let mut slept = self.slept.lock().unwrap();
        *slept += duration;
        if let Some((_, frames)) = self.freed_after.filter(|(time, _)| *slept >= *time) {
            self.state.lock().unwrap().free_frames = frames;
        }
    }
}

struct FakeUnmergeProcess<'a> {
    host: &'a FakeUnmergeHost,
    pid: u32,
}

impl Handle for FakeUnmergeProcess<'_> {
    fn id(&self) -> ProcessId {
        ProcessId { pid: Pid(self.pid), start_time: 1 }
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        let state = self.host.state.lock().unwrap();
        let (pages, whole) = state.processes.get(&self.pid).ok_or(Absent::Vanished)?;
        let ended = state.zombies.contains(&self.pid);
        Ok(match file {
            "stat" => {
                let letter = if ended { 'Z' } else { 'S' };
                format!("{} (fake) {letter} 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0{}\n", self.pid, " 0".repeat(28))
            }
            "status" => "Threads:\t1\n".to_owned(),
            "smaps" if ended => String::new(),
            "smaps" => {
                let mut text = String::new();
                let mut start = BASE_ADDRESS;
                for region in pages.chunk_by(|(a, marked), (b, other_marked)| {
                    marked == other_marked
                        && matches!(a, FakeUnmergePage::Merged(_)) == matches!(b, FakeUnmergePage::Merged(_))
                }) {
                    let (end, kib) = (start + region.len() as u64 * PAGE_BYTES, region.len() * 4);
                    let ksm = if matches!(region[0].0, FakeUnmergePage::Merged(_)) { kib } else { 0 };
                    let flag = if region[0].1 { " mg" } else { "" };
                    text += &format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: {kib} kB\n");
                    text += &format!("Anonymous: {kib} kB\nKSM: {ksm} kB\nVmFlags: rd wr{flag}\n");
                    start = end;
                }
                text
            }
            "ksm_stat" => {
                let zeros = pages.iter().filter(|(page, _)| *page == FakeUnmergePage::Zero).count();
                let whole = if *whole { "yes" } else { "no" };
                let merge_state = format!("ksm_merge_any: {whole}\nksm_mergeable: yes\n");
                format!(
                    "ksm_rmap_items 0\nksm_zero_pages {zeros}\n{}",
                    if self.host.reports_merge_any { &merge_state } else { "" }
                )
            }
            _ => return Err(Absent::NotOnThisKernel),
        }
        .into_bytes())
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn resident(&self, _: &[AddressRange]) -> Reading<Vec<PageRun>> {
        Err(Absent::NotOnThisKernel)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let state = self.host.state.lock().unwrap();
        let (pages, _) = state.processes.get(&self.pid).ok_or(Absent::Vanished)?;
        let (first, last) = ((range.start - BASE_ADDRESS) / PAGE_BYTES, (range.end - BASE_ADDRESS) / PAGE_BYTES);
        let mapping = |i: u64| {
            let frame = match pages[i as usize].0 {
                FakeUnmergePage::Own => FIRST_OWN_FRAME * u64::from(self.pid) + i,
                FakeUnmergePage::Merged(frame) => FIRST_MERGED_FRAME + frame,
                FakeUnmergePage::Zero => ZERO_FRAME,
            };
            PagemapEntry { present: true, frame: Some(Pfn(frame)), ..PagemapEntry::default() }
        };
        Ok((first..last).map(mapping).collect())
    }

    fn contents(&self, _: Reader, _: &[PageRun], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }
}

/// Processes 1, 2, ... with these pages, all marked: a letter is a KSM frame, `0` a zero page, `.` the process's own
/// page.
fn host(free: u64, processes: &[&str]) -> FakeUnmergeHost {
    let page = |letter: char| match letter {
        '.' => FakeUnmergePage::Own,
        '0' => FakeUnmergePage::Zero,
        letter => FakeUnmergePage::Merged(u64::from(letter as u32)),
    };
    let pages = |text: &&str| (text.chars().map(|letter| (page(letter), true)).collect(), false);
    let processes = (1..).zip(processes.iter().map(pages)).collect();
    let state = FakeUnmergeState { processes, free_frames: free, actions: Vec::new(), zombies: BTreeSet::new() };
    FakeUnmergeHost {
        state: Mutex::new(state),
        refuse_action: |_| None,
        reports_merge_any: true,
        after_action: |_| {},
        start: Instant::now(),
        slept: Mutex::default(),
        freed_after: None,
        most_frames_read: AtomicUsize::default(),
    }
}

fn make_default_plan(host: &dyn Host) -> UnenrollPlan {
    make_plan(host, &ProcessSelection::default(), &|_, _| None).unwrap()
}

/// Plan and execute.
fn plan_and_execute(host: &dyn Host, limits: UnenrollLimits) -> (UnenrollPlan, UnenrollOutcome) {
    execute_in_session(host, make_default_plan(host), limits)
}

fn execute_in_session(host: &dyn Host, plan: UnenrollPlan, limits: UnenrollLimits) -> (UnenrollPlan, UnenrollOutcome) {
    let directory = tempfile::tempdir().unwrap();
    let (mut session, _, _) = Session::begin(host, directory.path(), ResourceClass::Ksm).unwrap();
    let outcome = execute_plan(&mut session, &plan, limits, &AtomicBool::new(false)).unwrap();
    session.undo_all().unwrap();
    assert!(!Path::new(directory.path()).join("ksm.journal.json").exists(), "no change remains to undo");
    (plan, outcome)
}

const STAGED_LIMITS: UnenrollLimits = UnenrollLimits {
    staged: true,
    force: false,
    max_wait: Duration::ZERO,
    collapse_huge_pages: false,
    max_pressure_percent: None,
};

#[test]
fn unmerge_takes_exactly_the_planned_frames() {
    for (processes, needed) in [
        // Both mappings of a frame are removed, so the frame is freed.
        (vec!["a", "a"], 1),
        (vec!["ab", "abb"], 3),
        // Zero pages take a frame each; a process's own pages take none.
        (vec!["00..", "a0", "a"], 4),
        (vec!["aaaa"], 3),
    ] {
        // One more: a copy takes a frame before the KSM frame is freed. On a real host the reserve has it.
        let fake = host(needed + 1, &processes);
        let (plan, outcome) = plan_and_execute(&fake, UnenrollLimits::default());
        assert_eq!(plan.frame_need().host, Pages(needed), "{processes:?}");
        assert!(outcome.targets.iter().all(UnenrollResult::is_complete), "{processes:?}: {outcome:?}");
        assert_eq!(fake.state.lock().unwrap().free_frames, 1, "{processes:?}");
        assert_eq!(outcome.planned_frames(&plan), Pages(needed));
    }
}

#[test]
fn frame_mapped_elsewhere_is_not_freed() {
    let fake = host(10, &["aa", "a"]);
    let selection = ProcessSelection { pids: vec![Pid(1)], ..ProcessSelection::default() };
    let plan = make_plan(&fake, &selection, &|_, _| None).unwrap();
    assert_eq!((plan.targets[0].copied_pages(), plan.targets[0].freed_frames()), (Pages(2), Pages(0)));
}

#[test]
fn unmerge_starts_only_if_it_fits_or_forced() {
    let fake = host(1, &["abc", "abc"]);
    let (_, outcome) = plan_and_execute(&fake, UnenrollLimits::default());
    assert_eq!(outcome.stopped_by_guard.as_ref().map(|check| check.verdict.clone()), Some(MemoryVerdict::OverLimit));
    assert_eq!(fake.state.lock().unwrap().actions, []);
    assert!(outcome.targets.iter().all(|target| !target.is_complete() && target.batches_done == 0));
    let plan = make_default_plan(&fake);
    assert_eq!(plan.count_batches_that_fit(&fake), (0, 2));
    fake.state.lock().unwrap().free_frames = 100;
    let (_, outcome) = plan_and_execute(&fake, UnenrollLimits { force: true, ..UnenrollLimits::default() });
    assert!(outcome.targets.iter().all(UnenrollResult::is_complete));
}

#[test]
fn staged_unmerge_takes_smallest_first() {
    // 8 pages in the first, 2 in the second, 3 in the third; each also in a process that needs too much.
    let fake = host(6, &["abcdefgh", "ij", "klm", "abcdefghijklmnopqnopq"]);
    let (plan, outcome) = plan_and_execute(&fake, STAGED_LIMITS);
    let order: Vec<u32> = plan.targets.iter().map(|target| target.process.id.pid.0).collect();
    assert_eq!(order, [2, 3, 1, 4]);
    assert_eq!(outcome.targets.iter().map(UnenrollResult::is_complete).collect::<Vec<_>>(), [true, true, false, false]);
    assert_eq!(fake.state.lock().unwrap().free_frames, 1);
    assert!(outcome.stopped_by_guard.is_some());
}

#[test]
fn whole_process_is_unenrolled_in_any_mode() {
    for limits in [UnenrollLimits::default(), STAGED_LIMITS] {
        let fake = host(5, &["abab."]);
        fake.state.lock().unwrap().processes.get_mut(&1).unwrap().1 = true;
        let (plan, outcome) = plan_and_execute(&fake, limits);
        assert_eq!(plan.targets[0].method, UnenrollMethod::WholeProcess);
        assert!(outcome.targets[0].is_complete(), "{outcome:?}");
        let last = fake.state.lock().unwrap().actions.last().cloned();
        assert!(matches!(last, Some(Action::MergeAny { enable: false, .. })), "{last:?}");
    }
}

#[test]
fn merge_any_is_cleared_before_linux_6_14() {
    for (limits, whole) in
        [(UnenrollLimits::default(), true), (STAGED_LIMITS, true), (UnenrollLimits::default(), false)]
    {
        let fake = FakeUnmergeHost { reports_merge_any: false, ..host(5, &["abab."]) };
        fake.state.lock().unwrap().processes.get_mut(&1).unwrap().1 = whole;
        let (plan, outcome) = plan_and_execute(&fake, limits);
        assert_eq!(plan.targets[0].method, UnenrollMethod::MarkedRegions);
        assert!(outcome.targets[0].is_complete(), "{outcome:?}");
        let state = fake.state.lock().unwrap();
        assert!(!state.processes[&1].1, "later mappings are not enrolled");
        assert!(matches!(state.actions.first(), Some(Action::Advise { .. })), "{:?}", state.actions);
    }
    let refuses = |action: &Action| {
        matches!(action, Action::MergeAny { .. }).then(|| ActionError::Busy("it does not stop".to_owned()))
    };
    let fake = FakeUnmergeHost { reports_merge_any: false, refuse_action: refuses, ..host(5, &["abab."]) };
    let (_, outcome) = plan_and_execute(&fake, UnenrollLimits::default());
    assert!(!outcome.targets[0].is_complete(), "it may still be enrolled: {outcome:?}");
}

#[test]
fn refused_process_does_not_block_others() {
    let refused = |action: &Action| match action {
        Action::Advise { process, .. } if process.pid == Pid(1) => Some(ActionError::Traced(Pid(9))),
        Action::Advise { process, .. } if process.pid == Pid(2) => Some(ActionError::Vanished),
        _ => None,
    };
    for limits in [UnenrollLimits::default(), STAGED_LIMITS] {
        let fake = FakeUnmergeHost { refuse_action: refused, ..host(100, &["a", "ab", "abc"]) };
        let (_, outcome) = plan_and_execute(&fake, limits);
        assert_eq!(
            outcome.targets[0].error.as_deref(),
            Some("process 9 traces it already, such as a debugger: end that first")
        );
        assert_eq!(
            outcome.targets[0].still_merged,
            Some(Ok(StillMerged { merged_pages: Pages(1), ..StillMerged::default() }))
        );
        assert!(outcome.targets[1].ended && outcome.targets[2].is_complete(), "{outcome:?}");
        assert_eq!(fake.state.lock().unwrap().actions.len(), 1);
    }
}

#[test]
fn process_without_enrollment_is_no_target() {
    let fake = host(0, &["..", "a"]);
    fake.state.lock().unwrap().processes.get_mut(&1).unwrap().0.iter_mut().for_each(|page| page.1 = false);
    let plan = make_default_plan(&fake);
    assert_eq!((plan.not_enrolled, plan.targets.len()), (1, 1));
}

#[test]
fn unmerge_waits_for_memory() {
    let max_wait = Duration::from_secs(60);
    for (freed_after, in_time) in [(max_wait / 2, true), (max_wait * 2, false)] {
        let fake = FakeUnmergeHost { freed_after: Some((freed_after, 5)), ..host(0, &["a", "a"]) };
        let (_, outcome) = plan_and_execute(&fake, UnenrollLimits { max_wait, ..STAGED_LIMITS });
        assert_eq!(outcome.targets.iter().all(UnenrollResult::is_complete), in_time, "{outcome:?}");
        let waited = *fake.slept.lock().unwrap();
        assert_eq!(waited, freed_after.min(max_wait), "{outcome:?}");
    }
}

#[test]
fn running_unmerge_stops_under_pressure() {
    let pages = "a".repeat(MAX_PAGES_PER_BATCH + 1);
    for (limits, stops) in
        [(STAGED_LIMITS, false), (UnenrollLimits { max_pressure_percent: Some(10.0), ..STAGED_LIMITS }, true)]
    {
        let fake = host(2 * MAX_PAGES_PER_BATCH as u64, &["b", &pages]);
        // From the second batch on.
        let avg10 = || if fake.state.lock().unwrap().actions.len() >= 2 { "10.00" } else { "9.99" };
        let line = |word: &str| format!("{word} avg10={} avg60=0.00 avg300=0.00 total=1\n", avg10());
        let pressure = |path: &str| {
            (path == "proc/pressure/memory")
                .then(|| InjectedFault::Replaced((line("some") + &line("full")).into_bytes()))
        };
        let (plan, outcome) = plan_and_execute(&FaultyHost::new(&fake, pressure), limits);
        assert_eq!(plan.targets.iter().map(|target| target.batches.len()).collect::<Vec<_>>(), [1, 2]);
        assert!(outcome.targets[0].is_complete(), "{outcome:?}");
        assert_eq!(
            (outcome.targets[1].batches_done, outcome.targets[1].is_complete()),
            if stops { (1, false) } else { (2, true) }
        );
        assert_eq!(outcome.targets[1].error.as_deref(), stops.then_some("memory is short"));
    }
}

/// All pages fit at the start, in three batches; a neighbor takes memory after the first batch.
#[test]
fn unmerge_stops_when_neighbor_takes_memory() {
    let batch_pages = MAX_PAGES_PER_BATCH as u64;
    let pages = "ab".repeat(MAX_PAGES_PER_BATCH + 500);
    let leave_one_frame = |state: &mut FakeUnmergeState| state.free_frames = state.free_frames.min(1);
    let leave_one_batch = |state: &mut FakeUnmergeState| state.free_frames = MAX_PAGES_PER_BATCH as u64;
    for (limits, after_action, batches) in [
        (UnenrollLimits::default(), leave_one_frame as fn(&mut FakeUnmergeState), 1),
        (STAGED_LIMITS, leave_one_frame, 1),
        // One batch would fit, but the rest would not: the free memory is left to the neighbor unless the run is
        // staged.
        (UnenrollLimits::default(), leave_one_batch, 1),
        (STAGED_LIMITS, leave_one_batch, 3),
    ] {
        let fake = FakeUnmergeHost { after_action, ..host(2 * batch_pages + 1000, &[&pages]) };
        let plan = make_default_plan(&fake);
        assert_eq!(
            (plan.targets[0].batches.len(), plan.check_memory(&fake, &plan.frame_need()).verdict),
            (3, MemoryVerdict::Fits)
        );
        let (_, outcome) = plan_and_execute(&fake, limits);
        assert_eq!(
            (outcome.targets[0].batches_done, outcome.targets[0].is_complete()),
            (batches, batches == 3),
            "{:?}",
            outcome.stopped_by_guard
        );
        let stopped = outcome.stopped_by_guard.as_ref().map(|check| check.verdict.clone());
        assert_eq!(stopped, (batches < 3).then_some(MemoryVerdict::OverLimit));
    }
}

/// A guest of two backends of four merged pages each; pages from 8 on belong to no backend.
fn make_guest_plan(host: &dyn Host) -> UnenrollPlan {
    let size = Bytes(4 * PAGE_BYTES);
    let backends = vec![("0-4".to_owned(), size), ("4-8".to_owned(), size)];
    let method = UnenrollMethod::Guest { socket: "/run/qmp".into(), backends };
    make_plan(host, &ProcessSelection::default(), &|_, _| Some(method.clone())).unwrap()
}

#[test]
fn each_backend_of_a_guest_asks_the_guard() {
    let leave_three_frames = |state: &mut FakeUnmergeState| state.free_frames = state.free_frames.min(3);
    let hides_frames = |path: &str| path.ends_with("#frame_flags").then_some(InjectedFault::Absent(Absent::Denied));
    for (after_action, fits) in [((|_| {}) as fn(&mut FakeUnmergeState), true), (leave_three_frames, false)] {
        for exact in [true, false] {
            // Other processes map the frames too, so no frame is freed.
            let fake = FakeUnmergeHost { after_action, ..host(8, &["abcdefgh", "abcdefgh"]) };
            let faulty = FaultyHost::new(&fake, |path: &str| hides_frames(path).filter(|_| !exact));
            let mut plan = make_guest_plan(&faulty);
            plan.targets.retain(|target| target.process.id.pid == Pid(1));
            assert_eq!((plan.targets[0].frames_readable.is_ok(), plan.targets[0].merged_pages()), (exact, Pages(8)));
            let (_, outcome) = execute_in_session(&faulty, plan, UnenrollLimits::default());
            assert_eq!(fake.state.lock().unwrap().actions.len(), if fits { 2 } else { 1 }, "exact: {exact}");
            assert_eq!(outcome.targets[0].all_unenrolled, fits, "{:?}", outcome.stopped_by_guard);
            let stopped = outcome.stopped_by_guard.map(|check| check.verdict);
            assert_eq!(stopped, (!fits).then_some(MemoryVerdict::OverLimit));
        }
    }
}

#[test]
fn process_killed_during_unmerge_is_ended() {
    let killed = |state: &mut FakeUnmergeState| {
        state.zombies.insert(1);
    };
    for limits in [UnenrollLimits::default(), STAGED_LIMITS] {
        let fake = FakeUnmergeHost { after_action: killed, ..host(10, &["ab"]) };
        let (_, outcome) = plan_and_execute(&fake, limits);
        assert!(outcome.targets[0].ended, "{outcome:?}");
        assert_eq!(outcome.targets[0].still_merged, None, "an empty region list does not mean that nothing is merged");
    }
}

#[test]
fn long_range_is_read_in_parts() {
    let own = |pages: usize| ".".repeat(pages);
    let pages = ["a".to_owned(), own(65_534), "b".to_owned(), "c0".to_owned(), own(65_535), "a".to_owned()].concat();
    let host = host(0, &[&pages]);
    let range = AddressRange { start: BASE_ADDRESS, end: BASE_ADDRESS + pages.len() as u64 * PAGE_BYTES };
    let found = read_ksm_pages(&host, &*host.open(Pid(1)).unwrap(), range).unwrap();
    let page = |&(address, shared): &(u64, Option<KsmPageMappings>)| {
        ((address - BASE_ADDRESS) / PAGE_BYTES, shared.map(|(_, mappings)| mappings))
    };
    let expected = [(0, Some(2)), (65_535, Some(1)), (65_536, Some(1)), (65_537, None), (131_073, Some(2))];
    assert_eq!(found.pages.iter().map(page).collect::<Vec<_>>(), expected);
    assert_eq!(host.most_frames_read.into_inner(), 2, "of four frames");
}

#[test]
fn batches_are_bounded_and_cover_every_page() {
    let mut builder = BatchBuilder { max_pages: 3, batches: Vec::new(), frames: Vec::new() };
    let range = |start: u64, end: u64| AddressRange { start: start * PAGE_BYTES, end: end * PAGE_BYTES };
    let found = |pages: &[u64]| RangePages {
        pages: pages.iter().map(|&page| (page * PAGE_BYTES, Some((Pfn(page), 2)))).collect(),
    };
    builder.add_range(range(0, 2), &found(&[1]));
    builder.add_range(range(4, 6), &found(&[4, 5]));
    builder.add_range(range(10, 30), &found(&[12, 14, 16, 18]));
    builder.add_range(range(40, 41), &RangePages { pages: vec![(40 * PAGE_BYTES, None)] });
    let shape: Vec<_> =
        builder.batches.iter().map(|batch| (batch.ranges.clone(), batch.merged_pages.0, batch.zero_pages.0)).collect();
    assert_eq!(
        shape,
        [
            (vec![range(0, 2), range(4, 6)], 3, 0),
            (vec![range(10, 18)], 3, 0),
            (vec![range(18, 30), range(40, 41)], 1, 1),
        ]
    );
    assert_eq!(builder.frames.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
}

#[test]
fn touching_ranges_are_coalesced() {
    let range = |start, end| AddressRange { start, end };
    assert_eq!(joined(vec![range(8, 9), range(1, 4), range(4, 6)]), [range(1, 6), range(8, 9)]);
}
