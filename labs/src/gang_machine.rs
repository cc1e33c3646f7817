//! An emulated machine with the recent kernel, in which `pagefold vcpu gang` schedules guests of emulated KVM.
//!
//! Its time is virtual: an instruction takes a nanosecond, and the CPUs take turns. Therefore figures of a run do not
//! depend on the load of this machine, and repeat.

use crate::assets::GuestAssets;
use crate::machine::{self, EmulatedMachine};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The memory of the machine, in MiB.
const MEMORY_MIB: u32 = 1024;
const MODULES: [&str; 3] = ["irqbypass.ko", "kvm.ko", "kvm-amd.ko"];

/// The CPUs of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineShape {
    /// All CPUs.
    pub cpus: u32,
    /// NUMA nodes, which divide them.
    pub nodes: u32,
}

/// Boots the machine with a number of CPUs on one node, runs scenes for `labs/guest/init-gang`, and returns what they printed.
///
/// # Errors
/// The reason if this machine lacks what it needs.
///
/// # Panics
/// If the load cannot be compiled, or if the scenes did not end in time.
pub fn run_gang_scenes(pagefold: &Path, cpus: u32, scenes: &str, timeout: Duration) -> Result<String, String> {
    run_scenes_on(pagefold, MachineShape { cpus, nodes: 1 }, scenes, timeout)
}

/// As [`run_gang_scenes`], on a machine with several nodes.
///
/// # Errors
/// The reason if this machine lacks what it needs.
///
/// # Panics
/// If the load cannot be compiled, or if the scenes did not end in time.
pub fn run_scenes_on(pagefold: &Path, shape: MachineShape, scenes: &str, timeout: Duration) -> Result<String, String> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory).map_err(|why| why.to_string())?;
    let kernel = GuestAssets::find_recent_kernel(&directory).map_err(|why| why.to_string())?;
    machine::find_busybox().map_err(|why| why.to_string())?;
    let modules = MODULES.map(|name| directory.join("modules-recent").join(name));
    if let Some(missing) = modules.iter().find(|module| !module.exists()) {
        return Err(format!("{} is missing: run labs/setup.sh", missing.display()));
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest");
    let load = folder.path().join("gang-load");
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-static", "-pthread", "-o"]).arg(&load).arg(guest.join("gang-load.c"));
    let output = compiler.output().map_err(|error| format!("gcc: {error}: run labs/setup.sh"))?;
    assert!(output.status.success(), "{output:?}");
    let paths = MODULES.map(|name| format!("modules/{name}"));
    let mut programs: Vec<(&Path, &str)> = vec![(&load, "bin/gang-load"), (pagefold, "bin/pagefold")];
    programs.extend(modules.iter().map(PathBuf::as_path).zip(paths.iter().map(String::as_str)));
    // A socket for each node: CPUs with a common cache are on one node.
    let cpus = format!("cpus={},sockets={}", shape.cpus, shape.nodes);
    let (memory, nodes) = (format!("{MEMORY_MIB}M"), node_options(shape));
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &guest.join("init-gang"),
        programs: &programs,
        files: &[("scenes", scenes)],
        options: &[
            &["-smp", &cpus, "-m", &memory, "-cpu", "max,-rdrand,-rdseed", "-seed", "1"][..],
            &nodes,
            &["-icount", "shift=0,sleep=off", "-rtc", "base=2026-01-01,clock=vm"],
        ]
        .concat(),
        kernel_arguments: "nokaslr",
    };
    let output = machine.run(folder.path(), timeout, &mut || Ok(())).map_err(|error| error.to_string())?;
    assert!(output.lines().any(|line| line == "ENDED"), "the scenes did not end: {output}");
    Ok(output)
}

/// Options of QEMU that divide CPUs and memory equally among nodes. One node needs none.
fn node_options(MachineShape { cpus, nodes }: MachineShape) -> Vec<String> {
    let mut options = Vec::new();
    for node in (0..nodes).filter(|_| nodes > 1) {
        let (first, last) = (node * cpus / nodes, (node + 1) * cpus / nodes - 1);
        let backend = format!("memory-backend-ram,id=node{node},size={}M", MEMORY_MIB / nodes);
        let node = format!("node,nodeid={node},cpus={first}-{last},memdev=node{node}");
        options.extend(["-object".to_owned(), backend, "-numa".to_owned(), node]);
    }
    options
}

/// The operations a second of each machine in a measurement.
///
/// # Panics
/// If the output has no such line.
pub fn machine_rates(output: &str, name: &str) -> Vec<f64> {
    let prefix = format!("RESULT {name} ");
    let rates = output.lines().find_map(|line| line.strip_prefix(&*prefix)?.split_once(" rates="));
    let (_, rates) = rates.unwrap_or_else(|| panic!("no {prefix}in {output}"));
    rates.trim_end().split(',').map(|rate| rate.parse().unwrap_or_else(|error| panic!("{error}: {rates}"))).collect()
}

/// The figures of a line `RESULT NAME KEY=VALUE...` of the load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadFigures {
    /// Operations a second, of all machines.
    pub rate: f64,
    /// Jain's fairness index of the machines' rates.
    pub fairness: f64,
    /// The share of the time in which a machine has CPUs and as many as it can use.
    pub corun: f64,
    /// vCPUs that neither worked nor spun.
    pub idle_vcpus: u32,
    /// The share of the machines' CPU time on CPUs of the node of their memory; 0 for a load without nodes.
    pub home_share: f64,
}

/// The figures of a measurement.
///
/// # Panics
/// If the output has no such line.
pub fn load_figures(output: &str, name: &str) -> LoadFigures {
    let prefix = format!("RESULT {name} ");
    let line = output.lines().find_map(|line| line.strip_prefix(&*prefix));
    let line = line.unwrap_or_else(|| panic!("no {prefix}in {output}"));
    let word = |key: &str| {
        let found = line.split(' ').find_map(|word| word.strip_prefix(key)?.strip_prefix('='));
        found.unwrap_or_else(|| panic!("no {key} in {line}"))
    };
    let number = |key: &str| word(key).parse().unwrap_or_else(|error| panic!("{key}: {error}: {line}"));
    LoadFigures {
        rate: number("rate"),
        fairness: number("jain"),
        corun: number("corun"),
        idle_vcpus: word("idle").parse().unwrap_or_else(|error| panic!("idle: {error}: {line}")),
        home_share: number("home"),
    }
}
