//! What a daemon is told to do and to keep to.

use crate::units::Bytes;
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

/// A part of each day, in seconds since midnight. One that ends before it begins goes over midnight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hours {
    /// The first second.
    pub from: u32,
    /// The first second after it.
    pub to: u32,
}

impl Hours {
    /// Whether a second of the day lies within. Hours that begin when they end are all day.
    pub fn contain(self, second: u32) -> bool {
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
    /// CPU seconds at most for a MiB that is given back, net.
    pub price: f64,
    /// How long somebody who has just come is left alone.
    pub debounce: Duration,
    /// The pause between the first two looks at somebody's memory: after it a content is old enough to be merged
    /// ([`crate::lasting::ripe_after`]). Each further one is longer, unless something is found.
    pub ripens: Duration,
    /// The longest such pause.
    pub rarest: Duration,
    /// Percent of ten seconds in which some task waited for memory, from which on memory is short.
    pub pressure: f64,
    /// The part of their time by which programs may wait longer for a CPU while it works, before it backs off.
    pub slowdown: f64,
    /// When nothing is begun.
    pub quiet: Vec<Hours>,
    /// Whether to act although another program tunes KSM.
    pub force: bool,
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
            pressure: 10.0,
            slowdown: 0.1,
            quiet: Vec::new(),
            force: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_may_go_over_midnight() {
        let hour = |hour: u32| hour * 3600;
        let (day, night) = (Hours { from: hour(8), to: hour(18) }, Hours { from: hour(22), to: hour(6) });
        assert!(day.contain(hour(8)) && !day.contain(hour(18)) && !day.contain(hour(7)));
        assert!(night.contain(hour(23)) && night.contain(0) && !night.contain(hour(6)) && !night.contain(hour(12)));
        assert!(Hours { from: 5, to: 5 }.contain(4));
    }
}
