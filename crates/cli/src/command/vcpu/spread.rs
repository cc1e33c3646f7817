//! `pagefold vcpu spread`: keep the vCPUs of each machine on different run queues.

use super::{parse_interval, read_machines, why_missing};
use crate::command::recover::{self, open_live_host, with_remedy};
use crate::command_line::{GlobalOptions, ProcessOptions};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use pagefold_base::IdSet;
use pagefold_host::Host;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session::FailedUndo;
use pagefold_output::wire;
use pagefold_vcpu::decide::ready_time::HostSample;
use pagefold_vcpu::machines::Machine;
use pagefold_vcpu::spread::{self, EarlierSpread, PreparedSpread};
use pagefold_vcpu::wire::spread::VcpuSpreadReport;
use pagefold_vcpu::wire::status::{ObservationReport, OvercommitReport};
use pagefold_vcpu::{sample, text};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu spread --dry-run
  sudo pagefold vcpu spread --vm web1 --vm web2
  sudo pagefold vcpu spread --interval 10s --json
  sudo pagefold vcpu spread undo

Each vCPU gets CPUs that no sibling may use, on another core where there are enough, as far as its cgroup, its owner \
and a placement by `pagefold numa` permit. With more vCPUs than CPUs, siblings are distributed evenly. The machines \
are observed before and after. libvirt pins the vCPUs of its domains. Ctrl-C undoes everything; after kill -9, \
`pagefold recover` does. After success the CPUs stay until `pagefold vcpu spread undo`.

Exit status: 0 done, 2 usage error or failure, 3 some siblings must share a CPU, a vCPU keeps its CPUs, something could \
not be read, or the command was interrupted.";

const UNDO_EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu spread undo

A placement by `pagefold numa` stays in force. CPUs that another program has changed since stay.

Exit status: 0 everything is undone, 2 failure, 3 some changes remain.";

/// Arguments of `vcpu spread`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct SpreadArguments {
    #[command(subcommand)]
    command: Option<SpreadCommand>,
    /// Show what would be done, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Time over which the machines are observed, before and after
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_interval)]
    interval: Duration,
    /// Print JSON (see `pagefold schema vcpu-spread`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

#[derive(Debug, Subcommand)]
enum SpreadCommand {
    /// Give the vCPUs their previous CPUs back
    Undo(SpreadUndoArguments),
}

/// Arguments of `vcpu spread undo`.
#[derive(Args, Debug)]
#[command(after_help = UNDO_EXAMPLES)]
struct SpreadUndoArguments {
    /// Print JSON (see `pagefold schema recover`)
    #[arg(long)]
    json: bool,
}

/// Spread vCPUs, or undo that.
pub fn run(options: &SpreadArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        Some(SpreadCommand::Undo(options)) => run_undo(options, global),
        None => run_spread(options, global),
    }
}

fn begin_session<'h>(host: &'h dyn Host, global: &GlobalOptions) -> anyhow::Result<Session<'h>> {
    let (session, undone, failed) =
        Session::begin(host, &global.state, ResourceClass::CpuPlacement).map_err(with_remedy)?;
    recover::print_leftover(&undone, &failed);
    Ok(session)
}

fn run_spread(options: &SpreadArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    // Also for a dry run: the plan depends on what the vCPUs do.
    let host = open_live_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    // The lock is taken before the CPUs are read, so that no other pagefold changes them in between.
    let session = if options.dry_run { None } else { Some(begin_session(&*host, global)?) };
    let found = read_machines(&*host, &options.targets, global)?;
    let cpus = spread::read_cpus(&*host)
        .map_err(|why| anyhow!("cannot read the CPUs of this host (/sys/devices/system/cpu): {why}"))?;
    let online: IdSet = cpus.keys().copied().collect();
    let observe = || {
        progress::run_observation_with_progress(options.interval, || {
            sample::observe(&*host, &found.all, options.interval, &stop)
        })
    };
    let selected = found.selected();
    let observation = |samples: &[HostSample]| {
        ObservationReport::new(&selected, samples, &online, |machine: &Machine| why_missing(&*host, machine))
    };
    let samples = observe();
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted during the observation; nothing was changed");
    }
    let earlier = EarlierSpread::read(&*host, &global.state).context("cannot read earlier changes of CPUs")?;
    let prepared = spread::prepare(&cpus, &found.all, &found.is_selected, &samples, &earlier);
    let mut report = VcpuSpreadReport::planned(
        host.describe(),
        OvercommitReport::new(&found.all, &online),
        (&found.all, &found.is_selected, &prepared),
        observation(&samples),
        &found.unscanned,
    );
    if let Some(session) = session {
        report = carry_out(session, &prepared, report, &stop)?;
        if report.outcome != "interrupted" && !prepared.steps.is_empty() {
            report.after = Some(observation(&observe()));
        }
    }
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        output::print_stdout(&text::spread::render(&report, remedy, output::stdout_style(global)))?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// Carry the steps out, and keep the changes or undo them.
fn carry_out(
    mut session: Session<'_>,
    prepared: &PreparedSpread,
    report: VcpuSpreadReport,
    stop: &AtomicBool,
) -> anyhow::Result<VcpuSpreadReport> {
    let outcome = match spread::carry_out(&mut session, &prepared.steps, stop) {
        Ok(outcome) => outcome,
        Err(error) => return Err(with_remedy(session.abort(error))),
    };
    let failed = match outcome.interrupted {
        true => session.undo_all(),
        false if outcome.changed.is_empty() => Ok(Vec::new()),
        false => session.keep_changes(spread::PURPOSE),
    };
    let mut report = report.with_outcome(&outcome);
    report.failed_undos = failed.map_err(with_remedy)?.iter().map(FailedUndo::to_string).collect();
    Ok(report)
}

fn run_undo(options: &SpreadUndoArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let mut session = begin_session(&*host, global)?;
    let (undone, failed) = session.undo_kept_changes_for(spread::PURPOSE).map_err(with_remedy)?;
    recover::print_result(&undone, &failed, options.json, "No vCPU was spread since boot.")
}
