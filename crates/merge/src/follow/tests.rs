//! Looks between rounds, over a host in memory.

use super::*;
use crate::decide::plan::{Plan, PlannedRange, Target, Way};
use pagefold_base::domain::{Domain, Domains};
use pagefold_base::ksm::Setting;
use pagefold_base::{Absent, AddressRange, Bytes, Pages, ProcessId};
use pagefold_host::act::Action;
use pagefold_host::fake::{Fake, MERGED, Trouble};
use pagefold_host::transaction::journal::SESSION;
use pagefold_host::transaction::session::Stays;
use std::fs;

const PAGE: u64 = 4096;
const PID: u32 = 7;
const RANGE: AddressRange = AddressRange { start: 64 * PAGE, end: 128 * PAGE };

/// A plan of the one range of the one process.
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
    let process = ProcessId { pid: Pid(PID), start_time: 1 };
    let target = Target {
        process: Process { comm: "program".to_owned(), ..Process::absent(process, &Absent::Denied) },
        domain: Domain::Host,
        ranges: vec![range],
        huge: Bytes::ZERO,
        way: Way::Within,
    };
    Plan { targets: vec![target], ..Plan::default() }
}

/// A process whose pages were merged and broke right away, and the trial that saw it.
fn broken(host: &Fake) -> Trial<'_> {
    host.map(PID, (RANGE.start, RANGE.end), MERGED, true);
    let mut trial = Trial::new(host);
    trial.add(&plan());
    assert!(!trial.look(Whom::All), "they are merged");
    host.map(PID, (RANGE.start, RANGE.end), "", true);
    host.ran(PID, 1);
    trial
}

fn follow<'h, 'a>(host: &'h Fake, directory: &'a Path) -> Follow<'h, 'a> {
    Follow {
        host,
        directory,
        request: Request {
            selection: Selection::default(),
            domains: Domains::default(),
            across_domains: false,
            settle: Duration::ZERO,
            threads: 1,
            whole: false,
            min_profit: Bytes::ZERO,
            share: 1.0,
            max_regions: None,
            metadata: None,
            split_huge_pages: true,
            left_out: Default::default(),
            parties: 0,
        },
        how: merge::Options { share: 1.0, deadline: None, watch: Duration::ZERO, after: merge::After::PutBack },
        excluded: &|_| None,
    }
}

/// What a look tells.
fn told<'h>(host: &'h Fake, directory: &Path, trial: &mut Trial<'h>) -> Vec<String> {
    let mut lines = Vec::new();
    let mut tell = |told: Told<'_>| {
        lines.push(match told {
            Told::Remains(remains) => remains.to_string(),
            told => panic!("{told:?}"),
        });
    };
    let mut remerge = Remerge::new(host, 1.0);
    follow(host, directory).look(trial, &mut remerge, &mut tell, &AtomicBool::new(false)).unwrap();
    lines
}

fn refused(trial: &Trial<'_>) -> Vec<String> {
    trial.refused().map(|refused| refused.why.clone()).collect()
}

#[test]
fn what_is_refused_between_rounds_is_told_until_it_is_taken() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut trial = broken(&host);
    for trouble in [Trouble::BusyAfter(0), Trouble::Misses(RANGE)] {
        host.trouble(Some(trouble));
        assert_eq!(told(&host, directory.path(), &mut trial), [""; 0]);
        assert!(!refused(&trial).is_empty(), "it was tried");
        assert!(trial.withdrawn().values().all(|withdrawn| withdrawn.ranges().is_empty()), "and not done");
        host.ran(PID, 2);
    }
    host.trouble(None);
    host.free(0);
    told(&host, directory.path(), &mut trial);
    assert_eq!(refused(&trial), ["there is no memory for copies"]);
    host.free(5_000_000);
    trial.heed_pressure(10.0);
    let pressure = |part: u32| {
        let line = |who: &str| format!("{who} avg10={part}.00 avg60=0.00 avg300=0.00 total=0\n");
        host.file("proc/pressure/memory", &(line("some") + &line("full")));
    };
    pressure(10);
    told(&host, directory.path(), &mut trial);
    assert_eq!(refused(&trial), ["memory is short"]);
    pressure(9);
    told(&host, directory.path(), &mut trial);
    assert!(refused(&trial).is_empty(), "in the end it was taken");
    assert_eq!(trial.withdrawn()[&ProcessId { pid: Pid(PID), start_time: 1 }].ours, [RANGE]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

#[test]
fn what_holds_nothing_merged_needs_no_memory_to_be_withdrawn() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.map(PID, (RANGE.start, RANGE.end), "", true);
    let mut trial = Trial::new(&host);
    trial.add(&plan());
    trial.look(Whom::All);
    host.free(0);
    let (mut session, ..) = Session::begin(&host, directory.path()).unwrap();
    let gone = trial.withdraw(&mut session, Moment::Early).unwrap();
    assert_eq!(refused(&trial), [""; 0]);
    assert_eq!(gone.into_values().collect::<Vec<_>>(), [Pages(64)]);
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

/// What is told at the end, once there is nobody left to merge.
fn told_at_the_end<'h>(host: &'h Fake, directory: &Path, trial: &mut Trial<'h>) -> Vec<String> {
    let mut lines = Vec::new();
    let tell = |told: Told<'_>| {
        lines.push(match told {
            Told::Refused(refused) => format!("{} ({}): {}", refused.comm, refused.pid, refused.why),
            told => panic!("{told:?}"),
        });
    };
    follow(host, directory).go_on(trial, Vec::new, tell, &AtomicBool::new(false)).unwrap();
    lines
}

#[test]
fn what_was_refused_to_the_end_is_told_then() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut trial = broken(&host);
    host.free(0);
    assert_eq!(told(&host, directory.path(), &mut trial), [""; 0], "it is tried again");
    let lines = told_at_the_end(&host, directory.path(), &mut trial);
    assert_eq!(lines, ["program (7): there is no memory for copies"]);
    host.free(5_000_000);
    told(&host, directory.path(), &mut trial);
    assert_eq!(told_at_the_end(&host, directory.path(), &mut trial), [""; 0], "it was taken in the end");
}

#[test]
fn who_has_ended_refuses_nothing() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut trial = broken(&host);
    host.trouble(Some(Trouble::BusyAfter(0)));
    told(&host, directory.path(), &mut trial);
    assert!(!refused(&trial).is_empty());
    host.ended(PID);
    assert!(refused(&trial).is_empty());
}

#[test]
fn what_a_killed_run_left_and_cannot_be_put_back_is_told_at_once() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut trial = broken(&host);
    let (mut killed, ..) = Session::begin(&host, directory.path()).unwrap();
    let value = "4321".to_owned();
    killed.apply(&Action::Set { setting: Setting::SleepMillisecs, value }, Stays::ForNow).unwrap();
    let journal = fs::read(directory.path().join(SESSION)).unwrap();
    drop(killed);
    fs::write(directory.path().join(SESSION), journal).unwrap();
    // Somebody else has written it since.
    host.put("sleep_millisecs", "99");
    let lines = told(&host, directory.path(), &mut trial);
    assert!(matches!(&lines[..], [line] if line.contains("sleep_millisecs") && line.contains("99")), "{lines:?}");
    assert!(refused(&trial).is_empty(), "and what does not last was withdrawn");
    assert_eq!(host.regions(Pid(PID)).unwrap(), [(RANGE, "", false)]);
}

/// Without a scan between rounds they would stay apart until the next census.
#[test]
fn written_pages_that_last_are_merged_again_between_rounds() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.put("full_scans", "7");
    let range = AddressRange { start: 1 << 24, end: (1 << 24) + (1 << 14) * PAGE };
    host.map(PID, (range.start, range.end), MERGED, true);
    let mut plan = plan();
    plan.targets[0].ranges[0].range = range;
    let mut trial = Trial::new(&host);
    trial.grant(0.1);
    trial.add(&plan);
    trial.look(Whom::All);
    // Each lasts for some seconds, by what is seen of all.
    std::thread::sleep(Duration::from_millis(300));
    for start in (range.start..range.end).step_by(20 * PAGE as usize) {
        host.map(PID, (start, start + PAGE), "", true);
    }
    host.ran(PID, 1);
    assert_eq!(told(&host, directory.path(), &mut trial), [""; 0]);
    let written = host.written();
    let at = |setting: &str| written.iter().position(|line| line == setting);
    assert!(at("smart_scan=0").is_some() && at("smart_scan=0") < at("run=1"), "{written:?}");
    assert!(at("run=1").is_some() && at("run=1") < at("run=0"), "{written:?}");
    assert_eq!((host.value("run"), host.value("smart_scan")), ("0".to_owned(), "1".to_owned()));
    assert!(host.regions(Pid(PID)).unwrap().iter().all(|(.., enrolled)| *enrolled), "nothing was unenrolled");
    // What is still apart is not scanned for again.
    host.ran(PID, 2);
    told(&host, directory.path(), &mut trial);
    assert_eq!(host.written(), written);
}
