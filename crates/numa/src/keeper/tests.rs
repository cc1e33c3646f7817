//! The keeper on a host in memory and in virtual time. Its placements are tested in an emulated machine
//! (`labs/tests/numa_apply.rs`).

use super::*;
use pagefold_base::Absent;
use pagefold_host::fake_host::FakeHost;
use pagefold_host::faulty_host::{FaultyHost, InjectedFault};

fn host(nodes: u32) -> FakeHost {
    let host = FakeHost::booted();
    host.enable_virtual_time();
    for node in 0..nodes {
        let folder = format!("sys/devices/system/node/node{node}");
        host.put_file(&format!("{folder}/cpulist"), &format!("{node}\n"));
        host.put_file(&format!("{folder}/distance"), "10 21\n");
        let memory = format!("Node {node} MemTotal: 1000000 kB\nNode {node} MemFree: 900000 kB\n");
        host.put_file(&format!("{folder}/meminfo"), &memory);
    }
    host
}

fn settings() -> KeeperSettings {
    KeeperSettings {
        acts: true,
        interval: Duration::from_secs(30),
        replan_interval: Duration::from_secs(3600),
        limits: PlanLimits { vcpus_per_cpu: 1.0, headroom_share: 0.05 },
        bandwidth: None,
    }
}

/// The outcomes of the first checks.
fn outcomes(host: &dyn Host, checks: usize) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let mut keeper = PlacementKeeper::new(host, directory.path().to_owned(), settings());
    let control = KeeperControl::default();
    let mut outcomes = Vec::new();
    keeper.run(&control, &mut |report| {
        outcomes.push(report.outcome.clone());
        if outcomes.len() == checks {
            control.end();
        }
    });
    outcomes
}

#[test]
fn host_with_one_node_needs_no_keeper() {
    assert_eq!(outcomes(&host(1), 9), ["the host has one node"]);
}

#[test]
fn host_without_machines_is_checked_again_and_again() {
    assert_eq!(outcomes(&host(2), 3), ["no virtual machine runs"; 3]);
}

#[test]
fn unreadable_host_is_reported_and_checked_again() {
    let fake = host(2);
    let hidden = FaultyHost::new(&fake, |path| (path == "proc").then_some(InjectedFault::Absent(Absent::Denied)));
    let expected = "not finished: the processes cannot be listed: permission denied";
    assert_eq!(outcomes(&hidden, 2), [expected; 2]);
}
