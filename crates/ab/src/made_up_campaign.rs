//! Records of made-up campaigns, for tests of the reports.

use crate::environment::BlockEnvironment;
use crate::experiment::{ArmDefinition, Experiment};
use crate::record::{BlockPlan, BlockRecord, CampaignStart, LoadedRecord, PlannedKind, RECORD_VERSION, RunRecord};
use std::collections::BTreeMap;

/// A campaign whose samples follow from the block and the label, with one block of each kind in turns. Each further metric
/// adds the sample of the first one.
pub fn record(mut experiment: Experiment, blocks: usize, ratio: impl Fn(usize) -> f64) -> LoadedRecord {
    experiment.check().unwrap();
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
                unix_seconds: 1000.0 + 10.0 * index as f64 + 2.0 * position as f64,
                stopped_seconds: if is_slowed { 0.019 } else { 0.0 },
                wall_seconds: if is_slowed { 1.019 } else { 1.0 },
                samples: (1..=experiment.metric.len())
                    .map(|factor| vec![factor as f64 * if label == 'A' { 1.0 } else { ratio(index) }])
                    .collect(),
                counter_change: None,
            }
        };
        let runs = plan.order.chars().enumerate().map(run).collect();
        (BlockRecord { block: index, environment: BlockEnvironment::default(), flags: Vec::new() }, runs)
    };
    let blocks = schedule.iter().enumerate().map(block).collect();
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

/// Arms that differ in a variable of the environment.
pub fn experiment() -> Experiment {
    let b = ArmDefinition { environment: BTreeMap::from([("X".into(), "1".into())]), ..ArmDefinition::default() };
    Experiment { b, workload: vec![vec!["true".to_owned()]], ..Experiment::default() }
}
