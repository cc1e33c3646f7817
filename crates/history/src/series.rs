//! Samples as points that can be drawn: counters become rates, and few points stand for many.

use super::record::Sample;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How a host stood at a moment. What could not be read is absent. Bytes, unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Point {
    /// When: seconds since 1970.
    pub time: f64,
    /// Which life of the daemon it belongs to: nothing is known of the time between two.
    pub run: i64,
    /// What merging saved, gross.
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
    /// `MemAvailable` that was to be kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_available: Option<u64>,
    /// Percent of one CPU that ksmd used since the point before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_percent: Option<f64>,
    /// Percent of one CPU that the daemon used since the point before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_percent: Option<f64>,
    /// Percent of one CPU that both may use together on average.
    pub bound_percent: f64,
    /// Processes that were managed.
    pub members: u64,
}

/// Every sample as a point.
pub fn points(samples: &[Sample]) -> Vec<Point> {
    let before = std::iter::once(None).chain(samples.iter().map(Some));
    before.zip(samples).map(|(before, sample)| point(before, sample)).collect()
}

fn point(before: Option<&Sample>, sample: &Sample) -> Point {
    let before = before.filter(|before| before.run == sample.run && before.time < sample.time);
    let percent = |of: fn(&Sample) -> Option<f64>| {
        let before = before?;
        Some((100.0 * (of(sample)? - of(before)?) / (sample.time - before.time)).max(0.0))
    };
    Point {
        time: sample.time,
        run: sample.run,
        saved_gross: sample.saved_gross,
        saved_net: sample.saved_net,
        total: sample.total,
        available: sample.available,
        keep_available: sample.keep_available,
        ksmd_percent: percent(|sample| sample.ksmd_seconds),
        pagefold_percent: percent(|sample| sample.pagefold_seconds),
        bound_percent: sample.bound_percent,
        members: sample.members,
    }
}

/// At most about so many samples, at even distances in time: the last of each slice and of each life of the daemon
/// within it. CPU time is counted up, so that none is lost between those that stay.
pub fn thinned(samples: &[Sample], most: usize) -> Vec<Sample> {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return Vec::new() };
    if samples.len() <= most {
        return samples.to_vec();
    }
    let slice = (last.time - first.time) / most.max(1) as f64;
    let slot = |sample: &Sample| (((sample.time - first.time) / slice) as u64, sample.run);
    let mut kept: Vec<Sample> = vec![*first];
    for sample in &samples[1..] {
        match kept.last_mut() {
            // The first of all stays: it is where the time begins.
            Some(before) if slot(before) == slot(sample) && before.time > first.time => *before = *sample,
            _ => kept.push(*sample),
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time: f64, run: i64, ksmd: f64) -> Sample {
        Sample { time, run, ksmd_seconds: Some(ksmd), ..Sample::default() }
    }

    #[test]
    fn rates_are_of_the_time_between_and_of_one_life() {
        let samples = [sample(0.0, 1, 0.0), sample(10.0, 1, 1.0), sample(20.0, 2, 0.5), sample(30.0, 2, 0.5)];
        let percents: Vec<Option<f64>> = points(&samples).iter().map(|point| point.ksmd_percent).collect();
        assert_eq!(percents, [None, Some(10.0), None, Some(0.0)]);
    }

    #[test]
    fn few_stand_for_many_without_losing_cpu_time() {
        let samples: Vec<Sample> =
            (0..10_000).map(|i| sample(f64::from(i), i64::from(i / 6000), f64::from(i % 6000) / 100.0)).collect();
        let few = thinned(&samples, 100);
        assert!((100..=103).contains(&few.len()), "{}", few.len());
        assert_eq!((few[0].time, few[few.len() - 1].time), (0.0, 9999.0));
        let spent = |of: &[Sample]| -> f64 {
            points(of).windows(2).filter_map(|w| Some(w[1].ksmd_percent? / 100.0 * (w[1].time - w[0].time))).sum()
        };
        // The first of the second life is not the start of all, so its slice is all that is missing.
        assert!((spent(&samples) - spent(&few)).abs() < 1.1, "{} {}", spent(&samples), spent(&few));
        assert_eq!(thinned(&samples[..7], 100), &samples[..7]);
        assert!(thinned(&[], 100).is_empty());
    }
}
