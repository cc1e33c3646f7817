//! Checks between rounds, over a host in memory.

use super::*;
use crate::decide::plan::{EnrollMethod, MergePlan, PlanTarget, PlannedRange};
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::ksm::Setting;
use pagefold_base::{Absent, AddressRange, Bytes, Pages, ProcessId};
use pagefold_host::action::Action;
use pagefold_host::fake_host::{AdviceFault, FakeHost, MERGED_PAGE_NAME};
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::session::ChangeLifetime;
use std::fs;

const PAGE_BYTES: u64 = 4096;
const PID: u32 = 7;
const RANGE: AddressRange = AddressRange { start: 64 * PAGE_BYTES, end: 128 * PAGE_BYTES };

/// A plan with one range of one process.
fn one_range_plan() -> MergePlan {
    let pages = Pages(64);
    let range = PlannedRange {
        range: RANGE,
        region: RANGE,
        pages,
        merging: pages,
        zero: Pages::ZERO,
        freed_bytes: Bytes(pages.0 * PAGE_BYTES),
        split_huge_pages: Pages::ZERO,
        enrolled: false,
        late: false,
    };
    let process = ProcessId { pid: Pid(PID), start_time: 1 };
    let target = PlanTarget {
        process: Process { comm: "program".to_owned(), ..Process::absent(process, &Absent::Denied) },
        domain: TrustDomain::Host,
        ranges: vec![range],
        huge_page_bytes: Bytes::ZERO,
        enroll_method: EnrollMethod::InProcess,
    };
    MergePlan { targets: vec![target], ..MergePlan::default() }
}

/// A process whose pages were merged and broke at once, and the monitor that saw it.
fn monitor_with_cow_breaks(host: &FakeHost) -> MergeMonitor<'_> {
    host.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
    let mut monitor = MergeMonitor::new(host);
    monitor.begin_plan(&one_range_plan());
    monitor.add_plan(&one_range_plan());
    assert!(!monitor.check_pages(CheckScope::All), "they are merged");
    host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
    host.set_cpu_ticks(PID, 1);
    monitor
}

fn continuous_merge<'h, 'a>(host: &'h FakeHost, directory: &'a Path) -> ContinuousMerge<'h, 'a> {
    ContinuousMerge {
        host,
        directory,
        plan_request: PlanRequest {
            selection: ProcessSelection::default(),
            domains: DomainConfig::default(),
            across_domains: false,
            pass_interval: Duration::ZERO,
            threads: 1,
            whole_processes: false,
            min_profit: Bytes::ZERO,
            ksmd_cpu_share: 1.0,
            max_regions: None,
            max_added_metadata: None,
            split_huge_pages: true,
            excluded_ranges: Default::default(),
            max_matrix_rows: 0,
            explain_differences: false,
        },
        merge_options: merge::MergeOptions {
            ksmd_cpu_share: 1.0,
            deadline: None,
            watch_time: Duration::ZERO,
            after_merge: merge::AfterMerge::UndoChanges,
        },
        exclusion_reason: &|_| None,
    }
}

/// The events of a check.
fn check_and_collect_events<'h>(host: &'h FakeHost, directory: &Path, monitor: &mut MergeMonitor<'h>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut report_event = |event: ContinuousMergeEvent<'_>| {
        lines.push(match event {
            ContinuousMergeEvent::UndoFailed(failed_undo) => failed_undo.to_string(),
            event => panic!("{event:?}"),
        });
    };
    let mut remerge = Remerge::new(host, 1.0);
    continuous_merge(host, directory)
        .check_merged_pages(monitor, &mut remerge, &mut report_event, &AtomicBool::new(false))
        .unwrap();
    lines
}

fn failure_reasons(monitor: &MergeMonitor<'_>) -> Vec<String> {
    monitor.failed_changes().map(|failed| failed.why.clone()).collect()
}

#[test]
fn failed_unenroll_is_retried() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut monitor = monitor_with_cow_breaks(&host);
    for fault in [AdviceFault::BusyAfterPages(0), AdviceFault::MissesRange(RANGE)] {
        host.set_advice_fault(Some(fault));
        assert_eq!(check_and_collect_events(&host, directory.path(), &mut monitor), [""; 0]);
        assert!(!failure_reasons(&monitor).is_empty(), "it was tried");
        assert!(monitor.unenrolled().values().all(|unenrolled| unenrolled.all_ranges().is_empty()), "and failed");
        host.set_cpu_ticks(PID, 2);
    }
    host.set_advice_fault(None);
    host.set_free_kib(0);
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert_eq!(failure_reasons(&monitor), ["there is no memory for copies"]);
    host.set_free_kib(5_000_000);
    monitor.set_max_pressure(10.0);
    let pressure = |percent: u32| {
        let line = |tasks: &str| format!("{tasks} avg10={percent}.00 avg60=0.00 avg300=0.00 total=0\n");
        host.put_file("proc/pressure/memory", &(line("some") + &line("full")));
    };
    pressure(10);
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert_eq!(failure_reasons(&monitor), ["memory is short"]);
    pressure(9);
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert!(failure_reasons(&monitor).is_empty(), "it succeeded in the end");
    assert_eq!(monitor.unenrolled()[&ProcessId { pid: Pid(PID), start_time: 1 }].enrolled_by_pagefold, [RANGE]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

#[test]
fn unmerged_range_unenrolls_without_memory() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
    let mut monitor = MergeMonitor::new(&host);
    monitor.begin_plan(&one_range_plan());
    monitor.add_plan(&one_range_plan());
    monitor.check_pages(CheckScope::All);
    host.set_free_kib(0);
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    let unenrolled = monitor.unenroll_unprofitable(&mut session, UnenrollPhase::AfterInterruption).unwrap();
    assert_eq!(failure_reasons(&monitor), [""; 0]);
    assert_eq!(unenrolled.into_values().collect::<Vec<_>>(), [Pages(64)]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

/// The events at the end, once no process is left to merge.
fn events_at_the_end<'h>(host: &'h FakeHost, directory: &Path, monitor: &mut MergeMonitor<'h>) -> Vec<String> {
    let mut lines = Vec::new();
    let report_event = |event: ContinuousMergeEvent<'_>| {
        lines.push(match event {
            ContinuousMergeEvent::UnenrollFailed(failed) => {
                format!("{} ({}): {}", failed.comm, failed.pid, failed.why)
            }
            event => panic!("{event:?}"),
        });
    };
    continuous_merge(host, directory)
        .run_with_monitor(monitor, Vec::new, report_event, &AtomicBool::new(false))
        .unwrap();
    lines
}

#[test]
fn last_failed_unenrolls_are_reported() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut monitor = monitor_with_cow_breaks(&host);
    host.set_free_kib(0);
    assert_eq!(check_and_collect_events(&host, directory.path(), &mut monitor), [""; 0], "it will be tried again");
    let lines = events_at_the_end(&host, directory.path(), &mut monitor);
    assert_eq!(lines, ["program (7): there is no memory for copies"]);
    host.set_free_kib(5_000_000);
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert_eq!(events_at_the_end(&host, directory.path(), &mut monitor), [""; 0], "it succeeded in the end");
}

#[test]
fn ended_process_has_no_failed_unenrolls() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut monitor = monitor_with_cow_breaks(&host);
    host.set_advice_fault(Some(AdviceFault::BusyAfterPages(0)));
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert!(!failure_reasons(&monitor).is_empty());
    host.remove_process(PID);
    assert!(failure_reasons(&monitor).is_empty());
}

#[test]
fn failed_undo_of_a_killed_run_is_reported() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut monitor = monitor_with_cow_breaks(&host);
    let (mut killed, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    let value = "4321".to_owned();
    killed.apply(&Action::Write { knob: Setting::SleepMillisecs.into(), value }, ChangeLifetime::Temporary).unwrap();
    let journal = fs::read(directory.path().join(ResourceClass::Ksm.journal_file())).unwrap();
    drop(killed);
    fs::write(directory.path().join(ResourceClass::Ksm.journal_file()), journal).unwrap();
    // Another program has written it since.
    host.put_setting("sleep_millisecs", "99");
    let lines = check_and_collect_events(&host, directory.path(), &mut monitor);
    assert!(matches!(&lines[..], [line] if line.contains("sleep_millisecs") && line.contains("99")), "{lines:?}");
    assert!(failure_reasons(&monitor).is_empty(), "and the unstable range was unenrolled");
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

/// Without a scan between rounds they would stay unmerged until the next census.
#[test]
fn stable_broken_pages_are_remerged() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.put_setting("full_scans", "7");
    host.enable_virtual_time();
    let range = AddressRange { start: 1 << 24, end: (1 << 24) + (1 << 14) * PAGE_BYTES };
    host.map_pages(PID, (range.start, range.end), MERGED_PAGE_NAME, true);
    let mut plan = one_range_plan();
    plan.targets[0].ranges[0].range = range;
    let mut monitor = MergeMonitor::new(&host);
    monitor.set_ksmd_share(0.1);
    monitor.begin_plan(&plan);
    monitor.add_plan(&plan);
    monitor.check_pages(CheckScope::All);
    // Each page lasts for some seconds, by the rate over all pages.
    host.sleep(Duration::from_millis(300));
    for start in (range.start..range.end).step_by(20 * PAGE_BYTES as usize) {
        host.map_pages(PID, (start, start + PAGE_BYTES), "", true);
    }
    host.set_cpu_ticks(PID, 1);
    assert_eq!(check_and_collect_events(&host, directory.path(), &mut monitor), [""; 0]);
    let written = host.written_settings();
    let at = |setting: &str| written.iter().position(|line| line == setting);
    assert!(at("smart_scan=0").is_some() && at("smart_scan=0") < at("run=1"), "{written:?}");
    assert!(at("run=1").is_some() && at("run=1") < at("run=0"), "{written:?}");
    assert_eq!((host.setting_value("run"), host.setting_value("smart_scan")), ("0".to_owned(), "1".to_owned()));
    assert!(host.regions(Pid(PID)).unwrap().iter().all(|(.., enrolled)| *enrolled), "nothing was unenrolled");
    // Pages that are still unmerged do not trigger another scan.
    host.set_cpu_ticks(PID, 2);
    check_and_collect_events(&host, directory.path(), &mut monitor);
    assert_eq!(host.written_settings(), written);
}
