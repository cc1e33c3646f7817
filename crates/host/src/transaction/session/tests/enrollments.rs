//! Enrollments that stay after their session are recorded, and can be undone later.

use super::*;
use crate::action::MergeAdvice;
use crate::fake_host::FakeHostState;
use crate::transaction::session::enrollments::ENROLLMENTS_FILE;
use std::mem;
use std::sync::Mutex;

const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };
const OTHER_PROCESS: ProcessId = ProcessId { pid: Pid(8), start_time: 1 };

fn ranges(pairs: &[(u64, u64)]) -> Vec<AddressRange> {
    pairs.iter().map(|&(start, end)| AddressRange { start, end }).collect()
}

fn advise(process: ProcessId, advice: MergeAdvice, pairs: &[(u64, u64)]) -> Action {
    Action::Advise { process, advice, ranges: ranges(pairs) }
}

/// A host with two processes; the program of the first one has enrolled a part of its memory itself.
fn host() -> FakeHost {
    let host = FakeHost::booted();
    host.map_pages(7, (0x10000, 0x14000), "", true);
    host.map_pages(7, (0x14000, 0x20000), "", false);
    host.map_pages(8, (0x10000, 0x20000), "", false);
    host
}

fn labels() -> BTreeMap<ProcessId, String> {
    BTreeMap::from([(PROCESS, "one".to_owned()), (OTHER_PROCESS, "two".to_owned())])
}

/// Enroll ranges, and commit them as the daemon does.
fn merge(session: &mut Session<'_>, process: ProcessId, pairs: &[(u64, u64)]) {
    let enroll = advise(process, MergeAdvice::Mergeable, pairs);
    session.apply(&enroll, ChangeLifetime::PermanentOnCommit).unwrap();
    session.record_enrollments(labels());
    session.commit().unwrap();
}

fn begin<'a>(host: &'a dyn Host, directory: &Path) -> Session<'a> {
    Session::begin(host, directory, ResourceClass::Ksm).unwrap().0
}

/// The recorded ranges of a process, with their labels.
fn recorded(session: &Session<'_>, process: ProcessId) -> Vec<(AddressRange, String)> {
    let entries = session.recorded_enrollments().iter().filter(|entry| entry.undo.process() == Some(process));
    entries
        .flat_map(|entry| entry.undo.ranges().iter().map(|range| (*range, entry.purpose.clone().unwrap_or_default())))
        .collect()
}

fn recorded_ranges(session: &Session<'_>, process: ProcessId) -> Vec<AddressRange> {
    recorded(session, process).into_iter().map(|(range, _)| range).collect()
}

#[test]
fn committed_enrollments_are_found_by_the_next_session() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    merge(&mut session, PROCESS, &[(0x12000, 0x18000)]);
    merge(&mut session, OTHER_PROCESS, &[(0x10000, 0x11000)]);
    merge(&mut session, PROCESS, &[(0x1a000, 0x1b000)]);
    // A commit without a request records nothing.
    session
        .apply(&advise(OTHER_PROCESS, MergeAdvice::Mergeable, &[(0x1c000, 0x1d000)]), ChangeLifetime::PermanentOnCommit)
        .unwrap();
    session.commit().unwrap();
    drop(session);
    let session = begin(&host, directory.path());
    let label = |pairs: &[(u64, u64)], label: &str| -> Vec<(AddressRange, String)> {
        ranges(pairs).into_iter().map(|range| (range, label.to_owned())).collect()
    };
    assert_eq!(
        recorded(&session, PROCESS),
        label(&[(0x14000, 0x18000), (0x1a000, 0x1b000)], "one"),
        "without the memory that the program had enrolled"
    );
    assert_eq!(recorded(&session, OTHER_PROCESS), label(&[(0x10000, 0x11000)], "two"));
    drop(session);
    host.put_file("proc/sys/kernel/random/boot_id", "next-boot\n");
    assert!(begin(&host, directory.path()).recorded_enrollments().is_empty(), "a new boot forgets everything");
}

#[test]
fn unenrolled_ranges_leave_the_record() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    merge(&mut session, PROCESS, &[(0x14000, 0x18000), (0x1a000, 0x1b000)]);
    merge(&mut session, OTHER_PROCESS, &[(0x10000, 0x11000)]);
    let unenroll = advise(PROCESS, MergeAdvice::Unmergeable, &[(0x15000, 0x16000), (0x1a000, 0x1b000)]);
    session.apply(&unenroll, ChangeLifetime::Permanent).unwrap();
    let remaining = ranges(&[(0x14000, 0x15000), (0x16000, 0x18000)]);
    assert_eq!(recorded_ranges(&session, PROCESS), remaining);
    drop(session);
    let mut session = begin(&host, directory.path());
    assert_eq!(recorded_ranges(&session, PROCESS), remaining, "also in the file, at the end of the session");
    // A refused range stays recorded.
    let missed = AddressRange { start: 0x16000, end: 0x17000 };
    host.set_advice_fault(Some(AdviceFault::MissesRange(missed)));
    let unenroll = advise(PROCESS, MergeAdvice::Unmergeable, &[(0x14000, 0x18000)]);
    session.apply(&unenroll, ChangeLifetime::Permanent).unwrap();
    session.store_recorded_enrollments().unwrap();
    host.set_advice_fault(None);
    drop(session);
    let mut session = begin(&host, directory.path());
    assert_eq!(recorded_ranges(&session, PROCESS), [missed]);
    let kept = BTreeMap::from([(OTHER_PROCESS, ranges(&[(0, 0x20000)]))]);
    session.retain_recorded_enrollments(&kept).unwrap();
    assert_eq!(recorded_ranges(&session, PROCESS), []);
    assert_eq!(recorded_ranges(&session, OTHER_PROCESS), ranges(&[(0x10000, 0x11000)]));
    session.retain_recorded_enrollments(&BTreeMap::new()).unwrap();
    assert!(!directory.path().join(ENROLLMENTS_FILE).exists());
}

#[test]
fn record_does_not_grow_with_ended_processes() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    for pid in 100..2000 {
        host.map_pages(pid, (0x10000, 0x18000), "", false);
        let process = ProcessId { pid: Pid(pid), start_time: 1 };
        merge(&mut session, process, &[(0x10000, 0x12000), (0x14000, 0x16000)]);
        host.end_process(Pid(pid));
    }
    let size = fs::metadata(directory.path().join(ENROLLMENTS_FILE)).unwrap().len();
    assert!(size < 3 * MIN_APPENDED_BYTES_TO_REWRITE as u64, "{size} bytes");
}

#[test]
fn undo_of_the_record_needs_memory_and_spares_other_mappings() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = host.state();
    let mut session = begin(&host, directory.path());
    merge(&mut session, PROCESS, &[(0x12000, 0x18000)]);
    merge(&mut session, OTHER_PROCESS, &[(0x10000, 0x11000)]);
    drop(session);
    // No memory for copies of the pages of the first process.
    host.put_file("proc/7/ksm_merging_pages", "4\n");
    host.put_file("proc/8/ksm_merging_pages", "0\n");
    host.set_free_kib(4);
    let mut session = begin(&host, directory.path());
    let (undone, failed) = session.undo_recorded_enrollments().unwrap();
    assert_eq!((undone.len(), failed.len()), (1, 1), "{failed:?}");
    assert!(failed[0].will_retry && failed[0].why.contains("no memory for copies"), "{failed:?}");
    assert!(session.recorded_enrollments().is_empty(), "it is the journal's now");
    drop(session);
    host.set_free_kib(5_000_000);
    let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!((undone.len(), failed), (1, Vec::new()), "the next session retries");
    for (path, text) in [("proc/7/ksm_merging_pages", "4\n"), ("proc/8/ksm_merging_pages", "0\n")] {
        assert_eq!(host.state().0.get(path).map(String::as_str), Some(text));
    }
    assert_eq!(host.state().1, before.1);

    // The program has replaced the memory by a larger mapping, and enrolled it itself.
    let mut session = begin(&host, directory.path());
    merge(&mut session, OTHER_PROCESS, &[(0x10000, 0x11000)]);
    drop(session);
    host.map_pages(8, (0x8000, 0x30000), "", true);
    let (undone, failed) = begin(&host, directory.path()).undo_recorded_enrollments().unwrap();
    assert!(undone.is_empty() && matches!(&failed[..], [one] if one.is_overwritten), "{failed:?}");
    assert_eq!(host.regions(Pid(8)).unwrap().len(), 1);
}

/// The files of a state directory.
fn state_files(directory: &Path) -> Vec<(&'static str, Option<Vec<u8>>)> {
    [SESSION_FILE, ENROLLMENTS_FILE].map(|name| (name, fs::read(directory.join(name)).ok())).into()
}

fn put_state_files(directory: &Path, files: &[(&'static str, Option<Vec<u8>>)]) {
    for (name, bytes) in files {
        if let Some(bytes) = bytes {
            fs::write(directory.join(name), bytes).unwrap();
        }
    }
}

/// After a kill at any step of merging and unenrolling, the next session undoes what was not committed, and the record
/// has all that is enrolled otherwise, so that undoing it restores the host.
#[test]
fn kill_after_any_step_leaves_nothing_unrecorded() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let before = fake.state();
    type Step = (FakeHostState, Vec<(&'static str, Option<Vec<u8>>)>);
    let steps: Mutex<Vec<Step>> = Mutex::default();
    let record_step = |_: &str| {
        steps.lock().unwrap().push((fake.state(), state_files(directory.path())));
        None
    };
    let host = FaultyHost::new(&fake, record_step);
    let mut session = begin(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    merge(&mut session, PROCESS, &[(0x12000, 0x18000)]);
    merge(&mut session, OTHER_PROCESS, &[(0x10000, 0x11000)]);
    merge(&mut session, PROCESS, &[(0x1a000, 0x1c000)]);
    session
        .apply(&advise(PROCESS, MergeAdvice::Unmergeable, &[(0x14000, 0x16000)]), ChangeLifetime::Permanent)
        .unwrap();
    session.store_recorded_enrollments().unwrap();
    merge(&mut session, PROCESS, &[(0x14000, 0x15000)]);
    drop(session);
    let mut steps = mem::take(&mut *steps.lock().unwrap());
    steps.push((fake.state(), state_files(directory.path())));
    let (mut restored_counts, mut last) = (BTreeSet::new(), None);
    for (number, (state, files)) in steps.into_iter().enumerate() {
        // Killed before or after the files were written.
        for files in [last.as_ref().unwrap_or(&files), &files] {
            let (host, directory) = (FakeHost::from_state(&state), tempfile::tempdir().unwrap());
            put_state_files(directory.path(), files);
            let mut session = begin(&host, directory.path());
            restored_counts.insert(session.recorded_enrollments().len());
            let (_, failed) = session.undo_recorded_enrollments().unwrap();
            assert_eq!(failed, Vec::new(), "step {number}");
            drop(session);
            assert_eq!(host.state(), before, "step {number}");
            assert_eq!(state_files(directory.path()), [(SESSION_FILE, None), (ENROLLMENTS_FILE, None)]);
        }
        last = Some(files);
    }
    assert_eq!(restored_counts.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
}

/// Killed after the record was written and before the journal forgot the enrollments: they are committed.
#[test]
fn kill_within_the_commit_keeps_the_merge() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    let enroll = advise(PROCESS, MergeAdvice::Mergeable, &[(0x14000, 0x18000)]);
    session.apply(&enroll, ChangeLifetime::PermanentOnCommit).unwrap();
    let journal = fs::read(directory.path().join(SESSION_FILE)).unwrap();
    session.record_enrollments(labels());
    session.commit().unwrap();
    drop(session);
    fs::write(directory.path().join(SESSION_FILE), journal).unwrap();
    let (session, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!((undone, failed), (Vec::new(), Vec::new()));
    assert_eq!(recorded_ranges(&session, PROCESS), ranges(&[(0x14000, 0x18000)]));
    assert!(!directory.path().join(SESSION_FILE).exists());
    let is_enrolled = |(range, _, enrolled): &(AddressRange, &str, bool)| range.start == 0x10000 && *enrolled;
    assert!(host.regions(PROCESS.pid).unwrap().iter().any(is_enrolled), "it was not unenrolled");
}
