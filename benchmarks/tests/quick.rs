//! The benchmark program works: a quick run of its sections says what it found and keeps it. How fast, nobody asks
//! here.

use std::fs;
use std::process::Command;

#[test]
fn a_quick_run_is_told_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold-benchmarks"))
        .args(["--quick", "threads", "--out"])
        .arg(&out)
        .output()
        .unwrap();
    let (told, complaints) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{complaints}");
    let summary = fs::read_to_string(out.join("summary.md")).unwrap();
    assert!(summary.contains("| whole census"), "{summary}");
    assert!(told.contains("| whole census"), "{told}");
    let settings: toml::Table = fs::read_to_string(out.join("settings.toml")).unwrap().parse().unwrap();
    assert_eq!(settings["quick"].as_bool(), Some(true));
    // Two rounds of four censuses and two readings, each of two processes with 32 MiB of their own and some of the
    // program's.
    let samples = fs::read_to_string(out.join("threads.csv")).unwrap();
    let pages: Vec<usize> =
        samples.lines().skip(1).map(|line| line.split(',').nth(3).unwrap().parse().unwrap()).collect();
    assert_eq!(pages.len(), 12, "{samples}");
    let held = 2 * (32 << 20) / rustix::param::page_size();
    assert!(pages.iter().all(|&pages| (held..held + held / 8).contains(&pages)), "{samples}");
}
