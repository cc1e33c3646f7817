//! The facts behind `pagefold doctor`, gathered through the port.
//!
//! [`facts`] reads what the rules of [`crate::decide`] judge by. What cannot be read is passed on as absent
//! with its reason; a process that cannot be opened stays among the facts without a single value, so that no rule takes
//! what it did not see for healthy. The same holds for processes that cannot even be listed: KSM with no `ksmd` in
//! sight means a PID namespace or `hidepid`, and stands for one more process that is denied.
//!
//! Most of the time goes into `/proc/PID/smaps`, for which the kernel walks the page tables of the process (fs/proc/
//! task_mmu.c): about 23 million pages a second and CPU. Processes are read in parallel, and each once.
//!
//! Limits: the facts are not of one instant.

use crate::decide::{HostFacts, Ksmd, ProcessFacts};
use pagefold_base::domain::Domains;
use pagefold_base::exclusion::Exclusions;
use pagefold_base::ksm::Ksm;
use pagefold_base::memory::Memory;
use pagefold_base::process::Process;
use pagefold_base::process::USER_HZ;
use pagefold_base::region::Region;
use pagefold_base::tuner::Tuner;
use pagefold_base::{Absent, Pid, ProcessId, Reading};
use pagefold_host::{Host, Process as Handle, observe, parse};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Who trusts whom, and who is left alone.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    /// How processes are sorted into trust domains.
    pub domains: Domains,
    /// Who should not be enrolled.
    pub exclusions: Exclusions,
}

/// All facts of a host, and of every process that is listed or named in `wanted`. One of `wanted` that is not among the
/// processes afterwards does not exist.
pub fn facts(host: &dyn Host, wanted: &[Pid], trust: &Trust) -> HostFacts {
    let ksm = observe::ksm(host);
    let listed = host.pids();
    let mut pids: Vec<Pid> = listed.iter().flatten().chain(wanted).copied().collect();
    pids.sort();
    pids.dedup();
    let mut seen: Vec<Seen> = pids.into_par_iter().filter_map(|pid| see(host, pid, trust)).collect();
    inherit(&mut seen);

    let ksmd = ksmd(host, &seen);
    let mut processes: Vec<ProcessFacts> = seen.into_iter().map(|seen| seen.facts).collect();
    let hidden = match (&listed, &ksmd, &ksm) {
        // That would read as processes which ended, and these do not matter.
        (Err(Absent::Vanished), _, _) => Some(Absent::Malformed("the list of processes vanished".to_owned())),
        (Err(why), _, _) => Some(why.clone()),
        (Ok(_), _, Err(Absent::NotOnThisKernel)) | (Ok(_), Ok(_), _) => None,
        (Ok(_), Err(Absent::NotOnThisKernel), _) => Some(Absent::Denied),
        (Ok(_), Err(why), _) => Some(why.clone()),
    };
    processes.extend(hidden.clone().map(|why| unseen(Pid(0), &why, trust)));
    HostFacts {
        page_size: host.page_size(),
        kernel: observe::kernel(host),
        memory: observe::memory(host).unwrap_or_else(|why| no_memory(&why)),
        pressure: observe::pressure(host),
        vmstat: observe::vmstat(host),
        thp_enabled: observe::huge_page_mode(host),
        nodes: nodes(host),
        ksmd: match (ksmd, hidden) {
            (Err(_), Some(why)) => Err(why),
            (ksmd, _) => ksmd,
        },
        tuners: tuners(host, &processes),
        rewritten: rewritten(ksm.as_ref().ok(), observe::ksm(host).as_ref().ok()),
        processes,
        ksm,
    }
}

/// A process with what only the gathering needs to know of it.
struct Seen {
    facts: ProcessFacts,
    parent: Pid,
}

/// A process; `None` if there is none of that number.
fn see(host: &dyn Host, pid: Pid, trust: &Trust) -> Option<Seen> {
    let look = |handle: &dyn Handle| -> Reading<Seen> {
        let process = observe::process(host, handle)?;
        let parent = parse::stat(&handle.read("stat")?)?.ppid;
        // Kernel threads and the dead have no memory of their own: their smaps would be empty.
        let regions =
            if process.kernel_thread || process.is_zombie() { Ok(Vec::new()) } else { observe::regions(handle) };
        let facts = process_facts(process, regions, Err(Absent::Vanished), trust);
        Ok(Seen { facts, parent })
    };
    let handle = match host.open(pid) {
        Ok(handle) => handle,
        Err(Absent::Vanished | Absent::NotOnThisKernel) => return None,
        Err(why) => return Some(Seen { facts: unseen(pid, &why, trust), parent: Pid(0) }),
    };
    match look(&*handle) {
        Err(Absent::Vanished) => None,
        Err(why) => Some(Seen { facts: unseen(pid, &why, trust), parent: Pid(0) }),
        // It ended while it was looked at: what was read of it so far is of no use.
        Ok(seen) if seen.facts.regions == Err(Absent::Vanished) => None,
        Ok(seen) => Some(seen),
    }
}

/// A process of which nothing can be told but that it may be there.
fn unseen(pid: Pid, why: &Absent, trust: &Trust) -> ProcessFacts {
    let process = Process::absent(ProcessId { pid, start_time: 0 }, why);
    process_facts(process, Err(why.clone()), Err(why.clone()), trust)
}

fn process_facts(
    process: Process,
    regions: Reading<Vec<Region>>,
    parent_merge_any: Reading<bool>,
    trust: &Trust,
) -> ProcessFacts {
    let (domain, excluded) = (trust.domains.domain(&process), trust.exclusions.reason(&process));
    ProcessFacts { process, regions, domain, excluded, parent_merge_any }
}

/// Tell each process the flag of its parent. One that has no parent, or whose parent ended meanwhile, keeps `Vanished`.
fn inherit(seen: &mut [Seen]) {
    let flags: BTreeMap<Pid, Reading<bool>> =
        seen.iter().map(|seen| (seen.facts.process.id.pid, seen.facts.process.ksm.merge_any.clone())).collect();
    for seen in seen {
        if let Some(flag) = flags.get(&seen.parent) {
            seen.facts.parent_merge_any.clone_from(flag);
        }
    }
}

/// What ksmd has cost. `NotOnThisKernel` if it is not among the processes.
fn ksmd(host: &dyn Host, seen: &[Seen]) -> Reading<Ksmd> {
    let thread = seen
        .iter()
        .map(|seen| &seen.facts.process)
        .find(|process| process.kernel_thread && process.comm == "ksmd")
        .ok_or(Absent::NotOnThisKernel)?;
    let stat = parse::stat(&host.open(thread.id.pid)?.read("stat")?)?;
    let uptime = host.read("proc/uptime")?;
    let text = String::from_utf8_lossy(&uptime);
    let uptime_seconds = text
        .split_whitespace()
        .next()
        .and_then(|seconds| seconds.parse().ok())
        .filter(|seconds: &f64| seconds.is_finite() && *seconds > 0.0)
        .ok_or_else(|| Absent::Malformed(format!("uptime: {:?}", text.trim())))?;
    Ok(Ksmd { cpu_seconds: stat.utime.saturating_add(stat.stime) as f64 / USER_HZ, uptime_seconds })
}

/// The tuners among the processes. That there are none is known only if every command line could be read.
fn tuners(host: &dyn Host, processes: &[ProcessFacts]) -> Reading<Vec<Tuner>> {
    let mut found = Vec::new();
    let mut unread = None;
    for process in processes.iter().map(|facts| &facts.process).filter(|process| !process.kernel_thread) {
        found.extend(observe::tuner(host, process));
        if let Err(why) = &process.arguments {
            unread = unread.max(Some(why.clone()).filter(|why| *why != Absent::Vanished));
        }
    }
    match unread {
        Some(why) if found.is_empty() => Err(why),
        _ => Ok(found),
    }
}

/// The settings that differ between two looks at KSM. Looking twice costs nothing, since the processes are read
/// between.
fn rewritten(before: Option<&Ksm>, after: Option<&Ksm>) -> Vec<String> {
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

/// NUMA nodes with memory; a kernel built without NUMA has one.
fn nodes(host: &dyn Host) -> Reading<u32> {
    match host.read("sys/devices/system/node/has_memory") {
        Err(Absent::NotOnThisKernel) => Ok(1),
        list => Ok(parse::number_list(&list?)?.len() as u32),
    }
}

fn no_memory(why: &Absent) -> Memory {
    Memory {
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
