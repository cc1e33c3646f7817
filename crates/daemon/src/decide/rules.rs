//! What a daemon is told to do and to keep to.

use pagefold_base::memory::PRESSURE;
use pagefold_base::units::Bytes;
use std::time::Duration;

/// What a daemon may do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mode {
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
pub struct Hours {
    /// The first second.
    pub from: u32,
    /// The first second after it.
    pub to: u32,
    /// Whether they are told by UTC, and not by the host's own clock.
    pub utc: bool,
}

impl Hours {
    /// Whether a time of the day lies within. Hours that begin when they end are all day.
    pub fn contain(self, time: TimeOfDay) -> bool {
        let second = if self.utc { time.utc } else { time.local };
        if self.from < self.to {
            (self.from..self.to).contains(&second)
        } else {
            second >= self.from || second < self.to
        }
    }
}

/// What a daemon is told to do and to keep to.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// What it may do.
    pub mode: Mode,
    /// `MemAvailable` to keep: above it nothing is merged. `None`: all that pays is merged.
    pub keep_available: Option<Bytes>,
    /// The share of one CPU that ksmd and pagefold use together on average.
    pub cpu: f64,
    /// CPU time that may be saved up for a burst.
    pub burst: Duration,
    /// CPU seconds at most for a MiB that is given back, net: what ksmd should take for somebody's ranges, and its part
    /// of the census that found them, by its pages and regions. Everybody is judged by itself; it is not asked of those
    /// whom memory is short for.
    pub price: f64,
    /// How long somebody who has just come is left alone.
    pub debounce: Duration,
    /// The pause between the first two looks at somebody's memory: after it a content is old enough to be merged
    /// ([`pagefold_base::lasting::ripe_after`]). Each further one is longer, unless something is found.
    pub ripens: Duration,
    /// The longest such pause.
    pub rarest: Duration,
    /// Percent of ten seconds in which some task waited for memory, from which on memory is short.
    pub pressure: f64,
    /// The part of ten seconds by which programs may wait longer for a CPU by its work, before it backs off.
    pub slowdown: f64,
    /// When nobody is looked at and nothing is merged. What is merged is watched, and what has to be is withdrawn.
    pub quiet: Vec<Hours>,
    /// Whether to act although another program tunes KSM.
    pub force: bool,
    /// Whether pages of different trust domains may be merged.
    pub across_domains: bool,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            keep_available: None,
            cpu: 0.1,
            burst: Duration::from_secs(30),
            price: 0.02,
            debounce: Duration::from_secs(1),
            ripens: Duration::from_millis(5200),
            rarest: Duration::from_secs(1800),
            pressure: PRESSURE,
            slowdown: 0.1,
            quiet: Vec::new(),
            force: false,
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
        let hours = |from, to| Hours { from, to, utc: false };
        let within = |hours: Hours, second| hours.contain(TimeOfDay { local: second, utc: hour(12) });
        let (day, night) = (hours(hour(8), hour(18)), hours(hour(22), hour(6)));
        assert!(within(day, hour(8)) && !within(day, hour(18)) && !within(day, hour(7)));
        assert!(within(night, hour(23)) && within(night, 0) && !within(night, hour(6)) && !within(night, hour(12)));
        assert!(within(hours(5, 5), 4));
    }

    #[test]
    fn hours_are_told_by_the_clock_that_they_name() {
        let morning = |utc| Hours { from: 6 * 3600, to: 9 * 3600, utc };
        let berlin = TimeOfDay { local: 8 * 3600, utc: 6 * 3600 };
        let tokyo = TimeOfDay { local: 16 * 3600, utc: 7 * 3600 };
        assert!(morning(false).contain(berlin) && morning(true).contain(berlin));
        assert!(!morning(false).contain(tokyo) && morning(true).contain(tokyo));
    }
}
