//! Places threads on CPUs and memory on NUMA nodes.
//!
//! Threads and pages are named by numbers, for which the kernel offers no handles here. Whether a number still belongs
//! to the expected process is checked right before each system call. A number that is reused within this moment would
//! let another thread run elsewhere, or move some of its pages; no memory content changes.

use super::push_missed_range;
use crate::page_nodes::{self, PageUnit};
use crate::process::LiveProcess;
use crate::{LiveHost, libvirt};
use pagefold_base::{AddressRange, Bytes, IdSet, Pid};
use pagefold_host::action::{ActionError, ActionOutcome, Exchange, LibvirtPin, MissedReason, ThreadId};
use pagefold_host::{Host, ProcessHandle, hold, observe, parse};
use pagefold_sys::{fault, numa};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::{BTreeMap, VecDeque};

/// Pages or huge pages in one call of move_pages(2). Small calls are slow, because each one waits until all CPUs have
/// emptied their lists of new pages (`lru_cache_disable` in `do_pages_move`, mm/migrate.c, 6.18). A large call does not
/// keep pages inaccessible for longer: the kernel copies at most 512 base pages together (`NR_MAX_BATCHED_MIGRATION`).
const UNITS_PER_CALL: usize = 4096;

/// Calls of move_pages(2) in succession that move nothing, after which the rest of [`UNITS_PER_CALL`] units stays: enough
/// to find every run of 32 movable ones between pinned ones.
const MAX_FRUITLESS_CALLS: usize = 2 * UNITS_PER_CALL / 16;

/// Restrict a thread to CPUs.
pub fn set_affinity(
    host: &LiveHost,
    thread: ThreadId,
    cpus: &Exchange<IdSet>,
    pin: Option<&LibvirtPin>,
) -> Result<ActionOutcome, ActionError> {
    let stat = hold(host, thread.process)?.read(&format!("task/{}/stat", thread.tid))?;
    if parse::stat(&stat)?.start_time != thread.start_time {
        return Err(ActionError::Vanished);
    }
    let current = read_affinity(thread.tid)?;
    if current == cpus.to {
        return Ok(ActionOutcome { unchanged: true, ..ActionOutcome::default() });
    }
    if current != cpus.from && current != permitted_part(host, thread, &cpus.from) {
        let (tid, from) = (thread.tid, &cpus.from);
        return Err(ActionError::ChangedByOthers(format!("the CPUs of thread {tid} are {current}, not {from}")));
    }
    fault::point("before setting an affinity");
    match pin {
        Some(pin) => libvirt::pin(host, thread.process, pin, &cpus.to)?,
        None => sched_setaffinity(raw_tid(thread.tid), &to_cpu_set(host, &cpus.to)?).map_err(affinity_error)?,
    }
    fault::point("after setting an affinity");
    Ok(ActionOutcome::default())
}

/// What the kernel leaves of a set of CPUs: those that are online and that the cgroup permits (kernel/sched/syscalls.c,
/// `__sched_setaffinity` and `sched_getaffinity`). A thread with fewer CPUs was restricted by another program.
fn permitted_part(host: &LiveHost, thread: ThreadId, cpus: &IdSet) -> IdSet {
    let limits = [online_cpus(host), observe::cpuset_cpus(host, thread.process.pid, thread.tid)];
    cpus.iter().filter(|&cpu| limits.iter().flatten().all(|limit| limit.contains(cpu))).collect()
}

fn online_cpus(host: &LiveHost) -> Option<IdSet> {
    String::from_utf8_lossy(&host.read("sys/devices/system/cpu/online").ok()?).parse().ok()
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
    let mut set = CpuSet::new();
    if online_cpus(host).is_some_and(|online| online.is_subset(ids)) {
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

/// Move pages of a process to a node.
pub fn move_pages(process: &LiveProcess<'_>, ranges: &[AddressRange], node: u32) -> Result<ActionOutcome, ActionError> {
    let mut outcome = ActionOutcome { unchanged: true, ..ActionOutcome::default() };
    let units_of_ranges = ranges.iter().map(|&range| Ok(page_nodes::page_units(process, range)?));
    for_each_batch(units_of_ranges, UNITS_PER_CALL, |units| move_batch(process, units, node, &mut outcome))?;
    Ok(outcome)
}

/// Passes on the items of all lists in their order, in batches of `size`. Short lists share a batch; the last batch may be
/// smaller.
fn for_each_batch<T: Copy, E>(
    lists: impl IntoIterator<Item = Result<Vec<T>, E>>,
    size: usize,
    mut pass_on: impl FnMut(&[T]) -> Result<(), E>,
) -> Result<(), E> {
    let mut batch = Vec::new();
    for list in lists {
        let list = list?;
        let mut rest = &list[..];
        while !rest.is_empty() {
            let (taken, later) = rest.split_at(rest.len().min(size - batch.len()));
            batch.extend_from_slice(taken);
            rest = later;
            if batch.len() == size {
                pass_on(&batch)?;
                batch.clear();
            }
        }
    }
    if batch.is_empty() { Ok(()) } else { pass_on(&batch) }
}

/// Move those of these units that are on other nodes, and add the result to `outcome`.
fn move_batch(
    process: &LiveProcess<'_>,
    units: &[PageUnit],
    node: u32,
    outcome: &mut ActionOutcome,
) -> Result<(), ActionError> {
    let units_to_move = units_elsewhere(process, units, node)?;
    outcome.unchanged &= units_to_move.is_empty();
    fault::point("before moving pages");
    let unconfirmed = move_units(process, &units_to_move, node)?;
    fault::point("after moving pages");
    let page = process.host.page_size();
    let pages_of = |unit: &PageUnit| page.pages_in(Bytes(unit.end - unit.address));
    outcome.moved_pages += units_to_move.iter().map(pages_of).sum();
    let unmoved = unmoved_units(process, &unconfirmed, node)?;
    let has_free_memory = if unmoved.is_empty() { None } else { has_free_memory(process.host, node) };
    for unit in unmoved {
        let range = AddressRange { start: unit.address, end: unit.end };
        let why = refusal(unconfirmed.get(&unit.address).map(|(_, status)| *status), has_free_memory);
        outcome.moved_pages = outcome.moved_pages.saturating_sub(pages_of(&unit));
        push_missed_range(&mut outcome.missed_ranges, range, why);
    }
    Ok(())
}

/// The parts of these units that are on another node, all of which are looked for: the kernel may have split a huge page.
fn unmoved_units(
    process: &LiveProcess<'_>,
    unconfirmed: &UnconfirmedUnits,
    node: u32,
) -> Result<Vec<PageUnit>, ActionError> {
    let units: Vec<PageUnit> = unconfirmed.values().map(|(unit, _)| *unit).collect();
    let mut present = Vec::new();
    for range in adjacent_ranges(&units) {
        present.extend(page_nodes::page_units(process, range)?);
    }
    units_elsewhere(process, &present, node)
}

/// The ranges that ascending units cover. Far-apart units have a range each, so that what is between them is not read.
fn adjacent_ranges(units: &[PageUnit]) -> impl Iterator<Item = AddressRange> {
    let runs = units.chunk_by(|unit, next| unit.end == next.address);
    runs.map(|run| AddressRange { start: run[0].address, end: run[run.len() - 1].end })
}

/// The units that are in memory, but on another node.
fn units_elsewhere(process: &LiveProcess<'_>, units: &[PageUnit], node: u32) -> Result<Vec<PageUnit>, ActionError> {
    if units.is_empty() {
        return Ok(Vec::new());
    }
    let nodes = page_nodes::unit_nodes(process, units)?;
    let is_elsewhere = |&(_, current): &(&PageUnit, Option<u32>)| current.is_some_and(|current| current != node);
    Ok(units.iter().zip(nodes).filter(is_elsewhere).map(|(unit, _)| *unit).collect())
}

/// Units that may not have been moved, with their status, by their address.
type UnconfirmedUnits = BTreeMap<u64, (PageUnit, i32)>;

/// Move units. Returns those of which the kernel has not reported that they are on the node (move_pages(2)): it reports
/// so only if all pages of a part were moved (mm/migrate.c, `move_pages_and_store_status`). It ends a call after a
/// part of which a page could not be moved, and leaves the status of that part and of all later pages as it was.
/// Therefore what remains is moved by further calls, and by ever smaller ones if a call moves nothing, first all of one
/// size. If very many calls move nothing, as with memory that is pinned all over, what remains then stays.
fn move_units(process: &LiveProcess<'_>, units: &[PageUnit], node: u32) -> Result<UnconfirmedUnits, ActionError> {
    let mut unconfirmed = UnconfirmedUnits::new();
    let mut waiting: VecDeque<Vec<PageUnit>> = VecDeque::from([units.to_vec()]);
    let mut fruitless_calls = 0;
    while let Some(units) = waiting.pop_front() {
        if units.is_empty() || fruitless_calls >= MAX_FRUITLESS_CALLS {
            continue;
        }
        let addresses: Vec<u64> = units.iter().map(|unit| unit.address).collect();
        let status = try_move(process, &addresses, node)?;
        for (unit, &status) in units.iter().zip(&status) {
            if u32::try_from(status) == Ok(node) {
                unconfirmed.remove(&unit.address);
            } else {
                unconfirmed.insert(unit.address, (*unit, status));
            }
        }
        let not_reached: Vec<PageUnit> = units
            .iter()
            .zip(status)
            .filter(|&(_, status)| status == numa::NOT_REACHED)
            .map(|(unit, _)| *unit)
            .collect();
        let remaining = units_elsewhere(process, &not_reached, node)?;
        if remaining.len() < units.len() {
            fruitless_calls = 0;
            waiting.push_front(remaining);
            continue;
        }
        fruitless_calls += 1;
        if let (left @ [_, ..], right) = remaining.split_at(remaining.len() / 2) {
            waiting.extend([left.to_vec(), right.to_vec()]);
        }
    }
    Ok(unconfirmed)
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

/// Whether a node has more free memory than the kernel reserves on all nodes together (`min_free_kbytes`), so that a page
/// comes to it without reclaim. `None` if that cannot be read.
fn has_free_memory(host: &LiveHost, node: u32) -> Option<bool> {
    let meminfo = host.read(&format!("sys/devices/system/node/node{node}/meminfo")).ok()?;
    let reserved: u64 = parse::number(&host.read("proc/sys/vm/min_free_kbytes").ok()?).ok()?;
    Some(free_kib(&meminfo)? > reserved)
}

/// The free memory in lines such as `Node 0 MemFree:       24680 kB` (drivers/base/node.c, `node_read_meminfo`).
fn free_kib(meminfo: &[u8]) -> Option<u64> {
    let text = String::from_utf8_lossy(meminfo);
    let value = text.lines().find_map(|line| line.split_once(" MemFree:").map(|(_, value)| value))?;
    value.trim().strip_suffix(" kB")?.trim_end().parse().ok()
}

/// Why a page stayed, by its status, and by whether its new node has free memory afterwards. The kernel gives no status
/// for a pinned page.
fn refusal(status: Option<i32>, has_free_memory: Option<bool>) -> MissedReason {
    const NO_FREE_MEMORY: &str = "the node has no free memory";
    const SHARED: i32 = -Errno::ACCESS.raw_os_error();
    const BUSY: i32 = -Errno::BUSY.raw_os_error();
    const NO_MEMORY: i32 = -Errno::NOMEM.raw_os_error();
    let why = match status {
        Some(SHARED) => return MissedReason::MappedSeveralTimes,
        Some(BUSY) => "the kernel uses it now",
        Some(NO_MEMORY) => NO_FREE_MEMORY,
        _ => match has_free_memory {
            Some(true) => "it is pinned",
            Some(false) => NO_FREE_MEMORY,
            None => "it is pinned, or the node has no free memory",
        },
    };
    MissedReason::Refused(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The largest error number (include/linux/err.h).
    const MAX_ERRNO: i32 = 4095;

    #[test]
    fn cpus_that_another_program_has_restricted_stay() {
        let host = LiveHost::new();
        let own = read_affinity(Pid(std::process::id())).unwrap();
        let Some(first) = own.iter().next() else { panic!("no CPU") };
        if own.iter().count() < 2 {
            return println!("skipped: needs two CPUs");
        }
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let process = host.open(Pid(child.id())).unwrap().id();
        let thread = ThreadId { process, tid: process.pid, start_time: process.start_time };
        let ids = |ids: &[u32]| ids.iter().copied().collect::<IdSet>();
        let set = |from: &IdSet, to: &IdSet| {
            set_affinity(&host, thread, &Exchange { from: from.clone(), to: to.clone() }, None)
        };
        let absent_cpu = CpuSet::MAX_CPU as u32 - 1;
        let results = [
            set(&own, &ids(&[first])),
            set(&own, &own),
            // The kernel has left out a CPU that is not online.
            set(&ids(&[first, absent_cpu]), &own),
        ];
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(results, [Ok(_), Err(ActionError::ChangedByOthers(_)), Ok(_)]), "{results:?}");
    }

    /// The batches of four of lists of these lengths, whose items are numbered.
    fn batches_of_four(lengths: &[u32]) -> Vec<Vec<u32>> {
        let (mut next, mut batches) = (0, Vec::new());
        let lists = lengths.iter().map(|&length| {
            next += length;
            Ok::<_, ActionError>((next - length..next).collect())
        });
        let pass_on = |batch: &[u32]| {
            batches.push(batch.to_vec());
            Ok(())
        };
        for_each_batch(lists, 4, pass_on).unwrap();
        batches
    }

    #[test]
    fn short_ranges_share_a_call() {
        assert_eq!(batches_of_four(&[1; 9]), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8]]);
        assert_eq!(batches_of_four(&[3, 0, 6, 1]), [vec![0, 1, 2, 3], vec![4, 5, 6, 7], vec![8, 9]]);
        assert_eq!(batches_of_four(&[4, 4]), [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
        assert!(batches_of_four(&[]).is_empty() && batches_of_four(&[0, 0]).is_empty());
    }

    #[test]
    fn failed_batch_or_list_ends_the_batches() {
        let mut batches = 0;
        let failed = for_each_batch([Ok(vec![1; 9])], 4, |_| {
            batches += 1;
            if batches == 2 { Err("failed") } else { Ok(()) }
        });
        assert_eq!((failed, batches), (Err("failed"), 2));
        let lists = [Ok(vec![1; 5]), Err("unreadable"), Ok(vec![1; 5])];
        let mut passed = 0;
        let failed = for_each_batch(lists, 4, |batch| {
            passed += batch.len();
            Ok(())
        });
        assert_eq!((failed, passed), (Err("unreadable"), 4));
    }

    #[test]
    fn units_that_are_apart_are_looked_up_apart() {
        let units = [(0, 1), (1, 2), (2, 514), (600, 601), (700, 701)];
        let units = units.map(|(address, end)| PageUnit { address, end });
        let ranges: Vec<_> = adjacent_ranges(&units).map(|range| (range.start, range.end)).collect();
        assert_eq!(ranges, [(0, 514), (600, 601), (700, 701)]);
        assert_eq!(adjacent_ranges(&[]).count(), 0);
    }

    #[test]
    fn every_status_of_a_page_has_a_reason() {
        for status in [None, Some(numa::NOT_REACHED), Some(0), Some(1), Some(i32::MAX), Some(-MAX_ERRNO - 1)] {
            let reason = |has_free_memory| refusal(status, has_free_memory).to_string();
            assert_eq!(reason(Some(true)), "it is pinned", "{status:?}");
            assert_eq!(reason(Some(false)), "the node has no free memory", "{status:?}");
            assert_eq!(reason(None), "it is pinned, or the node has no free memory", "{status:?}");
        }
        let errno = |errno: Errno| refusal(Some(-errno.raw_os_error()), Some(true));
        assert_eq!(errno(Errno::ACCESS), MissedReason::MappedSeveralTimes);
        assert_eq!(errno(Errno::NOMEM).to_string(), "the node has no free memory");
    }

    #[test]
    fn free_memory_of_a_node_is_read() {
        let meminfo = b"Node 1 MemTotal:         524288 kB\nNode 1 MemFree:          1234 kB\nNode 1 MemUsed: 9 kB\n";
        assert_eq!(free_kib(meminfo), Some(1234));
        for text in ["", "Node 1 MemTotal: 5 kB\n", "Node 1 MemFree: x kB\n", "Node 1 MemFree: 5\n"] {
            assert_eq!(free_kib(text.as_bytes()), None, "{text}");
        }
    }
}
