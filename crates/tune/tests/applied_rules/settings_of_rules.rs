//! The settings that rules change: their paths.

use super::*;
use pagefold_tune::decide::profile::{self, Profile};

/// The kernel shows the governor of a policy at each of its CPUs as well; a rule and a profile name it by one path.
#[test]
fn governor_of_each_policy_is_written_once_under_a_profile() {
    let host = host_of(CASES.iter().find(|case| case.rule == "cpu-governor").unwrap());
    host.put_file("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "schedutil\n");
    let mut proposals = Proposal::from_findings(&[finding_of(&host, "cpu-governor")], &[]);
    let changes = proposals[0].changes.clone();
    let facts = gather_host_facts(&host, &[], &TrustPolicy::default());
    let patterns: Vec<&str> = profile::setting_patterns(Profile::Throughput).collect();
    let state = read_state(&host, &facts, &changes.iter().collect::<Vec<_>>(), &patterns);
    let of_profile = profile::proposals(Profile::Throughput, &state.settings);
    assert!(of_profile.iter().any(|proposal| proposal.changes == changes), "{of_profile:?}");
    proposals.extend(of_profile);
    let plan = plan(&proposals, Some(Profile::Throughput), &state);
    let governors: Vec<&str> = plan
        .steps
        .iter()
        .filter_map(|step| match &step.effect {
            Effect::Write { path, .. } => path.ends_with("scaling_governor").then_some(path.as_str()),
            _ => None,
        })
        .collect();
    let policies = [0, 4].map(|policy| format!("sys/devices/system/cpu/cpufreq/policy{policy}/scaling_governor"));
    assert_eq!(governors, policies);
}

#[test]
fn other_rules_have_no_change_that_is_made_now() {
    for case in CASES {
        let host = host_of(case);
        for finding in examine_host(&gather_host_facts(&host, &[], &TrustPolicy::default())) {
            let is_made =
                plan_of(&host, &finding).steps.iter().any(|step| ApplyScope::HostAndDefinitions.contains(step));
            assert!(!is_made || is_applicable(finding.details.method), "{finding:?}");
        }
    }
}
