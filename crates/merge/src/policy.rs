//! Carrying out a [`Policy`]: once, until it is restored, or for as long as somebody watches.
//!
//! Limits: what ksmtuned takes for committed is the resident memory of all QEMU processes that this process may see.

use crate::decide::policy::{Observation, Policy};
use crate::ksmd::Ksmd;
use pagefold_base::identity::Monitor;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::{Absent, Bytes, Reading};
use pagefold_host::transaction::journal;
use pagefold_host::transaction::session::{Error, Remains, Session};
use pagefold_host::{Host, observe, parse};
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How soon somebody who follows a policy stops when told to.
const HEED: Duration = Duration::from_millis(50);

/// What policies go by, as of now.
pub fn observe(host: &dyn Host) -> Observation {
    let meminfo = host.read("proc/meminfo");
    let memory = meminfo.as_deref().map(parse::meminfo).map_err(Absent::clone);
    let free = |bytes: &[u8]| Ok(parse::meminfo(bytes).free? + parse::cache(bytes)?);
    Observation {
        total: memory.and_then(|memory| memory.total),
        free: meminfo.as_deref().map_err(Absent::clone).and_then(free),
        committed: committed(host),
        ksm: observe::ksm(host),
        ksmd_cpu: Ksmd::find(host).and_then(|ksmd| ksmd.cpu()),
    }
}

/// Resident memory of all QEMU processes. Those that end meanwhile or cannot be read are left out, as `ps` does.
fn committed(host: &dyn Host) -> Reading<Bytes> {
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

/// Settings that cannot be had together, with what to do about it.
pub fn conflict(host: &dyn Host, settings: &Settings) -> Option<String> {
    let mode = match settings.get(&Setting::AdvisorMode) {
        Some(mode) => mode.clone(),
        None => pagefold_host::act::setting_now(host, Setting::AdvisorMode).ok()?,
    };
    (mode == "scan-time" && settings.contains_key(&Setting::PagesToScan)).then(|| {
        "the kernel takes no pages_to_scan while advisor_mode is scan-time: leave it out, or add advisor_mode = \"none\""
            .to_owned()
    })
}

/// What is to be written so that the host has a policy's settings: those, and for what only a former policy had set
/// what there was before that one.
pub fn wanted(session: &Session<'_>, settings: Settings) -> Result<Settings, Error> {
    let mut wanted = Settings::new();
    for entry in session.policy()?.into_iter().flat_map(|policy| policy.entries) {
        if let pagefold_host::act::Action::Set { setting, value } = entry.undo {
            wanted.insert(setting, value);
        }
    }
    let own_pace = settings.contains_key(&Setting::PagesToScan);
    wanted.extend(settings);
    if !own_pace && wanted.get(&Setting::AdvisorMode).is_some_and(|mode| mode == "scan-time") {
        wanted.remove(&Setting::PagesToScan);
    }
    Ok(wanted)
}

/// Give a host the settings of a policy until [`Session::restore_policy`]. Of a policy that adapts, those of one step.
/// Tells them, and what else the session had changed and could not put back.
///
/// # Errors
/// The host has what it had then, but for what [`Error::Remains`] names.
pub fn set(session: &mut Session<'_>, policy: &Policy, name: &str) -> Result<(Settings, Vec<Remains>), Error> {
    let settings = policy.once(&observe(session.host())).map_err(Error::Unknown)?;
    let wanted = wanted(session, settings.clone())?;
    match session.set(&wanted).and_then(|()| session.keep(name)) {
        Ok(remains) => Ok((settings, remains)),
        Err(error) => Err(session.give_up(error)),
    }
}

/// Follow a policy until told to stop: write its settings, and after each interval those of its next step. Policies
/// that do not adapt are held and watched. The settings come back with the session.
///
/// Another writer ends it with [`Error::Contested`]: then end the session, which leaves what the other wrote. Tells how
/// many steps were taken.
pub fn follow(session: &mut Session<'_>, policy: &Policy, mut until: impl FnMut() -> bool) -> Result<u64, Error> {
    let (mut state, settings) = policy.start(&observe(session.host())).map_err(Error::Unknown)?;
    session.set(&settings)?;
    let mut steps = 0;
    loop {
        let next = Instant::now() + policy.interval();
        loop {
            if until() {
                return Ok(steps);
            }
            match next.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
                Some(left) => thread::sleep(left.min(HEED)),
                None => break,
            }
        }
        session.uncontested()?;
        let settings;
        (state, settings) = policy.step(state, &observe(session.host())).map_err(Error::Unknown)?;
        session.set(&settings)?;
        steps += 1;
    }
}

/// What was written down of the policy that is set, without taking the lock.
pub fn current(host: &dyn Host, directory: &Path) -> Result<Option<journal::Journal>, journal::Error> {
    let boot = pagefold_host::transaction::session::boot(host);
    let policy = match journal::Directory::open(directory) {
        Ok(directory) => journal::Journal::load(&directory, journal::POLICY)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(journal::Error::Io { path: directory.to_owned(), source }),
    };
    Ok(policy.filter(|policy| boot.as_ref() == Ok(&policy.boot)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::policy::Ksmtuned;
    use pagefold_host::fake::Fake;
    use pagefold_host::faulty::{Fault, Faulty};
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn begin<'a>(host: &'a dyn Host, directory: &Path) -> Session<'a> {
        Session::begin(host, directory).unwrap().0
    }

    fn named(name: &str) -> Policy {
        Policy::named(name).unwrap().unwrap()
    }

    fn fast() -> Policy {
        Policy::Ksmtuned(Ksmtuned { interval: Duration::from_millis(1), ..Ksmtuned::default() })
    }

    /// A guest with so many resident pages.
    fn guest(host: &Fake, pid: u32, pages: u64) {
        host.file(
            &format!("proc/{pid}/stat"),
            &format!("{pid} (qemu) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 1 0 0\n"),
        );
        host.file(&format!("proc/{pid}/cmdline"), "/usr/bin/qemu-system-x86_64\0-enable-kvm\0");
        host.file(&format!("proc/{pid}/statm"), &format!("9999999 {pages} 1 1 0 1 0\n"));
    }

    #[test]
    fn what_a_policy_goes_by() {
        let host = Fake::booted();
        guest(&host, 7, 1000);
        guest(&host, 8, 24);
        host.file("proc/9/stat", "9 (ksmd) S 2 0 0 0 -1 2097216 0 0 0 0 0 250 0 0 25 5 1 0 30 0 0\n");
        host.file("proc/meminfo", "MemTotal: 100 kB\nMemFree: 1 kB\nBuffers: 2 kB\nCached: 4 kB\nSwapCached: 8 kB\n");
        let seen = observe(&host);
        assert_eq!((seen.total, seen.free), (Ok(Bytes::from_kib(100)), Ok(Bytes::from_kib(7))));
        assert_eq!(seen.committed, Ok(Bytes(1024 * 4096)));
        assert_eq!(seen.ksmd_cpu, Ok(Duration::from_millis(2500)));
        assert_eq!(seen.ksm.unwrap().pages_to_scan, Ok(100));
    }

    #[test]
    fn ksmtuned_is_followed_as_memory_gets_short() {
        let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
        let before = host.values();
        let mut session = begin(&host, directory.path());
        let mut turn = 0;
        let steps = follow(&mut session, &fast(), || {
            let pace = (host.value("pages_to_scan"), host.value("run"));
            match turn {
                0 => {
                    assert_eq!(pace, ("100".to_owned(), "0".to_owned()), "nothing before the first interval");
                    host.free(1_000_000);
                    turn = 1;
                }
                1 if pace.0 == "600" => turn = 2,
                _ => {}
            }
            turn == 2
        });
        assert_eq!(steps.unwrap(), 2);
        assert_eq!((host.value("sleep_millisecs"), host.value("run")), ("16".to_owned(), "1".to_owned()));
        assert_eq!(session.finish().unwrap(), Vec::new());
        assert_eq!(host.values(), before);
    }

    #[test]
    fn another_writer_ends_it() {
        for policy in [fast(), named("flat-out")] {
            let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
            host.free(1);
            let mut session = begin(&host, directory.path());
            let error = follow(&mut session, &policy, || {
                if host.value("run") == "1" {
                    host.put("pages_to_scan", "55");
                }
                false
            });
            assert!(matches!(error, Err(Error::Contested { setting: Setting::PagesToScan, .. })), "{error:?}");
            let remains = session.finish().unwrap();
            assert_eq!(remains.len(), 1, "{remains:?}");
            assert_eq!((host.value("pages_to_scan"), host.value("run")), ("55".to_owned(), "0".to_owned()));
        }
    }

    #[test]
    fn what_only_a_former_policy_set_comes_back() {
        let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
        host.put("pages_to_scan", "777");
        let before = host.values();
        let zero = Policy::Fixed(Settings::from([(Setting::UseZeroPages, "1".to_owned())]));
        for (policy, name) in [(zero, "file"), (named("flat-out"), "flat-out"), (named("advisor"), "advisor")] {
            let mut session = begin(&host, directory.path());
            set(&mut session, &policy, name).unwrap();
            let seen = current(&host, directory.path()).unwrap().unwrap();
            assert_eq!(seen.purpose.as_deref(), Some(name));
            assert_eq!(host.value("use_zero_pages"), if name == "file" { "1" } else { "0" });
        }
        assert_eq!(host.value("advisor_mode"), "scan-time");
        let (_, remains) = begin(&host, directory.path()).restore_policy().unwrap();
        assert_eq!(remains, Vec::new());
        assert_eq!(host.values(), before);
        assert_eq!(current(&host, directory.path()).unwrap(), None);
    }

    #[test]
    fn a_policy_that_cannot_be_set_changes_nothing() {
        for setting in ["advisor_mode", "pages_to_scan", "sleep_millisecs", "run"] {
            let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
            let wanted = format!("#set {setting}");
            let refused = |path: &str| (path == wanted).then_some(Fault::Absent(Absent::Denied));
            let host = Faulty::new(&fake, refused);
            fake.put("advisor_mode", "scan-time");
            let before = fake.values();
            let mut session = begin(&host, directory.path());
            let error = set(&mut session, &named("flat-out"), "flat-out").unwrap_err();
            assert!(matches!(error, Error::Refused(_)), "{error}");
            drop(session);
            assert_eq!(current(&host, directory.path()).unwrap(), None);
            let moved: Vec<_> = fake.values().into_iter().filter(|value| !before.contains(value)).collect();
            // Where the advisor starts anew.
            assert!(moved.iter().all(|value| value.starts_with("pages_to_scan")), "{setting}: {moved:?}");
        }
    }

    /// The last setting of a policy is refused, and then the way back of another one.
    #[test]
    fn a_policy_that_can_neither_be_set_nor_taken_back_says_what_remains() {
        let (fake, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
        let before = fake.values();
        let paces = AtomicUsize::new(0);
        let refused = |path: &str| {
            let fails = match path {
                "#set run" => true,
                "#set pages_to_scan" => paces.fetch_add(1, Ordering::Relaxed) > 0,
                _ => false,
            };
            fails.then_some(Fault::Absent(Absent::Denied))
        };
        let host = Faulty::new(&fake, refused);
        let mut session = begin(&host, directory.path());
        let error = set(&mut session, &named("flat-out"), "flat-out").unwrap_err();
        let told = pagefold_host::transaction::session::chain(&error);
        let Error::Remains { remains, source } = error else { panic!("{told}") };
        assert!(matches!(*source, Error::Refused(_)), "{told}");
        assert_eq!(remains.len(), 1, "{told}");
        assert!(remains[0].kept && told.contains("(/sys/kernel/mm/ksm/pages_to_scan was 100: "), "{told}");
        assert_eq!((fake.value("pages_to_scan"), fake.value("sleep_millisecs")), ("20000".to_owned(), "20".to_owned()));
        drop(session);
        assert_eq!(current(&host, directory.path()).unwrap(), None);
        // It stays written down for the next one.
        begin(&fake, directory.path());
        assert_eq!(fake.values(), before);
    }

    #[test]
    fn a_policy_that_cannot_be_written_down_is_taken_back() {
        for file in [journal::POLICY, journal::SESSION] {
            let (host, directory) = (Fake::booted(), tempfile::tempdir().unwrap());
            let before = host.values();
            let mut session = begin(&host, directory.path());
            // It is in the way of the file that is to replace another.
            std::fs::create_dir(directory.path().join(format!("{file}.new"))).unwrap();
            let error = set(&mut session, &named("flat-out"), "flat-out").unwrap_err();
            assert!(matches!(error, Error::Journal(_)), "{error}");
            assert_eq!(host.values(), before);
        }
    }

    #[test]
    fn settings_that_exclude_each_other_are_named() {
        let host = Fake::booted();
        let pace = Settings::from([(Setting::PagesToScan, "9".to_owned())]);
        assert_eq!(conflict(&host, &pace), None);
        host.put("advisor_mode", "scan-time");
        assert!(conflict(&host, &pace).unwrap().contains("advisor_mode = \"none\""));
        let both = [(Setting::AdvisorMode, "none".to_owned())].into_iter().chain(pace).collect();
        assert_eq!(conflict(&host, &both), None);
    }
}
