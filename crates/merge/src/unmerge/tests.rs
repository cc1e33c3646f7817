//! Over a host of a few pages, each of whose frames is known: what is planned is what is taken, and what fails leaves
//! the rest as it was.

use super::*;
use pagefold_base::{PageSize, Pid, ProcessId};
use pagefold_host::act::{Effect, Refusal};
use pagefold_host::faulty::{Fault, Faulty};
use pagefold_host::{FrameFlags, Mapping, PageView, Run, Way as Reader};
use std::path::Path;
use std::sync::Mutex;

const PAGE: u64 = 4096;
const BASE: u64 = 0x10_0000;

/// A page of the fake.
#[derive(Clone, Copy, PartialEq)]
enum Page {
    Own,
    /// On this KSM frame.
    Merged(u64),
    /// On the kernel's page of zeros, by KSM.
    Zero,
}

struct Fake {
    state: Mutex<State>,
    /// Asked before each action whether it is refused.
    refuses: fn(&Action) -> Option<Refusal>,
    /// Whether its kernel tells who is enrolled whole (6.14).
    tells: bool,
    /// What happens beside an action that was carried out.
    beside: fn(&mut State),
}

struct State {
    /// By number: pages from `BASE` on, and whether each is marked, and whether the process is enrolled whole.
    processes: BTreeMap<u32, (Vec<(Page, bool)>, bool)>,
    /// Frames that may still be taken.
    free: u64,
    actions: Vec<Action>,
    /// Killed, and its parent has not asked for its status.
    zombies: BTreeSet<u32>,
}

impl State {
    fn mappings(&self, frame: u64) -> u64 {
        let pages = self.processes.values().flat_map(|(pages, _)| pages);
        pages.filter(|(page, _)| *page == Page::Merged(frame)).count() as u64
    }

    fn break_pages(&mut self, pid: u32, range: AddressRange) {
        let at = |address: u64| ((address - BASE) / PAGE) as usize;
        let mut mappings: BTreeMap<u64, u64> = BTreeMap::new();
        for (page, _) in self.processes.values().flat_map(|(pages, _)| pages) {
            if let Page::Merged(frame) = page {
                *mappings.entry(*frame).or_default() += 1;
            }
        }
        let (pages, _) = self.processes.get_mut(&pid).unwrap();
        for page in &mut pages[at(range.start)..at(range.end)] {
            if page.0 != Page::Own {
                assert!(self.free > 0, "the OOM killer was woken");
                self.free -= 1;
            }
            if let Page::Merged(frame) = page.0 {
                let left = mappings.get_mut(&frame).unwrap();
                *left -= 1;
                self.free += u64::from(*left == 0);
            }
            *page = (Page::Own, false);
        }
    }
}

/// Frame numbers of the fake: of zeros, of merged ones, and of a process's own.
const ZERO: u64 = 1;
const MERGED: u64 = 100;
const OWN: u64 = 10_000;

impl Host for Fake {
    fn describe(&self) -> String {
        "fake".to_owned()
    }

    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE).unwrap()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        match path {
            // A reserve of nothing: the fake's total is 0.
            "proc/meminfo" => {
                let kib = self.state.lock().unwrap().free * PAGE / 1024;
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
        let there = self.state.lock().unwrap().processes.contains_key(&pid.0);
        if there { Ok(Box::new(FakeProcess { host: self, pid: pid.0 })) } else { Err(Absent::Vanished) }
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        let flags = |frame: &Pfn| match frame.0 {
            ZERO => 1 << 24,
            MERGED..OWN => 1 << 21 | 1 << 12,
            _ => 1 << 12,
        };
        Ok(frames.iter().map(flags).map(FrameFlags).collect())
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        let state = self.state.lock().unwrap();
        Ok(frames.iter().map(|frame| state.mappings(frame.0 - MERGED)).collect())
    }

    fn apply(&self, action: &Action) -> Result<Effect, Refusal> {
        if let Some(refusal) = (self.refuses)(action) {
            return Err(refusal);
        }
        let mut state = self.state.lock().unwrap();
        state.actions.push(action.clone());
        match action {
            Action::Advise { process, advice: Advice::Unmergeable, ranges } => {
                ranges.iter().for_each(|range| state.break_pages(process.pid.0, *range));
            }
            Action::MergeAny { process, on: false } => {
                let end = BASE + state.processes[&process.pid.0].0.len() as u64 * PAGE;
                state.break_pages(process.pid.0, AddressRange { start: BASE, end });
                state.processes.get_mut(&process.pid.0).unwrap().1 = false;
            }
            Action::GuestMerge { process, backend, on: false, .. } => {
                let (start, end) = backend.split_once('-').unwrap();
                let at = |page: &str| BASE + page.parse::<u64>().unwrap() * PAGE;
                state.break_pages(process.pid.0, AddressRange { start: at(start), end: at(end) });
            }
            other => panic!("{other:?}"),
        }
        (self.beside)(&mut state);
        Ok(Effect::default())
    }
}

struct FakeProcess<'a> {
    host: &'a Fake,
    pid: u32,
}

impl Handle for FakeProcess<'_> {
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
                let mut start = BASE;
                for region in pages.chunk_by(|(a, marked), (b, too)| {
                    marked == too && matches!(a, Page::Merged(_)) == matches!(b, Page::Merged(_))
                }) {
                    let (end, kib) = (start + region.len() as u64 * PAGE, region.len() * 4);
                    let ksm = if matches!(region[0].0, Page::Merged(_)) { kib } else { 0 };
                    let flag = if region[0].1 { " mg" } else { "" };
                    text += &format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \nRss: {kib} kB\n");
                    text += &format!("Anonymous: {kib} kB\nKSM: {ksm} kB\nVmFlags: rd wr{flag}\n");
                    start = end;
                }
                text
            }
            "ksm_stat" => {
                let zeros = pages.iter().filter(|(page, _)| *page == Page::Zero).count();
                let whole = if *whole { "yes" } else { "no" };
                let told = format!("ksm_merge_any: {whole}\nksm_mergeable: yes\n");
                format!("ksm_rmap_items 0\nksm_zero_pages {zeros}\n{}", if self.host.tells { &told } else { "" })
            }
            _ => return Err(Absent::NotOnThisKernel),
        }
        .into_bytes())
    }

    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }

    fn resident(&self, _: &[AddressRange]) -> Reading<Vec<Run>> {
        Err(Absent::NotOnThisKernel)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<Mapping>> {
        let state = self.host.state.lock().unwrap();
        let (pages, _) = state.processes.get(&self.pid).ok_or(Absent::Vanished)?;
        let (first, last) = ((range.start - BASE) / PAGE, (range.end - BASE) / PAGE);
        let mapping = |i: u64| {
            let frame = match pages[i as usize].0 {
                Page::Own => OWN * u64::from(self.pid) + i,
                Page::Merged(frame) => MERGED + frame,
                Page::Zero => ZERO,
            };
            Mapping { present: true, frame: Some(Pfn(frame)), ..Mapping::default() }
        };
        Ok((first..last).map(mapping).collect())
    }

    fn contents(&self, _: Reader, _: &[Run], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }
}

/// Processes 1, 2, ... of these pages: a letter is a KSM frame, `0` a page of zeros, `.` a page of its own; all marked.
fn host(free: u64, processes: &[&str]) -> Fake {
    let page = |letter: char| match letter {
        '.' => Page::Own,
        '0' => Page::Zero,
        letter => Page::Merged(u64::from(letter as u32)),
    };
    let pages = |text: &&str| (text.chars().map(|letter| (page(letter), true)).collect(), false);
    let processes = (1..).zip(processes.iter().map(pages)).collect();
    let state = State { processes, free, actions: Vec::new(), zombies: BTreeSet::new() };
    Fake { state: Mutex::new(state), refuses: |_| None, tells: true, beside: |_| {} }
}

fn planned(host: &dyn Host) -> Plan {
    plan(host, &Selection::default(), &|_, _| None).unwrap()
}

/// Plan and carry out.
fn run(host: &dyn Host, limits: Limits) -> (Plan, Done) {
    carried_out(host, planned(host), limits)
}

fn carried_out(host: &dyn Host, plan: Plan, limits: Limits) -> (Plan, Done) {
    let directory = tempfile::tempdir().unwrap();
    let (mut session, _, _) = Session::begin(host, directory.path()).unwrap();
    let done = carry_out(&mut session, &plan, limits, &AtomicBool::new(false)).unwrap();
    session.finish().unwrap();
    assert!(!Path::new(directory.path()).join("journal.json").exists(), "nothing is to be put back");
    (plan, done)
}

const STAGED: Limits = Limits { staged: true, force: false, wait: Duration::ZERO, collapse: false, pressure: None };

#[test]
fn exactly_what_is_planned_is_taken() {
    for (processes, needed) in [
        // Both mappings of a frame go, and the frame comes back.
        (vec!["a", "a"], 1),
        (vec!["ab", "abb"], 3),
        // Pages of zeros take a frame each, and pages of one's own none.
        (vec!["00..", "a0", "a"], 4),
        (vec!["aaaa"], 3),
    ] {
        // One more, which a copy takes before the frame that it leaves comes back: of a real host the reserve has it.
        let fake = host(needed + 1, &processes);
        let (plan, done) = run(&fake, Limits::default());
        assert_eq!(plan.need().host, Pages(needed), "{processes:?}");
        assert!(done.targets.iter().all(Withdrawn::is_whole), "{processes:?}: {done:?}");
        assert_eq!(fake.state.lock().unwrap().free, 1, "{processes:?}");
        assert_eq!(done.planned(&plan), Pages(needed));
    }
}

#[test]
fn a_frame_that_somebody_else_keeps_does_not_come_back() {
    let fake = host(10, &["aa", "a"]);
    let selection = Selection { pids: vec![Pid(1)], ..Selection::default() };
    let plan = plan(&fake, &selection, &|_, _| None).unwrap();
    assert_eq!((plan.targets[0].copies(), plan.targets[0].returned()), (Pages(2), Pages(0)));
}

#[test]
fn what_does_not_fit_is_not_begun_unless_forced() {
    let fake = host(1, &["abc", "abc"]);
    let (_, done) = run(&fake, Limits::default());
    assert_eq!(done.stopped.as_ref().map(|judgement| judgement.verdict.clone()), Some(Verdict::Short));
    assert_eq!(fake.state.lock().unwrap().actions, []);
    assert!(done.targets.iter().all(|target| !target.is_whole() && target.parts == 0));
    let plan = planned(&fake);
    assert_eq!(plan.affordable(&fake), (0, 2));
    fake.state.lock().unwrap().free = 100;
    let (_, done) = run(&fake, Limits { force: true, ..Limits::default() });
    assert!(done.targets.iter().all(Withdrawn::is_whole));
}

#[test]
fn staged_takes_the_least_first_and_stops_where_it_must() {
    // 8 pages in the first, 2 in the second, 3 in the third; each also in a process that needs too much.
    let fake = host(6, &["abcdefgh", "ij", "klm", "abcdefghijklmnopqnopq"]);
    let (plan, done) = run(&fake, STAGED);
    let order: Vec<u32> = plan.targets.iter().map(|target| target.process.id.pid.0).collect();
    assert_eq!(order, [2, 3, 1, 4]);
    assert_eq!(done.targets.iter().map(Withdrawn::is_whole).collect::<Vec<_>>(), [true, true, false, false]);
    assert_eq!(fake.state.lock().unwrap().free, 1);
    assert!(done.stopped.is_some());
}

#[test]
fn a_process_enrolled_whole_is_withdrawn_whole_also_by_parts() {
    for limits in [Limits::default(), STAGED] {
        let fake = host(5, &["abab."]);
        fake.state.lock().unwrap().processes.get_mut(&1).unwrap().1 = true;
        let (plan, done) = run(&fake, limits);
        assert_eq!(plan.targets[0].way, Way::Whole);
        assert!(done.targets[0].is_whole(), "{done:?}");
        let last = fake.state.lock().unwrap().actions.last().cloned();
        assert!(matches!(last, Some(Action::MergeAny { on: false, .. })), "{last:?}");
    }
}

#[test]
fn before_6_14_nobody_stays_enrolled_whole_either() {
    for (limits, whole) in [(Limits::default(), true), (STAGED, true), (Limits::default(), false)] {
        let fake = Fake { tells: false, ..host(5, &["abab."]) };
        fake.state.lock().unwrap().processes.get_mut(&1).unwrap().1 = whole;
        let (plan, done) = run(&fake, limits);
        assert_eq!(plan.targets[0].way, Way::Regions);
        assert!(done.targets[0].is_whole(), "{done:?}");
        let state = fake.state.lock().unwrap();
        assert!(!state.processes[&1].1, "what it maps from now on is not enrolled");
        assert!(matches!(state.actions.first(), Some(Action::Advise { .. })), "{:?}", state.actions);
    }
    let refuses = |action: &Action| {
        matches!(action, Action::MergeAny { .. }).then(|| Refusal::Busy("it does not stop".to_owned()))
    };
    let fake = Fake { tells: false, refuses, ..host(5, &["abab."]) };
    let (_, done) = run(&fake, Limits::default());
    assert!(!done.targets[0].is_whole(), "it may still be enrolled: {done:?}");
}

#[test]
fn one_that_is_refused_or_ends_does_not_keep_the_others() {
    let refused = |action: &Action| match action {
        Action::Advise { process, .. } if process.pid == Pid(1) => Some(Refusal::Traced(Pid(9))),
        Action::Advise { process, .. } if process.pid == Pid(2) => Some(Refusal::Vanished),
        _ => None,
    };
    for limits in [Limits::default(), STAGED] {
        let fake = Fake { refuses: refused, ..host(100, &["a", "ab", "abc"]) };
        let (_, done) = run(&fake, limits);
        assert_eq!(done.targets[0].error.as_deref(), Some("process 9 traces it"));
        assert_eq!(done.targets[0].remains, Some(Ok(Remains { merged: Pages(1), ..Remains::default() })));
        assert!(done.targets[1].ended && done.targets[2].is_whole(), "{done:?}");
        assert_eq!(fake.state.lock().unwrap().actions.len(), 1);
    }
}

#[test]
fn nothing_enrolled_is_no_target() {
    let fake = host(0, &["..", "a"]);
    fake.state.lock().unwrap().processes.get_mut(&1).unwrap().0.iter_mut().for_each(|page| page.1 = false);
    let plan = planned(&fake);
    assert_eq!((plan.idle, plan.targets.len()), (1, 1));
}

#[test]
fn memory_is_waited_for() {
    let fake = host(0, &["a", "a"]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(TICK);
            fake.state.lock().unwrap().free = 5;
        });
        let (_, done) = run(&fake, Limits { wait: Duration::from_secs(60), ..STAGED });
        assert!(done.targets.iter().all(Withdrawn::is_whole), "{done:?}");
    });
}

#[test]
fn what_is_under_way_stops_when_memory_gets_short() {
    let pages = "a".repeat(PART + 1);
    for (limits, stops) in [(STAGED, false), (Limits { pressure: Some(10.0), ..STAGED }, true)] {
        let fake = host(2 * PART as u64, &["b", &pages]);
        // From the second part on.
        let avg10 = || if fake.state.lock().unwrap().actions.len() >= 2 { "10.00" } else { "9.99" };
        let line = |word: &str| format!("{word} avg10={} avg60=0.00 avg300=0.00 total=1\n", avg10());
        let told = |path: &str| {
            (path == "proc/pressure/memory").then(|| Fault::Replaced((line("some") + &line("full")).into_bytes()))
        };
        let (plan, done) = run(&Faulty::new(&fake, told), limits);
        assert_eq!(plan.targets.iter().map(|target| target.parts.len()).collect::<Vec<_>>(), [1, 2]);
        assert!(done.targets[0].is_whole(), "{done:?}");
        assert_eq!((done.targets[1].parts, done.targets[1].is_whole()), if stops { (1, false) } else { (2, true) });
        assert_eq!(done.targets[1].error.as_deref(), stops.then_some("memory is short"));
    }
}

/// Pages that all fit when it begins, in three parts; a neighbor takes memory once the first part is withdrawn.
#[test]
fn unmerge_stops_when_a_neighbor_takes_the_memory() {
    let part = PART as u64;
    let pages = "ab".repeat(PART + 500);
    let little = |state: &mut State| state.free = state.free.min(1);
    let for_one_part = |state: &mut State| state.free = PART as u64;
    for (limits, grows, parts) in [
        (Limits::default(), little as fn(&mut State), 1),
        (STAGED, little, 1),
        // One part would fit, and the rest would not: the room is left to the neighbor unless told otherwise.
        (Limits::default(), for_one_part, 1),
        (STAGED, for_one_part, 3),
    ] {
        let fake = Fake { beside: grows, ..host(2 * part + 1000, &[&pages]) };
        let plan = planned(&fake);
        assert_eq!((plan.targets[0].parts.len(), plan.judge(&fake, &plan.need()).verdict), (3, Verdict::Fits));
        let (_, done) = run(&fake, limits);
        assert_eq!((done.targets[0].parts, done.targets[0].is_whole()), (parts, parts == 3), "{:?}", done.stopped);
        let stopped = done.stopped.as_ref().map(|judgement| judgement.verdict.clone());
        assert_eq!(stopped, (parts < 3).then_some(Verdict::Short));
    }
}

/// A guest of two backends of four merged pages each; pages 8 on are no backend's.
fn planned_guest(host: &dyn Host) -> Plan {
    let size = Bytes(4 * PAGE);
    let backends = vec![("0-4".to_owned(), size), ("4-8".to_owned(), size)];
    let way = Way::Guest { socket: "/run/qmp".into(), backends };
    plan(host, &Selection::default(), &|_, _| Some(way.clone())).unwrap()
}

#[test]
fn guard_is_asked_for_the_rest_before_each_backend_of_a_guest() {
    let little = |state: &mut State| state.free = state.free.min(3);
    let hides_frames = |path: &str| path.ends_with("#frame_flags").then_some(Fault::Absent(Absent::Denied));
    for (beside, fits) in [((|_| {}) as fn(&mut State), true), (little, false)] {
        for exact in [true, false] {
            // Other processes have the frames, too, which do not come back.
            let fake = Fake { beside, ..host(8, &["abcdefgh", "abcdefgh"]) };
            let faulty = Faulty::new(&fake, |path: &str| hides_frames(path).filter(|_| !exact));
            let mut plan = planned_guest(&faulty);
            plan.targets.retain(|target| target.process.id.pid == Pid(1));
            assert_eq!((plan.targets[0].exact.is_ok(), plan.targets[0].merged()), (exact, Pages(8)));
            let (_, done) = carried_out(&faulty, plan, Limits::default());
            assert_eq!(fake.state.lock().unwrap().actions.len(), if fits { 2 } else { 1 }, "exact: {exact}");
            assert_eq!(done.targets[0].withdrawn, fits, "{:?}", done.stopped);
            let stopped = done.stopped.map(|judgement| judgement.verdict);
            assert_eq!(stopped, (!fits).then_some(Verdict::Short));
        }
    }
}

#[test]
fn process_killed_during_unmerge_counts_as_ended_before_its_parent_waits() {
    let killed = |state: &mut State| {
        state.zombies.insert(1);
    };
    for limits in [Limits::default(), STAGED] {
        let fake = Fake { beside: killed, ..host(10, &["ab"]) };
        let (_, done) = run(&fake, limits);
        assert!(done.targets[0].ended, "{done:?}");
        assert_eq!(done.targets[0].remains, None, "an empty list of regions is not a process that has nothing merged");
    }
}

#[test]
fn parts_are_bounded_and_hold_every_page_once() {
    let mut parts = Parts { at_most: 3, parts: Vec::new(), frames: Vec::new() };
    let range = |start: u64, end: u64| AddressRange { start: start * PAGE, end: end * PAGE };
    let found =
        |pages: &[u64]| Found { pages: pages.iter().map(|&page| (page * PAGE, Some((Pfn(page), 2)))).collect() };
    parts.add(range(0, 2), &found(&[1]));
    parts.add(range(4, 6), &found(&[4, 5]));
    parts.add(range(10, 30), &found(&[12, 14, 16, 18]));
    parts.add(range(40, 41), &Found { pages: vec![(40 * PAGE, None)] });
    let shape: Vec<_> = parts.parts.iter().map(|part| (part.ranges.clone(), part.merged.0, part.zeros.0)).collect();
    assert_eq!(
        shape,
        [
            (vec![range(0, 2), range(4, 6)], 3, 0),
            (vec![range(10, 18)], 3, 0),
            (vec![range(18, 30), range(40, 41)], 1, 1),
        ]
    );
    assert_eq!(parts.frames.iter().map(Vec::len).collect::<Vec<_>>(), [3, 3, 1]);
}

#[test]
fn ranges_that_touch_are_one() {
    let range = |start, end| AddressRange { start, end };
    assert_eq!(joined(vec![range(8, 9), range(1, 4), range(4, 6)]), [range(1, 6), range(8, 9)]);
}
