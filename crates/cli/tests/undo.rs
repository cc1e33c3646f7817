//! Temporary unenrollment during a merge, on the live kernel: the memory is enrolled again afterwards, and no other
//! memory is.

use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use pagefold_labs::process_checks::{self, wait_until};
use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Memory that a lab enrolled itself, most of it unprofitable.
const LAYOUT_ARGUMENTS: [&str; 3] = ["--mergeable", "unique=3000", "shared-content=m:8000"];

fn pagefold_command(state: &Path, command: &str) -> Command {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.arg(command).arg("--state").arg(state).arg("--json");
    pagefold
}

/// The smallest page size.
const MIN_PAGE_BYTES: u64 = 4096;

fn enrolled_page_addresses(lab: &RunningLab<RegionLine>) -> BTreeSet<u64> {
    process_checks::enrolled_page_addresses(lab.pid())
}

/// KSM for one test; `None` after printing why the test is skipped.
fn acquire_ksm() -> Option<KsmTestGuard> {
    KsmTestGuard::acquire().inspect_err(|why| println!("skipped: {why}")).ok()
}

fn start_labs() -> [RunningLab<RegionLine>; 2] {
    [RunningLab::start_layout(&LAYOUT_ARGUMENTS).unwrap(), RunningLab::start_layout(&LAYOUT_ARGUMENTS).unwrap()]
}

#[test]
fn self_enrolled_memory_is_enrolled_again_after_merge() {
    let Some(_ksm) = acquire_ksm() else { return };
    let state = tempfile::tempdir().unwrap();
    let labs = start_labs();
    let before = labs.each_ref().map(enrolled_page_addresses);
    let pids = labs.each_ref().map(|lab| format!("--pid={}", lab.pid()));
    let output = pagefold_command(state.path(), "merge").args(&pids).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let unenrolls = report["plan"]["temporary_unenrolls"].as_array().unwrap();
    assert!(unenrolls.iter().all(|range| range["bytes"].as_u64() >= Some(3000 * MIN_PAGE_BYTES)), "{unenrolls:?}");
    assert_eq!(unenrolls.len(), 2);
    assert_eq!(report["outcome"]["failed_undos"], Value::Array(Vec::new()));
    // By now other profitable memory is enrolled, too.
    assert!(labs.iter().zip(&before).all(|(lab, before)| before.is_subset(&enrolled_page_addresses(lab))));
}

#[test]
fn memory_unenrolled_by_killed_merge_is_enrolled_again() {
    let Some(_ksm) = acquire_ksm() else { return };
    let state = tempfile::tempdir().unwrap();
    let labs = start_labs();
    let before = labs.each_ref().map(enrolled_page_addresses);
    let pids = labs.each_ref().map(|lab| format!("--pid={}", lab.pid()));
    let mut merge = pagefold_command(state.path(), "merge");
    merge.args(&pids).args(["--cpu", "0.1", "--pass-interval", "0", "--watch-time", "0"]);
    let mut child = merge.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("the temporary unenrollment", || {
        !labs.iter().zip(&before).any(|(lab, before)| before.is_subset(&enrolled_page_addresses(lab)))
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!labs.iter().zip(&before).any(|(lab, before)| before.is_subset(&enrolled_page_addresses(lab))));
    let recovered = pagefold_command(state.path(), "recover").output().unwrap();
    assert_eq!(recovered.status.code(), Some(0), "{}", String::from_utf8_lossy(&recovered.stdout));
    // By now other profitable memory is enrolled, too.
    assert!(labs.iter().zip(&before).all(|(lab, before)| before.is_subset(&enrolled_page_addresses(lab))));
}

/// A process that follows a policy; dropping this ends it and waits for its exit.
struct PolicyFollower(Child);

impl Drop for PolicyFollower {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let _ = self.0.wait();
    }
}

#[test]
fn second_pagefold_is_refused_across_state_dirs_and_namespaces() {
    let Some(_ksm) = acquire_ksm() else { return };
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mut follow = pagefold_command_with(first.path(), &["policy", "set", "ksmtuned", "--follow"]);
    let mut follower = PolicyFollower(follow.stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(follower.0.stderr.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("Following ksmtuned"), "{line}");
    let state = first.path().canonicalize().unwrap();
    let holder = format!("(process {}, state directory {})", follower.0.id(), state.display());
    let own_sysfs = "mount -t sysfs none /sys && exec \"$0\" \"$@\"";
    for namespaces in [&["env"][..], &["unshare", "--mount"], &["unshare", "--mount", "--net", "sh", "-c", own_sysfs]] {
        let required: &[&str] = match namespaces.len() {
            1 => &[],
            2 => &["--mount", "true"],
            _ => &["--mount", "--net", "test", "-w", "/proc/1/root/sys/kernel/mm/ksm/run"],
        };
        if !required.is_empty() && !Command::new("unshare").args(required).status().unwrap().success() {
            println!("skipped in part: needs `unshare {}`", required.join(" "));
            continue;
        }
        let recover = pagefold_command_with(second.path(), &["recover"]);
        let mut command = Command::new(namespaces[0]);
        command.args(&namespaces[1..]).arg(recover.get_program()).args(recover.get_args());
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{namespaces:?}: {stderr}");
        assert!(stderr.contains(&holder), "{namespaces:?}: {stderr}, not {holder}");
    }
    drop(follower);
    let output = pagefold_command_with(second.path(), &["recover"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

fn pagefold_command_with(state: &Path, arguments: &[&str]) -> Command {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.arg("--state").arg(state).args(arguments);
    pagefold
}
