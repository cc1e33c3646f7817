//! What a merge tells of the difference between its prediction and what it reached, where it is known what was done
//! meanwhile: it is stopped between plan and enrolment, and goes on once pages were written and a process has ended.

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

/// Write to some pages of a region from outside, from the first on: contents that are nowhere else, or zeros.
fn write_pages(lab: &RunningLab<RegionLine>, kind: &str, pages: std::ops::Range<u64>, zeros: bool) {
    let memory = File::options().write(true).open(format!("/proc/{}/mem", lab.pid())).unwrap();
    for page in pages {
        let address = lab.first_region(kind).start + page * PAGE_BYTES;
        let bytes =
            if zeros { vec![0; PAGE_BYTES as usize] } else { address.to_ne_bytes().repeat(PAGE_BYTES as usize / 8) };
        memory.write_all_at(&bytes, address).unwrap();
    }
}

/// Merge, with something done between plan and enrolment. The report.
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
    let began = Instant::now();
    let stopped = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit_once(") ").is_some_and(|(_, after)| after.starts_with('T'))
    };
    while !stopped() {
        assert!(began.elapsed() < Duration::from_secs(120), "it has planned nothing within minutes");
        sleep(Duration::from_millis(5));
    }
    interlude();
    kill_process(Pid::from_child(&child), Signal::CONT).expect("it is ours");
    let output = child.wait_with_output().unwrap();
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// The frames of what is saved that a reason stands for.
fn frames_for_reason(merged: &Value, reason: &str) -> i64 {
    let differences = merged["outcome"]["differences"].as_array().expect("differences").iter();
    let of = differences.filter(|of| of["of"] == "saved" && of["why"].as_str().expect("words").contains(reason));
    of.map(|difference| difference["by"].as_f64().expect("a number") as i64 / PAGE_BYTES as i64).sum()
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
        // Each leaves a partner alone, whose frame is lost with it.
        write_pages(&second, "shared-content", 0..40, false);
        // One copy less of three.
        write_pages(&first, "within", 0..10, false);
        write_pages(&first, "zero", 0..25, false);
        write_pages(&first, "pattern", 0..30, false);
        // Written, and merged all the same: the one hides the other in the sum.
        write_pages(&second, "shared-content", 40..60, true);
        third.stop().unwrap();
    });
    assert_eq!(merged["outcome"]["end"], "settled", "{merged}");
    assert_eq!(frames_for_reason(&merged, "written or given back"), -(40 + 10 + 25 + 30 + 20), "{merged}");
    // Of what it had besides, each page was a frame at most.
    let targets = merged["plan"]["targets"].as_array().unwrap().iter();
    let thirds =
        targets.filter(|target| target["pid"] == pids[2]).map(|target| target["merging_pages"].as_i64().unwrap());
    let ended = -frames_for_reason(&merged, "in processes that ended");
    assert!((200..=thirds.sum()).contains(&ended), "{ended}: {merged}");
    let came = frames_for_reason(&merged, "contents that came since");
    assert!((20..20 + 50).contains(&came), "{came}: {merged}");
    let saved = merged["outcome"]["saved"].as_i64().unwrap() - merged["plan"]["savings"]["gross"].as_i64().unwrap();
    let all = frames_for_reason(&merged, "");
    assert_eq!(all * PAGE_BYTES as i64, saved, "{merged}");
    // What was written lies in memory as before, and ksmd keeps something of each page of the first two.
    let why = |word: &str| {
        let differences = merged["outcome"]["differences"].as_array().unwrap();
        differences.iter().any(|of| of["of"] == "metadata" && of["why"].as_str().unwrap().contains(word))
    };
    assert!(why("in processes that ended"), "{merged}");
}
