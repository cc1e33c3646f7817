//! `pagefold run --method preload` warns if the library did not enroll the program or a program that it started.

use crate::test_programs::{compile, has_ksm, has_program, run_command, run_with_prctl_refused};
use pagefold_labs::process_checks::wait_until;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A program of `labs/run/tree.c` that runs until this is dropped, with a file for standard error.
struct TreeProgram {
    child: Child,
    stderr_path: PathBuf,
}

impl TreeProgram {
    fn start(command: &mut Command, folder: &Path) -> Self {
        let stderr_path = folder.join("errors");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&stderr_path).unwrap());
        Self { child: command.spawn().unwrap(), stderr_path }
    }

    fn stderr_text(&self) -> String {
        fs::read_to_string(&self.stderr_path).unwrap()
    }

    /// The text on standard error, once the program and its companion have exited.
    fn finish(self) -> String {
        let stderr_path = self.stderr_path.canonicalize().unwrap();
        drop(self);
        let has_stderr_open = |entry: std::io::Result<fs::DirEntry>| {
            fs::read_link(entry.unwrap().path().join("fd/2")).is_ok_and(|holder| holder == stderr_path)
        };
        wait_until("the exit of the companion", || !fs::read_dir("/proc").unwrap().any(has_stderr_open));
        fs::read_to_string(&stderr_path).unwrap()
    }
}

impl Drop for TreeProgram {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

#[test]
fn unreached_child_of_launcher_is_reported_once() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let static_program = compile("gcc", "tree.c", &["-static"], folder.path());
    // Two programs, each with a child process.
    let script = format!("exec 3<&0; {0} 1 2 <&3 & {0} 1 2; wait", static_program.display());
    let program = TreeProgram::start(run_with_prctl_refused(1).args(["--", "sh", "-c", &script]), folder.path());
    wait_until("the warning", || program.stderr_text().ends_with('\n'));
    let warning = program.stderr_text();
    let expected =
        format!("is not enrolled in KSM: {} is linked statically: it has no loader", static_program.display());
    assert!(warning.starts_with("pagefold: process ") && warning.contains(&expected), "{warning}");
    assert_eq!(program.finish(), warning, "the warning must appear once for all four processes");
}

#[test]
fn program_without_ld_preload_is_reported() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let dynamic = compile("gcc", "tree.c", &[], folder.path());
    let command = &mut run_with_prctl_refused(22);
    let program = TreeProgram::start(command.args(["--", "env", "-i"]).arg(&dynamic).args(["1", "1"]), folder.path());
    wait_until("the warning", || program.stderr_text().ends_with('\n'));
    let warning = program.stderr_text();
    let expected = format!("process {} is not enrolled in KSM: {}", program.child.id(), dynamic.display());
    assert!(warning.contains(&expected) && warning.contains("was started without LD_PRELOAD"), "{warning}");
}

/// A library that enrolls only pagefold's own probe process. The warning also reaches a reader of a pipe.
#[test]
fn library_that_enrolls_only_the_probe_is_reported() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    if !run_command().args(["--dry-run", "--method", "prctl", "--", "true"]).output().unwrap().status.success() {
        return println!("skipped: needs prctl(PR_SET_MEMORY_MERGE), for a library of its own");
    }
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("fake.c");
    fs::write(
        &source,
        "#define _GNU_SOURCE\n#include <errno.h>\n#include <string.h>\n#include <sys/prctl.h>\n\
         __attribute__((constructor)) static void loaded(void) {\n\
         if (!strcmp(program_invocation_short_name, \"exe\")) prctl(67, 1, 0, 0, 0); }\n",
    )
    .unwrap();
    let library = folder.path().join("fake.so");
    let built = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(built.success());
    let program = compile("gcc", "tree.c", &[], folder.path());
    let mut command = run_command();
    command.args(["--method", "preload", "--"]).arg(&program).args(["1", "1"]).env("PAGEFOLD_PRELOAD", &library);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut warning = String::new();
    BufReader::new(child.stderr.take().unwrap()).read_line(&mut warning).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let expected = format!("{} has loaded the library, which could not enroll it\n", program.display());
    assert!(warning.ends_with(&expected), "{warning}");
}

/// A successful enrollment prints nothing, and the caller does not wait for the process that checks it.
#[test]
fn successful_preload_is_silent() {
    if !has_ksm() || !has_program("gcc") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let dynamic = compile("gcc", "tree.c", &[], folder.path());
    for command in [&mut run_with_prctl_refused(1), run_command().args(["--method", "preload"])] {
        let mut program = TreeProgram::start(command.arg("--").arg(&dynamic).args(["1", "3"]), folder.path());
        // All three processes have started, one after another, during the check.
        let output = BufReader::new(program.child.stdout.take().unwrap());
        assert_eq!(output.lines().take(3).count(), 3);
        assert_eq!(program.finish(), "");
    }
}
