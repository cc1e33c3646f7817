//! The map in JSON.

use crate::decide::frame_sharing::{FrameOwners, OwnedFrames};
use crate::decide::machine::{VcpuSource, describe_policy};
use crate::decide::{AccessCost, MergedFrames};
use crate::machine::MachineFacts;
use crate::map::{NumaMap, ProcessPlacement, VirtualNodePlacement};
use crate::page_nodes::{PageKinds, PageNodes};
use crate::threads::{ThreadPlacement, ThreadRole};
use crate::topology::Topology;
use pagefold_base::identity::qemu_monitor::{MonitorAnswers, MonitorBackend, MonitorVcpu};
use pagefold_base::{Absent, IdSet, PageSize, Pages, Pid, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_output::wire::{ProcessInfo, UnscannedProcessReport};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of `pagefold numa map`. Figures that the kernel does not provide are absent, never 0.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NumaMapReport {
    /// `pagefold.numa-map/1`.
    pub schema: &'static str,
    /// What was read: `this host` or a recording.
    pub host: String,
    /// Bytes of a base page.
    pub page_size: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// The nodes of the host.
    pub nodes: Vec<NodeReport>,
    /// The processes, the largest resident memory first.
    pub processes: Vec<ProcessPlacementReport>,
    /// The merged frames that these processes map, by the node of the frame.
    pub merged_frames: Vec<MergedFramesReport>,
    /// Which of these processes share merged frames.
    pub frame_sharing: FrameSharingReport,
    /// Processes that were selected and could not be read.
    pub unscanned_processes: Vec<UnscannedProcessReport>,
}

/// A node of the host.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NodeReport {
    /// Its number.
    pub node: u32,
    /// Its CPUs that are online, as a list: `0-3,8`.
    pub cpus: String,
    /// Its memory in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_bytes: Option<u64>,
    /// The unused part of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_bytes: Option<u64>,
    /// The distance of its CPUs to the memory of each node, in the order of `nodes`; 10 for itself.
    pub distances: Vec<u32>,
}

/// The placement of a process.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ProcessPlacementReport {
    /// The process.
    #[serde(flatten)]
    pub process: ProcessInfo,
    /// The UUID of the domain of libvirt that it runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt_uuid: Option<String>,
    /// Its memory.
    #[serde(flatten)]
    pub memory: MemoryReport,
    /// The nodes from which it may allocate memory, as a list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_nodes: Option<String>,
    /// Pages pinned by drivers, which cannot be moved (`VmPin:`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_pages: Option<u64>,
    /// Its expected accesses: by its virtual CPUs, or by all threads of another program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<AccessReport>,
    /// The virtual nodes of a virtual machine.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub virtual_nodes: Vec<VirtualNodeReport>,
    /// Its threads, grouped by role and placement. Absent if they cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<Vec<ThreadGroupReport>>,
    /// What QEMU's monitor and libvirt say about a virtual machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub machine: Option<MachineReport>,
    /// Devices of the host that are passed through.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceReport>,
}

/// Memory by node, in pages.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MemoryReport {
    /// Pages in memory, without the kernel's zero page.
    pub resident_pages: u64,
    /// The nodes with pages.
    pub memory: Vec<NodePagesReport>,
    /// Pages that are swapped out.
    pub swapped_pages: u64,
    /// Pages of the kernel's zero page.
    pub zero_pages: u64,
}

/// The pages on a node.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NodePagesReport {
    /// The node.
    pub node: u32,
    /// Pages of all kinds.
    pub pages: u64,
    /// Private base pages.
    pub small_pages: u64,
    /// Base pages of transparent huge pages.
    pub huge_pages: u64,
    /// Base pages of hugetlb pages.
    pub hugetlb_pages: u64,
    /// Pages merged by KSM. Several pages may have one frame.
    pub merged_pages: u64,
    /// Base pages of shared memory, such as a memfd.
    pub shared_pages: u64,
    /// Base pages of files, such as those of programs and libraries.
    pub file_pages: u64,
}

/// Expected accesses, if each thread reads each page equally often.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct AccessReport {
    /// The share of accesses to another node than that of the CPU.
    pub remote_share: f64,
    /// The mean distance of an access relative to a local one; 1 if all are local.
    pub relative_distance: f64,
}

/// A virtual node of a virtual machine.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VirtualNodeReport {
    /// Its number in the guest.
    pub virtual_node: u32,
    /// Its virtual CPUs, as a list.
    pub vcpus: String,
    /// The id of its memory backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// The policy of the backend with the nodes of the host: `bind 0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Its memory; absent if its region could not be identified.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryReport>,
    /// The expected accesses of its virtual CPUs to its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accesses: Option<AccessReport>,
}

/// Threads of one role that run on one node and may run on the same CPUs.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ThreadGroupReport {
    /// `vcpu`, `iothread`, `vhost`, `emulator` (the main thread of a virtual machine) or `other`.
    pub role: &'static str,
    /// The numbers of virtual CPUs, as a list, or the name of an iothread.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Number of threads.
    pub threads: u64,
    /// The node on which they ran last, or will run if they may no longer run there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// The CPUs on which they ran last, as a list.
    pub last_cpus: String,
    /// The CPUs on which they may run, as a list.
    pub allowed_cpus: String,
}

/// A virtual machine by its monitor and libvirt.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MachineReport {
    /// Where the threads of vCPUs are known from: `monitor`, `libvirt` or `thread-names`.
    pub vcpu_source: &'static str,
    /// The vCPUs by this source; empty for `thread-names`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vcpus: Vec<VcpuReport>,
    /// vCPUs that can be plugged, by the monitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pluggable_vcpus: Option<u64>,
    /// The memory backends by the monitor, in the order of their ids.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory_backends: Vec<MemoryBackendReport>,
    /// Why the monitor did not answer at all, or not all questions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub monitor_failures: Vec<String>,
    /// Disagreements between the monitor, libvirt, the command line and names of threads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
}

/// A vCPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuReport {
    /// Its number.
    pub vcpu: u32,
    /// Its thread.
    pub thread: u32,
    /// Its virtual node, by the monitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub virtual_node: Option<u32>,
    /// Its socket, by the monitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket: Option<u32>,
    /// Its core within the socket, by the monitor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<u32>,
}

/// A memory backend.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MemoryBackendReport {
    /// The id of the object; not known from QEMU before 3.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its policy with the nodes of the host: `bind 0`.
    pub policy: String,
    /// Whether its memory is allocated in advance.
    pub preallocated: bool,
    /// Whether its memory is marked for KSM.
    pub mergeable: bool,
    /// Whether its memory is shared with other processes; not known from QEMU before 6.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<bool>,
}

/// A device of the host.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct DeviceReport {
    /// Its PCI address.
    pub address: String,
    /// Its node; absent if the machine does not say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
}

/// Merged frames on a node.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MergedFramesReport {
    /// The node.
    pub node: u32,
    /// Frames on it.
    pub frames: u64,
    /// The part of them that several of the processes map.
    pub shared_frames: u64,
    /// Frames of which most pages are mapped by processes of other nodes.
    pub remote_frames: u64,
    /// Pages that map them, by the node of the process.
    pub readers: Vec<FrameReadersReport>,
}

/// How processes share merged frames.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FrameSharingReport {
    /// Frames that several of the processes read.
    pub shared_frames: u64,
    /// The frames of them by which `shared_with` of processes is estimated: all, or a random sample.
    pub sampled_frames: u64,
    /// The processes that read merged frames, in the order of `processes`.
    pub owners: Vec<FrameOwnerReport>,
}

/// The merged frames that a process reads.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FrameOwnerReport {
    /// The process.
    pub pid: u32,
    /// Its merged frames, each counted once.
    pub frames: u64,
    /// The same by the node where they are.
    pub nodes: Vec<NodeFramesReport>,
    /// The part of them that others of the processes read, too.
    pub shared_frames: u64,
    /// The processes that share the most frames with it, at most 16.
    pub shared_with: Vec<SharingProcessReport>,
    /// Further processes that share frames with it.
    pub further_processes: u64,
}

/// Frames on a node.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct NodeFramesReport {
    /// The node.
    pub node: u32,
    /// The frames.
    pub frames: u64,
}

/// Frames that are shared with a process.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct SharingProcessReport {
    /// The process.
    pub pid: u32,
    /// The frames.
    pub frames: u64,
}

/// Pages that map merged frames.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct FrameReadersReport {
    /// The node on which the processes run mostly.
    pub node: u32,
    /// Their pages.
    pub pages: u64,
}

impl NumaMapReport {
    /// The report of a map, with the owners of its merged frames in the order of its processes.
    pub fn new(host: String, page_size: PageSize, (map, owners): (&NumaMap, &FrameOwners), seconds: f64) -> Self {
        let nodes: Vec<u32> = map.topology.nodes.keys().copied().collect();
        Self {
            schema: "pagefold.numa-map/1",
            host,
            page_size: page_size.bytes(),
            seconds,
            nodes: nodes.iter().map(|&id| node_report(&map.topology, id, &nodes)).collect(),
            processes: map
                .processes
                .iter()
                .map(|process| placement_report(process, &map.topology, page_size))
                .collect(),
            merged_frames: map.merged.iter().map(|(&node, merged)| merged_report(node, merged)).collect(),
            frame_sharing: frame_sharing_report(map, owners),
            unscanned_processes: unscanned_reports(map),
        }
    }

    /// Whether something could not be read.
    pub fn is_incomplete(&self) -> bool {
        !self.unscanned_processes.is_empty()
    }
}

/// The processes of a map that could not be read.
pub(super) fn unscanned_reports(map: &NumaMap) -> Vec<UnscannedProcessReport> {
    let report = |unscanned: &UnscannedProcess| {
        UnscannedProcessReport::new(unscanned.pid.0, unscanned.comm.clone(), &unscanned.why)
    };
    map.unscanned.iter().map(report).collect()
}

fn node_report(topology: &Topology, id: u32, nodes: &[u32]) -> NodeReport {
    let node = &topology.nodes[&id];
    NodeReport {
        node: id,
        cpus: node.cpus.to_string(),
        total_bytes: node.memory.as_ref().ok().map(|memory| memory.total.0),
        free_bytes: node.memory.as_ref().ok().map(|memory| memory.free.0),
        distances: nodes.iter().map(|&to| topology.distance(id, to)).collect(),
    }
}

fn placement_report(placement: &ProcessPlacement, topology: &Topology, page_size: PageSize) -> ProcessPlacementReport {
    let emulator = placement.process.identity.vm.as_ref().map(|_| placement.process.id.pid);
    ProcessPlacementReport {
        process: ProcessInfo::from_process(&placement.process, None),
        libvirt_uuid: placement.libvirt.as_ref().map(|domain| domain.uuid.clone()),
        memory: memory_report(&placement.pages),
        allowed_nodes: placement.allowed_nodes.as_ref().ok().map(ToString::to_string),
        pinned_pages: placement.process.pinned.as_ref().ok().map(|&pinned| page_size.pages_in(pinned).0),
        accesses: placement.cost.map(Into::into),
        virtual_nodes: placement.virtual_nodes.iter().map(virtual_node_report).collect(),
        threads: placement.threads.as_ref().ok().map(|threads| thread_groups(threads, emulator, topology)),
        machine: placement.machine.as_ref().map(machine_report),
        devices: placement
            .devices
            .iter()
            .map(|device| DeviceReport { address: device.address.clone(), node: device.node.as_ref().ok().copied() })
            .collect(),
    }
}

fn memory_report(pages: &PageNodes) -> MemoryReport {
    let node = |(&node, kinds): (&u32, &PageKinds)| NodePagesReport {
        node,
        pages: kinds.total().0,
        small_pages: kinds.small.0,
        huge_pages: kinds.huge.0,
        hugetlb_pages: kinds.hugetlb.0,
        merged_pages: kinds.merged.0,
        shared_pages: kinds.shared.0,
        file_pages: kinds.file.0,
    };
    MemoryReport {
        resident_pages: pages.resident().0,
        memory: pages.by_node.iter().map(node).collect(),
        swapped_pages: pages.swapped.0,
        zero_pages: pages.zero.0,
    }
}

impl From<AccessCost> for AccessReport {
    fn from(cost: AccessCost) -> Self {
        Self { remote_share: cost.remote_share, relative_distance: cost.relative_distance }
    }
}

fn virtual_node_report(placement: &VirtualNodePlacement) -> VirtualNodeReport {
    let node = &placement.node;
    VirtualNodeReport {
        virtual_node: node.id,
        vcpus: node.vcpus.to_string(),
        backend: node.backend.clone(),
        policy: node.policy.as_ref().map(|policy| format!("{policy} {}", node.host_nodes)),
        memory: placement.pages.as_ref().map(memory_report),
        accesses: placement.cost.map(Into::into),
    }
}

fn machine_report(facts: &MachineFacts) -> MachineReport {
    let answers = facts.monitor.as_ref().and_then(|monitor| monitor.as_ref().ok());
    let listed = answers.and_then(|answers| answers.vcpus.as_deref().ok()).unwrap_or_default();
    // The monitor's places of vCPUs belong to its threads.
    let listed: &[MonitorVcpu] = if facts.vcpu_source == VcpuSource::Monitor { listed } else { &[] };
    let vcpu = |(&vcpu, &thread): (&u32, &Pid)| {
        let place = listed.iter().find(|listed| listed.number == vcpu);
        VcpuReport {
            vcpu,
            thread: thread.0,
            virtual_node: place.and_then(|place| place.node),
            socket: place.and_then(|place| place.socket),
            core: place.and_then(|place| place.core),
        }
    };
    let backend = |backend: &MonitorBackend| MemoryBackendReport {
        id: backend.id.clone(),
        bytes: backend.bytes,
        policy: describe_policy(Some(&backend.policy), &backend.host_nodes),
        preallocated: backend.is_preallocated,
        mergeable: backend.is_mergeable,
        shared: backend.is_shared,
    };
    let listed_backends = answers.and_then(|answers| answers.backends.as_deref().ok()).unwrap_or_default();
    let mut memory_backends: Vec<MemoryBackendReport> = listed_backends.iter().map(backend).collect();
    // QEMU lists them in the order of a hash table.
    memory_backends.sort_by(|left, right| left.id.cmp(&right.id));
    MachineReport {
        vcpu_source: match facts.vcpu_source {
            VcpuSource::Monitor => "monitor",
            VcpuSource::Libvirt => "libvirt",
            VcpuSource::ThreadNames => "thread-names",
        },
        vcpus: facts.vcpu_threads.iter().map(vcpu).collect(),
        pluggable_vcpus: answers.and_then(|answers| answers.slots.as_ref().ok()).map(|slots| slots.free),
        memory_backends,
        monitor_failures: facts.monitor.as_ref().map(monitor_failures).unwrap_or_default(),
        conflicts: facts.conflicts.iter().map(ToString::to_string).collect(),
    }
}

/// Why a monitor did not answer. A machine without a monitor has none.
fn monitor_failures(monitor: &Reading<MonitorAnswers>) -> Vec<String> {
    let failures = match monitor {
        Ok(answers) => [answers.vcpus.as_ref().err(), answers.backends.as_ref().err(), answers.slots.as_ref().err()],
        Err(why) => [Some(why), None, None],
    };
    let mut texts: Vec<String> = failures
        .into_iter()
        .flatten()
        .filter(|why| **why != Absent::NotOnThisKernel)
        .map(ToString::to_string)
        .collect();
    texts.dedup();
    texts
}

/// The common properties of a group of threads, in the order of the report.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct ThreadGroupKey<'t> {
    role: ThreadGroupRole,
    /// Of an iothread: each has a group of its own.
    name: Option<&'t str>,
    node: Option<u32>,
    allowed_cpus: &'t IdSet,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ThreadGroupRole {
    Vcpu,
    Iothread,
    Vhost,
    /// The main thread of a virtual machine.
    Emulator,
    Other,
}

impl ThreadGroupRole {
    fn word(self) -> &'static str {
        match self {
            Self::Vcpu => "vcpu",
            Self::Iothread => "iothread",
            Self::Vhost => "vhost",
            Self::Emulator => "emulator",
            Self::Other => "other",
        }
    }
}

impl<'t> ThreadGroupKey<'t> {
    /// `emulator` is the main thread of a virtual machine.
    fn new(thread: &'t ThreadPlacement, emulator: Option<Pid>, topology: &Topology) -> Self {
        let (role, name) = match &thread.role {
            ThreadRole::Vcpu(_) => (ThreadGroupRole::Vcpu, None),
            ThreadRole::Iothread(name) => (ThreadGroupRole::Iothread, Some(name.as_str())),
            ThreadRole::Vhost => (ThreadGroupRole::Vhost, None),
            ThreadRole::Other if emulator == Some(thread.tid) => (ThreadGroupRole::Emulator, None),
            ThreadRole::Other => (ThreadGroupRole::Other, None),
        };
        Self { role, name, node: topology.node_of_cpu(thread.next_cpu()), allowed_cpus: &thread.allowed_cpus }
    }
}

/// Threads by role, node and permitted CPUs.
fn thread_groups(threads: &[ThreadPlacement], emulator: Option<Pid>, topology: &Topology) -> Vec<ThreadGroupReport> {
    let mut groups: BTreeMap<ThreadGroupKey<'_>, Vec<&ThreadPlacement>> = BTreeMap::new();
    for thread in threads {
        groups.entry(ThreadGroupKey::new(thread, emulator, topology)).or_default().push(thread);
    }
    let vcpu = |thread: &&ThreadPlacement| match thread.role {
        ThreadRole::Vcpu(number) => Some(number),
        _ => None,
    };
    let report = |(key, threads): (ThreadGroupKey<'_>, Vec<&ThreadPlacement>)| {
        let vcpus: IdSet = threads.iter().filter_map(vcpu).collect();
        ThreadGroupReport {
            role: key.role.word(),
            name: key.name.map(str::to_owned).or_else(|| (!vcpus.is_empty()).then(|| vcpus.to_string())),
            threads: threads.len() as u64,
            node: key.node,
            last_cpus: threads.iter().map(|thread| thread.last_cpu).collect::<IdSet>().to_string(),
            allowed_cpus: key.allowed_cpus.to_string(),
        }
    };
    groups.into_iter().map(report).collect()
}

/// Processes that are listed as sharing frames with one process.
const MAX_SHARING_PROCESSES: usize = 16;

fn frame_sharing_report(map: &NumaMap, owners: &FrameOwners) -> FrameSharingReport {
    let pid = |position: usize| map.processes[position].process.id.pid.0;
    let owner = |(position, owner): (usize, &OwnedFrames)| {
        let mut shared_with: Vec<SharingProcessReport> = owner
            .shared_with
            .iter()
            .map(|(&other, &Pages(frames))| SharingProcessReport { pid: pid(other), frames })
            .collect();
        shared_with.sort_by_key(|process| (std::cmp::Reverse(process.frames), process.pid));
        let further_processes = shared_with.len().saturating_sub(MAX_SHARING_PROCESSES) as u64;
        shared_with.truncate(MAX_SHARING_PROCESSES);
        FrameOwnerReport {
            pid: pid(position),
            frames: owner.frames_by_node.values().map(|frames| frames.0).sum(),
            nodes: owner
                .frames_by_node
                .iter()
                .map(|(&node, &Pages(frames))| NodeFramesReport { node, frames })
                .collect(),
            shared_frames: owner.shared_frames.0,
            shared_with,
            further_processes,
        }
    };
    let reading = owners.owners.iter().enumerate().filter(|(_, owner)| !owner.frames_by_node.is_empty());
    FrameSharingReport {
        shared_frames: owners.shared_frames.0,
        sampled_frames: owners.sampled_frames.0,
        owners: reading.map(owner).collect(),
    }
}

fn merged_report(node: u32, merged: &MergedFrames) -> MergedFramesReport {
    MergedFramesReport {
        node,
        frames: merged.frames.0,
        shared_frames: merged.shared_frames.0,
        remote_frames: merged.remote_frames.0,
        readers: merged.mapped_pages.iter().map(|(&node, &Pages(pages))| FrameReadersReport { node, pages }).collect(),
    }
}
