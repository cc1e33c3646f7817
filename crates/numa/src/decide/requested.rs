//! Nodes that an operator requests for a machine: `1`, or `0=1,1=0` for the virtual nodes 0 and 1; and which of them the
//! machine may not use.

use crate::decide::plan::{Pattern, PlannedVm};
use pagefold_base::IdSet;
use pagefold_base::identity::virtual_nodes::VirtualNode;
use std::collections::BTreeMap;
use std::str::FromStr;

/// The requested nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestedNodes {
    /// All of the machine on one node.
    All(u32),
    /// A node for each virtual node.
    ByVirtualNode(BTreeMap<u32, u32>),
}

/// Why a request cannot be read or fulfilled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// The text has another form.
    #[error("{0:?}: give a node such as 1, or a node for each virtual node such as 0=1,1=0")]
    Malformed(String),
    /// A virtual node is named twice.
    #[error("virtual node {0} is named twice")]
    NamedTwice(u32),
    /// The machine has other virtual nodes.
    #[error("the machine has {}, and the request names {}", describe(.existing), describe(.requested))]
    OtherVirtualNodes {
        /// Its virtual nodes.
        existing: Vec<u32>,
        /// The requested ones.
        requested: Vec<u32>,
    },
}

fn describe(nodes: &[u32]) -> String {
    match nodes {
        [] => "no virtual nodes whose memory and vCPUs are known".to_owned(),
        nodes => format!("virtual nodes {}", nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")),
    }
}

impl FromStr for RequestedNodes {
    type Err = RequestError;

    fn from_str(text: &str) -> Result<Self, RequestError> {
        let malformed = || RequestError::Malformed(text.to_owned());
        if let Ok(node) = text.parse() {
            return Ok(Self::All(node));
        }
        let mut nodes = BTreeMap::new();
        for pair in text.split(',') {
            let (virtual_node, node) = pair.split_once('=').ok_or_else(malformed)?;
            let virtual_node = virtual_node.parse().map_err(|_| malformed())?;
            if nodes.insert(virtual_node, node.parse().map_err(|_| malformed())?).is_some() {
                return Err(RequestError::NamedTwice(virtual_node));
            }
        }
        Ok(Self::ByVirtualNode(nodes))
    }
}

impl RequestedNodes {
    /// The nodes that it names.
    pub fn nodes(&self) -> Vec<u32> {
        match self {
            Self::All(node) => vec![*node],
            Self::ByVirtualNode(nodes) => nodes.values().copied().collect(),
        }
    }

    /// The pattern for a machine with these virtual nodes, one for each part; none if it has a single part.
    ///
    /// # Errors
    /// If the request names other virtual nodes.
    pub fn pattern(&self, virtual_nodes: &[u32]) -> Result<Pattern, RequestError> {
        match self {
            Self::All(node) => Ok(Pattern::Nodes(vec![*node; virtual_nodes.len().max(1)])),
            Self::ByVirtualNode(nodes) if nodes.keys().copied().eq(virtual_nodes.iter().copied()) => {
                Ok(Pattern::Nodes(nodes.values().copied().collect()))
            }
            Self::ByVirtualNode(nodes) => Err(RequestError::OtherVirtualNodes {
                existing: virtual_nodes.to_vec(),
                requested: nodes.keys().copied().collect(),
            }),
        }
    }
}

/// A requested node that a machine, or one of its virtual nodes, may not use now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForbiddenNode {
    /// The node.
    pub node: u32,
    /// The virtual node; `None` if it is the whole machine that may not use the node.
    pub virtual_node: Option<u32>,
    /// The nodes that are permitted.
    pub permitted: IdSet,
    /// What restricts it, and how to change that.
    pub reason: String,
}

impl ForbiddenNode {
    /// The machine or its virtual node, by the name of the machine.
    pub fn describe_subject(&self, machine: &str) -> String {
        match self.virtual_node {
            Some(id) => format!("virtual node {id} of {machine}"),
            None => machine.to_owned(),
        }
    }
}

/// The requested nodes that a machine may not use: by its cpuset and libvirt, by the affinity of its virtual CPUs, and by
/// memory policies. `parts` has the nodes of each of its parts, and `virtual_nodes` are those of the machine. Unless it
/// `has_vcpus`, the affinity is that of all its threads.
pub fn forbidden_nodes(
    vm: &PlannedVm,
    parts: &[Vec<(u32, f64)>],
    virtual_nodes: &[VirtualNode],
    has_vcpus: bool,
) -> Vec<ForbiddenNode> {
    let mut forbidden: Vec<ForbiddenNode> = Vec::new();
    for (position, (part, nodes)) in vm.parts.iter().zip(parts).enumerate() {
        let virtual_node = if vm.parts.len() > 1 { virtual_nodes.get(position) } else { None };
        let threads = match virtual_node {
            Some(node) => describe_vcpus(&node.vcpus),
            None if has_vcpus => "its virtual CPUs".to_owned(),
            None => "its threads".to_owned(),
        };
        let virtual_node = virtual_node.map(|node| node.id);
        for &(node, _) in nodes {
            let mut refuse = |permitted: &Option<IdSet>, virtual_node, reason: &dyn Fn(&str) -> String| {
                let Some(permitted) = permitted.as_ref().filter(|nodes| !nodes.contains(node)) else { return };
                let reason = reason(&describe_permitted(permitted));
                let found = ForbiddenNode { node, virtual_node, permitted: permitted.clone(), reason };
                if !forbidden.contains(&found) {
                    forbidden.push(found);
                }
            };
            refuse(&vm.allowed_nodes, None, &|permitted| {
                format!("its cpuset and strict policies of libvirt permit {permitted}; change these first")
            });
            refuse(&part.cpu_nodes, virtual_node, &|permitted| {
                format!("the affinity of {threads} permits {permitted}; change it first (libvirt: <vcpupin>)")
            });
            refuse(&part.bound_nodes, virtual_node, &|permitted| {
                format!(
                    "its memory backend has policy=bind, which permits {permitted}; start the machine with other \
                     host-nodes= (libvirt: <numatune>) to place it elsewhere"
                )
            });
        }
    }
    forbidden
}

/// `node 0`, `nodes 0-1`, `no node`.
fn describe_permitted(nodes: &IdSet) -> String {
    match nodes.iter().count() {
        0 => "no node".to_owned(),
        1 => format!("node {nodes}"),
        _ => format!("nodes {nodes}"),
    }
}

fn describe_vcpus(vcpus: &IdSet) -> String {
    let plural = if vcpus.iter().count() == 1 { "" } else { "s" };
    format!("virtual CPU{plural} {vcpus}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::plan::PlannedPart;

    fn ids(text: &str) -> IdSet {
        text.parse().unwrap()
    }

    #[test]
    fn forbidden_nodes_are_named_with_what_restricts_them() {
        let node = |id, vcpus| VirtualNode {
            id,
            vcpus: ids(vcpus),
            backend: None,
            memory_bytes: None,
            backend_position: 0,
            is_anonymous: true,
            policy: None,
            host_nodes: IdSet::default(),
        };
        let tied = |nodes| PlannedPart { cpu_nodes: Some(ids(nodes)), ..PlannedPart::default() };
        let bound = PlannedPart { bound_nodes: Some(ids("0-1")), ..PlannedPart::default() };
        let vm = |allowed: Option<&str>, parts: &[PlannedPart]| PlannedVm {
            parts: parts.to_vec(),
            allowed_nodes: allowed.map(ids),
            ..PlannedVm::default()
        };
        let check = |vm: &PlannedVm, nodes: &[u32], has_vcpus, expected: &[&str]| {
            let parts: Vec<Vec<(u32, f64)>> = nodes.iter().map(|&node| vec![(node, 1.0)]).collect();
            let found = forbidden_nodes(vm, &parts, &[node(0, "0"), node(1, "1-2")], has_vcpus);
            let found: Vec<String> = found
                .iter()
                .map(|forbidden| {
                    let reason = forbidden.reason.split(';').next().unwrap();
                    format!("{} may not use {}: {reason}", forbidden.describe_subject("web"), forbidden.node)
                })
                .collect();
            assert_eq!(found, expected);
        };
        let exchanged = vm(None, &[tied("0"), tied("1")]);
        check(&exchanged, &[0, 1], true, &[]);
        let first = "virtual node 0 of web may not use 1: the affinity of virtual CPU 0 permits node 0";
        let second = "virtual node 1 of web may not use 0: the affinity of virtual CPUs 1-2 permits node 1";
        check(&exchanged, &[1, 0], true, &[first, second]);
        check(&exchanged, &[1, 1], true, &[first]);
        let apart = ["web may not use 1: the affinity of its virtual CPUs permits no node"];
        check(&vm(None, &[tied("")]), &[1], true, &apart);
        let process = ["web may not use 3: the affinity of its threads permits nodes 1-2"];
        check(&vm(None, &[tied("1-2")]), &[3], false, &process);
        let backend = ["web may not use 2: its memory backend has policy=bind, which permits nodes 0-1"];
        check(&vm(None, &[bound]), &[2], true, &backend);
        // The cpuset is that of the whole machine, and named once.
        let cpuset = "web may not use 1: its cpuset and strict policies of libvirt permit node 0";
        check(&vm(Some("0"), &[PlannedPart::default(), PlannedPart::default()]), &[1, 1], true, &[cpuset]);
        check(&vm(Some("0"), &[tied("0"), tied("1")]), &[1, 1], true, &[cpuset, first]);
    }

    #[test]
    fn nodes_are_requested_for_machine_or_virtual_nodes() {
        let check = |text: &str, virtual_nodes: &[u32], expected: Result<&[u32], &str>| {
            let found = text.parse().and_then(|request: RequestedNodes| request.pattern(virtual_nodes));
            let expected = expected.map(|nodes| Pattern::Nodes(nodes.to_vec())).map_err(str::to_owned);
            assert_eq!(found.map_err(|error| error.to_string()), expected, "{text}");
        };
        check("1", &[], Ok(&[1]));
        check("1", &[0, 1], Ok(&[1, 1]));
        check("0=1,1=0", &[0, 1], Ok(&[1, 0]));
        check("1=0,0=1", &[0, 1], Ok(&[1, 0]));
        check("0=1", &[0, 1], Err("the machine has virtual nodes 0, 1, and the request names virtual nodes 0"));
        check(
            "0=1",
            &[],
            Err(
                "the machine has no virtual nodes whose memory and vCPUs are known, and the request names virtual nodes 0",
            ),
        );
        check("0=1,0=2", &[0], Err("virtual node 0 is named twice"));
        for text in ["", "x", "0=", "=1", "0=1,", "0:1", "-1"] {
            let form = format!("{text:?}: give a node such as 1, or a node for each virtual node such as 0=1,1=0");
            check(text, &[0], Err(&form));
        }
    }
}
