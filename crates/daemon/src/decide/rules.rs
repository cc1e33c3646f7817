//! The daemon's rules: its mode, goals and limits.

use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::units::Bytes;
use std::time::Duration;

/// What the daemon may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DaemonMode {
    /// Track processes and report them; take no census.
    Observe,
    /// Take censuses and report profitable merges; change nothing.
    #[default]
    Advise,
    /// Execute profitable merges.
    Act,
}

/// Time of day on the host's clocks, in seconds since midnight. Hours given by a clock follow it when it is adjusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeOfDay {
    /// In the host's time zone.
    pub local: u32,
    /// In UTC.
    pub utc: u32,
}

/// A daily period, in seconds since midnight. A period that ends before it starts spans midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DailyHours {
    /// The first second of the period.
    pub start_second: u32,
    /// The first second after the period.
    pub end_second: u32,
    /// Whether the period is given in UTC instead of local time.
    pub in_utc: bool,
}

impl DailyHours {
    /// Whether a time of day lies within the period. A period with equal start and end covers the whole day.
    pub fn contains(self, time: TimeOfDay) -> bool {
        let second = if self.in_utc { time.utc } else { time.local };
        if self.start_second < self.end_second {
            (self.start_second..self.end_second).contains(&second)
        } else {
            second >= self.start_second || second < self.end_second
        }
    }
}

/// The daemon's rules: its mode, goals and limits.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonRules {
    /// What it may do.
    pub mode: DaemonMode,
    /// `MemAvailable` to keep: above it nothing is merged. `None`: all profitable merges are executed.
    pub keep_available: Option<Bytes>,
    /// Share of one CPU that ksmd and pagefold may use together on average. It may exceed 1.
    pub cpu_rate: f64,
    /// CPU time that may accumulate for a burst.
    pub burst: Duration,
    /// Cost limit in CPU seconds per MiB of net savings. The cost of a process is ksmd's CPU time for its ranges, plus
    /// its part of the census that found them, by pages and regions. Each process is judged alone. The limit does not
    /// apply to processes that are short of memory.
    pub max_cpu_seconds_per_mib: f64,
    /// How long a new process is left alone.
    pub debounce: Duration,
    /// Interval between the first two scans of a process. A content that is unchanged after it is stable enough to
    /// merge ([`pagefold_base::merge_lifetime::stable_age`]). Later intervals are longer, unless a scan finds
    /// something.
    pub min_scan_interval: Duration,
    /// The longest scan interval, unless fruitless scans would exceed their share of the CPU.
    pub max_scan_interval: Duration,
    /// Share of one CPU for repeated scans of all processes that find nothing to merge.
    pub max_fruitless_scan_share: f64,
    /// Percent of ten seconds in which some task waited for memory; memory is short from here on.
    pub pressure_percent: f64,
    /// Additional CPU waiting of programs caused by the daemon, as a share of ten seconds. Above it the daemon backs
    /// off.
    pub max_slowdown: f64,
    /// Periods without scans and merges. Merged pages are still checked, and unenrolled where needed.
    pub quiet_hours: Vec<DailyHours>,
    /// Whether to act although another program tunes KSM.
    pub ignore_tuners: bool,
    /// Whether pages of different trust domains may be merged.
    pub across_domains: bool,
}

impl DaemonRules {
    /// The rules for one Nth of a host: the CPU time for its memory is one Nth.
    pub fn for_part(self, divisor: u32) -> Self {
        Self {
            cpu_rate: self.cpu_rate / f64::from(divisor),
            burst: self.burst / divisor,
            max_fruitless_scan_share: self.max_fruitless_scan_share / f64::from(divisor),
            ..self
        }
    }
}

impl Default for DaemonRules {
    fn default() -> Self {
        Self {
            mode: DaemonMode::default(),
            keep_available: None,
            cpu_rate: 0.1,
            burst: Duration::from_secs(30),
            max_cpu_seconds_per_mib: 0.02,
            debounce: Duration::from_secs(1),
            min_scan_interval: Duration::from_millis(5200),
            max_scan_interval: Duration::from_secs(1800),
            max_fruitless_scan_share: 1.0 / 2000.0,
            pressure_percent: DEFAULT_PRESSURE_PERCENT,
            max_slowdown: 0.1,
            quiet_hours: Vec::new(),
            ignore_tuners: false,
            across_domains: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_of_a_host_has_its_part_of_all_cpu_time() {
        let whole = DaemonRules::default();
        let part = whole.clone().for_part(8);
        assert!((part.cpu_rate * 8.0 - whole.cpu_rate).abs() < 1e-12);
        assert!((part.max_fruitless_scan_share * 8.0 - whole.max_fruitless_scan_share).abs() < 1e-12);
        assert_eq!(part.burst * 8, whole.burst);
        assert_eq!(
            (part.min_scan_interval, part.max_scan_interval),
            (whole.min_scan_interval, whole.max_scan_interval)
        );
    }

    #[test]
    fn hours_may_go_over_midnight() {
        let hour = |hour: u32| hour * 3600;
        let hours = |from, to| DailyHours { start_second: from, end_second: to, in_utc: false };
        let within = |hours: DailyHours, second| hours.contains(TimeOfDay { local: second, utc: hour(12) });
        let (day, night) = (hours(hour(8), hour(18)), hours(hour(22), hour(6)));
        assert!(within(day, hour(8)) && !within(day, hour(18)) && !within(day, hour(7)));
        assert!(within(night, hour(23)) && within(night, 0) && !within(night, hour(6)) && !within(night, hour(12)));
        assert!(within(hours(5, 5), 4));
    }

    #[test]
    fn hours_follow_the_clock_they_name() {
        let morning = |utc| DailyHours { start_second: 6 * 3600, end_second: 9 * 3600, in_utc: utc };
        let berlin = TimeOfDay { local: 8 * 3600, utc: 6 * 3600 };
        let tokyo = TimeOfDay { local: 16 * 3600, utc: 7 * 3600 };
        assert!(morning(false).contains(berlin) && morning(true).contains(berlin));
        assert!(!morning(false).contains(tokyo) && morning(true).contains(tokyo));
    }
}
