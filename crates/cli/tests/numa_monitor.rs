//! `pagefold numa map` and `doctor` with the monitors of a real QEMU, and with programs that only claim to be QEMU.

#![forbid(unsafe_code)]

use pagefold_labs::assets::QEMU_PROGRAM;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PAGEFOLD_BINARY: &str = env!("CARGO_BIN_EXE_pagefold");

/// Maximum time until a program listens, or a virtual machine has its threads.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A process that is killed with the value.
struct KilledChild(Child);

impl Drop for KilledChild {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: frames are visible to root only");
    }
    is_root
}

/// Repeats until there is a result.
fn wait_for<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(start.elapsed() < TIMEOUT, "{what}");
        sleep(Duration::from_millis(50));
    }
}

/// QEMU with two virtual nodes and four vCPUs, whose threads have no names of their own.
fn qemu(arguments: &[&str]) -> Command {
    let mut command = Command::new(arguments[0]);
    command
        .args(&arguments[1..])
        .args(["-machine", "q35,accel=tcg", "-S", "-display", "none", "-nodefaults", "-m", "64"])
        .args(["-name", "guest=asked", "-smp", "4,sockets=2,cores=2,threads=1"])
        .args(["-object", "memory-backend-ram,id=low,size=32M,prealloc=on"])
        .args(["-object", "memory-backend-ram,id=high,size=32M,merge=off,policy=preferred,host-nodes=0"])
        .args(["-numa", "node,nodeid=0,memdev=low", "-numa", "node,nodeid=1,memdev=high"])
        .args(["-numa", "cpu,node-id=0,socket-id=0", "-numa", "cpu,node-id=1,socket-id=1"])
        .stdin(Stdio::null());
    command
}

/// The process whose command line begins with a program and names a path.
fn find_process(program: &str, path: &Path) -> Option<u32> {
    let name = path.to_str()?;
    let pids = fs::read_dir("/proc").ok()?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.into_iter().find(|pid: &u32| {
        let command =
            String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default()).into_owned();
        command.starts_with(program) && command.contains(name)
    })
}

/// The process of a map, and the text of the map.
fn read_map(pid: u32, options: &[&str]) -> (Value, String) {
    let run = |more: &[&str]| {
        let pid = pid.to_string();
        let output = Command::new(PAGEFOLD_BINARY)
            .args(options)
            .args(["numa", "map", "--pid", &pid])
            .args(more)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let map: Value = serde_json::from_str(&run(&["--json"])).unwrap();
    (map["processes"][0].clone(), run(&[]))
}

/// The machine of a map once its monitor has listed all vCPUs.
fn wait_for_vcpus(pid: u32) -> Value {
    wait_for("vCPUs", || {
        let output = Command::new(PAGEFOLD_BINARY).args(["numa", "map", "--json", "--pid", &pid.to_string()]).output();
        let map: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap_or_default();
        let process = &map["processes"][0];
        let vcpus = process["machine"]["vcpus"].as_array().map_or(0, Vec::len);
        (vcpus == 4).then(|| process.clone())
    })
}

/// The finding of a rule about a machine.
fn doctor_finding(pid: u32, rule: &str, options: &[&str]) -> Value {
    let output = Command::new(PAGEFOLD_BINARY)
        .args(options)
        .args(["doctor", "--topic", "vm", "--json", "--pid", &pid.to_string()])
        .output();
    let report: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let is_asked = |finding: &&Value| finding["rule"] == rule && finding["pid"] == pid;
    findings.iter().find(is_asked).unwrap_or_else(|| panic!("{rule}: {report}")).clone()
}

fn check_answers(pid: u32, process: &Value) {
    let machine = &process["machine"];
    assert_eq!(machine["vcpu_source"], "monitor", "{process}");
    let places: Vec<[u64; 4]> = machine["vcpus"]
        .as_array()
        .unwrap()
        .iter()
        .map(|vcpu| ["vcpu", "virtual_node", "socket", "core"].map(|key| vcpu[key].as_u64().unwrap()))
        .collect();
    assert_eq!(places, [[0, 0, 0, 0], [1, 0, 0, 1], [2, 1, 1, 0], [3, 1, 1, 1]]);
    for vcpu in machine["vcpus"].as_array().unwrap() {
        assert!(Path::new(&format!("/proc/{pid}/task/{}", vcpu["thread"])).exists(), "{vcpu}");
        assert_ne!(vcpu["thread"], pid);
    }
    let backends = json!([
        {"id": "low", "bytes": 32 << 20, "policy": "default", "preallocated": true, "mergeable": true, "shared": false},
        {"id": "high", "bytes": 32 << 20, "policy": "preferred 0", "preallocated": false, "mergeable": false,
         "shared": false},
    ]);
    // QEMU lists them in any order.
    let mut found = machine["memory_backends"].as_array().unwrap().clone();
    found.sort_by_key(|backend| std::cmp::Reverse(backend["id"].to_string()));
    assert_eq!(json!(found), backends);
    assert_eq!((&machine["pluggable_vcpus"], &machine["conflicts"]), (&json!(0), &Value::Null), "{machine}");
    let vcpu_threads: u64 = process["threads"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|group| group["role"] == "vcpu")
        .map(|group| group["threads"].as_u64().unwrap())
        .sum();
    assert_eq!(vcpu_threads, 4, "{process}");
}

#[test]
fn monitor_of_qemu_is_asked_and_left_alone_while_another_client_uses_it() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let monitor = format!("unix:{},server=on,wait=off", socket.display());
    let child = match qemu(&[QEMU_PROGRAM]).args(["-qmp", &monitor]).spawn() {
        Ok(child) => KilledChild(child),
        Err(error) => return println!("skipped: {QEMU_PROGRAM}: {error}"),
    };
    let pid = child.0.id();
    let process = wait_for_vcpus(pid);
    check_answers(pid, &process);
    let monitor = doctor_finding(pid, "vm-monitor", &[]);
    assert_eq!(monitor["verdict"], "ok", "{monitor}");
    assert_eq!(monitor["value"], "4 virtual CPUs, 0 more can be plugged; 64.0 MiB");
    // The threads have no names.
    let stacked = doctor_finding(pid, "vm-stacked-vcpus", &[]);
    assert!(stacked["value"].as_str().unwrap().starts_with("4 virtual CPUs on "), "{stacked}");
    let (_, text) = read_map(pid, &[]);
    assert!(text.contains("vCPUs 0-3") && text.contains("low 32.0 MiB (preallocated)"), "{text}");

    // Another client keeps its session.
    let mut client = BufReader::new(UnixStream::connect(&socket).unwrap());
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    assert!(line.contains("QMP"), "{line}");
    let (held, text) = read_map(pid, &[]);
    assert_eq!(held["machine"]["vcpu_source"], "thread-names");
    let why = "not asked: another client uses the monitor";
    assert_eq!(held["machine"]["monitor_failures"], json!([why]));
    assert!(text.contains("asked (pid "), "{text}");
    client.get_mut().write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
    line.clear();
    client.read_line(&mut line).unwrap();
    assert!(line.contains("return"), "{line}");
    drop(client);
    assert_eq!(wait_for_vcpus(pid)["machine"], process["machine"]);

    // A recording has the answers.
    let recording = folder.path().join("recording");
    let arguments = ["record", "--pass-interval", "0", "--pid", &pid.to_string()];
    let recorded = Command::new(PAGEFOLD_BINARY).args(arguments).arg(&recording).output().unwrap();
    assert!(recorded.status.success(), "{recorded:?}");
    let (replayed, _) = read_map(pid, &["--host", &format!("recording:{}", recording.display())]);
    assert_eq!(replayed["machine"], process["machine"]);
    let options = ["--host", &format!("recording:{}", recording.display())];
    for (rule, live) in [("vm-monitor", monitor), ("vm-stacked-vcpus", stacked)] {
        assert_eq!(doctor_finding(pid, rule, &options), live);
    }
}

#[test]
fn threads_of_qemu_in_another_pid_namespace_are_found() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let device = format!("socket,id=m,path={},server=on,wait=off", socket.display());
    let arguments = ["unshare", "--pid", "--fork", "--kill-child", QEMU_PROGRAM];
    let _child = match qemu(&arguments).args(["-chardev", &device, "-mon", "chardev=m,mode=control"]).spawn() {
        Ok(child) => KilledChild(child),
        Err(error) => return println!("skipped: unshare: {error}"),
    };
    let pid = wait_for("QEMU", || find_process(QEMU_PROGRAM, &socket));
    check_answers(pid, &wait_for_vcpus(pid));
}

#[test]
fn machine_that_waits_for_its_first_client_is_not_started() {
    if !is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let monitor = format!("unix:{},server=on", socket.display());
    let child = match qemu(&[QEMU_PROGRAM]).args(["-qmp", &monitor]).stderr(Stdio::null()).spawn() {
        Ok(child) => KilledChild(child),
        Err(error) => return println!("skipped: {QEMU_PROGRAM}: {error}"),
    };
    wait_for("the socket", || socket.exists().then_some(()));
    let (process, _) = read_map(child.0.id(), &[]);
    let why = "not asked: the monitor has wait=on: a client might start the machine";
    assert_eq!(process["machine"]["monitor_failures"], json!([why]), "{process}");
    // It waits for its first client, and gets one now.
    let mut client = BufReader::new(UnixStream::connect(&socket).unwrap());
    let mut line = String::new();
    client.read_line(&mut line).unwrap();
    assert!(line.contains("QMP"), "{line}");
}

/// Listens as QEMU's monitor does, and answers as its mode says.
const FALSE_MONITOR: &str = r#"
    use IO::Socket::UNIX;
    $SIG{PIPE} = 'IGNORE';
    my $mode = shift;
    my ($path) = $ARGV[1] =~ /^unix:([^,]*)/;
    my $listener = IO::Socket::UNIX->new(Local => $path, Listen => 4) or die;
    while ($mode eq 'deaf') { sleep 100; }
    while (my $client = $listener->accept()) {
        $client->autoflush(1);
        if ($mode eq 'silent') { while (<$client>) {} next; }
        if ($mode eq 'garbage') { print $client "{\"QMP\": oops}\n"; while (<$client>) {} next; }
        if ($mode eq 'endless') { 1 while print $client 'x' x 65536; next; }
        print $client "{\"QMP\": {}}\n";
        while (my $line = <$client>) {
            my ($id) = $line =~ /"id":(\d+)/;
            my $answer = $line =~ /query-cpus-fast/ ? $mode : $line =~ /query-memdev/ ? '{"evil": 1}' : '[]';
            $answer =~ s/SELF/$$/;
            $answer = '{}' if $line =~ /qmp_capabilities/;
            print $client "{\"return\": $answer, \"id\": $id}\n";
        }
    }
"#;

/// What the map says about a program that claims to be QEMU: failures of the monitor, and disagreements.
fn map_false_monitor(mode: &str) -> Option<(Value, Vec<String>)> {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let monitor = format!("unix:{},server=on,wait=off", socket.display());
    let mut command = Command::new("/usr/bin/perl");
    command.arg0("qemu-system-x86_64").args(["-e", FALSE_MONITOR, "--", mode, "-qmp", &monitor]);
    let child = match command.spawn() {
        Ok(child) => KilledChild(child),
        Err(error) => {
            println!("skipped: perl: {error}");
            return None;
        }
    };
    wait_for("the socket", || socket.exists().then_some(()));
    let (process, text) = read_map(child.0.id(), &[]);
    let finding = doctor_finding(child.0.id(), "vm-monitor", &[]);
    assert!(matches!(finding["verdict"].as_str(), Some("warn" | "unknown")), "{mode}: {finding}");
    // The connection of the first command still waits.
    assert_eq!(finding.to_string().contains("has not accepted a connection"), mode == "deaf", "{mode}: {finding}");
    let machine = &process["machine"];
    assert_eq!(machine["vcpu_source"], "thread-names", "{mode}: {machine}");
    let texts = |key: &str| -> Vec<String> {
        let texts = machine[key].as_array().cloned().unwrap_or_default();
        texts.iter().map(|text| text.as_str().unwrap().to_owned()).collect()
    };
    let found = [texts("monitor_failures"), texts("conflicts")].concat();
    assert!(text.contains("Virtual machines by QEMU's monitor and libvirt"), "{mode}: {text}");
    Some((machine.clone(), found))
}

#[test]
fn false_monitors_are_named_and_names_of_threads_count() {
    if !is_root() {
        return;
    }
    let own_pid = std::process::id();
    let foreign = format!(r#"[{{"cpu-index": 0, "thread-id": {own_pid}}}]"#);
    let cases = [
        ("silent", "nothing within 1000 ms"),
        ("deaf", "nothing within 1000 ms"),
        ("garbage", "does not speak QMP"),
        ("endless", "does not speak QMP"),
        (&foreign, "which this machine does not have; the source is not used"),
        (r#"[{"cpu-index": 3, "thread-id": SELF}]"#, "vCPU 3 is the main thread; the source is not used"),
        (r#"[{"cpu-index": -1, "thread-id": 5}]"#, "malformed: query-cpus-fast"),
    ];
    for (mode, expected) in cases {
        let Some((machine, found)) = map_false_monitor(mode) else { return };
        assert!(found.iter().any(|text| text.contains(expected)), "{mode}: {machine}");
        if mode.starts_with('[') {
            assert!(found.iter().any(|text| text.contains("malformed: query-memdev")), "{mode}: {machine}");
        }
    }
}
