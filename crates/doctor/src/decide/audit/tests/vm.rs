//! The definition and threads of virtual machines.

use super::*;
use crate::decide::audit::facts::CpuThrottling;
use crate::decide::change::{HostNode, VmOption, node_list};
use crate::test_support::parse_domain;
use pagefold_base::domain::TrustDomain;
use pagefold_base::identity::qemu_monitor::{MonitorAnswers, MonitorBackend, MonitorVcpu, VcpuSlots};
use pagefold_base::identity::vm_definition::VmDefinition;
use pagefold_base::libvirt::LibvirtDefinition;

const KVM_GUEST: &str = "qemu-system-x86_64 -accel kvm";

/// A case: a rule, the options after [`KVM_GUEST`], and the verdict.
const CASES: &[(&str, &str, Verdict)] = &[
    ("vm-cpu-model", "-cpu host", Fine),
    ("vm-cpu-model", "-cpu EPYC-Milan,+aes", Fine),
    ("vm-cpu-model", "", Warn),
    ("vm-cpu-model", "-cpu kvm64", Warn),
    ("vm-virtual-nodes", "-smp 2", Fine),
    ("vm-mergeable-memory", "-m 1G", Fine),
    ("vm-mergeable-memory", "-object memory-backend-memfd,id=m,size=1G", Warn),
    ("vm-mergeable-memory", "-mem-path /dev/hugepages", Warn),
    ("vm-mergeable-memory", "-m 1G -machine pc,mem-merge=off", NotApplicable),
    ("vm-mergeable-memory", "-object memory-backend-memfd,id=m,size=1G,merge=off", NotApplicable),
    (
        "vm-mergeable-memory",
        "-object memory-backend-memfd,id=m,size=1G -device vhost-user-fs-pci,chardev=c",
        NotApplicable,
    ),
    (
        "vm-mergeable-memory",
        "-machine q35,confidential-guest-support=c -object tdx-guest,id=c -object memory-backend-ram,id=m,size=1G",
        NotApplicable,
    ),
    ("vm-hyperv", "-m 1G", NotApplicable),
    ("vm-hyperv", "-rtc base=localtime", Warn),
    ("vm-hyperv", "-cpu host,hv-relaxed,hv-vapic,hv-spinlocks=0x1fff,hv-time", Fine),
    ("vm-hyperv", "-cpu host,hv_relaxed=on,hv_vapic=on", Warn),
    ("vm-hyperv", "-cpu host,hv-passthrough", Fine),
    ("vm-pv-features", "-cpu host", Fine),
    ("vm-pv-features", "-cpu host,kvm-pv-eoi=off", Warn),
    ("vm-pv-features", "-cpu host,-kvm_pv_unhalt", Warn),
    ("vm-dedicated-hint", "-cpu host", NotApplicable),
    ("vm-dedicated-hint", "-cpu host,kvm-hint-dedicated=on", Warn),
    ("vm-cpu-pm", "", Fine),
    ("vm-cpu-pm", "-overcommit mem-lock=off,cpu-pm=on", Warn),
    ("vm-clock", "-cpu host", Fine),
    ("vm-clock", "-cpu host,kvmclock=off", Warn),
    ("vm-clock", "-cpu host,kvmclock=off,invtsc=on", Fine),
    ("vm-clock", "-cpu host,kvmclock=off,migratable=off", Fine),
    ("vm-clock", "-rtc base=localtime", NotApplicable),
    ("vm-iothreads", "", NotApplicable),
    ("vm-iothreads", "-drive file=a,if=none,id=d -device virtio-blk-pci,drive=d", Warn),
    ("vm-iothreads", "-drive file=a,if=none,id=d -device virtio-blk-pci,drive=d,iothread=io0", Fine),
    ("vm-disk-cache", "", NotApplicable),
    ("vm-disk-cache", "-drive file=a,if=virtio", Warn),
    ("vm-disk-cache", "-drive file=a,if=virtio,cache=none", Warn),
    ("vm-disk-cache", "-drive file=a,if=virtio,cache=none,aio=native", Fine),
    ("vm-disk-cache", "-drive file=rbd:p/i,driver=rbd,if=virtio", NotApplicable),
    ("vm-vhost-net", "-netdev user,id=n -device virtio-net-pci,netdev=n", NotApplicable),
    ("vm-vhost-net", "-netdev tap,id=n -device virtio-net-pci,netdev=n", Warn),
    ("vm-vhost-net", "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n", Fine),
    ("vm-queues", "-netdev tap,id=n -device virtio-net-pci,netdev=n", NotApplicable),
    ("vm-queues", "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n", Fine),
    ("vm-queues", "-netdev tap,id=n,vhost=on,queues=4 -device virtio-net-pci,netdev=n", Warn),
    ("vm-monitor", "", NotApplicable),
    ("vm-cpu-throttled", "", Fine),
    ("vm-stacked-vcpus", "", Fine),
    ("vm-next-start", "", NotApplicable),
    ("vhost-worker-node", "", NotApplicable),
    ("vhost-worker-node", "-netdev tap,id=n,vhost=on -device virtio-net-pci,netdev=n", Unknown),
    ("vhost-worker-node", "-netdev tap,id=n,vhostfd=35 -device virtio-net-pci,netdev=n", Unknown),
    ("vhost-worker-node", "-netdev tap,id=n -device virtio-net-pci,netdev=n", NotApplicable),
    ("device-node", "", NotApplicable),
];

fn machine_with(options: &str) -> VmFacts {
    vm(500, &format!("{KVM_GUEST} {options}"), &["0-7", "0-7"])
}

fn judge(rule: &str, machine: &VmFacts) -> Finding {
    finding(&host_with(&[], vec![machine.clone()]), rule)
}

/// Checks the tables of this file.
pub(super) fn machines_have_their_verdicts() {
    definitions_have_their_verdicts();
    unknown_definitions_and_other_monitors_are_not_ok();
    wide_machines_need_virtual_nodes_that_are_bound();
    machines_without_virtual_nodes_that_span_nodes_are_named();
    dedicated_cpus_are_those_of_one_virtual_cpu();
    stacked_virtual_cpus_are_found();
    throttling_counts_from_five_percent_of_periods();
    differences_from_the_definition_of_libvirt_are_named();
    machines_with_more_memory_than_a_node_span_nodes();
    monitors_tell_what_was_plugged();
}

#[test]
fn definitions_have_their_verdicts() {
    for (rule, options, verdict) in CASES {
        let found = judge(rule, &machine_with(options));
        assert_eq!(found.verdict, *verdict, "{rule} with {options}: {found:?}");
        note_tested(rule, *verdict);
        assert_eq!(found.scope, Scope::Process(ProcessId { pid: Pid(500), start_time: 500 }));
        assert!(!found.source.contains("PID"), "{found:?}");
        assert!(*verdict < Warn || !found.remedy.is_empty(), "{found:?}");
    }
    let tested: BTreeSet<&str> = CASES.iter().map(|(rule, ..)| *rule).collect();
    let rules = rule_summaries().into_iter().filter(|summary| summary.topic == Topic::Vm);
    assert!(rules.into_iter().all(|summary| tested.contains(summary.id)));
}

#[test]
fn unknown_definitions_and_other_monitors_are_not_ok() {
    let by_definition = |rule: &&str| {
        rule.starts_with("vm-")
            && !["vm-cpu-throttled", "vm-monitor", "vm-next-start", "vm-stacked-vcpus"].contains(rule)
    };
    let rules: BTreeSet<&str> = CASES.iter().map(|(rule, ..)| *rule).filter(by_definition).collect();
    let mut machine = machine_with("-cpu host");
    machine.definition = Some(Err(Absent::Denied));
    for rule in &rules {
        assert_eq!(judge(rule, &machine).verdict, Unknown, "{rule}");
        note_tested(rule, Unknown);
    }
    machine.definition = None;
    for rule in rules {
        assert_eq!(judge(rule, &machine).verdict, NotApplicable, "{rule}");
        note_tested(rule, NotApplicable);
    }
}

#[test]
fn machines_without_kvm_have_no_features_of_kvm() {
    let machine = vm(500, "qemu-system-x86_64 -accel tcg -rtc base=localtime", &["0-7"]);
    for rule in ["vm-cpu-model", "vm-pv-features", "vm-hyperv", "vm-clock"] {
        assert_eq!(judge(rule, &machine).verdict, NotApplicable, "{rule}");
    }
}

#[test]
fn memory_of_machines_matters_only_while_ksm_is_on() {
    let mut facts = host_with(&[], vec![machine_with("-mem-path /dev/hugepages")]);
    facts.ksm.as_mut().unwrap().run = Ok(0);
    assert_eq!(finding(&facts, "vm-mergeable-memory").verdict, NotApplicable);
    facts.ksm.as_mut().unwrap().run = Err(Absent::Denied);
    assert_eq!(finding(&facts, "vm-mergeable-memory").verdict, Unknown);
    facts.ksm = Err(Absent::NotOnThisKernel);
    assert_eq!(finding(&facts, "vm-mergeable-memory").verdict, NotApplicable);
}

#[test]
fn memory_becomes_mergeable_only_within_a_trust_domain_and_never_from_the_pool() {
    const RULE: &str = "vm-mergeable-memory";
    let host = |options: &str| host_with(&[], vec![machine_with(options)]);
    let shared = "-object memory-backend-memfd,id=m,size=1G";
    assert_eq!(finding(&host(shared), RULE).changes.len(), 1);
    let mut mixed = host(shared);
    mixed.processes[1].domain = TrustDomain::User(1001);
    let found = finding(&mixed, RULE);
    assert!(found.changes.is_empty() && found.remedy[0].contains("2 trust domains"), "{found:?}");
    // Its own domain is none of those that are enrolled.
    let mut foreign = host(shared);
    let mut machine = foreign.processes[0].clone();
    machine.process.id = foreign.settings.vms[0].process;
    machine.domain = TrustDomain::User(1002);
    machine.process.ksm.merge_any = Ok(false);
    machine.process.ksm.mergeable = Ok(false);
    machine.regions = Ok(Vec::new());
    foreign.processes.push(machine);
    let found = finding(&foreign, RULE);
    assert!(found.changes.is_empty() && found.remedy[0].contains("2 trust domains"), "{found:?}");
    let mut unreadable = host(shared);
    unreadable.processes[1].regions = Err(Absent::Denied);
    unreadable.processes[1].process.ksm.mergeable = Err(Absent::Denied);
    unreadable.processes[1].process.ksm.merge_any = Err(Absent::Denied);
    let found = finding(&unreadable, RULE);
    assert!(found.changes.is_empty() && found.remedy[0].contains("is not known"), "{found:?}");
    for options in [
        "-mem-path /dev/hugepages",
        "-object memory-backend-memfd,id=m,hugetlb=on",
        "-object memory-backend-file,id=m,mem-path=/dev/hugepages",
    ] {
        let found = finding(&host(options), RULE);
        assert!(found.changes.is_empty() && found.remedy[0].contains("huge pages of the pool"), "{found:?}");
    }
    let forbidden = finding(&host("-m 1G -machine pc,mem-merge=off"), RULE);
    assert_eq!((&*forbidden.title, &*forbidden.value), ("its owner forbids merging", "mem-merge=off"));
}

#[test]
fn wide_machines_need_virtual_nodes_that_are_bound() {
    let cpus = ["0-7"; 6];
    let judge = |options: &str| {
        let machine = vm(500, &format!("{KVM_GUEST} -smp 6 {options}"), &cpus);
        finding(&host_with(&[], vec![machine]), "vm-virtual-nodes")
    };
    let found = judge("");
    assert_verdict(&host_with(&[], vec![vm(500, &format!("{KVM_GUEST} -smp 6"), &cpus)]), "vm-virtual-nodes", Warn);
    let node = |id: u32, cpus: &str| HostNode { id, cpus: cpus.parse().unwrap() };
    assert_eq!(option_of(&found), VmOption::VirtualNodes { host_nodes: vec![node(0, "0-3"), node(1, "4-7")] });
    let seven = vm(500, &format!("{KVM_GUEST} -smp 7"), &["0-7"; 7]);
    let unequal = finding(&host_with(&[], vec![seven]), "vm-virtual-nodes");
    assert!(unequal.verdict == Warn && unequal.changes.is_empty() && !unequal.remedy.is_empty(), "{unequal:?}");
    let nodes = "-numa node,cpus=0-2,memdev=a -numa node,cpus=3-5,memdev=b";
    let backend = |id: &str, more: &str| format!(" -object memory-backend-ram,id={id},size=1G{more}");
    assert_eq!(judge(&[nodes, &backend("a", ""), &backend("b", "")].concat()).verdict, Warn, "not bound");
    let bound = |id, node: u32| backend(id, &format!(",policy=bind,host-nodes={node}"));
    assert_eq!(judge(&[nodes, &bound("a", 0), &bound("b", 1)].concat()).verdict, Fine);
    let together = judge(&[nodes, &bound("a", 0), &bound("b", 0)].concat());
    assert!(together.verdict == Warn && together.value.starts_with("virtual nodes 0-1 are all on"), "{together:?}");
    let one_node = host_with(&[("sys/devices/system/node/node1/cpulist", ABSENT)], vec![vm(500, KVM_GUEST, &cpus)]);
    assert_eq!(finding(&one_node, "vm-virtual-nodes").verdict, NotApplicable);
    let unreadable = host_with(&[("sys/devices/system/node/node1/cpulist", DENIED)], vec![vm(500, KVM_GUEST, &cpus)]);
    assert_eq!(finding(&unreadable, "vm-virtual-nodes").verdict, Unknown);
}

/// Four nodes of four CPUs and 64 GiB.
const FOUR_NODES: &[(&str, &str)] = &[
    ("sys/devices/system/cpu/online", "0-15"),
    ("sys/devices/system/node/node2/cpulist", "8-11"),
    ("sys/devices/system/node/node2/meminfo", "Node 2 MemTotal:       67108864 kB"),
    ("sys/devices/system/node/node3/cpulist", "12-15"),
    ("sys/devices/system/node/node3/meminfo", "Node 3 MemTotal:       67108864 kB"),
];

#[test]
fn wide_machines_get_the_nodes_that_other_machines_leave() {
    let wide = |pid, memory: &str| vm(pid, &format!("{KVM_GUEST} -smp 6 -m {memory}"), &["0-15"; 6]);
    // The nodes of each machine; `None` if they are taken.
    let chosen = |changes: &[(&str, &str)], vms: Vec<VmFacts>| -> Vec<Option<String>> {
        let findings = examine_host(&host_with(changes, vms)).into_iter().filter(|found| {
            found.rule == "vm-virtual-nodes" && found.title == "the machine spans nodes, and its kernel does not know"
        });
        let nodes = |found: Finding| match found.changes.first() {
            Some(SettingChange::VmDefinition { option: VmOption::VirtualNodes { host_nodes }, .. }) => {
                Some(node_list(host_nodes))
            }
            _ => {
                assert!(found.remedy[0].contains("machines that are bound to them"), "{found:?}");
                None
            }
        };
        findings.map(nodes).collect()
    };
    let nodes = |ids: &[Option<&str>]| ids.iter().map(|ids| ids.map(str::to_owned)).collect::<Vec<_>>();
    let two = || vec![wide(500, "80G"), wide(600, "80G")];
    assert_eq!(chosen(&[], two()), nodes(&[Some("0-1"), None]), "each needs 40 GiB of two nodes with 64 GiB");
    assert_eq!(chosen(FOUR_NODES, two()), nodes(&[Some("0-1"), Some("2-3")]));
    let small = vec![wide(500, "40G"), wide(600, "40G")];
    assert_eq!(chosen(&[], small), nodes(&[Some("0-1"), Some("0-1")]), "CPUs may be shared");
    // A machine that is bound to node 0 by its virtual CPUs, later in the list, and one that virtual nodes bind.
    let bound = vm(700, &format!("{KVM_GUEST} -smp 2 -m 60G"), &["0-3", "0-3"]);
    assert_eq!(chosen(&[], vec![wide(500, "80G"), bound.clone()]), nodes(&[None]));
    assert_eq!(chosen(FOUR_NODES, vec![wide(500, "80G"), bound]), nodes(&[Some("1-2")]));
    let backend = |id: &str, node: u32| {
        format!("-object memory-backend-ram,id={id},size=30G,policy=bind,host-nodes={node} -numa node,memdev={id}")
    };
    let options = format!("{KVM_GUEST} -smp 2 -m 60G {} {}", backend("a", 1), backend("b", 2));
    let split = vm(700, &options, &["0-15", "0-15"]);
    assert_eq!(chosen(FOUR_NODES, vec![wide(500, "80G"), split]), nodes(&[Some("0,3")]));
    let floating = vm(700, &format!("{KVM_GUEST} -smp 2 -m 60G"), &["0-15", "0-15"]);
    assert_eq!(chosen(&[], vec![wide(500, "80G"), floating]), nodes(&[Some("0-1")]), "the kernel can move it");
}

#[test]
fn virtual_nodes_that_mislead_the_guest_are_named() {
    const NODES: &str = "-numa node,cpus=0-2,memdev=a -numa node,cpus=3-5,memdev=b";
    let machine = |first: &str, second: &str, cpus: &[&str]| {
        let backend = |id: &str, more: &str| format!("-object memory-backend-ram,id={id},size=1G,{more}");
        let options = format!("{KVM_GUEST} -smp 6 {NODES} {} {}", backend("a", first), backend("b", second));
        vm(500, &options, cpus)
    };
    let [node0, node1] = ["policy=bind,host-nodes=0", "policy=bind,host-nodes=1"];
    let placed = ["0-3", "0-3", "1", "4-7", "4-7", "5"];
    let fault = |machine: VmFacts| {
        let found = judge("vm-virtual-nodes", &machine);
        assert!(found.verdict == Warn && found.changes.is_empty(), "{found:?}");
        assert_eq!(found.remedy[0], "pagefold numa plan");
        found.value.split("; ").next().unwrap().to_owned()
    };
    assert_eq!(judge("vm-virtual-nodes", &machine(node0, node1, &placed)).verdict, Fine);
    let preferred = machine(node0, "policy=preferred,host-nodes=1", &placed);
    assert_eq!(judge("vm-virtual-nodes", &preferred).verdict, Fine);
    assert_eq!(
        fault(machine("policy=interleave,host-nodes=0-1", node1, &placed)),
        "virtual node 0 has the policy interleave of 0-1"
    );
    assert_eq!(
        fault(machine(node0, "policy=preferred,host-nodes=0-1", &placed)),
        "virtual node 1 has the policy preferred of 0-1"
    );
    assert_eq!(fault(machine(node0, "share=off", &placed)), "virtual node 1 is not bound");
    assert_eq!(
        fault(machine(node0, node1, &["0-3", "0-3", "1", "4-7", "4-7", "2"])),
        "virtual node 1 has memory of 1 and virtual CPUs on 0-1"
    );
    assert_eq!(
        fault(machine(node1, node0, &["0-3", "0-3", "1", "0-7", "0-7", "0-7"])),
        "virtual node 0 has memory of 1 and virtual CPUs on 0"
    );
    // A machine that would fit into a node.
    let narrow = |memory| {
        let options = format!("{KVM_GUEST} -smp 2 -numa node,cpus=0 -numa node,cpus=1");
        judge("vm-virtual-nodes", &VmFacts { node_memory: memory_on(memory), ..vm(500, &options, &["0-7", "0-7"]) })
    };
    assert_eq!(narrow(&[(1, 100)]).verdict, Fine);
    assert_eq!(narrow(&[(0, 50), (1, 50)]).verdict, Warn);
    let options = format!("{KVM_GUEST} -smp 2 -numa node,cpus=0 -numa node,cpus=1");
    let (node_memory, merged_pages) = (memory_on(&[(0, 50), (1, 50)]), Ok(12_800));
    let merged = VmFacts { node_memory, merged_pages, ..vm(500, &options, &["0-7", "0-7"]) };
    assert_eq!(judge("vm-virtual-nodes", &merged).verdict, Unknown);
}

#[test]
fn machines_without_virtual_nodes_that_span_nodes_are_named() {
    const RULE: &str = "vm-virtual-nodes";
    let machine = |memory: &[(u32, u64)], cpus: &[&str]| VmFacts {
        node_memory: memory_on(memory),
        ..vm(500, &format!("{KVM_GUEST} -smp {}", cpus.len()), cpus)
    };
    let check = |machine: VmFacts, expected| {
        let facts = host_with(&[], vec![machine]);
        assert_verdict(&facts, RULE, expected);
        super::finding(&facts, RULE)
    };
    let found = check(machine(&[(0, 20), (3, 21)], &["0-7", "0-7"]), Warn);
    assert!(found.value.starts_with("node 0: 20.0 MiB, node 3: 21.0 MiB; 2 virtual CPUs"), "{found:?}");
    assert_eq!((found.remedy.as_slice(), found.changes.len()), (["pagefold numa plan".to_owned()].as_slice(), 0));
    check(machine(&[(0, 1000), (1, 20)], &["0-3", "0-3"]), Fine);
    check(machine(&[(0, 1000), (1, 30)], &["0-3", "0-3"]), Warn);
    let floating = check(machine(&[(1, 1000)], &["0-7", "0-7"]), Fine);
    assert!(floating.title.contains("may run on any"), "{floating:?}");
    let spread = check(machine(&[(0, 1000)], &["0-3", "4-7"]), Warn);
    assert!(spread.value.starts_with("bound to the nodes 0-1; "), "{spread:?}");
    check(machine(&[(0, 1000)], &["2-5", "0-7"]), Warn);
    check(machine(&[(0, 1000)], &["0-3", "0-7"]), Fine);
    // 100 MiB are merged, and may be on any node.
    let merged = |memory: &[(u32, u64)]| VmFacts { merged_pages: Ok(25_600), ..machine(memory, &["0-3", "0-3"]) };
    check(merged(&[(0, 1000), (1, 18)]), Fine);
    check(merged(&[(0, 900), (1, 200)]), Warn);
    let found = check(merged(&[(0, 1000), (1, 30)]), Unknown);
    assert!(found.value.contains("node 1: 30.0 MiB") && found.value.contains("pagefold numa map"), "{found:?}");
    let unread = VmFacts { node_memory: Some(Err(Absent::NotOnThisKernel)), ..machine(&[], &["0-3", "0-3"]) };
    let found = check(unread, Unknown);
    assert!(found.title.contains("/proc/500/numa_maps"), "{found:?}");
}

#[test]
fn busy_iothread_is_to_be_relieved_where_qemu_maps_queues() {
    const RULE: &str = "vm-iothreads";
    const DISK: &str = "-drive file=a,if=none,id=d -device virtio-blk-pci,drive=d,id=disk0,iothread=virtio-disk0-io0";
    let machine = |machine_type: &str, vcpus: &[&str], load: f64| VmFacts {
        // The kernel cuts the names of threads.
        iothread_loads: Ok(vec![(ThreadRole::Iothread("virtio-disk0".to_owned()), load)]),
        ..vm(500, &format!("{KVM_GUEST} -machine {machine_type} {DISK}"), vcpus)
    };
    let check = |machine: VmFacts, expected| {
        let facts = host_with(&[], vec![machine]);
        assert_verdict(&facts, RULE, expected);
        super::finding(&facts, RULE)
    };
    let found = check(machine("pc-q35-9.0", &["0-7", "0-7"], 0.5), Warn);
    assert_eq!(option_of(&found), VmOption::DiskIoThreads { disk: "disk0".to_owned(), count: 2 });
    assert_eq!(found.value, "that of disk0 took 50 % of a CPU");
    check(machine("pc-q35-9.0", &["0-7", "0-7"], 0.49), Fine);
    check(machine("pc-q35-8.2", &["0-7", "0-7"], 0.9), Fine);
    check(machine("q35", &["0-7", "0-7"], 0.9), Fine);
    check(machine("pc-q35-9.0", &["0-7"], 0.9), Fine);
    let other = vec![(ThreadRole::Iothread("io7".to_owned()), 0.9)];
    check(VmFacts { iothread_loads: Ok(other), ..machine("pc-q35-9.0", &["0-7", "0-7"], 0.0) }, Fine);
    check(VmFacts { iothread_loads: Err(Absent::Denied), ..machine("pc-q35-9.0", &["0-7", "0-7"], 0.0) }, Unknown);
}

fn option_of(finding: &Finding) -> VmOption {
    match finding.changes.first() {
        Some(SettingChange::VmDefinition { option, .. }) => option.clone(),
        change => panic!("{change:?}"),
    }
}

#[test]
fn dedicated_cpus_are_those_of_one_virtual_cpu() {
    let options = "-overcommit cpu-pm=on -cpu host,kvm-hint-dedicated=on";
    let command = format!("{KVM_GUEST} {options}");
    let verdicts = |vms: Vec<VmFacts>| {
        let facts = host_with(&[], vms);
        ["vm-dedicated-hint", "vm-cpu-pm"]
            .map(|rule| examine(&facts).into_iter().find(|finding| finding.rule == rule).unwrap().verdict)
    };
    let pinned = vm(500, &command, &["2", "3"]);
    assert_eq!(verdicts(vec![pinned.clone()]), [Fine; 2]);
    note_tested("vm-dedicated-hint", Fine);
    note_tested("vm-cpu-pm", Fine);
    assert_eq!(verdicts(vec![pinned.clone(), vm(600, KVM_GUEST, &["3"])]), [Warn; 2], "a neighbor may use CPU 3");
    assert_eq!(verdicts(vec![vm(500, &command, &["2", "2"])]), [Warn; 2]);
    let mut unreadable = pinned;
    unreadable.threads = Err(Absent::Denied);
    assert_eq!(verdicts(vec![unreadable]), [Unknown; 2]);
}

#[test]
fn stacked_virtual_cpus_are_found() {
    const RULE: &str = "vm-stacked-vcpus";
    let check =
        |cpus: &[&str], expected| assert_verdict(&host_with(&[], vec![vm(500, KVM_GUEST, cpus)]), RULE, expected);
    check(&["2", "3"], Fine);
    // Two on one, three on two, and threads without names.
    check(&["2", "2", "3"], Warn);
    check(&["2-3", "2-3", "2-3"], Warn);
    // Three of four on two CPUs, although there are CPUs for all.
    check(&["0-1", "0-1", "0-1", "2-7"], Warn);
    let found = judge(RULE, &vm(500, KVM_GUEST, &["0-1", "0", "0-1", "2-7"]));
    assert_eq!(found.value, "3 of 4 virtual CPUs on 8 CPUs (0-7): on 2 CPUs only (0-1)");
    check(&["0-1", "0", "2-7", "2-7"], Fine);
    // CPUs from 8 on are offline.
    check(&["6-15", "6-15", "6-15"], Warn);
    check(&["0-15", "0-15"], Fine);
    check(&["0-7"], NotApplicable);
    check(&[], NotApplicable);
    let wide = judge(RULE, &vm(500, KVM_GUEST, &["0-7"; 9]));
    assert!(wide.verdict == Warn && wide.remedy[0].contains("at most 8"), "{wide:?}");
    let mut unreadable = machine_with("");
    unreadable.threads = Err(Absent::Denied);
    assert_verdict(&host_with(&[], vec![unreadable]), RULE, Unknown);
}

#[test]
fn machines_that_are_bound_to_one_cpu_together_are_named() {
    const RULE: &str = "vm-stacked-vcpus";
    let judge = |online: &str, vms: Vec<VmFacts>| {
        let facts = host_with(&[("sys/devices/system/cpu/online", online)], vms);
        examine(&facts).into_iter().filter(|finding| finding.rule == RULE).collect::<Vec<_>>()
    };
    let [first, second] = [vm(500, KVM_GUEST, &["2", "3"]), vm(600, KVM_GUEST, &["3"])];
    let found = judge("0-7", vec![second.clone(), first.clone()]);
    assert_eq!(found.len(), 2);
    for finding in found {
        assert_eq!((finding.verdict, finding.value.as_str()), (Warn, "CPU 3: vm500 and vm600"), "{finding:?}");
    }
    let apart = judge("0-7", vec![first.clone(), vm(600, KVM_GUEST, &["4"])]);
    assert_eq!([apart[0].verdict, apart[1].verdict], [Fine, NotApplicable]);
    // Each CPU has a virtual CPU.
    assert_eq!(judge("2-3", vec![first.clone(), second.clone()])[0].verdict, Fine);
    let unreadable = |why| VmFacts { threads: Err(why), ..second.clone() };
    assert_eq!(judge("0-7", vec![first.clone(), unreadable(Absent::Denied)])[0].verdict, Unknown);
    assert_eq!(judge("0-7", vec![first, unreadable(Absent::Vanished)])[0].verdict, Fine);
}

#[test]
fn throttling_counts_from_five_percent_of_periods() {
    const RULE: &str = "vm-cpu-throttled";
    let host = |throttling| host_with(&[], vec![VmFacts { throttling, ..machine_with("") }]);
    let limited = |throttled_periods| {
        host(Ok(Some(CpuThrottling {
            cgroup: "/machine.slice/vm".to_owned(),
            quota: 200_000,
            period: 100_000,
            periods: 1000,
            throttled_periods,
        })))
    };
    assert_verdict(&limited(0), RULE, Fine);
    assert_verdict(&limited(50), RULE, Fine);
    assert_verdict(&limited(51), RULE, Warn);
    let found = super::finding(&limited(51), RULE);
    assert!(found.value.contains("0-10 %") && found.remedy[1].contains("/machine.slice/vm"), "{found:?}");
    assert!(super::finding(&limited(1000), RULE).value.contains("90-100 %"));
    // Limits of cgroup v1 are not read.
    assert_verdict(&host(Err(Absent::NotOnThisKernel)), RULE, NotApplicable);
    assert_verdict(&host(Err(Absent::Denied)), RULE, Unknown);
}

#[test]
fn few_queues_are_found_for_many_virtual_cpus() {
    let judge = |queues: &str, cpus: &[&str]| {
        let options = format!("{KVM_GUEST} -netdev tap,id=n,vhost=on{queues} -device virtio-net-pci,netdev=n");
        judge("vm-queues", &vm(500, &options, cpus))
    };
    assert_eq!(judge("", &["0-7"; 4]).verdict, Warn);
    assert_eq!(option_of(&judge("", &["0-7"; 4])), VmOption::NetworkQueues { network: "n".into(), count: 4 });
    assert_eq!(judge(",queues=2", &["0-7"; 4]).verdict, Fine);
    assert_eq!(option_of(&judge("", &["0-7"; 64])), VmOption::NetworkQueues { network: "n".into(), count: 8 });
}

#[test]
fn changes_name_the_disks_of_the_machine() {
    let found = judge("vm-disk-cache", &machine_with("-drive file=a,if=virtio,id=a -drive file=b,if=virtio,id=b"));
    let disks = |wanted: fn(&VmOption) -> Option<String>| {
        found
            .changes
            .iter()
            .filter_map(|change| match change {
                SettingChange::VmDefinition { option, .. } => wanted(option),
                _ => None,
            })
            .collect::<Vec<_>>()
    };
    let cache = disks(|option| match option {
        VmOption::DiskCacheNone { disk } => Some(disk.clone()),
        _ => None,
    });
    let aio = disks(|option| match option {
        VmOption::DiskAio { disk, .. } => Some(disk.clone()),
        _ => None,
    });
    assert_eq!((cache, aio), (vec!["a".to_owned(), "b".to_owned()], vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!(found.remedy.len(), 2, "one line for each option: {:?}", found.remedy);
}

#[test]
fn machines_with_more_memory_than_a_node_span_nodes() {
    const RULE: &str = "vm-virtual-nodes";
    let host = |options: &str| host_with(&[], vec![machine_with(options)]);
    assert_verdict(&host("-m 64G"), RULE, Fine);
    assert_verdict(&host("-m 65G"), RULE, Warn);
    let found = super::finding(&host("-m 65G"), RULE);
    assert!(matches!(option_of(&found), VmOption::VirtualNodes { host_nodes } if node_list(&host_nodes) == "0-1"));
    // Four nodes of this size would be needed, and the host has two.
    let found = super::finding(&host("-m 200G"), RULE);
    assert!(found.changes.is_empty() && found.remedy[0].contains("no nodes of this host"), "{found:?}");
    assert!(found.value.contains("200 GiB") && found.value.contains("64.0 GiB"), "{found:?}");
    let small = [("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:       1048576 kB")];
    let found = super::finding(&host_with(&small, vec![machine_with("-m 65G")]), RULE);
    assert!(found.changes.is_empty(), "a part does not fit into node 0: {found:?}");
    let bound = |id: &str, node: u32| {
        format!("-object memory-backend-ram,id={id},size=40G,policy=bind,host-nodes={node} -numa node,memdev={id}")
    };
    assert_verdict(&host(&format!("-m 80G {} {}", bound("a", 0), bound("b", 1))), RULE, Fine);
    const MEMORY: &str = "sys/devices/system/node/node1/meminfo";
    for (text, expected) in [(DENIED, Unknown), ("garbage", Unknown), (ABSENT, Warn)] {
        assert_verdict(&host_with(&[(MEMORY, text)], vec![machine_with("-m 65G")]), RULE, expected);
    }
}

fn definition_of(xml: &str) -> Reading<LibvirtDefinition> {
    parse_domain(&format!("<vcpu>2</vcpu>{xml}"))
}

const HOST_CPU: &str = "<cpu mode='host-passthrough'/>";

#[test]
fn differences_from_the_definition_of_libvirt_are_named() {
    const RULE: &str = "vm-next-start";
    let disk = |driver: &str| {
        format!(
            "{HOST_CPU}<devices><disk type='file' device='disk'><driver {driver}/><target dev='vda' bus='virtio'/></disk>\
             <interface type='bridge'><model type='virtio'/></interface></devices>"
        )
    };
    let options = "-cpu host -smp 2 -drive file=a,id=f,if=none -device virtio-blk-pci,drive=f,id=virtio-disk0 \
                   -netdev tap,id=hostnet0 -device virtio-net-pci,netdev=hostnet0";
    let host = |options: &str, next: Option<Reading<LibvirtDefinition>>| {
        host_with(&[], vec![VmFacts { next_definition: next, ..machine_with(options) }])
    };
    assert_verdict(&host(options, Some(definition_of(&disk("name='qemu'")))), RULE, Fine);
    assert_verdict(&host(options, None), RULE, NotApplicable);
    assert_verdict(&host(options, Some(Err(Absent::Denied))), RULE, Unknown);
    assert_verdict(&host("-readconfig x", Some(definition_of(""))), RULE, Unknown);
    for (options, xml, difference) in [
        (options, disk("cache='none'"), "cache of virtio-disk0: host now, none next"),
        (options, disk("io='native'"), "aio of virtio-disk0: threads now, native next"),
        (options, disk("iothread='1'"), "iothreads of virtio-disk0: 0 now, 1 next"),
        (options, HOST_CPU.replace("host-passthrough", "maximum"), "CPU model: host now, max next"),
        ("-cpu host", String::new(), "CPU model: host now, qemu64 next"),
        ("-cpu host -smp 4", HOST_CPU.to_owned(), "virtual CPUs: 4 now, 2 next"),
        (
            "-cpu host",
            format!("{HOST_CPU}<clock><timer name='kvmclock' present='no'/></clock>"),
            "kvmclock: on now, off next",
        ),
        (
            "-cpu host",
            format!("{HOST_CPU}<memoryBacking><hugepages/></memoryBacking>"),
            "memory: private now, hugetlb next",
        ),
        (
            "-cpu host -object memory-backend-memfd,id=m,size=1G",
            HOST_CPU.to_owned(),
            "memory: shared now, private next",
        ),
        (
            "-cpu host",
            "<cpu mode='host-passthrough'><numa><cell cpus='0' memory='1'/><cell cpus='1' memory='1'/></numa></cpu>\
             <numatune><memory mode='strict' nodeset='1'/></numatune>"
                .to_owned(),
            "virtual nodes: none now, 0 bind 1, 1 bind 1 next",
        ),
        (
            "-cpu host -netdev tap,id=hostnet0,vhost=on -device virtio-net-pci,netdev=hostnet0",
            format!(
                "{HOST_CPU}<devices><interface type='bridge'><model type='virtio'/><driver name='qemu'/></interface>\
                 </devices>"
            ),
            "vhost of hostnet0: on now, off next",
        ),
    ] {
        let options = if options.contains("-smp") { options.to_owned() } else { format!("{options} -smp 2") };
        let facts = host(&options, Some(definition_of(&xml)));
        assert_verdict(&facts, RULE, Warn);
        let found = super::finding(&facts, RULE);
        assert_eq!(found.value, difference);
        assert!(found.title.contains("takes effect at the next start"), "{found:?}");
    }
    let tcg =
        VmFacts { next_definition: Some(definition_of("")), ..vm(500, "qemu-system-x86_64 -cpu qemu64 -smp 2", &[]) };
    assert_eq!(judge(RULE, &tcg).value, "accelerator: none now, kvm next");
    let named = definition_of("<cpu mode='host-model'/>");
    assert_verdict(&host("-cpu EPYC-Milan -smp 2", Some(named)), RULE, Fine);
}

#[test]
fn domains_that_do_not_run_are_judged_by_their_definition() {
    let domain = |definition: Reading<VmDefinition>| VmFacts {
        process: ProcessId { pid: Pid(0), start_time: 0 },
        name: "web".to_owned(),
        definition: Some(definition),
        node_memory: None,
        ..vm(0, "qemu", &[])
    };
    let xml = "<vcpu>6</vcpu><clock><timer name='kvmclock' present='no'/></clock>\
               <devices><disk type='file'><target dev='vda' bus='virtio'/></disk><interface type='bridge'>\
               <model type='virtio'/><driver name='qemu'/></interface></devices>";
    let mut facts = host_with(&[], vec![]);
    let parsed = parse_domain(xml);
    facts.settings.idle_domains = vec![domain(Err(Absent::Denied)), domain(parsed.map(|definition| definition.vm))];
    let of_domain = |position| {
        let findings = examine(&facts).into_iter().filter(move |finding| finding.scope == Scope::IdleDomain(position));
        findings.map(|finding| (finding.rule, finding)).collect::<BTreeMap<_, _>>()
    };
    let found = of_domain(1);
    for rule in ["vm-cpu-model", "vm-virtual-nodes", "vm-clock", "vm-iothreads", "vm-disk-cache", "vm-vhost-net"] {
        let finding = &found[rule];
        assert_eq!(finding.verdict, Warn, "{finding:?}");
        assert!(finding.source.contains("/etc/libvirt/qemu/web.xml") && !finding.source.contains("PID"), "{finding:?}");
        assert!(finding.changes.is_empty() && !finding.remedy.is_empty(), "{finding:?}");
    }
    assert_eq!(found["vm-mergeable-memory"].verdict, Fine);
    assert!(!found.contains_key("vm-stacked-vcpus") && !found.contains_key("vm-cpu-throttled"), "it has no threads");
    let unreadable = of_domain(0);
    assert_eq!(unreadable.len(), found.len());
    assert!(unreadable.values().all(|finding| finding.verdict == Unknown), "{unreadable:?}");
}

/// The answers of a monitor: these virtual CPUs, and backends by id, size and whether they are shared.
fn monitor_answers(vcpus: u32, backends: &[(&str, u64, bool)]) -> MonitorAnswers {
    let backend = |(id, bytes, is_shared): &(&str, u64, bool)| MonitorBackend {
        id: Some((*id).to_owned()),
        bytes: *bytes,
        is_shared: Some(*is_shared),
        ..MonitorBackend::default()
    };
    MonitorAnswers {
        vcpus: Ok((0..vcpus).map(|number| MonitorVcpu { number, ..MonitorVcpu::default() }).collect()),
        backends: Ok(backends.iter().map(backend).collect()),
        slots: Ok(VcpuSlots { plugged: u64::from(vcpus), free: 2 }),
    }
}

#[test]
fn monitors_tell_what_was_plugged() {
    const RULE: &str = "vm-monitor";
    let host = |options: &str, monitor: Reading<MonitorAnswers>| {
        host_with(&[], vec![VmFacts { monitor: Some(monitor), ..machine_with(options) }])
    };
    assert_verdict(&host("", Ok(monitor_answers(2, &[("pc.ram", 1 << 30, false)]))), RULE, Fine);
    let found = super::finding(&host("", Ok(monitor_answers(2, &[("pc.ram", 1 << 30, false)]))), RULE);
    assert_eq!(found.value, "2 virtual CPUs, 2 more can be plugged; 1.00 GiB");
    assert_verdict(&host("", Err(Absent::NoAnswer("nothing within 1000 ms".to_owned()))), RULE, Warn);
    let half = MonitorAnswers { slots: Err(Absent::NoAnswer("nothing".to_owned())), ..monitor_answers(2, &[]) };
    assert_verdict(&host("", Ok(half)), RULE, Warn);
    assert_verdict(&host("", Err(Absent::Denied)), RULE, Unknown);
    assert_verdict(&host("", Err(Absent::NotOnThisKernel)), RULE, NotApplicable);
    assert_verdict(&host("", Err(Absent::NotAsked("another client uses the monitor".to_owned()))), RULE, NotApplicable);

    // Shared memory that was plugged later, which the command line does not show.
    const MERGEABLE: &str = "vm-mergeable-memory";
    let plugged = [("pc.ram", 1 << 30, false), ("dimm", 1 << 30, true)];
    let found = super::finding(&host("-m 1G", Ok(monitor_answers(2, &plugged))), MERGEABLE);
    assert_eq!((found.verdict, &*found.value), (Warn, "dimm is shared"), "{found:?}");
    assert!(found.changes.is_empty() && !found.remedy.is_empty(), "{found:?}");
    let defined = "-object memory-backend-memfd,id=m,size=1G";
    let found = super::finding(&host(defined, Ok(monitor_answers(2, &[("m", 1 << 30, true)]))), MERGEABLE);
    assert_eq!((&*found.value, found.changes.len()), ("m is shared", 1), "{found:?}");
    // Memory that was plugged later counts as the machine's.
    let huge = [("pc.ram", 1 << 30, false), ("dimm", 1 << 50, false)];
    let found = super::finding(&host("-m 1G", Ok(monitor_answers(2, &huge))), "vm-virtual-nodes");
    assert_eq!(found.verdict, Warn, "{found:?}");
}
