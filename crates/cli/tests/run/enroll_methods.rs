//! Compares each method to enroll a program with what the kernel reports about its memory.

use crate::test_programs::{
    self, anonymous_and_mergeable_bytes, compile, has_ksm, has_program, lossy_text, refusal_line, run_command,
    run_with_prctl_refused,
};
use pagefold_labs::client::install_executable;
use pagefold_labs::ksm::KsmTestGuard;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const NOBODY_UID: u32 = 65534;

/// A program of `labs/run/tree.c` and its descendants, which run until this is dropped.
struct ProgramTree {
    child: Child,
    pids: Vec<u32>,
}

impl ProgramTree {
    fn start(command: &mut Command, generations: usize) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let pid = |line: std::io::Result<String>| line.unwrap().split(' ').next().unwrap().parse().unwrap();
        let pids: Vec<u32> = lines.take(generations).map(pid).collect();
        assert_eq!(pids.len(), generations);
        Self { child, pids }
    }

    /// Wait until a condition is true for every process.
    fn wait_for_each(&self, description: &str, condition: impl Fn(u32) -> bool) {
        let started = Instant::now();
        for &pid in &self.pids {
            while !condition(pid) {
                assert!(started.elapsed() < Duration::from_secs(60), "timeout after a minute: {description}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

impl Drop for ProgramTree {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

/// The blocked signals of the second thread, or `None` if there is no second thread.
fn second_thread_signal_mask(pid: u32) -> Option<String> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|task| task.unwrap().path());
    let threads: Vec<_> = tasks.filter(|task| !task.ends_with(pid.to_string())).collect();
    assert!(threads.len() < 2, "{threads:?}");
    let status = fs::read_to_string(threads.first()?.join("status")).unwrap();
    status.lines().find_map(|line| line.strip_prefix("SigBlk:\t")).map(str::to_owned)
}

fn has_merge_any(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains("ksm_merge_any: yes")
}

fn is_mostly_mergeable(pid: u32) -> bool {
    let (marked, all) = anonymous_and_mergeable_bytes(pid);
    all > 16 << 20 && marked * 100 >= all * 95
}

#[test]
fn process_tree_inherits_enrollment() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for (name, flags) in [("dynamic", &[][..]), ("static", &["-static"])] {
        let program = compile("gcc", "tree.c", flags, folder.path());
        let tree =
            ProgramTree::start(run_command().args(["--method", "prctl", "--"]).arg(&program).args(["20", "3"]), 3);
        for &pid in &tree.pids {
            assert!(has_merge_any(pid) && is_mostly_mergeable(pid), "{name}: {:?}", anonymous_and_mergeable_bytes(pid));
            assert_eq!(second_thread_signal_mask(pid), None, "{name}");
        }
    }
}

#[test]
fn preload_library_enrolls_from_within() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gcc", "tree.c", &[], folder.path());
    let tree = ProgramTree::start(run_command().args(["--method", "preload", "--"]).arg(&program).args(["20", "3"]), 3);
    for &pid in &tree.pids {
        assert!(has_merge_any(pid) && is_mostly_mergeable(pid), "{:?}", anonymous_and_mergeable_bytes(pid));
        assert_eq!(second_thread_signal_mask(pid), None, "prctl works, so the library must start no thread");
    }
}

#[test]
fn library_marks_mappings_when_prctl_is_refused() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("gcc", "tree.c", &[], folder.path());
    // EPERM, and EINVAL as before Linux 6.4.
    for errno in [1, 22] {
        let tree = ProgramTree::start(run_with_prctl_refused(errno).arg("--").arg(&program).args(["20", "3"]), 3);
        tree.wait_for_each("enrolled by a thread", is_mostly_mergeable);
        for &pid in &tree.pids {
            assert!(!has_merge_any(pid));
            let blocked = second_thread_signal_mask(pid).expect("a process of the tree has no second thread");
            // All signals that can be blocked: not KILL (9) and STOP (19), nor glibc's internal 32 and 33.
            assert_eq!(u64::from_str_radix(&blocked, 16).unwrap(), !(1 << 8 | 1 << 18 | 3 << 31), "{blocked}");
        }
    }
    let stderr = lossy_text(&run_with_prctl_refused(1).args(["--how", "--", "true"]).output().unwrap().stderr);
    assert!(stderr.contains("by a preloaded library (prctl: PR_SET_MEMORY_MERGE: "), "{stderr}");
}

#[test]
fn process_exits_after_its_main_thread() {
    if !has_ksm() || !has_program("gcc") || !has_program("timeout") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("leave.c");
    fs::write(&source, "#include <pthread.h>\nint main(void) { pthread_exit(0); }\n").unwrap();
    let program = compile("gcc", source.to_str().unwrap(), &["-pthread"], folder.path());
    let status =
        run_with_prctl_refused(1).args(["--", "timeout", "--signal=KILL", "60"]).arg(&program).status().unwrap();
    assert_eq!(status.code(), Some(0));
}

#[test]
fn programs_without_preload_support_are_named() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let static_program = compile("gcc", "tree.c", &["-static"], folder.path());
    let preload = || {
        let mut command = run_command();
        command.args(["--method", "preload", "--"]);
        command
    };
    let error = refusal_line(preload().arg(&static_program));
    assert!(error.contains("is linked statically") && error.contains("--best-effort"), "{error}");
    let script = folder.path().join("script");
    fs::write(&script, format!("#!{}\n", static_program.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(refusal_line(preload().arg(&script)).contains("is linked statically"));

    let output = run_command()
        .args(["--method", "preload", "--best-effort", "--"])
        .arg(&static_program)
        .arg("x")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "the exit status must be the program's own");
    assert!(
        lossy_text(&output.stderr).starts_with("pagefold: not enrolled in KSM: "),
        "{}",
        lossy_text(&output.stderr)
    );
}

#[test]
fn setuid_programs_are_named_to_affected_users() {
    if !has_ksm() || !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to make a setuid program, and KSM");
    }
    // The user is enrolled for a moment, and other tests use other trust domains.
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    // A copy that the user can execute, wherever this tree is.
    let folder = tempfile::tempdir().unwrap();
    let copy = |from: &Path, name: &str, mode| {
        let path = folder.path().join(name);
        install_executable(from, &path, mode).unwrap();
        path
    };
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let pagefold = copy(test_programs::PAGEFOLD_BINARY.as_ref(), "pagefold", 0o755);
    copy(test_programs::preload_library(), "libpagefold_preload.so", 0o755);
    let setuid = copy("/bin/true".as_ref(), "setuid", 0o4755);
    let run = |method| {
        let mut command = Command::new(&pagefold);
        command.args(["run", "--method", method, "--"]).arg(&setuid).uid(NOBODY_UID).gid(NOBODY_UID);
        command
    };
    assert!(refusal_line(&mut run("preload")).contains("is setuid"));
    assert!(run("prctl").status().unwrap().success());
    // For root it is an ordinary program.
    assert!(test_programs::run_command().args(["--method", "preload", "--"]).arg(&setuid).status().unwrap().success());
}

/// Whether a process tree can be enrolled from outside; prints `skipped: why` if not.
fn can_inject() -> bool {
    if !has_ksm() || !has_program("gcc") {
        return false;
    }
    let output = run_command().args(["--method", "inject", "--dry-run", "--", "true"]).output().unwrap();
    if !output.status.success() {
        println!("skipped: {}", lossy_text(&output.stderr).trim());
    }
    output.status.success()
}

/// Wait until no process has a file open as standard error.
fn wait_until_stderr_is_closed(file: &Path) {
    let started = Instant::now();
    let has_file_open = |entry: std::io::Result<fs::DirEntry>| {
        fs::read_link(entry.unwrap().path().join("fd/2")).is_ok_and(|holder| holder == file)
    };
    while fs::read_dir("/proc").unwrap().any(has_file_open) {
        assert!(started.elapsed() < Duration::from_secs(60), "a process still has the file open after a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn companion_enrolls_a_tree_and_ends_with_it() {
    if !can_inject() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let errors = folder.path().canonicalize().unwrap().join("errors");
    for flags in [&[][..], &["-static"]] {
        let program = compile("gcc", "tree.c", flags, folder.path());
        let mut command = run_command();
        command.args(["--method", "inject", "--"]).arg(&program).args(["20", "3"]);
        let tree = ProgramTree::start(command.stderr(fs::File::create(&errors).unwrap()), 3);
        tree.wait_for_each("enrolled from outside", |pid| has_merge_any(pid) && is_mostly_mergeable(pid));
        drop(command);
        drop(tree);
        wait_until_stderr_is_closed(&errors);
        assert_eq!(fs::read_to_string(&errors).unwrap(), "");
    }
}

/// A reader of the program's output waits until the program has closed it, not until the companion exits.
#[test]
fn companion_holds_no_pipe_of_the_program() {
    if !can_inject() {
        return;
    }
    let mut command = run_command();
    command.args(["--method", "inject", "--", "sh", "-c", "exec sleep 30 2> /dev/null"]).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    let status = child.try_wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!((status, stderr.as_str()), (None, ""));
}

#[test]
fn mpi_ranks_are_enrolled_with_unchanged_results() {
    if !has_ksm() || !has_program("mpicc") || !has_program("mpirun") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = compile("mpicc", "ranks.c", &[], folder.path());
    let ranks = |starter: &[&str], status: &str| {
        let mut command = Command::new("mpirun");
        command.env("PAGEFOLD_PRELOAD", test_programs::preload_library());
        command.args(["--allow-run-as-root", "--oversubscribe", "-np", "4"]).args(starter).arg(&program).arg(status);
        command.output().unwrap()
    };
    let run = |method| [test_programs::PAGEFOLD_BINARY, "run", "--across-domains", "--method", method, "--"];
    for status in ["0", "3"] {
        let without = ranks(&[], status);
        assert!(lossy_text(&without.stderr).contains("enrolled=0"), "{}", lossy_text(&without.stderr));
        for method in ["prctl", "preload"] {
            let with = ranks(&run(method), status);
            assert!(lossy_text(&with.stderr).contains("enrolled=4"), "{}", lossy_text(&with.stderr));
            assert_eq!(
                (with.status.code(), lossy_text(&with.stdout)),
                (without.status.code(), lossy_text(&without.stdout))
            );
        }
    }
}

#[test]
fn no_aslr_gives_the_same_addresses_each_time() {
    if !has_ksm() {
        return;
    }
    let addresses = |options: &[&str]| {
        let output = run_command().args(options).args(["--", "sh", "-c", "cat /proc/self/maps"]).output().unwrap();
        lossy_text(&output.stdout).lines().find(|line| line.ends_with("[stack]")).map(str::to_owned).expect("no stack")
    };
    assert_eq!(addresses(&["--no-aslr"]), addresses(&["--no-aslr"]));
    if fs::read_to_string("/proc/sys/kernel/randomize_va_space").is_ok_and(|value| value.trim() != "0") {
        assert_ne!(addresses(&[]), addresses(&[]));
    }
}

#[test]
fn kernel_without_ksm_is_reported_with_remedy() {
    if !nix::unistd::geteuid().is_root() || !has_program("unshare") {
        return println!("skipped: needs root and unshare(1) to hide /sys/kernel/mm/ksm");
    }
    // prctl fails as on a kernel without KSM, the library is missing, and /sys has no KSM directory.
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let script = "mount -t tmpfs none /sys/kernel/mm && exec \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(lab).args(["refuse-prctl", "--errno", "22", "--"]);
    command.args([test_programs::PAGEFOLD_BINARY, "run", "--method", "prctl", "--", "true"]);
    let error = refusal_line(&mut command);
    assert!(error.contains("CONFIG_KSM=y") && error.contains("--best-effort"), "{error}");
}
