//! Plans for synthetic hosts, from the census to the prediction.

use super::*;
use pagefold_base::process::Process;
use pagefold_host::Hasher;
use pagefold_merge::decide::outcome::PageFate;
use pagefold_merge::decide::plan::{
    ComparisonCost, EnrollMethod, KsmdModel, KsmdPageTimes, MergePlan, PlanConstraints, PlanContents, make_plan,
};
use pagefold_merge::{MergeProbes, count_plan_contents};

fn constraints() -> PlanConstraints {
    PlanConstraints {
        page_size: PageSize::new(PAGE_BYTES).unwrap(),
        whole_processes: false,
        min_profit: Bytes(0),
        max_map_count: 65530,
        region_counts: BTreeMap::new(),
    }
}

/// ksmd at half a CPU.
fn ksmd() -> KsmdModel {
    KsmdModel {
        cpu_share: 0.5,
        page_times: KsmdPageTimes::default(),
        comparison_cost: ComparisonCost::default(),
        merges_at_first_scan: false,
    }
}

/// The contents of a plan on a host with huge pages of four pages.
fn count_contents(plan: &mut MergePlan, census: &Census, index: &PageIndex) -> PlanContents {
    let [page_size, huge_page_size] = [PAGE_BYTES, 4 * PAGE_BYTES].map(|bytes| PageSize::new(bytes).unwrap());
    count_plan_contents(plan, census, index, page_size, huge_page_size)
}

/// A plan that is filtered and then predicted.
fn filtered_plan(census: &Census, index: &PageIndex, filter: impl FnOnce(&mut MergePlan)) -> MergePlan {
    let mut plan = make_plan(census, &constraints(), &|_| None);
    filter(&mut plan);
    let contents = count_contents(&mut plan, census, index);
    plan.predict(&contents, &ksmd());
    plan
}

#[test]
fn plan_recounts_savings_without_excluded() {
    let processes = [
        process_with_pages(1, &[Stable(7); 4]),
        process_with_pages(1, &[Stable(7), Stable(8), Stable(8)]),
        process_with_pages(1, &[Merged(9), Volatile]),
    ];
    let (census, index, _) = take_synthetic_census(&processes, &census_options(false, CHEAP_COSTS));
    let mut constraints = constraints();
    let plan = |constraints: &PlanConstraints, excluded: &dyn Fn(u32) -> bool| -> MergePlan {
        let why = |process: &Process| excluded(process.id.pid.0).then(|| "it holds keys".to_owned());
        let mut plan = make_plan(&census, constraints, &why);
        let contents = count_contents(&mut plan, &census, &index);
        plan.predict(&contents, &ksmd());
        plan
    };
    let all_planned = plan(&constraints, &|_| false);
    assert_eq!(all_planned.targets.len(), 2, "nothing of the third gains");
    assert_eq!(all_planned.predicted.effect, census.savings.guided);
    assert_eq!((all_planned.predicted.effect.freed_frames, all_planned.predicted.merging), (Pages(5), Pages(7)));
    assert_eq!(all_planned.predicted.wall_time, all_planned.predicted.ksmd_time * 2);
    assert_eq!(all_planned.temporary_unenrolls.len(), 1, "the third has enrolled volatile pages");
    assert_eq!(all_planned.predicted.regions_added, 1, "the ranges are whole regions, but for the third's");

    let without_first = plan(&constraints, &|pid| pid == 1);
    assert_eq!(without_first.skipped.len(), 1);
    assert_eq!(without_first.skipped[0].why, "it holds keys");
    assert_eq!(without_first.predicted.effect.freed_frames, Pages(1), "a copy in a skipped process does not count");

    constraints.min_profit = Bytes(3 * PAGE_BYTES);
    assert_eq!(plan(&constraints, &|_| false).skipped[0].pid, Pid(1), "three of four pages, less metadata");
    constraints.min_profit = Bytes(2 * PAGE_BYTES);
    assert_eq!(plan(&constraints, &|_| false).targets[0].process.id.pid, Pid(1));
    constraints.whole_processes = true;
    constraints.min_profit = Bytes(0);
    let whole = plan(&constraints, &|_| false);
    assert_eq!(whole.predicted.effect.freed_frames, Pages(5));
    assert_eq!(
        whole.targets[0].ranges[0].range,
        AddressRange { start: BASE_ADDRESS, end: BASE_ADDRESS + 4 * PAGE_BYTES }
    );
}

/// A child shares a frame of each content with its parent since a fork, and has a frame of its own.
#[test]
fn frames_of_excluded_processes_are_not_freed() {
    let shared = [Forked(7, 1), Forked(8, 2), Forked(0, 3), Forked(0, 4)];
    let child = [&shared[..], &[Stable(7), Stable(8), Stable(0)]].concat();
    for parent_is_first in [true, false] {
        let mut processes = [process_with_pages(1, &shared), process_with_pages(1, &child)];
        if !parent_is_first {
            processes.reverse();
        }
        let options = CensusOptions { use_zero_pages: true, ..census_options(false, CHEAP_COSTS) };
        let (census, index, _) = take_synthetic_census(&processes, &options);
        let freed = |whole_processes: bool, is_excluded: &dyn Fn(bool) -> bool| {
            let constraints = PlanConstraints { whole_processes, ..constraints() };
            let is_parent = |process: &Process| (process.id.pid == Pid(1)) == parent_is_first;
            let why = |process: &Process| is_excluded(is_parent(process)).then(|| "excluded".to_owned());
            let mut plan = make_plan(&census, &constraints, &why);
            let contents = count_contents(&mut plan, &census, &index);
            plan.predict(&contents, &ksmd());
            plan.predicted.effect.freed_frames
        };
        assert_eq!(freed(true, &|_| false), Pages(2 + 3), "a frame of each content, and each zero frame");
        assert_eq!(freed(true, &|is_parent| is_parent), Pages(1), "the child's own zero page");
        assert_eq!(freed(true, &|is_parent| !is_parent), Pages(0));
        assert_eq!(freed(false, &|is_parent| is_parent), Pages(1));
    }
}

/// Two ranges with equal pages in one huge page, between pages that are unique.
#[test]
fn each_range_that_splits_a_huge_page_is_dropped() {
    let unique = |number: u64| Stable(1000 + number);
    let pages = |huge: bool, first: u64| {
        let pages =
            [unique(first), Stable(1), unique(first + 1), Stable(2), Stable(3), Stable(4), Stable(5), Stable(6)];
        SyntheticProcess { huge, ..process_with_pages(1, &pages) }
    };
    let (census, index, _) =
        take_synthetic_census(&[pages(true, 0), pages(false, 10)], &census_options(false, CHEAP_COSTS));
    let counts = |plan: &MergePlan| -> Vec<u64> {
        plan.targets[0].ranges.iter().map(|range| range.split_huge_pages.0).collect()
    };
    let plan = filtered_plan(&census, &index, |_| {});
    assert_eq!((counts(&plan), plan.predicted.effect.split_huge_pages), (vec![1, 2], Pages(2)));
    assert_eq!(plan.predicted.effect, census.savings.guided);
    let mut kept = make_plan(&census, &constraints(), &|_| None);
    let contents = count_contents(&mut kept, &census, &index);
    let first = kept.targets[0].ranges[0].range;
    kept.exclude_ranges(kept.targets[0].process.id, vec![first]);
    kept.predict(&contents, &ksmd());
    assert_eq!((counts(&kept), kept.predicted.effect.split_huge_pages), (vec![2], Pages(2)));
    let mut unsplit = make_plan(&census, &constraints(), &|_| None);
    count_contents(&mut unsplit, &census, &index);
    unsplit.drop_huge_page_splits();
    let remaining: Vec<Pid> = unsplit.targets.iter().map(|target| target.process.id.pid).collect();
    assert_eq!(remaining, [Pid(2)], "no range in the huge pages is left");
}

#[test]
fn third_copies_are_late_if_that_saves_a_scan() {
    let processes = [(); 4].map(|()| process_with_pages(1, &[Stable(7), Stable(8), Stable(9)]));
    let (census, index, _) = take_synthetic_census(&processes, &census_options(false, CHEAP_COSTS));
    for at_first_scan in [true, false] {
        let mut plan = make_plan(&census, &constraints(), &|_| None);
        let contents = count_contents(&mut plan, &census, &index);
        plan.predict(&contents, &KsmdModel { merges_at_first_scan: at_first_scan, ..ksmd() });
        let late: Vec<bool> = plan.targets.iter().flat_map(|target| &target.ranges).map(|range| range.late).collect();
        assert_eq!(late, [false, false, at_first_scan, at_first_scan]);
        assert_eq!(plan.merging_early(), at_first_scan.then_some(Pages(6)));
    }
}

#[test]
fn unstable_pages_wait_for_a_later_census() {
    let start = Instant::now();
    let mut ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), start);
    let mut plan_stable = |pages: &[SyntheticPage], seconds: u64| {
        let (census, index, _) = take_synthetic_census(
            &[process_with_pages(1, pages), process_with_pages(1, pages)],
            &census_options(false, CHEAP_COSTS),
        );
        let plan = filtered_plan(&census, &index, |plan| {
            ages.drop_unstable_ranges(plan, &census, &index, start + Duration::from_secs(seconds));
        });
        let ranges = plan.targets.iter().flat_map(|target| &target.ranges);
        let pages = |address: u64| (address - BASE_ADDRESS) / PAGE_BYTES;
        let kept = ranges.map(|range| (pages(range.range.start), pages(range.range.end))).collect::<Vec<_>>();
        (kept, plan.predicted.merging)
    };
    // Two chunks of 1024 pages; the first one is zero.
    let contents = |second: u64| [vec![Stable(0); 1024], (0..1024).map(|i| Stable(second + i)).collect()].concat();
    let none = (Vec::new(), Pages(0));
    assert_eq!(plan_stable(&contents(5000), 0), none, "seen for the first time");
    assert_eq!(plan_stable(&contents(5000), 4), none);
    assert_eq!(plan_stable(&contents(9000), 8), (vec![(0, 1024); 2], Pages(2048)), "changed pages are not stable yet");
    assert_eq!(plan_stable(&contents(9000), 12).1, Pages(2048));
    assert_eq!(plan_stable(&contents(9000), 14), (vec![(0, 2048); 2], Pages(4096)));
    assert_eq!(plan_stable(&[vec![Hole; 1024], contents(9000)].concat(), 15), none, "elsewhere it is another page");
}

/// A page whose former partner is gone cannot merge while its new partner is not stable yet.
#[test]
fn stable_pages_need_a_stable_partner() {
    let start = Instant::now();
    let mut ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), start);
    let contents: Vec<SyntheticPage> = (0..40).map(|i| Stable(5000 + i)).chain([Stable(0); 10]).collect();
    let mut plan_stable = |processes: &[SyntheticProcess], seconds: u64| {
        let (census, index, _) = take_synthetic_census(processes, &census_options(false, CHEAP_COSTS));
        let mut dropped = BTreeMap::new();
        let plan = filtered_plan(&census, &index, |plan| {
            dropped = ages.drop_unstable_ranges(plan, &census, &index, start + Duration::from_secs(seconds));
        });
        (plan.predicted.merging, dropped.into_values().map(|bytes| bytes.0 / PAGE_BYTES).collect::<Vec<_>>())
    };
    let full = || process_with_pages(1, &contents);
    let other = || process_with_pages(1, &[Stable(1); 3]);
    assert_eq!(plan_stable(&[full(), full(), other()], 0), (Pages(0), vec![50, 50, 3]));
    assert_eq!(
        plan_stable(&[full(), other(), full()], 6),
        (Pages(0), vec![50, 3, 50]),
        "the third got the same content"
    );
    assert_eq!(
        plan_stable(&[full(), full(), full()], 12),
        (Pages(100), vec![0, 50, 0]),
        "the second is no partner any more"
    );
    // Pages that are merged already count as partners.
    let merged = process_with_pages(1, &(0..40).map(|i| Merged(5000 + i)).collect::<Vec<_>>());
    assert_eq!(plan_stable(&[full(), other(), merged], 13).0, Pages(50));
    // Pages that lost their partner earlier do not count.
    let half = |first: u64| {
        process_with_pages(1, &(0..40).map(|i| Stable(if i < 20 { 7000 + i } else { first + i })).collect::<Vec<_>>())
    };
    assert_eq!(plan_stable(&[half(8000), other(), half(8000)], 20), (Pages(3), vec![40, 0, 40]));
    assert_eq!(
        plan_stable(&[half(8000), half(9000), other()], 26).0,
        Pages(0),
        "half has no partner, the rest has one that is not stable yet"
    );
}

/// With little CPU time a census has few processes, and may lack the partner of a page.
#[test]
fn pages_keep_stable_age_when_partner_is_missing() {
    let start = Instant::now();
    let mut ages = StableAges::new(Hasher::with_random_key(PAGE_BYTES as usize).unwrap(), start);
    let contents: Vec<SyntheticPage> = (0..40).map(|i| Stable(5000 + i)).collect();
    let mut plan_stable = |processes: &[SyntheticProcess], seconds: u64| {
        let (census, index, _) = take_synthetic_census(processes, &census_options(false, CHEAP_COSTS));
        let plan = filtered_plan(&census, &index, |plan| {
            ages.drop_unstable_ranges(plan, &census, &index, start + Duration::from_secs(seconds));
        });
        plan.predicted.merging
    };
    let both = [process_with_pages(1, &contents), process_with_pages(1, &contents)];
    assert_eq!(plan_stable(&both, 0), Pages(0));
    assert_eq!(plan_stable(&both[..1], 6), Pages(0), "there is no other process");
    assert_eq!(plan_stable(&both, 7), Pages(80));
    let changing = [SyntheticPage::Volatile; 40];
    assert_eq!(plan_stable(&[process_with_pages(1, &changing), process_with_pages(1, &changing)], 8), Pages(0));
    assert_eq!(plan_stable(&both, 9), Pages(0), "rewritten pages are not stable yet");
}

/// Runs of common contents between unique contents, in another order in the second process.
#[test]
fn metadata_limit_keeps_ranges_with_their_partners() {
    let run = |number: u64| (number * 40..(number + 1) * 40).map(|content| Stable(1 + content));
    let unique = |number: u64| (0..100).map(move |content| Stable(1_000_000 + number * 100 + content));
    let runs = |order: &[u64], first_unique: u64| -> Vec<SyntheticPage> {
        order
            .iter()
            .zip(first_unique..)
            .flat_map(|(&number, unique_run)| run(number).chain(unique(unique_run)))
            .collect()
    };
    let processes =
        [process_with_pages(1, &runs(&[0, 1, 2, 3, 4, 5], 0)), process_with_pages(1, &runs(&[3, 5, 1, 0, 4, 2], 100))];
    let (census, index, _) = take_synthetic_census(&processes, &census_options(false, CHEAP_COSTS));
    let mut whole = make_plan(&census, &constraints(), &|_| None);
    let contents = count_contents(&mut whole, &census, &index);
    whole.predict(&contents, &ksmd());
    assert_eq!((whole.range_count(), whole.predicted.effect.scanned_pages), (12, Pages(480)));
    for (max_items, ranges) in
        [(1000, 12), (480, 12), (479, 10), (250, 6), (160, 4), (159, 2), (80, 2), (79, 0), (0, 0)]
    {
        let mut plan = whole.clone();
        plan.limit_to_metadata(&contents, Bytes(max_items * RMAP_ITEM_BYTES));
        plan.predict(&contents, &ksmd());
        assert_eq!((plan.range_count(), plan.predicted.merging), (ranges, Pages(ranges as u64 * 40)), "{max_items}");
        let mut kept_contents: Vec<BTreeSet<u64>> = Vec::new();
        for target in &plan.targets {
            let pages = &processes[target.process.id.pid.0 as usize - 1].pages;
            let page = |range: AddressRange| pages[((range.start - BASE_ADDRESS) / PAGE_BYTES) as usize];
            kept_contents.push(
                target
                    .ranges
                    .iter()
                    .map(|range| match page(range.range) {
                        Stable(content) => content,
                        other => panic!("{other:?}"),
                    })
                    .collect(),
            );
        }
        assert!(
            kept_contents.windows(2).all(|pair| pair[0] == pair[1]),
            "each range with its partner: {kept_contents:?}"
        );
    }
}

#[test]
fn stable_ages_need_the_same_fingerprint_key() {
    let page_size = PageSize::new(PAGE_BYTES).unwrap();
    let processes = [process_with_pages(1, &[FilledWith(7); 40]), process_with_pages(1, &[FilledWith(7); 40])];
    let host = SyntheticHost::new(&processes);
    let start = Instant::now();
    let mut ages = StableAges::new(Hasher::with_random_key(page_size.as_len()).unwrap(), start);
    let mut plan_stable = |seconds: u64, new_key: bool| {
        let options = census_options(false, CHEAP_COSTS);
        let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
        let (census, index) = if new_key {
            take_census(&host, &options, &progress, &stop).unwrap()
        } else {
            take_census_with_hasher(ages.hasher(), &host, &options, &progress, &stop).unwrap()
        };
        let plan = filtered_plan(&census, &index, |plan| {
            ages.drop_unstable_ranges(plan, &census, &index, start + Duration::from_secs(seconds));
        });
        plan.predicted.merging
    };
    assert_eq!(plan_stable(0, false), Pages(0));
    assert_eq!(plan_stable(6, false), Pages(80));
    assert_eq!(plan_stable(7, true), Pages(0), "another key starts an empty record");
}

#[test]
fn probes_tell_written_pages_from_lost_partners() {
    let page_size = PageSize::new(PAGE_BYTES).unwrap();
    let contents: Vec<SyntheticPage> = (10..30).map(Stable).collect();
    let before = SyntheticHost::new(&[process_with_pages(1, &contents), process_with_pages(1, &contents)]);
    let ages = StableAges::new(Hasher::with_random_key(page_size.as_len()).unwrap(), before.now());
    let (progress, stop) = (ScanProgress::default(), AtomicBool::new(false));
    let (census, index) =
        take_census_with_hasher(ages.hasher(), &before, &census_options(false, CHEAP_COSTS), &progress, &stop).unwrap();
    let mut plan = filtered_plan(&census, &index, |_| {});
    let mut probes = MergeProbes::choose(&plan, &census, &index, ages.hasher());
    let missing_frames = |first: &[SyntheticPage], second: &[SyntheticPage], given_up: &[(AddressRange, PageFate)]| {
        let host = SyntheticHost::new(&[process_with_pages(1, first), process_with_pages(1, second)]);
        let fates = probes.determine_fates(&host, |_| given_up.to_vec()).unwrap();
        assert_eq!(fates.predicted_frames, 20.0, "a small plan is followed completely");
        fates.missing_frames.into_iter().collect::<Vec<_>>()
    };
    let merged: Vec<SyntheticPage> = (10..30).map(Merged).collect();
    assert!(missing_frames(&merged, &merged, &[]).is_empty());
    // Three are written and one is unmapped, so that their partners stay unmerged; two more were not changed.
    let first = [&[Stable(99), Stable(98), Stable(97), Hole], &contents[4..6], &merged[6..]].concat();
    let second = [&contents[..6], &merged[6..]].concat();
    assert_eq!(missing_frames(&first, &second, &[]), [(PageFate::Written, 4.0), (PageFate::UnchangedUnmerged, 2.0)]);
    let four = AddressRange { start: BASE_ADDRESS, end: BASE_ADDRESS + 4 * PAGE_BYTES };
    assert_eq!(
        missing_frames(&first, &second, &[(four, PageFate::NotEnrolled)]),
        [(PageFate::NotEnrolled, 4.0), (PageFate::UnchangedUnmerged, 2.0)]
    );
    // If no page of a range merged in the end, that does not explain the written pages.
    let six = AddressRange { start: BASE_ADDRESS, end: BASE_ADDRESS + 6 * PAGE_BYTES };
    assert_eq!(
        missing_frames(&first, &second, &[(six, PageFate::UnenrolledUnmerged)]),
        [(PageFate::Written, 4.0), (PageFate::UnenrolledUnmerged, 2.0)]
    );
    assert_eq!(missing_frames(&contents, &merged, &[]), [(PageFate::UnchangedUnmerged, 20.0)]);
    let other = [&[Merged(99)], &merged[1..]].concat();
    assert_eq!(missing_frames(&other, &merged, &[]), [(PageFate::Written, 1.0)], "it merged with another content");
    assert_eq!(missing_frames(&merged, &[], &[]), [(PageFate::Written, 20.0)], "unmapped pages were freed");
    // Contents whose partner cannot be enrolled are not followed any more.
    plan.targets[1].enroll_method = EnrollMethod::Unreachable("busy".to_owned());
    probes.retain_reachable(&plan);
    let fates = probes.determine_fates(&before, |_| Vec::new()).unwrap();
    assert_eq!((fates.predicted_frames, fates.missing_frames), (0.0, BTreeMap::new()));
}

/// The number of the page at an address.
fn page_number(address: u64) -> usize {
    ((address - BASE_ADDRESS) / PAGE_BYTES) as usize
}

/// What merging the pages of a plan frees, and how many of them merge, counted page by page.
fn count_by_pages(plan: &MergePlan, processes: &[SyntheticProcess], across_domains: bool) -> (u64, u64) {
    let keeps_apart = plan.whole_processes && !across_domains;
    let class = |process: &SyntheticProcess| if keeps_apart { process.uid } else { 0 };
    let mut copies: BTreeMap<(u32, u64), u64> = BTreeMap::new();
    for target in &plan.targets {
        let process = &processes[target.process.id.pid.0 as usize - 1];
        for range in &target.ranges {
            for page in &process.pages[page_number(range.range.start)..page_number(range.range.end)] {
                if let Stable(content) = page {
                    *copies.entry((class(process), *content)).or_default() += 1;
                }
            }
        }
    }
    let is_merged = |(number, content): (u32, u64)| {
        let mut class_members = processes.iter().filter(|process| class(process) == number);
        class_members.any(|process| process.pages.contains(&Merged(content)))
    };
    let (mut freed, mut merging) = (0, 0);
    for (content, copies) in copies {
        let (is_zero, is_merged) = (content.1 == 0, is_merged(content));
        freed += if is_merged && !is_zero { copies } else { copies - 1 };
        merging += if is_merged || is_zero || copies > 1 { copies } else { 0 };
    }
    (freed, merging)
}

proptest! {
    /// Whatever is dropped from a plan, and in whatever order, its prediction is that of the remaining pages.
    #[test]
    fn prediction_is_exact_for_the_remaining_plan(
        processes in any_processes(),
        (across_domains, whole) in any::<(bool, bool)>(),
        holes in prop::collection::vec((1u32..5, 0u64..60, 0u64..20), 0..6),
        (max_items, kept) in (0u64..200, any::<[bool; 4]>()),
    ) {
        let costs = EnrollCostBytes { per_scanned_page: 500, per_range: 900, per_hole_page: 64, per_split_huge_page: 0 };
        let (census, index, _) = take_synthetic_census(&processes, &census_options(across_domains, costs));
        let mut plan = make_plan(&census, &PlanConstraints { whole_processes: whole, ..constraints() }, &|_| None);
        let census_ranges = plan.clone();
        count_contents(&mut plan, &census, &index);
        let counts = |plan: &MergePlan| -> Vec<_> {
            let ranges = plan.targets.iter().flat_map(|target| &target.ranges);
            ranges.map(|range| (range.range, range.pages, range.zero)).collect()
        };
        prop_assert_eq!(counts(&plan), counts(&census_ranges), "counting again changes nothing");
        for (pid, start, pages) in holes {
            let start = BASE_ADDRESS + start * PAGE_BYTES;
            let hole = AddressRange { start, end: start + pages * PAGE_BYTES };
            plan.exclude_ranges(ProcessId { pid: Pid(pid), start_time: 1 }, vec![hole]);
        }
        let contents = count_contents(&mut plan, &census, &index);
        let check = |plan: &mut MergePlan| {
            plan.predict(&contents, &ksmd());
            let (freed, merging) = count_by_pages(plan, &processes, across_domains);
            let effect = plan.predicted.effect;
            prop_assert_eq!((effect.freed_frames, plan.predicted.merging), (Pages(freed), Pages(merging)));
            let ranges = || plan.targets.iter().flat_map(|target| target.ranges.iter().map(move |range| (target, range)));
            let is_scanned = |page: &SyntheticPage| !matches!(page, Hole | Merged(_));
            for (target, range) in ranges() {
                let pages = &processes[target.process.id.pid.0 as usize - 1].pages;
                let pages = &pages[page_number(range.range.start)..page_number(range.range.end)];
                let count = |is_counted: &dyn Fn(&SyntheticPage) -> bool| {
                    Pages(pages.iter().filter(|page| is_counted(page)).count() as u64)
                };
                prop_assert_eq!((range.pages, range.zero), (count(&is_scanned), count(&|page| *page == Stable(0))));
            }
            prop_assert_eq!(effect.scanned_pages, ranges().map(|(_, range)| range.pages).sum());
            if freed > 0 && !ranges().any(|(_, range)| range.zero > Pages::ZERO) {
                let shares: u64 = ranges().map(|(_, range)| range.freed_bytes.0).sum();
                prop_assert!(shares <= freed * PAGE_BYTES && freed * PAGE_BYTES - shares < merging, "{} {}", shares, freed);
            }
            // From the census again.
            let mut recounted = plan.clone();
            let contents = count_contents(&mut recounted, &census, &index);
            recounted.predict(&contents, &ksmd());
            prop_assert_eq!(&recounted.predicted, &plan.predicted);
            Ok(())
        };
        check(&mut plan)?;
        plan.limit_to_metadata(&contents, Bytes(max_items * RMAP_ITEM_BYTES));
        check(&mut plan)?;
        let new_items = plan.targets.iter().flat_map(|target| &target.ranges).filter(|range| !range.enrolled);
        prop_assert!(new_items.map(|range| range.pages.0).sum::<u64>() <= max_items);
        plan.retain_processes(|process| kept[process.pid.0 as usize - 1]);
        check(&mut plan)?;
    }
}
