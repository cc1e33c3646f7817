use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn page() -> PageSize {
    PageSize::new(4096).unwrap()
}

fn limit(place: Place, room: u64, swap: u64) -> Limit {
    let rule = if place == Place::Host { Rule::Available } else { Rule::Max };
    Limit { place, rule, limit: Bytes(room), room: Bytes(room), swap: Bytes(swap) }
}

fn cgroup(path: &str) -> Place {
    Place::Cgroup(path.to_owned())
}

#[test]
fn the_limit_that_binds_is_named_first() {
    let room = Room {
        limits: vec![limit(Place::Host, 100 * MIB, 0), limit(cgroup("/a"), 8 * MIB, 0), limit(cgroup("/b"), 1, 0)],
        unknown: Vec::new(),
    };
    let need = Need::of(Some("/a/vm"), Pages(4096), Pages(1024));
    let judgement = judge(&need, &room, page());
    assert_eq!(judgement.verdict, Verdict::Short);
    let (binding, needed) = &judgement.limits[0];
    // The cgroup gets no credit for frames that come free, the host does.
    assert_eq!((&binding.place, *needed), (&cgroup("/a"), Bytes(16 * MIB)));
    let host = judgement.limits.iter().find(|(limit, _)| limit.place == Place::Host).unwrap();
    assert_eq!(host.1, Bytes(12 * MIB));
    let other = judgement.limits.iter().find(|(limit, _)| limit.place == cgroup("/b")).unwrap();
    assert_eq!(other.1, Bytes::ZERO, "another cgroup is not charged");
}

#[test]
fn cgroups_hold_what_is_below_them_and_no_namesakes() {
    assert!(cgroup("/").holds("/a/b") && cgroup("/a").holds("/a") && cgroup("/a").holds("/a/b"));
    assert!(!cgroup("/a").holds("/ab") && !cgroup("/a/b").holds("/a"));
}

#[test]
fn swap_is_no_room_but_tells_a_slow_host_from_a_killed_one() {
    let need = Need::of(None, Pages(256), Pages::ZERO);
    let verdict = |room, swap| {
        judge(&need, &Room { limits: vec![limit(Place::Host, room, swap)], unknown: Vec::new() }, page()).verdict
    };
    assert_eq!(verdict(MIB, 0), Verdict::Fits);
    assert_eq!(verdict(MIB - 1, 1), Verdict::Swaps);
    assert_eq!(verdict(MIB - 2, 1), Verdict::Short);
}

#[test]
fn a_limit_that_cannot_be_read_is_no_yes() {
    let unknown = vec![(cgroup("/a"), Absent::Denied)];
    let room = Room { limits: vec![limit(Place::Host, 100 * MIB, 0)], unknown };
    assert_eq!(judge(&Need::of(Some("/a"), Pages(1), Pages(0)), &room, page()).verdict, Verdict::Unknown);
    assert_eq!(judge(&Need::of(Some("/a"), Pages(0), Pages(0)), &room, page()).verdict, Verdict::Fits);
}

#[test]
fn parts_are_cut_before_pages() {
    let range = AddressRange { start: 0x1000, end: 0x9000 };
    let part = |start, end| AddressRange { start, end };
    assert_eq!(split(range, &[], 2), [(range, 0)]);
    assert_eq!(split(range, &[0x2000, 0x4000, 0x7000], 2), [(part(0x1000, 0x7000), 2), (part(0x7000, 0x9000), 1)]);
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        Just(Place::Host),
        prop::sample::select(vec!["/", "/a", "/a/b", "/ab", "/c"]).prop_map(|path| Place::Cgroup(path.to_owned())),
    ]
}

fn room() -> impl Strategy<Value = Room> {
    let limit = (place(), 0u64..64, 0u64..16).prop_map(|(place, room, swap)| limit(place, room * 4096, swap * 4096));
    (prop::collection::vec(limit, 0..6), prop::option::weighted(0.1, place())).prop_map(|(limits, unknown)| Room {
        limits,
        unknown: unknown.into_iter().map(|place| (place, Absent::Denied)).collect(),
    })
}

fn needs() -> impl Strategy<Value = Vec<Need>> {
    let path = prop::option::of(prop::sample::select(vec!["/a", "/a/b", "/ab", "/c", "/d"]));
    let need = (path, 0u64..40, 0u64..40).prop_map(|(path, copies, back)| Need::of(path, Pages(copies), Pages(back)));
    prop::collection::vec(need, 0..8)
}

/// What counts to a place, worked out another way.
fn charged(needs: &[Need], place: &Place) -> u64 {
    let below = |path: &str| match place {
        Place::Host => true,
        Place::Cgroup(top) => path == top || format!("{path}/").starts_with(&format!("{}/", top.trim_end_matches('/'))),
    };
    match place {
        Place::Host => needs.iter().map(|need| need.host.0).sum(),
        Place::Cgroup(_) => {
            needs.iter().flat_map(|need| &need.cgroups).filter(|(path, _)| below(path)).map(|(_, pages)| pages.0).sum()
        }
    }
}

proptest! {
    #[test]
    fn a_yes_passes_no_limit(needs in needs(), room in room()) {
        let mut sum = Need::default();
        needs.iter().for_each(|need| sum += need);
        let verdict = judge(&sum, &room, page()).verdict;
        let passed = room.limits.iter().any(|limit| charged(&needs, &limit.place) * 4096 > limit.room.0);
        if verdict == Verdict::Fits {
            prop_assert!(!passed);
        } else {
            prop_assert!(passed || !room.unknown.is_empty(), "refused without a reason");
        }
    }

    #[test]
    fn every_step_that_is_taken_fits_and_the_next_would_not(needs in needs(), room in room()) {
        let count = affordable(&needs, &room, page());
        let fits = |count: usize| {
            let mut sum = Need::default();
            needs[..count].iter().for_each(|need| sum += need);
            judge(&sum, &room, page()).verdict == Verdict::Fits
        };
        for step in 1..=count {
            prop_assert!(fits(step));
        }
        prop_assert!(count == needs.len() || !fits(count + 1));
    }

    #[test]
    fn parts_are_the_range_and_hold_every_page_once(
        pages in prop::collection::btree_set(1u64..100, 0..40), at_most in 1usize..10,
    ) {
        let pages: Vec<u64> = pages.into_iter().map(|page| page * 4096).collect();
        let range = AddressRange { start: 4096, end: 100 * 4096 };
        let parts = split(range, &pages, at_most);
        prop_assert_eq!(parts[0].0.start, range.start);
        prop_assert_eq!(parts[parts.len() - 1].0.end, range.end);
        for pair in parts.windows(2) {
            prop_assert_eq!(pair[0].0.end, pair[1].0.start);
        }
        for (part, count) in parts {
            prop_assert_eq!(pages.iter().filter(|&&page| part.contains(page)).count(), count);
            prop_assert!(count <= at_most);
        }
    }
}
