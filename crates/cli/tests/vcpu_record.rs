//! `pagefold vcpu record` on this host: busy stand-ins for virtual machines, and their schedule in the recording.

#![forbid(unsafe_code)]

use pagefold_labs::client::RunningLab;
use pagefold_vcpu::schedule::CpuSchedule;
use pagefold_vcpu::sources::threads::Grouping;
use pagefold_vcpu::sources::{RecordedSchedule, read_schedule};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

/// The least time for which the counters of a thread that runs may lag behind: a few ticks of the scheduler.
const COUNTER_LAG_NS: u64 = 50_000_000;

fn pagefold(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["vcpu"]).args(arguments).output().unwrap()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn read(path: &Path) -> RecordedSchedule {
    read_schedule(BufReader::new(File::open(path).unwrap()), Grouping::Machines).unwrap()
}

fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap().as_nanos() as u64
}

/// The threads of a process that are named as vCPUs.
fn vcpu_tids(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|entry| entry.unwrap().path());
    let vcpus = tasks.filter(|task| fs::read_to_string(task.join("comm")).unwrap().starts_with("CPU "));
    vcpus.map(|task| task.file_name().unwrap().to_str().unwrap().parse().unwrap()).collect()
}

/// A stand-in for a virtual machine. Its threads name themselves once they run.
fn start_vcpus(count: usize) -> RunningLab<String> {
    let lab = RunningLab::<String>::start("vcpus", &[&count.to_string()]).unwrap();
    for _ in 0..1000 {
        if vcpu_tids(lab.pid()).len() == count {
            return lab;
        }
        thread::sleep(Duration::from_millis(20));
    }
    panic!("the threads have no names of vCPUs");
}

/// When the counters were read, and the CPU time of each thread so far.
type Reading = (u64, BTreeMap<u32, u64>);

fn read_run_times(pid: u32, tids: &[u32]) -> BTreeMap<u32, u64> {
    let run_time = |tid: &u32| {
        let text = fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).unwrap();
        (*tid, text.split(' ').next().unwrap().parse().unwrap())
    };
    tids.iter().map(run_time).collect()
}

/// Nanoseconds of CPU time that the hypervisor of this machine took so far.
fn steal_ns() -> u64 {
    let stat = fs::read_to_string("/proc/stat").unwrap();
    let ticks: u64 = stat.lines().next().unwrap().split_whitespace().nth(8).unwrap().parse().unwrap();
    ticks * 10_000_000
}

fn run_ns(schedule: &CpuSchedule, tid: u32) -> u64 {
    let runs = schedule.runs.iter().filter(|run| schedule.tasks[run.task].tid == tid);
    runs.map(|run| run.to - run.from).sum()
}

#[test]
fn recorded_run_times_are_those_of_the_kernels_counters() {
    if !is_root() {
        return println!("skipped: recording the scheduler needs root");
    }
    let lab = start_vcpus(3);
    let (pid, tids) = (lab.pid(), vcpu_tids(lab.pid()));
    let stop = Arc::new(AtomicBool::new(false));
    let (sender, readings) = mpsc::channel::<Reading>();
    let reader = {
        let (stop, tids) = (Arc::clone(&stop), tids.clone());
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let before = monotonic_ns();
                let run_times = read_run_times(pid, &tids);
                // Readings that took long belong to no moment.
                if monotonic_ns() - before < 5_000_000 {
                    sender.send((before, run_times)).unwrap();
                }
                thread::sleep(Duration::from_millis(5));
            }
        })
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vcpus.data");
    let steal_before = steal_ns();
    let output = pagefold(&["record", path.to_str().unwrap(), "--duration", "1s", "--json"]);
    let steal = steal_ns() - steal_before;
    // A reading after the recording.
    thread::sleep(Duration::from_millis(100));
    stop.store(true, Ordering::Relaxed);
    reader.join().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let RecordedSchedule { schedule, events, .. } = read(&path);
    assert_eq!((&report["events"], &report["lost_events"]), (&events.into(), &schedule.lost_events.into()), "{report}");
    if schedule.lost_events > 0 {
        return println!("skipped: this machine is too busy to record without losses");
    }
    // Every CPU has an event, even if it runs one task all the time.
    assert_eq!(schedule.cpus.len(), thread::available_parallelism().unwrap().get(), "{report}");
    assert!(schedule.duration() >= 900_000_000, "{report}");

    let readings: Vec<Reading> = readings.into_iter().collect();
    let last_before = readings.iter().rev().find(|(at, _)| *at <= schedule.start).expect("a reading before");
    let first_inside = readings.iter().find(|(at, _)| *at >= schedule.start).expect("a reading inside");
    let last_inside = readings.iter().rev().find(|(at, _)| *at <= schedule.end).expect("a reading inside");
    let first_after = readings.iter().find(|(at, _)| *at >= schedule.end).expect("a reading after");
    for tid in tids {
        let recorded = run_ns(&schedule, tid);
        let least = last_inside.1[&tid].saturating_sub(first_inside.1[&tid]).saturating_sub(COUNTER_LAG_NS);
        let most = first_after.1[&tid] - last_before.1[&tid] + COUNTER_LAG_NS + steal;
        assert!((least..=most).contains(&recorded), "{tid}: {recorded} in {least} to {most}");
        assert!(recorded > 0, "{tid}");
    }
}

#[test]
fn map_without_a_file_measures_this_host() {
    if !is_root() {
        return println!("skipped: recording the scheduler needs root");
    }
    let labs = [(); 2].map(|()| start_vcpus(2));
    let folder = tempfile::tempdir().unwrap();
    let svg = folder.path().join("now.svg");
    let pid = labs[0].pid().to_string();
    let arguments = ["map", "--duration", "600ms", "--json", "--svg", svg.to_str().unwrap(), "--pid", &pid];
    let output = pagefold(&arguments);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let machines = report["machines"].as_array().unwrap();
    // The other one was not selected.
    assert_eq!(machines.len(), 1, "{report}");
    assert!(machines[0]["name"].as_str().unwrap().ends_with(&format!("({pid})")), "{report}");
    assert_eq!(machines[0]["vcpus"], 2, "{report}");
    assert!(machines[0]["run_percent"].as_f64().unwrap() > 0.0, "{report}");
    assert!(fs::read_to_string(svg).unwrap().contains("vCPU 1"));
}

#[test]
fn lost_events_are_counted_and_told() {
    if !is_root() {
        return println!("skipped: recording the scheduler needs root");
    }
    // Two threads that wake each other switch far more often than a buffer of a page holds between two readings.
    let (ping, pinged) = mpsc::sync_channel::<()>(0);
    let (pong, ponged) = mpsc::sync_channel::<()>(0);
    let answer = thread::spawn(move || while pinged.recv().is_ok() && pong.send(()).is_ok() {});
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let ask =
        thread::spawn(
            move || {
                while !stopped.load(Ordering::Relaxed) && ping.send(()).is_ok() && ponged.recv().is_ok() {}
            },
        );
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lost.data");
    let output = pagefold(&["record", path.to_str().unwrap(), "--duration", "500ms", "--buffer", "4KiB"]);
    stop.store(true, Ordering::Relaxed);
    ask.join().unwrap();
    answer.join().unwrap();
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(text.contains("more events were lost") && text.contains("a larger --buffer"), "{text}");
    assert!(read(&path).schedule.lost_events > 0);
}

#[test]
fn perf_reads_the_recording() {
    if !is_root() {
        return println!("skipped: recording the scheduler needs root");
    }
    if Command::new("perf").arg("--version").output().is_err() {
        return println!("skipped: perf is not installed");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("host.data");
    let recorded = pagefold(&["record", path.to_str().unwrap(), "--duration", "300ms", "--json"]);
    let report: Value = serde_json::from_slice(&recorded.stdout).unwrap();
    let script = Command::new("perf").args(["script", "--force", "-i"]).arg(&path).output().unwrap();
    assert!(script.status.success(), "{script:?}");
    let lines = String::from_utf8_lossy(&script.stdout).lines().filter(|line| line.contains(" sched:")).count();
    assert_eq!(report["events"], lines, "{script:?}");
    assert!(script.stderr.is_empty(), "{}", String::from_utf8_lossy(&script.stderr));
}

#[test]
fn refusals_name_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let file = path.to_str().unwrap();
    let refusal = |arguments: &[&str]| {
        let output = pagefold(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let selected = refusal(&["map", file, "--pid", "1"]);
    assert!(selected.contains("--group REGEX"), "{selected}");
    let recording = concat!("recording:", env!("CARGO_MANIFEST_DIR"), "/../../fixtures/recordings/linux-6.18");
    let recorded_host = refusal(&["--host", recording, "record", file]);
    assert!(recorded_host.contains("on the live host only"), "{recorded_host}");
    assert!(!path.exists(), "an empty file remains");
}
