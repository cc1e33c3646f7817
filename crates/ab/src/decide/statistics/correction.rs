//! Correction of p-values for several metrics.

/// How p-values of several metrics are corrected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Correction {
    /// None: each metric is judged alone.
    None,
    /// Holm's step-down rule: the probability of any false finding is bounded.
    ///
    /// Source: S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6(2),
    /// 1979.
    #[default]
    Holm,
    /// The step-up rule of Benjamini and Hochberg: the expected share of false findings is bounded.
    ///
    /// Source: Y. Benjamini and Y. Hochberg, "Controlling the false discovery rate", Journal of the Royal Statistical
    /// Society B 57(1), 1995.
    BenjaminiHochberg,
}

impl Correction {
    /// The level at which the p-value of one of `count` metrics is significant whatever the other p-values are.
    ///
    /// Holm's rule and that of Benjamini and Hochberg compare the smallest p-value with `alpha / count`, which is the level
    /// of Bonferroni's correction, and the others with higher levels.
    #[must_use]
    pub fn individual_alpha(self, alpha: f64, count: usize) -> f64 {
        match self {
            Self::None => alpha,
            Self::Holm | Self::BenjaminiHochberg => alpha / count.max(1) as f64,
        }
    }
}

/// The corrected p-values, in the order of the given ones.
#[must_use]
pub fn correct_p_values(p_values: &[f64], correction: Correction) -> Vec<f64> {
    let count = p_values.len();
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|&left, &right| p_values[left].total_cmp(&p_values[right]));
    let mut corrected = p_values.to_vec();
    match correction {
        Correction::None => {}
        Correction::Holm => {
            let mut largest = 0.0_f64;
            for (rank, &i) in order.iter().enumerate() {
                largest = largest.max((count - rank) as f64 * p_values[i]).min(1.0);
                corrected[i] = largest;
            }
        }
        Correction::BenjaminiHochberg => {
            let mut smallest = 1.0_f64;
            for (rank, &i) in order.iter().enumerate().rev() {
                smallest = smallest.min(count as f64 / (rank + 1) as f64 * p_values[i]);
                corrected[i] = smallest;
            }
        }
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(correction: Correction, expected: &[f64]) {
        let corrected = correct_p_values(&[0.01, 0.04, 0.03, 0.005, 0.8], correction);
        let is_near = |(got, want): (&f64, &f64)| (got - want).abs() < 1e-12;
        assert!(corrected.iter().zip(expected).all(is_near), "{correction:?}: {corrected:?}");
    }

    #[test]
    fn corrections_equal_the_rules_computed_by_hand() {
        check(Correction::None, &[0.01, 0.04, 0.03, 0.005, 0.8]);
        // Sorted .005 .01 .03 .04 .8 times 5 4 3 2 1, never decreasing.
        check(Correction::Holm, &[0.04, 0.09, 0.09, 0.025, 0.8]);
        // scipy.stats.false_discovery_control([.01, .04, .03, .005, .8])
        check(Correction::BenjaminiHochberg, &[0.025, 0.05, 0.05, 0.025, 0.8]);
        assert!(correct_p_values(&[], Correction::Holm).is_empty());
    }

    /// The other metrics have no effect, which is the worst case.
    #[test]
    fn p_value_at_the_individual_level_is_significant_alone() {
        for correction in [Correction::None, Correction::Holm, Correction::BenjaminiHochberg] {
            let level = correction.individual_alpha(0.05, 4);
            let corrected = |p_value: f64| correct_p_values(&[1.0, p_value, 1.0, 1.0], correction)[1];
            assert!((corrected(level) - 0.05).abs() < 1e-12, "{correction:?}: {level}");
            assert!(corrected(level * 1.01) > 0.05, "{correction:?}: {level}");
        }
        assert_eq!(Correction::Holm.individual_alpha(0.05, 1), 0.05);
    }
}
