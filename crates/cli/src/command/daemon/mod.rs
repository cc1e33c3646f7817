//! `pagefold daemon`: merge what pays, all the time, within a bound; and the commands that speak to it.

pub mod control_socket;
mod history_recorder;
mod http;
mod notify;
mod replay;
mod status;

use crate::command::recover::check_ksm_present;
use crate::command_line::GlobalOptions;
use crate::config::{Config, DaemonModeArgument, HistoryLocation};
use crate::{CommandOutcome, host_selection, output};
use anyhow::{Context, bail};
use clap::Args;
use control_socket::{ControlRequest, ControlSocket, send_request};
use notify::SystemdNotifier;
use pagefold_base::Pid;
use pagefold_daemon::decide::{DaemonMode, DaemonState, Event};
use pagefold_daemon::run as daemon;
use pagefold_daemon::run::{DaemonSettings, Message, Snapshot};
use pagefold_daemon::text;
use pagefold_daemon::wire::{ControlReply, StatusReport};
use pagefold_doctor::wire::FindingReport;
use pagefold_host::{Host, memory_headroom};
use pagefold_output::text::escape_unprintable;
use pagefold_output::wire;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use status::ProcessScope;
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
pub struct DaemonArguments {
    /// What it may do [default: as the configuration says, otherwise advise]
    #[arg(long, value_enum)]
    mode: Option<DaemonModeArgument>,
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
    history: Option<HistoryLocation>,
    /// Seed of what is random in its decisions
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Print each decision over a recording of many moments as a line of JSON (see `pagefold schema decision`)
    #[arg(long)]
    json: bool,
}

/// Arguments of `status`.
#[derive(Args, Debug)]
pub struct StatusArguments {
    /// Rows of each table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema status`)
    #[arg(long)]
    json: bool,
}

/// Arguments of `enrol` and `withdraw`.
#[derive(Args, Clone, Copy, Debug)]
pub struct ProcessArgument {
    /// The process by its number
    #[arg(value_name = "PID")]
    pid: u32,
}

/// Ask the daemon how it stands.
pub fn show_status(options: &StatusArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match send_request(&global.state, ControlRequest::Status)? {
        ControlReply::Status(status) if options.json => output::print_stdout(&wire::to_json(&*status))?,
        ControlReply::Status(status) => {
            output::print_stdout(&text::render(&status, options.top, output::stdout_style(global)))?
        }
        ControlReply::Done(why) | ControlReply::Refused(why) => bail!("{}", escape_unprintable(&why)),
    }
    Ok(CommandOutcome::Done)
}

/// Tell the daemon something.
pub fn send_control_request(request: ControlRequest, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match send_request(&global.state, request)? {
        ControlReply::Done(what) => output::print_stdout(&format!("{}\n", escape_unprintable(&what)))?,
        ControlReply::Refused(why) => bail!("{}", escape_unprintable(&why)),
        ControlReply::Status(_) => bail!("the daemon's answer is to another question: is it of another version?"),
    }
    Ok(CommandOutcome::Done)
}

impl ProcessArgument {
    /// To look at it now.
    pub fn enroll_request(self) -> ControlRequest {
        ControlRequest::Enroll(self.pid)
    }

    /// To leave it alone.
    pub fn unenroll_request(self) -> ControlRequest {
        ControlRequest::Unenroll(self.pid)
    }
}

/// Run until told to stop.
pub fn run(options: &DaemonArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let settings = load_settings(options, global)?;
    if let Some(folders) = replay::recording_folders(global)? {
        return replay::run(&folders, settings, options);
    }
    if options.json {
        bail!(
            "--json: only decisions over a recording of many moments are printed; `pagefold status --json` asks a daemon"
        );
    }
    // Where it cannot be had it takes more memory, that is all.
    let _ = daemon::return_large_blocks_when_freed();
    // It lives as long as the process, so that threads that answer may look at it.
    let host: &'static dyn Host = Box::leak(host_selection::open_host(global)?);
    if global.host == "live" {
        check_ksm_present(host)?;
    } else if settings.rules.mode == DaemonMode::Act {
        bail!("a recording cannot be changed: give --mode advise");
    }
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&global.state)
        .with_context(|| format!("cannot make {} (elsewhere give --state DIR)", global.state.display()))?;
    let control = ControlSocket::bind(&global.state)?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP]).context("cannot handle signals")?;
    let (sender, messages) = mpsc::channel();
    let desk = Arc::new(StatusDesk { host, sender: sender.clone(), cached_findings: Mutex::default() });
    let past = history_recorder::history_path(options, global)?;
    let shown = http::start_server(Arc::clone(&desk), options, past.as_deref(), global)?;
    let kept =
        past.map(|path| history_recorder::start_recorder(Arc::clone(&desk), &path, global)).transpose()?.flatten();
    control.serve_requests(Arc::new(move |request| desk.answer_request(request))).context("cannot start a thread")?;
    handle_signals(signals, sender.clone(), options, global)?;

    let mut notify = SystemdNotifier::from_environment();
    log_line(&format!("looking at {}, mode {}", host.describe(), mode_name(settings.rules.mode)));
    if settings.rules.mode == DaemonMode::Act
        && let Some(warning) = describe_unreadable_limits(host)
    {
        log_line(&warning);
    }
    let mut alive = |state: &DaemonState| {
        notify.notify_alive(&state.status().1);
        if let Some(kept) = &kept {
            kept.observe_state(state);
        }
    };
    let done = daemon::run(host, &global.state, settings, options.seed, (sender, messages), &mut alive, &mut |line| {
        log_line(line)
    });
    notify.send("STOPPING=1");
    drop(control);
    drop(shown);
    drop(kept);
    let whole = done?;
    log_line(if whole { "ended" } else { "ended, and not everything is as it was" });
    Ok(if whole { CommandOutcome::Done } else { CommandOutcome::Partial })
}

/// What is in force by the configuration and the command line.
fn load_settings(options: &DaemonArguments, global: &GlobalOptions) -> anyhow::Result<DaemonSettings> {
    let mut settings = Config::load(global)?.daemon_settings();
    if let Some(mode) = options.mode {
        settings.rules.mode = mode.into();
    }
    Ok(settings)
}

/// What cannot be unmerged later because limits of memory cannot be read.
fn describe_unreadable_limits(host: &dyn Host) -> Option<String> {
    let unknown = memory_headroom::unreadable_limits(host);
    let (place, why) = unknown.first()?;
    Some(format!(
        "warning: the memory limits of {} cgroups cannot be read, the first {place}: {why}. What is merged there will \
         not be unmerged by the daemon",
        unknown.len()
    ))
}

fn mode_name(mode: DaemonMode) -> &'static str {
    match mode {
        DaemonMode::Observe => "observe",
        DaemonMode::Advise => "advise",
        DaemonMode::Act => "act",
    }
}

/// One line on standard error, which systemd's journal keeps with the time.
fn log_line(line: &str) {
    // Nobody may be left to read it.
    let _ = writeln!(std::io::stderr(), "pagefold daemon: {}", escape_unprintable(line));
}

/// Take signals in on a thread of their own.
fn handle_signals(
    mut signals: Signals,
    sender: Sender<Message>,
    options: &DaemonArguments,
    global: &GlobalOptions,
) -> anyhow::Result<()> {
    let (options, global) = (options.clone(), global.clone());
    let unmerge = options.unmerge_on_exit;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let message = match signal {
                SIGHUP => match load_settings(&options, &global) {
                    Ok(settings) => {
                        log_line("the configuration was read again, but for http, http_names and history");
                        Message::Settings(Box::new(settings))
                    }
                    Err(error) => {
                        log_line(&format!("the configuration stays as it was: {error:#}"));
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
const FINDINGS_CACHE_TIMES: (u32, Duration, Duration) = (10_000, Duration::from_secs(600), Duration::from_secs(3600));

/// For how long an answer may take to be made.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);

/// What becomes of a process that an operator has enrolled.
fn enroll_outcome_text(state: &DaemonState) -> String {
    let then = match state.rules().mode {
        DaemonMode::Observe => return "nobody is looked at: the daemon only observes".to_owned(),
        DaemonMode::Advise => "nothing is merged: the daemon only advises",
        DaemonMode::Act => "what pays of it is merged",
    };
    let not_now = state.scan_block_reason().map(|why| format!(", but not now ({why})"));
    format!("it is looked at next{}; {then}", not_now.unwrap_or_default())
}

/// What becomes of a process that an operator has withdrawn.
fn unenroll_outcome_text(state: &DaemonState, pid: u32) -> String {
    match state.inaction_reason() {
        None => "it is left alone, and withdrawn as soon as there is memory for it".to_owned(),
        Some(why) => {
            let stays = format!("it is left alone, and what is merged of it stays so for now ({why})");
            format!("{stays}: `pagefold unmerge --pid {pid}` withdraws it")
        }
    }
}

/// Where requests are answered.
struct StatusDesk {
    host: &'static dyn Host,
    sender: Sender<Message>,
    /// What the doctor found, and until when that is shown.
    cached_findings: Mutex<Option<(Instant, Vec<FindingReport>)>>,
}

impl StatusDesk {
    fn answer_request(&self, request: ControlRequest) -> ControlReply {
        let tell = |event: Event, done: &str| match self.sender.send(Message::Event(event)) {
            Ok(()) => ControlReply::Done(done.to_owned()),
            Err(_) => ControlReply::Refused("the daemon ends".to_owned()),
        };
        let Some(snapshot) = self.request_snapshot() else {
            return ControlReply::Refused("the daemon ends".to_owned());
        };
        match request {
            ControlRequest::Status => ControlReply::Status(Box::new(self.build_status(&snapshot))),
            ControlRequest::Pause => {
                tell(Event::Pause, "paused: KSM's settings come back, and what is merged stays merged")
            }
            ControlRequest::Resume => tell(Event::Resume, "resumed"),
            ControlRequest::Enroll(pid) | ControlRequest::Unenroll(pid) => {
                let Some(who) = snapshot.tracked_processes.iter().find(|who| who.id.pid == Pid(pid)) else {
                    return ControlReply::Refused(format!(
                        "process {pid} is not managed: it is not there, has less memory than {}, or is not chosen by \
                         [daemon.only]",
                        snapshot.settings.min_resident
                    ));
                };
                let excluded =
                    snapshot.state.tracked().get(&who.id).and_then(|member| member.exclusion_reason.as_ref());
                match (request, excluded) {
                    (ControlRequest::Enroll(_), Some(why)) => {
                        ControlReply::Refused(format!("process {pid} is left alone: {why}"))
                    }
                    (ControlRequest::Enroll(_), None) => {
                        tell(Event::Enroll(who.id), &enroll_outcome_text(&snapshot.state))
                    }
                    _ => tell(Event::Unenroll(who.id), &unenroll_outcome_text(&snapshot.state, pid)),
                }
            }
        }
    }

    fn request_snapshot(&self) -> Option<Box<Snapshot>> {
        let (sender, answer) = mpsc::channel();
        self.sender.send(Message::StatusRequest(sender)).ok()?;
        answer.recv_timeout(SNAPSHOT_TIMEOUT).ok()
    }

    fn build_status(&self, snapshot: &Snapshot) -> StatusReport {
        let mut findings = self.cached_findings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if findings.as_ref().is_none_or(|(until, _)| now >= *until) {
            let found = status::collect_findings(self.host, &snapshot.settings);
            *findings = Some((
                now + (now.elapsed() * FINDINGS_CACHE_TIMES.0).clamp(FINDINGS_CACHE_TIMES.1, FINDINGS_CACHE_TIMES.2),
                found,
            ));
        }
        let found = findings.as_ref().map(|(_, found)| found.clone()).unwrap_or_default();
        drop(findings);
        status::build_status(self.host, snapshot, ProcessScope::All, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_daemon::decide::{DaemonRules, TickReadings, TimeOfDay, step};

    /// What is answered to who has a process enrolled, and withdrawn, after some events.
    fn operator_replies(mode: DaemonMode, events: impl IntoIterator<Item = Event>) -> [String; 2] {
        let hours = pagefold_daemon::decide::DailyHours { start_second: 10, end_second: 20, in_utc: true };
        let rules = DaemonRules { mode, quiet_hours: vec![hours], ..DaemonRules::default() };
        let state = DaemonState::new(rules, 0, Duration::ZERO, Duration::ZERO);
        let held = events.into_iter().chain([Event::HostAcquired(Ok(()))]);
        let state = held.fold(state, |state, event| step(state, Duration::ZERO, event).0);
        [enroll_outcome_text(&state), unenroll_outcome_text(&state, 7)]
    }

    #[test]
    fn operator_reply_matches_what_the_daemon_does() {
        let stays = |why: &str| {
            let stays = format!("it is left alone, and what is merged of it stays so for now ({why})");
            format!("{stays}: `pagefold unmerge --pid 7` withdraws it")
        };
        let withdrawn = "it is left alone, and withdrawn as soon as there is memory for it".to_owned();
        assert_eq!(
            operator_replies(DaemonMode::Act, []),
            ["it is looked at next; what pays of it is merged".to_owned(), withdrawn.clone()]
        );
        let quiet = TickReadings { time_of_day: TimeOfDay { local: 0, utc: 12 }, ..TickReadings::default() };
        let not_now = |why: &str| format!("it is looked at next, but not now ({why}); what pays of it is merged");
        assert_eq!(
            operator_replies(DaemonMode::Act, [Event::Tick(quiet)]),
            [not_now("these are quiet hours"), withdrawn]
        );
        let paused = "an operator paused it";
        assert_eq!(operator_replies(DaemonMode::Act, [Event::Pause]), [not_now(paused), stays(paused)]);
        let other = Event::SettingsOverwritten("somebody writes run".to_owned());
        assert_eq!(
            operator_replies(DaemonMode::Act, [other]),
            [not_now("somebody writes run"), stays("somebody writes run")]
        );
        let advice = "it is looked at next; nothing is merged: the daemon only advises".to_owned();
        assert_eq!(operator_replies(DaemonMode::Advise, []), [advice, stays("it only advises")]);
        let nobody = "nobody is looked at: the daemon only observes".to_owned();
        assert_eq!(operator_replies(DaemonMode::Observe, []), [nobody, stays("it only observes")]);
    }
}
