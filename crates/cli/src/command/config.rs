//! `pagefold config`: what the configuration says.

use crate::arguments::Global;
use crate::config::{Config, DEFAULT, FILE, Imported, import};
use crate::{Outcome, output, source};
use anyhow::Context;
use clap::{Args, Subcommand};
use pagefold_host::observe;
use pagefold_output::text::{cut, printable};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  pagefold config default | sudo tee /etc/pagefold/pagefold.toml
  pagefold config check                       is it well-formed, and who is in which domain?
  pagefold --config new.toml config check     the same for another file
  pagefold config import-ksmtuned             what /etc/ksmtuned.conf means for the daemon
  pagefold schema config                      its JSON schema, for editors and programs";

/// Arguments of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// Print the default configuration with what could be said in it
    Default,
    /// Print what a configuration of ksmtuned means for the daemon
    ImportKsmtuned {
        /// The file
        #[arg(value_name = "FILE", default_value = "/etc/ksmtuned.conf")]
        file: PathBuf,
    },
    /// Say whether the configuration is well-formed, who is in which trust domain, and who is left alone
    Check,
}

/// Print or check.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    match &options.what {
        What::Default => output::print(DEFAULT)?,
        What::Check => check(global)?,
        What::ImportKsmtuned { file } => import_ksmtuned(file, global)?,
    }
    Ok(Outcome::Done)
}

/// The section on standard output, and as comments above it what became of each assignment and what counts beside them.
fn import_ksmtuned(file: &Path, global: &Global) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let host = source::open(global)?;
    let total = observe::memory(&*host).and_then(|memory| memory.total).context("cannot read MemTotal")?;
    let Imported { section, kept, left, defaults } = import(&text, total);
    let mut printed = format!("# From {}.\n", printable(&file.to_string_lossy()));
    for (word, lines) in [("kept", kept), ("left out", left), ("ksmtuned's default", defaults)] {
        for line in lines {
            printed.push_str(&format!("# {word}: {}\n", printable(&line)));
        }
    }
    output::print(&(printed + &section))
}

fn check(global: &Global) -> anyhow::Result<()> {
    let config = Config::load(global)?;
    let host = source::open(global)?;
    let mut text = match &config.path {
        Some(path) => format!("{}: well-formed\n", printable(&path.to_string_lossy())),
        None => format!("{FILE} is not there: the defaults are in force\n"),
    };
    let style = output::style(global);
    let (mut domains, mut alone) =
        (BTreeMap::<String, u64>::new(), style.table(&[">pid", "program", "left alone because"]));
    let processes = observe::processes(&*host).context("cannot list the processes")?;
    for process in processes.into_iter().filter_map(|(_, process)| process.ok()) {
        if process.kernel_thread || process.is_zombie() {
            continue;
        }
        *domains.entry(config.domains(None).domain(&process).to_string()).or_default() += 1;
        if let Some(why) = config.exclusions.reason(&process) {
            alone.add_row([process.id.pid.to_string(), cut(&process.comm, 20), why]);
        }
    }
    let mut table = style.table(&[">processes", "trust domain"]);
    for (domain, count) in domains {
        table.add_row([count.to_string(), cut(&domain, 100)]);
    }
    text.push('\n');
    text.push_str(&style.render(&table));
    text.push('\n');
    text.push_str(&match alone.is_empty() {
        true => "Nobody who runs now is left alone.\n".to_owned(),
        false => style.render(&alone),
    });
    output::print(&text)
}
