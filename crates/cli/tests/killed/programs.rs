//! Programs that are started with somebody beside them, who enrols them from outside or drives KSM: it is killed, or
//! the process that is to become the program before it does. The program goes on.

use crate::{
    GUIDED, PAGEFOLD, are_as_before, checksum, day, dealt_to, is_held, killed_at_any, pagefold, recover, set_as_before,
    settings, soak,
};
use pagefold_labs::client::binary;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::{READY, Region};
use pagefold_labs::look::{enrolled, until};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What there is to merge in the program: 1500 frames, more than a policy asks for.
const REGIONS: &[&str] = &["layout", "within=2000,copies=4", "unique=500"];

/// How long whoever is beside a program may take from what can be seen of it to the end of what it does.
const REST: Duration = Duration::from_secs(1);

/// A way to start a program.
struct Way {
    /// Its name among the kinds.
    kind: &'static str,
    /// Arguments of `pagefold run`.
    arguments: &'static [&'static str],
    /// Whether the program is as it is to be, and settings are as they were.
    there: fn(&Ksm, &Program) -> bool,
}

/// A program that was started, or was to be.
struct Program {
    child: Child,
    state: tempfile::TempDir,
    /// Its regions; none if it has not begun.
    regions: Vec<Region>,
}

impl Program {
    fn start(way: &Way, ksm: &Ksm, fault: &str) -> Self {
        set_as_before(ksm);
        let state = tempfile::tempdir().unwrap();
        let mut command = Command::new(PAGEFOLD);
        command.arg("--state").arg(state.path()).arg("run").args(way.arguments).arg("--");
        command.arg(binary().unwrap()).args(REGIONS).env("PAGEFOLD_FAULT_POINT", fault);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(errors(state.path())).unwrap());
        let mut child = command.spawn().expect("the binary runs");
        let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        let regions = lines.take_while(|line| !line.starts_with(READY));
        let regions = regions.map(|line| serde_json::from_str(&line).unwrap()).collect();
        Self { child, state, regions }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn has_begun(&self) -> bool {
        !self.regions.is_empty()
    }

    /// What was said on standard error.
    fn said(&self) -> String {
        fs::read_to_string(errors(self.state.path())).unwrap()
    }

    /// Whether somebody beside it has its standard error, too.
    fn is_accompanied(&self) -> bool {
        let file = errors(self.state.path()).canonicalize().unwrap();
        let others = fs::read_dir("/proc").unwrap().map(|entry| entry.unwrap());
        let others = others.filter(|entry| entry.file_name().to_str() != Some(&self.pid().to_string()));
        others.into_iter().any(|entry| fs::read_link(entry.path().join("fd/2")).is_ok_and(|holder| holder == file))
    }

    /// What was begun can be done, where it was not, and taken back, to its end.
    fn change_again(&self, place: &str) {
        for command in ["merge --whole --settle 0 --cpu 100 --min-profit 0 --watch 0", "unmerge"] {
            let output = pagefold(self.state.path(), command, &[self.pid()], None);
            assert_eq!(output.status.code(), Some(0), "{place}: {output:?}");
            assert!(!is_held(self.pid()), "{place}: {command}");
            assert_eq!(enrolled(self.pid()).is_empty(), command == "unmerge", "{place}: {command}");
        }
    }

    /// Have the program end, as one that works, and wait for who is beside it.
    fn end(&mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success() || !self.has_begun(), "{}", self.said());
        until("the end of who is beside it", || !self.is_accompanied());
    }
}

fn errors(state: &Path) -> PathBuf {
    state.join("errors")
}

impl Way {
    /// How often each point is reached when nobody is killed.
    fn points(&self, ksm: &Ksm) -> BTreeMap<String, u64> {
        let mut program = Program::start(self, ksm, "count");
        until("what is to be killed", || (self.there)(ksm, &program));
        program.end();
        crate::points_of(&program.said())
    }

    /// Kill whoever gets to a point. Whether somebody did.
    fn kill(&self, ksm: &Ksm, point: &str) -> bool {
        let mut program = Program::start(self, ksm, point);
        let (number, name) = point.split_once(' ').expect("the number and the name of a point");
        let place = format!("fault point {number}: {name}\n");
        let is_killed = || program.said().contains(&place);
        let mut since = Instant::now();
        until(&place, || {
            if program.has_begun() && !(self.there)(ksm, &program) {
                since = Instant::now();
            }
            is_killed() || since.elapsed() >= REST
        });
        let killed = is_killed();
        if killed && program.has_begun() {
            until("the end of who was killed", || !program.is_accompanied());
            let held = checksum(program.pid(), &program.regions);
            recover(ksm, program.state.path(), &[program.pid()], &place);
            program.change_again(&place);
            assert_eq!(checksum(program.pid(), &program.regions), held, "{place}");
        }
        program.end();
        recover(ksm, program.state.path(), &[], &place);
        killed
    }
}

/// KSM for a test; `None`, once it has said why, where the test is to be skipped.
fn ksm() -> Option<Ksm> {
    Ksm::take().inspect_err(|why| println!("skipped: {why}")).ok()
}

#[test]
fn a_program_that_is_enrolled_from_outside() {
    let Some(ksm) = ksm() else { return };
    let way = Way {
        kind: "inject",
        arguments: &["--way", "inject"],
        there: |_, program| {
            let stat = fs::read_to_string(format!("/proc/{}/ksm_stat", program.pid())).unwrap();
            stat.contains("ksm_merge_any: yes")
        },
    };
    killed_at_any(way.kind, &way.points(&ksm), |point| way.kill(&ksm, point));
}

#[test]
fn a_program_beside_which_what_pays_is_merged() {
    let Some(ksm) = ksm() else { return };
    let way = Way {
        kind: GUIDED,
        arguments: &["--policy", "guided", "--cpu", "100"],
        there: |ksm, program| {
            let merged = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", program.pid())).unwrap();
            merged.trim().parse::<u64>().unwrap() >= 2000
                && are_as_before(&settings(ksm))
                && !program.state.path().join("journal.json").exists()
        },
    };
    if soak() {
        return killed_at_any(way.kind, &way.points(&ksm), |point| way.kill(&ksm, point));
    }
    // It takes as long as a content has to be there before it is merged.
    for name in dealt_to(way.kind, day() as usize) {
        assert!(way.kill(&ksm, &format!("1 {name}")), "{name}");
    }
}
