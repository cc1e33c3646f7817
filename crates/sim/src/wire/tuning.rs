//! The result of a search for a policy in JSON.

use super::kernel_name;
use crate::decide::host_state::Exactness;
use crate::decide::policies::ComparedPolicy;
use crate::decide::scenario::Scenario;
use crate::decide::tuning::{TriedPolicy, choose, pareto_front};
use crate::tuning::PolicySearch;
use schemars::JsonSchema;
use serde::Serialize;

/// Bytes in a GiB.
const GIB: f64 = (1_u64 << 30) as f64;

/// The result of `pagefold sim tune`. All figures are those of a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct SimTuneReport {
    /// `pagefold.sim-tune/1`.
    pub schema: &'static str,
    /// The scenario: its name or file.
    pub scenario: String,
    /// What it is.
    pub description: String,
    /// The modeled kernel.
    pub kernel: String,
    /// Virtual time of each run.
    pub seconds: f64,
    /// Whether pages that change during a scan acted as in the kernel.
    pub exact: bool,
    /// Seeds; each policy ran once with each.
    pub seeds: Vec<u64>,
    /// `saved`, `cpu` or `time`.
    pub goal: &'static str,
    /// The bound on CPU time, as a share of one CPU.
    pub max_cores: Option<f64>,
    /// The policy to choose; none if no policy within the bound saves memory, or if the goal is time and none reaches
    /// 90 %.
    pub choice: Option<String>,
    /// All policies that were tried, by their CPU time.
    pub tried: Vec<TriedPolicyReport>,
}

/// A policy that was tried. Figures are means over the seeds.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct TriedPolicyReport {
    /// Its name.
    pub policy: String,
    /// `pages_to_scan`, if the policy does not change it.
    pub pages_to_scan: Option<u64>,
    /// `sleep_millisecs`, if the policy does not change it.
    pub sleep_millisecs: Option<u64>,
    /// `advisor_target_scan_time`, if the policy is the advisor.
    pub advisor_target_scan_time: Option<u64>,
    /// Savings less ksmd's metadata at the end.
    pub saved_bytes: f64,
    /// The same over time, in GiB times hours.
    pub saved_gib_hours: f64,
    /// The CPU time of ksmd and of the daemon as a share of one CPU.
    pub cores: f64,
    /// Seconds until 90 % of the duplicates at the end are saved; none if a run does not reach that.
    pub seconds_to_90_percent: Option<f64>,
    /// Merged pages that machines wrote.
    pub cow_breaks: f64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: f64,
    /// Whether no other policy is as good in savings over time, CPU time and time to 90 %, and better in one of them.
    pub on_pareto_front: bool,
}

impl TriedPolicyReport {
    fn new(tried: &TriedPolicy, on_pareto_front: bool) -> Self {
        let pace = tried.policy.fixed_pace();
        Self {
            policy: tried.policy.to_string(),
            pages_to_scan: pace.map(|(pages, _)| pages),
            sleep_millisecs: pace.map(|(_, sleep)| sleep),
            advisor_target_scan_time: match &tried.policy {
                ComparedPolicy::Advisor(rule) => Some(rule.target_scan_time),
                _ => None,
            },
            saved_bytes: tried.saved_bytes,
            saved_gib_hours: tried.saved_byte_seconds / GIB / 3600.0,
            cores: tried.cores,
            seconds_to_90_percent: tried.seconds_to_90_percent,
            cow_breaks: tried.cow_breaks,
            huge_pages_split: tried.huge_pages_split,
            on_pareto_front,
        }
    }
}

impl SimTuneReport {
    /// The report of a search.
    #[must_use]
    pub fn new(name: &str, scenario: &Scenario, search: &PolicySearch, tried: &[TriedPolicy]) -> Self {
        let front = pareto_front(tried);
        let mut policies: Vec<TriedPolicyReport> =
            tried.iter().zip(front).map(|(policy, on_front)| TriedPolicyReport::new(policy, on_front)).collect();
        policies.sort_by(|a, b| a.cores.total_cmp(&b.cores));
        Self {
            schema: "pagefold.sim-tune/1",
            scenario: name.to_owned(),
            description: scenario.description.clone(),
            kernel: kernel_name(scenario.host.kernel),
            seconds: scenario.duration_ms as f64 / 1e3,
            exact: search.plan.exactness == Exactness::Exact,
            seeds: search.plan.seeds.clone(),
            goal: search.goal.name(),
            max_cores: search.max_cores,
            choice: choose(tried, search.goal, search.max_cores).map(|policy| policy.policy.to_string()),
            tried: policies,
        }
    }
}
