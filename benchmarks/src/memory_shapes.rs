//! Unusual address spaces and process lists, each compared with the same resident pages in one plain region of one
//! process: 20 TiB of empty mapping, 100,000 regions, 2,000 processes.
//!
//! Regions and processes have a cost each, because the kernel lists every one as text. The cost of each must not grow
//! with their number.

use crate::BenchmarkEffort;
use crate::census_process::CensusJob;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Context, Result};
use pagefold_sys::mapping::page_size;
use std::fs;

/// Target: the ratio by which an empty mapping may lengthen a census.
const MAX_EMPTY_MAPPING_RATIO: f64 = 1.1;

/// Target: the ratio by which the cost per item may exceed the cost per item with a tenth as many.
const MAX_COST_GROWTH_RATIO: f64 = 1.5;

const MAX_MAP_COUNT_FILE: &str = "/proc/sys/vm/max_map_count";

/// An upper bound on the regions of a program besides those of the layout.
const SPARE_REGIONS: usize = 1000;

/// Compares censuses of two sets of processes, a plain and a shaped one.
struct ShapeBenchmark<'a> {
    findings: &'a mut Findings,
    rounds: usize,
}

impl ShapeBenchmark<'_> {
    fn run_rounds(&mut self, shape: &str, count: usize, plain_and_shaped: [Vec<u32>; 2]) -> Result<Vec<[f64; 2]>> {
        let mut pairs = Vec::new();
        for (round, order) in (1..).zip(draw_orders(&[0, 1], self.rounds)) {
            let mut pair = [0.0; 2];
            for which in order {
                let outcome =
                    CensusJob { pids: plain_and_shaped[which].clone(), threads: 1, phases: true }.run_in_child()?;
                let steps: Vec<String> = outcome.phases.iter().map(|(_, s)| format!("{s:.4}")).collect();
                self.findings.samples.push(format!(
                    "{shape},{count},{},{round},{},{:.4},{}",
                    ["plain", "shaped"][which],
                    outcome.pages,
                    outcome.seconds,
                    steps.join(",")
                ));
                pair[which] = outcome.seconds;
            }
            pairs.push(pair);
        }
        Ok(pairs)
    }
}

/// Medians over pairs of durations, plain and shaped.
struct ShapeComparison {
    plain: f64,
    shaped: f64,
    /// Median of the differences, in seconds.
    extra_seconds: f64,
    /// The ratio, shaped to plain; `None` without pairs.
    ratio: Option<PairedRatio>,
}

impl ShapeComparison {
    fn from_pairs(pairs: &[[f64; 2]]) -> Self {
        let spread = |value: &dyn Fn(&[f64; 2]) -> f64| SampleSpread::from_samples(pairs.iter().map(value));
        Self {
            plain: spread(&|pair| pair[0]).median,
            shaped: spread(&|pair| pair[1]).median,
            extra_seconds: spread(&|pair| pair[1] - pair[0]).median,
            ratio: PairedRatio::from_rounds(pairs.iter().map(|[plain, shaped]| shaped / plain)),
        }
    }

    fn table_row(&self, shape: String, bytes: usize, count: Option<usize>) -> Vec<String> {
        vec![
            shape,
            format!("{}", bytes >> 20),
            format!("{:.3}", self.plain),
            format!("{:.3}", self.shaped),
            format!("{:.1}", self.extra_seconds * 1e3),
            count.map_or("-".to_owned(), |count| format!("{:.2} us", self.extra_seconds / count as f64 * 1e6)),
        ]
    }
}

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let mut findings = Findings::new("shape,count,kind,round,pages,seconds,survey,list,read,group,tally");
    let mut table = MarkdownTable::new(
        "Census on one thread by shape, medians",
        &["shape", "resident MiB", "plain s", "shaped s", "extra ms", "extra per item"],
    );
    let rounds = if effort.quick { 2 } else { 5 };
    let mut benchmark = ShapeBenchmark { findings: &mut findings, rounds };
    let (bytes, empty) = if effort.quick { (64 << 20, 20 << 40) } else { (512 << 20, 20 << 40) };
    let start_plain = |bytes: usize| TargetProcesses::start([TargetLayout { bytes, ..TargetLayout::default() }]);
    // The placement of frames is random and affects the time: each round allocates new ones.
    let mut pairs = Vec::new();
    for i in 0..4 {
        let shapes = [0, empty].map(|empty| TargetLayout { bytes, empty, ..TargetLayout::default() });
        let first = TargetProcesses::start([shapes[i % 2]])?;
        let second = TargetProcesses::start([shapes[1 - i % 2]])?;
        let (plain, shaped) = if i % 2 == 0 { (&first, &second) } else { (&second, &first) };
        pairs.extend(benchmark.run_rounds("empty", 1, [plain.pids(), shaped.pids()])?);
    }
    let comparison = ShapeComparison::from_pairs(&pairs);
    table.rows.push(comparison.table_row("20 TiB of empty mapping".to_owned(), bytes, None));
    let mut checks = vec![ThresholdCheck {
        claim: format!("20 TiB of empty mapping lengthen a census to at most {:.0} %", MAX_EMPTY_MAPPING_RATIO * 100.0),
        measured: comparison.ratio.map_or("-".to_owned(), PairedRatio::format_percent),
        met: comparison.ratio.is_some_and(|paired| paired.ratio <= MAX_EMPTY_MAPPING_RATIO),
    }];

    let regions = if effort.quick { 10_000 } else { 100_000 };
    let mut costs = Vec::new();
    for count in [regions / 10, regions] {
        let bytes = count * page_size();
        let raised = MaxMapCountGuard::raise_to(count + SPARE_REGIONS);
        let shaped = match &raised {
            Ok(_) => TargetProcesses::start([TargetLayout { bytes, split: true, ..TargetLayout::default() }])?,
            Err(why) => {
                table.notes.push(format!("skipped: {count} regions need {MAX_MAP_COUNT_FILE} raised: {why:#}"));
                continue;
            }
        };
        // The limit applies to new regions only.
        drop(raised);
        let plain = start_plain(bytes)?;
        let comparison =
            ShapeComparison::from_pairs(&benchmark.run_rounds("regions", count, [plain.pids(), shaped.pids()])?);
        costs.push(comparison.extra_seconds / count as f64);
        table.rows.push(comparison.table_row(format!("{count} regions"), bytes, Some(count)));
    }
    checks.extend(check_cost_growth("regions", regions, &costs));

    let processes = if effort.quick { 50 } else { 2_000 };
    let mut costs = Vec::new();
    // Each process has one page of its own; the other resident pages belong to the program.
    let layout = |seed: u64| TargetLayout { bytes: page_size(), seed, ..TargetLayout::default() };
    let shaped = TargetProcesses::start((0..processes as u64).map(layout))?;
    for count in [processes / 10, processes] {
        let counted_pids = shaped.pids()[..count].to_vec();
        let pages = CensusJob { pids: counted_pids.clone(), threads: 1, phases: false }.run_in_child()?.pages;
        let bytes = usize::try_from(pages)? * page_size();
        let plain = start_plain(bytes)?;
        let comparison =
            ShapeComparison::from_pairs(&benchmark.run_rounds("processes", count, [plain.pids(), counted_pids])?);
        costs.push(comparison.extra_seconds / count as f64);
        table.rows.push(comparison.table_row(format!("{count} processes"), bytes, Some(count)));
    }
    checks.extend(check_cost_growth("processes", processes, &costs));
    findings.checks = checks;
    findings.tables.push(table);
    Ok(findings)
}

fn check_cost_growth(shape: &str, count: usize, costs: &[f64]) -> Option<ThresholdCheck> {
    let &[few, many] = costs else { return None };
    Some(ThresholdCheck {
        claim: format!("{count} {shape} cost at most {MAX_COST_GROWTH_RATIO} times as much each as {}", count / 10),
        measured: format!("{:.2}", many / few),
        met: many <= few * MAX_COST_GROWTH_RATIO,
    })
}

/// `vm.max_map_count`, raised; restored when dropped.
struct MaxMapCountGuard {
    previous_value: Option<String>,
}

impl MaxMapCountGuard {
    fn raise_to(count: usize) -> Result<Self> {
        let previous_value = fs::read_to_string(MAX_MAP_COUNT_FILE).context("cannot read it")?;
        if previous_value.trim().parse::<usize>().context("malformed")? >= count {
            return Ok(Self { previous_value: None });
        }
        fs::write(MAX_MAP_COUNT_FILE, count.to_string()).context("cannot write it")?;
        Ok(Self { previous_value: Some(previous_value) })
    }
}

impl Drop for MaxMapCountGuard {
    fn drop(&mut self) {
        if let Some(previous_value) = &self.previous_value
            && let Err(error) = fs::write(MAX_MAP_COUNT_FILE, previous_value)
        {
            eprintln!("cannot restore {MAX_MAP_COUNT_FILE} to {}: {error}", previous_value.trim());
        }
    }
}
