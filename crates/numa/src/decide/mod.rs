//! Pure figures of a placement: remote accesses, and the readers of merged frames.

pub mod balancing;
pub mod bound_memory;
pub mod content_overlap;
pub mod frame_sharing;
pub mod keeper;
pub mod machine;
pub mod plan;
pub mod pricing;
pub mod requested;
pub mod schedule;
pub mod steps;
pub mod working_set;

use pagefold_base::{Pages, Pfn};
use std::collections::{BTreeMap, BTreeSet};

/// Accesses from the CPUs of a node to memory, as shares that add up to at most 1.
pub type NodeShares = BTreeMap<u32, f64>;

/// The accesses of some threads to some memory, if each thread reads each page equally often.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct AccessCost {
    /// The share of accesses to another node than that of the CPU.
    pub remote_share: f64,
    /// The mean distance of an access relative to a local one: 1 if all are local.
    pub relative_distance: f64,
}

/// The shares of counts by node. Empty if there is nothing.
pub fn shares(counts: impl IntoIterator<Item = (u32, u64)>) -> NodeShares {
    let mut sums: BTreeMap<u32, u64> = BTreeMap::new();
    for (node, count) in counts {
        *sums.entry(node).or_default() += count;
    }
    let total: u64 = sums.values().sum();
    sums.into_iter().filter(|&(_, count)| count > 0).map(|(node, count)| (node, count as f64 / total as f64)).collect()
}

/// The cost of accesses from CPUs to memory with these shares by node. `distance` is the distance of a node's CPUs to
/// the memory of a node, relative to `local_distance`. `None` without CPUs or memory.
pub fn access_cost(
    cpus: &NodeShares,
    memory: &NodeShares,
    distance: impl Fn(u32, u32) -> u32,
    local_distance: u32,
) -> Option<AccessCost> {
    if cpus.is_empty() || memory.is_empty() {
        return None;
    }
    let mut cost = AccessCost::default();
    for (&from, from_share) in cpus {
        for (&to, to_share) in memory {
            let share = from_share * to_share;
            cost.remote_share += if from == to { 0.0 } else { share };
            cost.relative_distance += share * f64::from(distance(from, to)) / f64::from(local_distance);
        }
    }
    Some(cost)
}

/// The mean of costs, weighted by pages.
pub fn mean_cost(parts: impl IntoIterator<Item = (Pages, AccessCost)>) -> Option<AccessCost> {
    let (mut sum, mut pages) = (AccessCost::default(), 0.0);
    for (weight, cost) in parts {
        let weight = weight.0 as f64;
        sum.remote_share += weight * cost.remote_share;
        sum.relative_distance += weight * cost.relative_distance;
        pages += weight;
    }
    (pages > 0.0).then(|| AccessCost {
        remote_share: sum.remote_share / pages,
        relative_distance: sum.relative_distance / pages,
    })
}

/// A process that maps merged frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FrameReader {
    /// The node on which most of its CPU time is spent; `None` if that is not known.
    pub node: Option<u32>,
    /// The frame of each merged page, in any order; a frame may occur several times.
    pub frames: Vec<Pfn>,
}

/// The merged frames of a node that the selected processes map.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MergedFrames {
    /// Frames on this node.
    pub frames: Pages,
    /// The part of them that several processes map: moving it moves the memory of all of them.
    pub shared_frames: Pages,
    /// Pages that map them, by the node of the process.
    pub mapped_pages: BTreeMap<u32, Pages>,
    /// Frames of which most pages are mapped by processes of other nodes.
    pub remote_frames: Pages,
}

/// Group merged frames by their node.
pub fn merged_frames(readers: &[FrameReader], node_of_frame: impl Fn(Pfn) -> u32) -> BTreeMap<u32, MergedFrames> {
    let mut mapped: Vec<(Pfn, usize)> = Vec::new();
    for (position, reader) in readers.iter().enumerate() {
        mapped.extend(reader.frames.iter().map(|&frame| (frame, position)));
    }
    mapped.sort_unstable();
    let mut by_node: BTreeMap<u32, MergedFrames> = BTreeMap::new();
    for pages in mapped.chunk_by(|left, right| left.0 == right.0) {
        let home = node_of_frame(pages[0].0);
        let merged = by_node.entry(home).or_default();
        merged.frames += Pages(1);
        let processes: BTreeSet<usize> = pages.iter().map(|&(_, position)| position).collect();
        merged.shared_frames += Pages(u64::from(processes.len() > 1));
        let (mut local, mut remote) = (0, 0);
        for node in pages.iter().filter_map(|&(_, position)| readers[position].node) {
            *merged.mapped_pages.entry(node).or_default() += Pages(1);
            *if node == home { &mut local } else { &mut remote } += 1;
        }
        merged.remote_frames += Pages(u64::from(remote > local));
    }
    by_node
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn distance(from: u32, to: u32) -> u32 {
        if from == to { 10 } else { 21 }
    }

    #[test]
    fn remote_share_follows_cpus_and_memory() {
        let cost = |cpus: &[(u32, u64)], memory: &[(u32, u64)]| {
            access_cost(&shares(cpus.iter().copied()), &shares(memory.iter().copied()), distance, 10)
        };
        assert_eq!(cost(&[(0, 4)], &[(0, 100)]), Some(AccessCost { remote_share: 0.0, relative_distance: 1.0 }));
        assert_eq!(cost(&[(0, 4)], &[(1, 100)]), Some(AccessCost { remote_share: 1.0, relative_distance: 2.1 }));
        let half = cost(&[(0, 2), (1, 2)], &[(0, 75), (1, 25)]).unwrap();
        assert!((half.remote_share - 0.5).abs() < 1e-12 && (half.relative_distance - 1.55).abs() < 1e-12, "{half:?}");
        assert_eq!(cost(&[], &[(0, 1)]), None);
        assert_eq!(cost(&[(0, 1)], &[(0, 0)]), None);
    }

    #[test]
    fn mean_is_weighted_by_pages() {
        let cost = |remote_share| AccessCost { remote_share, relative_distance: 1.0 + remote_share };
        let mean = mean_cost([(Pages(300), cost(0.0)), (Pages(100), cost(1.0))]).unwrap();
        assert!((mean.remote_share - 0.25).abs() < 1e-12 && (mean.relative_distance - 1.25).abs() < 1e-12);
        assert_eq!(mean_cost([]), None);
    }

    #[test]
    fn merged_frames_have_home_and_readers() {
        let reader =
            |node, frames: &[u64]| FrameReader { node, frames: frames.iter().map(|&frame| Pfn(frame)).collect() };
        // Frames from 100 on are on node 1.
        let readers = [reader(Some(0), &[1, 1, 100]), reader(Some(1), &[1, 2, 100]), reader(None, &[2])];
        let by_node = merged_frames(&readers, |frame| u32::from(frame.0 >= 100));
        let expected = |frames, shared, mapped: &[(u32, u64)], remote| MergedFrames {
            frames: Pages(frames),
            shared_frames: Pages(shared),
            mapped_pages: mapped.iter().map(|&(node, pages)| (node, Pages(pages))).collect(),
            remote_frames: Pages(remote),
        };
        assert_eq!(by_node[&0], expected(2, 2, &[(0, 2), (1, 2)], 1), "frame 2 is only read from node 1");
        assert_eq!(by_node[&1], expected(1, 1, &[(0, 1), (1, 1)], 0));
    }

    proptest! {
        #[test]
        fn remote_share_is_a_share(cpus in prop::collection::vec((0u32..4, 0u64..9), 0..6),
                                   memory in prop::collection::vec((0u32..4, 0u64..9), 0..6)) {
            if let Some(cost) = access_cost(&shares(cpus), &shares(memory), distance, 10) {
                prop_assert!((-1e-9..=1.0 + 1e-9).contains(&cost.remote_share));
                prop_assert!((cost.relative_distance - (1.0 + 1.1 * cost.remote_share)).abs() < 1e-9);
            }
        }
    }
}
