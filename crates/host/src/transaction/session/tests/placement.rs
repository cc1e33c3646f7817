//! Changes of other classes than KSM, on a host in memory.

use super::*;
use crate::access_monitor::{KDAMONDS_DIRECTORY, MonitorStep, MonitoredMemory};
use crate::action::{Exchange, ThreadId};
use crate::config_file::{ConfigContent, ConfigFile};
use crate::kernel_module::{KernelModule, ModuleParameters};

const PROCESS: ProcessId = ProcessId { pid: Pid(7), start_time: 1 };
const PAGES: AddressRange = AddressRange { start: 0x10_0000, end: 0x10_4000 };
const CPUS_FILE: &str = "proc/7/task/8/cpus";
const QOM_FILE: &str = "proc/7/qom/objects/io0/poll-max-ns";
const MODPROBE_FILE: &str = "etc/modprobe.d/pagefold.conf";
const NEW_FILE: &str = "etc/sysctl.d/90-pagefold.conf";
const NPT_FILE: &str = "sys/module/kvm_amd/parameters/npt";

fn host() -> FakeHost {
    let host = FakeHost::booted();
    host.map_pages(7, (PAGES.start, PAGES.end), "heap", false);
    host.put_file(CPUS_FILE, "0-3");
    host.put_file("proc/sys/kernel/numa_balancing", "1");
    host.put_file(QOM_FILE, "32768");
    host.put_file(MODPROBE_FILE, "# old\n");
    host.put_file(NPT_FILE, "1");
    host
}

fn exchange<T: std::str::FromStr<Err: fmt::Debug>>(from: &str, to: &str) -> Exchange<T> {
    Exchange { from: from.parse().unwrap(), to: to.parse().unwrap() }
}

fn set_affinity(from: &str, to: &str) -> Action {
    let thread = ThreadId { process: PROCESS, tid: Pid(8), start_time: 1 };
    Action::SetAffinity { thread, cpus: exchange(from, to), pin: None }
}

fn replace_file(path: &str, from: Option<&str>, to: Option<&str>) -> Action {
    let content = |text: Option<&str>| ConfigContent(text.map(str::to_owned));
    let content = Exchange { from: content(from), to: content(to) };
    Action::ReplaceFile { file: ConfigFile::from_path(path).unwrap(), content }
}

fn set_npt(from: &str, to: &str) -> Action {
    let parameters = |npt: &str| ModuleParameters([("npt".to_owned(), npt.to_owned())].into());
    let parameters = Exchange { from: parameters(from), to: parameters(to) };
    Action::ReloadModule { module: KernelModule::KvmAmd, parameters }
}

/// For each class two changes or more after one another.
fn changes() -> [Action; 10] {
    let set_poll = |from: &str, to: &str| Action::SetQomProperty {
        process: PROCESS,
        socket: "/q".into(),
        object: "/objects/io0".to_owned(),
        property: "poll-max-ns".to_owned(),
        value: exchange(from, to),
    };
    let knob = Knob::from_path("proc/sys/kernel/numa_balancing").unwrap();
    let half = AddressRange { end: PAGES.start + 0x2000, ..PAGES };
    [
        set_affinity("0-3", "1"),
        set_affinity("1", "2"),
        Action::MovePages { process: PROCESS, ranges: vec![half], node: 1 },
        Action::MovePages { process: PROCESS, ranges: vec![PAGES], node: 2 },
        Action::Write { knob, value: "0".to_owned() },
        set_poll("32768", "0"),
        set_npt("1", "0"),
        replace_file(NEW_FILE, None, Some("# new\n")),
        replace_file(MODPROBE_FILE, Some("# old\n"), Some("# changed\n")),
        replace_file(MODPROBE_FILE, Some("# changed\n"), None),
    ]
}

/// The CPUs, the setting, the property of QEMU, the parameter, the files, and the nodes of the pages. A file that does not
/// exist is empty here.
fn state(host: &FakeHost) -> (Vec<String>, Vec<Option<u32>>) {
    let read = |path: &&str| String::from_utf8(host.read(path).unwrap_or_default()).unwrap();
    let files = [CPUS_FILE, "proc/sys/kernel/numa_balancing", QOM_FILE, NPT_FILE, NEW_FILE, MODPROBE_FILE];
    (files.iter().map(read).collect(), host.open(Pid(7)).unwrap().page_nodes(PAGES).unwrap())
}

#[test]
fn sessions_of_all_classes_work_side_by_side_and_undo_their_changes() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    let mut sessions: Vec<Session<'_>> =
        ResourceClass::ALL.iter().map(|&class| Session::begin(&host, directory.path(), class).unwrap().0).collect();
    for action in changes() {
        let session = sessions.iter_mut().find(|session| session.class == action.class()).unwrap();
        session.apply(&action, ChangeLifetime::Temporary).unwrap();
    }
    let nodes = [Some(2); 4].to_vec();
    assert_eq!(state(&host), (["2", "0", "0", "0", "# new\n", ""].map(str::to_owned).to_vec(), nodes));
    let busy = Session::begin(&host, directory.path(), ResourceClass::CpuPlacement).err().unwrap();
    assert!(matches!(busy, Error::Busy { class: ResourceClass::CpuPlacement, .. }), "{busy}");
    for mut session in sessions {
        assert_eq!(session.undo_all().unwrap(), []);
    }
    assert_eq!(state(&host), before);
}

#[test]
fn next_session_undoes_placement_after_a_kill_at_any_step() {
    let changes = changes();
    for (i, action) in changes.iter().enumerate() {
        let class = action.class();
        let class_changes: Vec<&Action> = changes[..=i].iter().filter(|change| change.class() == class).collect();
        for applied in [false, true] {
            let (host, directory) = (host(), tempfile::tempdir().unwrap());
            let before = state(&host);
            let (mut session, ..) = Session::begin(&host, directory.path(), class).unwrap();
            for change in &class_changes[..class_changes.len() - 1] {
                session.apply(change, ChangeLifetime::Temporary).unwrap();
            }
            session.journal_action(action, false).unwrap();
            if applied {
                host.apply(action).unwrap();
            }
            let journal = fs::read(directory.path().join(class.journal_file())).unwrap();
            session.journal.entries.clear();
            drop(session);
            fs::write(directory.path().join(class.journal_file()), journal).unwrap();
            let (_, undone, failed) = Session::begin(&host, directory.path(), class).unwrap();
            assert_eq!((undone.is_empty(), failed), (false, Vec::new()), "{action:?}");
            assert_eq!(state(&host), before, "{action:?}, applied: {applied}");
        }
    }
}

#[test]
fn only_configuration_is_undone_after_a_reboot() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    for keep in [true, false] {
        for class in [ResourceClass::Settings, ResourceClass::Configuration] {
            let (mut session, ..) = Session::begin(&host, directory.path(), class).unwrap();
            for action in changes().iter().filter(|action| action.class() == class) {
                session.apply(action, ChangeLifetime::Temporary).unwrap();
            }
            if keep {
                assert_eq!(session.keep_changes("tune").unwrap(), []);
            }
            let journal = fs::read(directory.path().join(class.journal_file())).ok();
            session.journal.entries.clear();
            drop(session);
            // As after a kill.
            if let Some(journal) = journal {
                fs::write(directory.path().join(class.journal_file()), journal).unwrap();
            }
        }
        let changed = state(&host);
        host.put_file("proc/sys/kernel/random/boot_id", if keep { "another boot" } else { "a third boot" });
        for class in [ResourceClass::Settings, ResourceClass::Configuration] {
            let (mut session, ..) = Session::begin(&host, directory.path(), class).unwrap();
            let (_, failed) = session.undo_kept_changes().unwrap();
            assert_eq!(failed, []);
        }
        assert_eq!(state(&host).0[1..4], changed.0[1..4], "a new boot has settings of its own");
        assert_eq!(state(&host).0[4..], before.0[4..], "kept: {keep}");
        host.put_file("proc/sys/kernel/numa_balancing", "1");
        host.put_file(QOM_FILE, "32768");
        host.put_file(NPT_FILE, "1");
    }
}

#[test]
fn module_in_use_is_refused_and_its_undo_is_retried() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    host.put_file("sys/module/kvm_amd/refcnt", "3");
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::Settings).unwrap();
    let refused = session.apply(&set_npt("1", "0"), ChangeLifetime::Temporary).unwrap_err();
    assert!(matches!(refused, Error::Refused(ActionError::Busy(_))), "{refused}");
    assert_eq!(host.read(NPT_FILE).unwrap(), b"1");
    host.put_file("sys/module/kvm_amd/refcnt", "0");
    session.apply(&set_npt("1", "0"), ChangeLifetime::Temporary).unwrap();
    host.put_file("sys/module/kvm_amd/refcnt", "3");
    let failed = session.undo_all().unwrap();
    assert!(matches!(&failed[..], [FailedUndo { will_retry: true, is_overwritten: false, .. }, ..]), "{failed:?}");
    host.put_file("sys/module/kvm_amd/refcnt", "0");
    drop(session);
    let (_, undone, failed) = Session::begin(&host, directory.path(), ResourceClass::Settings).unwrap();
    assert_eq!((undone.len(), failed), (1, Vec::new()), "the refused change must leave no entry");
    assert_eq!(host.read(NPT_FILE).unwrap(), b"1");
}

#[test]
fn placement_of_another_program_stays() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::CpuPlacement).unwrap();
    session.apply(&set_affinity("0-3", "1"), ChangeLifetime::Temporary).unwrap();
    host.put_file(CPUS_FILE, "2");
    let failed = session.undo_all().unwrap();
    let [failed] = &failed[..] else { panic!("{failed:?}") };
    assert!(!failed.will_retry && failed.to_string().contains("another program has changed it"), "{failed}");
    assert_eq!(state(&host).0[0], "2");
    let error = session.apply(&set_affinity("0-3", "1"), ChangeLifetime::Temporary).unwrap_err();
    assert!(matches!(error, Error::Refused(ActionError::ChangedByOthers(_))), "{error}");
    assert_eq!(session.undo_all().unwrap(), [], "a refused change must leave no entry");
}

/// The user has made the same change before the session, so it is not the session's to undo.
#[test]
fn exchange_that_changes_nothing_is_not_undone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::CpuPlacement).unwrap();
    host.put_file(CPUS_FILE, "1");
    assert!(session.apply(&set_affinity("0-3", "1"), ChangeLifetime::Temporary).unwrap().unchanged);
    assert_eq!(session.undo_all().unwrap(), []);
    assert_eq!(state(&host).0[0], "1");
}

#[test]
fn pages_are_moved_back_only_in_the_same_mapping() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let (mut session, ..) = Session::begin(&host, directory.path(), ResourceClass::MemoryPlacement).unwrap();
    let move_pages = Action::MovePages { process: PROCESS, ranges: vec![PAGES], node: 1 };
    session.apply(&move_pages, ChangeLifetime::Temporary).unwrap();
    host.unmap_pages(7, (PAGES.start, PAGES.end));
    host.map_pages(7, (PAGES.start, PAGES.start + 0x2000), "another", false);
    let failed = session.undo_all().unwrap();
    assert!(failed.len() == 1 && failed[0].why.contains("another mapping"), "{failed:?}");
    assert_eq!(state(&host).1, [Some(1), Some(1), None, None]);
}

#[test]
fn session_changes_its_own_class_only() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let mut session = begin_clean_session(&host, directory.path());
    for action in changes() {
        let error = session.apply(&action, ChangeLifetime::Temporary).unwrap_err();
        assert!(matches!(error, Error::ClassNotLocked { session: ResourceClass::Ksm, .. }), "{error}");
    }
}

#[test]
fn kept_changes_outlive_their_sessions_and_are_undone_newest_first() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    let keep_all = |changes: &[Action]| {
        for class in ResourceClass::ALL {
            let (mut session, undone, failed) = Session::begin(&host, directory.path(), class).unwrap();
            assert_eq!((undone, failed), (Vec::new(), Vec::new()));
            for action in changes.iter().filter(|action| action.class() == class) {
                session.apply(action, ChangeLifetime::Temporary).unwrap();
            }
            if class != ResourceClass::Ksm {
                assert_eq!(session.keep_changes("placement").unwrap(), Vec::new());
            }
        }
    };
    keep_all(&changes());
    let first = state(&host);
    assert_ne!(first, before);
    keep_all(&[set_affinity("2", "2-3")]);
    assert_ne!(state(&host), first);
    for class in ResourceClass::ALL {
        let (mut session, ..) = Session::begin(&host, directory.path(), class).unwrap();
        assert_eq!(session.undo_kept_changes().unwrap().1, Vec::new());
        assert_eq!(session.load_kept_changes().unwrap(), None);
    }
    assert_eq!(state(&host), before);
}

#[test]
fn affinities_of_one_purpose_are_undone_alone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let cpus = || String::from_utf8(host.read("proc/7/task/8/cpus").unwrap()).unwrap();
    let begin = || Session::begin(&host, directory.path(), ResourceClass::CpuPlacement).unwrap().0;
    let original = cpus();
    let keep = |from: &str, to: &str, purpose: &str| {
        let mut session = begin();
        session.apply(&set_affinity(from, to), ChangeLifetime::Temporary).unwrap();
        assert_eq!(session.keep_changes(purpose).unwrap(), []);
    };
    // Above a placement: the CPUs of the placement come back, and then those from before.
    keep("0-3", "2-3", "numa");
    let placed = cpus();
    keep("2-3", "2", "spread");
    keep("2", "3", "spread");
    let (undone, failed) = begin().undo_kept_changes_for("spread").unwrap();
    assert_eq!((undone.len(), failed.len(), cpus()), (2, 0, placed.clone()));
    assert_eq!(begin().undo_kept_changes_for("spread").unwrap(), (Vec::new(), Vec::new()));
    assert_eq!(begin().undo_kept_changes().unwrap().0.len(), 1);
    assert_eq!(cpus(), original);
    // Below a placement: the thread keeps the CPUs of the placement, whose undo skips the spread.
    keep("0-3", "2", "spread");
    keep("2", "2-3", "numa");
    assert_eq!(begin().undo_kept_changes_for("spread").unwrap(), (Vec::new(), Vec::new()));
    assert_eq!(cpus(), placed);
    assert_eq!(begin().undo_kept_changes().unwrap().0.len(), 1);
    assert_eq!(cpus(), original);
}

#[test]
fn definition_is_replaced_only_if_it_is_the_expected_one() {
    let host = crate::fake_host::FakeHost::booted();
    let path = crate::action::domain_definition_path("db");
    host.put_file(&path, "<a/>");
    let definition = Exchange { from: "<a/>".to_owned(), to: "<b/>".to_owned() };
    let define = Action::DefineDomain { uuid: "uuid".to_owned(), name: "db".to_owned(), definition };
    let undo = crate::action::undo_actions(&host, &define).unwrap();
    assert!(!host.apply(&define).unwrap().unchanged);
    assert!(host.apply(&define).unwrap().unchanged);
    assert_eq!(host.read(&path).unwrap(), b"<b/>");
    host.apply(&undo[0]).unwrap();
    assert_eq!(host.read(&path).unwrap(), b"<a/>");
    host.put_file(&path, "<other/>");
    let error = host.apply(&define).unwrap_err().to_string();
    assert!(error.contains("db.xml") && !error.contains("<other/>"), "{error}");
    assert_eq!(host.read(&path).unwrap(), b"<other/>");
}

#[test]
fn refused_definition_is_not_kept() {
    let (host, directory) = (crate::fake_host::FakeHost::booted(), tempfile::tempdir().unwrap());
    let path = crate::action::domain_definition_path("db");
    host.put_file(&path, "<a/>");
    let definition = Exchange { from: "<a/>".to_owned(), to: "<b/>".to_owned() };
    let define = Action::DefineDomain { uuid: "uuid".to_owned(), name: "db".to_owned(), definition };
    let malformed = crate::faulty_host::InjectedFault::Absent(Absent::Malformed("refused".to_owned()));
    let refusing = FaultyHost::new(&host, |path| path.ends_with("#define").then(|| malformed.clone()));
    let (mut session, ..) = Session::begin(&refusing, directory.path(), ResourceClass::Configuration).unwrap();
    let refused = session.apply(&define, ChangeLifetime::Temporary);
    assert!(matches!(refused, Err(Error::Refused(ActionError::Failed(_)))), "{refused:?}");
    session.keep_changes("tune").unwrap();
    assert_eq!(session.load_kept_changes().unwrap(), None);
}

/// The process ends after libvirt has stored the definition, and before the journal has libvirt's form of it.
#[test]
fn definition_that_a_killed_session_left_is_undone_unless_another_program_changed_it() {
    let path = crate::action::domain_definition_path("db");
    for is_changed in [false, true] {
        let (host, directory) = (crate::fake_host::FakeHost::booted(), tempfile::tempdir().unwrap());
        host.put_file(&path, "<domain a='1'/>");
        let definition = Exchange { from: "<domain a='1'/>".to_owned(), to: "<domain a=\"2\"/>".to_owned() };
        let define = Action::DefineDomain { uuid: "uuid".to_owned(), name: "db".to_owned(), definition };
        let killed = FaultyHost::new(&host, |read| {
            let is_stored = read == path && host.read(&path).is_ok_and(|text| text == b"<domain a='2'/>");
            is_stored.then_some(crate::faulty_host::InjectedFault::Absent(Absent::Vanished))
        });
        let begin = || Session::begin(&host, directory.path(), ResourceClass::Configuration).unwrap();
        let (mut session, ..) = Session::begin(&killed, directory.path(), ResourceClass::Configuration).unwrap();
        session.apply(&define, ChangeLifetime::Temporary).unwrap_err();
        let journal_file = directory.path().join(ResourceClass::Configuration.journal_file());
        let journal = fs::read(&journal_file).unwrap();
        drop(session);
        host.put_file(&path, if is_changed { "<domain a='2' b='3'/>" } else { "<domain a='2'/>" });
        fs::write(&journal_file, journal).unwrap();
        let (_, undone, failed) = begin();
        assert_eq!((undone.len(), failed.len()), if is_changed { (0, 1) } else { (1, 0) }, "{failed:?}");
        let expected = if is_changed { "<domain a='2' b='3'/>" } else { "<domain a='1'/>" };
        assert_eq!(host.read(&path).unwrap(), expected.as_bytes());
    }
}

#[test]
fn definition_that_libvirt_stored_in_its_own_form_is_undone() {
    let (host, directory) = (crate::fake_host::FakeHost::booted(), tempfile::tempdir().unwrap());
    let path = crate::action::domain_definition_path("db");
    host.put_file(&path, "<a b='1'/>");
    let definition = Exchange { from: "<a b='1'/>".to_owned(), to: "<a b=\"2\"/>".to_owned() };
    let define = Action::DefineDomain { uuid: "uuid".to_owned(), name: "db".to_owned(), definition };
    let begin = || Session::begin(&host, directory.path(), ResourceClass::Configuration).unwrap();
    let mut session = begin().0;
    session.apply(&define, ChangeLifetime::Temporary).unwrap();
    assert_eq!(host.read(&path).unwrap(), b"<a b='2'/>");
    session.keep_changes("tune").unwrap();
    drop(session);
    assert_eq!(begin().0.undo_kept_changes().unwrap().1, Vec::new());
    assert_eq!(host.read(&path).unwrap(), b"<a b='1'/>");
}

#[test]
fn kdamonds_are_removed_and_those_of_another_program_stay() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let count_file = format!("{KDAMONDS_DIRECTORY}/nr_kdamonds");
    let count = || String::from_utf8(host.read(&count_file).unwrap()).unwrap();
    let start =
        Action::MonitorAccesses(MonitorStep::Start(vec![MonitoredMemory { process: PROCESS, ranges: vec![PAGES] }]));
    let begin = || Session::begin(&host, directory.path(), ResourceClass::Settings).unwrap();

    assert!(begin().0.apply(&start, ChangeLifetime::Temporary).is_err(), "there is no DAMON");
    host.put_file(&count_file, "1");
    let busy = begin().0.apply(&start, ChangeLifetime::Temporary);
    assert!(matches!(busy, Err(Error::Refused(ActionError::Busy(_)))), "{busy:?}");
    assert_eq!(count(), "1", "an unconfigured kdamond of another program");

    host.put_file(&count_file, "0");
    let mut killed = begin().0;
    killed.apply(&start, ChangeLifetime::Temporary).unwrap();
    assert_eq!(count(), "1");
    let journal = directory.path().join(ResourceClass::Settings.journal_file());
    let left_over = fs::read(&journal).unwrap();
    drop(killed);
    assert_eq!(count(), "0");
    // Another program has started a kdamond meanwhile: for a process, or for physical addresses.
    for target in ["4711", "0"] {
        host.put_file(&count_file, "1");
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/0/state"), "on");
        host.put_file(&format!("{KDAMONDS_DIRECTORY}/0/contexts/0/targets/0/pid_target"), target);
        fs::write(&journal, &left_over).unwrap();
        let (_, undone, failed) = begin();
        assert_eq!((undone.len(), failed.len(), count().as_str()), (1, 0, "1"), "{target}");
    }
}
