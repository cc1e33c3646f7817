//! Members of a domain that merge, write, fork and die. Their memory always reads as written, contents that no member
//! maps leave the store, and the kernel's accounting shows the savings.

mod member;

use member::{MemberAnswer, MemberProcess, PAGE_BYTES, domains_root};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

#[test]
fn equal_memory_of_two_members_is_stored_once() {
    let root = domains_root();
    let (mut first, mut second) =
        (MemberProcess::start(&root, 2000, &[]), MemberProcess::start(&root, 2000, &["--threads", "2"]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 2000 7");
    }
    // Contents that only one of them has so far.
    first.run_command("fill 1000 100 8");
    // Without code, which members of other tests share.
    let footprint =
        |member: &mut MemberProcess| member.smaps_rollup_kib("Pss_Anon:") + member.smaps_rollup_kib("Pss_Shmem:");
    let before = footprint(&mut first) + footprint(&mut second);
    let mappings = first.read_status().number("mapping_count");
    assert_eq!(first.run_merge().number("pages_merged"), 0, "no other member has published these contents");
    let merged = second.run_merge();
    assert_eq!((merged.number("pages_merged"), merged.number("contents_stored")), (1900, 1900));
    let merged = first.run_merge();
    assert_eq!(
        (merged.number("pages_merged"), merged.number("contents_stored"), merged.number("runs_mapped")),
        (1900, 0, 2)
    );
    first.check_memory();
    second.check_memory();
    let after = footprint(&mut first) + footprint(&mut second);
    // Less the engine's own memory: its index and the working memory of its last merge.
    assert!(before - after > 1900 * 4 - 800, "{before} KiB before, {after} after");
    assert!(first.smaps_rollup_kib("Pss_Shmem:") >= 1900 * 2, "two members share each page");
    let status = first.read_status();
    assert_eq!((status.number("merged"), status.number("store_bytes")), (1900, 1900 * PAGE_BYTES));
    assert!(status.number("mapping_count") <= mappings + 4, "a run takes one mapping: {status:?}");
    assert_eq!(second.run_merge().number("pages_scanned"), 100, "only unmerged pages are scanned again");
}

#[test]
fn duplicates_within_one_process_are_merged() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 1000, &[]);
    member.run_command("fill 0 500 3");
    member.run_command("copy 500 500 0");
    let merged = member.run_merge();
    assert_eq!(
        (merged.number("pages_merged"), merged.number("contents_stored"), merged.number("runs_mapped")),
        (1000, 500, 2)
    );
    member.check_memory();
    assert_eq!(member.read_status().number("store_bytes"), 500 * PAGE_BYTES);
}

#[test]
fn program_advice_is_followed() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 2000, &[]);
    let write = |member: &mut MemberProcess, seed: u64| {
        member.run_command(&format!("fill 0 500 {seed}"));
        (1..4).for_each(|part| drop(member.run_command(&format!("copy {} 500 0", part * 500))));
    };
    let merge = |member: &mut MemberProcess| {
        let merged = member.run_merge();
        ["pages_merged", "cow_breaks", "backed_off"].map(|what| merged.number(what))
    };
    write(&mut member, 7);
    member.run_command("advise 0 500 2");
    member.run_command("advise 500 500 1");
    assert_eq!(merge(&mut member), [1000, 0, 500], "the first part is rewritten, and the second unmergeable");
    assert_eq!(member.read_status().number("rewritten_pages"), 500);
    member.run_command("advise 0 1000 0");
    assert_eq!(merge(&mut member), [1000, 0, 0]);

    member.run_command("advise 0 2000 2");
    assert_eq!(member.read_status().number("merged"), 2000, "until it is written");
    write(&mut member, 8);
    assert_eq!(merge(&mut member), [0, 2000, 0]);
    // Longer than pages are skipped after one write.
    std::thread::sleep(Duration::from_millis(2100));
    assert_eq!(merge(&mut member), [0, 0, 2000]);
    member.run_command("advise 0 2000 0");
    assert_eq!(merge(&mut member), [2000, 0, 0]);
    member.check_memory();
}

#[test]
fn concurrent_merges_store_each_content_once() {
    // Several batches, with each content twice in each member.
    const CONTENT_COUNT: u64 = 3000;
    let root = domains_root();
    let mut members: Vec<MemberProcess> = (0..4).map(|_| MemberProcess::start(&root, 2 * CONTENT_COUNT, &[])).collect();
    for member in &mut members {
        member.run_command(&format!("fill 0 {CONTENT_COUNT} 7"));
        member.run_command(&format!("copy {CONTENT_COUNT} {CONTENT_COUNT} 0"));
    }
    let mappings: Vec<u64> = members.iter_mut().map(|member| member.read_status().number("mapping_count")).collect();
    let mut merged = 0;
    for _ in 0..4 {
        members.iter_mut().for_each(|member| member.send_command("merge"));
        let answer = members.iter_mut().map(|member| MemberAnswer(member.read_answer().expect("it is alive")));
        merged += answer.map(|answer| answer.number("pages_merged")).sum::<u64>();
    }
    assert_eq!(merged, 4 * 2 * CONTENT_COUNT);
    for (member, before) in members.iter_mut().zip(mappings) {
        member.check_memory();
        let status = member.read_status();
        assert_eq!(status.number("store_bytes"), CONTENT_COUNT * PAGE_BYTES, "unused contents are freed");
        let now = status.number("mapping_count");
        assert!(now < before + 200, "{now} mappings, {before} before: adjacent pages are stored together");
    }
}

#[test]
fn zero_pages_are_freed() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 5000, &[]);
    member.run_command("fill 0 5000 0");
    member.run_command("fill 100 1 9");
    let before = member.smaps_rollup_kib("Rss:");
    let merged = member.run_merge();
    assert_eq!((merged.number("zeros_freed"), merged.number("pages_merged")), (4999, 0));
    let after = member.smaps_rollup_kib("Rss:");
    assert!(before - after > 4999 * 4 - 1000, "{before} KiB before, {after} after");
    member.check_memory();
    // Pages that are written again at once are skipped for a while.
    member.run_command("fill 200 10 0");
    let merged = member.run_merge();
    assert_eq!((merged.number("cow_breaks"), merged.number("backed_off"), merged.number("zeros_freed")), (10, 10, 0));
    member.check_memory();
}

#[test]
fn written_pages_become_ordinary_and_leave_the_store() {
    let root = domains_root();
    let (mut first, mut second) = (MemberProcess::start(&root, 1000, &[]), MemberProcess::start(&root, 1000, &[]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 1000 5");
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("pages_merged"), 1000);
    second.run_command("fill 0 600 6");
    assert_eq!(second.run_merge().number("cow_breaks"), 600);
    first.check_memory();
    second.check_memory();
    first.run_command("fill 0 500 4");
    for _ in 0..3 {
        first.run_merge();
        second.run_merge();
    }
    first.check_memory();
    second.check_memory();
    assert_eq!(
        first.read_status().number("store_bytes"),
        500 * PAGE_BYTES,
        "pages 500 to 599 of the first member, the others of both"
    );
    first.run_command("clear 0 1000");
    second.run_command("clear 0 1000");
    for _ in 0..3 {
        first.run_merge();
        second.run_merge();
    }
    assert_eq!(second.read_status().number("store_bytes"), 0);
    first.check_memory();
    second.check_memory();
}

#[test]
fn contents_of_killed_members_are_freed() {
    let root = domains_root();
    let (mut first, mut second) = (MemberProcess::start(&root, 1000, &[]), MemberProcess::start(&root, 1000, &[]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 1000 5");
        member.run_merge();
    }
    first.run_merge();
    first.kill();
    second.run_merge();
    second.check_memory();
    assert_eq!(second.read_status().number("store_bytes"), 1000 * PAGE_BYTES, "it is still mapped");
    second.run_command("fill 0 1000 6");
    second.run_merge();
    second.run_merge();
    assert_eq!(second.read_status().number("store_bytes"), 0);
    second.kill();
    let mut third = MemberProcess::start(&root, 10, &[]);
    assert_eq!(third.read_status().number("store_bytes"), 0);
    assert_eq!(third.run_merge().number("pages_merged"), 0);
}

#[test]
fn last_member_to_leave_removes_the_domain() {
    let root = domains_root();
    let (mut first, mut second) = (MemberProcess::start(&root, 100, &[]), MemberProcess::start(&root, 100, &[]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 100 5");
        member.run_merge();
    }
    first.run_command("leave");
    assert!(root.path().join("test").exists());
    second.check_memory();
    second.run_command("leave");
    assert!(!root.path().join("test").exists());
    // The next member to join removes the files of killed members, in any domain.
    MemberProcess::start(&root, 100, &[]).kill();
    std::fs::rename(root.path().join("test"), root.path().join("other")).expect("the domain has no members");
    drop(MemberProcess::start(&root, 100, &[]));
    assert!(!root.path().join("other").exists());
}

/// A cleaner may remove files of `/dev/shm` while members use them.
#[test]
fn removed_files_lose_no_memory() {
    let root = domains_root();
    let domain = root.path().join("test");
    let remove = |which: &str| {
        for entry in domain.read_dir().expect("a directory").flatten() {
            if entry.file_name().to_string_lossy().starts_with(which) {
                std::fs::remove_file(entry.path()).expect("ours");
            }
        }
    };
    for which in ["", "member-", "index-", "domain", "directory"] {
        let (mut first, mut second) = (MemberProcess::start(&root, 600, &[]), MemberProcess::start(&root, 600, &[]));
        for member in [&mut first, &mut second] {
            member.run_command("fill 0 500 5");
            member.run_merge();
        }
        first.run_merge();
        if which == "directory" {
            std::fs::remove_dir_all(&domain).expect("ours")
        } else {
            remove(which)
        }
        let mut third = MemberProcess::start(&root, 600, &[]);
        third.run_command("fill 0 500 6");
        third.run_command("copy 500 100 0");
        for _ in 0..3 {
            for member in [&mut first, &mut second, &mut third] {
                member.run_command("merge");
                member.check_memory();
            }
            second.run_command("fill 0 100 7");
        }
        drop((first, second, third));
        let _ = std::fs::remove_dir_all(&domain);
    }
}

#[test]
fn closing_unknown_descriptors_keeps_files_and_memory() {
    let root = domains_root();
    let (mut first, mut second) = (MemberProcess::start(&root, 600, &[]), MemberProcess::start(&root, 600, &[]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 500 5");
        member.run_merge();
    }
    first.run_merge();
    first.run_command("close");
    for _ in 0..3 {
        first.run_command("fill 0 50 6");
        first.run_command("copy 500 100 0");
        first.run_merge();
        first.check_memory();
        second.run_merge();
        second.check_memory();
    }
    assert_eq!(first.run_command("others"), "untouched");
    assert!(first.read_status().number("merged") > 0);
}

/// A member may be forked in any way, and the child may be the only process that still maps some contents.
#[test]
fn forked_child_keeps_its_memory() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 1000, &[]);
    member.run_command("fill 0 500 3");
    member.run_command("copy 500 500 0");
    member.run_merge();
    member.run_command("fork");
    member.run_command("fork");
    member.run_command("fill 0 1000 4");
    for _ in 0..3 {
        member.run_merge();
    }
    // Another member fills the store with other contents, to overwrite pages that are freed too early.
    let mut other = MemberProcess::start(&root, 1000, &[]);
    other.run_command("fill 0 500 9");
    other.run_command("copy 500 500 0");
    other.run_merge();
    assert_eq!(member.run_command("child"), "same");
    assert_eq!(member.run_command("child"), "same");
    member.check_memory();
    other.check_memory();
    for _ in 0..2 {
        member.run_merge();
        other.run_merge();
    }
    assert_eq!(other.read_status().number("store_bytes"), 500 * PAGE_BYTES);
}

#[test]
fn memory_can_be_written_during_a_merge() {
    let root = domains_root();
    let (mut first, mut second) =
        (MemberProcess::start(&root, 3000, &[]), MemberProcess::start(&root, 3000, &["--threads", "2"]));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 2000 7");
    }
    let begin = Instant::now();
    // Pages that are written all the time are skipped for a second and more, so this may take some turns.
    for turn in 0.. {
        let member = if turn % 2 == 0 { &mut first } else { &mut second };
        let answer = MemberAnswer(member.run_command("race 40"));
        if answer.0.contains("needs Linux 6.4 and userfaultfd") {
            println!("skipped: userfaultfd is not permitted");
            return;
        }
        assert_eq!(answer.number("lost"), 0, "{answer:?}");
        member.check_memory();
        let answer = member.read_status();
        if answer.number("cow_breaks") > 0 && answer.number("store_bytes") > 0 {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(120), "no page was merged and then written: {answer:?}");
    }
}

#[test]
fn slowdown_stays_within_its_bound() {
    let root = domains_root();
    let mut member = MemberProcess::start(&root, 20_000, &["--max-slowdown", "0"]);
    member.run_command("fill 0 20000 3");
    let merged = member.run_merge();
    assert_eq!((merged.number("incomplete_merges"), merged.number("pages_scanned")), (1, 0));
}

/// A run in the middle of a region takes two mappings. If few mappings are left, the runs with the largest savings get
/// them.
#[test]
fn longest_runs_are_merged_when_mappings_are_scarce() {
    const MEMBER_PAGES: u64 = 7100;
    // So many pages at either end; every second one of them is a run of one page.
    const SINGLE_PAGE_RUNS: u64 = 400;
    // Between them: two runs that take more than one batch to store and map, and six that do not.
    const PAGES_IN_LONG_RUNS: u64 = 2 * 2500 + 6 * 64;
    // Enough for half as many runs.
    const MAPPINGS_LEFT: u64 = 40;
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("a limit");
    let limit: u64 = limit.trim().parse().expect("a number");
    if limit > 300_000 {
        println!("skipped: a vm.max_map_count of {limit} takes too long to come near");
        return;
    }
    let most = limit / 8 * 6;
    // The engine starts at a random position in the runs that it has found.
    for _ in 0..4 {
        let root = domains_root();
        let mut member = MemberProcess::start(&root, MEMBER_PAGES, &[]);
        member.run_command("small");
        member.run_command(&format!("fill 0 {MEMBER_PAGES} 7"));
        let mut copy = |to: u64, count: u64, from: u64| drop(member.run_command(&format!("copy {to} {count} {from}")));
        (0..SINGLE_PAGE_RUNS).step_by(4).for_each(|page| copy(page + 2, 1, page));
        (MEMBER_PAGES - SINGLE_PAGE_RUNS..MEMBER_PAGES).step_by(4).for_each(|page| copy(page + 2, 1, page));
        copy(3100, 2500, 500);
        [5700, 6000, 6300].into_iter().for_each(|page| copy(page + 100, 64, page));
        member.run_command(&format!("mappings {MAPPINGS_LEFT}"));
        let before = member.read_status().number("mapping_count");
        assert!(before.abs_diff(most - MAPPINGS_LEFT) <= 3, "{before} mappings of at most {most}");

        let merged = member.run_merge();
        assert_eq!((merged.number("pages_scanned"), merged.number("pages_failed")), (MEMBER_PAGES, 0), "{merged:?}");
        assert_eq!(
            merged.number("pages_merged") + merged.number("unprofitable"),
            PAGES_IN_LONG_RUNS + SINGLE_PAGE_RUNS,
            "{merged:?}"
        );
        // Fewer single pages are merged than any of the long runs has.
        assert!(merged.number("pages_merged") >= PAGES_IN_LONG_RUNS, "{merged:?}");
        let after = member.read_status().number("mapping_count");
        assert!(after > before && after <= most, "{before} mappings before and {after} after, of {most}");
        member.check_memory();
        // Skipped runs are tried again, and merged pages stay merged.
        member.run_merge();
        let status = member.read_status();
        assert!(
            status.number("merged") >= merged.number("pages_merged") && status.number("mapping_count") <= most,
            "{status:?}"
        );
        member.check_memory();
    }
}

/// How long the random members run: `PAGEFOLD_FUZZ` in seconds, or `PAGEFOLD_SOAK` for some minutes.
enum RandomRunLength {
    Rounds(u64),
    Until(Instant),
}

impl RandomRunLength {
    fn from_environment() -> Self {
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

/// Options of random members. The first sets have no bound. The last set has no more time for merges than the member
/// has earned, so that some are cut short; the others have enough from the start.
const MEMBER_OPTIONS: [&[&str]; 5] = [
    &[],
    &["--threads", "2"],
    &["--max-slowdown", "2", "--min-runtime", "3600"],
    &["--max-slowdown", "100", "--min-runtime", "3600", "--threads", "2"],
    &["--max-slowdown", "100"],
];

/// How many of these option sets have no bound.
const UNBOUNDED_OPTION_SETS: u64 = 2;

const RANDOM_MEMBER_PAGES: u64 = 600;

/// Random numbers (D. Knuth's MMIX generator, TAOCP 3.3.4).
struct RandomNumbers(u64);

impl RandomNumbers {
    /// `PAGEFOLD_SEED` selects the numbers; it is printed.
    fn from_environment() -> Self {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_nanos() as u64;
        let seed = std::env::var("PAGEFOLD_SEED").map_or_else(|_| now(), |seed| seed.parse().expect("a number"));
        println!("PAGEFOLD_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A random member, and whether it has a bound.
struct RandomMember {
    process: MemberProcess,
    is_bounded: bool,
}

/// Two to four members that call every function, do all that a program may do to its memory, fork, exec and die, all at
/// random.
struct RandomMembers {
    root: tempfile::TempDir,
    random: RandomNumbers,
    members: Vec<RandomMember>,
    /// Merges that scanned anything, and pages that they merged, without a bound and with one.
    merges: [u64; 2],
    merged: [u64; 2],
}

impl RandomMembers {
    fn start() -> Self {
        let (root, mut random) = (domains_root(), RandomNumbers::from_environment());
        let count = 2 + random.below(3) as usize;
        let mut random_members = Self { root, random, members: Vec::new(), merges: [0; 2], merged: [0; 2] };
        for index in 0..count {
            let member = random_members.start_member(index);
            random_members.members.push(member);
        }
        random_members
    }

    /// Start the member at an index with random options. There is always a member with a bound, and one without.
    fn start_member(&mut self, index: usize) -> RandomMember {
        let options = self.random.below(MEMBER_OPTIONS.len() as u64);
        let options = match index {
            0 => options % UNBOUNDED_OPTION_SETS,
            1 => UNBOUNDED_OPTION_SETS + options % (MEMBER_OPTIONS.len() as u64 - UNBOUNDED_OPTION_SETS),
            _ => options,
        };
        RandomMember {
            process: MemberProcess::start(&self.root, RANDOM_MEMBER_PAGES, MEMBER_OPTIONS[options as usize]),
            is_bounded: options >= UNBOUNDED_OPTION_SETS,
        }
    }

    fn count_merge(&mut self, index: usize, answer: &MemberAnswer) {
        let bounded = usize::from(self.members[index].is_bounded);
        self.merges[bounded] += u64::from(answer.number("pages_scanned") > 0);
        self.merged[bounded] += answer.number("pages_merged");
    }

    fn merge(&mut self, index: usize) {
        let answer = self.members[index].process.run_merge();
        self.count_merge(index, &answer);
    }

    /// Two members merge at the same time, with all of their memory.
    fn merge_together(&mut self, index: usize, other_index: usize) {
        for member in [index, other_index] {
            self.members[member].process.run_command("adopt 0 600");
        }
        let indexes = if index == other_index { vec![index] } else { vec![index, other_index] };
        indexes.iter().for_each(|&member| self.members[member].process.send_command("merge"));
        for member in indexes {
            let answer = MemberAnswer(self.members[member].process.read_answer().expect("it is alive"));
            self.count_merge(member, &answer);
        }
    }

    /// Merge as often as it takes: a member with a bound needs several merges, until it may run one and finds its
    /// candidates again.
    fn merge_repeatedly(&mut self, index: usize) {
        let merges = if self.members[index].is_bounded { 8 } else { 1 };
        for _ in 0..merges {
            self.merge(index);
            std::thread::sleep(Duration::from_millis(15));
        }
    }

    /// Kill a member and start another. With `while_merging`, in the middle of a merge, unless that is done by then.
    fn kill_and_replace(&mut self, index: usize, while_merging: bool) {
        let replacement = self.start_member(index);
        let mut member = std::mem::replace(&mut self.members[index], replacement).process;
        if while_merging {
            member.run_command("adopt 0 600");
            member.send_command("merge");
            std::thread::sleep(Duration::from_micros(self.random.below(2000)));
        }
        member.kill();
    }

    /// Let a random member make a random call. If `while_written`, writers may be blocked, and threads also merge while
    /// their program writes.
    fn make_random_call(&mut self, while_written: bool) {
        let members = self.members.len() as u64;
        let random = &mut self.random;
        let (index, other_index) = (random.below(members) as usize, random.below(members) as usize);
        let (from, to) = (random.below(RANDOM_MEMBER_PAGES), random.below(RANDOM_MEMBER_PAGES));
        let count = (1 + random.below(RANDOM_MEMBER_PAGES / 2)).min(RANDOM_MEMBER_PAGES - from.max(to));
        let small_count = count.min(50);
        let (seed, choice, advice) = (random.below(4), random.below(2), random.below(3));
        let call = random.below(if while_written { 70 } else { 64 });
        let member = &mut self.members[index].process;
        match call {
            0..14 => drop(member.run_command(&format!("fill {from} {count} {seed}"))),
            14..18 => drop(member.run_command(&format!("copy {to} {count} {from}"))),
            18..20 => drop(member.run_command(&format!("clear {from} {count}"))),
            20..30 => {
                if choice == 0 {
                    // Forget the history of pages that did not stay merged.
                    member.run_command("adopt 0 600");
                }
                self.merge(index);
            }
            30..35 => self.merge_together(index, other_index),
            35 => drop(member.run_command("running")),
            36..40 => member.check_memory(),
            40 => drop(member.run_command(&format!("advise {from} {count} {advice}"))),
            41 => drop(member.run_command(&format!("disown {from} {count}"))),
            42..44 => drop(member.run_command("adopt 0 600")),
            44 => drop(member.run_command(&format!("unmap {from} {small_count}"))),
            45..47 => drop(member.run_command("map 0 600")),
            47 => drop(member.run_command(&format!("move {from} {small_count}"))),
            48 => drop(member.run_command("back")),
            49 => drop(member.run_command(&format!("grow {from}"))),
            50 => drop(member.run_command(&format!("dontneed {from} {count}"))),
            51 => drop(member.run_command(&format!("guard {from} {small_count}"))),
            52 => drop(member.run_command(&format!("protect {from} {count} {choice}"))),
            53..55 => drop(member.run_command("expose 0 600")),
            55 => drop(member.read_status()),
            56 => {
                member.run_command("fork");
                self.members[other_index].process.run_merge();
                let member = &mut self.members[index].process;
                member.run_command(&format!("fill {from} {count} 3"));
                member.run_merge();
                assert_eq!(member.run_command("child"), "same");
            }
            57 => assert_eq!(member.run_command("exec"), "ready"),
            58 => {
                assert_eq!(member.run_command("leave"), "left");
                self.members[index] = self.start_member(index);
            }
            59 => self.kill_and_replace(index, choice == 0),
            60 => {
                member.run_command(&format!("munmap {from} {small_count}"));
                self.merge(index);
                // Before the program maps anything else there, which the engine would take for adopted memory.
                self.members[index].process.run_command(&format!("disown {from} {small_count}"));
            }
            61 => drop(member.run_command(&format!("replace {from} {small_count}"))),
            62 => drop(member.run_command(&format!("mapfile {from} {small_count}"))),
            63 => self.merge_repeatedly(index),
            64..68 => drop(member.run_command("background")),
            68 => {
                let answer = member.run_command("foreground");
                assert!(answer.contains(" merges: "), "{answer}");
            }
            _ => {
                let answer = MemberAnswer(member.run_command("race 3"));
                assert_eq!(answer.number("lost"), 0, "{answer:?}");
            }
        }
    }
}

/// Run random members. Each keeps a copy of the expected content of each page.
fn run_random_members(while_written: bool) {
    let mut members = RandomMembers::start();
    let (length, mut round) = (RandomRunLength::from_environment(), 0);
    while !length.is_over(round) {
        round += 1;
        members.make_random_call(while_written);
    }
    for member in &mut members.members {
        member.process.check_memory();
        assert_eq!(member.process.run_command("files"), "untouched");
    }
    let (count, merges, merged) = (members.members.len(), members.merges, members.merged);
    let [without, with] = [0, 1].map(|bounded| format!("{} pages by {} merges", merged[bounded], merges[bounded]));
    println!("{round} rounds of {count} members merged {without} without a bound, and {with} with one");
    assert!(merged[0] > merges[0], "there was something to merge");
    assert!(merges[1] > 0, "no member with a bound has merged");
}

#[test]
fn random_members_keep_their_memory() {
    run_random_members(false);
}

/// The ThreadSanitizer run excludes this test by its name, because it does not know memory protection.
#[test]
fn members_keep_memory_written_during_random_merges() {
    let root = domains_root();
    if MemberProcess::start(&root, 10, &[]).run_command("running").contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return;
    }
    run_random_members(true);
}

/// A member that dies at any step leaves a domain in which the others continue, and all its contents can be freed.
#[cfg(feature = "fault-points")]
#[test]
fn member_can_die_at_any_step() {
    let run_with_fault = |root: &tempfile::TempDir, fault: &str| {
        let mut member = MemberProcess::start_with(root, 1000, &[], Some(fault));
        let script = ["fill 0 300 2", "copy 300 300 0", "merge", "fill 100 100 5", "merge", "fill 0 1000 0", "merge"];
        script.iter().all(|line| member.try_command(line).is_some())
    };
    let mut ended = false;
    let mut point = 0;
    while !ended {
        point += 1;
        let root = domains_root();
        let mut other = MemberProcess::start(&root, 1000, &[]);
        other.run_command("fill 0 600 2");
        other.run_merge();
        ended = run_with_fault(&root, &point.to_string());
        other.run_merge();
        other.check_memory();
        let mut third = MemberProcess::start(&root, 1000, &[]);
        third.run_command("fill 0 600 2");
        for _ in 0..2 {
            third.run_merge();
            other.run_merge();
        }
        other.check_memory();
        third.check_memory();
        let status = third.read_status();
        assert_eq!(
            (status.number("merged"), status.number("store_bytes")),
            (600, 600 * PAGE_BYTES),
            "killed at point {point}"
        );
        for member in [&mut other, &mut third] {
            member.run_command("clear 0 1000");
        }
        for _ in 0..3 {
            third.run_merge();
            other.run_merge();
        }
        assert_eq!(third.read_status().number("store_bytes"), 0, "killed at point {point}");
    }
    assert!(point > 15, "there are more points than {point}");
}

/// Ranks that reach safe points together merge at the same ones, with time for merges at other ones.
#[test]
fn members_merge_at_common_safe_points() {
    let root = domains_root();
    let bounds = ["2", "3", "4"];
    let mut ranks: Vec<MemberProcess> =
        bounds.iter().map(|bound| MemberProcess::start(&root, 2000, &["--max-slowdown", bound])).collect();
    let (mut together, mut apart) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(60);
    for step in 0.. {
        for (rank, member) in ranks.iter_mut().enumerate() {
            // New contents each time, so that a merge may be profitable.
            member.run_command("unmap 0 1800");
            member.run_command("map 0 1800");
            member.run_command(&format!("fill {} 100 {}", step % 10 * 100, 7 * step + rank as u64 + 1));
        }
        std::thread::sleep(Duration::from_millis(20));
        ranks.iter_mut().for_each(|member| member.send_command("merge"));
        let merged = ranks.iter_mut().map(|member| member.read_answer().expect("it is alive"));
        let merged = merged
            .map(MemberAnswer)
            .filter(|answer| answer.number("incomplete_merges") == 0 || answer.number("pages_scanned") > 0);
        match merged.count() {
            0 => {}
            all if all == bounds.len() => together += 1,
            _ => apart += 1,
        }
        if together >= 8 {
            break;
        }
        assert!(Instant::now() < deadline, "{together} merges together and {apart} apart");
    }
    ranks.iter_mut().for_each(MemberProcess::check_memory);
    // The time of a merge may fall between two safe points.
    assert!(apart <= together, "{together} merges together and {apart} apart");
}

/// A member that is stopped at any step blocks the others for a limited time only, and then continues.
#[cfg(feature = "fault-points")]
#[test]
fn member_can_be_stopped_at_any_step() {
    let script = ["fill 0 300 2", "copy 300 300 0", "merge", "fill 100 100 5", "merge", "check", "leave"];
    let (mut held_up, mut at, mut ended) = (0, 0, false);
    while !ended {
        at += 1;
        let root = domains_root();
        let mut other = MemberProcess::start(&root, 1000, &[]);
        other.run_command("fill 0 600 2");
        other.run_merge();
        let mut stopped = MemberProcess::start_with_script(&root, 1000, &script, &format!("stop {at}"));
        ended = stopped.has_ended_or_stopped();
        other.run_command("fill 0 300 9");
        other.run_command("copy 300 300 0");
        held_up += other.run_merge().number("blocked_merges");
        other.check_memory();
        stopped.continue_process();
        let answers: Vec<String> = std::iter::from_fn(|| stopped.read_answer()).collect();
        assert!(answers.iter().any(|answer| answer == "same"), "stopped at point {at}: {answers:?}");
        let merged = other.run_merge();
        assert_eq!((merged.number("blocked_merges"), merged.number("pages_failed")), (0, 0), "stopped at point {at}");
        other.check_memory();
        assert_eq!(other.read_status().number("merged"), 600, "stopped at point {at}");
    }
    assert!(at > 10, "there are more points than {at}");
    assert!(held_up > 3, "it had the lock at {held_up} points only");
}
