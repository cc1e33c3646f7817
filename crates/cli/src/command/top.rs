//! `pagefold top`: the daemon's status in the terminal.

use super::daemon::control_socket::{ControlRequest, send_request};
use crate::command_line::{GlobalOptions, parse_duration};
use crate::{CommandOutcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_daemon::wire::{ControlReply, StatusReport};
use pagefold_watch::top;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

/// Arguments of `top`.
#[derive(Args, Debug)]
#[command(after_help = "Keys: ? for help, q to quit. It needs a terminal; use `pagefold status` in scripts.")]
pub struct TopArguments {
    /// Interval between status requests
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_duration)]
    interval: Duration,
}

/// Show the status until the operator quits.
pub fn run(options: &TopArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if !std::io::stdout().is_terminal() {
        bail!("standard output is not a terminal: use `pagefold status`");
    }
    // Without a daemon, fail before the terminal switches to the full-screen view.
    read_status(&global.state)?;
    let interval = options.interval.max(Duration::from_millis(100));
    let (state, color) = (global.state.clone(), output::stdout_style(global).color);
    top::run(move || read_status(&state).map_err(|error| format!("{error:#}")), interval, color)
        .context("cannot use the terminal")?;
    Ok(CommandOutcome::Done)
}

fn read_status(state: &Path) -> anyhow::Result<StatusReport> {
    match send_request(state, ControlRequest::Status)? {
        ControlReply::Status(status) => Ok(*status),
        ControlReply::Done(why) | ControlReply::Refused(why) => bail!("{why}"),
    }
}
