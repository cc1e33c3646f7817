//! `pagefold engine`: domains of programs that merge their memory by `libpagefold`.
//!
//! All that is shown is what members have written down of themselves, read without joining
//! (`pagefold_engine::observe`). A record is believed if its process lives and is of the user whose domain it is.

mod text;
pub mod wire;

use crate::arguments::Global;
use crate::command::engine::wire::{EngineReport, Unlooked};
use crate::{Outcome, output, source};
use anyhow::bail;
use clap::{Args, Subcommand};
use pagefold_base::engine::{Domain, Member};
use pagefold_base::{Absent, Reading};
use pagefold_engine::observe::{self, Root};
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
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Show domains: who is a member, what is merged, what it saves and costs
    #[command(after_help = EXAMPLES)]
    Status(Status),
}

#[derive(Args, Debug)]
struct Status {
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
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let What::Status(options) = &options.what;
    if global.host != "live" {
        bail!("--host {}: recordings hold no domains of the engine; leave --host out", global.host);
    }
    let host = source::open(global)?;
    let (domains, not_seen) = look(&*host, options.domain.as_deref());
    if let (Some(name), []) = (&options.domain, &domains[..]) {
        let others: String = not_seen.iter().map(|unlooked| format!(". Not looked at: {}", unlooked.detail)).collect();
        bail!(
            "there is no domain {name:?} to be seen: `pagefold engine status` lists those there are. Those of other \
             users are for root to see, and those that are kept elsewhere are found with PAGEFOLD_RUNTIME set as for \
             the program{others}"
        );
    }
    let report = EngineReport::of(host.page_size(), &domains, not_seen, now());
    let style = output::style(global);
    output::print(&match &options.domain {
        _ if options.json => pagefold_output::wire::json(&report),
        Some(_) => text::details(&report, options.top, style),
        None => text::list(&report, style),
    })?;
    Ok(if report.is_incomplete() { Outcome::Partial } else { Outcome::Done })
}

/// Since the host was booted.
fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

/// The domains of a name, of each user who has them and of each NUMA node where they are kept apart, or all; with the
/// names of the members' programs, and what could not be looked at.
fn look(host: &dyn Host, name: Option<&str>) -> (Vec<(Domain, Vec<String>)>, Vec<Unlooked>) {
    let (mut domains, mut not_seen) = (Vec::new(), Vec::new());
    for root in observe::roots() {
        let names = observe::names(&root).unwrap_or_else(|error| {
            not_seen.extend(unlooked(&root, error));
            Vec::new()
        });
        for found in names.iter().filter(|found| name.is_none_or(|name| is_of(found, name))) {
            match observe::domain(&root, found) {
                Ok(domain) => domains.push(known(host, domain)),
                Err(error) => not_seen.extend(unlooked(&root, error)),
            }
        }
    }
    (domains, not_seen)
}

/// Whether that is the domain of a name, or of one NUMA node of it.
fn is_of(found: &str, name: &str) -> bool {
    let node = found.strip_prefix(name).and_then(|rest| rest.strip_prefix(".node"));
    found == name || node.is_some_and(|node| node.parse::<u32>().is_ok())
}

/// What could not be looked at; what is not there, or has gone meanwhile, is nothing.
fn unlooked(root: &Root, error: observe::Error) -> Option<Unlooked> {
    if matches!(&error, observe::Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound) {
        return None;
    }
    Some(Unlooked { path: root.path.display().to_string(), detail: format!("{:#}", anyhow::Error::from(error)) })
}

/// With those members only that are what they say, and the names of their programs.
fn known(host: &dyn Host, mut domain: Domain) -> (Domain, Vec<String>) {
    let mut comms = Vec::new();
    let members = std::mem::take(&mut domain.members);
    for member in members {
        match comm(host, &member, domain.owner) {
            Ok(comm) => {
                domain.members.push(member);
                comms.push(comm);
            }
            Err(Absent::Vanished) => domain.ended += 1,
            Err(_) => domain.unread += 1,
        }
    }
    (domain, comms)
}

/// The name of a member's program, if it is a process of that user.
fn comm(host: &dyn Host, member: &Member, owner: u32) -> Reading<String> {
    let handle = host.open(member.process.pid)?;
    if handle.id() != member.process {
        return Err(Absent::Vanished);
    }
    let process = pagefold_host::observe::process(host, &*handle)?;
    if process.uid? == owner { Ok(process.comm) } else { Err(Absent::Malformed("of another user".to_owned())) }
}
