//! How long a process is stopped while its ranges are enrolled and unenrolled from outside.
//!
//! A thread of the target is stopped, made to call madvise(2), and resumed, again and again: a command with many ranges
//! causes several stops, so that no single stop is long. The host reports each stop; the benchmark reports single stops
//! and their sum over all ranges of a command. ksmd is stopped meanwhile: it merges nothing, so that unenrolling has no
//! pages to unmerge.

use super::thresholds::MAX_MEDIAN_STOP_SECONDS;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use anyhow::{Context, Result, anyhow, ensure};
use pagefold_base::{AddressRange, Pid};
use pagefold_host::Host;
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_labs::client::RunningLab;
use pagefold_labs::ksm::KsmTestGuard;
use pagefold_linux::LiveHost;
use std::time::Duration;

/// Ranges of one command.
const RANGES_PER_COMMAND: u64 = 1000;

/// Pages of a range, and of the gap after it: each range is a separate region while it is enrolled.
const PAGES_PER_RANGE: u64 = 16;

/// The actions, taken in turns.
const ADVICE_TURNS: [(&str, MergeAdvice); 2] =
    [("enroll", MergeAdvice::Mergeable), ("unenroll", MergeAdvice::Unmergeable)];

/// Enroll and unenroll, in cycles.
pub fn measure(quick: bool) -> Result<Findings> {
    let cycles = if quick { 3 } else { 30 };
    let ksm = KsmTestGuard::acquire().map_err(anyhow::Error::msg)?;
    ksm.write_setting("run", 0);
    let lab = RunningLab::start_layout(&[&format!("unique={}", RANGES_PER_COMMAND * PAGES_PER_RANGE * 2)])
        .context("cannot start the process to stop")?;
    let region = lab.first_region("unique");
    let host = LiveHost::new();
    let process = host.open(Pid(lab.pid())).map_err(|why| anyhow!("the process to stop: {why}"))?.id();
    let bytes = PAGES_PER_RANGE * region.page_size;
    let starts = (0..RANGES_PER_COMMAND).map(|i| region.start + i * 2 * bytes);
    let ranges: Vec<AddressRange> = starts.map(|start| AddressRange { start, end: start + bytes }).collect();

    let mut findings = Findings::new("cycle,action,stop,microseconds");
    let mut commands: [Vec<Vec<Duration>>; 2] = Default::default();
    for cycle in 1..=cycles {
        for ((name, advice), commands) in ADVICE_TURNS.into_iter().zip(&mut commands) {
            let effect = host.apply(&Action::Advise { process, advice, ranges: ranges.clone() })?;
            ensure!(effect.missed_ranges.is_empty(), "cycle {cycle}: ranges were missed: {:?}", effect.missed_ranges);
            ensure!(!effect.stop_durations.is_empty(), "cycle {cycle}: the host reported no stop");
            for (number, stop) in (1..).zip(&effect.stop_durations) {
                findings.samples.push(format!("{cycle},{name},{number},{:.1}", stop.as_secs_f64() * 1e6));
            }
            commands.push(effect.stop_durations);
        }
    }
    let mut table = MarkdownTable::new(
        format!("{RANGES_PER_COMMAND} ranges of {} KiB in a process, {cycles} cycles", bytes >> 10),
        &["action", "stops", "per command", "median us", "p99 us", "longest us", "sum per command ms"],
    );
    for ((name, _), commands) in ADVICE_TURNS.into_iter().zip(&commands) {
        let count = SampleSpread::from_samples(commands.iter().map(|stops| stops.len() as f64));
        let sum =
            SampleSpread::from_samples(commands.iter().map(|stops| stops.iter().sum::<Duration>().as_secs_f64() * 1e3));
        let stops = sort_durations(commands);
        let micros = |percent| format!("{:.0}", percentile(&stops, percent).as_secs_f64() * 1e6);
        table.rows.push(vec![
            name.to_owned(),
            stops.len().to_string(),
            format!("{:.0} ({:.0} to {:.0})", count.median, count.min, count.max),
            micros(50),
            micros(99),
            micros(100),
            format!("{:.2} ({:.2} to {:.2})", sum.median, sum.min, sum.max),
        ]);
        let median = percentile(&stops, 50).as_secs_f64();
        findings.checks.push(ThresholdCheck {
            claim: format!("{name}: the median stop is below {:.0} ms", MAX_MEDIAN_STOP_SECONDS * 1e3),
            measured: format!("{:.3} ms", median * 1e3),
            met: median < MAX_MEDIAN_STOP_SECONDS,
        });
    }
    table.notes.push(format!(
        "A command of {RANGES_PER_COMMAND} ranges causes several stops, each for as many ranges as fit into a short \
         one; between them the process runs. Median, 99th percentile and longest are of single stops; the sum covers \
         all stops of a command. ksmd is stopped, so that no page is merged or unmerged."
    ));
    findings.tables.push(table);
    Ok(findings)
}

fn sort_durations(commands: &[Vec<Duration>]) -> Vec<Duration> {
    let mut stops = commands.concat();
    stops.sort_unstable();
    stops
}

/// The percentile of sorted values: the smallest value that this percentage of them does not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    sorted[(sorted.len() * percent).div_ceil(100).clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let values: Vec<Duration> = (1..=200).map(Duration::from_micros).collect();
        let micros = |percent| percentile(&values, percent).as_micros();
        assert_eq!([micros(0), micros(50), micros(99), micros(100)], [1, 100, 198, 200]);
        assert_eq!(percentile(&values[..1], 99), values[0]);
    }
}
