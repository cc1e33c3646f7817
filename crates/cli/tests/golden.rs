//! Compares the output of every read-only command over every recording in `fixtures/recordings` with the files in
//! `fixtures/expected`. A new recording directory is included automatically; `UPDATE_GOLDEN=1` rewrites the expected
//! files. So is the output of `vcpu map` over the schedules in `fixtures/vcpu`.
//!
//! If a recording has `layouts.txt`, the census must find exactly the layout described there.

use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The golden file of each command, and its arguments.
const COMMANDS: &[(&str, &[&str])] = &[
    ("census.txt", &["census", "--regions", "--extents"]),
    ("census.json", &["census", "--json", "--top", "3"]),
    ("account.txt", &["account"]),
    ("account-explain.txt", &["account", "--explain"]),
    ("account-vm.txt", &["account", "--by", "vm"]),
    ("account-cgroup.txt", &["account", "--by", "cgroup"]),
    ("account.json", &["account", "--explain", "--json"]),
    ("doctor.txt", &["doctor", "--verbose"]),
    ("doctor.json", &["doctor", "--json"]),
    // The lab's layouts are small, so their profit is, too.
    ("merge.txt", &["merge", "--dry-run", "--min-profit", "4KiB"]),
    ("unmerge.txt", &["unmerge", "--dry-run", "--all"]),
    ("policy.txt", &["policy", "show"]),
];

/// Further commands for recordings that have what these read.
const HOST_COMMANDS: &[(&str, &[&str])] = &[
    ("numa-map.txt", &["numa", "map"]),
    ("numa-map.json", &["numa", "map", "--json"]),
    ("tune-plan.txt", &["tune", "plan"]),
    ("tune-plan.json", &["tune", "plan", "--json"]),
    ("tune-throughput.txt", &["tune", "plan", "--profile", "throughput"]),
    ("tune-latency.txt", &["tune", "plan", "--profile", "latency"]),
    ("tune-density.txt", &["tune", "plan", "--profile", "density"]),
    ("tune-database.txt", &["tune", "plan", "--profile", "database"]),
    ("tune-htc.txt", &["tune", "plan", "--profile", "htc"]),
    ("tune-verify.txt", &["tune", "verify", "--guest-agent"]),
    ("tune-export.conf", &["tune", "export", "--format", "modprobe"]),
    // No recording has a state directory, so no placement is in force.
    ("numa-verify.txt", &["--state", "/nonexistent/pagefold", "numa", "verify"]),
    ("numa-verify.json", &["--state", "/nonexistent/pagefold", "numa", "verify", "--json"]),
];

/// The same for recordings with virtual machines. `numa plan` ends its search before the deadline, because the hosts are
/// small.
const VM_COMMANDS: &[(&str, &[&str])] = &[
    ("numa-plan.txt", &["numa", "plan", "--all-machines", "--vcpus-per-cpu", "2", "--deadline", "60s"]),
    ("numa-plan.json", &["numa", "plan", "--vcpus-per-cpu", "2", "--deadline", "60s", "--json"]),
    ("numa-predict.txt", &["numa", "predict", "--vm", "*", "--to", "0"]),
    // Hosts with fewer nodes have no node 1 or 2.
    ("numa-predict-1.txt", &["numa", "predict", "--vm", "*", "--to", "1"]),
    ("numa-predict-split.txt", &["numa", "predict", "--vm", "*", "--to", "0=0,1=1"]),
    ("numa-predict.json", &["numa", "predict", "--vm", "*", "--to", "1", "--json"]),
    ("numa-predict-crowded.txt", &["numa", "predict", "--vm", "*", "--to", "2", "--vcpus-per-cpu", "0.25"]),
    ("numa-apply-crowded.txt", &["numa", "apply", "--dry-run", "--vm", "*", "--to", "2", "--vcpus-per-cpu", "0.25"]),
    ("numa-apply.txt", &["numa", "apply", "--dry-run", "--vcpus-per-cpu", "2", "--deadline", "60s"]),
];

/// The recorded hosts with what [`HOST_COMMANDS`] read, and whether they have virtual machines.
const AUDITED_HOSTS: &[(&str, bool)] = &[
    ("four-nodes", true),
    ("kvm-host", true),
    ("kvm-host-tuned", true),
    ("libvirt-domain", true),
    ("no-kvm", false),
    ("two-nodes", true),
];

/// The golden files of `vcpu map` over the files in `fixtures/vcpu`, and its arguments. The tests of `crates/vcpu` compare
/// the figures with those computed by hand, and with the report of trace-cmd.
const SCHEDULE_COMMANDS: &[(&str, &[&str])] = &[
    ("two-vcpus.txt", &["two-vcpus.perf.data"]),
    ("two-vcpus.json", &["two-vcpus.perf.data", "--json"]),
    ("version-6.txt", &["three-vcpus.version-6.trace.dat", "--threads", "web=7963-7965"]),
    ("version-6-unassigned.txt", &["three-vcpus.version-6.trace.dat"]),
    ("version-7.txt", &["three-vcpus.version-7.trace.dat", "--threads", "web=7963-7964", "--threads", "db=7965"]),
];

/// All commands for a recording.
fn commands_for(recording: &str) -> Vec<(&'static str, &'static [&'static str])> {
    match AUDITED_HOSTS.iter().find(|(name, _)| *name == recording) {
        Some((_, true)) => [COMMANDS, HOST_COMMANDS, VM_COMMANDS].concat(),
        Some((_, false)) => [COMMANDS, HOST_COMMANDS].concat(),
        None => COMMANDS.to_vec(),
    }
}

fn fixtures_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// The names of the recordings.
fn recording_names() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixtures_path().join("recordings"))
        .expect("cannot read fixtures/recordings")
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 4, "{names:?}");
    names
}

fn run_on_recording(recording: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        // Relative paths make the host's name the same on every machine.
        .current_dir(fixtures_path().join("recordings"))
        .env_remove("COLUMNS")
        .args(["--host", &format!("recording:{recording}")])
        .args(arguments)
        .output()
        .expect("the binary runs")
}

fn json_on_recording(recording: &str, arguments: &[&str]) -> Value {
    serde_json::from_slice(&run_on_recording(recording, arguments).stdout).expect("JSON")
}

/// The output without the parts that differ between runs and machines: durations and the resources used.
fn mask_text(text: &str) -> String {
    if let Ok(mut report) = serde_json::from_str::<Value>(text) {
        mask_json(&mut report);
        return serde_json::to_string_pretty(&report).unwrap() + "\n";
    }
    let mask = |line| if str::starts_with(line, "Read ") { "Read masked" } else { line };
    text.lines().flat_map(|line| [mask(line), "\n"]).collect()
}

fn mask_json(value: &mut Value) {
    match value {
        Value::Array(elements) => elements.iter_mut().for_each(mask_json),
        Value::Object(fields) => {
            for (name, value) in fields {
                match name.as_str() {
                    "seconds" | "bytes_per_second" | "index_bytes" | "fingerprint" => *value = "masked".into(),
                    // As long as the rest of the report, and included in the text output.
                    "regions" => *value = value.as_array().map(Vec::len).into(),
                    _ => mask_json(value),
                }
            }
        }
        _ => {}
    }
}

/// Whether a recording has all of KSM's settings. Old recordings have the advisor's mode but not its bounds, and
/// `policy show` would report that the kernel has none.
fn has_ksm_settings(recording: &str) -> bool {
    let has = |file: &str| {
        fixtures_path().join("recordings").join(recording).join("files/sys/kernel/mm/ksm").join(file).exists()
    };
    has("advisor_max_cpu") || !has("advisor_mode")
}

/// What a command printed, and its exit status.
fn printed_text(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    let text = mask_text(std::str::from_utf8(&output.stdout).expect("the output is not UTF-8"));
    let code = output.status.code().expect("pagefold was killed by a signal");
    format!("{text}{error}exit status {code}\n")
}

/// The first difference from a file below `fixtures/expected`, which is rewritten if `UPDATE_GOLDEN` is set.
fn golden_difference(file: &str, printed: &str) -> Option<String> {
    let path = fixtures_path().join("expected").join(file);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::create_dir_all(path.parent().expect("a folder")).unwrap();
        fs::write(&path, printed).unwrap();
        return None;
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    if printed == expected {
        return None;
    }
    let first_difference = printed.lines().zip(expected.lines()).find(|(printed, expected)| printed != expected);
    Some(format!("{file}: {first_difference:#?}"))
}

fn assert_no_difference(differences: &[String]) {
    assert!(
        differences.is_empty(),
        "the output differs from fixtures/expected; if the new output is correct, run with UPDATE_GOLDEN=1:\n{}",
        differences.join("\n")
    );
}

#[test]
fn output_over_every_recording_matches_golden_files() {
    let mut differences = Vec::new();
    for recording in recording_names() {
        for (file, arguments) in commands_for(&recording)
            .into_iter()
            .filter(|(file, _)| *file != "policy.txt" || has_ksm_settings(&recording))
        {
            let printed = printed_text(&run_on_recording(&recording, arguments));
            differences.extend(golden_difference(&format!("{recording}/{file}"), &printed));
        }
    }
    assert_no_difference(&differences);
}

#[test]
fn output_over_recorded_schedules_matches_golden_files() {
    let mut differences = Vec::new();
    for (file, arguments) in SCHEDULE_COMMANDS {
        let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
        pagefold.current_dir(fixtures_path().join("vcpu")).env_remove("COLUMNS").args(["vcpu", "map"]).args(*arguments);
        let printed = printed_text(&pagefold.output().expect("the binary runs"));
        differences.extend(golden_difference(&format!("vcpu/{file}"), &printed));
    }
    assert_no_difference(&differences);
}

#[test]
fn json_over_every_recording_matches_its_schema() {
    for recording in recording_names() {
        let host_report = json_on_recording(&recording, &["doctor", "--json"]);
        assert_eq!(host_report["processes"].as_array().map(Vec::len), Some(0), "a report on the host lists processes");
        let census = json_on_recording(&recording, &["census", "--json"]);
        let pid = format!("--pid={}", census["processes"][0]["pid"]);
        for arguments in [
            &["census", "--json", "--regions"][..],
            &["census", "--json", "--sample", "50%"],
            &["account", "--json"],
            &["account", "--json", "--explain", "--by", "cgroup"],
            &["doctor", "--json"],
            &["doctor", "--json", &pid],
            &["merge", "--dry-run", "--json"],
            &["merge", "--dry-run", "--json", "--min-profit", "4KiB", "--across-domains"],
            &["merge", "--dry-run", "--json", "--min-profit", "4KiB", "--whole-processes", "--across-domains"],
            &["unmerge", "--dry-run", "--all", "--json"],
            &["policy", "show", "--json"],
        ] {
            let schema =
                fs::read(fixtures_path().join(format!("../docs/schema/{}.json", arguments[0]))).expect("no schema");
            let schema = serde_json::from_slice(&schema).expect("JSON");
            let report = json_on_recording(&recording, arguments);
            let validator = jsonschema::validator_for(&schema).expect("the schema is not valid");
            let schema_errors: Vec<String> = validator.iter_errors(&report).map(|error| error.to_string()).collect();
            assert!(schema_errors.is_empty(), "{recording} {arguments:?}: {schema_errors:#?}");
        }
    }
}

/// The recorded layouts: processes with their regions, in the order of `fixtures/scene.sh`.
fn recorded_layouts(recording: &str) -> Option<Vec<(u64, Vec<RegionLine>)>> {
    let text = fs::read_to_string(fixtures_path().join("recordings").join(recording).join("layouts.txt")).ok()?;
    let mut layouts = Vec::new();
    let mut regions = Vec::new();
    for line in text.lines() {
        match line.strip_prefix(READY_PREFIX) {
            Some(pid) => {
                let pid = pid.strip_prefix("pid=").expect("a layout must begin with pid=").parse().unwrap();
                layouts.push((pid, std::mem::take(&mut regions)));
            }
            None => regions.push(serde_json::from_str(line).unwrap()),
        }
    }
    Some(layouts)
}

/// The classes that a census found in a region of a process, in pages.
fn classes_of_region(census: &Value, pid: u64, region: &RegionLine) -> BTreeMap<String, u64> {
    let processes = census["processes"].as_array().unwrap();
    let process = processes.iter().find(|process| process["pid"] == pid).expect("the census has no such process");
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for part in process["regions"].as_array().unwrap() {
        let start = u64::from_str_radix(part["start"].as_str().unwrap(), 16).unwrap();
        if (region.start..region.end_address()).contains(&start) {
            for (class, pages) in part["pages"].as_object().unwrap() {
                *sums.entry(class.clone()).or_default() += pages.as_u64().unwrap();
            }
        }
    }
    sums.retain(|class, pages| *pages > 0 && class != "resident" && class != "redundant");
    sums
}

#[test]
fn census_finds_the_recorded_layouts() {
    let mut checked = 0;
    for recording in recording_names() {
        let Some(layouts) = recorded_layouts(&recording) else { continue };
        assert_eq!(layouts.len(), 4, "{recording}");
        let census = json_on_recording(&recording, &["census", "--json"]);
        let (merged, root) = (recording != "unprivileged", !recording.ends_with("unprivileged"));
        for (position, (pid, regions)) in layouts.iter().enumerate() {
            for region in regions {
                let enrolled = merged && position < 2;
                let expected: &[&str] = match (region.kind.as_str(), region.name.as_deref()) {
                    ("zero" | "within" | "shared-content", _) if enrolled => &["merged"],
                    ("zero", _) => &["zero"],
                    ("within", _) => &["duplicate", "duplicate_within_process"],
                    // Only root can start this process as another user.
                    ("shared-content", Some("late")) if root => &["duplicate", "duplicate_across_domains"],
                    ("shared-content", _) => &["duplicate", "duplicate_within_domain"],
                    ("volatile", _) => &["volatile"],
                    ("unique" | "file-written" | "fork-shared" | "huge", _) => &["unique"],
                    _ => &[],
                };
                let expected: BTreeMap<String, u64> =
                    expected.iter().map(|&class| (class.to_owned(), region.resident)).collect();
                assert_eq!(classes_of_region(&census, *pid, region), expected, "{recording}: {region:?}");
                checked += 1;
            }
        }
    }
    assert!(checked >= 4 * 26, "{checked}");
}

#[test]
fn recording_keeps_the_numa_node_of_frames() {
    let census = json_on_recording("linux-6.1", &["census", "--json"]);
    let bytes = |kind: &str| census["savings"][kind]["gross"].as_u64().unwrap();
    // The third layout, on the other node, has 20 pages whose content is merged in the first two.
    let other_node_bytes = 20 * census["page_size"].as_u64().unwrap();
    assert!(bytes("whole_processes") + other_node_bytes <= bytes("upper_bound"), "{:#}", census["savings"]);
}

#[test]
fn audits_of_a_recorded_host_repeat_exactly() {
    for &(recording, has_machines) in AUDITED_HOSTS {
        let vm_commands = if has_machines { VM_COMMANDS } else { &[] };
        let doctor: &[(&str, &[&str])] = &[("", &["doctor", "--verbose"]), ("", &["doctor", "--json"])];
        for (_, arguments) in [doctor, HOST_COMMANDS, vm_commands].concat() {
            let run = || {
                let output = run_on_recording(recording, arguments);
                (mask_text(&String::from_utf8(output.stdout).unwrap()), output.stderr, output.status.code())
            };
            let (text, stderr, code) = run();
            assert!(
                !text.is_empty() || !stderr.is_empty(),
                "{recording} {arguments:?}: {}",
                String::from_utf8_lossy(&stderr)
            );
            assert_eq!((text, stderr, code), run(), "{recording} {arguments:?}");
        }
    }
}

#[test]
fn recorded_domain_has_its_uuid_and_no_secrets() {
    let map = json_on_recording("libvirt-domain", &["numa", "map", "--json"]);
    let processes = map["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 1, "{map}");
    let uuid = processes[0]["libvirt_uuid"].as_str().expect("a domain of libvirt");
    let files = fixtures_path().join("recordings/libvirt-domain/files");
    for folder in ["etc/libvirt/qemu", "run/libvirt/qemu"] {
        let xml = fs::read_to_string(files.join(folder).join("db.xml")).unwrap();
        assert!(xml.contains("<name>db</name>") && xml.contains(&format!("<uuid>{uuid}</uuid>")), "{xml}");
        // fixtures/record.sh gives the domain a password of its display and metadata.
        assert!(!xml.contains("passwd") && !xml.contains("acme"), "{xml}");
    }
}

/// One host with libvirt, two nodes, and a domain with a virtual node for each: as `fixtures/two-nodes.xml` defines it.
#[test]
fn recorded_domain_has_both_virtual_nodes_on_one_of_two_nodes() {
    let map = json_on_recording("two-nodes", &["numa", "map", "--json"]);
    assert_eq!(map["nodes"].as_array().map(Vec::len), Some(2), "{map}");
    let domain = &map["processes"][0];
    let definition = fs::read_to_string(fixtures_path().join("two-nodes.xml")).unwrap();
    let uuid = domain["libvirt_uuid"].as_str().expect("a domain of libvirt");
    assert!(definition.contains(uuid), "{definition}");
    let virtual_nodes = domain["virtual_nodes"].as_array().expect("virtual nodes");
    let placed: Vec<[Option<u64>; 3]> = virtual_nodes
        .iter()
        .flat_map(|virtual_node| {
            let number = virtual_node["virtual_node"].as_u64();
            virtual_node["memory"]
                .as_array()
                .into_iter()
                .flatten()
                .map(move |memory| [number, memory["node"].as_u64(), memory["pages"].as_u64()])
        })
        .collect();
    // 16 MiB and 12 MiB, both on node 0.
    assert_eq!(placed, [[Some(0), Some(0), Some(4096)], [Some(1), Some(0), Some(3072)]]);
}

#[test]
fn machine_is_selected_by_its_uuid() {
    const UUID: &str = "75456A3F-32b5-4a96-8928-6c2058a9e71e";
    let map = json_on_recording("libvirt-domain", &["numa", "map", "--json", "--vm", UUID]);
    assert_eq!(map["processes"].as_array().map(Vec::len), Some(1), "{map}");
    let others = ["75456a3f-0000-4a96-8928-6c2058a9e71e", "db9"];
    for (command, vm) in [(&["census"][..], others[0]), (&["account"], others[1]), (&["numa", "plan"], others[1])] {
        let output = run_on_recording("libvirt-domain", &[command, &["--vm", vm]].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{command:?}: {error}");
        let expected = format!("--vm {vm}: no virtual machine with this name or UUID matches all options");
        assert!(error.contains(&expected) && error.trim_end().ends_with("these are running: db"), "{error}");
    }
}

/// A run of frames across two memory blocks must not be one line, because each block has numbers of its own.
#[test]
fn every_recorded_frame_is_known() {
    for recording in recording_names() {
        let text = |file: &str| fs::read_to_string(fixtures_path().join("recordings").join(&recording).join(file));
        let frames: Vec<(u64, u64)> = text("frames.txt")
            .unwrap_or_default()
            .lines()
            .filter_map(|line| {
                let mut words = line.split(' ').map(|word| word.parse::<u64>().ok());
                Some((words.next()??, words.next()??))
            })
            .collect();
        for entry in fs::read_dir(fixtures_path().join("recordings").join(&recording).join("pages")).unwrap() {
            for line in fs::read_to_string(entry.unwrap().path()).unwrap().lines() {
                let words: Vec<&str> = line.split(' ').collect();
                let (count, Ok(first)) = (words[1].parse::<u64>().unwrap(), words[2].parse::<u64>()) else { continue };
                for frame in first..first + count {
                    let is_known = frames.iter().any(|(start, count)| (*start..start + count).contains(&frame));
                    assert!(is_known, "{recording}: {line}: {frame}");
                }
            }
        }
    }
}
