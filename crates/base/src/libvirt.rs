//! Domains of libvirt, as its daemon describes them.

use crate::identity::vm_definition::VmDefinition;
use crate::units::Pid;
use std::collections::{BTreeMap, BTreeSet};

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

/// The persistent definition of a domain, with which it starts the next time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LibvirtDefinition {
    /// Its name.
    pub name: String,
    /// What the command line of its emulator will tell.
    pub vm: VmDefinition,
    /// The network devices whose definition does not name a driver: libvirt takes vhost if the host has it.
    pub default_drivers: BTreeSet<String>,
}
