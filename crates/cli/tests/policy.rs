//! `pagefold policy` and `pagefold recover` on this machine: real KSM, killed processes, a read-only /sys.
//!
//! Needs root and KSM. The tests restore the settings.

#![forbid(unsafe_code)]

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagefold_labs::client::{RunningLab, install_executable};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_merge::decide::policy::Advisor;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const KSM_DIRECTORY: &str = "/sys/kernel/mm/ksm";

/// Exclusive use of KSM with settings as after boot, and a state directory.
fn acquire_ksm_and_state(test: &str) -> Option<(KsmTestGuard, tempfile::TempDir)> {
    match KsmTestGuard::acquire() {
        Err(why) => {
            println!("skipped: {test}: {why}");
            None
        }
        Ok(ksm) => {
            for (name, value) in [("run", 0), ("pages_to_scan", 777), ("sleep_millisecs", 20)] {
                ksm.write_setting(name, value);
            }
            Some((ksm, tempfile::tempdir().unwrap()))
        }
    }
}

fn read_setting(name: &str) -> String {
    let text = fs::read_to_string(Path::new(KSM_DIRECTORY).join(name)).unwrap_or_default();
    let word = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(word, _)| word.to_owned());
    word.unwrap_or_else(|| text.trim().to_owned())
}

fn read_settings() -> Vec<String> {
    let names =
        ["advisor_mode", "advisor_target_scan_time", "pages_to_scan", "sleep_millisecs", "use_zero_pages", "run"];
    names.iter().map(|name| format!("{name}={}", read_setting(name))).collect()
}

fn policy_command(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("--state").arg(state).args(arguments);
    command
}

fn run_pagefold(state: &Path, arguments: &[&str]) -> Output {
    policy_command(state, arguments).output().expect("the binary runs")
}

/// Run a command and check its exit status; returns its output.
fn expect_status(status: i32, state: &Path, arguments: &[&str]) -> String {
    let output = run_pagefold(state, arguments);
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{arguments:?}\n{out}{error}");
    if status == 2 {
        assert_eq!(error.lines().count(), 1, "the error is not one line: {error}");
    }
    format!("{out}{error}")
}

/// For env(1): the signals that nohup(1) and shells ignore in background jobs, such as these tests.
const ENV_DEFAULT_SIGNALS: &str = "--default-signal=HUP,INT,QUIT";

/// Start a follower, and wait until it reports that it follows.
fn start_follower(state: &Path) -> Child {
    let mut child = Command::new("env")
        .args([ENV_DEFAULT_SIGNALS, env!("CARGO_BIN_EXE_pagefold"), "--state"])
        .arg(state)
        .args(["policy", "set", "ksmtuned", "--follow"])
        .stderr(Stdio::piped())
        .spawn()
        .expect("cannot start the follower");
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("Following ksmtuned"), "{line}");
    child
}

#[test]
fn policies_are_set_and_restored() {
    let Some((_ksm, state)) = acquire_ksm_and_state("policies_are_set_and_restored") else { return };
    let (state, before) = (state.path(), read_settings());
    let file = state.join("night.toml");
    fs::write(&file, "[ksm]\nuse_zero_pages = true\npages_to_scan = 321\n").unwrap();
    for (policy, expected) in [
        (file.to_str().unwrap(), ["none", "200", "321", "20", "1", "0"]),
        ("flat-out", ["none", "200", "20000", "0", "0", "1"]),
        ("advisor:20", ["scan-time", "20", "", "20", "0", "1"]),
        ("guided", ["none", "200", "100", "1000", "0", "1"]),
        ("default", ["none", "200", "100", "20", "0", "1"]),
    ] {
        let output = expect_status(0, state, &["policy", "set", policy]);
        assert!(output.contains("They stay until `pagefold policy restore`."), "{output}");
        for (value, expected) in read_settings().iter().zip(expected) {
            let value = value.split_once('=').unwrap().1;
            assert!(expected.is_empty() || value == expected, "{policy}: {:?}", read_settings());
        }
        let report: Value = serde_json::from_str(&expect_status(0, state, &["policy", "show", "--json"])).unwrap();
        assert_eq!(report["policy"], policy);
    }
    let output = expect_status(0, state, &["policy", "restore"]);
    assert!(output.contains("Restored: /sys/kernel/mm/ksm/pages_to_scan was 777"), "{output}");
    assert_eq!(read_settings(), before);
    assert!(expect_status(0, state, &["policy", "restore"]).contains("there is nothing to restore"));
    let output = expect_status(0, state, &["policy", "set", "ksmtuned"]);
    assert!(output.contains("add --follow"), "{output}");
    expect_status(0, state, &["policy", "restore"]);
    assert_eq!(read_settings(), before);
}

/// Both write one setting, and each undoes its own change.
#[test]
fn policy_and_tune_are_undone_apart() {
    let Some((_ksm, state)) = acquire_ksm_and_state("policy_and_tune_are_undone_apart") else { return };
    let (state, before) = (state.path(), read_settings());
    let (policy, profile) = (state.join("mine.toml"), state.join("tuned.conf"));
    let (policy, profile) = (policy.to_str().unwrap(), profile.to_str().unwrap());
    fs::write(policy, "[ksm]\npages_to_scan = 321\nuse_zero_pages = true\n").unwrap();
    let settings = [("pages_to_scan", "444"), ("sleep_millisecs", "21")];
    let lines: String = settings.iter().map(|(name, value)| format!("{KSM_DIRECTORY}/{name}={value}\n")).collect();
    fs::write(profile, format!("[sysfs]\n{lines}")).unwrap();
    let apply = || {
        expect_status(0, state, &["tune", "apply", "--import", profile]);
        assert_eq!(settings.map(|(name, _)| read_setting(name)), settings.map(|(_, value)| value));
    };
    expect_status(0, state, &["policy", "set", policy]);
    let with_policy = read_settings();
    apply();
    let report: Value = serde_json::from_str(&expect_status(0, state, &["policy", "show", "--json"])).unwrap();
    assert_eq!(report["policy"], policy);
    expect_status(0, state, &["tune", "undo"]);
    assert_eq!(read_settings(), with_policy);
    apply();
    expect_status(0, state, &["policy", "restore"]);
    assert_eq!(["pages_to_scan", "sleep_millisecs", "use_zero_pages"].map(read_setting), ["444", "21", "0"]);
    // Machines of other tests do not count.
    expect_status(0, state, &["tune", "verify", "--pid", "1"]);
    expect_status(0, state, &["tune", "undo"]);
    assert_eq!(read_settings(), before);
}

#[test]
fn foreign_settings_are_not_restored() {
    let Some((ksm, state)) = acquire_ksm_and_state("value_of_another_program_stays") else { return };
    let state = state.path();
    expect_status(0, state, &["policy", "set", "flat-out"]);
    ksm.write_setting("sleep_millisecs", 33);
    let output = expect_status(0, state, &["policy", "show"]);
    assert!(output.contains("other program"), "{output}");
    let output = expect_status(3, state, &["policy", "restore"]);
    assert!(output.contains("sleep_millisecs was 20: it is 33 now, written by another program"), "{output}");
    assert_eq!(
        [read_setting("sleep_millisecs"), read_setting("pages_to_scan"), read_setting("run")],
        ["33", "777", "0"]
    );
}

#[test]
fn recover_undoes_a_killed_follower() {
    let Some((ksm, state)) = acquire_ksm_and_state("a_killed_follower_is_put_back_by_recover") else { return };
    let (state, before) = (state.path(), read_settings());
    assert!(expect_status(0, state, &["recover"]).contains("Nothing was left to restore."));
    // Kill the command after various delays: it makes six changes, each of which takes less than a millisecond.
    for micros in [0, 200, 500, 1000, 2000, 3000, 4000, 6000, 10_000, 50_000] {
        let mut child = policy_command(state, &["policy", "set", "flat-out"]).stdout(Stdio::null()).spawn().unwrap();
        sleep(Duration::from_micros(micros));
        child.kill().unwrap();
        child.wait().unwrap();
        expect_status(0, state, &["recover"]);
        expect_status(0, state, &["policy", "restore"]);
        assert_eq!(read_settings(), before, "killed after {micros} us");
    }
    let mut child = start_follower(state);
    let error = expect_status(2, state, &["policy", "set", "default"]);
    assert!(error.contains(&format!("(process {})", child.id())), "{error}");
    child.kill().unwrap();
    child.wait().unwrap();
    expect_status(0, state, &["recover"]);
    assert_eq!(read_settings(), before);
    drop(ksm);
}

/// The state after a killed session: the settings are written, and a journal has their previous values.
#[test]
fn recover_reports_failed_undos() {
    let Some((ksm, state)) = acquire_ksm_and_state("recover_puts_back_and_says_what_it_did_not") else { return };
    let state = state.path();
    expect_status(0, state, &["policy", "set", "flat-out"]);
    fs::rename(state.join("ksm.policy.json"), state.join("ksm.journal.json")).unwrap();
    ksm.write_setting("pages_to_scan", 5);
    let output = expect_status(3, state, &["recover", "--json"]);
    let report: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(report["failed_undos"].as_array().unwrap().len(), 1);
    assert_eq!(report["failed_undos"][0]["previous_state"], "/sys/kernel/mm/ksm/pages_to_scan was 777");
    assert_eq!(report["undone"][0], "/sys/kernel/mm/ksm/run was 0");
    assert_eq!([read_setting("sleep_millisecs"), read_setting("pages_to_scan"), read_setting("run")], ["20", "5", "0"]);
    assert!(expect_status(0, state, &["recover"]).contains("Nothing was left"));
}

#[test]
fn follower_ends_on_a_signal() {
    let Some((_ksm, state)) = acquire_ksm_and_state("a_follower_ends_on_a_signal") else { return };
    let before = read_settings();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
        let mut child = start_follower(state.path());
        // Like a terminal that closes: writes to standard error fail, and SIGHUP arrives twice.
        drop(child.stderr.take());
        for _ in 0..if signal == Signal::SIGHUP { 2 } else { 1 } {
            kill(Pid::from_raw(child.id() as i32), signal).unwrap();
        }
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            assert!(started.elapsed() < Duration::from_secs(30), "{signal}: the follower does not exit");
            sleep(Duration::from_millis(10));
        };
        assert_eq!(status.code(), Some(0), "{signal}");
        assert_eq!(read_settings(), before, "{signal}");
    }
}

#[test]
fn ignored_sighup_stays_ignored() {
    let Some((_ksm, state)) = acquire_ksm_and_state("a_hangup_that_is_ignored_stays_ignored") else { return };
    let before = read_settings();
    let script = r#"trap '' HUP && exec "$0" --state "$1" policy set ksmtuned --follow"#;
    let mut child = Command::new("env")
        .args([ENV_DEFAULT_SIGNALS, "sh", "-c", script, env!("CARGO_BIN_EXE_pagefold")])
        .arg(state.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("Following ksmtuned"), "{line}");
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let mask = |name| {
        let mask = status.lines().find_map(|line| line.strip_prefix(name)).expect("no such signal mask").trim();
        u64::from_str_radix(mask, 16).unwrap()
    };
    let bits = [Signal::SIGHUP, Signal::SIGQUIT].map(|signal| 1 << (signal as u64 - 1));
    assert_eq!(bits.map(|bit| mask("SigIgn:") & bit != 0), [true, false]);
    assert_eq!(bits.map(|bit| mask("SigCgt:") & bit != 0), [false, true]);
    kill(Pid::from_raw(child.id() as i32), Signal::SIGHUP).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(read_settings(), before);
}

/// Run a shell command and then pagefold in a new mount namespace.
fn run_in_mount_namespace(setup: &str, state: &Path, arguments: &str) -> Output {
    let script = format!("{setup} && exec {} --state {} {arguments}", env!("CARGO_BIN_EXE_pagefold"), state.display());
    Command::new("unshare").args(["--mount", "sh", "-c", &script]).output().expect("cannot start unshare(1)")
}

#[test]
fn unsuitable_hosts_fail_with_one_line_and_no_change() {
    let Some((_ksm, state)) = acquire_ksm_and_state("bad_hosts_are_named_in_one_line_and_nothing_is_changed") else {
        return;
    };
    let before = read_settings();
    if !run_in_mount_namespace("true", state.path(), "--version").status.success() {
        return println!("skipped: needs mount namespaces (unshare)");
    }
    for (prepare, arguments, message) in [
        ("mount --bind -o ro /sys /sys && mount -o remount,ro,bind /sys", "policy set flat-out", "read-only"),
        ("mount -t tmpfs none /sys/kernel/mm/ksm", "policy set flat-out", "CONFIG_KSM"),
        ("mount -t tmpfs none /sys/kernel/mm/ksm", "policy show", "CONFIG_KSM"),
    ] {
        let output = run_in_mount_namespace(prepare, state.path(), arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{prepare}: {error}");
        assert!(error.contains(message) && error.lines().count() == 1, "{prepare}: {error}");
        assert_eq!(read_settings(), before, "{prepare}");
        assert!(!state.path().join("ksm.journal.json").exists());
    }
}

#[test]
fn other_tuner_is_named_with_its_stop_command() {
    let Some((_ksm, state)) = acquire_ksm_and_state("another_tuner_is_named_with_what_stops_it") else { return };
    let (before, script) = (read_settings(), state.path().join("ksmtuned"));
    fs::write(&script, "#!/bin/sh\nread line\n").unwrap();
    let mut tuner = Command::new("sh").arg(&script).stdin(Stdio::piped()).spawn().unwrap();
    let state = state.path().join("state");
    let output = expect_status(2, &state, &["policy", "set", "default"]);
    assert!(output.contains("ksmtuned tunes KSM") && output.contains("systemctl disable --now ksmtuned"), "{output}");
    assert_eq!(read_settings(), before);
    expect_status(0, &state, &["policy", "set", "default", "--force"]);
    expect_status(0, &state, &["policy", "restore"]);
    drop(tuner.stdin.take());
    tuner.wait().unwrap();
    assert_eq!(read_settings(), before);
}

#[test]
fn unprivileged_program_is_no_tuner() {
    use std::os::unix::process::CommandExt;
    let Some((_ksm, state)) = acquire_ksm_and_state("a_program_of_another_user_is_no_tuner_whatever_its_name") else {
        return;
    };
    let before = read_settings();
    let mut program = Command::new("sleep").arg0("ksmtuned").arg("60").uid(65534).gid(65534).spawn().unwrap();
    let state = state.path().join("state");
    expect_status(0, &state, &["policy", "set", "default"]);
    expect_status(0, &state, &["policy", "restore"]);
    program.kill().unwrap();
    program.wait().unwrap();
    assert_eq!(read_settings(), before);
}

#[test]
fn invalid_policy_is_refused() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path();
    let check = |arguments: &[&str], message: &str| {
        let output = expect_status(2, state, arguments);
        assert!(output.contains(message), "{output}");
    };
    check(&["policy", "set", "flatout"], "did you mean flat-out?");
    check(&["policy", "set", "fastest"], "It is one of default, ksmtuned, advisor, flat-out, guided, or a file");
    check(&["policy", "set", "advisor:0"], "advisor:20");
    check(&["policy", "set", "./none.toml"], "cannot read ./none.toml");
    check(&["policy", "set", "guided", "--follow"], "does not adapt");
    check(&["--host", "recording:/", "policy", "set", "default"], "only the live host can be changed");
    check(&["--host", "recording:/", "recover"], "only the live host can be changed");
    check(&["--config", "/none.toml", "census"], "cannot read /none.toml");
    let bad = state.join("bad.toml");
    fs::write(&bad, "[ksm]\npage_to_scan = 1\n").unwrap();
    check(&["policy", "set", bad.to_str().unwrap()], "bad.toml:2: \"page_to_scan\" is not a KSM setting");
    check(&["--config", bad.to_str().unwrap(), "config", "check"], "bad.toml:1: unknown field `ksm`");
    assert!(!state.join("ksm.lock").exists(), "a rejected command created the lock file");
}

#[test]
fn policy_without_root_asks_for_root() {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt;
    let Some((_ksm, folder)) = acquire_ksm_and_state("an_unprivileged_user_is_told_to_be_root") else { return };
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let binary = folder.path().join("pagefold");
    install_executable(env!("CARGO_BIN_EXE_pagefold").as_ref(), &binary, 0o755).unwrap();
    let before = read_settings();
    for state in ["/run/pagefold-of-nobody", "/proc/self/state"] {
        let output = Command::new(&binary)
            .args(["--state", state, "policy", "set", "default", "--force"])
            .current_dir("/")
            .uid(65534)
            .gid(65534)
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("as root") && error.lines().count() == 1, "{error}");
    }
    assert_eq!(read_settings(), before);
}

/// Compares the kernel's advisor with its model: `pages_to_scan` after each of the first scans. Scans of a few pages
/// take less than a second and less than a percent of a CPU, so both compute with the same integers.
#[test]
fn kernel_advisor_matches_the_model() {
    let Some((ksm, _state)) = acquire_ksm_and_state("the_advisor_does_what_the_model_computes") else { return };
    if !Path::new(KSM_DIRECTORY).join("advisor_mode").exists() {
        return println!("skipped: needs a kernel with the advisor (6.8)");
    }
    let _lab = RunningLab::start_layout(&["--mergeable", "unique=40"]).unwrap();
    // Make the next scan start at the beginning: with a batch larger than a full scan, ksmd stops at the end of one.
    let scans = ksm.read_counter("full_scans");
    ksm.write_setting("pages_to_scan", 1_000_000);
    ksm.write_setting("run", 1);
    while ksm.read_counter("full_scans") < scans + 3 {
        sleep(Duration::from_millis(1));
    }
    ksm.write_setting("run", 0);
    let ksmd = pagefold_merge::policy::observe_host(&pagefold_linux::LiveHost::new()).ksmd_cpu.unwrap();

    let rule = Advisor::default();
    let mut context = rule.start();
    let mut computed = vec![context.pages_to_scan];
    for scan in 1..8 {
        context = context.step(&rule, Duration::from_millis(100), ksmd + Duration::from_millis(scan));
        computed.push(context.pages_to_scan);
    }
    computed.dedup();

    ksm.write_setting("advisor_mode", "scan-time");
    let mut observed = vec![ksm.read_counter("pages_to_scan") as u64];
    let scans = ksm.read_counter("full_scans");
    ksm.write_setting("run", 1);
    while ksm.read_counter("full_scans") < scans + 8 {
        let pages = ksm.read_counter("pages_to_scan") as u64;
        if observed.last() != Some(&pages) {
            observed.push(pages);
        }
    }
    ksm.write_setting("run", 0);
    ksm.write_setting("advisor_mode", "none");
    assert_eq!(observed, computed, "the CPU time of ksmd was {ksmd:?}");
}
