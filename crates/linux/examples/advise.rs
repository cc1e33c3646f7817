//! Carry out actions on one process from the command line: what the fault tests kill, and what measures stops.
//!
//! ```text
//! advise PID mergeable|unmergeable|whole|unwhole [--cycles N] [START-END ...]
//! ```
//!
//! Without ranges all private writable anonymous regions of at least 64 KiB are taken. With `--cycles`, each cycle takes
//! back what it did. Prints the stops in microseconds: their number, median, 99th percentile and the longest.

#![forbid(unsafe_code)]

use anyhow::{Context, Result, bail};
use pagefold_host::act::{Action, Advice};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_model::{AddressRange, Pid};
use std::time::Duration;

const SMALLEST: u64 = 64 << 10;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let pid: u32 = arguments.next().context("which process?")?.parse()?;
    let what = arguments.next().context("what is to be done?")?;
    let mut cycles = 0;
    let mut ranges = Vec::new();
    while let Some(argument) = arguments.next() {
        if argument == "--cycles" {
            cycles = arguments.next().context("how many cycles?")?.parse()?;
        } else {
            let (start, end) = argument.split_once('-').context("a range is START-END")?;
            let address = |text| u64::from_str_radix(text, 16);
            ranges.push(AddressRange { start: address(start)?, end: address(end)? });
        }
    }
    let host = LiveHost::new();
    let handle = host.open(Pid(pid)).map_err(|why| anyhow::anyhow!("{why}"))?;
    let process = handle.id();
    if ranges.is_empty() && !what.ends_with("whole") {
        let regions = observe::regions(&*handle).map_err(|why| anyhow::anyhow!("{why}"))?;
        let large = regions
            .iter()
            .filter(|region| region.inode == 0 && region.permissions == *b"rw-p" && region.range.bytes().0 >= SMALLEST);
        ranges = large.filter(|region| region.name != "[stack]").map(|region| region.range).collect();
    }
    let advise = |advice| Action::Advise { process, advice, ranges: ranges.clone() };
    let (action, back) = match what.as_str() {
        "mergeable" => (advise(Advice::Mergeable), advise(Advice::Unmergeable)),
        "unmergeable" => (advise(Advice::Unmergeable), advise(Advice::Mergeable)),
        "whole" => (Action::MergeAny { process, on: true }, Action::MergeAny { process, on: false }),
        "unwhole" => (Action::MergeAny { process, on: false }, Action::MergeAny { process, on: true }),
        other => bail!("{other} is nothing that can be done"),
    };
    let mut stops: Vec<Duration> = Vec::new();
    let mut apply = |action: &Action| -> Result<()> {
        let effect = host.apply(action)?;
        for (range, why) in &effect.missed {
            println!("missed {range}: {why}");
        }
        stops.extend(effect.stops);
        Ok(())
    };
    if cycles == 0 {
        apply(&action)?;
    }
    for _ in 0..cycles {
        apply(&action)?;
        apply(&back)?;
    }
    stops.sort();
    let micros =
        |part: usize| stops.get((stops.len() * part / 100).min(stops.len() - 1)).map_or(0, Duration::as_micros);
    if !stops.is_empty() {
        println!("stops {} median {} us p99 {} us longest {} us", stops.len(), micros(50), micros(99), micros(100));
    }
    Ok(())
}
