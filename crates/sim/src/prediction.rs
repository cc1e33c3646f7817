//! What policies save and cost on a host from now on, with how far that is known.
//!
//! A scan of the host leaves open which pages are written next, and when. So each policy runs with several seeds, and under
//! two assumptions about writes ([`crate::decide::estimate::WritePattern`]). A seed also decides the order of contents in
//! ksmd's trees, as far as it is not known, and for machines that are added the order of their pages.

use crate::comparison::{SimulationError, SimulationPlan, compare};
use crate::decide::policies::ComparedPolicy;
use crate::decide::samples::SimulatedRun;
use crate::decide::scenario::Scenario;
use std::sync::atomic::AtomicU64;

/// The scenarios of a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedScenarios<'s> {
    /// The same pages are written again and again: the expected course.
    pub expected: &'s Scenario,
    /// Any page is written. Without it, nothing is known of writes, or none was seen.
    pub any_pages: Option<&'s Scenario>,
}

impl PredictedScenarios<'_> {
    /// Runs of a policy with a seed.
    #[must_use]
    pub fn runs(&self) -> u64 {
        1 + u64::from(self.any_pages.is_some())
    }
}

/// A policy, and its runs, one for each seed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PredictedRuns {
    /// The policy.
    pub policy: ComparedPolicy,
    /// Runs in which the same pages are written.
    pub expected: Vec<SimulatedRun>,
    /// Runs in which any page is.
    pub any_pages: Vec<SimulatedRun>,
}

/// Simulates each policy with each seed and each assumption about writes. `simulated_ms` counts the virtual time of all
/// runs.
///
/// # Errors
/// If a scenario has more contents than the model, or the daemon fails.
pub fn predict(
    scenarios: &PredictedScenarios<'_>,
    policies: &[ComparedPolicy],
    plan: &SimulationPlan,
    simulated_ms: &AtomicU64,
) -> Result<Vec<PredictedRuns>, SimulationError> {
    let runs = |scenario| compare(scenario, policies, plan, simulated_ms);
    let expected = runs(scenarios.expected)?;
    let any_pages = scenarios.any_pages.map(runs).transpose()?;
    let mut any_pages = any_pages.map(Vec::into_iter);
    Ok(expected
        .into_iter()
        .map(|policy| PredictedRuns {
            policy: policy.policy,
            expected: policy.runs,
            any_pages: any_pages.as_mut().and_then(Iterator::next).map_or_else(Vec::new, |policy| policy.runs),
        })
        .collect())
}
