//! `pagefold vcpu` on this host: busy stand-ins for virtual machines, and a trace of them.

#![forbid(unsafe_code)]

use pagefold_labs::client::RunningLab;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn run_pagefold(state: &Path, arguments: &[&str], pids: &[u32]) -> Output {
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.arg("--state").arg(state).args(arguments).args(pids.iter().map(|pid| format!("--pid={pid}")));
    pagefold.output().unwrap()
}

fn run_json(state: &Path, arguments: &[&str], pids: &[u32]) -> Value {
    let output = run_pagefold(state, &[arguments, &["--json"]].concat(), pids);
    assert!(matches!(output.status.code(), Some(0)), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The CPU lists of the vCPUs of each machine.
fn allowed_cpus(state: &Path, pids: &[u32]) -> Vec<Vec<String>> {
    let status = run_json(state, &["vcpu", "status", "--interval", "200ms"], pids);
    pids.iter()
        .map(|pid| {
            let machines = status["machines"].as_array().unwrap();
            let machine = machines.iter().find(|machine| machine["pid"] == *pid).unwrap();
            let vcpus = machine["vcpus"].as_array().unwrap();
            vcpus.iter().map(|vcpu| vcpu["allowed_cpus"].as_str().unwrap().to_owned()).collect()
        })
        .collect()
}

fn online_cpu_count() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

#[test]
fn two_busy_machines_are_spread_measured_and_restored() {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: the lock of CPU placement needs root");
    }
    if online_cpu_count() < 2 {
        return println!("skipped: this host has a single CPU");
    }
    let labs = [(); 2].map(|()| RunningLab::<String>::start("vcpus", &["2"]).unwrap());
    let pids = [labs[0].pid(), labs[1].pid()];
    let state = tempfile::tempdir().unwrap();
    let before = allowed_cpus(state.path(), &pids);
    let planned = run_json(state.path(), &["vcpu", "spread", "--dry-run", "--interval", "300ms"], &pids);
    assert_eq!((&planned["outcome"], planned.get("after")), (&"planned".into(), None), "{planned}");
    assert_eq!(allowed_cpus(state.path(), &pids), before);

    let spread = run_json(state.path(), &["vcpu", "spread", "--interval", "1s"], &pids);
    assert_eq!(spread["outcome"], "done", "{spread}");
    let machines = |observation: &str| spread[observation]["machines"].as_array().unwrap().clone();
    assert_eq!((machines("before").len(), machines("after").len()), (2, 2), "{spread}");
    for machine in machines("after") {
        // However loaded the host is: siblings can no longer meet on a run queue.
        assert_eq!(machine["stacking"]["stacked_samples"], 0, "{machine}");
        assert!(machine["stacking"]["samples"].as_u64().unwrap() > 0, "{machine}");
        assert!(machine["usage"]["run_ms"].as_f64().unwrap() > 0.0, "{machine}");
    }
    for vcpus in allowed_cpus(state.path(), &pids) {
        let sets: Vec<pagefold_base::IdSet> = vcpus.iter().map(|cpus| cpus.parse().unwrap()).collect();
        assert!(sets[0].intersection(&sets[1]).is_empty(), "{vcpus:?}");
    }
    // A second spread finds nothing to do.
    let again = run_json(state.path(), &["vcpu", "spread", "--interval", "200ms"], &pids);
    assert!(again["machines"].as_array().unwrap().iter().all(|machine| machine["is_spread"] == true), "{again}");
    assert!(again.get("after").is_none(), "{again}");

    let undone = run_pagefold(state.path(), &["vcpu", "spread", "undo"], &[]);
    assert_eq!(undone.status.code(), Some(0), "{undone:?}");
    assert_eq!(allowed_cpus(state.path(), &pids), before);
}

#[test]
fn status_of_busy_vcpus_adds_up_and_explains_itself() {
    let lab = RunningLab::<String>::start("vcpus", &["3"]).unwrap();
    let state = tempfile::tempdir().unwrap();
    // A paused host may lose samples.
    let mut observations =
        (0..20).map(|_| run_json(state.path(), &["vcpu", "status", "--interval", "600ms"], &[lab.pid()]));
    let status = observations.find(|status| status["samples"].as_u64().unwrap() >= 3).expect("three samples");
    assert!(status["host_vcpus"].as_u64().unwrap() >= 3, "{status}");
    let machine = &status["machines"][0];
    assert_eq!(machine["vcpus"].as_array().unwrap().len(), 3, "{status}");
    // Emulated guests are shown no steal time.
    assert_eq!(machine["usage"]["guest_steal_percent"], 0.0, "{status}");
    let co_run = |name: &str| machine["co_run"][name].as_f64().unwrap();
    assert!(co_run("lowest_percent") <= co_run("if_independent_percent") + 0.01, "{status}");
    assert!(co_run("if_independent_percent") <= co_run("highest_percent") + 0.01, "{status}");
    let text = run_pagefold(state.path(), &["vcpu", "status", "--interval", "200ms"], &[lab.pid()]);
    let text = String::from_utf8(text.stdout).unwrap();
    for expected in ["vCPUs of this host", "ready ms", "co-run", "stacked"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let other = run_pagefold(state.path(), &["vcpu", "status"], &[std::process::id()]);
    let stderr = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(other.status.code() == Some(2) && stderr.contains("debug-threads=on"), "{other:?}");
}

#[test]
fn trace_has_the_status_between_its_last_two_readings() {
    let lab = RunningLab::<String>::start("vcpus", &["2"]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let record = |name: &str, options: &[&str]| {
        let root = folder.path().join(name);
        let directory = root.to_str().unwrap();
        let arguments = [&["record", directory, "--pass-interval", "0"], options].concat();
        let output = run_pagefold(folder.path(), &arguments, &[lab.pid()]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        format!("recording:{directory}")
    };
    let trace = record("trace", &["--interval", "500ms", "--duration", "1s"]);
    let status = run_json(folder.path(), &["--host", &trace, "vcpu", "status"], &[lab.pid()]);
    assert_eq!(status["samples"], 2, "{status}");
    let seconds = status["interval_seconds"].as_f64().unwrap();
    let usage = &status["machines"][0]["usage"];
    let run_and_ready = usage["run_ms"].as_f64().unwrap() + usage["ready_ms"].as_f64().unwrap();
    assert!(seconds > 0.0 && run_and_ready > 0.0, "{status}");
    let single = record("single", &[]);
    let refused = run_pagefold(folder.path(), &["--host", &single, "vcpu", "status"], &[lab.pid()]);
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && stderr.contains("--interval 2s"), "{refused:?}");
}
