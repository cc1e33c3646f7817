//! `pagefold top`: the daemon's status in the terminal.

use super::daemon::control::{Request, ask};
use crate::arguments::{Global, duration};
use crate::{Outcome, output};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_daemon::wire::{Answer, Status};
use pagefold_watch::top;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

/// Arguments of `top`.
#[derive(Args, Debug)]
#[command(after_help = "Keys: ? for help, q to quit. Without a terminal: `pagefold status`, once.")]
pub struct Options {
    /// How often the daemon is asked
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    every: Duration,
}

/// Show the status until somebody quits.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    if !std::io::stdout().is_terminal() {
        bail!("standard output is no terminal: use `pagefold status`");
    }
    // Where there is no daemon, that is said before the screen is taken.
    status(&global.state)?;
    let every = options.every.max(Duration::from_millis(100));
    let (state, colour) = (global.state.clone(), output::style(global).colour);
    top::run(move || status(&state).map_err(|error| format!("{error:#}")), every, colour)
        .context("cannot use the terminal")?;
    Ok(Outcome::Done)
}

fn status(state: &Path) -> anyhow::Result<Status> {
    match ask(state, Request::Status)? {
        Answer::Status(status) => Ok(*status),
        Answer::Done(why) | Answer::Refused(why) => bail!("{why}"),
    }
}
