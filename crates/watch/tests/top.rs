//! `pagefold top`: frames in memory, and the program in tmux.

mod common;

use common::{find_program, fixture_status, repository_path};
use pagefold_daemon::wire::{PlacementStateName, StatusReport};
use pagefold_watch::top::App;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

/// The timeout for any screen change, far more than it needs.
const SCREEN_TIMEOUT: Duration = Duration::from_secs(120);

fn app(color: bool) -> App {
    let mut app = App::new(color);
    app.update(Ok(fixture_status()));
    app
}

fn draw(app: &mut App, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| app.draw(frame)).unwrap();
    terminal
}

/// The frame as text.
fn frame_text(app: &mut App) -> String {
    let terminal = draw(app, 120, 40);
    let buffer = terminal.backend().buffer();
    let line = |y| (0..120).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned() + "\n";
    (0..40).map(line).collect()
}

fn press_keys(app: &mut App, keys: &str) -> bool {
    keys.chars().any(|key| app.handle_key(KeyEvent::from(KeyCode::Char(key))))
}

/// The names of the processes in display order.
fn shown_names(app: &mut App) -> Vec<String> {
    let labels: Vec<String> = fixture_status().tracked_processes.into_iter().map(|process| process.label).collect();
    let text = frame_text(app);
    let rows = text.lines().skip(7).map(|line| line.get(..18).unwrap_or(line).trim());
    rows.filter(|row| labels.iter().any(|label| label == row)).map(ToOwned::to_owned).collect()
}

/// The names in descending order of a figure.
fn sorted(figure: fn(&pagefold_daemon::wire::TrackedProcessReport) -> Option<u64>) -> Vec<String> {
    let mut processes = fixture_status().tracked_processes;
    processes.sort_by_key(|process| std::cmp::Reverse(figure(process)));
    processes.into_iter().map(|process| process.label).collect()
}

#[test]
fn frames_match_golden_files() {
    for (file, keys) in [
        ("top", ""),
        ("top-workloads", "2"),
        ("top-decisions", "3"),
        ("top-findings", "4j"),
        ("top-sharing", "5"),
        ("top-help", "?"),
    ] {
        let mut app = app(false);
        press_keys(&mut app, keys);
        let path = repository_path("crates/watch/tests/expected").join(format!("{file}.txt"));
        let found = frame_text(&mut app);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).expect("UPDATE_GOLDEN=1 writes it");
        for (line, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
            assert_eq!(found, expected, "{file}, line {}", line + 1);
        }
    }
}

#[test]
fn any_terminal_size_is_drawn() {
    for keys in ["", "2", "3", "4", "5", "6", "?", "/web"] {
        for width in [1, 2, 7, 19, 20, 40, 69, 80, 81, 132, 300] {
            for height in [1, 2, 3, 5, 8, 15, 16, 20, 60] {
                let mut app = app(true);
                press_keys(&mut app, keys);
                draw(&mut app, width, height);
            }
        }
    }
    for room in [(1, 1), (80, 24)] {
        draw(&mut App::new(true), room.0, room.1);
    }
}

#[test]
fn processes_are_sorted() {
    let mut app = app(false);
    assert_eq!(shown_names(&mut app), sorted(|process| process.footprint));
    press_keys(&mut app, "r");
    let mut upwards = shown_names(&mut app);
    upwards.reverse();
    // Equal values keep their order.
    assert_eq!(upwards.first(), sorted(|process| process.footprint).first());
    press_keys(&mut app, "s");
    assert_eq!(shown_names(&mut app), sorted(|process| process.saved));
    press_keys(&mut app, "s");
    assert_eq!(shown_names(&mut app), sorted(|process| process.resident));
    press_keys(&mut app, "sss");
    let mut labels = sorted(|_| None);
    labels.sort();
    assert_eq!(shown_names(&mut app), labels);
}

#[test]
fn filter_keeps_matching_rows() {
    let mut app = app(false);
    press_keys(&mut app, "/GROUP buildq");
    assert!(frame_text(&mut app).contains("filter: GROUP buildq_"), "q is typed");
    app.handle_key(KeyEvent::from(KeyCode::Backspace));
    assert_eq!(shown_names(&mut app), ["build-3", "build-2", "build-1"]);
    app.handle_key(KeyEvent::from(KeyCode::Enter));
    assert!(frame_text(&mut app).contains("filter: GROUP build (Esc)"));
    app.handle_key(KeyEvent::from(KeyCode::Esc));
    assert_eq!(shown_names(&mut app).len(), fixture_status().tracked_processes.len());
    press_keys(&mut app, "/no such thing");
    assert!(frame_text(&mut app).contains("no row matches the filter"));
}

#[test]
fn selected_row_is_described() {
    let mut app = app(false);
    press_keys(&mut app, "4");
    let findings = fixture_status().findings;
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&frame_text(&mut app)).contains(&words(&findings[0].value)));
    press_keys(&mut app, "j");
    assert!(words(&frame_text(&mut app)).contains(&words(&findings[1].value)));
    press_keys(&mut app, "jjjjjjjjjjj");
    assert!(words(&frame_text(&mut app)).contains(&words(&findings.last().unwrap().value)));
    // Then a shorter table.
    app.update(Ok(StatusReport { findings: Vec::new(), ..fixture_status() }));
    assert!(frame_text(&mut app).contains("no findings"));
}

#[test]
fn disabled_color_is_not_used() {
    for (color, expect) in [(false, false), (true, true)] {
        let mut app = app(color);
        press_keys(&mut app, "5");
        let terminal = draw(&mut app, 120, 40);
        let cells = &terminal.backend().buffer().content;
        assert_eq!(cells.iter().any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset), expect);
    }
}

#[test]
fn failed_read_marks_the_status_as_old() {
    let mut app = App::new(false);
    assert!(frame_text(&mut app).contains("waiting for the daemon"));
    app.update(Err("/run/pagefold/control: connection refused".to_owned()));
    assert!(frame_text(&mut app).contains("connection refused"));
    app.update(Ok(fixture_status()));
    assert!(!frame_text(&mut app).contains("OLD"));
    app.update(Err("gone".to_owned()));
    let frame = frame_text(&mut app);
    assert!(frame.contains("OLD: gone") && frame.contains("web-1"));
}

#[test]
fn placement_is_shown_if_it_is_on() {
    let mut status = fixture_status();
    let placement = status.placement.as_mut().expect("a placement");
    (placement.state, placement.why) =
        (PlacementStateName::Placing, "1.00 GiB of 2.00 GiB moved, now web-7".to_owned());
    (placement.last_plan, placement.failed_machines, placement.failed_undos) = (None, 2, 1);
    let mut app = app(false);
    app.update(Ok(status.clone()));
    let frame = frame_text(&mut app);
    for line in [
        "Placement   placing  1.00 GiB of 2.00 GiB moved, now web-7; in all 3 placed, 2 given up, 1 changes not undone",
        "Last plan         -  none since the start",
    ] {
        assert!(frame.contains(line), "{line:?} is not in {frame}");
    }
    status.placement = None;
    app.update(Ok(status));
    let frame = frame_text(&mut app);
    assert!(!frame.contains("Placement") && !frame.contains("Last plan"), "{frame}");
}

#[test]
fn absent_is_a_dash_and_names_are_escaped() {
    let mut status = fixture_status();
    status.saved.net = None;
    status.memory.available = None;
    status.ksm = None;
    status.tracked_processes[0].label = "evil\u{1b}[2J\u{202e}".to_owned();
    status.tracked_processes[0].footprint = None;
    let mut app = App::new(false);
    app.update(Ok(status));
    let frame = frame_text(&mut app);
    let line = |name: &str| frame.lines().find(|line| line.starts_with(name)).unwrap_or_default().to_owned();
    assert_eq!(line("Saved").split_whitespace().nth(1), Some("-"));
    assert_eq!(line("Available").split_whitespace().nth(1), Some("-"));
    assert!(!frame.contains('\u{1b}') && !frame.contains('\u{202e}') && frame.contains("evil\\u{1b}[2J"));
    // Unknown values come last in both sort directions.
    let last = |frame: &str| frame.lines().position(|line| line.starts_with("evil\\u{1b}"));
    let at = last(&frame);
    assert!(at.is_some());
    press_keys(&mut app, "r");
    assert_eq!(last(&frame_text(&mut app)), at);
    press_keys(&mut app, "6");
    assert!(frame_text(&mut app).contains("this kernel has no KSM"));
}

#[test]
fn quit_keys_end_the_program() {
    assert!(press_keys(&mut app(false), "q"));
    assert!(app(false).handle_key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    assert!(!press_keys(&mut app(false), "23456sr"));
    // The first key only closes the help.
    assert!(!press_keys(&mut app(false), "?q"));
    assert!(press_keys(&mut app(false), "?qq"));
}

/// A separate terminal.
struct Tmux(PathBuf);

impl Tmux {
    fn start(name: &str, command: &str) -> Option<Self> {
        if find_program("tmux").is_none() {
            println!("skipped: tmux is not installed (labs/setup-watch.sh)");
            return None;
        }
        let socket = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tmux-{name}"));
        let tmux = Self(socket);
        tmux.run(&["-f", "/dev/null", "new-session", "-d", "-x", "110", "-y", "30", command]);
        Some(tmux)
    }

    fn run(&self, arguments: &[&str]) -> String {
        let output = Command::new("tmux").arg("-S").arg(&self.0).args(arguments).env("TERM", "xterm-256color").output();
        String::from_utf8_lossy(&output.expect("tmux runs").stdout).into_owned()
    }

    fn keys(&self, keys: &[&str]) {
        self.run(&[&["send-keys"], keys].concat());
    }

    /// Wait until the screen fulfills a condition.
    fn wait_until(&self, what: &str, is_match: impl Fn(&str) -> bool) -> String {
        let end = Instant::now() + SCREEN_TIMEOUT;
        loop {
            let screen = self.run(&["capture-pane", "-p"]);
            if is_match(&screen) {
                return screen;
            }
            assert!(Instant::now() < end, "no {what} in:\n{screen}");
            thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for Tmux {
    fn drop(&mut self) {
        self.run(&["kill-server"]);
        let _ = fs::remove_file(&self.0);
    }
}

/// The path of the example, which shows a file.
fn example_path() -> PathBuf {
    let tests = std::env::current_exe().expect("a test is a program");
    tests.parent().and_then(Path::parent).expect("target/PROFILE/deps").join("examples/top")
}

#[test]
fn top_works_in_a_terminal() {
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join("top-status.json");
    let write = |status: &StatusReport| {
        let new_file = file.with_extension("new");
        fs::write(&new_file, serde_json::to_string(status).unwrap()).unwrap();
        fs::rename(&new_file, &file).unwrap();
    };
    write(&fixture_status());
    let command = format!("{} {}; echo ended with $?; exec cat", example_path().display(), file.display());
    let Some(tmux) = Tmux::start("live", &command) else { return };
    tmux.wait_until("members", |screen| screen.contains("Footprint") && screen.contains("web-1"));

    // It shows the new status.
    write(&StatusReport { why: "a test wrote this".to_owned(), ..fixture_status() });
    tmux.wait_until("news", |screen| screen.contains("a test wrote this"));

    tmux.keys(&["2"]);
    tmux.wait_until("workloads", |screen| screen.contains("slurm:1234.0") && screen.contains("Processes"));
    tmux.keys(&["3"]);
    tmux.wait_until("decisions", |screen| screen.contains("equal to web-1, web-2 and 3"));
    tmux.keys(&["1", "/", "b", "u", "i", "l", "d", "Enter"]);
    tmux.wait_until("filter", |screen| screen.contains("build-1") && !screen.contains("postgres"));
    tmux.keys(&["Escape"]);
    tmux.wait_until("all", |screen| screen.contains("postgres"));

    // Resize to smaller and larger.
    tmux.run(&["resize-window", "-x", "60", "-y", "12"]);
    tmux.wait_until("small frame", |screen| {
        let shown = screen.contains("Footprint") && !screen.contains("Domain") && screen.contains("q quit");
        screen.lines().count() <= 12 && shown
    });
    tmux.run(&["resize-window", "-x", "110", "-y", "30"]);
    tmux.wait_until("large frame", |screen| screen.contains("Domain") && screen.contains("Measured"));

    // A failing reading, then a working one.
    fs::remove_file(&file).unwrap();
    tmux.wait_until("failure", |screen| screen.contains("OLD: No such file"));
    write(&fixture_status());
    tmux.wait_until("recovery", |screen| !screen.contains("OLD"));

    // The terminal is restored.
    tmux.keys(&["q"]);
    let after = tmux.wait_until("end", |screen| screen.contains("ended with 0"));
    assert!(!after.contains("Footprint"), "{after}");
    let echoed = tmux.wait_until("echo", |screen| {
        tmux.keys(&["typed", "Enter"]);
        screen.matches("typed").count() >= 2
    });
    assert!(echoed.contains("ended with 0"));
}

/// Start the example in a separate terminal without color. Returns its PID, too.
fn start_example_with_pid(name: &str) -> Option<(Tmux, String)> {
    let file = repository_path("fixtures/status.json");
    let number = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("top-{name}"));
    let _ = fs::remove_file(&number);
    let script =
        format!("echo $$ > {}; NO_COLOR=1 exec {} {}", number.display(), example_path().display(), file.display());
    let tmux = Tmux::start(name, &format!("sh -c '{script}'; echo ended with $?; exec cat"))?;
    tmux.wait_until("members", |screen| screen.contains("Footprint"));
    let pid = fs::read_to_string(&number).expect("the shell wrote its number, which the program has now");
    Some((tmux, pid.trim().to_owned()))
}

#[test]
fn signal_restores_the_terminal() {
    let Some((tmux, pid)) = start_example_with_pid("signal") else { return };
    // Without color: bold and reversed text, and the terminal's own colors (39, 49).
    let screen = tmux.run(&["capture-pane", "-p", "-e"]);
    let styles = screen.split("\u{1b}[").skip(1).filter_map(|rest| Some(rest.split_once('m')?.0));
    let plain = |style: &&str| style.split(';').all(|part| matches!(part, "" | "0" | "1" | "7" | "39" | "49"));
    assert_eq!(styles.filter(|style| !plain(style)).collect::<Vec<_>>(), [""; 0]);

    assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    let after = tmux.wait_until("end", |screen| screen.contains("ended with 0"));
    assert!(!after.contains("Footprint"), "{after}");
}

/// As if an ssh connection broke.
#[test]
fn top_ends_with_its_terminal() {
    let Some((tmux, pid)) = start_example_with_pid("gone") else { return };
    drop(tmux);
    let end = Instant::now() + SCREEN_TIMEOUT;
    // Ended, or a zombie that its new parent has not reaped yet.
    while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(Instant::now() < end, "process {pid} outlives its terminal");
        thread::sleep(Duration::from_millis(100));
    }
}
