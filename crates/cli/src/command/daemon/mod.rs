//! `pagefold daemon`: merge pages with net savings continuously, within a CPU limit; and the commands that control it.

pub mod control_socket;
mod history_recorder;
mod http;
mod notify;
mod placement;
mod replay;
pub mod scenario_end;
mod status;
mod vm_cpus;

use crate::command::recover::check_ksm_present;
use crate::command_line::GlobalOptions;
use crate::config::{Config, DaemonModeArgument, HistoryLocation};
use crate::{CommandOutcome, host_selection, output};
use anyhow::{Context, bail};
use clap::Args;
use control_socket::{ControlRequest, ControlSocket, send_request};
use notify::SystemdNotifier;
use pagefold_base::Pid;
use pagefold_daemon::decide::{DaemonMode, DaemonRules, DaemonState, Event};
use pagefold_daemon::run as daemon;
use pagefold_daemon::run::{DaemonSettings, Message, Snapshot};
use pagefold_daemon::text;
use pagefold_daemon::wire::{ControlReply, StatusReport};
use pagefold_doctor::wire::FindingReport;
use pagefold_host::{Host, memory_headroom, observe};
use pagefold_output::text::escape_unprintable;
use pagefold_output::wire;
use pagefold_vcpu::monitor::MachineMonitor;
use placement::{PlacementThread, SharedPlacement};
use scenario_end::ScenarioEnd;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use status::ProcessScope;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagefold daemon                        report predicted savings, and change nothing
  pagefold daemon --mode act             merge, with 10 % of one CPU or 1 % of all CPUs on average
  pagefold daemon --http                 serve a page and metrics at http://127.0.0.1:9750/
  pagefold daemon --history /var/lib/pagefold/history.db
                                         record a history for `pagefold report`
  pagefold status                        show its state, savings and costs
  pagefold top                           the same, updated live
  pagefold pause                         restore KSM's settings; `pagefold resume` continues
  pagefold --host sim:SCENARIO --state /tmp/state daemon --mode act
                                         run on a simulated host until its scenario is over,
                                         in virtual time and without root
  pagefold --host recording:DIR daemon   show what it would do on a recorded host: a recording
                                         runs until stopped, a trace (`record --interval`) at once

The configuration sets what it does (`pagefold config default`). SIGHUP reads the configuration again, \
except http, http_names, history and placement.

SIGTERM stops the daemon: it restores KSM's settings; merged pages stay merged. With --unmerge-on-exit the daemon \
first unenrolls all that it or an earlier daemon enrolled, as far as there is memory, even if it is paused. It skips \
this if its mode is observe or advise at that time, or if another program controls KSM. SIGUSR1 hands over to the next \
daemon: merged pages stay merged in any case. The service uses it when it is restarted or upgraded.

The next daemon of the same boot takes over what earlier ones enrolled: it watches the merged pages, and unenrolls \
them under the same rules. `pagefold recover --unenroll` unenrolls them without a daemon. A pause and processes \
unenrolled by an operator outlast a daemon that hands over or is killed, but not one that is stopped.

Exit status: 0 stopped and everything undone, 2 it could not run, 3 not everything could be undone, or a \
process that had to be unenrolled stays merged (with --unmerge-on-exit all processes). Standard error names \
the processes and reasons.";

/// Arguments of `daemon`.
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct DaemonArguments {
    /// What the daemon may do [default: from the configuration, otherwise advise]
    #[arg(long, value_enum)]
    mode: Option<DaemonModeArgument>,
    /// At a stop, unenroll and unmerge all that this or an earlier daemon enrolled, as far as there is memory
    #[arg(long)]
    unmerge_on_exit: bool,
    /// Serve the status over HTTP at this address, 127.0.0.1:9750 if none is given [default: from the configuration,
    /// otherwise off]
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "127.0.0.1:9750")]
    http: Option<SocketAddr>,
    /// Record the history in this file (absolute path), or `off` [default: from the configuration, otherwise history.db
    /// in the service's $STATE_DIRECTORY, otherwise off]
    #[arg(long, value_name = "FILE")]
    history: Option<HistoryLocation>,
    /// Seed of the random choices
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// With --host recording:DIR of a trace (`record --interval`): print each decision as a line of JSON (see `pagefold
    /// schema decision`)
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

/// Arguments of `enroll` and `unenroll`.
#[derive(Args, Clone, Copy, Debug)]
pub struct ProcessArgument {
    /// The PID of the process
    #[arg(value_name = "PID")]
    pid: u32,
}

/// Print the status of the daemon.
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

/// Send a request to the daemon and print its answer.
pub fn send_control_request(request: ControlRequest, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    match send_request(&global.state, request)? {
        ControlReply::Done(what) => output::print_stdout(&format!("{}\n", escape_unprintable(&what)))?,
        ControlReply::Refused(why) => bail!("{}", escape_unprintable(&why)),
        ControlReply::Status(_) => bail!("the daemon answered another request: does it have another version?"),
    }
    Ok(CommandOutcome::Done)
}

impl ProcessArgument {
    /// The request to scan it now.
    pub fn enroll_request(self) -> ControlRequest {
        ControlRequest::Enroll(self.pid)
    }

    /// The request to unenroll it and leave it alone.
    pub fn unenroll_request(self) -> ControlRequest {
        ControlRequest::Unenroll(self.pid)
    }
}

/// Run until a signal stops it.
pub fn run(options: &DaemonArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let config = Config::load(global)?;
    if let Some(folders) = replay::recording_folders(global)? {
        return replay::run(&folders, &config, options);
    }
    if options.json {
        bail!("--json prints only decisions over a trace; `pagefold status --json` prints the status of a daemon");
    }
    let is_simulated = host_selection::is_simulated(global);
    // If this fails, the daemon only uses more memory.
    let _ = daemon::return_large_blocks_when_freed();
    // Leaked so that the threads that answer requests can read it for as long as the process runs.
    let host: &'static dyn Host = Box::leak(host_selection::open_host(global)?);
    let settings = resolve_settings(&config, options, host, is_simulated)?;
    if global.host == "live" {
        check_ksm_present(host)?;
    } else if host_selection::is_recording(global) && settings.rules.mode == DaemonMode::Act {
        bail!("a recording cannot be changed: give --mode advise");
    }
    create_state_directory(&global.state)?;
    let control = ControlSocket::bind(&global.state)?;
    let signals = Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).context("cannot handle signals")?;
    let (sender, messages) = mpsc::channel();
    let placement = placement::start(host, global)?;
    let status_source = Arc::new(StatusSource {
        host,
        sender: sender.clone(),
        placement: placement.as_ref().map(PlacementThread::shared),
        vm_cpus: Mutex::default(),
        cached_findings: Mutex::default(),
    });
    let history_path = history_recorder::history_path(options, global)?;
    let http_server = http::start_server(Arc::clone(&status_source), options, history_path.as_deref(), global)?;
    let recorder = history_path
        .map(|path| history_recorder::start_recorder(Arc::clone(&status_source), &path, global))
        .transpose()?
        .flatten();
    control
        .serve_requests(Arc::new(move |request| status_source.answer_request(request)))
        .context("cannot start a thread")?;
    handle_signals(signals, sender.clone(), options, global, host)?;

    let mut notify = SystemdNotifier::from_environment();
    log_line(&format!("started on {}, mode {}", host.describe(), mode_name(settings.rules.mode)));
    log_line(&describe_cpu_bound(&settings.rules));
    if settings.rules.mode == DaemonMode::Act
        && let Some(warning) = describe_unreadable_limits(host)
    {
        log_line(&warning);
    }
    let mut end = host_selection::simulated_duration(global)?
        .map(|duration| ScenarioEnd::new(host, duration, sender.clone(), options.unmerge_on_exit));
    let mut on_alive = |state: &DaemonState| {
        if end.as_mut().is_some_and(|end| end.stop_if_over(host)) {
            log_line(&scenario_end::describe_savings(host));
        }
        notify.notify_alive(&state.status().1);
        if let Some(placement) = &placement {
            placement.set_paused(state.is_paused());
            placement.set_contents(state);
        }
        if let Some(recorder) = &recorder {
            recorder.observe_state(state);
        }
    };
    let result =
        daemon::run(host, &global.state, settings, options.seed, (sender, messages), &mut on_alive, &mut |line| {
            log_line(line)
        });
    notify.send("STOPPING=1");
    drop(placement);
    drop(control);
    drop(http_server);
    drop(recorder);
    let all_undone = result?;
    if let Some(why) = host.simulation_failure() {
        bail!("machines of the scenario are missing, or write no more: {why}");
    }
    log_line(if all_undone { "ended" } else { "ended, but not all changes are undone" });
    Ok(if all_undone { CommandOutcome::Done } else { CommandOutcome::Partial })
}

fn create_state_directory(path: &Path) -> anyhow::Result<()> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot create the state directory {}: pass --state DIR", path.display()))
}

/// The settings in force on a host, from the configuration and the command line.
fn resolve_settings(
    config: &Config,
    options: &DaemonArguments,
    host: &dyn Host,
    is_simulated: bool,
) -> anyhow::Result<DaemonSettings> {
    let mut settings = config.daemon_settings(observe::online_cpu_count(host).ok())?;
    if let Some(mode) = options.mode {
        settings.rules.mode = mode.into();
    }
    if is_simulated {
        settings.max_census_threads = 1;
    }
    Ok(settings)
}

/// The bound on CPU time in words.
fn describe_cpu_bound(rules: &DaemonRules) -> String {
    let (percent, burst) = (rules.cpu_rate * 100.0, rules.burst.as_secs_f64());
    format!("CPU bound of ksmd and pagefold: {percent:.1} % of one CPU on average, bursts of {burst:.0} s")
}

/// A warning about cgroups that the daemon cannot unmerge later, because their memory limits cannot be read.
fn describe_unreadable_limits(host: &dyn Host) -> Option<String> {
    let unreadable = memory_headroom::unreadable_limits(host);
    let (cgroup, why) = unreadable.first()?;
    Some(format!(
        "warning: the memory limits of {} cgroups cannot be read, the first is {cgroup}: {why}. The daemon will not \
         unmerge pages of their processes",
        unreadable.len()
    ))
}

fn mode_name(mode: DaemonMode) -> &'static str {
    match mode {
        DaemonMode::Observe => "observe",
        DaemonMode::Advise => "advise",
        DaemonMode::Act => "act",
    }
}

/// Write one line to standard error, which systemd's journal stores with the time.
fn log_line(line: &str) {
    // Standard error may have no reader.
    let _ = writeln!(std::io::stderr(), "pagefold daemon: {}", escape_unprintable(line));
}

/// Handle signals on a separate thread.
fn handle_signals(
    mut signals: Signals,
    sender: Sender<Message>,
    options: &DaemonArguments,
    global: &GlobalOptions,
    host: &'static dyn Host,
) -> anyhow::Result<()> {
    let (options, global) = (options.clone(), global.clone());
    let (unmerge, is_simulated) = (options.unmerge_on_exit, host_selection::is_simulated(&global));
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for signal in signals.forever() {
            let message = match signal {
                SIGHUP => match Config::load(&global)
                    .and_then(|config| resolve_settings(&config, &options, host, is_simulated))
                {
                    Ok(settings) => {
                        log_line("the configuration was read again, except http, http_names, history and placement");
                        log_line(&describe_cpu_bound(&settings.rules));
                        Message::Settings(Box::new(settings))
                    }
                    Err(error) => {
                        log_line(&format!("the configuration stays as it was: {error:#}"));
                        continue;
                    }
                },
                SIGUSR1 => Message::Event(Event::HandOver),
                _ => Message::Event(Event::Stop { unmerge }),
            };
            if sender.send(message).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// How long the doctor's findings are cached: ten thousand times the time they took, from ten minutes to an hour.
const FINDINGS_CACHE_TIMES: (u32, Duration, Duration) = (10_000, Duration::from_secs(600), Duration::from_secs(3600));

/// The time limit for a snapshot.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);

/// The answer to `enroll`: what the daemon does with the process.
fn enroll_outcome_text(state: &DaemonState) -> String {
    let effect = match state.rules().mode {
        DaemonMode::Observe => return "nothing is scanned: the daemon only observes".to_owned(),
        DaemonMode::Advise => "nothing is merged: the daemon only advises",
        DaemonMode::Act => "its pages with net savings are merged",
    };
    let delay_note = state.scan_block_reason().map(|why| format!(", but not now ({why})"));
    format!("it is scanned next{}; {effect}", delay_note.unwrap_or_default())
}

/// The answer to `unenroll`: what the daemon does with the process.
fn unenroll_outcome_text(state: &DaemonState, pid: u32) -> String {
    match state.inaction_reason() {
        None => "it is left alone, and unenrolled as soon as there is memory for it".to_owned(),
        Some(why) => {
            let outcome = format!("it is left alone, and its merged pages stay merged for now ({why})");
            format!("{outcome}: `pagefold unmerge --pid {pid}` unenrolls it")
        }
    }
}

/// Answers requests, from snapshots of the daemon.
struct StatusSource {
    host: &'static dyn Host,
    sender: Sender<Message>,
    /// The placement of virtual machines, if it is on.
    placement: Option<Arc<SharedPlacement>>,
    /// The last reading of how virtual machines wait for CPUs.
    vm_cpus: Mutex<MachineMonitor>,
    /// The doctor's findings, and when they expire.
    cached_findings: Mutex<Option<(Instant, Vec<FindingReport>)>>,
}

impl StatusSource {
    fn answer_request(&self, request: ControlRequest) -> ControlReply {
        let send_event = |event: Event, message: &str| match self.sender.send(Message::Event(event)) {
            Ok(()) => ControlReply::Done(message.to_owned()),
            Err(_) => ControlReply::Refused("the daemon is ending".to_owned()),
        };
        let Some(snapshot) = self.request_snapshot() else {
            return ControlReply::Refused("the daemon is ending".to_owned());
        };
        match request {
            ControlRequest::Status => ControlReply::Status(Box::new(self.build_status(&snapshot))),
            ControlRequest::Pause => {
                let message = match self.placement {
                    None => "paused: KSM's settings are restored, and merged pages stay merged",
                    Some(_) => {
                        "paused: KSM's settings are restored, merged pages stay merged, and a placement on NUMA nodes \
                         that is under way is undone"
                    }
                };
                send_event(Event::Pause, message)
            }
            ControlRequest::Resume => send_event(Event::Resume, "resumed"),
            ControlRequest::Enroll(pid) | ControlRequest::Unenroll(pid) => {
                let Some(process) = snapshot.tracked_processes.iter().find(|process| process.id.pid == Pid(pid)) else {
                    return ControlReply::Refused(format!(
                        "process {pid} is not tracked: it does not exist, has less memory than {}, or does not match \
                         [daemon.tracked]",
                        snapshot.settings.min_resident
                    ));
                };
                let exclusion_reason =
                    snapshot.state.tracked().get(&process.id).and_then(|tracked| tracked.exclusion_reason.as_ref());
                match (request, exclusion_reason) {
                    (ControlRequest::Enroll(_), Some(why)) => {
                        ControlReply::Refused(format!("process {pid} is excluded: {why}"))
                    }
                    (ControlRequest::Enroll(_), None) => {
                        send_event(Event::Enroll(process.id), &enroll_outcome_text(&snapshot.state))
                    }
                    _ => send_event(Event::Unenroll(process.id), &unenroll_outcome_text(&snapshot.state, pid)),
                }
            }
        }
    }

    fn request_snapshot(&self) -> Option<Box<Snapshot>> {
        let (sender, receiver) = mpsc::channel();
        self.sender.send(Message::StatusRequest(sender)).ok()?;
        receiver.recv_timeout(SNAPSHOT_TIMEOUT).ok()
    }

    fn build_status(&self, snapshot: &Snapshot) -> StatusReport {
        let mut findings = self.cached_findings.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let now = Instant::now();
        if findings.as_ref().is_none_or(|(expiry, _)| now >= *expiry) {
            let found = status::collect_findings(self.host, &snapshot.settings);
            *findings = Some((
                now + (now.elapsed() * FINDINGS_CACHE_TIMES.0).clamp(FINDINGS_CACHE_TIMES.1, FINDINGS_CACHE_TIMES.2),
                found,
            ));
        }
        let found = findings.as_ref().map(|(_, found)| found.clone()).unwrap_or_default();
        drop(findings);
        let placement = self.placement.as_ref().map(|placement| placement.report());
        let mut monitor = self.vm_cpus.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (vm_cpus, vm_cpus_omitted) = vm_cpus::read_vm_cpus(&mut monitor, self.host);
        drop(monitor);
        let status = status::build_status(self.host, snapshot, ProcessScope::All, found);
        StatusReport { placement, vm_cpus, vm_cpus_omitted, ..status }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagefold_daemon::decide::{TickReadings, TimeOfDay, step};

    /// The answers to `enroll` and `unenroll` after some events.
    fn operator_replies(mode: DaemonMode, events: impl IntoIterator<Item = Event>) -> [String; 2] {
        let hours = pagefold_daemon::decide::DailyHours { start_second: 10, end_second: 20, in_utc: true };
        let rules = DaemonRules { mode, quiet_hours: vec![hours], ..DaemonRules::default() };
        let state = DaemonState::new(rules, 0, Duration::ZERO, Duration::ZERO);
        let events = events.into_iter().chain([Event::HostAcquired(Ok(()))]);
        let state = events.fold(state, |state, event| step(state, Duration::ZERO, event).0);
        [enroll_outcome_text(&state), unenroll_outcome_text(&state, 7)]
    }

    #[test]
    fn operator_reply_matches_what_the_daemon_does() {
        let stays_merged = |why: &str| {
            let stays_merged = format!("it is left alone, and its merged pages stay merged for now ({why})");
            format!("{stays_merged}: `pagefold unmerge --pid 7` unenrolls it")
        };
        let unenrolled = "it is left alone, and unenrolled as soon as there is memory for it".to_owned();
        assert_eq!(
            operator_replies(DaemonMode::Act, []),
            ["it is scanned next; its pages with net savings are merged".to_owned(), unenrolled.clone()]
        );
        let quiet = TickReadings { time_of_day: TimeOfDay { local: 0, utc: 12 }, ..TickReadings::default() };
        let delayed =
            |why: &str| format!("it is scanned next, but not now ({why}); its pages with net savings are merged");
        assert_eq!(
            operator_replies(DaemonMode::Act, [Event::Tick(quiet)]),
            [delayed("these are quiet hours"), unenrolled]
        );
        let paused = "an operator paused it";
        assert_eq!(operator_replies(DaemonMode::Act, [Event::Pause]), [delayed(paused), stays_merged(paused)]);
        let other = Event::SettingsOverwritten("ksmtuned writes run".to_owned());
        assert_eq!(
            operator_replies(DaemonMode::Act, [other]),
            [delayed("ksmtuned writes run"), stays_merged("ksmtuned writes run")]
        );
        let advice = "it is scanned next; nothing is merged: the daemon only advises".to_owned();
        assert_eq!(operator_replies(DaemonMode::Advise, []), [advice, stays_merged("it only advises")]);
        let not_scanned = "nothing is scanned: the daemon only observes".to_owned();
        assert_eq!(operator_replies(DaemonMode::Observe, []), [not_scanned, stays_merged("it only observes")]);
    }
}
