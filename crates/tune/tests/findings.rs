//! The findings of the doctor lead to steps that can be carried out, and a tuned host needs none.

#![forbid(unsafe_code)]

use pagefold_doctor::decide::change::ApplyMethod;
use pagefold_doctor::decide::{Finding, Verdict, examine_host};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_host::Host;
use pagefold_host::fake_host::FakeHost;
use pagefold_tune::apply::{ApplyScope, apply};
use pagefold_tune::decide::{Proposal, TunePlan, plan};
use pagefold_tune::facts::read_state;

/// An AMD host with two CPUs on which no machine runs, and with all settings at fault.
const BAD: &[(&str, &str)] = &[
    ("proc/cmdline", "BOOT_IMAGE=/vmlinuz quiet\n"),
    ("proc/cpuinfo", "flags\t\t: fpu tsc svm npt avic pausefilter constant_tsc nonstop_tsc\n"),
    ("proc/sys/kernel/io_uring_disabled", "0\n"),
    ("proc/sys/kernel/numa_balancing", "1\n"),
    ("proc/sys/kernel/sched_autogroup_enabled", "1\n"),
    ("proc/sys/vm/zone_reclaim_mode", "1\n"),
    ("sys/block/nvme0n1/queue/scheduler", "none [mq-deadline] kyber\n"),
    ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm\n"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_available_governors", "performance powersave\n"),
    ("sys/devices/system/cpu/cpufreq/policy0/scaling_governor", "powersave\n"),
    ("sys/devices/system/cpu/online", "0-1\n"),
    ("sys/devices/system/node/node0/cpulist", "0\n"),
    ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:  8388608 kB\n"),
    ("sys/devices/system/node/node1/cpulist", "1\n"),
    ("sys/devices/system/node/node1/meminfo", "Node 1 MemTotal:  8388608 kB\n"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
    ("sys/module/kvm/parameters/halt_poll_ns", "400000\n"),
    ("sys/module/kvm/parameters/halt_poll_ns.mode", "644"),
    ("sys/module/kvm_amd/parameters/npt", "0\n"),
    ("sys/module/kvm_amd/parameters/npt.mode", "444"),
    ("sys/module/kvm_amd/refcnt", "0\n"),
];

fn bad_host() -> FakeHost {
    let host = FakeHost::booted();
    BAD.iter().for_each(|(path, text)| host.put_file(path, text));
    host
}

fn findings(host: &dyn Host) -> Vec<Finding> {
    examine_host(&gather_host_facts(host, &[], &TrustPolicy::default()))
}

fn plan_of(host: &dyn Host, findings: &[Finding]) -> TunePlan {
    let proposals = Proposal::from_findings(findings, &[]);
    let changes: Vec<_> = proposals.iter().flat_map(|proposal| &proposal.changes).collect();
    let facts = gather_host_facts(host, &[], &TrustPolicy::default());
    plan(&proposals, None, &read_state(host, &facts, &changes, &[]))
}

#[test]
fn findings_with_changes_become_steps_that_resolve_them() {
    let (host, directory) = (bad_host(), tempfile::tempdir().unwrap());
    let before = findings(&host);
    let at_fault: Vec<&Finding> = before.iter().filter(|finding| !finding.changes.is_empty()).collect();
    let rules: Vec<&str> = at_fault.iter().map(|finding| finding.rule).collect();
    for rule in ["kvm-ept", "kvm-halt-poll", "host-clocksource", "zone-reclaim", "thp-guest-ram", "nvme-scheduler"] {
        assert!(rules.contains(&rule), "{rule}: {before:#?}");
    }
    let nested_paging = before.iter().find(|finding| finding.rule == "kvm-ept").unwrap();
    assert_eq!(nested_paging.verdict, Verdict::Fail);
    assert_eq!(nested_paging.details.method, ApplyMethod::ModuleReload);
    let withdrawal = "openstack-in-production.blogspot.com/2015/09/ept-huge-pages-and-benchmarking.html";
    assert!(nested_paging.details.citation.contains(withdrawal), "{nested_paging:?}");

    let plan = plan_of(&host, &before);
    assert_eq!(plan.refusals, [], "each change can be made here");
    let mut planned: Vec<&str> =
        plan.steps.iter().flat_map(|step| &step.reasons).map(|reason| reason.rule.as_str()).collect();
    planned.dedup();
    for rule in &rules {
        assert!(planned.contains(rule), "{rule} has no step: {planned:?}");
    }
    let applied = apply(&host, directory.path(), &plan, ApplyScope::Host).unwrap();
    assert!(applied.failed.is_empty(), "{applied:?}");

    let after = findings(&host);
    let is_live = |finding: &&Finding| {
        matches!(finding.details.method, ApplyMethod::Live | ApplyMethod::ModuleReload) && !finding.changes.is_empty()
    };
    let remaining: Vec<&Finding> = after.iter().filter(is_live).collect();
    assert!(remaining.is_empty(), "{remaining:#?}");
    let again = plan_of(&host, &after);
    let is_done_now = |step: &&pagefold_tune::decide::Step| {
        let mut details = step.reasons.iter().filter_map(|reason| reason.details);
        details.any(|details| matches!(details.method, ApplyMethod::Live | ApplyMethod::ModuleReload))
    };
    assert_eq!(again.steps.iter().filter(is_done_now).count(), 0, "{again:#?}");
}
