//! What is withdrawn, over a host in memory.

use super::*;
use pagefold_base::domain::Domain;
use pagefold_base::{AddressRange, Pages, Pid};
use pagefold_host::fake::{Fake, MERGED, Trouble};
use pagefold_merge::decide::plan::{PlannedRange, Way};
use std::sync::mpsc;

const PAGE: u64 = 4096;
const PID: u32 = 7;
/// Per cent of time for which memory is waited for, from which on nothing is withdrawn.
const PRESSURE: f64 = 10.0;
const RANGE: AddressRange = AddressRange { start: 64 * PAGE, end: 128 * PAGE };

fn process() -> ProcessId {
    ProcessId { pid: Pid(PID), start_time: 1 }
}

/// A worker that has the host, and where its state is kept.
fn worker(host: &Fake) -> (Worker<'_>, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    // Nobody listens.
    let (tell, _) = mpsc::channel();
    let mut worker = Worker::new(host, directory.path().to_owned(), tell).unwrap();
    worker.hold().unwrap();
    (worker, directory)
}

/// The plan that a census makes each time: the one range of the one process.
fn plan() -> Plan {
    let pages = Pages(64);
    let range = PlannedRange {
        range: RANGE,
        region: RANGE,
        pages,
        merging: pages,
        zero: Pages::ZERO,
        freed: Bytes(pages.0 * PAGE),
        huge_split: Pages::ZERO,
        enrolled: false,
        late: false,
    };
    let target = Target {
        process: Process { comm: "program".to_owned(), ..Process::absent(process(), &Absent::Denied) },
        domain: Domain::Host,
        ranges: vec![range],
        huge: Bytes::ZERO,
        way: Way::Within,
    };
    Plan { targets: vec![target], ..Plan::default() }
}

/// What a census at a time would plan of the range.
fn planned(worker: &mut Worker<'_>, at: Duration) -> Plan {
    let mut plan = plan();
    for (process, ranges) in worker.left_out(at) {
        plan.leave_out(process, ranges);
    }
    plan
}

/// The range is merged by a plan.
fn merge(worker: &mut Worker<'_>, host: &Fake, plan: &Plan) {
    host.map(PID, (RANGE.start, RANGE.end), MERGED, true);
    worker.trial.add(plan);
    worker.trial.look(Whom::All);
}

/// What is merged twice and written too soon is tried once more, after a longer pause, and then left alone.
#[test]
fn what_breaks_again_and_again_is_left_out_of_plans_for_longer_and_then_for_good() {
    let host = Fake::booted();
    let (mut worker, _directory) = worker(&host);
    let second = Duration::from_secs(1);
    let mut now = Duration::ZERO;
    for (number, pause) in [(1, Some(30 * second)), (2, Some(600 * second)), (3, None)] {
        let plan = planned(&mut worker, now);
        assert_eq!(plan.targets.len(), 1, "it is merged for the {number}. time");
        merge(&mut worker, &host, &plan);
        assert_eq!(worker.look(true, now).unwrap().withdrawn, Bytes::ZERO, "it stays so far");
        host.map(PID, (RANGE.start, RANGE.end), "", true);
        host.ran(PID, number);
        assert_eq!(worker.look(true, now).unwrap().withdrawn, RANGE.bytes());
        assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
        // Each look counts what is withdrawn: the same once.
        worker.count_strikes(now);
        let Some(pause) = pause else { break };
        assert!(planned(&mut worker, now + pause - second).targets.is_empty(), "too soon");
        now += pause;
    }
    assert!(planned(&mut worker, now + 1_000_000 * second).targets.is_empty(), "for good");
    // Another program of the same number is not that one.
    worker.strikes.retain(|_| false);
    worker.trial.retain(|_| false);
    assert_eq!(planned(&mut worker, now).targets.len(), 1);
}

#[test]
fn what_broke_twice_before_it_could_be_withdrawn_is_left_alone_for_long_at_once() {
    let host = Fake::booted();
    let (mut worker, _directory) = worker(&host);
    let (now, second) = (Duration::ZERO, Duration::from_secs(1));
    let plan = planned(&mut worker, now);
    merge(&mut worker, &host, &plan);
    for number in [1, 3] {
        worker.look(false, now).unwrap();
        host.map(PID, (RANGE.start, RANGE.end), "", true);
        host.ran(PID, number);
        worker.look(false, now).unwrap();
        assert_eq!(worker.trial.seen().twice > Pages::ZERO, number > 1);
        host.map(PID, (RANGE.start, RANGE.end), MERGED, true);
        host.ran(PID, number + 1);
    }
    assert_eq!(worker.look(true, now).unwrap().withdrawn, RANGE.bytes());
    assert!(planned(&mut worker, now + 599 * second).targets.is_empty(), "too soon");
    assert_eq!(planned(&mut worker, now + 600 * second).targets.len(), 1);
}

/// A process that is enrolled, of which its kernel tells by a count how much is merged.
fn enrolled(host: &Fake) {
    host.start(PID, 64);
    host.map(PID, (RANGE.start, RANGE.end), MERGED, true);
    merging(host, 64);
}

fn merging(host: &Fake, pages: u64) {
    host.file(&format!("proc/{PID}/ksm_merging_pages"), &format!("{pages}\n"));
}

/// All of these.
fn all(processes: &[ProcessId]) -> BTreeMap<ProcessId, Extent> {
    processes.iter().map(|process| (*process, Extent::All)).collect()
}

/// Its program, or somebody before, had one half enrolled.
#[test]
fn only_what_the_daemon_enrolled_is_withdrawn_where_that_is_all_that_is_its_own() {
    let host = Fake::booted();
    host.free(5_000_000);
    let middle = 96 * PAGE;
    host.start(PID, 64);
    host.map(PID, (RANGE.start, middle - PAGE), MERGED, true);
    host.map(PID, (middle, RANGE.end), MERGED, true);
    merging(&host, 0);
    let (mut worker, _directory) = worker(&host);
    let ours = BTreeMap::from([(process(), Extent::Ours)]);
    let marked = || host.regions(Pid(PID)).unwrap().into_iter().map(|(range, _, marked)| (range.start, marked));
    assert_eq!(worker.withdraw(&ours, PRESSURE).unwrap().gone, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, true), (middle, true)], "it has enrolled nothing");
    worker.enrolled.insert(process(), vec![AddressRange { start: middle, end: RANGE.end }]);
    assert_eq!(worker.withdraw(&ours, PRESSURE).unwrap().gone, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, true), (middle, false)]);
    assert!(worker.enrolled.is_empty());
    assert_eq!(worker.withdraw(&all(&[process()]), PRESSURE).unwrap().gone, [process()]);
    assert_eq!(marked().collect::<Vec<_>>(), [(RANGE.start, false), (middle, false)]);
}

/// Since the last session its program's marks are back, and ksmd may have merged it again.
#[test]
fn what_is_withdrawn_again_for_now_needs_the_memory_for_it() {
    let host = Fake::booted();
    let (mut worker, _directory) = worker(&host);
    host.start(PID, 64);
    let mut own = plan();
    own.targets[0].ranges[0].enrolled = true;
    merge(&mut worker, &host, &own);
    host.map(PID, (RANGE.start, RANGE.end), "", true);
    host.ran(PID, 1);
    worker.trial.look(Whom::All);
    worker.trial.withdraw(worker.session.as_mut().unwrap(), Moment::Meanwhile).unwrap();
    assert_eq!(worker.trial.withdrawn()[&process()].own, [RANGE]);
    // Of a later round, below that.
    let below = AddressRange { start: 16 * PAGE, end: 32 * PAGE };
    let mut own = plan();
    (own.targets[0].ranges[0].range, own.targets[0].ranges[0].enrolled) = (below, true);
    host.map(PID, (below.start, below.end), MERGED, true);
    worker.trial.add(&own);
    worker.trial.look(Whom::All);
    host.map(PID, (below.start, below.end), "", true);
    host.ran(PID, 2);
    worker.trial.look(Whom::All);
    worker.trial.withdraw(worker.session.as_mut().unwrap(), Moment::Meanwhile).unwrap();
    assert_eq!(worker.trial.withdrawn()[&process()].own, [RANGE, below]);

    host.map(PID, (RANGE.start, RANGE.end), MERGED, true);
    let waited = |percent: &str| {
        let lines = ["some", "full"].map(|word| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n"));
        host.file("proc/pressure/memory", &lines.concat());
    };
    worker.trial.heed_pressure(PRESSURE);
    let unknown = "it is not known how much memory there is for copies";
    for (percent, merged, free, why) in [
        ("10.00", 64, 5_000_000, "memory is short"),
        ("0.00", -1, 5_000_000, unknown),
        ("0.00", 64, 0, "there is no memory for copies"),
    ] {
        waited(percent);
        host.file(&format!("proc/{PID}/ksm_merging_pages"), &format!("{merged}\n"));
        host.free(free);
        let missed = worker.trial.withdraw_own(worker.session.as_mut().unwrap()).unwrap();
        assert_eq!(missed.iter().map(|missed| missed.why.as_str()).collect::<Vec<_>>(), [why]);
        assert!(host.regions(Pid(PID)).unwrap().contains(&(RANGE, MERGED, true)));
    }
    host.free(5_000_000);
    assert_eq!(worker.trial.withdraw_own(worker.session.as_mut().unwrap()).unwrap(), []);
    assert!(host.regions(Pid(PID)).unwrap().contains(&(RANGE, MERGED, false)));
}

#[test]
fn who_is_not_withdrawn_is_told_with_the_reason() {
    let host = Fake::booted();
    enrolled(&host);
    let (mut worker, _directory) = worker(&host);
    let gone = ProcessId { pid: Pid(99), start_time: 1 };
    host.free(0);
    let waited = |percent: &str| {
        let lines = ["some", "full"].map(|word| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n"));
        host.file("proc/pressure/memory", &lines.concat());
    };
    waited("10.00");
    let short = worker.withdraw(&all(&[process()]), PRESSURE).unwrap();
    assert_eq!(short.refused, [(process(), "memory is short".to_owned())]);
    waited("9.99");
    let short = worker.withdraw(&all(&[process(), gone]), PRESSURE).unwrap();
    assert_eq!(short.gone, [gone], "it has ended");
    assert_eq!(short.refused, [(process(), "there is not the memory for it".to_owned())]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, MERGED, true)]);

    host.free(5_000_000);
    host.trouble(Some(Trouble::BusyAfter(0)));
    let busy = worker.withdraw(&all(&[process()]), PRESSURE).unwrap();
    assert!(busy.gone.is_empty() && busy.refused[0].1.contains("it does not stop"), "{busy:?}");
    host.trouble(None);
    let left = worker.withdraw(&all(&[process()]), PRESSURE).unwrap();
    assert_eq!(left.refused, [(process(), "some of it is merged still".to_owned())], "by its kernel's count");
    enrolled(&host);
    merging(&host, 0);
    assert_eq!(worker.withdraw(&all(&[process()]), PRESSURE).unwrap().gone, [process()]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, MERGED, false)]);
    worker.session = None;
    assert!(worker.withdraw(&all(&[process()]), PRESSURE).is_err(), "the host is not held");
}

/// Pages that are no longer merged because they were withdrawn were not written.
#[test]
fn what_an_operator_withdraws_does_not_count_as_written() {
    let host = Fake::booted();
    enrolled(&host);
    let (mut worker, _directory) = worker(&host);
    merge(&mut worker, &host, &plan());
    merging(&host, 0);
    assert_eq!(worker.withdraw(&all(&[process()]), PRESSURE).unwrap().gone, [process()]);
    host.map(PID, (RANGE.start, RANGE.end), "", false);
    host.ran(PID, 1);
    assert_eq!(worker.look(true, Duration::ZERO).unwrap().withdrawn, Bytes::ZERO);
    assert_eq!(planned(&mut worker, Duration::ZERO).targets.len(), 1, "it may be enrolled again at once");
}
