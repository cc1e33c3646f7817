//! Inactive enrolled processes of other trust domains are cached, and kept apart like those that are read.

use super::*;
use pagefold_host::Hasher;

/// A time within a second of the start.
const ONE_SECOND: Duration = Duration::from_secs(1);

/// Repeated censuses of the first process; all other processes are enrolled.
struct ForeignCensusSeries {
    ages: StableAges,
    started: Instant,
}

/// The result of a census of the first process: its covered pages, the number of pages read, and the number of reads of
/// regions.
#[derive(Debug, PartialEq)]
struct ForeignCensusResult {
    covered_pages: BTreeSet<usize>,
    pages_read: u64,
    smaps_reads: u64,
}

impl ForeignCensusSeries {
    fn new() -> Self {
        let started = Instant::now();
        Self { ages: StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), started), started }
    }

    fn scan_first(&mut self, host: &SyntheticHost, elapsed: Duration, options: &CensusOptions) -> ForeignCensusResult {
        let foreign = 2..=host.processes.len() as u32;
        let enrolled = foreign.map(|pid| ProcessId { pid: Pid(pid), start_time: 1 }).collect();
        let selection = ProcessSelection { pids: vec![Pid(1)], ..ProcessSelection::default() };
        let options = CensusOptions {
            enrolled_processes: enrolled,
            selection,
            second_pass: SecondPass::Candidates,
            ..options.clone()
        };
        let count = || [&host.pages_read, &host.smaps_reads].map(|counter| counter.load(Ordering::Relaxed));
        let before = count();
        let (cache, hasher) = self.ages.cache_and_hasher();
        let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
        let (census, _) =
            take_incremental_census((cache, self.started + elapsed), hasher, host, &options, &progress, &stop).unwrap();
        let [pages_read, smaps_reads] = [0, 1].map(|index| count()[index] - before[index]);
        let covered = covered_pages(&census).into_iter().map(|(pid, page)| {
            assert_eq!(pid, 1, "no other process was selected");
            page
        });
        ForeignCensusResult { covered_pages: covered.collect(), pages_read, smaps_reads }
    }
}

/// Two pages of a content that is merged in another domain, five of a content that is merged nowhere with one foreign
/// content between them, and one unique page.
const SUBJECT_PAGES: [SyntheticPage; 9] =
    [Stable(7), Stable(7), Stable(20), Stable(20), Stable(8), Stable(20), Stable(20), Stable(9), Stable(20)];

/// A hole costs less than a further range.
const BRIDGING_COSTS: EnrollCostBytes = EnrollCostBytes { per_range: 1000, ..CHEAP_COSTS };

/// The pages that may be merged, and the unique page between them.
const EXPECTED_COVERED_PAGES: [usize; 6] = [2, 3, 5, 6, 7, 8];

fn foreign_process() -> SyntheticProcess {
    process_with_pages(2, &[Merged(7), Merged(7), Stable(8), Merged(30), Stable(31)])
}

/// A host with activity counters, in which no process has run so far.
fn host_with_activity(processes: &[SyntheticProcess]) -> SyntheticHost {
    let activity = (1..=processes.len() as u32).map(|pid| (pid, (1, 0))).collect();
    SyntheticHost { activity, ..SyntheticHost::new(processes) }
}

#[test]
fn inactive_foreign_process_is_cached() {
    // Both domains are known from the start, or only the foreign process's.
    for uid in [1, 3] {
        let host = host_with_activity(&[process_with_pages(uid, &SUBJECT_PAGES), foreign_process()]);
        let mut series = ForeignCensusSeries::new();
        let options = census_options(false, BRIDGING_COSTS);
        let first = series.scan_first(&host, Duration::ZERO, &options);
        assert_eq!((&first.covered_pages, first.smaps_reads), (&BTreeSet::from(EXPECTED_COVERED_PAGES), 2));
        let second = series.scan_first(&host, ONE_SECOND, &options);
        assert_eq!(
            (&second.covered_pages, second.smaps_reads),
            (&first.covered_pages, 1),
            "its regions are not listed"
        );
        assert_eq!(second.pages_read, first.pages_read - 5, "nor its pages read");
        assert_eq!(
            series.scan_first(&host, ONE_SECOND, &CensusOptions { across_domains: true, ..options }).covered_pages,
            (0..9).collect()
        );
    }
}

#[test]
fn active_or_expired_foreign_process_is_reread() {
    let mut host = host_with_activity(&[process_with_pages(1, &SUBJECT_PAGES), foreign_process()]);
    let mut series = ForeignCensusSeries::new();
    let options = census_options(false, BRIDGING_COSTS);
    let mut smaps_reads =
        |host: &SyntheticHost, elapsed: Duration| series.scan_first(host, elapsed, &options).smaps_reads;
    assert_eq!([0, 1, 2].map(|second| smaps_reads(&host, ONE_SECOND * second)), [2, 1, 1]);
    host.activity.insert(2, (2, 0));
    assert_eq!([3, 4].map(|second| smaps_reads(&host, ONE_SECOND * second)), [2, 1], "it has run");
    host.activity.insert(2, (2, 1));
    assert_eq!([5, 6].map(|second| smaps_reads(&host, ONE_SECOND * second)), [2, 1], "it had a page fault");
    let hour = Duration::from_secs(3600);
    assert_eq!(smaps_reads(&host, ONE_SECOND * 4 + hour), 1);
    assert_eq!(smaps_reads(&host, ONE_SECOND * 5 + hour), 2, "other processes may have written to it");
    // Its current contents count.
    host.activity.insert(2, (3, 1));
    host.processes[1] = process_with_pages(2, &[Merged(20)]);
    let covered_pages = series.scan_first(&host, ONE_SECOND * 6 + hour, &options).covered_pages;
    assert_eq!(covered_pages, BTreeSet::from([0, 1]));
    assert_eq!(
        series.scan_first(&host, ONE_SECOND * 7 + hour, &options),
        ForeignCensusResult { covered_pages, pages_read: 9, smaps_reads: 1 }
    );
    // If the kernel does not count, it is unknown whether the process has run.
    host.activity.insert(2, (0, 1));
    assert_eq!([8, 9].map(|second| series.scan_first(&host, ONE_SECOND * second + hour, &options).smaps_reads), [2, 2]);
}

#[test]
fn content_of_two_foreign_processes_is_avoided() {
    let mut host = host_with_activity(&[
        process_with_pages(1, &SUBJECT_PAGES),
        foreign_process(),
        process_with_pages(2, &[Merged(20)]),
        process_with_pages(3, &[Merged(20)]),
    ]);
    let mut series = ForeignCensusSeries::new();
    let options = census_options(false, BRIDGING_COSTS);
    let covered: BTreeSet<usize> = BTreeSet::new();
    assert_eq!(series.scan_first(&host, Duration::ZERO, &options).covered_pages, covered);
    host.activity.insert(2, (2, 0));
    let second = series.scan_first(&host, ONE_SECOND, &options);
    assert_eq!((&second.covered_pages, second.smaps_reads), (&covered, 2));
    // Its own domain has merged it, but so has another domain whose process is inactive.
    host.processes[0].uid = 3;
    assert_eq!(series.scan_first(&host, ONE_SECOND, &options).covered_pages, covered);
    // If only its own domain has merged it, it may join.
    host.processes[2] = process_with_pages(2, &[Merged(40)]);
    host.activity.insert(3, (2, 0));
    assert_eq!(series.scan_first(&host, ONE_SECOND, &options).covered_pages, BTreeSet::from(EXPECTED_COVERED_PAGES));
}

proptest! {
    /// The same pages are covered whether foreign processes are read or cached.
    #[test]
    fn cached_foreign_contents_forbid_the_same_pages(
        mut processes in any_processes(),
        range in 0i64..2000,
        use_zero_pages in any::<bool>(),
    ) {
        // No process has run.
        let pages = processes.iter_mut().flat_map(|process| &mut process.pages);
        pages.filter(|page| **page == SyntheticPage::Volatile).for_each(|page| *page = SyntheticPage::Hole);
        let host = host_with_activity(&processes);
        let mut series = ForeignCensusSeries::new();
        let options = CensusOptions { use_zero_pages, ..census_options(false, EnrollCostBytes { per_range: range, ..CHEAP_COSTS }) };
        let covered_by_reads = series.scan_first(&host, Duration::ZERO, &options).covered_pages;
        let covered_from_cache = series.scan_first(&host, ONE_SECOND, &options).covered_pages;
        prop_assert_eq!(covered_from_cache, covered_by_reads);
    }
}
