//! Repeated censuses read few pages of known processes, and still find the same as a full census.

use super::*;
use pagefold_host::Hasher;

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
        let started = Instant::now();
        let ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), started);
        let options = CensusOptions { second_pass: SecondPass::Candidates, ..census_options(false, CHEAP_COSTS) };
        Self { ages, started, options, stop: AtomicBool::new(false) }
    }

    fn scan_all(&mut self, host: &SyntheticHost, elapsed: Duration) -> CensusResult {
        self.scan_pids(host, elapsed, &[])
    }

    /// Scan all processes, or only some.
    fn scan_pids(&mut self, host: &SyntheticHost, elapsed: Duration, pids: &[u32]) -> CensusResult {
        let before = host.pages_read.load(Ordering::Relaxed);
        let (cache, hasher) = self.ages.cache_and_hasher();
        let progress = ScanProgress::default();
        let selection =
            ProcessSelection { pids: pids.iter().map(|&pid| Pid(pid)).collect(), ..ProcessSelection::default() };
        let options = CensusOptions { selection, ..self.options.clone() };
        let (census, index) =
            take_incremental_census((cache, self.started + elapsed), hasher, host, &options, &progress, &self.stop)
                .unwrap();
        let all_are_read = (0..index.page_count() as u32).all(|page| index.mark(page).was_read());
        let is_whole = !host.refuses_reads.load(Ordering::Relaxed) && !self.stop.load(Ordering::Relaxed);
        assert!(all_are_read || !is_whole, "each page is classified");
        CensusResult {
            covered: covered_pages(&census),
            pages_read: host.pages_read.load(Ordering::Relaxed) - before,
            reused_pages: cache.reused_pages(ProcessId { pid: Pid(1), start_time: 1 }).0,
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
    let activity = (1..=processes.len() as u32).map(|pid| (pid, (1, 0))).collect();
    SyntheticHost { activity, ..SyntheticHost::new(processes) }
}

/// Time after which a process's memory may have been written from outside.
const CACHE_LIFETIME: Duration = Duration::from_secs(3600);

#[test]
fn inactive_process_is_cached_active_partly_read() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut series = CensusSeries::new();
    let mut scan = |host: &SyntheticHost, seconds: u64| series.scan_all(host, Duration::from_secs(seconds));
    assert_eq!(scan(&host, 0), CensusResult { pages_read: PROCESS_PAGES, ..CensusResult::default() });
    assert_eq!(scan(&host, 1), CensusResult { reused_pages: PROCESS_PAGES, ..CensusResult::default() });
    assert!(scan(&host, CACHE_LIFETIME.as_secs()).pages_read > 0, "other processes may have written to it");
    // The process runs all the time, and writes nothing.
    let mut pages_read = Vec::new();
    for second in 1..=32 {
        host.activity.insert(1, (second + 1, 0));
        let result = scan(&host, CACHE_LIFETIME.as_secs() + second);
        assert_eq!((result.pages_read + result.reused_pages, result.volatile_pages), (PROCESS_PAGES, 0));
        pages_read.push(result.pages_read);
    }
    assert!(pages_read.iter().sum::<u64>() <= PROCESS_PAGES * 32 / 6, "{pages_read:?}");
    // Each census reads four pages of each block.
    assert!(
        pages_read[16..].iter().sum::<u64>() >= 4 * (64 + 15 * 4),
        "each block is read whole in one census of 16: {pages_read:?}"
    );
    // If the kernel does not count, the process may have run.
    host.activity.insert(1, (0, 0));
    assert!(scan(&host, CACHE_LIFETIME.as_secs() + 40).pages_read > 0);
}

#[test]
fn new_process_matches_cached_fingerprints() {
    let mut series = CensusSeries::new();
    let first = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    series.scan_all(&first, Duration::ZERO);
    series.scan_all(&first, Duration::from_secs(1));
    let both = host_with_activity(&[
        process_with_pages(1, &unique_pages(1000)),
        process_with_pages(1, &[Stable(1007), Stable(1100), Stable(1200), Stable(5)]),
    ]);
    let found = series.scan_all(&both, Duration::from_secs(2));
    assert_eq!(found.covered, BTreeSet::from([(1, 7), (1, 100), (1, 200), (2, 0), (2, 1), (2, 2)]));
    assert_eq!((found.pages_read, found.reused_pages), (4 + 3 * 64, 64), "an idle block with a partner is read");
    // Its content differs from the cache, so its pages are read before they count.
    let mut pages = unique_pages(1000);
    (pages[7], pages[100]) = (Stable(6), Stable(8));
    let changed = host_with_activity(&[process_with_pages(1, &pages), both.processes[1].clone()]);
    assert_eq!(series.scan_all(&changed, Duration::from_secs(3)).covered, BTreeSet::from([(1, 200), (2, 2)]));
}

#[test]
fn unread_pages_are_not_enrolled_with_read_ones() {
    let mut series = CensusSeries::new();
    // A range costs more than all pages between two covered ones.
    series.options.costs = Some(EnrollCostBytes { per_range: 1500, per_scanned_page: 1, ..CHEAP_COSTS });
    let host = host_with_activity(&[
        process_with_pages(1, &unique_pages(1000)),
        process_with_pages(1, &[Stable(1063), Stable(1128)]),
    ]);
    let uncached = covered_pages(&take_synthetic_census(&host.processes, &series.options).0);
    assert_eq!(uncached, (63..=128).map(|page| (1, page)).chain([(2, 0), (2, 1)]).collect());
    series.scan_pids(&host, Duration::ZERO, &[1]);
    let found = series.scan_all(&host, Duration::from_secs(1));
    assert_eq!((found.covered, found.reused_pages), (BTreeSet::from([(1, 63), (1, 128), (2, 0), (2, 1)]), 2 * 64));
}

#[test]
fn enrolled_and_foreign_processes_are_always_read() {
    let enrolled =
        |uid: u32, from: u64| SyntheticProcess { enrolled: true, ..process_with_pages(uid, &unique_pages(from)) };
    let scan_again = |processes: &[SyntheticProcess], enrolled: &[u32]| {
        let host = host_with_activity(processes);
        let mut series = CensusSeries::new();
        for second in [0, 1] {
            series.scan_pids(&host, Duration::from_secs(second), &[]);
        }
        series.options.enrolled_processes =
            enrolled.iter().map(|&pid| ProcessId { pid: Pid(pid), start_time: 1 }).collect();
        let chosen: Vec<u32> = (1..=processes.len() as u32).filter(|pid| !enrolled.contains(pid)).collect();
        let found = series.scan_pids(&host, Duration::from_secs(2), &chosen);
        (found.reused_pages, found.pages_read)
    };
    assert_eq!(
        scan_again(&[process_with_pages(1, &unique_pages(1000)), process_with_pages(2, &unique_pages(2000))], &[]),
        (PROCESS_PAGES, 0)
    );
    assert_eq!(scan_again(&[enrolled(1, 1000), process_with_pages(2, &unique_pages(2000))], &[]), (0, PROCESS_PAGES));
    assert_eq!(
        scan_again(&[process_with_pages(1, &unique_pages(1000)), enrolled(2, 2000)], &[2]),
        (PROCESS_PAGES, PROCESS_PAGES)
    );
    assert_eq!(
        scan_again(&[process_with_pages(1, &[&unique_pages(1000)[..], &[Merged(7)]].concat())], &[]),
        (0, PROCESS_PAGES + 1)
    );
}

/// A content that another domain has enrolled, in a page between two pages that justify one range across the gap.
#[test]
fn unverified_pages_are_not_enrolled_with_neighbors() {
    let changed_process = |changed: SyntheticPage| {
        let mut pages = unique_pages(1000);
        (pages[10], pages[14], pages[12]) = (Stable(7), Stable(7), changed);
        process_with_pages(1, &pages)
    };
    let costs = Some(EnrollCostBytes { per_range: 1500, per_scanned_page: 1, ..CHEAP_COSTS });
    let foreign = || SyntheticProcess { enrolled: true, ..process_with_pages(2, &[Stable(9)]) };
    let foreign_ids = vec![ProcessId { pid: Pid(2), start_time: 1 }];
    // The process is inactive by its own counters, but a device wrote to it. Then its partners are new.
    let mut series = CensusSeries::new();
    series.options.costs = costs;
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000)), foreign()]);
    series.scan_pids(&host, Duration::ZERO, &[1]);
    host.processes[0] = changed_process(Stable(9));
    // This makes the series read the foreign process.
    series.options.enrolled_processes = foreign_ids.clone();
    let uncached = covered_pages(
        &take_census_on(
            SyntheticHost::new(&host.processes),
            &CensusOptions {
                selection: ProcessSelection { pids: vec![Pid(1)], ..ProcessSelection::default() },
                ..series.options.clone()
            },
        )
        .0,
    );
    assert_eq!(uncached, BTreeSet::from([(1, 10), (1, 14)]), "the same without a cache");
    host.processes.push(process_with_pages(1, &[Stable(1010), Stable(7)]));
    host.activity.insert(3, (1, 0));
    let found = series.scan_pids(&host, Duration::from_secs(1), &[1, 3]).covered;
    assert!(!found.contains(&(1, 12)), "{found:?}");
    // The page changes each time until it has that content.
    let mut series = CensusSeries::new();
    (series.options.costs, series.options.enrolled_processes) = (costs, foreign_ids);
    for second in 0..40 {
        host.processes[0] = changed_process(if second < 20 { Volatile } else { Stable(9) });
        host.activity.insert(1, (second + 2, 0));
        let found = series.scan_pids(&host, Duration::from_secs(second), &[1]).covered;
        assert!(found.contains(&(1, 10)) && !found.contains(&(1, 12)) || second < 20, "{second}: {found:?}");
    }
}

#[test]
fn unreadable_pages_are_not_counted() {
    // The same, but no census has seen them side by side.
    let host =
        host_with_activity(&[process_with_pages(1, &unique_pages(1000)), process_with_pages(1, &unique_pages(1000))]);
    let mut series = CensusSeries::new();
    for pid in [1, 2] {
        series.scan_pids(&host, Duration::from_secs(pid.into()), &[pid]);
    }
    host.refuses_reads.store(true, Ordering::Relaxed);
    assert_eq!(series.scan_all(&host, Duration::from_secs(3)).covered, BTreeSet::new());
    host.refuses_reads.store(false, Ordering::Relaxed);
    assert_eq!(series.scan_all(&host, Duration::from_secs(4)).covered.len() as u64, 2 * PROCESS_PAGES);
}

#[test]
fn new_and_changed_pages_are_read() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut series = CensusSeries::new();
    let mut scan = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second + 1, 0));
        series.scan_all(host, Duration::from_secs(second)).covered
    };
    for second in 0..6 {
        scan(&mut host, second);
    }
    // All pages are rewritten, and new pages appear: one equal to one page of each block.
    let one_of_each_block = |from: u64| (0..4).map(move |block| Stable(from + block * 64));
    let written: Vec<SyntheticPage> = unique_pages(9000).into_iter().chain(one_of_each_block(9000)).collect();
    host.processes[0] = process_with_pages(1, &written);
    let shared = |offset: usize| {
        (0..4).flat_map(move |i| [(1, i * 64 + offset), (1, PROCESS_PAGES as usize + i)]).collect::<BTreeSet<_>>()
    };
    assert_eq!(scan(&mut host, 10), shared(0));
    // Near recent writes, a single written page is found, too.
    let mut pages = written[..PROCESS_PAGES as usize].to_vec();
    (0..4).for_each(|block| pages[block * 64 + 3] = Stable(20000 + block as u64 * 64));
    host.processes[0] = process_with_pages(1, &pages.into_iter().chain(one_of_each_block(20000)).collect::<Vec<_>>());
    assert_eq!(scan(&mut host, 11), shared(3));
}

#[test]
fn inactivity_does_not_raise_trust_once_active() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut series = CensusSeries::new();
    for second in 0..8 {
        series.scan_all(&host, Duration::from_secs(second));
    }
    let mut pages = unique_pages(1000);
    (0..4).for_each(|block| pages[block * 64 + 3] = Stable(20000 + block as u64));
    host.processes = vec![
        process_with_pages(1, &pages),
        process_with_pages(1, &(0..4).map(|block| Stable(20000 + block)).collect::<Vec<_>>()),
    ];
    host.activity = [(1, (2, 0)), (2, (1, 0))].into();
    let found = series.scan_all(&host, Duration::from_secs(8)).covered;
    assert_eq!(found, (0..4).flat_map(|block| [(1, block * 64 + 3), (2, block)]).collect());
}

#[test]
fn intermittent_inactivity_does_not_prevent_reads() {
    let mut host = host_with_activity(&[process_with_pages(1, &unique_pages(1000))]);
    let mut series = CensusSeries::new();
    let mut scan = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second / 2 + 1, 0));
        series.scan_all(host, Duration::from_secs(second)).covered
    };
    for second in 0..16 {
        scan(&mut host, second);
    }
    let mut pages = unique_pages(1000);
    (0..4).for_each(|block| pages[block * 64 + 3] = Stable(20000));
    host.processes[0] = process_with_pages(1, &pages);
    let shared: BTreeSet<(u32, usize)> = (0..4).map(|block| (1, block * 64 + 3)).collect();
    let found: BTreeSet<(u32, usize)> = (16..16 + 32).flat_map(|second| scan(&mut host, second)).collect();
    assert!(found.is_subset(&shared) && found.len() >= 2, "{found:?}");
    assert_eq!((0..32).map(|second| scan(&mut host, 48 + second)).last(), Some(shared));
}

#[test]
fn volatile_pages_are_read_less_often_until_stable() {
    let partner = process_with_pages(1, &[Stable(7), Stable(8)]);
    let process_from = |first: &[SyntheticPage]| {
        let stable = (first.len() as u64..PROCESS_PAGES).map(|i| Stable(1000 + i));
        process_with_pages(1, &first.iter().copied().chain(stable).collect::<Vec<_>>())
    };
    let mut host = host_with_activity(&[process_from(&[Volatile; 32]), partner]);
    let mut series = CensusSeries::new();
    let mut scan = |host: &mut SyntheticHost, second: u64| {
        host.activity.insert(1, (second + 1, 0));
        series.scan_all(host, Duration::from_secs(second))
    };
    let read: Vec<u64> = (0..40).map(|second| scan(&mut host, second).pages_read).collect();
    assert_eq!(read[..2], [PROCESS_PAGES + 2; 2], "{read:?}");
    // Volatile pages are read in one census of eight, with a sixteenth of the other blocks, four pages of each, and the
    // partner.
    let late = read[24..].iter().sum::<u64>();
    assert!((32 * 2..32 * 2 + 16 * (16 + 16 + 2)).contains(&late), "{late}: {read:?}");
    let stable_and_volatile = [&[Stable(7), Stable(8)][..], &[Volatile; 30]].concat();
    host.processes[0] = process_from(&stable_and_volatile);
    let found: Vec<_> = (40..57).map(|second| scan(&mut host, second).covered).collect();
    let shared = BTreeSet::from([(1, 0), (1, 1), (2, 0), (2, 1)]);
    assert!(found[8..].iter().all(|found| *found == shared), "{found:?}");
    // A page that is stable again does not count as volatile for ever, even if it is unique.
    host.processes[0] = process_from(&[Stable(7), Stable(8)]);
    let found: Vec<_> = (57..82).map(|second| scan(&mut host, second).volatile_pages).collect();
    assert!(found[0] > 0 && found[17..].iter().all(|volatile| *volatile == 0), "{found:?}");
}

#[test]
fn sparse_blocks_are_not_cached() {
    let scattered: Vec<SyntheticPage> =
        (0..PROCESS_PAGES).map(|i| if i % 10 == 0 { Stable(1000 + i) } else { Hole }).collect();
    let host = host_with_activity(&[process_with_pages(1, &scattered)]);
    let mut series = CensusSeries::new();
    let read = [0, 1].map(|second| series.scan_all(&host, Duration::from_secs(second)).pages_read);
    assert_eq!(read, [26, 26]);
}

#[test]
fn stopped_or_partial_scan_does_not_corrupt_cache() {
    let mut series = CensusSeries::new();
    // More than one read takes at once, with blocks in two portions.
    let pages: Vec<SyntheticPage> = [Hole].into_iter().chain((0..20000).map(|i| Stable(1000 + i))).collect();
    let mut host = host_with_activity(&[process_with_pages(1, &pages), process_with_pages(1, &[Stable(1063)])]);
    assert_eq!(series.scan_pids(&host, Duration::ZERO, &[1]).pages_read, 20000);
    assert_eq!(series.scan_pids(&host, Duration::from_secs(1), &[1]).reused_pages, 20000);
    series.stop.store(true, Ordering::Relaxed);
    host.activity.insert(1, (2, 0));
    assert_eq!(series.scan_all(&host, Duration::from_secs(2)).covered, BTreeSet::new());
    series.stop.store(false, Ordering::Relaxed);
    assert_eq!(series.scan_pids(&host, Duration::from_secs(3), &[2]).covered, BTreeSet::new());
    let found = series.scan_all(&host, Duration::from_secs(4));
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
        is_inactive in any::<bool>(),
    ) {
        let mut contents = contents;
        let mut series = CensusSeries::new();
        series.options.costs = Some(EnrollCostBytes { per_range: range, per_scanned_page: 1, ..CHEAP_COSTS });
        series.options.enrolled_processes = vec![ProcessId { pid: Pid(4), start_time: 1 }];
        for (step, changes) in changes.chunks(5).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            let process = |uid: u32, pages: std::ops::Range<usize>| {
                process_with_pages(uid, &contents[pages].iter().map(|&content| Stable(content)).collect::<Vec<_>>())
            };
            let foreign = SyntheticProcess { enrolled: true, ..process(3, 270..300) };
            let mut host =
                host_with_activity(&[process(1, 0..90), process(1, 90..180), process(2, 180..270), foreign]);
            let activity = |pid: u32| if is_inactive && pid < 4 { (1, 0) } else { (step as u64 + 1, 0) };
            host.activity = (1..=4).map(|pid| (pid, activity(pid))).collect();
            let found = series.scan_pids(&host, Duration::from_secs(step as u64), &[1, 2, 3]).covered;
            let mut domains: BTreeMap<u64, BTreeSet<u32>> = BTreeMap::new();
            for (pid, page) in found.into_iter().chain((0..30).map(|page| (4, page))) {
                let content = contents[(pid as usize - 1) * 90 + page];
                domains.entry(content).or_default().insert(host.processes[pid as usize - 1].uid);
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
        let processes = |contents: &[u64]| {
            let pages: Vec<SyntheticPage> = contents.iter().map(|&content| Stable(content)).collect();
            vec![process_with_pages(1, &pages[..100]), process_with_pages(1, &pages[100..])]
        };
        let mut host = host_with_activity(&processes(&contents));
        let mut series = CensusSeries::new();
        let mut contents = contents;
        let mut run = 1;
        for (step, changes) in changes.chunks(6).enumerate() {
            for &(page, content) in changes {
                contents[page] = content;
            }
            host.processes = processes(&contents);
            run += 1;
            host.activity = [(1, (run, 0)), (2, (run, 0))].into();
            let found = series.scan_all(&host, Duration::from_secs(step as u64));
            let count = |content: u64| contents.iter().filter(|other| **other == content).count();
            for (pid, page) in found.covered {
                let content = contents[page + if pid == 2 { 100 } else { 0 }];
                prop_assert!(count(content) > 1, "page {page} of {pid} has no partner");
            }
        }
        for step in 0..17 {
            run += u64::from(runs);
            host.activity = [(1, (run, 0)), (2, (run, 0))].into();
            series.scan_all(&host, Duration::from_secs(100) + CACHE_LIFETIME * step);
        }
        let found = series.scan_all(&host, Duration::from_secs(200) + CACHE_LIFETIME * 17).covered;
        let (uncached, ..) = take_synthetic_census(&host.processes, &series.options);
        prop_assert_eq!(found, covered_pages(&uncached));
    }
}
