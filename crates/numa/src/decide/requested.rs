//! Nodes that an operator requests for a machine: `1`, or `0=1,1=0` for the virtual nodes 0 and 1.

use crate::decide::plan::Pattern;
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
        [] => "no virtual nodes whose memory is known".to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

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
            Err("the machine has no virtual nodes whose memory is known, and the request names virtual nodes 0"),
        );
        check("0=1,0=2", &[0], Err("virtual node 0 is named twice"));
        for text in ["", "x", "0=", "=1", "0=1,", "0:1", "-1"] {
            let form = format!("{text:?}: give a node such as 1, or a node for each virtual node such as 0=1,1=0");
            check(text, &[0], Err(&form));
        }
    }
}
