//! The JSON reports of a live `merge` and `unmerge` match their published schemas. `golden.rs` checks the reports of
//! dry runs, over recordings.

#![forbid(unsafe_code)]

use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Run a command on these processes; it must succeed. Returns its report, checked against the command's schema.
fn report_json(
    command: &str,
    state: &Path,
    labs: &[RunningLab<pagefold_labs::output_lines::RegionLine>],
    options: &[&str],
) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .args([command, "--json", "--state"])
        .arg(state)
        .args(labs.iter().map(|lab| format!("--pid={}", lab.pid())))
        .args(options)
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/schema/{command}.json"));
    let schema = serde_json::from_slice(&fs::read(path).expect("no schema")).expect("not JSON");
    let validator = jsonschema::validator_for(&schema).expect("the schema is not valid");
    let schema_errors: Vec<String> = validator.iter_errors(&report).map(|error| error.to_string()).collect();
    assert!(schema_errors.is_empty(), "{command}: {schema_errors:#?}");
    report
}

#[test]
fn live_reports_match_their_schemas() {
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => {
            ksm.write_setting("run", 0);
            ksm
        }
        Err(why) => return println!("skipped: {why}"),
    };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=j:1000", "zero=400", "unique=200"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let merged = report_json("merge", state.path(), &labs, &["--cpu", "100"]);
    assert!(merged["outcome"]["saved"].as_u64() > Some(0), "{merged}");
    let unmerged = report_json("unmerge", state.path(), &labs, &[]);
    assert!(unmerged["taken"]["unenrolled"].as_u64() > Some(0), "{unmerged}");
}
