//! The page of a campaign of `pagefold ab`, opened from a file under its own Content Security Policy.

use super::chromium::Chromium;
use pagefold_ab::environment::BlockEnvironment;
use pagefold_ab::experiment::{ArmDefinition, Experiment, MetricDefinition, MetricSource};
use pagefold_ab::record::{BlockRecord, LoadedRecord, PlannedKind, RunRecord};
use pagefold_ab::wire::AbReport;
use pagefold_ab::{campaign, html};
use pagefold_host::fake_host::FakeHost;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::Path;

/// The name of a metric that would be a script if it were not escaped.
const SCRIPT: &str = "<script>document.title = 'run'</script>";

/// A complete campaign of made-up times in which B is slower by 4 to 6 %.
fn made_up_campaign() -> LoadedRecord {
    let metric = |name: &str| MetricDefinition {
        name: name.to_owned(),
        source: MetricSource::WallTime,
        higher_is_better: false,
        every_seconds: None,
    };
    let environment = BTreeMap::from([("X".to_owned(), "1".to_owned())]);
    let experiment = Experiment {
        b: ArmDefinition { environment, ..ArmDefinition::default() },
        workload: vec![vec!["true".to_owned(), "a-word-".repeat(40)]],
        metric: vec![metric("wall"), metric(SCRIPT)],
        blocks: 8,
        ..Experiment::default()
    };
    let start = campaign::define(&FakeHost::booted(), experiment).expect("it can be carried out");
    let block = |(index, plan): (usize, &pagefold_ab::record::BlockPlan)| {
        let slowdown = match plan.kind {
            PlannedKind::Comparison => 1.05 + (index as f64).sin() / 100.0,
            PlannedKind::SameArm => 1.0 + (index as f64).sin() / 100.0,
            PlannedKind::Injected(percent) => 1.0 + f64::from(percent) / 100.0 + (index as f64).sin() / 100.0,
        };
        let run = |(position, label): (usize, char)| RunRecord {
            block: index,
            position,
            label,
            applied: label,
            slowdown_percent: 0,
            warm_up: false,
            unix_seconds: 1_795_161_600.0 + 40.0 * index as f64 + 10.0 * position as f64,
            stopped_seconds: 0.0,
            wall_seconds: 10.0,
            samples: vec![vec![if label == 'A' { 10.0 } else { 10.0 * slowdown }]; 2],
            counter_change: None,
        };
        let flags = if index == 3 { vec!["steal 4.00 %, limit 1.00 %".to_owned()] } else { Vec::new() };
        let block = BlockRecord { block: index, environment: BlockEnvironment::default(), flags };
        (block, plan.order.chars().enumerate().map(run).collect())
    };
    let blocks = start.schedule.iter().enumerate().map(block).collect();
    LoadedRecord {
        start,
        sessions: Vec::new(),
        blocks,
        abandoned_runs: 0,
        leftover: Vec::new(),
        entered_arm: None,
        end: Some("all blocks have run".to_owned()),
    }
}

#[test]
fn page_of_a_campaign_is_one_self_contained_file() {
    let Some(mut browser) = Chromium::start("ab") else { return };
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ab.html");
    std::fs::write(&path, html::render(&AbReport::from_record(&made_up_campaign()))).expect("it is written");
    browser.open_address(&format!("file://{}", path.display()));
    browser.wait_until("document.readyState === 'complete' && document.querySelectorAll('svg').length === 6");
    assert_eq!(browser.evaluate("document.title"), "Experiment", "the name of a metric ran as a script");
    let text = browser.evaluate("document.body.innerText");
    let text = text.as_str().expect("text");
    assert!(text.contains(&format!("{SCRIPT}: B is worse")) && text.contains("steal 4.00 %"), "{text}");
    for never in ["NaN", "inf ", "undefined"] {
        assert!(!text.contains(never), "{never} is in {text}");
    }
    assert_eq!(browser.evaluate("performance.getEntriesByType('resource').length"), 0, "nothing is fetched");
    // The policy allows the style of the page, and no other style and no script.
    assert_eq!(browser.evaluate("getComputedStyle(document.querySelector('.band')).fill"), "rgb(53, 114, 176)");
    let added = "(() => { const style = document.createElement('style'); style.textContent = 'body{color:rgb(1,2,3)}'; \
                 const script = document.createElement('script'); script.textContent = 'document.title = \"run\"'; \
                 document.head.append(style, script); \
                 return [getComputedStyle(document.body).color === 'rgb(1, 2, 3)', document.title]; })()";
    assert_eq!(browser.errors, [""; 0]);
    assert_eq!(browser.evaluate(added), json!([false, "Experiment"]));
    for (look, width, height, scheme) in
        [("light", 1280, 900, "light"), ("dark", 1280, 900, "dark"), ("phone", 390, 844, "dark")]
    {
        browser.set_viewport(width, height, scheme);
        browser.wait_until(&format!("innerWidth === {width}"));
        assert_eq!(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{look}");
        let outside = browser.evaluate(
            "[...document.querySelectorAll('svg')].flatMap(svg => [...svg.querySelectorAll('text, rect, line, circle')]
                .map(part => [part.getBBox(), svg.viewBox.baseVal, part.outerHTML.slice(0, 90)])
                .filter(([b, v]) => b.x < -1 || b.y < -1 || b.x + b.width > v.width + 1 || b.y + b.height > v.height + 1)
                .map(([, , what]) => what))",
        );
        assert_eq!(outside, json!([]), "{look}");
    }
}
