//! Simulates a scenario under several policies and seeds, on several threads.

use crate::decide::content_pool::ContentsUsedUp;
use crate::decide::host_state::Exactness;
use crate::decide::policies::ComparedPolicy;
use crate::decide::samples::SimulatedRun;
use crate::decide::scenario::Scenario;
use crate::decide::simulation::simulate;
use std::error::Error;
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

/// Why a scenario cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// The scenario has more contents than the model.
    #[error(transparent)]
    ContentsUsedUp(#[from] ContentsUsedUp),
    /// Pagefold's daemon failed.
    #[error("pagefold's daemon failed")]
    Daemon(#[source] Box<dyn Error + Send + Sync>),
}

/// A run of Pagefold's daemon.
#[derive(Clone, Copy, Debug)]
pub struct DaemonRun<'s> {
    /// The scenario of the simulated host.
    pub scenario: &'s Scenario,
    /// The seed of the scenario and of the daemon.
    pub seed: u64,
    /// What ksmd does with pages that change during a scan.
    pub exactness: Exactness,
    /// Whether it merges pages across trust domains. Otherwise its configuration decides.
    pub across_domains: bool,
    /// Its bound on CPU time in thousandths of one CPU. Without it, its configuration decides.
    pub cpu_permille: Option<u32>,
}

/// Carries out runs of Pagefold's daemon. Passes the virtual time in milliseconds on, from time to time.
pub type DaemonRunner = dyn Fn(DaemonRun<'_>, &mut dyn FnMut(u64)) -> Result<SimulatedRun, SimulationError> + Sync;

/// How policies are simulated.
pub struct SimulationPlan {
    /// Each policy runs once with each.
    pub seeds: Vec<u64>,
    /// What ksmd does with pages that change during a scan.
    pub exactness: Exactness,
    /// Simulations at the same time.
    pub threads: usize,
    /// Runs the daemon for [`ComparedPolicy::Guided`]; `None` if no policy is that.
    pub run_daemon: Option<Box<DaemonRunner>>,
}

impl SimulationPlan {
    fn simulate(
        &self,
        scenario: &Scenario,
        policy: &ComparedPolicy,
        seed: u64,
        note_progress: &mut dyn FnMut(u64),
    ) -> Result<SimulatedRun, SimulationError> {
        let exactness = self.exactness;
        match *policy {
            ComparedPolicy::Guided { across_domains, cpu_permille } => {
                let run_daemon = self.run_daemon.as_ref().expect("a plan with the policy guided runs daemons");
                run_daemon(DaemonRun { scenario, seed, exactness, across_domains, cpu_permille }, note_progress)
            }
            _ => Ok(simulate(scenario, policy, seed, exactness, note_progress)?),
        }
    }
}

/// Simulates each policy with each seed. `simulated_ms` counts the virtual time of all runs.
///
/// # Errors
/// If the scenario has more contents than the model, or the daemon fails.
///
/// # Panics
/// If a policy is [`ComparedPolicy::Guided`] and the plan runs no daemon.
pub fn compare(
    scenario: &Scenario,
    policies: &[ComparedPolicy],
    plan: &SimulationPlan,
    simulated_ms: &AtomicU64,
) -> Result<Vec<PolicyRuns>, SimulationError> {
    let jobs: Vec<(&ComparedPolicy, u64)> =
        policies.iter().flat_map(|policy| plan.seeds.iter().map(move |&seed| (policy, seed))).collect();
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
            done.push((job, plan.simulate(scenario, policy, seed, &mut note_progress)));
        }
        done
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..plan.threads.clamp(1, jobs.len().max(1))).map(|_| scope.spawn(work)).collect();
        workers.into_iter().flat_map(|worker| worker.join().expect("a simulation does not panic")).collect()
    });
    results.sort_by_key(|&(job, _)| job);
    let mut runs = results.into_iter().map(|(_, result)| result);
    policies
        .iter()
        .map(|policy| {
            let runs = runs.by_ref().take(plan.seeds.len()).collect::<Result<_, _>>()?;
            Ok(PolicyRuns { policy: policy.clone(), runs })
        })
        .collect()
}
