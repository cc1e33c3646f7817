//! Recognizes containers and machines by the cgroup that a runtime creates for them.
//!
//! Runtimes name the cgroup after the container, through systemd (`docker-ID.scope`) or in the file system
//! (`/docker/ID`). There is no standard. These are the forms of Docker, containerd and nerdctl, CRI-O and Kubernetes,
//! Podman, LXC and Proxmox, and of machines registered with systemd-machined: systemd-nspawn and libvirt
//! (<https://libvirt.org/cgroups.html>).
//!
//! The labels of a container are in a file that its runtime stores below a folder of root, under the full id. It is
//! Docker's own description of the container, or the annotations of the configuration with which containerd, CRI-O and
//! Podman run it (<https://github.com/opencontainers/runtime-spec/blob/main/config.md#annotations>).

use std::borrow::Cow;

/// How many digits of a container's id are shown, as in the runtimes' own output.
const SHORT_ID_DIGITS: usize = 12;

/// How many digits a full id has.
const FULL_ID_DIGITS: usize = 64;

/// The prefix of a scope, and the runtime that uses it. `-conmon-` scopes contain a runtime's monitor, not a container.
const SCOPE_PREFIXES: [(&str, &str); 6] = [
    ("docker-", "docker"),
    ("cri-containerd-", "containerd"),
    ("nerdctl-", "containerd"),
    ("crio-", "crio"),
    ("libpod-payload-", "podman"),
    ("libpod-", "podman"),
];

/// Prefixes of the host's root: this process's root, or PID 1's root if this process is in a container that sees the
/// host's processes.
const HOST_ROOTS: [&str; 2] = ["", "proc/1/root/"];

/// The files in which a runtime stores labels: the path before and after a container's full id, and the runtimes.
const LABEL_FILE_PATHS: [(&str, &str, &[&str]); 6] = [
    ("var/lib/docker/containers/", "/config.v2.json", &["docker"]),
    ("run/containerd/io.containerd.runtime.v2.task/k8s.io/", "/config.json", &["containerd", "cri"]),
    ("run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/", "/config.json", &["containerd", "cri"]),
    ("run/containerd/io.containerd.runtime.v2.task/default/", "/config.json", &["containerd"]),
    ("var/lib/containers/storage/overlay-containers/", "/userdata/config.json", &["crio", "podman", "cri"]),
    ("run/containers/storage/overlay-containers/", "/userdata/config.json", &["crio", "cri"]),
];

/// A container, from the name of its cgroup.
struct Container<'a> {
    runtime: &'static str,
    name: Cow<'a, str>,
}

impl Container<'_> {
    /// From its full name.
    fn named<'a>(runtime: &'static str, name: impl Into<Cow<'a, str>>) -> Option<Container<'a>> {
        let name = name.into();
        (!name.is_empty()).then_some(Container { runtime, name })
    }

    fn has_id(&self) -> bool {
        self.name.len() == FULL_ID_DIGITS && is_hexadecimal(&self.name)
    }
}

/// The display name of the innermost container of a cgroup path.
pub(super) fn container_name(cgroup: &str) -> Option<String> {
    let Container { runtime, name } = innermost(cgroup)?;
    let named_by_id = SCOPE_PREFIXES.iter().any(|&(_, known)| known == runtime) || runtime == "cri";
    Some(format!("{runtime}:{}", if named_by_id { &name[..SHORT_ID_DIGITS] } else { &name }))
}

/// The possible label files of the outermost container of a cgroup path, as paths below the root. Empty unless only
/// root creates cgroups there. Users with the right to create cgroups, in their session or in a container, could name
/// them after any container.
pub(super) fn label_files(cgroup: &str) -> Vec<String> {
    let path: Vec<&str> = cgroup.strip_suffix(" (deleted)").unwrap_or(cgroup).split('/').collect();
    let outermost = (0..path.len()).find_map(|depth| Some((depth, parse_container(&path[..depth], path[depth])?)));
    let is_trusted =
        |(depth, container): &(usize, Container<'_>)| container.has_id() && is_root_managed(&path[..*depth]);
    let Some((_, container)) = outermost.filter(is_trusted) else { return Vec::new() };
    let files = LABEL_FILE_PATHS.iter().filter(|(_, _, runtimes)| runtimes.contains(&container.runtime));
    let file = |root: &str, (before, after, _): &(&str, &str, _)| format!("{root}{before}{}{after}", container.name);
    HOST_ROOTS.iter().flat_map(|root| files.clone().map(|parts| file(root, parts))).collect()
}

/// Whether a path is a file that [`label_files`] names.
pub(super) fn is_label_file(path: &str) -> bool {
    let path = path.strip_prefix(HOST_ROOTS[1]).unwrap_or(path);
    LABEL_FILE_PATHS.iter().any(|(before, after, _)| path.starts_with(before) && path.ends_with(after))
}

/// Whether only root creates cgroups below a path: below slices of systemd, and in the directories of runtimes that do
/// not use systemd. In a cgroup namespace the beginning of the path is missing (cgroup_namespaces(7)).
fn is_root_managed(path: &[&str]) -> bool {
    let mut parts = path.iter().filter(|part| !matches!(**part, "" | ".."));
    let runtimes = ["docker", "kubepods", "libpod_parent"];
    parts.clone().next().is_some_and(|first| runtimes.contains(first)) || parts.all(|part| part.ends_with(".slice"))
}

fn innermost(cgroup: &str) -> Option<Container<'_>> {
    let path: Vec<&str> = cgroup.strip_suffix(" (deleted)").unwrap_or(cgroup).split('/').collect();
    (0..path.len()).rev().find_map(|depth| parse_container(&path[..depth], path[depth]))
}

/// The name that libvirt gave the guest whose monitor runs in the cgroup.
pub(super) fn libvirt_guest(cgroup: &str) -> Option<String> {
    cgroup.split('/').find_map(|part| libvirt_name(&machine_name(part)?, "qemu-"))
}

fn parse_container<'a>(ancestors: &[&str], part: &'a str) -> Option<Container<'a>> {
    let unit = part.strip_suffix(".scope").unwrap_or(part);
    let scope = |&(prefix, runtime): &(&str, &'static str)| {
        let id = unit.strip_prefix(prefix).filter(|id| id.len() >= SHORT_ID_DIGITS && is_hexadecimal(id))?;
        Container::named(runtime, id)
    };
    if let Some(container) = SCOPE_PREFIXES.iter().find_map(scope) {
        return Some(container);
    }
    // The runtime was configured for systemd's form, but used the cgroup file system: SLICE:PREFIX:ID.
    let (prefix, id) = part.rsplit_once(':').unwrap_or(("", part));
    if id.len() == FULL_ID_DIGITS && is_hexadecimal(id) {
        let runtime = match prefix.rsplit(':').next() {
            Some("docker") => "docker",
            Some("cri-containerd") => "containerd",
            Some("crio") => "crio",
            // The id alone does not tell which runtime a kubelet uses.
            _ if ancestors.iter().any(|ancestor| ancestor.starts_with("kubepods")) => "cri",
            _ if ancestors.contains(&"docker") => "docker",
            _ => return None,
        };
        return Container::named(runtime, id);
    }
    if let Some(name) = part.strip_prefix("lxc.payload.") {
        return Container::named("lxc", name);
    }
    if ancestors.last() == Some(&"lxc") {
        return Container::named("lxc", part);
    }
    if let Some(name) = part.strip_prefix("systemd-nspawn@").and_then(|unit| unit.strip_suffix(".service")) {
        return Container::named("nspawn", unescape(name));
    }
    let machine = machine_name(part)?;
    match libvirt_name(&machine, "lxc-") {
        Some(name) => Container::named("lxc", name),
        None if libvirt_name(&machine, "qemu-").is_some() => None,
        None => Container::named("machine", machine),
    }
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The name under which a machine was registered: from `machine-NAME.scope`, or from libvirt's `NAME.libvirt-qemu` on
/// hosts without systemd.
fn machine_name(part: &str) -> Option<String> {
    if let Some(name) = part.strip_prefix("machine-").and_then(|unit| unit.strip_suffix(".scope")) {
        return Some(unescape(name));
    }
    part.strip_suffix(".libvirt-qemu").or_else(|| part.strip_suffix(".libvirt-lxc")).map(str::to_owned)
}

/// `NAME` of `qemu-1-NAME`; libvirt adds the driver and the number before it.
fn libvirt_name(machine: &str, driver: &str) -> Option<String> {
    let (number, name) = machine.strip_prefix(driver)?.split_once('-')?;
    let is_number = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && !name.is_empty()).then(|| name.to_owned())
}

/// Undo systemd's `\x2d` (systemd.unit(5), "String escaping for inclusion in unit names").
fn unescape(name: &str) -> String {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        match rest {
            [b'\\', b'x', high, low, after @ ..] if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                let digit = |byte: u8| (byte as char).to_digit(16).unwrap_or(0) as u8;
                bytes.push(digit(*high) << 4 | digit(*low));
                rest = after;
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL_ID: &str = "4c01db0b339cb2be3c0a8d3bcd7f9f9f2b6a4dfb5b1a0bba1b6f4d2a7d1f8e55";

    #[test]
    fn runtimes_are_recognized_by_cgroup() {
        let check = |path: &str, expected: Option<&str>| {
            assert_eq!(container_name(&path.replace("ID", FULL_ID)).as_deref(), expected, "{path}");
        };
        let docker = Some("docker:4c01db0b339c");
        check("/docker/ID", docker);
        check("/docker/ID/init.scope", docker);
        check("/system.slice/docker-ID.scope", docker);
        check("/system.slice/docker-ID.scope (deleted)", docker);
        check("/../../system.slice/docker-ID.scope", docker);
        check("/system.slice/docker.service", None);
        let containerd = Some("containerd:4c01db0b339c");
        let pod = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod2b801b7a_c266.slice";
        check(&format!("/{pod}/cri-containerd-ID.scope"), containerd);
        check(&format!("/system.slice/containerd.service/{pod}:cri-containerd:ID"), containerd);
        check("/system.slice/nerdctl-ID.scope", containerd);
        check(&format!("/{pod}/crio-ID.scope"), Some("crio:4c01db0b339c"));
        check(&format!("/{pod}/crio-conmon-ID.scope"), None);
        check("/kubepods/besteffort/pod5ba42b59-07d1/ID", Some("cri:4c01db0b339c"));
        check("/docker/ffff/kubepods/besteffort/pod5ba42b59-07d1/ID", Some("cri:4c01db0b339c"));
        check("/kubepods/besteffort/pod5ba42b59-07d1", None);
        let podman = Some("podman:4c01db0b339c");
        check("/machine.slice/libpod-ID.scope/container", podman);
        check("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-ID.scope", podman);
        check("/libpod_parent/libpod-ID", podman);
        check("/system.slice/web.service/libpod-payload-ID", podman);
        check("/machine.slice/libpod-conmon-ID.scope", None);
        check("/lxc.payload.web/system.slice/cron.service", Some("lxc:web"));
        check("/lxc.payload.web/system.slice/docker-ID.scope", docker);
        check("/lxc.monitor.web", None);
        check("/lxc/101/ns/init.scope", Some("lxc:101"));
        check("/lxc", None);
        check(r"/machine.slice/machine-lxc\x2d4711\x2dweb.scope", Some("lxc:web"));
        check(r"/machine.slice/machine-build\x2droot.scope/payload", Some("machine:build-root"));
        check("/machine.slice/systemd-nspawn@build.service/payload", Some("nspawn:build"));
        check(r"/machine.slice/machine-qemu\x2d1\x2dvm1.scope/libvirt/emulator", None);
        check("/ID", None);
        check("/docker/ID0", None);
        check("/user.slice/user-1000.slice/session-3.scope", None);
        check("/", None);
        check("", None);
    }

    #[test]
    fn label_files_are_those_of_the_runtime() {
        let check = |path: &str, expected: &[&str]| {
            let expected = ["", "proc/1/root/"]
                .map(|root| {
                    expected.iter().map(|path| format!("{root}{}", path.replace("ID", FULL_ID))).collect::<Vec<_>>()
                })
                .concat();
            assert_eq!(label_files(&path.replace("ID", FULL_ID)), expected, "{path}");
            assert!(expected.iter().all(|path| is_label_file(path)));
        };
        check("/system.slice/docker-ID.scope", &["var/lib/docker/containers/ID/config.v2.json"]);
        let [storage, running] = ["var/lib", "run"]
            .map(|folder| format!("{folder}/containers/storage/overlay-containers/ID/userdata/config.json"));
        check("/machine.slice/libpod-ID.scope", &[&storage]);
        let [task, k3s] = ["run/containerd", "run/k3s/containerd"]
            .map(|folder| format!("{folder}/io.containerd.runtime.v2.task/k8s.io/ID/config.json"));
        check("/kubepods/besteffort/pod5ba42b59-07d1/ID", &[&task, &k3s, &storage, &running]);
        let default = "run/containerd/io.containerd.runtime.v2.task/default/ID/config.json";
        check("/system.slice/nerdctl-ID.scope", &[&task, &k3s, default]);
        check("/docker/ID/init.scope", &["var/lib/docker/containers/ID/config.v2.json"]);
        check("/../../system.slice/docker-ID.scope", &["var/lib/docker/containers/ID/config.v2.json"]);
        // For nested containers, the files of the outer one, which the inner one cannot choose.
        let other = "ab".repeat(32);
        check(&format!("/machine.slice/libpod-ID.scope/libpod-{other}.scope"), &[&storage]);
        // Cgroups that a user created.
        for own in
            ["user@1000.service/app.slice/docker-ID.scope", "session-3.scope/docker/ID", "user@1000.service/docker/ID"]
        {
            check(&format!("/user.slice/user-1000.slice/{own}"), &[]);
        }
        check("/system.slice/delegated.service/docker-ID.scope", &[]);
        check("/lxc.payload.web/docker/ID", &[]);
        // A name or the beginning of an id is not accepted as a part of a path, nor is a lookalike.
        check("/system.slice/docker-4c01db0b339c.scope", &[]);
        check("/lxc/..", &[]);
        check("/lxc/ID", &[]);
        assert!(!is_label_file("proc/7/status"));
    }

    #[test]
    fn libvirt_guest_name_is_read_from_cgroup() {
        let check = |path: &str, expected: Option<&str>| assert_eq!(libvirt_guest(path).as_deref(), expected, "{path}");
        check(r"/machine.slice/machine-qemu\x2d1\x2dvm1.scope/libvirt/emulator", Some("vm1"));
        check(r"/machine.slice/machine-qemu\x2d12\x2dinstance\x2d0000001d.scope/emulator", Some("instance-0000001d"));
        check("/machine/qemu-3-web.libvirt-qemu/emulator", Some("web"));
        check(r"/machine.slice/machine-qemu\x2dbox.scope", None);
        check(r"/machine.slice/machine-lxc\x2d1\x2dweb.scope", None);
        check("/", None);
    }

    #[test]
    fn only_whole_escapes_are_undone() {
        assert_eq!(unescape(r"a\x2db\x20c"), "a-b c");
        assert_eq!(unescape(r"\xc3\xa9"), "\u{e9}");
        assert_eq!(unescape(r"\xff"), "\u{fffd}");
        assert_eq!(unescape(r"a\x2"), r"a\x2");
        assert_eq!(unescape(r"\xzz\"), r"\xzz\");
    }
}
