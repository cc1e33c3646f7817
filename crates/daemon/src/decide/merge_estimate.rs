//! Cost and net savings of merging processes.
//!
//! The cost is ksmd's predicted CPU time for the process's ranges, plus its part of the CPU time of the census that
//! found them. That part is divided by pages and regions among all scanned processes. The CPU time of earlier censuses,
//! of enrolling and of watching is not included; enrolling and watching take little. Net savings are the freed frames
//! less ksmd's metadata.

use super::MergeCandidate;
use pagefold_base::units::{Bytes, NetBytes, ProcessId};
use std::fmt;
use std::time::Duration;

/// Predicted net savings and cost of merging one or several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct MergeEstimate {
    /// Predicted net savings.
    pub net_savings: NetBytes,
    /// CPU time of ksmd.
    pub ksmd_time: Duration,
    /// CPU time of the census.
    pub census_time: Duration,
}

impl MergeEstimate {
    /// The estimate for a planned process, with its part of the census's CPU time.
    pub fn new(plan: &MergeCandidate, census: Duration) -> Self {
        Self { net_savings: plan.net_savings, ksmd_time: plan.ksmd_time, census_time: census }
    }

    /// CPU seconds per MiB saved; infinite if nothing is saved.
    pub fn cpu_seconds_per_mib(&self) -> f64 {
        let mib = self.net_savings.0 as f64 / 1048576.0;
        if mib > 0.0 { (self.ksmd_time + self.census_time).as_secs_f64() / mib } else { f64::INFINITY }
    }

    /// Whether it saves memory at no more than this cost.
    pub fn is_profitable(&self, max_cpu_seconds_per_mib: f64) -> bool {
        self.net_savings.0 > 0 && self.cpu_seconds_per_mib() <= max_cpu_seconds_per_mib
    }
}

impl fmt::Display for MergeEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.net_savings.0 {
            ..=0 => write!(f, "nothing"),
            net => {
                let (net, cost) = (Bytes(net.unsigned_abs()), self.cpu_seconds_per_mib());
                let cost = if cost < 0.001 { "less than 0.001".to_owned() } else { format!("{cost:.3}") };
                write!(f, "{net} at {cost} CPU s per MiB")
            }
        }
    }
}

/// The processes, and the sum of their estimates.
pub(super) fn sum_estimates(
    estimates: impl IntoIterator<Item = (ProcessId, MergeEstimate)>,
) -> (Vec<ProcessId>, MergeEstimate) {
    let (mut processes, mut sum) = (Vec::new(), MergeEstimate::default());
    for (process, estimate) in estimates {
        processes.push(process);
        sum.net_savings.0 += estimate.net_savings.0;
        sum.ksmd_time += estimate.ksmd_time;
        sum.census_time += estimate.census_time;
    }
    (processes, sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::units::Pid;
    use proptest::prelude::*;

    fn estimate(mib: i64, ksmd: u64, census: u64) -> MergeEstimate {
        let [ksmd, census] = [ksmd, census].map(Duration::from_millis);
        MergeEstimate { net_savings: NetBytes(mib << 20), ksmd_time: ksmd, census_time: census }
    }

    #[test]
    fn census_time_counts_as_cost() {
        assert_eq!(estimate(16, 48, 16).cpu_seconds_per_mib(), 0.004);
        assert_eq!(estimate(16, 48, 16).to_string(), "16.0 MiB at 0.004 CPU s per MiB");
        assert!(
            estimate(16, 48, 16).is_profitable(0.004)
                && !estimate(16, 48, 17).is_profitable(0.004)
                && !estimate(16, 49, 16).is_profitable(0.004)
        );
        assert_eq!(estimate(16, 1, 1).to_string(), "16.0 MiB at less than 0.001 CPU s per MiB");
        for nothing in [estimate(0, 0, 0), estimate(-1, 1, 1)] {
            assert!(!nothing.is_profitable(f64::INFINITY));
            assert_eq!(nothing.to_string(), "nothing");
        }
    }

    proptest! {
        /// A sum of profitable estimates is profitable; a sum of unprofitable ones is not.
        #[test]
        fn sum_is_profitable_if_its_parts_are(
            parts in prop::collection::vec((1i64..100, 0u64..1000, 0u64..1000), 1..10),
            max_cost in 0.001f64..0.1,
        ) {
            let estimates = parts.iter().zip(0..).map(|(&(mib, ksmd, census), number)| {
                (ProcessId { pid: Pid(number), start_time: 1 }, estimate(mib, ksmd, census))
            });
            let (profitable, unprofitable): (Vec<_>, Vec<_>) =
                estimates.partition(|(_, estimate)| estimate.is_profitable(max_cost));
            for (part, expected) in [(profitable, true), (unprofitable, false)] {
                let (processes, sum) = sum_estimates(part);
                // Sums at the limit itself depend on rounding.
                let at_limit = (sum.cpu_seconds_per_mib() - max_cost).abs() < 1e-12;
                prop_assert!(processes.is_empty() || at_limit || sum.is_profitable(max_cost) == expected, "{sum}");
            }
        }
    }
}
