//! `pagefold numa`: where memory and threads are on a host with several NUMA nodes.

use super::numa_placement::{self, ApplyArguments, UndoArguments, VerifyArguments};
use super::recover;
use crate::command_line::{
    GlobalOptions, MonitorOptions, ProcessOptions, parse_bandwidth, parse_cpu_share, parse_duration,
    parse_vcpus_per_cpu,
};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use pagefold_base::{Bytes, PageSize, Reading};
use pagefold_host::Host;
use pagefold_host::qemu_monitor::MonitorAccess;
use pagefold_host::resource::ResourceClass;
use pagefold_host::transaction::Session;
use pagefold_host::transaction::session;
use pagefold_numa::apply::{self, MachineTarget};
use pagefold_numa::decide::FrameReader;
use pagefold_numa::decide::plan::{self, PlacementPlan, PlacementProblem};
use pagefold_numa::decide::pricing::OperatorPrices;
use pagefold_numa::decide::requested::RequestedNodes;
use pagefold_numa::decide::working_set::{HotnessSource, WorkingSet, weight_by_working_sets};
use pagefold_numa::map::{self, MapError, NumaMap};
use pagefold_numa::placement_record;
use pagefold_numa::predict;
use pagefold_numa::problem::{PlanLimits, placement_problem};
use pagefold_numa::text;
use pagefold_numa::wire::map::NumaMapReport;
use pagefold_numa::wire::plan::NumaPlanReport;
use pagefold_numa::wire::predict::NumaPredictReport;
use pagefold_numa::working_set::{self, MachineToMeasure, MeasureError};
use pagefold_output::wire;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

const MAP_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa map                the nodes, and the largest processes on them
  sudo pagefold numa map --vm 'web*'    virtual machines, with their virtual nodes and vCPUs
  sudo pagefold numa map --pid 4711 --json

It reads page tables, and asks the QMP monitor of each QEMU for at most a second, unless another client uses it. It \
changes nothing, but with --libvirt-monitor libvirt marks its domains as tainted. \"remote\" is the expected share of \
accesses to other nodes than that of the CPU, and \"distance\" their mean distance relative to local memory, if each \
vCPU (or each thread of another program) reads all of its memory equally often.";

const PLAN_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa plan                    all virtual machines of this host
  sudo pagefold numa plan --vcpus-per-cpu 2  at most two vCPUs for each CPU
  sudo pagefold numa plan --working-set 10s  weight memory by its use in the next ten seconds
  sudo pagefold numa plan --pid 4711 --pid 4712 --json

It moves nothing. A virtual machine with several virtual nodes gets a node for each of them, and any other one gets \
a single node, as far as CPUs and memory suffice. Machines that run most for each page of memory come first. Memory \
that a device pins stays, and so do pages merged by KSM, which several machines may share.

With --working-set, DAMON, the kernel's access monitor, runs for that time and is turned off again. If it cannot be \
used, the plan says why, uses CPU time alone, and the exit status is 3.";

const PREDICT_EXAMPLES: &str = "\
Examples:
  sudo pagefold numa predict --vm db1 --to 1
  sudo pagefold numa predict --vm big --to 0=1,1=0 --bandwidth 500MiB
  pagefold --host recording:DIR numa predict --pid 4711 --to 1 --json

It changes nothing. It reads all processes of the host, because merged frames may belong to any of them. Each machine \
is predicted as if it alone were placed. It fits if its new nodes have room for its memory, and if no more vCPUs of \
virtual machines would run there than they may; those of other machines count where they run now.

If its cpuset, the affinity of its virtual CPUs or a memory policy forbids a node, that is named, and the figures are \
those after a change of it.

Exit status: 0 done, 1 a machine does not fit or may not use its new nodes, 2 usage error or failure, 3 something could \
not be read.";

/// Arguments of `numa`.
#[derive(Args, Debug)]
pub struct NumaArguments {
    #[command(subcommand)]
    command: NumaCommand,
}

#[derive(Debug, Subcommand)]
enum NumaCommand {
    /// Show on which NUMA nodes memory is, and where threads run
    Map(MapArguments),
    /// Plan on which NUMA nodes virtual machines should have their memory and vCPUs
    Plan(PlanArguments),
    /// Predict what placing machines on other nodes would mean
    Predict(PredictArguments),
    /// Place virtual machines as planned or requested: CPUs of their threads, then their memory
    Apply(ApplyArguments),
    /// Compare the machines that were placed with the plan, and advise on NUMA balancing
    Verify(VerifyArguments),
    /// Undo placements since boot, of all machines or of some
    Undo(UndoArguments),
}

#[derive(Args, Debug)]
#[command(after_help = MAP_EXAMPLES)]
struct MapArguments {
    /// Processes in the tables
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    #[command(flatten)]
    monitors: MonitorOptions,
    /// Print JSON (see `pagefold schema numa-map`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// What a plan may use.
#[derive(Args, Debug)]
pub(super) struct PlanOptions {
    /// vCPUs that a node may run for each of its CPUs
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = parse_vcpus_per_cpu)]
    pub(super) vcpus_per_cpu: f64,
    /// Share of each node's memory that stays free
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = parse_cpu_share)]
    pub(super) headroom: f64,
    /// Time limit for the search of a better plan
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration)]
    pub(super) deadline: Duration,
    /// Measure for this time which memory the machines access, by DAMON, and weight it accordingly
    #[arg(long, value_name = "TIME", value_parser = parse_measuring_time)]
    pub(super) working_set: Option<Duration>,
}

#[derive(Args, Debug)]
#[command(after_help = PLAN_EXAMPLES)]
struct PlanArguments {
    #[command(flatten)]
    plan: PlanOptions,
    /// List the machines that stay, too
    #[arg(long)]
    all_machines: bool,
    /// Print JSON (see `pagefold schema numa-plan`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

#[derive(Args, Debug)]
#[command(after_help = PREDICT_EXAMPLES)]
struct PredictArguments {
    /// The node of the machines, or a node for each virtual node (0=1,1=0)
    #[arg(long, value_name = "NODES")]
    to: RequestedNodes,
    /// Bytes of memory that are moved in a second
    #[arg(long, value_name = "BYTES", default_value = "1GiB", value_parser = parse_bandwidth)]
    bandwidth: Bytes,
    /// vCPUs that a node may run for each of its CPUs
    #[arg(long, value_name = "N", default_value_t = 1.0, value_parser = parse_vcpus_per_cpu)]
    vcpus_per_cpu: f64,
    /// Share of each node's memory that stays free
    #[arg(long, value_name = "PERCENT", default_value = "5%", value_parser = parse_cpu_share)]
    headroom: f64,
    /// Print JSON (see `pagefold schema numa-predict`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// The least time of a measurement: ten sampling intervals.
const MIN_MEASURING_TIME: Duration = Duration::from_secs(1);

fn parse_measuring_time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time < MIN_MEASURING_TIME { Err("give at least 1s; 10s is accurate".to_owned()) } else { Ok(time) }
}

/// Run the subcommand.
pub fn run(options: &NumaArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        NumaCommand::Map(options) => run_map(options, global),
        NumaCommand::Plan(options) => run_plan(options, global),
        NumaCommand::Predict(options) => run_predict(options, global),
        NumaCommand::Apply(options) => numa_placement::run_apply(options, global),
        NumaCommand::Verify(options) => numa_placement::run_verify(options, global),
        NumaCommand::Undo(options) => numa_placement::run_undo(options, global),
    }
}

/// Read the map of the selected processes. With `monitors`, QEMU's monitors are asked.
pub(super) fn read_map(
    host: &dyn Host,
    targets: &ProcessOptions,
    monitors: Option<MonitorAccess>,
    global: &GlobalOptions,
) -> anyhow::Result<NumaMap> {
    read_map_and_frames(host, targets, monitors, global).map(|(map, _)| map)
}

fn read_map_and_frames(
    host: &dyn Host,
    targets: &ProcessOptions,
    monitors: Option<MonitorAccess>,
    global: &GlobalOptions,
) -> anyhow::Result<(NumaMap, Vec<FrameReader>)> {
    let selection = host_selection::process_selection(targets, global)?;
    let (map, readers) =
        map::read_map_and_frames(host, &selection, monitors).map_err(|error| explain_map_error(error, global))?;
    host_selection::check_any_seen(host, !map.processes.is_empty(), &selection, &map.unscanned, global)?;
    Ok((map, readers))
}

fn explain_map_error(error: MapError, global: &GlobalOptions) -> anyhow::Error {
    match error {
        MapError::Nodes { .. } if global.host != "live" => {
            anyhow!("the recording lacks the NUMA nodes of its host: record it again with this version of pagefold")
        }
        error => error.into(),
    }
}

fn run_map(options: &MapArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let started = Instant::now();
    let monitors = options.monitors.access();
    let (map, readers) = read_map_and_frames(&*host, &options.targets, Some(monitors), global)?;
    let owners = map::read_frame_owners(&*host, &readers)
        .map_err(|source| explain_map_error(MapError::Nodes { host: host.describe(), source }, global))?;
    let report =
        NumaMapReport::new(host.describe(), host.page_size(), (&map, &owners), started.elapsed().as_secs_f64());
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        output::print_stdout(&text::map::render(&report, options.top, remedy, output::stdout_style(global)))?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// Read the map of the machines to place, and of the machines beside them. Without a selection by number, only virtual
/// machines are placed.
pub(super) fn read_placeable_map(
    host: &dyn Host,
    targets: &ProcessOptions,
    global: &GlobalOptions,
) -> anyhow::Result<NumaMap> {
    let mut map = read_map(host, targets, Some(MonitorAccess::Socket), global)?;
    if targets.pid.is_empty() {
        map.processes.retain(|placement| placement.process.identity.vm.is_some());
        if map.processes.is_empty() {
            if !targets.vm.is_empty() {
                return Err(host_selection::no_such_vm(host, &targets.vm));
            }
            bail!("no virtual machine is running: name other processes with --pid to place them");
        }
    }
    if targets.selects_some() {
        map::add_other_machines(host, &mut map, Some(MonitorAccess::Socket))
            .map_err(|error| explain_map_error(error, global))?;
    }
    if global.host == "live" {
        let kept = apply::read_kept_cpus(host, &global.state).context("cannot read earlier placements")?;
        apply::restore_permitted_cpus(&mut map, &kept);
        placement_record::mark_placed(host, &global.state, &mut map)
            .context("cannot read the record of placements: move numa-placement.json out of the state directory")?;
    }
    Ok(map)
}

/// The prices of the configuration of the daemon.
fn configured_prices(global: &GlobalOptions) -> anyhow::Result<OperatorPrices> {
    Ok(Config::load(global)?.placement_prices)
}

impl PlanOptions {
    /// The planning problem of a map.
    pub(super) fn problem(
        &self,
        map: &NumaMap,
        page_size: PageSize,
        global: &GlobalOptions,
    ) -> anyhow::Result<PlacementProblem> {
        let prices = configured_prices(global)?;
        let limits = PlanLimits { vcpus_per_cpu: self.vcpus_per_cpu, headroom_share: self.headroom, prices };
        Ok(placement_problem(map, page_size, limits))
    }

    /// Measure the working sets of the machines of a map, if requested, and weight their problem by them.
    pub(super) fn weight_problem(
        &self,
        host: &dyn Host,
        (map, problem): (&NumaMap, &mut PlacementProblem),
        global: &GlobalOptions,
        stop: &AtomicBool,
    ) -> anyhow::Result<HotnessSource> {
        let Some(duration) = self.working_set else { return Ok(HotnessSource::RunTime) };
        let machines = MachineToMeasure::all(map, problem.vms.iter().map(|vm| vm.parts.len()));
        match measure_working_sets(host, &machines, duration, global, stop) {
            Ok(working_sets) => {
                weight_by_working_sets(problem, &working_sets);
                Ok(HotnessSource::WorkingSets(working_sets))
            }
            Err(error @ MeasureError::NotStopped(_)) => Err(error.into()),
            Err(MeasureError::Interrupted) => {
                bail!("interrupted during the measurement: DAMON is off again, and no plan was made")
            }
            Err(error) => Ok(HotnessSource::NotMeasured(session::chain(&error))),
        }
    }

    /// Plan the placement of all machines. The search ends after the time limit of this machine's clock: that of a simulated
    /// host stands still meanwhile.
    pub(super) fn make_plan(&self, problem: &PlacementProblem) -> PlacementPlan {
        let started = Instant::now();
        plan::plan(problem, &mut || started.elapsed() >= self.deadline)
    }

    /// Check that what is to be measured runs on this host.
    pub(super) fn check_measurable(&self, global: &GlobalOptions) -> anyhow::Result<()> {
        if self.working_set.is_some() && global.host != "live" {
            bail!(
                "--working-set: only machines that run on this host can be measured; leave it out, or leave --host out"
            );
        }
        Ok(())
    }
}

fn measure_working_sets(
    host: &dyn Host,
    machines: &[MachineToMeasure],
    duration: Duration,
    global: &GlobalOptions,
    stop: &AtomicBool,
) -> Result<Vec<Vec<WorkingSet>>, MeasureError> {
    let (mut session, undone, failed) = Session::begin(host, &global.state, ResourceClass::Settings)?;
    recover::print_leftover(&undone, &failed);
    working_set::measure(&mut session, machines, duration, stop)
}

fn run_plan(options: &PlanArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    options.plan.check_measurable(global)?;
    let host = host_selection::open_host(global)?;
    let started = Instant::now();
    let map = read_placeable_map(&*host, &options.targets, global)?;
    let mut problem = options.plan.problem(&map, host.page_size(), global)?;
    let hotness = match options.plan.working_set {
        Some(_) => {
            let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
            options.plan.weight_problem(&*host, (&map, &mut problem), global, &stop)?
        }
        None => HotnessSource::RunTime,
    };
    let plan = options.plan.make_plan(&problem);
    numa_placement::warn_of_rivals(&*host);
    let seconds = started.elapsed().as_secs_f64();
    let report = NumaPlanReport::new(host.describe(), host.page_size(), &map, (&problem, &plan), &hotness, seconds);
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        let text = text::plan::render(&report, options.all_machines, remedy, output::stdout_style(global));
        output::print_stdout(&text)?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

fn run_predict(options: &PredictArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if !options.targets.selects_some() {
        bail!("select the machines to predict with --vm or --pid");
    }
    let host = host_selection::open_host(global)?;
    let selected = read_map(&*host, &options.targets, None, global)?;
    let everything = host_selection::process_selection(&ProcessOptions::default(), global)?;
    let (map, readers) = map::read_map_and_frames(&*host, &everything, Some(MonitorAccess::Socket))
        .map_err(|error| explain_map_error(error, global))?;
    let limits = PlanLimits {
        vcpus_per_cpu: options.vcpus_per_cpu,
        headroom_share: options.headroom,
        prices: configured_prices(global)?,
    };
    let problem = placement_problem(&map, host.page_size(), limits);
    let is_selected = |position: &usize| {
        let id = map.processes[*position].process.id;
        selected.processes.iter().any(|placement| placement.process.id == id)
    };
    let targets = numa_placement::requested_targets(&map, &problem, &options.to, is_selected)?;
    let predict = |target: MachineTarget| {
        Ok((target.clone(), predict::predict(&*host, (&map, &problem), readers.clone(), &target, options.headroom)?))
    };
    let predictions: Reading<Vec<_>> = targets.into_iter().map(|(target, _)| predict(target)).collect();
    let predictions = predictions.map_err(|why| anyhow!("cannot read the NUMA nodes of {}: {why}", host.describe()))?;
    let report = NumaPredictReport::new(host.describe(), host.page_size(), options.bandwidth, &map, &predictions);
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        let remedy = host_selection::permission_remedy(global);
        output::print_stdout(&text::predict::render(&report, remedy, output::stdout_style(global)))?;
    }
    Ok(match (report.has_obstacle(), report.unscanned_processes.is_empty()) {
        (true, _) => CommandOutcome::NegativeVerdict,
        (false, false) => CommandOutcome::Partial,
        (false, true) => CommandOutcome::Done,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct PlanCommandLine {
        #[command(flatten)]
        plan: PlanOptions,
    }

    #[test]
    fn defaults_of_options_are_those_of_the_planner() {
        let PlanOptions { vcpus_per_cpu, headroom, .. } = PlanCommandLine::parse_from(["plan"]).plan;
        let limits = PlanLimits { vcpus_per_cpu, headroom_share: headroom, ..PlanLimits::default() };
        assert_eq!(limits, PlanLimits::default());
    }
}
