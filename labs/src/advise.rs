//! Actions on one process from the command line. Fault tests kill this command, and measurements of stop times use it.

use anyhow::{Context, Result, anyhow};
use clap::{Args, ValueEnum};
use pagefold_base::{AddressRange, Pid, ProcessId};
use pagefold_host::action::{Action, MergeAdvice};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use std::time::Duration;

/// Minimum size of the regions that are used if no range is given.
const MIN_REGION_BYTES: u64 = 64 << 10;

#[derive(Args)]
pub struct AdviseArguments {
    /// The process
    pid: u32,
    /// The action
    what: AdviseOperation,
    /// Range: START-END in hexadecimal [default: private writable anonymous regions of at least 64 KiB, no stack]
    #[arg(value_parser = parse_range)]
    ranges: Vec<AddressRange>,
    /// Do it and undo it this many times, instead of doing it once
    #[arg(long, value_name = "N")]
    cycles: Option<u32>,
    /// Wait this many milliseconds in each cycle before the undo, so that ksmd can merge pages
    #[arg(long, value_name = "MS", default_value_t = 0, requires = "cycles")]
    pause: u64,
    /// Cut the range into ranges of this many pages, with gaps of as many pages
    #[arg(long, value_name = "PAGES")]
    gap_pages: Option<u64>,
}

#[derive(Clone, Copy, ValueEnum)]
enum AdviseOperation {
    /// Enroll ranges
    Mergeable,
    /// Unenroll ranges
    Unmergeable,
    /// Enroll the whole process
    WholeProcess,
    /// Unenroll the whole process
    UnenrollProcess,
    /// Collapse pages into huge pages again
    Collapse,
}

fn parse_range(text: &str) -> Result<AddressRange> {
    let (start, end) = text.split_once('-').context("a range must have the form START-END")?;
    Ok(AddressRange { start: u64::from_str_radix(start, 16)?, end: u64::from_str_radix(end, 16)? })
}

/// Run the action. Print the stops in microseconds: their number, median, 99th percentile, maximum.
pub fn run(arguments: &AdviseArguments) -> Result<()> {
    let host = LiveHost::new();
    let handle = host.open(Pid(arguments.pid)).map_err(|why| anyhow!("{why}"))?;
    let process = handle.id();
    let mut ranges = arguments.ranges.clone();
    if ranges.is_empty() && !matches!(arguments.what, AdviseOperation::WholeProcess | AdviseOperation::UnenrollProcess)
    {
        let regions = observe::regions(&*handle).map_err(|why| anyhow!("{why}"))?;
        let private = regions.iter().filter(|region| region.inode == 0 && region.permissions == *b"rw-p");
        let large = private.filter(|region| region.range.bytes().0 >= MIN_REGION_BYTES && region.name != "[stack]");
        ranges = large.map(|region| region.range).collect();
    }
    if let Some(pages) = arguments.gap_pages {
        let bytes = pages * host.page_size().bytes();
        let gapped = ranges.iter().flat_map(|range| {
            (range.start..range.end)
                .step_by(2 * bytes as usize)
                .map(move |start| AddressRange { start, end: start + bytes })
        });
        ranges = gapped.collect();
    }
    let action = build_action(arguments.what, process, &ranges);
    let inverse = match arguments.what {
        AdviseOperation::Mergeable => Some(AdviseOperation::Unmergeable),
        AdviseOperation::Unmergeable => Some(AdviseOperation::Mergeable),
        AdviseOperation::WholeProcess => Some(AdviseOperation::UnenrollProcess),
        AdviseOperation::UnenrollProcess => Some(AdviseOperation::WholeProcess),
        AdviseOperation::Collapse => None,
    };
    let inverse = inverse.filter(|_| arguments.cycles.is_some()).map(|inverse| build_action(inverse, process, &ranges));
    let mut stops: Vec<Duration> = Vec::new();
    for cycle in 0..arguments.cycles.unwrap_or(1) {
        for (i, action) in [Some(&action), inverse.as_ref()].into_iter().flatten().enumerate() {
            if i > 0 {
                std::thread::sleep(Duration::from_millis(arguments.pause));
            }
            let effect = host.apply(action).with_context(|| format!("cycle {cycle}"))?;
            for (range, why) in &effect.missed_ranges {
                println!("missed {range}: {why}");
            }
            stops.extend(effect.stop_durations);
        }
    }
    stops.sort();
    let last = stops.len().saturating_sub(1);
    let micros = |percent: usize| stops.get((stops.len() * percent / 100).min(last)).map_or(0, Duration::as_micros);
    println!("stops {} median {} us p99 {} us longest {} us", stops.len(), micros(50), micros(99), micros(100));
    Ok(())
}

fn build_action(operation: AdviseOperation, process: ProcessId, ranges: &[AddressRange]) -> Action {
    let advise = |advice| Action::Advise { process, advice, ranges: ranges.to_vec() };
    match operation {
        AdviseOperation::Mergeable => advise(MergeAdvice::Mergeable),
        AdviseOperation::Unmergeable => advise(MergeAdvice::Unmergeable),
        AdviseOperation::WholeProcess => Action::MergeAny { process, enable: true },
        AdviseOperation::UnenrollProcess => Action::MergeAny { process, enable: false },
        AdviseOperation::Collapse => Action::Collapse { process, ranges: ranges.to_vec() },
    }
}
