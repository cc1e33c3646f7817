//! Measures the working set of machines by DAMON, for plans that weight memory by its use.
//!
//! All machines are measured at the same time, each virtual node or whole machine by a kdamond of its own. It is all or
//! nothing: the hotness of a machine that is measured cannot be compared with that of one that is not.

use crate::apply::STOP_POLL_INTERVAL;
use crate::decide::working_set::{self, ResidentRange, WorkingSet};
use crate::map::{NumaMap, assign_regions};
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Absent, Bytes, ProcessId, Reading};
use pagefold_host::access_monitor::{self, AccessCounts, MonitorStep, MonitoredMemory};
use pagefold_host::action::{Action, ActionError};
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::{ChangeLifetime, Error, FailedUndo};
use pagefold_host::{Host, elapsed_since, hold, observe};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A machine to measure.
#[derive(Clone, Debug)]
pub struct MachineToMeasure {
    /// Its process.
    pub process: ProcessId,
    /// Its virtual nodes if each of them is a part of the plan; empty if the machine is planned as a whole.
    pub parts: Vec<VirtualNode>,
}

impl MachineToMeasure {
    /// The machines of a map, each with so many parts.
    pub fn all(map: &NumaMap, part_counts: impl Iterator<Item = usize>) -> Vec<Self> {
        let machine = |(placement, part_count): (&crate::map::ProcessPlacement, usize)| Self {
            process: placement.process.id,
            parts: match part_count {
                1 => Vec::new(),
                _ => placement.virtual_nodes.iter().map(|node| node.node.clone()).collect(),
            },
        };
        map.processes.iter().zip(part_counts).map(machine).collect()
    }
}

/// Why working sets were not measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// DAMON cannot be used, or a process has ended.
    #[error(transparent)]
    Unavailable(#[from] Error),
    /// The memory of a machine cannot be read.
    #[error("cannot read the memory of process {}", process.pid)]
    Unreadable {
        /// The machine.
        process: ProcessId,
        /// The reason.
        source: Absent,
    },
    /// DAMON has tested no page.
    #[error("DAMON took no sample in this time")]
    NoSample,
    /// The operator stopped it.
    #[error("interrupted")]
    Interrupted,
    /// Kdamonds remain.
    #[error("DAMON still monitors processes ({}): run `pagefold recover`", .0.iter().map(FailedUndo::to_string).collect::<Vec<_>>().join("; "))]
    NotStopped(Vec<FailedUndo>),
}

/// Measure the working sets of the parts of machines for a time. The session must be of the class
/// [`Settings`](pagefold_host::resource::ResourceClass::Settings). DAMON is off again afterwards.
///
/// # Errors
/// If one of the machines cannot be measured, or `stop` is set.
pub fn measure(
    session: &mut Session<'_>,
    machines: &[MachineToMeasure],
    duration: Duration,
    stop: &AtomicBool,
) -> Result<Vec<Vec<WorkingSet>>, MeasureError> {
    let mut parts: Vec<(usize, Vec<ResidentRange>)> = Vec::new();
    for (position, machine) in machines.iter().enumerate() {
        let ranges = ranges_of_parts(session.host(), machine)
            .map_err(|source| MeasureError::Unreadable { process: machine.process, source })?;
        parts.extend(ranges.into_iter().map(|ranges| (position, ranges)));
    }
    // DAMON refuses a target without ranges.
    let monitored = parts.iter().filter(|(_, ranges)| !ranges.is_empty()).map(|(position, ranges)| MonitoredMemory {
        process: machines[*position].process,
        ranges: ranges.iter().map(|memory| memory.range).collect(),
    });
    let counted = count_accesses(session, monitored.collect(), duration, stop);
    let failed = session.undo_all()?;
    if !failed.is_empty() {
        return Err(MeasureError::NotStopped(failed));
    }
    let mut counts = counted?.into_iter();
    let mut working_sets = vec![Vec::new(); machines.len()];
    for (position, ranges) in parts {
        let share = match ranges.is_empty() {
            true => 0.0,
            false => counts.next().and_then(AccessCounts::accessed_share).ok_or(MeasureError::NoSample)?,
        };
        working_sets[position].push(WorkingSet::new(&ranges, share));
    }
    Ok(working_sets)
}

fn count_accesses(
    session: &mut Session<'_>,
    memory: Vec<MonitoredMemory>,
    duration: Duration,
    stop: &AtomicBool,
) -> Result<Vec<AccessCounts>, MeasureError> {
    let host = session.host();
    let start = MonitorStep::Start(memory);
    let pids = start.pids();
    let count = pids.len();
    if count == 0 {
        return Ok(Vec::new());
    }
    session.apply(&Action::MonitorAccesses(start), ChangeLifetime::Temporary)?;
    let started = host.now();
    while elapsed_since(host, started) < duration {
        if stop.load(Ordering::Relaxed) {
            return Err(MeasureError::Interrupted);
        }
        host.sleep(duration.saturating_sub(elapsed_since(host, started)).min(STOP_POLL_INTERVAL));
    }
    // It has no undo.
    session.apply(&Action::MonitorAccesses(MonitorStep::UpdateCounts(pids)), ChangeLifetime::Permanent)?;
    access_monitor::read_access_counts(host, count).map_err(|why| Error::Refused(ActionError::from(why)).into())
}

/// The ranges to monitor of each part of a machine: of each virtual node, or of the whole machine. The first part has the
/// monitor's own memory, too.
fn ranges_of_parts(host: &dyn Host, machine: &MachineToMeasure) -> Reading<Vec<Vec<ResidentRange>>> {
    let handle = hold(host, machine.process)?;
    let regions = observe::regions(&*handle)?;
    let node_of_region = assign_regions(&machine.parts, &regions);
    let mut parts = vec![Vec::new(); machine.parts.len().max(1)];
    let is_device = |region: &&Region| region.flags.has(VmFlags::PFN_MAP.with(VmFlags::IO));
    for region in regions.iter().filter(|region| region.is_memory() && !is_device(region)) {
        let node = node_of_region.get(&region.range.start);
        let part = node.and_then(|id| machine.parts.iter().position(|part| part.id == *id)).unwrap_or(0);
        let resident: Bytes = region.rss + region.hugetlb;
        parts[part].push(ResidentRange { range: region.range, resident });
    }
    Ok(parts.iter().map(|regions| working_set::ranges_to_monitor(regions)).collect())
}

#[cfg(test)]
mod tests;
