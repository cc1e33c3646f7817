//! The speed of `pagefold numa map`: one process with huge pages and one with base pages, against a status query of
//! move_pages(2), which tells nodes only, and the kernel's own `numa_maps`.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, SampleSpread, ThresholdCheck};
use crate::target_process::{TargetLayout, TargetProcesses};
use anyhow::{Result, anyhow, ensure};
use pagefold_base::Pid;
use pagefold_census::ProcessSelection;
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_numa::map;
use pagefold_sys::numa;
use std::fs;
use std::time::Instant;

/// Addresses in one status query.
const PAGES_PER_QUERY: usize = 16_384;

/// Run the measurement.
pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let (bytes, rounds) = if effort.quick { (64 << 20, 1) } else { (2 << 30, 9) };
    let bytes = effort.max_bytes_per_process(bytes, 1)?;
    let pages = (bytes >> 12) as f64;
    let mut findings = Findings::new("pages,round,map_seconds,move_pages_seconds,numa_maps_seconds");
    let mut table = MarkdownTable::new(
        format!("Million pages a second, a process of {} MiB, {rounds} rounds", bytes >> 20),
        &["pages", "numa map", "move_pages status", "numa_maps"],
    );
    for (name, huge, target) in [("huge", true, 10.0), ("4 KiB", false, 2.0)] {
        let targets = TargetProcesses::start([TargetLayout { bytes, huge, ..TargetLayout::default() }])?;
        let pid = Pid(targets.pids()[0]);
        // The first round warms up.
        let mut samples: Vec<[f64; 3]> = Vec::new();
        for round in 0..=rounds {
            let sample = [seconds(|| read_map(pid))?, seconds(|| query_nodes(pid))?, seconds(|| read_numa_maps(pid))?];
            if round > 0 {
                findings.samples.push(format!("{name},{round},{:.6},{:.6},{:.6}", sample[0], sample[1], sample[2]));
                samples.push(sample);
            }
        }
        let speed = |column: usize| {
            SampleSpread::from_samples(samples.iter().map(|sample| pages / sample[column] / 1e6)).median
        };
        table.rows.push(vec![
            name.to_owned(),
            format!("{:.1}", speed(0)),
            format!("{:.1}", speed(1)),
            format!("{:.1}", speed(2)),
        ]);
        findings.checks.push(ThresholdCheck {
            claim: format!("numa map reads at least {target} million {name} pages a second"),
            measured: format!("{:.1}", speed(0)),
            met: speed(0) >= target,
        });
    }
    findings.tables.push(table);
    Ok(findings)
}

fn seconds(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    work()?;
    Ok(started.elapsed().as_secs_f64())
}

fn read_map(pid: Pid) -> Result<()> {
    let map = map::read_map(&LiveHost::new(), &ProcessSelection { pids: vec![pid], ..ProcessSelection::default() })?;
    ensure!(map.processes.len() == 1, "the process was not read: {:?}", map.unscanned);
    Ok(())
}

fn query_nodes(pid: Pid) -> Result<()> {
    let host = LiveHost::new();
    let handle = host.open(pid).map_err(|why| anyhow!("{why}"))?;
    for region in observe::regions(&*handle).map_err(|why| anyhow!("{why}"))? {
        let addresses: Vec<u64> = (region.range.start..region.range.end).step_by(4096).collect();
        for part in addresses.chunks(PAGES_PER_QUERY).filter(|_| region.rss.0 > 0) {
            numa::page_nodes(pid.0, part)?;
        }
    }
    Ok(())
}

fn read_numa_maps(pid: Pid) -> Result<()> {
    fs::read(format!("/proc/{pid}/numa_maps"))?;
    Ok(())
}
