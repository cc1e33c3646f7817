//! What the read-only commands make of a host on which something fails.
//!
//! The host is the recording `linux-6.18`. Each path that a command asks for fails in each way, one at a time, and a
//! command must then say less and never something else: no panic, no figure that became zero, no process that is
//! missing from both what was seen and what was not.

use crate::arguments::{Global, When};
use crate::command::account::{Taken, take};
use crate::output;
use pagefold_account::decide::{Basis, GroupBy};
use pagefold_account::wire::{AccountReport, Input, Whole};
use pagefold_base::domain::DomainRule;
use pagefold_base::{Absent, AddressRange, Counts, PageSize, Pages, Pfn, Pid, ProcessId, Reading};
use pagefold_census::results::Census;
use pagefold_census::wire::{CensusReport, Context};
use pagefold_census::{Progress, Selection};
use pagefold_doctor::examine;
use pagefold_doctor::wire::DoctorReport;
use pagefold_host::act::{Action, Effect, Refusal};
use pagefold_host::faulty::{Fault, Faulty};
use pagefold_host::{FrameFlags, Host, Mapping, PageView, Process, Run, Way};
use pagefold_output::text::Style;
use pagefold_recording::Recording;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18")
}

fn recording() -> Recording {
    Recording::open(&folder()).expect("the recording")
}

fn plain() -> Style {
    output::style(&Global {
        host: "recording".to_owned(),
        color: When::Never,
        state: std::path::PathBuf::new(),
        config: None,
    })
}

/// Every fault of every path that `command` asks for, each by itself: `check` gets the path, the fault and the host.
fn each_fault<T>(command: impl Fn(&dyn Host) -> T, check: impl Fn(&str, &Fault, T)) {
    let recording = recording();
    let asked = Mutex::new(BTreeSet::new());
    command(&Faulty::new(&recording, |path| {
        asked.lock().unwrap().insert(path.to_owned());
        None
    }));
    let asked = asked.into_inner().unwrap();
    assert!(asked.len() > 40, "{asked:?}");
    for path in &asked {
        for fault in faults(path) {
            let faulty = Faulty::new(&recording, |asked| (asked == path).then(|| fault.clone()));
            let outcome = catch_unwind(AssertUnwindSafe(|| check(path, &fault, command(&faulty))));
            assert!(outcome.is_ok(), "{path}: {fault:?}");
        }
    }
}

fn faults(path: &str) -> Vec<Fault> {
    let reasons =
        [Absent::Denied, Absent::Vanished, Absent::NotOnThisKernel, Absent::Malformed("input/output error".to_owned())];
    let mut faults: Vec<Fault> = reasons.into_iter().map(Fault::Absent).collect();
    if path.ends_with("#contents") {
        faults.push(Fault::HalfGone);
    }
    if let Ok(bytes) = std::fs::read(folder().join("files").join(path)) {
        let lengths = BTreeSet::from([0, 1, bytes.len() / 3, bytes.len() * 2 / 3, bytes.len().saturating_sub(2)]);
        faults.extend(lengths.into_iter().filter(|&length| length < bytes.len()).map(Fault::Truncated));
        let garbage = |seed: u32| (0..999_u32).map(|i| (i.wrapping_mul(seed) >> 21) as u8).collect();
        faults.extend(
            [garbage(2_654_435_761), b"-1\n".to_vec(), b"18446744073709551616\n".to_vec()].map(Fault::Replaced),
        );
    }
    faults
}

/// Whether the fault is that a process went away, of which an empty smaps is a sign.
fn vanished(path: &str, fault: &Fault) -> bool {
    let empty = path.ends_with("/smaps") && *fault == Fault::Truncated(0);
    path.starts_with("proc/") && (empty || *fault == Fault::Absent(Absent::Vanished))
}

/// Whether a fault is of a file whose text cannot be told from another that is as good: a number from its first digits,
/// a command line or a cgroup from any bytes.
fn forged(path: &str, fault: &Fault) -> bool {
    matches!(fault, Fault::Truncated(_) | Fault::Replaced(_)) && !path.ends_with("smaps")
}

fn take_census(host: &dyn Host) -> Result<Census, pagefold_census::Error> {
    let options = pagefold_census::Options {
        selection: Selection::default(),
        domains: DomainRule::User.into(),
        settle: Duration::ZERO,
        threads: 1,
        sample: None,
        seed: 0,
        top: 4,
        rows: 4,
        matrix: Default::default(),
        ..Default::default()
    };
    pagefold_census::take(host, &options, &Progress::default(), &AtomicBool::new(false)).map(|(census, _)| census)
}

/// Report, print, and hold the sums against each other.
fn census_report(census: &Census) -> CensusReport {
    let mut all = Counts::default();
    for subject in &census.subjects {
        let mut sum = Counts::default();
        for region in &subject.regions {
            assert!(region.counts.resident().0 * 4096 <= region.region.rss.0, "{:?}", region.region);
            sum += region.counts;
        }
        assert_eq!(sum, subject.counts, "{:?}", subject.process);
        all += sum;
    }
    assert_eq!(all, census.counts);
    let page_size = PageSize::new(4096).unwrap();
    let report = CensusReport::of(census, &Context { host: "faulty".to_owned(), page_size, top: 4 });
    let view = pagefold_census::text::View { top: 4, regions: true, extents: true, remedy: "" };
    assert!(!pagefold_census::text::render(&report, view, plain()).is_empty());
    report
}

#[test]
fn a_census_says_what_it_did_not_count() {
    let truth = take_census(&recording()).unwrap();
    assert!(!census_report(&truth).is_incomplete());
    let resident: BTreeMap<Pid, Pages> =
        truth.subjects.iter().map(|subject| (subject.process.id.pid, subject.counts.resident())).collect();
    assert_eq!(resident.len(), 5);
    each_fault(take_census, |path, fault, outcome| {
        let census = match outcome {
            Ok(census) => census,
            Err(error) => return assert_eq!(path, "proc", "{error}"),
        };
        let report = census_report(&census);
        if vanished(path, fault) {
            return;
        }
        let mut counted = census.gone + census.unread;
        let mut missing = Pages::ZERO;
        for (pid, resident) in &resident {
            let unseen = census.unseen.iter().any(|unseen| unseen.pid == *pid);
            match census.subjects.iter().find(|subject| subject.process.id.pid == *pid) {
                Some(subject) if unseen && subject.counts.resident() < *resident => missing += *resident,
                Some(subject) => counted += subject.counts.resident(),
                None => {
                    assert!(unseen, "{pid} is neither seen nor unseen");
                    missing += *resident;
                }
            }
        }
        if missing == Pages::ZERO {
            assert_eq!(counted, truth.counts.resident(), "pages are gone without a word");
        } else {
            assert!(report.is_incomplete());
        }
        if path.ends_with("/smaps")
            || path.ends_with("#resident")
            || (path.ends_with("#contents") && *fault != Fault::HalfGone)
        {
            assert!(report.is_incomplete(), "nobody is told that pages were not counted");
        }
        if *fault == Fault::HalfGone {
            assert!(census.gone > Pages::ZERO);
        }
    });
}

fn account_report(taken: &Taken) -> AccountReport {
    let (accounts, unseen, whole) = taken;
    let report = AccountReport::of(&Input {
        host: "faulty".to_owned(),
        page_size: PageSize::new(4096).unwrap(),
        by: GroupBy::Cgroup,
        accounts,
        unseen,
        reconciliation: whole.as_ref().map(|(reconciliation, processes, unseen)| Whole {
            reconciliation,
            processes: *processes,
            unseen,
        }),
        seconds: 0.0,
    });
    assert!(!pagefold_account::text::render(&report, 9, "", plain()).is_empty());
    report
}

#[test]
fn an_account_has_the_true_figures_or_says_that_they_are_not() {
    let account = |host: &dyn Host| take(host, &Selection::default(), true, Ok(Default::default()));
    let truth = account(&recording()).unwrap().0;
    assert!(truth.len() == 5 && truth.iter().all(|account| account.footprint.basis == Basis::Exact));
    each_fault(account, |path, fault, outcome| {
        let taken = match outcome {
            Ok(taken) => taken,
            Err(error) => return assert_eq!(path, "proc", "{error}"),
        };
        let report = account_report(&taken);
        let (accounts, unseen, _) = &taken;
        for truth in &truth {
            let id = truth.process.id;
            let Some(account) = accounts.iter().find(|account| account.process.id.pid == id.pid) else {
                let told = unseen.iter().any(|unseen| unseen.pid == id.pid);
                assert!(told || vanished(path, fault), "{id:?} is neither seen nor unseen");
                assert!(!told || report.is_incomplete());
                continue;
            };
            let (found, truth) = (&account.footprint, &truth.footprint);
            match found.basis {
                Basis::Exact => {
                    assert_eq!((found.rss, &found.fair, found.ksm), (truth.rss, &truth.fair, truth.ksm), "{id:?}");
                }
                Basis::Estimated(_) => assert!(found.rss.0 > 0 && report.is_incomplete(), "{id:?}"),
            }
            if !forged(path, fault) {
                let same = |found: &Reading<u64>, truth: &Reading<u64>| found.is_err() || found == truth;
                assert!(same(&found.rmap_items, &truth.rmap_items) && same(&found.merging_pages, &truth.merging_pages));
                assert!(found.pss.is_err() || found.pss == truth.pss, "{id:?}");
                assert!(found.ksm_zero.is_err() || found.ksm_zero == truth.ksm_zero, "{id:?}");
            }
        }
    });
}

#[test]
fn the_doctor_names_every_process_whose_memory_it_did_not_see() {
    let recording = recording();
    let truth = examine::facts(&recording, &[], &Default::default());
    assert!(DoctorReport::of_host("faulty".to_owned(), &truth).not_seen.is_empty());
    each_fault(
        |host| examine::facts(host, &[], &Default::default()),
        |path, fault, facts| {
            let report = DoctorReport::of_host("faulty".to_owned(), &facts);
            assert!(!pagefold_doctor::text::render(&report, true, plain()).is_empty());
            for process in &facts.processes {
                DoctorReport::of_processes("faulty".to_owned(), &facts, &[process]);
            }
            if path == "proc" {
                return assert!(!report.not_seen.is_empty());
            }
            for truth in &truth.processes {
                let pid = truth.process.id.pid;
                let found = facts.processes.iter().find(|facts| facts.process.id.pid == pid);
                let Some(found) = found else {
                    // A process that is missing from the very beginning is one that is not there.
                    let none = *fault == Fault::Absent(Absent::NotOnThisKernel) && path == format!("proc/{pid}");
                    assert!(none || vanished(path, fault), "{pid} is neither seen nor unseen");
                    continue;
                };
                match &found.regions {
                    Ok(regions) if !forged(path, fault) => {
                        assert_eq!(Ok(regions), truth.regions.as_ref(), "{pid}");
                    }
                    Ok(_) => (),
                    Err(_) => assert!(report.not_seen.iter().any(|not_seen| not_seen.pid == pid.0), "{pid}"),
                }
            }
        },
    );
}

/// A host on which a process ends after it was taken hold of `opened` times, and its number and all its memory are then
/// those of another.
struct Reused<'a> {
    host: &'a Recording,
    pid: Pid,
    opened: usize,
    seen: Mutex<usize>,
}

struct Another<'a> {
    process: Box<dyn Process + 'a>,
    id: ProcessId,
}

impl Host for Reused<'_> {
    fn describe(&self) -> String {
        self.host.describe()
    }

    fn page_size(&self) -> PageSize {
        self.host.page_size()
    }

    fn read(&self, path: &str) -> Reading<Vec<u8>> {
        self.host.read(path)
    }

    fn list(&self, path: &str) -> Reading<Vec<String>> {
        self.host.list(path)
    }

    fn pids(&self) -> Reading<Vec<Pid>> {
        self.host.pids()
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn Process + '_>> {
        let process = self.host.open(pid)?;
        if pid != self.pid {
            return Ok(process);
        }
        let mut seen = self.seen.lock().unwrap();
        *seen += 1;
        let ProcessId { start_time, .. } = process.id();
        let id = ProcessId { pid, start_time: start_time + u64::from(*seen > self.opened) };
        Ok(Box::new(Another { process, id }))
    }

    fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>> {
        self.host.frame_flags(frames)
    }

    fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>> {
        self.host.frame_mappings(frames)
    }

    fn apply(&self, _: &Action) -> Result<Effect, Refusal> {
        Err(Refusal::ReadOnly)
    }
}

impl Process for Another<'_> {
    fn id(&self) -> ProcessId {
        self.id
    }

    fn read(&self, file: &str) -> Reading<Vec<u8>> {
        self.process.read(file)
    }

    fn links(&self, directory: &str) -> Reading<Vec<String>> {
        self.process.links(directory)
    }

    fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<Run>> {
        self.process.resident(ranges)
    }

    fn mappings(&self, range: AddressRange) -> Reading<Vec<Mapping>> {
        self.process.mappings(range)
    }

    fn contents(&self, way: Way, runs: &[Run], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()> {
        self.process.contents(way, runs, sink)
    }
}

#[test]
fn pages_of_a_process_that_got_the_number_of_another_are_nobodys() {
    let recording = recording();
    let truth = take_census(&recording).unwrap();
    let of = |census: &Census, pid: Pid| {
        let subject = census.subjects.iter().find(|subject| subject.process.id.pid == pid);
        subject.map_or(Pages::ZERO, |subject| subject.counts.resident())
    };
    let pid = truth.subjects.iter().max_by_key(|subject| subject.counts.resident()).unwrap().process.id.pid;
    let resident = of(&truth, pid);
    let census = |opened| {
        let host = Reused { host: &recording, pid, opened, seen: Mutex::new(0) };
        let census = take_census(&host).unwrap();
        (census, host.seen.into_inner().unwrap())
    };
    let (undisturbed, opens) = census(usize::MAX);
    assert_eq!(of(&undisturbed, pid), resident);
    assert!(opens >= 3, "{opens}");
    // Before its pages were listed.
    let (before, _) = census(1);
    assert_eq!(of(&before, pid), Pages::ZERO);
    assert_eq!(before.counts.resident(), truth.counts.resident() - resident);
    // While they were read: what was read before stays, the rest is gone.
    let mut last = Pages::ZERO;
    for opened in 2..=opens {
        let (midway, _) = census(opened);
        let seen = of(&midway, pid);
        assert_eq!(seen + midway.gone + midway.unread, resident, "after {opened} of {opens}");
        assert!(seen >= last);
        last = seen;
    }
    let (listed, _) = census(2);
    assert_eq!(of(&listed, pid), Pages::ZERO, "pages of another were attributed");
    assert_eq!(listed.gone, resident);
}
