//! What a daemon passes on to the next one: when each process is scanned next, what its first merge was worth, and the
//! state of the CPU budget.
//!
//! The next daemon continues the schedule. Without it, a restart would scan all memory anew, and a process whose merge
//! was a net loss would be merged again. Contents are not passed on: the first scan of a process after a restart reads
//! all its pages, and a later one merges them.

use super::{DaemonRules, DaemonState, DecisionReason, ScanCause, TrackedProcess, UnenrollScope};
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use std::collections::BTreeMap;
use std::time::Duration;

/// What is passed on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PassedState {
    /// CPU seconds per MiB of a census.
    pub census_seconds_per_mib: f64,
    /// CPU seconds in the token bucket.
    pub available_cpu_seconds: f64,
    /// The scanned processes.
    pub processes: BTreeMap<ProcessId, PassedProcess>,
}

/// What is passed on of a process. Times count from when it is passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedProcess {
    /// Time since the start of the last scan.
    pub scan_age: Duration,
    /// Resident memory at the start of the last scan.
    pub resident_at_scan: Bytes,
    /// Its CPU time at the start of the last scan, if it is known.
    pub cpu_time_at_scan: Option<Duration>,
    /// Time until the next scan.
    pub next_scan_in: Duration,
    /// Interval after the next scan.
    pub scan_interval: Duration,
    /// Whether the last scan found nothing.
    pub found_nothing: bool,
    /// Whether its last merge saved less than predicted, or cost more than the limit.
    pub merge_unprofitable: bool,
    /// How long it is left alone because it refused to be enrolled or merging it was a net loss.
    pub refused_for: Option<Duration>,
    /// Net savings of its first merge; `None` if no merge of it has completed.
    pub net_savings: Option<NetBytes>,
    /// Why the ranges that the daemon enrolled are to be unenrolled, if that has not succeeded.
    pub pending_unenroll: Option<DecisionReason>,
}

impl PassedProcess {
    /// The same after some time.
    fn after(&self, elapsed: Duration) -> Self {
        Self {
            scan_age: self.scan_age + elapsed,
            next_scan_in: self.next_scan_in.saturating_sub(elapsed),
            refused_for: self.refused_for.map(|pause| pause.saturating_sub(elapsed)),
            ..self.clone()
        }
    }
}

impl DaemonState {
    /// What the next daemon needs. It includes processes of the previous daemon that have not arrived yet.
    pub fn passed_state(&self) -> PassedState {
        let passed = |(process, tracked): (&ProcessId, &TrackedProcess)| Some((*process, tracked.passed(self.now)?));
        let waiting = self
            .passed_processes
            .iter()
            .map(|(process, (passed, received_at))| (*process, passed.after(self.now.saturating_sub(*received_at))));
        PassedState {
            census_seconds_per_mib: self.census_seconds_per_mib,
            available_cpu_seconds: self.cpu_budget.available_seconds(),
            processes: waiting.chain(self.tracked.iter().filter_map(passed)).collect(),
        }
    }

    /// Continue after the previous daemon, which passed this on some time ago.
    pub(super) fn receive_passed_state(&mut self, passed: PassedState, elapsed: Duration) {
        self.census_seconds_per_mib = passed.census_seconds_per_mib;
        self.cpu_budget.continue_from(passed.available_cpu_seconds, elapsed);
        for (process, passed) in passed.processes {
            let passed = passed.after(elapsed);
            match self.tracked.get_mut(&process) {
                Some(tracked) => tracked.receive_passed(&passed, self.now, self.now, &self.rules),
                None => {
                    self.passed_processes.insert(process, (passed, self.now));
                }
            }
        }
    }
}

impl TrackedProcess {
    /// What the next daemon needs; `None` if it has not been scanned.
    fn passed(&self, now: Duration) -> Option<PassedProcess> {
        self.last_scan?;
        let pending = self.pending_unenroll.as_ref().map(|pending| pending.reason);
        let is_passed_on = |reason: &DecisionReason| {
            reason.unenroll_scope() == UnenrollScope::DaemonEnrolled && *reason != DecisionReason::Stopped
        };
        Some(PassedProcess {
            scan_age: now.saturating_sub(self.scan_started_at) + self.scan_age_at_start,
            resident_at_scan: self.resident_at_scan,
            cpu_time_at_scan: self.cpu_reading_at_scan.map(|(cpu_time, _)| cpu_time),
            next_scan_in: self.next_scan.saturating_sub(now),
            scan_interval: self.scan_interval,
            found_nothing: self.last_scan_found_nothing,
            merge_unprofitable: self.last_merge_unprofitable,
            refused_for: self.refused_until.map(|until| until.saturating_sub(now)),
            net_savings: self.net_known.then_some(self.net_savings),
            // The other reasons are found again: the configuration, the scope of the merge, the saved commands.
            pending_unenroll: pending.filter(is_passed_on),
        })
    }

    /// Continue with what the previous daemon passed on at `received_at`. The process does not count as new. It is not
    /// scanned before its memory and CPU time were read, since they show whether it has changed.
    pub(super) fn receive_passed(
        &mut self,
        passed: &PassedProcess,
        received_at: Duration,
        now: Duration,
        rules: &DaemonRules,
    ) {
        (self.last_scan, self.scan_started_at, self.resident_at_scan) =
            (Some(received_at), received_at, passed.resident_at_scan);
        self.scan_age_at_start = passed.scan_age;
        self.cpu_reading_at_scan = passed.cpu_time_at_scan.map(|cpu_time| (cpu_time, received_at));
        self.next_scan = (received_at + passed.next_scan_in).max(now + rules.debounce);
        (self.scan_interval, self.scan_cause) = (passed.scan_interval, ScanCause::Due);
        (self.last_scan_found_nothing, self.last_merge_unprofitable) =
            (passed.found_nothing, passed.merge_unprofitable);
        self.refused_until = passed.refused_for.map(|pause| received_at + pause);
        (self.net_known, self.net_savings) = (passed.net_savings.is_some(), passed.net_savings.unwrap_or(NetBytes(0)));
        self.is_new = false;
        if let Some(reason) = passed.pending_unenroll {
            self.request_unenroll(reason, now);
        }
    }
}
