//! What a daemon is told to do and to keep to.

use pagefold_base::memory::DEFAULT_PRESSURE_PERCENT;
use pagefold_base::units::Bytes;
use std::time::Duration;

/// What a daemon may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DaemonMode {
    /// Look and tell; take no census.
    Observe,
    /// Take censuses and tell what would pay; change nothing.
    #[default]
    Advise,
    /// Merge what pays.
    Act,
}

/// What clocks show, in seconds since midnight. Where a clock is put forward or back, so are the hours that are told by
/// it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeOfDay {
    /// The host's own, in its time zone.
    pub local: u32,
    /// UTC.
    pub utc: u32,
}

/// A part of each day, in seconds since midnight. One that ends before it begins goes over midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DailyHours {
    /// The first second.
    pub start_second: u32,
    /// The first second after it.
    pub end_second: u32,
    /// Whether they are told by UTC, and not by the host's own clock.
    pub in_utc: bool,
}

impl DailyHours {
    /// Whether a time of the day lies within. Hours that begin when they end are all day.
    pub fn contains(self, time: TimeOfDay) -> bool {
        let second = if self.in_utc { time.utc } else { time.local };
        if self.start_second < self.end_second {
            (self.start_second..self.end_second).contains(&second)
        } else {
            second >= self.start_second || second < self.end_second
        }
    }
}

/// What a daemon is told to do and to keep to.
#[derive(Clone, Debug, PartialEq)]
pub struct DaemonRules {
    /// What it may do.
    pub mode: DaemonMode,
    /// `MemAvailable` to keep: above it nothing is merged. `None`: all that pays is merged.
    pub keep_available: Option<Bytes>,
    /// The share of one CPU that ksmd and pagefold use together on average.
    pub cpu_rate: f64,
    /// CPU time that may be saved up for a burst.
    pub burst: Duration,
    /// CPU seconds at most for a MiB that is given back, net: what ksmd should take for somebody's ranges, and its part
    /// of the census that found them, by its pages and regions. Everybody is judged by itself; it is not asked of those
    /// whom memory is short for.
    pub max_cpu_seconds_per_mib: f64,
    /// How long somebody who has just come is left alone.
    pub debounce: Duration,
    /// The pause between the first two looks at somebody's memory: after it a content is old enough to be merged
    /// ([`pagefold_base::merge_lifetime::stable_age`]). Each further one is longer, unless something is found.
    pub min_scan_interval: Duration,
    /// The longest such pause.
    pub max_scan_interval: Duration,
    /// Percent of ten seconds in which some task waited for memory, from which on memory is short.
    pub pressure_percent: f64,
    /// The part of ten seconds by which programs may wait longer for a CPU by its work, before it backs off.
    pub max_slowdown: f64,
    /// When nobody is looked at and nothing is merged. What is merged is watched, and what has to be is withdrawn.
    pub quiet_hours: Vec<DailyHours>,
    /// Whether to act although another program tunes KSM.
    pub ignore_tuners: bool,
    /// Whether pages of different trust domains may be merged.
    pub across_domains: bool,
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
