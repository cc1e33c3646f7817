//! Repeated censuses read few pages of known processes, and still find the same as a full census.

use super::*;

/// Repeated censuses of some processes under one key.
struct CensusSeries {
    ages: StableAges,
    started: Instant,
    options: CensusOptions,
    stop: AtomicBool,
}

/// The result of a census.
#[derive(Debug, PartialEq, Default)]
struct CensusResult {
    covered: BTreeSet<(u32, usize)>,
    /// Pages that were read.
    pages_read: u64,
    /// Pages of the first process that were taken from the cache.
    reused_pages: u64,
    /// Pages that count as volatile.
    volatile_pages: u64,
}

impl CensusSeries {
    fn new() -> Self {
        let began = Instant::now();
        let ages = StableAges::new(PageSize::new(PAGE_BYTES).unwrap(), began).unwrap();
        let options = CensusOptions { second_pass: SecondPass::Candidates, ..census_options(false, CHEAP_COSTS) };
        Self { ages, started: began, options, stop: AtomicBool::new(false) }
    }

    fn scan_all(&mut self, host: &SyntheticHost, elapsed: Duration) -> CensusResult {
        self.scan_pids(host, elapsed, &[])
    }

    /// Scan all processes, or only some.
    fn scan_pids(&mut self, host: &SyntheticHost, elapsed: Duration, pids: &[u32]) -> CensusResult {
        let before = host.pages_read.load(Ordering::Relaxed);
        let (remembered, hasher) = self.ages.cache_and_hasher();
        let progress = ScanProgress::default();
        let selection =
            ProcessSelection { pids: pids.iter().map(|&pid| Pid(pid)).collect(), ..ProcessSelection::default() };
        let options = CensusOptions { selection, ..self.options.clone() };
        let (census, index) = take_incremental_census(
            (remembered, self.started + elapsed),
            hasher,
            host,
            &options,
            &progress,
            &self.stop,
        )
        .unwrap();
        let all_are_read = (0..index.page_count() as u32).all(|page| index.mark(page).was_read());
        let is_whole = !host.refuses_reads.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed);
        assert!(all_are_read || !is_whole, "each page is classified");
        CensusResult {
            covered: covered_pages(&census),
            pages_read: host.pages_read.load(Ordering::Relaxed) - before,
            reused_pages: remembered.reused_pages(ProcessId { pid: Pid(1), start_time: 1 }).0,
            volatile_pages: census.counts.volatile.0,
        }
    }
}

/// Pages of a process: four blocks of 64 pages, each page with a unique content.
const PROCESS_PAGES: u64 = 256;

fn unique_pages(first_content: u64) -> Vec<SyntheticPage> {
    (first_content..first_content + PROCESS_PAGES).map(Stable).collect()
}

fn host_with_activity(processes: &[SyntheticProcess]) -> SyntheticHost {
    let ran = (1..=processes.len() as u32).map(|pid| (pid, (1, 0))).collect();
    SyntheticHost { activity: ran, ..SyntheticHost::new(processes) }
}

/// Time after which a process's memory may have been written from outside.
const CACHE_LIFETIME: Duration = Duration::from_secs(3600);

#[test]
fn inactive_process_is_cached_active_partly_read() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut looks = CensusSeries::new();
    let mut look = |host: &SyntheticHost, after: u64| looks.scan_all(host, Duration::from_secs(after));
    assert_eq!(look(&host, 0), CensusResult { pages_read: PROCESS_PAGES, ..CensusResult::default() });
    assert_eq!(look(&host, 1), CensusResult { reused_pages: PROCESS_PAGES, ..CensusResult::default() });
    assert!(look(&host, CACHE_LIFETIME.as_secs()).pages_read > 0, "other processes may have written to it");
    // It runs all the time, and writes nothing.
    let mut read = Vec::new();
    for second in 1..=32 {
        host.activity.insert(1, (second + 1, 0));
        let found = look(&host, CACHE_LIFETIME.as_secs() + second);
        assert_eq!((found.pages_read + found.reused_pages, found.volatile_pages), (PROCESS_PAGES, 0));
        read.push(found.pages_read);
    }
    assert!(read.iter().sum::<u64>() <= PROCESS_PAGES * 32 / 6, "{read:?}");
    // Each census reads four pages of each block.
    assert!(
        read[16..].iter().sum::<u64>() >= 4 * (64 + 15 * 4),
        "each piece is read whole in one look of 16: {read:?}"
    );
    // If the kernel does not count, the process may have run.
    host.activity.insert(1, (0, 0));
    assert!(look(&host, CACHE_LIFETIME.as_secs() + 40).pages_read > 0);
}

#[test]
fn new_process_matches_cached_fingerprints() {
    let mut looks = CensusSeries::new();
    let first = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    looks.scan_all(&first, Duration::ZERO);
    looks.scan_all(&first, Duration::from_secs(1));
    let both = host_with_activity(&[
        process_with_pages(1, &unique_pages(1000)),
        process_with_pages(1, &[Stable(1007), Stable(1100), Stable(1200), Stable(5)]),
    ]);
    let found = looks.scan_all(&both, Duration::from_secs(2));
    assert_eq!(found.covered, BTreeSet::from([(1, 7), (1, 100), (1, 200), (2, 0), (2, 1), (2, 2)]));
    assert_eq!((found.pages_read, found.reused_pages), (4 + 3 * 64, 64), "an idle block with a partner is read");
    // Its content differs from the cache, so its pages are read before they count.
    let mut pages = unique_pages(1000);
    (pages[7], pages[100]) = (Stable(6), Stable(8));
    let changed = host_with_activity(&[process_with_pages(1, &pages), both.processes[1].clone()]);
    assert_eq!(looks.scan_all(&changed, Duration::from_secs(3)).covered, BTreeSet::from([(1, 200), (2, 2)]));
}

#[test]
fn unread_pages_are_not_enrolled_with_read_ones() {
    let mut looks = CensusSeries::new();
    // A range costs more than all pages between two covered ones.
    looks.options.costs = Some(EnrollCostBytes { per_range: 1500, per_scanned_page: 1, ..CHEAP_COSTS });
    let host = host_with_activity(&[
        process_with_pages(1, &unique_pages(1000)),
        process_with_pages(1, &[Stable(1063), Stable(1128)]),
    ]);
    let fresh = covered_pages(&take_synthetic_census(&host.processes, &looks.options).0);
    assert_eq!(fresh, (63..=128).map(|page| (1, page)).chain([(2, 0), (2, 1)]).collect());
    looks.scan_pids(&host, Duration::ZERO, &[1]);
    let found = looks.scan_all(&host, Duration::from_secs(1));
    assert_eq!((found.covered, found.reused_pages), (BTreeSet::from([(1, 63), (1, 128), (2, 0), (2, 1)]), 2 * 64));
}

#[test]
fn enrolled_and_foreign_processes_are_always_read() {
    let enrolled =
        |uid: u32, from: u64| SyntheticProcess { enrolled: true, ..process_with_pages(uid, &unique_pages(from)) };
    let looked = |processes: &[SyntheticProcess], enrolled: &[u32]| {
        let host = host_with_activity(processes);
        let mut looks = CensusSeries::new();
        for second in [0, 1] {
            looks.scan_pids(&host, Duration::from_secs(second), &[]);
        }
        looks.options.enrolled_processes =
            enrolled.iter().map(|&pid| ProcessId { pid: Pid(pid), start_time: 1 }).collect();
        let chosen: Vec<u32> = (1..=processes.len() as u32).filter(|pid| !enrolled.contains(pid)).collect();
        let found = looks.scan_pids(&host, Duration::from_secs(2), &chosen);
        (found.reused_pages, found.pages_read)
    };
    assert_eq!(
        looked(&[process_with_pages(1, &unique_pages(1000)), process_with_pages(2, &unique_pages(2000))], &[]),
        (PROCESS_PAGES, 0)
    );
    assert_eq!(looked(&[enrolled(1, 1000), process_with_pages(2, &unique_pages(2000))], &[]), (0, PROCESS_PAGES));
    assert_eq!(
        looked(&[process_with_pages(1, &unique_pages(1000)), enrolled(2, 2000)], &[2]),
        (PROCESS_PAGES, PROCESS_PAGES)
    );
    assert_eq!(
        looked(&[process_with_pages(1, &[&unique_pages(1000)[..], &[Merged(7)]].concat())], &[]),
        (0, PROCESS_PAGES + 1)
    );
}

/// A content that another domain has enrolled, in a page between two pages that justify one range across the gap.
#[test]
fn unverified_pages_are_not_enrolled_with_neighbors() {
    let of = |changed: SyntheticPage| {
        let mut pages = unique_pages(1000);
        (pages[10], pages[14], pages[12]) = (Stable(7), Stable(7), changed);
        process_with_pages(1, &pages)
    };
    let between = Some(EnrollCostBytes { per_range: 1500, per_scanned_page: 1, ..CHEAP_COSTS });
    let witness = || SyntheticProcess { enrolled: true, ..process_with_pages(2, &[Stable(9)]) };
    let witnesses = vec![ProcessId { pid: Pid(2), start_time: 1 }];
    // The process is inactive by its own counters, but a device wrote to it. Then its partners are new.
    let mut looks = CensusSeries::new();
    looks.options.costs = between;
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000)), witness()]);
    looks.scan_pids(&host, Duration::ZERO, &[1]);
    host.processes[0] = of(Stable(9));
    // So that the foreign process is read.
    looks.options.enrolled_processes = witnesses.clone();
    let fresh = covered_pages(
        &take_census_on(
            SyntheticHost::new(&host.processes),
            &CensusOptions {
                selection: ProcessSelection { pids: vec![Pid(1)], ..ProcessSelection::default() },
                ..looks.options.clone()
            },
        )
        .0,
    );
    assert_eq!(fresh, BTreeSet::from([(1, 10), (1, 14)]), "the same without a cache");
    host.processes.push(process_with_pages(1, &[Stable(1010), Stable(7)]));
    host.activity.insert(3, (1, 0));
    let found = looks.scan_pids(&host, Duration::from_secs(1), &[1, 3]).covered;
    assert!(!found.contains(&(1, 12)), "{found:?}");
    // It changes each time until it has that content.
    let mut looks = CensusSeries::new();
    (looks.options.costs, looks.options.enrolled_processes) = (between, witnesses);
    for second in 0..40 {
        host.processes[0] = of(if second < 20 { Volatile } else { Stable(9) });
        host.activity.insert(1, (second + 2, 0));
        let found = looks.scan_pids(&host, Duration::from_secs(second), &[1]).covered;
        assert!(found.contains(&(1, 10)) && !found.contains(&(1, 12)) || second < 20, "{second}: {found:?}");
    }
}

#[test]
fn unreadable_pages_are_not_counted() {
    // The same, but no census has seen them side by side.
    let host =
        host_with_activity(&[process_with_pages(1, &unique_pages(1000)), process_with_pages(1, &unique_pages(1000))]);
    let mut looks = CensusSeries::new();
    for pid in [1, 2] {
        looks.scan_pids(&host, Duration::from_secs(pid.into()), &[pid]);
    }
    host.refuses_reads.store(true, Ordering::Relaxed);
    assert_eq!(looks.scan_all(&host, Duration::from_secs(3)).covered, BTreeSet::new());
    host.refuses_reads.store(false, Ordering::Relaxed);
    assert_eq!(looks.scan_all(&host, Duration::from_secs(4)).covered.len() as u64, 2 * PROCESS_PAGES);
}

#[test]
fn new_and_changed_pages_are_read() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut looks = CensusSeries::new();
    let mut look = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second + 1, 0));
        looks.scan_all(host, Duration::from_secs(second)).covered
    };
    for second in 0..6 {
        look(&mut host, second);
    }
    // All pages are rewritten, and new pages appear: one equal to one page of each block.
    let of_each = |from: u64| (0..4).map(move |piece| Stable(from + piece * 64));
    let written: Vec<SyntheticPage> = unique_pages(9000).into_iter().chain(of_each(9000)).collect();
    host.processes[0] = process_with_pages(1, &written);
    let shared = |at: usize| {
        (0..4).flat_map(move |i| [(1, i * 64 + at), (1, PROCESS_PAGES as usize + i)]).collect::<BTreeSet<_>>()
    };
    assert_eq!(look(&mut host, 10), shared(0));
    // Near recent writes, a single written page is found, too.
    let mut pages = written[..PROCESS_PAGES as usize].to_vec();
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Stable(20000 + piece as u64 * 64));
    host.processes[0] = process_with_pages(1, &pages.into_iter().chain(of_each(20000)).collect::<Vec<_>>());
    assert_eq!(look(&mut host, 11), shared(3));
}

#[test]
fn inactivity_does_not_raise_trust_once_active() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut looks = CensusSeries::new();
    for second in 0..8 {
        looks.scan_all(&host, Duration::from_secs(second));
    }
    let mut pages = unique_pages(1000);
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Stable(20000 + piece as u64));
    host.processes = vec![
        process_with_pages(1, &pages),
        process_with_pages(1, &(0..4).map(|piece| Stable(20000 + piece)).collect::<Vec<_>>()),
    ];
    host.activity = [(1, (2, 0)), (2, (1, 0))].into();
    let found = looks.scan_all(&host, Duration::from_secs(8)).covered;
    assert_eq!(found, (0..4).flat_map(|piece| [(1, piece * 64 + 3), (2, piece)]).collect());
}

#[test]
fn intermittent_inactivity_does_not_prevent_reads() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut looks = CensusSeries::new();
    let mut look = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second / 2 + 1, 0));
        looks.scan_all(host, Duration::from_secs(second)).covered
    };
    for second in 0..16 {
        look(&mut host, second);
    }
    let mut pages = unique_pages(1000);
    (0..4).for_each(|piece| pages[piece * 64 + 3] = Stable(20000));
    host.processes[0] = process_with_pages(1, &pages);
    let shared: BTreeSet<(u32, usize)> = (0..4).map(|piece| (1, piece * 64 + 3)).collect();
    let found: BTreeSet<(u32, usize)> = (16..16 + 32).flat_map(|second| look(&mut host, second)).collect();
    assert!(found.is_subset(&shared) && found.len() >= 2, "{found:?}");
    assert_eq!((0..32).map(|second| look(&mut host, 48 + second)).last(), Some(shared));
}

#[test]
fn volatile_pages_are_read_less_often_until_stable() {
    let partner = process_with_pages(1, &[Stable(7), Stable(8)]);
    let with = |first: &[SyntheticPage]| {
        let still = (first.len() as u64..PROCESS_PAGES).map(|i| Stable(1000 + i));
        process_with_pages(1, &first.iter().copied().chain(still).collect::<Vec<_>>())
    };
    let mut host = host_with_activity(&[with(&[Volatile; 32]), partner]);
    let mut looks = CensusSeries::new();
    let mut look = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second + 1, 0));
        looks.scan_all(host, Duration::from_secs(second))
    };
    let read: Vec<u64> = (0..40).map(|second| look(&mut host, second).pages_read).collect();
    assert_eq!(read[..2], [PROCESS_PAGES + 2; 2], "{read:?}");
    // They are read in one census of eight, with a sixteenth of the other blocks, four pages of each, and the partner.
    let late = read[24..].iter().sum::<u64>();
    assert!((32 * 2..32 * 2 + 16 * (16 + 16 + 2)).contains(&late), "{late}: {read:?}");
    let some = [&[Stable(7), Stable(8)][..], &[Volatile; 30]].concat();
    host.processes[0] = with(&some);
    let found: Vec<_> = (40..57).map(|second| look(&mut host, second).covered).collect();
    let shared = BTreeSet::from([(1, 0), (1, 1), (2, 0), (2, 1)]);
    assert!(found[8..].iter().all(|found| *found == shared), "{found:?}");
    // A page that is stable again does not count as volatile for ever, even if it is unique.
    host.processes[0] = with(&[Stable(7), Stable(8)]);
    let found: Vec<_> = (57..82).map(|second| look(&mut host, second).volatile_pages).collect();
    assert!(found[0] > 0 && found[17..].iter().all(|volatile| *volatile == 0), "{found:?}");
}

#[test]
fn sparse_blocks_are_not_cached() {
    let scattered: Vec<SyntheticPage> =
        (0..PROCESS_PAGES).map(|i| if i % 10 == 0 { Stable(1000 + i) } else { Hole }).collect();
    let host = host_with_activity(&[process_with_pages(1, &scattered)]);
    let mut looks = CensusSeries::new();
    let read = [0, 1].map(|second| looks.scan_all(&host, Duration::from_secs(second)).pages_read);
    assert_eq!(read, [26, 26]);
}

#[test]
fn stopped_or_partial_scan_does_not_corrupt_cache() {
    let mut looks = CensusSeries::new();
    // More than one read takes at once, with blocks in two portions.
    let pages: Vec<SyntheticPage> = [Hole].into_iter().chain((0..20000).map(|i| Stable(1000 + i))).collect();
    let mut host = host_with_activity(&[process_with_pages(1, &pages), process_with_pages(1, &[Stable(1063)])]);
    assert_eq!(looks.scan_pids(&host, Duration::ZERO, &[1]).pages_read, 20000);
    assert_eq!(looks.scan_pids(&host, Duration::from_secs(1), &[1]).reused_pages, 20000);
    looks.stop.store(true, Ordering::Relaxed);
    host.activity.insert(1, (2, 0));
    assert_eq!(looks.scan_all(&host, Duration::from_secs(2)).covered, BTreeSet::new());
    looks.stop.store(false, Ordering::Relaxed);
    assert_eq!(looks.scan_pids(&host, Duration::from_secs(3), &[2]).covered, BTreeSet::new());
    let found = looks.scan_all(&host, Duration::from_secs(4));
    assert_eq!(found.covered, BTreeSet::from([(1, 64), (2, 0)]));
    assert_eq!(found.pages_read + found.reused_pages, 20001);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever was written unseen: no content is enrolled that another domain has enrolled, or in two domains.
    #[test]
    fn cache_never_merges_across_domains(
        contents in prop::collection::vec(1u64..300, 300),
        changes in prop::collection::vec((0usize..300, 1u64..300), 100),
        range in prop::sample::select(vec![0, 400, 1500]),
        rests in any::<bool>(),
    ) {
        let mut contents = contents;
        let mut looks = CensusSeries::new();
        looks.options.costs = Some(EnrollCostBytes { per_range: range, per_scanned_page: 1, ..CHEAP_COSTS });
        looks.options.enrolled_processes = vec![ProcessId { pid: Pid(4), start_time: 1 }];
        for (step, changes) in changes.chunks(5).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            let of = |pages: std::ops::Range<usize>| contents[pages].iter().map(|&content| Stable(content)).collect::<Vec<_>>();
            let witness = SyntheticProcess { enrolled: true, ..process_with_pages(3, &of(270..300)) };
            let mut made_up = host_with_activity(&[process_with_pages(1, &of(0..90)), process_with_pages(1, &of(90..180)), process_with_pages(2, &of(180..270)), witness]);
            let ran = |pid: u32| if rests && pid < 4 { (1, 0) } else { (step as u64 + 1, 0) };
            made_up.activity = (1..=4).map(|pid| (pid, ran(pid))).collect();
            let found = looks.scan_pids(&made_up, Duration::from_secs(step as u64), &[1, 2, 3]).covered;
            let mut domains: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
            for (pid, page) in found.into_iter().chain((0..30).map(|page| (4, page))) {
                let content = contents[(pid as usize - 1) * 90 + page];
                domains.entry(content).or_default().insert(made_up.processes[pid as usize - 1].uid);
            }
            prop_assert!(domains.values().all(|domains| domains.len() == 1), "{step}: {domains:?}");
        }
    }

    /// Covered pages are shared, whatever the cache contains. Once each block was read whole, the result equals a
    /// census without a cache.
    #[test]
    fn cached_census_converges_to_uncached_census(
        contents in prop::collection::vec(1u64..400, 150),
        changes in prop::collection::vec((0usize..150, 1u64..400), 0..60),
        runs in any::<bool>(),
    ) {
        let of = |contents: &[u64]| contents.iter().map(|&content| Stable(content)).collect::<Vec<_>>();
        let mut made_up = host_with_activity(&[process_with_pages(1, &of(&contents[..100])), process_with_pages(1, &of(&contents[100..]))]);
        let mut looks = CensusSeries::new();
        let mut contents = contents;
        let mut run = 1;
        for (step, changes) in changes.chunks(6).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            made_up.processes = vec![process_with_pages(1, &of(&contents[..100])), process_with_pages(1, &of(&contents[100..]))];
            run += 1;
            made_up.activity = [(1, (run, 0)), (2, (run, 0))].into();
            let found = looks.scan_all(&made_up, Duration::from_secs(step as u64));
            let count = |content: u64| contents.iter().filter(|other| **other == content).count();
            for (pid, page) in found.covered {
                let content = contents[page + if pid == 2 { 100 } else { 0 }];
                prop_assert!(count(content) > 1, "page {page} of {pid} has no partner");
            }
        }
        for step in 0..17 {
            run += u64::from(runs);
            made_up.activity = [(1, (run, 0)), (2, (run, 0))].into();
            looks.scan_all(&made_up, Duration::from_secs(100) + CACHE_LIFETIME * step);
        }
        let found = looks.scan_all(&made_up, Duration::from_secs(200) + CACHE_LIFETIME * 17).covered;
        let (fresh, ..) = take_synthetic_census(&made_up.processes, &looks.options);
        prop_assert_eq!(found, covered_pages(&fresh));
    }
}
