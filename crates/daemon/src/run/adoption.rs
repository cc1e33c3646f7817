//! Reads what the record of enrollments and the host say about the previous daemon's processes.

use crate::decide::{ProcessMemory, RecordedProcess, SharingScope, StaleReason};
use pagefold_base::region::VmFlags;
use pagefold_base::{AddressRange, Bytes, ProcessId, Reading};
use pagefold_host::transaction::journal::JournalEntry;
use pagefold_host::transaction::session::Extents;
use pagefold_host::{Host, hold, observe};
use std::collections::{BTreeMap, BTreeSet};

/// The recorded processes, with their memory now.
pub(super) fn read_recorded_processes(host: &dyn Host, recorded: &[JournalEntry]) -> Vec<RecordedProcess> {
    let mut by_process: BTreeMap<ProcessId, Vec<&JournalEntry>> = BTreeMap::new();
    for entry in recorded {
        if let Some(process) = entry.undo.process() {
            by_process.entry(process).or_default().push(entry);
        }
    }
    let recorded_process = |(process, entries): (ProcessId, Vec<&JournalEntry>)| RecordedProcess {
        process,
        ranges: entries.iter().flat_map(|entry| entry.undo.ranges()).copied().collect(),
        scopes: entries.iter().map(|entry| SharingScope::from_label(entry.purpose.as_deref())).collect::<BTreeSet<_>>(),
        memory: read_memory(host, process, &entries),
    };
    by_process.into_iter().map(recorded_process).collect()
}

/// The memory of a process now, as far as it concerns these entries.
fn read_memory(host: &dyn Host, process: ProcessId, entries: &[&JournalEntry]) -> Reading<ProcessMemory> {
    let handle = hold(host, process)?;
    let extents = Extents::read(host, process)?;
    let regions = observe::regions(&*handle)?;
    let pairs = entries.iter().flat_map(|entry| entry.undo.ranges().iter().zip(&entry.enclosing_extents));
    let same_mapping = pairs.flat_map(|(range, extent)| {
        // A part of the range may have been unmapped.
        let first = regions.partition_point(|region| region.range.end <= range.start);
        let parts = regions[first..].iter().map_while(|region| region.range.overlap(*range));
        parts.filter(|part| extents.is_unchanged(*part, *extent)).collect::<Vec<_>>()
    });
    let same_mapping = same_mapping.collect();
    let enrolled = regions.iter().filter(|region| region.flags.has(VmFlags::MERGEABLE)).map(|region| region.range);
    Ok(ProcessMemory { same_mapping, enrolled: enrolled.collect() })
}

/// One line for each reason for which recorded ranges are not taken over.
pub(super) fn describe_dropped(stale: &[(ProcessId, StaleReason, Vec<AddressRange>)]) -> Vec<String> {
    let mut by_reason: BTreeMap<String, (BTreeSet<ProcessId>, Bytes)> = BTreeMap::new();
    for (process, why, ranges) in stale {
        let (processes, bytes) = by_reason.entry(why.to_string()).or_default();
        processes.insert(*process);
        bytes.0 += ranges.iter().map(|range| range.bytes().0).sum::<u64>();
    }
    let describe = |(why, (processes, bytes)): (String, (BTreeSet<ProcessId>, Bytes))| match processes.len() {
        1 => format!("{bytes} of one process: {why}"),
        count => format!("{bytes} of {count} processes: {why}"),
    };
    by_reason.into_iter().map(describe).collect()
}
