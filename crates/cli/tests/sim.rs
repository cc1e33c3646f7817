//! `pagefold sim calibrate` with the real ksmd: the model merges what ksmd merges, settings come back, and nothing is
//! measured beside enrolled processes.
//!
//! Needs root and KSM, and a host without enrolled processes.

#![forbid(unsafe_code)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_labs::ksm::KsmTestGuard;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const SETTINGS: [&str; 6] = ["run", "pages_to_scan", "sleep_millisecs", "use_zero_pages", "smart_scan", "advisor_mode"];

/// A first visit reads a page of 4 KiB: at 40 GB/s this takes 100 ns.
const LEAST_FIRST_VISIT_NS: f64 = 100.0;

fn acquire_ksm() -> Option<KsmTestGuard> {
    KsmTestGuard::acquire_with_foreign_settings()
}

fn read_settings(ksm: &KsmTestGuard) -> Vec<Option<String>> {
    SETTINGS.iter().map(|name| ksm.read_setting(name)).collect()
}

fn calibrate_command(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("--state").arg(state).args(["sim", "calibrate", "--rounds", "1"]).args(arguments);
    command
}

fn calibrate(state: &Path, arguments: &[&str]) -> Output {
    calibrate_command(state, arguments).output().expect("the binary runs")
}

#[test]
fn model_merges_what_ksmd_merges_and_settings_come_back() {
    let Some(ksm) = acquire_ksm() else { return };
    // While it is on, the kernel takes no `pages_to_scan`.
    if ksm.read_setting("advisor_mode").is_some() {
        ksm.write_setting("advisor_mode", "scan-time");
    }
    let before = read_settings(&ksm);
    let state = tempfile::tempdir().unwrap();
    let output = calibrate(state.path(), &["--pages", "2048", "--json"]);
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("is enrolled in KSM") {
        println!("skipped: {error}");
        return;
    }
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let scans = report["scans"].as_array().unwrap();
    for scan in scans {
        let (real, modeled) = (scan["merged_pages"].as_u64().unwrap(), scan["modeled_merged_pages"].as_u64().unwrap());
        // Pages that the kernel has freed and a CPU's list of new pages still holds merge a scan later.
        assert!(real.abs_diff(modeled) <= modeled / 20 + 64, "{scan}");
        assert!(scan["cpu_ms"].as_f64().unwrap() > 0.0, "{scan}");
    }
    let merged = |scenario: &str| {
        let of_scenario = scans.iter().filter(|scan| scan["scenario"] == scenario);
        of_scenario.map(|scan| scan["merged_pages"].as_u64().unwrap()).max().unwrap()
    };
    assert_eq!(merged("unique"), 0);
    assert!(merged("pairs") > 3900 && merged("zeros") > 1900 && merged("huge pages") > 3900, "{report}");
    let cost = |name: &str| {
        let costs = report["costs"].as_array().unwrap();
        costs.iter().find(|cost| cost["operation"] == name).unwrap()["nanoseconds"].as_f64().unwrap()
    };
    // A first visit has all three. Few small scans do not tell them apart.
    let first_visit: f64 = ["visit", "checksum", "allocation"].map(cost).iter().sum();
    assert!(first_visit > LEAST_FIRST_VISIT_NS && cost("merge") > 0.0, "{report}");
    assert_eq!(read_settings(&ksm), before);
}

#[test]
fn killed_calibration_is_recovered_and_leaves_no_process() {
    let Some(ksm) = acquire_ksm() else { return };
    let before = read_settings(&ksm);
    let state = tempfile::tempdir().unwrap();
    let mut child = calibrate_command(state.path(), &["--pages", "65536"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while ksm.read_setting("run").as_deref() != Some("1") && child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < end, "no scan was started");
        std::thread::sleep(Duration::from_millis(5));
    }
    if child.try_wait().unwrap().is_some() {
        println!("skipped: another process is enrolled in KSM");
        return;
    }
    kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGKILL).unwrap();
    child.wait().unwrap();
    let recover = Command::new(env!("CARGO_BIN_EXE_pagefold")).arg("--state").arg(state.path()).arg("recover").output();
    assert!(recover.unwrap().status.success());
    assert_eq!(read_settings(&ksm), before);
    // The stand-ins have ended with their standard input.
    let is_left = || {
        let output = Command::new("pgrep").args(["-f", "sim stand-in --contents"]).output().unwrap();
        !output.stdout.is_empty()
    };
    while is_left() {
        assert!(Instant::now() < end, "a process with known memory is left");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn too_many_pages_are_refused_with_the_remedy() {
    let state = tempfile::tempdir().unwrap();
    let output = calibrate(state.path(), &["--pages", "16777216"]);
    let error = String::from_utf8_lossy(&output.stderr);
    if error.contains("KSM") || error.contains("read-only") {
        println!("skipped: {error}");
        return;
    }
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("use fewer --pages"), "{error}");
}
