//! `pagefold sim tune`: a policy for a scenario, found by simulations.

use super::compare::{PolicyRunArguments, read_scenario};
use super::daemon_run::daemon_runner;
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, output, progress};
use anyhow::Context;
use clap::{Args, ValueEnum};
use pagefold_output::wire;
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::tuning::TuningGoal;
use pagefold_sim::text::tuning::render_tuning;
use pagefold_sim::tuning::{PolicySearch, most_simulations, search};
use pagefold_sim::wire::tuning::SimTuneReport;

const EXAMPLES: &str = "\
Examples:
  pagefold sim tune lab-48
  pagefold sim tune lab-48 --goal time --max-cpu 0.5
  pagefold sim tune my-host.toml --goal saved --seeds 3 --json
  pagefold sim tune lab-48-slow --daemon guided:across-domains

SCENARIO is a shipped scenario (`pagefold sim compare --list`) or a TOML file. Policies of a grid are simulated first: \
batches of 100 to 100000 pages every 20 ms, the kernel's advisor with targets of 20 s to half an hour, ksmtuned and \
flat-out. With --daemon, the grid also has bounds on the daemon's CPU time, which matter once it has spent its burst. \
Then policies near the best one are simulated, nearer in each round. Nothing of this host is read or changed.

Goals: saved (the most memory over time), cpu (the least CPU time that saves 90 % of that), time (the shortest \
time to 90 % of the duplicates).

Exit status: 0 done, 1 no policy reaches the goal, 2 refused or failed.";

/// Arguments of `sim tune`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct TuneArguments {
    /// A shipped scenario or a TOML file
    #[arg(value_name = "SCENARIO")]
    scenario: String,
    /// What to search for
    #[arg(long, value_enum, default_value = "cpu")]
    goal: GoalArgument,
    /// CPU time at most, in CPUs, on average over the scenario
    #[arg(long, value_name = "CPUS", value_parser = parse_cpus)]
    max_cpu: Option<f64>,
    /// Rounds of the search after the grid
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=20))]
    rounds: u32,
    /// Also search the bound on CPU time of the daemon: guided or guided:across-domains, as in `sim compare`
    #[arg(long, value_name = "DAEMON", value_parser = parse_daemon)]
    daemon: Option<ComparedPolicy>,
    #[command(flatten)]
    runs: PolicyRunArguments,
    /// Print JSON (see `pagefold schema sim-tune`)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GoalArgument {
    Saved,
    Cpu,
    Time,
}

/// Search.
pub fn run(options: &TuneArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let scenario = read_scenario(&options.scenario)?;
    let run_daemon = daemon_runner(options.daemon.as_slice(), global)?;
    let goal = match options.goal {
        GoalArgument::Saved => TuningGoal::Saved,
        GoalArgument::Cpu => TuningGoal::Cpu,
        GoalArgument::Time => TuningGoal::Time,
    };
    let search_plan = PolicySearch {
        goal,
        daemon: options.daemon.clone(),
        max_cores: options.max_cpu,
        rounds: options.rounds,
        plan: options.runs.plan(&scenario, run_daemon),
    };
    let total_ms = scenario.duration_ms * most_simulations(&scenario, &search_plan);
    let tried =
        progress::run_comparison_with_progress(total_ms, |simulated_ms| search(&scenario, &search_plan, simulated_ms))
            .with_context(|| format!("cannot simulate {}", options.scenario))?;
    let report = SimTuneReport::new(&options.scenario, &scenario, &search_plan, &tried);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        render_tuning(&report, goal, output::stdout_style(global))
    })?;
    Ok(if report.choice.is_some() { CommandOutcome::Done } else { CommandOutcome::NegativeVerdict })
}

fn parse_daemon(text: &str) -> Result<ComparedPolicy, String> {
    let policy = ComparedPolicy::parse(text)?;
    let is_without_bound = matches!(policy, ComparedPolicy::Guided { cpu_permille: None, .. });
    if is_without_bound { Ok(policy) } else { Err(format!("{text}: give guided or guided:across-domains")) }
}

fn parse_cpus(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|cpus: &f64| *cpus > 0.0 && cpus.is_finite())
        .ok_or_else(|| format!("{text}: give a number of CPUs above 0, such as 0.5"))
}
