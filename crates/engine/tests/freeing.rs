//! Freeing memory while another thread merges: it waits for the pages in hand, and not for the end of the merge.

use pagefold_engine::{Engine, Options, Region};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::thread;

const PAGE: usize = 4096;

/// Merges that are made at most until one of them goes on after all of the small regions were freed beside it.
const ROUNDS: u64 = 30;

/// Entries of `pagemap`: bit 63 of each says that the page is resident, bit 61 that it is a file's
/// (Documentation/admin-guide/mm/pagemap.rst).
fn entries(pagemap: &File, region: &Region<'_>) -> Vec<u64> {
    let mut bytes = vec![0; region.as_slice().len() / PAGE * 8];
    pagemap.read_exact_at(&mut bytes, region.range().start / PAGE as u64 * 8).expect("its own");
    bytes.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect()
}

fn is_resident(entry: &u64) -> bool {
    entry >> 63 == 1
}

fn is_of_a_file(entry: &u64) -> bool {
    entry >> 61 & 1 == 1
}

/// Each page with its content: the number of a pair, and of a round.
fn fill(region: &mut Region<'_>, round: u64) {
    for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE).enumerate() {
        page[..16].copy_from_slice(&[round.to_ne_bytes(), (number as u64 / 2 + 1).to_ne_bytes()].concat());
    }
}

fn is_filled(region: &Region<'_>, round: u64) -> bool {
    region
        .as_slice()
        .chunks_exact(PAGE)
        .enumerate()
        .all(|(number, page)| page[..8] == round.to_ne_bytes() && page[8..16] == (number as u64 / 2 + 1).to_ne_bytes())
}

#[test]
fn memory_is_freed_while_a_merge_goes_on() {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("its owner may");
    let options = Options { root: Some(root.path().to_owned()), max_slowdown: None, ..Options::default() };
    let engine = Engine::join("freeing", &options).expect("a domain");
    let pagemap = File::open("/proc/self/pagemap").expect("its own");
    let frees_beside_the_merge = |round| {
        // 64 MiB whose pages are stored and mapped once zeros were given back.
        let mut large = engine.allocate(16_384 * PAGE).expect("memory");
        fill(&mut large, round);
        let mut zeros = engine.allocate(64 * PAGE).expect("memory");
        zeros.as_mut_slice().fill(0);
        let small: Vec<Region<'_>> = (0..12)
            .map(|_| {
                let mut region = engine.allocate(256 * PAGE).expect("memory");
                fill(&mut region, 1 << 32 | round);
                region
            })
            .collect();
        let beside = thread::scope(|scope| {
            // SAFETY: nobody writes meanwhile; what is unmapped is so by the engine's own functions.
            let merge = scope.spawn(|| unsafe { engine.merge() });
            // That they are given back tells that the merge has found everything, and goes on to store and map.
            while entries(&pagemap, &zeros).iter().any(is_resident) && !merge.is_finished() {
                thread::yield_now();
            }
            drop(small);
            let beside = !entries(&pagemap, &large).iter().all(is_of_a_file);
            assert_eq!(merge.join().expect("it works").expect("a domain that works").zeros.0, 64);
            assert!(entries(&pagemap, &large).iter().all(is_of_a_file), "all of it is merged");
            beside
        });
        assert!(is_filled(&large, round));
        assert_eq!(engine.standing().expect("it works").pages.0, 16_384 + 64);
        beside
    };
    let beside = (1..=ROUNDS).any(frees_beside_the_merge);
    assert!(beside, "in each of {ROUNDS} merges, freeing waited for the end");
}
