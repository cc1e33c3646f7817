//! ksmd's pace: the settings that keep a limit on its CPU time, and when it may stop.

use pagefold_base::units::Pages;
use std::time::Duration;

/// The shortest pause between batches while the limit leaves any. Long compared with the kernel's tick, to which pauses
/// are rounded up (4 ms at 250 Hz), and short for a waiting operator.
const MIN_BATCH_PAUSE_MS: f64 = 10.0;

/// The least work of a batch. After a pause ksmd's data is no longer in the caches of its CPU, which costs some 0.13 ms
/// (`batch_ns` in docs/simulator.md): with a low limit and short pauses, batches of few pages would spend most of their
/// time on that.
const MIN_BATCH_WORK_MS: f64 = 2.0;

/// Batches with their pauses that a measurement covers at least.
const MEASURED_BATCHES: f64 = 2.0;

/// Assumed cost of a page before the first measurement, in milliseconds: ksmd's most expensive work, merging
/// (`SCAN_MICROSECONDS_PER_PAGE` of `pagefold-doctor` is the mean over all of its work).
const INITIAL_PAGE_COST_MS: f64 = 0.006;

/// Pages of a batch when ksmd has no limit: some 20 ms, after which it reads its settings again.
const UNBOUNDED_BATCH_PAGES: f64 = 5000.0;

/// Maximum pages of a batch: `pages_to_scan` is an unsigned int, and ksmd sees a new setting only between batches.
const MAX_BATCH_PAGES: f64 = 200_000.0;

/// Weight of a new measurement in the moving average.
const CPU_SHARE_EWMA_WEIGHT: f64 = 0.4;

/// Settings of ksmd that keep its share of one CPU, adapted to its measured share.
///
/// The time of a batch varies tenfold: a first visit of a page is a checksum, a page of the unstable tree takes a
/// search, a merge rewrites page tables. So the batch size changes: by the ratio of the limit to the measured share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KsmdPace {
    cpu_share_limit: f64,
    batch_pages: f64,
    measured_cpu_share: Option<f64>,
    /// CPU time and elapsed time since the last adaptation.
    measured: (Duration, Duration),
}

impl KsmdPace {
    /// For a share of one CPU, above 0; 1 and more mean no limit.
    pub fn new(share: f64) -> Self {
        let share = share.clamp(0.001, 1.0);
        let batch = if share >= 1.0 {
            UNBOUNDED_BATCH_PAGES
        } else {
            pause_ms(share) * share / (1.0 - share) / INITIAL_PAGE_COST_MS
        };
        Self {
            cpu_share_limit: share,
            batch_pages: batch.clamp(1.0, MAX_BATCH_PAGES),
            measured_cpu_share: None,
            measured: Default::default(),
        }
    }

    /// `pages_to_scan` and `sleep_millisecs`.
    pub fn settings(self) -> (u64, u64) {
        let pause = if self.cpu_share_limit >= 1.0 { 0 } else { pause_ms(self.cpu_share_limit).round() as u64 };
        (self.batch_pages.round() as u64, pause)
    }

    /// Adapt to the CPU time that ksmd used in an interval, once the intervals cover several batches.
    pub fn adapt(&mut self, cpu: Duration, elapsed: Duration) {
        if self.cpu_share_limit >= 1.0 {
            return;
        }
        self.measured = (self.measured.0.saturating_add(cpu), self.measured.1.saturating_add(elapsed));
        let (cpu, elapsed) = self.measured;
        let batch_ms = pause_ms(self.cpu_share_limit) / (1.0 - self.cpu_share_limit);
        if elapsed.as_secs_f64() * 1e3 < MEASURED_BATCHES * batch_ms {
            return;
        }
        self.measured = Default::default();
        let current_share = cpu.as_secs_f64() / elapsed.as_secs_f64();
        let average_share = self
            .measured_cpu_share
            .map_or(current_share, |average| average + CPU_SHARE_EWMA_WEIGHT * (current_share - average));
        self.measured_cpu_share = Some(average_share);
        let ratio = (self.cpu_share_limit / average_share.max(1e-4)).clamp(0.5, 1.5);
        self.batch_pages = (self.batch_pages * ratio).clamp(1.0, MAX_BATCH_PAGES);
    }
}

/// The pause with a limit below 1: long enough that a batch within the limit has the least work.
fn pause_ms(cpu_share_limit: f64) -> f64 {
    (MIN_BATCH_WORK_MS * (1.0 - cpu_share_limit) / cpu_share_limit).max(MIN_BATCH_PAUSE_MS)
}

/// Decides when ksmd has finished.
///
/// A page merges at ksmd's second visit at the earliest, because ksmd wants its checksum unchanged; before 6.11 at its
/// first if its content is in the stable tree (mm/ksm.c, `cmp_and_merge_page`). A newly enrolled address space comes
/// last in the current scan. So the detector waits for two whole scans after the current one; from then on, a whole
/// scan with almost no gain settles it. It settles earlier once all expected savings are there, or all but a thousandth
/// at the end of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettleDetector {
    expected: Option<Pages>,
    first_scan: u64,
    scan: u64,
    saved: Pages,
}

/// Whole scans before it can settle.
const MIN_SCANS_TO_SETTLE: u64 = 2;

/// The share of the expected savings that may be missing.
const MAX_MISSING_SHARE: f64 = 0.1;

impl SettleDetector {
    /// From the count of full scans at the time of enrolling. `expected` is the expected savings, if known.
    pub fn new(full_scans: u64, expected: Option<Pages>) -> Self {
        Self { expected, first_scan: full_scans, scan: full_scans, saved: Pages::ZERO }
    }

    /// The expected savings, if known.
    pub fn expected(&self) -> Option<Pages> {
        self.expected
    }

    /// Whether merging is settled, by the number of full scans and the current savings.
    pub fn update(&mut self, full_scans: u64, saved: Pages) -> bool {
        if self.expected.is_some_and(|expected| expected.0 > 0 && saved >= expected) {
            return true;
        }
        if full_scans == self.scan {
            return false;
        }
        if self.expected.is_some_and(|expected| expected.0 > 0 && saved.0 >= expected.0 - expected.0 / 1000) {
            return true;
        }
        let gained = saved.saturating_sub(self.saved);
        (self.scan, self.saved) = (full_scans, saved);
        full_scans > self.first_scan + MIN_SCANS_TO_SETTLE && gained.0 * 1000 <= saved.0
    }

    /// Whether the missing savings may be pages that ksmd has skipped meanwhile.
    ///
    /// With `smart_scan`, ksmd visits a page without a partner in its first scans only in every second scan, and in the
    /// end in every ninth (mm/ksm.c, `should_skip_rmap_item`). Two pages of the same content merge in a scan that
    /// visits both. If they were enrolled at different times, the scans of one may never coincide with those of the
    /// other.
    pub fn may_be_skipped(&self, saved: Pages, skipped: Pages) -> bool {
        let missing = self.expected.map_or(0, |expected| expected.0.saturating_sub(saved.0));
        missing as f64 > self.expected.map_or(0, |expected| expected.0) as f64 * MAX_MISSING_SHARE
            && skipped.0 >= missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// ksmd as simulated from ksm_do_scan and its pause at 250 Hz: the share that it uses while paced for ten seconds.
    fn simulated_cpu_share(limit: f64, cost_us: impl Fn(f64) -> f64) -> f64 {
        let mut pace = KsmdPace::new(limit);
        let (mut now, mut used) = (0.0, 0.0);
        let (mut last_update, mut used_at_update) = (0.0, 0.0);
        while now < 10.0 {
            let (pages, pause) = pace.settings();
            let work = pages as f64 * cost_us(now) / 1e6;
            let sleep_seconds = if pause == 0 { 0.0 } else { (pause as f64 / 4.0).ceil() * 0.004 + 0.002 };
            now += work + sleep_seconds;
            used += work;
            if now - last_update >= 0.05 {
                pace.adapt(Duration::from_secs_f64(used - used_at_update), Duration::from_secs_f64(now - last_update));
                (last_update, used_at_update) = (now, used);
            }
        }
        used / now
    }

    #[test]
    fn cpu_limit_is_held_and_used_for_any_page_cost() {
        for limit in [0.02, 0.1, 0.5, 0.8] {
            for cost in [0.5, 1.0, 4.0, 10.0] {
                let share = simulated_cpu_share(limit, |_| cost);
                assert!((share / limit - 1.0).abs() < 0.1, "{share} instead of {limit} at {cost} us a page");
            }
            let share = simulated_cpu_share(limit, |now| if now % 2.0 < 1.0 { 0.9 } else { 7.0 });
            assert!(share < limit * 1.4 && share > limit * 0.6, "{share} instead of {limit} while the cost jumps");
        }
        assert!(simulated_cpu_share(1.0, |_| 4.0) > 0.99);
    }

    #[test]
    fn batches_are_worth_their_wake_up() {
        // A batch costs 0.13 ms beside its pages.
        for limit in [0.002, 0.01, 0.1, 0.5] {
            let mut pace = KsmdPace::new(limit);
            let (mut work_ms, mut elapsed_ms) = (0.0, 0.0);
            for _ in 0..1000 {
                let (pages, pause) = pace.settings();
                let batch_ms = 0.13 + pages as f64 * 0.001;
                (work_ms, elapsed_ms) = (work_ms + pages as f64 * 0.001, elapsed_ms + batch_ms + pause as f64);
                pace.adapt(
                    Duration::from_secs_f64(batch_ms / 1e3),
                    Duration::from_secs_f64((batch_ms + pause as f64) / 1e3),
                );
            }
            let share = work_ms / elapsed_ms / limit;
            assert!((0.9..1.0).contains(&share), "{share} of a limit of {limit} is work");
        }
    }

    #[test]
    fn scan_without_gain_settles_from_the_third_on() {
        let mut settle = SettleDetector::new(10, None);
        assert!(!settle.update(10, Pages(0)));
        assert!(!settle.update(11, Pages(0)), "the scan that was under way");
        assert!(!settle.update(12, Pages(0)), "checksums");
        assert!(!settle.update(13, Pages(5000)), "merges");
        assert!(!settle.update(13, Pages(5001)), "no new scan");
        assert!(settle.update(14, Pages(5001)));
    }

    #[test]
    fn expected_savings_settle() {
        let mut settle = SettleDetector::new(0, Some(Pages(100)));
        assert!(!settle.update(0, Pages(99)));
        assert!(settle.update(0, Pages(100)));
        assert!(!SettleDetector::new(0, Some(Pages(0))).update(0, Pages(0)), "nothing was expected");
        let mut settle = SettleDetector::new(0, Some(Pages(10_000)));
        assert!(!settle.update(0, Pages(9990)), "more may come in the same scan");
        assert!(settle.update(1, Pages(9990)));
        assert!(!SettleDetector::new(0, Some(Pages(10_000))).update(1, Pages(9989)));
    }

    #[test]
    fn missing_pages_may_be_skipped_by_smart_scan() {
        let settle = SettleDetector::new(0, Some(Pages(100)));
        assert!(settle.may_be_skipped(Pages(50), Pages(50)));
        assert!(!settle.may_be_skipped(Pages(50), Pages(49)), "it was visited");
        assert!(!settle.may_be_skipped(Pages(90), Pages(1000)), "little is missing");
        assert!(!SettleDetector::new(0, None).may_be_skipped(Pages(0), Pages(1000)), "nothing was expected");
    }

    proptest! {
        #[test]
        fn settings_are_ones_that_the_kernel_takes(
            limit in -1.0f64..3.0,
            measurements in prop::collection::vec((0u64..1_000_000, 0u64..1_000_000), 0..50),
        ) {
            let mut pace = KsmdPace::new(limit);
            for (cpu, elapsed) in measurements {
                pace.adapt(Duration::from_micros(cpu), Duration::from_micros(elapsed));
                let (pages, pause) = pace.settings();
                prop_assert!((1..=200_000).contains(&pages) && pause <= 2000);
            }
        }
    }
}
