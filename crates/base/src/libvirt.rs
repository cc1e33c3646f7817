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

/// Features that libvirt has outside `<cpu>`, by QEMU's name: the path, and the attribute that is `on` or `off`
/// (`src/qemu/qemu_command.c`, `qemuBuildCpuCommandLine`).
pub const LIBVIRT_FEATURES: &[(&str, &[&str], &str)] = &[
    ("kvm-pv-eoi", &["features", "apic"], "eoi"),
    ("kvm-pv-unhalt", &["features", "pvspinlock"], "state"),
    ("kvm-pv-ipi", &["features", "kvm", "pv-ipi"], "state"),
    ("kvm-hint-dedicated", &["features", "kvm", "hint-dedicated"], "state"),
    ("kvm-poll-control", &["features", "kvm", "poll-control"], "state"),
    ("hv-relaxed", &["features", "hyperv", "relaxed"], "state"),
    ("hv-vapic", &["features", "hyperv", "vapic"], "state"),
    ("hv-vpindex", &["features", "hyperv", "vpindex"], "state"),
    ("hv-runtime", &["features", "hyperv", "runtime"], "state"),
    ("hv-synic", &["features", "hyperv", "synic"], "state"),
    ("hv-stimer", &["features", "hyperv", "stimer"], "state"),
    ("hv-reset", &["features", "hyperv", "reset"], "state"),
    ("hv-frequencies", &["features", "hyperv", "frequencies"], "state"),
    ("hv-tlbflush", &["features", "hyperv", "tlbflush"], "state"),
    ("hv-ipi", &["features", "hyperv", "ipi"], "state"),
];

/// Features that libvirt has as timers of `<clock>`, by QEMU's name (`src/qemu/qemu_command.c`,
/// `qemuBuildCpuCommandLine`).
pub const LIBVIRT_TIMERS: &[(&str, &str)] = &[("kvmclock", "kvmclock"), ("hv-time", "hypervclock")];

/// The bytes of a unit of libvirt's sizes; KiB is the default. Decimal units are not known.
pub fn libvirt_unit_bytes(unit: Option<&str>) -> Option<u64> {
    Some(match unit.unwrap_or("KiB") {
        "b" | "bytes" => 1,
        "KiB" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1 << 30,
        "TiB" | "T" => 1 << 40,
        _ => return None,
    })
}
