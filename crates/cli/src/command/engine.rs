//! `pagefold engine`: domains of programs that merge their memory by `libpagefold`.
//!
//! All that is shown is what members have written down of themselves, read without joining
//! (`pagefold_engine::observe`). A record is believed if its process lives and is of the user whose domain it is.

mod text;
pub mod wire;

use crate::command::engine::wire::{EngineReport, UnreadableDirectory};
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, host_selection, output};
use anyhow::bail;
use clap::{Args, Subcommand};
use pagefold_base::engine::{EngineDomain, EngineMember};
use pagefold_base::{Absent, Reading};
use pagefold_engine::observe::{self, DomainsRoot};
use pagefold_host::Host;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold engine status                the domains of this user; of all users if run by root
  pagefold engine status job42          its members, their regions, the store and what it saves
  pagefold engine status job42 --json   the same, all of it

A domain is programs that merge their memory by libpagefold, see pagefold(3). Figures are as of each \
member's last merge. Reads only; nobody is held up.

Exit status: 0 done, 2 there is no such domain, 3 something was not seen.";

/// Arguments of `engine`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct EngineArguments {
    #[command(subcommand)]
    command: EngineCommand,
}

#[derive(Debug, Subcommand)]
enum EngineCommand {
    /// Show domains: who is a member, what is merged, what it saves and costs
    #[command(after_help = EXAMPLES)]
    Status(EngineStatusArguments),
}

#[derive(Args, Debug)]
struct EngineStatusArguments {
    /// The domain to show in full, those of its NUMA nodes with it; without it, all are listed
    #[arg(value_name = "DOMAIN")]
    domain: Option<String>,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema engine`)
    #[arg(long)]
    json: bool,
}

/// Show domains.
pub fn run(options: &EngineArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let EngineCommand::Status(options) = &options.command;
    if global.host != "live" {
        bail!("--host {}: recordings hold no domains of the engine; leave --host out", global.host);
    }
    let host = host_selection::open_host(global)?;
    let (domains, not_seen) = find_domains(&*host, options.domain.as_deref());
    if let (Some(name), []) = (&options.domain, &domains[..]) {
        let others: String = not_seen.iter().map(|unlooked| format!(". Not looked at: {}", unlooked.detail)).collect();
        bail!(
            "there is no domain {name:?} to be seen: `pagefold engine status` lists those there are. Those of other \
             users are for root to see, and those that are kept elsewhere are found with PAGEFOLD_RUNTIME set as for \
             the program{others}"
        );
    }
    let report = EngineReport::from_domains(host.page_size(), &domains, not_seen, time_since_boot());
    let style = output::stdout_style(global);
    output::print_stdout(&match &options.domain {
        _ if options.json => pagefold_output::wire::to_json(&report),
        Some(_) => text::render_details(&report, options.top, style),
        None => text::render_list(&report, style),
    })?;
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// Since the host was booted.
fn time_since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The domains of a name, of each user who has them and of each NUMA node where they are kept apart, or all; with the
/// names of the members' programs, and what could not be looked at.
fn find_domains(host: &dyn Host, name: Option<&str>) -> (Vec<(EngineDomain, Vec<String>)>, Vec<UnreadableDirectory>) {
    let (mut domains, mut not_seen) = (Vec::new(), Vec::new());
    for root in observe::readable_roots() {
        let names = observe::domain_names(&root).unwrap_or_else(|error| {
            not_seen.extend(unreadable_directory(&root, error));
            Vec::new()
        });
        for found in names.iter().filter(|found| name.is_none_or(|name| is_domain_or_its_node(found, name))) {
            match observe::read_domain(&root, found) {
                Ok(domain) => domains.push(keep_verified_members(host, domain)),
                Err(error) => not_seen.extend(unreadable_directory(&root, error)),
            }
        }
    }
    (domains, not_seen)
}

/// Whether that is the domain of a name, or of one NUMA node of it.
fn is_domain_or_its_node(found: &str, name: &str) -> bool {
    let node = found.strip_prefix(name).and_then(|rest| rest.strip_prefix(".node"));
    found == name || node.is_some_and(|node| node.parse::<u32>().is_ok())
}

/// What could not be looked at; what is not there, or has gone meanwhile, is nothing.
fn unreadable_directory(root: &DomainsRoot, error: observe::ObserveError) -> Option<UnreadableDirectory> {
    if matches!(&error, observe::ObserveError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound) {
        return None;
    }
    Some(UnreadableDirectory {
        path: root.directory.display().to_string(),
        detail: format!("{:#}", anyhow::Error::from(error)),
    })
}

/// With those members only that are what they say, and the names of their programs.
fn keep_verified_members(host: &dyn Host, mut domain: EngineDomain) -> (EngineDomain, Vec<String>) {
    let mut comms = Vec::new();
    let members = std::mem::take(&mut domain.members);
    for member in members {
        match member_program_name(host, &member, domain.owner) {
            Ok(comm) => {
                domain.members.push(member);
                comms.push(comm);
            }
            Err(Absent::Vanished) => domain.ended_members += 1,
            Err(_) => domain.unreadable_members += 1,
        }
    }
    (domain, comms)
}

/// The name of a member's program, if it is a process of that user.
fn member_program_name(host: &dyn Host, member: &EngineMember, owner: u32) -> Reading<String> {
    let handle = host.open(member.process.pid)?;
    if handle.id() != member.process {
        return Err(Absent::Vanished);
    }
    let process = pagefold_host::observe::process(host, &*handle)?;
    if process.uid? == owner { Ok(process.comm) } else { Err(Absent::Malformed("of another user".to_owned())) }
}
