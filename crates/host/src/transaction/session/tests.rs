//! Sessions over a host in memory: whatever fails, the settings come back or it is said what remains.

mod advice;

use super::*;
use crate::fake::{Fake, Trouble};
use crate::faulty::{Fault, Faulty};
use pagefold_base::Pid;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};

fn settings(of: &[(Setting, &str)]) -> Settings {
    of.iter().map(|&(setting, value)| (setting, value.to_owned())).collect()
}

fn busy() -> Settings {
    settings(&[
        (Setting::AdvisorMode, "none"),
        (Setting::PagesToScan, "5000"),
        (Setting::SleepMillisecs, "1"),
        (Setting::UseZeroPages, "1"),
        (Setting::Run, "1"),
    ])
}

fn advised() -> Settings {
    settings(&[(Setting::AdvisorMode, "scan-time"), (Setting::AdvisorTargetScanTime, "20"), (Setting::Run, "1")])
}

/// What a killed session leaves: lock gone, journal there.
fn kill(session: Session<'_>, directory: &Path) {
    let bytes = fs::read(directory.join(SESSION)).ok();
    drop(session);
    match bytes {
        Some(bytes) => fs::write(directory.join(SESSION), bytes).unwrap(),
        None => assert!(!directory.join(SESSION).exists()),
    }
}

/// As if it had been killed before it could put back anything.
fn kill_now(mut session: Session<'_>, directory: &Path) {
    let bytes = fs::read(directory.join(SESSION)).unwrap();
    session.journal.entries.clear();
    drop(session);
    fs::write(directory.join(SESSION), bytes).unwrap();
}

fn begin<'a>(host: &'a dyn Host, directory: &Path) -> Session<'a> {
    let (session, undone, remains) = Session::begin(host, directory).unwrap();
    assert_eq!((undone, remains), (Vec::new(), Vec::new()));
    session
}

#[test]
fn each_hung_guest_is_asked_for_one_backend_when_changes_are_put_back() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    for pid in [7, 8, 9] {
        host.map(pid, (0x1000, 0x3000), "", false);
        for backend in ["/objects/a", "/objects/b", "/objects/c"] {
            let process = ProcessId { pid: Pid(pid), start_time: 1 };
            let (socket, backend) = ("/run/qmp".into(), backend.to_owned());
            session.apply(&Action::GuestMerge { process, socket, backend, on: true }, Stays::ForNow).unwrap();
        }
    }
    host.trouble(Some(Trouble::GuestsHang));
    let remains = session.finish().unwrap();
    // The time for which processes are waited for in all is over after the first guest.
    let asked: BTreeSet<String> = host.written().split_off(9).into_iter().collect();
    let one_each = [7, 8, 9].map(|pid| format!("/objects/c of {pid}=false"));
    assert_eq!(asked, BTreeSet::from(one_each));
    assert!(remains.len() == 9 && remains.iter().all(|remains| remains.kept), "{remains:?}");
    assert_eq!(remains.iter().filter(|remains| remains.why == HUNG).count(), 6, "{remains:?}");
    host.trouble(None);
    drop(session);
    let (_, undone, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!((undone.len(), remains), (9, Vec::new()));
}

/// It answers, but takes its time to refuse.
#[test]
fn slow_guest_is_asked_for_one_backend_when_changes_are_put_back() {
    let (host, directory, asked) = (Fake::booted(), tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    host.map(7, (0x1000, 0x3000), "", false);
    let faulty = Faulty::new(&host, |path: &str| {
        path.ends_with("#guest_merge").then(|| {
            // Both are enrolled; then the socket takes time.
            if asked.fetch_add(1, Ordering::Relaxed) < 2 {
                return Fault::Replaced(Vec::new());
            }
            thread::sleep(HUNG_AFTER);
            Fault::Absent(Absent::Malformed("no QMP".to_owned()))
        })
    });
    let mut session = begin(&faulty, directory.path());
    for backend in ["/objects/a", "/objects/b"] {
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let (socket, backend) = ("/run/qmp".into(), backend.to_owned());
        session.apply(&Action::GuestMerge { process, socket, backend, on: true }, Stays::ForNow).unwrap();
    }
    let remains = session.finish().unwrap();
    assert_eq!((asked.load(Ordering::Relaxed), remains.len()), (3, 2), "{remains:?}");
    assert!(remains.iter().all(|remains| remains.kept) && remains[1].why == HUNG, "{remains:?}");
}

#[test]
fn nothing_is_left_to_put_back_of_a_guest_that_has_ended() {
    let (host, directory, asked) = (Fake::booted(), tempfile::tempdir().unwrap(), AtomicUsize::new(0));
    host.map(7, (0x1000, 0x3000), "", false);
    let faulty = Faulty::new(&host, |path: &str| {
        path.ends_with("#guest_merge").then(|| match asked.fetch_add(1, Ordering::Relaxed) {
            0 => Fault::Replaced(Vec::new()),
            _ => Fault::Absent(Absent::Malformed("no such socket".to_owned())),
        })
    });
    let mut session = begin(&faulty, directory.path());
    let process = ProcessId { pid: Pid(7), start_time: 1 };
    let (socket, backend) = ("/run/qmp".into(), "/objects/a".to_owned());
    session.apply(&Action::GuestMerge { process, socket, backend, on: true }, Stays::ForNow).unwrap();
    host.end(Pid(7));
    assert_eq!(session.finish().unwrap(), []);
    assert_eq!(asked.load(Ordering::Relaxed), 1, "its socket is not tried");
}

#[test]
fn what_is_set_comes_back_run_first() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let before = host.values();
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    session.set(&settings(&[(Setting::PagesToScan, "7000")])).unwrap();
    session.uncontested().unwrap();
    assert_eq!((host.value("pages_to_scan"), host.value("run")), ("7000".to_owned(), "1".to_owned()));
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.values(), before);
    let back = host.written().split_off(5);
    assert_eq!(back, ["run=0", "use_zero_pages=0", "sleep_millisecs=20", "pages_to_scan=100"]);
    drop(session);
    assert!(!directory.path().join(SESSION).exists());
}

#[test]
fn the_advisor_takes_no_setting_with_it() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.put("pages_to_scan", "777");
    let before = host.values();
    let mut session = begin(&host, directory.path());
    session.set(&advised()).unwrap();
    // The kernel moves it while the advisor is on: nobody else's doing.
    host.put("pages_to_scan", "4321");
    session.uncontested().unwrap();
    session.set(&busy()).unwrap();
    assert_eq!(host.value("pages_to_scan"), "5000");
    session.set(&advised()).unwrap();
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.values(), before);
}

#[test]
fn the_advisor_that_was_on_goes_on() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.put("advisor_mode", "scan-time");
    host.put("pages_to_scan", "4321");
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    session.uncontested().unwrap();
    assert_eq!(host.value("pages_to_scan"), "5000");
    session.set(&advised()).unwrap();
    session.set(&busy()).unwrap();
    assert_eq!(session.finish().unwrap(), Vec::new());
    // Where the advisor starts: it finds its own way from there.
    assert_eq!((host.value("advisor_mode").as_str(), host.value("pages_to_scan").as_str()), ("scan-time", "500"));
    assert_eq!(host.value("run"), "0");
}

#[test]
fn a_session_that_is_killed_anywhere_is_put_back_by_the_next() {
    for (before, wanted) in [("none", advised()), ("none", busy()), ("scan-time", busy())] {
        for steps in 0..=wanted.len() {
            let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
            if before == "none" {
                host.put("pages_to_scan", "777");
            } else {
                host.put("advisor_mode", "scan-time");
                host.put("pages_to_scan", "500");
            }
            let before = host.values();
            let mut session = begin(&host, directory.path());
            session.set(&wanted.iter().take(steps).map(|(s, v)| (*s, v.clone())).collect()).unwrap();
            let (now, journal) = (host.values(), fs::read(directory.path().join(SESSION)).ok());
            drop(session);
            assert_eq!(host.values(), before, "{steps} steps");
            // As it was when it was killed.
            for line in &now {
                let (file, value) = line.split_once('=').unwrap();
                host.put(file, value);
            }
            if let Some(journal) = journal {
                fs::write(directory.path().join(SESSION), journal).unwrap();
            }
            let (_, undone, remains) = Session::begin(&host, directory.path()).unwrap();
            assert_eq!(remains, Vec::new(), "{steps} steps");
            assert_eq!(undone.is_empty(), now == before, "{steps} steps");
            assert_eq!(host.values(), before, "{steps} steps");
            assert!(!directory.path().join(SESSION).exists());
        }
    }
}

#[test]
fn killed_between_the_note_and_the_change() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let before = host.values();
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::Run, "1")])).unwrap();
    session.note(&Action::Set { setting: Setting::PagesToScan, value: "9".to_owned() }, false).unwrap();
    session.note(&Action::Set { setting: Setting::Run, value: "2".to_owned() }, false).unwrap();
    let journal = fs::read(directory.path().join(SESSION)).unwrap();
    drop(session);
    host.put("run", "1");
    fs::write(directory.path().join(SESSION), journal).unwrap();
    let (_, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!(remains, Vec::new());
    assert_eq!(host.values(), before);
}

/// What is written for an action does not grow with the number of actions before it.
#[test]
fn journal_is_appended_to_and_seldom_rewritten() {
    const ACTIONS: u64 = 200;
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.map(7, (0x1000, 0x1000 + ACTIONS * 0x2000), "", false);
    let mut session = begin(&host, directory.path());
    let process = ProcessId { pid: Pid(7), start_time: 1 };
    // A file that replaces another one is made while that is there, and has another number.
    let (mut file, mut rewritten) = (None, 0);
    for n in 0..ACTIONS {
        let start = 0x1000 + n * 0x2000;
        let ranges = vec![AddressRange { start, end: start + 0x1000 }];
        let enrol = Action::Advise { process, advice: Advice::Mergeable, ranges };
        session.apply(&enrol, Stays::ForNow).unwrap();
        let now = fs::metadata(directory.path().join(SESSION)).unwrap().ino();
        rewritten += u64::from(file.replace(now) != Some(now));
    }
    assert!(rewritten <= 3, "{rewritten} times for {ACTIONS} actions");
    let kept = Journal::load(&session.directory, SESSION).unwrap().unwrap();
    assert_eq!(kept.entries, session.journal.entries);
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert!(!directory.path().join(SESSION).exists());
}

#[test]
fn process_that_ends_or_stops_late_is_waited_for() {
    let ranges = vec![AddressRange { start: 0x1000, end: 0x3000 }];
    // Nobody else knows that they end.
    let exits = |host: &Fake| host.file("proc/7/stat", "7 (program) Z 1 1 1 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 1\n");
    // The last one only did not stop for a while, as on a host that is short of processors.
    for (exiting, ends, stops) in
        [(true, true, false), (true, false, false), (false, false, false), (false, false, true)]
    {
        let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
        host.map(7, (0x1000, 0x3000), "", false);
        let mut session = begin(&host, directory.path());
        let process = ProcessId { pid: Pid(7), start_time: 1 };
        let enrol = Action::Advise { process, advice: Advice::Mergeable, ranges: ranges.clone() };
        session.apply(&enrol, Stays::ForNow).unwrap();
        host.trouble(Some(Trouble::BusyAfter(0)));
        if exiting {
            exits(&host);
        }
        let began = Instant::now();
        let remains = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(100));
                if ends {
                    host.end(Pid(7));
                }
                if stops {
                    host.trouble(None);
                }
            });
            session.finish().unwrap()
        });
        assert_eq!(remains.is_empty(), ends || stops, "{remains:?}");
        assert!(ends || stops || began.elapsed() >= ENDING, "it was given up at once");
        host.trouble(None);
    }
}

/// Every write and every read of a setting fails in turn: afterwards the host is as before, or it is said what is not,
/// and the next session mends that.
#[test]
fn whatever_fails_the_settings_come_back_or_it_is_said() {
    for wanted in [busy(), advised()] {
        let mut failing = 0;
        loop {
            let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
            fake.put("pages_to_scan", "777");
            let before = fake.values();
            let asked = AtomicUsize::new(0);
            let fault = |path: &str| {
                let counts = path.starts_with("#set") || path.starts_with("sys/kernel/mm/ksm/");
                (counts && asked.fetch_add(1, Ordering::Relaxed) == failing).then_some(Fault::Absent(Absent::Denied))
            };
            let host = Faulty::new(&fake, fault);
            let mut session = begin(&host, directory.path());
            let set = session.set(&wanted);
            let remains = session.finish().unwrap();
            drop(session);
            if asked.into_inner() <= failing {
                assert!(set.is_ok());
                break;
            }
            if remains.is_empty() {
                assert_eq!(fake.values(), before, "{failing}");
            } else {
                assert!(set.is_ok(), "one fault at a time");
                assert!(remains.iter().any(|remains| remains.kept), "{failing}: {remains:?}");
                let (_, _, remains) = Session::begin(&fake, directory.path()).unwrap();
                // What the kernel reset in between stays for the same reason.
                assert_eq!(remains, Vec::new(), "{failing}");
                assert_eq!(fake.values(), before, "{failing}");
            }
            failing += 1;
        }
        assert!(failing > 12, "{failing}");
    }
}

/// Neither a setting can be put back nor the journal be written: it is said, and the next session mends both.
#[test]
fn what_remains_is_told_with_a_journal_that_cannot_be_written() {
    let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let before = fake.values();
    let written = AtomicUsize::new(0);
    let again = |path: &str| path == "#set pages_to_scan" && written.fetch_add(1, Ordering::Relaxed) > 0;
    let host = Faulty::new(&fake, |path: &str| again(path).then_some(Fault::Absent(Absent::Denied)));
    let wanted = settings(&[(Setting::PagesToScan, "5000"), (Setting::Run, "1")]);
    let mut session = begin(&host, directory.path());
    session.set(&wanted).unwrap();
    // It is in the way of the file that is to replace the journal.
    let obstacle = directory.path().join(format!("{SESSION}.new"));
    fs::create_dir(&obstacle).unwrap();
    let error = session.finish().unwrap_err();
    let Error::Remains { remains, source } = &error else { panic!("{error}") };
    assert!(matches!(**source, Error::Journal(_)), "{error}");
    assert_eq!(
        remains.iter().map(|remains| &remains.undo).collect::<Vec<_>>(),
        [&Action::Set { setting: Setting::PagesToScan, value: "100".to_owned() }]
    );
    assert!(chain(&error).starts_with("not all is put back (/sys/kernel/mm/ksm/pages_to_scan was 100: "), "{error}");
    drop(session);
    fs::remove_dir(&obstacle).unwrap();
    let (mut session, _, remains) = Session::begin(&fake, directory.path()).unwrap();
    assert_eq!((remains, fake.values()), (Vec::new(), before.clone()));
    // A journal is removed once all is back, however often it could not be replaced on the way.
    session.set(&wanted).unwrap();
    fs::create_dir(&obstacle).unwrap();
    assert_eq!((session.finish().unwrap(), fake.values()), (Vec::new(), before));
}

#[test]
fn what_somebody_else_wrote_stays() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    host.put("sleep_millisecs", "33");
    let error = session.uncontested().unwrap_err();
    assert_eq!(error.to_string(), "somebody else writes /sys/kernel/mm/ksm/sleep_millisecs: it was 1, it is 33");
    assert!(matches!(session.set(&busy()), Err(Error::Contested { .. })));
    let remains = session.finish().unwrap();
    assert_eq!(remains.len(), 1);
    assert_eq!(
        remains[0].to_string(),
        "/sys/kernel/mm/ksm/sleep_millisecs was 20: it is 33 now, which somebody else wrote"
    );
    assert!(!remains[0].kept);
    assert_eq!((host.value("sleep_millisecs"), host.value("run")), ("33".to_owned(), "0".to_owned()));
    drop(session);
    begin(&host, directory.path());
}

#[test]
fn an_advisor_that_somebody_else_switched_on_stays() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::PagesToScan, "5000")])).unwrap();
    host.apply(&Action::Set { setting: Setting::AdvisorMode, value: "scan-time".to_owned() }).unwrap();
    assert!(session.uncontested().is_err());
    let remains = session.finish().unwrap();
    assert_eq!(remains.len(), 1, "{remains:?}");
    assert_eq!(host.value("advisor_mode"), "scan-time");
}

#[test]
fn a_change_that_is_refused_leaves_nothing_to_put_back() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::MaxPageSharing, "64")])).unwrap();
    let bad = settings(&[(Setting::MaxPageSharing, "1")]);
    assert!(matches!(session.set(&bad), Err(Error::Refused(_))));
    // Refused is not contested.
    session.uncontested().unwrap();
    session.set(&settings(&[(Setting::MaxPageSharing, "128")])).unwrap();
    let bad = settings(&[(Setting::SleepMillisecs, "-1")]);
    assert!(matches!(session.set(&bad), Err(Error::Refused(_))));
    assert!(!session.known(Setting::SleepMillisecs));
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.value("max_page_sharing"), "256");
}

#[test]
fn what_is_changed_for_good_stays() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::Run, "1")])).unwrap();
    let stop = Action::Set { setting: Setting::Run, value: "2".to_owned() };
    session.apply(&stop, Stays::ForGood).unwrap();
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.value("run"), "2");
}

#[test]
fn one_at_a_time_by_name() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let session = begin(&host, directory.path());
    let error = Session::begin(&host, directory.path()).err().unwrap();
    assert!(error.to_string().contains(&format!("(process {})", std::process::id())), "{error}");
    drop(session);
    begin(&host, directory.path());
}

#[test]
fn a_directory_that_others_can_write_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    assert!(matches!(Session::begin(&host, directory.path()), Err(Error::Exposed(_))));
}

#[test]
fn a_link_to_a_directory_is_refused() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(directory.path(), &link).unwrap();
    assert!(matches!(Session::begin(&host, &link), Err(Error::State { .. })));
    assert!(!directory.path().join("lock").exists());
}

/// The journal goes where the lock is, whatever is put in the place of the directory.
#[test]
fn a_directory_that_is_exchanged_gets_nothing() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let path = directory.path().join("state");
    let mut session = begin(&host, &path);
    fs::rename(&path, directory.path().join("moved")).unwrap();
    fs::create_dir(&path).unwrap();
    session.set(&busy()).unwrap();
    assert!(directory.path().join("moved").join(SESSION).exists());
    assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
}

/// `run` of 2 is left over from unmerging everything: it is not done again.
#[test]
fn nothing_is_unmerged_to_put_back() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.put("run", "2");
    let mut session = begin(&host, directory.path());
    session.writable().unwrap();
    // Noted and not yet written when it was killed: nobody else's doing.
    session.note(&Action::Set { setting: Setting::Run, value: "1".to_owned() }, false).unwrap();
    kill_now(session, directory.path());
    let (mut session, _, remains) = Session::begin(&host, directory.path()).unwrap();
    assert_eq!(remains, Vec::new());
    session.set(&busy()).unwrap();
    assert_eq!(session.finish().unwrap(), Vec::new());
    assert_eq!(host.value("run"), "0");
    drop(session);
    // So it is with one that a former version noted as it was.
    let entry = r#"{"written":["1"],"undo":{"set":{"setting":"run","value":"2"}}}"#;
    let journal = format!(r#"{{"boot":"this-boot","writer":1,"entries":[{entry}]}}"#);
    for file in [SESSION, POLICY] {
        host.put("run", "1");
        fs::write(directory.path().join(file), &journal).unwrap();
        let (mut session, ..) = Session::begin(&host, directory.path()).unwrap();
        let run =
            session.policy().unwrap().into_iter().flat_map(|policy| policy.entries).find_map(|entry| {
                matches!(entry.undo, Action::Set { setting: Setting::Run, .. }).then_some(entry.undo)
            });
        let zero = Action::Set { setting: Setting::Run, value: "0".to_owned() };
        assert_eq!(run, (file == POLICY).then_some(zero));
        assert_eq!(session.restore_policy().unwrap().1, Vec::new());
        assert_eq!(host.value("run"), "0");
    }
    assert!(!host.written().contains(&"run=2".to_owned()));
}

#[test]
fn a_journal_of_another_boot_is_void() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    kill(session, directory.path());
    host.file("proc/sys/kernel/random/boot_id", "another\n");
    host.put("run", "1");
    begin(&host, directory.path());
    assert_eq!(host.value("run"), "1");
}

#[test]
fn the_first_settings_survive_several_policies() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    host.put("pages_to_scan", "777");
    let before = host.values();
    for (name, wanted) in [("advisor", advised()), ("busy", busy()), ("advisor", advised())] {
        let mut session = begin(&host, directory.path());
        session.set(&wanted).unwrap();
        assert_eq!(session.keep(name).unwrap(), Vec::new());
        assert_eq!(session.policy().unwrap().unwrap().purpose.as_deref(), Some(name));
        drop(session);
        assert_eq!(host.value("run"), "1", "a policy lasts");
    }
    // What others change for a time comes back to the policy's.
    let mut session = begin(&host, directory.path());
    session.set(&busy()).unwrap();
    drop(session);
    assert_eq!(host.value("advisor_mode"), "scan-time");

    let mut session = begin(&host, directory.path());
    let (undone, remains) = session.restore_policy().unwrap();
    assert!(undone.len() >= 4 && remains.is_empty(), "{undone:?} {remains:?}");
    assert_eq!(host.values(), before);
    assert_eq!(session.policy().unwrap(), None);
    assert_eq!(session.restore_policy().unwrap(), (Vec::new(), Vec::new()));
}

#[test]
fn a_policy_that_was_killed_in_place_of_another_leaves_that_one_to_be_restored() {
    let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let before = host.values();
    let mut session = begin(&host, directory.path());
    session.set(&settings(&[(Setting::PagesToScan, "777"), (Setting::Run, "1")])).unwrap();
    session.keep("first").unwrap();
    drop(session);
    let first = host.values();
    // Killed once it had written down the policy, before it let go of its own journal; twice.
    for _ in 0..2 {
        let mut session = begin(&host, directory.path());
        session.set(&busy()).unwrap();
        let journal = fs::read(directory.path().join(SESSION)).unwrap();
        session.keep("second").unwrap();
        drop(session);
        fs::write(directory.path().join(SESSION), journal).unwrap();
        drop(Session::begin(&host, directory.path()).unwrap());
        assert_eq!(host.values(), first);
    }
    let (_, remains) = begin(&host, directory.path()).restore_policy().unwrap();
    assert_eq!(remains, Vec::new());
    assert_eq!(host.values(), before);
}

#[test]
fn a_kernel_without_ksm_is_named() {
    let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
    let gone = |path: &str| path.starts_with("sys/kernel/mm/ksm").then_some(Fault::Absent(Absent::NotOnThisKernel));
    let host = Faulty::new(&fake, gone);
    let mut session = begin(&host, directory.path());
    let error = session.set(&settings(&[(Setting::Run, "1")])).unwrap_err();
    assert!(error.to_string().contains("/sys/kernel/mm/ksm/run (a kernel with CONFIG_KSM"), "{error}");
}
