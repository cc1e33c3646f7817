//! A bare loop over move_pages(2): the speed to which a placement by Pagefold is compared.

use anyhow::{Context, Result, anyhow};
use clap::Args;
use pagefold_base::{AddressRange, Pid};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_sys::numa;
use std::time::Instant;

/// Minimum size of the regions whose pages are moved.
const MIN_REGION_BYTES: u64 = 1 << 20;

#[derive(Args)]
pub struct MoveLoopArguments {
    /// The process
    pid: u32,
    /// The NUMA node
    node: u32,
    /// Bytes from one address to the next: the size of its pages
    #[arg(long, value_name = "BYTES", default_value_t = 4096)]
    step: usize,
    /// Addresses in one call
    #[arg(long, value_name = "N", default_value_t = 512)]
    batch: usize,
}

/// Move the private memory of a process to a node, and print the seconds that the system calls took.
pub fn run(arguments: &MoveLoopArguments) -> Result<()> {
    let host = LiveHost::new();
    let handle = host.open(Pid(arguments.pid)).map_err(|why| anyhow!("{why}"))?;
    let regions = observe::regions(&*handle).map_err(|why| anyhow!("{why}"))?;
    let private = regions.iter().filter(|region| region.inode == 0 && region.permissions == *b"rw-p");
    let ranges = private.map(|region| region.range).filter(|range| range.bytes().0 >= MIN_REGION_BYTES);
    let addresses: Vec<u64> =
        ranges.flat_map(|AddressRange { start, end }| (start..end).step_by(arguments.step)).collect();
    let started = Instant::now();
    for batch in addresses.chunks(arguments.batch) {
        numa::move_pages(arguments.pid, batch, arguments.node).context("move_pages")?;
    }
    println!("{:.6}", started.elapsed().as_secs_f64());
    Ok(())
}
