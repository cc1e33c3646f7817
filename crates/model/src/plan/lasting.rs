//! Whether merged pages stay merged long enough to pay.
//!
//! A page that is written after it was merged is copied back, and may be merged again: memory is held for a moment, and
//! paid for with CPU time of ksmd and a page fault of the program each time. What a few merged pages did while they were
//! watched tells what the rest of their kind will do.
//!
//! Each page is taken to break at a constant rate, so that of those merged `1 - exp(-rate * time)` break within a time.
//! Of that share the upper end of a one-sided Wilson score interval is believed (E. B. Wilson, "Probable inference, the
//! law of succession, and statistical inference", Journal of the American Statistical Association 22, 1927): a rate that
//! few pages or little time have shown is taken to be worse than it looked. Pages that are written together are not
//! independent, which the interval does not know: watch pieces from all over a region.

use crate::savings::CPU_SECOND_BYTES;
use crate::units::{Bytes, Pages};
use std::time::Duration;

/// Quantile of the normal distribution for one-sided 95 %.
const Z: f64 = 1.6449;

/// What was seen of the merged pages of one kind: of one region, zeros or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// Pages that were merged when watching began.
    pub merged: Pages,
    /// Those of them that were not merged any more when it ended.
    pub broken: Pages,
    /// How long they were watched.
    pub time: Duration,
}

/// What merging and breaking take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Toll {
    /// CPU time of ksmd to merge a page, its scans included.
    pub merge: Duration,
    /// CPU time of the program when it writes to a merged page: a fault and a copy.
    pub fault: Duration,
    /// Byte-seconds of memory that a second of CPU time is worth.
    pub cpu_second: f64,
}

/// How long memory is taken to be held where nothing else is known. With it, the price of CPU time
/// ([`CPU_SECOND_BYTES`]) makes one core worth 6 GiB held all the while, about what comes with a core in a server.
pub const HELD: Duration = Duration::from_secs(60);

impl Default for Toll {
    /// 6 us to merge a page (3 for zeros to 10, as measured) and 3 us for the fault.
    fn default() -> Self {
        Self {
            merge: Duration::from_micros(6),
            fault: Duration::from_micros(3),
            cpu_second: CPU_SECOND_BYTES as f64 * HELD.as_secs_f64(),
        }
    }
}

impl Toll {
    /// How long a page must stay merged to pay, if it gives back so many bytes while it is.
    pub fn must_last(&self, gain: Bytes) -> Duration {
        let price = (self.merge + self.fault).as_secs_f64() * self.cpu_second;
        Duration::try_from_secs_f64(price / gain.0 as f64).unwrap_or(Duration::MAX)
    }

    /// How long pages must be watched for their staying merged to prove that they pay, if none breaks. `None` if there
    /// are no pages.
    pub fn must_watch(&self, merged: Pages, gain: Bytes) -> Option<Duration> {
        let never_broken = Watched { merged, broken: Pages::ZERO, time: Duration::ZERO };
        let rate = -(1.0 - never_broken.breaking()).ln();
        (merged.0 > 0)
            .then(|| Duration::try_from_secs_f64(self.must_last(gain).as_secs_f64() * rate).unwrap_or(Duration::MAX))
    }
}

impl Watched {
    /// The share of the pages that break within the time, as the upper end of its interval; 1 if there were none.
    pub fn breaking(&self) -> f64 {
        let n = self.merged.0 as f64;
        if n == 0.0 {
            return 1.0;
        }
        let share = self.broken.0.min(self.merged.0) as f64 / n;
        let spread = (share * (1.0 - share) / n + Z * Z / (4.0 * n * n)).sqrt();
        ((share + Z * Z / (2.0 * n) + Z * spread) / (1.0 + Z * Z / n)).min(1.0)
    }

    /// How long a page stays merged in the mean, at least as far as can be told.
    pub fn lasting(&self) -> Duration {
        let rate = -(1.0 - self.breaking()).ln();
        Duration::try_from_secs_f64(self.time.as_secs_f64() / rate).unwrap_or(Duration::ZERO)
    }

    /// Whether pages of this kind, each giving back so many bytes while it is merged, pay for being merged and broken.
    pub fn pays(&self, gain: Bytes, toll: &Toll) -> bool {
        self.lasting() >= toll.must_last(gain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Bytes = Bytes(4096);

    fn watched(merged: u64, broken: u64, seconds: f64) -> Watched {
        Watched { merged: Pages(merged), broken: Pages(broken), time: Duration::from_secs_f64(seconds) }
    }

    #[test]
    fn a_page_must_last_until_it_has_paid() {
        // 9 us * 100 MiB * 60 s / 4096 B.
        let seconds = Toll::default().must_last(PAGE).as_secs_f64();
        assert!((seconds - 13.824).abs() < 1e-6, "{seconds}");
        let half = Toll::default().must_last(Bytes(2048)).as_secs_f64();
        assert!((half - 27.648).abs() < 1e-6, "{half}");
        assert_eq!(Toll::default().must_last(Bytes(0)), Duration::MAX);
    }

    #[test]
    fn what_was_seen_is_believed_with_care() {
        // Of 100 pages none: z^2 / (n + z^2) = 2.7057 / 102.7057 = 0.026344.
        assert!((watched(100, 0, 1.0).breaking() - 0.026_344).abs() < 1e-5);
        // Half of 100: (0.5 + 0.0135285 + 1.6449 * sqrt(0.0025 + 0.0000676)) / 1.027057 = 0.581154.
        assert!((watched(100, 50, 1.0).breaking() - 0.581_154).abs() < 1e-5);
        assert_eq!(watched(0, 0, 1.0).breaking(), 1.0);
        assert_eq!(watched(8, 8, 5.0).lasting(), Duration::ZERO);
        // 2 s / -ln(1 - 0.026344) = 2 s / 0.026697 = 74.9 s.
        assert!((watched(100, 0, 2.0).lasting().as_secs_f64() - 74.91).abs() < 0.05);
    }

    #[test]
    fn hot_pages_do_not_pay_and_quiet_ones_do() {
        let toll = Toll::default();
        let check = |watched: Watched, pays| assert_eq!(watched.pays(PAGE, &toll), pays, "{watched:?}");
        check(watched(1000, 0, 2.0), true);
        check(watched(1000, 900, 2.0), false);
        check(watched(1000, 200, 2.0), false);
        check(watched(1000, 50, 2.0), true);
        check(watched(4, 0, 2.0), false);
        check(watched(0, 0, 60.0), false);
        check(watched(1000, 0, 0.0), false);
    }

    proptest! {
        #[test]
        fn more_broken_is_never_better(merged in 1u64..5000, a in 0.0f64..=1.0, b in 0.0f64..=1.0, seconds in 0.1f64..100.0) {
            let of = |share: f64| watched(merged, (merged as f64 * share) as u64, seconds);
            let (few, many) = (of(a.min(b)), of(a.max(b)));
            prop_assert!(few.lasting() >= many.lasting());
            prop_assert!(few.breaking() >= few.broken.0 as f64 / merged as f64 - 1e-12);
        }

        #[test]
        fn more_pages_and_more_time_prove_more(merged in 1u64..5000, seconds in 0.1f64..100.0, times in 1u32..8) {
            let once = watched(merged, 0, seconds);
            prop_assert!(watched(merged * u64::from(times), 0, seconds).lasting() >= once.lasting());
            prop_assert!(watched(merged, 0, seconds * f64::from(times)).lasting() >= once.lasting());
        }

        #[test]
        fn watching_long_enough_proves_enough(merged in 1u64..5000, gain in 1024u64..=4096) {
            let toll = Toll::default();
            let time = toll.must_watch(Pages(merged), Bytes(gain)).expect("there are pages");
            let watched = |time| Watched { merged: Pages(merged), broken: Pages(0), time };
            prop_assert!(watched(time + Duration::from_millis(1)).pays(Bytes(gain), &toll));
            prop_assert!(!watched(time.mul_f64(0.99)).pays(Bytes(gain), &toll));
        }
    }
}
