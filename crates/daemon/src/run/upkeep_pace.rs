//! The pace of work that is repeated from time to time, and takes the longer the more processes there are.

use std::time::Duration;

/// Minimum pause between two times.
const MIN_PAUSE: Duration = Duration::from_secs(1);

/// The same as a multiple of the CPU time that the last time took: the work stays below a thousandth of one CPU.
const PAUSE_PER_CPU_TIME: u32 = 1000;

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
        self.next = now + MIN_PAUSE.max(cpu_time * PAUSE_PER_CPU_TIME);
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
