//! The daemon's HTTP server: the status is published on a board at regular intervals.

use super::{DaemonArguments, StatusSource, history_recorder, log_line};
use crate::command_line::GlobalOptions;
use crate::config::Config;
use crate::host_selection;
use anyhow::Context;
use pagefold_watch::StatusBoard;
use pagefold_watch::board::MAX_HISTORY_POINTS;
use pagefold_watch::http::Server;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The publish interval while a client follows the status.
const WATCHED_PUBLISH_INTERVAL: Duration = Duration::from_secs(2);

/// The publish interval otherwise, for metrics and the history.
const IDLE_PUBLISH_INTERVAL: Duration = Duration::from_secs(10);

/// A server that shows the status until it is dropped.
pub struct HttpStatusServer {
    board: Arc<StatusBoard>,
    _server: Server,
}

/// Serve the status of `status_source` at the address of the command line or the configuration, with the points of the history
/// at `history_path`.
pub fn start_server(
    status_source: Arc<StatusSource>,
    options: &DaemonArguments,
    history_path: Option<&Path>,
    global: &GlobalOptions,
) -> anyhow::Result<Option<HttpStatusServer>> {
    let http = Config::load(global)?.http;
    // The configured address is that of the live host's daemon.
    let configured = http.address.filter(|_| !host_selection::is_simulated(global));
    let Some(address) = options.http.or(configured) else { return Ok(None) };
    let history =
        history_path.map(|path| history_recorder::load_points(path, MAX_HISTORY_POINTS / 2)).unwrap_or_default();
    let board = Arc::new(StatusBoard::with_history(history));
    let server = Server::start(address, http.names, Arc::clone(&board))
        .with_context(|| format!("cannot listen at {address} (--http, or http in the configuration)"))?;
    let audience = if address.ip().is_loopback() { "every local user" } else { "every client that reaches it" };
    log_line(&format!("shown at http://{}/ to {audience}", server.address()));
    let thread_board = Arc::clone(&board);
    std::thread::Builder::new().name("figures".to_owned()).spawn(move || {
        while !thread_board.is_closed() {
            // If the daemon's work hangs, publish nothing, so that probes fail like systemd's watchdog.
            if let Some(snapshot) = status_source.request_snapshot().filter(|snapshot| !snapshot.is_hung) {
                thread_board.publish(status_source.build_status(&snapshot));
            }
            thread_board.wait_until_due(WATCHED_PUBLISH_INTERVAL, IDLE_PUBLISH_INTERVAL);
        }
    })?;
    Ok(Some(HttpStatusServer { board, _server: server }))
}

impl Drop for HttpStatusServer {
    fn drop(&mut self) {
        self.board.close();
    }
}
