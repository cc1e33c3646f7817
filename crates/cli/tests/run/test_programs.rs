//! Programs for the tests of `pagefold run`: built from `labs/run`, and started in its many ways.

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

/// For env(1): the signals that nohup(1) and shells have background jobs ignore, the tests among them.
pub const ENV_DEFAULT_SIGNALS: &str = "--default-signal=HUP,INT,QUIT";

/// How long a program of a test may take.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(120);

/// Kills a child that takes longer than [`PATIENCE`], so that no test waits for it without end. Dropped before the
/// child is waited for or after it has ended.
pub struct ProgramTimeout(Option<(Sender<()>, JoinHandle<()>)>);

impl ProgramTimeout {
    pub fn new(child: &Child) -> Self {
        let pid = rustix::process::Pid::from_child(child);
        let (sender, dropped) = mpsc::channel::<()>();
        let watch = thread::spawn(move || {
            if dropped.recv_timeout(PROGRAM_TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("process {pid:?} was killed after {PROGRAM_TIMEOUT:?}");
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

/// Whether there is a program; says that the test is skipped otherwise.
pub fn has_program(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
    if !found {
        println!("skipped: needs {program} (`sudo make setup`)");
    }
    found
}

/// Whether the kernel has KSM; says that the test is skipped otherwise.
pub fn has_ksm() -> bool {
    let found = Path::new("/sys/kernel/mm/ksm/run").exists();
    if !found {
        println!("skipped: needs a kernel with KSM");
    }
    found
}

/// Compile a program. `source` is the name of one in `labs/run`.
pub fn compile(compiler: &str, source: &str, flags: &[&str], folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/run").join(source);
    let program = folder.join(source.file_stem().unwrap());
    let mut command = Command::new(compiler);
    command.args(["-O1", "-Wall", "-Werror", "-o"]).arg(&program).arg(source).args(flags);
    assert!(command.status().unwrap().success());
    program
}

/// The library that enrols its program, built as this test was if it is not there.
pub fn preload_library() -> &'static Path {
    static PRELOAD_LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    PRELOAD_LIBRARY.get_or_init(|| build_library("libpagefold_preload.so", &["--package", "pagefold-preload"]))
}

/// The library that adopts what its program allocates, likewise.
pub fn adopt_library() -> &'static Path {
    static ADOPT_LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    // With all features it is what `make test` has built: for itself, all that it imports would be built anew.
    let whole = cfg!(feature = "fault-points");
    let what: &[_] = if whole {
        &["--workspace", "--all-features", "--examples", "--lib"]
    } else {
        &["--package", "pagefold-adopt"]
    };
    ADOPT_LIBRARY.get_or_init(|| build_library("libpagefold_adopt.so", what))
}

fn build_library(library: &str, cargo_arguments: &[&str]) -> PathBuf {
    let target = Path::new(PAGEFOLD_BINARY).ancestors().nth(2).unwrap();
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "--target-dir"]).arg(target).args(cargo_arguments);
    assert!(build.status().unwrap().success());
    target.join("debug").join(library)
}

/// `pagefold run` with the library at hand, not yet started, whoever else is enrolled on this machine.
pub fn run_command() -> Command {
    let mut command = run_within_domain();
    command.arg("--across-domains");
    command
}

/// The same, within its trust domain.
pub fn run_within_domain() -> Command {
    let mut command = Command::new("env");
    command.args([ENV_DEFAULT_SIGNALS, PAGEFOLD_BINARY, "run"]).env("PAGEFOLD_PRELOAD", preload_library());
    command
}

/// `pagefold run`, across trust domains, where the kernel refuses `prctl(PR_SET_MEMORY_MERGE)` with an error number.
pub fn run_with_prctl_refused(errno: u32) -> Command {
    let mut command = Command::new(pagefold_labs::client::lab_binary().unwrap());
    command.args(["refuse-prctl", "--errno", &errno.to_string(), "--", PAGEFOLD_BINARY, "run", "--across-domains"]);
    command.env("PAGEFOLD_PRELOAD", preload_library());
    command
}

pub fn lossy_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a command says when it fails with 2, which is one line.
pub fn refusal_line(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let said = lossy_text(&stderr);
    assert_eq!((status.code(), lossy_text(&stdout).as_str()), (Some(2), ""), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

/// Wait until nobody is beside the program any more who was started with a state directory. Until then he may begin to
/// drive KSM again, whoever has taken it.
pub fn wait_until_companion_exits(state: &Path) {
    let state = state.as_os_str().as_bytes();
    let is_beside = |entry: io::Result<fs::DirEntry>| {
        let arguments = fs::read(entry.unwrap().path().join("cmdline")).unwrap_or_default();
        arguments.split(|&byte| byte == 0).any(|argument| argument == state)
    };
    wait_until("the end of the driver", || !fs::read_dir("/proc").unwrap().any(is_beside));
}

/// Bytes of the anonymous memory of a process: in regions that are mergeable, and all.
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
