//! `pagefold config`: print, check or import a configuration.

use crate::command_line::GlobalOptions;
use crate::config::{Config, DEFAULT_CONFIG_FILE, DEFAULT_CONFIG_TEXT, KsmtunedImport, import};
use crate::{CommandOutcome, host_selection, output};
use anyhow::Context;
use clap::{Args, Subcommand};
use pagefold_host::observe;
use pagefold_output::text::{cut_end, escape_unprintable};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  pagefold config default | sudo tee /etc/pagefold/pagefold.toml
  pagefold config check                       check it, and list domains and exclusions
  pagefold --config new.toml config check     the same for another file
  pagefold config import-ksmtuned             convert /etc/ksmtuned.conf for the daemon
  pagefold schema config                      its JSON schema, for editors and programs";

/// Arguments of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct ConfigArguments {
    #[command(subcommand)]
    command: ConfigCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum ConfigCommand {
    /// Print the default configuration, with all possible keys in comments
    Default,
    /// Convert a configuration of ksmtuned to a section for the daemon, and print it
    ImportKsmtuned {
        /// The file
        #[arg(value_name = "FILE", default_value = "/etc/ksmtuned.conf")]
        file: PathBuf,
    },
    /// Check whether the configuration is well-formed, and list the trust domains and the excluded processes
    Check,
}

/// Print, check or import a configuration.
pub fn run(options: &ConfigArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        ConfigCommand::Default => output::print_stdout(DEFAULT_CONFIG_TEXT)?,
        ConfigCommand::Check => check_config(global)?,
        ConfigCommand::ImportKsmtuned { file } => import_ksmtuned(file, global)?,
    }
    Ok(CommandOutcome::Done)
}

/// Print the converted section. Comments above it list the imported and skipped assignments and ksmtuned's defaults.
fn import_ksmtuned(file: &Path, global: &GlobalOptions) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let host = host_selection::open_host(global)?;
    let total = observe::memory(&*host).and_then(|memory| memory.total).context("cannot read MemTotal")?;
    let KsmtunedImport { section, imported, skipped, implied_defaults } = import(&text, total);
    let mut printed = format!("# From {}.\n", escape_unprintable(&file.to_string_lossy()));
    for (label, lines) in [("kept", imported), ("left out", skipped), ("ksmtuned's default", implied_defaults)] {
        for line in lines {
            printed.push_str(&format!("# {label}: {}\n", escape_unprintable(&line)));
        }
    }
    output::print_stdout(&(printed + &section))
}

fn check_config(global: &GlobalOptions) -> anyhow::Result<()> {
    let config = Config::load(global)?;
    let host = host_selection::open_host(global)?;
    let mut text = match &config.path {
        Some(path) => format!("{}: well-formed\n", escape_unprintable(&path.to_string_lossy())),
        None => format!("{DEFAULT_CONFIG_FILE} does not exist: the defaults are in force\n"),
    };
    let style = output::stdout_style(global);
    let (mut domains, mut excluded) =
        (BTreeMap::<String, u64>::new(), style.new_table(&[">pid", "program", "excluded because"]));
    let processes = observe::processes(&*host).context("cannot list the processes")?;
    for process in processes.into_iter().filter_map(|(_, process)| process.ok()) {
        if process.kernel_thread || process.is_zombie() {
            continue;
        }
        *domains.entry(config.domains(None).domain(&process).to_string()).or_default() += 1;
        if let Some(why) = config.exclusions.reason(&process) {
            excluded.add_row([process.id.pid.to_string(), cut_end(&process.comm, 20), why]);
        }
    }
    let mut table = style.new_table(&[">processes", "trust domain"]);
    for (domain, count) in domains {
        table.add_row([count.to_string(), cut_end(&domain, 100)]);
    }
    text.push('\n');
    text.push_str(&style.render_table(&table));
    text.push('\n');
    text.push_str(&match excluded.is_empty() {
        true => "No running process is excluded.\n".to_owned(),
        false => style.render_table(&excluded),
    });
    output::print_stdout(&text)
}
