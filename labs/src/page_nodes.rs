//! The NUMA node of each page of a process, from the kernel alone: the status that move_pages(2) stores for a page, and
//! the flags of its frame. Tests compare them with a known layout and with the reports of Pagefold.

use anyhow::{Context, Result, anyhow};
use clap::Args;
use pagefold_base::{AddressRange, Pfn, Pid};
use pagefold_host::{Host, observe};
use pagefold_linux::LiveHost;
use pagefold_sys::numa;
use std::collections::BTreeMap;

#[derive(Args)]
pub struct PageNodeArguments {
    /// The process
    pid: u32,
    /// Each mapping with this number of pages in memory: the nodes of these pages in the order of addresses, as
    /// NODE*PAGES for each run
    #[arg(long, value_name = "PAGES", required_unless_present = "merged")]
    resident: Vec<usize>,
    /// The number of pages that KSM has merged, by node
    #[arg(long, conflicts_with = "resident")]
    merged: bool,
}

/// Prints the nodes of pages of private memory. Pages that are not in memory have none.
pub fn run(arguments: &PageNodeArguments) -> Result<()> {
    let host = LiveHost::new();
    let handle = host.open(Pid(arguments.pid)).map_err(|why| anyhow!("{why}"))?;
    let page_bytes = host.page_size().bytes();
    let mut merged = BTreeMap::<i32, u64>::new();
    for region in observe::regions(&*handle).map_err(|why| anyhow!("{why}"))? {
        if !region.permissions.starts_with(b"rw") || region.inode != 0 {
            continue;
        }
        let AddressRange { start, end } = region.range;
        let addresses: Vec<u64> = (start..end).step_by(page_bytes as usize).collect();
        let status = numa::page_nodes(arguments.pid, &addresses).context("move_pages")?;
        if arguments.merged {
            let entries = handle.mappings(region.range).map_err(|why| anyhow!("{why}"))?;
            let pages = entries.iter().zip(&status).filter_map(|(entry, node)| Some((entry.frame?, *node)));
            let mut pages: Vec<(Pfn, i32)> = pages.collect();
            pages.sort_unstable();
            let (frames, nodes): (Vec<Pfn>, Vec<i32>) = pages.into_iter().unzip();
            let flags = host.frame_flags(&frames).map_err(|why| anyhow!("{why}"))?;
            for (_, node) in flags.iter().zip(nodes).filter(|(flags, _)| flags.is_ksm()) {
                *merged.entry(node).or_default() += 1;
            }
            continue;
        }
        let resident: Vec<i32> = status.into_iter().filter(|node| *node >= 0).collect();
        if arguments.resident.contains(&resident.len()) {
            let runs = resident.chunk_by(|one, next| one == next).map(|run| format!("{}*{}", run[0], run.len()));
            println!("{}", runs.collect::<Vec<_>>().join(" "));
        }
    }
    if arguments.merged {
        let counts = merged.iter().map(|(node, pages)| format!("{node}*{pages}"));
        println!("{}", counts.collect::<Vec<_>>().join(" "));
    }
    Ok(())
}
