//! A database at work while its memory is enrolled, merged by ksmd, and withdrawn again and again: its own checks, and
//! sums that its transactions keep, find nothing amiss. `labs/soak.sh` does the same for longer, to a larger one.
//!
//! Needs root, KSM and the shell of SQLite.

#![forbid(unsafe_code)]

use pagefold_labs::ksm::Ksm;
use std::fs;
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LAB: &str = env!("CARGO_BIN_EXE_pagefold-lab");
const CYCLES: u32 = 60;

/// Each row lies in a page of the database of its own, which holds whole pages of memory with zeros in them: these merge,
/// and a transaction that moves something writes to them.
const SCHEMA: &str = "\
PRAGMA page_size = 65536;
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER, moves INTEGER, padding BLOB);
WITH RECURSIVE number(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < 63)
    INSERT INTO account SELECT n, 1000, 0, zeroblob(50000) FROM number;
SELECT 'ready';
";

const CHECK: &str = "\
PRAGMA integrity_check;
SELECT sum(balance), sum(moves), count(*) FROM account;
SELECT count(*) FROM account WHERE padding <> zeroblob(50000);
";

fn merging(pid: u32) -> u64 {
    // Page tables, not `ksm_merging_pages`, which says what ksmd saw last.
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("KSM:")).expect("a kernel from 6.6 on");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") / 4
}

fn advise(pid: u32, what: &str) {
    let output = Command::new(LAB).args(["advise", &pid.to_string(), what]).output().expect("the lab runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !said.contains("missed"), "{what}: {output:?}");
}

#[test]
fn a_database_that_is_enrolled_and_withdrawn_at_work_stays_whole() {
    if Command::new("sqlite3").arg("--version").output().is_err() {
        return println!("skipped: needs sqlite3 (`sudo make setup`)");
    }
    let ksm = match Ksm::take() {
        Ok(ksm) => ksm,
        Err(why) => return println!("skipped: {why}"),
    };
    if fs::metadata("/sys/kernel/mm/ksm/advisor_mode").is_ok() {
        ksm.set("advisor_mode", "none");
    }
    for (name, value) in [("use_zero_pages", 0), ("pages_to_scan", 20_000), ("sleep_millisecs", 0), ("run", 1)] {
        ksm.set(name, value);
    }
    let folder = tempfile::tempdir().unwrap();
    let mut database = Command::new("sqlite3")
        .arg("-bail")
        .arg(folder.path().join("accounts"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = database.id();
    let (mut input, mut output) = (database.stdin.take().unwrap(), database.stdout.take().unwrap());
    input.write_all(SCHEMA.as_bytes()).unwrap();
    // The mode of the journal comes first.
    let mut ready = [0; "memory\nready\n".len()];
    output.read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"memory\nready\n");

    let stop = AtomicBool::new(false);
    let moves = thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut moves = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                let (from, to) = (moves % 64, (moves * 7 + 1) % 64);
                let step =
                    |id, by| format!("UPDATE account SET balance = balance + {by}, moves = moves + 1 WHERE id = {id};");
                writeln!(input, "BEGIN; {} {} COMMIT;", step(from, -1), step(to, 1)).expect("it takes statements");
                moves += 1;
            }
            input.write_all(CHECK.as_bytes()).expect("it takes statements");
            drop(input);
            moves
        });
        let cycles = || {
            for cycle in 0..CYCLES {
                advise(pid, "mergeable");
                let started = Instant::now();
                while merging(pid) == 0 {
                    if started.elapsed() > Duration::from_secs(60) {
                        return Err(format!("cycle {cycle}: nothing merges"));
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                advise(pid, "unmergeable");
                if merging(pid) > 0 {
                    return Err(format!("cycle {cycle}: {} pages are merged still", merging(pid)));
                }
            }
            Ok(())
        };
        let done = std::panic::catch_unwind(cycles);
        stop.store(true, Ordering::Relaxed);
        let moves = worker.join().expect("the database took all");
        done.expect("no cycle failed").unwrap();
        moves
    });
    let mut said = String::new();
    output.read_to_string(&mut said).unwrap();
    assert!(database.wait().unwrap().success(), "{said}");
    assert!(moves > u64::from(CYCLES), "it was at work: {moves}");
    assert_eq!(said, format!("ok\n64000|{}|64\n0\n", 2 * moves));
}
