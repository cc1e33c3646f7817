//! The changes that findings ask for, as data. `pagefold tune` plans them and carries them out.

use pagefold_base::IdSet;
use pagefold_base::units::ProcessId;

/// A change of a setting that resolves a finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SettingChange {
    /// Write a file of sysfs or procfs. It takes effect at once.
    Write {
        /// The path below the root: `sys/module/kvm/parameters/halt_poll_ns`.
        path: String,
        /// The value.
        value: String,
    },
    /// Set a parameter that a kernel module reads only when it is loaded.
    ModuleParameter {
        /// The module: `kvm_intel`.
        module: String,
        /// The parameter: `ept`.
        parameter: String,
        /// The value.
        value: String,
    },
    /// Change the kernel command line, which takes effect after a reboot.
    BootParameter {
        /// The parameter to remove, as it is on the command line.
        remove: Option<String>,
        /// The parameter to add: `clocksource=tsc`.
        add: Option<String>,
    },
    /// Change the definition of a virtual machine, which takes effect when the machine starts again.
    VmDefinition {
        /// The process of the machine.
        vm: ProcessId,
        /// What to change.
        option: VmOption,
    },
}

/// A change to the definition of a virtual machine, independent of how the machine is defined.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum VmOption {
    /// Use the CPU model of the host (`-cpu host`).
    HostCpuModel,
    /// Turn a feature of the virtual CPU on or off (`-cpu ...,kvm-pv-eoi=on`).
    CpuFeature {
        /// QEMU's name of the feature.
        name: String,
        /// Whether to turn it on.
        enable: bool,
    },
    /// How often a Windows guest tries to take a lock before it tells the hypervisor (`-cpu ...,hv-spinlocks=0x1fff`).
    HyperVSpinlocks {
        /// The number of tries.
        retries: u32,
    },
    /// Let the guest control power states of CPUs (`-overcommit cpu-pm=on`).
    CpuPowerManagement {
        /// Whether to allow it.
        enable: bool,
    },
    /// Split the machine into virtual nodes of equal size, each bound to a node of the host (`-numa node`).
    VirtualNodes {
        /// The nodes of the host, one for each virtual node, in order.
        host_nodes: Vec<HostNode>,
    },
    /// Use private anonymous memory for the guest, which KSM can merge (no `share=on`, no hugetlb).
    MergeableMemory,
    /// Change the cache mode of a disk (`cache.direct=on`).
    DiskCacheNone {
        /// The drive or device, by its id.
        disk: String,
    },
    /// Change the asynchronous I/O interface of a disk (`aio=native`, `aio=io_uring`).
    DiskAio {
        /// The drive or device, by its id.
        disk: String,
        /// `native` or `io_uring`.
        interface: String,
    },
    /// Serve a virtio disk by iothreads of its own instead of the main loop.
    DiskIoThreads {
        /// The device, by its id.
        disk: String,
        /// How many iothreads.
        count: u32,
    },
    /// Handle packets in the kernel (`vhost=on`).
    VhostNet {
        /// The network backend, by its id.
        network: String,
    },
    /// Set the number of queues of a network device.
    NetworkQueues {
        /// The network backend, by its id.
        network: String,
        /// How many.
        count: u32,
    },
}

/// A node of the host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostNode {
    /// Its number.
    pub id: u32,
    /// Its CPUs.
    pub cpus: IdSet,
}

/// The numbers of nodes as a list such as `0,2-3`.
pub fn node_list(nodes: &[HostNode]) -> String {
    nodes.iter().map(|node| node.id).collect::<IdSet>().to_string()
}

/// How a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ApplyMethod {
    /// By a write to a running kernel.
    Live,
    /// By loading a kernel module again, for which no virtual machine may run.
    ModuleReload,
    /// When the virtual machine starts again.
    VmRestart,
    /// When the host boots again.
    Reboot,
    /// The rule only informs: an operator must decide.
    Manual,
}

/// What an operator should know before a change that resolves a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SettingDetails {
    /// What the recommended value gains.
    pub benefit: &'static str,
    /// What a change may break or cost.
    pub risk: &'static str,
    /// How a change takes effect.
    pub method: ApplyMethod,
    /// How a change is undone.
    pub undo: &'static str,
    /// The counter or file that proves that a change works.
    pub counter: &'static str,
    /// The kernels, or versions of QEMU, for which the rule holds.
    pub versions: &'static str,
    /// Where the facts come from: kernel file, manual or paper.
    pub citation: &'static str,
}
