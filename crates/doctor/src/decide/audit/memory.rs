//! NUMA and huge pages of the host.

use super::facts::{SettingFacts, VmFacts};
use super::{Judge, SettingRule, if_machines_are_known, require_command_lines, with_write};
use crate::decide::change::{ApplyMethod, SettingDetails};
use crate::decide::{HostFacts, MissingReading, RuleInfo, RuleResult, Verdict, require};
use pagefold_base::identity::virtual_nodes::STRICT_POLICY;
use pagefold_base::{IdSet, count_text};
use std::collections::BTreeMap;

pub(super) const RULES: &[SettingRule] = &[
    SettingRule {
        rule: RuleInfo {
            id: "numa-balancing",
            source: "/proc/sys/kernel/numa_balancing, /proc/PID/numa_maps, /proc/PID/ksm_stat, \
                     /proc/PID/task/TID/status",
            why: "NUMA balancing moves memory to the node whose CPUs use it. Guests whose virtual CPUs are bound to \
                  one node each, with all of their memory there, gain nothing. They take its page faults only where \
                  memory has no policy: it skips memory that a policy binds, and merged pages.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "1, unless each machine is placed: all its virtual CPUs are bound to a node that has 98 % of \
                       its memory that is not merged, or each of its virtual nodes binds memory and virtual CPUs to one node: then 0",
            details: SettingDetails {
                benefit: "memory follows guests that are not placed; placed guests take no hinting faults in memory \
                          without a policy",
                risk: "off, memory of guests that move between nodes stays remote",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "numa_pte_updates, numa_hint_faults and numa_pages_migrated in /proc/vmstat",
                versions: "Linux 3.13 and later",
                citation: "Documentation/admin-guide/sysctl/kernel.rst (numa_balancing); Linux 6.18: kernel/sched/fair.c \
                           (task_numa_work), mm/mprotect.c (change_pte_range)",
            },
        },
        judge: Judge::Host(judge_balancing),
    },
    SettingRule {
        rule: RuleInfo {
            id: "zone-reclaim",
            source: "/proc/sys/vm/zone_reclaim_mode",
            why: "With zone reclaim, a full node drops its page cache or swaps guests out while other nodes have free \
                  memory.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "0",
            details: SettingDetails {
                benefit: "guests keep their memory while any node has free memory",
                risk: "more remote memory on a host with nearly full nodes",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "zone_reclaim_success, zone_reclaim_failed, numa_miss and pswpout in /proc/vmstat",
                versions: "all kernels; 0 is the default since 3.16",
                citation: "Documentation/admin-guide/sysctl/vm.rst (zone_reclaim_mode)",
            },
        },
        judge: Judge::Host(judge_zone_reclaim),
    },
    SettingRule {
        rule: RuleInfo {
            id: "thp-guest-ram",
            source: "/sys/kernel/mm/transparent_hugepage/enabled",
            why: "Guest RAM in huge pages saves TLB misses, of which a guest has two kinds. QEMU asks for huge pages \
                  with madvise, which never refuses.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "madvise or always",
            details: SettingDetails {
                benefit: "fewer TLB misses and page faults of guests",
                risk: "KSM splits a huge page before it merges a part of it; memory of small guests grows",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "thp_fault_alloc and thp_collapse_alloc in /proc/vmstat; AnonHugePages in /proc/meminfo and \
                          /proc/PID/smaps_rollup",
                versions: "Linux 2.6.38 and later",
                citation: "Documentation/admin-guide/mm/transhuge.rst; QEMU: util/oslib-posix.c (QEMU_MADV_HUGEPAGE)",
            },
        },
        judge: Judge::Host(judge_huge_pages),
    },
    SettingRule {
        rule: RuleInfo {
            id: "thp-shared-memory",
            source: "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
            why: "Guest RAM that is shared with other processes (share=on, memfd) is shared memory, which has a \
                  setting for huge pages of its own. Its default is never.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "advise, within_size or always while a machine has shared memory",
            details: SettingDetails {
                benefit: "fewer TLB misses of guests with vhost-user or virtiofs",
                risk: "memory of guests grows sooner to its full size",
                method: ApplyMethod::Live,
                undo: "write the value that was there",
                counter: "ShmemHugePages in /proc/meminfo",
                versions: "Linux 4.8 and later",
                citation: "Documentation/admin-guide/mm/transhuge.rst (Hugepages in tmpfs/shmem)",
            },
        },
        judge: Judge::Host(judge_shared_huge_pages),
    },
    SettingRule {
        rule: RuleInfo {
            id: "hugetlb-per-node",
            source: "/sys/devices/system/node/node*/hugepages/hugepages-*/nr_hugepages",
            why: "A machine in huge pages of the pool starts only on a node with enough of them, and takes remote \
                  ones otherwise.",
            needs_ksm: false,
            verdicts: Verdict::ALL_BUT_FAIL,
            expected: "the same number on each node, or none",
            details: SettingDetails {
                benefit: "each node can hold its share of machines in local huge pages",
                risk: "huge pages of the pool cannot be used for anything else, nor be merged",
                method: ApplyMethod::Manual,
                undo: "write the numbers that were there",
                counter: "free_hugepages of each node; numa_maps of the machines",
                versions: "Linux 2.6.32 and later",
                citation: "Documentation/admin-guide/mm/hugetlbpage.rst",
            },
        },
        judge: Judge::Host(judge_pools),
    },
];

const NODES: &str = "sys/devices/system/node";

/// The nodes that have CPUs, with their CPUs. Empty on a host without NUMA.
pub(super) fn node_cpus(settings: &SettingFacts) -> Result<BTreeMap<u32, IdSet>, MissingReading> {
    let mut nodes = BTreeMap::new();
    for node in settings.numbered(NODES, "node")? {
        let path = format!("{NODES}/node{node}/cpulist");
        if let Some(text) = settings.find_text(&path)?.filter(|text| !text.is_empty()) {
            nodes.insert(node, text.parse().map_err(|_| super::facts::malformed(&path, text))?);
        }
    }
    Ok(nodes)
}

/// The memory of each node that tells it, in bytes (drivers/base/node.c, `node_read_meminfo`).
pub(super) fn node_memory(settings: &SettingFacts) -> Result<BTreeMap<u32, u64>, MissingReading> {
    let mut sizes = BTreeMap::new();
    for node in settings.numbered(NODES, "node")? {
        let path = format!("{NODES}/node{node}/meminfo");
        let Some(text) = settings.find_text(&path)? else { continue };
        let total = text.lines().find_map(|line| line.split_once("MemTotal:")?.1.trim().strip_suffix("kB"));
        let kibibytes = total.and_then(|total| total.trim().parse::<u64>().ok());
        let bytes = kibibytes.and_then(|kibibytes| kibibytes.checked_mul(1 << 10));
        sizes.insert(node, bytes.ok_or_else(|| super::facts::malformed(&path, text))?);
    }
    Ok(sizes)
}

/// The nodes to which the virtual CPUs of a machine are bound; `None` if one of them may run on several nodes.
pub(super) fn bound_nodes(vm: &VmFacts, nodes: &BTreeMap<u32, IdSet>) -> Result<Option<IdSet>, MissingReading> {
    let vcpus = vm.vcpu_threads()?;
    let node_of_vcpu = |cpus: &IdSet| nodes.iter().find(|(_, node)| cpus.is_subset(node)).map(|(node, _)| *node);
    let bound: Option<IdSet> = vcpus.iter().map(|thread| node_of_vcpu(&thread.allowed_cpus)).collect();
    Ok(bound.filter(|bound| !bound.is_empty()))
}

/// Off only if each machine is placed. A machine on several nodes is placed only if its virtual nodes are: otherwise its
/// virtual CPUs may read memory of one another's nodes. Where bindings do not show it, or what is on other nodes may be
/// merged, the setting stays as it is, because `pagefold numa verify`, which reads page tables, may have advised it.
fn judge_balancing(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = "proc/sys/kernel/numa_balancing";
    let Some(mode) = settings.find_number(path)? else {
        return Ok(rule.not_applicable("the kernel has no NUMA balancing", "absent"));
    };
    let nodes = node_cpus(settings)?;
    let value = format!(
        "numa_balancing = {mode}, {}, {}",
        count_text(nodes.len(), "node"),
        count_text(settings.vms.len(), "virtual machine")
    );
    if nodes.len() < 2 {
        return Ok(rule.not_applicable("the host has one node", value));
    }
    if settings.vms.is_empty() {
        return if_machines_are_known(rule.not_applicable("no virtual machine runs", value), facts);
    }
    let mut bound = Vec::new();
    for vm in &settings.vms {
        bound.extend(bound_nodes(vm, &nodes)?.map(|nodes| (vm, nodes)));
    }
    let unbound = settings.vms.len() - bound.len();
    if unbound > 0 && mode == 0 {
        let title = format!(
            "NUMA balancing is off, and the virtual CPUs of {} are not bound to a node",
            count_text(unbound, "virtual machine")
        );
        return Ok(with_write(rule.warn(title, value), path, "1"));
    }
    if unbound > 0 {
        return Ok(rule.ok("NUMA balancing moves memory to the guests that use it", value));
    }
    let (mut misplaced, mut undecided) = (Vec::new(), Vec::new());
    for (vm, vcpu_nodes) in bound {
        let (memory, name) = (vm.require_node_memory(facts)?, vm.name.escape_debug());
        let is_over_several = vcpu_nodes.iter().count() > 1;
        match memory.is_on(&vcpu_nodes) {
            Some(false) => misplaced.push(format!("{name} on {vcpu_nodes} with memory on {memory}")),
            None => undecided.push(format!("{name} on {vcpu_nodes} with memory on {memory}")),
            Some(true) if is_over_several => match has_near_memory(vm, &nodes)? {
                Some(true) => {}
                Some(false) => misplaced.push(format!("{name} on {vcpu_nodes}, with virtual CPUs away from memory")),
                None => undecided.push(format!("{name} on {vcpu_nodes}, with virtual nodes that are not bound")),
            },
            Some(true) => {}
        }
    }
    match (mode, misplaced.as_slice()) {
        (_, []) if !undecided.is_empty() => {
            let title = "only page tables show whether NUMA balancing is of use: `pagefold numa verify` reads them";
            if_machines_are_known(rule.ok(title, format!("{value}; {}", shown_names(&undecided))), facts)
        }
        (0, []) => {
            if_machines_are_known(rule.ok("all machines are placed on nodes, and NUMA balancing is off", value), facts)
        }
        (_, []) => {
            require_command_lines(facts)?;
            let title = "all machines are placed on nodes, and NUMA balancing has nothing to move";
            Ok(with_write(rule.warn(title, value), path, "0"))
        }
        (0, misplaced) => {
            let title = "NUMA balancing is off, and virtual CPUs read memory of other nodes";
            let finding = with_write(rule.warn(title, format!("{value}; {}", shown_names(misplaced))), path, "1");
            let write = finding.remedy.clone();
            let place = [
                "# place the machines, if the plan moves something (pagefold numa apply):",
                "pagefold numa plan",
                "# if it moves nothing, or instead of it, let the kernel move the memory:",
            ];
            Ok(finding.remedy(place.map(str::to_owned).into_iter().chain(write)))
        }
        (_, misplaced) => {
            let title = "NUMA balancing is of use: memory is not placed yet";
            Ok(rule.ok(title, format!("{value}; {}", shown_names(misplaced))))
        }
    }
}

/// Whether each virtual CPU of a machine over several nodes has its memory near, as far as bindings show. Without virtual
/// nodes each reads memory of all nodes. `None` if memory is not bound (`policy=bind`) to one node: only page tables tell.
fn has_near_memory(vm: &VmFacts, nodes: &BTreeMap<u32, IdSet>) -> Result<Option<bool>, MissingReading> {
    let Some(definition) = &vm.definition else { return Ok(None) };
    let virtual_nodes = &require("the definition of the machine", definition)?.virtual_nodes;
    if virtual_nodes.len() < 2 {
        return Ok(Some(false));
    }
    let mut all_near = Some(true);
    for node in virtual_nodes {
        let host_nodes: Vec<u32> = node.host_nodes.iter().collect();
        let vcpus = vm.allowed_cpus_of(node)?;
        let cpus = match (node.policy.as_deref(), &host_nodes[..]) {
            (Some(STRICT_POLICY), [host_node]) if !vcpus.is_empty() => nodes.get(host_node),
            _ => None,
        };
        match cpus {
            None => all_near = None,
            Some(cpus) if vcpus.iter().all(|vcpu| vcpu.is_subset(cpus)) => {}
            Some(_) => return Ok(Some(false)),
        }
    }
    Ok(all_near)
}

/// The first names of a long list.
fn shown_names(names: &[String]) -> String {
    const MAX_SHOWN: usize = 4;
    let shown = names[..names.len().min(MAX_SHOWN)].join("; ");
    if names.len() > MAX_SHOWN { format!("{shown} and {} more", names.len() - MAX_SHOWN) } else { shown }
}

fn judge_zone_reclaim(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let path = "proc/sys/vm/zone_reclaim_mode";
    let Some(mode) = facts.settings.find_number(path)? else {
        return Ok(rule.not_applicable("the kernel has no NUMA", "absent"));
    };
    let value = format!("zone_reclaim_mode = {mode}");
    if mode == 0 {
        return Ok(rule.ok("a full node uses memory of other nodes", value));
    }
    Ok(with_write(rule.warn("a full node reclaims memory although other nodes have some", value), path, "0"))
}

const THP: &str = "sys/kernel/mm/transparent_hugepage";

/// The bracketed word of a file of choices.
fn find_choice<'a>(settings: &'a SettingFacts, path: &str) -> Result<Option<&'a str>, MissingReading> {
    let Some(text) = settings.find_text(path)? else { return Ok(None) };
    let choice = text.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map(|(choice, _)| choice);
    choice.map(Some).ok_or_else(|| super::facts::malformed(path, text))
}

fn judge_huge_pages(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let path = format!("{THP}/enabled");
    match find_choice(&facts.settings, &path)? {
        None => Ok(rule.not_applicable("the kernel has no transparent huge pages", "absent")),
        Some("never") => Ok(with_write(rule.warn("guests get no huge pages", "never"), &path, "madvise")),
        Some(choice) => Ok(rule.ok("guests get huge pages", choice)),
    }
}

/// Whether a machine shares its memory by definition; the definition of some may be unknown.
fn shares_memory(vm: &VmFacts) -> Result<bool, MissingReading> {
    match &vm.definition {
        None => Ok(false),
        Some(Ok(definition)) => Ok(definition.unmergeable.iter().any(|reason| reason.ends_with(" is shared"))),
        Some(Err(absent)) => {
            Err(MissingReading { reading_name: format!("/proc/{}/cmdline", vm.process.pid), absent: absent.clone() })
        }
    }
}

fn judge_shared_huge_pages(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let path = format!("{THP}/shmem_enabled");
    let Some(choice) = find_choice(settings, &path)? else {
        return Ok(rule.not_applicable("the kernel has no huge pages in shared memory", "absent"));
    };
    let mut sharing = 0;
    for vm in &settings.vms {
        sharing += usize::from(shares_memory(vm)?);
    }
    let value = format!("{choice}, {} with shared memory", count_text(sharing, "virtual machine"));
    match choice {
        _ if sharing == 0 => {
            if_machines_are_known(rule.not_applicable("no virtual machine has shared memory", value), facts)
        }
        "never" | "deny" => {
            Ok(with_write(rule.warn("guests with shared memory get no huge pages", value), &path, "advise"))
        }
        _ => Ok(rule.ok("guests with shared memory get huge pages", value)),
    }
}

/// The numbers by size, in the order of nodes. Which number each node should have depends on the machines, so the rule
/// only informs.
fn judge_pools(rule: &'static RuleInfo, facts: &HostFacts) -> RuleResult {
    let settings = &facts.settings;
    let mut pools = BTreeMap::<String, Vec<u64>>::new();
    let nodes = settings.numbered(NODES, "node")?;
    for &node in &nodes {
        let folder = format!("{NODES}/node{node}/hugepages");
        for size in settings.find_names(&folder)? {
            let number = settings.find_number(&format!("{folder}/{size}/nr_hugepages"))?;
            pools.entry(size.trim_start_matches("hugepages-").to_owned()).or_default().extend(number);
        }
    }
    pools.retain(|_, numbers| numbers.iter().any(|number| *number > 0));
    if nodes.len() < 2 || pools.is_empty() {
        let title = "one node only, or no huge pages in a pool";
        return Ok(rule.not_applicable(title, count_text(nodes.len(), "node")));
    }
    let shown = |(size, numbers): (&String, &Vec<u64>)| {
        let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
        format!("{size}: {}", numbers.join(" + "))
    };
    let value = pools.iter().map(shown).collect::<Vec<_>>().join(", ");
    if pools.values().all(|numbers| numbers.len() == nodes.len() && numbers.windows(2).all(|pair| pair[0] == pair[1])) {
        return Ok(rule.ok("each node has as many huge pages", value));
    }
    Ok(rule
        .warn("nodes have different numbers of huge pages", value)
        .remedy([
            "# write the number that its machines need to each node:",
            "grep . /sys/devices/system/node/node*/hugepages/hugepages-*/nr_hugepages",
        ])
        .verify("pagefold doctor"))
}
