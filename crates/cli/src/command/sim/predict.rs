//! `pagefold sim predict`: what policies would save on this host, or on a recorded one, in the next hours.

use super::compare::{PolicyRunArguments, chosen_policies};
use super::daemon_run::daemon_runner;
use super::from_recording::{ScanArguments, scan_host};
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, output, progress};
use anyhow::Context;
use clap::Args;
use pagefold_output::wire;
use pagefold_sim::decide::estimate::{ScenarioEstimate, WritePattern};
use pagefold_sim::decide::known_layouts::{MAX_RANKED_PAGES, add_known_layouts};
use pagefold_sim::decide::policies::ComparedPolicy;
use pagefold_sim::decide::what_if::{Change, apply, parse_changes};
use pagefold_sim::estimate_notes;
use pagefold_sim::prediction::{PredictedScenarios, predict};
use pagefold_sim::text::prediction::render_prediction;
use pagefold_sim::wire::prediction::{PredictionContext, SimPredictReport};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold sim predict --vm '*'
  sudo pagefold sim predict --name 'qemu-*' --policy default,whole:2000/20 --hours 2 --pass-interval 1min
  sudo pagefold sim predict --vm 'web-*' --what-if 'ram=2x; vms+=50 template=web'
  pagefold --host recording:/tmp/host sim predict --seeds 5 --json

The host is scanned as by `pagefold sim from-recording`, and simulated under each policy, without a change of the \
host. Each process keeps its pages in their order. If --what-if adds machines, or the processes have more than 2 TiB, \
all are drawn from templates instead, as in a scenario of `pagefold sim from-recording`. All figures are those of a \
model: docs/simulator.md says how far real hosts were from it.

The expected values assume that the pages that changed during the scan are written again and again, and no others. The \
ranges also have runs in which any page is written, at a rate at which as many change between two passes. A longer \
--pass-interval brings the two closer.

--what-if changes the host first, by parts separated by `;`:
  ram=2x, ram=1TiB         its memory
  vms+=50 template=web     more machines of a template, like the others, also in what they share
  vms-=5 template=web      fewer machines of a template
  writes=0.5x              all rates of writes
`pagefold sim from-recording` shows the templates. `template=` may be missing if there is one only.

Exit status: 0 done, 2 refused or failed, 3 some processes could not be read.";

/// What predictions for very much memory assume beside the others.
const TEMPLATES_ASSUMPTION: &str = "The model has too few contents for the pages of all processes in their order: all \
                                    machines are drawn from templates.";

/// The same, for the runs in which any page is written.
const ANY_PAGES_ASSUMPTION: &str = "The model has too few contents for writes of any page: the ranges have machines that \
                                    are drawn from templates.";

/// What predictions with the daemon assume beside the others.
const GUIDED_ASSUMPTION: &str = "With guided, each process is a virtual machine, which is a trust domain of its own by \
                                 default, and nothing is enrolled at first. The daemon could also enroll memory that is \
                                 left out above: --all-memory includes it.";

/// Arguments of `sim predict`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PredictArguments {
    /// Hours to predict
    #[arg(long, value_name = "HOURS", default_value = "24", value_parser = parse_hours)]
    hours: Duration,
    /// Policies, as of `sim compare` [default: default, ksmtuned, and advisor if the kernel has it]
    #[arg(long, value_name = "POLICY", value_delimiter = ',', value_parser = ComparedPolicy::parse)]
    policy: Vec<ComparedPolicy>,
    /// Change the host first, such as 'ram=2x; vms+=50 template=web'
    #[arg(long, value_name = "CHANGES", value_parser = parse_what_if)]
    what_if: Option<WhatIf>,
    #[command(flatten)]
    runs: PolicyRunArguments,
    #[command(flatten)]
    scan: ScanArguments,
    /// Print JSON (see `pagefold schema sim-predict`)
    #[arg(long)]
    json: bool,
}

/// Changes of the host, and their text.
#[derive(Clone, Debug)]
struct WhatIf {
    text: String,
    changes: Vec<Change>,
}

/// Predict.
pub fn run(options: &PredictArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let run_daemon = daemon_runner(&options.policy, global)?;
    let scanned = scan_host(&options.scan, MAX_RANKED_PAGES, global)?;
    let changes = options.what_if.as_ref().map_or(&[][..], |what_if| &what_if.changes);
    let estimate = |pattern| -> anyhow::Result<(ScenarioEstimate, bool)> {
        let mut found = scanned.estimate(pattern, options.hours)?;
        let has_layouts = add_known_layouts(&mut found.scenario, &scanned.observation.host, pattern);
        for change in changes {
            apply(&mut found.scenario, change).context("--what-if")?;
        }
        Ok((found, has_layouts))
    };
    let (expected, has_layouts) = estimate(WritePattern::SamePages)?;
    let (ScenarioEstimate { scenario: any_pages, .. }, all_have_layouts) = estimate(WritePattern::AnyPages)?;
    let mut assumptions = estimate_notes::unknown(&scanned.observation, &expected, &scanned.census);
    if !has_layouts {
        assumptions.push(TEMPLATES_ASSUMPTION.to_owned());
    } else if !all_have_layouts {
        assumptions.push(ANY_PAGES_ASSUMPTION.to_owned());
    }
    if run_daemon.is_some() {
        assumptions.push(GUIDED_ASSUMPTION.to_owned());
    }
    let has_writes = any_pages.templates.iter().any(|template| !template.writes.is_empty());
    let scenarios = PredictedScenarios { expected: &expected.scenario, any_pages: has_writes.then_some(&any_pages) };
    let scenario = &expected.scenario;
    let plan = options.runs.plan(scenario, run_daemon);
    let mut policies = chosen_policies(&options.policy, scenario)?;
    if options.policy.is_empty() {
        policies.retain(|policy| *policy != ComparedPolicy::FlatOut);
    }
    let total_ms = scenario.duration_ms * (policies.len() * plan.seeds.len()) as u64 * scenarios.runs();
    let runs = progress::run_comparison_with_progress(total_ms, |simulated_ms| {
        predict(&scenarios, &policies, &plan, simulated_ms)
    })
    .context("cannot simulate the host")?;
    let context = PredictionContext {
        host: scanned.name.clone(),
        what_if: options.what_if.as_ref().map(|what_if| what_if.text.clone()),
        exactness: plan.exactness,
        seeds: plan.seeds,
        pass_seconds: scanned.observation.host.pass_seconds,
        assumptions,
    };
    let report = SimPredictReport::new(&expected, context, &runs);
    output::print_stdout(&if options.json {
        wire::to_json(&report)
    } else {
        render_prediction(&report, output::stdout_style(global))
    })?;
    Ok(if scanned.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

fn parse_what_if(text: &str) -> Result<WhatIf, String> {
    let changes = parse_changes(text).map_err(|error| error.to_string())?;
    Ok(WhatIf { text: text.trim().to_owned(), changes })
}

/// A few seconds.
const MIN_HOURS: f64 = 0.001;
/// Hours in a year.
const MAX_HOURS: f64 = 8784.0;

fn parse_hours(text: &str) -> Result<Duration, String> {
    let hours = text.parse().ok().filter(|hours: &f64| (MIN_HOURS..=MAX_HOURS).contains(hours));
    let hours = hours.ok_or_else(|| format!("{text}: give hours, {MIN_HOURS} to {MAX_HOURS}, such as 24"))?;
    Ok(Duration::from_millis((hours * 3.6e6).round() as u64))
}
