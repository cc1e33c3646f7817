//! The journal: the undo of each change is stored before the host is changed, so that it can be undone after a crash.
//!
//! The journal is a file in a directory on a file system that does not survive a reboot (`/run/pagefold`), except for
//! that of configuration files ([`ResourceClass::Configuration`](crate::resource::ResourceClass)). Its first line is
//! JSON of the whole journal and is replaced atomically. Each further line is JSON of changes to it
//! ([`JournalChange`]), so that the bytes written for an action do not grow with the number of earlier actions. A last
//! line without a newline was truncated while it was written; the action it precedes was not performed. The journal
//! names the boot it belongs to: after a reboot there is nothing to undo. A second file of the same form stores the
//! undo of changes that stay after their command, such as a policy (`session::kept`). A third one stores the undo of
//! enrollments that stay for the next daemon (`session::enrollments`).

mod wire;

use crate::action::Action;
use pagefold_base::AddressRange;
use pagefold_sys::fault;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, openat, renameat, unlinkat};
use serde::Serialize;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use wire::{WireChange, WireJournal};

/// The changes to undo, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal {
    /// `/proc/sys/kernel/random/boot_id` of the boot in which it was written.
    pub boot: String,
    /// The process that writes it.
    pub writer: u32,
    /// The name of the policy of KSM, if the changes of one are among kept ones. Earlier versions stored `tune` here, too.
    pub purpose: Option<String>,
    /// In the order in which the changes were made.
    pub entries: Vec<JournalEntry>,
}

/// One change to undo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The action that undoes the change.
    pub undo: Action,
    /// For a setting, the last two values that this session wrote, because it may have ended before it wrote the last
    /// one. Any other value was written by another program and stays.
    pub written_values: Vec<String>,
    /// For advice, the extent that contained each of its ranges: adjacent memory of one kind. If another mapping lies
    /// there later, it is not the advised one.
    pub enclosing_extents: Vec<AddressRange>,
    /// Whether the change stays once its purpose is achieved.
    pub until_commit: bool,
    /// The purpose for which the change was kept, if it was. Earlier versions stored none for settings.
    pub purpose: Option<String>,
    /// Counters that show the effect of the change, as they were before it. Earlier versions stored none.
    pub counters: Vec<CounterSample>,
}

/// A counter of the kernel at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CounterSample {
    /// The file, and the name in it if it has several: `/proc/vmstat:numa_miss`.
    pub source: String,
    /// Its value.
    pub value: u64,
    /// When it had this value, in milliseconds since boot.
    pub uptime_ms: u64,
    /// How much it had grown until then; `None` for a value that also falls.
    pub growth: Option<CounterGrowth>,
}

/// How much a counter grew in some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CounterGrowth {
    /// How much.
    pub count: u64,
    /// The time in milliseconds.
    pub milliseconds: u64,
}

/// A change to the entries of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalChange {
    /// Adds the newest entry.
    Push(Box<JournalEntry>),
    /// Removes the newest entry.
    Pop,
    /// Replaces the values written to the setting of an entry, whose position is counted from the oldest one.
    SetWrittenValues(usize, Vec<String>),
}

/// An open directory. Checks made on it stay valid for later accesses, even if its path is redirected.
#[derive(Debug)]
pub struct StateDirectory {
    path: PathBuf,
    handle: OwnedFd,
}

impl StateDirectory {
    /// Opens a directory. A symbolic link is refused.
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

    /// Whether only this user can write in it.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn is_private(&self) -> io::Result<bool> {
        let status = fstat(&self.handle)?;
        Ok(status.st_uid == rustix::process::geteuid().as_raw() && status.st_mode & 0o022 == 0)
    }

    /// Opens a file in it, but no symbolic link; a new file is accessible to this user only.
    ///
    /// # Errors
    /// Those of openat(2).
    pub fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.handle, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// The whole content of a file in it.
    ///
    /// # Errors
    /// Those of openat(2) and read(2).
    pub fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.open_file(name, OFlags::RDONLY)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Replaces a file, or leaves it unchanged if that fails.
    ///
    /// # Errors
    /// Those of openat(2), write(2), fdatasync(2) and renameat(2).
    pub fn replace(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = format!("{name}.new");
        let mut file = self.open_file(&temporary, OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC)?;
        fault::point("before writing a journal");
        file.write_all(bytes)?;
        file.sync_data()?;
        fault::point("between writing a journal and renaming it");
        renameat(&self.handle, &temporary, &self.handle, name)?;
        fault::point("after renaming a journal");
        Ok(())
    }

    /// Appends to an existing file.
    ///
    /// # Errors
    /// Those of openat(2), write(2) and fdatasync(2). A part may have been appended then.
    pub fn append(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.open_file(name, OFlags::WRONLY | OFlags::APPEND)?;
        fault::point("before appending to a journal");
        file.write_all(bytes)?;
        file.sync_data()?;
        fault::point("after appending to a journal");
        Ok(())
    }

    /// Removes a file.
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
    /// The file system returned an error.
    #[error("{path}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The file is not a journal.
    #[error("{path} is not a journal of this version: inspect it and move it away")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: serde_json::Error,
    },
}

impl Journal {
    /// Loads the journal with this name from a directory, if there is one.
    pub fn load(directory: &StateDirectory, file_name: &str) -> Result<Option<Self>, Error> {
        let path = directory.path.join(file_name);
        let bytes = match directory.read(file_name) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(Error::Io { path, source }),
        };
        Self::parse(&bytes).map(Some).map_err(|source| Error::Malformed { path, source })
    }

    fn parse(bytes: &[u8]) -> Result<Self, serde_json::Error> {
        let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
        let mut journal = Self::from(serde_json::from_slice::<WireJournal>(lines.next().unwrap_or_default())?);
        for line in lines.filter(|line| line.ends_with(b"\n")) {
            for change in serde_json::from_slice::<Vec<WireChange>>(line)? {
                journal.apply_change(change.into())?;
            }
        }
        Ok(journal)
    }

    /// Applies a change.
    fn apply_change(&mut self, change: JournalChange) -> Result<(), serde_json::Error> {
        let none = || serde::de::Error::custom("a change to an entry that does not exist");
        match change {
            JournalChange::Push(entry) => self.entries.push(*entry),
            JournalChange::Pop => drop(self.entries.pop().ok_or_else(none)?),
            JournalChange::SetWrittenValues(at, written) => {
                self.entries.get_mut(at).ok_or_else(none)?.written_values = written
            }
        }
        Ok(())
    }

    /// Replaces the journal with this name in a directory, or removes it if there is nothing to undo. Returns its size
    /// in bytes.
    pub fn store(&self, directory: &StateDirectory, file_name: &str) -> Result<usize, Error> {
        let stored = if self.entries.is_empty() {
            directory.remove(file_name).map(|()| 0).or_else(|error| match error.kind() {
                io::ErrorKind::NotFound => Ok(0),
                _ => Err(error),
            })
        } else {
            to_json_line(&WireJournal::from(self))
                .and_then(|text| directory.replace(file_name, &text).map(|()| text.len()))
        };
        stored.map_err(|source| Error::Io { path: directory.path.join(file_name), source })
    }

    /// Appends changes to the journal with this name in a directory. Returns the number of bytes appended.
    ///
    /// # Errors
    /// After an error the file is unchanged or ends in a truncated line. It must be replaced before the next append.
    pub fn append(directory: &StateDirectory, file_name: &str, changes: &[JournalChange]) -> Result<usize, Error> {
        let changes: Vec<WireChange> = changes.iter().filter_map(WireChange::from_change).collect();
        let appended = to_json_line(&changes).and_then(|text| directory.append(file_name, &text).map(|()| text.len()));
        appended.map_err(|source| Error::Io { path: directory.path.join(file_name), source })
    }
}

/// JSON with a newline.
fn to_json_line(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec(value)?;
    text.push(b'\n');
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_monitor::MonitorStep;
    use crate::action::{Exchange, LibvirtPin, LibvirtPinTarget, MergeAdvice, ThreadId};
    use crate::config_file::{ConfigContent, ConfigFile};
    use crate::kernel_module::{KernelModule, ModuleParameters};
    use crate::knob::Knob;
    use crate::resource::ResourceClass;
    use pagefold_base::ksm::Setting;
    use pagefold_base::memory::MemoryPolicy;
    use pagefold_base::{Pid, ProcessId};
    use std::fs;

    const SESSION_FILE: &str = ResourceClass::Ksm.journal_file();
    const POLICY_FILE: &str = ResourceClass::Ksm.kept_changes_file();

    fn open_directory(directory: &tempfile::TempDir) -> StateDirectory {
        StateDirectory::open(directory.path()).unwrap()
    }

    #[test]
    fn stored_journal_is_loaded() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = open_directory(&temporary);
        let process = ProcessId { pid: Pid(7), start_time: 99 };
        let ranges = vec![AddressRange { start: 4096, end: 8192 }];
        let undo = [
            Action::Write { knob: Setting::Run.into(), value: "0".to_owned() },
            Action::Advise { process, advice: MergeAdvice::Mergeable, ranges: ranges.clone() },
            Action::MergeAny { process, enable: false },
            Action::set_backend_merge(process, "/run/q.sock".into(), "/objects/ram".to_owned(), true),
            Action::SetAffinity {
                thread: ThreadId { process, tid: Pid(8), start_time: 100 },
                cpus: Exchange { from: "0-3".parse().unwrap(), to: "1,3".parse().unwrap() },
                pin: None,
            },
            Action::SetAffinity {
                thread: ThreadId { process, tid: Pid(8), start_time: 100 },
                cpus: Exchange { from: "0-3".parse().unwrap(), to: "1,3".parse().unwrap() },
                pin: Some(LibvirtPin { domain: "uuid".to_owned(), target: LibvirtPinTarget::Vcpu(3) }),
            },
            Action::MovePages { process, ranges: ranges.clone(), node: 1 },
            Action::SetMemoryPolicy {
                process,
                ranges: ranges.clone(),
                policy: Exchange { from: MemoryPolicy::Prefer(1), to: MemoryPolicy::Default },
            },
            Action::Write { knob: Knob::from_path("sys/block/sda/queue/scheduler").unwrap(), value: "none".to_owned() },
            Action::ReplaceFile {
                file: ConfigFile::from_path("etc/modprobe.d/pagefold.conf").unwrap(),
                content: Exchange { from: ConfigContent(Some("# \"a\"\n".to_owned())), to: ConfigContent(None) },
            },
            Action::DefineDomain {
                uuid: "uuid".to_owned(),
                name: "db".to_owned(),
                definition: Exchange { from: "<domain/>\n".to_owned(), to: "<domain>\n".to_owned() },
            },
            Action::ReloadModule {
                module: KernelModule::KvmAmd,
                parameters: Exchange {
                    from: ModuleParameters([("npt".to_owned(), "0".to_owned())].into()),
                    to: ModuleParameters([("npt".to_owned(), "1".to_owned())].into()),
                },
            },
            Action::MonitorAccesses(MonitorStep::Stop(vec![Pid(7), Pid(9)])),
        ];
        let sample = |growth| CounterSample { source: "/proc/stat:ctxt".to_owned(), value: 9, uptime_ms: 7, growth };
        let counters = vec![sample(None), sample(Some(CounterGrowth { count: 5, milliseconds: 3 }))];
        let entries = undo
            .map(|undo| JournalEntry {
                undo,
                written_values: vec!["1".to_owned()],
                enclosing_extents: ranges.clone(),
                until_commit: true,
                purpose: Some("spread".to_owned()),
                counters: counters.clone(),
            })
            .to_vec();
        let journal = Journal { boot: "b".to_owned(), writer: 3, purpose: Some("default".to_owned()), entries };
        assert_eq!(Journal::load(&directory, SESSION_FILE).unwrap(), None);
        journal.store(&directory, SESSION_FILE).unwrap();
        assert_eq!(Journal::load(&directory, SESSION_FILE).unwrap(), Some(journal.clone()));
        assert_eq!(Journal::load(&directory, POLICY_FILE).unwrap(), None);
        Journal { entries: Vec::new(), ..journal }.store(&directory, SESSION_FILE).unwrap();
        assert_eq!(Journal::load(&directory, SESSION_FILE).unwrap(), None);
    }

    /// Entries of one setting each, by its previous value.
    fn setting_entry(value: &str) -> JournalEntry {
        let undo = Action::Write { knob: Setting::PagesToScan.into(), value: value.to_owned() };
        JournalEntry {
            undo,
            written_values: Vec::new(),
            enclosing_extents: Vec::new(),
            until_commit: false,
            purpose: None,
            counters: Vec::new(),
        }
    }

    #[test]
    fn truncated_change_is_ignored() {
        let temporary = tempfile::tempdir().unwrap();
        let directory = open_directory(&temporary);
        let journal = Journal { boot: "b".to_owned(), entries: vec![setting_entry("1")], ..Journal::default() };
        journal.store(&directory, SESSION_FILE).unwrap();
        let changes = [
            JournalChange::Push(Box::new(setting_entry("2"))),
            JournalChange::Push(Box::new(setting_entry("3"))),
            JournalChange::SetWrittenValues(1, vec!["9".to_owned()]),
        ];
        Journal::append(&directory, SESSION_FILE, &changes).unwrap();
        Journal::append(&directory, SESSION_FILE, &[JournalChange::Pop]).unwrap();
        let expected =
            [setting_entry("1"), JournalEntry { written_values: vec!["9".to_owned()], ..setting_entry("2") }];
        let loaded = || Journal::load(&directory, SESSION_FILE).map(|journal| journal.unwrap().entries);
        assert_eq!(loaded().unwrap(), expected);
        let whole = directory.read(SESSION_FILE).unwrap();
        Journal::append(&directory, SESSION_FILE, &[JournalChange::Push(Box::new(setting_entry("4")))]).unwrap();
        let longer = directory.read(SESSION_FILE).unwrap();
        for length in whole.len()..longer.len() {
            directory.replace(SESSION_FILE, &longer[..length]).unwrap();
            assert_eq!(loaded().unwrap(), expected, "truncated after {length} of {} bytes", longer.len());
        }
        for wrong in [
            &b"[\"pop\",\"pop\",\"pop\"]\n"[..],
            b"[{\"set_written_values\":{\"entry\":2,\"written_values\":[]}}]\n",
            b"x\n",
        ] {
            directory.replace(SESSION_FILE, &[&whole, wrong].concat()).unwrap();
            assert!(matches!(loaded(), Err(Error::Malformed { .. })), "{}", String::from_utf8_lossy(wrong));
        }
    }

    #[test]
    fn malformed_journal_error_names_the_file() {
        let directory = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"boot":"","writer":1,"entries":[{"undo":{"write":{"knob":"x","value":""}}}]}"#] {
            fs::write(directory.path().join(SESSION_FILE), text).unwrap();
            let error = Journal::load(&open_directory(&directory), SESSION_FILE).unwrap_err();
            assert!(error.to_string().contains("ksm.journal.json"), "{error}");
        }
    }

    #[test]
    fn symbolic_links_are_refused() {
        let temporary = tempfile::tempdir().unwrap();
        let [real, link, foreign] = ["real", "link", "foreign"].map(|name| temporary.path().join(name));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        assert!(StateDirectory::open(&link).is_err());
        fs::write(&foreign, "theirs").unwrap();
        for name in [SESSION_FILE.to_owned(), format!("{SESSION_FILE}.new"), "lock".to_owned()] {
            std::os::unix::fs::symlink(&foreign, real.join(name)).unwrap();
        }
        let directory = StateDirectory::open(&real).unwrap();
        assert!(directory.read(SESSION_FILE).is_err());
        assert!(directory.replace(SESSION_FILE, b"x").is_err());
        assert!(directory.open_file("lock", OFlags::RDWR | OFlags::CREATE).is_err());
        assert_eq!(fs::read_to_string(&foreign).unwrap(), "theirs");
    }

    /// A directory that replaces the open one is never written.
    #[test]
    fn open_directory_survives_replacement() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("state");
        fs::create_dir(&path).unwrap();
        let directory = StateDirectory::open(&path).unwrap();
        fs::rename(&path, temporary.path().join("moved")).unwrap();
        fs::create_dir(&path).unwrap();
        directory.replace(SESSION_FILE, b"x").unwrap();
        assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
        assert_eq!(directory.read(SESSION_FILE).unwrap(), b"x");
        directory.remove(SESSION_FILE).unwrap();
        assert_eq!(fs::read_dir(temporary.path().join("moved")).unwrap().count(), 0);
    }
}
