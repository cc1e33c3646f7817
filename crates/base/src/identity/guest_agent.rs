//! The channel to the agent within a guest, from the command line of QEMU: a virtio-serial port of the name
//! `org.qemu.guest_agent.0` and its character device (qemu-options.hx, docs/interop/qemu-ga.rst).

use super::vm::{is_on, options, parse_parameters, parse_properties};

/// The name of the port that the agent opens in the guest.
const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// libvirt keeps the sockets of channels in such directories: `/run/libvirt/qemu/channel`,
/// `/var/lib/libvirt/qemu/channel/target` and, for the daemon of a user, `~/.config/libvirt/qemu/channel`.
const LIBVIRT_DIRECTORY: &str = "/libvirt/qemu/";

/// Where the agent of a guest can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AgentChannel {
    /// QEMU listens on this socket. The path is as given there, so it may be relative to QEMU's directory or root.
    Socket(String),
    /// libvirt, or another program that started QEMU, has the channel.
    Managed,
    /// It is no socket on which QEMU listens; the type of the character device.
    OtherDevice(String),
}

/// The channel to the agent in the guest that QEMU runs with these arguments; `None` if the machine has none.
pub fn agent_channel(arguments: &[String]) -> Option<AgentChannel> {
    let (_, arguments) = arguments.split_first()?;
    let values = |name: &'static str| options(arguments).filter(move |(option, _)| *option == name);
    let port = values("device").map(|(_, value)| parse_properties(value, "driver")).find(|device| {
        device.get("driver").is_some_and(|driver| driver == "virtserialport")
            && device.get("name").is_some_and(|name| name == AGENT_PORT)
    })?;
    let id = port.get("chardev")?;
    let device = values("chardev")
        .map(|(_, value)| parse_parameters(value, "backend"))
        .find(|device| device.get("id") == Some(id))?;
    let backend = device.get("backend").map_or("", String::as_str);
    Some(match device.get("path") {
        _ if backend != "socket" => AgentChannel::OtherDevice(backend.to_owned()),
        Some(path) if path.contains(LIBVIRT_DIRECTORY) => AgentChannel::Managed,
        // Without `server` QEMU has connected to the socket of another program.
        Some(path) if is_on(&device, "server") == Some(true) => AgentChannel::Socket(path.clone()),
        Some(_) => AgentChannel::Managed,
        None if device.contains_key("fd") => AgentChannel::Managed,
        None => AgentChannel::OtherDevice("socket of a network".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel(options: &str) -> Option<AgentChannel> {
        let line = format!("qemu-system-x86_64 -m 1G {options}");
        agent_channel(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    const PORT: &str = "-device virtio-serial -device virtserialport,chardev=a,name=org.qemu.guest_agent.0";

    #[test]
    fn socket_of_the_agent_is_found() {
        let check = |device: &str, expected: Option<AgentChannel>| {
            assert_eq!(channel(&format!("-chardev {device} {PORT}")), expected, "{device}");
        };
        let socket = |path: &str| Some(AgentChannel::Socket(path.to_owned()));
        check("socket,id=a,path=/run/qga.sock,server=on,wait=off", socket("/run/qga.sock"));
        check("socket,path=qga,,1,server,nowait,id=a", socket("qga,1"));
        check("socket,id=a,path=/run/qga.sock", Some(AgentChannel::Managed));
        check("socket,id=a,path=/run/qga.sock,server=off,reconnect=5", Some(AgentChannel::Managed));
        check("socket,id=a,fd=30,server=on,wait=off", Some(AgentChannel::Managed));
        check(
            "socket,id=a,host=localhost,port=4444,server=on",
            Some(AgentChannel::OtherDevice("socket of a network".into())),
        );
        check("pty,id=a", Some(AgentChannel::OtherDevice("pty".into())));
        check("socket,id=b,path=/run/qga.sock,server=on", None);
    }

    #[test]
    fn channels_of_libvirt_are_managed() {
        for directory in [
            "/var/lib/libvirt/qemu/channel/target/domain-1-web",
            "/run/libvirt/qemu/channel/1-web",
            "/home/u/.config/libvirt/qemu/channel/1-web",
        ] {
            let device =
                format!("-chardev socket,id=a,path={directory}/org.qemu.guest_agent.0,server=on,wait=off {PORT}");
            assert_eq!(channel(&device), Some(AgentChannel::Managed));
        }
        let libvirt = r#"-chardev socket,id=charchannel0,fd=30,server=on,wait=off -device {"driver":"virtserialport","bus":"virtio-serial0.0","nr":1,"chardev":"charchannel0","id":"channel0","name":"org.qemu.guest_agent.0"}"#;
        assert_eq!(channel(libvirt), Some(AgentChannel::Managed));
    }

    #[test]
    fn machines_without_the_port_have_no_channel() {
        assert_eq!(channel(""), None);
        assert_eq!(channel("-chardev socket,id=a,path=/run/qga.sock,server=on"), None);
        assert_eq!(
            channel("-chardev socket,id=a,path=/s,server=on -device virtserialport,chardev=a,name=com.redhat.spice.0"),
            None
        );
        assert_eq!(
            channel("-chardev socket,id=a,path=/s,server=on -device virtconsole,chardev=a,name=org.qemu.guest_agent.0"),
            None
        );
        assert_eq!(agent_channel(&[]), None);
    }
}
