//! Watching whether merged pages stay merged.
//!
//! A page that holds the same bytes at every look may be written all the time: a program that fills its work arrays
//! with zeros in each step writes zero over zero. Contents cannot tell, and the kernel tells nothing of writes as such.
//! But each write to a merged page breaks the sharing, and page tables tell that. So the merge is its own trial: while
//! ksmd works, some pages of each piece of the plan are looked at again and again, and pieces whose pages break too
//! soon to pay are withdrawn while little has been merged ([`Trial`](crate::merge_monitor::MergeMonitor)).
//!
//! Two looks see a page that broke in between and was not merged again since; of one that broke and merged again they
//! see nothing, so that rates are underestimates where ksmd is faster than the looks. Between rounds of merging ksmd
//! rests, and the look that begins a round sees all that broke since the one before.

use crate::decide::plan::MergePlan;
use crate::verify::{self, ProcessActivity};
use pagefold_base::merge_lifetime::{CowBreakRate, LifetimeStats};
use pagefold_base::process::Process as Facts;
use pagefold_base::splitmix::splitmix64;
use pagefold_base::{AddressRange, Pages, Pfn, ProcessId, Reading};
use pagefold_host::{Host, ProcessHandle, observe};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Pages of a piece at most: what is withdrawn together.
const MAX_PAGES_PER_RANGE: u64 = 1024;

/// Consecutive pages that are looked at, and how many such stripes of a piece are.
const PAGES_PER_STRIPE: u64 = 16;
const STRIPES_PER_RANGE: u64 = 8;

/// Frames that are asked for together, about: each takes 32 bytes meanwhile.
const FRAMES_PER_READ: usize = 1 << 18;

/// A part of a planned range that is judged by some of its pages.
#[derive(Debug)]
pub struct SampledRange {
    /// Whose.
    pub process: ProcessId,
    /// Where.
    pub range: AddressRange,
    /// Whether the program had enrolled it itself.
    pub enrolled_by_program: bool,
    /// What was seen of it.
    pub lifetime_stats: LifetimeStats,
    sampled_since: Instant,
    pages: Box<[SampledPage]>,
}

/// A page that is looked at.
#[derive(Clone, Copy, Debug, Default)]
struct SampledPage(u8);

impl SampledPage {
    /// Whether it was merged when it was looked at before.
    const WAS_MERGED: u8 = 1 << 7;
    /// Whether it is by the look under way.
    const IS_MERGED: u8 = 1 << 6;

    fn was_merged(self) -> bool {
        self.0 & Self::WAS_MERGED != 0
    }

    fn is_merged(self) -> bool {
        self.0 & Self::IS_MERGED != 0
    }

    /// How often it broke, as far as it counts.
    fn break_count(self) -> u8 {
        self.0 & (Self::IS_MERGED - 1)
    }

    fn set_merged(&mut self, is_merged: bool) {
        self.0 = self.0 & !Self::IS_MERGED | if is_merged { Self::IS_MERGED } else { 0 };
    }

    /// A look ends. Tells whether it broke.
    fn finish_check(&mut self) -> bool {
        let breaks = self.was_merged() && !self.is_merged();
        let times = (self.break_count() + u8::from(breaks)).min(Self::IS_MERGED - 1);
        self.0 = times | if self.is_merged() { Self::WAS_MERGED | Self::IS_MERGED } else { 0 };
        breaks
    }
}

/// Whose pages are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckScope {
    /// Everybody's.
    All,
    /// Of those that have run since the last look: others write nothing.
    RanSinceCheck,
    /// Of those that have had a page fault since the last look, as each write to a merged page is one. Only where ksmd
    /// has rested since, which merges pages without.
    FaultedSinceCheck,
}

/// When something is withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnenrollPhase {
    /// While ksmd works, or merged pages are watched.
    DuringMerge,
    /// Once a round has settled: also what holds nothing merged of processes that ran, for it was written before anybody
    /// looked, or has lost its partners, and would only be scanned.
    AfterSettled,
    /// When a round was cut short: also all that ksmd has merged nothing of so far.
    AfterInterruption,
    /// Between rounds: only what Pagefold enrolled.
    BetweenRounds,
}

/// A process that is watched.
struct SampledProcess {
    process: Facts,
    /// What it had done at the last look at it, and when that was.
    activity: Reading<ProcessActivity>,
    checked_at: Instant,
    /// Whether it has run since it is watched.
    ever_ran: bool,
}

/// The pieces of plans, by process and address.
pub struct CowSampler<'h> {
    host: &'h dyn Host,
    processes: BTreeMap<ProcessId, SampledProcess>,
    ranges: Vec<SampledRange>,
    any_ran: bool,
    /// Merged pages that the last look found written, those included that stand behind the ones that are looked at.
    cow_breaks: f64,
}

impl<'h> CowSampler<'h> {
    /// Nothing yet.
    pub fn new(host: &'h dyn Host) -> Self {
        Self { host, processes: BTreeMap::new(), ranges: Vec::new(), any_ran: false, cow_breaks: 0.0 }
    }

    /// Cut a plan into pieces, and watch those that are not watched yet, but for what lies in `without`.
    pub fn add_plan(&mut self, plan: &MergePlan, excluded: impl Fn(ProcessId) -> Vec<AddressRange>) {
        let page = self.host.page_size().bytes();
        // Withdrawing a piece splits no huge page that lies beside it.
        let piece = (MAX_PAGES_PER_RANGE * page).max(observe::huge_page_bytes(self.host).unwrap_or(0));
        self.any_ran = false;
        let mut pieces = Vec::new();
        for target in &plan.targets {
            let process = target.process.id;
            self.processes.entry(process).or_insert_with(|| SampledProcess {
                process: target.process.clone(),
                activity: verify::read_activity(self.host, process),
                checked_at: Instant::now(),
                ever_ran: false,
            });
            let mut known = excluded(process);
            known.extend(self.ranges.iter().filter(|piece| piece.process == process).map(|piece| piece.range));
            let known = AddressRange::union(known);
            for planned in &target.ranges {
                for part in planned.range.subtract(&known) {
                    pieces.extend(
                        part.cut_at_multiples(piece)
                            .map(|range| SampledRange::new(process, range, planned.enrolled, page)),
                    );
                }
            }
        }
        self.add_ranges(pieces);
    }

    /// Whether there is nothing to watch.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// What is known of a process that is watched.
    pub fn process(&self, process: ProcessId) -> Option<&Facts> {
        self.processes.get(&process).map(|watched| &watched.process)
    }

    /// Whether any process has run since a plan was added. One that does not run writes nothing.
    pub fn check_any_ran(&mut self) -> bool {
        let moved = |(&process, watched): (&ProcessId, &SampledProcess)| {
            let now = verify::read_activity(self.host, process);
            now.is_ok() && now != watched.activity
        };
        self.any_ran = self.any_ran || self.processes.iter().any(moved);
        self.any_ran
    }

    /// What was seen of all pieces.
    pub fn lifetime_stats(&self) -> LifetimeStats {
        self.ranges.iter().fold(LifetimeStats::default(), |sum, piece| sum + piece.lifetime_stats)
    }

    /// About how many merged pages the last look found written.
    pub fn cow_breaks(&self) -> Pages {
        Pages(self.cow_breaks as u64)
    }

    /// What keeping each piece merged costs, as far as any of it was written.
    pub fn cow_break_rates(&self) -> Vec<CowBreakRate> {
        let page = self.host.page_size().bytes();
        let of = |piece: &SampledRange| {
            let rate = piece.lifetime_stats.min_break_rate();
            let seconds = piece.sampled_since.elapsed().as_secs_f64();
            let breaks = piece.lifetime_stats.cow_breaks.0 as f64 * piece.pages_per_sample(page) / seconds;
            (rate > 0.0 && seconds > 0.0)
                .then(|| CowBreakRate { lifetime_seconds: 1.0 / rate, breaks_per_second: breaks })
        };
        self.ranges.iter().filter_map(of).collect()
    }

    /// Look again at pages. Time counts for those processes that ever ran: one that never did cannot have written.
    /// Processes that have ended are forgotten: all of their pages went away, and nothing of it was written.
    pub fn check_pages(&mut self, scope: CheckScope) -> Reading<()> {
        let now = Instant::now();
        let mut elapsed: BTreeMap<ProcessId, Duration> = BTreeMap::new();
        let mut still: BTreeSet<ProcessId> = BTreeSet::new();
        self.processes.retain(|&process, watched| {
            let done = verify::read_activity(self.host, process);
            let there = done.is_ok();
            let ran = there && done != watched.activity;
            watched.ever_ran |= ran;
            self.any_ran |= ran;
            if there && (ran || scope == CheckScope::All) {
                let since = now - std::mem::replace(&mut watched.checked_at, now);
                elapsed.insert(process, if watched.ever_ran { since } else { Duration::ZERO });
            }
            let faults = |done: &Reading<ProcessActivity>| done.as_ref().ok().map(|done| done.page_faults);
            if scope == CheckScope::FaultedSinceCheck && faults(&done) == faults(&watched.activity) {
                still.insert(process);
            }
            watched.activity = done;
            there
        });
        self.ranges.retain(|piece| self.processes.contains_key(&piece.process));
        let page = self.host.page_size().bytes();
        // A page of which nothing is known now is taken to be as it was.
        for page in self.ranges.iter_mut().flat_map(|piece| &mut piece.pages) {
            page.set_merged(page.was_merged());
        }
        let mut frames: Vec<(Pfn, u32, u32)> = Vec::new();
        let mut first = 0;
        while let Some(process) = self.ranges.get(first).map(|piece| piece.process) {
            let count = self.ranges[first..].partition_point(|piece| piece.process == process);
            if elapsed.contains_key(&process)
                && !still.contains(&process)
                && let Ok(handle) = pagefold_host::hold(self.host, process)
            {
                for number in first..first + count {
                    self.ranges[number].check_pages(&*handle, page, &mut |at, frame| {
                        frames.extend(frame.map(|frame| (frame, number as u32, at as u32)));
                    });
                    if frames.len() >= FRAMES_PER_READ {
                        self.record_merged(&mut frames)?;
                    }
                }
            }
            first += count;
        }
        self.record_merged(&mut frames)?;
        self.cow_breaks = 0.0;
        for piece in &mut self.ranges {
            let Some(&elapsed) = elapsed.get(&piece.process) else { continue };
            let were = piece.pages.iter().filter(|page| page.was_merged()).count() as u64;
            let (mut broken, mut twice) = (Pages::ZERO, Pages::ZERO);
            for page in &mut piece.pages {
                if page.finish_check() {
                    broken += Pages(1);
                    twice += Pages(u64::from(page.break_count() == 2));
                }
            }
            piece.lifetime_stats.add_interval(Pages(were), (broken, twice), elapsed);
            self.cow_breaks += broken.0 as f64 * piece.pages_per_sample(page);
        }
        Ok(())
    }

    /// Tell of the pages of these frames, each with its piece and its position there, whether they are merged.
    fn record_merged(&mut self, frames: &mut Vec<(Pfn, u32, u32)>) -> Reading<()> {
        frames.sort_unstable();
        let numbers: Vec<Pfn> = frames.iter().map(|&(frame, ..)| frame).collect();
        let flags = self.host.frame_flags(&numbers)?;
        for ((_, piece, at), flags) in frames.drain(..).zip(flags) {
            self.ranges[piece as usize].pages[at as usize].set_merged(flags.is_ksm() || flags.is_zero_page());
        }
        Ok(())
    }

    /// Take up pieces.
    pub fn add_ranges(&mut self, ranges: impl IntoIterator<Item = SampledRange>) {
        self.ranges.extend(ranges);
        self.ranges.sort_by_key(|piece| (piece.process, piece.range));
    }

    /// Watch a process no longer.
    pub fn forget_process(&mut self, process: ProcessId) {
        self.processes.remove(&process);
        self.ranges.retain(|piece| piece.process != process);
    }

    /// Whether any piece does not pay of those that programs had not enrolled themselves.
    pub fn has_unprofitable(&self, is_profitable: impl Fn(&LifetimeStats) -> bool) -> bool {
        !self.ranges.iter().all(|piece| piece.enrolled_by_program || is_profitable(&piece.lifetime_stats))
    }

    /// Take out the pieces that do not pay, and those of which nothing is merged where it is the moment for it: of what is
    /// looked at of them, and then of all of them.
    pub fn take_unprofitable(
        &mut self,
        is_profitable: impl Fn(&LifetimeStats) -> bool,
        phase: UnenrollPhase,
    ) -> Vec<SampledRange> {
        let ran = |piece: &SampledRange| self.processes.get(&piece.process).is_some_and(|watched| watched.ever_ran);
        let idle = |piece: &SampledRange| match phase {
            UnenrollPhase::AfterSettled => ran(piece),
            UnenrollPhase::AfterInterruption => true,
            UnenrollPhase::DuringMerge | UnenrollPhase::BetweenRounds => false,
        };
        let merged = |piece: &SampledRange| {
            piece.pages.iter().any(|page| page.was_merged())
                || !verify::count_range_pages(self.host, piece.process, piece.range)
                    .is_ok_and(|found| found.merged + found.zero == Pages::ZERO)
        };
        let keep = |piece: &SampledRange| is_profitable(&piece.lifetime_stats) && (!idle(piece) || merged(piece));
        let (keep, drop) = std::mem::take(&mut self.ranges).into_iter().partition(keep);
        self.ranges = keep;
        drop
    }
}

impl SampledRange {
    fn new(process: ProcessId, range: AddressRange, own: bool, page: u64) -> Self {
        let watched = (range.bytes().0 / page).min(PAGES_PER_STRIPE * STRIPES_PER_RANGE);
        let pages = vec![SampledPage::default(); watched as usize].into();
        Self {
            process,
            range,
            enrolled_by_program: own,
            lifetime_stats: LifetimeStats::default(),
            sampled_since: Instant::now(),
            pages,
        }
    }

    /// For how many pages each of those stands that are looked at.
    fn pages_per_sample(&self, page: u64) -> f64 {
        (self.range.bytes().0 / page) as f64 / self.pages.len().max(1) as f64
    }

    /// What of it is looked at: a stripe of each part of it, somewhere in that part, or programs that do the same to the
    /// same page of each part would be taken for that.
    fn stripes(&self, page: u64) -> impl Iterator<Item = AddressRange> + use<> {
        let (range, pages) = (self.range, self.range.bytes().0 / page);
        let (stripes, len) = if pages <= PAGES_PER_STRIPE * STRIPES_PER_RANGE {
            (1, pages)
        } else {
            (STRIPES_PER_RANGE, PAGES_PER_STRIPE)
        };
        let seed = splitmix64(u64::from(self.process.pid.0) ^ range.start);
        (0..stripes).map(move |i| {
            let (first, next) = (i * pages / stripes, (i + 1) * pages / stripes);
            let start = range.start + (first + splitmix64(seed ^ i) % (next - first - len + 1)) * page;
            AddressRange { start, end: start + len * page }
        })
    }

    /// Look at the watched pages that are not swapped out, which is not to be written: each counts as not merged until
    /// it is told, and `note` gets the position of each with its frame, if others map that too.
    fn check_pages(&mut self, handle: &dyn ProcessHandle, page: u64, note: &mut dyn FnMut(usize, Option<Pfn>)) {
        let mut position = 0;
        for stripe in self.stripes(page) {
            let mappings = handle.mappings(stripe).unwrap_or_default();
            for (mapping, at) in mappings.iter().zip(position..).filter(|(mapping, _)| !mapping.swapped) {
                self.pages[at].set_merged(false);
                let shared = mapping.present && !mapping.file && !mapping.exclusive;
                note(at, mapping.frame.filter(|_| shared));
            }
            position += (stripe.bytes().0 / page) as usize;
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
    /// As many pages as lie between two stripes of a whole piece.
    const PAGES_PER_STRIPE_SLOT: u64 = MAX_PAGES_PER_RANGE / STRIPES_PER_RANGE;

    /// A process of two whole pieces, of which in each part so many pages are not there and the others are merged, and
    /// what watches it.
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
        let mut watch = CowSampler::new(host);
        watch.add_plan(&MergePlan { targets: vec![target], ..MergePlan::default() }, |_| Vec::new());
        watch
    }

    /// However its pages are laid out: also where none of those that are looked at is there.
    #[test]
    fn range_with_any_merged_page_is_kept() {
        for missing in [
            0,
            PAGES_PER_STRIPE,
            PAGES_PER_STRIPE_SLOT - PAGES_PER_STRIPE,
            PAGES_PER_STRIPE_SLOT - 1,
            PAGES_PER_STRIPE_SLOT,
        ] {
            for moment in [
                UnenrollPhase::DuringMerge,
                UnenrollPhase::BetweenRounds,
                UnenrollPhase::AfterInterruption,
                UnenrollPhase::AfterSettled,
            ] {
                for ran in [0, 1] {
                    let host = FakeHost::booted();
                    let mut watch = sampler_with_gaps(&host, missing);
                    host.set_cpu_ticks(PID, ran);
                    watch.check_pages(CheckScope::All).unwrap();
                    let idle = watch.take_unprofitable(|_| true, moment);
                    let is_moment =
                        moment == UnenrollPhase::AfterInterruption || moment == UnenrollPhase::AfterSettled && ran > 0;
                    let expected = if missing == PAGES_PER_STRIPE_SLOT && is_moment { 2 } else { 0 };
                    assert_eq!(idle.len(), expected, "{missing} {moment:?} {ran}");
                }
            }
        }
    }

    /// A program that writes the same pages of each part, and rests in the first ones.
    #[test]
    fn synchronized_cow_breaks_are_detected() {
        let host = FakeHost::booted();
        let mut watch = sampler_with_gaps(&host, 0);
        watch.check_pages(CheckScope::All).unwrap();
        for start in (MAX_PAGES_PER_RANGE..3 * MAX_PAGES_PER_RANGE).step_by(PAGES_PER_STRIPE_SLOT as usize) {
            host.map_pages(
                PID,
                ((start + PAGES_PER_STRIPE) * PAGE_BYTES, (start + PAGES_PER_STRIPE_SLOT) * PAGE_BYTES),
                "",
                true,
            );
        }
        host.set_cpu_ticks(PID, 1);
        watch.check_pages(CheckScope::RanSinceCheck).unwrap();
        let broken = watch.lifetime_stats().cow_breaks;
        // Seven of eight pages are.
        assert!(broken.0 > STRIPES_PER_RANGE * PAGES_PER_STRIPE, "{broken:?}");
    }

    #[test]
    fn stripes_lie_within_their_slots() {
        for pages in [1, 16, 127, 128, 129, 512, 513, 1023, 1024] {
            let range = AddressRange { start: 77 * PAGE_BYTES, end: (77 + pages) * PAGE_BYTES };
            let process = ProcessId { pid: Pid(PID), start_time: 1 };
            let stripes: Vec<AddressRange> =
                SampledRange::new(process, range, false, PAGE_BYTES).stripes(PAGE_BYTES).collect();
            assert!(stripes.is_sorted_by(|a, b| a.end <= b.start), "{stripes:?}");
            assert!(stripes[0].start >= range.start && stripes.last().unwrap().end <= range.end, "{stripes:?}");
            let watched: u64 = stripes.iter().map(|stripe| stripe.bytes().0 / PAGE_BYTES).sum();
            assert_eq!(watched, pages.min(STRIPES_PER_RANGE * PAGES_PER_STRIPE), "{pages}");
        }
    }
}
