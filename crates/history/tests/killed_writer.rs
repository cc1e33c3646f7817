//! A writer is killed with SIGKILL repeatedly, at any moment. The database opens, is intact, and has all rows that were
//! reported as committed. The test is a separate program, which starts itself as the writer.

use pagefold_daemon::wire::StatusReport;
use pagefold_history::{HistoryLimits, HistoryReader, HistoryWriter};
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// The environment variable with the writer's file.
const FILE_VARIABLE: &str = "PAGEFOLD_TEST_HISTORY";

/// The environment variable with its size limit in bytes.
const BOUND_VARIABLE: &str = "PAGEFOLD_TEST_BOUND";

/// How many times the writer is killed.
const KILL_ROUNDS: u64 = 40;

/// The time of the first sample, in seconds since 1970; others follow at seconds.
const START_SECONDS: f64 = 1_795_000_000.0;

fn main() {
    if let Some(file) = std::env::var_os(FILE_VARIABLE) {
        commit_until_killed(Path::new(&file));
    }
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let all = kill_writer(&folder.path().join("all.db"), HistoryLimits::default());
    let few = kill_writer(&folder.path().join("few.db"), HistoryLimits { max_bytes: HistoryLimits::MIN_BYTES });
    println!("killed {KILL_ROUNDS} times each: all of {all} commits are there, and the last of {few} under a bound");
}

/// Commit, print the time, and repeat until killed.
fn commit_until_killed(file: &Path) -> ! {
    let text =
        std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json")).expect("the fixture");
    let mut status: StatusReport = serde_json::from_slice(&text).expect("a status");
    let bytes = std::env::var(BOUND_VARIABLE).expect("a bound").parse().expect("a number");
    let mut writer =
        HistoryWriter::open(file, HistoryLimits { max_bytes: bytes }, "host", "0", START_SECONDS).expect("it opens");
    let last = HistoryReader::open(file).expect("it opens").last_sample_time().expect("it is read");
    let mut second = last.map_or(0.0, |last| last - START_SECONDS + 1.0);
    loop {
        status.time = START_SECONDS + second;
        writer.note_status(&status);
        writer.note_footprints(status.time, &status.tracked_processes);
        writer.commit().expect("it is written");
        println!("{second}");
        std::io::stdout().flush().expect("the parent reads");
        second += 1.0;
    }
}

/// Kill a writer of a file repeatedly. Returns the number of its commits.
fn kill_writer(file: &PathBuf, limits: HistoryLimits) -> usize {
    let mut committed = BTreeSet::new();
    for round in 0..KILL_ROUNDS {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .env(FILE_VARIABLE, file)
            .env(BOUND_VARIABLE, limits.max_bytes.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        // In some rounds at once, in others after some commits and a moment.
        if !round.is_multiple_of(4) {
            let some = lines.by_ref().take(1 + (round * 7 % 23) as usize);
            committed.extend(some.map(|line| parse_second(&line.expect("a line"))));
        }
        std::thread::sleep(Duration::from_micros(round * 7919 % 5000));
        child.kill().expect("it is killed");
        committed.extend(lines.map(|line| parse_second(&line.expect("a line"))));
        child.wait().expect("it has ended");
        check_committed_rows(file, &committed, limits);
    }
    assert!(committed.len() > KILL_ROUNDS as usize, "{} commits are too few", committed.len());
    committed.len()
}

fn parse_second(line: &str) -> u64 {
    line.parse::<f64>().expect("a number") as u64
}

fn check_committed_rows(file: &Path, committed: &BTreeSet<u64>, limits: HistoryLimits) {
    if committed.is_empty() && !file.exists() {
        return;
    }
    let connection = rusqlite::Connection::open(file).expect("it opens");
    let integrity: String =
        connection.query_row("PRAGMA integrity_check", [], |row| row.get(0)).expect("it is checked");
    assert_eq!(integrity, "ok");
    drop(connection);
    if committed.is_empty() {
        return;
    }
    let span = HistoryReader::open(file).expect("it opens").load_span(0.0, f64::INFINITY).expect("it is read");
    let seconds: BTreeSet<u64> = span.samples.iter().map(|sample| (sample.time - START_SECONDS) as u64).collect();
    if limits == HistoryLimits::default() {
        assert!(seconds.is_superset(committed), "lost: {:?}", committed.difference(&seconds));
        let footprint_seconds: BTreeSet<u64> =
            span.footprints.iter().map(|one| (one.time - START_SECONDS) as u64).collect();
        assert_eq!(footprint_seconds, seconds, "a commit is complete or absent");
    } else {
        assert!(seconds.contains(committed.last().expect("the last")), "the last is lost");
    }
}
