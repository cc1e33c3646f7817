//! Processes that are scanned in parts: the parts cover all memory, and comparing them finds what one census finds.

use super::*;
use pagefold_census::ScanPart;
use pagefold_census::index::PART_STEP_PAGES;
use pagefold_host::Hasher;

/// Censuses of parts under one key.
struct PartSeries {
    ages: StableAges,
    started: Instant,
    costs: EnrollCostBytes,
}

/// Parts of a process that are scanned in one census.
type ProcessParts<'a> = (u32, &'a [ScanPart]);

impl PartSeries {
    fn new() -> Self {
        let started = Instant::now();
        let ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), started);
        Self { ages, started, costs: CHEAP_COSTS }
    }

    fn scan(&mut self, host: &SyntheticHost, parts: &[ProcessParts<'_>]) -> Census {
        let (cache, hasher) = self.ages.cache_and_hasher();
        let selection = ProcessSelection {
            pids: parts.iter().map(|(pid, _)| Pid(*pid)).collect(),
            parts: parts.iter().map(|(pid, parts)| (Pid(*pid), parts.to_vec())).collect(),
            ..ProcessSelection::default()
        };
        let options =
            CensusOptions { selection, second_pass: SecondPass::Candidates, ..census_options(false, self.costs) };
        let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
        take_incremental_census((cache, self.started), hasher, host, &options, &progress, &stop).unwrap().0
    }

    /// Scan the parts of a process one by one. Returns their addresses.
    fn scan_in_parts(&mut self, host: &SyntheticHost, pid: u32, max_pages: u64) -> Vec<ScanPart> {
        let (mut parts, mut start) = (Vec::new(), 0);
        loop {
            let census = self.scan(host, &[(pid, &[part(start, u64::MAX, max_pages)])]);
            let [scanned] = census.subjects[0].scanned_ranges[..] else { panic!("one part was scanned") };
            assert!(scanned.start == start && scanned.end > start, "{scanned}");
            parts.push(part(start, scanned.end, max_pages));
            start = scanned.end;
            if start == u64::MAX {
                return parts;
            }
        }
    }
}

fn part(start: u64, end: u64, max_pages: u64) -> ScanPart {
    ScanPart { range: AddressRange { start, end }, max_bytes: Bytes(max_pages.saturating_mul(PAGE_BYTES)) }
}

/// Contents of six steps of memory.
fn distinct_pages(first_content: u64) -> Vec<SyntheticPage> {
    (first_content..first_content + 6 * PART_STEP_PAGES).map(Stable).collect()
}

#[test]
fn parts_keep_what_other_parts_cached() {
    let mut host = SyntheticHost::new(&[process_with_pages(1, &distinct_pages(10_000))]);
    host.activity.insert(1, (1, 0));
    let mut series = PartSeries::new();
    let mut scan = |host: &SyntheticHost, part: ScanPart| {
        let before = host.pages_read.load(Ordering::Relaxed);
        let census = series.scan(host, &[(1, &[part])]);
        (census.subjects[0].counts.unique.0, host.pages_read.load(Ordering::Relaxed) - before)
    };
    let third = 2 * PART_STEP_PAGES;
    let boundary = |steps: u64| BASE_ADDRESS + steps * PART_STEP_PAGES * PAGE_BYTES;
    let parts = [part(0, u64::MAX, third), part(boundary(2), u64::MAX, third), part(boundary(4), u64::MAX, third)];
    for part in parts {
        let (pages, read) = scan(&host, part);
        assert!(pages == third && read >= third, "{pages} pages, {read} reads");
    }
    // Once all parts were read twice, few pages are read again. Each time the process has run meanwhile.
    for round in 2..=4 {
        host.activity.insert(1, (round, 0));
        for part in parts {
            let (pages, read) = scan(&host, part);
            assert_eq!(pages, third);
            assert!(round < 4 || read < third, "{read} of {third} pages are read again");
        }
    }
    // A whole census uses what the parts have cached, and a part what the whole census has.
    for part in [ScanPart::WHOLE, parts[1]] {
        let (pages, read) = scan(&host, part);
        assert!(read < pages, "{read} of {pages} pages are read again");
    }
}

/// The kernel lists no page of a part that was not read, so a range over both sides would enroll unknown pages.
#[test]
fn no_range_bridges_memory_between_two_parts() {
    let (step, copies) = (PART_STEP_PAGES as usize, 64);
    let mut pages = vec![Hole; 4 * step];
    for position in [2 * step - copies, 3 * step] {
        pages[position..position + copies].fill(Stable(7));
    }
    let host = SyntheticHost::new(&[process_with_pages(1, &pages)]);
    let boundary = |steps: usize| BASE_ADDRESS + (steps * step) as u64 * PAGE_BYTES;
    let mut series = PartSeries::new();
    series.costs = EnrollCostBytes { per_range: 100_000, per_hole_page: 1, ..CHEAP_COSTS };
    let ranges = |census: &Census| census.ranges.len();
    assert_eq!(ranges(&series.scan(&host, &[(1, &[ScanPart::WHOLE])])), 1, "a hole costs less than a range");
    let parts = [part(0, boundary(2), u64::MAX), part(boundary(3), u64::MAX, u64::MAX)];
    let census = series.scan(&host, &[(1, &parts)]);
    assert_eq!((ranges(&census), covered_pages(&census).len()), (2, 2 * copies));
}

/// What a process has enrolled outside of its part may hold the same contents as a process of another domain.
#[test]
fn part_is_scanned_with_its_own_domain_only() {
    let pages = vec![Stable(7); 4];
    let host = SyntheticHost::new(&[1, 1, 2].map(|uid| process_with_pages(uid, &pages)));
    let mut series = PartSeries::new();
    let all = |first: ScanPart| [(1, vec![first]), (2, vec![ScanPart::WHOLE]), (3, vec![ScanPart::WHOLE])];
    for (first, pids) in [(ScanPart::WHOLE, vec![1, 2, 3]), (part(0, u64::MAX, 1), vec![1, 2])] {
        let parts = all(first);
        let census = series.scan(&host, &parts.each_ref().map(|(pid, parts)| (*pid, &parts[..])));
        let scanned: Vec<u32> = census.subjects.iter().map(|subject| subject.process.id.pid.0).collect();
        assert_eq!(scanned, pids);
    }
}

fn any_memory() -> impl Strategy<Value = Vec<SyntheticPage>> {
    let run = (prop_oneof![2 => (1_u64..40).prop_map(Stable), 1 => Just(Hole), 1 => Just(Stable(0))], 1_usize..400);
    prop::collection::vec(run, 1..12)
        .prop_map(|runs| runs.into_iter().flat_map(|(page, count)| vec![page; count]).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24.min(ProptestConfig::default().cases)))]

    /// The parts cover each resident page once, and each has at most one step too many.
    #[test]
    fn parts_cover_each_page_once(pages in any_memory(), max_pages in 1_u64..1500) {
        let host = SyntheticHost::new(&[process_with_pages(1, &pages)]);
        let mut series = PartSeries::new();
        let parts = series.scan_in_parts(&host, 1, max_pages);
        prop_assert!(parts.windows(2).all(|pair| pair[0].range.end == pair[1].range.start));
        let counts = parts.iter().map(|part| series.scan(&host, &[(1, &[*part])]).counts.resident().0);
        let counts: Vec<u64> = counts.collect();
        let resident = pages.iter().filter(|page| **page != Hole).count() as u64;
        prop_assert_eq!(counts.iter().sum::<u64>(), resident);
        prop_assert!(counts.iter().all(|count| *count < max_pages + PART_STEP_PAGES), "{:?}", counts);
    }

    /// Comparing each part with each other one covers what a census of both processes covers, whatever the cache holds.
    #[test]
    fn compared_parts_cover_what_one_census_covers(
        memories in prop::array::uniform2(any_memory()),
        max_pages in 1_u64..1500,
    ) {
        let host = SyntheticHost::new(&memories.map(|pages| process_with_pages(1, &pages)));
        let whole = covered_pages(&PartSeries::new().scan(&host, &[(1, &[ScanPart::WHOLE]), (2, &[ScanPart::WHOLE])]));
        let mut series = PartSeries::new();
        let parts = [1, 2].map(|pid| series.scan_in_parts(&host, pid, max_pages));
        let mut covered = BTreeSet::new();
        for one in &parts[0] {
            for other in &parts[1] {
                covered.extend(covered_pages(&series.scan(&host, &[(1, &[*one]), (2, &[*other])])));
            }
        }
        for (pid, parts) in [1, 2].into_iter().zip(&parts) {
            for (position, one) in parts.iter().enumerate() {
                for other in &parts[position + 1..] {
                    covered.extend(covered_pages(&series.scan(&host, &[(pid, &[*one, *other])])));
                }
            }
        }
        prop_assert_eq!(covered, whole);
    }
}
