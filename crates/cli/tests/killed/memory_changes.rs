//! Kinds of change to the memory of processes.

use crate::{
    PAGE_BYTES, kill_at_selected_points, parse_json, reached_points, regions_checksum, run_pagefold, run_recover,
    was_killed, write_settings_before,
};
use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use pagefold_labs::process_checks::{enrolled_page_addresses, wait_until};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Output;

/// Maximum number of attempts until a change performs the work that is to be killed.
const MAX_TRIES: usize = 8;

/// A kind of change.
struct MemoryChange {
    /// Its name in [`CHANGE_KINDS`](crate::CHANGE_KINDS).
    kind_name: &'static str,
    /// Arguments of `pagefold-lab`, for each process.
    lab_arguments: &'static [&'static str],
    /// Whether ksmd merges all the labs' regions before the change.
    merged_before: bool,
    /// A command that is killed at a point before the change, so that there is something to restore.
    killed_before: Option<(&'static str, &'static str)>,
    /// The command that is killed.
    command: &'static str,
    /// Checks in the report of a run without a kill that it performed the work that is to be killed.
    is_done: fn(&Value) -> bool,
    /// Whether the memory that the labs enrolled themselves must be enrolled afterwards.
    enrolled_afterwards: bool,
}

fn pids(labs: &[RunningLab<RegionLine>]) -> Vec<u32> {
    labs.iter().map(RunningLab::pid).collect()
}

/// Two labs that enrolled more of their memory than is profitable, and the merge that unenrolls the excess.
const OVER_ENROLLED_LABS: &[&str] = &["layout --mergeable unique=600 shared-content=n:600"; 2];
const UNENROLLING_MERGE: &str = "merge --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 0";

/// Two processes with half of their content in common.
const MIXTURE_LABS: &[&str] =
    &["mixture --mib 4 --duplicate-share 50% --salt a", "mixture --mib 4 --duplicate-share 50% --salt b"];

/// Whether all of the lab's regions are merged.
fn are_all_regions_merged(lab: &RunningLab<RegionLine>) -> bool {
    let rollup = fs::read_to_string(format!("/proc/{}/smaps_rollup", lab.pid())).unwrap();
    let kib = rollup.lines().find_map(|line| line.strip_prefix("KSM:")?.trim().strip_suffix(" kB"));
    let kib: u64 = kib.expect("smaps_rollup has no KSM field (Linux 6.6)").parse().unwrap();
    kib * 1024 >= lab.lines().iter().map(|region| region.end_address() - region.start).sum()
}

impl MemoryChange {
    fn start_labs(&self, ksm: &KsmTestGuard) -> Vec<RunningLab<RegionLine>> {
        let start = |arguments: &&str| {
            let words: Vec<&str> = arguments.split(' ').collect();
            RunningLab::start(words[0], &words[1..]).unwrap()
        };
        let labs: Vec<RunningLab<RegionLine>> = self.lab_arguments.iter().map(start).collect();
        if self.merged_before {
            // With smart_scan, ksmd may skip pages forever that it first scanned at different times.
            let settings = [("smart_scan", 0), ("pages_to_scan", 20_000), ("sleep_millisecs", 1), ("run", 1)];
            for (name, value) in settings.into_iter().filter(|(name, _)| ksm.read_setting(name).is_some()) {
                ksm.write_setting(name, value);
            }
            // Do not wait until ksmd settles: other enrolled processes may keep it busy.
            wait_until("the merge of all regions", || labs.iter().all(are_all_regions_merged));
        }
        write_settings_before(ksm);
        labs
    }

    /// Run the command, after the kill of the command before it, if any.
    fn run_command(&self, state: &Path, pids: &[u32], fault: Option<&str>) -> Output {
        if let Some((first, point)) = self.killed_before {
            let output = run_pagefold(state, first, pids, Some(point));
            assert!(was_killed(&output, point).0, "{output:?}");
        }
        run_pagefold(state, self.command, if self.killed_before.is_some() { &[] } else { pids }, fault)
    }

    /// How often the command reaches each point without a kill. On a busy machine it may notice too late what it has to
    /// do.
    fn fault_points(&self, ksm: &KsmTestGuard) -> BTreeMap<String, u64> {
        let count = |_| {
            let (state, labs) = (tempfile::tempdir().unwrap(), self.start_labs(ksm));
            self.run_command(state.path(), &pids(&labs), Some("count"))
        };
        let has_worked = |output: &Output| (self.is_done)(&parse_json(output));
        reached_points(&(0..MAX_TRIES).map(count).find(has_worked).expect("no attempt performed the work"))
    }

    /// Kill the command at a point; returns whether it reached the point.
    fn kill_at(&self, ksm: &KsmTestGuard, point: &str) -> bool {
        let state = tempfile::tempdir().unwrap();
        let labs = self.start_labs(ksm);
        let checksum = |lab: &RunningLab<RegionLine>| regions_checksum(lab.pid(), lab.lines());
        let before: Vec<_> = labs.iter().map(|lab| (checksum(lab), enrolled_page_addresses(lab.pid()))).collect();
        let output = self.run_command(state.path(), &pids(&labs), Some(point));
        let (killed, context) = was_killed(&output, point);
        let journal = fs::read_to_string(state.path().join("ksm.journal.json")).unwrap_or_default();
        let undone = self.killed_before.is_none() && journal.contains("until_commit");
        run_recover(ksm, state.path(), &pids(&labs), &context);
        for (lab, (checksum_before, was_enrolled)) in labs.iter().zip(&before) {
            assert_eq!(checksum(lab), *checksum_before, "{context}");
            assert!(
                !self.enrolled_afterwards || was_enrolled.is_subset(&enrolled_page_addresses(lab.pid())),
                "{context}"
            );
            assert!(
                !undone || *was_enrolled == enrolled_page_addresses(lab.pid()),
                "{context}: recover left an unfinished change in place"
            );
        }
        if !self.enrolled_afterwards {
            // A persistent change is not undone, and the command can be repeated to completion.
            let repeated = run_pagefold(state.path(), self.command, &pids(&labs), None);
            assert_eq!(repeated.status.code(), Some(0), "{context}: {repeated:?}");
            assert!(labs.iter().all(|lab| enrolled_page_addresses(lab.pid()).is_empty()), "{context}");
            assert!(labs.iter().zip(&before).all(|(lab, (before, _))| checksum(lab) == *before), "{context}");
        }
        for lab in labs {
            let status = lab.stop().unwrap();
            assert!(status.success(), "{context}: {status}");
        }
        killed
    }

    fn assert_survives_kill_at_any_step(&self) {
        let ksm = match KsmTestGuard::acquire() {
            Ok(ksm) => ksm,
            Err(why) => return println!("skipped: {why}"),
        };
        kill_at_selected_points(self.kind_name, &self.fault_points(&ksm), |point| self.kill_at(&ksm, point));
    }
}

#[test]
fn merge_survives_kill() {
    MemoryChange {
        kind_name: "merge",
        lab_arguments: MIXTURE_LABS,
        merged_before: false,
        killed_before: None,
        command: "merge --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 0",
        is_done: |report| report["outcome"]["saved"].as_u64() > Some(0),
        enrolled_afterwards: true,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn merge_with_temporary_unenroll_survives_kill() {
    MemoryChange {
        kind_name: "narrow",
        lab_arguments: OVER_ENROLLED_LABS,
        merged_before: false,
        killed_before: None,
        command: UNENROLLING_MERGE,
        is_done: |report| {
            let unenrolls =
                report["plan"]["temporary_unenrolls"].as_array().expect("the plan has no list of unenrolled ranges");
            unenrolls.len() == 2 && unenrolls.iter().all(|range| range["bytes"].as_u64() >= Some(600 * PAGE_BYTES))
        },
        enrolled_afterwards: true,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn merge_that_unenrolls_short_lived_pages_survives_kill() {
    MemoryChange {
        kind_name: "unenroll",
        // The lab writes all the time, so that the writes are noticed however soon ksmd finishes.
        lab_arguments: &["layout text=4000 rewritten-text=4000 --interval 1"],
        merged_before: false,
        killed_before: None,
        command: "merge --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 1s",
        is_done: |report| report["outcome"]["merged_watch"]["unenrolled_pages"].as_u64() > Some(0),
        enrolled_afterwards: true,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn whole_process_merge_survives_kill() {
    MemoryChange {
        kind_name: "whole",
        lab_arguments: MIXTURE_LABS,
        merged_before: false,
        killed_before: None,
        command: "merge --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 0 --whole-processes",
        is_done: |report| report["outcome"]["saved"].as_u64() > Some(0),
        enrolled_afterwards: true,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn unmerge_survives_kill() {
    MemoryChange {
        kind_name: "unmerge",
        lab_arguments: &["layout --mergeable shared-content=u:400", "layout --merge-any shared-content=u:400"],
        merged_before: true,
        killed_before: None,
        command: "unmerge",
        is_done: |report| report["outcome"] == "done" && report["processes"].as_array().map(Vec::len) == Some(2),
        enrolled_afterwards: false,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn unmerge_by_ranges_survives_kill() {
    MemoryChange {
        kind_name: "staged",
        lab_arguments: &["layout --mergeable shared-content=s:400", "layout --merge-any shared-content=s:400"],
        merged_before: true,
        killed_before: None,
        command: "unmerge --staged",
        is_done: |report| report["outcome"] == "done" && report["processes"].as_array().map(Vec::len) == Some(2),
        enrolled_afterwards: false,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn recover_survives_kill() {
    MemoryChange {
        kind_name: "recover",
        lab_arguments: OVER_ENROLLED_LABS,
        merged_before: false,
        // At this point memory is unenrolled and all settings are written.
        killed_before: Some((UNENROLLING_MERGE, "4 after writing a setting")),
        command: "recover",
        is_done: |report| {
            report["undone"].as_array().map(Vec::len) >= Some(5) && report["failed_undos"] == Value::Array(vec![])
        },
        enrolled_afterwards: true,
    }
    .assert_survives_kill_at_any_step();
}

#[test]
fn unmerge_with_collapse_survives_kill() {
    let mode = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if !mode.contains("[always]") && !mode.contains("[madvise]") {
        return println!("skipped: huge pages are not allowed on this host");
    }
    MemoryChange {
        kind_name: "collapse",
        // The same content in both, so that ksmd splits huge pages to merge them.
        lab_arguments: &["layout --mergeable --salt twin huge=2048"; 2],
        merged_before: true,
        killed_before: None,
        command: "unmerge --collapse",
        is_done: |report| {
            let processes = report["processes"].as_array().expect("processes");
            let bytes = |process: &Value, when| process["huge"][when].as_u64();
            processes.iter().all(|process| bytes(process, "collapsed") > bytes(process, "unmerged"))
        },
        enrolled_afterwards: false,
    }
    .assert_survives_kill_at_any_step();
}
