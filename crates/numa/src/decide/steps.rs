//! The steps that place a machine: which threads get which CPUs, and which memory goes to which node.
//!
//! The guest's memory follows the part it belongs to; memory of the monitor and threads without a virtual CPU follow all parts.
//! A part that is spread over several nodes gets its memory in alternating blocks, so that each node serves a share
//! of all accesses, whichever addresses the guest uses.

use pagefold_base::memory::MemoryPolicy;
use pagefold_base::region::Region;
use pagefold_base::{AddressRange, Bytes, IdSet, Pid};
use std::collections::BTreeMap;

/// Bytes that are moved together: large enough that calls of the kernel take most of the time, and small enough for a
/// bound on bandwidth and a prompt end. A multiple of all sizes of transparent huge pages.
pub const BATCH_BYTES: u64 = 32 << 20;

/// Smaller stretches of memory keep their policy: stacks and heaps of the monitor, which its own threads use.
const MIN_POLICY_BYTES: u64 = 32 << 20;

/// The most blocks into which a region is divided if it is spread over several nodes.
const MAX_SPREAD_BLOCKS: u64 = 256;

/// The least size of such a block: a huge page of x86.
const MIN_SPREAD_BLOCK_BYTES: u64 = 2 << 20;

/// A thread to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadToPlace {
    /// Its number.
    pub tid: Pid,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
    /// The part whose virtual CPU it runs; `None` for threads that serve all parts.
    pub part: Option<usize>,
    /// The CPUs on which it may run now.
    pub allowed_cpus: IdSet,
    /// The CPUs to which its owner restricts it: those above, unless Pagefold has restricted it further.
    pub permitted_cpus: IdSet,
}

/// A part of a machine, with its new nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PartToPlace {
    /// Its nodes, with the share of its memory that each gets; usually a single node.
    pub nodes: Vec<(u32, f64)>,
    /// The regions of its memory, ascending.
    pub regions: Vec<AddressRange>,
}

/// New CPUs of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadStep {
    /// Its number.
    pub tid: Pid,
    /// When it began.
    pub start_time: u64,
    /// The CPUs on which it may run now.
    pub from: IdSet,
    /// The CPUs on which it shall run.
    pub to: IdSet,
}

/// A thread whose owner restricts it to CPUs of other nodes than those of its part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestrictedThread {
    /// Its number.
    pub tid: Pid,
    /// When it began.
    pub start_time: u64,
    /// The CPUs of the nodes of its part.
    pub node_cpus: IdSet,
}

impl RestrictedThread {
    /// Whether it is on its nodes in spite of that, now that the other threads are placed: the kernel lets a thread run on
    /// all CPUs of its cpuset if none of those that its owner permits is among them (kernel/sched/core.c,
    /// `__set_cpus_allowed_ptr`). libvirt writes the cpuset of a domain's threads that it does not pin one by one when it
    /// pins the main thread. `allowed_now` are the CPUs on which the thread may run now.
    pub fn is_on_its_nodes(&self, allowed_now: &IdSet) -> bool {
        !allowed_now.is_empty() && allowed_now.is_subset(&self.node_cpus)
    }
}

/// Memory to move together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveStep {
    /// The ranges, ascending, at most [`BATCH_BYTES`] together.
    pub ranges: Vec<AddressRange>,
    /// The node.
    pub node: u32,
    /// How much memory in the ranges is to be moved: at most their size, less what is on the node already.
    pub bytes: Bytes,
}

/// Memory that shall come from a node if the machine touches it later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyStep {
    /// The mappings, ascending.
    pub ranges: Vec<AddressRange>,
    /// Their policy now.
    pub from: MemoryPolicy,
    /// Their new policy.
    pub to: MemoryPolicy,
}

/// All steps for a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineSteps {
    /// New CPUs of threads, in the order of their numbers.
    pub threads: Vec<ThreadStep>,
    /// Threads that get no CPUs of their own, because their owner restricts them.
    pub restricted_threads: Vec<RestrictedThread>,
    /// Memory to move.
    pub moves: Vec<MoveStep>,
    /// New memory policies.
    pub policies: Vec<PolicyStep>,
    /// Memory whose policy stays, by reason.
    pub kept_policies: BTreeMap<String, Bytes>,
}

/// The steps for a machine with these parts and threads. `cpus_of_node` has the CPUs of each node that are online.
pub fn machine_steps(
    parts: &[PartToPlace],
    threads: &[ThreadToPlace],
    cpus_of_node: &BTreeMap<u32, IdSet>,
) -> MachineSteps {
    let mut steps = MachineSteps::default();
    for thread in threads {
        let own = thread.part.and_then(|part| parts.get(part)).map(std::slice::from_ref);
        let nodes = own.unwrap_or(parts).iter().flat_map(|part| &part.nodes);
        let node_cpus: IdSet =
            nodes.filter_map(|(node, _)| cpus_of_node.get(node)).flat_map(|cpus| cpus.iter()).collect();
        let to = node_cpus.intersection(&thread.permitted_cpus);
        let ThreadToPlace { tid, start_time, .. } = *thread;
        if to.is_empty() {
            steps.restricted_threads.push(RestrictedThread { tid, start_time, node_cpus });
        } else if to != thread.allowed_cpus {
            steps.threads.push(ThreadStep { tid, start_time, from: thread.allowed_cpus.clone(), to });
        }
    }
    for part in parts {
        let mut ranges_by_node: BTreeMap<u32, Vec<AddressRange>> = BTreeMap::new();
        for &region in &part.regions {
            for (range, node) in spread_region(region, &part.nodes) {
                ranges_by_node.entry(node).or_default().push(range);
            }
        }
        steps.moves.extend(ranges_by_node.into_iter().flat_map(|(node, ranges)| batches(&ranges, node)));
    }
    steps
}

/// The steps that give the memory of a part a policy, and what keeps its policy, in `steps`. `regions` are ascending.
/// `current` has the present policies by the start of each region, as in `/proc/PID/numa_maps`. Memory that is spread over
/// nodes shall come from the node of the thread that touches it, as by default.
pub fn add_policies(
    steps: &mut MachineSteps,
    nodes: &[(u32, f64)],
    regions: &[&Region],
    current: &BTreeMap<u64, String>,
) {
    let to = if let [(node, _)] = nodes { MemoryPolicy::Prefer(*node) } else { MemoryPolicy::Default };
    let policy_of = |region: &Region| current.get(&region.range.start);
    let is_same = |left: &&Region, right: &&Region| right.continues(left) && policy_of(left) == policy_of(right);
    let mut ranges: BTreeMap<MemoryPolicy, Vec<AddressRange>> = BTreeMap::new();
    for stretch in regions.chunk_by(is_same) {
        let [first, ..] = stretch else { continue };
        let range = AddressRange { start: first.range.start, end: stretch[stretch.len() - 1].range.end };
        let Some(policy) = policy_of(first).filter(|_| range.bytes().0 >= MIN_POLICY_BYTES) else { continue };
        match policy.parse() {
            Ok(policy) => ranges.entry(policy).or_default().push(range),
            Err(()) => {
                let why = format!("its owner has set {policy}");
                *steps.kept_policies.entry(why).or_default() += range.bytes();
            }
        }
    }
    let changes = ranges.into_iter().filter(|&(from, _)| from != to);
    steps.policies.extend(changes.map(|(from, ranges)| PolicyStep { ranges, from, to }));
}

/// The blocks of a region, each with its node. Each node gets its share of the bytes, as nearly as blocks permit.
fn spread_region(region: AddressRange, nodes: &[(u32, f64)]) -> Vec<(AddressRange, u32)> {
    if let [(node, _)] = nodes {
        return vec![(region, *node)];
    }
    let block =
        (region.bytes().0 / MAX_SPREAD_BLOCKS).next_multiple_of(MIN_SPREAD_BLOCK_BYTES).max(MIN_SPREAD_BLOCK_BYTES);
    let mut missing = vec![0.0; nodes.len()];
    let mut blocks = Vec::new();
    let mut start = region.start;
    while start < region.end {
        let end = region.end.min((start + 1).next_multiple_of(block));
        let bytes = (end - start) as f64;
        missing.iter_mut().zip(nodes).for_each(|(missing, (_, share))| *missing += share * bytes);
        let most =
            (0..nodes.len()).max_by(|&left, &right| missing[left].total_cmp(&missing[right]).then(right.cmp(&left)));
        let Some(chosen) = most else { break };
        missing[chosen] -= bytes;
        blocks.push((AddressRange { start, end }, nodes[chosen].0));
        start = end;
    }
    blocks
}

/// Divide ranges into batches of at most [`BATCH_BYTES`] that end at multiples of it, so that no transparent huge page is
/// divided.
fn batches(ranges: &[AddressRange], node: u32) -> Vec<MoveStep> {
    let mut batches: Vec<MoveStep> = Vec::new();
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let piece = AddressRange { start, end: range.end.min((start + 1).next_multiple_of(BATCH_BYTES)) };
            match batches.last_mut() {
                Some(last) if last.bytes.0 + piece.bytes().0 <= BATCH_BYTES => {
                    last.ranges.push(piece);
                    last.bytes += piece.bytes();
                }
                _ => batches.push(MoveStep { ranges: vec![piece], node, bytes: piece.bytes() }),
            }
            start = piece.end;
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn cpus(text: &str) -> IdSet {
        text.parse().unwrap()
    }

    fn thread(tid: u32, part: Option<usize>, allowed: &str, permitted: &str) -> ThreadToPlace {
        let (allowed_cpus, permitted_cpus) = (cpus(allowed), cpus(permitted));
        ThreadToPlace { tid: Pid(tid), start_time: 1, part, allowed_cpus, permitted_cpus }
    }

    fn nodes() -> BTreeMap<u32, IdSet> {
        [(0, cpus("0-3")), (1, cpus("4-7")), (2, IdSet::default())].into()
    }

    #[test]
    fn policies_are_set_unless_they_are_others() {
        let mapping = |first_mib: u64, mib: u64| AddressRange { start: first_mib * MIB, end: (first_mib + mib) * MIB };
        let region = |range, permissions: &[u8; 4]| Region { permissions: *permissions, ..Region::empty(range) };
        let mappings = [
            (mapping(0, 64), "default", b"rw-p"),
            (mapping(64, 32), "prefer:0", b"rw-p"),
            (mapping(100, 31), "default", b"rw-p"),
            (mapping(200, 64), "bind:0", b"rw-p"),
            (mapping(300, 64), "prefer:1", b"rw-p"),
            // Two halves of a mapping that the kernel has split, and a mapping beside them.
            (mapping(400, 16), "default", b"rw-p"),
            (mapping(416, 16), "default", b"rw-p"),
            (mapping(432, 16), "default", b"rw-s"),
        ];
        let current = mappings.iter().map(|(range, policy, _)| (range.start, (*policy).to_owned())).collect();
        let mut regions = mappings.map(|(range, _, permissions)| region(range, permissions)).to_vec();
        // A mapping that began since has no policy in the file.
        regions.push(region(mapping(500, 64), b"rw-p"));
        let regions: Vec<&Region> = regions.iter().collect();
        let steps_for = |nodes: &[(u32, f64)]| {
            let mut steps = MachineSteps::default();
            add_policies(&mut steps, nodes, &regions, &current);
            assert_eq!(steps.kept_policies, [("its owner has set bind:0".to_owned(), Bytes(64 * MIB))].into());
            steps.policies
        };
        let change = |ranges: &[AddressRange], from, to| PolicyStep { ranges: ranges.to_vec(), from, to };
        let prefer = MemoryPolicy::Prefer;
        let expected = [
            change(&[mapping(0, 64), mapping(400, 32)], MemoryPolicy::Default, prefer(1)),
            change(&[mapping(64, 32)], prefer(0), prefer(1)),
        ];
        assert_eq!(steps_for(&[(1, 1.0)]), expected);
        // Memory that is spread over nodes must not all come from one of them.
        let expected = [
            change(&[mapping(64, 32)], prefer(0), MemoryPolicy::Default),
            change(&[mapping(300, 64)], prefer(1), MemoryPolicy::Default),
        ];
        assert_eq!(steps_for(&[(0, 0.5), (1, 0.5)]), expected);
    }

    #[test]
    fn threads_get_the_cpus_of_their_part() {
        let part =
            |nodes: &[u32]| PartToPlace { nodes: nodes.iter().map(|&node| (node, 1.0)).collect(), regions: Vec::new() };
        let threads = [
            thread(1, None, "0-7", "0-7"),
            thread(2, Some(0), "0-7", "0-7"),
            thread(3, Some(1), "0-7", "0-7"),
            thread(4, Some(1), "0-3", "0-3"),
            thread(5, Some(1), "0-3", "0-7"),
            thread(6, Some(0), "0-3", "0-5"),
        ];
        let steps = machine_steps(&[part(&[0]), part(&[1])], &threads, &nodes());
        let to: Vec<_> = steps.threads.iter().map(|step| (step.tid.0, step.to.to_string())).collect();
        // Thread 1 may run on both nodes already, and thread 6 is where it shall be.
        assert_eq!(to, [(2, "0-3".to_owned()), (3, "4-7".to_owned()), (5, "4-7".to_owned())]);
        let restricted = RestrictedThread { tid: Pid(4), start_time: 1, node_cpus: cpus("4-7") };
        assert_eq!(steps.restricted_threads, [restricted], "its owner permits only CPUs of the other node");
    }

    #[test]
    fn restricted_thread_may_be_taken_to_its_nodes_by_its_cpuset() {
        let thread = |node_cpus| RestrictedThread { tid: Pid(4), start_time: 1, node_cpus: cpus(node_cpus) };
        let is_there = |allowed_now| thread("4-7").is_on_its_nodes(&cpus(allowed_now));
        assert!(is_there("4-7") && is_there("5"));
        assert!(!is_there("0-3") && !is_there("3-4") && !is_there("0-7"), "it may run elsewhere");
        assert!(!is_there("") && !thread("").is_on_its_nodes(&cpus("0")));
    }

    #[test]
    fn node_without_cpus_gets_no_threads() {
        let part = PartToPlace { nodes: vec![(2, 1.0)], regions: Vec::new() };
        let steps = machine_steps(&[part], &[thread(1, Some(0), "0-7", "0-7")], &nodes());
        let restricted = RestrictedThread { tid: Pid(1), start_time: 1, node_cpus: IdSet::default() };
        assert_eq!((steps.threads.len(), steps.restricted_threads), (0, vec![restricted]));
    }

    #[test]
    fn memory_is_moved_in_batches() {
        let regions =
            vec![AddressRange { start: 2 * MIB, end: 40 * MIB }, AddressRange { start: 100 * MIB, end: 101 * MIB }];
        let steps = machine_steps(&[PartToPlace { nodes: vec![(1, 1.0)], regions }], &[], &nodes());
        let sizes: Vec<_> = steps.moves.iter().map(|step| (step.ranges.len(), step.bytes.0 / MIB)).collect();
        assert_eq!(sizes, [(1, 30), (2, 9)]);
    }

    proptest! {
        #[test]
        fn each_byte_is_moved_once_and_nodes_get_their_shares(
            start in 0_u64..1 << 30, pages in 1_u64..100_000, weights in prop::collection::btree_map(0_u32..4, 1_u32..9, 1..4),
        ) {
            let region = AddressRange { start: start * 4096, end: (start + pages) * 4096 };
            let sum: u32 = weights.values().sum();
            let nodes: Vec<(u32, f64)> =
                weights.iter().map(|(&node, &weight)| (node, f64::from(weight) / f64::from(sum))).collect();
            let part = PartToPlace { nodes: nodes.clone(), regions: vec![region] };
            let steps = machine_steps(&[part], &[], &BTreeMap::new());
            let mut ranges: Vec<AddressRange> = steps.moves.iter().flat_map(|step| step.ranges.clone()).collect();
            ranges.sort_unstable_by_key(|range| range.start);
            prop_assert_eq!(AddressRange::union(ranges.clone()), vec![region]);
            prop_assert_eq!(ranges.iter().map(|range| range.bytes().0).sum::<u64>(), region.bytes().0);
            prop_assert!(steps.moves.iter().all(|step| step.bytes.0 <= BATCH_BYTES));
            for (node, share) in nodes {
                let moved: u64 = steps.moves.iter().filter(|step| step.node == node).map(|step| step.bytes.0).sum();
                let difference = moved as f64 - share * region.bytes().0 as f64;
                prop_assert!(difference.abs() <= 4.0 * MIN_SPREAD_BLOCK_BYTES as f64, "{node}: {difference}");
            }
        }
    }
}
