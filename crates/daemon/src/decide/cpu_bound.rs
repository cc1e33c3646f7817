//! The bound on CPU time as an operator gives it, and what it is on a host.
//!
//! A host with many CPUs also has much memory and many processes to scan, so the default rate grows with its CPUs.

use super::rules::DaemonRules;
use std::str::FromStr;
use std::time::Duration;

/// The default rate is at least this share of one CPU.
const MIN_DEFAULT_RATE: f64 = 0.1;

/// The default rate on a large host, as a share of all its CPUs.
const DEFAULT_SHARE_OF_HOST: f64 = 0.01;

/// The default burst is what the rate gives in this time, and at least [`MIN_DEFAULT_BURST`].
const DEFAULT_BURST_PERIOD: Duration = Duration::from_secs(300);

/// CPU time of the default burst at a low rate.
const MIN_DEFAULT_BURST: Duration = Duration::from_secs(30);

/// The largest rate, in percent of one CPU: no host has more CPUs.
const MAX_PERCENT_OF_ONE_CPU: f64 = 1_000_000.0;

/// The words after a percentage of all CPUs.
const OF_HOST: &str = "of host";

/// The average CPU time that ksmd and pagefold may use together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum CpuRate {
    /// A share of one CPU, which may exceed 1.
    OfOneCpu(f64),
    /// A share of all online CPUs of the host.
    OfHost(f64),
}

/// The rate is a share of the host, whose number of CPUs is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "cpu_rate is a percentage of the host, but its number of online CPUs is not known (/sys/devices/system/cpu/online): \
     give a percentage of one CPU"
)]
pub struct UnknownCpuCount;

impl FromStr for CpuRate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (percent, is_of_host) = match text.trim().strip_suffix(OF_HOST) {
            Some(percent) if percent.ends_with([' ', '%']) => (percent, true),
            _ => (text, false),
        };
        let percent = percent.trim();
        let number = percent.strip_suffix('%').unwrap_or(percent).trim().parse::<f64>();
        let max = if is_of_host { 100.0 } else { MAX_PERCENT_OF_ONE_CPU };
        match number {
            Ok(value) if value > 0.0 && value <= max && is_of_host => Ok(Self::OfHost(value / 100.0)),
            Ok(value) if value > 0.0 && value <= max => Ok(Self::OfOneCpu(value / 100.0)),
            Ok(_) if is_of_host => Err("expected a percentage of the host above 0 and at most 100".to_owned()),
            Ok(_) => Err(format!("expected a percentage of one CPU above 0 and at most {MAX_PERCENT_OF_ONE_CPU}")),
            Err(_) => {
                Err("expected a percentage of one CPU, such as 25% or 250%, or of all CPUs, such as 1% of host"
                    .to_owned())
            }
        }
    }
}

/// The bound on CPU time that an operator has set, as far as one is set.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuBound {
    /// The rate of the token bucket.
    pub rate: Option<CpuRate>,
    /// The size of the token bucket.
    pub burst: Option<Duration>,
}

impl CpuBound {
    /// Sets the bound in rules, for a host with so many online CPUs, if that is known.
    ///
    /// # Errors
    /// If the rate is a share of the host and the number is not known.
    pub fn apply(self, online_cpus: Option<usize>, rules: &mut DaemonRules) -> Result<(), UnknownCpuCount> {
        rules.cpu_rate = match (self.rate, online_cpus) {
            (Some(CpuRate::OfOneCpu(share)), _) => share,
            (Some(CpuRate::OfHost(share)), cpus) => share * cpus.ok_or(UnknownCpuCount)?.max(1) as f64,
            (None, cpus) => (DEFAULT_SHARE_OF_HOST * cpus.unwrap_or(1) as f64).max(MIN_DEFAULT_RATE),
        };
        let default_burst = DEFAULT_BURST_PERIOD.mul_f64(rules.cpu_rate).max(MIN_DEFAULT_BURST);
        rules.burst = self.burst.unwrap_or(default_burst);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resolve(bound: CpuBound, cpus: Option<usize>) -> Result<(f64, Duration), UnknownCpuCount> {
        let mut rules = DaemonRules::default();
        bound.apply(cpus, &mut rules).map(|()| (rules.cpu_rate, rules.burst))
    }

    #[test]
    fn default_bound_scales_with_the_host() {
        let seconds = Duration::from_secs;
        for (cpus, rate, burst) in [
            (None, 0.1, seconds(30)),
            (Some(0), 0.1, seconds(30)),
            (Some(2), 0.1, seconds(30)),
            (Some(10), 0.1, seconds(30)),
            (Some(48), 0.48, seconds(144)),
            (Some(200), 2.0, seconds(600)),
        ] {
            assert_eq!(resolve(CpuBound::default(), cpus), Ok((rate, burst)), "{cpus:?}");
        }
        let defaults = DaemonRules::default();
        assert_eq!(resolve(CpuBound::default(), None), Ok((defaults.cpu_rate, defaults.burst)));
    }

    #[test]
    fn given_bound_is_of_one_cpu_or_of_the_host() {
        let bound = |text: &str| CpuBound { rate: Some(text.parse().unwrap()), burst: None };
        assert_eq!(resolve(bound("250%"), Some(48)), Ok((2.5, Duration::from_secs(750))));
        assert_eq!(resolve(bound("5"), None), Ok((0.05, Duration::from_secs(30))));
        assert_eq!(resolve(bound("2% of host"), Some(48)), Ok((0.96, Duration::from_secs(288))));
        assert_eq!(resolve(bound("2% of host"), None), Err(UnknownCpuCount));
        let burst = Some(Duration::from_secs(7));
        assert_eq!(resolve(CpuBound { burst, ..bound("200%") }, Some(4)), Ok((2.0, Duration::from_secs(7))));
    }

    #[test]
    fn rate_text_is_checked() {
        for (text, rate) in [
            ("10%", CpuRate::OfOneCpu(0.1)),
            (" 12.5 % ", CpuRate::OfOneCpu(0.125)),
            ("250", CpuRate::OfOneCpu(2.5)),
            ("1% of host", CpuRate::OfHost(0.01)),
            ("0.5 of host", CpuRate::OfHost(0.005)),
            ("100 % of host ", CpuRate::OfHost(1.0)),
        ] {
            assert_eq!(text.parse(), Ok(rate), "{text}");
        }
        for (text, error) in [
            ("0%", "above 0 and at most 1000000"),
            ("-1%", "above 0 and at most 1000000"),
            ("inf", "above 0 and at most 1000000"),
            ("nan", "above 0 and at most 1000000"),
            ("101% of host", "of the host above 0 and at most 100"),
            ("0 of host", "of the host above 0 and at most 100"),
            ("", "such as 1% of host"),
            ("%", "such as 1% of host"),
            ("of host", "such as 1% of host"),
            ("10%%", "such as 1% of host"),
            ("10% of hosts", "such as 1% of host"),
            ("10of host", "such as 1% of host"),
            ("ten", "such as 1% of host"),
        ] {
            let found = text.parse::<CpuRate>().unwrap_err();
            assert!(found.contains(error), "{text}: {found}");
        }
    }

    proptest! {
        /// More CPUs never lower the default bound, and the burst always lasts for five minutes of the rate.
        #[test]
        fn default_bound_grows_with_the_host(cpus in 0usize..10_000, more in 0usize..10_000) {
            let (rate, burst) = resolve(CpuBound::default(), Some(cpus)).unwrap();
            let (larger_rate, larger_burst) = resolve(CpuBound::default(), Some(cpus + more)).unwrap();
            prop_assert!(rate >= 0.1 && larger_rate >= rate && larger_burst >= burst);
            prop_assert!(burst.as_secs_f64() >= rate * 300.0 - 1e-6 && burst >= Duration::from_secs(30));
        }

        #[test]
        fn rate_text_never_panics(text in "[0-9.e%+ -]{0,12}( of host)?") {
            if let Ok(rate) = text.parse::<CpuRate>() {
                let (resolved, _) = resolve(CpuBound { rate: Some(rate), burst: None }, Some(48)).unwrap();
                prop_assert!(resolved > 0.0);
            }
        }
    }
}
