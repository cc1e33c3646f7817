//! Advice on an in-memory host: it is undone on the advised memory and nowhere else.

use super::*;
use crate::fake_host::{AdviceFault, FakeHostState};
use pagefold_base::Pid;
use pagefold_base::ksm::Setting;
use std::mem;
use std::sync::Mutex;

const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };

fn advise_action(advice: MergeAdvice, ranges: &[(u64, u64)]) -> Action {
    let ranges = ranges.iter().map(|&(start, end)| AddressRange { start, end }).collect();
    Action::Advise { process: PROCESS, advice, ranges }
}

/// A host with a process with two mappings, the first of which is partly enrolled.
fn host() -> FakeHost {
    let host = FakeHost::booted();
    host.put_setting("pages_to_scan", "777");
    host.map_pages(7, (0x10000, 0x20000), "", true);
    host.map_pages(7, (0x20000, 0x24000), "", false);
    host.map_pages(7, (0x40000, 0x44000), "[heap]", true);
    host
}

/// A session that was killed after it had unenrolled ranges of both mappings.
fn kill_after_unenroll(host: &FakeHost, directory: &Path) {
    let mut session = begin_clean_session(host, directory);
    let withdraw =
        advise_action(MergeAdvice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x22000), (0x40000, 0x44000)]);
    session.apply(&withdraw, ChangeLifetime::Temporary).unwrap();
    simulate_kill_before_undo(session, directory);
}

/// The enrolled regions of a process.
fn enrolled_ranges(host: &FakeHost) -> Vec<(u64, u64)> {
    let regions = host.regions(PROCESS.pid).unwrap().into_iter();
    regions.filter(|&(.., enrolled)| enrolled).map(|(range, ..)| (range.start, range.end)).collect()
}

/// Every step of a session is a read of the host, an action or a write of the journal. After a kill at any step, the
/// journal lets the next session undo everything.
#[test]
fn kill_after_any_step_is_undone() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let before = fake.state();
    let journal = directory.path().join(SESSION_FILE);
    // The host's state at each read or action. Only actions change the host, so the state right after one is the state
    // of the next read, with the journal found by that read.
    let states: Mutex<Vec<(FakeHostState, Option<Vec<u8>>)>> = Mutex::default();
    let record_step = |_: &str| {
        states.lock().unwrap().push((fake.state(), fs::read(&journal).ok()));
        None
    };
    let host = FaultyHost::new(&fake, record_step);
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    let unenroll = advise_action(MergeAdvice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x22000)]);
    session.apply(&unenroll, ChangeLifetime::Temporary).unwrap();
    session
        .apply(&advise_action(MergeAdvice::Mergeable, &[(0x21000, 0x23000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    session.apply(&Action::MergeAny { process: PROCESS, enable: true }, ChangeLifetime::Temporary).unwrap();
    session.write_settings(&advisor_settings()).unwrap();
    assert!(session.write_settings(&settings(&[(Setting::MaxPageSharing, "1")])).is_err());
    session.write_settings(&busy_settings()).unwrap();
    assert_eq!(session.stop_durations().len(), 3);
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(session.stop_durations().len(), 7);
    drop(session);
    let mut states = mem::take(&mut *states.lock().unwrap());
    states.push((fake.state(), None));
    let mut changed = 0;
    let mut last = None;
    for (step, (state, journal)) in states.into_iter().enumerate() {
        for stored in [&last, &journal] {
            let (host, directory) = (FakeHost::from_state(&state), tempfile::tempdir().unwrap());
            if let Some(stored) = stored {
                fs::write(directory.path().join(SESSION_FILE), stored).unwrap();
            }
            let (session, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
            assert_eq!(failed, Vec::new(), "step {step}");
            drop(session);
            assert_same_state(&host.state(), &before, step);
            assert!(!directory.path().join(SESSION_FILE).exists(), "step {step}");
            changed += usize::from(state != before);
        }
        last = journal;
    }
    assert!(changed > 50, "{changed}");
}

/// The enrollments of a session stay after its commit, and not before.
#[test]
fn enrollment_stays_after_commit() {
    let enroll = advise_action(MergeAdvice::Mergeable, &[(0x21000, 0x23000)]);
    let before = enrolled_ranges(&host());
    for committed in [false, true] {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        let mut session = begin_clean_session(&host, directory.path());
        session.apply(&enroll, ChangeLifetime::PermanentOnCommit).unwrap();
        assert_ne!(enrolled_ranges(&host), before);
        if committed {
            session.commit().unwrap();
            assert!(!directory.path().join(SESSION_FILE).exists());
        } else {
            simulate_kill_before_undo(session, directory.path());
            assert_eq!(Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap().1.len(), 1);
        }
        assert_eq!(enrolled_ranges(&host) == before, !committed);
    }
}

#[test]
fn undo_keeps_merged_range_without_memory() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = enrolled_ranges(&host);
    let mut session = begin_clean_session(&host, directory.path());
    session
        .apply(&advise_action(MergeAdvice::Mergeable, &[(0x21000, 0x23000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    host.put_file("proc/7/ksm_merging_pages", "2\n");
    host.set_free_kib(4);
    simulate_kill_before_undo(session, directory.path());
    let (session, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert!(matches!(&failed[..], [one] if one.will_retry && one.why.contains("no memory for copies")), "{failed:?}");
    assert_ne!(enrolled_ranges(&host), before);
    drop(session);
    host.set_free_kib(5_000_000);
    assert_eq!(
        Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap().1.len(),
        1,
        "the next session retries"
    );
    assert_eq!(enrolled_ranges(&host), before);
}

#[test]
fn undo_keeps_merged_range_under_pressure() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = enrolled_ranges(&host);
    let mut session = begin_clean_session(&host, directory.path());
    session
        .apply(&advise_action(MergeAdvice::Mergeable, &[(0x21000, 0x23000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    host.set_free_kib(5_000_000);
    let waits = |percent: &str| {
        let line = |word: &str| format!("{word} avg10={percent} avg60=0.00 avg300=0.00 total=1\n");
        host.put_file("proc/pressure/memory", &(line("some") + &line("full")));
    };
    waits("10.00");
    host.put_file("proc/7/ksm_merging_pages", "2\n");
    simulate_kill_before_undo(session, directory.path());
    let (session, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert!(matches!(&failed[..], [one] if one.will_retry && one.why.contains("memory is short")), "{failed:?}");
    assert_ne!(enrolled_ranges(&host), before);
    drop(session);
    waits("9.90");
    assert_eq!(
        Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap().1.len(),
        1,
        "the next session retries"
    );
    assert_eq!(enrolled_ranges(&host), before);

    // A later enrollment of the same process is not undone with the earlier one.
    waits("10.00");
    let mut session = begin_clean_session(&host, directory.path());
    session
        .apply(&advise_action(MergeAdvice::Mergeable, &[(0x21000, 0x23000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    simulate_kill_before_undo(session, directory.path());
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    session
        .apply(&advise_action(MergeAdvice::Mergeable, &[(0x23000, 0x24000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    session.commit().unwrap();
    drop(session);
    waits("0.00");
    assert_eq!(Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap().1, []);
    assert_ne!(enrolled_ranges(&host), before);
}

/// Before 6.14 `ksm_stat` does not report which processes are enrolled whole.
#[test]
fn merge_any_set_before_survives_undo() {
    let merge_any = |on| Action::MergeAny { process: PROCESS, enable: on };
    for (before, is_reported) in [(true, true), (true, false), (false, true), (false, false)] {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        fake.apply(&merge_any(before)).unwrap();
        fake.put_file("proc/7/ksm_merging_pages", "0\n");
        let state = fake.state();
        let hide_report = |path: &str| {
            (!is_reported && path == "proc/7/ksm_stat").then(|| InjectedFault::Replaced(b"ksm_rmap_items 0\n".to_vec()))
        };
        let host = FaultyHost::new(&fake, hide_report);
        let mut session = begin_clean_session(&host, directory.path());
        session.apply(&merge_any(true), ChangeLifetime::PermanentOnCommit).unwrap();
        if before {
            assert!(!directory.path().join(SESSION_FILE).exists(), "nothing changes, and nothing is to be undone");
            drop(session);
        } else {
            simulate_kill_before_undo(session, directory.path());
        }
        let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
        assert_eq!((undone.len(), failed), (usize::from(!before), Vec::new()), "{before} {is_reported}");
        assert_eq!(fake.state(), state, "{before} {is_reported}");
    }
}

/// A process is not enrolled if the enrollment could not be undone.
#[test]
fn unknown_merge_any_refuses_enrollment() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let before = fake.state();
    let refuse_query = |path: &str| (path == "proc/7#ask_merge_any").then_some(InjectedFault::Absent(Absent::Denied));
    let host = FaultyHost::new(&fake, refuse_query);
    let mut session = begin_clean_session(&host, directory.path());
    let result = session.apply(&Action::MergeAny { process: PROCESS, enable: true }, ChangeLifetime::PermanentOnCommit);
    assert!(matches!(result, Err(Error::Refused(ActionError::Denied(_)))), "{result:?}");
    assert_eq!(fake.state(), before);
    assert_eq!(session.undo_all().unwrap(), Vec::new());
}

/// Compares settings and memory. A process without `ksm_merge_any` counts as one that reports no.
fn assert_same_state(current: &FakeHostState, before: &FakeHostState, step: usize) {
    let mut files = current.0.clone();
    if files.get("proc/7/ksm_stat").is_some_and(|stat| stat == "ksm_merge_any: no\n") {
        files.remove("proc/7/ksm_stat");
    }
    assert_eq!((&files, &current.1), (&before.0, &before.1), "step {step}");
}

#[test]
fn new_mapping_is_left_alone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    kill_after_unenroll(&host, directory.path());
    // A larger mapping replaces the first one, and nothing replaces the heap.
    host.map_pages(7, (0x8000, 0x24000), "", false);
    host.unmap_pages(7, (0x40000, 0x44000));
    let (_, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!(enrolled_ranges(&host), []);
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].undo, advise_action(MergeAdvice::Mergeable, &[(0x12000, 0x14000), (0x1e000, 0x20000)]));
    assert!(!failed[0].will_retry);
    begin_clean_session(&host, directory.path());
}

#[test]
fn mapping_smaller_than_range_is_left_alone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    kill_after_unenroll(&host, directory.path());
    host.unmap_pages(7, (0x10000, 0x24000));
    host.map_pages(7, (0x13000, 0x14000), "", false);
    host.map_pages(7, (0x1e000, 0x20000), "", false);
    let (_, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].undo, advise_action(MergeAdvice::Mergeable, &[(0x12000, 0x14000)]));
    // A mapping within the bounds of the old one cannot be distinguished from the remainder of the old one.
    assert_eq!(enrolled_ranges(&host), [(0x1e000, 0x20000), (0x40000, 0x44000)]);
}

#[test]
fn grown_heap_is_the_same_mapping() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    kill_after_unenroll(&host, directory.path());
    host.map_pages(7, (0x44000, 0x60000), "[heap]", false);
    let (_, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!(failed, Vec::new());
    assert_eq!(enrolled_ranges(&host), [(0x10000, 0x20000), (0x40000, 0x44000)]);
}

#[test]
fn missed_range_is_retried() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = host.state();
    let mut session = begin_clean_session(&host, directory.path());
    session
        .apply(
            &advise_action(MergeAdvice::Unmergeable, &[(0x12000, 0x14000), (0x1e000, 0x20000)]),
            ChangeLifetime::Temporary,
        )
        .unwrap();
    host.set_advice_fault(Some(AdviceFault::MissesRange(AddressRange { start: 0x13000, end: 0x1f000 })));
    let failed = session.undo_all().unwrap();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(failed[0].undo, advise_action(MergeAdvice::Mergeable, &[(0x13000, 0x14000), (0x1e000, 0x1f000)]));
    assert!(failed[0].will_retry);
    drop(session);
    host.set_advice_fault(None);
    let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!((undone.len(), failed), (1, Vec::new()));
    assert_eq!(host.state(), before);
}

#[test]
fn partial_change_is_undone_after_busy() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = host.state();
    let mut session = begin_clean_session(&host, directory.path());
    host.set_advice_fault(Some(AdviceFault::BusyAfterPages(1)));
    let withdraw = advise_action(MergeAdvice::Unmergeable, &[(0x12000, 0x14000)]);
    assert!(matches!(session.apply(&withdraw, ChangeLifetime::Temporary), Err(Error::Refused(ActionError::Busy(_)))));
    assert_ne!(host.state(), before);
    host.set_advice_fault(None);
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.state(), before);
}

#[test]
fn entries_of_ended_process_are_dropped() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::Run, "1")])).unwrap();
    session.apply(&advise_action(MergeAdvice::Unmergeable, &[(0x12000, 0x14000)]), ChangeLifetime::Temporary).unwrap();
    session.drop_ended_processes().unwrap();
    assert_eq!(session.journal.entries.len(), 2, "the process is alive");
    host.end_process(PROCESS.pid);
    session.drop_ended_processes().unwrap();
    assert_eq!(session.journal.entries.len(), 1, "entries of settings stay");
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_value("run"), "0");
}
