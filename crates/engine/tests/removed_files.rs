//! Files of a domain that are removed while it is in use, as a cleaner of `/dev/shm` does. The memory of members does
//! not change, and members merge again afterwards.

mod member;

use member::{MemberProcess, PAGE_BYTES, domains_root};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const MEMBER_PAGES: u64 = 600;

fn remove_files(root: &TempDir, names: &[&str]) {
    for name in names {
        std::fs::remove_file(root.path().join("test").join(name)).expect("it exists");
    }
}

/// Two members that have merged 500 pages of one seed.
fn merged_pair(root: &TempDir, seed: u64) -> [MemberProcess; 2] {
    let mut members = [0; 2].map(|_| MemberProcess::start(root, MEMBER_PAGES, &[]));
    for member in &mut members {
        member.run_command(&format!("fill 0 500 {seed}"));
        member.run_merge();
    }
    members[0].run_merge();
    members
}

/// Members find each other again: common contents are merged in all of them.
fn assert_all_merge_again(members: &mut [MemberProcess]) {
    for member in members.iter_mut() {
        member.run_command("fill 0 600 99");
    }
    for _ in 0..4 {
        for member in members.iter_mut() {
            // Otherwise pages that were written soon after their merge are skipped.
            member.run_command("advise 0 600 0");
            member.run_merge();
        }
    }
    let store = members[0].read_status().number("store_bytes");
    assert_eq!(store, MEMBER_PAGES * PAGE_BYTES, "all members share the pages");
    for member in members {
        member.check_memory();
        assert_eq!(member.read_status().number("merged"), MEMBER_PAGES);
    }
}

/// Old members free contents of newcomers, and newcomers overwrite contents of old members, if the two use the same
/// files by mistake.
fn assert_memory_survives_removal_of(names: &[&str]) {
    let root = domains_root();
    let [a, b] = merged_pair(&root, 5);
    remove_files(&root, names);
    let [c, d] = [0; 2].map(|_| MemberProcess::start(&root, MEMBER_PAGES, &[]));
    let mut members = [a, b, c, d];
    let mut step = |lines: &[(usize, String)]| {
        for (at, line) in lines {
            members[*at].run_command(line);
        }
        for _ in 0..3 {
            for at in lines.iter().map(|(at, _)| *at) {
                // Otherwise pages that were written soon after their merge are skipped.
                members[at].run_command("adopt 0 600");
                members[at].run_merge();
                members.iter_mut().for_each(MemberProcess::check_memory);
            }
        }
    };
    let fill = |at: usize, from: u64, seed: u64| (at, format!("fill {from} 200 {seed}"));
    step(&[fill(2, 0, 6), fill(3, 0, 6)]);
    // The old members no longer need their stored contents, so that the newcomers have space.
    step(&[(0, "fill 0 600 30".into()), (1, "fill 0 600 31".into())]);
    step(&[fill(2, 200, 7), fill(3, 200, 7)]);
    step(&[(0, "check".into()), (1, "check".into())]);
    step(&[fill(2, 400, 8), fill(3, 400, 8)]);
    assert_all_merge_again(&mut members);
}

/// The files that a cleaner removes by their age: these keep the time of the last join.
#[test]
fn memory_survives_removal_of_header_and_lock() {
    assert_memory_survives_removal_of(&["domain", "lock"]);
}

#[test]
fn memory_survives_removal_of_slots() {
    assert_memory_survives_removal_of(&["slots"]);
}

#[test]
fn memory_survives_removal_of_lock() {
    assert_memory_survives_removal_of(&["lock"]);
}

/// The inodes of the stores that a member maps or has open.
fn store_inodes(member: &MemberProcess) -> BTreeSet<u64> {
    let process = Path::new("/proc").join(member.child.id().to_string());
    let maps = std::fs::read_to_string(process.join("maps")).expect("it is alive");
    let inode = |line: &str| line.split_ascii_whitespace().nth(4).and_then(|inode| inode.parse().ok());
    let mapped = maps.lines().filter(|line| line.contains("/memfd:pagefold-store")).filter_map(inode);
    let descriptors = std::fs::read_dir(process.join("fd")).expect("it is alive").flatten().map(|entry| entry.path());
    let is_store =
        |path: &PathBuf| path.read_link().is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:pagefold-store"));
    let open = descriptors.filter(is_store).filter_map(|path| Some(path.metadata().ok()?.ino()));
    mapped.chain(open).collect()
}

/// The memory of a store is free once no process maps or opens it.
#[test]
fn unwritten_pages_move_to_the_new_store() {
    let root = domains_root();
    let mut members = merged_pair(&root, 5);
    let former = store_inodes(&members[0]);
    assert_eq!((former.len(), store_inodes(&members[1])), (1, former.clone()));
    remove_files(&root, &["domain", "lock"]);
    for _ in 0..4 {
        members.iter_mut().for_each(|member| drop(member.run_merge()));
        members.iter_mut().for_each(MemberProcess::check_memory);
    }
    let present = store_inodes(&members[0]);
    assert_eq!((present.len(), store_inodes(&members[1])), (1, present.clone()));
    assert!(present.is_disjoint(&former), "the former store is still in use");
    for member in &mut members {
        let status = member.read_status();
        assert_eq!([status.number("merged"), status.number("store_bytes")], [500, 500 * PAGE_BYTES]);
    }
}

/// A member that moves to another store gives up its references to the former one, of which it still maps pages.
/// Meanwhile another member is about to free contents without references.
#[cfg(feature = "fault-points")]
#[test]
fn rejoined_member_keeps_pages_of_former_store() {
    let root = domains_root();
    let mut leaving = MemberProcess::start(&root, MEMBER_PAGES, &[]);
    let mut freeing = MemberProcess::start_with(&root, MEMBER_PAGES, &[], Some("stop 3 before references are found"));
    for member in [&mut leaving, &mut freeing] {
        member.run_command("fill 0 500 5");
        member.run_merge();
    }
    assert_eq!(leaving.run_merge().number("pages_merged"), 500);
    freeing.run_command("fill 0 500 6");
    // It gives up its own references, frees what it can at the next merge, and tries again two merges later.
    (0..3).for_each(|_| drop(freeing.run_merge()));
    freeing.send_command("merge");
    assert!(!freeing.has_ended_or_stopped());
    remove_files(&root, &["domain", "lock"]);
    // With two members, one merge frees nothing, and keeps the file of the references that were given up.
    let _newcomer = MemberProcess::start(&root, MEMBER_PAGES, &[]);
    leaving.run_merge();
    freeing.continue_process();
    freeing.read_answer();
    leaving.check_memory();
    // It does not overwrite any content either.
    freeing.run_command("copy 300 200 0");
    for _ in 0..3 {
        freeing.run_merge();
        freeing.check_memory();
        leaving.check_memory();
    }
}

/// Remove a random file of the domain, the files that a cleaner selects by age, or all files. Returns how many were
/// removed.
fn remove_random_files(domain: &Path, random: &mut impl FnMut(u64) -> u64) -> u64 {
    let paths: Vec<_> = domain.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    if paths.is_empty() {
        return 0;
    }
    let domain_path = |name: &str| domain.join(name);
    let chosen = match random(8) {
        0 => vec![domain_path("domain"), domain_path("lock")],
        1 => paths,
        2 => vec![domain_path("lock")],
        3 => vec![domain_path("slots")],
        4 => vec![domain_path("domain")],
        _ => vec![paths[random(paths.len() as u64) as usize].clone()],
    };
    // The file may have disappeared in the meantime.
    chosen.iter().map(|path| u64::from(std::fs::remove_file(path).is_ok())).sum()
}

/// Run one member after another that fills, copies, merges, forks, checks, leaves and is killed at random until the
/// end. Returns the number of merges and of merged pages.
fn run_random_members(root: &TempDir, seed: u64, is_over: &(dyn Fn() -> bool + Sync)) -> (u64, u64) {
    let mut random = random_generator(seed);
    let (mut merges, mut merged) = (0, 0);
    let mut member = MemberProcess::start(root, MEMBER_PAGES, &[]);
    while !is_over() {
        let (from, count) = (random(MEMBER_PAGES), 1 + random(MEMBER_PAGES / 2));
        let (to, count) = (random(MEMBER_PAGES - count), count.min(MEMBER_PAGES - from));
        match random(16) {
            0..5 => drop(member.run_command(&format!("fill {from} {count} {}", random(4)))),
            5 => drop(member.run_command(&format!("copy {} {count} {from}", to.min(MEMBER_PAGES - count)))),
            6..12 => {
                // Otherwise pages that were written soon after their merge are skipped.
                member.run_command("adopt 0 600");
                let answer = member.run_merge();
                assert!(answer.0.contains("pages_scanned"), "a merge failed: {answer:?}");
                (merges, merged) = (merges + 1, merged + answer.number("pages_merged"));
            }
            12 => {
                member.run_command("fork");
                member.run_command(&format!("fill {from} {count} 3"));
                member.run_merge();
                // The child checks its memory, writes to it, merges and checks again.
                assert_eq!(member.run_command("child"), "same");
            }
            13 => {
                let mut killed = std::mem::replace(&mut member, MemberProcess::start(root, MEMBER_PAGES, &[]));
                // In the middle of a merge, unless that is done by then.
                killed.send_command("merge");
                std::thread::sleep(Duration::from_micros(random(2000)));
                killed.kill();
            }
            14 => {
                assert_eq!(member.run_command("leave"), "left");
                member = MemberProcess::start(root, MEMBER_PAGES, &[]);
            }
            _ => {}
        }
        member.check_memory();
    }
    (merges, merged)
}

fn random_generator(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        // D. Knuth's MMIX generator (TAOCP 3.3.4).
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// `PAGEFOLD_FUZZ` sets the duration in seconds, `PAGEFOLD_SEED` the random choices; the seed is printed.
#[test]
fn memory_survives_random_file_removal() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seed = number("PAGEFOLD_SEED").unwrap_or_else(|| std::process::id().into());
    println!("PAGEFOLD_SEED={seed}");
    let end = Instant::now() + Duration::from_secs(number("PAGEFOLD_FUZZ").unwrap_or(8));
    let root = domains_root();
    let (failed, removed) = (AtomicBool::new(false), AtomicU64::new(0));
    let is_over = || Instant::now() >= end || failed.load(Ordering::Relaxed);
    let (merges, merged) = std::thread::scope(|scope| {
        let (root, failed, removed, is_over) = (&root, &failed, &removed, &is_over);
        let members: Vec<_> = (0..4)
            .map(|at| {
                scope.spawn(move || {
                    // A member that dies or whose memory differs ends the other members too.
                    let result = std::panic::catch_unwind(|| run_random_members(root, seed.wrapping_add(at), is_over));
                    failed.fetch_or(result.is_err(), Ordering::Relaxed);
                    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                })
            })
            .collect();
        let mut random = random_generator(!seed);
        while !is_over() {
            // Sometimes long enough for members to merge, and sometimes short enough to fall between two of their
            // steps.
            std::thread::sleep(Duration::from_micros([100, 3_000, 30_000, 300_000][random(4) as usize]));
            removed.fetch_add(remove_random_files(&root.path().join("test"), &mut random), Ordering::Relaxed);
        }
        let counts = members.into_iter().map(|member| member.join().expect("its memory is right"));
        counts.fold((0, 0), |sum, count| (sum.0 + count.0, sum.1 + count.1))
    });
    let removed = removed.into_inner();
    println!("{merges} merges of {merged} pages during {removed} removals");
    assert!(merged > 0 && removed > 0);
}
