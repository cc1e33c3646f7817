//! CPU time of scanning a process again, by the activity of the process between the scans. A census that reuses earlier
//! scans is compared with a census that reads everything.

use crate::BenchmarkEffort;
use crate::census_process::cpu_seconds;
use crate::findings::{Findings, MarkdownTable, PairedRatio, SampleSpread, ThresholdCheck};
use crate::rounds::draw_orders;
use crate::target_process::{TargetActivity, TargetLayout, TargetProcesses};
use anyhow::{Context, Result, ensure};
use pagefold_base::Pid;
use pagefold_census::{
    CensusOptions, ProcessSelection, ScanProgress, SecondPass, take_census_with_hasher, take_incremental_census,
};
use pagefold_host::Host;
use pagefold_linux::LiveHost;
use pagefold_merge::StableAges;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Scans until the fingerprint cache reaches its full reuse.
const WARM_UP_SCANS: usize = 6;

/// Target: CPU time of a repeated scan of an idle but running process, relative to a scan that reads everything.
const MAX_RESCAN_CPU_RATIO: f64 = 0.5;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (bytes, scans) = if effort.quick { (32 << 20, WARM_UP_SCANS + 2) } else { (2 << 30, WARM_UP_SCANS + 16) };
    let bytes = effort.max_bytes_per_process(bytes, 1)?;
    let mut findings = Findings::new("does,look,whole_cpu_seconds,again_cpu_seconds,whole_bytes_read,again_bytes_read");
    let mut table = MarkdownTable::new(
        format!(
            "Scans of a process of {} MiB, all of it unique, medians of scans {} to {scans}",
            bytes >> 20,
            WARM_UP_SCANS + 1
        ),
        &["activity", "full CPU s", "repeated CPU s", "share of CPU", "share of pages read", "CPU share, 2nd scan"],
    );
    let cases = [
        ("sleeps", TargetActivity::Sleep),
        ("runs without writes", TargetActivity::Run),
        ("writes the same contiguous tenth", TargetActivity::WriteTenth),
        ("writes another tenth each second", TargetActivity::WriteTenths),
        ("writes the same page of each 64", TargetActivity::WriteEvery(64)),
        ("writes the same page of each 1024", TargetActivity::WriteEvery(1024)),
        ("writes all", TargetActivity::WriteEvery(1)),
    ];
    for (activity, then) in cases {
        let targets = TargetProcesses::start([TargetLayout { bytes, then, ..TargetLayout::default() }])?;
        let samples = scan_repeatedly(&targets, scans, &mut |scan, sample| {
            let [full, repeated] = sample;
            findings
                .samples
                .push(format!("{activity},{scan},{:.4},{:.4},{},{}", full.0, repeated.0, full.1, repeated.1));
        })?;
        let warm_samples = || samples[WARM_UP_SCANS..].iter();
        let [full, repeated] =
            [0, 1].map(|which: usize| SampleSpread::from_samples(warm_samples().map(|sample| sample[which].0)));
        let cpu = PairedRatio::from_rounds(warm_samples().map(|[full, repeated]| repeated.0 / full.0))
            .context("no scan after those that warm up")?;
        let read = PairedRatio::from_rounds(warm_samples().map(|[full, repeated]| repeated.1 as f64 / full.1 as f64))
            .context("no scan after those that warm up")?;
        table.rows.push(vec![
            activity.to_owned(),
            format!("{:.3}", full.median),
            format!("{:.3}", repeated.median),
            cpu.format_percent(),
            read.format_percent(),
            format!("{:.0} %", samples[1][1].0 / samples[1][0].0 * 100.0),
        ]);
        if then == TargetActivity::Run {
            findings.checks.push(ThresholdCheck {
                claim: format!(
                    "a repeated scan of a process without writes takes at most {MAX_RESCAN_CPU_RATIO} of a full scan"
                ),
                measured: cpu.format_percent(),
                met: cpu.ratio <= MAX_RESCAN_CPU_RATIO,
            });
        }
    }
    findings.tables.push(table);
    Ok(findings)
}

/// CPU seconds and bytes read.
type RescanSample = (f64, u64);

/// Scan the processes repeatedly, in each turn once by reading everything and once by reusing earlier scans.
fn scan_repeatedly(
    targets: &TargetProcesses,
    scans: usize,
    on_scan: &mut dyn FnMut(usize, [RescanSample; 2]),
) -> Result<Vec<[RescanSample; 2]>> {
    let host = LiveHost::new();
    let mut ages = StableAges::new(host.page_hasher()?, host.now());
    let pids = targets.pids().into_iter().map(Pid).collect();
    let options = CensusOptions {
        selection: ProcessSelection { pids, ..ProcessSelection::default() },
        second_pass: SecondPass::Candidates,
        pass_interval: Duration::from_millis(1),
        ..CensusOptions::default()
    };
    let stop = AtomicBool::new(false);
    let mut samples = Vec::new();
    for (scan, order) in (1..).zip(draw_orders(&[false, true], scans)) {
        let mut sample = [(0.0, 0); 2];
        for is_repeated in order {
            let (progress, cpu) = (ScanProgress::default(), cpu_seconds());
            let (cache, hasher) = ages.cache_and_hasher();
            let (census, _) = if is_repeated {
                take_incremental_census((cache, Instant::now()), hasher, &host, &options, &progress, &stop)?
            } else {
                take_census_with_hasher(hasher, &host, &options, &progress, &stop)?
            };
            ensure!(census.unscanned.is_empty(), "the census could not scan {} processes", census.unscanned.len());
            sample[usize::from(is_repeated)] = (cpu_seconds() - cpu, progress.bytes_read());
        }
        on_scan(scan, sample);
        samples.push(sample);
        // The pause between scans, in which the processes perform their activity.
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(samples)
}
