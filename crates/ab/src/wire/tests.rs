use super::*;
use crate::made_up_campaign::{experiment, record};
use crate::text;
use pagefold_output::text::TextStyle;

fn render(report: &AbReport) -> String {
    text::render(report, TextStyle { width: 120, color: false })
}

#[test]
fn report_has_the_stopped_share_and_both_intervals() {
    let report = AbReport::from_record(&record(experiment(), 8, |block| 1.1 + 0.001 * block as f64));
    let injection = &report.injections[0];
    assert_eq!((report.injections.len(), injection.slowdown_percent, injection.runs), (1, 2, 16));
    assert!((injection.stopped_percent - 1.9).abs() < 1e-9, "{injection:?}");
    let text = render(&report);
    assert!(text.contains("slowed by 2 %: the commands were stopped for 1.90 % of their running time"), "{text}");
    let comparison = &report.result.metrics[0].comparison;
    let width = |[low, high]: [Option<f64>; 2]| high.unwrap() - low.unwrap();
    assert!(width(comparison.bca_interval) > 0.0 && comparison.bca_interval != comparison.interval, "{comparison:?}");
}

#[test]
fn report_of_an_observation_says_that_no_slowdown_was_injected() {
    let source = crate::experiment::MetricSource::File { path: "/tmp/n".to_owned() };
    let name = "depth".to_owned();
    let metric = crate::experiment::MetricDefinition { name, source, higher_is_better: false, every_seconds: None };
    let observation =
        Experiment { workload: Vec::new(), observe_seconds: Some(1.0), metric: vec![metric], ..experiment() };
    let report = AbReport::from_record(&record(observation, 8, |_| 1.0));
    assert_eq!(report.injections, []);
    assert!(render(&report).contains("no slow-down was injected"));
}

#[test]
fn inconclusive_verdict_says_why() {
    let few = render(&AbReport::from_record(&record(experiment(), 3, |block| 1.5 + 0.001 * block as f64)));
    assert!(few.contains("3 blocks are too few to show an effect of any size"), "{few}");
    assert!(few.contains("none can be found"), "{few}");
    let same = render(&AbReport::from_record(&record(experiment(), 8, |_| 1.0)));
    assert!(same.contains("all blocks have the same ratio"), "{same}");
    let noisy =
        render(&AbReport::from_record(&record(
            experiment(),
            8,
            |block| {
                if block.is_multiple_of(2) { 1.2 } else { 0.8 }
            },
        )));
    assert!(noisy.contains("would have been detected with 80 % probability"), "{noisy}");
}
