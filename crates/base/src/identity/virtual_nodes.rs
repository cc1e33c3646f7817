//! The NUMA nodes of a virtual machine, and its devices of the host, by the command line of QEMU (qemu-options.hx).
//!
//! `-numa node,nodeid=0,cpus=0-3,memdev=ram0` refers to the memory backend `-object memory-backend-ram,id=ram0,size=4G`,
//! of which libvirt writes the same as JSON. A backend may have a memory policy (backends/hostmem.c): QEMU calls mbind(2)
//! with `policy=` and `host-nodes=`. Virtual CPUs belong to a node by `cpus=` or by `-numa cpu`.

use super::vcpu_topology::assigned_vcpus;
use super::vm::{Parameters, options, parse_parameters, parse_properties, parse_size, split_at_commas};
use crate::IdSet;

/// A virtual NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualNode {
    /// Its number in the guest.
    pub id: u32,
    /// Its virtual CPUs, as far as known.
    pub vcpus: IdSet,
    /// The id of its memory backend; `None` for a node without one.
    pub backend: Option<String>,
    /// The size of the backend.
    pub memory_bytes: Option<u64>,
    /// The position of the backend among the objects of the command line.
    pub backend_position: usize,
    /// Whether its memory is private and of no file: that of `memory-backend-ram` without `share=on`.
    pub is_anonymous: bool,
    /// The policy of the backend (`policy=`): `bind`, `preferred`, `interleave`; `None` if it follows the process.
    pub policy: Option<String>,
    /// The nodes of the host for this policy (`host-nodes=`).
    pub host_nodes: IdSet,
}

impl VirtualNode {
    /// The nodes of the host to which its memory is strictly bound (`policy=bind`, which is `MPOL_BIND`).
    pub fn bound_nodes(&self) -> Option<&IdSet> {
        (self.policy.as_deref() == Some(STRICT_POLICY)).then_some(&self.host_nodes)
    }
}

/// The policy under which the kernel allocates memory on the given nodes only.
pub const STRICT_POLICY: &str = "bind";

/// The nodes of the host that all strictly bound memory backends permit which belong to none of the virtual nodes, such
/// as the one of `-machine memory-backend=` or those of memory devices. `None` if there is no such backend.
pub fn other_bound_nodes(arguments: &[String], nodes: &[VirtualNode]) -> Option<IdSet> {
    let is_other = |id: Option<&String>| !nodes.iter().any(|node| id.is_some() && node.backend.as_ref() == id);
    let bound = objects(arguments.get(1..).unwrap_or_default()).filter_map(|(value, object)| {
        let is_backend = object.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-"));
        let is_strict = object.get("policy").is_some_and(|policy| policy == STRICT_POLICY);
        (is_backend && is_strict && is_other(object.get("id"))).then(|| host_nodes(value))
    });
    bound.reduce(|left, right| left.intersection(&right))
}

/// The objects of a command line: the text and the properties of each.
fn objects(arguments: &[String]) -> impl Iterator<Item = (&str, Parameters)> {
    let objects = options(arguments).filter(|(option, _)| *option == "object");
    objects.map(|(_, value)| (value, parse_properties(value, "qom-type")))
}

/// The nodes of `host-nodes=`, of an object in one of both forms.
fn host_nodes(value: &str) -> IdSet {
    if !value.starts_with('{') {
        return ids_of_key(value, "host-nodes=");
    }
    let object: serde_json::Value = serde_json::from_str(value).unwrap_or_default();
    let ids = object.get("host-nodes").and_then(serde_json::Value::as_array).into_iter().flatten();
    ids.filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
}

/// The numbers of a key that may occur several times and take ranges (qapi/opts-visitor.c): `cpus=0-1,cpus=4`.
fn ids_of_key(value: &str, key: &str) -> IdSet {
    let parts = split_at_commas(value);
    let lists = parts.iter().filter_map(|part| part.strip_prefix(key)?.parse::<IdSet>().ok());
    lists.flat_map(|list| list.iter().collect::<Vec<_>>()).collect()
}

/// The virtual nodes that a command line declares, ascending; empty without `-numa`.
pub fn virtual_nodes(arguments: &[String]) -> Vec<VirtualNode> {
    let Some((program, arguments)) = arguments.split_first() else { return Vec::new() };
    let objects: Vec<(&str, Parameters)> = objects(arguments).collect();
    let mut assigned_vcpus = assigned_vcpus(program, arguments);
    let declared = options(arguments).filter(|(option, _)| *option == "numa").map(|(_, value)| value);
    let mut nodes: Vec<VirtualNode> = Vec::new();
    for value in declared.filter(|value| value.split(',').next() == Some("node")) {
        let parameters = parse_parameters(value, "type");
        let next_id = nodes.len() as u32;
        let backend = parameters.get("memdev").cloned();
        let position = objects.iter().position(|(_, object)| backend.is_some() && object.get("id") == backend.as_ref());
        let object = position.and_then(|position| objects.get(position));
        let property = |key: &str| object.and_then(|(_, object)| object.get(key));
        let id = parameters.get("nodeid").and_then(|id| id.parse().ok()).unwrap_or(next_id);
        let assigned = assigned_vcpus.remove(&id).unwrap_or_default();
        nodes.push(VirtualNode {
            id,
            vcpus: ids_of_key(value, "cpus=").iter().chain(assigned).collect(),
            memory_bytes: property("size").and_then(|size| parse_size(size, 1)),
            backend_position: position.unwrap_or(0),
            is_anonymous: property("qom-type").is_some_and(|kind| kind == "memory-backend-ram")
                && property("share").is_none_or(|share| ["off", "no", "false"].contains(&share.as_str())),
            policy: property("policy").filter(|policy| *policy != "default").cloned(),
            host_nodes: object.map(|(value, _)| host_nodes(value)).unwrap_or_default(),
            backend,
        });
    }
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// The PCI addresses of devices that a command line passes through with VFIO, with the PCI domain: `0000:3b:00.0`. QEMU
/// also drives NVMe disks by VFIO itself (block/nvme.c): `-drive file=nvme://0000:44:00.0/1`.
pub fn passed_through_devices(arguments: &[String]) -> Vec<String> {
    let options = options(arguments.get(1..).unwrap_or_default());
    let addresses = options.filter_map(|(option, value)| match option {
        "device" => {
            let mut device = parse_properties(value, "driver");
            let is_vfio = device.get("driver").is_some_and(|driver| driver.starts_with("vfio-pci"));
            device.remove("host").filter(|_| is_vfio)
        }
        "drive" | "blockdev" => {
            let mut node = parse_properties(value, "driver");
            let is_nvme = node.get("driver").is_some_and(|driver| driver == "nvme");
            let file = node.remove("file").or_else(|| node.remove("filename"));
            let of_file = file.as_deref().and_then(|file| file.strip_prefix("nvme://")?.split('/').next());
            of_file.map(str::to_owned).or_else(|| node.remove("device").filter(|_| is_nvme))
        }
        _ => None,
    });
    // QEMU takes domain 0 if none is given (hw/core/qdev-properties-system.c, `set_pci_host_devaddr`).
    let with_domain = |address: String| match address.matches(':').count() {
        1 => format!("0000:{address}"),
        _ => address,
    };
    let is_address = |address: &String| address.bytes().all(|byte| byte.is_ascii_hexdigit() || b":.".contains(&byte));
    addresses.map(with_domain).filter(is_address).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(command: &str) -> Vec<String> {
        command.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn nodes_have_vcpus_and_backends() {
        let command = "qemu-system-x86_64 -object memory-backend-ram,id=high,size=1G,policy=bind,host-nodes=1 \
                       -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"low\",\"size\":536870912} \
                       -numa node,nodeid=0,cpus=0-1,cpus=4,memdev=low -numa node,memdev=high,cpus=2-3 \
                       -numa dist,src=0,dst=1,val=20 -smp 5";
        let nodes = virtual_nodes(&arguments(command));
        let [low, high] = &nodes[..] else { panic!("{nodes:?}") };
        assert_eq!((low.id, low.vcpus.to_string().as_str(), low.memory_bytes), (0, "0-1,4", Some(1 << 29)));
        assert_eq!((low.backend_position, low.is_anonymous, &low.policy), (1, false, &None));
        assert!(high.is_anonymous);
        assert_eq!((high.id, high.vcpus.to_string().as_str(), high.memory_bytes), (1, "2-3", Some(1 << 30)));
        assert_eq!((high.policy.as_deref(), high.host_nodes.to_string().as_str()), (Some("bind"), "1"));
    }

    #[test]
    fn shared_memory_is_not_anonymous() {
        for (share, is_anonymous) in [("share=off", true), ("share=on", false), ("merge=on", true)] {
            let command =
                format!("qemu-system-x86_64 -object memory-backend-ram,id=a,size=1G,{share} -numa node,memdev=a");
            assert_eq!(virtual_nodes(&arguments(&command))[0].is_anonymous, is_anonymous, "{share}");
        }
        for (share, is_anonymous) in [(false, true), (true, false)] {
            let object = format!("{{\"qom-type\":\"memory-backend-ram\",\"id\":\"a\",\"share\":{share}}}");
            let command = format!("qemu-system-x86_64 -object {object} -numa node,memdev=a");
            assert_eq!(virtual_nodes(&arguments(&command))[0].is_anonymous, is_anonymous, "{share}");
        }
    }

    #[test]
    fn vcpus_are_assigned_by_number_or_by_their_place() {
        let command = "/usr/bin/qemu-system-x86_64 -name guest=db,debug-threads=on -machine pc-q35-9.2,usb=off -m 4096 \
                       -smp 8,sockets=2,dies=1,cores=2,threads=2 \
                       -object memory-backend-ram,id=m0,size=2G -object memory-backend-ram,id=m1,size=2G \
                       -numa node,nodeid=0,memdev=m0 -numa node,nodeid=1,memdev=m1 \
                       -numa cpu,node-id=0,socket-id=0 -numa cpu,node-id=1,socket-id=1,core-id=0 \
                       -numa cpu,node-id=1,socket-id=1,core-id=1,thread-id=0 -numa node,nodeid=2,cpus=7";
        let vcpus = |command: &str| -> Vec<String> {
            virtual_nodes(&arguments(command)).iter().map(|node| node.vcpus.to_string()).collect()
        };
        assert_eq!(vcpus(command), ["0-3", "4-6", "7"]);
        let other = command.replace("x86_64", "riscv64").replace("pc-q35-9.2", "virt");
        assert_eq!(vcpus(&other), ["", "", "7"], "RISC-V numbers virtual CPUs in another way");
    }

    #[test]
    fn bindings_of_backends_are_read_in_both_forms() {
        let command = "qemu-system-x86_64 -machine q35,memory-backend=pc.ram \
                       -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"a\",\"size\":1048576,\"host-nodes\":[0,2],\"policy\":\"bind\"} \
                       -object memory-backend-memfd,id=b,size=1M,host-nodes=0-1,host-nodes=4,policy=bind \
                       -object memory-backend-ram,id=c,size=1M,host-nodes=1,policy=preferred \
                       -object memory-backend-ram,id=dimm0,size=1M,host-nodes=0-1,policy=bind \
                       -object {\"qom-type\":\"memory-backend-ram\",\"id\":\"dimm1\",\"host-nodes\":[1,2],\"policy\":\"bind\"} \
                       -object rng-random,id=r,policy=bind \
                       -numa node,memdev=a -numa node,memdev=b -numa node,memdev=c";
        let nodes = virtual_nodes(&arguments(command));
        let text = |nodes: Option<&IdSet>| nodes.map(ToString::to_string);
        let bound: Vec<_> = nodes.iter().map(|node| text(node.bound_nodes())).collect();
        assert_eq!(bound, [Some("0,2".to_owned()), Some("0-1,4".to_owned()), None]);
        assert_eq!(text(other_bound_nodes(&arguments(command), &nodes).as_ref()).as_deref(), Some("1"));
        let whole = other_bound_nodes(&arguments(command), &[]);
        assert_eq!(whole, Some(IdSet::default()), "no node is permitted by all");
        assert_eq!(other_bound_nodes(&arguments("qemu-system-x86_64 -m 1G"), &[]), None);
        let broken = "qemu-system-x86_64 -object {\"qom-type\":\"memory-backend-ram\",\"host-nodes\":[-1,\"x\",9999999999],\"policy\":\"bind\"}";
        assert_eq!(other_bound_nodes(&arguments(broken), &[]), Some(IdSet::default()));
    }

    #[test]
    fn missing_or_wrong_values_are_left_out() {
        assert_eq!(virtual_nodes(&arguments("qemu-system-x86_64 -m 1G")), []);
        assert_eq!(virtual_nodes(&[]), []);
        let nodes = virtual_nodes(&arguments("qemu-system-x86_64 -numa node,cpus=x,memdev=missing -numa node"));
        assert_eq!(nodes.iter().map(|node| (node.id, node.memory_bytes)).collect::<Vec<_>>(), [(0, None), (1, None)]);
        assert!(nodes.iter().all(|node| node.vcpus == IdSet::default()));
    }

    #[test]
    fn passed_through_devices_have_full_addresses() {
        let command = "qemu-system-x86_64 -device vfio-pci,host=3b:00.0 -device virtio-net,host=1 \
                       -device {\"driver\":\"vfio-pci\",\"host\":\"0001:5e:00.1\"} -device vfio-pci,host=../../x";
        assert_eq!(passed_through_devices(&arguments(command)), ["0000:3b:00.0", "0001:5e:00.1"]);
        let disks = "qemu-system-x86_64 -drive file=nvme://0000:44:00.0/1,if=none -drive file=/dev/nvme0n1,id=d \
                     -blockdev {\"driver\":\"nvme\",\"device\":\"0000:45:00.0\",\"namespace\":1} \
                     -blockdev driver=host_device,filename=/dev/sda,node-name=a";
        assert_eq!(passed_through_devices(&arguments(disks)), ["0000:44:00.0", "0000:45:00.0"]);
    }
}
