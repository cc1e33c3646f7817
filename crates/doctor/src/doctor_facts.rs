//! Gathers the facts behind `pagefold doctor`.
//!
//! [`gather_host_facts`] reads what the rules of [`crate::decide`] need. Readings that fail are passed on as absent,
//! with the reason. A process that cannot be opened stays among the facts without a single value, so that no rule
//! reports it as healthy. The same holds for processes that cannot even be listed: KSM without a visible `ksmd` means a
//! PID namespace or `hidepid`, and adds one process whose readings are all denied.
//!
//! Most of the time goes into `/proc/PID/smaps`, for which the kernel walks the page tables of the process
//! (fs/proc/task_mmu.c): about 23 million pages per second and CPU. Processes are read in parallel, each once.
//!
//! Limits: the facts are not from one instant.

use crate::decide::{HostFacts, KsmdCpuTime, ProcessFacts};
use crate::setting_facts::gather_setting_facts;
use pagefold_base::domain::DomainConfig;
use pagefold_base::exclusion::Exclusions;
use pagefold_base::ksm::Ksm;
use pagefold_base::memory::MemInfo;
use pagefold_base::process::Process;
use pagefold_base::process::USER_HZ;
use pagefold_base::region::Region;
use pagefold_base::tuner::Tuner;
use pagefold_base::{Absent, Pid, ProcessId, Reading};
use pagefold_host::{Host, ProcessHandle as Handle, observe, parse};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Trust domains and excluded processes.
#[derive(Clone, Debug, Default)]
pub struct TrustPolicy {
    /// How processes are sorted into trust domains.
    pub domains: DomainConfig,
    /// Processes that should not be enrolled.
    pub exclusions: Exclusions,
}

/// All facts of a host, and of every process that is listed or in `required_pids`. A required pid that is missing from
/// the result does not exist.
pub fn gather_host_facts(host: &dyn Host, required_pids: &[Pid], trust: &TrustPolicy) -> HostFacts {
    let ksm = observe::ksm(host);
    let listed = host.pids();
    let mut pids: Vec<Pid> = listed.iter().flatten().chain(required_pids).copied().collect();
    pids.sort();
    pids.dedup();
    let mut examined: Vec<ExaminedProcess> =
        pids.into_par_iter().filter_map(|pid| examine_process(host, pid, trust)).collect();
    set_parent_merge_any(&mut examined);

    let ksmd = read_ksmd_cpu_time(host, &examined);
    let mut processes: Vec<ProcessFacts> = examined.into_iter().map(|process| process.facts).collect();
    let hidden = match (&listed, &ksmd, &ksm) {
        // Otherwise the rules would treat the processes as exited, and ignore them.
        (Err(Absent::Vanished), _, _) => Some(Absent::Malformed("the list of processes vanished".to_owned())),
        (Err(why), _, _) => Some(why.clone()),
        (Ok(_), _, Err(Absent::NotOnThisKernel)) | (Ok(_), Ok(_), _) => None,
        (Ok(_), Err(Absent::NotOnThisKernel), _) => Some(Absent::Denied),
        (Ok(_), Err(why), _) => Some(why.clone()),
    };
    processes.extend(hidden.clone().map(|why| unreadable_process_facts(Pid(0), &why, trust)));
    HostFacts {
        page_size: host.page_size(),
        kernel: observe::kernel_release(host),
        memory: observe::memory(host).unwrap_or_else(|why| absent_memory(&why)),
        pressure: observe::pressure(host),
        vmstat: observe::vmstat(host),
        thp_enabled: observe::thp_mode(host),
        nodes: count_numa_nodes(host),
        ksmd: match (ksmd, hidden) {
            (Err(_), Some(why)) => Err(why),
            (ksmd, _) => ksmd,
        },
        tuners: find_tuners(host, &processes),
        rewritten_settings: changed_settings(ksm.as_ref().ok(), observe::ksm(host).as_ref().ok()),
        settings: gather_setting_facts(host, &processes),
        processes,
        ksm,
    }
}

/// A process with data that only the gathering needs.
struct ExaminedProcess {
    facts: ProcessFacts,
    parent: Pid,
}

/// Examine a process; `None` if the pid does not exist.
fn examine_process(host: &dyn Host, pid: Pid, trust: &TrustPolicy) -> Option<ExaminedProcess> {
    let read_facts = |handle: &dyn Handle| -> Reading<ExaminedProcess> {
        let process = observe::process(host, handle)?;
        let parent = parse::stat(&handle.read("stat")?)?.ppid;
        // Kernel threads and zombies have no memory of their own: their smaps would be empty.
        let regions =
            if process.kernel_thread || process.is_zombie() { Ok(Vec::new()) } else { observe::regions(handle) };
        let facts = build_process_facts(process, regions, Err(Absent::Vanished), trust);
        Ok(ExaminedProcess { facts, parent })
    };
    let handle = match host.open(pid) {
        Ok(handle) => handle,
        Err(Absent::Vanished | Absent::NotOnThisKernel) => return None,
        Err(why) => return Some(ExaminedProcess { facts: unreadable_process_facts(pid, &why, trust), parent: Pid(0) }),
    };
    match read_facts(&*handle) {
        Err(Absent::Vanished) => None,
        Err(why) => Some(ExaminedProcess { facts: unreadable_process_facts(pid, &why, trust), parent: Pid(0) }),
        // It exited meanwhile: readings taken before that are of no use.
        Ok(examined) if examined.facts.regions == Err(Absent::Vanished) => None,
        Ok(examined) => Some(examined),
    }
}

/// Facts of a process that may exist, without any reading.
fn unreadable_process_facts(pid: Pid, why: &Absent, trust: &TrustPolicy) -> ProcessFacts {
    let process = Process::absent(ProcessId { pid, start_time: 0 }, why);
    build_process_facts(process, Err(why.clone()), Err(why.clone()), trust)
}

fn build_process_facts(
    process: Process,
    regions: Reading<Vec<Region>>,
    parent_merge_any: Reading<bool>,
    trust: &TrustPolicy,
) -> ProcessFacts {
    let (domain, exclusion_reason) = (trust.domains.domain(&process), trust.exclusions.reason(&process));
    ProcessFacts { process, regions, domain, exclusion_reason, parent_merge_any }
}

/// Set the merge flag of each process's parent. Without a parent, or if it exited meanwhile, the value stays
/// `Vanished`.
fn set_parent_merge_any(examined: &mut [ExaminedProcess]) {
    let flags: BTreeMap<Pid, Reading<bool>> = examined
        .iter()
        .map(|process| (process.facts.process.id.pid, process.facts.process.ksm.merge_any.clone()))
        .collect();
    for process in examined {
        if let Some(flag) = flags.get(&process.parent) {
            process.facts.parent_merge_any.clone_from(flag);
        }
    }
}

/// CPU time of ksmd. `NotOnThisKernel` if it is not among the processes.
fn read_ksmd_cpu_time(host: &dyn Host, examined: &[ExaminedProcess]) -> Reading<KsmdCpuTime> {
    let thread = examined
        .iter()
        .map(|examined| &examined.facts.process)
        .find(|process| process.kernel_thread && process.comm == "ksmd")
        .ok_or(Absent::NotOnThisKernel)?;
    let stat = parse::stat(&host.open(thread.id.pid)?.read("stat")?)?;
    let uptime_seconds = read_uptime(host)?;
    Ok(KsmdCpuTime { cpu_seconds: stat.utime.saturating_add(stat.stime) as f64 / USER_HZ, uptime_seconds })
}

/// Seconds since the host booted.
///
/// # Errors
/// `Malformed` if it is no positive number.
pub fn read_uptime(host: &dyn Host) -> Reading<f64> {
    let uptime = host.read("proc/uptime")?;
    let text = String::from_utf8_lossy(&uptime);
    let seconds = text.split_whitespace().next().and_then(|seconds| seconds.parse().ok());
    seconds
        .filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0)
        .ok_or_else(|| Absent::Malformed(format!("uptime: {:?}", text.trim())))
}

/// The tuners among the processes. An empty result is certain only if every command line could be read.
fn find_tuners(host: &dyn Host, processes: &[ProcessFacts]) -> Reading<Vec<Tuner>> {
    let mut found = Vec::new();
    let mut unreadable = None;
    for process in processes.iter().map(|facts| &facts.process).filter(|process| !process.kernel_thread) {
        found.extend(observe::identify_tuner(host, process));
        if let Err(why) = &process.arguments {
            unreadable = unreadable.max(Some(why.clone()).filter(|why| *why != Absent::Vanished));
        }
    }
    match unreadable {
        Some(why) if found.is_empty() => Err(why),
        _ => Ok(found),
    }
}

/// The settings that differ between two readings of KSM. The second reading takes no extra time, since processes are
/// read in between.
fn changed_settings(before: Option<&Ksm>, after: Option<&Ksm>) -> Vec<String> {
    let (Some(before), Some(after)) = (before, after) else { return Vec::new() };
    let advised = [before, after].iter().any(|ksm| ksm.advisor_mode.as_deref() == Ok("scan-time"));
    let rate = (!advised).then_some(("pages_to_scan", &before.pages_to_scan, &after.pages_to_scan));
    [("run", &before.run, &after.run), ("sleep_millisecs", &before.sleep_millisecs, &after.sleep_millisecs)]
        .into_iter()
        .chain(rate)
        .filter_map(|setting| match setting {
            (name, Ok(before), Ok(after)) if before != after => Some(format!("{name}: {before}, then {after}")),
            _ => None,
        })
        .collect()
}

/// Number of NUMA nodes with memory; 1 for a kernel built without NUMA.
fn count_numa_nodes(host: &dyn Host) -> Reading<u32> {
    match host.read("sys/devices/system/node/has_memory") {
        Err(Absent::NotOnThisKernel) => Ok(1),
        list => Ok(parse::number_list(&list?)?.len() as u32),
    }
}

fn absent_memory(why: &Absent) -> MemInfo {
    MemInfo {
        total: Err(why.clone()),
        free: Err(why.clone()),
        available: Err(why.clone()),
        anon: Err(why.clone()),
        anon_huge: Err(why.clone()),
        swap_total: Err(why.clone()),
        swap_free: Err(why.clone()),
        hugetlb: Err(why.clone()),
    }
}
