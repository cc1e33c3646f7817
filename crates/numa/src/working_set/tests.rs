//! Measurements on a host in memory.

use super::*;
use crate::decide::plan::{self, NodeCapacity, Pattern, PlacementProblem, PlannedPart, PlannedVm};
use crate::decide::pricing::Prices;
use crate::decide::working_set::weight_by_working_sets;
use pagefold_base::Pid;
use pagefold_host::access_monitor::KDAMONDS_DIRECTORY;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::resource::ResourceClass;
use std::path::Path;

const MIB: u64 = 1 << 20;
const START: u64 = 0x10_0000;
const DURATION: Duration = Duration::from_secs(10);

/// A host with DAMON and processes with regions of 64 MiB, of which so many percent are accessed.
fn host(processes: &[(u32, &[u64])]) -> FakeHost {
    let host = FakeHost::booted();
    host.enable_virtual_time();
    host.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "0");
    for (pid, percents) in processes {
        host.set_cpu_ticks(*pid, 0);
        let mut smaps = String::new();
        for (number, percent) in percents.iter().enumerate() {
            let start = START + 128 * MIB * number as u64;
            let kib = 64 * MIB / 1024;
            smaps += &format!("{start:x}-{:x} rw-p 00000000 00:00 0 \n", start + 64 * MIB);
            smaps += &format!("Rss: {kib} kB\nAnonymous: {kib} kB\nVmFlags: rd wr\n");
            host.set_accessed_percent(*pid, start, *percent);
        }
        host.put_file(&format!("proc/{pid}/smaps"), &smaps);
    }
    host
}

fn machine(pid: u32, parts: Vec<VirtualNode>) -> MachineToMeasure {
    MachineToMeasure { process: ProcessId { pid: Pid(pid), start_time: 1 }, parts }
}

fn measure_on(
    host: &FakeHost,
    directory: &Path,
    machines: &[MachineToMeasure],
    stop: bool,
) -> Result<Vec<Vec<WorkingSet>>, MeasureError> {
    let (mut session, ..) = Session::begin(host, directory, ResourceClass::Settings).unwrap();
    measure(&mut session, machines, DURATION, &AtomicBool::new(stop))
}

fn kdamond_count(host: &FakeHost) -> u64 {
    access_monitor::read_kdamond_count(host).unwrap()
}

#[test]
fn working_sets_of_machines_and_virtual_nodes_are_measured() {
    let (host, directory) = (host(&[(7, &[25]), (17, &[50, 10])]), tempfile::tempdir().unwrap());
    let node = |id: u32| VirtualNode {
        id,
        vcpus: id.to_string().parse().unwrap(),
        backend: Some(format!("m{id}")),
        memory_bytes: Some(64 * MIB),
        backend_position: id as usize,
        is_anonymous: true,
        policy: None,
        host_nodes: Default::default(),
    };
    let before = host.now();
    let machines = [machine(7, Vec::new()), machine(17, vec![node(0), node(1)])];
    let measured = measure_on(&host, directory.path(), &machines, false).unwrap();
    let shares: Vec<Vec<f64>> =
        measured.iter().map(|parts| parts.iter().map(|part| part.accessed_share()).collect()).collect();
    // The first backend is mapped above the second one.
    let is_near = |measured: f64, expected: f64| (measured - expected).abs() < 1e-6;
    assert!(is_near(shares[0][0], 0.25) && is_near(shares[1][0], 0.1) && is_near(shares[1][1], 0.5), "{shares:?}");
    assert_eq!(measured[0][0].resident, Bytes(64 * MIB));
    assert_eq!((host.now() - before, kdamond_count(&host)), (DURATION, 0));
}

#[test]
fn hot_machine_gets_the_node_of_its_memory() {
    let (host, directory) = (host(&[(7, &[5]), (17, &[90])]), tempfile::tempdir().unwrap());
    let machines = [machine(7, Vec::new()), machine(17, Vec::new())];
    // Both have run equally long on node 0, with their memory on node 1, which has CPUs for one of them.
    let pages = 100_000.0;
    let part = PlannedPart {
        vcpus: 2.0,
        cpu_shares: [(0, 1.0)].into(),
        pages: [(1, pages)].into(),
        hotness: 1.0,
        ..PlannedPart::default()
    };
    let vm = |name: &str| PlannedVm { name: name.to_owned(), parts: vec![part.clone()], ..PlannedVm::default() };
    let mut problem = PlacementProblem {
        nodes: vec![
            NodeCapacity { id: 0, vcpus: 4.0, pages: 0.0, hugetlb_pages: 0.0 },
            NodeCapacity { id: 1, vcpus: 2.0, pages: 2.0 * pages, hugetlb_pages: 0.0 },
        ],
        distances: [((0, 0), 10), ((0, 1), 20), ((1, 0), 20), ((1, 1), 10)].into(),
        vms: vec![vm("cold"), vm("hot")],
        prices: Prices {
            remote_page: 1.0,
            moved_page: 0.02,
            min_gain: 4096.0,
            first_min_gain: 4096.0,
            ..Prices::default()
        },
        ..PlacementProblem::default()
    };
    weight_by_working_sets(&mut problem, &measure_on(&host, directory.path(), &machines, false).unwrap());
    let hotness = [0, 1].map(|vm: usize| problem.vms[vm].parts[0].hotness);
    assert!(hotness[1] == 1.0 && (hotness[0] - 5.0 / 90.0).abs() < 1e-6, "{hotness:?}");
    let plan = plan::plan(&problem, &mut || false);
    assert_eq!((&plan.moves[0].pattern, &plan.moves[1].pattern), (&Pattern::Leave, &Pattern::Nodes(vec![1])));
}

#[test]
fn interrupted_and_impossible_measurements_leave_nothing() {
    let (host, directory) = (host(&[(7, &[25])]), tempfile::tempdir().unwrap());
    let machines = [machine(7, Vec::new())];
    let interrupted = measure_on(&host, directory.path(), &machines, true);
    assert!(matches!(interrupted, Err(MeasureError::Interrupted)), "{interrupted:?}");
    assert_eq!(kdamond_count(&host), 0);
    let ended = measure_on(&host, directory.path(), &[machine(8, Vec::new())], false);
    assert!(matches!(ended, Err(MeasureError::Unreadable { .. })), "{ended:?}");
    host.put_file(&format!("{KDAMONDS_DIRECTORY}/nr_kdamonds"), "1");
    let busy = measure_on(&host, directory.path(), &machines, false);
    let is_busy = matches!(&busy, Err(MeasureError::Unavailable(Error::Refused(ActionError::Busy(_)))));
    assert!(is_busy && kdamond_count(&host) == 1, "{busy:?}");
}

#[test]
fn machines_without_memory_have_an_empty_working_set() {
    let (host, directory) = (host(&[(7, &[])]), tempfile::tempdir().unwrap());
    let untouched =
        format!("{START:x}-{:x} rw-p 00000000 00:00 0 \nRss: 0 kB\nAnonymous: 0 kB\nVmFlags: rd wr\n", START + MIB);
    host.put_file("proc/7/smaps", &untouched);
    let measured = measure_on(&host, directory.path(), &[machine(7, Vec::new())], false).unwrap();
    assert_eq!(measured, [vec![WorkingSet::default()]]);
}
