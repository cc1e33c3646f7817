//! `pagefold report` over synthetic histories, compared with `fixtures/expected/report` (`UPDATE_GOLDEN=1` rewrites
//! it), and over the history that a daemon keeps of a recorded host. Needs no privilege.

use pagefold_daemon::wire::{DecisionReport, PassReport, StatusReport, TrackedProcessReport, TrackingState};
use pagefold_history::{HistoryLimits, HistoryWriter};
use pagefold_labs::process_checks::wait_until;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use tempfile::TempDir;

fn repository_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The status that the tests of all outputs use.
fn fixture_status() -> StatusReport {
    let text = std::fs::read(repository_path("fixtures/status.json")).expect("cannot read fixtures/status.json");
    serde_json::from_slice(&text).expect("fixtures/status.json is not a status")
}

/// 2026-11-20 08:00:00 UTC.
const START_SECONDS: f64 = 1_795_161_600.0;

/// Interval between the arrivals of guests.
const GUEST_INTERVAL_SECONDS: u32 = 1200;

/// Three hours of a host's history. Each new guest shares `mib`, which merges exponentially with the time constant
/// `tau` (seconds). The daemon restarts after two hours.
fn write_history(path: &Path, host: &str, mib: f64, tau: f64) {
    let begin = |time| HistoryWriter::open(path, HistoryLimits::default(), host, "0.1.0", time).expect("no history");
    let mut writer = begin(START_SECONDS);
    let mut synthetic = SyntheticStatus { status: fixture_status(), mib, tau, restarted_at: 0, decision_count: 0 };
    for second in 0..3 * 3600_u32 {
        if second == 7200 {
            writer.commit().expect("cannot write the history");
            writer = begin(START_SECONDS + f64::from(second));
            synthetic.restarted_at = second;
        }
        let since = second % GUEST_INTERVAL_SECONDS;
        if since < 15 || second.is_multiple_of(10) {
            writer.note_status(synthetic.status_at(second));
        }
        if second.is_multiple_of(60) {
            writer.note_footprints(synthetic.status.time, &fixture_status().tracked_processes);
            writer.commit().expect("cannot write the history");
        }
    }
    writer.commit().expect("cannot write the history");
}

struct SyntheticStatus {
    status: StatusReport,
    mib: f64,
    tau: f64,
    restarted_at: u32,
    decision_count: u32,
}

impl SyntheticStatus {
    /// The status at a second. A new guest waits for two seconds, is scanned for one second and merged for eight.
    fn status_at(&mut self, second: u32) -> &StatusReport {
        let (number, elapsed) = (second / GUEST_INTERVAL_SECONDS, f64::from(second % GUEST_INTERVAL_SECONDS));
        let merged = |elapsed: f64| if elapsed < 3.0 { 0.0 } else { 1.0 - (-(elapsed - 3.0) / self.tau).exp() };
        let saved = self.mib * (f64::from(number) + merged(elapsed)) * f64::from(1 << 20);
        let status = &mut self.status;
        status.time = START_SECONDS + f64::from(second);
        status.saved.gross = Some(saved as u64);
        status.saved.net = Some((saved * 0.985) as i64);
        let guests = f64::from(number + 1) * 900.0 * f64::from(1 << 20);
        status.memory.available = Some((30e9 - guests + saved) as u64);
        let cpu_seconds = f64::from(second - self.restarted_at) * 0.002 + f64::from(number) * 6.0;
        if let (Some(ksmd), Some(pagefold)) = (&mut status.cpu.ksmd, &mut status.cpu.pagefold) {
            (ksmd.seconds, pagefold.seconds) = (cpu_seconds + merged(elapsed) * 6.0, cpu_seconds / 3.0);
        }
        let new_guest = TrackedProcessReport {
            state: TrackingState::Arriving,
            start_time: u64::from(number),
            ..status.tracked_processes[0].clone()
        };
        status.tracked_processes = vec![TrackedProcessReport { state: TrackingState::Merged, ..new_guest.clone() }];
        if elapsed < 2.0 {
            status.tracked_processes.push(new_guest);
        }
        let pass_report = |after: f64, measured| PassReport {
            time: START_SECONDS + f64::from(number * GUEST_INTERVAL_SECONDS) + after,
            seconds: after - 2.0,
            cpu_seconds: after / 1.5,
            processes: 1,
            predicted: (self.mib * 1.02 * f64::from(1 << 20)) as u64,
            measured,
        };
        let measured = Some((self.mib * 0.985 * f64::from(1 << 20)) as i64);
        // Each daemon counts its own passes.
        let passes = u64::from(number - self.restarted_at / GUEST_INTERVAL_SECONDS) + u64::from(elapsed >= 3.0);
        status.passes.passes = passes;
        status.passes.last = match elapsed {
            _ if passes == 0 => None,
            elapsed if elapsed < 3.0 => status.passes.last,
            elapsed if elapsed < 11.0 => Some(pass_report(3.0, None)),
            _ => Some(pass_report(11.0, measured)),
        };
        status.decisions.clear();
        if self.decision_count <= number && elapsed >= 2.0 {
            self.decision_count = number + 1;
            status.decisions.push(DecisionReport {
                time_ms: (status.time * 1e3) as u64,
                kind: "census".to_owned(),
                subject: format!("guest-{number}"),
                reason: "arrived".to_owned(),
                explanation: "it came 2 s ago, & <b>nobody</b> knows it".to_owned(),
                predicted: None,
                carried_out: true,
            });
        }
        let decided = u64::from(self.decision_count - self.restarted_at / GUEST_INTERVAL_SECONDS);
        status.decisions_by_reason = [("arrived".to_owned(), decided)].into();
        status
    }
}

/// A directory with the histories of two hosts.
fn write_two_histories() -> TempDir {
    let folder = tempfile::tempdir_in("/dev/shm").expect("cannot create a directory in /dev/shm");
    write_history(&folder.path().join("a.db"), "node-a", 600.0, 1.0);
    write_history(&folder.path().join("b.db"), "node-b", 400.0, 2.5);
    folder
}

fn run_pagefold(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .current_dir(folder)
        .env_remove("COLUMNS")
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn run_successfully(folder: &Path, arguments: &[&str]) -> String {
    let output = run_pagefold(folder, arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn expect_golden(name: &str, actual: &str) {
    let path = repository_path("fixtures/expected/report").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().expect("the path has no parent")).expect("cannot create the directory");
        std::fs::write(&path, actual).expect("cannot write the golden file");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = actual.lines().zip(expected.lines()).find(|(actual, expected)| actual != expected);
    assert!(actual == expected, "{name} differs from the golden file (UPDATE_GOLDEN=1 rewrites it): {differs:#?}");
}

fn assert_matches_schema(report: &Value) {
    let schema = std::fs::read(repository_path("docs/schema/report.json")).expect("cannot read the schema");
    let validator = jsonschema::validator_for(&serde_json::from_slice(&schema).unwrap()).unwrap();
    let schema_errors: Vec<String> = validator.iter_errors(report).map(|error| error.to_string()).collect();
    assert!(schema_errors.is_empty(), "{schema_errors:#?}");
}

#[test]
fn hosts_and_time_spans_are_compared() {
    let folder = write_two_histories();
    let folder = folder.path();
    expect_golden("two.txt", &run_successfully(folder, &["report", "a.db", "b.db", "-o", "two.html"]));
    expect_golden(
        "compare.txt",
        &run_successfully(folder, &["report", "--compare", "a.db", "b.db", "-o", "compare.html"]),
    );
    let spans = ["report", "a.db", "--compare", "2h..1h", "1h..", "-o", "spans.html"];
    expect_golden("spans.txt", &run_successfully(folder, &spans));

    let json = run_successfully(folder, &["report", "a.db", "b.db", "--json"]);
    let mut report: Value = serde_json::from_str(&json).expect("JSON");
    assert_matches_schema(&report);
    let convergence = report["sides"][0]["figures"]["convergence"].clone();
    assert_eq!(convergence["merges"], 9, "{convergence}");
    // By construction: an exponential rise reaches 90 % after 2.3 time constants. The scan before it took one second,
    // and the guests waited two seconds.
    let (to_90, arrival) =
        (convergence["to_90_median"].as_f64().unwrap(), convergence["arrival_to_90_median"].as_f64().unwrap());
    assert!((to_90 - 3.3).abs() < 0.15 && (arrival - to_90 - 2.0).abs() < 0.01, "{convergence}");
    for side in report["sides"].as_array_mut().unwrap() {
        let points = side["points"].as_array_mut().unwrap();
        assert!((900..=1010).contains(&points.len()), "{}", points.len());
        points.retain(|point| point["time"].as_f64().is_some_and(|time| time % 3600.0 < 10.0));
    }
    expect_golden("two.json", &(serde_json::to_string_pretty(&report).unwrap() + "\n"));
}

#[test]
fn page_is_self_contained_and_escapes_markup() {
    let folder = write_two_histories();
    let text = run_successfully(folder.path(), &["report", "a.db", "--since", "90m"]);
    assert!(text.ends_with("\nWritten: pagefold-report.html\n"), "{text}");
    let page = std::fs::read_to_string(folder.path().join("pagefold-report.html")).unwrap();
    for reference in ["http:", "https:", " src=", "@import", "url(", "<script", "<link rel=\"style"] {
        assert!(!page.contains(reference), "the page refers to an external resource: {reference}");
    }
    assert!(page.contains("&amp; &lt;b&gt;nobody&lt;/b&gt;") && !page.contains("<b>nobody"), "unescaped markup");
    assert_eq!(page.matches("<svg class=\"chart\"").count(), 4);
    assert!(page.contains("2026-11-20 09:29:50 to 2026-11-20 10:59:50") && !page.contains("2026-11-20 09:20"));
}

#[test]
fn unusable_histories_are_reported() {
    let folder = tempfile::tempdir().unwrap();
    let expect_failure = |arguments: &[&str], code: i32, why: &str| {
        let output = run_pagefold(folder.path(), arguments);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(code) && stderr.contains(why), "{arguments:?}: {stderr}");
    };
    expect_failure(&["report", "none.db"], 2, "--history FILE");
    std::fs::write(folder.path().join("other"), "text").unwrap();
    expect_failure(&["report", "other"], 2, "is no history of pagefold");
    write_empty_history(&folder.path().join("empty.db"));
    expect_failure(&["report", "empty.db"], 1, "no samples in that span");
    expect_failure(&["report", "empty.db", "--since", "soon"], 2, "2026-11-20");
    expect_failure(&["report", "empty.db", "--since", "1h", "--until", "2h"], 2, "ends before it begins");
    expect_failure(&["report", "--compare", "empty.db", "1h"], 2, "not a span such as");
    assert!(!folder.path().join("pagefold-report.html").exists());
}

fn write_empty_history(path: &Path) {
    HistoryWriter::open(path, HistoryLimits::default(), "node-c", "0.1.0", START_SECONDS).expect("no history");
}

/// A daemon of a recorded host that keeps a history; killed when dropped.
struct RecordingHistoryDaemon<'a> {
    child: Child,
    folder: &'a Path,
}

impl<'a> RecordingHistoryDaemon<'a> {
    fn start(folder: &'a Path) -> Self {
        let config = folder.join("pagefold.toml");
        let section =
            "min_memory = \"4KiB\"\nmin_profit = \"4KiB\"\nmax_cpu_seconds_per_mib = 1000.0\nhistory = \"off\"\n";
        std::fs::write(&config, format!("[daemon]\n{section}")).unwrap();
        let child = Self::pagefold(folder)
            .args(["daemon", "--mode", "advise", "--config"])
            .arg(config)
            .arg("--history")
            .arg(folder.join("kept/history.db"))
            .stderr(Stdio::from(std::fs::File::create(folder.join("log")).unwrap()))
            .spawn()
            .expect("the binary runs");
        Self { child, folder }
    }

    fn pagefold(folder: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        let recording = repository_path("fixtures/recordings/linux-6.18");
        command
            .arg("--host")
            .arg(format!("recording:{}", recording.display()))
            .arg("--state")
            .arg(folder.join("state"));
        command
    }

    fn read_status(&self) -> Option<Value> {
        let output = Self::pagefold(self.folder).args(["status", "--json"]).output().expect("the binary runs");
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    fn read_log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap()
    }
}

impl Drop for RecordingHistoryDaemon<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The report on the history that the daemon keeps in a directory.
fn report_from_folder(folder: &Path) -> Option<Value> {
    let output = run_pagefold(folder, &["report", "kept/history.db", "--json"]);
    let report = output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))?;
    assert_matches_schema(&report);
    Some(report)
}

#[test]
fn history_survives_daemon_exit_and_kill() {
    let folder = tempfile::tempdir().unwrap();
    let mut daemon = RecordingHistoryDaemon::start(folder.path());
    // The daemon writes the first sample at once, and the later samples when it exits.
    wait_until("the first sample", || report_from_folder(folder.path()).is_some());
    wait_until("a census", || {
        daemon.read_status().is_some_and(|status| status["passes"]["passes"].as_u64() >= Some(1))
    });
    // The daemon records the result of its work within about a second, depending on the load.
    std::thread::sleep(Duration::from_secs(4));
    assert!(Command::new("kill").arg(daemon.child.id().to_string()).status().unwrap().success());
    assert!(daemon.child.wait().unwrap().success(), "{}", daemon.read_log());
    let report = report_from_folder(folder.path()).expect("the daemon kept no history");
    let side = &report["sides"][0];
    assert!(side["host"].as_str().is_some_and(|host| host.contains("linux-6.18")), "{}", side["host"]);
    assert!(side["processes"].as_array().is_some_and(|processes| !processes.is_empty()), "{side}");
    assert!(side["passes"].as_array().is_some_and(|passes| !passes.is_empty()), "{side}");
    assert!(side["decisions"].as_array().is_some_and(|decisions| !decisions.is_empty()), "{side}");
    let samples = side["samples"].as_u64().unwrap();
    assert!(samples >= 2, "{samples}");
    drop(daemon);

    // After a kill, the next daemon continues the history.
    let mut daemon = RecordingHistoryDaemon::start(folder.path());
    let report_with_more_samples =
        || report_from_folder(folder.path()).filter(|report| report["sides"][0]["samples"].as_u64() > Some(samples));
    wait_until("more samples of the next daemon", || report_with_more_samples().is_some());
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    assert!(report_with_more_samples().is_some());
    drop(daemon);

    // Without a usable history file, the daemon still works.
    std::fs::write(folder.path().join("kept/history.db"), vec![b'x'; 5000]).unwrap();
    for log in ["kept/history.db-wal", "kept/history.db-shm"] {
        let _ = std::fs::remove_file(folder.path().join(log));
    }
    let daemon = RecordingHistoryDaemon::start(folder.path());
    wait_until("the daemon's answer", || daemon.read_status().is_some());
    let log = daemon.read_log();
    assert!(log.contains("continuing without a history") && log.contains("is no history of pagefold"), "{log}");
}
