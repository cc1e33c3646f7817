//! A census by a user who may read only the user's own processes, on the live kernel. It counts these exactly and names
//! the processes that it cannot read.

use pagefold_labs::client::{RunningLab, install_executable};
use pagefold_labs::output_lines::RegionLine;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::Command;

const NOBODY_UID: u32 = 65534;

/// The non-zero classes of a lab's region, in pages.
fn classes_of_region(report: &Value, lab: &RunningLab<RegionLine>, region: &RegionLine) -> BTreeMap<String, u64> {
    let processes = report["processes"].as_array().unwrap();
    let process = processes.iter().find(|process| process["pid"] == lab.pid()).expect("the census has no such process");
    let start = format!("{:x}", region.start);
    let regions = process["regions"].as_array().unwrap();
    let pages = regions.iter().find(|part| part["start"] == start.as_str()).map(|part| &part["pages"]);
    pages
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(class, pages)| (class.clone(), pages.as_u64().unwrap()))
        .filter(|(_, pages)| *pages > 0)
        .collect()
}

#[test]
fn unprivileged_census_is_exact_and_names_unseen_processes() {
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to become another user");
    }
    // A copy that the user can execute, wherever this tree is.
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let binary = folder.path().join("pagefold");
    install_executable(env!("CARGO_BIN_EXE_pagefold").as_ref(), &binary, 0o755).unwrap();

    let spec = ["zero=31", "unique=47", "within=36,copies=3", "volatile=20", "shared-content=seen-by-one:15"];
    let user_lab = RunningLab::start_layout(&[&["--uid", "65534"], &spec[..]].concat()).unwrap();
    let root_lab = RunningLab::start_layout(&["shared-content=seen-by-one:15"]).unwrap();
    let output = Command::new(&binary)
        .args(["census", "--json", "--top", "1"])
        .current_dir("/")
        .uid(NOBODY_UID)
        .gid(NOBODY_UID)
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(3), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");

    let expect = |kind: &str, expected: &[(&str, u64)]| {
        let expected: BTreeMap<String, u64> = expected.iter().map(|&(name, pages)| (name.to_owned(), pages)).collect();
        assert_eq!(classes_of_region(&report, &user_lab, user_lab.first_region(kind)), expected, "{kind}");
    };
    expect("zero", &[("resident", 31), ("zero", 31)]);
    expect("unique", &[("resident", 47), ("unique", 47)]);
    expect("within", &[("resident", 36), ("duplicate", 36), ("duplicate_within_process", 36), ("redundant", 24)]);
    expect("volatile", &[("resident", 20), ("volatile", 20)]);
    // The other copies are in processes that the user may not read.
    expect("shared-content", &[("resident", 15), ("unique", 15)]);

    for pid in [root_lab.pid(), std::process::id()] {
        let unscanned = report["not_counted"]["unscanned_processes"].as_array().unwrap();
        let unscanned = unscanned.iter().find(|process| process["pid"] == pid).expect("root's process is not named");
        assert_eq!(unscanned["reason"], "denied");
        assert!(report["processes"].as_array().unwrap().iter().all(|process| process["pid"] != pid));
    }
}
