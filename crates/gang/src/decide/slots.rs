//! How long ordinary tasks wait for their slots.

use std::time::Duration;

/// The longest interval between two slots of ordinary tasks that may be chosen: a tenth of the 5 s after which the kernel
/// removes the scheduler (`timeout_ms` in gang.bpf.c), because tasks share these slots.
pub const MAX_ORDINARY_INTERVAL: Duration = Duration::from_millis(500);

/// The interval between two slots of ordinary tasks that use much CPU time, while gangs want all CPUs. Such a slot is half
/// as long as a gang's, and all of them have a share of the time: `slot / 2 * 100 / share_percent`.
pub fn ordinary_interval(slot: Duration, share_percent: u32) -> Duration {
    slot / 2 * 100 / share_percent.max(1)
}

/// The least share, in percent, for which the interval is not longer than [`MAX_ORDINARY_INTERVAL`].
pub fn least_ordinary_share(slot: Duration) -> u32 {
    (1..100).find(|share| ordinary_interval(slot, *share) <= MAX_ORDINARY_INTERVAL).unwrap_or(100)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_slots_have_the_share_of_the_time() {
        assert_eq!(ordinary_interval(Duration::from_millis(8), 10), Duration::from_millis(40));
        assert_eq!(ordinary_interval(Duration::from_millis(100), 5), Duration::from_secs(1));
    }

    #[test]
    fn least_share_keeps_the_interval_short() {
        for (slot_ms, expected) in [(2, 1), (8, 1), (50, 5), (100, 10)] {
            assert_eq!(least_ordinary_share(Duration::from_millis(slot_ms)), expected, "{slot_ms}");
        }
    }
}
