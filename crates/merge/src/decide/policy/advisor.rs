//! The kernel's scan-time advisor: what it is told, and what it does.
//!
//! Mirrors `scan_time_advisor`, `set_advisor_defaults` and `advisor_start_scan` of mm/ksm.c as of 6.18 (since 6.8). At
//! the end of each full scan it sets `pages_to_scan` so that the next one should take `advisor_target_scan_time`,
//! within bounds of ksmd's CPU. It aims at a time and never at a benefit: on a host with little to scan it stretches
//! the scan to the target, and is slower than the kernel's default.
//!
//! Quirks, kept: arithmetic is of integers and divides early; the moving average starts at nothing, so that the first
//! change counts by its weight of 30 % only; switching the advisor on forgets the CPU time it last saw, so that the
//! first step takes ksmd's CPU since boot for that of one scan; and where it is switched on in the middle of a scan the
//! first step takes the time since boot for that scan's. `advisor_min_pages_to_scan` is where it starts, and is no
//! lower bound afterwards.

use pagefold_base::ksm::{Setting, Settings};
use std::time::Duration;

/// `EWMA_WEIGHT`: what the newest change counts, in percent.
const EWMA_WEIGHT_PERCENT: u64 = 30;

/// `KSM_ADVISOR_MIN_CPU`, in percent of one CPU.
const MIN_CPU_PERCENT: u64 = 10;

/// What the advisor is told: its files in `/sys/kernel/mm/ksm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advisor {
    /// `advisor_target_scan_time`, in seconds.
    pub target_scan_time: u64,
    /// `advisor_max_cpu`, in percent of one CPU.
    pub max_cpu: u64,
    /// `advisor_min_pages_to_scan`: where it starts.
    pub min_pages_to_scan: u64,
    /// `advisor_max_pages_to_scan`.
    pub max_pages_to_scan: u64,
}

impl Default for Advisor {
    fn default() -> Self {
        Self { target_scan_time: 200, max_cpu: 70, min_pages_to_scan: 500, max_pages_to_scan: 30_000 }
    }
}

/// What the advisor remembers from scan to scan (`struct advisor_ctx`), with the value that it sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvisorContext {
    /// `pages_to_scan`.
    pub pages_to_scan: u64,
    /// `scan_time`: whole seconds of the scan before; 0 for none.
    pub scan_time: u64,
    /// `change`: the moving average, in percent.
    pub change: u64,
    /// `cpu_time`: what ksmd had used at the end of the scan before.
    pub cpu_time: Duration,
}

impl Advisor {
    /// What switches it on, with ksmd's sleep as the kernel has it.
    pub fn settings(&self) -> Settings {
        Settings::from([
            (Setting::AdvisorMode, "scan-time".to_owned()),
            (Setting::AdvisorTargetScanTime, self.target_scan_time.to_string()),
            (Setting::AdvisorMaxCpu, self.max_cpu.to_string()),
            (Setting::AdvisorMinPagesToScan, self.min_pages_to_scan.to_string()),
            (Setting::AdvisorMaxPagesToScan, self.max_pages_to_scan.to_string()),
            (Setting::SleepMillisecs, super::DEFAULT_SLEEP_MILLISECS.to_string()),
            (Setting::Run, "1".to_owned()),
        ])
    }

    /// What it remembers when it has just been switched on.
    pub fn start(&self) -> AdvisorContext {
        AdvisorContext { pages_to_scan: self.min_pages_to_scan, scan_time: 0, change: 0, cpu_time: Duration::ZERO }
    }
}

impl AdvisorContext {
    /// The end of a scan: how long it took, and what ksmd has used since boot.
    #[must_use]
    pub fn step(self, rule: &Advisor, scan: Duration, cpu_time: Duration) -> Self {
        let scan_time = scan.as_secs().max(1);
        let used = cpu_time.saturating_sub(self.cpu_time).as_millis() as u64;
        let cpu_percent = (used * 100 / (scan_time * 1000)).max(1);
        let before = if self.scan_time == 0 { scan_time } else { self.scan_time };

        let factor = (rule.target_scan_time.saturating_mul(100) / scan_time).max(1);
        let change = (scan_time * 100 / before).max(1);
        let change = ((100 - EWMA_WEIGHT_PERCENT) * self.change + EWMA_WEIGHT_PERCENT * change) / 100;
        let wanted = (self.pages_to_scan * 100 / factor).saturating_mul(change) / 100;

        let page_cost = (self.pages_to_scan / cpu_percent).max(1);
        let pages_to_scan =
            wanted.min(page_cost * rule.max_cpu).max(page_cost * MIN_CPU_PERCENT).min(rule.max_pages_to_scan);
        Self { pages_to_scan, scan_time, change, cpu_time }
    }
}
