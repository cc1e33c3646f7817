//! The search for a policy on a scenario: which policies to simulate, and which of them to choose.
//!
//! First a grid: batches with the kernel's pause, targets of the scan-time advisor, the other published policies, and
//! on request bounds of the daemon's CPU time. Then the neighbors of the best policy in `pages_to_scan`,
//! `sleep_millisecs`, the advisor's target or the daemon's bound, nearer in each round (a compass search: Kolda, Lewis
//! and Torczon, SIAM Review 45, 2003, with a fixed number of rounds).
//!
//! Limits: the best policy of the grid may lead to a local optimum. `max_page_sharing`, `use_zero_pages` and the other
//! settings stay those of the scenario.

use super::measures::RunMeasures;
use super::policies::ComparedPolicy;
use super::rules::KernelVersion;
use pagefold_base::ksm::{DEFAULT_PAGES_TO_SCAN, DEFAULT_SLEEP_MILLISECS};
use pagefold_merge::decide::policy::Advisor;

/// `pages_to_scan` of the grid, beside the kernel's default and flat out.
const GRID_PAGES: [u64; 9] = [200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
/// Targets of the scan-time advisor in the grid, in seconds.
const GRID_TARGET_SECONDS: [u64; 5] = [20, 60, 200, 600, 1800];
/// Bounds of the daemon's CPU time in the grid, in thousandths of one CPU.
const GRID_CPU_PERMILLE: [u32; 5] = [10, 30, 100, 300, 1000];
/// The goal `saved` takes the cheapest policy that saves this part of the most.
const NEARLY_MOST_SAVED: f64 = 0.99;
/// The goal `cpu` takes the cheapest policy that saves this part of the most.
const ENOUGH_SAVED: f64 = 0.9;
/// The goal `time` takes the cheapest policy that is at most this much slower than the fastest.
const NEARLY_FASTEST: f64 = 1.1;
/// The position of 90 % in the shares of [`RunMeasures::seconds_to_share`].
pub(crate) const SHARE_OF_90_PERCENT: usize = 1;

/// What a search is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TuningGoal {
    /// The most memory saved over time.
    Saved,
    /// The least CPU time that saves nearly as much as any policy.
    Cpu,
    /// The shortest time to 90 % of the savings that last.
    Time,
}

impl TuningGoal {
    /// All goals.
    pub const ALL: [Self; 3] = [Self::Saved, Self::Cpu, Self::Time];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Saved => "saved",
            Self::Cpu => "cpu",
            Self::Time => "time",
        }
    }

    /// What it chooses, in a sentence.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Saved => "the least CPU time among policies within 1 % of the most memory saved over time",
            Self::Cpu => "the least CPU time among policies that save at least 90 % of the most over time",
            Self::Time => {
                "the least CPU time among policies within 10 % of the shortest time to 90 % of the duplicates"
            }
        }
    }
}

/// A simulated policy with its figures, as means over the seeds.
#[derive(Clone, Debug, PartialEq)]
pub struct TriedPolicy {
    /// The policy.
    pub policy: ComparedPolicy,
    /// Savings less ksmd's metadata over time, in bytes times seconds.
    pub saved_byte_seconds: f64,
    /// The same at the end, in bytes.
    pub saved_bytes: f64,
    /// The CPU time of ksmd and of the daemon as a share of one CPU.
    pub cores: f64,
    /// Seconds until 90 % of the duplicates at the end are saved; `None` if a run does not reach that.
    pub seconds_to_90_percent: Option<f64>,
    /// Merged pages that machines wrote.
    pub cow_breaks: f64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: f64,
}

impl TriedPolicy {
    /// The means of some runs.
    #[must_use]
    pub fn new(policy: ComparedPolicy, runs: &[RunMeasures]) -> Self {
        let mean = |figure: fn(&RunMeasures) -> f64| runs.iter().map(figure).sum::<f64>() / runs.len().max(1) as f64;
        let times: Option<Vec<f64>> = runs.iter().map(|run| run.seconds_to_share[SHARE_OF_90_PERCENT]).collect();
        Self {
            policy,
            saved_byte_seconds: mean(|run| run.saved_byte_seconds),
            saved_bytes: mean(|run| run.saved_bytes),
            cores: mean(RunMeasures::cores),
            seconds_to_90_percent: times
                .filter(|times| !times.is_empty())
                .map(|times| times.iter().sum::<f64>() / times.len() as f64),
            cow_breaks: mean(|run| run.cow_breaks),
            huge_pages_split: mean(|run| run.huge_pages_split),
        }
    }

    /// Whether it is at least as good in savings, CPU time and time to 90 %, and better in one of them.
    fn dominates(&self, other: &Self) -> bool {
        let time = |policy: &Self| policy.seconds_to_90_percent.unwrap_or(f64::INFINITY);
        let is_no_worse = self.saved_byte_seconds >= other.saved_byte_seconds
            && self.cores <= other.cores
            && time(self) <= time(other);
        let is_better =
            self.saved_byte_seconds > other.saved_byte_seconds || self.cores < other.cores || time(self) < time(other);
        is_no_worse && is_better
    }
}

/// The first policies of a search on a kernel, with the bounds of a daemon if one is given.
#[must_use]
pub fn grid(kernel: KernelVersion, daemon: Option<&ComparedPolicy>) -> Vec<ComparedPolicy> {
    let batches = GRID_PAGES.map(|pages| ComparedPolicy::Whole { pages, sleep_millisecs: DEFAULT_SLEEP_MILLISECS });
    let advisors = GRID_TARGET_SECONDS
        .map(|target_scan_time| ComparedPolicy::Advisor(Advisor { target_scan_time, ..Advisor::default() }));
    let daemons =
        daemon.into_iter().flat_map(|daemon| GRID_CPU_PERMILLE.map(|permille| daemon.with_cpu_bound(permille)));
    let further = batches.into_iter().chain(advisors).chain(daemons).filter(|policy| policy.is_present(kernel));
    let mut policies = ComparedPolicy::published(kernel);
    for policy in further {
        if !policies.contains(&policy) {
            policies.push(policy);
        }
    }
    policies
}

/// Policies near another one, for a round of the search from 1 on. Flat out and ksmtuned have none.
#[must_use]
pub fn neighbors(policy: &ComparedPolicy, round: u32) -> Vec<ComparedPolicy> {
    let factor = 1.0 + 0.5_f64.powi(round.min(20).cast_signed());
    let near = |value: u64| [value as f64 / factor, value as f64 * factor].map(|value| value.round().max(1.0) as u64);
    match *policy {
        ComparedPolicy::Default => neighbors(
            &ComparedPolicy::Whole { pages: DEFAULT_PAGES_TO_SCAN, sleep_millisecs: DEFAULT_SLEEP_MILLISECS },
            round,
        ),
        ComparedPolicy::Whole { pages, sleep_millisecs } if sleep_millisecs > 0 => {
            let batches = near(pages).map(|pages| ComparedPolicy::Whole { pages, sleep_millisecs });
            let pauses = near(sleep_millisecs).map(|sleep_millisecs| ComparedPolicy::Whole { pages, sleep_millisecs });
            batches.into_iter().chain(pauses).collect()
        }
        ComparedPolicy::Advisor(rule) => near(rule.target_scan_time)
            .map(|target_scan_time| ComparedPolicy::Advisor(Advisor { target_scan_time, ..rule }))
            .into(),
        ComparedPolicy::Guided { cpu_permille: Some(permille), .. } => {
            near(permille.into()).map(|permille| policy.with_cpu_bound(permille as u32)).into()
        }
        ComparedPolicy::Whole { .. }
        | ComparedPolicy::FlatOut
        | ComparedPolicy::Ksmtuned(_)
        | ComparedPolicy::Guided { cpu_permille: None, .. } => Vec::new(),
    }
}

/// The policy to choose for a goal, within a bound on CPU time. `None` if no policy saves memory, or if the goal
/// is time and none reaches 90 %.
#[must_use]
pub fn choose(tried: &[TriedPolicy], goal: TuningGoal, max_cores: Option<f64>) -> Option<&TriedPolicy> {
    let permitted: Vec<&TriedPolicy> = tried
        .iter()
        .filter(|policy| policy.saved_byte_seconds > 0.0 && max_cores.is_none_or(|most| policy.cores <= most))
        .collect();
    let most = permitted.iter().map(|policy| policy.saved_byte_seconds).fold(0.0, f64::max);
    let fastest = permitted.iter().filter_map(|policy| policy.seconds_to_90_percent).fold(f64::INFINITY, f64::min);
    let reaches = |policy: &TriedPolicy| match goal {
        TuningGoal::Saved => policy.saved_byte_seconds >= NEARLY_MOST_SAVED * most,
        TuningGoal::Cpu => policy.saved_byte_seconds >= ENOUGH_SAVED * most,
        TuningGoal::Time => policy.seconds_to_90_percent.is_some_and(|time| time <= NEARLY_FASTEST * fastest),
    };
    let cheapest = |a: &&TriedPolicy, b: &&TriedPolicy| {
        a.cores.total_cmp(&b.cores).then(b.saved_byte_seconds.total_cmp(&a.saved_byte_seconds))
    };
    permitted.into_iter().filter(|policy| reaches(policy)).min_by(cheapest)
}

/// Whether each policy is on the Pareto front: no other is as good in savings, CPU time and time to 90 %, and better in
/// one of them.
#[must_use]
pub fn pareto_front(tried: &[TriedPolicy]) -> Vec<bool> {
    tried.iter().map(|policy| !tried.iter().any(|other| other.dominates(policy))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn tried(name: &str, saved: f64, cores: f64, seconds: Option<f64>) -> TriedPolicy {
        TriedPolicy {
            policy: ComparedPolicy::parse(name).unwrap(),
            saved_byte_seconds: saved,
            saved_bytes: saved,
            cores,
            seconds_to_90_percent: seconds,
            cow_breaks: 0.0,
            huge_pages_split: 0.0,
        }
    }

    fn four() -> [TriedPolicy; 4] {
        [
            tried("default", 50.0, 0.01, None),
            tried("whole:2000/20", 92.0, 0.2, Some(600.0)),
            tried("whole:5000/20", 99.5, 0.4, Some(105.0)),
            tried("flat-out", 100.0, 1.0, Some(100.0)),
        ]
    }

    #[test]
    fn each_goal_takes_the_cheapest_policy_that_reaches_it() {
        let chosen = |goal, max_cores| choose(&four(), goal, max_cores).map(|policy| policy.policy.to_string());
        assert_eq!(chosen(TuningGoal::Saved, None).unwrap(), "whole:5000/20");
        assert_eq!(chosen(TuningGoal::Cpu, None).unwrap(), "whole:2000/20");
        assert_eq!(chosen(TuningGoal::Time, None).unwrap(), "whole:5000/20");
    }

    #[test]
    fn bound_on_cpu_time_excludes_policies_also_from_what_can_be_reached() {
        let chosen = |goal, most| choose(&four(), goal, Some(most)).map(|policy| policy.policy.to_string());
        assert_eq!(chosen(TuningGoal::Saved, 0.3).unwrap(), "whole:2000/20");
        assert_eq!(chosen(TuningGoal::Saved, 0.1).unwrap(), "default");
        assert_eq!(chosen(TuningGoal::Time, 0.1), None, "none reaches 90 %");
        assert_eq!(chosen(TuningGoal::Saved, 0.001), None);
    }

    #[test]
    fn nothing_is_chosen_where_nothing_is_saved() {
        let costs = [tried("default", -3.0, 0.1, None), tried("flat-out", 0.0, 0.0, None)];
        for goal in TuningGoal::ALL {
            assert_eq!(choose(&costs, goal, None), None);
        }
    }

    #[test]
    fn policies_that_are_worse_in_one_and_better_in_none_leave_the_front() {
        let mut policies = four().to_vec();
        policies.push(tried("whole:2000/40", 92.0, 0.2, Some(601.0)));
        policies.push(tried("whole:1000/10", 92.0, 0.2, Some(600.0)));
        assert_eq!(pareto_front(&policies), [true, true, true, true, false, true]);
    }

    #[test]
    fn grid_has_each_policy_once_and_none_that_the_kernel_lacks() {
        let names = |kernel| -> Vec<String> {
            grid(KernelVersion::parse(kernel).unwrap(), None).iter().map(ToString::to_string).collect()
        };
        let (old, new) = (names("4.15"), names("6.12"));
        assert_eq!((old.len(), new.len()), (12, 17));
        assert!(old.iter().all(|name| !name.starts_with("advisor")));
        assert_eq!(new.iter().filter(|name| *name == "advisor").count(), 1);
        assert!(!new.contains(&"advisor:200".to_owned()), "200 s is the default");
        let daemon = ComparedPolicy::parse("guided:across-domains").unwrap();
        let with_daemon = grid(KernelVersion::parse("6.12").unwrap(), Some(&daemon));
        let bounds: Vec<String> = with_daemon[17..].iter().map(ToString::to_string).collect();
        assert_eq!(bounds, ["1%", "3%", "10%", "30%", "100%"].map(|bound| format!("guided:across-domains:{bound}")));
    }

    #[test]
    fn neighbors_come_nearer_in_each_round() {
        let names = |name, round| -> Vec<String> {
            neighbors(&ComparedPolicy::parse(name).unwrap(), round).iter().map(ToString::to_string).collect()
        };
        assert_eq!(names("default", 1), ["whole:67/20", "whole:150/20", "whole:100/13", "whole:100/30"]);
        assert_eq!(names("whole:2000/20", 2), ["whole:1600/20", "whole:2500/20", "whole:2000/16", "whole:2000/25"]);
        assert_eq!(names("advisor:60", 1), ["advisor:40", "advisor:90"]);
        assert_eq!(names("guided:3%", 1), ["guided:2%", "guided:4.5%"]);
        assert_eq!(names("whole:1/1", 1), ["whole:1/1", "whole:2/1", "whole:1/1", "whole:1/2"]);
        for policy in ["flat-out", "ksmtuned", "whole:100/0"] {
            assert!(names(policy, 1).is_empty());
        }
    }

    #[test]
    fn means_are_over_the_seeds_and_a_time_needs_all_of_them() {
        let run = |saved, time| RunMeasures {
            saved_bytes: saved,
            saved_byte_seconds: 2.0 * saved,
            ksmd_cores: 0.5,
            pagefold_cores: 0.25,
            seconds_to_share: [Some(1.0), time, None],
            cow_breaks: 0.0,
            huge_pages_split: 0.0,
            unmerged_duplicates: 0.0,
            full_scans: 0.0,
            missing_bytes: 0.0,
        };
        let both = TriedPolicy::new(ComparedPolicy::Default, &[run(1.0, Some(10.0)), run(3.0, Some(20.0))]);
        assert_eq!((both.saved_bytes, both.saved_byte_seconds), (2.0, 4.0));
        assert_eq!((both.cores, both.seconds_to_90_percent), (0.75, Some(15.0)));
        let one = TriedPolicy::new(ComparedPolicy::Default, &[run(1.0, Some(10.0)), run(3.0, None)]);
        assert_eq!(one.seconds_to_90_percent, None);
    }

    proptest! {
        /// Each policy off the front is dominated by one on it, and a goal without a bound chooses within its share.
        #[test]
        fn front_dominates_the_rest(
            figures in prop::collection::vec((0.0..10.0_f64, 0.0..1.0_f64, prop::option::of(0.0..100.0_f64)), 1..20)
        ) {
            let policies: Vec<TriedPolicy> = figures
                .into_iter()
                .map(|(saved, cores, seconds)| tried("default", saved, cores, seconds))
                .collect();
            let front = pareto_front(&policies);
            prop_assert!(front.contains(&true));
            for (policy, on_front) in policies.iter().zip(&front) {
                let dominated = policies.iter().zip(&front).any(|(other, front)| *front && other.dominates(policy));
                prop_assert_eq!(dominated, !on_front);
            }
            let most = policies.iter().map(|policy| policy.saved_byte_seconds).fold(0.0, f64::max);
            if let Some(chosen) = choose(&policies, TuningGoal::Cpu, None) {
                prop_assert!(chosen.saved_byte_seconds >= ENOUGH_SAVED * most);
            }
        }
    }
}
