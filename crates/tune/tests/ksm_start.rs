//! ksmd is started only if at most one trust domain is enrolled, whatever asks for it.

#![forbid(unsafe_code)]

use pagefold_doctor::decide::change::SettingChange;
use pagefold_doctor::decide::{examine_host, ksm_start_details};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_host::fake_host::FakeHost;
use pagefold_tune::decide::export::{ExportFormat, render};
use pagefold_tune::decide::import::{self, ImportFormat};
use pagefold_tune::decide::profile::{self, Profile};
use pagefold_tune::decide::{Effect, KSM_RUN_PATH, Proposal, TunePlan, operator_findings, plan};
use pagefold_tune::facts::read_state;
use pagefold_tune::kept::export_settings;

const SMAPS: &str = "7f0000000000-7f0000001000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonymous: 4 kB\nVmFlags: rd wr mg\n";

/// A host with a stopped ksmd, and a machine of the same user for each name. All of their memory is enrolled.
fn host(machines: &[&str]) -> FakeHost {
    let host = FakeHost::booted();
    let stat = |pid: u32, name: &str, flags: u32| {
        format!("{pid} ({name}) S 1 1 1 0 -1 {flags} {}20 0 1 0 1 {}0 0 0 0\n", "0 ".repeat(8), "0 ".repeat(16))
    };
    // Without ksmd, processes would count as hidden.
    host.put_file("proc/6/stat", &stat(6, "ksmd", 0x0020_0040));
    host.put_file("proc/6/cmdline", "");
    host.put_file("proc/6/status", "Uid:\t0\t0\t0\t0\n");
    host.put_file("proc/uptime", "5000.00 9000.00\n");
    for (pid, name) in (7..).zip(machines) {
        host.put_file(&format!("proc/{pid}/stat"), &stat(pid, "qemu-system-x86", 0));
        host.put_file(&format!("proc/{pid}/cmdline"), &format!("qemu-system-x86_64\0-name\0guest={name}\0"));
        host.put_file(&format!("proc/{pid}/status"), "Uid:\t0\t0\t0\t0\n");
        host.put_file(&format!("proc/{pid}/smaps"), SMAPS);
    }
    host
}

/// A host whose processes cannot all be listed.
fn host_with_hidden_processes() -> FakeHost {
    FakeHost::booted()
}

/// What `tune plan` does with findings, and with a profile.
fn plan_findings(host: &FakeHost, profile: Option<Profile>, named_rules: &[&str]) -> TunePlan {
    let facts = gather_host_facts(host, &[], &TrustPolicy::default());
    let named: Vec<String> = named_rules.iter().map(|&rule| rule.to_owned()).collect();
    let mut proposals = Proposal::from_findings(&examine_host(&facts), &named);
    let changes: Vec<&SettingChange> = proposals.iter().flat_map(|proposal| &proposal.changes).collect();
    let patterns: Vec<&str> = profile.into_iter().flat_map(profile::setting_patterns).collect();
    let state = read_state(host, &facts, &changes, &patterns);
    proposals.extend(profile.into_iter().flat_map(|profile| profile::proposals(profile, &state.settings)));
    plan(&proposals, profile, &state)
}

/// What `tune import` does with a profile of tuned that sets `run`.
fn plan_import(host: &FakeHost, value: &str) -> TunePlan {
    let text = format!("[main]\nsummary=x\n[sysfs]\n/{KSM_RUN_PATH}={value}\n");
    let imported = import::parse(&text, ImportFormat::Tuned);
    let facts = gather_host_facts(host, &[], &TrustPolicy::default());
    let patterns: Vec<&str> = imported.patterns.iter().map(|(pattern, _)| pattern.as_str()).collect();
    let state = read_state(host, &facts, &imported.changes.iter().collect::<Vec<_>>(), &patterns);
    plan(&[imported.proposal("tuned", &state)], None, &state)
}

/// The value that a plan gives `run`.
fn planned_run(plan: &TunePlan) -> Option<&str> {
    let mut values = plan.steps.iter().filter_map(|step| match &step.effect {
        Effect::Write { path, to, .. } if path == KSM_RUN_PATH => Some(to.as_str()),
        _ => None,
    });
    values.next_back()
}

fn exported(plan: &TunePlan) -> String {
    render(&export_settings(&[], plan), ExportFormat::Tuned)
}

#[test]
fn domains_stay_apart_whatever_asks_for_ksmd() {
    let unsafe_hosts = [
        (host(&["web", "db"]), "pages of 2 trust domains would be merged"),
        (host_with_hidden_processes(), "whether one trust domain is enrolled is not known"),
    ];
    for (host, reason) in unsafe_hosts {
        let profiles = [Profile::Density, Profile::Htc].map(|profile| plan_findings(&host, Some(profile), &[]));
        let imports = ["1", "01", "+1"].map(|value| plan_import(&host, value));
        for plan in profiles.iter().chain(&imports) {
            assert_eq!(planned_run(plan), None, "{plan:?}");
            let refusal = plan.refusals.iter().find(|refusal| refusal.change.contains(KSM_RUN_PATH)).unwrap();
            assert!(refusal.why.contains(reason) && refusal.why.contains("ksm-domains"), "{refusal:?}");
            let text = exported(plan);
            assert!(!text.contains(&format!("\n/{KSM_RUN_PATH}=")), "{text}");
            assert!(text.contains("not exported: set /sys/kernel/mm/ksm/run"), "{text}");
        }
        assert_eq!(planned_run(&plan_findings(&host, None, &["ksm-run"])), None);
    }
}

#[test]
fn one_domain_is_merged_whatever_asks_for_ksmd() {
    let host = host(&["web"]);
    assert_eq!(planned_run(&plan_findings(&host, None, &[])), Some("1"));
    assert_eq!(planned_run(&plan_import(&host, "1")), Some("1"));
    let plan = plan_findings(&host, Some(Profile::Density), &[]);
    assert_eq!(planned_run(&plan), Some("1"));
    assert!(exported(&plan).contains(&format!("\n/{KSM_RUN_PATH}=1\n")));
}

#[test]
fn ksmd_with_nothing_enrolled_is_started_only_on_request() {
    let host = host(&[]);
    let by_default = plan_findings(&host, None, &[]);
    assert_eq!((planned_run(&by_default), &by_default.refusals[..]), (None, &[][..]));
    let findings = examine_host(&gather_host_facts(&host, &[], &TrustPolicy::default()));
    let left = operator_findings(&findings, &[]);
    let left = left.iter().find(|finding| finding.rule == "ksm-run").unwrap();
    assert!(left.remedy[0].contains("QEMU enrolls each machine that starts later"), "{left:?}");
    assert_eq!(left.remedy.last().unwrap(), "pagefold tune apply --rule ksm-run");
    assert!(operator_findings(&findings, &["ksm-run".to_owned()]).iter().all(|left| left.rule != "ksm-run"));

    let requested = [
        plan_findings(&host, None, &["ksm-run"]),
        plan_findings(&host, Some(Profile::Density), &[]),
        plan_import(&host, "1"),
    ];
    for plan in requested {
        assert_eq!(planned_run(&plan), Some("1"), "{plan:?}");
        let mut reasons = plan.steps.iter().flat_map(|step| &step.reasons);
        let details = reasons.find_map(|reason| reason.details).unwrap();
        assert_eq!(details, ksm_start_details());
        assert!(details.risk.contains("QEMU enrolls"), "{details:?}");
    }
}
