//! A worker that follows another one, on a fake host.

use super::*;
use pagefold_host::fake_host::FakeHostState;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::transaction::session::ChangeLifetime;
use pagefold_host::transaction::session::enrollments::ENROLLMENTS_FILE;
use std::fs;
use std::path::Path;
use std::sync::Mutex;

/// Memory of the same process that its program enrolled itself.
const OWN_RANGE: AddressRange = AddressRange { start: 256 * PAGE_BYTES, end: 320 * PAGE_BYTES };

/// A host with the process, before anything is merged.
fn host_with_process() -> FakeHost {
    let host = FakeHost::booted();
    host.set_free_kib(5_000_000);
    host.start_process(PID, 64);
    host.map_pages(PID, (RANGE.start, RANGE.end), "", false);
    host.map_pages(PID, (OWN_RANGE.start, OWN_RANGE.end), "", true);
    set_merging_pages(&host, 0);
    host
}

/// A worker with this state directory that has acquired the host, and its messages.
fn start_worker<'h>(host: &'h dyn Host, directory: &Path) -> (Worker<'h>, Receiver<Message>) {
    let (sender, messages) = mpsc::channel();
    let mut worker = Worker::new(host, directory.to_owned(), sender).unwrap();
    worker.acquire_host().unwrap();
    (worker, messages)
}

/// Enroll and commit the range, as a merge does. The kernel merges its pages.
fn enroll_and_commit(worker: &mut Worker<'_>, fake: &FakeHost) {
    let session = worker.session.as_mut().unwrap();
    let action = Action::Advise { process: process(), advice: MergeAdvice::Mergeable, ranges: vec![RANGE] };
    session.apply(&action, ChangeLifetime::PermanentOnCommit).unwrap();
    let scope = SharingScope::of_merge(&TrustDomain::User(0), false);
    session.record_enrollments([(process(), scope.to_string())].into());
    session.commit().unwrap();
    worker.enrolled_ranges.insert(process(), vec![RANGE]);
    fake.map_pages(PID, (RANGE.start, RANGE.end), MERGED_PAGE_NAME, true);
}

/// The processes that a worker has taken over, and the lines about dropped ranges.
fn adoption_messages(messages: &Receiver<Message>) -> (Vec<ProcessId>, Vec<String>) {
    let (mut adopted, mut lines) = (Vec::new(), Vec::new());
    for message in messages.try_iter() {
        match message {
            Message::Event(Event::EnrollmentsAdopted(processes)) => {
                adopted.extend(processes.into_iter().map(|(process, _)| process));
            }
            Message::WorkResult(WorkResult::Adoption { dropped, .. }) => lines.extend(dropped),
            _ => {}
        }
    }
    (adopted, lines)
}

fn enrolled_ranges(host: &FakeHost) -> Vec<AddressRange> {
    host.regions(Pid(PID)).unwrap().into_iter().filter(|region| region.2).map(|region| region.0).collect()
}

#[test]
fn ranges_of_the_previous_worker_are_watched() {
    let (host, directory) = (host_with_process(), tempfile::tempdir().unwrap());
    let (mut first, _) = start_worker(&host, directory.path());
    enroll_and_commit(&mut first, &host);
    drop(first);
    let (mut second, messages) = start_worker(&host, directory.path());
    assert_eq!(adoption_messages(&messages), (vec![process()], vec![]));
    assert_eq!(second.enrolled_ranges, BTreeMap::from([(process(), vec![RANGE])]));
    assert_eq!(second.check_merged_pages(true, Duration::ZERO).unwrap().unenrolled_bytes, Bytes::ZERO, "not broken");
    // A pause and a resume take over nothing twice.
    assert!(second.restore_settings().unwrap());
    second.acquire_host().unwrap();
    assert_eq!(adoption_messages(&messages), (vec![], vec![]));
    // The program writes to all merged pages.
    host.map_pages(PID, (RANGE.start, RANGE.end), "", true);
    host.set_cpu_ticks(PID, 1);
    let summary = second.check_merged_pages(true, Duration::ZERO).unwrap();
    assert_eq!((summary.unenrolled_bytes, summary.unenrolled_from), (RANGE.bytes(), vec![process()]));
    assert_eq!(enrolled_ranges(&host), [OWN_RANGE]);
    drop(second);
    let (third, messages) = start_worker(&host, directory.path());
    assert_eq!(adoption_messages(&messages), (vec![], vec![]), "nothing is left");
    assert!(third.enrolled_ranges.is_empty() && !directory.path().join(ENROLLMENTS_FILE).exists());
}

#[test]
fn ranges_of_the_previous_worker_are_unenrolled_when_memory_allows() {
    let (host, directory) = (host_with_process(), tempfile::tempdir().unwrap());
    let (mut first, _) = start_worker(&host, directory.path());
    enroll_and_commit(&mut first, &host);
    drop(first);
    let (mut second, _messages) = start_worker(&host, directory.path());
    let scopes = BTreeMap::from([(process(), UnenrollScope::DaemonEnrolled)]);
    host.set_free_kib(0);
    assert_eq!(second.unenroll(&scopes, MAX_PRESSURE_PERCENT).unwrap().failed_unenrolls.len(), 1);
    drop(second);
    let (mut third, messages) = start_worker(&host, directory.path());
    assert_eq!(adoption_messages(&messages).0, [process()], "it is still recorded");
    host.set_free_kib(5_000_000);
    assert_eq!(third.unenroll(&scopes, MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    assert_eq!(enrolled_ranges(&host), [OWN_RANGE], "the program's own range stays");
}

#[test]
fn stale_records_are_dropped() {
    type Change = fn(&FakeHost, &Path);
    let middle = RANGE.start + 32 * PAGE_BYTES;
    let lower_half = AddressRange { end: middle, ..RANGE };
    let cases: [(Change, &str, Vec<AddressRange>); 6] = [
        (|host, _| host.end_process(Pid(PID)), "256 KiB of one process: the process has ended", vec![]),
        (
            // The pid belongs to another process now.
            |_, directory| {
                let path = directory.join(ENROLLMENTS_FILE);
                let text = fs::read_to_string(&path).unwrap();
                fs::write(path, text.replace("\"start_time\":1", "\"start_time\":2")).unwrap();
            },
            "the process has ended",
            vec![],
        ),
        (
            |host, _| host.unmap_pages(PID, (RANGE.start, RANGE.end)),
            "the program has unmapped or replaced the memory",
            vec![],
        ),
        (
            |host, _| host.unmap_pages(PID, (RANGE.start + 32 * PAGE_BYTES, RANGE.end)),
            "128 KiB of one process: the program has unmapped or replaced the memory",
            vec![lower_half],
        ),
        (
            |host, _| host.map_pages(PID, (RANGE.start + 32 * PAGE_BYTES, RANGE.end), MERGED_PAGE_NAME, false),
            "128 KiB of one process: they were unenrolled meanwhile",
            vec![lower_half],
        ),
        (|host, _| host.map_pages(PID, (0, RANGE.start), MERGED_PAGE_NAME, true), "replaced the memory", vec![]),
    ];
    for (number, (change, line, adopted)) in cases.into_iter().enumerate() {
        let (host, directory) = (host_with_process(), tempfile::tempdir().unwrap());
        let (mut first, _) = start_worker(&host, directory.path());
        enroll_and_commit(&mut first, &host);
        drop(first);
        change(&host, directory.path());
        let (second, messages) = start_worker(&host, directory.path());
        let (processes, lines) = adoption_messages(&messages);
        assert!(matches!(&lines[..], [only] if only.contains(line)), "{number}: {lines:?}");
        let found: Vec<AddressRange> = second.enrolled_ranges.into_values().flatten().collect();
        assert_eq!((found, processes.len()), (adopted.clone(), usize::from(!adopted.is_empty())), "{number}");
    }
}

/// Name and content of each file of a state directory.
type StateFiles = Vec<(String, Vec<u8>)>;

fn read_files(directory: &Path) -> StateFiles {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

/// A daemon killed at any step of merging, watching and unenrolling leaves nothing enrolled that its successor does not
/// know, except what the program enrolled itself.
#[test]
fn kill_at_any_step_leaves_nothing_unknown() {
    let (fake, directory) = (host_with_process(), tempfile::tempdir().unwrap());
    let steps: Mutex<Vec<(FakeHostState, StateFiles)>> = Mutex::default();
    let host = FaultyHost::new(&fake, |_: &str| {
        steps.lock().unwrap().push((fake.state(), read_files(directory.path())));
        None::<InjectedFault>
    });
    let (mut first, _) = start_worker(&host, directory.path());
    enroll_and_commit(&mut first, &fake);
    first.merge_monitor.add_plan(&one_range_plan());
    first.check_merged_pages(true, Duration::ZERO).unwrap();
    drop(first);
    let (mut second, _) = start_worker(&host, directory.path());
    let scopes = BTreeMap::from([(process(), UnenrollScope::DaemonEnrolled)]);
    assert_eq!(second.unenroll(&scopes, MAX_PRESSURE_PERCENT).unwrap().unenrolled, [process()]);
    drop(second);
    let steps = std::mem::take(&mut *steps.lock().unwrap());
    let mut adopted_count = 0;
    for (number, (state, files)) in steps.into_iter().enumerate() {
        let (host, directory) = (FakeHost::from_state(&state), tempfile::tempdir().unwrap());
        for (name, bytes) in files {
            fs::write(directory.path().join(name), bytes).unwrap();
        }
        let (mut worker, _messages) = start_worker(&host, directory.path());
        let known = worker.enrolled_ranges.get(&process()).cloned().unwrap_or_default();
        let enrolled = enrolled_ranges(&host);
        assert_eq!(enrolled, [known.clone(), vec![OWN_RANGE]].concat(), "step {number}");
        adopted_count += known.len();
        worker.unenroll(&scopes, MAX_PRESSURE_PERCENT).unwrap();
        assert_eq!(enrolled_ranges(&host), [OWN_RANGE], "step {number}");
    }
    assert!(adopted_count > 20, "{adopted_count}");
}
