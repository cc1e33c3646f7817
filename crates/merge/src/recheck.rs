//! Watches whether merged pages stay merged.
//!
//! A page with the same bytes at every read may still be written all the time: a program that fills its work arrays
//! with zeros in each step writes zero over zero. Contents do not show this, and the kernel does not report writes. But
//! each write to a merged page breaks the sharing, and page tables show that. So merging serves as its own trial: while
//! ksmd works, a sample of pages of each range of the plan is checked repeatedly. Ranges whose pages break too soon are
//! unenrolled while few pages are merged ([`MergeMonitor`](crate::merge_monitor::MergeMonitor)).
//!
//! Two checks detect a page that broke in between and was not merged again. They miss a page that broke and merged
//! again, so rates are underestimates where ksmd is faster than the checks. Between rounds of merging ksmd is idle, so that
//! a check sees all breaks since the round before. Where that takes long, not every round has a check of all processes
//! ([`CheckScope::AllIfDue`]): breaks of pages that the next round merges again are missed then.

use crate::decide::plan::MergePlan;
use crate::verify;
use pagefold_base::merge_lifetime::{CowBreakRate, LifetimeStats};
use pagefold_base::process::Process as Facts;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{AddressRange, Pages, Pfn, ProcessId, Reading};
use pagefold_host::activity::ActivityCounters;
use pagefold_host::page_state::{EntryState, FrameLookup, PageStates};
use pagefold_host::{Host, ProcessHandle, elapsed_since, hold, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Maximum pages of a range, the unit that is unenrolled.
const MAX_PAGES_PER_RANGE: u64 = 1024;

/// Consecutive sampled pages, and the number of such stripes in a range.
const PAGES_PER_STRIPE: u64 = 16;
const STRIPES_PER_RANGE: u64 = 8;

/// Minimum pause between two checks of all processes by [`CheckScope::AllIfDue`].
const MIN_PAUSE_BETWEEN_ALL: Duration = Duration::from_secs(5);

/// Share of the permitted CPU time that these checks may take.
const ALL_CHECKS_CPU_SHARE: f64 = 0.05;

/// Share of one CPU that checks of the current plan's processes may take during a merge.
const MAX_PLANNED_CHECKS_CPU_SHARE: f64 = 0.02;

/// Share of the permitted CPU time that these checks may take.
const PLANNED_CHECKS_RATE_SHARE: f64 = 0.1;

/// Approximate number of frames read together: each takes 32 bytes meanwhile.
const FRAMES_PER_READ: usize = 1 << 18;

/// A part of a planned range that is judged by a sample of its pages.
#[derive(Debug)]
pub struct SampledRange {
    /// The process.
    pub process: ProcessId,
    /// The range.
    pub range: AddressRange,
    /// Whether the program enrolled it itself.
    pub enrolled_by_program: bool,
    /// The observations of it.
    pub lifetime_stats: LifetimeStats,
    sampled_since: Instant,
    pages: Box<[SampledPage]>,
    /// Sampled pages that were merged at the last check.
    merged: Pages,
}

/// A sampled page.
#[derive(Clone, Copy, Debug, Default)]
struct SampledPage(u8);

impl SampledPage {
    /// Whether it was merged at the previous check.
    const WAS_MERGED: u8 = 1 << 7;
    /// Whether it is merged at the current check.
    const IS_MERGED: u8 = 1 << 6;

    fn was_merged(self) -> bool {
        self.0 & Self::WAS_MERGED != 0
    }

    fn is_merged(self) -> bool {
        self.0 & Self::IS_MERGED != 0
    }

    /// Number of breaks, up to a maximum.
    fn break_count(self) -> u8 {
        self.0 & (Self::IS_MERGED - 1)
    }

    fn set_break_count(&mut self, breaks: u8) {
        self.0 = self.0 & !(Self::IS_MERGED - 1) | breaks.min(Self::IS_MERGED - 1);
    }

    fn set_merged(&mut self, is_merged: bool) {
        self.0 = self.0 & !Self::IS_MERGED | if is_merged { Self::IS_MERGED } else { 0 };
    }

    /// Finish a check. Returns whether the page broke.
    fn finish_check(&mut self) -> bool {
        let is_broken = self.was_merged() && !self.is_merged();
        let break_count = (self.break_count() + u8::from(is_broken)).min(Self::IS_MERGED - 1);
        self.0 = break_count | if self.is_merged() { Self::WAS_MERGED | Self::IS_MERGED } else { 0 };
        is_broken
    }
}

/// The processes whose pages are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckScope {
    /// All processes.
    All,
    /// Those of the current plan. All processes, if the last check of all is long enough ago for the time that it took.
    AllIfDue,
    /// Those of the current plan that have run since the last check.
    PlannedThatRan,
    /// Processes that have run since the last check: other processes write nothing.
    RanSinceCheck,
    /// Processes that have had a page fault since the last check, as each write to a merged page is one. Use it only
    /// while ksmd is idle: ksmd merges pages without a fault.
    FaultedSinceCheck,
}

/// When ranges are unenrolled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnenrollPhase {
    /// While ksmd works, or merged pages are watched.
    DuringMerge,
    /// After a round has settled: also ranges without merged pages of processes that ran. Such a range was written
    /// before the first check or lost its partners, and ksmd would only scan it.
    AfterSettled,
    /// After a round was cut short: also all ranges in which ksmd has merged nothing so far.
    AfterInterruption,
    /// Between rounds: only ranges that Pagefold enrolled.
    BetweenRounds,
}

/// A watched process.
struct SampledProcess {
    process: Facts,
    /// Its sampled ranges, by address.
    ranges: Vec<SampledRange>,
    /// Its activity at the last check, and the time of that check.
    activity: Reading<ActivityCounters>,
    checked_at: Instant,
    /// Whether it has run while watched.
    ever_ran: bool,
}

/// What was observed of a range, for the sampler of the next daemon.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RangeLifetime {
    /// The observations.
    pub stats: LifetimeStats,
    /// Number of breaks of each sampled page; empty if none broke.
    pub page_breaks: Vec<u8>,
}

/// What was observed of ranges.
pub type RangeLifetimes = BTreeMap<(ProcessId, AddressRange), RangeLifetime>;

/// Sampled ranges of plans, by process and address.
pub struct CowSampler<'h> {
    host: &'h dyn Host,
    processes: BTreeMap<ProcessId, SampledProcess>,
    /// What an earlier sampler observed of ranges that are not watched yet.
    earlier: RangeLifetimes,
    /// Processes of the current plan, or of the last one.
    planned: BTreeSet<ProcessId>,
    /// The share of one CPU that the program may use.
    cpu_rate: f64,
    /// When [`CheckScope::AllIfDue`] covers all processes again.
    check_all_at: Instant,
    any_ran: bool,
    /// COW breaks that the last check found, extrapolated from the sample.
    cow_breaks: f64,
}

impl<'h> CowSampler<'h> {
    /// A sampler without ranges.
    pub fn new(host: &'h dyn Host) -> Self {
        Self {
            host,
            processes: BTreeMap::new(),
            earlier: BTreeMap::new(),
            planned: BTreeSet::new(),
            cpu_rate: 1.0,
            check_all_at: host.now(),
            any_ran: false,
            cow_breaks: 0.0,
        }
    }

    /// Set the share of one CPU that the program may use: one by default, and at least a thousandth.
    pub fn set_cpu_rate(&mut self, cpu_rate: f64) {
        self.cpu_rate = cpu_rate.max(0.001);
    }

    /// The pause after a check of the plan's processes that took so long.
    pub fn pause_after_check(&self, duration: Duration) -> Duration {
        duration.div_f64(MAX_PLANNED_CHECKS_CPU_SHARE.min(self.cpu_rate * PLANNED_CHECKS_RATE_SHARE))
    }

    /// A merge by this plan begins.
    pub fn begin_plan(&mut self, plan: &MergePlan) {
        self.planned = plan.targets.iter().map(|target| target.process.id).collect();
    }

    /// Cut a plan into ranges, and watch those that are not watched yet, except for `excluded` ranges.
    pub fn add_plan(&mut self, plan: &MergePlan, excluded: impl Fn(ProcessId) -> Vec<AddressRange>) {
        self.any_ran = false;
        for target in &plan.targets {
            let ranges = target.ranges.iter().map(|planned| (planned.range, planned.enrolled));
            let new_ranges = self.cut_into_samples(&target.process, ranges, excluded(target.process.id));
            self.add_ranges(new_ranges);
        }
    }

    /// Watch ranges of a process that Pagefold enrolled earlier, except for those that are watched already.
    pub fn add_enrolled(&mut self, process: &Facts, ranges: &[AddressRange]) {
        let by_pagefold = ranges.iter().map(|range| (*range, false));
        let new_ranges = self.cut_into_samples(process, by_pagefold, Vec::new());
        self.add_ranges(new_ranges);
    }

    /// Cut ranges of a process, each with whether the program enrolled it itself, except for those that are watched
    /// already or `skipped`. The process is watched from now on.
    fn cut_into_samples(
        &mut self,
        process: &Facts,
        ranges: impl Iterator<Item = (AddressRange, bool)>,
        mut skipped: Vec<AddressRange>,
    ) -> Vec<SampledRange> {
        let (host, id, page_bytes) = (self.host, process.id, self.host.page_size().bytes());
        // Unenrolling a range splits no huge page beside it.
        let max_range_bytes = (MAX_PAGES_PER_RANGE * page_bytes).max(observe::huge_page_bytes(host).unwrap_or(0));
        let watched = self.processes.entry(id).or_insert_with(|| SampledProcess {
            process: process.clone(),
            ranges: Vec::new(),
            activity: read_activity(host, id),
            checked_at: host.now(),
            ever_ran: false,
        });
        skipped.extend(watched.ranges.iter().map(|sampled| sampled.range));
        let skipped = AddressRange::union(skipped);
        let parts = ranges.flat_map(|(range, enrolled_by_program)| {
            range.subtract(&skipped).into_iter().map(move |part| (part, enrolled_by_program))
        });
        let samples = parts.flat_map(|(part, enrolled_by_program)| {
            part.cut_at_multiples(max_range_bytes)
                .map(move |range| SampledRange::new(id, range, enrolled_by_program, page_bytes, host.now()))
        });
        let mut samples: Vec<SampledRange> = samples.collect();
        samples.iter_mut().for_each(|sampled| sampled.take_earlier(&mut self.earlier));
        samples
    }

    /// What was observed of all ranges, also by earlier samplers.
    pub fn lifetimes(&self) -> RangeLifetimes {
        let lifetime = |sampled: &SampledRange| ((sampled.process, sampled.range), sampled.lifetime());
        self.earlier.clone().into_iter().chain(self.ranges().map(lifetime)).collect()
    }

    /// All sampled ranges.
    fn ranges(&self) -> impl Iterator<Item = &SampledRange> {
        self.processes.values().flat_map(|watched| &watched.ranges)
    }

    /// Continue the observations of an earlier sampler once its ranges are watched again.
    pub fn continue_lifetimes(&mut self, lifetimes: RangeLifetimes) {
        self.earlier = lifetimes;
    }

    /// Drop what earlier samplers observed of processes that `is_kept` rejects.
    pub fn retain_earlier(&mut self, is_kept: impl Fn(ProcessId) -> bool) {
        self.earlier.retain(|&(process, _), _| is_kept(process));
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.ranges().next().is_none()
    }

    /// The facts of a watched process.
    pub fn process(&self, process: ProcessId) -> Option<&Facts> {
        self.processes.get(&process).map(|watched| &watched.process)
    }

    /// Whether any process of the plan has run since it was added. A process that does not run writes nothing.
    pub fn check_any_ran(&mut self) -> bool {
        let has_run = |(&process, watched): (&ProcessId, &SampledProcess)| {
            let activity = read_activity(self.host, process);
            activity.is_ok() && activity != watched.activity
        };
        let planned = self.planned.iter().filter_map(|process| self.processes.get_key_value(process));
        self.any_ran = self.any_ran || planned.into_iter().any(has_run);
        self.any_ran
    }

    /// The observations of all ranges.
    pub fn lifetime_stats(&self) -> LifetimeStats {
        self.ranges().fold(LifetimeStats::default(), |sum, sampled| sum + sampled.lifetime_stats)
    }

    /// Approximate number of merged pages that the last check found broken.
    pub fn cow_breaks(&self) -> Pages {
        Pages(self.cow_breaks as u64)
    }

    /// The cost of keeping each range merged, for ranges with COW breaks.
    pub fn cow_break_rates(&self) -> Vec<CowBreakRate> {
        let page_bytes = self.host.page_size().bytes();
        let break_rate = |sampled: &SampledRange| {
            let rate = sampled.lifetime_stats.min_break_rate();
            let seconds = elapsed_since(self.host, sampled.sampled_since).as_secs_f64();
            let breaks = sampled.lifetime_stats.cow_breaks.0 as f64 * sampled.pages_per_sample(page_bytes) / seconds;
            (rate > 0.0 && seconds > 0.0)
                .then(|| CowBreakRate { lifetime_seconds: 1.0 / rate, breaks_per_second: breaks })
        };
        self.ranges().filter_map(break_rate).collect()
    }

    /// Check pages again; pages that are not checked count as unchanged. Time counts only for processes that ever ran:
    /// other processes cannot have written. Ended processes are dropped: their pages were freed, not written.
    pub fn check_pages(&mut self, scope: CheckScope) -> Reading<()> {
        let (host, now, page_bytes) = (self.host, self.host.now(), self.host.page_size().bytes());
        let is_all_due = now >= self.check_all_at;
        let mut intervals: BTreeMap<ProcessId, Duration> = BTreeMap::new();
        let mut without_faults: BTreeSet<ProcessId> = BTreeSet::new();
        self.processes.retain(|&process, watched| {
            let is_planned = self.planned.contains(&process);
            if !is_planned && (scope == CheckScope::PlannedThatRan || scope == CheckScope::AllIfDue && !is_all_due) {
                return true;
            }
            let activity = read_activity(host, process);
            if activity.is_err() {
                return false;
            }
            let has_run = activity != watched.activity;
            watched.ever_ran |= has_run;
            self.any_ran |= has_run && is_planned;
            if has_run || matches!(scope, CheckScope::All | CheckScope::AllIfDue) {
                let elapsed = now - std::mem::replace(&mut watched.checked_at, now);
                intervals.insert(process, if watched.ever_ran { elapsed } else { Duration::ZERO });
            }
            let has_no_fault =
                matches!((&activity, &watched.activity), (Ok(now), Ok(last)) if now.has_same_faults(*last));
            if scope == CheckScope::FaultedSinceCheck && has_no_fault {
                without_faults.insert(process);
            }
            watched.activity = activity;
            true
        });
        self.read_pages(|process| intervals.contains_key(&process) && !without_faults.contains(&process))?;
        self.cow_breaks = 0.0;
        for (process, interval) in intervals {
            let is_read = !without_faults.contains(&process);
            for sampled in self.processes.get_mut(&process).into_iter().flat_map(|watched| &mut watched.ranges) {
                let merged_before = sampled.merged;
                let (broken, broken_twice) = if is_read { sampled.finish_check() } else { Default::default() };
                sampled.lifetime_stats.add_interval(merged_before, (broken, broken_twice), interval);
                self.cow_breaks += broken.0 as f64 * sampled.pages_per_sample(page_bytes);
            }
        }
        if scope == CheckScope::AllIfDue && is_all_due {
            let pause = elapsed_since(host, now).div_f64(self.cpu_rate * ALL_CHECKS_CPU_SHARE);
            self.check_all_at = host.now() + MIN_PAUSE_BETWEEN_ALL.max(pause);
        }
        Ok(())
    }

    /// Read the sampled pages of some processes.
    fn read_pages(&mut self, is_read: impl Fn(ProcessId) -> bool) -> Reading<()> {
        let (host, page_bytes) = (self.host, self.host.page_size().bytes());
        let mut states: PageStates<(u32, u32)> = PageStates::default();
        let mut read: Vec<&mut SampledRange> = Vec::new();
        for (&process, watched) in self.processes.iter_mut().filter(|(process, _)| is_read(**process)) {
            let Ok(handle) = hold(host, process) else { continue };
            for sampled in &mut watched.ranges {
                let index = read.len() as u32;
                sampled.check_pages(&*handle, page_bytes, &mut |position, frame| {
                    states.push(frame, (index, position as u32));
                });
                read.push(sampled);
                if states.len() >= FRAMES_PER_READ {
                    record_merged(host, &mut states, &mut read)?;
                }
            }
        }
        record_merged(host, &mut states, &mut read)
    }

    /// Add ranges of watched processes.
    pub fn add_ranges(&mut self, ranges: impl IntoIterator<Item = SampledRange>) {
        let mut added_to = BTreeSet::new();
        for sampled in ranges {
            if let Some(watched) = self.processes.get_mut(&sampled.process) {
                added_to.insert(sampled.process);
                watched.ranges.push(sampled);
            }
        }
        for process in added_to {
            if let Some(watched) = self.processes.get_mut(&process) {
                watched.ranges.sort_by_key(|sampled| sampled.range);
            }
        }
    }

    /// Stop watching a process.
    pub fn forget_process(&mut self, process: ProcessId) {
        self.processes.remove(&process);
        self.earlier.retain(|&(other, _), _| other != process);
    }

    /// Whether any range is unprofitable that programs had not enrolled themselves.
    pub fn has_unprofitable(&self, is_profitable: impl Fn(&LifetimeStats) -> bool) -> bool {
        !self.ranges().all(|sampled| sampled.enrolled_by_program || is_profitable(&sampled.lifetime_stats))
    }

    /// Take out unprofitable ranges and, depending on the phase, ranges of the plan's processes without merged pages. The
    /// latter are checked by their sample first, and then whole.
    pub fn take_unprofitable(
        &mut self,
        is_profitable: impl Fn(&LifetimeStats) -> bool,
        phase: UnenrollPhase,
    ) -> Vec<SampledRange> {
        let must_be_merged = |ever_ran: bool| match phase {
            UnenrollPhase::AfterSettled => ever_ran,
            UnenrollPhase::AfterInterruption => true,
            UnenrollPhase::DuringMerge | UnenrollPhase::BetweenRounds => false,
        };
        let host = self.host;
        let has_merged_pages = |sampled: &SampledRange| {
            sampled.merged > Pages::ZERO
                || !verify::count_range_pages(host, sampled.process, sampled.range)
                    .is_ok_and(|counts| counts.merged + counts.zero == Pages::ZERO)
        };
        let mut unprofitable = Vec::new();
        for (process, watched) in &mut self.processes {
            let must_be_merged = self.planned.contains(process) && must_be_merged(watched.ever_ran);
            unprofitable.extend(watched.ranges.extract_if(.., |sampled| {
                !is_profitable(&sampled.lifetime_stats) || must_be_merged && !has_merged_pages(sampled)
            }));
        }
        unprofitable
    }
}

/// Record whether pages are merged, each given by its range and its position there.
fn record_merged(
    host: &dyn Host,
    states: &mut PageStates<(u32, u32)>,
    ranges: &mut [&mut SampledRange],
) -> Reading<()> {
    states.resolve(host, |(range, position), state| {
        ranges[range as usize].pages[position as usize].set_merged(state.is_merged());
    })
}

/// The activity of a process so far: often read, so in ticks.
fn read_activity(host: &dyn Host, process: ProcessId) -> Reading<ActivityCounters> {
    ActivityCounters::read_in_ticks(&*hold(host, process)?)
}

impl SampledRange {
    fn new(process: ProcessId, range: AddressRange, enrolled_by_program: bool, page_bytes: u64, now: Instant) -> Self {
        let sampled_pages = (range.bytes().0 / page_bytes).min(PAGES_PER_STRIPE * STRIPES_PER_RANGE);
        let pages = vec![SampledPage::default(); sampled_pages as usize].into();
        Self {
            process,
            range,
            enrolled_by_program,
            lifetime_stats: LifetimeStats::default(),
            sampled_since: now,
            pages,
            merged: Pages::ZERO,
        }
    }

    /// What was observed of it.
    fn lifetime(&self) -> RangeLifetime {
        let has_breaks = self.pages.iter().any(|page| page.break_count() > 0);
        let page_breaks = self.pages.iter().filter(|_| has_breaks).map(|page| page.break_count()).collect();
        RangeLifetime { stats: self.lifetime_stats, page_breaks }
    }

    /// Continue what an earlier sampler observed of this range, or of ranges within it.
    fn take_earlier(&mut self, earlier: &mut RangeLifetimes) {
        let first = (self.process, AddressRange { start: self.range.start, end: 0 });
        let last = (self.process, AddressRange { start: self.range.end, end: 0 });
        let within: Vec<_> =
            earlier.range(first..last).map(|(key, _)| *key).filter(|(_, range)| range.end <= self.range.end).collect();
        for key in within {
            let Some(lifetime) = earlier.remove(&key) else { continue };
            self.lifetime_stats = self.lifetime_stats + lifetime.stats;
            // Only the same range has the same sample.
            if key.1 == self.range {
                self.pages.iter_mut().zip(lifetime.page_breaks).for_each(|(page, breaks)| page.set_break_count(breaks));
            }
        }
    }

    /// Finish a check of its pages. Returns how many broke, and how many of them for the second time.
    fn finish_check(&mut self) -> (Pages, Pages) {
        let (mut broken, mut broken_twice) = (Pages::ZERO, Pages::ZERO);
        self.merged = Pages::ZERO;
        for page in &mut self.pages {
            if page.finish_check() {
                broken += Pages(1);
                broken_twice += Pages(u64::from(page.break_count() == 2));
            }
            self.merged += Pages(u64::from(page.is_merged()));
        }
        (broken, broken_twice)
    }

    /// The number of pages that each sampled page stands for.
    fn pages_per_sample(&self, page_bytes: u64) -> f64 {
        (self.range.bytes().0 / page_bytes) as f64 / self.pages.len().max(1) as f64
    }

    /// The sampled stripes: one in each slot of the range, at a random offset. Equal offsets would mislead where
    /// programs write the same page of each slot.
    fn stripes(&self, page_bytes: u64) -> impl Iterator<Item = AddressRange> + use<> {
        let (range, pages) = (self.range, self.range.bytes().0 / page_bytes);
        let (stripes, len) = if pages <= PAGES_PER_STRIPE * STRIPES_PER_RANGE {
            (1, pages)
        } else {
            (STRIPES_PER_RANGE, PAGES_PER_STRIPE)
        };
        let seed = splitmix64(u64::from(self.process.pid.0) ^ range.start);
        (0..stripes).map(move |i| {
            let (first, next) = (i * pages / stripes, (i + 1) * pages / stripes);
            let start = range.start + (first + splitmix64(seed ^ i) % (next - first - len + 1)) * page_bytes;
            AddressRange { start, end: start + len * page_bytes }
        })
    }

    /// Check the sampled pages, except those in swap, which do not count as written. Each counts as not merged until
    /// recorded; `visit` gets the position and frame of each page that may be merged.
    fn check_pages(&mut self, handle: &dyn ProcessHandle, page_bytes: u64, visit: &mut dyn FnMut(usize, Pfn)) {
        let mut position = 0;
        for stripe in self.stripes(page_bytes) {
            let mappings = handle.mappings(stripe).unwrap_or_default();
            for (mapping, sample) in mappings.iter().zip(position..).filter(|(mapping, _)| !mapping.swapped) {
                self.pages[sample].set_merged(false);
                if let EntryState::InFrame(frame) = EntryState::from_entry(mapping, FrameLookup::Shared) {
                    visit(sample, frame);
                }
            }
            position += (stripe.bytes().0 / page_bytes) as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::plan::{EnrollMethod, PlanTarget, PlannedRange};
    use pagefold_base::domain::TrustDomain;
    use pagefold_base::{Absent, Bytes, Pid};
    use pagefold_host::fake_host::{FakeHost, MERGED_PAGE_NAME};

    const PAGE_BYTES: u64 = 4096;
    const PID: u32 = 7;
    /// Pages from one stripe to the next in a whole range.
    const PAGES_PER_STRIPE_SLOT: u64 = MAX_PAGES_PER_RANGE / STRIPES_PER_RANGE;

    /// A process of two whole ranges; in each slot so many pages are missing and the rest is merged. Returns its
    /// sampler.
    fn sampler_with_gaps(host: &FakeHost, missing: u64) -> CowSampler<'_> {
        let range = AddressRange { start: MAX_PAGES_PER_RANGE * PAGE_BYTES, end: 3 * MAX_PAGES_PER_RANGE * PAGE_BYTES };
        host.map_pages(PID, (range.start, range.end), MERGED_PAGE_NAME, true);
        for start in (range.start..range.end).step_by((PAGES_PER_STRIPE_SLOT * PAGE_BYTES) as usize) {
            host.unmap_pages(PID, (start, start + missing * PAGE_BYTES));
        }
        let planned = PlannedRange {
            range,
            region: range,
            pages: Pages(2 * MAX_PAGES_PER_RANGE),
            merging: Pages(2 * MAX_PAGES_PER_RANGE),
            zero: Pages::ZERO,
            freed_bytes: Bytes(MAX_PAGES_PER_RANGE * PAGE_BYTES),
            split_huge_pages: Pages::ZERO,
            enrolled: false,
            late: false,
        };
        let target = PlanTarget {
            process: Facts::absent(ProcessId { pid: Pid(PID), start_time: 1 }, &Absent::Denied),
            domain: TrustDomain::Host,
            ranges: vec![planned],
            huge_page_bytes: Bytes::ZERO,
            enroll_method: EnrollMethod::InProcess,
        };
        let mut sampler = CowSampler::new(host);
        let plan = MergePlan { targets: vec![target], ..MergePlan::default() };
        sampler.begin_plan(&plan);
        sampler.add_plan(&plan, |_| Vec::new());
        sampler
    }

    /// In any layout of its pages: also if none of the sampled pages is present.
    #[test]
    fn range_with_any_merged_page_is_kept() {
        for missing in [
            0,
            PAGES_PER_STRIPE,
            PAGES_PER_STRIPE_SLOT - PAGES_PER_STRIPE,
            PAGES_PER_STRIPE_SLOT - 1,
            PAGES_PER_STRIPE_SLOT,
        ] {
            for phase in [
                UnenrollPhase::DuringMerge,
                UnenrollPhase::BetweenRounds,
                UnenrollPhase::AfterInterruption,
                UnenrollPhase::AfterSettled,
            ] {
                for ran in [0, 1] {
                    let host = FakeHost::booted();
                    let mut sampler = sampler_with_gaps(&host, missing);
                    host.set_cpu_ticks(PID, ran);
                    sampler.check_pages(CheckScope::All).unwrap();
                    let unmerged = sampler.take_unprofitable(|_| true, phase);
                    let phase_applies =
                        phase == UnenrollPhase::AfterInterruption || phase == UnenrollPhase::AfterSettled && ran > 0;
                    let expected = if missing == PAGES_PER_STRIPE_SLOT && phase_applies { 2 } else { 0 };
                    assert_eq!(unmerged.len(), expected, "{missing} {phase:?} {ran}");
                }
            }
        }
    }

    /// Pages that stayed merged for long are not given up for one write after a restart.
    #[test]
    fn observations_continue_after_a_restart() {
        let host = FakeHost::booted();
        let whole = AddressRange { start: MAX_PAGES_PER_RANGE * PAGE_BYTES, end: 3 * MAX_PAGES_PER_RANGE * PAGE_BYTES };
        let mut previous = sampler_with_gaps(&host, 0);
        previous.check_pages(CheckScope::All).unwrap();
        let mut lifetimes = previous.lifetimes();
        assert_eq!(lifetimes.len(), 2);
        for lifetime in lifetimes.values_mut() {
            lifetime.stats.page_seconds = 1e9;
            lifetime.page_breaks = vec![1; (PAGES_PER_STRIPE * STRIPES_PER_RANGE) as usize];
        }
        for continues in [true, false] {
            host.map_pages(PID, (whole.start, whole.end), MERGED_PAGE_NAME, true);
            let mut next = CowSampler::new(&host);
            if continues {
                next.continue_lifetimes(lifetimes.clone());
                assert_eq!(next.lifetimes(), lifetimes, "they are passed on before the ranges are watched again");
            }
            let process = Facts::absent(ProcessId { pid: Pid(PID), start_time: 1 }, &Absent::Denied);
            next.add_enrolled(&process, &[whole]);
            next.check_pages(CheckScope::All).unwrap();
            host.map_pages(PID, (whole.start, whole.end), "", true);
            host.set_cpu_ticks(PID, if continues { 1 } else { 2 });
            next.check_pages(CheckScope::RanSinceCheck).unwrap();
            let stats = next.lifetime_stats();
            assert_eq!(stats.repeated_cow_breaks > Pages::ZERO, continues, "{stats:?}");
            let is_profitable = |stats: &LifetimeStats| stats.is_profitable(PAGE_BYTES);
            let dropped = next.take_unprofitable(is_profitable, UnenrollPhase::BetweenRounds);
            assert_eq!(dropped.len(), if continues { 0 } else { 2 });
        }
    }

    /// The process is in an earlier plan only.
    #[test]
    fn processes_without_a_plan_are_checked_seldom_during_merges() {
        let host = FakeHost::booted();
        host.enable_virtual_time();
        let mut sampler = sampler_with_gaps(&host, 0);
        sampler.check_pages(CheckScope::AllIfDue).unwrap();
        sampler.begin_plan(&MergePlan::default());
        let whole = (MAX_PAGES_PER_RANGE * PAGE_BYTES, 3 * MAX_PAGES_PER_RANGE * PAGE_BYTES);
        host.map_pages(PID, whole, "", true);
        host.set_cpu_ticks(PID, 1);
        for (millis, scope, is_checked) in [
            (0, CheckScope::AllIfDue, false),
            (4999, CheckScope::AllIfDue, false),
            (1, CheckScope::PlannedThatRan, false),
            (0, CheckScope::AllIfDue, true),
        ] {
            host.sleep(Duration::from_millis(millis));
            sampler.check_pages(scope).unwrap();
            assert_eq!(sampler.cow_breaks() > Pages::ZERO, is_checked, "{millis} {scope:?}");
        }
    }

    #[test]
    fn checks_take_a_share_of_the_permitted_cpu_time() {
        let host = FakeHost::booted();
        let mut sampler = CowSampler::new(&host);
        let mut pause = |cpu_rate| {
            sampler.set_cpu_rate(cpu_rate);
            sampler.pause_after_check(Duration::from_millis(10)).as_secs_f64()
        };
        let expected = [(1.0, 0.5), (0.2, 0.5), (0.1, 1.0), (0.01, 10.0)];
        for (cpu_rate, seconds) in expected {
            assert!((pause(cpu_rate) - seconds).abs() < 1e-9, "{cpu_rate}: {}", pause(cpu_rate));
        }
    }

    #[test]
    fn processes_of_the_plan_are_always_checked() {
        for scope in [CheckScope::AllIfDue, CheckScope::PlannedThatRan] {
            let host = FakeHost::booted();
            host.enable_virtual_time();
            let mut sampler = sampler_with_gaps(&host, 0);
            sampler.check_pages(CheckScope::AllIfDue).unwrap();
            host.map_pages(PID, (MAX_PAGES_PER_RANGE * PAGE_BYTES, 3 * MAX_PAGES_PER_RANGE * PAGE_BYTES), "", true);
            host.set_cpu_ticks(PID, 1);
            sampler.check_pages(scope).unwrap();
            assert_eq!(sampler.cow_breaks(), Pages(2 * MAX_PAGES_PER_RANGE), "{scope:?}");
        }
    }

    /// A sampler whose ranges are cut in another way adds up what was observed within them.
    #[test]
    fn observations_of_parts_are_added_up() {
        let host = FakeHost::booted();
        let process = ProcessId { pid: Pid(PID), start_time: 1 };
        let range = |first: u64, end: u64| AddressRange { start: first * PAGE_BYTES, end: end * PAGE_BYTES };
        let stats = |page_seconds| LifetimeStats { page_seconds, ..LifetimeStats::default() };
        let earlier = |first, end, seconds| {
            ((process, range(first, end)), RangeLifetime { stats: stats(seconds), page_breaks: Vec::new() })
        };
        let mut sampler = CowSampler::new(&host);
        let elsewhere = earlier(90, 110, 100.0);
        sampler.continue_lifetimes([earlier(1, 5, 2.0), earlier(5, 7, 3.0), elsewhere.clone()].into());
        sampler.add_enrolled(&Facts::absent(process, &Absent::Denied), &[range(0, 100)]);
        let expected = ((process, range(0, 100)), RangeLifetime { stats: stats(5.0), page_breaks: Vec::new() });
        assert_eq!(sampler.lifetimes(), [expected, elsewhere].into());
        sampler.retain_earlier(|_| false);
        sampler.forget_process(process);
        assert_eq!(sampler.lifetimes(), BTreeMap::new());
    }

    /// A program that writes the same pages of each slot, and not the first ones.
    #[test]
    fn synchronized_cow_breaks_are_detected() {
        let host = FakeHost::booted();
        let mut sampler = sampler_with_gaps(&host, 0);
        sampler.check_pages(CheckScope::All).unwrap();
        for start in (MAX_PAGES_PER_RANGE..3 * MAX_PAGES_PER_RANGE).step_by(PAGES_PER_STRIPE_SLOT as usize) {
            host.map_pages(
                PID,
                ((start + PAGES_PER_STRIPE) * PAGE_BYTES, (start + PAGES_PER_STRIPE_SLOT) * PAGE_BYTES),
                "",
                true,
            );
        }
        host.set_cpu_ticks(PID, 1);
        sampler.check_pages(CheckScope::RanSinceCheck).unwrap();
        let broken = sampler.lifetime_stats().cow_breaks;
        // Seven of eight pages are broken.
        assert!(broken.0 > STRIPES_PER_RANGE * PAGES_PER_STRIPE, "{broken:?}");
    }

    #[test]
    fn stripes_lie_within_their_slots() {
        for pages in [1, 16, 127, 128, 129, 512, 513, 1023, 1024] {
            let range = AddressRange { start: 77 * PAGE_BYTES, end: (77 + pages) * PAGE_BYTES };
            let process = ProcessId { pid: Pid(PID), start_time: 1 };
            let stripes: Vec<AddressRange> =
                SampledRange::new(process, range, false, PAGE_BYTES, Instant::now()).stripes(PAGE_BYTES).collect();
            assert!(stripes.is_sorted_by(|a, b| a.end <= b.start), "{stripes:?}");
            assert!(stripes[0].start >= range.start && stripes.last().unwrap().end <= range.end, "{stripes:?}");
            let sampled_pages: u64 = stripes.iter().map(|stripe| stripe.bytes().0 / PAGE_BYTES).sum();
            assert_eq!(sampled_pages, pages.min(STRIPES_PER_RANGE * PAGES_PER_STRIPE), "{pages}");
        }
    }
}
