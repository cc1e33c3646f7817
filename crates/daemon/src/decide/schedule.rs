//! Choosing the next task.

use super::{
    DaemonMode, DaemonState, DaemonTask, DecisionKind, DecisionReason, Effect, PendingUnenroll, ScanCause,
    ShutdownStage, TrackedProcess, UnenrollScope,
};
use pagefold_base::domain::TrustDomain;
use pagefold_base::units::{Bytes, Pages, ProcessId};
use pagefold_census::decide::sketch::Sketch;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Due processes for which a partner with common contents is sought, at most.
const MAX_PARTNER_SEEKERS: usize = 8;

/// Scanned processes for which missed partners are sought, at most: each candidate partner takes a microsecond.
const MAX_MISSED_PARTNER_CHECKS: usize = 32;

/// Share of a process's unmerged pages, and the least number of pages, that a partner must hold for an early joint
/// scan.
const MIN_LARGE_OVERLAP: (u64, Pages) = (16, Pages(256));

/// One scan in this many has a partner that is chosen at random.
const SCANS_PER_RANDOM_PARTNER: u64 = 4;

/// Size limit of a census's index: this many bytes, plus this part of all tracked memory (divisor). With the daemon's
/// other memory, including some 0.11 % for reused fingerprints, that stays below 32 MiB plus 0.4 % of tracked memory.
/// Two large processes alone, foreign processes scanned beside them, and fingerprints of these may exceed it.
const INDEX_BYTES_LIMIT: (u64, u64) = (16 << 20, 640);

/// Bytes of memory per byte of its index while contents are grouped: at most 33 index bytes per page of 4 KiB.
const MEMORY_BYTES_PER_INDEX_BYTE: u64 = 124;

/// Share of the burst that may be reserved for a halted merge: other processes need scans, too.
const MAX_RESERVED_BURST_SHARE: f64 = 0.75;

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
        if let Some(stopping) = self.shutdown_stage {
            return self.shut_down(stopping, effects);
        }
        match (self.may_act(), self.host_acquired) {
            (false, true) => {
                let others = !self.paused && self.yield_reason().is_some();
                let reason = if others { DecisionReason::OtherWriter } else { DecisionReason::Operator };
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
            let tries = |leaving: &PendingUnenroll| {
                leaving.next_try <= self.now
                    && (leaving.last_failure.is_none() || self.cpu_budget.available_seconds() > 0.0)
            };
            let leaving = self.processes_where(|member| {
                member.pending_unenroll.as_ref().is_some_and(tries) && !member.is_cgroup_memory_short(&self.rules)
            });
            if !leaving.is_empty() {
                return self.report_and_unenroll(leaving, effects);
            }
        }
        if self.host_acquired && self.now >= self.merged_check.0 && self.tracked.values().any(|member| member.enrolled)
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
        let enough = |keep: Bytes| self.available.is_some_and(|available| available >= keep);
        let at_goal = self.rules.keep_available.is_some_and(enough);
        let rests = (at_goal || self.now < self.slowdown.paused_until()) && !self.is_host_memory_short();
        let due = self.due_processes(rests);
        if rests && due.is_empty() {
            if at_goal {
                return self.report_pause(DecisionReason::MemoryGoal, "available memory is above the goal", effects);
            }
            self.reported_pause = Some(DecisionReason::Slowdown);
            return;
        }
        let told = self.reported_pause;
        self.begin_census(due, effects);
        // All other processes stay paused.
        self.reported_pause = self.reported_pause.or(told.filter(|_| rests));
    }

    /// Shut down: unenroll what is enrolled, where requested and allowed, and restore KSM's settings.
    fn shut_down(&mut self, stopping: ShutdownStage, effects: &mut Vec<Effect>) {
        let merged = self.processes_where(|member| member.enrolled || member.pending_unenroll.is_some());
        if stopping == ShutdownStage::UnmergePending && !merged.is_empty() {
            if self.host_acquired {
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
            if self.may_acquire_host() {
                return self.start_task(DaemonTask::AcquireHost, Effect::AcquireHost, effects);
            }
        }
        if self.host_acquired {
            return self.start_task(DaemonTask::RestoreSettings, Effect::RestoreSettings, effects);
        }
        // Merged pages may stay merged, except those of processes that were to be unenrolled before.
        let to_leave = |member: &TrackedProcess| member.pending_unenroll.is_some();
        let stay = if stopping == ShutdownStage::KeepMerged { self.processes_where(to_leave) } else { merged };
        let rests = self
            .yield_reason()
            .or_else(|| self.inaction_reason())
            .unwrap_or_else(|| "there was no time for it".to_owned());
        for process in &stay {
            let leaving = self.tracked[process].pending_unenroll.as_ref();
            let why = leaving.and_then(|leaving| leaving.last_failure.as_ref()).unwrap_or(&rests);
            let why = format!("it stays merged: {why}");
            effects.push(self.report_decision(DecisionKind::Refuse, &[*process], DecisionReason::Stopped, why));
        }
        self.ended = true;
        effects.push(Effect::End { complete: self.settings_restored && stay.is_empty() });
    }

    /// The tracked processes that satisfy `fits`.
    pub(super) fn processes_where(&self, fits: impl Fn(&TrackedProcess) -> bool) -> Vec<ProcessId> {
        self.tracked.iter().filter(|(_, member)| fits(member)).map(|(process, _)| *process).collect()
    }

    fn report_and_unenroll(&mut self, processes: Vec<ProcessId>, effects: &mut Vec<Effect>) {
        for &process in &processes {
            // Repeated tries were reported before.
            let first =
                self.tracked[&process].pending_unenroll.as_ref().filter(|leaving| leaving.last_failure.is_none());
            if let Some(reason) = first.map(|leaving| leaving.reason) {
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
        let extent = |process| {
            self.tracked[process]
                .pending_unenroll
                .as_ref()
                .map_or(UnenrollScope::DaemonEnrolled, PendingUnenroll::scope)
        };
        let extents: BTreeMap<_, _> = processes.iter().map(|process| (*process, extent(process))).collect();
        self.start_task(DaemonTask::Unenroll(extents.clone()), Effect::Unenroll(extents), effects);
    }

    /// Report once why nothing is done.
    fn report_pause(&mut self, reason: DecisionReason, why: &str, effects: &mut Vec<Effect>) {
        if self.reported_pause != Some(reason) {
            self.reported_pause = Some(reason);
            effects.push(self.report_decision(DecisionKind::Idle, &[], reason, why));
        }
    }

    /// Predicted CPU seconds of scanning a process.
    fn scan_cpu_seconds(&self, member: &TrackedProcess) -> f64 {
        member.resident.0 as f64 / 1048576.0 * self.census_seconds_per_mib * member.scan_cost_factor()
    }

    /// CPU seconds reserved for the halted merge of a process. None if memory is short, or if other processes have used
    /// them up for longer than [`MERGE_RESERVATION_TIMEOUT`].
    fn reserved_merge_seconds(&self, process: ProcessId) -> f64 {
        let member = &self.tracked[&process];
        let patience = (self.cpu_budget.burst_seconds() / self.rules.cpu_rate * MERGE_RESERVATION_TIMEOUT.0)
            .max(MERGE_RESERVATION_TIMEOUT.1);
        let waited = self.now.saturating_sub(member.next_scan.max(member.merge_halted_at)).as_secs_f64();
        if waited < patience && !self.is_memory_short_for(&[process]) { member.reserved_merge_seconds } else { 0.0 }
    }

    /// CPU seconds that must be available before a scan. They include the reserves for halted merges, because the scan
    /// would use these up each time. The sum is limited to most of the burst, unless the scan alone takes more.
    fn required_cpu_seconds(&self, looks: f64, unmerged: f64) -> f64 {
        (looks + unmerged).min(looks.max(self.cpu_budget.burst_seconds() * MAX_RESERVED_BURST_SHARE))
    }

    /// Take a census of the due processes, as far as CPU time allows.
    fn begin_census(&mut self, due: Vec<ProcessId>, effects: &mut Vec<Effect>) {
        if due.is_empty() {
            self.reported_pause = None;
            return;
        }
        let never =
            |&process: &ProcessId| self.cpu_budget.time_until(self.scan_cpu_seconds(&self.tracked[&process])).is_none();
        let (impossible, possible): (Vec<ProcessId>, Vec<ProcessId>) = due.iter().copied().partition(never);
        let chosen = self.choose_affordable(&possible);
        if !impossible.is_empty() {
            let why = "a census of it takes more CPU time than the burst: set a larger burst";
            effects.push(self.report_decision(DecisionKind::Refuse, &impossible, DecisionReason::Budget, why));
            self.back_off(&impossible);
        }
        let Some(chosen) = chosen else {
            if !possible.is_empty() {
                self.report_pause(DecisionReason::Budget, "the CPU budget is used up for now", effects);
            }
            return;
        };
        self.reported_pause = None;
        let turns: Vec<ProcessId> = possible.into_iter().filter(|process| chosen.contains(process)).collect();
        let cause = self.tracked[&turns[0]].scan_cause;
        let why = match cause {
            ScanCause::Arrived => "new process",
            ScanCause::Grown => "it has grown or used CPU time since the last scan",
            ScanCause::Due if self.tracked[&turns[0]].scan_interval <= self.rules.min_scan_interval => {
                "its contents may be stable by now"
            }
            ScanCause::Due => "not scanned for long",
        };
        effects.push(self.report_decision(DecisionKind::Census, &turns, cause.into(), why));
        if self.can_never_afford_partner(&chosen) {
            let why = "a census of it and another process takes more CPU time than the burst, so it is scanned \
                       alone and no shared pages are found: set a larger burst";
            effects.push(self.report_decision(DecisionKind::Refuse, &turns, DecisionReason::Budget, why));
        }
        for process in &turns {
            if let Some(member) = self.tracked.get_mut(process) {
                member.begin_scan(self.now);
            }
        }
        let processes: Vec<ProcessId> = chosen.into_iter().collect();
        self.start_task(DaemonTask::Census(turns, processes.clone()), Effect::Census(processes), effects);
    }

    /// The due processes in order of priority. With `squeezed`, only processes that are short of memory in their
    /// cgroup.
    fn due_processes(&self, squeezed: bool) -> Vec<ProcessId> {
        let all = |sooner: f64| -> Vec<(ScanCause, Duration, u64, ProcessId)> {
            let turn = |(_, member): &(&ProcessId, &TrackedProcess)| {
                // A process with a long backoff may hold the duplicates that are needed when memory is short.
                let short = member.is_cgroup_memory_short(&self.rules);
                let sooner = if short || self.is_host_memory_short() { 0.75 } else { sooner };
                (short || !squeezed)
                    && member.may_be_scanned()
                    && member.next_scan.saturating_sub(member.scan_interval.mul_f64(sooner)) <= self.now
            };
            let due = self.tracked.iter().filter(turn);
            // Of processes that arrived together, the first one differs from scan to scan.
            due.map(|(process, member)| (member.scan_cause, member.next_scan, self.random_u64(*process), *process))
                .collect()
        };
        if all(0.0).is_empty() {
            return Vec::new();
        }
        // One census of several processes costs less than several censuses.
        let mut due = all(EARLY_SCAN_INTERVAL_SHARE);
        due.sort_unstable();
        let mut due: Vec<ProcessId> = due.into_iter().map(|(.., process)| process).collect();
        let member = |process: &ProcessId| &self.tracked[process];
        if self.is_cpu_time_scarce(&due) {
            // Where CPU time is scarce, first scans of ever more new processes would leave none for merging. Known
            // processes wait for both.
            due.sort_by_key(|process| member(process).scan_order(&self.rules));
        } else {
            due.sort_by_key(|process| !member(process).is_unscanned());
        }
        // If the census cannot take all, similar processes are scanned together: different ones have little in common.
        let mut places: BTreeMap<_, usize> = BTreeMap::new();
        for (place, process) in due.iter().enumerate() {
            places.entry(self.similarity_class(process)).or_insert(place);
        }
        due.sort_by_key(|process| places[&self.similarity_class(process)]);
        due.sort_by_key(|process| !member(process).is_cgroup_memory_short(&self.rules));
        due.sort_by_key(|process| member(process).overruns);
        if member(&due[0]).overruns == 0 {
            due.retain(|process| member(process).overruns == 0);
        }
        // First scans of new processes only record their pages. Known processes do not wait for them and are not mixed
        // with them.
        let new = member(&due[0]).is_unscanned();
        due.retain(|process| member(process).is_unscanned() == new);
        due
    }

    /// The due processes and their partners that the CPU budget can pay for now; `None` to wait for more.
    pub(super) fn choose_affordable(&self, due: &[ProcessId]) -> Option<BTreeSet<ProcessId>> {
        let alone = |process: &ProcessId| {
            self.required_cpu_seconds(
                self.scan_cpu_seconds(&self.tracked[process]),
                self.reserved_merge_seconds(*process),
            )
        };
        if !due.iter().any(|process| alone(process) <= self.cpu_budget.available_seconds()) {
            return None;
        }
        // A process whose scan exceeded the budget is scanned with one partner only, to find out which of them is
        // expensive.
        let apart = due.first().is_some_and(|process| self.tracked[process].overruns > 0);
        let most = if apart { 1 } else { usize::MAX };
        let managed: u64 = self.tracked.values().map(|member| member.resident.0).sum();
        let room = (INDEX_BYTES_LIMIT.0 + managed / INDEX_BYTES_LIMIT.1) * MEMORY_BYTES_PER_INDEX_BYTE;
        let (mut turns, mut chosen, mut looks, mut unmerged, mut looked) = (Vec::new(), BTreeSet::new(), 0.0, 0.0, 0);
        let mut companions = 0;
        let mut join = |chosen: &mut BTreeSet<ProcessId>, process: ProcessId, most: usize| {
            let member = &self.tracked[&process];
            let (seconds, bytes) = (looks + self.scan_cpu_seconds(member), member.resident.0);
            let more = unmerged + self.reserved_merge_seconds(process);
            // A big host is scanned in portions of at least two processes.
            let fits = chosen.len() < most.min(2) || chosen.len() < most && looked + bytes <= room;
            let joins = fits && self.required_cpu_seconds(seconds, more) <= self.cpu_budget.available_seconds();
            if joins {
                chosen.insert(process);
                (looks, unmerged, looked) = (seconds, more, looked + bytes);
            }
            joins
        };
        let scarce = self.is_cpu_time_scarce(due);
        for alike in due.chunk_by(|a, b| self.similarity_class(a) == self.similarity_class(b)) {
            let before = turns.len();
            for process in self.order_by_shared_content(alike, scarce) {
                if chosen.contains(&process) || join(&mut chosen, process, most) {
                    turns.push(process);
                    // Add the process with the most common contents before others fill the portion.
                    if companions < MAX_PARTNER_SEEKERS
                        && let Some((like, true)) = self.choose_companion(process, &chosen)
                    {
                        companions += usize::from(join(&mut chosen, like, most));
                    }
                }
            }
            // A single process gets a similar partner.
            if let [one] = turns[before..]
                && chosen
                    .iter()
                    .all(|other| *other == one || self.similarity_class(other) != self.similarity_class(&one))
                && let Some((like, _)) = self.choose_companion(one, &chosen)
            {
                join(&mut chosen, like, most);
            }
        }
        let first = *turns.first()?;
        let (alone, mut partners) = (chosen.len() == 1, self.choose_partners(&turns, &chosen));
        // Take the most similar partner, even if its cost must be awaited: a cheaper one may have nothing in common.
        partners.truncate(if apart { 1 } else { usize::MAX });
        let joined = partners.iter().filter(|partner| join(&mut chosen, **partner, most.saturating_add(1))).count();
        // A scan without a partner finds little: wait until the CPU budget can pay for one.
        let waits = alone && joined == 0 && partners.iter().any(|partner| self.can_ever_afford_pair(&first, partner));
        (!waits).then_some(chosen)
    }

    /// Whether the CPU budget cannot pay for scanning all of these processes now.
    fn is_cpu_time_scarce(&self, due: &[ProcessId]) -> bool {
        due.iter().map(|process| self.scan_cpu_seconds(&self.tracked[process])).sum::<f64>()
            > self.cpu_budget.available_seconds()
    }

    /// Processes of one class are likely to share pages: they have the same trust domain and the same similarity key.
    fn similarity_class(&self, process: &ProcessId) -> (&TrustDomain, &str) {
        let member = &self.tracked[process];
        (&member.domain, &member.similarity_key)
    }

    /// Orders the processes of one class. The first stays first; the others are sorted by urgency, then by how much
    /// they have in common with it.
    fn order_by_shared_content(&self, alike: &[ProcessId], scarce: bool) -> Vec<ProcessId> {
        let mut ordered = alike.to_vec();
        if let [first, others @ ..] = &mut ordered[..] {
            let sought = self.unmatched_contents(&[*first], &BTreeSet::new());
            others.sort_by_cached_key(|process| {
                let member = &self.tracked[process];
                let urgency = if scarce { member.scan_order(&self.rules) } else { 0 };
                (
                    !member.is_cgroup_memory_short(&self.rules),
                    member.overruns,
                    urgency,
                    Reverse(self.overlap_level(&sought, process)),
                )
            });
        }
        ordered
    }

    /// The unmerged contents of some processes, each without the contents of partners in the same scan. Limited to the
    /// first few processes with any such contents.
    fn unmatched_contents(&self, turns: &[ProcessId], beside: &BTreeSet<ProcessId>) -> Vec<Sketch> {
        turns
            .iter()
            .map(|turn| self.unmatched_content(turn, beside))
            .filter(|rest| !rest.is_empty())
            .take(MAX_PARTNER_SEEKERS)
            .collect()
    }

    /// The unmerged contents of one process, without the contents of partners in the same scan.
    fn unmatched_content(&self, one: &ProcessId, beside: &BTreeSet<ProcessId>) -> Sketch {
        let Some((domain, held)) = self.tracked.get(one).and_then(|one| Some((&one.domain, one.sketches.as_ref()?)))
        else {
            return Sketch::default();
        };
        let beside = beside.iter().filter(|other| *other != one).filter_map(|other| self.tracked.get(other));
        let beside = beside.filter(|other| other.domain == *domain).filter_map(|other| other.sketches.as_ref());
        beside.fold(held.unmerged.clone(), |rest, other| rest.without(&other.all))
    }

    /// How many of the sought pages a process holds, by its sketch: 0 for none, and one more for each doubling. A
    /// sketch is no more precise.
    fn overlap_level(&self, sought: &[Sketch], process: &ProcessId) -> u32 {
        let Some(held) = &self.tracked[process].sketches else { return 0 };
        let shared: Pages = sought.iter().map(|sketch| sketch.shared(&held.all)).sum();
        shared.0.checked_ilog2().map_or(0, |power| power + 1)
    }

    /// The scanned processes with a missed partner: a process of the same domain holds many of their unmerged pages,
    /// and the partners in that scan do not.
    pub(super) fn find_missed_partners(&self, turns: &[ProcessId], beside: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let others: Vec<&TrackedProcess> = self
            .tracked
            .iter()
            .filter(|(other, member)| !beside.contains(other) && member.may_be_scanned())
            .map(|(_, member)| member)
            .collect();
        let has_missed = |turn: &&ProcessId| {
            let Some(one) = self.tracked.get(turn).filter(|_| !others.is_empty()) else { return false };
            let rest = self.unmatched_content(turn, beside);
            others.iter().any(|other| other.domain == one.domain && has_large_overlap(one, &rest, other))
        };
        turns.iter().take(MAX_MISSED_PARTNER_CHECKS).filter(has_missed).copied().collect()
    }

    /// Whether the burst can ever pay for a census of these two processes.
    fn can_ever_afford_pair(&self, one: &ProcessId, other: &ProcessId) -> bool {
        self.cpu_budget
            .time_until(self.scan_cpu_seconds(&self.tracked[one]) + self.scan_cpu_seconds(&self.tracked[other]))
            .is_some()
    }

    /// Whether a single process was chosen and the burst can never pay for scanning it with a partner.
    fn can_never_afford_partner(&self, chosen: &BTreeSet<ProcessId>) -> bool {
        let (Some(one), 1) = (chosen.first(), chosen.len()) else { return false };
        let partners = self.choose_partners(&[*one], chosen);
        !partners.is_empty() && !partners.iter().any(|partner| self.can_ever_afford_pair(one, partner))
    }

    /// The best partner of the same class, and whether it holds many of the pages that `one` has not merged and the
    /// chosen processes do not hold.
    fn choose_companion(&self, one: ProcessId, chosen: &BTreeSet<ProcessId>) -> Option<(ProcessId, bool)> {
        let is_like =
            |other: &ProcessId| !chosen.contains(other) && self.similarity_class(other) == self.similarity_class(&one);
        let known = self.tracked.iter().filter(|(other, member)| is_like(other) && member.may_be_scanned());
        let rest = self.unmatched_content(&one, chosen);
        let promise = |other: &ProcessId| self.partner_rank(std::slice::from_ref(&rest), other);
        let best = take_best(&mut known.map(|(other, _)| *other).collect(), promise)?;
        Some((best, has_large_overlap(&self.tracked[&one], &rest, &self.tracked[&best])))
    }

    /// Known partners from the trust domains of the due processes. Of similar processes: the one that holds most of the
    /// sought contents, and the one that holds most of the rest. Of other processes: the one that holds most of the
    /// sought contents, and the biggest that holds any of them or has no sketch. Some scans choose one of each group at
    /// random, because a sketch does not contain all contents.
    fn choose_partners(&self, turns: &[ProcessId], chosen: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let mut partners = Vec::new();
        let domains: BTreeSet<_> = turns.iter().map(|process| &self.tracked[process].domain).collect();
        for domain in domains {
            let of_domain = |process: &ProcessId| &self.tracked[process].domain == domain;
            let turns: Vec<ProcessId> = turns.iter().copied().filter(of_domain).collect();
            let likenesses: BTreeSet<_> = turns.iter().map(|process| &self.tracked[process].similarity_key).collect();
            let is_known = |process: &ProcessId| !chosen.contains(process) && self.tracked[process].may_be_scanned();
            let known = self.tracked.keys().copied().filter(of_domain).filter(is_known);
            let (mut like, mut other): (Vec<_>, Vec<_>) =
                known.partition(|process| likenesses.contains(&self.tracked[process].similarity_key));
            let sought = self.unmatched_contents(&turns, chosen);
            let promise = |process: &ProcessId| self.partner_rank(&sought, process);
            let first = take_best(&mut like, promise);
            let known = first.and_then(|first| self.tracked[&first].sketches.as_ref());
            let without =
                |sketch: &Sketch| known.map_or_else(Sketch::default, |held| sketch.clone().without(&held.all));
            let by_chance =
                turns.first().is_some_and(|turn| self.random_u64(*turn).is_multiple_of(SCANS_PER_RANDOM_PARTNER));
            let rest: Vec<Sketch> = if by_chance { Vec::new() } else { sought.iter().map(without).collect() };
            let cheap = |process: &ProcessId| Reverse(self.tracked[process].overruns);
            let second =
                take_best(&mut like, |process| (self.overlap_per_cost(&rest, process), self.random_u64(*process)));
            let is_unknown = |process: &ProcessId| self.tracked[process].sketches.is_none();
            let others = if turns.iter().any(is_unknown) {
                [take_best(&mut other, promise), take_best(&mut other, |process| self.partner_rank(&[], process))]
            } else if by_chance {
                [take_best(&mut other, |process| (cheap(process), self.random_u64(*process))), None]
            } else {
                other.retain(|process| is_unknown(process) || self.overlap_level(&sought, process) > 0);
                [take_best(&mut other, promise), take_best(&mut other, |process| self.partner_rank(&[], process))]
            };
            partners.extend([first, second].into_iter().chain(others).flatten());
        }
        partners
    }

    /// Rank of a partner, the best last: most sought contents for its scan cost, then a low cost, then merged ranges,
    /// then its size.
    fn partner_rank(&self, sought: &[Sketch], process: &ProcessId) -> impl Ord + use<> {
        let member = &self.tracked[process];
        (self.overlap_per_cost(sought, process), member.enrolled, member.resident, *process)
    }

    /// How many of the sought pages a process holds, halved for each doubling of its scan cost; then the number of
    /// these doublings. An expensive scan beats a scan of a process that holds none of the pages.
    fn overlap_per_cost(&self, sought: &[Sketch], process: &ProcessId) -> (u32, Reverse<u32>) {
        let overran = self.tracked[process].overruns;
        (self.overlap_level(sought, process).saturating_sub(overran), Reverse(overran))
    }
}

/// Whether `other` holds many of the unmerged pages of `one`, restricted to the sought contents `rest`.
fn has_large_overlap(one: &TrackedProcess, rest: &Sketch, other: &TrackedProcess) -> bool {
    let unmerged = one.sketches.as_ref().map_or(Pages::ZERO, |held| held.unmerged.contents());
    let much = MIN_LARGE_OVERLAP.1.max(Pages(unmerged.0.div_ceil(MIN_LARGE_OVERLAP.0)));
    other.sketches.as_ref().is_some_and(|held| rest.shared(&held.all) >= much)
}

/// Remove and return the process with the highest rank.
fn take_best<K: Ord>(from: &mut Vec<ProcessId>, rank: impl Fn(&ProcessId) -> K) -> Option<ProcessId> {
    let (at, _) = from.iter().enumerate().max_by_key(|(_, process)| rank(process))?;
    Some(from.swap_remove(at))
}
