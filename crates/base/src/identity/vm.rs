//! Recognizes virtual machines by the command line of their monitor.
//!
//! - QEMU: qemu-options.hx and util/keyval.c for `key=value,...`, where `,,` is a comma, the first key may be left out
//!   and a bare `key` or `nokey` means on or off. libvirt writes `-object` and `-device` as JSON since 7.9. Settings in
//!   a file of `-readconfig` and later changes by QMP are not visible.
//! - Firecracker: a guest's memory is set over its socket, so it is not on the command line.
//! - cloud-hypervisor: options of several values (`--device path=A path=B`). A guest created over the socket, as by
//!   Kata Containers, has no memory on the command line either.

use super::container::libvirt_guest;
use super::{Monitor, Vm, VmMemoryBackend};
use std::collections::BTreeMap;

/// The virtual machine that a process runs, if its program is a known monitor.
pub(super) fn identify_vm(arguments: &[String], cgroup: Option<&str>) -> Option<Vm> {
    let (program, arguments) = arguments.split_first()?;
    let program = program.rsplit('/').next().unwrap_or(program);
    let guest = cgroup.and_then(libvirt_guest);
    // libvirt starts the program of `<emulator>`, and also puts helpers such as swtpm into the guest's cgroup.
    let is_emulator = || guest.is_some() && options(arguments).any(|(option, _)| matches!(option, "M" | "machine"));
    let is_qemu = program.starts_with("qemu-system-") || matches!(program, "qemu-kvm" | "kvm" | "kvm-spice");
    if is_qemu || is_emulator() {
        let vm = parse_qemu(arguments);
        return Some(Vm { name: vm.name.or(guest), ..vm });
    }
    // Released binaries have version and architecture in their names; firecracker-containerd is another program.
    if program == "firecracker" || program.starts_with("firecracker-v") {
        return Some(parse_firecracker(arguments));
    }
    matches!(program, "cloud-hypervisor" | "cloud-hypervisor-static").then(|| parse_cloud_hypervisor(arguments))
}

/// The technique that protects a guest's memory from its host, if the command line of a virtual machine names one.
/// QEMU: objects of AMD SEV and SEV-SNP, Intel TDX, IBM Secure Execution and PEF
/// (docs/system/confidential-guest-support.rst), or any other object that the machine option names. cloud-hypervisor:
/// `--platform tdx=on` and `sev_snp=on`.
pub(super) fn confidential_technique(arguments: &[String]) -> Option<String> {
    let Vm { monitor, .. } = identify_vm(arguments, None)?;
    let (_, arguments) = arguments.split_first()?;
    match monitor {
        Monitor::Qemu => {
            let objects = options(arguments).filter(|(option, _)| *option == "object");
            let mut kinds = objects.filter_map(|(_, value)| parse_properties(value, "qom-type").remove("qom-type"));
            let techniques = ["sev-guest", "sev-snp-guest", "tdx-guest", "s390-pv-guest", "pef-guest"];
            kinds.find(|kind| techniques.contains(&kind.as_str())).or_else(|| {
                let mut machines = options(arguments).filter(|(option, _)| matches!(*option, "M" | "machine"));
                let options = ["confidential-guest-support", "memory-encryption"];
                machines.find_map(|(_, value)| {
                    let machine = parse_parameters(value, "type");
                    options.into_iter().find(|key| machine.contains_key(*key)).map(str::to_owned)
                })
            })
        }
        Monitor::CloudHypervisor => option_values(arguments, "platform").into_iter().find_map(|value| {
            let platform = parse_parameters(value, "");
            let techniques = ["tdx", "sev_snp"];
            techniques.into_iter().find(|key| is_on(&platform, key) == Some(true)).map(str::to_owned)
        }),
        Monitor::Firecracker => None,
    }
}

pub(super) fn parse_qemu(arguments: &[String]) -> Vm {
    let mut name = None;
    let mut uuid = None;
    let mut memory = None;
    let mut machine = Parameters::new();
    let mut objects = Vec::new();
    let mut vfio = false;
    let mut control = None;
    let mut sockets = BTreeMap::new();
    let mut monitors = Vec::new();
    for (option, value) in options(arguments) {
        match option {
            "name" => {
                name = parse_parameters(value, "guest").remove("guest").filter(|guest| !guest.is_empty()).or(name)
            }
            "uuid" => uuid = Some(value.to_ascii_lowercase()),
            "m" => {
                memory = parse_parameters(value, "size").get("size").and_then(|text| parse_size(text, MIB)).or(memory)
            }
            "M" | "machine" => machine.extend(parse_parameters(value, "type")),
            "object" => objects.push(parse_properties(value, "qom-type")),
            "mem-path" => objects.push(mem_path()),
            "device" => {
                vfio |= parse_properties(value, "driver").get("driver").is_some_and(|driver| pins_guest_ram(driver))
            }
            "qmp" | "qmp-pretty" => control = control.or_else(|| listening_socket(value)),
            "chardev" => {
                let mut socket = parse_parameters(value, "backend");
                if is_on(&socket, "server") == Some(true)
                    && let (Some(id), Some(path)) = (socket.remove("id"), socket.remove("path"))
                {
                    sockets.insert(id, path);
                }
            }
            "mon" => monitors.push(parse_parameters(value, "chardev")),
            _ => {}
        }
    }
    let of_monitor = || {
        let control = monitors.iter().filter(|monitor| monitor.get("mode").is_some_and(|mode| mode == "control"));
        control.filter_map(|monitor| sockets.remove(monitor.get("chardev")?)).next()
    };
    let mem_merge = is_on(&machine, "mem-merge").unwrap_or(true);
    // Without -m a guest has the memory of the backend that the machine option names (hw/core/machine.c).
    let of_machine = || {
        let id = machine.get("memory-backend")?;
        let backend = objects.iter().find(|object| object.get("id") == Some(id))?;
        parse_size(backend.get("size")?, 1)
    };
    Vm {
        monitor: Monitor::Qemu,
        name,
        uuid,
        memory_bytes: memory.or_else(of_machine),
        backends: objects.iter().filter_map(|object| parse_backend(object, mem_merge)).collect(),
        mem_merge,
        vfio,
        control_socket: control.or_else(of_monitor),
    }
}

/// A memory backend from an object's properties, if it is one.
fn parse_backend(object: &Parameters, mem_merge: bool) -> Option<VmMemoryBackend> {
    let kind = object.get("qom-type").filter(|kind| kind.starts_with("memory-backend-"))?;
    // These share by default (backends/hostmem-memfd.c, hostmem-shm.c).
    let shares = matches!(kind.as_str(), "memory-backend-memfd" | "memory-backend-shm");
    Some(VmMemoryBackend {
        id: object.get("id").cloned().unwrap_or_default(),
        kind: kind.clone(),
        share: is_on(object, "share").unwrap_or(shares),
        merge: is_on(object, "merge").unwrap_or(mem_merge),
    })
}

/// The backend that QEMU creates for `-mem-path`, under the option's name: its id depends on the machine.
fn mem_path() -> Parameters {
    [("qom-type", "memory-backend-file"), ("id", "mem-path")].map(|(key, value)| (key.into(), value.into())).into()
}

/// Devices of the kernel's VFIO driver: it pins all memory that they may reach by DMA. `vfio-user` devices run in
/// another process and pin nothing.
fn pins_guest_ram(driver: &str) -> bool {
    driver.starts_with("vfio-") && !driver.starts_with("vfio-user")
}

/// The path in `unix:PATH,server=on`. Without `server` QEMU is the client, and the socket does not accept connections.
fn listening_socket(value: &str) -> Option<String> {
    let mut parts = split_at_commas(value).into_iter();
    let path = parts.next()?.strip_prefix("unix:")?.to_owned();
    let server = is_on(&parse_pairs(parts), "server") == Some(true);
    server.then_some(path)
}

fn parse_firecracker(arguments: &[String]) -> Vm {
    let value = |name| option_values(arguments, name).first().map(|&value| value.to_owned());
    Vm {
        monitor: Monitor::Firecracker,
        name: value("id"),
        uuid: None,
        memory_bytes: None,
        backends: Vec::new(),
        mem_merge: false,
        vfio: false,
        control_socket: value("api-sock"),
    }
}

fn parse_cloud_hypervisor(arguments: &[String]) -> Vm {
    let memory =
        option_values(arguments, "memory").first().map(|value| parse_parameters(value, "size")).unwrap_or_default();
    let zones = option_values(arguments, "memory-zone").into_iter().map(|value| parse_parameters(value, "id"));
    let mem_merge = is_on(&memory, "mergeable") == Some(true);
    let mut total: Option<u64> = None;
    let mut backends = Vec::new();
    for (kind, part) in [("memory", memory)].into_iter().chain(zones.map(|zone| ("memory-zone", zone))) {
        let Some(bytes) = part.get("size").and_then(|text| parse_size(text, 1)) else { continue };
        total = Some(total.unwrap_or(0).saturating_add(bytes));
        // With zones, --memory only has settings and size=0.
        if bytes > 0 {
            let id = part.get("id").cloned().unwrap_or_else(|| kind.to_owned());
            let share = is_on(&part, "shared") == Some(true);
            backends.push(VmMemoryBackend { id, kind: kind.to_owned(), share, merge: mem_merge });
        }
    }
    let mut platforms = option_values(arguments, "platform").into_iter();
    let control =
        option_values(arguments, "api-socket").first().and_then(|value| parse_parameters(value, "path").remove("path"));
    Vm {
        monitor: Monitor::CloudHypervisor,
        name: control.as_deref().and_then(name_of_socket),
        uuid: platforms
            .find_map(|value| parse_parameters(value, "").remove("uuid"))
            .map(|uuid| uuid.to_ascii_lowercase()),
        memory_bytes: total,
        backends,
        mem_merge,
        vfio: !option_values(arguments, "device").is_empty(),
        control_socket: control,
    }
}

/// cloud-hypervisor has no option for a name. The name of its socket file identifies the guest, or the directory if the
/// file is always `clh-api.sock` (Kata Containers, virtcontainers/clh.go).
fn name_of_socket(path: &str) -> Option<String> {
    let mut parts = path.rsplit('/');
    let file = parts.next()?;
    let name =
        if file == "clh-api.sock" { parts.next()? } else { file.rsplit_once('.').map_or(file, |(stem, _)| stem) };
    (!name.is_empty()).then(|| name.to_owned())
}

pub(super) type Parameters = BTreeMap<String, String>;

/// QEMU's options, each with the next argument, which is its value if it takes one. One dash and two are equivalent.
pub(super) fn options(arguments: &[String]) -> impl Iterator<Item = (&str, &str)> {
    arguments.iter().enumerate().filter_map(|(position, argument)| {
        let option = argument.strip_prefix("--").or_else(|| argument.strip_prefix('-'))?;
        Some((option, arguments.get(position + 1).map_or("", String::as_str)))
    })
}

/// The values of a long option: after `=`, or the arguments up to the next option.
fn option_values<'a>(arguments: &'a [String], name: &str) -> Vec<&'a str> {
    let mut values = Vec::new();
    let mut within = false;
    for argument in arguments {
        match argument.strip_prefix("--") {
            Some(option) => match option.split_once('=') {
                Some((option, value)) => {
                    within = false;
                    values.extend((option == name).then_some(value));
                }
                None => within = option == name,
            },
            None if argument.starts_with('-') => within = false,
            None => values.extend(within.then_some(argument.as_str())),
        }
    }
    values
}

/// Parse `key=value,...` or the same as JSON.
pub(super) fn parse_properties(value: &str, implied: &str) -> Parameters {
    if !value.starts_with('{') {
        return parse_parameters(value, implied);
    }
    let Ok(serde_json::Value::Object(object)) = serde_json::from_str(value) else { return Parameters::new() };
    let text = |value| match value {
        serde_json::Value::String(text) => Some(text),
        serde_json::Value::Bool(on) => Some(if on { "on" } else { "off" }.to_owned()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    object.into_iter().filter_map(|(key, value)| Some((key, text(value)?))).collect()
}

/// The parameters of `key=value,...`; the last value of a key applies. `implied` is the key of a first value without a
/// key.
pub(super) fn parse_parameters(value: &str, implied: &str) -> Parameters {
    let mut parts = split_at_commas(value);
    if let Some(first) = parts.first_mut().filter(|first| !first.contains('=')) {
        *first = format!("{implied}={first}");
    }
    parse_pairs(parts)
}

pub(super) fn parse_pairs(parts: impl IntoIterator<Item = String>) -> Parameters {
    let pair = |part: String| match part.split_once('=') {
        Some((key, value)) => (key.to_owned(), value.to_owned()),
        None => match part.strip_prefix("no") {
            Some(key) => (key.to_owned(), "off".to_owned()),
            None => (part, "on".to_owned()),
        },
    };
    parts.into_iter().map(pair).collect()
}

/// The parts between commas; `,,` stands for a comma.
pub(super) fn split_at_commas(value: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut rest = value.chars().peekable();
    while let Some(character) = rest.next() {
        match parts.last_mut() {
            Some(part) if character != ',' || rest.next_if_eq(&',').is_some() => part.push(character),
            _ => parts.push(String::new()),
        }
    }
    parts
}

pub(super) fn is_on(parameters: &Parameters, key: &str) -> Option<bool> {
    match parameters.get(key)?.as_str() {
        "on" | "yes" | "true" | "y" => Some(true),
        "off" | "no" | "false" | "n" => Some(false),
        _ => None,
    }
}

const MIB: u64 = 1 << 20;

/// The bytes of `4G`, `1.5G`, `4194304k`, or of a bare number in units of `unit`.
pub(super) fn parse_size(text: &str, unit: u64) -> Option<u64> {
    let (digits, unit) = match text.bytes().last()?.to_ascii_lowercase() {
        b'b' => (&text[..text.len() - 1], 1),
        suffix @ (b'k' | b'm' | b'g' | b't' | b'p' | b'e') => {
            let power = b"kmgtpe".iter().position(|&letter| letter == suffix)? + 1;
            (&text[..text.len() - 1], 1 << (10 * power))
        }
        _ => (text, unit),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
        return None;
    }
    match digits.parse::<u64>() {
        Ok(number) => number.checked_mul(unit),
        // Guests are smaller than 2^53 bytes, and below that this is exact to the byte.
        Err(_) => digits.parse::<f64>().ok().map(|number| number * unit as f64).filter(|&b| b < 2e18).map(|b| b as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identify(command: &str) -> Option<Vm> {
        let arguments: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
        identify_vm(&arguments, None)
    }

    fn vm(command: &str) -> Vm {
        identify(command).expect(command)
    }

    fn backend(id: &str, kind: &str, share: bool, merge: bool) -> VmMemoryBackend {
        VmMemoryBackend { id: id.into(), kind: kind.into(), share, merge }
    }

    /// The command line of libvirt 10 for a guest with a passed-through device, shared memory and an agent.
    const LIBVIRT: &str = r#"/usr/bin/qemu-system-x86_64 -name guest=web01,debug-threads=on -S
        -object {"qom-type":"secret","id":"masterKey0","format":"raw","file":"/var/lib/libvirt/qemu/domain-4-web01/master-key.aes"}
        -machine pc-q35-8.2,usb=off,vmport=off,dump-guest-core=off,mem-merge=off,memory-backend=pc.ram,hpet=off,acpi=on
        -accel kvm -cpu host,migratable=on -m size=4194304k,slots=16,maxmem=16777216k
        -object {"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"x-use-canonical-path-for-ramblock-id":false,"size":4294967296,"host-nodes":[0],"policy":"bind"}
        -overcommit mem-lock=off -smp 2,sockets=2,cores=1,threads=1 -uuid 36148ac8-b632-4786-a051-87c0226a9703
        -display none -no-user-config -nodefaults
        -chardev socket,id=charmonitor,fd=31,server=on,wait=off -mon chardev=charmonitor,id=monitor,mode=control
        -rtc base=utc,driftfix=slew -global kvm-pit.lost_tick_policy=delay -no-shutdown -boot strict=on
        -device {"driver":"pcie-root-port","port":16,"chassis":1,"id":"pci.1","bus":"pcie.0","multifunction":true,"addr":"0x2"}
        -blockdev {"driver":"file","filename":"/var/lib/libvirt/images/web01.qcow2","node-name":"libvirt-1-storage"}
        -device {"driver":"virtio-blk-pci","bus":"pci.4","addr":"0x0","drive":"libvirt-1-format","id":"virtio-disk0","bootindex":1}
        -netdev {"type":"tap","fd":"33","vhost":true,"vhostfd":"35","id":"hostnet0"}
        -device {"driver":"virtio-net-pci","netdev":"hostnet0","id":"net0","mac":"52:54:00:a1:e0:38","bus":"pci.1","addr":"0x0"}
        -chardev socket,id=charchannel0,fd=30,server=on,wait=off
        -device {"driver":"vfio-pci","host":"0000:06:00.0","id":"hostdev0","bus":"pci.5","addr":"0x0"}
        -sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny -msg timestamp=on"#;

    #[test]
    fn confidential_technique_is_recognized() {
        let check = |line: &str, technique: Option<&str>| {
            let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
            assert_eq!(confidential_technique(&arguments).as_deref(), technique, "{line}");
        };
        let qemu = "qemu-system-x86_64 -machine q35,confidential-guest-support=lsec0";
        check(&format!("{qemu} -object sev-snp-guest,id=lsec0,cbitpos=51"), Some("sev-snp-guest"));
        check(&format!("{qemu} -object {{\"qom-type\":\"tdx-guest\",\"id\":\"lsec0\"}}"), Some("tdx-guest"));
        check(qemu, Some("confidential-guest-support"));
        check("qemu-system-x86_64 -M pc,memory-encryption=sev0", Some("memory-encryption"));
        check("qemu-system-x86_64 -machine q35,mem-merge=off -object secret,id=s", None);
        check("cloud-hypervisor --platform tdx=on --memory size=1G", Some("tdx"));
        check("cloud-hypervisor --platform tdx=off,sev_snp=on", Some("sev_snp"));
        check("cloud-hypervisor --memory size=1G", None);
        check("firecracker --id a", None);
        check("cat -object sev-guest", None);
    }

    #[test]
    fn libvirt_command_line_is_parsed() {
        let expected = Vm {
            monitor: Monitor::Qemu,
            name: Some("web01".into()),
            uuid: Some("36148ac8-b632-4786-a051-87c0226a9703".into()),
            memory_bytes: Some(4 << 30),
            backends: vec![backend("pc.ram", "memory-backend-memfd", true, false)],
            mem_merge: false,
            vfio: true,
            control_socket: None,
        };
        assert_eq!(vm(LIBVIRT), expected);
    }

    #[test]
    fn older_libvirt_command_line_is_parsed() {
        let vm =
            vm("/usr/libexec/qemu-kvm -name guest=db,,1,process=qemu:db -S -machine pc-i440fx-rhel7.6.0,accel=kvm \
             -m 8192 -realtime mlock=off -smp 4 \
             -object memory-backend-file,id=ram-node0,mem-path=/dev/hugepages/libvirt,share=yes,size=8589934592 \
             -numa node,nodeid=0,cpus=0-3,memdev=ram-node0 \
             -chardev socket,id=charmonitor,path=/var/lib/libvirt/qemu/domain-1-db/monitor.sock,server,nowait \
             -mon chardev=charmonitor,id=monitor,mode=control -device vfio-pci,host=06:12.5,id=hostdev0");
        assert_eq!(vm.name.as_deref(), Some("db,1"));
        assert_eq!(vm.memory_bytes, Some(8 << 30));
        assert_eq!(vm.backends, [backend("ram-node0", "memory-backend-file", true, true)]);
        assert!(vm.mem_merge && vm.vfio);
        assert_eq!(vm.control_socket.as_deref(), Some("/var/lib/libvirt/qemu/domain-1-db/monitor.sock"));
    }

    #[test]
    fn proxmox_command_line_is_parsed() {
        let vm = vm("/usr/bin/kvm -id 100 -name web,debug-threads=on -no-shutdown \
             -chardev socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect=5 -mon chardev=qmp-event,mode=control \
             -chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off -mon chardev=qmp,mode=control \
             -pidfile /var/run/qemu-server/100.pid -daemonize -smp 4,sockets=1 -nodefaults -m 2048 \
             -object memory-backend-ram,id=ram-node0,size=2048M -machine type=pc+pve0");
        assert_eq!(vm.name.as_deref(), Some("web"));
        assert_eq!(vm.memory_bytes, Some(2 << 30));
        assert_eq!(vm.backends, [backend("ram-node0", "memory-backend-ram", false, true)]);
        assert_eq!(vm.control_socket.as_deref(), Some("/var/run/qemu-server/100.qmp"));
    }

    #[test]
    fn monitors_are_recognized_by_program_name() {
        let check = |program: &str, expected: Option<Monitor>| {
            assert_eq!(identify(program).map(|vm| vm.monitor), expected, "{program}");
        };
        for program in
            ["qemu-system-aarch64", "/usr/libexec/qemu-kvm", "/usr/bin/kvm", "kvm-spice", "./qemu-system-x86_64"]
        {
            check(program, Some(Monitor::Qemu));
        }
        check("/firecracker", Some(Monitor::Firecracker));
        check("firecracker-v1.7.0-x86_64", Some(Monitor::Firecracker));
        check("/usr/bin/cloud-hypervisor", Some(Monitor::CloudHypervisor));
        for program in ["qemu-img", "qemu-x86_64", "qemu-ga", "firecracker-containerd", "kvm-ok", "bash", ""] {
            check(program, None);
        }
        check("sudo qemu-system-x86_64", None);
    }

    #[test]
    fn guest_name_is_parsed() {
        let check = |command: &str, expected: Option<&str>| {
            assert_eq!(vm(&format!("qemu-kvm {command}")).name.as_deref(), expected, "{command}");
        };
        check("", None);
        check("-name", None);
        check("-name foo", Some("foo"));
        check("--name foo", Some("foo"));
        check("-name foo,process=bar", Some("foo"));
        check("-name guest=foo,debug-threads=on", Some("foo"));
        check("-name debug-threads=on", None);
        check("-name a,,b", Some("a,b"));
        check("-name a -name b", Some("b"));
    }

    #[test]
    fn guest_memory_size_is_parsed() {
        let check = |command: &str, expected: Option<u64>| {
            assert_eq!(vm(&format!("qemu-kvm {command}")).memory_bytes, expected, "{command}");
        };
        check("", None);
        check("-m 4G", Some(4 << 30));
        check("-m 512", Some(512 << 20));
        check("-m 4096M,slots=2,maxmem=8G", Some(4 << 30));
        check("-m size=4194304k", Some(4 << 30));
        check("-m 1.5G", Some(3 << 29));
        check("-m 1048576b", Some(1 << 20));
        check("-m 1t", Some(1 << 40));
        check("-m 1G -m 2G", Some(2 << 30));
        check("-m maxmem=8G", None);
        check("-m", None);
        check("-m 99999999999999999999", None);
        check("-m 16777216E", None);
        check("-m -1", None);
        check("-m 1e3", None);
        check("-m G", None);
        check("-m \u{fffd}", None);
        check("-object memory-backend-ram,id=a,size=2G -machine q35,memory-backend=a", Some(2 << 30));
        check("-object memory-backend-ram,id=a,size=2G -machine q35,memory-backend=b", None);
    }

    #[test]
    fn memory_backends_are_parsed() {
        let check = |command: &str, expected: &[VmMemoryBackend]| {
            assert_eq!(vm(&format!("qemu-kvm {command}")).backends, expected, "{command}");
        };
        check("-object memory-backend-ram,id=a,size=1G", &[backend("a", "memory-backend-ram", false, true)]);
        check(
            "-object qom-type=memory-backend-ram,id=a,merge=off",
            &[backend("a", "memory-backend-ram", false, false)],
        );
        check(
            "-object memory-backend-ram,id=a -M pc,mem-merge=off",
            &[backend("a", "memory-backend-ram", false, false)],
        );
        check(
            "-machine pc -object memory-backend-ram,id=a,merge=on -machine mem-merge=off",
            &[backend("a", "memory-backend-ram", false, true)],
        );
        check("-object memory-backend-memfd,id=a,size=1G", &[backend("a", "memory-backend-memfd", true, true)]);
        check("-object memory-backend-memfd,id=a,share=off", &[backend("a", "memory-backend-memfd", false, true)]);
        check(
            "-object memory-backend-file,id=a,mem-path=/x,share=on",
            &[backend("a", "memory-backend-file", true, true)],
        );
        check(
            r#"-object {"qom-type":"memory-backend-ram","id":"a","share":true,"merge":false}"#,
            &[backend("a", "memory-backend-ram", true, false)],
        );
        check(r#"-object {"qom-type":"memory-backend-ram","id":"#, &[]);
        check("-object {{{{ -object iothread,id=i -object rng-random,id=r", &[]);
        check("-mem-path /dev/hugepages", &[backend("mem-path", "memory-backend-file", false, true)]);
    }

    #[test]
    fn vfio_devices_are_recognized() {
        let check = |device: &str, expected: bool| {
            assert_eq!(vm(&format!("qemu-kvm -device {device}")).vfio, expected, "{device}");
        };
        check("vfio-pci,host=01:00.0", true);
        check("driver=vfio-pci,host=01:00.0", true);
        check("vfio-pci-nohotplug,sysfsdev=/sys/bus/mdev/devices/x", true);
        check(r#"{"driver":"vfio-pci","host":"0000:01:00.0","rombar":1}"#, true);
        check("virtio-net-pci,netdev=n0", false);
        check(r#"{"driver":"vfio-user-pci","socket":{"path":"/x","type":"unix"}}"#, false);
    }

    #[test]
    fn control_sockets_are_parsed() {
        let check = |command: &str, expected: Option<&str>| {
            assert_eq!(vm(&format!("qemu-kvm {command}")).control_socket.as_deref(), expected, "{command}");
        };
        check("-qmp unix:/run/a=b,,c.sock,server=on,wait=off", Some("/run/a=b,c.sock"));
        check("-qmp unix:q.sock,server,nowait", Some("q.sock"));
        check("-qmp-pretty unix:/q,server", Some("/q"));
        check("-qmp unix:/client", None);
        check("-qmp unix:/client,noserver", None);
        check("-qmp tcp:localhost:4444,server=on", None);
        check("-qmp stdio", None);
        check("-qmp unix:/a,server -qmp unix:/b,server", Some("/a"));
        check("-mon m,mode=control -chardev socket,id=m,path=/q,server=on", Some("/q"));
        check("-chardev socket,id=m,path=/q,server=on -mon chardev=m,mode=readline", None);
        check("-chardev socket,id=m,path=/q,server=on -mon chardev=other,mode=control", None);
        check("-chardev socket,id=m,path=/q,server=on", None);
    }

    #[test]
    fn libvirt_cgroup_names_the_guest() {
        let cgroup = Some(r"/machine.slice/machine-qemu\x2d7\x2dweb.scope/libvirt/emulator");
        let name = |command: &str| {
            let arguments: Vec<String> = command.split(' ').map(str::to_owned).collect();
            identify_vm(&arguments, cgroup).map(|vm| vm.name.unwrap_or_default())
        };
        assert_eq!(name("/usr/bin/qemu-system-x86_64 -m 1G").as_deref(), Some("web"));
        assert_eq!(name("/usr/bin/qemu-system-x86_64 -name own").as_deref(), Some("own"));
        assert_eq!(name("/opt/emulators/wrapped -name own -machine q35").as_deref(), Some("own"));
        assert_eq!(name("/usr/bin/swtpm socket --ctrl type=unixio"), None);
    }

    #[test]
    fn firecracker_command_line_is_parsed() {
        let guest = vm("/firecracker --id 4f2a --api-sock /run/firecracker.socket --seccomp-level 2");
        let expected = Vm {
            monitor: Monitor::Firecracker,
            name: Some("4f2a".into()),
            uuid: None,
            memory_bytes: None,
            backends: vec![],
            mem_merge: false,
            vfio: false,
            control_socket: Some("/run/firecracker.socket".into()),
        };
        assert_eq!(guest, expected);
        let guest = vm("firecracker --no-api --config-file=vm.json --id=a=b");
        assert_eq!((guest.name.as_deref(), guest.control_socket), (Some("a=b"), None));
        assert_eq!(vm("firecracker --id").name, None);
    }

    #[test]
    fn cloud_hypervisor_command_line_is_parsed() {
        let guest = vm("cloud-hypervisor --api-socket path=/tmp/build-7.sock --cpus boot=4 \
             --platform num_pci_segments=1,uuid=A4A4AB0D-6B3A-4DC1-9A5F-6A0F6B7E0E11 \
             --memory size=4G,shared=on,hugepages=on --disk path=a.raw path=b.raw --device path=/sys/bus/pci/devices/x/ -v");
        let expected = Vm {
            monitor: Monitor::CloudHypervisor,
            name: Some("build-7".into()),
            uuid: Some("a4a4ab0d-6b3a-4dc1-9a5f-6a0f6b7e0e11".into()),
            memory_bytes: Some(4 << 30),
            backends: vec![backend("memory", "memory", true, false)],
            mem_merge: false,
            vfio: true,
            control_socket: Some("/tmp/build-7.sock".into()),
        };
        assert_eq!(guest, expected);

        let guest =
            vm("cloud-hypervisor --memory=size=0,mergeable=on --memory-zone id=a,size=1G id=b,size=512M,shared=on \
             --kernel vmlinux");
        assert_eq!(guest.memory_bytes, Some(3 << 29));
        let zones = [backend("a", "memory-zone", false, true), backend("b", "memory-zone", true, true)];
        assert_eq!(guest.backends, zones);
        assert_eq!((guest.name, guest.mem_merge, guest.vfio), (None, true, false));

        let guest = vm("/opt/kata/bin/cloud-hypervisor --api-socket /run/vc/vm/0f2c/clh-api.sock");
        assert_eq!((guest.name.as_deref(), guest.memory_bytes), (Some("0f2c"), None));
        assert_eq!(vm("cloud-hypervisor --memory size=1073741824").memory_bytes, Some(1 << 30));
        assert_eq!(vm("cloud-hypervisor --api-socket fd=3").name, None);
    }
}
