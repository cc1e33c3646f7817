//! When a campaign stops. The rule is fixed before the start: looking at the result and repeating until it is significant
//! finds effects where there are none.
//!
//! A fixed plan judges once. A group sequential plan judges at several numbers of blocks and spends the permitted error
//! between these looks by a spending function. At each look the p-value is compared with a nominal level, and the interval
//! has the confidence of that level.
//!
//! Sources: K. K. G. Lan and D. L. DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70(3), 1983
//! (spending functions); P. Armitage, C. K. McPherson and B. C. Rowe, "Repeated significance tests on accumulating data",
//! Journal of the Royal Statistical Society A 132(2), 1969 (numerical integration); C. Jennison and B. W. Turnbull, "Group
//! Sequential Methods with Applications to Clinical Trials", 2000, chapters 3, 9 (repeated intervals) and 19. The boundaries
//! are those of normal statistics. They are applied to other p-values by their nominal level (Jennison and Turnbull,
//! section 3.5).

use super::statistics::interval::{normal_probability, normal_quantile};
use thiserror::Error;

/// How a group sequential plan spends its error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spending {
    /// Little at first, like the boundaries of O'Brien and Fleming: `2 - 2 * Phi(z(alpha / 2) / sqrt(t))`.
    OBrienFleming,
    /// Nearly evenly, like the boundaries of Pocock: `alpha * ln(1 + (e - 1) * t)`.
    Pocock,
}

impl Spending {
    /// The error spent by the share `t` of the blocks, of `alpha` in all, on one side.
    fn spent(self, alpha: f64, t: f64) -> f64 {
        match self {
            Self::OBrienFleming => 2.0 * normal_probability(normal_quantile(alpha / 2.0) / t.sqrt()),
            Self::Pocock => alpha * ((std::f64::consts::E - 1.0) * t).ln_1p(),
        }
    }
}

/// A number of blocks at which the campaign is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Look {
    /// Number of comparison blocks.
    pub blocks: usize,
    /// The two-sided level at this look. The interval has the confidence `1 - nominal_alpha`.
    pub nominal_alpha: f64,
    /// The boundary as a normal quantile.
    pub boundary: f64,
}

/// The looks of a campaign.
#[derive(Clone, Debug, PartialEq)]
pub struct StoppingPlan {
    looks: Vec<Look>,
}

/// Why a plan is refused.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub enum StoppingPlanError {
    /// The looks are missing, not ascending, or without blocks.
    #[error("the looks of a campaign must be ascending numbers of blocks, the first at least 2")]
    LooksNotAscending,
    /// The level is not between 0 and 1.
    #[error("the level {0} is not between 0 and 1; give a value such as 0.05")]
    LevelOutOfRange(f64),
}

impl StoppingPlan {
    /// One look at a fixed number of blocks.
    ///
    /// # Errors
    /// Fewer than two blocks, or a level outside of 0 to 1.
    pub fn fixed(blocks: usize, alpha: f64) -> Result<Self, StoppingPlanError> {
        Self::group_sequential(&[blocks], Spending::Pocock, alpha)
    }

    /// Looks at these numbers of blocks, at a two-sided level of `alpha` in all. Each side spends `alpha / 2`.
    ///
    /// # Errors
    /// Looks that are not ascending from at least two blocks, or a level outside of 0 to 1.
    pub fn group_sequential(looks: &[usize], spending: Spending, alpha: f64) -> Result<Self, StoppingPlanError> {
        let Some((&first, &last)) = looks.first().zip(looks.last()) else {
            return Err(StoppingPlanError::LooksNotAscending);
        };
        if first < 2 || looks.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(StoppingPlanError::LooksNotAscending);
        }
        if !(0.0 < alpha && alpha < 1.0) {
            return Err(StoppingPlanError::LevelOutOfRange(alpha));
        }
        let shares: Vec<f64> = looks.iter().map(|&blocks| blocks as f64 / last as f64).collect();
        let spent: Vec<f64> = shares.iter().map(|&share| spending.spent(alpha / 2.0, share)).collect();
        let boundaries = boundaries(&shares, &spent);
        let look = |(&blocks, boundary): (&usize, f64)| Look {
            blocks,
            nominal_alpha: 2.0 * normal_probability(-boundary),
            boundary,
        };
        Ok(Self { looks: looks.iter().zip(boundaries).map(look).collect() })
    }

    /// The looks, ascending.
    #[must_use]
    pub fn looks(&self) -> &[Look] {
        &self.looks
    }

    /// The look at exactly this number of comparison blocks, if the plan has one.
    #[must_use]
    pub fn look_at(&self, blocks: usize) -> Option<Look> {
        self.looks.iter().copied().find(|look| look.blocks == blocks)
    }

    /// The largest number of comparison blocks.
    #[must_use]
    pub fn max_blocks(&self) -> usize {
        self.looks.last().map_or(0, |look| look.blocks)
    }
}

/// Half the intervals of the grid over the continuation region; Simpson's rule needs an even number of intervals.
const GRID_HALF_INTERVALS: usize = 150;

/// The boundaries, as normal quantiles, at which symmetric two-sided tests at the shares of information spend this
/// cumulative error on each side.
///
/// The score is a Brownian motion at the times `shares`. Its density within the continuation region is carried from look to
/// look on a grid.
fn boundaries(shares: &[f64], spent: &[f64]) -> Vec<f64> {
    let mut found = Vec::new();
    // Nodes of the density before the look: (score, weight times density). At time 0 the score is 0.
    let mut density = vec![(0.0, 1.0)];
    let (mut time, mut spent_before) = (0.0, 0.0);
    for (&share, &spent) in shares.iter().zip(spent) {
        let deviation = (share - time).sqrt();
        let crossing = |limit: f64| -> f64 {
            density.iter().map(|&(score, weight)| weight * normal_probability((score - limit) / deviation)).sum()
        };
        let (mut low, mut high) = (0.0, 12.0 * share.sqrt());
        for _ in 0..60 {
            let middle = (low + high) / 2.0;
            if crossing(middle) > spent - spent_before { low = middle } else { high = middle }
        }
        let limit = high;
        found.push(limit / share.sqrt());
        let step = limit / GRID_HALF_INTERVALS as f64;
        density = (0..=2 * GRID_HALF_INTERVALS)
            .map(|i| {
                let score = -limit + step * i as f64;
                let simpson = match i {
                    i if i == 0 || i == 2 * GRID_HALF_INTERVALS => 1.0,
                    odd if odd % 2 == 1 => 4.0,
                    _ => 2.0,
                };
                let transition = |&(from, weight): &(f64, f64)| {
                    let z = (score - from) / deviation;
                    weight * (-z * z / 2.0).exp() / (deviation * std::f64::consts::TAU.sqrt())
                };
                (score, simpson * step / 3.0 * density.iter().map(transition).sum::<f64>())
            })
            .collect();
        (time, spent_before) = (share, spent);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(looks: &[usize], spending: Spending, expected: &[f64]) {
        let plan = StoppingPlan::group_sequential(looks, spending, 0.05).unwrap();
        let found: Vec<f64> = plan.looks().iter().map(|look| look.boundary).collect();
        let is_near = |(found, expected): (&f64, &f64)| (found - expected).abs() < 0.0015;
        assert!(found.iter().zip(expected).all(is_near), "{spending:?} {looks:?}: {found:?}");
    }

    /// D. M. Reboussin, D. L. DeMets, K. Kim and K. K. G. Lan, "Computations for group sequential boundaries using the
    /// Lan-DeMets spending function method", Controlled Clinical Trials 21(3), 2000: two-sided, alpha 0.05, five equal looks.
    #[test]
    fn boundaries_equal_published_tables() {
        check(&[4, 8, 12, 16, 20], Spending::OBrienFleming, &[4.8769, 3.3569, 2.6803, 2.2898, 2.0310]);
        check(&[4, 8, 12, 16, 20], Spending::Pocock, &[2.4380, 2.4268, 2.4101, 2.3966, 2.3859]);
    }

    #[test]
    fn one_look_has_the_full_level() {
        let plan = StoppingPlan::fixed(20, 0.05).unwrap();
        assert_eq!(plan.looks().len(), 1);
        assert!((plan.looks()[0].nominal_alpha - 0.05).abs() < 1e-9, "{plan:?}");
        assert!((plan.looks()[0].boundary - 1.959_963_98).abs() < 1e-6, "{plan:?}");
    }

    #[test]
    fn a_plan_has_its_looks_only() {
        let plan = StoppingPlan::group_sequential(&[10, 20], Spending::OBrienFleming, 0.05).unwrap();
        assert_eq!(plan.look_at(10).map(|look| look.blocks), Some(10));
        assert_eq!((plan.look_at(15), plan.max_blocks()), (None, 20));
    }

    #[test]
    fn plans_that_cannot_be_carried_out_are_refused() {
        let plan = |looks: &[usize], alpha| StoppingPlan::group_sequential(looks, Spending::Pocock, alpha);
        assert_eq!(plan(&[], 0.05), Err(StoppingPlanError::LooksNotAscending));
        assert_eq!(plan(&[1, 4], 0.05), Err(StoppingPlanError::LooksNotAscending));
        assert_eq!(plan(&[8, 8], 0.05), Err(StoppingPlanError::LooksNotAscending));
        assert_eq!(plan(&[8], 1.0), Err(StoppingPlanError::LevelOutOfRange(1.0)));
    }
}
