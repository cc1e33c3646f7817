//! `pagefold daemon`: merge what pays, all the time, within a bound; and the commands that speak to it.

pub mod control;
mod history;
mod http;
mod notify;
mod replay;
mod status;

use crate::arguments::Global;
use crate::command::recover::needs_ksm;
use crate::config::{Config, History, ModeWord};
use crate::{Outcome, output, source};
use anyhow::{Context, bail};
use clap::Args;
use control::{Control, Request, ask};
use notify::Notify;
use pagefold_base::Pid;
use pagefold_daemon::decide::{Event, Mode, State};
use pagefold_daemon::run as daemon;
use pagefold_daemon::run::{Message, Settings, Snapshot};
use pagefold_daemon::text;
use pagefold_daemon::wire::{Answer, Status};
use pagefold_doctor::wire::FindingReport;
use pagefold_host::{Host, room};
use pagefold_output::text::printable;
use pagefold_output::wire;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use status::Whom;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold daemon                        say what would pay, and change nothing
  pagefold daemon --mode act             merge what pays, at 10 % of one CPU on average
  pagefold daemon --http                 show it as a page and as metrics: http://127.0.0.1:9750/
  pagefold daemon --history /var/lib/pagefold/history.db
                                         keep how the host stood, for `pagefold report`
  pagefold status                        what it does, why, what it saves and costs
  pagefold top                           the same as it comes
  pagefold pause                         give the host back; `pagefold resume` goes on
  pagefold --host recording:DIR daemon   what it would do on a recorded host: of one moment
                                         until told to stop, of many (`record --every`) at once

What it does and keeps to is said in the configuration (`pagefold config default`); SIGHUP reads it again, \
but for http, http_names and history.

SIGTERM puts KSM's settings back, and what is merged stays merged. With --unmerge-on-exit it is withdrawn \
first, also where the daemon is paused, as far as there is memory for it; not where it only observes or \
advises by then, or another program drives KSM. What an earlier daemon has enrolled this one does not \
know: `pagefold unmerge` withdraws that, too. A pause, and who is withdrawn, hold beyond a daemon that is \
killed, and end with one that is stopped.

Exit status: 0 it was told to stop and everything is back, 2 it could not run, 3 not everything could be \
put back, or somebody stays merged who was to be withdrawn (with --unmerge-on-exit everybody is); who, and \
why, is said on standard error.";

/// Arguments of `daemon`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Options {
    /// What it may do [default: as the configuration says, otherwise advise]
    #[arg(long, value_enum)]
    mode: Option<ModeWord>,
    /// When it ends, withdraw what it has enrolled since it started, as far as the memory is there
    #[arg(long)]
    unmerge_on_exit: bool,
    /// Show what it does over HTTP, at 127.0.0.1:9750 if no address is given [default: as the configuration says,
    /// otherwise nowhere]
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:9750")]
    http: Option<SocketAddr>,
    /// Keep how the host stood in this file, or `off` [default: as the configuration says, otherwise history.db in the
    /// directory that the service manager gives ($STATE_DIRECTORY), otherwise nowhere]
    #[arg(long, value_name = "FILE")]
    history: Option<History>,
    /// Seed of what is random in its decisions
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print each decision over a recording of many moments as a line of JSON (see `pagefold schema decision`)
    #[arg(long)]
    json: bool,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct StatusOptions {
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema status`)
    #[arg(long)]
    json: bool,
}

/// Arguments of `enrol` and `withdraw`.
#[derive(Args, Clone, Copy, Debug)]
pub struct Which {
    /// The process by its number
    #[arg(value_name = "PID")]
    pid: u32,
}

/// Ask the daemon how it stands.
pub fn show(options: &StatusOptions, global: &Global) -> anyhow::Result<Outcome> {
    match ask(&global.state, Request::Status)? {
        Answer::Status(status) if options.json => output::print(&wire::json(&*status))?,
        Answer::Status(status) => output::print(&text::render(&status, options.top, output::style(global)))?,
        Answer::Done(why) | Answer::Refused(why) => bail!("{}", printable(&why)),
    }
    Ok(Outcome::Done)
}

/// Tell the daemon something.
pub fn tell(request: Request, global: &Global) -> anyhow::Result<Outcome> {
    match ask(&global.state, request)? {
        Answer::Done(what) => output::print(&format!("{}\n", printable(&what)))?,
        Answer::Refused(why) => bail!("{}", printable(&why)),
        Answer::Status(_) => bail!("the daemon's answer is to another question: is it of another version?"),
    }
    Ok(Outcome::Done)
}

impl Which {
    /// To look at it now.
    pub fn enrol(self) -> Request {
        Request::Enrol(self.pid)
    }

    /// To leave it alone.
    pub fn withdraw(self) -> Request {
        Request::Withdraw(self.pid)
    }
}

/// Run until told to stop.
pub fn run(options: &Options, global: &Global) -> anyhow::Result<Outcome> {
    let settings = settings(options, global)?;
    if let Some(folders) = replay::folders(global)? {
        return replay::run(&folders, settings, options);
    }
    if options.json {
        bail!(
            "--json: only decisions over a recording of many moments are printed; `pagefold status --json` asks a daemon"
        );
    }
    // Where it cannot be had it takes more memory, that is all.
    let _ = daemon::give_back_big_blocks();
    // It lives as long as the process, so that threads that answer may look at it.
    let host: &'static dyn Host = Box::leak(source::open(global)?);
    if global.host == "live" {
        needs_ksm(host)?;
    } else if settings.rules.mode == Mode::Act {
        bail!("a recording cannot be changed: give --mode advise");
    }
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&global.state)
        .with_context(|| format!("cannot make {} (elsewhere give --state DIR)", global.state.display()))?;
    let control = Control::bind(&global.state)?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot handle signals")?;
    let (sender, messages) = mpsc::channel();
    let desk = Arc::new(Desk { host, sender: sender.clone(), findings: Mutex::default() });
    let past = history::path(options, global)?;
    let shown = http::show(Arc::clone(&desk), options, past.as_deref(), global)?;
    let kept = past.map(|path| history::keep(Arc::clone(&desk), &path, global)).transpose()?.flatten();
    control.serve(Arc::new(move |request| desk.answer(request))).context("cannot start a thread")?;
    heed(signals, sender.clone(), options, global)?;

    let mut notify = Notify::from_environment();
    log(&format!("looking at {}, mode {}", host.describe(), mode(settings.rules.mode)));
    if settings.rules.mode == Mode::Act
        && let Some(warning) = unknown_limits(host)
    {
        log(&warning);
    }
    let mut alive = |state: &State| {
        notify.alive(&state.standing().1);
        if let Some(kept) = &kept {
            kept.heed(state);
        }
    };
    let done =
        daemon::run(host, &global.state, settings, options.seed, (sender, messages), &mut alive, &mut |line| log(line));
    notify.tell("STOPPING=1");
    drop(control);
    drop(shown);
    drop(kept);
    let whole = done?;
    log(if whole { "ended" } else { "ended, and not everything is as it was" });
    Ok(if whole { Outcome::Done } else { Outcome::Partial })
}

/// What is in force by the configuration and the command line.
fn settings(options: &Options, global: &Global) -> anyhow::Result<Settings> {
    let mut settings = Config::load(global)?.daemon();
    if let Some(mode) = options.mode {
        settings.rules.mode = mode.into();
    }
    Ok(settings)
}

/// What cannot be unmerged later because limits of memory cannot be read.
fn unknown_limits(host: &dyn Host) -> Option<String> {
    let unknown = room::unknown_limits(host);
    let (place, why) = unknown.first()?;
    Some(format!(
        "warning: the memory limits of {} cgroups cannot be read, the first {place}: {why}. What is merged there will \
         not be unmerged by the daemon",
        unknown.len()
    ))
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Observe => "observe",
        Mode::Advise => "advise",
        Mode::Act => "act",
    }
}

/// One line on standard error, which systemd's journal keeps with the time.
fn log(line: &str) {
    // Nobody may be left to read it.
    let _ = writeln!(std::io::stderr(), "pagefold daemon: {}", printable(line));
}

/// Take signals in on a thread of their own.
fn heed(mut signals: Signals, sender: Sender<Message>, options: &Options, global: &Global) -> anyhow::Result<()> {
    let (options, global) = (options.clone(), global.clone());
    let unmerge = options.unmerge_on_exit;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let message = match signal {
                SIGHUP => match settings(&options, &global) {
                    Ok(settings) => {
                        log("the configuration was read again, but for http, http_names and history");
                        Message::Settings(Box::new(settings))
                    }
                    Err(error) => {
                        log(&format!("the configuration stays as it was: {error:#}"));
                        continue;
                    }
                },
                _ => Message::Event(Event::Stop { unmerge }),
            };
            if sender.send(message).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// For how long what the doctor found is shown: ten thousand times as long as it took, but from ten minutes to an hour.
const FINDINGS: (u32, Duration, Duration) = (10_000, Duration::from_secs(600), Duration::from_secs(3600));

/// For how long an answer may take to be made.
const PATIENCE: Duration = Duration::from_secs(10);

/// What becomes of a process that an operator has enrolled.
fn will_be_enrolled(state: &State) -> String {
    let then = match state.rules().mode {
        Mode::Observe => return "nobody is looked at: the daemon only observes".to_owned(),
        Mode::Advise => "nothing is merged: the daemon only advises",
        Mode::Act => "what pays of it is merged",
    };
    let not_now = state.waits().map(|why| format!(", but not now ({why})"));
    format!("it is looked at next{}; {then}", not_now.unwrap_or_default())
}

/// What becomes of a process that an operator has withdrawn.
fn will_be_withdrawn(state: &State, pid: u32) -> String {
    match state.holds_back() {
        None => "it is left alone, and withdrawn as soon as there is memory for it".to_owned(),
        Some(why) => {
            let stays = format!("it is left alone, and what is merged of it stays so for now ({why})");
            format!("{stays}: `pagefold unmerge --pid {pid}` withdraws it")
        }
    }
}

/// Where requests are answered.
struct Desk {
    host: &'static dyn Host,
    sender: Sender<Message>,
    /// What the doctor found, and until when that is shown.
    findings: Mutex<Option<(Instant, Vec<FindingReport>)>>,
}

impl Desk {
    fn answer(&self, request: Request) -> Answer {
        let tell = |event: Event, done: &str| match self.sender.send(Message::Event(event)) {
            Ok(()) => Answer::Done(done.to_owned()),
            Err(_) => Answer::Refused("the daemon ends".to_owned()),
        };
        let Some(snapshot) = self.snapshot() else { return Answer::Refused("the daemon ends".to_owned()) };
        match request {
            Request::Status => Answer::Status(Box::new(self.status(&snapshot))),
            Request::Pause => tell(Event::Pause, "paused: KSM's settings come back, and what is merged stays merged"),
            Request::Resume => tell(Event::Resume, "resumed"),
            Request::Enrol(pid) | Request::Withdraw(pid) => {
                let Some(who) = snapshot.who.iter().find(|who| who.id.pid == Pid(pid)) else {
                    return Answer::Refused(format!(
                        "process {pid} is not managed: it is not there, has less memory than {}, or is not chosen by \
                         [daemon.only]",
                        snapshot.settings.min_resident
                    ));
                };
                let excluded = snapshot.state.members().get(&who.id).and_then(|member| member.excluded.as_ref());
                match (request, excluded) {
                    (Request::Enrol(_), Some(why)) => Answer::Refused(format!("process {pid} is left alone: {why}")),
                    (Request::Enrol(_), None) => tell(Event::Enrol(who.id), &will_be_enrolled(&snapshot.state)),
                    _ => tell(Event::Withdraw(who.id), &will_be_withdrawn(&snapshot.state, pid)),
                }
            }
        }
    }

    fn snapshot(&self) -> Option<Box<Snapshot>> {
        let (sender, answer) = mpsc::channel();
        self.sender.send(Message::Ask(sender)).ok()?;
        answer.recv_timeout(PATIENCE).ok()
    }

    fn status(&self, snapshot: &Snapshot) -> Status {
        let mut findings = self.findings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if findings.as_ref().is_none_or(|(until, _)| now >= *until) {
            let found = status::findings(self.host, &snapshot.settings);
            *findings = Some((now + (now.elapsed() * FINDINGS.0).clamp(FINDINGS.1, FINDINGS.2), found));
        }
        let found = findings.as_ref().map(|(_, found)| found.clone()).unwrap_or_default();
        drop(findings);
        status::status(self.host, snapshot, Whom::All, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_daemon::decide::{Readings, Rules, TimeOfDay, step};

    /// What is answered to who has a process enrolled, and withdrawn, after some events.
    fn answers(mode: Mode, events: impl IntoIterator<Item = Event>) -> [String; 2] {
        let hours = pagefold_daemon::decide::Hours { from: 10, to: 20, utc: true };
        let rules = Rules { mode, quiet: vec![hours], ..Rules::default() };
        let state = State::new(rules, 0, Duration::ZERO, Duration::ZERO);
        let held = events.into_iter().chain([Event::Held(Ok(()))]);
        let state = held.fold(state, |state, event| step(state, Duration::ZERO, event).0);
        [will_be_enrolled(&state), will_be_withdrawn(&state, 7)]
    }

    #[test]
    fn what_is_answered_is_what_will_be_done() {
        let stays = |why: &str| {
            let stays = format!("it is left alone, and what is merged of it stays so for now ({why})");
            format!("{stays}: `pagefold unmerge --pid 7` withdraws it")
        };
        let withdrawn = "it is left alone, and withdrawn as soon as there is memory for it".to_owned();
        assert_eq!(
            answers(Mode::Act, []),
            ["it is looked at next; what pays of it is merged".to_owned(), withdrawn.clone()]
        );
        let quiet = Readings { time: TimeOfDay { local: 0, utc: 12 }, ..Readings::default() };
        let not_now = |why: &str| format!("it is looked at next, but not now ({why}); what pays of it is merged");
        assert_eq!(answers(Mode::Act, [Event::Tick(quiet)]), [not_now("these are quiet hours"), withdrawn]);
        let paused = "an operator paused it";
        assert_eq!(answers(Mode::Act, [Event::Pause]), [not_now(paused), stays(paused)]);
        let other = Event::Contested("somebody writes run".to_owned());
        assert_eq!(answers(Mode::Act, [other]), [not_now("somebody writes run"), stays("somebody writes run")]);
        let advice = "it is looked at next; nothing is merged: the daemon only advises".to_owned();
        assert_eq!(answers(Mode::Advise, []), [advice, stays("it only advises")]);
        let nobody = "nobody is looked at: the daemon only observes".to_owned();
        assert_eq!(answers(Mode::Observe, []), [nobody, stays("it only observes")]);
    }
}
