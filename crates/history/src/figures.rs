//! Summary figures of a span of time.

use super::record::{HistoryPass, HistorySample, HistorySpan};
use pagefold_base::Bytes;
use pagefold_output::text::{format_net, format_number};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Summary figures of a host over a span of time. Means are over the time covered by samples. Unknown figures are
/// absent. Bytes and seconds, unless the name says otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryFigures {
    /// Time covered by samples.
    pub covered_seconds: f64,
    /// Savings less metadata, mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net_mean: Option<f64>,
    /// The same, maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net_max: Option<i64>,
    /// The same at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub saved_net_last: Option<i64>,
    /// Memory in use (`MemTotal` - `MemAvailable`), mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_use_mean: Option<f64>,
    /// The same, maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_use_max: Option<u64>,
    /// Maximum of the predicted memory in use without merging: memory in use plus gross savings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without_merging_max: Option<u64>,
    /// The minimum of `MemAvailable`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_min: Option<u64>,
    /// CPU time of ksmd.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ksmd_seconds: Option<f64>,
    /// CPU time of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pagefold_seconds: Option<f64>,
    /// CPU use of both together in percent of one CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_percent: Option<f64>,
    /// CPU seconds of both for each GiB of net savings over an hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_seconds_per_gib_hour: Option<f64>,
    /// Recorded passes.
    pub passes: u64,
    /// Passes that merged pages.
    pub merges: u64,
    /// Predicted savings of these merges.
    pub predicted: u64,
    /// Measured savings of these merges.
    pub measured: i64,
    /// How long merges took to reach most of their savings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub convergence: Option<ConvergenceReport>,
}

/// How long merges took to reach most of their savings, in seconds; over the merges whose duration is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ConvergenceReport {
    /// Merges whose duration is known.
    pub merges: u64,
    /// From the start of the pass to 90 %, median.
    pub to_90_median: f64,
    /// The same, 90th percentile.
    pub to_90_high: f64,
    /// From the start of the pass to 99 %, median.
    pub to_99_median: f64,
    /// The same, 90th percentile.
    pub to_99_high: f64,
    /// From the first arrival of a process since the previous merge, at most two minutes before the pass, to 90 %,
    /// median; over passes with such an arrival.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival_to_90_median: Option<f64>,
    /// The same, 90th percentile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arrival_to_90_high: Option<f64>,
}

impl ConvergenceReport {
    fn from_passes(passes: &[HistoryPass]) -> Option<Self> {
        let sorted = |seconds: &dyn Fn(&HistoryPass) -> Option<f64>| {
            let mut values: Vec<f64> = passes.iter().filter_map(seconds).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (to_90, to_99) = (sorted(&|pass| pass.seconds_to_90), sorted(&|pass| pass.seconds_to_99));
        let arrival = sorted(&|pass| Some(pass.arrival_wait_seconds? + pass.seconds_to_90?));
        Some(Self {
            merges: to_90.len() as u64,
            to_90_median: quantile(&to_90, 0.5)?,
            to_90_high: quantile(&to_90, 0.9)?,
            to_99_median: quantile(&to_99, 0.5)?,
            to_99_high: quantile(&to_99, 0.9)?,
            arrival_to_90_median: quantile(&arrival, 0.5),
            arrival_to_90_high: quantile(&arrival, 0.9),
        })
    }
}

/// A quantile of sorted values: the smallest value that at least this share of the values does not exceed.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FigureUnit {
    /// Bytes, possibly negative.
    Bytes,
    /// Seconds.
    Seconds,
    /// Percent.
    Percent,
    /// A count.
    Count,
}

impl FigureUnit {
    /// A value in text form; a dash if unknown.
    pub fn format_value(self, value: Option<f64>) -> String {
        let Some(value) = value else { return "–".to_owned() };
        match self {
            Self::Bytes if value >= 0.0 => Bytes(value as u64).to_string(),
            Self::Bytes => format_net(value as i64),
            Self::Seconds if value.abs() >= 7200.0 => format!("{:.1} h", value / 3600.0),
            Self::Seconds => format!("{value:.*} s", usize::from(value.abs() < 100.0) * 2),
            Self::Percent => format!("{value:.2} %"),
            Self::Count => format_number(value.max(0.0) as u64),
        }
    }
}

impl HistoryFigures {
    /// The figures of a span.
    pub fn from_span(span: &HistorySpan) -> Self {
        let samples = &span.samples;
        let increase = |counter: fn(&HistorySample) -> Option<f64>| counter_increase(samples, counter);
        let (ksmd, pagefold) = (increase(|sample| sample.ksmd_seconds), increase(|sample| sample.pagefold_seconds));
        let cpu = ksmd.zip(pagefold).map(|(ksmd, pagefold)| ksmd + pagefold);
        let covered_seconds: f64 = sample_pairs(samples).map(|(before, after)| after.time - before.time).sum();
        let net = time_weighted_mean(samples, |sample| Some(sample.saved_net? as f64));
        let merges = || span.passes.iter().filter(|pass| pass.measured.is_some());
        Self {
            covered_seconds,
            saved_net_mean: net.map(|(mean, _)| mean),
            saved_net_max: samples.iter().filter_map(|sample| sample.saved_net).max(),
            saved_net_last: samples.iter().rev().find_map(|sample| sample.saved_net),
            in_use_mean: time_weighted_mean(samples, |sample| Some(sample.in_use()? as f64)).map(|(mean, _)| mean),
            in_use_max: samples.iter().filter_map(HistorySample::in_use).max(),
            without_merging_max: samples.iter().filter_map(|sample| Some(sample.in_use()? + sample.saved_gross?)).max(),
            available_min: samples.iter().filter_map(|sample| sample.available).min(),
            ksmd_seconds: ksmd,
            pagefold_seconds: pagefold,
            cpu_percent: cpu.filter(|_| covered_seconds > 0.0).map(|cpu| 100.0 * cpu / covered_seconds),
            cpu_seconds_per_gib_hour: cpu.zip(net).and_then(|(cpu, (mean, seconds))| {
                let gib_hours = mean / (1_u64 << 30) as f64 * seconds / 3600.0;
                (gib_hours > 1e-6).then(|| cpu / gib_hours)
            }),
            passes: span.passes.len() as u64,
            merges: merges().count() as u64,
            predicted: merges().map(|pass| pass.predicted).sum(),
            measured: merges().filter_map(|pass| pass.measured).sum(),
            convergence: ConvergenceReport::from_passes(&span.passes),
        }
    }

    /// Each figure with its label, in display order.
    pub fn named_values(&self) -> Vec<(&'static str, FigureUnit, Option<f64>)> {
        use FigureUnit::{Bytes, Count, Percent, Seconds};
        let unsigned = |value: Option<u64>| value.map(|value| value as f64);
        let signed = |value: Option<i64>| value.map(|value| value as f64);
        let duration = |field: fn(&ConvergenceReport) -> Option<f64>| self.convergence.as_ref().and_then(field);
        let share = (self.predicted > 0).then(|| 100.0 * self.measured as f64 / self.predicted as f64);
        vec![
            ("net savings, mean", Bytes, self.saved_net_mean),
            ("net savings, maximum", Bytes, signed(self.saved_net_max)),
            ("net savings, at the end", Bytes, signed(self.saved_net_last)),
            ("memory in use, mean", Bytes, self.in_use_mean),
            ("memory in use, maximum", Bytes, unsigned(self.in_use_max)),
            ("in use without merging, maximum", Bytes, unsigned(self.without_merging_max)),
            ("memory available, minimum", Bytes, unsigned(self.available_min)),
            ("CPU time of ksmd", Seconds, self.ksmd_seconds),
            ("CPU time of pagefold", Seconds, self.pagefold_seconds),
            ("CPU use of both, of one CPU", Percent, self.cpu_percent),
            ("CPU time per GiB saved for an hour", Seconds, self.cpu_seconds_per_gib_hour),
            ("passes", Count, Some(self.passes as f64)),
            ("merges", Count, Some(self.merges as f64)),
            ("predicted savings of merges", Bytes, Some(self.predicted as f64)),
            ("measured savings of merges", Bytes, Some(self.measured as f64)),
            ("measured of predicted savings", Percent, share),
            ("merges with known duration", Count, duration(|report| Some(report.merges as f64))),
            ("time to 90 %, median", Seconds, duration(|report| Some(report.to_90_median))),
            ("time to 90 %, 90th percentile", Seconds, duration(|report| Some(report.to_90_high))),
            ("time to 99 %, median", Seconds, duration(|report| Some(report.to_99_median))),
            ("time to 99 %, 90th percentile", Seconds, duration(|report| Some(report.to_99_high))),
            ("from arrival to 90 %, median", Seconds, duration(|report| report.arrival_to_90_median)),
            ("from arrival to 90 %, 90th percentile", Seconds, duration(|report| report.arrival_to_90_high)),
            ("time covered by samples", Seconds, Some(self.covered_seconds)),
        ]
    }
}

/// Adjacent samples of the same run of the daemon.
fn sample_pairs(samples: &[HistorySample]) -> impl Iterator<Item = (&HistorySample, &HistorySample)> {
    let pairs = samples.windows(2).map(|pair| (&pair[0], &pair[1]));
    pairs.filter(|(before, after)| before.run_id == after.run_id && after.time > before.time)
}

/// The increase of a counter.
fn counter_increase(samples: &[HistorySample], counter: fn(&HistorySample) -> Option<f64>) -> Option<f64> {
    let rises: Vec<f64> = sample_pairs(samples)
        .filter_map(|(before, after)| Some((counter(after)? - counter(before)?).max(0.0)))
        .collect();
    (!rises.is_empty()).then(|| rises.iter().sum())
}

/// The mean over time (trapezoidal rule), and the seconds that it covers.
fn time_weighted_mean(samples: &[HistorySample], field: fn(&HistorySample) -> Option<f64>) -> Option<(f64, f64)> {
    let (mut sum, mut seconds) = (0.0, 0.0);
    for (before, after) in sample_pairs(samples) {
        if let (Some(low), Some(high)) = (field(before), field(after)) {
            let step = after.time - before.time;
            sum += (low + high) / 2.0 * step;
            seconds += step;
        }
    }
    (seconds > 0.0).then(|| (sum / seconds, seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_time_weighted() {
        let sample = |time: f64, run, gib: i64, ksmd: f64| HistorySample {
            time,
            run_id: run,
            saved_net: Some(gib << 30),
            ksmd_seconds: Some(ksmd),
            pagefold_seconds: Some(0.0),
            ..HistorySample::default()
        };
        // Half an hour at 2 GiB, a day without a daemon, half an hour with a rise from 2 to 6 GiB.
        let samples = vec![
            sample(0.0, 1, 2, 0.0),
            sample(1800.0, 1, 2, 9.0),
            sample(90_000.0, 2, 2, 0.5),
            sample(91_800.0, 2, 6, 3.5),
        ];
        let figures = HistoryFigures::from_span(&HistorySpan { samples, ..HistorySpan::default() });
        let close = |value: Option<f64>, expect: f64| value.is_some_and(|value| (value - expect).abs() < 1e-9);
        assert!(close(figures.saved_net_mean.map(|bytes| bytes / (1_u64 << 30) as f64), 3.0), "{figures:?}");
        assert!(close(figures.ksmd_seconds, 12.0) && close(figures.cpu_seconds_per_gib_hour, 4.0), "{figures:?}");
        assert!(close(figures.cpu_percent, 100.0 * 12.0 / 3600.0));
        assert_eq!((figures.in_use_mean, figures.convergence), (None, None));
    }

    #[test]
    fn quantiles_are_observed_values() {
        assert_eq!(quantile(&[], 0.5), None);
        let ten: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!(
            (quantile(&ten, 0.5), quantile(&ten, 0.9), quantile(&ten[..1], 0.9)),
            (Some(5.0), Some(9.0), Some(1.0))
        );
    }

    #[test]
    fn values_are_formatted_with_units() {
        let check = |unit: FigureUnit, value, text: &str| assert_eq!(unit.format_value(Some(value)), text);
        check(FigureUnit::Seconds, 1.234, "1.23 s");
        check(FigureUnit::Seconds, 123.4, "123 s");
        check(FigureUnit::Seconds, 7200.0, "2.0 h");
        check(FigureUnit::Bytes, 1536.0, "1.50 KiB");
        check(FigureUnit::Count, 1234.0, "1,234");
        assert_eq!(FigureUnit::Percent.format_value(None), "–");
    }
}
