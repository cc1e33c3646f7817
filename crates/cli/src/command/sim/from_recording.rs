//! `pagefold sim from-recording`: a scenario of this host, or of a recorded one.

use crate::command_line::{GlobalOptions, ProcessOptions, parse_duration};
use crate::{CommandOutcome, host_selection, output, progress, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::Args;
use pagefold_census::results::Census;
use pagefold_census::{CensusOptions, take_census};
use pagefold_recording::Recording;
use pagefold_sim::decide::cost::CostModel;
use pagefold_sim::decide::estimate::{ScenarioEstimate, WritePattern, estimate};
use pagefold_sim::decide::scenario::default_costs;
use pagefold_sim::estimate_notes;
use pagefold_sim::observation::{Observation, ObservedMemory, observe_machines};
use pagefold_sim::scenario::parse_scenario;
use pagefold_sim::scenario_text::write_scenario;
use pagefold_sim::wire::parse_costs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold sim from-recording --name 'qemu-*' -o my-host.toml
  sudo pagefold sim from-recording --vm 'web-*' --pass-interval 1min -o web.toml
  sudo pagefold sim calibrate --json > costs.json; sudo pagefold sim from-recording --costs costs.json -o my-host.toml
  pagefold --host recording:/tmp/host sim from-recording -o recorded.toml
  pagefold sim compare my-host.toml --policy default,whole:2000/20

The memory of the processes is scanned as by `pagefold census`, without a change. A recording of `pagefold record` has \
fingerprints of its pages and is read instead. A report or a Parquet file of `pagefold census` has no fingerprints, so \
it is not enough. The scenario has exactly the mergeable pages of the memory that counts; docs/simulator.md says how \
the rest is estimated. What is not known is printed on standard error and stands at the head of the file.

Exit status: 0 done, 2 refused or failed, 3 some processes could not be read.";

/// Arguments of `sim from-recording`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct FromRecordingArguments {
    /// The file to write; it must not exist [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Virtual time of the scenario
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = parse_duration)]
    duration: Duration,
    #[command(flatten)]
    scan: ScanArguments,
}

/// How the host is scanned.
#[derive(Args, Debug)]
pub struct ScanArguments {
    /// Pause between the two passes that find writes; 0 for one pass. A recording has its own
    #[arg(long, value_name = "TIME", default_value = "500ms", value_parser = parse_duration)]
    pass_interval: Duration,
    /// Number of reading threads [default: one for each CPU]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    scan_threads: Option<u16>,
    /// What ksmd's operations cost: the JSON of `pagefold sim calibrate` [default: as in docs/simulator.md]
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Count all memory that KSM can take, not only the enrolled memory of processes that have some
    #[arg(long)]
    all_memory: bool,
    #[command(flatten)]
    targets: ProcessOptions,
}

impl ScanArguments {
    /// What ksmd's operations cost.
    fn read_costs(&self) -> anyhow::Result<CostModel> {
        let Some(path) = &self.costs else { return Ok(default_costs()) };
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        parse_costs(&text).map_err(|why| {
            anyhow!("{}: {why}: make it with `pagefold sim calibrate --json > {}`", path.display(), path.display())
        })
    }
}

/// A scanned host.
pub struct ScannedHost {
    /// Its name.
    pub name: String,
    /// Its processes.
    pub observation: Observation,
    /// The census.
    pub census: Census,
    costs: CostModel,
}

impl ScannedHost {
    /// Whether something could not be read.
    pub fn is_incomplete(&self) -> bool {
        !self.census.unscanned.is_empty() || self.observation.unread_pages > 0
    }

    /// The scenario of the host.
    ///
    /// # Errors
    /// If its processes have no memory that KSM can take.
    pub fn estimate(&self, pattern: WritePattern, duration: Duration) -> anyhow::Result<ScenarioEstimate> {
        let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let mut found = estimate(&self.observation.host, pattern, duration_ms);
        if found.scenario.templates.is_empty() {
            bail!("the processes have no memory that KSM can take: choose others, or leave the selection options out");
        }
        found.scenario.description = format!("{} at the time of its scan", self.name);
        found.scenario.costs = self.costs;
        Ok(found)
    }
}

/// Scan the host, with the order of contents by their bytes if it has at most so many pages.
pub fn scan_host(
    options: &ScanArguments,
    max_ordered_pages: usize,
    global: &GlobalOptions,
) -> anyhow::Result<ScannedHost> {
    let costs = options.read_costs()?;
    let host = host_selection::open_host(global)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let available_cpus = || std::thread::available_parallelism().map_or(1, Into::into);
    let census_options = CensusOptions {
        selection: host_selection::process_selection(&options.targets, global)?,
        pass_interval: options.pass_interval,
        max_order_keys: max_ordered_pages,
        threads: options.scan_threads.map_or_else(available_cpus, usize::from),
        ..CensusOptions::default()
    };
    let (census, mut index) = progress::run_census_with_progress(host.page_size(), &stop, |progress| {
        take_census(&*host, &census_options, progress, &stop)
    })?;
    if stop.load(Ordering::Relaxed) {
        bail!("a signal ended the scan before all pages were read, so there is no scenario");
    }
    let selection = &census_options.selection;
    host_selection::check_any_seen(&*host, !census.subjects.is_empty(), selection, &census.unscanned, global)?;
    index.drop_unique_entries();
    let pass_interval = match global.host.strip_prefix("recording:") {
        Some(path) => Recording::open(Path::new(path))?.pass_interval(),
        None => census.pass_interval,
    };
    let memory = if options.all_memory { ObservedMemory::All } else { ObservedMemory::EnrolledIfAny };
    let observation = observe_machines(&*host, &census, &index, pass_interval, memory)?;
    let name = if global.host == "live" { "This host".to_owned() } else { host.describe() };
    Ok(ScannedHost { name, observation, census, costs })
}

/// Write the scenario.
pub fn run(options: &FromRecordingArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    if let Some(path) = options.output.as_ref().filter(|path| path.exists()) {
        bail!("{} exists: remove it, or give another name", path.display());
    }
    let scanned = scan_host(&options.scan, 0, global)?;
    let found = scanned.estimate(WritePattern::SamePages, options.duration)?;
    let unknown = estimate_notes::unknown(&scanned.observation, &found, &scanned.census);
    let mut comments = vec![format!("Made by `pagefold sim from-recording` from {}.", scanned.name)];
    comments.extend(estimate_notes::known(&found));
    comments.push(String::new());
    comments.push("Not known, or assumed:".to_owned());
    comments.extend(unknown.iter().map(|line| format!("- {line}")));
    let text = write_scenario(&found.scenario, &comments);
    parse_scenario(&text).context("the scenario of this host is not valid")?;
    match &options.output {
        Some(path) => std::fs::File::create_new(path)
            .and_then(|mut file| file.write_all(text.as_bytes()))
            .with_context(|| format!("cannot write {}", path.display()))?,
        None => output::print_stdout(&text)?,
    }
    unknown.iter().for_each(|line| eprintln!("pagefold: {line}"));
    Ok(if scanned.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}
