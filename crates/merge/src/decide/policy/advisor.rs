//! The kernel's scan-time advisor: its inputs and its steps.
//!
//! Mirrors `scan_time_advisor`, `set_advisor_defaults` and `advisor_start_scan` of mm/ksm.c as of 6.18 (since 6.8). At
//! the end of each full scan it sets `pages_to_scan` so that the next scan should take `advisor_target_scan_time`,
//! within bounds of ksmd's CPU. It aims at a scan time and not at savings: on a host with little to scan it stretches
//! the scan to the target, and is slower than the kernel's default.
//!
//! Quirks, kept: arithmetic is in integers and divides early. The moving average starts at zero, so the first change
//! counts with its weight of 30 % only. Switching the advisor on resets its record of ksmd's CPU time, so the first
//! step takes ksmd's CPU time since boot for one scan's. If it is switched on in the middle of a scan, the first step
//! takes the time since boot for that scan's. `advisor_min_pages_to_scan` is the start value, and no lower bound
//! afterwards.

use pagefold_base::ksm::{Setting, Settings};
use std::time::Duration;

/// `EWMA_WEIGHT`: the weight of the newest change, in percent.
const EWMA_WEIGHT_PERCENT: u64 = 30;

/// `KSM_ADVISOR_MIN_CPU`, in percent of one CPU.
const MIN_CPU_PERCENT: u64 = 10;

/// The advisor's inputs: its files in `/sys/kernel/mm/ksm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advisor {
    /// `advisor_target_scan_time`, in seconds.
    pub target_scan_time: u64,
    /// `advisor_max_cpu`, in percent of one CPU.
    pub max_cpu: u64,
    /// `advisor_min_pages_to_scan`: the start value.
    pub min_pages_to_scan: u64,
    /// `advisor_max_pages_to_scan`.
    pub max_pages_to_scan: u64,
}

impl Default for Advisor {
    fn default() -> Self {
        Self { target_scan_time: 200, max_cpu: 70, min_pages_to_scan: 500, max_pages_to_scan: 30_000 }
    }
}

/// The advisor's state from scan to scan (`struct advisor_ctx`), with the value that it sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdvisorContext {
    /// `pages_to_scan`.
    pub pages_to_scan: u64,
    /// `scan_time`: whole seconds of the previous scan; 0 for none.
    pub scan_time: u64,
    /// `change`: the moving average, in percent.
    pub change: u64,
    /// `cpu_time`: ksmd's CPU time at the end of the previous scan.
    pub cpu_time: Duration,
}

impl Advisor {
    /// The settings that switch it on, with the kernel's default sleep of ksmd.
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

    /// The state directly after it is switched on.
    pub fn start(&self) -> AdvisorContext {
        AdvisorContext { pages_to_scan: self.min_pages_to_scan, scan_time: 0, change: 0, cpu_time: Duration::ZERO }
    }
}

impl AdvisorContext {
    /// The end of a scan, with its duration and ksmd's CPU time since boot.
    #[must_use]
    pub fn step(self, rule: &Advisor, scan: Duration, cpu_time: Duration) -> Self {
        let scan_time = scan.as_secs().max(1);
        let used_ms = cpu_time.saturating_sub(self.cpu_time).as_millis() as u64;
        let cpu_percent = (used_ms * 100 / (scan_time * 1000)).max(1);
        let previous_scan_time = if self.scan_time == 0 { scan_time } else { self.scan_time };

        let factor = (rule.target_scan_time.saturating_mul(100) / scan_time).max(1);
        let change = (scan_time * 100 / previous_scan_time).max(1);
        let change = ((100 - EWMA_WEIGHT_PERCENT) * self.change + EWMA_WEIGHT_PERCENT * change) / 100;
        let unbounded_pages = (self.pages_to_scan * 100 / factor).saturating_mul(change) / 100;

        let page_cost = (self.pages_to_scan / cpu_percent).max(1);
        let pages_to_scan =
            unbounded_pages.min(page_cost * rule.max_cpu).max(page_cost * MIN_CPU_PERCENT).min(rule.max_pages_to_scan);
        Self { pages_to_scan, scan_time, change, cpu_time }
    }
}
