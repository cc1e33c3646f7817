//! The document of `pagefold report`, opened from a file: no errors, no external resources, and usable on a phone, in
//! dark mode and with a screen reader.

use super::chromium::Chromium;
use super::{CONTRAST_SCRIPT, base64};
use pagefold_daemon::wire::{DecisionReport, WorkloadKind};
use pagefold_history::html;
use pagefold_history::record::{FootprintSample, HistoryPass, HistorySample, HistorySpan};
use pagefold_history::report::HistoryReport;
use serde_json::json;
use std::path::{Path, PathBuf};

const BYTES_PER_GIB: f64 = (1_u64 << 30) as f64;

/// 2026-11-20 08:00:00 UTC.
const START_SECONDS: f64 = 1_795_161_600.0;

/// Eight hours of a made-up host with constantly arriving guests, whose daemon restarts once.
fn made_up_host(name: &str, gib: f64, cpu: f64) -> (String, HistorySpan) {
    let steps = 2880_u32;
    let sample = |step: u32| {
        let seconds = f64::from(step) * 10.0;
        let run = i64::from(step / 2000) + 1;
        let wave = (seconds / 3000.0).sin() * 0.3;
        let saved = gib * BYTES_PER_GIB * (1.0 - (-seconds / 5000.0).exp()) * (1.0 + wave / 4.0);
        let total = 64.0 * BYTES_PER_GIB;
        HistorySample {
            time: START_SECONDS + seconds + if run > 1 { 900.0 } else { 0.0 },
            run_id: run,
            saved_gross: Some(saved as u64),
            saved_net: Some((saved * 0.985) as i64),
            total: Some(total as u64),
            available: Some((total - (34.0 + 9.0 * wave) * BYTES_PER_GIB + saved * 0.8) as u64),
            keep_available: Some((16.0 * BYTES_PER_GIB) as u64),
            ksmd_seconds: Some(seconds * cpu / 100.0 * (1.0 + 0.4 * (seconds / 700.0).sin() / (1.0 + seconds / 900.0))),
            pagefold_seconds: Some(seconds * cpu / 300.0),
            bound_percent: 10.0,
            tracked_processes: 17,
        }
    };
    let pass = |number: u32| {
        let spread = f64::from(number * 7919 % 100) / 100.0;
        HistoryPass {
            run_id: 1,
            number: u64::from(number),
            ended_at: START_SECONDS + f64::from(number) * 50.0,
            seconds: 4.0 + 5.0 * spread,
            cpu_seconds: 1.0 + spread,
            processes: 2,
            predicted: (0.4 * BYTES_PER_GIB) as u64,
            measured: (!number.is_multiple_of(5)).then_some((0.39 * BYTES_PER_GIB * (0.9 + spread / 8.0)) as i64),
            arrival_wait_seconds: (!number.is_multiple_of(2)).then_some(1.0 + spread),
            seconds_to_90: (!number.is_multiple_of(5)).then_some(1.2 + 4.0 * spread * spread),
            seconds_to_99: (!number.is_multiple_of(5)).then_some(1.8 + 6.0 * spread),
        }
    };
    let footprint = |number: u32| FootprintSample {
        time: START_SECONDS,
        label: format!("web-{number} <i>"),
        kind: WorkloadKind::Vm,
        domain: "group web".to_owned(),
        pid: number,
        resident: Some((2.0 * BYTES_PER_GIB) as u64),
        footprint: Some((f64::from(30 - number) / 20.0 * BYTES_PER_GIB) as u64),
        saved: Some((f64::from(number) / 20.0 * BYTES_PER_GIB) as u64),
    };
    let decision = |number: u64| DecisionReport {
        time_ms: 1_795_161_600_000 + number * 120_000,
        kind: "merge".to_owned(),
        subject: format!("web-{number}"),
        reason: "arrived".to_owned(),
        explanation: "it shares pages with <b>other</b> VMs".to_owned(),
        predicted: Some(1 << 28),
        carried_out: !number.is_multiple_of(2),
    };
    let kept = HistorySpan {
        host: name.to_owned(),
        samples: (0..steps).map(sample).collect(),
        passes: (1..540).map(pass).collect(),
        decisions: (0..90).map(decision).collect(),
        footprints: (1..25).map(footprint).collect(),
    };
    (name.to_owned(), kept)
}

/// The document of a report, in a file.
fn write_page(name: &str, report: &HistoryReport) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("report-{name}.html"));
    std::fs::write(&path, html::render_document(report, START_SECONDS + 30_000.0)).expect("it is written");
    path
}

#[test]
fn report_is_one_self_contained_file() {
    let Some(mut browser) = Chromium::start("report") else { return };
    let hosts =
        [made_up_host("node-a", 12.0, 4.0), made_up_host("node-b", 9.0, 7.0), made_up_host("node <c>", 5.0, 2.0)];
    let nothing = ("nobody".to_owned(), HistorySpan::default());
    for (name, report) in [
        ("one", HistoryReport::from_spans(&hosts[..1], false)),
        ("three", HistoryReport::from_spans(&hosts, false)),
        ("compare", HistoryReport::from_spans(&hosts[..2], true)),
        ("nothing", HistoryReport::from_spans(&[nothing], false)),
    ] {
        browser.open_address(&format!("file://{}", write_page(name, &report).display()));
        browser.wait_until("document.readyState === 'complete' && document.querySelectorAll('svg.chart').length === 4");
        let text = browser.evaluate("document.body.innerText");
        let text = text.as_str().expect("text");
        for never in ["NaN", "undefined", "inf ", "[object"] {
            assert!(!text.contains(never), "{name}: {never} is in {text}");
        }
        assert!(report.sides.iter().all(|side| text.contains(&side.name)), "{name}: {text}");
        assert_eq!(text.contains("Differences"), name == "compare");
        assert_eq!(
            browser.evaluate("performance.getEntriesByType('resource').length"),
            0,
            "{name}: nothing is fetched"
        );
        // All parts of a chart lie within it.
        let outside = browser.evaluate(
            "[...document.querySelectorAll('svg.chart')].flatMap(svg => [...svg.querySelectorAll('text, path, circle')]
                .map(part => [part.getBBox(), svg.viewBox.baseVal, part.outerHTML.slice(0, 90)])
                .filter(([b, v]) => b.x < -1 || b.y < -1 || b.x + b.width > v.width + 1 || b.y + b.height > v.height + 1)
                .map(([, , what]) => what))",
        );
        assert_eq!(outside, json!([]), "{name}");
        for (look, width, height, scheme) in
            [("light", 1280, 900, "light"), ("dark", 1280, 900, "dark"), ("phone", 390, 844, "dark")]
        {
            browser.set_viewport(width, height, scheme);
            browser.wait_until(&format!("innerWidth === {width}"));
            assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{name} {look}");
            for (what, behind) in [("header .note", "header"), ("caption", "section"), ("thead th", "section")] {
                let contrast = browser.evaluate(&format!("({CONTRAST_SCRIPT})('{what}', '{behind}')"));
                // WCAG 2.1, 1.4.3.
                assert!(contrast.as_f64().is_some_and(|ratio| ratio >= 4.5), "{look}: {what} has {contrast}");
            }
            save_screenshot(&mut browser, &format!("report-{name}-{look}"), width);
        }
    }
    assert_eq!(browser.errors, [""; 0]);
}

#[test]
fn report_charts_have_names_and_numbers() {
    let Some(mut browser) = Chromium::start("report-names") else { return };
    let report = HistoryReport::from_spans(&[made_up_host("node-a", 12.0, 4.0)], false);
    browser.open_address(&format!("file://{}", write_page("names", &report).display()));
    browser.wait_until("document.readyState === 'complete' && !!document.querySelector('svg.chart')");
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)");
    let tree = browser.call_method("Accessibility.getFullAXTree", json!({}));
    let nodes = tree["nodes"].as_array().expect("nodes").iter().filter(|node| node["ignored"] == false);
    let text = |node: &serde_json::Value, field: &str| node[field]["value"].as_str().unwrap_or_default().to_owned();
    let nodes: Vec<(String, String)> = nodes.map(|node| (text(node, "role"), text(node, "name"))).collect();
    let images: Vec<&String> = nodes.iter().filter(|(role, _)| role == "image").map(|(_, name)| name).collect();
    assert_eq!(images.len(), 4, "{images:?}");
    assert!(images[0].contains("Memory in use") && images[0].contains("without merging: maximum"), "{images:?}");
    for role in ["region", "columnheader", "rowheader", "table"] {
        let named: Vec<_> = nodes.iter().filter(|(of, _)| of == role).collect();
        assert!(!named.is_empty() && named.iter().all(|(_, name)| !name.is_empty()), "{role}: {named:?}");
    }
    let rows = browser.evaluate("document.querySelectorAll('section[aria-labelledby=saved-title] tbody tr').length");
    assert!(rows.as_u64().is_some_and(|rows| (20..=26).contains(&rows)), "{rows} rows for a picture");
    let passes = browser.evaluate(
        "[...document.querySelectorAll('table')].filter(one => /passes/i.test(one.caption.textContent))
            .reduce((sum, one) => sum + one.tBodies[0].rows.length, 0)",
    );
    assert_eq!(passes, report.sides[0].passes.len());
    assert_eq!(browser.errors, [""; 0]);
}

/// Save a screenshot of the upper part of the page if `PAGEFOLD_PICTURES` names a folder.
fn save_screenshot(browser: &mut Chromium, name: &str, width: u32) {
    let Some(folder) = std::env::var_os("PAGEFOLD_PICTURES") else { return };
    let height = browser.evaluate("Math.min(3000, document.documentElement.scrollHeight)");
    let clip = json!({ "x": 0, "y": 0, "width": width, "height": height, "scale": 1 });
    let picture = browser.call_method("Page.captureScreenshot", json!({ "captureBeyondViewport": true, "clip": clip }));
    let png = base64(picture["data"].as_str().expect("a picture"));
    std::fs::write(Path::new(&folder).join(format!("{name}.png")), png).expect("the folder is writable");
}
