//! `pagefold sim compare` and `sim tune`: policies compared by the model of ksmd. Results follow from the seed alone, so they are
//! compared with files in `fixtures/expected/sim`; `UPDATE_GOLDEN=1` rewrites these.

use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn sim(command: &str, arguments: &[&str]) -> Output {
    let folder = root().join("fixtures/sim");
    let mut pagefold = Command::new(env!("CARGO_BIN_EXE_pagefold"));
    pagefold.current_dir(folder).args(["sim", command]).args(arguments).output().unwrap()
}

fn compare(arguments: &[&str]) -> Output {
    sim("compare", arguments)
}

fn stdout(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr_of_refusal(arguments: &[&str]) -> String {
    let output = compare(arguments);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn check_golden(name: &str, found: &str) {
    let path = root().join("fixtures/expected/sim").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, found).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, expected, "{} differs: read the difference, then run with UPDATE_GOLDEN=1", path.display());
}

const POLICIES: &str = "default,ksmtuned,advisor:20,flat-out,whole:2000/20";

#[test]
fn comparison_of_a_small_host_is_as_expected() {
    let text = stdout(&compare(&["small-host.toml", "--policy", POLICIES, "--seeds", "2"]));
    check_golden("small-host.txt", &text);
}

#[test]
fn json_of_a_small_host_is_as_expected_and_has_its_schema() {
    let text = stdout(&compare(&["small-host.toml", "--policy", "whole:2000/20", "--json"]));
    check_golden("small-host.json", &text);
    check_schema("sim-compare", &text);
}

#[test]
fn part_of_a_host_has_a_part_of_its_memory() {
    let policies = ["small-host.toml", "--policy", "default,guided:across-domains", "--json"];
    let whole = check_schema("sim-compare", &stdout(&compare(&policies)));
    let part = check_schema("sim-compare", &stdout(&compare(&[&policies[..], &["--scale", "2"]].concat())));
    let memory = |report: &Value| report["memory_bytes"].as_u64().unwrap();
    assert_eq!(memory(&whole), 2 * memory(&part));
    assert_eq!(part["description"], format!("{} (1/2 of the memory)", whole["description"].as_str().unwrap()));
    let wait = |report: &Value, policy: usize| report["policies"][policy]["scan_wait"].clone();
    assert!(wait(&part, 0).is_null(), "ksmd alone has no scans of the daemon");
    let seconds = |name: &str| wait(&part, 1)[name].as_f64().unwrap();
    assert!(seconds("longest_seconds") > 0.0 && seconds("priority_seconds") >= 60.0, "{}", wait(&part, 1));
    for conflict in ["--list", "--print"] {
        assert!(stderr_of_refusal(&["small-host.toml", "--scale", "2", conflict]).contains("cannot be used with"));
    }
}

/// Returns the report.
fn check_schema(name: &str, report: &str) -> Value {
    let schema = Command::new(env!("CARGO_BIN_EXE_pagefold")).args(["schema", name]).output().unwrap();
    let schema: Value = serde_json::from_slice(&schema.stdout).unwrap();
    let report: Value = serde_json::from_str(report).unwrap();
    jsonschema::validate(&schema, &report).unwrap();
    report
}

#[test]
fn search_on_a_small_host_is_as_expected() {
    let text = stdout(&sim("tune", &["small-host.toml", "--goal", "cpu", "--rounds", "1"]));
    check_golden("small-host-tune.txt", &text);
}

#[test]
fn search_without_a_policy_within_the_bound_is_a_negative_verdict() {
    let output = sim("tune", &["small-host.toml", "--max-cpu", "0.000001", "--rounds", "0", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report = check_schema("sim-tune", &String::from_utf8_lossy(&output.stdout));
    assert!(report["choice"].is_null() && report["max_cores"].as_f64() == Some(1e-6), "{report}");
    assert_eq!(report["tried"].as_array().unwrap().len(), 17);
    let refused = sim("tune", &["small-host.toml", "--max-cpu", "0"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("give a number of CPUs above 0"));
}

#[test]
fn bound_in_the_name_of_the_daemon_holds() {
    let folder = tempfile::tempdir().unwrap();
    let [scenario, config] = ["classes.toml", "pagefold.toml"].map(|name| folder.path().join(name));
    fs::write(&scenario, CLASSES.replace("64 MiB", "256 MiB").replace("4 GiB", "16 GiB")).unwrap();
    // The default burst would pay for all of this hour.
    fs::write(&config, "[daemon]\ncpu_burst = \"200ms\"\n").unwrap();
    let policies = "guided:across-domains:0.1%,guided:across-domains:100%";
    let [scenario, config] = [&scenario, &config].map(|path| path.to_str().unwrap());
    let output = compare(&[scenario, "--config", config, "--json", "--policy", policies]);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let figure = |policy: usize, name: &str| report["policies"][policy][name]["mean"].as_f64().unwrap();
    let [least, most] = [0, 1].map(|policy| figure(policy, "saved_gib_hours"));
    assert!(0.0 < least && least < 0.7 * most, "{least} and {most} GiB*h");
    // The burst, and what the daemon spends between two readings.
    let cores = figure(0, "cores");
    assert!(cores <= 0.001 + (0.2 + 0.1) / 3600.0, "{cores} CPUs");
}

#[test]
fn search_has_bounds_of_the_daemon_on_request() {
    let output = sim("tune", &["small-host.toml", "--daemon", "guided:across-domains", "--rounds", "1", "--json"]);
    let report = check_schema("sim-tune", &stdout(&output));
    let tried = report["tried"].as_array().unwrap();
    let daemons: Vec<&Value> = tried
        .iter()
        .filter(|policy| policy["policy"].as_str().unwrap().starts_with("guided:across-domains:"))
        .collect();
    assert!(daemons.len() >= 5, "{report}");
    assert!(daemons.iter().all(|daemon| daemon["cores"].as_f64().unwrap() > 0.0), "{report}");
    for refused in ["default", "guided:5%"] {
        let output = sim("tune", &["small-host.toml", "--daemon", refused]);
        assert_eq!(output.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&output.stderr).contains("give guided or guided:across-domains"));
    }
}

#[test]
fn result_does_not_depend_on_threads() {
    let arguments = ["small-host.toml", "--policy", "default,flat-out", "--seeds", "2", "--json", "--threads"];
    let with_threads = |threads| stdout(&compare(&[&arguments[..], &[threads]].concat()));
    assert_eq!(with_threads("1"), with_threads("3"));
}

/// Three classes of four machines, one each ten minutes, for an hour.
const CLASSES: &str = "description = 'classes'\nduration = '1h'\nsample = '1min'\ntick = '5s'\n\
    [host]\nmemory = '4 GiB'\nused = '256 MiB'\ncpus = 4\nkernel = '6.18.44'\n\
    [[template]]\nname = 'lab'\nsize = '64 MiB'\nzero = 0.1\ncommon = 0.4\nunique = 0.3\nrun_pages = [16, 256]\n\
    writes = [{ content = 'unique', share = 0.05, pages_per_second = 2.0 }]\n\
    [[machines]]\nname = 'class'\ntemplate = 'lab'\ncount = 12\nwave = 4\nevery = '10min'";

#[test]
fn daemon_saves_nearly_as_much_as_flat_out_and_does_the_same_in_each_run() {
    let folder = tempfile::tempdir().unwrap();
    let scenario = folder.path().join("classes.toml");
    fs::write(&scenario, CLASSES).unwrap();
    let arguments = |policies| [scenario.to_str().unwrap(), "--config", "/dev/null", "--json", "--policy", policies];
    let report = stdout(&compare(&arguments("whole:20000/20,guided,guided:across-domains")));
    let parsed: Value = serde_json::from_str(&report).unwrap();
    let figure = |policy: usize, name: &str| parsed["policies"][policy][name]["mean"].as_f64().unwrap();
    let [(all, fast), (own, _), (across, slow)] =
        [0, 1, 2].map(|policy| (figure(policy, "saved_bytes"), figure(policy, "cores")));
    // Between machines, only pages of zeros merge.
    assert!(0.0 < own && own < 0.4 * all, "{own} of {all}: {report}");
    assert!(across >= 0.95 * all && slow < 0.2 * fast, "{across} of {all}, {slow} of {fast} CPUs: {report}");
    assert_eq!((figure(0, "pagefold_cores"), figure(2, "pagefold_cores") > 0.0), (0.0, true));
    check_schema("sim-compare", &report);
    let alone = |policy| -> Value { serde_json::from_str(&stdout(&compare(&arguments(policy)))).unwrap() };
    assert_eq!(alone("guided:across-domains")["policies"][0], parsed["policies"][2]);
}

#[test]
fn picture_and_parquet_are_written() {
    let folder = tempfile::tempdir().unwrap();
    let (svg, parquet) = (folder.path().join("small.svg"), folder.path().join("small.parquet"));
    let mut arguments = vec!["small-host.toml", "--policy", "flat-out", "--picture", svg.to_str().unwrap()];
    if cfg!(feature = "parquet") {
        arguments.extend(["--parquet", parquet.to_str().unwrap()]);
    }
    stdout(&compare(&arguments));
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>") && svg.contains("A small host"));
    assert_eq!(cfg!(feature = "parquet"), fs::read(parquet).is_ok_and(|bytes| bytes.starts_with(b"PAR1")));
}

#[test]
fn printed_scenario_is_accepted_as_a_file_and_errors_name_its_lines() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mine.toml");
    let file_name = file.to_str().unwrap();
    let text = stdout(&compare(&["lab-48-slow", "--print"]));
    fs::write(&file, text.replace("\"6h\"", "\"1min\"")).unwrap();
    assert!(stdout(&compare(&[file_name, "--policy", "default"])).contains("100 small identical VMs"));
    fs::write(&file, text.replace("cpus = 48", "cpus = 0")).unwrap();
    let line = 1 + text.lines().position(|line| line == "cpus = 48").unwrap();
    let error = stderr_of_refusal(&[file_name]);
    assert!(error.contains(&format!("line {line}: cpus is 0: give 1 to 8192")), "{error}");
}

#[test]
fn unknown_scenarios_and_policies_are_refused_with_a_remedy() {
    let error = stderr_of_refusal(&["no-such-scenario"]);
    assert!(error.contains("neither a shipped scenario nor a file no-such-scenario: `pagefold sim compare --list`"));
    let error = stderr_of_refusal(&["lab-48", "--policy", "default,guide"]);
    assert!(error.contains("guide: no such policy; compare default"), "{error}");
    let error = stderr_of_refusal(&["lab-48", "--policy", "advisor"]);
    assert!(error.contains("advisor: Linux 4.15 has no scan-time advisor: choose another policy"), "{error}");
}

#[test]
fn shipped_scenarios_are_listed() {
    let text = stdout(&compare(&["--list"]));
    assert!(text.contains("lab-48-slow") && text.contains("oltp-144"), "{text}");
}
