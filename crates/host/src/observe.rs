//! Typed observations of a host: reads files through the port and parses them.

use crate::{Host, ProcessHandle, parse};
use pagefold_base::identity;
use pagefold_base::identity::Identity;
use pagefold_base::ksm::Ksm;
use pagefold_base::libvirt::LibvirtDomain;
use pagefold_base::memory::{MemInfo, Pressure, PressureLine, Shortage};
use pagefold_base::process::{Process as ProcessFacts, SmapsRollup};
use pagefold_base::region::{MapsEntry, Region};
use pagefold_base::tuner::{Tuner, identify_root_tuner};
use pagefold_base::{Absent, IdSet, Pfn, Pid, Reading};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// KSM's settings and counters. `NotOnThisKernel` if the kernel has no KSM.
pub fn ksm(host: &dyn Host) -> Reading<Ksm> {
    host.read("sys/kernel/mm/ksm/run")?;
    Ok(parse::ksm(|file| host.read(&format!("sys/kernel/mm/ksm/{file}"))))
}

/// Memory totals.
pub fn memory(host: &dyn Host) -> Reading<MemInfo> {
    Ok(parse::meminfo(&host.read("proc/meminfo")?))
}

/// Memory pressure.
pub fn pressure(host: &dyn Host) -> Reading<Pressure> {
    parse::pressure(&host.read("proc/pressure/memory")?)
}

/// How short memory is on the host.
pub fn shortage(host: &dyn Host) -> Shortage {
    let pressure_percent = pressure(host).ok().map(|pressure| pressure.some.avg10);
    let memory = pressure_percent.is_none().then(|| memory(host).ok()).flatten();
    let (available, total) = memory.map_or((None, None), |memory| (memory.available.ok(), memory.total.ok()));
    Shortage::for_host(pressure_percent, available, total)
}

/// CPU pressure: tasks that wait for a CPU.
pub fn cpu_pressure(host: &dyn Host) -> Reading<PressureLine> {
    parse::pressure_some(&host.read("proc/pressure/cpu")?)
}

/// The counters of `/proc/vmstat`.
pub fn vmstat(host: &dyn Host) -> Reading<BTreeMap<String, u64>> {
    Ok(parse::vmstat(&host.read("proc/vmstat")?))
}

/// The maximum number of regions of a process (`vm.max_map_count`).
pub fn max_map_count(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("proc/sys/vm/max_map_count")?)
}

/// The kernel's release, as `uname -r`.
pub fn kernel_release(host: &dyn Host) -> Reading<String> {
    Ok(String::from_utf8_lossy(&host.read("proc/sys/kernel/osrelease")?).trim().to_owned())
}

/// The number of online CPUs.
pub fn online_cpu_count(host: &dyn Host) -> Reading<usize> {
    Ok(parse::number_list(&host.read("sys/devices/system/cpu/online")?)?.len())
}

/// The mode of transparent huge pages: `always`, `madvise` or `never`.
pub fn thp_mode(host: &dyn Host) -> Reading<String> {
    parse::bracketed_word(&host.read("sys/kernel/mm/transparent_hugepage/enabled")?)
}

/// The size in bytes of a huge page of the PMD level.
pub fn huge_page_bytes(host: &dyn Host) -> Reading<u64> {
    parse::number(&host.read("sys/kernel/mm/transparent_hugepage/hpage_pmd_size")?)
}

/// The facts about a process that are known without reading its memory.
pub fn process(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<ProcessFacts> {
    let stat = parse::stat(&handle.read("stat")?)?;
    let status = handle.read("status").map(|bytes| parse::status(&bytes));
    let arguments = handle.read("cmdline").map(|bytes| parse::arguments(&bytes));
    let environment = handle.read("environ").map(|bytes| parse::job_environment(&bytes)).unwrap_or_default();
    let cgroup = handle.read("cgroup").and_then(|bytes| parse::cgroup(&bytes));
    let labels = cgroup.as_deref().map_or_else(|_| Vec::new(), |cgroup| container_labels(host, cgroup));
    let identity = Identity::new(arguments.as_deref().unwrap_or_default(), &environment, cgroup.as_deref().ok());
    let identity = Identity { labels, ..identity };
    Ok(ProcessFacts {
        id: handle.id(),
        comm: stat.comm,
        state: stat.state,
        kernel_thread: stat.flags & parse::PF_KTHREAD != 0,
        uid: status.clone().and_then(|status| status.uid),
        setuid: status.clone().and_then(|status| status.setuid).unwrap_or(true),
        arguments,
        cgroup,
        identity,
        ksm: parse::process_ksm(handle.read("ksm_stat"), handle.read("ksm_merging_pages")),
        seccomp: status.clone().and_then(|status| status.seccomp),
        pinned: status.and_then(|status| status.pinned),
    })
}

/// Where libvirt keeps the state of running domains.
pub const LIBVIRT_STATE_DIRECTORY: &str = "run/libvirt/qemu";

/// The running domains of libvirt, in the order of their names; none on a host without libvirt. Files that are no state of
/// a domain are left out, such as those of domains that end meanwhile.
///
/// # Errors
/// `Denied` without root.
pub fn libvirt_domains(host: &dyn Host) -> Reading<Vec<LibvirtDomain>> {
    let names = match host.list(LIBVIRT_STATE_DIRECTORY) {
        Err(Absent::NotOnThisKernel | Absent::Vanished) => return Ok(Vec::new()),
        names => names?,
    };
    let mut domains = Vec::new();
    for name in names.iter().filter(|name| name.ends_with(".xml")) {
        match host.read(&format!("{LIBVIRT_STATE_DIRECTORY}/{name}")) {
            Err(Absent::Denied) => return Err(Absent::Denied),
            state => domains.extend(state.and_then(|bytes| parse::libvirt_domain_state(&bytes))),
        }
    }
    Ok(domains)
}

/// The NUMA nodes with memory, if KSM merges pages across nodes (`merge_across_nodes`); empty if there is only one.
pub fn merging_nodes(host: &dyn Host) -> Vec<u32> {
    let nodes = host.read("sys/devices/system/node/has_memory").and_then(|list| parse::number_list(&list));
    let across = || host.read("sys/kernel/mm/ksm/merge_across_nodes").and_then(|value| parse::number::<u64>(&value));
    nodes.ok().filter(|nodes| nodes.len() > 1 && across() == Ok(1)).unwrap_or_default()
}

/// The nodes among `nodes` that the memory of a process is bound to. The kernel walks all its pages for that.
pub fn bound_nodes(handle: &dyn ProcessHandle, nodes: &[u32]) -> Option<String> {
    let file = |name: &str| handle.read(name).unwrap_or_default();
    (nodes.len() > 1).then(|| parse::bound_nodes(&file("numa_maps"), &file("status"), nodes)).flatten()
}

/// Which of the programs that write KSM's settings a process is; [`identify_root_tuner`] has the conditions. A program
/// that was started with more privileges than its caller does not count, because its caller may have chosen the name.
pub fn identify_tuner(host: &dyn Host, process: &ProcessFacts) -> Option<Tuner> {
    let tuner = identify_root_tuner(process)?;
    let handle = crate::hold(host, process.id).ok();
    match handle.map(|handle| handle.read("auxv")) {
        Some(Ok(auxv)) => (parse::is_at_secure(&auxv) == Some(false)).then_some(tuner),
        // Recordings do not contain the file.
        Some(Err(_)) | None => Some(tuner),
    }
}

/// The labels of the container of a cgroup; empty if no runtime stores them or they cannot be read.
fn container_labels(host: &dyn Host, cgroup: &str) -> Vec<String> {
    let mut files = identity::label_files(cgroup).into_iter();
    files.find_map(|file| host.read(&file).ok()).map(|bytes| parse::labels(&bytes)).unwrap_or_default()
}

/// The CPU time that all threads of a process have used, in nanoseconds (`schedstat`). `NotOnThisKernel` if the kernel
/// does not count it (CONFIG_SCHED_INFO). If the figure does not change, no thread ran.
pub fn cpu_time_ns(host: &dyn Host, handle: &dyn ProcessHandle) -> Reading<u64> {
    let mut sum = 0u64;
    for thread in host.list(&format!("proc/{}/task", handle.id().pid))? {
        sum = sum.wrapping_add(parse::schedstat(&handle.read(&format!("task/{thread}/schedstat"))?)?.run_ns);
    }
    Ok(sum)
}

/// The regions of a process that has its own memory, with their resident memory. The result has all regions or none,
/// because a partial list would look like unmapped memory.
///
/// `Vanished` if there are none: the kernel shows nothing of an address space after exit, and of a living one at least
/// the program. Each entry ends with its `VmFlags:` (fs/proc/task_mmu.c, `show_smap`).
pub fn regions(handle: &dyn ProcessHandle) -> Reading<Vec<Region>> {
    let smaps = handle.read("smaps")?;
    if smaps.is_empty() {
        return Err(Absent::Vanished);
    }
    let last = smaps.trim_ascii_end().rsplit(|&byte| byte == b'\n').next().unwrap_or_default();
    if !smaps.ends_with(b"\n") || !last.starts_with(b"VmFlags:") {
        return Err(Absent::Malformed(format!("smaps is cut off after {} bytes", smaps.len())));
    }
    parse::smaps(&smaps)
}

/// The addresses of the regions of a process that has its own memory. This reads one line for each region, while
/// [`regions`] makes the kernel walk all pages.
///
/// `Vanished` if there are none.
pub fn mapped_regions(handle: &dyn ProcessHandle) -> Reading<Vec<MapsEntry>> {
    let maps = handle.read("maps")?;
    if maps.is_empty() {
        return Err(Absent::Vanished);
    }
    parse::maps(&maps)
}

/// The number of regions of a process (bounded by `vm.max_map_count`).
pub fn region_count(handle: &dyn ProcessHandle) -> Reading<u64> {
    Ok(handle.read("maps")?.iter().filter(|&&byte| byte == b'\n').count() as u64)
}

/// The totals over the regions of a process.
pub fn rollup(handle: &dyn ProcessHandle) -> Reading<SmapsRollup> {
    Ok(parse::rollup(&handle.read("smaps_rollup")?))
}

/// Every process, including kernel threads; processes that could not be opened have the reason.
pub fn processes(host: &dyn Host) -> Reading<Vec<(Pid, Reading<ProcessFacts>)>> {
    Ok(host.pids()?.into_iter().map(|pid| (pid, host.open(pid).and_then(|handle| process(host, &*handle)))).collect())
}

/// Maps frames to NUMA nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NumaNodes {
    /// Number of frames of a memory block.
    block_frames: u64,
    /// Memory blocks with their node.
    blocks: BTreeMap<u64, u32>,
    /// Number of nodes with memory.
    node_count: usize,
    /// The first node with memory: that of all frames outside the known blocks.
    first_node: u32,
}

impl NumaNodes {
    /// Reads `/sys/devices/system/node`, where each node lists its memory blocks. A host without that directory has one
    /// node.
    pub fn read(host: &dyn Host) -> Reading<Self> {
        let names = match host.list("sys/devices/system/node") {
            Err(Absent::NotOnThisKernel) => return Ok(Self { node_count: 1, ..Self::default() }),
            names => names?,
        };
        let nodes: Vec<u32> = names.iter().filter_map(|name| name.strip_prefix("node")?.parse().ok()).collect();
        if nodes.len() <= 1 {
            return Ok(Self { node_count: 1, first_node: nodes.first().copied().unwrap_or(0), ..Self::default() });
        }
        let block_bytes = host.read("sys/devices/system/memory/block_size_bytes")?;
        let text = String::from_utf8_lossy(&block_bytes);
        let block_bytes = u64::from_str_radix(text.trim(), 16)
            .map_err(|_| Absent::Malformed(format!("block_size_bytes: {:?}", text.trim())))?;
        let mut blocks = BTreeMap::new();
        for &node in &nodes {
            for name in host.list(&format!("sys/devices/system/node/node{node}"))? {
                if let Some(block) = name.strip_prefix("memory").and_then(|number| number.parse().ok()) {
                    blocks.insert(block, node);
                }
            }
        }
        let with_memory: BTreeSet<u32> = blocks.values().copied().collect();
        let block_frames = (block_bytes / host.page_size().bytes()).max(1);
        let first_node = with_memory.first().copied().unwrap_or(0);
        Ok(Self { block_frames, blocks, node_count: with_memory.len().max(1), first_node })
    }

    /// The number of nodes with memory.
    pub fn node_count(&self) -> usize {
        self.node_count
    }

    /// The first frame of the memory block that a frame is in. No node begins or ends within a block. 0 on a host with
    /// one node with memory.
    pub fn block_start(&self, frame: Pfn) -> Pfn {
        if self.node_count <= 1 { Pfn(0) } else { Pfn(frame.0 - frame.0 % self.block_frames) }
    }

    /// The node of a frame; the first node with memory for a frame outside the known blocks.
    pub fn node_of_frame(&self, frame: Pfn) -> u32 {
        if self.node_count <= 1 {
            return self.first_node;
        }
        self.blocks.get(&(frame.0 / self.block_frames)).copied().unwrap_or(self.first_node)
    }
}

/// The CPUs that the cgroup of a thread permits (cpuset(7); Documentation/admin-guide/cgroup-v2.rst): those of its cpuset,
/// or in version 2 of the nearest group above it that has one. `None` if that cannot be read.
pub fn cpuset_cpus(host: &dyn Host, pid: Pid, tid: Pid) -> Option<IdSet> {
    let text = |path: &str| Some(String::from_utf8_lossy(&host.read(path).ok()?).trim().to_owned());
    let cgroup = text(&format!("proc/{pid}/task/{tid}/cpuset"))?;
    if let Some(cpus) = text(&format!("sys/fs/cgroup/cpuset{cgroup}/cpuset.effective_cpus")) {
        return cpus.parse().ok();
    }
    let groups = Path::new(&cgroup).ancestors();
    let cpus = groups.map(|group| {
        let group = group.to_string_lossy();
        text(&format!("sys/fs/cgroup{}/cpuset.cpus.effective", group.trim_end_matches('/')))
    });
    cpus.flatten().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_host::FakeHost;
    use crate::faulty_host::{FaultyHost, InjectedFault};

    #[test]
    fn domains_of_libvirt_are_all_known_or_none() {
        let host = FakeHost::booted();
        let domains = |host: &dyn Host| libvirt_domains(host).map(|domains| domains.len());
        assert_eq!(domains(&host), Ok(0), "no libvirt");
        let state = "<domstatus pid='7'><domain><name>web</name><uuid>u</uuid></domain></domstatus>\n";
        host.put_file("run/libvirt/qemu/web.xml", state);
        host.put_file("run/libvirt/qemu/other.xml", "<network/>\n");
        assert_eq!(domains(&host), Ok(1));
        let without = |why: Absent| {
            let fault = |path: &str| path.ends_with("/web.xml").then(|| InjectedFault::Absent(why.clone()));
            domains(&FaultyHost::new(&host, fault))
        };
        assert_eq!(without(Absent::Denied), Err(Absent::Denied));
        assert_eq!(without(Absent::Vanished), Ok(0), "it has ended");
    }

    #[test]
    fn frames_are_on_the_nodes_of_their_memory_blocks() {
        let node_of_frames = |nodes: &[(u32, &[u32])]| {
            let host = FakeHost::booted();
            host.put_file("sys/devices/system/memory/block_size_bytes", "8000000\n");
            for (node, blocks) in nodes {
                let folder = format!("sys/devices/system/node/node{node}");
                host.put_file(&format!("{folder}/cpulist"), "\n");
                blocks.iter().for_each(|block| host.put_file(&format!("{folder}/memory{block}/online"), "1\n"));
            }
            let nodes = NumaNodes::read(&host).unwrap();
            // A frame of block 0, of block 1, and of a block that no node lists.
            [0, 0x8000, 0x50_0000].map(|frame| nodes.node_of_frame(Pfn(frame)))
        };
        assert_eq!(node_of_frames(&[]), [0; 3], "a kernel without NUMA");
        assert_eq!(node_of_frames(&[(1, &[0]), (2, &[1])]), [1, 2, 1]);
        assert_eq!(node_of_frames(&[(0, &[]), (1, &[0, 1])]), [1; 3], "only node 1 has memory");
        assert_eq!(node_of_frames(&[(3, &[0, 1])]), [3; 3], "the only node");
    }

    #[test]
    fn cpus_of_a_cgroup_come_from_its_cpuset_or_from_a_group_above() {
        let host = FakeHost::booted();
        let cpus = |host: &FakeHost| cpuset_cpus(host, Pid(7), Pid(8)).map(|cpus| cpus.to_string());
        assert_eq!(cpus(&host), None);
        host.put_file("proc/7/task/8/cpuset", "/machine/web\n");
        assert_eq!(cpus(&host), None, "no cgroup file system");
        host.put_file("sys/fs/cgroup/cpuset.cpus.effective", "0-7\n");
        assert_eq!(cpus(&host).as_deref(), Some("0-7"), "version 2, the root");
        host.put_file("sys/fs/cgroup/machine/cpuset.cpus.effective", "0-3\n");
        assert_eq!(cpus(&host).as_deref(), Some("0-3"), "version 2, a group above");
        host.put_file("sys/fs/cgroup/cpuset/machine/web/cpuset.effective_cpus", "2\n");
        assert_eq!(cpus(&host).as_deref(), Some("2"), "version 1");
    }
}
