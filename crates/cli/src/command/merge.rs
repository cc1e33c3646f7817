//! `pagefold merge`: census, plan, apply, settle, verify, report.

use crate::arguments::{DomainBy, Global, Targets, bytes, duration, percent};
use crate::command::guest::{Asked, Control, control, is_of_one};
use crate::command::neighbours::{self, Neighbours, SIDE_CHANNEL};
use crate::command::recover::{self, explained, live, needs_ksm, refuse_tuner};
use crate::config::Config;
use crate::{Outcome, output, progress, source};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_base::Bytes;
use pagefold_base::domain::{Domain, Domains};
use pagefold_base::process::Process;
use pagefold_host::transaction::Session;
use pagefold_host::{Host, observe};
use pagefold_merge::decide::plan::{Guest, Plan, Target, Way};
use pagefold_merge::execute as merge;
use pagefold_merge::execute::After;
use pagefold_merge::ksmd;
use pagefold_merge::prepare::{Prepared, Request, prepare};
use pagefold_merge::text::merge as text;
use pagefold_merge::trial::Trial;
use pagefold_merge::wire::merge::MergeReport;
use pagefold_output::wire;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold merge --dry-run                     what would be enrolled, what it would save and cost
  pagefold merge --vm web1 --vm web2 --across-domains
  pagefold merge --cgroup /job7 --cpu 20       at a fifth of one CPU
  pagefold merge --pid 1234 --deadline 10s     as much as ten seconds allow
  pagefold merge --name postgres --whole       whole processes, with what they map later

KSM's settings come back when it ends, also by Ctrl-C, and after kill -9 by `pagefold recover`. What is merged then \
stays merged and enrolled: `pagefold unmerge` takes it back. Where Ctrl-C or a deadline ends it, ranges that had not \
merged by then are withdrawn; what it had enrolled when it failed or was killed, with the settings, as memory allows.

--whole enrols a virtual machine by QEMU's control socket where one is named or found, and injects nothing into it: \
where that socket is of no use it is left as it is, unless --inject is given.

Exit status: 0 done, 1 less than nine tenths of what was predicted was reached, 2 usage or failure, with everything put \
back or what remains said, 3 something was not seen, not enrolled or not put back, or it was interrupted or yielded to \
another program. A deadline ends it with 0 or 1.";

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
    /// End after this time, settled or not; neither the census nor withdrawing what has not merged is cut short
    #[arg(long, value_name = "TIME", value_parser = duration)]
    deadline: Option<Duration>,
    /// Enrol nothing of processes that would save less than this, net
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
    /// Watch merged pages of running programs for this time at least, from when ksmd begins, and for up to 600ms of it
    /// once ksmd is done; withdraw what is written too often to pay, with the bytes that were there too; 0 for not at
    /// all
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    watch: Duration,
    /// Pause between the two looks of the census at each page that might merge: what merges has held still for as long.
    /// 5s is about the age from which `run --policy guided` expects a page to stay until merging it has paid; 0 for one
    /// look
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = duration)]
    settle: Duration,
    /// Threads of the census [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// With --whole: the control socket (QMP) of the one virtual machine that is chosen [default: by its command line]
    #[arg(long, value_name = "PATH", requires = "whole")]
    qmp: Option<PathBuf>,
    /// With --whole: inject also where a virtual machine could be told by its control socket
    #[arg(long, requires = "whole", conflicts_with = "qmp")]
    inject: bool,
    /// Merge also virtual machines whose owner forbids it: QEMU's mem-merge=off, merge=off of a memory backend,
    /// libvirt's <nosharepages/>
    #[arg(long)]
    ignore_opt_out: bool,
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
    needs_ksm(&*host)?;
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let session = if options.dry_run { None } else { Some(begin(&*host, options, global)?) };
    let Prepared { census, plan, probes, others_hidden, .. } = prepared(&*host, options, global, &stop)?;
    let page_size = host.page_size();
    let huge_page_size = observe::huge_page_bytes(&*host).unwrap_or(page_size.bytes() * 512);
    let mut report = MergeReport::of_plan(host.describe(), page_size, huge_page_size, &census, &plan);
    let seen = options.across_domains || !others_hidden && neighbours::shows_all(&*host);
    report.others_hidden = global.host == "live" && !seen;
    drop(census);
    let mut met = true;
    if let Some(mut session) = session.filter(|_| !plan.targets.is_empty()) {
        let after = if options.keep { After::Slowly } else { After::PutBack };
        let how = merge::Options { share: options.cpu, deadline: options.deadline, watch: options.watch, after };
        let planned = merge::Planned { plan, probes, started };
        let outcome = progress::show_merge(page_size, &stop, |progress| {
            merge::carry_out(&mut session, planned, &how, &mut Trial::new(&*host), progress, &stop)
        })
        .map_err(|error| session.give_up(error))?;
        report = report.with_outcome(&outcome, page_size);
        met = outcome.met(page_size);
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
fn prepared(host: &dyn Host, options: &Options, global: &Global, stop: &AtomicBool) -> anyhow::Result<Prepared> {
    let available = || std::thread::available_parallelism().map_or(1, Into::into);
    let config = Config::load(global)?.ignoring_opt_out(options.ignore_opt_out);
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
        max_regions: None,
        metadata: None,
        split_huge_pages: true,
        left_out: Default::default(),
        parties: 0,
    };
    let mut prepared =
        progress::show(host.page_size(), stop, |progress| prepare(host, &request, &excluded, None, progress, stop))?;
    let (census, plan) = (&prepared.census, &mut prepared.plan);
    if options.whole || options.across_domains {
        plan.targets.iter().filter_map(across_nodes).for_each(|warning| eprintln!("pagefold: {warning}"));
    }
    source::seen(!census.subjects.is_empty(), &request.selection, &census.unseen, global)?;
    if census.partial {
        bail!("stopped during the census: nothing was changed");
    }
    if options.whole {
        is_of_one(options.qmp.as_deref(), plan.targets.iter().map(|target| &target.process))?;
        prepared.others_hidden = one_domain(host, plan, &request.domains, options)?;
        let asked = Asked::new(stop);
        for target in &mut plan.targets {
            target.way = way(host, target, options, global, &asked)?;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("stopped before anything was merged: nothing was changed");
        }
    }
    Ok(prepared)
}

/// That merging across domains, or of whole processes, may move pages of a process from the nodes that it is bound to.
fn across_nodes(target: &Target) -> Option<String> {
    let nodes = target.domain.nodes()?;
    Some(format!(
        "the memory of process {} is bound to node {nodes}, and KSM merges across nodes here: merged pages of it may lie \
         on another node. `echo 0 > /sys/kernel/mm/ksm/merge_across_nodes` keeps nodes apart, while nothing is merged",
        target.process.id.pid
    ))
}

/// Refuse to enrol processes whole where other trust domains are, or have been enrolled before. Whether there may be
/// others that cannot be seen from here.
fn one_domain(host: &dyn Host, plan: &Plan, domains: &Domains, options: &Options) -> anyhow::Result<bool> {
    if options.across_domains {
        return Ok(false);
    }
    let Neighbours { domains: mut all, hidden } = Neighbours::observe(host, domains, None)?;
    all.extend(plan.targets.iter().map(|target| target.domain.trust().clone()));
    if !plan.targets.is_empty() && all.len() > 1 {
        let some: Vec<String> = all.iter().take(2).map(Domain::to_string).collect();
        bail!(
            "--whole would let {} trust domains share pages ({}, ...: those of processes that are enrolled already among \
             them), and {SIDE_CHANNEL}: choose one of them, or give --across-domains",
            all.len(),
            some.join(", ")
        );
    }
    Ok(hidden)
}

/// How a process is enrolled whole.
fn way(host: &dyn Host, target: &Target, options: &Options, global: &Global, asked: &Asked<'_>) -> anyhow::Result<Way> {
    let process = &target.process;
    // What has become of it is told when it is enrolled.
    let Ok(handle) = host.open(process.id.pid) else { return Ok(Way::Within) };
    Ok(match control(&*handle, process, options.qmp.as_deref(), options.inject, global, asked)? {
        Control::None => Way::Within,
        Control::Unreachable(why) => Way::Unreachable(why),
        Control::Answers(socket, backends) => {
            let sizes: Vec<Bytes> = backends.iter().map(|backend| backend.size).collect();
            let regions = target.ranges.iter().map(|range| range.region);
            let memory = regions.filter(|region| sizes.contains(&region.bytes())).collect();
            let unmarked = backends.into_iter().filter(|backend| !backend.merge && !backend.share);
            Way::Guest(Guest { socket, backends: unmarked.map(|backend| backend.path).collect(), memory })
        }
    })
}

/// Begin to change the host, or say why not.
fn begin<'a>(host: &'a dyn Host, options: &Options, global: &Global) -> anyhow::Result<Session<'a>> {
    refuse_tuner(host, options.force)?;
    let session = recover::begin(host, global)?;
    session.writable().map_err(explained)?;
    host.frame_flags(&[]).map_err(|why| {
        anyhow!("page frames cannot be seen ({why}), which tell what was reached: root with CAP_SYS_ADMIN is needed")
    })?;
    if let (Err(why), true) = (ksmd::Ksmd::find(host).and_then(|ksmd| ksmd.cpu()), options.cpu < 1.0) {
        bail!("the CPU time of ksmd cannot be read here ({why}), so --cpu cannot be held: --cpu 100 sets no bound");
    }
    Ok(session)
}
