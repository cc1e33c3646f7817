use super::*;
use pagefold_base::identity::{Identity, Job, Monitor, Vm};
use pagefold_base::units::Pid;
use proptest::prelude::*;

const PAGE: u64 = 4096;

fn page() -> PageSize {
    PageSize::new(PAGE).unwrap()
}

fn shares(entries: &[(u64, u64)]) -> MappingShares {
    let mut shares = MappingShares::default();
    for &(mappings, pages) in entries {
        shares.add(NonZeroU64::new(mappings).unwrap(), pages);
    }
    shares
}

fn process_ksm(rmap_items: u64, merging: u64, zero: i64) -> ProcessKsm {
    ProcessKsm {
        rmap_items: Ok(rmap_items),
        merging_pages: Ok(merging),
        zero_pages: Ok(zero),
        profit: Ok((merging as i64 + zero) * PAGE as i64 - rmap_items as i64 * 64),
        merge_any: Ok(false),
        mergeable: Ok(true),
    }
}

/// A process with 100 private pages, `ksm` pages on frames with four mappings, and 10 zero pages from KSM.
fn footprint(ksm: u64) -> Footprint {
    let mapped =
        MappedPages { shares: shares(&[(1, 100), (4, ksm)]), ksm: shares(&[(4, ksm)]), ..MappedPages::default() };
    Footprint::exact(page(), mapped, Ok(Bytes(1)), Ok(Bytes::ZERO), &process_ksm(1000, ksm, 10))
}

fn process(pid: u32, identity: Identity) -> Process {
    Process {
        id: ProcessId { pid: Pid(pid), start_time: 1 },
        comm: format!("p{pid}"),
        state: 'S',
        kernel_thread: false,
        uid: Ok(pid % 2),
        setuid: false,
        arguments: Ok(vec![]),
        cgroup: if pid == 4 { Err(Absent::Denied) } else { Ok("/a".to_owned()) },
        identity,
        ksm: ProcessKsm::absent(&Absent::Denied),
        seccomp: Ok(0),
        pinned: Ok(Bytes::ZERO),
    }
}

#[test]
fn thirds_add_up() {
    let third = shares(&[(3, 1)]);
    assert_eq!(third.bytes(page()), Bytes(1365), "1365.33 to the nearest byte");
    assert_eq!(third.frames(), None);
    let mut all = shares(&[(2, 2), (6, 6)]);
    (0..3).for_each(|_| all += &third);
    assert_eq!(all.frames(), Some(Pages(3)));
    assert_eq!(all.bytes(page()), Bytes(3 * PAGE));
    assert_eq!(shares(&[(2, 1), (3, 1), (6, 1)]).bytes(page()), Bytes(PAGE), "rounding absorbs what truncation loses");
}

#[test]
fn shares_are_subtracted_only_where_present() {
    let all = shares(&[(1, 5), (2, 4)]);
    assert_eq!(all.without(&shares(&[(1, 5), (2, 1)])), Some(shares(&[(2, 3)])));
    assert_eq!(all.without(&shares(&[(3, 1)])), None);
    assert_eq!(all.without(&shares(&[(2, 5)])), None);
}

#[test]
fn footprint_counts_its_share_of_ksm_frames() {
    let footprint = footprint(40);
    assert_eq!(footprint.rss, Bytes(140 * PAGE));
    assert_eq!(footprint.private, Bytes(100 * PAGE));
    assert_eq!(footprint.ksm, Pages(40));
    assert_eq!(footprint.fair.bytes(page()), Bytes(110 * PAGE));
    assert_eq!(footprint.saved(page()), Ok(Bytes(40 * PAGE)), "three quarters of 40 pages, and 10 zero pages");
    assert_eq!(footprint.unmerged(page()), Ok(Bytes(150 * PAGE)));
    assert_eq!(footprint.profit(page()), Ok(NetBytes(40 * 4096 - 64_000)));
    assert_eq!(footprint.kernel_profit, Ok(NetBytes(50 * 4096 - 64_000)));
}

#[test]
fn zeros_in_split_huge_pages_are_saved_and_not_counted_by_ksm() {
    let with_split_zeros = |pages| Footprint { zeros_by_splitting: pages, ..footprint(6) };
    let (some, none) = (with_split_zeros(Ok(Pages(5))), with_split_zeros(Ok(Pages::ZERO)));
    let five_pages = page().bytes_of(Pages(5));
    assert_eq!(some.saved(page()).unwrap(), none.saved(page()).unwrap() + five_pages);
    assert_eq!(some.profit(page()).unwrap().0, none.profit(page()).unwrap().0 + five_pages.0.cast_signed());
    assert_eq!(some.unmerged(page()).unwrap(), none.unmerged(page()).unwrap() + five_pages);
    assert_eq!(some.profit_counted_by_ksm(page()), none.profit(page()), "compared with the kernel's profit");
    assert_eq!(
        with_split_zeros(Err(Absent::Denied)).saved(page()),
        none.saved(page()),
        "the known part is still reported"
    );
    let mut sum = some.clone();
    sum += &some;
    assert_eq!(sum.zeros_by_splitting, Ok(Pages(10)));
    sum += &with_split_zeros(Err(Absent::Denied));
    assert_eq!(sum.zeros_by_splitting, Err(Absent::Denied), "a sum with a missing part is absent");
}

#[test]
fn hugetlb_is_in_the_share_and_not_in_rss() {
    let mapped = MappedPages { shares: shares(&[(1, 512), (2, 512)]), hugetlb: Pages(512), ..MappedPages::default() };
    let footprint = Footprint::exact(page(), mapped, Ok(Bytes(0)), Ok(Bytes(0)), &process_ksm(0, 0, 0));
    assert_eq!(footprint.rss, Bytes(512 * PAGE));
    assert_eq!(footprint.hugetlb, Ok(Bytes(512 * PAGE)));
    assert_eq!(footprint.fair.bytes(page()), Bytes(768 * PAGE));
}

fn rollup() -> SmapsRollup {
    SmapsRollup {
        rss: Ok(Bytes(200 * PAGE)),
        pss: Ok(Bytes(120 * PAGE)),
        private_clean: Ok(Bytes(10 * PAGE)),
        private_dirty: Ok(Bytes(70 * PAGE)),
        anonymous: Ok(Bytes(150 * PAGE)),
        anon_huge: Ok(Bytes(0)),
        ksm: Ok(Bytes(50 * PAGE)),
        swap: Ok(Bytes(3 * PAGE)),
    }
}

fn host(shared: u64, sharing: u64) -> Ksm {
    let absent = || Err(Absent::NotOnThisKernel);
    Ksm {
        run: absent(),
        pages_to_scan: absent(),
        sleep_millisecs: absent(),
        pages_shared: Ok(shared),
        pages_sharing: Ok(sharing),
        pages_unshared: absent(),
        pages_volatile: absent(),
        pages_scanned: absent(),
        pages_skipped: absent(),
        full_scans: absent(),
        max_page_sharing: absent(),
        merge_across_nodes: absent(),
        use_zero_pages: absent(),
        ksm_zero_pages: Err(Absent::NotOnThisKernel),
        general_profit: Err(Absent::NotOnThisKernel),
        stable_node_chains: absent(),
        stable_node_dups: absent(),
        smart_scan: absent(),
        advisor_mode: Err(Absent::NotOnThisKernel),
        advisor_target_scan_time: absent(),
    }
}

#[test]
fn estimate_reports_its_basis() {
    let estimate = |rollup: &SmapsRollup, ksm: &ProcessKsm, host: &Ksm| {
        Footprint::estimated(page(), rollup, ksm, host, Absent::Denied)
    };
    let footprint = estimate(&rollup(), &process_ksm(100, 45, 10), &host(10, 30)).unwrap();
    assert_eq!(footprint.basis.to_string(), "estimated (frames: permission denied)");
    assert_eq!(footprint.ksm, Pages(50), "KSM: does not include zero pages");
    assert_eq!(footprint.private, Bytes(80 * PAGE));
    assert_eq!(footprint.hugetlb, Err(Absent::Denied));
    assert_eq!(footprint.fair.bytes(page()), Bytes(120 * PAGE));
    assert_eq!(footprint.saved(page()), Ok(Bytes(95 * PAGE / 2)), "50 pages less a quarter of them, and 10 zero pages");

    let before_6_6 = SmapsRollup { ksm: Err(Absent::NotOnThisKernel), ..rollup() };
    assert_eq!(estimate(&before_6_6, &process_ksm(100, 45, 0), &host(1, 1)).unwrap().ksm, Pages(45));
    let fresh = estimate(&rollup(), &process_ksm(100, 0, 10), &host(0, 0)).unwrap();
    assert_eq!(fresh.saved(page()), Ok(Bytes(35 * PAGE)), "at least two pages share a frame");
    let unreadable = SmapsRollup { pss: Err(Absent::Vanished), ..rollup() };
    assert_eq!(estimate(&unreadable, &process_ksm(0, 0, 0), &host(1, 1)), Err(Absent::Vanished));
}

#[test]
fn sum_with_absent_reading_is_absent() {
    let mut sum = footprint(4);
    let unknown = Footprint { rmap_items: Err(Absent::NotOnThisKernel), ..footprint(4) };
    sum += &unknown;
    assert_eq!(sum.profit(page()), Err(Absent::NotOnThisKernel));
    assert_eq!(sum.saved(page()), Ok(Bytes(26 * PAGE)), "figures known for both are still summed");
    sum += &Footprint { basis: Basis::Estimated(Absent::Denied), ..footprint(4) };
    assert_eq!(sum.basis, Basis::Estimated(Absent::Denied));
}

#[test]
fn groups_hold_every_process_once() {
    let vm = Vm {
        monitor: Monitor::Qemu,
        name: Some("web".to_owned()),
        uuid: None,
        memory_bytes: None,
        backends: vec![],
        mem_merge: true,
        vfio: false,
        control_socket: None,
    };
    let job = |name: &str| Identity { job: Some(Job { name: name.to_owned(), rank: Some(0) }), ..Identity::default() };
    let accounts: Vec<_> = [
        Identity { vm: Some(vm), ..Identity::default() },
        job("slurm:7.0"),
        job("slurm:7.1"),
        job("mpi:7.1"),
        Identity::default(),
    ]
    .into_iter()
    .zip(1..)
    .map(|(identity, pid)| Account { process: process(pid, identity), footprint: footprint(u64::from(pid)) })
    .collect();

    let check = |by, expected: &[(GroupKey, u64)]| {
        let groups = group_footprints(&accounts, by);
        let got: Vec<_> = groups.iter().map(|group| (group.key.clone(), group.processes)).collect();
        assert_eq!(got, expected);
        assert_eq!(groups.iter().map(|group| group.footprint.ksm).sum::<Pages>(), Pages(15));
    };
    let id = |pid| ProcessId { pid: Pid(pid), start_time: 1 };
    let named = |name: &str| GroupKey::Job(name.to_owned());
    check(GroupBy::Process, &(1..=5).map(|pid| (GroupKey::Process(id(pid), format!("p{pid}")), 1)).collect::<Vec<_>>());
    check(GroupBy::Vm, &[(GroupKey::Vm(id(1), Some("web".to_owned())), 1), (GroupKey::Ungrouped, 4)]);
    check(GroupBy::Cgroup, &[(GroupKey::Cgroup("/a".to_owned()), 4), (GroupKey::Unread(Absent::Denied), 1)]);
    check(GroupBy::User, &[(GroupKey::User(0), 2), (GroupKey::User(1), 3)]);
    check(GroupBy::Job, &[(named("mpi:7.1"), 1), (named("slurm:7"), 2), (GroupKey::Ungrouped, 2)]);
    check(
        GroupBy::Step,
        &[(named("mpi:7.1"), 1), (named("slurm:7.0"), 1), (named("slurm:7.1"), 1), (GroupKey::Ungrouped, 2)],
    );
}

proptest! {
    /// However the mappings of frames are distributed over processes, the shares of all add up to the frames.
    #[test]
    fn shares_of_all_mappers_are_the_frames(
        frames in proptest::collection::vec(proptest::collection::vec(0..6usize, 1..300), 0..40),
    ) {
        let mut processes = vec![MappingShares::default(); 6];
        for owners in &frames {
            let mappings = NonZeroU64::new(owners.len() as u64).unwrap();
            owners.iter().for_each(|&owner| processes[owner].add(mappings, 1));
        }
        let mut all = MappingShares::default();
        processes.iter().for_each(|process| all += process);
        prop_assert_eq!(all.frames(), Some(Pages(frames.len() as u64)));
        prop_assert_eq!(all.bytes(page()), Bytes(frames.len() as u64 * PAGE));
        // Rounding costs at most half a byte for each process.
        let rounded: u64 = processes.iter().map(|process| process.bytes(page()).0).sum();
        prop_assert!(rounded.abs_diff(frames.len() as u64 * PAGE) <= 3);
    }
}
