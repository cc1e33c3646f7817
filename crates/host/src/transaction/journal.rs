//! What is written down before a host is changed, so that it can be put back by whoever comes after a crash.
//!
//! A file in a directory on a file system that does not outlive the kernel (`/run/pagefold`). Its first line is JSON of
//! the whole journal, replaced atomically; each further line is JSON of changes to it ([`Change`]), so that what is
//! written for an action does not grow with the number of actions before it. A last line without an end was cut off
//! while it was written: what it was to allow was not done. The journal names the boot it belongs to: after a reboot
//! there is nothing to put back. A second file of the same form keeps what the host had before a policy was set, which
//! lasts beyond the command that set it.

use crate::act::{Action, Advice};
use pagefold_base::ksm::Setting;
use pagefold_base::{AddressRange, Pid, ProcessId};
use pagefold_sys::fault;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, renameat, unlinkat};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What is to be put back when the session ends.
pub const SESSION: &str = "journal.json";

/// What is to be put back when the policy is.
pub const POLICY: &str = "policy.json";

/// What is to be put back, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// `/proc/sys/kernel/random/boot_id` of the boot it was written under.
    pub boot: String,
    /// The process that writes it.
    pub writer: u32,
    /// What they were made for, where that outlasts the process: the name of a policy.
    pub purpose: Option<String>,
    /// In the order in which they were made.
    pub entries: Vec<Entry>,
}

/// One thing that is to be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// What puts it back.
    pub undo: Action,
    /// For a setting, the last two values that were written, since the last may not have been when it ended: another
    /// value there is somebody else's and stays.
    pub written: Vec<String>,
    /// For advice, what each of its ranges was part of: like memory without a gap. Whatever else lies there later is
    /// not what was advised.
    pub within: Vec<AddressRange>,
    /// Whether it stays once what it was made for is done.
    pub until_done: bool,
}

/// A change to the entries of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// One more, the newest.
    Push(Entry),
    /// Without the newest.
    Pop,
    /// Other values that were written to the setting of an entry, counted from the oldest.
    Written(usize, Vec<String>),
}

/// What a setting is to be put back to. `run` stays readable as 2 after everything was unmerged, and ksmd rests then
/// as it does at 0; but to write 2 once more would unmerge everything once more (mm/ksm.c, `run_store`).
pub fn resting(setting: Setting, value: String) -> String {
    if setting == Setting::Run && value == "2" { "0".to_owned() } else { value }
}

/// A directory that is held: what was found out about it stays true of what is used, whatever its path leads to later.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    handle: OwnedFd,
}

impl Directory {
    /// Take hold of one. A symbolic link in place of it is refused.
    ///
    /// # Errors
    /// Those of open(2).
    pub fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { path: path.to_owned(), handle: openat(CWD, path, flags, Mode::empty())? })
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether nobody but this user can write in it.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn is_private(&self) -> io::Result<bool> {
        let status = fstat(&self.handle)?;
        Ok(status.st_uid == rustix::process::geteuid().as_raw() && status.st_mode & 0o022 == 0)
    }

    /// Open a file in it, no symbolic link; a new one is for this user alone.
    ///
    /// # Errors
    /// Those of openat(2).
    pub fn file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.handle, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// All that is in a file of it.
    ///
    /// # Errors
    /// Those of openat(2) and read(2).
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.file(name, OFlags::RDONLY)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Replace a file, or leave it as it was.
    ///
    /// # Errors
    /// Those of openat(2), write(2), fdatasync(2) and renameat(2).
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{name}.new");
        let mut file = self.file(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        fault::point("before writing a journal");
        file.write_all(bytes)?;
        file.sync_data()?;
        fault::point("between writing a journal and renaming it");
        renameat(&self.handle, &temporary, &self.handle, name)?;
        fault::point("after renaming a journal");
        Ok(())
    }

    /// Add to the end of a file that is there.
    ///
    /// # Errors
    /// Those of openat(2), write(2) and fdatasync(2). A part may have been added then.
    pub fn append(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.file(name, OFlags::WRONLY | OFlags::APPEND)?;
        fault::point("before appending to a journal");
        file.write_all(bytes)?;
        file.sync_data()?;
        fault::point("after appending to a journal");
        Ok(())
    }

    /// Remove a file.
    ///
    /// # Errors
    /// Those of unlinkat(2).
    pub fn remove(&self, name: &str) -> io::Result<()> {
        fault::point("before removing a journal");
        unlinkat(&self.handle, name, AtFlags::empty())?;
        fault::point("after removing a journal");
        Ok(())
    }
}

/// Why a journal could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file system refused.
    #[error("{path}")]
    Io {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is no journal.
    #[error("{path} is no journal of this version; move it away once you have looked at it")]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: serde_json::Error,
    },
}

impl Journal {
    /// The one of a name in a directory, if there is one.
    pub fn load(directory: &Directory, file: &str) -> Result<Option<Self>, Error> {
        let path = directory.path.join(file);
        let bytes = match directory.read(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { path, source }),
        };
        Self::parse(&bytes).map(Some).map_err(|source| Error::Malformed { path, source })
    }

    fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let mut journal = Self::from(serde_json::from_slice::<Wire>(lines.next().unwrap_or_default())?);
        for line in lines.filter(|line| line.ends_with(b"\n")) {
            for change in serde_json::from_slice::<Vec<WireChange>>(line)? {
                journal.change(change.into())?;
            }
        }
        Ok(journal)
    }

    /// Make a change.
    fn change(&mut self, change: Change) -> Result<(), serde_json::Error> {
        let none = || serde::de::Error::custom("a change to an entry that is not there");
        match change {
            Change::Push(entry) => self.entries.push(entry),
            Change::Pop => drop(self.entries.pop().ok_or_else(none)?),
            Change::Written(at, written) => self.entries.get_mut(at).ok_or_else(none)?.written = written,
        }
        Ok(())
    }

    /// Replace the one of a name in a directory; remove it if there is nothing to put back. Tells its size in bytes.
    pub fn store(&self, directory: &Directory, file: &str) -> Result<usize, Error> {
        let stored = if self.entries.is_empty() {
            directory.remove(file).map(|()| 0).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(0),
                _ => Err(error),
            })
        } else {
            line(&Wire::from(self)).and_then(|text| directory.replace(file, &text).map(|()| text.len()))
        };
        stored.map_err(|source| Error::Io { path: directory.path.join(file), source })
    }

    /// Add changes to the one of a name in a directory. Tells how many bytes that took.
    ///
    /// # Errors
    /// Then the file is as it was, or ends in a line that is cut off: it has to be replaced before anything is added.
    pub fn append(directory: &Directory, file: &str, changes: &[Change]) -> Result<usize, Error> {
        let changes: Vec<WireChange> = changes.iter().filter_map(WireChange::of).collect();
        let appended = line(&changes).and_then(|text| directory.append(file, &text).map(|()| text.len()));
        appended.map_err(|source| Error::Io { path: directory.path.join(file), source })
    }
}

/// JSON with the end of a line.
fn line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wire {
    boot: String,
    writer: u32,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    purpose: Option<String>,
    entries: Vec<WireEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WireEntry {
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    written: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    within: Vec<(u64, u64)>,
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    until_done: bool,
    undo: WireAction,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum WireChange {
    Push(WireEntry),
    Pop,
    Written { entry: usize, written: Vec<String> },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum WireAction {
    Set { setting: WireSetting, value: String },
    Advise { pid: u32, start_time: u64, mergeable: bool, ranges: Vec<(u64, u64)> },
    MergeAny { pid: u32, start_time: u64, on: bool },
    GuestMerge { pid: u32, start_time: u64, socket: PathBuf, backend: String, on: bool },
}

#[derive(Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct WireSetting(Setting);

impl Clone for WireSetting {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl TryFrom<String> for WireSetting {
    type Error = String;

    fn try_from(file: String) -> Result<Self, String> {
        Setting::of_file(&file).map(Self).ok_or_else(|| format!("{file} is no setting of KSM"))
    }
}

impl From<WireSetting> for String {
    fn from(setting: WireSetting) -> Self {
        setting.0.file().to_owned()
    }
}

fn pairs(ranges: &[AddressRange]) -> Vec<(u64, u64)> {
    ranges.iter().map(|range| (range.start, range.end)).collect()
}

fn ranges(pairs: Vec<(u64, u64)>) -> Vec<AddressRange> {
    pairs.into_iter().map(|(start, end)| AddressRange { start, end }).collect()
}

impl WireAction {
    /// What puts something back, for the file; a collapse never does.
    fn of(undo: &Action) -> Option<Self> {
        Some(match undo {
            Action::Set { setting, value } => Self::Set { setting: WireSetting(*setting), value: value.clone() },
            Action::Advise { process, advice, ranges } => Self::Advise {
                pid: process.pid.0,
                start_time: process.start_time,
                mergeable: *advice == Advice::Mergeable,
                ranges: pairs(ranges),
            },
            Action::MergeAny { process, on } => {
                Self::MergeAny { pid: process.pid.0, start_time: process.start_time, on: *on }
            }
            Action::GuestMerge { process, socket, backend, on } => Self::GuestMerge {
                pid: process.pid.0,
                start_time: process.start_time,
                socket: socket.clone(),
                backend: backend.clone(),
                on: *on,
            },
            Action::Collapse { .. } => return None,
        })
    }
}

impl From<WireAction> for Action {
    fn from(action: WireAction) -> Self {
        let process = |pid, start_time| ProcessId { pid: Pid(pid), start_time };
        match action {
            WireAction::Set { setting, value } => Self::Set { setting: setting.0, value: resting(setting.0, value) },
            WireAction::Advise { pid, start_time, mergeable, ranges: pairs } => Self::Advise {
                process: process(pid, start_time),
                advice: if mergeable { Advice::Mergeable } else { Advice::Unmergeable },
                ranges: ranges(pairs),
            },
            WireAction::MergeAny { pid, start_time, on } => Self::MergeAny { process: process(pid, start_time), on },
            WireAction::GuestMerge { pid, start_time, socket, backend, on } => {
                Self::GuestMerge { process: process(pid, start_time), socket, backend, on }
            }
        }
    }
}

impl WireEntry {
    /// An entry for the file, if anything puts it back.
    fn of(entry: &Entry) -> Option<Self> {
        Some(Self {
            written: entry.written.clone(),
            within: pairs(&entry.within),
            until_done: entry.until_done,
            undo: WireAction::of(&entry.undo)?,
        })
    }
}

impl From<WireEntry> for Entry {
    fn from(entry: WireEntry) -> Self {
        Self {
            undo: entry.undo.into(),
            written: entry.written,
            within: ranges(entry.within),
            until_done: entry.until_done,
        }
    }
}

impl WireChange {
    fn of(change: &Change) -> Option<Self> {
        Some(match change {
            Change::Push(entry) => Self::Push(WireEntry::of(entry)?),
            Change::Pop => Self::Pop,
            Change::Written(entry, written) => Self::Written { entry: *entry, written: written.clone() },
        })
    }
}

impl From<WireChange> for Change {
    fn from(change: WireChange) -> Self {
        match change {
            WireChange::Push(entry) => Self::Push(entry.into()),
            WireChange::Pop => Self::Pop,
            WireChange::Written { entry, written } => Self::Written(entry, written),
        }
    }
}

impl From<&Journal> for Wire {
    fn from(journal: &Journal) -> Self {
        Self {
            boot: journal.boot.clone(),
            writer: journal.writer,
            purpose: journal.purpose.clone(),
            entries: journal.entries.iter().filter_map(WireEntry::of).collect(),
        }
    }
}

impl From<Wire> for Journal {
    fn from(wire: Wire) -> Self {
        let entries = wire.entries.into_iter().map(Entry::from).collect();
        Self { boot: wire.boot, writer: wire.writer, purpose: wire.purpose, entries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn open(directory: &tempfile::TempDir) -> Directory {
        Directory::open(directory.path()).unwrap()
    }

    #[test]
    fn what_is_stored_is_loaded() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = open(&temporary);
        let process = ProcessId { pid: Pid(7), start_time: 99 };
        let ranges = vec![AddressRange { start: 4096, end: 8192 }];
        let undo = [
            Action::Set { setting: Setting::Run, value: "0".to_owned() },
            Action::Advise { process, advice: Advice::Mergeable, ranges: ranges.clone() },
            Action::MergeAny { process, on: false },
            Action::GuestMerge { process, socket: "/run/q.sock".into(), backend: "/objects/ram".to_owned(), on: true },
        ];
        let entries = undo
            .map(|undo| Entry { undo, written: vec!["1".to_owned()], within: ranges.clone(), until_done: true })
            .to_vec();
        let journal = Journal { boot: "b".to_owned(), writer: 3, purpose: Some("default".to_owned()), entries };
        assert_eq!(Journal::load(&directory, SESSION).unwrap(), None);
        journal.store(&directory, SESSION).unwrap();
        assert_eq!(Journal::load(&directory, SESSION).unwrap(), Some(journal.clone()));
        assert_eq!(Journal::load(&directory, POLICY).unwrap(), None);
        Journal { entries: Vec::new(), ..journal }.store(&directory, SESSION).unwrap();
        assert_eq!(Journal::load(&directory, SESSION).unwrap(), None);
    }

    /// Entries of one setting each, by the value that it had.
    fn entry(value: &str) -> Entry {
        let undo = Action::Set { setting: Setting::PagesToScan, value: value.to_owned() };
        Entry { undo, written: Vec::new(), within: Vec::new(), until_done: false }
    }

    #[test]
    fn changes_are_loaded_and_one_that_was_cut_off_is_not() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = open(&temporary);
        let journal = Journal { boot: "b".to_owned(), entries: vec![entry("1")], ..Journal::default() };
        journal.store(&directory, SESSION).unwrap();
        let changes = [Change::Push(entry("2")), Change::Push(entry("3")), Change::Written(1, vec!["9".to_owned()])];
        Journal::append(&directory, SESSION, &changes).unwrap();
        Journal::append(&directory, SESSION, &[Change::Pop]).unwrap();
        let expected = [entry("1"), Entry { written: vec!["9".to_owned()], ..entry("2") }];
        let loaded = || Journal::load(&directory, SESSION).map(|journal| journal.unwrap().entries);
        assert_eq!(loaded().unwrap(), expected);
        let whole = directory.read(SESSION).unwrap();
        Journal::append(&directory, SESSION, &[Change::Push(entry("4"))]).unwrap();
        let longer = directory.read(SESSION).unwrap();
        for length in whole.len()..longer.len() {
            directory.replace(SESSION, &longer[..length]).unwrap();
            assert_eq!(loaded().unwrap(), expected, "cut off after {length} of {} bytes", longer.len());
        }
        for wrong in [&b"[\"pop\",\"pop\",\"pop\"]\n"[..], b"[{\"written\":{\"entry\":2,\"written\":[]}}]\n", b"x\n"] {
            directory.replace(SESSION, &[&whole, wrong].concat()).unwrap();
            assert!(matches!(loaded(), Err(Error::Malformed { .. })), "{}", String::from_utf8_lossy(wrong));
        }
    }

    #[test]
    fn what_is_not_a_journal_is_named() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"boot":"","writer":1,"entries":[{"undo":{"set":{"setting":"x","value":""}}}]}"#] {
            fs::write(directory.path().join(SESSION), text).unwrap();
            let error = Journal::load(&open(&directory), SESSION).unwrap_err();
            assert!(error.to_string().contains("journal.json"), "{error}");
        }
    }

    #[test]
    fn a_link_is_never_followed() {
        let temporary = tempfile::tempdir().unwrap();
        let [real, link, foreign] = ["real", "link", "foreign"].map(|name| temporary.path().join(name));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(Directory::open(&link).is_err());
        fs::write(&foreign, "theirs").unwrap();
        for name in [SESSION.to_owned(), format!("{SESSION}.new"), "lock".to_owned()] {
            std::os::unix::fs::symlink(&foreign, real.join(name)).unwrap();
        }
        let directory = Directory::open(&real).unwrap();
        assert!(directory.read(SESSION).is_err());
        assert!(directory.replace(SESSION, b"x").is_err());
        assert!(directory.file("lock", OFlags::RDWR | OFlags::CREATE).is_err());
        assert_eq!(fs::read_to_string(&foreign).unwrap(), "theirs");
    }

    /// What is put in the place of a directory that is held is never written.
    #[test]
    fn a_held_directory_stays_the_one_that_was_checked() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("state");
        fs::create_dir(&path).unwrap();
        let directory = Directory::open(&path).unwrap();
        fs::rename(&path, temporary.path().join("moved")).unwrap();
        fs::create_dir(&path).unwrap();
        directory.replace(SESSION, b"x").unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
        assert_eq!(directory.read(SESSION).unwrap(), b"x");
        directory.remove(SESSION).unwrap();
        assert_eq!(fs::read_dir(temporary.path().join("moved")).unwrap().count(), 0);
    }
}
