//! Time and memory of a census as memory grows, extrapolated to a big host.
//!
//! The memory belongs to equal processes; a census of fewer of them covers less memory. All sizes are measured in each
//! round, so that a drift of the machine affects all of them alike.

use crate::BenchmarkEffort;
use crate::census_process::{CensusJob, CensusMeasurement};
use crate::findings::{Findings, LinearFit, MarkdownTable, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::Result;

const BYTES_PER_GIB: f64 = (1u64 << 30) as f64;
const BYTES_PER_TIB: f64 = (1u64 << 40) as f64;

/// Target: index bytes for each page.
const MAX_INDEX_BYTES_PER_PAGE: f64 = 24.0;

/// Target: the coefficient of determination from which growth counts as linear.
const MIN_LINEAR_R_SQUARED: f64 = 0.98;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (process_bytes, max_processes, rounds) = if effort.quick { (16 << 20, 4, 2) } else { (1 << 30, 16, 3) };
    let max_processes = effort.max_processes(process_bytes, max_processes)?;
    let process_counts: Vec<usize> = [1, 2, 4, 8, 16].into_iter().filter(|&count| count <= max_processes).collect();
    let layout = |seed| TargetLayout { bytes: process_bytes, copies: true, seed, ..TargetLayout::default() };
    let targets = TargetProcesses::start((0..max_processes as u64).map(layout))?;
    let pids = targets.pids();
    let mut findings = Findings::new("round,threads,processes,pages,seconds,cpu_seconds,index_bytes,peak_bytes");
    let mut trials = Vec::new();
    for (round, order) in (1..).zip(draw_orders(&[1, 2], rounds)) {
        for &processes in &process_counts {
            for &threads in &order {
                let census = CensusJob { pids: pids[..processes].to_vec(), threads, phases: false }.run_in_child()?;
                let CensusMeasurement { seconds, cpu_seconds, pages, index_bytes, peak_bytes, .. } = census;
                findings.samples.push(format!(
                    "{round},{threads},{processes},{pages},{seconds:.4},{cpu_seconds:.4},{index_bytes},{peak_bytes}"
                ));
                trials.push(ScalingTrial { processes, threads, census });
            }
        }
    }
    let trials = ScalingTrials { trials, process_counts, process_bytes };
    let mut table = trials.build_table(rounds);
    findings.checks.push(trials.check_index_size());
    if trials.process_counts.len() > 2 {
        for threads in [1, 2] {
            let line = trials.fit_time(threads);
            table.notes.push(note_extrapolated_time(&line, threads));
            findings.checks.push(check_linear_growth(&line, threads));
        }
        table.notes.push(trials.note_extrapolated_peak());
    }
    findings.tables.push(table);
    Ok(findings)
}

/// One census.
struct ScalingTrial {
    processes: usize,
    threads: usize,
    census: CensusMeasurement,
}

/// All censuses of a measurement.
struct ScalingTrials {
    trials: Vec<ScalingTrial>,
    /// The measured numbers of processes, ascending.
    process_counts: Vec<usize>,
    /// Memory of each process.
    process_bytes: usize,
}

impl ScalingTrials {
    fn median(&self, processes: usize, threads: usize, value: impl Fn(&CensusMeasurement) -> f64) -> f64 {
        let same = self.trials.iter().filter(|trial| (trial.processes, trial.threads) == (processes, threads));
        SampleSpread::from_samples(same.map(|trial| value(&trial.census))).median
    }

    fn build_table(&self, rounds: usize) -> MarkdownTable {
        let mut table = MarkdownTable::new(
            format!("Census by resident memory, base pages, medians of {rounds} rounds"),
            &["MiB", "1 thread s", "2 threads s", "GB/s of 2 threads", "index bytes a page", "peak bytes a page"],
        );
        for &processes in &self.process_counts {
            let seconds = [1, 2].map(|threads| self.median(processes, threads, |census| census.seconds));
            let bytes = processes * self.process_bytes;
            table.rows.push(vec![
                format!("{}", bytes >> 20),
                format!("{:.3}", seconds[0]),
                format!("{:.3}", seconds[1]),
                format!("{:.1}", bytes as f64 / seconds[1] / 1e9),
                format!("{:.2}", self.median(processes, 1, index_bytes_per_page)),
                format!("{:.2}", self.median(processes, 1, peak_bytes_per_page)),
            ]);
        }
        table
    }

    fn check_index_size(&self) -> ThresholdCheck {
        let sizes = self.trials.iter().map(|trial| index_bytes_per_page(&trial.census));
        let largest = SampleSpread::from_samples(sizes).max;
        ThresholdCheck {
            claim: format!("the index takes at most {MAX_INDEX_BYTES_PER_PAGE} bytes a page"),
            measured: format!("{largest:.2}"),
            met: largest <= MAX_INDEX_BYTES_PER_PAGE,
        }
    }

    /// Seconds by bytes of memory.
    fn fit_time(&self, threads: usize) -> LinearFit {
        let page = pagefold_sys::mapping::page_size() as f64;
        let point = |&processes: &usize| {
            let bytes = self.median(processes, threads, |census| census.pages as f64) * page;
            (bytes, self.median(processes, threads, |census| census.seconds))
        };
        LinearFit::from_points(&self.process_counts.iter().map(point).collect::<Vec<_>>())
    }

    fn note_extrapolated_peak(&self) -> String {
        let largest = self.process_counts.last().copied().unwrap_or(1);
        let pages = BYTES_PER_TIB / pagefold_sys::mapping::page_size() as f64;
        let peak = self.median(largest, 1, peak_bytes_per_page) * pages / BYTES_PER_GIB;
        format!(
            "At the peak bytes a page of the largest size, 1 TiB needs {peak:.1} GiB. One pass; the default takes two, \
             and reads everything twice. No host of 1 TiB was measured."
        )
    }
}

fn index_bytes_per_page(census: &CensusMeasurement) -> f64 {
    census.index_bytes as f64 / census.pages as f64
}

fn peak_bytes_per_page(census: &CensusMeasurement) -> f64 {
    census.peak_bytes as f64 / census.pages as f64
}

fn note_extrapolated_time(line: &LinearFit, threads: usize) -> String {
    format!(
        "{threads} thread{}: {:.1} ms per GiB, R² = {:.4}. Extrapolated to 1 TiB of resident memory: {:.0} s.",
        if threads == 1 { "" } else { "s" },
        line.slope * BYTES_PER_GIB * 1e3,
        line.r_squared,
        line.slope * BYTES_PER_TIB + line.intercept
    )
}

fn check_linear_growth(line: &LinearFit, threads: usize) -> ThresholdCheck {
    ThresholdCheck {
        claim: format!("time grows linearly with memory, R² at least {MIN_LINEAR_R_SQUARED} ({threads} thread(s))"),
        measured: format!("{:.4}", line.r_squared),
        met: line.r_squared >= MIN_LINEAR_R_SQUARED,
    }
}
