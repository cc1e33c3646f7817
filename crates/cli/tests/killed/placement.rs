//! Kills during the placement of a process on CPUs and NUMA nodes, during changes of a setting other than KSM's, and
//! during a measurement by DAMON. On a machine with one node no page is moved, but each step is reached. On a
//! kernel whose DAMON cannot monitor processes, a measurement ends after it has made a kdamond.

use crate::{kill_at_selected_points, parse_json, reached_points, run_pagefold, was_killed};
use pagefold_labs::client::{RunningLab, lab_binary};
use pagefold_labs::ksm::KsmTestGuard;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const KDAMOND_COUNT: &str = "/sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";
const HUGE_PAGES_SETTING: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

#[test]
fn placement_survives_kill() {
    // `recover` takes the locks of all classes.
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let target = RunningLab::start_layout(&["unique=2000"]).unwrap();
    let read = || {
        let status = fs::read_to_string(format!("/proc/{}/status", target.pid())).unwrap();
        let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap().to_owned();
        let numa_maps = fs::read_to_string(format!("/proc/{}/numa_maps", target.pid())).unwrap_or_default();
        let policies: BTreeSet<String> =
            numa_maps.lines().filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect();
        (allowed, fs::read_to_string(HUGE_PAGES_SETTING).ok(), policies)
    };
    let before = read();
    let run_placement = |state: &Path, fault: &str| -> Output {
        let mut lab = Command::new(lab_binary().unwrap());
        lab.args(["place", &target.pid().to_string(), "--cpus", "0", "--node", "0", "--state"]).arg(state);
        if let Some(enabled) = &before.1 {
            let other = if enabled.contains("[never]") { "madvise" } else { "never" };
            lab.arg(format!("--setting={HUGE_PAGES_SETTING}={other}"));
        }
        lab.env("PAGEFOLD_FAULT_POINT", fault).stdin(Stdio::null()).output().unwrap()
    };
    let state = tempfile::tempdir().unwrap();
    let counted = run_placement(state.path(), "count");
    assert!(counted.status.success(), "{counted:?}");
    assert_eq!(read(), before);
    kill_at_selected_points("placement", &reached_points(&counted), |point| {
        let state = tempfile::tempdir().unwrap();
        let (killed, context) = was_killed(&run_placement(state.path(), point), point);
        let recovered = run_pagefold(state.path(), "recover", &[], None);
        assert_eq!(recovered.status.code(), Some(0), "{context}: {recovered:?}");
        assert!(
            parse_json(&recovered)["failed_undos"].as_array().is_some_and(Vec::is_empty),
            "{context}: {recovered:?}"
        );
        assert_eq!(read(), before, "{context}");
        killed
    });
}

#[test]
fn measurement_survives_kill() {
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let read = || fs::read_to_string(KDAMOND_COUNT).ok();
    if read().as_deref() != Some("0\n") {
        return println!("skipped: the kernel has no DAMON, or another program uses it");
    }
    let target = RunningLab::start_layout(&["unique=100"]).unwrap();
    let measure =
        |state: &Path, fault: &str| run_pagefold(state, "numa plan --working-set 1s", &[target.pid()], Some(fault));
    let state = tempfile::tempdir().unwrap();
    let counted = measure(state.path(), "count");
    assert!(matches!(counted.status.code(), Some(0 | 3)), "{counted:?}");
    kill_at_selected_points("measurement", &reached_points(&counted), |point| {
        let state = tempfile::tempdir().unwrap();
        let (killed, context) = was_killed(&measure(state.path(), point), point);
        let recovered = run_pagefold(state.path(), "recover", &[], None);
        assert_eq!(recovered.status.code(), Some(0), "{context}: {recovered:?}");
        assert_eq!(read().as_deref(), Some("0\n"), "{context}");
        killed
    });
}

#[test]
fn spread_and_its_undo_survive_kill() {
    let _ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let target = RunningLab::<String>::start("vcpus", &["2"]).unwrap();
    let read = || -> Vec<String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", target.pid())).unwrap();
        let mut allowed: Vec<String> = tasks
            .map(|task| {
                let task = task.unwrap();
                let status = fs::read_to_string(task.path().join("status")).unwrap();
                let allowed = status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap().to_owned();
                format!("{:?} {allowed}", task.file_name())
            })
            .collect();
        allowed.sort();
        allowed
    };
    let before = read();
    let (spread_command, undo_command) = ("vcpu spread --interval 200ms", "vcpu spread undo");
    let spread = |state: &Path, fault: Option<&str>| run_pagefold(state, spread_command, &[target.pid()], fault);
    let undo = |state: &Path, fault: Option<&str>| run_pagefold(state, undo_command, &[], fault);
    let state = tempfile::tempdir().unwrap();
    let counted = spread(state.path(), Some("count"));
    assert!(matches!(counted.status.code(), Some(0 | 3)), "{counted:?}");
    let spread_cpus = read();
    if spread_cpus == before {
        return println!("skipped: this host has a single CPU");
    }
    let counted_undo = undo(state.path(), Some("count"));
    assert_eq!(counted_undo.status.code(), Some(0), "{counted_undo:?}");
    assert_eq!(read(), before);
    // After a kill, `recover` undoes what the spread has not kept yet, and `undo` what it has.
    let restore = |state: &Path, context: &str| {
        let recovered = run_pagefold(state, "recover", &[], None);
        assert_eq!(recovered.status.code(), Some(0), "{context}: {recovered:?}");
        let undone = undo(state, None);
        assert_eq!(undone.status.code(), Some(0), "{context}: {undone:?}");
        assert_eq!(read(), before, "{context}");
    };
    kill_at_selected_points("spread", &reached_points(&counted), |point| {
        let state = tempfile::tempdir().unwrap();
        let (killed, context) = was_killed(&spread(state.path(), Some(point)), point);
        restore(state.path(), &context);
        killed
    });
    kill_at_selected_points("unspread", &reached_points(&counted_undo), |point| {
        let state = tempfile::tempdir().unwrap();
        let started = spread(state.path(), None);
        assert!(matches!(started.status.code(), Some(0 | 3)), "{started:?}");
        let (killed, context) = was_killed(&undo(state.path(), Some(point)), point);
        restore(state.path(), &context);
        killed
    });
}
