//! The files of a host outside of `/proc/PID`, as the kernel prints them.

use super::process_text;
use crate::decide::frame_numbers::BLOCK_BYTES;
use crate::decide::host_state::{BOOT_TICKS, HostProcess, HostState, KSMD_PID, NS_PER_TICK, PAGE_BYTES};
use crate::decide::ksmd::RunState;
use crate::decide::memory::PAGES_IN_HUGE_PAGE;
use pagefold_base::{Absent, IdSet, Pid, Reading};
use std::collections::BTreeSet;
use std::fmt::Write;

const KSM_DIRECTORY: &str = "sys/kernel/mm/ksm";
const NODE_DIRECTORY: &str = "sys/devices/system/node";
const CGROUP_DIRECTORY: &str = "sys/fs/cgroup";

/// `min_free_kbytes`: 64 MiB, the kernel's limit on hosts with much memory (mm/page_alloc.c,
/// `calculate_min_free_kbytes`).
const MIN_FREE_KIB: u64 = 67_584;

/// Numbers from 0 on: `0-3`, or `0` for one.
pub(super) fn number_range(count: u64) -> String {
    if count > 1 { format!("0-{}", count - 1) } else { "0".to_owned() }
}

/// A file, and the number of page table entries that the kernel walks for it.
pub(super) fn read(host: &HostState<'_>, path: &str) -> Reading<(Vec<u8>, u64)> {
    if let Some((pid, file)) = process_path(path) {
        return process_text::read(host, pid, file).map_err(|why| match why {
            // By its path, a process that has ended is missing.
            Absent::Vanished if !exists(host, pid) => Absent::NotOnThisKernel,
            why => why,
        });
    }
    let text = if let Some(file) = path.strip_prefix(KSM_DIRECTORY).and_then(|rest| rest.strip_prefix('/')) {
        ksm_file(host, file)
    } else if let Some(file) = path.strip_prefix(NODE_DIRECTORY).and_then(|rest| rest.strip_prefix('/')) {
        node_file(host, file)
    } else if let Some(file) = path.strip_prefix(CGROUP_DIRECTORY) {
        cgroup_file(host, file)
    } else {
        other_file(host, path)
    };
    text.map(|text| (text.into_bytes(), 0)).ok_or(Absent::NotOnThisKernel)
}

/// The process and the file of a path below `proc`.
fn process_path(path: &str) -> Option<(Pid, &str)> {
    let (pid, file) = path.strip_prefix("proc/")?.split_once('/')?;
    Some((Pid(pid.parse().ok()?), file))
}

fn exists(host: &HostState<'_>, pid: Pid) -> bool {
    pid == KSMD_PID || host.processes.contains_key(&pid)
}

/// The names in a directory, sorted.
pub(super) fn list(host: &HostState<'_>, path: &str) -> Reading<Vec<String>> {
    let names: Vec<String> = match path {
        NODE_DIRECTORY => {
            let nodes = (0..host.spec.nodes).map(|node| format!("node{node}"));
            ["has_cpu", "has_memory"].map(str::to_owned).into_iter().chain(nodes).chain(["online".to_owned()]).collect()
        }
        "sys/devices/system/cpu" => {
            (0..host.spec.cpus).map(|cpu| format!("cpu{cpu}")).chain(["online".to_owned()]).collect()
        }
        _ => {
            if let Some((pid, "task")) = process_path(path) {
                if pid == KSMD_PID {
                    return Ok(vec![pid.to_string()]);
                }
                let process = host.processes.get(&pid).ok_or(Absent::Vanished)?;
                return Ok(process.threads.keys().map(Pid::to_string).collect());
            }
            let node = path.strip_prefix(NODE_DIRECTORY).and_then(|rest| rest.strip_prefix("/node")?.parse().ok());
            match node.filter(|node: &u8| *node < host.spec.nodes) {
                Some(node) => vec!["cpulist".into(), "distance".into(), "meminfo".into(), format!("memory{node}")],
                None => return Err(Absent::NotOnThisKernel),
            }
        }
    };
    let names: BTreeSet<String> = names.into_iter().collect();
    Ok(names.into_iter().collect())
}

fn ksm_file(host: &HostState<'_>, file: &str) -> Option<String> {
    let (settings, counters) = (host.model.settings(), host.model.counters());
    let version = (host.spec.kernel.major, host.spec.kernel.minor);
    let since = |minor: u32| (version >= (6, minor)).then_some(());
    let number = |number: u64| Some(format!("{number}\n"));
    let signed = |number: i64| Some(format!("{number}\n"));
    match file {
        "run" => number(match host.model.run_state() {
            RunState::Stopped => 0,
            RunState::Merging => 1,
            RunState::Unmerged => 2,
        }),
        "pages_to_scan" => number(settings.pages_to_scan),
        "sleep_millisecs" => number(settings.sleep_millisecs),
        "max_page_sharing" => number(settings.max_page_sharing as u64),
        "stable_node_chains_prune_millisecs" => number(settings.stable_node_chains_prune_millisecs),
        "use_zero_pages" => number(settings.use_zero_pages.into()),
        "merge_across_nodes" => number(settings.merge_across_nodes.into()),
        "smart_scan" => since(7).and_then(|()| number(settings.smart_scan.into())),
        "advisor_mode" => since(8).map(|()| {
            let is_on = settings.advisor.is_some();
            if is_on { "none [scan-time]\n" } else { "[none] scan-time\n" }.to_owned()
        }),
        "advisor_target_scan_time" => since(8).and_then(|()| number(host.advisor.target_scan_time)),
        "advisor_max_cpu" => since(8).and_then(|()| number(host.advisor.max_cpu)),
        "advisor_min_pages_to_scan" => since(8).and_then(|()| number(host.advisor.min_pages_to_scan)),
        "advisor_max_pages_to_scan" => since(8).and_then(|()| number(host.advisor.max_pages_to_scan)),
        "full_scans" => number(counters.full_scans),
        "pages_shared" => number(counters.pages_shared),
        "pages_sharing" => number(counters.pages_sharing),
        "pages_unshared" => number(counters.pages_unshared),
        "pages_volatile" => number(counters.pages_volatile),
        "pages_scanned" => since(6).and_then(|()| number(counters.pages_scanned)),
        "pages_skipped" => since(7).and_then(|()| number(counters.pages_skipped)),
        "ksm_zero_pages" => since(6).and_then(|()| signed(counters.ksm_zero_pages)),
        "general_profit" => since(4).and_then(|()| signed(counters.general_profit)),
        "stable_node_chains" => number(counters.stable_node_chains),
        "stable_node_dups" => number(counters.stable_node_dups),
        _ => None,
    }
}

fn node_file(host: &HostState<'_>, file: &str) -> Option<String> {
    let nodes = host.spec.nodes;
    let Some((node, file)) = file.strip_prefix("node").and_then(|rest| rest.split_once('/')) else {
        return ["has_memory", "has_cpu", "has_normal_memory", "online", "possible"]
            .contains(&file)
            .then(|| number_range(nodes.into()) + "\n");
    };
    let node: u8 = node.parse().ok().filter(|node| *node < nodes)?;
    match file {
        "cpulist" => Some(format!("{}\n", host.cpus_of_node(node).collect::<IdSet>())),
        "distance" => {
            let distances: Vec<String> = (0..nodes).map(|other| host.spec.distance(node, other).to_string()).collect();
            Some(distances.join(" ") + "\n")
        }
        "meminfo" => {
            let kib = |pages: u64| pages * (PAGE_BYTES >> 10);
            let line = |name: &str, kib: u64| format!("Node {node} {:<15}{kib:>9} kB\n", format!("{name}:"));
            let (total, free) = (kib(host.memory_pages_of_node()), kib(host.free_pages_of_node(node)));
            Some(line("MemTotal", total) + &line("MemFree", free) + &line("MemUsed", total - free))
        }
        _ => None,
    }
}

/// A cgroup has no limit of its own.
fn cgroup_file(host: &HostState<'_>, path: &str) -> Option<String> {
    let (cgroup, file) = path.rsplit_once('/')?;
    let is_root = cgroup.is_empty();
    let prefix = format!("{cgroup}/");
    let members = || {
        let is_member = |path: &str| is_root || path == cgroup || path.starts_with(&prefix);
        host.processes.iter().filter(move |(_, process)| is_member(&process.identity.cgroup))
    };
    if !is_root && members().next().is_none() {
        return None;
    }
    match file {
        "cgroup.controllers" => Some("cpuset cpu io memory pids\n".to_owned()),
        "cgroup.procs" => {
            let own = members().filter(|(_, process)| process.identity.cgroup == cgroup);
            Some(own.map(|(pid, _)| format!("{pid}\n")).collect())
        }
        "memory.max" | "memory.high" | "memory.swap.max" if !is_root => Some("max\n".to_owned()),
        "memory.current" if !is_root => {
            let pages: u64 = members().map(|(_, process)| host.memory_of(process).totals.anonymous()).sum();
            Some(format!("{}\n", pages * PAGE_BYTES))
        }
        "memory.pressure" if !is_root => Some(no_pressure()),
        "cpuset.cpus.effective" => Some(number_range(host.spec.cpus.into()) + "\n"),
        _ => None,
    }
}

fn no_pressure() -> String {
    let line = |share: &str| format!("{share} avg10=0.00 avg60=0.00 avg300=0.00 total=0\n");
    line("some") + &line("full")
}

fn other_file(host: &HostState<'_>, path: &str) -> Option<String> {
    match path {
        "proc/meminfo" => Some(meminfo(host)),
        "proc/vmstat" => Some(vmstat(host)),
        "proc/stat" => Some(stat(host)),
        "proc/uptime" => Some(process_text::uptime(host)),
        "proc/pressure/memory" | "proc/pressure/cpu" | "proc/pressure/io" => Some(no_pressure()),
        "proc/sys/kernel/osrelease" => {
            let kernel = host.spec.kernel;
            Some(format!("{}.{}.{}-simulated\n", kernel.major, kernel.minor, kernel.stable))
        }
        "proc/sys/vm/min_free_kbytes" => Some(format!("{MIN_FREE_KIB}\n")),
        "proc/sys/vm/max_map_count" => Some("65530\n".to_owned()),
        "sys/kernel/mm/transparent_hugepage/enabled" => Some("[always] madvise never\n".to_owned()),
        "sys/kernel/mm/transparent_hugepage/hpage_pmd_size" => Some(format!("{}\n", PAGES_IN_HUGE_PAGE * PAGE_BYTES)),
        "sys/devices/system/cpu/online" | "sys/devices/system/cpu/possible" => {
            Some(number_range(host.spec.cpus.into()) + "\n")
        }
        "sys/devices/system/memory/block_size_bytes" => Some(format!("{BLOCK_BYTES:x}\n")),
        _ => None,
    }
}

fn meminfo(host: &HostState<'_>) -> String {
    let kib = |pages: u64| pages * (PAGE_BYTES >> 10);
    let total = host.spec.memory_pages;
    let free = total.saturating_sub(host.used_pages());
    let totals = || host.processes.values().map(|process| host.memory_of(process).totals);
    let huge: u64 = totals().map(|totals| totals.huge).sum();
    let own: u64 = totals().map(|totals| totals.private + totals.huge).sum();
    let anonymous = own + host.model.memory().used_numbered_frames();
    let available = free.saturating_sub(MIN_FREE_KIB / (PAGE_BYTES >> 10));
    let mut text = String::new();
    for (name, pages) in [
        ("MemTotal", total),
        ("MemFree", free),
        ("MemAvailable", available),
        ("Buffers", 0),
        ("Cached", 0),
        ("SwapCached", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("AnonPages", anonymous),
        ("Mapped", 0),
        ("Shmem", 0),
        ("AnonHugePages", huge),
        ("ShmemHugePages", 0),
        ("Hugetlb", 0),
    ] {
        let _ = writeln!(text, "{:<16}{:>8} kB", format!("{name}:"), kib(pages));
    }
    text
}

fn vmstat(host: &HostState<'_>) -> String {
    let work = host.model.work();
    let free = host.spec.memory_pages.saturating_sub(host.used_pages());
    format!(
        "nr_free_pages {free}\npgscan_kswapd 0\npgscan_direct 0\nthp_split_page {}\nksm_swpin_copy 0\ncow_ksm {}\n",
        work.splits, work.cow_breaks
    )
}

/// `/proc/stat`. The CPU time of processes and of ksmd is the first CPU's, and the rest is idle.
fn stat(host: &HostState<'_>) -> String {
    let user: u64 = host.processes.values().map(HostProcess::cpu_ns).sum::<u64>() / NS_PER_TICK;
    let system = host.ksmd.cpu_ns() / NS_PER_TICK;
    let all = (BOOT_TICKS + host.now_ns / NS_PER_TICK) * u64::from(host.spec.cpus);
    let idle = all.saturating_sub(user + system);
    format!(
        "cpu  {user} 0 {system} {idle} 0 0 0 0 0 0\nctxt {}\nbtime 1767224600\nprocesses 1000\n",
        host.ksmd.sleeps()
    )
}
