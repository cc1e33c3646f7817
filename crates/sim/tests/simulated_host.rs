//! A simulated host as other crates see it: its text goes through the parsers, its pages through the port.

use pagefold_base::ksm::Setting;
use pagefold_base::memory::{MemInfo, MemoryPolicy};
use pagefold_base::region::VmFlags;
use pagefold_base::{AddressRange, Bytes, IdSet, Pages, Pid, ProcessId};
use pagefold_census::{CensusOptions, ScanProgress, take_census};
use pagefold_host::action::{Action, ActionError, ActionOutcome, Exchange, MergeAdvice, MissedReason, ThreadId};
use pagefold_host::knob::Knob;
use pagefold_host::observe::NumaNodes;
use pagefold_host::page_state::{FrameLookup, PageState, walk_page_states};
use pagefold_host::{Host, PageContent, ReadMethod, elapsed_since, observe, parse};
use pagefold_sim::decide::host_state::{Exactness, ProcessIdentity};
use pagefold_sim::decide::ksmd::KsmSettings;
use pagefold_sim::decide::rules::KernelVersion;
use pagefold_sim::decide::scenario::{DEFAULT_HZ, HostSpec, default_costs};
use pagefold_sim::host::SimulatedHost;
use pagefold_sim::observation::{Observation, ObservedMemory, observe_machines};
use pagefold_sim::scenario::parse_scenario;
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

const MACHINE_PAGES: u64 = 2048;
const COMMON_PAGES: u64 = 600;
const OWN_PAGES: u64 = 300;
const ZERO_PAGES: u64 = 100;

fn spec() -> HostSpec {
    HostSpec {
        memory_pages: 1 << 20,
        used_pages: 10_000,
        cpus: 4,
        nodes: 1,
        distances: Vec::new(),
        kernel: KernelVersion { major: 6, minor: 18, stable: 0 },
        hz: DEFAULT_HZ,
        ksmd_cpu_ms: 0,
        ksm: KsmSettings { pages_to_scan: 1000, smart_scan: false, ..KsmSettings::default() },
    }
}

/// A host with two machines: contents that both have, contents of their own, and zeros.
fn host_with_two_machines() -> (SimulatedHost<'static>, [(Pid, AddressRange); 2]) {
    let host = SimulatedHost::new("a simulated host", spec(), default_costs());
    let machines = [("web", 1), ("db", 2)].map(|(name, number)| {
        let pid = host.start_process(ProcessIdentity::machine(name, number, "lab", MACHINE_PAGES, 2));
        let range = host.map(pid, MACHINE_PAGES, 0).unwrap();
        let pages = |first: u64, count: u64| AddressRange {
            start: range.start + first * 4096,
            end: range.start + (first + count) * 4096,
        };
        host.write(pid, pages(0, COMMON_PAGES), 1, true);
        host.write(pid, pages(COMMON_PAGES, OWN_PAGES), 10_000 * number, true);
        host.write(pid, pages(COMMON_PAGES + OWN_PAGES, ZERO_PAGES), 0, false);
        (pid, range)
    });
    (host, machines)
}

/// The memory of a host's processes, as a census finds it.
fn observe_memory(host: &dyn Host, max_order_keys: usize) -> Observation {
    let options = CensusOptions { max_order_keys, ..CensusOptions::default() };
    let (census, index) = take_census(host, &options, &ScanProgress::default(), &AtomicBool::new(false)).unwrap();
    observe_machines(host, &census, &index, None, ObservedMemory::All).unwrap()
}

#[test]
fn observed_contents_have_the_ranks_of_their_bytes() {
    let (host, machines) = host_with_two_machines();
    let observation = observe_memory(&host, usize::MAX);
    let ranks_of = |name: &str| {
        let machine = observation.host.machines.iter().find(|machine| machine.family == name).unwrap();
        machine.ranks.clone()
    };
    let expected = |first_own: u64| {
        let own = first_own..first_own + OWN_PAGES;
        (1..=COMMON_PAGES).chain(own).map(|rank| rank as u32).collect::<Vec<u32>>()
    };
    // The own contents of "web" begin with 10,000, and those of "db" with 20,000.
    assert!(ranks_of("web") == expected(COMMON_PAGES + 1) && ranks_of("db") == expected(COMMON_PAGES + OWN_PAGES + 1));
    // ksmd has merged the common pages: they have the keys of their frames.
    merge_all(&host, &machines);
    let merged = observe_memory(&host, usize::MAX);
    assert!(merged.merged_pages >= 2 * COMMON_PAGES && merged.host.machines == observation.host.machines);
    // Without room for the keys of all pages there are none.
    assert!(observe_memory(&host, 1000).host.machines.iter().all(|machine| machine.ranks.is_empty()));
}

fn write(host: &dyn Host, setting: Setting, value: &str) -> Result<(), ActionError> {
    host.apply(&Action::Write { knob: Knob::from(setting), value: value.to_owned() }).map(drop)
}

fn advise(host: &dyn Host, (pid, range): (Pid, AddressRange), advice: MergeAdvice) {
    let process = host.open(pid).unwrap().id();
    let outcome = host.apply(&Action::Advise { process, advice, ranges: vec![range] }).unwrap();
    assert_eq!(outcome.missed_ranges, []);
}

/// Enroll both machines and let ksmd scan until nothing more merges.
fn merge_all(host: &dyn Host, machines: &[(Pid, AddressRange)]) {
    machines.iter().for_each(|&machine| advise(host, machine, MergeAdvice::Mergeable));
    write(host, Setting::Run, "1").unwrap();
    host.sleep(Duration::from_secs(10));
    write(host, Setting::Run, "0").unwrap();
}

fn available(host: &dyn Host) -> Bytes {
    let MemInfo { available, .. } = observe::memory(host).unwrap();
    available.unwrap()
}

/// Pages by their state.
fn states(host: &dyn Host, (pid, range): (Pid, AddressRange)) -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    walk_page_states(host, &*host.open(pid).unwrap(), range, FrameLookup::Shared, |_, state| {
        let name = match state {
            PageState::Anonymous => "anonymous",
            PageState::Ksm(_) => "merged",
            PageState::ZeroPage { .. } => "zero page",
            PageState::Absent => "absent",
            PageState::Swapped | PageState::File | PageState::Hidden => "other",
        };
        *counts.entry(name).or_default() += 1;
    })
    .unwrap();
    counts
}

#[test]
fn text_of_processes_is_parsed() {
    let (host, [(pid, range), _]) = host_with_two_machines();
    let handle = host.open(pid).unwrap();
    let process = observe::process(&host, &*handle).unwrap();
    let vm = process.identity.vm.unwrap();
    assert_eq!((vm.name.as_deref(), vm.memory_bytes), (Some("web"), Some(MACHINE_PAGES * 4096)));
    assert_eq!((process.comm.as_str(), process.kernel_thread, process.uid), ("qemu-system-x86", false, Ok(107)));
    assert_eq!((process.ksm.merge_any, process.ksm.mergeable, process.ksm.rmap_items), (Ok(false), Ok(false), Ok(0)));
    let resident = Bytes((COMMON_PAGES + OWN_PAGES + ZERO_PAGES) * 4096);
    let regions = observe::regions(&*handle).unwrap();
    assert_eq!((regions.len(), regions[0].range, regions[0].rss), (1, range, resident));
    assert_eq!(observe::rollup(&*handle).unwrap().pss, Ok(resident));
    assert_eq!(parse::status(&handle.read("status").unwrap()).rss_anon, Ok(resident));
    assert_eq!(parse::statm(&handle.read("statm").unwrap()).unwrap().resident.0 * 4096, resident.0);
    assert!(handle.read("io").is_err(), "what is not simulated is missing");
}

#[test]
fn each_vcpu_has_a_thread() {
    let (host, [(pid, range), _]) = host_with_two_machines();
    let handle = host.open(pid).unwrap();
    let threads = || -> Vec<(u32, String, u64, u64)> {
        let mut threads = Vec::new();
        for tid in host.list(&format!("proc/{pid}/task")).unwrap() {
            let stat = parse::stat(&handle.read(&format!("task/{tid}/stat")).unwrap()).unwrap();
            assert_eq!((stat.start_time, stat.last_cpu.unwrap() < 4), (handle.id().start_time, true));
            let status = parse::status(&handle.read(&format!("task/{tid}/status")).unwrap());
            assert_eq!(status.allowed_cpus.unwrap().to_string(), "0-3");
            let exact = parse::schedstat(&handle.read(&format!("task/{tid}/schedstat")).unwrap()).unwrap().run_ns;
            threads.push((tid.parse::<u32>().unwrap() - pid.0, stat.comm, stat.utime, exact));
        }
        threads
    };
    let names: Vec<_> = threads().into_iter().map(|(number, comm, ..)| (number, comm)).collect();
    let expected = [(0, "qemu-system-x86"), (1, "CPU 0/KVM"), (2, "CPU 1/KVM")];
    assert_eq!(names, expected.map(|(number, comm)| (number, comm.to_owned())));
    let process_time = || observe::cpu_time_ns(&host, &*handle).unwrap();
    let (before, whole_before) = (threads(), process_time());
    host.write(pid, range, 50_000, true);
    let grown: Vec<u64> = threads().iter().zip(before).map(|(now, before)| now.3 - before.3).collect();
    assert_eq!(grown, [0, MACHINE_PAGES * 500, MACHINE_PAGES * 500], "each vCPU writes half of the pages");
    assert_eq!(process_time() - whole_before, MACHINE_PAGES * 1000);
    let stat = parse::stat(&handle.read("stat").unwrap()).unwrap();
    assert_eq!(stat.utime, process_time() / 10_000_000, "the file of the process has the time of all threads");
    let child = host.fork(pid).unwrap();
    assert_eq!(host.list(&format!("proc/{child}/task")).unwrap(), [child.to_string()], "a child has one thread");
    assert!(handle.read(&format!("task/{child}/stat")).is_err(), "a thread of another process");
}

#[test]
fn text_of_the_host_is_parsed() {
    let (host, _) = host_with_two_machines();
    let ksm = observe::ksm(&host).unwrap();
    assert_eq!((ksm.run, ksm.pages_to_scan, ksm.smart_scan), (Ok(0), Ok(1000), Ok(0)));
    assert_eq!((ksm.advisor_mode.as_deref(), ksm.general_profit), (Ok("none"), Ok(0)));
    assert_eq!(observe::online_cpu_count(&host), Ok(4));
    assert_eq!(observe::pressure(&host).unwrap().some.avg10, 0.0);
    let used = 10_000 + 2 * (COMMON_PAGES + OWN_PAGES + ZERO_PAGES);
    let memory = observe::memory(&host).unwrap();
    assert_eq!(memory.free, Ok(Bytes(((1 << 20) - used) * 4096)));
    assert_eq!(memory.anon, Ok(Bytes((used - 10_000) * 4096)));
    let wide = HostSpec { nodes: 3, distances: vec![vec![10, 12, 32], vec![12, 10, 30], vec![33, 30, 10]], ..spec() };
    let wide = SimulatedHost::new("three nodes", wide, default_costs());
    let distances = |host: &dyn Host, node| host.read(&format!("sys/devices/system/node/node{node}/distance")).unwrap();
    assert_eq!([0, 2].map(|node| distances(&wide, node)), [b"10 12 32\n", b"33 30 10\n"].map(|text| text.to_vec()));
    let two = SimulatedHost::new("two nodes", HostSpec { nodes: 2, ..spec() }, default_costs());
    assert_eq!(distances(&two, 1), b"21 10\n");
    let old = HostSpec { kernel: KernelVersion { major: 6, minor: 1, stable: 0 }, ..spec() };
    let old = observe::ksm(&SimulatedHost::new("old", old, default_costs())).unwrap();
    assert!(old.smart_scan.is_err() && old.advisor_mode.is_err() && old.ksm_zero_pages.is_err(), "{old:?}");
}

#[test]
fn equal_contents_have_equal_bytes() {
    let (host, machines) = host_with_two_machines();
    let mut pages: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
    for (pid, range) in machines {
        let handle = host.open(pid).unwrap();
        let runs = handle.resident(&[range]).unwrap();
        assert_eq!(runs.iter().map(|run| u64::from(run.pages)).sum::<u64>(), COMMON_PAGES + OWN_PAGES + ZERO_PAGES);
        let mut sink = |_, view: pagefold_host::PageView<'_>| match view.content {
            PageContent::Bytes(bytes) => *pages.entry(bytes.to_vec()).or_default() += 1,
            other => panic!("{other:?}"),
        };
        handle.contents(ReadMethod::ProcMem { detect_merged: true }, &runs, &mut sink).unwrap();
    }
    let with_copies = |copies| pages.values().filter(|&&count| count == copies).count() as u64;
    assert_eq!((with_copies(1), with_copies(2), with_copies(2 * ZERO_PAGES)), (2 * OWN_PAGES, COMMON_PAGES, 1));
    assert_eq!(pages[&vec![0; 4096]], 2 * ZERO_PAGES);
    assert!(host.own_cpu_time() > Duration::ZERO, "reading pages takes CPU time");
}

#[test]
fn merged_pages_are_seen_in_counters_and_page_tables() {
    let (host, machines) = host_with_two_machines();
    let before = available(&host);
    write(&host, Setting::UseZeroPages, "1").unwrap();
    merge_all(&host, &machines);
    let ksm = observe::ksm(&host).unwrap();
    assert_eq!((ksm.pages_shared, ksm.pages_sharing), (Ok(COMMON_PAGES), Ok(COMMON_PAGES)));
    assert_eq!(ksm.ksm_zero_pages, Ok(2 * ZERO_PAGES as i64));
    for machine in machines {
        let expected = [("merged", COMMON_PAGES), ("zero page", ZERO_PAGES), ("anonymous", OWN_PAGES)];
        let counts = states(&host, machine);
        expected.iter().for_each(|(name, count)| assert_eq!(counts[name], *count, "{counts:?}"));
        let handle = host.open(machine.0).unwrap();
        let region = &observe::regions(&*handle).unwrap()[0];
        assert!(region.flags.has(VmFlags::MERGEABLE));
        assert_eq!(region.ksm, Ok(Bytes(COMMON_PAGES * 4096)));
        assert_eq!(observe::rollup(&*handle).unwrap().pss, Ok(Bytes((COMMON_PAGES / 2 + OWN_PAGES) * 4096)));
        let frames: Vec<_> = handle.mappings(machine.1).unwrap().iter().filter_map(|entry| entry.frame).collect();
        assert_eq!(host.frame_mappings(&frames[..1]), Ok(vec![2]));
    }
    // Each zero page and each second copy is free; metadata takes 64 bytes a page with metadata.
    let items = 2 * (COMMON_PAGES + OWN_PAGES);
    let freed = COMMON_PAGES + 2 * ZERO_PAGES - (items * 64).div_ceil(4096);
    assert_eq!(available(&host), before + Bytes(freed * 4096));
}

#[test]
fn unenrolled_pages_are_copied_back() {
    let (host, machines) = host_with_two_machines();
    merge_all(&host, &machines);
    advise(&host, machines[0], MergeAdvice::Unmergeable);
    assert_eq!(states(&host, machines[0]).get("merged"), None);
    assert_eq!(observe::vmstat(&host).unwrap()["cow_ksm"], COMMON_PAGES + ZERO_PAGES);
    let whole = Action::MergeAny { process: host.open(machines[1].0).unwrap().id(), enable: true };
    host.apply(&whole).unwrap();
    assert_eq!(host.open(machines[1].0).unwrap().ask_merge_any(), Ok(true));
    host.exit(machines[1].0);
    assert_eq!(host.apply(&whole), Err(ActionError::Vanished));
}

#[test]
fn settings_have_the_checks_of_the_kernel() {
    let (host, machines) = host_with_two_machines();
    merge_all(&host, &machines);
    assert!(matches!(write(&host, Setting::MaxPageSharing, "300"), Err(ActionError::Busy(_))));
    assert!(matches!(write(&host, Setting::Run, "3"), Err(ActionError::Failed(_))));
    write(&host, Setting::AdvisorMode, "scan-time").unwrap();
    assert_eq!(observe::ksm(&host).unwrap().pages_to_scan, Ok(500), "the start value of the advisor");
    assert!(matches!(write(&host, Setting::PagesToScan, "7"), Err(ActionError::Failed(_))));
    write(&host, Setting::AdvisorMode, "none").unwrap();
    assert_eq!(observe::ksm(&host).unwrap().pages_to_scan, Ok(100));
    let collapse = Action::Collapse { process: host.open(machines[0].0).unwrap().id(), ranges: Vec::new() };
    assert!(matches!(host.apply(&collapse), Err(ActionError::Unsupported(_))));
}

#[test]
fn stopping_ksmd_waits_for_its_batch() {
    let (host, machines) = host_with_two_machines();
    machines.iter().for_each(|&machine| advise(&host, machine, MergeAdvice::Mergeable));
    write(&host, Setting::PagesToScan, "1000000").unwrap();
    write(&host, Setting::Run, "1").unwrap();
    let start = host.now();
    host.sleep(Duration::from_micros(10));
    write(&host, Setting::Run, "0").unwrap();
    let elapsed = elapsed_since(&host, start);
    assert_eq!(host.ksmd_counters().pages_scanned, 2 * (COMMON_PAGES + OWN_PAGES + ZERO_PAGES), "one whole scan");
    assert!(elapsed > Duration::from_millis(1), "{elapsed:?}");
    host.sleep(Duration::from_secs(5));
    assert_eq!(host.ksmd_counters().full_scans, 1);
}

/// A host of two nodes of 4096 pages above the least, with one machine on node 0. Its first 1024 pages are huge.
fn host_with_two_nodes() -> (SimulatedHost<'static>, ProcessId, AddressRange) {
    let spec = HostSpec { memory_pages: 2 * 4096, used_pages: 0, nodes: 2, ..spec() };
    let host = SimulatedHost::new("two nodes", spec, default_costs());
    let pid = host.start_process(ProcessIdentity::machine("web", 1, "lab", MACHINE_PAGES, 2));
    let range = host.map(pid, MACHINE_PAGES, 0).unwrap();
    [0, 512].into_iter().for_each(|page| host.fault_huge_page(pid, range.start + page * 4096));
    host.write(pid, pages(range, 0, 1536), 1, true);
    let process = host.open(pid).unwrap().id();
    (host, process, range)
}

fn pages(range: AddressRange, first: u64, count: u64) -> AddressRange {
    AddressRange { start: range.start + first * 4096, end: range.start + (first + count) * 4096 }
}

/// The node of each page, from the frames in page tables as the map reads them, which is also that of the kernel's call.
fn nodes_of_pages(host: &dyn Host, process: ProcessId, range: AddressRange) -> Vec<Option<u32>> {
    let handle = host.open(process.pid).unwrap();
    let known = NumaNodes::read(host).unwrap();
    let entries = handle.mappings(range).unwrap();
    let by_frame: Vec<Option<u32>> =
        entries.iter().map(|entry| entry.frame.map(|frame| known.node_of_frame(frame))).collect();
    assert_eq!(handle.page_nodes(range).unwrap(), by_frame);
    by_frame
}

fn free_pages(host: &dyn Host, node: u32) -> u64 {
    let meminfo = host.read(&format!("sys/devices/system/node/node{node}/meminfo")).unwrap();
    let text = String::from_utf8(meminfo).unwrap();
    let line = text.lines().find(|line| line.contains("MemFree:")).unwrap();
    line.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap() / 4
}

fn move_pages(host: &dyn Host, process: ProcessId, range: AddressRange, node: u32) -> ActionOutcome {
    host.apply(&Action::MovePages { process, ranges: vec![range], node }).unwrap()
}

#[test]
fn pages_move_with_their_frames_and_their_memory() {
    let (host, process, range) = host_with_two_nodes();
    let free = [0, 1].map(|node| free_pages(&host, node));
    let numa_maps = || String::from_utf8(host.open(process.pid).unwrap().read("numa_maps").unwrap()).unwrap();
    let contents = |host: &SimulatedHost<'_>| states(host, (process.pid, range));
    let before = contents(&host);
    // The range begins within the second huge page, which moves as a whole.
    let moved = move_pages(&host, process, pages(range, 1000, 100), 1);
    assert_eq!((moved.moved_pages, moved.missed_ranges, moved.unchanged), (Pages(512 + 76), Vec::new(), false));
    let nodes = nodes_of_pages(&host, process, range);
    assert!(nodes[..512].iter().all(|node| *node == Some(0)) && nodes[512..1100].iter().all(|node| *node == Some(1)));
    assert!(nodes[1100..1536].iter().all(|node| *node == Some(0)) && nodes[1536..].iter().all(Option::is_none));
    assert_eq!([0, 1].map(|node| free_pages(&host, node)), [free[0] + 588, free[1] - 588]);
    assert!(
        numa_maps().ends_with(" default anon=1536 dirty=1536 N0=948 N1=588 kernelpagesize_kB=4\n"),
        "{}",
        numa_maps()
    );
    assert_eq!(numa_maps().lines().count(), 1, "the kernel shows one region");
    assert_eq!(observe::regions(&*host.open(process.pid).unwrap()).unwrap().len(), 1);
    let again = move_pages(&host, process, pages(range, 1000, 100), 1);
    assert!(again.unchanged && again.moved_pages == Pages(0), "{again:?}");
    move_pages(&host, process, range, 0);
    assert_eq!(nodes_of_pages(&host, process, range)[..1536], [Some(0); 1536]);
    assert_eq!(([0, 1].map(|node| free_pages(&host, node)), contents(&host)), (free, before));
    let elsewhere = Action::MovePages { process, ranges: vec![range], node: 2 };
    assert!(matches!(host.apply(&elsewhere), Err(ActionError::Unsupported(_))));
}

#[test]
fn full_node_takes_whole_huge_pages_only() {
    let (host, process, range) = host_with_two_nodes();
    let filler = host.start_process(ProcessIdentity::machine("filler", 2, "lab", 4096, 1));
    let filled = host.map(filler, 4096 - 700, 1).unwrap();
    host.write(filler, filled, 10_000, true);
    assert_eq!(free_pages(&host, 1), 700);
    let moved = move_pages(&host, process, range, 1);
    let why = MissedReason::Refused("the node has no free memory".to_owned());
    assert_eq!((moved.moved_pages, moved.missed_ranges), (Pages(512), vec![(pages(range, 512, 1024), why)]));
    assert_eq!(free_pages(&host, 1), 700 - 512);
}

#[test]
fn merged_and_forked_pages_stay_on_their_node() {
    let spec = HostSpec { nodes: 2, ..spec() };
    let host = SimulatedHost::new("two nodes", spec, default_costs());
    let machines = [1, 2].map(|number| {
        let pid = host.start_process(ProcessIdentity::machine("web", number, "lab", MACHINE_PAGES, 1));
        let range = host.map(pid, MACHINE_PAGES, 0).unwrap();
        host.write(pid, pages(range, 0, 100), 1, true);
        host.write(pid, pages(range, 100, 50), 10_000 * number, true);
        (pid, range)
    });
    merge_all(&host, &machines);
    let (pid, range) = machines[0];
    let process = host.open(pid).unwrap().id();
    let merged = host.ksmd_counters();
    let moved = move_pages(&host, process, range, 1);
    let missed = vec![(pages(range, 0, 100), MissedReason::MappedSeveralTimes)];
    assert_eq!((moved.moved_pages, moved.missed_ranges), (Pages(50), missed));
    let nodes = nodes_of_pages(&host, process, pages(range, 0, 150));
    assert_eq!((&nodes[..100], &nodes[100..]), (&[Some(0); 100][..], &[Some(1); 50][..]));
    assert_eq!(host.ksmd_counters(), merged, "a move does not unmerge");
    let child = host.fork(pid).unwrap();
    let back = move_pages(&host, process, range, 0);
    assert_eq!((back.moved_pages, back.missed_ranges.len()), (Pages(0), 1), "the child maps the pages, too");
    host.exit(child);
    assert_eq!(move_pages(&host, process, range, 0).moved_pages, Pages(50));
    assert_eq!(nodes_of_pages(&host, process, pages(range, 0, 150)), [Some(0); 150]);
}

#[test]
fn threads_have_the_cpus_that_they_are_given() {
    let (host, process, _) = host_with_two_nodes();
    let tid = Pid(process.pid.0 + 2);
    let cpus = |text: &str| -> IdSet { text.parse().unwrap() };
    let thread = ThreadId { process, tid, start_time: process.start_time };
    let set = |thread: ThreadId, from: &str, to: &str| {
        host.apply(&Action::SetAffinity { thread, cpus: Exchange { from: cpus(from), to: cpus(to) }, pin: None })
    };
    let shown = |tid: Pid| {
        let handle = host.open(process.pid).unwrap();
        let status = parse::status(&handle.read(&format!("task/{tid}/status")).unwrap());
        let stat = parse::stat(&handle.read(&format!("task/{tid}/stat")).unwrap()).unwrap();
        (status.allowed_cpus.unwrap().to_string(), stat.last_cpu.unwrap())
    };
    assert!(!set(thread, "0-3", "2-3").unwrap().unchanged);
    let (allowed, last_cpu) = shown(tid);
    assert!(allowed == "2-3" && last_cpu >= 2, "{allowed}, CPU {last_cpu}");
    assert_eq!(shown(process.pid).0, "0-3", "other threads stay");
    assert!(set(thread, "0-3", "2-3").unwrap().unchanged);
    assert!(matches!(set(thread, "0-3", "1"), Err(ActionError::ChangedByOthers(_))));
    assert!(matches!(set(thread, "2-3", "9"), Err(ActionError::Failed(_))), "offline");
    set(thread, "2-3", "0-3").unwrap();
    assert_eq!(shown(tid).0, "0-3");
    assert_eq!(set(ThreadId { tid: Pid(tid.0 + 1), ..thread }, "0-3", "1"), Err(ActionError::Vanished));
    assert_eq!(set(ThreadId { start_time: 1, ..thread }, "0-3", "1"), Err(ActionError::Vanished));
}

#[test]
fn memory_policy_is_shown_and_decides_where_new_pages_come_from() {
    let (host, process, range) = host_with_two_nodes();
    let (default, prefer) = (MemoryPolicy::Default, MemoryPolicy::Prefer(1));
    let set = |from, to, ranges: Vec<AddressRange>| {
        host.apply(&Action::SetMemoryPolicy { process, ranges, policy: Exchange { from, to } }).unwrap()
    };
    let shown = || parse::memory_policies(&host.open(process.pid).unwrap().read("numa_maps").unwrap());
    assert!(!set(default, prefer, vec![range]).unchanged);
    assert_eq!(shown(), [(range.start, "prefer:1".to_owned())].into());
    host.write(process.pid, pages(range, 1400, 300), 5000, true);
    let nodes = nodes_of_pages(&host, process, pages(range, 1400, 300));
    assert_eq!((&nodes[..136], &nodes[136..]), (&[Some(0); 136][..], &[Some(1); 164][..]), "present pages stay");
    assert!(set(default, prefer, vec![range]).unchanged);
    let other = set(default, MemoryPolicy::Prefer(0), vec![range]);
    assert_eq!(other.missed_ranges, [(range, MissedReason::OtherPolicy("prefer:1".to_owned()))]);
    let unmapped = AddressRange { start: range.end, end: range.end + 4096 };
    assert_eq!(set(default, prefer, vec![unmapped]).missed_ranges, [(unmapped, MissedReason::NotMapped)]);
    set(prefer, default, vec![range]);
    assert_eq!(shown(), [(range.start, "default".to_owned())].into());
    host.write(process.pid, pages(range, 1700, 100), 9000, true);
    assert_eq!(nodes_of_pages(&host, process, pages(range, 1700, 100)), [Some(0); 100], "as before");
}

const SCENARIO: &str = r#"description = "two machines, then a third"
duration = "10m"

[host]
memory = "1 GiB"
cpus = 2
kernel = "6.18"

[[template]]
name = "small"
size = "8 MiB"
common = 0.5
unique = 0.25
writes = [{ content = "unique", share = 0.1, pages_per_second = 10.0 }]

[[machines]]
name = "first"
template = "small"
count = 2
lifetime = "5m"

[[machines]]
name = "later"
template = "small"
start = "1m"
"#;

#[test]
fn vcpus_run_on_the_node_of_their_class() {
    let text = SCENARIO
        .replace("cpus = 2", "cpus = 8\nnodes = 2")
        .replace("size = \"8 MiB\"", "size = \"8 MiB\"\nvcpus = 3")
        .replace("count = 2", "count = 2\nnode = 0\nvcpu_node = 1");
    let scenario = parse_scenario(&text).unwrap();
    let host = SimulatedHost::with_scenario("a scenario", &scenario, scenario.seed, Exactness::Exact);
    assert_eq!(host.pids().unwrap().len(), 1 + 2);
    for pid in host.pids().unwrap().split_off(1) {
        let cpu = |tid: &String| {
            let stat = host.read(&format!("proc/{pid}/task/{tid}/stat")).unwrap();
            parse::stat(&stat).unwrap().last_cpu.unwrap()
        };
        let cpus: Vec<u32> = host.list(&format!("proc/{pid}/task")).unwrap().iter().map(cpu).collect();
        let distinct: std::collections::BTreeSet<u32> = cpus.iter().copied().collect();
        assert_eq!(distinct, (4..8).collect(), "a CPU of node 1 for each thread");
    }
}

#[test]
fn machines_of_a_scenario_come_and_go() {
    let scenario = parse_scenario(SCENARIO).unwrap();
    let host = SimulatedHost::with_scenario("a scenario", &scenario, scenario.seed, Exactness::Exact);
    let names = || -> Vec<String> {
        let processes = observe::processes(&host).unwrap().into_iter();
        processes.filter_map(|(_, process)| process.unwrap().identity.vm?.name).collect()
    };
    assert_eq!(names(), ["first-1", "first-2"]);
    let first = host.pids().unwrap()[1];
    let cpu_time = |pid| observe::cpu_time_ns(&host, &*host.open(pid).unwrap()).unwrap();
    let cpu_time_at_start = cpu_time(first);
    host.sleep(Duration::from_secs(61));
    assert_eq!(names(), ["first-1", "first-2", "later-1"]);
    assert!(cpu_time(first) > cpu_time_at_start, "it writes");
    host.sleep(Duration::from_secs(240));
    assert_eq!(names(), ["later-1"]);
    assert_eq!(host.workload_failure(), None);
}
