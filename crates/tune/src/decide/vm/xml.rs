//! Options in libvirt's XML (libvirt 11, docs/formatdomain.rst).
//!
//! The document is parsed only to find the places of a change. Each change replaces a few bytes, so that comments,
//! indentation and the elements of other programs stay.

use super::arguments::{IN_FILE, socket_cores};
use pagefold_base::IdSet;
use pagefold_base::libvirt::{LIBVIRT_FEATURES, LIBVIRT_TIMERS, libvirt_unit_bytes};
use pagefold_doctor::decide::change::{HostNode, VmOption};
use roxmltree::{Document, Node};
use std::ops::Range;

/// The document with an option.
///
/// # Errors
/// Why it cannot have it, and what to do instead.
pub fn set_option(xml: &str, option: &VmOption) -> Result<String, String> {
    match option {
        VmOption::HostCpuModel => set_host_model(xml),
        VmOption::CpuFeature { name, enable } => set_cpu_feature(xml, name, *enable),
        VmOption::HyperVSpinlocks { retries } => {
            let path = ["features", "hyperv", "spinlocks"];
            set_at(&set_at(xml, &path, "state", "on")?, &path, "retries", &retries.to_string())
        }
        VmOption::CpuPowerManagement { .. } => {
            Err("libvirt has no element for -overcommit cpu-pm: add it as <qemu:commandline> by hand".to_owned())
        }
        VmOption::VirtualNodes { host_nodes } => split_into_nodes(xml, host_nodes),
        VmOption::MergeableMemory => make_memory_mergeable(xml),
        VmOption::DiskCacheNone { disk } => set_disk_driver(xml, disk, &[("cache", "none")]),
        VmOption::DiskAio { disk, interface } => set_disk_aio(xml, disk, interface),
        VmOption::DiskIoThreads { disk, count } => add_io_threads(xml, disk, *count),
        VmOption::VhostNet { network } => set_network_driver(xml, network, &[("name", "vhost")]),
        VmOption::NetworkQueues { network, count } => {
            set_network_driver(xml, network, &[("name", "vhost"), ("queues", &count.to_string())])
        }
    }
}

/// The UUID of a domain's definition.
pub fn domain_uuid(xml: &str) -> Option<String> {
    let document = parse(xml).ok()?;
    Some(child(document.root_element(), "uuid")?.text()?.trim().to_owned())
}

fn parse(xml: &str) -> Result<Document<'_>, String> {
    let document = Document::parse(xml).map_err(|error| format!("libvirt's definition is not valid XML: {error}"))?;
    if document.root_element().has_tag_name("domain") {
        Ok(document)
    } else {
        Err("libvirt's definition is not that of a domain".to_owned())
    }
}

fn replace(xml: &str, range: Range<usize>, text: &str) -> String {
    format!("{}{text}{}", &xml[..range.start], &xml[range.end..])
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

/// The text with the attribute of an element, which must exist at the path below the root.
fn set_attribute(xml: &str, node: Node<'_, '_>, name: &str, value: &str) -> String {
    if let Some(attribute) = node.attribute_node(name) {
        return replace(xml, attribute.range_value(), value);
    }
    let position = node.range().start + 1 + tag_name(xml, node).len();
    replace(xml, position..position, &format!(" {name}='{value}'"))
}

/// The name in the start tag, with its prefix.
fn tag_name<'a>(xml: &'a str, node: Node<'_, '_>) -> &'a str {
    let tag = &xml[node.range().start + 1..node.range().end];
    tag.split(|c: char| c.is_ascii_whitespace() || c == '>' || c == '/').next().unwrap_or_default()
}

/// The text with a new last child of an element.
fn append_child(xml: &str, node: Node<'_, '_>, text: &str) -> String {
    let indent = indentation(xml, node);
    let range = node.range();
    let inner = format!("{indent}  {text}\n");
    if xml[range.clone()].ends_with("/>") {
        let name = tag_name(xml, node);
        let end = xml[range.start..range.end - 2].trim_end().len() + range.start;
        return replace(xml, end..range.end, &format!(">\n{inner}{indent}</{name}>"));
    }
    let close = xml[range.clone()].rfind("</").map_or(range.end, |at| range.start + at);
    match xml[range.start..close].rfind('\n').map(|newline| range.start + newline + 1) {
        Some(line) if xml[line..close].trim().is_empty() => replace(xml, line..line, &inner),
        _ => replace(xml, close..close, &format!("\n{inner}{indent}")),
    }
}

/// The white space before an element on its line.
fn indentation<'a>(xml: &'a str, node: Node<'_, '_>) -> &'a str {
    let start = node.range().start;
    let line = xml[..start].rfind('\n').map_or(0, |newline| newline + 1);
    if xml[line..start].trim().is_empty() { &xml[line..start] } else { "" }
}

/// The text without an element and its line.
fn remove_node(xml: &str, range: Range<usize>) -> String {
    let line = xml[..range.start].rfind('\n').map_or(0, |newline| newline + 1);
    let after = xml[range.end..].find('\n').map_or(range.end, |newline| range.end + newline + 1);
    let is_alone = xml[line..range.start].trim().is_empty() && xml[range.end..after].trim().is_empty();
    replace(xml, if is_alone { line..after } else { range }, "")
}

/// The text with all elements of a path below the root, created where they are missing.
fn ensure_path(xml: &str, path: &[&str]) -> Result<String, String> {
    let mut text = xml.to_owned();
    for depth in 1..=path.len() {
        let document = parse(&text)?;
        let parent = find_path(&document, &path[..depth - 1]).ok_or("the definition changed while it was edited")?;
        if child(parent, path[depth - 1]).is_none() {
            text = append_child(&text, parent, &format!("<{}/>", path[depth - 1]));
        }
    }
    Ok(text)
}

fn find_path<'a, 'input>(document: &'a Document<'input>, path: &[&str]) -> Option<Node<'a, 'input>> {
    path.iter().try_fold(document.root_element(), |node, name| child(node, name))
}

/// Sets an attribute of the element at a path.
fn set_at(xml: &str, path: &[&str], name: &str, value: &str) -> Result<String, String> {
    let text = ensure_path(xml, path)?;
    let document = parse(&text)?;
    let node = find_path(&document, path).ok_or("the definition changed while it was edited")?;
    Ok(if node.attribute(name) == Some(value) { text.clone() } else { set_attribute(&text, node, name, value) })
}

fn set_host_model(xml: &str) -> Result<String, String> {
    let document = parse(xml)?;
    if find_path(&document, &["cpu"]).and_then(|cpu| cpu.attribute("mode")) == Some("host-passthrough") {
        return Ok(xml.to_owned());
    }
    let mut text = set_at(xml, &["cpu"], "mode", "host-passthrough")?;
    // `match` and `model` belong to a named model.
    for name in ["model", "vendor"] {
        let document = parse(&text)?;
        if let Some(node) = find_path(&document, &["cpu", name]) {
            let range = node.range();
            text = remove_node(&text, range);
        }
    }
    let document = parse(&text)?;
    let range = find_path(&document, &["cpu"]).and_then(|cpu| Some(cpu.attribute_node("match")?.range()));
    Ok(match range {
        Some(range) => {
            let start = text[..range.start].trim_end().len();
            replace(&text, start..range.end, "")
        }
        None => text.clone(),
    })
}

fn set_timer(xml: &str, timer: &str, is_present: bool) -> Result<String, String> {
    let mut text = xml.to_owned();
    let document = parse(xml)?;
    if find_path(&document, &["clock"]).is_none() {
        // The schema demands an offset; `utc` is the default (docs/schemas/domaincommon.rng, `clock`).
        text = append_child(xml, document.root_element(), "<clock offset='utc'/>");
    }
    let document = parse(&text)?;
    let clock = find_path(&document, &["clock"]).ok_or("the definition changed while it was edited")?;
    let present = if is_present { "yes" } else { "no" };
    let existing = clock.children().find(|node| node.has_tag_name("timer") && node.attribute("name") == Some(timer));
    Ok(match existing {
        // A timer that is named is present unless it says no.
        Some(node) if node.attribute("present").unwrap_or("yes") == present => text.clone(),
        Some(node) => set_attribute(&text, node, "present", present),
        None => append_child(&text, clock, &format!("<timer name='{timer}' present='{present}'/>")),
    })
}

fn set_cpu_feature(xml: &str, name: &str, enable: bool) -> Result<String, String> {
    let name = name.replace('_', "-");
    if !name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.')) {
        return Err(format!("{name:?} is not the name of a CPU feature"));
    }
    if let Some((_, path, attribute)) = LIBVIRT_FEATURES.iter().find(|(known, ..)| *known == name) {
        return set_at(xml, path, attribute, if enable { "on" } else { "off" });
    }
    if let Some((_, timer)) = LIBVIRT_TIMERS.iter().find(|(known, _)| *known == name) {
        return set_timer(xml, timer, enable);
    }
    if name.starts_with("kvm") || name.starts_with("hv-") {
        return Err(format!("libvirt has no element for {name}: add it as <qemu:commandline> by hand"));
    }
    let policy = if enable { "require" } else { "disable" };
    let text = ensure_path(xml, &["cpu"])?;
    let document = parse(&text)?;
    let cpu = find_path(&document, &["cpu"]).ok_or("the definition changed while it was edited")?;
    let existing = cpu.children().find(|node| node.has_tag_name("feature") && node.attribute("name") == Some(&*name));
    Ok(match existing {
        Some(node) if node.attribute("policy") == Some(policy) => text.clone(),
        Some(node) => set_attribute(&text, node, "policy", policy),
        None => append_child(&text, cpu, &format!("<feature policy='{policy}' name='{name}'/>")),
    })
}

/// Each virtual node has memory and virtual CPUs of one host node.
fn split_into_nodes(xml: &str, host_nodes: &[HostNode]) -> Result<String, String> {
    let count = host_nodes.len() as u32;
    let document = parse(xml)?;
    if let Some(numa) = find_path(&document, &["cpu", "numa"]) {
        if numa.children().filter(|node| node.has_tag_name("cell")).count() == count as usize {
            return Ok(xml.to_owned());
        }
        return Err("the machine has virtual nodes already: change its <numa> by hand".to_owned());
    }
    if let Some(why) = find_split_refusal(&document) {
        return Err(why.to_owned());
    }
    let cpus = find_path(&document, &["vcpu"]).and_then(|node| node.text()?.trim().parse::<u32>().ok());
    let memory = find_path(&document, &["memory"]).and_then(|node| {
        let size = node.text()?.trim().parse::<u64>().ok()?;
        Some(size.checked_mul(libvirt_unit_bytes(node.attribute("unit"))?)? >> 10)
    });
    let (Some(cpus), Some(kibibytes)) = (cpus, memory) else {
        return Err("the number of its CPUs or its memory cannot be read from <vcpu> and <memory>".to_owned());
    };
    if count < 2 || cpus % count != 0 || kibibytes % (u64::from(count) << 10) != 0 {
        return Err(format!("{cpus} vCPUs and {kibibytes} KiB cannot be split into {count} equal nodes of whole MiB"));
    }
    let (node_cpus, node_kibibytes) = (cpus / count, kibibytes / u64::from(count));
    let mut text = split_sockets(xml, cpus, count)?;
    for (node, host_node) in (0..).zip(host_nodes) {
        let vcpus = node * node_cpus..(node + 1) * node_cpus;
        let ids: IdSet = vcpus.clone().collect();
        let cell = format!("<cell id='{node}' cpus='{ids}' memory='{node_kibibytes}' unit='KiB'/>");
        text = append_at(&text, &["cpu", "numa"], &cell)?;
        let memory = format!("<memnode cellid='{node}' mode='strict' nodeset='{}'/>", host_node.id);
        text = append_at(&text, &["numatune"], &memory)?;
        for vcpu in vcpus {
            text = pin_vcpu(&text, vcpu, &host_node.cpus)?;
        }
    }
    Ok(text)
}

/// Gives each virtual node whole sockets, as a guest expects. Without `<topology>`, libvirt gives each virtual CPU a socket
/// (src/qemu/qemu_command.c, `qemuBuildSmpCommandLine`).
fn split_sockets(xml: &str, cpus: u32, nodes: u32) -> Result<String, String> {
    let document = parse(xml)?;
    let Some(topology) = find_path(&document, &["cpu", "topology"]) else { return Ok(xml.to_owned()) };
    let number = |name: &str| topology.attribute(name).map_or(1, |value| value.parse::<u32>().unwrap_or(0));
    let sockets = number("sockets");
    if sockets > 0 && sockets.is_multiple_of(nodes) {
        return Ok(xml.to_owned());
    }
    let cores = socket_cores(cpus, nodes, &["dies", "clusters", "threads"].map(number))
        .ok_or_else(|| format!("the sockets of <topology> cannot be split between {nodes} nodes: change it by hand"))?;
    let text = set_attribute(xml, topology, "sockets", &nodes.to_string());
    let document = parse(&text)?;
    let topology = find_path(&document, &["cpu", "topology"]).ok_or("the definition changed while it was edited")?;
    Ok(set_attribute(&text, topology, "cores", &cores.to_string()))
}

/// Why a machine is not split: it has memory that virtual nodes would not have, or its owner has placed it.
fn find_split_refusal(document: &Document<'_>) -> Option<&'static str> {
    let backing = |path: &[&str]| find_path(document, &[&["memoryBacking"], path].concat());
    let attribute = |path: &[&str], name| backing(path).and_then(|node| node.attribute(name));
    let vcpu = find_path(document, &["vcpu"]);
    let is_placed =
        vcpu.is_some_and(|vcpu| vcpu.has_attribute("cpuset") || vcpu.attribute("placement") == Some("auto"));
    if backing(&["hugepages"]).is_some()
        || backing(&["source"]).is_some()
        || attribute(&["access"], "mode") == Some("shared")
        || attribute(&["allocation"], "mode") == Some("immediate")
    {
        Some("its memory is special (<memoryBacking>): give it virtual nodes by hand")
    } else if is_placed || find_path(document, &["numatune"]).is_some() {
        Some("its owner has placed it (<numatune>, <vcpu cpuset=>): give it virtual nodes by hand")
    } else {
        None
    }
}

/// The text with a new last child of the element at a path, which is created where it is missing.
fn append_at(xml: &str, path: &[&str], child: &str) -> Result<String, String> {
    let text = ensure_path(xml, path)?;
    let document = parse(&text)?;
    let parent = find_path(&document, path).ok_or("the definition changed while it was edited")?;
    Ok(append_child(&text, parent, child))
}

/// Binds a virtual CPU to CPUs, unless it is bound to some of them already.
fn pin_vcpu(xml: &str, vcpu: u32, cpus: &IdSet) -> Result<String, String> {
    let document = parse(xml)?;
    let pins = find_path(&document, &["cputune"]).into_iter().flat_map(|tune| tune.children());
    let mut pins = pins.filter(|node| node.has_tag_name("vcpupin"));
    let pin = pins.find(|node| node.attribute("vcpu").and_then(|number| number.parse().ok()) == Some(vcpu));
    match pin.map(|pin| pin.attribute("cpuset").unwrap_or_default()) {
        None => append_at(xml, &["cputune"], &format!("<vcpupin vcpu='{vcpu}' cpuset='{cpus}'/>")),
        Some(present) if present.parse::<IdSet>().is_ok_and(|present| present.is_subset(cpus)) => Ok(xml.to_owned()),
        Some(present) => Err(format!(
            "virtual CPU {vcpu} is bound to {present}, and its virtual node to {cpus}: change <vcpupin> by hand"
        )),
    }
}

fn make_memory_mergeable(xml: &str) -> Result<String, String> {
    let document = parse(xml)?;
    let needs_sharing = document.descendants().any(|node| {
        node.has_tag_name("interface") && node.attribute("type") == Some("vhostuser")
            || node.has_tag_name("driver") && node.attribute("type") == Some("virtiofs")
    });
    if needs_sharing {
        return Err("a vhost-user or virtiofs device needs shared memory, which KSM cannot merge".to_owned());
    }
    let backing = |name: &str| find_path(&document, &["memoryBacking", name]);
    if backing("nosharepages").is_some() {
        return Err("its owner forbids merging (nosharepages)".to_owned());
    }
    let is_file = backing("source").and_then(|source| source.attribute("type")) == Some("file");
    if backing("hugepages").is_some() || is_file {
        return Err(IN_FILE.to_owned());
    }
    let mut text = xml.to_owned();
    for name in ["source", "access"] {
        let document = parse(&text)?;
        if let Some(node) = find_path(&document, &["memoryBacking", name]) {
            let range = node.range();
            text = remove_node(&text, range);
        }
    }
    Ok(text)
}

/// The index of a target such as `vdb` (`src/util/virutil.c`, `virDiskNameToIndex`).
fn target_index(target: &str) -> Option<u32> {
    let letters =
        target.strip_prefix("vd").or_else(|| target.strip_prefix("sd")).or_else(|| target.strip_prefix("hd"))?;
    letters
        .bytes()
        .try_fold(0_u32, |index, letter| {
            let digit = u32::from(letter.is_ascii_lowercase().then(|| letter - b'a')?);
            index.checked_mul(26)?.checked_add(digit + 1)
        })?
        .checked_sub(1)
}

/// Whether an element is the disk of a name that QEMU or libvirt uses: its target, its alias, or the alias that libvirt
/// gives it.
fn is_disk(node: Node<'_, '_>, disk: &str) -> bool {
    let name = disk.trim_start_matches("drive-");
    let target = child(node, "target").and_then(|target| target.attribute("dev")).unwrap_or_default();
    let alias = child(node, "alias").and_then(|alias| alias.attribute("name"));
    let is_default_alias =
        target.starts_with("vd") && target_index(target).is_some_and(|index| name == format!("virtio-disk{index}"));
    node.has_tag_name("disk") && (target == name || alias == Some(name) || is_default_alias)
}

fn find_disk<'a, 'input>(document: &'a Document<'input>, disk: &str) -> Result<Node<'a, 'input>, String> {
    let devices = find_path(document, &["devices"]).ok_or("the definition has no devices")?;
    let found = devices.children().find(|node| is_disk(*node, disk));
    found.ok_or_else(|| format!("the definition has no disk {disk}: name it by its target, such as vda"))
}

/// Sets attributes of the driver of an element that `find` finds.
fn set_driver(
    xml: &str,
    find: impl for<'a, 'input> Fn(&'a Document<'input>) -> Result<Node<'a, 'input>, String>,
    attributes: &[(&str, &str)],
) -> Result<String, String> {
    let mut text = xml.to_owned();
    let document = parse(xml)?;
    let node = find(&document)?;
    if child(node, "driver").is_none() {
        text = append_child(&text, node, "<driver/>");
    }
    for (name, value) in attributes {
        let document = parse(&text)?;
        let driver = child(find(&document)?, "driver").ok_or("the definition changed while it was edited")?;
        if driver.attribute(*name) != Some(*value) {
            text = set_attribute(&text, driver, name, value);
        }
    }
    Ok(text)
}

fn set_disk_driver(xml: &str, disk: &str, attributes: &[(&str, &str)]) -> Result<String, String> {
    set_driver(xml, |document| find_disk(document, disk), attributes)
}

fn set_disk_aio(xml: &str, disk: &str, interface: &str) -> Result<String, String> {
    if !["native", "io_uring", "threads"].contains(&interface) {
        return Err(format!("{interface:?} is not an I/O interface of QEMU"));
    }
    let document = parse(xml)?;
    let cache = child(find_disk(&document, disk)?, "driver").and_then(|driver| driver.attribute("cache"));
    if interface == "native" && !matches!(cache, Some("none" | "directsync")) {
        return Err("io='native' needs cache='none': set that first, or use io_uring".to_owned());
    }
    set_disk_driver(xml, disk, &[("io", interface)])
}

fn add_io_threads(xml: &str, disk: &str, count: u32) -> Result<String, String> {
    let document = parse(xml)?;
    let node = find_disk(&document, disk)?;
    if child(node, "target").and_then(|target| target.attribute("bus")) != Some("virtio") {
        return Err(format!("{disk} is not a virtio disk: only these use iothreads"));
    }
    let present = child(node, "driver").map_or(0, |driver| match child(driver, "iothreads") {
        Some(threads) => threads.children().filter(|node| node.has_tag_name("iothread")).count(),
        None => usize::from(driver.attribute("iothread").is_some()),
    });
    if present == count.max(1) as usize {
        return Ok(xml.to_owned());
    }
    let single = child(node, "driver").and_then(|driver| driver.attribute_node("iothread"));
    if present > 0 && (single.is_none() || count < 2) {
        return Err(format!("{disk} has {present} iothreads already: change them by hand"));
    }
    let existing = find_path(&document, &["iothreads"]).and_then(|node| node.text()?.trim().parse::<u32>().ok());
    let (first, added) = (existing.unwrap_or(0) + 1, count.max(1) - present as u32);
    let text = match find_path(&document, &["iothreads"]) {
        Some(node) => replace(xml, node.range(), &format!("<iothreads>{}</iothreads>", first - 1 + added)),
        None => append_child(xml, document.root_element(), &format!("<iothreads>{added}</iothreads>")),
    };
    let new_ids = (first..first + added).map(|id| id.to_string());
    let ids: Vec<String> = single.iter().map(|single| single.value().to_owned()).chain(new_ids).collect();
    if let [id] = &ids[..] {
        return set_disk_driver(&text, disk, &[("iothread", id)]);
    }
    // The disk has a queue for each virtual CPU (QEMU), and libvirt spreads them over the iothreads.
    let text = remove_disk_iothread(&set_disk_driver(&text, disk, &[("name", "qemu")])?, disk)?;
    let document = parse(&text)?;
    let driver = child(find_disk(&document, disk)?, "driver").ok_or("the definition changed while it was edited")?;
    let threads: String = ids.iter().map(|id| format!("<iothread id='{id}'/>")).collect();
    Ok(append_child(&text, driver, &format!("<iothreads>{threads}</iothreads>")))
}

/// Removes the attribute that names the single iothread of a disk.
fn remove_disk_iothread(xml: &str, disk: &str) -> Result<String, String> {
    let document = parse(xml)?;
    let single = child(find_disk(&document, disk)?, "driver").and_then(|driver| driver.attribute_node("iothread"));
    let Some(range) = single.map(|single| single.range()) else { return Ok(xml.to_owned()) };
    // Attributes are separated by blanks.
    let start = xml[..range.start].trim_end().len();
    Ok(replace(xml, start..range.end, ""))
}

/// The interface of a name: its alias, its device on the host, or `hostnetN` for the interface at that position.
fn find_interface<'a, 'input>(document: &'a Document<'input>, network: &str) -> Result<Node<'a, 'input>, String> {
    let devices = find_path(document, &["devices"]).ok_or("the definition has no devices")?;
    let position = network.trim_start_matches("host").strip_prefix("net").and_then(|number| number.parse().ok());
    let interfaces = || devices.children().filter(|node| node.has_tag_name("interface"));
    let is_named = |node: &Node<'_, '_>| {
        let alias = child(*node, "alias").and_then(|alias| alias.attribute("name"));
        let device = child(*node, "target").and_then(|target| target.attribute("dev"));
        alias == Some(network.trim_start_matches("host")) || device == Some(network)
    };
    let found = interfaces().find(is_named).or_else(|| interfaces().nth(position?));
    found.ok_or_else(|| format!("the definition has no interface {network}"))
}

fn set_network_driver(xml: &str, network: &str, attributes: &[(&str, &str)]) -> Result<String, String> {
    let document = parse(xml)?;
    let node = find_interface(&document, network)?;
    if child(node, "model").and_then(|model| model.attribute("type")) != Some("virtio") {
        return Err(format!("interface {network} is not virtio: only these have vhost and queues"));
    }
    if node.attribute("type") == Some("user") {
        return Err(format!("interface {network} is of type user, which has no vhost"));
    }
    set_driver(xml, |document| find_interface(document, network), attributes)
}

#[cfg(test)]
mod tests;
