//! The program killed with -9 at any step of each kind of change that it makes to a host: whoever it was at goes on as
//! if nothing had been, and `recover` brings back the rest.
//!
//! Each kind of change names the fault points that it reaches, and all that there are in the code are named. They are dealt
//! among the kinds, anew each day, so that each is hit in every run. `PAGEFOLD_SOAK=1` takes every one of each kind, as
//! often as it is reached. Needs root and KSM, and the feature `fault-points`.

#![cfg(feature = "fault-points")]

use pagefold_labs::assets::Assets;
use pagefold_labs::client::{Lab, ask};
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::{Guest, Region};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::sleep;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// In how many kinds of change each point is hit in the short form, where so many reach it.
const HITS: usize = 2;

/// How often a point that was not reached is tried, at most.
const TRIES: usize = 4;

/// The points of a journal.
const JOURNAL: &[&str] = &[
    "before writing a journal",
    "between writing a journal and renaming it",
    "after renaming a journal",
    "before removing a journal",
    "after removing a journal",
];

/// Those of KSM's settings.
const SETTINGS_POINTS: &[&str] = &["before writing a setting", "after writing a setting"];

/// Those of a visit to a process, and of the pause behind it.
const VISIT: &[&str] = &[
    "seized",
    "interrupted",
    "stopped",
    "seccomp suspended",
    "frame written",
    "parked",
    "signals blocked",
    "call turned",
    "at the exit of the call",
    "at the entry of the call that heals",
    "parked again",
    "interrupted to leave",
    "resumed to leave",
    "stopped to leave",
    "signal mask restored",
    "registers restored",
    "stack restored",
    "let go",
];

const PAUSE: &[&str] = &["between two stops"];

const BACKEND: &[&str] = &["before switching a backend", "after switching a backend"];

const COLLAPSE: &[&str] = &["before collapsing a range", "after collapsing a range"];

/// What each kind of change reaches.
const KINDS: [(&str, &[&[&str]]); 7] = [
    ("merge", &[JOURNAL, SETTINGS_POINTS, VISIT, PAUSE]),
    ("narrow", &[JOURNAL, SETTINGS_POINTS, VISIT, PAUSE]),
    ("withdraw", &[JOURNAL, SETTINGS_POINTS, VISIT, PAUSE]),
    ("whole", &[JOURNAL, SETTINGS_POINTS, VISIT]),
    ("backend", &[JOURNAL, SETTINGS_POINTS, BACKEND]),
    ("unmerge", &[VISIT, PAUSE]),
    ("collapse", &[VISIT, PAUSE, COLLAPSE]),
];

/// The labs' pages.
const PAGE: u64 = 4096;

/// A kind of change.
struct Change {
    /// Its name among the kinds.
    kind: &'static str,
    /// Arguments of `pagefold-lab`, for each process.
    labs: &'static [&'static str],
    /// Whether ksmd has merged all of them before.
    merged: bool,
    /// What is killed.
    command: &'static str,
    /// What its report says where it is not: that it did what is to be killed.
    did: fn(&Value) -> bool,
    /// Whether what the labs enrolled themselves is to be enrolled afterwards.
    enrolled: bool,
}

/// Two processes that hold the same in part.
const MIXTURES: &[&str] = &["mixture --mib 4 --duplicate 50% --salt a", "mixture --mib 4 --duplicate 50% --salt b"];

/// The settings that are there before: not the ones that Pagefold writes.
const SETTINGS: [(&str, i64); 4] = [("run", 0), ("pages_to_scan", 123), ("sleep_millisecs", 77), ("use_zero_pages", 0)];

fn settings(ksm: &Ksm) -> [(&'static str, i64); 4] {
    SETTINGS.map(|(name, _)| (name, ksm.counter(name)))
}

fn pids(labs: &[Lab<Region>]) -> Vec<u32> {
    labs.iter().map(Lab::pid).collect()
}

fn pagefold(state: &Path, command: &str, pids: &[u32], fault: Option<&str>) -> Output {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.args(command.split(' ')).arg("--json").arg("--state").arg(state);
    pagefold.args(pids.iter().map(|pid| format!("--pid={pid}")));
    pagefold.envs(fault.map(|fault| ("PAGEFOLD_FAULT_POINT", fault)));
    pagefold.output().expect("the binary runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// How often a command that nobody killed reached each point.
fn points(output: &Output) -> BTreeMap<String, u64> {
    let said = String::from_utf8_lossy(&output.stderr);
    let times = |line: &str| {
        let (name, times) = line.strip_prefix("fault points at ")?.rsplit_once(": ")?;
        Some((name.to_owned(), times.parse().expect("a number")))
    };
    said.lines().filter_map(times).collect()
}

/// The points that a kind of change reaches.
fn reached_by(kind: &str) -> BTreeSet<&'static str> {
    let (_, groups) = KINDS.iter().find(|(name, _)| *name == kind).expect("a kind of change");
    groups.iter().copied().flatten().copied().collect()
}

/// The points at which a kind of change is killed today.
fn dealt_to(kind: &str, day: usize) -> Vec<&'static str> {
    let deals = |name: &&str| {
        let kinds: Vec<&str> =
            KINDS.iter().map(|(kind, _)| *kind).filter(|kind| reached_by(kind).contains(name)).collect();
        let number: usize = name.bytes().map(usize::from).sum();
        (0..HITS).any(|hit| kinds[(number + day + hit) % kinds.len()] == kind)
    };
    reached_by(kind).into_iter().filter(deals).collect()
}

/// Kill a kind of change at the points that are its today, all of them in the long form, as it has reached them when
/// nobody killed it. `kill` tells whether it got to one: how far ksmd is when it is looked at decides how often its pace
/// is written, so that a point may be reached less often.
fn killed_at_any(kind: &str, reached: &BTreeMap<String, u64>, kill: impl Fn(&str) -> bool) {
    let began = Instant::now();
    let names: BTreeSet<&str> = reached.keys().map(String::as_str).collect();
    assert_eq!(names, reached_by(kind), "what {kind} reaches");
    let soak = std::env::var_os("PAGEFOLD_SOAK").is_some();
    let day = UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    let (mut tried, mut killed) = (0, 0);
    let today = if soak { names.into_iter().collect() } else { dealt_to(kind, day as usize) };
    for name in today {
        let often = reached[name];
        let times: Vec<u64> = if soak { (1..=often).collect() } else { vec![1 + day % often] };
        let hit = times.iter().filter(|time| (0..TRIES).any(|_| kill(&format!("{time} {name}")))).count();
        assert!(hit > 0 || kill(&format!("1 {name}")), "{kind} was not killed at {name:?}");
        (tried, killed) = (tried + times.len(), killed + hit);
    }
    println!("{kind}: killed {killed} times of {tried} tried, in {:.1?}", began.elapsed());
    assert!(!soak || killed * 10 >= tried * 9, "killed {killed} times of {tried} tried");
}

#[test]
fn every_point_in_the_code_is_reached_by_some_kind_of_change_and_dealt_each_day() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut in_code = BTreeSet::new();
    let mut folders = ["drive/src", "linux/src", "sys/src"].map(|folder| crates.join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let source = fs::read_to_string(&path).unwrap();
                let names = source.split("fault::point(\"").skip(1).filter_map(|rest| rest.split('"').next());
                in_code.extend(names.map(str::to_owned));
            }
        }
    }
    let named: BTreeSet<String> = KINDS.iter().flat_map(|(kind, _)| reached_by(kind)).map(str::to_owned).collect();
    assert_eq!(in_code, named);
    for day in 0..KINDS.len() {
        let dealt: BTreeSet<String> =
            KINDS.iter().flat_map(|(kind, _)| dealt_to(kind, day)).map(str::to_owned).collect();
        assert_eq!(dealt, named);
    }
}

/// A command that was to be killed at a point: whether it was, and where.
fn was_killed(output: &Output, point: &str) -> (bool, String) {
    let place = String::from_utf8_lossy(&output.stderr).into_owned();
    let killed = output.status.code().is_none();
    let (number, name) = point.split_once(' ').expect("the number and the name of a point");
    assert_eq!(killed, place.contains(&format!("fault point {number}: {name}\n")), "{output:?}");
    (killed, place)
}

/// Put back what was left, as far as it is in a state directory.
fn recover(ksm: &Ksm, state: &Path, pids: &[u32], place: &str) {
    for pid in pids {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("TracerPid:\t0\n") && !status.contains("State:\tT"), "{place}: {status}");
    }
    let recovered = pagefold(state, "recover", &[], None);
    assert_eq!(recovered.status.code(), Some(0), "{place}: {recovered:?}");
    assert_eq!(settings(ksm), SETTINGS, "{place}");
}

/// What the lab's regions hold.
fn checksum(lab: &Lab<Region>) -> u64 {
    let memory = File::open(format!("/proc/{}/mem", lab.pid())).unwrap();
    let mut hasher = DefaultHasher::new();
    for region in lab.lines() {
        let mut bytes = vec![0; (region.end() - region.start) as usize];
        memory.read_exact_at(&mut bytes, region.start).unwrap();
        hasher.write(&bytes);
    }
    hasher.finish()
}

/// The addresses of the lab's enrolled pages.
fn enrolled(lab: &Lab<Region>) -> BTreeSet<u64> {
    let mut pages = BTreeSet::new();
    let mut region = 0..0;
    let address = |text| u64::from_str_radix(text, 16).ok();
    for line in fs::read_to_string(format!("/proc/{}/smaps", lab.pid())).unwrap().lines() {
        let bounds = line.split(' ').next().and_then(|word| word.split_once('-'));
        if let Some((Some(start), Some(end))) = bounds.map(|(start, end)| (address(start), address(end))) {
            region = start..end;
        } else if line.strip_prefix("VmFlags:").is_some_and(|flags| flags.split(' ').any(|flag| flag == "mg")) {
            pages.extend(region.clone().step_by(PAGE as usize));
        }
    }
    pages
}

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
            for (name, value) in [("pages_to_scan", 20_000), ("sleep_millisecs", 1), ("run", 1)] {
                ksm.set(name, value);
            }
            // Not until ksmd settles: who else is enrolled may keep it busy.
            let began = Instant::now();
            while !labs.iter().all(is_merged) {
                assert!(began.elapsed() < Duration::from_secs(60), "ksmd did not merge the labs within a minute");
                sleep(Duration::from_millis(5));
            }
        }
        for (name, value) in SETTINGS {
            ksm.set(name, value);
        }
        labs
    }

    /// How often it reaches each point when nobody kills it.
    fn points(&self, ksm: &Ksm) -> BTreeMap<String, u64> {
        let state = tempfile::tempdir().unwrap();
        let output = pagefold(state.path(), self.command, &pids(&self.start(ksm)), Some("count"));
        assert!((self.did)(&json(&output)), "{output:?}");
        points(&output)
    }

    /// Kill it at a point. Whether it got there.
    fn kill(&self, ksm: &Ksm, point: &str) -> bool {
        let state = tempfile::tempdir().unwrap();
        let labs = self.start(ksm);
        let before: Vec<_> = labs.iter().map(|lab| (checksum(lab), enrolled(lab))).collect();
        let output = pagefold(state.path(), self.command, &pids(&labs), Some(point));
        let (killed, place) = was_killed(&output, point);
        recover(ksm, state.path(), &pids(&labs), &place);
        for (lab, (checksum, enrolled)) in labs.iter().zip(&before) {
            assert_eq!(self::checksum(lab), *checksum, "{place}");
            assert!(!self.enrolled || enrolled.is_subset(&self::enrolled(lab)), "{place}");
        }
        if !self.enrolled {
            // What is to last is not taken back. It can be done once more, to its end.
            let again = pagefold(state.path(), self.command, &pids(&labs), None);
            assert_eq!(again.status.code(), Some(0), "{place}: {again:?}");
            assert!(labs.iter().all(|lab| self::enrolled(lab).is_empty()), "{place}");
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
        labs: &["layout --mergeable unique=600 shared-content=n:600"; 2],
        merged: false,
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 0",
        did: |report| {
            let targets = report["plan"]["targets"].as_array().expect("targets");
            targets.len() == 2 && targets.iter().all(|target| target["narrowed_bytes"].as_u64() >= Some(600 * PAGE))
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
        labs: &["layout zero=4000 hot-zero=4000 --interval 1"],
        merged: false,
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 1s",
        did: |report| report["outcome"]["watched"]["withdrawn_pages"].as_u64() >= Some(4000),
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
        command: "merge --settle 0 --cpu 100 --min-profit 0 --watch 0 --whole",
        did: |report| report["outcome"]["saved"].as_u64() > Some(0),
        enrolled: true,
    }
    .killed_at_any_step();
}

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
        SETTINGS.iter().for_each(|&(name, value)| ksm.set(name, value));
        assert!(!pids.iter().any(marked));
        let state = tempfile::tempdir().unwrap();
        let command = "merge --whole --across-domains --settle 0 --cpu 100 --watch 0";
        let output = pagefold(state.path(), command, &pids, Some(fault));
        (state, output)
    };
    // What is to last is not taken back by recovering, and guests answer afterwards.
    let separate = |state: &Path, place: &str| {
        let unmerged = pagefold(state, "unmerge", &pids, None);
        assert_eq!(unmerged.status.code(), Some(0), "{place}: {unmerged:?}");
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
    killed_at_any("backend", &points(&output), |point| {
        let (state, output) = merge(point);
        let (killed, place) = was_killed(&output, point);
        recover(&ksm, state.path(), &pids, &place);
        separate(state.path(), &place);
        assert_eq!(hold(), before, "{place}");
        killed
    });
}

#[test]
fn an_unmerge() {
    Change {
        kind: "unmerge",
        labs: &["layout --mergeable shared-content=u:400", "layout --merge-any shared-content=u:400"],
        merged: true,
        command: "unmerge",
        did: |report| report["outcome"] == "done" && report["processes"].as_array().map(Vec::len) == Some(2),
        enrolled: false,
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
