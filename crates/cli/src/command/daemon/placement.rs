//! The thread of the daemon that places virtual machines on NUMA nodes.

use super::log_line;
use crate::command::numa_placement::placement_rivals;
use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::host_selection;
use anyhow::Context;
use pagefold_daemon::decide::{DaemonMode, DaemonState};
use pagefold_daemon::wire::{LastPlanReport, PlacementModeName, PlacementReport, PlacementStateName};
use pagefold_host::Host;
use pagefold_numa::keeper::{KeeperActivity, KeeperControl, KeeperReport, PlacementKeeper};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

/// The running thread. Dropping this ends it, and undoes a placement that is under way.
pub struct PlacementThread {
    shared: Arc<SharedPlacement>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread shares with the daemon.
#[derive(Debug, Default)]
pub struct SharedPlacement {
    mode: PlacementModeName,
    control: KeeperControl,
    report: Mutex<KeeperReport>,
}

impl SharedPlacement {
    /// The state of the placement, for the status.
    pub fn report(&self) -> PlacementReport {
        let report = self.report.lock().unwrap_or_else(PoisonError::into_inner);
        let unix_seconds = |time: SystemTime| {
            time.duration_since(SystemTime::UNIX_EPOCH).map_or(0.0, |since_epoch| since_epoch.as_secs_f64())
        };
        let last_plan = report.last_plan.as_ref();
        PlacementReport {
            mode: self.mode,
            state: match report.activity {
                KeeperActivity::Idle(_) => PlacementStateName::Idle,
                KeeperActivity::Paused => PlacementStateName::Paused,
                KeeperActivity::Planning => PlacementStateName::Planning,
                KeeperActivity::Placing { .. } => PlacementStateName::Placing,
            },
            why: report.activity.describe(),
            last_plan: last_plan
                .map(|plan| LastPlanReport { time: unix_seconds(plan.time), result: plan.result.clone() }),
            placed_machines: report.placed_machines,
            failed_machines: report.failed_machines,
            moved_bytes: report.moved_bytes,
            failed_undos: report.failed_undos,
            planned_gain: report.planned_gain.into(),
            placed_gain: report.placed_gain.into(),
        }
    }
}

impl PlacementThread {
    /// What the thread shares with the daemon.
    pub fn shared(&self) -> Arc<SharedPlacement> {
        Arc::clone(&self.shared)
    }

    /// Tells the placement the contents of the tracked processes, if censuses find them out. A daemon that only observes
    /// takes none.
    pub fn set_contents(&self, state: &DaemonState) {
        if state.rules().mode == DaemonMode::Observe {
            return;
        }
        let contents = state.tracked().iter().filter_map(|(&process, tracked)| {
            Some((process, (tracked.domain.clone(), Arc::clone(tracked.sketches.as_ref()?))))
        });
        self.shared.control.set_contents(contents.collect());
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

/// Start the thread if the configuration asks for it. A recording is only advised on, and a simulated host has none, since
/// the thread keeps real time.
pub fn start(host: &'static dyn Host, global: &GlobalOptions) -> anyhow::Result<Option<PlacementThread>> {
    let Some(mut settings) = Config::load(global)?.placement.filter(|_| !host_selection::is_simulated(global)) else {
        return Ok(None);
    };
    settings.acts &= global.host == "live";
    let mode = if settings.acts { PlacementModeName::Act } else { PlacementModeName::Advise };
    let shared = Arc::new(SharedPlacement { mode, ..SharedPlacement::default() });
    let (directory, own) = (global.state.clone(), Arc::clone(&shared));
    let keep = move || {
        let mut last_logged = String::new();
        PlacementKeeper::new(host, directory, settings, |host| placement_rivals(host).next()).run(
            &own.control,
            &mut |report| {
                let last = {
                    let mut shared = own.report.lock().unwrap_or_else(PoisonError::into_inner);
                    std::mem::replace(&mut *shared, report.clone())
                };
                if let Some(news) = describe_news(&last, report)
                    && news != last_logged
                {
                    log_line(&format!("placement on NUMA nodes: {news}"));
                    last_logged = news;
                }
            },
        );
    };
    let thread = thread::Builder::new().name("placement".to_owned()).spawn(keep).context("cannot start a thread")?;
    Ok(Some(PlacementThread { shared, thread: Some(thread) }))
}

/// What the log says of a new report: the result of a plan, else why the placement is idle or paused.
fn describe_news(last: &KeeperReport, report: &KeeperReport) -> Option<String> {
    match (&report.last_plan, &report.activity) {
        (Some(plan), _) if report.last_plan != last.last_plan => Some(plan.result.clone()),
        (_, KeeperActivity::Idle(_) | KeeperActivity::Paused) => Some(report.activity.describe()),
        (_, KeeperActivity::Planning | KeeperActivity::Placing { .. }) => None,
    }
}
