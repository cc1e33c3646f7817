//! `pagefold engine`: domains of programs that merge their memory with `libpagefold`.
//!
//! All figures come from records that members write about themselves. They are read without joining the domain
//! (`pagefold_engine::observe`). A record is accepted if its process runs and belongs to the owner of the domain.

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
  pagefold engine status job42          its members, their regions, the store and the savings
  pagefold engine status job42 --json   the same, with all rows

A domain is a set of programs that merge their memory with libpagefold, see pagefold(3). Figures are as of \
each member's last merge. The command only reads, and stops no program.

Exit status: 0 done, 2 there is no such domain, 3 something could not be read.";

/// Arguments of `engine`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct EngineArguments {
    #[command(subcommand)]
    command: EngineCommand,
}

#[derive(Debug, Subcommand)]
enum EngineCommand {
    /// Show domains: their members, merged memory, savings and costs
    #[command(after_help = EXAMPLES)]
    Status(EngineStatusArguments),
}

#[derive(Args, Debug)]
struct EngineStatusArguments {
    /// The domain to show in full, with those of its NUMA nodes [default: list all domains]
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
        bail!("--host {}: only the live host has domains of the user-space engine; leave --host out", global.host);
    }
    let host = host_selection::open_host(global)?;
    let (domains, unreadable) = find_domains(&*host, options.domain.as_deref());
    if let (Some(name), []) = (&options.domain, &domains[..]) {
        let unreadable_note: String =
            unreadable.iter().map(|directory| format!(". Not read: {}", directory.reason)).collect();
        bail!(
            "there is no domain {name:?} that this user can see: `pagefold engine status` lists the domains. Only root \
             sees domains of other users. For domains in another directory, set PAGEFOLD_RUNTIME as for the \
             program{unreadable_note}"
        );
    }
    let report = EngineReport::from_domains(host.page_size(), &domains, unreadable, time_since_boot());
    let style = output::stdout_style(global);
    output::print_stdout(&match &options.domain {
        _ if options.json => pagefold_output::wire::to_json(&report),
        Some(_) => text::render_details(&report, options.top, style),
        None => text::render_list(&report, style),
    })?;
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// The time since the host was booted.
fn time_since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// Find all domains, or those of a name: of each user, and of each NUMA node if merged separately. Each comes with the
/// program names of its members. Also returns the directories that could not be read.
fn find_domains(host: &dyn Host, name: Option<&str>) -> (Vec<(EngineDomain, Vec<String>)>, Vec<UnreadableDirectory>) {
    let (mut domains, mut unreadable) = (Vec::new(), Vec::new());
    for root in observe::readable_roots() {
        let names = observe::domain_names(&root).unwrap_or_else(|error| {
            unreadable.extend(unreadable_directory(&root, error));
            Vec::new()
        });
        for found in names.iter().filter(|found| name.is_none_or(|name| is_domain_or_its_node(found, name))) {
            match observe::read_domain(&root, found) {
                Ok(domain) => domains.push(keep_verified_members(host, domain)),
                Err(error) => unreadable.extend(unreadable_directory(&root, error)),
            }
        }
    }
    (domains, unreadable)
}

/// Whether `found` is the domain `name`, or that of one of its NUMA nodes.
fn is_domain_or_its_node(found: &str, name: &str) -> bool {
    let node = found.strip_prefix(name).and_then(|rest| rest.strip_prefix(".node"));
    found == name || node.is_some_and(|node| node.parse::<u32>().is_ok())
}

/// A directory that could not be read. `None` if it does not exist or was removed meanwhile.
fn unreadable_directory(root: &DomainsRoot, error: observe::ObserveError) -> Option<UnreadableDirectory> {
    if matches!(&error, observe::ObserveError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound) {
        return None;
    }
    Some(UnreadableDirectory {
        path: root.directory.display().to_string(),
        reason: format!("{:#}", anyhow::Error::from(error)),
    })
}

/// Keep only members whose process is verified. Also returns the names of their programs.
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

/// The name of a member's program, if the member is a process of the domain's owner.
fn member_program_name(host: &dyn Host, member: &EngineMember, owner: u32) -> Reading<String> {
    let handle = host.open(member.process.pid)?;
    if handle.id() != member.process {
        return Err(Absent::Vanished);
    }
    let process = pagefold_host::observe::process(host, &*handle)?;
    if process.uid? == owner { Ok(process.comm) } else { Err(Absent::Malformed("belongs to another user".to_owned())) }
}
