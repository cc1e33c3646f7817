//! Which threads of a virtual machine run its vCPUs, and to which virtual nodes these belong, if several sources say so:
//! QEMU's monitor, libvirt's state, the command line and the names of threads.
//!
//! The monitor wins over libvirt's state, and both win over names. A source that names a thread which is none of the
//! machine's is not used at all. Only a strict binding of memory by the command line holds beside the monitor's word: it
//! is the owner's limit, and QEMU cannot change it while the machine runs (backends/hostmem.c,
//! `host_memory_backend_set_policy`).

use pagefold_base::identity::qemu_monitor::{MonitorBackend, MonitorVcpu};
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_base::identity::virtual_nodes::{STRICT_POLICY, VirtualNode};
use pagefold_base::{IdSet, Pid};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Where the threads of vCPUs are known from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VcpuSource {
    /// QEMU's monitor.
    Monitor,
    /// libvirt's state of the domain.
    Libvirt,
    /// The names of threads, which any program can give itself.
    #[default]
    ThreadNames,
}

impl fmt::Display for VcpuSource {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Monitor => "QEMU's monitor",
            Self::Libvirt => "libvirt's state",
            Self::ThreadNames => "thread names",
        })
    }
}

/// A thread of a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineThread {
    /// Its number.
    pub tid: Pid,
    /// Its number in its own PID namespace.
    pub inner_tid: Pid,
    /// Its role by its name.
    pub named_role: ThreadRole,
}

/// A disagreement between sources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceConflict {
    /// A source lists a thread that the machine does not have, so the source is not used.
    ForeignThread {
        /// The source.
        source: VcpuSource,
        /// The vCPU.
        vcpu: u32,
        /// The thread, as the source numbers it.
        thread: u32,
    },
    /// A source lists the main thread as that of a vCPU, so the source is not used.
    MainThread {
        /// The source.
        source: VcpuSource,
        /// The vCPU.
        vcpu: u32,
    },
    /// One thread runs several vCPUs, as QEMU's emulation with `thread=single` does.
    SharedThread {
        /// The thread.
        tid: Pid,
        /// The vCPUs.
        vcpus: IdSet,
    },
    /// The name of a thread says another vCPU than the source.
    OtherName {
        /// The source, which wins.
        source: VcpuSource,
        /// The thread.
        tid: Pid,
        /// The vCPU by the source; `None` if it does not list the thread.
        vcpu: Option<u32>,
        /// The vCPU by the name.
        named: u32,
    },
    /// libvirt's state has another thread for a vCPU than the monitor, which wins.
    OtherLibvirtThread {
        /// The vCPU.
        vcpu: u32,
        /// The thread by the monitor.
        monitor: Pid,
        /// The thread by libvirt's state.
        libvirt: Pid,
    },
    /// The monitor puts vCPUs on a virtual node that the command line does not declare. They belong to none.
    UndeclaredNode {
        /// The virtual node.
        node: u32,
        /// The vCPUs.
        vcpus: IdSet,
    },
    /// The command line gives other vCPUs to a virtual node than the monitor, which wins.
    OtherNodeVcpus {
        /// The virtual node.
        node: u32,
        /// The vCPUs by the monitor.
        monitor: IdSet,
        /// The vCPUs by the command line.
        command_line: IdSet,
    },
    /// The command line gives another size to a memory backend than the monitor.
    OtherBackendSize {
        /// The id of the backend.
        backend: String,
        /// The bytes by the monitor.
        monitor: u64,
        /// The bytes by the command line, by which its memory is identified.
        command_line: u64,
    },
    /// The command line gives another policy or other nodes to a memory backend than the monitor.
    OtherBackendPolicy {
        /// The id of the backend.
        backend: String,
        /// The policy by the monitor.
        monitor: String,
        /// The policy by the command line.
        command_line: String,
    },
    /// The command line has a memory backend that the monitor does not list.
    UnlistedBackend {
        /// The id of the backend.
        backend: String,
    },
}

impl fmt::Display for SourceConflict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ForeignThread { source, vcpu, thread } => write!(
                formatter,
                "{source}: vCPU {vcpu} is thread {thread}, which this machine does not have; the source is not used"
            ),
            Self::MainThread { source, vcpu } => {
                write!(formatter, "{source}: vCPU {vcpu} is the main thread; the source is not used")
            }
            Self::SharedThread { tid, vcpus } => write!(formatter, "thread {tid} runs vCPUs {vcpus}"),
            Self::OtherName { source, tid, vcpu: Some(vcpu), named } => {
                write!(formatter, "thread {tid} is vCPU {vcpu} by {source}, and vCPU {named} by its name")
            }
            Self::OtherName { source, tid, vcpu: None, named } => {
                write!(formatter, "thread {tid} has the name of vCPU {named}, and {source} does not list it")
            }
            Self::OtherLibvirtThread { vcpu, monitor, libvirt } => {
                write!(formatter, "vCPU {vcpu} is thread {monitor} by QEMU's monitor, and {libvirt} by libvirt's state")
            }
            Self::UndeclaredNode { node, vcpus } => write!(
                formatter,
                "QEMU's monitor puts vCPUs {vcpus} on virtual node {node}, which the command line does not declare"
            ),
            Self::OtherNodeVcpus { node, monitor, command_line } => write!(
                formatter,
                "virtual node {node} has vCPUs {} by QEMU's monitor, and {} by the command line",
                list_or_none(monitor),
                list_or_none(command_line)
            ),
            Self::OtherBackendSize { backend, monitor, command_line } => write!(
                formatter,
                "memory backend {} has {monitor} bytes by QEMU's monitor, and {command_line} by the command line",
                backend.escape_debug()
            ),
            Self::OtherBackendPolicy { backend, monitor, command_line } => write!(
                formatter,
                "memory backend {} has policy {monitor} by QEMU's monitor, and {command_line} by the command line",
                backend.escape_debug()
            ),
            Self::UnlistedBackend { backend } => write!(
                formatter,
                "memory backend {} is on the command line, and QEMU's monitor does not list it",
                backend.escape_debug()
            ),
        }
    }
}

fn list_or_none(ids: &IdSet) -> String {
    if ids.is_empty() { "none".to_owned() } else { ids.to_string() }
}

/// The threads of vCPUs by a source, which lists pairs of a vCPU and the number of a thread. `number` is the number of a
/// thread in the form of the source.
///
/// # Errors
/// The reason why the source is not used.
pub fn find_vcpu_threads(
    source: VcpuSource,
    listed: impl IntoIterator<Item = (u32, u32)>,
    (threads, main): (&[MachineThread], Pid),
    number: impl Fn(&MachineThread) -> Pid,
) -> Result<BTreeMap<u32, Pid>, SourceConflict> {
    let by_number: BTreeMap<u32, Pid> = threads.iter().map(|thread| (number(thread).0, thread.tid)).collect();
    let find = |(vcpu, thread)| match by_number.get(&thread) {
        Some(&tid) if tid == main => Err(SourceConflict::MainThread { source, vcpu }),
        Some(&tid) => Ok((vcpu, tid)),
        None => Err(SourceConflict::ForeignThread { source, vcpu, thread }),
    };
    listed.into_iter().map(find).collect()
}

/// The role of each thread, if the threads of vCPUs are known from a source. A thread that runs several vCPUs gets the
/// first one.
pub fn thread_roles(
    source: VcpuSource,
    vcpu_threads: &BTreeMap<u32, Pid>,
    threads: &[MachineThread],
    conflicts: &mut Vec<SourceConflict>,
) -> BTreeMap<Pid, ThreadRole> {
    let mut vcpus_by_thread: BTreeMap<Pid, BTreeSet<u32>> = BTreeMap::new();
    for (&vcpu, &tid) in vcpu_threads {
        vcpus_by_thread.entry(tid).or_default().insert(vcpu);
    }
    let role = |thread: &MachineThread| {
        let tid = thread.tid;
        let vcpus = vcpus_by_thread.remove(&tid).unwrap_or_default();
        let first = vcpus.first().copied();
        if let ThreadRole::Vcpu(named) = thread.named_role
            && !vcpus.contains(&named)
        {
            conflicts.push(SourceConflict::OtherName { source, tid, vcpu: first, named });
        }
        if vcpus.len() > 1 {
            conflicts.push(SourceConflict::SharedThread { tid, vcpus: vcpus.into_iter().collect() });
        }
        let role = match (first, &thread.named_role) {
            (Some(vcpu), _) => ThreadRole::Vcpu(vcpu),
            (None, ThreadRole::Vcpu(_)) => ThreadRole::Other,
            (None, named) => named.clone(),
        };
        (tid, role)
    };
    threads.iter().map(role).collect()
}

/// The vCPUs for which libvirt's state has other threads than the monitor.
pub fn compare_with_libvirt(
    monitor: &BTreeMap<u32, Pid>,
    libvirt: &BTreeMap<u32, Pid>,
    conflicts: &mut Vec<SourceConflict>,
) {
    let other = |(&vcpu, &monitor): (&u32, &Pid)| {
        let libvirt = *libvirt.get(&vcpu).filter(|libvirt| **libvirt != monitor)?;
        Some(SourceConflict::OtherLibvirtThread { vcpu, monitor, libvirt })
    };
    conflicts.extend(monitor.iter().filter_map(other));
}

/// Give the vCPUs that the monitor lists with their virtual nodes to the nodes of the command line.
pub fn assign_vcpus_to_nodes<'n>(
    vcpus: &[MonitorVcpu],
    nodes: impl IntoIterator<Item = &'n mut VirtualNode>,
    conflicts: &mut Vec<SourceConflict>,
) {
    let mut by_node: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for vcpu in vcpus {
        if let Some(node) = vcpu.node {
            by_node.entry(node).or_default().insert(vcpu.number);
        }
    }
    if by_node.is_empty() {
        return;
    }
    let listed: BTreeSet<u32> = vcpus.iter().map(|vcpu| vcpu.number).collect();
    for node in nodes {
        let monitor: IdSet = by_node.remove(&node.id).unwrap_or_default().into_iter().collect();
        // vCPUs of the command line that are not plugged are no disagreement.
        let command_line: IdSet = node.vcpus.iter().filter(|vcpu| listed.contains(vcpu)).collect();
        if !node.vcpus.is_empty() && command_line != monitor {
            conflicts.push(SourceConflict::OtherNodeVcpus { node: node.id, monitor: monitor.clone(), command_line });
        }
        node.vcpus = monitor;
    }
    let undeclared = by_node.into_iter();
    conflicts.extend(
        undeclared.map(|(node, vcpus)| SourceConflict::UndeclaredNode { node, vcpus: vcpus.into_iter().collect() }),
    );
}

/// Compare the memory backends that the monitor lists with those of virtual nodes, and take over policies where the
/// command line binds strictly to no node.
pub fn compare_backends<'n>(
    backends: &[MonitorBackend],
    nodes: impl IntoIterator<Item = &'n mut VirtualNode>,
    conflicts: &mut Vec<SourceConflict>,
) {
    // Before QEMU 3.0, backends are listed without ids.
    if backends.iter().any(|backend| backend.id.is_none()) {
        return;
    }
    for node in nodes {
        let Some(id) = node.backend.clone() else { continue };
        let Some(backend) = backends.iter().find(|backend| backend.id.as_ref() == Some(&id)) else {
            conflicts.push(SourceConflict::UnlistedBackend { backend: id });
            continue;
        };
        if let Some(command_line) = node.memory_bytes.filter(|&bytes| bytes != backend.bytes) {
            let monitor = backend.bytes;
            conflicts.push(SourceConflict::OtherBackendSize { backend: id.clone(), monitor, command_line });
        }
        let policy = Some(backend.policy.clone()).filter(|policy| policy != "default");
        let host_nodes = if policy.is_some() { backend.host_nodes.clone() } else { IdSet::default() };
        let is_equal = policy == node.policy && (policy.is_none() || host_nodes == node.host_nodes);
        if is_equal {
            continue;
        }
        let command_line = describe_policy(node.policy.as_deref(), &node.host_nodes);
        let monitor = describe_policy(policy.as_deref(), &host_nodes);
        conflicts.push(SourceConflict::OtherBackendPolicy { backend: id, monitor, command_line });
        if node.bound_nodes().is_none() {
            (node.policy, node.host_nodes) = (policy, host_nodes);
        }
    }
}

/// `bind 0-1`, `default`.
pub fn describe_policy(policy: Option<&str>, host_nodes: &IdSet) -> String {
    let policy = policy.unwrap_or("default");
    if host_nodes.is_empty() { policy.to_owned() } else { format!("{policy} {host_nodes}") }
}

/// The nodes that all strictly bound memory backends permit which belong to none of the virtual nodes, beside those of
/// the command line: such backends can be added while the machine runs.
pub fn other_bound_nodes<'n>(
    command_line: Option<IdSet>,
    backends: &[MonitorBackend],
    nodes: impl IntoIterator<Item = &'n VirtualNode>,
) -> Option<IdSet> {
    let own: BTreeSet<&String> = nodes.into_iter().filter_map(|node| node.backend.as_ref()).collect();
    let is_other = |backend: &&MonitorBackend| {
        backend.policy == STRICT_POLICY && backend.id.as_ref().is_some_and(|id| !own.contains(id))
    };
    let listed = backends.iter().filter(is_other).map(|backend| backend.host_nodes.clone());
    command_line.into_iter().chain(listed).reduce(|left, right| left.intersection(&right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_base::identity::virtual_nodes::virtual_nodes;
    use proptest::prelude::*;

    fn thread(tid: u32, inner: u32, name: &str) -> MachineThread {
        MachineThread { tid: Pid(tid), inner_tid: Pid(inner), named_role: ThreadRole::from_thread_name(name) }
    }

    const SOURCE: VcpuSource = VcpuSource::Monitor;

    #[test]
    fn monitor_numbers_threads_in_the_namespace_of_the_machine() {
        let threads = [thread(500, 1, "qemu"), thread(501, 2, "qemu"), thread(502, 3, "qemu")];
        let find = |listed: &[(u32, u32)]| {
            find_vcpu_threads(SOURCE, listed.iter().copied(), (&threads, Pid(500)), |thread| thread.inner_tid)
        };
        assert_eq!(find(&[(0, 2), (1, 3)]), Ok([(0, Pid(501)), (1, Pid(502))].into()));
        assert_eq!(find(&[]), Ok(BTreeMap::new()));
        let foreign = SourceConflict::ForeignThread { source: SOURCE, vcpu: 1, thread: 501 };
        assert_eq!(find(&[(0, 2), (1, 501)]), Err(foreign));
        assert_eq!(find(&[(7, 1)]), Err(SourceConflict::MainThread { source: SOURCE, vcpu: 7 }));
    }

    #[test]
    fn source_wins_over_names_and_disagreement_is_named() {
        let threads = [
            thread(10, 10, "qemu"),
            thread(11, 11, "CPU 0/KVM"),
            thread(12, 12, "CPU 9/KVM"),
            thread(13, 13, "CPU 2/KVM"),
            thread(14, 14, "IO iothread1"),
            thread(15, 15, "worker"),
        ];
        let listed = [(0, Pid(11)), (1, Pid(12)), (3, Pid(15))].into();
        let mut conflicts = Vec::new();
        let roles = thread_roles(SOURCE, &listed, &threads, &mut conflicts);
        let roles: Vec<ThreadRole> = roles.into_values().collect();
        use ThreadRole::{Iothread, Other, Vcpu};
        assert_eq!(roles, [Other, Vcpu(0), Vcpu(1), Other, Iothread("iothread1".to_owned()), Vcpu(3)]);
        let texts: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
        let expected = [
            "thread 12 is vCPU 1 by QEMU's monitor, and vCPU 9 by its name",
            "thread 13 has the name of vCPU 2, and QEMU's monitor does not list it",
        ];
        assert_eq!(texts, expected);
    }

    #[test]
    fn one_thread_may_run_all_vcpus() {
        let mut conflicts = Vec::new();
        let threads = [thread(11, 11, "ALL CPUs/TCG")];
        let roles = thread_roles(SOURCE, &[(0, Pid(11)), (1, Pid(11))].into(), &threads, &mut conflicts);
        assert_eq!(roles, [(Pid(11), ThreadRole::Vcpu(0))].into());
        assert_eq!(conflicts.iter().map(ToString::to_string).collect::<Vec<_>>(), ["thread 11 runs vCPUs 0-1"]);
    }

    #[test]
    fn states_of_libvirt_are_compared() {
        let mut conflicts = Vec::new();
        let monitor = [(0, Pid(11)), (1, Pid(12))].into();
        compare_with_libvirt(&monitor, &[(0, Pid(11)), (1, Pid(13)), (2, Pid(14))].into(), &mut conflicts);
        let expected = SourceConflict::OtherLibvirtThread { vcpu: 1, monitor: Pid(12), libvirt: Pid(13) };
        assert_eq!(conflicts, [expected]);
    }

    fn nodes(command: &str) -> Vec<VirtualNode> {
        virtual_nodes(&command.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn vcpu(number: u32, node: u32) -> MonitorVcpu {
        MonitorVcpu { number, node: Some(node), ..MonitorVcpu::default() }
    }

    #[test]
    fn monitor_assigns_vcpus_to_declared_nodes() {
        let assign = |command: &str, vcpus: &[MonitorVcpu]| {
            let (mut nodes, mut conflicts) = (nodes(command), Vec::new());
            assign_vcpus_to_nodes(vcpus, &mut nodes, &mut conflicts);
            let vcpus: Vec<String> = nodes.iter().map(|node| node.vcpus.to_string()).collect();
            (vcpus, conflicts.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let unknown = "qemu-system-x86_64 -numa node -numa node";
        let vcpus = [vcpu(0, 0), vcpu(1, 1), vcpu(2, 0)];
        assert_eq!(assign(unknown, &vcpus), (vec!["0,2".to_owned(), "1".to_owned()], vec![]));
        let known = "qemu-system-x86_64 -numa node,cpus=0-1 -numa node,cpus=2,cpus=7";
        let (found, conflicts) = assign(known, &vcpus);
        assert_eq!(found, ["0,2", "1"]);
        assert_eq!(
            conflicts,
            [
                "virtual node 0 has vCPUs 0,2 by QEMU's monitor, and 0-1 by the command line",
                "virtual node 1 has vCPUs 1 by QEMU's monitor, and 2 by the command line",
            ]
        );
        // vCPU 7 is not plugged.
        let agreeing = [vcpu(0, 0), vcpu(1, 0), vcpu(2, 1)];
        assert_eq!(assign(known, &agreeing), (vec!["0-1".to_owned(), "2".to_owned()], vec![]));
        let (found, conflicts) = assign(unknown, &[vcpu(0, 0), vcpu(1, 9)]);
        assert_eq!(found, ["0", ""]);
        let expected = "QEMU's monitor puts vCPUs 1 on virtual node 9, which the command line does not declare";
        assert_eq!(conflicts, [expected]);
        // A monitor that names no virtual nodes changes nothing.
        let without = [MonitorVcpu::default()];
        assert_eq!(assign(known, &without), (vec!["0-1".to_owned(), "2,7".to_owned()], vec![]));
    }

    fn backend(id: &str, bytes: u64, policy: &str, host_nodes: &str) -> MonitorBackend {
        let host_nodes = host_nodes.parse().unwrap_or_default();
        MonitorBackend {
            id: Some(id.to_owned()),
            bytes,
            policy: policy.to_owned(),
            host_nodes,
            ..MonitorBackend::default()
        }
    }

    #[test]
    fn strict_bindings_of_the_command_line_hold() {
        let command = "qemu-system-x86_64 -object memory-backend-ram,id=a,size=1M,policy=bind,host-nodes=0 \
                       -object memory-backend-ram,id=b,size=1M -object memory-backend-ram,id=c,size=1M \
                       -numa node,memdev=a -numa node,memdev=b -numa node,memdev=c";
        let (mut found, mut conflicts) = (nodes(command), Vec::new());
        let listed =
            [backend("a", 1 << 20, "default", ""), backend("b", 2 << 20, "bind", "1"), backend("x", 1, "bind", "1-2")];
        compare_backends(&listed, &mut found, &mut conflicts);
        let bound: Vec<_> = found.iter().map(|node| node.bound_nodes().map(ToString::to_string)).collect();
        assert_eq!(bound, [Some("0".to_owned()), Some("1".to_owned()), None]);
        let texts: Vec<String> = conflicts.iter().map(ToString::to_string).collect();
        let expected = [
            "memory backend a has policy default by QEMU's monitor, and bind 0 by the command line",
            "memory backend b has 2097152 bytes by QEMU's monitor, and 1048576 by the command line",
            "memory backend b has policy bind 1 by QEMU's monitor, and default by the command line",
            "memory backend c is on the command line, and QEMU's monitor does not list it",
        ];
        assert_eq!(texts, expected);
        // A memory device that was added later.
        let bound = |command_line: Option<&str>| {
            let command_line = command_line.map(|nodes| nodes.parse().unwrap());
            other_bound_nodes(command_line, &listed, &found).map(|nodes| nodes.to_string())
        };
        assert_eq!((bound(None).as_deref(), bound(Some("2-3")).as_deref()), (Some("1-2"), Some("2")));
        // Equal answers, and answers without ids.
        let (mut found, mut conflicts) = (nodes(command), Vec::new());
        let same = [
            backend("a", 1 << 20, "bind", "0"),
            backend("b", 1 << 20, "default", ""),
            backend("c", 1 << 20, "default", ""),
        ];
        compare_backends(&same, &mut found, &mut conflicts);
        compare_backends(&[MonitorBackend::default()], &mut found, &mut conflicts);
        assert_eq!((found, conflicts), (nodes(command), vec![]));
    }

    proptest! {
        /// Whatever a monitor says, each thread has one role, and vCPUs are threads of the machine.
        #[test]
        fn any_answer_gives_each_thread_one_role(listed in prop::collection::vec((0u32..6, 9u32..16), 0..6)) {
            let threads: Vec<MachineThread> = (10..15).map(|tid| thread(tid, tid, "CPU 1/KVM")).collect();
            match find_vcpu_threads(SOURCE, listed.iter().copied(), (&threads, Pid(10)), |thread| thread.tid) {
                Ok(found) => {
                    let roles = thread_roles(SOURCE, &found, &threads, &mut Vec::new());
                    prop_assert_eq!(roles.len(), threads.len());
                    let is_vcpu = |role: &&ThreadRole| matches!(role, ThreadRole::Vcpu(_));
                    let distinct: BTreeSet<&Pid> = found.values().collect();
                    prop_assert_eq!(roles.values().filter(is_vcpu).count(), distinct.len());
                }
                Err(_) => prop_assert!(listed.iter().any(|(_, thread)| !(11..15).contains(thread))),
            }
        }
    }
}
