//! The gain of a second thread: whole censuses of a small fleet with one and with two threads, in turns.
//!
//! Beside them the same memory is only read, in equal portions, without setup or further processing. A gain that is
//! absent there is a limit of the machine: its memory is too slow for both threads, or other processes use its CPUs.

use crate::BenchmarkEffort;
use crate::census_process::CensusJob;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Context, Result};
use pagefold_base::{AddressRange, Pid, Reading};
use pagefold_host::{Host, ReadMethod};
use pagefold_linux::LiveHost;
use rayon::prelude::*;
use std::time::Instant;

/// Target: the minimum speed-up by two threads; "near-linear".
const MIN_TWO_THREAD_SPEEDUP: f64 = 1.8;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (bytes, processes, rounds) = if effort.quick { (32 << 20, 2, 2) } else { (1 << 30, 4, 7) };
    let bytes = effort.max_bytes_per_process(bytes, processes)?;
    let layouts =
        (0..processes as u64).map(|seed| TargetLayout { bytes, copies: true, seed, ..TargetLayout::default() });
    let targets = TargetProcesses::start(layouts)?;
    let mut findings = Findings::new("round,threads,kind,pages,seconds,cpu_seconds,survey,list,read,group,tally");
    let mut census_seconds = [Vec::new(), Vec::new()];
    let mut phases: [Vec<Vec<f64>>; 2] = Default::default();
    let mut names = Vec::new();
    let mut read_seconds = [Vec::new(), Vec::new()];
    let kinds = [(1, false), (2, false), (1, true), (2, true)];
    for (round, order) in (1..).zip(draw_orders(&kinds, rounds)) {
        for (threads, with_phases) in order {
            let outcome = CensusJob { pids: targets.pids(), threads, phases: with_phases }.run_in_child()?;
            let steps: Vec<f64> = outcome.phases.iter().map(|(_, seconds)| *seconds).collect();
            let cells =
                if with_phases { steps.iter().map(|s| format!("{s:.4}")).collect() } else { vec![String::new(); 5] };
            findings.samples.push(format!(
                "{round},{threads},{},{},{:.4},{:.4},{}",
                if with_phases { "steps" } else { "whole" },
                outcome.pages,
                outcome.seconds,
                outcome.cpu_seconds,
                cells.join(",")
            ));
            if with_phases {
                names = outcome.phases.into_iter().map(|(name, _)| name).collect();
                phases[threads - 1].push(steps);
            } else {
                census_seconds[threads - 1].push(outcome.seconds);
                let seconds = read_without_hashing(&targets, bytes, threads)?;
                read_seconds[threads - 1].push(seconds);
                findings.samples.push(format!("{round},{threads},reading,{},{seconds:.4},,,,,,", outcome.pages));
            }
        }
    }
    let gigabytes = (bytes * processes) as f64 / 1e9;
    let mut table = MarkdownTable::new(
        format!("Census of {processes} processes with {gigabytes:.1} GB of base pages, {rounds} rounds"),
        &["step", "1 thread s", "2 threads s", "speed-up"],
    );
    let ratio = |one: &[f64], two: &[f64]| {
        PairedRatio::from_rounds(one.iter().zip(two).map(|(one, two)| one / two)).context("no rounds")
    };
    let speed_up = ratio(&census_seconds[0], &census_seconds[1])?;
    let median = |samples: &[f64]| format!("{:.3}", SampleSpread::from_samples(samples.iter().copied()).median);
    table.rows.push(vec![
        "whole census".to_owned(),
        median(&census_seconds[0]),
        median(&census_seconds[1]),
        speed_up.format_factor(),
    ]);
    for (step, name) in names.iter().enumerate() {
        let [one, two] = [0, 1].map(|t: usize| phases[t].iter().map(|steps| steps[step]).collect::<Vec<f64>>());
        let factor = ratio(&one, &two)?.format_factor();
        table.rows.push(vec![format!("of it {name}"), median(&one), median(&two), factor]);
    }
    let machine = ratio(&read_seconds[0], &read_seconds[1])?;
    table.rows.push(vec![
        "reading alone".to_owned(),
        median(&read_seconds[0]),
        median(&read_seconds[1]),
        machine.format_factor(),
    ]);
    let cpus = std::thread::available_parallelism()?.get();
    table.notes.push(format!(
        "{cpus} CPUs. The steps were timed in censuses of their own. \"Reading alone\" reads the same memory without \
         a census: the limit of the machine."
    ));
    findings.checks.push(ThresholdCheck {
        claim: format!("two threads are near-linear, at least {MIN_TWO_THREAD_SPEEDUP} times as fast as one"),
        measured: speed_up.format_factor(),
        met: speed_up.ratio >= MIN_TWO_THREAD_SPEEDUP,
    });
    findings.tables.push(table);
    Ok(findings)
}

/// Seconds of reading all memory of the targets without further processing.
fn read_without_hashing(targets: &TargetProcesses, bytes: usize, threads: usize) -> Result<f64> {
    const BYTES_PER_PORTION: usize = 16 << 20;
    let host = LiveHost::new();
    let portions: Vec<(u32, AddressRange)> = targets
        .pids()
        .into_iter()
        .zip(targets.addresses())
        .flat_map(|(pid, &address)| {
            (0..bytes as u64).step_by(BYTES_PER_PORTION).map(move |offset| {
                let end = (offset + BYTES_PER_PORTION as u64).min(bytes as u64);
                (pid, AddressRange { start: address + offset, end: address + end })
            })
        })
        .collect();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
    let started = Instant::now();
    pool.install(|| {
        portions.par_iter().with_max_len(1).try_for_each(|&(pid, range)| -> Reading<()> {
            let process = host.open(Pid(pid))?;
            process.contents(ReadMethod::ProcessVmReadv, &process.resident(&[range])?, &mut |_, _| {})
        })
    })?;
    Ok(started.elapsed().as_secs_f64())
}
