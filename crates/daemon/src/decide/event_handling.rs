//! Updating the state for an event.

use super::merge_estimate::{self, MergeEstimate};
use super::{
    CensusSummary, CensusTask, DaemonState, Decision, DecisionReason, Event, MergeCandidate, MergeSummary,
    MergedCheckSummary, NextStep, PartResult, ShutdownStage, TickReadings, TrackedProcess, WaitTimes,
};
use super::{DaemonTask, DecisionKind};
use super::{Effect, ProcessArrival, UnenrollScope, UnenrollSummary};
use pagefold_base::memory::Shortage;
use pagefold_base::units::{AddressRange, Bytes, ProcessId};
use pagefold_census::ScanPart;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A process that could be merged, with what that gains and costs.
type JudgedCandidate = (ProcessId, MergeEstimate);

/// Weight of a new measurement in the moving average of census costs.
const CENSUS_COST_EWMA_WEIGHT: f64 = 0.3;

/// Longest interval between two checks of merged pages.
const MAX_MERGED_CHECK_INTERVAL: Duration = Duration::from_secs(60);

/// Interval after a check that found nothing, as a multiple of the check's CPU time: checks stay below a thousandth of
/// one CPU.
const MERGED_CHECK_INTERVAL_COST_FACTOR: u32 = 1000;

/// Delay from the exit of a merged process to the sweep: other processes may exit as well, or a merge may come first.
const SWEEP_DELAY: Duration = Duration::from_secs(5);

/// Delay before the next sweep when ksmd did not visit all exited processes.
const SWEEP_RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Share of the predicted savings that a merge must reach. Below it, contents change faster than they are scanned.
const MIN_MEASURED_TO_PREDICTED: f64 = 0.5;

/// CPU seconds to reserve for a halted merge, as a multiple of ksmd's predicted CPU time. Enrolling and watching also
/// take CPU time, and ksmd may scan pages twice.
const MERGE_RESERVATION_FACTOR: f64 = 2.0;

/// Delay before the daemon tries to acquire the host again after another Pagefold held it.
const ACQUIRE_HOST_RETRY_INTERVAL: Duration = Duration::from_secs(10);

impl DaemonState {
    pub(super) fn handle_event(&mut self, event: Event, effects: &mut Vec<Effect>) {
        match event {
            Event::Tick(readings) => self.update_readings(readings, effects),
            Event::ProcessArrived(arrival) => self.handle_arrival(arrival, effects),
            Event::ProcessExited(process) => self.handle_exit(process),
            Event::EnrollmentsAdopted(adopted) => self.adopt(adopted, effects),
            Event::StateReceived(passed, elapsed) => self.receive_passed_state(passed, elapsed),
            Event::HostAcquired(Ok(())) => {
                self.task = None;
                (self.host_acquired, self.host_busy_reason, self.adoption_known) = (true, None, true);
            }
            Event::HostAcquired(Err(why)) => {
                self.task = None;
                if self.host_busy_reason.as_ref() != Some(&why) {
                    effects.push(self.report_decision(DecisionKind::Yield, &[], DecisionReason::HostBusy, why.clone()));
                }
                self.record_host_busy(why);
            }
            Event::CensusDone(summary) => self.handle_census(summary, effects),
            Event::MergeDone(summary) => self.handle_merge(summary, effects),
            Event::MergedCheckDone(summary) => self.handle_merged_check(summary, effects),
            Event::SweepDone { complete } => {
                self.task = None;
                if !complete {
                    self.sweep_at.get_or_insert(self.now + SWEEP_RETRY_INTERVAL);
                }
            }
            Event::UnenrollDone(summary) => self.handle_unenroll(summary, effects),
            Event::SettingsRestored { complete } => {
                (self.task, self.host_acquired, self.settings_restored) = (None, false, complete)
            }
            Event::TaskFailed(why) => self.handle_task_failure(why, effects),
            Event::SettingsOverwritten(why) => self.yield_to_other_writer(why, effects),
            Event::TunerChanged(tuner) => {
                if let Some(name) = tuner.as_ref().filter(|_| self.tuner.is_none() && !self.rules.ignore_tuners) {
                    let why = format!("{name} tunes KSM");
                    effects.push(self.report_decision(DecisionKind::Yield, &[], DecisionReason::OtherWriter, why));
                }
                self.tuner = tuner;
            }
            Event::RulesChanged(rules) => {
                self.cpu_budget.set_limits(rules.cpu_rate, rules.burst);
                if self.rules.across_domains && !rules.across_domains {
                    self.domains_changed = true;
                    let now = self.now;
                    self.tracked.values_mut().for_each(|tracked| tracked.unenroll_if_shared(now));
                }
                (self.rules, self.settings_overwritten, self.reported_pause) = (rules, None, None);
            }
            Event::Pause => self.paused = true,
            Event::Resume => {
                (self.paused, self.settings_overwritten, self.acquire_host_after) = (false, None, self.now)
            }
            Event::Enroll(process) => {
                self.unenroll_on_arrival.remove(&process);
                if let Some(tracked) = self.tracked.get_mut(&process) {
                    tracked.enroll_by_operator(self.now, &self.rules);
                }
            }
            Event::Unenroll(process) => match self.tracked.get_mut(&process) {
                Some(tracked) => tracked.unenroll_by_operator(self.now),
                None => {
                    self.unenroll_on_arrival.insert(process);
                }
            },
            Event::Stop { unmerge } => {
                let stage = if unmerge { ShutdownStage::UnmergePending } else { ShutdownStage::KeepMerged };
                self.shutdown_stage.get_or_insert(stage);
            }
            Event::HandOver => {
                self.hands_over |= self.shutdown_stage.is_none();
                self.shutdown_stage.get_or_insert(ShutdownStage::KeepMerged);
            }
        }
    }

    /// A process has exited. If it had merged pages, ksmd must visit it.
    fn handle_exit(&mut self, process: ProcessId) {
        self.adopt_on_arrival.remove(&process);
        self.passed_processes.remove(&process);
        // A process in a running merge may have merged pages, whatever the merge reports.
        let in_merge = matches!(&self.task, Some(DaemonTask::Merge(processes)) if processes.contains(&process));
        let tracked = self.tracked.remove(&process);
        if tracked.is_some_and(|tracked| in_merge || tracked.maybe_merged || tracked.enrolled) {
            self.sweep_at.get_or_insert(self.now + SWEEP_DELAY);
        }
    }

    fn update_readings(&mut self, readings: TickReadings, effects: &mut Vec<Effect>) {
        self.cpu_budget.update(self.now, readings.cpu_spent);
        (self.available, self.time_of_day) = (readings.available, Some(readings.time_of_day));
        self.shortage = Shortage::for_host(readings.pressure_percent, readings.available, readings.total);
        for (process, shortage) in readings.cgroup_shortages {
            if let Some(tracked) = self.tracked.get_mut(&process) {
                tracked.shortage = shortage;
            }
        }
        for (process, cpu_time) in readings.cpu_times {
            if let Some(tracked) = self.tracked.get_mut(&process) {
                tracked.update_cpu_time(cpu_time, self.now, &self.rules);
            }
        }
        for (process, resident) in readings.resident {
            if let Some(tracked) = self.tracked.get_mut(&process) {
                tracked.update_resident(resident, self.now, &self.rules);
            }
        }
        let max_interval = self.max_scan_interval();
        for tracked in self.tracked.values_mut() {
            tracked.defer_if_idle(self.now, max_interval);
        }
        if let Some(waits) = readings.wait_times {
            self.back_off_on_slowdown(&waits, effects);
        }
    }

    /// Back off when programs are slowed down. A running census completes, otherwise a host that is always busy would
    /// get none. A merge is halted and repeated at a lower pace.
    fn back_off_on_slowdown(&mut self, waits: &WaitTimes, effects: &mut Vec<Effect>) {
        let is_working = matches!(self.task, Some(DaemonTask::Census(..) | DaemonTask::Merge(_)));
        let at_lowest_pace = self.slowdown.is_at_lowest_pace();
        let Some((pause, why)) = self.slowdown.observe(waits, is_working, self.rules.max_slowdown, self.now) else {
            return;
        };
        let must_halt = matches!(
            &self.task,
            Some(DaemonTask::Merge(processes)) if !at_lowest_pace && !self.is_memory_short_for(processes)
        );
        let (prefix, suffix) = match (&self.task, must_halt) {
            (Some(DaemonTask::Merge(_)), false) => ("after this merge ", ""),
            _ => ("", " and then merges more slowly"),
        };
        let why = format!("{why}: {prefix}the daemon pauses for {} s{suffix}", pause.as_secs());
        effects.push(self.report_decision(DecisionKind::Idle, &[], DecisionReason::Slowdown, why));
        self.reported_pause = Some(DecisionReason::Slowdown);
        if must_halt && !self.task_halted {
            self.task_halted = true;
            effects.push(Effect::Halt);
        }
    }

    fn handle_arrival(&mut self, arrival: ProcessArrival, effects: &mut Vec<Effect>) {
        let (process, exclusion_reason) = (arrival.process, arrival.exclusion_reason.clone());
        let previous_reason = self.tracked.get(&process).map(|tracked| tracked.exclusion_reason.clone());
        match self.tracked.get_mut(&process) {
            Some(tracked) => {
                if tracked.similarity_key != arrival.similarity_key {
                    (tracked.sketches, tracked.part_sketches) = (None, Arc::default());
                }
                (tracked.similarity_key, tracked.exclusion_reason) = (arrival.similarity_key, arrival.exclusion_reason);
                // Pages merged before the exclusion are unenrolled.
                if tracked.exclusion_reason.is_some() && tracked.maybe_merged {
                    tracked.request_unenroll(DecisionReason::Excluded, self.now);
                } else if tracked
                    .pending_unenroll
                    .as_ref()
                    .is_some_and(|pending| pending.reason == DecisionReason::Excluded)
                {
                    tracked.cancel_unenroll_if_allowed();
                }
                let old_domain = std::mem::replace(&mut tracked.domain, arrival.domain);
                if old_domain != tracked.domain && !old_domain.is_single_process() && !self.rules.across_domains {
                    self.domains_changed |= self.task.as_ref().is_some_and(|task| task.involves(process));
                    tracked.unenroll_if_shared(self.now);
                }
                if old_domain != tracked.domain {
                    tracked.record_domain_change(self.now, &self.rules);
                }
            }
            None => {
                let mut tracked = TrackedProcess::new(arrival, self.now, &self.rules);
                if self.unenroll_on_arrival.remove(&process) {
                    tracked.unenroll_by_operator(self.now);
                }
                if let Some((passed, received_at)) = self.passed_processes.remove(&process) {
                    tracked.receive_passed(&passed, received_at, self.now, &self.rules);
                }
                if let Some(scopes) = self.adopt_on_arrival.remove(&process) {
                    tracked.adopt(&scopes, self.now, &self.rules);
                }
                self.tracked.insert(process, tracked);
            }
        }
        if let Some(why) = exclusion_reason.filter(|why| previous_reason != Some(Some(why.clone()))) {
            effects.push(self.report_decision(DecisionKind::Skip, &[process], DecisionReason::Excluded, why));
        }
    }

    fn handle_census(&mut self, mut summary: CensusSummary, effects: &mut Vec<Effect>) {
        let Some(DaemonTask::Census(task)) = self.task.take() else { return };
        let CensusTask { due, processes, .. } = &task;
        let overran = self.account_census(&summary);
        for process in processes {
            match self.tracked.get_mut(process) {
                Some(tracked) if overran => tracked.record_overrun(),
                Some(tracked) if !summary.partial => tracked.record_within_budget(),
                _ => {}
            }
        }
        if summary.partial || self.domains_changed {
            if overran {
                self.postpone_scans(due);
            }
            return;
        }
        self.census_count += 1;
        for (process, sketches) in std::mem::take(&mut summary.sketches) {
            let ranges = summary.scanned_ranges.get(&process).map_or(&[ScanPart::WHOLE.range][..], Vec::as_slice);
            // Of two parts of one process, the sketches are known from their own scans.
            match (self.tracked.get_mut(&process), ranges) {
                (Some(tracked), [range]) if due.contains(&process) => tracked.progress.add_sketches(*range, sketches),
                (Some(tracked), [range]) if *range == ScanPart::WHOLE.range => tracked.set_sketches(sketches),
                _ => {}
            }
        }
        for process in due {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.reserved_merge_seconds = 0.0;
            }
        }
        let is_new = |process: &ProcessId| self.tracked.get(process).is_some_and(TrackedProcess::is_unscanned);
        // The contents of a new process are not stable yet, whatever program enrolled them.
        let has_new = due.iter().any(is_new);
        let (profitable, unprofitable) = self.judge_candidates(&summary);
        self.finish_scans(&task, &summary, &profitable);
        if has_new {
            return;
        }
        self.report_unprofitable(unprofitable, due, effects);
        if !profitable.is_empty() {
            self.decide_merge(profitable, effects);
        }
    }

    /// Count the cost of a census. Returns whether it was halted because it exceeded the CPU budget.
    fn account_census(&mut self, summary: &CensusSummary) -> bool {
        let mib = summary.bytes_scanned.0 as f64 / 1048576.0;
        if summary.partial {
            return self.cpu_budget.available_seconds() <= 0.0;
        }
        if mib >= 1.0 {
            let measured = summary.cpu_time.as_secs_f64() / mib;
            self.census_seconds_per_mib += CENSUS_COST_EWMA_WEIGHT * (measured - self.census_seconds_per_mib);
        }
        // The next task starts before the next CPU reading and must fit the budget as well.
        let counted = self.cpu_budget.total_spent().saturating_sub(self.task_start_cpu_time);
        self.cpu_budget.update(self.now, self.cpu_budget.total_spent() + summary.cpu_time.saturating_sub(counted));
        false
    }

    /// Delay the scans of processes whose census exceeded the budget. Otherwise it would be started and halted again
    /// and again, and no other process would be scanned.
    fn postpone_scans(&mut self, due: &[ProcessId]) {
        for process in due {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.postpone_after_overrun(self.now, &self.rules);
            }
        }
    }

    /// The profitable and the unprofitable candidates of a census, each with what merging it gains and costs.
    fn judge_candidates(&self, summary: &CensusSummary) -> (Vec<JudgedCandidate>, Vec<JudgedCandidate>) {
        let total_cost: u64 = summary.cost_in_pages.values().sum();
        let scan_cost = |process: &ProcessId| summary.cost_in_pages.get(process).copied().unwrap_or(0);
        let scan_time =
            |process: &ProcessId| summary.cpu_time.mul_f64(scan_cost(process) as f64 / total_cost.max(1) as f64);
        let may_be_scanned =
            |process: &ProcessId| self.tracked.get(process).is_some_and(TrackedProcess::may_be_scanned);
        let candidates: BTreeMap<ProcessId, MergeCandidate> =
            summary.candidates.iter().map(|candidate| (candidate.process, *candidate)).collect();
        let scannable = candidates.into_values().filter(|candidate| may_be_scanned(&candidate.process));
        let judged = scannable
            .map(|candidate| (candidate.process, MergeEstimate::new(&candidate, scan_time(&candidate.process))));
        let is_profitable = |(process, estimate): &JudgedCandidate| {
            let is_short = self.is_memory_short_for(&[*process]);
            estimate.is_profitable(if is_short { f64::INFINITY } else { self.rules.max_cpu_seconds_per_mib })
        };
        judged.partition(is_profitable)
    }

    /// Record the scans of parts of the due processes, and schedule what follows.
    fn finish_scans(&mut self, task: &CensusTask, summary: &CensusSummary, profitable: &[JudgedCandidate]) {
        // Whole processes are the usual case; their scan is complete.
        let end_of = |range: Option<&AddressRange>| range.map(|range| range.end).filter(|end| *end != u64::MAX);
        let ranges = |process: &ProcessId| summary.scanned_ranges.get(process).map_or(&[][..], Vec::as_slice);
        let max_interval = self.max_scan_interval();
        for process in &summary.left_out {
            if let Some(tracked) = self.tracked.get_mut(process).filter(|_| task.due.contains(process)) {
                tracked.back_off(self.now, &self.rules);
            }
        }
        for &process in task.due.iter().filter(|due| !summary.left_out.contains(due)) {
            let partner = task.partner.map(|partner| {
                let is_itself = partner == process;
                (partner, end_of(ranges(&partner).get(usize::from(is_itself))))
            });
            let result = PartResult {
                end: end_of(ranges(&process).first()),
                partner,
                is_profitable: profitable.iter().any(|(candidate, _)| *candidate == process),
                is_unstable: summary.not_yet_stable.contains(&process),
            };
            let step = self.update_progress(process, |progress, is_first_scan, next_part| {
                progress.record(process, &result, is_first_scan, next_part)
            });
            let Some(step) = step else { continue };
            self.follow_step(process, step, max_interval);
        }
    }

    /// Schedule what follows in the scan of a process.
    pub(super) fn follow_step(&mut self, process: ProcessId, step: NextStep, max_interval: Duration) {
        let spread = self.random_fraction(process);
        let Some(tracked) = self.tracked.get_mut(&process) else { return };
        let Some(progress) = tracked.finish_part(self.now, step, &self.rules) else { return };
        let found = (progress.found_profitable, progress.found_unstable);
        tracked.finish_scan(self.now, found, spread, &self.rules, max_interval);
    }

    /// Report unprofitable candidates that were due: partners are reported when their own scan is due.
    fn report_unprofitable(&mut self, candidates: Vec<JudgedCandidate>, due: &[ProcessId], effects: &mut Vec<Effect>) {
        let due_candidates = candidates.into_iter().filter(|(process, _)| due.contains(process));
        let (processes, sum) = merge_estimate::sum_estimates(due_candidates);
        if !processes.is_empty() {
            let why = format!("it would save {sum} (limit: {})", self.rules.max_cpu_seconds_per_mib);
            effects.push(self.report_decision(DecisionKind::Skip, &processes, DecisionReason::Unprofitable, why));
        }
    }

    /// Decide to merge profitable candidates, and start that if the daemon may act.
    fn decide_merge(&mut self, candidates: Vec<JudgedCandidate>, effects: &mut Vec<Effect>) {
        let reservations: Vec<f64> = candidates
            .iter()
            .map(|(_, estimate)| estimate.ksmd_time.as_secs_f64() * MERGE_RESERVATION_FACTOR)
            .collect();
        let (processes, sum) = merge_estimate::sum_estimates(candidates);
        let carried_out = self.may_act() && self.host_acquired && self.shutdown_stage.is_none();
        effects.push(Effect::Report(Decision {
            kind: DecisionKind::Merge,
            processes: processes.clone(),
            reason: DecisionReason::Profitable,
            explanation: format!("it should save {sum}"),
            predicted: Some(Bytes(sum.net_savings.0.max(0).unsigned_abs())),
            carried_out,
        }));
        if !carried_out {
            return;
        }
        // At the refill rate of the budget, the merge would never end.
        let share = if sum.ksmd_time.as_secs_f64() * 1.5 <= self.cpu_budget.available_seconds() {
            1.0
        } else {
            (self.rules.cpu_rate / 2.0).clamp(0.001, 1.0)
        };
        let cpu_share = (share * self.slowdown.pace_factor()).max(0.001);
        for (process, seconds) in processes.iter().zip(reservations) {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.reserved_merge_seconds = seconds;
            }
        }
        self.start_task(DaemonTask::Merge(processes.clone()), Effect::Merge { processes, cpu_share }, effects);
    }

    fn handle_merged_check(&mut self, summary: MergedCheckSummary, effects: &mut Vec<Effect>) {
        self.task = None;
        let has_breaks = summary.unenrolled_bytes > Bytes::ZERO;
        if has_breaks {
            let why = format!("{} were written again soon after merging", summary.unenrolled_bytes);
            effects.push(self.report_decision(
                DecisionKind::Unenroll,
                &summary.unenrolled_from,
                DecisionReason::CowBreaks,
                why,
            ));
        }
        if let Some(failures) = summary.failed_unenrolls {
            self.report_failed_unenrolls(failures, effects);
        }
        let quiet_interval = (self.merged_check.1 * 2)
            .min(MAX_MERGED_CHECK_INTERVAL)
            .max(summary.cpu_time * MERGED_CHECK_INTERVAL_COST_FACTOR);
        let interval = if has_breaks { self.rules.min_scan_interval } else { quiet_interval };
        self.merged_check = (self.now + interval, interval);
    }

    /// Report ranges that could not be unenrolled, where the failure is new.
    fn report_failed_unenrolls(&mut self, failures: Vec<(ProcessId, String)>, effects: &mut Vec<Effect>) {
        let reported = std::mem::take(&mut self.failed_unenrolls);
        for (process, why) in failures {
            if reported.get(&process) != Some(&why) {
                effects.push(self.report_decision(
                    DecisionKind::Refuse,
                    &[process],
                    DecisionReason::Refused,
                    format!("not unenrolled: {why}"),
                ));
            }
            self.failed_unenrolls.insert(process, why);
        }
    }

    fn handle_merge(&mut self, summary: MergeSummary, effects: &mut Vec<Effect>) {
        let overran = self.task_halted && self.cpu_budget.available_seconds() <= 0.0;
        if let Some(DaemonTask::Merge(processes)) = self.task.take() {
            self.record_merge(&processes, overran);
        }
        for process in &summary.enrolled {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.enrolled = true;
            }
        }
        for (process, why) in &summary.refused {
            effects.push(self.report_decision(DecisionKind::Refuse, &[*process], DecisionReason::Refused, why.clone()));
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.record_refusal(self.now, &self.rules);
            }
        }
        if summary.unenrolled_bytes > Bytes::ZERO {
            let why = format!("{} were written again soon after merging", summary.unenrolled_bytes);
            effects.push(self.report_decision(
                DecisionKind::Unenroll,
                &summary.unenrolled_from,
                DecisionReason::CowBreaks,
                why,
            ));
        }
        self.report_failed_unenrolls(summary.failed_unenrolls, effects);
        self.merged_check = (self.now + self.rules.min_scan_interval, self.rules.min_scan_interval);
        if let Some(why) = summary.settings_overwritten {
            return self.yield_to_other_writer(why, effects);
        }
        // A halted merge leaves metadata of pages that ksmd has scanned only once.
        let is_complete = !self.task_halted;
        let is_net_loss = |process: &ProcessId| is_complete && summary.nets.get(process).is_some_and(|net| net.0 < 0);
        let (losing, not_losing): (Vec<ProcessId>, Vec<ProcessId>) =
            summary.enrolled.iter().copied().partition(is_net_loss);
        // Earlier merged pages are not given up because of new ones; checks of merged pages find those with COW breaks.
        let mut to_unenroll = Vec::new();
        for (process, net) in &summary.nets {
            if let Some(tracked) = self.tracked.get_mut(process).filter(|tracked| !tracked.net_known) {
                tracked.net_savings.0 += net.0;
                tracked.net_known = is_complete;
                if is_complete && tracked.enrolled && tracked.net_savings.0 < 0 {
                    to_unenroll.push(*process);
                }
            }
        }
        self.request_unenroll(&to_unenroll, DecisionReason::NetLoss);
        for process in &losing.into_iter().chain(to_unenroll).collect::<BTreeSet<ProcessId>>() {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.record_refusal(self.now, &self.rules);
            }
        }
        let mib = summary.net.0 as f64 / 1048576.0;
        let fell_short =
            !self.task_halted && (summary.net.0 as f64) < summary.predicted.0 as f64 * MIN_MEASURED_TO_PREDICTED;
        if fell_short && !not_losing.is_empty() {
            let measured = Bytes(summary.net.0.max(0).unsigned_abs());
            let why = format!("{measured} saved of {} predicted: the next scan is delayed", summary.predicted);
            effects.push(self.report_decision(DecisionKind::Skip, &not_losing, DecisionReason::Unprofitable, why));
        }
        let is_unprofitable = fell_short
            || summary.cpu_time.as_secs_f64() > self.rules.max_cpu_seconds_per_mib * mib && !self.task_halted;
        for process in &not_losing {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.last_merge_unprofitable = is_unprofitable;
                if overran || is_unprofitable {
                    tracked.double_scan_interval(&self.rules);
                }
            }
        }
    }

    /// Update the processes of a merge, which may have used up the CPU budget. Processes that were excluded or changed
    /// their trust domain during the merge are to be unenrolled.
    fn record_merge(&mut self, processes: &[ProcessId], overran: bool) {
        for process in processes {
            if let Some(tracked) = self.tracked.get_mut(process) {
                tracked.maybe_merged = true;
                match overran {
                    true => tracked.merge_halted_at = self.now,
                    false => tracked.reserved_merge_seconds = 0.0,
                }
                if tracked.exclusion_reason.is_some() {
                    tracked.request_unenroll(DecisionReason::Excluded, self.now);
                }
                if self.domains_changed {
                    tracked.unenroll_if_shared(self.now);
                }
            }
        }
    }

    /// Processes that could not be unenrolled are tried again; new failures are reported.
    fn handle_unenroll(&mut self, summary: UnenrollSummary, effects: &mut Vec<Effect>) {
        let Some(DaemonTask::Unenroll(scopes)) = self.task.take() else { return };
        // If a wider scope was requested meanwhile, that request stays pending.
        let scope_of = |process: &ProcessId| scopes.get(process).copied().unwrap_or(UnenrollScope::DaemonEnrolled);
        let covers_request = |tracked: &TrackedProcess, scope| {
            tracked.pending_unenroll.as_ref().is_none_or(|pending| pending.scope() <= scope)
        };
        for process in summary.unenrolled {
            let scope = scope_of(&process);
            self.adopt_on_arrival.remove(&process);
            let tracked = self.tracked.get_mut(&process).filter(|tracked| covers_request(tracked, scope));
            if let Some(reason) = tracked.and_then(|tracked| tracked.record_unenrolled(scope)) {
                let why = match scope {
                    UnenrollScope::AllMerged => "it has no merged pages any more",
                    UnenrollScope::DaemonEnrolled => "the ranges that the daemon enrolled are unenrolled",
                };
                effects.push(self.report_decision(DecisionKind::Unenroll, &[process], reason, why));
            }
        }
        for (process, why) in summary.failed_unenrolls {
            let (explanation, scope) = (format!("not unenrolled: {why}"), scope_of(&process));
            let tracked = self.tracked.get_mut(&process).filter(|tracked| covers_request(tracked, scope));
            if tracked.is_some_and(|tracked| tracked.record_unenroll_failure(why, summary.cpu_time, self.now)) {
                effects.push(self.report_decision(
                    DecisionKind::Refuse,
                    &[process],
                    DecisionReason::Refused,
                    explanation,
                ));
            }
        }
    }

    /// The host cannot be acquired for now.
    fn record_host_busy(&mut self, why: String) {
        self.acquire_host_after = self.now + ACQUIRE_HOST_RETRY_INTERVAL;
        self.host_busy_reason = Some(why);
        // During shutdown it is tried once.
        self.shutdown_stage = self.shutdown_stage.map(|stage| match stage {
            ShutdownStage::UnmergePending => ShutdownStage::UnmergeTried,
            other => other,
        });
    }

    fn handle_task_failure(&mut self, why: String, effects: &mut Vec<Effect>) {
        match self.task.take() {
            Some(DaemonTask::AcquireHost) => self.record_host_busy(why.clone()),
            Some(DaemonTask::RestoreSettings) => (self.host_acquired, self.settings_restored) = (false, false),
            Some(DaemonTask::Census(task)) => self.back_off(&task.due),
            Some(DaemonTask::Merge(processes)) => {
                self.back_off(&processes);
                self.record_merge(&processes, false);
                // Some of their ranges may be enrolled.
                let enrolled = |process: &ProcessId| self.tracked.get(process).is_some_and(|tracked| tracked.enrolled);
                let newly_enrolled: Vec<ProcessId> =
                    processes.into_iter().filter(|process| !enrolled(process)).collect();
                for process in &newly_enrolled {
                    if let Some(tracked) = self.tracked.get_mut(process) {
                        tracked.enrolled = true;
                    }
                }
                self.request_unenroll(&newly_enrolled, DecisionReason::Failed);
            }
            Some(DaemonTask::Unenroll(scopes)) => {
                let failures = scopes.keys().map(|process| (*process, why.clone())).collect();
                self.task = Some(DaemonTask::Unenroll(scopes));
                return self.handle_unenroll(
                    UnenrollSummary { failed_unenrolls: failures, ..UnenrollSummary::default() },
                    effects,
                );
            }
            Some(DaemonTask::CheckMerged | DaemonTask::Sweep) | None => {
                self.merged_check = (self.now + MAX_MERGED_CHECK_INTERVAL, MAX_MERGED_CHECK_INTERVAL)
            }
        }
        effects.push(self.report_decision(DecisionKind::Refuse, &[], DecisionReason::Failed, why));
    }

    fn yield_to_other_writer(&mut self, why: String, effects: &mut Vec<Effect>) {
        if self.settings_overwritten.is_none() {
            effects.push(self.report_decision(DecisionKind::Yield, &[], DecisionReason::OtherWriter, why.clone()));
        }
        self.settings_overwritten = Some(why);
    }
}
