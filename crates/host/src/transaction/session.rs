//! Changing a host, with everything put back.
//!
//! A [`Session`] holds the one lock that lets somebody change KSM's settings and enrolments, and writes each change
//! into the [`journal`] before it is made. The lock is in the state directory; another one, which all Pagefolds on the
//! host share ([`Host::acquire_lock`]), keeps those out that have a state directory of their own. What was changed for a time
//! only comes back when the session ends, newest first: at the end of the work, on an error, in a panic. After `kill -9`
//! the next session, or `pagefold recover`, finds the journal and puts it back. What cannot be put back now but may be
//! later stays written down, and the next session tries again.
//!
//! A setting is put back only where it still has the value that was written last. Another value was written by
//! somebody else since, and is theirs: Pagefold yields and says so. One setting is written by the kernel too: a change
//! of `advisor_mode` resets `pages_to_scan` (mm/ksm.c, `set_advisor_defaults`), and while the advisor is on it moves.
//! So what `pages_to_scan` was is written down before the mode is changed, and comes back after it.
//!
//! Advice is put back only where its range still lies in what it lay in when it was given: a run of adjacent regions of
//! one kind that has not grown, but for the heap. By then the program may have mapped something else there, which it
//! never enrolled. Limits: something of the same kind and place cannot be told from what was there.
//!
//! What a session enrols is to stay, once it is done. If it ends before, by an error, a panic or `kill -9`, that is
//! withdrawn again, as far as there is memory for copies of what has merged and nobody waits for memory; where there is
//! not, it stays written down.
//!
//! Settings that a policy leaves behind on purpose ([`Session::keep_as_policy`]) are written down apart, until
//! [`Session::restore_policy`].

mod error;
mod extents;

use crate::action;
use crate::action::{Action, ActionError, ActionOutcome, MergeAdvice};
use crate::transaction::journal::{
    Journal, JournalChange, JournalEntry, POLICY_FILE, SESSION_FILE, StateDirectory, restorable_value,
};
use crate::{Host, HostLock, LockHolder, memory_headroom, parse};
pub use error::Error;
pub use error::chain;
use extents::Extents;
use pagefold_base::guard;
use pagefold_base::guard::{FrameNeed, MemoryVerdict};
use pagefold_base::ksm::DEFAULT_PAGES_TO_SCAN;
use pagefold_base::ksm::{Setting, Settings};
use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::{Absent, AddressRange, Pages, ProcessId};
use rustix::fs::OFlags;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

/// Where lock and journal are kept unless said otherwise.
pub const DEFAULT_STATE_DIRECTORY: &str = "/run/pagefold";

/// How long processes are waited for in all that are ending or do not stop, where that keeps something from being put
/// back.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest that refuses a backend after so long hangs, busy or not.
const HUNG_AFTER: Duration = Duration::from_secs(1);

/// Why a backend of a guest is not put back after another one of the guest.
const GUEST_HUNG_REASON: &str = "the control socket of the guest did not answer in time for another backend";

/// Whether a change comes back when the session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeLifetime {
    /// It is put back.
    Temporary,
    /// It is what the session is for, and stays once that is done ([`Session::success`]). Until then it is put back, too,
    /// as far as there is memory for that.
    PermanentOnCommit,
    /// It is never put back.
    Permanent,
}

/// Something that could not be put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedUndo {
    /// What would have put it back.
    pub undo: Action,
    /// Why it was not.
    pub why: String,
    /// Whether the next session tries again.
    pub will_retry: bool,
}

impl fmt::Display for FailedUndo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", UndoDescription(&self.undo), self.why)
    }
}

/// What puts a change back, for people: as what there was before it.
pub struct UndoDescription<'a>(pub &'a Action);

impl fmt::Display for UndoDescription<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Action::Set { setting, value } => write!(f, "/sys/kernel/mm/ksm/{} was {value}", setting.file_name()),
            Action::Advise { process, advice, ranges } => {
                let was = if *advice == MergeAdvice::Mergeable { "enrolled" } else { "not enrolled" };
                write!(f, "{} ranges of process {} were {was}", ranges.len(), process.pid)
            }
            Action::MergeAny { process, enable: on } => {
                write!(f, "process {} was {}enrolled whole", process.pid, if *on { "" } else { "not " })
            }
            Action::GuestMerge { process, backend, enable: on, .. } => {
                let was = if *on { "" } else { "not " };
                write!(f, "{backend} of the guest of process {} was {was}enrolled", process.pid)
            }
            // It has no undo.
            Action::Collapse { .. } => Ok(()),
        }
    }
}

/// The right to change a host, and what is to be put back.
pub struct Session<'a> {
    host: &'a dyn Host,
    directory: StateDirectory,
    /// What comes back when this session ends.
    journal: Journal,
    /// What could not be put back and may be later, oldest first.
    retry_entries: Vec<JournalEntry>,
    journal_size: JournalSize,
    stop_durations: Vec<Duration>,
    _lock: File,
    _claim: HostLock,
}

/// What the journal's file has in bytes.
#[derive(Clone, Copy, Default)]
struct JournalSize {
    /// When it was last written whole; 0 where there is none, or where it has to be written whole again.
    rewritten_bytes: usize,
    /// Since then.
    appended_bytes: usize,
}

/// Changes may be appended to a journal until they are as large as it was, and as this: all that is written is so within
/// a small multiple of what is to be kept.
const MIN_APPENDED_BYTES_TO_REWRITE: usize = 64 << 10;

/// What of an entry was put back.
#[derive(Default)]
struct UndoResult {
    undone: Option<Action>,
    /// Whether the process was busy until it was given up.
    is_busy: bool,
    /// What was not, why, and whether to try again later.
    failed: Vec<(JournalEntry, String, bool)>,
}

impl UndoResult {
    fn success(entry: &JournalEntry) -> Self {
        Self { undone: Some(entry.undo.clone()), ..Self::default() }
    }

    fn failure(entry: &JournalEntry, why: impl ToString, kept: bool) -> Self {
        Self { failed: vec![(entry.clone(), why.to_string(), kept)], ..Self::default() }
    }
}

/// How the journal was before an action was noted.
struct JournalMark {
    entry_count: usize,
    previous_values: Vec<(usize, Vec<String>)>,
}

impl<'a> Session<'a> {
    /// Take the lock in a directory, made if it is not there, and put back what a killed session left. Tells that too.
    pub fn begin(host: &'a dyn Host, directory: &Path) -> Result<(Self, Vec<Action>, Vec<FailedUndo>), Error> {
        let (directory, lock) = lock_directory(directory)?;
        let claim = host.acquire_lock().map_err(Error::Busy)?;
        if matches!(claim, HostLock::Obstructed) {
            let _ = writeln!(
                io::stderr(),
                "pagefold: another program holds a read lock on /sys/kernel/mm/ksm/run: a second pagefold with another \
                 state directory would not be noticed"
            );
        }
        let boot = read_boot_id(host).map_err(Error::HostStateUnreadable)?;
        let left = Journal::load(&directory, SESSION_FILE)?.filter(|journal| journal.boot == boot);
        let journal = Journal { boot, writer: std::process::id(), purpose: None, entries: Vec::new() };
        let written = JournalSize::default();
        let mut session = Self {
            host,
            directory,
            journal,
            retry_entries: Vec::new(),
            journal_size: written,
            stop_durations: Vec::new(),
            _lock: lock,
            _claim: claim,
        };
        let Some(left) = left else { return Ok((session, Vec::new(), Vec::new())) };
        session.journal.entries = left.entries;
        let (undone, remains) = session.undo_entries()?;
        Ok((session, undone, remains))
    }

    /// The host.
    pub fn host(&self) -> &'a dyn Host {
        self.host
    }

    /// Where its journal is.
    pub fn directory(&self) -> &StateDirectory {
        &self.directory
    }

    /// For how long threads of targets were stopped, each time, by all changes and by putting them back.
    pub fn stop_durations(&self) -> &[Duration] {
        &self.stop_durations
    }

    /// Make a change, after it was written down what puts it back. A setting that is changed for good no longer comes
    /// back, whatever was done to it before.
    pub fn apply(&mut self, action: &Action, lifetime: ChangeLifetime) -> Result<ActionOutcome, Error> {
        self.apply_until_stopped(action, lifetime, &AtomicBool::new(false))
    }

    /// The same, ending the wait for a process that does not answer once `stop` is set. What puts a change back waits
    /// for its time limit all the same.
    pub fn apply_until_stopped(
        &mut self,
        action: &Action,
        lifetime: ChangeLifetime,
        stop: &AtomicBool,
    ) -> Result<ActionOutcome, Error> {
        if lifetime == ChangeLifetime::Permanent {
            let effect = self.apply_to_host(action, stop)?;
            if let Action::Set { setting, .. } = action {
                let length = self.journal.entries.len();
                self.journal.entries.retain(|entry| !is_entry_of_setting(entry, *setting));
                if self.journal.entries.len() < length {
                    self.rewrite_journal()?;
                }
            }
            return Ok(effect);
        }
        let noted = self.journal_action(action, lifetime == ChangeLifetime::PermanentOnCommit)?;
        self.apply_to_host(action, stop).map_err(|refusal| {
            // Where something may have been changed, its undo stays: taking back what was not done does no harm.
            let in_part = matches!(refusal, ActionError::Busy(_) | ActionError::Failed(_));
            let untouched = matches!(action, Action::Set { .. }) || !in_part;
            match if untouched { self.revert_journal(noted) } else { Ok(()) } {
                Ok(()) => refusal.into(),
                Err(error) => error,
            }
        })
    }

    /// Have an action carried out.
    fn apply_to_host(&mut self, action: &Action, stop: &AtomicBool) -> Result<ActionOutcome, ActionError> {
        let effect = self.host.apply_until_stopped(action, stop)?;
        self.stop_durations.extend(&effect.stop_durations);
        Ok(effect)
    }

    /// Put something back, or find that its process has ended. A process that does not stop at once is tried again until
    /// some time: it may be ending, wait in the kernel, or get no processor, and one that is given up stays as it is.
    fn undo_with_retries(&mut self, undo: &Action, until: Instant) -> Result<ActionOutcome, ActionError> {
        loop {
            let effect = self.apply_to_host(undo, &AtomicBool::new(false));
            let of_process = action_process(undo).is_some();
            if !of_process || !matches!(effect, Err(ActionError::Busy(_))) || Instant::now() >= until {
                return effect;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Write settings for now, in the order in which the kernel takes them. Those that have the value are not written.
    pub fn write_settings(&mut self, settings: &Settings) -> Result<(), Error> {
        for (&setting, value) in settings {
            let now = self.read_setting(setting)?;
            self.check_setting_not_overwritten(setting, &now)?;
            if now != *value {
                self.apply(&Action::Set { setting, value: value.clone() }, ChangeLifetime::Temporary)?;
            }
        }
        Ok(())
    }

    /// Whether settings can be written at all, found out by writing one that changes nothing. Not `run`, which somebody
    /// else may switch between the look and the write.
    pub fn check_writable(&self) -> Result<(), Error> {
        let value = self.read_setting(Setting::SleepMillisecs)?;
        self.host.apply(&Action::Set { setting: Setting::SleepMillisecs, value })?;
        Ok(())
    }

    /// Whether every setting still has the value that this session wrote.
    pub fn check_not_overwritten(&self) -> Result<(), Error> {
        for entry in &self.journal.entries {
            if let Action::Set { setting, .. } = entry.undo {
                self.check_setting_not_overwritten(setting, &self.read_setting(setting)?)?;
            }
        }
        Ok(())
    }

    /// Forget what would put back something of processes that have ended.
    pub fn drop_ended_processes(&mut self) -> Result<(), Error> {
        let length = self.journal.entries.len();
        let host = self.host;
        let lives = |process: &ProcessId| host.open(process.pid).is_ok_and(|handle| handle.id() == *process);
        self.journal.entries.retain(|entry| action_process(&entry.undo).is_none_or(|process| lives(&process)));
        if self.journal.entries.len() < length { self.rewrite_journal() } else { Ok(()) }
    }

    /// What the session is for is done: it stays. What an earlier one had begun of the same processes, and could not be
    /// withdrawn, stays with it.
    pub fn commit(&mut self) -> Result<(), Error> {
        let length = self.retry_entries.len() + self.journal.entries.len();
        let done: BTreeSet<ProcessId> = self
            .journal
            .entries
            .iter()
            .filter(|entry| entry.until_commit)
            .filter_map(|entry| action_process(&entry.undo))
            .collect();
        self.retry_entries.retain(|entry| {
            !entry.until_commit || action_process(&entry.undo).is_none_or(|process| !done.contains(&process))
        });
        self.journal.entries.retain(|entry| !entry.until_commit);
        if self.retry_entries.len() + self.journal.entries.len() < length { self.rewrite_journal() } else { Ok(()) }
    }

    /// Put everything back that was changed for now, newest first.
    ///
    /// # Errors
    /// When the journal cannot be written in the end: [`SessionError::FailedUndo`] with what is not put back, if there is any.
    pub fn undo_all(&mut self) -> Result<Vec<FailedUndo>, Error> {
        Ok(self.undo_entries()?.1)
    }

    /// The same because something failed: the error, with what remains.
    pub fn abort(&mut self, error: Error) -> Error {
        let remains = match self.undo_all() {
            Ok(remains) | Err(Error::UndoFailed { failed_undos: remains, .. }) => remains,
            // All is back: the journal that says otherwise does no harm.
            Err(_) => Vec::new(),
        };
        if remains.is_empty() { error } else { Error::UndoFailed { failed_undos: remains, source: Box::new(error) } }
    }

    /// End with the settings as they are now, as a policy's, and write down what they were before the first policy.
    /// Anything else that was changed for now comes back.
    pub fn keep_as_policy(&mut self, name: &str) -> Result<Vec<FailedUndo>, Error> {
        let mut kept =
            self.load_policy_journal()?.unwrap_or_else(|| Journal { entries: Vec::new(), ..self.journal.clone() });
        let settings = |entry: &JournalEntry| matches!(entry.undo, Action::Set { .. });
        for entry in self.journal.entries.iter().filter(|entry| settings(entry)) {
            let Action::Set { setting, value } = &entry.undo else { continue };
            match kept.entries.iter_mut().find(|known| is_entry_of_setting(known, *setting)) {
                Some(known) => {
                    // The former policy's is there again if this ends before its own journal is gone.
                    known.written_values.retain(|written| written == value);
                    known.written_values.extend(entry.written_values.last().cloned());
                }
                None => kept.entries.push(entry.clone()),
            }
        }
        kept.purpose = Some(name.to_owned());
        kept.store(&self.directory, POLICY_FILE)?;
        let all = self.journal.entries.clone();
        self.journal.entries.retain(|entry| !settings(entry));
        // While its own journal has them, they come back.
        if let Err(error) = self.rewrite_journal() {
            self.journal.entries = all;
            return Err(error);
        }
        self.undo_all()
    }

    /// What the host had before a policy was set, with the policy's name, if one is set.
    pub fn load_policy_journal(&self) -> Result<Option<Journal>, Error> {
        Ok(Journal::load(&self.directory, POLICY_FILE)?.filter(|journal| journal.boot == self.journal.boot))
    }

    /// Put back what the host had before a policy was set. Tells what was put back and what was not.
    pub fn restore_policy(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let Some(policy) = self.load_policy_journal()? else { return Ok((Vec::new(), Vec::new())) };
        self.journal.entries.extend(policy.entries);
        // From here on it is this session's to put back, also after it was killed.
        self.rewrite_journal()?;
        Journal { entries: Vec::new(), ..self.journal.clone() }.store(&self.directory, POLICY_FILE)?;
        self.undo_entries()
    }

    fn read_setting(&self, setting: Setting) -> Result<String, Error> {
        action::current_setting(self.host, setting).map_err(|source| Error::SettingUnreadable { setting, source })
    }

    fn check_setting_not_overwritten(&self, setting: Setting, now: &str) -> Result<(), Error> {
        // While this session has the advisor on, the kernel moves it.
        if setting == Setting::PagesToScan && self.last_written_value(Setting::AdvisorMode) == Some("scan-time") {
            return Ok(());
        }
        match self.last_written_value(setting) {
            Some(wrote) if wrote != now => {
                Err(Error::SettingOverwritten { setting, wrote: wrote.to_owned(), found: now.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// What was written last.
    fn last_written_value(&self, setting: Setting) -> Option<&str> {
        self.journal
            .entries
            .iter()
            .find(|entry| is_entry_of_setting(entry, setting))?
            .written_values
            .last()
            .map(String::as_str)
    }

    /// Write down what puts an action back. A setting keeps the value that it had first.
    fn journal_action(&mut self, action: &Action, until_done: bool) -> Result<JournalMark, Error> {
        let mut noted = JournalMark { entry_count: self.journal.entries.len(), previous_values: Vec::new() };
        if let Action::Set { setting, value } = action {
            let now = self.read_setting(*setting)?;
            if *setting == Setting::AdvisorMode
                && now != *value
                && (now == "none" || self.has_setting_entry(Setting::PagesToScan))
            {
                self.journal_setting(Setting::PagesToScan, &DEFAULT_PAGES_TO_SCAN.to_string(), &mut noted)?;
            }
            if now != *value || self.has_setting_entry(*setting) {
                self.journal_setting(*setting, value, &mut noted)?;
            }
        } else {
            let undo = action::undo_actions(self.host, action)?;
            for undo in undo {
                let within = self.enclosing_extents(&undo).map_err(Error::HostStateUnreadable)?;
                self.journal.entries.push(JournalEntry {
                    undo,
                    written_values: Vec::new(),
                    enclosing_extents: within,
                    until_commit: until_done,
                });
            }
        }
        self.append_changes(&self.journal_changes(&noted))?;
        Ok(noted)
    }

    /// What was changed since an action was noted.
    fn journal_changes(&self, noted: &JournalMark) -> Vec<JournalChange> {
        let entries = &self.journal.entries;
        let older = self.retry_entries.len();
        let written = noted
            .previous_values
            .iter()
            .map(|(at, _)| JournalChange::SetWrittenValues(older + at, entries[*at].written_values.clone()));
        written.chain(entries[noted.entry_count..].iter().cloned().map(JournalChange::Push)).collect()
    }

    /// What each range of advice is part of now.
    fn enclosing_extents(&self, action: &Action) -> Result<Vec<AddressRange>, Absent> {
        let Action::Advise { process, ranges, .. } = action else { return Ok(Vec::new()) };
        let extents = Extents::read(self.host, *process)?;
        // What has changed since it was chosen is bounded by itself.
        Ok(ranges.iter().map(|&range| extents.enclosing(range).unwrap_or(range)).collect())
    }

    /// Write down that a setting is about to be written.
    fn journal_setting(&mut self, setting: Setting, value: &str, noted: &mut JournalMark) -> Result<(), Error> {
        match self.journal.entries.iter().position(|entry| is_entry_of_setting(entry, setting)) {
            Some(position) => {
                let written = &mut self.journal.entries[position].written_values;
                noted.previous_values.push((position, written.clone()));
                let last = written.pop();
                *written = last.into_iter().chain([value.to_owned()]).collect();
            }
            None => {
                let undo = Action::Set { setting, value: restorable_value(setting, self.read_setting(setting)?) };
                let written = vec![value.to_owned()];
                self.journal.entries.push(JournalEntry {
                    undo,
                    written_values: written,
                    enclosing_extents: Vec::new(),
                    until_commit: false,
                });
            }
        }
        Ok(())
    }

    /// Take back what was noted, because it was not done.
    fn revert_journal(&mut self, noted: JournalMark) -> Result<(), Error> {
        let mut changes = vec![JournalChange::Pop; self.journal.entries.len() - noted.entry_count];
        self.journal.entries.truncate(noted.entry_count);
        for (position, written) in noted.previous_values.into_iter().rev() {
            changes.push(JournalChange::SetWrittenValues(self.retry_entries.len() + position, written.clone()));
            self.journal.entries[position].written_values = written;
        }
        self.append_changes(&changes)
    }

    fn has_setting_entry(&self, setting: Setting) -> bool {
        self.journal.entries.iter().any(|entry| is_entry_of_setting(entry, setting))
    }

    /// Write the journal whole.
    fn rewrite_journal(&mut self) -> Result<(), Error> {
        let entries = self.retry_entries.iter().chain(&self.journal.entries).cloned().collect();
        let journal = Journal { boot: self.journal.boot.clone(), writer: self.journal.writer, purpose: None, entries };
        self.journal_size = JournalSize::default();
        self.journal_size.rewritten_bytes = journal.store(&self.directory, SESSION_FILE)?;
        Ok(())
    }

    /// Write changes down that were made to the journal.
    fn append_changes(&mut self, changes: &[JournalChange]) -> Result<(), Error> {
        let JournalSize { rewritten_bytes: whole, appended_bytes: appended } = self.journal_size;
        let empty = self.retry_entries.is_empty() && self.journal.entries.is_empty();
        if changes.is_empty() {
            return Ok(());
        }
        if empty || whole == 0 || appended > whole.max(MIN_APPENDED_BYTES_TO_REWRITE) {
            return self.rewrite_journal();
        }
        match Journal::append(&self.directory, SESSION_FILE, changes) {
            Ok(bytes) => self.journal_size.appended_bytes += bytes,
            // A part of a line may be there, after which no other may come.
            Err(_) => self.rewrite_journal()?,
        }
        Ok(())
    }

    /// Put back all there is, newest first, whatever happens to one of them or to the journal.
    fn undo_entries(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let (mut undone, mut remains, mut stored) = (Vec::new(), Vec::new(), Ok(()));
        let (older, until) = (self.retry_entries.len(), Instant::now() + PROCESS_EXIT_TIMEOUT);
        // Each backend of a guest that hangs would take the whole time limit of its control socket.
        let mut hung: BTreeSet<ProcessId> = BTreeSet::new();
        // `run` was written last and is put back first, so that ksmd does not run under half of the old settings.
        while let Some(entry) = self.journal.entries.pop() {
            let guest = matches!(entry.undo, Action::GuestMerge { .. }).then(|| action_process(&entry.undo)).flatten();
            let started = Instant::now();
            let back = match guest {
                Some(process) if hung.contains(&process) => UndoResult::failure(&entry, GUEST_HUNG_REASON, true),
                _ => self.undo_entry(&entry, until),
            };
            let hangs = back.is_busy || !back.failed.is_empty() && started.elapsed() >= HUNG_AFTER;
            hung.extend(guest.filter(|_| hangs));
            undone.extend(back.undone);
            let left = self.retry_entries.len();
            for (entry, why, kept) in back.failed {
                remains.push(FailedUndo { undo: entry.undo.clone(), why, will_retry: kept });
                if kept {
                    self.retry_entries.insert(older, entry);
                }
            }
            // Where something stays, what comes after it in the file has another place.
            let same = stored.is_ok() && self.retry_entries.len() == left;
            stored = if same { self.append_changes(&[JournalChange::Pop]) } else { self.rewrite_journal() };
        }
        match stored {
            Ok(()) => Ok((undone, remains)),
            Err(error) if remains.is_empty() => Err(error),
            Err(error) => Err(Error::UndoFailed { failed_undos: remains, source: Box::new(error) }),
        }
    }

    fn undo_entry(&mut self, entry: &JournalEntry, until: Instant) -> UndoResult {
        // The socket of a guest that has ended would be tried for ever.
        if action_process(&entry.undo)
            .is_some_and(|process| matches!(crate::hold(self.host, process), Err(Absent::Vanished)))
        {
            return UndoResult::success(entry);
        }
        if entry.until_commit
            && let Err(why) = self.check_memory_for_copies(&entry.undo)
        {
            return UndoResult::failure(entry, why, true);
        }
        match &entry.undo {
            Action::Set { setting, value } => match self.needs_undo(entry, *setting, value) {
                Ok(true) => {}
                Ok(false) => return UndoResult::success(entry),
                Err((why, kept)) => return UndoResult::failure(entry, why, kept),
            },
            Action::Advise { process, advice, ranges } => {
                return self.undo_advice(entry, (*process, *advice, ranges), until);
            }
            _ => {}
        }
        match self.undo_with_retries(&entry.undo, until) {
            Ok(_) | Err(ActionError::Vanished) => UndoResult::success(entry),
            Err(why) => UndoResult {
                is_busy: matches!(why, ActionError::Busy(_)),
                ..UndoResult::failure(entry, &why, is_retryable(&why))
            },
        }
    }

    /// Whether there is memory for pages of their own for all that is merged of a process that is to be withdrawn, and
    /// none is waited for; or why not.
    fn check_memory_for_copies(&self, undo: &Action) -> Result<(), &'static str> {
        match self.memory_for_copies(undo) {
            Ok(None) => Ok(()),
            Ok(Some((false, _))) | Err(_) => Err("there is no memory for copies of what has merged"),
            Ok(Some((true, cgroup)))
                if memory_headroom::is_memory_short(self.host, cgroup.as_deref(), DEFAULT_PRESSURE_PERCENT) =>
            {
                Err("memory is short, and copies of what has merged take more")
            }
            Ok(Some((true, _))) => Ok(()),
        }
    }

    /// Whether there is room for copies of all that is merged of a process that is to be withdrawn, and its cgroup;
    /// nothing where nothing is to be copied.
    fn memory_for_copies(&self, undo: &Action) -> Result<Option<(bool, Option<String>)>, Absent> {
        let process = match undo {
            Action::Advise { process, advice: MergeAdvice::Unmergeable, .. }
            | Action::MergeAny { process, enable: false }
            | Action::GuestMerge { process, enable: false, .. } => *process,
            _ => return Ok(None),
        };
        let handle = match crate::hold(self.host, process) {
            Err(Absent::Vanished) => return Ok(None),
            handle => handle?,
        };
        let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
        let merged = ksm.merging_pages.map(|pages| pages.saturating_add_signed(ksm.zero_pages.unwrap_or(0)));
        let copies = match (merged, undo) {
            (Ok(pages), _) => Pages(pages),
            // At most.
            (Err(_), Action::Advise { ranges, .. }) => {
                ranges.iter().map(|range| self.host.page_size().pages_in(range.bytes())).sum()
            }
            (Err(why), _) => return Err(why),
        };
        let cgroup = handle.read("cgroup").and_then(|bytes| parse::cgroup(&bytes)).ok();
        if copies == Pages::ZERO {
            return Ok(None);
        }
        let room = memory_headroom::measure_headroom(self.host, &cgroup.iter().cloned().collect());
        let need = FrameNeed::for_cgroup(cgroup.as_deref(), copies, Pages::ZERO);
        let fits = guard::check_memory(&need, &room, self.host.page_size()).verdict == MemoryVerdict::Fits;
        Ok(Some((fits, cgroup)))
    }

    /// Whether a setting is to be put back. If it is but must not be: why, and whether to try again later.
    fn needs_undo(&self, entry: &JournalEntry, setting: Setting, value: &str) -> Result<bool, (String, bool)> {
        let read = |setting| action::current_setting(self.host, setting);
        let now = read(setting).map_err(|why| (why.to_string(), why != Absent::NotOnThisKernel))?;
        if restorable_value(setting, now.clone()) == *value {
            return Ok(false);
        }
        if setting == Setting::PagesToScan && read(Setting::AdvisorMode).as_deref() == Ok("scan-time") {
            let advisor = Action::Set { setting: Setting::AdvisorMode, value: "scan-time".to_owned() };
            if self.retry_entries.iter().any(|entry| is_entry_of_setting(entry, Setting::AdvisorMode)) {
                return Err(("the advisor is on, which could not be switched off".to_owned(), true));
            }
            // If the advisor was on before, it sets this.
            let before = self.journal.entries.iter().any(|older| older.undo == advisor);
            let foreign = || ("the advisor is on, which somebody else switched on".to_owned(), false);
            return if before { Ok(false) } else { Err(foreign()) };
        }
        if !entry.written_values.contains(&now) {
            return Err((format!("it is {now} now, which somebody else wrote"), false));
        }
        Ok(true)
    }

    /// Put advice back where what was advised is still there.
    fn undo_advice(
        &mut self,
        entry: &JournalEntry,
        (process, advice, ranges): (ProcessId, MergeAdvice, &[AddressRange]),
        until: Instant,
    ) -> UndoResult {
        let extents = match Extents::read(self.host, process) {
            Ok(extents) => extents,
            Err(Absent::Vanished) => return UndoResult::success(entry),
            Err(why) => return UndoResult::failure(entry, why, true),
        };
        let part = |pairs: &[(AddressRange, AddressRange)]| {
            let (ranges, within) = pairs.iter().copied().unzip();
            let undo = Action::Advise { process, advice, ranges };
            JournalEntry {
                undo,
                written_values: Vec::new(),
                enclosing_extents: within,
                until_commit: entry.until_commit,
            }
        };
        let mut back = UndoResult::default();
        let (mut same, mut other) = (Vec::new(), Vec::new());
        for (position, &range) in ranges.iter().enumerate() {
            // What nothing is mapped at any more needs nothing.
            match entry.enclosing_extents.get(position) {
                _ if !extents.is_mapped(range) => {}
                Some(&within) if extents.is_unchanged(range, within) => same.push((range, within)),
                within => other.push((range, within.copied().unwrap_or(range))),
            }
        }
        if !other.is_empty() {
            let why = "something else may be mapped there by now: it was left as it is";
            back.failed.push((part(&other), why.to_owned(), false));
        }
        if same.is_empty() {
            back.undone = other.is_empty().then(|| entry.undo.clone());
            return back;
        }
        let action = part(&same);
        match self.undo_with_retries(&action.undo, until) {
            Ok(effect) => {
                let mut missed: BTreeMap<String, Vec<_>> = BTreeMap::new();
                // What was unmapped meanwhile has nothing that could come back.
                for (range, why) in
                    effect.missed_ranges.into_iter().filter(|(_, why)| !why.starts_with(action::NOT_MAPPED_REASON))
                {
                    let cut = same.iter().filter_map(|&(part, within)| Some((part.overlap(range)?, within)));
                    missed.entry(why).or_default().extend(cut);
                }
                if missed.is_empty() {
                    back.undone = Some(action.undo);
                }
                back.failed.extend(missed.into_iter().map(|(why, pairs)| (part(&pairs), why, true)));
            }
            Err(ActionError::Vanished) => back.undone = Some(action.undo),
            Err(why) => back.failed.push((action, why.to_string(), is_retryable(&why))),
        }
        back
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let told: Vec<String> = match self.undo_entries() {
            Ok((_, remains)) => remains.iter().map(|remains| format!("not put back: {remains}")).collect(),
            Err(error) => vec![chain(&error)],
        };
        for told in told {
            // Nobody may be left to read it, and a panic here would end more than this.
            let _ = writeln!(io::stderr(), "pagefold: {told}");
        }
    }
}

/// Whether something that was refused may be taken later.
fn is_retryable(why: &ActionError) -> bool {
    !matches!(why, ActionError::ReadOnly | ActionError::Unsupported(_))
}

/// Whose memory it is about.
fn action_process(undo: &Action) -> Option<ProcessId> {
    match undo {
        Action::Advise { process, .. } | Action::MergeAny { process, .. } | Action::GuestMerge { process, .. } => {
            Some(*process)
        }
        _ => None,
    }
}

fn is_entry_of_setting(entry: &JournalEntry, of: Setting) -> bool {
    matches!(entry.undo, Action::Set { setting, .. } if setting == of)
}

/// Which boot of the host this is: journals of another one are void.
pub fn read_boot_id(host: &dyn Host) -> Result<String, Absent> {
    Ok(String::from_utf8_lossy(&host.read("proc/sys/kernel/random/boot_id")?).trim().to_owned())
}

/// A directory, made if it is not there, and its lock. The lock's file holds the number of the process that has it.
fn lock_directory(path: &Path) -> Result<(StateDirectory, File), Error> {
    let state = |path: &Path| {
        let path = path.to_owned();
        move |source| Error::StateDirectoryUnusable { path, source }
    };
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(state(path))?;
    let directory = StateDirectory::open(path).map_err(state(path))?;
    if !directory.is_private().map_err(state(path))? {
        return Err(Error::DirectoryWritableByOthers(path.to_owned()));
    }
    let path = path.join("lock");
    let mut lock = directory.open_file("lock", OFlags::RDWR | OFlags::CREATE).map_err(state(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let mut holder = String::new();
            let read = lock.read_to_string(&mut holder);
            let pid = read.ok().and_then(|_| holder.trim().parse().ok());
            return Err(Error::Busy(LockHolder { pid, state_directory: None }));
        }
        Err(TryLockError::Error(source)) => return Err(Error::StateDirectoryUnusable { path, source }),
    }
    lock.set_len(0).and_then(|()| write!(lock, "{}", std::process::id())).map_err(state(&path))?;
    Ok((directory, lock))
}

#[cfg(test)]
mod tests;
