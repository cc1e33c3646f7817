//! `pagefold doctor` on this machine: real KSM, real processes, and remedies that are carried out.
//!
//! Needs root, KSM and `pagefold-lab` beside the test (`cargo build -p pagefold-labs`). What is changed is put back.

#![forbid(unsafe_code)]

use pagefold_labs::client::{Lab, binary};
use pagefold_labs::lines::Region;
use serde_json::Value;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const KSM: &str = "/sys/kernel/mm/ksm";

/// KSM for this test alone, as it was once the test is over.
struct Ksm {
    before: Vec<(&'static str, String)>,
    _lock: File,
}

impl Ksm {
    /// `None`, and a word about it, where the test has not what it needs.
    fn take(test: &str) -> Option<Self> {
        let need = if !rustix::process::geteuid().is_root() {
            "root"
        } else if !Path::new(KSM).is_dir() {
            "a kernel with KSM"
        } else if binary().is_err() {
            "pagefold-lab: cargo build -p pagefold-labs"
        } else {
            let lock = File::create("/run/pagefold-test.lock").unwrap();
            lock.lock().unwrap();
            let files = ["advisor_mode", "pages_to_scan", "sleep_millisecs", "run"];
            let before = files.iter().filter_map(|&file| Some((file, setting(file)?))).collect();
            let ksm = Self { before, _lock: lock };
            if setting("advisor_mode").is_some() {
                ksm.set("advisor_mode", "none");
            }
            ksm.set("run", "0");
            return Some(ksm);
        };
        println!("skipped: {test} needs {need}");
        None
    }

    fn set(&self, file: &str, value: &str) {
        fs::write(format!("{KSM}/{file}"), value).unwrap();
    }
}

impl Drop for Ksm {
    fn drop(&mut self) {
        for (file, value) in &self.before {
            // pages_to_scan is refused where the advisor sets it.
            let _ = fs::write(format!("{KSM}/{file}"), value);
        }
    }
}

/// The value of a setting, of several the one in brackets.
fn setting(file: &str) -> Option<String> {
    let text = fs::read_to_string(format!("{KSM}/{file}")).ok()?;
    let chosen = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    Some(chosen.map_or(text.trim(), |(word, _)| word).to_owned())
}

fn doctor(arguments: &[&str]) -> (Option<i32>, Value) {
    report(Command::new(env!("CARGO_BIN_EXE_pagefold")).arg("doctor").args(arguments).arg("--json").output().unwrap())
}

fn doctor_of(lab: &Lab<Region>) -> (Option<i32>, Value) {
    doctor(&["--pid", &lab.pid().to_string()])
}

fn report(output: Output) -> (Option<i32>, Value) {
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), report)
}

fn findings<'a>(report: &'a Value, rule: &str) -> Vec<&'a Value> {
    report["findings"].as_array().unwrap().iter().filter(|finding| finding["rule"] == rule).collect()
}

/// The only finding of a rule.
fn finding<'a>(report: &'a Value, rule: &str) -> &'a Value {
    let found = findings(report, rule);
    assert_eq!(found.len(), 1, "{rule} in {report:#}");
    found[0]
}

fn shell(command: &str) -> bool {
    Command::new("sh").args(["-c", command]).output().unwrap().status.success()
}

/// Carry out the commands of a remedy up to the first remark, which begins what is to last.
fn carry_out(finding: &Value) {
    let remedy = finding["remedy"].as_array().unwrap().iter().map(|line| line.as_str().unwrap());
    let commands: Vec<_> = remedy.take_while(|line| !line.starts_with('#')).collect();
    assert!(!commands.is_empty(), "{finding:#}");
    for command in commands {
        assert!(shell(command), "{command}");
    }
}

fn verified(finding: &Value) -> bool {
    shell(finding["verify"].as_str().unwrap())
}

#[test]
fn enrolled_while_ksmd_is_stopped_until_the_remedy() {
    let Some(ksm) = Ksm::take("enrolled_while_ksmd_is_stopped_until_the_remedy") else { return };
    let lab = Lab::layout(&["--mergeable", "within=2000,copies=4"]).unwrap();

    let (code, host) = doctor(&[]);
    let run = finding(&host, "ksm-run");
    assert_eq!((code, run["verdict"].as_str()), (Some(1), Some("fail")), "{run:#}");
    assert!(!verified(run), "nothing was remedied yet");
    let (code, process) = doctor_of(&lab);
    assert_eq!((code, finding(&process, "process-run")["verdict"].as_str()), (Some(1), Some("fail")));
    assert_eq!(finding(&process, "process-enrolled")["verdict"], "ok");

    carry_out(run);
    assert!(verified(run));
    let (_, host) = doctor(&[]);
    assert_eq!(finding(&host, "ksm-run")["verdict"], "ok");
    assert_eq!(finding(&host, "ksm-enrolled")["verdict"], "ok");

    // It does merge then, and the doctor says so.
    ksm.set("pages_to_scan", "5000");
    let deadline = Instant::now() + Duration::from_secs(60);
    let merging = loop {
        let (_, process) = doctor_of(&lab);
        let merging = finding(&process, "process-merging").clone();
        if merging["verdict"] == "ok" || Instant::now() > deadline {
            break merging;
        }
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(merging["verdict"], "ok", "{merging:#}");
    let (_, process) = doctor_of(&lab);
    assert_eq!(finding(&process, "process-run")["verdict"], "ok");
    assert_ne!(process["verdict"], "fail", "{process:#}");
}

#[test]
fn shared_memory_is_named_region_by_region() {
    let Some(_ksm) = Ksm::take("shared_memory_is_named_region_by_region") else { return };
    let lab = Lab::layout(&["shared-memory=1024,unique=16"]).unwrap();
    let (code, report) = doctor_of(&lab);
    assert_eq!(code, Some(1));
    assert_eq!(finding(&report, "process-eligible")["verdict"], "fail");
    let region = finding(&report, "process-region");
    assert_eq!(region["verdict"], "warn");
    assert!(region["title"].as_str().unwrap().contains("shared memory"), "{region:#}");
    let start = format!("{:x}-", lab.region("shared-memory").start);
    assert!(region["value"].as_str().unwrap().starts_with(&start), "{start} {region:#}");
}

#[test]
fn what_is_not_enrolled_fails_and_what_prctl_enrolled_does_not() {
    let Some(_ksm) = Ksm::take("what_is_not_enrolled_fails_and_what_prctl_enrolled_does_not") else { return };
    let outside = Lab::layout(&["unique=256"]).unwrap();
    let (code, report) = doctor_of(&outside);
    let enrolled = finding(&report, "process-enrolled");
    assert_eq!((code, enrolled["verdict"].as_str()), (Some(1), Some("fail")));
    assert!(!verified(enrolled));

    let inside = Lab::layout(&["--merge-any", "unique=256"]).unwrap();
    let (_, report) = doctor_of(&inside);
    assert_eq!(finding(&report, "process-enrolled")["verdict"], "ok", "{report:#}");
    assert_eq!(finding(&report, "process-prctl-exec")["verdict"], "ok", "{report:#}");
}

#[test]
fn without_privilege_nothing_of_others_is_called_healthy() {
    let test = "without_privilege_nothing_of_others_is_called_healthy";
    let Some(_ksm) = Ksm::take(test) else { return };
    let lab = Lab::layout(&["--mergeable", "unique=256"]).unwrap();
    let pid = lab.pid();
    let nobody = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.args(arguments).uid(65534).gid(65534).output()
    };
    let Ok(output) = nobody(&["doctor", "--json", "--pid", &pid.to_string()]) else {
        println!("skipped: {test} needs a target directory that everybody may read");
        return;
    };
    let (code, process) = report(output);
    assert_eq!(code, Some(3), "{process:#}");
    assert_eq!((&process["not_seen"][0]["pid"], &process["not_seen"][0]["reason"]), (&pid.into(), &"denied".into()));
    for rule in ["process-enrolled", "process-eligible", "process-run", "process-scanned", "process-merging"] {
        assert_eq!(finding(&process, rule)["verdict"], "unknown", "{rule}");
    }

    let (code, host) = report(nobody(&["doctor", "--json"]).unwrap());
    assert!(code == Some(3) || code == Some(1), "{code:?}");
    let unseen = host["not_seen"].as_array().unwrap();
    assert!(unseen.iter().any(|one| one["pid"] == pid && one["reason"] == "denied"), "{unseen:?}");
    for rule in ["ksm-domains", "ksm-keys", "ksm-huge-pages"] {
        assert_eq!(finding(&host, rule)["verdict"], "unknown", "{rule}");
    }
}
