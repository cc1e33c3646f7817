use super::*;
use crate::experiment::ArmDefinition;
use crate::record::{BlockPlan, BlockRecord, CampaignStart, RECORD_VERSION};
use crate::text;
use pagefold_output::text::TextStyle;

/// A campaign whose samples follow from the block and the label, with one block of each kind in turns.
fn record(experiment: Experiment, blocks: usize, ratio: impl Fn(usize) -> f64) -> LoadedRecord {
    let kinds = [PlannedKind::Comparison, PlannedKind::SameArm, PlannedKind::Injected(2)];
    let kinds = if experiment.workload.is_empty() { &kinds[..2] } else { &kinds };
    let plan = |&kind: &PlannedKind| BlockPlan { kind, order: "ABBA".to_owned() };
    let schedule: Vec<BlockPlan> = (0..blocks).flat_map(|_| kinds.iter().map(plan)).collect();
    let block = |(index, plan): (usize, &BlockPlan)| {
        let run = |(position, label): (usize, char)| {
            let is_slowed = label == 'B' && plan.kind == PlannedKind::Injected(2);
            RunRecord {
                block: index,
                position,
                label,
                applied: 'A',
                slowdown_percent: if is_slowed { 2 } else { 0 },
                warm_up: false,
                unix_seconds: 0.0,
                stopped_seconds: if is_slowed { 0.019 } else { 0.0 },
                wall_seconds: if is_slowed { 1.019 } else { 1.0 },
                samples: vec![vec![if label == 'A' { 1.0 } else { ratio(index) }]],
                counter_change: None,
            }
        };
        let runs = plan.order.chars().enumerate().map(run).collect();
        (BlockRecord { block: index, environment: BlockEnvironment::default(), flags: Vec::new() }, runs)
    };
    let blocks = schedule.iter().enumerate().map(block).collect();
    let mut experiment = experiment;
    experiment.check().unwrap();
    let start = CampaignStart {
        version: RECORD_VERSION,
        pagefold: String::new(),
        experiment,
        settings: BTreeMap::new(),
        modules: BTreeMap::new(),
        looks: vec![(20, 0.05)],
        schedule,
    };
    LoadedRecord {
        start,
        sessions: Vec::new(),
        blocks,
        abandoned_runs: 0,
        leftover: Vec::new(),
        entered_arm: None,
        end: Some(String::new()),
    }
}

fn experiment() -> Experiment {
    let b = ArmDefinition { environment: BTreeMap::from([("X".into(), "1".into())]), ..ArmDefinition::default() };
    Experiment { b, workload: vec![vec!["true".to_owned()]], ..Experiment::default() }
}

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
