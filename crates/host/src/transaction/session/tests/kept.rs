//! Kept changes of a policy and of `tune`, which both write settings of KSM, are undone apart from each other.

use super::super::kept::{POLICY_PURPOSE, TUNE_PURPOSE};
use super::*;

const POLICY: &[(Setting, &str)] = &[(Setting::PagesToScan, "4000"), (Setting::Run, "1")];
const TUNE: &[(Setting, &str)] = &[(Setting::PagesToScan, "200"), (Setting::UseZeroPages, "1")];

/// The name of a policy, or `None` for `tune`.
fn keep(host: &dyn Host, directory: &Path, policy: Option<&str>, values: &[(Setting, &str)]) {
    let mut session = begin_clean_session(host, directory);
    session.write_settings(&settings(values)).unwrap();
    let failed = match policy {
        Some(name) => session.keep_policy(name),
        None => session.keep_changes(TUNE_PURPOSE),
    };
    assert_eq!(failed.unwrap(), Vec::new());
}

fn undo(host: &dyn Host, directory: &Path, purpose: &str) {
    let (_, failed) = begin_clean_session(host, directory).undo_kept_changes_for(purpose).unwrap();
    assert_eq!(failed, Vec::new());
}

fn values(host: &FakeHost) -> [String; 3] {
    ["pages_to_scan", "run", "use_zero_pages"].map(|setting| host.setting_value(setting))
}

fn name_of_policy(host: &dyn Host, directory: &Path) -> Option<String> {
    begin_clean_session(host, directory).load_kept_changes().unwrap()?.purpose
}

#[test]
fn tune_above_a_policy_is_undone_alone() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = values(&host);
    keep(&host, directory.path(), Some("mine"), POLICY);
    let with_policy = values(&host);
    keep(&host, directory.path(), None, TUNE);
    assert_eq!(values(&host), ["200", "1", "1"]);
    assert_eq!(name_of_policy(&host, directory.path()).as_deref(), Some("mine"));
    undo(&host, directory.path(), TUNE_PURPOSE);
    assert_eq!(values(&host), with_policy);
    undo(&host, directory.path(), TUNE_PURPOSE);
    assert_eq!(values(&host), with_policy, "nothing is left to undo");
    undo(&host, directory.path(), POLICY_PURPOSE);
    assert_eq!(values(&host), before);
}

#[test]
fn policy_below_tune_leaves_what_tune_wrote() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = values(&host);
    keep(&host, directory.path(), Some("mine"), POLICY);
    keep(&host, directory.path(), None, TUNE);
    undo(&host, directory.path(), POLICY_PURPOSE);
    assert_eq!(values(&host), ["200", &before[1], "1"]);
    assert_eq!(name_of_policy(&host, directory.path()), None);
    undo(&host, directory.path(), TUNE_PURPOSE);
    assert_eq!(values(&host), before);
}

#[test]
fn tune_below_a_policy_leaves_what_the_policy_wrote() {
    let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let before = values(&host);
    keep(&host, directory.path(), None, TUNE);
    keep(&host, directory.path(), Some("mine"), POLICY);
    keep(&host, directory.path(), Some("other"), &[(Setting::PagesToScan, "5000")]);
    undo(&host, directory.path(), TUNE_PURPOSE);
    assert_eq!(values(&host), ["5000", "1", &before[2]]);
    assert_eq!(name_of_policy(&host, directory.path()).as_deref(), Some("other"));
    undo(&host, directory.path(), POLICY_PURPOSE);
    assert_eq!(values(&host), before);
}

/// The command kept its changes, and was killed before it emptied its own journal.
#[test]
fn killed_change_above_a_policy_is_undone_with_either() {
    for order in [[TUNE_PURPOSE, POLICY_PURPOSE], [POLICY_PURPOSE, TUNE_PURPOSE]] {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        let before = values(&host);
        keep(&host, directory.path(), Some("mine"), POLICY);
        let with_policy = values(&host);
        let mut session = begin_clean_session(&host, directory.path());
        session.write_settings(&settings(TUNE)).unwrap();
        let journal = fs::read(directory.path().join(SESSION_FILE)).unwrap();
        session.keep_changes(TUNE_PURPOSE).unwrap();
        drop(session);
        fs::write(directory.path().join(SESSION_FILE), journal).unwrap();
        drop(Session::begin(&host, directory.path(), ResourceClass::Ksm).unwrap());
        assert_eq!(values(&host), with_policy);
        order.into_iter().for_each(|purpose| undo(&host, directory.path(), purpose));
        assert_eq!(values(&host), before, "{order:?}");
    }
}

/// Earlier versions stored no purpose of a setting, but that of the command that kept changes last.
#[test]
fn file_of_an_earlier_version_belongs_to_the_command_that_it_names() {
    for (name, purpose) in [("tune", TUNE_PURPOSE), ("flat-out", POLICY_PURPOSE)] {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        host.put_setting("run", "1");
        let entry = r#"{"written_values":["1"],"undo":{"write":{"knob":"sys/kernel/mm/ksm/run","value":"0"}}}"#;
        let file = format!(r#"{{"boot":"this-boot","writer":1,"purpose":"{name}","entries":[{entry}]}}"#);
        fs::write(directory.path().join(POLICY_FILE), file).unwrap();
        let other = if purpose == TUNE_PURPOSE { POLICY_PURPOSE } else { TUNE_PURPOSE };
        assert_eq!(name_of_policy(&host, directory.path()).is_some(), purpose == POLICY_PURPOSE);
        undo(&host, directory.path(), other);
        assert_eq!(host.setting_value("run"), "1", "{name}");
        undo(&host, directory.path(), purpose);
        assert_eq!(host.setting_value("run"), "0", "{name}");
    }
}

#[test]
fn write_that_the_kernel_did_not_keep_is_forgotten() {
    let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
    let ignored = |path: &str| (path == "#write use_zero_pages").then_some(InjectedFault::Replaced(Vec::new()));
    let host = FaultyHost::new(&fake, ignored);
    let mut session = begin_clean_session(&host, directory.path());
    session.write_settings(&settings(TUNE)).unwrap();
    for setting in [Setting::UseZeroPages, Setting::PagesToScan] {
        session.forget_write_without_effect(&setting.into()).unwrap();
    }
    session.keep_changes(TUNE_PURPOSE).unwrap();
    let kept = session.load_kept_changes().unwrap().unwrap().entries;
    let [entry] = &kept[..] else { panic!("{kept:?}") };
    assert!(is_entry_of_knob(entry, &Setting::PagesToScan.into()), "a write with effect stays: {entry:?}");
}
