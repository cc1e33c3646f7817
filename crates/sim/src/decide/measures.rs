//! What a simulated run saved and cost.

use super::counters::PAGE_BYTES;
use super::samples::{Sample, SimulatedRun};

/// Shares of the savings that last, whose times are measured.
pub const TIMED_SHARES: [f64; 3] = [0.5, 0.9, 0.99];

/// The figures of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunMeasures {
    /// Savings less ksmd's metadata at the end, in bytes.
    pub saved_bytes: f64,
    /// The same over time, in bytes times seconds.
    pub saved_byte_seconds: f64,
    /// ksmd's CPU time as a share of one CPU.
    pub ksmd_cores: f64,
    /// CPU time of Pagefold's daemon as a share of one CPU.
    pub pagefold_cores: f64,
    /// Seconds until the pages saved are each of [`TIMED_SHARES`] of the duplicates that the host has at the end.
    pub seconds_to_share: [Option<f64>; TIMED_SHARES.len()],
    /// Merged pages that machines wrote.
    pub cow_breaks: f64,
    /// Huge pages that ksmd split.
    pub huge_pages_split: f64,
    /// Duplicates at the end that are not merged, in pages.
    pub unmerged_duplicates: f64,
    /// Completed scans.
    pub full_scans: f64,
    /// Memory that the host lacked at worst, in bytes.
    pub missing_bytes: f64,
}

impl RunMeasures {
    /// The figures of a run.
    #[must_use]
    pub fn new(run: &SimulatedRun) -> Self {
        let last = run.samples.last().copied().unwrap_or_default();
        let seconds = last.time_ms as f64 / 1000.0;
        let mean = |pair: &[Sample]| (pair[0].net_saved_bytes() + pair[1].net_saved_bytes()) as f64 / 2.0;
        let elapsed = |pair: &[Sample]| (pair[1].time_ms - pair[0].time_ms) as f64 / 1000.0;
        let cores = |cpu_ns: u64| if seconds > 0.0 { cpu_ns as f64 / 1e9 / seconds } else { 0.0 };
        let lowest = run.samples.iter().map(|sample| sample.available_bytes).min().unwrap_or(0);
        Self {
            saved_bytes: last.net_saved_bytes() as f64,
            saved_byte_seconds: run.samples.windows(2).map(|pair| mean(pair) * elapsed(pair)).sum(),
            ksmd_cores: cores(last.ksmd_cpu_ns),
            pagefold_cores: cores(last.pagefold_cpu_ns),
            seconds_to_share: TIMED_SHARES.map(|share| seconds_to(&run.samples, share * run.duplicates as f64)),
            cow_breaks: last.cow_breaks as f64,
            huge_pages_split: last.huge_pages_split as f64,
            unmerged_duplicates: run.duplicates.saturating_sub(last.saved_pages) as f64,
            full_scans: last.full_scans as f64,
            missing_bytes: (-lowest).max(0) as f64,
        }
    }

    /// CPU time of ksmd and of Pagefold's daemon as a share of one CPU.
    #[must_use]
    pub fn cores(&self) -> f64 {
        self.ksmd_cores + self.pagefold_cores
    }
}

/// When a number of pages is saved for the first time; between two samples, as if savings grew evenly.
fn seconds_to(samples: &[Sample], pages: f64) -> Option<f64> {
    let reached = samples.iter().position(|sample| sample.saved_pages as f64 >= pages && sample.saved_pages > 0)?;
    let now = samples[reached];
    let before = samples[reached.saturating_sub(1)];
    let (grown, time) = (now.saved_pages - before.saved_pages.min(now.saved_pages), now.time_ms - before.time_ms);
    let part = if grown > 0 { (pages - before.saved_pages as f64) / grown as f64 } else { 1.0 };
    Some((before.time_ms as f64 + part * time as f64) / 1000.0)
}

/// Mean and range of a figure over several runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The mean.
    pub mean: f64,
    /// The smallest value.
    pub least: f64,
    /// The largest value.
    pub most: f64,
}

impl Spread {
    /// The spread of some values; `None` without any.
    #[must_use]
    pub fn over(values: &[f64]) -> Option<Self> {
        let (&first, rest) = values.split_first()?;
        Some(Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            least: rest.iter().copied().fold(first, f64::min),
            most: rest.iter().copied().fold(first, f64::max),
        })
    }
}

/// Bytes of pages.
#[must_use]
pub fn bytes_of_pages(pages: f64) -> f64 {
    pages * PAGE_BYTES as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(saved: &[u64]) -> SimulatedRun {
        let sample = |(minute, &saved_pages): (u64, &u64)| Sample {
            time_ms: minute * 60_000,
            saved_pages,
            rmap_items: 640,
            ksmd_cpu_ns: minute * 6_000_000_000,
            pagefold_cpu_ns: minute * 3_000_000_000,
            available_bytes: 100 - minute.cast_signed() * 60,
            ..Sample::default()
        };
        SimulatedRun {
            samples: (0_u64..).zip(saved).map(sample).collect(),
            duplicates: 1000,
            huge_pages: 0,
            scan_wait: None,
        }
    }

    #[test]
    fn figures_follow_from_samples() {
        let measures = RunMeasures::new(&run(&[0, 400, 600, 900]));
        // Ten pages of metadata.
        assert_eq!(measures.saved_bytes, 4096.0 * 890.0);
        // Means of -10, 390, 590 and 890: 190, 490 and 740 pages, a minute each.
        assert_eq!(measures.saved_byte_seconds, 4096.0 * 60.0 * (190.0 + 490.0 + 740.0));
        assert_eq!((measures.ksmd_cores, measures.pagefold_cores), (0.1, 0.05));
        // 500 of 400 to 600 in the second minute; 900 at the end; 990 never.
        assert_eq!(measures.seconds_to_share, [Some(90.0), Some(180.0), None]);
        assert_eq!((measures.unmerged_duplicates, measures.missing_bytes), (100.0, 80.0));
    }

    #[test]
    fn nothing_is_reached_before_something_is_saved() {
        let empty = SimulatedRun { duplicates: 0, ..run(&[0, 0]) };
        assert_eq!(RunMeasures::new(&empty).seconds_to_share, [None; 3]);
    }

    #[test]
    fn spread_has_mean_and_range() {
        assert_eq!(Spread::over(&[3.0, 1.0, 2.0]), Some(Spread { mean: 2.0, least: 1.0, most: 3.0 }));
        assert_eq!(Spread::over(&[]), None);
    }
}
