//! Placement on a host in memory, with faults at each step.

use super::*;
use crate::decide::steps::ThreadStep;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use std::sync::Mutex;

const START: u64 = 0x10_0000;
const PAGE: u64 = 4096;

fn host() -> FakeHost {
    let host = FakeHost::booted();
    for pid in [7, 17] {
        host.map_pages(pid, (START, START + 8 * PAGE), "heap", false);
        for tid in [pid, pid + 1] {
            host.put_file(&format!("proc/{pid}/task/{tid}/cpus"), "0-3");
        }
    }
    for node in 0..2 {
        let folder = format!("sys/devices/system/node/node{node}");
        host.put_file(&format!("{folder}/cpulist"), &format!("{}-{}\n", 2 * node, 2 * node + 1));
        host.put_file(&format!("{folder}/distance"), "10 21\n");
        put_free(&host, node, 900_000);
    }
    host
}

fn put_free(host: &FakeHost, node: u32, kib: u64) {
    let memory = format!("Node {node} MemTotal:       1000000 kB\nNode {node} MemFree:        {kib} kB\n");
    host.put_file(&format!("sys/devices/system/node/node{node}/meminfo"), &memory);
}

fn cpus(text: &str) -> IdSet {
    text.parse().unwrap()
}

/// Two machines with two threads and two batches each, to be placed on node 1.
fn machines() -> Vec<PreparedMachine> {
    let machine = |pid: u32| {
        let thread = |tid| ThreadStep { tid: Pid(tid), start_time: 1, from: cpus("0-3"), to: cpus("2-3") };
        let range = |first: u64| AddressRange { start: START + first * PAGE, end: START + (first + 4) * PAGE };
        let steps = MachineSteps {
            threads: vec![thread(pid), thread(pid + 1)],
            restricted_threads: Vec::new(),
            moves: [0, 4].map(|first| MoveStep { ranges: vec![range(first)], node: 1 }).to_vec(),
        };
        PreparedMachine { process: ProcessId { pid: Pid(pid), start_time: 1 }, steps, libvirt: None }
    };
    vec![machine(7), machine(17)]
}

const LIMITS: ApplyLimits = ApplyLimits { bandwidth: None, headroom_share: 0.05 };

/// The CPUs of all threads, and the nodes of all pages.
fn state(host: &FakeHost) -> (Vec<String>, Vec<Vec<Option<u32>>>) {
    let range = AddressRange { start: START, end: START + 8 * PAGE };
    let threads = [7, 17].into_iter().flat_map(|pid| [(pid, pid), (pid, pid + 1)]);
    let read = |(pid, tid)| String::from_utf8(host.read(&format!("proc/{pid}/task/{tid}/cpus")).unwrap()).unwrap();
    let nodes = [7, 17].map(|pid| host.open(Pid(pid)).unwrap().page_nodes(range).unwrap());
    (threads.map(read).collect(), nodes.to_vec())
}

fn place(host: &dyn Host, directory: &Path, limits: ApplyLimits) -> Result<ApplyOutcome, Error> {
    place_until(host, directory, limits, &AtomicBool::new(false))
}

fn place_until(
    host: &dyn Host,
    directory: &Path,
    limits: ApplyLimits,
    stop: &AtomicBool,
) -> Result<ApplyOutcome, Error> {
    let (mut sessions, undone) = PlacementSessions::begin(host, directory).unwrap();
    assert_eq!(undone, (Vec::new(), Vec::new()));
    let outcome = carry_out(&mut sessions, &machines(), limits, &ApplyProgress::default(), stop)?;
    if outcome.interrupted {
        assert_eq!(sessions.undo_all().unwrap(), Vec::new());
    } else {
        assert_eq!(sessions.keep().unwrap(), Vec::new());
    }
    Ok(outcome)
}

#[test]
fn placement_is_kept_and_undone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    let outcome = place(&host, directory.path(), LIMITS).unwrap();
    let whole = MachineOutcome { placed_threads: 2, moved_pages: Pages(8), ..MachineOutcome::default() };
    assert!(outcome.is_complete() && outcome.machines == [whole.clone(), whole], "{outcome:?}");
    assert_eq!(state(&host), (vec!["2-3".to_owned(); 4], vec![vec![Some(1); 8]; 2]));
    let kept = read_kept_cpus(&host, directory.path()).unwrap();
    assert_eq!(kept.len(), 4);
    let (mut sessions, _) = PlacementSessions::begin(&host, directory.path()).unwrap();
    assert_eq!(sessions.undo_kept().unwrap().1, Vec::new());
    assert_eq!(state(&host), before);
}

#[test]
fn each_refused_step_is_reported_and_the_rest_is_undone() {
    let before = state(&host());
    let denied = InjectedFault::Absent(Absent::Denied);
    for refused in 0..8 {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let actions = Mutex::new(0);
        let faulty = FaultyHost::new(&fake, |path| {
            if !path.ends_with("#set_affinity") && !path.ends_with("#move_pages") {
                return None;
            }
            let mut actions = actions.lock().unwrap();
            *actions += 1;
            (*actions == refused + 1).then(|| denied.clone())
        });
        let outcome = place(&faulty, directory.path(), LIMITS).unwrap();
        assert!(!outcome.is_complete(), "step {refused}");
        let kept_threads: usize = outcome.machines.iter().map(|machine| machine.kept_threads.len()).sum();
        let failures = outcome.machines.iter().filter(|machine| machine.failure.is_some()).count();
        assert_eq!((kept_threads, failures), if refused < 4 { (1, 0) } else { (0, 1) }, "step {refused}");
        let (mut sessions, _) = PlacementSessions::begin(&fake, directory.path()).unwrap();
        assert_eq!(sessions.undo_kept().unwrap().1, Vec::new());
        assert_eq!(state(&fake), before, "step {refused}");
    }
}

#[test]
fn machine_that_ends_does_not_stop_the_other_one() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    let vanished = |path: &str| {
        (path.starts_with("proc/7#") || path == "proc/7").then_some(InjectedFault::Absent(Absent::Vanished))
    };
    let outcome = place(&FaultyHost::new(&fake, vanished), directory.path(), LIMITS).unwrap();
    assert_eq!(outcome.machines[0].failure.as_deref(), Some("the process has ended"));
    assert_eq!((outcome.machines[1].placed_threads, outcome.machines[1].moved_pages), (2, Pages(8)));
}

#[test]
fn unreadable_host_leaves_nothing_changed() {
    let before = state(&host());
    for file in ["sys/devices/system/node", "proc/7#page_nodes", "sys/devices/system/node/node1/cpulist"] {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let unreadable = |path: &str| (path == file).then_some(InjectedFault::Absent(Absent::Denied));
        let result = place(&FaultyHost::new(&fake, unreadable), directory.path(), LIMITS);
        if let Ok(outcome) = &result {
            assert!(!outcome.is_complete(), "{file}: {outcome:?}");
            let (mut sessions, _) = PlacementSessions::begin(&fake, directory.path()).unwrap();
            sessions.undo_kept().unwrap();
        }
        assert_eq!(state(&fake), before, "{file}");
    }
}

#[test]
fn interrupted_placement_is_undone() {
    let before = state(&host());
    // Interrupted at each of the eight actions.
    for interrupted in 0..8 {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let (stop, actions) = (AtomicBool::new(false), AtomicU64::new(0));
        let faulty = FaultyHost::new(&fake, |path| {
            if path.ends_with("#set_affinity") || path.ends_with("#move_pages") {
                let number = actions.fetch_add(1, Ordering::Relaxed);
                stop.fetch_or(number == interrupted, Ordering::Relaxed);
            }
            None
        });
        let outcome = place_until(&faulty, directory.path(), LIMITS, &stop).unwrap();
        assert!(outcome.interrupted && !outcome.is_complete(), "{interrupted}");
        assert_eq!(state(&fake), before, "{interrupted}");
    }
}

#[test]
fn node_without_room_is_named() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    // The headroom is 50,000 KiB.
    put_free(&host, 1, 50_010);
    let outcome = place(&host, directory.path(), LIMITS).unwrap();
    let failures: Vec<_> = outcome.machines.iter().map(|machine| machine.failure.as_deref()).collect();
    assert_eq!(failures, [Some("node 1 has no room for it"); 2]);
    assert!(outcome.machines.iter().all(|machine| machine.moved_pages == Pages::ZERO));
}

#[test]
fn bandwidth_is_kept_in_virtual_time() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    host.enable_virtual_time();
    let limits = ApplyLimits { bandwidth: Some(Bytes(PAGE)), ..LIMITS };
    let outcome = place(&host, directory.path(), limits).unwrap();
    assert!(outcome.moving_time >= Duration::from_secs(16), "{outcome:?}");
}

#[test]
fn memory_pressure_stops_the_placement() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    host.enable_virtual_time();
    let waiting = "avg10=40.00 avg60=40.00 avg300=40.00 total=1";
    host.put_file("proc/pressure/memory", &format!("some {waiting}\nfull {waiting}\n"));
    let outcome = place(&host, directory.path(), LIMITS).unwrap();
    assert!(outcome.stopped_by_pressure && outcome.pause_time >= MAX_PRESSURE_WAIT, "{outcome:?}");
    assert!(outcome.machines.iter().all(|machine| machine.moved_pages == Pages::ZERO));
}
