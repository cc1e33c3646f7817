//! Undoes the changes of a session, newest first.

use super::extents::Extents;
use super::{Error, FailedUndo, Session, is_entry_of_knob};
use crate::action::{Action, ActionError, ActionOutcome};
use crate::knob::Knob;
use crate::transaction::journal::{JournalChange, JournalEntry};
use crate::{elapsed_since, memory_headroom, parse};
use pagefold_base::guard::{self, FrameNeed, MemoryVerdict};
use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::{Absent, AddressRange, Pages, ProcessId};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Total time to wait for processes that are exiting or do not stop, if they delay an undo.
pub(super) const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// A guest that takes this long to refuse a backend hangs, busy or not.
pub(super) const HUNG_AFTER: Duration = Duration::from_secs(1);

/// Why a change of a guest is not undone after another one of the same guest.
pub(super) const GUEST_HUNG_REASON: &str = "the control socket of the guest did not answer in time for another change";

/// The result of undoing an entry.
#[derive(Default)]
struct UndoResult {
    undone: Option<Action>,
    /// Whether the process was busy until the timeout.
    is_busy: bool,
    /// The parts that failed, with the reason and whether to retry them later.
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

impl Session<'_> {
    /// Performs an undo action, or finds that its process has exited. A process that does not stop at once is retried
    /// until `until`: it may be exiting, waiting in the kernel, or have no CPU. After that it stays as it is.
    fn undo_with_retries(&mut self, undo: &Action, until: Instant) -> Result<ActionOutcome, ActionError> {
        loop {
            let effect = self.apply_to_host(undo, &AtomicBool::new(false));
            let of_process = undo.process().is_some();
            if !of_process || !matches!(effect, Err(ActionError::Busy(_))) || self.host.now() >= until {
                return effect;
            }
            self.host.sleep(Duration::from_millis(10));
        }
    }

    /// Undoes all entries, newest first, even if an undo or a write of the journal fails.
    pub(super) fn undo_entries(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let (mut undone, mut remains, mut stored) = (Vec::new(), Vec::new(), Ok(()));
        let (older, until) = (self.retry_entries.len(), self.host.now() + PROCESS_EXIT_TIMEOUT);
        // Each backend of a guest that hangs would take the whole timeout of its control socket.
        let mut hung: BTreeSet<ProcessId> = BTreeSet::new();
        // `run` was written last and is restored first, so that ksmd does not run with half of the old settings.
        while let Some(entry) = self.journal.entries.last().cloned() {
            let guest = matches!(entry.undo, Action::SetQomProperty { .. }).then(|| entry.undo.process()).flatten();
            let started = self.host.now();
            let back = match guest {
                Some(process) if hung.contains(&process) => UndoResult::failure(&entry, GUEST_HUNG_REASON, true),
                _ => self.undo_entry(&entry, until),
            };
            let hangs = back.is_busy || !back.failed.is_empty() && elapsed_since(self.host, started) >= HUNG_AFTER;
            hung.extend(guest.filter(|_| hangs));
            self.journal.entries.pop();
            undone.extend(back.undone);
            let left = self.retry_entries.len();
            for (entry, why, kept) in back.failed {
                remains.push(FailedUndo { undo: entry.undo.clone(), why, will_retry: kept });
                if kept {
                    self.retry_entries.insert(older, entry);
                }
            }
            // After a failed undo, the later entries have other positions in the file.
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
        // The socket of a guest that has exited would be retried forever.
        if entry.undo.process().is_some_and(|process| matches!(crate::hold(self.host, process), Err(Absent::Vanished)))
        {
            return UndoResult::success(entry);
        }
        if entry.until_commit
            && let Err(why) = self.check_memory_for_copies(&entry.undo)
        {
            return UndoResult::failure(entry, why, true);
        }
        match &entry.undo {
            Action::Write { knob, value } => match self.needs_undo(entry, *knob, value) {
                Ok(true) => {}
                Ok(false) => return UndoResult::success(entry),
                Err((why, kept)) => return UndoResult::failure(entry, why, kept),
            },
            Action::Advise { process, ranges, .. } | Action::MovePages { process, ranges, .. } => {
                return self.undo_ranges(entry, *process, ranges, until);
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

    /// Checks before unenrolling a process that memory suffices for copies of its merged pages and is not short. The
    /// error is the reason why not.
    fn check_memory_for_copies(&self, undo: &Action) -> Result<(), &'static str> {
        match self.memory_for_copies(undo) {
            Ok(None) => Ok(()),
            Ok(Some((false, _))) | Err(_) => Err("there is no memory for copies of the merged pages"),
            Ok(Some((true, cgroup)))
                if memory_headroom::is_memory_short(self.host, cgroup.as_deref(), DEFAULT_PRESSURE_PERCENT) =>
            {
                Err("memory is short, and copies of the merged pages take more")
            }
            Ok(Some((true, _))) => Ok(()),
        }
    }

    /// Whether memory suffices for copies of all merged pages of a process to unenroll, with its cgroup; `None` if
    /// nothing is to be copied.
    fn memory_for_copies(&self, undo: &Action) -> Result<Option<(bool, Option<String>)>, Absent> {
        let Some(process) = undo.process().filter(|_| undo.unmerges()) else { return Ok(None) };
        let handle = match crate::hold(self.host, process) {
            Err(Absent::Vanished) => return Ok(None),
            handle => handle?,
        };
        let ksm = parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages"));
        let merged = ksm.merging_pages.map(|pages| pages.saturating_add_signed(ksm.zero_pages.unwrap_or(0)));
        let copies = match (merged, undo) {
            (Ok(pages), _) => Pages(pages),
            // An upper bound.
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

    /// Whether a setting is to be restored. The error says why it must not be restored, and whether to retry later.
    fn needs_undo(&self, entry: &JournalEntry, knob: Knob, value: &str) -> Result<bool, (String, bool)> {
        let now = knob.read(self.host).map_err(|why| (why.to_string(), why != Absent::NotOnThisKernel))?;
        if knob.restorable_value(now.clone()) == *value {
            return Ok(false);
        }
        if let Some((driver, active)) = knob.changed_by_kernel_while()
            && driver.read(self.host).as_deref() == Ok(active)
        {
            if self.retry_entries.iter().any(|entry| is_entry_of_knob(entry, driver)) {
                return Err((format!("{driver} is {active} and could not be restored"), true));
            }
            let was_active = Action::Write { knob: driver, value: active.to_owned() };
            // If it was so before, the kernel sets this one.
            let before = self.journal.entries.iter().any(|older| older.undo == was_active);
            let foreign = || (format!("{driver} is {active}, which another program wrote"), false);
            return if before { Ok(false) } else { Err(foreign()) };
        }
        if !entry.written_values.contains(&now) {
            return Err((format!("it is {now} now, written by another program"), false));
        }
        Ok(true)
    }

    /// Undoes a change of ranges where the changed memory is still mapped.
    fn undo_ranges(
        &mut self,
        entry: &JournalEntry,
        process: ProcessId,
        ranges: &[AddressRange],
        until: Instant,
    ) -> UndoResult {
        let extents = match Extents::read(self.host, process) {
            Ok(extents) => extents,
            Err(Absent::Vanished) => return UndoResult::success(entry),
            Err(why) => return UndoResult::failure(entry, why, true),
        };
        let part = |pairs: &[(AddressRange, AddressRange)]| {
            let (ranges, within) = pairs.iter().copied().unzip();
            let undo = entry.undo.with_ranges(ranges);
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
            // Ranges that are no longer mapped need no undo.
            match entry.enclosing_extents.get(position) {
                _ if !extents.is_mapped(range) => {}
                Some(&within) if extents.is_unchanged(range, within) => same.push((range, within)),
                within => other.push((range, within.copied().unwrap_or(range))),
            }
        }
        if !other.is_empty() {
            let why = "another mapping may be there now and was left unchanged";
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
                // A range that was unmapped meanwhile has nothing to undo.
                for (range, why) in effect.missed_ranges.into_iter().filter(|(_, why)| !why.is_not_mapped()) {
                    let cut = same.iter().filter_map(|&(part, within)| Some((part.overlap(range)?, within)));
                    missed.entry(why.to_string()).or_default().extend(cut);
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

/// Whether an action that failed may succeed later.
fn is_retryable(why: &ActionError) -> bool {
    !matches!(why, ActionError::ReadOnly | ActionError::Unsupported(_) | ActionError::ChangedByOthers(_))
}
