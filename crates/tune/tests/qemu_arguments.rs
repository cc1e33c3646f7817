//! QEMU starts with each changed command line: paused and emulated, until its monitor answers.

#![forbid(unsafe_code)]

use pagefold_base::IdSet;
use pagefold_doctor::decide::change::{HostNode, VmOption};
use pagefold_tune::decide::vm::arguments::set_option;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

const QEMU: &str = "qemu-system-x86_64";

/// Seconds after which a QEMU that hangs is ended by timeout(1).
const TIMEOUT_SECONDS: &str = "60";

/// A network that needs neither a script nor a device of the host that exists.
const NETWORK: &str = "-netdev tap,id=net,script=no,downscript=no -device virtio-net-pci,netdev=net";

/// The definition of a machine that a script starts, with a disk in DIRECTORY.
const MACHINE: &str = "-machine q35 -cpu qemu64 -smp 4 -m 64M -drive file=DIRECTORY/disk.img,if=none,id=drive,format=raw \
                       -device virtio-blk-pci,drive=drive,id=disk";

/// Why QEMU cannot be started with a network device of its own.
fn find_network_need() -> Option<&'static str> {
    let unshared = Command::new("unshare").args(["--net", "true"]).stderr(Stdio::null()).status();
    match unshared {
        Ok(status) if status.success() && Path::new("/dev/net/tun").exists() => None,
        _ => Some("a network namespace and /dev/net/tun are needed"),
    }
}

/// Starts QEMU with these arguments, and asks its monitor for the CPUs. Returns all of its output, if it ended as it was
/// told.
fn start(arguments: &[String], in_network_namespace: bool) -> Result<String, String> {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", TIMEOUT_SECONDS]);
    if in_network_namespace {
        command.args(["unshare", "--net"]);
    }
    // The model of the host is for KVM only, and `max` is its counterpart of emulated machines.
    let arguments = arguments.iter().map(|argument| argument.replacen("host", "max", usize::from(argument == "host")));
    command.arg(QEMU).args(arguments.skip(1));
    command.args(["-S", "-accel", "tcg", "-display", "none", "-qmp", "stdio"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(|error| error.to_string())?;
    let questions = ["qmp_capabilities", "query-hotpluggable-cpus", "query-memdev", "quit"];
    let questions: String = questions.iter().map(|name| format!("{{\"execute\": \"{name}\"}}\n")).collect();
    let mut input = process.stdin.take().ok_or("no standard input")?;
    let written = input.write_all(questions.as_bytes());
    let output = process.wait_with_output().map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if written.is_ok() && output.status.success() && text.contains("host-qmp-quit") { Ok(text) } else { Err(text) }
}

fn machine(directory: &Path, more: &str) -> Vec<String> {
    let line = format!("{QEMU} {MACHINE} {more}").replace("DIRECTORY", directory.to_str().unwrap());
    line.split_ascii_whitespace().map(str::to_owned).collect()
}

/// The definition of the machine with an option, which must change it.
fn changed(directory: &Path, more: &str, option: &VmOption) -> Vec<String> {
    let before = machine(directory, more);
    let after = set_option(&before, option).unwrap_or_else(|why| panic!("{option:?}: {why}"));
    assert_ne!(before, after, "{option:?}");
    after
}

fn feature(name: &str, enable: bool) -> VmOption {
    VmOption::CpuFeature { name: name.to_owned(), enable }
}

/// Two virtual nodes on the only node that each host has.
fn two_nodes() -> VmOption {
    let node = HostNode { id: 0, cpus: IdSet::default() };
    VmOption::VirtualNodes { host_nodes: vec![node.clone(), node] }
}

/// Options with what the machine has beside [`MACHINE`]; those of disks and CPUs need no privilege.
fn cases() -> Vec<(VmOption, &'static str)> {
    let disk = || "drive".to_owned();
    let mut cases = vec![
        (VmOption::HostCpuModel, ""),
        (VmOption::HyperVSpinlocks { retries: 0x1fff }, ""),
        (VmOption::CpuPowerManagement { enable: true }, ""),
        (
            VmOption::MergeableMemory,
            "-object memory-backend-memfd,id=ram,size=64M,share=on -machine memory-backend=ram",
        ),
        (VmOption::DiskCacheNone { disk: disk() }, ""),
        (VmOption::DiskAio { disk: disk(), interface: "threads".to_owned() }, ""),
        (VmOption::DiskIoThreads { disk: "disk".to_owned(), count: 1 }, ""),
        (two_nodes(), ""),
        (two_nodes(), "-smp 4,sockets=1,cores=2,threads=2"),
    ];
    let names = [
        "kvm-pv-eoi",
        "kvm-pv-ipi",
        "kvm-pv-unhalt",
        "kvm-hint-dedicated",
        "kvmclock",
        "invtsc",
        "hv-relaxed",
        "hv-vapic",
        "hv-time",
    ];
    cases.extend(names.iter().map(|name| (feature(name, true), "")));
    cases.push((feature("kvm-hint-dedicated", false), ""));
    cases
}

#[test]
fn qemu_starts_with_each_changed_command_line() {
    if Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_err() {
        return println!("skipped: {QEMU} is needed");
    }
    let directory = tempfile::tempdir().unwrap();
    File::create(directory.path().join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    start(&machine(directory.path(), ""), false).unwrap_or_else(|why| panic!("{why}"));
    for (option, more) in cases() {
        let arguments = changed(directory.path(), more, &option);
        let answer = start(&arguments, false).unwrap_or_else(|why| panic!("{option:?}: {arguments:?}: {why}"));
        if option == two_nodes() {
            assert_sockets_are_within_nodes(&answer);
        }
    }
    if let Some(why) = find_network_need() {
        return println!("skipped: {why}");
    }
    let queues = VmOption::NetworkQueues { network: "net".to_owned(), count: 2 };
    let mut cases = vec![queues];
    match Path::new("/dev/vhost-net").exists() {
        true => cases.push(VmOption::VhostNet { network: "net".to_owned() }),
        false => println!("skipped: this kernel has no /dev/vhost-net"),
    }
    for option in cases {
        let arguments = changed(directory.path(), NETWORK, &option);
        start(&arguments, true).unwrap_or_else(|why| panic!("{option:?}: {arguments:?}: {why}"));
    }
}

/// Each socket that the monitor tells has the CPUs of one virtual node, and both backends are bound.
fn assert_sockets_are_within_nodes(answer: &str) {
    let answers = answer.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let lists: Vec<_> = answers.filter_map(|answer| answer["return"].as_array().cloned()).collect();
    let [cpus, backends] = &lists[..] else { panic!("{answer}") };
    let mut places: Vec<(u64, u64)> = cpus
        .iter()
        .map(|cpu| (cpu["props"]["socket-id"].as_u64().unwrap(), cpu["props"]["node-id"].as_u64().unwrap()))
        .collect();
    places.sort_unstable();
    assert_eq!(places, [(0, 0), (0, 0), (1, 1), (1, 1)], "{answer}");
    assert!(backends.len() == 2 && backends.iter().all(|backend| backend["policy"] == "bind"), "{answer}");
}
