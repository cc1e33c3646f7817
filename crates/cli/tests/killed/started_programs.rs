//! Programs that pagefold starts together with a companion process, which enrolls them from outside or drives KSM. The
//! tests kill the companion, or the process that is about to exec the program. The program continues.

use crate::{
    GUIDED_KIND, PAGEFOLD_BINARY, are_settings_as_before, days_since_1970, is_soak_run, is_traced_or_stopped,
    kill_at_selected_points, points_for_day, read_settings, regions_checksum, run_pagefold, run_recover,
    write_settings_before,
};
use pagefold_labs::client::lab_binary;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use pagefold_labs::process_checks::{enrolled_page_addresses, wait_until};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The program's layout: merging saves 1500 frames, more than a policy requires.
const LAYOUT_ARGUMENTS: &[&str] = &["layout", "within=2000,copies=4", "unique=500"];

/// Maximum time from the visible effect of the companion to the end of its work.
const COMPANION_TIMEOUT: Duration = Duration::from_secs(1);

/// A way to start a program.
struct ProgramStart {
    /// Its name in [`CHANGE_KINDS`](crate::CHANGE_KINDS).
    kind_name: &'static str,
    /// Arguments of `pagefold run`.
    arguments: &'static [&'static str],
    /// Whether the change to the program is complete and the settings are as before.
    is_in_effect: fn(&KsmTestGuard, &StartedProgram) -> bool,
}

/// A program that was started, or was killed before exec.
struct StartedProgram {
    child: Child,
    state: tempfile::TempDir,
    /// Its regions; empty if the program did not start.
    regions: Vec<RegionLine>,
}

impl StartedProgram {
    fn start(start: &ProgramStart, ksm: &KsmTestGuard, fault: &str) -> Self {
        write_settings_before(ksm);
        let state = tempfile::tempdir().unwrap();
        let mut command = Command::new(PAGEFOLD_BINARY);
        command.arg("--state").arg(state.path()).arg("run").args(start.arguments).arg("--");
        command.arg(lab_binary().unwrap()).args(LAYOUT_ARGUMENTS).env("PAGEFOLD_FAULT_POINT", fault);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(stderr_path(state.path())).unwrap());
        let mut child = command.spawn().expect("the binary runs");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let regions = lines.take_while(|line| !line.starts_with(READY_PREFIX));
        let regions = regions.map(|line| serde_json::from_str(&line).unwrap()).collect();
        Self { child, state, regions }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn has_started(&self) -> bool {
        !self.regions.is_empty()
    }

    /// The text on standard error.
    fn stderr_text(&self) -> String {
        fs::read_to_string(stderr_path(self.state.path())).unwrap()
    }

    /// Whether another process also has the program's standard error open.
    fn has_companion(&self) -> bool {
        let file = stderr_path(self.state.path()).canonicalize().unwrap();
        let entries = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap());
        let entries = entries.filter(|entry| entry.file_name().to_str() != Some(&self.pid().to_string()));
        entries.into_iter().any(|entry| fs::read_link(entry.path().join("fd/2")).is_ok_and(|holder| holder == file))
    }

    /// Check that the change can be made again, and undone, to completion.
    fn assert_change_can_be_repeated(&self, context: &str) {
        for command in ["merge --whole-processes --pass-interval 0 --cpu 100 --min-profit 0 --watch-time 0", "unmerge"]
        {
            let output = run_pagefold(self.state.path(), command, &[self.pid()], None);
            assert_eq!(output.status.code(), Some(0), "{context}: {output:?}");
            assert!(!is_traced_or_stopped(self.pid()), "{context}: {command}");
            assert_eq!(enrolled_page_addresses(self.pid()).is_empty(), command == "unmerge", "{context}: {command}");
        }
    }

    /// Check that the program exits normally, and wait until its companion exits.
    fn stop(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success() || !self.has_started(), "{}", self.stderr_text());
        wait_until("the exit of the companion", || !self.has_companion());
    }
}

fn stderr_path(state: &Path) -> PathBuf {
    state.join("errors")
}

impl ProgramStart {
    /// How often each point is reached without a kill.
    fn fault_points(&self, ksm: &KsmTestGuard) -> BTreeMap<String, u64> {
        let mut program = StartedProgram::start(self, ksm, "count");
        wait_until("the effect of the command", || (self.is_in_effect)(ksm, &program));
        program.stop();
        crate::parse_points(&program.stderr_text())
    }

    /// Kill the process that reaches a point; returns whether one did.
    fn kill_at(&self, ksm: &KsmTestGuard, point: &str) -> bool {
        let mut program = StartedProgram::start(self, ksm, point);
        let (number, name) = point.split_once(' ').expect("a point consists of a number and a name");
        let message = format!("fault point {number}: {name}\n");
        let is_killed = || program.stderr_text().contains(&message);
        let mut since = Instant::now();
        wait_until(&message, || {
            if program.has_started() && !(self.is_in_effect)(ksm, &program) {
                since = Instant::now();
            }
            is_killed() || since.elapsed() >= COMPANION_TIMEOUT
        });
        let killed = is_killed();
        if killed && program.has_started() {
            wait_until("the exit of the killed companion", || !program.has_companion());
            let checksum_before = regions_checksum(program.pid(), &program.regions);
            run_recover(ksm, program.state.path(), &[program.pid()], &message);
            program.assert_change_can_be_repeated(&message);
            assert_eq!(regions_checksum(program.pid(), &program.regions), checksum_before, "{message}");
        }
        program.stop();
        run_recover(ksm, program.state.path(), &[], &message);
        killed
    }
}

/// KSM for one test; `None` after printing why the test is skipped.
fn acquire_ksm() -> Option<KsmTestGuard> {
    KsmTestGuard::acquire().inspect_err(|why| println!("skipped: {why}")).ok()
}

#[test]
fn program_enrolled_from_outside_survives_kill() {
    let Some(ksm) = acquire_ksm() else { return };
    let start = ProgramStart {
        kind_name: "inject",
        arguments: &["--method", "inject"],
        is_in_effect: |_, program| {
            let stat = fs::read_to_string(format!("/proc/{}/ksm_stat", program.pid())).unwrap();
            stat.contains("ksm_merge_any: yes")
        },
    };
    kill_at_selected_points(start.kind_name, &start.fault_points(&ksm), |point| start.kill_at(&ksm, point));
}

#[test]
fn program_with_guided_merge_survives_kill() {
    let Some(ksm) = acquire_ksm() else { return };
    let start = ProgramStart {
        kind_name: GUIDED_KIND,
        arguments: &["--policy", "guided", "--cpu", "100"],
        is_in_effect: |ksm, program| {
            let merged = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", program.pid())).unwrap();
            merged.trim().parse::<u64>().unwrap() >= 2000
                && are_settings_as_before(&read_settings(ksm))
                && !program.state.path().join("ksm.journal.json").exists()
        },
    };
    if is_soak_run() {
        return kill_at_selected_points(start.kind_name, &start.fault_points(&ksm), |point| start.kill_at(&ksm, point));
    }
    // Each attempt takes as long as a content must be stable before it is merged.
    for name in points_for_day(start.kind_name, days_since_1970() as usize) {
        assert!(start.kill_at(&ksm, &format!("1 {name}")), "{name}");
    }
}
