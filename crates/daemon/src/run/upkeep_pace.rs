//! The pace of work that is repeated from time to time, and takes the longer the more processes there are.

use std::time::Duration;

/// Minimum pause between two times, and the same as a multiple of the CPU time that the last one took: the work stays
/// below a thousandth of one CPU.
const PAUSE: (Duration, u32) = (Duration::from_secs(1), 1000);

/// When the work is due next.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UpkeepPace {
    next: Duration,
}

impl UpkeepPace {
    /// Whether the pause after the last time is over.
    pub fn is_due(self, now: Duration) -> bool {
        now >= self.next
    }

    /// The work was done now, and took this CPU time.
    pub fn record(&mut self, now: Duration, cpu_time: Duration) {
        self.next = now + PAUSE.0.max(cpu_time * PAUSE.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_work_is_seldom_due() {
        let mut pace = UpkeepPace::default();
        assert!(pace.is_due(Duration::ZERO));
        for (cpu_millis, pause) in [(0, 1), (1, 1), (20, 20)] {
            let now = Duration::from_secs(100);
            pace.record(now, Duration::from_millis(cpu_millis));
            assert!(!pace.is_due(now + Duration::from_millis(pause * 1000 - 1)), "{cpu_millis}");
            assert!(pace.is_due(now + Duration::from_secs(pause)), "{cpu_millis}");
        }
    }
}
