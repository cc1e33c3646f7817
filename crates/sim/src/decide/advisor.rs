//! The scan-time advisor: it chooses `pages_to_scan` after each scan.
//!
//! Mirrors `scan_time_advisor` and `set_advisor_defaults` (mm/ksm.c, since 6.8), integer by integer.

/// The settings `advisor_*` of `/sys/kernel/mm/ksm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvisorSettings {
    /// Seconds that a scan should take.
    pub target_scan_seconds: u64,
    /// Percent of one CPU at most.
    pub max_cpu_percent: u64,
    /// The number of pages in a batch at the start.
    pub min_pages_to_scan: u64,
    /// Pages in a batch at most.
    pub max_pages_to_scan: u64,
}

impl Default for AdvisorSettings {
    fn default() -> Self {
        Self { target_scan_seconds: 200, max_cpu_percent: 70, min_pages_to_scan: 500, max_pages_to_scan: 30_000 }
    }
}

/// Percent of one CPU that the advisor allows at least (`KSM_ADVISOR_MIN_CPU`).
const MIN_CPU_PERCENT: u64 = 10;

/// Weight in percent of the newest change (`EWMA_WEIGHT`).
const NEWEST_CHANGE_PERCENT: u64 = 30;

/// What the advisor remembers of earlier scans.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdvisorMemory {
    scan_seconds: u64,
    change_percent: u64,
    cpu_ns: u64,
}

impl AdvisorMemory {
    /// The next `pages_to_scan`, after a scan of `scan_ms`. `cpu_ns` is ksmd's CPU time since its start.
    pub fn pages_to_scan(&mut self, settings: &AdvisorSettings, pages_to_scan: u64, scan_ms: u64, cpu_ns: u64) -> u64 {
        let scan_seconds = (scan_ms / 1000).max(1);
        let cpu_ms = cpu_ns.wrapping_sub(self.cpu_ns) / 1_000_000;
        let cpu_percent = (cpu_ms * 100 / (scan_seconds * 1000)).max(1);
        let last_seconds = if self.scan_seconds == 0 { scan_seconds } else { self.scan_seconds };
        let factor = (settings.target_scan_seconds * 100 / scan_seconds).max(1);
        let newest = (scan_seconds * 100 / last_seconds).max(1);
        let change = ((100 - NEWEST_CHANGE_PERCENT) * self.change_percent + NEWEST_CHANGE_PERCENT * newest) / 100;
        let pages = pages_to_scan * 100 / factor * change / 100;
        let pages_per_percent = (pages_to_scan / cpu_percent).max(1);
        let pages = pages.min(pages_per_percent * settings.max_cpu_percent);
        let pages = pages.max(pages_per_percent * MIN_CPU_PERCENT).min(settings.max_pages_to_scan);
        *self = Self { scan_seconds, change_percent: change, cpu_ns };
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_scan_follows_the_formula() {
        let mut memory = AdvisorMemory::default();
        // 400 s against 200 s: factor 50, change (70*0 + 30*100)/100 = 30; 500*100/50*30/100 = 300.
        // 40 s of CPU in 400 s are 10 %: 50 pages for each percent, at least 10 % = 500.
        let pages = memory.pages_to_scan(&AdvisorSettings::default(), 500, 400_000, 40_000_000_000);
        assert_eq!(pages, 500);
        // The same scan again: change (70*30 + 30*100)/100 = 51; 500*100/50*51/100 = 510, and 51 % of the bounds.
        let pages = memory.pages_to_scan(&AdvisorSettings::default(), 500, 400_000, 80_000_000_000);
        assert_eq!(pages, 510);
    }

    #[test]
    fn cpu_bound_caps_the_batch() {
        let mut memory = AdvisorMemory::default();
        // 50 % of a CPU at 10,000 pages: 200 for each percent, so 70 % allow 14,000.
        let pages = memory.pages_to_scan(&AdvisorSettings::default(), 10_000, 4_000_000, 2_000_000_000_000);
        assert_eq!(pages, 14_000);
    }
}
