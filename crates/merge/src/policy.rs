//! Applies a [`Policy`]: once, until it is restored, or continuously while a command follows it.
//!
//! Limits: ksmtuned's committed memory is the resident memory of all QEMU processes that this process may see.

use crate::decide::policy::{HostObservation, Policy};
use pagefold_base::identity::Monitor;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Absent, Bytes, Reading};
use pagefold_host::action::Action;
use pagefold_host::knob::Knob;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::journal;
use pagefold_host::transaction::session::kept::{POLICY_PURPOSE, load_kept_changes};
use pagefold_host::transaction::session::{Error, FailedUndo, Session};
use pagefold_host::{Host, observe, parse};
use std::io;
use std::path::Path;
use std::time::Duration;

/// How soon a command that follows a policy stops.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The current state of the host, as input of policies.
pub fn observe_host(host: &dyn Host) -> HostObservation {
    let meminfo = host.read("proc/meminfo");
    let memory = meminfo.as_deref().map(parse::meminfo).map_err(Absent::clone);
    let free = |bytes: &[u8]| Ok(parse::meminfo(bytes).free? + parse::buffers_and_cached(bytes)?);
    HostObservation {
        total: memory.and_then(|memory| memory.total),
        free: meminfo.as_deref().map_err(Absent::clone).and_then(free),
        committed: qemu_resident(host),
        ksm: observe::ksm(host),
        ksmd_cpu: KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()),
    }
}

/// Resident memory of all QEMU processes. Processes that end meanwhile or cannot be read are left out, as by `ps`.
fn qemu_resident(host: &dyn Host) -> Reading<Bytes> {
    let mut sum = Bytes::ZERO;
    for pid in host.pids()? {
        let Ok(handle) = host.open(pid) else { continue };
        let Ok(process) = observe::process(host, &*handle) else { continue };
        if process.identity.vm.is_none_or(|vm| vm.monitor != Monitor::Qemu) {
            continue;
        }
        let Ok(statm) = handle.read("statm") else { continue };
        let resident = statm.split(u8::is_ascii_whitespace).nth(1).map(parse::number::<u64>);
        if let Some(Ok(pages)) = resident {
            sum += Bytes(pages.saturating_mul(host.page_size().bytes()));
        }
    }
    Ok(sum)
}

/// Settings that conflict, with the remedy.
pub fn find_conflict(host: &dyn Host, settings: &Settings) -> Option<String> {
    let mode = match settings.get(&Setting::AdvisorMode) {
        Some(mode) => mode.clone(),
        None => Knob::from(Setting::AdvisorMode).read(host).ok()?,
    };
    (mode == "scan-time" && settings.contains_key(&Setting::PagesToScan)).then(|| {
        "the kernel rejects pages_to_scan while advisor_mode is scan-time: omit it, or add advisor_mode = \"none\""
            .to_owned()
    })
}

/// The settings to write so that the host gets a policy's settings: these, and the previous values of settings that
/// only a former policy had changed.
pub fn settings_to_write(session: &Session<'_>, settings: Settings) -> Result<Settings, Error> {
    let mut combined = Settings::new();
    for entry in session.load_kept_changes()?.into_iter().flat_map(|kept| kept.entries) {
        if let Action::Write { knob, value } = entry.undo
            && let Some(setting) = knob.ksm_setting()
        {
            if entry.purpose.as_deref() == Some(POLICY_PURPOSE) {
                combined.insert(setting, value);
            } else {
                // What `tune` has written since the former policy stays.
                combined.remove(&setting);
            }
        }
    }
    let sets_pace = settings.contains_key(&Setting::PagesToScan);
    combined.extend(settings);
    if !sets_pace && combined.get(&Setting::AdvisorMode).is_some_and(|mode| mode == "scan-time") {
        combined.remove(&Setting::PagesToScan);
    }
    Ok(combined)
}

/// Apply a policy's settings to a host until its changes are undone ([`POLICY_PURPOSE`]); for a policy that adapts, the
/// settings of one step. Returns them, and the session's other changes that could not be undone.
///
/// # Errors
/// The changes are undone, except those that [`Error::UndoFailed`] names.
pub fn set_policy(
    session: &mut Session<'_>,
    policy: &Policy,
    name: &str,
) -> Result<(Settings, Vec<FailedUndo>), Error> {
    let settings = policy.one_shot_settings(&observe_host(session.host())).map_err(Error::HostStateUnreadable)?;
    let to_write = settings_to_write(session, settings.clone())?;
    match session.write_settings(&to_write).and_then(|()| session.keep_policy(name)) {
        Ok(failed_undos) => Ok((settings, failed_undos)),
        Err(error) => Err(session.abort(error)),
    }
}

/// Follow a policy until stopped: write its settings, and after each interval those of its next step. For policies that
/// do not adapt, the settings are only watched. The session restores the settings at its end.
///
/// Another writer ends it with [`Error::SettingOverwritten`]. Then end the session, which leaves the other writer's
/// value. Returns the number of steps.
pub fn follow_policy(
    session: &mut Session<'_>,
    policy: &Policy,
    mut should_stop: impl FnMut() -> bool,
) -> Result<u64, Error> {
    let (mut state, settings) = policy.start(&observe_host(session.host())).map_err(Error::HostStateUnreadable)?;
    session.write_settings(&settings)?;
    let mut steps = 0;
    loop {
        let next_step = session.host().now() + policy.interval();
        loop {
            if should_stop() {
                return Ok(steps);
            }
            match next_step.checked_duration_since(session.host().now()).filter(|remaining| !remaining.is_zero()) {
                Some(remaining) => session.host().sleep(remaining.min(STOP_POLL_INTERVAL)),
                None => break,
            }
        }
        session.check_not_overwritten()?;
        let settings;
        (state, settings) = policy.step(state, &observe_host(session.host())).map_err(Error::HostStateUnreadable)?;
        session.write_settings(&settings)?;
        steps += 1;
    }
}

/// Read the kept changes of the current policy, without taking the lock. Those of `tune` are not among them.
pub fn load_current_policy(host: &dyn Host, directory: &Path) -> Result<Option<journal::Journal>, journal::Error> {
    let Ok(boot) = pagefold_host::transaction::session::read_boot_id(host) else { return Ok(None) };
    let kept = match journal::StateDirectory::open(directory) {
        Ok(directory) => load_kept_changes(&directory, ResourceClass::Ksm, &boot)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(journal::Error::Io { path: directory.to_owned(), source }),
    };
    let of_policy = kept.map(|mut kept| {
        kept.entries.retain(|entry| entry.purpose.as_deref() == Some(POLICY_PURPOSE));
        kept
    });
    Ok(of_policy.filter(|policy| !policy.entries.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policy::Ksmtuned;
    use pagefold_host::elapsed_since;
    use pagefold_host::fake_host::FakeHost;
    use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn begin<'a>(host: &'a dyn Host, directory: &Path) -> Session<'a> {
        Session::begin(host, directory, ResourceClass::Ksm).unwrap().0
    }

    fn named_policy(name: &str) -> Policy {
        Policy::from_name(name).unwrap().unwrap()
    }

    /// A guest with so many resident pages.
    fn put_guest(host: &FakeHost, pid: u32, pages: u64) {
        host.put_file(
            &format!("proc/{pid}/stat"),
            &format!("{pid} (qemu) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0\n"),
        );
        host.put_file(&format!("proc/{pid}/cmdline"), "/usr/bin/qemu-system-x86_64\0-enable-kvm\0");
        host.put_file(&format!("proc/{pid}/statm"), &format!("9999999 {pages} 1 1 0 1 0\n"));
    }

    #[test]
    fn observation_has_guests_memory_and_ksmd() {
        let host = FakeHost::booted();
        put_guest(&host, 7, 1000);
        put_guest(&host, 8, 24);
        host.put_file("proc/9/stat", "9 (ksmd) S 2 0 0 0 -1 2097216 0 0 0 0 0 250 0 0 25 5 1 0 30 0 0\n");
        host.put_file(
            "proc/meminfo",
            "MemTotal: 100 kB\nMemFree: 1 kB\nBuffers: 2 kB\nCached: 4 kB\nSwapCached: 8 kB\n",
        );
        let observation = observe_host(&host);
        assert_eq!((observation.total, observation.free), (Ok(Bytes::from_kib(100)), Ok(Bytes::from_kib(7))));
        assert_eq!(observation.committed, Ok(Bytes(1024 * 4096)));
        assert_eq!(observation.ksmd_cpu, Ok(Duration::from_millis(2500)));
        assert_eq!(observation.ksm.unwrap().pages_to_scan, Ok(100));
    }

    #[test]
    fn ksmtuned_policy_follows_free_memory() {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        host.enable_virtual_time();
        let (before, began) = (host.setting_values(), host.now());
        let policy = Policy::Ksmtuned(Ksmtuned::default());
        let mut session = begin(&host, directory.path());
        let mut turn = 0;
        let steps = follow_policy(&mut session, &policy, || {
            let pace = (host.setting_value("pages_to_scan"), host.setting_value("run"));
            match turn {
                0 => {
                    assert_eq!(pace, ("100".to_owned(), "0".to_owned()), "nothing before the first interval");
                    host.set_free_kib(1_000_000);
                    turn = 1;
                }
                1 if pace.0 == "600" => turn = 2,
                _ => {}
            }
            turn == 2
        });
        assert_eq!(steps.unwrap(), 2);
        assert_eq!(elapsed_since(&host, began), 2 * policy.interval());
        assert_eq!(
            (host.setting_value("sleep_millisecs"), host.setting_value("run")),
            ("16".to_owned(), "1".to_owned())
        );
        assert_eq!(session.undo_all().unwrap(), Vec::new());
        assert_eq!(host.setting_values(), before);
    }

    #[test]
    fn other_writer_ends_the_policy() {
        for policy in [Policy::Ksmtuned(Ksmtuned::default()), named_policy("flat-out")] {
            let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
            host.enable_virtual_time();
            host.set_free_kib(1);
            let mut session = begin(&host, directory.path());
            let error = follow_policy(&mut session, &policy, || {
                if host.setting_value("run") == "1" {
                    host.put_setting("pages_to_scan", "55");
                }
                false
            });
            assert!(
                matches!(&error, Err(Error::SettingOverwritten { knob, .. }) if *knob == Setting::PagesToScan.into()),
                "{error:?}"
            );
            let failed_undos = session.undo_all().unwrap();
            assert_eq!(failed_undos.len(), 1, "{failed_undos:?}");
            assert_eq!(
                (host.setting_value("pages_to_scan"), host.setting_value("run")),
                ("55".to_owned(), "0".to_owned())
            );
        }
    }

    #[test]
    fn setting_of_the_former_policy_is_restored() {
        let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        host.put_setting("pages_to_scan", "777");
        let before = host.setting_values();
        let zero = Policy::Fixed(Settings::from([(Setting::UseZeroPages, "1".to_owned())]));
        for (policy, name) in
            [(zero, "file"), (named_policy("flat-out"), "flat-out"), (named_policy("advisor"), "advisor")]
        {
            let mut session = begin(&host, directory.path());
            set_policy(&mut session, &policy, name).unwrap();
            let journal = load_current_policy(&host, directory.path()).unwrap().unwrap();
            assert_eq!(journal.purpose.as_deref(), Some(name));
            assert_eq!(host.setting_value("use_zero_pages"), if name == "file" { "1" } else { "0" });
        }
        assert_eq!(host.setting_value("advisor_mode"), "scan-time");
        let (_, failed_undos) = begin(&host, directory.path()).undo_kept_changes_for(POLICY_PURPOSE).unwrap();
        assert_eq!(failed_undos, Vec::new());
        assert_eq!(host.setting_values(), before);
        assert_eq!(load_current_policy(&host, directory.path()).unwrap(), None);
    }

    #[test]
    fn failed_policy_changes_nothing() {
        for setting in ["advisor_mode", "pages_to_scan", "sleep_millisecs", "run"] {
            let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
            let failing_write = format!("#write {setting}");
            let fail = |path: &str| (path == failing_write).then_some(InjectedFault::Absent(Absent::Denied));
            let host = FaultyHost::new(&fake, fail);
            fake.put_setting("advisor_mode", "scan-time");
            let before = fake.setting_values();
            let mut session = begin(&host, directory.path());
            let error = set_policy(&mut session, &named_policy("flat-out"), "flat-out").unwrap_err();
            assert!(matches!(error, Error::Refused(_)), "{error}");
            drop(session);
            assert_eq!(load_current_policy(&host, directory.path()).unwrap(), None);
            let changed: Vec<_> = fake.setting_values().into_iter().filter(|value| !before.contains(value)).collect();
            // Switching the advisor resets this setting.
            assert!(changed.iter().all(|value| value.starts_with("pages_to_scan")), "{setting}: {changed:?}");
        }
    }

    /// The last setting of a policy is refused, and then the undo of another one.
    #[test]
    fn failed_undo_of_a_policy_is_reported() {
        let (fake, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
        let before = fake.setting_values();
        let pace_writes = AtomicUsize::new(0);
        let fail = |path: &str| {
            let fails = match path {
                "#write run" => true,
                "#write pages_to_scan" => pace_writes.fetch_add(1, Ordering::Relaxed) > 0,
                _ => false,
            };
            fails.then_some(InjectedFault::Absent(Absent::Denied))
        };
        let host = FaultyHost::new(&fake, fail);
        let mut session = begin(&host, directory.path());
        let error = set_policy(&mut session, &named_policy("flat-out"), "flat-out").unwrap_err();
        let message = pagefold_host::transaction::session::chain(&error);
        let Error::UndoFailed { failed_undos, source } = error else { panic!("{message}") };
        assert!(matches!(*source, Error::Refused(_)), "{message}");
        assert_eq!(failed_undos.len(), 1, "{message}");
        assert!(
            failed_undos[0].will_retry && message.contains("(/sys/kernel/mm/ksm/pages_to_scan was 100: "),
            "{message}"
        );
        assert_eq!(
            (fake.setting_value("pages_to_scan"), fake.setting_value("sleep_millisecs")),
            ("20000".to_owned(), "20".to_owned())
        );
        drop(session);
        assert_eq!(load_current_policy(&host, directory.path()).unwrap(), None);
        // The failed undo stays in the journal for the next session.
        begin(&fake, directory.path());
        assert_eq!(fake.setting_values(), before);
    }

    #[test]
    fn unrecordable_policy_is_undone() {
        for file in [ResourceClass::Ksm.kept_changes_file(), ResourceClass::Ksm.journal_file()] {
            let (host, directory) = (FakeHost::booted(), tempfile::tempdir().unwrap());
            let before = host.setting_values();
            let mut session = begin(&host, directory.path());
            // This directory blocks the replacement of the file.
            std::fs::create_dir(directory.path().join(format!("{file}.new"))).unwrap();
            let error = set_policy(&mut session, &named_policy("flat-out"), "flat-out").unwrap_err();
            assert!(matches!(error, Error::Journal(_)), "{error}");
            assert_eq!(host.setting_values(), before);
        }
    }

    #[test]
    fn conflicting_settings_are_reported() {
        let host = FakeHost::booted();
        let pace = Settings::from([(Setting::PagesToScan, "9".to_owned())]);
        assert_eq!(find_conflict(&host, &pace), None);
        host.put_setting("advisor_mode", "scan-time");
        assert!(find_conflict(&host, &pace).unwrap().contains("advisor_mode = \"none\""));
        let both = [(Setting::AdvisorMode, "none".to_owned())].into_iter().chain(pace).collect();
        assert_eq!(find_conflict(&host, &both), None);
    }
}
