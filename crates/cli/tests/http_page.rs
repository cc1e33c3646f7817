//! The views of a daemon: its HTTP pages and `pagefold top`. The daemon observes a recorded host, so no privilege is
//! needed.

use pagefold_daemon::wire::{DaemonModeName, DaemonStateName, StatusReport, group_footprints};
use pagefold_doctor::wire::VerdictName;
use pagefold_history::points::{HistoryPoint, HistoryResponse};
use pagefold_history::{HistoryLimits, HistoryWriter};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

/// Timeout for all waits, far above the usual durations.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A daemon that is killed when this is dropped.
struct WatchedDaemon {
    child: Child,
    log: BufReader<ChildStderr>,
    state: TempDir,
}

fn pagefold_command(state: &Path, arguments: &[&str]) -> Command {
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("--host").arg(format!("recording:{}", recording.display())).arg("--state").arg(state).args(arguments);
    command
}

impl WatchedDaemon {
    /// Start a daemon with a configuration.
    fn start(section: &str, arguments: &[&str]) -> Self {
        let state = tempfile::tempdir().unwrap();
        let config = state.path().join("pagefold.toml");
        std::fs::write(&config, format!("[daemon]\nmin_memory = \"4KiB\"\n{section}\n")).unwrap();
        let mut command = pagefold_command(state.path(), &["daemon", "--mode", "observe", "--config"]);
        let mut child = command.arg(config).args(arguments).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let log = BufReader::new(child.stderr.take().unwrap());
        Self { child, log, state }
    }

    /// The rest of the next log line that contains `text`, after `text`.
    fn wait_for_log_line(&mut self, text: &str) -> String {
        for line in self.log.by_ref().lines() {
            if let Some((_, rest)) = line.unwrap().split_once(text) {
                return rest.to_owned();
            }
        }
        panic!("the daemon exited without logging {text:?}");
    }

    /// The address of the daemon's HTTP server.
    fn wait_for_http_address(&mut self) -> String {
        let rest = self.wait_for_log_line("shown at http://");
        rest.split_once('/').expect("the log line has no address").0.to_owned()
    }
}

impl Drop for WatchedDaemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn http_get(address: &str, host: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("cannot connect to the daemon");
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("the HTTP response has no header");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

/// Repeat the request until the daemon has a status.
fn wait_for_status(address: &str) -> StatusReport {
    let end = Instant::now() + TEST_TIMEOUT;
    loop {
        let (first, body) = http_get(address, "localhost", "/api/status");
        if first.contains(" 200 ") {
            return serde_json::from_str(&body).expect("the response is not a status");
        }
        assert!(first.contains(" 503 ") && Instant::now() < end, "{first}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn daemon_is_shown_over_http() {
    // The command line takes precedence over the configuration.
    let section = "http = \"192.0.2.1:1\"\nhttp_names = [\"node17\"]";
    let mut daemon = WatchedDaemon::start(section, &["--http", "127.0.0.1:0"]);
    let address = daemon.wait_for_http_address();
    let status = wait_for_status(&address);
    assert_eq!((status.mode, status.pid), (DaemonModeName::Observe, daemon.child.id()));
    assert!(status.host.contains("linux-6.18") && status.ksm.is_some(), "{status:?}");
    // The status lists warnings and failures, and counts the checks that passed.
    let listed = |verdict| status.findings.iter().filter(|finding| finding.verdict == verdict).count() as u64;
    for (&verdict, &count) in &status.findings_by_verdict {
        let is_listed = [VerdictName::Warn, VerdictName::Fail].contains(&verdict);
        assert_eq!(listed(verdict), if is_listed { count } else { 0 }, "{verdict:?}");
    }
    assert!(status.findings_by_verdict[&VerdictName::Ok] > 0 && status.findings_by_verdict.len() == 5);
    assert_eq!(
        (&status.workloads, status.tracked_processes_omitted),
        (&group_footprints::sum_by_workload(&status.tracked_processes), 0)
    );
    assert_eq!(status.cgroups, group_footprints::sum_by_cgroup(&status.tracked_processes));
    assert!(http_get(&address, "node17", "/metrics").1.contains("\npagefold_mode{mode=\"observe\"} 1\n"));
    assert!(http_get(&address, "node18", "/metrics").0.contains(" 421 "));
    assert!(http_get(&address, "localhost", "/").1.starts_with("<!doctype html>"));
    // A client that follows the events soon gets another status.
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    stream.write_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let events =
        BufReader::new(stream).lines().filter(|line| line.as_ref().is_ok_and(|line| line.starts_with("data: ")));
    assert_eq!(events.take(2).count(), 2);

    assert!(Command::new("kill").arg(daemon.child.id().to_string()).status().unwrap().success());
    assert!(daemon.child.wait().unwrap().success());
    TcpStream::connect(&address).expect_err("the daemon still listens after its exit");
}

/// The next daemon shows the history that an earlier one kept, and a gap between the two.
#[test]
fn earlier_history_is_shown_with_a_gap() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.db");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json");
    let mut status: StatusReport = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    // One old run that is outside the period shown, and one run of five minutes.
    for (from, seconds) in [(now - 200_000.0, 100), (now - 4000.0, 300)] {
        let mut writer =
            HistoryWriter::open(&path, HistoryLimits::default(), "node17", "0.1.0", from).expect("no history");
        for second in (0..seconds).step_by(10) {
            status.time = from + f64::from(second);
            status.cpu.ksmd.as_mut().unwrap().seconds = f64::from(second) * 0.05;
            writer.note_status(&status);
        }
        writer.commit().unwrap();
    }
    let mut daemon = WatchedDaemon::start("", &["--http", "127.0.0.1:0", "--history", path.to_str().unwrap()]);
    let address = daemon.wait_for_http_address();
    wait_for_status(&address);
    let (_, body) = http_get(&address, "localhost", "/api/history");
    let points = serde_json::from_str::<HistoryResponse>(&body).expect("the response is not a history").points;
    let (before, after): (Vec<&HistoryPoint>, Vec<&HistoryPoint>) = points.iter().partition(|point| point.time < now);
    assert!(before.len() == 31 && !after.is_empty(), "{points:#?}");
    assert!(before[..30].iter().all(|point| point.saved_net == status.saved.net));
    assert!(before[1..30].iter().all(|point| point.ksmd_percent.is_some_and(|percent| (percent - 5.0).abs() < 0.1)));
    assert!(before[30].saved_net.is_none() && before[30].available.is_none(), "no gap in the history");
}

#[test]
fn http_address_must_be_valid_and_free() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let mut daemon = WatchedDaemon::start(&format!("http = \"{address}\""), &[]);
    assert!(daemon.wait_for_log_line("cannot listen at ").starts_with(&address));
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
    let mut daemon = WatchedDaemon::start("http = \"9750\"", &[]);
    assert!(daemon.wait_for_log_line("expected an address").contains("127.0.0.1:9750"));
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
}

/// Other users can open the socket if its mode is changed, but the daemon still rejects their requests.
#[test]
fn other_users_are_refused_by_the_control_socket() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: needs root to become another user");
    }
    let mut daemon = WatchedDaemon::start("", &["--http", "127.0.0.1:0"]);
    let address = daemon.wait_for_http_address();
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let socket = daemon.state.path().join("control");
    wait_for_file(&socket);
    let send_request = |request: &str, uid: u32| {
        // Perl is part of every Debian. Other users may have no access to a program in root's directories.
        let program = "use IO::Socket::UNIX; $SIG{PIPE} = 'IGNORE';
            my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die \"no: $!\";
            print $s \"$ARGV[1]\\n\"; print <$s>";
        let mut command = Command::new("perl");
        command.args(["-e", program]).arg(&socket).arg(request).current_dir("/").uid(uid).gid(uid);
        let output = command.output().expect("cannot start perl");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(send_request("status", 65534).contains("Permission denied"), "the socket must deny other users by default");
    set_mode(daemon.state.path(), 0o755);
    set_mode(&socket, 0o666);
    for request in ["status", "pause", "unenroll 1", "nonsense"] {
        let answer = send_request(request, 65534);
        assert_eq!(answer.trim(), "{\"refused\":\"only root and the daemon's user may send requests\"}", "{request}");
    }
    assert_eq!(wait_for_status(&address).state, DaemonStateName::Idle, "a rejected request paused the daemon");
    assert!(send_request("status", 0).starts_with("{\"status\":"));
}

/// Wait until a file exists.
fn wait_for_file(path: &Path) {
    let end = Instant::now() + TEST_TIMEOUT;
    while !path.exists() {
        assert!(Instant::now() < end, "timeout: {} does not exist", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A tmux terminal, killed when this is dropped.
struct TerminalScreen(PathBuf);

impl TerminalScreen {
    fn run_tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux").arg("-S").arg(&self.0).args(arguments).env("TERM", "screen").output();
        String::from_utf8_lossy(&output.expect("cannot start tmux").stdout).into_owned()
    }
}

impl Drop for TerminalScreen {
    fn drop(&mut self) {
        self.run_tmux(&["kill-server"]);
    }
}

#[test]
fn top_shows_the_daemon_until_it_ends() {
    let state = tempfile::tempdir().unwrap();
    // Without a daemon, or without a terminal.
    let output = pagefold_command(state.path(), &["top"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("use `pagefold status`"), "{output:?}");
    if !Command::new("tmux").arg("-V").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: tmux is not installed (labs/setup-watch.sh)");
        return;
    }
    let screen = TerminalScreen(state.path().join("tmux"));
    let wait_for_text = |what: &str| {
        let end = Instant::now() + TEST_TIMEOUT;
        while !screen.run_tmux(&["capture-pane", "-p"]).contains(what) {
            assert!(Instant::now() < end, "no {what:?} in:\n{}", screen.run_tmux(&["capture-pane", "-p"]));
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let top = format!("{:?}", pagefold_command(state.path(), &["top"])).replace('"', "'");
    screen.run_tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "30", &format!("{top}; exec sh")]);
    wait_for_text("no pagefold daemon runs here");

    let daemon = WatchedDaemon::start("", &[]);
    let top = format!("{:?}", pagefold_command(daemon.state.path(), &["top", "--interval", "200ms"])).replace('"', "'");
    // The daemon may not listen yet, so repeat.
    screen.run_tmux(&["send-keys", &format!("clear; until {top} && echo it ended; do sleep 0.2; done"), "Enter"]);
    wait_for_text("observe, ");
    wait_for_text("Footprint");
    drop(daemon);
    wait_for_text("OLD: ");
    screen.run_tmux(&["send-keys", "q"]);
    wait_for_text("it ended");
}
