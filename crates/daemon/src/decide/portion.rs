//! The processes of one census, as they are chosen.

use super::DaemonState;
use pagefold_base::units::ProcessId;
use std::collections::BTreeSet;

/// Chosen processes, and what they take.
pub(super) struct Portion<'s> {
    state: &'s DaemonState,
    /// The most urgent due process.
    first: ProcessId,
    /// Maximum number of processes.
    pub(super) max_processes: usize,
    /// The processes so far.
    pub(super) chosen: BTreeSet<ProcessId>,
    /// CPU seconds that must be available for scanning them.
    required_scan_seconds: f64,
    /// CPU seconds reserved for their halted merges.
    merge_seconds: f64,
    /// Memory that is scanned of them.
    scan_bytes: u64,
}

impl<'s> Portion<'s> {
    /// No processes.
    pub(super) fn new(state: &'s DaemonState, first: ProcessId, max_processes: usize) -> Self {
        let (chosen, required_scan_seconds, merge_seconds, scan_bytes) = (BTreeSet::new(), 0.0, 0.0, 0);
        Self { state, first, max_processes, chosen, required_scan_seconds, merge_seconds, scan_bytes }
    }

    /// Whether the index has room for these processes as well, and they are no second large partner.
    pub(super) fn has_room_for(&self, added: &[ProcessId]) -> bool {
        // A big host is scanned in portions of at least two processes.
        let count = self.chosen.len() + added.len();
        let is_within_index = count <= 2 || self.scan_bytes_with(added) <= self.state.max_census_bytes();
        let is_large_partner =
            |process: &&ProcessId| **process != self.first && self.state.is_large(&self.state.tracked[*process]);
        // Each census goes on with one large partner at most.
        let adds_none = added.iter().find(is_large_partner).is_none();
        let has_one_at_most = || self.chosen.iter().chain(added).filter(is_large_partner).count() <= 1;
        count <= self.max_processes && is_within_index && (adds_none || has_one_at_most())
    }

    /// Whether the CPU budget pays for these processes as well.
    pub(super) fn can_pay_for(&self, added: &[ProcessId]) -> bool {
        let (scan_seconds, merge_seconds) = self.cpu_seconds_with(added);
        // Only the first two may have a merge that takes more than the budget holds.
        let required_seconds = match self.chosen.len() + added.len() {
            ..=2 => self.state.required_cpu_seconds(scan_seconds, merge_seconds),
            _ => scan_seconds + merge_seconds,
        };
        required_seconds <= self.state.cpu_budget.available_seconds()
    }

    /// Add processes that are not chosen yet, whatever they take.
    pub(super) fn add(&mut self, added: &[ProcessId]) {
        (self.required_scan_seconds, self.merge_seconds) = self.cpu_seconds_with(added);
        self.scan_bytes = self.scan_bytes_with(added);
        self.chosen.extend(added);
    }

    /// Whether there is room and CPU time for one more process.
    pub(super) fn fits(&self, process: ProcessId) -> bool {
        self.has_room_for(&[process]) && self.can_pay_for(&[process])
    }

    /// Add a process that is not chosen yet, if it fits. Returns whether it does.
    pub(super) fn try_add(&mut self, process: ProcessId) -> bool {
        let fits = self.fits(process);
        if fits {
            self.add(&[process]);
        }
        fits
    }

    /// Memory that is scanned of all processes, with these ones.
    fn scan_bytes_with(&self, added: &[ProcessId]) -> u64 {
        let scan_bytes = |process: &ProcessId| self.state.part_bytes(&self.state.tracked[process]).0;
        self.scan_bytes + added.iter().map(scan_bytes).sum::<u64>()
    }

    /// CPU seconds that must be available for all scans, and those of the halted merges of all processes, with these ones.
    fn cpu_seconds_with(&self, added: &[ProcessId]) -> (f64, f64) {
        let scan_seconds = |process: &ProcessId| self.state.required_scan_seconds(process);
        let merge_seconds = |process: &ProcessId| self.state.reserved_merge_seconds(*process);
        (
            self.required_scan_seconds + added.iter().map(scan_seconds).sum::<f64>(),
            self.merge_seconds + added.iter().map(merge_seconds).sum::<f64>(),
        )
    }
}
