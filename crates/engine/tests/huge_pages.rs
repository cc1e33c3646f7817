//! Memory in huge pages. This is a separate test program that runs one test at a time: the kernel moves pages of other
//! processes to form huge pages.

mod member;

use member::{MemberProcess, domains_root, merge_until_settled};
use std::sync::Mutex;
use tempfile::TempDir;

static TEST_LOCK: Mutex<()> = Mutex::new(());

/// A member with 2048 pages in huge pages, filled from a seed. `None` where there are no huge pages.
fn start_member_with_huge_pages(root: &TempDir, seed: u64) -> Option<MemberProcess> {
    let mut member = MemberProcess::start(root, 2048, &[]);
    member.run_command("huge");
    member.run_command(&format!("fill 0 2048 {seed}"));
    if member.smaps_rollup_kib("AnonHugePages:") == 0 {
        println!("skipped: there are no huge pages");
        return None;
    }
    Some(member)
}

#[test]
fn unprofitable_huge_pages_are_not_split() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    let huge = |member: &mut MemberProcess| {
        member.run_command("huge");
        member.run_command("fill 0 4096 3");
        member.smaps_rollup_kib("AnonHugePages:")
    };
    let mut first = MemberProcess::start(&root, 4096, &[]);
    let before = huge(&mut first);
    if before == 0 {
        println!("skipped: there are no huge pages");
        return;
    }
    first.run_command("copy 2000 1 2500");
    first.run_command("fill 2100 1 0");
    let merged = first.run_merge();
    assert_eq!(
        (merged.number("pages_merged"), merged.number("zeros_freed"), merged.number("unprofitable")),
        (0, 0, 3),
        "{merged:?}"
    );
    assert_eq!(first.smaps_rollup_kib("AnonHugePages:"), before);
    let mut second = MemberProcess::start(&root, 4096, &[]);
    huge(&mut second);
    second.run_merge();
    merge_until_settled(&mut [&mut first, &mut second]);
    assert!(first.smaps_rollup_kib("AnonHugePages:") < before, "splitting them is profitable");
}

#[test]
fn scattered_zeros_of_a_huge_page_are_freed_together() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    let Some(mut member) = start_member_with_huge_pages(&root, 3) else { return };
    (512..1536).step_by(2).for_each(|page| drop(member.run_command(&format!("fill {page} 1 0"))));
    let merged = member.run_merge();
    // At either end a few pages may be in a huge page with too few zeros for a profitable split.
    assert!((480..=512).contains(&merged.number("zeros_freed")), "{merged:?}");
    merge_until_settled(&mut [&mut member]);
}

#[test]
fn unprofitable_zeros_back_off() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    let Some(mut member) = start_member_with_huge_pages(&root, 3) else { return };
    member.run_command("fill 1024 1 0");
    let looks: Vec<u64> = (0..6).map(|_| member.run_merge().number("pages_scanned")).collect();
    assert_eq!((looks[0], looks[5]), (2048, 0), "{looks:?}");
}

#[test]
fn huge_page_of_zeros_takes_one_read_fault() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    let zero_pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/use_zero_page");
    if !zero_pages.is_ok_and(|used| used.trim() == "1") {
        println!("skipped: there is no huge page of zeros");
        return;
    }
    let Some(mut member) = start_member_with_huge_pages(&root, 0) else { return };
    assert_eq!(member.run_merge().number("zeros_freed"), 2048);
    member.check_memory();
    // At least three huge pages are whole; the other pages take a read fault each.
    let merged = member.run_merge();
    assert!((3..=2048 - 3 * 512 + 3).contains(&merged.number("zeros_read")), "{merged:?}");
    assert_eq!((merged.number("cow_breaks"), member.run_merge().number("zeros_read")), (0, 0));
}

#[test]
fn bounded_merge_splits_only_fully_mergeable_huge_pages() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    let start = |bound: &str, more: &[&str], seed: u64| {
        let bound = ["--max-slowdown", bound, "--min-runtime", "36000"];
        let mut member = MemberProcess::start(&root, 4096, &[&bound, more].concat());
        member.run_command("huge");
        member.run_command(&format!("fill 0 4096 {seed}"));
        member
    };
    let (mut first, mut second) = (start("2", &[], 3), start("2", &[], 3));
    let before = [first.smaps_rollup_kib("AnonHugePages:"), second.smaps_rollup_kib("AnonHugePages:")];
    if before[0] == 0 || before[1] == 0 {
        println!("skipped: there are no huge pages");
        return;
    }
    // Members merge at the same moments and read each page twice, so this takes several merges. Returns the pages that
    // were merged, and those that were found and kept.
    let mut merges = |member: &mut MemberProcess| {
        let (mut merged, mut kept) = (0, 0);
        for _ in 0..300 {
            first.run_merge();
            let answer = member.run_merge();
            (merged, kept) = (merged + answer.number("pages_merged"), kept + answer.number("unprofitable"));
            if merged.max(kept) >= 3 * 1024 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        member.check_memory();
        (merged, kept)
    };
    let (merged, kept) = merges(&mut second);
    // At either end there may be pages outside of huge pages.
    assert!(merged < 1024 && kept >= 3 * 1024, "equal tables stay in huge pages: {merged} {kept}");
    assert_eq!(second.smaps_rollup_kib("AnonHugePages:"), before[1]);

    let mut zeros = start("2", &[], 0);
    let found = zeros.run_merge().number("zeros_freed");
    assert!((4096 - 2 * 511..=4096).contains(&found) && zeros.smaps_rollup_kib("AnonHugePages:") == 0, "{found}");
    let mut scattered = start("2", &[], 5);
    (1024..2048).step_by(2).for_each(|page| drop(scattered.run_command(&format!("fill {page} 1 0"))));
    let huge = scattered.smaps_rollup_kib("AnonHugePages:");
    assert_eq!(
        (scattered.run_merge().number("zeros_freed"), scattered.smaps_rollup_kib("AnonHugePages:")),
        (0, huge),
        "zeros are only a part of these huge pages"
    );
    scattered.check_memory();

    // The bound allows the split, or the caller does.
    for (bound, more) in [("100", None), ("2", Some("--split-huge-pages"))] {
        let mut member = start(bound, more.as_slice(), 3);
        let (merged, _) = merges(&mut member);
        assert!(merged >= 3 * 1024 && member.smaps_rollup_kib("AnonHugePages:") <= 2048, "{bound}: {merged}");
    }
    first.check_memory();
    assert_eq!(first.smaps_rollup_kib("AnonHugePages:"), before[0]);
}

#[test]
fn bounded_merge_keeps_mixed_zero_and_paired_huge_pages() {
    let _one = TEST_LOCK.lock();
    let root = domains_root();
    // The bound allows two of the eight or so huge pages.
    let start = || {
        let mut member = MemberProcess::start(&root, 4096, &["--max-slowdown", "30", "--min-runtime", "36000"]);
        member.run_command("huge");
        member.run_command("fill 0 4096 3");
        // Wherever a huge page starts, 12 of its pages have a partner and the others are zeros.
        (0..8).for_each(|part| drop(member.run_command(&format!("fill {} 500 0", part * 512))));
        member
    };
    let (mut first, mut second) = (start(), start());
    let before = [first.smaps_rollup_kib("AnonHugePages:"), second.smaps_rollup_kib("AnonHugePages:")];
    if before[0] < 6 * 2048 || before[1] < 6 * 2048 {
        println!("skipped: there are too few huge pages");
        return;
    }
    // Members merge at the same moments and read each page twice. Each huge page is found at least three times.
    let (mut zeros, mut merged, mut kept) = (0, 0, 0);
    for _ in 0..300 {
        first.run_merge();
        let answer = second.run_merge();
        (zeros, merged, kept) = (
            zeros + answer.number("zeros_freed"),
            merged + answer.number("pages_merged"),
            kept + answer.number("unprofitable"),
        );
        if kept >= 3 * 4096 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(kept >= 3 * 2048, "pages are found and kept: {kept}");
    // At either end there may be pages outside of huge pages.
    let after = [first.smaps_rollup_kib("AnonHugePages:"), second.smaps_rollup_kib("AnonHugePages:")];
    assert!(zeros < 1024 && merged < 1024, "{zeros} {merged} {before:?} {after:?}");
    assert_eq!([first.smaps_rollup_kib("AnonHugePages:"), second.smaps_rollup_kib("AnonHugePages:")], before);
    first.check_memory();
    second.check_memory();
}
