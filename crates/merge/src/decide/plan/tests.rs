use super::*;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::savings::{EnrollCostBytes, MergeEffect, SharingSettings};
use pagefold_base::units::{Bytes, PageSize};
use pagefold_base::{Absent, PageCounts};
use pagefold_census::results::{Census, GuidedRange, IdleRange, RegionCensus, Savings, SubjectCensus};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::time::Duration;

const PAGE: u64 = 4096;

fn page_size() -> PageSize {
    PageSize::new(PAGE).unwrap()
}

fn pages(start: u64, end: u64) -> AddressRange {
    AddressRange { start: start * PAGE, end: end * PAGE }
}

fn process(pid: u32, arguments: &[&str]) -> Process {
    let arguments = Ok(arguments.iter().map(|&word| word.to_owned()).collect());
    Process { arguments, ..Process::absent(ProcessId { pid: Pid(pid), start_time: 1 }, &Absent::Denied) }
}

fn constraints() -> PlanConstraints {
    PlanConstraints {
        page_size: page_size(),
        whole_processes: false,
        min_profit: Bytes(0),
        max_map_count: 65530,
        region_counts: BTreeMap::new(),
    }
}

/// ksmd at a quarter of a CPU.
fn ksmd() -> KsmdModel {
    KsmdModel {
        cpu_share: 0.25,
        page_times: KsmdPageTimes::default(),
        comparison_cost: ComparisonCost::default(),
        merges_at_first_scan: false,
    }
}

/// The contents of a plan whose ranges contain equal pages: so many contents with a page in each range of a list.
fn contents_of(plan: &MergePlan, equal: &[(&[u32], u64)]) -> PlanContents {
    let ranges =
        plan.targets.iter().flat_map(|target| target.ranges.iter().map(move |range| (target.process.id, range.range)));
    let pages = |ranges: &[u32]| EqualPages([0].into_iter().chain(ranges.iter().map(|range| range << 1)).collect());
    PlanContents {
        sharing: SharingSettings::default(),
        page_size: page_size(),
        ranges: ranges.collect(),
        equal_pages: equal.iter().map(|&(ranges, contents)| (pages(ranges), contents)).collect(),
        zero_pages: Vec::new(),
        shared_huge_pages: BTreeMap::new(),
    }
}

/// A census of processes that have a region of 100 pages each and ranges in it.
fn census_with_ranges(ranges: &[(usize, AddressRange)], arguments: &[&[&str]]) -> Census {
    let region = Region { flags: VmFlags::default(), ..Region::empty(pages(0, 100)) };
    let subjects = arguments.iter().enumerate().map(|(i, arguments)| SubjectCensus {
        process: process(i as u32 + 1, arguments),
        domain: TrustDomain::Host,
        is_foreign: false,
        scanned_ranges: Vec::new(),
        counts: PageCounts::default(),
        regions: vec![RegionCensus { region: region.clone(), ineligible: None, counts: PageCounts::default() }],
    });
    let guided = |&(subject, range): &(usize, AddressRange)| {
        let pages = Pages(range.bytes().0 / PAGE);
        let freed = Bytes(pages.0 * PAGE / 2);
        GuidedRange {
            subject,
            range,
            pages,
            merging: pages,
            zero: Pages::ZERO,
            freed_bytes: freed,
            split_huge_pages: Pages::ZERO,
            enrolled: false,
        }
    };
    let ranges: Vec<GuidedRange> = ranges.iter().map(guided).collect();
    let scanned = ranges.iter().map(|range| range.pages).sum();
    let guided = MergeEffect { freed_frames: Pages(77), scanned_pages: scanned, split_huge_pages: Pages(3) };
    let savings = Savings { guided, guided_ranges: ranges.len() as u64, ..Savings::default() };
    Census { subjects: subjects.collect(), ranges, savings, ..Census::default() }
}

#[test]
fn boundaries_at_region_edges_add_no_region() {
    let check = |range, added| {
        let plan = make_plan(&census_with_ranges(&[(0, range)], &[&["a"]]), &constraints(), &|_| None);
        assert_eq!(plan.added_regions(), added, "{range}");
    };
    check(pages(10, 20), 2);
    check(pages(0, 20), 1);
    check(pages(90, 100), 1);
    check(pages(0, 100), 0);
}

#[test]
fn predicted_time_follows_page_times_and_cpu_share() {
    let mut plan = make_plan(&census_with_ranges(&[(0, pages(0, 100))], &[&["a"]]), &constraints(), &|_| None);
    let contents = contents_of(&plan, &[(&[0, 0], 50)]);
    plan.predict(&contents, &ksmd());
    assert_eq!(plan.predicted.ksmd_time, Duration::from_nanos(100 * 7600));
    assert_eq!(plan.predicted.wall_time, Duration::from_nanos(400 * 7600));
    let mixed = KsmdPageTimes::default().time(Pages(10), Pages(4), Pages(1));
    assert_eq!(mixed, Duration::from_nanos(10 * 900 + 6 * 5900 + 3 * 6700 + 2400));
    assert_eq!(plan.predicted.effect.freed_frames, Pages(50));
}

#[test]
fn skipped_processes_are_listed_with_reason() {
    let guest = ["qemu-system-x86_64", "-object", "sev-guest,id=s"];
    let census = census_with_ranges(
        &[(0, pages(0, 4)), (1, pages(0, 50)), (2, pages(0, 50))],
        &[&["a"], &guest, &["ssh-agent"]],
    );
    let min_profit_constraints = PlanConstraints { min_profit: Bytes(20 * PAGE), ..constraints() };
    let excluded = |process: &Process| {
        let arguments = process.arguments.as_ref().unwrap();
        let encrypted = arguments.iter().any(|argument| argument.starts_with("sev-guest"));
        let why = if encrypted { Some("encrypted") } else { (arguments[0] == "ssh-agent").then_some("holds keys") };
        why.map(str::to_owned)
    };
    let skipped = |plan: &MergePlan| -> Vec<(u32, String)> {
        plan.skipped.iter().map(|process| (process.pid.0, process.why.clone())).collect()
    };
    let plan = make_plan(&census, &min_profit_constraints, &excluded);
    let expected = [(1, "would save only 7.75 KiB net"), (2, "encrypted"), (3, "holds keys")];
    assert_eq!(skipped(&plan), expected.map(|(pid, why)| (pid, why.to_owned())));
    assert!(plan.targets.is_empty());
}

#[test]
fn ranges_beyond_max_map_count_are_dropped() {
    let ranges: Vec<_> = (0..10).map(|i| (0, pages(10 * i, 10 * i + 1 + i % 5))).collect();
    let mut census = census_with_ranges(&ranges, &[&["a"]]);
    census.idle_ranges = vec![IdleRange { subject: 0, range: pages(8, 9) }];
    let mut tight = PlanConstraints { max_map_count: 1000, ..constraints() };
    tight.region_counts.insert(census.subjects[0].process.id, 980);
    let plan = make_plan(&census, &tight, &|_| None);
    let kept: Vec<u64> = plan.targets[0].ranges.iter().map(|range| range.range.start / PAGE).collect();
    assert_eq!(kept, [20, 30, 40, 80, 90], "the largest, in the order of addresses");
    assert_eq!(plan.temporary_unenrolls[0].ranges, [pages(8, 9)]);
}

#[test]
fn unprofitable_processes_are_temporarily_unenrolled() {
    let mut census = census_with_ranges(
        &[(0, pages(0, 50)), (2, pages(0, 4)), (3, pages(0, 50))],
        &[&["a"], &["b"], &["c"], &["d"]],
    );
    let idle = |subject| IdleRange { subject, range: pages(60, 90) };
    census.idle_ranges = (0..4).map(idle).collect();
    let min_profit_constraints = PlanConstraints { min_profit: Bytes(20 * PAGE), ..constraints() };
    let exclusion_reason = |process: &Process| (process.id.pid == Pid(4)).then(|| "holds keys".to_owned());
    let unenrolled = |plan: &MergePlan| -> Vec<u32> {
        plan.temporary_unenrolls.iter().map(|unenrolled| unenrolled.process.pid.0).collect()
    };
    let targets =
        |plan: &MergePlan| -> Vec<u32> { plan.targets.iter().map(|target| target.process.id.pid.0).collect() };
    let mut plan = make_plan(&census, &min_profit_constraints, &exclusion_reason);
    assert_eq!((targets(&plan), unenrolled(&plan)), (vec![1], vec![1, 2, 3]), "all but the excluded process");
    assert_eq!(plan.added_regions(), 1 + 3 * 2);
    plan.add_temporary_unenroll(&census.subjects[0], &[pages(90, 95), pages(10, 20)]);
    let first = plan.temporary_unenrolls.iter().find(|unenrolled| unenrolled.process.pid == Pid(1)).unwrap();
    assert_eq!(first.ranges, [pages(10, 20), pages(60, 95)]);
    plan.add_temporary_unenroll(&census.subjects[1], &[pages(0, 100)]);
    let second = plan.temporary_unenrolls.iter().find(|unenrolled| unenrolled.process.pid == Pid(2)).unwrap();
    assert_eq!((&second.ranges[..], &second.boundaries[..]), (&[pages(0, 100)][..], &[][..]), "all of its region");
    // Without targets ksmd has nothing to do, so no process is temporarily unenrolled.
    plan.exclude_ranges(plan.targets[0].process.id, vec![pages(0, 100)]);
    assert_eq!((targets(&plan), unenrolled(&plan), plan.added_regions()), (vec![], vec![], 0));
    let all_excluded = make_plan(&census, &min_profit_constraints, &|_| Some("excluded".to_owned()));
    assert_eq!((targets(&all_excluded), unenrolled(&all_excluded)), (vec![], vec![]));
    let mut chosen = make_plan(&census, &min_profit_constraints, &exclusion_reason);
    chosen.retain_processes(|process| process.pid == Pid(1));
    assert_eq!(unenrolled(&chosen), [1]);
    let whole_plan =
        make_plan(&census, &PlanConstraints { whole_processes: true, ..min_profit_constraints }, &exclusion_reason);
    assert!(whole_plan.temporary_unenrolls.is_empty());
}

#[test]
fn touching_ranges_are_enrolled_as_one() {
    let ranges = [(0, pages(1, 4)), (0, pages(4, 9)), (0, pages(10, 12))];
    let mut plan = make_plan(&census_with_ranges(&ranges, &[&["a"]]), &constraints(), &|_| None);
    plan.targets[0].ranges[2].enrolled = true;
    assert_eq!(plan.targets[0].ranges_to_enroll(false), [pages(1, 9)]);
    plan.targets[0].ranges[1].late = true;
    assert_eq!(plan.targets[0].ranges_to_enroll(false), [pages(1, 4)]);
    assert_eq!(plan.targets[0].ranges_to_enroll(true), [pages(4, 9)]);
    assert_eq!(plan.range_count(), 3);
}

const fn range(start: u64, end: u64) -> AddressRange {
    AddressRange { start, end }
}

fn planned_range(start: u64, end: u64) -> PlannedRange {
    let pages = Pages(end - start);
    let range = range(start, end);
    PlannedRange {
        range,
        region: range,
        pages,
        merging: pages,
        zero: Pages::ZERO,
        freed_bytes: Bytes::ZERO,
        enrolled: false,
        split_huge_pages: Pages::ZERO,
        late: false,
    }
}

#[test]
fn excluded_ranges_are_cut_out() {
    let check = |holes: &[AddressRange], expected: &[(u64, u64)]| {
        let parts: Vec<_> = planned_range(10, 20)
            .subtract(&AddressRange::union(holes.to_vec()))
            .iter()
            .map(|p| (p.range.start, p.range.end))
            .collect();
        assert_eq!(parts, expected);
    };
    check(&[], &[(10, 20)]);
    check(&[range(0, 10), range(20, 30)], &[(10, 20)]);
    check(&[range(12, 14)], &[(10, 12), (14, 20)]);
    check(&[range(12, 14), range(5, 11), range(13, 19)], &[(11, 12), (19, 20)]);
    check(&[range(0, 99)], &[]);
}

proptest! {
    #[test]
    fn each_page_is_kept_or_left_out(holes in prop::collection::vec((0u64..50, 0u64..20), 0..8)) {
        let holes: Vec<_> = holes.into_iter().map(|(start, length)| range(start, start + length)).collect();
        let parts = planned_range(5, 45).subtract(&AddressRange::union(holes.clone()));
        for page in 5..45 {
            let kept = parts.iter().filter(|part| part.range.contains(page)).count();
            prop_assert_eq!(kept, usize::from(!holes.iter().any(|hole| hole.contains(page))));
        }
    }

    #[test]
    fn most_profitable_ranges_are_kept_within_the_limit(
        ranges in prop::collection::vec((1u64..8, 0u64..8, 0u64..2, any::<bool>()), 1..10),
        max_new_ranges in 0u64..6,
    ) {
        let positions: Vec<_> = (0..ranges.len() as u64).map(|i| (0, pages(10 * i, 10 * i + 8))).collect();
        let mut census = census_with_ranges(&positions, &[&[]]);
        for (range, (freed, extra, huge, enrolled)) in census.ranges.iter_mut().zip(&ranges) {
            range.freed_bytes = Bytes(freed * PAGE);
            range.pages = Pages(freed + extra * 8);
            range.split_huge_pages = Pages(*huge);
            range.enrolled = *enrolled;
        }
        let region_counts = BTreeMap::from([(census.subjects[0].process.id, 0)]);
        let constraints = PlanConstraints { max_map_count: 4 * max_new_ranges, region_counts, ..constraints() };
        let planned = make_plan(&census, &constraints, &|_| None);
        let kept: Vec<u64> =
            planned.targets.iter().flat_map(|target| &target.ranges).map(|range| range.range.start).collect();
        let costs = EnrollCostBytes::for_page_size(page_size());
        let net_savings = |range: &GuidedRange| {
            let cost = costs.per_scanned_page * range.pages.0 as i64
                + costs.per_split_huge_page * range.split_huge_pages.0 as i64;
            range.freed_bytes.0 as i64 - cost
        };
        let new_ranges: Vec<&GuidedRange> = census.ranges.iter().filter(|range| !range.enrolled).collect();
        let chosen_savings = |chosen: u32| {
            let chosen_ranges = new_ranges.iter().enumerate().filter(|(i, _)| chosen >> i & 1 == 1);
            chosen_ranges.map(|(_, range)| net_savings(range)).sum::<i64>()
        };
        // The census chose all of them, so as many stay as fit.
        let expected_count = new_ranges.len().min(max_new_ranges as usize) as u32;
        let choices = (0u32..1 << new_ranges.len()).filter(|chosen| chosen.count_ones() == expected_count);
        let best = choices.map(chosen_savings).max();
        let is_kept = |range: &&&GuidedRange| kept.contains(&range.range.start);
        prop_assert_eq!(new_ranges.iter().filter(is_kept).count() as u32, expected_count);
        prop_assert_eq!(Some(new_ranges.iter().filter(is_kept).map(|range| net_savings(range)).sum()), best);
        let enrolled_count = census.ranges.len() - new_ranges.len();
        prop_assert_eq!(kept.len() - expected_count as usize, enrolled_count, "enrolled ranges stay");
    }
}

#[test]
fn restricted_plan_is_predicted_from_its_contents() {
    let census = census_with_ranges(&[(0, pages(0, 10)), (0, pages(20, 60)), (1, pages(0, 40))], &[&["a"], &["b"]]);
    let made = || make_plan(&census, &constraints(), &|_| None);
    // Ten contents in the first range and the other process, twenty in all ranges, and five within the second range.
    let contents = contents_of(&made(), &[(&[0, 2], 10), (&[0, 1, 2], 20), (&[1, 1], 5)]);
    let check = |plan: &mut MergePlan, scanned: u64, merging: u64, freed: u64| {
        plan.predict(&contents, &ksmd());
        let effect =
            MergeEffect { scanned_pages: Pages(scanned), freed_frames: Pages(freed), split_huge_pages: Pages::ZERO };
        assert_eq!((plan.predicted.effect, plan.predicted.merging), (effect, Pages(merging)));
        let time = KsmdPageTimes::default().time(Pages(scanned), Pages(merging), Pages::ZERO);
        assert_eq!((plan.predicted.ksmd_time, plan.predicted.wall_time), (time, time * 4));
    };
    check(&mut made(), 90, 90, 55);
    let mut first = made();
    first.retain_processes(|process| process.pid == Pid(1));
    check(&mut first, 50, 50, 25);
    let freed: Vec<u64> = first.targets[0].ranges.iter().map(|range| range.freed_bytes.0 / PAGE).collect();
    assert_eq!(freed, [10, 15], "the pages of a content have equal shares");
    let mut second = made();
    second.retain_processes(|process| process.pid == Pid(2));
    check(&mut second, 40, 0, 0);
    let mut splitting = made();
    splitting.targets[1].ranges[0].split_huge_pages = Pages(1);
    splitting.drop_huge_page_splits();
    check(&mut splitting, 50, 50, 25);
    splitting.exclude_ranges(splitting.targets[0].process.id, vec![AddressRange { start: 0, end: u64::MAX }]);
    check(&mut splitting, 0, 0, 0);
}

#[test]
fn cut_range_does_not_take_the_counts_of_another() {
    let census = census_with_ranges(&[(0, pages(0, 10)), (0, pages(20, 60)), (1, pages(0, 40))], &[&["a"], &["b"]]);
    let mut plan = make_plan(&census, &constraints(), &|_| None);
    let contents = contents_of(&plan, &[(&[0, 0], 5), (&[1, 2], 7)]);
    plan.exclude_ranges(plan.targets[0].process.id, vec![pages(9, 10)]);
    plan.predict(&contents, &ksmd());
    let merging = |plan: &MergePlan| -> Vec<u64> {
        plan.targets.iter().flat_map(|target| &target.ranges).map(|range| range.merging.0).collect()
    };
    assert_eq!((merging(&plan), plan.predicted.effect.freed_frames), (vec![0, 7, 7], Pages(7)));
    plan.limit_to_metadata(&contents, Bytes(1 << 20));
    assert_eq!(merging(&plan), [7, 7], "the contents of the first range are unknown");
}

/// Two equal guests, the second with memory beside its guest's, and a process with the contents of that.
#[test]
fn unreachable_ranges_are_no_partners() {
    let ranges = [(0, pages(0, 100)), (1, pages(0, 100)), (1, pages(200, 300)), (2, pages(0, 100))];
    let census = census_with_ranges(&ranges, &[&["a"], &["b"], &["c"]]);
    let mut plan = make_plan(&census, &constraints(), &|_| None);
    plan.whole_processes = true;
    plan.targets.iter_mut().flat_map(|target| &mut target.ranges).for_each(|range| range.region = range.range);
    let contents = contents_of(&plan, &[(&[0, 1], 30), (&[2, 3], 20), (&[3, 3], 5)]);
    let mut predict = |second: EnrollMethod, first_is_enrolled: bool, first: EnrollMethod| {
        plan.targets[0].ranges[0].enrolled = first_is_enrolled;
        (plan.targets[0].enroll_method, plan.targets[1].enroll_method) = (first, second);
        plan.predict(&contents, &ksmd());
        assert_eq!(plan.targets.len(), 3, "unreachable targets are reported");
        (plan.predicted.effect.freed_frames.0, plan.predicted.effect.scanned_pages.0, plan.predicted.merging.0)
    };
    let in_process = || EnrollMethod::InProcess;
    let none = || EnrollMethod::Unreachable("busy".to_owned());
    let guest = |memory: AddressRange| {
        EnrollMethod::GuestControl(GuestMemoryControl {
            socket: "/run/qmp".into(),
            backends: vec!["/objects/ram".to_owned()],
            memory: vec![memory],
        })
    };
    assert_eq!(predict(in_process(), false, in_process()), (55, 400, 110));
    assert_eq!(predict(guest(pages(0, 100)), false, in_process()), (35, 300, 70));
    assert_eq!(predict(none(), false, in_process()), (5, 200, 10));
    assert_eq!(predict(in_process(), false, none()), (25, 300, 50));
    assert_eq!(predict(in_process(), true, none()), (55, 400, 110), "enrolled by itself");
}

/// The first process shares contents with the second, the second with the third, and the last two with each other.
#[test]
fn targets_that_lose_their_partners_are_skipped() {
    let ranges = [(0, pages(0, 40)), (1, pages(0, 40)), (2, pages(0, 40)), (3, pages(0, 100)), (4, pages(0, 100))];
    let census = census_with_ranges(&ranges, &[&["a"], &["b"], &["c"], &["d"], &["e"]]);
    let plan = make_plan(&census, &constraints(), &|_| None);
    let contents = contents_of(&plan, &[(&[0, 1], 24), (&[1, 2], 10), (&[3, 4], 50)]);
    let skipped_and_freed = |min_pages: u64| {
        let mut plan = plan.clone();
        plan.skip_unprofitable_targets(&contents, Bytes(min_pages * PAGE));
        plan.predict(&contents, &ksmd());
        let skipped: Vec<u32> = plan.skipped.iter().map(|skipped| skipped.pid.0).collect();
        (skipped, plan.predicted.effect.freed_frames.0)
    };
    assert_eq!(skipped_and_freed(0), (vec![], 84));
    assert_eq!(skipped_and_freed(10), (vec![3], 74), "of twelve pages each, less metadata");
    assert_eq!(skipped_and_freed(12), (vec![1, 3, 2], 50), "the second has its savings from both");
    assert_eq!(skipped_and_freed(24), (vec![1, 2, 3, 4, 5], 0));
    let mut scarce = plan.clone();
    scarce.skip_unprofitable_targets(&contents, Bytes(12 * PAGE));
    assert_eq!(scarce.skipped[2].why, "would save only -2.50 KiB net", "both of its partners are gone");
}

/// Since a fork the first two pages have one frame, and the third has its own.
#[test]
fn shared_frames_are_freed_with_their_last_page() {
    let census =
        census_with_ranges(&[(0, pages(0, 10)), (1, pages(0, 10)), (2, pages(0, 10))], &[&["a"], &["b"], &["c"]]);
    let plan = make_plan(&census, &constraints(), &|_| None);
    let mut contents = contents_of(&plan, &[]);
    contents.equal_pages = vec![(EqualPages([0, 0, 3, 4].into()), 7)];
    contents.sharing.use_zero_pages = true;
    contents.zero_pages = vec![ZeroPages { own_frames: [(2, 5)].into(), shared_frames: [(vec![0, 1], 3)].into() }];
    let predict = |contents: &PlanContents, pids: &[u32]| {
        let mut plan = plan.clone();
        plan.retain_processes(|process| pids.contains(&process.pid.0));
        plan.predict(contents, &ksmd());
        let ranges = plan.targets.iter().flat_map(|target| &target.ranges);
        (plan.predicted.effect.freed_frames.0, ranges.map(|range| range.freed_bytes.0 / PAGE).collect::<Vec<_>>())
    };
    assert_eq!(predict(&contents, &[1, 2, 3]), (7 + 3 + 5, vec![3, 3, 2 + 5]));
    assert_eq!(predict(&contents, &[2, 3]), (5, vec![0, 5]), "the first process maps the shared frames");
    assert_eq!(predict(&contents, &[1, 2]), (3, vec![1, 1]), "one frame has no partner");
    assert_eq!(predict(&contents, &[2]), (0, vec![0]));
    assert_eq!(predict(&contents, &[3]), (5, vec![5]));
    // Another process outside of the plan maps the shared frames too. A merged page is left of each content.
    contents.equal_pages = vec![(EqualPages([1, 0, 3, OUTSIDE_PLAN << 1 | 1, 4].into()), 7)];
    contents.zero_pages[0].shared_frames = [(vec![0, 1, OUTSIDE_PLAN], 3)].into();
    assert_eq!(predict(&contents, &[1, 2, 3]), (7 + 5, vec![0, 0, 7 + 5]));
    assert_eq!(predict(&contents, &[1, 2]), (0, vec![0, 0]));
}
