//! Whether gangs can help: how many vCPUs of each VM want CPUs, and how many CPUs they may use.
//!
//! A VM with more runnable vCPUs than CPUs cannot run as a whole. Beside other VMs it still gains from slots of its own.
//! While it alone has several runnable vCPUs, it does not: the kernel's own scheduler has less overhead.

use pagefold_base::Pid;
use std::collections::BTreeMap;
use std::time::Duration;

/// Runnable vCPUs, on the mean, from which on a VM has siblings to run together.
const MIN_RUNNABLE_SIBLINGS: f64 = 1.5;
/// By how many vCPUs a VM must exceed its CPUs before it is handed over: means vary, and each change has a cost.
const WIDE_MARGIN: f64 = 0.5;
/// Observations in a row after which gangs are scheduled again.
const RETURN_OBSERVATIONS: u32 = 5;

/// What the vCPUs of a VM wanted over an interval.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GangDemand {
    /// Runnable vCPUs, on the mean.
    pub runnable_vcpus: f64,
    /// CPUs that are online and permitted by the affinity of any of its vCPUs.
    pub usable_cpus: u32,
}

/// Runnable vCPUs on the mean, from the times that each thread has run or waited for a CPU, in nanoseconds, at the start
/// and at the end of an interval. Threads that began meanwhile do not count.
pub fn mean_runnable(before: &BTreeMap<Pid, u64>, after: &BTreeMap<Pid, u64>, interval: Duration) -> f64 {
    let interval_ns = interval.as_nanos().max(1) as f64;
    // The kernel counts a wait when it ends, so that a thread may seem to have waited longer than the interval.
    let share = |(tid, end): (&Pid, &u64)| Some((end.saturating_sub(*before.get(tid)?) as f64 / interval_ns).min(1.0));
    after.iter().filter_map(share).sum()
}

/// Decides which scheduler has the VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandOver {
    /// Whether the kernel's own scheduler has them.
    is_handed_over: bool,
    /// Observations in a row that speak for gangs.
    observations_for_gangs: u32,
}

impl HandOver {
    /// Takes the demand of all VMs into account, and returns whether the kernel's own scheduler is to have them.
    pub fn update(&mut self, demands: &[GangDemand]) -> bool {
        let margin = if self.is_handed_over { 0.0 } else { WIDE_MARGIN };
        let is_wide = |demand: &GangDemand| demand.runnable_vcpus > f64::from(demand.usable_cpus) + margin;
        let mut with_siblings = demands.iter().filter(|demand| demand.runnable_vcpus > MIN_RUNNABLE_SIBLINGS);
        if with_siblings.next().is_some_and(is_wide) && with_siblings.next().is_none() {
            *self = Self { is_handed_over: true, observations_for_gangs: 0 };
        } else if self.is_handed_over {
            self.observations_for_gangs += 1;
            if self.observations_for_gangs >= RETURN_OBSERVATIONS {
                *self = Self::default();
            }
        }
        self.is_handed_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn demands(vcpus: &[f64]) -> Vec<GangDemand> {
        vcpus.iter().map(|&runnable_vcpus| GangDemand { runnable_vcpus, usable_cpus: 4 }).collect()
    }

    #[test]
    fn mean_counts_running_and_waiting_threads() {
        let times = |times: &[(u32, u64)]| times.iter().map(|&(tid, time)| (Pid(tid), time)).collect();
        // One runs all the time, one a quarter of it, one seems to have waited for longer; one is new, one has ended.
        let before = times(&[(1, 100), (2, 0), (3, 0), (5, 7)]);
        let after = times(&[(1, 1_100), (2, 250), (3, 1_900), (4, 900)]);
        assert!((mean_runnable(&before, &after, Duration::from_nanos(1_000)) - 2.25).abs() < 1e-9);
    }

    #[test]
    fn wide_machine_is_handed_over_while_no_other_has_siblings() {
        for (vcpus, expected) in [
            (&[8.0][..], true),
            (&[0.0, 1.0, 8.0], true),
            (&[8.0, 7.9], false),
            (&[8.0, 4.0], false),
            (&[4.0, 4.0], false),
            (&[4.4], false),
            (&[1.0, 0.2], false),
            (&[], false),
        ] {
            assert_eq!(HandOver::default().update(&demands(vcpus)), expected, "{vcpus:?}");
        }
    }

    #[test]
    fn affinity_makes_a_machine_wide() {
        let demand = GangDemand { runnable_vcpus: 4.0, usable_cpus: 2 };
        assert!(HandOver::default().update(&[demand]));
    }

    #[test]
    fn gangs_return_after_several_observations_in_a_row() {
        let mut hand_over = HandOver::default();
        assert!(hand_over.update(&demands(&[8.0])));
        // Without the margin: a mean just above the CPUs does not change it back.
        for vcpus in [4.2, 3.0, 3.0, 3.0, 3.0, 8.0, 3.0, 3.0, 3.0, 3.0] {
            assert!(hand_over.update(&demands(&[vcpus])), "{vcpus}");
        }
        assert!(!hand_over.update(&demands(&[3.0])));
        assert!(!hand_over.update(&demands(&[4.2])));
    }
}
