//! QEMU's control monitors (QMP, docs/interop/qmp-spec.rst): the channels to them, from the command line, and what they
//! answer to questions about vCPUs and memory (qapi/machine.json, qapi/machine-target.json).
//!
//! A monitor is `-qmp unix:PATH,server=on,wait=off`, or `-mon mode=control` with a `-chardev` (qemu-options.hx).

use super::vm::{Parameters, is_on, options, parse_pairs, parse_parameters, split_at_commas};
use crate::{IdSet, Reading};
use std::collections::BTreeMap;

/// libvirt keeps the sockets of monitors in such directories: `/var/lib/libvirt/qemu/domain-1-db/monitor.sock`.
const LIBVIRT_DIRECTORY: &str = "/libvirt/qemu/";

/// Where a control monitor can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MonitorChannel {
    /// QEMU listens on this socket. The path is as given there, so it may be relative to QEMU's directory or root.
    Socket(String),
    /// QEMU waits for its first client before it starts the machine (`wait=on`, the default).
    WaitsForClient(String),
    /// libvirt, or another program that started QEMU, has the channel.
    Managed,
    /// It is no Unix socket in the file system; the type of the character device.
    OtherDevice(String),
}

/// The control monitors of the machine that QEMU runs with these arguments, in the order of the command line.
pub fn monitor_channels(arguments: &[String]) -> Vec<MonitorChannel> {
    let arguments = arguments.get(1..).unwrap_or_default();
    let devices: BTreeMap<String, Parameters> = options(arguments)
        .filter(|(option, _)| *option == "chardev")
        .map(|(_, value)| parse_parameters(value, "backend"))
        .filter_map(|device| Some((device.get("id")?.clone(), device)))
        .collect();
    let channel_of_device = |id: &str| devices.get(id).map(monitor_channel);
    let channels = options(arguments).filter_map(|(option, value)| match option {
        "qmp" | "qmp-pretty" => match value.strip_prefix("chardev:") {
            Some(id) => channel_of_device(id),
            None => Some(monitor_channel(&legacy_device(value))),
        },
        "mon" => {
            let monitor = parse_parameters(value, "chardev");
            monitor
                .get("mode")
                .filter(|mode| *mode == "control")
                .and_then(|_| channel_of_device(monitor.get("chardev")?))
        }
        _ => None,
    });
    channels.collect()
}

/// The parameters of a device in the form of `-qmp`: `unix:PATH,server=on`, `tcp:HOST:PORT`, `stdio` (chardev/char.c,
/// `qemu_chr_parse_compat`).
fn legacy_device(value: &str) -> Parameters {
    let mut parts = split_at_commas(value).into_iter();
    let first = parts.next().unwrap_or_default();
    let mut device = parse_pairs(parts);
    let (kind, path) = match first.split_once(':') {
        Some(("unix", path)) => ("socket", Some(path)),
        Some(("tcp" | "telnet" | "websocket", _)) => ("socket", None),
        Some((kind, _)) => (kind, None),
        None => (first.as_str(), None),
    };
    device.insert("backend".to_owned(), kind.to_owned());
    device.extend(path.map(|path| ("path".to_owned(), path.to_owned())));
    device
}

fn monitor_channel(device: &Parameters) -> MonitorChannel {
    let backend = device.get("backend").map_or("", String::as_str);
    match device.get("path") {
        _ if backend != "socket" => MonitorChannel::OtherDevice(backend.to_owned()),
        Some(path) if path.contains(LIBVIRT_DIRECTORY) => MonitorChannel::Managed,
        Some(_) if is_on(device, "abstract") == Some(true) => MonitorChannel::OtherDevice("abstract socket".to_owned()),
        // Without `server` QEMU has connected to the socket of another program.
        Some(_) if is_on(device, "server") != Some(true) => MonitorChannel::Managed,
        Some(path) if is_on(device, "wait") == Some(false) => MonitorChannel::Socket(path.clone()),
        Some(path) => MonitorChannel::WaitsForClient(path.clone()),
        None if device.contains_key("fd") => MonitorChannel::Managed,
        None => MonitorChannel::OtherDevice("socket of a network".to_owned()),
    }
}

/// A vCPU, as `query-cpus-fast` lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MonitorVcpu {
    /// Its number (`cpu-index`).
    pub number: u32,
    /// The number of its thread (`thread-id`), as QEMU's own PID namespace has it.
    pub thread: u32,
    /// The virtual node (`node-id`).
    pub node: Option<u32>,
    /// The socket (`socket-id`).
    pub socket: Option<u32>,
    /// The core within its socket or cluster (`core-id`).
    pub core: Option<u32>,
}

/// A memory backend, as `query-memdev` lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MonitorBackend {
    /// The id of the object.
    pub id: Option<String>,
    /// Its size.
    pub bytes: u64,
    /// Its policy: `default`, `preferred`, `bind` or `interleave`.
    pub policy: String,
    /// The nodes of the host for this policy.
    pub host_nodes: IdSet,
    /// Whether its memory is allocated in advance.
    pub is_preallocated: bool,
    /// Whether its memory is marked for KSM.
    pub is_mergeable: bool,
    /// Whether its memory is shared with other processes; not known from QEMU before 6.1.
    pub is_shared: Option<bool>,
}

/// The vCPUs that a machine can have, from `query-hotpluggable-cpus`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VcpuSlots {
    /// vCPUs that are plugged.
    pub plugged: u64,
    /// vCPUs that can be plugged.
    pub free: u64,
}

/// The answers of a monitor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorAnswers {
    /// Its vCPUs, ascending by number.
    pub vcpus: Reading<Vec<MonitorVcpu>>,
    /// Its memory backends.
    pub backends: Reading<Vec<MonitorBackend>>,
    /// How many vCPUs are plugged, and how many can be.
    pub slots: Reading<VcpuSlots>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(options: &str) -> Vec<MonitorChannel> {
        let line = format!("qemu-system-x86_64 -m 1G {options}");
        monitor_channels(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn monitors_are_found_in_both_forms() {
        let socket = |path: &str| MonitorChannel::Socket(path.to_owned());
        let waits = |path: &str| MonitorChannel::WaitsForClient(path.to_owned());
        let other = |kind: &str| MonitorChannel::OtherDevice(kind.to_owned());
        let check = |options: &str, expected: &[MonitorChannel]| assert_eq!(channels(options), expected, "{options}");
        check("", &[]);
        check("-qmp unix:/run/a=b,,c,server=on,wait=off", &[socket("/run/a=b,c")]);
        check("-qmp-pretty unix:q.sock,server,nowait", &[socket("q.sock")]);
        check("-qmp unix:/q,server=on", &[waits("/q")]);
        check("-qmp unix:/q,server,wait", &[waits("/q")]);
        check("-qmp unix:/client", &[MonitorChannel::Managed]);
        check("-qmp tcp:localhost:4444,server=on,wait=off", &[other("socket of a network")]);
        check("-qmp stdio -qmp pty", &[other("stdio"), other("pty")]);
        check("-qmp", &[other("")]);
        let device = "-chardev socket,id=m,path=/q,server=on,wait=off";
        check(&format!("-mon m,mode=control {device}"), &[socket("/q")]);
        check(&format!("{device} -qmp chardev:m"), &[socket("/q")]);
        check(&format!("{device} -mon chardev=m,mode=readline"), &[]);
        check(&format!("{device},abstract=on -mon chardev=m,mode=control"), &[other("abstract socket")]);
        check(&format!("{device} -mon chardev=other,mode=control"), &[]);
        check(
            "-chardev socket,id=e,path=/var/run/qmeventd.sock,reconnect=5 -mon chardev=e,mode=control \
             -chardev socket,id=q,path=/var/run/qemu-server/100.qmp,server=on,wait=off -mon chardev=q,mode=control",
            &[MonitorChannel::Managed, socket("/var/run/qemu-server/100.qmp")],
        );
    }

    #[test]
    fn monitors_of_libvirt_are_managed() {
        for device in ["fd=24", "path=/var/lib/libvirt/qemu/domain-1-db/monitor.sock"] {
            let options =
                format!("-chardev socket,id=c,{device},server=on,wait=off -mon chardev=c,id=monitor,mode=control");
            assert_eq!(channels(&options), [MonitorChannel::Managed], "{device}");
        }
    }
}
