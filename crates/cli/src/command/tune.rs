//! `pagefold tune`: carry out what the findings of `doctor` ask for, and undo it.

use crate::command::recover::{open_live_host, print_partial_result, with_daemon_hint, with_remedy};
use crate::command_line::{GlobalOptions, GuestAgentOptions, MonitorOptions, parse_duration};
use crate::config::Config;
use crate::{CommandOutcome, host_selection, output};
use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use pagefold_base::ProcessId;
use pagefold_doctor::decide::audit::Topic;
use pagefold_doctor::decide::change::SettingChange;
use pagefold_doctor::decide::{Finding, HostFacts, examine_host};
use pagefold_doctor::doctor_facts::{TrustPolicy, gather_host_facts};
use pagefold_doctor::guest_facts::gather_guest_facts;
use pagefold_doctor::monitor_facts::gather_monitor_facts;
use pagefold_doctor::wire::{DoctorReport, FindingReport, VerdictName};
use pagefold_host::Host;
use pagefold_host::guest_agent::AgentAccess;
use pagefold_output::wire;
use pagefold_tune::apply::{Applied, ApplyScope, apply};
use pagefold_tune::decide::export::{self, ExportFormat};
use pagefold_tune::decide::import::{self, IgnoredLine, ImportFormat, Imported};
use pagefold_tune::decide::profile::{self, Profile};
use pagefold_tune::decide::{OperatorFinding, Proposal, TunePlan, operator_findings, plan};
use pagefold_tune::wire::{TuneApplyOutcome, TuneApplyReport, TunePlanReport, TuneVerifyReport};
use pagefold_tune::{facts, kept, text, vcpus};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PLAN_EXAMPLES: &str = "\
Examples:
  sudo pagefold tune plan                       what the findings of `pagefold doctor` would change
  sudo pagefold tune plan --profile density     for a host with as many machines as possible
  sudo pagefold tune plan --rule kvm-ept --json

Nothing is changed. A host that needs nothing has an empty plan.

Exit status: 0 nothing is to be changed, 1 the plan has steps, 2 failure.";

const APPLY_EXAMPLES: &str = "\
Examples:
  sudo pagefold tune apply --dry-run            show the plan, and change nothing
  sudo pagefold tune apply --only live          settings of the running kernel, no module
  sudo pagefold tune apply --profile latency
  sudo pagefold tune apply --define             also define libvirt's machines anew, for their next start
  sudo pagefold tune apply --import my.conf     what a file of tuned, sysctl.d, modprobe.d or Ansible sets

A module is loaded again only if no virtual machine uses it. Boot parameters are printed as commands, and \
definitions of virtual machines as diffs, unless libvirt defines them (--define): both take effect later.

A refusal counts for the exit status where --rule or --import names the changes.

Exit status: 0 done, 2 refused with nothing changed, 3 a step failed or was refused; the others are made.";

const UNDO_EXAMPLES: &str = "\
Example:
  sudo pagefold tune undo        restore what `tune apply` changed

A setting that another program has written since keeps its value. Settings of KSM can only be undone while the daemon \
is paused (`pagefold pause`); the others are undone meanwhile.

Exit status: 0 everything is undone, 2 nothing could be tried, 3 some changes remain.";

const VERIFY_EXAMPLES: &str = "\
Examples:
  sudo pagefold tune verify              whether the changes are in force, and their counters before and since
  sudo pagefold tune verify --wait 10s   how much the counters grow in ten seconds
  sudo pagefold tune verify --guest-agent
                                         also ask the guests, for example whether they see all their CPUs
  sudo pagefold tune verify --libvirt-monitor
                                         also ask monitors of libvirt's machines, for vCPUs without thread names

With --guest-agent only commands that read are sent to QEMU's guest agents, and an agent has one second. Monitors and \
agents of libvirt's machines are asked through libvirt, and only with --libvirt-monitor and --libvirt-agent: libvirt \
marks these machines as tainted until they end.

A machine of KVM fails if its guest has not run all of its virtual CPUs 30 s after its start.

Exit status: 0 all changes are in force, 1 another program changed one, or a machine or guest fails, 2 failure, 3 nothing \
fails, but a change or the threads of virtual CPUs cannot be read, or an agent did not answer all questions.";

const EXPORT_EXAMPLES: &str = "\
Examples:
  sudo pagefold tune export --format sysctl > /etc/sysctl.d/90-pagefold.conf
  sudo pagefold tune export --format ansible --profile density > tasks.yml

It prints the changes of `tune apply` that are in force, and those that are planned.";

const IMPORT_EXAMPLES: &str = "\
Examples:
  sudo pagefold tune import /usr/lib/tuned/virtual-host/tuned.conf
  sudo pagefold tune import /etc/sysctl.d/99-custom.conf --json
  sudo pagefold tune import site.yml                       tasks for Ansible: sysctl, modprobe, copy, lineinfile

It prints what the file would change on this host, and which of its lines pagefold does not carry out. Nothing is \
changed: `tune apply --import FILE` does it.

Exit status: 0 nothing is to be changed, 1 the plan has steps, 2 failure.";

/// Arguments of `tune`.
#[derive(Args, Debug)]
pub struct TuneArguments {
    #[command(subcommand)]
    command: TuneCommand,
}

#[derive(Debug, Subcommand)]
enum TuneCommand {
    /// Show which settings would be changed, how, at which risk, and what is refused
    #[command(after_help = PLAN_EXAMPLES)]
    Plan(PlanArguments),
    /// Change settings and load modules again, until they are undone
    #[command(after_help = APPLY_EXAMPLES)]
    Apply(ApplyArguments),
    /// Restore the settings and files from before `tune apply`
    #[command(after_help = UNDO_EXAMPLES)]
    Undo(PrintArguments),
    /// Check that the changes of `tune apply` are in force, and show the counters that prove their effect
    #[command(after_help = VERIFY_EXAMPLES)]
    Verify(VerifyArguments),
    /// Print the settings as a file of another program
    #[command(after_help = EXPORT_EXAMPLES)]
    Export(ExportArguments),
    /// Show what a file of another program would change
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(ImportArguments),
}

/// The source of the changes.
#[derive(Args, Debug, Default)]
struct SourceOptions {
    /// What the host is for
    #[arg(long, value_enum, value_name = "NAME")]
    profile: Option<ProfileName>,
    /// Only the changes of this rule (see `pagefold doctor --json`); may be given several times
    #[arg(long, value_name = "ID")]
    rule: Vec<String>,
    #[command(flatten)]
    monitors: MonitorOptions,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ProfileName {
    /// As much work as possible, with CPUs that are not over-committed
    Throughput,
    /// Short and even response times
    Latency,
    /// As many virtual machines as possible
    Density,
    /// Databases: buffer pools stay in memory, and in huge or shared memory
    Database,
    /// Many short jobs on machines with one image
    Htc,
}

impl From<ProfileName> for Profile {
    fn from(name: ProfileName) -> Self {
        match name {
            ProfileName::Throughput => Self::Throughput,
            ProfileName::Latency => Self::Latency,
            ProfileName::Density => Self::Density,
            ProfileName::Database => Self::Database,
            ProfileName::Htc => Self::Htc,
        }
    }
}

#[derive(Args, Debug)]
struct PlanArguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Print JSON (see `pagefold schema tune-plan`)
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ApplyArguments {
    #[command(flatten)]
    source: SourceOptions,
    /// Apply what this file sets instead of the findings
    #[arg(long, value_name = "FILE", conflicts_with_all = ["profile", "rule"])]
    import: Option<PathBuf>,
    /// Show the plan and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Only changes of this kind
    #[arg(long, value_enum, value_name = "KIND")]
    only: Option<OnlyKind>,
    /// Also let libvirt define changed machines anew (as `virsh define --validate`), for their next start
    #[arg(long, conflicts_with = "only")]
    define: bool,
    /// Print JSON (see `pagefold schema tune-apply`)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OnlyKind {
    /// Settings of the running kernel
    Live,
}

#[derive(Args, Debug)]
struct PrintArguments {
    /// Print JSON (see `pagefold schema recover`)
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct VerifyArguments {
    /// Time between two readings of the counters
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = parse_duration)]
    wait: Duration,
    #[command(flatten)]
    monitors: MonitorOptions,
    #[command(flatten)]
    agents: GuestAgentOptions,
    /// Only the virtual machine with this process; may be given several times
    #[arg(long, value_name = "N")]
    pid: Vec<u32>,
    /// Print JSON (see `pagefold schema tune-verify`)
    #[arg(long)]
    json: bool,
}

#[derive(Args, Debug)]
struct ExportArguments {
    #[command(flatten)]
    source: SourceOptions,
    /// The format
    #[arg(long, value_enum)]
    format: ExportFormatName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExportFormatName {
    /// A profile of tuned
    Tuned,
    /// A file for /etc/sysctl.d
    Sysctl,
    /// A file for /etc/modprobe.d
    Modprobe,
    /// Tasks of an Ansible playbook
    Ansible,
}

impl From<ExportFormatName> for ExportFormat {
    fn from(name: ExportFormatName) -> Self {
        match name {
            ExportFormatName::Tuned => Self::Tuned,
            ExportFormatName::Sysctl => Self::Sysctl,
            ExportFormatName::Modprobe => Self::Modprobe,
            ExportFormatName::Ansible => Self::Ansible,
        }
    }
}

#[derive(Args, Debug)]
struct ImportArguments {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Its format; without it, its first line decides
    #[arg(long, value_enum)]
    format: Option<ImportFormatName>,
    #[command(flatten)]
    monitors: MonitorOptions,
    /// Print JSON (see `pagefold schema tune-plan`)
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ImportFormatName {
    /// A profile of tuned: tuned.conf
    Tuned,
    /// A file of sysctl.d
    Sysctl,
    /// A file of modprobe.d
    Modprobe,
    /// A playbook or a list of tasks for Ansible
    Ansible,
}

impl From<ImportFormatName> for ImportFormat {
    fn from(name: ImportFormatName) -> Self {
        match name {
            ImportFormatName::Tuned => Self::Tuned,
            ImportFormatName::Sysctl => Self::Sysctl,
            ImportFormatName::Modprobe => Self::Modprobe,
            ImportFormatName::Ansible => Self::Ansible,
        }
    }
}

/// Run the subcommand.
pub fn run(options: &TuneArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        TuneCommand::Plan(options) => {
            let host = host_selection::open_host(global)?;
            let prepared = plan_findings(&*host, &options.source, global)?;
            print_plan(&*host, &prepared, options.json, global)
        }
        TuneCommand::Import(options) => {
            let host = host_selection::open_host(global)?;
            let format = options.format.map(Into::into);
            let prepared = plan_file(&*host, &options.file, format, options.monitors, global)?;
            print_plan(&*host, &prepared, options.json, global)
        }
        TuneCommand::Apply(options) => run_apply(options, global),
        TuneCommand::Undo(options) => run_undo(options, global),
        TuneCommand::Verify(options) => run_verify(options, global),
        TuneCommand::Export(options) => run_export(options, global),
    }
}

/// A plan with its source.
struct PreparedPlan {
    profile: Option<Profile>,
    plan: TunePlan,
    left_to_operator: Vec<OperatorFinding>,
    ignored: Vec<IgnoredLine>,
}

impl PreparedPlan {
    fn report(&self, host: &dyn Host) -> TunePlanReport {
        TunePlanReport::new(host.describe(), self.profile, &self.plan, &self.left_to_operator, &self.ignored)
    }
}

/// Plan the changes that findings and a profile ask for.
fn plan_findings(host: &dyn Host, source: &SourceOptions, global: &GlobalOptions) -> anyhow::Result<PreparedPlan> {
    let facts = gather_facts(host, source.monitors, global)?;
    let findings = examine_host(&facts);
    check_rules(&source.rule, &findings)?;
    let profile = source.profile.map(Profile::from);
    let mut proposals = Proposal::from_findings(&findings, &source.rule);
    let patterns: Vec<&str> = profile.into_iter().flat_map(profile::setting_patterns).collect();
    let state = facts::read_state(host, &facts, &changes_of(&proposals), &patterns);
    proposals.extend(profile.into_iter().flat_map(|profile| profile::proposals(profile, &state.settings)));
    let mut left_to_operator = operator_findings(&findings, &source.rule);
    if !source.rule.is_empty() {
        proposals.retain(|proposal| source.rule.contains(&proposal.rule));
        left_to_operator.retain(|finding| source.rule.iter().any(|rule| rule == finding.rule));
    }
    Ok(PreparedPlan { profile, plan: plan(&proposals, profile, &state), left_to_operator, ignored: Vec::new() })
}

/// Plan the changes of some rules.
pub fn plan_rules(host: &dyn Host, rules: &[String], global: &GlobalOptions) -> anyhow::Result<TunePlan> {
    let source = SourceOptions { rule: rules.to_owned(), ..SourceOptions::default() };
    Ok(plan_findings(host, &source, global)?.plan)
}

fn changes_of(proposals: &[Proposal]) -> Vec<&SettingChange> {
    proposals.iter().flat_map(|proposal| &proposal.changes).collect()
}

/// What the rules read of the host and its machines.
fn gather_facts(host: &dyn Host, monitors: MonitorOptions, global: &GlobalOptions) -> anyhow::Result<HostFacts> {
    let Config { domains, exclusions, .. } = Config::load(global)?;
    let mut facts = gather_host_facts(host, &[], &TrustPolicy { domains, exclusions });
    gather_monitor_facts(host, facts.settings.vms.iter_mut(), monitors.access());
    Ok(facts)
}

/// Check that each rule exists.
fn check_rules(rules: &[String], findings: &[Finding]) -> anyhow::Result<()> {
    let is_profile = |rule: &str| Profile::ALL.iter().any(|profile| rule == format!("profile-{profile}"));
    match rules.iter().find(|rule| !is_profile(rule) && findings.iter().all(|finding| finding.rule != **rule)) {
        Some(rule) => bail!("--rule {rule}: there is no such rule; `pagefold doctor --json` lists them"),
        None => Ok(()),
    }
}

/// Plan what a file sets.
fn plan_file(
    host: &dyn Host,
    path: &Path,
    format: Option<ImportFormat>,
    monitors: MonitorOptions,
    global: &GlobalOptions,
) -> anyhow::Result<PreparedPlan> {
    let (imported, format) = read_file(path, format)?;
    let patterns: Vec<&str> = imported.patterns.iter().map(|(pattern, _)| pattern.as_str()).collect();
    let facts = gather_facts(host, monitors, global)?;
    let state = facts::read_state(host, &facts, &imported.changes.iter().collect::<Vec<_>>(), &patterns);
    let proposal = imported.proposal(&format!("{format}, {}", path.display()), &state);
    Ok(PreparedPlan {
        profile: None,
        plan: plan(&[proposal], None, &state),
        left_to_operator: Vec::new(),
        ignored: imported.ignored,
    })
}

fn read_file(path: &Path, format: Option<ImportFormat>) -> anyhow::Result<(Imported, ImportFormat)> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let format = format.unwrap_or_else(|| import::identify_format(&text));
    let imported = import::parse(&text, format);
    if imported.changes.is_empty() && imported.patterns.is_empty() && !imported.ignored.is_empty() {
        let first = &imported.ignored[0];
        bail!(
            "{} sets nothing as {format}: line {}: {}; name its format with `pagefold tune import --format`",
            path.display(),
            first.number,
            first.why
        );
    }
    Ok((imported, format))
}

fn print_plan(
    host: &dyn Host,
    prepared: &PreparedPlan,
    json: bool,
    global: &GlobalOptions,
) -> anyhow::Result<CommandOutcome> {
    let report = prepared.report(host);
    let style = output::stdout_style(global);
    output::print_stdout(&if json { wire::to_json(&report) } else { text::render_plan(&report, style) })?;
    Ok(if report.steps.is_empty() { CommandOutcome::Done } else { CommandOutcome::NegativeVerdict })
}

fn run_apply(options: &ApplyArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = if options.dry_run { host_selection::open_host(global)? } else { open_live_host(global)? };
    let mut prepared = match &options.import {
        Some(path) => plan_file(&*host, path, None, options.source.monitors, global)?,
        None => plan_findings(&*host, &options.source, global)?,
    };
    let scope = match (options.only, options.define) {
        (Some(OnlyKind::Live), _) => ApplyScope::Live,
        (None, true) => ApplyScope::HostAndDefinitions,
        (None, false) => ApplyScope::Host,
    };
    if scope == ApplyScope::Live {
        prepared.plan.steps.retain(|step| scope.contains(step));
    }
    let report = prepared.report(&*host);
    let applied = if options.dry_run {
        Applied::default()
    } else {
        apply(&*host, &global.state, &prepared.plan, scope)
            .map_err(|error| with_daemon_hint(with_remedy(error), global))?
    };
    for text in TuneApplyReport::recovered_texts(&applied) {
        eprintln!("Restored what an earlier pagefold had changed: {text}");
    }
    let style = output::stdout_style(global);
    let report = TuneApplyReport::new(report, &applied);
    output::print_stdout(&match (options.json, options.dry_run) {
        (true, _) => wire::to_json(&report),
        (false, true) => text::render_plan(&report.plan, style),
        (false, false) => text::render_applied(&report, style),
    })?;
    let is_named = options.import.is_some() || !options.source.rule.is_empty();
    match report.outcome(is_named && !options.dry_run) {
        TuneApplyOutcome::Complete => Ok(CommandOutcome::Done),
        TuneApplyOutcome::Partial => Ok(CommandOutcome::Partial),
        TuneApplyOutcome::Refused => bail!("nothing was changed: the plan says why each change is refused"),
    }
}

fn run_undo(options: &PrintArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let undone = kept::undo(&*host, &global.state);
    let errors = undone.errors.into_iter().map(|error| with_daemon_hint(with_remedy(error), global)).collect();
    let empty_text = "No changes of `pagefold tune` are in force.";
    print_partial_result((&undone.done, &undone.failed), errors, options.json, empty_text)
}

fn run_verify(options: &VerifyArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let kept = if global.host == "live" { kept::load(&*host, &global.state)? } else { Vec::new() };
    let counters = kept::observe_effects(&*host, &kept, options.wait);
    let is_selected = |process: ProcessId| options.pid.is_empty() || options.pid.contains(&process.pid.0);
    let machines = vcpus::check_vcpus(&*host, is_selected, options.monitors.access());
    let guests = match options.agents.access() {
        Some(agents) => examine_guests(&*host, agents, global, is_selected)?,
        None => Vec::new(),
    };
    let report = TuneVerifyReport::new(host.describe(), &kept, &counters, &machines, guests);
    let style = output::stdout_style(global);
    output::print_stdout(&if options.json { wire::to_json(&report) } else { text::render_verified(&report, style) })?;
    Ok(match report.verdict() {
        VerdictName::Fail => CommandOutcome::NegativeVerdict,
        VerdictName::Unknown => CommandOutcome::Partial,
        _ => CommandOutcome::Done,
    })
}

/// Asks the agents in the guests of the selected machines, and judges their answers.
fn examine_guests(
    host: &dyn Host,
    agents: AgentAccess,
    global: &GlobalOptions,
    is_selected: impl Fn(ProcessId) -> bool,
) -> anyhow::Result<Vec<FindingReport>> {
    let Config { domains, exclusions, .. } = Config::load(global)?;
    let mut facts = gather_host_facts(host, &[], &TrustPolicy { domains, exclusions });
    gather_guest_facts(host, facts.settings.vms.iter_mut().filter(|vm| is_selected(vm.process)), agents);
    Ok(DoctorReport::from_host(host.describe(), &facts).retain_topics(&[Topic::Guest.name()]).findings)
}

fn run_export(options: &ExportArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let prepared = plan_findings(&*host, &options.source, global)?;
    let kept = if global.host == "live" { kept::load(&*host, &global.state)? } else { Vec::new() };
    let settings = kept::export_settings(&kept, &prepared.plan);
    output::print_stdout(&export::render(&settings, options.format.into()))?;
    Ok(CommandOutcome::Done)
}
