//! Placement by the real numad against Pagefold's plan: machines start one after the other in an emulated machine with
//! several nodes, each on the nodes that numad advises (`numad -w`, as libvirt asks it with `placement='auto'`). The plan
//! is for the same machines at once.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::{Context, Result, ensure};
use pagefold_base::IdSet;
use pagefold_base::splitmix::splitmix64;
use pagefold_labs::assets::GuestAssets;
use pagefold_labs::machine::EmulatedMachine;
use pagefold_numa::decide::plan::generated::at_default_prices;
use pagefold_numa::decide::plan::{self, NodeCapacity, Pattern, PlacementProblem, PlannedPart, PlannedVm};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

const NUMAD: &str = "/usr/bin/numad";

/// The nodes of each host.
const HOST_NODES: [u32; 7] = [2, 4, 4, 4, 4, 8, 8];

/// CPUs of a node.
const NODE_CPUS: u32 = 2;

/// Memory of a node. The kernel takes a part of it.
const NODE_MIB: u64 = 1024;

/// The part that machines may use.
const USABLE_MIB: u64 = 800;

/// Target: the plan's remote memory, relative to that of numad's advice.
const MAX_REMOTE_RATIO: f64 = 0.7;

struct Machine {
    cpus: u32,
    mib: u64,
}

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    ensure!(Path::new(NUMAD).exists(), "{NUMAD} is missing: apt-get install numad");
    let hosts = if effort.quick { &HOST_NODES[..1] } else { &HOST_NODES };
    let mut findings = Findings::new("host,nodes,machine,cpus,mib,numad_nodes,plan_nodes");
    let mut table = MarkdownTable::new(
        "Remote memory of machines that start one after the other",
        &["host", "machines", "numad, MiB", "plan, MiB"],
    );
    let (mut all_numad, mut all_plan) = (0.0, 0.0);
    for (host, &nodes) in hosts.iter().enumerate() {
        let machines = generated_machines(host as u64, nodes);
        let advice = ask_numad(nodes, &machines)?;
        let planned = planned_nodes(nodes, &machines);
        let remote = |chosen: &[IdSet]| -> f64 {
            // A machine over several nodes reads all but one share of its memory remotely.
            let share = |nodes: &IdSet| 1.0 - 1.0 / nodes.iter().count().max(1) as f64;
            machines.iter().zip(chosen).map(|(machine, nodes)| machine.mib as f64 * share(nodes)).sum()
        };
        let (by_numad, by_plan) = (remote(&advice), remote(&planned));
        all_numad += by_numad;
        all_plan += by_plan;
        for (number, (machine, (advised, planned))) in machines.iter().zip(advice.iter().zip(&planned)).enumerate() {
            findings
                .samples
                .push(format!("{host},{nodes},m{number},{},{},\"{advised}\",\"{planned}\"", machine.cpus, machine.mib));
        }
        table.rows.push(vec![
            format!("{nodes} nodes"),
            machines.len().to_string(),
            format!("{by_numad:.0}"),
            format!("{by_plan:.0}"),
        ]);
    }
    findings.checks.push(ThresholdCheck {
        claim: format!("the plan has at most {MAX_REMOTE_RATIO} of the remote memory of numad's advice"),
        measured: format!("{all_plan:.0} of {all_numad:.0} MiB"),
        met: all_plan <= MAX_REMOTE_RATIO * all_numad,
    });
    findings.tables.push(table);
    Ok(findings)
}

/// Machines that fill most of a host, large and small ones in any order.
fn generated_machines(seed: u64, nodes: u32) -> Vec<Machine> {
    let mut state = 1000 * seed;
    let mut below = |limit: u64| {
        state += 1;
        splitmix64(state) % limit
    };
    let (mut free_cpus, mut free_mib) = (nodes * NODE_CPUS, u64::from(nodes) * USABLE_MIB * 9 / 10);
    let mut machines = Vec::new();
    while free_cpus > 0 && free_mib >= 150 {
        let cpus = (1 + below(u64::from(NODE_CPUS)) as u32).min(free_cpus);
        let mib = (150 + 50 * below(9)).min(free_mib);
        free_cpus -= cpus;
        free_mib -= mib;
        machines.push(Machine { cpus, mib });
    }
    machines
}

/// The nodes that the plan gives each machine, if all start on no node in particular.
fn planned_nodes(nodes: u32, machines: &[Machine]) -> Vec<IdSet> {
    let everywhere = |total: f64| (0..nodes).map(|node| (node, total / f64::from(nodes))).collect::<BTreeMap<_, _>>();
    let problem = at_default_prices(PlacementProblem {
        nodes: (0..nodes)
            .map(|id| NodeCapacity {
                id,
                vcpus: f64::from(NODE_CPUS),
                pages: (USABLE_MIB << 8) as f64,
                hugetlb_pages: 0.0,
            })
            .collect(),
        vms: machines
            .iter()
            .map(|machine| PlannedVm {
                parts: vec![PlannedPart {
                    vcpus: f64::from(machine.cpus),
                    cpu_shares: everywhere(1.0),
                    pages: everywhere((machine.mib << 8) as f64),
                    hotness: 1.0,
                    ..PlannedPart::default()
                }],
                ..PlannedVm::default()
            })
            .collect(),
        ..PlacementProblem::default()
    });
    let started = Instant::now();
    let plan = plan::plan(&problem, &mut || started.elapsed() >= Duration::from_secs(5));
    let chosen = |pattern: &Pattern| match pattern {
        Pattern::Leave => (0..nodes).collect(),
        Pattern::Nodes(nodes) | Pattern::Spread(nodes) => nodes.iter().copied().collect(),
    };
    plan.moves.iter().map(|planned| chosen(&planned.pattern)).collect()
}

fn ask_numad(nodes: u32, machines: &[Machine]) -> Result<Vec<IdSet>> {
    let directory = GuestAssets::default_directory();
    GuestAssets::find(&directory)?;
    let kernel = GuestAssets::find_recent_kernel(&directory)?;
    let lab = std::env::current_exe()?.with_file_name("pagefold-lab");
    let folder = tempfile::tempdir()?;
    let lines: Vec<String> = machines
        .iter()
        .enumerate()
        .map(|(number, machine)| format!("m{number} {} {}\n", machine.cpus, machine.mib))
        .collect();
    let mut options: Vec<String> =
        ["-smp", &(nodes * NODE_CPUS).to_string(), "-cpu", "max", "-m"].map(str::to_owned).to_vec();
    options.push(format!("{}M", u64::from(nodes) * NODE_MIB));
    for node in 0..nodes {
        let (first, last) = (node * NODE_CPUS, (node + 1) * NODE_CPUS - 1);
        options.extend(["-object".to_owned(), format!("memory-backend-ram,id=m{node},size={NODE_MIB}M")]);
        options.extend(["-numa".to_owned(), format!("node,nodeid={node},cpus={first}-{last},memdev=m{node}")]);
    }
    let options: Vec<&str> = options.iter().map(String::as_str).collect();
    let machine = EmulatedMachine {
        kernel: &kernel,
        init: &Path::new(env!("CARGO_MANIFEST_DIR")).join("../labs/guest/init-numad"),
        programs: &[(&lab, "pagefold-lab"), (Path::new(NUMAD), "usr/bin/numad")],
        files: &[("machines", &lines.concat())],
        options: &options,
        kernel_arguments: "numa_balancing=disable",
    };
    let output = machine.run(folder.path(), Duration::from_secs(900), &mut || Ok(()))?;
    let advice: Vec<IdSet> = output
        .lines()
        .filter_map(|line| line.strip_prefix("ADVICE m")?.split_once(' ')?.1.trim().parse().ok())
        .collect();
    let is_whole = advice.len() == machines.len() && output.lines().any(|line| line == "ENDED");
    is_whole.then_some(advice).with_context(|| format!("numad gave no advice: {output}"))
}
