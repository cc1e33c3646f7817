//! `pagefold doctor`: KSM is on, why is nothing merging, and what is wrong with how this host merges?

use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output};
use anyhow::bail;
use clap::Args;
use pagefold_base::Pid;
use pagefold_doctor::doctor_facts;
use pagefold_doctor::doctor_facts::TrustPolicy;
use pagefold_doctor::text;
use pagefold_doctor::wire::{DoctorReport, VerdictName};
use pagefold_output::wire;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold doctor                what is wrong with how this host merges
  sudo pagefold doctor --pid 1234     why is nothing of this process merging?
  pagefold doctor --verbose           with the reasons for what is right, too
  pagefold doctor --json | jq '.findings[] | select(.verdict == \"fail\")'

Nothing is changed: remedies are printed, not applied.

Exit status: 0 nothing fails, 1 something fails, 2 no such process or another error, 3 nothing \
fails but something could not be told, for want of privilege or because ksmd has not come so far.";

/// Arguments of `doctor`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DoctorArguments {
    /// Ask for a process instead of the host; may be given several times
    #[arg(long, value_name = "N")]
    pid: Vec<u32>,
    /// Show in full what is as it should be, too
    #[arg(long, short)]
    verbose: bool,
    /// Print JSON (see `pagefold schema doctor`)
    #[arg(long)]
    json: bool,
}

/// Examine the host or processes of it, and print the findings.
pub fn run(options: &DoctorArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let mut pids: Vec<Pid> = options.pid.iter().copied().map(Pid).collect();
    pids.sort();
    pids.dedup();
    let Config { domains, exclusions, .. } = Config::load(global)?;
    let facts = doctor_facts::gather_host_facts(&*host, &pids, &TrustPolicy { domains, exclusions });
    let mut processes = Vec::new();
    for pid in &pids {
        match facts.processes.iter().find(|process| process.process.id.pid == *pid && pid.0 > 0) {
            Some(process) => processes.push(process),
            None => bail!("--pid {pid}: {} has no such process", host.describe()),
        }
    }
    let report = if pids.is_empty() {
        DoctorReport::from_host(host.describe(), &facts)
    } else {
        DoctorReport::from_processes(host.describe(), &facts, &processes)
    };
    let report = match remedy_without_sudo(global) {
        Some(instead) => report.replace_privilege_remedies(instead),
        None => report,
    };
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::render(&report, options.verbose, output::stdout_style(global))
    })?;
    Ok(match report.verdict {
        VerdictName::Fail => CommandOutcome::NegativeVerdict,
        _ if report.counts.unknown > 0 || !report.not_seen.is_empty() => CommandOutcome::Partial,
        _ => CommandOutcome::Done,
    })
}

/// What to say where asking again as root would change nothing.
fn remedy_without_sudo(global: &GlobalOptions) -> Option<&'static str> {
    if global.host != "live" {
        Some("# it is not in the recording: make one as root with pagefold record")
    } else if rustix::process::geteuid().is_root() {
        Some("# refused even to root: CAP_SYS_PTRACE is missing (a container?), or a security module forbids it")
    } else {
        None
    }
}
