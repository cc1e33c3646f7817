//! Changing a host, with everything put back.
//!
//! A [`Session`] holds the one lock that lets somebody change KSM's settings and enrolments, and writes each change
//! into the [`journal`](crate::journal) before it is made. What was changed for a time only comes back when the session
//! ends, newest first: at the end of the work, on an error, in a panic. After `kill -9` the next session, or
//! `pagefold recover`, finds the journal and puts it back.
//!
//! A setting is put back only where it still has the value that was written last. Another value was written by
//! somebody else since, and is theirs: Pagefold yields and says so.

use crate::journal::{self, Entry, Journal};
use pagefold_host::Host;
use pagefold_host::act::{self, Action, Advice, Effect, Refusal};
use pagefold_model::Absent;
use pagefold_model::ksm::{Setting, Settings};
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
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
    /// The journal cannot be read or written.
    #[error(transparent)]
    Journal(#[from] journal::Error),
    /// What the host has now cannot be read, so it could not be put back.
    #[error("cannot tell what there is now, so it could not be put back")]
    Unknown(#[source] Absent),
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

/// Something that could not be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remains {
    /// What would have put it back.
    pub undo: Action,
    /// Why it was not.
    pub why: String,
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.undo {
            Action::Set { setting, value } => write!(f, "/sys/kernel/mm/ksm/{} was {value}", setting.file())?,
            Action::Advise { process, advice, ranges } => {
                let was = if *advice == Advice::Mergeable { "enrolled" } else { "not enrolled" };
                write!(f, "{} ranges of process {} were {was}", ranges.len(), process.pid)?;
            }
            Action::MergeAny { process, on } => {
                write!(f, "process {} was {}enrolled whole", process.pid, if *on { "" } else { "not " })?;
            }
            Action::GuestMerge { process, backend, on, .. } => {
                let was = if *on { "" } else { "not " };
                write!(f, "{backend} of the guest of process {} was {was}enrolled", process.pid)?;
            }
            Action::Collapse { process, .. } => write!(f, "huge pages of process {}", process.pid)?,
        }
        write!(f, ": {}", self.why)
    }
}

/// The right to change a host, and what is to be put back.
pub struct Session<'a> {
    host: &'a dyn Host,
    directory: PathBuf,
    journal: Journal,
    _lock: File,
}

impl<'a> Session<'a> {
    /// Take the lock in a directory, made if it is not there, and put back what a killed session left. Tells that too.
    pub fn begin(host: &'a dyn Host, directory: &Path) -> Result<(Self, Vec<Action>, Vec<Remains>), Error> {
        let state = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::State { path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(state(directory))?;
        let path = directory.join("lock");
        let lock = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(state(&path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Busy(Journal::load(directory).ok().flatten().map(|journal| journal.writer)));
            }
            Err(TryLockError::Error(source)) => return Err(Error::State { path, source }),
        }
        let boot = host.read("proc/sys/kernel/random/boot_id").map_err(Error::Unknown)?;
        let boot = String::from_utf8_lossy(&boot).trim().to_owned();
        let left = Journal::load(directory)?.filter(|journal| journal.boot == boot);
        let empty = Journal { boot, writer: std::process::id(), entries: Vec::new() };
        let mut session = Self { host, directory: directory.to_owned(), journal: empty, _lock: lock };
        let Some(left) = left else { return Ok((session, Vec::new(), Vec::new())) };
        let undone = left.entries.iter().map(|entry| entry.undo.clone()).collect();
        session.journal.entries = left.entries;
        let remains = session.put_back()?;
        Ok((session, undone, remains))
    }

    /// The host.
    pub fn host(&self) -> &'a dyn Host {
        self.host
    }

    /// Make a change, after it was written down what puts it back.
    pub fn apply(&mut self, action: &Action, stays: Stays) -> Result<Effect, Error> {
        if stays == Stays::ForNow {
            self.note(action)?;
        }
        Ok(self.host.apply(action)?)
    }

    /// Write settings for now, in the order in which the kernel takes them. Those that have the value are not written.
    pub fn set(&mut self, settings: &Settings) -> Result<(), Error> {
        for (&setting, value) in settings {
            let now = act::setting_now(self.host, setting).map_err(Error::Unknown)?;
            self.check(setting, &now)?;
            if now != *value {
                self.apply(&Action::Set { setting, value: value.clone() }, Stays::ForNow)?;
            }
        }
        Ok(())
    }

    /// Whether settings can be written at all, found out by writing one that changes nothing.
    pub fn writable(&self) -> Result<(), Error> {
        let value = act::setting_now(self.host, Setting::Run).map_err(Error::Unknown)?;
        self.host.apply(&Action::Set { setting: Setting::Run, value })?;
        Ok(())
    }

    /// Whether every setting still has the value that this session wrote.
    pub fn uncontested(&self) -> Result<(), Error> {
        for entry in &self.journal.entries {
            if let Action::Set { setting, .. } = entry.undo {
                self.check(setting, &act::setting_now(self.host, setting).map_err(Error::Unknown)?)?;
            }
        }
        Ok(())
    }

    /// Put everything back that was changed for now, newest first.
    pub fn finish(&mut self) -> Result<Vec<Remains>, Error> {
        self.put_back()
    }

    fn check(&self, setting: Setting, now: &str) -> Result<(), Error> {
        match self.written(setting) {
            Some(Entry { written, .. }) if written.last().is_some_and(|wrote| wrote != now) => Err(Error::Contested {
                setting,
                wrote: written.last().cloned().unwrap_or_default(),
                found: now.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    fn written(&self, of: Setting) -> Option<&Entry> {
        self.journal.entries.iter().find(|entry| matches!(entry.undo, Action::Set { setting, .. } if setting == of))
    }

    /// Write down what puts an action back. A setting keeps the value that it had first.
    fn note(&mut self, action: &Action) -> Result<(), Error> {
        let written = match action {
            Action::Set { value, .. } => vec![value.clone()],
            _ => Vec::new(),
        };
        let known = self.journal.entries.iter_mut().find(|entry| match (&entry.undo, action) {
            (Action::Set { setting, .. }, Action::Set { setting: new, .. }) => setting == new,
            _ => false,
        });
        match known {
            Some(entry) => {
                let last = entry.written.pop();
                entry.written = last.into_iter().chain(written).collect();
            }
            None => {
                let undo = act::undo(self.host, action).map_err(Error::Unknown)?;
                self.journal.entries.extend(undo.into_iter().map(|undo| Entry { undo, written: written.clone() }));
            }
        }
        Ok(self.journal.store(&self.directory)?)
    }

    fn put_back(&mut self) -> Result<Vec<Remains>, Error> {
        let mut remains = Vec::new();
        // `run` was written last and is put back first, so that ksmd does not run under half of the old settings.
        while let Some(entry) = self.journal.entries.last().cloned() {
            if let Err(why) = self.put_back_one(&entry) {
                remains.push(Remains { undo: entry.undo, why });
            }
            self.journal.entries.pop();
            self.journal.store(&self.directory)?;
        }
        Ok(remains)
    }

    fn put_back_one(&self, entry: &Entry) -> Result<(), String> {
        if let Action::Set { setting, value } = &entry.undo {
            let now = act::setting_now(self.host, *setting).map_err(|why| why.to_string())?;
            if now == *value {
                return Ok(());
            }
            if !entry.written.contains(&now) {
                return Err(format!("it is {now} now, which somebody else wrote"));
            }
        }
        match self.host.apply(&entry.undo) {
            Ok(_) | Err(Refusal::Vanished) => Ok(()),
            Err(why) => Err(why.to_string()),
        }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        match self.put_back() {
            Ok(remains) => {
                for remains in remains {
                    eprintln!("pagefold: not put back: {remains}");
                }
            }
            Err(error) => eprintln!("pagefold: not put back: {error}"),
        }
    }
}
