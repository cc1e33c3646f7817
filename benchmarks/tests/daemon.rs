//! The daemon beside programs that are hostile to merging: it keeps its bounds and harms no program.

use std::fs;
use std::process::Command;

#[test]
fn daemon_stays_within_bounds_beside_hostile_programs() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root drives KSM");
    }
    let folder = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_pagefold-benchmarks");
    let mut command = Command::new(program);
    command.args(["daemon", "hostile", "--quick", "--hostile", "4m", "--out"]).arg(folder.path());
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let log = fs::read_to_string(folder.path().join("daemon-hostile/daemon.log")).unwrap_or_default();
    assert_eq!(output.status.code(), Some(0), "{stdout}\n{stderr}\n{log}");
    assert_eq!(stdout.matches("- met: ").count(), 5, "{stdout}");
    let samples = fs::read_to_string(folder.path().join("daemon-hostile/samples.csv")).unwrap();
    assert!(samples.lines().count() > 10, "{samples}");
}
