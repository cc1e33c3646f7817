//! `pagefold vcpu`: how the vCPUs of virtual machines are scheduled.

mod status;

use crate::CommandOutcome;
use crate::command_line::GlobalOptions;
use clap::{Args, Subcommand};

/// Arguments of `vcpu`.
#[derive(Args, Debug)]
pub struct VcpuArguments {
    #[command(subcommand)]
    command: VcpuCommand,
}

#[derive(Debug, Subcommand)]
enum VcpuCommand {
    /// Show how long vCPUs run and wait for a CPU, without tracing
    Status(status::StatusArguments),
}

/// Run the subcommand.
pub fn run(options: &VcpuArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        VcpuCommand::Status(options) => status::run(options, global),
    }
}
