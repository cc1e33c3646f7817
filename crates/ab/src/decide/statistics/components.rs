//! Variance components: at which level a workload varies, and so at which level to repeat.
//!
//! Source: T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable time", International Symposium on Memory
//! Management, 2013, sections 7 and 9.

use super::{mean, variance};

/// Variances that each level adds, of nested repetitions: samples within runs within restarts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VarianceComponents {
    /// Between samples of one run.
    pub samples: f64,
    /// Between runs of one restart.
    pub runs: f64,
    /// Between restarts.
    pub restarts: f64,
}

/// The components of a variance study: for each restart its runs, for each run its samples.
///
/// A component is the variance of the means at its level minus what the level below explains, and at least 0. Counts that
/// differ are replaced by their harmonic mean. `None` if the study is empty at a level.
#[must_use]
pub fn variance_components(restarts: &[Vec<Vec<f64>>]) -> Option<VarianceComponents> {
    let runs: Vec<&Vec<f64>> = restarts.iter().flatten().collect();
    if runs.is_empty() || restarts.iter().any(Vec::is_empty) || runs.iter().any(|samples| samples.is_empty()) {
        return None;
    }
    let run_means: Vec<Vec<f64>> =
        restarts.iter().map(|runs| runs.iter().map(|samples| mean(samples)).collect()).collect();
    let restart_means: Vec<f64> = run_means.iter().map(|means| mean(means)).collect();
    let samples = pooled_variance(runs.iter().map(|samples| samples.as_slice()));
    let between_run_means = pooled_variance(run_means.iter().map(Vec::as_slice));
    let samples_per_run = harmonic_mean(runs.iter().map(|samples| samples.len()));
    let runs_per_restart = harmonic_mean(restarts.iter().map(Vec::len));
    Some(VarianceComponents {
        samples,
        runs: (between_run_means - samples / samples_per_run).max(0.0),
        restarts: (variance(&restart_means) - between_run_means / runs_per_restart).max(0.0),
    })
}

/// The variance within groups, weighted by their degrees of freedom; 0 if no group has two values.
fn pooled_variance<'v>(groups: impl Iterator<Item = &'v [f64]>) -> f64 {
    let (squares, freedom) = groups.fold((0.0, 0.0), |(squares, freedom), group| {
        let degrees = (group.len() - 1) as f64;
        (squares + degrees * variance(group), freedom + degrees)
    });
    if freedom == 0.0 { 0.0 } else { squares / freedom }
}

fn harmonic_mean(counts: impl Iterator<Item = usize>) -> f64 {
    let (count, inverse) = counts.fold((0.0, 0.0), |(n, sum), count| (n + 1.0, sum + 1.0 / count as f64));
    count / inverse
}

/// The components of the log ratios of a campaign's blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockComponents {
    /// Variance of the logarithm of a run's mean within one block and arm.
    pub runs: f64,
    /// Variance of the log ratio between blocks that repeating runs within a block does not reduce.
    pub blocks: f64,
}

impl BlockComponents {
    /// The components from the logarithms of the run means of each block, A and B.
    ///
    /// The variance between runs needs blocks with several runs of one arm, else it is 0 and all variance is of the blocks.
    #[must_use]
    pub fn from_blocks(blocks: &[(Vec<f64>, Vec<f64>)]) -> Self {
        let runs = pooled_variance(blocks.iter().flat_map(|(a, b)| [a.as_slice(), b.as_slice()]));
        let ratios: Vec<f64> = blocks.iter().map(|(a, b)| mean(b) - mean(a)).collect();
        let inverses = blocks.iter().map(|(a, b)| 1.0 / a.len() as f64 + 1.0 / b.len() as f64);
        let explained = runs * inverses.sum::<f64>() / (blocks.len().max(1)) as f64;
        Self { runs, blocks: (variance(&ratios) - explained).max(0.0) }
    }

    /// The variance of the log ratio of one block with so many pairs of runs.
    #[must_use]
    pub fn variance_of_block(&self, pairs: usize) -> f64 {
        self.blocks + 2.0 * self.runs / pairs as f64
    }

    /// The number of pairs in each block that gives the narrowest interval for a given time, at least 1 and at most
    /// `max_pairs`: the root of the ratio of the costs, times that of the variances.
    ///
    /// `block_seconds` is the time of a block without its measured runs (restart, warm-up), `pair_seconds` that of a pair.
    #[must_use]
    pub fn best_pairs_per_block(&self, block_seconds: f64, pair_seconds: f64, max_pairs: usize) -> usize {
        let best = (block_seconds / pair_seconds * (2.0 * self.runs) / self.blocks).sqrt();
        if best.is_nan() { 1 } else { (best.ceil() as usize).clamp(1, max_pairs.max(1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::ChaCha8Rng;
    use rand::{RngExt as _, SeedableRng as _};

    /// Uniform values with this standard deviation.
    fn draw(random: &mut ChaCha8Rng, deviation: f64) -> f64 {
        (random.random::<f64>() - 0.5) * 12.0_f64.sqrt() * deviation
    }

    #[test]
    fn components_of_a_small_study_are_those_computed_by_hand() {
        let study = vec![vec![vec![1.0, 3.0], vec![5.0, 7.0]], vec![vec![11.0, 13.0], vec![15.0, 17.0]]];
        // Samples: variance 2 in each run. Run means 2 6 12 16: variance 8, minus 2 / 2. Restart means 4 14: 50 - 8 / 2.
        assert_eq!(variance_components(&study), Some(VarianceComponents { samples: 2.0, runs: 7.0, restarts: 46.0 }));
        assert_eq!(variance_components(&[]), None);
        assert_eq!(variance_components(&[vec![]]), None);
    }

    #[test]
    fn components_of_drawn_values_are_near_the_true_ones() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let study: Vec<Vec<Vec<f64>>> = (0..400)
            .map(|_| {
                let restart = draw(&mut random, 3.0);
                let run = |random: &mut ChaCha8Rng| {
                    let run = restart + draw(random, 2.0);
                    (0..5).map(|_| run + draw(random, 1.0)).collect()
                };
                (0..4).map(|_| run(&mut random)).collect()
            })
            .collect();
        let found = variance_components(&study).unwrap();
        for (found, true_variance) in [(found.samples, 1.0), (found.runs, 4.0), (found.restarts, 9.0)] {
            assert!((found / true_variance - 1.0).abs() < 0.2, "{found} instead of {true_variance}");
        }
    }

    #[test]
    fn repetition_within_blocks_follows_the_cost_and_the_variance() {
        let components = BlockComponents { runs: 2.0, blocks: 1.0 };
        assert_eq!(components.variance_of_block(4), 2.0);
        assert_eq!(components.best_pairs_per_block(100.0, 1.0, 50), 20);
        assert_eq!(components.best_pairs_per_block(1.0, 100.0, 50), 1);
        assert_eq!(BlockComponents { runs: 1.0, blocks: 0.0 }.best_pairs_per_block(1.0, 1.0, 8), 8);
        assert_eq!(BlockComponents { runs: 0.0, blocks: 0.0 }.best_pairs_per_block(1.0, 1.0, 8), 1);
        let blocks = [(vec![0.0, 2.0], vec![1.0, 3.0]), (vec![0.0, 2.0], vec![5.0, 7.0])];
        // Runs: variance 2. Ratios 1 and 5: variance 8, of which 2 * (1/2 + 1/2) is explained by runs.
        assert_eq!(BlockComponents::from_blocks(&blocks), BlockComponents { runs: 2.0, blocks: 6.0 });
    }
}
