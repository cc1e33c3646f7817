//! Merging in the background of a running program.

use pagefold_engine::{Engine, EngineOptions, Error};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn background_merger_stays_within_its_cpu_share() {
    let root = tempfile::tempdir_in("/dev/shm").expect("a directory in memory");
    let options = EngineOptions { root: Some(root.path().to_owned()), max_slowdown: None, ..EngineOptions::default() };
    let engine = Arc::new(Engine::join("background", &options).expect("a domain"));
    let mut region = engine.allocate(1000 * 4096).expect("memory");
    for (number, page) in region.as_mut_slice().chunks_exact_mut(4096).enumerate() {
        page.fill((number / 2 % 100) as u8);
    }
    // SAFETY: nothing is unmapped until `background` is dropped, below.
    let background = match unsafe { engine.merge_in_background(0.5) } {
        Err(Error::WriteProtectUnavailable(error)) => {
            println!("skipped: userfaultfd is not permitted: {error}");
            return;
        }
        other => other.expect("a thread"),
    };
    assert!(background.wait_for_merges(2, Duration::from_secs(60)).expect("success") >= 2);
    drop(background);
    let status = engine.status().expect("success");
    assert_eq!((status.merged.0, status.totals.zeros_freed.0), (990, 10), "{status:?}");
    assert_eq!(status.store_bytes.0, 99 * 4096, "one page for each byte value but zero");
    for (number, page) in region.as_slice().chunks_exact(4096).enumerate() {
        assert!(page.iter().all(|&byte| byte == (number / 2 % 100) as u8), "page {number}");
    }
    // SAFETY: the region is unmapped next, at the same address.
    unsafe { engine.disown_in_place(region.range()) }.expect("whole pages");
    drop(region);
    for _ in 0..3 {
        // SAFETY: nothing is adopted any more.
        unsafe { engine.merge_while_running() }.expect("success");
    }
    assert_eq!(engine.status().expect("success").store_bytes.0, 0, "contents that no member maps are freed");
    assert!(root.path().join("background").exists());
    engine.prepare_exit();
    assert!(!root.path().join("background").exists(), "there is no other member");
}
