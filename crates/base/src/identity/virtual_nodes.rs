//! The NUMA nodes of a virtual machine, and its devices of the host, by the command line of QEMU (qemu-options.hx).
//!
//! `-numa node,nodeid=0,cpus=0-3,memdev=ram0` refers to the memory backend `-object memory-backend-ram,id=ram0,size=4G`.
//! Virtual CPUs that `-numa cpu,...` assigns by socket and core are not known.

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
    /// The policy of the backend (`policy=`): `bind`, `preferred`, `interleave`; `None` if it follows the process.
    pub policy: Option<String>,
    /// The nodes of the host for this policy (`host-nodes=`).
    pub host_nodes: IdSet,
}

/// The virtual nodes that a command line declares, ascending; empty without `-numa`.
pub fn virtual_nodes(arguments: &[String]) -> Vec<VirtualNode> {
    let arguments = arguments.get(1..).unwrap_or_default();
    let objects: Vec<Parameters> = options(arguments)
        .filter(|(option, _)| *option == "object")
        .map(|(_, value)| parse_properties(value, "qom-type"))
        .collect();
    let declared = options(arguments).filter(|(option, _)| *option == "numa").map(|(_, value)| value);
    let mut nodes: Vec<VirtualNode> = Vec::new();
    for value in declared.filter(|value| value.split(',').next() == Some("node")) {
        let parameters = parse_parameters(value, "type");
        let next_id = nodes.len() as u32;
        let backend = parameters.get("memdev").cloned();
        let position = objects.iter().position(|object| backend.is_some() && object.get("id") == backend.as_ref());
        let object = position.and_then(|position| objects.get(position));
        let property = |key: &str| object.and_then(|object| object.get(key));
        // The option may occur several times: `cpus=0,cpus=2`.
        let vcpus = split_at_commas(value).iter().filter_map(|part| part.strip_prefix("cpus=")?.parse().ok()).fold(
            Vec::new(),
            |mut vcpus, part: IdSet| {
                vcpus.extend(part.iter());
                vcpus
            },
        );
        nodes.push(VirtualNode {
            id: parameters.get("nodeid").and_then(|id| id.parse().ok()).unwrap_or(next_id),
            vcpus: vcpus.into_iter().collect(),
            memory_bytes: property("size").and_then(|size| parse_size(size, 1)),
            backend_position: position.unwrap_or(0),
            policy: property("policy").filter(|policy| *policy != "default").cloned(),
            host_nodes: property("host-nodes").and_then(|nodes| nodes.parse().ok()).unwrap_or_default(),
            backend,
        });
    }
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// The PCI addresses of devices that a command line passes through with VFIO, with the PCI domain: `0000:3b:00.0`.
pub fn passed_through_devices(arguments: &[String]) -> Vec<String> {
    let devices = options(arguments.get(1..).unwrap_or_default()).filter(|(option, _)| *option == "device");
    let addresses = devices.filter_map(|(_, value)| {
        let mut device = parse_properties(value, "driver");
        let is_vfio = device.get("driver").is_some_and(|driver| driver.starts_with("vfio-pci"));
        device.remove("host").filter(|_| is_vfio)
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
        assert_eq!((low.backend_position, &low.policy), (1, &None));
        assert_eq!((high.id, high.vcpus.to_string().as_str(), high.memory_bytes), (1, "2-3", Some(1 << 30)));
        assert_eq!((high.policy.as_deref(), high.host_nodes.to_string().as_str()), (Some("bind"), "1"));
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
    }
}
