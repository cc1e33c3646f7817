//! Kinds of change to the memory of processes.

use crate::{PAGE, checksum, json, killed_at_any, pagefold, points, recover, set_as_before, was_killed};
use pagefold_labs::client::Lab;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::Region;
use pagefold_labs::look::{enrolled, until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

/// How often a kind of change is tried until it does what is to be killed.
const TRIES: usize = 8;

/// A kind of change.
struct Change {
    /// Its name among the kinds.
    kind: &'static str,
    /// Arguments of `pagefold-lab`, for each process.
    labs: &'static [&'static str],
    /// Whether ksmd has merged all of them before.
    merged: bool,
    /// What is killed before at a point, so that there is something to be put back.
    first: Option<(&'static str, &'static str)>,
    /// What is killed.
    command: &'static str,
    /// What its report says where it is not: that it did what is to be killed.
    did: fn(&Value) -> bool,
    /// Whether what the labs enrolled themselves is to be enrolled afterwards.
    enrolled: bool,
}

fn pids(labs: &[Lab<Region>]) -> Vec<u32> {
    labs.iter().map(Lab::pid).collect()
}

/// Two that enrolled themselves more than pays, and what narrows that.
const NARROWED: &[&str] = &["layout --mergeable unique=600 shared-content=n:600"; 2];
const NARROWS: &str = "merge --settle 0 --cpu 100 --min-profit 0 --watch 0";

/// Two processes that hold the same in part.
const MIXTURES: &[&str] = &["mixture --mib 4 --duplicate 50% --salt a", "mixture --mib 4 --duplicate 50% --salt b"];

/// Whether all of the lab's regions are merged.
fn is_merged(lab: &Lab<Region>) -> bool {
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", lab.pid())).unwrap();
    let kib = rollup.lines().find_map(|line| line.strip_prefix("KSM:")?.trim().strip_suffix(" kB"));
    let kib: u64 = kib.expect("a kernel from 6.6 on").parse().unwrap();
    kib * 1024 >= lab.lines().iter().map(|region| region.end() - region.start).sum()
}

impl Change {
    fn start(&self, ksm: &Ksm) -> Vec<Lab<Region>> {
        let start = |arguments: &&str| {
            let words: Vec<&str> = arguments.split(' ').collect();
            Lab::start(words[0], &words[1..]).unwrap()
        };
        let labs: Vec<Lab<Region>> = self.labs.iter().map(start).collect();
        if self.merged {
            // ksmd may skip pages for ever that it came upon at different times.
            let settings = [("smart_scan", 0), ("pages_to_scan", 20_000), ("sleep_millisecs", 1), ("run", 1)];
            for (name, value) in settings.into_iter().filter(|(name, _)| ksm.value(name).is_some()) {
                ksm.set(name, value);
            }
            // Not until ksmd settles: who else is enrolled may keep it busy.
            until("a merge", || labs.iter().all(is_merged));
        }
        set_as_before(ksm);
        labs
    }

    /// Run the command, once what is to come before it was killed.
    fn run(&self, state: &Path, pids: &[u32], fault: Option<&str>) -> Output {
        if let Some((first, point)) = self.first {
            let output = pagefold(state, first, pids, Some(point));
            assert!(was_killed(&output, point).0, "{output:?}");
        }
        pagefold(state, self.command, if self.first.is_some() { &[] } else { pids }, fault)
    }

    /// How often it reaches each point when nobody kills it. Where the machine is busy, it may see too late what it is
    /// to do.
    fn points(&self, ksm: &Ksm) -> BTreeMap<String, u64> {
        let count = |_| {
            let (state, labs) = (tempfile::tempdir().unwrap(), self.start(ksm));
            self.run(state.path(), &pids(&labs), Some("count"))
        };
        let did = |output: &Output| (self.did)(&json(output));
        points(&(0..TRIES).map(count).find(did).expect("one that does what is to be killed"))
    }

    /// Kill it at a point. Whether it got there.
    fn kill(&self, ksm: &Ksm, point: &str) -> bool {
        let state = tempfile::tempdir().unwrap();
        let labs = self.start(ksm);
        let checksum = |lab: &Lab<Region>| checksum(lab.pid(), lab.lines());
        let before: Vec<_> = labs.iter().map(|lab| (checksum(lab), enrolled(lab.pid()))).collect();
        let output = self.run(state.path(), &pids(&labs), Some(point));
        let (killed, place) = was_killed(&output, point);
        let journal = fs::read_to_string(state.path().join("journal.json")).unwrap_or_default();
        let undone = self.first.is_none() && journal.contains("until_done");
        recover(ksm, state.path(), &pids(&labs), &place);
        for (lab, (held, was_enrolled)) in labs.iter().zip(&before) {
            assert_eq!(checksum(lab), *held, "{place}");
            assert!(!self.enrolled || was_enrolled.is_subset(&enrolled(lab.pid())), "{place}");
            assert!(!undone || *was_enrolled == enrolled(lab.pid()), "{place}: it was not done, and stays");
        }
        if !self.enrolled {
            // What is to last is not taken back. It can be done once more, to its end.
            let again = pagefold(state.path(), self.command, &pids(&labs), None);
            assert_eq!(again.status.code(), Some(0), "{place}: {again:?}");
            assert!(labs.iter().all(|lab| enrolled(lab.pid()).is_empty()), "{place}");
            assert!(labs.iter().zip(&before).all(|(lab, (before, _))| checksum(lab) == *before), "{place}");
        }
        for lab in labs {
            let status = lab.end().unwrap();
            assert!(status.success(), "{place}: {status}");
        }
        killed
    }

    fn killed_at_any_step(&self) {
        let ksm = match Ksm::take() {
            Ok(ksm) => ksm,
            Err(why) => return println!("skipped: {why}"),
        };
        killed_at_any(self.kind, &self.points(&ksm), |point| self.kill(&ksm, point));
    }
}

#[test]
fn a_merge() {
    Change {
        kind: "merge",
        labs: MIXTURES,
        merged: false,
        first: None,
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 0",
        did: |report| report["outcome"]["saved"].as_u64() > Some(0),
        enrolled: true,
    }
    .killed_at_any_step();
}

#[test]
fn a_merge_that_narrows_what_programs_enrolled_themselves() {
    Change {
        kind: "narrow",
        labs: NARROWED,
        merged: false,
        first: None,
        command: NARROWS,
        did: |report| {
            let narrowed = report["plan"]["narrowed"].as_array().expect("a list");
            narrowed.len() == 2 && narrowed.iter().all(|of| of["bytes"].as_u64() >= Some(600 * PAGE))
        },
        enrolled: true,
    }
    .killed_at_any_step();
}

#[test]
fn a_merge_that_withdraws_what_does_not_last() {
    Change {
        kind: "withdraw",
        // It writes all the time, so that it is seen to run however soon ksmd is done.
        labs: &["layout text=4000 hot-text=4000 --interval 1"],
        merged: false,
        first: None,
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 1s",
        did: |report| report["outcome"]["watched"]["withdrawn_pages"].as_u64() > Some(0),
        enrolled: true,
    }
    .killed_at_any_step();
}

#[test]
fn a_merge_of_whole_processes() {
    Change {
        kind: "whole",
        labs: MIXTURES,
        merged: false,
        first: None,
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 0 --whole",
        did: |report| report["outcome"]["saved"].as_u64() > Some(0),
        enrolled: true,
    }
    .killed_at_any_step();
}

#[test]
fn an_unmerge() {
    Change {
        kind: "unmerge",
        labs: &["layout --mergeable shared-content=u:400", "layout --merge-any shared-content=u:400"],
        merged: true,
        first: None,
        command: "unmerge",
        did: |report| report["outcome"] == "done" && report["processes"].as_array().map(Vec::len) == Some(2),
        enrolled: false,
    }
    .killed_at_any_step();
}

#[test]
fn an_unmerge_range_by_range() {
    Change {
        kind: "staged",
        labs: &["layout --mergeable shared-content=s:400", "layout --merge-any shared-content=s:400"],
        merged: true,
        first: None,
        command: "unmerge --staged",
        did: |report| report["outcome"] == "done" && report["processes"].as_array().map(Vec::len) == Some(2),
        enrolled: false,
    }
    .killed_at_any_step();
}

#[test]
fn a_recovery() {
    Change {
        kind: "recover",
        labs: NARROWED,
        merged: false,
        // By then memory is withdrawn and all settings are written.
        first: Some((NARROWS, "4 after writing a setting")),
        command: "recover",
        did: |report| {
            report["put_back"].as_array().map(Vec::len) >= Some(5) && report["remains"] == Value::Array(vec![])
        },
        enrolled: true,
    }
    .killed_at_any_step();
}

#[test]
fn an_unmerge_that_puts_huge_pages_together() {
    let mode = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !mode.contains("[always]") && !mode.contains("[madvise]") {
        return println!("skipped: huge pages are not allowed on this host");
    }
    Change {
        kind: "collapse",
        // Equal in both, so that huge pages are split to merge them.
        labs: &["layout --mergeable --salt twin huge=2048"; 2],
        merged: true,
        first: None,
        command: "unmerge --collapse",
        did: |report| {
            let processes = report["processes"].as_array().expect("processes");
            let bytes = |process: &Value, when| process["huge"][when].as_u64();
            processes.iter().all(|process| bytes(process, "collapsed") > bytes(process, "unmerged"))
        },
        enrolled: false,
    }
    .killed_at_any_step();
}
