//! `pagefold run` does not enroll a program while processes of another trust domain are enrolled, unless it is asked
//! to. Needs root to become several users, and the KSM test lock: no other test may have enrolled processes meanwhile.

use crate::test_programs::{
    self, PAGEFOLD_BINARY, compile, has_program, lossy_text, refusal_line, run_within_domain,
    wait_until_companion_exits,
};
use pagefold_labs::client::{RunningLab, install_executable};
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use pagefold_labs::process_checks::wait_until;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const NOBODY_UID: u32 = 65534;

/// A command that prints whether it is enrolled.
const PRINT_MERGE_ANY_COMMAND: [&str; 4] = ["grep", "-s", "ksm_merge_any", "/proc/self/ksm_stat"];

/// KSM, and a directory that all users can read. `None` if the kernel does not report which processes are enrolled.
fn acquire_ksm_and_folder() -> Option<(KsmTestGuard, tempfile::TempDir)> {
    if !fs::read_to_string("/proc/self/ksm_stat").is_ok_and(|stat| stat.contains("ksm_mergeable")) {
        println!("skipped: needs Linux 6.14, which reports the enrolled processes");
        return None;
    }
    let ksm = KsmTestGuard::acquire_with_foreign_settings()?;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    Some((ksm, folder))
}

/// Start a process that is enrolled until this is dropped.
fn start_enrolled_lab(user: u32) -> RunningLab<RegionLine> {
    RunningLab::start_layout(&["--uid", &user.to_string(), "--mergeable", "unique=500"]).unwrap()
}

/// Write a script that prints whether it is enrolled.
fn write_script(path: &Path) {
    let text = path.with_extension("text");
    fs::write(&text, format!("#!/bin/sh\n{}\n", PRINT_MERGE_ANY_COMMAND.join(" "))).unwrap();
    install_executable(&text, path, 0o755).unwrap();
}

/// Run a command that must exit with 0; returns its standard output and standard error.
fn run_successfully(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    (lossy_text(&output.stdout), lossy_text(&output.stderr))
}

const MERGE_ANY_YES: &str = "ksm_merge_any: yes\n";
const MERGE_ANY_NO: &str = "ksm_merge_any: no\n";

#[test]
fn program_of_another_domain_is_refused() {
    let Some((_ksm, folder)) = acquire_ksm_and_folder() else { return };
    let user_lab = start_enrolled_lab(NOBODY_UID);
    let file = folder.path().join("started");
    for method in ["prctl", "preload"] {
        let error = refusal_line(run_within_domain().args(["--method", method, "--", "touch"]).arg(&file));
        for part in ["touch is in the trust domain user 0", "with user 65534", "--across-domains", "--best-effort"] {
            assert!(error.contains(part), "{error}");
        }
    }
    refusal_line(run_within_domain().args(["--dry-run", "--", "touch"]).arg(&file));
    refusal_line(run_within_domain().args(["--policy", "flat-out", "--", "touch"]).arg(&file));
    assert!(!file.exists(), "a rejected program was started");

    assert_eq!(
        run_successfully(run_within_domain().args(["--across-domains", "--"]).args(PRINT_MERGE_ANY_COMMAND)),
        (MERGE_ANY_YES.to_owned(), String::new())
    );
    let (out, error) =
        run_successfully(run_within_domain().args(["--best-effort", "--"]).args(PRINT_MERGE_ANY_COMMAND));
    assert_eq!(out, MERGE_ANY_NO, "the program must not stay enrolled after the check");
    assert!(error.starts_with("pagefold: not enrolled in KSM: grep is in the trust domain user 0"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");

    // Users listed as one trust domain may share pages.
    let config = folder.path().join("pagefold.toml");
    let command_with_config = |text: &str| {
        fs::write(&config, text).unwrap();
        let mut command = run_within_domain();
        command.arg("--config").arg(&config).arg("--").args(PRINT_MERGE_ANY_COMMAND);
        command
    };
    assert_eq!(
        run_successfully(&mut command_with_config("[[domain]]\nname = \"two\"\nusers = [0, 65534]\n")).0,
        MERGE_ANY_YES
    );
    assert_eq!(run_successfully(&mut command_with_config("domains = \"host\"\n")).0, MERGE_ANY_YES);
    let refusal =
        refusal_line(&mut command_with_config("[[domain]]\nname = \"searches\"\nusers = [0]\nnames = [\"grep\"]\n"));
    assert!(refusal.contains("grep is in the trust domain group searches"), "{refusal}");
    let output = command_with_config("[[domain]]\nname = \"searches\"\nnames = [\"grep\"]\n").output().unwrap();
    let refusal = String::from_utf8_lossy(&output.stderr);
    assert!(refusal.contains("pagefold.toml:1: the domain \"searches\" is not applied"), "{refusal}");
    assert!(refusal.contains("grep is in the trust domain user 0"), "{refusal}");

    drop(user_lab);
    assert_eq!(
        run_successfully(run_within_domain().arg("--").args(PRINT_MERGE_ANY_COMMAND)),
        (MERGE_ANY_YES.to_owned(), String::new())
    );
}

#[test]
fn guest_of_root_is_its_own_domain() {
    let Some((_ksm, folder)) = acquire_ksm_and_folder() else { return };
    let machine = folder.path().join("qemu-system-x86_64");
    write_script(&machine);
    let run = |options: &[&str]| {
        let mut command = run_within_domain();
        command.args(options).arg("--").arg(&machine).args(["-name", "web"]);
        command
    };
    let _root_lab = start_enrolled_lab(0);
    assert_eq!(run_successfully(&mut run(&["--across-domains"])).0, MERGE_ANY_YES);
    let error = refusal_line(&mut run(&[]));
    assert!(
        error.contains("qemu-system-x86_64 is in the trust domain vm web") && error.contains("with user 0"),
        "{error}"
    );

    // A program whose owner forbids merging is not enrolled without `--ignore-opt-out`.
    let opted_out = |options: &[&str]| {
        let mut command = run(options);
        command.args(["-machine", "pc,mem-merge=off"]);
        command
    };
    let refused = refusal_line(&mut opted_out(&["--across-domains"]));
    assert!(refused.contains("its owner forbids merging: mem-merge=off"), "{refused}");
    assert_eq!(self::run_successfully(&mut opted_out(&["--across-domains", "--ignore-opt-out"])).0, MERGE_ANY_YES);
}

#[test]
fn user_with_hidden_processes_is_warned_with_verbose() {
    let Some((_ksm, folder)) = acquire_ksm_and_folder() else { return };
    let binary = folder.path().join("pagefold");
    install_executable(PAGEFOLD_BINARY.as_ref(), &binary, 0o755).unwrap();
    let _root_lab = start_enrolled_lab(0);
    let run_as_nobody = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.arg("run").args(arguments).args(["--method", "prctl", "--"]).args(PRINT_MERGE_ANY_COMMAND);
        command.current_dir(folder.path()).uid(NOBODY_UID).gid(NOBODY_UID);
        command
    };
    assert_eq!(run_successfully(&mut run_as_nobody(&[])), (MERGE_ANY_YES.to_owned(), String::new()));
    let (out, error) = run_successfully(&mut run_as_nobody(&["--verbose"]));
    assert_eq!(out, MERGE_ANY_YES);
    assert!(error.contains("processes may be enrolled that are not visible"), "{error}");
    assert!(
        run_successfully(&mut run_as_nobody(&["--dry-run"]))
            .0
            .contains("processes may be enrolled that are not visible")
    );
    let stderr = run_successfully(&mut run_as_nobody(&["--verbose", "--across-domains"])).1;
    assert!(!stderr.contains("processes may be enrolled"), "{stderr}");
    // The user can see the user's own processes: in this configuration each program is a trust domain of its own.
    let _user_lab = start_enrolled_lab(NOBODY_UID);
    assert_eq!(run_successfully(&mut run_as_nobody(&[])).0, MERGE_ANY_YES);
    let config = folder.path().join("pagefold.toml");
    fs::write(&config, "domains = \"process\"\n").unwrap();
    let refused = refusal_line(&mut run_as_nobody(&["--config", config.to_str().unwrap()]));
    assert!(refused.contains("grep is in the trust domain process "), "{refused}");
}

#[test]
fn root_in_container_knows_of_hidden_processes() {
    let Some((_ksm, _folder)) = acquire_ksm_and_folder() else { return };
    let kinds = ["--pid", "--fork", "--mount-proc"];
    if !Command::new("unshare").args(kinds).arg("true").output().is_ok_and(|output| output.status.success()) {
        return println!("skipped: needs unshare {kinds:?}");
    }
    let mut command = Command::new("unshare");
    command.args(kinds).args([PAGEFOLD_BINARY, "run", "--dry-run", "--method", "prctl", "--", "true"]);
    assert!(run_successfully(&mut command).0.contains("processes may be enrolled that are not visible"));
    if fs::read_link("/proc/self/ns/pid").unwrap().as_os_str() != "pid:[4026531836]" {
        return println!("skipped: the tests run in a container");
    }
    assert!(
        !run_successfully(run_within_domain().args(["--dry-run", "--", "true"]))
            .0
            .contains("processes may be enrolled")
    );
}

#[test]
fn concurrent_ranks_share_one_domain() {
    let Some((_ksm, folder)) = acquire_ksm_and_folder() else { return };
    if !has_program("mpicc") || !has_program("mpirun") {
        return;
    }
    let program = compile("mpicc", "ranks.c", &[], folder.path());
    let mut command = Command::new("mpirun");
    command
        .args(["--allow-run-as-root", "--oversubscribe", "-np", "4", PAGEFOLD_BINARY, "run", "--"])
        .arg(&program)
        .arg("0");
    let output = command.output().unwrap();
    assert!(output.status.success() && lossy_text(&output.stderr).contains("enrolled=4"), "{output:?}");
}

#[test]
fn companion_is_not_enrolled_and_holds_no_descriptors() {
    let Some((ksm, folder)) = acquire_ksm_and_folder() else { return };
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let wrapper = [lab.to_str().unwrap(), "refuse-prctl", "--"];
    for (wrapper, is_enrolled) in [(&wrapper[..0], true), (&wrapper[..], false)] {
        // A descriptor that the companion process must not keep.
        let words = [wrapper, &["sh", "-c", r#"exec 9</etc/passwd; exec "$0" "$@""#, PAGEFOLD_BINARY]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("--state").arg(folder.path());
        command.args([
            "run",
            "--best-effort",
            "--across-domains",
            "--method",
            "prctl",
            "--policy",
            "flat-out",
            "--",
            "cat",
        ]);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        wait_until("the policy's settings", || ksm.read_counter("pages_to_scan") == 20_000);
        let enrolled = |pid: &str| fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains(MERGE_ANY_YES);
        let journal = fs::read_to_string(folder.path().join("ksm.journal.json")).unwrap();
        let journal: Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
        let driver = journal["writer"].to_string();
        assert_eq!([enrolled(&child.id().to_string()), enrolled(&driver)], [is_enrolled, false]);
        let has_passwd_open = |pid: &str| {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
            open.filter_map(|path| fs::read_link(path).ok()).any(|file| file == Path::new("/etc/passwd"))
        };
        assert_eq!([has_passwd_open(&child.id().to_string()), has_passwd_open(&driver)], [true, false]);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        wait_until_companion_exits(folder.path());
        assert_eq!(ksm.changed_settings(), []);
    }
}

/// Two programs of one process tree and of two users, with common pages and pages that each has four times.
#[test]
fn guided_merge_keeps_domains_of_a_tree_apart() {
    let Some((ksm, folder)) = acquire_ksm_and_folder() else { return };
    let script = r#"exec 3<&0; "$0" layout --uid 65534 "$1" <&3 & exec "$0" layout "$1""#;
    let merged = |options: &[&str], enough: u64| {
        let mut command = Command::new(PAGEFOLD_BINARY);
        command.arg("--state").arg(folder.path()).args(["run", "--policy", "guided", "--cpu", "100"]).args(options);
        command.args(["--", "sh", "-c", script]).arg(pagefold_labs::client::lab_binary().unwrap());
        command.arg("shared-content=d:800,within=2000,copies=4").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut merged = 0;
        wait_until("the guided merge", || {
            let pages = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", child.id())).unwrap();
            merged = pages.trim().parse::<u64>().unwrap();
            merged >= enough
        });
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        wait_until_companion_exits(folder.path());
        assert_eq!(ksm.changed_settings(), []);
        merged
    };
    assert!(merged(&[], 2000) < 2800, "content shared across domains must not be merged");
    assert!(merged(&["--across-domains"], 2800) >= 2800);
}

#[test]
fn user_engine_has_separate_domains() {
    let error = refusal_line(test_programs::run_command().args(["--engine", "user", "--", "true"]));
    assert!(error.contains("--across-domains is for --engine kernel"), "{error}");
}
