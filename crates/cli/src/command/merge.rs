//! `pagefold merge`: census, plan, apply, settle, verify, report.

use crate::arguments::{DomainBy, Global, Targets, bytes, duration, percent};
use crate::command::recover::{self, explained, live, needs_ksm, refuse_tuner};
use crate::config::Config;
use crate::{Outcome, output, progress, source};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_drive::prepare::{Request, prepare};
use pagefold_drive::{Session, merge};
use pagefold_host::Host;
use pagefold_model::Bytes;
use pagefold_model::census::Census;
use pagefold_model::plan::Plan;
use pagefold_model::process::Process;
use pagefold_report::merge::{MergeReport, text};
use pagefold_report::wire;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold merge --dry-run                     what would be enrolled, what it would save and cost
  pagefold merge --vm web1 --vm web2 --across-domains
  pagefold merge --cgroup /job7 --cpu 20       at a fifth of one CPU
  pagefold merge --pid 1234 --deadline 10s     as much as ten seconds allow
  pagefold merge --name postgres --whole       whole processes, with what they map later

KSM's settings come back when it ends. What is merged stays merged: `pagefold unmerge` takes it back.
Ctrl-C ends it early and reports what was reached.";

/// Arguments of `merge`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// Show the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Enrol whole processes, with what they map later, instead of the ranges that pay
    #[arg(long)]
    whole: bool,
    /// ksmd's share of one CPU at most; 100 is no bound
    #[arg(long, value_name = "PERCENT", default_value = "50", value_parser = percent)]
    cpu: f64,
    /// End after this time, settled or not
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
    /// Leave processes alone that would save less than this, net
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = bytes)]
    min_profit: Bytes,
    /// Leave ksmd running slowly afterwards, so that what changes merges again
    #[arg(long)]
    keep: bool,
    /// Merge across trust domains too. Whoever can write to a merged page can tell by the time it takes that somebody
    /// else has the same content: only for domains that may know that of each other
    #[arg(long)]
    across_domains: bool,
    /// How processes that are in no group of the configuration are sorted into trust domains [default: as the
    /// configuration says, otherwise user]
    #[arg(long, value_enum, value_name = "RULE")]
    domains: Option<DomainBy>,
    /// Watch merged pages of running programs for this time at least, and withdraw what is written too often to pay;
    /// 0 for not at all
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    watch: Duration,
    /// Pause between the two looks of the census at each page that might merge; 0 for one look
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = duration)]
    settle: Duration,
    /// Threads of the census [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Go on although another program that writes KSM's settings runs
    #[arg(long)]
    force: bool,
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema merge`)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    targets: Targets,
}

/// Merge.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let started = Instant::now();
    let host = if options.dry_run { source::open(global)? } else { live(global)? };
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let session = if options.dry_run { None } else { Some(begin(&*host, options, global)?) };
    let (census, plan) = plan(&*host, options, global, &stop)?;
    let page_size = host.page_size();
    let mut report = MergeReport::of_plan(host.describe(), page_size, &census, &plan);
    drop(census);
    let mut met = true;
    if let Some(session) = session.filter(|_| !plan.targets.is_empty()) {
        let how =
            merge::Options { share: options.cpu, deadline: options.deadline, watch: options.watch, keep: options.keep };
        let outcome = progress::show_merge(page_size, &stop, |progress| {
            merge::carry_out(session, plan, &how, started, progress, &stop)
        })?;
        report = report.with_outcome(&outcome, page_size);
        met = outcome.met();
    }
    if options.json {
        output::print(&wire::json(&report))?;
    } else {
        output::print(&text::render(&report, options.top, source::remedy(global), output::style(global)))?;
    }
    Ok(match (report.is_incomplete(), met) {
        (true, _) => Outcome::Partial,
        (false, true) => Outcome::Done,
        (false, false) => Outcome::VerdictNo,
    })
}

/// Take the census that a plan needs, and plan.
fn plan(host: &dyn Host, options: &Options, global: &Global, stop: &AtomicBool) -> anyhow::Result<(Census, Plan)> {
    let available = || std::thread::available_parallelism().map_or(1, Into::into);
    let config = Config::load(global)?;
    let excluded = |process: &Process| config.exclusions.reason(process);
    let request = Request {
        selection: source::selection(&options.targets, global)?,
        domains: config.domains(options.domains),
        across_domains: options.across_domains,
        settle: options.settle,
        threads: options.threads.map_or_else(available, usize::from),
        whole: options.whole,
        min_profit: options.min_profit,
        share: options.cpu,
    };
    let (census, plan) =
        progress::show(host.page_size(), stop, |progress| prepare(host, &request, &excluded, progress, stop))?;
    source::seen(!census.subjects.is_empty(), &request.selection, &census.unseen, global)?;
    if census.partial {
        bail!("stopped during the census: nothing was changed");
    }
    Ok((census, plan))
}

/// Begin to change the host, or say why not.
fn begin<'a>(host: &'a dyn Host, options: &Options, global: &Global) -> anyhow::Result<Session<'a>> {
    needs_ksm(host)?;
    refuse_tuner(host, options.force)?;
    let session = recover::begin(host, global)?;
    session.writable().map_err(explained)?;
    Ok(session)
}
