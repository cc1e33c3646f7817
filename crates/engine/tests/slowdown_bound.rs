//! Merging under a bound on the slowdown: the engine uses earned or promised CPU time only, and only for profitable
//! merges.

use pagefold_base::{Bytes, Pages};
use pagefold_engine::{AllocatedRegion, Engine, EngineOptions, MergeCounters};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;

const PAGE_BYTES: usize = 4096;

const HOUR: Duration = Duration::from_secs(3600);

fn domains_root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("permission");
    root
}

/// A member of a domain for this test alone.
fn join_own_domain(root: &TempDir, max_slowdown: impl Into<Option<f64>>, min_runtime: Duration) -> Engine {
    let root = Some(root.path().to_owned());
    let options = EngineOptions { root, max_slowdown: max_slowdown.into(), min_runtime, ..EngineOptions::default() };
    Engine::join("bounded", &options).expect("a domain")
}

fn merge_once(engine: &Engine) -> MergeCounters {
    // SAFETY: no other thread writes during the merge, and no borrow of a region is used.
    unsafe { engine.merge() }.expect("a usable domain")
}

/// Give each page a content of its own; zeros for a seed of 0.
fn fill_distinct(region: &mut AllocatedRegion<'_>, seed: u64) {
    for (number, page) in (1..).zip(region.as_mut_slice().chunks_exact_mut(PAGE_BYTES)) {
        page.as_chunks_mut::<8>().0.fill((seed * number).to_ne_bytes());
    }
}

/// How many of `merges` merges scanned or tried to scan anything.
fn count_active_merges(engine: &Engine, merges: usize) -> usize {
    (0..merges).filter(|_| merge_once(engine).incomplete_merges == 0).count()
}

#[test]
fn min_runtime_can_be_spent_from_the_start() {
    for lifetime in [Duration::ZERO, 10 * HOUR] {
        let root = domains_root();
        let engine = join_own_domain(&root, 0.0001, lifetime);
        let mut region = engine.allocate(20_000 * PAGE_BYTES).unwrap();
        fill_distinct(&mut region, 0);
        let merged = merge_once(&engine);
        let is_complete = merged.zeros_freed == Pages(20_000) && merged.incomplete_merges == 0;
        assert_eq!(is_complete, lifetime > HOUR, "{merged:?}");
        assert!(region.as_slice().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn unmerged_candidates_are_rescanned_at_once() {
    let root = domains_root();
    let engine = join_own_domain(&root, 0.02, HOUR);
    let (mut first, mut second) =
        (engine.allocate(2000 * PAGE_BYTES).unwrap(), engine.allocate(2000 * PAGE_BYTES).unwrap());
    fill_distinct(&mut first, 7);
    fill_distinct(&mut second, 7);
    assert_eq!(merge_once(&engine).pages_merged, Pages::ZERO, "the pages may be volatile");
    assert_eq!(merge_once(&engine).pages_merged, Pages(4000));
}

#[test]
fn bounded_merge_waits_for_two_equal_samples() {
    for (max_slowdown, expected) in [(None, 1), (Some(0.02), 2)] {
        let root = domains_root();
        let engine = join_own_domain(&root, max_slowdown, HOUR);
        let mut early = [engine.allocate(2000 * PAGE_BYTES).unwrap(), engine.allocate(2000 * PAGE_BYTES).unwrap()];
        early.iter_mut().for_each(|region| fill_distinct(region, 7));
        assert!((0..2).any(|_| merge_once(&engine).pages_merged == Pages(4000)));
        let mut late = engine.allocate(2000 * PAGE_BYTES).unwrap();
        fill_distinct(&mut late, 7);
        let merges = (1..4).find(|_| merge_once(&engine).pages_merged == Pages(2000));
        assert_eq!(merges, Some(expected), "{max_slowdown:?}");
    }
}

#[test]
fn change_missed_by_samples_backs_off_after_merge() {
    let root = domains_root();
    let engine = join_own_domain(&root, 0.02, HOUR);
    let mut pair = [(); 2].map(|()| engine.allocate(2000 * PAGE_BYTES).unwrap());
    pair.iter_mut().for_each(|region| fill_distinct(region, 7));
    let mut totals = MergeCounters::default();
    for step in 1..=10 {
        // A byte in the second cache line.
        let change_pages = |region: &mut [u8]| region.chunks_exact_mut(PAGE_BYTES).for_each(|page| page[100] = step);
        pair.iter_mut().for_each(|region| change_pages(region.as_mut_slice()));
        totals += merge_once(&engine);
        for (number, page) in (1..).zip(pair.iter().flat_map(|region| region.as_slice().chunks_exact(PAGE_BYTES))) {
            let number: u64 = (number - 1) % 2000 + 1;
            assert!(
                page[100] == step
                    && page[..100].as_chunks::<8>().0.iter().all(|&word| word == (7 * number).to_ne_bytes())
            );
        }
    }
    // In ten merges within one or two seconds.
    assert!((4000..=8000).contains(&totals.pages_merged.0) && totals.cow_breaks.0 >= 4000, "{totals:?}");
}

#[test]
fn reading_freed_zeros_is_counted_once() {
    let root = domains_root();
    let engine = join_own_domain(&root, None, Duration::ZERO);
    let mut region = engine.allocate(1000 * PAGE_BYTES).unwrap();
    fill_distinct(&mut region, 0);
    assert_eq!((merge_once(&engine).zeros_freed, merge_once(&engine).zeros_read), (Pages(1000), Pages::ZERO));
    assert!(region.as_slice()[..600 * PAGE_BYTES].iter().all(|&byte| byte == 0));
    let spent_before = engine.status().unwrap().time_use.spent;
    let merged = merge_once(&engine);
    assert_eq!((merged.zeros_read, merged.cow_breaks), (Pages(600), Pages::ZERO));
    assert!(engine.status().unwrap().time_use.spent > spent_before + merged.program_time, "plus the time of faults");
    assert_eq!(merge_once(&engine).zeros_read, Pages::ZERO);
    // Writes half of the pages that were read, and fewer of the other pages.
    region.as_mut_slice()[300 * PAGE_BYTES..700 * PAGE_BYTES].fill(1);
    let merged = merge_once(&engine);
    assert_eq!((merged.zeros_read, merged.cow_breaks), (Pages::ZERO, Pages(400)));
}

#[test]
fn unprofitable_merges_back_off_until_new_memory() {
    let root = domains_root();
    // Enough CPU time for all merges below.
    let engine = join_own_domain(&root, 1.0, Duration::ZERO);
    std::thread::sleep(Duration::from_secs(1));
    let mut region = engine.allocate(2000 * PAGE_BYTES).unwrap();
    for content in [7, 8] {
        fill_distinct(&mut region, content);
        assert_eq!(count_active_merges(&engine, 1), 1, "the merge may be profitable");
    }
    let active_merges = count_active_merges(&engine, 20);
    assert!(active_merges <= 1, "{active_merges} more merges");
    let is_due = [0, 64 << 20].map(|bytes| engine.is_merge_due(Bytes(bytes)).unwrap());
    assert_eq!(is_due, [false, true]);
    let mut new_region = engine.allocate(16_000 * PAGE_BYTES).unwrap();
    fill_distinct(&mut new_region, 0);
    assert_eq!(merge_once(&engine).zeros_freed, Pages(16_000), "new memory is merged at once");
}

#[test]
fn short_lived_pages_are_not_counted_as_gain() {
    // Zeros, and pairs that are stored.
    for (seed, stored) in [(0, 0), (7, 1000)] {
        let root = domains_root();
        let engine = join_own_domain(&root, None, Duration::ZERO);
        let mut pair = [(); 2].map(|()| engine.allocate(1000 * PAGE_BYTES).unwrap());
        let mut round = || {
            pair.iter_mut().for_each(|region| fill_distinct(region, seed));
            let merged = merge_once(&engine);
            let won = merged.to_work_round(PAGE_BYTES as u64).net_gained.0 / PAGE_BYTES as i64;
            (
                ((merged.zeros_freed + merged.pages_merged).0, merged.unlikely_to_last.0),
                (merged.cow_breaks.0, merged.early_cow_breaks.0),
                won,
            )
        };
        assert_eq!(round(), ((2000, 0), (0, 0), 2000 - stored));
        assert_eq!(round(), ((0, 0), (2000, 2000), -2000), "rewritten pages are skipped");
        std::thread::sleep(Duration::from_millis(2100));
        assert_eq!(round(), ((2000, 2000), (0, 0), 0));
        assert_eq!(round(), ((0, 0), (2000, 0), 0));
    }
}

#[test]
fn unearned_time_is_not_spent_on_unprofitable_merges() {
    let root = domains_root();
    let engine = join_own_domain(&root, 0.0001, 10 * HOUR);
    let mut zeros = engine.allocate(20_000 * PAGE_BYTES).unwrap();
    fill_distinct(&mut zeros, 0);
    assert_eq!(merge_once(&engine).zeros_freed, Pages(20_000));
    let mut others = engine.allocate(2000 * PAGE_BYTES).unwrap();
    for content in [7, 8] {
        fill_distinct(&mut others, content);
        assert_eq!(count_active_merges(&engine, 1), 1, "the merge may be profitable");
    }
    // Longer than the pause between merges, but too short to earn the time spent.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(count_active_merges(&engine, 1), 0);
}
