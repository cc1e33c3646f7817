//! What a placement of a machine would mean: remote accesses, memory to move, room, and merged frames.

use crate::apply::{MachineTarget, PartNodes};
use crate::decide::frame_sharing::{self, SharedFrames};
use crate::decide::plan::{self, PlacementProblem};
use crate::decide::pricing::PricedGain;
use crate::decide::requested::ForbiddenNode;
use crate::decide::{AccessCost, FrameReader};
use crate::map::{NumaMap, ProcessPlacement};
use crate::page_nodes::{PageKinds, PageNodes};
use crate::placement_record::predicted_cost;
use pagefold_base::{Bytes, PageSize, Pages, Pfn, Reading};
use pagefold_host::Host;
use pagefold_host::observe::NumaNodes;
use std::collections::BTreeMap;

/// The consequences of a placement.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementPrediction {
    /// The new nodes that the machine may not use now. All figures are those after a change of what restricts it.
    pub forbidden: Vec<ForbiddenNode>,
    /// What it gains against leaving the machine.
    pub gain: PricedGain,
    /// The expected accesses now.
    pub cost_before: Option<AccessCost>,
    /// The expected accesses afterwards.
    pub cost_after: Option<AccessCost>,
    /// Pages that would be moved, by kind.
    pub moved: PageKinds,
    /// Pages that stay on a node that is not the machine's: merged ones and those of files.
    pub kept: PageKinds,
    /// Memory that devices pin. The kernel does not move it.
    pub pinned: Reading<Bytes>,
    /// For each new node, what would come to it.
    pub nodes: Vec<NodeArrival>,
    /// Frames that it shares with other processes.
    pub shared: SharedFrames,
    /// Frames that KSM would need more with `merge_across_nodes=0`, with the machine where it is now.
    pub copies_before: Pages,
    /// The same with the machine on its new nodes. It counts as reading all its frames from the node that gets most of
    /// it.
    pub copies_after: Pages,
}

/// Memory and virtual CPUs that would come to a node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeArrival {
    /// The node.
    pub node: u32,
    /// Virtual CPUs on it then: those of the machine that come to it, and those of other machines, where they run now.
    pub vcpus: f64,
    /// Virtual CPUs on it now.
    pub vcpus_now: f64,
    /// Virtual CPUs that it may run.
    pub vcpu_capacity: f64,
    /// What would come to it, without hugetlb pages.
    pub arriving: Bytes,
    /// Free memory and pages of files there, without the headroom.
    pub room: Reading<Bytes>,
    /// Hugetlb pages that would come to it.
    pub arriving_hugetlb: Bytes,
    /// Free hugetlb pages there; absent if the host has pools of several sizes, because it is not known which one the
    /// machine uses.
    pub free_hugetlb: Reading<Bytes>,
}

impl NodeArrival {
    /// Whether its CPUs suffice, or none of the machine come to it.
    pub fn cpus_suffice(&self) -> bool {
        self.vcpus <= self.vcpu_capacity.max(self.vcpus_now) + plan::VCPU_TOLERANCE
    }

    /// Whether its CPUs and its memory suffice; `None` if the room for memory is not known.
    pub fn fits(&self) -> Option<bool> {
        if self.cpus_suffice() { self.memory_suffices() } else { Some(false) }
    }

    /// Whether its memory suffices; `None` if the room is not known.
    pub fn memory_suffices(&self) -> Option<bool> {
        let room = self.room.as_ref().ok()?;
        let hugetlb_fits = match &self.free_hugetlb {
            _ if self.arriving_hugetlb == Bytes::ZERO => true,
            free => self.arriving_hugetlb <= *free.as_ref().ok()?,
        };
        Some(self.arriving <= *room && hugetlb_fits)
    }
}

/// Predict a placement of a machine of the map and its problem. `readers` has the merged frames of all processes of the
/// map, in their order.
///
/// # Errors
/// If the nodes of frames cannot be read.
pub fn predict(
    host: &dyn Host,
    (map, problem): (&NumaMap, &PlacementProblem),
    readers: Vec<FrameReader>,
    target: &MachineTarget,
    headroom_share: f64,
) -> Reading<PlacementPrediction> {
    let placement = &map.processes[target.position];
    let frame_nodes = NumaNodes::read(host)?;
    let node_of_frame = |frame: Pfn| frame_nodes.node_of_frame(frame);
    let shared = frame_sharing::shared_frames(&readers, target.position);
    let copies_before = frame_sharing::copies_for_nodes(&readers, node_of_frame);
    let mut readers = readers;
    readers[target.position].node = main_node(&target.parts);
    let copies_after = frame_sharing::copies_for_nodes(&readers, node_of_frame);
    let memory = part_memory(placement, target.parts.len());
    let arrivals = arrivals(&memory, &target.parts);
    let nodes = node_arrivals((map, problem), target, &arrivals, host.page_size(), headroom_share);
    let vm = &problem.vms[target.position];
    Ok(PlacementPrediction {
        forbidden: placement.forbidden_nodes(vm, &target.parts),
        gain: plan::gain_of_placement(problem, target.position, &target.parts),
        cost_before: placement.cost,
        cost_after: predicted_cost(&map.topology, placement, &target.parts),
        moved: arrivals.into_values().fold(PageKinds::default(), |mut sum, kinds| {
            sum += kinds;
            sum
        }),
        kept: kept_pages(&memory, &target.parts),
        pinned: placement.process.pinned.clone(),
        nodes,
        shared,
        copies_before,
        copies_after,
    })
}

/// The node that gets most of the parts.
fn main_node(parts: &[PartNodes]) -> Option<u32> {
    let mut shares: BTreeMap<u32, f64> = BTreeMap::new();
    for &(node, share) in parts.iter().flatten() {
        *shares.entry(node).or_default() += share;
    }
    shares.into_iter().max_by(|left, right| left.1.total_cmp(&right.1)).map(|(node, _)| node)
}

/// The memory of each part: of its virtual node, or of the whole machine. The first one also has the monitor's memory.
fn part_memory(placement: &ProcessPlacement, count: usize) -> Vec<PageNodes> {
    if count == 1 {
        return vec![placement.pages.clone()];
    }
    let mut parts: Vec<PageNodes> =
        placement.virtual_nodes.iter().map(|node| node.pages.clone().unwrap_or_default()).collect();
    parts.resize(count, PageNodes::default());
    for (&node, all) in &placement.pages.by_node {
        let mut rest = *all;
        for kinds in parts.iter().filter_map(|part| part.by_node.get(&node)) {
            rest = rest.saturating_sub(*kinds);
        }
        *parts[0].by_node.entry(node).or_default() += rest;
    }
    parts
}

/// The pages that come to each new node from other nodes.
fn arrivals(parts: &[PageNodes], targets: &[PartNodes]) -> BTreeMap<u32, PageKinds> {
    let mut arrivals: BTreeMap<u32, PageKinds> = BTreeMap::new();
    for (memory, nodes) in parts.iter().zip(targets) {
        for &(node, share) in nodes {
            let arriving = arrivals.entry(node).or_default();
            for (_, kinds) in memory.by_node.iter().filter(|(from, _)| **from != node) {
                *arriving += PageKinds { merged: Pages::ZERO, file: Pages::ZERO, ..*kinds }.scaled(share);
            }
        }
    }
    arrivals
}

/// Merged pages and pages of files on nodes that are none of the part's.
fn kept_pages(parts: &[PageNodes], targets: &[PartNodes]) -> PageKinds {
    let mut kept = PageKinds::default();
    for (memory, nodes) in parts.iter().zip(targets) {
        for (_, kinds) in memory.by_node.iter().filter(|(node, _)| nodes.iter().all(|(target, _)| target != *node)) {
            kept += PageKinds { merged: kinds.merged, file: kinds.file, ..PageKinds::default() };
        }
    }
    kept
}

fn node_arrivals(
    (map, problem): (&NumaMap, &PlacementProblem),
    target: &MachineTarget,
    arrivals: &BTreeMap<u32, PageKinds>,
    page: PageSize,
    headroom_share: f64,
) -> Vec<NodeArrival> {
    let is_machine = |position: &usize| map.processes[*position].process.identity.vm.is_some();
    let machines = (0..map.processes.len()).filter(|position| is_machine(position) || *position == target.position);
    let vcpus_now = plan::vcpus_on_nodes(problem, machines.clone(), &BTreeMap::new());
    let vcpus = plan::vcpus_on_nodes(problem, machines, &[(target.position, &target.parts[..])].into());
    let node_arrival = |(&node, arriving): (&u32, &PageKinds)| {
        let on_node = map.topology.nodes.get(&node);
        let memory = on_node.map(|node| node.memory.clone());
        let capacity = problem.nodes.iter().find(|known| known.id == node);
        NodeArrival {
            node,
            vcpus: vcpus.get(&node).copied().unwrap_or(0.0),
            vcpus_now: vcpus_now.get(&node).copied().unwrap_or(0.0),
            vcpu_capacity: capacity.map_or(0.0, |node| node.vcpus),
            arriving: page.bytes_of(arriving.total().saturating_sub(arriving.hugetlb)),
            room: memory.unwrap_or_else(|| Ok(Default::default())).map(|memory| memory.room(headroom_share)),
            arriving_hugetlb: page.bytes_of(arriving.hugetlb),
            free_hugetlb: on_node.map_or(Ok(Bytes::ZERO), |node| node.free_hugetlb.clone()),
        }
    };
    arrivals.iter().map(node_arrival).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory with so many small, merged and file pages on each node.
    fn memory(nodes: &[(u32, u64, u64, u64)]) -> PageNodes {
        let kinds = |&(node, small, merged, file): &(u32, u64, u64, u64)| {
            let (small, merged, file) = (Pages(small), Pages(merged), Pages(file));
            (node, PageKinds { small, merged, file, ..PageKinds::default() })
        };
        PageNodes { by_node: nodes.iter().map(kinds).collect(), ..PageNodes::default() }
    }

    fn small(arrivals: &BTreeMap<u32, PageKinds>) -> Vec<(u32, u64)> {
        arrivals.iter().map(|(&node, kinds)| (node, kinds.small.0)).collect()
    }

    #[test]
    fn memory_on_other_nodes_arrives_without_merged_and_file_pages() {
        let parts = [memory(&[(0, 100, 10, 1), (1, 50, 20, 2)])];
        let to_one = [vec![(1, 1.0)]];
        assert_eq!(small(&arrivals(&parts, &to_one)), [(1, 100)]);
        assert_eq!(arrivals(&parts, &to_one)[&1].total(), Pages(100));
        let kept = kept_pages(&parts, &to_one);
        assert_eq!((kept.merged, kept.file, kept.total()), (Pages(10), Pages(1), Pages(11)));
    }

    #[test]
    fn spread_memory_arrives_by_the_shares_of_its_nodes() {
        let parts = [memory(&[(0, 100, 0, 0), (2, 40, 5, 0)])];
        let spread = [vec![(0, 0.25), (1, 0.75)]];
        // A quarter of the 40 pages of node 2 for node 0; three quarters of all for node 1.
        assert_eq!(small(&arrivals(&parts, &spread)), [(0, 10), (1, 105)]);
        assert_eq!(kept_pages(&parts, &spread).total(), Pages(5));
    }

    #[test]
    fn virtual_nodes_that_change_places_both_arrive() {
        let parts = [memory(&[(0, 70, 0, 0)]), memory(&[(1, 30, 0, 0), (0, 5, 0, 0)])];
        let exchanged = [vec![(1, 1.0)], vec![(0, 1.0)]];
        assert_eq!(small(&arrivals(&parts, &exchanged)), [(0, 30), (1, 70)]);
        assert_eq!(main_node(&[vec![(0, 0.2), (1, 0.8)], vec![(1, 1.0)]]), Some(1));
    }
}
