//! Files of a domain that are removed while it is in use, as a cleaner of `/dev/shm` does: no member's memory changes,
//! and members merge again afterwards.

mod member;

use member::{Member, PAGE, root};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const PAGES: u64 = 600;

fn remove(root: &TempDir, names: &[&str]) {
    for name in names {
        std::fs::remove_file(root.path().join("test").join(name)).expect("it is there");
    }
}

/// Two members that have merged 500 pages of a seed.
fn merged_pair(root: &TempDir, seed: u64) -> [Member; 2] {
    let mut members = [0; 2].map(|_| Member::start(root, PAGES, &[]));
    for member in &mut members {
        member.tell(&format!("fill 0 500 {seed}"));
        member.merge();
    }
    members[0].merge();
    members
}

/// Members find each other again: what all hold is merged in all of them.
fn all_merge_again(members: &mut [Member]) {
    for member in members.iter_mut() {
        member.tell("fill 0 600 99");
    }
    for _ in 0..4 {
        for member in members.iter_mut() {
            // What was written too soon after it was merged is left alone otherwise.
            member.tell("advise 0 600 0");
            member.merge();
        }
    }
    let store = members[0].standing().of("store");
    assert_eq!(store, PAGES * PAGE, "they share it");
    for member in members {
        member.check();
        assert_eq!(member.standing().of("merged"), PAGES);
    }
}

/// Old members free what newcomers have stored, and these overwrite it, if the two share anything.
fn newcomers_and_old_members_keep_their_memory(names: &[&str]) {
    let root = root();
    let [a, b] = merged_pair(&root, 5);
    remove(&root, names);
    let [c, d] = [0; 2].map(|_| Member::start(&root, PAGES, &[]));
    let mut members = [a, b, c, d];
    let mut step = |lines: &[(usize, String)]| {
        for (at, line) in lines {
            members[*at].tell(line);
        }
        for _ in 0..3 {
            for at in lines.iter().map(|(at, _)| *at) {
                // Or what was written too soon after it was merged is left alone.
                members[at].tell("adopt 0 600");
                members[at].merge();
                members.iter_mut().for_each(Member::check);
            }
        }
    };
    let fill = |at: usize, from: u64, seed: u64| (at, format!("fill {from} 200 {seed}"));
    step(&[fill(2, 0, 6), fill(3, 0, 6)]);
    // The old ones need nothing of what they have stored any more, so that the newcomers have room.
    step(&[(0, "fill 0 600 30".into()), (1, "fill 0 600 31".into())]);
    step(&[fill(2, 200, 7), fill(3, 200, 7)]);
    step(&[(0, "check".into()), (1, "check".into())]);
    step(&[fill(2, 400, 8), fill(3, 400, 8)]);
    all_merge_again(&mut members);
}

/// What a cleaner removes that goes by the age of files: these keep the time of the last join.
#[test]
fn members_keep_their_memory_when_the_header_and_the_lock_are_removed() {
    newcomers_and_old_members_keep_their_memory(&["domain", "lock"]);
}

#[test]
fn members_keep_their_memory_when_the_slots_are_removed() {
    newcomers_and_old_members_keep_their_memory(&["slots"]);
}

#[test]
fn members_keep_their_memory_when_the_lock_is_removed() {
    newcomers_and_old_members_keep_their_memory(&["lock"]);
}

/// The stores that a member maps or has open, by their inodes.
fn stores(member: &Member) -> BTreeSet<u64> {
    let process = Path::new("/proc").join(member.child.id().to_string());
    let maps = std::fs::read_to_string(process.join("maps")).expect("it lives");
    let inode = |line: &str| line.split_ascii_whitespace().nth(4).and_then(|inode| inode.parse().ok());
    let mapped = maps.lines().filter(|line| line.contains("/memfd:pagefold-store")).filter_map(inode);
    let descriptors = std::fs::read_dir(process.join("fd")).expect("it lives").flatten().map(|entry| entry.path());
    let is_store =
        |path: &PathBuf| path.read_link().is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:pagefold-store"));
    let open = descriptors.filter(is_store).filter_map(|path| Some(path.metadata().ok()?.ino()));
    mapped.chain(open).collect()
}

/// The memory of a store is free once no process maps or opens it.
#[test]
fn unwritten_pages_leave_a_former_store_and_merge_anew() {
    let root = root();
    let mut members = merged_pair(&root, 5);
    let former = stores(&members[0]);
    assert_eq!((former.len(), stores(&members[1])), (1, former.clone()));
    remove(&root, &["domain", "lock"]);
    for _ in 0..4 {
        members.iter_mut().for_each(|member| drop(member.merge()));
        members.iter_mut().for_each(Member::check);
    }
    let present = stores(&members[0]);
    assert_eq!((present.len(), stores(&members[1])), (1, present.clone()));
    assert!(present.is_disjoint(&former), "the former store is still in use");
    for member in &mut members {
        let standing = member.standing();
        assert_eq!([standing.of("merged"), standing.of("store")], [500, 500 * PAGE]);
    }
}

/// A member that goes to another store gives up its references to the former one, of which it still maps something,
/// while another member is about to free what has no references.
#[cfg(feature = "fault-points")]
#[test]
fn a_member_that_joins_anew_keeps_what_it_maps_of_the_former_store() {
    let root = root();
    let mut leaving = Member::start(&root, PAGES, &[]);
    let mut freeing = Member::start_with(&root, PAGES, &[], Some("stop 3 before references are found"));
    for member in [&mut leaving, &mut freeing] {
        member.tell("fill 0 500 5");
        member.merge();
    }
    assert_eq!(leaving.merge().of("merged"), 500);
    freeing.tell("fill 0 500 6");
    // It gives up its own references, frees what it can at the next merge, and tries again at the one after the next.
    (0..3).for_each(|_| drop(freeing.merge()));
    freeing.say("merge");
    assert!(!freeing.has_ended_or_stopped());
    remove(&root, &["domain", "lock"]);
    // Of two members one merge does not free anything, nor remove the file of the references that were given up.
    let _newcomer = Member::start(&root, PAGES, &[]);
    leaving.merge();
    freeing.go_on();
    freeing.answer();
    leaving.check();
    // Nor does it overwrite anything.
    freeing.tell("copy 300 200 0");
    for _ in 0..3 {
        freeing.merge();
        freeing.check();
        leaving.check();
    }
}

/// Remove a file of the domain, those that a cleaner takes by their age, or all; how many were removed.
fn clean(domain: &Path, random: &mut impl FnMut(u64) -> u64) -> u64 {
    let found: Vec<_> = domain.read_dir().into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    if found.is_empty() {
        return 0;
    }
    let named = |name: &str| domain.join(name);
    let chosen = match random(8) {
        0 => vec![named("domain"), named("lock")],
        1 => found,
        2 => vec![named("lock")],
        3 => vec![named("slots")],
        4 => vec![named("domain")],
        _ => vec![found[random(found.len() as u64) as usize].clone()],
    };
    // It may have gone meanwhile.
    chosen.iter().map(|path| u64::from(std::fs::remove_file(path).is_ok())).sum()
}

/// One member after another that fills, copies, merges, forks, checks, leaves and is killed at random until the end: how
/// many merges there were, and how many pages they merged.
fn storm(root: &TempDir, seed: u64, is_over: &(dyn Fn() -> bool + Sync)) -> (u64, u64) {
    let mut random = generator(seed);
    let (mut merges, mut merged) = (0, 0);
    let mut member = Member::start(root, PAGES, &[]);
    while !is_over() {
        let (from, count) = (random(PAGES), 1 + random(PAGES / 2));
        let (to, count) = (random(PAGES - count), count.min(PAGES - from));
        match random(16) {
            0..5 => drop(member.tell(&format!("fill {from} {count} {}", random(4)))),
            5 => drop(member.tell(&format!("copy {} {count} {from}", to.min(PAGES - count)))),
            6..12 => {
                // What was written too soon after it was merged is left alone otherwise.
                member.tell("adopt 0 600");
                let told = member.merge();
                assert!(told.0.contains("looked_at"), "a merge failed: {told:?}");
                (merges, merged) = (merges + 1, merged + told.of("merged"));
            }
            12 => {
                member.tell("fork");
                member.tell(&format!("fill {from} {count} 3"));
                member.merge();
                // It checks its memory, writes to it, merges and checks again.
                assert_eq!(member.tell("child"), "same");
            }
            13 => {
                let mut killed = std::mem::replace(&mut member, Member::start(root, PAGES, &[]));
                // At work, unless that is done by then.
                killed.say("merge");
                std::thread::sleep(Duration::from_micros(random(2000)));
                killed.kill();
            }
            14 => {
                assert_eq!(member.tell("leave"), "left");
                member = Member::start(root, PAGES, &[]);
            }
            _ => {}
        }
        member.check();
    }
    (merges, merged)
}

fn generator(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut state = seed;
    move |below| {
        // D. Knuth's MMIX generator (TAOCP 3.3.4).
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}

/// `PAGEFOLD_FUZZ` says for how many seconds, `PAGEFOLD_SEED` with which choices, which are printed.
#[test]
fn members_keep_their_memory_while_files_are_removed_at_random() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let seed = number("PAGEFOLD_SEED").unwrap_or_else(|| std::process::id().into());
    println!("PAGEFOLD_SEED={seed}");
    let end = Instant::now() + Duration::from_secs(number("PAGEFOLD_FUZZ").unwrap_or(8));
    let root = root();
    let (failed, removed) = (AtomicBool::new(false), AtomicU64::new(0));
    let is_over = || Instant::now() >= end || failed.load(Ordering::Relaxed);
    let (merges, merged) = std::thread::scope(|scope| {
        let (root, failed, removed, is_over) = (&root, &failed, &removed, &is_over);
        let members: Vec<_> = (0..4)
            .map(|at| {
                scope.spawn(move || {
                    // A member that dies or differs ends the others, too.
                    let done = std::panic::catch_unwind(|| storm(root, seed.wrapping_add(at), is_over));
                    failed.fetch_or(done.is_err(), Ordering::Relaxed);
                    done.unwrap_or_else(|why| std::panic::resume_unwind(why))
                })
            })
            .collect();
        let mut random = generator(!seed);
        while !is_over() {
            // Long enough at times for members to merge, and short enough to come between two of their steps.
            std::thread::sleep(Duration::from_micros([100, 3_000, 30_000, 300_000][random(4) as usize]));
            removed.fetch_add(clean(&root.path().join("test"), &mut random), Ordering::Relaxed);
        }
        let done = members.into_iter().map(|member| member.join().expect("its memory is right"));
        done.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1))
    });
    let removed = removed.into_inner();
    println!("{merges} merges of {merged} pages beside {removed} removals");
    assert!(merged > 0 && removed > 0);
}
