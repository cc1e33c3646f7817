//! `pagefold vcpu sim`: what policies of scheduling would do to over-committed vCPUs, by a model.

use super::{online_cpus, parse_interval, read_machines, status};
use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use pagefold_output::wire;
use pagefold_vcpu::decide::model::calibration::{CalibrationEffort, residuals};
use pagefold_vcpu::decide::model::capacity::{self, CapacitySettings, KNEE_LOSS, MeasuredVm};
use pagefold_vcpu::decide::model::costs::model_constants;
use pagefold_vcpu::decide::model::{Kernel, Scenario, SchedulingPolicy, SimulationSettings, simulate};
use pagefold_vcpu::decide::ready_time::usage;
use pagefold_vcpu::picture::svg::{self, SchedulePanel};
use pagefold_vcpu::scenario::{
    DescribedScenario, ScenarioChanges, WorkloadPreset, parse_scenario, shipped_scenarios, shipped_text,
};
use pagefold_vcpu::wire::sim::{
    CapacityCurveReport, CapacityVmReport, ModelNote, NamedScenario, VcpuCapacityReport, VcpuResidualsReport,
    VcpuSimReport,
};
use pagefold_vcpu::{sample, text};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  pagefold vcpu sim --list
  pagefold vcpu sim dbench-8x20 --kernel 3.6
  pagefold vcpu sim dbench-8x20 --policy plain,gang --cpus 40 --vms 4 --vcpus 20
  pagefold vcpu sim my-host.toml --kernel both --svg policies.svg
  sudo pagefold vcpu sim capacity
  pagefold vcpu sim residuals

SCENARIO is a shipped scenario or a TOML file. It reads and changes nothing of this host, except `capacity` without a \
scenario, which reads its virtual machines. The model explains which policy loses how much, and why; it does not predict \
the throughput of a program.";

const CAPACITY_EXAMPLES: &str = "\
Examples:
  sudo pagefold vcpu sim capacity                       the machines of this host, observed for two seconds
  sudo pagefold vcpu sim capacity --vm 'web*' --copies 8
  pagefold --host recording:DIR vcpu sim capacity
  pagefold vcpu sim capacity --scenario shootdown-4x16 --policy plain,gang --json

The machines are there once, twice, and so on. Their vCPUs need the CPU as often as observed; what they do meanwhile \
cannot be observed, and --workload says it.";

/// Longest time to simulate.
const MAX_SECONDS: Duration = Duration::from_secs(3_600);

/// How much of the schedules a picture shows, in nanoseconds.
const PICTURE_NS: u64 = 60_000_000;

/// Arguments of `vcpu sim`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct VcpuSimArguments {
    #[command(subcommand)]
    command: Option<SimCommand>,
    /// A shipped scenario (see --list) or a TOML file
    #[arg(value_name = "SCENARIO", required_unless_present = "list")]
    scenario: Option<String>,
    /// List the shipped scenarios
    #[arg(long)]
    list: bool,
    /// Print the text of the scenario, to be changed, and simulate nothing
    #[arg(long, conflicts_with = "list")]
    print: bool,
    #[command(flatten)]
    model: ModelOptions,
    /// CPUs of the host, instead of the scenario's
    #[arg(long, value_name = "N")]
    cpus: Option<u32>,
    /// Machines of the first kind; others are left out
    #[arg(long, value_name = "N")]
    vms: Option<u32>,
    /// vCPUs of each machine
    #[arg(long, value_name = "N")]
    vcpus: Option<u32>,
    /// Draw the schedules of all policies side by side
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON (see `pagefold schema vcpu-sim`)
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum SimCommand {
    /// How far a host can be over-committed with its virtual machines, and what each policy would bring
    Capacity(CapacityArguments),
    /// Compare the model with published measurements
    Residuals(ResidualsArguments),
}

#[derive(Args, Debug)]
struct ModelOptions {
    /// Policies to compare
    #[arg(
        long,
        value_name = "POLICY",
        value_enum,
        value_delimiter = ',',
        default_value = "plain,ple,spread,throttled,gang"
    )]
    policy: Vec<PolicyName>,
    /// The modeled kernel
    #[arg(long, value_enum, default_value = "today")]
    kernel: KernelName,
    /// Time to simulate for each policy
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_simulated_time)]
    seconds: Duration,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PolicyName {
    /// The scheduler alone
    #[value(aliases = ["eevdf", "cfs", "off"])]
    Plain,
    /// Exits of spinning vCPUs, each with a directed yield
    Ple,
    /// The same with siblings on different run queues
    Spread,
    /// One directed yield a tick and machine, else plain yields, with siblings on different run queues
    Throttled,
    /// All vCPUs of a machine in one time slice
    Gang,
}

impl PolicyName {
    fn policy(self) -> SchedulingPolicy {
        match self {
            Self::Plain => SchedulingPolicy::Plain,
            Self::Ple => SchedulingPolicy::PauseLoopExit,
            Self::Spread => SchedulingPolicy::Spread,
            Self::Throttled => SchedulingPolicy::ThrottledYield,
            Self::Gang => SchedulingPolicy::Gang,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KernelName {
    /// Linux 3.6
    #[value(name = "3.6")]
    Linux36,
    /// Linux 6.18
    Today,
    /// Both
    Both,
}

impl KernelName {
    fn kernels(self) -> &'static [Kernel] {
        match self {
            Self::Linux36 => &[Kernel::Linux36],
            Self::Today => &[Kernel::Today],
            Self::Both => &[Kernel::Linux36, Kernel::Today],
        }
    }
}

#[derive(Args, Debug)]
#[command(after_help = CAPACITY_EXAMPLES)]
struct CapacityArguments {
    #[command(flatten)]
    model: ModelOptions,
    /// Sweep a scenario instead of the machines of the host
    #[arg(long, value_name = "SCENARIO")]
    scenario: Option<String>,
    /// Most copies of the machines
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    copies: u32,
    /// What the machines do while they run
    #[arg(long, value_enum, default_value = "kernel-locks", conflicts_with = "scenario")]
    workload: WorkloadName,
    /// Time over which the machines are observed
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = parse_interval)]
    interval: Duration,
    /// Print JSON (see `pagefold schema vcpu-capacity`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum WorkloadName {
    /// Computing, without locks
    Compute,
    /// Contention for locks of the guest's kernel
    KernelLocks,
    /// TLB shootdowns
    Shootdown,
}

#[derive(Args, Debug)]
struct ResidualsArguments {
    /// Time to simulate for each figure
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_simulated_time)]
    seconds: Duration,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Print JSON (see `pagefold schema vcpu-residuals`)
    #[arg(long)]
    json: bool,
}

fn parse_simulated_time(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text)?;
    if time < Duration::from_millis(10) || time > MAX_SECONDS {
        return Err("give 10ms to 1h".to_owned());
    }
    Ok(time)
}

/// Simulate.
pub fn run(options: &VcpuSimArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        Some(SimCommand::Capacity(options)) => run_capacity(options, global),
        Some(SimCommand::Residuals(options)) => run_residuals(options, global),
        None => run_comparison(options, global),
    }
}

fn open_scenario(name: &str, changes: ScenarioChanges) -> anyhow::Result<(String, DescribedScenario)> {
    let text = match shipped_text(name) {
        Some(text) => text.to_owned(),
        None if !Path::new(name).exists() => {
            bail!(
                "there is neither a shipped scenario nor a file {name}: `pagefold vcpu sim --list` lists the scenarios"
            )
        }
        None => std::fs::read_to_string(name).with_context(|| format!("cannot read the scenario {name}"))?,
    };
    let described = parse_scenario(&text, changes).with_context(|| format!("cannot use the scenario {name}"))?;
    Ok((text, described))
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn run_comparison(options: &VcpuSimArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if options.list {
        output::print_stdout(&text::sim::render_list(&shipped_scenarios()?, output::stdout_style(global)))?;
        return Ok(CommandOutcome::Done);
    }
    let name = options.scenario.as_deref().unwrap_or_default();
    let changes = ScenarioChanges { cpus: options.cpus, vms: options.vms, vcpus: options.vcpus };
    let (scenario_text, described) = open_scenario(name, changes)?;
    if options.print {
        output::print_stdout(&scenario_text)?;
        return Ok(CommandOutcome::Done);
    }
    let scenario = &described.scenario;
    let ModelOptions { policy, kernel, seconds, seed } = &options.model;
    let kept = options.svg.is_some().then_some((0, PICTURE_NS.min(nanoseconds(*seconds))));
    let runs: Vec<_> =
        kernel.kernels().iter().flat_map(|kernel| policy.iter().map(|policy| (*kernel, policy.policy()))).collect();
    let (outcomes, alone, residuals) = progress::run_simulations_with_progress(runs.len() as u64 + 2, |finished| {
        let outcomes: Vec<_> = runs
            .iter()
            .map(|&(kernel, policy)| {
                let mut settings = SimulationSettings::new(kernel, policy, nanoseconds(*seconds), *seed);
                settings.kept_schedule_ns = kept;
                let outcome = simulate(scenario, &settings);
                finished.fetch_add(1, Ordering::Relaxed);
                (kernel, policy, outcome)
            })
            .collect();
        let settings = capacity_settings(&options.model, 1, kernel.kernels()[0]);
        let alone = capacity::measure_alone(scenario, &settings);
        finished.fetch_add(1, Ordering::Relaxed);
        (outcomes, alone, residuals(CalibrationEffort::default()))
    });
    if let (Some(path), Some((_, shown))) = (&options.svg, kept) {
        let titles: Vec<String> =
            outcomes.iter().map(|(kernel, policy, _)| format!("{} ({})", policy.name(), kernel.name())).collect();
        let schedules: Vec<_> = outcomes.iter().map(|(_, _, outcome)| outcome.to_schedule(scenario, shown)).collect();
        let panels: Vec<_> = schedules
            .iter()
            .zip(&titles)
            .map(|(schedule, title)| SchedulePanel { title, schedule, span: (0, shown) })
            .collect();
        let caption = "A model: rows are CPUs; a color for each VM, a brightness for each vCPU.";
        let svg = svg::draw(&panels, caption);
        std::fs::write(path, svg).with_context(|| format!("cannot write the picture {}", path.display()))?;
    }
    let named = NamedScenario { name, description: &described.description, scenario };
    let report = VcpuSimReport::new(named, (seconds.as_secs_f64(), *seed), &alone, &outcomes, &residuals);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::sim::render_comparison(&report, output::stdout_style(global))
    })?;
    Ok(CommandOutcome::Done)
}

fn capacity_settings(options: &ModelOptions, max_copies: u32, kernel: Kernel) -> CapacitySettings {
    CapacitySettings { kernel, max_copies, duration_ns: nanoseconds(options.seconds), seed: options.seed }
}

/// What a capacity is computed for.
struct CapacitySource {
    name: String,
    scenario: Scenario,
    vms: Vec<CapacityVmReport>,
    is_incomplete: bool,
}

fn run_capacity(options: &CapacityArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let &[kernel] = options.model.kernel.kernels() else {
        bail!("--kernel both: a sweep is for one kernel; give 3.6 or today");
    };
    let source = match &options.scenario {
        Some(name) => scenario_source(name)?,
        None => host_source(options, global)?,
    };
    let copies = u64::from(options.copies) * options.model.policy.len() as u64;
    let settings = capacity_settings(&options.model, options.copies, kernel);
    let largest = u64::from(source.scenario.vcpu_count()) * u64::from(options.copies);
    if largest > u64::from(pagefold_vcpu::scenario::MAX_VCPUS) {
        bail!("{largest} vCPUs are too many for the model: give fewer --copies, or select machines with --vm");
    }
    let (curves, alone, residuals) = progress::run_simulations_with_progress(copies + 2, |finished: &AtomicU64| {
        let sweep = |policy: &PolicyName| {
            capacity::sweep(&source.scenario, policy.policy(), &settings, |_| {
                finished.fetch_add(1, Ordering::Relaxed);
            })
        };
        let curves: Vec<_> = options.model.policy.iter().map(sweep).collect();
        let alone = capacity::measure_alone(&source.scenario, &settings);
        (curves, alone, residuals(CalibrationEffort::default()))
    });
    let report = VcpuCapacityReport {
        schema: "pagefold.vcpu-capacity/1",
        model: ModelNote::new(&residuals),
        source: source.name,
        cpus: source.scenario.cpus,
        vcpus: source.scenario.vcpu_count(),
        busy_cpus: alone.busy_cpus,
        kernel: kernel.name(),
        seconds: options.model.seconds.as_secs_f64(),
        seed: options.model.seed,
        knee_loss: KNEE_LOSS,
        vms: source.vms,
        curves: curves.iter().map(CapacityCurveReport::from).collect(),
    };
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::sim::render_capacity(&report, output::stdout_style(global))
    })?;
    Ok(if source.is_incomplete { CommandOutcome::Partial } else { CommandOutcome::Done })
}

fn scenario_source(name: &str) -> anyhow::Result<CapacitySource> {
    let (_, described) = open_scenario(name, ScenarioChanges::default())?;
    let vms = described.scenario.vms.iter();
    let vms = vms.map(|vm| CapacityVmReport { name: vm.name.clone(), vcpus: vm.vcpus, run_share: None }).collect();
    Ok(CapacitySource { name: name.to_owned(), scenario: described.scenario, vms, is_incomplete: false })
}

/// The machines of a host with the shares of time in which their vCPUs needed a CPU.
fn host_source(options: &CapacityArguments, global: &GlobalOptions) -> anyhow::Result<CapacitySource> {
    let host = host_selection::open_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let found = read_machines(&*host, &options.targets, global)?;
    let machines = found.selected();
    let samples = match global.host.strip_prefix("recording:") {
        Some(root) => status::recorded_samples(&*host, Path::new(root), &machines)?,
        None => progress::run_observation_with_progress(options.interval, || {
            sample::observe(&*host, &machines, options.interval, &stop)
        }),
    };
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted during the observation");
    }
    let measured: Vec<MeasuredVm> = machines
        .iter()
        .filter_map(|machine| {
            let usages: Vec<_> = machine.tids().into_iter().filter_map(|tid| usage(&samples, tid)).collect();
            let needed: f64 = usages.iter().map(|usage| usage.run_share() + usage.ready_share()).sum();
            (!usages.is_empty()).then(|| MeasuredVm {
                name: machine.name(),
                vcpus: usages.len() as u32,
                run_share: (needed / usages.len() as f64).min(1.0),
            })
        })
        .collect();
    if measured.is_empty() {
        bail!("the vCPUs of no machine could be observed: `pagefold vcpu status` says why");
    }
    let cpus = u32::try_from(online_cpus(&*host).iter().count()).unwrap_or(u32::MAX);
    if !(1..=pagefold_vcpu::scenario::MAX_CPUS).contains(&cpus) {
        return Err(anyhow!("the model is for 1 to {} CPUs, not {cpus}", pagefold_vcpu::scenario::MAX_CPUS));
    }
    let preset = match options.workload {
        WorkloadName::Compute => WorkloadPreset::Compute,
        WorkloadName::KernelLocks => WorkloadPreset::KernelLocks,
        WorkloadName::Shootdown => WorkloadPreset::Shootdown,
    };
    let vms = measured.iter().map(|vm| CapacityVmReport {
        name: vm.name.clone(),
        vcpus: vm.vcpus,
        run_share: Some(vm.run_share),
    });
    Ok(CapacitySource {
        name: host.describe(),
        vms: vms.collect(),
        is_incomplete: measured.len() < machines.len() || !found.unscanned.is_empty(),
        scenario: capacity::host_scenario(cpus, &measured, preset.workload()),
    })
}

fn run_residuals(options: &ResidualsArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let effort = CalibrationEffort { duration_ns: nanoseconds(options.seconds), seed: options.seed };
    let residuals = progress::run_simulations_with_progress(1, |_| residuals(effort));
    let report = VcpuResidualsReport::new(&residuals, &model_constants());
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        text::sim::render_residuals(&report, output::stdout_style(global))
    })?;
    let fitted_met = report.figures.iter().all(|figure| figure.met || !figure.fitted);
    Ok(if fitted_met { CommandOutcome::Done } else { CommandOutcome::NegativeVerdict })
}
