//! Placement on a host in memory, with faults at each step.

use super::*;
use crate::decide::steps::{RestrictedThread, ThreadStep};
use pagefold_base::memory::MemoryPolicy;
use pagefold_census::ProcessSelection;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

const START: u64 = 0x10_0000;
const PAGE: u64 = 4096;

fn host() -> FakeHost {
    let host = FakeHost::booted();
    for pid in [7, 17] {
        host.map_pages(pid, (START, START + 8 * PAGE), "heap", false);
        for tid in [pid, pid + 1] {
            host.put_file(&format!("proc/{pid}/task/{tid}/cpus"), "0-3");
        }
        host.put_file(&format!("proc/{pid}/numa_maps"), &policy_line("default"));
    }
    for node in 0..2 {
        put_free(&host, node, 900_000);
    }
    host
}

fn policy_line(policy: &str) -> String {
    format!("{START:x} {policy}\n")
}

fn put_free(host: &FakeHost, node: u32, kib: u64) {
    host.put_node(node, &format!("{}-{}", 2 * node, 2 * node + 1), kib);
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
            moves: [0, 4]
                .map(|first| MoveStep { ranges: vec![range(first)], node: 1, bytes: Bytes(4 * PAGE) })
                .to_vec(),
            policies: vec![PolicyStep {
                ranges: vec![AddressRange { start: START, end: START + 8 * PAGE }],
                from: MemoryPolicy::Default,
                to: MemoryPolicy::Prefer(1),
            }],
            kept_policies: BTreeMap::new(),
        };
        PreparedMachine {
            process: ProcessId { pid: Pid(pid), start_time: 1 },
            steps,
            in_place: Bytes::ZERO,
            libvirt_pins: BTreeMap::new(),
        }
    };
    vec![machine(7), machine(17)]
}

const LIMITS: ApplyLimits = ApplyLimits { bandwidth: None, headroom_share: 0.05, reserved: BTreeMap::new() };

/// The CPUs of all threads, the nodes of all pages, and the memory policies.
fn state(host: &FakeHost) -> (Vec<String>, Vec<Vec<Option<u32>>>, Vec<String>) {
    let range = AddressRange { start: START, end: START + 8 * PAGE };
    let threads = [7, 17].into_iter().flat_map(|pid| [(pid, pid), (pid, pid + 1)]);
    let read = |(pid, tid)| String::from_utf8(host.read(&format!("proc/{pid}/task/{tid}/cpus")).unwrap()).unwrap();
    let nodes = [7, 17].map(|pid| host.open(Pid(pid)).unwrap().page_nodes(range).unwrap());
    (threads.map(read).collect(), nodes.to_vec(), [7, 17].map(|pid| read_policies(host, pid)).to_vec())
}

/// Whether an action on a path places threads or memory.
fn is_placement(path: &str) -> bool {
    ["#set_affinity", "#move_pages", "#set_memory_policy"].iter().any(|end| path.ends_with(end))
}

/// The state after [`machines`] were placed.
fn state_when_placed() -> (Vec<String>, Vec<Vec<Option<u32>>>, Vec<String>) {
    (vec!["2-3".to_owned(); 4], vec![vec![Some(1); 8]; 2], vec![policy_line("prefer:1"); 2])
}

fn read_policies(host: &FakeHost, pid: u32) -> String {
    String::from_utf8(host.read(&format!("proc/{pid}/numa_maps")).unwrap()).unwrap()
}

/// A thread of process 7 beside threads 7 and 8.
fn put_thread(host: &FakeHost, tid: u32, start_time: u64, cpus: &str) {
    let stat = format!("{tid} (TC) S 1 1 1 0 0 0 0 0 0 0 0 0 0 0 20 0 1 0 {start_time}{}\n", " 0".repeat(30));
    host.put_file(&format!("proc/7/task/{tid}/stat"), &stat);
    host.put_file(&format!("proc/7/task/{tid}/cpus"), cpus);
}

fn restricted(tid: u32) -> RestrictedThread {
    RestrictedThread { tid: Pid(tid), start_time: 1, node_cpus: cpus("2-3") }
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
    let outcome = carry_out(&mut sessions, &machines(), limits, &mut |_, _| (), stop)?;
    if outcome.interrupted {
        assert_eq!(sessions.undo_all().unwrap(), Vec::new());
    } else {
        assert_eq!(sessions.keep().unwrap(), Vec::new());
    }
    Ok(outcome)
}

fn place_machines(host: &dyn Host, directory: &Path, machines: &[PreparedMachine]) -> ApplyOutcome {
    let (mut sessions, _) = PlacementSessions::begin(host, directory).unwrap();
    let outcome = carry_out(&mut sessions, machines, LIMITS, &mut |_, _| (), &AtomicBool::new(false)).unwrap();
    assert_eq!(sessions.keep().unwrap(), Vec::new());
    outcome
}

#[test]
fn placement_is_kept_and_undone() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    let outcome = place(&host, directory.path(), LIMITS).unwrap();
    let whole = |pid: u32| MachineOutcome {
        placed_threads: vec![Pid(pid), Pid(pid + 1)],
        moved_pages: Pages(8),
        preferring_bytes: Bytes(8 * PAGE),
        ..MachineOutcome::default()
    };
    assert!(outcome.is_complete() && outcome.machines == [whole(7), whole(17)], "{outcome:?}");
    assert_eq!(state(&host), state_when_placed());
    let kept = read_kept_cpus(&host, directory.path()).unwrap();
    assert_eq!(kept.len(), 4);
    let (mut sessions, _) = PlacementSessions::begin(&host, directory.path()).unwrap();
    assert_eq!(sessions.undo_kept(None).unwrap().1, Vec::new());
    assert_eq!(state(&host), before);
}

#[test]
fn placement_of_one_machine_is_undone_and_that_of_another_stays() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    let before = state(&host);
    place(&host, directory.path(), LIMITS).unwrap();
    let placed = state(&host);
    let process = |pid| BTreeSet::from([ProcessId { pid: Pid(pid), start_time: 1 }]);
    let undo = |only: Option<&BTreeSet<ProcessId>>| {
        let (mut sessions, _) = PlacementSessions::begin(&host, directory.path()).unwrap();
        let (undone, failed) = sessions.undo_kept(only).unwrap();
        assert_eq!(failed, Vec::new());
        undone
    };
    let undone = undo(Some(&process(7)));
    assert!(!undone.is_empty() && undone.iter().all(|action| action.process().unwrap().pid == Pid(7)), "{undone:?}");
    let now = state(&host);
    assert_eq!((&now.0[..2], &now.1[0], &now.2[0]), (&before.0[..2], &before.1[0], &before.2[0]));
    assert_eq!((&now.0[2..], &now.1[1], &now.2[1]), (&placed.0[2..], &placed.1[1], &placed.2[1]));
    for pid in [7, 27] {
        assert_eq!(undo(Some(&process(pid))), Vec::new(), "nothing of {pid} is left to undo");
    }
    assert_eq!(state(&host), now);
    assert!(!undo(None).is_empty());
    assert_eq!(state(&host), before);
}

#[test]
fn threads_that_the_cpuset_of_the_main_thread_takes_along_are_placed() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    for (tid, start_time) in [(9, 1), (10, 1), (12, 2)] {
        put_thread(&host, tid, start_time, "0-1");
    }
    // As libvirt, which writes the cpuset of threads 7, 8, 9 and 12 when it pins thread 7.
    let faulty = FaultyHost::new(&host, |path| {
        if path == "proc/7#set_affinity" {
            for tid in [8, 9, 12] {
                host.put_file(&format!("proc/7/task/{tid}/cpus"), "2-3");
            }
        }
        None
    });
    let mut machines = machines();
    machines.truncate(1);
    // Thread 11 has ended, and another thread has the number 12 now.
    machines[0].steps.restricted_threads = vec![restricted(9), restricted(10), restricted(11), restricted(12)];
    let outcome = place_machines(&faulty, directory.path(), &machines);
    let done = &outcome.machines[0];
    assert_eq!((&done.placed_threads, &done.following_threads), (&vec![Pid(7)], &vec![Pid(8), Pid(9)]));
    assert_eq!(done.kept_threads, [(Pid(10), "its owner restricts it to CPUs of other nodes".to_owned())]);
    assert!(!outcome.is_complete());
    // Nothing is undone for threads that follow.
    assert_eq!(read_kept_cpus(&host, directory.path()).unwrap().len(), 1);

    machines[0].steps.restricted_threads = vec![restricted(9)];
    let again = place_machines(&faulty, directory.path(), &machines);
    assert!(again.is_complete() && again.machines[0].following_threads.contains(&Pid(9)), "{again:?}");
}

#[test]
fn policies_of_others_stay() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    host.put_file("proc/7/numa_maps", &policy_line("bind:0"));
    let denied = InjectedFault::Absent(Absent::Denied);
    let faulty = FaultyHost::new(&host, |path| (path == "proc/17#set_memory_policy").then(|| denied.clone()));
    let outcome = place(&faulty, directory.path(), LIMITS).unwrap();
    for (machine, why) in outcome.machines.iter().zip(["its owner has set bind:0", "permission denied"]) {
        let kept: Vec<_> = machine.refused_policies.iter().collect();
        assert!(
            !machine.is_complete()
                && matches!(kept[..], [(reason, &bytes)] if reason.starts_with(why) && bytes == Bytes(8 * PAGE)),
            "{machine:?}"
        );
        assert_eq!(machine.preferring_bytes, Bytes::ZERO);
    }
    let before = [policy_line("bind:0"), policy_line("default")];
    assert_eq!([7, 17].map(|pid| read_policies(&host, pid)), before);
    // A policy that its owner has set since stays at the undo, and is not tried again.
    let machine = &machines()[1..];
    place_machines(&host, directory.path(), machine);
    host.put_file("proc/17/numa_maps", &policy_line("interleave:0-1"));
    let (mut sessions, _) = PlacementSessions::begin(&host, directory.path()).unwrap();
    let (_, failed) = sessions.undo_kept(None).unwrap();
    assert!(matches!(&failed[..], [failed] if !failed.will_retry), "{failed:?}");
    assert_eq!(read_policies(&host, 17), policy_line("interleave:0-1"));
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
        // Each machine has two threads and two batches. Without the first batch, its threads get their CPUs back.
        let expected = [(1, 0), (1, 0), (2, 1), (0, 1)][refused % 4];
        assert_eq!((kept_threads, failures), expected, "step {refused}");
        let (mut sessions, _) = PlacementSessions::begin(&fake, directory.path()).unwrap();
        assert_eq!(sessions.undo_kept(None).unwrap().1, Vec::new());
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
    assert_eq!((outcome.machines[1].placed_threads.len(), outcome.machines[1].moved_pages), (2, Pages(8)));
}

#[test]
fn machine_that_ends_at_any_action_does_not_stop_the_other_one() {
    // It has two threads, two batches and a memory policy.
    for last in 0..5 {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let actions = AtomicU64::new(0);
        let ending = FaultyHost::new(&fake, |path| {
            if path.starts_with("proc/7#") && is_placement(path) && actions.fetch_add(1, Ordering::Relaxed) == last {
                fake.end_process(Pid(7));
            }
            None
        });
        let outcome = place(&ending, directory.path(), LIMITS).unwrap();
        assert_eq!(actions.load(Ordering::Relaxed), last + 1, "it ended at action {last}");
        let ended = (last < 4).then_some("the process has ended");
        assert_eq!(outcome.machines[0].failure.as_deref(), ended, "{last}");
        let other = &outcome.machines[1];
        assert!(other.is_complete() && other.placed_threads.len() == 2 && other.moved_pages == Pages(8), "{outcome:?}");
        assert_eq!(read_policies(&fake, 17), policy_line("prefer:1"), "{last}");
        let (mut sessions, _) = PlacementSessions::begin(&fake, directory.path()).unwrap();
        assert_eq!(sessions.undo_kept(None).unwrap().1, Vec::new(), "{last}");
        assert_eq!(read_policies(&fake, 17), policy_line("default"), "{last}");
    }
}

#[test]
fn machine_whose_memory_cannot_be_read_is_named() {
    let fake = host();
    let selection = ProcessSelection { pids: vec![Pid(7), Pid(17)], ..ProcessSelection::default() };
    let map = map::read_map(&fake, &selection).unwrap();
    let target = |position| MachineTarget { position, parts: vec![vec![(1, 1.0)]] };
    let targets: Vec<MachineTarget> = (0..map.processes.len()).map(target).collect();
    let prepare_with = |why: &Absent| {
        let fault = |path: &str| (path == "proc/17#page_nodes").then(|| InjectedFault::Absent(why.clone()));
        prepare(&FaultyHost::new(&fake, fault), &map, &targets, &AtomicBool::new(false))
    };
    let error = prepare_with(&Absent::Denied).unwrap_err();
    let chain = session::chain(&error);
    assert_eq!(chain, "cannot read the memory of program (process 17): permission denied");
    assert_eq!(prepare_with(&Absent::Vanished).unwrap().len(), 2, "one that has ended has no steps");
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
            sessions.undo_kept(None).unwrap();
        }
        assert_eq!(state(&fake), before, "{file}");
    }
}

#[test]
fn interrupted_placement_is_undone() {
    let before = state(&host());
    // Interrupted at each of the ten actions.
    for interrupted in 0..10 {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let (stop, actions) = (AtomicBool::new(false), AtomicU64::new(0));
        let faulty = FaultyHost::new(&fake, |path| {
            if is_placement(path) {
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
    assert!(outcome.machines.iter().all(|machine| machine.kept_pages.values().eq([&Pages(8)])), "{outcome:?}");
    assert_eq!(state(&host).0, ["0-3"; 4], "threads stay with their memory");
}

#[test]
fn memory_that_is_reserved_for_bound_machines_is_no_room() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    // 900,000 KiB are free. The headroom is 50,000 KiB, and a batch has 16 KiB.
    let limits = ApplyLimits { reserved: [(1, Bytes::from_kib(849_980))].into(), ..LIMITS };
    let outcome = place(&host, directory.path(), limits).unwrap();
    let moved: Vec<Pages> = outcome.machines.iter().map(|machine| machine.moved_pages).collect();
    assert_eq!(moved, [Pages(4), Pages::ZERO], "{outcome:?}");
    assert_eq!(outcome.machines[1].failure.as_deref(), Some("node 1 has no room for it"));
}

#[test]
fn machine_of_which_nothing_was_placed_has_no_record() {
    let planned = |pid: u32| PlacedMachine {
        pid,
        start_time: 1,
        name: "web".to_owned(),
        parts: vec![vec![(1, 1.0)]],
        threads: vec![(pid, 1, "2-3".to_owned()), (pid + 1, 1, "2-3".to_owned())],
        kept_pages: 0,
        staying_pages: 0,
        huge_pages: 0,
        remote_share_before: None,
        predicted_remote_share: None,
    };
    let planned = [planned(7), planned(17)];
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    // The headroom is 50,000 KiB: there is room for a batch of the first machine.
    put_free(&host, 1, 50_020);
    let partial = place(&host, directory.path(), LIMITS).unwrap().records(&planned);
    assert_eq!(partial.len(), 1);
    assert_eq!((partial[0].pid, partial[0].kept_pages, partial[0].staying_pages), (7, 4, 4));
    assert_eq!(partial[0].threads, planned[0].threads, "half of its memory is there");

    let in_place = ApplyOutcome { machines: vec![MachineOutcome::default(); 2], ..ApplyOutcome::default() };
    let records = in_place.records(&planned);
    assert_eq!(records.len(), 2, "they were as planned already");
    assert!(records.iter().all(|record| record.threads.is_empty()));
}

#[test]
fn threads_get_their_cpus_back_if_most_memory_stays() {
    // The first of so many batches of 4 pages of the first machine is moved, and the next one is refused.
    for (batches, cpus_after) in [(2, "2-3"), (3, "0-3")] {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let calls = AtomicU64::new(0);
        let refuse = |path: &str| {
            let is_second = path == "proc/7#move_pages" && calls.fetch_add(1, Ordering::Relaxed) == 1;
            is_second.then_some(InjectedFault::Absent(Absent::Denied))
        };
        let faulty = FaultyHost::new(&fake, refuse);
        let mut machines = machines();
        put_thread(&fake, 9, 1, "2-3");
        machines[0].steps.restricted_threads = vec![restricted(9)];
        let steps = &mut machines[0].steps.moves;
        let last = steps[1].clone();
        steps.resize(batches, last);
        let outcome = place_machines(&faulty, directory.path(), &machines);
        let (cpus, nodes, _) = state(&fake);
        assert_eq!(cpus, [cpus_after, cpus_after, "2-3", "2-3"], "{batches} batches");
        assert_eq!(nodes[0].iter().filter(|node| **node == Some(1)).count(), 4);
        let done = &outcome.machines[0];
        let restored = done.kept_threads.iter().filter(|(_, why)| why.contains("memory stays")).count();
        let threads = (restored, done.placed_threads.len(), done.following_threads.len());
        assert_eq!(threads, if batches == 2 { (0, 2, 1) } else { (3, 0, 0) });
        assert_eq!(read_kept_cpus(&fake, directory.path()).unwrap().len(), if batches == 2 { 4 } else { 2 });
    }
}

#[test]
fn virtual_nodes_that_change_places_on_full_nodes_take_turns() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    // The headroom is 50,000 KiB. Node 0 has room for one batch of 16 KiB, and node 1 for none.
    put_free(&host, 0, 50_020);
    put_free(&host, 1, 50_010);
    let range =
        |first: u64, pages: u64| AddressRange { start: START + first * PAGE, end: START + (first + pages) * PAGE };
    host.put_pages_on_node(7, range(0, 8), 0);
    host.put_pages_on_node(7, range(8, 8), 1);
    let mut machines = machines();
    machines.truncate(1);
    let step = |first, node| MoveStep { ranges: vec![range(first, 4)], node, bytes: Bytes(4 * PAGE) };
    machines[0].steps.moves = vec![step(0, 1), step(4, 1), step(8, 0), step(12, 0)];
    let outcome = place_machines(&host, directory.path(), &machines);
    assert!(outcome.is_complete() && outcome.machines[0].moved_pages == Pages(16), "{outcome:?}");
}

#[test]
fn threads_are_where_most_memory_is() {
    let pinned = |pages: u64| AddressRange { start: START, end: START + pages * PAGE };
    // Of 8 pages so many are pinned elsewhere, beside memory that is in place; without room none moves.
    for (pinned_pages, in_place, has_room, cpus_after) in
        [(4, 0, true, "2-3"), (5, 0, true, "0-3"), (8, 9, true, "2-3"), (0, 9, false, "2-3"), (0, 7, false, "0-3")]
    {
        let (host, directory) = (host(), tempfile::tempdir().unwrap());
        host.pin_pages(7, pinned(pinned_pages));
        if !has_room {
            put_free(&host, 1, 50_010);
        }
        let mut machines = machines();
        machines.truncate(1);
        machines[0].in_place = Bytes(in_place * PAGE);
        let outcome = place_machines(&host, directory.path(), &machines);
        let staying = if has_room { pinned_pages } else { 8 };
        assert_eq!(outcome.machines[0].staying_pages(), Pages(staying));
        assert_eq!(state(&host).0[..2], [cpus_after, cpus_after], "{pinned_pages} {in_place} {has_room}");
        let policy = if cpus_after == "2-3" { "prefer:1" } else { "default" };
        assert_eq!(read_policies(&host, 7), policy_line(policy), "{pinned_pages} {in_place} {has_room}");
        assert_eq!(outcome.machines[0].placed_threads.is_empty(), cpus_after == "0-3");
    }
}

#[test]
fn short_interruption_is_not_forgotten() {
    let before = state(&host());
    // The flag is set during one action and reset during the next one. If it was seen, all is undone, else all is done.
    let mut seen = 0;
    for interrupted in 0..10 {
        let (fake, directory) = (host(), tempfile::tempdir().unwrap());
        let (stop, actions) = (AtomicBool::new(false), AtomicU64::new(0));
        let faulty = FaultyHost::new(&fake, |path| {
            if is_placement(path) {
                stop.store(actions.fetch_add(1, Ordering::Relaxed) == interrupted, Ordering::Relaxed);
            }
            None
        });
        let outcome = place_until(&faulty, directory.path(), LIMITS, &stop).unwrap();
        if outcome.interrupted {
            seen += 1;
            assert_eq!(state(&fake), before, "{interrupted}");
        } else {
            assert_eq!(state(&fake), state_when_placed(), "{interrupted}");
        }
    }
    assert!(seen >= 4, "{seen}");
}

#[test]
fn cpus_of_a_thread_whose_owner_has_restricted_it_since_stay() {
    let (host, directory) = (host(), tempfile::tempdir().unwrap());
    place(&host, directory.path(), LIMITS).unwrap();
    host.put_file("proc/7/task/8/cpus", "2");
    let (mut sessions, _) = PlacementSessions::begin(&host, directory.path()).unwrap();
    let (_, failed) = sessions.undo_kept(None).unwrap();
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert_eq!(state(&host).0, ["0-3", "2", "0-3", "0-3"]);
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
fn time_of_memory_pressure_is_no_credit_for_the_bandwidth() {
    let (fake, directory) = (host(), tempfile::tempdir().unwrap());
    fake.enable_virtual_time();
    let set_pressure = |percent: u32| {
        let line = format!("avg10={percent}.00 avg60=0.00 avg300=0.00 total=1");
        fake.put_file("proc/pressure/memory", &format!("some {line}\nfull {line}\n"));
    };
    let (batches, pressure_reads, pressure_end) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(None));
    let busy = FaultyHost::new(&fake, |path| {
        if path.ends_with("#move_pages") && batches.fetch_add(1, Ordering::Relaxed) == 0 {
            set_pressure(40);
        }
        let is_reading = path == "proc/pressure/memory" && batches.load(Ordering::Relaxed) == 1;
        if is_reading && pressure_reads.fetch_add(1, Ordering::Relaxed) == 6 {
            set_pressure(0);
            *pressure_end.lock().unwrap() = Some(fake.now());
        }
        None
    });
    // Four batches of four pages: after the pressure, one follows at once, and the last two four seconds later each.
    let limits = ApplyLimits { bandwidth: Some(Bytes(PAGE)), ..LIMITS };
    let outcome = place(&busy, directory.path(), limits).unwrap();
    assert!(outcome.is_complete(), "{outcome:?}");
    let pressure_end = pressure_end.lock().unwrap().unwrap();
    assert!(outcome.pause_time >= Duration::from_secs(4 + 15 + 8), "the pressure lasted for some time: {outcome:?}");
    assert!(fake.now() - pressure_end >= Duration::from_secs(8), "{outcome:?}");
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
    assert_eq!(state(&host).0, ["0-3"; 4], "threads stay with their memory");
}
