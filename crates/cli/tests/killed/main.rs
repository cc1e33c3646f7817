//! Kills pagefold with SIGKILL at every step of each kind of change that it makes to a host. The processes it works on
//! must continue undisturbed, and `recover` must restore the rest. This covers memory ([`memory_changes`], [`guests`]),
//! placement ([`placement`]), persistent settings ([`setting_changes`]), tuning ([`tuning`], [`tuned_rules`],
//! [`modules`]), and programs that pagefold starts and accompanies ([`started_programs`]).
//!
//! Each kind of change lists the fault points that it reaches, and all fault points in the code are listed. Each day
//! they are distributed anew among the kinds, so that every run hits each point. `PAGEFOLD_DAY` repeats the
//! distribution of another day. `PAGEFOLD_SOAK=1` kills each kind at every point, as often as it reaches the point.
//! Needs root, KSM and the feature `fault-points`.

#![cfg(feature = "fault-points")]

mod guests;
mod memory_changes;
mod modules;
mod placement;
mod setting_changes;
mod started_programs;
mod tuned_rules;
mod tuning;

use pagefold_labs::fault_points::{JOURNAL_POINTS, PLACEMENT_POINTS, VISIT_POINTS};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Instant, UNIX_EPOCH};

/// In the short form, the number of kinds of change that are killed at each point, if that many reach it.
const MIN_KINDS_PER_POINT: usize = 2;

/// Maximum number of attempts to reach a point.
const MAX_TRIES_PER_POINT: usize = 4;

/// The fault points of a journal with one change, to which nothing is appended.
const SHORT_JOURNAL_POINTS: &[&str] = &[
    "before writing a journal",
    "between writing a journal and renaming it",
    "after renaming a journal",
    "before removing a journal",
    "after removing a journal",
];

/// The fault points of KSM settings.
const SETTING_POINTS: &[&str] = &["before writing a setting", "after writing a setting"];

const PAUSE_POINTS: &[&str] = &["between two stops"];

const BACKEND_POINTS: &[&str] = &["before setting a QEMU property", "after setting a QEMU property"];

const COLLAPSE_POINTS: &[&str] = &["before collapsing a range", "after collapsing a range"];

const AFFINITY_POINTS: &[&str] = &["before setting an affinity", "after setting an affinity"];

/// The fault points of a new configuration file.
const FILE_POINTS: &[&str] =
    &["before replacing a file", "between writing a file and putting it in place", "after replacing a file"];

/// The fault points of the removal of a configuration file.
const FILE_REMOVAL_POINTS: &[&str] = &["before replacing a file", "after replacing a file"];

const MODULE_POINTS: &[&str] = &["before unloading a module", "after unloading a module", "after loading a module"];

/// The fault points at which the test with a real libvirt kills (`tests/libvirt/main.rs`).
const LIBVIRT_POINTS: [&str; 2] = ["before defining a domain", "after defining a domain"];

/// The kinds of change and the fault points that each reaches.
const CHANGE_KINDS: [(&str, &[&[&str]]); 21] = [
    ("merge", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
    ("narrow", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
    ("unenroll", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
    ("whole", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS]),
    ("backend", &[JOURNAL_POINTS, SETTING_POINTS, BACKEND_POINTS]),
    ("unmerge", &[VISIT_POINTS, PAUSE_POINTS]),
    ("collapse", &[VISIT_POINTS, PAUSE_POINTS, COLLAPSE_POINTS]),
    ("staged", &[VISIT_POINTS, PAUSE_POINTS]),
    ("keep", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
    ("recover", &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
    ("policy", &[JOURNAL_POINTS, SETTING_POINTS]),
    ("restore", &[JOURNAL_POINTS, SETTING_POINTS]),
    ("inject", &[VISIT_POINTS]),
    ("placement", &[SHORT_JOURNAL_POINTS, SETTING_POINTS, PLACEMENT_POINTS, VISIT_POINTS]),
    ("spread", &[JOURNAL_POINTS, AFFINITY_POINTS]),
    ("unspread", &[JOURNAL_POINTS, AFFINITY_POINTS]),
    ("measurement", &[SHORT_JOURNAL_POINTS, SETTING_POINTS]),
    ("tune", &[SHORT_JOURNAL_POINTS, SETTING_POINTS, FILE_POINTS]),
    ("untune", &[SHORT_JOURNAL_POINTS, SETTING_POINTS, FILE_REMOVAL_POINTS]),
    ("module", &[SHORT_JOURNAL_POINTS, FILE_POINTS, MODULE_POINTS]),
    (GUIDED_KIND, &[JOURNAL_POINTS, SETTING_POINTS, VISIT_POINTS, PAUSE_POINTS]),
];

/// By far the slowest kind: it is killed at one point a day only.
const GUIDED_KIND: &str = "guided";

const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");

/// The labs' page size.
const PAGE_BYTES: u64 = 4096;

/// The settings before each change, if the kernel has them; they differ from all values that Pagefold writes. If
/// `smart_scan` is 1, a merge sets it to 0 for a while when it misses pages that ksmd skips. If it is 0, no change
/// writes it.
const SETTINGS_BEFORE: [(&str, &str); 6] = [
    ("advisor_mode", "none"),
    ("run", "0"),
    ("pages_to_scan", "123"),
    ("sleep_millisecs", "77"),
    ("use_zero_pages", "0"),
    ("smart_scan", "1"),
];

/// The settings that the kernel has, in the order in which it accepts them.
type KsmSettingValues = Vec<(&'static str, String)>;

fn read_settings(ksm: &KsmTestGuard) -> KsmSettingValues {
    SETTINGS_BEFORE.iter().filter_map(|&(name, _)| Some((name, ksm.read_setting(name)?))).collect()
}

fn write_settings_before(ksm: &KsmTestGuard) {
    for (name, value) in SETTINGS_BEFORE.iter().filter(|(name, _)| ksm.read_setting(name).is_some()) {
        ksm.write_setting(name, value);
    }
}

fn are_settings_as_before(settings: &[(&str, String)]) -> bool {
    settings.iter().all(|(name, value)| SETTINGS_BEFORE.contains(&(name, value.as_str())))
}

/// Run a command with the given processes as `--pid` arguments; an empty list passes none.
fn run_pagefold(state: &Path, command: &str, pids: &[u32], fault: Option<&str>) -> Output {
    let mut pagefold = Command::new(PAGEFOLD_BINARY);
    pagefold.args(command.split(' ')).arg("--json").arg("--state").arg(state);
    pagefold.args(pids.iter().map(|pid| format!("--pid={pid}")));
    pagefold.envs(fault.map(|fault| ("PAGEFOLD_FAULT_POINT", fault)));
    pagefold.output().expect("the binary runs")
}

fn parse_json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"))
}

/// How often a command that was not killed reached each point.
fn reached_points(output: &Output) -> BTreeMap<String, u64> {
    parse_points(&String::from_utf8_lossy(&output.stderr))
}

/// The same, from the text on standard error.
fn parse_points(stderr: &str) -> BTreeMap<String, u64> {
    let times = |line: &str| {
        let (name, times) = line.strip_prefix("fault points at ")?.rsplit_once(": ")?;
        Some((name.to_owned(), times.parse().expect("the count is not a number")))
    };
    stderr.lines().filter_map(times).collect()
}

/// The points that a kind of change reaches.
fn points_of_kind(kind: &str) -> BTreeSet<&'static str> {
    let (_, groups) = CHANGE_KINDS.iter().find(|(name, _)| *name == kind).expect("there is no such kind of change");
    groups.iter().copied().flatten().copied().collect()
}

/// The points at which a kind of change is killed on a given day.
fn points_for_day(kind: &str, day: usize) -> Vec<&'static str> {
    let points = points_of_kind(kind);
    if kind == GUIDED_KIND {
        return points.iter().copied().nth(day % points.len()).into_iter().collect();
    }
    let is_selected = |name: &&str| {
        let kinds = CHANGE_KINDS.iter().map(|(kind, _)| *kind).filter(|kind| *kind != GUIDED_KIND);
        let kinds: Vec<&str> = kinds.filter(|kind| points_of_kind(kind).contains(name)).collect();
        let number: usize = name.bytes().map(usize::from).sum();
        (0..MIN_KINDS_PER_POINT).any(|hit| kinds[(number + day + hit) % kinds.len()] == kind)
    };
    points.into_iter().filter(is_selected).collect()
}

/// Whether each kind is killed at every point.
fn is_soak_run() -> bool {
    std::env::var_os("PAGEFOLD_SOAK").is_some()
}

/// The days since 1970, which select the points; `PAGEFOLD_DAY` overrides them.
fn days_since_1970() -> u64 {
    let day = std::env::var("PAGEFOLD_DAY").ok();
    day.map_or_else(|| UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400, |day| day.parse().expect("a number of days"))
}

/// Kill a kind of change at the points selected for today, or at all points in the soak run. `reached` counts the
/// points of a run without a kill. `kill` returns whether the run reached the point: the progress of ksmd decides how
/// often pagefold writes its pace, so a run may reach a point less often.
fn kill_at_selected_points(kind_name: &str, reached: &BTreeMap<String, u64>, kill: impl Fn(&str) -> bool) {
    let started = Instant::now();
    let names: BTreeSet<&str> = reached.keys().map(String::as_str).collect();
    assert_eq!(names, points_of_kind(kind_name), "{kind_name} reaches other points than CHANGE_KINDS lists");
    let (soak, day) = (is_soak_run(), days_since_1970());
    let (mut tried, mut killed) = (0, 0);
    let selected = if soak { names.into_iter().collect() } else { points_for_day(kind_name, day as usize) };
    for name in selected {
        let reach_count = reached[name];
        let times: Vec<u64> = if soak { (1..=reach_count).collect() } else { vec![1 + day % reach_count] };
        let hit = times.iter().filter(|time| (0..MAX_TRIES_PER_POINT).any(|_| kill(&format!("{time} {name}")))).count();
        assert!(hit > 0 || kill(&format!("1 {name}")), "{kind_name} was not killed at {name:?}");
        (tried, killed) = (tried + times.len(), killed + hit);
    }
    println!("{kind_name}: {killed} of {tried} attempts were killed on day {day}, in {:.1?}", started.elapsed());
    assert!(!soak || killed * 10 >= tried * 9, "only {killed} of {tried} attempts were killed");
}

#[test]
fn every_fault_point_is_reached_by_a_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut in_code = BTreeSet::new();
    let mut folders =
        ["daemon/src", "host/src", "linux/src", "merge/src", "sys/src"].map(|folder| crates.join(folder)).to_vec();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let source = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
                let names = source.split("fault::point(\"").skip(1).filter_map(|rest| rest.split('"').next());
                in_code.extend(names.map(str::to_owned));
            }
        }
    }
    let listed: BTreeSet<String> =
        CHANGE_KINDS.iter().flat_map(|(kind, _)| points_of_kind(kind)).map(str::to_owned).collect();
    let with_libvirt: BTreeSet<String> = listed.iter().cloned().chain(LIBVIRT_POINTS.map(str::to_owned)).collect();
    assert_eq!(in_code, with_libvirt);
    for day in 0..CHANGE_KINDS.len() {
        let selected: BTreeSet<String> =
            CHANGE_KINDS.iter().flat_map(|(kind, _)| points_for_day(kind, day)).map(str::to_owned).collect();
        assert_eq!(selected, listed);
    }
}

/// Whether a command was killed at the given point, and its standard error.
fn was_killed(output: &Output, point: &str) -> (bool, String) {
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    let killed = output.status.code().is_none();
    let (number, name) = point.split_once(' ').expect("a point consists of a number and a name");
    assert_eq!(killed, stderr.contains(&format!("fault point {number}: {name}\n")), "{output:?}");
    (killed, stderr)
}

/// Whether a process is traced or stopped.
fn is_traced_or_stopped(pid: u32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    !status.contains("TracerPid:\t0\n") || status.contains("State:\tT") || status.contains("State:\tt")
}

/// Run `recover` on a state directory and check that it restored the settings and left no process stopped.
fn run_recover(ksm: &KsmTestGuard, state: &Path, pids: &[u32], context: &str) {
    for &pid in pids {
        assert!(!is_traced_or_stopped(pid), "{context}: process {pid} is traced or stopped");
    }
    let recovered = run_pagefold(state, "recover", &[], None);
    assert_eq!(recovered.status.code(), Some(0), "{context}: {recovered:?}");
    let settings = read_settings(ksm);
    assert!(are_settings_as_before(&settings), "{context}: {settings:?}");
}

/// A checksum of some regions of a process.
fn regions_checksum(pid: u32, regions: &[RegionLine]) -> u64 {
    let memory = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut hasher = DefaultHasher::new();
    for region in regions {
        let mut bytes = vec![0; (region.end_address() - region.start) as usize];
        memory.read_exact_at(&mut bytes, region.start).unwrap();
        hasher.write(&bytes);
    }
    hasher.finish()
}
