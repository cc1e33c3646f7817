//! `pagefold vcpu map`: a recorded schedule measured and drawn.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A file of perf with a machine of two vCPUs on two CPUs, computed by hand.
fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/vcpu/two-vcpus.perf.data")
}

fn map(file: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["vcpu", "map"]).arg(file).args(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The error of a refused call.
fn refusal(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn measures_are_printed_as_json_and_text() {
    let report: Value = serde_json::from_str(&stdout(&map(&fixture(), &["--json"]))).unwrap();
    assert_eq!(report["schema"], "pagefold.vcpu-map/1");
    let machine = &report["machines"][0];
    assert_eq!(machine["name"], "qemu-system-x86 (100)");
    assert_eq!((&machine["co_run_percent"], &machine["siblings_co_run_percent"]), (&70.0.into(), &62.5.into()));
    assert_eq!(machine["stacked_beside_free_cpu_percent"], 37.5);
    assert_eq!(machine["wake_to_run"]["max_us"], 200.0);
    let text = stdout(&map(&fixture(), &[]));
    assert!(text.contains("qemu-system-x86 (100)") && text.contains("70.0 %"), "{text}");
}

#[test]
fn picture_shows_the_selected_time() {
    let folder = tempfile::tempdir().unwrap();
    let svg_path = folder.path().join("schedule.svg");
    let draw = |arguments: &[&str]| {
        let output = map(&fixture(), &[&["--svg", svg_path.to_str().unwrap()], arguments].concat());
        stdout(&output);
        fs::read_to_string(&svg_path).unwrap()
    };
    let svg = draw(&[]);
    assert!(
        svg.starts_with("<svg ") && svg.contains("CPU 1") && svg.contains("qemu-system-x86 (100), vCPU 1"),
        "{svg}"
    );
    // In the last 100 \u{b5}s only vCPU 1 runs.
    let svg = draw(&["--from", "900us", "--for", "100us"]);
    assert!(svg.contains("vCPU 1") && !svg.contains("vCPU 0"), "{svg}");
    let late = refusal(&map(&fixture(), &["--svg", svg_path.to_str().unwrap(), "--from", "1s"]));
    assert!(late.contains("--from and --for select no time of the recording, which has 0.001 s"), "{late}");
}

#[test]
fn trace_for_perfetto_has_the_names_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let trace_path = folder.path().join("schedule.pftrace");
    stdout(&map(&fixture(), &["--perfetto", trace_path.to_str().unwrap()]));
    let trace = fs::read(trace_path).unwrap();
    assert!(trace.windows(9).any(|bytes| bytes == b"CPU 1/KVM"));
}

#[test]
fn files_without_schedule_are_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other");
    fs::write(&other, "text").unwrap();
    let error = refusal(&map(&other, &[]));
    assert!(error.contains("this is no file of perf record"), "{error}");
    let error = refusal(&map(&fixture(), &["--group", "^worker"]));
    assert!(error.contains("no recorded thread has a name that matches ^worker"), "{error}");
}
