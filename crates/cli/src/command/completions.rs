//! `pagefold completions`: a completion script for a shell.

use crate::command_line::CommandLine;
use crate::{CommandOutcome, output};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  pagefold completions bash > /etc/bash_completion.d/pagefold")]
pub struct CompletionsArguments {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Print the script.
pub fn run(options: &CompletionsArguments) -> anyhow::Result<CommandOutcome> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut CommandLine::command(), "pagefold", &mut script);
    output::print_stdout(&String::from_utf8_lossy(&script))?;
    Ok(CommandOutcome::Done)
}
