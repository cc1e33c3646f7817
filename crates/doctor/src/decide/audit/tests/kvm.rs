//! The parameters of KVM.

use super::*;

const EPT: &str = "sys/module/kvm_intel/parameters/ept";
const NPT: &str = "sys/module/kvm_amd/parameters/npt";
const HALT_POLL: &str = "sys/module/kvm/parameters/halt_poll_ns";
const NX: &str = "sys/module/kvm/parameters/nx_huge_pages";
const MULTIHIT: &str = "sys/devices/system/cpu/vulnerabilities/itlb_multihit";
const APICV: &str = "sys/module/kvm_intel/parameters/enable_apicv";
const TDP_MMU: &str = "sys/module/kvm/parameters/tdp_mmu";
const NESTED: &str = "sys/module/kvm_intel/parameters/nested";
const NESTED_RUN: &str = "sys/kernel/debug/kvm/nested_run";
const PLE_GAP: &str = "sys/module/kvm_intel/parameters/ple_gap";
const PLE_WINDOW: &str = "sys/module/kvm_intel/parameters/ple_window";
const CPUINFO: &str = "proc/cpuinfo";

const CASES: &[Case] = &[
    ("kvm-ept", &[], Fine),
    ("kvm-ept", &[(EPT, "N")], Fail),
    ("kvm-ept", &[(EPT, "N"), (CPUINFO, "flags : fpu hypervisor")], NotApplicable),
    ("kvm-ept", &[(EPT, "N"), (CPUINFO, DENIED)], Unknown),
    ("kvm-ept", &[(EPT, DENIED)], Unknown),
    ("kvm-ept", &[(EPT, "maybe")], Unknown),
    ("kvm-ept", &[(EPT, ABSENT)], NotApplicable),
    ("kvm-ple", &[], Fine),
    ("kvm-ple", &[(PLE_GAP, "0")], Fine),
    ("kvm-ple", &[(PLE_GAP, "0"), ("sys/devices/system/cpu/online", "0-1")], Warn),
    ("kvm-ple", &[(PLE_GAP, "0"), ("sys/devices/system/cpu/online", DENIED)], Unknown),
    ("kvm-ple", &[(PLE_GAP, "0"), (CPUINFO, "flags : fpu")], NotApplicable),
    ("kvm-ple", &[(PLE_WINDOW, "128")], Warn),
    ("kvm-ple", &[(PLE_WINDOW, DENIED)], Unknown),
    ("kvm-halt-poll", &[], Fine),
    ("kvm-halt-poll", &[(HALT_POLL, "400000")], Warn),
    ("kvm-halt-poll", &[("sys/devices/system/cpu/online", "0-1")], Warn),
    ("kvm-halt-poll", &[("sys/devices/system/cpu/online", "0-1"), (HALT_POLL, "50000")], Fine),
    ("kvm-halt-poll", &[(HALT_POLL, DENIED)], Unknown),
    ("kvm-halt-poll", &[(HALT_POLL, ABSENT)], NotApplicable),
    ("kvm-nx-huge-pages", &[], Fine),
    ("kvm-nx-huge-pages", &[(NX, "Y")], Warn),
    ("kvm-nx-huge-pages", &[(NX, "Y"), (MULTIHIT, "KVM: Mitigation: Split huge pages")], Fine),
    ("kvm-nx-huge-pages", &[(MULTIHIT, "KVM: Vulnerable")], Fail),
    ("kvm-nx-huge-pages", &[(MULTIHIT, ABSENT)], NotApplicable),
    ("kvm-nx-huge-pages", &[(MULTIHIT, DENIED)], Unknown),
    ("kvm-apicv", &[], Fine),
    ("kvm-apicv", &[(APICV, "N")], Warn),
    ("kvm-apicv", &[(APICV, "N"), (CPUINFO, "flags : fpu ept")], NotApplicable),
    ("kvm-apicv", &[(APICV, DENIED)], Unknown),
    ("kvm-tdp-mmu", &[], Fine),
    ("kvm-tdp-mmu", &[(TDP_MMU, "N")], Warn),
    ("kvm-tdp-mmu", &[(TDP_MMU, "N"), (EPT, "N")], NotApplicable),
    ("kvm-tdp-mmu", &[(TDP_MMU, DENIED)], Unknown),
    ("kvm-nested", &[], Fine),
    ("kvm-nested", &[(NESTED, "Y")], Warn),
    ("kvm-nested", &[(NESTED, "Y"), (NESTED_RUN, "12")], Fine),
    ("kvm-nested", &[(NESTED, "Y"), (NESTED_RUN, ABSENT)], Unknown),
    ("kvm-nested", &[(NESTED, DENIED)], Unknown),
    ("kvm-nested", &[(NESTED, ABSENT)], NotApplicable),
];

/// A machine with four virtual CPUs on any CPU.
fn machine() -> VmFacts {
    vm(500, "qemu-system-x86_64 -accel kvm -smp 4", &["0-7", "0-7", "0-7", "0-7"])
}

#[test]
pub(super) fn parameters_of_kvm_have_their_verdicts() {
    check_cases(CASES, &[machine()]);
}

#[test]
fn polls_that_are_short_or_long_in_any_case_are_judged_without_machines() {
    let verdict = |halt_poll_ns| {
        let mut facts = host_with(&[(HALT_POLL, halt_poll_ns)], vec![machine()]);
        facts.settings.vms[0].threads = Err(Absent::Denied);
        finding(&facts, "kvm-halt-poll").verdict
    };
    assert_eq!(["50000", "50001", "200000", "200001"].map(verdict), [Fine, Unknown, Unknown, Warn]);
}

#[test]
fn nested_virtualization_without_machines_is_not_judged() {
    assert_eq!(finding(&host_with(&[(NESTED, "Y")], vec![]), "kvm-nested").verdict, NotApplicable);
}

#[test]
fn amd_has_parameters_of_its_own() {
    let amd = |changes: &[(&str, &str)]| {
        let mut facts = host_with(&[(CPUINFO, "flags : npt pausefilter x2avic")], vec![machine()]);
        facts.settings.files.retain(|path, _| !path.starts_with(INTEL));
        let parameters = [
            ("npt", "Y"),
            ("avic", "Y"),
            ("nested", "0"),
            ("pause_filter_count", "3000"),
            ("pause_filter_thresh", "128"),
            ("pause_filter_count_grow", "2"),
            ("pause_filter_count_shrink", "0"),
        ];
        for (parameter, value) in parameters {
            put(&mut facts.settings, &format!("{AMD}/{parameter}"), value);
        }
        changes.iter().for_each(|(path, value)| put(&mut facts.settings, path, value));
        facts.settings.directories = directories(&facts.settings, &[]);
        facts
    };
    let verdicts =
        |changes| ["kvm-ept", "kvm-ple", "kvm-apicv", "kvm-nested"].map(|rule| finding(&amd(changes), rule).verdict);
    assert_eq!(verdicts(&[]), [Fine; 4]);
    let off = [(NPT, "0"), ("sys/module/kvm_amd/parameters/avic", "N"), ("sys/module/kvm_amd/parameters/nested", "1")];
    assert_eq!(verdicts(&off), [Fail, Fine, Warn, Warn]);
    let emulated = [("sys/module/kvm_amd/parameters/pause_filter_count", "0"), (CPUINFO, "flags : npt")];
    assert_eq!(verdicts(&emulated), [Fine, NotApplicable, Fine, Fine]);
}

#[test]
fn other_backends_and_hosts_without_kvm_are_not_judged() {
    for modules in [&["kvm", "kvm_pvm"][..], &["ext4"]] {
        let mut facts = host_with(&[], vec![machine()]);
        facts.settings.files.retain(|path, _| !path.starts_with(INTEL) && !path.starts_with(KVM));
        facts.settings.directories = directories(&facts.settings, modules);
        for summary in rule_summaries().iter().filter(|summary| summary.topic == Topic::Kvm) {
            let found = finding(&facts, summary.id);
            assert_eq!(found.verdict, NotApplicable, "{found:?}");
            assert_eq!(found.title.contains("kvm_pvm"), modules.contains(&"kvm_pvm"), "{found:?}");
        }
    }
}

#[test]
fn parameters_that_cannot_be_written_need_a_reload() {
    let change = |path, value| finding(&host_with(&[(path, value)], vec![machine()]), "kvm-halt-poll").changes;
    let write = SettingChange::Write { path: HALT_POLL.to_owned(), value: "200000".to_owned() };
    assert_eq!(change(HALT_POLL, "400000"), [write]);
    let mut facts = host_with(&[(HALT_POLL, "400000")], vec![machine()]);
    facts.settings.files.get_mut(HALT_POLL).unwrap().mode = Ok(0o444);
    let reload = SettingChange::ModuleParameter {
        module: "kvm".to_owned(),
        parameter: "halt_poll_ns".to_owned(),
        value: "200000".to_owned(),
    };
    assert_eq!(finding(&facts, "kvm-halt-poll").changes, std::slice::from_ref(&reload));
    facts.settings.files.get_mut(HALT_POLL).unwrap().mode = Err(Absent::NotOnThisKernel);
    assert_eq!(finding(&facts, "kvm-halt-poll").changes, [reload], "an unknown mode counts as not writable");
}

#[test]
fn value_that_the_kernel_does_not_take_back_is_not_written() {
    let with = |value| finding(&host_with(&[(MULTIHIT, "KVM: Vulnerable"), (NX, value)], vec![]), "kvm-nx-huge-pages");
    assert_eq!(with("N").changes.len(), 1);
    let never = with("never");
    assert_eq!((never.verdict, never.changes.len()), (Fail, 0));
    assert!(never.remedy[0].contains("modprobe.d"), "{never:?}");
}

#[test]
fn recommendation_of_2015_to_turn_ept_off_is_cited_as_withdrawn() {
    let found = finding(&host_with(&[(EPT, "N")], vec![]), "kvm-ept");
    let citation = found.details.citation;
    for post in ["2015/08/ept-and-ksm-for-high-throughput.html", "2015/09/ept-huge-pages-and-benchmarking.html"] {
        assert!(citation.contains(&format!("openstack-in-production.blogspot.com/{post}")), "{citation}");
    }
    assert!(citation.contains("withdrawn by \"EPT, Huge Pages and Benchmarking\", September 2015"), "{citation}");
    let parameter = |value: &str| SettingChange::ModuleParameter {
        module: "kvm_intel".to_owned(),
        parameter: "ept".to_owned(),
        value: value.to_owned(),
    };
    assert_eq!(found.changes, [parameter("1")]);
    assert!(found.verify.unwrap().contains("-e 1 -e Y"), "the kernel shows Y");
}
