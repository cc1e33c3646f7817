//! What the daemon shows over HTTP: its status, published on a board at even distances.

use super::{Desk, Options, history, log};
use crate::arguments::Global;
use crate::config::Config;
use anyhow::Context;
use pagefold_watch::Board;
use pagefold_watch::board::POINTS;
use pagefold_watch::http::Server;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How often the status is published while somebody follows it.
const WATCHED: Duration = Duration::from_secs(2);

/// How often it is otherwise, for metrics and for the past.
const UNWATCHED: Duration = Duration::from_secs(10);

/// A server that shows the status, until it is dropped.
pub struct Shown {
    board: Arc<Board>,
    _server: Server,
}

/// Show what the desk tells where the command line or the configuration says, with the past that is in a history.
pub fn show(desk: Arc<Desk>, options: &Options, past: Option<&Path>, global: &Global) -> anyhow::Result<Option<Shown>> {
    let http = Config::load(global)?.http;
    let Some(address) = options.http.or(http.address) else { return Ok(None) };
    let past = past.map(|path| history::past(path, POINTS / 2)).unwrap_or_default();
    let board = Arc::new(Board::with_past(past));
    let server = Server::start(address, http.names, Arc::clone(&board))
        .with_context(|| format!("cannot listen at {address} (--http, or http in the configuration)"))?;
    let told = if address.ip().is_loopback() { "every local user" } else { "whoever reaches it" };
    log(&format!("shown at http://{}/ to {told}", server.address()));
    let published = Arc::clone(&board);
    std::thread::Builder::new().name("figures".to_owned()).spawn(move || {
        while !published.is_closed() {
            // As systemd is told no more of a daemon whose work hangs, so is whoever probes it.
            if let Some(snapshot) = desk.snapshot().filter(|snapshot| !snapshot.hung) {
                published.publish(desk.status(&snapshot));
            }
            published.pause(WATCHED, UNWATCHED);
        }
    })?;
    Ok(Some(Shown { board, _server: server }))
}

impl Drop for Shown {
    fn drop(&mut self) {
        self.board.close();
    }
}
