//! What a bound on the slow-down leaves to do: as much as has been earned, or is known to be, and what pays.

use pagefold_base::{Bytes, Pages};
use pagefold_engine::{Engine, Merged, Options, Region};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;
use tempfile::TempDir;

const PAGE: usize = 4096;

const HOUR: Duration = Duration::from_secs(3600);

fn root() -> TempDir {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("its owner may");
    root
}

/// A member of a domain of its own.
fn join(root: &TempDir, max_slowdown: impl Into<Option<f64>>, lifetime: Duration) -> Engine {
    let root = Some(root.path().to_owned());
    let options = Options { root, max_slowdown: max_slowdown.into(), lifetime, ..Options::default() };
    Engine::join("bounded", &options).expect("a domain")
}

fn merge(engine: &Engine) -> Merged {
    // SAFETY: nobody writes meanwhile, and no borrow of a region is used.
    unsafe { engine.merge() }.expect("a domain that works")
}

/// Each page with a content that no other has; zeros for a seed of 0.
fn fill(region: &mut Region<'_>, seed: u64) {
    for (number, page) in (1..).zip(region.as_mut_slice().chunks_exact_mut(PAGE)) {
        page.as_chunks_mut::<8>().0.fill((seed * number).to_ne_bytes());
    }
}

/// How many of so many merges looked at anything or tried to.
fn made(engine: &Engine, merges: usize) -> usize {
    (0..merges).filter(|_| merge(engine).cut_short == 0).count()
}

#[test]
fn what_a_program_runs_for_may_be_taken_from_the_beginning_on() {
    for lifetime in [Duration::ZERO, 10 * HOUR] {
        let root = root();
        let engine = join(&root, 0.0001, lifetime);
        let mut region = engine.allocate(20_000 * PAGE).unwrap();
        fill(&mut region, 0);
        let merged = merge(&engine);
        let whole = merged.zeros == Pages(20_000) && merged.cut_short == 0;
        assert_eq!(whole, lifetime > HOUR, "{merged:?}");
        assert!(region.as_slice().iter().all(|&byte| byte == 0));
    }
}

#[test]
fn what_could_not_be_merged_at_the_first_look_is_looked_at_again_at_once() {
    let root = root();
    let engine = join(&root, 0.02, HOUR);
    let (mut one, mut other) = (engine.allocate(2000 * PAGE).unwrap(), engine.allocate(2000 * PAGE).unwrap());
    fill(&mut one, 7);
    fill(&mut other, 7);
    assert_eq!(merge(&engine).merged, Pages::ZERO, "it may be changing");
    assert_eq!(merge(&engine).merged, Pages(4000));
}

#[test]
fn what_others_hold_is_merged_at_once_but_under_a_bound_once_it_was_the_same_twice() {
    for (max_slowdown, looks) in [(None, 1), (Some(0.02), 2)] {
        let root = root();
        let engine = join(&root, max_slowdown, HOUR);
        let mut early = [engine.allocate(2000 * PAGE).unwrap(), engine.allocate(2000 * PAGE).unwrap()];
        early.iter_mut().for_each(|region| fill(region, 7));
        assert!((0..2).any(|_| merge(&engine).merged == Pages(4000)));
        let mut late = engine.allocate(2000 * PAGE).unwrap();
        fill(&mut late, 7);
        let found = (1..4).find(|_| merge(&engine).merged == Pages(2000));
        assert_eq!(found, Some(looks), "{max_slowdown:?}");
    }
}

#[test]
fn what_changes_where_no_sample_looks_is_merged_in_vain_and_then_left_alone() {
    let root = root();
    let engine = join(&root, 0.02, HOUR);
    let mut pair = [(); 2].map(|()| engine.allocate(2000 * PAGE).unwrap());
    pair.iter_mut().for_each(|region| fill(region, 7));
    let mut all = Merged::default();
    for step in 1..=10 {
        // Of the second line.
        let places = |region: &mut [u8]| region.chunks_exact_mut(PAGE).for_each(|page| page[100] = step);
        pair.iter_mut().for_each(|region| places(region.as_mut_slice()));
        all += merge(&engine);
        for (number, page) in (1..).zip(pair.iter().flat_map(|region| region.as_slice().chunks_exact(PAGE))) {
            let number: u64 = (number - 1) % 2000 + 1;
            assert!(
                page[100] == step
                    && page[..100].as_chunks::<8>().0.iter().all(|&word| word == (7 * number).to_ne_bytes())
            );
        }
    }
    // Of ten merges within a second or two.
    assert!((4000..=8000).contains(&all.merged.0) && all.broken.0 >= 4000, "{all:?}");
}

#[test]
fn reading_zeros_that_were_given_back_is_counted_once() {
    let root = root();
    let engine = join(&root, None, Duration::ZERO);
    let mut region = engine.allocate(1000 * PAGE).unwrap();
    fill(&mut region, 0);
    assert_eq!((merge(&engine).zeros, merge(&engine).read), (Pages(1000), Pages::ZERO));
    assert!(region.as_slice()[..600 * PAGE].iter().all(|&byte| byte == 0));
    let before = engine.standing().unwrap().spending.spent;
    let merged = merge(&engine);
    assert_eq!((merged.read, merged.broken), (Pages(600), Pages::ZERO));
    assert!(engine.standing().unwrap().spending.spent > before + merged.time, "beside the merge's own time");
    assert_eq!(merge(&engine).read, Pages::ZERO);
    // Half of what was read is written, and less of what was not.
    region.as_mut_slice()[300 * PAGE..700 * PAGE].fill(1);
    let merged = merge(&engine);
    assert_eq!((merged.read, merged.broken), (Pages::ZERO, Pages(400)));
}

#[test]
fn merges_that_do_not_pay_come_seldom_until_there_is_something_new() {
    let root = root();
    // Room for all the merges that follow.
    let engine = join(&root, 1.0, Duration::ZERO);
    std::thread::sleep(Duration::from_secs(1));
    let mut region = engine.allocate(2000 * PAGE).unwrap();
    for content in [7, 8] {
        fill(&mut region, content);
        assert_eq!(made(&engine, 1), 1, "it might pay");
    }
    let again = made(&engine, 20);
    assert!(again <= 1, "{again} times more");
    let turns = [0, 64 << 20].map(|bytes| engine.has_its_turn(Bytes(bytes)).unwrap());
    assert_eq!(turns, [false, true]);
    let mut more = engine.allocate(16_000 * PAGE).unwrap();
    fill(&mut more, 0);
    assert_eq!(merge(&engine).zeros, Pages(16_000), "at once");
}

#[test]
fn what_did_not_last_is_not_won_again() {
    // Zeros, and pairs that are stored.
    for (seed, stored) in [(0, 0), (7, 1000)] {
        let root = root();
        let engine = join(&root, None, Duration::ZERO);
        let mut pair = [(); 2].map(|()| engine.allocate(1000 * PAGE).unwrap());
        let mut round = || {
            pair.iter_mut().for_each(|region| fill(region, seed));
            let merged = merge(&engine);
            let won = merged.round(PAGE as u64).won.0 / PAGE as i64;
            (((merged.zeros + merged.merged).0, merged.retried.0), (merged.broken.0, merged.short_lived.0), won)
        };
        assert_eq!(round(), ((2000, 0), (0, 0), 2000 - stored));
        assert_eq!(round(), ((0, 0), (2000, 2000), -2000), "and left alone");
        std::thread::sleep(Duration::from_millis(2100));
        assert_eq!(round(), ((2000, 2000), (0, 0), 0));
        assert_eq!(round(), ((0, 0), (2000, 0), 0));
    }
}

#[test]
fn what_is_not_earned_yet_is_not_there_for_merges_that_do_not_pay() {
    let root = root();
    let engine = join(&root, 0.0001, 10 * HOUR);
    let mut zeros = engine.allocate(20_000 * PAGE).unwrap();
    fill(&mut zeros, 0);
    assert_eq!(merge(&engine).zeros, Pages(20_000));
    let mut others = engine.allocate(2000 * PAGE).unwrap();
    for content in [7, 8] {
        fill(&mut others, content);
        assert_eq!(made(&engine, 1), 1, "it might pay");
    }
    // Longer than it rests, but not long enough to earn what was spent.
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(made(&engine, 1), 0);
}
