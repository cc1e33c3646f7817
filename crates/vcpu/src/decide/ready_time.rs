//! How long vCPUs ran and waited between samples of the kernel's counters, and what follows for their machine.
//!
//! The kernel adds a wait to the run delay of a thread when the wait ends (`sched_info_arrive`, kernel/sched/stats.h),
//! so a wait that is under way at a sample counts in the next interval.

use pagefold_base::{IdSet, Pid};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A CPU that was idle for this share of an interval counts as free in it.
const FREE_CPU_IDLE_SHARE: f64 = 0.5;

/// The counters of a host at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HostSample {
    /// When, since an arbitrary start.
    pub at: Duration,
    /// For each online CPU its ticks so far, all and idle ones.
    pub cpus: BTreeMap<u32, (u64, u64)>,
    /// Ticks of all CPUs so far, and those that a hypervisor below this host gave to others; `None` if not known.
    pub steal: Option<(u64, u64)>,
    /// The threads that run vCPUs.
    pub threads: BTreeMap<Pid, ThreadSample>,
}

/// The counters of a thread at one time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ThreadSample {
    /// When the thread began, which tells it from a later thread with its number.
    pub start_time: u64,
    /// Time for which it has run.
    pub run: Duration,
    /// Time for which it has waited for a CPU: its run delay.
    pub ready: Duration,
    /// Switches away from it because it waited for something, and because another thread got its CPU.
    pub switches: Option<(u64, u64)>,
    /// Whether it ran or waited for a CPU.
    pub is_runnable: bool,
    /// The CPU on whose run queue it was.
    pub cpu: u32,
    /// The CPUs on which it may run.
    pub allowed_cpus: IdSet,
}

/// What a vCPU did in an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VcpuUsage {
    /// Length of the interval.
    pub interval: Duration,
    /// Time for which it ran.
    pub run: Duration,
    /// Time for which it waited for a CPU.
    pub ready: Duration,
    /// Voluntary and involuntary switches.
    pub switches: Option<(u64, u64)>,
}

impl VcpuUsage {
    /// The share of the interval in which it ran.
    pub fn run_share(&self) -> f64 {
        share(self.run, self.interval)
    }

    /// The share of the interval in which it waited for a CPU.
    pub fn ready_share(&self) -> f64 {
        share(self.ready, self.interval)
    }

    /// The share of the interval in which it needed no CPU: the guest was idle, or its monitor waited.
    pub fn idle_share(&self) -> f64 {
        (1.0 - self.run_share() - self.ready_share()).max(0.0)
    }
}

fn share(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() { 0.0 } else { (part.as_secs_f64() / whole.as_secs_f64()).min(1.0) }
}

/// What a vCPU did between two samples; `None` if one of them lacks its thread, or has another thread of this number.
pub fn usage_between(first: &HostSample, last: &HostSample, tid: Pid) -> Option<VcpuUsage> {
    let (before, after) = (first.threads.get(&tid)?, last.threads.get(&tid)?);
    if before.start_time != after.start_time {
        return None;
    }
    let switches = before
        .switches
        .zip(after.switches)
        .map(|(before, after)| (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1)));
    Some(VcpuUsage {
        interval: last.at.saturating_sub(first.at),
        run: after.run.saturating_sub(before.run),
        ready: after.ready.saturating_sub(before.ready),
        switches,
    })
}

/// What a vCPU did between the first and the last sample.
pub fn usage(samples: &[HostSample], tid: Pid) -> Option<VcpuUsage> {
    usage_between(samples.first()?, samples.last()?, tid)
}

/// The share of the time with a runnable vCPU of a machine in which all its runnable vCPUs ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CoRunShare {
    /// At least this, however the waits of the vCPUs overlapped.
    pub lowest: f64,
    /// At most this.
    pub highest: f64,
    /// The share if the vCPUs ran and waited independently of each other.
    pub if_independent: f64,
}

/// Bounds of the co-run share of a machine; `None` if no vCPU was runnable, or a sample lacks one.
///
/// Between two samples, let `r` be the run shares and `w` the ready shares of the vCPUs. The time in which a vCPU waits
/// is at least `max w` and at most `sum w`, and the time in which one is runnable is at least `max (r + w)` and at most
/// `sum (r + w)` (Fréchet's bounds of a union). If the vCPUs are independent, they are `1 - prod (1 - w)` and
/// `1 - prod (1 - r - w)`. The co-run share is one less the quotient of both times over all intervals.
pub fn co_run_share(samples: &[HostSample], tids: &[Pid]) -> Option<CoRunShare> {
    // Waiting and runnable time: lowest, highest, and if independent.
    let (mut waiting, mut runnable) = ([0.0; 3], [0.0; 3]);
    for pair in samples.windows(2) {
        let usages: Vec<VcpuUsage> =
            tids.iter().map(|&tid| usage_between(&pair[0], &pair[1], tid)).collect::<Option<_>>()?;
        let seconds = pair[1].at.saturating_sub(pair[0].at).as_secs_f64();
        let ready: Vec<f64> = usages.iter().map(VcpuUsage::ready_share).collect();
        let active: Vec<f64> = usages.iter().map(|usage| (usage.run_share() + usage.ready_share()).min(1.0)).collect();
        for (sums, shares) in [(&mut waiting, &ready), (&mut runnable, &active)] {
            for (sum, union) in sums.iter_mut().zip(union_shares(shares)) {
                *sum += seconds * union;
            }
        }
    }
    if runnable[1] <= 0.0 {
        return None;
    }
    let co_run = |waiting: f64, runnable: f64| (1.0 - waiting / runnable.max(waiting).max(f64::MIN_POSITIVE)).max(0.0);
    Some(CoRunShare {
        lowest: co_run(waiting[1], runnable[0]),
        highest: co_run(waiting[0], runnable[1]),
        if_independent: co_run(waiting[2], runnable[2]),
    })
}

/// The share of time in which at least one of several conditions holds: lowest, highest, and if they are independent.
fn union_shares(shares: &[f64]) -> [f64; 3] {
    let none: f64 = shares.iter().map(|share| 1.0 - share).product();
    [shares.iter().copied().fold(0.0, f64::max), shares.iter().sum::<f64>().min(1.0), 1.0 - none]
}

/// How often vCPUs of one machine were on one run queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stacking {
    /// Samples with all vCPUs of the machine.
    pub samples: u64,
    /// Those in which two runnable vCPUs were on one run queue.
    pub stacked: u64,
    /// Those of them before which another CPU was free.
    pub stacked_beside_free_cpu: u64,
}

/// Counts the samples in which runnable vCPUs of a machine were on one run queue. The first sample only serves to tell
/// which CPUs were free before the second.
pub fn stacking(samples: &[HostSample], tids: &[Pid]) -> Stacking {
    let mut stacking = Stacking::default();
    for pair in samples.windows(2) {
        let Some(threads) = tids.iter().map(|tid| pair[1].threads.get(tid)).collect::<Option<Vec<_>>>() else {
            continue;
        };
        stacking.samples += 1;
        let runnable: Vec<u32> = threads.iter().filter(|thread| thread.is_runnable).map(|thread| thread.cpu).collect();
        let queues: BTreeSet<u32> = runnable.iter().copied().collect();
        if queues.len() < runnable.len() {
            stacking.stacked += 1;
            let has_free = free_cpus(&pair[0], &pair[1]).any(|cpu| !queues.contains(&cpu));
            stacking.stacked_beside_free_cpu += u64::from(has_free);
        }
    }
    stacking
}

/// The CPUs that were idle for most of the time between two samples.
fn free_cpus<'s>(first: &'s HostSample, last: &'s HostSample) -> impl Iterator<Item = u32> + 's {
    last.cpus.iter().filter_map(|(&cpu, &(total, idle))| {
        let (total_before, idle_before) = *first.cpus.get(&cpu)?;
        let (total, idle) = (total.checked_sub(total_before)?, idle.checked_sub(idle_before)?);
        (total > 0 && idle as f64 >= FREE_CPU_IDLE_SHARE * total as f64).then_some(cpu)
    })
}

/// The share of the time of all CPUs that a hypervisor below this host gave to others.
pub fn host_steal_share(samples: &[HostSample]) -> Option<f64> {
    let ((total_before, steal_before), (total, steal)) = (samples.first()?.steal?, samples.last()?.steal?);
    let total = total.checked_sub(total_before).filter(|total| *total > 0)?;
    Some((steal.saturating_sub(steal_before) as f64 / total as f64).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MILLI: fn(u64) -> Duration = Duration::from_millis;

    /// A sample with threads from 1 on: run and ready time in ms, and the run queue if it is runnable.
    fn sample(at: u64, threads: &[(u64, u64, Option<u32>)], idle: &[(u64, u64)]) -> HostSample {
        let thread = |(run, ready, cpu): (u64, u64, Option<u32>)| ThreadSample {
            run: MILLI(run),
            ready: MILLI(ready),
            switches: Some((run, ready)),
            is_runnable: cpu.is_some(),
            cpu: cpu.unwrap_or(0),
            ..ThreadSample::default()
        };
        HostSample {
            at: MILLI(at),
            cpus: (0..).zip(idle.iter().copied()).collect(),
            steal: Some((10 * at, at)),
            threads: threads.iter().zip(1..).map(|(&each, tid)| (Pid(tid), thread(each))).collect(),
        }
    }

    #[test]
    fn usage_is_the_increase_of_the_counters() {
        let samples = [sample(500, &[(100, 50, None)], &[]), sample(1500, &[(700, 250, None)], &[])];
        let usage = usage(&samples, Pid(1)).unwrap();
        let shares = [usage.run_share(), usage.ready_share(), usage.idle_share()].map(|share| (share * 1e6).round());
        assert_eq!(shares, [600_000.0, 200_000.0, 200_000.0]);
        assert_eq!((usage.run, usage.ready, usage.switches), (MILLI(600), MILLI(200), Some((600, 200))));
        assert_eq!(super::usage(&samples, Pid(2)), None);
        assert_eq!(super::usage(&[], Pid(1)), None);
        assert_eq!(host_steal_share(&samples), Some(0.1));
    }

    #[test]
    fn later_thread_with_the_same_number_is_no_usage() {
        let first = sample(0, &[(100, 50, None)], &[]);
        let mut last = sample(1000, &[(10, 5, None)], &[]);
        last.threads.get_mut(&Pid(1)).unwrap().start_time = 9;
        assert_eq!(usage(&[first, last], Pid(1)), None);
    }

    #[test]
    fn co_run_share_has_bounds_computed_by_hand() {
        // Each vCPU runs for half of the time and waits for the other half: they alternate on one CPU (0), or run and
        // wait together (1/2), or independently: 1 - (1 - 1/4) / 1.
        let samples = [sample(0, &[(0, 0, None); 2], &[]), sample(1000, &[(500, 500, None); 2], &[])];
        let tids = [Pid(1), Pid(2)];
        let share = co_run_share(&samples, &tids).unwrap();
        assert_eq!(share, CoRunShare { lowest: 0.0, highest: 0.5, if_independent: 0.25 });
        // No wait: all run whenever they are runnable.
        let samples = [sample(0, &[(0, 0, None); 2], &[]), sample(1000, &[(300, 0, None), (900, 0, None)], &[])];
        let share = co_run_share(&samples, &tids).unwrap();
        assert_eq!(share, CoRunShare { lowest: 1.0, highest: 1.0, if_independent: 1.0 });
        // One vCPU: waiting for 100 of 500 ms in which it was runnable.
        let samples = [sample(0, &[(0, 0, None)], &[]), sample(1000, &[(400, 100, None)], &[])];
        let share = co_run_share(&samples, &tids[..1]).unwrap();
        let rounded = [share.lowest, share.highest, share.if_independent].map(|share| (share * 1e6).round());
        assert_eq!(rounded, [800_000.0; 3]);
        // An idle machine has no share, and one with a thread that is not known neither.
        let idle = [sample(0, &[(0, 0, None)], &[]), sample(1000, &[(0, 0, None)], &[])];
        assert_eq!(co_run_share(&idle, &tids[..1]), None);
        assert_eq!(co_run_share(&samples, &tids), None);
    }

    #[test]
    fn shorter_intervals_narrow_the_bounds() {
        // They wait one after the other, as the second sample shows.
        let (start, end) = (sample(0, &[(0, 0, None); 2], &[]), sample(200, &[(100, 100, None); 2], &[]));
        let middle = sample(100, &[(0, 100, None), (100, 0, None)], &[]);
        let tids = [Pid(1), Pid(2)];
        let coarse = co_run_share(&[start.clone(), end.clone()], &tids).unwrap();
        let fine = co_run_share(&[start, middle, end], &tids).unwrap();
        assert_eq!((coarse.lowest, coarse.highest), (0.0, 0.5));
        assert_eq!((fine.lowest, fine.highest, fine.if_independent), (0.0, 0.0, 0.0));
    }

    #[test]
    fn stacked_vcpus_beside_a_free_cpu_are_counted() {
        let free = [[(0, 0), (0, 0)], [(100, 0), (100, 90)], [(200, 0), (200, 90)], [(300, 0), (300, 190)]];
        let queues = [[None, None], [Some(0), Some(0)], [Some(0), Some(0)], [Some(0), Some(1)]];
        let samples: Vec<HostSample> = (0..4)
            .map(|step| sample(step * 100, &queues[step as usize].map(|cpu| (0, 0, cpu)), &free[step as usize]))
            .collect();
        let found = stacking(&samples, &[Pid(1), Pid(2)]);
        assert_eq!(found, Stacking { samples: 3, stacked: 2, stacked_beside_free_cpu: 1 });
        assert_eq!(stacking(&samples, &[Pid(1)]).stacked, 0);
        assert_eq!(stacking(&samples, &[Pid(1), Pid(9)]), Stacking::default());
    }

    proptest! {
        /// Schedules of one machine in steps of a millisecond, in which each vCPU is idle, waits or runs: the real co-run
        /// share is within the bounds.
        #[test]
        fn real_co_run_share_is_within_the_bounds(
            steps in prop::collection::vec(prop::collection::vec(0..3_u8, 3), 1..60),
            interval in 1..20_usize,
        ) {
            let mut samples = vec![sample(0, &[(0, 0, None); 3], &[])];
            let mut counters = [(0, 0, None); 3];
            let (mut runnable, mut together) = (0, 0);
            for (i, states) in steps.iter().enumerate() {
                for (counter, state) in counters.iter_mut().zip(states) {
                    counter.0 += u64::from(*state == 2);
                    counter.1 += u64::from(*state == 1);
                }
                runnable += u32::from(states.iter().any(|state| *state > 0));
                together += u32::from(states.contains(&2) && !states.contains(&1));
                if (i + 1) % interval == 0 || i + 1 == steps.len() {
                    samples.push(sample(i as u64 + 1, &counters, &[]));
                }
            }
            let share = co_run_share(&samples, &[Pid(1), Pid(2), Pid(3)]);
            match share {
                None => prop_assert_eq!(runnable, 0),
                Some(share) => {
                    let real = f64::from(together) / f64::from(runnable);
                    prop_assert!(share.lowest <= real + 1e-9 && real <= share.highest + 1e-9, "{share:?} {real}");
                    prop_assert!(share.lowest <= share.if_independent + 1e-9);
                    prop_assert!(share.if_independent <= share.highest + 1e-9);
                }
            }
        }
    }
}
