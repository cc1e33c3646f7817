//! The metrics of the fixture, compared with golden files and checked with Prometheus' own tools. Alert rules and
//! dashboard may only use existing metrics and labels.

mod common;

use common::{find_program, fixture_status, repository_path, status_without_optional_fields};
use pagefold_daemon::wire::{DomainSavingsReport, StatusReport, TrackedProcessReport, group_footprints};
use pagefold_watch::metrics::{MAX_NAMED_SERIES, MetricsFormat, render_metrics};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The names of the samples.
fn sample_names(text: &str) -> BTreeSet<&str> {
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    samples.map(|line| line.split(['{', ' ']).next().unwrap_or_default()).collect()
}

/// The values of samples that begin with this text.
fn sample_values(text: &str, sample: &str) -> Vec<f64> {
    let found = text.lines().filter(|line| line.starts_with(sample));
    found.map(|line| line.rsplit_once(' ').expect("a sample").1.parse().expect("a number")).collect()
}

/// A status with more items of each kind than there are named series.
fn crowded_status() -> StatusReport {
    let mut status = fixture_status();
    let process = status.tracked_processes[0].clone();
    status.tracked_processes = (0..1000)
        .map(|n| TrackedProcessReport {
            label: format!("vm-{n}"),
            workload: format!("vm-{n}"),
            cgroup: Some(format!("/machine/{n}")),
            footprint: Some(1000 - n),
            ..process.clone()
        })
        .collect();
    status.workloads = group_footprints::sum_by_workload(&status.tracked_processes);
    status.cgroups = group_footprints::sum_by_cgroup(&status.tracked_processes);
    status.decisions_by_reason = (0..500).map(|n| (format!("reason-{n}"), 1)).collect();
    status
}

#[test]
fn fixture_metrics_match_golden_files() {
    for (file, format) in [("metrics.txt", MetricsFormat::Prometheus), ("openmetrics.txt", MetricsFormat::OpenMetrics)]
    {
        let path = repository_path("crates/watch/tests/expected").join(file);
        let found = render_metrics(&fixture_status(), format);
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, &found).unwrap();
        }
        let expected = fs::read_to_string(&path).expect("UPDATE_GOLDEN=1 writes it");
        for (line, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
            assert_eq!(found, expected, "{file}, line {}", line + 1);
        }
        assert_eq!(found, expected, "{file}");
    }
}

#[test]
fn absent_figures_have_no_sample() {
    let text = render_metrics(&status_without_optional_fields(), MetricsFormat::Prometheus);
    for absent in [
        "pagefold_saved_",
        "pagefold_ksm_",
        "pagefold_memory_",
        "pagefold_cpu_",
        "pagefold_census_",
        "pagefold_tracked_process_",
        "pagefold_workload_",
        "pagefold_cgroup_",
        "pagefold_findings",
    ] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert_eq!(sample_values(&text, "pagefold_mode{mode=\"act\"}"), [1.0]);
}

#[test]
fn series_are_bounded_and_sums_are_kept() {
    let status = crowded_status();
    let text = render_metrics(&status, MetricsFormat::Prometheus);
    for (family, sum) in [
        ("pagefold_tracked_process_footprint_bytes{", 500_500.0),
        ("pagefold_workload_footprint_bytes{", 500_500.0),
        ("pagefold_cgroup_footprint_bytes{", 500_500.0),
        ("pagefold_decisions_total{", 500.0),
    ] {
        let values = sample_values(&text, family);
        assert_eq!(values.len(), MAX_NAMED_SERIES + 1, "{family}");
        assert!((values.iter().sum::<f64>() - sum).abs() < 0.5, "{family}");
    }
    for (group, label) in [("tracked_process", "process"), ("workload", "workload")] {
        let others = format!("pagefold_{group}_footprint_bytes{{kind=\"others\",{label}=\"others\"");
        assert_eq!(sample_values(&text, &others).len(), 1, "{group}");
    }
}

#[test]
fn parts_sum_to_their_total() {
    let text = render_metrics(&fixture_status(), MetricsFormat::Prometheus);
    let sum = |samples: &str| sample_values(&text, samples).iter().sum::<f64>();
    assert_eq!(sum("pagefold_saved_class_bytes{"), sum("pagefold_saved_gross_bytes"));
    assert_eq!(sum("pagefold_saved_class_net_bytes{"), sum("pagefold_saved_net_bytes"));
    let metadata: u64 = fixture_status().tracked_processes.iter().filter_map(|process| process.metadata).sum();
    assert_eq!(sum("pagefold_domain_saved_net_bytes{"), sum("pagefold_domain_saved_bytes{") - metadata as f64);
    assert_eq!(sum("pagefold_domain_merged_bytes{"), sum("pagefold_tracked_process_merged_bytes{"));
    for kind in ["vm", "container", "job"] {
        let of = |family: &str| sum(&format!("pagefold_{family}_saved_bytes{{kind=\"{kind}\""));
        assert_eq!(of("workload"), of("tracked_process"), "{kind}");
        assert!(of("tracked_process") > 0.0, "{kind}");
    }
    assert!(
        sample_values(&text, "pagefold_workload_saved_bytes{kind=\"process\"").is_empty(),
        "numbers make no series"
    );
    // Files count once in a job.
    assert!(
        sum("pagefold_workload_footprint_bytes{kind=\"job\"")
            < sum("pagefold_tracked_process_footprint_bytes{kind=\"job\"")
    );
    // Findings without a problem are counted, and 0 is reported.
    assert_eq!(sample_values(&text, "pagefold_findings{verdict=\"ok\"}"), [24.0]);
    assert_eq!(sample_values(&text, "pagefold_findings{verdict=\"fail\"}"), [0.0]);
}

#[test]
fn labels_are_escaped_and_series_unique() {
    let mut status = fixture_status();
    let mut twin = status.tracked_processes[0].clone();
    twin.pid += 1;
    twin.label = "evil\"} 1\npagefold_saved_net_bytes 1e18\\".to_owned();
    status.tracked_processes = vec![twin.clone(), twin];
    let text = render_metrics(&status, MetricsFormat::Prometheus);
    assert_eq!(sample_values(&text, "pagefold_saved_net_bytes").len(), 1);
    let label = "process=\"evil\\\"} 1\\npagefold_saved_net_bytes 1e18\\\\\"";
    assert_eq!(
        text.lines().filter(|line| line.starts_with("pagefold_tracked_process_saved") && line.contains(label)).count(),
        1
    );
    let series: Vec<&str> = text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0)).collect();
    let different: BTreeSet<&str> = series.iter().filter(|line| !line.starts_with('#')).copied().collect();
    assert_eq!(different.len(), series.iter().filter(|line| !line.starts_with('#')).count());
    assert_promtool_accepts(&text);
}

#[test]
fn terminal_escapes_in_labels_are_escaped() {
    let mut status = fixture_status();
    status.tracked_processes[0].label = "\u{1b}[2Jw\u{e9}b\u{202e}\u{9b}31m".to_owned();
    let text = render_metrics(&status, MetricsFormat::Prometheus);
    assert!(text.contains("=\"\\\\u{1b}[2Jw\u{e9}b\\\\u{202e}\\\\u{9b}31m\""), "{text}");
    assert!(!text.contains(|c: char| c.is_control() && c != '\n' || c == '\u{202e}'));
    assert_promtool_accepts(&text);
}

/// With the PID each restart of a program would be a new series.
#[test]
fn single_process_domains_have_no_pid() {
    let mut status = fixture_status();
    let share = status.domains[0].clone();
    let named = |name: &str| DomainSavingsReport { name: name.to_owned(), tracked_processes: 2, ..share.clone() };
    status.domains = ["process 7", "vm of process 8", "process 9", "vm web", "group process 1"].map(named).into();
    status.tracked_processes[0].domain = "process 7".to_owned();
    let text = render_metrics(&status, MetricsFormat::Prometheus);
    for (domain, processes) in
        [("processes", 4.0), ("vms without a name", 2.0), ("vm web", 2.0), ("group process 1", 2.0)]
    {
        assert_eq!(
            sample_values(&text, &format!("pagefold_domain_tracked_processes{{domain=\"{domain}\"}}")),
            [processes]
        );
    }
    assert!(text.contains("domain=\"processes\"}") && !text.contains("\"process 7\""));
    assert_promtool_accepts(&text);
}

fn promtool(arguments: &[&str], input: &str) -> Option<Output> {
    let Some(promtool) = find_program("promtool") else {
        println!("skipped: promtool is not installed (labs/setup-watch.sh)");
        return None;
    };
    let mut child = Command::new(promtool)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool starts");
    child.stdin.take().unwrap().write_all(input.as_bytes()).expect("promtool reads");
    Some(child.wait_with_output().expect("promtool ends"))
}

fn assert_promtool_accepts(text: &str) {
    if let Some(output) = promtool(&["check", "metrics"], text) {
        let output_text =
            String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && output_text.trim().is_empty(), "{output_text}");
    }
}

#[test]
fn promtool_accepts_all_metrics() {
    for status in [fixture_status(), status_without_optional_fields(), crowded_status()] {
        assert_promtool_accepts(&render_metrics(&status, MetricsFormat::Prometheus));
    }
    let complaint = promtool(&["check", "metrics"], "# TYPE a counter\na 1\n");
    assert!(complaint.is_none_or(|output| !output.status.success()), "promtool accepts invalid input");
}

/// Prometheus' parser of OpenMetrics is only available through its import of old samples, which needs a time for each.
#[test]
fn prometheus_parses_openmetrics() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("openmetrics");
    let read = |text: &str| {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let timed = text.lines().map(|line| match line.starts_with('#') {
            true => format!("{line}\n"),
            false => format!("{line} {}\n", fixture_status().time),
        });
        let file = folder.join("metrics.txt");
        fs::write(&file, timed.collect::<String>()).unwrap();
        let blocks = folder.join("blocks");
        promtool(&["tsdb", "create-blocks-from", "openmetrics", utf8_path(&file), utf8_path(&blocks)], "")
    };
    for status in [fixture_status(), status_without_optional_fields(), crowded_status()] {
        let Some(output) = read(&render_metrics(&status, MetricsFormat::OpenMetrics)) else { return };
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let output = read("# TYPE a counter\n# UNIT a seconds\na_total 1\n# EOF\n").expect("promtool is there");
    assert!(!output.status.success(), "it accepts invalid input");
}

fn utf8_path(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

#[test]
fn alert_rules_pass_their_tests() {
    for (verb, file) in [("check", "pagefold.rules.yml"), ("test", "pagefold.rules.test.yml")] {
        let file = repository_path("deploy/prometheus").join(file);
        if let Some(output) = promtool(&[verb, "rules", utf8_path(&file)], "") {
            let output_text = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{verb}: {}", String::from_utf8_lossy(&output_text));
        }
    }
}

/// The metrics in a text.
fn metric_names_in(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("pagefold_")).map(ToOwned::to_owned).collect()
}

fn collect_expressions(document: &Value, found: &mut Vec<String>) {
    match document {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == "expr" || text.starts_with("label_values(") => {
                        found.push(text.clone())
                    }
                    value => collect_expressions(value, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect_expressions(value, found)),
        _ => {}
    }
}

#[test]
fn rules_and_dashboard_use_existing_metrics() {
    let text = render_metrics(&fixture_status(), MetricsFormat::Prometheus);
    let names = sample_names(&text);
    let dashboard = fs::read_to_string(repository_path("deploy/grafana/pagefold.json")).expect("the dashboard");
    let mut found = Vec::new();
    collect_expressions(&serde_json::from_str(&dashboard).expect("JSON"), &mut found);
    assert!(found.len() >= 10, "{found:?}");
    let rules = fs::read_to_string(repository_path("deploy/prometheus/pagefold.rules.yml")).expect("the rules");
    found.extend(rules.lines().filter(|line| line.trim_start().starts_with("expr:")).map(ToOwned::to_owned));
    for expression in found {
        let metric_names = metric_names_in(&expression);
        assert!(!metric_names.is_empty() || expression.contains("up{"), "{expression} has no metric of Pagefold");
        for metric in metric_names {
            assert!(names.contains(metric.as_str()), "{expression}: there is no {metric}");
        }
    }
}

/// The labels that a query of the dashboard selects, sums by and uses in legends. Prometheus adds `instance`.
fn query_labels(query: &Value) -> BTreeSet<&str> {
    let text = |name: &str| query[name].as_str().unwrap_or_default();
    let (expression, legend) = (text("expr"), text("legendFormat"));
    let named = legend.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0));
    let summed = expression.split(" by (").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    let picked = expression.split('{').skip(1).filter_map(|rest| Some(rest.split_once('}')?.0));
    let picked = picked.flat_map(|matchers| matchers.split(',')).filter_map(|matcher| matcher.split(['=', '!']).next());
    named.chain(summed.flat_map(|list| list.split(','))).chain(picked).map(str::trim).collect()
}

#[test]
fn dashboard_uses_existing_labels() {
    let text = render_metrics(&fixture_status(), MetricsFormat::Prometheus);
    let dashboard = fs::read_to_string(repository_path("deploy/grafana/pagefold.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&dashboard).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let mut seen = BTreeSet::new();
    for query in panels.iter().flat_map(|panel| panel["targets"].as_array().expect("queries")) {
        let metrics = metric_names_in(query["expr"].as_str().expect("an expression"));
        for label in query_labels(query).into_iter().filter(|label| *label != "instance") {
            for metric in &metrics {
                let mut samples = text.lines().filter(|line| line.split(['{', ' ']).next() == Some(metric));
                let has = |line: &str| line.contains(&format!("{{{label}=")) || line.contains(&format!(",{label}="));
                assert!(samples.all(has), "{query}: {metric} has no {label}");
            }
            seen.insert(label.to_owned());
        }
    }
    assert!(
        ["class", "domain", "kind", "workload", "of", "reason", "verdict"].iter().all(|label| seen.contains(*label))
    );
}
