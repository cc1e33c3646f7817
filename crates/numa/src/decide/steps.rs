//! The steps that place a machine: which threads get which CPUs, and which memory goes to which node.
//!
//! The guest's memory follows the part it belongs to; memory of the monitor and threads without a virtual CPU follow all parts.
//! A part that is spread over several nodes gets its memory in alternating blocks, so that each node serves a share
//! of all accesses, whichever addresses the guest uses.

use pagefold_base::memory::MemoryPolicy;
use pagefold_base::{AddressRange, Bytes, IdSet, Pid};
use std::collections::BTreeMap;

/// Bytes that are moved together: large enough that calls of the kernel take most of the time, and small enough for a
/// bound on bandwidth and a prompt end. A multiple of all sizes of transparent huge pages.
pub const BATCH_BYTES: u64 = 32 << 20;

/// Smaller mappings keep their memory policy: they hold no memory of a guest, but stacks and heaps of its monitor.
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
    /// Threads whose owner restricts them to CPUs of other nodes. They stay as they are.
    pub restricted_threads: Vec<Pid>,
    /// Memory to move.
    pub moves: Vec<MoveStep>,
    /// New memory policies.
    pub policies: Vec<PolicyStep>,
    /// Memory whose owner has set another policy than that of a preferred node, by that policy. It stays.
    pub other_policies: BTreeMap<String, Bytes>,
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
        let cpus = nodes.filter_map(|(node, _)| cpus_of_node.get(node)).flat_map(|cpus| cpus.iter());
        let to: IdSet = cpus.filter(|&cpu| thread.permitted_cpus.contains(cpu)).collect();
        if to.is_empty() {
            steps.restricted_threads.push(thread.tid);
        } else if to != thread.allowed_cpus {
            let ThreadToPlace { tid, start_time, .. } = *thread;
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

/// The policies of mappings that shall prefer a node, in `steps`. Mappings below [`MIN_POLICY_BYTES`] stay. `current` has
/// the present policies by the start of each mapping, as in `/proc/PID/numa_maps`.
pub fn add_policies(steps: &mut MachineSteps, node: u32, mappings: &[AddressRange], current: &BTreeMap<u64, String>) {
    let mut ranges: BTreeMap<MemoryPolicy, Vec<AddressRange>> = BTreeMap::new();
    for &range in mappings.iter().filter(|range| range.bytes().0 >= MIN_POLICY_BYTES) {
        let Some(text) = current.get(&range.start) else { continue };
        match text.parse() {
            Ok(policy) => ranges.entry(policy).or_default().push(range),
            Err(()) => *steps.other_policies.entry(text.clone()).or_default() += range.bytes(),
        }
    }
    let to = MemoryPolicy::Prefer(node);
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
        let mappings = [mapping(0, 64), mapping(64, 32), mapping(100, 31), mapping(200, 64), mapping(300, 64)];
        let policies = ["default", "prefer:0", "default", "bind:0", "prefer:1"];
        let current = mappings.iter().zip(policies).map(|(range, policy)| (range.start, policy.to_owned())).collect();
        let mut steps = MachineSteps::default();
        // A mapping that began since has no policy in the file.
        add_policies(&mut steps, 1, &[&mappings[..], &[mapping(400, 64)]].concat(), &current);
        let change = |range: AddressRange, from| PolicyStep { ranges: vec![range], from, to: MemoryPolicy::Prefer(1) };
        let expected = [change(mappings[0], MemoryPolicy::Default), change(mappings[1], MemoryPolicy::Prefer(0))];
        assert_eq!(steps.policies, expected);
        assert_eq!(steps.other_policies, [("bind:0".to_owned(), Bytes(64 * MIB))].into());
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
        assert_eq!(steps.restricted_threads, [Pid(4)], "its owner permits only CPUs of the other node");
    }

    #[test]
    fn node_without_cpus_gets_no_threads() {
        let part = PartToPlace { nodes: vec![(2, 1.0)], regions: Vec::new() };
        let steps = machine_steps(&[part], &[thread(1, Some(0), "0-7", "0-7")], &nodes());
        assert_eq!((steps.threads.len(), steps.restricted_threads), (0, vec![Pid(1)]));
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
