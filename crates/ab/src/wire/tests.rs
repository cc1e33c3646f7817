use super::*;
use crate::made_up_campaign::{experiment, record};
use crate::record::SessionStart;
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

/// The columns of the row of a control.
fn row<'t>(text: &'t str, name: &str) -> &'t str {
    text.lines().find(|line| line.starts_with(&format!(" {name}"))).unwrap()
}

#[test]
fn controls_of_too_few_blocks_cannot_tell() {
    let text = render(&AbReport::from_record(&record(experiment(), 3, |block| if block < 4 { 0.8 } else { 1.3 })));
    for name in ["A against A", "A slowed by 2 %"] {
        assert!(row(&text, name).ends_with("too few blocks to tell"), "{text}");
    }
    let enough = |block: usize| 1.0 + 0.02 * (block % 5) as f64 - 0.04;
    let text = render(&AbReport::from_record(&record(experiment(), 15, enough)));
    assert!(row(&text, "A against A").ends_with("no difference, as it must be"), "{text}");
}

/// The blocks are comparison, A against A and A slowed by 2 % in turns.
#[test]
fn difference_that_the_host_has_from_itself_is_no_verdict() {
    let same_arm = |block: usize, ratio: f64| ratio * (1.0 + 0.001 * (block % 5) as f64);
    let campaign = |reached: f64, blocks| {
        AbReport::from_record(&record(experiment(), blocks, |block| match block % 3 {
            0 => same_arm(block, 0.90),
            1 => same_arm(block, reached),
            _ => same_arm(block, 1.02),
        }))
    };
    for (reached, blocks) in [(0.89, 10), (1.12, 10), (0.895, 10)] {
        let report = campaign(reached, blocks);
        let metric = &report.result.metrics[0];
        assert!(metric.is_difference_reached_by_same_arm, "{reached}");
        assert_eq!(metric.verdict, EffectVerdictName::Inconclusive);
        assert!(!report.has_answer());
        let text = render(&report);
        assert!(text.contains("A against A differs by as much"), "{text}");
        assert!(row(&text, "A against A").ends_with("a false difference"), "{text}");
    }
    let report = campaign(0.95, 10);
    assert_eq!(report.result.metrics[0].verdict, EffectVerdictName::Better, "A against A is smaller");
    assert!(!report.result.metrics[0].is_difference_reached_by_same_arm);
}

#[test]
fn injection_that_did_not_act_as_intended_is_told() {
    let report = AbReport::from_record(&record(experiment(), 10, |block| 0.9 + 0.002 * (block % 7) as f64));
    let control = &report.result.metrics[0].injected[0];
    assert!(!control.is_ratio_in_interval && !control.acted_as_intended);
    let (text, page) = (render(&report), crate::html::render(&report));
    assert!(row(&text, "A slowed by 2 %").ends_with("not as intended"), "{text}");
    for rendered in [&text, &page] {
        assert!(rendered.contains("so the campaign does not say which effects it can find"), "{rendered}");
        assert!(rendered.contains("instead of +2.00 %"), "{rendered}");
    }
    // The interval of a quiet host excludes 2 % by little.
    let near = AbReport::from_record(&record(experiment(), 10, |block| 1.021 + 0.0005 * (block % 5) as f64));
    let control = &near.result.metrics[0].injected[0];
    assert!(!control.is_ratio_in_interval && control.acted_as_intended, "{control:?}");
    assert!(!render(&near).contains("as intended"));
}

#[test]
fn busy_host_is_told() {
    let mut loaded = record(experiment(), 8, |block| 1.1 + 0.001 * block as f64);
    let session = |neighbor_cpus| SessionStart {
        boot: String::new(),
        unix_seconds: 0.0,
        host: HostDescription { cpus: 2, ..HostDescription::default() },
        baseline: BlockEnvironment { neighbor_cpus: Some(neighbor_cpus), ..BlockEnvironment::default() },
    };
    loaded.sessions = vec![session(0.1)];
    let quiet = AbReport::from_record(&loaded);
    assert_eq!(quiet.busy_at_start, [] as [&str; 0]);
    loaded.sessions = vec![session(1.9), session(1.9)];
    let busy = AbReport::from_record(&loaded);
    assert_eq!(busy.busy_at_start, ["CPU time of other processes 1.90 CPUs, limit 0.20 CPUs"]);
    for rendered in [render(&busy), crate::html::render(&busy)] {
        assert!(rendered.contains("The host was busy when the campaign began"), "{rendered}");
    }
}

/// Two blocks of A against A have no small p-value, but an interval.
#[test]
fn few_blocks_of_the_same_arm_can_reach_a_difference() {
    let mut blocks = 0;
    let mut loaded = record(experiment(), 10, |block| 0.88 + 0.002 * (block % 5) as f64);
    let is_kept = |kind: PlannedKind, count: &mut usize| {
        *count += usize::from(kind == PlannedKind::SameArm);
        kind == PlannedKind::Comparison || kind == PlannedKind::SameArm && *count <= 2
    };
    let schedule = loaded.start.schedule.clone();
    loaded.blocks.retain(|(block, _)| is_kept(schedule[block.block].kind, &mut blocks));
    let report = AbReport::from_record(&loaded);
    let metric = &report.result.metrics[0];
    assert_eq!(metric.same_arm.as_ref().unwrap().estimate.blocks, 2);
    assert!(metric.is_difference_reached_by_same_arm && metric.verdict == EffectVerdictName::Inconclusive);
    assert!(row(&render(&report), "A against A").ends_with("the host differs from itself"));
}
