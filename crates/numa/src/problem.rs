//! The planning problem of a host: its map as the planner sees it.

use crate::decide;
use crate::decide::content_overlap::{self, LocatedContents};
use crate::decide::plan::{self, NodeCapacity, PlacementPlan, PlacementProblem, PlannedPart, PlannedVm};
use crate::decide::pricing::{HostCapacity, OperatorPrices, Prices};
use crate::map::{NumaMap, ProcessPlacement, VirtualNodePlacement};
use crate::page_nodes::{PageKinds, PageNodes};
use crate::threads::{self, ThreadPlacement};
use crate::topology::{NumaNode, Topology};
use pagefold_base::domain::TrustDomain;
use pagefold_base::{Bytes, IdSet, PageSize, Pages, ProcessId, Reading};
use pagefold_census::decide::sketch::ContentSketches;
use pagefold_host::{Host, elapsed_since, observe};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The hotness of a machine that does not run at all. It may run again.
pub(crate) const MIN_HOTNESS: f64 = 0.01;

/// The share of a CPU that each virtual CPU of the hottest machine counts as using at least. On a host that is idle now,
/// machines may run again.
const MIN_CPU_USE: f64 = 0.1;

/// A process is not moved if devices pin at least one page in this many.
const PINNED_PAGES_RATIO: u64 = 100;

/// What a plan may use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanLimits {
    /// Virtual CPUs for each CPU.
    pub vcpus_per_cpu: f64,
    /// The share of a node's memory that stays free.
    pub headroom_share: f64,
    /// What resources are worth.
    pub prices: OperatorPrices,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self { vcpus_per_cpu: 1.0, headroom_share: 0.05, prices: OperatorPrices::default() }
    }
}

/// The contents of processes, as a census has sketched them, with their trust domains.
pub type KnownContents = BTreeMap<ProcessId, (TrustDomain, Arc<ContentSketches>)>;

/// The problem of placing the processes of a map, all of which are moved as virtual machines are. The other machines of
/// the map come after them, and stay as they are.
///
/// Memory of other processes stays where it is: a node offers its free memory, its file cache, its free hugetlb pages and
/// the memory of the placed processes. If it is not known which hugetlb pages are free, it offers those of the placed
/// processes only. CPU time of other processes is not considered. Pages that are merged and those of files stay where they
/// are, and count as remote reads only.
pub fn placement_problem(map: &NumaMap, page_size: PageSize, limits: PlanLimits) -> PlacementProblem {
    let used = |node: u32| {
        let mut used = PageKinds::default();
        map.processes
            .iter()
            .filter_map(|placement| placement.pages.by_node.get(&node))
            .for_each(|&kinds| used += kinds);
        used
    };
    let cpu_shares: Vec<f64> =
        map.processes.iter().map(|placement| cpu_share_per_page(placement, &map.uptime_ticks)).collect();
    let hottest = cpu_shares.iter().copied().fold(0.0, f64::max);
    let capacity = HostCapacity {
        cpus: map.topology.nodes.values().map(|node| node.cpus.iter().count() as f64).sum(),
        memory_bytes: map
            .topology
            .nodes
            .values()
            .flat_map(|node| &node.memory)
            .map(|memory| memory.total.0 as f64)
            .sum(),
        page_bytes: page_size.bytes() as f64,
        hottest_cpus_per_page: hottest.max(least_cpus_per_page(map, &cpu_shares)),
    };
    let relative = |cpu_share: f64| if hottest > 0.0 { (cpu_share / hottest).max(MIN_HOTNESS) } else { 1.0 };
    let ids: Vec<u32> = map.topology.nodes.keys().copied().collect();
    PlacementProblem {
        nodes: map
            .topology
            .nodes
            .iter()
            .map(|(&id, node)| node_capacity((id, node), used(id), page_size, limits))
            .collect(),
        distances: ids
            .iter()
            .flat_map(|&from| ids.iter().map(move |&to| (from, to)))
            .map(|(from, to)| ((from, to), map.topology.distance(from, to)))
            .collect(),
        vms: map
            .processes
            .iter()
            .zip(cpu_shares)
            .map(|(placement, cpu_share)| planned_vm(placement, &map.topology, page_size, relative(cpu_share)))
            .chain(map.other_machines.iter().map(|placement| other_machine(placement, &map.topology)))
            .collect(),
        prices: Prices::new(&limits.prices, capacity),
        merges_within_nodes: false,
    }
}

/// Adds to a problem which pages of its machines will merge with equal ones, and whether across nodes.
pub fn add_equal_pages(host: &dyn Host, map: &NumaMap, contents: &KnownContents, problem: &mut PlacementProblem) {
    // An unreadable setting takes the kernel's default.
    problem.merges_within_nodes = observe::ksm(host).is_ok_and(|ksm| ksm.merge_across_nodes == Ok(0));
    let located = |(placement, vm): (&ProcessPlacement, &PlannedVm)| {
        let (domain, sketches) = contents.get(&placement.process.id)?;
        let mut pages: BTreeMap<u32, f64> = BTreeMap::new();
        for part in &vm.parts {
            part.pages.iter().chain(&part.kept_pages).for_each(|(&node, add)| *pages.entry(node).or_default() += add);
        }
        Some(LocatedContents { domain, sketches, pages })
    };
    let machines: Vec<Option<LocatedContents<'_>>> = map.processes.iter().zip(&problem.vms).map(located).collect();
    let equal = content_overlap::equal_pages(&machines, problem.merges_within_nodes);
    for (vm, equal) in problem.vms.iter_mut().zip(equal) {
        let total: f64 = vm.parts.iter().map(PlannedPart::total_pages).sum();
        for part in &mut vm.parts {
            let share = if total > 0.0 { part.total_pages() / total } else { 0.0 };
            part.equal_pages = equal.iter().map(|(&node, pages)| (node, share * pages.min(total))).collect();
        }
    }
}

/// What the hottest process uses at least for each page of its memory; of equally hot ones, the largest counts.
fn least_cpus_per_page(map: &NumaMap, cpu_shares: &[f64]) -> f64 {
    let by_heat = map.processes.iter().zip(cpu_shares).rev();
    let hottest = by_heat.max_by(|left, right| left.1.total_cmp(right.1));
    hottest.map_or(0.0, |(placement, _)| {
        let threads = threads::working_threads(placement.threads.as_deref().unwrap_or_default()).count();
        MIN_CPU_USE * threads as f64 / (placement.pages.resident().0 as f64).max(1.0)
    })
}

/// What a node offers to the placed processes, which use these pages of it.
fn node_capacity(
    (id, node): (u32, &NumaNode),
    used: PageKinds,
    page_size: PageSize,
    limits: PlanLimits,
) -> NodeCapacity {
    let room = node.memory.clone().unwrap_or_default().room(limits.headroom_share);
    let free_hugetlb = node.free_hugetlb.clone().unwrap_or_default();
    let in_pages = |bytes: Bytes| bytes.0 as f64 / page_size.bytes() as f64;
    NodeCapacity {
        id,
        vcpus: node.cpus.iter().count() as f64 * limits.vcpus_per_cpu,
        pages: in_pages(room) + used.movable().saturating_sub(used.hugetlb).0 as f64,
        hugetlb_pages: in_pages(free_hugetlb) + used.hugetlb.0 as f64,
    }
}

/// Plan the placement of all machines. The search of a better plan ends after `time_limit` by the clock of the host.
pub fn plan_within(host: &dyn Host, problem: &PlacementProblem, time_limit: Duration) -> PlacementPlan {
    let started = host.now();
    plan::plan(problem, &mut || elapsed_since(host, started) >= time_limit)
}

/// The CPU time of a process since its start, in CPUs, for each page of its memory: an estimate of how often a page is
/// read. If the time since boot is unknown, all its threads that have run count as always running.
fn cpu_share_per_page(placement: &ProcessPlacement, uptime_ticks: &Reading<u64>) -> f64 {
    let threads = || placement.threads.iter().flatten();
    let cpus = match uptime_ticks {
        Ok(uptime) => {
            let ticks: u64 = threads().map(|thread| thread.cpu_ticks).sum();
            ticks as f64 / uptime.saturating_sub(placement.process.id.start_time).max(1) as f64
        }
        Err(_) => threads().filter(|thread| thread.cpu_ticks > 0).count() as f64,
    };
    // A process cannot use more CPUs than it has threads.
    cpus.min(threads().count() as f64) / (placement.pages.resident().0 as f64).max(1.0)
}

/// Whether each virtual node can be placed on its own: its memory and a thread of its vCPUs are known. Otherwise memory would
/// be divided among nodes while the threads that read it may run on all of them. vCPUs that may be plugged later have no
/// threads yet.
fn has_parts(placement: &ProcessPlacement, threads: &[ThreadPlacement]) -> bool {
    let is_known = |node: &VirtualNodePlacement| {
        node.pages.is_some() && threads::vcpu_threads(threads, &node.node).next().is_some()
    };
    placement.virtual_nodes.len() > 1 && placement.virtual_nodes.iter().all(is_known)
}

fn planned_vm(placement: &ProcessPlacement, topology: &Topology, page_size: PageSize, hotness: f64) -> PlannedVm {
    let threads = placement.threads.as_deref().unwrap_or_default();
    let parts = if has_parts(placement, threads) {
        let part = |node: &VirtualNodePlacement| {
            let vcpus: Vec<&ThreadPlacement> = threads::vcpu_threads(threads, &node.node).collect();
            let part = planned_part(topology, &vcpus, &node.pages.clone().unwrap_or_default(), hotness);
            let part = PlannedPart { bound_nodes: node.node.bound_nodes().cloned(), ..part };
            // vCPUs that may be plugged later have no threads yet.
            PlannedPart { vcpus: part.vcpus.max(node.node.vcpus.iter().count() as f64), ..part }
        };
        let mut parts: Vec<PlannedPart> = placement.virtual_nodes.iter().map(part).collect();
        // The monitor's own memory and that of other backends go with the first virtual node.
        parts[0].bound_nodes = permitted_by_all([parts[0].bound_nodes.as_ref(), placement.bound_nodes.as_ref()]);
        for (&node, kinds) in &placement.pages.by_node {
            let in_parts = |pages: fn(&PlannedPart) -> &BTreeMap<u32, f64>| -> f64 {
                parts.iter().filter_map(|part| pages(part).get(&node)).sum()
            };
            let pages = kinds.movable().0 as f64 - in_parts(|part| &part.pages);
            let hugetlb_pages = kinds.hugetlb.0 as f64 - in_parts(|part| &part.hugetlb_pages);
            let kept_pages = kinds.kept().0 as f64 - in_parts(|part| &part.kept_pages);
            let merged_pages = kinds.merged.0 as f64 - in_parts(|part| &part.merged_pages);
            *parts[0].pages.entry(node).or_default() += pages.max(0.0);
            *parts[0].hugetlb_pages.entry(node).or_default() += hugetlb_pages.max(0.0);
            *parts[0].kept_pages.entry(node).or_default() += kept_pages.max(0.0);
            *parts[0].merged_pages.entry(node).or_default() += merged_pages.max(0.0);
        }
        parts
    } else {
        let working: Vec<&ThreadPlacement> = threads::working_threads(threads).collect();
        let bindings = placement.virtual_nodes.iter().map(|node| node.node.bound_nodes());
        let bound_nodes = permitted_by_all(bindings.chain([placement.bound_nodes.as_ref()]));
        let roaming_nodes = roaming_nodes(topology, threads);
        vec![PlannedPart { bound_nodes, roaming_nodes, ..planned_part(topology, &working, &placement.pages, hotness) }]
    };
    let pinned = placement.process.pinned.as_ref().map_or(0, |&pinned| page_size.pages_in(pinned).0);
    let is_pinned = placement.process.identity.vm.as_ref().is_some_and(|vm| vm.vfio)
        || pinned > 0 && pinned >= placement.pages.resident().0 / PINNED_PAGES_RATIO;
    let strict_nodes = placement.libvirt.as_ref().and_then(|domain| domain.strict_nodes.as_deref());
    let strict_nodes: Option<IdSet> = strict_nodes.and_then(|nodes| nodes.parse().ok());
    let is_permitted = |node: &u32| {
        strict_nodes.as_ref().is_none_or(|nodes| nodes.contains(*node))
            && placement.allowed_nodes.as_ref().is_ok_and(|nodes| nodes.contains(*node))
    };
    let mut vm = PlannedVm {
        name: placement
            .process
            .identity
            .vm
            .as_ref()
            .and_then(|vm| vm.name.clone())
            .unwrap_or_else(|| placement.process.comm.clone()),
        parts,
        allowed_nodes: Some(topology.nodes.keys().copied().filter(is_permitted).collect()),
        fixed: false,
        has_pinned_memory: is_pinned,
        is_placed: placement.is_placed,
    };
    vm.fixed = !vm.is_placeable(topology.nodes.keys().copied());
    vm
}

/// A machine that stays where it is: its virtual CPUs, each on the node where it runs next.
fn other_machine(placement: &ProcessPlacement, topology: &Topology) -> PlannedVm {
    let vcpus = || threads::working_threads(placement.threads.as_deref().unwrap_or_default());
    let nodes = vcpus().filter_map(|thread| topology.node_of_cpu(thread.next_cpu()));
    let part = PlannedPart {
        vcpus: vcpus().count() as f64,
        cpu_shares: decide::shares(nodes.map(|node| (node, 1))),
        ..PlannedPart::default()
    };
    PlannedVm { parts: vec![part], fixed: true, ..PlannedVm::default() }
}

/// The nodes that all bindings permit; `None` if there is none.
fn permitted_by_all<'n>(bindings: impl IntoIterator<Item = Option<&'n IdSet>>) -> Option<IdSet> {
    bindings.into_iter().flatten().cloned().reduce(|left, right| left.intersection(&right))
}

fn planned_part(topology: &Topology, threads: &[&ThreadPlacement], pages: &PageNodes, hotness: f64) -> PlannedPart {
    let by_node = |count: fn(&PageKinds) -> Pages| {
        pages.by_node.iter().map(|(&node, kinds)| (node, count(kinds).0 as f64)).collect()
    };
    PlannedPart {
        vcpus: threads.len() as f64,
        cpu_shares: threads::cpu_shares(topology, threads.iter().copied()),
        pages: by_node(|kinds| kinds.movable()),
        hugetlb_pages: by_node(|kinds| kinds.hugetlb),
        kept_pages: by_node(|kinds| kinds.kept()),
        merged_pages: by_node(|kinds| kinds.merged),
        equal_pages: BTreeMap::new(),
        huge_share: pages.huge_share(),
        hotness,
        bound_nodes: None,
        cpu_nodes: threads
            .iter()
            .map(|thread| topology.nodes_of_cpus(&thread.permitted_cpus))
            .reduce(|left, right| left.intersection(&right)),
        roaming_nodes: roaming_nodes(topology, threads.iter().copied()),
    }
}

/// The nodes of the threads that may run on several.
fn roaming_nodes<'t>(topology: &Topology, threads: impl IntoIterator<Item = &'t ThreadPlacement>) -> IdSet {
    let nodes = threads.into_iter().map(|thread| topology.nodes_of_cpus(&thread.allowed_cpus));
    nodes.filter(|nodes| nodes.iter().count() > 1).flat_map(|nodes| nodes.iter().collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads::ThreadRole;
    use crate::topology::NodeMemory;
    use pagefold_base::identity::virtual_nodes;
    use pagefold_base::process::Process;
    use pagefold_base::{Absent, Pid, ProcessId};

    /// The plan's view of a machine on a host with four nodes, by the command line of QEMU. Each virtual node has pages, and
    /// the threads of the virtual CPUs 0 and 1 are known.
    fn vm(command: &str) -> PlannedVm {
        vm_with_threads(command, Ok(named_threads(&["qemu-system-x86", "CPU 0/KVM", "CPU 1/KVM"])))
    }

    /// Threads with these names that may run anywhere.
    fn named_threads(names: &[&str]) -> Vec<ThreadPlacement> {
        let cpus: IdSet = "0-7".parse().unwrap();
        let thread = |(tid, name): (u32, &&str)| ThreadPlacement {
            tid: Pid(tid),
            start_time: 1,
            role: ThreadRole::from_thread_name(name),
            last_cpu: 0,
            allowed_cpus: cpus.clone(),
            permitted_cpus: cpus.clone(),
            cpu_ticks: 1,
        };
        (1..).zip(names).map(thread).collect()
    }

    /// As [`vm`], with other threads. Each node has two CPUs.
    fn vm_with_threads(command: &str, threads: Reading<Vec<ThreadPlacement>>) -> PlannedVm {
        let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let node = |id| NumaNode {
            cpus: [2 * id, 2 * id + 1].into_iter().collect(),
            memory: Err(Absent::Denied),
            free_hugetlb: Err(Absent::Denied),
            distances: BTreeMap::new(),
        };
        let topology = Topology { nodes: (0..4).map(|id| (id, node(id))).collect() };
        let kinds = PageKinds { small: Pages(100), ..PageKinds::default() };
        let pages = || PageNodes { by_node: [(0, kinds)].into(), ..PageNodes::default() };
        let nodes = virtual_nodes::virtual_nodes(&arguments);
        let placement = ProcessPlacement {
            process: Process::absent(ProcessId { pid: Pid(7), start_time: 1 }, &Absent::Denied),
            pages: pages(),
            bound_nodes: virtual_nodes::other_bound_nodes(&arguments, &nodes),
            untouched_bound: BTreeMap::new(),
            virtual_nodes: nodes
                .into_iter()
                .map(|node| VirtualNodePlacement { node, pages: Some(pages()), cost: None })
                .collect(),
            threads,
            allowed_nodes: Ok((0..3).collect()),
            libvirt: None,
            is_placed: false,
            machine: None,
            devices: Vec::new(),
            cost: None,
            movable_remote_share: None,
        };
        planned_vm(&placement, &topology, PageSize::new(4096).unwrap(), 1.0)
    }

    #[test]
    fn node_offers_free_memory_and_what_the_processes_use() {
        let page_size = PageSize::new(4096).unwrap();
        let memory = |pages| page_size.bytes_of(Pages(pages));
        let mut node = NumaNode {
            cpus: "0-3".parse().unwrap(),
            memory: Ok(NodeMemory {
                total: memory(1000),
                free: memory(350),
                file_cache: memory(100),
                reserved: memory(50),
            }),
            free_hugetlb: Ok(memory(512)),
            distances: BTreeMap::new(),
        };
        let used = PageKinds { small: Pages(50), hugetlb: Pages(1024), merged: Pages(7), ..PageKinds::default() };
        let limits = PlanLimits { vcpus_per_cpu: 2.0, headroom_share: 0.1, ..PlanLimits::default() };
        let expected = NodeCapacity { id: 1, vcpus: 8.0, pages: 350.0, hugetlb_pages: 1536.0 };
        assert_eq!(node_capacity((1, &node), used, page_size, limits), expected);
        node.free_hugetlb = Err(Absent::NotOnThisKernel);
        assert_eq!(node_capacity((1, &node), used, page_size, limits).hugetlb_pages, 1024.0, "only what they use");
    }

    #[test]
    fn affinity_of_virtual_cpus_permits_nodes_and_that_of_other_threads_does_not_matter() {
        let with_cpus = |command: &str, cpus: [&str; 3]| {
            let mut threads = named_threads(&["qemu-system-x86", "CPU 0/KVM", "CPU 1/KVM"]);
            for (thread, cpus) in threads.iter_mut().zip(cpus) {
                (thread.allowed_cpus, thread.permitted_cpus) = (cpus.parse().unwrap(), cpus.parse().unwrap());
            }
            vm_with_threads(command, Ok(threads))
        };
        let permitted = |vm: &PlannedVm| -> Vec<Vec<u32>> {
            vm.parts.iter().map(|part| (0..4).filter(|&node| vm.permits(part, node)).collect()).collect()
        };
        let plain = "qemu-system-x86_64 -m 1G";
        let free = with_cpus(plain, ["0-7", "0-7", "0-7"]);
        assert_eq!((permitted(&free), free.fixed), (vec![vec![0, 1, 2]], false), "the cpuset has the nodes 0-2");
        let one_node = with_cpus(plain, ["0-7", "2-3", "2-3"]);
        assert_eq!((permitted(&one_node), one_node.fixed), (vec![vec![1]], false));
        let emulator = with_cpus(plain, ["0-1", "2-3", "2-5"]);
        assert_eq!((permitted(&emulator), emulator.fixed), (vec![vec![1]], false));
        let apart = with_cpus(plain, ["0-7", "0", "2"]);
        assert_eq!((permitted(&apart), apart.fixed), (vec![vec![]], true), "no node has CPUs for both");

        let ram = |id: &str| format!("-object memory-backend-ram,id={id},size=1M ");
        let numa = "-numa node,cpus=0,memdev=a -numa node,cpus=1,memdev=b";
        let split = with_cpus(&format!("qemu-system-x86_64 {}{}{numa}", ram("a"), ram("b")), ["0-7", "0", "2"]);
        assert_eq!((permitted(&split), split.fixed), (vec![vec![0], vec![1]], false));
    }

    #[test]
    fn machine_is_planned_by_virtual_nodes_only_if_threads_of_their_vcpus_are_known() {
        let ram = |id: &str| format!("-object memory-backend-ram,id={id},size=1M ");
        let numa = "-smp 2,maxcpus=4 -numa node,cpus=0,cpus=2,memdev=a -numa node,cpus=1,cpus=3,memdev=b";
        let command = format!("qemu-system-x86_64 {}{}{numa}", ram("a"), ram("b"));
        let parts = |names: &[&str]| vm_with_threads(&command, Ok(named_threads(names))).parts.len();
        assert_eq!(parts(&["qemu-system-x86", "CPU 0/KVM", "CPU 1/KVM"]), 2, "vCPUs 2 and 3 are not plugged");
        assert_eq!(parts(&["qemu-system-x86"; 3]), 1, "QEMU has not named its threads");
        assert_eq!(parts(&["qemu-system-x86", "CPU 0/TCG"]), 1, "one thread runs all vCPUs");
        assert_eq!(vm_with_threads(&command, Err(Absent::Denied)).parts.len(), 1, "threads cannot be read");
    }

    fn bound_nodes(vm: &PlannedVm) -> Vec<Option<String>> {
        vm.parts.iter().map(|part| part.bound_nodes.as_ref().map(ToString::to_string)).collect()
    }

    #[test]
    fn policy_of_a_memory_backend_binds_the_machine_or_its_virtual_node() {
        let ram = |id: &str, nodes: &str| {
            format!("-object memory-backend-ram,id={id},size=1M,policy=bind,host-nodes={nodes} ")
        };
        let text = |nodes: &str| Some(nodes.to_owned());
        let whole = vm(&format!("qemu-system-x86_64 -machine q35,memory-backend=ram {}", ram("ram", "1-3")));
        assert_eq!((bound_nodes(&whole), whole.fixed), (vec![text("1-3")], false));
        assert!(
            [0, 1, 3].map(|node| whole.permits(&whole.parts[0], node)) == [false, true, false],
            "the cpuset has 0-2"
        );

        let numa = "-numa node,cpus=0,memdev=a -numa node,cpus=1,memdev=b";
        let split = vm(&format!("qemu-system-x86_64 {}{}{numa}", ram("a", "0-1"), ram("b", "2")));
        assert_eq!((bound_nodes(&split), split.fixed), (vec![text("0-1"), text("2")], false));
        // Memory of other backends goes with the first virtual node.
        let dimm = vm(&format!("qemu-system-x86_64 {}{}{}{numa}", ram("a", "0-1"), ram("b", "2"), ram("dimm", "1-2")));
        assert_eq!((bound_nodes(&dimm), dimm.fixed), (vec![text("1"), text("2")], false));
        // A machine whose virtual CPUs are not known is one part.
        let unsplit = numa.replace("cpus=0,", "").replace("cpus=1,", "");
        let together = vm(&format!("qemu-system-x86_64 {}{}{unsplit}", ram("a", "0"), ram("b", "2")));
        assert_eq!((bound_nodes(&together), together.fixed), (vec![text("")], true), "nowhere but where it is");
        let outside = vm(&format!("qemu-system-x86_64 {}", ram("ram", "3")));
        assert!(outside.fixed, "the cpuset does not permit node 3");
        assert_eq!(bound_nodes(&vm("qemu-system-x86_64 -m 1G")), [None]);
    }
}
