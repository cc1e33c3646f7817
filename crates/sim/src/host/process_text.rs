//! The files of `/proc/PID`, as the kernel prints them (fs/proc/array.c, task_mmu.c, base.c; 6.18).

use super::host_text::number_range;
use crate::decide::host_state::{
    BOOT_TICKS, HostProcess, HostState, HostThread, KSMD_PID, KSMD_START_TICKS, MappedRun, NS_PER_TICK, PAGE_BYTES,
    ShownRegion,
};
use crate::decide::memory::PageEntry;
use pagefold_base::{Absent, AddressRange, IdSet, Pid, Reading};
use std::fmt::Write;

/// Flags of kernel threads: `PF_KTHREAD` and others (include/linux/sched.h).
const KERNEL_THREAD_FLAGS: u64 = 0x0020_8040;
/// Flags of a process: `PF_RANDOMIZE`.
const PROCESS_FLAGS: u64 = 0x0040_0000;
/// Fraction bits of a proportional share (`PSS_SHIFT`).
const PSS_SHIFT: u32 = 12;

/// What a range of memory has, in pages.
#[derive(Clone, Copy, Debug, Default)]
struct RegionTotals {
    /// Pages that no other process maps.
    private: u64,
    /// Pages that several page table entries map.
    shared: u64,
    huge: u64,
    merged: u64,
    /// The proportional share, in bytes with [`PSS_SHIFT`] fraction bits.
    scaled_share: u64,
}

impl RegionTotals {
    fn resident(&self) -> u64 {
        self.private + self.shared
    }

    fn add(&mut self, host: &HostState<'_>, run: &MappedRun) {
        const WHOLE_SHARE: u64 = PAGE_BYTES << PSS_SHIFT;
        match run.entry {
            PageEntry::Absent | PageEntry::ZeroPage | PageEntry::KsmZeroPage => {}
            PageEntry::Private(_) | PageEntry::HugePart(_) => {
                self.private += run.pages;
                self.scaled_share += run.pages * WHOLE_SHARE;
                self.huge += if matches!(run.entry, PageEntry::HugePart(_)) { run.pages } else { 0 };
            }
            PageEntry::Frame(first) => {
                let (frames, pages_each) = if run.ascends { (run.pages, 1) } else { (1, run.pages) };
                for frame in (first..).take(frames as usize) {
                    let frame = host.model.memory().frame(frame);
                    let is_shared = frame.mappings > 1;
                    *if is_shared { &mut self.shared } else { &mut self.private } += pages_each;
                    self.merged += if frame.is_merged { pages_each } else { 0 };
                    self.scaled_share += pages_each * (WHOLE_SHARE / u64::from(frame.mappings.max(1)));
                }
            }
        }
    }

    /// The lines from `Rss:` on of `smaps` and `smaps_rollup`.
    fn lines(&self, is_rollup: bool) -> String {
        let kib = |pages: u64| pages * (PAGE_BYTES >> 10);
        let share = self.scaled_share >> (10 + PSS_SHIFT);
        let mut figures = vec![("Rss", kib(self.resident())), ("Pss", share), ("Pss_Dirty", share)];
        if is_rollup {
            figures.extend([("Pss_Anon", share), ("Pss_File", 0), ("Pss_Shmem", 0)]);
        }
        figures.extend([
            ("Shared_Clean", 0),
            ("Shared_Dirty", kib(self.shared)),
            ("Private_Clean", 0),
            ("Private_Dirty", kib(self.private)),
            ("Referenced", kib(self.resident())),
            ("Anonymous", kib(self.resident())),
            ("KSM", kib(self.merged)),
            ("LazyFree", 0),
            ("AnonHugePages", kib(self.huge)),
            ("ShmemPmdMapped", 0),
            ("FilePmdMapped", 0),
            ("Shared_Hugetlb", 0),
            ("Private_Hugetlb", 0),
            ("Swap", 0),
            ("SwapPss", 0),
            ("Locked", 0),
        ]);
        figures.iter().map(|(name, kib)| format!("{:<16}{kib:>8} kB\n", format!("{name}:"))).collect()
    }
}

/// A file of a process, and the number of page table entries that the kernel walks for it.
pub(super) fn read(host: &HostState<'_>, pid: Pid, file: &str) -> Reading<(Vec<u8>, u64)> {
    if pid == KSMD_PID {
        return read_of_ksmd(host, file).map(|text| (text.into_bytes(), 0));
    }
    let process = host.processes.get(&pid).ok_or(Absent::Vanished)?;
    let (file, tid) = match file.strip_prefix("task/").and_then(|rest| rest.split_once('/')) {
        Some((tid, file)) => (file, Some(Pid(tid.parse().map_err(|_| Absent::Vanished)?))),
        None => (file, None),
    };
    // What is of one thread is that of the main thread for the process.
    let thread = process.threads.get(&tid.unwrap_or(pid)).ok_or(Absent::Vanished)?;
    let pages = host.memory_of(process).totals.anonymous();
    let plain = |text: String| Ok((text.into_bytes(), 0));
    match file {
        "stat" => plain(stat(host, (pid, process), (tid, thread))),
        "status" => plain(status(host, (pid, process), (tid.unwrap_or(pid), thread))),
        "comm" => plain(format!("{}\n", thread.comm)),
        "schedstat" => plain(format!("{} 0 1\n", thread.cpu_ns)),
        "cpuset" => plain("/\n".to_owned()),
        "cgroup" => plain(format!("0::{}\n", process.identity.cgroup)),
        _ if tid.is_some() => Err(Absent::NotOnThisKernel),
        "statm" => plain(format!("{} {pages} 0 0 0 {} 0\n", mapped_pages(host, process), mapped_pages(host, process))),
        "cmdline" => plain(process.identity.arguments.iter().map(|argument| format!("{argument}\0")).collect()),
        "environ" => plain(String::new()),
        "maps" => plain(maps(host, process)),
        "smaps" => Ok((smaps(host, process).into_bytes(), pages)),
        "smaps_rollup" => Ok((smaps_rollup(host, process).into_bytes(), pages)),
        "numa_maps" => Ok((numa_maps(host, process).into_bytes(), pages)),
        "ksm_stat" => plain(ksm_stat(host, process)),
        "ksm_merging_pages" => plain(format!("{}\n", host.memory_of(process).merging_pages)),
        _ => Err(Absent::NotOnThisKernel),
    }
}

fn read_of_ksmd(host: &HostState<'_>, file: &str) -> Reading<String> {
    let cpu_ns = host.ksmd.cpu_ns();
    let state = if host.ksmd.is_asleep() { "S (sleeping)" } else { "R (running)" };
    match file.strip_prefix(&format!("task/{KSMD_PID}/")).unwrap_or(file) {
        "stat" => Ok(stat_line(&StatLine {
            pid: KSMD_PID,
            process: KSMD_PID,
            comm: "ksmd",
            state: state.chars().next().unwrap_or('S'),
            parent: 2,
            flags: KERNEL_THREAD_FLAGS,
            page_faults: 0,
            user_ticks: 0,
            system_ticks: cpu_ns / NS_PER_TICK,
            threads: 1,
            start_ticks: KSMD_START_TICKS,
            last_cpu: 0,
            mapped_bytes: 0,
            resident_pages: 0,
        })),
        "status" => Ok(format!(
            "Name:\tksmd\nState:\t{state}\nTgid:\t{KSMD_PID}\nPid:\t{KSMD_PID}\nPPid:\t2\nUid:\t0\t0\t0\t0\n\
             Gid:\t0\t0\t0\t0\nKthread:\t1\nThreads:\t1\nSeccomp:\t0\nvoluntary_ctxt_switches:\t{}\n\
             nonvoluntary_ctxt_switches:\t0\n",
            host.ksmd.sleeps()
        )),
        "comm" => Ok("ksmd\n".to_owned()),
        "schedstat" => Ok(format!("{cpu_ns} 0 1\n")),
        "cgroup" => Ok("0::/\n".to_owned()),
        "statm" => Ok("0 0 0 0 0 0 0\n".to_owned()),
        "ksm_merging_pages" => Ok("0\n".to_owned()),
        // The kernel prints nothing of a thread without memory.
        "cmdline" | "environ" | "maps" | "smaps" | "numa_maps" | "ksm_stat" => Ok(String::new()),
        "smaps_rollup" => Err(Absent::Vanished),
        _ => Err(Absent::NotOnThisKernel),
    }
}

struct StatLine<'a> {
    pid: Pid,
    /// The process of the thread.
    process: Pid,
    comm: &'a str,
    state: char,
    parent: u32,
    flags: u64,
    page_faults: u64,
    user_ticks: u64,
    system_ticks: u64,
    threads: usize,
    start_ticks: u64,
    last_cpu: u32,
    mapped_bytes: u64,
    resident_pages: u64,
}

fn stat_line(stat: &StatLine<'_>) -> String {
    let StatLine { pid, process, comm, state, parent, flags, page_faults, user_ticks, system_ticks, .. } = stat;
    let StatLine { threads, start_ticks, last_cpu, mapped_bytes, resident_pages, .. } = stat;
    format!(
        "{pid} ({comm}) {state} {parent} {process} {process} 0 -1 {flags} {page_faults} 0 0 0 {user_ticks} \
         {system_ticks} 0 0 20 0 {threads} 0 {start_ticks} {mapped_bytes} {resident_pages} 18446744073709551615 0 0 0 0 0 \
         0 0 0 0 0 0 0 17 {last_cpu} 0 0 0 0 0 0 0 0 0 0 0 0 0\n"
    )
}

/// The file of a process, or of one of its threads. Faults are counted for the process.
fn stat(
    host: &HostState<'_>,
    (pid, process): (Pid, &HostProcess),
    (tid, thread): (Option<Pid>, &HostThread),
) -> String {
    stat_line(&StatLine {
        pid: tid.unwrap_or(pid),
        process: pid,
        comm: &thread.comm,
        state: 'S',
        parent: 1,
        flags: PROCESS_FLAGS,
        page_faults: if tid.is_none() { process.page_faults } else { 0 },
        user_ticks: if tid.is_none() { process.cpu_ns() } else { thread.cpu_ns } / NS_PER_TICK,
        system_ticks: 0,
        threads: process.threads.len(),
        start_ticks: process.start_ticks,
        last_cpu: thread.last_cpu,
        mapped_bytes: mapped_pages(host, process) * PAGE_BYTES,
        resident_pages: host.memory_of(process).totals.anonymous(),
    })
}

fn mapped_pages(host: &HostState<'_>, process: &HostProcess) -> u64 {
    host.memory_of(process).vmas.values().map(|vma| vma.end() - vma.start).sum()
}

fn status(host: &HostState<'_>, (pid, process): (Pid, &HostProcess), (tid, thread): (Pid, &HostThread)) -> String {
    let kib = |pages: u64| pages * (PAGE_BYTES >> 10);
    let (mapped, resident) = (kib(mapped_pages(host, process)), kib(host.memory_of(process).totals.anonymous()));
    let uid = process.identity.uid;
    let mut text = format!(
        "Name:\t{}\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t{pid}\nNgid:\t0\nPid:\t{tid}\nPPid:\t1\nTracerPid:\t0\n\
         Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nGid:\t{uid}\t{uid}\t{uid}\t{uid}\nFDSize:\t64\nNStgid:\t{pid}\nNSpid:\t{tid}\n\
         Kthread:\t0\n",
        thread.comm
    );
    for (name, kib) in [
        ("VmPeak", mapped),
        ("VmSize", mapped),
        ("VmLck", 0),
        ("VmPin", 0),
        ("VmHWM", resident),
        ("VmRSS", resident),
        ("RssAnon", resident),
        ("RssFile", 0),
        ("RssShmem", 0),
        ("VmSwap", 0),
    ] {
        let _ = writeln!(text, "{name}:\t{kib:>8} kB");
    }
    let _ = write!(
        text,
        "Threads:\t{}\nNoNewPrivs:\t0\nSeccomp:\t0\nSeccomp_filters:\t0\nCpus_allowed_list:\t{}\n\
         Mems_allowed_list:\t{}\nvoluntary_ctxt_switches:\t1\nnonvoluntary_ctxt_switches:\t0\n",
        process.threads.len(),
        thread.allowed_cpus.as_ref().map_or_else(|| number_range(host.spec.cpus.into()), IdSet::to_string),
        number_range(host.spec.nodes.into()),
    );
    text
}

fn maps_line(region: &ShownRegion<'_>) -> String {
    let AddressRange { start, end } = region.range();
    format!("{start:x}-{end:x} rw-p 00000000 00:00 0 \n")
}

fn maps(host: &HostState<'_>, process: &HostProcess) -> String {
    host.shown_regions(process).iter().map(maps_line).collect()
}

fn totals_of(host: &HostState<'_>, process: &HostProcess, range: AddressRange) -> RegionTotals {
    let mut totals = RegionTotals::default();
    host.mapped_runs(process, range).iter().for_each(|run| totals.add(host, run));
    totals
}

fn smaps(host: &HostState<'_>, process: &HostProcess) -> String {
    let mut text = String::new();
    for region in host.shown_regions(process) {
        let size = (region.range().end - region.range().start) >> 10;
        let flag = if region.is_mergeable() { " mg" } else { "" };
        let figures = totals_of(host, process, region.range()).lines(false);
        let _ = write!(
            text,
            "{}Size:           {size:>8} kB\nKernelPageSize:        4 kB\nMMUPageSize:           4 kB\n{figures}\
             THPeligible:           1\nVmFlags: rd wr mr mw me ac sd{flag} \n",
            maps_line(&region)
        );
    }
    text
}

fn smaps_rollup(host: &HostState<'_>, process: &HostProcess) -> String {
    let regions = host.shown_regions(process);
    let (start, end) = (
        regions.first().map_or(0, |region| region.range().start),
        regions.last().map_or(0, |region| region.range().end),
    );
    let whole = AddressRange { start, end };
    format!(
        "{start:x}-{end:x} ---p 00000000 00:00 0                          [rollup]\n{}",
        totals_of(host, process, whole).lines(true)
    )
}

fn numa_maps(host: &HostState<'_>, process: &HostProcess) -> String {
    let line = |region: &ShownRegion<'_>| {
        let mut by_node = vec![0; usize::from(host.spec.nodes)];
        for run in host.mapped_runs(process, region.range()) {
            let counted_alone = run.ascends && matches!(run.entry, PageEntry::Frame(_));
            let pages_each = if counted_alone { 1 } else { run.pages };
            for offset in (0..run.pages).step_by(pages_each as usize) {
                if !matches!(run.entry, PageEntry::ZeroPage | PageEntry::KsmZeroPage) {
                    let node = host.model.memory().node_of(process.model_id, run.page + offset);
                    by_node[usize::from(node)] += pages_each;
                }
            }
        }
        let policy = region.parts[0].policy;
        let resident: u64 = by_node.iter().sum();
        let nodes = by_node.iter().enumerate().filter(|(_, pages)| **pages > 0);
        let nodes: String = nodes.map(|(node, pages)| format!(" N{node}={pages}")).collect();
        let start = region.range().start;
        match resident {
            0 => format!("{start:x} {policy}\n"),
            _ => format!("{start:x} {policy} anon={resident} dirty={resident}{nodes} kernelpagesize_kB=4\n"),
        }
    };
    host.shown_regions(process).iter().map(line).collect()
}

/// What each kernel adds is in the header of `host::parse::ksm`.
fn ksm_stat(host: &HostState<'_>, process: &HostProcess) -> String {
    let counters = host.model.process_counters(process.model_id);
    let version = (host.spec.kernel.major, host.spec.kernel.minor);
    let mut text = format!("ksm_rmap_items {}\n", counters.ksm_rmap_items);
    if version >= (6, 6) {
        let _ = writeln!(text, "ksm_zero_pages {}", counters.ksm_zero_pages);
    }
    if version >= (6, 4) {
        let (merging, profit) = (counters.ksm_merging_pages, counters.ksm_process_profit);
        let _ = writeln!(text, "ksm_merging_pages {merging}\nksm_process_profit {profit}");
    }
    if version >= (6, 14) {
        let word = |is_true: bool| if is_true { "yes" } else { "no" };
        let is_mergeable = host.memory_of(process).vmas.values().any(|vma| vma.is_mergeable);
        let (whole, any) = (word(process.merges_any), word(is_mergeable));
        let _ = writeln!(text, "ksm_merge_any: {whole}\nksm_mergeable: {any}");
    }
    text
}

/// `/proc/uptime`.
pub(super) fn uptime(host: &HostState<'_>) -> String {
    let seconds = (BOOT_TICKS * NS_PER_TICK + host.now_ns) as f64 / 1e9;
    format!("{seconds:.2} {:.2}\n", seconds * f64::from(host.spec.cpus))
}
