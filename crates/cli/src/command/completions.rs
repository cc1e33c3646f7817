//! `pagefold completions`: a completion script for a shell.

use crate::arguments::Arguments;
use crate::{Outcome, output};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

/// Arguments of `completions`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  pagefold completions bash > /etc/bash_completion.d/pagefold")]
pub struct Options {
    /// Which shell
    #[arg(value_enum)]
    shell: Shell,
}

/// Print the script.
pub fn run(options: &Options) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Arguments::command(), "pagefold", &mut script);
    output::print(&String::from_utf8_lossy(&script))?;
    Ok(Outcome::Done)
}
