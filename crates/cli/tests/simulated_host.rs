//! Commands over a simulated host whose contents the scenario tells. They run without root, KSM and any change of this
//! machine.

use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Two machines of 16,384 pages: 8,192 that both have, 4,096 of their own, 2,048 of zeros, the rest untouched.
const SCENARIO: &str = r#"description = "two machines of one template"
duration = "10m"

[host]
memory = "1 GiB"
used = "64 MiB"
cpus = 2
kernel = "6.18"

[[template]]
name = "web"
size = "64 MiB"
common = 0.5
unique = 0.25
zero = 0.125

[[machines]]
name = "web"
template = "web"
count = 2
"#;

const PAGE: u64 = 4096;
const COMMON: u64 = 8192;
const UNIQUE: u64 = 4096;
const ZERO: u64 = 2048;

fn run(directory: &Path, arguments: &[&str]) -> Output {
    fs::write(directory.join("two.toml"), SCENARIO).unwrap();
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .current_dir(directory)
        .args(["--host", "sim:two.toml", "--state", "state"])
        .args(arguments)
        .output()
        .expect("the binary runs")
}

/// The report of a command that succeeds.
fn report(arguments: &[&str]) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn census_counts_what_the_scenario_tells() {
    let census = report(&["census", "--json"]);
    let pages = |name: &str| census["pages"][name].as_u64().unwrap();
    assert_eq!(pages("resident"), 2 * (COMMON + UNIQUE + ZERO));
    assert_eq!((pages("duplicate_across_domains"), pages("duplicate")), (2 * COMMON, 2 * COMMON));
    assert_eq!((pages("zero"), pages("unique"), pages("merged"), pages("volatile")), (2 * ZERO, 2 * UNIQUE, 0, 0));
}

#[test]
fn account_shows_the_memory_of_each_machine() {
    let account = report(&["account", "--json"]);
    let processes = account["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2);
    for process in processes {
        let resident = (COMMON + UNIQUE + ZERO) * PAGE;
        assert_eq!([&process["rss"], &process["pss"], &process["private"]].map(Value::as_u64), [Some(resident); 3]);
    }
}

#[test]
fn doctor_examines_the_machines() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &["doctor", "--json"]);
    let doctor: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(doctor["host"], "simulation two.toml");
    assert_eq!(doctor["unscanned_processes"], Value::Array(Vec::new()), "{doctor}");
}

#[test]
fn merge_saves_what_the_census_promises() {
    let merged = report(&["merge", "--across-domains", "--json"]);
    let outcome = &merged["outcome"];
    assert_eq!(outcome["end"], "settled");
    // What the model's page tables and frames have: both copies of a common content map one frame.
    let counts = ["merged_pages", "ksm_frames", "zero_pages"].map(|name| outcome[name].as_u64());
    assert_eq!(counts, [Some(2 * COMMON), Some(COMMON), Some(2 * ZERO)]);
    assert_eq!(outcome["saved"].as_u64(), Some((COMMON + 2 * ZERO) * PAGE), "{outcome}");
    assert_eq!(merged["plan"]["savings"]["gross"], outcome["saved"]);
    assert_eq!(["failed_changes", "failed_undos"].map(|name| outcome[name].as_array().map(Vec::len)), [Some(0); 2]);
}

#[test]
fn state_of_the_live_host_is_not_used() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &["merge", "--across-domains"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let names = |path: &str| -> Vec<String> {
        let entries = fs::read_dir(directory.path().join(path)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(names("state"), ["simulated"]);
    assert!(!names("state/simulated").is_empty());
}

#[test]
fn error_names_what_is_wrong_with_the_host() {
    let message = |host: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["--host", host, "census"]).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(message("sim:/nonexistent.toml").contains("neither a shipped scenario nor a file /nonexistent.toml"));
    assert!(message("simulation").contains("expected `live`, `recording:DIR` or `sim:SCENARIO`"));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("typo.toml");
    fs::write(&path, SCENARIO.replace("cpus", "cpu")).unwrap();
    assert!(message(&format!("sim:{}", path.display())).contains("unknown field `cpu`"));
}

/// A scenario of ten minutes ends within moments. The limit is for a daemon that would wait forever.
const DAEMON_TIME_LIMIT: Duration = Duration::from_secs(300);

#[test]
fn daemon_ends_with_the_scenario() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("two.toml"), SCENARIO).unwrap();
    let log = directory.path().join("log");
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .current_dir(directory.path())
        .args(["--host", "sim:two.toml", "--state", "state", "daemon", "--mode", "act"])
        .stdin(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .expect("the binary runs");
    let started = Instant::now();
    let status = loop {
        match daemon.try_wait().unwrap() {
            Some(status) => break status,
            None if started.elapsed() > DAEMON_TIME_LIMIT => {
                daemon.kill().unwrap();
                daemon.wait().unwrap();
                panic!("the daemon still runs: {}", fs::read_to_string(&log).unwrap());
            }
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    let log = fs::read_to_string(&log).unwrap();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("started on simulation two.toml, mode act"), "{log}");
    assert!(log.contains("the scenario is over: ") && log.trim_end().ends_with("ended"), "{log}");
}

#[test]
fn history_of_a_simulated_host_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let output = run(directory.path(), &["daemon", "--history", "/tmp/history.db"]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("a simulated host has no history"), "{stderr}");
}
