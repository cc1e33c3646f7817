//! Tests of unenrolling, on a fake host.

mod adoption;

use super::*;
use pagefold_base::domain::TrustDomain;
use pagefold_base::{AddressRange, Pages, Pid};
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_host::fake_host::{AdviceFault, FakeHost, MERGED_PAGE_NAME};
use pagefold_merge::decide::plan::{EnrollMethod, PlannedRange};
use std::sync::mpsc;

const PAGE_BYTES: u64 = 4096;
const PID: u32 = 7;
/// Percent of time with memory pressure from which nothing is unenrolled.
const MAX_PRESSURE_PERCENT: f64 = 10.0;
const RANGE: AddressRange = AddressRange { start: 64 * PAGE_BYTES, end: 128 * PAGE_BYTES };

fn process() -> ProcessId {
    ProcessId { pid: Pid(PID), start_time: 1 }
}

/// A worker that has acquired the host, and its state directory.
fn worker(host: &FakeHost) -> (Worker<'_>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    // No receiver.
    let (sender, _) = mpsc::channel();
    let mut worker = Worker::new(host, directory.path().to_owned(), sender).unwrap();
    worker.acquire_host().unwrap();
    (worker, directory)
}

/// The plan of each census: the only range of the only process.
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
    let target = PlanTarget {
        process: Process { comm: "program".to_owned(), ..Process::absent(process(), &Absent::Denied) },
        domain: TrustDomain::Host,
        ranges: vec![range],
        huge_page_bytes: Bytes::ZERO,
        enroll_method: EnrollMethod::InProcess,
    };
    MergePlan { targets: vec![target], ..MergePlan::default() }
}

/// The plan that a census at this time would make of the range.
fn plan_at(worker: &mut Worker<'_>, at: Duration) -> MergePlan {
    let mut plan = one_range_plan();
    for (process, ranges) in worker.excluded_ranges(at) {
        plan.exclude_ranges(process, ranges);
    }
    plan
}

/// Merge the range by a plan.
fn merge(worker: &mut Worker<'_>, host: &FakeHost, plan: &MergePlan) {
    host.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
    worker.merge_monitor.add_plan(plan);
    worker.merge_monitor.check_pages(CheckScope::All);
}

/// After two merges with COW breaks the range is tried once more after a longer pause, and then left alone.
#[test]
fn repeated_breaks_back_off_then_exclude() {
    let host = FakeHost::booted();
    let (mut worker, _directory) = worker(&host);
    let second = Duration::from_secs(1);
    let mut now = Duration::ZERO;
    for (number, pause) in [(1, Some(30 * second)), (2, Some(600 * second)), (3, None)] {
        let plan = plan_at(&mut worker, now);
        assert_eq!(plan.targets.len(), 1, "it is merged for the {number}. time");
        merge(&mut worker, &host, &plan);
        assert_eq!(worker.check_merged_pages(true, now).unwrap().unenrolled_bytes, Bytes::ZERO, "not broken yet");
        host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
        host.set_cpu_ticks(PID, number);
        assert_eq!(worker.check_merged_pages(true, now).unwrap().unenrolled_bytes, RANGE.bytes());
        assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
        // Each check counts the unenrolled range, but the same one only once.
        worker.record_cow_breaks(now);
        let Some(pause) = pause else { break };
        assert!(plan_at(&mut worker, now + pause - second).targets.is_empty(), "too soon");
        now += pause;
    }
    assert!(plan_at(&mut worker, now + 1_000_000 * second).targets.is_empty(), "excluded forever");
    // Another process with the same pid is not affected.
    worker.remerge_backoff.retain(|_| false);
    worker.merge_monitor.retain_processes(|_| false);
    assert_eq!(plan_at(&mut worker, now).targets.len(), 1);
}

#[test]
fn double_break_backs_off_longer_at_once() {
    let host = FakeHost::booted();
    let (mut worker, _directory) = worker(&host);
    let (now, second) = (Duration::ZERO, Duration::from_secs(1));
    let plan = plan_at(&mut worker, now);
    merge(&mut worker, &host, &plan);
    for number in [1, 3] {
        worker.check_merged_pages(false, now).unwrap();
        host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
        host.set_cpu_ticks(PID, number);
        worker.check_merged_pages(false, now).unwrap();
        assert_eq!(worker.merge_monitor.lifetime_stats().repeated_cow_breaks > Pages::ZERO, number > 1);
        host.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
        host.set_cpu_ticks(PID, number + 1);
    }
    assert_eq!(worker.check_merged_pages(true, now).unwrap().unenrolled_bytes, RANGE.bytes());
    assert!(plan_at(&mut worker, now + 599 * second).targets.is_empty(), "too soon");
    assert_eq!(plan_at(&mut worker, now + 600 * second).targets.len(), 1);
}

/// An enrolled process; its kernel reports how many of its pages are merged.
fn put_enrolled_process(host: &FakeHost) {
    host.start_process(PID, 64);
    host.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
    set_merging_pages(host, 64);
}

fn set_merging_pages(host: &FakeHost, pages: u64) {
    host.put_file(&format!("proc/{PID}/ksm_merging_pages"), &format!("{pages}\n"));
}

/// Unenroll all ranges of these processes.
fn full_scopes(processes: &[ProcessId]) -> BTreeMap<ProcessId, UnenrollScope> {
    processes.iter().map(|process| (*process, UnenrollScope::AllMerged)).collect()
}

/// Its program, or another run, had enrolled one half of the range.
#[test]
fn unenroll_keeps_ranges_of_the_program() {
    let host = FakeHost::booted();
    host.set_free_kib(5_000_000);
    let middle = 96 * PAGE_BYTES;
    host.start_process(PID, 64);
    host.map_pages(PID, (RANGE.start, middle - PAGE_BYTES), MERGED_PAGE_NAME, true);
    host.map_pages(PID, (middle, RANGE.end), MERGED_PAGE_NAME, true);
    set_merging_pages(&host, 0);
    let (mut worker, _directory) = worker(&host);
    let daemon_scope = BTreeMap::from([(process(), UnenrollScope::DaemonEnrolled)]);
    let marked = || host.regions(Pid(PID)).unwrap().into_iter().map(|(range, _, marked)| (range.start, marked));
    assert_eq!(worker.unenroll(&daemon_scope, MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, true), (middle, true)], "the daemon has enrolled nothing");
    worker.enrolled_ranges.insert(process(), vec![AddressRange { start: middle, end: RANGE.end }]);
    assert_eq!(worker.unenroll(&daemon_scope, MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, true), (middle, false)]);
    assert!(worker.enrolled_ranges.is_empty());
    assert_eq!(worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, false), (middle, false)]);
}

/// Since the last session the program has enrolled the range again, and ksmd may have merged it again.
#[test]
fn repeated_unenroll_needs_memory() {
    let host = FakeHost::booted();
    let (mut worker, _directory) = worker(&host);
    host.start_process(PID, 64);
    let mut plan = one_range_plan();
    plan.targets[0].ranges[0].enrolled = true;
    merge(&mut worker, &host, &plan);
    host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
    host.set_cpu_ticks(PID, 1);
    worker.merge_monitor.check_pages(CheckScope::All);
    worker.merge_monitor.unenroll_unprofitable(worker.session.as_mut().unwrap(), UnenrollPhase::DuringMerge).unwrap();
    assert_eq!(worker.merge_monitor.unenrolled()[&process()].enrolled_by_program, [RANGE]);
    // A range of a later round, below the first one.
    let below = AddressRange { start: 16 * PAGE_BYTES, end: 32 * PAGE_BYTES };
    let mut plan = one_range_plan();
    (plan.targets[0].ranges[0].range, plan.targets[0].ranges[0].enrolled) = (below, true);
    host.map_pages(PID, (below.start, below.end), MERGED_PAGE_NAME, true);
    worker.merge_monitor.add_plan(&plan);
    worker.merge_monitor.check_pages(CheckScope::All);
    host.map_pages(PID, (below.start, below.end), "", true);
    host.set_cpu_ticks(PID, 2);
    worker.merge_monitor.check_pages(CheckScope::All);
    worker.merge_monitor.unenroll_unprofitable(worker.session.as_mut().unwrap(), UnenrollPhase::DuringMerge).unwrap();
    assert_eq!(worker.merge_monitor.unenrolled()[&process()].enrolled_by_program, [RANGE, below]);

    host.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
    let waited = |percent: &str| {
        let lines = ["some", "full"].map(|word| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n"));
        host.put_file("proc/pressure/memory", &lines.concat());
    };
    worker.merge_monitor.set_max_pressure(MAX_PRESSURE_PERCENT);
    let unknown = "the memory available for copies is unknown";
    host.put_file(&format!("proc/{PID}/ksm_merging_pages"), "64\n");
    for (percent, free, why) in [
        ("10.00", Some(5_000_000), "memory is short"),
        ("0.00", None, unknown),
        ("0.00", Some(0), "there is no memory for copies"),
    ] {
        waited(percent);
        match free {
            Some(kib) => host.set_free_kib(kib),
            None => host.put_file("proc/meminfo", ""),
        }
        let missed = worker.merge_monitor.repeat_temporary_unenroll(worker.session.as_mut().unwrap()).unwrap();
        assert_eq!(missed.iter().map(|missed| missed.why.as_str()).collect::<Vec<_>>(), [why]);
        assert!(host.regions(Pid(PID)).unwrap().contains(&(RANGE, MERGED_PAGE_NAME, true)));
    }
    host.set_free_kib(5_000_000);
    assert_eq!(worker.merge_monitor.repeat_temporary_unenroll(worker.session.as_mut().unwrap()).unwrap(), []);
    assert!(host.regions(Pid(PID)).unwrap().contains(&(RANGE, MERGED_PAGE_NAME, false)));
}

#[test]
fn failed_unenroll_reports_the_reason() {
    let host = FakeHost::booted();
    put_enrolled_process(&host);
    let (mut worker, _directory) = worker(&host);
    let exited = ProcessId { pid: Pid(99), start_time: 1 };
    host.set_free_kib(0);
    let waited = |percent: &str| {
        let lines = ["some", "full"].map(|word| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n"));
        host.put_file("proc/pressure/memory", &lines.concat());
    };
    waited("10.00");
    let summary = worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap();
    assert_eq!(summary.failed_unenrolls, [(process(), "memory is short".to_owned())]);
    waited("9.99");
    let summary = worker.unenroll(&full_scopes(&[process(), exited]), MAX_PRESSURE_PERCENT).unwrap();
    assert_eq!(summary.unenrolled, [exited], "it has exited");
    assert_eq!(summary.failed_unenrolls, [(process(), "not enough memory to unmerge its pages".to_owned())]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, MERGED_PAGE_NAME, true)]);

    host.set_free_kib(5_000_000);
    host.set_advice_fault(Some(AdviceFault::BusyAfterPages(0)));
    let busy = worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap();
    assert!(busy.unenrolled.is_empty() && busy.failed_unenrolls[0].1.contains("it does not stop"), "{busy:?}");
    host.set_advice_fault(None);
    let summary = worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap();
    assert_eq!(
        summary.failed_unenrolls,
        [(process(), "it still has merged pages".to_owned())],
        "by its kernel's count"
    );
    put_enrolled_process(&host);
    set_merging_pages(&host, 0);
    assert_eq!(worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, MERGED_PAGE_NAME, false)]);
    worker.session = None;
    assert!(worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).is_err(), "the host was not acquired");
}

/// Pages that are no longer merged because they were unenrolled are not COW breaks.
#[test]
fn operator_unenroll_is_no_cow_break() {
    let host = FakeHost::booted();
    put_enrolled_process(&host);
    let (mut worker, _directory) = worker(&host);
    merge(&mut worker, &host, &one_range_plan());
    set_merging_pages(&host, 0);
    assert_eq!(worker.unenroll(&full_scopes(&[process()]), MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    host.map_pages(PID, (RANGE.start, RANGE.end), "", false);
    host.set_cpu_ticks(PID, 1);
    assert_eq!(worker.check_merged_pages(true, Duration::ZERO).unwrap().unenrolled_bytes, Bytes::ZERO);
    assert_eq!(plan_at(&mut worker, Duration::ZERO).targets.len(), 1, "it may be enrolled again at once");
}

#[test]
fn census_takes_the_threads_that_the_rate_pays_for() {
    assert_eq!([0.0, 0.1, 1.9, 2.0, f64::INFINITY].map(|rate| census_threads(rate, 4)), [1, 1, 1, 2, 4]);
}

/// A PID may be reused between the decision for a census and the census.
#[test]
fn process_with_reused_pid_is_excluded() {
    let parts = [(process(), vec![ScanPart::WHOLE])].into();
    let excluded = exclusion_reason(&parts, &DaemonSettings::default());
    let with_start_time = |start_time| Process::absent(ProcessId { start_time, ..process() }, &Absent::Denied);
    assert_eq!(excluded(&with_start_time(1)), None);
    assert!(excluded(&with_start_time(2)).is_some());
}
