//! `pagefold man`: the manual pages, generated from the definition of the command line.

use crate::CommandOutcome;
use crate::command_line::CommandLine;
use anyhow::Context;
use clap::{Args, Command, CommandFactory};
use clap_mangen::Man;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Arguments of `man`.
#[derive(Args, Debug)]
#[command(after_help = "Example:\n  pagefold man /usr/local/share/man/man1")]
pub struct ManArguments {
    /// The directory; it is created if it does not exist
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Write a page for each command.
pub fn run(options: &ManArguments) -> anyhow::Result<CommandOutcome> {
    let folder = &options.folder;
    let mut command = CommandLine::command().disable_help_subcommand(true);
    command.build();
    fs::create_dir_all(folder)
        .and_then(|()| write_pages(&command, folder))
        .with_context(|| format!("cannot write manual pages to {}", folder.display()))?;
    Ok(CommandOutcome::Done)
}

/// Write the pages of a command and of its subcommands.
fn write_pages(command: &Command, folder: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        write_pages(subcommand, folder)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    fs::write(folder.join(format!("{name}.1")), render_page(command)?)
}

fn render_page(command: &Command) -> io::Result<Vec<u8>> {
    let source = concat!("pagefold ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).manual("Pagefold").source(source);
    let mut text = Vec::new();
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    // clap_mangen would reflow the lines of the examples.
    if let Some(after_help) = command.get_after_help() {
        writeln!(text, ".SH NOTES\n.nf\n{}\n.fi", escape_roff(&after_help.to_string()))?;
    }
    Ok(text)
}

/// Escape text so that roff in no-fill mode shows it unchanged.
fn escape_roff(text: &str) -> String {
    let line = |line: &str| {
        let line = line.replace('\\', "\\e").replace('-', "\\-");
        if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_command_has_a_page() {
        let folder = tempfile::tempdir().unwrap();
        run(&ManArguments { folder: folder.path().join("man1") }).unwrap();
        let files = fs::read_dir(folder.path().join("man1")).unwrap();
        let pages: BTreeSet<String> = files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
        let mut expected = BTreeSet::from(["pagefold.1".to_owned(), "pagefold-config-check.1".to_owned()]);
        let commands = CommandLine::command();
        expected.extend(commands.get_subcommands().map(|command| format!("pagefold-{}.1", command.get_name())));
        assert!(pages.is_superset(&expected), "{pages:?}");
        let page = fs::read_to_string(folder.path().join("man1/pagefold-daemon.1")).unwrap();
        assert!(page.contains("\\-\\-unmerge\\-on\\-exit") && page.contains("\n  pagefold pause   "), "{page}");
    }

    #[test]
    fn roff_requests_in_text_are_escaped() {
        assert_eq!(escape_roff(".so a\n'b\nc\\d -e"), "\\&.so a\n\\&'b\nc\\ed \\-e");
    }
}
