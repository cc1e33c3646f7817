//! `pagefold vcpu status`: how long vCPUs run and wait for a CPU.

use crate::CommandOutcome;
use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use clap::Args;
use std::time::Duration;

/// Arguments of `vcpu status`.
#[derive(Args, Debug)]
pub struct StatusArguments {
    /// Time over which the vCPUs are observed
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    interval: Duration,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// Show the status.
pub fn run(_options: &StatusArguments, _global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    anyhow::bail!("not available yet")
}
