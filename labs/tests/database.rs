//! Databases under load while their memory is repeatedly enrolled, merged by ksmd, and unenrolled. Their own checks,
//! and sums that their transactions preserve, must find no error. One database is a library in a shell. The other is a
//! server of several processes under load, some of which end during the test.
//!
//! `PAGEFOLD_SOAK_CYCLES=N` runs N cycles on the server, as `labs/soak.sh` does. Needs root, KSM, and the shell of
//! SQLite or PostgreSQL.

#![forbid(unsafe_code)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_host::action::MissedReason;
use pagefold_labs::ksm::KsmTestGuard;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

const LAB: &str = env!("CARGO_BIN_EXE_pagefold-lab");
const SQLITE_CYCLES: u32 = 60;

/// Each row has its own page of the database, which contains whole memory pages of zeros. These merge, and each
/// transaction that moves money writes to them.
const SQLITE_SETUP: &str = "\
PRAGMA page_size = 65536;
PRAGMA journal_mode = MEMORY;
PRAGMA synchronous = OFF;
CREATE TABLE account(id INTEGER PRIMARY KEY, balance INTEGER, moves INTEGER, padding BLOB);
WITH RECURSIVE number(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < 63)
    INSERT INTO account SELECT n, 1000, 0, zeroblob(50000) FROM number;
SELECT 'ready';
";

const SQLITE_CHECK: &str = "\
PRAGMA integrity_check;
SELECT sum(balance), sum(moves), count(*) FROM account;
SELECT count(*) FROM account WHERE padding <> zeroblob(50000);
";

fn count_merged_pages(pid: u32) -> u64 {
    // From page tables, not from `ksm_merging_pages`, which has the state of ksmd's last visit.
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let line = text.lines().find_map(|line| line.strip_prefix("KSM:")).expect("a kernel from 6.6 on");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") / 4
}

fn advise(pid: u32, advice: &str) {
    let output = Command::new(LAB).args(["advise", &pid.to_string(), advice]).output().expect("the lab runs");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && !stdout.contains("missed"), "{advice}: {output:?}");
}

/// KSM, with ksmd merging without a pause. `None` if the test is skipped; the reason is printed.
fn start_merging_without_pause() -> Option<KsmTestGuard> {
    let ksm = KsmTestGuard::acquire().inspect_err(|why| println!("skipped: {why}")).ok()?;
    for (name, value) in [("use_zero_pages", 0), ("pages_to_scan", 20_000), ("sleep_millisecs", 0), ("run", 1)] {
        ksm.write_setting(name, value);
    }
    Some(ksm)
}

#[test]
fn sqlite_survives_enroll_unenroll_cycles() {
    if Command::new("sqlite3").arg("--version").output().is_err() {
        return println!("skipped: needs sqlite3 (`sudo make setup`)");
    }
    let Some(_ksm) = start_merging_without_pause() else { return };
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
    input.write_all(SQLITE_SETUP.as_bytes()).unwrap();
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
            input.write_all(SQLITE_CHECK.as_bytes()).expect("it takes statements");
            drop(input);
            moves
        });
        let cycles = || {
            for cycle in 0..SQLITE_CYCLES {
                advise(pid, "mergeable");
                let started = Instant::now();
                while count_merged_pages(pid) == 0 {
                    if started.elapsed() > Duration::from_secs(60) {
                        return Err(format!("cycle {cycle}: nothing merges"));
                    }
                    thread::sleep(Duration::from_millis(1));
                }
                advise(pid, "unmergeable");
                if count_merged_pages(pid) > 0 {
                    return Err(format!("cycle {cycle}: {} pages are still merged", count_merged_pages(pid)));
                }
            }
            Ok(())
        };
        let done = std::panic::catch_unwind(cycles);
        stop.store(true, Ordering::Relaxed);
        let moves = worker.join().expect("the database executed all statements");
        done.expect("no cycle failed").unwrap();
        moves
    });
    let mut printed = String::new();
    output.read_to_string(&mut printed).unwrap();
    assert!(database.wait().unwrap().success(), "{printed}");
    assert!(moves > u64::from(SQLITE_CYCLES), "the database was busy: {moves}");
    assert_eq!(printed, format!("ok\n64000|{}|64\n0\n", 2 * moves));
}

/// The user of the server, which refuses root: `nobody`.
const NOBODY_UID: u32 = 65534;

/// Cycles of one visit to a server process, and the default total number of cycles.
const CYCLES_PER_VISIT: u64 = 5;
const DEFAULT_POSTGRES_CYCLES: u64 = 50;

/// A PostgreSQL server with its own database. If it is dropped while it runs, it is stopped at once.
struct Postgres {
    program_directory: PathBuf,
    folder: tempfile::TempDir,
    server: Child,
}

impl Postgres {
    /// The programs of the newest version that Debian has installed.
    fn find_program_directory() -> Option<PathBuf> {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?.flatten().map(|version| version.path().join("bin"));
        let number = |path: &PathBuf| path.parent()?.file_name()?.to_str()?.parse::<u32>().ok();
        versions.filter(|path| path.join("pg_amcheck").exists()).max_by_key(number)
    }

    fn start(programs: PathBuf) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        chown(folder.path(), Some(NOBODY_UID), Some(NOBODY_UID)).expect("permission");
        let command = |program| Self::command(&programs, &folder, program);
        run_checked(command("initdb").args(["--data-checksums", "--auth=trust", "--no-sync", "--username=postgres"]));
        let log = File::create(folder.path().join("log")).expect("a file");
        let socket = format!("unix_socket_directories={}", folder.path().display());
        let server = command("postgres")
            .args(["-c", &socket, "-c", "listen_addresses=", "-c", "shared_buffers=32MB"])
            .stderr(log)
            .spawn()
            .expect("it starts");
        let postgres = Self { program_directory: programs, folder, server };
        let started = Instant::now();
        while !postgres.read_log().contains("ready to accept connections") {
            assert!(started.elapsed() < Duration::from_secs(60), "{}", postgres.read_log());
            thread::sleep(Duration::from_millis(10));
        }
        postgres
    }

    fn command(programs: &std::path::Path, folder: &tempfile::TempDir, program: &str) -> Command {
        let mut command = Command::new(programs.join(program));
        command.uid(NOBODY_UID).gid(NOBODY_UID).current_dir(folder.path()).stdin(Stdio::null());
        command.env("PGDATA", folder.path().join("data")).env("PGHOST", folder.path());
        command.env("PGUSER", "postgres").env("PGDATABASE", "postgres");
        command
    }

    fn command_of(&self, program: &str) -> Command {
        Self::command(&self.program_directory, &self.folder, program)
    }

    fn read_log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).expect("its log")
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.server.id().cast_signed()), signal).expect("it is waited for later");
    }

    /// Its processes except the first.
    fn backend_pids(&self) -> Vec<u32> {
        let pid = self.server.id();
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("it runs");
        children.split_whitespace().map(|pid| pid.parse().expect("a number")).collect()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if let Ok(None) = self.server.try_wait() {
            self.signal(Signal::SIGQUIT);
            let _ = self.server.wait();
        }
    }
}

/// The output of a program that must succeed.
fn run_checked(command: &mut Command) -> String {
    let output = command.output().expect("it starts");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8(output.stdout).expect("text")
}

/// COW breaks of merged pages since boot, by writes or by unenrolling.
fn count_cow_ksm() -> u64 {
    let vmstat = fs::read_to_string("/proc/vmstat").expect("vmstat");
    let copies = vmstat.lines().find_map(|line| line.strip_prefix("cow_ksm "));
    copies.expect("a kernel from 5.19 on").parse().expect("a number")
}

/// Enroll and unenroll a server process several times; fewer times if it ends meanwhile.
fn enroll_and_unenroll(pid: u32) -> bool {
    // The start time of the process while it runs: it may have ended and not be reaped yet.
    let start = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_ascii_whitespace().collect();
        (!["Z", "X"].contains(&fields[0])).then(|| fields[19].to_owned())
    };
    let before = start();
    let output = Command::new(LAB)
        .args(["advise", &pid.to_string(), "mergeable", "--cycles", &CYCLES_PER_VISIT.to_string(), "--pause", "8"])
        .output()
        .expect("the lab runs");
    if output.status.success() {
        let stdout = String::from_utf8_lossy(&output.stdout);
        // Memory is mapped and unmapped while a query runs.
        let unmapped = MissedReason::NotMapped.to_string();
        let refused = stdout.lines().find(|line| line.starts_with("missed ") && !line.contains(&unmapped));
        assert_eq!(refused, None, "process {pid}");
        return true;
    }
    // An ending process frees its memory first, which may take time.
    let began = Instant::now();
    while start().is_some_and(|start| Some(start) == before) {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(began.elapsed() < Duration::from_secs(60), "process {pid}: {stderr}");
        thread::sleep(Duration::from_millis(5));
    }
    false
}

#[test]
fn a_server_survives_enroll_unenroll_cycles() {
    let Some(programs) = Postgres::find_program_directory() else {
        return println!("skipped: needs PostgreSQL, from 14 on (`sudo make setup`)");
    };
    let Some(_ksm) = start_merging_without_pause() else { return };
    let wanted =
        std::env::var("PAGEFOLD_SOAK_CYCLES").map_or(DEFAULT_POSTGRES_CYCLES, |text| text.parse().expect("a number"));
    let mut postgres = Postgres::start(programs);
    run_checked(postgres.command_of("pgbench").args(["--initialize", "--scale=3", "--quiet"]));
    let copies_before = count_cow_ksm();
    let (mut cycles, mut ended, mut transactions) = (0, 0, 0);
    while cycles < wanted {
        // Without its vacuum, which deletes the history that the balances are compared with.
        let mut load = postgres.command_of("pgbench");
        let mut load = load
            .args(["--no-vacuum", "-c", "4", "-j", "2", "-T", "3"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("pgbench starts");
        while cycles < wanted && load.try_wait().expect("its status").is_none() {
            for pid in postgres.backend_pids() {
                if cycles >= wanted {
                    break;
                }
                if enroll_and_unenroll(pid) {
                    cycles += CYCLES_PER_VISIT;
                } else {
                    ended += 1;
                }
            }
        }
        let output = load.wait_with_output().expect("its output");
        assert!(output.status.success(), "{output:?}\n{}", postgres.read_log());
        let text = String::from_utf8_lossy(&output.stdout);
        let done = text.lines().find_map(|line| line.strip_prefix("number of transactions actually processed: "));
        transactions += done.expect("a count").parse::<u64>().expect("a number");
    }
    let copied = count_cow_ksm() - copies_before;
    println!("{cycles} cycles, {transactions} transactions, {ended} processes that ended meanwhile, {copied} copies");
    assert!(transactions > 0 && copied > 0, "the database was idle, or no page was merged");

    // The sums of pgbench's bookkeeping, each index against its table, and every page's checksum.
    let balanced = "select (select sum(abalance) from pgbench_accounts) = (select sum(delta) from pgbench_history) \
                    and (select sum(tbalance) from pgbench_tellers) = (select sum(bbalance) from pgbench_branches) \
                    and (select sum(tbalance) from pgbench_tellers) = (select sum(delta) from pgbench_history)";
    assert_eq!(run_checked(postgres.command_of("psql").args(["-X", "-q", "-t", "-A", "-c", balanced])), "t\n");
    run_checked(postgres.command_of("pg_amcheck").args(["--install-missing", "--heapallindexed", "postgres"]));
    postgres.signal(Signal::SIGINT);
    let status = postgres.server.wait().expect("its exit");
    let log = postgres.read_log();
    let bad = ["PANIC", "FATAL", "terminated by signal"];
    assert!(status.success() && !bad.iter().any(|bad| log.contains(bad)), "{status}: {log}");
    let checked = run_checked(postgres.command_of("pg_checksums").arg("--check"));
    assert!(checked.lines().any(|line| line.split_whitespace().eq(["Bad", "checksums:", "0"])), "{checked}");
}
