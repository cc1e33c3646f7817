//! The thread of the daemon that places virtual machines on NUMA nodes.

use super::log_line;
use crate::command_line::GlobalOptions;
use crate::config::Config;
use anyhow::Context;
use pagefold_host::Host;
use pagefold_numa::keeper::PlacementKeeper;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// The running thread. Dropping this ends it, and undoes a placement that is under way.
pub struct PlacementThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for PlacementThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Start the thread if the configuration asks for it. A recording is only advised on.
pub fn start(host: &'static dyn Host, global: &GlobalOptions) -> anyhow::Result<Option<PlacementThread>> {
    let Some(mut settings) = Config::load(global)?.placement else { return Ok(None) };
    settings.acts &= global.host == "live";
    let (stop, directory) = (Arc::new(AtomicBool::new(false)), global.state.clone());
    let stop_flag = Arc::clone(&stop);
    let keep = move || {
        let mut last = String::new();
        PlacementKeeper::new(host, directory, settings).run(&stop_flag, &mut |report| {
            if report.outcome != last {
                log_line(&format!("placement on NUMA nodes: {}", report.outcome));
                last.clone_from(&report.outcome);
            }
        });
    };
    let thread = thread::Builder::new().name("placement".to_owned()).spawn(keep).context("cannot start a thread")?;
    Ok(Some(PlacementThread { stop, thread: Some(thread) }))
}
