//! The record of enrollments that stay after their session, for the next daemon.
//!
//! [`Session::commit`] makes enrollments permanent: the journal forgets them. A daemon also stores their undo in a file
//! of its own ([`Session::record_enrollments`]), with a label for each process. The next daemon of the same boot reads
//! it and continues to watch these ranges, and [`Session::undo_recorded_enrollments`] undoes them on request. The file
//! has the form of a journal.
//!
//! A commit takes effect when the record is written: an entry that is in both files after a kill counts as committed.
//! Ranges that a session unenrolls are removed from the record afterwards. After a kill in between it still names them,
//! so a reader compares it with the host.

use super::{Error, FailedUndo, JournalSize, MIN_APPENDED_BYTES_TO_REWRITE, Session};
use crate::action::Action;
use crate::resource::ResourceClass;
use crate::transaction::journal::{Journal, JournalChange, JournalEntry, StateDirectory};
use pagefold_base::{AddressRange, ProcessId};
use std::collections::BTreeMap;

/// Name of the file with the record, in the state directory.
pub const ENROLLMENTS_FILE: &str = "ksm.enrolled.json";

/// The record of enrollments.
#[derive(Default)]
pub(super) struct RecordedEnrollments {
    entries: Vec<JournalEntry>,
    size: JournalSize,
    /// Whether the file still names ranges that were unenrolled.
    is_file_outdated: bool,
}

impl RecordedEnrollments {
    /// Loads the record of a boot. Only sessions that may change KSM have one.
    pub fn load(directory: &StateDirectory, class: ResourceClass, boot: &str) -> Result<Self, Error> {
        if class != ResourceClass::Ksm {
            return Ok(Self::default());
        }
        let journal = Journal::load(directory, ENROLLMENTS_FILE)?.filter(|journal| journal.boot == boot);
        Ok(Self { entries: journal.map(|journal| journal.entries).unwrap_or_default(), ..Self::default() })
    }

    /// Whether an entry of a journal was committed already.
    pub fn contains(&self, entry: &JournalEntry) -> bool {
        entry.until_commit
            && self
                .entries
                .iter()
                .any(|recorded| recorded.undo == entry.undo && recorded.enclosing_extents == entry.enclosing_extents)
    }

    /// Removes ranges of a process.
    pub fn remove_ranges(&mut self, process: ProcessId, ranges: &[AddressRange]) {
        let removed = AddressRange::union(ranges.to_vec());
        self.replace_ranges(|owner| owner == process, |_, range| range.subtract(&removed));
    }

    /// Replaces each range of some processes by parts of it.
    fn replace_ranges(
        &mut self,
        is_concerned: impl Fn(ProcessId) -> bool,
        parts_of: impl Fn(ProcessId, AddressRange) -> Vec<AddressRange>,
    ) {
        self.entries.retain_mut(|entry| {
            let Some(process) = entry.undo.process().filter(|process| is_concerned(*process)) else { return true };
            let pairs = entry.undo.ranges().iter().copied().zip(entry.enclosing_extents.iter().copied());
            let parts =
                pairs.flat_map(|(range, extent)| parts_of(process, range).into_iter().map(move |part| (part, extent)));
            let (ranges, extents): (Vec<AddressRange>, Vec<AddressRange>) = parts.unzip();
            if ranges != entry.undo.ranges() {
                self.is_file_outdated = true;
                entry.undo = entry.undo.with_ranges(ranges);
                entry.enclosing_extents = extents;
            }
            !entry.undo.ranges().is_empty()
        });
    }
}

impl Session<'_> {
    /// At the next [`Self::commit`], stores the undo of its enrollments of ranges in the record, with these labels of
    /// processes.
    pub fn record_enrollments(&mut self, labels: BTreeMap<ProcessId, String>) {
        self.enrollment_labels = Some(labels);
    }

    /// The recorded enrollments: the undo of each, and its label as the purpose. Some may have been undone since by
    /// other means.
    pub fn recorded_enrollments(&self) -> &[JournalEntry] {
        &self.recorded.entries
    }

    /// Reduces the record to parts of its ranges: those of each process that are also in `kept`, which are ascending
    /// and disjoint.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub fn retain_recorded_enrollments(&mut self, kept: &BTreeMap<ProcessId, Vec<AddressRange>>) -> Result<(), Error> {
        let parts_of = |process, range: AddressRange| {
            let kept = kept.get(&process).map(Vec::as_slice).unwrap_or_default();
            let first = kept.partition_point(|kept| kept.end <= range.start);
            kept[first..].iter().map_while(|kept| kept.overlap(range)).collect()
        };
        self.recorded.replace_ranges(|_| true, parts_of);
        self.store_recorded_enrollments()
    }

    /// Removes ranges from the file that were unenrolled since it was written. The end of the session does so, too.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn store_recorded_enrollments(&mut self) -> Result<(), Error> {
        if self.recorded.is_file_outdated { self.rewrite_recorded_enrollments() } else { Ok(()) }
    }

    /// Unenrolls all recorded enrollments, as far as there is memory. Returns the undone actions and the failed ones.
    /// Failed ones that may succeed later are retried by the next session.
    ///
    /// # Errors
    /// If a journal cannot be used.
    pub fn undo_recorded_enrollments(&mut self) -> Result<(Vec<Action>, Vec<FailedUndo>), Error> {
        if self.recorded.entries.is_empty() {
            return Ok((Vec::new(), Vec::new()));
        }
        let recorded = std::mem::take(&mut self.recorded.entries);
        self.journal.entries.extend(recorded.into_iter().map(|entry| JournalEntry { purpose: None, ..entry }));
        // From here on this session undoes the entries, even after a kill.
        self.rewrite_journal()?;
        self.rewrite_recorded_enrollments()?;
        self.undo_entries()
    }

    /// Adds committed entries to the record.
    pub(super) fn add_recorded_enrollments(&mut self, mut entries: Vec<JournalEntry>) -> Result<(), Error> {
        let Some(labels) = self.enrollment_labels.take() else { return Ok(()) };
        entries.retain(|entry| !entry.undo.ranges().is_empty());
        for entry in &mut entries {
            entry.purpose = entry.undo.process().and_then(|process| labels.get(&process).cloned());
        }
        self.recorded.entries.extend(entries.iter().cloned());
        let JournalSize { rewritten_bytes, appended_bytes } = self.recorded.size;
        if self.recorded.is_file_outdated
            || rewritten_bytes == 0
            || appended_bytes > rewritten_bytes.max(MIN_APPENDED_BYTES_TO_REWRITE)
        {
            return self.rewrite_recorded_enrollments();
        }
        let changes: Vec<JournalChange> =
            entries.into_iter().map(|entry| JournalChange::Push(Box::new(entry))).collect();
        if changes.is_empty() {
            return Ok(());
        }
        match Journal::append(&self.directory, ENROLLMENTS_FILE, &changes) {
            Ok(bytes) => self.recorded.size.appended_bytes += bytes,
            // The file may end in a truncated line, after which nothing may be appended.
            Err(_) => self.rewrite_recorded_enrollments()?,
        }
        Ok(())
    }

    /// Rewrites the record, without processes that have ended.
    fn rewrite_recorded_enrollments(&mut self) -> Result<(), Error> {
        let mut entries = std::mem::take(&mut self.recorded.entries);
        entries.retain(|entry| entry.undo.process().is_some_and(|process| self.is_alive(process)));
        let record = Journal { boot: self.journal.boot.clone(), writer: self.journal.writer, purpose: None, entries };
        let stored = record.store(&self.directory, ENROLLMENTS_FILE);
        self.recorded.entries = record.entries;
        self.recorded.size = JournalSize::default();
        self.recorded.size.rewritten_bytes = stored?;
        self.recorded.is_file_outdated = false;
        Ok(())
    }
}
