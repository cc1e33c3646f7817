//! What a placement would mean, in JSON.

use super::apply::PartNodesReport;
use super::map::AccessReport;
use crate::apply::MachineTarget;
use crate::decide::requested::ForbiddenNode;
use crate::map::NumaMap;
use crate::page_nodes::PageKinds;
use crate::placement_record::machine_name;
use crate::predict::{NodeArrival, PlacementPrediction};
use pagefold_base::{Bytes, PageSize};
use pagefold_output::wire::{GainReport, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;

/// The result of `pagefold numa predict`.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NumaPredictReport {
    /// `pagefold.numa-predict/1`.
    pub schema: &'static str,
    /// What was read: `this host` or a recording.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Bytes that are moved in a second.
    pub bandwidth: u64,
    /// The machines, each as if it alone were placed.
    pub machines: Vec<MachinePredictionReport>,
    /// Processes that could not be read: they may share merged frames, too.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// What the placement of a machine would mean.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachinePredictionReport {
    /// Its process number.
    pub pid: u32,
    /// When the process began, in clock ticks since boot.
    pub start_time: u64,
    /// The name of the machine or program.
    pub name: String,
    /// The nodes of each virtual node, or of the whole machine.
    pub parts: Vec<PartNodesReport>,
    /// The new nodes that it may not use now. All figures are those after a change of what restricts it.
    pub forbidden_nodes: Vec<ForbiddenNodeReport>,
    /// What the placement gains against leaving the machine.
    pub gain: GainReport,
    /// The expected accesses now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses_before: Option<AccessReport>,
    /// The expected accesses afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses_after: Option<AccessReport>,
    /// Base pages to move, by kind.
    pub moved_pages: MovedPagesReport,
    /// Bytes to move.
    pub moved_bytes: u64,
    /// Seconds to move them at the bandwidth.
    pub seconds: f64,
    /// Merged pages that stay on another node.
    pub kept_merged_pages: u64,
    /// Pages of files that stay on another node.
    pub kept_file_pages: u64,
    /// Pages that devices pin, which stay; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_pages: Option<u64>,
    /// What would come to each new node.
    pub nodes: Vec<NodeArrivalReport>,
    /// Merged frames that it shares with other processes.
    pub shared_frames: u64,
    /// Pages of other processes that would move with these frames if they were moved by `MPOL_MF_MOVE_ALL` or
    /// `cpuset.mems`. `numa apply` leaves them.
    pub dragged_neighbors: Vec<DraggedNeighborReport>,
    /// Bytes that `merge_across_nodes=0` would cost now, in copies of merged frames for each node.
    pub copies_before_bytes: u64,
    /// The same after the placement.
    pub copies_after_bytes: u64,
}

/// A new node that a machine, or one of its virtual nodes, may not use now.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ForbiddenNodeReport {
    /// The node.
    pub node: u32,
    /// The virtual node; absent if it is the whole machine that may not use the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_node: Option<u32>,
    /// The nodes that are permitted, such as `0-1`.
    pub permitted_nodes: String,
    /// What restricts it, and how to change that.
    pub reason: String,
}

impl From<&ForbiddenNode> for ForbiddenNodeReport {
    fn from(forbidden: &ForbiddenNode) -> Self {
        let ForbiddenNode { node, virtual_node, permitted, reason } = forbidden;
        let (node, virtual_node) = (*node, *virtual_node);
        Self { node, virtual_node, permitted_nodes: permitted.to_string(), reason: reason.clone() }
    }
}

/// Base pages by kind.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct MovedPagesReport {
    /// Private base pages.
    pub small: u64,
    /// In transparent huge pages.
    pub huge: u64,
    /// In hugetlb pages.
    pub hugetlb: u64,
    /// Of shared memory.
    pub shared: u64,
}

/// Memory and virtual CPUs that would come to a node.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct NodeArrivalReport {
    /// The node.
    pub node: u32,
    /// Virtual CPUs on it then: those of the machine that come to it, and those of other machines, where they run now.
    pub vcpus: f64,
    /// Virtual CPUs on it now.
    pub vcpus_now: f64,
    /// Virtual CPUs that it may run.
    pub vcpu_capacity: f64,
    /// Whether its CPUs suffice, or it gets no more virtual CPUs than it has now.
    pub cpus_suffice: bool,
    /// Bytes that would come to it, without hugetlb pages.
    pub arriving_bytes: u64,
    /// Free memory and pages of files there, without the headroom; absent if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub room_bytes: Option<u64>,
    /// Bytes of hugetlb pages that would come to it.
    pub arriving_hugetlb_bytes: u64,
    /// Bytes of free hugetlb pages there; absent if there are pools of several sizes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_hugetlb_bytes: Option<u64>,
    /// Whether its memory suffices; absent if the room is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_suffices: Option<bool>,
    /// Whether its CPUs and its memory suffice; absent if the room for memory is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fits: Option<bool>,
}

/// A process that shares merged frames with the machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DraggedNeighborReport {
    /// Its process number.
    pub pid: u32,
    /// The name of the machine or program.
    pub name: String,
    /// Its pages that map these frames.
    pub pages: u64,
}

impl NumaPredictReport {
    /// The report of the predictions for machines of a map.
    pub fn new(
        host: String,
        page_size: PageSize,
        bandwidth: Bytes,
        map: &NumaMap,
        predictions: &[(MachineTarget, PlacementPrediction)],
    ) -> Self {
        let machine = |(target, prediction): &(MachineTarget, PlacementPrediction)| {
            machine_report(map, page_size, bandwidth, target, prediction)
        };
        Self {
            schema: "pagefold.numa-predict/1",
            host,
            page_size: page_size.bytes(),
            bandwidth: bandwidth.0,
            machines: predictions.iter().map(machine).collect(),
            unscanned_processes: super::map::unscanned_reports(map),
        }
    }

    /// Whether a machine does not fit on its new nodes, or may not use them now.
    pub fn has_obstacle(&self) -> bool {
        let is_misfit = |node: &NodeArrivalReport| node.fits == Some(false);
        self.machines.iter().any(|machine| !machine.forbidden_nodes.is_empty() || machine.nodes.iter().any(is_misfit))
    }
}

fn machine_report(
    map: &NumaMap,
    page_size: PageSize,
    bandwidth: Bytes,
    target: &MachineTarget,
    prediction: &PlacementPrediction,
) -> MachinePredictionReport {
    let placement = &map.processes[target.position];
    let moved_bytes = page_size.bytes_of(prediction.moved.total()).0;
    let PageKinds { small, huge, hugetlb, shared, .. } = prediction.moved;
    let neighbor = |(&position, pages): (&usize, &pagefold_base::Pages)| DraggedNeighborReport {
        pid: map.processes[position].process.id.pid.0,
        name: machine_name(&map.processes[position]),
        pages: pages.0,
    };
    let mut dragged: Vec<DraggedNeighborReport> = prediction.shared.dragged_pages.iter().map(neighbor).collect();
    dragged.sort_by_key(|neighbor| std::cmp::Reverse(neighbor.pages));
    MachinePredictionReport {
        pid: placement.process.id.pid.0,
        start_time: placement.process.id.start_time,
        name: machine_name(placement),
        parts: target.parts.iter().map(Into::into).collect(),
        forbidden_nodes: prediction.forbidden.iter().map(Into::into).collect(),
        gain: prediction.gain.into(),
        accesses_before: prediction.cost_before.map(Into::into),
        accesses_after: prediction.cost_after.map(Into::into),
        moved_pages: MovedPagesReport { small: small.0, huge: huge.0, hugetlb: hugetlb.0, shared: shared.0 },
        moved_bytes,
        seconds: moved_bytes as f64 / bandwidth.0.max(1) as f64,
        kept_merged_pages: prediction.kept.merged.0,
        kept_file_pages: prediction.kept.file.0,
        pinned_pages: prediction.pinned.as_ref().ok().map(|&pinned| page_size.pages_in(pinned).0),
        nodes: prediction.nodes.iter().map(arrival_report).collect(),
        shared_frames: prediction.shared.frames.0,
        dragged_neighbors: dragged,
        copies_before_bytes: page_size.bytes_of(prediction.copies_before).0,
        copies_after_bytes: page_size.bytes_of(prediction.copies_after).0,
    }
}

fn arrival_report(arrival: &NodeArrival) -> NodeArrivalReport {
    NodeArrivalReport {
        node: arrival.node,
        vcpus: arrival.vcpus,
        vcpus_now: arrival.vcpus_now,
        vcpu_capacity: arrival.vcpu_capacity,
        cpus_suffice: arrival.cpus_suffice(),
        arriving_bytes: arrival.arriving.0,
        room_bytes: arrival.room.as_ref().ok().map(|room| room.0),
        arriving_hugetlb_bytes: arrival.arriving_hugetlb.0,
        free_hugetlb_bytes: arrival.free_hugetlb.as_ref().ok().map(|free| free.0),
        memory_suffices: arrival.memory_suffices(),
        fits: arrival.fits(),
    }
}
