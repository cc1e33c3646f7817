//! Operations of programs on their memory besides writing, and environments in which programs run. The library's
//! documentation states the behavior of each; a test here checks it.

mod member;

use member::{MemberAnswer, MemberProcess, PAGE_BYTES, domains_root, member_program, merge_until_settled};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// Two members of a domain that have merged all pages of one seed.
fn merged_pair(root: &TempDir, pages: u64) -> (MemberProcess, MemberProcess) {
    let (mut first, mut second) = (MemberProcess::start(root, pages, &[]), MemberProcess::start(root, pages, &[]));
    for member in [&mut first, &mut second] {
        member.run_command(&format!("fill 0 {pages} 5"));
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("pages_merged"), pages);
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
    assert_eq!(second.read_status().number("store_bytes"), 700 * PAGE_BYTES);
    for member in [&mut first, &mut second] {
        // A new mapping of the program at that address is not the engine's.
        member.run_command("map 100 300");
        member.run_command("fill 100 300 6");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    assert!(second.read_status().number("store_bytes") > 700 * PAGE_BYTES, "new memory is adopted like any other");
}

/// Two members have `pages` merged pages, and again `pages` after the last 600 get new contents. Nothing else remains
/// in the store.
fn merge_new_contents(first: &mut MemberProcess, second: &mut MemberProcess, pages: u64) {
    for member in [&mut *first, &mut *second] {
        assert_eq!(member.read_status().number("merged"), pages);
        member.run_command("clear 400 600");
        member.run_command("fill 400 600 6");
    }
    assert_eq!(first.read_status().number("store_bytes"), pages * PAGE_BYTES);
    merge_until_settled(&mut [&mut *first, &mut *second]);
    for member in [first, second] {
        let status = member.read_status();
        assert_eq!((status.number("merged"), status.number("store_bytes")), (pages, pages * PAGE_BYTES));
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
        assert_eq!((merged.number("cow_breaks"), merged.number("backed_off")), (300, 300));
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store_bytes"), 700 * PAGE_BYTES);
    // Longer than pages are skipped after one write.
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
    // One part of that range has the file's content, and one part was written since; both are equal in both members.
    for member in [&mut first, &mut second] {
        member.run_command("fill 100 100 6");
    }
    merge_new_contents(&mut first, &mut second, 700);
    for member in [&mut first, &mut second] {
        assert_eq!(member.run_command("files"), "untouched");
        // The engine's `clear` makes it ordinary memory again.
        member.run_command("clear 100 300");
        member.run_command("fill 100 300 7");
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    for member in [&mut first, &mut second] {
        let status = member.read_status();
        assert_eq!((status.number("merged"), status.number("store_bytes")), (1000, 1000 * PAGE_BYTES));
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
    assert_eq!(second.read_status().number("store_bytes"), 1000 * PAGE_BYTES, "a moved mapping stays merged");
    first.run_command("back");
    first.run_command("fill 0 1000 7");
    merge_until_settled(&mut [&mut first, &mut second]);
    assert_eq!(second.read_status().number("store_bytes"), 0);
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
    let answer = MemberAnswer(first.run_command("dontneed 0 1000"));
    assert_eq!((answer.number("zeros"), answer.number("kept")), (0, 1000), "copies are gone, merged pages are not");
    first.run_command("fill 500 500 6");
    first.run_merge();
    let answer = MemberAnswer(first.run_command("dontneed 0 1000"));
    assert_eq!((answer.number("zeros"), answer.number("kept")), (500, 500), "it was ordinary memory again");
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
    assert_eq!(third.run_merge().number("pages_merged"), 600);
    second.run_command("fill 0 1000 6");
    merge_until_settled(&mut [&mut first, &mut second, &mut third]);
    for member in [&mut first, &mut third] {
        member.run_command("expose 0 1000");
        member.check_memory();
    }
    assert_eq!(third.run_merge().number("pages_merged"), 400, "contents that were merged before still exist");
    merge_until_settled(&mut [&mut first, &mut second, &mut third]);
}

#[test]
fn guard_pages_are_not_merged() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 1000);
    first.run_command("fill 0 500 6");
    if MemberAnswer(first.run_command("guard 400 200")).number("guarded") == 0 {
        println!("skipped: MADV_GUARD_INSTALL needs Linux 6.13, and 6.15 for file mappings");
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
    assert_eq!(second.read_status().number("store_bytes"), 0);
}

#[test]
fn child_forked_during_merge_keeps_memory_and_gets_error() {
    let root = domains_root();
    let (mut first, mut second) = merged_pair(&root, 2000);
    let answer = MemberAnswer(first.run_command("forks 30"));
    assert_eq!(answer.number("wrong"), 0, "{answer:?}");
    assert!(answer.number("forked") > 0, "{answer:?}");
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
    let answer = MemberAnswer(first.run_command("shuffle 40"));
    if answer.0.contains("needs Linux 6.4 and userfaultfd") {
        println!("skipped: userfaultfd is not permitted");
        return;
    }
    assert_eq!(answer.number("wrong"), 0, "{answer:?}");
    // At a safe point no mapping moves, so the engine sees all of them.
    merge_until_settled(&mut [&mut first, &mut second]);
}

/// Sets `kernel.core_pattern` so that the kernel writes dumps as `core` into the working directory; restores it on
/// drop.
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

/// The content of a range in a core dump.
fn read_from_core(core: &Path, start: u64, bytes: u64) -> Vec<u8> {
    let stream = elf::ElfStream::<elf::endian::NativeEndian, _>::open_stream(fs::File::open(core).expect("a dump"))
        .expect("an ELF file");
    let segments = stream.segments().to_vec();
    let mut content = vec![0; bytes as usize];
    let file = fs::File::open(core).expect("a dump");
    for segment in segments {
        let (from, to) = (start.max(segment.p_vaddr), (start + bytes).min(segment.p_vaddr + segment.p_filesz));
        if segment.p_type == elf::abi::PT_LOAD && from < to {
            let part = &mut content[(from - start) as usize..(to - start) as usize];
            file.read_exact_at(part, segment.p_offset + from - segment.p_vaddr).expect("the dump contains the segment");
        }
    }
    content
}

#[test]
fn core_dump_contains_merged_memory() {
    let root = domains_root();
    let (mut first, _second) = merged_pair(&root, 500);
    first.run_command("fill 100 100 6");
    first.run_command("fill 300 50 0");
    first.run_merge();
    let base = MemberAnswer(first.run_command("base")).number("base");
    let mut expected = vec![0; (500 * PAGE_BYTES) as usize];
    let memory = fs::File::open(format!("/proc/{}/mem", first.child.id())).expect("our child");
    memory.read_exact_at(&mut expected, base).expect("it is mapped");
    assert!(expected.iter().any(|&byte| byte != 0));
    let directory = tempfile::tempdir().expect("a directory");
    let Some(_pattern) = CorePatternGuard::set_core_pattern() else {
        println!("skipped: kernel.core_pattern has another value and cannot be changed");
        return;
    };
    assert_eq!(first.try_command(&format!("core {}", directory.path().display())), None);
    first.child.wait().expect("our child");
    let core = directory.path().read_dir().expect("a directory").flatten().next();
    let core = core.expect("a core dump is written as `core` or `core.PID`").path();
    assert!(read_from_core(&core, base, 500 * PAGE_BYTES) == expected, "memory differs from its dump");
}

/// A cgroup for this test, removed on drop, with the file of its memory usage.
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

    /// A member that runs in the cgroup from its start.
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
        println!("skipped: cannot create a cgroup that reports its memory usage");
        return;
    };
    let (mut first, mut second) = (cgroup.start_member(&root, 20_000), cgroup.start_member(&root, 20_000));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 16000 5");
        // Zeros written over other contents: resident pages of zeros.
        member.run_command("fill 16000 4000 6");
        member.run_command("fill 16000 4000 0");
    }
    let (before, before_pss) = (cgroup.used_bytes(), first.smaps_rollup_kib("Pss:") + second.smaps_rollup_kib("Pss:"));
    let zeros = first.run_merge().number("zeros_freed") + second.run_merge().number("zeros_freed");
    let mut merged = second.read_status().number("merged");
    first.run_merge();
    merged += first.read_status().number("merged");
    assert_eq!((merged, zeros), (32_000, 8_000));
    let (after, after_pss) = (cgroup.used_bytes(), first.smaps_rollup_kib("Pss:") + second.smaps_rollup_kib("Pss:"));
    let saved = (merged - first.read_status().number("store_bytes") / PAGE_BYTES + zeros) * PAGE_BYTES;
    assert_eq!(saved, 24_000 * PAGE_BYTES);
    // Less the engine's own memory, and the memory that the kernel charges in advance on each CPU.
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
        println!("skipped: only root can become another user; all other tests now run without privilege");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).expect("permission");
    let copy = directory.path().join("member");
    // Another process copies the file. A child of a concurrent test may inherit a descriptor that this process has open
    // for writing, and then exec fails.
    let copied = Command::new("cp").arg(member_program()).arg(&copy).status().expect("cp");
    assert!(copied.success());
    let (other_root, own_root) = (domains_root(), domains_root());
    std::os::unix::fs::chown(other_root.path(), Some(65534), Some(65534)).expect("permission");
    let start = |root: &TempDir| {
        let mut command = Command::new(&copy);
        command.args(["test", "1000"]).env("PAGEFOLD_RUNTIME", root.path());
        // As root, the standard library also drops the supplementary groups.
        MemberProcess::spawn(command.uid(65534).gid(65534), Stdio::inherit())
    };
    let (mut first, mut second) =
        (start(&other_root).wait_until_ready(false), start(&other_root).wait_until_ready(false));
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 900 5");
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("pages_merged"), 900);
    // While they run, these members can merge only where every user may use userfaultfd, if the kernel supports that.
    let able = MemberProcess::start(&own_root, 10, &[]).run_command("running").contains("pages_scanned");
    let set = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd").is_ok_and(|set| set.trim() == "1");
    let mut open = Command::new("sh");
    open.args(["-c", ": <> /dev/userfaultfd"]).stderr(Stdio::null());
    let opened = open.uid(65534).gid(65534).status().expect("a shell").success();
    let answer = first.run_command("running");
    if able && (set || opened) {
        assert!(answer.contains("pages_scanned"), "{answer}");
    } else {
        let remedy = "merging while the program runs needs Linux 6.4 and userfaultfd: CAP_SYS_PTRACE, \
                      vm.unprivileged_userfaultfd=1, or access to /dev/userfaultfd; \
                      merging at safe points needs neither";
        assert_eq!(answer, remedy);
    }
    merge_until_settled(&mut [&mut first, &mut second]);
    // Neither user's member joins the other user's domain.
    let root_member = MemberProcess::start(&own_root, 10, &[]);
    let refused = start(&own_root).read_answer().expect("it says why");
    assert!(refused.contains("cannot use") || refused.contains("is not a private directory"), "{refused}");
    let mut command = Command::new(member_program());
    command.args(["test", "10"]).env("PAGEFOLD_RUNTIME", other_root.path());
    let refused = MemberProcess::spawn(&mut command, Stdio::inherit()).read_answer().expect("it says why");
    assert!(refused.contains("is not a private directory"), "{refused}");
    drop(root_member);
}

/// `/sys/kernel/mm/ksm` is hidden and all KSM calls are refused, as by a kernel without KSM.
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
        // SAFETY: the filter exists already; installing it takes a few system calls only.
        unsafe { command.pre_exec(refuse_ksm()) };
        MemberProcess::spawn(&mut command, Stdio::inherit())
    };
    let mut first = without();
    match first.read_answer().as_deref() {
        Some("ready") => {}
        _ => {
            println!("skipped: cannot create a mount namespace");
            return;
        }
    }
    let mut second = without().wait_until_ready(false);
    for member in [&mut first, &mut second] {
        member.run_command("fill 0 900 5");
        member.run_command("fill 900 100 0");
        member.run_merge();
    }
    assert_eq!(first.run_merge().number("pages_merged"), 900);
    merge_until_settled(&mut [&mut first, &mut second]);
}

/// Makes madvise(2) and prctl(2) return `EINVAL` for all KSM operations.
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
    let architecture = std::env::consts::ARCH.try_into().expect("an architecture that seccomp filters support");
    let refuse = SeccompAction::Errno(libc::EINVAL as u32);
    let filter = SeccompFilter::new(rules.into_iter().collect(), SeccompAction::Allow, refuse, architecture);
    let program: BpfProgram = filter.expect("a filter").try_into().expect("a program");
    move || seccompiler::apply_filter(&program).map_err(std::io::Error::other)
}
