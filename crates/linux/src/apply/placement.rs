//! Places threads on CPUs and memory on NUMA nodes.
//!
//! Threads and pages are named by numbers, for which the kernel offers no handles here. Whether a number still belongs
//! to the expected process is checked right before each system call. A number that is reused within this moment would
//! let another thread run elsewhere, or move some of its pages; no memory content changes.

use super::write_setting;
use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::{AddressRange, IdSet};
use pagefold_host::action::{ActionError, ActionOutcome, CpusetFile, Exchange, MissedReason, ThreadId};
use pagefold_host::{Host, ProcessHandle, hold, parse};
use pagefold_sys::{fault, numa};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;

/// Pages in one call of move_pages(2): one huge page, which the kernel moves whole. A call occupies the kernel for well
/// below a millisecond.
const PAGES_PER_CALL: usize = 512;

/// Restrict a thread to CPUs. If its cgroup does not permit all of them, nothing changes.
pub fn set_affinity(host: &LiveHost, thread: ThreadId, cpus: &Exchange<IdSet>) -> Result<ActionOutcome, ActionError> {
    let stat = hold(host, thread.process)?.read(&format!("task/{}/stat", thread.tid))?;
    if parse::stat(&stat)?.start_time != thread.start_time {
        return Err(ActionError::Vanished);
    }
    let tid = rustix::process::Pid::from_raw(thread.tid.0.cast_signed());
    let allowed = || sched_getaffinity(tid).map(|set| from_cpu_set(&set)).map_err(affinity_error);
    let set = |ids: &IdSet| sched_setaffinity(tid, &to_cpu_set(ids)?).map_err(affinity_error);
    if !cpus.must_write(&allowed()?, format_args!("the set of CPUs of thread {}", thread.tid))? {
        return Ok(ActionOutcome::default());
    }
    fault::point("before setting an affinity");
    set(&cpus.to)?;
    fault::point("after setting an affinity");
    // The kernel silently leaves out CPUs that the cgroup does not permit (kernel/sched/syscalls.c,
    // `__sched_setaffinity`).
    let now = allowed()?;
    if now != cpus.to {
        set(&cpus.from)?;
        let wanted = &cpus.to;
        return Err(ActionError::Unsupported(format!("of the CPUs {wanted} the cgroup permits {now} only")));
    }
    Ok(ActionOutcome::default())
}

fn from_cpu_set(set: &CpuSet) -> IdSet {
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| cpu as u32).collect()
}

fn to_cpu_set(ids: &IdSet) -> Result<CpuSet, ActionError> {
    let mut set = CpuSet::new();
    for id in ids.iter() {
        if id as usize >= CpuSet::MAX_CPU {
            return Err(ActionError::Unsupported(format!("CPU {id}: at most {} CPUs are supported", CpuSet::MAX_CPU)));
        }
        set.set(id as usize);
    }
    Ok(set)
}

fn affinity_error(errno: Errno) -> ActionError {
    match errno {
        Errno::SRCH => ActionError::Vanished,
        Errno::PERM => ActionError::Denied("setting the CPUs of a thread needs CAP_SYS_NICE".to_owned()),
        Errno::INVAL => ActionError::Unsupported("the cgroup permits none of the CPUs".to_owned()),
        errno => ActionError::Failed(format!("the CPUs of a thread: {errno}")),
    }
}

/// Write a file of a cgroup's cpuset.
pub fn write_cpuset(
    host: &LiveHost,
    cgroup: &str,
    file: CpusetFile,
    ids: &Exchange<IdSet>,
) -> Result<ActionOutcome, ActionError> {
    let path = format!("{cgroup}/{}", file.file_name());
    let read = || -> Result<IdSet, ActionError> {
        let text = host.read(&path)?;
        String::from_utf8_lossy(&text).parse().map_err(|error| ActionError::Failed(format!("/{path}: {error}")))
    };
    if ids.must_write(&read()?, format_args!("/{path}"))? {
        // An empty text would be no write at all.
        write_setting(&format!("/{path}"), &format!("{}\n", ids.to))?;
    }
    Ok(ActionOutcome::default())
}

/// Move pages of a process to a node.
pub fn move_pages(process: &LiveProcess<'_>, ranges: &[AddressRange], node: u32) -> Result<ActionOutcome, ActionError> {
    let page_bytes = process.host.page_size().bytes();
    let mut missed = Vec::new();
    let pages: Vec<u64> =
        ranges.iter().flat_map(|range| (range.start..range.end).step_by(page_bytes as usize)).collect();
    for part in pages.chunks(PAGES_PER_CALL) {
        let elsewhere = pages_elsewhere(process, part, node)?;
        fault::point("before moving pages");
        let mut refusals = move_part(process, &elsewhere, node)?;
        fault::point("after moving pages");
        for page in pages_elsewhere(process, &elsewhere, node)? {
            let range = AddressRange { start: page, end: page + page_bytes };
            let why = MissedReason::Refused(refusal_text(refusals.remove(&page)));
            super::push_missed_range(&mut missed, range, why);
        }
    }
    Ok(ActionOutcome { stop_durations: Vec::new(), missed_ranges: missed })
}

/// The pages that are in memory, but on another node.
fn pages_elsewhere(process: &LiveProcess<'_>, pages: &[u64], node: u32) -> Result<Vec<u64>, ActionError> {
    check_alive(process)?;
    let nodes = numa::page_nodes(process.id().pid.0, pages).map_err(|error| move_error(&error, node))?;
    let is_elsewhere = |&(_, now): &(&u64, i32)| now >= 0 && now.cast_unsigned() != node;
    Ok(pages.iter().zip(nodes).filter(is_elsewhere).map(|(page, _)| *page).collect())
}

/// Move pages, and return the error numbers of those that the kernel refused.
fn move_part(process: &LiveProcess<'_>, pages: &[u64], node: u32) -> Result<BTreeMap<u64, i32>, ActionError> {
    if pages.is_empty() {
        return Ok(BTreeMap::new());
    }
    let pid = process.id().pid.0;
    check_alive(process)?;
    let mut status = numa::move_pages(pid, pages, node).map_err(|error| move_error(&error, node))?;
    // After a page that cannot be moved the kernel ends, so those after it are moved one by one.
    for (page, status) in pages.iter().zip(&mut status).filter(|(_, status)| **status == numa::NOT_REACHED) {
        check_alive(process)?;
        let alone =
            numa::move_pages(pid, std::slice::from_ref(page), node).map_err(|error| move_error(&error, node))?;
        *status = alone[0];
    }
    Ok(pages.iter().copied().zip(status).collect())
}

fn check_alive(process: &LiveProcess<'_>) -> Result<(), ActionError> {
    hold(process.host, process.id()).map(drop).map_err(ActionError::from)
}

fn move_error(error: &std::io::Error, node: u32) -> ActionError {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::SRCH) => ActionError::Vanished,
        Some(Errno::PERM) => ActionError::Denied("moving pages needs CAP_SYS_NICE and CAP_SYS_PTRACE".to_owned()),
        Some(Errno::NOSYS) => {
            ActionError::Unsupported("this kernel has no CONFIG_NUMA and CONFIG_MIGRATION".to_owned())
        }
        Some(Errno::NODEV) => ActionError::Unsupported(format!("there is no node {node} with memory")),
        Some(Errno::ACCESS) => {
            ActionError::Unsupported(format!("the cpuset of the process does not permit node {node}"))
        }
        _ => ActionError::Failed(format!("moving pages: {error}")),
    }
}

/// Why a page stayed (move_pages(2)).
fn refusal_text(status: Option<i32>) -> String {
    match status.map(|status| Errno::from_raw_os_error(-status)) {
        Some(Errno::ACCESS) => "another process maps it too".to_owned(),
        Some(Errno::BUSY) => "the kernel uses it now".to_owned(),
        Some(Errno::NOMEM) => "the node has no free memory".to_owned(),
        _ => "it is pinned, or the node has no free memory".to_owned(),
    }
}
