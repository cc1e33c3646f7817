//! Merging on the live kernel: measured savings match the prediction, and nothing else changes.

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_labs::output_lines::RegionLine;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

fn merge_command(state: &Path, pids: &[u32], options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    command.arg("merge").arg("--state").arg(state).args(pids.iter().map(|pid| format!("--pid={pid}"))).args(options);
    command
}

fn run_merge(state: &Path, labs: &[&RunningLab<RegionLine>], options: &[&str]) -> Output {
    let pids: Vec<u32> = labs.iter().map(|lab| lab.pid()).collect();
    merge_command(state, &pids, options).output().expect("the binary runs")
}

fn parse_report(output: &Output, code: i32) -> Value {
    assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Enrolled pages of a region.
fn enrolled_pages(lab: &RunningLab<RegionLine>, region: &RegionLine) -> u64 {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", lab.pid())).unwrap();
    let mut pages = 0;
    let mut inside = None;
    for line in smaps.lines() {
        if let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-')) {
            let parse = |text| u64::from_str_radix(text, 16).ok();
            if let (Some(start), Some(end)) = (parse(start), parse(end)) {
                inside =
                    Some((start.max(region.start), end.min(region.end_address()))).filter(|(start, end)| start < end);
            }
        } else if let (Some((start, end)), Some(flags)) = (inside, line.strip_prefix("VmFlags:")) {
            pages += if flags.split(' ').any(|flag| flag == "mg") { (end - start) / region.page_size } else { 0 };
        }
    }
    pages
}

/// Wait until a condition is true.
fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    let started = Instant::now();
    while !is_met() {
        assert!(started.elapsed() < Duration::from_secs(60), "{condition} did not come within a minute");
        sleep(Duration::from_millis(5));
    }
}

/// Start a merge so slow that it is still running when the test acts.
fn start_slow_merge(state: &Path, labs: &[&RunningLab<RegionLine>], options: &[&str]) -> Child {
    let pids: Vec<u32> = labs.iter().map(|lab| lab.pid()).collect();
    let arguments = [&["--json", "--cpu", "0.1", "--pass-interval", "0", "--watch-time", "0"], options].concat();
    let child = merge_command(state, &pids, &arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    child.expect("the binary runs")
}

/// ksmd scans pages that found no partner in each ninth full scan only, and those of two programs in different scans.
#[test]
fn pages_skipped_by_smart_scan_are_merged() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    if ksm.read_setting("smart_scan").is_none() {
        return println!("skipped: needs smart_scan (Linux 6.7)");
    }
    let state = tempfile::tempdir().unwrap();
    let scans = |scans: i64| {
        let last = ksm.read_counter("full_scans") + scans;
        ksm.write_setting("run", 1);
        wait_until("some full scans", || ksm.read_counter("full_scans") >= last);
        ksm.write_setting("run", 0);
    };
    for (name, value) in [("smart_scan", 1), ("pages_to_scan", 100), ("sleep_millisecs", 1)] {
        ksm.write_setting(name, value);
    }
    let specs = ["--mergeable", "shared-content=skipped:800"];
    let merging = |lab: &RunningLab<RegionLine>| -> u64 {
        fs::read_to_string(format!("/proc/{}/ksm_merging_pages", lab.pid())).unwrap().trim().parse().unwrap()
    };
    // By chance ksmd may scan both labs in the same scans, so try several delays.
    let labs = (0..5).find_map(|extra_scans| {
        let one = RunningLab::start_layout(&specs).unwrap();
        scans(12 + extra_scans);
        let other = RunningLab::start_layout(&specs).unwrap();
        // The second lab is no longer new when the merge enrolls it: ksmd has scanned it alone.
        scans(30);
        (merging(&other) < 100).then_some([one, other])
    });
    let Some(labs) = labs else { return println!("skipped: ksmd merged all pages by itself") };
    for (name, value) in [("pages_to_scan", 123), ("sleep_millisecs", 77)] {
        ksm.write_setting(name, value);
    }
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let merged = parse_report(&run_merge(state.path(), &labs, &["--json"]), 0);
    assert!(labs.iter().all(|lab| merging(lab) >= 800), "{merged}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn prediction_is_met_and_settings_are_restored() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=m:2000", "unique=3000", "zero=600", "within=300,copies=3"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();

    let planned = parse_report(&run_merge(state.path(), &labs, &["--json", "--dry-run"]), 0);
    assert!(planned["outcome"].is_null());
    assert!(labs.iter().all(|lab| lab.lines().iter().all(|region| enrolled_pages(lab, region) == 0)), "dry run");
    assert!(fs::read_dir(state.path()).unwrap().next().is_none(), "a dry run wrote a journal");
    // One copy of each content stays. `within` has the same 100 contents three times, and they differ between the
    // processes.
    let page = planned["page_size"].as_u64().unwrap();
    let freed = (2000 + 2 * 600 + 2 * 200) * page;
    let gross = planned["plan"]["savings"]["gross"].as_u64().unwrap();
    assert!((freed..freed + 200 * page).contains(&gross), "{gross}, expected {freed} and the labs' own pages");

    let merged = parse_report(&run_merge(state.path(), &labs, &["--json"]), 0);
    let outcome = &merged["outcome"];
    assert_eq!(outcome["end"], "settled", "{outcome}");
    assert!(outcome["saved"].as_u64().unwrap() >= freed, "{outcome}");
    assert!(outcome["failed_changes"].as_array().unwrap().is_empty(), "{outcome}");
    assert!(outcome["stops"].as_u64() >= Some(2), "each process must be stopped at least once");
    assert_differences_explained(&merged);
    assert_eq!(ksm.changed_settings(), []);
    for lab in &labs {
        assert_eq!(enrolled_pages(lab, lab.first_region("unique")), 0, "unprofitable pages must not be enrolled");
        assert_eq!(enrolled_pages(lab, lab.first_region("shared-content")), 2000);
        let status = fs::read_to_string(format!("/proc/{}/status", lab.pid())).unwrap();
        assert!(status.contains("TracerPid:\t0\n") && !status.contains("State:\tT"), "{status}");
    }
    // The kernel's own counters agree: both labs map their 2000 pages to the same frames.
    let sharing = ksm.read_counter("pages_sharing");
    assert!(sharing >= 2400, "{sharing}: {outcome}");

    let second = parse_report(&run_merge(state.path(), &labs, &["--json"]), 0);
    assert!(second["plan"]["savings"]["gross"].as_u64() <= Some(200 * page), "pages left to merge: {second}");
}

/// No KSM counter covers zeros that the kernel frees when it splits a huge page. Every command adds them to its figures
/// and names them.
#[test]
fn merge_and_account_agree_on_guests_with_huge_pages() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    ksm.write_setting("run", 0);
    let state = tempfile::tempdir().unwrap();
    let layout = || RunningLab::start_layout(&["shared-content=split:600", "huge-zero=2048"]).unwrap();
    let labs = [layout(), layout()];
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let merged = parse_report(&run_merge(state.path(), &labs, &["--json"]), 0);
    let (outcome, page) = (&merged["outcome"], merged["page_size"].as_u64().unwrap());
    if outcome["huge_before"].as_u64() < Some(8 << 20) {
        return println!("skipped: the kernel gave no huge pages");
    }
    let split_zero_bytes = outcome["saved_by_splitting"].as_u64().unwrap();
    if split_zero_bytes == 0 {
        return println!("skipped: this kernel does not free zeros when it splits huge pages (before 6.12)");
    }
    assert!(split_zero_bytes > 2048 * page, "splitting must free at least half of the zeros: {outcome}");
    assert!(split_zero_bytes <= outcome["saved"].as_u64().unwrap());
    let account = |arguments: &[&str], state: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        command.arg("account").args(arguments).arg("--state").arg(state);
        let output = command.args(labs.iter().map(|lab| format!("--pid={}", lab.pid()))).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let account_report: Value = serde_json::from_str(&account(&["--json"], state.path())).unwrap();
    let total = &account_report["total"];
    assert_eq!(total["split_zero_pages"].as_u64().map(|pages| pages * page), Some(split_zero_bytes), "{total}");
    let (net, profit) = (outcome["net"].as_i64().unwrap(), total["profit"].as_i64().unwrap());
    let tolerance = 16 * page.cast_signed();
    assert!((net - profit).abs() <= tolerance, "merge reports {net}, account {profit}: {outcome} {total}");
    // Both commands use the same name for them.
    let name = "zeros in split huge pages";
    assert!(account(&[], state.path()).contains(name));
    let second = run_merge(state.path(), &labs, &[]);
    assert!(!String::from_utf8_lossy(&second.stdout).contains(name), "the second merge split huge pages: {second:?}");
    // Without the record of a merge, no figure includes them.
    let without_record: Value = serde_json::from_str(&account(&["--json"], &state.path().join("none"))).unwrap();
    assert_eq!(without_record["total"]["split_zero_pages"], 0);
    assert!(profit - without_record["total"]["profit"].as_i64().unwrap() >= split_zero_bytes.cast_signed() - tolerance);
}

/// Assert that the reported differences add up to the difference between measured and predicted figures, and that the
/// processes have as many more regions as predicted, unless ranges were unenrolled.
fn assert_differences_explained(merged: &Value) {
    let (plan, outcome) = (&merged["plan"], &merged["outcome"]);
    let number = |value: &Value| value.as_f64().unwrap_or_default();
    let is_unenrolled =
        |difference: &Value| difference["reason"].as_str().is_some_and(|reason| reason.starts_with("unenrolled"));
    if !outcome["differences"].as_array().unwrap().iter().any(is_unenrolled) {
        let [predicted, added] = [&plan["regions_added"], &outcome["regions_added"]].map(number);
        assert!(
            (added - predicted).abs() <= predicted / 50.0,
            "{added} regions added, {predicted} predicted: {merged}"
        );
    }
    let metadata = number(&outcome["saved"]) - number(&outcome["net"]);
    for (figure, predicted, measured) in [
        ("saved", &plan["savings"]["gross"], number(&outcome["saved"])),
        ("metadata", &plan["savings"]["metadata"], metadata),
        ("ksmd_seconds", &plan["ksmd_seconds"], number(&outcome["ksmd_seconds"])),
        (
            "available",
            &plan["savings"]["net"],
            number(&outcome["available_after"]) - number(&outcome["available_before"]),
        ),
    ] {
        let differences = outcome["differences"].as_array().unwrap().iter();
        let differences: Vec<&Value> = differences.filter(|difference| difference["figure"] == figure).collect();
        let explained: f64 = differences.iter().map(|difference| number(&difference["amount"])).sum();
        let is_unexplained =
            |difference: &&&Value| difference["reason"].as_str().is_some_and(|why| why.starts_with("not explained"));
        let unexplained: f64 =
            differences.iter().filter(is_unexplained).map(|difference| number(&difference["amount"]).abs()).sum();
        // The merge follows each page; it does not follow durations and other programs' memory.
        let is_tracked = ["saved", "metadata"].contains(&figure);
        assert!(
            !is_tracked || unexplained <= number(predicted) / 50.0,
            "{figure}: {unexplained} not explained: {merged}"
        );
        assert!((explained - (measured - number(predicted))).abs() < 1e-6, "{figure}: {explained} explained: {merged}");
    }
}

#[test]
fn self_enrolled_huge_pages_are_not_split() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["--mergeable", "huge=4096", "shared-content=h:600"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let merged = parse_report(&run_merge(state.path(), &[&labs[0], &labs[1]], &["--json"]), 0);
    let outcome = &merged["outcome"];
    let unenrolled = temporary_unenrolls(&merged);
    assert!(unenrolled.len() == 2 && unenrolled.values().all(|&bytes| bytes >= 4096 * 4096), "{unenrolled:?}");
    assert_eq!(outcome["huge_before"].as_u64(), Some(2 * 4096 * 4096), "{outcome}");
    assert_eq!(outcome["huge_after"], outcome["huge_before"], "{outcome}");
    assert!(outcome["saved"].as_u64() >= Some(600 * 4096), "{outcome}");
    assert_differences_explained(&merged);
    assert!(labs.iter().all(|lab| enrolled_pages(lab, lab.first_region("huge")) == 4096), "not enrolled again");
    assert_eq!(ksm.changed_settings(), []);
}

/// Processes in which no page is profitable, or too few are.
#[test]
fn unprofitable_processes_are_unenrolled() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let pair = ["shared-content=n:2000"];
    let labs = [
        RunningLab::start_layout(&pair).unwrap(),
        RunningLab::start_layout(&pair).unwrap(),
        RunningLab::start_layout(&["--mergeable", "unique=6000"]).unwrap(),
        RunningLab::start_layout(&["--mergeable", "unique=5000", "zero=100"]).unwrap(),
        // A process excluded from enrollment is not changed at all.
        RunningLab::start_with(Command::new(pagefold_labs::client::lab_binary().unwrap()).arg0("ssh-agent").args([
            "layout",
            "--mergeable",
            "unique=4000",
        ]))
        .unwrap(),
    ];
    let targets: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let merged =
        parse_report(&run_merge(state.path(), &targets, &["--json", "--cpu", "100", "--min-profit", "3MiB"]), 0);
    let unenrolled = temporary_unenrolls(&merged);
    assert_eq!(unenrolled.keys().copied().collect::<Vec<_>>(), [labs[2].pid(), labs[3].pid()], "{merged}");
    assert!(unenrolled[&labs[2].pid()] >= 6000 * 4096 && unenrolled[&labs[3].pid()] >= 5000 * 4096, "{unenrolled:?}");
    let chosen: Vec<u64> =
        merged["plan"]["targets"].as_array().unwrap().iter().map(|target| target["pid"].as_u64().unwrap()).collect();
    assert_eq!(chosen, [labs[0].pid(), labs[1].pid()].map(u64::from), "{merged}");
    let skipped = merged["plan"]["skipped"].as_array().unwrap().iter();
    let skipped: BTreeSet<u64> = skipped.map(|process| process["pid"].as_u64().unwrap()).collect();
    assert!(skipped.contains(&labs[3].pid().into()) && skipped.contains(&labs[4].pid().into()), "{skipped:?}");
    let items = |lab: &RunningLab<RegionLine>| {
        let stat = fs::read_to_string(format!("/proc/{}/ksm_stat", lab.pid())).unwrap();
        let items = stat.lines().find_map(|line| line.strip_prefix("ksm_rmap_items ")).unwrap();
        items.parse::<u64>().unwrap()
    };
    // ksmd has kept metadata for the few profitable zero pages that the program enrolled itself, at most.
    assert_eq!(items(&labs[2]), 0, "{merged}");
    assert!(items(&labs[3]) <= 100, "{merged}");
    for lab in &labs[2..] {
        assert_eq!(
            enrolled_pages(lab, lab.first_region("unique")),
            lab.first_region("unique").pages,
            "not enrolled again"
        );
    }
    assert_differences_explained(&merged);
    assert_eq!(ksm.changed_settings(), []);
    // Without anything to merge, the command unenrolls nothing.
    let without_partner = parse_report(&run_merge(state.path(), &[&labs[2]], &["--json"]), 0);
    assert_eq!(
        (&without_partner["plan"]["temporary_unenrolls"], &without_partner["outcome"]),
        (&Value::Array(Vec::new()), &Value::Null),
        "{without_partner}"
    );
}

/// Without an enrolled process ksmd sleeps, and the full scan that the merge waits for never happens.
#[test]
fn merge_ends_when_its_processes_end() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let lab = RunningLab::start_layout(&["within=8000,copies=4"]).unwrap();
    let child = start_slow_merge(state.path(), &[&lab], &[]);
    wait_until("the start of ksmd", || ksm.read_counter("run") == 1);
    assert!(lab.stop().unwrap().success());
    let output = child.wait_with_output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 1)), "{output:?}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn whole_processes_are_enrolled_on_request() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=w:800", "unique=100"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let merged = parse_report(&run_merge(state.path(), &labs, &["--json", "--whole-processes"]), 0);
    assert!(merged["outcome"]["saved"].as_u64().unwrap() >= 800 * 4096, "{merged}");
    for lab in &labs {
        let stat = fs::read_to_string(format!("/proc/{}/ksm_stat", lab.pid())).unwrap();
        assert!(stat.contains("ksm_merge_any: yes"), "{stat}");
    }
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn volatile_pages_are_unenrolled() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    // On a busy machine the lab may write nothing during the watch, and then some pages stay enrolled.
    assert!((0..8).any(|_| is_unenrolled_as_reported(&ksm)), "the lab never wrote all pages during the watch");
}

/// Merge volatile memory; returns whether all of it was unenrolled. The report must count the unenrolled pages.
fn is_unenrolled_as_reported(ksm: &KsmTestGuard) -> bool {
    let state = tempfile::tempdir().unwrap();
    let lab = RunningLab::start_layout(&["zero=4000", "rewritten-zero=4000", "--interval", "20"]).unwrap();
    let output = run_merge(state.path(), &[&lab], &["--json", "--cpu", "100", "--watch-time", "2s"]);
    let merged = parse_report(&output, output.status.code().expect("the merge was killed by a signal"));
    assert_eq!(merged["outcome"]["end"], "settled", "{merged}");
    assert_eq!(enrolled_pages(&lab, lab.first_region("zero")), 4000, "{merged}");
    let unenrolled_pages = 4000 - enrolled_pages(&lab, lab.first_region("rewritten-zero"));
    // The other unenrolled pages are the lab's own.
    let expected = unenrolled_pages..unenrolled_pages + 400;
    let reported = merged["outcome"]["merged_watch"]["unenrolled_pages"].as_u64();
    assert!(reported.is_none_or(|pages| expected.contains(&pages)), "{unenrolled_pages}: {merged}");
    let differences = merged["outcome"]["differences"].as_array().unwrap().iter();
    let why = ["unenrolled: unstable", "unenrolled: no page of it merged"];
    let unstable = differences
        .filter(|difference| difference["figure"] == "saved" && why.iter().any(|why| difference["reason"] == *why));
    let bytes: f64 = unstable.map(|difference| -difference["amount"].as_f64().unwrap()).sum();
    assert!(expected.contains(&((bytes / 4096.0) as u64)), "{unenrolled_pages}: {merged}");
    assert_differences_explained(&merged);
    assert_eq!(ksm.changed_settings(), []);
    if unenrolled_pages == 4000 {
        assert_eq!(output.status.code(), Some(1), "half of the predicted savings are missing: {merged}");
    }
    unenrolled_pages == 4000
}

#[test]
fn merge_yields_to_another_settings_writer() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=y:8000"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let child = start_slow_merge(state.path(), &labs.iter().collect::<Vec<_>>(), &[]);
    wait_until("the start of ksmd", || ksm.read_counter("run") == 1);
    ksm.write_setting("sleep_millisecs", 4321);
    let merged = parse_report(&child.wait_with_output().unwrap(), 3);
    assert_eq!(merged["outcome"]["end"], "yielded", "{merged}");
    assert!(merged["outcome"]["yielded_to"].as_str().unwrap().contains("sleep_millisecs"), "{merged}");
    assert_eq!(ksm.read_counter("sleep_millisecs"), 4321, "the merge must keep a setting that another process wrote");
    assert_eq!(
        [ksm.read_counter("run"), ksm.read_counter("pages_to_scan"), ksm.read_counter("use_zero_pages")],
        [0, 123, 0]
    );
}

#[test]
fn interrupt_ends_merge_with_a_report() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    for more in [&[][..], &["--keep-ksmd-running"]] {
        let specs = ["shared-content=i:8000"];
        let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
        let child = start_slow_merge(state.path(), &labs.iter().collect::<Vec<_>>(), more);
        wait_until("the start of ksmd", || ksm.read_counter("run") == 1);
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let merged = parse_report(&child.wait_with_output().unwrap(), 3);
        assert_eq!(merged["outcome"]["end"], "stopped", "{merged}");
        assert_eq!(ksm.changed_settings(), []);
        // Ranges in which ksmd had not merged anything yet are as before.
        let pages = merged["outcome"]["merged_pages"].as_u64().unwrap();
        for lab in &labs {
            assert!(enrolled_pages(lab, lab.first_region("shared-content")) <= pages * 512, "{merged}");
        }
    }
}

#[test]
fn next_merge_undoes_a_killed_merge() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=k:8000"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let mut child = start_slow_merge(state.path(), &labs, &[]);
    wait_until("the start of ksmd", || ksm.read_counter("run") == 1);
    let busy = run_merge(state.path(), &labs, &[]);
    assert_eq!(busy.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&busy.stderr).contains(&child.id().to_string()), "no pid in the error: {busy:?}");
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(ksm.read_counter("run"), 1, "a killed merge cannot restore settings");
    let recovered =
        Command::new(env!("CARGO_BIN_EXE_pagefold")).arg("recover").arg("--state").arg(state.path()).output();
    let recovered = recovered.unwrap();
    assert_eq!(recovered.status.code(), Some(0), "{recovered:?}");
    assert_eq!(ksm.changed_settings(), []);
    for lab in &labs {
        let status = fs::read_to_string(format!("/proc/{}/status", lab.pid())).unwrap();
        assert!(status.contains("TracerPid:\t0\n") && !status.contains("State:\tT"), "{status}");
    }
}

#[test]
fn keep_leaves_ksmd_running_slowly() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let lab = RunningLab::start_layout(&["zero=2000"]).unwrap();
    parse_report(&run_merge(state.path(), &[&lab], &["--json", "--keep-ksmd-running"]), 0);
    assert_eq!(
        [ksm.read_counter("run"), ksm.read_counter("pages_to_scan"), ksm.read_counter("sleep_millisecs")],
        [1, 100, 1000]
    );
    let pagefold = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).arg("--state").arg(state.path()).output();
        output.expect("the binary runs")
    };
    let restored = pagefold(&["policy", "restore"]);
    assert_eq!(restored.status.code(), Some(0), "{restored:?}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn domains_are_merged_only_on_request() {
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=d:800", "within=300,copies=3"];
    let root_lab = RunningLab::start_layout(&specs).unwrap();
    let user_lab = RunningLab::start_layout(&[&["--uid", "65534"], &specs[..]].concat()).unwrap();
    let labs = [&root_lab, &user_lab];
    let refused = run_merge(state.path(), &labs, &["--whole-processes", "--min-profit", "0"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--across-domains"), "{refused:?}");
    let merged = parse_report(&run_merge(state.path(), &labs, &["--json", "--min-profit", "0"]), 0);
    assert!(merged["outcome"]["saved"].as_u64() < Some(800 * 4096), "{merged}");
    for lab in labs {
        assert_eq!(enrolled_pages(lab, lab.first_region("within")), 300, "copies within one process must be enrolled");
    }
    let foreign = [&root_lab, &user_lab].map(|lab| enrolled_pages(lab, lab.first_region("shared-content")));
    assert_eq!(foreign, [0, 0], "content shared only across domains must not be enrolled");
    let across = parse_report(&run_merge(state.path(), &labs, &["--json", "--across-domains"]), 0);
    assert!(across["outcome"]["saved"].as_u64() >= Some(800 * 4096), "{across}");
}

#[test]
fn consecutive_merges_keep_domains_apart() {
    let Some(_ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=s:800", "within=300,copies=3"];
    let root_labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let user_labs: Vec<_> =
        (0..2).map(|_| RunningLab::start_layout(&[&["--uid", "65534"], &specs[..]].concat()).unwrap()).collect();
    let merged =
        parse_report(&run_merge(state.path(), &[&root_labs[0], &root_labs[1]], &["--json", "--min-profit", "0"]), 0);
    assert_eq!(enrolled_pages(&root_labs[0], root_labs[0].first_region("shared-content")), 800, "{merged}");
    let labs: Vec<&RunningLab<RegionLine>> = user_labs.iter().collect();
    let text = run_merge(state.path(), &labs, &["--dry-run", "--min-profit", "0"]);
    let text = String::from_utf8_lossy(&text.stdout).into_owned();
    assert!(text.contains("processes of other trust domains are enrolled already"), "{text}");
    let merged = parse_report(&run_merge(state.path(), &labs, &["--json", "--min-profit", "0"]), 0);
    // Other enrolled processes on this machine count as well.
    assert!(merged["foreign_processes"].as_u64() >= Some(2) && merged["processes"] == 2, "{merged}");
    for lab in labs {
        assert_eq!(enrolled_pages(lab, lab.first_region("shared-content")), 0, "enrolled by root already: {merged}");
    }
    let refused = run_merge(state.path(), &[&user_labs[0], &user_labs[1]], &["--whole-processes"]);
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.stderr).contains("--across-domains"), "{refused:?}");
    let across =
        parse_report(&run_merge(state.path(), &[&user_labs[0], &user_labs[1]], &["--json", "--across-domains"]), 0);
    assert!(across["outcome"]["saved"].as_u64() >= Some(800 * 4096), "{across}");
    assert_eq!(enrolled_pages(&user_labs[0], user_labs[0].first_region("shared-content")), 800);
}

#[test]
fn hidden_processes_are_reported() {
    let state = tempfile::tempdir().unwrap();
    let script = "sleep 60 & \"$0\" merge --dry-run --json --pid $! --state \"$1\"; status=$?; kill $!; exit $status";
    let hidden = |within: &[&str], more: &str| {
        let mut command = Command::new(within.first().unwrap_or(&"env"));
        command.args(within.iter().skip(1)).args(["sh", "-c", &script.replace("--json", more)]);
        let output = command.arg(env!("CARGO_BIN_EXE_pagefold")).arg(state.path()).output().unwrap();
        parse_report(&output, 0)["enrolled_may_be_hidden"].clone()
    };
    let namespace = ["unshare", "--pid", "--fork", "--mount-proc"];
    if !nix::unistd::geteuid().is_root()
        || !Command::new("unshare").args(&namespace[1..]).arg("true").status().is_ok_and(|status| status.success())
    {
        return println!("skipped: needs root and unshare(1)");
    }
    assert_eq!(hidden(&namespace, "--json"), true);
    assert_eq!(hidden(&namespace, "--json --whole-processes"), true);
    assert_eq!(hidden(&namespace, "--json --across-domains"), false, "with --across-domains no domains are kept apart");
    let reports_enrolled = fs::read_to_string("/proc/self/ksm_stat").is_ok_and(|stat| stat.contains("ksm_mergeable"));
    assert_eq!(hidden(&[], "--json"), !reports_enrolled, "hidden before Linux 6.14 only");
}

#[test]
fn deadline_ends_merge_and_is_reported() {
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let specs = ["shared-content=t:8000"];
    let labs = [RunningLab::start_layout(&specs).unwrap(), RunningLab::start_layout(&specs).unwrap()];
    let labs: Vec<&RunningLab<RegionLine>> = labs.iter().collect();
    let output = run_merge(state.path(), &labs, &["--cpu", "0.1", "--pass-interval", "0", "--deadline", "1s"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("Ended by its deadline") && text.contains("not merged before the end"), "{text}");
    let all = |lab: &&&RunningLab<RegionLine>| enrolled_pages(lab, lab.first_region("shared-content")) == 8000;
    assert_eq!(labs.iter().filter(all).count(), 0, "{text}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn guests_are_enrolled_by_control_socket() {
    if let Err(why) = GuestAssets::find(&GuestAssets::default_directory()) {
        return println!("skipped: {why}");
    }
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    {
        // QEMU has enrolled all memory of its guests itself.
        let fleet = RunningLab::start_fleet(&[&FLEET_ARGUMENTS[..], &["--name-prefix", "self"]].concat())
            .expect("cannot start guests");
        let pids: Vec<u32> = fleet.lines().iter().map(|guest| guest.pid).collect();
        let output =
            merge_command(state.path(), &pids, &["--json", "--across-domains", "--cpu", "100"]).output().unwrap();
        let merged = parse_report(&output, 0);
        assert!(merged["outcome"]["saved"].as_u64() >= Some(16 << 20), "{merged}");
        let unenrolled_bytes = temporary_unenrolls(&merged).into_values().sum::<u64>();
        assert!(unenrolled_bytes >= 8 << 20, "the merge must unenroll each guest's unique memory: {unenrolled_bytes}");
        assert!(merged["outcome"]["failed_undos"].as_array().unwrap().is_empty(), "{merged}");
        assert!(pids.iter().all(|&pid| is_guest_memory_marked(pid)), "guest memory must be one enrolled region");
    }
    let fleet = RunningLab::start_fleet(&[&FLEET_ARGUMENTS[..], &["--name-prefix", "told", "--no-mem-merge"]].concat())
        .expect("cannot start guests");
    let pids: Vec<u32> = fleet.lines().iter().map(|guest| guest.pid).collect();
    assert!(!pids.iter().any(|&pid| is_guest_memory_marked(pid)));
    let dry_run_options = ["--json", "--across-domains", "--dry-run", "--pass-interval", "0"];
    let planned = parse_report(&merge_command(state.path(), &pids, &dry_run_options).output().unwrap(), 0);
    assert!(planned["plan"]["targets"].as_array().unwrap().is_empty(), "{planned}");
    assert!(planned.to_string().contains("its owner forbids merging: mem-merge=off"), "{planned}");
    let whole_process_options = ["--json", "--across-domains", "--whole-processes", "--cpu", "100", "--ignore-opt-out"];
    let merged = parse_report(&merge_command(state.path(), &pids, &whole_process_options).output().unwrap(), 0);
    assert!(merged["outcome"]["saved"].as_u64() >= Some(16 << 20), "{merged}");
    assert_eq!(merged["outcome"]["stops"], 0, "a merge by control socket must stop no thread: {merged}");
    assert!(pids.iter().all(|&pid| is_guest_memory_marked(pid)));
    assert_eq!(enroll_methods(&merged), BTreeMap::from_iter(pids.into_iter().map(|pid| (pid, "qmp".to_owned()))));
    assert_eq!(ksm.changed_settings(), []);
}

/// Guests of 112 MiB.
const FLEET_ARGUMENTS: [&str; 8] = ["--guests", "2", "--memory", "112", "--shared-mib", "16", "--unique-mib", "8"];

/// Whether the memory of a guest, which is one region, is marked mergeable.
fn is_guest_memory_marked(pid: u32) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut is_ram, mut found) = (false, Vec::new());
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Size:") {
            is_ram = size.trim() == "114688 kB";
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_ram) {
            found.push(flags.split(' ').any(|flag| flag == "mg"));
        }
    }
    assert_eq!(found.len(), 1, "{smaps}");
    found[0]
}

/// Bytes unenrolled from each process while ksmd works.
fn temporary_unenrolls(merged: &Value) -> BTreeMap<u32, u64> {
    let unenrolls = merged["plan"]["temporary_unenrolls"].as_array().unwrap().iter();
    let number = |range: &Value, field: &str| range[field].as_u64().unwrap();
    unenrolls.map(|range| (number(range, "pid") as u32, number(range, "bytes"))).collect()
}

/// How each target of a merge was enrolled.
fn enroll_methods(merged: &Value) -> BTreeMap<u32, String> {
    let targets = merged["plan"]["targets"].as_array().unwrap().iter();
    let pid_and_method =
        |target: &Value| (target["pid"].as_u64().unwrap() as u32, target["method"].as_str().unwrap().to_owned());
    targets.map(pid_and_method).collect()
}

#[test]
fn guest_with_busy_control_socket_is_unchanged() {
    if let Err(why) = GuestAssets::find(&GuestAssets::default_directory()) {
        return println!("skipped: {why}");
    }
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let state = tempfile::tempdir().unwrap();
    let fleet = RunningLab::start_fleet(&[&FLEET_ARGUMENTS[..], &["--name-prefix", "held", "--no-mem-merge"]].concat())
        .expect("cannot start guests");
    let [busy_guest, free_guest] = fleet.lines() else { panic!("the fleet must have two guests") };
    let pids = [busy_guest.pid, free_guest.pid];
    let connection = UnixStream::connect(&busy_guest.qmp).unwrap();
    BufReader::new(&connection).read_line(&mut String::new()).unwrap();

    let options = ["--across-domains", "--whole-processes", "--cpu", "100", "--pass-interval", "0", "--ignore-opt-out"];
    let merge = |more: &[&str]| merge_command(state.path(), &pids, &[&options[..], more].concat()).output().unwrap();
    let dry = merge(&["--dry-run"]);
    let text = String::from_utf8_lossy(&dry.stdout);
    assert_eq!(dry.status.code(), Some(3), "{text}");
    assert!(text.contains(&format!("Would not be enrolled: {} (held-0): ", busy_guest.pid)), "{text}");
    let merged = parse_report(&merge(&["--json"]), 3);
    assert_eq!(
        enroll_methods(&merged),
        BTreeMap::from([(busy_guest.pid, "none".to_owned()), (free_guest.pid, "qmp".to_owned())])
    );
    let failed_changes = &merged["outcome"]["failed_changes"];
    assert_eq!(
        (failed_changes.as_array().unwrap().len(), &failed_changes[0]["pid"]),
        (1, &busy_guest.pid.into()),
        "{merged}"
    );
    let why = failed_changes[0]["why"].as_str().unwrap();
    assert!(why.contains("virsh qemu-monitor-command") && why.contains("`--inject`"), "{why}");
    assert_eq!(merged["outcome"]["stops"], 0, "a merge by control socket must stop no thread: {merged}");
    assert_eq!(pids.map(is_guest_memory_marked), [false, true]);
    let output = merge(&["--qmp", &busy_guest.qmp]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("--qmp applies to one virtual machine, but 2 are selected"), "{stderr}");
    let output = merge_command(state.path(), &pids[..1], &[&options[..], &["--qmp", &busy_guest.qmp]].concat())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("virsh qemu-monitor-command"), "{output:?}");

    let injected = merge(&["--json", "--inject"]);
    // This test does not check how much the merge saves.
    assert!(matches!(injected.status.code(), Some(0 | 1)), "{injected:?}");
    let merged = parse_report(&injected, injected.status.code().unwrap());
    assert!(enroll_methods(&merged).values().all(|method| method == "whole"), "{merged}");
    assert!(is_guest_memory_marked(busy_guest.pid), "{merged}");
    assert_eq!(ksm.changed_settings(), []);
}

#[test]
fn invalid_input_fails_with_one_line_and_no_change() {
    let assert_refused = |output: &Output, message: &str| {
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
        assert!(stderr.contains(message), "{stderr}");
    };
    let state = tempfile::tempdir().unwrap();
    let recording = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/recordings/linux-6.18");
    let mut recorded = merge_command(state.path(), &[], &[]);
    recorded.args(["--host", &format!("recording:{recording}")]);
    assert_refused(&recorded.output().unwrap(), "a recording cannot be changed");
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    let no_process = merge_command(state.path(), &[u32::MAX / 4], &[]).output().unwrap();
    assert_refused(&no_process, "there is no process");
    assert_refused(&no_process, "run pagefold in the other one");
    let lab = RunningLab::start_layout(&["zero=2000"]).unwrap();
    let no_guest =
        merge_command(state.path(), &[lab.pid()], &["--whole-processes", "--qmp", "/nowhere"]).output().unwrap();
    assert_refused(&no_guest, "is not a virtual machine");
    // A mount namespace in which /sys is read-only.
    let script = r#"mount -o remount,bind,ro /sys && exec "$0" merge --state "$1" --pid $$"#;
    let state_text = state.path().to_str().unwrap();
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_pagefold"), state_text])
        .output()
        .expect("cannot start unshare(1), a part of util-linux");
    assert_refused(&output, "Read-only file system");
    assert_eq!(ksm.changed_settings(), []);
}
