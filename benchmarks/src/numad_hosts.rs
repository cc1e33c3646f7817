//! Placement by the real numad against Pagefold's plan, on the generated hosts at their real size.
//!
//! The program numad runs in a mount namespace in which files describe the generated host: its nodes with distances and
//! free memory, its CPUs, and counters of idle time that advance as those of CPUs with this load do. Machines start one
//! after the other, each on the nodes that `numad -w` advises then, as libvirt asks it with `placement='auto'`. The plan
//! is for the same machines at once, spread over all nodes. Both are judged by the plan's count of remote
//! pages and reads.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable};
use crate::numa_plan::RemoteComparison;
use anyhow::{Context, Result, bail, ensure};
use pagefold_base::IdSet;
use pagefold_numa::decide::plan::baselines::{self, Baseline};
use pagefold_numa::decide::plan::generated::{PUBLISHED_SIZES, at_default_prices, generated_hosts, published_host};
use pagefold_numa::decide::plan::numad::{StartedPlacement, StartingMachines};
use pagefold_numa::decide::plan::{self, Load, PlacementProblem};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const NUMAD: &str = "/usr/bin/numad";

/// The numbers of machines of the hosts.
const MACHINE_COUNTS: std::ops::RangeInclusive<usize> = 5..=60;

/// Generated hosts that are compared, beside those of published sizes.
const GENERATED_HOSTS: usize = 50;

/// The search of a plan ends after this time.
const PLAN_DEADLINE: Duration = Duration::from_secs(5);

/// Idle time is counted in ticks (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// Idle time passes faster by this factor: numad measures it with an error of a tick or two in two hundred, and would
/// miss a part of a CPU that is free.
const IDLE_TIME_FACTOR: f64 = 1.02;

/// How often the counters of idle time are written. numad reads them twice, two seconds apart.
const TICK_INTERVAL: Duration = Duration::from_millis(20);

/// An answer takes two seconds on an idle machine.
const ANSWER_TIME_LIMIT: Duration = Duration::from_secs(120);

/// Advice counts as that of the heuristic if it is worth as much, but for errors of the measured idle time.
const WORTH_TOLERANCE: f64 = 0.03;

/// Mounts the files of the host over those of this one, and starts numad (`$0`) with a request (`$1`). numad also writes a log and looks for a running numad.
const ASK_SCRIPT: &str = "mount --bind node /sys/devices/system/node && mount --bind cpu /sys/devices/system/cpu && \
                   mount --bind stat /proc/stat && mount -t tmpfs none /var/log && mount -t tmpfs none /run && \
                   exec \"$0\" -w \"$1\"";

/// The result of starting all machines of a host on the nodes that numad advises.
struct StartedHost {
    by_numad: StartedPlacement,
    /// Advice that is the heuristic's, or worth as much.
    equal_advice: usize,
}

/// Placements beside numad's advice, which has the place of numad's heuristic.
const SIMPLE_PLACEMENTS: [Baseline; 3] = [Baseline::FirstFit, Baseline::Interleave, Baseline::Nothing];

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    ensure!(Path::new(NUMAD).exists(), "{NUMAD} is missing: apt-get install numad");
    let generated =
        generated_hosts().filter(|problem| MACHINE_COUNTS.contains(&problem.vms.len())).take(GENERATED_HOSTS);
    let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| published_host(count, vcpus));
    let hosts: Vec<PlacementProblem> = published.chain(generated).map(at_default_prices).map(spread_evenly).collect();
    let hosts = &hosts[..if effort.quick { 1 } else { hosts.len() }];
    let started = start_on_all(hosts)?;
    let mut findings = Findings::new(
        "host,nodes,machines,equal_advice,numad_excess_vcpus,numad_remote_reads,plan_remote_reads,\
             numad_remote_pages,plan_remote_pages",
    );
    let (mut reads, mut pages) = (RemoteComparison::default(), RemoteComparison::default());
    let mut simple = [(0.0, 0.0); SIMPLE_PLACEMENTS.len()];
    let (mut equal, mut all) = (0, 0);
    for (number, (problem, started)) in hosts.iter().zip(&started).enumerate() {
        let planning = Instant::now();
        let plan = plan::plan(problem, &mut || planning.elapsed() >= PLAN_DEADLINE);
        let StartedPlacement { remote_reads, remote_pages, overload } = started.by_numad;
        reads.add(plan.remote_reads.1, remote_reads);
        pages.add(plan.remote_pages, remote_pages);
        for (sum, baseline) in simple.iter_mut().zip(SIMPLE_PLACEMENTS) {
            let placed = baselines::place(problem, baseline);
            *sum = (sum.0 + placed.remote_pages, sum.1 + placed.remote_reads);
        }
        equal += started.equal_advice;
        all += problem.vms.len();
        findings.samples.push(format!(
            "{number},{},{},{},{:.1},{remote_reads:.0},{:.0},{remote_pages:.0},{:.0}",
            problem.nodes.len(),
            problem.vms.len(),
            started.equal_advice,
            overload.vcpus,
            plan.remote_reads.1,
            plan.remote_pages
        ));
    }
    let mut table = MarkdownTable::new(
        format!("Remote memory and reads of all machines on {} hosts", hosts.len()),
        &["placement", "remote memory, GiB", "remote reads, GiB of the hottest machine"],
    );
    let gibibytes = |pages: f64| format!("{:.1}", pages / f64::from(1 << 18));
    let simple = SIMPLE_PLACEMENTS.iter().zip(simple).map(|(placed, (pages, reads))| (placed.name(), pages, reads));
    let compared =
        [("plan", pages.by_plan, reads.by_plan), ("the real numad's advice", pages.by_numad, reads.by_numad)];
    for (name, pages, reads) in compared.into_iter().chain(simple) {
        table.rows.push(vec![name.to_owned(), gibibytes(pages), gibibytes(reads)]);
    }
    findings.tables.push(table);
    findings.checks.extend(pages.checks("remote pages", "numad's advice"));
    findings.checks.extend(reads.checks("remote reads", "numad's advice"));
    findings.unjudged.push(format!("numad's heuristic in Pagefold agrees with numad on {equal} of {all} machines"));
    Ok(findings)
}

/// The host with its machines spread evenly over all nodes, as machines are that are bound to no node.
fn spread_evenly(mut problem: PlacementProblem) -> PlacementProblem {
    let ids: Vec<u32> = problem.nodes.iter().map(|node| node.id).collect();
    let spread =
        |total: f64| -> BTreeMap<u32, f64> { ids.iter().map(|&node| (node, total / ids.len() as f64)).collect() };
    for part in problem.vms.iter_mut().flat_map(|vm| &mut vm.parts) {
        part.pages = spread(part.total_pages());
        part.cpu_shares = spread(1.0);
    }
    problem
}

/// Starts the machines of all hosts, which wait for numad at the same time.
fn start_on_all(hosts: &[PlacementProblem]) -> Result<Vec<StartedHost>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = hosts.iter().map(|problem| scope.spawn(|| start_on(problem))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn start_on(problem: &PlacementProblem) -> Result<StartedHost> {
    let mut machines = StartingMachines::new(problem);
    let mut equal_advice = 0;
    while let Some(request) = machines.next_request() {
        let advised = ask_numad(problem, &machines.free(), request)?;
        equal_advice += usize::from(is_equal_advice(&machines, &advised));
        machines.start(&advised);
    }
    Ok(StartedHost { by_numad: machines.result(), equal_advice })
}

/// Whether advice for the next machine is that of the heuristic, or worth as much: nodes may be equal.
fn is_equal_advice(machines: &StartingMachines<'_>, advised: &[usize]) -> bool {
    let expected = machines.advice();
    let (worth, expected_worth) = (machines.worth(advised), machines.worth(&expected));
    let is_close = (worth - expected_worth).abs() <= WORTH_TOLERANCE * expected_worth;
    advised == expected || advised.len() == expected.len() && is_close
}

/// The positions of the nodes that numad advises for a machine on a host with so much free.
fn ask_numad(problem: &PlacementProblem, free: &[Load], request: Load) -> Result<Vec<usize>> {
    // numad takes nodes in the order of the directory, which has to be that of their numbers: tmpfs has such an order.
    let folder = tempfile::tempdir_in("/dev/shm")?;
    let idle_shares = write_host(problem, free, folder.path())?;
    let stat = File::create(folder.path().join("stat"))?;
    let started = Instant::now();
    write_idle_ticks(&stat, &idle_shares, Duration::ZERO)?;
    let mebibytes = request.pages / 256.0;
    let mut numad = Command::new("unshare")
        .args(["--mount", "sh", "-c", ASK_SCRIPT, NUMAD, &format!("{:.0}:{mebibytes:.0}", request.vcpus)])
        .current_dir(folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start unshare")?;
    while numad.try_wait()?.is_none() {
        if started.elapsed() > ANSWER_TIME_LIMIT {
            numad.kill()?;
            numad.wait()?;
            bail!("numad does not answer");
        }
        std::thread::sleep(TICK_INTERVAL);
        write_idle_ticks(&stat, &idle_shares, started.elapsed())?;
    }
    let output = numad.wait_with_output()?;
    let answer = String::from_utf8_lossy(&output.stdout);
    let nodes: IdSet = answer.trim().parse().ok().with_context(|| format!("numad answers {answer:?}"))?;
    ensure!(!nodes.is_empty(), "numad gives no advice");
    let position = |id: u32| problem.nodes.iter().position(|node| node.id == id);
    nodes.iter().map(|id| position(id).with_context(|| format!("numad advises node {id}"))).collect()
}

/// Writes the files that do not change. Returns the share of time in which each CPU is idle.
fn write_host(problem: &PlacementProblem, free: &[Load], folder: &Path) -> Result<Vec<f64>> {
    let kib = |pages: f64| (pages * 4.0) as u64;
    let mut idle_shares = Vec::new();
    create_node_directories(problem, &folder.join("node"))?;
    for (node, free) in problem.nodes.iter().zip(free) {
        let directory = folder.join(format!("node/node{}", node.id));
        let first = idle_shares.len();
        idle_shares.extend(std::iter::repeat_n(free.vcpus / node.vcpus, node.vcpus as usize));
        fs::write(directory.join("cpulist"), format!("{first}-{}\n", idle_shares.len() - 1))?;
        let distances = problem.nodes.iter().map(|to| {
            let extra = problem.extra_distance(node.id, to.id);
            format!("{:.0}", 10.0 * (1.0 + extra))
        });
        fs::write(directory.join("distance"), format!("{}\n", distances.collect::<Vec<_>>().join(" ")))?;
        let memory = format!(
            "Node {0} MemTotal: {1} kB\nNode {0} MemFree: {2} kB\nNode {0} Inactive(file): 0 kB\n",
            node.id,
            kib(node.pages),
            kib(free.pages)
        );
        fs::write(directory.join("meminfo"), memory)?;
    }
    for cpu in 0..idle_shares.len() {
        fs::create_dir_all(folder.join(format!("cpu/cpu{cpu}")))?;
    }
    fs::create_dir(folder.join("cpu/cpu0/topology"))?;
    fs::write(folder.join("cpu/cpu0/topology/thread_siblings"), "1\n")?;
    Ok(idle_shares)
}

/// Creates the directories of the nodes so that they are listed in the order of their numbers: numad takes the distances
/// of a node for those to the nodes as listed.
fn create_node_directories(problem: &PlacementProblem, folder: &Path) -> Result<()> {
    let names: Vec<String> = problem.nodes.iter().map(|node| format!("node{}", node.id)).collect();
    let list = || -> Result<Vec<String>> {
        fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    let ascending: Vec<&String> = names.iter().collect();
    let descending: Vec<&String> = names.iter().rev().collect();
    // A tmpfs lists the newest first, or the oldest.
    for order in [descending, ascending] {
        fs::create_dir(folder)?;
        order.iter().try_for_each(|name| fs::create_dir(folder.join(name)))?;
        if list()? == names {
            return Ok(());
        }
        fs::remove_dir_all(folder)?;
    }
    bail!("the directory {} has no order in which numad can read nodes", folder.display())
}

/// Writes idle time as of `/proc/stat`, always as many bytes, so that a reader sees whole lines.
fn write_idle_ticks(stat: &File, idle_shares: &[f64], elapsed: Duration) -> Result<()> {
    let mut text = "cpu  0 0 0 0 0 0 0 0 0 0\n".to_owned();
    for (cpu, share) in idle_shares.iter().enumerate() {
        let ticks = (share * elapsed.as_secs_f64() * TICKS_PER_SECOND * IDLE_TIME_FACTOR) as u64;
        writeln!(text, "cpu{cpu} 0 0 0 {ticks:010} 0 0 0 0 0 0")?;
    }
    // More than the reader's buffer, or it would not read the file again.
    let line = format!("intr {}\n", "0 ".repeat(100));
    text.push_str(&line.repeat(1 + 8192 / line.len()));
    stat.write_all_at(text.as_bytes(), 0)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heuristic_of_numad_agrees_with_the_real_one() {
        if !rustix::process::geteuid().is_root() || !Path::new(NUMAD).exists() {
            println!("skipped: needs root and numad (labs/setup.sh)");
            return;
        }
        let published = PUBLISHED_SIZES.iter().map(|&(count, vcpus)| published_host(count, vcpus));
        // Each answer takes two seconds.
        let is_small = |problem: &PlacementProblem| problem.vms.len() <= 12;
        let hosts: Vec<PlacementProblem> =
            published.chain(generated_hosts()).filter(is_small).map(spread_evenly).collect();
        assert!(hosts.iter().any(|problem| problem.nodes.len() > 4), "hosts with many nodes");
        let disagreements: Vec<String> = std::thread::scope(|scope| {
            let threads: Vec<_> = hosts.iter().map(|problem| scope.spawn(|| find_disagreements(problem))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(disagreements, Vec::<String>::new());
    }

    /// The machines of a host for which numad's answers all differ from the heuristic. On a loaded machine the idle time
    /// that it measures may be wrong, so it is asked again.
    fn find_disagreements(problem: &PlacementProblem) -> Vec<String> {
        let mut machines = StartingMachines::new(problem);
        let mut disagreements = Vec::new();
        while let Some(request) = machines.next_request() {
            let expected = machines.advice();
            let answers = || (0..5).map(|_| ask_numad(problem, &machines.free(), request).unwrap());
            if !answers().any(|advised| is_equal_advice(&machines, &advised)) {
                let answers: Vec<Vec<usize>> = answers().collect();
                disagreements.push(format!("{request:?}: {answers:?}, not {expected:?}, of {:?}", machines.free()));
            }
            machines.start(&expected);
        }
        disagreements
    }
}
