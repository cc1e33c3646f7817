//! The NUMA node on which a gang gets CPUs.

use pagefold_base::{Bytes, IdSet};
use std::collections::BTreeMap;

/// The home of a gang: the node with more than half of its memory, if that node has a CPU for each of its vCPUs.
/// `node_cpus` are the CPUs of each node.
pub fn find_home_node(memory: &BTreeMap<u32, Bytes>, vcpus: usize, node_cpus: &BTreeMap<u32, IdSet>) -> Option<u32> {
    let all: u64 = memory.values().fold(0, |sum, bytes| sum.saturating_add(bytes.0));
    let (&node, _) = memory.iter().find(|(_, bytes)| bytes.0 > all / 2)?;
    let cpus = node_cpus.get(&node)?;
    (cpus.iter().count() >= vcpus).then_some(node)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn home(memory: &[(u32, u64)], vcpus: usize) -> Option<u32> {
        let node_cpus = [(0, "0-3"), (2, "4-5")].map(|(node, cpus)| (node, cpus.parse().unwrap()));
        let memory = memory.iter().map(|&(node, bytes)| (node, Bytes(bytes)));
        find_home_node(&memory.collect(), vcpus, &node_cpus.into())
    }

    #[test]
    fn home_has_most_of_the_memory_and_a_cpu_for_each_vcpu() {
        assert_eq!(home(&[(0, 10), (2, 11)], 2), Some(2));
        assert_eq!(home(&[(0, 10), (2, 11)], 3), None, "wider than the node");
        assert_eq!(home(&[(0, 11), (2, 10)], 4), Some(0));
        assert_eq!(home(&[(0, 10), (2, 10)], 1), None, "on both nodes alike");
        assert_eq!(home(&[(0, 10), (1, 6), (2, 5)], 1), None, "spread over three nodes");
        assert_eq!(home(&[(1, 9)], 1), None, "a node without CPUs");
        assert_eq!(home(&[], 1), None, "without memory");
    }
}
