//! Options in the arguments of QEMU (QEMU 9.2, `qemu-options.hx`).
//!
//! An argument of an option is a list of `NAME=VALUE` with commas between; a comma inside a value is doubled
//! (util/keyval.c). `-blockdev`, `-device`, `-object` and `-netdev` may be JSON instead, as libvirt writes them.

use pagefold_base::identity::vm_definition::parse_vm_definition;
use pagefold_doctor::decide::change::{HostNode, VmOption};
use serde_json::{Map, Value, json};

/// Why memory of a machine stays where it is.
pub(super) const IN_FILE: &str =
    "its memory is in a file or in huge pages of the pool, which its owner chose: change the definition by hand";

/// The arguments with an option.
///
/// # Errors
/// Why they cannot have it, and what to do instead.
pub fn set_option(arguments: &[String], option: &VmOption) -> Result<Vec<String>, String> {
    let mut line = CommandLine(arguments.to_vec());
    match option {
        VmOption::HostCpuModel => line.set_cpu_model("host"),
        VmOption::CpuFeature { name, enable } => line.set_cpu_feature(name, on_off(*enable)),
        VmOption::HyperVSpinlocks { retries } => line.set_cpu_feature("hv-spinlocks", &format!("{retries:#x}")),
        VmOption::CpuPowerManagement { enable } => line.set_in_option("-overcommit", "cpu-pm", on_off(*enable)),
        VmOption::VirtualNodes { host_nodes } => line.split_into_nodes(host_nodes)?,
        VmOption::MergeableMemory => line.make_memory_mergeable()?,
        VmOption::DiskCacheNone { disk } => line.set_disk_cache_none(disk)?,
        VmOption::DiskAio { disk, interface } => line.set_disk_aio(disk, interface)?,
        VmOption::DiskIoThreads { disk, count } => line.add_io_threads(disk, *count)?,
        VmOption::VhostNet { network } => line.change_netdev(network, &[("vhost", json!(true))])?,
        VmOption::NetworkQueues { network, count } => line.set_queues(network, *count)?,
    }
    Ok(line.0)
}

fn on_off(enable: bool) -> &'static str {
    if enable { "on" } else { "off" }
}

/// The value of an option: a list of names and values, or JSON.
#[derive(Clone, Debug, PartialEq)]
enum OptionValue {
    /// Names with values; a value without a name is the implied first one, or a truth value.
    List(Vec<(Option<String>, String)>),
    Json(Map<String, Value>),
}

impl OptionValue {
    fn parse(text: &str) -> Self {
        if text.starts_with('{')
            && let Ok(Value::Object(object)) = serde_json::from_str(text)
        {
            return Self::Json(object);
        }
        let mut items = vec![String::new()];
        let mut rest = text.chars().peekable();
        while let Some(c) = rest.next() {
            match c {
                ',' if rest.peek() == Some(&',') => {
                    rest.next();
                    push_char(&mut items, ',');
                }
                ',' => items.push(String::new()),
                c => push_char(&mut items, c),
            }
        }
        let split = |item: String| match item.split_once('=') {
            Some((name, value)) => (Some(name.to_owned()), value.to_owned()),
            None => (None, item),
        };
        Self::List(items.into_iter().map(split).collect())
    }

    fn render(&self) -> String {
        match self {
            Self::Json(object) => Value::Object(object.clone()).to_string(),
            Self::List(items) => {
                let render = |(name, value): &(Option<String>, String)| {
                    let value = value.replace(',', ",,");
                    name.as_ref().map_or(value.clone(), |name| format!("{name}={value}"))
                };
                items.iter().map(render).collect::<Vec<_>>().join(",")
            }
        }
    }

    /// The value of a name as text.
    fn value(&self, name: &str) -> Option<String> {
        match self {
            Self::Json(object) => {
                let mut value = Some(object);
                let (parents, last) = name.rsplit_once('.').map_or(("", name), |(parents, last)| (parents, last));
                for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
                    value = value?.get(parent)?.as_object();
                }
                Some(match value?.get(last)? {
                    Value::String(text) => text.clone(),
                    Value::Bool(enable) => on_off(*enable).to_owned(),
                    other => other.to_string(),
                })
            }
            Self::List(items) => {
                let mut found = items.iter().rev().filter(|(known, _)| known.as_deref() == Some(name));
                found.next().map(|(_, value)| value.clone())
            }
        }
    }

    /// The type, which is the first value: `virtio-blk-pci` of `-device virtio-blk-pci,drive=d`.
    fn kind(&self, name: &str) -> String {
        match self {
            Self::List(items) => match items.first() {
                Some((None, value)) => value.clone(),
                _ => self.value(name).unwrap_or_default(),
            },
            Self::Json(_) => self.value(name).unwrap_or_default(),
        }
    }

    /// Sets a name, in place if it exists.
    fn set(&mut self, name: &str, value: Value) {
        match self {
            Self::Json(object) => {
                let (parents, last) = name.rsplit_once('.').map_or(("", name), |(parents, last)| (parents, last));
                let mut object = object;
                for parent in parents.split('.').filter(|parent| !parent.is_empty()) {
                    let child = object.entry(parent).or_insert_with(|| json!({}));
                    if !child.is_object() {
                        *child = json!({});
                    }
                    let Some(child) = child.as_object_mut() else { return };
                    object = child;
                }
                object.insert(last.to_owned(), value);
            }
            Self::List(items) => {
                let text = match value {
                    Value::String(text) => text,
                    Value::Bool(enable) => on_off(enable).to_owned(),
                    other => other.to_string(),
                };
                match items.iter_mut().find(|(known, _)| known.as_deref() == Some(name)) {
                    Some((_, value)) => *value = text,
                    None => items.push((Some(name.to_owned()), text)),
                }
            }
        }
    }

    fn remove(&mut self, name: &str) {
        match self {
            Self::Json(object) => drop(object.remove(name)),
            Self::List(items) => items.retain(|(known, _)| known.as_deref() != Some(name)),
        }
    }
}

fn push_char(items: &mut [String], c: char) {
    if let Some(last) = items.last_mut() {
        last.push(c);
    }
}

struct CommandLine(Vec<String>);

impl CommandLine {
    /// The positions of the values of an option, which may be written with one or two hyphens.
    fn positions(&self, option: &str) -> Vec<usize> {
        let is_option = |argument: &String| argument == option || argument.strip_prefix('-') == Some(option);
        (1..self.0.len()).filter(|&position| is_option(&self.0[position - 1])).collect()
    }

    /// The last value of an option.
    fn last(&self, option: &str) -> Option<(usize, OptionValue)> {
        self.positions(option).pop().map(|position| (position, OptionValue::parse(&self.0[position])))
    }

    /// The value of an option with this name and value in it.
    fn find(&self, option: &str, name: &str, value: &str) -> Option<(usize, OptionValue)> {
        let parsed = self.positions(option).into_iter().map(|at| (at, OptionValue::parse(&self.0[at])));
        parsed.into_iter().find(|(_, parsed)| parsed.value(name).as_deref() == Some(value))
    }

    fn put(&mut self, (position, value): (usize, OptionValue)) {
        if OptionValue::parse(&self.0[position]) != value {
            self.0[position] = value.render();
        }
    }

    fn push(&mut self, option: &str, value: String) {
        self.0.extend([option.to_owned(), value]);
    }

    fn set_in_option(&mut self, option: &str, name: &str, value: &str) {
        match self.last(option) {
            Some((position, mut parsed)) => {
                parsed.set(name, value.into());
                self.put((position, parsed));
            }
            None => self.push(option, format!("{name}={value}")),
        }
    }

    fn set_cpu_model(&mut self, model: &str) {
        match self.last("-cpu") {
            Some((position, OptionValue::List(mut items))) => {
                items[0] = (None, model.to_owned());
                self.put((position, OptionValue::List(items)));
            }
            _ => self.push("-cpu", model.to_owned()),
        }
    }

    /// `+NAME` and `-NAME` are older forms of `NAME=on` and `NAME=off`, and win over these (target/i386/cpu.c).
    fn set_cpu_feature(&mut self, name: &str, value: &str) {
        let Some((position, OptionValue::List(mut items))) = self.last("-cpu") else {
            // The default model of a machine, with the feature.
            return self.push("-cpu", format!("qemu64,{name}={value}"));
        };
        let alternative = name.replace('-', "_");
        items.retain(|(known, value)| {
            let old_form = value.strip_prefix(['+', '-']).filter(|_| known.is_none());
            old_form.is_none_or(|old| old != name && old.replace('-', "_") != alternative)
        });
        let mut parsed = OptionValue::List(items);
        let spelled = if parsed.value(&alternative).is_some() { &*alternative } else { name };
        parsed.set(spelled, value.into());
        self.put((position, parsed));
    }

    /// Each virtual node has memory of one host node. QEMU cannot bind virtual CPUs itself.
    fn split_into_nodes(&mut self, host_nodes: &[HostNode]) -> Result<(), String> {
        let count = host_nodes.len() as u32;
        if !self.positions("-numa").is_empty() {
            return Err("the machine has virtual nodes already: change its -numa options by hand".to_owned());
        }
        let machine = [self.last("-machine"), self.last("-M")].into_iter().flatten();
        if machine.into_iter().any(|(_, machine)| machine.value("memory-backend").is_some()) {
            return Err("its memory is one backend (memory-backend=): give each node a backend by hand".to_owned());
        }
        if let Some(option) = self.find_special_memory() {
            return Err(format!("its memory is special ({option}): give each node such a backend by hand"));
        }
        let cpus = self
            .last("-smp")
            .map_or(Some(1), |(_, smp)| smp.value("cpus").unwrap_or_else(|| smp.kind("cpus")).parse::<u32>().ok());
        let memory = self.last("-m").and_then(|(_, memory)| {
            let size = memory.value("size").unwrap_or_else(|| memory.kind("size"));
            parse_mebibytes(&size)
        });
        let (Some(cpus), Some(mebibytes)) = (cpus, memory) else {
            return Err("the number of its CPUs or its memory cannot be read from -smp and -m".to_owned());
        };
        if count < 2 || cpus % count != 0 || mebibytes % u64::from(count) != 0 {
            return Err(format!("{cpus} vCPUs and {mebibytes} MiB cannot be split into {count} equal nodes"));
        }
        self.split_sockets(cpus, count)?;
        let (node_cpus, node_mebibytes) = (cpus / count, mebibytes / u64::from(count));
        for (node, HostNode { id, .. }) in (0..).zip(host_nodes) {
            let backend = format!("id=vnode{node},size={node_mebibytes}M,policy=bind,host-nodes={id}");
            self.push("-object", format!("memory-backend-ram,{backend}"));
            let first = node * node_cpus;
            let cpus = if node_cpus == 1 { first.to_string() } else { format!("{first}-{}", first + node_cpus - 1) };
            self.push("-numa", format!("node,nodeid={node},cpus={cpus},memdev=vnode{node}"));
        }
        Ok(())
    }

    /// Gives each virtual node whole sockets: a guest expects the CPUs of a socket on one node. Since QEMU 6.2, `-smp 8`
    /// alone is one socket (hw/core/machine-smp.c, `machine_parse_smp_config`).
    fn split_sockets(&mut self, cpus: u32, nodes: u32) -> Result<(), String> {
        let Some((position, mut smp)) = self.last("-smp") else { return Ok(()) };
        let number = |name: &str| smp.value(name).map(|value| value.parse::<u32>().unwrap_or(0));
        if number("maxcpus").is_some_and(|maximum| maximum != cpus) {
            return Err("CPUs can be plugged later (-smp maxcpus=): give the machine virtual nodes by hand".to_owned());
        }
        let sockets = number("sockets").unwrap_or(1);
        if sockets > 0 && sockets.is_multiple_of(nodes) {
            return Ok(());
        }
        let inner = ["dies", "clusters", "modules", "threads"].map(|name| number(name).unwrap_or(1));
        let cores = socket_cores(cpus, nodes, &inner)
            .ok_or_else(|| format!("the sockets of -smp cannot be split between {nodes} nodes: change -smp by hand"))?;
        let has_cores = number("cores").is_some();
        smp.set("sockets", nodes.into());
        if has_cores {
            smp.set("cores", cores.into());
        }
        self.put((position, smp));
        Ok(())
    }

    /// An option by which memory is not plain: in a file or the pool, shared, or allocated at the start.
    fn find_special_memory(&self) -> Option<String> {
        let flags = ["-mem-path", "-mem-prealloc"];
        let is_flag = |argument: &&String| flags.contains(&argument.as_str()) || flags.contains(&&argument[1..]);
        if let Some(flag) = self.0.iter().filter(|argument| argument.starts_with('-')).find(is_flag) {
            return Some(flag.clone());
        }
        self.positions("-object").into_iter().find_map(|at| {
            let object = OptionValue::parse(&self.0[at]);
            let kind = object.kind("qom-type");
            let is_on = |name: &&&str| object.value(name).is_some_and(|value| value != "off");
            let option = ["share", "prealloc", "hugetlb", "mem-path"].iter().find(is_on);
            let is_special = kind.starts_with("memory-backend-") && (kind != "memory-backend-ram" || option.is_some());
            is_special.then(|| option.map_or(kind, |option| (*option).to_owned()))
        })
    }

    fn make_memory_mergeable(&mut self) -> Result<(), String> {
        let uses_shared = |option: &str, word: &str| {
            self.positions(option).iter().any(|&at| {
                let parsed = OptionValue::parse(&self.0[at]);
                parsed.kind("driver").contains(word) || parsed.kind("type").contains(word)
            })
        };
        if uses_shared("-device", "vhost-user") || uses_shared("-netdev", "vhost-user") {
            return Err("a vhost-user device needs shared memory, which KSM cannot merge".to_owned());
        }
        if let Some(setting) = parse_vm_definition(&self.0).ok().and_then(|definition| definition.opt_out) {
            return Err(format!("its owner forbids merging ({setting})"));
        }
        let is_in_file = |&at: &usize| {
            let object = OptionValue::parse(&self.0[at]);
            object.kind("qom-type").starts_with("memory-backend-")
                && (object.value("mem-path").is_some() || object.value("hugetlb").as_deref() == Some("on"))
        };
        if !self.positions("-mem-path").is_empty() || self.positions("-object").iter().any(is_in_file) {
            return Err(IN_FILE.to_owned());
        }
        for position in self.positions("-object") {
            let mut parsed = OptionValue::parse(&self.0[position]);
            let kind = parsed.kind("qom-type");
            if !kind.starts_with("memory-backend-") {
                continue;
            }
            if kind != "memory-backend-ram" {
                match &mut parsed {
                    OptionValue::List(items) => items[0] = (None, "memory-backend-ram".to_owned()),
                    OptionValue::Json(_) => parsed.set("qom-type", "memory-backend-ram".into()),
                }
                ["hugetlb", "hugetlbsize", "seal"].into_iter().for_each(|name| parsed.remove(name));
            }
            if parsed.value("share").as_deref() == Some("on") {
                parsed.remove("share");
            }
            self.put((position, parsed));
        }
        Ok(())
    }

    /// The node of a disk: `-drive` or `-blockdev` by its id, or by the device that uses it.
    fn find_drive(&self, disk: &str) -> Result<(usize, OptionValue), String> {
        let used = self.find("-device", "id", disk).and_then(|(_, device)| device.value("drive"));
        let names = [Some(disk.to_owned()), used];
        for name in names.iter().flatten() {
            let found = [("-drive", "id"), ("-blockdev", "node-name")];
            if let Some(found) = found.iter().find_map(|(option, key)| self.find(option, key, name)) {
                return Ok(found);
            }
        }
        Err(format!("no -drive or -blockdev of {disk} is on the command line"))
    }

    /// The nodes of a disk from the format down to the protocol.
    fn node_chain(&self, disk: &str) -> Result<Vec<(usize, OptionValue)>, String> {
        let mut chain = vec![self.find_drive(disk)?];
        while let Some(below) = chain.last().and_then(|(_, node)| node.value("file")) {
            match self.find("-blockdev", "node-name", &below) {
                Some(node) if chain.iter().all(|(position, _)| *position != node.0) => chain.push(node),
                _ => break,
            }
        }
        Ok(chain)
    }

    fn is_drive(&self, position: usize) -> bool {
        self.0[position - 1].trim_start_matches('-') == "drive"
    }

    fn set_disk_cache_none(&mut self, disk: &str) -> Result<(), String> {
        for (position, mut node) in self.node_chain(disk)? {
            if self.is_drive(position) {
                node.set("cache", "none".into());
            } else {
                node.set("cache.direct", json!(true));
            }
            self.put((position, node));
        }
        Ok(())
    }

    fn set_disk_aio(&mut self, disk: &str, interface: &str) -> Result<(), String> {
        let chain = self.node_chain(disk)?;
        let is_direct = chain.iter().all(|(_, node)| {
            node.value("cache.direct").as_deref() == Some("on")
                || node.value("cache").is_some_and(|cache| cache == "none" || cache == "directsync")
        });
        if interface == "native" && !is_direct {
            return Err("aio=native needs cache=none: set that first, or use io_uring".to_owned());
        }
        let (position, mut node) = chain.into_iter().last().unwrap_or((0, OptionValue::List(Vec::new())));
        let is_inline = node.value("file.driver").is_some() || node.value("file.filename").is_some();
        let name = if is_inline && !self.is_drive(position) { "file.aio" } else { "aio" };
        node.set(name, interface.into());
        self.put((position, node));
        Ok(())
    }

    /// The device that uses a disk.
    fn find_disk_device(&self, disk: &str) -> Result<(usize, OptionValue), String> {
        let found = self.find("-device", "id", disk).or_else(|| self.find("-device", "drive", disk));
        let (position, device) = found.ok_or_else(|| format!("no -device of {disk} is on the command line"))?;
        let kind = device.kind("driver");
        if kind.starts_with("virtio-blk") || kind.starts_with("virtio-scsi") {
            return Ok((position, device));
        }
        Err(format!("{kind} cannot use iothreads: virtio-blk and virtio-scsi can"))
    }

    fn add_io_threads(&mut self, disk: &str, count: u32) -> Result<(), String> {
        let (position, mut device) = self.find_disk_device(disk)?;
        let present = device.value("iothread");
        if device.value("iothread-vq-mapping").is_some() || present.is_some() && count < 2 {
            return Err(format!("{disk} has iothreads already"));
        }
        let added = count.max(1) - u32::from(present.is_some());
        let is_known = |name: &String| present.as_ref() == Some(name);
        let free_names = (0..).map(|number: u32| format!("{disk}-io{number}")).filter(|name| !is_known(name));
        let names: Vec<String> = free_names.take(added as usize).collect();
        if let (None, [name]) = (&present, &names[..]) {
            device.set("iothread", name.as_str().into());
        } else if let OptionValue::Json(properties) = &mut device {
            let all = present.iter().chain(&names);
            let mapping: Vec<Value> = all.map(|name| json!({"iothread": name})).collect();
            properties.remove("iothread");
            properties.insert("iothread-vq-mapping".to_owned(), mapping.into());
        } else {
            return Err(format!(
                "several iothreads need the device in JSON form (-device '{{\"driver\": ...}}'): convert {disk} by hand, \
                 or use one iothread"
            ));
        }
        self.put((position, device));
        // Objects must be on the command line before a device that is in JSON form, and may be anywhere otherwise.
        let first_device = self.positions("-device").into_iter().min().unwrap_or(self.0.len() + 1) - 1;
        for name in names.into_iter().rev() {
            self.0.splice(first_device..first_device, ["-object".to_owned(), format!("iothread,id={name}")]);
        }
        Ok(())
    }

    fn change_netdev(&mut self, network: &str, changes: &[(&str, Value)]) -> Result<(), String> {
        let found = self.find("-netdev", "id", network);
        let (position, mut netdev) =
            found.ok_or_else(|| format!("no -netdev with id={network} is on the command line"))?;
        let kind = netdev.kind("type");
        if kind != "tap" {
            return Err(format!("network {network} is {kind}: only tap has vhost and queues in the kernel"));
        }
        for (name, value) in changes {
            netdev.set(name, value.clone());
        }
        self.put((position, netdev));
        Ok(())
    }

    fn set_queues(&mut self, network: &str, count: u32) -> Result<(), String> {
        if let Some((_, netdev)) = self.find("-netdev", "id", network) {
            if ["fd", "fds", "vhostfd", "vhostfds"].iter().any(|name| netdev.value(name).is_some()) {
                return Err(format!(
                    "the program that starts {network} passes open files for its queues: change it there"
                ));
            }
            let has_several = netdev.value("queues").is_some_and(|queues| queues != "1");
            if let Some(device) = netdev.value("ifname").filter(|_| has_several != (count > 1)) {
                return Err(explain_queues_of_named_tap(network, &device, count));
            }
        }
        self.change_netdev(network, &[("queues", json!(count))])?;
        if let Some((position, mut device)) = self.find("-device", "netdev", network) {
            device.set("mq", json!(true));
            // Two vectors for each queue, one for changes of the configuration, one for the control queue.
            device.set("vectors", json!(2 * count + 2));
            self.put((position, device));
        }
        Ok(())
    }
}

/// Why a tap device that has a name does not change between one queue and several: if the device exists, the kernel
/// refuses QEMU with EINVAL unless both agree (drivers/net/tun.c, `tun_set_iff`, IFF_MULTI_QUEUE).
fn explain_queues_of_named_tap(network: &str, device: &str, count: u32) -> String {
    let (kind, several) = if count > 1 { ("several queues", " multi_queue") } else { ("one queue", "") };
    let for_device = if count > 1 { format!("mq=on,vectors={}", 2 * count + 2) } else { "mq=off".to_owned() };
    format!(
        "if the tap device {device} exists before QEMU starts, it must have been created with {kind}, or the machine does \
         not start. While the machine is off: `ip tuntap del dev {device} mode tap`, `ip tuntap add dev {device} mode \
         tap{several}` (with the same user and group), connect it to its bridge again, then set queues={count} of -netdev \
         {network} and {for_device} of its device"
    )
}

/// The cores of a socket, or of the innermost part of it that has several, if a machine has one socket for each node. `inner`
/// are the numbers of the other parts of a socket. `None` if it cannot be split.
pub(super) fn socket_cores(cpus: u32, nodes: u32, inner: &[u32]) -> Option<u32> {
    let others = inner.iter().try_fold(nodes, |product, count| product.checked_mul(*count))?;
    (others > 0 && cpus > 0 && cpus.is_multiple_of(others)).then(|| cpus / others)
}

/// A size of `-m` in MiB, which is its default unit.
fn parse_mebibytes(size: &str) -> Option<u64> {
    let (digits, mebibytes) = match size.char_indices().last()? {
        (at, 'G' | 'g') => (&size[..at], 1 << 10),
        (at, 'T' | 't') => (&size[..at], 1 << 20),
        (at, 'M' | 'm') => (&size[..at], 1),
        _ => (size, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(mebibytes)
}

#[cfg(test)]
mod tests;
