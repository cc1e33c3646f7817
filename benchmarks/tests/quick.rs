//! The benchmark program works: a quick run of its sections prints and keeps its findings. Speed is not tested here.

use pagefold_labs::ksm::KsmTestGuard;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

#[test]
fn quick_run_is_printed_and_saved() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("run");
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold-benchmarks"))
        .args(["--quick", "threads", "audit", "vcpu-model", "--out"])
        .arg(&out)
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let summary = fs::read_to_string(out.join("summary.md")).unwrap();
    assert!(summary.contains("| whole census"), "{summary}");
    assert!(stdout.contains("| whole census"), "{stdout}");
    assert!(summary.contains("ebizzy, 3 VMs"), "{summary}");
    assert!(summary.contains("`pagefold doctor` for 10 virtual machines"), "{summary}");
    let settings: toml::Table = fs::read_to_string(out.join("settings.toml")).unwrap().parse().unwrap();
    assert_eq!(settings["quick"].as_bool(), Some(true));
    // Two rounds of four censuses and two readings. Each covers two processes with 32 MiB of layout each, plus the
    // program's own memory.
    let samples = fs::read_to_string(out.join("threads.csv")).unwrap();
    let pages: Vec<usize> =
        samples.lines().skip(1).map(|line| line.split(',').nth(3).unwrap().parse().unwrap()).collect();
    assert_eq!(pages.len(), 12, "{samples}");
    let held = 2 * (32 << 20) / rustix::param::page_size();
    assert!(pages.iter().all(|&pages| (held..held + held / 8).contains(&pages)), "{samples}");
}

/// Whether a memory control group can be created; each run of the simulation needs one.
fn can_read_cgroup_memory() -> bool {
    let first = Path::new("/sys/fs/cgroup/memory");
    let root = if first.exists() { first } else { Path::new("/sys/fs/cgroup") };
    let group = root.join(format!("pagefold-quick-{}", std::process::id()));
    let has_memory_stat = fs::create_dir(&group).is_ok() && group.join("memory.stat").exists();
    let _ = fs::remove_dir(group);
    has_memory_stat
}

#[test]
fn quick_simulation_run_covers_all_modes() {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold-benchmarks"));
    let library = program.with_file_name("libpagefold_engine.so");
    if !library.exists() || !program.with_file_name("pagefold").exists() {
        return println!("skipped: `cargo build -p pagefold -p pagefold-engine` was not run");
    }
    if Command::new("g++").arg("--version").output().is_err() {
        return println!("skipped: no C++ compiler");
    }
    // The benchmark acquires KSM for each run.
    if let Err(why) = KsmTestGuard::acquire() {
        return println!("skipped: {why}");
    }
    if !can_read_cgroup_memory() {
        return println!("skipped: no memory cgroup can be made");
    }
    let folder = tempfile::tempdir().unwrap();
    for name in ["libpagefold.so", "libpagefold.so.0"] {
        symlink(&library, folder.path().join(name)).unwrap();
    }
    // Ranks are plain processes.
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("labs").join("hera/build.sh");
    let built = Command::new(script).args([folder.path(), folder.path()]).env("MPICXX", "true").status().unwrap();
    assert!(built.success());
    let output = Command::new(program)
        .args(["merge", "hera", "--quick", "--cases", "ranks4", "--hera"])
        .arg(folder.path().join("hera"))
        .arg("--out")
        .arg(folder.path())
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stdout}\n{stderr}");
    let kept = folder.path().join("merge-hera");
    let summary = fs::read_to_string(kept.join("summary.md")).unwrap();
    assert!(
        summary.contains("## ranks4") && stdout.contains("computed the same to the last bit"),
        "{summary}\n{stdout}"
    );
    let samples = fs::read_to_string(kept.join("samples.csv")).unwrap();
    let modes: BTreeSet<&str> = samples.lines().skip(1).filter_map(|line| line.split(',').nth(2)).collect();
    let all = ["blocks", "engine", "ksm guided", "ksm whole 2000/20", "ksm whole 20000/20", "plain"];
    assert!(modes.into_iter().eq(all), "{samples}");
    assert!(fs::read_to_string(kept.join("ranks4.svg")).unwrap().contains("memory of the job, MiB"));
}

#[test]
fn quick_predictions_stand_beside_the_real_ksmd() {
    let program = Path::new(env!("CARGO_BIN_EXE_pagefold-benchmarks"));
    if !program.with_file_name("pagefold").exists() {
        return println!("skipped: `cargo build -p pagefold` was not run");
    }
    if Command::new("sqlite3").arg("--version").output().is_err() {
        return println!("skipped: needs sqlite3 (`sudo make setup`)");
    }
    // The benchmark acquires KSM for each trial.
    if let Err(why) = KsmTestGuard::acquire() {
        return println!("skipped: {why}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output =
        Command::new(program).args(["merge", "prediction", "--quick", "--out"]).arg(folder.path()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    if stderr.contains("is enrolled in KSM") {
        return println!("skipped: {stderr}");
    }
    assert_eq!(output.status.code(), Some(0), "{stderr}");
    let kept = folder.path().join("merge-prediction");
    let samples = fs::read_to_string(kept.join("samples.csv")).unwrap();
    // The last sample of a policy, measured or modeled: saved pages.
    let saved = |policy: &str, source: &str| -> f64 {
        let of_both = |line: &&str| line.starts_with(&format!("program,1,{policy},{source},"));
        let last = samples.lines().rfind(of_both).unwrap_or_else(|| panic!("no {policy} {source}: {samples}"));
        last.split(',').nth(5).unwrap().parse().unwrap()
    };
    // Flat out, all duplicates of two idle databases are merged within the time.
    let (real, modeled) = (saved("flat-out", "ksmd"), saved("flat-out", "model"));
    assert!(real > 1000.0 && (modeled / real - 1.0).abs() < 0.05, "{real} and {modeled}: {stderr}");
    assert!(saved("whole:2000/20", "model") > 0.0);
    assert!(fs::read_to_string(kept.join("program.svg")).unwrap().contains("saved, MiB"));
    assert!(fs::read_to_string(kept.join("summary.md")).unwrap().contains("order of two policies right"));
}
