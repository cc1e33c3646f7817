//! What is seen of a daemon: its HTTP and `pagefold top`, of one that observes a recorded host and so needs no
//! privilege.

use pagefold_daemon::wire::{Mode, State, Status, sums};
use pagefold_doctor::wire::VerdictName;
use pagefold_history::points::{History, Point};
use pagefold_history::{Limits, Writer};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};
use tempfile::TempDir;

/// How long anything may take here: far more than it does.
const PATIENCE: Duration = Duration::from_secs(120);

/// A daemon that is ended when it is dropped.
struct Daemon {
    child: Child,
    log: BufReader<ChildStderr>,
    state: TempDir,
}

fn pagefold(state: &Path, arguments: &[&str]) -> Command {
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("--host").arg(format!("recording:{}", recording.display())).arg("--state").arg(state).args(arguments);
    command
}

impl Daemon {
    /// Start one with a configuration.
    fn start(section: &str, arguments: &[&str]) -> Self {
        let state = tempfile::tempdir().unwrap();
        let config = state.path().join("pagefold.toml");
        std::fs::write(&config, format!("[daemon]\nmin_memory = \"4KiB\"\n{section}\n")).unwrap();
        let mut command = pagefold(state.path(), &["daemon", "--mode", "observe", "--config"]);
        let mut child = command.arg(config).args(arguments).stderr(Stdio::piped()).spawn().expect("the binary runs");
        let log = BufReader::new(child.stderr.take().unwrap());
        Self { child, log, state }
    }

    /// The next line of its log with this in it, from there on.
    fn says(&mut self, what: &str) -> String {
        for line in self.log.by_ref().lines() {
            if let Some((_, rest)) = line.unwrap().split_once(what) {
                return rest.to_owned();
            }
        }
        panic!("it ended without saying {what:?}");
    }

    /// Where it shows itself.
    fn address(&mut self) -> String {
        let rest = self.says("shown at http://");
        rest.split_once('/').expect("an address").0.to_owned()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(address: &str, host: &str, path: &str) -> (String, String) {
    let mut stream = TcpStream::connect(address).expect("the daemon listens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    (head.lines().next().unwrap_or_default().to_owned(), body.to_owned())
}

/// Ask until there is a status.
fn status(address: &str) -> Status {
    let end = Instant::now() + PATIENCE;
    loop {
        let (first, body) = get(address, "localhost", "/api/status");
        if first.contains(" 200 ") {
            return serde_json::from_str(&body).expect("a status");
        }
        assert!(first.contains(" 503 ") && Instant::now() < end, "{first}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_daemon_is_shown() {
    // The command line comes before the configuration.
    let section = "http = \"192.0.2.1:1\"\nhttp_names = [\"node17\"]";
    let mut daemon = Daemon::start(section, &["--http", "127.0.0.1:0"]);
    let address = daemon.address();
    let status = status(&address);
    assert_eq!((status.mode, status.pid), (Mode::Observe, daemon.child.id()));
    assert!(status.host.contains("linux-6.18") && status.ksm.is_some(), "{status:?}");
    // What is wrong is told, and what is in order is counted.
    let of = |verdict| status.findings.iter().filter(|finding| finding.verdict == verdict).count() as u64;
    for (&verdict, &count) in &status.findings_by_verdict {
        let told = [VerdictName::Warn, VerdictName::Fail].contains(&verdict);
        assert_eq!(of(verdict), if told { count } else { 0 }, "{verdict:?}");
    }
    assert!(status.findings_by_verdict[&VerdictName::Ok] > 0 && status.findings_by_verdict.len() == 5);
    assert_eq!((&status.workloads, status.members_left_out), (&sums::workloads(&status.members), 0));
    assert_eq!(status.cgroups, sums::cgroups(&status.members));
    assert!(get(&address, "node17", "/metrics").1.contains("\npagefold_mode{mode=\"observe\"} 1\n"));
    assert!(get(&address, "node18", "/metrics").0.contains(" 421 "));
    assert!(get(&address, "localhost", "/").1.starts_with("<!doctype html>"));
    // Who follows it gets another before long.
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let events =
        BufReader::new(stream).lines().filter(|line| line.as_ref().is_ok_and(|line| line.starts_with("data: ")));
    assert_eq!(events.take(2).count(), 2);

    assert!(Command::new("kill").arg(daemon.child.id().to_string()).status().unwrap().success());
    assert!(daemon.child.wait().unwrap().success());
    TcpStream::connect(&address).expect_err("nobody listens");
}

/// What an earlier daemon has kept is shown by the next, and nothing between the two.
#[test]
fn the_past_of_a_history_is_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("history.db");
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/status.json");
    let mut kept: Status = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    // One run of long ago, of which nothing is shown, and one of five minutes.
    for (from, seconds) in [(now - 200_000.0, 100), (now - 4000.0, 300)] {
        let mut writer = Writer::open(&path, Limits::default(), "node17", "0.1.0", from).expect("a history");
        for second in (0..seconds).step_by(10) {
            kept.time = from + f64::from(second);
            kept.cpu.ksmd.as_mut().unwrap().seconds = f64::from(second) * 0.05;
            writer.note(&kept);
        }
        writer.commit().unwrap();
    }
    let mut daemon = Daemon::start("", &["--http", "127.0.0.1:0", "--history", path.to_str().unwrap()]);
    let address = daemon.address();
    status(&address);
    let (_, body) = get(&address, "localhost", "/api/history");
    let points = serde_json::from_str::<History>(&body).expect("a history").points;
    let (before, after): (Vec<&Point>, Vec<&Point>) = points.iter().partition(|point| point.time < now);
    assert!(before.len() == 31 && !after.is_empty(), "{points:#?}");
    assert!(before[..30].iter().all(|point| point.saved_net == kept.saved.net));
    assert!(before[1..30].iter().all(|point| point.ksmd_percent.is_some_and(|percent| (percent - 5.0).abs() < 0.1)));
    assert!(before[30].saved_net.is_none() && before[30].available.is_none(), "nothing is known until it begins");
}

#[test]
fn the_address_must_be_one_and_free() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut daemon = Daemon::start(&format!("http = \"{address}\""), &[]);
    assert!(daemon.says("cannot listen at ").starts_with(&address));
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
    let mut daemon = Daemon::start("http = \"9750\"", &[]);
    assert!(daemon.says("an address is needed").contains("127.0.0.1:9750"));
    assert_eq!(daemon.child.wait().unwrap().code(), Some(2));
}

/// Who could open the socket, because somebody has given it to everybody, is refused by its user all the same.
#[test]
fn other_users_are_told_nothing_and_have_no_say() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can ask as another user");
    }
    let mut daemon = Daemon::start("", &["--http", "127.0.0.1:0"]);
    let address = daemon.address();
    let all = |path: &Path, mode| std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    let socket = daemon.state.path().join("control");
    until_there(&socket);
    let ask = |request: &str, uid: u32| {
        // Perl is part of every Debian, and a program of root's folders may not be run by others.
        let program = "use IO::Socket::UNIX; $SIG{PIPE} = 'IGNORE'; my $s = IO::Socket::UNIX->new(Peer => $ARGV[0]) or die \"no: $!\";
            print $s \"$ARGV[1]\\n\"; print <$s>";
        let mut command = Command::new("perl");
        command.args(["-e", program]).arg(&socket).arg(request).current_dir("/").uid(uid).gid(uid);
        let output = command.output().expect("perl runs");
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
    };
    assert!(ask("status", 65534).contains("Permission denied"), "as it is made");
    all(daemon.state.path(), 0o755);
    all(&socket, 0o666);
    for request in ["status", "pause", "withdraw 1", "nonsense"] {
        let answer = ask(request, 65534);
        assert_eq!(answer.trim(), "{\"refused\":\"only root and the daemon's user may ask\"}", "{request}");
    }
    assert_eq!(status(&address).state, State::Resting, "nobody has paused it");
    assert!(ask("status", 0).starts_with("{\"status\":"));
}

/// Wait for a file.
fn until_there(path: &Path) {
    let end = Instant::now() + PATIENCE;
    while !path.exists() {
        assert!(Instant::now() < end, "{} is not there", path.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A terminal, ended when it is dropped.
struct Screen(PathBuf);

impl Screen {
    fn tmux(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux").arg("-S").arg(&self.0).args(arguments).env("TERM", "screen").output();
        String::from_utf8_lossy(&output.expect("tmux runs").stdout).into_owned()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
fn top_follows_the_daemon() {
    let state = tempfile::tempdir().unwrap();
    // There is nobody to ask, or no terminal.
    let output = pagefold(state.path(), &["top"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("use `pagefold status`"), "{output:?}");
    if !Command::new("tmux").arg("-V").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: tmux is not installed (labs/setup-watch.sh)");
        return;
    }
    let screen = Screen(state.path().join("tmux"));
    let until = |what: &str| {
        let end = Instant::now() + PATIENCE;
        while !screen.tmux(&["capture-pane", "-p"]).contains(what) {
            assert!(Instant::now() < end, "no {what:?} in:\n{}", screen.tmux(&["capture-pane", "-p"]));
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let top = format!("{:?}", pagefold(state.path(), &["top"])).replace('"', "'");
    screen.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "120", "-y", "30", &format!("{top}; exec sh")]);
    until("no pagefold daemon runs here");

    let daemon = Daemon::start("", &[]);
    let top = format!("{:?}", pagefold(daemon.state.path(), &["top", "--every", "200ms"])).replace('"', "'");
    // It may be about to listen.
    screen.tmux(&["send-keys", &format!("clear; until {top} && echo it ended; do sleep 0.2; done"), "Enter"]);
    until("observe, ");
    until("Footprint");
    drop(daemon);
    until("OLD: ");
    screen.tmux(&["send-keys", "q"]);
    until("it ended");
}
