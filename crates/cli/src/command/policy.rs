//! `pagefold policy`: KSM's settings by rule, until they are restored.

use crate::arguments::Global;
use crate::command::recover::{begin, explained, live, needs_ksm, refuse_tuner, tell};
use crate::{Outcome, config, output, progress, source};
use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use pagefold_base::ksm::Setting;
use pagefold_host::act::{Action, setting_now};
use pagefold_host::transaction::session;
use pagefold_host::transaction::session::{Error, Remains};
use pagefold_host::{Host, observe};
use pagefold_merge::decide::policy::{NAMES, Policy};
use pagefold_merge::policy;
use pagefold_merge::text::policy as text;
use pagefold_merge::wire::policy::{Facts, PolicyReport, Written};
use pagefold_output::wire;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::sync::atomic::Ordering;

const EXAMPLES: &str = "\
Examples:
  pagefold policy show                      settings, who wrote them, what each policy would write
  sudo pagefold policy set flat-out         ksmd as fast as it goes
  sudo pagefold policy set advisor:20       the kernel's advisor, a full scan in 20 seconds
  sudo pagefold policy set ksmtuned --follow     be ksmtuned until Ctrl-C
  sudo pagefold policy set night.toml       what a file says: [ksm] and pages_to_scan = 500, ...
  sudo pagefold policy restore              what the host had before the first `set`

Policies: default (100 pages every 20 ms), ksmtuned (the daemon of that name), advisor (the kernel's, \
200 s for a scan), flat-out (20000 pages, no sleep), guided (100 pages a second, between merges).

Exit status: 0 done, 2 refused with nothing changed, 3 something could not be put back, or another \
program took over.";

/// Arguments of `policy`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Give KSM the settings of a policy, until they are restored
    Set(Set),
    /// Show KSM's settings, who wrote them, and what each policy would write
    Show(Print),
    /// Put back what the host had before a policy was set
    Restore(Print),
}

#[derive(Args, Debug)]
struct Set {
    /// default, ksmtuned, advisor or advisor:SECONDS, flat-out, guided or a TOML file
    #[arg(value_name = "POLICY")]
    policy: String,
    /// Stay and adapt the settings every minute, until Ctrl-C; only ksmtuned does
    #[arg(long)]
    follow: bool,
    /// Set it although another program tunes KSM, too
    #[arg(long)]
    force: bool,
    /// Print JSON (see `pagefold schema policy`)
    #[arg(long, conflicts_with = "follow")]
    json: bool,
}

#[derive(Args, Debug)]
struct Print {
    /// Print JSON (see `pagefold schema`: `policy` for show, `recover` for restore)
    #[arg(long)]
    json: bool,
}

/// Set, show or restore.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    match &options.what {
        What::Show(print) => show(&*source::open(global)?, print.json, global),
        What::Restore(print) => restore(print, global),
        What::Set(options) if options.follow => follow(options, global),
        What::Set(options) => set(options, global),
    }
}

/// What a policy is called on the command line, or says in its file.
pub fn parse(name: &str) -> anyhow::Result<Policy> {
    match Policy::named(name) {
        Some(Ok(policy)) => Ok(policy),
        Some(Err(why)) => bail!(why),
        None if name.contains(['/', '.']) => config::policy(Path::new(name)),
        None => {
            let hint = config::nearest(name, NAMES).map(|near| format!("did you mean {near}? ")).unwrap_or_default();
            bail!("there is no policy {name:?}: {hint}It is one of {}, or a file: ./{name}.toml", NAMES.join(", "))
        }
    }
}

/// A policy that may be set on a host now, as far as can be told without changing anything.
fn checked(host: &dyn Host, options: &Set) -> anyhow::Result<Policy> {
    let policy = parse(&options.policy)?;
    if options.follow && !policy.adapts() {
        bail!("{policy} does not adapt: its settings stay as they are written; leave --follow out");
    }
    needs_ksm(host)?;
    refuse_tuner(host, options.force)?;
    if let Policy::Fixed(settings) = &policy
        && let Some(why) = policy::conflict(host, settings)
    {
        bail!("{}: {why}", options.policy);
    }
    Ok(policy)
}

fn set(options: &Set, global: &Global) -> anyhow::Result<Outcome> {
    let host = live(global)?;
    let policy = checked(&*host, options)?;
    let mut session = begin(&*host, global)?;
    let (settings, remains) = policy::set(&mut session, &policy, &options.policy).map_err(explained)?;
    drop(session);
    let outcome = not_put_back(&remains);
    if options.json {
        show(&*host, true, global)?;
        return Ok(outcome);
    }
    let list: Vec<_> = settings.iter().map(|(setting, value)| format!("{} = {value}", setting.file())).collect();
    let mut text = format!("{} is set: {}.\n", options.policy, list.join(", "));
    if policy.adapts() {
        text.push_str("These are the settings of one step. To adapt them every minute it needs --follow.\n");
    }
    text.push_str("They stay until `pagefold policy restore`.\n");
    output::print(&text)?;
    Ok(outcome)
}

/// Say what remains on standard error; the terminal may be what went away.
fn not_put_back(remains: &[Remains]) -> Outcome {
    for remains in remains {
        let _ = writeln!(std::io::stderr(), "pagefold: not put back: {remains}");
    }
    if remains.is_empty() { Outcome::Done } else { Outcome::Partial }
}

fn follow(options: &Set, global: &Global) -> anyhow::Result<Outcome> {
    let host = live(global)?;
    let policy = checked(&*host, options)?;
    let stop = progress::stop_on_signal().context("cannot handle signals")?;
    let mut session = begin(&*host, global)?;
    eprintln!("Following {policy} every {} s until Ctrl-C.", policy.interval().as_secs());
    match policy::follow(&mut session, &policy, || stop.load(Ordering::Relaxed)) {
        Ok(steps) => {
            let outcome = not_put_back(&session.finish().map_err(explained)?);
            let back = if outcome == Outcome::Done { " What the host had before is back." } else { "" };
            let _ = writeln!(std::io::stderr(), "Took {steps} steps.{back}");
            Ok(outcome)
        }
        Err(error @ Error::Contested { .. }) => {
            not_put_back(&session.finish().map_err(explained)?);
            let _ = writeln!(std::io::stderr(), "pagefold: {error}. Left it to them.");
            Ok(Outcome::Partial)
        }
        Err(error) => Err(explained(session.give_up(error))),
    }
}

fn restore(print: &Print, global: &Global) -> anyhow::Result<Outcome> {
    let host = live(global)?;
    let mut session = begin(&*host, global)?;
    let (undone, remains) = session.restore_policy().map_err(explained)?;
    tell(&undone, &remains, print.json, "No policy is set: there is nothing to restore.")
}

fn show(host: &dyn Host, json: bool, global: &Global) -> anyhow::Result<Outcome> {
    needs_ksm(host)?;
    let set = policy::current(host, &global.state).map_err(session::Error::from)?;
    let observation = policy::observe(host);
    let written = set.iter().flat_map(|journal| &journal.entries).filter_map(|entry| match &entry.undo {
        Action::Set { setting, value } => {
            Some((*setting, Written { before: value.clone(), values: entry.written.clone() }))
        }
        _ => None,
    });
    let policies = NAMES.iter().filter_map(|name| Some((name, Policy::named(name)?.ok()?)));
    let facts = Facts {
        host: host.describe(),
        policy: set.as_ref().and_then(|journal| journal.purpose.clone()),
        tuners: tuners(host)?,
        ksmd_cpu_seconds: observation.ksmd_cpu.as_ref().ok().map(|cpu| cpu.as_secs_f64()),
        now: Setting::ALL.into_iter().map(|setting| (setting, setting_now(host, setting))).collect(),
        written: written.collect(),
        policies: policies.map(|(name, policy)| ((*name).to_owned(), policy.once(&observation))).collect(),
    };
    let report = PolicyReport::of(&facts);
    output::print(&if json { wire::json(&report) } else { text::render(&report, output::style(global)) })?;
    Ok(Outcome::Done)
}

/// The names of all programs that tune KSM again and again, each once.
fn tuners(host: &dyn Host) -> anyhow::Result<Vec<String>> {
    let processes = observe::processes(host).context("cannot list the processes")?;
    let mut names = BTreeMap::new();
    for process in processes.into_iter().filter_map(|(_, process)| process.ok()) {
        if let Some(tuner) = observe::tuner(host, &process).filter(|tuner| tuner.writes_rate()) {
            names.insert(tuner, tuner.name().to_owned());
        }
    }
    Ok(names.into_values().collect())
}
