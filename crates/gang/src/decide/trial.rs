//! Whether the scheduler helps: windows with and without it, compared in pairs.
//!
//! The windows alternate in the order on, off, off, on, so that a linear drift of the load cancels. The figures of
//! neighboring windows form a pair. The scheduler stays if the geometric mean of the pairs' benefits exceeds a margin
//! and all pairs show a benefit. Without a benefit each pair shows one by chance in half of the cases, whatever the noise,
//! so that four pairs agree in one comparison of 16 at most.

use crate::wire::TrialReport;

/// The least benefit for which the scheduler stays: it takes the place of the kernel's own, which has more users.
pub const MIN_BENEFIT: f64 = 1.02;
/// Whether the scheduler runs in the window with this number, counted from 0.
pub fn is_on(window: usize) -> bool {
    matches!(window % 4, 0 | 3)
}

/// Judges the rates of work in windows in the order of [`is_on`]; `metric` is the command that counts the work. `None` if
/// there is no pair yet.
pub fn judge(metric: &str, rates: &[f64]) -> Option<TrialReport> {
    let (mut on, mut off) = (Vec::new(), Vec::new());
    for (window, rate) in rates[..rates.len() / 2 * 2].iter().enumerate() {
        if is_on(window) { on.push(*rate) } else { off.push(*rate) }
    }
    if on.is_empty() {
        return None;
    }
    let benefits: Vec<f64> = on.iter().zip(&off).map(|(on, off)| benefit(*on, *off)).collect();
    let pairs = benefits.len() as f64;
    let mean = (benefits.iter().map(|benefit| benefit.ln()).sum::<f64>() / pairs).exp();
    let helps = mean >= MIN_BENEFIT && benefits.iter().all(|benefit| *benefit > 1.0);
    let metric = metric.to_owned();
    Some(TrialReport { metric, with_scheduler: on, without_scheduler: off, benefit: mean, helps })
}

/// One unit of work a second keeps ratios finite where no work was done.
fn benefit(on: f64, off: f64) -> f64 {
    on.max(1.0) / off.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn more_work_helps() {
        let helps = |rates: &[f64]| judge("work", rates).unwrap().helps;
        assert!(helps(&[300.0, 100.0, 100.0, 300.0]));
        assert!(!helps(&[100.0, 100.0, 100.0, 100.0]));
        assert!(!helps(&[0.0; 4]));
    }

    #[test]
    fn one_pair_without_a_benefit_decides() {
        let rates = |last: f64| [900.0, 100.0, 100.0, 300.0, 300.0, 100.0, 100.0, last];
        assert!(judge("work", &rates(101.0)).unwrap().helps);
        // The mean is far above the margin.
        assert!(!judge("work", &rates(99.0)).unwrap().helps);
    }

    #[test]
    fn an_incomplete_pair_is_not_judged() {
        assert_eq!(judge("work", &[1.0]), None);
        assert_eq!(judge("work", &[2.0, 1.0, 5.0]).unwrap().with_scheduler, [2.0]);
    }

    /// All signs of four pairs without a benefit, which are equally likely: one of 16 keeps the scheduler.
    #[test]
    fn chance_keeps_it_in_one_comparison_of_sixteen() {
        let kept = (0..16_u32).filter(|signs| {
            let rates = (0..8).map(|window| {
                let is_better = signs & (1 << (window / 2)) != 0;
                if is_on(window) && is_better {
                    120.0
                } else if is_on(window) {
                    80.0
                } else {
                    100.0
                }
            });
            judge("work", &rates.collect::<Vec<_>>()).unwrap().helps
        });
        assert_eq!(kept.count(), 1);
    }

    proptest! {
        #[test]
        fn linear_drift_does_not_decide(start in 100.0_f64..1000.0, slope in 0.0_f64..100.0) {
            let rates: Vec<f64> = (0..8).map(|window| start + slope * f64::from(window)).collect();
            prop_assert!(!judge("work", &rates).unwrap().helps);
        }
    }
}
