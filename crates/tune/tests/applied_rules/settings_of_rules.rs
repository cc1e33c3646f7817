//! The settings that rules change: their counters, their paths, and what is in force of those that share a file.

use super::*;
use pagefold_doctor::decide::change::SettingChange;
use pagefold_tune::decide::counters::{Proof, proof_of};
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

/// The settings that a finding would write.
fn settings_of(finding: &Finding) -> Vec<String> {
    let setting = |change: &SettingChange| match change {
        SettingChange::Write { path, .. } => Some(path.clone()),
        SettingChange::ModuleParameter { module, parameter, .. } => {
            Some(format!("sys/module/{module}/parameters/{parameter}"))
        }
        SettingChange::BootParameter { .. } | SettingChange::VmDefinition { .. } => None,
    };
    finding.changes.iter().filter_map(setting).collect()
}

#[test]
fn each_rule_names_the_counters_that_verify_reads() {
    let mut without = BTreeSet::new();
    for case in CASES.iter().filter(|case| case.expected != LeftToOperator) {
        let finding = finding_of(&host_of(case), case.rule);
        let text = finding.details.counter;
        for setting in settings_of(&finding) {
            match proof_of(&setting) {
                Proof::Counters(sources) => {
                    assert!(!text.starts_with("none"), "{}: {text}", case.rule);
                    let unnamed: Vec<&str> =
                        sources.iter().map(|source| source.name).filter(|name| !text.contains(name)).collect();
                    assert!(!sources.is_empty() && unnamed.is_empty(), "{}: {text} lacks {unnamed:?}", case.rule);
                }
                Proof::Nothing(why) => {
                    without.insert(case.rule);
                    assert!(text.starts_with(&format!("none: {why};")), "{}: {why}", case.rule);
                }
            }
        }
    }
    assert_eq!(without, ["host-clocksource", "io-uring", "sched-autogroup"].into());
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

/// Each rule changes the file of modprobe.d, and the later one starts from what the earlier one wrote.
#[test]
fn changes_of_two_rules_about_one_module_are_in_force_together() {
    let (host, directory) = (host_of(&CASES[0]), tempfile::tempdir().unwrap());
    host.put_file("sys/module/kvm_amd/parameters/npt", "N\n");
    host.put_file("sys/module/kvm_amd/parameters/avic", "N\n");
    let before = host.state();
    let findings = ["kvm-ept", "kvm-apicv"].map(|rule| finding_of(&host, rule));
    let proposals = Proposal::from_findings(&findings, &[]);
    let changes: Vec<_> = proposals.iter().flat_map(|proposal| &proposal.changes).collect();
    let facts = gather_host_facts(&host, &[], &TrustPolicy::default());
    let plan = plan(&proposals, None, &read_state(&host, &facts, &changes, &[]));
    let applied = apply(&host, directory.path(), &plan, ApplyScope::Host).unwrap();
    assert_eq!((applied.done.len(), applied.failed), (2, Vec::new()));
    let files = || {
        let kept = kept::load(&host, directory.path()).unwrap();
        kept.into_iter().filter(|kept| kept.name == format!("/{MODULE_FILE}")).collect::<Vec<_>>()
    };
    let [file] = &files()[..] else { panic!("{:?}", files()) };
    assert_eq!((file.before.as_str(), file.state), ("absent", KeptState::InForce));
    assert!(file.written.contains("options kvm_amd avic=1 npt=1\n"), "{}", file.written);
    let written = host.state();
    host.put_file(MODULE_FILE, "# other\n");
    assert_eq!(files()[0].state, KeptState::ChangedByOthers);

    let host = FakeHost::from_state(&written);
    assert_eq!(kept::undo(&host, directory.path()).failed, []);
    assert!(host.state() == before);
}
