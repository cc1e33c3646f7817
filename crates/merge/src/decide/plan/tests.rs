use super::*;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::savings::Costs;
use pagefold_base::units::{Bytes, PageSize};
use pagefold_base::{Absent, Counts};
use pagefold_census::results::{Census, GuidedRange, IdleRange, RegionCensus, Savings, SubjectCensus};
use proptest::prelude::*;
use std::collections::BTreeMap;

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

fn constraints() -> Constraints {
    Constraints {
        page_size: page_size(),
        whole: false,
        min_profit: Bytes(0),
        max_map_count: 65530,
        regions: BTreeMap::new(),
        cpu: 0.25,
        speed: Speed::default(),
        first_look: false,
    }
}

/// A census of processes that have a region of 100 pages each and ranges in it.
fn census(ranges: &[(usize, AddressRange)], arguments: &[&[&str]]) -> Census {
    let region = Region { flags: VmFlags::default(), ..Region::empty(pages(0, 100)) };
    let subjects = arguments.iter().enumerate().map(|(i, arguments)| SubjectCensus {
        process: process(i as u32 + 1, arguments),
        domain: Domain::Host,
        witness: false,
        counts: Counts::default(),
        regions: vec![RegionCensus { region: region.clone(), ineligible: None, counts: Counts::default() }],
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
            freed,
            huge_split: Pages::ZERO,
            enrolled: false,
        }
    };
    let ranges: Vec<GuidedRange> = ranges.iter().map(guided).collect();
    let scanned = ranges.iter().map(|range| range.pages).sum();
    let guided = Reach { freed: Pages(77), scanned, huge_split: Pages(3) };
    let savings = Savings { guided, guided_ranges: ranges.len() as u64, ..Savings::default() };
    Census { subjects: subjects.collect(), ranges, savings, ..Census::default() }
}

#[test]
fn boundaries_at_the_edge_of_a_region_add_none() {
    let check = |range, added| {
        let plan = plan(&census(&[(0, range)], &[&["a"]]), &constraints(), &|_| None);
        assert_eq!(plan.predicted.regions_added, added, "{range}");
    };
    check(pages(10, 20), 2);
    check(pages(0, 20), 1);
    check(pages(90, 100), 1);
    check(pages(0, 100), 0);
}

#[test]
fn what_it_costs_follows_from_the_speed_and_the_bound() {
    let plan = plan(&census(&[(0, pages(0, 100))], &[&["a"]]), &constraints(), &|_| None);
    assert_eq!(plan.predicted.ksmd, Duration::from_nanos(100 * 7600));
    assert_eq!(plan.predicted.wall, Duration::from_nanos(400 * 7600));
    let mixed = Speed::default().time(Pages(10), Pages(4), Pages(1));
    assert_eq!(mixed, Duration::from_nanos(10 * 900 + 6 * 5900 + 3 * 6700 + 2400));
    assert_eq!(plan.predicted.reach.freed, Pages(77), "the census counted it");
}

#[test]
fn who_is_left_alone_is_told_with_the_reason() {
    let guest = ["qemu-system-x86_64", "-object", "sev-guest,id=s"];
    let census = census(&[(0, pages(0, 4)), (1, pages(0, 50)), (2, pages(0, 50))], &[&["a"], &guest, &["ssh-agent"]]);
    let least = Constraints { min_profit: Bytes(20 * PAGE), ..constraints() };
    let excluded = |process: &Process| {
        let arguments = process.arguments.as_ref().unwrap();
        let encrypted = arguments.iter().any(|argument| argument.starts_with("sev-guest"));
        let why = if encrypted { Some("encrypted") } else { (arguments[0] == "ssh-agent").then_some("holds keys") };
        why.map(str::to_owned)
    };
    let of = |plan: &Plan| -> Vec<(u32, String)> {
        plan.left_alone.iter().map(|left| (left.pid.0, left.why.clone())).collect()
    };
    let plan = plan(&census, &least, &excluded);
    let expected = [(1, "would give back 7.75 KiB net"), (2, "encrypted"), (3, "holds keys")];
    assert_eq!(of(&plan), expected.map(|(pid, why)| (pid, why.to_owned())));
    assert!(plan.targets.is_empty());
    assert_eq!(plan.predicted.reach.freed, Pages::ZERO);
}

#[test]
fn regions_that_a_process_has_no_room_for_are_left_out() {
    let ranges: Vec<_> = (0..10).map(|i| (0, pages(10 * i, 10 * i + 1 + i % 5))).collect();
    let mut census = census(&ranges, &[&["a"]]);
    census.idle = vec![IdleRange { subject: 0, range: pages(8, 9) }];
    let mut tight = Constraints { max_map_count: 1000, ..constraints() };
    tight.regions.insert(census.subjects[0].process.id, 980);
    let plan = plan(&census, &tight, &|_| None);
    let kept: Vec<u64> = plan.targets[0].ranges.iter().map(|range| range.range.start / PAGE).collect();
    assert_eq!(kept, [20, 30, 40, 80, 90], "the largest, in the order of addresses");
    assert_eq!(plan.narrowed[0].ranges, [pages(8, 9)]);
}

#[test]
fn who_has_nothing_or_too_little_to_gain_is_narrowed_all_the_same() {
    let mut census =
        census(&[(0, pages(0, 50)), (2, pages(0, 4)), (3, pages(0, 50))], &[&["a"], &["b"], &["c"], &["d"]]);
    let idle = |subject| IdleRange { subject, range: pages(60, 90) };
    census.idle = (0..4).map(idle).collect();
    let least = Constraints { min_profit: Bytes(20 * PAGE), ..constraints() };
    let kept_out = |process: &Process| (process.id.pid == Pid(4)).then(|| "holds keys".to_owned());
    let narrowed = |plan: &Plan| -> Vec<u32> { plan.narrowed.iter().map(|narrowed| narrowed.process.pid.0).collect() };
    let targets = |plan: &Plan| -> Vec<u32> { plan.targets.iter().map(|target| target.process.id.pid.0).collect() };
    let mut some = plan(&census, &least, &kept_out);
    assert_eq!((targets(&some), narrowed(&some)), (vec![1], vec![1, 2, 3]), "but for whom nobody may touch");
    assert_eq!(some.predicted.regions_added, 1 + 3 * 2);
    assert_eq!(some.boundaries(some.targets[0].process.id), [50, 60, 90].map(|page| page * PAGE));
    some.narrow(&census.subjects[0], &[pages(90, 95), pages(10, 20)]);
    let first = some.narrowed.iter().find(|narrowed| narrowed.process.pid == Pid(1)).unwrap();
    assert_eq!(first.ranges, [pages(10, 20), pages(60, 95)]);
    some.narrow(&census.subjects[1], &[pages(0, 100)]);
    let second = some.narrowed.iter().find(|narrowed| narrowed.process.pid == Pid(2)).unwrap();
    assert_eq!((&second.ranges[..], &second.boundaries[..]), (&[pages(0, 100)][..], &[][..]), "all of its region");
    // Nobody is touched for ksmd's sake where ksmd has nothing to do.
    some.leave_out(some.targets[0].process.id, vec![pages(0, 100)]);
    assert_eq!((targets(&some), narrowed(&some), some.predicted.regions_added), (vec![], vec![], 0));
    let nobody = plan(&census, &least, &|_| Some("excluded".to_owned()));
    assert_eq!((targets(&nobody), narrowed(&nobody)), (vec![], vec![]));
    let mut chosen = plan(&census, &least, &kept_out);
    chosen.keep_to(|process| process.pid == Pid(1));
    assert_eq!(narrowed(&chosen), [1]);
    let whole = plan(&census, &Constraints { whole: true, ..least }, &kept_out);
    assert!(whole.narrowed.is_empty());
}

#[test]
fn touching_ranges_are_enrolled_as_one() {
    let ranges = [(0, pages(1, 4)), (0, pages(4, 9)), (0, pages(10, 12))];
    let mut plan = plan(&census(&ranges, &[&["a"]]), &constraints(), &|_| None);
    plan.targets[0].ranges[2].enrolled = true;
    assert_eq!(plan.targets[0].to_enrol(false), [pages(1, 9)]);
    plan.targets[0].ranges[1].late = true;
    assert_eq!(plan.targets[0].to_enrol(false), [pages(1, 4)]);
    assert_eq!(plan.targets[0].to_enrol(true), [pages(4, 9)]);
    assert_eq!(plan.ranges(), 3);
}

const fn range(start: u64, end: u64) -> AddressRange {
    AddressRange { start, end }
}

fn planned(start: u64, end: u64) -> PlannedRange {
    let pages = Pages(end - start);
    let range = range(start, end);
    PlannedRange {
        range,
        region: range,
        pages,
        merging: pages,
        zero: Pages::ZERO,
        freed: Bytes::ZERO,
        enrolled: false,
        huge_split: Pages::ZERO,
        late: false,
    }
}

#[test]
fn what_is_left_out_is_cut_out() {
    let check = |holes: &[AddressRange], expected: &[(u64, u64)]| {
        let parts: Vec<_> = planned(10, 20)
            .without(&AddressRange::union(holes.to_vec()))
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
        let parts = planned(5, 45).without(&AddressRange::union(holes.clone()));
        for page in 5..45 {
            let kept = parts.iter().filter(|part| part.range.contains(page)).count();
            prop_assert_eq!(kept, usize::from(!holes.iter().any(|hole| hole.contains(page))));
        }
        prop_assert!(parts.iter().map(|part| part.pages.0).sum::<u64>() <= 40);
    }

    #[test]
    fn where_not_all_ranges_fit_those_worth_most_are_kept(
        ranges in prop::collection::vec((1u64..8, 0u64..8, 0u64..2, any::<bool>()), 1..10),
        room in 0u64..6,
    ) {
        let places: Vec<_> = (0..ranges.len() as u64).map(|i| (0, pages(10 * i, 10 * i + 8))).collect();
        let mut census = census(&places, &[&[]]);
        for (range, (freed, more, huge, enrolled)) in census.ranges.iter_mut().zip(&ranges) {
            range.freed = Bytes(freed * PAGE);
            range.pages = Pages(freed + more * 8);
            range.huge_split = Pages(*huge);
            range.enrolled = *enrolled;
        }
        let has = BTreeMap::from([(census.subjects[0].process.id, 0)]);
        let constraints = Constraints { max_map_count: 4 * room, regions: has, ..constraints() };
        let planned = plan(&census, &constraints, &|_| None);
        let kept: Vec<u64> =
            planned.targets.iter().flat_map(|target| &target.ranges).map(|range| range.range.start).collect();
        let costs = Costs::of(page_size());
        let worth = |range: &GuidedRange| {
            range.freed.0 as i64 - costs.scan * range.pages.0 as i64 - costs.huge_page * range.huge_split.0 as i64
        };
        let fresh: Vec<&GuidedRange> = census.ranges.iter().filter(|range| !range.enrolled).collect();
        let of = |chosen: u32| {
            let some = fresh.iter().enumerate().filter(|(i, _)| chosen >> i & 1 == 1);
            some.map(|(_, range)| worth(range)).sum::<i64>()
        };
        // The census has chosen them all, so that as many stay as fit.
        let most = fresh.len().min(room as usize) as u32;
        let best = (0u32..1 << fresh.len()).filter(|chosen| chosen.count_ones() == most).map(of).max();
        let is_kept = |range: &&&GuidedRange| kept.contains(&range.range.start);
        prop_assert_eq!(fresh.iter().filter(is_kept).count() as u32, most);
        prop_assert_eq!(Some(fresh.iter().filter(is_kept).map(|range| worth(range)).sum()), best);
        prop_assert_eq!(kept.len() - most as usize, census.ranges.len() - fresh.len(), "what is enrolled stays");
    }
}

#[test]
fn a_plan_keeps_to_what_it_must_not_do() {
    let census = census(&[(0, pages(0, 10)), (0, pages(20, 60)), (1, pages(0, 40))], &[&["a"], &["b"]]);
    let made = || plan(&census, &constraints(), &|_| None);
    let kept = |plan: &Plan| -> Vec<(u32, u64)> {
        let targets = plan.targets.iter();
        targets.flat_map(|target| target.ranges.iter().map(|range| (target.process.id.pid.0, range.pages.0))).collect()
    };
    let whole = made();
    let mut same = made();
    same.keep_to(|_| true);
    assert_eq!((kept(&same), same.predicted), (kept(&whole), whole.predicted));
    let mut one = made();
    one.keep_to(|process| process.pid == Pid(2));
    assert_eq!((kept(&one), one.predicted.merging), (vec![(2, 40)], Pages(40)));
    assert_eq!(one.predicted.reach.scanned, Pages(40));
    assert!(one.predicted.reach.freed < whole.predicted.reach.freed);
    // Of the other process the same, piece by piece: half of its one range, and then all of it.
    let mut half = made();
    let range = half.targets[1].ranges[0].range;
    half.leave_out(half.targets[1].process.id, vec![AddressRange { end: range.start + 20 * PAGE, ..range }]);
    assert_eq!((half.predicted.reach.scanned, half.predicted.merging), (Pages(70), Pages(70)));
    let [least, some, all] = [&one, &half, &whole].map(|plan| plan.predicted.reach.freed);
    assert!(least < some && some < all, "{least:?} {some:?} {all:?}");
    assert_eq!(half.predicted.ksmd, whole.predicted.ksmd.mul_f64(70.0 / 90.0));
    half.leave_out(half.targets[0].process.id, vec![AddressRange { start: 0, end: u64::MAX }]);
    assert_eq!((half.predicted.reach.scanned, kept(&half)), (Pages(20), vec![(2, 20)]));
    let mut splitting = made();
    splitting.targets[1].ranges[0].huge_split = Pages(1);
    splitting.keep_huge_pages();
    assert_eq!(kept(&splitting), kept(&whole)[..2]);
}
