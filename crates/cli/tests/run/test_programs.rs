//! Programs for the tests of `pagefold run`: built from `labs/run`, and started by its various methods.

use pagefold_labs::process_checks::wait_until;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

pub const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");

/// For env(1): the signals that nohup(1) and shells ignore in background jobs, such as these tests.
pub const ENV_DEFAULT_SIGNALS: &str = "--default-signal=HUP,INT,QUIT";

/// Maximum running time of a test program.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);

/// Kills a child that runs longer than [`PROGRAM_TIMEOUT`], so that no test waits forever. Drop it before waiting for
/// the child, or after the child has exited.
pub struct ProgramTimeout(Option<(Sender<()>, JoinHandle<()>)>);

impl ProgramTimeout {
    pub fn new(child: &Child) -> Self {
        let pid = rustix::process::Pid::from_child(child);
        let (sender, receiver) = mpsc::channel::<()>();
        let watch = thread::spawn(move || {
            if receiver.recv_timeout(PROGRAM_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("killed process {pid:?} after {PROGRAM_TIMEOUT:?}");
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        });
        Self(Some((sender, watch)))
    }
}

impl Drop for ProgramTimeout {
    fn drop(&mut self) {
        if let Some((sender, watch)) = self.0.take() {
            drop(sender);
            let _ = watch.join();
        }
    }
}

/// Whether a program is installed; prints `skipped: why` if not.
pub fn has_program(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !found {
        println!("skipped: needs {program} (`sudo make setup`)");
    }
    found
}

/// Whether the kernel has KSM; prints `skipped: why` if not.
pub fn has_ksm() -> bool {
    let found = Path::new("/sys/kernel/mm/ksm/run").exists();
    if !found {
        println!("skipped: needs a kernel with KSM");
    }
    found
}

/// Compile a program. `source` is a file name in `labs/run`.
pub fn compile(compiler: &str, source: &str, flags: &[&str], folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/run").join(source);
    let program = folder.join(source.file_stem().unwrap());
    let mut command = Command::new(compiler);
    command.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).args(flags);
    assert!(command.status().unwrap().success());
    program
}

/// The library that enrolls its program. Built with the profile of this test if it is missing.
pub fn preload_library() -> &'static Path {
    static PRELOAD_LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    PRELOAD_LIBRARY.get_or_init(|| build_library("libpagefold_preload.so", &["--package", "pagefold-preload"]))
}

/// The library that adopts its program's allocations. Built in the same way.
pub fn adopt_library() -> &'static Path {
    static ADOPT_LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    // With all features, use the one that `make test` has built: a separate build would build all dependencies anew.
    let all_features = cfg!(feature = "fault-points");
    let cargo_arguments: &[_] = if all_features {
        &["--workspace", "--all-features", "--examples", "--lib"]
    } else {
        &["--package", "pagefold-adopt"]
    };
    ADOPT_LIBRARY.get_or_init(|| build_library("libpagefold_adopt.so", cargo_arguments))
}

fn build_library(library: &str, cargo_arguments: &[&str]) -> PathBuf {
    let target = Path::new(PAGEFOLD_BINARY).ancestors().nth(2).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--target-dir"]).arg(target).args(cargo_arguments);
    assert!(build.status().unwrap().success());
    target.join("debug").join(library)
}

/// `pagefold run` with the preload library, whatever other processes on this machine are enrolled.
pub fn run_command() -> Command {
    let mut command = run_within_domain();
    command.arg("--across-domains");
    command
}

/// The same, without `--across-domains`.
pub fn run_within_domain() -> Command {
    let mut command = Command::new("env");
    command.args([ENV_DEFAULT_SIGNALS, PAGEFOLD_BINARY, "run"]).env("PAGEFOLD_PRELOAD", preload_library());
    command
}

/// `pagefold run --across-domains` with a kernel that fails `prctl(PR_SET_MEMORY_MERGE)` with an error number.
pub fn run_with_prctl_refused(errno: u32) -> Command {
    let mut command = Command::new(pagefold_labs::client::lab_binary().unwrap());
    command.args(["refuse-prctl", "--errno", &errno.to_string(), "--", PAGEFOLD_BINARY, "run", "--across-domains"]);
    command.env("PAGEFOLD_PRELOAD", preload_library());
    command
}

pub fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The error line of a command that must exit with 2.
pub fn refusal_line(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let error = lossy_text(&stderr);
    assert_eq!((status.code(), lossy_text(&stdout).as_str()), (Some(2), ""), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    error
}

/// Wait until the companion that was started with this state directory has exited. Until then it may start to drive KSM
/// again, although another process now has the KSM lock.
pub fn wait_until_companion_exits(state: &Path) {
    let state = state.as_os_str().as_bytes();
    let is_companion = |entry: io::Result<fs::DirEntry>| {
        let arguments = fs::read(entry.unwrap().path().join("cmdline")).unwrap_or_default();
        arguments.split(|&byte| byte == 0).any(|argument| argument == state)
    };
    wait_until("the exit of the companion", || !fs::read_dir("/proc").unwrap().any(is_companion));
}

/// Bytes of anonymous memory of a process: in mergeable regions, and in total.
pub fn anonymous_and_mergeable_bytes(pid: u32) -> (u64, u64) {
    let (mut anonymous, mut marked, mut all) = (0, 0, 0);
    for line in fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().lines() {
        let mut words = line.split_ascii_whitespace();
        match words.next() {
            Some("Anonymous:") => anonymous = words.next().unwrap().parse::<u64>().unwrap() << 10,
            Some("VmFlags:") => {
                all += anonymous;
                marked += if words.any(|flag| flag == "mg") { anonymous } else { 0 };
            }
            _ => {}
        }
    }
    (marked, all)
}
