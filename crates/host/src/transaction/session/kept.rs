//! Changes that stay after their session, each with the purpose for which it was kept, until they are undone.
//!
//! The changes of a class are in one file, whatever kept them. A setting has one entry for each purpose in a row, so the
//! changes of one purpose can be undone alone: where a later change of another purpose is above, that change stays, and
//! its undo restores the state from before both.

use super::{Error, FailedUndo, Session, is_entry_of_knob};
use crate::action::Action;
use crate::resource::ResourceClass;
use crate::transaction::journal::{self, CounterSample, Journal, JournalEntry, StateDirectory};
use pagefold_base::ProcessId;
use std::collections::BTreeSet;

/// The purpose of changes by a policy of KSM. Which policy it is, is the purpose of the whole journal.
pub const POLICY_PURPOSE: &str = "policy";

/// The purpose of changes by `pagefold tune`.
pub const TUNE_PURPOSE: &str = "tune";

/// Loads the changes of a class that were kept in this boot, or that outlive a boot. Each entry has its purpose.
///
/// # Errors
/// If the file cannot be read.
pub fn load_kept_changes(
    directory: &StateDirectory,
    class: ResourceClass,
    boot: &str,
) -> Result<Option<Journal>, journal::Error> {
    let kept = Journal::load(directory, class.kept_changes_file())?;
    Ok(kept.filter(|kept| class.survives_reboot() || kept.boot == boot).map(with_purposes))
}

/// Gives entries that have no purpose the one of their file, as earlier versions stored it for all settings: that of the
/// command that kept changes last.
fn with_purposes(mut kept: Journal) -> Journal {
    let is_of_tune = kept.purpose.as_deref() == Some(TUNE_PURPOSE);
    let purpose = if is_of_tune { TUNE_PURPOSE } else { POLICY_PURPOSE };
    for entry in &mut kept.entries {
        entry.purpose.get_or_insert_with(|| purpose.to_owned());
    }
    if is_of_tune {
        kept.purpose = None;
    }
    kept
}

/// Whether a later change is above an earlier one of the same thing. Its undo then restores what was before both.
fn takes_over(later: &mut JournalEntry, earlier: &JournalEntry) -> bool {
    match (&mut later.undo, &earlier.undo) {
        (Action::Write { knob, value }, Action::Write { knob: same, value: before }) if knob == same => {
            value.clone_from(before);
            // If a kill left the value of the earlier change in force, it is not that of another program.
            later.written_values.splice(0..0, earlier.written_values.iter().cloned());
            true
        }
        (Action::SetAffinity { thread, cpus, .. }, Action::SetAffinity { thread: same, cpus: before, .. })
            if thread == same =>
        {
            cpus.to.clone_from(&before.to);
            true
        }
        _ => false,
    }
}

impl Session<'_> {
    /// Ends the session and keeps its changes, with their undo and with the purpose, until they are undone. The undo of a
    /// setting is its value from before the first change of the purpose. Enrollments are not kept: they are undone, unless
    /// [`Self::commit`] came before.
    ///
    /// # Errors
    /// If the changes cannot be stored. They are then undone when the session ends.
    pub fn keep_changes(&mut self, purpose: &str) -> Result<Vec<FailedUndo>, Error> {
        let kept = self.load_or_create_kept()?;
        self.add_to_kept(kept, purpose)
    }

    /// Like [`Self::keep_changes`], for a policy of KSM with this name, which takes the place of an earlier policy.
    ///
    /// # Errors
    /// As [`Self::keep_changes`].
    pub fn keep_policy(&mut self, name: &str) -> Result<Vec<FailedUndo>, Error> {
        let kept = Journal { purpose: Some(name.to_owned()), ..self.load_or_create_kept()? };
        self.add_to_kept(kept, POLICY_PURPOSE)
    }

    /// Notes with each change of this session the counters that show its effect, as they were before it. `select` gets
    /// the undo of the change. They are stored once the changes are kept; a setting that was kept before has those from
    /// before its first change.
    pub fn note_counters(&mut self, select: impl Fn(&Action) -> Vec<CounterSample>) {
        for entry in &mut self.journal.entries {
            entry.counters = select(&entry.undo);
        }
    }

    fn load_or_create_kept(&self) -> Result<Journal, Error> {
        let empty = || Journal { purpose: None, entries: Vec::new(), ..self.journal.clone() };
        Ok(self.load_kept_changes()?.unwrap_or_else(empty))
    }

    fn add_to_kept(&mut self, mut kept: Journal, purpose: &str) -> Result<Vec<FailedUndo>, Error> {
        kept.entries.retain(|entry| entry.undo.process().is_none_or(|process| self.is_alive(process)));
        for entry in self.journal.entries.iter().filter(|entry| entry.undo.can_be_kept()) {
            let newest = match &entry.undo {
                Action::Write { knob, .. } => {
                    let newest = kept.entries.iter_mut().rev().find(|kept| is_entry_of_knob(kept, knob));
                    newest.filter(|kept| kept.purpose.as_deref() == Some(purpose))
                }
                // Undone newest first, so the state before the first change comes back.
                _ => None,
            };
            match (newest, &entry.undo) {
                (Some(saved), Action::Write { value, .. }) => {
                    // The previous value is restored if this process ends before its own journal is removed.
                    saved.written_values.retain(|written| written == value);
                    saved.written_values.extend(entry.written_values.last().cloned());
                }
                _ => kept.entries.push(JournalEntry { purpose: Some(purpose.to_owned()), ..entry.clone() }),
            }
        }
        kept.store(&self.directory, self.class.kept_changes_file())?;
        let entries = self.journal.entries.clone();
        self.journal.entries.retain(|entry| !entry.undo.can_be_kept());
        // While the session's own journal contains the changes, they are undone.
        if let Err(error) = self.rewrite_journal() {
            self.journal.entries = entries;
            return Err(error);
        }
        self.undo_all()
    }

    /// The changes that earlier sessions kept, with their purposes, if there are any.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn load_kept_changes(&self) -> Result<Option<Journal>, Error> {
        Ok(load_kept_changes(&self.directory, self.class, &self.journal.boot)?)
    }

    /// Undoes all kept changes, newest first. Returns the undone actions and the failed ones.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_kept_changes(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let Some(kept) = self.load_kept_changes()? else { return Ok((Vec::new(), Vec::new())) };
        let remaining = Journal { entries: Vec::new(), ..kept.clone() };
        self.undo_kept_entries(kept.entries, &remaining)
    }

    /// Undoes all kept changes of these processes, newest first, and keeps those of others. Changes of different processes
    /// do not depend on each other. Returns the undone actions and the failed ones.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_kept_changes_of(
        &mut self,
        processes: &BTreeSet<ProcessId>,
    ) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let Some(mut kept) = self.load_kept_changes()? else { return Ok((Vec::new(), Vec::new())) };
        let is_selected =
            |entry: &JournalEntry| entry.undo.process().is_some_and(|process| processes.contains(&process));
        let (to_undo, remaining) = kept.entries.into_iter().partition(is_selected);
        kept.entries = remaining;
        self.undo_kept_entries(to_undo, &kept)
    }

    /// Undoes the changes that were kept for one purpose, newest first, and keeps all others. Where a setting or the CPUs
    /// of a thread have been changed for another purpose since, that change stays, and its undo restores the state from
    /// before both. Returns the undone actions and the failed ones.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_kept_changes_for(&mut self, purpose: &str) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let Some(mut kept) = self.load_kept_changes()? else { return Ok((Vec::new(), Vec::new())) };
        let (mut remaining, mut to_undo): (Vec<JournalEntry>, Vec<JournalEntry>) = (Vec::new(), Vec::new());
        // Newest first, so that the entry above each one is known.
        while let Some(entry) = kept.entries.pop() {
            if entry.purpose.as_deref() != Some(purpose) {
                remaining.push(entry);
            } else if !remaining.iter_mut().rev().any(|later| takes_over(later, &entry)) {
                to_undo.push(entry);
            }
        }
        remaining.reverse();
        to_undo.reverse();
        kept.entries = remaining;
        if purpose == POLICY_PURPOSE {
            kept.purpose = None;
        }
        self.undo_kept_entries(to_undo, &kept)
    }

    /// Undoes entries that were kept, after it has stored those that remain.
    fn undo_kept_entries(
        &mut self,
        entries: Vec<JournalEntry>,
        remaining: &Journal,
    ) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        self.journal.entries.extend(entries);
        // From here on this session undoes the entries, even after a kill.
        self.rewrite_journal()?;
        remaining.store(&self.directory, self.class.kept_changes_file())?;
        self.undo_entries()
    }
}
