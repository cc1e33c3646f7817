//! The schedule of a campaign: which arm runs when.
//!
//! A block is the unit of repetition. It runs both arms in turns in the order ABBA or BAAB, so that a linear drift within
//! the block cancels. Longer blocks continue with the Thue-Morse sequence, which cancels drifts of higher order too. The
//! order of a block is drawn: of two consecutive blocks of one kind, one starts with A and one with B.
//!
//! Every campaign holds three kinds of blocks. Comparison blocks run A against B. Same-arm blocks (A/A) run A under both
//! labels and show how often the campaign sees an effect where there is none. Injected blocks run A under both labels and
//! slow the runs labeled B by a known percentage; they show whether the campaign sees an effect of that size. The kinds
//! are interleaved, so that every prefix of the schedule holds them in proportion.

use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

/// The two sides of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Arm {
    /// The baseline.
    A,
    /// The change.
    B,
}

impl Arm {
    /// The other arm.
    #[must_use]
    pub const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// What is done anew before each run of a block: the level at which a campaign repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// The workload starts again.
    Run,
    /// The virtual machine restarts.
    VmRestart,
    /// The kernel module is loaded again.
    ModuleReload,
    /// The guest boots again.
    GuestReboot,
}

/// What the labels of a block stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BlockKind {
    /// A against B.
    Comparison,
    /// A under both labels.
    SameArm,
    /// A under both labels; runs labeled B are slowed.
    Injected {
        /// How much slower a run labeled B is, in percent of its time.
        slowdown_percent: u32,
    },
}

/// Which measurements are discarded as warm-up. The rule is fixed before the campaign starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WarmUpRule {
    /// Unmeasured runs at the start of each block, with the arm that the block starts with.
    pub runs_per_block: usize,
    /// Samples discarded at the start of each run, for workloads that report several samples a run.
    pub samples_per_run: usize,
}

impl WarmUpRule {
    /// The samples of a run that count. A run that is shorter than its warm-up keeps its last sample.
    #[must_use]
    pub fn measured_samples<'s>(&self, samples: &'s [f64]) -> &'s [f64] {
        &samples[self.samples_per_run.min(samples.len().saturating_sub(1))..]
    }
}

/// The blocks with one injected slow-down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedBlocks {
    /// The slow-down in percent of the run's time.
    pub slowdown_percent: u32,
    /// Number of blocks.
    pub blocks: usize,
}

/// What to draw a schedule from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DesignOptions {
    /// The level at which runs repeat.
    pub level: Level,
    /// Blocks of A against B.
    pub comparison_blocks: usize,
    /// Blocks of A against A.
    pub same_arm_blocks: usize,
    /// Blocks with injected slow-downs.
    pub injected_blocks: Vec<InjectedBlocks>,
    /// Pairs of runs in each block; two pairs are ABBA or BAAB.
    pub pairs_per_block: usize,
    /// The warm-up rule.
    pub warm_up: WarmUpRule,
    /// The seed of the order.
    pub seed: u64,
}

impl DesignOptions {
    /// Slow-downs in percent that a campaign injects.
    pub const INJECTED_SLOWDOWN_PERCENTS: [u32; 2] = [2, 5];

    /// A campaign whose control blocks (A/A, and each injected slow-down) are as many as its comparison blocks, so that
    /// a slow-down that is not found has the size that the comparison cannot see either.
    #[must_use]
    pub fn new(level: Level, blocks: usize, seed: u64) -> Self {
        Self::with_control_blocks(level, blocks, blocks, seed)
    }

    /// A campaign with fewer or more blocks of each control than comparison blocks.
    #[must_use]
    pub fn with_control_blocks(level: Level, comparison_blocks: usize, control_blocks: usize, seed: u64) -> Self {
        let injected = |slowdown_percent| InjectedBlocks { slowdown_percent, blocks: control_blocks };
        Self {
            level,
            comparison_blocks,
            same_arm_blocks: control_blocks,
            injected_blocks: Self::INJECTED_SLOWDOWN_PERCENTS.map(injected).to_vec(),
            pairs_per_block: 2,
            warm_up: WarmUpRule { runs_per_block: 1, samples_per_run: 0 },
            seed,
        }
    }
}

/// One run of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduledRun {
    /// Under which arm the run is counted.
    pub label: Arm,
    /// Which arm's settings are in force.
    pub applied: Arm,
    /// The slow-down to inject, in percent of the run's time; 0 for none.
    pub slowdown_percent: u32,
    /// Whether the run is warm-up, and its samples are not analyzed.
    pub is_warm_up: bool,
}

/// One block of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScheduledBlock {
    /// The position in the schedule, from 0.
    pub index: usize,
    /// What the labels stand for.
    pub kind: BlockKind,
    /// The labels of the measured runs in order.
    pub order: Vec<Arm>,
}

/// The blocks of a campaign in the order in which they run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The level at which runs repeat.
    pub level: Level,
    /// The warm-up rule.
    pub warm_up: WarmUpRule,
    /// The seed that the order was drawn from.
    pub seed: u64,
    /// The blocks.
    pub blocks: Vec<ScheduledBlock>,
}

impl ScheduledBlock {
    /// The runs of the block in order, warm-up first.
    #[must_use]
    pub fn runs(&self, warm_up: &WarmUpRule) -> Vec<ScheduledRun> {
        let first = self.order.first().copied();
        let warm_ups = first.into_iter().flat_map(|label| std::iter::repeat_n((label, true), warm_up.runs_per_block));
        warm_ups
            .chain(self.order.iter().map(|&label| (label, false)))
            .map(|(label, is_warm_up)| {
                let (applied, slowdown_percent) = match (self.kind, label) {
                    (BlockKind::Comparison, label) => (label, 0),
                    (BlockKind::Injected { slowdown_percent }, Arm::B) => (Arm::A, slowdown_percent),
                    (BlockKind::SameArm | BlockKind::Injected { .. }, _) => (Arm::A, 0),
                };
                ScheduledRun { label, applied, slowdown_percent, is_warm_up }
            })
            .collect()
    }
}

impl Schedule {
    /// Draw the schedule. The same options give the same schedule.
    #[must_use]
    pub fn generate(options: &DesignOptions) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(options.seed);
        let mut kinds =
            vec![(BlockKind::Comparison, options.comparison_blocks), (BlockKind::SameArm, options.same_arm_blocks)];
        kinds.extend(
            options
                .injected_blocks
                .iter()
                .map(|injected| (BlockKind::Injected { slowdown_percent: injected.slowdown_percent }, injected.blocks)),
        );
        // The j-th of n blocks of a kind is placed at random within the j-th of n equal parts of the campaign.
        let mut placed: Vec<(f64, BlockKind, Arm)> = Vec::new();
        for (kind, blocks) in kinds {
            let mut previous = None;
            for position in 0..blocks {
                let drawn = if random.random::<bool>() { Arm::A } else { Arm::B };
                let first = if position % 2 == 1 { previous.map_or(drawn, Arm::other) } else { drawn };
                previous = Some(first);
                placed.push(((position as f64 + random.random::<f64>()) / blocks as f64, kind, first));
            }
        }
        placed.sort_by(|(left, ..), (right, ..)| left.total_cmp(right));
        let blocks = placed
            .into_iter()
            .enumerate()
            .map(|(index, (_, kind, first))| ScheduledBlock {
                index,
                kind,
                order: block_order(first, options.pairs_per_block),
            })
            .collect();
        Self { level: options.level, warm_up: options.warm_up, seed: options.seed, blocks }
    }
}

/// Draw the orders of several alternatives that are compared in pairs, one order for each round. Alternatives are numbers
/// from 0.
///
/// The second of two consecutive rounds has the reverse of the order of the first, which is drawn. Over the two rounds
/// each pair of alternatives has the order ABBA or BAAB, as in a comparison block, whichever others run between them.
#[must_use]
pub fn draw_round_orders(alternatives: usize, rounds: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut orders = Vec::with_capacity(rounds + 1);
    while orders.len() < rounds {
        let mut drawn: Vec<usize> = (0..alternatives).collect();
        drawn.shuffle(&mut random);
        let reversed = drawn.iter().rev().copied().collect();
        orders.extend([drawn, reversed]);
    }
    orders.truncate(rounds);
    orders
}

/// The labels of a block: pair `i` starts with `first` where the number of ones in the binary form of `i` is even, and
/// with the other arm elsewhere.
fn block_order(first: Arm, pairs: usize) -> Vec<Arm> {
    let pair =
        |i: usize| if i.count_ones().is_multiple_of(2) { [first, first.other()] } else { [first.other(), first] };
    (0..pairs).flat_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn order_text(order: &[Arm]) -> String {
        order.iter().map(|arm| format!("{arm:?}")).collect()
    }

    #[test]
    fn blocks_of_two_pairs_are_abba_or_baab_and_balanced() {
        let schedule = Schedule::generate(&DesignOptions::new(Level::Run, 10, 7));
        assert_eq!(schedule.blocks.len(), 40);
        let mut counts: BTreeMap<(BlockKind, String), usize> = BTreeMap::new();
        for block in &schedule.blocks {
            *counts.entry((block.kind, order_text(&block.order))).or_default() += 1;
        }
        assert_eq!(counts.len(), 8, "{counts:?}");
        assert!(counts.values().all(|&count| count == 5), "{counts:?}");
        assert!(counts.keys().all(|(_, order)| order == "ABBA" || order == "BAAB"), "{counts:?}");
    }

    #[test]
    fn longer_blocks_follow_the_thue_morse_sequence() {
        assert_eq!(order_text(&block_order(Arm::A, 1)), "AB");
        assert_eq!(order_text(&block_order(Arm::B, 4)), "BAABABBA");
    }

    #[test]
    fn every_prefix_holds_the_kinds_in_proportion() {
        for seed in 0..50 {
            let schedule = Schedule::generate(&DesignOptions::with_control_blocks(Level::VmRestart, 20, 10, seed));
            for end in 1..=schedule.blocks.len() {
                let prefix = &schedule.blocks[..end];
                let comparisons = prefix.iter().filter(|block| block.kind == BlockKind::Comparison).count() as f64;
                let share = 20.0 / 50.0;
                assert!((comparisons - share * end as f64).abs() <= 4.0, "seed {seed}, {end} blocks: {comparisons}");
            }
        }
    }

    #[test]
    fn the_seed_determines_the_schedule() {
        let draw = |seed| Schedule::generate(&DesignOptions::new(Level::Run, 12, seed));
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3).blocks, draw(4).blocks);
    }

    #[test]
    fn control_blocks_apply_arm_a_only_and_slow_the_label_b() {
        let warm_up = WarmUpRule { runs_per_block: 1, samples_per_run: 0 };
        let runs = |kind| ScheduledBlock { index: 0, kind, order: vec![Arm::B, Arm::A] }.runs(&warm_up);
        let injected = runs(BlockKind::Injected { slowdown_percent: 5 });
        let shape = |runs: &[ScheduledRun]| {
            runs.iter().map(|run| (run.label, run.applied, run.slowdown_percent, run.is_warm_up)).collect::<Vec<_>>()
        };
        assert_eq!(
            shape(&injected),
            [(Arm::B, Arm::A, 5, true), (Arm::B, Arm::A, 5, false), (Arm::A, Arm::A, 0, false)]
        );
        assert_eq!(shape(&runs(BlockKind::SameArm))[1], (Arm::B, Arm::A, 0, false));
        assert_eq!(shape(&runs(BlockKind::Comparison))[1], (Arm::B, Arm::B, 0, false));
    }

    #[test]
    fn rounds_order_each_pair_of_alternatives_as_a_block_does() {
        let mut drawn_orders = BTreeMap::new();
        for seed in 0..20 {
            let orders = draw_round_orders(4, 7, seed);
            assert_eq!(orders.len(), 7);
            for rounds in orders.chunks_exact(2) {
                for (one, other) in (0..4).flat_map(|one| (0..one).map(move |other| (one, other))) {
                    let of_pair = rounds.iter().flatten().filter(|&&alternative| [one, other].contains(&alternative));
                    let order: Vec<Arm> =
                        of_pair.map(|&alternative| if alternative == one { Arm::A } else { Arm::B }).collect();
                    assert!(["ABBA", "BAAB"].contains(&order_text(&order).as_str()), "{orders:?}");
                }
                *drawn_orders.entry(rounds[0].clone()).or_insert(0) += 1;
            }
        }
        // 60 draws from 24 orders: nearly all occur.
        assert!(drawn_orders.len() > 15, "{drawn_orders:?}");
        assert_eq!(draw_round_orders(4, 7, 1), draw_round_orders(4, 7, 1));
        assert_eq!(draw_round_orders(2, 0, 1), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn run_shorter_than_its_warm_up_keeps_a_sample() {
        let rule = WarmUpRule { runs_per_block: 0, samples_per_run: 2 };
        assert_eq!(rule.measured_samples(&[9.0, 5.0, 1.0, 2.0]), [1.0, 2.0]);
        assert_eq!(rule.measured_samples(&[9.0, 5.0]), [5.0]);
        assert_eq!(rule.measured_samples(&[7.0]), [7.0]);
    }
}
