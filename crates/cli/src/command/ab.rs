//! `pagefold ab`: an experiment that compares two arms on a workload.

use crate::command::policy::parse_policy;
use crate::command::recover::{open_live_host, print_leftover, with_remedy};
use crate::command::tune::plan_rules;
use crate::command_line::{GlobalOptions, parse_duration};
use crate::{CommandOutcome, output, stop_signal};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand, ValueEnum};
use indicatif::{ProgressBar, ProgressDrawTarget};
use pagefold_ab::arms::ArmError;
use pagefold_ab::campaign::{self, CampaignError, CampaignOutcome, CampaignProgress};
use pagefold_ab::experiment::{
    ArmDefinition, ExpectedMove, Experiment, MetricDefinition, MetricSource, ProofCounter, RepetitionLevel,
};
use pagefold_ab::record::{self, CampaignStart, LoadedRecord, Record};
use pagefold_ab::wire::study::StudyReport;
use pagefold_ab::wire::unrestored::UnrestoredChanges;
use pagefold_ab::wire::{AbReport, samples_csv};
use pagefold_ab::{html, text};
use pagefold_host::Host;
use pagefold_host::knob::Knob;
use pagefold_merge::policy::observe_host;
use pagefold_output::wire;
use pagefold_tune::decide::Effect;
use std::collections::BTreeMap;
use std::fs;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Blocks of a study by default.
const STUDY_BLOCKS: usize = 5;

/// Half of the runs of a study's block by default.
const STUDY_PAIRS_PER_BLOCK: usize = 3;

const EXAMPLES: &str = "\
Examples:
  sudo pagefold ab --a transparent_hugepage=never --b transparent_hugepage=always -- ./solver input.nml
  sudo pagefold ab --b vm.swappiness=10 --metric 'rate=regex:([0-9.]+) MB/s' --higher-is-better rate -- ./bench
  sudo pagefold ab --rule kvm-halt-poll -- ssh vm ./bench   (the injected slow-downs do not reach the guest)
  sudo pagefold ab --policy-b flat-out -- ./solver       the cost of ksmd at full speed
  pagefold ab --env-b MALLOC_ARENA_MAX=1 --duet -- ./solver   both arms at the same time
  pagefold ab study --restart './restart-vm' -- ./solver     which repetition is needed to see 1, 2 and 5 %
  sudo pagefold ab run experiment.toml                   all options in a file
  pagefold ab resume DIR                                 continue after a kill or a reboot
  pagefold ab report DIR                                 show the result again

Every campaign also runs A against A, and A against A slowed by 2 and by 5 %, and says whether it found these. \
DIR gets the record, the samples, a page and result.json. Settings are restored at the end.

Exit status: 0 an effect or equivalence is shown, 1 inconclusive, 2 failure, 3 not complete, the setting was not \
applied, or a change could not be undone: the report says what is left and how to restore it.";

const STUDY_EXAMPLES: &str = "\
Examples:
  pagefold ab study -- ./solver input.nml
  pagefold ab study --blocks 8 --pairs 4 -- ./solver          64 runs
  pagefold ab study --restart 'virsh reboot vm' -- ssh vm ./bench

It takes the options of `pagefold ab` and runs arm A only: --blocks blocks [default: 5] of twice --pairs [default: 3] \
runs. With --restart, the command runs before each block, and the report tells the variance between restarts from that \
between runs. It says how many runs are warm-up, how many pairs a block should have, and how many blocks and how much \
time a slow-down of 5, 2 and 1 % needs. `ab resume DIR` and `ab report DIR` serve studies, too.

Exit status: 0 done, 2 usage error or failure, 3 not complete, or a change could not be undone.";

/// Arguments of `ab`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct AbArguments {
    #[command(subcommand)]
    command: Option<AbCommand>,
    #[command(flatten)]
    experiment: ExperimentOptions,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Subcommand)]
enum AbCommand {
    /// Run the experiment of a file
    Run(RunArguments),
    /// Measure how much the workload varies under A, and how to repeat it
    Study(Box<StudyArguments>),
    /// Continue a campaign that was interrupted
    Resume(DirectoryArguments),
    /// Show the result of a campaign, and write its files again
    Report(DirectoryArguments),
}

#[derive(Args, Debug)]
struct RunArguments {
    /// The file
    #[arg(value_name = "EXPERIMENT.toml")]
    file: PathBuf,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Args, Debug)]
#[command(after_help = STUDY_EXAMPLES)]
struct StudyArguments {
    #[command(flatten)]
    experiment: ExperimentOptions,
    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Args, Debug)]
struct DirectoryArguments {
    /// The directory of the campaign
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Print JSON (see `pagefold schema ab`)
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct OutputOptions {
    /// The directory of the campaign [default: pagefold-ab-TIME]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print JSON (see `pagefold schema ab`)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LevelName {
    /// The workload starts again
    Run,
    /// The virtual machine restarts, by --restart
    VmRestart,
    /// Modules of the kernel are loaded again
    ModuleReload,
    /// The guest boots again, by --restart
    GuestReboot,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExpectName {
    /// Its change differs
    Differ,
    /// It changes more
    Increase,
    /// It changes less
    Decrease,
}

#[derive(Args, Debug)]
struct ExperimentOptions {
    /// A setting of arm A: a path or a short name, and its value; may be given several times
    #[arg(long, value_name = "NAME=VALUE")]
    a: Vec<String>,
    /// A setting of arm B
    #[arg(long, value_name = "NAME=VALUE")]
    b: Vec<String>,
    /// Arm B has the change of this rule of `pagefold tune`
    #[arg(long, value_name = "ID")]
    rule: Vec<String>,
    /// Arm A has the settings of this policy of KSM
    #[arg(long, value_name = "POLICY")]
    policy_a: Option<String>,
    /// Arm B has the settings of this policy of KSM
    #[arg(long, value_name = "POLICY")]
    policy_b: Option<String>,
    /// A command when arm A begins, such as `pagefold numa apply`
    #[arg(long, value_name = "COMMAND")]
    before_a: Option<String>,
    /// A command when arm A ends
    #[arg(long, value_name = "COMMAND")]
    after_a: Option<String>,
    /// A command when arm B begins
    #[arg(long, value_name = "COMMAND")]
    before_b: Option<String>,
    /// A command when arm B ends
    #[arg(long, value_name = "COMMAND")]
    after_b: Option<String>,
    /// An environment variable of the workload under A
    #[arg(long, value_name = "NAME=VALUE")]
    env_a: Vec<String>,
    /// An environment variable of the workload under B
    #[arg(long, value_name = "NAME=VALUE")]
    env_b: Vec<String>,
    /// Words before the workload's command under A: `numactl --membind 0`
    #[arg(long, value_name = "WORDS")]
    prefix_a: Option<String>,
    /// Words before the workload's command under B
    #[arg(long, value_name = "WORDS")]
    prefix_b: Option<String>,
    /// A further command of the workload, which runs at the same time in a shell
    #[arg(long, value_name = "COMMAND")]
    also: Vec<String>,
    /// Observe the host for this time instead of running a command
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with_all = ["workload", "also"])]
    observe: Option<Duration>,
    /// wall, cpu, NAME=regex:PATTERN, NAME=file:PATH, NAME=file:PATH:KEY or NAME=prometheus:URL,QUERY [default: wall]
    #[arg(long, value_name = "METRIC")]
    metric: Vec<String>,
    /// Metrics of which a higher value is better
    #[arg(long, value_name = "NAME")]
    higher_is_better: Vec<String>,
    /// Read files and queries in this interval during a run, instead of once after it
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    every: Option<Duration>,
    /// The counter that the setting should move: a file, or FILE:KEY
    #[arg(long, value_name = "COUNTER")]
    proof: Option<String>,
    /// How the counter's change in a run should differ under B
    #[arg(long, value_name = "HOW", value_enum, default_value = "differ")]
    expect: ExpectName,
    /// What is done anew before each run
    #[arg(long, value_enum, value_name = "LEVEL", default_value = "run")]
    level: LevelName,
    /// The command that restarts the machine or the guest
    #[arg(long, value_name = "COMMAND")]
    restart: Option<String>,
    /// Blocks of A against B [default: 20]
    #[arg(long, value_name = "N")]
    blocks: Option<usize>,
    /// Pairs of runs in a block; two are ABBA or BAAB [default: 2]
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,
    /// Blocks of each control [default: as many as --blocks]
    #[arg(long, value_name = "N")]
    control_blocks: Option<usize>,
    /// Numbers of blocks at which to stop early if a difference is found
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    looks: Vec<usize>,
    /// Runs at the start of each block that are not measured
    #[arg(long, value_name = "N", default_value_t = 1)]
    warm_up: usize,
    /// Samples at the start of each run that are not measured, for metrics with --every
    #[arg(long, value_name = "N", default_value_t = 0)]
    warm_up_samples: usize,
    /// The margin of equivalence in percent
    #[arg(long, value_name = "PERCENT", default_value_t = 1.0)]
    equivalence: f64,
    /// Leave noisy blocks out of the verdict
    #[arg(long)]
    exclude_noisy: bool,
    /// Run both arms of a pair at the same time
    #[arg(long)]
    duet: bool,
    /// The longest time of a run
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "1h")]
    timeout: Duration,
    /// The seed of the order
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// The command of the workload
    #[arg(last = true, value_name = "WORKLOAD")]
    workload: Vec<String>,
}

/// Run the subcommand, or the experiment of the options.
pub fn run(options: &AbArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        Some(AbCommand::Report(options)) => {
            let loaded = record::load(&options.directory)?;
            print_report(&options.directory, &loaded, UnrestoredChanges::default(), options.json, global)
        }
        Some(AbCommand::Resume(options)) => {
            let host = open_live_host(global)?;
            let (record, loaded) = Record::resume(&options.directory)?;
            carry_out(&*host, record, &loaded, options.json, global)
        }
        Some(AbCommand::Run(options)) => {
            let text =
                fs::read_to_string(&options.file).with_context(|| format!("cannot read {}", options.file.display()))?;
            let experiment: Experiment =
                toml::from_str(&text).with_context(|| format!("{} is no experiment", options.file.display()))?;
            start(experiment, &options.output, global)
        }
        Some(AbCommand::Study(options)) => {
            let experiment = Experiment {
                study: true,
                blocks: options.experiment.blocks.unwrap_or(STUDY_BLOCKS),
                pairs_per_block: options.experiment.pairs.unwrap_or(STUDY_PAIRS_PER_BLOCK),
                looks: Vec::new(),
                ..options.experiment.build()?
            };
            start(experiment, &options.output, global)
        }
        None => start(options.experiment.build()?, &options.output, global),
    }
}

/// Start a campaign.
fn start(mut experiment: Experiment, output: &OutputOptions, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    resolve_arm(&*host, &mut experiment.a, global).context("arm A")?;
    resolve_arm(&*host, &mut experiment.b, global).context("arm B")?;
    let start: CampaignStart = campaign::define(&*host, experiment).map_err(add_remedy)?;
    let directory = output.dir.clone().unwrap_or_else(|| default_directory(&*host));
    let record = Record::create(&directory, start)?;
    eprintln!("The campaign is in {}", directory.display());
    let loaded = record::load(&directory)?;
    if let Some(warning) = loaded.start.experiment.warn_of_few_blocks().filter(|_| !loaded.start.experiment.study) {
        eprintln!("Warning: {warning}");
    }
    carry_out(&*host, record, &loaded, output.json, global)
}

fn default_directory(host: &dyn Host) -> PathBuf {
    let time = humantime::format_rfc3339_seconds(host.unix_time()).to_string();
    PathBuf::from(format!("pagefold-ab-{}", time.replace(':', "")))
}

/// Run the rest of a campaign, and print its report.
fn carry_out(
    host: &dyn Host,
    mut record: Record,
    loaded: &LoadedRecord,
    json: bool,
    global: &GlobalOptions,
) -> anyhow::Result<CommandOutcome> {
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let bar = ProgressBar::with_draw_target(
        Some(loaded.start.schedule.len() as u64),
        if std::io::stderr().is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() },
    );
    let mut note_progress = |progress| match progress {
        CampaignProgress::BusyHost(readings) => {
            bar.suspend(|| eprintln!("Warning: {}", text::describe_busy_start(&readings)));
        }
        CampaignProgress::Blocks(blocks) => {
            bar.set_position(blocks as u64);
            bar.set_message("blocks");
        }
    };
    let directory = record.directory().to_owned();
    let CampaignOutcome { result, settings } =
        campaign::run(host, &global.state, &mut record, loaded, &stop, &mut note_progress);
    bar.finish_and_clear();
    print_leftover(&settings.recovered, &settings.failed_recoveries);
    let unrestored = UnrestoredChanges::new(&settings, &global.state, &directory);
    let is_restored = settings.failed_recoveries.is_empty() && unrestored.failed_undos.is_empty();
    let resume = format!("`pagefold ab resume {}`", directory.display());
    match result {
        Ok(()) => {}
        Err(error) if error.is_stop() => eprintln!("Stopped by a signal; continue with {resume}"),
        Err(error) => {
            let error = add_remedy(error).context(format!("continue with {resume}"));
            if is_restored {
                return Err(error);
            }
            eprintln!("pagefold: {error:#}");
        }
    }
    let printed = record::load(&directory)
        .map_err(anyhow::Error::from)
        .and_then(|loaded| print_report(&directory, &loaded, unrestored.clone(), json, global));
    match printed {
        printed if is_restored => printed,
        Ok(_) => Ok(CommandOutcome::Partial),
        // What is left is told even if the report could not be printed.
        Err(error) => {
            eprintln!("pagefold: {error:#}{}", text::render_unrestored(&unrestored));
            Ok(CommandOutcome::Partial)
        }
    }
}

/// Write the files of a campaign, and print its report.
fn print_report(
    directory: &Path,
    loaded: &LoadedRecord,
    unrestored: UnrestoredChanges,
    json: bool,
    global: &GlobalOptions,
) -> anyhow::Result<CommandOutcome> {
    record::replace_file(directory, "samples.csv", samples_csv(loaded).as_bytes())?;
    if loaded.start.experiment.study {
        let report = StudyReport { unrestored, ..StudyReport::from_record(loaded) };
        return print_study(directory, &report, json, global);
    }
    let report = AbReport { unrestored, ..AbReport::from_record(loaded) };
    record::replace_file(directory, "report.html", html::render(&report).as_bytes())?;
    record::replace_file(directory, "report.json", wire::to_json(&report).as_bytes())?;
    record::replace_file(directory, "result.json", wire::to_json(&report.result).as_bytes())?;
    output::print_stdout(&if json {
        wire::to_json(&report)
    } else {
        text::render(&report, output::stdout_style(global))
    })?;
    Ok(match (report.is_partial(), report.has_answer()) {
        (true, _) => CommandOutcome::Partial,
        (false, true) => CommandOutcome::Done,
        (false, false) => CommandOutcome::NegativeVerdict,
    })
}

fn print_study(
    directory: &Path,
    report: &StudyReport,
    json: bool,
    global: &GlobalOptions,
) -> anyhow::Result<CommandOutcome> {
    record::replace_file(directory, "report.json", wire::to_json(report).as_bytes())?;
    output::print_stdout(&if json {
        wire::to_json(report)
    } else {
        text::study::render(report, &directory.to_string_lossy(), output::stdout_style(global))
    })?;
    Ok(if report.is_partial() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// Add the remedy to an error of the transaction.
fn add_remedy(error: CampaignError) -> anyhow::Error {
    match error {
        CampaignError::Settings(ArmError::Transaction(error)) => with_remedy(error),
        CampaignError::Arm { arm, source: ArmError::Transaction(error) } => {
            with_remedy(error).context(format!("arm {arm}"))
        }
        error => error.into(),
    }
}

/// Replace the names of rules and policies by their settings.
fn resolve_arm(host: &dyn Host, arm: &mut ArmDefinition, global: &GlobalOptions) -> anyhow::Result<()> {
    if let Some(name) = &arm.policy {
        let policy = parse_policy(name)?;
        let settings = policy
            .one_shot_settings(&observe_host(host))
            .map_err(|why| anyhow!("the settings of policy {name} are not known: {why}"))?;
        for (setting, value) in settings {
            arm.settings.entry(Knob::from(setting).path().to_owned()).or_insert(value);
        }
    }
    if !arm.rules.is_empty() {
        let plan = plan_rules(host, &arm.rules, global)?;
        if let Some(refusal) = plan.refusals.first() {
            bail!("rule {}: {} is not made: {}", refusal.rule, refusal.change, refusal.why);
        }
        if plan.steps.is_empty() {
            bail!("rule {} changes nothing on this host", arm.rules.join(", "));
        }
        for step in plan.steps {
            let rules = step.rules();
            match step.effect {
                Effect::Write { path, to, .. } => _ = arm.settings.insert(path, to),
                Effect::Module(change) => arm.modules.entry(change.module).or_default().extend(change.to),
                Effect::Boot { .. } | Effect::Machine { .. } => bail!(
                    "rule {rules} needs a reboot or the restart of a machine: give commands with --before-b and --after-b"
                ),
            }
        }
    }
    Ok(())
}

fn split_assignment(text: &str) -> anyhow::Result<(String, String)> {
    let (name, value) = text.split_once('=').with_context(|| format!("{text:?} has no value; write NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn split_words(text: Option<&String>) -> Vec<String> {
    text.into_iter().flat_map(|text| text.split_whitespace()).map(str::to_owned).collect()
}

/// A metric from its option.
fn parse_metric(text: &str, options: &ExperimentOptions) -> anyhow::Result<MetricDefinition> {
    let (name, source) = match text {
        "wall" => ("wall", MetricSource::WallTime),
        "cpu" => ("cpu", MetricSource::CpuTime),
        _ => {
            let (name, source) = text
                .split_once('=')
                .with_context(|| format!("{text:?} is no metric; write wall, cpu or NAME=SOURCE:..."))?;
            let (kind, rest) =
                source.split_once(':').with_context(|| format!("{source:?}: write regex:, file: or prometheus:"))?;
            let source = match kind {
                "regex" => MetricSource::Pattern { pattern: rest.to_owned() },
                "file" => MetricSource::File { path: rest.to_owned() },
                "prometheus" => {
                    let (url, query) =
                        rest.split_once(',').with_context(|| format!("{rest:?}: write prometheus:URL,QUERY"))?;
                    MetricSource::Prometheus { url: url.to_owned(), query: query.to_owned() }
                }
                _ => bail!("{kind:?} is no source of a metric; it is one of regex, file, prometheus"),
            };
            (name, source)
        }
    };
    let is_read = matches!(source, MetricSource::File { .. } | MetricSource::Prometheus { .. });
    Ok(MetricDefinition {
        name: name.to_owned(),
        higher_is_better: options.higher_is_better.iter().any(|higher| higher == name),
        every_seconds: options.every.filter(|_| is_read).map(|interval| interval.as_secs_f64()),
        source,
    })
}

impl ExperimentOptions {
    /// The experiment of the options.
    fn build(&self) -> anyhow::Result<Experiment> {
        let assignments = |texts: &[String]| -> anyhow::Result<BTreeMap<String, String>> {
            texts.iter().map(|text| split_assignment(text)).collect()
        };
        let a = ArmDefinition {
            settings: assignments(&self.a)?,
            policy: self.policy_a.clone(),
            before: self.before_a.clone(),
            after: self.after_a.clone(),
            environment: assignments(&self.env_a)?,
            prefix: split_words(self.prefix_a.as_ref()),
            ..ArmDefinition::default()
        };
        let b = ArmDefinition {
            settings: assignments(&self.b)?,
            rules: self.rule.clone(),
            policy: self.policy_b.clone(),
            before: self.before_b.clone(),
            after: self.after_b.clone(),
            environment: assignments(&self.env_b)?,
            prefix: split_words(self.prefix_b.as_ref()),
            ..ArmDefinition::default()
        };
        let mut workload = Vec::new();
        if !self.workload.is_empty() {
            workload.push(self.workload.clone());
        }
        workload.extend(self.also.iter().map(|also| vec!["sh".to_owned(), "-c".to_owned(), also.clone()]));
        let default = Experiment::default();
        Ok(Experiment {
            a,
            b,
            workload,
            observe_seconds: self.observe.map(|time| time.as_secs_f64()),
            metric: self.metric.iter().map(|text| parse_metric(text, self)).collect::<anyhow::Result<_>>()?,
            proof: self.proof.clone().map(|counter| ProofCounter {
                counter,
                expect: match self.expect {
                    ExpectName::Differ => ExpectedMove::Differ,
                    ExpectName::Increase => ExpectedMove::Increase,
                    ExpectName::Decrease => ExpectedMove::Decrease,
                },
            }),
            level: match self.level {
                LevelName::Run => RepetitionLevel::Run,
                LevelName::VmRestart => RepetitionLevel::VmRestart,
                LevelName::ModuleReload => RepetitionLevel::ModuleReload,
                LevelName::GuestReboot => RepetitionLevel::GuestReboot,
            },
            restart: self.restart.clone(),
            blocks: self.blocks.unwrap_or(default.blocks),
            pairs_per_block: self.pairs.unwrap_or(default.pairs_per_block),
            control_blocks: self.control_blocks,
            looks: self.looks.clone(),
            warm_up_runs: self.warm_up,
            warm_up_samples: self.warm_up_samples,
            equivalence_percent: self.equivalence,
            exclude_noisy_blocks: self.exclude_noisy,
            duet: self.duet,
            timeout_seconds: self.timeout.as_secs_f64(),
            seed: self.seed,
            ..default
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{CommandLine, PagefoldCommand};
    use clap::Parser;

    fn build(arguments: &[&str]) -> anyhow::Result<Experiment> {
        let words = ["pagefold", "ab"].iter().chain(arguments);
        let PagefoldCommand::Ab(arguments) = CommandLine::try_parse_from(words)?.command else { panic!("not ab") };
        arguments.experiment.build()
    }

    #[test]
    fn options_become_an_experiment_that_a_file_can_hold() {
        let metric = "rate=regex:([0-9]+) MB/s";
        let experiment = build(&[
            "--b",
            "vm.swappiness=10",
            "--metric",
            metric,
            "--higher-is-better",
            "rate",
            "--looks",
            "4,8",
            "--",
            "dd",
            "-x",
        ])
        .unwrap();
        assert_eq!(experiment.workload, [["dd", "-x"]]);
        assert_eq!(experiment.b.settings["vm.swappiness"], "10");
        assert!(experiment.metric[0].higher_is_better);
        assert_eq!(experiment.looks, [4, 8]);
        let file = toml::to_string(&experiment).unwrap();
        assert_eq!(toml::from_str::<Experiment>(&file).unwrap(), experiment, "{file}");
    }

    #[test]
    fn queries_keep_their_commas() {
        let experiment = build(&["--metric", "q=prometheus:http://h:9090,sum(x{a=\"1\",b=\"2\"})"]).unwrap();
        let MetricSource::Prometheus { url, query } = &experiment.metric[0].source else { panic!("{experiment:?}") };
        assert_eq!((&**url, &**query), ("http://h:9090", "sum(x{a=\"1\",b=\"2\"})"));
    }

    #[test]
    fn malformed_options_name_their_form() {
        for (arguments, message) in [
            (["--b", "x"], "NAME=VALUE"),
            (["--metric", "speed"], "NAME=SOURCE"),
            (["--metric", "a=shell:x"], "regex, file, prometheus"),
        ] {
            let error = format!("{:#}", build(&arguments).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }
}
