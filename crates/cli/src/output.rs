//! Output of reports.

use crate::command_line::{ColorChoice, GlobalOptions};
use anyhow::Context;
use pagefold_output::text::TextStyle;
use std::io::{self, IsTerminal, Write};

/// The text style for standard output.
pub fn stdout_style(global: &GlobalOptions) -> TextStyle {
    let terminal = io::stdout().is_terminal();
    let color = match global.color {
        ColorChoice::Always => true,
        ColorChoice::Never => false,
        // https://no-color.org: any nonempty value turns color off.
        ColorChoice::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    let width = terminal_size::terminal_size().map(|(width, _)| width.0).filter(|_| terminal);
    TextStyle { width: width.unwrap_or(160).max(60), color }
}

/// Write to standard output.
pub fn print_stdout(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to standard output")
}

/// Whether the reader of the output closed its pipe, which is not a failure: `pagefold census | head`.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
