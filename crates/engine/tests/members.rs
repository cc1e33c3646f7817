//! Members of a domain that merge, write, fork and die: what each one's memory reads as never changes, what nobody maps
//! leaves the store, and what is saved is where the kernel's own accounting shows it.

mod member;

use member::{Member, PAGE, Told, root};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[test]
fn equal_memory_of_two_members_is_there_once() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 2000, &[]), Member::start(&root, 2000, &["--threads", "2"]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 2000 7");
    }
    // What only one of them has so far.
    first.tell("fill 1000 100 8");
    // But for code, which members of other tests share.
    let footprint = |member: &mut Member| member.smaps("Pss_Anon:") + member.smaps("Pss_Shmem:");
    let before = footprint(&mut first) + footprint(&mut second);
    let mappings = first.standing().of("mappings");
    assert_eq!(first.merge().of("merged"), 0, "nobody else was seen to hold any of it");
    let merged = second.merge();
    assert_eq!((merged.of("merged"), merged.of("stored")), (1900, 1900));
    let merged = first.merge();
    assert_eq!((merged.of("merged"), merged.of("stored"), merged.of("runs")), (1900, 0, 2));
    first.check();
    second.check();
    let after = footprint(&mut first) + footprint(&mut second);
    // Less what the engine itself takes: its index, what its last merge worked with.
    assert!(before - after > 1900 * 4 - 800, "{before} KiB before, {after} after");
    assert!(first.smaps("Pss_Shmem:") >= 1900 * 2, "half of what is shared by two");
    let standing = first.standing();
    assert_eq!((standing.of("merged"), standing.of("store")), (1900, 1900 * PAGE));
    assert!(standing.of("mappings") <= mappings + 4, "runs are mapped as one: {standing:?}");
    assert_eq!(second.merge().of("looked_at"), 100, "only what is not merged is looked at again");
}

#[test]
fn what_a_process_holds_twice_is_merged_without_others() {
    let root = root();
    let mut member = Member::start(&root, 1000, &[]);
    member.tell("fill 0 500 3");
    member.tell("copy 500 500 0");
    let merged = member.merge();
    assert_eq!((merged.of("merged"), merged.of("stored"), merged.of("runs")), (1000, 500, 2));
    member.check();
    assert_eq!(member.standing().of("store"), 500 * PAGE);
}

#[test]
fn what_a_program_says_of_its_memory_is_believed() {
    let root = root();
    let mut member = Member::start(&root, 2000, &[]);
    let write = |member: &mut Member, seed: u64| {
        member.tell(&format!("fill 0 500 {seed}"));
        (1..4).for_each(|part| drop(member.tell(&format!("copy {} 500 0", part * 500))));
    };
    let merge = |member: &mut Member| {
        let merged = member.merge();
        ["merged", "broken", "left_alone"].map(|what| merged.of(what))
    };
    write(&mut member, 7);
    member.tell("advise 0 500 2");
    member.tell("advise 500 500 1");
    assert_eq!(merge(&mut member), [1000, 0, 500], "the first part is hot, and the second unmergeable");
    assert_eq!(member.standing().of("hot"), 500);
    member.tell("advise 0 1000 0");
    assert_eq!(merge(&mut member), [1000, 0, 0]);

    member.tell("advise 0 2000 2");
    assert_eq!(member.standing().of("merged"), 2000, "until it is written");
    write(&mut member, 8);
    assert_eq!(merge(&mut member), [0, 2000, 0]);
    // Longer than what was written once is left alone.
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(merge(&mut member), [0, 0, 2000]);
    member.tell("advise 0 2000 0");
    assert_eq!(merge(&mut member), [2000, 0, 0]);
    member.check();
}

#[test]
fn members_that_merge_at_the_same_time_share_out_what_is_to_be_stored() {
    // Several batches, with each content twice in each member.
    const CONTENTS: u64 = 3000;
    let root = root();
    let mut members: Vec<Member> = (0..4).map(|_| Member::start(&root, 2 * CONTENTS, &[])).collect();
    for member in &mut members {
        member.tell(&format!("fill 0 {CONTENTS} 7"));
        member.tell(&format!("copy {CONTENTS} {CONTENTS} 0"));
    }
    let mappings: Vec<u64> = members.iter_mut().map(|member| member.standing().of("mappings")).collect();
    let mut merged = 0;
    for _ in 0..4 {
        members.iter_mut().for_each(|member| member.say("merge"));
        let told = members.iter_mut().map(|member| Told(member.answer().expect("it lives")));
        merged += told.map(|told| told.of("merged")).sum::<u64>();
    }
    assert_eq!(merged, 4 * 2 * CONTENTS);
    for (member, before) in members.iter_mut().zip(mappings) {
        member.check();
        let standing = member.standing();
        assert_eq!(standing.of("store"), CONTENTS * PAGE, "what was stored in vain has left");
        let now = standing.of("mappings");
        assert!(now < before + 200, "{now} mappings, {before} before: what lies together is stored together");
    }
}

#[test]
fn zeros_are_given_back() {
    let root = root();
    let mut member = Member::start(&root, 5000, &[]);
    member.tell("fill 0 5000 0");
    member.tell("fill 100 1 9");
    let before = member.smaps("Rss:");
    let merged = member.merge();
    assert_eq!((merged.of("zeros"), merged.of("merged")), (4999, 0));
    let after = member.smaps("Rss:");
    assert!(before - after > 4999 * 4 - 1000, "{before} KiB before, {after} after");
    member.check();
    // Written again at once, they are left alone for a while.
    member.tell("fill 200 10 0");
    let merged = member.merge();
    assert_eq!((merged.of("broken"), merged.of("left_alone"), merged.of("zeros")), (10, 10, 0));
    member.check();
}

#[test]
fn what_is_written_becomes_ordinary_memory_and_leaves_the_store() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 1000, &[]), Member::start(&root, 1000, &[]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 1000 5");
        member.merge();
    }
    assert_eq!(first.merge().of("merged"), 1000);
    second.tell("fill 0 600 6");
    assert_eq!(second.merge().of("broken"), 600);
    first.check();
    second.check();
    first.tell("fill 0 500 4");
    for _ in 0..3 {
        first.merge();
        second.merge();
    }
    first.check();
    second.check();
    assert_eq!(first.standing().of("store"), 500 * PAGE, "pages 500 to 599 of the first, the others of both");
    first.tell("clear 0 1000");
    second.tell("clear 0 1000");
    for _ in 0..3 {
        first.merge();
        second.merge();
    }
    assert_eq!(second.standing().of("store"), 0);
    first.check();
    second.check();
}

#[test]
fn what_a_killed_member_had_is_freed() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 1000, &[]), Member::start(&root, 1000, &[]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 1000 5");
        member.merge();
    }
    first.merge();
    first.kill();
    second.merge();
    second.check();
    assert_eq!(second.standing().of("store"), 1000 * PAGE, "it is still mapped");
    second.tell("fill 0 1000 6");
    second.merge();
    second.merge();
    assert_eq!(second.standing().of("store"), 0);
    second.kill();
    let mut third = Member::start(&root, 10, &[]);
    assert_eq!(third.standing().of("store"), 0);
    assert_eq!(third.merge().of("merged"), 0);
}

#[test]
fn the_last_to_leave_takes_the_domain_along() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 100, &[]), Member::start(&root, 100, &[]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 100 5");
        member.merge();
    }
    first.tell("leave");
    assert!(root.path().join("test").exists());
    second.check();
    second.tell("leave");
    assert!(!root.path().join("test").exists());
    // What was killed is swept by whoever comes next, to whatever domain.
    Member::start(&root, 100, &[]).kill();
    std::fs::rename(root.path().join("test"), root.path().join("other")).expect("nobody is there");
    drop(Member::start(&root, 100, &[]));
    assert!(!root.path().join("other").exists());
}

/// Something may clean `/dev/shm` up while members are there.
#[test]
fn files_that_go_away_take_nothing_with_them() {
    let root = root();
    let domain = root.path().join("test");
    let remove = |which: &str| {
        for entry in domain.read_dir().expect("a directory").flatten() {
            if entry.file_name().to_string_lossy().starts_with(which) {
                std::fs::remove_file(entry.path()).expect("ours");
            }
        }
    };
    for which in ["", "member-", "index-", "domain", "directory"] {
        let (mut first, mut second) = (Member::start(&root, 600, &[]), Member::start(&root, 600, &[]));
        for member in [&mut first, &mut second] {
            member.tell("fill 0 500 5");
            member.merge();
        }
        first.merge();
        if which == "directory" {
            std::fs::remove_dir_all(&domain).expect("ours")
        } else {
            remove(which)
        }
        let mut third = Member::start(&root, 600, &[]);
        third.tell("fill 0 500 6");
        third.tell("copy 500 100 0");
        for _ in 0..3 {
            for member in [&mut first, &mut second, &mut third] {
                member.tell("merge");
                member.check();
            }
            second.tell("fill 0 100 7");
        }
        drop((first, second, third));
        let _ = std::fs::remove_dir_all(&domain);
    }
}

#[test]
fn a_program_that_closes_what_it_does_not_know_keeps_its_files_and_its_memory() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 600, &[]), Member::start(&root, 600, &[]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 500 5");
        member.merge();
    }
    first.merge();
    first.tell("close");
    for _ in 0..3 {
        first.tell("fill 0 50 6");
        first.tell("copy 500 100 0");
        first.merge();
        first.check();
        second.merge();
        second.check();
    }
    assert_eq!(first.tell("others"), "untouched");
    assert!(first.standing().of("merged") > 0);
}

/// A child may be forked of a member in any way, and be the only one that still maps something.
#[test]
fn a_forked_child_keeps_what_it_has() {
    let root = root();
    let mut member = Member::start(&root, 1000, &[]);
    member.tell("fill 0 500 3");
    member.tell("copy 500 500 0");
    member.merge();
    member.tell("fork");
    member.tell("fork");
    member.tell("fill 0 1000 4");
    for _ in 0..3 {
        member.merge();
    }
    // Another one fills the store with something else, should there be room that is not free.
    let mut other = Member::start(&root, 1000, &[]);
    other.tell("fill 0 500 9");
    other.tell("copy 500 500 0");
    other.merge();
    assert_eq!(member.tell("child"), "same");
    assert_eq!(member.tell("child"), "same");
    member.check();
    other.check();
    for _ in 0..2 {
        member.merge();
        other.merge();
    }
    assert_eq!(other.standing().of("store"), 500 * PAGE);
}

#[test]
fn memory_may_be_written_while_it_is_merged() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 3000, &[]), Member::start(&root, 3000, &["--threads", "2"]));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 2000 7");
    }
    let begin = Instant::now();
    // What is written all the time is left alone for a second and more: so it may take some turns.
    for turn in 0.. {
        let member = if turn % 2 == 0 { &mut first } else { &mut second };
        let told = Told(member.tell("race 40"));
        if told.0.contains("needs Linux 6.4 and userfaultfd") {
            println!("skipped: userfaultfd is not permitted");
            return;
        }
        assert_eq!(told.of("lost"), 0, "{told:?}");
        member.check();
        let told = member.standing();
        if told.of("broken") > 0 && told.of("store") > 0 {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "none were merged and written: {told:?}");
    }
}

#[test]
fn a_bound_on_the_slow_down_bounds_it() {
    let root = root();
    let mut member = Member::start(&root, 20_000, &["--max-slowdown", "0"]);
    member.tell("fill 0 20000 3");
    let merged = member.merge();
    assert_eq!((merged.of("cut_short"), merged.of("looked_at")), (1, 0));
}

/// A run in the midst of a region takes two mappings. Where there are few left, they are for what gives back most.
#[test]
fn the_longest_runs_are_merged_where_mappings_are_short() {
    const PAGES: u64 = 7100;
    // At either end so many pages, of which every second one is a run by itself.
    const SINGLES: u64 = 400;
    // Between them: two that are stored and mapped in more than one batch, and six that are not.
    const LONG: u64 = 2 * 2500 + 6 * 64;
    // For half as many runs.
    const LEFT: u64 = 40;
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("a limit");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > 300_000 {
        println!("skipped: a vm.max_map_count of {limit} takes too long to come near");
        return;
    }
    let most = limit / 8 * 6;
    // Each has drawn a number, by which it begins somewhere in what it has found.
    for _ in 0..4 {
        let root = root();
        let mut member = Member::start(&root, PAGES, &[]);
        member.tell("small");
        member.tell(&format!("fill 0 {PAGES} 7"));
        let mut copy = |to: u64, count: u64, from: u64| drop(member.tell(&format!("copy {to} {count} {from}")));
        (0..SINGLES).step_by(4).for_each(|page| copy(page + 2, 1, page));
        (PAGES - SINGLES..PAGES).step_by(4).for_each(|page| copy(page + 2, 1, page));
        copy(3100, 2500, 500);
        [5700, 6000, 6300].into_iter().for_each(|page| copy(page + 100, 64, page));
        member.tell(&format!("mappings {LEFT}"));
        let before = member.standing().of("mappings");
        assert!(before.abs_diff(most - LEFT) <= 3, "{before} mappings of {most} that there may be");

        let merged = member.merge();
        assert_eq!((merged.of("looked_at"), merged.of("failed")), (PAGES, 0), "{merged:?}");
        assert_eq!(merged.of("merged") + merged.of("not_worth"), LONG + SINGLES, "{merged:?}");
        // There are fewer single pages among them than any of the long runs has.
        assert!(merged.of("merged") >= LONG, "{merged:?}");
        let after = member.standing().of("mappings");
        assert!(after > before && after <= most, "{before} mappings before and {after} after, of {most}");
        member.check();
        // What was left out is tried again, and what is there stays.
        member.merge();
        let standing = member.standing();
        assert!(standing.of("merged") >= merged.of("merged") && standing.of("mappings") <= most, "{standing:?}");
        member.check();
    }
}

/// How long the random members go on: `PAGEFOLD_FUZZ` is seconds, and `PAGEFOLD_SOAK` some minutes.
enum Length {
    Rounds(u64),
    Until(Instant),
}

impl Length {
    fn wanted() -> Self {
        let seconds = std::env::var("PAGEFOLD_FUZZ").ok().map(|text| text.parse().expect("PAGEFOLD_FUZZ is seconds"));
        match seconds {
            Some(seconds) => Self::Until(Instant::now() + Duration::from_secs(seconds)),
            None if std::env::var_os("PAGEFOLD_SOAK").is_some() => Self::Rounds(20_000),
            None => Self::Rounds(1000),
        }
    }

    fn is_over(&self, round: u64) -> bool {
        match self {
            Self::Rounds(rounds) => round >= *rounds,
            Self::Until(end) => Instant::now() >= *end,
        }
    }
}

/// With what random members are started. The first ones have no bound. Of the others the last one has no more time for
/// merges than it has earned, so that some are cut short; the rest have room for them from the beginning on.
const STARTS: [&[&str]; 5] = [
    &[],
    &["--threads", "2"],
    &["--max-slowdown", "2", "--lifetime", "3600"],
    &["--max-slowdown", "100", "--lifetime", "3600", "--threads", "2"],
    &["--max-slowdown", "100"],
];

/// How many of these have no bound.
const UNBOUNDED: u64 = 2;

/// Two to four members that call whatever there is, do to their memory whatever a program may, fork, exec and die, all
/// at random, beside a copy of what each page has to hold. `PAGEFOLD_SEED` says which calls; it is printed. If writers
/// may be held up, threads merge while their program writes, too.
fn merge_at_random(while_written: bool) {
    let root = root();
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
    let seed = std::env::var("PAGEFOLD_SEED").map_or_else(|_| now(), |seed| seed.parse().expect("a number"));
    println!("PAGEFOLD_SEED={seed}");
    let mut state = seed;
    let mut random = move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    const PAGES: u64 = 600;
    // One without a bound is always there, and one with.
    let start = |at: usize, which: u64| {
        let which = match at {
            0 => which % UNBOUNDED,
            1 => UNBOUNDED + which % (STARTS.len() as u64 - UNBOUNDED),
            _ => which,
        };
        (Member::start(&root, PAGES, STARTS[which as usize]), which >= UNBOUNDED)
    };
    let count = 2 + random(3);
    let (mut members, mut bounded): (Vec<Member>, Vec<bool>) =
        (0..count as usize).map(|at| start(at, random(STARTS.len() as u64))).unzip();
    // Merges that looked at anything, and pages that they merged, without a bound and with one.
    let (mut merges, mut merged) = ([0_u64; 2], [0_u64; 2]);
    let mut note = |bounded: bool, told: &Told| {
        merges[usize::from(bounded)] += u64::from(told.of("looked_at") > 0);
        merged[usize::from(bounded)] += told.of("merged");
    };
    let (length, mut round) = (Length::wanted(), 0);
    while !length.is_over(round) {
        round += 1;
        let at = random(count) as usize;
        let (from, most, to) = (random(PAGES), 1 + random(PAGES / 2), random(PAGES));
        let (seed, which, other) = (random(4), random(2), random(count) as usize);
        let next = random(STARTS.len() as u64);
        let count = most.min(PAGES - from.max(to));
        let few = count.min(50);
        let member = &mut members[at];
        match random(if while_written { 70 } else { 64 }) {
            0..14 => drop(member.tell(&format!("fill {from} {count} {seed}"))),
            14..18 => drop(member.tell(&format!("copy {to} {count} {from}"))),
            18..20 => drop(member.tell(&format!("clear {from} {count}"))),
            20..30 => {
                if which == 0 {
                    // Nothing is known any more of pages that did not stay merged.
                    member.tell("adopt 0 600");
                }
                note(bounded[at], &member.merge());
            }
            30..35 => {
                // At the same time, with all of their memory.
                for member in [at, other] {
                    members[member].tell("adopt 0 600");
                }
                let both = if at == other { vec![at] } else { vec![at, other] };
                both.iter().for_each(|&member| members[member].say("merge"));
                for member in both {
                    note(bounded[member], &Told(members[member].answer().expect("it lives")));
                }
            }
            35 => drop(member.tell("running")),
            36..40 => member.check(),
            40 => {
                let how = random(3);
                member.tell(&format!("advise {from} {count} {how}"));
            }
            41 => drop(member.tell(&format!("forsake {from} {count}"))),
            42..44 => drop(member.tell("adopt 0 600")),
            44 => drop(member.tell(&format!("unmap {from} {few}"))),
            45..47 => drop(member.tell("map 0 600")),
            47 => drop(member.tell(&format!("move {from} {few}"))),
            48 => drop(member.tell("back")),
            49 => drop(member.tell(&format!("grow {from}"))),
            50 => drop(member.tell(&format!("dontneed {from} {count}"))),
            51 => drop(member.tell(&format!("guard {from} {few}"))),
            52 => drop(member.tell(&format!("protect {from} {count} {which}"))),
            53..55 => drop(member.tell("expose 0 600")),
            55 => drop(member.standing()),
            56 => {
                member.tell("fork");
                members[other].merge();
                members[at].tell(&format!("fill {from} {count} 3"));
                members[at].merge();
                assert_eq!(members[at].tell("child"), "same");
            }
            57 => assert_eq!(member.tell("exec"), "ready"),
            58 => {
                assert_eq!(member.tell("leave"), "left");
                (members[at], bounded[at]) = start(at, next);
            }
            59 => {
                let next = start(at, next);
                let mut member = std::mem::replace(&mut members[at], next.0);
                bounded[at] = next.1;
                if which == 0 {
                    // At work, unless that is done by then.
                    member.tell("adopt 0 600");
                    member.say("merge");
                    std::thread::sleep(Duration::from_micros(random(2000)));
                }
                member.kill();
            }
            60 => {
                member.tell(&format!("munmap {from} {few}"));
                note(bounded[at], &member.merge());
                // Before anything else of the program's lies there, which would be taken for adopted.
                member.tell(&format!("forsake {from} {few}"));
            }
            61 => drop(member.tell(&format!("replace {from} {few}"))),
            62 => drop(member.tell(&format!("mapfile {from} {few}"))),
            63 => {
                // With a bound it is to have its turn, and to find what it has found before.
                let merges = if bounded[at] { 8 } else { 1 };
                for _ in 0..merges {
                    note(bounded[at], &member.merge());
                    std::thread::sleep(Duration::from_millis(15));
                }
            }
            64..68 => drop(member.tell("background")),
            68 => {
                let told = member.tell("foreground");
                assert!(told.contains(" merges: "), "{told}");
            }
            _ => {
                let told = Told(member.tell("race 3"));
                assert_eq!(told.of("lost"), 0, "{told:?}");
            }
        }
    }
    for member in &mut members {
        member.check();
        assert_eq!(member.tell("files"), "untouched");
    }
    let [without, with] = [0, 1].map(|bounded| format!("{} pages by {} merges", merged[bounded], merges[bounded]));
    println!("{round} rounds of {count} members merged {without} without a bound, and {with} with one");
    assert!(merged[0] > merges[0], "there was something to merge");
    assert!(merges[1] > 0, "none with a bound has had its turn");
}

#[test]
fn random_members_keep_their_memory() {
    merge_at_random(false);
}

/// ThreadSanitizer, which knows nothing of memory protection, leaves it out by its name.
#[test]
fn members_that_merge_at_random_while_they_write_keep_their_memory() {
    let root = root();
    if Member::start(&root, 10, &[]).tell("running").contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return;
    }
    merge_at_random(true);
}

/// A member that dies at any step leaves a domain in which the others go on, and nothing that is not freed.
#[cfg(feature = "fault-points")]
#[test]
fn a_member_may_die_at_any_step() {
    let life = |root: &tempfile::TempDir, fault: &str| {
        let mut member = Member::start_with(root, 1000, &[], Some(fault));
        let script = ["fill 0 300 2", "copy 300 300 0", "merge", "fill 100 100 5", "merge", "fill 0 1000 0", "merge"];
        script.iter().all(|line| member.ask(line).is_some())
    };
    let mut ended = false;
    let mut at = 0;
    while !ended {
        at += 1;
        let root = root();
        let mut other = Member::start(&root, 1000, &[]);
        other.tell("fill 0 600 2");
        other.merge();
        ended = life(&root, &at.to_string());
        other.merge();
        other.check();
        let mut third = Member::start(&root, 1000, &[]);
        third.tell("fill 0 600 2");
        for _ in 0..2 {
            third.merge();
            other.merge();
        }
        other.check();
        third.check();
        let standing = third.standing();
        assert_eq!((standing.of("merged"), standing.of("store")), (600, 600 * PAGE), "killed at point {at}");
        for member in [&mut other, &mut third] {
            member.tell("clear 0 1000");
        }
        for _ in 0..3 {
            third.merge();
            other.merge();
        }
        assert_eq!(third.standing().of("store"), 0, "killed at point {at}");
    }
    assert!(at > 15, "there are more points than {at}");
}

/// Ranks that come to safe points together merge at the same ones, with room for that at other times.
#[test]
fn members_merge_at_the_same_safe_points() {
    let root = root();
    let bounds = ["2", "3", "4"];
    let mut ranks: Vec<Member> =
        bounds.iter().map(|bound| Member::start(&root, 2000, &["--max-slowdown", bound])).collect();
    let (mut together, mut apart) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    for step in 0.. {
        for (rank, member) in ranks.iter_mut().enumerate() {
            // Something new each time, so that a merge may pay.
            member.tell("unmap 0 1800");
            member.tell("map 0 1800");
            member.tell(&format!("fill {} 100 {}", step % 10 * 100, 7 * step + rank as u64 + 1));
        }
        std::thread::sleep(Duration::from_millis(20));
        ranks.iter_mut().for_each(|member| member.say("merge"));
        let merged = ranks.iter_mut().map(|member| member.answer().expect("it lives"));
        let merged = merged.map(Told).filter(|told| told.of("cut_short") == 0 || told.of("looked_at") > 0);
        match merged.count() {
            0 => {}
            all if all == bounds.len() => together += 1,
            _ => apart += 1,
        }
        if together >= 8 {
            break;
        }
        assert!(Instant::now() < deadline, "{together} times together and {apart} times apart");
    }
    ranks.iter_mut().for_each(Member::check);
    // A moment may lie among safe points.
    assert!(apart <= together, "{together} times together and {apart} times apart");
}

/// A member that is stopped at any step holds others up for a while only, and goes on where it was.
#[cfg(feature = "fault-points")]
#[test]
fn a_member_may_be_stopped_at_any_step() {
    let script = ["fill 0 300 2", "copy 300 300 0", "merge", "fill 100 100 5", "merge", "check", "leave"];
    let (mut held_up, mut at, mut ended) = (0, 0, false);
    while !ended {
        at += 1;
        let root = root();
        let mut other = Member::start(&root, 1000, &[]);
        other.tell("fill 0 600 2");
        other.merge();
        let mut stopped = Member::of_script(&root, 1000, &script, &format!("stop {at}"));
        ended = stopped.has_ended_or_stopped();
        other.tell("fill 0 300 9");
        other.tell("copy 300 300 0");
        held_up += other.merge().of("held_up");
        other.check();
        stopped.go_on();
        let answers: Vec<String> = std::iter::from_fn(|| stopped.answer()).collect();
        assert!(answers.iter().any(|answer| answer == "same"), "stopped at point {at}: {answers:?}");
        let merged = other.merge();
        assert_eq!((merged.of("held_up"), merged.of("failed")), (0, 0), "stopped at point {at}");
        other.check();
        assert_eq!(other.standing().of("merged"), 600, "stopped at point {at}");
    }
    assert!(at > 10, "there are more points than {at}");
    assert!(held_up > 3, "it had the lock at some of them, not {held_up}");
}
