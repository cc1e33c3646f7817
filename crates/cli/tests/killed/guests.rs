//! Kills during the enrollment of guests by their QMP control sockets.

use crate::{
    kill_at_selected_points, parse_json, reached_points, run_pagefold, run_recover, was_killed, write_settings_before,
};
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::{RunningLab, query_guest};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::GuestLine;
use std::cell::Cell;
use std::fs;
use std::path::Path;

#[test]
fn guest_merge_by_control_sockets_survives_kill() {
    if let Err(why) = GuestAssets::find(&GuestAssets::default_directory()) {
        return println!("skipped: {why}");
    }
    let ksm = match KsmTestGuard::acquire() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let arguments =
        ["--guests", "2", "--memory", "112", "--shared-mib", "16", "--unique-mib", "8", "--name-prefix", "kept"];
    let fleet = RunningLab::<GuestLine>::start_fleet(&[&arguments[..], &["--no-mem-merge"]].concat())
        .expect("cannot start guests");
    let pids: Vec<u32> = fleet.lines().iter().map(|guest| guest.pid).collect();
    let marked = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().contains(" mg");
    let merge = |fault: &str| {
        write_settings_before(&ksm);
        assert!(!pids.iter().any(marked));
        let state = tempfile::tempdir().unwrap();
        let command =
            "merge --whole-processes --across-domains --ignore-opt-out --pass-interval 0 --cpu 100 --watch-time 0";
        let output = run_pagefold(state.path(), command, &pids, Some(fault));
        (state, output)
    };
    let unmerge = |state: &Path, context: &str| {
        let unmerged = run_pagefold(state, "unmerge", &pids, None);
        assert_eq!(unmerged.status.code(), Some(0), "{context}: {unmerged:?}");
        assert!(!pids.iter().any(marked), "{context}");
    };
    // Checksums that the guests compute of their own memory. A merge merges most of that memory; `unmerge` separates
    // it.
    let guest_checksums = || -> Vec<String> {
        let sums = |guest| query_guest(guest, "sha1sum /data/same /data/own").expect("the guest does not answer");
        std::thread::scope(|scope| {
            let threads: Vec<_> = fleet.lines().iter().map(|guest| scope.spawn(move || sums(guest))).collect();
            threads.into_iter().map(|thread| thread.join().expect("the guest does not answer")).collect()
        })
    };
    let before = guest_checksums();
    assert!(before.iter().all(|sums| sums.lines().count() == 2) && before[0] != before[1], "{before:?}");
    let (state, output) = merge("count");
    assert!(parse_json(&output)["outcome"]["saved"].as_u64() >= Some(16 << 20), "{output:?}");
    assert_eq!(parse_json(&output)["outcome"]["stops"], 0, "a merge by control socket must stop no thread: {output:?}");
    unmerge(state.path(), "without a kill");
    let undone_enrolls = Cell::new(0);
    kill_at_selected_points("backend", &reached_points(&output), |point| {
        let (state, output) = merge(point);
        let (killed, context) = was_killed(&output, point);
        let journal = fs::read_to_string(state.path().join("ksm.journal.json")).unwrap_or_default();
        let undone = journal.contains("until_commit");
        undone_enrolls.set(undone_enrolls.get() + u32::from(undone && pids.iter().any(marked)));
        run_recover(&ksm, state.path(), &pids, &context);
        assert!(!undone || !pids.iter().any(marked), "{context}: recover left memory enrolled by an unfinished merge");
        // Changes made before the kill persist.
        unmerge(state.path(), &context);
        assert_eq!(guest_checksums(), before, "{context}");
        killed
    });
    // Only this kind of change switches backends, so every day it is killed right after such a switch.
    assert_ne!(undone_enrolls.get(), 0, "no kill left a guest enrolled by an unfinished merge");
}
