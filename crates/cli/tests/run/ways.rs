//! Each way to enrol a program, held against what the kernel says of its memory.

use crate::programs::{self, compile, ksm, mergeable, present, refusal, run, run_refused, text};
use pagefold_labs::client::install;
use pagefold_labs::ksm::Ksm;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NOBODY: u32 = 65534;

/// A program of `labs/run/tree.c` and its descendants, that hold until this is dropped.
struct Tree {
    child: Child,
    pids: Vec<u32>,
}

impl Tree {
    fn start(command: &mut Command, generations: usize) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = |line: std::io::Result<String>| line.unwrap().split(' ').next().unwrap().parse().unwrap();
        let pids: Vec<u32> = lines.take(generations).map(pid).collect();
        assert_eq!(pids.len(), generations);
        Self { child, pids }
    }

    /// Wait until a condition holds for every process.
    fn wait(&self, what: &str, condition: impl Fn(u32) -> bool) {
        let started = Instant::now();
        for &pid in &self.pids {
            while !condition(pid) {
                assert!(started.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The second thread's blocked signals, and nothing if there is none.
fn thread_blocks(pid: u32) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| task.unwrap().path());
    let threads: Vec<_> = tasks.filter(|task| !task.ends_with(pid.to_string())).collect();
    assert!(threads.len() < 2, "{threads:?}");
    let status = fs::read_to_string(threads.first()?.join("status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).map(str::to_owned)
}

fn merge_any(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains("ksm_merge_any: yes")
}

fn mostly(pid: u32) -> bool {
    let (marked, all) = mergeable(pid);
    all > 16 << 20 && marked * 100 >= all * 95
}

#[test]
fn a_tree_inherits_enrolment() {
    if !ksm() || !present("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (name, flags) in [("dynamic", &[][..]), ("static", &["-static"])] {
        let program = compile("gcc", "tree.c", flags, folder.path());
        let tree = Tree::start(run().args(["--way", "prctl", "--"]).arg(&program).args(["20", "3"]), 3);
        for &pid in &tree.pids {
            assert!(merge_any(pid) && mostly(pid), "{name}: {:?}", mergeable(pid));
            assert_eq!(thread_blocks(pid), None, "{name}");
        }
    }
}

#[test]
fn a_preloaded_library_asks_from_within() {
    if !ksm() || !present("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gcc", "tree.c", &[], folder.path());
    let tree = Tree::start(run().args(["--way", "preload", "--"]).arg(&program).args(["20", "3"]), 3);
    for &pid in &tree.pids {
        assert!(merge_any(pid) && mostly(pid), "{:?}", mergeable(pid));
        assert_eq!(thread_blocks(pid), None, "where the kernel does it, no thread is needed");
    }
}

#[test]
fn where_the_kernel_refuses_the_library_marks_what_is_mapped() {
    if !ksm() || !present("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gcc", "tree.c", &[], folder.path());
    // EPERM, and EINVAL as before Linux 6.4.
    for errno in [1, 22] {
        let tree = Tree::start(run_refused(errno).arg("--").arg(&program).args(["20", "3"]), 3);
        tree.wait("enrolled by a thread", mostly);
        for &pid in &tree.pids {
            assert!(!merge_any(pid));
            let blocked = thread_blocks(pid).expect("a thread in each process, forked or started");
            // All that can be blocked: not KILL (9) and STOP (19), nor glibc's own 32 and 33.
            assert_eq!(u64::from_str_radix(&blocked, 16).unwrap(), !(1 << 8 | 1 << 18 | 3 << 31), "{blocked}");
        }
    }
    let said = text(&run_refused(1).args(["--how", "--", "true"]).output().unwrap().stderr);
    assert!(said.contains("by a preloaded library (prctl: PR_SET_MEMORY_MERGE: "), "{said}");
}

#[test]
fn a_process_whose_main_thread_ends_first_still_ends() {
    if !ksm() || !present("gcc") || !present("timeout") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("leave.c");
    fs::write(&source, "#include <pthread.h>\nint main(void) { pthread_exit(0); }\n").unwrap();
    let program = compile("gcc", source.to_str().unwrap(), &["-pthread"], folder.path());
    let status = run_refused(1).args(["--", "timeout", "--signal=KILL", "60"]).arg(&program).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn programs_that_no_library_reaches_are_named() {
    if !ksm() || !present("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let fixed = compile("gcc", "tree.c", &["-static"], folder.path());
    let preload = || {
        let mut command = run();
        command.args(["--way", "preload", "--"]);
        command
    };
    let said = refusal(preload().arg(&fixed));
    assert!(said.contains("is linked statically") && said.contains("--best-effort"), "{said}");
    let script = folder.path().join("script");
    fs::write(&script, format!("#!{}\n", fixed.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refusal(preload().arg(&script)).contains("is linked statically"));

    let output = run().args(["--way", "preload", "--best-effort", "--"]).arg(&fixed).arg("x").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "the program's own status, for its own reason");
    assert!(text(&output.stderr).starts_with("pagefold: not enrolled in KSM: "), "{}", text(&output.stderr));
}

#[test]
fn setuid_programs_are_named_to_those_for_whom_they_are() {
    if !ksm() || !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to make a setuid program, and KSM");
    }
    // He is enrolled for a moment, and others' tests are of other domains.
    let Some(_ksm) = Ksm::take_as_others_set_it() else { return };
    // What the user may execute, wherever this tree is.
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &Path, name: &str, mode| {
        let path = folder.path().join(name);
        install(from, &path, mode).unwrap();
        path
    };
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let pagefold = copy(programs::PAGEFOLD.as_ref(), "pagefold", 0o755);
    copy(programs::library(), "libpagefold_preload.so", 0o755);
    let setuid = copy("/bin/true".as_ref(), "setuid", 0o4755);
    let run = |way| {
        let mut command = Command::new(&pagefold);
        command.args(["run", "--way", way, "--"]).arg(&setuid).uid(NOBODY).gid(NOBODY);
        command
    };
    assert!(refusal(&mut run("preload")).contains("is setuid"));
    assert!(run("prctl").status().unwrap().success());
    // For root it is a program as any other.
    assert!(programs::run().args(["--way", "preload", "--"]).arg(&setuid).status().unwrap().success());
}

/// Whether a tree can be enrolled from outside; says that the test is skipped otherwise.
fn injects() -> bool {
    if !ksm() || !present("gcc") {
        return false;
    }
    let how = run().args(["--way", "inject", "--dry-run", "--", "true"]).output().unwrap();
    if !how.status.success() {
        println!("skipped: {}", text(&how.stderr).trim());
    }
    how.status.success()
}

/// Wait until nobody has a file open for standard error.
fn wait_until_left(file: &Path) {
    let started = Instant::now();
    let holds = |entry: std::io::Result<fs::DirEntry>| {
        fs::read_link(entry.unwrap().path().join("fd/2")).is_ok_and(|holder| holder == file)
    };
    while fs::read_dir("/proc").unwrap().any(holds) {
        assert!(started.elapsed() < Duration::from_secs(60), "somebody stays behind for a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_companion_enrols_a_tree_and_ends_with_it() {
    if !injects() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let errors = folder.path().canonicalize().unwrap().join("errors");
    for flags in [&[][..], &["-static"]] {
        let program = compile("gcc", "tree.c", flags, folder.path());
        let mut command = run();
        command.args(["--way", "inject", "--"]).arg(&program).args(["20", "3"]);
        let tree = Tree::start(command.stderr(fs::File::create(&errors).unwrap()), 3);
        tree.wait("enrolled from outside", |pid| merge_any(pid) && mostly(pid));
        drop(command);
        drop(tree);
        wait_until_left(&errors);
        assert_eq!(fs::read_to_string(&errors).unwrap(), "");
    }
}

/// Who reads what a program says waits until the program has closed it, and not for the companion.
#[test]
fn a_companion_holds_no_pipe_of_the_program() {
    if !injects() {
        return;
    }
    let mut command = run();
    command.args(["--way", "inject", "--", "sh", "-c", "exec sleep 30 2> /dev/null"]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let status = child.try_wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((status, said.as_str()), (None, ""));
}

#[test]
fn mpi_ranks_are_enrolled_and_compute_as_without() {
    if !ksm() || !present("mpicc") || !present("mpirun") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("mpicc", "ranks.c", &[], folder.path());
    let ranks = |starter: &[&str], status: &str| {
        let mut command = Command::new("mpirun");
        command.env("PAGEFOLD_PRELOAD", programs::library());
        command.args(["--allow-run-as-root", "--oversubscribe", "-np", "4"]).args(starter).arg(&program).arg(status);
        command.output().unwrap()
    };
    let run = |way| [programs::PAGEFOLD, "run", "--across-domains", "--way", way, "--"];
    for status in ["0", "3"] {
        let without = ranks(&[], status);
        assert!(text(&without.stderr).contains("enrolled=0"), "{}", text(&without.stderr));
        for way in ["prctl", "preload"] {
            let with = ranks(&run(way), status);
            assert!(text(&with.stderr).contains("enrolled=4"), "{}", text(&with.stderr));
            assert_eq!((with.status.code(), text(&with.stdout)), (without.status.code(), text(&without.stdout)));
        }
    }
}

#[test]
fn addresses_are_the_same_each_time_without_randomisation() {
    if !ksm() {
        return;
    }
    let addresses = |options: &[&str]| {
        let output = run().args(options).args(["--", "sh", "-c", "cat /proc/self/maps"]).output().unwrap();
        text(&output.stdout).lines().find(|line| line.ends_with("[stack]")).map(str::to_owned).expect("a stack")
    };
    assert_eq!(addresses(&["--no-aslr"]), addresses(&["--no-aslr"]));
    if fs::read_to_string("/proc/sys/kernel/randomize_va_space").is_ok_and(|value| value.trim() != "0") {
        assert_ne!(addresses(&[]), addresses(&[]));
    }
}

#[test]
fn a_kernel_without_ksm_is_named_with_the_remedy() {
    if !nix::unistd::geteuid().is_root() || !present("unshare") {
        return println!("skipped: needs root and unshare(1) to hide /sys/kernel/mm/ksm");
    }
    // prctl fails as on such a kernel, the library is away, and /sys has no such folder.
    let lab = pagefold_labs::client::binary().unwrap();
    let script = "mount -t tmpfs none /sys/kernel/mm && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(lab).args(["refuse-prctl", "--errno", "22", "--"]);
    command.args([programs::PAGEFOLD, "run", "--way", "prctl", "--", "true"]);
    let said = refusal(&mut command);
    assert!(said.contains("CONFIG_KSM=y") && said.contains("--best-effort"), "{said}");
}
