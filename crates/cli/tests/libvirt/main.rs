//! Domains of a real libvirt, which runs them all as one user, each behind QEMU's seccomp filter. Each domain must be
//! its own trust domain, a domain whose owner forbids merging must stay unmerged, and no domain may be harmed.
//!
//! `labs/libvirt.sh` starts libvirt and its domains in separate namespaces and ends them with the test.

#![forbid(unsafe_code)]

use pagefold_base::IdSet;
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::ksm::KsmTestGuard;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

mod guest_agent;
mod tuned_definitions;

/// Memory sizes of each domain in MiB; its name comes first. All hold the same 24 MiB, and 4 MiB of their own; the
/// owner of the last domain forbids merging. The first one has an iothread.
const SHARING_GUEST: &str = "112:24:4";
const IOTHREAD_GUEST: &str = "112:24:4:<iothreads>1</iothreads>";
const SEALED_GUEST: &str = "112:24:4:<memoryBacking><nosharepages/></memoryBacking>";

const BYTES_PER_MIB: u64 = 1 << 20;

/// Timeout for everything that the test waits for.
const TEST_TIMEOUT: Duration = Duration::from_secs(120);

/// A running libvirt with its domains.
struct LibvirtSession {
    process: Child,
    shell: Option<ChildStdin>,
    lines: Receiver<String>,
    directory: TempDir,
    /// Two domains that share, and one that must not be merged. No other test's guests have these names.
    domain_names: [String; 3],
}

impl LibvirtSession {
    /// Start libvirt, and wait until its guests have written their data.
    fn start() -> Self {
        let directory = tempfile::Builder::new().prefix("pagefold-libvirt-").tempdir().unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let id = std::process::id();
        let names = [format!("web{id}-0"), format!("web{id}-1"), format!("sealed{id}")];
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../labs/libvirt.sh");
        let mut process = Command::new(script)
            .arg(directory.path())
            .arg(GuestAssets::default_directory())
            .args([
                format!("{}:{IOTHREAD_GUEST}", names[0]),
                format!("{}:{SHARING_GUEST}", names[1]),
                format!("{}:{SEALED_GUEST}", names[2]),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cannot start libvirt.sh");
        let (sender, lines) = mpsc::channel();
        let output = process.stdout.take().unwrap();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let shell = process.stdin.take();
        let libvirt = Self { process, shell, lines, directory, domain_names: names };
        libvirt.read_until(|line| line == "READY");
        let ready = |name: &String| {
            let serial = fs::read_to_string(libvirt.directory.path().join(format!("{name}.serial")));
            serial.is_ok_and(|text| text.lines().any(|line| line.trim() == "READY"))
        };
        wait_until("the data of all guests", || libvirt.domain_names.iter().all(ready));
        libvirt
    }

    /// A glob pattern that matches the names of the sharing domains.
    fn sharing_names_glob(&self) -> String {
        format!("web{}-*", std::process::id())
    }

    /// A configuration that puts the sharing domains into one trust domain, by user and name.
    fn group_config(&self) -> String {
        format!("[[domain]]\nname = \"web\"\nusers = [\"libvirt-qemu\"]\nvms = [\"{}\"]\n", self.sharing_names_glob())
    }

    /// Lines of standard output up to and including the first for which `is_end` is true.
    fn read_until(&self, is_end: impl Fn(&str) -> bool) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let line = self.lines.recv_timeout(TEST_TIMEOUT).expect("no answer; see standard error of libvirt.sh");
            lines.push(line);
            if lines.last().is_some_and(|line| is_end(line)) {
                return lines;
            }
        }
    }

    /// Run a command in libvirt's namespaces. The command must succeed.
    fn run_shell(&mut self, command: &str) -> String {
        writeln!(self.shell.as_mut().unwrap(), "{command}").unwrap();
        let lines = self.read_until(|line| line.starts_with("END "));
        assert_eq!(lines.last().map(String::as_str), Some("END 0"), "{command}: {lines:#?}");
        lines.join("\n")
    }

    /// Assert that every domain still runs, and that libvirt marks none as tainted.
    fn assert_domains_unharmed(&mut self) {
        for name in self.domain_names.clone() {
            assert!(self.run_shell(&format!("virsh domstate {name}")).contains("running"), "{name}");
            let log = self.directory.path().join(format!("var/log/libvirt/qemu/{name}.log"));
            let log = fs::read_to_string(log).unwrap();
            assert!(log.contains("-sandbox on"), "{log}");
            assert!(!log.contains("tainted: custom-monitor") && !log.contains("shutting down"), "{log}");
        }
    }
}

impl Drop for LibvirtSession {
    fn drop(&mut self) {
        // The script exits when its standard input closes, or when it is killed. All processes it started are in its
        // namespace.
        drop(self.shell.take());
        let deadline = Instant::now() + Duration::from_secs(5);
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < deadline {
            sleep(Duration::from_millis(20));
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A daemon started by timeout(1), which forwards SIGTERM. Dropping this stops the daemon.
struct LibvirtDaemon(Child);

impl LibvirtDaemon {
    fn stop(&self) {
        let _ =
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0.id() as i32), nix::sys::signal::Signal::SIGTERM);
    }
}

impl Drop for LibvirtDaemon {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.stop();
            let _ = self.0.wait();
        }
    }
}

fn wait_until(condition: &str, mut is_met: impl FnMut() -> bool) {
    let deadline = Instant::now() + TEST_TIMEOUT;
    while !is_met() {
        assert!(Instant::now() < deadline, "timeout: {condition}");
        sleep(Duration::from_millis(100));
    }
}

/// The directory with Pagefold's state and configuration.
struct LibvirtStateDirectory(TempDir);

impl LibvirtStateDirectory {
    fn config_path(&self) -> PathBuf {
        self.0.path().join("pagefold.toml")
    }

    fn command(&self, config: &str, arguments: &[&str]) -> Command {
        fs::write(self.config_path(), config).unwrap();
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "110", env!("CARGO_BIN_EXE_pagefold"), "--state"]).arg(self.0.path().join("state"));
        command.arg("--config").arg(self.config_path()).args(arguments);
        command
    }

    fn run(&self, config: &str, arguments: &[&str]) -> Output {
        self.command(config, arguments).output().expect("cannot start timeout(1)")
    }

    /// Run a command that must exit with one of these codes; returns its report.
    fn report_json(&self, config: &str, arguments: &[&str], codes: &[i32]) -> Value {
        let output = self.run(config, &[arguments, &["--json"]].concat());
        let code = output.status.code().unwrap_or(-1);
        assert!(codes.contains(&code), "{arguments:?}: {code}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).expect("JSON")
    }
}

/// The pid of the process that a census lists under a domain's name.
fn pid_by_name(census: &Value, name: &str) -> u64 {
    let mut processes = census["processes"].as_array().unwrap().iter();
    let process = processes.find(|process| process["vm"]["name"] == name);
    process.unwrap_or_else(|| panic!("no {name} in {census}"))["pid"].as_u64().unwrap()
}

/// Merged memory of a process in bytes, and whether any of its memory is enrolled.
fn merged_bytes(pid: u64) -> (u64, bool) {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("the process has exited");
    let kib =
        smaps.lines().filter_map(|line| line.strip_prefix("KSM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let enrolled = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    (kib.sum::<u64>() << 10, enrolled.flat_map(str::split_whitespace).any(|flag| flag == "mg"))
}

/// A thread that libvirt pins.
struct PinnedThread {
    /// What the kernel's name of the thread begins with.
    name: &'static str,
    /// The number of the thread in libvirt's list.
    number: u32,
    /// The command of virsh that lists the pins.
    list_command: &'static str,
    /// What selects it for `pagefold-lab place --libvirt`.
    place_arguments: &'static str,
}

const PINNED_THREADS: [PinnedThread; 2] = [
    PinnedThread { name: "CPU 0/", number: 0, list_command: "vcpupin", place_arguments: "" },
    PinnedThread {
        name: "IO iothread1",
        number: 1,
        list_command: "iothreadinfo",
        place_arguments: "--iothread iothread1",
    },
];

/// The online CPUs of a host with at least two.
struct OnlineCpus {
    first: u32,
    second: u32,
    all: IdSet,
}

impl OnlineCpus {
    fn read() -> Option<Self> {
        let all: IdSet = fs::read_to_string("/sys/devices/system/cpu/online").ok()?.trim().parse().ok()?;
        let (first, second) = (all.iter().next()?, all.iter().nth(1)?);
        Some(Self { first, second, all })
    }
}

/// Pins a thread through libvirt: its definition of the domain and the kernel agree, and the undo restores both, also
/// after the pinning process was killed.
fn check_pins(libvirt: &mut LibvirtSession, thread: &PinnedThread, cpus: &OnlineCpus) {
    let name = libvirt.domain_names[0].clone();
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let (lab, pagefold) = (lab.display(), env!("CARGO_BIN_EXE_pagefold"));
    let PinnedThread { name: thread_name, number, list_command, place_arguments } = thread;
    let OnlineCpus { second, all, .. } = cpus;
    libvirt.run_shell(&format!(
        "uuid=$(virsh domuuid {name}); pid=$(cat /run/libvirt/qemu/{name}.pid); state=$directory/pins; \
         thread=$(grep -l '^{thread_name}' /proc/$pid/task/*/comm | sed 's|/comm||'); rm -f $directory/fifo; \
         mkfifo $directory/fifo"
    ));
    let cpus_of = |libvirt: &mut LibvirtSession| {
        let pinned =
            libvirt.run_shell(&format!("virsh {list_command} {name} | awk '$1 == {number} {{ print \"PIN \" $2 }}'"));
        let allowed = libvirt.run_shell("sed -n 's/^Cpus_allowed_list:[^0-9]*/CPUS /p' $thread/status");
        let word = |text: String, prefix: &str| {
            text.lines()
                .find_map(|line| line.strip_prefix(prefix).map(str::to_owned))
                .unwrap_or_else(|| panic!("{text}"))
        };
        (word(pinned, "PIN "), word(allowed, "CPUS "))
    };
    let place = format!(
        "rm -f $directory/placed; \
         {lab} place $pid --state $state --libvirt $uuid {place_arguments} --cpus {second} < $directory/fifo > $directory/placed 2>&1 & \
         placing=$!; exec 9> $directory/fifo; tries=0; \
         until grep -qs PLACED $directory/placed || [ $tries -gt 600 ]; do sleep 0.1; tries=$((tries + 1)); done; \
         grep PLACED $directory/placed || {{ cat $directory/placed; false; }}"
    );
    let both = |cpus: &str| (cpus.to_owned(), cpus.to_owned());
    let before = cpus_of(libvirt);
    assert_eq!(before, both(&all.to_string()));
    libvirt.run_shell(&place);
    assert_eq!(cpus_of(libvirt), both(&second.to_string()));
    libvirt.run_shell("exec 9>&-; wait $placing");
    assert_eq!(cpus_of(libvirt), before);
    libvirt.run_shell(&place);
    libvirt.run_shell("kill -9 $placing; exec 9>&-; wait $placing || true");
    assert_eq!(cpus_of(libvirt), both(&second.to_string()));
    libvirt.run_shell(&format!("{pagefold} recover --state $state"));
    assert_eq!(cpus_of(libvirt), before);
    // The map names the domain, and a process that only claims a name is none of libvirt's.
    let map = libvirt.run_shell(&format!("{pagefold} numa map --vm {name} --json | grep libvirt_uuid"));
    let uuid = libvirt.run_shell("echo $uuid");
    assert!(map.contains(uuid.lines().next().unwrap()), "{map} {uuid}");
}

/// vCPUs come from libvirt's state, and from QEMU's monitor only on request, because libvirt marks the domain then. The same
/// holds for `doctor` and recordings.
fn check_monitor(libvirt: &mut LibvirtSession) {
    let name = libvirt.domain_names[1].clone();
    let machine = |libvirt: &mut LibvirtSession, option: &str| {
        let pagefold = env!("CARGO_BIN_EXE_pagefold");
        let output = libvirt.run_shell(&format!("{pagefold} numa map --vm {name} {option} --json; echo"));
        let (json, _) = output.rsplit_once("END 0").unwrap();
        let map: Value = serde_json::from_str(json).unwrap_or_else(|why| panic!("{why}: {output}"));
        map["processes"][0]["machine"].clone()
    };
    let thread = |machine: &Value| machine["vcpus"][0]["thread"].as_u64().unwrap_or_else(|| panic!("{machine}"));
    let by_state = machine(libvirt, "");
    assert_eq!((&by_state["vcpu_source"], &by_state["conflicts"]), (&"libvirt".into(), &Value::Null), "{by_state}");
    let audit = |libvirt: &mut LibvirtSession, options: &str| {
        let pagefold = env!("CARGO_BIN_EXE_pagefold");
        let pid = format!("$(cat /run/libvirt/qemu/{name}.pid)");
        let arguments = options.replace("PID", &format!("--pid {pid}"));
        let output = libvirt.run_shell(&format!("{pagefold} {arguments} --topic vm --json || true; echo"));
        let (json, _) = output.rsplit_once("END 0").unwrap();
        let report: Value = serde_json::from_str(json).unwrap_or_else(|why| panic!("{why}: {output}"));
        let is_it = |finding: &&Value| finding["rule"] == "vm-monitor" && finding.to_string().contains(&*name);
        let finding = report["findings"].as_array().unwrap().iter().find(is_it).cloned();
        finding.unwrap_or_else(|| panic!("{report}"))
    };
    let unasked = audit(libvirt, "doctor PID");
    assert_eq!(unasked["verdict"], "not_applicable", "{unasked}");
    libvirt.assert_domains_unharmed();
    let asked = audit(libvirt, "doctor --libvirt-monitor PID");
    assert_eq!(asked["verdict"], "ok", "{asked}");
    assert!(asked["value"].as_str().unwrap().starts_with("1 virtual CPU"), "{asked}");
    libvirt.run_shell(&format!(
        "rm -rf $directory/recording; {} record --libvirt-monitor --pass-interval 0 --vm {name} $directory/recording",
        env!("CARGO_BIN_EXE_pagefold")
    ));
    let replayed = audit(libvirt, "--host recording:$directory/recording doctor");
    assert_eq!((&replayed["verdict"], &replayed["value"]), (&asked["verdict"], &asked["value"]), "{replayed}");
    let by_monitor = machine(libvirt, "--libvirt-monitor");
    assert_eq!(
        (&by_monitor["vcpu_source"], &by_monitor["conflicts"]),
        (&"monitor".into(), &Value::Null),
        "{by_monitor}"
    );
    assert_eq!(thread(&by_monitor), thread(&by_state));
    assert!(by_monitor["memory_backends"][0]["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{by_monitor}");
    let log = libvirt.directory.path().join(format!("var/log/libvirt/qemu/{name}.log"));
    assert!(fs::read_to_string(log).unwrap().contains("tainted: custom-monitor"));
}

/// Places a domain by `numa apply` and undoes it: libvirt's pins of vCPU, emulator and iothread agree with the kernel, and
/// its XML is as before afterwards. Its owner has pinned them to two CPUs, because libvirt keeps a pin to all CPUs where
/// there was none. The host may have one node, so libvirt's namespaces see two, by files over those of
/// sysfs: node 0 has the memory and the first CPU, node 1 has all others. So CPUs change, and no memory moves.
fn check_numa_placement(libvirt: &mut LibvirtSession, cpus: &OnlineCpus) {
    let name = libvirt.domain_names[0].clone();
    let pagefold = env!("CARGO_BIN_EXE_pagefold");
    let OnlineCpus { first, second, all } = cpus;
    let others: IdSet = all.iter().filter(|cpu| cpu != first).collect();
    let two = [*first, *second].into_iter().collect::<IdSet>().to_string();
    libvirt.run_shell(&format!(
        "state=$directory/placement; pid=$(cat /run/libvirt/qemu/{name}.pid); nodes=$directory/nodes; \
         mkdir -p $nodes/node0 $nodes/node1; echo {first} > $nodes/node0/cpulist; echo {others} > $nodes/node1/cpulist; \
         cp /sys/devices/system/node/node0/meminfo $nodes/node0; echo 'Node 1 MemTotal: 0 kB' > $nodes/node1/meminfo; \
         echo '10 20' > $nodes/node0/distance; echo '20 10' > $nodes/node1/distance; \
         mount --bind $nodes /sys/devices/system/node; virsh emulatorpin {name} {two}; \
         virsh vcpupin {name} 0 {two}; virsh iothreadpin {name} 1 {two}"
    ));
    let pins = |libvirt: &mut LibvirtSession| {
        let listed = libvirt.run_shell(&format!(
            "{{ virsh vcpupin {name}; virsh emulatorpin {name}; virsh iothreadinfo {name}; }} | \
             awk 'NF {{ print \"PIN\", $NF }}'"
        ));
        let threads = libvirt.run_shell("sed -n 's/^Cpus_allowed_list:[^0-9]*/THREAD /p' /proc/$pid/task/*/status");
        let lines = |text: String, prefix: &str| -> Vec<String> {
            text.lines().filter_map(|line| line.strip_prefix(prefix).map(str::to_owned)).collect()
        };
        (lines(listed, "PIN "), lines(threads, "THREAD "))
    };
    let definition = |libvirt: &mut LibvirtSession| libvirt.run_shell(&format!("virsh dumpxml {name}"));
    let (before, xml) = (pins(libvirt), definition(libvirt));
    assert_eq!(before.0, [&*two; 3]);
    let node_cpus = first.to_string();
    let apply = format!("{pagefold} numa apply --vm {name} --to 0 --state $state --json");
    for is_killed in [false, true] {
        let (prefix, status) = if is_killed {
            ("PAGEFOLD_FAULT_POINT='2 after setting an affinity' ", "[ $? -eq 137 ]")
        } else {
            ("", "[ $? -eq 0 ]")
        };
        libvirt.run_shell(&format!(
            "{prefix}{apply} > $directory/applied 2>&1; {status} || {{ cat $directory/applied; false; }}"
        ));
        let placed = pins(libvirt);
        if is_killed {
            assert_ne!(placed.0, before.0, "nothing was pinned before the kill");
            libvirt.run_shell(&format!("{pagefold} recover --state $state"));
        } else {
            assert_eq!(placed.0, [&*node_cpus; 3], "libvirt's pins");
            assert!(
                placed.1.len() >= 4 && placed.1.iter().all(|cpus| *cpus == node_cpus),
                "the kernel's CPUs: {:?}",
                placed.1
            );
            let pinned = definition(libvirt);
            assert!(pinned.contains(&format!("<emulatorpin cpuset='{node_cpus}'/>")), "{pinned}");
            libvirt.run_shell(&format!("{pagefold} numa verify --state $state"));
            libvirt.run_shell(&format!("{pagefold} numa undo --state $state"));
        }
        assert_eq!(pins(libvirt), before, "killed: {is_killed}");
        assert_eq!(definition(libvirt), xml, "killed: {is_killed}");
    }
    libvirt.run_shell("umount /sys/devices/system/node");
}

/// Defines a domain anew, for its next start. libvirt stores the definition in its own form, and the undo brings back the
/// file as it was, also after the defining process was killed. An invalid definition is refused.
fn check_definitions(libvirt: &mut LibvirtSession) {
    let name = libvirt.domain_names[1].clone();
    let lab = pagefold_labs::client::lab_binary().unwrap();
    let (lab, pagefold) = (lab.display(), env!("CARGO_BIN_EXE_pagefold"));
    libvirt.run_shell(&format!(
        "pid=$(cat /run/libvirt/qemu/{name}.pid); file=/etc/libvirt/qemu/{name}.xml; state=$directory/definitions; \
         rm -f $directory/fifo; mkfifo $directory/fifo; virsh dumpxml --inactive {name} > $directory/definition.xml; \
         virsh define $directory/definition.xml"
    ));
    let define = |change: &str, is_done: &str| {
        format!(
            "rm -f $directory/defined; \
             {lab} place $pid --state $state --definition '{change}' < $directory/fifo > $directory/defined 2>&1 & \
             defining=$!; exec 9> $directory/fifo; tries=0; until grep -qs '{is_done}' $directory/defined || \
             [ $tries -gt 600 ]; do sleep 0.1; tries=$((tries + 1)); done; cat $directory/defined; \
             grep -q '{is_done}' $directory/defined"
        )
    };
    let file = |libvirt: &mut LibvirtSession| libvirt.run_shell("sed 's/^/FILE /' $file");
    let before = file(libvirt);
    let title = "</name>=</name><title>kept</title>";
    for is_killed in [false, true] {
        libvirt.run_shell(&define(title, "PLACED"));
        let titles = libvirt.run_shell(&format!("virsh dumpxml --inactive {name} | grep '<title>'"));
        assert!(titles.contains("  <title>kept</title>"), "in libvirt's own form: {titles}");
        assert!(file(libvirt).contains("\nFILE   <title>kept</title>"));
        let end = if is_killed {
            format!("kill -9 $defining; exec 9>&-; wait $defining || true; {pagefold} recover --state $state")
        } else {
            "exec 9>&-; wait $defining".to_owned()
        };
        libvirt.run_shell(&end);
        assert_eq!(file(libvirt), before, "killed: {is_killed}");
    }
    let kill = |libvirt: &mut LibvirtSession, point: &str| {
        libvirt.run_shell(&format!(
            "PAGEFOLD_FAULT_POINT='1 {point}' {lab} place $pid --state $state --definition '{title}' < /dev/null \
             > $directory/defined 2>&1 || true; grep 'fault point 1: {point}' $directory/defined"
        ));
    };
    // Right after the definition, the journal does not have libvirt's form of it yet.
    for (point, is_stored) in [("before defining a domain", false), ("after defining a domain", true)] {
        kill(libvirt, point);
        assert_eq!(file(libvirt).contains("<title>kept</title>"), is_stored, "{point}");
        libvirt.run_shell(&format!("{pagefold} recover --state $state"));
        assert_eq!(file(libvirt), before, "{point}");
    }
    // What another program defines after the kill stays.
    kill(libvirt, "after defining a domain");
    libvirt.run_shell(
        "sed 's|<title>kept<|<title>changed<|' $file > $directory/changed.xml; virsh define $directory/changed.xml",
    );
    let recovered = libvirt.run_shell(&format!("{pagefold} recover --state $state 2>&1 || true"));
    assert!(recovered.contains(&format!("{name}.xml")), "{recovered}");
    assert!(file(libvirt).contains("<title>changed</title>"), "{recovered}");
    libvirt.run_shell("virsh define $directory/definition.xml");
    assert_eq!(file(libvirt), before);
    let refused = libvirt
        .run_shell(&format!("{}; exec 9>&-; wait $defining || true", define("</name>=</name><nosuch/>", "refuses")));
    assert!(refused.contains("libvirt refuses"), "{refused}");
    assert_eq!(file(libvirt), before);
}

#[test]
fn libvirt_domains_are_kept_apart_and_unharmed() {
    if let Err(why) = GuestAssets::find(&GuestAssets::default_directory()) {
        return println!("skipped: {why}");
    }
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to start libvirt");
    }
    if !Path::new("/usr/sbin/libvirtd").exists() {
        return println!("skipped: libvirtd is not installed: run labs/setup.sh");
    }
    if !Command::new("unshare").args(["-mnip", "--fork", "true"]).status().is_ok_and(|status| status.success()) {
        return println!("skipped: needs new namespaces (unshare)");
    }
    let state_directory = LibvirtStateDirectory(tempfile::tempdir().unwrap());
    let mut libvirt = LibvirtSession::start();
    let Some(ksm) = KsmTestGuard::acquire_with_foreign_settings() else { return };
    match OnlineCpus::read() {
        Some(cpus) => {
            PINNED_THREADS.iter().for_each(|thread| check_pins(&mut libvirt, thread, &cpus));
            check_numa_placement(&mut libvirt, &cpus);
        }
        None => println!("skipped: pinning needs a processor with two CPUs online"),
    }
    check_definitions(&mut libvirt);
    tuned_definitions::check_tuned_definitions(&mut libvirt);
    // QEMU has enrolled guest RAM itself, and ksmd may have run in another test since.
    let (webs, names) = (libvirt.sharing_names_glob(), libvirt.domain_names.clone());
    let sealed = names[2].clone();
    let unmerged = state_directory.report_json("", &["unmerge", "--vm", &webs], &[0]);
    libvirt.assert_domains_unharmed();

    let census = state_directory.report_json("", &["census", "--vm", &webs, "--vm", &sealed], &[0]);
    let pids: Vec<u64> = names.iter().map(|name| pid_by_name(&census, name)).collect();
    let processes = census["processes"].as_array().unwrap();
    let is_domain = |name: &String| processes.iter().any(|process| process["domain"] == format!("vm {name}"));
    assert!(names.iter().all(is_domain), "{processes:?}");
    assert!(pids[..2].iter().all(|&pid| merged_bytes(pid) == (0, false)), "{unmerged}");

    // All domains run as one user and are separate trust domains all the same.
    let quick = ["--vm", &webs, "--pass-interval", "0", "--cpu", "100", "--watch-time", "0"];
    let merge = |config: &str, more: &[&str]| {
        state_directory.report_json(config, &[&["merge"], &quick[..], more].concat(), &[0, 1])
    };
    let gross = |report: &Value| report["plan"]["savings"]["gross"].as_u64().unwrap();
    let separate = merge("", &[]);
    assert!(pids.iter().all(|&pid| merged_bytes(pid).0 < 16 * BYTES_PER_MIB), "{separate}");
    // A group by names alone does not change that, because any process can take a name.
    let names_alone = libvirt.group_config().replace("users = [\"libvirt-qemu\"]\n", "");
    let output = state_directory.run(&names_alone, &[&["merge", "--dry-run"], &quick[..]].concat());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("the domain \"web\" is not applied"), "{stderr}");
    let by_names_only = merge(&names_alone, &["--dry-run"]);
    let together = merge(&libvirt.group_config(), &[]);
    assert!(gross(&together) >= gross(&by_names_only) + 16 * BYTES_PER_MIB, "{together}");
    assert!(pids[..2].iter().all(|&pid| merged_bytes(pid).0 >= 24 * BYTES_PER_MIB), "{together}");
    libvirt.assert_domains_unharmed();

    // Memory whose owner forbids merging is not merged without `--ignore-opt-out`.
    let skipped = state_directory.report_json(
        &libvirt.group_config(),
        &["merge", "--vm", &sealed, "--dry-run", "--pass-interval", "0"],
        &[0, 1],
    );
    assert!(skipped["plan"]["skipped"].to_string().contains("its owner forbids merging: mem-merge=off"), "{skipped}");
    let forced = ["merge", "--vm", &sealed, "--dry-run", "--pass-interval", "0", "--ignore-opt-out"];
    let forced = state_directory.report_json(&libvirt.group_config(), &forced, &[0, 1]);
    assert!(!forced["plan"]["skipped"].to_string().contains("mem-merge"), "{forced}");
    let doctor = state_directory.run("", &["doctor", "--json"]);
    let doctor: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    let mut findings = doctor["findings"].as_array().unwrap().iter();
    let opt_out = findings.find(|finding| finding["rule"] == "ksm-opt-out").expect("no such finding");
    assert!(opt_out["value"].to_string().contains("mem-merge=off"), "{opt_out}");

    let account = state_directory
        .report_json(&libvirt.group_config(), &["account", "--by", "vm", "--vm", &webs], &[0])
        .to_string();
    assert!(names.iter().take(2).all(|name| account.contains(name.as_str())), "{account}");
    state_directory.report_json(&libvirt.group_config(), &["unmerge", "--vm", &webs], &[0]);
    assert!(pids[..2].iter().all(|&pid| merged_bytes(pid) == (0, false)));
    libvirt.assert_domains_unharmed();

    let config = format!(
        "{}[daemon]\nmode = \"act\"\ncpu_rate = \"100%\"\ncpu_burst = \"5m\"\nmax_cpu_seconds_per_mib = 1.0\n\
         max_slowdown = \"100%\"\n[daemon.tracked]\nvms = [\"{webs}\", \"{sealed}\"]\n",
        libvirt.group_config()
    );
    let mut daemon =
        LibvirtDaemon(state_directory.command(&config, &["daemon"]).stderr(Stdio::null()).spawn().unwrap());
    wait_until("the merge of the group by the daemon", || {
        assert!(matches!(daemon.0.try_wait(), Ok(None)), "the daemon has exited");
        pids[..2].iter().all(|&pid| merged_bytes(pid).0 >= 24 * BYTES_PER_MIB)
    });
    let status = state_directory.report_json(&config, &["status"], &[0]).to_string();
    assert!(status.contains("its owner forbids merging: mem-merge=off"), "{status}");
    assert_eq!(merged_bytes(pids[2]), (0, false), "{status}");
    daemon.stop();
    assert_eq!(daemon.0.wait().unwrap().code(), Some(0));
    libvirt.assert_domains_unharmed();
    check_monitor(&mut libvirt);
    guest_agent::check_guest_agent(&mut libvirt);
    assert_eq!(ksm.changed_settings(), []);
}
