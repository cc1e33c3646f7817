//! Input and hosts that `pagefold merge` rejects: with a one-line error that names the remedy, and without any change.
//!
//! Needs root to become another user and to create namespaces. The tests restore KSM's settings.

#![forbid(unsafe_code)]

use pagefold_labs::client::{RunningLab, install_executable};
use pagefold_labs::ksm::KsmTestGuard;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");
const NOBODY_UID: u32 = 65534;

/// KSM with settings that Pagefold does not write, and a directory that all users can write to.
fn acquire_ksm_and_directory() -> Option<(KsmTestGuard, tempfile::TempDir)> {
    let ksm = KsmTestGuard::acquire_with_foreign_settings()?;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    Some((ksm, folder))
}

/// Whether namespaces can be created; prints `skipped: why` if not.
fn can_unshare(kinds: &[&str]) -> bool {
    let succeeded =
        Command::new("unshare").args(kinds).arg("true").output().is_ok_and(|output| output.status.success());
    if !succeeded {
        println!("skipped: needs unshare {kinds:?}");
    }
    succeeded
}

/// Assert that a command failed with all of these messages in one line, and that KSM is unchanged.
fn assert_refused(ksm: &KsmTestGuard, output: &Output, messages: &[&str]) {
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!((output.status.code(), &*out), (Some(2), ""), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    for message in messages {
        assert!(error.contains(message), "{message:?} is not in: {error}");
    }
    assert_eq!(ksm.changed_settings(), [], "{error}");
}

/// Copy the binary to where all users can execute it.
fn copy_binary(folder: &Path) -> PathBuf {
    let binary = folder.join("pagefold");
    install_executable(PAGEFOLD_BINARY.as_ref(), &binary, 0o755).unwrap();
    binary
}

#[test]
fn merge_without_root_asks_for_root() {
    let Some((ksm, folder)) = acquire_ksm_and_directory() else { return };
    let binary = copy_binary(folder.path());
    let lab = RunningLab::start_layout(&["--uid", &NOBODY_UID.to_string(), "within=2000,copies=4"]).unwrap();
    let merge = |state: &str, pid: u32| {
        let mut command = Command::new(&binary);
        command.args(["merge", "--state", state, "--pid", &pid.to_string()]);
        command.current_dir(folder.path()).uid(NOBODY_UID).gid(NOBODY_UID).output().unwrap()
    };
    assert_refused(&ksm, &merge("/run/pagefold-of-nobody", lab.pid()), &["cannot use", "as root"]);
    // With its own state directory the user gets as far as KSM's settings.
    assert_refused(&ksm, &merge("own", lab.pid()), &["run as root", "nothing was changed"]);
    assert_refused(&ksm, &merge("own", 1), &["run as root", "nothing was changed"]);
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", lab.pid())).unwrap();
    assert!(!smaps.lines().any(|line| line.starts_with("VmFlags:") && line.contains(" mg")), "a region is enrolled");
}

#[test]
fn kernel_without_ksm_is_reported() {
    let Some((ksm, folder)) = acquire_ksm_and_directory() else { return };
    if !can_unshare(&["--mount"]) {
        return;
    }
    let script = r#"mount -t tmpfs none /sys/kernel/mm && exec "$0" merge --state "$1" --pid $$"#;
    let state = folder.path().join("state");
    let output =
        Command::new("unshare").args(["--mount", "sh", "-c", script, PAGEFOLD_BINARY]).arg(&state).output().unwrap();
    assert_refused(&ksm, &output, &["this kernel has no KSM", "CONFIG_KSM"]);
    assert!(!state.exists(), "a rejected merge created its state directory");
}

#[test]
fn process_outside_pid_namespace_is_not_found() {
    let Some((ksm, folder)) = acquire_ksm_and_directory() else { return };
    let kinds = ["--pid", "--fork", "--mount-proc"];
    if !can_unshare(&kinds) {
        return;
    }
    let lab = RunningLab::start_layout(&["within=2000,copies=4"]).unwrap();
    let merge = |pid: u32| {
        let mut command = Command::new("unshare");
        command.args(kinds).arg(PAGEFOLD_BINARY).args(["merge", "--cpu", "100", "--pid", &pid.to_string(), "--state"]);
        command.arg(folder.path().join("state")).output().unwrap()
    };
    assert_refused(&ksm, &merge(lab.pid()), &[&format!("there is no process {}", lab.pid())]);
}

#[test]
fn kernel_thread_is_refused() {
    let Some((ksm, folder)) = acquire_ksm_and_directory() else { return };
    let ksmd = fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let comm = fs::read_to_string(path.join("comm")).ok()?;
        (comm == "ksmd\n").then(|| path.file_name().unwrap().to_str().unwrap().to_owned())
    });
    let Some(ksmd) = ksmd else { return println!("skipped: ksmd is not in this PID namespace") };
    let mut command = Command::new(PAGEFOLD_BINARY);
    command.args(["merge", "--pid", &ksmd, "--state"]).arg(folder.path().join("state"));
    assert_refused(&ksm, &command.output().unwrap(), &["no process with memory of its own matches", "kernel threads"]);
}
