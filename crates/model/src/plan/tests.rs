use super::*;
use crate::census::{Census, GuidedRange, IdleRange, RegionCensus, Savings, SubjectCensus};
use crate::region::{Region, VmFlags};
use crate::units::{Bytes, PageSize};
use crate::{Absent, Counts};
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
        narrow: true,
        speed: Speed::default(),
    }
}

/// A census of processes that have a region of 100 pages each and ranges in it.
fn census(ranges: &[(usize, AddressRange)], arguments: &[&[&str]]) -> Census {
    let region = Region { flags: VmFlags::default(), ..Region::empty(pages(0, 100)) };
    let subjects = arguments.iter().enumerate().map(|(i, arguments)| SubjectCensus {
        process: process(i as u32 + 1, arguments),
        domain: Domain::Host,
        counts: Counts::default(),
        regions: vec![RegionCensus { region: region.clone(), ineligible: None, counts: Counts::default() }],
    });
    let guided = |&(subject, range): &(usize, AddressRange)| {
        let pages = Pages(range.bytes().0 / PAGE);
        let freed = Bytes(pages.0 * PAGE / 2);
        GuidedRange { subject, range, pages, merging: pages, zero: Pages::ZERO, freed, enrolled: false }
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
        (arguments[0] == "ssh-agent").then(|| "holds keys".to_owned())
    };
    let of = |plan: &Plan| -> Vec<(u32, String)> {
        plan.left_alone.iter().map(|left| (left.pid.0, left.why.clone())).collect()
    };
    let plan = plan(&census, &least, &excluded);
    let expected = [(1, "would give back 7.75 KiB net"), (2, "confidential guest (sev-guest)"), (3, "holds keys")];
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
    assert_eq!(plan.targets[0].narrowed, [pages(8, 9)]);
}

#[test]
fn touching_ranges_are_enrolled_as_one() {
    let ranges = [(0, pages(1, 4)), (0, pages(4, 9)), (0, pages(10, 12))];
    let mut plan = plan(&census(&ranges, &[&["a"]]), &constraints(), &|_| None);
    plan.targets[0].ranges[2].enrolled = true;
    let id = plan.targets[0].process.id;
    assert_eq!(plan.to_enrol().collect::<Vec<_>>(), [(id, vec![pages(1, 9)])]);
    assert_eq!(plan.ranges(), 3);
}

#[test]
fn whole_processes_have_no_probe() {
    let whole = Plan { whole: true, targets: Vec::new(), ..Plan::default() };
    let (first, rest) = whole.probe(page_size(), 0.1, Pages(16));
    assert!(first.targets.is_empty() && first.whole && rest.whole);
}

/// Plans of up to three regions with ranges of some density, some enrolled.
fn plans() -> impl Strategy<Value = Plan> {
    let range = (1u64..300, 1u64..400, 0.0f64..=1.0, 0.0f64..=1.0, prop::bool::weighted(0.2));
    let region = prop::collection::vec(range, 1..6);
    prop::collection::vec(region, 1..4).prop_map(|regions| {
        let mut ranges = Vec::new();
        for (i, region) in regions.into_iter().enumerate() {
            let start = i as u64 * 100_000;
            let mut at = start;
            for (gap, length, resident, merging, enrolled) in region {
                let of = |whole: u64, share: f64| (whole as f64 * share) as u64;
                let resident = of(length, resident);
                ranges.push(PlannedRange {
                    range: pages(at + gap, at + gap + length),
                    region: pages(start, start + 100_000),
                    pages: Pages(resident),
                    merging: Pages(of(resident, merging)),
                    zero: Pages(of(resident, merging * merging)),
                    enrolled,
                });
                at += gap + length;
            }
        }
        let merging = ranges.iter().map(|range| range.merging).sum();
        let scanned = ranges.iter().map(|range| range.pages).sum();
        let reach = Reach { freed: merging, scanned, huge_split: Pages(7) };
        let ksmd = Speed::default().time(scanned, merging, Pages::ZERO);
        let predicted = Predicted { reach, merging, regions_added: 5, ksmd, wall: ksmd * 3 };
        let target = Target { process: process(1, &[]), domain: Domain::Host, ranges, narrowed: Vec::new() };
        Plan { targets: vec![target], predicted, ..Plan::default() }
    })
}

proptest! {
    #[test]
    fn a_probe_and_the_rest_are_the_plan(plan in plans(), share in 0.0f64..=1.0, at_least in 0u64..200) {
        let whole = plan.clone();
        let (first, rest) = plan.probe(page_size(), share, Pages(at_least));
        let ranges = |plan: &Plan| -> Vec<PlannedRange> {
            plan.targets.iter().flat_map(|target| target.ranges.clone()).collect()
        };
        let (of_first, of_rest) = (ranges(&first), ranges(&rest));
        for part in [&of_first, &of_rest] {
            prop_assert!(part.windows(2).all(|pair| pair[0].range.end <= pair[1].range.start));
            prop_assert!(part.iter().all(|range| {
                range.range.bytes().0 > 0 && range.zero <= range.merging && range.merging <= range.pages
            }), "{:?}", part);
        }
        // Put together again they are what was cut, page by page and count by count.
        let mut joined: Vec<PlannedRange> = Vec::new();
        let mut all = [of_first.clone(), of_rest.clone()].concat();
        all.sort_by_key(|range| range.range.start);
        for part in all {
            let original = ranges(&whole).into_iter().find(|range| range.range.overlap(part.range).is_some()).unwrap();
            prop_assert_eq!((part.region, part.enrolled), (original.region, original.enrolled));
            match joined.last_mut().filter(|last| last.range.end > original.range.start) {
                Some(last) => {
                    prop_assert_eq!(last.range.end, part.range.start);
                    last.range.end = part.range.end;
                    last.pages += part.pages;
                    last.merging += part.merging;
                    last.zero += part.zero;
                }
                None => joined.push(part),
            }
        }
        prop_assert_eq!(joined, ranges(&whole));

        // Each region has its share, and what is enrolled already is in the first part.
        prop_assert!(of_rest.iter().all(|range| !range.enrolled));
        let fresh = |ranges: &[PlannedRange], region| -> u64 {
            let of_region = ranges.iter().filter(|range| range.region == region && !range.enrolled);
            of_region.map(|range| range.range.bytes().0 / PAGE).sum()
        };
        for range in ranges(&whole) {
            let total = fresh(&ranges(&whole), range.region);
            let wanted = ((total as f64 * share).ceil() as u64).max(at_least).min(total);
            let got = fresh(&of_first, range.region);
            // A piece is cut short by the next one's place at most once.
            prop_assert!(got <= wanted && got + 40 >= wanted, "{} of {} instead of {}", got, total, wanted);
            prop_assert!(got > 0 || wanted == 0);
        }
        let (a, b, c) = (first.predicted, rest.predicted, whole.predicted);
        prop_assert_eq!(a.reach.freed + b.reach.freed, c.reach.freed);
        prop_assert_eq!(a.merging + b.merging, c.merging);
        prop_assert_eq!(a.reach.scanned + b.reach.scanned, c.reach.scanned);
        prop_assert_eq!(a.regions_added + b.regions_added, c.regions_added);
        prop_assert!((a.ksmd + b.ksmd).abs_diff(c.ksmd) <= Duration::from_nanos(1));
    }
}
