//! Records the daemon's history. A sample of the status is taken every ten seconds. While work is in progress, and when
//! a new process arrives, one is taken every second. Samples are committed to an SQLite database about once a minute
//! and when a merge has ended. Between the samples of a second, only the savings are read, to record the course of a
//! short merge.
//!
//! The recorder has its own thread, so that a slow disk does not delay the daemon. If the file cannot be used, the
//! daemon logs that and continues without a history.

use super::status::{self, ProcessScope};
use super::{DaemonArguments, StatusSource, log_line};
use crate::command_line::GlobalOptions;
use crate::config::{Config, HistoryLocation};
use crate::host_selection;
use anyhow::{Context, bail};
use pagefold_daemon::decide::{DaemonState, DaemonStatus};
use pagefold_daemon::wire::StatusReport;
use pagefold_history::points::HistoryPoint;
use pagefold_history::series;
use pagefold_history::{HistoryLimits, HistoryReader, HistoryWriter};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// The interval between two reads of the savings while work is in progress.
const BUSY_SAVINGS_INTERVAL: Duration = Duration::from_millis(250);

/// The minimum interval between two samples.
const MIN_NOTE_INTERVAL: Duration = Duration::from_secs(1);

/// The interval between two samples while no work is in progress.
const IDLE_NOTE_INTERVAL: Duration = Duration::from_secs(10);

/// The interval between two commits, and between two samples of all tracked processes.
const COMMIT_INTERVAL: Duration = Duration::from_secs(60);

/// The minimum interval between two commits, even if many passes end.
const MIN_COMMIT_INTERVAL: Duration = Duration::from_secs(10);

/// How much history from before this daemon is shown.
const MAX_SHOWN_HISTORY: Duration = Duration::from_secs(86_400);

/// Load at most about `max_points` points of a history, with an unknown point between two daemons. Returns none if
/// there is no history yet, or if it cannot be read, which is logged.
pub fn load_points(path: &Path, max_points: usize) -> Vec<HistoryPoint> {
    if !path.exists() {
        return Vec::new();
    }
    let until = unix_now();
    let loaded =
        HistoryReader::open(path).and_then(|reader| reader.samples(until - MAX_SHOWN_HISTORY.as_secs_f64(), until));
    let samples = loaded.unwrap_or_else(|error| {
        log_line(&format!("continuing without the earlier history: {:#}", anyhow::Error::from(error)));
        Vec::new()
    });
    let points = series::points_from_samples(&series::thin_samples(&samples, max_points / 2));
    let mut history_points = Vec::new();
    for (i, point) in points.iter().enumerate() {
        history_points.push(HistoryPoint {
            time: point.time,
            saved_gross: point.saved_gross,
            saved_net: point.saved_net,
            available: point.available,
            keep_available: point.keep_available,
            ksmd_percent: point.ksmd_percent,
            pagefold_percent: point.pagefold_percent,
            bound_percent: point.bound_percent,
        });
        if points.get(i + 1).is_none_or(|next| next.run_id != point.run_id) {
            history_points.push(HistoryPoint::unknown(point.time + 0.001, point.bound_percent));
        }
    }
    history_points
}

/// Records a history until it is dropped; dropping it commits the remaining samples.
pub struct HistoryRecorder {
    signal: Arc<RecorderSignal>,
    thread: Option<JoinHandle<()>>,
}

/// The history file, from the command line, the configuration or the service manager. A simulated host has none, since
/// the history keeps real time.
pub fn history_path(options: &DaemonArguments, global: &GlobalOptions) -> anyhow::Result<Option<PathBuf>> {
    if host_selection::is_simulated(global) {
        if let Some(HistoryLocation::File(_)) = options.history {
            bail!("--history: a simulated host has no history, because that keeps real time: leave the option out");
        }
        return Ok(None);
    }
    let location = match &options.history {
        Some(location) => Some(location.clone()),
        None => Config::load(global)?.history,
    };
    Ok(match location {
        Some(HistoryLocation::Off) => None,
        Some(HistoryLocation::File(path)) => Some(path),
        // systemd would separate several directories by colons; the unit has only one.
        None => std::env::var_os("STATE_DIRECTORY").map(|directory| PathBuf::from(directory).join("history.db")),
    })
}

/// Record the history in this file.
pub fn start_recorder(
    status_source: Arc<StatusSource>,
    path: &Path,
    global: &GlobalOptions,
) -> anyhow::Result<Option<HistoryRecorder>> {
    let host = if global.host == "live" { host_name() } else { status_source.host.describe() };
    let writer = match open_writer(path, &host) {
        Ok(writer) => writer,
        Err(error) => {
            log_line(&format!("continuing without a history: {error:#}"));
            return Ok(None);
        }
    };
    log_line(&format!("recording the history in {}", path.display()));
    let signal = Arc::new(RecorderSignal::default());
    let recorder = RecorderThread { status_source, writer, signal: Arc::clone(&signal), failure_logged: false };
    let thread = std::thread::Builder::new().name("history".to_owned()).spawn(move || recorder.run())?;
    Ok(Some(HistoryRecorder { signal, thread: Some(thread) }))
}

fn open_writer(path: &Path, host: &str) -> anyhow::Result<HistoryWriter> {
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
    }
    Ok(HistoryWriter::open(path, HistoryLimits::default(), host, env!("CARGO_PKG_VERSION"), unix_now())?)
}

/// The Unix time in seconds.
fn unix_now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl HistoryRecorder {
    /// Report the state of the daemon. When work begins or processes arrive, a sample follows within a second.
    pub fn observe_state(&self, state: &DaemonState) {
        let unscanned_processes =
            state.tracked().values().filter(|process| process.is_unscanned() && process.may_be_scanned()).count();
        self.signal.report_activity(state.status().0 == DaemonStatus::Working, unscanned_processes);
    }
}

impl Drop for HistoryRecorder {
    fn drop(&mut self) {
        self.signal.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread needs no handling here: nothing is left to record.
            let _ = thread.join();
        }
    }
}

/// Wakes the recorder thread.
#[derive(Debug, Default)]
struct RecorderSignal {
    activity: Mutex<RecorderActivity>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct RecorderActivity {
    /// Whether work is in progress.
    is_working: bool,
    /// The number of processes that have not been scanned yet.
    unscanned_processes: usize,
    /// Whether a process has arrived, or work has ended, since the last sample.
    note_due: bool,
    is_closed: bool,
}

impl RecorderSignal {
    fn report_activity(&self, is_working: bool, unscanned_processes: usize) {
        let mut activity = self.lock_activity();
        let before = *activity;
        activity.note_due |= unscanned_processes > activity.unscanned_processes || activity.is_working && !is_working;
        (activity.is_working, activity.unscanned_processes) = (is_working, unscanned_processes);
        if *activity != before {
            self.changed.notify_all();
        }
    }

    fn close(&self) {
        self.lock_activity().is_closed = true;
        self.changed.notify_all();
    }

    /// Wait for the next sample: `busy_interval` while work is in progress, otherwise `idle_interval`. Returns `false`
    /// once the recorder is closed.
    fn wait_for_note(&self, busy_interval: Duration, idle_interval: Duration) -> bool {
        let wait = |activity, timeout, condition: fn(&mut RecorderActivity) -> bool| {
            let (activity, _) =
                self.changed.wait_timeout_while(activity, timeout, condition).unwrap_or_else(PoisonError::into_inner);
            activity
        };
        let activity = wait(self.lock_activity(), busy_interval, |activity| !activity.is_closed);
        let activity = wait(activity, idle_interval.saturating_sub(busy_interval), |activity| {
            !activity.is_closed && !activity.is_working && !activity.note_due
        });
        !activity.is_closed
    }

    /// Clear the flag for new processes and ended work before a sample.
    fn clear_note_due(&self) {
        self.lock_activity().note_due = false;
    }

    fn lock_activity(&self) -> MutexGuard<'_, RecorderActivity> {
        self.activity.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct RecorderThread {
    status_source: Arc<StatusSource>,
    writer: HistoryWriter,
    signal: Arc<RecorderSignal>,
    /// Whether a failed commit was already logged.
    failure_logged: bool,
}

impl RecorderThread {
    fn run(mut self) {
        let (mut last_sample, mut last_full_sample, mut last_commit): (
            Option<Instant>,
            Option<Instant>,
            Option<Instant>,
        ) = Default::default();
        let mut committed_merges = 0;
        let has_passed = |since: Option<Instant>, interval| since.is_none_or(|since| since.elapsed() >= interval);
        loop {
            let with_all_processes = has_passed(last_full_sample, COMMIT_INTERVAL);
            if !has_passed(last_sample, MIN_NOTE_INTERVAL) {
                self.note_savings();
            } else if let Some(status) = self.note_status(with_all_processes) {
                last_sample = Some(Instant::now());
                // A daemon that has just started does not know the processes yet.
                if with_all_processes && !status.tracked_processes.is_empty() {
                    last_full_sample = Some(Instant::now());
                }
                if has_passed(last_commit, COMMIT_INTERVAL)
                    || status.passes.merges != committed_merges && has_passed(last_commit, MIN_COMMIT_INTERVAL)
                {
                    (last_commit, committed_merges) = (Some(Instant::now()), status.passes.merges);
                    self.commit();
                }
            }
            if !self.signal.wait_for_note(BUSY_SAVINGS_INTERVAL, IDLE_NOTE_INTERVAL) {
                break;
            }
        }
        if self.writer.is_pending() {
            self.commit();
        }
    }

    /// Take a sample of the status, and of all tracked processes if `with_all_processes` is set. Returns `None` if the
    /// daemon is ending.
    fn note_status(&mut self, with_all_processes: bool) -> Option<StatusReport> {
        self.signal.clear_note_due();
        let snapshot = self.status_source.request_snapshot()?;
        let scope = if with_all_processes { ProcessScope::All } else { ProcessScope::Unscanned };
        let status = status::build_status(self.status_source.host, &snapshot, scope, Vec::new());
        self.writer.note_status(&status);
        if with_all_processes && !status.tracked_processes.is_empty() {
            self.writer.note_footprints(status.time, &status.tracked_processes);
        }
        Some(status)
    }

    /// Sample the savings by KSM's counters.
    fn note_savings(&mut self) {
        if let Some(gross) = status::gross_saved_by_ksm(self.status_source.host) {
            self.writer.note_saved_by_ksm(unix_now(), gross);
        }
    }

    fn commit(&mut self) {
        match self.writer.commit() {
            Ok(()) => {
                if std::mem::take(&mut self.failure_logged) {
                    log_line("the history is written again; samples from the meantime are lost");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failure_logged, true) {
                    let why = anyhow::Error::from(error);
                    log_line(&format!("cannot write the history, continuing without it for now: {why:#}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test takes.
    const LONG_INTERVAL: Duration = Duration::from_secs(3600);

    #[test]
    fn work_or_arrival_ends_the_wait() {
        let signal = RecorderSignal::default();
        let wait = || signal.wait_for_note(Duration::from_millis(1), LONG_INTERVAL);
        signal.report_activity(true, 0);
        assert!(wait() && wait(), "work is in progress");
        signal.report_activity(false, 1);
        assert!(wait() && wait(), "a process has arrived and is not sampled yet");
        signal.clear_note_due();
        signal.report_activity(false, 0);
        assert!(!signal.lock_activity().note_due, "an ended process wakes nothing");
        signal.report_activity(true, 0);
        signal.report_activity(false, 0);
        assert!(signal.lock_activity().note_due, "ended work is sampled, however short it was");
        std::thread::scope(|scope| {
            let waiting_thread = scope.spawn(|| signal.wait_for_note(LONG_INTERVAL, LONG_INTERVAL));
            signal.close();
            assert!(!waiting_thread.join().expect("the waiting thread ends"));
        });
    }
}
