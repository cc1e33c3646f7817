//! What programs do to their memory beside writing it, and where they run: each has a behaviour that the library's
//! documentation states, and a test here.

mod member;

use member::{MemberAnswer, MemberProcess, PAGE_BYTES, domains_root, member_program, merge_until_settled};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Two members of a domain that have all pages of a seed merged.
fn merged_pair(root: &TempDir, pages: u64) -> (MemberProcess, MemberProcess) {
    let (mut first, mut second) = (MemberProcess::start(root, pages, &[]), MemberProcess::start(root, pages, &[]));
    for member in [&mut first, &mut second] {
        member.run_command(&format!("fill 0 {pages} 5"));
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("merged"), pages);
    (first, second)
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn unmapped_memory_leaves_the_store() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    for member in [&mut first, &mut second] {
        member.run_command("unmap 100 300");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store"), 700 * PAGE_BYTES);
    for member in [&mut first, &mut second] {
        // What somebody else has mapped there since stays that one's.
        member.run_command("map 100 300");
        member.run_command("fill 100 300 6");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    assert!(second.read_status().number("store") > 700 * PAGE_BYTES, "it is adopted as any");
}

/// Two members have so many pages merged, and as many once the last 600 hold something else, which nothing else is
/// stored beside.
fn merge_new_contents(first: &mut MemberProcess, second: &mut MemberProcess, pages: u64) {
    for member in [&mut *first, &mut *second] {
        assert_eq!(member.read_status().number("merged"), pages);
        member.run_command("clear 400 600");
        member.run_command("fill 400 600 6");
    }
    assert_eq!(first.read_status().number("store"), pages * PAGE_BYTES);
    merge_until_settled(&mut [&mut *first, &mut *second]);
    for member in [first, second] {
        let standing = member.read_status();
        assert_eq!((standing.number("merged"), standing.number("store")), (pages, pages * PAGE_BYTES));
    }
}

#[test]
fn memory_unmapped_without_notice_leaves_the_store() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    for member in [&mut first, &mut second] {
        member.run_command("munmap 100 300");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    merge_new_contents(&mut first, &mut second, 700);
}

#[test]
fn remapped_memory_counts_as_written() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    for member in [&mut first, &mut second] {
        member.run_command("replace 100 300");
        member.run_command("fill 100 300 6");
        let merged = member.run_merge();
        assert_eq!((merged.number("broken"), merged.number("left_alone")), (300, 300));
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store"), 700 * PAGE_BYTES);
    // Longer than what was written once is left alone.
    std::thread::sleep(std::time::Duration::from_millis(2100));
    merge_until_settled(&mut [&mut first, &mut second]);
    merge_new_contents(&mut first, &mut second, 1000);
}

#[test]
fn file_mapped_over_adopted_memory_is_not_merged() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    for member in [&mut first, &mut second] {
        member.run_command("mapfile 100 300");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    // Of what lies there a part is as the file has it, and a part written since; both are the same in both members.
    for member in [&mut first, &mut second] {
        member.run_command("fill 100 100 6");
    }
    merge_new_contents(&mut first, &mut second, 700);
    for member in [&mut first, &mut second] {
        assert_eq!(member.run_command("files"), "untouched");
        // By the engine's own way it is ordinary memory again.
        member.run_command("clear 100 300");
        member.run_command("fill 100 300 7");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    for member in [&mut first, &mut second] {
        let standing = member.read_status();
        assert_eq!((standing.number("merged"), standing.number("store")), (1000, 1000 * PAGE_BYTES));
        assert_eq!(member.run_command("files"), "untouched");
    }
}

#[test]
fn moved_memory_keeps_its_content() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    first.run_command("move 100 300");
    second.run_command("fill 0 1000 6");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store"), 1000 * PAGE_BYTES, "wherever it is mapped");
    first.run_command("back");
    first.run_command("fill 0 1000 7");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store"), 0);
}

#[test]
fn adopted_memory_can_grow_and_shrink() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 100);
    for page in [0, 50, 99] {
        first.run_command(&format!("grow {page}"));
    }
    second.run_command("fill 0 100 6");
    merge_until_settled(&mut [&mut first, &mut second]);
    first.run_command("unmap 90 10");
    merge_until_settled(&mut [&mut first, &mut second]);
}

#[test]
fn dropped_memory_reads_zeros_or_merged_content() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    first.run_command("fill 500 500 6");
    let told = MemberAnswer(first.run_command("dontneed 0 1000"));
    assert_eq!((told.number("zeros"), told.number("kept")), (0, 1000), "the copies are gone, what was merged is not");
    first.run_command("fill 500 500 6");
    first.run_merge();
    let told = MemberAnswer(first.run_command("dontneed 0 1000"));
    assert_eq!((told.number("zeros"), told.number("kept")), (500, 500), "it was ordinary memory again");
    first.run_command("clear 0 1000");
    merge_until_settled(&mut [&mut first, &mut second]);
}

#[test]
fn protected_memory_is_not_merged() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    let mut third = MemberProcess::start(&root, 1000, &[]);
    third.run_command("fill 0 1000 5");
    for member in [&mut first, &mut third] {
        member.run_command("protect 100 200 0");
        member.run_command("protect 400 200 1");
    }
    assert_eq!(third.run_merge().number("merged"), 600);
    second.run_command("fill 0 1000 6");
    merge_until_settled(&mut [&mut first, &mut second, &mut third]);
    for member in [&mut first, &mut third] {
        member.run_command("expose 0 1000");
        member.check_memory();
    }
    assert_eq!(third.run_merge().number("merged"), 400, "what was merged meanwhile is there still");
    merge_until_settled(&mut [&mut first, &mut second, &mut third]);
}

#[test]
fn guard_pages_are_not_merged() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    first.run_command("fill 0 500 6");
    if MemberAnswer(first.run_command("guard 400 200")).number("guarded") == 0 {
        println!("skipped: MADV_GUARD_INSTALL is 6.13's, and 6.15's for mappings of files");
        return;
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    first.run_command("expose 0 1000");
    merge_until_settled(&mut [&mut first, &mut second]);
}

#[test]
fn exec_ends_the_membership() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    assert_eq!(first.run_command("exec"), "ready");
    assert_eq!(first.read_status().number("merged"), 0);
    second.run_command("fill 0 1000 6");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store"), 0);
}

#[test]
fn child_forked_during_merge_keeps_memory_and_gets_error() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 2000);
    let told = MemberAnswer(first.run_command("forks 30"));
    assert_eq!(told.number("wrong"), 0, "{told:?}");
    assert!(told.number("forked") > 0, "{told:?}");
    merge_until_settled(&mut [&mut first, &mut second]);
}

#[test]
fn parent_and_child_write_and_merge_independently() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    first.run_command("fork");
    first.run_command("fork");
    first.run_command("fill 200 300 8");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(first.run_command("child"), "same");
    first.run_command("fill 0 1000 5");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(first.run_command("child"), "same");
    merge_until_settled(&mut [&mut first, &mut second]);
}

#[test]
fn disowned_memory_can_move_during_a_merge() {
    let root = domains_root();
    let (mut first, mut second) = (MemberProcess::start(&root, 10, &[]), MemberProcess::start(&root, 10, &[]));
    let told = MemberAnswer(first.run_command("shuffle 40"));
    if told.0.contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return;
    }
    assert_eq!(told.number("wrong"), 0, "{told:?}");
    // At a safe point nothing is moved, and what is mapped can be told.
    merge_until_settled(&mut [&mut first, &mut second]);
}

/// `kernel.core_pattern` that has dumps written as `core` into the working directory, until it is dropped.
struct CorePatternGuard(Option<String>);

impl CorePatternGuard {
    const CORE_PATTERN_FILE: &str = "/proc/sys/kernel/core_pattern";

    fn set_core_pattern() -> Option<Self> {
        let found = fs::read_to_string(Self::CORE_PATTERN_FILE).ok()?;
        if found.trim() == "core" {
            return Some(Self(None));
        }
        fs::write(Self::CORE_PATTERN_FILE, "core").ok()?;
        Some(Self(Some(found)))
    }
}

impl Drop for CorePatternGuard {
    fn drop(&mut self) {
        if let Some(found) = &self.0 {
            fs::write(Self::CORE_PATTERN_FILE, found).expect("it could be written before");
        }
    }
}

/// What a core dump holds of a range.
fn read_from_core(core: &Path, start: u64, bytes: u64) -> Vec<u8> {
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
fn core_dump_contains_merged_memory() {
    let root = domains_root();
    let (mut first, _second) = merged_pair(&root, 500);
    first.run_command("fill 100 100 6");
    first.run_command("fill 300 50 0");
    first.run_merge();
    let base = MemberAnswer(first.run_command("base")).number("base");
    let mut before = vec![0; (500 * PAGE_BYTES) as usize];
    let memory = fs::File::open(format!("/proc/{}/mem", first.child.id())).expect("it is ours");
    memory.read_exact_at(&mut before, base).expect("it is mapped");
    assert!(before.iter().any(|&byte| byte != 0));
    let directory = tempfile::tempdir().expect("a directory");
    let Some(_pattern) = CorePatternGuard::set_core_pattern() else {
        println!("skipped: kernel.core_pattern is of others, and may not be changed");
        return;
    };
    assert_eq!(first.try_command(&format!("core {}", directory.path().display())), None);
    first.child.wait().expect("it is ours");
    let core = directory.path().read_dir().expect("a directory").flatten().next();
    let core = core.expect("a core dump is written as `core` or `core.PID`").path();
    assert!(read_from_core(&core, base, 500 * PAGE_BYTES) == before, "memory differs from its dump");
}

/// A cgroup of its own, removed when dropped, with the file that tells how much memory it takes.
struct MemberCgroup {
    path: PathBuf,
    usage: PathBuf,
}

impl MemberCgroup {
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

    fn used_bytes(&self) -> u64 {
        fs::read_to_string(&self.usage).ok().and_then(|text| text.trim().parse().ok()).expect("a number")
    }

    /// A member that lives in it from its beginning.
    fn start_member(&self, root: &TempDir, pages: u64) -> MemberProcess {
        let mut command = Command::new("sh");
        let enter = format!(
            "echo $$ > {}/cgroup.procs && exec {} test {pages}",
            self.path.display(),
            member_program().display()
        );
        command.args(["-c", &enter]).env("PAGEFOLD_RUNTIME", root.path());
        MemberProcess::spawn(&mut command, Stdio::inherit()).wait_until_ready(false)
    }
}

impl Drop for MemberCgroup {
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
fn merging_reduces_cgroup_memory() {
    let root = domains_root();
    let Some(cgroup) = MemberCgroup::new() else {
        println!("skipped: no cgroup that tells its memory can be made here");
        return;
    };
    let (mut first, mut second) = (cgroup.start_member(&root, 20_000), cgroup.start_member(&root, 20_000));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 16000 5");
        // Written with zeros after something else: there, and of zeros.
        member.run_command("fill 16000 4000 6");
        member.run_command("fill 16000 4000 0");
    }
    let (before, before_pss) = (cgroup.used_bytes(), first.smaps_rollup_kib("Pss:") + second.smaps_rollup_kib("Pss:"));
    let zeros = first.run_merge().number("zeros") + second.run_merge().number("zeros");
    let mut merged = second.read_status().number("merged");
    first.run_merge();
    merged += first.read_status().number("merged");
    assert_eq!((merged, zeros), (32_000, 8_000));
    let (after, after_pss) = (cgroup.used_bytes(), first.smaps_rollup_kib("Pss:") + second.smaps_rollup_kib("Pss:"));
    let saved = (merged - first.read_status().number("store") / PAGE_BYTES + zeros) * PAGE_BYTES;
    assert_eq!(saved, 24_000 * PAGE_BYTES);
    // Less what the engine itself takes, and what the kernel charges in advance on each CPU.
    let slack = 8 << 20;
    assert!(before - after > saved - slack, "{before} before, {after} after, {saved} saved");
    assert!(before - after < saved + slack, "{before} before, {after} after, {saved} saved");
    let fallen = (before_pss - after_pss) * 1024;
    assert!(fallen > saved - slack && fallen < saved + slack, "{fallen} by PSS, {saved} saved");
    drop((first, second));
}

#[test]
fn members_need_no_privilege_and_share_only_with_own_user() {
    if !is_root() {
        println!("skipped: only root can be somebody else; all other tests are those of a user without privilege now");
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755)).expect("its owner may");
    let copy = place.path().join("member");
    // By another process: what this one has open for writing, a test beside may hand on to a child, and it is not run.
    let copied = Command::new("cp").arg(member_program()).arg(&copy).status().expect("cp");
    assert!(copied.success());
    let (theirs, own) = (domains_root(), domains_root());
    std::os::unix::fs::chown(theirs.path(), Some(65534), Some(65534)).expect("root may");
    let start = |root: &TempDir| {
        let mut command = Command::new(&copy);
        command.args(["test", "1000"]).env("PAGEFOLD_RUNTIME", root.path());
        // The standard library gives groups up with this, as root.
        MemberProcess::spawn(command.uid(65534).gid(65534), Stdio::inherit())
    };
    let (mut first, mut second) = (start(&theirs).wait_until_ready(false), start(&theirs).wait_until_ready(false));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 900 5");
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("merged"), 900);
    // While they run they may merge only where everybody may, if the kernel can do it at all.
    let able = MemberProcess::start(&own, 10, &[]).run_command("running").contains("looked_at");
    let set = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|set| set.trim() == "1");
    let mut open = Command::new("sh");
    open.args(["-c", ": <> /dev/userfaultfd"]).stderr(Stdio::null());
    let opened = open.uid(65534).gid(65534).status().expect("a shell").success();
    let told = first.run_command("running");
    if able && (set || opened) {
        assert!(told.contains("looked_at"), "{told}");
    } else {
        let remedy = "merging while the program runs needs Linux 6.4 and userfaultfd: CAP_SYS_PTRACE, \
                      vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; merging at safe points does not";
        assert_eq!(told, remedy);
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    // Neither joins the other's domain.
    let root_member = MemberProcess::start(&own, 10, &[]);
    let refused = start(&own).read_answer().expect("it says why");
    assert!(refused.contains("cannot use") || refused.contains("others can change"), "{refused}");
    let mut command = Command::new(member_program());
    command.args(["test", "10"]).env("PAGEFOLD_RUNTIME", theirs.path());
    let refused = MemberProcess::spawn(&mut command, Stdio::inherit()).read_answer().expect("it says why");
    assert!(refused.contains("others can change"), "{refused}");
    drop(root_member);
}

/// `/sys/kernel/mm/ksm` is not there, and whatever asks for KSM is refused, as by a kernel that was built without.
#[test]
fn members_work_on_kernels_without_ksm() {
    if !is_root() {
        println!("skipped: only root can hide /sys/kernel/mm");
        return;
    }
    let root = domains_root();
    let without = || {
        let mut command = Command::new("unshare");
        let hide = "mount -t tmpfs -o size=4k none /sys/kernel/mm && test ! -e /sys/kernel/mm/ksm && exec \"$@\"";
        command.args(["--mount", "sh", "-c", hide, "sh"]).arg(member_program()).args(["test", "1000"]);
        command.env("PAGEFOLD_RUNTIME", root.path());
        // SAFETY: the filter was made before; to install it is a few system calls.
        unsafe { command.pre_exec(refuse_ksm()) };
        MemberProcess::spawn(&mut command, Stdio::inherit())
    };
    let mut first = without();
    match first.read_answer().as_deref() {
        Some("ready") => {}
        _ => {
            println!("skipped: no mount namespace can be had");
            return;
        }
    }
    let mut second = without().wait_until_ready(false);
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 900 5");
        member.run_command("fill 900 100 0");
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("merged"), 900);
    merge_until_settled(&mut [&mut first, &mut second]);
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
