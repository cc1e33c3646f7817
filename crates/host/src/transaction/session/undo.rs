//! Undoes the changes of a session, newest first.

use super::extents::Extents;
use super::{Error, FailedUndo, Session, is_entry_of_knob};
use crate::action::{Action, ActionError, ActionOutcome, MissedReason};
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

/// Why a change through a socket is not undone after another one through the same socket.
pub(super) const HUNG_REASON: &str = "the control socket did not answer in time for another change";

/// The program that makes a change when it is asked through its socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SocketOwner {
    Guest(ProcessId),
    Libvirt,
}

impl SocketOwner {
    fn find(action: &Action) -> Option<Self> {
        match action {
            Action::SetQomProperty { process, .. } => Some(Self::Guest(*process)),
            Action::SetAffinity { pin: Some(_), .. } | Action::DefineDomain { .. } => Some(Self::Libvirt),
            _ => None,
        }
    }
}

/// What becomes of a change whose undo failed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FailedUndoFate {
    /// The next session retries the undo.
    Retried,
    /// It stays, because the undo cannot succeed.
    Stays,
    /// Another program has changed the same thing since, and that change stays.
    Overwritten,
}

/// The result of undoing an entry.
#[derive(Default)]
struct UndoResult {
    undone: Option<Action>,
    /// Whether the process was busy until the timeout.
    is_busy: bool,
    /// The parts that failed, with the reason.
    failed: Vec<(JournalEntry, String, FailedUndoFate)>,
}

impl UndoResult {
    fn success(entry: &JournalEntry) -> Self {
        Self { undone: Some(entry.undo.clone()), ..Self::default() }
    }

    fn failure(entry: &JournalEntry, why: impl ToString, fate: FailedUndoFate) -> Self {
        Self { failed: vec![(entry.clone(), why.to_string(), fate)], ..Self::default() }
    }
}

impl Session<'_> {
    /// Performs an undo action, or finds that its process has exited. A process that does not stop at once is retried
    /// until `deadline`: it may be exiting, waiting in the kernel, or have no CPU. After that it stays as it is.
    fn undo_with_retries(&mut self, undo: &Action, deadline: Instant) -> Result<ActionOutcome, ActionError> {
        loop {
            let effect = self.apply_to_host(undo, &AtomicBool::new(false));
            let has_process = undo.process().is_some();
            if !has_process || !matches!(effect, Err(ActionError::Busy(_))) || self.host.now() >= deadline {
                return effect;
            }
            self.host.sleep(Duration::from_millis(10));
        }
    }

    /// Undoes all entries, newest first, even if an undo or a write of the journal fails.
    pub(super) fn undo_entries(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        self.undo_entries_after(0)
    }

    /// Undoes the entries after the first `kept_count` ones, newest first.
    pub(super) fn undo_entries_after(&mut self, kept_count: usize) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        let (mut undone, mut failed_undos, mut stored) = (Vec::new(), Vec::new(), Ok(()));
        let (older_count, deadline) = (self.retry_entries.len(), self.host.now() + PROCESS_EXIT_TIMEOUT);
        // Each change through the socket of a program that hangs would take the whole timeout.
        let mut hung: BTreeSet<SocketOwner> = BTreeSet::new();
        // `run` was written last and is restored first, so that ksmd does not run with half of the old settings.
        while let Some(entry) = self.journal.entries.get(kept_count..).and_then(<[_]>::last).cloned() {
            let socket_owner = SocketOwner::find(&entry.undo);
            let started = self.host.now();
            let result = match socket_owner {
                Some(owner) if hung.contains(&owner) => {
                    UndoResult::failure(&entry, HUNG_REASON, FailedUndoFate::Retried)
                }
                _ => self.undo_entry(&entry, deadline),
            };
            let is_hung =
                result.is_busy || !result.failed.is_empty() && elapsed_since(self.host, started) >= HUNG_AFTER;
            hung.extend(socket_owner.filter(|_| is_hung));
            self.journal.entries.pop();
            undone.extend(result.undone);
            let retry_count = self.retry_entries.len();
            for (entry, why, fate) in result.failed {
                let will_retry = fate == FailedUndoFate::Retried;
                let is_overwritten = fate == FailedUndoFate::Overwritten;
                failed_undos.push(FailedUndo { undo: entry.undo.clone(), why, will_retry, is_overwritten });
                if will_retry {
                    self.retry_entries.insert(older_count, entry);
                }
            }
            // After a failed undo, the later entries have other positions in the file.
            let can_append = stored.is_ok() && self.retry_entries.len() == retry_count;
            stored = if can_append { self.append_changes(&[JournalChange::Pop]) } else { self.rewrite_journal() };
        }
        match stored {
            Ok(()) => Ok((undone, failed_undos)),
            Err(error) if failed_undos.is_empty() => Err(error),
            Err(error) => Err(Error::UndoFailed { failed_undos, source: Box::new(error) }),
        }
    }

    fn undo_entry(&mut self, entry: &JournalEntry, deadline: Instant) -> UndoResult {
        // The socket of a guest that has exited would be retried forever.
        if entry.undo.process().is_some_and(|process| !self.is_alive(process)) {
            return UndoResult::success(entry);
        }
        if entry.until_commit
            && let Err(why) = self.check_memory_for_copies(&entry.undo)
        {
            return UndoResult::failure(entry, why, FailedUndoFate::Retried);
        }
        match &entry.undo {
            Action::Write { knob, value } => match self.needs_undo(entry, knob, value) {
                Ok(true) => {}
                Ok(false) => return UndoResult::success(entry),
                Err((why, fate)) => return UndoResult::failure(entry, why, fate),
            },
            Action::Advise { process, ranges, .. }
            | Action::MovePages { process, ranges, .. }
            | Action::SetMemoryPolicy { process, ranges, .. } => {
                return self.undo_ranges(entry, *process, ranges, deadline);
            }
            _ => {}
        }
        match self.undo_with_retries(&entry.undo, deadline) {
            Ok(_) | Err(ActionError::Vanished) => UndoResult::success(entry),
            Err(why) => UndoResult {
                is_busy: matches!(why, ActionError::Busy(_)),
                ..UndoResult::failure(entry, explain_failure(&entry.undo, &why), fate_after(&why))
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
        let headroom = memory_headroom::measure_headroom(self.host, &cgroup.iter().cloned().collect());
        let need = FrameNeed::for_cgroup(cgroup.as_deref(), copies, Pages::ZERO);
        let fits = guard::check_memory(&need, &headroom, self.host.page_size()).verdict == MemoryVerdict::Fits;
        Ok(Some((fits, cgroup)))
    }

    /// Whether a setting is to be restored. The error says why it must not be restored.
    fn needs_undo(&self, entry: &JournalEntry, knob: &Knob, value: &str) -> Result<bool, (String, FailedUndoFate)> {
        let unreadable = |why: Absent| {
            let is_gone = why == Absent::NotOnThisKernel;
            (why.to_string(), if is_gone { FailedUndoFate::Stays } else { FailedUndoFate::Retried })
        };
        let current = knob.read(self.host).map_err(unreadable)?;
        if knob.restorable_value(current.clone()) == *value {
            return Ok(false);
        }
        if let Some((driver, active)) = knob.changed_by_kernel_while()
            && driver.read(self.host).as_deref() == Ok(active)
        {
            if self.retry_entries.iter().any(|entry| is_entry_of_knob(entry, &driver)) {
                return Err((format!("{driver} is {active} and could not be restored"), FailedUndoFate::Retried));
            }
            let was_active = Action::Write { knob: driver.clone(), value: active.to_owned() };
            // If the driver had this value before, the kernel sets this setting.
            let was_active_before = self.journal.entries.iter().any(|entry| entry.undo == was_active);
            let foreign_write =
                || (format!("{driver} is {active}, which another program wrote"), FailedUndoFate::Overwritten);
            return if was_active_before { Ok(false) } else { Err(foreign_write()) };
        }
        if !entry.written_values.contains(&current) {
            return Err((format!("it is {current} now, written by another program"), FailedUndoFate::Overwritten));
        }
        Ok(true)
    }

    /// Undoes a change of ranges where the changed memory is still mapped.
    fn undo_ranges(
        &mut self,
        entry: &JournalEntry,
        process: ProcessId,
        ranges: &[AddressRange],
        deadline: Instant,
    ) -> UndoResult {
        let extents = match Extents::read(self.host, process) {
            Ok(extents) => extents,
            Err(Absent::Vanished) => return UndoResult::success(entry),
            Err(why) => return UndoResult::failure(entry, why, FailedUndoFate::Retried),
        };
        let partial_entry = |pairs: &[(AddressRange, AddressRange)]| {
            let (ranges, enclosing_extents) = pairs.iter().copied().unzip();
            let undo = entry.undo.with_ranges(ranges);
            JournalEntry { undo, written_values: Vec::new(), enclosing_extents, ..entry.clone() }
        };
        let mut result = UndoResult::default();
        let (mut unchanged, mut changed) = (Vec::new(), Vec::new());
        for (position, &range) in ranges.iter().enumerate() {
            // Ranges that are no longer mapped need no undo.
            match entry.enclosing_extents.get(position) {
                _ if !extents.is_mapped(range) => {}
                Some(&extent) if extents.is_unchanged(range, extent) => unchanged.push((range, extent)),
                extent => changed.push((range, extent.copied().unwrap_or(range))),
            }
        }
        if !changed.is_empty() {
            let why = "another mapping may be there now and was left unchanged";
            result.failed.push((partial_entry(&changed), why.to_owned(), FailedUndoFate::Overwritten));
        }
        if unchanged.is_empty() {
            result.undone = changed.is_empty().then(|| entry.undo.clone());
            return result;
        }
        let remaining_entry = partial_entry(&unchanged);
        match self.undo_with_retries(&remaining_entry.undo, deadline) {
            Ok(effect) => {
                let mut missed: BTreeMap<MissedReason, Vec<_>> = BTreeMap::new();
                // A range that was unmapped meanwhile has nothing to undo.
                for (range, why) in effect.missed_ranges.into_iter().filter(|(_, why)| !why.is_not_mapped()) {
                    let missed_parts = unchanged
                        .iter()
                        .filter_map(|&(changed_range, extent)| Some((changed_range.overlap(range)?, extent)));
                    missed.entry(why).or_default().extend(missed_parts);
                }
                if missed.is_empty() {
                    result.undone = Some(remaining_entry.undo);
                }
                // Pages that are mapped several times now, such as those merged by KSM since, stay where they are, and
                // policies of other programs stay as they are.
                result.failed.extend(missed.into_iter().map(|(why, pairs)| {
                    let fate = match why {
                        MissedReason::OtherPolicy(_) => FailedUndoFate::Overwritten,
                        MissedReason::MappedSeveralTimes => FailedUndoFate::Stays,
                        _ => FailedUndoFate::Retried,
                    };
                    (partial_entry(&pairs), why.to_string(), fate)
                }));
            }
            Err(ActionError::Vanished) => result.undone = Some(remaining_entry.undo),
            Err(why) => result.failed.push((remaining_entry, why.to_string(), fate_after(&why))),
        }
        result
    }
}

/// Why an undo failed, with what to do if the kernel takes the value later only.
fn explain_failure(undo: &Action, why: &ActionError) -> String {
    let remedy = match (undo, why) {
        (Action::Write { knob, .. }, ActionError::Busy(_)) => knob.busy_remedy(),
        _ => None,
    };
    remedy.map_or_else(|| why.to_string(), |remedy| format!("{why}; {remedy}"))
}

/// What becomes of a change whose undo failed for this reason.
fn fate_after(why: &ActionError) -> FailedUndoFate {
    match why {
        ActionError::ChangedByOthers(_) => FailedUndoFate::Overwritten,
        ActionError::ReadOnly | ActionError::Unsupported(_) => FailedUndoFate::Stays,
        _ => FailedUndoFate::Retried,
    }
}
