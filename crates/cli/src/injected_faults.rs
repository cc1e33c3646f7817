//! Tests of the read-only commands on a host where reads fail.
//!
//! The host is the recording `linux-6.18`. Each path that a command reads fails in each way, one at a time. The command
//! may then report less but nothing wrong: no panic, no figure turned to zero. Each process is reported as read or as
//! not read.

use crate::command::account::{AccountResult, take_account};
use crate::command_line::{ColorChoice, GlobalOptions};
use crate::output;
use delegate::delegate;
use pagefold_account::decide::{Basis, GroupBy};
use pagefold_account::wire::{AccountInput, AccountReport, ReconciliationInput};
use pagefold_base::domain::DomainRule;
use pagefold_base::{Absent, AddressRange, PageCounts, PageSize, Pages, Pfn, Pid, ProcessId, Reading};
use pagefold_census::results::Census;
use pagefold_census::wire::{CensusContext, CensusReport};
use pagefold_census::{ProcessSelection, ScanProgress};
use pagefold_doctor::doctor_facts;
use pagefold_doctor::wire::DoctorReport;
use pagefold_host::action::{Action, ActionError, ActionOutcome};
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::guest_agent::{AgentAccess, GuestQuestion};
use pagefold_host::qemu_monitor::{MonitorAccess, MonitorQuestion};
use pagefold_host::{FrameFlags, Hasher, Host, PageRun, PageView, PagemapEntry, ProcessHandle, ReadMethod};
use pagefold_output::text::TextStyle;
use pagefold_recording::Recording;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

fn recording_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/linux-6.18")
}

fn open_recording() -> Recording {
    Recording::open(&recording_folder()).expect("the recording")
}

fn plain_style() -> TextStyle {
    output::stdout_style(&GlobalOptions {
        host: "recording".to_owned(),
        color: ColorChoice::Never,
        state: std::path::PathBuf::new(),
        config: None,
    })
}

/// Inject every fault at every path that `command` reads, one at a time. `check` gets path, fault and result.
fn for_each_fault<T>(command: impl Fn(&dyn Host) -> T, check: impl Fn(&str, &InjectedFault, T)) {
    let recording = open_recording();
    let requested_paths = Mutex::new(BTreeSet::new());
    command(&FaultyHost::new(&recording, |path| {
        requested_paths.lock().unwrap().insert(path.to_owned());
        None
    }));
    let requested_paths = requested_paths.into_inner().unwrap();
    assert!(requested_paths.len() > 40, "{requested_paths:?}");
    for path in &requested_paths {
        for fault in faults_for(path) {
            let faulty = FaultyHost::new(&recording, |requested| (requested == path).then(|| fault.clone()));
            let outcome = catch_unwind(AssertUnwindSafe(|| check(path, &fault, command(&faulty))));
            assert!(outcome.is_ok(), "{path}: {fault:?}");
        }
    }
}

fn faults_for(path: &str) -> Vec<InjectedFault> {
    let reasons =
        [Absent::Denied, Absent::Vanished, Absent::NotOnThisKernel, Absent::Malformed("input/output error".to_owned())];
    let mut faults: Vec<InjectedFault> = reasons.into_iter().map(InjectedFault::Absent).collect();
    if path.ends_with("#contents") {
        faults.push(InjectedFault::HalfNotResident);
    }
    if let Ok(bytes) = std::fs::read(recording_folder().join("files").join(path)) {
        let lengths = BTreeSet::from([0, 1, bytes.len() / 3, bytes.len() * 2 / 3, bytes.len().saturating_sub(2)]);
        faults.extend(lengths.into_iter().filter(|&length| length < bytes.len()).map(InjectedFault::Truncated));
        let garbage = |seed: u32| (0..999_u32).map(|i| (i.wrapping_mul(seed) >> 21) as u8).collect();
        faults.extend(
            [garbage(2_654_435_761), b"-1\n".to_vec(), b"18446744073709551616\n".to_vec()].map(InjectedFault::Replaced),
        );
    }
    faults
}

/// Whether the fault means that a process has ended. An empty smaps means this too.
fn is_process_exit(path: &str, fault: &InjectedFault) -> bool {
    let empty = path.ends_with("/smaps") && *fault == InjectedFault::Truncated(0);
    path.starts_with("proc/") && (empty || *fault == InjectedFault::Absent(Absent::Vanished))
}

/// Whether a fault cannot be detected from the text of the file. A truncated number is still a number; any bytes are a
/// valid command line or cgroup.
fn is_undetectable(path: &str, fault: &InjectedFault) -> bool {
    matches!(fault, InjectedFault::Truncated(_) | InjectedFault::Replaced(_)) && !path.ends_with("smaps")
}

fn take_census(host: &dyn Host) -> Result<Census, pagefold_census::Error> {
    let options = pagefold_census::CensusOptions {
        selection: ProcessSelection::default(),
        domains: DomainRule::User.into(),
        pass_interval: Duration::ZERO,
        threads: 1,
        sample_probability: None,
        sample_seed: 0,
        max_top_contents: 4,
        max_matrix_rows: 4,
        matrix_row_kind: Default::default(),
        ..Default::default()
    };
    pagefold_census::take_census(host, &options, &ScanProgress::default(), &AtomicBool::new(false))
        .map(|(census, _)| census)
}

/// Build and render the report, and check that the sums agree.
fn check_census_report(census: &Census) -> CensusReport {
    let mut total = PageCounts::default();
    for subject in &census.subjects {
        let mut sum = PageCounts::default();
        for region in &subject.regions {
            assert!(region.counts.resident().0 * 4096 <= region.region.rss.0, "{:?}", region.region);
            sum += region.counts;
        }
        assert_eq!(sum, subject.counts, "{:?}", subject.process);
        total += sum;
    }
    assert_eq!(total, census.counts);
    let page_size = PageSize::new(4096).unwrap();
    let report =
        CensusReport::from_census(census, &CensusContext { host: "faulty".to_owned(), page_size, max_extents: 4 });
    let view = pagefold_census::text::CensusView { max_rows: 4, show_regions: true, show_extents: true, remedy: "" };
    assert!(!pagefold_census::text::render(&report, view, plain_style()).is_empty());
    report
}

#[test]
fn census_names_what_it_did_not_count() {
    let truth = take_census(&open_recording()).unwrap();
    assert!(!check_census_report(&truth).is_incomplete());
    let resident: BTreeMap<Pid, Pages> =
        truth.subjects.iter().map(|subject| (subject.process.id.pid, subject.counts.resident())).collect();
    assert_eq!(resident.len(), 5);
    for_each_fault(take_census, |path, fault, outcome| {
        let census = match outcome {
            Ok(census) => census,
            Err(error) => return assert_eq!(path, "proc", "{error}"),
        };
        let report = check_census_report(&census);
        if is_process_exit(path, fault) {
            return;
        }
        let mut counted = census.gone + census.unread;
        let mut missing = Pages::ZERO;
        for (pid, resident) in &resident {
            let is_unscanned = census.unscanned.iter().any(|process| process.pid == *pid);
            match census.subjects.iter().find(|subject| subject.process.id.pid == *pid) {
                Some(subject) if is_unscanned && subject.counts.resident() < *resident => missing += *resident,
                Some(subject) => counted += subject.counts.resident(),
                None => {
                    assert!(is_unscanned, "{pid} is reported neither as read nor as unread");
                    missing += *resident;
                }
            }
        }
        if missing == Pages::ZERO {
            assert_eq!(counted, truth.counts.resident(), "pages are missing and not reported");
        } else {
            assert!(report.is_incomplete());
        }
        if path.ends_with("/smaps")
            || path.ends_with("#resident")
            || (path.ends_with("#contents") && *fault != InjectedFault::HalfNotResident)
        {
            assert!(report.is_incomplete(), "the report does not say that pages were not counted");
        }
        if *fault == InjectedFault::HalfNotResident {
            assert!(census.gone > Pages::ZERO);
        }
    });
}

fn check_account_report(result: &AccountResult) -> AccountReport {
    let (accounts, unscanned, reconciliation) = result;
    let report = AccountReport::from_input(&AccountInput {
        host: "faulty".to_owned(),
        page_size: PageSize::new(4096).unwrap(),
        group_by: GroupBy::Cgroup,
        accounts,
        unscanned,
        reconciliation: reconciliation.as_ref().map(|(reconciliation, processes, unscanned)| ReconciliationInput {
            reconciliation,
            processes: *processes,
            unscanned,
        }),
        seconds: 0.0,
    });
    assert!(!pagefold_account::text::render(&report, 9, "", plain_style()).is_empty());
    report
}

#[test]
fn account_is_exact_or_says_it_is_not() {
    let account = |host: &dyn Host| take_account(host, &ProcessSelection::default(), true, Ok(Default::default()));
    let truth = account(&open_recording()).unwrap().0;
    assert!(truth.len() == 5 && truth.iter().all(|account| account.footprint.basis == Basis::Exact));
    for_each_fault(account, |path, fault, outcome| {
        let taken = match outcome {
            Ok(taken) => taken,
            Err(error) => return assert_eq!(path, "proc", "{error}"),
        };
        let report = check_account_report(&taken);
        let (accounts, unscanned, _) = &taken;
        for truth in &truth {
            let id = truth.process.id;
            let Some(account) = accounts.iter().find(|account| account.process.id.pid == id.pid) else {
                let is_unscanned = unscanned.iter().any(|unscanned| unscanned.pid == id.pid);
                assert!(
                    is_unscanned || is_process_exit(path, fault),
                    "{id:?} is reported neither as read nor as unread"
                );
                assert!(!is_unscanned || report.is_incomplete());
                continue;
            };
            let (found, truth) = (&account.footprint, &truth.footprint);
            match found.basis {
                Basis::Exact => {
                    assert_eq!((found.rss, &found.fair, found.ksm), (truth.rss, &truth.fair, truth.ksm), "{id:?}");
                }
                Basis::Estimated(_) => assert!(found.rss.0 > 0 && report.is_incomplete(), "{id:?}"),
            }
            if !is_undetectable(path, fault) {
                let is_absent_or_equal = |found: &Reading<u64>, truth: &Reading<u64>| found.is_err() || found == truth;
                assert!(
                    is_absent_or_equal(&found.rmap_items, &truth.rmap_items)
                        && is_absent_or_equal(&found.merging_pages, &truth.merging_pages)
                );
                assert!(found.pss.is_err() || found.pss == truth.pss, "{id:?}");
                assert!(found.ksm_zero.is_err() || found.ksm_zero == truth.ksm_zero, "{id:?}");
            }
        }
    });
}

#[test]
fn doctor_names_every_unreadable_process() {
    let recording = open_recording();
    let truth = doctor_facts::gather_host_facts(&recording, &[], &Default::default());
    assert!(DoctorReport::from_host("faulty".to_owned(), &truth).unscanned_processes.is_empty());
    for_each_fault(
        |host| doctor_facts::gather_host_facts(host, &[], &Default::default()),
        |path, fault, facts| {
            let report = DoctorReport::from_host("faulty".to_owned(), &facts);
            assert!(!pagefold_doctor::text::render(&report, true, plain_style()).is_empty());
            for process in &facts.processes {
                DoctorReport::from_processes("faulty".to_owned(), &facts, &[process]);
            }
            if path == "proc" {
                return assert!(!report.unscanned_processes.is_empty());
            }
            for truth in &truth.processes {
                let pid = truth.process.id.pid;
                let found = facts.processes.iter().find(|facts| facts.process.id.pid == pid);
                let Some(found) = found else {
                    // A process whose directory is missing from the start does not exist.
                    let is_missing =
                        *fault == InjectedFault::Absent(Absent::NotOnThisKernel) && path == format!("proc/{pid}");
                    assert!(
                        is_missing || is_process_exit(path, fault),
                        "{pid} is reported neither as read nor as unread"
                    );
                    continue;
                };
                match &found.regions {
                    Ok(regions) if !is_undetectable(path, fault) => {
                        assert_eq!(Ok(regions), truth.regions.as_ref(), "{pid}");
                    }
                    Ok(_) => (),
                    Err(_) => assert!(report.unscanned_processes.iter().any(|process| process.pid == pid.0), "{pid}"),
                }
            }
        },
    );
}

/// A host on which a process ends after it was opened `opens_before_reuse` times. Another process then has its PID and
/// its memory.
struct PidReuseHost<'a> {
    host: &'a Recording,
    pid: Pid,
    opens_before_reuse: usize,
    opens: Mutex<usize>,
}

struct ReusedPidProcess<'a> {
    process: Box<dyn ProcessHandle + 'a>,
    id: ProcessId,
}

impl Host for PidReuseHost<'_> {
    delegate! {
        to self.host {
            fn describe(&self) -> String;
            fn page_size(&self) -> PageSize;
            fn read(&self, path: &str) -> Reading<Vec<u8>>;
            fn list(&self, path: &str) -> Reading<Vec<String>>;
            fn file_mode(&self, path: &str) -> Reading<u32>;
            fn pids(&self) -> Reading<Vec<Pid>>;
            fn frame_flags(&self, frames: &[Pfn]) -> Reading<Vec<FrameFlags>>;
            fn frame_mappings(&self, frames: &[Pfn]) -> Reading<Vec<u64>>;
            fn now(&self) -> Instant;
            fn sleep(&self, duration: Duration);
            fn join_clock(&self);
            fn page_hasher(&self) -> io::Result<Hasher>;
            fn simulation_failure(&self) -> Option<String>;
            fn wait(&self, timeout: Duration, receive: &mut dyn FnMut(Duration) -> bool);
            fn unix_time(&self) -> SystemTime;
            fn own_cpu_time(&self) -> Duration;
            fn thread_cpu_time(&self) -> Duration;
        }
    }

    fn open(&self, pid: Pid) -> Reading<Box<dyn ProcessHandle + '_>> {
        let process = self.host.open(pid)?;
        if pid != self.pid {
            return Ok(process);
        }
        let mut opens = self.opens.lock().unwrap();
        *opens += 1;
        let ProcessId { start_time, .. } = process.id();
        let id = ProcessId { pid, start_time: start_time + u64::from(*opens > self.opens_before_reuse) };
        Ok(Box::new(ReusedPidProcess { process, id }))
    }

    fn apply(&self, _: &Action) -> Result<ActionOutcome, ActionError> {
        Err(ActionError::ReadOnly)
    }
}

impl ProcessHandle for ReusedPidProcess<'_> {
    delegate! {
        to self.process {
            fn read(&self, file: &str) -> Reading<Vec<u8>>;
            fn links(&self, directory: &str) -> Reading<Vec<String>>;
            fn resident(&self, ranges: &[AddressRange]) -> Reading<Vec<PageRun>>;
            fn mappings(&self, range: AddressRange) -> Reading<Vec<PagemapEntry>>;
            fn ask_guest_agent(&self, questions: &[GuestQuestion], access: AgentAccess) -> Reading<Vec<Reading<Vec<u8>>>>;
            fn ask_monitor(&self, questions: &[MonitorQuestion], access: MonitorAccess) -> Reading<Vec<Reading<Vec<u8>>>>;
            fn contents(&self, way: ReadMethod, runs: &[PageRun], sink: &mut dyn FnMut(usize, PageView<'_>)) -> Reading<()>;
        }
    }

    fn id(&self) -> ProcessId {
        self.id
    }
}

#[test]
fn pages_of_a_reused_pid_are_not_counted() {
    let recording = open_recording();
    let truth = take_census(&recording).unwrap();
    let resident_pages = |census: &Census, pid: Pid| {
        let subject = census.subjects.iter().find(|subject| subject.process.id.pid == pid);
        subject.map_or(Pages::ZERO, |subject| subject.counts.resident())
    };
    let pid = truth.subjects.iter().max_by_key(|subject| subject.counts.resident()).unwrap().process.id.pid;
    let resident = resident_pages(&truth, pid);
    let census_after_opens = |opens_before_reuse| {
        let host = PidReuseHost { host: &recording, pid, opens_before_reuse, opens: Mutex::new(0) };
        let census = take_census(&host).unwrap();
        (census, host.opens.into_inner().unwrap())
    };
    let (undisturbed, opens) = census_after_opens(usize::MAX);
    assert_eq!(resident_pages(&undisturbed, pid), resident);
    assert!(opens >= 3, "{opens}");
    // Before its pages were listed.
    let (before, _) = census_after_opens(1);
    assert_eq!(resident_pages(&before, pid), Pages::ZERO);
    assert_eq!(before.counts.resident(), truth.counts.resident() - resident);
    // While they were read: pages read before stay counted, the rest counts as gone.
    let mut previous = Pages::ZERO;
    for opens_before_reuse in 2..=opens {
        let (midway, _) = census_after_opens(opens_before_reuse);
        let counted = resident_pages(&midway, pid);
        assert_eq!(counted + midway.gone + midway.unread, resident, "after {opens_before_reuse} of {opens}");
        assert!(counted >= previous);
        previous = counted;
    }
    let (listed, _) = census_after_opens(2);
    assert_eq!(resident_pages(&listed, pid), Pages::ZERO, "pages of another process were counted");
    assert_eq!(listed.gone, resident);
}
