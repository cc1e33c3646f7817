//! `pagefold merge`: take a census, plan, enroll, merge, verify, report.

use crate::command::enrolled_domains::{self, EnrolledDomains, SIDE_CHANNEL_NOTE};
use crate::command::guest::{GuestControl, GuestSocketQueries, check_single_guest, find_control};
use crate::command::recover::{self, check_ksm_present, check_no_tuner, open_changeable_host, with_remedy};
use crate::command_line::{
    DomainRuleArgument, GlobalOptions, ProcessOptions, parse_bytes, parse_cpu_share, parse_duration,
};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_base::Bytes;
use pagefold_base::domain::{DomainConfig, TrustDomain};
use pagefold_base::process::Process;
use pagefold_host::ksmd_thread::KsmdThread;
use pagefold_host::transaction::Session;
use pagefold_host::{Host, observe};
use pagefold_merge::decide::plan::{EnrollMethod, GuestMemoryControl, MergePlan, PlanTarget};
use pagefold_merge::execute::{self, AfterMerge};
use pagefold_merge::ksmd;
use pagefold_merge::merge_monitor::MergeMonitor;
use pagefold_merge::prepare::{PlanRequest, PreparedPlan, prepare_plan};
use pagefold_merge::text::merge as text;
use pagefold_merge::wire::merge::MergeReport;
use pagefold_output::wire;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold merge --dry-run                     show the plan with predicted savings and costs
  pagefold merge --vm web1 --vm web2 --across-domains
  pagefold merge --cgroup /job7 --cpu 20       at a fifth of one CPU
  pagefold merge --pid 1234 --deadline 10s     as much as ten seconds allow
  pagefold merge --name postgres --whole-processes
                                               whole processes, with memory that they map later

The command restores KSM's settings when it ends, also by Ctrl-C; after kill -9, `pagefold recover` restores them. \
Merged pages stay merged and enrolled; `pagefold unmerge` undoes that. If Ctrl-C or a deadline ends the command, it \
unenrolls the ranges that have not merged. If it fails or is killed, all that it enrolled is unenrolled together with \
restoring the settings, as far as there is memory.

--whole-processes enrolls a virtual machine through QEMU's control socket if one is named or found, and injects no \
code into it. If the socket cannot be used, the virtual machine is not enrolled, unless --inject is given.

Exit status: 0 done, 1 measured savings are below nine tenths of the predicted ones, 2 usage error or failure, with \
all changes undone or the remaining ones listed, 3 something could not be read, enrolled or undone, or the command \
was interrupted or yielded to another program. A deadline ends it with 0 or 1.";

/// Arguments of `merge`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct MergeArguments {
    /// Show the plan, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Enroll whole processes, with memory that they map later, instead of only the ranges with net savings
    #[arg(long)]
    whole_processes: bool,
    /// Maximum CPU use of ksmd, as a percentage of one CPU; 100 sets no limit
    #[arg(long, value_name = "PERCENT", default_value = "50", value_parser = parse_cpu_share)]
    cpu: f64,
    /// End after this time, even if merging is not finished. The census, and unenrolling ranges that have not merged,
    /// are not cut short
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    deadline: Option<Duration>,
    /// Enroll only processes whose predicted net savings are at least this
    #[arg(long, value_name = "BYTES", default_value = "1MiB", value_parser = parse_bytes)]
    min_profit: Bytes,
    /// Leave ksmd running slowly afterwards, so that changed pages merge again
    #[arg(long)]
    keep_ksmd_running: bool,
    /// Also merge across trust domains. A process can tell by the time of a write that another process has the same
    /// page content: use this only if these domains may learn each other's page contents
    #[arg(long)]
    across_domains: bool,
    /// Rule that sorts processes into trust domains if they are in no group of the configuration [default: from the
    /// configuration, otherwise user]
    #[arg(long, value_enum, value_name = "RULE")]
    domains: Option<DomainRuleArgument>,
    /// Minimum time to watch merged pages of running programs, from the start of ksmd; it may prolong the command by up
    /// to 600ms. Ranges that are written too often for net savings are unenrolled as a whole; 0 disables this. It has
    /// no effect with --whole-processes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_duration)]
    watch_time: Duration,
    /// Pause between the two reads of each page that might merge; only pages that are equal in both are merged. 0 for
    /// one read
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pass_interval: Duration,
    /// Number of census threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// With --whole-processes: the control socket (QMP) of the one selected virtual machine [default: from its command
    /// line]
    #[arg(long, value_name = "PATH", requires = "whole_processes")]
    qmp: Option<PathBuf>,
    /// With --whole-processes: inject code even into virtual machines that have a control socket
    #[arg(long, requires = "whole_processes", conflicts_with = "qmp")]
    inject: bool,
    /// Also merge virtual machines whose owner forbids it: QEMU's mem-merge=off, merge=off of a memory backend,
    /// libvirt's `<nosharepages/>`
    #[arg(long)]
    ignore_opt_out: bool,
    /// Continue although another program that writes KSM's settings is running
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

/// Take a census, merge, and print the report.
pub fn run(options: &MergeArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = if options.dry_run { host_selection::open_host(global)? } else { open_changeable_host(global)? };
    let started = host.now();
    check_ksm_present(&*host)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let session = if options.dry_run { None } else { Some(begin_session(&*host, options, global)?) };
    let PreparedPlan { census, plan, probes, enrolled_may_be_hidden, .. } =
        prepare_merge(&*host, options, global, &stop)?;
    let page_size = host.page_size();
    let huge_page_size = observe::huge_page_bytes(&*host).unwrap_or(page_size.bytes() * 512);
    let mut report = MergeReport::from_plan(host.describe(), page_size, huge_page_size, &census, &plan);
    report.enrolled_may_be_hidden = global.host == "live"
        && !options.across_domains
        && (enrolled_may_be_hidden || !enrolled_domains::lists_all_processes(&*host));
    drop(census);
    let mut met_prediction = true;
    if let Some(mut session) = session.filter(|_| !plan.targets.is_empty()) {
        let after_merge = if options.keep_ksmd_running { AfterMerge::KeepKsmdRunning } else { AfterMerge::UndoChanges };
        let merge_options = execute::MergeOptions {
            ksmd_cpu_share: options.cpu,
            deadline: options.deadline,
            watch_time: options.watch_time,
            after_merge,
        };
        let prepared_merge = execute::PreparedMerge { plan, probes, started_at: started };
        let outcome = progress::run_merge_with_progress(page_size, &stop, |progress| {
            execute::execute_plan(
                &mut session,
                prepared_merge,
                &merge_options,
                &mut MergeMonitor::new(&*host),
                progress,
                &stop,
            )
        })
        .map_err(|error| session.abort(error))?;
        report = report.with_outcome(&outcome, page_size);
        met_prediction = outcome.met_prediction();
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
    Ok(match (report.is_incomplete(), met_prediction) {
        (true, _) => CommandOutcome::Partial,
        (false, true) => CommandOutcome::Done,
        (false, false) => CommandOutcome::NegativeVerdict,
    })
}

/// Take the census and make the plan.
fn prepare_merge(
    host: &dyn Host,
    options: &MergeArguments,
    global: &GlobalOptions,
    stop: &AtomicBool,
) -> anyhow::Result<PreparedPlan> {
    let available_cpus = || std::thread::available_parallelism().map_or(1, Into::into);
    let config = Config::load(global)?.with_opt_out_ignored(options.ignore_opt_out);
    let exclusion_reason = |process: &Process| config.exclusions.reason(process);
    let request = PlanRequest {
        selection: host_selection::process_selection(&options.targets, global)?,
        domains: config.domains(options.domains),
        across_domains: options.across_domains,
        pass_interval: options.pass_interval,
        threads: options.threads.map_or_else(available_cpus, usize::from),
        whole_processes: options.whole_processes,
        min_profit: options.min_profit,
        ksmd_cpu_share: options.cpu,
        max_regions: None,
        max_added_metadata: None,
        split_huge_pages: true,
        excluded_ranges: Default::default(),
        max_matrix_rows: 0,
        explain_differences: true,
    };
    let mut prepared = progress::run_census_with_progress(host.page_size(), stop, |progress| {
        prepare_plan(host, &request, &exclusion_reason, None, progress, stop)
    })?;
    let (census, plan) = (&prepared.census, &prepared.plan);
    if options.whole_processes || options.across_domains {
        plan.targets.iter().filter_map(cross_node_warning).for_each(|warning| eprintln!("pagefold: {warning}"));
    }
    host_selection::check_any_seen(host, !census.subjects.is_empty(), &request.selection, &census.unscanned, global)?;
    if census.partial {
        bail!("stopped during the census: nothing was changed");
    }
    if options.whole_processes {
        check_single_guest(options.qmp.as_deref(), plan.targets.iter().map(|target| &target.process))?;
        prepared.enrolled_may_be_hidden = check_single_domain(host, plan, &request.domains, options)?;
        let queries = GuestSocketQueries::new(stop);
        prepared.set_enroll_methods(|target| enroll_method(host, target, options, global, &queries))?;
        if stop.load(Ordering::Relaxed) {
            bail!("stopped before anything was merged: nothing was changed");
        }
    }
    Ok(prepared)
}

/// A warning that merging may move pages of a process away from the NUMA nodes that it is bound to.
fn cross_node_warning(target: &PlanTarget) -> Option<String> {
    let nodes = target.domain.nodes()?;
    Some(format!(
        "the memory of process {} is bound to node {nodes}, but KSM merges across nodes here: its merged pages may be \
         on another node. `echo 0 > /sys/kernel/mm/ksm/merge_across_nodes` keeps nodes apart; run it while nothing is \
         merged",
        target.process.id.pid
    ))
}

/// Refuse to enroll whole processes of several trust domains; processes that are already enrolled count, too. Returns
/// whether there may be enrolled processes that this process cannot see.
fn check_single_domain(
    host: &dyn Host,
    plan: &MergePlan,
    domains: &DomainConfig,
    options: &MergeArguments,
) -> anyhow::Result<bool> {
    if options.across_domains {
        return Ok(false);
    }
    let EnrolledDomains { domains: mut all_domains, may_be_incomplete } =
        EnrolledDomains::observe(host, domains, None)?;
    all_domains.extend(plan.targets.iter().map(|target| target.domain.without_nodes().clone()));
    if !plan.targets.is_empty() && all_domains.len() > 1 {
        let examples: Vec<String> = all_domains.iter().take(2).map(TrustDomain::to_string).collect();
        bail!(
            "--whole-processes would let {} trust domains share pages ({}, ..., with those of processes already \
             enrolled), and {SIDE_CHANNEL_NOTE}: select processes of one domain, or give --across-domains",
            all_domains.len(),
            examples.join(", ")
        );
    }
    Ok(may_be_incomplete)
}

/// The method to enroll a whole process.
fn enroll_method(
    host: &dyn Host,
    target: &PlanTarget,
    options: &MergeArguments,
    global: &GlobalOptions,
    queries: &GuestSocketQueries<'_>,
) -> anyhow::Result<EnrollMethod> {
    let process = &target.process;
    // If the process has ended, enrolling it reports that.
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

/// Begin a session that changes the host. Fails if the merge could not work.
fn begin_session<'a>(
    host: &'a dyn Host,
    options: &MergeArguments,
    global: &GlobalOptions,
) -> anyhow::Result<Session<'a>> {
    check_no_tuner(host, options.force)?;
    let session = recover::begin_session(host, global)?;
    ksmd::check_writable(&session).map_err(with_remedy)?;
    pagefold_host::check_frame_access(host).map_err(|why| {
        anyhow!("cannot read page frames ({why}), which measure the savings: run as root with CAP_SYS_ADMIN")
    })?;
    if let (Err(why), true) = (KsmdThread::find(host).and_then(|ksmd| ksmd.cpu_time()), options.cpu < 1.0) {
        bail!("cannot read the CPU time of ksmd ({why}), which --cpu needs: --cpu 100 sets no limit");
    }
    Ok(session)
}
