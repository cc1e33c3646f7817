//! What is written down before a host is changed, so that it can be put back by whoever comes after a crash.
//!
//! One JSON file in a directory on a file system that does not outlive the kernel (`/run/pagefold`), replaced atomically.
//! It names the boot it belongs to: after a reboot there is nothing to put back. A second file of the same form keeps
//! what the host had before a policy was set, which lasts beyond the command that set it.

use pagefold_host::act::{Action, Advice};
use pagefold_model::ksm::Setting;
use pagefold_model::{AddressRange, Pid, ProcessId};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
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
    pub fn load(directory: &Path, file: &str) -> Result<Option<Self>, Error> {
        let path = directory.join(file);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { path, source }),
        };
        match serde_json::from_slice::<Wire>(&bytes) {
            Ok(wire) => Ok(Some(wire.into())),
            Err(source) => Err(Error::Malformed { path, source }),
        }
    }

    /// Replace the one of a name in a directory; remove it if there is nothing to put back.
    pub fn store(&self, directory: &Path, file: &str) -> Result<(), Error> {
        let path = directory.join(file);
        let failed = |source| Error::Io { path: path.clone(), source };
        if self.entries.is_empty() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
                _ => Ok(()),
            };
        }
        let temporary = directory.join(format!("{file}.new"));
        let text = serde_json::to_vec(&Wire::from(self)).map_err(|error| failed(error.into()))?;
        let write = || {
            let mut file =
                fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
            file.write_all(&text)?;
            file.sync_data()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(failed)
    }
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
    undo: WireAction,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum WireAction {
    Set { setting: WireSetting, value: String },
    Advise { pid: u32, start_time: u64, mergeable: bool, ranges: Vec<(u64, u64)> },
    MergeAny { pid: u32, start_time: u64, on: bool },
    GuestMerge { pid: u32, start_time: u64, socket: PathBuf, backend: String, on: bool },
    Collapse { pid: u32, start_time: u64, ranges: Vec<(u64, u64)> },
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

impl From<&Action> for WireAction {
    fn from(action: &Action) -> Self {
        match action {
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
            Action::Collapse { process, ranges } => {
                Self::Collapse { pid: process.pid.0, start_time: process.start_time, ranges: pairs(ranges) }
            }
        }
    }
}

impl From<WireAction> for Action {
    fn from(action: WireAction) -> Self {
        let process = |pid, start_time| ProcessId { pid: Pid(pid), start_time };
        match action {
            WireAction::Set { setting, value } => Self::Set { setting: setting.0, value },
            WireAction::Advise { pid, start_time, mergeable, ranges: pairs } => Self::Advise {
                process: process(pid, start_time),
                advice: if mergeable { Advice::Mergeable } else { Advice::Unmergeable },
                ranges: ranges(pairs),
            },
            WireAction::MergeAny { pid, start_time, on } => Self::MergeAny { process: process(pid, start_time), on },
            WireAction::GuestMerge { pid, start_time, socket, backend, on } => {
                Self::GuestMerge { process: process(pid, start_time), socket, backend, on }
            }
            WireAction::Collapse { pid, start_time, ranges: pairs } => {
                Self::Collapse { process: process(pid, start_time), ranges: ranges(pairs) }
            }
        }
    }
}

impl From<&Journal> for Wire {
    fn from(journal: &Journal) -> Self {
        let entry = |entry: &Entry| WireEntry { written: entry.written.clone(), undo: WireAction::from(&entry.undo) };
        Self {
            boot: journal.boot.clone(),
            writer: journal.writer,
            purpose: journal.purpose.clone(),
            entries: journal.entries.iter().map(entry).collect(),
        }
    }
}

impl From<Wire> for Journal {
    fn from(wire: Wire) -> Self {
        let entry = |entry: WireEntry| Entry { undo: entry.undo.into(), written: entry.written };
        let entries = wire.entries.into_iter().map(entry).collect();
        Self { boot: wire.boot, writer: wire.writer, purpose: wire.purpose, entries }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_stored_is_loaded() {
        let directory = tempfile::tempdir().unwrap();
        let process = ProcessId { pid: Pid(7), start_time: 99 };
        let ranges = vec![AddressRange { start: 4096, end: 8192 }];
        let undo = [
            Action::Set { setting: Setting::Run, value: "0".to_owned() },
            Action::Advise { process, advice: Advice::Mergeable, ranges: ranges.clone() },
            Action::MergeAny { process, on: false },
            Action::GuestMerge { process, socket: "/run/q.sock".into(), backend: "/objects/ram".to_owned(), on: true },
            Action::Collapse { process, ranges },
        ];
        let entries = undo.map(|undo| Entry { undo, written: vec!["1".to_owned()] }).to_vec();
        let journal = Journal { boot: "b".to_owned(), writer: 3, purpose: Some("default".to_owned()), entries };
        assert_eq!(Journal::load(directory.path(), SESSION).unwrap(), None);
        journal.store(directory.path(), SESSION).unwrap();
        assert_eq!(Journal::load(directory.path(), SESSION).unwrap(), Some(journal.clone()));
        assert_eq!(Journal::load(directory.path(), POLICY).unwrap(), None);
        Journal { entries: Vec::new(), ..journal }.store(directory.path(), SESSION).unwrap();
        assert_eq!(Journal::load(directory.path(), SESSION).unwrap(), None);
    }

    #[test]
    fn what_is_not_a_journal_is_named() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"boot":"","writer":1,"entries":[{"undo":{"set":{"setting":"x","value":""}}}]}"#] {
            fs::write(directory.path().join(SESSION), text).unwrap();
            let error = Journal::load(directory.path(), SESSION).unwrap_err();
            assert!(error.to_string().contains("journal.json"), "{error}");
        }
    }
}
