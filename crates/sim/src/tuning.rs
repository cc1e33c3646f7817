//! Searches a policy for a scenario by simulations, on several threads.

use crate::comparison::{SimulationError, SimulationPlan, compare};
use crate::decide::measures::RunMeasures;
use crate::decide::policies::ComparedPolicy;
use crate::decide::scenario::Scenario;
use crate::decide::tuning::{TriedPolicy, TuningGoal, choose, grid, neighbors};
use std::sync::atomic::AtomicU64;

/// What to search, and how.
pub struct PolicySearch {
    /// What it is for.
    pub goal: TuningGoal,
    /// The daemon whose bounds on CPU time are searched, too.
    pub daemon: Option<ComparedPolicy>,
    /// CPU time at most, as a share of one CPU.
    pub max_cores: Option<f64>,
    /// Rounds after the grid.
    pub rounds: u32,
    /// How policies are simulated.
    pub plan: SimulationPlan,
}

/// Simulates the grid and the rounds, and returns all policies that were tried, in that order. `simulated_ms` counts the
/// virtual time of all runs.
///
/// # Errors
/// If the scenario has more contents than the model, or the daemon fails.
pub fn search(
    scenario: &Scenario,
    search: &PolicySearch,
    simulated_ms: &AtomicU64,
) -> Result<Vec<TriedPolicy>, SimulationError> {
    let mut tried: Vec<TriedPolicy> = Vec::new();
    let mut policies = grid(scenario.host.kernel, search.daemon.as_ref());
    for round in 0..=search.rounds {
        let runs = compare(scenario, &policies, &search.plan, simulated_ms)?;
        tried.extend(runs.into_iter().map(|policy| {
            let measures: Vec<RunMeasures> = policy.runs.iter().map(RunMeasures::new).collect();
            TriedPolicy::new(policy.policy, &measures)
        }));
        let Some(best) = choose(&tried, search.goal, search.max_cores) else { break };
        policies = Vec::new();
        for neighbor in neighbors(&best.policy, round + 1) {
            let is_known = |policy: &ComparedPolicy| *policy == neighbor;
            if !policies.iter().any(is_known) && !tried.iter().any(|tried| is_known(&tried.policy)) {
                policies.push(neighbor);
            }
        }
    }
    Ok(tried)
}

/// Simulations of a search at most: the grid, and four neighbors in each round.
#[must_use]
pub fn most_simulations(scenario: &Scenario, search: &PolicySearch) -> u64 {
    (grid(scenario.host.kernel, search.daemon.as_ref()).len() as u64 + 4 * u64::from(search.rounds))
        * search.plan.seeds.len() as u64
}
