//! Times of runs with the noise of real machines: drawn from models, and resampled from measured runs.
//!
//! All models are of the logarithm of a run's time. `labs/measured-runs/measure.py` made the measured runs, in turns, on a
//! virtual machine with two CPUs while compilers ran beside it. A block takes consecutive measured runs from a random
//! place, so that their autocorrelation is kept.

use pagefold_ab::decide::statistics::interval::normal_quantile;
use rand::RngExt as _;
use rand::rngs::ChaCha8Rng;

/// The measured runs: a line of titles, and on each line the microseconds of one run of each workload.
const MEASURED_RUNS: &str = include_str!("../../measured-runs/runs.csv");

/// A workload with measured runs: a column of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MeasuredWorkload {
    /// Wall time of a hash of 12 MiB.
    HashWall,
    /// CPU time of a sort of 60,000 lines.
    SortCpu,
    /// Wall time of 40 processes.
    SpawnWall,
}

/// How the times of runs vary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunTimeModel {
    /// Independent normal noise of 1.5 %.
    Normal,
    /// Normal noise of 1 %; every tenth run is delayed by a Pareto variable of at least 2 % with shape 2.5, whose fourth
    /// moment is infinite.
    HeavyTails,
    /// Normal noise of 1 %, a linear drift of 4 % over the campaign, and a wave of 2 % with a period of 37 runs.
    Drift,
    /// An autoregressive process of 3 % with correlation 0.8 from run to run, and normal noise of 0.7 %.
    Autocorrelated,
    /// A block adds 5 %, and 1 % that differs between the arms; normal noise of 1 %.
    BlockEffects,
    /// Three of ten runs are 6 % slower than the others; normal noise of 0.7 %.
    Bimodal,
    /// Measured runs.
    Measured(MeasuredWorkload),
}

impl RunTimeModel {
    /// All models.
    pub const ALL: [Self; 9] = [
        Self::Normal,
        Self::HeavyTails,
        Self::Drift,
        Self::Autocorrelated,
        Self::BlockEffects,
        Self::Bimodal,
        Self::Measured(MeasuredWorkload::HashWall),
        Self::Measured(MeasuredWorkload::SortCpu),
        Self::Measured(MeasuredWorkload::SpawnWall),
    ];

    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::HeavyTails => "heavy tails",
            Self::Drift => "drift",
            Self::Autocorrelated => "autocorrelated",
            Self::BlockEffects => "block effects",
            Self::Bimodal => "bimodal",
            Self::Measured(MeasuredWorkload::HashWall) => "measured: hash, wall time",
            Self::Measured(MeasuredWorkload::SortCpu) => "measured: sort, CPU time",
            Self::Measured(MeasuredWorkload::SpawnWall) => "measured: spawn, wall time",
        }
    }

    /// The times of blocks of consecutive runs. Each run has the time that it takes under A and under B; they differ only
    /// by an interaction of block and arm.
    #[must_use]
    pub fn draw_blocks(self, lengths: &[usize], random: &mut ChaCha8Rng) -> Vec<Vec<[f64; 2]>> {
        if let Self::Measured(workload) = self {
            let runs = measured_runs(workload);
            let block = |&length: &usize| consecutive(&runs, length, random).map(|time| [time; 2]).collect();
            return lengths.iter().map(block).collect();
        }
        let total = lengths.iter().sum::<usize>() as f64;
        let phase = random.random::<f64>();
        let mut position = 0.0;
        let mut correlated = 0.03 * normal(random);
        let mut blocks = Vec::new();
        for &length in lengths {
            let block_effect = 0.05 * normal(random);
            let interaction = 0.01 * normal(random);
            let mut block = Vec::new();
            for _ in 0..length {
                position += 1.0;
                correlated = 0.8 * correlated + 0.6 * 0.03 * normal(random);
                let noise = normal(random);
                let (shared, only_b) = match self {
                    Self::Normal => (0.015 * noise, 0.0),
                    Self::HeavyTails => {
                        let is_delayed = random.random::<f64>() < 0.1;
                        let delay = 0.02 * open_unit(random).powf(-1.0 / 2.5);
                        (0.01 * noise + if is_delayed { delay.ln_1p() } else { 0.0 }, 0.0)
                    }
                    Self::Drift => {
                        let wave = (std::f64::consts::TAU * (position / 37.0 + phase)).sin();
                        (0.01 * noise + 0.04 * position / total + 0.02 * wave, 0.0)
                    }
                    Self::Autocorrelated => (correlated + 0.007 * noise, 0.0),
                    Self::BlockEffects => (0.01 * noise + block_effect, interaction),
                    Self::Bimodal => {
                        let is_slow = random.random::<f64>() < 0.3;
                        (0.007 * noise + if is_slow { 0.06_f64.ln_1p() } else { 0.0 }, 0.0)
                    }
                    Self::Measured(_) => unreachable!("measured runs are not drawn"),
                };
                block.push([f64::exp(shared), f64::exp(shared + only_b)]);
            }
            blocks.push(block);
        }
        blocks
    }

    /// The times of so many runs of A, and then as many of B.
    #[must_use]
    pub fn draw_sequence(self, runs: usize, random: &mut ChaCha8Rng) -> (Vec<f64>, Vec<f64>) {
        // The measured runs have no gap between the arms. In a model each arm is one block.
        let mut times: Vec<f64> = match self {
            Self::Measured(workload) => consecutive(&measured_runs(workload), 2 * runs, random).collect(),
            _ => self.draw_blocks(&[runs, runs], random).into_iter().flatten().map(|[time, _]| time).collect(),
        };
        let second = times.split_off(runs);
        (times, second)
    }
}

/// Consecutive values from a random place. The end is followed by the beginning.
fn consecutive<'v>(values: &'v [f64], count: usize, random: &mut ChaCha8Rng) -> impl Iterator<Item = f64> + use<'v> {
    let start = random.random_range(0..values.len());
    values.iter().copied().cycle().skip(start).take(count)
}

/// The times of a workload in microseconds.
fn measured_runs(workload: MeasuredWorkload) -> Vec<f64> {
    let column = match workload {
        MeasuredWorkload::HashWall => 0,
        MeasuredWorkload::SortCpu => 3,
        MeasuredWorkload::SpawnWall => 4,
    };
    let time = |line: &str| line.split(',').nth(column).and_then(|cell| cell.parse().ok());
    MEASURED_RUNS.lines().skip(1).map(|line| time(line).expect("the file of measured runs has numbers")).collect()
}

/// A number between 0 and 1, both excluded.
fn open_unit(random: &mut ChaCha8Rng) -> f64 {
    (f64::from(random.random::<u32>()) + 0.5) / 4_294_967_296.0
}

/// A standard normal number.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    normal_quantile(open_unit(random))
}
