//! `pagefold numa` on a simulated host with two nodes, of which the scenario tells where memory is and where vCPUs run.
//! The memory of `far` is on node 1 and its vCPUs run on node 0. Beside `wide`, they have too few CPUs on node 1.

use pagefold_base::IdSet;
use pagefold_base::memory::MemoryPolicy;
use pagefold_census::ProcessSelection;
use pagefold_host::{Host, parse};
use pagefold_numa::apply::{self, ApplyLimits, MachineTarget, PlacementSessions, PreparedMachine};
use pagefold_numa::decide::plan::{self, PlacementPlan, PlacementProblem};
use pagefold_numa::map::{NumaMap, ProcessPlacement, read_map};
use pagefold_numa::page_nodes::PageNodes;
use pagefold_numa::placement_record::{self, PlacedMachine, PlacementState};
use pagefold_numa::problem::{PlanLimits, placement_problem};
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::decide::scenario::Scenario;
use pagefold_sim::host::SimulatedHost;
use pagefold_sim::scenario::parse_scenario;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::AtomicBool;

const SCENARIO: &str = include_str!("../../../fixtures/sim/two-nodes.toml");

/// Touched pages of `far` and of `near`: three quarters of 48 MiB.
const SMALL_PAGES: u64 = 9216;

fn run(arguments: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .args(["--host", "sim:fixtures/sim/two-nodes.toml", "--state"])
        .arg(directory.path())
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn report(arguments: &[&str]) -> Value {
    let output = run(arguments);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// What a report says of a machine.
fn machine<'v>(machines: &'v Value, name: &str) -> &'v Value {
    let mut machines = machines.as_array().unwrap().iter();
    machines.find(|machine| machine["vm"]["name"] == name).unwrap_or_else(|| panic!("{name} is missing"))
}

#[test]
fn map_shows_memory_and_vcpus_where_the_scenario_puts_them() {
    let map = report(&["numa", "map", "--json"]);
    let distances: Vec<&Value> = map["nodes"].as_array().unwrap().iter().map(|node| &node["distances"]).collect();
    assert_eq!(distances, [&serde_json::json!([10, 32]), &serde_json::json!([32, 10])]);
    let account = report(&["account", "--json"]);
    for (name, memory_node, vcpu_node, vcpus) in [("wide-1", 1, 1, 3), ("far-1", 1, 0, 2), ("near-1", 0, 0, 2)] {
        let process = machine(&map["processes"], name);
        let rss = machine(&account["processes"], name)["rss"].as_u64().unwrap();
        let [memory] = &process["memory"].as_array().unwrap()[..] else { panic!("{process}") };
        assert_eq!((&memory["node"], &memory["pages"]), (&memory_node.into(), &(rss / 4096).into()), "{process}");
        if vcpus == 2 {
            assert_eq!(memory["small_pages"], SMALL_PAGES);
        }
        let groups = process["threads"].as_array().unwrap().iter().filter(|group| group["role"] == "vcpu");
        let vcpu_threads: Vec<&Value> = groups.collect();
        let count: u64 = vcpu_threads.iter().map(|group| group["threads"].as_u64().unwrap()).sum();
        assert_eq!(count, vcpus, "{process}");
        assert!(vcpu_threads.iter().all(|group| group["allowed_cpus"] == "0-7"), "{process}");
        let is_remote = memory_node != vcpu_node;
        let accesses = &process["accesses"];
        assert_eq!(accesses["remote_share"], if is_remote { 1.0 } else { 0.0 }, "{process}");
        assert_eq!(accesses["relative_distance"], if is_remote { 3.2 } else { 1.0 }, "{process}");
    }
    let huge = machine(&map["processes"], "wide-1")["memory"][0]["huge_pages"].as_u64().unwrap();
    assert!(huge > 0 && huge.is_multiple_of(512), "{huge}");
}

#[test]
fn plan_moves_the_machine_whose_memory_is_on_the_wrong_node() {
    let plan = report(&["numa", "plan", "--json"]);
    assert_eq!(plan["gap"], 0.0);
    let planned = |name| {
        let machine = machine(&plan["machines"], name);
        (machine["moved"] == true, machine["moved_pages"].as_u64().unwrap(), machine["parts"][0]["nodes"][0].clone())
    };
    assert_eq!(planned("far-1"), (true, SMALL_PAGES, 0.into()));
    assert_eq!([planned("wide-1").0, planned("near-1").0], [false; 2], "{plan}");
    let text = String::from_utf8(run(&["numa", "plan"]).stdout).unwrap();
    assert!(text.contains("far-1"), "{text}");
}

#[test]
fn prediction_counts_what_would_come_to_a_node() {
    let far = report(&["numa", "predict", "--vm", "far-1", "--to", "0", "--json"]);
    let far = &far["machines"][0];
    assert_eq!((&far["moved_pages"]["small"], &far["moved_bytes"]), (&9216.into(), &(SMALL_PAGES * 4096).into()));
    let shares = ["accesses_before", "accesses_after"].map(|when| far[when]["remote_share"].as_f64());
    assert_eq!(shares, [Some(1.0), Some(0.0)]);
    assert_eq!((&far["nodes"][0]["vcpus"], &far["nodes"][0]["fits"]), (&4.0.into(), &true.into()), "{far}");
    let wide = run(&["numa", "predict", "--vm", "wide-1", "--to", "0", "--json"]);
    assert_eq!(wide.status.code(), Some(1), "five vCPUs for four CPUs");
}

#[test]
fn placement_is_measured_in_its_command() {
    for dry_run in [true, false] {
        let arguments = ["numa", "apply", "--json", "--dry-run"];
        let applied = report(&arguments[..if dry_run { 4 } else { 3 }]);
        let mut machines = applied["machines"].as_array().unwrap().iter();
        let far = machines.find(|machine| machine["name"] == "far-1").unwrap();
        let moved = if dry_run { 0 } else { SMALL_PAGES };
        assert_eq!((&far["planned_pages"], &far["moved_pages"]), (&SMALL_PAGES.into(), &moved.into()), "{far}");
        let measured = (!dry_run).then_some(0.0);
        assert_eq!((&far["remote_share_before"], far["measured_remote_share"].as_f64()), (&1.0.into(), measured));
    }
}

#[test]
fn text_of_a_placement_says_that_it_ends_with_the_host() {
    let text = String::from_utf8(run(&["numa", "apply"]).stdout).unwrap();
    assert!(text.contains("Placed 3 machines: 36.0 MiB moved"), "{text}");
    assert!(text.contains("The simulated host ends with this command") && !text.contains("numa undo"), "{text}");
}

#[test]
fn refusals_name_the_reason_on_a_simulated_host() {
    let message = |arguments: &[&str]| {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let measured = message(&["numa", "plan", "--working-set", "10s"]);
    assert!(measured.contains("only machines that run on this host can be measured"), "{measured}");
    let undone = message(&["numa", "undo"]);
    assert!(undone.contains("only the live host can be changed"), "{undone}");
}

fn scenario() -> Scenario {
    parse_scenario(SCENARIO).unwrap()
}

/// The memory of each machine, by node, and the CPUs of its threads.
fn placements(map: &NumaMap) -> BTreeMap<String, (PageNodes, Vec<IdSet>)> {
    let placement = |placement: &ProcessPlacement| {
        let threads = placement.threads.iter().flatten().map(|thread| thread.allowed_cpus.clone()).collect();
        (placement_record::machine_name(placement), (placement.pages.clone(), threads))
    };
    map.processes.iter().map(placement).collect()
}

fn machine_map(host: &dyn Host) -> NumaMap {
    let mut map = read_map(host, &ProcessSelection::default()).unwrap();
    map.processes.retain(|placement| placement.process.identity.vm.is_some());
    map
}

/// The machines that a plan moves or binds, with their steps and records.
fn prepare(
    host: &dyn Host,
    map: &NumaMap,
    (problem, plan): (&PlacementProblem, &PlacementPlan),
) -> (Vec<PreparedMachine>, Vec<PlacedMachine>) {
    let moves = plan.moves.iter().zip(&problem.vms).enumerate();
    let targets: Vec<MachineTarget> = moves
        .filter_map(|(position, (planned, vm))| MachineTarget::planned(position, vm.parts.len(), planned, problem))
        .collect();
    let prepared = apply::prepare(host, map, &targets, &AtomicBool::new(false)).unwrap();
    let placed = targets.iter().zip(&prepared).map(|(target, steps)| PlacedMachine::new(map, target, steps)).collect();
    (prepared, placed)
}

fn policies(host: &dyn Host, map: &NumaMap) -> Vec<String> {
    let policies = map.processes.iter().flat_map(|placement| {
        let handle = host.open(placement.process.id.pid).unwrap();
        parse::memory_policies(&handle.read("numa_maps").unwrap()).into_values()
    });
    policies.collect()
}

#[test]
fn applied_plan_is_on_the_host_page_by_page_and_is_undone() {
    let scenario = scenario();
    let host = SimulatedHost::with_scenario("two nodes", &scenario, scenario.seed, Exactness::Exact);
    let directory = tempfile::tempdir().unwrap();
    let map = machine_map(&host);
    let before = placements(&map);
    let problem = placement_problem(&map, host.page_size(), PlanLimits::default());
    let plan = plan::plan(&problem, &mut || false);
    let (prepared, placed) = prepare(&host, &map, (&problem, &plan));
    let limits = ApplyLimits { bandwidth: None, headroom_share: 0.05, reserved: map.topology.reserved() };
    let (mut sessions, undone) = PlacementSessions::begin(&host, directory.path()).unwrap();
    assert_eq!(undone, (Vec::new(), Vec::new()));
    let outcome = apply::carry_out(&mut sessions, &prepared, limits, &mut |_, _| (), &AtomicBool::new(false)).unwrap();
    assert!(outcome.is_complete(), "{outcome:?}");
    assert_eq!(sessions.keep().unwrap(), Vec::new());
    let moved: u64 = outcome.machines.iter().map(|machine| machine.moved_pages.0).sum();
    assert_eq!(moved, SMALL_PAGES);

    let applied = machine_map(&host);
    let far = &placements(&applied)["far-1"];
    let nodes: Vec<(u32, u64)> = far.0.by_node.iter().map(|(&node, kinds)| (node, kinds.total().0)).collect();
    assert_eq!((nodes, far.0.zero), (vec![(0, SMALL_PAGES)], before["far-1"].0.zero));
    assert!(far.1.iter().all(|cpus| cpus.to_string() == "0-3"), "{far:?}");
    for machine in ["wide-1", "near-1"] {
        assert_eq!(placements(&applied)[machine].0, before[machine].0, "the memory of others stays");
    }
    let after = placement_problem(&applied, host.page_size(), PlanLimits::default());
    let next = plan::plan(&after, &mut || false);
    assert!(next.moves.iter().all(|planned| planned.moved_pages == 0.0), "nothing more is to be moved: {next:?}");
    assert!(policies(&host, &applied).contains(&MemoryPolicy::Prefer(0).to_string()));
    let verified = placement_record::verify_machines(&applied, outcome.records(&placed));
    assert!(!verified.is_empty());
    for machine in &verified {
        assert_eq!(machine.now.as_ref().map(|now| now.state()), Some(PlacementState::AsPlanned));
    }

    let (_, failed) = sessions.undo_kept(None).unwrap();
    assert_eq!(failed, Vec::new());
    let restored = machine_map(&host);
    assert_eq!(placements(&restored), before);
    assert_eq!(policies(&host, &restored), vec![MemoryPolicy::Default.to_string(); 3]);
}
