//! Samples as points of charts: counters become rates, and many samples are thinned to few points.

use super::record::HistorySample;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The state of a host at one time. Values that could not be read are absent. Bytes, unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct SeriesPoint {
    /// The time in seconds since 1970.
    pub time: f64,
    /// The run of the daemon that recorded it. Nothing is known about the time between two runs.
    pub run_id: i64,
    /// Gross savings by merging.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_gross: Option<u64>,
    /// The same less metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net: Option<i64>,
    /// `MemTotal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available: Option<u64>,
    /// The goal for `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
    /// CPU use of ksmd since the previous point, in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_percent: Option<f64>,
    /// CPU use of the daemon since the previous point, in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_percent: Option<f64>,
    /// Mean CPU budget of both together, in percent of one CPU.
    pub bound_percent: f64,
    /// The number of tracked processes.
    pub tracked_processes: u64,
}

/// All samples as points.
pub fn points_from_samples(samples: &[HistorySample]) -> Vec<SeriesPoint> {
    let previous = std::iter::once(None).chain(samples.iter().map(Some));
    previous.zip(samples).map(|(previous, sample)| point_from_samples(previous, sample)).collect()
}

fn point_from_samples(previous: Option<&HistorySample>, sample: &HistorySample) -> SeriesPoint {
    let previous = previous.filter(|previous| previous.run_id == sample.run_id && previous.time < sample.time);
    let percent = |counter: fn(&HistorySample) -> Option<f64>| {
        let previous = previous?;
        Some((100.0 * (counter(sample)? - counter(previous)?) / (sample.time - previous.time)).max(0.0))
    };
    SeriesPoint {
        time: sample.time,
        run_id: sample.run_id,
        saved_gross: sample.saved_gross,
        saved_net: sample.saved_net,
        total: sample.total,
        available: sample.available,
        keep_available: sample.keep_available,
        ksmd_percent: percent(|sample| sample.ksmd_seconds),
        pagefold_percent: percent(|sample| sample.pagefold_seconds),
        bound_percent: sample.bound_percent,
        tracked_processes: sample.tracked_processes,
    }
}

/// About `max_samples` samples at most, at equal intervals: the last of each interval and of each run of the daemon
/// within it. CPU time is cumulative, so thinning loses none.
pub fn thin_samples(samples: &[HistorySample], max_samples: usize) -> Vec<HistorySample> {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return Vec::new() };
    if samples.len() <= max_samples {
        return samples.to_vec();
    }
    let interval = (last.time - first.time) / max_samples.max(1) as f64;
    let slot = |sample: &HistorySample| (((sample.time - first.time) / interval) as u64, sample.run_id);
    let mut thinned: Vec<HistorySample> = vec![*first];
    for sample in &samples[1..] {
        match thinned.last_mut() {
            // The first sample stays, because the time begins there.
            Some(last_kept) if slot(last_kept) == slot(sample) && last_kept.time > first.time => *last_kept = *sample,
            _ => thinned.push(*sample),
        }
    }
    thinned
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time: f64, run: i64, ksmd: f64) -> HistorySample {
        HistorySample { time, run_id: run, ksmd_seconds: Some(ksmd), ..HistorySample::default() }
    }

    #[test]
    fn rates_do_not_span_two_runs() {
        let samples = [sample(0.0, 1, 0.0), sample(10.0, 1, 1.0), sample(20.0, 2, 0.5), sample(30.0, 2, 0.5)];
        let percents: Vec<Option<f64>> = points_from_samples(&samples).iter().map(|point| point.ksmd_percent).collect();
        assert_eq!(percents, [None, Some(10.0), None, Some(0.0)]);
    }

    #[test]
    fn thinning_keeps_cpu_time() {
        let samples: Vec<HistorySample> =
            (0..10_000).map(|i| sample(f64::from(i), i64::from(i / 6000), f64::from(i % 6000) / 100.0)).collect();
        let few = thin_samples(&samples, 100);
        assert!((100..=103).contains(&few.len()), "{}", few.len());
        assert_eq!((few[0].time, few[few.len() - 1].time), (0.0, 9999.0));
        let spent = |samples: &[HistorySample]| -> f64 {
            points_from_samples(samples)
                .windows(2)
                .filter_map(|w| Some(w[1].ksmd_percent? / 100.0 * (w[1].time - w[0].time)))
                .sum()
        };
        // The first sample of the second run is not the first of all, so only the CPU time of its interval is missing.
        assert!((spent(&samples) - spent(&few)).abs() < 1.1, "{} {}", spent(&samples), spent(&few));
        assert_eq!(thin_samples(&samples[..7], 100), &samples[..7]);
        assert!(thin_samples(&[], 100).is_empty());
    }
}
