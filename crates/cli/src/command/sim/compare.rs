//! `pagefold sim compare`: a scenario under several KSM policies, by the model of ksmd.

use super::daemon_run::daemon_runner;
use crate::command_line::{GlobalOptions, parquet_path_parser};
use crate::{CommandOutcome, output, progress};
use anyhow::{Context, bail};
use clap::Args;
use pagefold_output::wire;
use pagefold_sim::comparison::{DaemonRunner, SimulationPlan, compare};
use pagefold_sim::decide::host_state::Exactness;
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::scale::divide_memory;
use pagefold_sim::decide::scenario::Scenario;
use pagefold_sim::picture;
use pagefold_sim::scenario::{SHIPPED, parse_scenario, shipped_text};
use pagefold_sim::text::comparison::render_comparison;
use pagefold_sim::wire::comparison::SimCompareReport;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  pagefold sim compare --list
  pagefold sim compare lab-48 --policy default,ksmtuned,flat-out
  pagefold sim compare lab-48 --policy whole:2000/20,whole:20000/20 --seeds 5 --picture lab.svg
  pagefold sim compare lab-48 --policy flat-out,guided:across-domains
  pagefold sim compare lab-cloud --scale 64 --policy default,advisor,guided:across-domains
  pagefold sim compare lab-48 --print > my-host.toml
  pagefold sim compare my-host.toml --json

SCENARIO is a shipped scenario or a TOML file; docs/simulator.md describes the format. Nothing of this host is read or \
changed. All figures are those of a model: docs/simulator.md says how exact it is, and what it leaves out.

Policies: default (100 pages every 20 ms), ksmtuned, advisor or advisor:SECONDS (the kernel's scan-time advisor), \
flat-out, whole:PAGES/SLEEPMS (fixed pages_to_scan and sleep_millisecs), guided (pagefold's daemon by the \
configuration, in mode act; each machine is a trust domain by default), guided:across-domains (it merges pages of all \
machines, as the other policies do). Append :PERCENT% to either to \
set the daemon's bound on CPU time, in percent of one CPU: guided:5%.

--scale N makes large hosts fast to simulate. Machines keep their number, arrivals and lifetimes; their writes, the growth \
of their page cache, the pace of policies and the daemon's bound are divided by N. flat-out keeps a whole CPU. CPU time and savings \
are those of the part: N times as much for the whole host.";

/// Arguments of `sim compare`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct CompareArguments {
    /// A shipped scenario (see --list) or a TOML file
    #[arg(value_name = "SCENARIO", required_unless_present = "list")]
    scenario: Option<String>,
    /// List the shipped scenarios
    #[arg(long)]
    list: bool,
    /// Print the text of the scenario, to be changed, and simulate nothing
    #[arg(long, conflicts_with = "list")]
    print: bool,
    /// Policies to compare [default: default, ksmtuned, flat-out, and advisor if the scenario's kernel has it]
    #[arg(long, value_name = "POLICY", value_delimiter = ',', value_parser = ComparedPolicy::parse)]
    policy: Vec<ComparedPolicy>,
    /// Simulate one Nth of the memory of the host and its machines, at one Nth of all rates
    #[arg(long, value_name = "N", default_value = "1", conflicts_with_all = ["list", "print"])]
    scale: NonZeroU32,
    #[command(flatten)]
    runs: PolicyRunArguments,
    /// Draw savings and ksmd's CPU time over time
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Write every sample to a Parquet file; needs a build with the feature `parquet`
    #[arg(long, value_name = "FILE", value_parser = parquet_path_parser())]
    parquet: Option<PathBuf>,
    /// Print JSON (see `pagefold schema sim-compare`)
    #[arg(long)]
    json: bool,
}

/// How policies are simulated.
#[derive(Args, Debug)]
pub struct PolicyRunArguments {
    /// Runs of each policy: with the scenario's seed and the next ones
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    seeds: u64,
    /// Let pages that change during a scan act as in the kernel: slower, for hosts of some gigabytes
    #[arg(long)]
    exact: bool,
    /// Simulations at the same time, each with memory of its own [default: the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,
}

impl PolicyRunArguments {
    /// How policies are simulated.
    pub fn plan(&self, scenario: &Scenario, run_daemon: Option<Box<DaemonRunner>>) -> SimulationPlan {
        let available = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        SimulationPlan {
            // The scenario's seed, and the next ones.
            seeds: (0..self.seeds).map(|further| scenario.seed.wrapping_add(further)).collect(),
            exactness: if self.exact { Exactness::Exact } else { Exactness::Approximate },
            threads: self.threads.map_or_else(available, usize::from),
            run_daemon,
        }
    }
}

/// Compare.
pub fn run(options: &CompareArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let style = output::stdout_style(global);
    if options.list {
        let mut table = style.new_table(&["scenario", "description"]);
        for (name, text) in SHIPPED {
            table.add_row([name.to_owned(), parse_scenario(text)?.description]);
        }
        output::print_stdout(&style.render_table(&table))?;
        return Ok(CommandOutcome::Done);
    }
    let name = options.scenario.as_deref().unwrap_or_default();
    let text = scenario_text(name)?;
    if options.print {
        output::print_stdout(&text)?;
        return Ok(CommandOutcome::Done);
    }
    let mut scenario = parse(name, &text)?;
    if options.scale.get() > 1 {
        divide_memory(&mut scenario, options.scale);
        scenario.description.push_str(&format!(" (1/{} of the memory)", options.scale));
    }
    let policies = chosen_policies(&options.policy, &scenario)?;
    let plan = options.runs.plan(&scenario, daemon_runner(&policies, global)?);
    let total_ms = scenario.duration_ms * (policies.len() * plan.seeds.len()) as u64;
    let runs = progress::run_comparison_with_progress(total_ms, |simulated_ms| {
        compare(&scenario, &policies, &plan, simulated_ms)
    })
    .with_context(|| format!("cannot simulate {name}"))?;
    if let Some(path) = &options.picture {
        let title = format!("{name}: {}", scenario.description);
        let svg = picture::draw(&title, scenario.duration_ms as f64 / 1e3, &runs);
        std::fs::write(path, svg).with_context(|| format!("cannot write the picture {}", path.display()))?;
    }
    #[cfg(feature = "parquet")]
    if let Some(path) = &options.parquet {
        pagefold_sim::parquet::write_samples(&runs, &plan.seeds, path)
            .with_context(|| format!("cannot write the samples to {}", path.display()))?;
    }
    let report = SimCompareReport::new(name, &scenario, &plan, &runs);
    output::print_stdout(&if options.json { wire::to_json(&report) } else { render_comparison(&report, style) })?;
    Ok(CommandOutcome::Done)
}

/// The policies of the command line, or the published ones.
pub fn chosen_policies(given: &[ComparedPolicy], scenario: &Scenario) -> anyhow::Result<Vec<ComparedPolicy>> {
    let kernel = scenario.host.kernel;
    if let Some(policy) = given.iter().find(|policy| !policy.is_present(kernel)) {
        bail!(
            "{policy}: Linux {}.{} has no scan-time advisor: choose another policy, or give the scenario a kernel from \
             6.8 on",
            kernel.major,
            kernel.minor
        );
    }
    Ok(if given.is_empty() { ComparedPolicy::published(kernel) } else { given.to_vec() })
}

/// The shipped scenario of a name, or that of a file.
pub fn read_scenario(name: &str) -> anyhow::Result<Scenario> {
    parse(name, &scenario_text(name)?)
}

fn parse(name: &str, text: &str) -> anyhow::Result<Scenario> {
    parse_scenario(text).with_context(|| format!("cannot use the scenario {name}"))
}

fn scenario_text(name: &str) -> anyhow::Result<String> {
    if let Some(text) = shipped_text(name) {
        return Ok(text.to_owned());
    }
    if !Path::new(name).exists() {
        bail!(
            "there is neither a shipped scenario nor a file {name}: `pagefold sim compare --list` lists the scenarios"
        );
    }
    std::fs::read_to_string(name).with_context(|| format!("cannot read the scenario {name}"))
}
