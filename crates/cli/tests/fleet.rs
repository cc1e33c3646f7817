//! The census of real virtual machines: their names, their common content, and their memory as regions of QEMU.

use pagefold_labs::assets::GuestAssets;
use pagefold_labs::client::RunningLab;
use serde_json::Value;
use std::process::Command;

fn report_json(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(arguments).output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

#[test]
fn guests_are_named_and_share_their_common_data() {
    if let Err(why) = GuestAssets::find(&GuestAssets::default_directory()) {
        return println!("skipped: {why}");
    }
    if !nix::unistd::geteuid().is_root() {
        return println!("skipped: needs root to read other processes");
    }
    const BYTES_PER_MIB: u64 = 1 << 20;
    let arguments =
        ["--guests", "2", "--memory", "112", "--shared-mib", "16", "--unique-mib", "8", "--name-prefix", "twin"];
    let fleet = RunningLab::start_fleet(&arguments).expect("cannot start two guests");
    let census = report_json(&["census", "--json", "--vm", "twin-0", "--vm", "twin-1"]);
    let vms = census["vms"].as_array().unwrap();
    assert_eq!(vms.len(), 2, "{vms:?}");
    for (process, guest) in census["processes"].as_array().unwrap().iter().zip(fleet.lines()) {
        assert_eq!(process["pid"], guest.pid);
        assert_eq!(process["vm"]["name"], guest.name.as_str());
        assert_eq!(process["vm"]["monitor"], "qemu");
        assert_eq!(process["vm"]["memory_bytes"], 112 * BYTES_PER_MIB);
        // Guests started by root are separate trust domains, so their common content crosses domains.
        assert!(
            process["bytes"]["duplicate_across_domains"].as_u64().unwrap() >= 16 * BYTES_PER_MIB,
            "{}",
            process["bytes"]
        );
        let unique_bytes = process["bytes"]["unique"].as_u64().unwrap();
        assert!(unique_bytes >= 8 * BYTES_PER_MIB, "{}", process["bytes"]);
        let ram = process["regions"].as_array().unwrap().iter().find(|region| {
            let end = |name: &str| u64::from_str_radix(region[name].as_str().unwrap(), 16).unwrap();
            end("end") - end("start") == 112 * BYTES_PER_MIB
        });
        assert_eq!(ram.expect("no region is guest RAM")["mergeable"], true);
    }
    let matrix = &census["matrix"]["pages"];
    let shared = matrix[0][1].as_u64().unwrap() * census["page_size"].as_u64().unwrap();
    assert!(shared >= 16 * BYTES_PER_MIB, "{matrix}");
    // All copies but one of the common content can be saved: at least 16 MiB.
    assert!(census["savings"]["whole_processes"]["gross"].as_u64().unwrap() >= 16 * BYTES_PER_MIB);
    // Guided savings respect trust domains. As one domain, the guests save more than by enrolling them whole.
    let single_domain = report_json(&["census", "--json", "--domains", "host", "--vm", "twin-0", "--vm", "twin-1"]);
    assert!(
        single_domain["savings"]["guided"]["net"].as_i64()
            >= single_domain["savings"]["whole_processes"]["net"].as_i64(),
        "{}",
        single_domain["savings"]
    );
    assert!(census["savings"]["guided"]["net"].as_i64() < single_domain["savings"]["guided"]["net"].as_i64());

    let account = report_json(&["account", "--json", "--by", "vm", "--vm", "twin-0", "--vm", "twin-1"]);
    let text = account.to_string();
    assert!(text.contains("twin-0") && text.contains("twin-1"), "{text}");
}
