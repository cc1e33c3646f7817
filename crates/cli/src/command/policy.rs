//! `pagefold policy`: set KSM's settings by a policy, until they are restored.

use crate::command::recover::{
    begin_session, check_ksm_present, check_no_tuner, open_live_host, print_result, with_remedy,
};
use crate::command_line::GlobalOptions;
use crate::{CommandOutcome, config, host_selection, output, stop_signal};
use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use pagefold_base::ksm::Setting;
use pagefold_host::action::Action;
use pagefold_host::knob::Knob;
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::kept::POLICY_PURPOSE;
use pagefold_host::transaction::session::{Error, FailedUndo};
use pagefold_host::{Host, observe};
use pagefold_merge::decide::policy::{POLICY_NAMES, Policy};
use pagefold_merge::policy;
use pagefold_merge::text::policy as text;
use pagefold_merge::wire::policy::{PolicyFacts, PolicyReport, RecordedSetting};
use pagefold_output::wire;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;

const EXAMPLES: &str = "\
Examples:
  pagefold policy show                      settings, their source, and the values of each policy
  sudo pagefold policy set flat-out         run ksmd at full speed
  sudo pagefold policy set advisor:20       the kernel's advisor, a full scan in 20 seconds
  sudo pagefold policy set ksmtuned --follow     act as ksmtuned until Ctrl-C
  sudo pagefold policy set night.toml       settings from a file: [ksm] and pages_to_scan = 500, ...
  sudo pagefold policy restore              restore the settings from before the first `set`

Policies: default (100 pages every 20 ms), ksmtuned (the daemon of that name), advisor (the kernel's, \
200 s for a scan), flat-out (20000 pages, no sleep), guided (100 pages a second, between merges).

Exit status: 0 done, 2 refused with nothing changed, 3 a setting could not be restored, or another \
program took over.";

/// Arguments of `policy`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct PolicyArguments {
    #[command(subcommand)]
    command: PolicyCommand,
}

#[derive(Debug, Subcommand)]
enum PolicyCommand {
    /// Give KSM the settings of a policy, until they are restored
    Set(PolicySetArguments),
    /// Show KSM's settings, their source, and the values that each policy would set
    Show(PolicyPrintArguments),
    /// Restore the settings from before a policy was set
    Restore(PolicyPrintArguments),
}

#[derive(Args, Debug)]
struct PolicySetArguments {
    /// default, ksmtuned, advisor or advisor:SECONDS, flat-out, guided or a TOML file
    #[arg(value_name = "POLICY")]
    policy: String,
    /// Keep running and adapt the settings every minute, until Ctrl-C; only for ksmtuned
    #[arg(long)]
    follow: bool,
    /// Set it although another program tunes KSM
    #[arg(long)]
    force: bool,
    /// Print JSON (see `pagefold schema policy`)
    #[arg(long, conflicts_with = "follow")]
    json: bool,
}

#[derive(Args, Debug)]
struct PolicyPrintArguments {
    /// Print JSON (see `pagefold schema`: `policy` for show, `recover` for restore)
    #[arg(long)]
    json: bool,
}

/// Set, show or restore settings.
pub fn run(options: &PolicyArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match &options.command {
        PolicyCommand::Show(print) => show_policies(&*host_selection::open_host(global)?, print.json, global),
        PolicyCommand::Restore(print) => restore_policy(print, global),
        PolicyCommand::Set(options) if options.follow => follow_policy(options, global),
        PolicyCommand::Set(options) => set_policy(options, global),
    }
}

/// The policy of a name, or of a policy file.
pub fn parse_policy(name: &str) -> anyhow::Result<Policy> {
    match Policy::from_name(name) {
        Some(Ok(policy)) => Ok(policy),
        Some(Err(why)) => bail!(why),
        None if name.contains(['/', '.']) => config::load_policy(Path::new(name)),
        None => {
            let hint = config::nearest_word(name, POLICY_NAMES)
                .map(|near| format!("did you mean {near}? "))
                .unwrap_or_default();
            bail!(
                "there is no policy {name:?}: {hint}It is one of {}, or a file: ./{name}.toml",
                POLICY_NAMES.join(", ")
            )
        }
    }
}

/// Check, without changes, that a policy can be set on a host now.
fn check_policy(host: &dyn Host, options: &PolicySetArguments) -> anyhow::Result<Policy> {
    let policy = parse_policy(&options.policy)?;
    if options.follow && !policy.adapts() {
        bail!("{policy} does not adapt: its settings stay as they are written; leave --follow out");
    }
    check_ksm_present(host)?;
    check_no_tuner(host, options.force)?;
    if let Policy::Fixed(settings) = &policy
        && let Some(why) = policy::find_conflict(host, settings)
    {
        bail!("{}: {why}", options.policy);
    }
    Ok(policy)
}

fn set_policy(options: &PolicySetArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let policy = check_policy(&*host, options)?;
    let mut session = begin_session(&*host, global)?;
    let (settings, failed_undos) = policy::set_policy(&mut session, &policy, &options.policy).map_err(with_remedy)?;
    drop(session);
    let outcome = report_failed_undos(&failed_undos);
    if options.json {
        show_policies(&*host, true, global)?;
        return Ok(outcome);
    }
    let assignments: Vec<_> =
        settings.iter().map(|(setting, value)| format!("{} = {value}", setting.file_name())).collect();
    let mut text = format!("{} is set: {}.\n", options.policy, assignments.join(", "));
    if policy.adapts() {
        text.push_str("These are the settings of one step. To adapt them every minute, add --follow.\n");
    }
    text.push_str("They stay until `pagefold policy restore`.\n");
    output::print_stdout(&text)?;
    Ok(outcome)
}

/// Print the failed undos to standard error. Write errors are ignored, because the terminal may be closed.
fn report_failed_undos(failed_undos: &[FailedUndo]) -> CommandOutcome {
    for failed_undo in failed_undos {
        let _ = writeln!(std::io::stderr(), "pagefold: not restored: {failed_undo}");
    }
    if failed_undos.is_empty() { CommandOutcome::Done } else { CommandOutcome::Partial }
}

fn follow_policy(options: &PolicySetArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let policy = check_policy(&*host, options)?;
    let stop = stop_signal::stop_on_signal().context("cannot handle signals")?;
    let mut session = begin_session(&*host, global)?;
    eprintln!("Following {policy} every {} s until Ctrl-C.", policy.interval().as_secs());
    match policy::follow_policy(&mut session, &policy, || stop.load(Ordering::Relaxed)) {
        Ok(steps) => {
            let outcome = report_failed_undos(&session.undo_all().map_err(with_remedy)?);
            let restored_note =
                if outcome == CommandOutcome::Done { " The previous settings are restored." } else { "" };
            let _ = writeln!(std::io::stderr(), "Took {steps} steps.{restored_note}");
            Ok(outcome)
        }
        Err(error @ Error::SettingOverwritten { .. }) => {
            report_failed_undos(&session.undo_all().map_err(with_remedy)?);
            let _ = writeln!(std::io::stderr(), "pagefold: {error}. KSM is left to that program.");
            Ok(CommandOutcome::Partial)
        }
        Err(error) => Err(with_remedy(session.abort(error))),
    }
}

fn restore_policy(print: &PolicyPrintArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = open_live_host(global)?;
    let mut session = begin_session(&*host, global)?;
    let (undone, failed_undos) = session.undo_kept_changes_for(POLICY_PURPOSE).map_err(with_remedy)?;
    print_result(&undone, &failed_undos, print.json, "No policy is set: there is nothing to restore.")
}

fn show_policies(host: &dyn Host, json: bool, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    check_ksm_present(host)?;
    let journal = policy::load_current_policy(host, &global.state).map_err(session::Error::from)?;
    let observation = policy::observe_host(host);
    let recorded = journal.iter().flat_map(|journal| &journal.entries).filter_map(|entry| match &entry.undo {
        Action::Write { knob, value } => Some((
            knob.ksm_setting()?,
            RecordedSetting { value_before: value.clone(), written_values: entry.written_values.clone() },
        )),
        _ => None,
    });
    let policies = POLICY_NAMES.iter().filter_map(|name| Some((name, Policy::from_name(name)?.ok()?)));
    let facts = PolicyFacts {
        host: host.describe(),
        policy: journal.as_ref().and_then(|journal| journal.purpose.clone()),
        tuners: other_tuners(host)?,
        ksmd_cpu_seconds: observation.ksmd_cpu.as_ref().ok().map(|cpu| cpu.as_secs_f64()),
        current: Setting::ALL.into_iter().map(|setting| (setting, Knob::from(setting).read(host))).collect(),
        recorded: recorded.collect(),
        policies: policies.map(|(name, policy)| ((*name).to_owned(), policy.one_shot_settings(&observation))).collect(),
    };
    let report = PolicyReport::from_facts(&facts);
    output::print_stdout(&if json {
        wire::to_json(&report)
    } else {
        text::render(&report, output::stdout_style(global))
    })?;
    Ok(CommandOutcome::Done)
}

/// The names of all programs that repeatedly tune KSM, without duplicates.
fn other_tuners(host: &dyn Host) -> anyhow::Result<Vec<String>> {
    let processes = observe::processes(host).context("cannot list the processes")?;
    let mut names = BTreeMap::new();
    for process in processes.into_iter().filter_map(|(_, process)| process.ok()) {
        if let Some(tuner) = observe::identify_tuner(host, &process).filter(|tuner| tuner.writes_rate()) {
            names.insert(tuner, tuner.name().to_owned());
        }
    }
    Ok(names.into_values().collect())
}
