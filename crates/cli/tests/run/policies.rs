//! `pagefold run --policy` drives KSM while the program runs and restores the settings afterwards, however the
//! companion process ends. Needs root and KSM; rejections before the program starts need neither.

use crate::test_programs::{PAGEFOLD_BINARY, lossy_text, refusal_line, wait_until_companion_exits};
use pagefold_labs::client::install_executable;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use pagefold_labs::process_checks::{enrolled_page_addresses, wait_until};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const NOBODY_UID: u32 = 65534;

/// KSM with settings that no policy writes, and a state directory.
fn acquire_ksm_and_state() -> Option<(KsmTestGuard, tempfile::TempDir)> {
    KsmTestGuard::acquire_with_foreign_settings().map(|ksm| (ksm, tempfile::tempdir().unwrap()))
}

/// Whether the settings of the policy `flat-out` are in force.
fn is_flat_out_policy_set(ksm: &KsmTestGuard) -> bool {
    ["run", "pages_to_scan", "sleep_millisecs"].map(|name| ksm.read_counter(name)) == [1, 20_000, 0]
}

fn run_with_policy_command(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(PAGEFOLD_BINARY);
    command.arg("--state").arg(state).arg("run").args(arguments);
    command
}

/// The companion process of a program: the writer that the journal names.
fn companion_pid(state: &Path) -> rustix::process::Pid {
    let journal = fs::read_to_string(state.join("ksm.journal.json")).unwrap();
    let journal: Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
    rustix::process::Pid::from_raw(journal["writer"].as_i64().unwrap() as i32).unwrap()
}

/// A program with KSM driven by `flat-out`; it exits when this is dropped.
struct FlatOutProgram(Child);

impl FlatOutProgram {
    fn start(ksm: &KsmTestGuard, state: &Path) -> Self {
        let arguments = ["--best-effort", "--policy", "flat-out", "--", "cat"];
        let program = Self(run_with_policy_command(state, &arguments).stdin(Stdio::piped()).spawn().unwrap());
        wait_until("the policy's settings", || is_flat_out_policy_set(ksm));
        program
    }
}

impl Drop for FlatOutProgram {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn policy_is_in_force_while_the_program_runs() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let mut child =
        run_with_policy_command(state.path(), &["--policy", "flat-out", "--", "sleep", "1"]).spawn().unwrap();
    wait_until("the policy's settings", || is_flat_out_policy_set(&ksm));
    assert!(child.wait().unwrap().success());
    wait_until_companion_exits(state.path());
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn stopped_companion_restores_settings() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let mut program = FlatOutProgram::start(&ksm, state.path());
    kill_process(companion_pid(state.path()), Signal::TERM).unwrap();
    wait_until_companion_exits(state.path());
    assert_eq!(ksm.changed_settings(), []);
    assert_eq!(program.0.try_wait().unwrap(), None, "the program must continue");
}

#[test]
fn recover_undoes_a_killed_companion() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let mut program = FlatOutProgram::start(&ksm, state.path());
    let driver = companion_pid(state.path());
    kill_process(driver, Signal::KILL).unwrap();
    wait_until("the exit of the companion", || rustix::process::test_kill_process(driver).is_err());
    assert!(is_flat_out_policy_set(&ksm), "a killed companion cannot restore settings");
    assert_eq!(program.0.try_wait().unwrap(), None, "the program must continue");
    let recovered = Command::new(PAGEFOLD_BINARY).arg("--state").arg(state.path()).arg("recover").output().unwrap();
    assert_eq!(recovered.status.code(), Some(0), "{recovered:?}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn guided_policy_merges_while_the_program_runs() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let arguments = [
        "--policy",
        "guided",
        "--cpu",
        "100",
        "--",
        lab.to_str().unwrap(),
        "layout",
        "within=2000,copies=4",
        "unique=500",
    ];
    let mut child =
        run_with_policy_command(state.path(), &arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let regions: Vec<RegionLine> = lines
        .take_while(|line| !line.starts_with(READY_PREFIX))
        .map(|line| serde_json::from_str(&line).unwrap())
        .collect();
    assert_eq!(regions.iter().map(|region| region.kind.as_str()).collect::<Vec<_>>(), ["within", "unique"]);
    // 500 contents, each four times: in the end all 2000 pages map merged frames.
    let merged = || {
        let pages = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", child.id())).unwrap();
        pages.trim().parse::<u64>().unwrap()
    };
    wait_until("the guided merge", || merged() >= 2000);
    // Between rounds all settings are restored, too.
    wait_until("the restored settings", || ksm.changed_settings().is_empty());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    wait_until_companion_exits(state.path());
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn guided_policy_unenrolls_pages_that_break_soon() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let lab = pagefold_labs::client::lab_binary().unwrap();
    // Zeros are written over zeros, so contents look stable. Pages that last 1.5 s are unprofitable at any share of a
    // CPU: the minimum is 2.6 s.
    let lab = [lab.to_str().unwrap(), "layout", "zero=4000", "rewritten-zero=4000", "--interval", "1500"];
    let mut command =
        run_with_policy_command(state.path(), &[&["--policy", "guided", "--cpu", "100", "--"][..], &lab].concat());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let regions: Vec<RegionLine> = lines
        .take_while(|line| !line.starts_with(READY_PREFIX))
        .map(|line| serde_json::from_str(&line).unwrap())
        .collect();
    let [zero, rewritten] = &regions[..] else { panic!("{regions:?}") };
    let enrolled = |region: &RegionLine| {
        enrolled_page_addresses(child.id()).range(region.start..region.end_address()).count() as u64
    };
    wait_until("the enrollment", || enrolled(rewritten) == rewritten.pages);
    wait_until("the unenrollment", || enrolled(rewritten) == 0);
    assert_eq!(enrolled(zero), zero.pages);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    wait_until_companion_exits(state.path());
    assert_eq!(ksm.changed_settings(), []);
}

/// Assert that a command is rejected before it starts its program, which would create a file.
fn assert_refused(command: &mut Command, folder: &Path, messages: &str) {
    let error = refusal_line(command.current_dir(folder).args(["--", "touch", "started"]));
    assert!(error.contains(messages), "{error}");
    assert!(!folder.join("started").exists(), "{error}");
}

#[test]
fn unusable_policy_is_refused_before_start() {
    let folder = tempfile::tempdir().unwrap();
    let check = |arguments: &[&str], message| {
        assert_refused(&mut run_with_policy_command(folder.path(), arguments), folder.path(), message)
    };
    check(&["--policy", "flat-out", "--cpu", "20"], "--cpu is for --policy guided");
    check(&["--policy", "flatout"], "did you mean flat-out?");
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    fs::set_permissions(state.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let binary = state.path().join("pagefold");
    install_executable(PAGEFOLD_BINARY.as_ref(), &binary, 0o755).unwrap();
    let run_as_nobody = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(["run", "--policy", "guided"]).args(arguments).uid(NOBODY_UID).gid(NOBODY_UID);
        command
    };
    assert_refused(run_as_nobody(&["--state", "own"]).env("HOME", "/"), state.path(), "run as root");
    assert_refused(&mut run_as_nobody(&["--state", "/run/pagefold-of-nobody"]), state.path(), "as root");
    let output = run_as_nobody(&["--state", "own", "--best-effort", "--", "touch", "started"])
        .current_dir(state.path())
        .output()
        .unwrap();
    assert!(output.status.success() && state.path().join("started").exists(), "{output:?}");
    assert!(lossy_text(&output.stderr).starts_with("pagefold: KSM is not controlled: "), "{output:?}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn other_tuner_is_named_and_ignored_with_force() {
    let Some((ksm, state)) = acquire_ksm_and_state() else { return };
    let script = state.path().join("ksmtuned");
    fs::write(&script, "#!/bin/sh\nread line\n").unwrap();
    let mut tuner = Command::new("sh").arg(&script).stdin(Stdio::piped()).spawn().unwrap();
    // Until the exec its name is that of the shell.
    wait_until("the tuner", || fs::read(format!("/proc/{}/cmdline", tuner.id())).unwrap().ends_with(b"ksmtuned\0"));
    let state_directory = state.path().join("state");
    assert_refused(
        &mut run_with_policy_command(&state_directory, &["--policy", "flat-out"]),
        state.path(),
        "ksmtuned tunes KSM",
    );
    let forced =
        run_with_policy_command(&state_directory, &["--policy", "flat-out", "--force", "--", "sleep", "1"]).spawn();
    wait_until("the policy's settings", || is_flat_out_policy_set(&ksm));
    assert!(forced.unwrap().wait().unwrap().success());
    wait_until_companion_exits(&state_directory);
    assert_eq!(ksm.changed_settings(), []);
    drop(tuner.stdin.take());
    tuner.wait().unwrap();
}

#[test]
fn excluded_program_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (script, agent) = (folder.path().join("script"), folder.path().join("ssh-agent"));
    fs::write(&script, "#!/bin/sh\ngrep -c 'ksm_merge_any: yes' /proc/$$/ksm_stat\n").unwrap();
    install_executable(&script, &agent, 0o755).unwrap();
    let agent = agent.to_str().unwrap();
    for arguments in [&["--", agent][..], &["--dry-run", "--", agent], &["--policy", "guided", "--", agent]] {
        let error = refusal_line(&mut run_with_policy_command(folder.path(), arguments));
        assert!(error.contains("ssh-agent must not be enrolled in KSM: it holds private keys"), "{error}");
    }
    let config = folder.path().join("pagefold.toml");
    fs::write(&config, "[exclude]\nnames = [\"vault-*\"]\n").unwrap();
    let error =
        refusal_line(run_with_policy_command(folder.path(), &["--config"]).arg(&config).args(["--", "vault-of-ours"]));
    assert!(error.contains("the configuration excludes its program"), "{error}");
    let output = run_with_policy_command(folder.path(), &["--best-effort", "--", agent]).output().unwrap();
    assert!(lossy_text(&output.stderr).contains("not enrolled in KSM: ssh-agent must not"), "{output:?}");
    if Path::new("/proc/self/ksm_stat").exists() {
        assert_eq!(lossy_text(&output.stdout), "0\n");
    }
}
