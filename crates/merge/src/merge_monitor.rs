//! Watches merged pages and unenrolls ranges that do not stay merged for long enough.
//!
//! The monitor outlives a round of merging. Pages merged in one round are watched in the next, which has nothing more
//! to plan there. Ranges that were unenrolled are not enrolled again. A refused unenroll is tried again at the next
//! check, and only the failures of the last try are reported.

use crate::decide::outcome::{EnrollChange, FailedChange};
use crate::decide::plan::MergePlan;
use crate::recheck::{CheckScope, CowSampler, RangeLifetimes, SampledRange, UnenrollPhase};
use crate::unmerge::{self, UnenrollMethod};
use pagefold_base::guard;
use pagefold_base::guard::{FrameNeed, MemoryVerdict};
use pagefold_base::merge_lifetime;
use pagefold_base::merge_lifetime::{LifetimeCriterion, LifetimeStats};
use pagefold_base::process::Process;
use pagefold_base::{Absent, AddressRange, Pages, ProcessId};
use pagefold_census::ProcessSelection;
use pagefold_host::action::{Action, ActionError, MergeAdvice};
use pagefold_host::memory_headroom::{is_memory_short, measure_headroom};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{ChangeLifetime, Session};
use pagefold_host::{Host, ProcessHandle as Handle};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Watched ranges and unenrolled ranges.
pub struct MergeMonitor<'h> {
    host: &'h dyn Host,
    sampler: CowSampler<'h>,
    /// Observations of ranges that are no longer watched.
    dropped_lifetime_stats: LifetimeStats,
    unenrolled: BTreeMap<ProcessId, UnenrolledRanges>,
    /// Unenrolled ranges whose pages merged and broke twice.
    thrashing: BTreeSet<(ProcessId, AddressRange)>,
    /// Ranges unenrolled at the last time because no page of them was merged.
    unmerged: BTreeMap<ProcessId, Vec<AddressRange>>,
    /// Ranges whose last unenroll failed.
    failed_changes: BTreeMap<ProcessId, Vec<FailedChange>>,
    /// Whether frame numbers cannot be read, so that watching is impossible.
    frames_unreadable: bool,
    /// The criterion by which merged pages are judged.
    criterion: LifetimeCriterion,
    /// Allowed COW breaks per second, if ksmd has a limited share of one CPU.
    max_breaks_per_second: Option<f64>,
    /// Approximate number of COW breaks found since the pages were last merged again.
    cow_breaks: Pages,
    /// Percent of the last ten seconds in which a task stalled on memory. From this value on memory counts as short and
    /// nothing is unenrolled.
    max_pressure_percent: Option<f64>,
}

/// Ranges of a process that were unenrolled because they did not stay merged for long enough.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnenrolledRanges {
    /// Unenrolled permanently, because Pagefold had enrolled them.
    pub enrolled_by_pagefold: Vec<AddressRange>,
    /// Unenrolled while ksmd works, because the program had enrolled them.
    pub enrolled_by_program: Vec<AddressRange>,
}

impl UnenrolledRanges {
    /// All of them.
    pub fn all_ranges(&self) -> Vec<AddressRange> {
        [&self.enrolled_by_pagefold[..], &self.enrolled_by_program[..]].concat()
    }
}

/// What a monitor has learned, for the monitor of the next daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MonitorRecord {
    /// What it observed of watched ranges.
    pub lifetimes: RangeLifetimes,
    /// The ranges unenrolled so far.
    pub unenrolled: BTreeMap<ProcessId, UnenrolledRanges>,
    /// Unenrolled ranges whose pages merged and broke twice.
    pub thrashing: BTreeSet<(ProcessId, AddressRange)>,
}

impl<'h> MergeMonitor<'h> {
    /// A monitor without ranges.
    pub fn new(host: &'h dyn Host) -> Self {
        Self {
            host,
            sampler: CowSampler::new(host),
            dropped_lifetime_stats: LifetimeStats::default(),
            unenrolled: BTreeMap::new(),
            thrashing: BTreeSet::new(),
            unmerged: BTreeMap::new(),
            failed_changes: BTreeMap::new(),
            frames_unreadable: false,
            criterion: LifetimeCriterion::default(),
            max_breaks_per_second: None,
            cow_breaks: Pages::ZERO,
            max_pressure_percent: None,
        }
    }

    /// What it has learned.
    pub fn record(&self) -> MonitorRecord {
        MonitorRecord {
            lifetimes: self.sampler.lifetimes(),
            unenrolled: self.unenrolled.clone(),
            thrashing: self.thrashing.clone(),
        }
    }

    /// Continue with what an earlier monitor has learned.
    pub fn restore(&mut self, record: MonitorRecord) {
        self.sampler.continue_lifetimes(record.lifetimes);
        (self.unenrolled, self.thrashing) = (record.unenrolled, record.thrashing);
    }

    /// Judge by ksmd's CPU limit: its share of one CPU for the watched processes.
    pub fn set_ksmd_share(&mut self, ksmd_cpu_share: f64) {
        self.max_breaks_per_second = Some(merge_lifetime::max_cow_breaks_per_second(ksmd_cpu_share));
    }

    /// Do not unenroll while memory is short: while tasks stalled on memory for this percentage of ten seconds.
    pub fn set_max_pressure(&mut self, percent: f64) {
        self.max_pressure_percent = Some(percent);
    }

    /// Set the share of one CPU that the program may use, on which the pace of checks depends.
    pub fn set_cpu_rate(&mut self, cpu_rate: f64) {
        self.sampler.set_cpu_rate(cpu_rate);
    }

    /// The pause after a check of the plan's processes that took so long.
    pub fn pause_after_check(&self, duration: Duration) -> Duration {
        self.sampler.pause_after_check(duration)
    }

    /// A merge by this plan begins.
    pub fn begin_plan(&mut self, plan: &MergePlan) {
        self.sampler.begin_plan(plan);
    }

    /// Watch the ranges of a plan as well. Call it after enrolling, since injected calls count as the target's
    /// activity.
    pub fn add_plan(&mut self, plan: &MergePlan) {
        let unenrolled = |process| self.unenrolled.get(&process).map(UnenrolledRanges::all_ranges).unwrap_or_default();
        self.sampler.add_plan(plan, unenrolled);
    }

    /// Watch ranges of a process that an earlier Pagefold enrolled as well. It is in no plan, so
    /// the next check must be of [`CheckScope::All`], to find which pages are merged.
    pub fn add_enrolled(&mut self, process: &Process, ranges: &[AddressRange]) {
        self.sampler.add_enrolled(process, ranges);
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.frames_unreadable || self.sampler.is_empty()
    }

    /// Whether any process has run since a plan was added.
    pub fn check_any_ran(&mut self) -> bool {
        !self.is_empty() && self.sampler.check_any_ran()
    }

    /// The observations so far.
    pub fn lifetime_stats(&self) -> LifetimeStats {
        self.sampler.lifetime_stats() + self.dropped_lifetime_stats
    }

    /// The ranges unenrolled so far, except those that only found no partner.
    pub fn unenrolled(&self) -> &BTreeMap<ProcessId, UnenrolledRanges> {
        &self.unenrolled
    }

    /// How often the pages of an unenrolled range had broken too soon.
    pub fn break_count(&self, process: ProcessId, range: AddressRange) -> usize {
        if self.thrashing.contains(&(process, range)) { 2 } else { 1 }
    }

    /// Ranges unenrolled at the last time, at the end of a round, because no page of them was merged. They may be
    /// enrolled again.
    pub fn unmerged(&self, process: ProcessId) -> &[AddressRange] {
        self.unmerged.get(&process).map(Vec::as_slice).unwrap_or_default()
    }

    /// Unenrolls that failed at the last try, of running processes.
    pub fn failed_changes(&self) -> impl Iterator<Item = &FailedChange> {
        let is_running = |process| pagefold_host::hold(self.host, process).is_ok();
        self.failed_changes.iter().filter(move |(process, _)| is_running(**process)).flat_map(|(_, changes)| changes)
    }

    /// The running processes whose last unenroll failed, each with its first reason.
    pub fn failed_unenrolls(&self) -> Vec<(ProcessId, String)> {
        let is_running = |process| pagefold_host::hold(self.host, process).is_ok();
        let failed = self.failed_changes.iter().filter(|(process, _)| is_running(**process));
        failed.filter_map(|(process, changes)| Some((*process, changes.first()?.why.clone()))).collect()
    }

    /// Allow an unenrolled range to be enrolled again.
    pub fn allow_again(&mut self, process: ProcessId, range: AddressRange) {
        self.thrashing.remove(&(process, range));
        if let Some(unenrolled) = self.unenrolled.get_mut(&process) {
            unenrolled.enrolled_by_pagefold.retain(|other| *other != range);
            unenrolled.enrolled_by_program.retain(|other| *other != range);
        }
    }

    /// Drop the unenrolled ranges of processes that `is_kept` rejects, and what an earlier monitor observed of them.
    pub fn retain_processes(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.sampler.retain_earlier(&is_kept);
        self.unenrolled.retain(|&process, _| is_kept(process));
        self.thrashing.retain(|&(process, _)| is_kept(process));
    }

    /// Stop watching a process that has no merged pages any more.
    pub fn forget_process(&mut self, process: ProcessId) {
        self.sampler.forget_process(process);
        self.failed_changes.remove(&process);
    }

    /// Check merged pages. Returns whether any range is unprofitable that programs had not enrolled themselves: those
    /// can be unenrolled between rounds.
    pub fn check_pages(&mut self, scope: CheckScope) -> bool {
        self.frames_unreadable =
            self.frames_unreadable || !self.sampler.is_empty() && self.sampler.check_pages(scope).is_err();
        if self.is_empty() {
            return false;
        }
        self.cow_breaks += self.sampler.cow_breaks();
        let page_bytes = self.host.page_size().bytes();
        if let Some(max_breaks) = self.max_breaks_per_second {
            self.criterion =
                merge_lifetime::criterion_for_break_limit(&self.sampler.cow_break_rates(), max_breaks, page_bytes);
        }
        self.sampler.has_unprofitable(|stats| self.criterion.is_met_by(stats, page_bytes))
    }

    /// Approximate number of COW breaks found since the last call.
    pub fn take_cow_breaks(&mut self) -> Pages {
        std::mem::take(&mut self.cow_breaks)
    }

    /// Approximate number of COW breaks found since the last call of [`Self::take_cow_breaks`].
    pub fn cow_breaks(&self) -> Pages {
        self.cow_breaks
    }

    /// Unenroll the ranges that were unprofitable at the last check, as far as memory suffices. Refused ranges stay
    /// watched. Returns the unenrolled pages of each process.
    pub fn unenroll_unprofitable(
        &mut self,
        session: &mut Session<'_>,
        phase: UnenrollPhase,
    ) -> Result<BTreeMap<ProcessId, Pages>, session::Error> {
        self.failed_changes.clear();
        self.unmerged.clear();
        if self.is_empty() {
            return Ok(BTreeMap::new());
        }
        let page_size = self.host.page_size();
        let mut by_process: BTreeMap<ProcessId, Vec<SampledRange>> = BTreeMap::new();
        let criterion = self.criterion;
        let is_profitable = |stats: &LifetimeStats| criterion.is_met_by(stats, page_size.bytes());
        for sampled in self.sampler.take_unprofitable(is_profitable, phase) {
            by_process.entry(sampled.process).or_default().push(sampled);
        }
        let mut unenrolled_pages: BTreeMap<ProcessId, Pages> = BTreeMap::new();
        for (process, ranges) in by_process {
            let (by_program, by_pagefold): (Vec<SampledRange>, Vec<SampledRange>) =
                ranges.into_iter().partition(|sampled| sampled.enrolled_by_program);
            for (ranges, lifetime) in
                [(by_pagefold, ChangeLifetime::Permanent), (by_program, ChangeLifetime::Temporary)]
            {
                // Ranges that a program enrolled itself would be enrolled again at once.
                let would_reenroll = matches!(phase, UnenrollPhase::BetweenRounds | UnenrollPhase::AfterInterruption)
                    && lifetime == ChangeLifetime::Temporary;
                if would_reenroll || ranges.is_empty() {
                    self.sampler.add_ranges(ranges);
                    continue;
                }
                let addresses = ranges.iter().map(|sampled| sampled.range).collect();
                // Profitable ranges are here only because no page of them is merged.
                let merged = ranges.iter().filter(|sampled| !is_profitable(&sampled.lifetime_stats));
                let copies = merged.map(|sampled| page_size.pages_in(sampled.range.bytes())).sum();
                let short_memory =
                    (copies > Pages::ZERO && self.is_memory_short(process)).then_some(MEMORY_SHORT_REASON);
                let failures = match short_memory.or_else(|| verdict_reason(self.memory_verdict(process, copies))) {
                    Some(why) => vec![self.failed_unenroll(process, why)],
                    None => self.unenroll_ranges(session, process, addresses, lifetime)?,
                };
                let is_missed = |sampled: &SampledRange| {
                    failures
                        .iter()
                        .any(|failure| failure.range.is_none_or(|failed| failed.overlap(sampled.range).is_some()))
                };
                let (failed, ranges): (Vec<SampledRange>, Vec<SampledRange>) = ranges.into_iter().partition(is_missed);
                self.sampler.add_ranges(failed);
                for failure in failures {
                    push_failed_change(self.failed_changes.entry(process).or_default(), failure);
                }
                self.dropped_lifetime_stats =
                    ranges.iter().fold(self.dropped_lifetime_stats, |sum, sampled| sum + sampled.lifetime_stats);
                if !ranges.is_empty() {
                    let pages: Pages = ranges.iter().map(|sampled| page_size.pages_in(sampled.range.bytes())).sum();
                    *unenrolled_pages.entry(process).or_default() += pages;
                }
                // Ranges that only found no partner may find one later.
                let (unmerged, unstable): (Vec<SampledRange>, Vec<SampledRange>) =
                    ranges.into_iter().partition(|sampled| is_profitable(&sampled.lifetime_stats));
                self.unmerged.entry(process).or_default().extend(unmerged.iter().map(|sampled| sampled.range));
                let thrashed = unstable.iter().filter(|sampled| sampled.lifetime_stats.is_thrashing(page_size.bytes()));
                self.thrashing.extend(thrashed.map(|sampled| (process, sampled.range)));
                let unenrolled = self.unenrolled.entry(process).or_default();
                let unenrolled = if lifetime == ChangeLifetime::Temporary {
                    &mut unenrolled.enrolled_by_program
                } else {
                    &mut unenrolled.enrolled_by_pagefold
                };
                unenrolled.extend(unstable.iter().map(|sampled| sampled.range));
            }
        }
        Ok(unenrolled_pages)
    }

    /// Repeat the temporary unenrolls of earlier sessions, as far as there is memory for the pages merged since.
    /// Returns the failures.
    pub fn repeat_temporary_unenroll(&self, session: &mut Session<'_>) -> Result<Vec<FailedChange>, session::Error> {
        let mut failures = Vec::new();
        for (&process, unenrolled) in
            self.unenrolled.iter().filter(|(_, unenrolled)| !unenrolled.enrolled_by_program.is_empty())
        {
            let short_memory = self.is_memory_short(process).then_some(MEMORY_SHORT_REASON);
            match short_memory.or_else(|| self.memory_failure_reason(process, unenrolled)) {
                Some(why) => failures.push(self.failed_unenroll(process, why)),
                None => failures.extend(self.unenroll_ranges(
                    session,
                    process,
                    unenrolled.enrolled_by_program.clone(),
                    ChangeLifetime::Temporary,
                )?),
            }
        }
        Ok(failures)
    }

    /// Why memory may not suffice to unenroll a program's own ranges again.
    fn memory_failure_reason(&self, process: ProcessId, unenrolled: &UnenrolledRanges) -> Option<&'static str> {
        let selection = ProcessSelection { pids: [process.pid].into(), ..ProcessSelection::default() };
        let own_ranges = |_: &dyn Handle, _: &Process| {
            Some(UnenrollMethod::Ranges(unmerge::joined(unenrolled.enrolled_by_program.clone())))
        };
        let Ok(plan) = unmerge::make_plan(self.host, &selection, &own_ranges) else {
            return Some(MEMORY_UNKNOWN_REASON);
        };
        if plan.unscanned.iter().any(|unscanned| unscanned.why != Absent::Vanished) {
            return Some(MEMORY_UNKNOWN_REASON);
        }
        verdict_reason(plan.check_memory(self.host, &plan.frame_need()).verdict)
    }

    /// Unenroll ranges. Returns the failures.
    fn unenroll_ranges(
        &self,
        session: &mut Session<'_>,
        process: ProcessId,
        ranges: Vec<AddressRange>,
        lifetime: ChangeLifetime,
    ) -> Result<Vec<FailedChange>, session::Error> {
        let action = Action::Advise { process, advice: MergeAdvice::Unmergeable, ranges };
        Ok(apply_to_process(session, process, &self.comm(process), &action, lifetime, &AtomicBool::new(false))?.missed)
    }

    /// Whether memory is short for a process, on the host or in its cgroup.
    fn is_memory_short(&self, process: ProcessId) -> bool {
        self.max_pressure_percent
            .is_some_and(|max_percent| is_memory_short(self.host, self.cgroup(process), max_percent))
    }

    fn cgroup(&self, process: ProcessId) -> Option<&str> {
        self.sampler.process(process).and_then(|facts| facts.cgroup.as_deref().ok())
    }

    fn comm(&self, process: ProcessId) -> String {
        self.sampler.process(process).map(|facts| facts.comm.clone()).unwrap_or_default()
    }

    fn failed_unenroll(&self, process: ProcessId, why: &str) -> FailedChange {
        let (pid, comm) = (process.pid, self.comm(process));
        FailedChange { change: EnrollChange::Unenroll, pid, comm, range: None, why: why.to_owned() }
    }

    /// Whether memory suffices to copy so many pages.
    fn memory_verdict(&self, process: ProcessId, copies: Pages) -> MemoryVerdict {
        let cgroup = self.cgroup(process);
        let headroom = measure_headroom(self.host, &cgroup.map(str::to_owned).into_iter().collect());
        guard::check_memory(&FrameNeed::for_cgroup(cgroup, copies, Pages::ZERO), &headroom, self.host.page_size())
            .verdict
    }
}

/// The reason for not unenrolling while memory is short.
const MEMORY_SHORT_REASON: &str = "memory is short";

/// The reason for not unenrolling where the available memory is unknown.
const MEMORY_UNKNOWN_REASON: &str = "the memory available for copies is unknown";

/// The reason for not unenrolling, by the guard's verdict.
fn verdict_reason(verdict: MemoryVerdict) -> Option<&'static str> {
    match verdict {
        MemoryVerdict::Fits => None,
        MemoryVerdict::Unknown => Some(MEMORY_UNKNOWN_REASON),
        MemoryVerdict::OverLimit | MemoryVerdict::FitsWithSwap => Some("there is no memory for copies"),
    }
}

/// Retries for a busy process: a thread that gets no CPU for a moment does not stop. For a guest's control socket the
/// first try has already waited for the answer.
const MAX_BUSY_RETRIES: usize = 2;

/// The result of an action on a process.
pub struct ApplyResult {
    /// The failed changes: of ranges, or of the whole process without a range.
    pub missed: Vec<FailedChange>,
    /// Whether it was busy at the last try.
    pub is_busy: bool,
}

/// Apply an action to a process. Memory that it has unmapped needs no unenrolling.
pub fn apply_to_process(
    session: &mut Session<'_>,
    process: ProcessId,
    comm: &str,
    action: &Action,
    lifetime: ChangeLifetime,
    stop: &AtomicBool,
) -> Result<ApplyResult, session::Error> {
    let unenrolls = matches!(action, Action::Advise { advice: MergeAdvice::Unmergeable, .. });
    let change = if unenrolls { EnrollChange::Unenroll } else { EnrollChange::Enroll };
    let failure = |range, why| FailedChange { change, pid: process.pid, comm: comm.to_owned(), range, why };
    let max_retries = if matches!(action, Action::SetQomProperty { .. }) { 0 } else { MAX_BUSY_RETRIES };
    let is_busy = |outcome: &_| matches!(outcome, Err(session::Error::Refused(ActionError::Busy(_))));
    let mut outcome = session.apply_until_stopped(action, lifetime, stop);
    for _ in 0..max_retries {
        if !is_busy(&outcome) {
            break;
        }
        outcome = session.apply_until_stopped(action, lifetime, stop);
    }
    let is_busy = is_busy(&outcome);
    let missed = match outcome {
        Ok(effect) => {
            let missed = effect.missed_ranges.into_iter().filter(|(_, why)| !(unenrolls && why.is_not_mapped()));
            missed.map(|(range, why)| failure(Some(range), why.to_string())).collect()
        }
        Err(session::Error::Refused(why)) => vec![failure(None, why.to_string())],
        Err(session::Error::HostStateUnreadable(why)) => vec![failure(None, ActionError::from(why).to_string())],
        Err(error) => return Err(error),
    };
    Ok(ApplyResult { missed, is_busy })
}

/// Record a failure; a process without a range is recorded once.
pub fn push_failed_change(changes: &mut Vec<FailedChange>, change: FailedChange) {
    if change.range.is_some() || !changes.contains(&change) {
        changes.push(change);
    }
}
