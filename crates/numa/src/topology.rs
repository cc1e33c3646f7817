//! The NUMA nodes of a host: CPUs, memory, distances (`/sys/devices/system/node`, drivers/base/node.c).

use pagefold_base::{Absent, Bytes, IdSet, Reading};
use pagefold_host::{Host, parse};
use std::collections::BTreeMap;

/// The distance of a node to itself in the tables of firmware and kernel (`LOCAL_DISTANCE` in
/// include/linux/topology.h). An access to a node at distance 20 takes about twice as long as a local one.
pub const LOCAL_DISTANCE: u32 = 10;

/// The distance between two nodes if firmware gives none (`REMOTE_DISTANCE` in include/linux/topology.h).
pub const REMOTE_DISTANCE: u32 = 20;

const NODE_DIRECTORY: &str = "sys/devices/system/node";

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its CPUs that are online; empty for a node with memory only.
    pub cpus: IdSet,
    /// Its memory; zero for a node with CPUs only.
    pub memory: Reading<NodeMemory>,
    /// Free hugetlb pages. `NotOnThisKernel` if there are pools of several sizes, because it is not known which one a
    /// machine uses.
    pub free_hugetlb: Reading<Bytes>,
    /// The distance of its CPUs to the memory of each node, [`LOCAL_DISTANCE`] for itself.
    pub distances: BTreeMap<u32, u32>,
}

/// The memory of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeMemory {
    /// `MemTotal:` of the node.
    pub total: Bytes,
    /// `MemFree:` of the node.
    pub free: Bytes,
    /// Pages of files, most of which the kernel gives up when memory is needed: `Active(file):` and `Inactive(file):`.
    pub file_cache: Bytes,
    /// Memory that machines are bound to there and have not touched yet ([`Topology::reserve`]).
    pub reserved: Bytes,
}

impl NodeMemory {
    /// What may be used: free memory and pages of files, without what is reserved and a share of the node's memory that
    /// stays free.
    pub fn room(&self, headroom_share: f64) -> Bytes {
        let headroom = Bytes((self.total.0 as f64 * headroom_share) as u64);
        (self.free + self.file_cache).saturating_sub(headroom + self.reserved)
    }
}

/// The nodes of a host by their numbers. There is at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The nodes that are online.
    pub nodes: BTreeMap<u32, NumaNode>,
}

impl Topology {
    /// Reads the nodes. A kernel without NUMA has one node with all CPUs.
    ///
    /// # Errors
    /// If the directory of nodes or the CPUs of a node cannot be read.
    pub fn read(host: &dyn Host) -> Reading<Self> {
        let mut ids: Vec<u32> = match host.list(NODE_DIRECTORY) {
            Ok(names) => names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect(),
            Err(Absent::NotOnThisKernel) => Vec::new(),
            Err(why) => return Err(why),
        };
        // Names are sorted as text: node10 before node2.
        ids.sort_unstable();
        if ids.is_empty() {
            let cpus = read_ids(host, "sys/devices/system/cpu/online").unwrap_or_default();
            let memory = pagefold_host::observe::memory(host).and_then(|memory| {
                Ok(NodeMemory { total: memory.total?, free: memory.free?, ..NodeMemory::default() })
            });
            let free_hugetlb = read_free_hugetlb(host, "sys/kernel/mm/hugepages");
            let node = NumaNode { cpus, memory, free_hugetlb, distances: [(0, LOCAL_DISTANCE)].into() };
            return Ok(Self { nodes: [(0, node)].into() });
        }
        let nodes = ids.iter().map(|&id| Ok((id, read_node(host, id, &ids)?))).collect::<Reading<_>>()?;
        Ok(Self { nodes })
    }

    /// Keeps memory of nodes for machines that are bound there.
    pub fn reserve(&mut self, bytes_by_node: &BTreeMap<u32, Bytes>) {
        for (node, &bytes) in bytes_by_node {
            if let Some(Ok(memory)) = self.nodes.get_mut(node).map(|node| &mut node.memory) {
                memory.reserved += bytes;
            }
        }
    }

    /// What is reserved on each node.
    pub fn reserved(&self) -> BTreeMap<u32, Bytes> {
        let reserved = |(&id, node): (&u32, &NumaNode)| Some((id, node.memory.as_ref().ok()?.reserved));
        self.nodes.iter().filter_map(reserved).collect()
    }

    /// The node of a CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<u32> {
        self.nodes.iter().find(|(_, node)| node.cpus.contains(cpu)).map(|(&id, _)| id)
    }

    /// The nodes to which CPUs belong.
    pub fn nodes_of_cpus(&self, cpus: &IdSet) -> IdSet {
        self.nodes
            .iter()
            .filter(|(_, node)| node.cpus.iter().any(|cpu| cpus.contains(cpu)))
            .map(|(&id, _)| id)
            .collect()
    }

    /// The distance of a node's CPUs to the memory of another node.
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        let listed = self.nodes.get(&from).and_then(|node| node.distances.get(&to).copied());
        listed.unwrap_or(if from == to { LOCAL_DISTANCE } else { REMOTE_DISTANCE })
    }
}

fn read_node(host: &dyn Host, id: u32, ids: &[u32]) -> Reading<NumaNode> {
    let folder = format!("{NODE_DIRECTORY}/node{id}");
    let distances = host.read(&format!("{folder}/distance")).unwrap_or_default();
    let distances = distances.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(parse::number::<u32>);
    Ok(NumaNode {
        cpus: read_ids(host, &format!("{folder}/cpulist"))?,
        memory: host.read(&format!("{folder}/meminfo")).and_then(|bytes| parse_node_memory(&bytes)),
        free_hugetlb: read_free_hugetlb(host, &format!("{folder}/hugepages")),
        // The kernel lists the nodes that are online, ascending (`node_read_distance`).
        distances: ids.iter().copied().zip(distances).filter_map(|(to, distance)| Some((to, distance.ok()?))).collect(),
    })
}

fn read_ids(host: &dyn Host, path: &str) -> Reading<IdSet> {
    Ok(parse::number_list(&host.read(path)?)?.into_iter().collect())
}

/// The free hugetlb pages of the pools in a folder (mm/hugetlb_sysfs.c).
fn read_free_hugetlb(host: &dyn Host, folder: &str) -> Reading<Bytes> {
    let count = |pool: &str, file: &str| -> Option<u64> {
        parse::number(&host.read(&format!("{folder}/{pool}/{file}")).ok()?).ok()
    };
    let pool = |name: &String| {
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let is_used = count(name, "nr_hugepages")? > 0;
        is_used.then(|| Some(Bytes::from_kib(kib.saturating_mul(count(name, "free_hugepages")?))))?
    };
    let pools: Vec<Bytes> = host.list(folder).unwrap_or_default().iter().filter_map(pool).collect();
    match pools[..] {
        [] => Ok(Bytes::ZERO),
        [free] => Ok(free),
        _ => Err(Absent::NotOnThisKernel),
    }
}

/// Parses lines such as `Node 0 MemTotal:       24680 kB` (`node_read_meminfo`).
fn parse_node_memory(bytes: &[u8]) -> Reading<NodeMemory> {
    let text = String::from_utf8_lossy(bytes);
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.split_once(&format!(" {name}")).map(|(_, value)| value.trim()));
        let kib = line.and_then(|value| value.strip_suffix("kB")?.trim().parse().ok());
        kib.map(Bytes::from_kib).ok_or_else(|| Absent::Malformed(format!("no {name} in the meminfo of a node")))
    };
    let cache = |name: &str| field(name).unwrap_or_default();
    let file_cache = cache("Active(file):") + cache("Inactive(file):");
    Ok(NodeMemory { total: field("MemTotal:")?, free: field("MemFree:")?, file_cache, reserved: Bytes::ZERO })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_host::fake_host::FakeHost;

    fn put_node(host: &FakeHost, id: u32, cpus: &str, kib: u64, distances: &str) {
        let folder = format!("{NODE_DIRECTORY}/node{id}");
        host.put_file(&format!("{folder}/cpulist"), &format!("{cpus}\n"));
        host.put_file(&format!("{folder}/distance"), &format!("{distances}\n"));
        let memory = format!("Node {id} MemTotal:       {kib} kB\nNode {id} MemFree:        {} kB\n", kib / 2);
        host.put_file(&format!("{folder}/meminfo"), &memory);
    }

    #[test]
    fn nodes_have_cpus_memory_and_distances() {
        let host = FakeHost::booted();
        put_node(&host, 0, "0-1,4", 1000, "10 21 31");
        put_node(&host, 2, "2-3", 2000, "21 10 17");
        put_node(&host, 10, "", 3000, "31 17 10");
        let topology = Topology::read(&host).unwrap();
        assert_eq!(topology.nodes.keys().copied().collect::<Vec<_>>(), [0, 2, 10]);
        assert_eq!(
            topology.nodes[&2].memory,
            Ok(NodeMemory { total: Bytes(2_048_000), free: Bytes(1_024_000), ..NodeMemory::default() })
        );
        assert_eq!((topology.distance(0, 10), topology.distance(10, 0), topology.distance(2, 2)), (31, 31, 10));
        assert_eq!(topology.distance(0, 9), REMOTE_DISTANCE, "an unknown node");
        assert_eq!([4, 3, 9].map(|cpu| topology.node_of_cpu(cpu)), [Some(0), Some(2), None]);
        assert_eq!(topology.nodes_of_cpus(&"1-2".parse().unwrap()).to_string(), "0,2");
    }

    #[test]
    fn room_leaves_headroom_and_what_is_reserved() {
        let host = FakeHost::booted();
        (0..2).for_each(|id| put_node(&host, id, "", 1000, "10 20"));
        let mut topology = Topology::read(&host).unwrap();
        topology.reserve(&[(1, Bytes::from_kib(100)), (7, Bytes::from_kib(1))].into());
        topology.reserve(&[(1, Bytes::from_kib(50))].into());
        assert_eq!(topology.reserved(), [(0, Bytes::ZERO), (1, Bytes::from_kib(150))].into());
        let room = |id: u32, headroom| topology.nodes[&id].memory.as_ref().unwrap().room(headroom);
        // 500 KiB are free.
        assert_eq!([room(0, 0.1), room(1, 0.1)], [400, 250].map(Bytes::from_kib));
        assert_eq!(room(1, 0.4), Bytes::ZERO);
    }

    #[test]
    fn free_hugetlb_pages_are_known_for_a_single_pool() {
        let host = FakeHost::booted();
        let put_pool = |node: u32, kib: u32, count: u32, free: u32| {
            let folder = format!("{NODE_DIRECTORY}/node{node}/hugepages/hugepages-{kib}kB");
            host.put_file(&format!("{folder}/nr_hugepages"), &format!("{count}\n"));
            host.put_file(&format!("{folder}/free_hugepages"), &format!("{free}\n"));
        };
        (0..3).for_each(|id| put_node(&host, id, "", 1000, "10 20 20"));
        put_pool(1, 2048, 8, 3);
        put_pool(1, 1_048_576, 0, 0);
        put_pool(2, 2048, 8, 3);
        put_pool(2, 1_048_576, 1, 0);
        let topology = Topology::read(&host).unwrap();
        let free = [0, 1, 2].map(|node| topology.nodes[&node].free_hugetlb.clone());
        assert_eq!(free, [Ok(Bytes::ZERO), Ok(Bytes(3 << 21)), Err(Absent::NotOnThisKernel)]);
    }

    #[test]
    fn kernel_without_numa_has_one_node() {
        let host = FakeHost::booted();
        host.put_file("sys/devices/system/cpu/online", "0-3\n");
        let topology = Topology::read(&host).unwrap();
        assert_eq!(topology.nodes.len(), 1);
        assert_eq!((topology.nodes[&0].cpus.to_string(), topology.distance(0, 0)), ("0-3".to_owned(), 10));
    }

    #[test]
    fn unreadable_nodes_are_absent() {
        let host = FakeHost::booted();
        put_node(&host, 0, "0-x", 1000, "10");
        assert!(matches!(Topology::read(&host), Err(Absent::Malformed(_))));
        put_node(&host, 0, "0", 1000, "10 ?");
        host.put_file(&format!("{NODE_DIRECTORY}/node0/meminfo"), "Node 0 MemTotal: many kB\n");
        let topology = Topology::read(&host).unwrap();
        assert!(matches!(topology.nodes[&0].memory, Err(Absent::Malformed(_))));
    }
}
