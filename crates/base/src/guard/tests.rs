use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn page() -> PageSize {
    PageSize::new(4096).unwrap()
}

fn limit(scope: LimitScope, headroom: u64, swap: u64) -> MemoryLimit {
    let rule = if scope == LimitScope::Host { LimitKind::Available } else { LimitKind::Max };
    MemoryLimit { scope, kind: rule, limit: Bytes(headroom), headroom: Bytes(headroom), swap_headroom: Bytes(swap) }
}

fn cgroup(path: &str) -> LimitScope {
    LimitScope::Cgroup(path.to_owned())
}

#[test]
fn tightest_limit_is_listed_first() {
    let headroom = MemoryHeadroom {
        limits: vec![limit(LimitScope::Host, 100 * MIB, 0), limit(cgroup("/a"), 8 * MIB, 0), limit(cgroup("/b"), 1, 0)],
        unreadable: Vec::new(),
    };
    let need = FrameNeed::for_cgroup(Some("/a/vm"), Pages(4096), Pages(1024));
    let judgement = check_memory(&need, &headroom, page());
    assert_eq!(judgement.verdict, MemoryVerdict::OverLimit);
    let (binding, needed) = &judgement.limits_and_needs[0];
    // The cgroup gets no credit for freed frames, but the host does.
    assert_eq!((&binding.scope, *needed), (&cgroup("/a"), Bytes(16 * MIB)));
    let host = judgement.limits_and_needs.iter().find(|(limit, _)| limit.scope == LimitScope::Host).unwrap();
    assert_eq!(host.1, Bytes(12 * MIB));
    let other = judgement.limits_and_needs.iter().find(|(limit, _)| limit.scope == cgroup("/b")).unwrap();
    assert_eq!(other.1, Bytes::ZERO, "another cgroup is not charged");
}

#[test]
fn scope_contains_descendant_cgroups_only() {
    assert!(
        cgroup("/").contains_cgroup("/a/b")
            && cgroup("/a").contains_cgroup("/a")
            && cgroup("/a").contains_cgroup("/a/b")
    );
    assert!(!cgroup("/a").contains_cgroup("/ab") && !cgroup("/a/b").contains_cgroup("/a"));
}

#[test]
fn need_beyond_limit_fits_only_with_swap() {
    let need = FrameNeed::for_cgroup(None, Pages(256), Pages::ZERO);
    let verdict = |headroom, swap| {
        check_memory(
            &need,
            &MemoryHeadroom { limits: vec![limit(LimitScope::Host, headroom, swap)], unreadable: Vec::new() },
            page(),
        )
        .verdict
    };
    assert_eq!(verdict(MIB, 0), MemoryVerdict::Fits);
    assert_eq!(verdict(MIB - 1, 1), MemoryVerdict::FitsWithSwap);
    assert_eq!(verdict(MIB - 2, 1), MemoryVerdict::OverLimit);
}

#[test]
fn unreadable_limit_gives_unknown() {
    let unknown = vec![(cgroup("/a"), Absent::Denied)];
    let headroom = MemoryHeadroom { limits: vec![limit(LimitScope::Host, 100 * MIB, 0)], unreadable: unknown };
    assert_eq!(
        check_memory(&FrameNeed::for_cgroup(Some("/a"), Pages(1), Pages(0)), &headroom, page()).verdict,
        MemoryVerdict::Unknown
    );
    assert_eq!(
        check_memory(&FrameNeed::for_cgroup(Some("/a"), Pages(0), Pages(0)), &headroom, page()).verdict,
        MemoryVerdict::Fits
    );
}

#[test]
fn parts_start_at_pages() {
    let range = AddressRange { start: 0x1000, end: 0x9000 };
    let part = |start, end| AddressRange { start, end };
    assert_eq!(split_by_page_count(range, &[], 2), [(range, 0)]);
    assert_eq!(
        split_by_page_count(range, &[0x2000, 0x4000, 0x7000], 2),
        [(part(0x1000, 0x7000), 2), (part(0x7000, 0x9000), 1)]
    );
}

fn any_scope() -> impl Strategy<Value = LimitScope> {
    prop_oneof![
        Just(LimitScope::Host),
        prop::sample::select(vec!["/", "/a", "/a/b", "/ab", "/c"]).prop_map(|path| LimitScope::Cgroup(path.to_owned())),
    ]
}

fn any_headroom() -> impl Strategy<Value = MemoryHeadroom> {
    let limit = (any_scope(), 0u64..64, 0u64..16)
        .prop_map(|(scope, headroom, swap)| limit(scope, headroom * 4096, swap * 4096));
    (prop::collection::vec(limit, 0..6), prop::option::weighted(0.1, any_scope())).prop_map(|(limits, unknown)| {
        MemoryHeadroom { limits, unreadable: unknown.into_iter().map(|scope| (scope, Absent::Denied)).collect() }
    })
}

fn any_needs() -> impl Strategy<Value = Vec<FrameNeed>> {
    let path = prop::option::of(prop::sample::select(vec!["/a", "/a/b", "/ab", "/c", "/d"]));
    let need = (path, 0u64..40, 0u64..40)
        .prop_map(|(path, copies, returned)| FrameNeed::for_cgroup(path, Pages(copies), Pages(returned)));
    prop::collection::vec(need, 0..8)
}

/// The pages charged to a scope, computed in another way.
fn charged_pages(needs: &[FrameNeed], scope: &LimitScope) -> u64 {
    let is_charged = |path: &str| match scope {
        LimitScope::Host => true,
        LimitScope::Cgroup(top) => {
            path == top || format!("{path}/").starts_with(&format!("{}/", top.trim_end_matches('/')))
        }
    };
    match scope {
        LimitScope::Host => needs.iter().map(|need| need.host.0).sum(),
        LimitScope::Cgroup(_) => needs
            .iter()
            .flat_map(|need| &need.cgroups)
            .filter(|(path, _)| is_charged(path))
            .map(|(_, pages)| pages.0)
            .sum(),
    }
}

proptest! {
    #[test]
    fn fits_never_exceeds_a_limit(needs in any_needs(), headroom in any_headroom()) {
        let mut sum = FrameNeed::default();
        needs.iter().for_each(|need| sum += need);
        let verdict = check_memory(&sum, &headroom, page()).verdict;
        let exceeds_limit =
            headroom.limits.iter().any(|limit| charged_pages(&needs, &limit.scope) * 4096 > limit.headroom.0);
        if verdict == MemoryVerdict::Fits {
            prop_assert!(!exceeds_limit);
        } else {
            prop_assert!(exceeds_limit || !headroom.unreadable.is_empty(), "refused without a reason");
        }
    }

    #[test]
    fn counted_needs_fit_and_the_next_does_not(needs in any_needs(), headroom in any_headroom()) {
        let count = count_needs_that_fit(&needs, &headroom, page());
        let fits = |count: usize| {
            let mut sum = FrameNeed::default();
            needs[..count].iter().for_each(|need| sum += need);
            check_memory(&sum, &headroom, page()).verdict == MemoryVerdict::Fits
        };
        for step in 1..=count {
            prop_assert!(fits(step));
        }
        prop_assert!(count == needs.len() || !fits(count + 1));
    }

    #[test]
    fn parts_cover_the_range_and_each_page_once(
        pages in prop::collection::btree_set(1u64..100, 0..40), max_pages in 1usize..10,
    ) {
        let pages: Vec<u64> = pages.into_iter().map(|page| page * 4096).collect();
        let range = AddressRange { start: 4096, end: 100 * 4096 };
        let parts = split_by_page_count(range, &pages, max_pages);
        prop_assert_eq!(parts[0].0.start, range.start);
        prop_assert_eq!(parts[parts.len() - 1].0.end, range.end);
        for pair in parts.windows(2) {
            prop_assert_eq!(pair[0].0.end, pair[1].0.start);
        }
        for (part, count) in parts {
            prop_assert_eq!(pages.iter().filter(|&&page| part.contains(page)).count(), count);
            prop_assert!(count <= max_pages);
        }
    }
}
