//! The map: memory and threads of the selected processes by node.
//!
//! The RAM of a virtual machine with several virtual nodes is split by its memory backends. QEMU maps each backend as
//! a region of exactly its size. Backends of equal size, either private and without a file or not, are told apart by
//! their order: the kernel maps a new region below the earlier ones of its kind (`mmap_base` in arch/x86/mm/mmap.c), and
//! QEMU creates backends in the order of its command line. If the numbers of such backends and regions differ, these
//! backends have no memory in the map.

use crate::apply::PartNodes;
use crate::decide::bound_memory;
use crate::decide::frame_sharing::{self, FrameOwners};
use crate::decide::plan::PlannedVm;
use crate::decide::requested::{self, ForbiddenNode};
use crate::decide::{self, AccessCost, FrameReader, MergedFrames, NodeShares};
use crate::machine::{self, MachineFacts};
use crate::page_nodes::{PageKinds, PageNodeReader, PageNodes};
use crate::threads::{self, ThreadPlacement, ThreadRole};
use crate::topology::{LOCAL_DISTANCE, Topology};
use pagefold_base::identity::virtual_nodes::{self, VirtualNode};
use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::process::{Process, USER_HZ};
use pagefold_base::region::Region;
use pagefold_base::{Absent, Bytes, IdSet, Pages, Pfn, Pid, ProcessId, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{ProcessSelection, scan_scope};
use pagefold_host::observe::NumaNodes;
use pagefold_host::qemu_monitor::MonitorAccess;
use pagefold_host::{Host, ProcessHandle, observe, parse};
use std::collections::{BTreeMap, BTreeSet};

/// The placement of the selected processes.
#[derive(Clone, Debug)]
pub struct NumaMap {
    /// The nodes of the host.
    pub topology: Topology,
    /// The processes, the largest resident memory first.
    pub processes: Vec<ProcessPlacement>,
    /// Virtual machines that run beside these, without their memory: their virtual CPUs need room on nodes, too. Empty
    /// unless [`add_other_machines`] has read them.
    pub other_machines: Vec<ProcessPlacement>,
    /// The merged frames that these processes map, by the node of the frame.
    pub merged: BTreeMap<u32, MergedFrames>,
    /// Processes that were selected and could not be read.
    pub unscanned: Vec<UnscannedProcess>,
    /// The time since boot, in ticks of 10 ms.
    pub uptime_ticks: Reading<u64>,
}

/// The placement of a process.
#[derive(Clone, Debug)]
pub struct ProcessPlacement {
    /// The process.
    pub process: Process,
    /// All its memory.
    pub pages: PageNodes,
    /// The virtual nodes of a virtual machine, if it has any.
    pub virtual_nodes: Vec<VirtualNodePlacement>,
    /// Its threads.
    pub threads: Reading<Vec<ThreadPlacement>>,
    /// The nodes from which it may allocate memory (`Mems_allowed_list:`).
    pub allowed_nodes: Reading<IdSet>,
    /// The nodes to which memory backends are strictly bound that belong to no virtual node; `None` if there are none.
    pub bound_nodes: Option<IdSet>,
    /// Memory of strictly bound backends that it has not touched yet, by node.
    pub untouched_bound: BTreeMap<u32, Bytes>,
    /// The domain of libvirt that the process runs, if it runs one.
    pub libvirt: Option<LibvirtDomain>,
    /// Whether Pagefold has placed it in this boot ([`crate::placement_record::mark_placed`]).
    pub is_placed: bool,
    /// What QEMU's monitor and libvirt say about a virtual machine.
    pub machine: Option<MachineFacts>,
    /// Devices of the host that are passed through.
    pub devices: Vec<PassedThroughDevice>,
    /// Its expected accesses; `None` if threads or memory are not known.
    pub cost: Option<AccessCost>,
    /// The share of remote accesses to memory that can be moved: without merged pages and those of files.
    pub movable_remote_share: Option<f64>,
}

impl ProcessPlacement {
    /// Whether it is a virtual machine with a memory backend that is strictly bound to nodes, by its command line.
    fn has_bound_backend(&self) -> bool {
        self.bound_nodes.is_some() || self.virtual_nodes.iter().any(|node| node.node.bound_nodes().is_some())
    }

    /// The nodes that the machine may not use now, of those on which its parts are to be. `vm` is the machine in the
    /// problem.
    pub fn forbidden_nodes(&self, vm: &PlannedVm, parts: &[PartNodes]) -> Vec<ForbiddenNode> {
        let is_vcpu = |thread: &ThreadPlacement| matches!(thread.role, ThreadRole::Vcpu(_));
        let virtual_nodes: Vec<VirtualNode> = self.virtual_nodes.iter().map(|node| node.node.clone()).collect();
        requested::forbidden_nodes(vm, parts, &virtual_nodes, self.threads.iter().flatten().any(is_vcpu))
    }
}

/// A virtual node with its memory and virtual CPUs.
#[derive(Clone, Debug)]
pub struct VirtualNodePlacement {
    /// The node as configured.
    pub node: VirtualNode,
    /// Its memory; `None` if its region could not be identified.
    pub pages: Option<PageNodes>,
    /// The expected accesses of its virtual CPUs to its memory.
    pub cost: Option<AccessCost>,
}

/// A device of the host that a virtual machine uses directly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PassedThroughDevice {
    /// Its PCI address: `0000:3b:00.0`.
    pub address: String,
    /// Its node; absent if the machine does not say (-1).
    pub node: Reading<u32>,
}

/// Why there is no map.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// The nodes of the host cannot be read.
    #[error("cannot read the NUMA nodes of {host}")]
    Nodes {
        /// The host.
        host: String,
        /// The reason.
        source: Absent,
    },
    /// The processes cannot be listed or selected.
    #[error(transparent)]
    Selection(#[from] pagefold_census::Error),
}

/// Read the map of the selected processes, without asking any monitor.
///
/// # Errors
/// If processes cannot be listed, or the nodes of the host cannot be read.
pub fn read_map(host: &dyn Host, selection: &ProcessSelection) -> Result<NumaMap, MapError> {
    read_map_and_frames(host, selection, None).map(|(map, _)| map)
}

/// Read the map of the selected processes, and the merged frames that each of them maps, in the order of the processes.
/// With `monitors`, QEMU's monitors are asked about virtual machines.
///
/// # Errors
/// Those of [`read_map`].
pub fn read_map_and_frames(
    host: &dyn Host,
    selection: &ProcessSelection,
    monitors: Option<MonitorAccess>,
) -> Result<(NumaMap, Vec<FrameReader>), MapError> {
    let unreadable = |source| MapError::Nodes { host: host.describe(), source };
    let mut topology = Topology::read(host).map_err(unreadable)?;
    let frame_nodes = NumaNodes::read(host).map_err(unreadable)?;
    let reader = PageNodeReader::new(host, &frame_nodes);
    // Without root there are no page tables either.
    let domains = observe::libvirt_domains(host).unwrap_or_default();
    let (mut found, unscanned) = scan_scope::inspect_selected(host, selection, |handle, process| {
        read_process(host, &domains, &reader, handle, process)
    })?;
    found.sort_by_key(|(placement, _)| std::cmp::Reverse(placement.pages.resident()));
    let mut placements: Vec<&mut ProcessPlacement> = found.iter_mut().map(|(placement, _)| placement).collect();
    machine::add_machine_facts(host, &mut placements, monitors);
    let with_reader = |(mut placement, frames): (ProcessPlacement, Vec<Pfn>)| {
        let node = compute_costs(&topology, &mut placement);
        (placement, FrameReader { node, frames })
    };
    let (processes, readers): (Vec<ProcessPlacement>, Vec<FrameReader>) = found.into_iter().map(with_reader).unzip();
    processes.iter().for_each(|placement| topology.reserve(&placement.untouched_bound));
    let merged = decide::merged_frames(&readers, |frame| frame_nodes.node_of_frame(frame));
    let map = NumaMap {
        topology,
        processes,
        other_machines: Vec::new(),
        merged,
        unscanned,
        uptime_ticks: read_uptime_ticks(host),
    };
    Ok((map, readers))
}

/// Add to a map of some processes the virtual machines that run beside them. Those that cannot be read are unscanned
/// processes of the map then. With `monitors`, QEMU's monitors are asked about them.
///
/// # Errors
/// If processes cannot be listed.
pub fn add_other_machines(host: &dyn Host, map: &mut NumaMap, monitors: Option<MonitorAccess>) -> Result<(), MapError> {
    let domains = observe::libvirt_domains(host).unwrap_or_default();
    let mapped: BTreeSet<ProcessId> = map.processes.iter().map(|placement| placement.process.id).collect();
    let (found, unscanned) = scan_scope::inspect_selected(host, &ProcessSelection::default(), |handle, process| {
        if process.identity.vm.is_none() || mapped.contains(&process.id) {
            return Ok(None);
        }
        let mut placement = read_placement_without_memory(host, &domains, handle, process);
        // Of these, only the virtual CPUs matter, and memory that they will take.
        placement.threads.clone()?;
        if placement.has_bound_backend() {
            placement.untouched_bound = read_untouched_bound(handle, &observe::regions(handle)?);
        }
        Ok(Some(placement))
    })?;
    let known: BTreeSet<Pid> = map.unscanned.iter().map(|process| process.pid).collect();
    map.unscanned.extend(unscanned.into_iter().filter(|process| !known.contains(&process.pid)));
    map.other_machines = found.into_iter().flatten().collect();
    map.other_machines.iter().for_each(|placement| map.topology.reserve(&placement.untouched_bound));
    machine::add_machine_facts(host, &mut map.other_machines.iter_mut().collect::<Vec<_>>(), monitors);
    Ok(())
}

/// The maximum number of pairs of processes that are counted for each frame, over all frames: less than a second's work.
const MAX_FRAME_PAIRS: u64 = 4_000_000;

/// Which of the processes share merged frames.
///
/// # Errors
/// If the nodes of frames cannot be read.
pub fn read_frame_owners(host: &dyn Host, readers: &[FrameReader]) -> Reading<FrameOwners> {
    let nodes = NumaNodes::read(host)?;
    Ok(frame_sharing::frame_owners(readers, |frame| nodes.node_of_frame(frame), MAX_FRAME_PAIRS))
}

fn read_process(
    host: &dyn Host,
    domains: &[LibvirtDomain],
    reader: &PageNodeReader<'_>,
    handle: &dyn ProcessHandle,
    process: Process,
) -> Reading<(ProcessPlacement, Vec<Pfn>)> {
    let mut placement = read_placement_without_memory(host, domains, handle, process);
    let regions = observe::regions(handle)?;
    let configured: Vec<VirtualNode> = placement.virtual_nodes.iter().map(|node| node.node.clone()).collect();
    let node_of_region = assign_regions(&configured, &regions);
    let mut pages_by_virtual_node: BTreeMap<u32, PageNodes> = BTreeMap::new();
    let mut frames = Vec::new();
    for region in &regions {
        let found = reader.read_region(handle, region)?;
        placement.pages.add(&found.pages);
        frames.extend(found.merged_frames);
        if let Some(node) = node_of_region.get(&region.range.start) {
            pages_by_virtual_node.entry(*node).or_default().add(&found.pages);
        }
    }
    for node in &mut placement.virtual_nodes {
        node.pages = pages_by_virtual_node.remove(&node.node.id);
    }
    if placement.has_bound_backend() {
        placement.untouched_bound = read_untouched_bound(handle, &regions);
    }
    Ok((placement, frames))
}

/// Where policies cannot be read, no memory counts as bound.
fn read_untouched_bound(handle: &dyn ProcessHandle, regions: &[Region]) -> BTreeMap<u32, Bytes> {
    let policies = parse::memory_policies(&handle.read("numa_maps").unwrap_or_default());
    bound_memory::untouched_bound_memory(regions, &policies)
}

fn read_placement_without_memory(
    host: &dyn Host,
    domains: &[LibvirtDomain],
    handle: &dyn ProcessHandle,
    process: Process,
) -> ProcessPlacement {
    let arguments = process.arguments.as_deref().unwrap_or_default();
    let is_vm = process.identity.vm.is_some();
    let nodes = if is_vm { virtual_nodes::virtual_nodes(arguments) } else { Vec::new() };
    let bound_nodes = if is_vm { virtual_nodes::other_bound_nodes(arguments, &nodes) } else { None };
    let devices = virtual_nodes::passed_through_devices(arguments)
        .into_iter()
        .map(|address| PassedThroughDevice { node: read_device_node(host, &address), address })
        .collect();
    let runs_domain = |domain: &&LibvirtDomain| is_vm && domain.pid == process.id.pid;
    ProcessPlacement {
        pages: PageNodes::default(),
        virtual_nodes: nodes.into_iter().map(|node| VirtualNodePlacement { node, pages: None, cost: None }).collect(),
        threads: threads::read_threads(host, handle, is_vm),
        allowed_nodes: handle.read("status").and_then(|bytes| parse::status(&bytes).allowed_nodes),
        bound_nodes,
        untouched_bound: BTreeMap::new(),
        libvirt: domains.iter().find(runs_domain).cloned(),
        is_placed: false,
        machine: None,
        devices,
        cost: None,
        movable_remote_share: None,
        process,
    }
}

/// Fill in the expected accesses. Returns the node on which most of the CPU time is spent.
fn compute_costs(topology: &Topology, placement: &mut ProcessPlacement) -> Option<u32> {
    let threads = placement.threads.as_deref().unwrap_or_default();
    let cpu_shares = threads::cpu_shares(topology, threads::working_threads(threads));
    let mut movable = Vec::new();
    for node in &mut placement.virtual_nodes {
        let vcpus = threads::vcpu_threads(threads, &node.node);
        let cpu_shares = threads::cpu_shares(topology, vcpus);
        let Some(pages) = &node.pages else { continue };
        node.cost = access_cost(topology, &cpu_shares, pages, PageKinds::total);
        let cost = access_cost(topology, &cpu_shares, pages, PageKinds::movable);
        movable.extend(cost.map(|cost| (pages.by_node.values().map(|kinds| kinds.movable()).sum(), cost)));
    }
    let nodes = placement.virtual_nodes.iter();
    let by_virtual_node = nodes.filter_map(|node| Some((node.pages.as_ref()?.resident(), node.cost?)));
    let of_machine = |count| access_cost(topology, &cpu_shares, &placement.pages, count);
    placement.cost = decide::mean_cost(by_virtual_node).or_else(|| of_machine(PageKinds::total));
    let movable = decide::mean_cost(movable).or_else(|| of_machine(PageKinds::movable));
    placement.movable_remote_share = movable.map(|cost| cost.remote_share);
    cpu_shares.iter().max_by(|left, right| left.1.total_cmp(right.1)).map(|(&node, _)| node)
}

/// The cost of accesses to the pages that `count` counts.
fn access_cost(
    topology: &Topology,
    cpus: &NodeShares,
    pages: &PageNodes,
    count: fn(PageKinds) -> Pages,
) -> Option<AccessCost> {
    let memory = decide::shares(pages.by_node.iter().map(|(&node, kinds)| (node, count(*kinds).0)));
    decide::access_cost(cpus, &memory, |from, to| topology.distance(from, to), LOCAL_DISTANCE)
}

/// The virtual node of each region that is the memory of one, by the address of the region.
pub(crate) fn assign_regions(nodes: &[VirtualNode], regions: &[Region]) -> BTreeMap<u64, u32> {
    let mut assigned = BTreeMap::new();
    let mut nodes_by_kind: BTreeMap<(u64, bool), Vec<&VirtualNode>> = BTreeMap::new();
    for node in nodes {
        let Some(size) = node.memory_bytes else { continue };
        nodes_by_kind.entry((size, node.is_anonymous)).or_default().push(node);
    }
    for ((size, is_anonymous), mut same) in nodes_by_kind {
        same.sort_by_key(|node| node.backend_position);
        let is_kind = |region: &&Region| region.range.bytes().0 == size && (region.inode == 0) == is_anonymous;
        let regions: Vec<&Region> = regions.iter().filter(is_kind).collect();
        if regions.len() == same.len() {
            let descending = regions.into_iter().rev();
            assigned.extend(descending.zip(same).map(|(region, node)| (region.range.start, node.id)));
        }
    }
    assigned
}

/// The first number of `/proc/uptime` (fs/proc/uptime.c), in ticks of 10 ms.
pub fn read_uptime_ticks(host: &dyn Host) -> Reading<u64> {
    let bytes = host.read("proc/uptime")?;
    let text = String::from_utf8_lossy(&bytes);
    let seconds = text.split_whitespace().next().and_then(|seconds| seconds.parse::<f64>().ok());
    let seconds =
        seconds.filter(|seconds| *seconds >= 0.0).ok_or_else(|| Absent::Malformed("proc/uptime".to_owned()))?;
    Ok((seconds * USER_HZ) as u64)
}

/// The node of a PCI device (`numa_node`, drivers/pci/pci-sysfs.c). `NotOnThisKernel` if firmware does not say (-1).
pub fn read_device_node(host: &dyn Host, address: &str) -> Reading<u32> {
    let node: i64 = parse::number(&host.read(&format!("sys/bus/pci/devices/{address}/numa_node"))?)?;
    u32::try_from(node).map_err(|_| Absent::NotOnThisKernel)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::AddressRange;

    #[test]
    fn backends_of_equal_size_are_told_apart_by_kind_and_order() {
        let command = "qemu-system-x86_64 -object memory-backend-ram,id=a,size=32M \
                       -object memory-backend-memfd,id=b,size=32M -object memory-backend-ram,id=c,size=32M \
                       -numa node,memdev=a -numa node,memdev=b -numa node,memdev=c";
        let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        let nodes = virtual_nodes::virtual_nodes(&arguments);
        let region = |number: u64, inode| {
            let start = number << 30;
            Region { inode, ..Region::empty(AddressRange { start, end: start + (32 << 20) }) }
        };
        let assign = |regions: &[Region]| assign_regions(&nodes, regions);
        // The kernel may map a file above or below all memory without one.
        for file in [1, 4, 7] {
            let mut regions = vec![region(3, 0), region(file, 9), region(5, 0)];
            regions.sort_by_key(|region| region.range.start);
            assert_eq!(assign(&regions), [(5 << 30, 0), (file << 30, 1), (3 << 30, 2)].into(), "{file}");
        }
        // A region that was split, or another one of this size.
        assert_eq!(assign(&[region(3, 0), region(4, 9)]), [(4 << 30, 1)].into());
    }
}
