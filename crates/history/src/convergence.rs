//! How long a pass took to reach most of its savings.
//!
//! The savings of the host are followed from the last sample before the pass to its end. The rise is measured from the
//! lowest sample to the highest one after it, because the counter may drop when ksmd visits pages that programs freed
//! before. Between two samples it is assumed to grow linearly. The host has only one counter, so other changes by
//! programs during the pass are included.

use super::record::{HistoryPass, HistorySample};

/// A smaller rise is too small to follow: one mebibyte.
const MIN_RISE_BYTES: f64 = (1 << 20) as f64;

/// The minimum number of samples within a rise; with fewer its course is unknown.
const MIN_RISE_SAMPLES: usize = 3;

/// Samples up to this many seconds after the end of a pass count, because the sample that shows the end comes after it.
pub const SECONDS_AFTER_PASS: f64 = 3.0;

/// Seconds from the start of a pass to 90 % and to 99 % of its final savings. Samples are in ascending order; those of
/// other runs of the daemon are ignored. `None` if there are too few samples or too small savings.
pub fn convergence_times(pass: &HistoryPass, samples: &[HistorySample]) -> Option<(f64, f64)> {
    let (start, end) = (pass.started_at(), pass.ended_at + SECONDS_AFTER_PASS);
    let saved = |sample: &HistorySample| Some((sample.time, sample.saved_gross? as f64));
    let curve: Vec<(f64, f64)> =
        samples.iter().filter(|sample| sample.run_id == pass.run_id).filter_map(saved).collect();
    let baseline = curve.iter().rev().find(|(time, _)| *time <= start)?;
    let mut points: Vec<(f64, f64)> = vec![(start, baseline.1)];
    points.extend(curve.iter().filter(|(time, _)| *time > start && *time <= end));
    let lowest = points.iter().map(|(_, saved)| *saved).fold(f64::INFINITY, f64::min);
    let rise = &points[points.iter().rposition(|(_, saved)| *saved <= lowest)?..];
    let height = rise.iter().map(|(_, saved)| *saved).fold(lowest, f64::max) - lowest;
    if rise.len() < MIN_RISE_SAMPLES || height < MIN_RISE_BYTES {
        return None;
    }
    let seconds_to = |share: f64| crossing_time(rise, lowest + share * height).map(|time| time - start);
    Some((seconds_to(0.90)?, seconds_to(0.99)?))
}

/// When a curve first reaches a level.
fn crossing_time(curve: &[(f64, f64)], level: f64) -> Option<f64> {
    curve.windows(2).find_map(|pair| {
        let [(from, low), (to, high)] = *pair else { return None };
        (low < level && high >= level).then(|| from + (to - from) * (level - low) / (high - low))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_PER_MIB: u64 = 1 << 20;

    fn samples_from_mib(saved: &[(f64, u64)]) -> Vec<HistorySample> {
        let sample = |&(time, mib): &(f64, u64)| HistorySample {
            time,
            saved_gross: Some(mib * BYTES_PER_MIB),
            ..HistorySample::default()
        };
        saved.iter().map(sample).collect()
    }

    fn pass(began: f64, ended: f64) -> HistoryPass {
        HistoryPass { ended_at: ended, seconds: ended - began, ..HistoryPass::default() }
    }

    #[test]
    fn rise_is_followed_from_start_to_peak() {
        // 100 MiB were saved before; 100 MiB more arrive linearly over the ten seconds from 20 to 30.
        let mut saved = vec![(0.0, 100), (10.0, 100)];
        saved.extend((0..=10_u32).map(|second| (20.0 + f64::from(second), 100 + 10 * u64::from(second))));
        saved.push((40.0, 500));
        let (to_90, to_99) = convergence_times(&pass(20.0, 30.0), &samples_from_mib(&saved)).unwrap();
        assert!((to_90 - 9.0).abs() < 1e-9 && (to_99 - 9.9).abs() < 1e-9, "{to_90} {to_99}");
    }

    #[test]
    fn earlier_drop_is_not_counted_as_merged() {
        // Savings of ended programs disappear when ksmd starts; then 100 MiB arrive from second 2 to 12.
        let mut saved = vec![(0.0, 250), (1.5, 250)];
        saved.extend((2..=12_u32).map(|second| (f64::from(second), 10 * u64::from(second - 2))));
        let (to_90, _) = convergence_times(&pass(1.0, 12.0), &samples_from_mib(&saved)).unwrap();
        assert!((to_90 - 10.0).abs() < 1e-9, "{to_90}");
    }

    #[test]
    fn unknown_course_gives_no_times() {
        let few = samples_from_mib(&[(0.0, 0), (5.0, 0), (12.0, 100)]);
        assert_eq!(convergence_times(&pass(10.0, 12.0), &few), None, "two points are too few");
        let flat = samples_from_mib(&[(0.0, 7), (1.0, 7), (2.0, 7), (3.0, 7)]);
        assert_eq!(convergence_times(&pass(0.0, 3.0), &flat), None);
        let late = samples_from_mib(&[(5.0, 0), (6.0, 50), (7.0, 90), (8.0, 100)]);
        assert_eq!(convergence_times(&pass(4.0, 8.0), &late), None, "there is no sample before it");
        let others: Vec<HistorySample> = samples_from_mib(&[(3.0, 0), (5.0, 10), (6.0, 50), (8.0, 100)])
            .into_iter()
            .map(|sample| HistorySample { run_id: 2, ..sample })
            .collect();
        assert_eq!(convergence_times(&pass(4.0, 8.0), &others), None, "samples of another run of the daemon");
    }
}
