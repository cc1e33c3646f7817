//! Guests that are told by their control sockets.

use crate::{json, killed_at_any, pagefold, points, recover, set_as_before, was_killed};
use pagefold_labs::assets::Assets;
use pagefold_labs::client::{Lab, ask};
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::Guest;
use std::cell::Cell;
use std::fs;
use std::path::Path;

#[test]
fn a_merge_of_guests_by_their_control_sockets() {
    if let Err(why) = Assets::find(&Assets::directory()) {
        return println!("skipped: {why}");
    }
    let ksm = match Ksm::take() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    let arguments = ["--guests", "2", "--memory", "112", "--same", "16", "--own", "8", "--names", "kept"];
    let fleet = Lab::<Guest>::fleet(&[&arguments[..], &["--no-mem-merge"]].concat()).expect("two guests");
    let pids: Vec<u32> = fleet.lines().iter().map(|guest| guest.pid).collect();
    let marked = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap().contains(" mg");
    let merge = |fault: &str| {
        set_as_before(&ksm);
        assert!(!pids.iter().any(marked));
        let state = tempfile::tempdir().unwrap();
        let command = "merge --whole --across-domains --ignore-opt-out --settle 0 --cpu 100 --watch 0";
        let output = pagefold(state.path(), command, &pids, Some(fault));
        (state, output)
    };
    let separate = |state: &Path, place: &str| {
        let unmerged = pagefold(state, "unmerge", &pids, None);
        assert_eq!(unmerged.status.code(), Some(0), "{place}: {unmerged:?}");
        assert!(!pids.iter().any(marked), "{place}");
    };
    // What the guests themselves read in their memory: most of it is merged by one and separated by the other.
    let hold = || -> Vec<String> {
        let sums = |guest| ask(guest, "sha1sum /data/same /data/own").expect("it answers");
        std::thread::scope(|scope| {
            let asked: Vec<_> = fleet.lines().iter().map(|guest| scope.spawn(move || sums(guest))).collect();
            asked.into_iter().map(|asked| asked.join().expect("it answers")).collect()
        })
    };
    let before = hold();
    assert!(before.iter().all(|sums| sums.lines().count() == 2) && before[0] != before[1], "{before:?}");
    let (state, output) = merge("count");
    assert!(json(&output)["outcome"]["saved"].as_u64() >= Some(16 << 20), "{output:?}");
    assert_eq!(json(&output)["outcome"]["stops"], 0, "no thread was stopped: {output:?}");
    separate(state.path(), "not killed");
    let taken_back = Cell::new(0);
    killed_at_any("backend", &points(&output), |point| {
        let (state, output) = merge(point);
        let (killed, place) = was_killed(&output, point);
        let journal = fs::read_to_string(state.path().join("journal.json")).unwrap_or_default();
        let undone = journal.contains("until_done");
        taken_back.set(taken_back.get() + u32::from(undone && pids.iter().any(marked)));
        recover(&ksm, state.path(), &pids, &place);
        assert!(!undone || !pids.iter().any(marked), "{place}: it was not done, and stays");
        // What was done by then lasts.
        separate(state.path(), &place);
        assert_eq!(hold(), before, "{place}");
        killed
    });
    // No other kind of change switches backends: right after one it is killed each day.
    assert_ne!(taken_back.get(), 0, "no guest was left marked by a merge that was not done");
}
