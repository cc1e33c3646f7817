//! Choosing the next task.

use super::part_progress::{NextPart, PartSketches};
use super::portion::Portion;
use super::{
    CensusTask, DaemonMode, DaemonState, DaemonTask, DecisionKind, DecisionReason, Effect, NextStep, PartProgress,
    PendingUnenroll, ScanCause, ShutdownStage, TrackedProcess, UnenrollScope,
};
use pagefold_base::domain::TrustDomain;
use pagefold_base::units::{AddressRange, Bytes, Pages, ProcessId};
use pagefold_census::ScanPart;
use pagefold_census::decide::sketch::{ContentSketches, Sketch};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Maximum number of due processes for which a partner with common contents is sought.
const MAX_PARTNER_SEEKERS: usize = 8;

/// Share of a process's unmerged pages, and the least number of pages, that a partner must hold for an early joint
/// scan.
const MIN_LARGE_OVERLAP: (u64, Pages) = (16, Pages(256));

/// Size limit of a census's index: this many bytes, plus this part of all tracked memory (divisor). With the daemon's
/// other memory, including some 0.11 % for reused fingerprints, that stays below 32 MiB plus 0.2 % of tracked memory.
/// Foreign processes scanned beside them, and fingerprints of these, may exceed it.
const INDEX_BYTES_LIMIT: (u64, u64) = (16 << 20, 1200);

/// Bytes of memory per byte of its index while contents are grouped: at most 33 index bytes per page of 4 KiB.
const MEMORY_BYTES_PER_INDEX_BYTE: u64 = 124;

/// Share of the burst that the scan of one part may take: a part and a part of a partner fit together, each with
/// [`REQUIRED_SCAN_TIME_FACTOR`].
const MAX_PART_BURST_SHARE: f64 = 0.45;

/// Two parts are compared if their sketches tell this share of the savings that would pay for it: a sketch is an estimate.
const MIN_SKETCHED_SHARE: f64 = 0.5;

/// Base pages of a MiB.
const BASE_PAGES_PER_MIB: f64 = 256.0;

/// Smallest part. Its fixed cost is that of listing regions and processes.
const MIN_PART_BYTES: u64 = 16 << 20;

/// Margin of a part over an equal share of its process, so that growth between two readings leaves no small rest.
const PART_MARGIN_DIVISOR: u64 = 16;

/// CPU time that must be available for a scan, as a multiple of the predicted time: a scan that uses up the budget is
/// halted and has found nothing.
const REQUIRED_SCAN_TIME_FACTOR: f64 = 1.1;

const _: () = assert!(2.0 * MAX_PART_BURST_SHARE * REQUIRED_SCAN_TIME_FACTOR <= 1.0, "two parts fit into the burst");

/// How long a due process waits before it precedes all others: a multiple of the time in which the CPU rate pays for a
/// scan of all processes, and seconds at least.
const MAX_WAIT: (f64, f64) = (2.0, 60.0);

/// Share of the burst that may be reserved for a halted merge: other processes need scans, too.
const MAX_RESERVED_BURST_SHARE: f64 = 0.75;

/// Share of the burst that must be available to scan some of the due processes while it cannot pay for all of them, unless
/// memory is short: one census of many processes finds more than several of a few.
const MIN_SCARCE_BURST_SHARE: f64 = 0.75;

/// How long CPU time is reserved for a halted merge: a multiple of the time that refills the burst, and seconds at
/// least.
const MERGE_RESERVATION_TIMEOUT: (f64, f64) = (2.0, 60.0);

/// Share of its scan interval by which a process is scanned early if another scan is due.
const EARLY_SCAN_INTERVAL_SHARE: f64 = 0.25;

impl DaemonState {
    /// Start the next task, if none runs and there is one.
    pub(super) fn begin(&mut self, effects: &mut Vec<Effect>) {
        if self.task.is_some() {
            return;
        }
        if let Some(stage) = self.shutdown_stage {
            return self.shut_down(stage, effects);
        }
        match (self.may_act(), self.host_acquired) {
            (false, true) => {
                let must_yield = !self.paused && self.yield_reason().is_some();
                let reason = if must_yield { DecisionReason::OtherWriter } else { DecisionReason::Operator };
                effects.push(self.report_decision(
                    DecisionKind::Restore,
                    &[],
                    reason,
                    "KSM's settings are restored, and merged pages stay merged",
                ));
                return self.start_task(DaemonTask::RestoreSettings, Effect::RestoreSettings, effects);
            }
            (true, false) if self.now >= self.acquire_host_after => {
                return self.start_task(DaemonTask::AcquireHost, Effect::AcquireHost, effects);
            }
            (true, false) => return,
            _ => {}
        }
        if self.paused || self.rules.mode == DaemonMode::Observe || self.yield_reason().is_some() {
            return;
        }
        if self.host_acquired && !self.is_host_memory_short() {
            // After a failure for lack of memory, the next try measures memory again; the CPU budget pays for it as for
            // all scans.
            let may_retry = |pending: &PendingUnenroll| {
                pending.next_try <= self.now
                    && (pending.last_failure.is_none() || self.cpu_budget.available_seconds() > 0.0)
            };
            let to_unenroll = self.processes_where(|tracked| {
                tracked.pending_unenroll.as_ref().is_some_and(may_retry) && !tracked.is_cgroup_memory_short(&self.rules)
            });
            if !to_unenroll.is_empty() {
                return self.report_and_unenroll(to_unenroll, effects);
            }
        }
        if self.host_acquired
            && self.now >= self.merged_check.0
            && self.tracked.values().any(|tracked| tracked.enrolled)
        {
            return self.start_task(
                DaemonTask::CheckMerged,
                Effect::CheckMerged { unenroll: !self.is_host_memory_short() },
                effects,
            );
        }
        if self.time_of_day.is_some_and(|time| self.rules.quiet_hours.iter().any(|hours| hours.contains(time))) {
            return self.report_pause(DecisionReason::QuietHours, "these are quiet hours", effects);
        }
        // Until ksmd visits exited processes, the kernel counts their pages as merged and keeps their metadata.
        if self.host_acquired
            && self.sweep_at.is_some_and(|at| at <= self.now)
            && self.cpu_budget.available_seconds() > 0.0
        {
            self.sweep_at = None;
            return self.start_task(DaemonTask::Sweep, Effect::Sweep, effects);
        }
        let is_available = |keep: Bytes| self.available.is_some_and(|available| available >= keep);
        let at_goal = self.rules.keep_available.is_some_and(is_available);
        let is_paused = (at_goal || self.now < self.slowdown.paused_until()) && !self.is_host_memory_short();
        self.drop_lost_partners();
        let due = self.due_processes(is_paused);
        if is_paused && due.is_empty() {
            if at_goal {
                return self.report_pause(DecisionReason::MemoryGoal, "available memory is above the goal", effects);
            }
            self.reported_pause = Some(DecisionReason::Slowdown);
            return;
        }
        let reported_before = self.reported_pause;
        self.begin_census(due, effects);
        // All other processes stay paused.
        self.reported_pause = self.reported_pause.or(reported_before.filter(|_| is_paused));
    }

    /// Shut down: unenroll what is enrolled, where requested and allowed, and restore KSM's settings.
    fn shut_down(&mut self, stage: ShutdownStage, effects: &mut Vec<Effect>) {
        let mut merged = self.processes_where(|tracked| tracked.enrolled || tracked.pending_unenroll.is_some());
        merged.extend(self.adopt_on_arrival.keys());
        let may_be_merged = !merged.is_empty() || !self.adoption_known;
        if stage == ShutdownStage::UnmergePending && may_be_merged {
            if self.host_acquired && !merged.is_empty() {
                self.shutdown_stage = Some(ShutdownStage::UnmergeTried);
                self.request_unenroll(&merged, DecisionReason::Stopped);
                effects.push(self.report_decision(
                    DecisionKind::Unenroll,
                    &merged,
                    DecisionReason::Stopped,
                    DecisionReason::Stopped.unenroll_explanation(),
                ));
                return self.start_unenroll(merged, effects);
            }
            // A stop with unmerging unmerges pages even while the daemon is paused.
            if !self.host_acquired && self.may_acquire_host() {
                return self.start_task(DaemonTask::AcquireHost, Effect::AcquireHost, effects);
            }
        }
        if self.host_acquired {
            return self.start_task(DaemonTask::RestoreSettings, Effect::RestoreSettings, effects);
        }
        // Merged pages may stay merged, except those of processes that were to be unenrolled before.
        let is_unenroll_pending = |tracked: &TrackedProcess| tracked.pending_unenroll.is_some();
        let still_merged =
            if stage == ShutdownStage::KeepMerged { self.processes_where(is_unenroll_pending) } else { merged };
        let default_reason = self
            .yield_reason()
            .or_else(|| self.inaction_reason())
            .unwrap_or_else(|| "there was no time for it".to_owned());
        for process in &still_merged {
            let pending = self.tracked.get(process).and_then(|tracked| tracked.pending_unenroll.as_ref());
            let why = pending.and_then(|pending| pending.last_failure.as_ref()).unwrap_or(&default_reason);
            let why = format!("it stays merged: {why}");
            effects.push(self.report_decision(DecisionKind::Refuse, &[*process], DecisionReason::Stopped, why));
        }
        self.ended = true;
        effects.push(Effect::End { complete: self.settings_restored && still_merged.is_empty() });
    }

    /// The tracked processes that satisfy `predicate`.
    pub(super) fn processes_where(&self, predicate: impl Fn(&TrackedProcess) -> bool) -> Vec<ProcessId> {
        self.tracked.iter().filter(|(_, tracked)| predicate(tracked)).map(|(process, _)| *process).collect()
    }

    fn report_and_unenroll(&mut self, processes: Vec<ProcessId>, effects: &mut Vec<Effect>) {
        for &process in &processes {
            // Repeated tries were reported before.
            let first_attempt =
                self.tracked[&process].pending_unenroll.as_ref().filter(|pending| pending.last_failure.is_none());
            if let Some(reason) = first_attempt.map(|pending| pending.reason) {
                effects.push(self.report_decision(
                    DecisionKind::Unenroll,
                    &[process],
                    reason,
                    reason.unenroll_explanation(),
                ));
            }
        }
        self.start_unenroll(processes, effects);
    }

    fn start_unenroll(&mut self, processes: Vec<ProcessId>, effects: &mut Vec<Effect>) {
        let scope = |process| {
            let pending = self.tracked.get(process).and_then(|tracked| tracked.pending_unenroll.as_ref());
            pending.map_or(UnenrollScope::DaemonEnrolled, PendingUnenroll::scope)
        };
        let scopes: BTreeMap<_, _> = processes.iter().map(|process| (*process, scope(process))).collect();
        self.start_task(DaemonTask::Unenroll(scopes.clone()), Effect::Unenroll(scopes), effects);
    }

    /// Report once why nothing is done.
    fn report_pause(&mut self, reason: DecisionReason, why: &str, effects: &mut Vec<Effect>) {
        if self.reported_pause != Some(reason) {
            self.reported_pause = Some(reason);
            effects.push(self.report_decision(DecisionKind::Idle, &[], reason, why));
        }
    }

    /// The most resident memory that a census may cover, so that its index stays within the limit.
    pub(super) fn max_census_bytes(&self) -> u64 {
        (INDEX_BYTES_LIMIT.0 + self.tracked_bytes / INDEX_BYTES_LIMIT.1) * MEMORY_BYTES_PER_INDEX_BYTE
    }

    /// The largest part of a process: a census covers two of them, by CPU time and by the size of its index.
    fn max_part_bytes(&self, tracked: &TrackedProcess) -> u64 {
        let seconds_per_byte = self.census_seconds_per_mib * tracked.scan_cost_factor() / 1048576.0;
        // The cast saturates.
        let affordable = (self.cpu_budget.burst_seconds() * MAX_PART_BURST_SHARE / seconds_per_byte) as u64;
        affordable.min(self.max_census_bytes() / 2).max(MIN_PART_BYTES)
    }

    /// In how many parts a process is scanned. All but the last one are of equal size.
    pub(super) fn part_count(&self, tracked: &TrackedProcess) -> u64 {
        let max_bytes = self.max_part_bytes(tracked);
        if tracked.resident.0 <= max_bytes { 1 } else { with_part_margin(tracked.resident.0).div_ceil(max_bytes) }
    }

    /// The most resident memory of the next part of a process.
    pub(super) fn part_bytes(&self, tracked: &TrackedProcess) -> Bytes {
        match self.part_count(tracked) {
            1 => tracked.resident,
            count => Bytes(with_part_margin(tracked.resident.0).div_ceil(count)),
        }
    }

    /// Whether a process takes several parts, or is between two of them.
    pub(super) fn is_large(&self, tracked: &TrackedProcess) -> bool {
        self.part_count(tracked) > 1 || tracked.progress.part() != ScanPart::WHOLE.range
    }

    /// Predicted CPU seconds of scanning the next part of a process. Two parts are always within the burst; a scan that
    /// takes longer is halted, and the next part is smaller.
    pub(super) fn scan_cpu_seconds(&self, tracked: &TrackedProcess) -> f64 {
        let mib = self.part_bytes(tracked).0 as f64 / 1048576.0;
        (mib * self.census_seconds_per_mib * tracked.scan_cost_factor())
            .min(self.cpu_budget.burst_seconds() * MAX_PART_BURST_SHARE)
    }

    /// CPU seconds that must be available for scanning the next part of a process.
    pub(super) fn required_scan_seconds(&self, process: &ProcessId) -> f64 {
        self.scan_cpu_seconds(&self.tracked[process]) * REQUIRED_SCAN_TIME_FACTOR
    }

    /// How long a due process waits at most before it precedes all others.
    pub fn max_wait(&self) -> Duration {
        let scan_seconds = self.tracked_bytes as f64 / 1048576.0 * self.census_seconds_per_mib;
        let seconds = (scan_seconds / self.rules.cpu_rate * MAX_WAIT.0).max(MAX_WAIT.1);
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// How long the processes that are not scanned now have been due for their next scan: the longest time.
    pub fn longest_wait(&self) -> Duration {
        let being_scanned = self.census_processes();
        let waiting =
            self.tracked.iter().filter(|(id, tracked)| tracked.may_be_scanned() && !being_scanned.contains(id));
        waiting.map(|(_, tracked)| self.now.saturating_sub(tracked.next_scan)).max().unwrap_or_default()
    }

    /// The processes that a running census scans.
    fn census_processes(&self) -> &[ProcessId] {
        match &self.task {
            Some(DaemonTask::Census(task)) => &task.processes,
            _ => &[],
        }
    }

    /// Whether a process precedes all others: an operator asks for it, or it has waited too long.
    fn is_urgent(&self, tracked: &TrackedProcess) -> bool {
        tracked.scan_cause == ScanCause::Operator || self.now.saturating_sub(tracked.next_scan) >= self.max_wait()
    }

    /// Go on without partners that have exited, may not be scanned any more, or are in another trust domain now.
    fn drop_lost_partners(&mut self) {
        let is_lost = |(process, tracked): (&ProcessId, &TrackedProcess)| {
            let (partner, _) = tracked.progress.partner()?;
            let partner_state = self.tracked.get(&partner).filter(|partner| partner.may_be_scanned());
            partner_state.is_none_or(|partner| !self.may_share(partner, tracked)).then_some(*process)
        };
        let seekers: Vec<ProcessId> = self.tracked.iter().filter_map(is_lost).collect();
        for process in seekers {
            let step =
                self.update_progress(process, |progress, _, next_part| progress.drop_partner(process, next_part));
            if let Some(step) = step {
                self.follow_step(process, step, self.max_scan_interval());
            }
        }
    }

    /// Update the progress of a process's scan by a function of the progress, whether it is the first scan, and the next
    /// part that is worth a comparison.
    pub(super) fn update_progress(
        &mut self,
        process: ProcessId,
        update: impl FnOnce(&mut PartProgress, bool, NextPart<'_>) -> NextStep,
    ) -> Option<NextStep> {
        let tracked = self.tracked.get_mut(&process)?;
        let (mut progress, is_first_scan) = (std::mem::take(&mut tracked.progress), tracked.is_unscanned());
        let step = update(&mut progress, is_first_scan, &|sketches, other, from| {
            self.next_part_to_compare((process, sketches), other, from)
        });
        self.tracked.get_mut(&process)?.progress = progress;
        Some(step)
    }

    /// Where the next part of `other` at or behind an address begins that is worth a comparison with a part of a process
    /// that has these sketches. Where a part has no sketch, that is not known, and it is compared.
    pub(super) fn next_part_to_compare(
        &self,
        (process, sketches): (ProcessId, Option<&ContentSketches>),
        other: ProcessId,
        from: u64,
    ) -> Option<u64> {
        let (tracked, partner) = (self.tracked.get(&process)?, self.tracked.get(&other)?);
        let sketched_end = partner.part_sketches.last().map_or(0, |part| part.range.end);
        let Some(sketches) = sketches.filter(|_| from < sketched_end) else { return Some(from) };
        let cpu_seconds = self.scan_cpu_seconds(tracked) + self.scan_cpu_seconds(partner);
        let paying_mib = cpu_seconds / self.rules.max_cpu_seconds_per_mib;
        let is_worth = |part: &PartSketches| {
            // The pages of either may merge with pages of the other that are merged already.
            let (own, others) = (sketches, &part.sketches);
            let shared = own.unmerged.shared(&others.all).max(own.all.shared(&others.unmerged));
            let shared_mib = shared.0 as f64 / BASE_PAGES_PER_MIB;
            self.is_memory_short_for(&[process]) || shared_mib >= paying_mib * MIN_SKETCHED_SHARE
        };
        let behind = partner.part_sketches.iter().filter(|part| part.range.end > from);
        behind.into_iter().find(|part| is_worth(part)).map(|part| part.range.start.max(from))
    }

    /// The parts of the chosen processes that a census scans next.
    pub(super) fn parts_to_scan(
        &self,
        due: &[ProcessId],
        chosen: &BTreeSet<ProcessId>,
    ) -> BTreeMap<ProcessId, Vec<ScanPart>> {
        let partner = due.first().and_then(|first| self.tracked[first].progress.partner());
        let part_from = |tracked: &TrackedProcess, range: AddressRange| {
            let is_whole = self.part_count(tracked) == 1;
            ScanPart { range, max_bytes: if is_whole { Bytes(u64::MAX) } else { self.part_bytes(tracked) } }
        };
        let parts = |process: &ProcessId| {
            let tracked = &self.tracked[process];
            let own = due.contains(process).then(|| tracked.progress.part());
            let compared = partner.filter(|(partner, _)| partner == process).map(|(_, start)| start);
            let compared = compared.or(own.is_none().then_some(0));
            let other = compared.map(|start| AddressRange { start, end: ScanPart::WHOLE.range.end });
            (*process, own.into_iter().chain(other).map(|range| part_from(tracked, range)).collect())
        };
        chosen.iter().map(parts).collect()
    }

    /// CPU seconds reserved for the halted merge of a process. None if memory is short, or if other processes have used
    /// them up for longer than [`MERGE_RESERVATION_TIMEOUT`].
    pub(super) fn reserved_merge_seconds(&self, process: ProcessId) -> f64 {
        let tracked = &self.tracked[&process];
        let timeout = (self.cpu_budget.burst_seconds() / self.rules.cpu_rate * MERGE_RESERVATION_TIMEOUT.0)
            .max(MERGE_RESERVATION_TIMEOUT.1);
        // A process that is not due is a partner of another one.
        let due_at = if tracked.next_scan <= self.now { tracked.next_scan } else { Duration::ZERO };
        let elapsed = self.now.saturating_sub(due_at.max(tracked.merge_halted_at)).as_secs_f64();
        if elapsed < timeout && !self.is_memory_short_for(&[process]) { tracked.reserved_merge_seconds } else { 0.0 }
    }

    /// CPU seconds that must be available before a scan. They include the reserves for halted merges, because the scan
    /// would use these up each time. The sum is limited to most of the burst, unless the scan alone takes more.
    pub(super) fn required_cpu_seconds(&self, scan_seconds: f64, merge_seconds: f64) -> f64 {
        (scan_seconds + merge_seconds).min(scan_seconds.max(self.cpu_budget.burst_seconds() * MAX_RESERVED_BURST_SHARE))
    }

    /// Take a census of the due processes, as far as CPU time allows.
    fn begin_census(&mut self, due: Vec<ProcessId>, effects: &mut Vec<Effect>) {
        if due.is_empty() {
            self.reported_pause = None;
            return;
        }
        let Some(mut chosen) = self.choose_affordable(&due) else {
            return self.report_pause(DecisionReason::Budget, "the CPU budget does not suffice for now", effects);
        };
        self.reported_pause = None;
        let mut due_chosen: Vec<ProcessId> = due.into_iter().filter(|process| chosen.contains(process)).collect();
        if chosen.iter().any(|process| self.is_large(&self.tracked[process])) {
            // A part is scanned beside processes only with which it may share pages.
            let is_beside = |process: &ProcessId| self.may_share(&self.tracked[process], &self.tracked[&due_chosen[0]]);
            chosen.retain(is_beside);
            due_chosen.retain(|process| chosen.contains(process));
        }
        let progress = &self.tracked[&due_chosen[0]].progress;
        let partner = progress.partner().map(|(partner, _)| partner);
        let is_large_partner =
            |process: &&ProcessId| !due_chosen.contains(process) && self.is_large(&self.tracked[process]);
        let partner = partner.or_else(|| chosen.iter().find(is_large_partner).copied());
        let (is_next_part, is_next_partner) = (!progress.is_at_start(), progress.partner().is_some());
        let cause = self.tracked[&due_chosen[0]].scan_cause;
        let why = match cause {
            _ if is_next_partner => "a part of it is compared with another part",
            _ if is_next_part => "the next part of its memory",
            ScanCause::Operator => "an operator asks for it",
            ScanCause::Arrived => "new process",
            ScanCause::Grown => "it has grown or used CPU time since the last scan",
            ScanCause::Due if self.tracked[&due_chosen[0]].scan_interval <= self.rules.min_scan_interval => {
                "its contents may be stable by now"
            }
            ScanCause::Due => "not scanned for long",
        };
        effects.push(self.report_decision(DecisionKind::Census, &due_chosen, cause.into(), why));
        let parts = self.parts_to_scan(&due_chosen, &chosen);
        for process in &due_chosen {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.begin_scan(self.now);
            }
        }
        let task = CensusTask { due: due_chosen, processes: chosen.into_iter().collect(), partner };
        self.start_task(DaemonTask::Census(task), Effect::Census(parts), effects);
    }

    /// The due processes in order of priority. With `only_short`, only processes that are short of memory in their
    /// cgroup.
    fn due_processes(&self, only_short: bool) -> Vec<ProcessId> {
        let due_within = |early_share: f64| -> Vec<(ScanCause, Duration, u64, ProcessId)> {
            let is_due = |(_, tracked): &(&ProcessId, &TrackedProcess)| {
                // A process with a long backoff may hold the duplicates that are needed when memory is short.
                let is_short = tracked.is_cgroup_memory_short(&self.rules);
                let early_share = match tracked.progress.is_at_start() {
                    // A part is repeated only once its contents can be stable.
                    false => 0.0,
                    true if is_short || self.is_host_memory_short() => 0.75,
                    true => early_share,
                };
                (is_short || !only_short)
                    && tracked.may_be_scanned()
                    && tracked.next_scan.saturating_sub(tracked.scan_interval.mul_f64(early_share)) <= self.now
            };
            let due = self.tracked.iter().filter(is_due);
            // Of processes that arrived together, the first one differs from scan to scan.
            due.map(|(process, tracked)| (tracked.scan_cause, tracked.next_scan, self.random_u64(*process), *process))
                .collect()
        };
        if due_within(0.0).is_empty() {
            return Vec::new();
        }
        // One census of several processes costs less than several censuses.
        let mut due = due_within(EARLY_SCAN_INTERVAL_SHARE);
        due.sort_unstable();
        let mut due: Vec<ProcessId> = due.into_iter().map(|(.., process)| process).collect();
        let tracked = |process: &ProcessId| &self.tracked[process];
        if self.is_cpu_time_scarce(&due) {
            // Where CPU time is scarce, first scans of ever more new processes would leave none for merging. Known
            // processes wait for both.
            due.sort_by_cached_key(|process| tracked(process).scan_order(&self.rules));
        } else {
            due.sort_by_cached_key(|process| !tracked(process).is_unscanned());
        }
        // If the census cannot take all, similar processes are scanned together: different ones have little in common.
        let mut positions: BTreeMap<_, usize> = BTreeMap::new();
        for (position, process) in due.iter().enumerate() {
            positions.entry(self.similarity_class(process)).or_insert(position);
        }
        due.sort_by_cached_key(|process| positions[&self.similarity_class(process)]);
        due.sort_by_cached_key(|process| {
            (tracked(process).overruns, !tracked(process).is_cgroup_memory_short(&self.rules))
        });
        if tracked(&due[0]).overruns == 0 {
            due.retain(|process| tracked(process).overruns == 0 || self.is_urgent(tracked(process)));
        }
        // Urgent processes precede all others, whatever their priority.
        due.sort_by_cached_key(|process| match self.is_urgent(tracked(process)) {
            true => (false, tracked(process).scan_cause != ScanCause::Operator, tracked(process).next_scan),
            false => (true, true, Duration::ZERO),
        });
        // First scans of new processes only record their pages. Known processes do not wait for them and are not mixed
        // with them.
        let is_first_scan = tracked(&due[0]).is_unscanned();
        due.retain(|process| tracked(process).is_unscanned() == is_first_scan);
        // A large process is scanned part by part, each in a census of its own. All others go on with the same partner.
        let (first, partner) = (due[0], tracked(&due[0]).progress.partner());
        if self.is_large(tracked(&first)) {
            due.truncate(1);
        } else {
            due.retain(|process| !self.is_large(tracked(process)) && tracked(process).progress.partner() == partner);
        }
        due
    }

    /// The due processes and their partners that the CPU budget can pay for now; `None` to wait for more.
    pub(super) fn choose_affordable(&self, due: &[ProcessId]) -> Option<BTreeSet<ProcessId>> {
        let first = *due.first()?;
        let required_seconds = |process: &ProcessId| {
            self.required_cpu_seconds(self.required_scan_seconds(process), self.reserved_merge_seconds(*process))
        };
        if !due.iter().any(|process| required_seconds(process) <= self.cpu_budget.available_seconds()) {
            return None;
        }
        // The others are only near the time of their next scan.
        let now_due: Vec<ProcessId> =
            due.iter().copied().filter(|process| self.tracked[process].next_scan <= self.now).collect();
        if !self.is_memory_short_for(&[first])
            && self.tracked[&first].scan_cause != ScanCause::Operator
            && self.is_cpu_time_scarce(&now_due)
            && self.cpu_budget.available_seconds() < self.cpu_budget.burst_seconds() * MIN_SCARCE_BURST_SHARE
        {
            return None;
        }
        // Cheaper processes would use up what it waits for.
        if self.is_urgent(&self.tracked[&first]) && required_seconds(&first) > self.cpu_budget.available_seconds() {
            return None;
        }
        if let Some((partner, _)) = self.tracked[&first].progress.partner() {
            return self.choose_with_partner(due, partner);
        }
        if self.is_large(&self.tracked[&first]) && self.tracked[&first].is_unscanned() {
            return Some(BTreeSet::from([first]));
        }
        self.choose_portion(due)
    }

    /// As many due processes and partners of them as the CPU budget and the index have room for. A large process is the
    /// only due one.
    fn choose_portion(&self, due: &[ProcessId]) -> Option<BTreeSet<ProcessId>> {
        let first = *due.first()?;
        // A process whose scan exceeded the budget is scanned with one partner only, to find out which of them is
        // expensive.
        let one_partner_only = self.tracked[&first].overruns > 0;
        let mut portion = Portion::new(self, first, if one_partner_only { 1 } else { usize::MAX });
        // First scans only record pages.
        let seeks_companions = !one_partner_only && !self.tracked[&first].is_unscanned();
        // `waiting` are due processes that are scanned with their companions later.
        let (mut due_chosen, mut waiting, mut companion_count) = (Vec::new(), BTreeSet::new(), 0);
        let is_scarce = self.is_cpu_time_scarce(due);
        for same_class in due.chunk_by(|a, b| self.similarity_class(a) == self.similarity_class(b)) {
            let earlier = due_chosen.len();
            for process in self.order_by_shared_content(same_class, is_scarce) {
                let is_chosen = portion.chosen.contains(&process);
                if !(is_chosen || portion.fits(process)) {
                    continue;
                }
                let added: Vec<ProcessId> = (!is_chosen).then_some(process).into_iter().collect();
                // Add the process with the most common contents before others fill the portion.
                let companion = (seeks_companions && companion_count < MAX_PARTNER_SEEKERS)
                    .then(|| self.choose_companion(process, &portion.chosen))
                    .flatten()
                    .filter(|(_, has_many_pages)| *has_many_pages);
                let pair = companion.map(|(companion, _)| [&added[..], &[companion]].concat());
                match pair.filter(|pair| portion.has_room_for(pair)) {
                    Some(pair) if portion.can_pay_for(&pair) => {
                        portion.add(&pair);
                        companion_count += 1;
                    }
                    // Beside others its scan would find little, and cheaper processes would use up what both need.
                    Some(_) if process == first => return None,
                    Some(_) if !is_chosen => {
                        waiting.insert(process);
                        continue;
                    }
                    _ => portion.add(&added),
                }
                due_chosen.push(process);
            }
            // A single process gets a similar partner.
            if let [single] = due_chosen[earlier..]
                && portion
                    .chosen
                    .iter()
                    .all(|other| *other == single || self.similarity_class(other) != self.similarity_class(&single))
                && let Some((companion, _)) = self.choose_companion(single, &portion.chosen)
                && !waiting.contains(&companion)
            {
                portion.try_add(companion);
            }
        }
        due_chosen.first()?;
        let is_single = portion.chosen.len() == 1;
        let mut partners = self.choose_partners(&due_chosen, &portion.chosen, &waiting);
        // Take the most similar partner, even if its cost must be awaited: a cheaper one may have nothing in common.
        partners.truncate(if one_partner_only { 1 } else { usize::MAX });
        portion.max_processes = portion.max_processes.saturating_add(1);
        let added = partners.iter().filter(|partner| portion.try_add(**partner)).count();
        // A scan without a partner finds little: wait until the CPU budget can pay for one.
        let must_wait = is_single && added == 0 && !partners.is_empty();
        (!must_wait).then_some(portion.chosen)
    }

    /// The due processes that go on with the same partner, and this partner. One of the due processes may be the partner
    /// itself.
    fn choose_with_partner(&self, due: &[ProcessId], partner: ProcessId) -> Option<BTreeSet<ProcessId>> {
        let cost =
            |process: &ProcessId| (self.required_scan_seconds(process), self.part_bytes(&self.tracked[process]).0);
        let (mut chosen, (mut seconds, mut bytes)) = (BTreeSet::from([partner]), cost(&partner));
        let mut has_due = false;
        for process in due {
            let (added_seconds, added_bytes) = cost(process);
            let fits = seconds + added_seconds <= self.cpu_budget.available_seconds()
                && (!has_due || bytes + added_bytes <= self.max_census_bytes());
            if fits {
                chosen.insert(*process);
                (seconds, bytes, has_due) = (seconds + added_seconds, bytes + added_bytes, true);
            }
        }
        has_due.then_some(chosen)
    }

    /// Whether the CPU budget cannot pay for scanning all of these processes now.
    fn is_cpu_time_scarce(&self, due: &[ProcessId]) -> bool {
        due.iter().map(|process| self.required_scan_seconds(process)).sum::<f64>() > self.cpu_budget.available_seconds()
    }

    /// Processes of one class are likely to share pages: they have the same similarity key, and one sharing domain.
    fn similarity_class(&self, process: &ProcessId) -> (Option<&TrustDomain>, &str) {
        let tracked = &self.tracked[process];
        (self.sharing_domain(tracked), &tracked.similarity_key)
    }

    /// The trust domain with which a process may share pages; `None` for all domains.
    fn sharing_domain<'p>(&self, tracked: &'p TrackedProcess) -> Option<&'p TrustDomain> {
        (!self.rules.across_domains).then_some(&tracked.domain)
    }

    /// Whether two processes may share pages.
    fn may_share(&self, one: &TrackedProcess, other: &TrackedProcess) -> bool {
        self.sharing_domain(one) == self.sharing_domain(other)
    }

    /// Orders the processes of one class. The first stays first; the others are sorted by urgency, then by how much
    /// they have in common with it.
    fn order_by_shared_content(&self, processes: &[ProcessId], is_scarce: bool) -> Vec<ProcessId> {
        let mut ordered = processes.to_vec();
        if let [first, others @ ..] = &mut ordered[..] {
            let sought = self.unmatched_contents(&[*first], &BTreeSet::new());
            others.sort_by_cached_key(|process| {
                let tracked = &self.tracked[process];
                let urgency = if is_scarce { tracked.scan_order(&self.rules) } else { 0 };
                (
                    !tracked.is_cgroup_memory_short(&self.rules),
                    tracked.overruns,
                    urgency,
                    Reverse(self.overlap_level(&sought, process)),
                )
            });
        }
        ordered
    }

    /// The unmerged contents of some processes, each without the contents of partners in the same scan. Limited to the
    /// first few processes with any such contents.
    fn unmatched_contents(&self, processes: &[ProcessId], scanned: &BTreeSet<ProcessId>) -> Vec<Sketch> {
        processes
            .iter()
            .map(|process| self.unmatched_content(process, scanned))
            .filter(|unmatched| !unmatched.is_empty())
            .take(MAX_PARTNER_SEEKERS)
            .collect()
    }

    /// The unmerged contents of one process, without the contents of partners in the same scan.
    fn unmatched_content(&self, process: &ProcessId, scanned: &BTreeSet<ProcessId>) -> Sketch {
        let Some(tracked) = self.tracked.get(process) else { return Sketch::default() };
        let Some(sketches) = &tracked.sketches else { return Sketch::default() };
        let scanned = scanned.iter().filter(|other| *other != process).filter_map(|other| self.tracked.get(other));
        let scanned =
            scanned.filter(|other| self.may_share(other, tracked)).filter_map(|other| other.sketches.as_ref());
        scanned.fold(sketches.unmerged.clone(), |unmatched, other| unmatched.without(&other.all))
    }

    /// How many of the sought pages a process holds, by its sketch: 0 for none, and one more for each doubling. A
    /// sketch is no more precise.
    fn overlap_level(&self, sought: &[Sketch], process: &ProcessId) -> u32 {
        let Some(sketches) = &self.tracked[process].sketches else { return 0 };
        let shared: Pages = sought.iter().map(|sketch| sketch.shared(&sketches.all)).sum();
        shared.0.checked_ilog2().map_or(0, |log2| log2 + 1)
    }

    /// The best partner of the same class, and whether it holds many of the pages that `process` has not merged and the
    /// chosen processes do not hold.
    fn choose_companion(&self, process: ProcessId, chosen: &BTreeSet<ProcessId>) -> Option<(ProcessId, bool)> {
        let is_same_class = |other: &ProcessId| {
            *other != process
                && !chosen.contains(other)
                && self.similarity_class(other) == self.similarity_class(&process)
        };
        let candidates =
            self.tracked.iter().filter(|(other, tracked)| is_same_class(other) && tracked.may_be_scanned());
        let unmatched = self.unmatched_content(&process, chosen);
        let rank = |other: &ProcessId| self.partner_rank(std::slice::from_ref(&unmatched), other);
        let best = take_best(&mut candidates.map(|(other, _)| *other).collect(), rank)?;
        Some((best, has_large_overlap(&self.tracked[&process], &unmatched, &self.tracked[&best])))
    }

    /// Known partners from the trust domains of the due processes, without those that are `waiting`. Of similar processes: the
    /// one that holds most of the sought contents, and the one that holds most of the rest. Of other processes: the one
    /// that holds most of the sought contents, and the biggest that holds any of them or has no sketch. Of similar
    /// processes that hold none of them one is chosen at random, because a sketch does not contain all contents.
    fn choose_partners(
        &self,
        due: &[ProcessId],
        chosen: &BTreeSet<ProcessId>,
        waiting: &BTreeSet<ProcessId>,
    ) -> Vec<ProcessId> {
        let mut partners = Vec::new();
        let domains: BTreeSet<_> = due.iter().map(|process| self.sharing_domain(&self.tracked[process])).collect();
        for domain in domains {
            let in_domain = |process: &ProcessId| self.sharing_domain(&self.tracked[process]) == domain;
            let due: Vec<ProcessId> = due.iter().copied().filter(in_domain).collect();
            let similarity_keys: BTreeSet<_> =
                due.iter().map(|process| &self.tracked[process].similarity_key).collect();
            let is_candidate = |process: &ProcessId| {
                !chosen.contains(process) && !waiting.contains(process) && self.tracked[process].may_be_scanned()
            };
            let candidates = self.tracked.keys().copied().filter(in_domain).filter(is_candidate);
            let (mut similar, mut dissimilar): (Vec<_>, Vec<_>) =
                candidates.partition(|process| similarity_keys.contains(&self.tracked[process].similarity_key));
            let sought = self.unmatched_contents(&due, chosen);
            let rank = |process: &ProcessId| self.partner_rank(&sought, process);
            let first = take_best(&mut similar, rank);
            let first_sketches = first.and_then(|first| self.tracked[&first].sketches.as_ref());
            let without_first = |sketch: &Sketch| {
                first_sketches.map_or_else(Sketch::default, |sketches| sketch.clone().without(&sketches.all))
            };
            let unmatched: Vec<Sketch> = sought.iter().map(without_first).collect();
            let second = take_best(&mut similar, |process| {
                (self.overlap_per_cost(&unmatched, process), self.random_u64(*process))
            });
            let has_no_sketch = |process: &ProcessId| self.tracked[process].sketches.is_none();
            if !due.iter().any(has_no_sketch) {
                dissimilar.retain(|process| has_no_sketch(process) || self.overlap_level(&sought, process) > 0);
            }
            let best_dissimilar = take_best(&mut dissimilar, rank);
            let biggest_dissimilar = take_best(&mut dissimilar, |process| self.partner_rank(&[], process));
            partners.extend([first, second, best_dissimilar, biggest_dissimilar].into_iter().flatten());
        }
        partners
    }

    /// Rank of a partner, the best last: most sought contents for its scan cost, then a low cost, then merged ranges,
    /// then its size.
    fn partner_rank(&self, sought: &[Sketch], process: &ProcessId) -> impl Ord + use<> {
        let tracked = &self.tracked[process];
        (self.overlap_per_cost(sought, process), tracked.enrolled, tracked.resident, *process)
    }

    /// How many of the sought pages a process holds, halved for each doubling of its scan cost; then the number of
    /// these doublings. An expensive scan beats a scan of a process that holds none of the pages.
    fn overlap_per_cost(&self, sought: &[Sketch], process: &ProcessId) -> (u32, Reverse<u32>) {
        let overruns = self.tracked[process].overruns;
        (self.overlap_level(sought, process).saturating_sub(overruns), Reverse(overruns))
    }
}

/// The memory of a process with the margins of all parts.
fn with_part_margin(bytes: u64) -> u64 {
    bytes + bytes / PART_MARGIN_DIVISOR
}

/// Whether `other` holds many of the unmerged pages of `one`, restricted to the sought contents `sought`.
fn has_large_overlap(one: &TrackedProcess, sought: &Sketch, other: &TrackedProcess) -> bool {
    let unmerged = one.sketches.as_ref().map_or(Pages::ZERO, |sketches| sketches.unmerged.contents());
    let min_overlap = MIN_LARGE_OVERLAP.1.max(Pages(unmerged.0.div_ceil(MIN_LARGE_OVERLAP.0)));
    other.sketches.as_ref().is_some_and(|sketches| sought.shared(&sketches.all) >= min_overlap)
}

/// Remove and return the process with the highest rank.
fn take_best<K: Ord>(candidates: &mut Vec<ProcessId>, rank: impl Fn(&ProcessId) -> K) -> Option<ProcessId> {
    let (index, _) = candidates.iter().enumerate().max_by_key(|(_, process)| rank(process))?;
    Some(candidates.swap_remove(index))
}
