//! `pagefold numa` on a simulated host with two nodes, of which the scenario tells where memory is and where vCPUs run.
//! The memory of `far` is on node 1 and its vCPUs run on node 0. Beside `wide`, they have too few CPUs on node 1.

use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

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
fn refusals_name_the_reason_on_a_simulated_host() {
    let message = |arguments: &[&str]| {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let measured = message(&["numa", "plan", "--working-set", "10s"]);
    assert!(measured.contains("only machines that run on this host can be measured"), "{measured}");
    let applied = message(&["numa", "apply"]);
    assert!(applied.contains("only the live host can be changed"), "{applied}");
}
