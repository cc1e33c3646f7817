//! Changes a host and undoes the changes.
//!
//! A [`Session`] holds the lock under which one class of resources may be changed ([`ResourceClass`]). Sessions of
//! different classes work side by side. A session stores the undo of each change in the [`journal`](super::journal) of
//! its class before making the change. The lock is in the state directory. A second lock, which all Pagefold processes
//! on the host share ([`Host::acquire_lock`]), excludes processes with another state directory. Temporary changes are
//! undone when the session ends, newest first: at the end of the work, on an error, in a panic. After `kill -9` the
//! next session, or `pagefold recover`, finds the journal and undoes the changes. If an undo fails now but may succeed
//! later, its entry stays in the journal, and the next session retries it.
//!
//! A setting is restored only if it still has the value that was written last. If another program has written another
//! value since, that value stays and Pagefold reports it. The kernel also writes one setting: a change of
//! `advisor_mode` resets `pages_to_scan` (mm/ksm.c, `set_advisor_defaults`), and while the advisor is on it changes it.
//! Therefore the value of `pages_to_scan` is stored before the mode changes and restored after it.
//!
//! Advice and moved pages are undone only if their range still lies in the same extent: a run of adjacent regions of
//! one kind that has not grown, except for the heap. Otherwise the program may have mapped other memory there that it
//! never enrolled. Limit: a new mapping of the same kind and place cannot be distinguished from the old one.
//!
//! The enrollments of a session stay once it commits. If it ends before, by an error, a panic or `kill -9`, they are
//! undone. This needs free memory for copies of the merged pages, without memory pressure; otherwise the entries stay
//! in the journal. A daemon also records the undo of committed enrollments for the next daemon ([`enrollments`]).
//!
//! Changes that a command leaves behind on purpose, such as the settings of a policy or the placement of machines, are
//! stored in a separate file until they are undone ([`kept`]).

pub mod enrollments;
mod error;
mod extents;
pub mod kept;
mod undo;

use crate::action;
use crate::action::{Action, ActionError, ActionOutcome, MergeAdvice};
use crate::knob::Knob;
use crate::resource::ResourceClass;
use crate::transaction::journal::{Journal, JournalChange, JournalEntry, StateDirectory};
use crate::{Host, HostLock, LockHolder};
use enrollments::RecordedEnrollments;
pub use error::Error;
pub use error::chain;
pub use extents::Extents;
use pagefold_base::{Absent, AddressRange, ProcessId};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// The default directory of lock and journal.
pub const DEFAULT_STATE_DIRECTORY: &str = "/run/pagefold";

/// Whether and when a change is undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeLifetime {
    /// Undone when the session ends.
    Temporary,
    /// The purpose of the session: it stays after [`Session::commit`]. Before that, it is undone when the session ends,
    /// if memory allows.
    PermanentOnCommit,
    /// Never undone.
    Permanent,
}

/// A change that could not be undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedUndo {
    /// The action that would have undone it.
    pub undo: Action,
    /// The reason.
    pub why: String,
    /// Whether the next session retries it.
    pub will_retry: bool,
    /// Whether another program has changed the same thing since. That change stays; nothing failed.
    pub is_overwritten: bool,
}

impl fmt::Display for FailedUndo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", UndoDescription(&self.undo), self.why)
    }
}

/// Describes an undo action in reports, as the state before the change.
pub struct UndoDescription<'a>(pub &'a Action);

impl fmt::Display for UndoDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Action::Write { knob, value } => write!(f, "{knob} was {value}"),
            Action::ReplaceFile { file, content } => write!(f, "{file} was {}", content.to),
            Action::DefineDomain { name, .. } => write!(f, "domain {name} had another definition"),
            Action::ReloadModule { module, parameters } => {
                write!(f, "module {module} was loaded with {}", parameters.to)
            }
            Action::MonitorAccesses(_) => write!(f, "DAMON had no kdamonds"),
            Action::Advise { process, advice, ranges } => {
                let state = if *advice == MergeAdvice::Mergeable { "enrolled" } else { "not enrolled" };
                write!(f, "{} ranges of process {} were {state}", ranges.len(), process.pid)
            }
            Action::MergeAny { process, enable: on } => {
                write!(f, "process {} was {}enrolled whole", process.pid, if *on { "" } else { "not " })
            }
            Action::SetQomProperty { process, object, property, value, .. } => {
                write!(f, "{property} of {object} of the guest of process {} was {}", process.pid, value.to)
            }
            Action::SetAffinity { thread, cpus, .. } => {
                write!(f, "thread {} of process {} could run on CPUs {}", thread.tid, thread.process.pid, cpus.to)
            }
            Action::MovePages { process, ranges, node } => {
                write!(f, "{} ranges of process {} were on node {node}", ranges.len(), process.pid)
            }
            Action::SetMemoryPolicy { process, ranges, policy } => {
                write!(f, "{} ranges of process {} had the memory policy {}", ranges.len(), process.pid, policy.to)
            }
            // A collapse has no undo.
            Action::Collapse { .. } => Ok(()),
        }
    }
}

/// The right to change one class of resources of a host, with the changes to undo.
pub struct Session<'a> {
    host: &'a dyn Host,
    class: ResourceClass,
    directory: StateDirectory,
    /// The changes that are undone when this session ends.
    journal: Journal,
    /// Entries whose undo failed and is retried later, oldest first.
    retry_entries: Vec<JournalEntry>,
    journal_size: JournalSize,
    stop_durations: Vec<Duration>,
    /// Enrollments that stay after this session.
    recorded: RecordedEnrollments,
    /// The labels of processes with which the next commit records its enrollments, if it does.
    enrollment_labels: Option<BTreeMap<ProcessId, String>>,
    _lock: SessionLock,
    _claim: HostLock,
}

/// The size of the journal file in bytes.
#[derive(Clone, Copy, Default)]
struct JournalSize {
    /// The size when it was last rewritten; 0 if there is no file or it must be rewritten.
    rewritten_bytes: usize,
    /// Bytes appended since.
    appended_bytes: usize,
}

/// Changes are appended until they are as large as the rewritten journal and as this limit. The file therefore stays
/// within a small multiple of its needed size.
const MIN_APPENDED_BYTES_TO_REWRITE: usize = 64 << 10;

/// The state of the journal before an action was stored in it.
struct JournalMark {
    entry_count: usize,
    previous_values: Vec<(usize, Vec<String>)>,
}

impl<'a> Session<'a> {
    /// Takes the lock of a class of resources in a state directory, which is created if necessary, and undoes the changes of
    /// a killed session. Also returns the undone and the failed actions.
    pub fn begin(
        host: &'a dyn Host,
        directory: &Path,
        class: ResourceClass,
    ) -> Result<(Self, Vec<Action>, Vec<FailedUndo>), Error> {
        let (directory, lock) = lock_directory(&class.directory(directory), class)?;
        let claim = host.acquire_lock(class).map_err(|holder| Error::Busy { class, holder })?;
        if matches!(claim, HostLock::Obstructed) {
            let _ = writeln!(
                io::stderr(),
                "pagefold: another program holds a read lock on /sys/kernel/mm/ksm/run: a second pagefold with another \
                 state directory cannot be detected"
            );
        }
        let boot = read_boot_id(host).map_err(Error::HostStateUnreadable)?;
        let old_journal = Journal::load(&directory, class.journal_file())?
            .filter(|journal| class.survives_reboot() || journal.boot == boot);
        let recorded = RecordedEnrollments::load(&directory, class, &boot)?;
        let journal = Journal { boot, writer: std::process::id(), purpose: None, entries: Vec::new() };
        let journal_size = JournalSize::default();
        let mut session = Self {
            host,
            class,
            directory,
            journal,
            retry_entries: Vec::new(),
            journal_size,
            stop_durations: Vec::new(),
            recorded,
            enrollment_labels: None,
            _lock: lock,
            _claim: claim,
        };
        let Some(old_journal) = old_journal else { return Ok((session, Vec::new(), Vec::new())) };
        session.journal.entries = old_journal.entries;
        let old_count = session.journal.entries.len();
        // Killed during the commit.
        session.journal.entries.retain(|entry| !session.recorded.contains(entry));
        if session.journal.entries.len() < old_count {
            session.rewrite_journal()?;
        }
        let (undone, failed) = session.undo_entries()?;
        Ok((session, undone, failed))
    }

    /// The host that the session changes.
    pub fn host(&self) -> &'a dyn Host {
        self.host
    }

    /// The directory of its journal.
    pub fn directory(&self) -> &StateDirectory {
        &self.directory
    }

    /// How long threads of targets were stopped, once for each stop, by all changes and undos.
    pub fn stop_durations(&self) -> &[Duration] {
        &self.stop_durations
    }

    /// Makes a change after its undo was stored in the journal. After a permanent change of a setting, earlier changes
    /// of it are no longer undone.
    pub fn apply(&mut self, action: &Action, lifetime: ChangeLifetime) -> Result<ActionOutcome, Error> {
        self.apply_until_stopped(action, lifetime, &AtomicBool::new(false))
    }

    /// Like [`Self::apply`], but stops waiting for an unresponsive process once `stop` is set. An undo still waits
    /// until its timeout.
    pub fn apply_until_stopped(
        &mut self,
        action: &Action,
        lifetime: ChangeLifetime,
        stop: &AtomicBool,
    ) -> Result<ActionOutcome, Error> {
        if action.class() != self.class {
            return Err(Error::ClassNotLocked { action: action.class(), session: self.class });
        }
        if lifetime == ChangeLifetime::Permanent {
            let effect = self.apply_to_host(action, stop)?;
            if let (Some(process), true) = (action.process(), action.unmerges()) {
                let missed = AddressRange::union(effect.missed_ranges.iter().map(|(range, _)| *range).collect());
                let unenrolled = action.ranges().iter().flat_map(|range| range.subtract(&missed)).collect::<Vec<_>>();
                self.recorded.remove_ranges(process, &unenrolled);
            }
            if let Action::Write { knob, .. } = action {
                let length = self.journal.entries.len();
                self.journal.entries.retain(|entry| !is_entry_of_knob(entry, knob));
                if self.journal.entries.len() < length {
                    self.rewrite_journal()?;
                }
            }
            return Ok(effect);
        }
        let mark = self.journal_action(action, lifetime == ChangeLifetime::PermanentOnCommit)?;
        let result = self.apply_to_host(action, stop);
        // The undo stays if something may have changed.
        let is_untouched = match &result {
            Ok(outcome) => outcome.unchanged,
            Err(ActionError::Busy(_)) => {
                matches!(action, Action::Write { .. } | Action::ReloadModule { .. } | Action::MonitorAccesses(_))
            }
            // After `Busy`, libvirt may still store the definition.
            Err(ActionError::Failed(_)) => matches!(action, Action::Write { .. } | Action::DefineDomain { .. }),
            Err(ActionError::Vanished) => true,
            // Pages are moved by several calls, of which the first ones may have succeeded.
            Err(_) => !matches!(action, Action::MovePages { .. }),
        };
        if is_untouched {
            self.revert_journal(mark)?;
        } else if let (Ok(_), Action::DefineDomain { name, .. }) = (&result, action) {
            self.note_stored_definition(name)?;
        }
        Ok(result?)
    }

    /// Notes the definition as libvirt has stored it, in its own form, so that the undo finds what it expects.
    fn note_stored_definition(&mut self, name: &str) -> Result<(), Error> {
        let stored = self.host.read(&action::domain_definition_path(name)).map_err(Error::HostStateUnreadable)?;
        let stored = String::from_utf8_lossy(&stored).into_owned();
        let undo = self.journal.entries.last_mut().map(|entry| &mut entry.undo);
        if let Some(Action::DefineDomain { definition, .. }) = undo
            && definition.from != stored
        {
            definition.from = stored;
            self.rewrite_journal()?;
        }
        Ok(())
    }

    /// Performs an action on the host.
    fn apply_to_host(&mut self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        let effect = self.host.apply_until_stopped(action, stop)?;
        self.stop_durations.extend(&effect.stop_durations);
        Ok(effect)
    }

    /// Writes temporary settings, in the order in which the kernel accepts them. Settings that have the value already
    /// are not written.
    pub fn write_settings<K: Into<Knob> + Copy>(&mut self, settings: &BTreeMap<K, String>) -> Result<(), Error> {
        for (&setting, value) in settings {
            let knob: Knob = setting.into();
            let current = self.read_knob(&knob)?;
            self.check_knob_not_overwritten(&knob, &current)?;
            if current != *value {
                self.apply(&Action::Write { knob, value: value.clone() }, ChangeLifetime::Temporary)?;
            }
        }
        Ok(())
    }

    /// Tests whether settings can be written by writing `knob` with its present value. It must be one that other
    /// programs do not change between the read and the write.
    pub fn check_writable(&self, knob: Knob) -> Result<(), Error> {
        let value = self.read_knob(&knob)?;
        self.host.apply(&Action::Write { knob, value })?;
        Ok(())
    }

    /// Checks that every setting still has the value that this session wrote.
    pub fn check_not_overwritten(&self) -> Result<(), Error> {
        for entry in &self.journal.entries {
            if let Action::Write { knob, .. } = &entry.undo {
                self.check_knob_not_overwritten(knob, &self.read_knob(knob)?)?;
            }
        }
        Ok(())
    }

    /// Drops the entries of processes that have exited.
    pub fn drop_ended_processes(&mut self) -> Result<(), Error> {
        let length = self.journal.entries.len();
        let mut entries = std::mem::take(&mut self.journal.entries);
        entries.retain(|entry| entry.undo.process().is_none_or(|process| self.is_alive(process)));
        self.journal.entries = entries;
        if self.journal.entries.len() < length { self.rewrite_journal() } else { Ok(()) }
    }

    fn is_alive(&self, process: ProcessId) -> bool {
        !matches!(crate::hold(self.host, process), Err(Absent::Vanished))
    }

    /// Ends the work of the session successfully: its enrollments stay. If an earlier session could not undo
    /// enrollments of the same processes, these stay too.
    pub fn commit(&mut self) -> Result<(), Error> {
        let length = self.retry_entries.len() + self.journal.entries.len();
        let committed: BTreeSet<ProcessId> = self
            .journal
            .entries
            .iter()
            .filter(|entry| entry.until_commit)
            .filter_map(|entry| entry.undo.process())
            .collect();
        let is_committed = |entry: &JournalEntry| {
            entry.until_commit && entry.undo.process().is_some_and(|process| committed.contains(&process))
        };
        let entries = self.retry_entries.iter().chain(&self.journal.entries).filter(|entry| is_committed(entry));
        self.add_recorded_enrollments(entries.cloned().collect())?;
        self.retry_entries.retain(|entry| !is_committed(entry));
        self.journal.entries.retain(|entry| !entry.until_commit);
        if self.retry_entries.len() + self.journal.entries.len() < length { self.rewrite_journal() } else { Ok(()) }
    }

    /// Undoes all temporary changes, newest first.
    ///
    /// # Errors
    /// If the journal cannot be written in the end: [`Error::UndoFailed`] with the failed undos, if there are any.
    pub fn undo_all(&mut self) -> Result<Vec<FailedUndo>, Error> {
        Ok(self.undo_entries()?.1)
    }

    /// Undoes the changes of one process, newest first, and goes on with the session.
    ///
    /// # Errors
    /// As [`Self::undo_all`].
    pub fn undo_process(&mut self, process: ProcessId) -> Result<Vec<FailedUndo>, Error> {
        let is_others = |entry: &JournalEntry| entry.undo.process() != Some(process);
        // Changes of different processes do not depend on each other, so those of this one may come last.
        self.journal.entries.sort_by_key(|entry| !is_others(entry));
        let other_count = self.journal.entries.iter().filter(|entry| is_others(entry)).count();
        self.rewrite_journal()?;
        Ok(self.undo_entries_after(other_count)?.1)
    }

    /// Undoes all temporary changes because of an error. Returns the error with the failed undos.
    pub fn abort(&mut self, error: Error) -> Error {
        let failed = match self.undo_all() {
            Ok(failed) | Err(Error::UndoFailed { failed_undos: failed, .. }) => failed,
            // All changes are undone; a journal that still has them does no harm.
            Err(_) => Vec::new(),
        };
        if failed.is_empty() { error } else { Error::UndoFailed { failed_undos: failed, source: Box::new(error) } }
    }

    fn read_knob(&self, knob: &Knob) -> Result<String, Error> {
        knob.read(self.host).map_err(|source| Error::SettingUnreadable { knob: knob.clone(), source })
    }

    fn check_knob_not_overwritten(&self, knob: &Knob, current: &str) -> Result<(), Error> {
        if let Some((driver, value)) = knob.changed_by_kernel_while()
            && self.last_written_value(&driver) == Some(value)
        {
            return Ok(());
        }
        match self.last_written_value(knob) {
            Some(wrote) if wrote != current => Err(Error::SettingOverwritten {
                knob: knob.clone(),
                wrote: wrote.to_owned(),
                found: current.to_owned(),
            }),
            _ => Ok(()),
        }
    }

    /// The value that this session wrote last.
    fn last_written_value(&self, knob: &Knob) -> Option<&str> {
        self.journal
            .entries
            .iter()
            .find(|entry| is_entry_of_knob(entry, knob))?
            .written_values
            .last()
            .map(String::as_str)
    }

    /// Stores the undo of an action. A setting keeps its first value.
    fn journal_action(&mut self, action: &Action, until_commit: bool) -> Result<JournalMark, Error> {
        let mut mark = JournalMark { entry_count: self.journal.entries.len(), previous_values: Vec::new() };
        if let Action::Write { knob, value } = action {
            let current = self.read_knob(knob)?;
            if current != *value
                && let Some((reset, reset_value)) = knob.resets()
                // A value that the kernel set itself is not worth restoring.
                && (reset.changed_by_kernel_while() != Some((knob.clone(), current.as_str())) || self.has_knob_entry(&reset))
            {
                self.journal_knob(&reset, reset_value, &mut mark)?;
            }
            if current != *value || self.has_knob_entry(knob) {
                self.journal_knob(knob, value, &mut mark)?;
            }
        } else {
            let undo = action::undo_actions(self.host, action)?;
            for undo in undo {
                let enclosing_extents = self.enclosing_extents(&undo).map_err(Error::HostStateUnreadable)?;
                self.journal.entries.push(JournalEntry {
                    undo,
                    written_values: Vec::new(),
                    enclosing_extents,
                    until_commit,
                    purpose: None,
                    counters: Vec::new(),
                });
            }
        }
        self.append_changes(&self.journal_changes(&mark))?;
        Ok(mark)
    }

    /// The journal changes since the mark.
    fn journal_changes(&self, mark: &JournalMark) -> Vec<JournalChange> {
        let entries = &self.journal.entries;
        let retry_count = self.retry_entries.len();
        let written = mark.previous_values.iter().map(|(position, _)| {
            JournalChange::SetWrittenValues(retry_count + position, entries[*position].written_values.clone())
        });
        written
            .chain(entries[mark.entry_count..].iter().cloned().map(|entry| JournalChange::Push(Box::new(entry))))
            .collect()
    }

    /// The present extent of each range of an action.
    fn enclosing_extents(&self, action: &Action) -> Result<Vec<AddressRange>, Absent> {
        let (Some(process), ranges @ [_, ..]) = (action.process(), action.ranges()) else { return Ok(Vec::new()) };
        let extents = Extents::read(self.host, process)?;
        // A range that has changed since it was selected is its own extent.
        Ok(ranges.iter().map(|&range| extents.enclosing(range).unwrap_or(range)).collect())
    }

    /// Stores that a setting is about to be written.
    fn journal_knob(&mut self, knob: &Knob, value: &str, mark: &mut JournalMark) -> Result<(), Error> {
        match self.journal.entries.iter().position(|entry| is_entry_of_knob(entry, knob)) {
            Some(position) => {
                let written_values = &mut self.journal.entries[position].written_values;
                mark.previous_values.push((position, written_values.clone()));
                let last = written_values.pop();
                *written_values = last.into_iter().chain([value.to_owned()]).collect();
            }
            None => {
                let undo = Action::Write { knob: knob.clone(), value: knob.restorable_value(self.read_knob(knob)?) };
                let written_values = vec![value.to_owned()];
                self.journal.entries.push(JournalEntry {
                    undo,
                    written_values,
                    enclosing_extents: Vec::new(),
                    until_commit: false,
                    purpose: None,
                    counters: Vec::new(),
                });
            }
        }
        Ok(())
    }

    /// Removes the stored undo of an action that was not performed.
    fn revert_journal(&mut self, mark: JournalMark) -> Result<(), Error> {
        let mut changes = vec![JournalChange::Pop; self.journal.entries.len() - mark.entry_count];
        self.journal.entries.truncate(mark.entry_count);
        for (position, written_values) in mark.previous_values.into_iter().rev() {
            changes.push(JournalChange::SetWrittenValues(self.retry_entries.len() + position, written_values.clone()));
            self.journal.entries[position].written_values = written_values;
        }
        self.append_changes(&changes)
    }

    /// Forgets a write after which the setting has its previous value, because the kernel did not keep the new one. The
    /// same holds for the setting that the kernel resets with it.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub fn forget_write_without_effect(&mut self, knob: &Knob) -> Result<(), Error> {
        let (host, reset) = (self.host, knob.resets().map(|(reset, _)| reset));
        let has_effect = |entry: &JournalEntry| match &entry.undo {
            Action::Write { knob: written, value } if written == knob || Some(written) == reset.as_ref() => {
                written.read(host).map(|current| written.restorable_value(current)).as_ref() != Ok(value)
            }
            _ => true,
        };
        let length = self.journal.entries.len();
        self.journal.entries.retain(has_effect);
        if self.journal.entries.len() < length { self.rewrite_journal() } else { Ok(()) }
    }

    fn has_knob_entry(&self, knob: &Knob) -> bool {
        self.journal.entries.iter().any(|entry| is_entry_of_knob(entry, knob))
    }

    /// Rewrites the whole journal.
    fn rewrite_journal(&mut self) -> Result<(), Error> {
        let entries = self.retry_entries.iter().chain(&self.journal.entries).cloned().collect();
        let journal = Journal { boot: self.journal.boot.clone(), writer: self.journal.writer, purpose: None, entries };
        self.journal_size = JournalSize::default();
        self.journal_size.rewritten_bytes = journal.store(&self.directory, self.class.journal_file())?;
        Ok(())
    }

    /// Appends changes to the journal file.
    fn append_changes(&mut self, changes: &[JournalChange]) -> Result<(), Error> {
        let JournalSize { rewritten_bytes, appended_bytes } = self.journal_size;
        let is_empty = self.retry_entries.is_empty() && self.journal.entries.is_empty();
        if changes.is_empty() {
            return Ok(());
        }
        if is_empty || rewritten_bytes == 0 || appended_bytes > rewritten_bytes.max(MIN_APPENDED_BYTES_TO_REWRITE) {
            return self.rewrite_journal();
        }
        match Journal::append(&self.directory, self.class.journal_file(), changes) {
            Ok(bytes) => self.journal_size.appended_bytes += bytes,
            // The file may end in a truncated line, after which nothing may be appended.
            Err(_) => self.rewrite_journal()?,
        }
        Ok(())
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let mut messages: Vec<String> = match self.undo_entries() {
            Ok((_, failed)) => failed.iter().map(|failed| format!("not undone: {failed}")).collect(),
            Err(error) => vec![chain(&error)],
        };
        messages.extend(self.store_recorded_enrollments().err().map(|error| chain(&error)));
        for message in messages {
            // Standard error may be closed, and a panic here would abort the process.
            let _ = writeln!(io::stderr(), "pagefold: {message}");
        }
    }
}

fn is_entry_of_knob(entry: &JournalEntry, knob: &Knob) -> bool {
    matches!(&entry.undo, Action::Write { knob: written, .. } if written == knob)
}

/// The identifier of the present boot: journals of another boot are void.
pub fn read_boot_id(host: &dyn Host) -> Result<String, Absent> {
    Ok(String::from_utf8_lossy(&host.read("proc/sys/kernel/random/boot_id")?).trim().to_owned())
}

/// The lock of a class in a state directory. It is released here and not by closing the file alone: a child of another
/// thread has the file, too, from its fork(2) until it executes its program.
struct SessionLock(File);

impl Drop for SessionLock {
    fn drop(&mut self) {
        // Fails for no file that could be locked; closing it releases the lock then.
        let _ = self.0.unlock();
    }
}

/// Opens a directory, which is created if necessary, and takes the lock of a class in it. The lock file contains the
/// holder's process number.
fn lock_directory(path: &Path, class: ResourceClass) -> Result<(StateDirectory, SessionLock), Error> {
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::StateDirectoryUnusable { path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unusable(path))?;
    let directory = StateDirectory::open(path).map_err(unusable(path))?;
    if !directory.is_private().map_err(unusable(path))? {
        return Err(Error::DirectoryWritableByOthers(path.to_owned()));
    }
    let path = path.join(class.lock_file());
    let mut lock = directory.open_file(class.lock_file(), OFlags::RDWR | OFlags::CREATE).map_err(unusable(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let read = lock.read_to_string(&mut holder);
            let pid = read.ok().and_then(|_| holder.trim().parse().ok());
            return Err(Error::Busy { class, holder: LockHolder { pid, state_directory: None } });
        }
        Err(TryLockError::Error(source)) => return Err(Error::StateDirectoryUnusable { path, source }),
    }
    lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())).map_err(unusable(&path))?;
    Ok((directory, SessionLock(lock)))
}

#[cfg(test)]
mod tests;
