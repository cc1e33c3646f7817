//! `pagefold merge`: census, plan, apply, settle, verify, report.

use crate::command::enrolled_domains::{self, EnrolledDomains, SIDE_CHANNEL_NOTE};
use crate::command::guest::{GuestControl, GuestSocketQueries, check_single_guest, find_control};
use crate::command::recover::{self, check_ksm_present, check_no_tuner, open_live_host, with_remedy};
use crate::command_line::{
    DomainRuleArgument, GlobalOptions, ProcessOptions, parse_bytes, parse_cpu_share, parse_duration,
};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output, progress};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_base::Bytes;
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::process::Process;
use pagefold_host::transaction::Session;
use pagefold_host::{Host, observe};
use pagefold_merge::decide::plan::{EnrollMethod, GuestMemoryControl, MergePlan, PlanTarget};
use pagefold_merge::execute as merge;
use pagefold_merge::execute::AfterMerge;
use pagefold_merge::ksmd;
use pagefold_merge::merge_monitor::MergeMonitor;
use pagefold_merge::prepare::{PlanRequest, PreparedPlan, prepare_plan};
use pagefold_merge::text::merge as text;
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
pub struct MergeArguments {
    /// Show the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Enrol whole processes, with what they map later, instead of the ranges that pay
    #[arg(long)]
    whole: bool,
    /// ksmd's share of one CPU at most; 100 is no bound
    #[arg(long, value_name = "PERCENT", default_value = "50", value_parser = parse_cpu_share)]
    cpu: f64,
    /// End after this time, settled or not; neither the census nor withdrawing what has not merged is cut short
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    deadline: Option<Duration>,
    /// Enrol nothing of processes that would save less than this, net
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_bytes)]
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
    domains: Option<DomainRuleArgument>,
    /// Watch merged pages of running programs for this time at least, from when ksmd begins, and for up to 600ms of it
    /// once ksmd is done; withdraw what is written too often to pay, with the bytes that were there too; 0 for not at
    /// all
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    watch: Duration,
    /// Pause between the two looks of the census at each page that might merge: what merges has held still for as long.
    /// 5s is about the age from which `run --policy guided` expects a page to stay until merging it has paid; 0 for one
    /// look
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
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
    targets: ProcessOptions,
}

/// Merge.
pub fn run(options: &MergeArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let started = Instant::now();
    let host = if options.dry_run { host_selection::open_host(global)? } else { open_live_host(global)? };
    check_ksm_present(&*host)?;
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let session = if options.dry_run { None } else { Some(begin_session(&*host, options, global)?) };
    let PreparedPlan { census, plan, probes, enrolled_may_be_hidden: others_hidden, .. } =
        prepare_merge(&*host, options, global, &stop)?;
    let page_size = host.page_size();
    let huge_page_size = observe::huge_page_bytes(&*host).unwrap_or(page_size.bytes() * 512);
    let mut report = MergeReport::from_plan(host.describe(), page_size, huge_page_size, &census, &plan);
    let seen = options.across_domains || !others_hidden && enrolled_domains::lists_all_processes(&*host);
    report.others_hidden = global.host == "live" && !seen;
    drop(census);
    let mut met = true;
    if let Some(mut session) = session.filter(|_| !plan.targets.is_empty()) {
        let after = if options.keep { AfterMerge::KeepKsmdRunning } else { AfterMerge::UndoChanges };
        let how = merge::MergeOptions {
            ksmd_cpu_share: options.cpu,
            deadline: options.deadline,
            watch_time: options.watch,
            after_merge: after,
        };
        let planned = merge::PreparedMerge { plan, probes, started_at: started };
        let outcome = progress::run_merge_with_progress(page_size, &stop, |progress| {
            merge::execute_plan(&mut session, planned, &how, &mut MergeMonitor::new(&*host), progress, &stop)
        })
        .map_err(|error| session.abort(error))?;
        report = report.with_outcome(&outcome, page_size);
        met = outcome.met_prediction(page_size);
    }
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        output::print_stdout(&text::render(
            &report,
            options.top,
            host_selection::permission_remedy(global),
            output::stdout_style(global),
        ))?;
    }
    Ok(match (report.is_incomplete(), met) {
        (true, _) => CommandOutcome::Partial,
        (false, true) => CommandOutcome::Done,
        (false, false) => CommandOutcome::NegativeVerdict,
    })
}

/// Take the census that a plan needs, and plan.
fn prepare_merge(
    host: &dyn Host,
    options: &MergeArguments,
    global: &GlobalOptions,
    stop: &AtomicBool,
) -> anyhow::Result<PreparedPlan> {
    let available = || std::thread::available_parallelism().map_or(1, Into::into);
    let config = Config::load(global)?.with_opt_out_ignored(options.ignore_opt_out);
    let excluded = |process: &Process| config.exclusions.reason(process);
    let request = PlanRequest {
        selection: host_selection::process_selection(&options.targets, global)?,
        domains: config.domains(options.domains),
        across_domains: options.across_domains,
        pass_interval: options.settle,
        threads: options.threads.map_or_else(available, usize::from),
        whole_processes: options.whole,
        min_profit: options.min_profit,
        ksmd_cpu_share: options.cpu,
        max_regions: None,
        max_added_metadata: None,
        split_huge_pages: true,
        excluded_ranges: Default::default(),
        max_matrix_rows: 0,
    };
    let mut prepared = progress::run_census_with_progress(host.page_size(), stop, |progress| {
        prepare_plan(host, &request, &excluded, None, progress, stop)
    })?;
    let (census, plan) = (&prepared.census, &mut prepared.plan);
    if options.whole || options.across_domains {
        plan.targets.iter().filter_map(cross_node_warning).for_each(|warning| eprintln!("pagefold: {warning}"));
    }
    host_selection::check_any_seen(!census.subjects.is_empty(), &request.selection, &census.unscanned, global)?;
    if census.partial {
        bail!("stopped during the census: nothing was changed");
    }
    if options.whole {
        check_single_guest(options.qmp.as_deref(), plan.targets.iter().map(|target| &target.process))?;
        prepared.enrolled_may_be_hidden = check_single_domain(host, plan, &request.domains, options)?;
        let asked = GuestSocketQueries::new(stop);
        for target in &mut plan.targets {
            target.enroll_method = enroll_method(host, target, options, global, &asked)?;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("stopped before anything was merged: nothing was changed");
        }
    }
    Ok(prepared)
}

/// That merging across domains, or of whole processes, may move pages of a process from the nodes that it is bound to.
fn cross_node_warning(target: &PlanTarget) -> Option<String> {
    let nodes = target.domain.nodes()?;
    Some(format!(
        "the memory of process {} is bound to node {nodes}, and KSM merges across nodes here: merged pages of it may lie \
         on another node. `echo 0 > /sys/kernel/mm/ksm/merge_across_nodes` keeps nodes apart, while nothing is merged",
        target.process.id.pid
    ))
}

/// Refuse to enrol processes whole where other trust domains are, or have been enrolled before. Whether there may be
/// others that cannot be seen from here.
fn check_single_domain(
    host: &dyn Host,
    plan: &MergePlan,
    domains: &DomainConfig,
    options: &MergeArguments,
) -> anyhow::Result<bool> {
    if options.across_domains {
        return Ok(false);
    }
    let EnrolledDomains { domains: mut all, may_be_incomplete: hidden } =
        EnrolledDomains::observe(host, domains, None)?;
    all.extend(plan.targets.iter().map(|target| target.domain.without_nodes().clone()));
    if !plan.targets.is_empty() && all.len() > 1 {
        let some: Vec<String> = all.iter().take(2).map(TrustDomain::to_string).collect();
        bail!(
            "--whole would let {} trust domains share pages ({}, ...: those of processes that are enrolled already among \
             them), and {SIDE_CHANNEL_NOTE}: choose one of them, or give --across-domains",
            all.len(),
            some.join(", ")
        );
    }
    Ok(hidden)
}

/// How a process is enrolled whole.
fn enroll_method(
    host: &dyn Host,
    target: &PlanTarget,
    options: &MergeArguments,
    global: &GlobalOptions,
    queries: &GuestSocketQueries<'_>,
) -> anyhow::Result<EnrollMethod> {
    let process = &target.process;
    // What has become of it is told when it is enrolled.
    let Ok(handle) = host.open(process.id.pid) else { return Ok(EnrollMethod::InProcess) };
    Ok(match find_control(&*handle, process, options.qmp.as_deref(), options.inject, global, queries)? {
        GuestControl::Unused => EnrollMethod::InProcess,
        GuestControl::Unreachable(why) => EnrollMethod::Unreachable(why),
        GuestControl::Reachable(socket, backends) => {
            let sizes: Vec<Bytes> = backends.iter().map(|backend| backend.size).collect();
            let regions = target.ranges.iter().map(|range| range.region);
            let memory = regions.filter(|region| sizes.contains(&region.bytes())).collect();
            let unmarked = backends.into_iter().filter(|backend| !backend.is_mergeable && !backend.is_shared);
            EnrollMethod::GuestControl(GuestMemoryControl {
                socket,
                backends: unmarked.map(|backend| backend.path).collect(),
                memory,
            })
        }
    })
}

/// Begin to change the host, or say why not.
fn begin_session<'a>(
    host: &'a dyn Host,
    options: &MergeArguments,
    global: &GlobalOptions,
) -> anyhow::Result<Session<'a>> {
    check_no_tuner(host, options.force)?;
    let session = recover::begin_session(host, global)?;
    session.check_writable().map_err(with_remedy)?;
    host.frame_flags(&[]).map_err(|why| {
        anyhow!("page frames cannot be seen ({why}), which tell what was reached: root with CAP_SYS_ADMIN is needed")
    })?;
    if let (Err(why), true) = (ksmd::KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()), options.cpu < 1.0) {
        bail!("the CPU time of ksmd cannot be read here ({why}), so --cpu cannot be held: --cpu 100 sets no bound");
    }
    Ok(session)
}
