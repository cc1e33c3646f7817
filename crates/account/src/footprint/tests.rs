use super::*;
use crate::decide::Shares;
use pagefold_base::{PageSize, Pid, ProcessId};
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_host::{PageView, Run, Way};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Mutex;

const PAGE: u64 = 4096;
const KSM: u64 = 1 << 21 | 1 << 12;
const ANON: u64 = 1 << 12;
const SHARED_MEMORY: u64 = 1 << 14;
const HUGETLB: u64 = 1 << 17 | 1 << 12;
const ZERO: u64 = 1 << 24;
const HUGE_ZERO: u64 = 1 << 24 | 1 << 22;

/// A host of frames with counts and flags, and processes that map them.
#[derive(Default)]
struct Fake {
    frames: Mutex<BTreeMap<u64, (u64, u64)>>,
}

struct FakeProcess {
    id: ProcessId,
    /// Frame by page number of the address; `None` where the frame number is hidden.
    pages: BTreeMap<u64, Option<Pfn>>,
    /// How many ranges it can be asked for before it vanishes.
    lives: usize,
    /// Frames that are of files or of shared memory.
    files: Range<u64>,
    /// Pages that are elsewhere, or nowhere, from the second time on that any are asked for.
    moves: BTreeMap<u64, Option<Pfn>>,
    asked: Mutex<Vec<AddressRange>>,
}

impl Fake {
    fn frame(&self, pfn: u64, mappings: u64, flags: u64) {
        self.frames.lock().unwrap().insert(pfn, (mappings, flags));
    }

    fn of_frames<T>(&self, frames: &[Pfn], field: impl Fn((u64, u64)) -> T) -> Reading<Vec<T>> {
        assert!(frames.is_sorted_by(|a, b| a < b), "asked for in ascending order, each once");
        let known = self.frames.lock().unwrap();
        Ok(frames.iter().map(|pfn| field(known[&pfn.0])).collect())
    }
}

impl Host for Fake {
    fn describe(&self) -> String {
        "a fake".to_owned()
    }
    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE).unwrap()
    }
    fn read(&self, _: &str) -> Reading<Vec<u8>> {
        Err(Absent::NotOnThisKernel)
    }
    fn list(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }
    fn pids(&self) -> Reading<Vec<Pid>> {
        Err(Absent::NotOnThisKernel)
    }
    fn open(&self, _: Pid) -> Reading<Box<dyn Process + '_>> {
        Err(Absent::NotOnThisKernel)
    }
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.of_frames(frames, |(_, flags)| FrameFlags(flags))
    }
    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.of_frames(frames, |(mappings, _)| mappings)
    }

    fn apply(&self, _: &Action) -> Result<Effect, Refusal> {
        Err(Refusal::ReadOnly)
    }
}

impl FakeProcess {
    /// Maps the frames at page numbers from 16 on.
    fn new(pid: u32, frames: impl IntoIterator<Item = u64>) -> Self {
        Self {
            id: ProcessId { pid: Pid(pid), start_time: 1 },
            pages: (16..).zip(frames.into_iter().map(|pfn| Some(Pfn(pfn)))).collect(),
            lives: usize::MAX,
            files: 0..0,
            moves: BTreeMap::new(),
            asked: Mutex::default(),
        }
    }

    /// One region over all its pages.
    fn regions(&self) -> Vec<Region> {
        let pages = self.pages.len() as u64;
        vec![Region { rss: Bytes(pages * PAGE), ..region(16, 16 + pages) }]
    }

    fn answer<T>(&self, range: AddressRange, answer: impl FnOnce() -> T) -> Reading<T> {
        let mut asked = self.asked.lock().unwrap();
        asked.push(range);
        if asked.len() > self.lives { Err(Absent::Vanished) } else { Ok(answer()) }
    }
}

impl Process for FakeProcess {
    fn id(&self) -> ProcessId {
        self.id
    }
    fn read(&self, _: &str) -> Reading<Vec<u8>> {
        Err(Absent::NotOnThisKernel)
    }
    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }
    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<Run>> {
        let pages = ranges.iter().flat_map(|range| self.pages.range(range.start / PAGE..range.end / PAGE));
        Ok(pages.map(|(number, _)| Run { address: number * PAGE, pages: 1, huge: false }).collect())
    }
    fn mappings(&self, range: AddressRange) -> Reading<Vec<Mapping>> {
        let again = !self.asked.lock().unwrap().is_empty();
        self.answer(range, || {
            let page = |number| match self.moves.get(&number).filter(|_| again).or(self.pages.get(&number)) {
                Some(None) if again => Mapping::default(),
                Some(&frame) => {
                    let file = frame.is_some_and(|frame| self.files.contains(&frame.0));
                    Mapping { present: true, frame, file, ..Mapping::default() }
                }
                None => Mapping::default(),
            };
            (range.start / PAGE..range.end / PAGE).map(page).collect()
        })
    }
    fn contents(&self, _: Way, _: &[Run], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }
}

fn region(first: u64, end: u64) -> Region {
    Region::empty(AddressRange { start: first * PAGE, end: end * PAGE })
}

fn shares(entries: &[(u64, u64)]) -> Shares {
    let mut shares = Shares::default();
    for &(mappings, pages) in entries {
        shares.add(NonZeroU64::new(mappings).unwrap(), pages);
    }
    shares
}

fn enter(ledger: &mut Ledger<'_>, process: &FakeProcess) -> Mapped {
    ledger.enter(process, &process.regions()).unwrap()
}

#[test]
fn frames_of_one_two_and_three_processes() {
    let host = Fake::default();
    (0..10).for_each(|pfn| host.frame(pfn, 1, ANON));
    (10..14).for_each(|pfn| host.frame(pfn, 2, ANON));
    (20..26).for_each(|pfn| host.frame(pfn, 3, 0));
    let mut ledger = Ledger::new(&host);
    let a = enter(&mut ledger, &FakeProcess::new(1, (0..10).chain(10..14).chain(20..26)));
    let b = enter(&mut ledger, &FakeProcess::new(2, (10..14).chain(20..26)));
    let c = enter(&mut ledger, &FakeProcess::new(3, 20..26));
    assert_eq!(a.shares, shares(&[(1, 10), (2, 4), (3, 6)]));
    assert_eq!(b.shares, shares(&[(2, 4), (3, 6)]));
    assert_eq!(c.shares, shares(&[(3, 6)]));
    let frames = ledger.close();
    assert_eq!(frames, Frames { distinct: Pages(20), anonymous: Pages(14), ..Frames::default() });
}

#[test]
fn ksm_frames_with_many_mappings_and_mappers_not_seen() {
    let host = Fake::default();
    host.frame(1, 4, KSM);
    host.frame(2, 256, KSM);
    host.frame(3, 512, KSM);
    let mut ledger = Ledger::new(&host);
    // It maps frame 1 twice, and the others 200 times each.
    let pages = [1, 1].into_iter().chain([2; 200]).chain([3; 200]);
    let mapped = enter(&mut ledger, &FakeProcess::new(1, pages));
    assert_eq!(mapped.ksm, shares(&[(4, 2), (256, 200), (512, 200)]));
    assert_eq!(mapped.shares, mapped.ksm);
    let frames = ledger.close();
    assert_eq!((frames.distinct, frames.ksm, frames.anonymous), (Pages(3), Pages(3), Pages(3)));
    assert_eq!(frames.ksm_mappings, Pages(4 + 256 + 512));
    assert_eq!(frames.unseen, shares(&[(4, 2), (256, 56), (512, 312)]));
    let mut all = mapped.shares;
    all += &frames.unseen;
    assert_eq!(all.frames(), Some(Pages(3)));
}

#[test]
fn zero_pages_are_no_memory() {
    let host = Fake::default();
    host.frame(1, 1, ANON);
    host.frame(5, 0, ZERO);
    (512..520).for_each(|pfn| host.frame(pfn, 0, HUGE_ZERO));
    let mut ledger = Ledger::new(&host);
    let mapped = enter(&mut ledger, &FakeProcess::new(1, [5, 1, 5, 5].into_iter().chain(512..520)));
    let counted = Mapped { shares: shares(&[(1, 1)]), zero: Pages(3), huge_zero: Pages(8), ..Mapped::default() };
    assert_eq!(mapped, counted);
    let frames = ledger.close();
    assert_eq!((frames.distinct, frames.zero, frames.huge_zero), (Pages(1), Pages(3), Pages(8)));
}

#[test]
fn what_maps_a_store_of_the_engine_is_told_apart() {
    let host = Fake::default();
    (1..=4).for_each(|pfn| host.frame(pfn, 2, SHARED_MEMORY));
    host.frame(9, 1, ANON);
    let process = FakeProcess { files: 1..5, ..FakeProcess::new(1, [1, 2, 9, 2, 3, 4]) };
    let mut ledger = Ledger::new(&host);
    let part = |name: &str, first: u64, end: u64| Region {
        name: name.to_owned(),
        rss: Bytes((end - first) * PAGE),
        ..region(first, end)
    };
    // Frame 9 was written since it was merged, 3 is of the store in another region, 4 of another memfd.
    let store = "/memfd:pagefold-store (deleted)";
    let regions = [part(store, 16, 20), part(store, 20, 21), part("/memfd:other (deleted)", 21, 22)];
    let mapped = ledger.enter(&process, &regions).unwrap();
    assert_eq!(mapped.engine, shares(&[(2, 4)]));
    assert_eq!(mapped.shares, shares(&[(1, 1), (2, 5)]));
}

#[test]
fn hugetlb_counts_apart_from_anonymous_memory() {
    let host = Fake::default();
    (0..512).for_each(|pfn| host.frame(pfn, 2, HUGETLB));
    let process = FakeProcess::new(1, 0..512);
    let mut regions = process.regions();
    (regions[0].hugetlb, regions[0].rss) = (regions[0].rss, Bytes::ZERO);
    let mut ledger = Ledger::new(&host);
    let mapped = ledger.enter(&process, &regions).unwrap();
    assert_eq!((mapped.hugetlb, mapped.shares), (Pages(512), shares(&[(2, 512)])));
    let frames = ledger.close();
    assert_eq!((frames.hugetlb, frames.anonymous), (Pages(512), Pages(0)));
}

#[test]
fn a_process_that_vanishes_midway_is_lost_and_named() {
    let host = Fake::default();
    (0..=BATCH).for_each(|pfn| host.frame(pfn, 1, ANON));
    let vanishing = FakeProcess { lives: 1, ..FakeProcess::new(7, 0..=BATCH) };
    let mut ledger = Ledger::new(&host);
    assert_eq!(ledger.enter(&vanishing, &vanishing.regions()), Err(Absent::Vanished));
    let frames = ledger.close();
    assert_eq!(frames.unread, [(vanishing.id, Absent::Vanished)]);
    assert_eq!(frames.lost, shares(&[(1, BATCH)]));
    assert_eq!(frames.distinct, Pages(BATCH));
}

#[test]
fn hidden_frames_are_denied_and_nothing_is_entered() {
    let host = Fake::default();
    host.frame(1, 1, ANON);
    let mut process = FakeProcess::new(1, [1, 1]);
    process.pages.insert(17, None);
    let mut ledger = Ledger::new(&host);
    assert_eq!(ledger.enter(&process, &process.regions()), Err(Absent::Denied));
    assert_eq!(ledger.close(), Frames { unread: vec![(process.id, Absent::Denied)], ..Frames::default() });
}

#[test]
fn what_changes_between_two_reads_is_named() {
    let host = Fake::default();
    host.frame(1, 2, ANON);
    host.frame(2, 1, ANON);
    host.frame(3, 0, 0);
    let mut ledger = Ledger::new(&host);
    let first = enter(&mut ledger, &FakeProcess::new(1, [1, 2, 3]));
    assert_eq!(first.gone, Pages(1), "frame 3 lost its last mapping meanwhile");
    host.frame(1, 3, ANON);
    let second = enter(&mut ledger, &FakeProcess::new(2, [1, 2]));
    assert_eq!(second.shares, shares(&[(3, 1), (1, 1)]));
    let frames = ledger.close();
    assert_eq!(frames.distinct, Pages(2));
    assert_eq!(frames.moved, Pages(1));
    assert_eq!(frames.unseen, shares(&[(3, 1)]), "by the newest count one mapper of frame 1 was not seen");
    assert_eq!(frames.excess, shares(&[(1, 1)]), "frame 2 has one mapping and was seen in two processes");
}

#[test]
fn pages_that_the_kernel_moves_are_found_again() {
    let host = Fake::default();
    // All frames of the process have been left meanwhile, but for the first.
    host.frame(1, 2, SHARED_MEMORY);
    (2..5).for_each(|pfn| host.frame(pfn, 0, 0));
    host.frame(6, 2, SHARED_MEMORY);
    let mut process = FakeProcess { files: 1..7, ..FakeProcess::new(1, [1, 2, 3, 4]) };
    process.moves = BTreeMap::from([(17, Some(Pfn(6))), (18, None)]);
    let stores = [Region { name: "/memfd:pagefold-store (deleted)".to_owned(), ..process.regions().remove(0) }];
    let mut ledger = Ledger::new(&host);
    let mapped = ledger.enter(&process, &stores).unwrap();
    assert_eq!((mapped.shares, mapped.engine), (shares(&[(2, 2)]), shares(&[(2, 2)])), "one was found in frame 6");
    assert_eq!(mapped.gone, Pages(2), "one is not mapped any more, and one was not found for all looking");
    assert_eq!(ledger.close().distinct, Pages(2));
}

#[test]
fn emptiness_costs_nothing() {
    let host = Fake::default();
    (0..4).for_each(|pfn| host.frame(pfn, 1, ANON));
    let tib = (1 << 40) / PAGE;
    let mut process = FakeProcess::new(1, []);
    // Two neighbours, one in the same window, one 10 TiB further.
    for (pfn, number) in [tib, tib + 1, tib + 1000, 11 * tib].into_iter().enumerate() {
        process.pages.insert(number, Some(Pfn(pfn as u64)));
    }
    let mut device = Region { rss: Bytes(PAGE), ..region(0, 8) };
    device.flags = VmFlags::PFN_MAP;
    let regions = [region(30 * tib, 50 * tib), device, Region { rss: Bytes(4 * PAGE), ..region(tib, 21 * tib) }];
    let mut ledger = Ledger::new(&host);
    assert_eq!(ledger.enter(&process, &regions).unwrap().shares, shares(&[(1, 4)]));
    let asked = process.asked.lock().unwrap();
    let pages: Vec<_> = asked.iter().map(|range| (range.start / PAGE, range.end / PAGE)).collect();
    assert_eq!(pages, [(tib, tib + 1001), (11 * tib, 11 * tib + 1)]);
}

#[test]
fn dense_regions_are_read_in_bounded_parts() {
    let host = Fake::default();
    (0..BATCH + 3).for_each(|pfn| host.frame(pfn, 1, ANON));
    let process = FakeProcess::new(1, 0..BATCH + 3);
    assert_eq!(enter(&mut Ledger::new(&host), &process).shares, shares(&[(1, BATCH + 3)]));
    let asked = process.asked.lock().unwrap();
    let pages: Vec<_> = asked.iter().map(|range| range.bytes().0 / PAGE).collect();
    assert_eq!(pages, [BATCH, 3]);
}

#[test]
fn cells_keep_counts_of_any_size() {
    let mut table = FrameTable::default();
    let pfn = Pfn(3 * BLOCK - 1);
    let mut expected = (0, 0);
    for (mappings, seen) in [(1, 1), (254, 254), (255, 3), (254, 2), (70_000, 69_999), (u64::MAX, 300), (1, 0)] {
        table.update(pfn, |before| {
            assert_eq!((before.mappings, before.seen), expected);
            Cell { mappings, seen }
        });
        expected = (mappings, seen);
        let known: Vec<_> = table.cells().filter(|cell| cell.mappings > 0).map(|cell| cell.seen).collect();
        assert_eq!(known, [seen], "each frame is in one place");
    }
}

proptest! {
    // Unoptimised, each case walks two blocks of cells three times.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever processes map whatever frames: seen together, their shares are the frames; with one of them not seen,
    /// its part is exactly what is reported as unseen; and the order of entering does not matter.
    #[test]
    fn shares_add_up_to_distinct_frames(
        owners in proptest::collection::vec(
            (BLOCK - 20..BLOCK + 20, proptest::collection::vec(0..5usize, 1..400), any::<bool>()),
            1..30,
        ),
    ) {
        let frames: BTreeMap<_, _> = owners.iter().map(|(pfn, owners, ksm)| (*pfn, (owners, *ksm))).collect();
        let host = Fake::default();
        let mut maps = vec![vec![]; 5];
        for (&pfn, &(owners, ksm)) in &frames {
            host.frame(pfn, owners.len() as u64, if ksm { KSM } else { ANON });
            owners.iter().for_each(|&owner| maps[owner].push(pfn));
        }
        let processes: Vec<_> = (1..).zip(maps).map(|(pid, map)| FakeProcess::new(pid, map)).collect();

        let run = |order: &mut dyn Iterator<Item = &FakeProcess>| {
            let mut ledger = Ledger::new(&host);
            let mut all = Shares::default();
            order.for_each(|process| all += &enter(&mut ledger, process).shares);
            (all, ledger.close())
        };
        let (all, seen) = run(&mut processes.iter());
        prop_assert_eq!(seen.distinct, Pages(frames.len() as u64));
        prop_assert_eq!(all.frames(), Some(seen.distinct));
        prop_assert_eq!((&seen.unseen, &seen.excess, seen.moved), (&Shares::default(), &Shares::default(), Pages(0)));
        prop_assert_eq!(run(&mut processes.iter().rev()), (all, seen));

        let (mut part, without_one) = run(&mut processes.iter().skip(1));
        part += &without_one.unseen;
        prop_assert_eq!(part.frames(), Some(without_one.distinct));
    }
}
