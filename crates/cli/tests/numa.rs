//! `pagefold numa` on this host: a process of known layout, and virtual nodes of QEMU.

#![forbid(unsafe_code)]

use pagefold_labs::assets::QEMU_PROGRAM;
use pagefold_labs::client;
use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");

/// Maximum time until a virtual machine has its threads and memory.
const QEMU_START_TIME: Duration = Duration::from_secs(60);

/// A process that is killed with the value.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pagefold(arguments: &[&str]) -> Value {
    let output = Command::new(PAGEFOLD_BINARY).arg("numa").args(arguments).arg("--json").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The pages of a kind on all nodes.
fn pages_of_kind(memory: &Value, kind: &str) -> u64 {
    memory["memory"].as_array().unwrap().iter().map(|node| node[kind].as_u64().unwrap()).sum()
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: frames are visible to root only");
    }
    is_root
}

#[test]
fn map_counts_the_pages_of_a_process() {
    if !is_root() {
        return;
    }
    let lab = client::lab_binary().unwrap();
    let mut command = Command::new(&lab);
    command.args(["layout", "unique=3000", "huge=512"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = KilledChild(command.spawn().unwrap());
    let lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let regions: Vec<RegionLine> = lines
        .take_while(|line| !line.starts_with(READY_PREFIX))
        .map(|line| serde_json::from_str(&line).unwrap())
        .collect();
    assert_eq!(regions.len(), 2, "{regions:?}");
    let pid = child.0.id().to_string();
    let map = pagefold(&["map", "--pid", &pid]);
    let process = &map["processes"][0];
    let (small, huge) = (pages_of_kind(process, "small_pages"), pages_of_kind(process, "huge_pages"));
    assert!(small + huge >= 3512 && small + huge < 4500, "{process}");
    let thread = &process["threads"][0];
    assert_eq!((&thread["role"], &thread["threads"]), (&"other".into(), &1.into()), "{process}");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap();
    assert_eq!(thread["allowed_cpus"], allowed);
    let text = Command::new(PAGEFOLD_BINARY).args(["numa", "map", "--pid", &pid]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.starts_with("NUMA map of this host: "), "{text}");
    for expected in ["1 process.", "Memory by node", "Threads", " 1 thread "] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    if map["nodes"].as_array().unwrap().len() == 1 {
        assert_eq!(process["accesses"]["remote_share"], 0.0);
        let plan = pagefold(&["plan", "--pid", &pid]);
        assert_eq!(plan["machines"][0]["reason"], "already_local", "{plan}");
        assert_eq!(plan["gap"], 0.0);
        let text = Command::new(PAGEFOLD_BINARY).args(["numa", "plan", "--pid", &pid]).output().unwrap();
        let text = String::from_utf8(text.stdout).unwrap();
        assert!(
            text.contains("nothing is worth moving. No other choice of the considered placements is better."),
            "{text}"
        );
    }
}

#[test]
fn virtual_nodes_of_qemu_are_told_apart() {
    if !is_root() {
        return;
    }
    let mut command = Command::new(QEMU_PROGRAM);
    command
        .args(["-accel", "tcg", "-S", "-display", "none", "-nodefaults", "-m", "96", "-smp", "3"])
        .args(["-name", "guest=wide,debug-threads=on"])
        // Two backends of equal size, of which only the second one has pages, and one of another size.
        .args(["-object", "memory-backend-ram,id=empty,size=32M"])
        .args(["-object", "memory-backend-ram,id=full,size=32M,prealloc=on"])
        .args(["-object", "memory-backend-memfd,id=shared,size=32768K,prealloc=on"])
        .args(["-numa", "node,nodeid=0,cpus=0,memdev=full"])
        .args(["-numa", "node,nodeid=1,cpus=1,memdev=empty"])
        .args(["-numa", "node,nodeid=2,cpus=2,memdev=shared"]);
    let child = match command.spawn() {
        Ok(child) => KilledChild(child),
        Err(error) => return println!("skipped: {QEMU_PROGRAM}: {error}"),
    };
    let pid = child.0.id().to_string();
    let started = Instant::now();
    let process = loop {
        // The command line and the memory come after the start.
        let output = Command::new(PAGEFOLD_BINARY).args(["numa", "map", "--json", "--pid", &pid]).output().unwrap();
        let map: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let process = map["processes"][0].clone();
        let is_ready = process["threads"].as_array().is_some_and(|groups| {
            groups
                .iter()
                .filter(|group| group["role"] == "vcpu")
                .map(|group| group["threads"].as_u64().unwrap())
                .sum::<u64>()
                == 3
        });
        if is_ready {
            break process;
        }
        assert!(started.elapsed() < QEMU_START_TIME, "{output:?}");
        sleep(Duration::from_millis(100));
    };
    let resident: Vec<&Value> =
        process["virtual_nodes"].as_array().unwrap().iter().map(|node| &node["resident_pages"]).collect();
    assert_eq!(resident, [8192, 0, 8192], "{process}");
    let shared = &process["virtual_nodes"][2];
    assert_eq!(pages_of_kind(shared, "shared_pages") + pages_of_kind(shared, "huge_pages"), 8192, "{process}");
    let vcpus: Vec<&Value> = process["virtual_nodes"].as_array().unwrap().iter().map(|node| &node["vcpus"]).collect();
    assert_eq!(vcpus, ["0", "1", "2"]);
    let plan = pagefold(&["plan", "--pid", &pid, "--vcpus-per-cpu", "4"]);
    assert_eq!(plan["machines"][0]["parts"].as_array().unwrap().len(), 3, "{plan}");
}

#[test]
fn placement_is_verified_on_a_recording() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (state, recording) = (folder.path().join("state"), folder.path().join("recording"));
    let run = |arguments: &[&str]| {
        let mut command = Command::new(PAGEFOLD_BINARY);
        command.arg("--state").arg(&state).args(arguments);
        command.output().unwrap()
    };
    let lab = client::lab_binary().unwrap();
    let mut child = KilledChild(
        Command::new(&lab)
            .args(["layout", "unique=2000"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with(READY_PREFIX)));
    let pid = child.0.id().to_string();
    let placed = run(&["numa", "apply", "--pid", &pid, "--to", "0", "--json"]);
    assert!(matches!(placed.status.code(), Some(0 | 3)), "{placed:?}");
    let report: Value = serde_json::from_slice(&placed.stdout).unwrap();
    assert_eq!(report["machines"][0]["split_pages"], 0, "{report}");
    let recorded = run(&["record", "--pass-interval", "0", "--pid", &pid, recording.to_str().unwrap()]);
    assert!(recorded.status.success(), "{recorded:?}");
    let verify = |host: &str| {
        let verified = run(&["--host", host, "numa", "verify", "--json"]);
        let report: Value =
            serde_json::from_slice(&verified.stdout).unwrap_or_else(|why| panic!("{why}: {verified:?}"));
        (verified.status.code(), report["host"].clone(), report["machines"][0]["state"].clone())
    };
    let live = verify("live");
    assert_eq!((live.0, &live.2), (Some(0), &"as_planned".into()));
    drop(child);
    // The process has ended on this host, and not in the recording.
    assert_eq!(verify("live").2, "ended");
    let host = format!("recording:{}", recording.display());
    let (code, name, machine) = verify(&host);
    assert_eq!((code, &machine), (Some(0), &"as_planned".into()), "{name}");
    assert!(name.as_str().unwrap().contains("recording"), "{name}");
    // A recording that lacks the boot of its host.
    std::fs::remove_file(recording.join("files/proc/sys/kernel/random/boot_id")).unwrap();
    let refused = run(&["--host", &host, "numa", "verify"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("record it again"), "{refused:?}");
}

#[test]
fn unknown_process_is_named() {
    let output = Command::new(PAGEFOLD_BINARY).args(["numa", "map", "--pid", "4194304"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("4194304"), "{output:?}");
    let output = Command::new(PAGEFOLD_BINARY).args(["numa", "plan", "--vcpus-per-cpu", "0"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("0.1 to 100"), "{output:?}");
}

/// Nothing is undone that was not asked for, and each process that is not undone is named.
#[test]
fn undo_names_processes_that_are_missing() {
    if !is_root() {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let undo = |arguments: &[&str]| {
        let mut command = Command::new(PAGEFOLD_BINARY);
        let output = command.arg("--state").arg(state.path()).args(["numa", "undo"]).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let own = std::process::id().to_string();
    for (arguments, status, named) in [
        (&["--pid", "4194304"][..], 2, "4194304"),
        (&["--vm", "no-such-machine"], 2, "no-such-machine"),
        (&["--pid", &own, "--pid", "4194304"], 3, "process 4194304 is not undone"),
        (&["--pid", &own], 0, ""),
    ] {
        let (code, errors) = undo(arguments);
        assert!(code == Some(status) && errors.contains(named), "{arguments:?}: {code:?} {errors}");
    }
}

#[test]
fn plan_says_whether_working_sets_were_measured() {
    if !is_root() {
        return;
    }
    let sleeper = KilledChild(Command::new("sleep").arg("600").spawn().unwrap());
    let state = tempfile::tempdir().unwrap();
    let mut command = Command::new(PAGEFOLD_BINARY);
    command.args(["numa", "plan", "--json", "--working-set", "1s", "--pid", &sleeper.0.id().to_string(), "--state"]);
    let output = command.arg(state.path()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let source = &report["hotness_source"];
    match output.status.code() {
        Some(0) => assert_eq!(source["figures"], "working_set", "{report}"),
        Some(3) => assert!(source["figures"] == "run_time" && source["not_measured"].is_string(), "{report}"),
        _ => panic!("{output:?}"),
    }
    assert_eq!(report["machines"][0]["parts"][0]["accessed_share"].is_null(), source["figures"] == "run_time");
}

#[test]
fn working_sets_of_recordings_and_requested_nodes_are_refused() {
    let refused = |arguments: &[&str], why: &str| {
        let output = Command::new(PAGEFOLD_BINARY).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && stderr.contains(why), "{output:?}");
    };
    refused(
        &["--host", "recording:/nowhere", "numa", "plan", "--working-set", "1s"],
        "only machines that run on this host",
    );
    refused(&["numa", "plan", "--working-set", "10ms"], "at least 1s");
    refused(&["numa", "apply", "--vm", "a", "--to", "0", "--working-set", "1s"], "cannot be used with");
}

/// The recording `kvm-host` with a further process of this user.
fn recording_with_process(comm: &str, arguments: &str, uid: u32) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/recordings/kvm-host/.");
    let copied = Command::new("cp").args(["-r", fixture]).arg(folder.path()).status().unwrap();
    assert!(copied.success());
    let process = folder.path().join("files/proc/99");
    fs::create_dir(&process).unwrap();
    let stat = format!("99 ({comm}) S 1 1 1 0 -1 0 {}20 0 1 0 1 {}0 0 0 0\n", "0 ".repeat(8), "0 ".repeat(16));
    fs::write(process.join("stat"), stat).unwrap();
    fs::write(process.join("cmdline"), arguments).unwrap();
    fs::write(process.join("status"), format!("Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")).unwrap();
    let names = folder.path().join("files/proc/.names");
    let listed = fs::read_to_string(&names).unwrap();
    fs::write(names, format!("{}\n99\n", listed.trim_end())).unwrap();
    folder
}

#[test]
fn running_numad_is_named_as_a_rival_of_the_placement() {
    for (comm, arguments, uid, is_rival) in [
        ("numad", "/usr/bin/numad\0-i\x0015\0", 0, true),
        ("numad", "/usr/bin/numad\0-i\x0015\0", 1000, false),
        ("irqbalance", "/usr/sbin/irqbalance\0", 0, false),
    ] {
        let folder = recording_with_process(comm, arguments, uid);
        for command in [&["plan"][..], &["apply", "--dry-run"]] {
            let host = format!("recording:{}", folder.path().display());
            let output = Command::new(PAGEFOLD_BINARY).args(["--host", &host, "numa"]).args(command).output().unwrap();
            // The recording does not have the pages of the process.
            assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
            let warning = String::from_utf8(output.stderr).unwrap();
            let is_named = warning.contains("numad runs and would move placed machines again");
            assert_eq!(is_named, is_rival, "{comm} of user {uid}, {command:?}: {warning:?}");
        }
    }
}
