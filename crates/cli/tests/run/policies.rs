//! `pagefold run --policy`: KSM is driven while the program runs and put back afterwards, however the process beside it
//! ends. Needs root and KSM; what is refused before the program starts needs neither.

use crate::programs::{PAGEFOLD, refusal, text, until_left};
use pagefold_labs::client::install;
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::{READY, Region};
use pagefold_labs::look::{enrolled, until};
use rustix::process::{Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

const NOBODY: u32 = 65534;

/// KSM with settings that no policy writes, and a directory for state.
fn take() -> Option<(Ksm, tempfile::TempDir)> {
    Ksm::take_as_others_set_it().map(|ksm| (ksm, tempfile::tempdir().unwrap()))
}

/// Whether the policy `flat-out` is in force.
fn is_flat_out(ksm: &Ksm) -> bool {
    ["run", "pages_to_scan", "sleep_millisecs"].map(|name| ksm.counter(name)) == [1, 20_000, 0]
}

fn command(state: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(PAGEFOLD);
    command.arg("--state").arg(state).arg("run").args(arguments);
    command
}

/// The process beside a program, by whom the journal names.
fn driver(state: &Path) -> rustix::process::Pid {
    let journal = fs::read_to_string(state.join("journal.json")).unwrap();
    let journal: Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
    rustix::process::Pid::from_raw(journal["writer"].as_i64().unwrap() as i32).unwrap()
}

/// A program that ends when this is dropped, with KSM driven flat out.
struct Driven(Child);

impl Driven {
    fn start(ksm: &Ksm, state: &Path) -> Self {
        let arguments = ["--best-effort", "--policy", "flat-out", "--", "cat"];
        let driven = Self(command(state, &arguments).stdin(Stdio::piped()).spawn().unwrap());
        until("the policy", || is_flat_out(ksm));
        driven
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn a_policy_is_in_force_while_the_program_runs() {
    let Some((ksm, state)) = take() else { return };
    let mut child = command(state.path(), &["--policy", "flat-out", "--", "sleep", "1"]).spawn().unwrap();
    until("the policy", || is_flat_out(&ksm));
    assert!(child.wait().unwrap().success());
    until_left(state.path());
    assert_eq!(ksm.changed(), []);
}

#[test]
fn a_driver_that_is_told_to_stop_puts_back() {
    let Some((ksm, state)) = take() else { return };
    let mut driven = Driven::start(&ksm, state.path());
    kill_process(driver(state.path()), Signal::TERM).unwrap();
    until_left(state.path());
    assert_eq!(ksm.changed(), []);
    assert_eq!(driven.0.try_wait().unwrap(), None, "the program goes on");
}

#[test]
fn what_a_killed_driver_left_is_put_back_by_recover() {
    let Some((ksm, state)) = take() else { return };
    let mut driven = Driven::start(&ksm, state.path());
    let driver = driver(state.path());
    kill_process(driver, Signal::KILL).unwrap();
    until("its end", || rustix::process::test_kill_process(driver).is_err());
    assert!(is_flat_out(&ksm), "it had no chance to put anything back");
    assert_eq!(driven.0.try_wait().unwrap(), None, "the program goes on");
    let recovered = Command::new(PAGEFOLD).arg("--state").arg(state.path()).arg("recover").output().unwrap();
    assert_eq!(recovered.status.code(), Some(0), "{recovered:?}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn guided_merges_what_pays_while_the_program_runs() {
    let Some((ksm, state)) = take() else { return };
    let lab = pagefold_labs::client::binary().unwrap();
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
    let mut child = command(state.path(), &arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let regions: Vec<Region> =
        lines.take_while(|line| !line.starts_with(READY)).map(|line| serde_json::from_str(&line).unwrap()).collect();
    assert_eq!(regions.iter().map(|region| region.kind.as_str()).collect::<Vec<_>>(), ["within", "unique"]);
    // 500 contents, each four times: all 2000 pages are of merged frames in the end.
    let merged = || {
        let pages = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", child.id())).unwrap();
        pages.trim().parse::<u64>().unwrap()
    };
    until("a merge", || merged() >= 2000);
    // Between rounds, too, everything is as it was.
    until("what was before", || ksm.changed().is_empty());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    until_left(state.path());
    assert_eq!(ksm.changed(), []);
}

#[test]
fn guided_withdraws_what_breaks_between_its_rounds() {
    let Some((ksm, state)) = take() else { return };
    let lab = pagefold_labs::client::binary().unwrap();
    // Written in one go every six seconds: old enough to be merged, and seen to break by none but a later round.
    let lab = [lab.to_str().unwrap(), "layout", "zero=4000", "hot-zero=4000", "--interval", "6000"];
    let mut command = command(state.path(), &[&["--policy", "guided", "--cpu", "100", "--"][..], &lab].concat());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let regions: Vec<Region> =
        lines.take_while(|line| !line.starts_with(READY)).map(|line| serde_json::from_str(&line).unwrap()).collect();
    let [zero, hot] = &regions[..] else { panic!("{regions:?}") };
    let enrolled = |region: &Region| enrolled(child.id()).range(region.start..region.end()).count() as u64;
    until("an enrolment", || enrolled(hot) == hot.pages);
    until("a withdrawal", || enrolled(hot) == 0);
    assert_eq!(enrolled(zero), zero.pages);
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    until_left(state.path());
    assert_eq!(ksm.changed(), []);
}

/// Whether a program was started: it would leave a file.
fn refused(command: &mut Command, folder: &Path, says: &str) {
    let said = refusal(command.current_dir(folder).args(["--", "touch", "started"]));
    assert!(said.contains(says), "{said}");
    assert!(!folder.join("started").exists(), "{said}");
}

#[test]
fn what_cannot_be_driven_is_refused_before_the_program_starts() {
    let folder = tempfile::tempdir().unwrap();
    let check = |arguments: &[&str], says| refused(&mut command(folder.path(), arguments), folder.path(), says);
    check(&["--policy", "flat-out", "--cpu", "20"], "--cpu is for the policy guided");
    check(&["--policy", "flatout"], "did you mean flat-out?");
    let Some((ksm, state)) = take() else { return };
    fs::set_permissions(state.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let binary = state.path().join("pagefold");
    install(PAGEFOLD.as_ref(), &binary, 0o755).unwrap();
    let nobody = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(["run", "--policy", "guided"]).args(arguments).uid(NOBODY).gid(NOBODY);
        command
    };
    refused(nobody(&["--state", "own"]).env("HOME", "/"), state.path(), "run as root");
    refused(&mut nobody(&["--state", "/run/pagefold-of-nobody"]), state.path(), "as root");
    let output = nobody(&["--state", "own", "--best-effort", "--", "touch", "started"])
        .current_dir(state.path())
        .output()
        .unwrap();
    assert!(output.status.success() && state.path().join("started").exists(), "{output:?}");
    assert!(text(&output.stderr).starts_with("pagefold: KSM is not driven: "), "{output:?}");
    assert_eq!(ksm.changed(), []);
}

#[test]
fn another_tuner_is_named_and_overruled_on_request() {
    let Some((ksm, state)) = take() else { return };
    let script = state.path().join("ksmtuned");
    fs::write(&script, "#!/bin/sh\nread line\n").unwrap();
    let mut tuner = Command::new("sh").arg(&script).stdin(Stdio::piped()).spawn().unwrap();
    // Its name is that of the shell until it has become it.
    until("the tuner", || fs::read(format!("/proc/{}/cmdline", tuner.id())).unwrap().ends_with(b"ksmtuned\0"));
    let own = state.path().join("state");
    refused(&mut command(&own, &["--policy", "flat-out"]), state.path(), "ksmtuned tunes KSM");
    let forced = command(&own, &["--policy", "flat-out", "--force", "--", "sleep", "1"]).spawn();
    until("the policy", || is_flat_out(&ksm));
    assert!(forced.unwrap().wait().unwrap().success());
    until_left(&own);
    assert_eq!(ksm.changed(), []);
    drop(tuner.stdin.take());
    tuner.wait().unwrap();
}

#[test]
fn who_is_excluded_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let (script, agent) = (folder.path().join("script"), folder.path().join("ssh-agent"));
    fs::write(&script, "#!/bin/sh\ngrep -c 'ksm_merge_any: yes' /proc/$$/ksm_stat\n").unwrap();
    install(&script, &agent, 0o755).unwrap();
    let agent = agent.to_str().unwrap();
    for arguments in [&["--", agent][..], &["--dry-run", "--", agent], &["--policy", "guided", "--", agent]] {
        let said = refusal(&mut command(folder.path(), arguments));
        assert!(said.contains("ssh-agent must not be enrolled in KSM: it holds private keys"), "{said}");
    }
    let config = folder.path().join("pagefold.toml");
    fs::write(&config, "[exclude]\nnames = [\"vault-*\"]\n").unwrap();
    let said = refusal(command(folder.path(), &["--config"]).arg(&config).args(["--", "vault-of-ours"]));
    assert!(said.contains("the configuration excludes its program"), "{said}");
    let output = command(folder.path(), &["--best-effort", "--", agent]).output().unwrap();
    assert!(text(&output.stderr).contains("not enrolled in KSM: ssh-agent must not"), "{output:?}");
    if Path::new("/proc/self/ksm_stat").exists() {
        assert_eq!(text(&output.stdout), "0\n");
    }
}
