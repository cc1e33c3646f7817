//! Freeing memory while another thread merges: it waits for the pages that the merge works on, not for the end of the
//! merge.

use pagefold_engine::{AllocatedRegion, Engine, EngineOptions};
use std::fs::File;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::thread;

const PAGE_BYTES: usize = 4096;

/// Maximum number of merges until one of them still runs after all small regions were freed.
const MAX_MERGE_ROUNDS: u64 = 30;

/// Entries of `pagemap`: bit 63 says that the page is resident, bit 61 that it is a file's
/// (Documentation/admin-guide/mm/pagemap.rst).
fn pagemap_entries(pagemap: &File, region: &AllocatedRegion<'_>) -> Vec<u64> {
    let mut bytes = vec![0; region.as_slice().len() / PAGE_BYTES * 8];
    pagemap.read_exact_at(&mut bytes, region.range().start / PAGE_BYTES as u64 * 8).expect("its own");
    bytes.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect()
}

fn is_resident(entry: &u64) -> bool {
    entry >> 63 == 1
}

fn is_file_backed(entry: &u64) -> bool {
    entry >> 61 & 1 == 1
}

/// Fill each page with a content that follows from the number of its pair and of the round.
fn fill_region(region: &mut AllocatedRegion<'_>, round: u64) {
    for (number, page) in region.as_mut_slice().chunks_exact_mut(PAGE_BYTES).enumerate() {
        page[..16].copy_from_slice(&[round.to_ne_bytes(), (number as u64 / 2 + 1).to_ne_bytes()].concat());
    }
}

fn is_filled(region: &AllocatedRegion<'_>, round: u64) -> bool {
    region
        .as_slice()
        .chunks_exact(PAGE_BYTES)
        .enumerate()
        .all(|(number, page)| page[..8] == round.to_ne_bytes() && page[8..16] == (number as u64 / 2 + 1).to_ne_bytes())
}

#[test]
fn memory_is_freed_during_a_merge() {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o700)).expect("permission");
    let options = EngineOptions { root: Some(root.path().to_owned()), max_slowdown: None, ..EngineOptions::default() };
    let engine = Engine::join("freeing", &options).expect("a domain");
    let pagemap = File::open("/proc/self/pagemap").expect("its own");
    let frees_beside_the_merge = |round| {
        // 64 MiB whose pages the merge stores and maps after it has freed the zeros.
        let mut large = engine.allocate(16_384 * PAGE_BYTES).expect("memory");
        fill_region(&mut large, round);
        let mut zeros = engine.allocate(64 * PAGE_BYTES).expect("memory");
        zeros.as_mut_slice().fill(0);
        let small: Vec<AllocatedRegion<'_>> = (0..12)
            .map(|_| {
                let mut region = engine.allocate(256 * PAGE_BYTES).expect("memory");
                fill_region(&mut region, 1 << 32 | round);
                region
            })
            .collect();
        let beside = thread::scope(|scope| {
            // SAFETY: no thread writes during the merge; only the engine's own functions unmap memory.
            let merge = scope.spawn(|| unsafe { engine.merge() });
            // Once the zeros are freed, the merge has found all duplicates and proceeds to store and map them.
            while pagemap_entries(&pagemap, &zeros).iter().any(is_resident) && !merge.is_finished() {
                thread::yield_now();
            }
            drop(small);
            let beside = !pagemap_entries(&pagemap, &large).iter().all(is_file_backed);
            assert_eq!(merge.join().expect("success").expect("a usable domain").zeros_freed.0, 64);
            assert!(pagemap_entries(&pagemap, &large).iter().all(is_file_backed), "all of it is merged");
            beside
        });
        assert!(is_filled(&large, round));
        assert_eq!(engine.status().expect("success").pages.0, 16_384 + 64);
        beside
    };
    let beside = (1..=MAX_MERGE_ROUNDS).any(frees_beside_the_merge);
    assert!(beside, "in each of {MAX_MERGE_ROUNDS} merges, freeing waited for the end of the merge");
}
