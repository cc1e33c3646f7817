//! Whether merged pages stay merged long enough to be profitable.
//!
//! A merged page saves a frame until it is written. The write costs a fault and a copy, and merging again costs ksmd's
//! work once more. Pages that are written sooner than this work pays off cause a loss. Example: MPI codes that write
//! zero over zero in each step ran 20 to 45 % longer under KSM, for savings that were lost within the step.

use crate::savings::BYTES_PER_CPU_SECOND;
use crate::units::Pages;
use std::ops::Add;
use std::time::Duration;

/// CPU seconds of ksmd for a merge: 4 to 10 us were measured on 6.18.
const MERGE_CPU_SECONDS: f64 = 6e-6;

/// CPU seconds of the program for a write to a merged page: the fault, a new frame, the copy of 4 KiB. Measured as 1 to
/// 3 us on 6.18 (x86-64), mostly for the fault.
pub const COW_BREAK_CPU_SECONDS: f64 = 2.5e-6;

/// How many seconds memory is assumed to be in use if nothing else is known. With the CPU price
/// [`BYTES_PER_CPU_SECOND`], one core then equals 6 GiB of memory in constant use, about the memory per core of a
/// server.
const MEMORY_USE_SECONDS: f64 = 60.0;

/// The quantile of the normal distribution for a one-sided confidence of 95 %.
const NORMAL_QUANTILE_95: f64 = 1.645;

/// How long a merged page must stay merged to pay for its merge and its COW break.
pub fn min_profitable_lifetime(page_bytes: u64) -> Duration {
    Duration::from_secs_f64(
        (MERGE_CPU_SECONDS + COW_BREAK_CPU_SECONDS) * BYTES_PER_CPU_SECOND as f64 * MEMORY_USE_SECONDS
            / page_bytes as f64,
    )
}

/// The stable age from which a content is expected to last long enough, if nothing else is known of it.
///
/// A content that exists for `a` seconds exists for another `x` with probability `a / (a + x)` (J. R. Gott, Nature 363,
/// 1993). Over the assumed time of use `H` it is expected to last `a ln(1 + H / a)` more, which grows with `a`.
pub fn stable_age(page_bytes: u64) -> Duration {
    let expected_lifetime = |age: f64| age * (1.0 + MEMORY_USE_SECONDS / age).ln();
    let (mut too_short, mut long_enough) = (0.0, MEMORY_USE_SECONDS);
    for _ in 0..40 {
        let age = (too_short + long_enough) / 2.0;
        if expected_lifetime(age) < min_profitable_lifetime(page_bytes).as_secs_f64() {
            too_short = age
        } else {
            long_enough = age
        }
    }
    Duration::from_secs_f64(long_enough)
}

/// If an operator granted ksmd CPU time for a program, merged pages only need to last this share of
/// [`min_profitable_lifetime`], because that CPU time is reserved in any case. Below this share the program is
/// disturbed for almost no savings: pages that simulations overwrite in each step last less than a second.
const MIN_GRANTED_LIFETIME_SHARE: f64 = 0.2;

/// The share of one CPU that COW breaks may take: a program with a single thread becomes slower by at most this share.
const MAX_COW_BREAK_CPU_SHARE: f64 = 0.015;

/// The share of ksmd's CPU time that may go into merging the same pages again.
const MAX_REMERGE_SHARE_OF_KSMD: f64 = 0.5;

/// Pages with two COW breaks within this many times their minimum lifetime are excluded, even if they were profitable.
/// Repeated merges and COW breaks disturb the program for little savings.
const THRASH_LIFETIME_FACTOR: u32 = 10;

/// The criterion for the lifetime of merged pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LifetimeCriterion {
    /// The market price of CPU time, which has other uses. Pages that are soon merged and written twice are unenrolled,
    /// too.
    #[default]
    MarketCost,
    /// CPU time was granted: pages must last for this long.
    GrantedCpu(Duration),
}

impl LifetimeCriterion {
    /// Whether pages with these statistics are profitable.
    pub fn is_met_by(self, stats: &LifetimeStats, page_bytes: u64) -> bool {
        match self {
            Self::MarketCost => stats.is_profitable(page_bytes) && !stats.is_thrashing(page_bytes),
            Self::GrantedCpu(min_lifetime) => stats.min_break_rate() * min_lifetime.as_secs_f64() <= 1.0,
        }
    }
}

/// The allowed COW breaks per second if ksmd was granted a share of one CPU.
pub fn max_cow_breaks_per_second(ksmd_cpu_share: f64) -> f64 {
    (MAX_COW_BREAK_CPU_SHARE / COW_BREAK_CPU_SECONDS)
        .min(ksmd_cpu_share * MAX_REMERGE_SHARE_OF_KSMD / MERGE_CPU_SECONDS)
}

/// The cost of keeping some pages merged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CowBreakRate {
    /// Seconds from the merge of a page to its write.
    pub lifetime_seconds: f64,
    /// COW breaks per second of all these pages.
    pub breaks_per_second: f64,
}

/// The criterion that keeps as many pages enrolled as `max_breaks_per_second` permits, pages with the longest
/// lifetime first. Pages that last for [`min_profitable_lifetime`] always stay; pages that last less than a fifth of it
/// never stay.
pub fn criterion_for_break_limit(
    rates: &[CowBreakRate],
    max_breaks_per_second: f64,
    page_bytes: u64,
) -> LifetimeCriterion {
    let profitable_seconds = min_profitable_lifetime(page_bytes).as_secs_f64();
    let mut unprofitable: Vec<&CowBreakRate> =
        rates.iter().filter(|rate| rate.lifetime_seconds < profitable_seconds).collect();
    unprofitable.sort_by(|left, right| right.lifetime_seconds.total_cmp(&left.lifetime_seconds));
    // Ranges that are checked together often have equal lifetimes: they are kept or unenrolled together.
    let (mut breaks_per_second, mut min_seconds) = (0.0, profitable_seconds);
    for equal_rates in unprofitable.chunk_by(|left, right| left.lifetime_seconds == right.lifetime_seconds) {
        breaks_per_second += equal_rates.iter().map(|rate| rate.breaks_per_second).sum::<f64>();
        if breaks_per_second > max_breaks_per_second {
            return granted_cpu(min_seconds);
        }
        min_seconds = equal_rates[0].lifetime_seconds.max(profitable_seconds * MIN_GRANTED_LIFETIME_SHARE);
    }
    granted_cpu(profitable_seconds * MIN_GRANTED_LIFETIME_SHARE)
}

/// The criterion with a lifetime in whole nanoseconds, rounded down: pages with exactly this lifetime meet it.
fn granted_cpu(min_seconds: f64) -> LifetimeCriterion {
    LifetimeCriterion::GrantedCpu(Duration::from_nanos((min_seconds * 1e9) as u64))
}

/// Observations of merged pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LifetimeStats {
    /// Seconds in the merged state, summed over the observed pages.
    pub page_seconds: f64,
    /// Pages that were written in this time.
    pub cow_breaks: Pages,
    /// The pages of these that were merged again and written again.
    pub repeated_cow_breaks: Pages,
    /// The largest number of pages that were merged at one time.
    pub max_merged_pages: Pages,
}

impl LifetimeStats {
    /// Add the interval between two scans: pages merged at the first scan, pages of these no longer merged at the
    /// second, and the part of the latter for which this was the second COW break.
    pub fn add_interval(&mut self, merged: Pages, (breaks, repeated_breaks): (Pages, Pages), elapsed: Duration) {
        // Pages with a COW break were merged for half of the interval on average.
        self.page_seconds += (merged.0 as f64 - breaks.0 as f64 / 2.0) * elapsed.as_secs_f64();
        self.cow_breaks += breaks;
        self.repeated_cow_breaks += repeated_breaks;
        self.max_merged_pages = self.max_merged_pages.max(merged);
    }

    /// Writes per second and page: a lower limit with 95 % confidence. It is the lower limit of a Poisson rate, by the
    /// cube root approximation to the chi-squared distribution (E. B. Wilson, M. M. Hilferty, PNAS 17, 1931).
    pub fn min_break_rate(&self) -> f64 {
        let breaks = self.cow_breaks.0 as f64;
        if breaks < 1.0 || self.page_seconds <= 0.0 {
            return 0.0;
        }
        let root = 1.0 - 1.0 / (9.0 * breaks) - NORMAL_QUANTILE_95 / (3.0 * breaks.sqrt());
        breaks * root.max(0.0).powi(3) / self.page_seconds
    }

    /// Whether merging such pages is profitable: unless their lifetime is certainly shorter than the cost of a merge
    /// and a COW break requires.
    pub fn is_profitable(&self, page_bytes: u64) -> bool {
        self.min_break_rate() * min_profitable_lifetime(page_bytes).as_secs_f64() <= 1.0
    }

    /// Whether at least half of such pages were merged and written twice, soon each time.
    pub fn is_thrashing(&self, page_bytes: u64) -> bool {
        let thrash_seconds = (min_profitable_lifetime(page_bytes) * THRASH_LIFETIME_FACTOR).as_secs_f64();
        self.repeated_cow_breaks > Pages::ZERO
            && self.repeated_cow_breaks.0 * 2 >= self.max_merged_pages.0
            && self.page_seconds < self.cow_breaks.0 as f64 * thrash_seconds
    }
}

impl Add for LifetimeStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            page_seconds: self.page_seconds + other.page_seconds,
            cow_breaks: self.cow_breaks + other.cow_breaks,
            repeated_cow_breaks: self.repeated_cow_breaks + other.repeated_cow_breaks,
            max_merged_pages: self.max_merged_pages + other.max_merged_pages,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn lifetime_stats(page_seconds: f64, broken: u64) -> LifetimeStats {
        LifetimeStats {
            page_seconds,
            cow_breaks: Pages(broken),
            repeated_cow_breaks: Pages::ZERO,
            max_merged_pages: Pages(1),
        }
    }

    #[test]
    fn break_rate_has_a_lower_confidence_limit() {
        assert_eq!(lifetime_stats(100.0, 0).min_break_rate(), 0.0);
        assert_eq!(lifetime_stats(0.0, 5).min_break_rate(), 0.0);
        // The lower limits of a Poisson mean for 10 and 100 events at 95 %: 5.43 and 84.1 (tables of chi-squared,
        // halved).
        assert!((lifetime_stats(1.0, 10).min_break_rate() - 5.43).abs() < 0.05);
        assert!((lifetime_stats(1.0, 100).min_break_rate() - 84.1).abs() < 0.2);
    }

    #[test]
    fn page_of_4_kib_must_last_13_seconds() {
        // 8.5 us x 100 MiB x 60 s / 4096 B = 13.06 s.
        assert!(lifetime_stats(1000.0 * 20.0, 1000).is_profitable(4096), "written every 20 s");
        assert!(!lifetime_stats(1000.0 * 10.0, 1000).is_profitable(4096), "written every 10 s");
        assert!(
            lifetime_stats(1000.0 * 10.0, 1000).is_profitable(65536),
            "sixteen times the page, sixteen times the gain"
        );
    }

    #[test]
    fn stable_age_of_4_kib_pages_is_5_seconds() {
        // 5.14 ln(1 + 60 / 5.14) = 13.05, and 5.15 ln(1 + 60 / 5.15) = 13.07.
        assert!((stable_age(4096).as_secs_f64() - 5.145).abs() < 0.01, "{:?}", stable_age(4096));
        assert!(stable_age(65536) < stable_age(16384) && stable_age(16384) < stable_age(4096));
    }

    #[test]
    fn granted_cpu_keeps_pages_that_last_3_seconds() {
        // Merged for four seconds until each write: less than the thirteen seconds of the market price.
        let four_seconds = lifetime_stats(4.0 * 1000.0, 1000);
        let market = LifetimeCriterion::default();
        assert!(!market.is_met_by(&four_seconds, 4096));
        let churn = |lasts: f64, breaks: f64| CowBreakRate { lifetime_seconds: lasts, breaks_per_second: breaks };
        let granted = criterion_for_break_limit(&[churn(4.0, 900.0)], max_cow_breaks_per_second(0.1), 4096);
        assert!(granted.is_met_by(&four_seconds, 4096), "{granted:?}");
        assert!(!granted.is_met_by(&lifetime_stats(1000.0, 1000), 4096), "a second is too short at any price");
    }

    #[test]
    fn shortest_lived_pages_are_dropped_first() {
        let churn = |lasts: f64, breaks: f64| CowBreakRate { lifetime_seconds: lasts, breaks_per_second: breaks };
        let price = |parts: &[CowBreakRate]| match criterion_for_break_limit(parts, 6000.0, 4096) {
            LifetimeCriterion::GrantedCpu(must_last) => must_last.as_secs_f64(),
            LifetimeCriterion::MarketCost => panic!("no share was granted"),
        };
        assert!((price(&[]) - 2.61).abs() < 0.01);
        assert!((price(&[churn(8.0, 3000.0), churn(4.0, 3000.0)]) - 2.61).abs() < 0.01, "all fit");
        assert_eq!(price(&[churn(4.0, 3001.0), churn(8.0, 3000.0)]), 8.0, "the shorter ones do not");
        assert!((price(&[churn(8.0, 6001.0)]) - 13.06).abs() < 0.01, "only pages that pay at the market price stay");
        let alike = [churn(8.0, 5000.0), churn(8.0, 5000.0)];
        assert!((price(&alike) - 13.06).abs() < 0.01, "pages with equal lifetimes go together");
        let lasting = [churn(20.0, 9000.0), churn(5.0, 6000.0)];
        assert!((price(&lasting) - 2.61).abs() < 0.01, "pages that pay at the market price do not use the limit");
        // 1.5 % of a CPU at 2.5 us a write, or half of the share at 6 us a merge.
        assert!(
            (max_cow_breaks_per_second(1.0) - 6000.0).abs() < 1e-6
                && (max_cow_breaks_per_second(0.012) - 1000.0).abs() < 1e-6
        );
    }

    #[test]
    fn few_cow_breaks_are_not_conclusive() {
        let mut few = LifetimeStats::default();
        few.add_interval(Pages(100), (Pages(1), Pages(0)), Duration::from_millis(100));
        assert!(few.is_profitable(4096));
        let mut many = LifetimeStats::default();
        many.add_interval(Pages(100), (Pages(40), Pages(0)), Duration::from_millis(100));
        assert!(!many.is_profitable(4096));
    }

    #[test]
    fn repeatedly_written_pages_thrash_even_if_profitable() {
        let rounds = |pages: u64, every: u64, times: u64| {
            let mut seen = LifetimeStats::default();
            for time in 0..times {
                let twice = if time == 1 { pages } else { 0 };
                seen.add_interval(Pages(100), (Pages(pages), Pages(twice)), Duration::from_secs(every));
            }
            (seen.is_profitable(4096), seen.is_thrashing(4096))
        };
        assert_eq!(rounds(100, 60, 1), (true, false), "a single COW break is no thrashing");
        assert_eq!(rounds(100, 60, 2), (true, true));
        assert_eq!(rounds(100, 600, 2), (true, false), "each merge lasted long");
        assert_eq!(rounds(50, 60, 2), (true, true));
        assert_eq!(rounds(49, 60, 9), (true, false), "most stay merged");
        assert_eq!(rounds(0, 60, 9), (true, false));
    }

    proptest! {
        #[test]
        fn kept_pages_stay_within_the_break_limit(parts in prop::collection::vec((1u8..16, 0u16..5000), 0..20)) {
            let rates: Vec<CowBreakRate> = parts
                .iter()
                .map(|&(lifetime, breaks)| CowBreakRate {
                    lifetime_seconds: f64::from(lifetime) / 1.1,
                    breaks_per_second: f64::from(breaks),
                })
                .collect();
            let LifetimeCriterion::GrantedCpu(must_last) = criterion_for_break_limit(&rates, 6000.0, 4096) else {
                panic!("a share was granted")
            };
            let always_stay = min_profitable_lifetime(4096).as_secs_f64();
            let kept: f64 = rates
                .iter()
                .filter(|rate| (must_last.as_secs_f64()..always_stay).contains(&rate.lifetime_seconds))
                .map(|rate| rate.breaks_per_second)
                .sum();
            prop_assert!(kept <= 6000.0, "{kept} at {must_last:?}");
        }

        #[test]
        fn more_cow_breaks_never_favor_merging(seconds in 0.001f64..1e6, broken in 0u64..10_000, more in 0u64..10_000) {
            prop_assert!(lifetime_stats(seconds, broken).min_break_rate() <= lifetime_stats(seconds, broken + more).min_break_rate() + 1e-9);
            prop_assert!(lifetime_stats(seconds, broken).is_profitable(4096) || !lifetime_stats(seconds, broken + more).is_profitable(4096));
        }
    }
}
