//! libvirt's persistent definition of a domain, as far as the audit of settings needs it: what the command line of the
//! emulator will tell at the next start (docs/formatdomain.rst of libvirt 11, `src/qemu/qemu_command.c`).
//!
//! Names of devices are those that libvirt gives them on the command line: `virtio-disk0`, `hostnet0`. A model of
//! `host-model` becomes a named model with features only when the domain starts, so it stays `host-model` here.

use super::text::malformed;
use pagefold_base::identity::virtual_nodes::VirtualNode;
use pagefold_base::identity::vm_definition::{VmDefinition, VmDisk, VmNetwork, machine_version};
use pagefold_base::libvirt::{LIBVIRT_FEATURES, LIBVIRT_TIMERS, LibvirtDefinition, libvirt_unit_bytes};
use pagefold_base::{IdSet, Reading};
use roxmltree::{Document, Node, ParsingOptions};
use std::collections::{BTreeMap, BTreeSet};

/// The largest definition that is read. A domain with hundreds of devices has some 100 KiB.
const MAX_DEFINITION_BYTES: usize = 4 << 20;

/// The most XML nodes that are read.
const MAX_XML_NODES: u32 = 200_000;

/// Parses the persistent definition of a domain.
///
/// # Errors
/// `Malformed` if it is no definition of a domain, or too large.
pub fn libvirt_definition(bytes: &[u8]) -> Reading<LibvirtDefinition> {
    let bad = |what: &str| malformed(what, b"");
    if bytes.len() > MAX_DEFINITION_BYTES {
        return Err(bad("the definition of a libvirt domain is too large"));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| bad("the definition of a libvirt domain is not UTF-8"))?;
    let options = ParsingOptions { nodes_limit: MAX_XML_NODES, ..ParsingOptions::default() };
    let document = Document::parse_with_options(text, options).map_err(|_| bad("not XML of a libvirt domain"))?;
    let domain = document.root_element();
    if !domain.has_tag_name("domain") {
        return Err(bad("not the definition of a libvirt domain"));
    }
    let name = text_at(domain, &["name"]).ok_or_else(|| bad("a libvirt domain without a name"))?.to_owned();
    let (networks, default_drivers) = parse_networks(domain);
    let cpu_features = parse_features(domain);
    let has_hyper_v = cpu_features.iter().any(|(name, is_on)| name.starts_with("hv-") && *is_on);
    let is_local_time = find(domain, &["clock"]).and_then(|clock| clock.attribute("offset")) == Some("localtime");
    let devices = || children(find(domain, &["devices"]), None);
    let vm = VmDefinition {
        kvm: domain.attribute("type") == Some("kvm"),
        cpu_model: parse_model(domain),
        windows: has_hyper_v || is_local_time,
        cpu_features,
        vcpus: find(domain, &["vcpu"]).and_then(|vcpu| vcpu.attribute("current").or(vcpu.text())?.trim().parse().ok()),
        memory_bytes: find(domain, &["memory"]).and_then(size_of),
        virtual_nodes: parse_virtual_nodes(domain),
        cpu_pm: domain
            .descendants()
            .filter(|node| node.tag_name().name() == "arg")
            .any(|argument| argument.attribute("value").is_some_and(|value| value.contains("cpu-pm=on"))),
        unmergeable: find_unmergeable(domain),
        opt_out: find(domain, &["memoryBacking", "nosharepages"]).map(|_| "nosharepages".to_owned()),
        guest_memfd: find(domain, &["launchSecurity"])
            .is_some_and(|security| matches!(security.attribute("type"), Some("sev-snp" | "tdx"))),
        needs_shared_memory: devices().any(|node| {
            node.attribute("type") == Some("vhostuser") || attribute_at(node, &["driver"], "type") == Some("virtiofs")
        }),
        machine_version: attribute_at(domain, &["os", "type"], "machine").and_then(machine_version),
        disks: devices().filter(|node| node.has_tag_name("disk")).filter_map(parse_disk).collect(),
        networks,
    };
    Ok(LibvirtDefinition { name, vm, default_drivers })
}

/// The children of an element with a name.
fn children<'a, 'i>(parent: Option<Node<'a, 'i>>, name: Option<&'static str>) -> impl Iterator<Item = Node<'a, 'i>> {
    let all = parent.into_iter().flat_map(|parent| parent.children());
    all.filter(move |node| node.is_element() && name.is_none_or(|name| node.has_tag_name(name)))
}

fn find<'a, 'i>(node: Node<'a, 'i>, path: &[&str]) -> Option<Node<'a, 'i>> {
    path.iter().try_fold(node, |node, name| node.children().find(|child| child.has_tag_name(*name)))
}

fn text_at<'a>(node: Node<'a, '_>, path: &[&str]) -> Option<&'a str> {
    find(node, path)?.text().map(str::trim)
}

fn attribute_at<'a>(node: Node<'a, '_>, path: &[&str], name: &str) -> Option<&'a str> {
    find(node, path)?.attribute(name)
}

fn size_of(node: Node<'_, '_>) -> Option<u64> {
    node.text()?.trim().parse::<u64>().ok()?.checked_mul(libvirt_unit_bytes(node.attribute("unit"))?)
}

/// Without a model, libvirt and QEMU take qemu64 on x86.
fn parse_model(domain: Node<'_, '_>) -> Option<String> {
    let mode = attribute_at(domain, &["cpu"], "mode");
    Some(match mode {
        Some("host-passthrough") => "host".to_owned(),
        Some("maximum") => "max".to_owned(),
        Some("host-model") => "host-model".to_owned(),
        _ => text_at(domain, &["cpu", "model"])?.to_owned(),
    })
}

fn parse_features(domain: Node<'_, '_>) -> BTreeMap<String, bool> {
    let mut features = BTreeMap::new();
    for feature in children(find(domain, &["cpu"]), Some("feature")) {
        let is_on = match feature.attribute("policy").unwrap_or("require") {
            "require" | "force" => true,
            "disable" | "forbid" => false,
            _ => continue,
        };
        features.extend(feature.attribute("name").map(|name| (name.replace('_', "-"), is_on)));
    }
    for (name, path, attribute) in LIBVIRT_FEATURES {
        let state = attribute_at(domain, path, attribute);
        features.extend(state.map(|state| ((*name).to_owned(), state == "on")));
    }
    for timer in children(find(domain, &["clock"]), Some("timer")) {
        let known = LIBVIRT_TIMERS.iter().find(|(_, timer_name)| timer.attribute("name") == Some(timer_name));
        let is_present = timer.attribute("present").unwrap_or("yes") == "yes";
        features.extend(known.map(|(name, _)| ((*name).to_owned(), is_present)));
    }
    let spinlocks = attribute_at(domain, &["features", "hyperv", "spinlocks"], "state");
    features.extend(spinlocks.map(|state| ("hv-spinlocks".to_owned(), state == "on")));
    if attribute_at(domain, &["features", "hyperv"], "mode") == Some("passthrough") {
        features.insert("hv-passthrough".to_owned(), true);
    }
    if attribute_at(domain, &["cpu"], "migratable") == Some("off") {
        features.insert("migratable".to_owned(), false);
    }
    features
}

/// The policy of QEMU's backend for a mode of `<numatune>`.
fn policy_of(mode: Option<&str>) -> Option<&'static str> {
    match mode.unwrap_or("strict") {
        "strict" => Some("bind"),
        "preferred" => Some("preferred"),
        "interleave" => Some("interleave"),
        // The emulator gets a cpuset instead.
        _ => None,
    }
}

fn parse_virtual_nodes(domain: Node<'_, '_>) -> Vec<VirtualNode> {
    let tune = find(domain, &["numatune"]);
    let whole = tune.and_then(|tune| find(tune, &["memory"]));
    let is_shared_by_default = attribute_at(domain, &["memoryBacking", "access"], "mode") == Some("shared");
    let has_ram_backend = find_unmergeable(domain).is_empty() && !is_shared_by_default;
    let parse = |(position, cell): (usize, Node<'_, '_>)| {
        let id = cell.attribute("id").and_then(|id| id.parse().ok()).unwrap_or(position as u32);
        let memory = cell.attribute("memory").and_then(|memory| memory.parse::<u64>().ok());
        let bytes =
            memory.zip(libvirt_unit_bytes(cell.attribute("unit"))).and_then(|(size, unit)| size.checked_mul(unit));
        let of_cell = children(tune, Some("memnode"))
            .find(|node| node.attribute("cellid").and_then(|cell| cell.parse().ok()) == Some(id));
        let bound = of_cell.or(whole);
        let nodes = bound.and_then(|node| node.attribute("nodeset")?.parse::<IdSet>().ok()).unwrap_or_default();
        VirtualNode {
            id,
            vcpus: cell.attribute("cpus").and_then(|cpus| cpus.parse().ok()).unwrap_or_default(),
            backend: None,
            memory_bytes: bytes,
            backend_position: position,
            is_anonymous: has_ram_backend && cell.attribute("memAccess") != Some("shared"),
            policy: bound.and_then(|node| policy_of(node.attribute("mode"))).map(str::to_owned),
            host_nodes: nodes,
        }
    };
    let mut nodes: Vec<VirtualNode> =
        children(find(domain, &["cpu", "numa"]), Some("cell")).enumerate().map(parse).collect();
    nodes.sort_by_key(|node| node.id);
    nodes
}

/// Why KSM cannot merge the memory: QEMU shares memfd by default (backends/hostmem-memfd.c).
fn find_unmergeable(domain: Node<'_, '_>) -> Vec<String> {
    let Some(backing) = find(domain, &["memoryBacking"]) else { return Vec::new() };
    let source = attribute_at(backing, &["source"], "type");
    let access = attribute_at(backing, &["access"], "mode");
    let reason = if find(backing, &["hugepages"]).is_some() {
        "hugetlb"
    } else if access == Some("shared") || source == Some("memfd") && access != Some("private") {
        "shared"
    } else {
        return Vec::new();
    };
    vec![format!("memory is {reason}")]
}

/// The number of a target such as `vdb` (`src/util/virutil.c`, `virDiskNameToIndex`).
fn target_number(target: &str) -> Option<u64> {
    let letters = target.strip_prefix("vd")?;
    let number = letters.bytes().try_fold(0_u64, |number, letter| {
        let digit = letter.is_ascii_lowercase().then(|| u64::from(letter - b'a') + 1)?;
        number.checked_mul(26)?.checked_add(digit)
    })?;
    number.checked_sub(1)
}

fn parse_disk(disk: Node<'_, '_>) -> Option<VmDisk> {
    if !matches!(disk.attribute("device"), None | Some("disk" | "lun")) {
        return None;
    }
    let target = attribute_at(disk, &["target"], "dev")?;
    let is_virtio = attribute_at(disk, &["target"], "bus") == Some("virtio");
    let alias = attribute_at(disk, &["alias"], "name");
    let number = target_number(target).filter(|_| is_virtio).map(|number| format!("virtio-disk{number}"));
    let driver = find(disk, &["driver"]);
    let option = |name: &str| driver.and_then(|driver| driver.attribute(name));
    let mapped = children(driver.and_then(|driver| find(driver, &["iothreads"])), Some("iothread")).count() as u32;
    Some(VmDisk {
        id: alias.map(str::to_owned).or(number).unwrap_or_else(|| target.to_owned()),
        local: matches!(disk.attribute("type"), Some("file" | "block")),
        virtio_blk: is_virtio,
        iothreads: mapped.max(u32::from(option("iothread").is_some())),
        // libvirt names its objects so (src/qemu/qemu_command.c, `qemuBuildIOThreadCommandLine`).
        iothread: option("iothread").map(|number| format!("iothread{number}")),
        direct: matches!(option("cache"), Some("none" | "directsync")),
        aio: option("io").unwrap_or("threads").to_owned(),
    })
}

/// The virtio devices, and those without a named driver.
fn parse_networks(domain: Node<'_, '_>) -> (Vec<VmNetwork>, BTreeSet<String>) {
    let (mut networks, mut default_drivers) = (Vec::new(), BTreeSet::new());
    for (position, interface) in children(find(domain, &["devices"]), Some("interface")).enumerate() {
        if !attribute_at(interface, &["model"], "type").is_some_and(|model| model.starts_with("virtio")) {
            continue;
        }
        let alias = attribute_at(interface, &["alias"], "name");
        let id = alias.map_or_else(|| format!("hostnet{position}"), |alias| format!("host{alias}"));
        let kind = match interface.attribute("type") {
            Some("user") => "user",
            Some("vhostuser") => "vhost-user",
            _ => "tap",
        };
        let driver = attribute_at(interface, &["driver"], "name");
        if driver.is_none() {
            default_drivers.insert(id.clone());
        }
        let queues = attribute_at(interface, &["driver"], "queues").and_then(|queues| queues.parse().ok());
        networks.push(VmNetwork {
            id,
            kind: kind.to_owned(),
            vhost: kind == "tap" && driver != Some("qemu"),
            queues: queues.unwrap_or(1),
        });
    }
    (networks, default_drivers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DEFINITION: &str = "<!-- generated -->
<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>web</name>
  <memory unit='GiB'>4</memory>
  <vcpu placement='static' current='4'>8</vcpu>
  <numatune><memory mode='strict' nodeset='0-1'/><memnode cellid='1' mode='preferred' nodeset='1'/></numatune>
  <memoryBacking><source type='memfd'/></memoryBacking>
  <features>
    <apic eoi='off'/>
    <hyperv mode='custom'><relaxed state='on'/><spinlocks state='on' retries='8191'/></hyperv>
    <kvm><hint-dedicated state='on'/></kvm>
  </features>
  <cpu mode='host-passthrough' migratable='off'>
    <feature policy='require' name='invtsc'/>
    <feature policy='disable' name='vmx'/>
    <numa>
      <cell id='0' cpus='0-1' memory='2' unit='GiB'/>
      <cell id='1' cpus='2-3' memory='2097152'/>
    </numa>
  </cpu>
  <clock offset='utc'><timer name='kvmclock' present='no'/><timer name='hypervclock'/></clock>
  <devices>
    <disk type='block' device='disk'>
      <driver name='qemu' type='raw' cache='none' io='native' iothread='1'/>
      <source dev='/dev/vg/web'/>
      <target dev='vdb' bus='virtio'/>
    </disk>
    <disk type='network' device='disk'><target dev='sda' bus='scsi'/></disk>
    <disk type='file' device='cdrom'><target dev='sdb' bus='sata'/></disk>
    <interface type='bridge'><model type='e1000'/></interface>
    <interface type='bridge'><model type='virtio'/></interface>
    <interface type='network'><model type='virtio'/><driver name='qemu' queues='4'/></interface>
    <interface type='vhostuser'><model type='virtio'/></interface>
  </devices>
  <qemu:commandline><qemu:arg value='-overcommit'/><qemu:arg value='cpu-pm=on'/></qemu:commandline>
</domain>
";

    #[test]
    fn definition_tells_what_the_command_line_will() {
        let LibvirtDefinition { name, vm, default_drivers } = libvirt_definition(DEFINITION.as_bytes()).unwrap();
        assert_eq!((name.as_str(), vm.kvm, vm.cpu_model.as_deref()), ("web", true, Some("host")));
        assert_eq!((vm.vcpus, vm.memory_bytes, vm.cpu_pm, vm.windows), (Some(4), Some(4 << 30), true, true));
        let features: Vec<(&str, bool)> = vm.cpu_features.iter().map(|(name, is_on)| (name.as_str(), *is_on)).collect();
        let expected = [
            ("hv-relaxed", true),
            ("hv-spinlocks", true),
            ("hv-time", true),
            ("invtsc", true),
            ("kvm-hint-dedicated", true),
            ("kvm-pv-eoi", false),
            ("kvmclock", false),
            ("migratable", false),
            ("vmx", false),
        ];
        assert_eq!(features, expected);
        assert_eq!((&vm.unmergeable[..], vm.needs_shared_memory), (&["memory is shared".to_owned()][..], true));
        let nodes: Vec<_> = vm
            .virtual_nodes
            .iter()
            .map(|node| {
                (node.vcpus.to_string(), node.memory_bytes, node.policy.as_deref(), node.host_nodes.to_string())
            })
            .collect();
        let node = |cpus: &str, policy, nodes: &str| (cpus.to_owned(), Some(2 << 30), Some(policy), nodes.to_owned());
        assert_eq!(nodes, [node("0-1", "bind", "0-1"), node("2-3", "preferred", "1")]);
        let [block, remote] = &vm.disks[..] else { panic!("{:?}", vm.disks) };
        assert_eq!(
            (block.id.as_str(), block.local, block.virtio_blk, block.iothreads),
            ("virtio-disk1", true, true, 1)
        );
        assert!(block.direct && block.aio == "native" && !remote.local && !remote.direct);
        let networks: Vec<_> =
            vm.networks.iter().map(|n| (n.id.as_str(), n.kind.as_str(), n.vhost, n.queues)).collect();
        let expected =
            [("hostnet1", "tap", true, 1), ("hostnet2", "tap", false, 4), ("hostnet3", "vhost-user", false, 1)];
        assert_eq!(networks, expected);
        assert_eq!(default_drivers, ["hostnet1", "hostnet3"].map(str::to_owned).into());
    }

    #[test]
    fn plain_definition_has_defaults() {
        let text = "<domain type='qemu'><name>a</name><memory>1024</memory><vcpu>2</vcpu></domain>";
        let vm = libvirt_definition(text.as_bytes()).unwrap().vm;
        assert_eq!((vm.kvm, vm.cpu_model, vm.vcpus, vm.memory_bytes), (false, None, Some(2), Some(1 << 20)));
        assert!(vm.unmergeable.is_empty() && vm.virtual_nodes.is_empty() && !vm.windows && !vm.guest_memfd);
        let confidential = text.replace("</domain>", "<launchSecurity type='tdx'/></domain>");
        assert!(libvirt_definition(confidential.as_bytes()).unwrap().vm.guest_memfd);
    }

    #[test]
    fn other_texts_are_malformed() {
        for text in ["", "x", "<network><name>a</name></network>", "<domain type='kvm'/>", "<domstatus/>"] {
            assert!(libvirt_definition(text.as_bytes()).is_err(), "{text}");
        }
        assert!(libvirt_definition(&[0xff]).is_err());
    }

    proptest! {
        #[test]
        fn any_definition_is_parsed_without_panic(position in 0..DEFINITION.len(), text in "[ -~]{0,12}") {
            let mut definition = DEFINITION.to_owned();
            definition.insert_str(position, &text);
            _ = libvirt_definition(definition.as_bytes());
            _ = libvirt_definition(definition.replace('4', &text).as_bytes());
        }
    }
}
