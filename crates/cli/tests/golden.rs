//! What every read-only command prints of every recorded host in `fixtures/recordings`, held against the files in
//! `fixtures/expected`. A folder that is put there is taken up by itself; `UPDATE_GOLDEN=1` writes what is expected.
//!
//! Where a recording has `layouts.txt`, what the lab laid out is the truth that the census must find.

use pagefold_labs::output_lines::{READY_PREFIX, RegionLine};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The commands, by the names of the files with what they print.
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
    // What the lab lays out is small.
    ("merge.txt", &["merge", "--dry-run", "--min-profit", "4KiB"]),
    ("unmerge.txt", &["unmerge", "--dry-run", "--all"]),
    ("policy.txt", &["policy", "show"]),
];

fn fixtures_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// The names of the recordings.
fn recording_names() -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(fixtures_path().join("recordings"))
        .expect("the recordings")
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 4, "{names:?}");
    names
}

fn run_on_recording(recording: &str, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pagefold"))
        // So that the name of the host is the same everywhere.
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

/// What was printed without what differs from run to run and from machine to machine: how long it took, and with what.
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
                    // As long as all the rest, and in the text.
                    "regions" => *value = value.as_array().map(Vec::len).into(),
                    _ => mask_json(value),
                }
            }
        }
        _ => {}
    }
}

/// Whether a recording has all of KSM's settings. Those that were made before they were kept have the advisor's mode
/// and not its bounds, of which `policy show` would say that the kernel has none.
fn has_ksm_settings(recording: &str) -> bool {
    let has = |file: &str| {
        fixtures_path().join("recordings").join(recording).join("files/sys/kernel/mm/ksm").join(file).exists()
    };
    has("advisor_max_cpu") || !has("advisor_mode")
}

#[test]
fn output_over_every_recording_matches_golden_files() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut wrong = Vec::new();
    for recording in recording_names() {
        let folder = fixtures_path().join("expected").join(&recording);
        for (file, arguments) in
            COMMANDS.iter().filter(|(file, _)| *file != "policy.txt" || has_ksm_settings(&recording))
        {
            let output = run_on_recording(&recording, arguments);
            let error = String::from_utf8_lossy(&output.stderr);
            let text = mask_text(std::str::from_utf8(&output.stdout).expect("UTF-8"));
            let code = output.status.code().expect("an exit code");
            let printed = format!("{text}{error}exit status {code}\n");
            let path = folder.join(file);
            if update {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, printed).unwrap();
                continue;
            }
            let expected = fs::read_to_string(&path).unwrap_or_default();
            if printed != expected {
                let differs = printed.lines().zip(expected.lines()).find(|(printed, expected)| printed != expected);
                wrong.push(format!("{recording}/{file}: {differs:#?}"));
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "not as in fixtures/expected; if it is right as it is now, UPDATE_GOLDEN=1 writes it down:\n{}",
        wrong.join("\n")
    );
}

#[test]
fn json_over_every_recording_matches_its_schema() {
    for recording in recording_names() {
        let whole = json_on_recording(&recording, &["doctor", "--json"]);
        assert_eq!(whole["processes"].as_array().map(Vec::len), Some(0), "the host was asked for, and no process");
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
            &["merge", "--dry-run", "--json", "--min-profit", "4KiB", "--whole", "--across-domains"],
            &["unmerge", "--dry-run", "--all", "--json"],
            &["policy", "show", "--json"],
        ] {
            let schema =
                fs::read(fixtures_path().join(format!("../docs/schema/{}.json", arguments[0]))).expect("a schema");
            let schema = serde_json::from_slice(&schema).expect("JSON");
            let report = json_on_recording(&recording, arguments);
            let validator = jsonschema::validator_for(&schema).expect("a schema");
            let wrong: Vec<String> = validator.iter_errors(&report).map(|error| error.to_string()).collect();
            assert!(wrong.is_empty(), "{recording} {arguments:?}: {wrong:#?}");
        }
    }
}

/// What the lab laid out: processes with their regions, in the order of `fixtures/scene.sh`.
fn recorded_layouts(recording: &str) -> Option<Vec<(u64, Vec<RegionLine>)>> {
    let text = fs::read_to_string(fixtures_path().join("recordings").join(recording).join("layouts.txt")).ok()?;
    let mut layouts = Vec::new();
    let mut regions = Vec::new();
    for line in text.lines() {
        match line.strip_prefix(READY_PREFIX) {
            Some(pid) => {
                let pid = pid.strip_prefix("pid=").expect("a number").parse().unwrap();
                layouts.push((pid, std::mem::take(&mut regions)));
            }
            None => regions.push(serde_json::from_str(line).unwrap()),
        }
    }
    Some(layouts)
}

/// The classes that a census found in a range of a process, in pages.
fn classes_of_region(census: &Value, pid: u64, region: &RegionLine) -> BTreeMap<String, u64> {
    let processes = census["processes"].as_array().unwrap();
    let process = processes.iter().find(|process| process["pid"] == pid).expect("the process");
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
        for (place, (pid, regions)) in layouts.iter().enumerate() {
            for region in regions {
                let enrolled = merged && place < 2;
                let expected: &[&str] = match (region.kind.as_str(), region.name.as_deref()) {
                    ("zero" | "within" | "shared-content", _) if enrolled => &["merged"],
                    ("zero", _) => &["zero"],
                    ("within", _) => &["duplicate", "duplicate_within_process"],
                    // Only root can make them another user's.
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
    let bytes = |way: &str| census["savings"][way]["gross"].as_u64().unwrap();
    // The third layout has, on the other node, 20 pages of which the first two have merged copies.
    let twice = 20 * census["page_size"].as_u64().unwrap();
    assert!(bytes("whole") + twice <= bytes("upper_bound"), "{:#}", census["savings"]);
}
