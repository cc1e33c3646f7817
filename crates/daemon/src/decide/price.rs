//! What merging somebody costs for what it gives back.
//!
//! In it is the CPU time that ksmd should take for its ranges, and its part of that of the census that found them: by
//! its pages and regions, of all that was looked at. What earlier censuses took is not, nor what enrolling and watching
//! take, which is little beside. Net are the frames that come back less ksmd's metadata.

use super::Planned;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use std::fmt;
use std::time::Duration;

/// What merging somebody, or several, would give back and cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Worth {
    /// What comes back.
    pub net: NetBytes,
    /// CPU time of ksmd.
    pub ksmd: Duration,
    /// CPU time of the census.
    pub census: Duration,
}

impl Worth {
    /// What was planned for somebody, whose part of the census took so long.
    pub fn of(plan: &Planned, census: Duration) -> Self {
        Self { net: plan.net, ksmd: plan.ksmd, census }
    }

    /// CPU seconds for a MiB; without bound where nothing comes back.
    pub fn price(&self) -> f64 {
        let mib = self.net.0 as f64 / 1048576.0;
        if mib > 0.0 { (self.ksmd + self.census).as_secs_f64() / mib } else { f64::INFINITY }
    }

    /// Whether it costs no more than that for a MiB.
    pub fn pays(&self, most: f64) -> bool {
        self.net.0 > 0 && self.price() <= most
    }
}

impl fmt::Display for Worth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.net.0 {
            ..=0 => write!(f, "nothing"),
            net => {
                let (net, price) = (Bytes(net.unsigned_abs()), self.price());
                let price = if price < 0.001 { "less than 0.001".to_owned() } else { format!("{price:.3}") };
                write!(f, "{net} at {price} CPU s per MiB")
            }
        }
    }
}

/// Who they are, and all of it together.
pub(super) fn sum(worth: impl IntoIterator<Item = (ProcessId, Worth)>) -> (Vec<ProcessId>, Worth) {
    let (mut processes, mut sum) = (Vec::new(), Worth::default());
    for (process, worth) in worth {
        processes.push(process);
        sum.net.0 += worth.net.0;
        sum.ksmd += worth.ksmd;
        sum.census += worth.census;
    }
    (processes, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;
    use proptest::prelude::*;

    fn worth(mib: i64, ksmd: u64, census: u64) -> Worth {
        let [ksmd, census] = [ksmd, census].map(Duration::from_millis);
        Worth { net: NetBytes(mib << 20), ksmd, census }
    }

    #[test]
    fn the_census_is_paid_for_too() {
        assert_eq!(worth(16, 48, 16).price(), 0.004);
        assert_eq!(worth(16, 48, 16).to_string(), "16.0 MiB at 0.004 CPU s per MiB");
        assert!(worth(16, 48, 16).pays(0.004) && !worth(16, 48, 17).pays(0.004) && !worth(16, 49, 16).pays(0.004));
        assert_eq!(worth(16, 1, 1).to_string(), "16.0 MiB at less than 0.001 CPU s per MiB");
        for nothing in [worth(0, 0, 0), worth(-1, 1, 1)] {
            assert!(!nothing.pays(f64::INFINITY));
            assert_eq!(nothing.to_string(), "nothing");
        }
    }

    proptest! {
        /// Those who pay each by itself pay together, and those who do not pay do not.
        #[test]
        fn a_sum_is_as_its_parts(
            parts in prop::collection::vec((1i64..100, 0u64..1000, 0u64..1000), 1..10),
            most in 0.001f64..0.1,
        ) {
            let named = parts.iter().zip(0..).map(|(&(mib, ksmd, census), number)| {
                (ProcessId { pid: Pid(number), start_time: 1 }, worth(mib, ksmd, census))
            });
            let (paying, dear): (Vec<_>, Vec<_>) = named.partition(|(_, worth)| worth.pays(most));
            for (of, pays) in [(paying, true), (dear, false)] {
                let (processes, sum) = sum(of);
                // What lies at the bound itself is a matter of rounding.
                let close = (sum.price() - most).abs() < 1e-12;
                prop_assert!(processes.is_empty() || close || sum.pays(most) == pays, "{sum}");
            }
        }
    }
}
