//! Kills during `tune apply` and `tune undo` of a harmless setting of this host, and of a file for a module that is not
//! loaded.

use crate::{kill_at_selected_points, parse_json, reached_points, run_pagefold, was_killed};
use pagefold_labs::ksm::KsmTestGuard;
use std::fs;
use std::path::Path;

/// The interval at which statistics of memory are summed up, in seconds.
const SETTING: &str = "/proc/sys/vm/stat_interval";
const FILE: &str = "/etc/modprobe.d/zz-pagefold.conf";

/// A profile of tuned with a setting and a parameter of a module that this host does not have loaded.
const PROFILE: &str = "[sysctl]\nvm.stat_interval=7\n[modules]\nkvm_amd=npt=1\n";

fn read() -> (String, Option<String>) {
    (fs::read_to_string(SETTING).unwrap(), fs::read_to_string(FILE).ok())
}

/// Run a command without a kill, and check that it left nothing to undo.
fn assert_completes(state: &Path, command: &str) {
    let output = run_pagefold(state, command, &[], None);
    assert_eq!(output.status.code(), Some(0), "{command}: {output:?}");
    assert!(parse_json(&output)["failed_undos"].as_array().is_none_or(Vec::is_empty), "{command}: {output:?}");
}

/// Why the test cannot run here.
fn missing_need() -> Option<String> {
    if Path::new("/sys/module/kvm_amd").exists() {
        return Some("kvm_amd is loaded here, and a test must not load it again".to_owned());
    }
    if Path::new(FILE).exists() {
        return Some(format!("{FILE} exists: pagefold tune is in use here"));
    }
    fs::create_dir_all("/etc/modprobe.d").err().map(|error| format!("/etc/modprobe.d: {error}"))
}

#[test]
fn tuning_and_its_undo_survive_kill() {
    // `recover` takes the locks of all classes.
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    if let Some(why) = missing_need() {
        return println!("skipped: {why}");
    }
    let before = read();
    let state = tempfile::tempdir().unwrap();
    let profile = state.path().join("tuned.conf");
    fs::write(&profile, PROFILE).unwrap();
    let apply = format!("tune apply --import {}", profile.display());
    for (kind, command) in [("tune", &*apply), ("untune", "tune undo")] {
        let prepare = || {
            let state = tempfile::tempdir().unwrap();
            if kind == "untune" {
                assert_completes(state.path(), &apply);
            }
            state
        };
        let state = prepare();
        let counted = run_pagefold(state.path(), command, &[], Some("count"));
        assert_eq!(counted.status.code(), Some(0), "{counted:?}");
        assert_eq!(read() == before, kind == "untune", "{:?}", read());
        assert_completes(state.path(), "tune undo");
        assert_eq!(read(), before);
        kill_at_selected_points(kind, &reached_points(&counted), |point| {
            let state = prepare();
            let (killed, context) = was_killed(&run_pagefold(state.path(), command, &[], Some(point)), point);
            assert_completes(state.path(), "recover");
            assert_completes(state.path(), "tune undo");
            assert_eq!(read(), before, "{context}");
            killed
        });
    }
}
