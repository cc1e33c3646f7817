//! Places threads on CPUs and memory on NUMA nodes.
//!
//! Threads and pages are named by numbers, for which the kernel offers no handles here. Whether a number still belongs
//! to the expected process is checked right before each system call. A number that is reused within this moment would
//! let another thread run elsewhere, or move some of its pages; no memory content changes.

use super::{push_missed_range, write_setting};
use crate::LiveHost;
use crate::process::LiveProcess;
use pagefold_base::{AddressRange, IdSet, Pid};
use pagefold_host::action::{ActionError, ActionOutcome, CpusetFile, Exchange, MissedReason, ThreadId};
use pagefold_host::{Host, ProcessHandle, hold, parse};
use pagefold_sys::{fault, numa};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;

/// Pages in one call of move_pages(2): one huge page of x86, which the kernel moves whole. A call walks this many page
/// table entries and copies at most as many pages.
const PAGES_PER_CALL: u64 = 512;

/// Restrict a thread to CPUs.
pub fn set_affinity(host: &LiveHost, thread: ThreadId, cpus: &Exchange<IdSet>) -> Result<ActionOutcome, ActionError> {
    let stat = hold(host, thread.process)?.read(&format!("task/{}/stat", thread.tid))?;
    if parse::stat(&stat)?.start_time != thread.start_time {
        return Err(ActionError::Vanished);
    }
    let current = read_affinity(thread.tid)?;
    if current == cpus.to {
        return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
    }
    // The kernel leaves out CPUs that the cgroup does not permit or that are offline, so that a part of a set may be
    // all that is left of it (kernel/sched/syscalls.c, `__sched_setaffinity` and `sched_getaffinity`).
    if !current.is_subset(&cpus.from) {
        let (tid, from) = (thread.tid, &cpus.from);
        return Err(ActionError::ChangedByOthers(format!("the CPUs of thread {tid} are {current}, not {from}")));
    }
    fault::point("before setting an affinity");
    sched_setaffinity(raw_tid(thread.tid), &to_cpu_set(host, &cpus.to)?).map_err(affinity_error)?;
    fault::point("after setting an affinity");
    Ok(ActionOutcome::default())
}

/// The CPUs on which a thread may run now.
pub fn read_affinity(tid: Pid) -> Result<IdSet, ActionError> {
    let set = sched_getaffinity(raw_tid(tid)).map_err(affinity_error)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| cpu as u32).collect())
}

fn raw_tid(tid: Pid) -> Option<rustix::process::Pid> {
    rustix::process::Pid::from_raw(tid.0.cast_signed())
}

/// The set for the kernel. All online CPUs become all CPUs, so that the thread may also use those that come online
/// later, as a thread without restriction may.
fn to_cpu_set(host: &LiveHost, ids: &IdSet) -> Result<CpuSet, ActionError> {
    let online = host.read("sys/devices/system/cpu/online").ok();
    let online: Option<IdSet> = online.and_then(|text| String::from_utf8_lossy(&text).parse().ok());
    let mut set = CpuSet::new();
    if online.is_some_and(|online| online.is_subset(ids)) {
        (0..CpuSet::MAX_CPU).for_each(|cpu| set.set(cpu));
        return Ok(set);
    }
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
        Errno::PERM => ActionError::Denied("setting the CPUs of a thread of another user needs CAP_SYS_NICE".to_owned()),
        Errno::INVAL => ActionError::Failed(
            "none of the CPUs is online and permitted by the cgroup, the host has more CPUs than are supported, or it is \
             a kernel thread"
                .to_owned(),
        ),
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
    if !std::path::Path::new("/").join(cgroup).is_dir() {
        return Err(ActionError::Vanished);
    }
    let path = format!("{cgroup}/{}", file.file_name());
    let text = host.read(&path)?;
    let current: IdSet =
        String::from_utf8_lossy(&text).parse().map_err(|error| ActionError::Failed(format!("/{path}: {error}")))?;
    let must_write = ids.must_write(&current, format_args!("/{path}"))?;
    if must_write {
        // An empty text would be no write at all.
        write_setting(&format!("/{path}"), &format!("{}\n", ids.to))?;
    }
    Ok(ActionOutcome { unchanged: !must_write, ..ActionOutcome::default() })
}

/// Move pages of a process to a node.
pub fn move_pages(process: &LiveProcess<'_>, ranges: &[AddressRange], node: u32) -> Result<ActionOutcome, ActionError> {
    let page_bytes = process.host.page_size().bytes();
    let mut outcome = ActionOutcome { unchanged: true, ..ActionOutcome::default() };
    for range in ranges {
        for start in (range.start..range.end).step_by((PAGES_PER_CALL * page_bytes) as usize) {
            let end = range.end.min(start + PAGES_PER_CALL * page_bytes);
            let pages: Vec<u64> = (start..end).step_by(page_bytes as usize).collect();
            let pages_to_move = pages_elsewhere(process, &pages, node)?;
            outcome.unchanged &= pages_to_move.is_empty();
            fault::point("before moving pages");
            let refusals = move_part(process, &pages_to_move, node)?;
            fault::point("after moving pages");
            for page in pages_elsewhere(process, &pages_to_move, node)? {
                let range = AddressRange { start: page, end: page + page_bytes };
                let why = MissedReason::Refused(refusal_text(refusals.get(&page).copied()).to_owned());
                push_missed_range(&mut outcome.missed_ranges, range, why);
            }
        }
    }
    Ok(outcome)
}

/// The pages that are in memory, but on another node.
fn pages_elsewhere(process: &LiveProcess<'_>, pages: &[u64], node: u32) -> Result<Vec<u64>, ActionError> {
    check_alive(process)?;
    let nodes = numa::page_nodes(process.id().pid.0, pages).map_err(|error| move_error(&error, node))?;
    let is_elsewhere = |&(_, current): &(&u64, i32)| current >= 0 && current.cast_unsigned() != node;
    Ok(pages.iter().zip(nodes).filter(is_elsewhere).map(|(page, _)| *page).collect())
}

/// Move pages, and return the status of each (move_pages(2)).
fn move_part(process: &LiveProcess<'_>, pages: &[u64], node: u32) -> Result<BTreeMap<u64, i32>, ActionError> {
    let mut status = BTreeMap::new();
    if pages.is_empty() {
        return Ok(status);
    }
    status.extend(pages.iter().copied().zip(try_move(process, pages, node)?));
    // The kernel ends the call after a part of which a page could not be moved, so the others are moved one by one.
    let skipped: Vec<u64> = pages.iter().copied().filter(|page| status[page] == numa::NOT_REACHED).collect();
    if !skipped.is_empty() {
        for page in pages_elsewhere(process, &skipped, node)? {
            status.insert(page, try_move(process, &[page], node)?[0]);
        }
    }
    Ok(status)
}

/// One call of move_pages(2). If the node is full, all pages have that status.
fn try_move(process: &LiveProcess<'_>, pages: &[u64], node: u32) -> Result<Vec<i32>, ActionError> {
    check_alive(process)?;
    match numa::move_pages(process.id().pid.0, pages, node) {
        Err(error) if error.raw_os_error() == Some(Errno::NOMEM.raw_os_error()) => {
            Ok(vec![-Errno::NOMEM.raw_os_error(); pages.len()])
        }
        moved => moved.map_err(|error| move_error(&error, node)),
    }
}

fn check_alive(process: &LiveProcess<'_>) -> Result<(), ActionError> {
    hold(process.host, process.id()).map(drop).map_err(ActionError::from)
}

fn move_error(error: &std::io::Error, node: u32) -> ActionError {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::SRCH) => ActionError::Vanished,
        Some(Errno::PERM) => ActionError::Denied("moving pages of another user needs CAP_SYS_PTRACE".to_owned()),
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

/// Why a page stayed, by its status. The kernel gives none for a pinned page.
fn refusal_text(status: Option<i32>) -> &'static str {
    const SHARED: i32 = -Errno::ACCESS.raw_os_error();
    const BUSY: i32 = -Errno::BUSY.raw_os_error();
    const NO_MEMORY: i32 = -Errno::NOMEM.raw_os_error();
    match status {
        Some(SHARED) => "it is mapped more than once",
        Some(BUSY) => "the kernel uses it now",
        Some(NO_MEMORY) => "the node has no free memory",
        _ => "it is pinned, or the node has no free memory",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error number (include/linux/err.h).
    const MAX_ERRNO: i32 = 4095;

    #[test]
    fn every_status_of_a_page_has_a_text() {
        for status in [None, Some(numa::NOT_REACHED), Some(0), Some(1), Some(i32::MAX), Some(-MAX_ERRNO - 1)] {
            assert_eq!(refusal_text(status), "it is pinned, or the node has no free memory", "{status:?}");
        }
        assert_eq!(refusal_text(Some(-Errno::ACCESS.raw_os_error())), "it is mapped more than once");
    }
}
