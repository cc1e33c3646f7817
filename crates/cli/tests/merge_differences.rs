//! The reasons that a merge reports for the difference between predicted and measured savings. The test stops the merge
//! between plan and enrollment, writes pages, ends a process, and then lets the merge continue.

#![cfg(feature = "fault-points")]

use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PAGE_BYTES: u64 = 4096;

/// Write to pages of a region from outside: unique contents, or zeros.
fn write_pages(lab: &RunningLab<RegionLine>, kind: &str, pages: std::ops::Range<u64>, zeros: bool) {
    let memory = File::options().write(true).open(format!("/proc/{}/mem", lab.pid())).unwrap();
    for page in pages {
        let address = lab.first_region(kind).start + page * PAGE_BYTES;
        let bytes =
            if zeros { vec![0; PAGE_BYTES as usize] } else { address.to_ne_bytes().repeat(PAGE_BYTES as usize / 8) };
        memory.write_all_at(&bytes, address).unwrap();
    }
}

/// Run a merge, with some work done between plan and enrollment; returns its report.
fn merge_with_interlude(pids: &[u32], interlude: impl FnOnce()) -> Value {
    let state = tempfile::tempdir().unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args(["merge", "--json", "--min-profit", "0", "--cpu", "100", "--state"])
        .arg(state.path())
        .args(pids.iter().map(|pid| format!("--pid={pid}")))
        .env("PAGEFOLD_FAULT_POINT", "stop 1 before writing a journal")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let started = Instant::now();
    let is_stopped = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, after)| after.starts_with('T'))
    };
    while !is_stopped() {
        assert!(started.elapsed() < Duration::from_secs(120), "the merge did not stop within 120 s");
        sleep(Duration::from_millis(5));
    }
    interlude();
    kill_process(Pid::from_child(&child), Signal::CONT).expect("cannot send SIGCONT to the merge");
    let output = child.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// The saved frames that differences with this reason account for.
fn frames_for_reason(merged: &Value, reason: &str) -> i64 {
    let differences = merged["outcome"]["differences"].as_array().expect("the report has no differences").iter();
    let matching = differences.filter(|difference| {
        difference["figure"] == "saved" && difference["reason"].as_str().expect("a string").contains(reason)
    });
    matching.map(|difference| difference["amount"].as_f64().expect("a number") as i64 / PAGE_BYTES as i64).sum()
}

#[test]
fn each_difference_reason_is_reported_with_its_count() {
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    ksm.write_setting("run", 0);
    let first = RunningLab::start_layout(&[
        "shared-content=w:300",
        "shared-content=e:200",
        "within=300,copies=3",
        "zero=400",
        "pattern=100",
    ])
    .unwrap();
    let second = RunningLab::start_layout(&["shared-content=w:300"]).unwrap();
    let third = RunningLab::start_layout(&["shared-content=e:200"]).unwrap();
    let pids = [&first, &second, &third].map(RunningLab::pid);
    let merged = merge_with_interlude(&pids, || {
        // Each write leaves the other copy of the content without a partner, so a saved frame is lost.
        write_pages(&second, "shared-content", 0..40, false);
        // Three copies become two.
        write_pages(&first, "within", 0..10, false);
        write_pages(&first, "zero", 0..25, false);
        write_pages(&first, "pattern", 0..30, false);
        // These pages were written but are merged all the same, as zeros. In the sum, the gain hides the loss.
        write_pages(&second, "shared-content", 40..60, true);
        third.stop().unwrap();
    });
    assert_eq!(merged["outcome"]["end"], "settled", "{merged}");
    assert_eq!(frames_for_reason(&merged, "rewritten or freed"), -(40 + 10 + 25 + 30 + 20), "{merged}");
    // Each other page of the process that exited was one frame at most.
    let targets = merged["plan"]["targets"].as_array().unwrap().iter();
    let third_pages =
        targets.filter(|target| target["pid"] == pids[2]).map(|target| target["merging_pages"].as_i64().unwrap());
    let ended = -frames_for_reason(&merged, "in processes that ended");
    assert!((200..=third_pages.sum()).contains(&ended), "{ended}: {merged}");
    let new_duplicates = frames_for_reason(&merged, "new duplicates");
    assert!((20..20 + 50).contains(&new_duplicates), "{new_duplicates}: {merged}");
    let saved = merged["outcome"]["saved"].as_i64().unwrap() - merged["plan"]["savings"]["gross"].as_i64().unwrap();
    let total_frames = frames_for_reason(&merged, "");
    assert_eq!(total_frames * PAGE_BYTES as i64, saved, "{merged}");
    // Written pages are still in memory, and ksmd keeps metadata for each page of the first two processes.
    let has_metadata_reason = |word: &str| {
        let differences = merged["outcome"]["differences"].as_array().unwrap();
        differences.iter().any(|difference| {
            difference["figure"] == "metadata" && difference["reason"].as_str().unwrap().contains(word)
        })
    };
    assert!(has_metadata_reason("in processes that ended"), "{merged}");
}
