use super::*;
use crate::decide::MappingShares;
use pagefold_base::{PageSize, Pid, ProcessId};
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::{PageRun, PageView, ReadMethod};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Mutex;

const PAGE_BYTES: u64 = 4096;
const KPF_KSM_ANON: u64 = 1 << 21 | 1 << 12;
const KPF_ANON: u64 = 1 << 12;
const KPF_SWAPBACKED: u64 = 1 << 14;
const KPF_HUGE_ANON: u64 = 1 << 17 | 1 << 12;
const KPF_ZERO_PAGE: u64 = 1 << 24;
const KPF_ZERO_PAGE_THP: u64 = 1 << 24 | 1 << 22;

/// A host of frames with counts and flags, and of processes that map them.
#[derive(Default)]
struct FakeFrameHost {
    frames: Mutex<BTreeMap<u64, (u64, u64)>>,
}

struct FakeMapper {
    id: ProcessId,
    /// Frame by page number of the address; `None` where the frame number is hidden.
    pages: BTreeMap<u64, Option<Pfn>>,
    /// Number of ranges that can be read before the process exits.
    reads_before_exit: usize,
    /// Frames of files or of shared memory.
    file_frames: Range<u64>,
    /// Pages that have moved to another frame, or have been unmapped, from the second read on.
    frames_after_migration: BTreeMap<u64, Option<Pfn>>,
    requested_ranges: Mutex<Vec<AddressRange>>,
}

impl FakeFrameHost {
    fn set_frame(&self, pfn: u64, mappings: u64, flags: u64) {
        self.frames.lock().unwrap().insert(pfn, (mappings, flags));
    }

    fn lookup_frames<T>(&self, frames: &[Pfn], field: impl Fn((u64, u64)) -> T) -> Reading<Vec<T>> {
        assert!(frames.is_sorted_by(|a, b| a < b), "frames must be requested in ascending order, each once");
        let all_frames = self.frames.lock().unwrap();
        Ok(frames.iter().map(|pfn| field(all_frames[&pfn.0])).collect())
    }
}

impl Host for FakeFrameHost {
    fn describe(&self) -> String {
        "a fake".to_owned()
    }
    fn page_size(&self) -> PageSize {
        PageSize::new(PAGE_BYTES).unwrap()
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
    fn open(&self, _: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        Err(Absent::NotOnThisKernel)
    }
    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.lookup_frames(frames, |(_, flags)| FrameFlags(flags))
    }
    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.lookup_frames(frames, |(mappings, _)| mappings)
    }

    fn apply(&self, _: &Action) -> Result<ActionOutcome, ActionError> {
        Err(ActionError::ReadOnly)
    }
}

impl FakeMapper {
    /// Maps the frames at page numbers from 16 on.
    fn new(pid: u32, frames: impl IntoIterator<Item = u64>) -> Self {
        Self {
            id: ProcessId { pid: Pid(pid), start_time: 1 },
            pages: (16..).zip(frames.into_iter().map(|pfn| Some(Pfn(pfn)))).collect(),
            reads_before_exit: usize::MAX,
            file_frames: 0..0,
            frames_after_migration: BTreeMap::new(),
            requested_ranges: Mutex::default(),
        }
    }

    /// One region over all its pages.
    fn regions(&self) -> Vec<Region> {
        let pages = self.pages.len() as u64;
        vec![Region { rss: Bytes(pages * PAGE_BYTES), ..region_of_pages(16, 16 + pages) }]
    }

    fn answer_or_vanish<T>(&self, range: AddressRange, answer: impl FnOnce() -> T) -> Reading<T> {
        let mut requested_ranges = self.requested_ranges.lock().unwrap();
        requested_ranges.push(range);
        if requested_ranges.len() > self.reads_before_exit { Err(Absent::Vanished) } else { Ok(answer()) }
    }
}

impl ProcessHandle for FakeMapper {
    fn id(&self) -> ProcessId {
        self.id
    }
    fn read(&self, _: &str) -> Reading<Vec<u8>> {
        Err(Absent::NotOnThisKernel)
    }
    fn links(&self, _: &str) -> Reading<Vec<String>> {
        Err(Absent::NotOnThisKernel)
    }
    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>> {
        let pages = ranges.iter().flat_map(|range| self.pages.range(range.start / PAGE_BYTES..range.end / PAGE_BYTES));
        Ok(pages.map(|(number, _)| PageRun { address: number * PAGE_BYTES, pages: 1, huge: false }).collect())
    }
    fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>> {
        let is_repeated_read = !self.requested_ranges.lock().unwrap().is_empty();
        self.answer_or_vanish(range, || {
            let page = |number| match self
                .frames_after_migration
                .get(&number)
                .filter(|_| is_repeated_read)
                .or(self.pages.get(&number))
            {
                Some(None) if is_repeated_read => PagemapEntry::default(),
                Some(&frame) => {
                    let file = frame.is_some_and(|frame| self.file_frames.contains(&frame.0));
                    PagemapEntry { present: true, frame, file, ..PagemapEntry::default() }
                }
                None => PagemapEntry::default(),
            };
            (range.start / PAGE_BYTES..range.end / PAGE_BYTES).map(page).collect()
        })
    }
    fn contents(&self, _: ReadMethod, _: &[PageRun], _: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        Err(Absent::NotOnThisKernel)
    }
}

fn region_of_pages(first: u64, end: u64) -> Region {
    Region::empty(AddressRange { start: first * PAGE_BYTES, end: end * PAGE_BYTES })
}

fn shares(entries: &[(u64, u64)]) -> MappingShares {
    let mut shares = MappingShares::default();
    for &(mappings, pages) in entries {
        shares.add(NonZeroU64::new(mappings).unwrap(), pages);
    }
    shares
}

fn add_to_ledger(ledger: &mut FrameLedger<'_>, process: &FakeMapper) -> MappedPages {
    ledger.add_process(process, &process.regions()).unwrap()
}

#[test]
fn frames_of_several_processes_are_counted_once() {
    let host = FakeFrameHost::default();
    (0..10).for_each(|pfn| host.set_frame(pfn, 1, KPF_ANON));
    (10..14).for_each(|pfn| host.set_frame(pfn, 2, KPF_ANON));
    (20..26).for_each(|pfn| host.set_frame(pfn, 3, 0));
    let mut ledger = FrameLedger::new(&host);
    let a = add_to_ledger(&mut ledger, &FakeMapper::new(1, (0..10).chain(10..14).chain(20..26)));
    let b = add_to_ledger(&mut ledger, &FakeMapper::new(2, (10..14).chain(20..26)));
    let c = add_to_ledger(&mut ledger, &FakeMapper::new(3, 20..26));
    assert_eq!(a.shares, shares(&[(1, 10), (2, 4), (3, 6)]));
    assert_eq!(b.shares, shares(&[(2, 4), (3, 6)]));
    assert_eq!(c.shares, shares(&[(3, 6)]));
    let frames = ledger.finish();
    assert_eq!(frames, Frames { distinct: Pages(20), anonymous: Pages(14), ..Frames::default() });
}

#[test]
fn unseen_mappers_of_ksm_frames_are_counted() {
    let host = FakeFrameHost::default();
    host.set_frame(1, 4, KPF_KSM_ANON);
    host.set_frame(2, 256, KPF_KSM_ANON);
    host.set_frame(3, 512, KPF_KSM_ANON);
    let mut ledger = FrameLedger::new(&host);
    // The process maps frame 1 twice, and the other frames 200 times each.
    let pages = [1, 1].into_iter().chain([2; 200]).chain([3; 200]);
    let mapped = add_to_ledger(&mut ledger, &FakeMapper::new(1, pages));
    assert_eq!(mapped.ksm, shares(&[(4, 2), (256, 200), (512, 200)]));
    assert_eq!(mapped.shares, mapped.ksm);
    let frames = ledger.finish();
    assert_eq!((frames.distinct, frames.ksm, frames.anonymous), (Pages(3), Pages(3), Pages(3)));
    assert_eq!(frames.ksm_mappings, Pages(4 + 256 + 512));
    assert_eq!(frames.unseen, shares(&[(4, 2), (256, 56), (512, 312)]));
    let mut all = mapped.shares;
    all += &frames.unseen;
    assert_eq!(all.frames(), Some(Pages(3)));
}

#[test]
fn zero_pages_are_not_counted_as_memory() {
    let host = FakeFrameHost::default();
    host.set_frame(1, 1, KPF_ANON);
    host.set_frame(5, 0, KPF_ZERO_PAGE);
    (512..520).for_each(|pfn| host.set_frame(pfn, 0, KPF_ZERO_PAGE_THP));
    let mut ledger = FrameLedger::new(&host);
    let mapped = add_to_ledger(&mut ledger, &FakeMapper::new(1, [5, 1, 5, 5].into_iter().chain(512..520)));
    let counted =
        MappedPages { shares: shares(&[(1, 1)]), zero: Pages(3), huge_zero: Pages(8), ..MappedPages::default() };
    assert_eq!(mapped, counted);
    let frames = ledger.finish();
    assert_eq!((frames.distinct, frames.zero, frames.huge_zero), (Pages(1), Pages(3), Pages(8)));
}

#[test]
fn engine_store_pages_are_counted_separately() {
    let host = FakeFrameHost::default();
    (1..=4).for_each(|pfn| host.set_frame(pfn, 2, KPF_SWAPBACKED));
    host.set_frame(9, 1, KPF_ANON);
    let process = FakeMapper { file_frames: 1..5, ..FakeMapper::new(1, [1, 2, 9, 2, 3, 4]) };
    let mut ledger = FrameLedger::new(&host);
    let part = |name: &str, first: u64, end: u64| Region {
        name: name.to_owned(),
        rss: Bytes((end - first) * PAGE_BYTES),
        ..region_of_pages(first, end)
    };
    // Frame 9 was written since it was merged, frame 3 is of the store in another region, frame 4 of another memfd.
    let store = "/memfd:pagefold-store (deleted)";
    let regions = [part(store, 16, 20), part(store, 20, 21), part("/memfd:other (deleted)", 21, 22)];
    let mapped = ledger.add_process(&process, &regions).unwrap();
    assert_eq!(mapped.engine, shares(&[(2, 4)]));
    assert_eq!(mapped.shares, shares(&[(1, 1), (2, 5)]));
}

#[test]
fn hugetlb_is_counted_apart_from_anonymous_memory() {
    let host = FakeFrameHost::default();
    (0..512).for_each(|pfn| host.set_frame(pfn, 2, KPF_HUGE_ANON));
    let process = FakeMapper::new(1, 0..512);
    let mut regions = process.regions();
    (regions[0].hugetlb, regions[0].rss) = (regions[0].rss, Bytes::ZERO);
    let mut ledger = FrameLedger::new(&host);
    let mapped = ledger.add_process(&process, &regions).unwrap();
    assert_eq!((mapped.hugetlb, mapped.shares), (Pages(512), shares(&[(2, 512)])));
    let frames = ledger.finish();
    assert_eq!((frames.hugetlb, frames.anonymous), (Pages(512), Pages(0)));
}

#[test]
fn vanished_process_is_reported_as_unread() {
    let host = FakeFrameHost::default();
    (0..=BATCH_PAGES).for_each(|pfn| host.set_frame(pfn, 1, KPF_ANON));
    let vanishing = FakeMapper { reads_before_exit: 1, ..FakeMapper::new(7, 0..=BATCH_PAGES) };
    let mut ledger = FrameLedger::new(&host);
    assert_eq!(ledger.add_process(&vanishing, &vanishing.regions()), Err(Absent::Vanished));
    let frames = ledger.finish();
    assert_eq!(frames.unread, [(vanishing.id, Absent::Vanished)]);
    assert_eq!(frames.partially_read, shares(&[(1, BATCH_PAGES)]));
    assert_eq!(frames.distinct, Pages(BATCH_PAGES));
}

#[test]
fn hidden_frame_numbers_are_denied() {
    let host = FakeFrameHost::default();
    host.set_frame(1, 1, KPF_ANON);
    let mut process = FakeMapper::new(1, [1, 1]);
    process.pages.insert(17, None);
    let mut ledger = FrameLedger::new(&host);
    assert_eq!(ledger.add_process(&process, &process.regions()), Err(Absent::Denied));
    assert_eq!(ledger.finish(), Frames { unread: vec![(process.id, Absent::Denied)], ..Frames::default() });
}

#[test]
fn changes_between_reads_are_reported() {
    let host = FakeFrameHost::default();
    host.set_frame(1, 2, KPF_ANON);
    host.set_frame(2, 1, KPF_ANON);
    host.set_frame(3, 0, 0);
    let mut ledger = FrameLedger::new(&host);
    let first = add_to_ledger(&mut ledger, &FakeMapper::new(1, [1, 2, 3]));
    assert_eq!(first.gone, Pages(1), "frame 3 has no mapping left");
    host.set_frame(1, 3, KPF_ANON);
    let second = add_to_ledger(&mut ledger, &FakeMapper::new(2, [1, 2]));
    assert_eq!(second.shares, shares(&[(3, 1), (1, 1)]));
    let frames = ledger.finish();
    assert_eq!(frames.distinct, Pages(2));
    assert_eq!(frames.changed_mappings, Pages(1));
    assert_eq!(frames.unseen, shares(&[(3, 1)]), "the latest count of frame 1 has one unread mapper");
    assert_eq!(frames.excess, shares(&[(1, 1)]), "frame 2 has one mapping but two processes map it");
}

#[test]
fn migrated_pages_are_found_again() {
    let host = FakeFrameHost::default();
    // All pages of the process but the first have left their frames meanwhile.
    host.set_frame(1, 2, KPF_SWAPBACKED);
    (2..5).for_each(|pfn| host.set_frame(pfn, 0, 0));
    host.set_frame(6, 2, KPF_SWAPBACKED);
    let mut process = FakeMapper { file_frames: 1..7, ..FakeMapper::new(1, [1, 2, 3, 4]) };
    process.frames_after_migration = BTreeMap::from([(17, Some(Pfn(6))), (18, None)]);
    let stores = [Region { name: "/memfd:pagefold-store (deleted)".to_owned(), ..process.regions().remove(0) }];
    let mut ledger = FrameLedger::new(&host);
    let mapped = ledger.add_process(&process, &stores).unwrap();
    assert_eq!((mapped.shares, mapped.engine), (shares(&[(2, 2)]), shares(&[(2, 2)])), "one page was found in frame 6");
    assert_eq!(mapped.gone, Pages(2), "one page is unmapped, and one was not found within the limit");
    assert_eq!(ledger.finish().distinct, Pages(2));
}

#[test]
fn empty_ranges_are_not_read() {
    let host = FakeFrameHost::default();
    (0..4).for_each(|pfn| host.set_frame(pfn, 1, KPF_ANON));
    let tib = (1 << 40) / PAGE_BYTES;
    let mut process = FakeMapper::new(1, []);
    // Two adjacent pages, one in the same window, one 10 TiB further.
    for (pfn, number) in [tib, tib + 1, tib + 1000, 11 * tib].into_iter().enumerate() {
        process.pages.insert(number, Some(Pfn(pfn as u64)));
    }
    let mut device = Region { rss: Bytes(PAGE_BYTES), ..region_of_pages(0, 8) };
    device.flags = VmFlags::PFN_MAP;
    let regions = [
        region_of_pages(30 * tib, 50 * tib),
        device,
        Region { rss: Bytes(4 * PAGE_BYTES), ..region_of_pages(tib, 21 * tib) },
    ];
    let mut ledger = FrameLedger::new(&host);
    assert_eq!(ledger.add_process(&process, &regions).unwrap().shares, shares(&[(1, 4)]));
    let requested_ranges = process.requested_ranges.lock().unwrap();
    let pages: Vec<_> =
        requested_ranges.iter().map(|range| (range.start / PAGE_BYTES, range.end / PAGE_BYTES)).collect();
    assert_eq!(pages, [(tib, tib + 1001), (11 * tib, 11 * tib + 1)]);
}

#[test]
fn dense_regions_are_read_in_batches() {
    let host = FakeFrameHost::default();
    (0..BATCH_PAGES + 3).for_each(|pfn| host.set_frame(pfn, 1, KPF_ANON));
    let process = FakeMapper::new(1, 0..BATCH_PAGES + 3);
    assert_eq!(add_to_ledger(&mut FrameLedger::new(&host), &process).shares, shares(&[(1, BATCH_PAGES + 3)]));
    let requested_ranges = process.requested_ranges.lock().unwrap();
    let pages: Vec<_> = requested_ranges.iter().map(|range| range.bytes().0 / PAGE_BYTES).collect();
    assert_eq!(pages, [BATCH_PAGES, 3]);
}

#[test]
fn frame_counts_of_any_size_are_kept() {
    let mut table = FrameTable::default();
    let pfn = Pfn(3 * FRAMES_PER_BLOCK - 1);
    let mut expected = (0, 0);
    for (mappings, seen) in [(1, 1), (254, 254), (255, 3), (254, 2), (70_000, 69_999), (u64::MAX, 300), (1, 0)] {
        table.update(pfn, |before| {
            assert_eq!((before.kernel_mappings, before.seen_mappings), expected);
            FrameCount { kernel_mappings: mappings, seen_mappings: seen }
        });
        expected = (mappings, seen);
        let counts: Vec<_> =
            table.counts().filter(|count| count.kernel_mappings > 0).map(|count| count.seen_mappings).collect();
        assert_eq!(counts, [seen], "each frame has exactly one count");
    }
}

proptest! {
    // Without optimization, each case walks two blocks of counts three times.
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For any processes and frames: if all processes are read, their shares equal the frames. If one is left out, its
    /// part equals the unseen part. The order of the processes does not matter.
    #[test]
    fn shares_add_up_to_distinct_frames(
        owners in proptest::collection::vec(
            (FRAMES_PER_BLOCK - 20..FRAMES_PER_BLOCK + 20, proptest::collection::vec(0..5usize, 1..400), any::<bool>()),
            1..30,
        ),
    ) {
        let frames: BTreeMap<_, _> = owners.iter().map(|(pfn, owners, ksm)| (*pfn, (owners, *ksm))).collect();
        let host = FakeFrameHost::default();
        let mut maps = vec![vec![]; 5];
        for (&pfn, &(owners, ksm)) in &frames {
            host.set_frame(pfn, owners.len() as u64, if ksm { KPF_KSM_ANON } else { KPF_ANON });
            owners.iter().for_each(|&owner| maps[owner].push(pfn));
        }
        let processes: Vec<_> = (1..).zip(maps).map(|(pid, map)| FakeMapper::new(pid, map)).collect();

        let run = |order: &mut dyn Iterator<Item = &FakeMapper>| {
            let mut ledger = FrameLedger::new(&host);
            let mut total = MappingShares::default();
            order.for_each(|process| total += &add_to_ledger(&mut ledger, process).shares);
            (total, ledger.finish())
        };
        let (total, all_frames) = run(&mut processes.iter());
        prop_assert_eq!(all_frames.distinct, Pages(frames.len() as u64));
        prop_assert_eq!(total.frames(), Some(all_frames.distinct));
        prop_assert_eq!((&all_frames.unseen, &all_frames.excess, all_frames.changed_mappings), (&MappingShares::default(), &MappingShares::default(), Pages(0)));
        prop_assert_eq!(run(&mut processes.iter().rev()), (total, all_frames));

        let (mut part, without_one) = run(&mut processes.iter().skip(1));
        part += &without_one.unseen;
        prop_assert_eq!(part.frames(), Some(without_one.distinct));
    }
}
