//! The definition of each virtual machine and the CPUs of its threads. Definitions are those of QEMU; the rules do not
//! apply to other monitors.

use super::facts::{MemoryByNode, VmFacts};
use super::memory::{node_cpus, node_memory};
use super::{Judge, SettingRule, online_cpus};
use crate::decide::change::{ApplyMethod, SettingChange, SettingDetails, VmOption, node_list};
use crate::decide::{
    Finding, HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, find_objection_to_enrollment, require,
};
use pagefold_base::identity::virtual_nodes::{STRICT_POLICY, VirtualNode};
use pagefold_base::identity::vm_definition::VmDefinition;
use pagefold_base::reading::Absent;
use pagefold_base::{Bytes, IdSet, count_text};
use std::collections::BTreeMap;

mod devices;
mod host_nodes;
mod monitor;
mod next_start;
mod threads;

use host_nodes::{NodeChoice, WideMachine, choose_host_nodes};

const UNDO: &str = "restore the definition, then start the machine again";
pub(super) const COMMAND_LINE: &str = "/proc/PID/cmdline";

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "vm-cpu-model",
            source: COMMAND_LINE,
            why: "The default model qemu64 hides most instructions of the CPU from the guest: it computes, encrypts \
                  and compresses more slowly, and may be told wrong mitigations.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "host, or a model of the CPU's generation",
            details: SettingDetails {
                benefit: "the guest uses the vector and cryptography instructions of the CPU",
                risk: "with host, live migration needs hosts with equal CPUs; a guest may notice new hardware",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "flags in /proc/cpuinfo of the guest",
                versions: "all versions of QEMU",
                citation: "QEMU: docs/system/cpu-models-x86.rst.inc",
            },
        },
        judge: Judge::Definition(judge_cpu_model),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-virtual-nodes",
            source: "/proc/PID/cmdline, monitor:query-memdev, /proc/PID/numa_maps, /proc/PID/ksm_stat, \
                     /proc/PID/task/TID/status, /sys/devices/system/node/node*/cpulist",
            why: "The kernel of a machine that spans nodes of the host does not know which memory is near, unless it \
                  has virtual nodes. Virtual nodes whose memory or virtual CPUs are elsewhere mislead it.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "memory and virtual CPUs on one node of the host, or virtual nodes that are each bound to host \
                       nodes, with their virtual CPUs there",
            details: SettingDetails {
                benefit: "the guest's kernel keeps processes and their memory on one node",
                risk: "a virtual node that is not bound to a node of the host is misleading",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "pagefold numa map; numa_hit and numa_miss in the guest",
                versions: "QEMU 2.1 and later (memdev=)",
                citation: "QEMU: qemu-options.hx (-numa); hw/core/numa.c",
            },
        },
        judge: Judge::Definition(judge_virtual_nodes),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-mergeable-memory",
            source: "/proc/PID/cmdline, monitor:query-memdev",
            why: "KSM merges private anonymous memory only: no shared memory (share=on, memfd), no huge pages of the \
                  pool and no memory of confidential guests.",
            needs_ksm: true,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "private memory while KSM is on, unless a device needs it shared or its owner forbids merging",
            details: SettingDetails {
                benefit: "equal pages of the machine and of others are kept once",
                risk: "vhost-user and virtiofs need shared memory; merged pages show by their timing what a neighbor \
                       has",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "pagefold census; ksm_merging_pages",
                versions: "all kernels with KSM",
                citation: "mm/ksm.c (vma_ksm_compatible); QEMU: backends/hostmem.c",
            },
        },
        judge: Judge::Definition(judge_mergeable),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-hyperv",
            source: COMMAND_LINE,
            why: "Without the interfaces of Hyper-V, Windows reads time and sends interrupts by slow emulated \
                  devices, and may time out on a busy host.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "hv-relaxed, hv-vapic, hv-spinlocks and hv-time for Windows",
            details: SettingDetails {
                benefit: "fewer exits of Windows guests; no blue screens from missed ticks",
                risk: "Windows may ask for a new activation",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "exits in /sys/kernel/debug/kvm/PID-FD",
                versions: "all versions of QEMU since 2.12",
                citation: "QEMU: docs/system/i386/hyperv.rst",
            },
        },
        judge: Judge::Definition(judge_hyper_v),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-pv-features",
            source: COMMAND_LINE,
            why: "These interfaces of KVM replace exits: end of interrupt in memory, interrupts to several CPUs in one \
                  call, and a waiting lock that gives up its CPU. QEMU turns them on with KVM.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "kvm-pv-eoi, kvm-pv-ipi and kvm-pv-unhalt not off",
            details: SettingDetails {
                benefit: "fewer exits; no spinning on locks of over-committed guests",
                risk: "none known for guests with Linux 3.12 or later",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "hypercalls, directed_yield_attempted in /sys/kernel/debug/kvm/PID-FD",
                versions: "QEMU 1.x (eoi), 2.0 (unhalt), 3.1 (ipi) and later",
                citation: "Documentation/virt/kvm/x86/cpuid.rst; QEMU: target/i386/kvm/kvm-cpu.c (kvm_default_props)",
            },
        },
        judge: Judge::Definition(judge_pv_features),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-dedicated-hint",
            source: "/proc/PID/cmdline, /proc/PID/task/TID/status",
            why: "kvm-hint-dedicated tells the guest that its virtual CPUs are never preempted: it spins on locks \
                  instead of yielding. On shared CPUs it spins for a CPU that does not run.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "on only if each virtual CPU has a CPU for itself",
            details: SettingDetails {
                benefit: "yields on shared CPUs; faster locks on dedicated ones",
                risk: "locks of a guest with dedicated CPUs get slower without it",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "run delay of the virtual CPUs; directed_yield_attempted",
                versions: "QEMU 2.12 and later, Linux guests 4.17 and later",
                citation: "Documentation/virt/kvm/x86/cpuid.rst (KVM_HINTS_REALTIME)",
            },
        },
        judge: Judge::Vm(judge_dedicated_hint),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-cpu-pm",
            source: "/proc/PID/cmdline, /proc/PID/task/TID/status",
            why: "With cpu-pm=on an idle guest keeps its CPU in a power state of its own choice. The host sees it as \
                  busy, so other work on that CPU waits.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "on only if each virtual CPU has a CPU for itself",
            details: SettingDetails {
                benefit: "other machines get the time in which this one is idle",
                risk: "wake-ups in the guest take an exit again",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "idle time of the CPUs; halt_exits",
                versions: "QEMU 3.0 and later",
                citation: "QEMU: qemu-options.hx (-overcommit); Documentation/virt/kvm/api.rst \
                           (KVM_CAP_X86_DISABLE_EXITS)",
            },
        },
        judge: Judge::Vm(judge_cpu_pm),
    },
    SettingRule {
        rule: RuleInfo {
            id: "vm-clock",
            source: COMMAND_LINE,
            why: "A guest reads time without an exit from the page of kvmclock, or from the TSC if it may rely on it. \
                  Without both it reads emulated devices, which takes microseconds each time.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "kvmclock, or invtsc for a machine that is not migrated",
            details: SettingDetails {
                benefit: "reading the time takes tens of nanoseconds",
                risk: "invtsc: live migration needs a host with the same frequency, or TSC scaling",
                method: ApplyMethod::VmRestart,
                undo: UNDO,
                counter: "current_clocksource in the guest",
                versions: "kvmclock since Linux 2.6.27; guests prefer an invariant TSC since 5.0",
                citation: "arch/x86/kernel/kvmclock.c (kvmclock_init); QEMU: target/i386/cpu.c (invtsc)",
            },
        },
        judge: Judge::Definition(judge_clock),
    },
    monitor::MONITOR,
    threads::THROTTLED,
    threads::STACKED,
    next_start::NEXT_START,
    devices::IOTHREADS,
    devices::CACHE,
    devices::VHOST,
    devices::QUEUES,
];

/// The definition of a machine; or the finding that there is none to judge.
fn require_definition<'a>(
    rule: &'static RuleInfo,
    vm: &'a VmFacts,
) -> Result<Result<&'a VmDefinition, Finding>, MissingReading> {
    match &vm.definition {
        None => Ok(Err(rule.not_applicable("the monitor has no such option", "not QEMU"))),
        Some(definition) => require("the definition of the machine", definition).map(Result::Ok),
    }
}

fn with_option(finding: Finding, vm: &VmFacts, option: VmOption, instruction: &str) -> Finding {
    let mut finding = finding.change(SettingChange::VmDefinition { vm: vm.process, option });
    if !finding.remedy.iter().any(|line| line.contains(instruction)) {
        finding.remedy.push(format!("# {instruction}, then start the machine again"));
    }
    finding
}

fn judge_cpu_model(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let model = definition.cpu_model.as_deref().unwrap_or("default");
    if !definition.kvm {
        return Ok(rule.not_applicable("the machine does not use KVM", model));
    }
    // Proxmox's default kvm64 is as old (QEMU: target/i386/cpu.c, `builtin_x86_defs`).
    if !matches!(model, "default" | "qemu64" | "qemu32" | "kvm64" | "kvm32") {
        return Ok(rule.ok("the guest sees the instructions of its model", model));
    }
    let finding = rule.warn("the guest sees an old CPU", model);
    Ok(with_option(finding, vm, VmOption::HostCpuModel, "use -cpu host (libvirt: <cpu mode='host-passthrough'/>)"))
}

/// A machine is wider than a node if it has more virtual CPUs than any node has CPUs, or more memory than any node has. One
/// that fits into a node spans nodes if a part of its memory is on another node than the rest, or if its virtual CPUs are
/// bound to CPUs of several nodes. Virtual CPUs that may run anywhere do not make a machine span nodes by themselves: the
/// scheduler keeps them near their memory while it can.
fn judge_virtual_nodes(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let nodes = node_cpus(&facts.settings)?;
    let widest = nodes.values().map(|cpus| cpus.iter().count() as u64).max().unwrap_or(0);
    let sizes = node_memory(&facts.settings)?;
    let largest = sizes.values().copied().max();
    let vcpus = vm.vcpu_count()?;
    let memory_bytes = vm.memory_bytes(definition);
    let virtual_nodes = &definition.virtual_nodes;
    let shown_bytes = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| Bytes(bytes).to_string());
    let value = format!(
        "{}, {}, {}; nodes of {} and {}",
        count_text(vcpus, "virtual CPU"),
        shown_bytes(memory_bytes),
        count_text(virtual_nodes.len(), "virtual node"),
        count_text(widest, "CPU"),
        shown_bytes(largest)
    );
    if nodes.len() < 2 {
        return Ok(rule.not_applicable("the host has one node", value));
    }
    let machine = WideMachine::new(vcpus, memory_bytes, widest, largest);
    let parts = machine.parts;
    let memory = vm.node_memory.is_some().then(|| vm.require_node_memory(facts));
    if parts <= 1 && virtual_nodes.len() < 2 {
        return judge_narrow(rule, vm, memory, facts, value);
    }
    if virtual_nodes.len() < 2 {
        let finding = rule.warn("the machine spans nodes, and its kernel does not know", value);
        return Ok(with_virtual_nodes(finding, vm, choose_host_nodes(vm, machine, facts)?));
    }
    let faults = virtual_node_faults(virtual_nodes, vm, &nodes, parts)?;
    if faults.is_empty() {
        return Ok(rule.ok("each virtual node is bound to nodes of the host", value));
    }
    if parts <= 1
        && let Some(memory) = memory
        && memory?.nodes()?.iter().count() < 2
    {
        return Ok(rule.ok("the memory of all virtual nodes is on one node of the host", value));
    }
    Ok(rule
        .warn("virtual nodes are not where the guest expects them", format!("{}; {value}", faults.join("; ")))
        .remedy([
            "pagefold numa plan",
            "# or set policy=bind,host-nodes= of each memory backend (libvirt: <memnode/>), and bind its virtual CPUs there",
        ])
        .verify("pagefold numa map"))
}

/// The remedy for a machine that is wider than a node: virtual nodes on these nodes of the host.
fn with_virtual_nodes(finding: Finding, vm: &VmFacts, choice: NodeChoice) -> Finding {
    match choice {
        NodeChoice::Nodes(host_nodes) => {
            let instruction = format!(
                "give the machine {} virtual nodes (-numa node,memdev=), with memory and virtual CPUs bound to the host \
                 nodes {}",
                host_nodes.len(),
                node_list(&host_nodes)
            );
            with_option(finding, vm, VmOption::VirtualNodes { host_nodes }, &instruction)
        }
        NodeChoice::TooSmall => finding.remedy([
            "# no nodes of this host hold equal parts of the machine: make it smaller, or give it virtual nodes of",
            "# different sizes (-numa node,memdev=), each bound to a node of the host",
        ]),
        NodeChoice::Taken => finding.remedy([
            "# the nodes of this host hold its memory only without the machines that are bound to them, or get virtual",
            "# nodes before it: make it smaller, or move a machine away",
        ]),
    }
}

/// A machine that would fit into a node, without virtual nodes.
fn judge_narrow(
    rule: &'static RuleInfo,
    vm: &VmFacts,
    memory: Option<Result<MemoryByNode<'_>, MissingReading>>,
    facts: &HostFacts,
    value: String,
) -> RuleResult {
    let Some(memory) = memory else { return Ok(rule.ok("the machine fits into a node", value)) };
    let spans = |title, where_it_is: String| {
        let finding = rule.warn(title, format!("{where_it_is}; {value}"));
        Ok(finding.remedy(["pagefold numa plan"]).verify("pagefold numa map"))
    };
    let nodes = node_cpus(&facts.settings)?;
    let online = online_cpus(&facts.settings)?;
    let is_bound = |cpus: &IdSet| !online.is_subset(cpus);
    let vcpus = vm.vcpu_threads()?;
    let bound: IdSet =
        vcpus.iter().map(|thread| &thread.allowed_cpus).filter(|cpus| is_bound(cpus)).flat_map(IdSet::iter).collect();
    let vcpu_nodes = nodes_of_cpus(&bound, &nodes);
    if vcpu_nodes.iter().count() > 1 {
        return spans(
            "its virtual CPUs span nodes, and its kernel does not know",
            format!("bound to the nodes {vcpu_nodes}"),
        );
    }
    let memory = memory?;
    if memory.nodes()?.iter().count() > 1 {
        return spans("its memory spans nodes, and its kernel does not know", memory.to_string());
    }
    if bound.is_empty() && !vcpus.is_empty() {
        return Ok(rule.ok("its memory is on one node, and its virtual CPUs may run on any", value));
    }
    Ok(rule.ok("the machine fits into a node", value))
}

/// The nodes of these CPUs.
fn nodes_of_cpus(cpus: &IdSet, nodes: &BTreeMap<u32, IdSet>) -> IdSet {
    nodes.iter().filter(|(_, node)| cpus.iter().any(|cpu| node.contains(cpu))).map(|(node, _)| *node).collect()
}

/// What is wrong with virtual nodes, each by its number; empty if nothing is.
///
/// The policy `bind` binds memory. `preferred` with one node counts as well: it takes memory of another node only if this
/// one is full, and what is elsewhere then shows in `pagefold numa map`. `interleave` spreads the memory. Virtual CPUs that
/// may run on all CPUs are not bound, so they are on no wrong node.
fn virtual_node_faults(
    virtual_nodes: &[VirtualNode],
    vm: &VmFacts,
    nodes: &BTreeMap<u32, IdSet>,
    parts: u64,
) -> Result<Vec<String>, MissingReading> {
    let all: IdSet = nodes.values().flat_map(IdSet::iter).collect();
    let mut faults = Vec::new();
    for node in virtual_nodes {
        let (id, host_nodes) = (node.id, &node.host_nodes);
        match node.policy.as_deref() {
            _ if host_nodes.is_empty() => faults.push(format!("virtual node {id} is not bound")),
            Some(STRICT_POLICY) => {}
            Some("preferred") if host_nodes.iter().count() == 1 => {}
            Some(policy) => {
                faults.push(format!("virtual node {id} has the policy {} of {host_nodes}", policy.escape_debug()))
            }
            None => faults.push(format!("virtual node {id} is not bound")),
        }
        if host_nodes.is_empty() {
            continue;
        }
        let bound = vm.allowed_cpus_of(node)?.into_iter().filter(|cpus| !all.is_subset(cpus));
        let cpus: IdSet = bound.flat_map(IdSet::iter).collect();
        let vcpu_nodes = nodes_of_cpus(&cpus, nodes);
        if !vcpu_nodes.is_subset(host_nodes) {
            faults.push(format!("virtual node {id} has memory of {host_nodes} and virtual CPUs on {vcpu_nodes}"));
        }
    }
    let used: IdSet = virtual_nodes.iter().flat_map(|node| node.host_nodes.iter()).collect();
    if faults.is_empty() && (used.iter().count() as u64) < parts {
        let ids: IdSet = virtual_nodes.iter().map(|node| node.id).collect();
        faults.push(format!("virtual nodes {ids} are all on the host nodes {used}, which are too small"));
    }
    Ok(faults)
}

fn judge_mergeable(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let unmergeable = vm.unmergeable(definition);
    let value = match &definition.opt_out {
        _ if definition.guest_memfd => "guest_memfd".to_owned(),
        Some(setting) => setting.clone(),
        None if unmergeable.is_empty() => "private memory".to_owned(),
        None => unmergeable.join(", "),
    };
    match &facts.ksm {
        Err(Absent::NotOnThisKernel) => return Ok(rule.not_applicable("this kernel has no KSM", value)),
        ksm => {
            let ksm = require("/sys/kernel/mm/ksm", ksm)?;
            if *require("/sys/kernel/mm/ksm/run", &ksm.run)? != 1 {
                return Ok(rule.not_applicable("KSM is off", value));
            }
        }
    }
    if definition.guest_memfd {
        return Ok(
            rule.not_applicable("its memory is private to the guest (guest_memfd), and KSM cannot map it", value)
        );
    }
    if definition.opt_out.is_some() {
        return Ok(rule.not_applicable("its owner forbids merging", value));
    }
    if unmergeable.is_empty() {
        return Ok(rule.ok("KSM can merge the memory of the machine", value));
    }
    if definition.needs_shared_memory {
        return Ok(rule.not_applicable("a device needs the memory to be shared", value));
    }
    if definition.unmergeable.is_empty() {
        let why = "KSM cannot merge memory that was plugged into the machine";
        let remedy = "# unplug the memory device, and plug it with a backend without share=on";
        return Ok(rule.warn(why, value).remedy([remedy]).verify("pagefold doctor"));
    }
    let finding = rule.warn("KSM cannot merge the memory of the machine", value);
    let instruction = "use private memory: no share=on, no memfd";
    if unmergeable.iter().any(|reason| reason.ends_with(" is hugetlb") || reason == "-mem-path") {
        return Ok(finding.remedy([
            "# huge pages of the pool and files are never merged, and were chosen by the owner of the machine: change the",
            "# definition only if more machines matter more than fewer TLB misses, and shrink the pool then",
        ]));
    }
    let domain = facts.processes.iter().find(|process| process.process.id == vm.process).map(|process| &process.domain);
    Ok(match find_objection_to_enrollment(facts, domain) {
        None => with_option(finding, vm, VmOption::MergeableMemory, instruction),
        Some(why) => finding.remedy([
            format!("# {why}: see the finding ksm-domains"),
            format!("# if that is intended: {instruction}, then start the machine again"),
        ]),
    })
}

/// The interfaces that QEMU recommends for any Windows (docs/system/i386/hyperv.rst, "Recommendations").
const HYPER_V: [&str; 4] = ["hv-relaxed", "hv-vapic", "hv-spinlocks", "hv-time"];
/// The value of the recommended settings in QEMU's docs/system/i386/hyperv.rst; libvirt takes 4095 and more.
const SPINLOCK_RETRIES: u32 = 0x1fff;

fn judge_hyper_v(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    if !definition.windows || !definition.kvm {
        return Ok(rule.not_applicable("nothing shows that the guest is Windows", "no hv-*, no base=localtime"));
    }
    let is_on = |name: &str| definition.cpu_features.get(name) == Some(&true);
    let missing: Vec<&str> = HYPER_V.into_iter().filter(|name| !is_on(name) && !is_on("hv-passthrough")).collect();
    if missing.is_empty() {
        return Ok(rule.ok("Windows has the interfaces of Hyper-V", HYPER_V.join(", ")));
    }
    let finding = rule.warn("Windows lacks interfaces of Hyper-V", format!("missing: {}", missing.join(", ")));
    let instruction = format!("add {} to -cpu (libvirt: <hyperv mode='custom'>)", missing.join(", "));
    let finding = finding.remedy([format!("# {instruction}, then start the machine again")]);
    Ok(missing.into_iter().fold(finding, |finding, name| {
        let option = match name {
            "hv-spinlocks" => VmOption::HyperVSpinlocks { retries: SPINLOCK_RETRIES },
            name => VmOption::CpuFeature { name: name.to_owned(), enable: true },
        };
        finding.change(SettingChange::VmDefinition { vm: vm.process, option })
    }))
}

fn judge_pv_features(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    if !definition.kvm {
        return Ok(rule.not_applicable("the machine does not use KVM", "not KVM"));
    }
    let is_off = |name: &&str| definition.cpu_features.get(*name) == Some(&false);
    let off: Vec<&str> = ["kvm-pv-eoi", "kvm-pv-ipi", "kvm-pv-unhalt"].into_iter().filter(is_off).collect();
    if off.is_empty() {
        return Ok(rule.ok("the guest has the interfaces of KVM", "defaults"));
    }
    let finding = rule.warn("interfaces of KVM are turned off", off.join(", "));
    Ok(off.into_iter().fold(finding, |finding, name| {
        let option = VmOption::CpuFeature { name: name.to_owned(), enable: true };
        with_option(finding, vm, option, &format!("remove {name}=off from -cpu"))
    }))
}

/// Whether each virtual CPU is bound to one CPU that no other virtual CPU of any machine may use.
fn has_own_cpus(vm: &VmFacts, facts: &HostFacts) -> Result<bool, MissingReading> {
    let own = vm.vcpu_threads()?;
    let mut uses = BTreeMap::<u32, usize>::new();
    for thread in facts.settings.vms.iter().map(VmFacts::vcpu_threads).collect::<Result<Vec<_>, _>>()?.concat() {
        thread.allowed_cpus.iter().for_each(|cpu| *uses.entry(cpu).or_default() += 1);
    }
    let is_alone = |cpu: u32| uses.get(&cpu) == Some(&1);
    Ok(!own.is_empty()
        && own.iter().all(|thread| {
            let mut cpus = thread.allowed_cpus.iter();
            matches!((cpus.next(), cpus.next()), (Some(cpu), None) if is_alone(cpu))
        }))
}

fn judge_dedicated_hint(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    if definition.cpu_features.get("kvm-hint-dedicated") != Some(&true) {
        return Ok(rule.not_applicable("the guest is not told that its CPUs are dedicated", "off"));
    }
    if has_own_cpus(vm, facts)? {
        return Ok(rule.ok("each virtual CPU has a CPU for itself", "on"));
    }
    let finding = rule.warn("the guest is told that its CPUs are dedicated, and shares them", "on");
    let option = VmOption::CpuFeature { name: "kvm-hint-dedicated".to_owned(), enable: false };
    Ok(with_option(finding, vm, option, "remove kvm-hint-dedicated=on from -cpu, or bind each virtual CPU"))
}

fn judge_cpu_pm(rule: &'static RuleInfo, vm: &VmFacts, facts: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    if !definition.cpu_pm {
        return Ok(rule.ok("the guest releases its CPUs when idle", "cpu-pm=off"));
    }
    if has_own_cpus(vm, facts)? {
        return Ok(rule.ok("each virtual CPU has a CPU for itself", "cpu-pm=on"));
    }
    let finding = rule.warn("the guest keeps CPUs when idle that it shares", "cpu-pm=on");
    let option = VmOption::CpuPowerManagement { enable: false };
    Ok(with_option(finding, vm, option, "remove -overcommit cpu-pm=on, or bind each virtual CPU to a CPU of its own"))
}

/// QEMU exposes the invariant TSC of the host with `invtsc`, or with `-cpu host,migratable=off`.
fn judge_clock(rule: &'static RuleInfo, vm: &VmFacts, _: &HostFacts) -> RuleResult {
    let definition = match require_definition(rule, vm)? {
        Ok(definition) => definition,
        Err(finding) => return Ok(finding),
    };
    let feature = |name: &str| definition.cpu_features.get(name).copied();
    let is_invariant = feature("invtsc").unwrap_or(feature("migratable") == Some(false));
    let has_kvmclock = feature("kvmclock") != Some(false);
    let value = match (is_invariant, has_kvmclock) {
        (true, _) => "invtsc",
        (false, true) => "kvmclock",
        (false, false) => "kvmclock=off, no invtsc",
    };
    if !definition.kvm {
        return Ok(rule.not_applicable("the machine does not use KVM", value));
    }
    if definition.windows {
        return Ok(rule.not_applicable("Windows uses hv-time", value));
    }
    if is_invariant || has_kvmclock {
        return Ok(rule.ok("the guest has a clock without exits", value));
    }
    let finding = rule.warn("the guest has neither kvmclock nor an invariant TSC", value);
    let option = VmOption::CpuFeature { name: "kvmclock".to_owned(), enable: true };
    Ok(with_option(finding, vm, option, "remove kvmclock=off from -cpu, or add invtsc=on"))
}
