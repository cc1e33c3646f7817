use super::*;
use crate::experiment::{ArmDefinition, MetricDefinition};
use crate::record;
use pagefold_host::fake_host::FakeHost;
use std::collections::BTreeMap;
use std::error::Error as _;

const METRIC_FILE: &str = "tmp/n";

/// Arms that differ in a variable of the environment.
fn experiment() -> Experiment {
    let b = ArmDefinition { environment: BTreeMap::from([("X".into(), "1".into())]), ..ArmDefinition::default() };
    Experiment { b, workload: vec![vec!["true".to_owned()]], ..Experiment::default() }
}

/// An experiment that reads a file.
fn observation(blocks: usize) -> Experiment {
    let source = MetricSource::File { path: format!("/{METRIC_FILE}") };
    let metric = MetricDefinition { name: "depth".to_owned(), source, higher_is_better: false, every_seconds: None };
    Experiment {
        workload: Vec::new(),
        observe_seconds: Some(0.001),
        metric: vec![metric],
        blocks,
        control_blocks: Some(2),
        ..experiment()
    }
}

#[test]
fn sample_without_a_ratio_is_not_recorded() {
    let (host, directory, state) = (FakeHost::booted(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let stop = AtomicBool::new(false);
    let start = define(&host, observation(2)).unwrap();
    let mut record = Record::create(directory.path(), start.clone()).unwrap();
    let mut run = |value: &str| {
        host.put_file(METRIC_FILE, value);
        let (switch, ..) = ArmSwitch::begin(&host, state.path(), &start).unwrap();
        let baseline = EnvironmentCounters::read(&host).readings_since(&host, 0.0);
        let (start, boot) = (&start, String::new());
        let mut campaign = Campaign { host: &host, record: &mut record, start, boot, baseline, stop: &stop, switch };
        let result = campaign.run_blocks(&record::load(directory.path()).unwrap(), &mut |_| {});
        (result, record::load(directory.path()).unwrap())
    };
    for value in ["NaN", "inf", "0"] {
        let (result, loaded) = run(value);
        let error = result.unwrap_err();
        assert_eq!(error.to_string(), "run 0 of block 0");
        let why = error.source().unwrap().to_string();
        assert!(why.starts_with(&format!("metric depth is {value};")), "{why}");
        assert_eq!((loaded.blocks.len(), loaded.abandoned_runs), (0, 0));
    }
    let (result, loaded) = run("2.5");
    result.unwrap();
    assert!(loaded.end.is_some());
    assert_eq!(loaded.blocks.len(), start.schedule.len());
}

/// Each arm has each pair of CPUs once in a block, in either order.
#[test]
fn duet_exchanges_the_cpus_of_the_arms() {
    let duet = Experiment { duet: true, duet_cpus: Some([vec![0], vec![1]]), ..experiment() };
    let schedule = Schedule::generate(&duet.design());
    let mut orders = std::collections::BTreeSet::new();
    for block in &schedule.blocks {
        orders.insert(block.order.iter().map(|&arm| arm_letter(arm)).collect::<String>());
        let scheduled = block.runs(&schedule.warm_up);
        let (mut position, mut used) = (0, Vec::new());
        while position < scheduled.len() {
            let group = next_group(&duet, &scheduled, position);
            let measured = group.iter().enumerate().filter(|(_, run)| !run.is_warm_up);
            used.extend(measured.map(|(number, run)| (run.label, duet_cpus(&duet, number).unwrap()[0])));
            position += group.len();
        }
        used.sort_unstable();
        assert_eq!(used, [(Arm::A, 0), (Arm::A, 1), (Arm::B, 0), (Arm::B, 1)], "{:?}", block.order);
    }
    assert_eq!(orders.into_iter().collect::<Vec<_>>(), ["ABBA", "BAAB"]);
}

/// At the look, B takes 1.5 times as long in all blocks but the noisy ones, which hide it.
#[test]
fn look_leaves_noisy_blocks_out_like_the_verdict() {
    let host = FakeHost::booted();
    let mut experiment = Experiment { looks: vec![16], blocks: 20, ..experiment() };
    experiment.exclude_noisy_blocks = true;
    let mut start = define(&host, experiment).unwrap();
    start.schedule.retain(|plan| plan.kind == PlannedKind::Comparison);
    let plan = start.experiment.stopping_plan().unwrap();
    let environment = EnvironmentCounters::read(&host).readings_since(&host, 0.0);
    let blocks = |noisy: usize| -> Vec<(BlockRecord, Vec<RunRecord>)> {
        let block = |index: usize| {
            let is_noisy = index < noisy;
            let ratio = (if is_noisy { 0.1 } else { 1.5 }) + 0.001 * index as f64;
            let run = |(position, label): (usize, char)| RunRecord {
                block: index,
                position,
                label,
                applied: label,
                slowdown_percent: 0,
                warm_up: false,
                unix_seconds: 0.0,
                stopped_seconds: 0.0,
                wall_seconds: 1.0,
                samples: vec![vec![if label == 'A' { 1.0 } else { ratio }]],
                counter_change: None,
            };
            let flags = if is_noisy { vec!["steal".to_owned()] } else { Vec::new() };
            let runs = start.schedule[index].order.chars().enumerate().map(run).collect();
            (BlockRecord { block: index, environment: environment.clone(), flags }, runs)
        };
        (0..16).map(block).collect()
    };
    let find = |start: &CampaignStart, noisy| find_difference_at_look(start, &plan, &blocks(noisy)).unwrap();
    assert_eq!(find(&start, 0), Some(16));
    assert_eq!(find(&start, 4), Some(16), "the noisy blocks are left out");
    assert_eq!(find(&start, 15), None, "one block is too few");
    let mut kept = start.clone();
    kept.experiment.exclude_noisy_blocks = false;
    assert_eq!(find(&kept, 4), None, "the noisy blocks are kept");
}
