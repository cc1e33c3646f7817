//! The nodes of the host for a machine that is wider than a node.
//!
//! Memory of virtual nodes is bound strictly, so a node must have it beside what machines that are bound to this node take,
//! and beside what the same plan gives the machines before this one. CPUs may be shared: of the nodes that have the
//! memory, those with the fewest virtual CPUs for each CPU are chosen. Machines that are not bound do not count, because the
//! kernel can move them.

use super::super::facts::VmFacts;
use super::super::memory::{bound_nodes, node_cpus, node_memory};
use crate::decide::change::HostNode;
use crate::decide::{HostFacts, MissingReading};
use pagefold_base::IdSet;
use pagefold_base::identity::vm_definition::VmDefinition;
use std::collections::BTreeMap;

/// What a machine that is wider than a node needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WideMachine {
    pub(super) vcpus: u64,
    /// `None` if it cannot be read.
    pub(super) memory_bytes: Option<u64>,
    /// The smallest number of nodes that hold it.
    pub(super) parts: u64,
}

impl WideMachine {
    /// What a machine needs on nodes with so many CPUs and so much memory at most.
    pub(super) fn new(vcpus: u64, memory_bytes: Option<u64>, widest: u64, largest: Option<u64>) -> Self {
        let parts_by_memory = match (memory_bytes, largest) {
            (Some(bytes), Some(largest)) if largest > 0 => bytes.div_ceil(largest),
            _ => 1,
        };
        Self { vcpus, memory_bytes, parts: parts_by_memory.max(vcpus.div_ceil(widest)) }
    }
}

/// The nodes for the parts of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NodeChoice {
    /// As few as can be, ascending.
    Nodes(Vec<HostNode>),
    /// No nodes hold equal parts of it.
    TooSmall,
    /// The nodes that would hold it are taken by other machines.
    Taken,
}

/// A node of the host, with what machines have of it.
struct NodeRoom {
    cpus: IdSet,
    bytes: u64,
    taken_bytes: u64,
    taken_vcpus: u64,
}

type Rooms = BTreeMap<u32, NodeRoom>;

/// Chooses nodes for a machine, after those before it in the list of machines have theirs.
pub(super) fn choose_host_nodes(
    vm: &VmFacts,
    machine: WideMachine,
    facts: &HostFacts,
) -> Result<NodeChoice, MissingReading> {
    let (nodes, sizes) = (node_cpus(&facts.settings)?, node_memory(&facts.settings)?);
    let widest = nodes.values().map(|cpus| cpus.iter().count() as u64).max().unwrap_or(0);
    let largest = sizes.values().copied().max();
    let room = |(id, cpus): (&u32, &IdSet)| {
        let bytes = sizes.get(id).copied().unwrap_or(0);
        (*id, NodeRoom { cpus: cpus.clone(), bytes, taken_bytes: 0, taken_vcpus: 0 })
    };
    let mut rooms: Rooms = nodes.iter().map(room).collect();
    if choose(&rooms, machine).is_none() {
        return Ok(NodeChoice::TooSmall);
    }
    let vms = &facts.settings.vms;
    for other in vms.iter().filter(|other| other.process != vm.process) {
        take_bound(&mut rooms, other, &nodes);
    }
    for earlier in vms.iter().take_while(|earlier| earlier.process != vm.process) {
        let Some(wide) = find_wide_machine(earlier, widest, largest) else { continue };
        if let Some(chosen) = choose(&rooms, wide) {
            let ids: IdSet = chosen.iter().map(|node| node.id).collect();
            take(&mut rooms, &ids, wide.vcpus, wide.memory_bytes.unwrap_or(0));
        }
    }
    Ok(choose(&rooms, machine).map_or(NodeChoice::Taken, NodeChoice::Nodes))
}

/// What a machine needs, if it is wider than a node and gets virtual nodes.
fn find_wide_machine(vm: &VmFacts, widest: u64, largest: Option<u64>) -> Option<WideMachine> {
    let definition = read_definition(vm)?;
    let wide = WideMachine::new(vm.vcpu_count().ok()?, vm.memory_bytes(definition), widest, largest);
    (definition.virtual_nodes.len() < 2 && wide.parts > 1).then_some(wide)
}

fn read_definition(vm: &VmFacts) -> Option<&VmDefinition> {
    vm.definition.as_ref()?.as_ref().ok()
}

/// Takes what a machine has on the nodes to which it is bound: by its virtual nodes, else by its virtual CPUs.
fn take_bound(rooms: &mut Rooms, vm: &VmFacts, nodes: &BTreeMap<u32, IdSet>) {
    let Some(definition) = read_definition(vm) else { return };
    let memory_bytes = vm.memory_bytes(definition).unwrap_or(0);
    let virtual_nodes = &definition.virtual_nodes;
    if virtual_nodes.iter().any(|node| node.bound_nodes().is_some()) {
        let equal_part = memory_bytes / virtual_nodes.len() as u64;
        for node in virtual_nodes {
            let Some(bound) = node.bound_nodes() else { continue };
            take(rooms, bound, node.vcpus.iter().count() as u64, node.memory_bytes.unwrap_or(equal_part));
        }
    } else if let Ok(Some(bound)) = bound_nodes(vm, nodes) {
        take(rooms, &bound, vm.vcpu_count().unwrap_or(0), memory_bytes);
    }
}

/// Takes equal parts of each node.
fn take(rooms: &mut Rooms, nodes: &IdSet, vcpus: u64, bytes: u64) {
    let count = nodes.iter().count().max(1) as u64;
    for id in nodes.iter() {
        if let Some(room) = rooms.get_mut(&id) {
            room.taken_vcpus = room.taken_vcpus.saturating_add(vcpus.div_ceil(count));
            room.taken_bytes = room.taken_bytes.saturating_add(bytes.div_ceil(count));
        }
    }
}

/// The nodes for equal parts of a machine; `None` if there are none.
fn choose(rooms: &Rooms, machine: WideMachine) -> Option<Vec<HostNode>> {
    let WideMachine { vcpus, memory_bytes, parts } = machine;
    (parts..=rooms.len() as u64).filter(|&count| vcpus.is_multiple_of(count)).find_map(|count| {
        let part_bytes = memory_bytes.unwrap_or(0).div_ceil(count);
        let holds_part = |(_, room): &(&u32, &NodeRoom)| {
            let free = room.bytes.saturating_sub(room.taken_bytes);
            room.cpus.iter().count() as u64 >= vcpus / count && free > 0 && free >= part_bytes
        };
        let mut fitting: Vec<(&u32, &NodeRoom)> = rooms.iter().filter(holds_part).collect();
        let load = |room: &NodeRoom| room.taken_vcpus as f64 / room.cpus.iter().count().max(1) as f64;
        fitting.sort_by(|(_, a), (_, b)| load(a).total_cmp(&load(b)));
        let chosen = fitting.into_iter().take(count as usize);
        let mut chosen: Vec<HostNode> =
            chosen.map(|(id, room)| HostNode { id: *id, cpus: room.cpus.clone() }).collect();
        chosen.sort_by_key(|node| node.id);
        (chosen.len() as u64 == count).then_some(chosen)
    })
}
