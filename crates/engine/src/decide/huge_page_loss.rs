//! Expected loss of a program whose huge pages were split by merging and are mapped by base pages since.
//!
//! A huge page takes one entry of the TLB, its 512 base pages take one each. Random reads of a table in huge pages were
//! 42 to 61 % slower after it was merged, and a numpy program took 28 % more CPU time. The engine cannot see TLB
//! misses, so it assumes that a program accesses all of its resident memory equally often, and at random.
//!
//! Limits: a table that is accessed more often than the rest of the memory costs more than predicted.

use pagefold_base::units::Pages;
use std::time::Duration;

/// Slowdown of access by base pages, as a share of the access time by huge pages.
const BASE_PAGE_SLOWDOWN: f64 = 0.5;

/// Share of the slowdown bound that the loss may take. The rest is for the work of merging.
const MAX_LOSS_SHARE_OF_BOUND: f64 = 0.5;

/// Number of further pages whose huge page may be split, given the resident and the already split pages. `max_slowdown`
/// is the bound on the slowdown, a share of the program's own time.
pub fn splittable_pages(max_slowdown: f64, resident: Pages, already_split: Pages) -> Pages {
    let bound = if max_slowdown.is_nan() { 0.0 } else { max_slowdown.clamp(0.0, 1.0) };
    let share = (bound * MAX_LOSS_SHARE_OF_BOUND / BASE_PAGE_SLOWDOWN).min(1.0);
    Pages(((resident.0 as f64 * share) as u64).saturating_sub(already_split.0))
}

/// Time that a program is expected to have lost in a period, with `split` of its `resident` pages in split huge pages.
pub fn expected_time_loss(period: Duration, resident: Pages, split: Pages) -> Duration {
    let share = split.0 as f64 / resident.0.max(1) as f64;
    period.mul_f64(BASE_PAGE_SLOWDOWN * share.min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_cost_at_most_half_of_the_bound() {
        let resident = Pages(1_000_000);
        for bound in [0.001, 0.02, 0.3, 1.0] {
            let split = splittable_pages(bound, resident, Pages::ZERO);
            let lost = expected_time_loss(Duration::from_secs(1000), resident, split).as_secs_f64();
            assert!(lost <= 1000.0 * bound * MAX_LOSS_SHARE_OF_BOUND + 1e-6, "{bound}: {lost}");
            assert!(lost > 990.0 * bound * MAX_LOSS_SHARE_OF_BOUND, "{bound}: {lost}");
            assert_eq!(splittable_pages(bound, resident, split), Pages::ZERO, "the bound is used up");
        }
    }

    #[test]
    fn invalid_bounds_and_counts_split_nothing() {
        assert_eq!(splittable_pages(f64::NAN, Pages(1000), Pages::ZERO), Pages::ZERO);
        assert_eq!(splittable_pages(-1.0, Pages(1000), Pages::ZERO), Pages::ZERO);
        assert_eq!(splittable_pages(1.0, Pages::ZERO, Pages(5)), Pages::ZERO);
        assert_eq!(expected_time_loss(Duration::from_secs(2), Pages::ZERO, Pages(5)), Duration::from_secs(1));
    }
}
