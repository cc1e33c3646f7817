//! From the record of a campaign to the samples that are analyzed.

use crate::decide::analysis::{BlockSamples, RunSamples};
use crate::decide::design::Arm;
use crate::record::{BlockRecord, CampaignStart, RunRecord};

/// The samples of completed blocks, without warm-up. `with_flags` says whether noisy blocks are marked: the marks depend on
/// the host's load, so an analysis that must be the same in each repetition leaves them out.
#[must_use]
pub fn collect_samples(
    start: &CampaignStart,
    blocks: &[(BlockRecord, Vec<RunRecord>)],
    with_flags: bool,
) -> Vec<BlockSamples> {
    let schedule = start.schedule();
    let collect = |(block, runs): &(BlockRecord, Vec<RunRecord>)| {
        let scheduled = schedule.blocks.get(block.block)?;
        let runs = runs.iter().filter(|run| !run.warm_up).map(|run| RunSamples {
            label: if run.label == 'A' { Arm::A } else { Arm::B },
            metrics: run.samples.iter().map(|samples| schedule.warm_up.measured_samples(samples).to_vec()).collect(),
            counter_change: run.counter_change,
        });
        Some(BlockSamples {
            index: block.block,
            kind: scheduled.kind,
            runs: runs.collect(),
            is_noisy: with_flags && !block.flags.is_empty(),
        })
    };
    blocks.iter().filter_map(collect).collect()
}
