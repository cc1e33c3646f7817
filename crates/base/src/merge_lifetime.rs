//! Whether merged pages last long enough to pay.
//!
//! A page that is merged gives a frame back until it is written. The write costs a fault and a copy, and merging it
//! again costs ksmd's work once more. Pages that last shorter than that work is worth are a loss: MPI codes that write
//! zero over zero in each step ran 20 to 45 % longer under KSM for savings that were gone within the step.

use crate::savings::BYTES_PER_CPU_SECOND;
use crate::units::Pages;
use std::ops::Add;
use std::time::Duration;

/// CPU seconds of ksmd for a merge: 4 to 10 us were measured on 6.18.
const MERGE_CPU_SECONDS: f64 = 6e-6;

/// CPU seconds of the program for a write to a merged page: the fault, a frame, the copy of 4 KiB. Measured as 1 to 3
/// us on 6.18 (x86-64), the fault being most of it.
pub const COW_BREAK_CPU_SECONDS: f64 = 2.5e-6;

/// For how many seconds memory is taken to be held where nothing else is known. With it, the price of CPU time
/// ([`BYTES_PER_CPU_SECOND`]) makes one core worth 6 GiB held all the while, about what comes with a core in a server.
const MEMORY_USE_SECONDS: f64 = 60.0;

/// The quantile of the normal distribution for a one-sided confidence of 95 %.
const NORMAL_QUANTILE_95: f64 = 1.645;

/// For how long a merged page has to last to pay for merging and breaking it.
pub fn min_profitable_lifetime(page_bytes: u64) -> Duration {
    Duration::from_secs_f64(
        (MERGE_CPU_SECONDS + COW_BREAK_CPU_SECONDS) * BYTES_PER_CPU_SECOND as f64 * MEMORY_USE_SECONDS
            / page_bytes as f64,
    )
}

/// The age from which a content is expected to last long enough to pay, if nothing else is known of it.
///
/// One that has been there for `a` seconds is there for another `x` with probability `a / (a + x)` (J. R. Gott, Nature
/// 363, 1993). Over the time `H` for which memory is taken to be held it is expected to last `a ln(1 + H / a)` more,
/// which grows with `a`.
pub fn stable_age(page_bytes: u64) -> Duration {
    let lasts = |age: f64| age * (1.0 + MEMORY_USE_SECONDS / age).ln();
    let (mut young, mut ripe) = (0.0, MEMORY_USE_SECONDS);
    for _ in 0..40 {
        let age = (young + ripe) / 2.0;
        if lasts(age) < min_profitable_lifetime(page_bytes).as_secs_f64() { young = age } else { ripe = age }
    }
    Duration::from_secs_f64(ripe)
}

/// Where an operator granted ksmd CPU time for a program, merged pages need to last only this part of [`min_profitable_lifetime`]:
/// that time is set aside whether it is used or not. Below it a program is disturbed for next to nothing: pages that
/// simulations overwrite in each step last for less than a second.
const MIN_GRANTED_LIFETIME_SHARE: f64 = 0.2;

/// COW breaks may take this part of one CPU: a program with a single thread becomes slower by no more.
const MAX_COW_BREAK_CPU_SHARE: f64 = 0.015;

/// The part of ksmd's share that may go into merging the same pages again.
const MAX_REMERGE_SHARE_OF_KSMD: f64 = 0.5;

/// Pages that broke twice within so many times what they have to last are left alone, whether they paid or not: a page
/// that is merged and written again and again is a nuisance to its program for little.
const THRASH_LIFETIME_FACTOR: u32 = 10;

/// By which price merged pages are judged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LifetimeCriterion {
    /// The price of CPU time that has other uses. Pages that are merged and written twice soon are unenrolled, too.
    #[default]
    MarketCost,
    /// CPU time was granted: pages must last for this long.
    GrantedCpu(Duration),
}

impl LifetimeCriterion {
    /// Whether pages pay, by what was seen of them.
    pub fn is_met_by(self, stats: &LifetimeStats, page_bytes: u64) -> bool {
        match self {
            Self::MarketCost => stats.is_profitable(page_bytes) && !stats.is_thrashing(page_bytes),
            Self::GrantedCpu(must_last) => stats.min_break_rate() * must_last.as_secs_f64() <= 1.0,
        }
    }
}

/// COW breaks a second that are allowed where ksmd was granted a share of one CPU.
pub fn max_cow_breaks_per_second(ksmd_cpu_share: f64) -> f64 {
    (MAX_COW_BREAK_CPU_SHARE / COW_BREAK_CPU_SECONDS)
        .min(ksmd_cpu_share * MAX_REMERGE_SHARE_OF_KSMD / MERGE_CPU_SECONDS)
}

/// What keeping some pages merged costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CowBreakRate {
    /// Seconds for which a page is merged until it is written.
    pub lifetime_seconds: f64,
    /// COW breaks a second, of all of these pages.
    pub breaks_per_second: f64,
}

/// The price at which as many pages stay enrolled as `allowed` COW breaks a second permit, those first that last
/// longest. What lasts for [`min_profitable_lifetime`] stays in any case, and what lasts for less than a fifth of that does not.
pub fn criterion_for_break_limit(
    rates: &[CowBreakRate],
    max_breaks_per_second: f64,
    page_bytes: u64,
) -> LifetimeCriterion {
    let dearest = min_profitable_lifetime(page_bytes).as_secs_f64();
    let mut churn: Vec<&CowBreakRate> = rates.iter().filter(|churn| churn.lifetime_seconds < dearest).collect();
    churn.sort_by(|left, right| right.lifetime_seconds.total_cmp(&left.lifetime_seconds));
    let (mut breaks, mut least) = (0.0, dearest);
    for part in churn {
        breaks += part.breaks_per_second;
        if breaks > max_breaks_per_second {
            return LifetimeCriterion::GrantedCpu(Duration::from_secs_f64(least));
        }
        least = part.lifetime_seconds.max(dearest * MIN_GRANTED_LIFETIME_SHARE);
    }
    LifetimeCriterion::GrantedCpu(Duration::from_secs_f64(dearest * MIN_GRANTED_LIFETIME_SHARE))
}

/// What was seen of merged pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LifetimeStats {
    /// Seconds that pages were merged, summed over the pages that were watched.
    pub page_seconds: f64,
    /// Pages that were written meanwhile.
    pub cow_breaks: Pages,
    /// Those of them that were merged again and written again.
    pub repeated_cow_breaks: Pages,
    /// The most pages that were merged at one time.
    pub max_merged_pages: Pages,
}

impl LifetimeStats {
    /// Between two looks: so many pages were merged at the first, and so many of them no longer at the second, for some
    /// of which that was the second time.
    pub fn add_interval(&mut self, merged: Pages, (broken, twice): (Pages, Pages), elapsed: Duration) {
        // Those that broke were merged for half of the time, as far as one can tell.
        self.page_seconds += (merged.0 as f64 - broken.0 as f64 / 2.0) * elapsed.as_secs_f64();
        self.cow_breaks += broken;
        self.repeated_cow_breaks += twice;
        self.max_merged_pages = self.max_merged_pages.max(merged);
    }

    /// Writes a second and page, not to be exceeded by the truth from below with 95 % confidence: the lower limit of a
    /// Poisson rate, by the cube root approximation to the chi-squared distribution (E. B. Wilson, M. M. Hilferty, PNAS
    /// 17, 1931).
    pub fn min_break_rate(&self) -> f64 {
        let broken = self.cow_breaks.0 as f64;
        if broken < 1.0 || self.page_seconds <= 0.0 {
            return 0.0;
        }
        let root = 1.0 - 1.0 / (9.0 * broken) - NORMAL_QUANTILE_95 / (3.0 * broken.sqrt());
        broken * root.max(0.0).powi(3) / self.page_seconds
    }

    /// Whether merging such pages pays: unless they are known to last shorter than what merging and breaking one costs.
    pub fn is_profitable(&self, page_bytes: u64) -> bool {
        self.min_break_rate() * min_profitable_lifetime(page_bytes).as_secs_f64() <= 1.0
    }

    /// Whether at least half of such pages were merged and written twice, and soon each time.
    pub fn is_thrashing(&self, page_bytes: u64) -> bool {
        let soon = (min_profitable_lifetime(page_bytes) * THRASH_LIFETIME_FACTOR).as_secs_f64();
        self.repeated_cow_breaks > Pages::ZERO
            && self.repeated_cow_breaks.0 * 2 >= self.max_merged_pages.0
            && self.page_seconds < self.cow_breaks.0 as f64 * soon
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
        // Merged for four seconds until each write: less than the thirteen of the market price.
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
        assert!((price(&[churn(8.0, 6001.0)]) - 13.06).abs() < 0.01, "nothing but what pays at the market price");
        let lasting = [churn(20.0, 9000.0), churn(5.0, 6000.0)];
        assert!((price(&lasting) - 2.61).abs() < 0.01, "what pays at the market price takes no allowance");
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
        assert_eq!(rounds(100, 60, 1), (true, false), "once is no harm");
        assert_eq!(rounds(100, 60, 2), (true, true));
        assert_eq!(rounds(100, 600, 2), (true, false), "it paid for long each time");
        assert_eq!(rounds(50, 60, 2), (true, true));
        assert_eq!(rounds(49, 60, 9), (true, false), "most stay merged");
        assert_eq!(rounds(0, 60, 9), (true, false));
    }

    proptest! {
        #[test]
        fn more_cow_breaks_never_favor_merging(seconds in 0.001f64..1e6, broken in 0u64..10_000, more in 0u64..10_000) {
            prop_assert!(lifetime_stats(seconds, broken).min_break_rate() <= lifetime_stats(seconds, broken + more).min_break_rate() + 1e-9);
            prop_assert!(lifetime_stats(seconds, broken).is_profitable(4096) || !lifetime_stats(seconds, broken + more).is_profitable(4096));
        }
    }
}
