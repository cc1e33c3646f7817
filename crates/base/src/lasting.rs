//! Whether merged pages last long enough to pay.
//!
//! A page that is merged gives a frame back until it is written. The write costs a fault and a copy, and merging it
//! again costs ksmd's work once more. Pages that last shorter than that work is worth are a loss: MPI codes that write
//! zero over zero in each step ran 20 to 45 % longer under KSM for savings that were gone within the step.

use crate::savings::CPU_SECOND_BYTES;
use crate::units::Pages;
use std::ops::Add;
use std::time::Duration;

/// CPU seconds of ksmd for a merge: 4 to 10 us were measured on 6.18.
const MERGE: f64 = 6e-6;

/// CPU seconds of the program for a write to a merged page: the fault, a frame, the copy of 4 KiB. Measured as 1 to 3
/// us on 6.18 (x86-64), the fault being most of it.
pub const BREAK: f64 = 2.5e-6;

/// For how many seconds memory is taken to be held where nothing else is known. With it, the price of CPU time
/// ([`CPU_SECOND_BYTES`]) makes one core worth 6 GiB held all the while, about what comes with a core in a server.
const HELD: f64 = 60.0;

/// The quantile of the normal distribution for a one-sided confidence of 95 %.
const Z95: f64 = 1.645;

/// For how long a merged page has to last to pay for merging and breaking it.
pub fn must_last(page_bytes: u64) -> Duration {
    Duration::from_secs_f64((MERGE + BREAK) * CPU_SECOND_BYTES as f64 * HELD / page_bytes as f64)
}

/// The age from which a content is expected to last long enough to pay, if nothing else is known of it.
///
/// One that has been there for `a` seconds is there for another `x` with probability `a / (a + x)` (J. R. Gott, Nature
/// 363, 1993). Over the time `H` for which memory is taken to be held it is expected to last `a ln(1 + H / a)` more,
/// which grows with `a`.
pub fn ripe_after(page_bytes: u64) -> Duration {
    let lasts = |age: f64| age * (1.0 + HELD / age).ln();
    let (mut young, mut ripe) = (0.0, HELD);
    for _ in 0..40 {
        let age = (young + ripe) / 2.0;
        if lasts(age) < must_last(page_bytes).as_secs_f64() { young = age } else { ripe = age }
    }
    Duration::from_secs_f64(ripe)
}

/// Where an operator granted ksmd CPU time for a program, merged pages need to last only this part of [`must_last`]:
/// that time is set aside whether it is used or not. Below it a program is disturbed for next to nothing: pages that
/// simulations overwrite in each step last for less than a second.
const GRANTED_PART: f64 = 0.2;

/// COW breaks may take this part of one CPU: a program with a single thread becomes slower by no more.
const BREAK_SHARE: f64 = 0.015;

/// The part of ksmd's share that may go into merging the same pages again.
const REMERGE_PART: f64 = 0.5;

/// Pages that broke twice within so many times what they have to last are left alone, whether they paid or not: a page
/// that is merged and written again and again is a nuisance to its program for little.
const THRASHES: u32 = 10;

/// By which price merged pages are judged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Price {
    /// The price of CPU time that has other uses. Pages that are merged and written twice soon are unenrolled, too.
    #[default]
    Market,
    /// CPU time was granted: pages must last for this long.
    Granted(Duration),
}

impl Price {
    /// Whether pages pay, by what was seen of them.
    pub fn pays(self, seen: &Seen, page_bytes: u64) -> bool {
        match self {
            Self::Market => seen.pays(page_bytes) && !seen.thrashes(page_bytes),
            Self::Granted(must_last) => seen.rate_at_least() * must_last.as_secs_f64() <= 1.0,
        }
    }
}

/// COW breaks a second that are allowed where ksmd was granted a share of one CPU.
pub fn breaks_allowed(share: f64) -> f64 {
    (BREAK_SHARE / BREAK).min(share * REMERGE_PART / MERGE)
}

/// What keeping some pages merged costs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Churn {
    /// Seconds for which a page is merged until it is written.
    pub lasts: f64,
    /// COW breaks a second, of all of these pages.
    pub breaks: f64,
}

/// The price at which as many pages stay enrolled as `allowed` COW breaks a second permit, those first that last
/// longest. What lasts for [`must_last`] stays in any case, and what lasts for less than a fifth of that does not.
pub fn price_within(churn: &[Churn], allowed: f64, page_bytes: u64) -> Price {
    let dearest = must_last(page_bytes).as_secs_f64();
    let mut churn: Vec<&Churn> = churn.iter().filter(|churn| churn.lasts < dearest).collect();
    churn.sort_by(|left, right| right.lasts.total_cmp(&left.lasts));
    let (mut breaks, mut least) = (0.0, dearest);
    for part in churn {
        breaks += part.breaks;
        if breaks > allowed {
            return Price::Granted(Duration::from_secs_f64(least));
        }
        least = part.lasts.max(dearest * GRANTED_PART);
    }
    Price::Granted(Duration::from_secs_f64(dearest * GRANTED_PART))
}

/// What was seen of merged pages.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Seen {
    /// Seconds that pages were merged, summed over the pages that were watched.
    pub page_seconds: f64,
    /// Pages that were written meanwhile.
    pub broken: Pages,
    /// Those of them that were merged again and written again.
    pub twice: Pages,
    /// The most pages that were merged at one time.
    pub merged: Pages,
}

impl Seen {
    /// Between two looks: so many pages were merged at the first, and so many of them no longer at the second, for some
    /// of which that was the second time.
    pub fn count(&mut self, merged: Pages, (broken, twice): (Pages, Pages), elapsed: Duration) {
        // Those that broke were merged for half of the time, as far as one can tell.
        self.page_seconds += (merged.0 as f64 - broken.0 as f64 / 2.0) * elapsed.as_secs_f64();
        self.broken += broken;
        self.twice += twice;
        self.merged = self.merged.max(merged);
    }

    /// Writes a second and page, not to be exceeded by the truth from below with 95 % confidence: the lower limit of a
    /// Poisson rate, by the cube root approximation to the chi-squared distribution (E. B. Wilson, M. M. Hilferty, PNAS
    /// 17, 1931).
    pub fn rate_at_least(&self) -> f64 {
        let broken = self.broken.0 as f64;
        if broken < 1.0 || self.page_seconds <= 0.0 {
            return 0.0;
        }
        let root = 1.0 - 1.0 / (9.0 * broken) - Z95 / (3.0 * broken.sqrt());
        broken * root.max(0.0).powi(3) / self.page_seconds
    }

    /// Whether merging such pages pays: unless they are known to last shorter than what merging and breaking one costs.
    pub fn pays(&self, page_bytes: u64) -> bool {
        self.rate_at_least() * must_last(page_bytes).as_secs_f64() <= 1.0
    }

    /// Whether at least half of such pages were merged and written twice, and soon each time.
    pub fn thrashes(&self, page_bytes: u64) -> bool {
        let soon = (must_last(page_bytes) * THRASHES).as_secs_f64();
        self.twice > Pages::ZERO && self.twice.0 * 2 >= self.merged.0 && self.page_seconds < self.broken.0 as f64 * soon
    }
}

impl Add for Seen {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            page_seconds: self.page_seconds + other.page_seconds,
            broken: self.broken + other.broken,
            twice: self.twice + other.twice,
            merged: self.merged + other.merged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn seen(page_seconds: f64, broken: u64) -> Seen {
        Seen { page_seconds, broken: Pages(broken), twice: Pages::ZERO, merged: Pages(1) }
    }

    #[test]
    fn rates_are_bounded_from_below() {
        assert_eq!(seen(100.0, 0).rate_at_least(), 0.0);
        assert_eq!(seen(0.0, 5).rate_at_least(), 0.0);
        // The lower limits of a Poisson mean for 10 and 100 events at 95 %: 5.43 and 84.1 (tables of chi-squared,
        // halved).
        assert!((seen(1.0, 10).rate_at_least() - 5.43).abs() < 0.05);
        assert!((seen(1.0, 100).rate_at_least() - 84.1).abs() < 0.2);
    }

    #[test]
    fn a_page_of_4_kib_has_to_last_thirteen_seconds() {
        // 8.5 us x 100 MiB x 60 s / 4096 B = 13.06 s.
        assert!(seen(1000.0 * 20.0, 1000).pays(4096), "written every 20 s");
        assert!(!seen(1000.0 * 10.0, 1000).pays(4096), "written every 10 s");
        assert!(seen(1000.0 * 10.0, 1000).pays(65536), "sixteen times the page, sixteen times the gain");
    }

    #[test]
    fn what_is_five_seconds_old_is_expected_to_pay() {
        // 5.14 ln(1 + 60 / 5.14) = 13.05, and 5.15 ln(1 + 60 / 5.15) = 13.07.
        assert!((ripe_after(4096).as_secs_f64() - 5.145).abs() < 0.01, "{:?}", ripe_after(4096));
        assert!(ripe_after(65536) < ripe_after(16384) && ripe_after(16384) < ripe_after(4096));
    }

    #[test]
    fn a_granted_share_keeps_what_lasts_for_three_seconds() {
        // Merged for four seconds until each write: less than the thirteen of the market price.
        let four_seconds = seen(4.0 * 1000.0, 1000);
        let market = Price::default();
        assert!(!market.pays(&four_seconds, 4096));
        let churn = |lasts: f64, breaks: f64| Churn { lasts, breaks };
        let granted = price_within(&[churn(4.0, 900.0)], breaks_allowed(0.1), 4096);
        assert!(granted.pays(&four_seconds, 4096), "{granted:?}");
        assert!(!granted.pays(&seen(1000.0, 1000), 4096), "a second is too short at any price");
    }

    #[test]
    fn what_lasts_shortest_goes_first_when_writes_are_too_many() {
        let churn = |lasts: f64, breaks: f64| Churn { lasts, breaks };
        let price = |parts: &[Churn]| match price_within(parts, 6000.0, 4096) {
            Price::Granted(must_last) => must_last.as_secs_f64(),
            Price::Market => panic!("no share was granted"),
        };
        assert!((price(&[]) - 2.61).abs() < 0.01);
        assert!((price(&[churn(8.0, 3000.0), churn(4.0, 3000.0)]) - 2.61).abs() < 0.01, "all fit");
        assert_eq!(price(&[churn(4.0, 3001.0), churn(8.0, 3000.0)]), 8.0, "the shorter ones do not");
        assert!((price(&[churn(8.0, 6001.0)]) - 13.06).abs() < 0.01, "nothing but what pays at the market price");
        let lasting = [churn(20.0, 9000.0), churn(5.0, 6000.0)];
        assert!((price(&lasting) - 2.61).abs() < 0.01, "what pays at the market price takes no allowance");
        // 1.5 % of a CPU at 2.5 us a write, or half of the share at 6 us a merge.
        assert!((breaks_allowed(1.0) - 6000.0).abs() < 1e-6 && (breaks_allowed(0.012) - 1000.0).abs() < 1e-6);
    }

    #[test]
    fn a_few_writes_prove_nothing() {
        let mut few = Seen::default();
        few.count(Pages(100), (Pages(1), Pages(0)), Duration::from_millis(100));
        assert!(few.pays(4096));
        let mut many = Seen::default();
        many.count(Pages(100), (Pages(40), Pages(0)), Duration::from_millis(100));
        assert!(!many.pays(4096));
    }

    #[test]
    fn what_is_written_again_and_again_thrashes_though_it_pays() {
        let rounds = |pages: u64, every: u64, times: u64| {
            let mut seen = Seen::default();
            for time in 0..times {
                let twice = if time == 1 { pages } else { 0 };
                seen.count(Pages(100), (Pages(pages), Pages(twice)), Duration::from_secs(every));
            }
            (seen.pays(4096), seen.thrashes(4096))
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
        fn more_writes_never_speak_for_merging(seconds in 0.001f64..1e6, broken in 0u64..10_000, more in 0u64..10_000) {
            prop_assert!(seen(seconds, broken).rate_at_least() <= seen(seconds, broken + more).rate_at_least() + 1e-9);
            prop_assert!(seen(seconds, broken).pays(4096) || !seen(seconds, broken + more).pays(4096));
        }
    }
}
