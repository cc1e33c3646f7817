use super::*;
use crate::experiment::{ExpectedMove, Experiment, MetricDefinition, MetricSource, ProofCounter};
use crate::made_up_campaign::{experiment, record};
use crate::record::{LoadedRecord, SessionStart};
use crate::wire::unrestored::{UnrestoredChange, UnrestoredChanges};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use regex::Regex;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;

/// An experiment with two metrics, the second of which has this name.
fn two_metrics(name: &str) -> Experiment {
    let time = MetricSource::WallTime;
    let other = MetricDefinition { name: name.to_owned(), source: time, higher_is_better: false, every_seconds: None };
    Experiment { metric: vec![MetricDefinition::wall_time(), other], ..experiment() }
}

/// A campaign whose ratios are irregular, so that no two numbers of a picture are equal.
fn campaign(experiment: Experiment) -> LoadedRecord {
    record(experiment, 10, |block| 1.05 + 0.01 * ((block * 7 + 3) % 11) as f64 + 0.0001 * block as f64)
}

/// A text with every character that has a meaning in markup.
const MARKUP: &str = "</title><script>alert(\"1\")</script><img src=x onerror='x'>&amp;";

#[test]
fn names_and_values_of_a_campaign_are_escaped() {
    let mut experiment = two_metrics(MARKUP);
    experiment.name = MARKUP.to_owned();
    experiment.workload = vec![vec![MARKUP.to_owned(), MARKUP.to_owned()]];
    experiment.proof = Some(ProofCounter { counter: MARKUP.to_owned(), expect: ExpectedMove::Differ });
    let mut loaded = campaign(experiment);
    loaded.start.settings = BTreeMap::from([(MARKUP.to_owned(), [MARKUP.to_owned(), MARKUP.to_owned()])]);
    for (block, runs) in &mut loaded.blocks {
        block.flags = vec![MARKUP.to_owned()];
        runs.iter_mut().for_each(|run| run.counter_change = Some(1.0));
    }
    let mut session = SessionStart {
        boot: String::new(),
        unix_seconds: 0.0,
        host: crate::environment::HostDescription::default(),
        baseline: crate::environment::BlockEnvironment::default(),
    };
    for field in [
        &mut session.host.kernel,
        &mut session.host.cpu_model,
        &mut session.host.microcode,
        &mut session.host.program_sha256,
        &mut session.host.git_commit,
    ] {
        *field = Some(MARKUP.to_owned());
    }
    session.host.governors = vec![MARKUP.to_owned()];
    loaded.sessions.push(session);
    let mut report = AbReport::from_record(&loaded);
    let change = UnrestoredChange {
        previous_state: MARKUP.to_owned(),
        why: MARKUP.to_owned(),
        will_retry: true,
        remedy: MARKUP.to_owned(),
    };
    report.unrestored = UnrestoredChanges { failed_undos: vec![change.clone()], overwritten_changes: vec![change] };
    report.result.why_not_analyzed = Some(MARKUP.to_owned());
    let page = render(&report);
    assert!(!page.contains("<script") && !page.contains("<img") && !page.contains("</title></title>"), "{page}");
    let escaped =
        "&lt;/title&gt;&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&lt;img src=x onerror='x'&gt;&amp;amp;";
    // Twice the name, twice the workload, three cells of a setting, why there is no analysis, the counter, two changes
    // with three texts each, one of two metrics, six fields of the host, and a flag of each of 30 blocks.
    assert_eq!(page.matches(escaped).count(), 2 + 2 + 3 + 1 + 1 + 2 * 3 + 1 + 6 + 30, "{page}");
}

#[test]
fn page_loads_nothing() {
    let page = render(&AbReport::from_record(&campaign(two_metrics("other"))));
    for reference in ["http:", "https:", "//", "src=", "href=", "@import", "url(", "<script", "style="] {
        assert!(!page.contains(reference), "{reference}: {page}");
    }
}

#[test]
fn policy_allows_the_style_and_nothing_else() {
    let page = render(&AbReport::from_record(&campaign(experiment())));
    let style = page.split_once("<style>").unwrap().1.split_once("</style>").unwrap().0;
    let source = format!("style-src 'sha256-{}'", BASE64_STANDARD.encode(Sha256::digest(style)));
    assert!(CONTENT_SECURITY_POLICY.contains(&source), "CONTENT_SECURITY_POLICY must contain: {source}");
    let policy = format!("<meta http-equiv=\"Content-Security-Policy\" content=\"{CONTENT_SECURITY_POLICY}\">");
    let (at, style) = (page.find(&policy).unwrap(), page.find("<style>").unwrap());
    assert!(at < style && CONTENT_SECURITY_POLICY.starts_with("default-src 'none'; "));
    assert_eq!(CONTENT_SECURITY_POLICY.matches("-src ").count(), 2, "{CONTENT_SECURITY_POLICY}");
}

/// The elements of a picture with this name and class, each as its numbers by attribute.
fn find_elements(svg: &str, name: &str, class: &str) -> Vec<BTreeMap<String, f64>> {
    let element = Regex::new(&format!("<{name} class=\"{class}\"([^>]*)>")).unwrap();
    let attribute = Regex::new("([a-z0-9]+)=\"(-?[0-9.]+)\"").unwrap();
    let numbers =
        |text: &str| attribute.captures_iter(text).map(|one| (one[1].to_owned(), one[2].parse().unwrap())).collect();
    element.captures_iter(svg).map(|found| numbers(&found[1])).collect()
}

/// Checks that positions in a picture are a straight line of values. Positions have one decimal.
fn assert_linear(points: &[(f64, f64)]) {
    let (first, last) = points.iter().fold((points[0], points[0]), |(low, high), &point| {
        (if point.0 < low.0 { point } else { low }, if point.0 > high.0 { point } else { high })
    });
    assert!(last.0 > first.0, "{points:?}");
    let slope = (last.1 - first.1) / (last.0 - first.0);
    for &(value, position) in points {
        let expected = first.1 + slope * (value - first.0);
        assert!((position - expected).abs() < 0.2, "{value} is at {position} instead of {expected}: {points:?}");
    }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn pictures_show_the_numbers_of_the_report() {
    let report = AbReport::from_record(&campaign(two_metrics("other")));
    let json: Value = serde_json::from_str(&pagefold_output::wire::to_json(&report)).unwrap();
    let page = render(&report);
    let pictures: Vec<&str> = page.split("<svg ").skip(1).map(|rest| rest.split_once("</svg>").unwrap().0).collect();
    assert_eq!(pictures.len(), 2 * 3);
    for (position, metric) in json["result"]["metrics"].as_array().unwrap().iter().enumerate() {
        let [differences, intervals, series] = pictures[3 * position..3 * position + 3] else { unreachable!() };
        check_differences(differences, &metric["comparison"]);
        check_intervals(intervals, metric);
        check_series(series, &json, position);
    }
}

/// The ratio of each block as a circle with its percentage, within the band of the interval.
fn check_differences(svg: &str, comparison: &Value) {
    let ratios = numbers(&comparison["block_ratios"]);
    let circles = find_elements(svg, "circle", "b");
    assert_eq!((circles.len(), ratios.len()), (10, 10));
    let percentages: Vec<String> = ratios.iter().map(|ratio| format!("<title>{}</title>", percent(*ratio))).collect();
    let at: Vec<usize> = percentages.iter().map(|text| svg.find(text).unwrap()).collect();
    assert!(at.is_sorted(), "{svg}");
    let mut points: Vec<(f64, f64)> =
        ratios.iter().zip(&circles).map(|(&ratio, circle)| (ratio, circle["cx"])).collect();
    let [band] = &find_elements(svg, "rect", "band")[..] else { panic!("{svg}") };
    let interval = numbers(&comparison["interval"]);
    points.extend([(interval[0], band["x"]), (interval[1], band["x"] + band["width"])]);
    points.extend(find_elements(svg, "line", "axis").iter().map(|line| (1.0, line["x1"])));
    assert_eq!(points.len(), 13);
    assert_linear(&points);
}

/// One row each for the comparison and the controls: interval, smallest detectable effect and ratio.
fn check_intervals(svg: &str, metric: &Value) {
    let controls = metric["injected"].as_array().unwrap().iter().map(|control| &control["estimate"]);
    let estimates: Vec<&Value> =
        [&metric["comparison"], &metric["same_arm"]["estimate"]].into_iter().chain(controls).collect();
    let [bars, dashes, circles] =
        [("line", "a"), ("line", "mde"), ("circle", "b")].map(|(name, class)| find_elements(svg, name, class));
    assert_eq!((estimates.len(), bars.len(), dashes.len(), circles.len()), (3, 3, 3, 3));
    let mut points: Vec<(f64, f64)> = find_elements(svg, "line", "axis").iter().map(|line| (1.0, line["x1"])).collect();
    for (row, estimate) in estimates.iter().enumerate() {
        let interval = numbers(&estimate["interval"]);
        let smallest = 1.0 + estimate["smallest_detectable_percent"].as_f64().unwrap() / 100.0;
        points.extend([(interval[0], bars[row]["x1"]), (interval[1], bars[row]["x2"])]);
        points.extend([(1.0 / smallest, dashes[row]["x1"]), (smallest, dashes[row]["x2"])]);
        points.push((estimate["ratio"].as_f64().unwrap(), circles[row]["cx"]));
        assert!(bars[row]["y1"] == dashes[row]["y1"] && bars[row]["y1"] == circles[row]["cy"], "{svg}");
    }
    assert_eq!(points.len(), 16);
    assert_linear(&points);
}

/// Each run of the comparison as a circle in the color of its arm, by the time of its end.
fn check_series(svg: &str, json: &Value, metric: usize) {
    for (class, label) in [("a", "A"), ("b", "B")] {
        let runs = json["result"]["samples"].as_array().unwrap().iter();
        let runs: Vec<&Value> = runs.filter(|run| run["kind"] == "comparison" && run["label"] == label).collect();
        let circles = find_elements(svg, "circle", class);
        assert_eq!((runs.len(), circles.len()), (20, 20));
        let time = |run: &Value| {
            let times = json["run_times"].as_array().unwrap().iter();
            let mut of_run = times.filter(|time| time["block"] == run["block"] && time["position"] == run["position"]);
            of_run.next().unwrap()["unix_seconds"].as_f64().unwrap()
        };
        let times: Vec<(f64, f64)> = runs.iter().zip(&circles).map(|(run, circle)| (time(run), circle["cx"])).collect();
        assert_linear(&times);
        let value = |run: &Value| run["samples"][metric][0].as_f64().unwrap();
        let values: Vec<(f64, f64)> =
            runs.iter().zip(&circles).map(|(run, circle)| (value(run), circle["cy"])).collect();
        // Higher values are further up, and the largest and the smallest one are written beside the picture.
        if label == "B" {
            assert_linear(&values);
            let largest =
                values.iter().copied().reduce(|one, other| if one.0 > other.0 { one } else { other }).unwrap();
            assert!(values.iter().all(|(_, y)| *y >= largest.1), "{values:?}");
            assert!(svg.contains(&format!(">{:.5}</text>", largest.0)), "{svg}");
        } else {
            let smallest = values[0];
            assert!(values.iter().all(|value| *value == smallest), "{values:?}");
            assert!(svg.contains(&format!(">{:.5}</text>", smallest.0)), "{svg}");
        }
    }
}
