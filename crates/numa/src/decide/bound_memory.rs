//! Memory that a machine is bound to on a node and has not touched yet. If it touches more than the node has free then, the
//! kernel kills a process, even if other nodes have room (mm/page_alloc.c, `__alloc_pages_may_oom`).
//!
//! Memory that is bound to several nodes does not count, because it is not known from which of them it will come. Nor do
//! hugetlb pages, which come from a pool, and memory of files, of which other processes may have touched a part.

use pagefold_base::region::{Region, VmFlags};
use pagefold_base::{Bytes, IdSet};
use std::collections::BTreeMap;

/// The bytes for each node. `policies` has the policy of each region by its start, as in `/proc/PID/numa_maps`.
pub fn untouched_bound_memory(regions: &[Region], policies: &BTreeMap<u64, String>) -> BTreeMap<u32, Bytes> {
    let mut untouched: BTreeMap<u32, Bytes> = BTreeMap::new();
    for region in regions.iter().filter(|region| region.inode == 0 && !region.flags.has(VmFlags::HUGETLB)) {
        let node = policies.get(&region.range.start).and_then(|policy| bound_node(policy));
        let bytes = region.range.bytes().saturating_sub(region.rss);
        if let Some(node) = node.filter(|_| bytes > Bytes::ZERO) {
            *untouched.entry(node).or_default() += bytes;
        }
    }
    untouched
}

/// The node of a policy such as `bind:1` or `bind=static:1` (mm/mempolicy.c, `mpol_to_str`), if it is a single one.
fn bound_node(policy: &str) -> Option<u32> {
    let (mode, nodes) = policy.split_once(':')?;
    let nodes: IdSet = nodes.parse().ok().filter(|_| mode.split('=').next() == Some("bind"))?;
    let mut nodes = nodes.iter();
    nodes.next().filter(|_| nodes.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::AddressRange;

    #[test]
    fn memory_bound_to_a_single_node_counts_as_far_as_it_is_not_touched() {
        let region =
            |start: u64, rss| Region { rss: Bytes(rss), ..Region::empty(AddressRange { start, end: start + 0x1000 }) };
        let regions = [
            region(0x1000, 0),
            region(0x2000, 0x400),
            region(0x3000, 0x1000),
            region(0x4000, 0),
            region(0x5000, 0),
            Region { inode: 9, ..region(0x6000, 0) },
            Region { flags: VmFlags::HUGETLB, ..region(0x7000, 0) },
            region(0x8000, 0x200),
            region(0x9000, 0),
        ];
        let policies = [
            (0x1000, "bind:1"),
            (0x2000, "bind=static:1"),
            (0x3000, "bind:0"),
            (0x4000, "bind:0-1"),
            (0x5000, "prefer:1"),
            (0x6000, "bind:1"),
            (0x7000, "bind:1"),
            (0x8000, "bind:2"),
        ];
        let policies = policies.map(|(start, policy)| (start, policy.to_owned())).into();
        let expected = [(1, Bytes(0x1000 + 0xc00)), (2, Bytes(0xe00))];
        assert_eq!(untouched_bound_memory(&regions, &policies), expected.into());
    }
}
