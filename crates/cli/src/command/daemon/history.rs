//! What the daemon keeps of the past: its status, noted every ten seconds, each second while work is under way and when
//! somebody comes, and written to an SQLite database about once a minute and when a merge has ended. Between the notes
//! of a second, what merging saves is looked at alone, so that the course of a short merge is known.
//!
//! It is a thread of its own, so that a slow disk holds nobody up. Where the file cannot be used, that is said, and the
//! daemon goes on without.

use super::status::{self, Whom};
use super::{Desk, Options, log};
use crate::arguments::Global;
use crate::config::{Config, History};
use anyhow::Context;
use pagefold_daemon::decide::{Standing, State};
use pagefold_daemon::wire::Status;
use pagefold_history::points::Point;
use pagefold_history::series;
use pagefold_history::{Limits, Reader, Writer};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Between two looks at what merging saves, while work is under way.
const QUICK: Duration = Duration::from_millis(250);

/// Between two notes at least.
const NOTE: Duration = Duration::from_secs(1);

/// Between two notes otherwise.
const CALM: Duration = Duration::from_secs(10);

/// Between two commits, and between two looks at all members.
const COMMIT: Duration = Duration::from_secs(60);

/// Between two commits at least, however many passes end.
const SOON: Duration = Duration::from_secs(10);

/// Of the past before this daemon, what is shown.
const PAST: Duration = Duration::from_secs(86_400);

/// About so many points of the past in this history, with one at which nothing is known between two daemons; none where
/// there is no history yet, or it cannot be read, which is said.
pub fn past(path: &Path, most: usize) -> Vec<Point> {
    if !path.exists() {
        return Vec::new();
    }
    let until = now();
    let read = Reader::open(path).and_then(|reader| reader.samples(until - PAST.as_secs_f64(), until));
    let samples = read.unwrap_or_else(|error| {
        log(&format!("going on without the past: {:#}", anyhow::Error::from(error)));
        Vec::new()
    });
    let points = series::points(&series::thinned(&samples, most / 2));
    let mut past = Vec::new();
    for (i, point) in points.iter().enumerate() {
        past.push(Point {
            time: point.time,
            saved_gross: point.saved_gross,
            saved_net: point.saved_net,
            available: point.available,
            keep_available: point.keep_available,
            ksmd_percent: point.ksmd_percent,
            pagefold_percent: point.pagefold_percent,
            bound_percent: point.bound_percent,
        });
        if points.get(i + 1).is_none_or(|next| next.run != point.run) {
            past.push(Point::unknown(point.time + 0.001, point.bound_percent));
        }
    }
    past
}

/// A history that is kept until it is dropped, which writes what is left.
pub struct Kept {
    bell: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

/// Where the history is kept, as the command line, the configuration or the service manager says.
pub fn path(options: &Options, global: &Global) -> anyhow::Result<Option<PathBuf>> {
    let said = match &options.history {
        Some(said) => Some(said.clone()),
        None => Config::load(global)?.history,
    };
    Ok(match said {
        Some(History::Off) => None,
        Some(History::File(path)) => Some(path),
        // One directory is asked for; systemd separates several by colons.
        None => std::env::var_os("STATE_DIRECTORY").map(|directory| PathBuf::from(directory).join("history.db")),
    })
}

/// Keep the history in this file.
pub fn keep(desk: Arc<Desk>, path: &Path, global: &Global) -> anyhow::Result<Option<Kept>> {
    let host = if global.host == "live" { host_name() } else { desk.host.describe() };
    let writer = match open(path, &host) {
        Ok(writer) => writer,
        Err(error) => {
            log(&format!("going on without a history: {error:#}"));
            return Ok(None);
        }
    };
    log(&format!("keeping the history in {}", path.display()));
    let bell = Arc::new(Bell::default());
    let keeper = Keeper { desk, writer, bell: Arc::clone(&bell), failed: false };
    let thread = std::thread::Builder::new().name("history".to_owned()).spawn(move || keeper.run())?;
    Ok(Some(Kept { bell, thread: Some(thread) }))
}

fn open(path: &Path, host: &str) -> anyhow::Result<Writer> {
    if let Some(directory) = path.parent() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
    }
    Ok(Writer::open(path, Limits::default(), host, env!("CARGO_PKG_VERSION"), now())?)
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs_f64()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

impl Kept {
    /// Look at what the daemon does: work that begins, and who has come, is noted within a second.
    pub fn heed(&self, state: &State) {
        let waiting = state.members().values().filter(|member| member.is_new() && member.is_open()).count();
        self.bell.tell(state.standing().0 == Standing::Working, waiting);
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.bell.close();
        if let Some(thread) = self.thread.take() {
            // Whether it panicked or not, there is nothing left to keep.
            let _ = thread.join();
        }
    }
}

/// Wakes the thread.
#[derive(Debug, Default)]
struct Bell {
    state: Mutex<Ring>,
    news: Condvar,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Ring {
    /// Whether work is under way.
    busy: bool,
    /// How many have not been looked at yet.
    waiting: usize,
    /// Whether somebody has come, or work has ended, since the last note.
    come: bool,
    closed: bool,
}

impl Bell {
    fn tell(&self, busy: bool, waiting: usize) {
        let mut ring = self.state();
        let before = *ring;
        ring.come |= waiting > ring.waiting || ring.busy && !busy;
        (ring.busy, ring.waiting) = (busy, waiting);
        if *ring != before {
            self.news.notify_all();
        }
    }

    fn close(&self) {
        self.state().closed = true;
        self.news.notify_all();
    }

    /// Wait until it is time for the next look: so long while work is under way, otherwise so long. `false` once there
    /// is none.
    fn wait(&self, quick: Duration, calm: Duration) -> bool {
        let wait = |ring, pause, on: fn(&mut Ring) -> bool| {
            let (ring, _) = self.news.wait_timeout_while(ring, pause, on).unwrap_or_else(PoisonError::into_inner);
            ring
        };
        let ring = wait(self.state(), quick, |ring| !ring.closed);
        let ring = wait(ring, calm.saturating_sub(quick), |ring| !ring.closed && !ring.busy && !ring.come);
        !ring.closed
    }

    /// Who has come, and what work came to, is noted.
    fn noted(&self) {
        self.state().come = false;
    }

    fn state(&self) -> MutexGuard<'_, Ring> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Keeper {
    desk: Arc<Desk>,
    writer: Writer,
    bell: Arc<Bell>,
    /// Whether it has been said that nothing can be written.
    failed: bool,
}

impl Keeper {
    fn run(mut self) {
        let (mut noted, mut looked, mut committed): (Option<Instant>, Option<Instant>, Option<Instant>) =
            Default::default();
        let mut merges = 0;
        let passed = |since: Option<Instant>, time| since.is_none_or(|since| since.elapsed() >= time);
        loop {
            let all = passed(looked, COMMIT);
            if !passed(noted, NOTE) {
                self.look();
            } else if let Some(status) = self.note(all) {
                noted = Some(Instant::now());
                // Who is there is not known yet when the daemon has just started.
                if all && !status.members.is_empty() {
                    looked = Some(Instant::now());
                }
                if passed(committed, COMMIT) || status.passes.merges != merges && passed(committed, SOON) {
                    (committed, merges) = (Some(Instant::now()), status.passes.merges);
                    self.commit();
                }
            }
            if !self.bell.wait(QUICK, CALM) {
                break;
            }
        }
        if self.writer.is_pending() {
            self.commit();
        }
    }

    /// Note how the daemon stands, and what its members take where all are to be looked at; nothing where it ends.
    fn note(&mut self, all: bool) -> Option<Status> {
        self.bell.noted();
        let snapshot = self.desk.snapshot()?;
        let whom = if all { Whom::All } else { Whom::New };
        let status = status::status(self.desk.host, &snapshot, whom, Vec::new());
        self.writer.note(&status);
        if all && !status.members.is_empty() {
            self.writer.note_members(status.time, &status.members);
        }
        Some(status)
    }

    /// Look at what KSM counts of what merging saves.
    fn look(&mut self) {
        if let Some(gross) = status::counted_by_ksm(self.desk.host) {
            self.writer.note_counted(now(), gross);
        }
    }

    fn commit(&mut self) {
        match self.writer.commit() {
            Ok(()) => {
                if std::mem::take(&mut self.failed) {
                    log("the history is written again; what was noted meanwhile is lost");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    let why = anyhow::Error::from(error);
                    log(&format!("the history is not written for now, and the daemon goes on without: {why:#}"));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test may take.
    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn who_works_or_comes_is_not_waited_for() {
        let bell = Bell::default();
        let wait = || bell.wait(Duration::from_millis(1), LONG);
        bell.tell(true, 0);
        assert!(wait() && wait(), "while work is under way");
        bell.tell(false, 1);
        assert!(wait() && wait(), "somebody has come, and is not noted");
        bell.noted();
        bell.tell(false, 0);
        assert!(!bell.state().come, "who goes rings nothing");
        bell.tell(true, 0);
        bell.tell(false, 0);
        assert!(bell.state().come, "what came of work is noted, however short it was");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| bell.wait(LONG, LONG));
            bell.close();
            assert!(!waits.join().expect("it ends"));
        });
    }
}
