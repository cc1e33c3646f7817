//! CPUs, memory, the scheduler and devices of the host.

use super::*;

const CLOCK: &str = "sys/devices/system/clocksource/clocksource0/current_clocksource";
const CLOCKS: &str = "sys/devices/system/clocksource/clocksource0/available_clocksource";
const GOVERNOR: &str = "sys/devices/system/cpu/cpufreq/policy0/scaling_governor";
const GOVERNORS: &str = "sys/devices/system/cpu/cpufreq/policy0/scaling_available_governors";
const LATENCY: &str = "sys/devices/system/cpu/cpu0/cpuidle/state1/latency";
const DISABLE: &str = "sys/devices/system/cpu/cpu0/cpuidle/state1/disable";
const SMT: &str = "sys/devices/system/cpu/smt/control";
const MDS: &str = "sys/devices/system/cpu/vulnerabilities/mds";
const L1TF: &str = "sys/devices/system/cpu/vulnerabilities/l1tf";
const CPUINFO: &str = "proc/cpuinfo";
const CMDLINE: &str = "proc/cmdline";
const BALANCING: &str = "proc/sys/kernel/numa_balancing";
const ZONE_RECLAIM: &str = "proc/sys/vm/zone_reclaim_mode";
const THP: &str = "sys/kernel/mm/transparent_hugepage/enabled";
const SHMEM: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";
const POOL0: &str = "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages";
const POOL1: &str = "sys/devices/system/node/node1/hugepages/hugepages-2048kB/nr_hugepages";
const NODE1_CPUS: &str = "sys/devices/system/node/node1/cpulist";
const AUTOGROUP: &str = "proc/sys/kernel/sched_autogroup_enabled";
const ONLINE: &str = "sys/devices/system/cpu/online";
const SLICE: &str = "sys/kernel/debug/sched/base_slice_ns";
const PREEMPT: &str = "sys/kernel/debug/sched/preempt";
const ISOLATED: &str = "sys/devices/system/cpu/isolated";
const TICKLESS: &str = "sys/devices/system/cpu/nohz_full";
const SYSCTL: &str = "etc/sysctl.d/kvm.conf";
const ACTIVE: &str = "etc/tuned/active_profile";
const PROFILE: &str = "usr/lib/tuned/x/tuned.conf";
const IRQ: &str = "proc/irq/33/effective_affinity_list";
const SCHEDULER: &str = "sys/block/nvme0n1/queue/scheduler";
const IO_URING: &str = "proc/sys/kernel/io_uring_disabled";
const VIRTUAL: &str = "flags : tsc hypervisor";

const CPU_CASES: &[Case] = &[
    ("host-clocksource", &[], Fine),
    ("host-clocksource", &[(CLOCK, "hpet")], Warn),
    ("host-clocksource", &[(CLOCK, "hpet"), (CLOCKS, "hpet acpi_pm")], Warn),
    ("host-clocksource", &[(CLOCK, "kvm-clock"), (CPUINFO, VIRTUAL)], NotApplicable),
    ("host-clocksource", &[(CLOCK, "arch_sys_counter"), (CPUINFO, "Features : fp")], NotApplicable),
    ("host-clocksource", &[(CLOCK, DENIED)], Unknown),
    ("cpu-governor", &[], Fine),
    ("cpu-governor", &[(GOVERNOR, "powersave")], Fine),
    ("cpu-governor", &[(GOVERNOR, "schedutil"), (GOVERNORS, "performance schedutil")], Warn),
    ("cpu-governor", &[(GOVERNOR, "powersave"), (GOVERNORS, "ondemand performance powersave")], Warn),
    ("cpu-governor", &[(GOVERNOR, DENIED)], Unknown),
    ("cpu-governor", &[(GOVERNOR, ABSENT)], NotApplicable),
    ("cpu-idle-states", &[], Fine),
    ("cpu-idle-states", &[(LATENCY, "890")], Warn),
    ("cpu-idle-states", &[(LATENCY, "890"), (DISABLE, "1")], Fine),
    ("cpu-idle-states", &[(CPUINFO, VIRTUAL), (LATENCY, "890")], NotApplicable),
    ("cpu-idle-states", &[(LATENCY, DENIED)], Unknown),
    ("smt-control", &[], Fine),
    ("smt-control", &[(SMT, "on")], Fine),
    ("smt-control", &[(SMT, "on"), (MDS, "Mitigation: Clear CPU buffers; SMT vulnerable")], Warn),
    (
        "smt-control",
        &[(SMT, "on"), (L1TF, "Mitigation: PTE Inversion; VMX: conditional cache flushes, SMT vulnerable")],
        Warn,
    ),
    ("smt-control", &[(SMT, "on"), (MDS, ABSENT), (L1TF, "Mitigation: PTE Inversion; VMX: vulnerable")], Warn),
    ("smt-control", &[(SMT, "on"), (L1TF, "Mitigation: PTE Inversion; VMX: EPT disabled")], Fine),
    ("smt-control", &[(SMT, "on"), (MDS, ABSENT), (L1TF, ABSENT)], NotApplicable),
    ("smt-control", &[(SMT, ABSENT)], NotApplicable),
    ("smt-control", &[(SMT, "on"), (MDS, DENIED)], Unknown),
    ("cpu-mitigations", &[], Fine),
    ("cpu-mitigations", &[(CMDLINE, "quiet mitigations=auto,nosmt")], Fine),
    ("cpu-mitigations", &[(CMDLINE, "quiet mitigations=off")], Warn),
    ("cpu-mitigations", &[(CMDLINE, "mitigations=auto,no_guest_host,no_guest_guest")], Warn),
    ("cpu-mitigations", &[(CMDLINE, "mitigations=auto,nosmt,no_guest_guest")], Warn),
    ("cpu-mitigations", &[(CMDLINE, "mitigations=off mitigations=auto,no_user_user")], Fine),
    ("cpu-mitigations", &[(CMDLINE, DENIED)], Unknown),
    ("cpu-mitigations", &[(CMDLINE, ABSENT)], NotApplicable),
];

const MEMORY_CASES: &[Case] = &[
    ("numa-balancing", &[], Fine),
    ("numa-balancing", &[(BALANCING, "0")], Warn),
    ("numa-balancing", &[(BALANCING, ABSENT)], NotApplicable),
    ("numa-balancing", &[(BALANCING, DENIED)], Unknown),
    ("numa-balancing", &[(NODE1_CPUS, ABSENT)], NotApplicable),
    ("zone-reclaim", &[], Fine),
    ("zone-reclaim", &[(ZONE_RECLAIM, "1")], Warn),
    ("zone-reclaim", &[(ZONE_RECLAIM, DENIED)], Unknown),
    ("zone-reclaim", &[(ZONE_RECLAIM, ABSENT)], NotApplicable),
    ("thp-guest-ram", &[], Fine),
    ("thp-guest-ram", &[(THP, "always madvise [never]")], Warn),
    ("thp-guest-ram", &[(THP, "never")], Unknown),
    ("thp-guest-ram", &[(THP, ABSENT)], NotApplicable),
    ("thp-shared-memory", &[], Fine),
    ("thp-shared-memory", &[(SHMEM, "always within_size advise [never] deny force")], Warn),
    ("thp-shared-memory", &[(SHMEM, DENIED)], Unknown),
    ("thp-shared-memory", &[(SHMEM, ABSENT)], NotApplicable),
    ("hugetlb-per-node", &[], NotApplicable),
    ("hugetlb-per-node", &[(POOL0, "512"), (POOL1, "512")], Fine),
    ("hugetlb-per-node", &[(POOL0, "512")], Warn),
    ("hugetlb-per-node", &[(POOL0, DENIED)], Unknown),
];

const SCHEDULING_CASES: &[Case] = &[
    ("dead-scheduler-knobs", &[], Fine),
    ("dead-scheduler-knobs", &[(SYSCTL, "# x\nkernel.sched_autogroup_enabled = 0")], Fine),
    ("dead-scheduler-knobs", &[(SYSCTL, "kernel.sched_min_granularity_ns=10000000")], Warn),
    ("dead-scheduler-knobs", &[(SYSCTL, "-kernel/sched_wakeup_granularity_ns = 1")], Warn),
    ("dead-scheduler-knobs", &[(SYSCTL, DENIED)], Unknown),
    ("dead-scheduler-knobs", &[(ACTIVE, "x"), (PROFILE, "[sysctl]\nkernel.sched_min_granularity_ns = 1")], Warn),
    ("dead-scheduler-knobs", &[(ACTIVE, "y"), (PROFILE, "[sysctl]\nkernel.sched_min_granularity_ns = 1")], Fine),
    ("dead-scheduler-knobs", &[(ACTIVE, "x"), (PROFILE, "[scheduler]\nsched_wakeup_granularity_ns=1")], Warn),
    (
        "dead-scheduler-knobs",
        &[(ACTIVE, "x"), (PROFILE, "[scheduler]\nsched_base_slice_ns=1\ngroup.a=0:f:2:*:a")],
        Fine,
    ),
    ("dead-scheduler-knobs", &[(ACTIVE, "x"), (PROFILE, DENIED)], Unknown),
    ("sched-autogroup", &[], Fine),
    ("sched-autogroup", &[(AUTOGROUP, "1")], Warn),
    ("sched-autogroup", &[(AUTOGROUP, DENIED)], Unknown),
    ("sched-autogroup", &[(AUTOGROUP, ABSENT)], NotApplicable),
    // Three virtual CPUs; the default of two CPUs is 1.4 ms.
    ("sched-base-slice", &[], Fine),
    ("sched-base-slice", &[(SLICE, "700000")], Fine),
    ("sched-base-slice", &[(ONLINE, "0-1"), (SLICE, "1400000")], Fine),
    ("sched-base-slice", &[(ONLINE, "0-1"), (SLICE, "1399999")], Warn),
    ("sched-base-slice", &[(SLICE, DENIED)], Unknown),
    ("sched-base-slice", &[(SLICE, ABSENT)], NotApplicable),
    ("preemption-model", &[], Fine),
    ("preemption-model", &[(PREEMPT, "(full) lazy")], Fine),
    ("preemption-model", &[(ONLINE, "0-1"), (PREEMPT, "full (lazy)")], Fine),
    ("preemption-model", &[(ONLINE, "0-1"), (PREEMPT, "none voluntary (full)")], Warn),
    ("preemption-model", &[(ONLINE, "0-1"), (PREEMPT, "(full)")], NotApplicable),
    ("preemption-model", &[(PREEMPT, "full lazy")], Unknown),
    ("preemption-model", &[(PREEMPT, DENIED)], Unknown),
    ("preemption-model", &[(PREEMPT, ABSENT)], NotApplicable),
    ("isolated-cpus", &[], NotApplicable),
    ("isolated-cpus", &[(ISOLATED, "2"), (TICKLESS, "2")], Fine),
    ("isolated-cpus", &[(TICKLESS, "(null)"), (ISOLATED, "2-3")], Warn),
    ("isolated-cpus", &[(ISOLATED, DENIED)], Unknown),
    ("irq-affinity", &[(IRQ, "0")], Fine),
    ("irq-affinity", &[(IRQ, "2")], Warn),
    ("irq-affinity", &[(IRQ, DENIED)], Unknown),
];

const DEVICE_CASES: &[Case] = &[
    ("nvme-scheduler", &[], Fine),
    ("nvme-scheduler", &[(SCHEDULER, "none [mq-deadline] kyber")], Warn),
    ("nvme-scheduler", &[(SCHEDULER, "none")], Fine),
    ("nvme-scheduler", &[(SCHEDULER, DENIED)], Unknown),
    ("nvme-scheduler", &[(SCHEDULER, ABSENT)], NotApplicable),
    ("io-uring", &[], Fine),
    ("io-uring", &[(IO_URING, "1")], Warn),
    ("io-uring", &[(IO_URING, "2")], Warn),
    ("io-uring", &[(IO_URING, DENIED)], Unknown),
    ("io-uring", &[(IO_URING, ABSENT)], NotApplicable),
];

/// Two machines: one is bound to CPU 2 and shares its memory, and one runs anywhere and uses io_uring.
fn machines() -> Vec<VmFacts> {
    let shared = "qemu-system-x86_64 -object memory-backend-memfd,id=ram,share=on,size=1G";
    let drive = "qemu-system-x86_64 -drive file=/dev/vg/a,id=d,if=virtio,aio=io_uring";
    vec![vm(100, shared, &["2"]), vm(501, drive, &["0-7", "0-7"])]
}

/// Checks the tables of this file.
pub(super) fn settings_of_the_host_have_their_verdicts() {
    settings_of_cpus_have_their_verdicts();
    settings_of_memory_have_their_verdicts();
    settings_of_scheduling_have_their_verdicts();
    settings_of_devices_have_their_verdicts();
    vhost_workers_belong_on_the_nodes_of_the_machine();
    devices_belong_on_the_node_of_the_machine();
}

#[test]
fn settings_of_cpus_have_their_verdicts() {
    check_cases(CPU_CASES, &machines());
}

#[test]
fn settings_of_memory_have_their_verdicts() {
    check_cases(MEMORY_CASES, &machines());
}

#[test]
fn settings_of_scheduling_have_their_verdicts() {
    // The first machine is process 100 of the facts, in the root cgroup.
    for (rule, changes, verdict) in SCHEDULING_CASES {
        let mut facts = host_with(changes, machines());
        facts.processes[0].process.cgroup = Ok("/".to_owned());
        let found = finding(&facts, rule);
        assert_eq!(found.verdict, *verdict, "{rule} with {changes:?}: {found:?}");
        note_tested(rule, *verdict);
    }
}

#[test]
fn settings_of_devices_have_their_verdicts() {
    check_cases(DEVICE_CASES, &machines());
}

#[test]
fn machines_in_cgroups_are_not_affected_by_autogroups() {
    assert_eq!(finding(&host_with(&[(AUTOGROUP, "1")], machines()), "sched-autogroup").verdict, Fine);
    assert_eq!(finding(&host_with(&[(AUTOGROUP, "1")], vec![]), "sched-autogroup").verdict, NotApplicable);
    let mut facts = host_with(&[(AUTOGROUP, "1")], machines());
    facts.processes[0].process.cgroup = Err(Absent::Denied);
    assert_eq!(finding(&facts, "sched-autogroup").verdict, Unknown);
}

#[test]
fn balancing_depends_on_whether_machines_are_placed() {
    let judge = |mode, vms: Vec<VmFacts>| finding(&host_with(&[(BALANCING, mode)], vms), "numa-balancing");
    let verdicts = |vms: Vec<VmFacts>| [judge("1", vms.clone()).verdict, judge("0", vms).verdict];
    let write = |value: &str| SettingChange::Write { path: BALANCING.to_owned(), value: value.to_owned() };
    let bound = |memory: &[(u32, u64)]| {
        let machine = vm(500, "qemu-system-x86_64", &["0-3", "0"]);
        vec![VmFacts { node_memory: memory_on(memory), ..machine }]
    };
    assert_eq!(verdicts(bound(&[(0, 1024)])), [Warn, Fine]);
    assert_eq!(judge("1", bound(&[(0, 1024)])).changes, [write("0")]);
    assert_eq!(verdicts(bound(&[(0, 980), (1, 20)])), [Warn, Fine], "2 % is negligible");
    // Bound, and its memory is elsewhere: balancing is of use.
    assert_eq!(verdicts(bound(&[(0, 979), (1, 21)])), [Fine, Warn]);
    let off = judge("0", bound(&[(0, 500), (1, 500)]));
    assert_eq!((off.changes.as_slice(), off.remedy[1].as_str()), ([write("1")].as_slice(), "pagefold numa plan"));
    assert!(off.value.contains("vm500 on 0 with memory on node 0: 500 MiB, node 1: 500 MiB"), "{off:?}");
    let on = judge("1", bound(&[(1, 1000)]));
    assert!(on.title.contains("not placed yet") && on.changes.is_empty(), "{on:?}");
    // One of two machines is not placed.
    let mixed = [bound(&[(0, 1)]), vec![vm(600, "qemu-system-x86_64", &["4-7"])]].concat();
    assert_eq!(verdicts(mixed), [Fine, Warn]);
    assert_eq!(verdicts(vec![]), [NotApplicable; 2]);
    let mut unreadable = bound(&[(0, 1)]);
    unreadable[0].node_memory = Some(Err(Absent::NotOnThisKernel));
    assert_eq!(verdicts(unreadable), [Unknown; 2], "a recording without numa_maps");
    let mut unreadable = bound(&[(0, 1)]);
    unreadable[0].threads = Err(Absent::Denied);
    assert_eq!(verdicts(unreadable), [Unknown; 2]);
}

#[test]
fn balancing_is_not_asked_to_move_memory_that_may_be_merged() {
    // 1000 MiB, of which 200 MiB are merged: what is not merged is placed if at most 16 MiB of it are remote.
    const MERGED_PAGES: u64 = 51_200;
    let judge = |mode, remote: u64, merged_pages: Reading<u64>| {
        let machine = vm(500, "qemu-system-x86_64", &["0-3", "0"]);
        let node_memory = memory_on(&[(0, 1000 - remote), (1, remote)]);
        let facts = host_with(&[(BALANCING, mode)], vec![VmFacts { node_memory, merged_pages, ..machine }]);
        finding(&facts, "numa-balancing")
    };
    let verdicts = |remote| ["1", "0"].map(|mode| judge(mode, remote, Ok(MERGED_PAGES)).verdict);
    assert_eq!(verdicts(16), [Warn, Fine], "placed wherever the merged pages are");
    assert_eq!(verdicts(216), [Fine, Fine]);
    assert_eq!(verdicts(217), [Fine, Warn], "remote memory wherever the merged pages are");
    let undecided = judge("0", 17, Ok(MERGED_PAGES));
    assert!(undecided.verdict == Fine && undecided.changes.is_empty(), "{undecided:?}");
    assert!(undecided.title.contains("pagefold numa verify"), "{undecided:?}");
    assert!(undecided.value.ends_with("node 1: 17.0 MiB, of which up to 200 MiB is merged"), "{undecided:?}");
    assert_eq!(judge("0", 17, Ok(0)).verdict, Fine);
    assert_eq!(judge("0", 21, Ok(0)).verdict, Warn);
    // A kernel that counts merged pages for the host alone: there are 260,000.
    assert_eq!(judge("0", 500, Err(Absent::NotOnThisKernel)).verdict, Fine);
    assert_eq!(judge("0", 1000, Err(Absent::NotOnThisKernel)).verdict, Fine);
    assert_eq!(judge("0", 500, Err(Absent::Denied)).verdict, Unknown);
}

#[test]
fn kernel_without_merged_pages_for_each_process_limits_them_by_those_of_the_host() {
    let machine = vm(500, "qemu-system-x86_64", &["0-3", "0"]);
    let node_memory = memory_on(&[(0, 500), (1, 500)]);
    let merged_pages = Err(Absent::NotOnThisKernel);
    let mut facts = host_with(&[(BALANCING, "0")], vec![VmFacts { node_memory, merged_pages, ..machine }]);
    let mut verdict = |ksm| {
        facts.ksm = ksm;
        finding(&facts, "numa-balancing").verdict
    };
    let merged_on_host = |pages_sharing: Reading<u64>| {
        let ksm = healthy().ksm.unwrap();
        Ok(pagefold_base::ksm::Ksm { pages_shared: Ok(100), pages_sharing, ..ksm })
    };
    assert_eq!(verdict(Err(Absent::NotOnThisKernel)), Warn);
    assert_eq!(verdict(merged_on_host(Ok(900))), Warn);
    assert_eq!(verdict(merged_on_host(Ok(200_000))), Fine);
    assert_eq!(verdict(merged_on_host(Err(Absent::Denied))), Unknown);
    assert_eq!(verdict(Err(Absent::Denied)), Unknown);
}

#[test]
fn balancing_is_of_use_to_machines_over_several_nodes_without_bound_virtual_nodes() {
    let verdicts = |options: &str, vcpus: &[&str]| {
        let machine = VmFacts {
            node_memory: memory_on(&[(0, 500), (1, 500)]),
            ..vm(500, &format!("qemu-system-x86_64 {options}"), vcpus)
        };
        let judge = |mode| finding(&host_with(&[(BALANCING, mode)], vec![machine.clone()]), "numa-balancing").verdict;
        [judge("1"), judge("0")]
    };
    let virtual_nodes = |first: u32, second: u32, policy: &str| {
        format!(
            "-object memory-backend-ram,id=a,size=500M,policy={policy},host-nodes={first} -numa node,cpus=0,memdev=a \
             -object memory-backend-ram,id=b,size=500M,policy={policy},host-nodes={second} -numa node,cpus=1,memdev=b"
        )
    };
    let (local, crosswise) = (["0-3", "4-7"], ["4-7", "0-3"]);
    assert_eq!(verdicts(&virtual_nodes(0, 1, "bind"), &local), [Warn, Fine]);
    assert_eq!(verdicts(&virtual_nodes(0, 1, "bind"), &crosswise), [Fine, Warn], "all accesses are remote");
    assert_eq!(verdicts(&virtual_nodes(0, 1, "preferred"), &local), [Fine, Fine], "only page tables tell");
    assert_eq!(verdicts("", &local), [Fine, Warn], "each virtual CPU reads memory of both nodes");
}

#[test]
fn virtual_cpus_on_several_isolated_cpus_are_found() {
    let spread = vec![vm(500, "qemu-system-x86_64", &["2-3", "2-3"])];
    let found = finding(&host_with(&[(ISOLATED, "2-3")], spread), "isolated-cpus");
    assert!(found.verdict == Warn && found.title.contains("2 virtual CPUs"), "{found:?}");
    assert_eq!(finding(&host_with(&[(ISOLATED, "2-3")], vec![]), "isolated-cpus").verdict, NotApplicable);
}

#[test]
fn interrupts_matter_only_to_virtual_cpus_with_a_cpu_of_their_own() {
    let verdict = |vms| finding(&host_with(&[(IRQ, "2")], vms), "irq-affinity").verdict;
    assert_eq!(verdict(vec![]), NotApplicable);
    assert_eq!(verdict(vec![vm(500, "qemu-system-x86_64", &["0-3"])]), NotApplicable);
}

#[test]
fn interrupts_move_to_the_cpus_that_are_left() {
    let judge = |online, cpus: &[&str]| {
        let facts = host_with(&[(ONLINE, online), (IRQ, "1")], vec![vm(500, "qemu-system-x86_64", cpus)]);
        finding(&facts, "irq-affinity")
    };
    let found = judge("0-3", &["0", "1"]);
    assert!(found.verdict == Warn && found.remedy[0].contains("write 2-3 to /proc/irq"), "{found:?}");
    let found = judge("0-1", &["0", "1"]);
    assert!(found.verdict == Warn && found.title.contains("no other CPU is left"), "{found:?}");
    assert!(found.remedy.iter().all(|line| !line.contains("smp_affinity_list")), "{found:?}");
}

#[test]
fn texts_about_mitigations_name_each_weak_option() {
    let found = finding(&host_with(&[(CMDLINE, "mitigations=auto,no_guest_host")], vec![]), "cpu-mitigations");
    for option in ["off", "no_guest_host", "no_guest_guest"] {
        assert!(found.why.contains(option) && found.expected.contains(option), "{found:?}");
    }
}

#[test]
fn hardware_threads_matter_only_to_several_machines() {
    let affected = [(SMT, "on"), (MDS, "Vulnerable; SMT vulnerable")];
    let mut facts = host_with(&affected, machines()[..1].to_vec());
    assert_eq!(finding(&facts, "smt-control").verdict, Fine);
    facts.processes[0].process.arguments = Err(Absent::Denied);
    assert_eq!(finding(&facts, "smt-control").verdict, Unknown, "it may run another machine");
}

#[test]
fn machines_that_may_be_hidden_leave_no_rule_about_machines_content() {
    let settings = [
        (AUTOGROUP, "1"),
        (IO_URING, "2"),
        (ISOLATED, "2"),
        (PREEMPT, "none voluntary (full)"),
        (SLICE, "700000"),
        ("sys/module/kvm_intel/parameters/nested", "Y"),
        ("sys/module/kvm_intel/parameters/ple_gap", "0"),
    ];
    let mut facts = host_with(&settings, vec![]);
    let verdicts = |facts: &HostFacts| {
        let rules = [
            "io-uring",
            "irq-affinity",
            "isolated-cpus",
            "kvm-halt-poll",
            "kvm-nested",
            "kvm-ple",
            "numa-balancing",
            "preemption-model",
            "sched-autogroup",
            "sched-base-slice",
            "thp-shared-memory",
        ];
        rules.map(|rule| finding(facts, rule).verdict)
    };
    assert!(verdicts(&facts).iter().all(|verdict| matches!(verdict, Fine | NotApplicable)), "{:?}", verdicts(&facts));
    facts.processes[0].process.arguments = Err(Absent::Denied);
    assert_eq!(verdicts(&facts), [Unknown; 11]);
}

#[test]
fn idle_states_need_the_names_of_cpus() {
    let mut facts = host_with(&[(LATENCY, "890")], vec![]);
    facts.settings.directories.retain(|directory, _| !directory.ends_with("/cpuidle"));
    facts.settings.directories.insert("sys/devices/system/cpu".to_owned(), Err(Absent::Denied));
    assert_eq!(finding(&facts, "cpu-idle-states").verdict, Unknown);
}

#[test]
fn settings_for_machines_need_their_definitions() {
    let mut vms = machines();
    vms[1].definition = Some(Err(Absent::Denied));
    for rule in ["thp-shared-memory", "io-uring"] {
        assert_eq!(finding(&host_with(&[], vms.clone()), rule).verdict, Unknown, "{rule}");
    }
    vms[1].definition = None;
    assert_eq!(finding(&host_with(&[(IO_URING, "2")], vms), "io-uring").verdict, Fine, "Firecracker");
    assert_eq!(finding(&host_with(&[], vec![]), "thp-shared-memory").verdict, NotApplicable);
}

#[test]
fn io_uring_is_allowed_only_on_request() {
    for mode in ["1", "2"] {
        let finding = finding(&host_with(&[(IO_URING, mode)], machines()), "io-uring");
        assert!(finding.on_request && finding.changes.len() == 1, "{finding:?}");
        assert!(finding.remedy.iter().any(|line| line.contains("io_uring_group")), "{finding:?}");
    }
}

#[test]
fn all_policies_and_states_are_changed() {
    let governors = [
        (GOVERNOR, "schedutil"),
        (GOVERNORS, "performance schedutil"),
        ("sys/devices/system/cpu/cpufreq/policy4/scaling_governor", "ondemand"),
        ("sys/devices/system/cpu/cpufreq/policy4/scaling_available_governors", "performance ondemand"),
    ];
    assert_eq!(finding(&host_with(&governors, vec![]), "cpu-governor").changes.len(), 2);
    let deep = |cpu| {
        [("name", "C6"), ("latency", "890"), ("disable", if cpu == 5 { "1" } else { "0" })]
            .map(|(file, text)| (format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state3/{file}"), text))
    };
    // CPU 9 is offline.
    let states: Vec<(String, &str)> = [2, 4, 5, 9].into_iter().flat_map(deep).collect();
    let states: Vec<(&str, &str)> = states.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    let found = finding(&host_with(&states, vec![]), "cpu-idle-states");
    let write = |cpu| SettingChange::Write {
        path: format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state3/disable"),
        value: "1".to_owned(),
    };
    assert_eq!(found.changes, [write(2), write(4)]);
    assert_eq!(found.value, "POLL 0 us, C1 2 us, C6 890 us (disabled on 1 of 3 CPUs)");
    let boot = finding(&host_with(&[(CMDLINE, "mitigations=off")], vec![]), "cpu-mitigations").changes;
    assert_eq!(boot, [SettingChange::BootParameter { remove: Some("mitigations=off".into()), add: None }]);
}

/// State 2 of a hybrid CPU: deep on CPUs 0 and 3 to 6, not on 1 and 2; state 3 is on CPU 0 only. CPU 9 is offline.
#[test]
fn commands_for_idle_states_name_only_cpus_where_the_state_is_deep() {
    let latencies =
        [(0, 2, "250"), (1, 2, "90"), (2, 2, "90"), (3, 2, "250"), (4, 2, "250"), (5, 2, "250"), (6, 2, "250")];
    let more = [(0, 3, "890"), (9, 2, "250"), (9, 3, "890")];
    let files: Vec<(String, &str)> = latencies
        .into_iter()
        .chain(more)
        .flat_map(|(cpu, state, latency)| {
            [("name", "C"), ("latency", latency), ("disable", "0")]
                .map(|(file, text)| (format!("sys/devices/system/cpu/cpu{cpu}/cpuidle/state{state}/{file}"), text))
        })
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    let found = finding(&host_with(&files, vec![]), "cpu-idle-states");
    let file = |state: u32| format!("/sys/devices/system/cpu/cpu$cpu/cpuidle/state{state}/disable");
    let remedy = [
        format!("for cpu in 0 $(seq 3 6); do echo 1 > {}; done", file(2)),
        format!("for cpu in 0; do echo 1 > {}; done", file(3)),
    ];
    assert_eq!(found.remedy, remedy);
    let verify = format!(
        "! {{ for cpu in 0 $(seq 3 6); do grep -Lx 1 {}; done; for cpu in 0; do grep -Lx 1 {}; done; }} | grep .",
        file(2),
        file(3)
    );
    assert_eq!(found.verify, Some(verify));
    assert_eq!(found.changes.len(), 6);
}

fn with_worker(cpus: &str) -> VmFacts {
    let mut machine = vm(500, "qemu-system-x86_64 -device vfio-pci,host=3b:00.0", &["0-3", "0-1"]);
    machine.threads.as_mut().unwrap().push(vhost_worker(cpus));
    machine
}

#[test]
fn vhost_workers_belong_on_the_nodes_of_the_machine() {
    const RULE: &str = "vhost-worker-node";
    let check = |machine: VmFacts, expected| assert_verdict(&host_with(&[], vec![machine]), RULE, expected);
    check(with_worker("0-3"), Fine);
    check(with_worker("0-7"), Warn);
    check(vm(500, "qemu-system-x86_64", &["0-3"]), NotApplicable);
    let mut machine = with_worker("0-7");
    machine.threads.as_mut().unwrap()[0].allowed_cpus = "0-7".parse().unwrap();
    // Not bound to a node: its worker ran last on node 0, where its memory is.
    check(machine.clone(), Fine);
    let remote = VmFacts { node_memory: memory_on(&[(0, 10), (1, 1000)]), ..machine.clone() };
    check(remote.clone(), Warn);
    let found = finding(&host_with(&[], vec![remote]), RULE);
    assert_eq!(found.value, "1 of 1 workers ran last off the memory on the nodes 1");
    assert_eq!(found.remedy[1], "taskset -pc 4-7 510");
    check(VmFacts { node_memory: memory_on(&[(0, 500), (1, 500)]), ..machine.clone() }, Fine);
    // 100 MiB are merged.
    let merged =
        |memory: &[(u32, u64)]| VmFacts { node_memory: memory_on(memory), merged_pages: Ok(25_600), ..machine.clone() };
    check(merged(&[(0, 20), (1, 1000)]), Unknown);
    check(merged(&[(0, 18), (1, 1000)]), Warn);
    check(merged(&[(0, 500), (1, 500)]), Fine);
    check(VmFacts { node_memory: Some(Err(Absent::NotOnThisKernel)), ..machine.clone() }, Unknown);
    machine.threads = Err(Absent::Denied);
    check(machine, Unknown);
    assert_verdict(&host_with(&[(NODE1_CPUS, ABSENT)], vec![with_worker("0-7")]), RULE, NotApplicable);
}

#[test]
fn devices_belong_on_the_node_of_the_machine() {
    const DEVICE: &str = "sys/bus/pci/devices/0000:3b:00.0/numa_node";
    for (node, expected) in
        [("0", Fine), ("1", Warn), ("-1", NotApplicable), (ABSENT, NotApplicable), (DENIED, Unknown)]
    {
        assert_verdict(&host_with(&[(DEVICE, node)], vec![with_worker("0-3")]), "device-node", expected);
    }
    const CLASS: &str = "sys/bus/pci/devices/0000:3b:00.0/class";
    for (class, value) in [
        ("0x010802", "NVMe 0000:3b:00.0 on node 1, machine on 0"),
        ("0x020000", "NIC 0000:3b:00.0 on node 1, machine on 0"),
        ("0x0c0330", "0000:3b:00.0 on node 1, machine on 0"),
    ] {
        let found = finding(&host_with(&[(DEVICE, "1"), (CLASS, class)], vec![with_worker("0-3")]), "device-node");
        assert_eq!((found.verdict, found.value.as_str()), (Warn, value));
    }
    let floating = vm(500, "qemu-system-x86_64 -device vfio-pci,host=3b:00.0", &["0-7"]);
    assert_verdict(&host_with(&[(DEVICE, "1")], vec![floating.clone()]), "device-node", Warn);
    assert_verdict(&host_with(&[(DEVICE, "0")], vec![floating]), "device-node", Fine);
    let nvme = vm(500, "qemu-system-x86_64 -drive file=nvme://0000:3b:00.0/1,if=none,id=d", &["0-3"]);
    assert_verdict(&host_with(&[(DEVICE, "1")], vec![nvme]), "device-node", Warn);
    let without = host_with(&[], vec![vm(500, "qemu-system-x86_64", &["0-3"])]);
    assert_verdict(&without, "device-node", NotApplicable);
}
