//! `pagefold doctor` on this machine: real KSM, real processes, and remedies that the tests carry out.
//!
//! Needs root, KSM and `pagefold-lab` beside the test (`cargo build -p pagefold-labs`). The tests restore the settings.

#![forbid(unsafe_code)]

use pagefold_labs::client::{RunningLab, lab_binary};
use pagefold_labs::output_lines::RegionLine;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const KSM_DIRECTORY: &str = "/sys/kernel/mm/ksm";

/// Exclusive use of KSM for one test; restores the settings when dropped.
struct DoctorKsmGuard {
    saved_settings: Vec<(&'static str, String)>,
    _lock: File,
}

impl DoctorKsmGuard {
    /// `None` if a requirement of the test is missing; prints which.
    fn acquire(test: &str) -> Option<Self> {
        let missing = if !rustix::process::geteuid().is_root() {
            "root"
        } else if !Path::new(KSM_DIRECTORY).is_dir() {
            "a kernel with KSM"
        } else if lab_binary().is_err() {
            "pagefold-lab: cargo build -p pagefold-labs"
        } else {
            let lock = File::create("/run/pagefold-test.lock").unwrap();
            lock.lock().unwrap();
            let files = ["advisor_mode", "pages_to_scan", "sleep_millisecs", "run"];
            let before = files.iter().filter_map(|&file| Some((file, read_setting(file)?))).collect();
            let ksm = Self { saved_settings: before, _lock: lock };
            if read_setting("advisor_mode").is_some() {
                ksm.write_setting("advisor_mode", "none");
            }
            ksm.write_setting("run", "0");
            return Some(ksm);
        };
        println!("skipped: {test} needs {missing}");
        None
    }

    fn write_setting(&self, file: &str, value: &str) {
        fs::write(format!("{KSM_DIRECTORY}/{file}"), value).unwrap();
    }
}

impl Drop for DoctorKsmGuard {
    fn drop(&mut self) {
        for (file, value) in &self.saved_settings {
            // The kernel rejects a write to pages_to_scan while the advisor controls it.
            let _ = fs::write(format!("{KSM_DIRECTORY}/{file}"), value);
        }
    }
}

/// The value of a setting; of several alternatives, the one in brackets.
fn read_setting(file: &str) -> Option<String> {
    let text = fs::read_to_string(format!("{KSM_DIRECTORY}/{file}")).ok()?;
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    Some(chosen.map_or(text.trim(), |(word, _)| word).to_owned())
}

fn run_doctor(arguments: &[&str]) -> (Option<i32>, Value) {
    parse_report(
        Command::new(env!("CARGO_BIN_EXE_pagefold")).arg("doctor").args(arguments).arg("--json").output().unwrap(),
    )
}

fn run_doctor_for(lab: &RunningLab<RegionLine>) -> (Option<i32>, Value) {
    run_doctor(&["--pid", &lab.pid().to_string()])
}

fn parse_report(output: Output) -> (Option<i32>, Value) {
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), report)
}

fn findings_of_rule<'a>(report: &'a Value, rule: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["rule"] == rule).collect()
}

/// The only finding of a rule.
fn single_finding<'a>(report: &'a Value, rule: &str) -> &'a Value {
    let found = findings_of_rule(report, rule);
    assert_eq!(found.len(), 1, "{rule} in {report:#}");
    found[0]
}

fn run_shell(command: &str) -> bool {
    Command::new("sh").args(["-c", command]).output().unwrap().status.success()
}

/// Run the commands of a remedy up to its first comment: after it come the commands that make the change persistent.
fn apply_remedy(finding: &Value) {
    let remedy = finding["remedy"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
    let commands: Vec<_> = remedy.take_while(|line| !line.starts_with('#')).collect();
    assert!(!commands.is_empty(), "{finding:#}");
    for command in commands {
        assert!(run_shell(command), "{command}");
    }
}

fn is_remedy_verified(finding: &Value) -> bool {
    run_shell(finding["verify"].as_str().unwrap())
}

#[test]
fn stopped_ksmd_is_found_and_remedy_works() {
    let Some(ksm) = DoctorKsmGuard::acquire("stopped_ksmd_is_found_and_remedy_works") else { return };
    let lab = RunningLab::start_layout(&["--mergeable", "within=2000,copies=4"]).unwrap();

    let (code, host) = run_doctor(&[]);
    let run = single_finding(&host, "ksm-run");
    // Other rules of the host may fail or lack a reading.
    assert!(matches!(code, Some(0 | 1 | 3)), "{host:#}");
    assert_eq!(run["verdict"], "warn", "{run:#}");
    assert!(!is_remedy_verified(run), "the check must fail before the remedy");
    let (code, process) = run_doctor_for(&lab);
    assert_eq!((code, single_finding(&process, "process-run")["verdict"].as_str()), (Some(1), Some("fail")));
    assert_eq!(single_finding(&process, "process-enrolled")["verdict"], "ok");

    apply_remedy(run);
    assert!(is_remedy_verified(run));
    let (_, host) = run_doctor(&[]);
    assert_eq!(single_finding(&host, "ksm-run")["verdict"], "ok");
    assert_eq!(single_finding(&host, "ksm-enrolled")["verdict"], "ok");

    // ksmd now merges, and the doctor reports it.
    ksm.write_setting("pages_to_scan", "5000");
    let deadline = Instant::now() + Duration::from_secs(60);
    let merging = loop {
        let (_, process) = run_doctor_for(&lab);
        let merging = single_finding(&process, "process-merging").clone();
        if merging["verdict"] == "ok" || Instant::now() > deadline {
            break merging;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(merging["verdict"], "ok", "{merging:#}");
    let (_, process) = run_doctor_for(&lab);
    assert_eq!(single_finding(&process, "process-run")["verdict"], "ok");
    assert_ne!(process["verdict"], "fail", "{process:#}");
}

#[test]
fn shared_memory_is_reported_per_region() {
    let Some(_ksm) = DoctorKsmGuard::acquire("shared_memory_is_reported_per_region") else { return };
    let lab = RunningLab::start_layout(&["shared-memory=1024,unique=16"]).unwrap();
    let (code, report) = run_doctor_for(&lab);
    assert_eq!(code, Some(1));
    assert_eq!(single_finding(&report, "process-eligible")["verdict"], "fail");
    let region = single_finding(&report, "process-region");
    assert_eq!(region["verdict"], "warn");
    assert!(region["title"].as_str().unwrap().contains("shared memory"), "{region:#}");
    let start = format!("{:x}-", lab.first_region("shared-memory").start);
    assert!(region["value"].as_str().unwrap().starts_with(&start), "{start} {region:#}");
}

#[test]
fn unenrolled_process_fails_and_prctl_enrolled_passes() {
    let Some(_ksm) = DoctorKsmGuard::acquire("unenrolled_process_fails_and_prctl_enrolled_passes") else { return };
    let unenrolled_lab = RunningLab::start_layout(&["unique=256"]).unwrap();
    let (code, report) = run_doctor_for(&unenrolled_lab);
    let enrolled = single_finding(&report, "process-enrolled");
    assert_eq!((code, enrolled["verdict"].as_str()), (Some(1), Some("fail")));
    assert!(!is_remedy_verified(enrolled));

    let enrolled_lab = RunningLab::start_layout(&["--merge-any", "unique=256"]).unwrap();
    let (_, report) = run_doctor_for(&enrolled_lab);
    assert_eq!(single_finding(&report, "process-enrolled")["verdict"], "ok", "{report:#}");
    assert_eq!(single_finding(&report, "process-prctl-exec")["verdict"], "ok", "{report:#}");
}

#[test]
fn unprivileged_doctor_calls_no_foreign_process_healthy() {
    let test = "unprivileged_doctor_calls_no_foreign_process_healthy";
    let Some(_ksm) = DoctorKsmGuard::acquire(test) else { return };
    let lab = RunningLab::start_layout(&["--mergeable", "unique=256"]).unwrap();
    let pid = lab.pid();
    let run_as_nobody = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(arguments).uid(65534).gid(65534).output()
    };
    let Ok(output) = run_as_nobody(&["doctor", "--json", "--pid", &pid.to_string()]) else {
        println!("skipped: {test} needs a target directory that all users can read");
        return;
    };
    let (code, process) = parse_report(output);
    assert_eq!(code, Some(3), "{process:#}");
    assert_eq!(
        (&process["unscanned_processes"][0]["pid"], &process["unscanned_processes"][0]["reason"]),
        (&pid.into(), &"denied".into())
    );
    for rule in ["process-enrolled", "process-eligible", "process-run", "process-scanned", "process-merging"] {
        assert_eq!(single_finding(&process, rule)["verdict"], "unknown", "{rule}");
    }

    let (code, host) = parse_report(run_as_nobody(&["doctor", "--json"]).unwrap());
    assert!(code == Some(3) || code == Some(1), "{code:?}");
    let unscanned = host["unscanned_processes"].as_array().unwrap();
    assert!(unscanned.iter().any(|process| process["pid"] == pid && process["reason"] == "denied"), "{unscanned:?}");
    for rule in ["ksm-domains", "ksm-keys", "ksm-huge-pages"] {
        assert_eq!(single_finding(&host, rule)["verdict"], "unknown", "{rule}");
    }
}
