//! Simulates a scenario under several policies and seeds, on several threads.

use crate::decide::host_state::Exactness;
use crate::decide::policies::ComparedPolicy;
use crate::decide::samples::SimulatedRun;
use crate::decide::scenario::Scenario;
use crate::decide::simulation::simulate;
use crate::decide::workload::ContentsUsedUp;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// A policy, and its runs, one for each seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyRuns {
    /// The policy.
    pub policy: ComparedPolicy,
    /// Its runs.
    pub runs: Vec<SimulatedRun>,
}

/// Simulates each policy with each seed. `simulated_ms` counts the virtual time of all runs.
///
/// # Errors
/// If the scenario has more contents than the model.
pub fn compare(
    scenario: &Scenario,
    policies: &[ComparedPolicy],
    seeds: &[u64],
    exactness: Exactness,
    threads: usize,
    simulated_ms: &AtomicU64,
) -> Result<Vec<PolicyRuns>, ContentsUsedUp> {
    let jobs: Vec<(&ComparedPolicy, u64)> =
        policies.iter().flat_map(|policy| seeds.iter().map(move |&seed| (policy, seed))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        while let Some((job, &(policy, seed))) = {
            let job = next.fetch_add(1, Ordering::Relaxed);
            jobs.get(job).map(|found| (job, found))
        } {
            let mut passed = 0;
            let mut note_progress = |now: u64| {
                simulated_ms.fetch_add(now - passed, Ordering::Relaxed);
                passed = now;
            };
            done.push((job, simulate(scenario, policy, seed, exactness, &mut note_progress)));
        }
        done
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, jobs.len().max(1))).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a simulation does not panic")).collect()
    });
    results.sort_by_key(|&(job, _)| job);
    let mut runs = results.into_iter().map(|(_, result)| result);
    policies
        .iter()
        .map(|policy| {
            Ok(PolicyRuns { policy: policy.clone(), runs: runs.by_ref().take(seeds.len()).collect::<Result<_, _>>()? })
        })
        .collect()
}
