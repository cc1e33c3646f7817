//! Where reports go.

use crate::arguments::{Global, When};
use anyhow::Context;
use pagefold_output::text::Style;
use std::io::{self, IsTerminal, Write};

/// The style that fits standard output.
pub fn style(global: &Global) -> Style {
    let terminal = io::stdout().is_terminal();
    let colour = match global.color {
        When::Always => true,
        When::Never => false,
        // https://no-color.org: any value but an empty one.
        When::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
    };
    let width = terminal_size::terminal_size().map(|(width, _)| width.0).filter(|_| terminal);
    Style { width: width.unwrap_or(160).max(60), colour }
}

/// Write to standard output.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()).context("cannot write to standard output")
}

/// Whether whoever reads the output went away, which is not a failure: `pagefold census | head`.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}
