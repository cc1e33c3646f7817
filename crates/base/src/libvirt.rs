//! A running domain of libvirt, as its daemon describes it.

use crate::units::Pid;
use std::collections::BTreeMap;

/// A running domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibvirtDomain {
    /// Its name, whole: names of cgroups are cut and lack some characters.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// The process of its emulator.
    pub pid: Pid,
    /// The thread of each virtual CPU.
    pub vcpu_threads: BTreeMap<u32, Pid>,
    /// The nodes to which its memory is strictly bound (`<numatune>` with `mode='strict'`), as a node list.
    pub strict_nodes: Option<String>,
}
