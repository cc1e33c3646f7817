//! `pagefold vcpu sim`: policies of scheduling compared by a model.

use serde_json::Value;
use std::fs;
use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["vcpu", "sim"]).args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn policies_are_compared_in_json() {
    let arguments = ["dbench-8x20", "--kernel", "3.6", "--seconds", "300ms", "--json"];
    let first = stdout(&sim(&arguments));
    let report: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(report["model"]["kind"], "model");
    let of_best = |policy: &str| {
        let policies = report["policies"].as_array().unwrap();
        policies.iter().find(|report| report["policy"] == policy).unwrap()["of_best"].as_f64().unwrap()
    };
    assert_eq!(of_best("gang"), 1.0);
    assert!(of_best("plain") < 0.03 && of_best("ple") < 0.5 && of_best("throttled") > 0.7, "{first}");
    assert_eq!(first, stdout(&sim(&arguments)), "the result follows the seed");
}

#[test]
fn printed_scenario_is_accepted_as_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let (file, svg) = (folder.path().join("mixed.toml"), folder.path().join("mixed.svg"));
    fs::write(&file, stdout(&sim(&["mixed", "--print"]))).unwrap();
    let options = ["--policy", "eevdf,gang", "--seconds", "50ms", "--svg"];
    let text = stdout(&sim(&[&[file.to_str().unwrap()], &options[..], &[svg.to_str().unwrap()]].concat()));
    assert!(text.contains("9 VMs with 32 vCPUs on 16 CPUs (2.00 vCPUs for each)"), "{text}");
    assert!(text.contains("These are figures of a model"), "{text}");
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>") && svg.contains("gang (today)"));
}

#[test]
fn capacity_of_a_scenario_has_a_knee() {
    let arguments =
        ["capacity", "--scenario", "compute", "--copies", "2", "--policy", "plain,gang", "--seconds", "100ms"];
    let text = stdout(&sim(&arguments));
    assert!(text.contains("plain: at most 20 % are lost up to 2 copies, 4.00 vCPUs for each CPU"), "{text}");
}

#[test]
fn unknown_scenario_is_refused_with_a_remedy() {
    let output = sim(&["no-such-scenario"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("neither a shipped scenario nor a file no-such-scenario: `pagefold vcpu sim --list`"),
        "{stderr}"
    );
}

#[test]
fn shipped_scenarios_are_listed() {
    let text = stdout(&sim(&["--list"]));
    assert!(text.contains("dbench-8x20") && text.contains("boot-80"), "{text}");
}
