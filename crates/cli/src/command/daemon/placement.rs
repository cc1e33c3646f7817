//! The thread of the daemon that places virtual machines on NUMA nodes.

use super::log_line;
use crate::command_line::GlobalOptions;
use crate::config::Config;
use anyhow::Context;
use pagefold_daemon::wire::PlacementReport;
use pagefold_host::Host;
use pagefold_numa::keeper::{KeeperControl, KeeperReport, PlacementKeeper};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

/// The running thread. Dropping this ends it, and undoes a placement that is under way.
pub struct PlacementThread {
    shared: Arc<SharedPlacement>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares with the daemon.
#[derive(Debug, Default)]
pub struct SharedPlacement {
    control: KeeperControl,
    report: Mutex<KeeperReport>,
}

impl SharedPlacement {
    /// The state of the placement, for the status.
    pub fn report(&self) -> PlacementReport {
        let report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        PlacementReport {
            outcome: report.outcome.clone(),
            placed_machines: report.placed_machines,
            moved_bytes: report.moved_bytes,
            failed_undos: report.failed_undos,
        }
    }
}

impl PlacementThread {
    /// What the thread shares with the daemon.
    pub fn shared(&self) -> Arc<SharedPlacement> {
        Arc::clone(&self.shared)
    }

    /// Pauses the placement or lets it go on.
    pub fn set_paused(&self, paused: bool) {
        self.shared.control.set_paused(paused);
    }
}

impl Drop for PlacementThread {
    fn drop(&mut self) {
        self.shared.control.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Start the thread if the configuration asks for it. A recording is only advised on.
pub fn start(host: &'static dyn Host, global: &GlobalOptions) -> anyhow::Result<Option<PlacementThread>> {
    let Some(mut settings) = Config::load(global)?.placement else { return Ok(None) };
    settings.acts &= global.host == "live";
    let first = KeeperReport { outcome: "not checked yet".to_owned(), ..KeeperReport::default() };
    let shared = Arc::new(SharedPlacement { report: Mutex::new(first), ..SharedPlacement::default() });
    let (directory, own) = (global.state.clone(), Arc::clone(&shared));
    let keep = move || {
        PlacementKeeper::new(host, directory, settings).run(&own.control, &mut |report| {
            let last = {
                let mut shared = own.report.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::replace(&mut *shared, report.clone())
            };
            if report.outcome != last.outcome {
                log_line(&format!("placement on NUMA nodes: {}", report.outcome));
            }
        });
    };
    let thread = thread::Builder::new().name("placement".to_owned()).spawn(keep).context("cannot start a thread")?;
    Ok(Some(PlacementThread { shared, thread: Some(thread) }))
}
