//! Sessions on an in-memory host: after any failure the settings are restored, or the report says what remains.

mod advice;
mod enrollments;
mod kept;
mod placement;

use super::undo::{HUNG_AFTER, HUNG_REASON, PROCESS_EXIT_TIMEOUT};
use super::*;
use crate::fake_host::{AdviceFault, FakeHost};
use crate::faulty_host::{FaultyHost, InjectedFault};
use pagefold_base::Pid;
use pagefold_base::ksm::{Setting, Settings};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

const SESSION_FILE: &str = ResourceClass::Ksm.journal_file();
const POLICY_FILE: &str = ResourceClass::Ksm.kept_changes_file();

fn settings(values: &[(Setting, &str)]) -> Settings {
    values.iter().map(|&(setting, value)| (setting, value.to_owned())).collect()
}

fn busy_settings() -> Settings {
    settings(&[
        (Setting::AdvisorMode, "none"),
        (Setting::PagesToScan, "5000"),
        (Setting::SleepMillisecs, "1"),
        (Setting::UseZeroPages, "1"),
        (Setting::Run, "1"),
    ])
}

fn advisor_settings() -> Settings {
    settings(&[(Setting::AdvisorMode, "scan-time"), (Setting::AdvisorTargetScanTime, "20"), (Setting::Run, "1")])
}

/// The state after a kill: the lock is released, the journal remains.
fn simulate_kill(session: Session<'_>, directory: &Path) {
    let bytes = fs::read(directory.join(SESSION_FILE)).ok();
    drop(session);
    match bytes {
        Some(bytes) => fs::write(directory.join(SESSION_FILE), bytes).unwrap(),
        None => assert!(!directory.join(SESSION_FILE).exists()),
    }
}

/// The state after a kill before anything was undone.
fn simulate_kill_before_undo(mut session: Session<'_>, directory: &Path) {
    let bytes = fs::read(directory.join(SESSION_FILE)).unwrap();
    session.journal.entries.clear();
    drop(session);
    fs::write(directory.join(SESSION_FILE), bytes).unwrap();
}

fn begin_clean_session<'a>(host: &'a dyn Host, directory: &Path) -> Session<'a> {
    let (session, undone, failed) = Session::begin(host, directory, ResourceClass::Ksm).unwrap();
    assert_eq!((undone, failed), (Vec::new(), Vec::new()));
    session
}

#[test]
fn each_hung_guest_is_asked_for_one_backend_when_changes_are_put_back() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    for pid in [7, 8, 9] {
        host.map_pages(pid, (0x1000, 0x3000), "", false);
        for backend in ["/objects/a", "/objects/b", "/objects/c"] {
            let process = ProcessId { pid: Pid(pid), start_time: 1 };
            let (socket, backend) = ("/run/qmp".into(), backend.to_owned());
            session
                .apply(&Action::set_backend_merge(process, socket, backend, true), ChangeLifetime::Temporary)
                .unwrap();
        }
    }
    host.set_advice_fault(Some(AdviceFault::GuestsHang));
    let failed = session.undo_all().unwrap();
    // The total time to wait for processes is over after the first guest.
    let requests: BTreeSet<String> = host.written_settings().split_off(9).into_iter().collect();
    let expected = [7, 8, 9].map(|pid| format!("/objects/c of {pid}=false"));
    assert_eq!(requests, BTreeSet::from(expected));
    assert!(failed.len() == 9 && failed.iter().all(|failed| failed.will_retry), "{failed:?}");
    assert_eq!(failed.iter().filter(|failed| failed.why == HUNG_REASON).count(), 6, "{failed:?}");
    host.set_advice_fault(None);
    drop(session);
    let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!((undone.len(), failed), (9, Vec::new()));
}

/// The guest answers, but takes a long time to refuse.
#[test]
fn slow_guest_is_asked_for_one_backend_when_changes_are_put_back() {
    let (host, directory, request_count) = (FakeHost::booted(), tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    host.map_pages(7, (0x1000, 0x3000), "", false);
    let faulty = FaultyHost::new(&host, |path: &str| {
        path.ends_with("#set_qom_property").then(|| {
            // The first two requests enroll both backends; later ones are slow.
            if request_count.fetch_add(1, Ordering::Relaxed) < 2 {
                return InjectedFault::Replaced(Vec::new());
            }
            thread::sleep(HUNG_AFTER);
            InjectedFault::Absent(Absent::Malformed("no QMP".to_owned()))
        })
    });
    let mut session = begin_clean_session(&faulty, directory.path());
    for backend in ["/objects/a", "/objects/b"] {
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let (socket, backend) = ("/run/qmp".into(), backend.to_owned());
        session.apply(&Action::set_backend_merge(process, socket, backend, true), ChangeLifetime::Temporary).unwrap();
    }
    let failed = session.undo_all().unwrap();
    assert_eq!((request_count.load(Ordering::Relaxed), failed.len()), (3, 2), "{failed:?}");
    assert!(failed.iter().all(|failed| failed.will_retry) && failed[1].why == HUNG_REASON, "{failed:?}");
}

#[test]
fn ended_guest_needs_no_undo() {
    let (host, directory, request_count) = (FakeHost::booted(), tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    host.map_pages(7, (0x1000, 0x3000), "", false);
    let faulty = FaultyHost::new(&host, |path: &str| {
        path.ends_with("#set_qom_property").then(|| match request_count.fetch_add(1, Ordering::Relaxed) {
            0 => InjectedFault::Replaced(Vec::new()),
            _ => InjectedFault::Absent(Absent::Malformed("no such socket".to_owned())),
        })
    });
    let mut session = begin_clean_session(&faulty, directory.path());
    let process = ProcessId { pid: Pid(7), start_time: 1 };
    let (socket, backend) = ("/run/qmp".into(), "/objects/a".to_owned());
    session.apply(&Action::set_backend_merge(process, socket, backend, true), ChangeLifetime::Temporary).unwrap();
    host.end_process(Pid(7));
    assert_eq!(session.undo_all().unwrap(), []);
    assert_eq!(request_count.load(Ordering::Relaxed), 1, "the socket of an exited guest must not be tried");
}

#[test]
fn settings_are_restored_run_first() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = host.setting_values();
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    session.write_settings(&settings(&[(Setting::PagesToScan, "7000")])).unwrap();
    session.check_not_overwritten().unwrap();
    assert_eq!((host.setting_value("pages_to_scan"), host.setting_value("run")), ("7000".to_owned(), "1".to_owned()));
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_values(), before);
    let restored = host.written_settings().split_off(5);
    assert_eq!(restored, ["run=0", "use_zero_pages=0", "sleep_millisecs=20", "pages_to_scan=100"]);
    drop(session);
    assert!(!directory.path().join(SESSION_FILE).exists());
}

#[test]
fn pages_to_scan_is_restored_after_advisor() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.put_setting("pages_to_scan", "777");
    let before = host.setting_values();
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&advisor_settings()).unwrap();
    // While the advisor is on, the kernel changes the setting, and no other program.
    host.put_setting("pages_to_scan", "4321");
    session.check_not_overwritten().unwrap();
    session.write_settings(&busy_settings()).unwrap();
    assert_eq!(host.setting_value("pages_to_scan"), "5000");
    session.write_settings(&advisor_settings()).unwrap();
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_values(), before);
}

#[test]
fn advisor_that_was_on_is_restored() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.put_setting("advisor_mode", "scan-time");
    host.put_setting("pages_to_scan", "4321");
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    session.check_not_overwritten().unwrap();
    assert_eq!(host.setting_value("pages_to_scan"), "5000");
    session.write_settings(&advisor_settings()).unwrap();
    session.write_settings(&busy_settings()).unwrap();
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    // The start value of the advisor, which adapts it from there.
    assert_eq!(
        (host.setting_value("advisor_mode").as_str(), host.setting_value("pages_to_scan").as_str()),
        ("scan-time", "500")
    );
    assert_eq!(host.setting_value("run"), "0");
}

#[test]
fn next_session_undoes_a_killed_one() {
    for (before, new_settings) in
        [("none", advisor_settings()), ("none", busy_settings()), ("scan-time", busy_settings())]
    {
        for steps in 0..=new_settings.len() {
            let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
            if before == "none" {
                host.put_setting("pages_to_scan", "777");
            } else {
                host.put_setting("advisor_mode", "scan-time");
                host.put_setting("pages_to_scan", "500");
            }
            let before = host.setting_values();
            let mut session = begin_clean_session(&host, directory.path());
            session.write_settings(&new_settings.iter().take(steps).map(|(s, v)| (*s, v.clone())).collect()).unwrap();
            let (values_at_kill, journal) = (host.setting_values(), fs::read(directory.path().join(SESSION_FILE)).ok());
            drop(session);
            assert_eq!(host.setting_values(), before, "{steps} steps");
            // The state at the time of the kill.
            for line in &values_at_kill {
                let (file, value) = line.split_once('=').unwrap();
                host.put_setting(file, value);
            }
            if let Some(journal) = journal {
                fs::write(directory.path().join(SESSION_FILE), journal).unwrap();
            }
            let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
            assert_eq!(failed, Vec::new(), "{steps} steps");
            assert_eq!(undone.is_empty(), values_at_kill == before, "{steps} steps");
            assert_eq!(host.setting_values(), before, "{steps} steps");
            assert!(!directory.path().join(SESSION_FILE).exists());
        }
    }
}

#[test]
fn kill_after_journaling_is_undone() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = host.setting_values();
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::Run, "1")])).unwrap();
    session.journal_action(&Action::Write { knob: Setting::PagesToScan.into(), value: "9".to_owned() }, false).unwrap();
    session.journal_action(&Action::Write { knob: Setting::Run.into(), value: "2".to_owned() }, false).unwrap();
    let journal = fs::read(directory.path().join(SESSION_FILE)).unwrap();
    drop(session);
    host.put_setting("run", "1");
    fs::write(directory.path().join(SESSION_FILE), journal).unwrap();
    let (_, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!(failed, Vec::new());
    assert_eq!(host.setting_values(), before);
}

/// The bytes written for an action do not grow with the number of earlier actions.
#[test]
fn journal_is_appended_and_seldom_rewritten() {
    const ACTION_COUNT: u64 = 200;
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.map_pages(7, (0x1000, 0x1000 + ACTION_COUNT * 0x2000), "", false);
    let mut session = begin_clean_session(&host, directory.path());
    let process = ProcessId { pid: Pid(7), start_time: 1 };
    // A file that replaces another one is created while the other exists, so it has another inode number.
    let (mut file, mut rewritten) = (None, 0);
    for n in 0..ACTION_COUNT {
        let start = 0x1000 + n * 0x2000;
        let ranges = vec![AddressRange { start, end: start + 0x1000 }];
        let enroll = Action::Advise { process, advice: MergeAdvice::Mergeable, ranges };
        session.apply(&enroll, ChangeLifetime::Temporary).unwrap();
        let now = fs::metadata(directory.path().join(SESSION_FILE)).unwrap().ino();
        rewritten += u64::from(file.replace(now) != Some(now));
    }
    assert!(rewritten <= 3, "{rewritten} times for {ACTION_COUNT} actions");
    let loaded = Journal::load(&session.directory, SESSION_FILE).unwrap().unwrap();
    assert_eq!(loaded.entries, session.journal.entries);
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert!(!directory.path().join(SESSION_FILE).exists());
}

#[test]
fn undo_waits_for_ending_or_busy_process() {
    let ranges = vec![AddressRange { start: 0x1000, end: 0x3000 }];
    // No other process reaps the exiting one.
    let make_zombie =
        |host: &FakeHost| host.put_file("proc/7/stat", "7 (program) Z 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    // The last process only did not stop for a while, as on a host that is short of CPUs.
    for (exiting, ends, stops) in
        [(true, true, false), (true, false, false), (false, false, false), (false, false, true)]
    {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        host.map_pages(7, (0x1000, 0x3000), "", false);
        let mut session = begin_clean_session(&host, directory.path());
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let enroll = Action::Advise { process, advice: MergeAdvice::Mergeable, ranges: ranges.clone() };
        session.apply(&enroll, ChangeLifetime::Temporary).unwrap();
        host.set_advice_fault(Some(AdviceFault::BusyAfterPages(0)));
        if exiting {
            make_zombie(&host);
        }
        let start = Instant::now();
        let failed = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                if ends {
                    host.end_process(Pid(7));
                }
                if stops {
                    host.set_advice_fault(None);
                }
            });
            session.undo_all().unwrap()
        });
        assert_eq!(failed.is_empty(), ends || stops, "{failed:?}");
        assert!(ends || stops || start.elapsed() >= PROCESS_EXIT_TIMEOUT, "the undo did not wait for the process");
        host.set_advice_fault(None);
    }
}

/// Every write and every read of a setting fails in turn. Afterwards the host is as before, or the report lists what
/// remains and the next session undoes it.
#[test]
fn any_failure_restores_or_reports_settings() {
    for new_settings in [busy_settings(), advisor_settings()] {
        let mut failing_request = 0;
        loop {
            let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
            fake.put_setting("pages_to_scan", "777");
            let before = fake.setting_values();
            let request_count = AtomicUsize::new(0);
            let fault = |path: &str| {
                let is_setting = path.starts_with("#set") || path.starts_with("sys/kernel/mm/ksm/");
                (is_setting && request_count.fetch_add(1, Ordering::Relaxed) == failing_request)
                    .then_some(InjectedFault::Absent(Absent::Denied))
            };
            let host = FaultyHost::new(&fake, fault);
            let mut session = begin_clean_session(&host, directory.path());
            let result = session.write_settings(&new_settings);
            let failed = session.undo_all().unwrap();
            drop(session);
            if request_count.into_inner() <= failing_request {
                assert!(result.is_ok());
                break;
            }
            if failed.is_empty() {
                assert_eq!(fake.setting_values(), before, "{failing_request}");
            } else {
                assert!(result.is_ok(), "only one fault is injected at a time");
                assert!(failed.iter().any(|failed| failed.will_retry), "{failing_request}: {failed:?}");
                let (_, _, failed) = Session::begin(&fake, directory.path(), ResourceClass::Ksm).unwrap();
                // A setting that the kernel reset in between remains for the same reason.
                assert_eq!(failed, Vec::new(), "{failing_request}");
                assert_eq!(fake.setting_values(), before, "{failing_request}");
            }
            failing_request += 1;
        }
        assert!(failing_request > 12, "{failing_request}");
    }
}

/// Neither a setting can be restored nor the journal be written: both are reported, and the next session repairs both.
#[test]
fn undo_and_journal_failures_are_reported() {
    let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = fake.setting_values();
    let written = AtomicUsize::new(0);
    let second_write = |path: &str| path == "#write pages_to_scan" && written.fetch_add(1, Ordering::Relaxed) > 0;
    let host = FaultyHost::new(&fake, |path: &str| second_write(path).then_some(InjectedFault::Absent(Absent::Denied)));
    let new_settings = settings(&[(Setting::PagesToScan, "5000"), (Setting::Run, "1")]);
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&new_settings).unwrap();
    // A directory that blocks the file that is to replace the journal.
    let blocking_directory = directory.path().join(format!("{SESSION_FILE}.new"));
    fs::create_dir(&blocking_directory).unwrap();
    let error = session.undo_all().unwrap_err();
    let Error::UndoFailed { failed_undos: failed, source } = &error else { panic!("{error}") };
    assert!(matches!(**source, Error::Journal(_)), "{error}");
    assert_eq!(
        failed.iter().map(|failed| &failed.undo).collect::<Vec<_>>(),
        [&Action::Write { knob: Setting::PagesToScan.into(), value: "100".to_owned() }]
    );
    assert!(
        chain(&error).starts_with("some changes could not be undone (/sys/kernel/mm/ksm/pages_to_scan was 100: "),
        "{error}"
    );
    drop(session);
    fs::remove_dir(&blocking_directory).unwrap();
    let (mut session, _, failed) = Session::begin(&fake, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!((failed, fake.setting_values()), (Vec::new(), before.clone()));
    // The journal is removed once everything is undone, even if it could not be replaced before.
    session.write_settings(&new_settings).unwrap();
    fs::create_dir(&blocking_directory).unwrap();
    assert_eq!((session.undo_all().unwrap(), fake.setting_values()), (Vec::new(), before));
}

#[test]
fn setting_of_another_writer_stays() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    host.put_setting("sleep_millisecs", "33");
    let error = session.check_not_overwritten().unwrap_err();
    assert_eq!(
        error.to_string(),
        "another program changed /sys/kernel/mm/ksm/sleep_millisecs: this session wrote 1, and it is 33 now"
    );
    assert!(matches!(session.write_settings(&busy_settings()), Err(Error::SettingOverwritten { .. })));
    let failed = session.undo_all().unwrap();
    assert_eq!(failed.len(), 1);
    assert_eq!(
        failed[0].to_string(),
        "/sys/kernel/mm/ksm/sleep_millisecs was 20: it is 33 now, written by another program"
    );
    assert!(failed[0].is_overwritten && !failed[0].will_retry);
    assert_eq!((host.setting_value("sleep_millisecs"), host.setting_value("run")), ("33".to_owned(), "0".to_owned()));
    drop(session);
    begin_clean_session(&host, directory.path());
}

#[test]
fn advisor_of_another_writer_stays() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::PagesToScan, "5000")])).unwrap();
    host.apply(&Action::Write { knob: Setting::AdvisorMode.into(), value: "scan-time".to_owned() }).unwrap();
    assert!(session.check_not_overwritten().is_err());
    let failed = session.undo_all().unwrap();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(host.setting_value("advisor_mode"), "scan-time");
}

#[test]
fn refused_change_needs_no_undo() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::MaxPageSharing, "64")])).unwrap();
    let bad = settings(&[(Setting::MaxPageSharing, "1")]);
    assert!(matches!(session.write_settings(&bad), Err(Error::Refused(_))));
    // A refused change is no overwrite by another program.
    session.check_not_overwritten().unwrap();
    session.write_settings(&settings(&[(Setting::MaxPageSharing, "128")])).unwrap();
    let bad = settings(&[(Setting::SleepMillisecs, "-1")]);
    assert!(matches!(session.write_settings(&bad), Err(Error::Refused(_))));
    assert!(!session.has_knob_entry(&Setting::SleepMillisecs.into()));
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_value("max_page_sharing"), "256");
}

#[test]
fn permanent_change_is_not_undone() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::Run, "1")])).unwrap();
    let stop = Action::Write { knob: Setting::Run.into(), value: "2".to_owned() };
    session.apply(&stop, ChangeLifetime::Permanent).unwrap();
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_value("run"), "2");
}

#[test]
fn lock_ends_with_its_session_although_a_forked_child_has_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let (_, lock) = lock_directory(folder.path(), ResourceClass::Settings).unwrap();
    let file_of_child = lock.0.try_clone().unwrap();
    assert!(matches!(lock_directory(folder.path(), ResourceClass::Settings), Err(Error::Busy { .. })));
    drop(lock);
    assert!(lock_directory(folder.path(), ResourceClass::Settings).is_ok());
    drop(file_of_child);
}

#[test]
fn second_session_error_names_the_holder() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let session = begin_clean_session(&host, directory.path());
    let error = Session::begin(&host, directory.path(), ResourceClass::Ksm).err().unwrap();
    assert!(error.to_string().contains(&format!("(process {})", std::process::id())), "{error}");
    drop(session);
    begin_clean_session(&host, directory.path());
}

#[test]
fn directory_writable_by_others_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(
        Session::begin(&host, directory.path(), ResourceClass::Ksm),
        Err(Error::DirectoryWritableByOthers(_))
    ));
}

#[test]
fn symbolic_link_to_directory_is_refused() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    assert!(matches!(Session::begin(&host, &link, ResourceClass::Ksm), Err(Error::StateDirectoryUnusable { .. })));
    assert!(!directory.path().join(ResourceClass::Ksm.lock_file()).exists());
}

/// The journal stays in the locked directory, even if another directory takes its path.
#[test]
fn replaced_directory_gets_no_journal() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let path = directory.path().join("state");
    let mut session = begin_clean_session(&host, &path);
    fs::rename(&path, directory.path().join("moved")).unwrap();
    fs::create_dir(&path).unwrap();
    session.write_settings(&busy_settings()).unwrap();
    assert!(directory.path().join("moved").join(SESSION_FILE).exists());
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

/// A value of 2 in `run` remains from an earlier unmerge: the unmerge is not repeated.
#[test]
fn undo_never_writes_run_2() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.put_setting("run", "2");
    let mut session = begin_clean_session(&host, directory.path());
    session.check_writable(Setting::SleepMillisecs.into()).unwrap();
    // The value was stored in the journal but not written before the kill; no other program wrote it.
    session.journal_action(&Action::Write { knob: Setting::Run.into(), value: "1".to_owned() }, false).unwrap();
    simulate_kill_before_undo(session, directory.path());
    let (mut session, _, failed) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
    assert_eq!(failed, Vec::new());
    session.write_settings(&busy_settings()).unwrap();
    assert_eq!(session.undo_all().unwrap(), Vec::new());
    assert_eq!(host.setting_value("run"), "0");
    drop(session);
    // The same holds for an entry that an earlier version stored unchanged.
    let entry = r#"{"written_values":["1"],"undo":{"write":{"knob":"sys/kernel/mm/ksm/run","value":"2"}}}"#;
    let journal = format!(r#"{{"boot":"this-boot","writer":1,"entries":[{entry}]}}"#);
    for file in [SESSION_FILE, POLICY_FILE] {
        host.put_setting("run", "1");
        fs::write(directory.path().join(file), &journal).unwrap();
        let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap();
        let run =
            session.load_kept_changes().unwrap().into_iter().flat_map(|policy| policy.entries).find_map(|entry| {
                matches!(&entry.undo, Action::Write { knob, .. } if *knob == Setting::Run.into()).then_some(entry.undo)
            });
        let zero = Action::Write { knob: Setting::Run.into(), value: "0".to_owned() };
        assert_eq!(run, (file == POLICY_FILE).then_some(zero));
        assert_eq!(session.undo_kept_changes().unwrap().1, Vec::new());
        assert_eq!(host.setting_value("run"), "0");
    }
    assert!(!host.written_settings().contains(&"run=2".to_owned()));
}

#[test]
fn journal_of_another_boot_is_ignored() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    simulate_kill(session, directory.path());
    host.put_file("proc/sys/kernel/random/boot_id", "another\n");
    host.put_setting("run", "1");
    begin_clean_session(&host, directory.path());
    assert_eq!(host.setting_value("run"), "1");
}

#[test]
fn restore_skips_intermediate_policies() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    host.put_setting("pages_to_scan", "777");
    let before = host.setting_values();
    for (name, wanted) in [("advisor", advisor_settings()), ("busy", busy_settings()), ("advisor", advisor_settings())]
    {
        let mut session = begin_clean_session(&host, directory.path());
        session.write_settings(&wanted).unwrap();
        assert_eq!(session.keep_policy(name).unwrap(), Vec::new());
        assert_eq!(session.load_kept_changes().unwrap().unwrap().purpose.as_deref(), Some(name));
        drop(session);
        assert_eq!(host.setting_value("run"), "1", "a policy outlives its session");
    }
    // Temporary changes of other sessions are undone to the policy's values.
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&busy_settings()).unwrap();
    drop(session);
    assert_eq!(host.setting_value("advisor_mode"), "scan-time");

    let mut session = begin_clean_session(&host, directory.path());
    let (undone, failed) = session.undo_kept_changes().unwrap();
    assert!(undone.len() >= 4 && failed.is_empty(), "{undone:?} {failed:?}");
    assert_eq!(host.setting_values(), before);
    assert_eq!(session.load_kept_changes().unwrap(), None);
    assert_eq!(session.undo_kept_changes().unwrap(), (Vec::new(), Vec::new()));
}

#[test]
fn killed_policy_change_keeps_old_policy() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = host.setting_values();
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(&[(Setting::PagesToScan, "777"), (Setting::Run, "1")])).unwrap();
    session.keep_policy("first").unwrap();
    drop(session);
    let first = host.setting_values();
    // Killed twice after the policy was stored and before the session's own journal was removed.
    for _ in 0..2 {
        let mut session = begin_clean_session(&host, directory.path());
        session.write_settings(&busy_settings()).unwrap();
        let journal = fs::read(directory.path().join(SESSION_FILE)).unwrap();
        session.keep_policy("second").unwrap();
        drop(session);
        fs::write(directory.path().join(SESSION_FILE), journal).unwrap();
        drop(Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap());
        assert_eq!(host.setting_values(), first);
    }
    let (_, failed) = begin_clean_session(&host, directory.path()).undo_kept_changes().unwrap();
    assert_eq!(failed, Vec::new());
    assert_eq!(host.setting_values(), before);
}

#[test]
fn kernel_without_ksm_is_reported() {
    let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let gone =
        |path: &str| path.starts_with("sys/kernel/mm/ksm").then_some(InjectedFault::Absent(Absent::NotOnThisKernel));
    let host = FaultyHost::new(&fake, gone);
    let mut session = begin_clean_session(&host, directory.path());
    let error = session.write_settings(&settings(&[(Setting::Run, "1")])).unwrap_err();
    assert!(error.to_string().contains("/sys/kernel/mm/ksm/run (a kernel with CONFIG_KSM"), "{error}");
}
