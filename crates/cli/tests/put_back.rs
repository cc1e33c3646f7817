//! Advice that was given for the time of a merge, on the live kernel: it comes back, and only to what it was given about.

use pagefold_labs::client::Lab;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::Region;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Memory that a lab enrolled itself, most of which does not pay.
const SPECS: [&str; 3] = ["--mergeable", "unique=3000", "shared-content=m:8000"];

fn pagefold(state: &Path, command: &str) -> Command {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.arg(command).arg("--state").arg(state).arg("--json");
    pagefold
}

/// The smallest page that there is.
const PAGE: u64 = 4096;

/// The addresses of a process's enrolled pages.
fn enrolled(lab: &Lab<Region>) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    let mut region = 0..0;
    let address = |text| u64::from_str_radix(text, 16).ok();
    for line in fs::read_to_string(format!("/proc/{}/smaps", lab.pid())).unwrap().lines() {
        let bounds = line.split(' ').next().and_then(|word| word.split_once('-'));
        if let Some((Some(start), Some(end))) = bounds.map(|(start, end)| (address(start), address(end))) {
            region = start..end;
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|flag| flag == "mg")) {
            pages.extend(region.clone().step_by(PAGE as usize));
        }
    }
    pages
}

/// KSM for one test; `None` says why the test is skipped.
fn ksm() -> Option<Ksm> {
    Ksm::take().inspect_err(|why| println!("skipped: {why}")).ok()
}

fn labs() -> [Lab<Region>; 2] {
    [Lab::layout(&SPECS).unwrap(), Lab::layout(&SPECS).unwrap()]
}

#[test]
fn what_programs_enrolled_themselves_is_enrolled_again() {
    let Some(_ksm) = ksm() else { return };
    let state = tempfile::tempdir().unwrap();
    let labs = labs();
    let before = labs.each_ref().map(enrolled);
    let pids = labs.each_ref().map(|lab| format!("--pid={}", lab.pid()));
    let output = pagefold(state.path(), "merge").args(&pids).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for target in report["plan"]["targets"].as_array().unwrap() {
        assert!(target["narrowed_bytes"].as_u64() >= Some(3000 * PAGE), "{target}");
    }
    assert_eq!(report["outcome"]["not_put_back"], Value::Array(Vec::new()));
    // What pays besides is enrolled by then too.
    assert!(labs.iter().zip(&before).all(|(lab, before)| before.is_subset(&enrolled(lab))));
}

#[test]
fn what_a_killed_merge_withdrew_is_enrolled_again() {
    let Some(_ksm) = ksm() else { return };
    let state = tempfile::tempdir().unwrap();
    let labs = labs();
    let before = labs.each_ref().map(enrolled);
    let pids = labs.each_ref().map(|lab| format!("--pid={}", lab.pid()));
    let mut merge = pagefold(state.path(), "merge");
    merge.args(&pids).args(["--cpu", "0.1", "--settle", "0", "--watch", "0"]);
    let mut child = merge.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let started = Instant::now();
    while labs.iter().zip(&before).any(|(lab, before)| before.is_subset(&enrolled(lab))) {
        assert!(started.elapsed() < Duration::from_secs(60), "nothing was withdrawn within a minute");
        sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!labs.iter().zip(&before).any(|(lab, before)| before.is_subset(&enrolled(lab))));
    let recovered = pagefold(state.path(), "recover").output().unwrap();
    assert_eq!(recovered.status.code(), Some(0), "{}", String::from_utf8_lossy(&recovered.stdout));
    // What pays besides is enrolled by then too.
    assert!(labs.iter().zip(&before).all(|(lab, before)| before.is_subset(&enrolled(lab))));
}
