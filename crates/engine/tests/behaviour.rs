//! What programs do to their memory beside writing it, and where they run: each has a behaviour that the library's
//! documentation states, and a test here.

mod member;

use member::{Member, PAGE, Told, program, root, settle};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Two members of a domain that have all pages of a seed merged.
fn merged(root: &TempDir, pages: u64) -> (Member, Member) {
    let (mut first, mut second) = (Member::start(root, pages, &[]), Member::start(root, pages, &[]));
    for member in [&mut first, &mut second] {
        member.tell(&format!("fill 0 {pages} 5"));
        member.merge();
    }
    assert_eq!(first.merge().of("merged"), pages);
    (first, second)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn unmapped_memory_stays_unmapped_and_leaves_the_store() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    for member in [&mut first, &mut second] {
        member.tell("unmap 100 300");
    }
    settle(&mut [&mut first, &mut second]);
    assert_eq!(second.standing().of("store"), 700 * PAGE);
    for member in [&mut first, &mut second] {
        // What somebody else has mapped there since stays that one's.
        member.tell("map 100 300");
        member.tell("fill 100 300 6");
    }
    settle(&mut [&mut first, &mut second]);
    assert!(second.standing().of("store") > 700 * PAGE, "it is adopted as any");
}

/// Two members have so many pages merged, and as many once the last 600 hold something else, which nothing else is
/// stored beside.
fn go_on(first: &mut Member, second: &mut Member, pages: u64) {
    for member in [&mut *first, &mut *second] {
        assert_eq!(member.standing().of("merged"), pages);
        member.tell("clear 400 600");
        member.tell("fill 400 600 6");
    }
    assert_eq!(first.standing().of("store"), pages * PAGE);
    settle(&mut [&mut *first, &mut *second]);
    for member in [first, second] {
        let standing = member.standing();
        assert_eq!((standing.of("merged"), standing.of("store")), (pages, pages * PAGE));
    }
}

#[test]
fn memory_that_is_unmapped_without_a_word_leaves_the_store() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    for member in [&mut first, &mut second] {
        member.tell("munmap 100 300");
    }
    settle(&mut [&mut first, &mut second]);
    go_on(&mut first, &mut second, 700);
}

#[test]
fn new_memory_in_the_place_of_adopted_memory_is_taken_for_written() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    for member in [&mut first, &mut second] {
        member.tell("replace 100 300");
        member.tell("fill 100 300 6");
        let merged = member.merge();
        assert_eq!((merged.of("broken"), merged.of("left_alone")), (300, 300));
    }
    settle(&mut [&mut first, &mut second]);
    assert_eq!(second.standing().of("store"), 700 * PAGE);
    // Longer than what was written once is left alone.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    settle(&mut [&mut first, &mut second]);
    go_on(&mut first, &mut second, 1000);
}

#[test]
fn a_file_in_the_place_of_adopted_memory_is_left_alone() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    for member in [&mut first, &mut second] {
        member.tell("mapfile 100 300");
    }
    settle(&mut [&mut first, &mut second]);
    // Of what lies there a part is as the file has it, and a part written since; both are the same in both members.
    for member in [&mut first, &mut second] {
        member.tell("fill 100 100 6");
    }
    go_on(&mut first, &mut second, 700);
    for member in [&mut first, &mut second] {
        assert_eq!(member.tell("files"), "untouched");
        // By the engine's own way it is ordinary memory again.
        member.tell("clear 100 300");
        member.tell("fill 100 300 7");
    }
    settle(&mut [&mut first, &mut second]);
    for member in [&mut first, &mut second] {
        let standing = member.standing();
        assert_eq!((standing.of("merged"), standing.of("store")), (1000, 1000 * PAGE));
        assert_eq!(member.tell("files"), "untouched");
    }
}

#[test]
fn moved_memory_keeps_what_it_holds() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    first.tell("move 100 300");
    second.tell("fill 0 1000 6");
    settle(&mut [&mut first, &mut second]);
    assert_eq!(second.standing().of("store"), 1000 * PAGE, "wherever it is mapped");
    first.tell("back");
    first.tell("fill 0 1000 7");
    settle(&mut [&mut first, &mut second]);
    assert_eq!(second.standing().of("store"), 0);
}

#[test]
fn memory_may_grow_and_shrink() {
    let root = root();
    let (mut first, mut second) = merged(&root, 100);
    for page in [0, 50, 99] {
        first.tell(&format!("grow {page}"));
    }
    second.tell("fill 0 100 6");
    settle(&mut [&mut first, &mut second]);
    first.tell("unmap 90 10");
    settle(&mut [&mut first, &mut second]);
}

#[test]
fn dropped_memory_reads_as_zeros_or_as_what_it_was_merged_with() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    first.tell("fill 500 500 6");
    let told = Told(first.tell("dontneed 0 1000"));
    assert_eq!((told.of("zeros"), told.of("kept")), (0, 1000), "the copies are gone, what was merged is not");
    first.tell("fill 500 500 6");
    first.merge();
    let told = Told(first.tell("dontneed 0 1000"));
    assert_eq!((told.of("zeros"), told.of("kept")), (500, 500), "it was ordinary memory again");
    first.tell("clear 0 1000");
    settle(&mut [&mut first, &mut second]);
}

#[test]
fn protected_memory_is_left_alone() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    let mut third = Member::start(&root, 1000, &[]);
    third.tell("fill 0 1000 5");
    for member in [&mut first, &mut third] {
        member.tell("protect 100 200 0");
        member.tell("protect 400 200 1");
    }
    assert_eq!(third.merge().of("merged"), 600);
    second.tell("fill 0 1000 6");
    settle(&mut [&mut first, &mut second, &mut third]);
    for member in [&mut first, &mut third] {
        member.tell("expose 0 1000");
        member.check();
    }
    assert_eq!(third.merge().of("merged"), 400, "what was merged meanwhile is there still");
    settle(&mut [&mut first, &mut second, &mut third]);
}

#[test]
fn guarded_memory_is_left_alone() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    first.tell("fill 0 500 6");
    if Told(first.tell("guard 400 200")).of("guarded") == 0 {
        println!("skipped: MADV_GUARD_INSTALL is 6.13's, and 6.15's for mappings of files");
        return;
    }
    settle(&mut [&mut first, &mut second]);
    first.tell("expose 0 1000");
    settle(&mut [&mut first, &mut second]);
}

#[test]
fn a_program_that_becomes_another_has_left() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    assert_eq!(first.tell("exec"), "ready");
    assert_eq!(first.standing().of("merged"), 0);
    second.tell("fill 0 1000 6");
    settle(&mut [&mut first, &mut second]);
    assert_eq!(second.standing().of("store"), 0);
}

#[test]
fn a_child_forked_during_a_merge_has_its_memory_and_is_told() {
    let root = root();
    let (mut first, mut second) = merged(&root, 2000);
    let told = Told(first.tell("forks 30"));
    assert_eq!(told.of("wrong"), 0, "{told:?}");
    assert!(told.of("forked") > 0, "{told:?}");
    settle(&mut [&mut first, &mut second]);
}

#[test]
fn a_parent_and_its_child_write_and_merge_apart() {
    let root = root();
    let (mut first, mut second) = merged(&root, 1000);
    first.tell("fork");
    first.tell("fork");
    first.tell("fill 200 300 8");
    settle(&mut [&mut first, &mut second]);
    assert_eq!(first.tell("child"), "same");
    first.tell("fill 0 1000 5");
    settle(&mut [&mut first, &mut second]);
    assert_eq!(first.tell("child"), "same");
    settle(&mut [&mut first, &mut second]);
}

#[test]
fn forsaken_memory_may_be_moved_while_others_merge() {
    let root = root();
    let (mut first, mut second) = (Member::start(&root, 10, &[]), Member::start(&root, 10, &[]));
    let told = Told(first.tell("shuffle 40"));
    if told.0.contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return;
    }
    assert_eq!(told.of("wrong"), 0, "{told:?}");
    // At a safe point nothing is moved, and what is mapped can be told.
    settle(&mut [&mut first, &mut second]);
}

/// `kernel.core_pattern` that has dumps written as `core` into the working directory, until it is dropped.
struct Pattern(Option<String>);

impl Pattern {
    const PATH: &str = "/proc/sys/kernel/core_pattern";

    fn set() -> Option<Self> {
        let found = fs::read_to_string(Self::PATH).ok()?;
        if found.trim() == "core" {
            return Some(Self(None));
        }
        fs::write(Self::PATH, "core").ok()?;
        Some(Self(Some(found)))
    }
}

impl Drop for Pattern {
    fn drop(&mut self) {
        if let Some(found) = &self.0 {
            fs::write(Self::PATH, found).expect("it could be written before");
        }
    }
}

/// What a core dump holds of a range.
fn dumped(core: &Path, start: u64, bytes: u64) -> Vec<u8> {
    let stream = elf::ElfStream::<elf::endian::NativeEndian, _>::open_stream(fs::File::open(core).expect("a dump"))
        .expect("an ELF file");
    let segments = stream.segments().to_vec();
    let mut held = vec![0; bytes as usize];
    let file = fs::File::open(core).expect("a dump");
    for segment in segments {
        let (from, to) = (start.max(segment.p_vaddr), (start + bytes).min(segment.p_vaddr + segment.p_filesz));
        if segment.p_type == elf::abi::PT_LOAD && from < to {
            let part = &mut held[(from - start) as usize..(to - start) as usize];
            file.read_exact_at(part, segment.p_offset + from - segment.p_vaddr).expect("what it says it holds");
        }
    }
    held
}

#[test]
fn a_core_dump_holds_what_was_merged() {
    let root = root();
    let (mut first, _second) = merged(&root, 500);
    first.tell("fill 100 100 6");
    first.tell("fill 300 50 0");
    first.merge();
    let base = Told(first.tell("base")).of("base");
    let mut before = vec![0; (500 * PAGE) as usize];
    let memory = fs::File::open(format!("/proc/{}/mem", first.child.id())).expect("it is ours");
    memory.read_exact_at(&mut before, base).expect("it is mapped");
    assert!(before.iter().any(|&byte| byte != 0));
    let directory = tempfile::tempdir().expect("a directory");
    let Some(_pattern) = Pattern::set() else {
        println!("skipped: kernel.core_pattern is of others, and may not be changed");
        return;
    };
    assert_eq!(first.ask(&format!("core {}", directory.path().display())), None);
    first.child.wait().expect("it is ours");
    let core = directory.path().read_dir().expect("a directory").flatten().next();
    let core = core.expect("a core dump is written as `core` or `core.PID`").path();
    assert!(dumped(&core, base, 500 * PAGE) == before, "memory differs from its dump");
}

/// A cgroup of its own, removed when dropped, with the file that tells how much memory it takes.
struct Cgroup {
    path: PathBuf,
    usage: PathBuf,
}

impl Cgroup {
    fn new() -> Option<Self> {
        let name = format!("pagefold-test-{}", std::process::id());
        for (parent, usage) in [
            ("/sys/fs/cgroup", "memory.current"),
            ("/sys/fs/cgroup/unified", "memory.current"),
            ("/sys/fs/cgroup/memory", "memory.usage_in_bytes"),
        ] {
            let path = Path::new(parent).join(&name);
            if Path::new(parent).join("cgroup.procs").exists() && fs::create_dir(&path).is_ok() {
                let cgroup = Self { usage: path.join(usage), path };
                if cgroup.usage.exists() {
                    return Some(cgroup);
                }
            }
        }
        None
    }

    fn bytes(&self) -> u64 {
        fs::read_to_string(&self.usage).ok().and_then(|text| text.trim().parse().ok()).expect("a number")
    }

    /// A member that lives in it from its beginning.
    fn member(&self, root: &TempDir, pages: u64) -> Member {
        let mut command = Command::new("sh");
        let enter =
            format!("echo $$ > {}/cgroup.procs && exec {} test {pages}", self.path.display(), program().display());
        command.args(["-c", &enter]).env("PAGEFOLD_RUNTIME", root.path());
        Member::of(&mut command, Stdio::inherit()).readied(false)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A cgroup is busy for a moment after its last process has ended.
        for _ in 0..100 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        eprintln!("{} could not be removed", self.path.display());
    }
}

#[test]
fn a_cgroup_takes_less_by_what_is_merged() {
    let root = root();
    let Some(cgroup) = Cgroup::new() else {
        println!("skipped: no cgroup that tells its memory can be made here");
        return;
    };
    let (mut first, mut second) = (cgroup.member(&root, 20_000), cgroup.member(&root, 20_000));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 16000 5");
        // Written with zeros after something else: there, and of zeros.
        member.tell("fill 16000 4000 6");
        member.tell("fill 16000 4000 0");
    }
    let (before, before_pss) = (cgroup.bytes(), first.smaps("Pss:") + second.smaps("Pss:"));
    let zeros = first.merge().of("zeros") + second.merge().of("zeros");
    let mut merged = second.standing().of("merged");
    first.merge();
    merged += first.standing().of("merged");
    assert_eq!((merged, zeros), (32_000, 8_000));
    let (after, after_pss) = (cgroup.bytes(), first.smaps("Pss:") + second.smaps("Pss:"));
    let saved = (merged - first.standing().of("store") / PAGE + zeros) * PAGE;
    assert_eq!(saved, 24_000 * PAGE);
    // Less what the engine itself takes, and what the kernel charges in advance on each CPU.
    let slack = 8 << 20;
    assert!(before - after > saved - slack, "{before} before, {after} after, {saved} saved");
    assert!(before - after < saved + slack, "{before} before, {after} after, {saved} saved");
    let fallen = (before_pss - after_pss) * 1024;
    assert!(fallen > saved - slack && fallen < saved + slack, "{fallen} by PSS, {saved} saved");
    drop((first, second));
}

#[test]
fn members_need_no_privilege_and_stay_with_their_user() {
    if !is_root() {
        println!("skipped: only root can be somebody else; all other tests are those of a user without privilege now");
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("its owner may");
    let copy = place.path().join("member");
    // By another process: what this one has open for writing, a test beside may hand on to a child, and it is not run.
    let copied = Command::new("cp").arg(program()).arg(&copy).status().expect("cp");
    assert!(copied.success());
    let (theirs, own) = (root(), root());
    std::os::unix::fs::chown(theirs.path(), Some(65534), Some(65534)).expect("root may");
    let start = |root: &TempDir| {
        let mut command = Command::new(&copy);
        command.args(["test", "1000"]).env("PAGEFOLD_RUNTIME", root.path());
        // The standard library gives groups up with this, as root.
        Member::of(command.uid(65534).gid(65534), Stdio::inherit())
    };
    let (mut first, mut second) = (start(&theirs).readied(false), start(&theirs).readied(false));
    for member in [&mut first, &mut second] {
        member.tell("fill 0 900 5");
        member.merge();
    }
    assert_eq!(first.merge().of("merged"), 900);
    // While they run they may merge only where everybody may, if the kernel can do it at all.
    let able = Member::start(&own, 10, &[]).tell("running").contains("looked_at");
    let set = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|set| set.trim() == "1");
    let mut open = Command::new("sh");
    open.args(["-c", ": <> /dev/userfaultfd"]).stderr(Stdio::null());
    let opened = open.uid(65534).gid(65534).status().expect("a shell").success();
    let told = first.tell("running");
    if able && (set || opened) {
        assert!(told.contains("looked_at"), "{told}");
    } else {
        let remedy = "merging while the program runs needs Linux 6.4 and userfaultfd: CAP_SYS_PTRACE, \
                      vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; merging at safe points does not";
        assert_eq!(told, remedy);
    }
    settle(&mut [&mut first, &mut second]);
    // Neither joins the other's domain.
    let root_member = Member::start(&own, 10, &[]);
    let refused = start(&own).answer().expect("it says why");
    assert!(refused.contains("cannot use") || refused.contains("others can change"), "{refused}");
    let mut command = Command::new(program());
    command.args(["test", "10"]).env("PAGEFOLD_RUNTIME", theirs.path());
    let refused = Member::of(&mut command, Stdio::inherit()).answer().expect("it says why");
    assert!(refused.contains("others can change"), "{refused}");
    drop(root_member);
}

/// `/sys/kernel/mm/ksm` is not there, and whatever asks for KSM is refused, as by a kernel that was built without.
#[test]
fn members_need_no_ksm() {
    if !is_root() {
        println!("skipped: only root can hide /sys/kernel/mm");
        return;
    }
    let root = root();
    let without = || {
        let mut command = Command::new("unshare");
        let hide = "mount -t tmpfs -o size=4k none /sys/kernel/mm && test ! -e /sys/kernel/mm/ksm && exec \"$@\"";
        command.args(["--mount", "sh", "-c", hide, "sh"]).arg(program()).args(["test", "1000"]);
        command.env("PAGEFOLD_RUNTIME", root.path());
        // SAFETY: the filter was made before; to install it is a few system calls.
        unsafe { command.pre_exec(refuse_ksm()) };
        Member::of(&mut command, Stdio::inherit())
    };
    let mut first = without();
    match first.answer().as_deref() {
        Some("ready") => {}
        _ => {
            println!("skipped: no mount namespace can be had");
            return;
        }
    }
    let mut second = without().readied(false);
    for member in [&mut first, &mut second] {
        member.tell("fill 0 900 5");
        member.tell("fill 900 100 0");
        member.merge();
    }
    assert_eq!(first.merge().of("merged"), 900);
    settle(&mut [&mut first, &mut second]);
}

/// madvise(2) and prctl(2) answer `EINVAL` to whatever is about KSM.
fn refuse_ksm() -> impl FnMut() -> std::io::Result<()> + Send + Sync + 'static {
    use seccompiler::{
        BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    };
    let rule = |argument, value| {
        let is =
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value).expect("a condition");
        SeccompRule::new(vec![is]).expect("a rule")
    };
    // PR_SET_MEMORY_MERGE and PR_GET_MEMORY_MERGE (include/uapi/linux/prctl.h).
    let rules = [
        (libc::SYS_madvise, vec![rule(2, libc::MADV_MERGEABLE as u64), rule(2, libc::MADV_UNMERGEABLE as u64)]),
        (libc::SYS_prctl, vec![rule(0, 67), rule(0, 68)]),
    ];
    let architecture = std::env::consts::ARCH.try_into().expect("an architecture that filters are for");
    let refuse = SeccompAction::Errno(libc::EINVAL as u32);
    let filter = SeccompFilter::new(rules.into_iter().collect(), SeccompAction::Allow, refuse, architecture);
    let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
    move || seccompiler::apply_filter(&program).map_err(std::io::Error::other)
}
