//! `pagefold sim from-recording` and `sim predict`: scenarios of recorded hosts, and of processes with known memory on this
//! one. With `--all-memory` they have the mergeable pages that `pagefold
//! census` counts.

#![forbid(unsafe_code)]

use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_sim::decide::memory::Content;
use pagefold_sim::decide::scenario::Scenario;
use pagefold_sim::decide::workload::Workload;
use pagefold_sim::scenario::parse_scenario;
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs a command on a host, or on some of its processes.
fn run_pagefold(command: &[&str], selection: &[String]) -> Output {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.current_dir(root()).args(command).args(selection).output().expect("the binary runs")
}

/// Zeros and duplicates of a census, and those that merging would free. Its merged pages are not among them.
fn census_of(selection: &[String]) -> (u64, u64) {
    let output = run_pagefold(&["census", "--json"], selection);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pages = |class: &str| report["pages"][class].as_u64().unwrap();
    assert_eq!(pages("merged"), 0, "merged pages count as duplicates in a scenario only");
    // One page of zeros stays.
    (pages("zero") + pages("duplicate"), pages("redundant") + pages("zero").saturating_sub(1))
}

/// Pages of zeros and pages whose contents other pages have, and those that merging would free, of the machines that a
/// simulation starts with.
fn count_mergeable(scenario: &Scenario) -> (u64, u64) {
    let mut workload = Workload::new(scenario, scenario.seed);
    let mut copies: HashMap<Content, u64> = HashMap::new();
    for arrival in workload.arrivals() {
        for run in workload.start(&arrival).unwrap().1.writes {
            for page in 0..run.pages {
                let content = if run.ascends() { run.content + page as Content } else { run.content };
                *copies.entry(content).or_default() += 1;
            }
        }
    }
    let counted = copies.iter().filter(|&(&content, &copies)| content == 0 || copies > 1);
    counted.fold((0, 0), |(pages, redundant), (_, copies)| (pages + copies, redundant + copies - 1))
}

fn recording(name: &str) -> [String; 2] {
    ["--host".to_owned(), format!("recording:fixtures/recordings/{name}")]
}

fn check_golden(name: &str, output: &Output) {
    let path = root().join("fixtures/expected/sim").join(name);
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", String::from_utf8_lossy(&output.stderr));
    let found = String::from_utf8_lossy(&output.stdout);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &*found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, expected, "{} differs: read the difference, then run with UPDATE_GOLDEN=1", path.display());
}

#[test]
fn scenario_and_prediction_of_a_recorded_host_are_as_expected() {
    check_golden("from-recording.toml", &run_pagefold(&["sim", "from-recording"], &recording("unprivileged")));
    let predict = ["sim", "predict", "--hours", "0.5", "--policy", "default,whole:20/200", "--seeds", "2"];
    check_golden("predict.txt", &run_pagefold(&predict, &recording("unprivileged")));
}

#[test]
fn prediction_of_a_changed_host_has_its_schema() {
    let command = ["sim", "predict", "--hours", "0.1", "--policy", "whole:2000/20", "--json", "--what-if"];
    let predict = |changes: &str| run_pagefold(&[&command[..], &[changes]].concat(), &recording("two-nodes"));
    let report = |changes: &str| -> Value {
        let output = predict(changes);
        let report = serde_json::from_slice(&output.stdout);
        report.unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)))
    };
    let (double, more) = (report("ram=2x"), report("ram=2x; vms+=3"));
    let schema: Value = serde_json::from_slice(&run_pagefold(&["schema", "sim-predict"], &[]).stdout).unwrap();
    jsonschema::validate(&schema, &more).unwrap();
    assert_eq!(double["memory_bytes"], more["memory_bytes"]);
    let saved = |report: &Value| {
        let saved = report["policies"][0]["saved"].as_array().unwrap();
        saved.last().unwrap()["saved_bytes"]["expected"].as_f64().unwrap()
    };
    assert!(saved(&double) > 0.0 && saved(&more) > 3.0 * saved(&double), "{} and {}", saved(&double), saved(&more));
    let refused = |changes: &str, expected: &str| {
        let output = predict(changes);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && error.contains(expected), "{error}");
    };
    refused("rum=2x", "\"rum=2x\" is no change: give ram=FACTORx, ram=SIZE, vms+=N template=NAME");
    refused("vms-=7", "has 1 machines, and 7 cannot be taken away: give fewer");
    refused("ram=64MiB", "give more ram");
}

#[test]
fn scenarios_of_recorded_hosts_have_the_mergeable_pages_of_their_census() {
    let (mut compared, mut partly_enrolled) = (0, 0);
    for name in ["four-nodes", "kvm-host-tuned", "libvirt-domain", "no-kvm", "two-nodes", "unprivileged"] {
        let host = recording(name);
        let mergeable = |options: &[&str]| {
            let output = run_pagefold(&[&["sim", "from-recording"], options].concat(), &host);
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            (count_mergeable(&parse_scenario(&String::from_utf8_lossy(&output.stdout)).unwrap()), errors)
        };
        let expected = census_of(&host);
        assert_eq!(mergeable(&["--all-memory"]).0, expected, "{name}");
        compared += u32::from(expected.0 > 100);
        let (enrolled, errors) = mergeable(&[]);
        if errors.contains("All memory of the processes that KSM can take counts as enrolled.") {
            assert_eq!(enrolled, expected, "{name}");
        } else {
            assert!(errors.contains("Only the enrolled memory of") && enrolled < expected, "{name}: {errors}");
            partly_enrolled += 1;
        }
    }
    assert!(compared > 4, "{compared} hosts with more than 100 mergeable pages");
    assert!((1..6).contains(&partly_enrolled), "{partly_enrolled}");
}

#[test]
fn scenario_of_processes_with_enrolled_memory_has_no_other() {
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let layout = ["--mergeable", "shared-content=image:400", "unique=100"];
    let labs = [0, 1].map(|_| RunningLab::start_layout(&layout).unwrap());
    let selection: Vec<String> = labs.iter().map(|lab| format!("--pid={}", lab.pid())).collect();
    let output = run_pagefold(&["sim", "from-recording"], &selection);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("Only the enrolled memory of 2 processes counts. This leaves out "), "{errors}");
    let scenario = parse_scenario(&String::from_utf8_lossy(&output.stdout)).unwrap();
    assert_eq!(count_mergeable(&scenario), (800, 400), "{errors}");
    assert_eq!(scenario.templates[0].pages, 500, "{errors}");
}

#[test]
fn forecast_with_the_daemon_has_what_processes_share() {
    const SHARED_PAGES: u64 = 8000;
    let layout = [&*format!("shared-content=image:{SHARED_PAGES}"), "unique=8000"];
    let labs = [0, 1].map(|_| RunningLab::start_layout(&layout).unwrap());
    let selection: Vec<String> = labs.iter().map(|lab| format!("--pid={}", lab.pid())).collect();
    let policies = "guided,guided:across-domains,whole:2000/20";
    let predict = ["sim", "predict", "--hours", "0.05", "--policy", policies, "--json"];
    let output = run_pagefold(&predict, &selection);
    let errors = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"));
    let figure = |policy: usize, name: &str| report["policies"][policy][name]["expected"].as_f64().unwrap();
    let saved_pages = |policy: usize| {
        let saved = report["policies"][policy]["saved"].as_array().unwrap();
        saved.last().unwrap()["saved_bytes"]["expected"].as_f64().unwrap() / 4096.0
    };
    let shared = SHARED_PAGES as f64;
    assert!(saved_pages(0) < 0.1 * shared, "each process is a trust domain of its own: {report}");
    assert!(saved_pages(1) > 0.9 * shared && saved_pages(2) > 0.9 * shared, "{report}");
    assert!(figure(1, "pagefold_cores") > 0.0 && figure(1, "ksmd_cores") < figure(2, "ksmd_cores"), "{report}");
}

#[test]
fn scenario_of_processes_with_known_memory_has_the_mergeable_pages_of_the_census() {
    if !nix::unistd::geteuid().is_root() {
        println!("skipped: needs root to know which processes share frames");
        return;
    }
    let layout = ["zero=101", "unique=700", "within=60,copies=3", "shared-content=image:400"];
    let labs = [0, 1, 2].map(|machine| {
        let also = [["shared-content=pair:80"], ["shared-content=pair:80"], ["shared-content=alone:80"]][machine];
        RunningLab::start_layout(&[&layout[..], &also].concat()).unwrap()
    });
    let selection: Vec<String> = labs.iter().map(|lab| format!("--pid={}", lab.pid())).collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("labs.toml");
    let command = ["sim", "from-recording", "--pass-interval", "50ms", "-o", file.to_str().unwrap()];
    let output = run_pagefold(&command, &selection);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{errors}");
    assert!(errors.contains("Arrivals, exits and growth are not known"), "{errors}");
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("# Made by `pagefold sim from-recording` from This host."), "{text}");
    let scenario = parse_scenario(&text).unwrap();
    let expected = census_of(&selection);
    assert_eq!(count_mergeable(&scenario), expected, "{text}");
    // What the layouts have in common: zeros, the image, a content thrice in each, and the pair.
    assert!(expected.0 >= 3 * (101 + 60 + 400) + 2 * 80, "{expected:?}");
    assert_eq!(scenario.classes.iter().map(|class| class.count).sum::<u32>(), 3);
    let again = run_pagefold(&command, &selection);
    assert_eq!(again.status.code(), Some(2), "an existing file is kept");
    fs::write(&file, text.replace("duration = \"1day\"", "duration = \"2min\"")).unwrap();
    let compared =
        run_pagefold(&["sim", "compare", file.to_str().unwrap(), "--policy", "whole:2000/20", "--json"], &[]);
    let report: Value = serde_json::from_slice(&compared.stdout).unwrap();
    let unmerged = report["policies"][0]["unmerged_duplicate_pages"]["mean"].as_f64().unwrap();
    assert!(unmerged < 0.02 * expected.0 as f64, "{report}");
}
