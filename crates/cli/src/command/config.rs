//! `pagefold config`: what the configuration says.

use crate::arguments::Global;
use crate::config::{Config, DEFAULT, FILE};
use crate::{Outcome, output, source};
use anyhow::Context;
use clap::{Args, Subcommand};
use pagefold_host::observe;
use pagefold_report::text::{cut, printable};
use std::collections::BTreeMap;

const EXAMPLES: &str = "\
Examples:
  pagefold config default | sudo tee /etc/pagefold/pagefold.toml
  pagefold config check                       is it well-formed, and who is in which domain?
  pagefold --config new.toml config check     the same for another file";

/// Arguments of `config`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum What {
    /// Print the default configuration with what could be said in it
    Default,
    /// Say whether the configuration is well-formed, who is in which trust domain, and who is left alone
    Check,
}

/// Print or check.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    match options.what {
        What::Default => output::print(DEFAULT)?,
        What::Check => check(global)?,
    }
    Ok(Outcome::Done)
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
