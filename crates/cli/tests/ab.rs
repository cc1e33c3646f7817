//! Experiments with real commands: a campaign killed at random points of its code, or at random moments of its runs, has the
//! result of an undisturbed one; its setting is restored, and no command stays stopped.

#![cfg(feature = "fault-points")]

use pagefold_base::splitmix::splitmix64;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

/// A workload whose only sample follows from the block, the run and the arm.
const WORKLOAD: &str = "case $PAGEFOLD_AB_ARM in A) x=1000;; B) x=900;; esac; \
                        echo rate $((x + PAGEFOLD_AB_BLOCK % 7 + PAGEFOLD_AB_RUN % 3))";

/// A setting of this host that disturbs nothing: the interval at which statistics of memory are summed up, in seconds.
const SETTING: &str = "/proc/sys/vm/stat_interval";

/// Another one, which is a weight of 100 by default.
const OTHER_SETTING: &str = "/proc/sys/vm/vfs_cache_pressure";

/// Held while a test changes settings of this host.
static SETTINGS_LOCK: Mutex<()> = Mutex::new(());

/// The blocks of A against B; the schedule has four times as many.
const BLOCKS: &str = "20";

/// How often a campaign is killed at a point of its code.
const KILLS: u64 = 10;

fn pagefold(state: &Path, arguments: &[&str], fault: Option<&str>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.args(["--state".as_ref(), state.as_os_str()]).args(arguments);
    if let Some(fault) = fault {
        command.env("PAGEFOLD_FAULT_POINT", fault);
    }
    command.output().unwrap()
}

fn campaign<'a>(directory: &'a str, setting: &'a [&'a str]) -> Vec<&'a str> {
    let mut arguments = vec!["ab", "--blocks", BLOCKS, "--warm-up", "0", "--dir", directory];
    arguments.extend(setting);
    arguments.extend(["--metric", "rate=regex:rate ([0-9]+)", "--higher-is-better", "rate"]);
    arguments.extend(["--", "sh", "-c", WORKLOAD]);
    arguments
}

fn result(directory: &Path) -> String {
    fs::read_to_string(directory.join("result.json")).unwrap()
}

#[test]
fn campaign_killed_ten_times_has_the_result_of_an_undisturbed_one() {
    let _lock = SETTINGS_LOCK.lock().unwrap();
    let before = fs::read_to_string(SETTING).unwrap();
    let can_write = fs::write(SETTING, &before).is_ok();
    if !can_write {
        return println!("skipped: {SETTING} cannot be written; run as root");
    }
    let other = if before.trim() == "7" { "8" } else { "7" };
    let assignment = format!("vm.stat_interval={other}");
    let setting = ["--b", &*assignment];
    let (state, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();

    let plain = path("plain");
    let counted = pagefold(state.path(), &campaign(&plain, &setting), Some("count"));
    assert_eq!(counted.status.code(), Some(0), "{counted:?}");
    let expected = result(Path::new(&plain));
    let report: Value = serde_json::from_str(&expected).unwrap();
    assert_eq!((&report["complete"], &report["metrics"][0]["verdict"]), (&true.into(), &"worse".into()));
    assert_eq!(report["samples"].as_array().unwrap().len(), 4 * 20 * 4);
    let stderr = String::from_utf8_lossy(&counted.stderr).into_owned();
    let points = stderr.lines().find_map(|line| line.strip_prefix("fault points: ")).unwrap();
    let points: u64 = points.parse().unwrap();

    // Each kill comes somewhere within the rest of the campaign, of which a tenth or so is done each time.
    let killed = path("killed");
    for kill in 0..KILLS {
        let point = (1 + splitmix64(kill) % (points / KILLS)).to_string();
        let resume = ["ab", "resume", &killed];
        let start = campaign(&killed, &setting);
        let has_begun = fs::metadata(directory.path().join("killed/campaign.jsonl")).is_ok_and(|file| file.len() > 0);
        let output = pagefold(state.path(), if has_begun { &resume } else { &start }, Some(&point));
        assert_eq!(output.status.code(), None, "the campaign ended before kill {kill}: {output:?}");
    }
    // As if a kill had cut off a line.
    let record = directory.path().join("killed/campaign.jsonl");
    let mut text = fs::read(&record).unwrap();
    text.extend_from_slice(b"{\"event\":\"run\",\"blo");
    fs::write(&record, text).unwrap();
    let resumed = pagefold(state.path(), &["ab", "resume", &killed], None);
    assert_eq!(resumed.status.code(), Some(0), "{resumed:?}");
    assert!(result(Path::new(&killed)) == expected, "the results differ");
    assert_eq!(fs::read_to_string(SETTING).unwrap(), before, "the setting is restored");
    for file in ["samples.csv", "report.html", "report.json"] {
        assert!(fs::metadata(Path::new(&killed).join(file)).is_ok_and(|file| file.len() > 0), "{file}");
    }
}

/// Runs of 0.3 s. A slowed run is stopped for as long, so that many of the kills meet a stop.
const TIMED_EXPERIMENT: &str = r#"
blocks = 3
pairs_per_block = 1
warm_up_runs = 0
injected_percents = [100]
workload = [["sh", "-c", "sleep 0.3; echo rate $((1000 + PAGEFOLD_AB_BLOCK % 7 + PAGEFOLD_AB_RUN % 3))"]]
[b.environment]
X = "1"
[[metric]]
name = "rate"
source = "pattern"
pattern = "rate ([0-9]+)"
"#;

/// How often a campaign is killed by a timer.
const TIMED_KILLS: u64 = 8;

/// The longest time before a kill by a timer. The campaign begins with two seconds of observation.
const LONGEST_TIME_BEFORE_KILL: Duration = Duration::from_millis(1500);

/// The fields of `/proc/PID/stat` after the name (proc_pid_stat(5)): state, parent, group, session. `None` if the process
/// has ended.
fn read_stat(pid: u64) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<String> = stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect();
    (!matches!(&*fields[0], "Z" | "X")).then_some(fields)
}

/// The processes that a record names, in order, with their start times.
fn read_spawned(campaign: &Path) -> Vec<(u64, u64)> {
    let text = fs::read_to_string(campaign.join("campaign.jsonl")).unwrap_or_default();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let processes = rows.filter(|row| row["event"] == "spawned").flat_map(|row| row["processes"].as_array().cloned());
    let number = |process: &Value, field: &str| process[field].as_u64().unwrap();
    processes.flatten().map(|process| (number(&process, "pid"), number(&process, "start_time"))).collect()
}

/// Whether a process of a record is there, and its state. The start time is the 22nd field, the 20th after the name.
fn state_of_spawned((pid, start_time): (u64, u64)) -> Option<String> {
    let fields = read_stat(pid)?;
    (fields[19] == start_time.to_string()).then(|| fields[0].clone())
}

/// Starts or resumes the timed campaign.
fn spawn_timed(state: &Path, file: &Path, campaign: &Path) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("--state").arg(state).stdout(Stdio::null()).stderr(Stdio::null()).arg("ab");
    if fs::metadata(campaign.join("campaign.jsonl")).is_ok_and(|file| file.len() > 0) {
        command.arg("resume").arg(campaign);
    } else {
        command.args(["run", "--dir"]).arg(campaign).arg(file);
    }
    command.spawn().unwrap()
}

/// Kills the campaign when one of its commands is stopped by the injection. Returns the command.
fn kill_in_a_stop(mut pagefold: Child, campaign: &Path) -> (u64, u64) {
    loop {
        assert_eq!(pagefold.try_wait().unwrap(), None, "the campaign ended before it stopped a command");
        let last = read_spawned(campaign).pop();
        if let Some(process) = last.filter(|&process| state_of_spawned(process).as_deref() == Some("T")) {
            pagefold.kill().and_then(|()| pagefold.wait()).unwrap();
            return process;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Once pagefold has gone, the kernel continues a stopped group unless its new parent is in the session of the group.
fn check_that_it_is_continued(process: (u64, u64)) {
    let session = |pid: u64| read_stat(pid).map(|fields| fields[3].clone());
    let deadline = Instant::now() + Duration::from_secs(20);
    while state_of_spawned(process).as_deref() == Some("T") {
        let parent = read_stat(process.0).and_then(|fields| fields[1].parse().ok()).and_then(session);
        if parent.is_some() && parent == session(process.0) {
            return println!("the new parent is in the session of the command, so that only the resumption ends it");
        }
        assert!(Instant::now() < deadline, "{process:?} stays stopped");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn campaign_killed_at_random_moments_resumes_and_leaves_no_command() {
    let (state, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = directory.path().join("experiment.toml");
    fs::write(&file, TIMED_EXPERIMENT).unwrap();
    let (plain, killed) = (directory.path().join("plain"), directory.path().join("killed"));
    let plain_status = spawn_timed(state.path(), &file, &plain).wait().unwrap();
    assert!(matches!(plain_status.code(), Some(0 | 1)), "{plain_status}");

    let seed = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    println!("seed {seed}");
    for kill in 0..TIMED_KILLS {
        let mut pagefold = spawn_timed(state.path(), &file, &killed);
        let share = splitmix64(seed.wrapping_add(kill)) as f64 / u64::MAX as f64;
        thread::sleep(LONGEST_TIME_BEFORE_KILL.mul_f64(share));
        pagefold.kill().and_then(|()| pagefold.wait()).unwrap();
        if let Some(last) = read_spawned(&killed).pop() {
            check_that_it_is_continued(last);
        }
    }
    let stopped = kill_in_a_stop(spawn_timed(state.path(), &file, &killed), &killed);
    check_that_it_is_continued(stopped);
    let status = spawn_timed(state.path(), &file, &killed).wait().unwrap();
    assert_eq!(status, plain_status);
    assert!(result(&killed) == result(&plain), "the results differ");
    for process in read_spawned(&killed) {
        assert_eq!(state_of_spawned(process), None, "{process:?} is left");
    }
}

/// The workload makes one setting read-only, writes the other one, and stops the campaign. The mount ends with the
/// campaign's namespace, so that `recover` succeeds.
#[test]
fn stopped_campaign_prints_json_with_what_is_not_restored() {
    let _lock = SETTINGS_LOCK.lock().unwrap();
    let read = |path: &str| fs::read_to_string(path).unwrap().trim().to_owned();
    let (before, other_before) = (read(SETTING), read(OTHER_SETTING));
    let can_write = fs::write(SETTING, &before).is_ok() && fs::write(OTHER_SETTING, &other_before).is_ok();
    let can_unshare = Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if !can_write || !can_unshare {
        return println!("skipped: needs settings that can be written, and unshare --mount; run as root");
    }
    let (state, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let campaign = directory.path().join("campaign");
    let mut command = Command::new("unshare");
    command.args(["--mount", env!("CARGO_BIN_EXE_pagefold"), "--state"]).arg(state.path()).args(["ab", "--json"]);
    for (arm, value, other) in [("--a", 11, 101), ("--b", 12, 102)] {
        let assignments = [format!("vm.stat_interval={value}"), format!("vm.vfs_cache_pressure={other}")];
        command.args([arm, &assignments[0], arm, &assignments[1]]);
    }
    let workload = format!(
        "mount --bind {OTHER_SETTING} {OTHER_SETTING} && mount -o remount,bind,ro {OTHER_SETTING} && \
         echo 13 > {SETTING} && kill -TERM $PPID && sleep 60"
    );
    let output = command.arg("--dir").arg(&campaign).args(["--", "sh", "-c", &workload]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("pagefold ab resume") && !stderr.contains("An earlier pagefold"), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["result"]["complete"], false);
    let [failed] = &report["failed_undos"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!(failed["previous_state"], format!("{OTHER_SETTING} was {other_before}"));
    assert!(failed["will_retry"] == true && failed["why"].as_str().unwrap().contains("Read-only"), "{failed}");
    assert_eq!(failed["remedy"], format!("run `pagefold recover --state {}`", state.path().display()));
    let [overwritten] = &report["overwritten_changes"].as_array().unwrap()[..] else { panic!("{report}") };
    assert_eq!(overwritten["previous_state"], format!("{SETTING} was {before}"));
    assert_eq!(read(SETTING), "13", "the value of another program stays");
    fs::write(SETTING, &before).unwrap();

    let recovered = pagefold(state.path(), &["recover"], None);
    assert_eq!(recovered.status.code(), Some(0), "{recovered:?}");
    assert_eq!(read(OTHER_SETTING), other_before);
}

#[test]
fn unmoved_counter_says_not_applied_and_a_campaign_is_not_overwritten() {
    let (state, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let counter = directory.path().join("counter");
    fs::write(&counter, "5\n").unwrap();
    let (counter, campaign) = (counter.to_str().unwrap(), directory.path().join("campaign"));
    let output = pagefold(
        state.path(),
        &[
            "ab",
            "--blocks",
            "4",
            "--warm-up",
            "0",
            "--env-b",
            "X=1",
            "--dir",
            campaign.to_str().unwrap(),
            "--proof",
            counter,
            "--json",
            "--",
            "true",
        ],
        None,
    );
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["result"]["metrics"][0]["verdict"], "not_applied");
    assert_eq!(report["result"]["counter"]["has_moved"], false);
    let again =
        pagefold(state.path(), &["ab", "--env-b", "X=1", "--dir", campaign.to_str().unwrap(), "--", "true"], None);
    assert_eq!(again.status.code(), Some(2), "a campaign is not overwritten: {again:?}");
}

/// Each restart, which is a line in a file, makes the runs that follow slower or faster; so does each run.
const STUDY_WORKLOAD: &str = "r=$(wc -l < RESTARTS); n=$PAGEFOLD_AB_RUN; \
                              echo time $((1000 + r * 37 % 100 + (r * 7 + n * 13) % 10 + (n == 0) * 400))";

#[test]
fn study_separates_restarts_from_runs_and_finds_the_warm_up() {
    let (state, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let restarts = directory.path().join("restarts");
    let study = directory.path().join("study").to_str().unwrap().to_owned();
    let workload = STUDY_WORKLOAD.replace("RESTARTS", restarts.to_str().unwrap());
    let restart = format!("echo >> {}", restarts.display());
    let metric = "time=regex:time ([0-9]+)";
    let arguments =
        ["ab", "study", "--blocks", "6", "--restart", &restart, "--metric", metric, "--json", "--dir", &study];
    let arguments: Vec<&str> = arguments.iter().copied().chain(["--", "sh", "-c", &workload]).collect();
    let output = pagefold(state.path(), &arguments, None);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(fs::read_to_string(&restarts).unwrap().lines().count(), 6, "one restart a block");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["blocks"], &report["runs"]), (&6.into(), &36.into()));
    let metric = &report["metrics"][0];
    assert_eq!(metric["warm_up_runs"], 1, "{report}");
    // The values after r restarts are 1000 + r * 37 % 100, which is 1037, 1074, 1011, 1048, 1085 and 1022, and each run
    // adds 0 to 9.
    let between_restarts = metric["between_blocks_percent"].as_f64().unwrap();
    let between_runs = metric["between_runs_percent"].as_f64().unwrap();
    assert!((2.4..3.0).contains(&between_restarts) && (0.2..0.5).contains(&between_runs), "{report}");
    let plans = metric["plans"].as_array().unwrap();
    assert_eq!(plans.iter().map(|plan| &plan["restarts_each_run"]).collect::<Vec<_>>(), [false, true]);
    let blocks = |plan: &Value| plan["effects"][2]["blocks"].as_u64().unwrap();
    assert!(blocks(&plans[1]) > 5 * blocks(&plans[0]), "{report}");
    let shown = pagefold(state.path(), &["ab", "report", &study], None);
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.status.success() && text.contains("needs a restart") && text.contains("--warm-up 1"), "{text}");
}
