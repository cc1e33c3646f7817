//! `pagefold run` enrols nobody beside those of another trust domain unless it is asked to. Needs root, to be several
//! users, and the lock: nobody else's test may have anybody enrolled meanwhile.

use crate::programs::{self, PAGEFOLD, compile, present, refusal, run_within, text, until_left};
use pagefold_labs::client::{Lab, install};
use pagefold_labs::ksm::Ksm;
use pagefold_labs::lines::Region;
use pagefold_labs::look::until;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const NOBODY: u32 = 65534;

/// Says whether it is enrolled.
const ASKS: [&str; 4] = ["grep", "-s", "ksm_merge_any", "/proc/self/ksm_stat"];

/// KSM, and a folder into which anybody may look. Nothing where the kernel does not tell who is enrolled.
fn take() -> Option<(Ksm, tempfile::TempDir)> {
    if !fs::read_to_string("/proc/self/ksm_stat").is_ok_and(|told| told.contains("ksm_mergeable")) {
        println!("skipped: needs Linux 6.14, which tells who is enrolled");
        return None;
    }
    let ksm = Ksm::take_as_others_set_it()?;
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    Some((ksm, folder))
}

/// Somebody who is enrolled until this is dropped.
fn enrolled(user: u32) -> Lab<Region> {
    Lab::layout(&["--uid", &user.to_string(), "--mergeable", "unique=500"]).unwrap()
}

/// A script that says whether it is enrolled.
fn script(path: &Path) {
    let text = path.with_extension("text");
    fs::write(&text, format!("#!/bin/sh\n{}\n", ASKS.join(" "))).unwrap();
    install(&text, path, 0o755).unwrap();
}

/// What it says that ends with 0, on standard output and error.
fn said(command: &mut Command) -> (String, String) {
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    (text(&output.stdout), text(&output.stderr))
}

const YES: &str = "ksm_merge_any: yes\n";
const NO: &str = "ksm_merge_any: no\n";

#[test]
fn who_is_of_another_domain_than_those_enrolled_is_refused() {
    let Some((_ksm, folder)) = take() else { return };
    let his = enrolled(NOBODY);
    let file = folder.path().join("started");
    for way in ["prctl", "preload"] {
        let said = refusal(run_within().args(["--way", way, "--", "touch"]).arg(&file));
        for part in ["touch is of the trust domain user 0", "with user 65534", "--across-domains", "--best-effort"] {
            assert!(said.contains(part), "{said}");
        }
    }
    refusal(run_within().args(["--dry-run", "--", "touch"]).arg(&file));
    refusal(run_within().args(["--policy", "flat-out", "--", "touch"]).arg(&file));
    assert!(!file.exists(), "it was not started");

    assert_eq!(said(run_within().args(["--across-domains", "--"]).args(ASKS)), (YES.to_owned(), String::new()));
    let (out, error) = said(run_within().args(["--best-effort", "--"]).args(ASKS));
    assert_eq!(out, NO, "what was enrolled to be tried is so no longer");
    assert!(error.starts_with("pagefold: not enrolled in KSM: grep is of the trust domain user 0"), "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");

    // Who trusts each other is one domain.
    let config = folder.path().join("pagefold.toml");
    let with = |text: &str| {
        fs::write(&config, text).unwrap();
        let mut command = run_within();
        command.arg("--config").arg(&config).arg("--").args(ASKS);
        command
    };
    assert_eq!(said(&mut with("[[domain]]\nname = \"two\"\nusers = [0, 65534]\n")).0, YES);
    assert_eq!(said(&mut with("domains = \"host\"\n")).0, YES);
    let other = refusal(&mut with("[[domain]]\nname = \"searches\"\nusers = [0]\nnames = [\"grep\"]\n"));
    assert!(other.contains("grep is of the trust domain group searches"), "{other}");
    let output = with("[[domain]]\nname = \"searches\"\nnames = [\"grep\"]\n").output().unwrap();
    let other = String::from_utf8_lossy(&output.stderr);
    assert!(other.contains("pagefold.toml:1: the domain \"searches\" is not applied"), "{other}");
    assert!(other.contains("grep is of the trust domain user 0"), "{other}");

    drop(his);
    assert_eq!(said(run_within().arg("--").args(ASKS)), (YES.to_owned(), String::new()));
}

#[test]
fn a_machine_of_roots_is_a_domain_of_its_own() {
    let Some((_ksm, folder)) = take() else { return };
    let machine = folder.path().join("qemu-system-x86_64");
    script(&machine);
    let run = |options: &[&str]| {
        let mut command = run_within();
        command.args(options).arg("--").arg(&machine).args(["-name", "web"]);
        command
    };
    let _roots = enrolled(0);
    assert_eq!(said(&mut run(&["--across-domains"])).0, YES);
    let said = refusal(&mut run(&[]));
    assert!(
        said.contains("qemu-system-x86_64 is of the trust domain vm web") && said.contains("with user 0"),
        "{said}"
    );

    // Nor is it enrolled where its owner forbids that, unless it is asked for.
    let opted_out = |options: &[&str]| {
        let mut command = run(options);
        command.args(["-machine", "pc,mem-merge=off"]);
        command
    };
    let refused = refusal(&mut opted_out(&["--across-domains"]));
    assert!(refused.contains("its owner forbids merging: mem-merge=off"), "{refused}");
    assert_eq!(self::said(&mut opted_out(&["--across-domains", "--ignore-opt-out"])).0, YES);
}

#[test]
fn who_may_not_see_others_is_run_and_told_so_on_request() {
    let Some((_ksm, folder)) = take() else { return };
    let binary = folder.path().join("pagefold");
    install(PAGEFOLD.as_ref(), &binary, 0o755).unwrap();
    let _roots = enrolled(0);
    let nobodys = |arguments: &[&str]| {
        let mut command = Command::new(&binary);
        command.arg("run").args(arguments).args(["--way", "prctl", "--"]).args(ASKS);
        command.current_dir(folder.path()).uid(NOBODY).gid(NOBODY);
        command
    };
    assert_eq!(said(&mut nobodys(&[])), (YES.to_owned(), String::new()));
    let (out, error) = said(&mut nobodys(&["--verbose"]));
    assert_eq!(out, YES);
    assert!(error.contains("others may be enrolled who cannot be seen"), "{error}");
    assert!(said(&mut nobodys(&["--dry-run"])).0.contains("others may be enrolled who cannot be seen"));
    let told = said(&mut nobodys(&["--verbose", "--across-domains"])).1;
    assert!(!told.contains("others may be"), "{told}");
    // What is his he can see: here each program is a domain of its own.
    let _his = enrolled(NOBODY);
    assert_eq!(said(&mut nobodys(&[])).0, YES);
    let config = folder.path().join("pagefold.toml");
    fs::write(&config, "domains = \"process\"\n").unwrap();
    let refused = refusal(&mut nobodys(&["--config", config.to_str().unwrap()]));
    assert!(refused.contains("grep is of the trust domain process "), "{refused}");
}

#[test]
fn root_in_a_container_does_not_take_it_for_all() {
    let Some((_ksm, _folder)) = take() else { return };
    let kinds = ["--pid", "--fork", "--mount-proc"];
    if !Command::new("unshare").args(kinds).arg("true").output().is_ok_and(|output| output.status.success()) {
        return println!("skipped: needs unshare {kinds:?}");
    }
    let mut command = Command::new("unshare");
    command.args(kinds).args([PAGEFOLD, "run", "--dry-run", "--way", "prctl", "--", "true"]);
    assert!(said(&mut command).0.contains("others may be enrolled who cannot be seen"));
    if fs::read_link("/proc/self/ns/pid").unwrap().as_os_str() != "pid:[4026531836]" {
        return println!("skipped: these tests are in a container themselves");
    }
    assert!(!said(run_within().args(["--dry-run", "--", "true"])).0.contains("others may be"));
}

#[test]
fn ranks_that_start_at_once_are_of_one_domain() {
    let Some((_ksm, folder)) = take() else { return };
    if !present("mpicc") || !present("mpirun") {
        return;
    }
    let program = compile("mpicc", "ranks.c", &[], folder.path());
    let mut command = Command::new("mpirun");
    command.args(["--allow-run-as-root", "--oversubscribe", "-np", "4", PAGEFOLD, "run", "--"]).arg(&program).arg("0");
    let output = command.output().unwrap();
    assert!(output.status.success() && text(&output.stderr).contains("enrolled=4"), "{output:?}");
}

#[test]
fn who_drives_beside_a_program_is_not_enrolled_with_it_and_keeps_nothing_open() {
    let Some((ksm, folder)) = take() else { return };
    let lab = pagefold_labs::client::binary().unwrap();
    let refuses = [lab.to_str().unwrap(), "refuse-prctl", "--"];
    for (refuses, is_enrolled) in [(&refuses[..0], true), (&refuses[..], false)] {
        // A descriptor that whoever stays beside it must not keep.
        let words = [refuses, &["sh", "-c", r#"exec 9</etc/passwd; exec "$0" "$@""#, PAGEFOLD]].concat();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg("--state").arg(folder.path());
        command.args([
            "run",
            "--best-effort",
            "--across-domains",
            "--way",
            "prctl",
            "--policy",
            "flat-out",
            "--",
            "cat",
        ]);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        until("the policy", || ksm.counter("pages_to_scan") == 20_000);
        let enrolled = |pid: &str| fs::read_to_string(format!("/proc/{pid}/ksm_stat")).unwrap().contains(YES);
        let journal = fs::read_to_string(folder.path().join("journal.json")).unwrap();
        let journal: Value = serde_json::from_str(journal.lines().next().unwrap()).unwrap();
        let driver = journal["writer"].to_string();
        assert_eq!([enrolled(&child.id().to_string()), enrolled(&driver)], [is_enrolled, false]);
        let keeps = |pid: &str| {
            let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().map(|entry| entry.unwrap().path());
            open.filter_map(|path| fs::read_link(path).ok()).any(|file| file == Path::new("/etc/passwd"))
        };
        assert_eq!([keeps(&child.id().to_string()), keeps(&driver)], [true, false]);
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        until_left(folder.path());
        assert_eq!(ksm.changed(), []);
    }
}

/// Two programs of one tree and of two users, with pages in common and pages that each has four times.
#[test]
fn guided_keeps_domains_of_a_tree_apart_until_asked() {
    let Some((ksm, folder)) = take() else { return };
    let script = r#"exec 3<&0; "$0" layout --uid 65534 "$1" <&3 & exec "$0" layout "$1""#;
    let merged = |options: &[&str], enough: u64| {
        let mut command = Command::new(PAGEFOLD);
        command.arg("--state").arg(folder.path()).args(["run", "--policy", "guided", "--cpu", "100"]).args(options);
        command.args(["--", "sh", "-c", script]).arg(pagefold_labs::client::binary().unwrap());
        command.arg("shared-content=d:800,within=2000,copies=4").stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut merged = 0;
        until("a merge", || {
            let pages = fs::read_to_string(format!("/proc/{}/ksm_merging_pages", child.id())).unwrap();
            merged = pages.trim().parse::<u64>().unwrap();
            merged >= enough
        });
        drop(child.stdin.take());
        assert!(child.wait().unwrap().success());
        until_left(folder.path());
        assert_eq!(ksm.changed(), []);
        merged
    };
    assert!(merged(&[], 2000) < 2800, "what two domains have in common is left alone");
    assert!(merged(&["--across-domains"], 2800) >= 2800);
}

#[test]
fn the_user_engine_has_domains_of_its_own() {
    let said = refusal(programs::run().args(["--engine", "user", "--", "true"]));
    assert!(said.contains("--across-domains is for --engine kernel"), "{said}");
}
