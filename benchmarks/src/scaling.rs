//! Time and memory of a census as memory grows, extrapolated to a big host.
//!
//! The memory belongs to equal processes; a census of fewer of them covers less memory. All sizes are measured in each
//! round, so that a drift of the machine affects all of them alike.

use crate::BenchmarkEffort;
use crate::census_process::{CensusJob, CensusMeasurement};
use crate::findings::{Findings, LinearFit, MarkdownTable, SampleSpread, ThresholdCheck};
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::Result;

/// Target: index bytes for each page.
const MAX_INDEX_BYTES_PER_PAGE: f64 = 24.0;

/// Target: the coefficient of determination from which growth counts as linear.
const MIN_LINEAR_R_SQUARED: f64 = 0.98;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (unit, most, rounds) = if effort.quick { (16 << 20, 4, 2) } else { (1 << 30, 16, 3) };
    let most = effort.max_processes(unit, most)?;
    let sizes: Vec<usize> = [1, 2, 4, 8, 16].into_iter().filter(|&size| size <= most).collect();
    let layouts =
        (0..most as u64).map(|seed| TargetLayout { bytes: unit, copies: true, seed, ..TargetLayout::default() });
    let targets = TargetProcesses::start(layouts)?;
    let pids = targets.pids();
    let mut findings = Findings::new("round,threads,processes,pages,seconds,cpu_seconds,index_bytes,peak_bytes");
    let mut outcomes: Vec<(usize, usize, CensusMeasurement)> = Vec::new();
    for round in 1..=rounds {
        for &size in &sizes {
            for threads in if round % 2 == 1 { [1, 2] } else { [2, 1] } {
                let outcome = CensusJob { pids: pids[..size].to_vec(), threads, phases: false }.run_in_child()?;
                let CensusMeasurement { seconds, cpu_seconds, pages, index_bytes, peak_bytes, .. } = outcome;
                findings.samples.push(format!(
                    "{round},{threads},{size},{pages},{seconds:.4},{cpu_seconds:.4},{index_bytes},{peak_bytes}"
                ));
                outcomes.push((size, threads, outcome));
            }
        }
    }
    let mut table = MarkdownTable::new(
        format!("Census by resident memory, base pages, medians of {rounds} rounds"),
        &["MiB", "1 thread s", "2 threads s", "GB/s of 2 threads", "index bytes a page", "peak bytes a page"],
    );
    let page = pagefold_sys::mapping::page_size() as f64;
    let median = |size: usize, threads: usize, value: &dyn Fn(&CensusMeasurement) -> f64| {
        SampleSpread::from_samples(outcomes.iter().filter(|o| (o.0, o.1) == (size, threads)).map(|o| value(&o.2)))
            .median
    };
    let index_bytes = |o: &CensusMeasurement| o.index_bytes as f64 / o.pages as f64;
    let peak_bytes = |o: &CensusMeasurement| o.peak_bytes as f64 / o.pages as f64;
    for &size in &sizes {
        let seconds = [1, 2].map(|threads| median(size, threads, &|o| o.seconds));
        table.rows.push(vec![
            format!("{}", (size * unit) >> 20),
            format!("{:.3}", seconds[0]),
            format!("{:.3}", seconds[1]),
            format!("{:.1}", (size * unit) as f64 / seconds[1] / 1e9),
            format!("{:.2}", median(size, 1, &index_bytes)),
            format!("{:.2}", median(size, 1, &peak_bytes)),
        ]);
    }
    let widest = SampleSpread::from_samples(outcomes.iter().map(|o| index_bytes(&o.2))).max;
    findings.checks.push(ThresholdCheck {
        claim: format!("the index takes at most {MAX_INDEX_BYTES_PER_PAGE} bytes a page"),
        measured: format!("{widest:.2}"),
        met: widest <= MAX_INDEX_BYTES_PER_PAGE,
    });
    if sizes.len() > 2 {
        for threads in [1, 2] {
            let points: Vec<(f64, f64)> = sizes
                .iter()
                .map(|&size| (median(size, threads, &|o| o.pages as f64) * page, median(size, threads, &|o| o.seconds)))
                .collect();
            let line = LinearFit::from_points(&points);
            let tebibyte = line.slope * (1u64 << 40) as f64 + line.intercept;
            table.notes.push(format!(
                "{threads} thread{}: {:.1} ms per GiB, R² = {:.4}. Extrapolated to 1 TiB of resident memory: {:.0} s.",
                if threads == 1 { "" } else { "s" },
                line.slope * (1u64 << 30) as f64 * 1e3,
                line.r_squared,
                tebibyte
            ));
            findings.checks.push(ThresholdCheck {
                claim: format!(
                    "time grows linearly with memory, R² at least {MIN_LINEAR_R_SQUARED} ({threads} thread(s))"
                ),
                measured: format!("{:.4}", line.r_squared),
                met: line.r_squared >= MIN_LINEAR_R_SQUARED,
            });
        }
        let largest = sizes.last().copied().unwrap_or(1);
        let peak = median(largest, 1, &peak_bytes) * (1u64 << 40) as f64 / page / (1u64 << 30) as f64;
        table.notes.push(format!(
            "At the peak bytes a page of the largest size, 1 TiB needs {peak:.1} GiB. One pass; the default takes two, \
             and reads everything twice. No host of 1 TiB was measured."
        ));
    }
    findings.tables.push(table);
    Ok(findings)
}
