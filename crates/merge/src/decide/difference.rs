//! Why what a merge reached is not what was predicted, figure by figure.

use crate::decide::outcome::{Change, End, Fate, Missed, NEARLY_ALL, Outcome, Regions};
use crate::decide::plan::PlannedRange;
use pagefold_base::ksm::RMAP_ITEM_BYTES;
use pagefold_base::units::{AddressRange, Bytes, PageSize};
use std::time::Duration;

/// A figure of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Figure {
    /// Bytes saved, gross.
    Saved,
    /// Bytes of ksmd's metadata.
    Metadata,
    /// Seconds of ksmd's CPU time.
    KsmdCpu,
    /// Huge pages split.
    HugePages,
    /// Regions added to the processes.
    Regions,
    /// Seconds from the first enrolment until nearly all is merged.
    Wall,
    /// Bytes of `MemAvailable`: what is saved, net, should be more of it.
    Available,
}

/// A part of the difference between what was reached and what was predicted.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Of which figure.
    pub of: Figure,
    /// By how much it is more than predicted, in the figure's unit; less if negative.
    pub by: f64,
    /// Why: a phrase that says what that much is.
    pub why: &'static str,
}

/// Reasons of one figure, which together are the whole difference.
struct Reasons {
    of: Figure,
    rest: f64,
    reasons: Vec<Difference>,
}

impl Reasons {
    fn new(of: Figure, reached: f64, predicted: f64) -> Self {
        Self { of, rest: reached - predicted, reasons: Vec::new() }
    }

    /// What may be a part of the difference: no more of it than there is.
    fn up_to(&mut self, by: f64, why: &'static str) {
        self.exactly(if by < 0.0 { by.max(self.rest.min(0.0)) } else { by.min(self.rest.max(0.0)) }, why);
    }

    /// What is known to be a part of the difference, whatever works against it.
    fn exactly(&mut self, by: f64, why: &'static str) {
        if by.abs() > 1e-9 {
            self.rest -= by;
            self.reasons.push(Difference { of: self.of, by, why });
        }
    }

    /// What is left, by its sign.
    fn rest(mut self, less: &'static str, more: &'static str) -> Vec<Difference> {
        let rest = self.rest;
        self.exactly(rest, if rest < 0.0 { less } else { more });
        self.reasons
    }
}

/// What ksmd takes to pass a page that is merged already: 0.31 s for 0.79 M looks at four guests, on an AMD EPYC with
/// Linux 6.18.
const REVISIT_SECONDS: f64 = 0.4e-6;

const ENDED: &str = "in processes that ended";
const MISSED: &str = "could not be enrolled";
const WITHDRAWN: &str = "did not stay merged, and withdrawn";

impl Outcome {
    /// Why what was reached is not what was predicted: the differences of a figure add up to the whole.
    ///
    /// Effects that are opposite are told side by side. What is saved is followed content by content ([`Fates`]):
    /// exactly in a plan of few pages, from a sample otherwise, whose error is in the last of the reasons. Of the other
    /// figures a part of the plan stands for its share of the prediction, and what is measured of none is called not
    /// explained.
    ///
    /// [`Fates`]: crate::decide::outcome::Fates
    pub fn differences(&self, page_size: PageSize, huge_page: Bytes) -> Vec<Difference> {
        let mut all = self.of_saved(page_size);
        all.extend(self.of_metadata());
        all.extend(self.of_ksmd());
        all.extend(self.of_huge_pages(huge_page));
        all.extend(self.of_regions());
        all.extend(self.of_wall());
        all.extend(self.of_available(page_size));
        all
    }

    fn of_saved(&self, page_size: PageSize) -> Vec<Difference> {
        let bytes = |frames: f64| frames * page_size.bytes() as f64;
        let predicted = self.plan.predicted.reach.freed.0 as f64;
        let mut saved = Reasons::new(Figure::Saved, bytes(self.saved().0 as f64), bytes(predicted));
        let each = if self.fates.frees > 0.0 { predicted / self.fates.frees } else { 0.0 };
        for (&fate, lost) in &self.fates.lost {
            let why = match fate {
                Fate::Ended => ENDED,
                Fate::Beside => "beside the guests' memory, where their control sockets do not reach",
                Fate::Missed => MISSED,
                Fate::Withdrawn => WITHDRAWN,
                Fate::Written => "written or given back since the census",
                Fate::Swapped => "swapped out since the census",
                Fate::Idle if self.end == End::Settled => "not merged in the end, and withdrawn",
                Fate::Idle => "not merged before it ended, and withdrawn",
                Fate::Merged | Fate::Alone if self.end == End::Settled => {
                    "as they were, without a partner that ksmd came upon"
                }
                Fate::Merged | Fate::Alone => "not merged before it ended",
            };
            saved.exactly(-bytes((lost * each).round()), why);
        }
        saved.rest(
            "not explained by the contents that were followed",
            "contents that came since, or partners outside of the plan",
        )
    }

    fn of_metadata(&self) -> Vec<Difference> {
        let bytes = |pages: u64| (pages * RMAP_ITEM_BYTES) as f64;
        let items = self.after.rmap_items.saturating_sub(self.before.rmap_items).0;
        let predicted = self.plan.predicted.reach.metadata().0 as f64;
        let mut metadata = Reasons::new(Figure::Metadata, bytes(items), predicted);
        let pages = |range: &PlannedRange| range.pages.0 * RMAP_ITEM_BYTES;
        metadata.exactly(-self.ended(pages), ENDED);
        metadata.exactly(-self.missed(pages), MISSED);
        metadata.up_to(-self.withdrawn(pages), WITHDRAWN);
        // They have no page of their own any more that ksmd would come upon (mm/ksm.c, `get_next_rmap_item`).
        let zeros = self.after.zero.saturating_sub(self.before.zero);
        metadata.up_to(-bytes(zeros.0), "pages of zeros, of which ksmd keeps nothing once it comes by again");
        let targets = self.plan.targets.iter().flat_map(|target| &target.ranges);
        let enrolled: u64 = targets.filter(|range| range.enrolled).map(|range| range.pages.0).sum();
        metadata.up_to(-bytes(enrolled.min(self.before.rmap_items.0)), "kept by ksmd before");
        let came = bytes(self.after.present.0) - bytes(self.before.present.0);
        metadata.up_to(came, if came < 0.0 { "pages that went away since" } else { "pages that came since" });
        let settled = self.end == End::Settled;
        let late = "pages that ksmd had not come to before it ended";
        let fewer = if settled { "not explained: pages that ksmd did not come to?" } else { late };
        metadata.rest(fewer, "not explained: other ranges enrolled?")
    }

    /// ksmd's time is its looks at pages times what one of them takes. Looks beyond two at each page are mostly at pages
    /// that are merged already, and count as such. Looks are the host's, those at pages of others included; before
    /// 6.10 the kernel leaves out those of the batch in which a scan ends (mm/ksm.c, `ksm_do_scan`), and before 6.6 it
    /// does not count them.
    fn of_ksmd(&self) -> Vec<Difference> {
        let Ok(reached) = self.ksmd.as_ref().map(Duration::as_secs_f64) else { return Vec::new() };
        let predicted = self.plan.predicted.ksmd.as_secs_f64();
        let mut cpu = Reasons::new(Figure::KsmdCpu, reached, predicted);
        // Each page is reckoned to be looked at twice ([`crate::decide::plan::Speed`]).
        let looks = 2.0 * self.plan.predicted.reach.scanned.0 as f64;
        match &self.looks {
            Ok(seen) if looks > 0.0 => {
                let further = seen.0 as f64 - looks;
                let more = further * if further < 0.0 { predicted / looks } else { REVISIT_SECONDS };
                let fewer = "looked less often than twice at each page";
                cpu.exactly(more, if more < 0.0 { fewer } else { "looked again, or at others" });
                cpu.rest("a look was quicker than reckoned", "a look took longer than reckoned")
            }
            _ => cpu.rest("not explained: fewer or quicker looks", "not explained: more or slower looks"),
        }
    }

    fn of_huge_pages(&self, huge_page: Bytes) -> Vec<Difference> {
        let (before, Ok(after)) = (self.huge.0, &self.huge.1) else { return Vec::new() };
        if before.0 == 0 || huge_page.0 == 0 {
            return Vec::new();
        }
        let split = before.0.saturating_sub(after.0).div_ceil(huge_page.0);
        let mut huge = Reasons::new(Figure::HugePages, split as f64, self.plan.predicted.reach.huge_split.0 as f64);
        let pages = |range: &PlannedRange| range.huge_split.0;
        let gone = self.ended.iter().map(|&target| self.plan.targets[target].huge.0).sum::<u64>();
        huge.exactly((gone / huge_page.0) as f64 - self.ended(pages), ENDED);
        huge.up_to(-self.missed(pages), MISSED);
        huge.up_to(-self.withdrawn(pages), WITHDRAWN);
        huge.rest(
            "not explained: held nothing any more that merged, or came since?",
            "not explained: split by the programs, by boundaries, or by contents that came since?",
        )
    }

    fn of_regions(&self) -> Vec<Difference> {
        let Regions { before, now, planned, withdrawn } = self.regions;
        let predicted = self.plan.predicted.regions_added as f64;
        let mut regions = Reasons::new(Figure::Regions, now as f64 - before as f64, predicted);
        let ended = self.ended(PlannedRange::edges);
        regions.exactly(-ended, ENDED);
        // Of the boundaries of the plan those that are not there.
        let absent = predicted - ended - planned as f64;
        let missed = self.missed(PlannedRange::edges).min(absent.max(0.0));
        regions.exactly(-missed, MISSED);
        regions
            .exactly(missed - absent, "boundaries of the plan that are none: side by side, at an edge, or withdrawn");
        regions.exactly(withdrawn as f64, "boundaries of parts that were withdrawn");
        regions.rest("unmapped by the programs since, or joined", "mapped by the programs since, or cut")
    }

    /// It takes what ksmd's CPU time takes at its share of a CPU.
    fn of_wall(&self) -> Vec<Difference> {
        let predicted = self.plan.predicted;
        let (Some(reached), Some(last)) = (self.wall(), self.reached(NEARLY_ALL)) else { return Vec::new() };
        let mut wall = Reasons::new(Figure::Wall, reached.as_secs_f64(), predicted.wall.as_secs_f64());
        if !predicted.ksmd.is_zero() && self.ksmd.is_ok() {
            let stretch = predicted.wall.as_secs_f64() / predicted.ksmd.as_secs_f64();
            let more = (last.ksmd.as_secs_f64() - predicted.ksmd.as_secs_f64()) * stretch;
            wall.exactly(
                more,
                if more < 0.0 { "ksmd had used less CPU by then" } else { "ksmd had used more CPU by then" },
            );
        }
        wall.rest(
            "ksmd had more than its share for a while",
            "enrolling, and ksmd had less than its share: it slept, or others had the CPU",
        )
    }

    fn of_available(&self, page_size: PageSize) -> Vec<Difference> {
        let bytes = |bytes: Bytes| bytes.0 as f64;
        let (Ok(before), Ok(after)) = self.available else { return Vec::new() };
        let (net, predicted) = (self.net(page_size).0 as f64, self.plan.predicted.reach.net(page_size).0 as f64);
        let mut available = Reasons::new(Figure::Available, bytes(after) - bytes(before), predicted);
        available.exactly(net - predicted, "what is saved, net, came to that: see above");
        if let Ok(resident) = &self.resident {
            // Pages of zeros that were merged are saved already.
            let zeros = bytes(page_size.of(self.after.zero.saturating_sub(self.before.zero)));
            let came = bytes(resident.targets.1) + zeros - bytes(resident.targets.0);
            available.exactly(-came, if came > 0.0 { "the targets took" } else { "the targets gave back, or ended" });
            let own = bytes(resident.own.1) - bytes(resident.own.0);
            available.exactly(-own, if own > 0.0 { "pagefold itself holds" } else { "pagefold itself gave back" });
        }
        let (others_took, others_gave) = ("others took, page tables and the kernel among them", "others gave back");
        available.rest(others_took, others_gave)
    }

    /// What the targets that ended stand for.
    fn ended(&self, of: impl Fn(&PlannedRange) -> u64) -> f64 {
        self.ended.iter().map(|&target| self.stands_for(target, None, &of)).sum()
    }

    /// What could not be enrolled stands for.
    fn missed(&self, of: impl Fn(&PlannedRange) -> u64) -> f64 {
        let of_one = |missed: &Missed| {
            let target = self.plan.targets.iter().position(|target| target.process.id.pid == missed.pid)?;
            (!self.ended.contains(&target)).then(|| self.stands_for(target, missed.range, &of))
        };
        self.missed.iter().filter(|missed| missed.change == Change::Enrol).filter_map(of_one).sum()
    }

    /// What was withdrawn stands for.
    fn withdrawn(&self, of: impl Fn(&PlannedRange) -> u64) -> f64 {
        let living = self.withdrawn.iter().filter(|(target, _)| !self.ended.contains(target));
        let ranges = living.flat_map(|(&target, ranges)| ranges.iter().map(move |&range| (target, range)));
        ranges.map(|(target, range)| self.stands_for(target, Some(range), &of)).sum()
    }

    /// The share of a figure that a target, or a part of it, stands for.
    fn stands_for(&self, target: usize, part: Option<AddressRange>, of: impl Fn(&PlannedRange) -> u64) -> f64 {
        let share = |range: &PlannedRange| match part {
            None => of(range) as f64,
            Some(part) => {
                let common = range.range.overlap(part).map_or(0, |common| common.bytes().0);
                of(range) as f64 * common as f64 / range.range.bytes().0.max(1) as f64
            }
        };
        self.plan.targets[target].ranges.iter().map(share).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::outcome::tests::{outcome, page_size};
    use crate::decide::outcome::{Fate, Fates, Found, Resident};
    use pagefold_base::units::{Pages, Pid, ProcessId};
    use std::collections::BTreeMap;

    const HUGE: Bytes = Bytes(2 << 20);

    /// The reasons of one figure, in frames for what is saved.
    fn reasons(outcome: &Outcome, of: Figure) -> Vec<(f64, &'static str)> {
        let unit = if of == Figure::Saved { page_size().bytes() as f64 } else { 1.0 };
        let all = outcome.differences(page_size(), HUGE).into_iter().filter(|difference| difference.of == of);
        all.map(|difference| (difference.by / unit, difference.why)).collect()
    }

    fn saved(outcome: &Outcome) -> Vec<(f64, &'static str)> {
        let reasons = reasons(outcome, Figure::Saved);
        let sum: f64 = reasons.iter().map(|(frames, _)| frames).sum();
        assert_eq!(sum, outcome.saved().0 as f64 - 100.0, "they are the difference");
        reasons
    }

    #[test]
    fn what_was_predicted_needs_no_reason() {
        let mut outcome = outcome(End::Settled, 100);
        assert!(saved(&outcome).is_empty());
        assert!(reasons(&outcome, Figure::Metadata).is_empty());
        outcome.ksmd = Ok(Duration::from_millis(4));
        outcome.looks = Ok(Pages(400));
        outcome.plan.predicted.ksmd = Duration::from_millis(4);
        outcome.plan.predicted.wall = Duration::from_millis(40);
        outcome.timeline[3].ksmd = Duration::from_millis(4);
        outcome.plan.predicted.regions_added = 3;
        outcome.regions = Regions { before: 10, now: 13, planned: 3, withdrawn: 0 };
        assert!(outcome.differences(page_size(), HUGE).is_empty(), "{:?}", outcome.differences(page_size(), HUGE));
    }

    /// What became of so many pairs of pages, one frame each.
    fn pairs(of: &[(u64, [Fate; 2])]) -> Fates {
        let mut fates = Fates::default();
        of.iter().for_each(|(count, pair)| (0..*count).for_each(|_| fates.count(1.0, pair)));
        fates
    }

    #[test]
    fn what_is_missing_is_told_by_reason() {
        use Fate::{Alone, Ended, Idle, Merged, Missed as NotEnrolled, Withdrawn, Written};
        let check = |end: End, reached: u64, fates: &[(u64, [Fate; 2])], expected: &[(f64, &'static str)]| {
            let outcome = Outcome { fates: pairs(fates), ..outcome(end, reached) };
            assert_eq!(saved(&outcome), expected, "{fates:?}");
        };
        let whole = (50, [Merged, Merged]);
        check(End::Settled, 50, &[whole, (50, [Alone, Ended])], &[(-50.0, ENDED)]);
        check(
            End::Settled,
            50,
            &[whole, (40, [Withdrawn; 2]), (10, [NotEnrolled, Alone])],
            &[(-10.0, MISSED), (-40.0, WITHDRAWN)],
        );
        let written = "written or given back since the census";
        let alone = "as they were, without a partner that ksmd came upon";
        check(
            End::Settled,
            50,
            &[whole, (30, [Merged, Written]), (20, [Alone; 2])],
            &[(-30.0, written), (-20.0, alone)],
        );
        let idle = "not merged in the end, and withdrawn";
        check(
            End::Settled,
            50,
            &[whole, (30, [Written, Idle]), (10, [Alone, Idle]), (10, [Idle; 2])],
            &[(-30.0, written), (-5.0, alone), (-15.0, idle)],
        );
        let late = [(-20.0, "not merged before it ended"), (-30.0, "not merged before it ended, and withdrawn")];
        check(End::Deadline, 50, &[whole, (20, [Alone; 2]), (30, [Idle; 2])], &late);
        // A sample of a tenth.
        check(End::Settled, 80, &[(8, [Merged; 2]), (2, [Written, Alone])], &[(-20.0, written)]);
        check(
            End::Settled,
            70,
            &[(8, [Merged; 2]), (2, [Written, Alone])],
            &[(-20.0, written), (-10.0, "not explained by the contents that were followed")],
        );
    }

    #[test]
    fn opposite_effects_do_not_hide_each_other() {
        let fates = pairs(&[(70, [Fate::Merged; 2]), (30, [Fate::Ended; 2])]);
        let more = "contents that came since, or partners outside of the plan";
        assert_eq!(saved(&Outcome { fates, ..outcome(End::Settled, 100) }), [(-30.0, ENDED), (30.0, more)]);
        assert_eq!(saved(&outcome(End::Settled, 130)), [(30.0, more)]);
    }

    #[test]
    fn pages_that_came_or_went_are_told_as_far_as_they_explain_anything() {
        let metadata = |items: u64, present: (u64, u64)| {
            let mut outcome = outcome(End::Settled, 100);
            (outcome.before.present, outcome.after.present) = (Pages(present.0), Pages(present.1));
            outcome.after.rmap_items = Pages(items);
            reasons(&outcome, Figure::Metadata).into_iter().map(|(by, why)| (by / 64.0, why)).collect::<Vec<_>>()
        };
        assert!(metadata(200, (200, 230)).is_empty());
        assert_eq!(metadata(220, (200, 230)), [(20.0, "pages that came since")]);
        let [came, (rest, _)] = metadata(250, (200, 230))[..] else { panic!("two reasons") };
        assert_eq!((came, rest), ((30.0, "pages that came since"), 20.0));
        assert_eq!(metadata(190, (200, 190)), [(-10.0, "pages that went away since")]);
    }

    #[test]
    fn ksmd_keeps_nothing_of_pages_of_zeros() {
        let mut outcome = outcome(End::Settled, 100);
        outcome.after = Found { zero: Pages(60), rmap_items: Pages(130), ..outcome.after };
        let [zeros, (rest, _)] = reasons(&outcome, Figure::Metadata)[..] else { panic!("two reasons") };
        assert_eq!((zeros.0, rest), (-60.0 * 64.0, -10.0 * 64.0));
    }

    #[test]
    fn ksmd_took_longer_for_more_looks_or_for_each() {
        let mut outcome = outcome(End::Settled, 100);
        outcome.plan.predicted.ksmd = Duration::from_millis(4);
        outcome.looks = Ok(Pages(500));
        outcome.ksmd = Ok(Duration::from_millis(10));
        let [looks, each] = reasons(&outcome, Figure::KsmdCpu)[..] else { panic!("two reasons") };
        assert!((looks.0 - 0.00004).abs() < 1e-9 && looks.1 == "looked again, or at others");
        assert!((each.0 - 0.00596).abs() < 1e-9 && each.1 == "a look took longer than reckoned");
        outcome.looks = Err(pagefold_base::reading::Absent::NotOnThisKernel);
        assert_eq!(reasons(&outcome, Figure::KsmdCpu).len(), 1);
    }

    #[test]
    fn the_time_is_told_by_what_ksmd_used_and_what_it_had() {
        let mut outcome = outcome(End::Settled, 100);
        // Half of a CPU: 20 ms for 10 ms. It took from 5 to 40 ms, with 12 ms by then.
        outcome.plan.predicted.ksmd = Duration::from_millis(10);
        outcome.plan.predicted.wall = Duration::from_millis(20);
        (outcome.census, outcome.ksmd) = (Duration::from_millis(5), Ok(Duration::from_millis(13)));
        outcome.timeline[3].ksmd = Duration::from_millis(12);
        let [used, had] = reasons(&outcome, Figure::Wall)[..] else { panic!("two reasons") };
        assert!((used.0 - 0.004).abs() < 1e-9 && used.1 == "ksmd had used more CPU by then");
        assert!((had.0 - 0.011).abs() < 1e-9);
        outcome.timeline.clear();
        assert!(reasons(&outcome, Figure::Wall).is_empty(), "nothing was merged");
    }

    #[test]
    fn available_memory_is_told_by_who_took_it() {
        let mut outcome = outcome(End::Settled, 100);
        let net = outcome.net(page_size()).0 as u64;
        outcome.plan.predicted.reach.scanned = Pages(100);
        outcome.available = (Ok(Bytes(1 << 30)), Ok(Bytes((1 << 30) + net - 70 * 4096)));
        outcome.after.zero = Pages(10);
        outcome.resident =
            Ok(Resident { targets: (Bytes(500 * 4096), Bytes(530 * 4096)), own: (Bytes(0), Bytes(20 * 4096)) });
        let zeros = 10.0 * 4096.0;
        let expected = [
            (zeros - 100.0 * 64.0, "what is saved, net, came to that: see above"),
            (-40.0 * 4096.0, "the targets took"),
            (-20.0 * 4096.0, "pagefold itself holds"),
            (-20.0 * 4096.0, "others took, page tables and the kernel among them"),
        ];
        assert_eq!(reasons(&outcome, Figure::Available), expected);
    }

    #[test]
    fn huge_pages_and_regions_have_reasons_too() {
        let mut outcome = outcome(End::Settled, 100);
        outcome.plan.predicted.reach.huge_split = Pages(2);
        outcome.plan.predicted.regions_added = 2;
        outcome.plan.targets[1].huge = Bytes(3 * HUGE.0);
        outcome.huge = (Bytes(8 * HUGE.0), Ok(Bytes(4 * HUGE.0)));
        outcome.regions = Regions { before: 10, now: 11, planned: 1, withdrawn: 0 };
        assert_eq!(reasons(&outcome, Figure::HugePages).iter().map(|(by, _)| *by).sum::<f64>(), 2.0);
        outcome.ended = vec![1];
        // Its three went with it, one of which was to be split.
        assert_eq!(reasons(&outcome, Figure::HugePages)[0], (2.0, ENDED));
        assert_eq!(reasons(&outcome, Figure::Regions)[0].0, -1.0);
    }

    #[test]
    fn regions_are_told_apart_by_where_they_begin() {
        let process = |pid| ProcessId { pid: Pid(pid), start_time: 1 };
        let mut outcome = outcome(End::Settled, 100);
        let page = |number: u64| number * 4096;
        for (target, (start, end)) in outcome.plan.targets.iter_mut().zip([(10, 20), (0, 50)]) {
            target.ranges[0].range = AddressRange { start: page(start), end: page(end) };
        }
        outcome.plan.predicted.regions_added = 3;
        let compare = |outcome: &Outcome, now: [&[u64]; 2], withdrawn: &[(u64, u64)]| {
            let of = |starts: &[u64]| starts.iter().map(|&number| page(number)).collect::<Vec<u64>>();
            let before = BTreeMap::from([(process(1), of(&[0])), (process(2), of(&[0, 200])), (process(3), of(&[0]))]);
            let now = BTreeMap::from([(process(1), of(now[0])), (process(2), of(now[1]))]);
            let ranges = withdrawn.iter().map(|&(start, end)| AddressRange { start: page(start), end: page(end) });
            let ranges: Vec<AddressRange> = ranges.collect();
            let withdrawn = |of| if of == process(1) { ranges.clone() } else { Vec::new() };
            let regions = Regions::compare(&outcome.plan, &before, &now, withdrawn);
            reasons(&Outcome { regions, ..outcome.clone() }, Figure::Regions)
        };
        let none = "boundaries of the plan that are none: side by side, at an edge, or withdrawn";
        let parts = "boundaries of parts that were withdrawn";
        assert_eq!(compare(&outcome, [&[0, 10, 20], &[0, 50, 200]], &[]), []);
        // The first half of the first range was withdrawn, and its program has mapped something.
        assert_eq!(
            compare(&outcome, [&[0, 15, 20, 300], &[0, 50, 200]], &[(10, 15)]),
            [(-1.0, none), (1.0, parts), (1.0, "mapped by the programs since, or cut")],
        );
        assert_eq!(
            compare(&outcome, [&[0, 10, 20], &[0, 50]], &[]),
            [(-1.0, "unmapped by the programs since, or joined")]
        );
        let missed = |range| {
            let (change, pid, comm, why) = (Change::Enrol, Pid(1), String::new(), String::new());
            Missed { change, pid, comm, range, why }
        };
        outcome.missed = vec![missed(None)];
        assert_eq!(compare(&outcome, [&[0], &[0, 50, 200]], &[]), [(-2.0, MISSED)]);
    }
}
