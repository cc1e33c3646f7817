//! The fixture, and a server that shows it.
#![allow(dead_code, reason = "each test uses what it needs")]

use pagefold_daemon::wire::Status;
use pagefold_watch::Board;
use pagefold_watch::http::Server;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A path from the root of the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// The status that all faces are tested with.
pub fn status() -> Status {
    let text = std::fs::read_to_string(repository("fixtures/status.json")).expect("the fixture");
    serde_json::from_str(&text).expect("a status")
}

/// A status with nothing in it that may be absent.
pub fn bare() -> Status {
    let mut document = serde_json::to_value(status()).unwrap();
    for name in ["ksm", "resident", "huge_pages_split", "cow_breaks", "census", "sharing"] {
        document.as_object_mut().unwrap().remove(name);
    }
    for name in ["memory", "goal", "saved", "cpu", "decisions_by_reason", "findings_by_verdict"] {
        document[name] = serde_json::json!({});
    }
    for name in ["domains", "members", "workloads", "cgroups", "decisions", "findings"] {
        document[name] = serde_json::json!([]);
    }
    document["passes"].as_object_mut().unwrap().remove("last");
    serde_json::from_value(document).expect("a status without what may be absent")
}

/// A board that shows the fixture.
pub fn board() -> Arc<Board> {
    let board = Arc::new(Board::default());
    board.publish(status());
    board
}

/// A server of a board at a free port of loopback.
pub fn serve(board: &Arc<Board>) -> Server {
    Server::start("127.0.0.1:0".parse().unwrap(), vec!["node17".to_owned()], Arc::clone(board)).expect("a server")
}

/// A program where it is to be found, by PATH or where `labs/setup-watch.sh` puts it.
pub fn program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let mut places: Vec<PathBuf> = std::env::split_paths(&path).collect();
    places.push(repository(".cache/watch"));
    places.into_iter().map(|folder| folder.join(name)).find(|file| file.is_file())
}
