//! Changing a host, with everything put back.
//!
//! A [`Session`] holds the one lock that lets somebody change KSM's settings and enrolments, and writes each change
//! into the [`journal`](crate::journal) before it is made. What was changed for a time only comes back when the session
//! ends, newest first: at the end of the work, on an error, in a panic. After `kill -9` the next session, or
//! `pagefold recover`, finds the journal and puts it back. What cannot be put back now but may be later stays written
//! down, and the next session tries again.
//!
//! A setting is put back only where it still has the value that was written last. Another value was written by
//! somebody else since, and is theirs: Pagefold yields and says so. One setting is written by the kernel too: a change
//! of `advisor_mode` resets `pages_to_scan` (mm/ksm.c, `set_advisor_defaults`), and while the advisor is on it moves.
//! So what `pages_to_scan` was is written down before the mode is changed, and comes back after it.
//!
//! Settings that a policy leaves behind on purpose ([`Session::keep`]) are written down apart, until
//! [`Session::restore_policy`].

use crate::journal::{self, Entry, Journal, POLICY, SESSION};
use pagefold_host::Host;
use pagefold_host::act::{self, Action, Advice, Effect, Refusal};
use pagefold_model::Absent;
use pagefold_model::ksm::{Setting, Settings};
use pagefold_model::policy::DEFAULT_PAGES_TO_SCAN;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Where lock and journal are kept unless said otherwise.
pub const DIRECTORY: &str = "/run/pagefold";

/// Whether a change comes back when the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// It is put back.
    ForNow,
    /// It is what the session is for.
    ForGood,
}

/// Why a session could not begin or a change could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another one is under way.
    #[error("another pagefold{} changes this host now: wait for it, or stop it", holder(.0))]
    Busy(Option<u32>),
    /// The lock cannot be had.
    #[error("cannot use {path} (as root it is made; elsewhere give --state DIR)")]
    State {
        /// Which path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others could write what is to be put back.
    #[error(
        "{0} can be written by others: whoever can write the journal decides what is done; use a directory of yours"
    )]
    Exposed(PathBuf),
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// What the host has now cannot be read, so it could not be put back.
    #[error("cannot tell what there is now, so it could not be put back")]
    Unknown(#[source] Absent),
    /// A setting cannot be read, so it could not be put back.
    #[error("cannot read /sys/kernel/mm/ksm/{}{}", .setting.file(), unreadable(.source))]
    Setting {
        /// Which.
        setting: Setting,
        /// Why.
        source: Absent,
    },
    /// The change was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Somebody else has written a setting since.
    #[error("somebody else writes /sys/kernel/mm/ksm/{}: it was {wrote}, it is {found}", .setting.file())]
    Contested {
        /// Which.
        setting: Setting,
        /// What this session had written.
        wrote: String,
        /// What is there.
        found: String,
    },
}

fn holder(pid: &Option<u32>) -> String {
    pid.map(|pid| format!(" (process {pid})")).unwrap_or_default()
}

/// What to do about a setting that cannot be read.
fn unreadable(why: &Absent) -> &'static str {
    match why {
        Absent::NotOnThisKernel => " (a kernel with CONFIG_KSM is needed, and for the advisor 6.8 or later)",
        Absent::Denied => " (run as root)",
        _ => "",
    }
}

/// Something that could not be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remains {
    /// What would have put it back.
    pub undo: Action,
    /// Why it was not.
    pub why: String,
    /// Whether the next session tries again.
    pub kept: bool,
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", Was(&self.undo), self.why)
    }
}

/// What puts a change back, for people: as what there was before it.
pub struct Was<'a>(pub &'a Action);

impl fmt::Display for Was<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Action::Set { setting, value } => write!(f, "/sys/kernel/mm/ksm/{} was {value}", setting.file()),
            Action::Advise { process, advice, ranges } => {
                let was = if *advice == Advice::Mergeable { "enrolled" } else { "not enrolled" };
                write!(f, "{} ranges of process {} were {was}", ranges.len(), process.pid)
            }
            Action::MergeAny { process, on } => {
                write!(f, "process {} was {}enrolled whole", process.pid, if *on { "" } else { "not " })
            }
            Action::GuestMerge { process, backend, on, .. } => {
                let was = if *on { "" } else { "not " };
                write!(f, "{backend} of the guest of process {} was {was}enrolled", process.pid)
            }
            Action::Collapse { process, .. } => write!(f, "huge pages of process {}", process.pid),
        }
    }
}

/// The right to change a host, and what is to be put back.
pub struct Session<'a> {
    host: &'a dyn Host,
    directory: PathBuf,
    /// What comes back when this session ends.
    journal: Journal,
    /// What could not be put back and may be later, oldest first.
    left: Vec<Entry>,
    _lock: File,
}

/// How the journal was before an action was noted.
struct Noted {
    length: usize,
    written: Vec<(usize, Vec<String>)>,
}

impl<'a> Session<'a> {
    /// Take the lock in a directory, made if it is not there, and put back what a killed session left. Tells that too.
    pub fn begin(host: &'a dyn Host, directory: &Path) -> Result<(Self, Vec<Action>, Vec<Remains>), Error> {
        let lock = lock(directory)?;
        let boot = boot(host).map_err(Error::Unknown)?;
        let left = Journal::load(directory, SESSION)?.filter(|journal| journal.boot == boot);
        let empty = Journal { boot, writer: std::process::id(), purpose: None, entries: Vec::new() };
        let mut session = Self { host, directory: directory.to_owned(), journal: empty, left: Vec::new(), _lock: lock };
        let Some(left) = left else { return Ok((session, Vec::new(), Vec::new())) };
        session.journal.entries = left.entries;
        let (undone, remains) = session.put_back()?;
        Ok((session, undone, remains))
    }

    /// The host.
    pub fn host(&self) -> &'a dyn Host {
        self.host
    }

    /// Make a change, after it was written down what puts it back. A setting that is changed for good no longer comes
    /// back, whatever was done to it before.
    pub fn apply(&mut self, action: &Action, stays: Stays) -> Result<Effect, Error> {
        if stays == Stays::ForGood {
            let effect = self.host.apply(action)?;
            if let Action::Set { setting, .. } = action {
                let length = self.journal.entries.len();
                self.journal.entries.retain(|entry| !sets(entry, *setting));
                if self.journal.entries.len() < length {
                    self.store()?;
                }
            }
            return Ok(effect);
        }
        let noted = self.note(action)?;
        self.host.apply(action).map_err(|refusal| {
            // Nothing was changed, so there is nothing to put back. Where something may have been, taking back what was
            // not done does no harm.
            let untouched = matches!(action, Action::Set { .. }) || !matches!(refusal, Refusal::Failed(_));
            match if untouched { self.forget(noted) } else { Ok(()) } {
                Ok(()) => refusal.into(),
                Err(error) => error,
            }
        })
    }

    /// Write settings for now, in the order in which the kernel takes them. Those that have the value are not written.
    pub fn set(&mut self, settings: &Settings) -> Result<(), Error> {
        for (&setting, value) in settings {
            let now = self.now(setting)?;
            self.check(setting, &now)?;
            if now != *value {
                self.apply(&Action::Set { setting, value: value.clone() }, Stays::ForNow)?;
            }
        }
        Ok(())
    }

    /// Whether settings can be written at all, found out by writing one that changes nothing.
    pub fn writable(&self) -> Result<(), Error> {
        let value = self.now(Setting::Run)?;
        self.host.apply(&Action::Set { setting: Setting::Run, value })?;
        Ok(())
    }

    /// Whether every setting still has the value that this session wrote.
    pub fn uncontested(&self) -> Result<(), Error> {
        for entry in &self.journal.entries {
            if let Action::Set { setting, .. } = entry.undo {
                self.check(setting, &self.now(setting)?)?;
            }
        }
        Ok(())
    }

    /// Put everything back that was changed for now, newest first.
    pub fn finish(&mut self) -> Result<Vec<Remains>, Error> {
        Ok(self.put_back()?.1)
    }

    /// End with the settings as they are now, as a policy's, and write down what they were before the first policy.
    /// Anything else that was changed for now comes back.
    pub fn keep(&mut self, policy: &str) -> Result<Vec<Remains>, Error> {
        let mut kept = self.policy()?.unwrap_or_else(|| Journal { entries: Vec::new(), ..self.journal.clone() });
        let settings = |entry: &Entry| matches!(entry.undo, Action::Set { .. });
        for entry in self.journal.entries.iter().filter(|entry| settings(entry)) {
            let Action::Set { setting, .. } = entry.undo else { continue };
            match kept.entries.iter_mut().find(|known| sets(known, setting)) {
                Some(known) => known.written.clone_from(&entry.written),
                None => kept.entries.push(entry.clone()),
            }
        }
        kept.purpose = Some(policy.to_owned());
        kept.store(&self.directory, POLICY)?;
        self.journal.entries.retain(|entry| !settings(entry));
        self.store()?;
        self.finish()
    }

    /// What the host had before a policy was set, with the policy's name, if one is set.
    pub fn policy(&self) -> Result<Option<Journal>, Error> {
        Ok(Journal::load(&self.directory, POLICY)?.filter(|journal| journal.boot == self.journal.boot))
    }

    /// Put back what the host had before a policy was set. Tells what was put back and what was not.
    pub fn restore_policy(&mut self) -> Result<(Vec<Action>, Vec<Remains>), Error> {
        let Some(policy) = self.policy()? else { return Ok((Vec::new(), Vec::new())) };
        self.journal.entries.extend(policy.entries);
        // From here on it is this session's to put back, also after it was killed.
        self.store()?;
        Journal { entries: Vec::new(), ..self.journal.clone() }.store(&self.directory, POLICY)?;
        self.put_back()
    }

    fn now(&self, setting: Setting) -> Result<String, Error> {
        act::setting_now(self.host, setting).map_err(|source| Error::Setting { setting, source })
    }

    fn check(&self, setting: Setting, now: &str) -> Result<(), Error> {
        // While this session has the advisor on, the kernel moves it.
        if setting == Setting::PagesToScan && self.wrote(Setting::AdvisorMode) == Some("scan-time") {
            return Ok(());
        }
        match self.wrote(setting) {
            Some(wrote) if wrote != now => {
                Err(Error::Contested { setting, wrote: wrote.to_owned(), found: now.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// What was written last.
    fn wrote(&self, setting: Setting) -> Option<&str> {
        self.journal.entries.iter().find(|entry| sets(entry, setting))?.written.last().map(String::as_str)
    }

    /// Write down what puts an action back. A setting keeps the value that it had first.
    fn note(&mut self, action: &Action) -> Result<Noted, Error> {
        let mut noted = Noted { length: self.journal.entries.len(), written: Vec::new() };
        if let Action::Set { setting, value } = action {
            let now = self.now(*setting)?;
            if *setting == Setting::AdvisorMode && now != *value && (now == "none" || self.known(Setting::PagesToScan))
            {
                self.note_setting(Setting::PagesToScan, &DEFAULT_PAGES_TO_SCAN.to_string(), &mut noted)?;
            }
            if now != *value || self.known(*setting) {
                self.note_setting(*setting, value, &mut noted)?;
            }
        } else {
            let undo = act::undo(self.host, action).map_err(Error::Unknown)?;
            self.journal.entries.extend(undo.into_iter().map(|undo| Entry { undo, written: Vec::new() }));
        }
        self.store()?;
        Ok(noted)
    }

    /// Write down that a setting is about to be written.
    fn note_setting(&mut self, setting: Setting, value: &str, noted: &mut Noted) -> Result<(), Error> {
        match self.journal.entries.iter().position(|entry| sets(entry, setting)) {
            Some(position) => {
                let written = &mut self.journal.entries[position].written;
                noted.written.push((position, written.clone()));
                let last = written.pop();
                *written = last.into_iter().chain([value.to_owned()]).collect();
            }
            None => {
                let undo = Action::Set { setting, value: self.now(setting)? };
                self.journal.entries.push(Entry { undo, written: vec![value.to_owned()] });
            }
        }
        Ok(())
    }

    /// Take back what was noted, because it was not done.
    fn forget(&mut self, noted: Noted) -> Result<(), Error> {
        for (position, written) in noted.written.into_iter().rev() {
            self.journal.entries[position].written = written;
        }
        self.journal.entries.truncate(noted.length);
        self.store()
    }

    fn known(&self, setting: Setting) -> bool {
        self.journal.entries.iter().any(|entry| sets(entry, setting))
    }

    fn store(&self) -> Result<(), Error> {
        let entries = self.left.iter().chain(&self.journal.entries).cloned().collect();
        let journal = Journal { boot: self.journal.boot.clone(), writer: self.journal.writer, purpose: None, entries };
        Ok(journal.store(&self.directory, SESSION)?)
    }

    /// Put back all there is, newest first, whatever happens to one of them or to the journal.
    fn put_back(&mut self) -> Result<(Vec<Action>, Vec<Remains>), Error> {
        let (mut undone, mut remains, mut stored) = (Vec::new(), Vec::new(), Ok(()));
        let older = self.left.len();
        // `run` was written last and is put back first, so that ksmd does not run under half of the old settings.
        while let Some(entry) = self.journal.entries.pop() {
            match self.put_back_one(&entry) {
                Ok(()) => undone.push(entry.undo),
                Err((why, kept)) => {
                    remains.push(Remains { undo: entry.undo.clone(), why, kept });
                    if kept {
                        self.left.insert(older, entry);
                    }
                }
            }
            stored = stored.and(self.store());
        }
        stored.map(|()| (undone, remains))
    }

    /// Put back one thing. If it cannot be: why, and whether to try again later.
    fn put_back_one(&self, entry: &Entry) -> Result<(), (String, bool)> {
        if let Action::Set { setting, value } = &entry.undo {
            let read = |setting| act::setting_now(self.host, setting);
            let now = read(*setting).map_err(|why| (why.to_string(), why != Absent::NotOnThisKernel))?;
            if now == *value {
                return Ok(());
            }
            if *setting == Setting::PagesToScan && read(Setting::AdvisorMode).as_deref() == Ok("scan-time") {
                let advisor = Action::Set { setting: Setting::AdvisorMode, value: "scan-time".to_owned() };
                if self.left.iter().any(|entry| sets(entry, Setting::AdvisorMode)) {
                    return Err(("the advisor is on, which could not be switched off".to_owned(), true));
                }
                // If the advisor was on before, it sets this.
                let before = self.journal.entries.iter().any(|older| older.undo == advisor);
                let foreign = || ("the advisor is on, which somebody else switched on".to_owned(), false);
                return if before { Ok(()) } else { Err(foreign()) };
            }
            if !entry.written.contains(&now) {
                return Err((format!("it is {now} now, which somebody else wrote"), false));
            }
        }
        match self.host.apply(&entry.undo) {
            Ok(_) | Err(Refusal::Vanished) => Ok(()),
            Err(why) => Err((why.to_string(), !matches!(why, Refusal::ReadOnly | Refusal::Unsupported(_)))),
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        match self.put_back() {
            Ok((_, remains)) => {
                for remains in remains {
                    eprintln!("pagefold: not put back: {remains}");
                }
            }
            Err(error) => eprintln!("pagefold: not put back: {error}"),
        }
    }
}

fn sets(entry: &Entry, of: Setting) -> bool {
    matches!(entry.undo, Action::Set { setting, .. } if setting == of)
}

/// Which boot of the host this is: journals of another one are void.
pub fn boot(host: &dyn Host) -> Result<String, Absent> {
    Ok(String::from_utf8_lossy(&host.read("proc/sys/kernel/random/boot_id")?).trim().to_owned())
}

/// The lock of a directory that is made if it is not there. Its file holds the number of the process that has it.
fn lock(directory: &Path) -> Result<File, Error> {
    let state = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::State { path, source }
    };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(state(directory))?;
    let metadata = fs::metadata(directory).map_err(state(directory))?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(Error::Exposed(directory.to_owned()));
    }
    let path = directory.join("lock");
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let mut lock = options.open(&path).map_err(state(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let read = lock.read_to_string(&mut holder);
            return Err(Error::Busy(read.ok().and_then(|_| holder.trim().parse().ok())));
        }
        Err(TryLockError::Error(source)) => return Err(Error::State { path, source }),
    }
    lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())).map_err(state(&path))?;
    Ok(lock)
}

#[cfg(test)]
mod tests;
