//! Memory in huge pages. A program of its own, one test of which runs at a time: the kernel moves others' pages to make
//! huge ones.

mod member;

use member::{Member, root, settle};
use std::sync::Mutex;
use tempfile::TempDir;

static ONE: Mutex<()> = Mutex::new(());

/// A member with 2048 pages in huge ones, filled from a seed. `None` where there are no huge pages.
fn of_huge_pages(root: &TempDir, seed: u64) -> Option<Member> {
    let mut member = Member::start(root, 2048, &[]);
    member.tell("huge");
    member.tell(&format!("fill 0 2048 {seed}"));
    if member.smaps("AnonHugePages:") == 0 {
        println!("skipped: there are no huge pages");
        return None;
    }
    Some(member)
}

#[test]
fn huge_pages_are_kept_where_merging_would_not_pay() {
    let _one = ONE.lock();
    let root = root();
    let huge = |member: &mut Member| {
        member.tell("huge");
        member.tell("fill 0 4096 3");
        member.smaps("AnonHugePages:")
    };
    let mut first = Member::start(&root, 4096, &[]);
    let before = huge(&mut first);
    if before == 0 {
        println!("skipped: there are no huge pages");
        return;
    }
    first.tell("copy 2000 1 2500");
    first.tell("fill 2100 1 0");
    let merged = first.merge();
    assert_eq!((merged.of("merged"), merged.of("zeros"), merged.of("not_worth")), (0, 0, 3), "{merged:?}");
    assert_eq!(first.smaps("AnonHugePages:"), before);
    let mut second = Member::start(&root, 4096, &[]);
    huge(&mut second);
    second.merge();
    settle(&mut [&mut first, &mut second]);
    assert!(first.smaps("AnonHugePages:") < before, "where all of them is equal it pays");
}

#[test]
fn zeros_that_are_scattered_over_a_huge_page_pay_together() {
    let _one = ONE.lock();
    let root = root();
    let Some(mut member) = of_huge_pages(&root, 3) else { return };
    (512..1536).step_by(2).for_each(|page| drop(member.tell(&format!("fill {page} 1 0"))));
    let merged = member.merge();
    // At either end a few may lie in a huge page that is not worth splitting for them.
    assert!((480..=512).contains(&merged.of("zeros")), "{merged:?}");
    settle(&mut [&mut member]);
}

#[test]
fn zeros_that_do_not_pay_are_left_alone_in_time() {
    let _one = ONE.lock();
    let root = root();
    let Some(mut member) = of_huge_pages(&root, 3) else { return };
    member.tell("fill 1024 1 0");
    let looks: Vec<u64> = (0..6).map(|_| member.merge().of("looked_at")).collect();
    assert_eq!((looks[0], looks[5]), (2048, 0), "{looks:?}");
}

#[test]
fn a_huge_page_of_zeros_is_read_by_one_fault() {
    let _one = ONE.lock();
    let root = root();
    let zero_pages = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/use_zero_page");
    if !zero_pages.is_ok_and(|used| used.trim() == "1") {
        println!("skipped: there is no huge page of zeros");
        return;
    }
    let Some(mut member) = of_huge_pages(&root, 0) else { return };
    assert_eq!(member.merge().of("zeros"), 2048);
    member.check();
    // At least three of them are whole, and the rest is read page by page.
    let merged = member.merge();
    assert!((3..=2048 - 3 * 512 + 3).contains(&merged.of("read")), "{merged:?}");
    assert_eq!((merged.of("broken"), member.merge().of("read")), (0, 0));
}

#[test]
fn a_bound_on_the_slow_down_keeps_huge_pages_unless_all_of_them_merges() {
    let _one = ONE.lock();
    let root = root();
    let start = |bound: &str, more: &[&str], seed: u64| {
        let bound = ["--max-slowdown", bound, "--lifetime", "36000"];
        let mut member = Member::start(&root, 4096, &[&bound, more].concat());
        member.tell("huge");
        member.tell(&format!("fill 0 4096 {seed}"));
        member
    };
    let (mut first, mut second) = (start("2", &[], 3), start("2", &[], 3));
    let before = [first.smaps("AnonHugePages:"), second.smaps("AnonHugePages:")];
    if before[0] == 0 || before[1] == 0 {
        println!("skipped: there are no huge pages");
        return;
    }
    // Members merge at the same moments, and look at each page twice, so it takes some tries. What was merged, and what
    // was found and kept.
    let mut merges = |member: &mut Member| {
        let (mut merged, mut kept) = (0, 0);
        for _ in 0..300 {
            first.merge();
            let told = member.merge();
            (merged, kept) = (merged + told.of("merged"), kept + told.of("not_worth"));
            if merged.max(kept) >= 3 * 1024 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        member.check();
        (merged, kept)
    };
    let (merged, kept) = merges(&mut second);
    // At either end there may be pages that are of no huge page.
    assert!(merged < 1024 && kept >= 3 * 1024, "equal tables stay in huge pages: {merged} {kept}");
    assert_eq!(second.smaps("AnonHugePages:"), before[1]);

    let mut zeros = start("2", &[], 0);
    let found = zeros.merge().of("zeros");
    assert!((4096 - 2 * 511..=4096).contains(&found) && zeros.smaps("AnonHugePages:") == 0, "{found}");
    let mut scattered = start("2", &[], 5);
    (1024..2048).step_by(2).for_each(|page| drop(scattered.tell(&format!("fill {page} 1 0"))));
    let huge = scattered.smaps("AnonHugePages:");
    assert_eq!((scattered.merge().of("zeros"), scattered.smaps("AnonHugePages:")), (0, huge), "a part of huge pages");
    scattered.check();

    // The bound allows for it, or the caller does.
    for (bound, more) in [("100", None), ("2", Some("--split-huge-pages"))] {
        let mut member = start(bound, more.as_slice(), 3);
        let (merged, _) = merges(&mut member);
        assert!(merged >= 3 * 1024 && member.smaps("AnonHugePages:") <= 2048, "{bound}: {merged}");
    }
    first.check();
    assert_eq!(first.smaps("AnonHugePages:"), before[0]);
}

#[test]
fn huge_pages_of_zeros_and_of_equal_pages_are_kept_under_a_bound() {
    let _one = ONE.lock();
    let root = root();
    // The bound allows for two huge pages of the eight or so.
    let start = || {
        let mut member = Member::start(&root, 4096, &["--max-slowdown", "30", "--lifetime", "36000"]);
        member.tell("huge");
        member.tell("fill 0 4096 3");
        // Wherever a huge page begins, 12 pages of it have a partner and the others are zeros.
        (0..8).for_each(|part| drop(member.tell(&format!("fill {} 500 0", part * 512))));
        member
    };
    let (mut first, mut second) = (start(), start());
    let before = [first.smaps("AnonHugePages:"), second.smaps("AnonHugePages:")];
    if before[0] < 6 * 2048 || before[1] < 6 * 2048 {
        println!("skipped: there are too few huge pages");
        return;
    }
    // Members merge at the same moments, and look at each page twice. Each huge page is found at least three times.
    let (mut zeros, mut merged, mut kept) = (0, 0, 0);
    for _ in 0..300 {
        first.merge();
        let told = second.merge();
        (zeros, merged, kept) = (zeros + told.of("zeros"), merged + told.of("merged"), kept + told.of("not_worth"));
        if kept >= 3 * 4096 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(kept >= 3 * 2048, "pages are found and kept: {kept}");
    // At either end there may be pages that are of no huge page.
    let after = [first.smaps("AnonHugePages:"), second.smaps("AnonHugePages:")];
    assert!(zeros < 1024 && merged < 1024, "{zeros} {merged} {before:?} {after:?}");
    assert_eq!([first.smaps("AnonHugePages:"), second.smaps("AnonHugePages:")], before);
    first.check();
    second.check();
}
