//! The definition of a virtual machine on the command line of QEMU, as far as the audit of settings needs it: virtual
//! CPUs, memory, disks and network devices (qemu-options.hx, QEMU 10).
//!
//! libvirt writes `-blockdev`, `-device`, `-netdev` and `-object` as JSON. Nested values are flattened to the names
//! that the other form has: `{"cache":{"direct":true}}` is `cache.direct=on`.
//!
//! Limits: defaults in configuration files of QEMU and later changes by QMP are not visible. A machine with
//! `-readconfig` has no definition here, for most of it is in the file.

use super::virtual_nodes::{VirtualNode, virtual_nodes};
use super::vm::{Parameters, options, parse_parameters, parse_qemu, parse_size};
use crate::reading::{Absent, Reading};
use serde_json::Value;
use std::collections::BTreeMap;

/// Maximum length of a chain of `-blockdev` nodes: filters, a format and a file. The limit ends chains in circles.
const MAX_BLOCK_NODES: usize = 16;

/// The definition of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmDefinition {
    /// Whether it uses KVM: `-accel kvm`, `-enable-kvm`, `-machine accel=kvm`, or a program of the name `kvm`.
    pub kvm: bool,
    /// The model of its virtual CPUs; `None` for QEMU's default, `qemu64` or `qemu32`.
    pub cpu_model: Option<String>,
    /// Features of the virtual CPU that are set, by QEMU's name with `-` in place of `_`.
    pub cpu_features: BTreeMap<String, bool>,
    /// Virtual CPUs that it starts with; `None` if `-smp` cannot be read.
    pub vcpus: Option<u32>,
    /// The memory that it starts with; `None` if neither `-m` nor the backend of the machine tells.
    pub memory_bytes: Option<u64>,
    /// Its virtual NUMA nodes.
    pub virtual_nodes: Vec<VirtualNode>,
    /// `-overcommit cpu-pm=on`: the guest enters power states of CPUs without an exit.
    pub cpu_pm: bool,
    /// `-rtc base=localtime` or features of Hyper-V: the guest is Windows, as far as the command line shows.
    pub windows: bool,
    /// Why KSM cannot merge its memory: `share=on`, `hugetlb`; empty if it can.
    pub unmergeable: Vec<String>,
    /// The setting by which its owner forbids merging: `mem-merge=off`, `merge=off` of a backend, `nosharepages`.
    pub opt_out: Option<String>,
    /// Whether its memory is private to the guest, in guest_memfd (SEV-SNP, TDX): the host cannot map it.
    pub guest_memfd: bool,
    /// Whether a device needs shared memory: vhost-user, as virtiofs uses it.
    pub needs_shared_memory: bool,
    /// The version in its machine type, such as 9.0 of `pc-q35-9.0`: QEMU is at least as new. `None` without one, and for
    /// machine types of a distribution.
    pub machine_version: Option<(u32, u32)>,
    /// Its disks.
    pub disks: Vec<VmDisk>,
    /// Its virtio network devices with a backend of the host (`-netdev`).
    pub networks: Vec<VmNetwork>,
}

/// A disk of a virtual machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmDisk {
    /// The id of the device, else of the drive.
    pub id: String,
    /// Whether it is a file or block device of the host, for which cache and aio have a meaning.
    pub local: bool,
    /// Whether it is a virtio disk of its own (`virtio-blk`), which an iothread can serve.
    pub virtio_blk: bool,
    /// Iothreads that serve it; 0 for the main loop.
    pub iothreads: u32,
    /// The iothread that serves it alone, as far as the command line names it.
    pub iothread: Option<String>,
    /// Whether it bypasses the page cache of the host (`cache.direct=on`, `cache=none`).
    pub direct: bool,
    /// The interface of asynchronous I/O: `threads` (the default), `native`, `io_uring`.
    pub aio: String,
}

/// A virtio network device of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmNetwork {
    /// The id of its backend.
    pub id: String,
    /// The type of its backend: `tap`, `user`, `vhost-user`.
    pub kind: String,
    /// Whether the kernel handles its packets (`vhost=on`).
    pub vhost: bool,
    /// The number of its queues.
    pub queues: u32,
}

/// Parses the arguments of QEMU.
///
/// # Errors
/// `Malformed` for a machine whose definition is in a file (`-readconfig`).
pub fn parse_vm_definition(arguments: &[String]) -> Reading<VmDefinition> {
    let (program, rest) =
        arguments.split_first().ok_or_else(|| Absent::Malformed("an empty command line".to_owned()))?;
    if options(rest).any(|(option, _)| option == "readconfig") {
        return Err(Absent::Malformed("the definition is in the file of -readconfig".to_owned()));
    }
    let options: Vec<(&str, Parameters)> =
        options(rest).map(|(name, value)| (name, parse_option(name, value))).collect();
    let all = |name: &'static str| options.iter().filter(move |(option, _)| *option == name).map(|(_, value)| value);
    let (cpu_model, cpu_features) = parse_cpu(all("cpu").next_back());
    let has_hyper_v = cpu_features.iter().any(|(name, enabled)| name.starts_with("hv-") && *enabled);
    let accelerators: Vec<&String> = all("accel")
        .filter_map(|value| value.get("accel"))
        .chain(all("machine").chain(all("M")).filter_map(|value| value.get("accel")))
        .collect();
    let is_kvm_program = matches!(program.rsplit('/').next(), Some("kvm" | "qemu-kvm" | "kvm-spice"));
    Ok(VmDefinition {
        kvm: match accelerators.first() {
            Some(accelerator) => accelerator.split(':').next() == Some("kvm"),
            None => is_kvm_program || options.iter().any(|(name, _)| *name == "enable-kvm"),
        },
        vcpus: match all("smp").next_back() {
            None => Some(1),
            Some(smp) => count_vcpus(smp),
        },
        memory_bytes: find_memory_bytes(all("m").next_back(), all("machine").next_back(), all("object")),
        virtual_nodes: virtual_nodes(arguments),
        guest_memfd: has_guest_memfd(all("machine").chain(all("M")), all("object")),
        cpu_pm: all("overcommit").any(|value| is_on(value, "cpu-pm")),
        windows: has_hyper_v || all("rtc").any(|value| value.get("base").is_some_and(|base| base == "localtime")),
        unmergeable: find_unmergeable(all("object"), all("mem-path").count() > 0),
        opt_out: parse_qemu(rest).opt_out(),
        needs_shared_memory: ["device", "netdev"].into_iter().flat_map(all).any(|value| {
            let kinds = [value.get("driver"), value.get("type")];
            kinds.into_iter().flatten().any(|kind| kind.starts_with("vhost-user"))
        }),
        machine_version: all("machine")
            .chain(all("M"))
            .filter_map(|value| value.get("type"))
            .find_map(|machine| machine_version(machine)),
        disks: parse_disks(&options),
        networks: parse_networks(all("netdev"), all("device")),
        cpu_model,
        cpu_features,
    })
}

/// The parameters of an option; the name of a first value without one depends on the option.
fn parse_option(name: &str, value: &str) -> Parameters {
    if value.starts_with('{') {
        let mut parameters = Parameters::new();
        if let Ok(object) = serde_json::from_str(value) {
            flatten("", &object, &mut parameters);
        }
        return parameters;
    }
    parse_parameters(
        value,
        match name {
            "smp" => "cpus",
            "m" => "size",
            "cpu" => "model",
            "accel" => "accel",
            "device" | "blockdev" => "driver",
            "object" => "qom-type",
            _ => "type",
        },
    )
}

/// The version at the end of a machine type (QEMU: include/hw/boards.h, `MACHINE_VER_TYPE_NAME`).
pub fn machine_version(machine: &str) -> Option<(u32, u32)> {
    let (_, version) = machine.rsplit_once('-')?;
    let (major, minor) = version.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Adds the values within a JSON value by dotted names.
fn flatten(name: &str, value: &Value, parameters: &mut Parameters) {
    let join = |key: &str| if name.is_empty() { key.to_owned() } else { format!("{name}.{key}") };
    match value {
        Value::Object(object) => object.iter().for_each(|(key, value)| flatten(&join(key), value, parameters)),
        Value::Array(array) => {
            array
                .iter()
                .enumerate()
                .for_each(|(position, value)| flatten(&join(&position.to_string()), value, parameters));
        }
        Value::String(text) => drop(parameters.insert(name.to_owned(), text.clone())),
        Value::Bool(on) => drop(parameters.insert(name.to_owned(), if *on { "on" } else { "off" }.to_owned())),
        Value::Number(number) => drop(parameters.insert(name.to_owned(), number.to_string())),
        Value::Null => {}
    }
}

fn is_on(parameters: &Parameters, key: &str) -> bool {
    parameters.get(key).is_some_and(|value| matches!(value.as_str(), "on" | "yes" | "true" | "y"))
}

/// The model and features of `-cpu host,+vmx,kvm_pv_eoi=off` (target/i386/cpu.c, `x86_cpu_parse_featurestr`): `+` and
/// `-` are older forms, which win.
fn parse_cpu(cpu: Option<&Parameters>) -> (Option<String>, BTreeMap<String, bool>) {
    let Some(cpu) = cpu else { return (None, BTreeMap::new()) };
    let normal = |name: &str| name.replace('_', "-");
    let (old, new): (Vec<_>, Vec<_>) =
        cpu.iter().filter(|(name, _)| *name != "model").partition(|(name, _)| name.starts_with(['+', '-']));
    let new = new.into_iter().filter_map(|(name, value)| match value.as_str() {
        "on" | "yes" | "true" | "y" => Some((normal(name), true)),
        "off" | "no" | "false" | "n" => Some((normal(name), false)),
        // hv-spinlocks takes a number of tries.
        value if name.starts_with("hv") => Some((normal(name), value != "0")),
        _ => None,
    });
    let old = old.into_iter().map(|(name, _)| (normal(&name[1..]), name.starts_with('+')));
    (cpu.get("model").cloned(), new.chain(old).collect())
}

/// Virtual CPUs by `-smp` (hw/core/machine-smp.c): `cpus`, else the product of the others.
fn count_vcpus(smp: &Parameters) -> Option<u32> {
    let number = |key: &str| smp.get(key).map_or(Some(1), |value| value.parse().ok());
    if smp.contains_key("cpus") {
        return number("cpus");
    }
    ["sockets", "dies", "clusters", "modules", "cores", "threads"]
        .into_iter()
        .try_fold(1u32, |product, key| product.checked_mul(number(key)?))
}

/// The unit of a bare number of `-m`.
const MEMORY_OPTION_UNIT_BYTES: u64 = 1 << 20;

/// The memory by `-m`, else by the backend that the machine option names (hw/core/machine.c).
fn find_memory_bytes<'a>(
    memory: Option<&Parameters>,
    machine: Option<&Parameters>,
    mut objects: impl Iterator<Item = &'a Parameters>,
) -> Option<u64> {
    if let Some(memory) = memory {
        return parse_size(memory.get("size")?, MEMORY_OPTION_UNIT_BYTES);
    }
    let id = machine?.get("memory-backend")?;
    parse_size(objects.find(|object| object.get("id") == Some(id))?.get("size")?, 1)
}

/// Whether the memory is in guest_memfd: machines with an object of SEV-SNP or TDX demand it
/// (target/i386/kvm/tdx.c and sev.c, `require_guest_memfd`; QEMU 9.1 and 10.1).
fn has_guest_memfd<'a>(
    mut machines: impl Iterator<Item = &'a Parameters>,
    objects: impl Iterator<Item = &'a Parameters>,
) -> bool {
    let supports: Vec<&String> = objects
        .filter(|object| {
            object.get("qom-type").is_some_and(|kind| matches!(kind.as_str(), "sev-snp-guest" | "tdx-guest"))
        })
        .filter_map(|object| object.get("id"))
        .collect();
    machines.any(|machine| machine.get("confidential-guest-support").is_some_and(|id| supports.contains(&id)))
}

/// Why KSM cannot merge memory of these backends.
fn find_unmergeable<'a>(objects: impl Iterator<Item = &'a Parameters>, has_mem_path: bool) -> Vec<String> {
    let mut reasons: Vec<String> = objects
        .filter_map(|object| {
            let kind = object.get("qom-type").filter(|kind| kind.starts_with("memory-backend-"))?;
            let shares_by_default = matches!(kind.as_str(), "memory-backend-memfd" | "memory-backend-shm");
            let is_shared = if object.contains_key("share") { is_on(object, "share") } else { shares_by_default };
            let path = object.get("mem-path").map_or("", String::as_str);
            let reason = if is_on(object, "hugetlb") || path.contains("huge") {
                "hugetlb"
            } else if is_shared {
                "shared"
            } else {
                return None;
            };
            Some(format!("{} is {reason}", object.get("id").map_or("memory", String::as_str)))
        })
        .collect();
    reasons.extend(has_mem_path.then(|| "-mem-path".to_owned()));
    reasons
}

fn parse_disks(options: &[(&str, Parameters)]) -> Vec<VmDisk> {
    let drives = || options.iter().filter(|(name, _)| *name == "drive").map(|(_, value)| value);
    let nodes = || options.iter().filter(|(name, _)| *name == "blockdev").map(|(_, value)| value);
    let find = |id: &str| {
        let is_id = |value: &&Parameters, key: &str| value.get(key).is_some_and(|known| known == id);
        drives().find(|drive| is_id(drive, "id")).or_else(|| nodes().find(|node| is_id(node, "node-name")))
    };
    let mut disks = Vec::new();
    for (_, device) in options.iter().filter(|(name, _)| *name == "device") {
        let driver = device.get("driver").map_or("", String::as_str);
        let Some(drive) = device.get("drive") else { continue };
        if driver.ends_with("-cd") {
            continue;
        }
        let mut node = find(drive);
        // The driver of a format refers to the node of its file.
        for _ in 0..MAX_BLOCK_NODES {
            let file = node.and_then(|node| node.get("file"));
            match nodes().find(|node| file.is_some() && node.get("node-name") == file) {
                Some(file) => node = Some(file),
                None => break,
            }
        }
        let Some(node) = node.filter(|node| node.get("media").is_none_or(|media| media != "cdrom")) else { continue };
        let mapped = device.keys().filter(|key| key.starts_with("iothread-vq-mapping.") && key.ends_with(".iothread"));
        disks.push(VmDisk {
            id: device.get("id").unwrap_or(drive).clone(),
            virtio_blk: driver.starts_with("virtio-blk"),
            iothreads: (mapped.count() as u32).max(u32::from(device.contains_key("iothread"))),
            iothread: device.get("iothread").cloned(),
            ..parse_drive(node)
        });
    }
    let virtio = drives().filter(|drive| drive.get("if").is_some_and(|interface| interface == "virtio"));
    disks.extend(virtio.map(|drive| VmDisk {
        id: drive.get("id").cloned().unwrap_or_else(|| "drive".to_owned()),
        virtio_blk: true,
        ..parse_drive(drive)
    }));
    disks
}

/// The host's side of a disk, from `-drive` or the node of its file.
fn parse_drive(node: &Parameters) -> VmDisk {
    let either = |key: &str| node.get(key).or_else(|| node.get(&format!("file.{key}")));
    let driver = node.get("file.driver").or_else(|| node.get("driver")).map_or("", String::as_str);
    let path = either("filename").or_else(|| node.get("file")).map_or("", String::as_str);
    let is_local = matches!(driver, "file" | "host_device" | "raw" | "qcow2" | "");
    VmDisk {
        local: is_local && !path.is_empty() && !path.contains("://"),
        direct: either("cache.direct").is_some_and(|value| matches!(value.as_str(), "on" | "true" | "yes"))
            || node.get("cache").is_some_and(|cache| matches!(cache.as_str(), "none" | "directsync")),
        aio: either("aio").cloned().unwrap_or_else(|| "threads".to_owned()),
        ..VmDisk::default()
    }
}

fn parse_networks<'a>(
    backends: impl Iterator<Item = &'a Parameters>,
    devices: impl Iterator<Item = &'a Parameters>,
) -> Vec<VmNetwork> {
    let is_virtio = |device: &&Parameters| device.get("driver").is_some_and(|driver| driver.starts_with("virtio-net"));
    let used: Vec<&String> = devices.filter(is_virtio).filter_map(|device| device.get("netdev")).collect();
    let parse = |backend: &Parameters| {
        let id = backend.get("id").filter(|id| used.contains(id))?;
        let descriptors = backend.get("fds").map(|fds| fds.split(':').count() as u32);
        Some(VmNetwork {
            id: id.clone(),
            kind: backend.get("type").cloned().unwrap_or_default(),
            vhost: is_on(backend, "vhost") || ["vhostfd", "vhostfds"].iter().any(|key| backend.contains_key(*key)),
            queues: backend.get("queues").and_then(|queues| queues.parse().ok()).or(descriptors).unwrap_or(1),
        })
    };
    backends.filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn definition(command: &str) -> VmDefinition {
        let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        parse_vm_definition(&arguments).unwrap()
    }

    #[test]
    fn json_of_libvirt_is_parsed() {
        let vm = definition(
            r#"/usr/bin/qemu-system-x86_64 -name guest=web -machine pc-q35-8.2,memory-backend=pc.ram -accel kvm
            -cpu host,migratable=on,hv-relaxed=on,hv_spinlocks=0x1fff,+vmx,kvm_pv_eoi=off -smp 8,sockets=2,cores=4,threads=1
            -object {"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"size":4294967296}
            -overcommit cpu-pm=on
            -blockdev {"driver":"host_device","filename":"/dev/vg/web","node-name":"libvirt-1-storage","cache":{"direct":true,"no-flush":false},"aio":"native"}
            -blockdev {"node-name":"libvirt-1-format","read-only":false,"driver":"raw","file":"libvirt-1-storage"}
            -device {"driver":"virtio-blk-pci","iothread-vq-mapping":[{"iothread":"iothread1"},{"iothread":"iothread2"}],"drive":"libvirt-1-format","id":"virtio-disk0"}
            -netdev {"type":"tap","fds":"33:34","vhost":true,"id":"hostnet0"}
            -device {"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0"}"#,
        );
        assert_eq!((vm.kvm, vm.cpu_model.as_deref(), vm.vcpus, vm.cpu_pm), (true, Some("host"), Some(8), true));
        assert!(vm.windows, "it has features of Hyper-V");
        assert_eq!(vm.machine_version, Some((8, 2)));
        assert!(!vm.cpu_features["kvm-pv-eoi"]);
        assert!(vm.cpu_features["vmx"] && vm.cpu_features["hv-spinlocks"]);
        assert_eq!(vm.unmergeable, ["pc.ram is shared"]);
        let disk = VmDisk {
            id: "virtio-disk0".into(),
            local: true,
            virtio_blk: true,
            iothreads: 2,
            iothread: None,
            direct: true,
            aio: "native".into(),
        };
        assert_eq!(vm.disks, [disk]);
        let network = VmNetwork { id: "hostnet0".into(), kind: "tap".into(), vhost: true, queues: 2 };
        assert_eq!(vm.networks, [network]);
    }

    #[test]
    fn version_of_the_machine_type_is_parsed() {
        let version = |options: &str| definition(&format!("qemu-system-x86_64 {options}")).machine_version;
        assert_eq!(version("-machine pc-q35-9.0,usb=off"), Some((9, 0)));
        assert_eq!(version("-M virt-10.1"), Some((10, 1)));
        assert_eq!(version("-machine accel=kvm,type=pc-i440fx-7.2"), Some((7, 2)));
        for options in ["", "-machine q35", "-machine pc-q35-rhel9.4.0", "-machine pc-q35-noble", "-machine accel=kvm"]
        {
            assert_eq!(version(options), None, "{options}");
        }
    }

    #[test]
    fn single_iothread_of_a_disk_is_named() {
        let disks = definition(
            "qemu -drive file=a,if=none,id=d -device virtio-blk-pci,drive=d,iothread=io0 -drive file=b,if=virtio,id=e",
        )
        .disks;
        let iothreads: Vec<_> = disks.iter().map(|disk| (disk.iothreads, disk.iothread.as_deref())).collect();
        assert_eq!(iothreads, [(1, Some("io0")), (0, None)]);
    }

    #[test]
    fn options_of_a_shell_script_are_parsed() {
        let vm = definition(
            "qemu-system-x86_64 -m 1G -smp sockets=2,cores=3 -enable-kvm -drive file=a.img,if=virtio,id=a \
             -drive file=b.img,if=none,id=b,cache=none,aio=io_uring -device scsi-hd,drive=b \
             -drive file=c.iso,if=none,id=c,media=cdrom -device ide-cd,drive=c \
             -netdev user,id=n0 -device virtio-net,netdev=n0 -netdev tap,id=n1,queues=4 -device e1000,netdev=n1 \
             -mem-path /dev/hugepages",
        );
        assert_eq!((vm.kvm, &vm.cpu_model, vm.vcpus, vm.cpu_pm, vm.windows), (true, &None, Some(6), false, false));
        assert_eq!(vm.unmergeable, ["-mem-path"]);
        let disk = |id: &str, virtio_blk, direct, aio: &str| VmDisk {
            id: id.into(),
            local: true,
            virtio_blk,
            iothreads: 0,
            iothread: None,
            direct,
            aio: aio.into(),
        };
        assert_eq!(vm.disks, [disk("b", false, true, "io_uring"), disk("a", true, false, "threads")]);
        assert_eq!(
            vm.networks.iter().map(|n| (&*n.id, &*n.kind, n.vhost)).collect::<Vec<_>>(),
            [("n0", "user", false)]
        );
    }

    #[test]
    fn setting_by_which_the_owner_forbids_merging_is_read() {
        let opt_out = |options: &str| definition(&format!("qemu-system-x86_64 {options}")).opt_out;
        assert_eq!(opt_out("-machine pc,mem-merge=off -m 1G").as_deref(), Some("mem-merge=off"));
        assert_eq!(opt_out("-object memory-backend-ram,id=m,size=1G,merge=off").as_deref(), Some("merge=off of m"));
        let json = r#"-object {"qom-type":"memory-backend-ram","id":"m","size":1024,"merge":false}"#;
        assert_eq!(opt_out(json).as_deref(), Some("merge=off of m"));
        assert_eq!(opt_out("-machine pc,mem-merge=on -object memory-backend-ram,id=m,size=1G"), None);
    }

    #[test]
    fn accelerator_is_the_first_that_is_named() {
        assert!(!definition("qemu-system-x86_64 -accel tcg -accel kvm").kvm);
        assert!(definition("qemu-system-x86_64 -machine q35,accel=kvm:tcg").kvm);
        assert!(definition("/usr/bin/kvm -id 100").kvm);
        assert!(!definition("qemu-system-x86_64 -m 1G").kvm);
    }

    #[test]
    fn memory_is_read_from_the_option_or_the_backend() {
        let memory = |options: &str| definition(&format!("qemu-system-x86_64 {options}")).memory_bytes;
        assert_eq!(memory("-m 2048"), Some(2 << 30));
        assert_eq!(memory("-m size=4G,slots=2,maxmem=8G"), Some(4 << 30));
        let backend =
            r#"-machine q35,memory-backend=ram -object {"qom-type":"memory-backend-ram","id":"ram","size":1024}"#;
        assert_eq!((memory(backend), memory("-m x"), memory("")), (Some(1024), None, None));
    }

    #[test]
    fn memory_of_confidential_guests_is_in_guest_memfd() {
        let is_private = |options: &str| definition(&format!("qemu-system-x86_64 {options}")).guest_memfd;
        for kind in ["sev-snp-guest", "tdx-guest"] {
            let machine = "-machine q35,confidential-guest-support=c";
            assert!(is_private(&format!("{machine} -object {kind},id=c,cbitpos=51")), "{kind}");
            assert!(is_private(&format!("{machine} -object {{\"qom-type\":\"{kind}\",\"id\":\"c\"}}")), "{kind}");
            assert!(!is_private(&format!("-object {kind},id=c")), "{kind} that the machine does not use");
        }
        // The memory of SEV and SEV-ES is encrypted in place.
        assert!(!is_private("-machine q35,confidential-guest-support=c -object sev-guest,id=c"));
        assert!(!is_private("-object memory-backend-memfd,id=m,size=1G"));
    }

    #[test]
    fn remote_disks_are_not_local() {
        let vm = definition(
            r#"qemu-kvm -blockdev {"driver":"rbd","pool":"p","image":"i","node-name":"n"} -device virtio-blk-pci,drive=n"#,
        );
        assert_eq!((vm.disks.len(), vm.disks[0].local), (1, false));
    }

    #[test]
    fn definition_in_a_file_is_absent() {
        let arguments = ["qemu-system-x86_64", "-readconfig", "vm.cfg"].map(String::from);
        assert!(matches!(parse_vm_definition(&arguments), Err(Absent::Malformed(_))));
        assert!(parse_vm_definition(&[]).is_err());
    }

    proptest::proptest! {
        #[test]
        fn any_arguments_are_parsed_without_panic(
            arguments in proptest::collection::vec("(-(cpu|smp|device|drive|blockdev|netdev|object))|[a-z+,=.{}\":0-9-]{0,30}", 0..12),
        ) {
            _ = parse_vm_definition(&arguments);
        }

        #[test]
        fn nodes_that_refer_to_each_other_end(first in 0..3u8, second in 0..3u8, third in 0..3u8) {
            let mut command = "qemu-kvm -device virtio-blk,drive=n0".to_owned();
            for (node, file) in [first, second, third].into_iter().enumerate() {
                command += &format!(" -blockdev driver=raw,node-name=n{node},file=n{file}");
            }
            let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
            _ = parse_vm_definition(&arguments);
        }
    }
}
