//! Stand-in for a busy virtual machine: threads with the names of vCPUs that never sleep.

use anyhow::{Context, Result};
use clap::Args;
use pagefold_labs::output_lines::READY_PREFIX;
use std::io::{self, Write};
use std::thread;

#[derive(Args)]
pub struct VcpuThreadArguments {
    /// Number of threads
    #[arg(default_value_t = 2)]
    count: u32,
}

/// Run the threads until standard input closes.
pub fn run(arguments: &VcpuThreadArguments) -> Result<()> {
    for number in 0..arguments.count {
        let vcpu = thread::Builder::new().name(format!("CPU {number}/TCG"));
        vcpu.spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        })
        .context("cannot start a thread")?;
    }
    println!("{READY_PREFIX}pid={}", std::process::id());
    io::stdout().flush()?;
    io::copy(&mut io::stdin().lock(), &mut io::sink())?;
    Ok(())
}
