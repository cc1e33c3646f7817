//! Machines on a host in memory, whose monitors answer from files.

use crate::decide::NodeShares;
use crate::map::{self, ProcessPlacement};
use crate::problem::{PlanLimits, placement_problem};
use pagefold_base::Pid;
use pagefold_base::identity::thread_role::ThreadRole;
use pagefold_census::ProcessSelection;
use pagefold_host::Host;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};
use pagefold_host::qemu_monitor::{MonitorAccess, MonitorQuestion};

const START: u64 = 0x10_0000;
const VM: u32 = 7;
const OTHER: u32 = 17;
/// The threads of the machine: the main one, and those with names of vCPUs or without.
const THREADS: [(u32, &str, u32); 4] = [(7, "qemu", 0), (8, "CPU 0/KVM", 0), (9, "CPU 5/KVM", 2), (10, "worker", 2)];

/// A host with two nodes, and a machine with two virtual nodes.
fn host() -> FakeHost {
    let host = FakeHost::booted();
    for node in 0..2 {
        host.put_node(node, &format!("{}-{}", 2 * node, 2 * node + 1), 900_000);
    }
    host.start_process(VM, 4);
    host.map_pages(VM, (START, START + 4 * 4096), "heap", false);
    let command = "qemu-system-x86_64 -name vm -object memory-backend-ram,id=a,size=16K -numa node,memdev=a -numa node";
    host.put_file(&format!("proc/{VM}/cmdline"), &command.replace(' ', "\0"));
    host.put_file(&format!("proc/{VM}/status"), "Mems_allowed_list:\t0-1\n");
    for (tid, name, cpu) in THREADS {
        let unused = "0 ".repeat(16);
        let stat = format!("{tid} ({name}) S 1 1 1 0 -1 0 9 0 0 0 9 0 0 0 20 0 1 0 1 {unused}{cpu}\n");
        host.put_file(&format!("proc/{VM}/task/{tid}/stat"), &stat);
        // The machine is in a PID namespace of its own.
        let status = format!("NSpid:\t{tid}\t{}\nCpus_allowed_list:\t0-3\n", tid + 100);
        host.put_file(&format!("proc/{VM}/task/{tid}/status"), &status);
    }
    host
}

fn put_answer(host: &FakeHost, question: MonitorQuestion, answer: &str) {
    host.put_file(&format!("proc/{VM}/{}", question.record_path()), answer);
}

fn placement(host: &dyn Host, access: Option<MonitorAccess>) -> ProcessPlacement {
    let selection = ProcessSelection { pids: vec![Pid(VM)], ..ProcessSelection::default() };
    let (map, _) = map::read_map_and_frames(host, &selection, access).unwrap();
    map.processes.into_iter().next().unwrap()
}

/// The role of each thread, the vCPUs of each virtual node, the source, and what is wrong.
fn summary(placement: &ProcessPlacement) -> (Vec<Option<u32>>, Vec<String>, String, Vec<String>) {
    let vcpu = |role: &ThreadRole| match role {
        ThreadRole::Vcpu(number) => Some(*number),
        _ => None,
    };
    let facts = placement.machine.as_ref().unwrap();
    (
        placement.threads.as_ref().unwrap().iter().map(|thread| vcpu(&thread.role)).collect(),
        placement.virtual_nodes.iter().map(|node| node.node.vcpus.to_string()).collect(),
        facts.vcpu_source.to_string(),
        facts.conflicts.iter().map(ToString::to_string).collect(),
    )
}

const VCPUS: &str = r#"[{"cpu-index": 0, "thread-id": 109, "props": {"node-id": 1}},
    {"cpu-index": 1, "thread-id": 110, "props": {"node-id": 0}}]"#;

/// What names alone say.
fn by_names() -> (Vec<Option<u32>>, Vec<String>, String, Vec<String>) {
    (vec![None, Some(0), Some(5), None], vec![String::new(), String::new()], "thread names".to_owned(), vec![])
}

#[test]
fn answer_of_the_monitor_wins_over_names() {
    let host = host();
    put_answer(&host, MonitorQuestion::Vcpus, VCPUS);
    put_answer(
        &host,
        MonitorQuestion::MemoryBackends,
        r#"[{"id": "a", "size": 16384, "merge": true, "prealloc": false, "host-nodes": [1], "policy": "bind"}]"#,
    );
    let found = placement(&host, Some(MonitorAccess::Socket));
    let (roles, nodes, source, conflicts) = summary(&found);
    assert_eq!((roles, nodes), (vec![None, None, Some(0), Some(1)], vec!["1".to_owned(), "0".to_owned()]));
    assert_eq!(source, "QEMU's monitor");
    let expected = [
        "thread 8 has the name of vCPU 0, and QEMU's monitor does not list it",
        "thread 9 is vCPU 0 by QEMU's monitor, and vCPU 5 by its name",
        "memory backend a has policy bind 1 by QEMU's monitor, and default by the command line",
    ];
    assert_eq!(conflicts, expected);
    assert_eq!(found.virtual_nodes[0].node.bound_nodes().map(ToString::to_string).as_deref(), Some("1"));
    // Both vCPUs run on node 1, and the memory is on node 0.
    assert_eq!(found.cost.map(|cost| cost.remote_share), Some(1.0));
    let facts = found.machine.unwrap();
    assert_eq!(facts.vcpu_threads, [(0, Pid(9)), (1, Pid(10))].into());
    // Without access to monitors, names count.
    assert_eq!(summary(&placement(&host, None)), by_names());
}

#[test]
fn false_or_missing_answers_leave_names() {
    let host = host();
    let asked = || summary(&placement(&host, Some(MonitorAccess::Socket)));
    assert_eq!(asked(), by_names(), "no monitor");
    put_answer(&host, MonitorQuestion::Vcpus, "[[[");
    assert_eq!(asked(), by_names());
    // Numbers of the host are not those of the machine's namespace.
    put_answer(&host, MonitorQuestion::Vcpus, r#"[{"cpu-index": 0, "thread-id": 9, "props": {"node-id": 1}}]"#);
    let (roles, nodes, source, conflicts) = asked();
    assert_eq!((roles, nodes, source), (by_names().0, by_names().1, by_names().2));
    assert_eq!(
        conflicts,
        ["QEMU's monitor: vCPU 0 is thread 9, which this machine does not have; the source is not used"]
    );
    put_answer(&host, MonitorQuestion::Vcpus, VCPUS);
    let hanging = FaultyHost::new(&host, |path| {
        path.ends_with("#qemu_monitor")
            .then(|| InjectedFault::Absent(pagefold_base::Absent::NoAnswer("late".to_owned())))
    });
    assert_eq!(summary(&placement(&hanging, Some(MonitorAccess::Socket))), by_names());
}

#[test]
fn state_of_libvirt_wins_over_names_and_the_monitor_over_both() {
    let host = host();
    host.put_file("run/libvirt/qemu/vm.xml", "<domstatus pid='7'><vcpus><vcpu id='0' pid='10'/><vcpu id='1' pid='9'/></vcpus><domain><name>vm</name><uuid>u</uuid></domain></domstatus>");
    let (roles, _, source, conflicts) = summary(&placement(&host, None));
    assert_eq!((roles, source.as_str()), (vec![None, None, Some(1), Some(0)], "libvirt's state"));
    assert_eq!(conflicts.len(), 2, "{conflicts:?}");
    put_answer(&host, MonitorQuestion::Vcpus, VCPUS);
    let (roles, _, source, conflicts) = summary(&placement(&host, Some(MonitorAccess::Socket)));
    assert_eq!((roles, source.as_str()), (vec![None, None, Some(0), Some(1)], "QEMU's monitor"));
    assert_eq!(conflicts[0], "vCPU 0 is thread 9 by QEMU's monitor, and 10 by libvirt's state");
}

/// The last machine of the planning problem of another process: its virtual CPUs, their shares by node, and whether it
/// stays. `None` if the problem has only that process. Beside it, the processes that could not be read.
fn other_machine(host: &dyn Host) -> (Option<(f64, NodeShares, bool)>, Vec<Pid>) {
    let selection = ProcessSelection { pids: vec![Pid(OTHER)], ..ProcessSelection::default() };
    let mut map = map::read_map(host, &selection).unwrap();
    map::add_other_machines(host, &mut map, Some(MonitorAccess::Socket)).unwrap();
    assert_eq!(map.processes.len(), 1);
    let problem = placement_problem(&map, host.page_size(), PlanLimits::default());
    let other = problem.vms.get(1).map(|vm| (vm.parts[0].vcpus, vm.parts[0].cpu_shares.clone(), vm.fixed));
    (other, map.unscanned.iter().map(|process| process.pid).collect())
}

#[test]
fn machines_that_are_not_selected_count_with_their_virtual_cpus() {
    let host = host();
    host.start_process(OTHER, 4);
    host.map_pages(OTHER, (START, START + 4 * 4096), "heap", false);
    let on_both = [(0, 0.5), (1, 0.5)].into();
    assert_eq!(other_machine(&host), (Some((2.0, on_both, true)), vec![]));
    // By the monitor, both run on node 1.
    put_answer(&host, MonitorQuestion::Vcpus, VCPUS);
    assert_eq!(other_machine(&host), (Some((2.0, [(1, 1.0)].into(), true)), vec![]));
    let unreadable = FaultyHost::new(&host, |path| {
        (path == format!("proc/{VM}/task")).then_some(InjectedFault::Absent(pagefold_base::Absent::Denied))
    });
    assert_eq!(other_machine(&unreadable), (None, vec![Pid(VM)]));
}
